/* The loops of every dispatch path, written once over a small vector vocabulary.
 *
 * Included by path_*.c, which first define: LANES, PATH_OPS (the table's name), vf (LANES floats) and vf_set,
 * vf_load, vf_store, vf_store_nt, vf_load_bf16, vf_load_fp16, vf_store_bf16, vf_store_fp16 (all any alignment
 * but vf_store_nt), vf_mul, vf_add, vf_sub, vf_div, vf_sqrt, vf_fma(a, b, c) = a*b+c rounded once, vf_merge,
 * vf_split, vf_split_pair, vf_choose_equal(a, b, x, y) = a == b ? x : y bit by bit, vf_any_nan, the 32 double
 * accumulators va with va_zero, va_add, va_get; and root_over with root_constants and ROOT_GUARDED, see
 * [Note: Roots].
 *
 * [Note: Same bits] IEEE 754 fixes the result of each of these operations, so paths agree as long as they do
 * the same operations in the same order.  The build switches contraction off (-ffp-contract=off): only vf_fma
 * fuses. */
#include "ops.h"
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

INLINE vf load_as_float(const void *src, int64_t i, int dtype) {
    if (dtype == LK_FP32)
        return vf_load((const float *)src + i);
    if (dtype == LK_BF16)
        return vf_load_bf16((const uint16_t *)src + i);
    return vf_load_fp16((const uint16_t *)src + i);
}

INLINE void store_from_float(void *dst, int64_t i, int dtype, vf x) {
    if (dtype == LK_FP32)
        vf_store((float *)dst + i, x);
    else if (dtype == LK_BF16)
        vf_store_bf16((uint16_t *)dst + i, x);
    else
        vf_store_fp16((uint16_t *)dst + i, x);
}

/* ---- Adam ---- */

/* [Note: Roots] sqrt(v) / sqrt(1 - beta2^t) is two slow operations, each rounded.  A path may do them its own
 * way in root_over, under two conditions: wherever the result is not NaN it has the bits of the two IEEE
 * operations, and if it may be NaN where they are not (an infinite v, say), ROOT_GUARDED is 1 and a NaN
 * parameter is computed again with them. */
typedef struct {
    vf multiplier, decay, weight_decay, lerp, beta2, one_minus_beta2, correction, eps, neg_step;
    root_constants root;
} adam_constants;

typedef struct {
    char *param, *master, *grad;
    float *exp_avg, *exp_avg_sq;
    int16_t *remainder;
} adam_planes;

/* The variant of the loop: compile-time constants in every instance. */
typedef struct {
    int master_kind, param_dtype, grad_dtype, adopt, l2, far;
} adam_variant;

INLINE vf adam_load_master(const adam_planes *at, int64_t i, adam_variant k) {
    if (k.master_kind == LK_IN_PARAM)
        return vf_load((const float *)at->param + i);
    if (k.master_kind == LK_SPLIT)
        return vf_merge((const uint16_t *)at->param + i, at->remainder + i);
    vf master = vf_load((const float *)at->master + i);
    if (!k.adopt)
        return master;
    uint16_t rounded[LANES];
    store_from_float(rounded, 0, k.param_dtype, master);
    vf param = load_as_float(at->param, i, k.param_dtype);
    return vf_choose_equal(param, load_as_float(rounded, 0, k.param_dtype), master, param);
}

INLINE void adam_store_master(const adam_planes *at, int64_t i, adam_variant k, vf master) {
    if (k.master_kind == LK_IN_PARAM) {
        vf_store((float *)at->param + i, master);
    } else if (k.master_kind == LK_SPLIT) {
        vf_split(master, (uint16_t *)at->param + i, at->remainder + i);
    } else {
        vf_store((float *)at->master + i, master);
        store_from_float(at->param, i, k.param_dtype, master);
    }
}

