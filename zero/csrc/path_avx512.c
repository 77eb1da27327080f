/* AVX-512 (F, BW, DQ, VL): 16 lanes. */
#include "ops.h"
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))),    \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif
#include <immintrin.h>

#define LANES 16
#define PATH_OPS lk_ops_avx512
#define VF static inline __attribute__((always_inline))
typedef __m512 vf;

VF vf vf_set(float x) {
    return _mm512_set1_ps(x);
}
VF vf vf_load(const float *p) {
    return _mm512_loadu_ps(p);
}
VF void vf_store(float *p, vf x) {
    _mm512_storeu_ps(p, x);
}
VF void vf_store_nt(float *p, vf x) {
    _mm512_stream_ps(p, x);
}
VF vf vf_mul(vf a, vf b) {
    return _mm512_mul_ps(a, b);
}
VF vf vf_add(vf a, vf b) {
    return _mm512_add_ps(a, b);
}
VF vf vf_sub(vf a, vf b) {
    return _mm512_sub_ps(a, b);
}
VF vf vf_div(vf a, vf b) {
    return _mm512_div_ps(a, b);
}
VF vf vf_sqrt(vf a) {
    return _mm512_sqrt_ps(a);
}
VF vf vf_fma(vf a, vf b, vf c) {
    return _mm512_fmadd_ps(a, b, c);
}

/* [Note: Square root without the divider] A root takes the divider as long as a division, so here it is made
 * of multiply-adds: two coupled Newton steps from the processor's 14-bit estimate, the second with an exact
 * residue, give the correctly rounded root for every 24-bit mantissa (a test goes through all of them; it
 * also held for every estimate tried within the 14 bits that the instruction promises).  v is scaled by 2^80
 * first, so that the residue cannot underflow; the scale comes off again in the division, see [Note: Division
 * by a constant] in path_avx2.c.  v = 0: the estimate is infinite and cut to a finite one, the root is 0.  v
 * >= 2^48, negative or NaN: NaN, which the guard sees. */
typedef struct {
    vf scale, largest, half, divisor, high, low;
} root_constants;
enum { ROOT_GUARDED = 1 };

VF root_constants root_constants_for(float correction) {
    double divisor = correction * 0x1p40, reciprocal = 1.0 / divisor;
    float high = (float)reciprocal;
    return (root_constants){
        .scale = vf_set(0x1p80f),
        .largest = vf_set(0x1p35f),
        .half = vf_set(0.5f),
        .divisor = vf_set((float)divisor),
        .high = vf_set(high),
        .low = vf_set((float)(reciprocal - high)),
    };
}

VF vf root_over(vf v, const root_constants *c) {
    vf x = vf_mul(v, c->scale);
    vf y = _mm512_min_ps(c->largest, _mm512_rsqrt14_ps(x)); /* the second operand where one is NaN */
    vf g = vf_mul(x, y), h = vf_mul(y, c->half);
    vf r = _mm512_fnmadd_ps(g, h, c->half);
    g = vf_fma(g, r, g);
    h = vf_fma(h, r, h);
    g = vf_fma(_mm512_fnmadd_ps(g, g, x), h, g);
    vf q = vf_fma(g, c->high, vf_mul(g, c->low));
    return vf_fma(_mm512_fnmadd_ps(q, c->divisor, g), c->high, q);
}

VF __m512i widen(const void *p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
}
VF void narrow(void *p, __m512i x) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(x));
}
VF __mmask16 is_nan(vf x) {
    return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
}
VF __m512i quiet_high_half(__m512i bits) {
    return _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
}

VF vf vf_load_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(widen(p), 16));
}
VF vf vf_load_fp16(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

VF void vf_store_bf16(uint16_t *p, vf x) {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
    narrow(p, _mm512_mask_mov_epi32(_mm512_srli_epi32(up, 16), is_nan(x), quiet_high_half(bits)));
}

VF void vf_store_fp16(uint16_t *p, vf x) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

VF vf vf_merge(const uint16_t *param, const int16_t *remainder) {
    __m512i low = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)remainder));
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(widen(param), 16), low));
}

VF void vf_split(vf x, uint16_t *param, int16_t *remainder) {
    __m512i bits = _mm512_castps_si512(x);
    __mmask16 nan = is_nan(x);
    __m512i high = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)), 16);
    narrow(param, _mm512_mask_mov_epi32(high, nan, quiet_high_half(bits)));
    narrow(remainder, _mm512_maskz_mov_epi32((__mmask16)~nan, bits));
}

/* Neither is NaN. The words of each half are picked from both vectors at once. */
VF void vf_split_pair(vf first, vf second, uint16_t *param, int16_t *remainder) {
    __m512i half = _mm512_set1_epi32(0x8000);
    __m512i low = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26,
                                   24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(1));
    __m512i a = _mm512_castps_si512(first), b = _mm512_castps_si512(second);
    _mm512_storeu_si512(
        param, _mm512_permutex2var_epi16(_mm512_add_epi32(a, half), high, _mm512_add_epi32(b, half)));
    _mm512_storeu_si512(remainder, _mm512_permutex2var_epi16(a, low, b));
}

VF vf vf_choose_equal(vf a, vf b, vf x, vf y) {
    return _mm512_mask_mov_ps(y, _mm512_cmpeq_epi32_mask(_mm512_castps_si512(a), _mm512_castps_si512(b)), x);
}

VF int vf_any_nan(vf x) {
    return is_nan(x) != 0;
}

typedef struct {
    __m512d sum[LK_NORM_LANES / 8];
} va;

VF va va_zero(void) {
    __m512d zero = _mm512_setzero_pd();
    return (va){{zero, zero, zero, zero}};
}

VF void va_add(va *a, const vf *x) {
    for (int i = 0; i < LK_NORM_LANES / 16; i++) {
        __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x[i]));
        __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x[i], 1));
        a->sum[2 * i] = _mm512_fmadd_pd(low, low, a->sum[2 * i]);
        a->sum[2 * i + 1] = _mm512_fmadd_pd(high, high, a->sum[2 * i + 1]);
    }
}

VF void va_get(const va *a, double *out) {
    for (int i = 0; i < LK_NORM_LANES / 8; i++)
        _mm512_storeu_pd(out + 8 * i, a->sum[i]);
}

#include "body.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
const lk_ops *const lk_ops_avx512 = NULL;
#endif
