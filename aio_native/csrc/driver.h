/* A driver carries pieces out. It asks the schedule for work and gives it back finished. */
#ifndef LAMINA_DRIVER_H
#define LAMINA_DRIVER_H
#include "engine.h"

struct file;

struct driver {
    /* Starts the threads; returns once the driver can work, or -errno with everything undone. */
    int (*start)(struct lamina_engine *engine, const struct lamina_config *config);
    /* There may be work that can start now. Called with the lock held, seldom blocks. */
    void (*kick)(struct lamina_engine *engine);
    int (*register_memory)(struct lamina_engine *engine, void *address, uint64_t nbytes);
    int (*unregister_memory)(struct lamina_engine *engine, void *address, uint64_t nbytes);
    /* The file has no work left and is about to be closed. */
    void (*forget_file)(struct lamina_engine *engine, struct file *file);
    void (*features)(struct lamina_engine *engine, struct lamina_features *features);
    /* Nothing is in flight and nothing will come: ends the threads and frees the driver's state. */
    void (*stop)(struct lamina_engine *engine);
};

extern const struct driver thread_driver;
extern const struct driver ring_driver;

#endif
