#include "ring_slots.h"

#include <errno.h>

#define BUFFER_BYTES ((uint64_t)1 << 30) /* the kernel's limit for one registered buffer */

void slots_reserve(struct ring_slots *s, struct io_uring *ring) {
    s->ring = ring;
    int rc = io_uring_register_files_sparse(ring, FILE_SLOTS);
    s->num_files = rc ? 0 : FILE_SLOTS;
    s->files_error = -rc;
    rc = io_uring_register_buffers_sparse(ring, BUFFER_SLOTS);
    s->num_buffers = rc ? 0 : BUFFER_SLOTS;
    s->buffers_error = -rc;
}

static int set_buffer(struct ring_slots *s, uint32_t slot, char *address, uint64_t nbytes) {
    struct iovec vec = {.iov_base = address, .iov_len = nbytes};
    __u64 tag = 0;
    int rc = io_uring_register_buffers_update_tag(s->ring, slot, &vec, &tag, 1);
    if (rc < 0)
        return rc;
    s->buffers[slot] = (struct fixed_buffer){.address = address, .nbytes = nbytes};
    if (slot >= s->end)
        s->end = slot + 1;
    return 0;
}

void slots_drop_memory(struct ring_slots *s, const char *address, uint64_t nbytes) {
    for (uint32_t i = 0; i < s->end; i++) {
        struct fixed_buffer *b = &s->buffers[i];
        if (!b->nbytes || b->address < address || b->address >= address + nbytes)
            continue;
        (void)set_buffer(s, i, NULL, 0); /* refused: the kernel holds the pages until the slot's next use */
        *b =
            (struct fixed_buffer){0}; /* other memory may come to lie at the address: never again this slot */
    }
}

int slots_add_memory(struct ring_slots *s, char *address, uint64_t nbytes) {
    int rc = s->num_buffers ? 0 : s->buffers_error ? -s->buffers_error : -ENOTSUP;
    for (uint64_t done = 0; done < nbytes && !rc; done += BUFFER_BYTES) {
        uint32_t slot = 0;
        while (slot < BUFFER_SLOTS && s->buffers[slot].nbytes)
            slot++;
        uint64_t part = nbytes - done < BUFFER_BYTES ? nbytes - done : BUFFER_BYTES;
        rc = slot == BUFFER_SLOTS ? -ENOSPC : set_buffer(s, slot, address + done, part);
    }
    if (rc)
        slots_drop_memory(s, address, nbytes);
    return rc;
}

int slots_find_memory(const struct ring_slots *s, const char *address, uint64_t nbytes) {
    for (uint32_t i = 0; i < s->end; i++) {
        const struct fixed_buffer *b = &s->buffers[i];
        if (address >= b->address && address + nbytes <= b->address + b->nbytes)
            return (int)i;
    }
    return -1;
}

void slots_take_file(struct ring_slots *s, struct file *file) {
    file->fixed_slot = -2;
    for (uint32_t i = 0; i < s->num_files; i++) {
        if (s->file_used[i])
            continue;
        if (io_uring_register_files_update(s->ring, i, &file->spec.fd, 1) == 1) {
            s->file_used[i] = 1;
            file->fixed_slot = (int)i;
        }
        return;
    }
}

void slots_give_file(struct ring_slots *s, struct file *file) {
    int none = -1;
    if (file->fixed_slot < 0)
        return;
    if (io_uring_register_files_update(s->ring, (unsigned)file->fixed_slot, &none, 1) == 1)
        s->file_used[file->fixed_slot] = 0;
    file->fixed_slot = -2;
}
