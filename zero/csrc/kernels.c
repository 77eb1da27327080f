/* Entry points: check the arguments, cut the work into fixed chunks, hand them to the pool.
 *
 * A chunk is a fixed number of elements counted from the start of the call, so which thread takes it changes
 * nothing; an element's result depends on that element alone, so neither do chunk size and alignment. */
#define _GNU_SOURCE
#include "kernels.h"
#include "crc32c.h"
#include "fpenv.h"
#include "ops.h"
#include "pool.h"
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum {
    /* 448 KiB of fp32 state: long enough for the prefetchers, short enough to share evenly */
    ADAM_CHUNK = LK_SUM_PIECE,
    FEW_UPDATES = 15,
    PLAIN_CHUNK = 65536, /* multiple of LK_NORM_BLOCK */
};

struct lk_pool {
    lk_threads *threads;
    const lk_ops *ops;
};

static const lk_ops *ops_of(int path) {
    switch (path) {
    case LK_PORTABLE:
        return lk_ops_portable;
#if defined(__x86_64__)
    case LK_AVX2:
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                       __builtin_cpu_supports("f16c")
                   ? lk_ops_avx2
                   : NULL;
    case LK_AVX512:
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                       __builtin_cpu_supports("fma")
                   ? lk_ops_avx512
                   : NULL;
#endif
    case LK_NEON:
        return lk_ops_neon;
    default:
        return NULL;
    }
}

int lk_path_usable(int path) {
    return ops_of(path) != NULL;
}

int lk_best_path(void) {
    static const int order[] = {LK_AVX512, LK_AVX2, LK_NEON};
    for (size_t i = 0; i < sizeof order / sizeof *order; i++)
        if (ops_of(order[i]))
            return order[i];
    return LK_PORTABLE;
}

int lk_open(lk_pool **out, int num_threads, const int *cores, int num_cores, int path) {
    const lk_ops *ops = ops_of(path);
    if (ops == NULL)
        return -ENOTSUP;
    lk_pool *pool = malloc(sizeof *pool);
    if (pool == NULL)
        return -ENOMEM;
    pool->ops = ops;
    int rc = lk_threads_start(&pool->threads, num_threads, cores, num_cores);
    if (rc) {
        free(pool);
        return rc;
    }
    *out = pool;
    return 0;
}

int lk_use_team(lk_pool *pool) {
    return lk_threads_use_team(pool->threads);
}

int lk_stop(lk_pool *pool) {
    return lk_threads_stop(pool->threads);
}

void lk_free(lk_pool *pool) {
    lk_threads_free(pool->threads);
    free(pool);
}

/* ---- one call's work: a slice function and the chunk length ---- */

typedef struct call call;
struct call {
    const lk_ops *ops;
    int64_t n, chunk;
    void (*slice)(call *c, int64_t begin, int64_t end);
    const lk_adam_args *adam;
    int64_t count;
    const int64_t *first;
    char *src, *dst, *extra; /* meaning depends on slice */
    int src_dtype, dst_dtype, flag;
    float scale;
    const uintptr_t *from, *to;
    _Atomic int found;
};

static void run_chunk(void *context, int64_t index) {
    call *c = context;
    int64_t begin = index * c->chunk;
    int64_t end = c->n - begin < c->chunk ? c->n : begin + c->chunk;
    lk_fpenv saved = lk_fpenv_default();
    c->slice(c, begin, end);
    lk_fpenv_restore(saved);
}

static int run(lk_pool *pool, call *c) {
    c->ops = pool->ops;
    return lk_threads_run(pool->threads, (c->n + c->chunk - 1) / c->chunk, run_chunk, c);
}

static int bad_dtype(int dtype) {
    return dtype != LK_FP32 && dtype != LK_BF16 && dtype != LK_FP16;
}

static int adam_args_fit(const lk_adam_args *a) {
    if (a->n == 0)
        return 1;
    int fits = 0;
    if (a->master_kind == LK_IN_PARAM)
        fits = a->param_dtype == LK_FP32;
    else if (a->master_kind == LK_SPLIT)
        fits = a->param_dtype == LK_BF16 && a->remainder;
    else if (a->master_kind == LK_COPY)
        fits = (a->param_dtype == LK_BF16 || a->param_dtype == LK_FP16) && a->master;
    return fits && a->n > 0 && a->scalars != NULL && !bad_dtype(a->grad_dtype);
}

