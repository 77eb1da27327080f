/* An older kernel, for LD_PRELOAD: setup flags in OLD_KERNEL_FLAGS and, with OLD_KERNEL_SLOTS, tables of
 * registered files and buffers are refused as such kernels do. */
#include <dlfcn.h>
#include <errno.h>
#include <liburing.h>
#include <stdlib.h>

typedef int setup(unsigned entries, struct io_uring *ring, struct io_uring_params *params);
typedef int reserve(struct io_uring *ring, unsigned count);

int io_uring_queue_init_params(unsigned entries, struct io_uring *ring, struct io_uring_params *params) {
    const char *flags = getenv("OLD_KERNEL_FLAGS");
    if (flags && params->flags & strtoul(flags, NULL, 0))
        return -EINVAL;
    return ((setup *)dlsym(RTLD_NEXT, "io_uring_queue_init_params"))(entries, ring, params);
}

int io_uring_register_files_sparse(struct io_uring *ring, unsigned count) {
    if (getenv("OLD_KERNEL_SLOTS"))
        return -EINVAL;
    return ((reserve *)dlsym(RTLD_NEXT, "io_uring_register_files_sparse"))(ring, count);
}

int io_uring_register_buffers_sparse(struct io_uring *ring, unsigned count) {
    if (getenv("OLD_KERNEL_SLOTS"))
        return -EINVAL;
    return ((reserve *)dlsym(RTLD_NEXT, "io_uring_register_buffers_sparse"))(ring, count);
}
