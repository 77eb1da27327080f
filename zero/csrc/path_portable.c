/* Plain C, one lane: right everywhere, fast nowhere.  fmaf rounds once by definition; where the machine
 * cannot, the C library does it in software. */
#include "half.h"
#include "ops.h"
#include <math.h>

#define LANES 1
#define PATH_OPS lk_ops_portable
#define VF static inline __attribute__((always_inline))
typedef float vf;

VF vf vf_set(float x) {
    return x;
}
VF vf vf_load(const float *p) {
    return *p;
}
VF void vf_store(float *p, vf x) {
    *p = x;
}
VF void vf_store_nt(float *p, vf x) {
    *p = x;
}
VF vf vf_mul(vf a, vf b) {
    return a * b;
}
VF vf vf_add(vf a, vf b) {
    return a + b;
}
VF vf vf_sub(vf a, vf b) {
    return a - b;
}
VF vf vf_div(vf a, vf b) {
    return a / b;
}
VF vf vf_sqrt(vf a) {
    return sqrtf(a);
}
VF vf vf_fma(vf a, vf b, vf c) {
    return fmaf(a, b, c);
}
typedef struct {
    vf correction;
} root_constants;
enum { ROOT_GUARDED = 0 };
VF root_constants root_constants_for(float correction) {
    return (root_constants){vf_set(correction)};
}
VF vf root_over(vf v, const root_constants *c) {
    return vf_div(vf_sqrt(v), c->correction);
}

VF vf vf_load_bf16(const uint16_t *p) {
    return lk_float((uint32_t)*p << 16);
}
VF vf vf_load_fp16(const uint16_t *p) {
    return lk_half_to_float(*p);
}
VF void vf_store_bf16(uint16_t *p, vf x) {
    *p = lk_float_to_bf16(x);
}
VF void vf_store_fp16(uint16_t *p, vf x) {
    *p = lk_float_to_half(x);
}

VF vf vf_merge(const uint16_t *param, const int16_t *remainder) {
    return lk_float(((uint32_t)*param << 16) + (uint32_t)(int32_t)*remainder);
}

VF void vf_split(vf x, uint16_t *param, int16_t *remainder) {
    uint32_t bits = lk_bits(x);
    if (x != x) {
        *param = (uint16_t)(bits >> 16 | 0x40);
        *remainder = 0;
    } else {
        *param = (uint16_t)((bits + 0x8000) >> 16);
        *remainder = (int16_t)(uint16_t)bits;
    }
}

VF void vf_split_pair(vf first, vf second, uint16_t *param, int16_t *remainder) {
    vf_split(first, param, remainder);
    vf_split(second, param + LANES, remainder + LANES);
}

VF vf vf_choose_equal(vf a, vf b, vf x, vf y) {
    return lk_bits(a) == lk_bits(b) ? x : y;
}
VF int vf_any_nan(vf x) {
    return x != x;
}

typedef struct {
    double sum[LK_NORM_LANES];
} va;

VF va va_zero(void) {
    return (va){{0}};
}
VF void va_add(va *a, const vf *x) {
    for (int i = 0; i < LK_NORM_LANES; i++)
        a->sum[i] += (double)x[i] * x[i];
}
VF void va_get(const va *a, double *out) {
    for (int i = 0; i < LK_NORM_LANES; i++)
        out[i] = a->sum[i];
}

#include "body.h"