/* The checksums of one chunk of what an update wrote; its bytes are in this core's cache. */
static void sum_chunk(const lk_adam_args *a, int64_t begin, int64_t end) {
    const uintptr_t planes[] = {a->param, a->exp_avg, a->exp_avg_sq,
                                a->master_kind == LK_SPLIT ? a->remainder : a->master};
    const size_t sizes[] = {lk_itemsize(a->param_dtype), 4, 4, a->master_kind == LK_SPLIT ? 2 : 4};
    int64_t pieces = (a->n + LK_SUM_PIECE - 1) / LK_SUM_PIECE;
    uint32_t *sums = (uint32_t *)a->sums + begin / LK_SUM_PIECE;
    for (int i = 0; i < (a->master_kind == LK_IN_PARAM ? 3 : 4); i++)
        sums[i * pieces] = lamina_crc32c(0, (const char *)planes[i] + (size_t)begin * sizes[i],
                                         (size_t)(end - begin) * sizes[i]);
}

/* Chunk `index` of all updates together: first[k] is the first chunk of update k. */
static void adam_chunk(void *context, int64_t index) {
    const call *c = context;
    int64_t low = 0, high = c->count; /* first[low] <= index < first[high] */
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (c->first[middle] <= index)
            low = middle;
        else
            high = middle;
    }
    const lk_adam_args *a = &c->adam[low];
    int64_t begin = (index - c->first[low]) * c->chunk;
    int64_t end = a->n - begin < c->chunk ? a->n : begin + c->chunk;
    lk_fpenv saved = lk_fpenv_default();
    c->ops->adam(a, begin, end);
    lk_fpenv_restore(saved);
    if (a->sums)
        sum_chunk(a, begin, end);
}

int lk_adam(lk_pool *pool, const lk_adam_args *args, int64_t count) {
    if (count < 0)
        return -EINVAL;
    int64_t few[FEW_UPDATES + 1], chunks = 0;
    int64_t *first = count <= FEW_UPDATES ? few : malloc(sizeof *first * ((size_t)count + 1));
    if (first == NULL)
        return -ENOMEM;
    int rc = 0;
    for (int64_t k = 0; k < count && rc == 0; k++) {
        first[k] = chunks;
        rc = adam_args_fit(&args[k]) ? 0 : -EINVAL;
        chunks += (args[k].n + ADAM_CHUNK - 1) / ADAM_CHUNK;
    }
    first[count] = chunks;
    if (rc == 0) {
        call c = {.ops = pool->ops, .chunk = ADAM_CHUNK, .adam = args, .count = count, .first = first};
        rc = lk_threads_run(pool->threads, chunks, adam_chunk, &c);
    }
    for (int64_t k = 0; k < count && rc == 0; k++)
        if (args[k].counter)
            *(float *)args[k].counter += 1.0f;
    if (first != few)
        free(first);
    return rc;
}

int lk_counters_agree(const lk_adam_args *args, int64_t count) {
    for (int64_t k = 0; k < count; k++)
        if (args[k].counter && *(const float *)args[k].counter + 1.0f != args[k].scalars->step)
            return 0;
    return 1;
}

static void norm_slice(call *c, int64_t begin, int64_t end) {
    double *partials = (double *)c->dst;
    size_t size = lk_itemsize(c->src_dtype);
    for (int64_t i = begin; i < end; i += LK_NORM_BLOCK) {
        int64_t n = end - i < LK_NORM_BLOCK ? end - i : LK_NORM_BLOCK;
        partials[i / LK_NORM_BLOCK] = c->ops->squared_norm(c->src + (size_t)i * size, c->src_dtype, n);
    }
}

int lk_squared_norm(lk_pool *pool, int64_t n, uintptr_t src, int dtype, uintptr_t partials) {
    if (n < 0 || bad_dtype(dtype))
        return -EINVAL;
    call c = {.n = n,
              .chunk = PLAIN_CHUNK,
              .slice = norm_slice,
              .src = (char *)src,
              .src_dtype = dtype,
              .dst = (char *)partials};
    return run(pool, &c);
}

static void nonfinite_slice(call *c, int64_t begin, int64_t end) {
    if (atomic_load_explicit(&c->found, memory_order_relaxed))
        return;
    if (c->ops->has_nonfinite(c->src + (size_t)begin * lk_itemsize(c->src_dtype), c->src_dtype, end - begin))
        atomic_store_explicit(&c->found, 1, memory_order_relaxed);
}

