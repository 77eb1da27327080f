#include "schedule.h"

#include <errno.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "clock.h"

/* How far behind a request that is held back (its block is being rewritten, no bounce memory) to look for
 * another. */
#define LOOK_AHEAD 64

enum start { START_OK, START_HELD, START_FULL };

static int direction(const struct request *r) {
    return r->operation >= LAMINA_FSYNC ? 2 : r->operation;
}

static struct lamina_direction_stats *direction_stats(struct device *d, int which) {
    return which == 0 ? &d->stats.read : which == 1 ? &d->stats.write : &d->stats.sync;
}

/* Books the time since the last change of what is in flight. */
static void account_time(struct device *d, uint64_t now) {
    stats_book(&d->stats, d, now);
    d->since_ns = now;
}

static void account_start(struct piece *p) {
    struct device *d = p->request->file->device;
    p->started_ns = now_ns();
    account_time(d, p->started_ns);
    p->alone_before_ns = direction_stats(d, direction(p->request))->alone_ns;
    d->inflight[direction(p->request)]++;
    d->stats.inflight_bytes += p->user_bytes;
    if (++d->stats.inflight > d->stats.max_inflight)
        d->stats.max_inflight = d->stats.inflight;
    if (d->stats.inflight_bytes > d->stats.max_inflight_bytes)
        d->stats.max_inflight_bytes = d->stats.inflight_bytes;
}

static void account_finish(struct piece *p, uint64_t good) {
    struct device *d = p->request->file->device;
    int which = direction(p->request);
    struct lamina_direction_stats *s = direction_stats(d, which);
    uint64_t now = now_ns(), latency = now - p->started_ns, bucket = 0;
    account_time(d, now);
    d->inflight[which]--;
    d->stats.inflight--;
    d->stats.inflight_bytes -= p->user_bytes;
    s->bytes += good;
    /* It is taken to have got on evenly: disks work at many pieces at once. */
    double alone = latency ? (double)(s->alone_ns - p->alone_before_ns) / (double)latency : 0;
    s->alone_bytes += (uint64_t)((double)good * alone);
    s->operations++;
    s->errors += p->error != 0 || good < p->user_bytes;
    s->bounced_bytes += p->bounce ? good : 0;
    s->latency_ns += latency;
    if (latency > s->max_latency_ns)
        s->max_latency_ns = latency;
    for (uint64_t us = latency / 1000; us > 1 && bucket < 31; us >>= 1)
        bucket++;
    s->histogram[bucket]++;
}

static int needs_bounce(const struct piece *p) {
    return p->kind == PIECE_BOUNCE || p->kind == PIECE_PARTIAL;
}

/* Fills *piece with the request's next part if that may start. */
static enum start start_piece(struct lamina_engine *e, struct request *r, struct piece *piece) {
    struct device *d = r->file->device;
    struct piece cut;
    piece_cut(&cut, r, e->config.block_bytes, e->config.bounce_block_bytes);
    if (d->stats.inflight_bytes && d->stats.inflight_bytes + cut.user_bytes > e->config.max_inflight_bytes)
        return START_FULL;
    for (const struct piece *p = e->active; p; p = p->next)
        if (piece_conflicts(p, &cut))
            return START_HELD;
    if (needs_bounce(&cut) && !(cut.bounce = bounce_take(&e->bounce)))
        return START_HELD;
    *piece = cut;
    piece->next = e->active;
    if (e->active)
        e->active->previous = piece;
    e->active = piece;
    r->cursor += piece->user_bytes;
    r->inflight++;
    account_start(piece);
    return START_OK;
}

static void enqueue(struct request *r, int in_front) {
    struct request_queue *queue = &r->file->device->queue[r->priority];
    if (in_front)
        queue_prepend(queue, r);
    else
        queue_append(queue, r);
    r->state = REQUEST_QUEUED;
    r->file->engine->num_queued[r->class]++;
}

