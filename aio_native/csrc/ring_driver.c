/* Carries pieces out with io_uring. One thread owns the ring: it makes it, submits, reaps and registers,
 * which lets the kernel skip its locks (SINGLE_ISSUER) and do completion work when it is asked for
 * (DEFER_TASKRUN). */
#include <errno.h>
#include <liburing.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "pool.h"
#include "ring_slots.h"
#include "schedule.h"
#include "time_slice.h"

#define REAP_BATCH 32

/* [Note: large pieces go alone] What is submitted together, the block layer merges where it is adjacent, up
 * to the device's largest request. That helps small pieces, and costs a tenth of the rate of large ones: a
 * few requests of several MiB keep a device less evenly busy than many of one. */
#define ALONE_BYTES ((uint64_t)256 << 10)

/* Something that only the ring's thread may do, asked for by another. */
struct command {
    struct command *next;
    enum { COMMAND_REGISTER, COMMAND_UNREGISTER, COMMAND_FORGET_FILE } what;
    char *address;
    uint64_t nbytes;
    struct file *file;
    int result;
    int done;
};

struct ring {
    struct lamina_engine *engine;
    struct io_uring ring;
    pthread_t thread;
    pthread_cond_t work;    /* the thread sleeps here while nothing is in flight */
    pthread_cond_t changed; /* started, or a command is done */
    struct command *commands;
    int wake_fd; /* wakes the thread while it waits for completions */
    int wake_armed;
    int wake_sent;
    int waiting; /* the thread is in the kernel, or about to be */
    int started; /* 1: running, < 0: -errno */
    int stopping;
    uint32_t inflight; /* pieces handed to the kernel or about to be; the ring's thread only */
    uint32_t setup_flags, refused_flags, kernel_flags;
    struct ring_slots slots;
    int bounce_tried;
    struct pool *helpers; /* they copy: requests of CLASS_COPY are theirs */
    unsigned wants;       /* what the ring's thread takes; all when no helper is to be had */
};

static int open_ring(struct ring *r, const struct lamina_config *config) {
    static const uint32_t choices[] = {
#if defined(IORING_SETUP_SINGLE_ISSUER) && defined(IORING_SETUP_DEFER_TASKRUN)
        IORING_SETUP_SUBMIT_ALL | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
#endif
#ifdef IORING_SETUP_COOP_TASKRUN
        IORING_SETUP_SUBMIT_ALL | IORING_SETUP_COOP_TASKRUN,
#endif
        0,
    };
    int rc = -EINVAL;
    for (size_t i = 0; i < sizeof choices / sizeof choices[0] && rc == -EINVAL; i++) {
        /* Every piece, the wake-up poll and a spare fit, so neither ring can overflow. */
        struct io_uring_params params = {.flags = choices[i] | IORING_SETUP_CLAMP};
        rc = io_uring_queue_init_params(config->queue_depth + 2, &r->ring, &params);
        r->refused_flags |= choices[i];
        r->setup_flags = params.flags;
        r->kernel_flags = params.features;
    }
    r->refused_flags &= ~r->setup_flags;
    return rc;
}

/* Reading and writing at an offset came with 5.6; before that the threads are the better choice. */
static int check_operations(struct ring *r) {
    static const int needed[] = {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_FSYNC, IORING_OP_POLL_ADD};
    struct io_uring_probe *probe = io_uring_get_probe_ring(&r->ring);
    int rc = probe ? 0 : -ENOSYS;
    for (size_t i = 0; probe && i < sizeof needed / sizeof needed[0]; i++)
        if (!io_uring_opcode_supported(probe, needed[i]))
            rc = -ENOSYS;
    if (probe)
        io_uring_free_probe(probe);
    return rc;
}

