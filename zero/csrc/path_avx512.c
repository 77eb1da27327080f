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

/* See [Note: Division by a constant] in path_avx2.c. */
VF vf vf_div_by(vf x, vf divisor, vf reciprocal) {
    vf first = _mm512_mul_ps(x, reciprocal);
    vf rest = _mm512_fnmadd_ps(first, divisor, x);
    __mmask16 finite = _mm512_cmp_ps_mask(rest, rest, _CMP_ORD_Q);
    vf near = _mm512_fmadd_ps(rest, reciprocal, first);
    rest = _mm512_fnmadd_ps(near, divisor, x);
    return _mm512_mask_mov_ps(first, finite, _mm512_fmadd_ps(rest, reciprocal, near));
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
