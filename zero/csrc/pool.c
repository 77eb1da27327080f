/* The thread pool.
 *
 * [Note: Shares] Each thread begins with a contiguous share of the chunks and takes them from its front, so
 * that it streams through memory and what it prefetched is its own next chunk; whoever is through takes
 * single chunks from the back of the others' shares, so a thread that comes late or is slow holds nobody up.
 *
 * [Note: The gate] One 64-bit word says which job is open and how many workers are inside it:
 *     generation << 32 | open << 31 | inside
 * A worker enters by a compare-and-swap that only succeeds while the job is open, so a worker that wakes late
 * finds the door shut and the caller, who did the chunks itself meanwhile, need not wait for it: a sleeping
 * pool costs a small call nothing but the wake-up system call.  The job's fields may be changed only while
 * the gate is shut and empty.
 *
 * Workers wait awake for the next job, as patience.h says, then sleep on a futex.  Where the calling thread
 * has a team of OpenMP threads that may be used, the job is done by that instead; see team.h. */
#define _GNU_SOURCE
#include "pool.h"
#include "patience.h"
#include "team.h"
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define OPEN ((uint64_t)1 << 31)
#define INSIDE (OPEN - 1)
enum { PAUSES_PER_CLOCK_READ = 32 };

typedef struct {
    _Alignas(64) _Atomic uint64_t chunks; /* first << 32 | end */
} share;

typedef struct {
    lk_threads *threads;
    pthread_t thread;
    int core;      /* -1: not bound */
    int own_share; /* index */
} worker;

struct lk_threads {
    _Alignas(64) _Atomic uint64_t gate;
    _Alignas(64) _Atomic uint32_t bell; /* futex of the workers: rung for each job and at the end */
    _Atomic uint32_t sleepers;
    _Atomic uint32_t gaps;              /* between the last jobs, see patience.h */
    _Alignas(64) _Atomic uint32_t left; /* futex of the caller: counts how often the last one inside left */
    _Atomic uint32_t caller_sleeps;
    lk_chunk_fn fn;
    void *context;
    share *shares; /* one per thread that works */
    int num_shares;
    int64_t ended_ns; /* when the last job was done */
    _Atomic int stopping;
    pthread_mutex_t turn; /* one job at a time */
    pid_t owner;
    int num_workers;
    int caller_works;
    _Atomic uintptr_t computes; /* which thread's team may be used, 0 for none: see lk_threads_use_team */
    lk_team team;
    worker workers[];
};

