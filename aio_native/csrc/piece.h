/* A piece: one transfer of at most block_bytes between a file and memory, and what to do with its outcome. */
#ifndef LAMINA_PIECE_H
#define LAMINA_PIECE_H
#include <stdint.h>

#include "request.h"

enum piece_kind {
    PIECE_PLAIN,   /* straight between the file and the caller's memory */
    PIECE_BOUNCE,  /* whole aligned blocks (for reads: blocks that cover the bytes) by way of bounce memory */
    PIECE_PARTIAL, /* a write of a part of one block */
    PIECE_SYNC,
};

enum piece_phase {
    PHASE_MOVE,
    PHASE_FILL,   /* PARTIAL: reading the block whose other bytes must stay */
    PHASE_EXTEND, /* PARTIAL at the end of the file: through the page cache, which keeps the file's exact
                     length */
};

enum piece_verdict { PIECE_AGAIN, PIECE_DONE };

struct piece {
    struct piece *next, *previous; /* among the active or the free */
    struct request *request;
    enum piece_kind kind;
    enum piece_phase phase;
    char *user; /* the caller's bytes */
    uint64_t user_offset, user_bytes;
    char *bounce;
    uint64_t span_offset, span_bytes; /* the blocks of the file that are touched */
    uint64_t need;                    /* leading bytes of the span without which the piece has failed */
    uint64_t moved;                   /* leading bytes of the span that are done, aligned for a direct file */
    uint64_t best;                    /* most bytes ever done: no growth means the end of the file */
    int error;
    int force_async; /* the driver was told EAGAIN: let the kernel wait by itself */
    uint64_t started_ns;
    uint64_t alone_before_ns; /* time of its direction alone, when it started */
    /* What the driver is to do next. */
    int fd;
    int operation; /* enum lamina_operation */
    char *address;
    uint64_t nbytes;
    uint64_t offset;
};

/* Cuts the next piece off the request (lock held; bounce memory not yet taken). Does not advance the cursor.
 */
void piece_cut(struct piece *piece, struct request *request, uint64_t block_bytes,
               uint64_t bounce_block_bytes);

/* Whether most of the request has to be copied through bounce memory, and that is a lot. */
int piece_needs_copies(const struct request *request);

/* Whether the two writes may touch the same block with at least one of them rewriting other bytes than its
 * own. */
int piece_conflicts(const struct piece *a, const struct piece *b);

/* Copies in and decides the first operation (lock not held). */
void piece_prepare(struct piece *piece);

/* Takes the outcome of the operation (a byte count or -errno; lock not held) and says whether to go on. */
enum piece_verdict piece_advance(struct piece *piece, int64_t outcome);

/* The caller's bytes, from the start of the piece, that are good. */
uint64_t piece_good(const struct piece *piece);

/* Carries the piece out in this thread. */
void piece_run(struct piece *piece);

#endif