static void run_commands(struct ring *r) {
    while (r->commands) {
        struct command *c = r->commands;
        r->commands = c->next;
        switch (c->what) {
        case COMMAND_REGISTER:
            c->result = slots_add_memory(&r->slots, c->address, c->nbytes);
            break;
        case COMMAND_UNREGISTER:
            slots_drop_memory(&r->slots, c->address, c->nbytes);
            break;
        case COMMAND_FORGET_FILE:
            slots_give_file(&r->slots, c->file);
            break;
        }
        c->done = 1;
        pthread_cond_broadcast(&r->changed);
    }
}

static struct io_uring_sqe *get_sqe(struct ring *r) {
    struct io_uring_sqe *sqe = io_uring_get_sqe(&r->ring);
    while (!sqe) { /* cannot be: the ring has room for every piece; submitting makes room all the same */
        io_uring_submit(&r->ring);
        sqe = io_uring_get_sqe(&r->ring);
    }
    return sqe;
}

static void queue_piece(struct ring *r, struct piece *p) {
    struct io_uring_sqe *sqe = get_sqe(r);
    struct file *file = p->request->file;
    /* A length is 32 bits in the ring; block_bytes is far below that. */
    unsigned nbytes = (unsigned)p->nbytes;
    int buffer = p->operation < LAMINA_FSYNC ? slots_find_memory(&r->slots, p->address, p->nbytes) : -1;
    if (file->fixed_slot == -1)
        slots_take_file(&r->slots, file);
    int fixed = p->fd == file->spec.fd && file->fixed_slot >= 0, fd = fixed ? file->fixed_slot : p->fd;
    if (p->operation == LAMINA_READ && buffer >= 0)
        io_uring_prep_read_fixed(sqe, fd, p->address, nbytes, p->offset, buffer);
    else if (p->operation == LAMINA_READ)
        io_uring_prep_read(sqe, fd, p->address, nbytes, p->offset);
    else if (p->operation == LAMINA_WRITE && buffer >= 0)
        io_uring_prep_write_fixed(sqe, fd, p->address, nbytes, p->offset, buffer);
    else if (p->operation == LAMINA_WRITE)
        io_uring_prep_write(sqe, fd, p->address, nbytes, p->offset);
    else
        io_uring_prep_fsync(sqe, fd, p->operation == LAMINA_FDATASYNC ? IORING_FSYNC_DATASYNC : 0);
    sqe->flags |= (fixed ? IOSQE_FIXED_FILE : 0) | (p->force_async ? IOSQE_ASYNC : 0);
    io_uring_sqe_set_data(sqe, p);
}

static void arm_wake(struct ring *r) {
    if (r->wake_armed)
        return;
    struct io_uring_sqe *sqe = get_sqe(r);
    io_uring_prep_poll_add(sqe, r->wake_fd, POLLIN);
    io_uring_sqe_set_data(sqe, NULL);
    r->wake_armed = 1;
}

/* The bounce memory is registered when it is first needed. */
static void prepare_piece(struct ring *r, struct piece *p) {
    struct bounce_pool *pool = &r->engine->bounce;
    if (p->bounce && !r->bounce_tried && r->slots.num_buffers) {
        r->bounce_tried = 1;
        /* plain transfers do as well */
        (void)slots_add_memory(&r->slots, pool->base, pool->block_bytes * pool->num_blocks);
    }
    piece_prepare(p);
    queue_piece(r, p);
    r->inflight++;
    if (p->bounce || p->nbytes >= ALONE_BYTES) /* bounce: the device works while the next block is copied */
        io_uring_submit(&r->ring);
}

/* Lock held on entry and return, and not given up after the last look for work: a kick in between would be
 * lost. */
static void start_pieces(struct ring *r) {
    struct lamina_engine *e = r->engine;
    struct piece *batch[REAP_BATCH];
    for (;;) {
        uint32_t count = 0;
        while (count < REAP_BATCH && (batch[count] = schedule_take(e, r->wants)))
            if (batch[count++]
                    ->bounce) /* one copy at a time, so that the device is not kept waiting for all */
                break;
        if (!count)
            return;
        pthread_mutex_unlock(&e->lock);
        for (uint32_t i = 0; i < count; i++)
            prepare_piece(r, batch[i]);
        pthread_mutex_lock(&e->lock);
    }
}