/* [Note: Order of operations] as in torch's fused CPU kernel for whole vectors, found by comparing bits:
 * m by lerp (from the near end), v's new term fused onto the decayed one, the step's product before its
 * division. A multiplier of 1 and a decay of 1 are exact, so they need no branch; maximize is the
 * multiplier's sign. Stores the moments, returns the new master. */
INLINE vf adam_moments_and_master(const adam_constants *c, const adam_planes *at, int64_t i, adam_variant k) {
    vf g = vf_mul(load_as_float(at->grad, i, k.grad_dtype), c->multiplier);
    vf p = adam_load_master(at, i, k);
    if (k.l2)
        g = vf_fma(p, c->weight_decay, g);
    else
        p = vf_mul(p, c->decay);
    vf m = vf_load(at->exp_avg + i);
    m = vf_fma(c->lerp, vf_sub(g, m), k.far ? g : m);
    vf v = vf_load(at->exp_avg_sq + i);
    v = vf_fma(vf_mul(c->one_minus_beta2, g), g, vf_mul(v, c->beta2));
    vf_store(at->exp_avg + i, m);
    vf_store(at->exp_avg_sq + i, v);
    vf denominator = vf_add(root_over(v, &c->root), c->eps);
    return vf_add(p, vf_div(vf_mul(c->neg_step, m), denominator));
}

/* The new master once more, from the old one and the moments just stored. */
INLINE vf adam_master_again(const adam_constants *c, const adam_planes *at, int64_t i, adam_variant k) {
    vf p = adam_load_master(at, i, k);
    if (!k.l2)
        p = vf_mul(p, c->decay);
    vf root = vf_div(vf_sqrt(vf_load(at->exp_avg_sq + i)), c->correction);
    return vf_add(p, vf_div(vf_mul(c->neg_step, vf_load(at->exp_avg + i)), vf_add(root, c->eps)));
}

INLINE void adam_vector(const adam_constants *c, const adam_planes *at, int64_t i, adam_variant k) {
    vf master = adam_moments_and_master(c, at, i, k);
    if (ROOT_GUARDED && __builtin_expect(vf_any_nan(master), 0))
        master = adam_master_again(c, at, i, k);
    adam_store_master(at, i, k, master);
}

/* Asks for the lines of `count` elements, AHEAD elements further on (a prefetch past the end does no harm).
 * The processor's own prefetchers follow few streams and stop at 4 KiB: with five to eight streams this was
 * worth 5 to 20 % on planes beyond the cache. */
enum { AHEAD = 256, LINE = 64 };

INLINE void prefetch(const void *plane, int64_t i, size_t size, size_t count, int written) {
    uintptr_t address = (uintptr_t)plane + ((size_t)i + AHEAD) * size;
    for (size_t line = 0; line < size * count; line += LINE)
        if (written)
            __builtin_prefetch((const void *)(address + line), 1);
        else
            __builtin_prefetch((const void *)(address + line), 0);
}

INLINE void adam_prefetch(const adam_planes *at, int64_t i, size_t count, adam_variant k) {
    prefetch(at->grad, i, lk_itemsize(k.grad_dtype), count, 0);
    prefetch(at->exp_avg, i, 4, count, 1);
    prefetch(at->exp_avg_sq, i, 4, count, 1);
    prefetch(at->param, i, lk_itemsize(k.param_dtype), count, 1);
    if (k.master_kind == LK_SPLIT)
        prefetch(at->remainder, i, 2, count, 1);
    if (k.master_kind == LK_COPY)
        prefetch(at->master, i, 4, count, 1);
}

/* Two vectors: one look for NaN (the sum of opposite infinities is one too: harmless), stores of whole lines.
 */
