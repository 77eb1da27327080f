/* The engine: one queue of work, one driver that moves the bytes, no Python needed for progress.
 *
 * This header is also read by cffi: preprocessor lines are dropped and everything else is the interface. All
 * functions return 0 (or a count) or -errno, and none of them prints.
 */
#ifndef LAMINA_ENGINE_H
#define LAMINA_ENGINE_H
#include <stddef.h>
#include <stdint.h>

enum lamina_driver { LAMINA_THREADS = 0, LAMINA_URING = 1 };

struct lamina_engine;

struct lamina_config {
    int driver;             /* enum lamina_driver */
    uint32_t queue_depth;   /* pieces in flight at most */
    uint32_t num_threads;   /* workers of the threads driver, or copying helpers of the ring, at most */
    uint32_t inline_bytes;  /* a lone request up to this many bytes is done by the thread that waits for it */
    uint32_t bounce_blocks; /* blocks of bounce memory, each of block_bytes */
    uint32_t use_fixed;     /* registered buffers and files where the driver has them */
    uint64_t block_bytes;   /* a request is split into pieces of at most this many bytes */
    uint64_t max_inflight_bytes; /* per device */
    uint64_t bounce_block_bytes; /* pieces that need bounce memory are at most this long; up to block_bytes */
};

/* What the driver found at run time. */
struct lamina_features {
    uint32_t setup_flags;   /* IORING_SETUP_* in use, 0 for threads */
    uint32_t refused_flags; /* IORING_SETUP_* that were wished for and refused */
    uint32_t kernel_flags;  /* IORING_FEAT_* of the kernel, 0 for threads */
    uint32_t fixed_files;   /* slots for registered files, 0: not to be had */
    uint32_t fixed_buffers; /* slots for registered buffers, 0: not to be had */
    int fixed_files_error;  /* errno that made fixed_files 0, or 0 */
    int fixed_buffers_error;
    uint32_t threads; /* threads that the driver runs now */
};

/* On failure the result is NULL and *error holds the errno. */
struct lamina_engine *lamina_engine_open(const struct lamina_config *config, int *error);

void lamina_engine_features(struct lamina_engine *engine, struct lamina_features *features);

/* Takes no new work, drops what has not started (cancel != 0) or completes it, stops the driver, closes the
 * files. */
int lamina_engine_close(struct lamina_engine *engine, int cancel);

/* Gives the memory back; transfers that are still referenced stay valid. */
void lamina_engine_free(struct lamina_engine *engine);

/* Registers memory with the kernel for cheaper transfers. -ENOTSUP: this driver has no such thing. */
int lamina_engine_register(struct lamina_engine *engine, void *address, uint64_t nbytes);
int lamina_engine_unregister(struct lamina_engine *engine, void *address, uint64_t nbytes);

#endif
