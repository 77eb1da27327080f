/* Carries all pieces out in a pool of threads. */
#include <errno.h>

#include "pool.h"
#include "schedule.h"

static int start(struct lamina_engine *e, const struct lamina_config *config) {
    uint32_t count = config->num_threads < config->queue_depth ? config->num_threads : config->queue_depth;
    struct pool *pool = pool_open(e, count, TAKE_ALL);
    if (!pool)
        return -ENOMEM;
    e->driver_state = pool;
    pthread_mutex_lock(&e->lock);
    int rc = pool_kick(pool); /* the first thread now, so that a machine without threads shows at once */
    pthread_mutex_unlock(&e->lock);
    if (rc)
        pool_close(pool);
    return rc;
}

static void kick(struct lamina_engine *e) {
    (void)pool_kick(e->driver_state); /* there is at least one thread */
}

static void stop(struct lamina_engine *e) {
    pool_close(e->driver_state);
}

static int no_registration(struct lamina_engine *e, void *address, uint64_t nbytes) {
    (void)e, (void)address, (void)nbytes;
    return -ENOTSUP;
}

static void forget_file(struct lamina_engine *e, struct file *file) {
    (void)e, (void)file;
}

static void features(struct lamina_engine *e, struct lamina_features *features) {
    features->threads = pool_num_threads(e->driver_state);
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
