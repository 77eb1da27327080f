/* A ring's slots: files and memory that the kernel knows beforehand and need not look up for every request.
 * Everything here is for the thread that owns the ring. */
#ifndef LAMINA_RING_SLOTS_H
#define LAMINA_RING_SLOTS_H
#include <liburing.h>
#include <stdint.h>

#include "request.h"

#define FILE_SLOTS 256
#define BUFFER_SLOTS 256

struct fixed_buffer {
    char *address;
    uint64_t nbytes; /* 0: free */
};

struct ring_slots {
    struct io_uring *ring;
    uint32_t num_files; /* 0: not to be had, and files_error tells why */
    uint32_t num_buffers;
    int files_error, buffers_error; /* errno, or 0 */
    uint32_t end;                   /* behind the last buffer slot that was ever used */
    struct fixed_buffer buffers[BUFFER_SLOTS];
    unsigned char file_used[FILE_SLOTS];
};

/* Asks the kernel for the slots; what it refuses stays at none. */
void slots_reserve(struct ring_slots *slots, struct io_uring *ring);

/* 0, or -errno with nothing added. */
int slots_add_memory(struct ring_slots *slots, char *address, uint64_t nbytes);
void slots_drop_memory(struct ring_slots *slots, const char *address, uint64_t nbytes);
/* The slot whose memory holds the range, or -1. */
int slots_find_memory(const struct ring_slots *slots, const char *address, uint64_t nbytes);

/* Sets file->fixed_slot if there is a slot left. */
void slots_take_file(struct ring_slots *slots, struct file *file);
void slots_give_file(struct ring_slots *slots, struct file *file);

#endif
