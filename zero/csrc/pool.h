/* A fixed pool of POSIX threads that work through the chunks of one call at a time. */
#ifndef LAMINA_POOL_H
#define LAMINA_POOL_H
#include <stdint.h>

typedef struct lk_threads lk_threads;
typedef void (*lk_chunk_fn)(void *context, int64_t chunk);

int lk_threads_start(lk_threads **out, int num_threads, const int *cores, int num_cores);
/* Runs fn(context, 0 .. chunks-1), each once, on the workers and (unless they are bound to cores) the caller;
 * returns when all are done.  Any number of threads may call at once: they take turns. */
int lk_threads_run(lk_threads *threads, int64_t chunks, lk_chunk_fn fn, void *context);
/* From now on the jobs of the calling thread, and of no other, are done by its OpenMP team whenever that has
 * just as many threads; see team.h.  1, or 0 where no team can be used (workers bound to cores, no torch). */
int lk_threads_use_team(lk_threads *threads);
int lk_threads_check(const lk_threads *threads);
int lk_threads_stop(lk_threads *threads);
void lk_threads_free(lk_threads *threads);
#endif
