/* How long a worker waits awake for the next job: arithmetic alone, no clock.
 *
 * [Note: Patience] Waking a sleeping thread takes longest where the processor is virtual and its idle core
 * was given back to the host.  Waiting awake is free where the core has nothing else to do and costs whoever
 * wants it.  So:
 *   - LK_BRIEF_NS after every job, in which nobody is asked: calls back to back;
 *   - LK_LONG_NS where one of the last jobs came that soon after another, as the calls of one optimizer step
 * do: norm, then update.  A training loop with one call per step never pays it, one with several pays it a
 * few times.  After the brief time a worker offers its core to others at every turn, and once somebody took
 * it (it was away for LK_WANTED_NS), it sleeps at once: threads that compute between steps never wait for one
 * that spins. */
#ifndef LAMINA_PATIENCE_H
#define LAMINA_PATIENCE_H
#include <stdint.h>

enum { LK_BRIEF_NS = 20000, LK_LONG_NS = 200000, LK_WANTED_NS = 10000 };
enum { LK_GAPS_KEPT = 4 };

/* gaps: one bit for each of the last gaps between jobs, set where it was short.  The bits with one more gap.
 */
static inline uint32_t lk_gaps_with(uint32_t gaps, int64_t gap_ns) {
    return (gaps << 1 | (gap_ns < LK_LONG_NS)) & ((1u << LK_GAPS_KEPT) - 1);
}

static inline int64_t lk_patience_ns(uint32_t gaps) {
    return gaps ? LK_LONG_NS : LK_BRIEF_NS;
}
#endif