/* Out of the queue: nothing of it is left to start. */
static void unqueue(struct request *r) {
    if (r->state == REQUEST_QUEUED) {
        queue_remove(&r->file->device->queue[r->priority], r);
        r->file->engine->num_queued[r->class]--;
    } else if (r->state == REQUEST_PARKED) {
        queue_remove(&r->file->parked, r);
    }
    r->state = REQUEST_TAKEN;
}

/* NULL when nothing of this queue may start; *full tells that the device has no room. */
static struct piece *take_from_queue(struct lamina_engine *e, struct request_queue *queue, unsigned wants,
                                     int *full) {
    int looked = 0;
    for (struct request *r = queue->first; r && looked < LOOK_AHEAD; r = r->next) {
        if (!(wants & 1u << r->class))
            continue;
        looked++;
        struct piece *piece = e->free_pieces, *rest = piece->next;
        enum start start = start_piece(e, r, piece);
        if (start == START_FULL) {
            *full = 1;
            return NULL;
        }
        if (start == START_HELD)
            continue;
        e->free_pieces = rest;
        e->num_active++;
        if (r->cursor == r->nbytes)
            unqueue(r);
        return piece;
    }
    return NULL;
}

static struct piece *take_from_devices(struct lamina_engine *e, int priority, unsigned wants) {
    struct device *first = e->turn ? e->turn : e->devices, *d = first;
    if (!d)
        return NULL;
    do {
        int full = 0;
        for (int urgent = 0; urgent < priority;
             urgent++) /* no overtaking while a more urgent one lacks room */
            full |= d->queue[urgent].first &&
                    d->stats.inflight_bytes + e->config.block_bytes > e->config.max_inflight_bytes;
        struct piece *piece = full ? NULL : take_from_queue(e, &d->queue[priority], wants, &full);
        if (piece) {
            e->turn = d->next; /* devices take turns */
            return piece;
        }
        d = d->next ? d->next : e->devices;
    } while (d != first);
    return NULL;
}

struct piece *schedule_take(struct lamina_engine *e, unsigned wants) {
    unsigned waiting = (e->num_queued[CLASS_PLAIN] ? 1u << CLASS_PLAIN : 0) |
                       (e->num_queued[CLASS_COPY] ? 1u << CLASS_COPY : 0);
    if (!(waiting & wants))
        return NULL;
    /* The last slots are kept for urgent reads, which else would wait for a piece of a write-back to end. */
    uint32_t depth = e->config.queue_depth, kept = depth >= 4 ? (depth + 7) / 8 : 0;
    for (int priority = 0; priority < NUM_PRIORITIES; priority++) {
        if (e->num_active >= (priority == LAMINA_DEMAND ? depth : depth - kept))
            return NULL;
        struct piece *piece = take_from_devices(e, priority, wants);
        if (piece)
            return piece;
    }
    return NULL;
}

int schedule_waiting(const struct lamina_engine *e) {
    return e->num_queued[CLASS_PLAIN] || e->num_queued[CLASS_COPY];
}

int schedule_take_from(struct lamina_engine *e, struct request *r, struct piece *piece) {
    return start_piece(e, r, piece) == START_OK;
}

