/* Vectors of 8 floats in the words of GCC and clang, the same on every variant.  FR_ISA is the variant's index, set by variant_*.c. */
#ifndef FORERUN_VECTORS_H
#define FORERUN_VECTORS_H
#include "forerun.h"
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
#define FR_INLINE static inline __attribute__((always_inline))
#define FR_NAME2(name, variant) name##_##variant
#define FR_NAME1(name, variant) FR_NAME2(name, variant)
#define FR_NAME(name) FR_NAME1(name, FR_VARIANT) /* fr_product_avx2, ... */

FR_INLINE f8 load8(const float *p) { f8 v; memcpy(&v, p, 32); return v; }
FR_INLINE void store8(float *p, f8 v) { memcpy(p, &v, 32); }
FR_INLINE f8 splat8(float x) { return (f8){x, x, x, x, x, x, x, x}; }
FR_INLINE f8 floats8(i8 v) { return __builtin_convertvector(v, f8); }

/* a x b + c, rounded once.  Without the instruction: the double sum is rounded to odd first, so rounding it again is harmless. */
FR_INLINE float fma1(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    double product = (double)a * b, sum = product + c, part = sum - product, error = (product - (sum - part)) + (c - part);
    int64_t bits;
    memcpy(&bits, &sum, 8);
    if (error != 0 && !(bits & 1) && sum - sum == 0) bits += ((error > 0) == (sum > 0)) ? 1 : -1;
    memcpy(&sum, &bits, 8);
    return (float)sum;
#endif
}

FR_INLINE f8 fma8(f8 a, f8 b, f8 c) {
#if defined(__FMA__)
    return (f8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    float32x4_t x[2], y[2], z[2];
    memcpy(x, &a, 32), memcpy(y, &b, 32), memcpy(z, &c, 32);
    z[0] = vfmaq_f32(z[0], x[0], y[0]), z[1] = vfmaq_f32(z[1], x[1], y[1]);
    memcpy(&c, z, 32);
    return c;
#else
    for (int i = 0; i < 8; i++) c[i] = fma1(a[i], b[i], c[i]);
    return c;
#endif
}

/* ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), the one order of sums. */
FR_INLINE float lanes8(f8 v) { return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7])); }

/* lanes8 of eight vectors at once, with shuffles that stay in halves. */
FR_INLINE f8 pairs8(f8 a, f8 b) {
    f8 even = __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14);
    f8 odd = __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
    return even + odd;
}

FR_INLINE f8 totals(const f8 f[8]) {
    f8 a = pairs8(pairs8(f[0], f[1]), pairs8(f[2], f[3]));
    f8 b = pairs8(pairs8(f[4], f[5]), pairs8(f[6], f[7]));
    f8 low = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
    f8 high = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    return low + high;
}

FR_INLINE float float16(uint16_t bits) { /* exact, with subnormals */
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff, out;
    float value;
    if (rest >= 0x7c00) out = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    else if (rest >= 0x400) out = sign | ((rest << 13) + 0x38000000);
    else {
        value = (float)rest * 0x1p-24f;
        memcpy(&out, &value, 4);
        out |= sign;
    }
    memcpy(&value, &out, 4);
    return value;
}

FR_INLINE f8 float16s(const void *p) { /* 8 of them, from any address */
#if defined(__F16C__)
    return (f8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__aarch64__)
    float16x8_t h;
    float32x4_t v[2];
    f8 out;
    memcpy(&h, p, 16);
    v[0] = vcvt_f32_f16(vget_low_f16(h)), v[1] = vcvt_high_f32_f16(h);
    memcpy(&out, v, 32);
    return out;
#else
    uint16_t bits[8];
    f8 out;
    memcpy(bits, p, 16);
    for (int i = 0; i < 8; i++) out[i] = float16(bits[i]);
    return out;
#endif
}

FR_INLINE f8 bfloat16s(const void *p) {
    typedef uint16_t u16x8 __attribute__((vector_size(16)));
    typedef uint32_t u32x8 __attribute__((vector_size(32)));
    u16x8 h;
    memcpy(&h, p, 16);
    return (f8)(__builtin_convertvector(h, u32x8) << 16);
}
#endif
