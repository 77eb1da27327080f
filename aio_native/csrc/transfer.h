/* A transfer: the extents of one submit call, completed as one. */
#ifndef LAMINA_TRANSFER_H
#define LAMINA_TRANSFER_H
#include "engine.h"

enum lamina_operation { LAMINA_READ = 0, LAMINA_WRITE = 1, LAMINA_FSYNC = 2, LAMINA_FDATASYNC = 3 };
enum lamina_priority { LAMINA_DEMAND = 0, LAMINA_PREFETCH = 1, LAMINA_WRITE_BACK = 2 };

struct lamina_transfer;

struct lamina_extent {
    int64_t file;
    void *address;
    uint64_t nbytes;
    uint64_t offset;
    int operation; /* enum lamina_operation */
};

/* Valid once the transfer is done. The error is that of the lowest extent that failed by itself. */
struct lamina_result {
    int error;       /* errno, 0: all went well, or the end of the file came first (got < wanted) */
    uint32_t extent; /* index of the failed extent */
    uint64_t wanted; /* bytes of the failed extent */
    uint64_t got;    /* bytes of it that are good, counted from its start */
    uint64_t bytes;  /* bytes moved by all extents */
};

/* Queues the extents and returns at once. On failure nothing was queued, the result is NULL and errno tells
 * why. */
struct lamina_transfer *lamina_submit(struct lamina_engine *engine, const struct lamina_extent *extents,
                                      uint32_t count, int priority);
struct lamina_transfer *lamina_submit_one(struct lamina_engine *engine, int64_t file, int operation,
                                          void *address, uint64_t nbytes, uint64_t offset, int priority);

/* The same for a caller that would wait at once: a small request is carried out by this thread, if it may
 * start now, without waking the driver. It is then done on return. */
struct lamina_transfer *lamina_perform(struct lamina_engine *engine, int64_t file, int operation,
                                       void *address, uint64_t nbytes, uint64_t offset, int priority);

/* 0: done; -ETIMEDOUT; -EINTR: a signal came, call again; -EPERM: this is a fork. timeout_ns < 0 waits for
 * ever. */
int lamina_transfer_wait(struct lamina_transfer *transfer, int64_t timeout_ns);
int lamina_transfer_done(struct lamina_transfer *transfer);

/* Of a transfer that is done: the bytes moved, or -1 when it failed in any way. */
int64_t lamina_transfer_bytes(const struct lamina_transfer *transfer);
void lamina_transfer_result(const struct lamina_transfer *transfer, struct lamina_result *result);

/* Drops what has not started; returns 1 when that ends the transfer with ECANCELED, 0 when all of it had
 * started. */
int lamina_transfer_cancel(struct lamina_transfer *transfer);
void lamina_transfer_release(struct lamina_transfer *transfer);

#endif
