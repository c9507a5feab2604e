/* Vectors of 8 floats, in the extensions of GCC and clang, with the same bits on every variant.

     f8, i8, u8   8 x 32 bits: floats, signed and unsigned integers
     h8           8 x 16 bits

   A compiler must not choose the order of sums, so vectors are explicit. All files are compiled
   with -ffp-contract=off, so each fused product is written as fma8. variant_*.c sets FR_ISA, the
   index of its instruction set, and FR_VARIANT, its name. */
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
typedef uint32_t u8 __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16)));

/* A build that asks for no speed may define it without the attribute: functions that are inlined in
   dozens of others took nine tenths of the compiler's time. */
#ifndef FR_INLINE
#define FR_INLINE static inline __attribute__((always_inline))
#endif

/* FR_NAME(fr_operations) is fr_operations_avx2, for example. */
#define FR_JOIN(name, variant) name##_##variant
#define FR_EXPAND(name, variant) FR_JOIN(name, variant)
#define FR_NAME(name) FR_EXPAND(name, FR_VARIANT)

#define IS_PLAIN (FR_ISA == FR_PLAIN)
#define HAS_AVX512 (FR_ISA == FR_AVX512VNNI)

/* Unrolls the loop that follows, which has a constant number of turns. Clang 14 obeys a count only
   if the loop has as many turns, and else keeps the sums in memory: 4 rows took 2.5 times as long.
   Plain C has no unrolled loops, because compilers take minutes for vectors that they emulate. */
#if IS_PLAIN
#define UNROLL
#elif defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

FR_INLINE f8 load8(const float *p) {
    f8 v;
    memcpy(&v, p, 32);
    return v;
}

FR_INLINE void store8(float *p, f8 v) { memcpy(p, &v, 32); }

FR_INLINE f8 splat8(float x) { return (f8){x, x, x, x, x, x, x, x}; }

/* a x b + c, rounded once. Without an instruction for it, the sum in double precision is first
   rounded to odd, so that rounding it again does no harm. */
FR_INLINE float fma1(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    double product = (double)a * b;
    double sum = product + c;
    double part = sum - product;
    double error = (product - (sum - part)) + (c - part);
    int64_t bits;
    memcpy(&bits, &sum, 8);
    /* sum - sum is 0 if the sum is finite. */
    if (error != 0 && !(bits & 1) && sum - sum == 0) bits += (error > 0) == (sum > 0) ? 1 : -1;
    memcpy(&sum, &bits, 8);
    return (float)sum;
#endif
}

FR_INLINE f8 fma8(f8 a, f8 b, f8 c) {
#if defined(__FMA__)
    return (f8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    float32x4_t x[2];
    float32x4_t y[2];
    float32x4_t z[2];
    memcpy(x, &a, 32);
    memcpy(y, &b, 32);
    memcpy(z, &c, 32);
    z[0] = vfmaq_f32(z[0], x[0], y[0]);
    z[1] = vfmaq_f32(z[1], x[1], y[1]);
    memcpy(&c, z, 32);
    return c;
#else
    for (int i = 0; i < 8; i++)
        c[i] = fma1(a[i], b[i], c[i]);
    return c;
#endif
}

/* The sum of a vector's lanes, always in the order ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). */
FR_INLINE float sum8(f8 v) {
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

/* Sums of adjacent lanes: a's in the lanes 0, 1, 4 and 5, b's in the others. The shuffles stay
   within halves of a register, where they are fast. */
FR_INLINE f8 pair_sums8(f8 a, f8 b) {
    f8 even = __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14);
    f8 odd = __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
    return even + odd;
}

/* sum8 of eight vectors at once. */
FR_INLINE f8 sums8(const f8 f[8]) {
    f8 a = pair_sums8(pair_sums8(f[0], f[1]), pair_sums8(f[2], f[3]));
    f8 b = pair_sums8(pair_sums8(f[4], f[5]), pair_sums8(f[6], f[7]));
    f8 low = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
    f8 high = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    return low + high;
}

FR_INLINE f8 choose8(i8 which, f8 yes, f8 no) {
    return (f8)(((i8)yes & which) | ((i8)no & ~which));
}

/* The larger numbers; y where either is NaN. */
FR_INLINE f8 max8(f8 x, f8 y) {
#if defined(__AVX__)
    return (f8)_mm256_max_ps((__m256)x, (__m256)y);
#else
    return choose8(x > y, x, y);
#endif
}

/* exp, as a power of two times a polynomial (from Cephes), which holds within ln 2 / 2 of zero. */
FR_INLINE f8 exp8(f8 x) {
    x = choose8(x < -87.0f, splat8(-87.0f), choose8(x > 88.0f, splat8(88.0f), x));
    f8 shifted = fma8(x, splat8(1.44269504f), splat8(0x1.8p23f));
    f8 whole = shifted - 0x1.8p23f;
    f8 r = fma8(whole, splat8(-0.693359375f), x);
    r = fma8(whole, splat8(2.12194440e-4f), r);
    f8 y = splat8(1.9875691500e-4f);
    y = fma8(y, r, splat8(1.3981999507e-3f));
    y = fma8(y, r, splat8(8.3334519073e-3f));
    y = fma8(y, r, splat8(4.1665795894e-2f));
    y = fma8(y, r, splat8(1.6666665459e-1f));
    y = fma8(y, r, splat8(5.0000001201e-1f));
    y = fma8(y * r, r, r + 1.0f);
    return y * (f8)(((u8)shifted << 23) + 0x3f800000);
}

/* cap tanh(x / cap), which stays within the cap. */
FR_INLINE f8 cap8(f8 x, float cap) {
    f8 shrunk = exp8(x / cap * 2.0f);
    return cap - 2.0f * cap / (shrunk + 1.0f);
}

/* The float32 of a float16: exact, with subnormal numbers. */
FR_INLINE float float16(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16;
    uint32_t rest = bits & 0x7fff;
    uint32_t out;
    float value;
    if (rest >= 0x7c00) {
        out = sign | 0x7f800000 | (rest & 0x3ff) << 13; /* infinite or NaN */
    } else if (rest >= 0x400) {
        out = sign | ((rest << 13) + 0x38000000);
    } else {
        value = (float)rest * 0x1p-24f;
        memcpy(&out, &value, 4);
        out |= sign;
    }
    memcpy(&value, &out, 4);
    return value;
}

/* 8 numbers of float16, from any address. */
FR_INLINE f8 float16s(const void *p) {
#if defined(__F16C__)
    return (f8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__aarch64__)
    float16x8_t h;
    float32x4_t v[2];
    f8 out;
    memcpy(&h, p, 16);
    v[0] = vcvt_f32_f16(vget_low_f16(h));
    v[1] = vcvt_high_f32_f16(h);
    memcpy(&out, v, 32);
    return out;
#else
    uint16_t bits[8];
    f8 out;
    memcpy(bits, p, 16);
    for (int i = 0; i < 8; i++)
        out[i] = float16(bits[i]);
    return out;
#endif
}

/* 8 numbers of bfloat16, from any address. GCC would convert them in parts, with which a product
   with one row takes twice the time. */
FR_INLINE f8 bfloat16s(const void *p) {
#if defined(__AVX2__)
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return (f8)_mm256_slli_epi32(wide, 16);
#else
    h8 h;
    memcpy(&h, p, 16);
    return (f8)(__builtin_convertvector(h, u8) << 16);
#endif
}

#endif
