#include "transfer.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "clock.h"
#include "schedule.h"

static int check_extent(struct lamina_engine *e, const struct lamina_extent *x) {
    if (x->operation < LAMINA_READ || x->operation > LAMINA_FDATASYNC)
        return -EINVAL;
    if (x->offset > (uint64_t)INT64_MAX || x->nbytes > (uint64_t)INT64_MAX - x->offset)
        return -EOVERFLOW;
    return file_find(e, x->file) ? 0 : -EBADF;
}

static void fill_request(struct lamina_engine *e, struct lamina_transfer *t, struct request *r,
                         const struct lamina_extent *x, int priority) {
    r->transfer = t;
    r->file = file_find(e, x->file);
    r->address = x->address;
    r->nbytes = x->operation >= LAMINA_FSYNC ? 0 : x->nbytes;
    r->offset = x->offset;
    r->operation = (enum lamina_operation)x->operation;
    r->priority = priority;
    r->good = UINT64_MAX;
}

static void link_transfer(struct lamina_engine *e, struct lamina_transfer *t) {
    t->next = e->unfinished;
    if (e->unfinished)
        e->unfinished->previous = t;
    e->unfinished = t;
    e->references++;
}

/* Queues the extents; the driver is woken unless the caller means to do the work (kick == 0). */
static struct lamina_transfer *submit(struct lamina_engine *e, const struct lamina_extent *extents,
                                      uint32_t count, int priority, int kick) {
    struct lamina_transfer *t = calloc(1, sizeof *t + count * sizeof t->requests[0]);
    if (!t) {
        errno = ENOMEM;
        return NULL;
    }
    t->engine = e;
    t->count = count;
    t->remaining = count + 1; /* one for the submission itself */
    pthread_mutex_lock(&e->lock);
    int rc = priority < 0 || priority >= NUM_PRIORITIES ? -EINVAL : e->closing ? -ESHUTDOWN : 0;
    for (uint32_t i = 0; i < count && !rc; i++)
        rc = check_extent(e, &extents[i]);
    if (rc) {
        pthread_mutex_unlock(&e->lock);
        free(t);
        errno = -rc;
        return NULL;
    }
    link_transfer(e, t);
    for (uint32_t i = 0; i < count; i++)
        fill_request(e, t, &t->requests[i], &extents[i], priority);
    for (uint32_t i = 0; i < count; i++)
        schedule_add(e, &t->requests[i]);
    schedule_submitted(e, t);
    if (kick && schedule_waiting(e))
        e->driver->kick(e);
    pthread_mutex_unlock(&e->lock);
    return t;
}

struct lamina_transfer *lamina_submit(struct lamina_engine *e, const struct lamina_extent *extents,
                                      uint32_t count, int priority) {
    return submit(e, extents, count, priority, 1);
}

struct lamina_transfer *lamina_submit_one(struct lamina_engine *e, int64_t file, int operation, void *address,
                                          uint64_t nbytes, uint64_t offset, int priority) {
    struct lamina_extent extent = {
        .file = file, .address = address, .nbytes = nbytes, .offset = offset, .operation = operation};
    return submit(e, &extent, 1, priority, 1);
}

int lamina_transfer_done(struct lamina_transfer *t) {
    return (int)__atomic_load_n(&t->done, __ATOMIC_ACQUIRE);
}

/* [Note: doing it oneself] A thread that is about to sleep until one small request ends carries the request
 * out itself if no piece of it has started: that saves two changes of thread, which cost more than the
 * device's own latency. The driver was woken at submit all the same, so a request that nobody waits for
 * starts at once too. */
