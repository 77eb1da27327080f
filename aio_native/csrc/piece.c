#include "piece.h"

#include <errno.h>
#include <sched.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* A request up to this size that is not aligned is read through one bounce block instead of three pieces. */
#define WHOLE_BOUNCE_BYTES ((uint64_t)64 << 10)

static uint64_t least(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

static uint64_t most(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

static uint64_t round_down(uint64_t value, uint64_t unit) {
    return value - value % unit;
}

static int memory_fits(const struct file *file, const char *address) {
    return (uintptr_t)address % file->spec.memory_align == 0;
}

static void cut_plain(struct piece *p, uint64_t nbytes) {
    p->kind = PIECE_PLAIN;
    p->user_bytes = p->span_bytes = p->need = nbytes;
    p->span_offset = p->user_offset;
}

static void cut_read(struct piece *p, struct request *r, uint64_t left, uint64_t block_bytes,
                     uint64_t bounce_bytes) {
    uint64_t align = r->file->spec.offset_align, skew = p->user_offset % align;
    if (!skew && left >= align && memory_fits(r->file, p->user)) {
        cut_plain(p, least(block_bytes, round_down(left, align)));
        return;
    }
    uint64_t bytes = least(left, bounce_bytes - skew), to_edge = align - skew;
    /* Only the head is crooked: bounce it alone, the rest goes straight. */
    if (skew && left > WHOLE_BOUNCE_BYTES && memory_fits(r->file, p->user + to_edge))
        bytes = least(left, to_edge);
    p->kind = PIECE_BOUNCE;
    p->user_bytes = bytes;
    p->span_offset = p->user_offset - skew;
    p->need = skew + bytes;
    p->span_bytes = (p->need + align - 1) / align * align;
}

static void cut_write(struct piece *p, struct request *r, uint64_t left, uint64_t block_bytes,
                      uint64_t bounce_bytes) {
    uint64_t unit = r->file->write_block, skew = p->user_offset % unit;
    if (skew || left < unit) {
        p->kind = PIECE_PARTIAL;
        p->user_bytes = least(left, unit - skew);
        p->span_offset = p->user_offset - skew;
        p->span_bytes = p->need = unit;
        return;
    }
    int fits = memory_fits(r->file, p->user);
    cut_plain(p, least(fits ? block_bytes : bounce_bytes, round_down(left, unit)));
    p->kind = fits ? PIECE_PLAIN : PIECE_BOUNCE;
}

void piece_cut(struct piece *p, struct request *r, uint64_t block_bytes, uint64_t bounce_bytes) {
    uint64_t left = r->nbytes - r->cursor;
    *p = (struct piece){.request = r, .fd = r->file->spec.fd, .operation = r->operation};
    p->user = r->address + r->cursor;
    p->user_offset = r->offset + r->cursor;
    if (r->operation >= LAMINA_FSYNC)
        p->kind = PIECE_SYNC;
    else if (!r->file->spec.direct)
        cut_plain(p, least(block_bytes, left));
    else if (r->operation == LAMINA_READ)
        cut_read(p, r, left, block_bytes, bounce_bytes);
    else
        cut_write(p, r, left, block_bytes, bounce_bytes);
}

int piece_needs_copies(const struct request *r) {
    const struct file *file = r->file;
    uint64_t unit = r->operation == LAMINA_READ ? file->spec.offset_align : file->write_block;
    if (!file->spec.direct || r->nbytes <= WHOLE_BOUNCE_BYTES)
        return 0;
    return !memory_fits(file, r->address + (unit - r->offset % unit) % unit);
}

int piece_conflicts(const struct piece *a, const struct piece *b) {
    if (a->request->file != b->request->file || a->request->operation != LAMINA_WRITE ||
        b->request->operation != LAMINA_WRITE || (a->kind != PIECE_PARTIAL && b->kind != PIECE_PARTIAL))
        return 0;
    return a->span_offset < b->span_offset + b->span_bytes && b->span_offset < a->span_offset + a->span_bytes;
}

static void aim(struct piece *p, char *address, uint64_t nbytes, uint64_t offset) {
    p->address = address + p->moved;
    p->nbytes = nbytes - p->moved;
    p->offset = offset + p->moved;
}

static void begin(struct piece *p, enum piece_phase phase) {
    p->phase = phase;
    p->moved = p->best = 0;
    p->fd = p->request->file->spec.fd;
    p->operation = p->request->operation;
    if (phase == PHASE_FILL)
        p->operation = LAMINA_READ;
    if (phase == PHASE_EXTEND) {
        p->fd = p->request->file->spec.buffered_fd;
        aim(p, p->user, p->user_bytes, p->user_offset);
    } else {
        aim(p, p->bounce ? p->bounce : p->user, p->span_bytes, p->span_offset);
    }
}

void piece_prepare(struct piece *p) {
    if (p->kind == PIECE_PARTIAL) {
        struct stat status;
        if (fstat(p->request->file->spec.fd, &status))
            status.st_size = 0;
        int inside = p->span_offset + p->span_bytes <= (uint64_t)status.st_size;
        begin(p, S_ISBLK(status.st_mode) || inside ? PHASE_FILL : PHASE_EXTEND);
        return;
    }
    if (p->kind == PIECE_BOUNCE && p->operation == LAMINA_WRITE)
        memcpy(p->bounce, p->user, p->user_bytes);
    begin(p, PHASE_MOVE);
}

static uint64_t skip(const struct piece *p) {
    return p->user_offset - p->span_offset;
}

uint64_t piece_good(const struct piece *p) {
    if (p->kind == PIECE_SYNC)
        return 0;
    if (p->phase == PHASE_FILL)
        return 0;
    if (p->phase == PHASE_EXTEND || p->kind == PIECE_PLAIN)
        return least(p->best, p->user_bytes);
    return p->best > skip(p) ? least(p->best - skip(p), p->user_bytes) : 0;
}

static enum piece_verdict finish(struct piece *p, int error) {
    p->error = error;
    if (p->kind == PIECE_BOUNCE && p->operation == LAMINA_READ)
        memcpy(p->user, p->bounce + skip(p), piece_good(p));
    return PIECE_DONE;
}

/* Wanted bytes of the phase are there: the next phase, or the end. */
static enum piece_verdict phase_over(struct piece *p) {
    if (p->phase != PHASE_FILL)
        return finish(p, 0);
    memcpy(p->bounce + skip(p), p->user, p->user_bytes);
    begin(p, PHASE_MOVE);
    return PIECE_AGAIN;
}

/* No more bytes come. A read meets the end of the file: no error, just fewer bytes. */
static enum piece_verdict stopped(struct piece *p) {
    if (p->phase == PHASE_FILL) { /* the file was cut short under us */
        begin(p, PHASE_EXTEND);
        return PIECE_AGAIN;
    }
    return finish(p, p->operation == LAMINA_READ ? 0 : EIO);
}

enum piece_verdict piece_advance(struct piece *p, int64_t outcome) {
    if (outcome == -EINTR)
        return PIECE_AGAIN;
    if (outcome == -EAGAIN && !p->force_async) {
        p->force_async = 1;
        return PIECE_AGAIN;
    }
    if (outcome < 0)
        return finish(p, (int)-outcome);
    if (p->kind == PIECE_SYNC)
        return PIECE_DONE;
    int extend = p->phase == PHASE_EXTEND, reading = p->operation == LAMINA_READ;
    uint64_t whole = extend ? p->user_bytes : p->span_bytes, total = p->moved + (uint64_t)outcome;
    int grown = total > p->best;
    p->best = grown ? total : p->best;
    if (total >= (reading ? p->need : whole))
        return phase_over(p);
    if (!grown)
        return stopped(p);
    struct file *file = p->request->file;
    /* What is left must again be aligned, in the file and in memory. */
    uint64_t unit = most(file->spec.offset_align, file->spec.memory_align);
    p->moved = extend || !file->spec.direct ? total : round_down(total, unit);
    if (extend)
        aim(p, p->user, whole, p->user_offset);
    else
        aim(p, p->bounce ? p->bounce : p->user, whole, p->span_offset);
    return PIECE_AGAIN;
}

static int64_t operate(const struct piece *p) {
    ssize_t n;
    switch (p->operation) {
    case LAMINA_READ:
        n = pread(p->fd, p->address, p->nbytes, (off_t)p->offset);
        break;
    case LAMINA_WRITE:
        n = pwrite(p->fd, p->address, p->nbytes, (off_t)p->offset);
        break;
    case LAMINA_FSYNC:
        n = fsync(p->fd);
        break;
    default:
        n = fdatasync(p->fd);
        break;
    }
    return n < 0 ? -errno : n;
}

void piece_run(struct piece *p) {
    int64_t outcome;
    do {
        outcome = operate(p);
        if (outcome == -EAGAIN)
            sched_yield();
    } while (piece_advance(p, outcome) == PIECE_AGAIN);
}