INLINE void adam_pair(const adam_constants *c, const adam_planes *at, int64_t i, adam_variant k) {
    if (LANES > 1)
        adam_prefetch(at, i, 2 * LANES, k);
    vf first = adam_moments_and_master(c, at, i, k);
    vf second = adam_moments_and_master(c, at, i + LANES, k);
    if (ROOT_GUARDED && __builtin_expect(vf_any_nan(vf_add(first, second)), 0)) {
        adam_store_master(at, i, k, adam_master_again(c, at, i, k));
        adam_store_master(at, i + LANES, k, adam_master_again(c, at, i + LANES, k));
    } else if (k.master_kind == LK_SPLIT) {
        vf_split_pair(first, second, (uint16_t *)at->param + i, at->remainder + i);
    } else {
        adam_store_master(at, i, k, first);
        adam_store_master(at, i + LANES, k, second);
    }
}

/* The last elements, fewer than LANES, go through a padded copy: same operations, so same bits. */
INLINE void adam_tail(const adam_constants *c, const adam_planes *at, int64_t i, size_t rest,
                      adam_variant k) {
    float param[LANES] = {0}, master[LANES] = {0}, grad[LANES] = {0}, exp_avg[LANES] = {0},
          exp_avg_sq[LANES] = {0};
    int16_t remainder[LANES] = {0};
    size_t param_size = lk_itemsize(k.param_dtype), grad_size = lk_itemsize(k.grad_dtype);
    memcpy(param, at->param + (size_t)i * param_size, rest * param_size);
    memcpy(grad, at->grad + (size_t)i * grad_size, rest * grad_size);
    memcpy(exp_avg, at->exp_avg + i, rest * 4);
    memcpy(exp_avg_sq, at->exp_avg_sq + i, rest * 4);
    if (k.master_kind == LK_SPLIT)
        memcpy(remainder, at->remainder + i, rest * 2);
    if (k.master_kind == LK_COPY)
        memcpy(master, at->master + (size_t)i * 4, rest * 4);
    adam_planes copy = {(char *)param, (char *)master, (char *)grad, exp_avg, exp_avg_sq, remainder};
    adam_vector(c, &copy, 0, k);
    memcpy(at->param + (size_t)i * param_size, param, rest * param_size);
    memcpy(at->exp_avg + i, exp_avg, rest * 4);
    memcpy(at->exp_avg_sq + i, exp_avg_sq, rest * 4);
    if (k.master_kind == LK_SPLIT)
        memcpy(at->remainder + i, remainder, rest * 2);
    if (k.master_kind == LK_COPY)
        memcpy(at->master + (size_t)i * 4, master, rest * 4);
}

INLINE void adam_range(const lk_adam_args *a, int64_t begin, int64_t end, adam_variant k) {
    const lk_adam_scalars *s = a->scalars;
    adam_constants c = {
        .multiplier = vf_set(s->grad_multiplier),
        .decay = vf_set(s->decay),
        .weight_decay = vf_set(s->weight_decay),
        .lerp = vf_set(k.far ? s->one_minus_beta1 - 1.0f : s->one_minus_beta1),
        .beta2 = vf_set(s->beta2),
        .one_minus_beta2 = vf_set(s->one_minus_beta2),
        .correction = vf_set(s->bias_correction2_sqrt),
        .eps = vf_set(s->eps),
        .neg_step = vf_set(s->neg_step_size),
        .root = root_constants_for(s->bias_correction2_sqrt),
    };
    adam_planes at = {(char *)a->param,    (char *)a->master,      (char *)a->grad,
                      (float *)a->exp_avg, (float *)a->exp_avg_sq, (int16_t *)a->remainder};
    int64_t i = begin;
    for (; end - i >= 2 * LANES; i += 2 * LANES)
        adam_pair(&c, &at, i, k);
    if (end - i >= LANES) {
        adam_vector(&c, &at, i, k);
        i += LANES;
    }
    if (LANES > 1 && i < end)
        adam_tail(&c, &at, i, (size_t)(end - i), k);
}