static long futex(_Atomic uint32_t *word, int op, uint32_t value) {
    return syscall(SYS_futex, (uint32_t *)word, op | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

static inline void cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Deals the chunks out in contiguous shares, the larger ones first. */
static void deal(lk_threads *t, int64_t chunks) {
    int64_t each = chunks / t->num_shares, more = chunks % t->num_shares, first = 0;
    for (int i = 0; i < t->num_shares; i++) {
        int64_t end = first + each + (i < more);
        atomic_store_explicit(&t->shares[i].chunks, (uint64_t)first << 32 | (uint64_t)end,
                              memory_order_relaxed);
        first = end;
    }
}

/* Takes the first or last chunk of a share; -1 when none is left. */
static int64_t take(share *s, int last) {
    uint64_t have = atomic_load_explicit(&s->chunks, memory_order_relaxed), left;
    int64_t first, end;
    do {
        first = (int64_t)(have >> 32);
        end = (int64_t)(have & UINT32_MAX);
        if (first == end)
            return -1;
        left = last ? have - 1 : have + ((uint64_t)1 << 32);
    } while (!atomic_compare_exchange_weak_explicit(&s->chunks, &have, left, memory_order_relaxed,
                                                    memory_order_relaxed));
    return last ? end - 1 : first;
}

static void work(lk_threads *t, int own) {
    for (int i = 0; i < t->num_shares; i++) {
        share *s = &t->shares[(own + i) % t->num_shares];
        int64_t chunk;
        while ((chunk = take(s, i > 0)) >= 0)
            t->fn(t->context, chunk);
    }
}

/* True when the worker got into a job newer than *seen. */
static int enter(lk_threads *t, uint32_t *seen) {
    uint64_t gate = atomic_load_explicit(&t->gate, memory_order_acquire);
    while ((gate & OPEN) && (uint32_t)(gate >> 32) != *seen) {
        if (atomic_compare_exchange_weak_explicit(&t->gate, &gate, gate + 1, memory_order_acq_rel,
                                                  memory_order_acquire)) {
            *seen = (uint32_t)(gate >> 32);
            return 1;
        }
    }
    return 0;
}

static void leave(lk_threads *t) {
    uint64_t before = atomic_fetch_sub_explicit(&t->gate, 1, memory_order_acq_rel);
    if ((before & INSIDE) == 1) {
        atomic_fetch_add_explicit(&t->left, 1, memory_order_seq_cst);
        if (atomic_load_explicit(&t->caller_sleeps, memory_order_seq_cst))
            futex(&t->left, FUTEX_WAKE, 1);
    }
}

/* True when somebody else has run on this core meanwhile: it is wanted. */
static int give_way(void) {
    int64_t before = now_ns();
    sched_yield();
    return now_ns() - before > LK_WANTED_NS;
}

static void wait_for_bell(lk_threads *t, uint32_t heard) {
    uint32_t gaps = atomic_load_explicit(&t->gaps, memory_order_relaxed);
    int64_t began = now_ns(), waited = 0, patience = lk_patience_ns(gaps);
    do {
        for (int i = 0; i < PAUSES_PER_CLOCK_READ; i++) {
            if (atomic_load_explicit(&t->bell, memory_order_acquire) != heard)
                return;
            cpu_relax();
        }
        if (waited > LK_BRIEF_NS && give_way())
            break;
        waited = now_ns() - began;
    } while (waited < patience);
    atomic_fetch_add_explicit(&t->sleepers, 1, memory_order_seq_cst);
    while (atomic_load_explicit(&t->bell, memory_order_seq_cst) == heard)
        futex(&t->bell, FUTEX_WAIT, heard); /* EAGAIN and EINTR: looked at again */
    atomic_fetch_sub_explicit(&t->sleepers, 1, memory_order_relaxed);
}

static void *worker_main(void *argument) {
    const worker *self = argument;
    lk_threads *t = self->threads;
    uint32_t seen = 0;
    for (;;) {
        uint32_t heard = atomic_load_explicit(&t->bell, memory_order_acquire);
        if (enter(t, &seen)) {
            work(t, self->own_share);
            leave(t);
        } else if (atomic_load_explicit(&t->stopping, memory_order_acquire)) {
            return NULL;
        } else {
            wait_for_bell(t, heard);
        }
    }
}

static void ring(lk_threads *t) {
    atomic_fetch_add_explicit(&t->bell, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&t->sleepers, memory_order_seq_cst))
        futex(&t->bell, FUTEX_WAKE, INT32_MAX);
}

/* All chunks are taken, and, once the gate is shut, all who took them have left. */
static int all_taken(lk_threads *t) {
    for (int i = 0; i < t->num_shares; i++) {
        uint64_t have = atomic_load_explicit(&t->shares[i].chunks, memory_order_relaxed);
        if (have >> 32 != (have & UINT32_MAX))
            return 0;
    }
    return 1;
}

static int empty(lk_threads *t) {
    return (atomic_load_explicit(&t->gate, memory_order_acquire) & INSIDE) == 0;
}

static void caller_waits(lk_threads *t, int (*done)(lk_threads *)) {
    if (done(t))
        return;
    int64_t until = now_ns() + LK_BRIEF_NS;
    do {
        for (int i = 0; i < PAUSES_PER_CLOCK_READ; i++) {
            if (done(t))
                return;
            cpu_relax();
        }
    } while (now_ns() < until);
    atomic_store_explicit(&t->caller_sleeps, 1, memory_order_seq_cst);
    for (;;) {
        uint32_t left = atomic_load_explicit(&t->left, memory_order_seq_cst);
        if (done(t))
            break;
        futex(&t->left, FUTEX_WAIT, left); /* EAGAIN and EINTR: looked at again */
    }
    atomic_store_explicit(&t->caller_sleeps, 0, memory_order_relaxed);
}

int lk_threads_check(const lk_threads *t) {
    if (t->owner != getpid())
        return -ESTALE;
    return atomic_load_explicit(&t->stopping, memory_order_acquire) ? -EBADF : 0;
}

static uintptr_t this_thread(void) {
    static _Thread_local char mark;
    return (uintptr_t)&mark;
}

int lk_threads_use_team(lk_threads *t) {
    int rc = lk_threads_check(t);
    if (rc || !t->caller_works)
        return rc;
    if (atomic_load_explicit(&t->computes, memory_order_relaxed) == 0) {
        lk_team team;
        if (!lk_team_find(&team))
            return 0;
        pthread_mutex_lock(&t->turn);
        t->team = team;
        pthread_mutex_unlock(&t->turn);
    }
    atomic_store_explicit(&t->computes, this_thread(), memory_order_release);
    return 1;
}

static void work_in_team(void *context) {
    lk_threads *t = context;
    work(t, t->team.thread_num());
}

static void run_on_workers(lk_threads *t) {
    uint32_t gaps = atomic_load_explicit(&t->gaps, memory_order_relaxed);
    atomic_store_explicit(&t->gaps, lk_gaps_with(gaps, now_ns() - t->ended_ns), memory_order_relaxed);
    uint64_t generation = (atomic_load_explicit(&t->gate, memory_order_relaxed) >> 32) + 1;
    if ((uint32_t)generation == 0)
        generation = 1; /* 0 is what a new worker has seen */
    atomic_store_explicit(&t->gate, generation << 32 | OPEN, memory_order_release);
    ring(t);
    if (t->caller_works)
        work(t, 0);
    else
        caller_waits(t, all_taken);
    atomic_fetch_and_explicit(&t->gate, ~OPEN, memory_order_acq_rel);
    caller_waits(t, empty);
    t->ended_ns = now_ns();
}

int lk_threads_run(lk_threads *t, int64_t chunks, lk_chunk_fn fn, void *context) {
    int rc = lk_threads_check(t);
    if (rc)
        return rc;
    if (chunks > UINT32_MAX)
        return -EOVERFLOW;
    if (t->num_workers == 0 || chunks <= 1) {
        for (int64_t i = 0; i < chunks; i++)
            fn(context, i);
        return 0;
    }
    pthread_mutex_lock(&t->turn);
    rc = lk_threads_check(t);
    if (rc == 0) {
        t->fn = fn;
        t->context = context;
        deal(t, chunks);
        if (atomic_load_explicit(&t->computes, memory_order_acquire) == this_thread() &&
            lk_team_is_free(&t->team, t->num_shares))
            t->team.parallel(work_in_team, t, (unsigned)t->num_shares, 0);
        else
            run_on_workers(t);
    }
    pthread_mutex_unlock(&t->turn);
    return rc;
}

static int start_worker(lk_threads *t, int index, int core) {
    worker *w = &t->workers[index];
    pthread_attr_t attributes;
    int rc = pthread_attr_init(&attributes);
    if (rc)
        return -rc;
    w->threads = t;
    w->core = core;
    w->own_share = index + t->caller_works; /* the caller's is the first */
    if (core >= 0) {
        size_t bytes = CPU_ALLOC_SIZE(core + 1);
        cpu_set_t *set = CPU_ALLOC(core + 1);
        if (set == NULL) {
            rc = ENOMEM;
        } else {
            CPU_ZERO_S(bytes, set);
            CPU_SET_S((size_t)core, bytes, set);
            rc = pthread_attr_setaffinity_np(&attributes, bytes, set);
            CPU_FREE(set);
        }
    }
    if (rc == 0) { /* signals stay with the program's own threads */
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        rc = pthread_create(&w->thread, &attributes, worker_main, w);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    pthread_attr_destroy(&attributes);
    return -rc;
}

int lk_threads_start(lk_threads **out, int num_threads, const int *cores, int num_cores) {
    if (num_threads < 1 || num_cores < 0)
        return -EINVAL;
    int bound = num_cores > 0;
    int num_workers = bound ? num_threads : num_threads - 1;
    size_t bytes = sizeof(lk_threads) + (size_t)num_workers * sizeof(worker);
    lk_threads *t = aligned_alloc(64, (bytes + 63) / 64 * 64);
    share *shares = aligned_alloc(64, (size_t)num_threads * sizeof(share));
    if (t == NULL || shares == NULL) {
        free(t);
        free(shares);
        return -ENOMEM;
    }
    t->shares = shares;
    t->num_shares = num_threads;
    for (int i = 0; i < num_threads; i++)
        atomic_init(&shares[i].chunks, 0);
    atomic_init(&t->gate, 0);
    atomic_init(&t->bell, 0);
    atomic_init(&t->sleepers, 0);
    atomic_init(&t->gaps, 0);
    atomic_init(&t->left, 0);
    atomic_init(&t->caller_sleeps, 0);
    atomic_init(&t->stopping, 0);
    t->fn = NULL;
    t->context = NULL;
    t->ended_ns = 0;
    t->owner = getpid();
    t->num_workers = 0;
    t->caller_works = !bound;
    atomic_init(&t->computes, 0);
    int rc = pthread_mutex_init(&t->turn, NULL);
    if (rc) {
        free(shares);
        free(t);
        return -rc;
    }
    for (int i = 0; i < num_workers; i++) {
        rc = start_worker(t, i, bound ? cores[i % num_cores] : -1);
        if (rc) {
            lk_threads_free(t);
            return rc;
        }
        t->num_workers++;
    }
    *out = t;
    return 0;
}

int lk_threads_stop(lk_threads *t) {
    if (t->owner != getpid())
        return -ESTALE;
    pthread_mutex_lock(&t->turn);
    if (!atomic_load_explicit(&t->stopping, memory_order_acquire)) {
        atomic_store_explicit(&t->stopping, 1, memory_order_seq_cst);
        ring(t);
        for (int i = 0; i < t->num_workers; i++)
            pthread_join(t->workers[i].thread, NULL);
    }
    pthread_mutex_unlock(&t->turn);
    return 0;
}

void lk_threads_free(lk_threads *t) {
    if (lk_threads_stop(t) == 0) /* in a forked child the mutex may be held by a thread that is not there */
        pthread_mutex_destroy(&t->turn);
    free(t->shares);
    free(t);
}
