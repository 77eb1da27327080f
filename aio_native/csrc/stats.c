#include "stats.h"

#include "clock.h"
#include "core.h"

void stats_book(struct lamina_device_stats *stats, const struct device *d, uint64_t now) {
    uint64_t span = now - d->since_ns;
    const uint32_t *inflight = d->inflight;
    *(stats->inflight ? &stats->busy_ns : &stats->idle_ns) += span;
    stats->depth_ns += span * stats->inflight;
    stats->read.busy_ns += inflight[0] ? span : 0;
    stats->write.busy_ns += inflight[1] ? span : 0;
    stats->sync.busy_ns += inflight[2] ? span : 0;
    stats->read.alone_ns += inflight[0] && !inflight[1] ? span : 0;
    stats->write.alone_ns += inflight[1] && !inflight[0] ? span : 0;
}

int lamina_stats(struct lamina_engine *e, struct lamina_device_stats *stats, uint32_t count) {
    uint32_t n = 0;
    pthread_mutex_lock(&e->lock);
    uint64_t now = now_ns();
    for (const struct device *d = e->devices; d; d = d->next, n++)
        if (n < count) {
            stats[n] = d->stats;
            /* The running interval is booked too, so that a long idle spell shows before it ends. */
            stats_book(&stats[n], d, now);
        }
    pthread_mutex_unlock(&e->lock);
    return (int)n;
}
