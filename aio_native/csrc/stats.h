/* Counters of one device. */
#ifndef LAMINA_STATS_H
#define LAMINA_STATS_H
#include "engine.h"

struct lamina_direction_stats {
    uint64_t bytes;
    uint64_t operations; /* pieces completed */
    uint64_t errors;
    uint64_t latency_ns;     /* sum */
    uint64_t max_latency_ns; /* worst piece */
    uint64_t bounced_bytes;
    uint64_t busy_ns;     /* time with at least one piece of this direction in flight */
    uint64_t alone_ns;    /* of it, that with none of the opposite one (a sync has none) */
    uint64_t alone_bytes; /* that it moved in that time */
    uint64_t
        histogram[32]; /* bucket i: latency in [2^i, 2^(i+1)) microseconds, bucket 0 also holds less than 1 */
};

struct lamina_device_stats {
    uint64_t device; /* st_dev */
    uint64_t inflight_bytes;
    uint64_t max_inflight_bytes;
    uint64_t idle_ns; /* time since the device was first seen with nothing in flight */
    uint64_t busy_ns;
    uint64_t depth_ns; /* integral of pieces in flight over time: divide by busy_ns for the mean depth */
    uint32_t inflight;
    uint32_t max_inflight;
    struct lamina_direction_stats read;
    struct lamina_direction_stats write;
    struct lamina_direction_stats sync;
};

/* Fills up to count entries; returns how many devices there are. */
int lamina_stats(struct lamina_engine *engine, struct lamina_device_stats *stats, uint32_t count);

#endif
