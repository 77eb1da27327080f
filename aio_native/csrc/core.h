/* The engine's own state. `lock` guards all of it; the drivers' state is their own. */
#ifndef LAMINA_CORE_H
#define LAMINA_CORE_H
#include <pthread.h>
#include <sys/types.h>

#include "bounce.h"
#include "driver.h"
#include "piece.h"

struct lamina_engine {
    pthread_mutex_t lock;
    pthread_cond_t quiet; /* a request ended: somebody may wait for a file or for everything */
    struct lamina_config config;
    const struct driver *driver;
    void *driver_state;
    uint32_t references; /* the opener's and one for each transfer */
    pid_t owner;         /* the process that opened the engine: a fork has no threads of ours */
    int closing;
    uint64_t sequence;
    struct device *devices;
    uint32_t num_queued[NUM_CLASSES]; /* requests in the devices' queues */
    struct device *turn;              /* where the next search for work begins */
    struct file **files;              /* by slot */
    uint32_t num_files;               /* slots */
    uint32_t file_generation;
    struct lamina_transfer *unfinished;
    struct piece *pieces;
    struct piece *free_pieces;
    struct piece *active;
    uint32_t num_active; /* those of the driver, without those that waiting threads carry out themselves */
    struct bounce_pool bounce;
};

void engine_release(struct lamina_engine *engine); /* lock held; gives the lock back, may free the engine */

struct file *file_find(struct lamina_engine *engine, int64_t number); /* lock held; NULL: stale or closing */
void files_close_all(struct lamina_engine *engine);                   /* nothing runs any more */

/* Adds the time since the last change of what is in flight to *stats, the device's own or a copy. */
void stats_book(struct lamina_device_stats *stats, const struct device *device, uint64_t now); /* lock held */

#endif