int lk_has_nonfinite(lk_pool *pool, int64_t n, uintptr_t src, int dtype) {
    if (n < 0 || bad_dtype(dtype))
        return -EINVAL;
    call c = {.n = n, .chunk = PLAIN_CHUNK, .slice = nonfinite_slice, .src = (char *)src, .src_dtype = dtype};
    int rc = run(pool, &c);
    return rc ? rc : atomic_load(&c.found);
}

static void accumulate_slice(call *c, int64_t begin, int64_t end) {
    c->ops->accumulate((float *)c->dst + begin, c->src + (size_t)begin * lk_itemsize(c->src_dtype),
                       c->src_dtype, c->scale, c->flag, end - begin);
}

int lk_accumulate(lk_pool *pool, int64_t n, uintptr_t dst, uintptr_t src, int src_dtype, float scale,
                  int add) {
    if (n < 0 || bad_dtype(src_dtype))
        return -EINVAL;
    call c = {.n = n,
              .chunk = PLAIN_CHUNK,
              .slice = accumulate_slice,
              .src = (char *)src,
              .src_dtype = src_dtype,
              .dst = (char *)dst,
              .scale = scale,
              .flag = add};
    return run(pool, &c);
}

static void split_slice(call *c, int64_t begin, int64_t end) {
    c->ops->split((const float *)c->src + begin, (uint16_t *)c->dst + begin, (int16_t *)c->extra + begin,
                  end - begin);
}

static void merge_slice(call *c, int64_t begin, int64_t end) {
    c->ops->merge((float *)c->src + begin, (const uint16_t *)c->dst + begin,
                  (const int16_t *)c->extra + begin, end - begin);
}

static int split_or_merge(lk_pool *pool, int64_t n, uintptr_t master, uintptr_t param, uintptr_t remainder,
                          void (*slice)(call *, int64_t, int64_t)) {
    if (n < 0)
        return -EINVAL;
    call c = {.n = n,
              .chunk = PLAIN_CHUNK,
              .slice = slice,
              .src = (char *)master,
              .dst = (char *)param,
              .extra = (char *)remainder};
    return run(pool, &c);
}

int lk_split_bf16(lk_pool *pool, int64_t n, uintptr_t master, uintptr_t param, uintptr_t remainder) {
    return split_or_merge(pool, n, master, param, remainder, split_slice);
}

int lk_merge_bf16(lk_pool *pool, int64_t n, uintptr_t master, uintptr_t param, uintptr_t remainder) {
    return split_or_merge(pool, n, master, param, remainder, merge_slice);
}

static void convert_slice(call *c, int64_t begin, int64_t end) {
    c->ops->convert(c->src + (size_t)begin * lk_itemsize(c->src_dtype), c->src_dtype,
                    c->dst + (size_t)begin * lk_itemsize(c->dst_dtype), c->dst_dtype, end - begin);
}

int lk_convert(lk_pool *pool, int64_t n, uintptr_t src, int src_dtype, uintptr_t dst, int dst_dtype) {
    if (n < 0 || bad_dtype(src_dtype) || bad_dtype(dst_dtype))
        return -EINVAL;
    call c = {.n = n,
              .chunk = PLAIN_CHUNK,
              .slice = convert_slice,
              .src = (char *)src,
              .src_dtype = src_dtype,
              .dst = (char *)dst,
              .dst_dtype = dst_dtype};
    return run(pool, &c);
}

static void stream_slice(call *c, int64_t begin, int64_t end) {
    const float *from[3];
    float *to[3];
    for (int i = 0; i < 3; i++) {
        from[i] = (const float *)c->from[i] + begin;
        to[i] = (float *)c->to[i] + begin;
    }
    c->ops->stream(from, to, c->flag, end - begin);
}

int lk_stream(lk_pool *pool, int64_t n, const uintptr_t *from, const uintptr_t *to, int non_temporal) {
    if (n < 0)
        return -EINVAL;
    call c = {
        .n = n, .chunk = PLAIN_CHUNK, .slice = stream_slice, .from = from, .to = to, .flag = non_temporal};
    return run(pool, &c);
}

void lk_copy(uintptr_t dst, uintptr_t src, int64_t nbytes) {
    memcpy((void *)dst, (const void *)src, (size_t)nbytes);
}
