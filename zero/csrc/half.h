/* 16-bit floats in plain C, with the bits that F16C and NEON give (round to nearest even, NaN quieted). */
#ifndef LAMINA_HALF_H
#define LAMINA_HALF_H
#include <stdint.h>
#include <string.h>

static inline uint32_t lk_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float lk_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint16_t lk_float_to_bf16(float x) {
    uint32_t bits = lk_bits(x);
    if (x != x)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float lk_half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
    if (exponent == 31)
        return lk_float(sign | 0x7f800000 | (mantissa ? 0x400000 | mantissa << 13 : 0));
    if (exponent)
        return lk_float(sign | (exponent + 112) << 23 | mantissa << 13);
    float tiny = (float)mantissa * 0x1p-24f; /* exact */
    return sign ? -tiny : tiny;
}

static inline uint16_t lk_float_to_half(float x) {
    uint32_t bits = lk_bits(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000)
        return (uint16_t)(sign | 0x7e00 | (rest >> 13 & 0x3ff));
    if (rest >= 0x477ff000) /* 65520: rounds to infinity */
        return (uint16_t)(sign | 0x7c00);
    if (rest <
        0x38800000) { /* below 2^-14: a multiple of 2^-24; 0.5 has 2^-24 as its unit in the last place */
        uint32_t sum = lk_bits(lk_float(rest) + 0.5f);
        return (uint16_t)(sign | (sum - 0x3f000000));
    }
    uint32_t rounded = rest + 0xfff + (rest >> 13 & 1);
    return (uint16_t)(sign | ((rounded >> 13) - (112 << 10)));
}
#endif
