/* NEON on aarch64: 4 lanes. */
#include "ops.h"
#if defined(__aarch64__)
#include <arm_neon.h>

#define LANES 4
#define PATH_OPS lk_ops_neon
#define VF static inline __attribute__((always_inline))
typedef float32x4_t vf;

VF vf vf_set(float x) {
    return vdupq_n_f32(x);
}
VF vf vf_load(const float *p) {
    return vld1q_f32(p);
}
VF void vf_store(float *p, vf x) {
    vst1q_f32(p, x);
}
VF void vf_store_nt(float *p, vf x) {
    vst1q_f32(p, x);
}
VF vf vf_mul(vf a, vf b) {
    return vmulq_f32(a, b);
}
VF vf vf_add(vf a, vf b) {
    return vaddq_f32(a, b);
}
VF vf vf_sub(vf a, vf b) {
    return vsubq_f32(a, b);
}
VF vf vf_div(vf a, vf b) {
    return vdivq_f32(a, b);
}
VF vf vf_sqrt(vf a) {
    return vsqrtq_f32(a);
}
VF vf vf_fma(vf a, vf b, vf c) {
    return vfmaq_f32(c, a, b);
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

VF uint32x4_t is_nan(vf x) {
    return vmvnq_u32(vceqq_f32(x, x));
}
VF uint32x4_t quiet_high_half(uint32x4_t bits) {
    return vorrq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(0x40));
}

VF vf vf_load_bf16(const uint16_t *p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
VF vf vf_load_fp16(const uint16_t *p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}

VF void vf_store_bf16(uint16_t *p, vf x) {
    uint32x4_t bits = vreinterpretq_u32_f32(x);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t up = vaddq_u32(vaddq_u32(bits, odd), vdupq_n_u32(0x7fff));
    vst1_u16(p, vmovn_u32(vbslq_u32(is_nan(x), quiet_high_half(bits), vshrq_n_u32(up, 16))));
}

VF void vf_store_fp16(uint16_t *p, vf x) {
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}

VF vf vf_merge(const uint16_t *param, const int16_t *remainder) {
    uint32x4_t low = vreinterpretq_u32_s32(vmovl_s16(vld1_s16(remainder)));
    return vreinterpretq_f32_u32(vaddq_u32(vshll_n_u16(vld1_u16(param), 16), low));
}

VF void vf_split(vf x, uint16_t *param, int16_t *remainder) {
    uint32x4_t bits = vreinterpretq_u32_f32(x), nan = is_nan(x);
    uint32x4_t high = vshrq_n_u32(vaddq_u32(bits, vdupq_n_u32(0x8000)), 16);
    vst1_u16(param, vmovn_u32(vbslq_u32(nan, quiet_high_half(bits), high)));
    vst1_s16(remainder, vreinterpret_s16_u16(vmovn_u32(vbicq_u32(bits, nan))));
}

VF void vf_split_pair(vf first, vf second, uint16_t *param, int16_t *remainder) {
    vf_split(first, param, remainder);
    vf_split(second, param + LANES, remainder + LANES);
}

VF vf vf_choose_equal(vf a, vf b, vf x, vf y) {
    return vbslq_f32(vceqq_u32(vreinterpretq_u32_f32(a), vreinterpretq_u32_f32(b)), x, y);
}

VF int vf_any_nan(vf x) {
    return vmaxvq_u32(is_nan(x)) != 0;
}

typedef struct {
    float64x2_t sum[LK_NORM_LANES / 2];
} va;

VF va va_zero(void) {
    va a;
    for (int i = 0; i < LK_NORM_LANES / 2; i++)
        a.sum[i] = vdupq_n_f64(0);
    return a;
}

VF void va_add(va *a, const vf *x) {
    for (int i = 0; i < LK_NORM_LANES / 4; i++) {
        float64x2_t low = vcvt_f64_f32(vget_low_f32(x[i])), high = vcvt_high_f64_f32(x[i]);
        a->sum[2 * i] = vfmaq_f64(a->sum[2 * i], low, low);
        a->sum[2 * i + 1] = vfmaq_f64(a->sum[2 * i + 1], high, high);
    }
}

VF void va_get(const va *a, double *out) {
    for (int i = 0; i < LK_NORM_LANES / 2; i++)
        vst1q_f64(out + 2 * i, a->sum[i]);
}

#include "body.h"
#else
const lk_ops *const lk_ops_neon = NULL;
#endif
