/* The C face of lamina.zero.adam.kernels, and the cffi declarations too (lines that start with # are dropped
 * there).
 *
 * Addresses travel as integers: the Python side owns the memory and keeps it alive during a call.  Every
 * function returns 0 (or a count) or -errno, prints nothing and never exits.  -ESTALE: the pool belongs to
 * another process (fork); -EBADF: the pool was stopped. */
#ifndef LAMINA_KERNELS_H
#define LAMINA_KERNELS_H
#include <stdint.h>

typedef struct lk_pool lk_pool;

enum { LK_SUM_PIECE = 16384 }; /* elements to a checksum */

enum lk_path { LK_PORTABLE = 0, LK_AVX2 = 1, LK_AVX512 = 2, LK_NEON = 3 };
enum lk_dtype { LK_FP32 = 0, LK_BF16 = 1, LK_FP16 = 2 };

/* How the fp32 master is kept: in the parameter itself, as a bf16 parameter plus 16-bit remainder, or as a
 * plane. */
enum lk_master { LK_IN_PARAM = 0, LK_SPLIT = 1, LK_COPY = 2 };

/* What one step needs besides its planes; formed in double, rounded once. */
typedef struct {
    float grad_multiplier; /* negative to maximize */
    float decay;           /* 1 - lr * weight_decay, or 1 */
    float weight_decay;    /* used when l2 */
    float beta2;
    float one_minus_beta1;
    float one_minus_beta2;
    float bias_correction2_sqrt;
    float eps;
    float neg_step_size; /* -lr / bias_correction1 */
    float step;          /* counts from 1; compared with the counters of planes */
    int32_t l2;          /* nonzero: weight decay goes into the gradient */
} lk_adam_scalars;

/* One update: its planes, and the scalars that it may share with others. */
typedef struct {
    int64_t n;            /* elements */
    uintptr_t param;      /* fp32, bf16 or fp16 */
    uintptr_t grad;       /* fp32, bf16 or fp16, only read */
    uintptr_t exp_avg;    /* fp32 */
    uintptr_t exp_avg_sq; /* fp32 */
    uintptr_t master;     /* fp32, with LK_COPY */
    uintptr_t remainder;  /* int16, with LK_SPLIT */
    uintptr_t counter;    /* fp32: steps done so far, counted up after the update; 0 for none */
    uintptr_t sums;       /* uint32: see lk_adam; 0 for none */
    const lk_adam_scalars *scalars;
    int32_t param_dtype; /* enum lk_dtype */
    int32_t grad_dtype;  /* enum lk_dtype */
    int32_t master_kind; /* enum lk_master */
    int32_t adopt_param; /* LK_COPY: where param is not the rounded master, somebody edited it: start from
                            param */
} lk_adam_args;

int lk_path_usable(int path);
int lk_best_path(void);

int lk_open(lk_pool **out, int num_threads, const int *cores, int num_cores, int path);
/* Calls of this thread are from now on done by its OpenMP team, where that fits: 1, or 0 where none can be
 * used. */
int lk_use_team(lk_pool *pool);
int lk_stop(lk_pool *pool);
void lk_free(lk_pool *pool);

/* Any number of separate updates in one call.
 *
 * sums: the CRC32C of each piece of LK_SUM_PIECE elements (the last may be shorter) of what was written,
 * taken while it is in the cache: first those of param, then of exp_avg, exp_avg_sq, and of remainder or
 * master. */
int lk_adam(lk_pool *pool, const lk_adam_args *args, int64_t count);
/* 1 when every counter of these updates stands at one less than its scalars' step, else 0. */
int lk_counters_agree(const lk_adam_args *args, int64_t count);
/* One double per block of 4096 elements. */
int lk_squared_norm(lk_pool *pool, int64_t n, uintptr_t src, int dtype, uintptr_t partials);
/* 1 when an infinity or NaN is there, else 0. */
int lk_has_nonfinite(lk_pool *pool, int64_t n, uintptr_t src, int dtype);
/* dst (fp32) = or += src * scale, the product rounded first. */
int lk_accumulate(lk_pool *pool, int64_t n, uintptr_t dst, uintptr_t src, int src_dtype, float scale,
                  int add);
int lk_split_bf16(lk_pool *pool, int64_t n, uintptr_t master, uintptr_t param, uintptr_t remainder);
int lk_merge_bf16(lk_pool *pool, int64_t n, uintptr_t master, uintptr_t param, uintptr_t remainder);
int lk_convert(lk_pool *pool, int64_t n, uintptr_t src, int src_dtype, uintptr_t dst, int dst_dtype);
/* Streaming ceiling: three fp32 planes of n elements read and written, in place (to[i] == from[i]) or copied.
 */
int lk_stream(lk_pool *pool, int64_t n, const uintptr_t *from, const uintptr_t *to, int non_temporal);
/* Plain bytes in the calling thread: for copies that must not take threads from others. */
void lk_copy(uintptr_t dst, uintptr_t src, int64_t nbytes);
#endif
