/* Threads that carry pieces out with pread and pwrite, started on demand. */
#ifndef LAMINA_POOL_H
#define LAMINA_POOL_H
#include "engine.h"

struct pool;

/* wants: which requests its threads take, a set of 1 << enum request_class. NULL: no memory. */
struct pool *pool_open(struct lamina_engine *engine, uint32_t max_threads, unsigned wants);

/* Lock held: wakes or starts a thread if one is to be had. -errno when there is none at all. */
int pool_kick(struct pool *pool);

uint32_t pool_num_threads(const struct pool *pool);

/* Nothing is left to do: ends the threads. */
void pool_close(struct pool *pool);

#endif
