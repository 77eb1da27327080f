/* What the queue holds: files, transfers and their requests. Every field is guarded by the engine's lock
 * unless told otherwise. */
#ifndef LAMINA_REQUEST_H
#define LAMINA_REQUEST_H
#include <pthread.h>
#include <stdint.h>

#include "file.h"
#include "stats.h"
#include "transfer.h"

#define NUM_PRIORITIES 3
#define NUM_DIRECTIONS 3 /* read, write, sync */

enum request_state {
    REQUEST_PARKED, /* a sync that waits for earlier writes to its file */
    REQUEST_QUEUED, /* in its device's queue */
    REQUEST_TAKEN,  /* out of the queue: all of it is in pieces, or a waiting thread does it */
    REQUEST_DONE,
};

/* Large requests that need copying are apart: copying is work for several threads, not for the one that owns
 * a ring. */
enum request_class { CLASS_PLAIN, CLASS_COPY, NUM_CLASSES };
#define TAKE_ALL ((1u << CLASS_PLAIN) | (1u << CLASS_COPY))

struct request {
    struct lamina_transfer *transfer;
    struct file *file;
    struct request *next, *previous;             /* in the device's queue, or among the file's parked syncs */
    struct request *next_write, *previous_write; /* among the file's unfinished writes, oldest first */
    char *address;
    uint64_t nbytes;
    uint64_t offset;
    uint64_t cursor;   /* bytes handed out in pieces so far */
    uint64_t moved;    /* bytes done */
    uint64_t good;     /* on failure: bytes from the start that are surely done; else UINT64_MAX */
    uint64_t sequence; /* order of submission */
    uint32_t inflight; /* pieces */
    int error;
    int dropped; /* start no more pieces */
    enum lamina_operation operation;
    enum request_state state;
    enum request_class class;
    int priority;
};

struct request_queue {
    struct request *first, *last;
};

struct lamina_transfer {
    struct lamina_engine *engine;
    uint32_t done;      /* futex word, atomic: 0 pending, 1 done */
    uint32_t waiters;   /* atomic */
    uint32_t remaining; /* requests */
    uint32_t count;
    int cancelled;
    int failed;
    int orphan;                              /* nobody holds it any more: free it when it is done */
    struct lamina_transfer *next, *previous; /* among the engine's unfinished */
    struct lamina_result result;             /* fixed once done */
    struct request requests[];
};

struct file {
    struct lamina_engine *engine;
    struct device *device;
    struct lamina_file_spec spec;
    int64_t number;
    uint64_t write_block; /* unit of read-modify-write: at least a page, so that the page cache and direct
                             transfers never share one */
    uint32_t unfinished;  /* requests */
    int closing;
    int fixed_slot; /* owned by the ring driver: -1 none yet, -2 never */
    struct request *first_write, *last_write;
    struct request_queue parked; /* syncs that wait for earlier writes */
};

struct device {
    uint64_t number; /* st_dev */
    struct device *next;
    struct request_queue queue[NUM_PRIORITIES];
    struct lamina_device_stats stats;
    uint32_t inflight[NUM_DIRECTIONS]; /* pieces */
    uint64_t since_ns;                 /* of the last change of what is in flight */
};

static inline void queue_append(struct request_queue *queue, struct request *request) {
    request->next = NULL;
    request->previous = queue->last;
    *(queue->last ? &queue->last->next : &queue->first) = request;
    queue->last = request;
}

static inline void queue_prepend(struct request_queue *queue, struct request *request) {
    request->previous = NULL;
    request->next = queue->first;
    *(queue->first ? &queue->first->previous : &queue->last) = request;
    queue->first = request;
}

static inline void queue_remove(struct request_queue *queue, struct request *request) {
    *(request->previous ? &request->previous->next : &queue->first) = request->next;
    *(request->next ? &request->next->previous : &queue->last) = request->previous;
    request->next = request->previous = NULL;
}

#endif
