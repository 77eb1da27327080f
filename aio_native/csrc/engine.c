#include "engine.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "core.h"
#include "schedule.h"

static const struct driver *driver_of(int number) {
    if (number == LAMINA_THREADS)
        return &thread_driver;
#ifdef LAMINA_HAVE_URING
    if (number == LAMINA_URING)
        return &ring_driver;
#endif
    return NULL;
}

static int check_config(const struct lamina_config *c) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    if (!driver_of(c->driver))
        return -ENOSYS;
    if (!c->queue_depth || c->queue_depth > 4096 || !c->num_threads || !c->bounce_blocks)
        return -EINVAL;
    if (!c->bounce_block_bytes || c->bounce_block_bytes % page || c->bounce_block_bytes > c->block_bytes)
        return -EINVAL;
    return c->block_bytes % page || c->block_bytes > (uint64_t)1 << 30 ? -EINVAL : 0;
}

static void discard(struct lamina_engine *e) {
    files_close_all(e);
    while (e->devices) { /* only now: the counters can be read after close */
        struct device *device = e->devices;
        e->devices = device->next;
        free(device);
    }
    bounce_destroy(&e->bounce);
    pthread_cond_destroy(&e->quiet);
    pthread_mutex_destroy(&e->lock);
    free(e->pieces);
    free(e);
}

static int build(struct lamina_engine *e, const struct lamina_config *config) {
    e->config = *config;
    e->references = 1;
    e->owner = getpid();
    e->driver = driver_of(config->driver);
    e->pieces = calloc(config->queue_depth, sizeof *e->pieces);
    if (!e->pieces)
        return -ENOMEM;
    for (uint32_t i = 0; i < config->queue_depth; i++)
        e->pieces[i].next = i + 1 < config->queue_depth ? &e->pieces[i + 1] : NULL;
    e->free_pieces = e->pieces;
    int rc = bounce_init(&e->bounce, config->bounce_block_bytes, config->bounce_blocks);
    return rc ? rc : e->driver->start(e, &e->config);
}

struct lamina_engine *lamina_engine_open(const struct lamina_config *config, int *error) {
    *error = -check_config(config);
    if (*error)
        return NULL;
    struct lamina_engine *e = calloc(1, sizeof *e);
    if (!e) {
        *error = ENOMEM;
        return NULL;
    }
    *error = pthread_mutex_init(&e->lock, NULL);
    if (*error) {
        free(e);
        return NULL;
    }
    *error = pthread_cond_init(&e->quiet, NULL);
    if (*error) {
        pthread_mutex_destroy(&e->lock);
        free(e);
        return NULL;
    }
    *error = -build(e, config);
    if (*error) {
        discard(e);
        return NULL;
    }
    return e;
}

void lamina_engine_features(struct lamina_engine *e, struct lamina_features *features) {
    *features = (struct lamina_features){0};
    pthread_mutex_lock(&e->lock);
    if (e->driver)
        e->driver->features(e, features);
    pthread_mutex_unlock(&e->lock);
}

static uint32_t files_closing(const struct lamina_engine *e) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < e->num_files; i++)
        n += e->files[i] && e->files[i]->closing;
    return n;
}

int lamina_engine_close(struct lamina_engine *e, int cancel) {
    if (e->owner != getpid())
        return -EPERM;
    pthread_mutex_lock(&e->lock);
    if (e->closing) {
        while (e->driver) /* another thread is at it */
            pthread_cond_wait(&e->quiet, &e->lock);
        pthread_mutex_unlock(&e->lock);
        return 0;
    }
    e->closing = 1;
    for (struct lamina_transfer *t = cancel ? e->unfinished : NULL, *next; t; t = next) {
        next = t->next;
        schedule_drop(e, t, 1);
    }
    while (e->unfinished || files_closing(e))
        pthread_cond_wait(&e->quiet, &e->lock);
    const struct driver *driver = e->driver;
    pthread_mutex_unlock(&e->lock);
    driver->stop(e);
    pthread_mutex_lock(&e->lock);
    e->driver = NULL;
    files_close_all(e);
    pthread_cond_broadcast(&e->quiet);
    pthread_mutex_unlock(&e->lock);
    return 0;
}

void engine_release(struct lamina_engine *e) {
    uint32_t left = --e->references;
    pthread_mutex_unlock(&e->lock);
    if (!left)
        discard(e);
}

void lamina_engine_free(struct lamina_engine *e) {
    if (e->owner != getpid())
        return;
    lamina_engine_close(e, 1); /* does nothing when it is closed already */
    pthread_mutex_lock(&e->lock);
    engine_release(e);
}

static int usable(const struct lamina_engine *e) {
    return e->closing ? -ESHUTDOWN : 0;
}

int lamina_engine_register(struct lamina_engine *e, void *address, uint64_t nbytes) {
    pthread_mutex_lock(&e->lock);
    int rc = usable(e);
    if (!rc)
        rc = e->driver->register_memory(e, address, nbytes);
    pthread_mutex_unlock(&e->lock);
    return rc;
}

int lamina_engine_unregister(struct lamina_engine *e, void *address, uint64_t nbytes) {
    pthread_mutex_lock(&e->lock);
    int rc = usable(e);
    if (!rc)
        rc = e->driver->unregister_memory(e, address, nbytes);
    pthread_mutex_unlock(&e->lock);
    return rc;
}