static void do_it_oneself(struct lamina_transfer *t) {
    struct lamina_engine *e = t->engine;
    struct request *r = t->requests;
    struct piece piece;
    if (t->count != 1 || r->operation >= LAMINA_FSYNC || r->nbytes > e->config.inline_bytes)
        return;
    pthread_mutex_lock(&e->lock);
    if (r->state != REQUEST_QUEUED || r->cursor) {
        pthread_mutex_unlock(&e->lock);
        return;
    }
    schedule_claim(r);
    while (r->state == REQUEST_TAKEN && r->cursor < r->nbytes && schedule_take_from(e, r, &piece)) {
        pthread_mutex_unlock(&e->lock);
        piece_prepare(&piece);
        piece_run(&piece);
        pthread_mutex_lock(&e->lock);
        schedule_finish(e, &piece);
    }
    if (r->state == REQUEST_TAKEN && r->cursor < r->nbytes)
        schedule_unclaim(r);
    if (schedule_waiting(e)) /* the end of this one may have let another start */
        e->driver->kick(e);
    pthread_mutex_unlock(&e->lock);
}

struct lamina_transfer *lamina_perform(struct lamina_engine *e, int64_t file, int operation, void *address,
                                       uint64_t nbytes, uint64_t offset, int priority) {
    struct lamina_extent extent = {
        .file = file, .address = address, .nbytes = nbytes, .offset = offset, .operation = operation};
    int small = operation < LAMINA_FSYNC && nbytes <= e->config.inline_bytes;
    struct lamina_transfer *t = submit(e, &extent, 1, priority, !small);
    if (t && small)
        do_it_oneself(t); /* wakes the driver if it cannot */
    return t;
}

int lamina_transfer_wait(struct lamina_transfer *t, int64_t timeout_ns) {
    if (lamina_transfer_done(t))
        return 0;
    if (t->engine->owner != getpid())
        return -EPERM;
    if (timeout_ns < 0)
        do_it_oneself(t);
    uint64_t deadline = now_ns() + (timeout_ns < 0 ? 0 : (uint64_t)timeout_ns);
    int rc = 0;
    __atomic_fetch_add(&t->waiters, 1, __ATOMIC_SEQ_CST);
    while (!rc && !__atomic_load_n(&t->done, __ATOMIC_SEQ_CST)) {
        uint64_t now = now_ns(), left = deadline > now ? deadline - now : 0;
        struct timespec span = {.tv_sec = (time_t)(left / 1000000000u),
                                .tv_nsec = (long)(left % 1000000000u)};
        if (timeout_ns >= 0 && !left)
            rc = -ETIMEDOUT;
        else if (syscall(SYS_futex, &t->done, FUTEX_WAIT_PRIVATE, 0, timeout_ns < 0 ? NULL : &span, NULL,
                         0) &&
                 errno != EAGAIN && errno != ETIMEDOUT)
            rc = -errno;
    }
    __atomic_fetch_sub(&t->waiters, 1, __ATOMIC_SEQ_CST);
    return lamina_transfer_done(t) ? 0 : rc;
}

int64_t lamina_transfer_bytes(const struct lamina_transfer *t) {
    int good = !t->result.error && t->result.got == t->result.wanted;
    return good ? (int64_t)t->result.bytes : -1;
}

void lamina_transfer_result(const struct lamina_transfer *t, struct lamina_result *result) {
    *result = t->result;
}

int lamina_transfer_cancel(struct lamina_transfer *t) {
    if (lamina_transfer_done(t))
        return 0;
    struct lamina_engine *e = t->engine;
    pthread_mutex_lock(&e->lock);
    int dropped = !t->done && schedule_drop(e, t, 1);
    if (schedule_waiting(e))
        e->driver->kick(e);
    pthread_mutex_unlock(&e->lock);
    return dropped;
}

void lamina_transfer_release(struct lamina_transfer *t) {
    struct lamina_engine *e = t->engine;
    if (e->owner != getpid()) /* after a fork the lock may be held by a thread that is not here */
        return;
    pthread_mutex_lock(&e->lock);
    if (t->done) {
        free(t);
        engine_release(e);
        return;
    }
    t->orphan = 1;
    pthread_mutex_unlock(&e->lock);
}
