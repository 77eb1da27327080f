/* Carries pieces out with pread and pwrite in a pool of threads that grows on demand. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

#include "schedule.h"

struct thread_pool {
    pthread_cond_t work;
    uint32_t num_idle;
    uint32_t num_woken; /* idle ones that have been signalled and are on their way */
    uint32_t num_threads;
    uint32_t max_threads;
    int stopping;
    pthread_t threads[];
};

static void *worker(void *argument) {
    struct lamina_engine *e = argument;
    struct thread_pool *pool = e->driver_state;
    pthread_mutex_lock(&e->lock);
    for (;;) {
        struct piece *piece = schedule_take(e);
        if (!piece && pool->stopping)
            break;
        if (!piece) {
            pool->num_idle++;
            pthread_cond_wait(&pool->work, &e->lock);
            pool->num_idle--;
            pool->num_woken -= pool->num_woken > 0;
            continue;
        }
        if (schedule_waiting(e)) /* each one that finds work wakes the next: no herd */
            e->driver->kick(e);
        pthread_mutex_unlock(&e->lock);
        piece_prepare(piece);
        piece_run(piece);
        pthread_mutex_lock(&e->lock);
        schedule_finish(e, piece);
    }
    pthread_mutex_unlock(&e->lock);
    return NULL;
}

/* Signals are for the threads of the program, not for ours: a handler's thread must not be one that never
 * runs it. */
static int spawn(struct lamina_engine *e, struct thread_pool *pool) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = -pthread_create(&pool->threads[pool->num_threads], NULL, worker, e);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pool->num_threads += !rc;
    return rc;
}

static void kick(struct lamina_engine *e) {
    struct thread_pool *pool = e->driver_state;
    if (pool->num_idle > pool->num_woken) {
        pool->num_woken++;
        pthread_cond_signal(&pool->work);
    } else if (pool->num_woken == 0 && pool->num_threads < pool->max_threads) {
        (void)spawn(e, pool); /* no more threads to be had: those that run do the work */
    }
}

static int start(struct lamina_engine *e, const struct lamina_config *config) {
    uint32_t count = config->num_threads < config->queue_depth ? config->num_threads : config->queue_depth;
    struct thread_pool *pool = calloc(1, sizeof *pool + count * sizeof pool->threads[0]);
    if (!pool)
        return -ENOMEM;
    pool->max_threads = count;
    int rc = -pthread_cond_init(&pool->work, NULL);
    if (rc) {
        free(pool);
        return rc;
    }
    e->driver_state = pool;
    pthread_mutex_lock(&e->lock);
    rc = spawn(e, pool);
    pthread_mutex_unlock(&e->lock);
    if (rc) {
        pthread_cond_destroy(&pool->work);
        free(pool);
    }
    return rc;
}

static void stop(struct lamina_engine *e) {
    struct thread_pool *pool = e->driver_state;
    pthread_mutex_lock(&e->lock);
    pool->stopping = 1;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&e->lock);
    for (uint32_t i = 0; i < pool->num_threads; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->work);
    free(pool);
}

static int no_registration(struct lamina_engine *e, void *address, uint64_t nbytes) {
    (void)e, (void)address, (void)nbytes;
    return -ENOTSUP;
}

static void forget_file(struct lamina_engine *e, struct file *file) {
    (void)e, (void)file;
}

static void features(struct lamina_engine *e, struct lamina_features *features) {
    features->threads = ((struct thread_pool *)e->driver_state)->num_threads;
}

const struct driver thread_driver = {
    .start = start,
    .kick = kick,
    .register_memory = no_registration,
    .unregister_memory = no_registration,
    .forget_file = forget_file,
    .features = features,
    .stop = stop,
};