/* Lock held. */
static void kick_helpers(struct ring *r) {
    if (r->engine->num_queued[CLASS_COPY] && pool_kick(r->helpers))
        r->wants = TAKE_ALL; /* no thread to be had */
}

/* Handles what has come back, one batch at most; the lock is not held. Returns how many came. */
static uint32_t reap(struct ring *r) {
    struct lamina_engine *e = r->engine;
    struct io_uring_cqe *cqes[REAP_BATCH];
    struct piece *finished[REAP_BATCH];
    uint32_t ended = 0, count = io_uring_peek_batch_cqe(&r->ring, cqes, REAP_BATCH);
    int bounced = 0;
    uint32_t i = 0;
    for (; i < count && !bounced; i++) {
        struct piece *p = io_uring_cqe_get_data(cqes[i]);
        int outcome = cqes[i]->res;
        if (!p) {
            uint64_t value;
            r->wake_armed = 0;
            (void)!read(r->wake_fd, &value, sizeof value); /* nonblocking; empty is fine too */
        } else if (piece_advance(p, outcome) == PIECE_AGAIN) {
            queue_piece(r, p);
        } else {
            finished[ended++] = p;
            bounced = p->bounce != NULL; /* its block is wanted for the next piece */
        }
    }
    io_uring_cq_advance(&r->ring, i);
    r->inflight -= ended;
    pthread_mutex_lock(&e->lock);
    if (!r->wake_armed)
        r->wake_sent = 0;
    for (uint32_t k = 0; k < ended; k++)
        schedule_finish(e, finished[k]);
    kick_helpers(r);
    pthread_mutex_unlock(&e->lock);
    return i;
}

/* Submits what is queued and sleeps until something comes back. */
static void wait_completions(struct ring *r) {
    arm_wake(r);
    int rc = io_uring_submit_and_wait(&r->ring, 1);
    /* EINTR, and EAGAIN or EBUSY when the kernel is short of memory: what came back is reaped, the rest stays
     * queued. */
    if (rc == -EAGAIN || rc == -EBUSY)
        usleep(500);
}

static void serve(struct ring *r) {
    struct lamina_engine *e = r->engine;
    pthread_mutex_lock(&e->lock);
    for (;;) {
        run_commands(r);
        start_pieces(r);
        if (r->commands)
            continue;
        if (!r->inflight) {
            if (r->stopping)
                break;
            pthread_cond_wait(&r->work, &e->lock);
            continue;
        }
        r->waiting = 1;
        pthread_mutex_unlock(&e->lock);
        wait_completions(r);
        reap(r);
        pthread_mutex_lock(&e->lock);
        r->waiting = 0;
    }
    pthread_mutex_unlock(&e->lock);
}

static void *ring_thread(void *argument) {
    struct ring *r = argument;
    struct lamina_engine *e = r->engine;
    time_slice_shorten(); /* the device idles until this thread gets to run */
    int rc = open_ring(r, &e->config), opened = !rc;
    if (!rc)
        rc = check_operations(r);
    if (!rc && e->config.use_fixed)
        slots_reserve(&r->slots, &r->ring);
    pthread_mutex_lock(&e->lock);
    r->started = rc ? rc : 1;
    pthread_cond_broadcast(&r->changed);
    pthread_mutex_unlock(&e->lock);
    if (!rc)
        serve(r);
    if (opened)
        io_uring_queue_exit(&r->ring);
    return NULL;
}

static void wake(struct ring *r) {
    uint64_t one = 1;
    pthread_cond_signal(&r->work);
    if (r->waiting && !r->wake_sent) {
        r->wake_sent = 1;
        (void)!write(r->wake_fd, &one, sizeof one); /* cannot fail: the counter is drained on every wake */
    }
}

