/* Aligned blocks that stand in for memory which the device cannot reach directly. */
#ifndef LAMINA_BOUNCE_H
#define LAMINA_BOUNCE_H
#include <stdint.h>

struct bounce_pool {
    char *base; /* 2 MiB aligned; costs nothing until it is touched */
    void *mapping;
    uint64_t mapping_bytes;
    uint64_t block_bytes;
    uint32_t num_blocks;
    uint32_t num_free;
    uint32_t *free_blocks; /* stack of indices */
};

int bounce_init(struct bounce_pool *pool, uint64_t block_bytes, uint32_t num_blocks);
void bounce_destroy(struct bounce_pool *pool);

/* NULL: none is free now. */
char *bounce_take(struct bounce_pool *pool);
void bounce_give(struct bounce_pool *pool, char *block);

#endif
