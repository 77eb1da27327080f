/* An open file as the engine sees it: descriptors, alignment, device. Named by a number, so that a stale one
 * is -EBADF and never a dangling pointer. */
#ifndef LAMINA_FILE_H
#define LAMINA_FILE_H
#include "engine.h"

struct lamina_file_spec {
    int fd;          /* owned by the engine from here on when lamina_file_add succeeds */
    int buffered_fd; /* same file without O_DIRECT, for a write that ends inside the last block; or -1 */
    int direct;      /* fd is O_DIRECT */
    uint32_t offset_align; /* bytes; file offsets and lengths of a direct transfer */
    uint32_t memory_align; /* bytes; addresses of a direct transfer */
    uint64_t device;       /* st_dev: work is limited for each device apart */
};

/* Returns the file's number (> 0) or -errno. */
int64_t lamina_file_add(struct lamina_engine *engine, const struct lamina_file_spec *spec);

/* Waits for the file's transfers, then closes the descriptors. */
int lamina_file_remove(struct lamina_engine *engine, int64_t file);

#endif
