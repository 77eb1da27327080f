#include "pool.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>

#include "schedule.h"

struct pool {
    struct lamina_engine *engine;
    pthread_cond_t work;
    unsigned wants;
    uint32_t num_idle;
    uint32_t num_woken; /* idle ones that have been signalled and are on their way */
    uint32_t num_threads;
    uint32_t max_threads;
    int stopping;
    pthread_t threads[];
};

static void *worker(void *argument) {
    struct pool *pool = argument;
    struct lamina_engine *e = pool->engine;
    int finished = 0;
    pthread_mutex_lock(&e->lock);
    for (;;) {
        struct piece *piece = schedule_take(e, pool->wants);
        /* Each thread that finds work wakes the next (no herd), and so does one whose last piece made room
         * for others. */
        if ((piece || finished) && schedule_waiting(e))
            e->driver->kick(e);
        finished = 0;
        if (!piece && pool->stopping)
            break;
        if (!piece) {
            pool->num_idle++;
            pthread_cond_wait(&pool->work, &e->lock);
            pool->num_idle--;
            pool->num_woken -= pool->num_woken > 0;
            continue;
        }
        pthread_mutex_unlock(&e->lock);
        piece_prepare(piece);
        piece_run(piece);
        pthread_mutex_lock(&e->lock);
        schedule_finish(e, piece);
        finished = 1;
    }
    pthread_mutex_unlock(&e->lock);
    return NULL;
}

/* Signals are for the threads of the program, not for ours: a handler's thread must not be one that never
 * runs it. */
static int spawn(struct pool *pool) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = -pthread_create(&pool->threads[pool->num_threads], NULL, worker, pool);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pool->num_threads += !rc;
    return rc;
}

int pool_kick(struct pool *pool) {
    int rc = 0;
    if (pool->num_idle > pool->num_woken) {
        pool->num_woken++;
        pthread_cond_signal(&pool->work);
    } else if (pool->num_woken == 0 && pool->num_threads < pool->max_threads) {
        rc = spawn(pool);
    }
    return pool->num_threads ? 0 : rc; /* those that run do the work if no more are to be had */
}

struct pool *pool_open(struct lamina_engine *e, uint32_t max_threads, unsigned wants) {
    struct pool *pool = calloc(1, sizeof *pool + max_threads * sizeof pool->threads[0]);
    if (!pool)
        return NULL;
    pool->engine = e;
    pool->max_threads = max_threads;
    pool->wants = wants;
    pthread_cond_init(&pool->work, NULL); /* cannot fail with default attributes */
    return pool;
}

uint32_t pool_num_threads(const struct pool *pool) {
    return pool->num_threads;
}

void pool_close(struct pool *pool) {
    pthread_mutex_lock(&pool->engine->lock);
    pool->stopping = 1;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->engine->lock);
    for (uint32_t i = 0; i < pool->num_threads; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->work);
    free(pool);
}
