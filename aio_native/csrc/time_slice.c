#include "time_slice.h"

#include <sched.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SLICE_NS 100000 /* the least that the kernel grants */

/* struct sched_attr of the kernel; not every C library has it. */
struct attributes {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
};

void time_slice_shorten(void) {
    struct attributes now = {.size = sizeof now};
    if (syscall(SYS_sched_getattr, 0, &now, sizeof now, 0) || now.policy != SCHED_OTHER)
        return;
    now.size = sizeof now;
    now.runtime = SLICE_NS;
    (void)syscall(SYS_sched_setattr, 0, &now, 0); /* only a wish */
}
