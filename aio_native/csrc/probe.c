#include "probe.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#define LARGEST_ALIGN 65536u

int lamina_probe_file_system(int fd, uint64_t *file_system) {
    struct statfs status;
    if (fstatfs(fd, &status))
        return -errno;
    *file_system = (uint64_t)status.f_type & 0xffffffffu; /* some kernels sign-extend it */
    return 0;
}

/* 1: the file system said; alignments of 0 mean that it has no direct I/O for this file. */
static int ask(int fd, struct lamina_probe *probe) {
#ifdef STATX_DIOALIGN
    struct statx status;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) || !(status.stx_mask & STATX_DIOALIGN))
        return 0;
    probe->offset_align = status.stx_dio_offset_align;
    probe->memory_align = status.stx_dio_mem_align;
    return 1;
#else
    (void)fd, (void)probe;
    return 0;
#endif
}

/* 0 or the errno of a read at that alignment. */
static int try_read(int fd, void *memory, uint32_t align) {
    ssize_t n;
    do
        n = pread(fd, memory, align, 0);
    while (n < 0 && errno == EINTR);
    return n < 0 ? errno : 0;
}

int lamina_probe_direct(int fd, struct lamina_probe *probe) {
    *probe = (struct lamina_probe){0};
    int rc = lamina_probe_file_system(fd, &probe->file_system);
    if (rc)
        return rc;
    void *memory = aligned_alloc(LARGEST_ALIGN, LARGEST_ALIGN);
    if (!memory)
        return -ENOMEM;
    probe->told = (uint32_t)ask(fd, probe);
    if (probe->told && (!probe->offset_align || probe->offset_align > LARGEST_ALIGN)) {
        probe->error = EOPNOTSUPP;
    } else if (probe->told) {
        probe->error = try_read(fd, memory, probe->offset_align);
    } else {
        /* A read of a hole or at the end succeeds at any alignment, so nothing below 4096 is believed. */
        uint32_t align = 4096;
        while ((probe->error = try_read(fd, memory, align)) == EINVAL && align < LARGEST_ALIGN)
            align *= 2;
        probe->offset_align = probe->memory_align = align;
    }
    if (probe->error)
        probe->offset_align = probe->memory_align = 0;
    free(memory);
    return 0;
}

int lamina_preallocate(int fd, uint64_t nbytes) {
    if (nbytes > (uint64_t)INT64_MAX)
        return -EFBIG;
    while (fallocate(fd, 0, 0, (off_t)nbytes))
        if (errno != EINTR)
            return -errno;
    return 0;
}
