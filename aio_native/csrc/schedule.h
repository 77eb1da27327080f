/* Which piece starts next, and what follows from one that has ended. The lock is held in every call. */
#ifndef LAMINA_SCHEDULE_H
#define LAMINA_SCHEDULE_H
#include "core.h"

/* Starts the most urgent piece, of a class in the set `wants`, that may start now; NULL if none may. */
struct piece *schedule_take(struct lamina_engine *engine, unsigned wants);

/* Whether schedule_take could find something (it may still be held back by a limit). */
int schedule_waiting(const struct lamina_engine *engine);

/* All requests of the transfer have been added; ends it if they are done already. */
void schedule_submitted(struct lamina_engine *engine, struct lamina_transfer *transfer);

/* Takes a queued request away from the driver, and gives it back. */
void schedule_claim(struct request *request);
void schedule_unclaim(struct request *request);

/* Starts the next piece of this one request, in memory of the caller's. 0 when it may not start now. */
int schedule_take_from(struct lamina_engine *engine, struct request *request, struct piece *piece);

/* The piece has ended. */
void schedule_finish(struct lamina_engine *engine, struct piece *piece);

/* Files the request under its device, or parks a sync until the writes before it are done. */
void schedule_add(struct lamina_engine *engine, struct request *request);

/* Starts nothing more of the transfer; returns whether there was anything left to start. cancel: its error is
 * then ECANCELED, unless something failed by itself. */
int schedule_drop(struct lamina_engine *engine, struct lamina_transfer *transfer, int cancel);

#endif
