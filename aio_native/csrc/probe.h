/* What a file system can do, found by asking and by doing. */
#ifndef LAMINA_PROBE_H
#define LAMINA_PROBE_H
#include <stdint.h>

struct lamina_probe {
    uint64_t file_system;  /* f_type of statfs */
    uint32_t offset_align; /* bytes, 0: no direct transfer worked */
    uint32_t memory_align; /* bytes */
    uint32_t told;         /* 1: the alignment is the file system's own word (statx), 0: found by trying */
    int error;             /* errno of the last direct transfer tried, when none worked */
};

/* fd: open for reading with O_DIRECT. Reads the first block. 0 or -errno. */
int lamina_probe_direct(int fd, struct lamina_probe *probe);

/* f_type of the file system that holds fd. */
int lamina_probe_file_system(int fd, uint64_t *file_system);

/* Reserves the first nbytes of the file on the device, without writing them. -EOPNOTSUPP where it cannot be
 * done. */
int lamina_preallocate(int fd, uint64_t nbytes);

#endif