/* The waiter cannot free the transfer before this thread gives the lock back. */
static void transfer_done(struct lamina_engine *e, struct lamina_transfer *t) {
    *(t->previous ? &t->previous->next : &e->unfinished) = t->next;
    if (t->next)
        t->next->previous = t->previous;
    t->next = t->previous = NULL;
    if (t->cancelled && !t->failed)
        t->result.error = ECANCELED;
    __atomic_store_n(&t->done, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&t->waiters, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &t->done, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
    pthread_cond_broadcast(&e->quiet);
    if (t->orphan) {
        free(t);
        e->references--; /* never the last one: the opener's goes after everything has ended */
    }
}

static void forget_write(struct request *r) {
    struct file *f = r->file;
    *(r->previous_write ? &r->previous_write->next_write : &f->first_write) = r->next_write;
    *(r->next_write ? &r->next_write->previous_write : &f->last_write) = r->previous_write;
}

/* Syncs whose earlier writes are all done get going. */
static void unpark(struct file *f) {
    struct request *r;
    while ((r = f->parked.first) && !(f->first_write && f->first_write->sequence < r->sequence)) {
        queue_remove(&f->parked, r);
        enqueue(r, 0);
    }
}

static void record(struct lamina_transfer *t, const struct request *r, uint64_t got) {
    t->result.error = r->error;
    t->result.extent = (uint32_t)(r - t->requests);
    t->result.wanted = r->nbytes;
    t->result.got = got;
}

static void request_done(struct lamina_engine *e, struct request *r) {
    struct lamina_transfer *t = r->transfer;
    struct file *f = r->file;
    int failed = r->good != UINT64_MAX, first = failed && !t->failed;
    r->state = REQUEST_DONE;
    t->result.bytes += r->moved;
    if (failed ? first || r < &t->requests[t->result.extent] : r->dropped && t->cancelled && !t->failed)
        record(t, r, failed ? r->good : r->moved);
    t->failed |= failed;
    f->unfinished--;
    if (r->operation == LAMINA_WRITE) {
        forget_write(r);
        unpark(f);
    }
    if (!f->unfinished && f->closing)
        pthread_cond_broadcast(&e->quiet);
    if (--t->remaining == 0)
        transfer_done(e, t);
    else if (first)
        schedule_drop(e, t, 0);
}

int schedule_drop(struct lamina_engine *e, struct lamina_transfer *t, int cancel) {
    struct request *end = t->requests + t->count;
    int dropped = 0;
    t->remaining++; /* keeps the transfer unfinished until the loop is over */
    for (struct request *r = t->requests; r < end; r++) {
        if (r->state == REQUEST_DONE || r->dropped || (r->state == REQUEST_TAKEN && r->cursor == r->nbytes))
            continue;
        dropped = r->dropped = 1;
        t->cancelled |= cancel;
        unqueue(r);
        if (!r->inflight)
            request_done(e, r);
    }
    if (--t->remaining == 0)
        transfer_done(e, t);
    return dropped;
}

void schedule_add(struct lamina_engine *e, struct request *r) {
    struct file *f = r->file;
    r->sequence = ++e->sequence;
    f->unfinished++;
    if (r->operation == LAMINA_WRITE) {
        r->previous_write = f->last_write;
        *(f->last_write ? &f->last_write->next_write : &f->first_write) = r;
        f->last_write = r;
    }
    if (r->operation >= LAMINA_FSYNC) {
        r->state = REQUEST_PARKED;
        queue_append(&f->parked, r);
        unpark(f);
    } else if (r->nbytes == 0) {
        request_done(e, r);
    } else {
        r->class = piece_needs_copies(r) ? CLASS_COPY : CLASS_PLAIN;
        enqueue(r, 0);
    }
}

void schedule_submitted(struct lamina_engine *e, struct lamina_transfer *t) {
    if (--t->remaining == 0)
        transfer_done(e, t);
}

void schedule_claim(struct request *r) {
    unqueue(r);
}

void schedule_unclaim(struct request *r) {
    enqueue(r, 1);
}

void schedule_finish(struct lamina_engine *e, struct piece *p) {
    struct request *r = p->request;
    uint64_t good = piece_good(p), from = p->user_offset - r->offset;
    account_finish(p, good);
    *(p->previous ? &p->previous->next : &e->active) = p->next;
    if (p->next)
        p->next->previous = p->previous;
    if (p->bounce)
        bounce_give(&e->bounce, p->bounce);
    r->moved += good;
    r->inflight--;
    if ((p->error || good < p->user_bytes) && from + good < r->good) {
        r->good = from + good;
        r->error = p->error;
        r->dropped = 1; /* a request that failed starts no more pieces */
        unqueue(r);
    }
    if (p >= e->pieces && p < e->pieces + e->config.queue_depth) {
        p->next = e->free_pieces;
        p->previous = NULL;
        e->free_pieces = p;
        e->num_active--;
    }
    if (!r->inflight && (r->cursor == r->nbytes || r->dropped))
        request_done(e, r);
}