static void kick(struct lamina_engine *e) {
    struct ring *r = e->driver_state;
    if (e->num_active == e->config.queue_depth)
        return; /* every slot is taken: the next completion will do */
    kick_helpers(r);
    if (e->num_queued[CLASS_PLAIN] || r->wants == TAKE_ALL)
        wake(r);
}

static int run(struct ring *r, struct command *c) {
    struct command **last = &r->commands;
    while (*last)
        last = &(*last)->next;
    *last = c;
    wake(r);
    while (!c->done)
        pthread_cond_wait(&r->changed, &r->engine->lock);
    return c->result;
}

static int register_memory(struct lamina_engine *e, void *address, uint64_t nbytes) {
    struct command c = {.what = COMMAND_REGISTER, .address = address, .nbytes = nbytes};
    return run(e->driver_state, &c);
}

static int unregister_memory(struct lamina_engine *e, void *address, uint64_t nbytes) {
    struct command c = {.what = COMMAND_UNREGISTER, .address = address, .nbytes = nbytes};
    return run(e->driver_state, &c);
}

static void forget_file(struct lamina_engine *e, struct file *file) {
    struct command c = {.what = COMMAND_FORGET_FILE, .file = file};
    run(e->driver_state, &c);
}

static void features(struct lamina_engine *e, struct lamina_features *features) {
    const struct ring *r = e->driver_state;
    *features = (struct lamina_features){
        .setup_flags = r->setup_flags,
        .refused_flags = r->refused_flags,
        .kernel_flags = r->kernel_flags,
        .fixed_files = r->slots.num_files,
        .fixed_buffers = r->slots.num_buffers,
        .fixed_files_error = r->slots.files_error,
        .fixed_buffers_error = r->slots.buffers_error,
        .threads = 1 + pool_num_threads(r->helpers),
    };
}

static void discard(struct ring *r) {
    if (r->wake_fd >= 0)
        close(r->wake_fd);
    if (r->helpers)
        pool_close(r->helpers);
    pthread_cond_destroy(&r->work);
    pthread_cond_destroy(&r->changed);
    free(r);
}

static int start_thread(struct ring *r) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = -pthread_create(&r->thread, NULL, ring_thread, r);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc)
        return rc;
    pthread_mutex_lock(&r->engine->lock);
    while (!r->started)
        pthread_cond_wait(&r->changed, &r->engine->lock);
    pthread_mutex_unlock(&r->engine->lock);
    if (r->started < 0)
        pthread_join(r->thread, NULL);
    return r->started < 0 ? r->started : 0;
}

static int start(struct lamina_engine *e, const struct lamina_config *config) {
    struct ring *r = calloc(1, sizeof *r);
    if (!r)
        return -ENOMEM;
    r->engine = e;
    e->driver_state = r;
    pthread_cond_init(&r->work, NULL); /* neither can fail with default attributes */
    pthread_cond_init(&r->changed, NULL);
    r->wants = 1u << CLASS_PLAIN;
    r->helpers = pool_open(e, config->num_threads, 1u << CLASS_COPY);
    r->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int rc = !r->helpers ? -ENOMEM : r->wake_fd < 0 ? -errno : start_thread(r);
    if (rc)
        discard(r);
    return rc;
}

static void stop(struct lamina_engine *e) {
    struct ring *r = e->driver_state;
    pthread_mutex_lock(&e->lock);
    r->stopping = 1;
    wake(r);
    pthread_mutex_unlock(&e->lock);
    pthread_join(r->thread, NULL);
    discard(r);
}

const struct driver ring_driver = {
    .start = start,
    .kick = kick,
    .register_memory = register_memory,
    .unregister_memory = unregister_memory,
    .forget_file = forget_file,
    .features = features,
    .stop = stop,
};
