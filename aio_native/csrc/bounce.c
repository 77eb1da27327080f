#include "bounce.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

#define HUGE_PAGE ((uint64_t)2 << 20)

static int map_blocks(struct bounce_pool *pool) {
    uint64_t nbytes = (pool->block_bytes * pool->num_blocks + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    void *mapping =
        mmap(NULL, nbytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED)
        return -errno;
    pool->mapping = mapping;
    pool->mapping_bytes = nbytes + HUGE_PAGE;
    pool->base = (char *)(((uintptr_t)mapping + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    /* A kernel without transparent huge pages refuses; small pages are slower and just as right. */
    (void)madvise(pool->base, nbytes, MADV_HUGEPAGE);
    return 0;
}

int bounce_init(struct bounce_pool *pool, uint64_t block_bytes, uint32_t num_blocks) {
    *pool =
        (struct bounce_pool){.block_bytes = block_bytes, .num_blocks = num_blocks, .num_free = num_blocks};
    pool->free_blocks = calloc(num_blocks, sizeof *pool->free_blocks);
    if (!pool->free_blocks)
        return -ENOMEM;
    /* Low blocks are taken first, so that a light load touches few huge pages. */
    for (uint32_t i = 0; i < num_blocks; i++)
        pool->free_blocks[i] = num_blocks - 1 - i;
    int rc = map_blocks(pool);
    if (rc)
        free(pool->free_blocks);
    return rc;
}

void bounce_destroy(struct bounce_pool *pool) {
    if (pool->mapping)
        munmap(pool->mapping, pool->mapping_bytes);
    free(pool->free_blocks);
    *pool = (struct bounce_pool){0};
}

char *bounce_take(struct bounce_pool *pool) {
    if (!pool->num_free)
        return NULL;
    return pool->base + pool->free_blocks[--pool->num_free] * pool->block_bytes;
}

void bounce_give(struct bounce_pool *pool, char *block) {
    pool->free_blocks[pool->num_free++] = (uint32_t)((uint64_t)(block - pool->base) / pool->block_bytes);
}