#define ADAM_INSTANCE(NAME, MASTER, PARAM, GRAD, ADOPT)                                                      \
    static void NAME(const lk_adam_args *a, int64_t begin, int64_t end) {                                    \
        int far = !(a->scalars->one_minus_beta1 < 0.5f);                                                     \
        if (a->scalars->l2 && far)                                                                           \
            adam_range(a, begin, end, (adam_variant){MASTER, PARAM, GRAD, ADOPT, 1, 1});                     \
        else if (a->scalars->l2)                                                                             \
            adam_range(a, begin, end, (adam_variant){MASTER, PARAM, GRAD, ADOPT, 1, 0});                     \
        else if (far)                                                                                        \
            adam_range(a, begin, end, (adam_variant){MASTER, PARAM, GRAD, ADOPT, 0, 1});                     \
        else                                                                                                 \
            adam_range(a, begin, end, (adam_variant){MASTER, PARAM, GRAD, ADOPT, 0, 0});                     \
    }
#define ADAM_INSTANCES(NAME, MASTER, PARAM, ADOPT)                                                           \
    ADAM_INSTANCE(NAME##_fp32, MASTER, PARAM, LK_FP32, ADOPT)                                                \
    ADAM_INSTANCE(NAME##_bf16, MASTER, PARAM, LK_BF16, ADOPT)                                                \
    ADAM_INSTANCE(NAME##_fp16, MASTER, PARAM, LK_FP16, ADOPT)

ADAM_INSTANCES(adam_fp32, LK_IN_PARAM, LK_FP32, 0)
ADAM_INSTANCES(adam_split, LK_SPLIT, LK_BF16, 0)
ADAM_INSTANCES(adam_bf16, LK_COPY, LK_BF16, 0)
ADAM_INSTANCES(adam_fp16, LK_COPY, LK_FP16, 0)
ADAM_INSTANCES(adam_bf16_adopt, LK_COPY, LK_BF16, 1)
ADAM_INSTANCES(adam_fp16_adopt, LK_COPY, LK_FP16, 1)

static void path_adam(const lk_adam_args *a, int64_t begin, int64_t end) {
    typedef void (*instance)(const lk_adam_args *, int64_t, int64_t);
    /* rows: kind of master; columns: dtype of the gradient */
    static const instance table[6][3] = {
        {adam_fp32_fp32, adam_fp32_bf16, adam_fp32_fp16},
        {adam_split_fp32, adam_split_bf16, adam_split_fp16},
        {adam_bf16_fp32, adam_bf16_bf16, adam_bf16_fp16},
        {adam_fp16_fp32, adam_fp16_bf16, adam_fp16_fp16},
        {adam_bf16_adopt_fp32, adam_bf16_adopt_bf16, adam_bf16_adopt_fp16},
        {adam_fp16_adopt_fp32, adam_fp16_adopt_bf16, adam_fp16_adopt_fp16},
    };
    int row = a->master_kind;
    if (row == LK_COPY)
        row += (a->param_dtype == LK_FP16) + (a->adopt_param ? 2 : 0);
    table[row][a->grad_dtype](a, begin, end);
}

/* ---- companions ---- */

/* Runs BODY with i for whole vectors and, through padded copies, for the rest: a plain map from src to dst.
 */
INLINE void convert_range(const char *src, int src_dtype, char *dst, int dst_dtype, int64_t n) {
    int64_t i = 0;
    for (; n - i >= LANES; i += LANES)
        store_from_float(dst, i, dst_dtype, load_as_float(src, i, src_dtype));
    if (LANES > 1 && i < n) {
        float in[LANES] = {0}, out[LANES];
        size_t rest = (size_t)(n - i), in_size = lk_itemsize(src_dtype), out_size = lk_itemsize(dst_dtype);
        memcpy(in, src + (size_t)i * in_size, rest * in_size);
        store_from_float(out, 0, dst_dtype, load_as_float(in, 0, src_dtype));
        memcpy(dst + (size_t)i * out_size, out, rest * out_size);
    }
}

INLINE void convert_from(const char *src, int src_dtype, char *dst, int dst_dtype, int64_t n) {
    if (dst_dtype == LK_FP32)
        convert_range(src, src_dtype, dst, LK_FP32, n);
    else if (dst_dtype == LK_BF16)
        convert_range(src, src_dtype, dst, LK_BF16, n);
    else
        convert_range(src, src_dtype, dst, LK_FP16, n);
}

static void path_convert(const void *src, int src_dtype, void *dst, int dst_dtype, int64_t n) {
    if (src_dtype == dst_dtype)
        memcpy(dst, src, (size_t)n * lk_itemsize(dst_dtype));
    else if (src_dtype == LK_FP32)
        convert_from(src, LK_FP32, dst, dst_dtype, n);
    else if (src_dtype == LK_BF16)
        convert_from(src, LK_BF16, dst, dst_dtype, n);
    else
        convert_from(src, LK_FP16, dst, dst_dtype, n);
}

/* [Note: Norm order] element i of a block goes to accumulator i mod 32; squares are exact in double; the 32
 * sums are folded in halves.  Zeros that pad the last step add nothing. */
INLINE double norm_range(const char *src, int dtype, int64_t n) {
    va sums = va_zero();
    size_t size = lk_itemsize(dtype);
    vf x[LK_NORM_LANES / LANES];
    int64_t i = 0;
    for (; n - i >= LK_NORM_LANES; i += LK_NORM_LANES) {
        for (int j = 0; j < LK_NORM_LANES / LANES; j++)
            x[j] = load_as_float(src, i + j * LANES, dtype);
        va_add(&sums, x);
    }
    if (i < n) {
        float rest[LK_NORM_LANES] = {0};
        memcpy(rest, src + (size_t)i * size, (size_t)(n - i) * size);
        for (int j = 0; j < LK_NORM_LANES / LANES; j++)
            x[j] = load_as_float(rest, j * LANES, dtype);
        va_add(&sums, x);
    }
    double lanes[LK_NORM_LANES];
    va_get(&sums, lanes);
    for (int half = LK_NORM_LANES / 2; half; half /= 2)
        for (int j = 0; j < half; j++)
            lanes[j] += lanes[j + half];
    return lanes[0];
}

static double path_squared_norm(const void *src, int dtype, int64_t n) {
    if (dtype == LK_FP32)
        return norm_range(src, LK_FP32, n);
    return dtype == LK_BF16 ? norm_range(src, LK_BF16, n) : norm_range(src, LK_FP16, n);
}

/* 0 * x is NaN for an infinity or a NaN, and NaN stays in a sum. */
INLINE int nonfinite_range(const char *src, int dtype, int64_t n) {
    vf zero = vf_set(0.0f), a = zero, b = zero, c = zero, d = zero;
    int64_t i = 0;
    for (; n - i >= 4 * LANES; i += 4 * LANES) {
        a = vf_fma(load_as_float(src, i, dtype), zero, a);
        b = vf_fma(load_as_float(src, i + LANES, dtype), zero, b);
        c = vf_fma(load_as_float(src, i + 2 * LANES, dtype), zero, c);
        d = vf_fma(load_as_float(src, i + 3 * LANES, dtype), zero, d);
    }
    while (i < n) {
        float rest[LANES] = {0};
        int64_t count = n - i < LANES ? n - i : LANES;
        memcpy(rest, src + (size_t)i * lk_itemsize(dtype), (size_t)count * lk_itemsize(dtype));
        a = vf_fma(load_as_float(rest, 0, dtype), zero, a);
        i += count;
    }
    return vf_any_nan(vf_add(vf_add(a, b), vf_add(c, d)));
}

static int path_has_nonfinite(const void *src, int dtype, int64_t n) {
    if (dtype == LK_FP32)
        return nonfinite_range(src, LK_FP32, n);
    return dtype == LK_BF16 ? nonfinite_range(src, LK_BF16, n) : nonfinite_range(src, LK_FP16, n);
}

INLINE vf accumulate_vector(const float *dst, const void *src, int64_t i, int dtype, vf scale, int add) {
    vf x = vf_mul(load_as_float(src, i, dtype), scale);
    return add ? vf_add(vf_load(dst + i), x) : x;
}

INLINE void accumulate_range(float *dst, const char *src, int dtype, float scale, int add, int64_t n) {
    vf factor = vf_set(scale);
    int64_t i = 0;
    for (; n - i >= LANES; i += LANES)
        vf_store(dst + i, accumulate_vector(dst, src, i, dtype, factor, add));
    if (LANES > 1 && i < n) {
        float sum[LANES] = {0}, rest[LANES] = {0};
        size_t size = lk_itemsize(dtype), count = (size_t)(n - i);
        memcpy(rest, src + (size_t)i * size, count * size);
        if (add)
            memcpy(sum, dst + i, count * 4);
        vf_store(sum, accumulate_vector(sum, rest, 0, dtype, factor, add));
        memcpy(dst + i, sum, count * 4);
    }
}

INLINE void accumulate_kind(float *dst, const void *src, int dtype, float scale, int add, int64_t n) {
    if (add)
        accumulate_range(dst, src, dtype, scale, 1, n);
    else
        accumulate_range(dst, src, dtype, scale, 0, n);
}

static void path_accumulate(float *dst, const void *src, int dtype, float scale, int add, int64_t n) {
    if (dtype == LK_FP32)
        accumulate_kind(dst, src, LK_FP32, scale, add, n);
    else if (dtype == LK_BF16)
        accumulate_kind(dst, src, LK_BF16, scale, add, n);
    else
        accumulate_kind(dst, src, LK_FP16, scale, add, n);
}

static void path_split(const float *master, uint16_t *param, int16_t *remainder, int64_t n) {
    int64_t i = 0;
    for (; n - i >= LANES; i += LANES)
        vf_split(vf_load(master + i), param + i, remainder + i);
    if (LANES > 1 && i < n) {
        float in[LANES] = {0};
        uint16_t high[LANES];
        int16_t low[LANES];
        size_t rest = (size_t)(n - i);
        memcpy(in, master + i, rest * 4);
        vf_split(vf_load(in), high, low);
        memcpy(param + i, high, rest * 2);
        memcpy(remainder + i, low, rest * 2);
    }
}

static void path_merge(float *master, const uint16_t *param, const int16_t *remainder, int64_t n) {
    int64_t i = 0;
    for (; n - i >= LANES; i += LANES)
        vf_store(master + i, vf_merge(param + i, remainder + i));
    if (LANES > 1 && i < n) {
        float out[LANES];
        uint16_t high[LANES] = {0};
        int16_t low[LANES] = {0};
        size_t rest = (size_t)(n - i);
        memcpy(high, param + i, rest * 2);
        memcpy(low, remainder + i, rest * 2);
        vf_store(out, vf_merge(high, low));
        memcpy(master + i, out, rest * 4);
    }
}

static void path_stream(const float *const *from, float *const *to, int non_temporal, int64_t n) {
    const float *a = from[0], *b = from[1], *c = from[2];
    float *x = to[0], *y = to[1], *z = to[2];
    vf one = vf_set(1.0f);
    int64_t i = 0;
    if (non_temporal)
        for (; n - i >= LANES; i += LANES) {
            vf_store_nt(x + i, vf_load(a + i));
            vf_store_nt(y + i, vf_load(b + i));
            vf_store_nt(z + i, vf_load(c + i));
        }
    for (; n - i >= LANES; i += LANES) {
        vf_store(x + i, vf_mul(vf_load(a + i), one));
        vf_store(y + i, vf_mul(vf_load(b + i), one));
        vf_store(z + i, vf_mul(vf_load(c + i), one));
    }
    for (; i < n; i++) {
        x[i] = a[i];
        y[i] = b[i];
        z[i] = c[i];
    }
}

static const lk_ops path_table = {path_adam,  path_squared_norm, path_has_nonfinite, path_accumulate,
                                  path_split, path_merge,        path_convert,       path_stream};
const lk_ops *const PATH_OPS = &path_table;
