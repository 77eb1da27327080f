/* AVX2 with FMA and F16C: 8 lanes. */
#include "ops.h"
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#include <immintrin.h>

#define LANES 8
#define PATH_OPS lk_ops_avx2
#define VF static inline __attribute__((always_inline))
typedef __m256 vf;

VF vf vf_set(float x) {
    return _mm256_set1_ps(x);
}
VF vf vf_load(const float *p) {
    return _mm256_loadu_ps(p);
}
VF void vf_store(float *p, vf x) {
    _mm256_storeu_ps(p, x);
}
VF void vf_store_nt(float *p, vf x) {
    _mm256_stream_ps(p, x);
}
VF vf vf_mul(vf a, vf b) {
    return _mm256_mul_ps(a, b);
}
VF vf vf_add(vf a, vf b) {
    return _mm256_add_ps(a, b);
}
VF vf vf_sub(vf a, vf b) {
    return _mm256_sub_ps(a, b);
}
VF vf vf_div(vf a, vf b) {
    return _mm256_div_ps(a, b);
}
VF vf vf_sqrt(vf a) {
    return _mm256_sqrt_ps(a);
}
VF vf vf_fma(vf a, vf b, vf c) {
    return _mm256_fmadd_ps(a, b, c);
}

/* [Note: Division by a constant] The divider is the scarcest unit here, and one of Adam's two quotients has
 * the same divisor c throughout.  With 1/c to 48 bits as high + low, q = x*high + x*low is within one unit in
 * the last place of x/c; high being 1/c correctly rounded, Markstein's theorem then makes q + (x - q*c)*high,
 * the residue exact by a fused multiply-add, the correctly rounded quotient: the bits of a real division in
 * four operations. It wants no overflow or underflow: x is the root of a float, so zero or at least 2^-75,
 * and c lies between 1e-8 and 1.  An infinite x gives NaN, which the guard sees. */
typedef struct {
    vf divisor, high, low;
} root_constants;
enum { ROOT_GUARDED = 1 };

VF root_constants root_constants_for(float correction) {
    double reciprocal = 1.0 / correction;
    float high = (float)reciprocal;
    return (root_constants){vf_set(correction), vf_set(high), vf_set((float)(reciprocal - high))};
}

VF vf root_over(vf v, const root_constants *c) {
    vf x = vf_sqrt(v);
    vf q = vf_fma(x, c->high, vf_mul(x, c->low));
    return vf_fma(_mm256_fnmadd_ps(q, c->divisor, x), c->high, q);
}

VF __m256i widen(const void *p) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
}
/* The low halves of 8 lanes, which must be below 2^16. */
VF void narrow(void *p, __m256i x) {
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0x08);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(packed));
}
VF __m256i is_nan(vf x) {
    return _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
VF __m256i quiet_high_half(__m256i bits) {
    return _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
}

VF vf vf_load_bf16(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(widen(p), 16));
}
VF vf vf_load_fp16(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

VF void vf_store_bf16(uint16_t *p, vf x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff));
    narrow(p, _mm256_blendv_epi8(_mm256_srli_epi32(up, 16), quiet_high_half(bits), is_nan(x)));
}

VF void vf_store_fp16(uint16_t *p, vf x) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

VF vf vf_merge(const uint16_t *param, const int16_t *remainder) {
    __m256i low = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)remainder));
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(widen(param), 16), low));
}

VF void vf_split(vf x, uint16_t *param, int16_t *remainder) {
    __m256i bits = _mm256_castps_si256(x), nan = is_nan(x);
    __m256i high = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x8000)), 16);
    narrow(param, _mm256_blendv_epi8(high, quiet_high_half(bits), nan));
    narrow(remainder, _mm256_andnot_si256(nan, _mm256_and_si256(bits, _mm256_set1_epi32(0xffff))));
}

/* Neither is NaN. */
VF void vf_split_pair(vf first, vf second, uint16_t *param, int16_t *remainder) {
    __m256i half = _mm256_set1_epi32(0x8000), low = _mm256_set1_epi32(0xffff);
    __m256i a = _mm256_castps_si256(first), b = _mm256_castps_si256(second);
    __m256i high = _mm256_packus_epi32(_mm256_srli_epi32(_mm256_add_epi32(a, half), 16),
                                       _mm256_srli_epi32(_mm256_add_epi32(b, half), 16));
    __m256i rest = _mm256_packus_epi32(_mm256_and_si256(a, low), _mm256_and_si256(b, low));
    _mm256_storeu_si256((__m256i *)param, _mm256_permute4x64_epi64(high, 0xd8));
    _mm256_storeu_si256((__m256i *)remainder, _mm256_permute4x64_epi64(rest, 0xd8));
}

VF vf vf_choose_equal(vf a, vf b, vf x, vf y) {
    __m256i same = _mm256_cmpeq_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b));
    return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(same));
}

VF int vf_any_nan(vf x) {
    return _mm256_movemask_ps(_mm256_castsi256_ps(is_nan(x))) != 0;
}

typedef struct {
    __m256d sum[LK_NORM_LANES / 4];
} va;

VF va va_zero(void) {
    va a;
    for (int i = 0; i < LK_NORM_LANES / 4; i++)
        a.sum[i] = _mm256_setzero_pd();
    return a;
}

VF void va_add(va *a, const vf *x) {
    for (int i = 0; i < LK_NORM_LANES / 8; i++) {
        __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x[i]));
        __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x[i], 1));
        a->sum[2 * i] = _mm256_fmadd_pd(low, low, a->sum[2 * i]);
        a->sum[2 * i + 1] = _mm256_fmadd_pd(high, high, a->sum[2 * i + 1]);
    }
}

VF void va_get(const va *a, double *out) {
    for (int i = 0; i < LK_NORM_LANES / 4; i++)
        _mm256_storeu_pd(out + 4 * i, a->sum[i]);
}

#include "body.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
const lk_ops *const lk_ops_avx2 = NULL;
#endif
