/* fr_vector_ops for one instruction set; its variant_*.c includes this file.

   Each function reads and writes 8 floats at a time:

     x   [ 0 .. 7 | 8 .. 15 | ... ]   sums: lane i holds those of the places i modulo 8 */
#include "vector_ops.h"
#include "vectors.h"

#include <math.h>

static float sum_of_squares(const float *x, int64_t d) {
    f8 sums[4] = {{0}};
    int64_t i = 0;
    for (; i + 32 <= d; i += 32) {
        for (int k = 0; k < 4; k++) {
            f8 v = load8(x + i + 8 * k);
            sums[k] = fma8(v, v, sums[k]);
        }
    }
    for (; i < d; i += 8) {
        f8 v = load8(x + i);
        sums[0] = fma8(v, v, sums[0]);
    }
    return sum8((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

static void add(float *x, const float *added, int64_t n) {
    for (int64_t i = 0; i < n; i += 8)
        store8(x + i, load8(x + i) + load8(added + i));
}

static void norm(float *x, const float *added, const float *gain, float eps, int64_t d,
                 float *out) {
    if (added) add(x, added, d);
    float factor = 1 / sqrtf(sum_of_squares(x, d) / (float)d + eps);
    for (int64_t i = 0; i < d; i += 8) {
        f8 normed = load8(x + i) * factor;
        store8(out + i, gain ? normed * load8(gain + i) : normed);
    }
}

/* Rotates x[i] with x[half + i]. */
FR_INLINE void rotate(float *x, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i += 8) {
        f8 a = load8(x + i);
        f8 b = load8(x + half + i);
        f8 c = load8(cos + i);
        f8 s = load8(sin + i);
        store8(x + i, fma8(a, c, -(b * s)));
        store8(x + half + i, fma8(b, c, a * s));
    }
}

static void heads(float *x, const float *bias, const float *gain, float eps, const float *cos,
                  const float *sin, int64_t rotary_dims, float scale, int64_t count, int64_t d) {
    if (bias) add(x, bias, count * d);
    for (int64_t h = 0; h < count; h++, x += d) {
        if (gain) norm(x, NULL, gain, eps, d, x);
        rotate(x, cos, sin, rotary_dims / 2);
        if (scale == 1) continue;
        for (int64_t i = 0; i < d; i += 8)
            store8(x + i, load8(x + i) * scale);
    }
}

static void gate(float *gates, const float *up, int64_t n) {
    for (int64_t i = 0; i < n; i += 8) {
        f8 x = load8(gates + i);
        store8(gates + i, x / (1.0f + exp8(-x)) * load8(up + i));
    }
}

static void to_half(const float *x, int64_t n, uint16_t *out) {
    for (int64_t i = 0; i < n; i += 8) {
        u8 bits = (u8)load8(x + i);
        u8 size = bits & 0x7fffffff;
        u8 is_nan = (u8)(size > 0x7f800000);
        u8 is_large = (u8)(size > 0x477fe000);
        u8 is_small = (u8)(size < 0x38800000);
        size = (is_large & 0x477fe000) | (~is_large & size);
        u8 normal = ((size + 0xfff + ((size >> 13) & 1)) >> 13) - (112 << 10);
        /* The last bit of 0.5 is worth the smallest float16, so the sum is rounded to it. */
        u8 subnormal = (u8)((f8)(size & is_small) + 0.5f) - 0x3f000000;
        u8 number = (is_small & subnormal) | (~is_small & normal);
        u8 half = (is_nan & 0x7e00) | (~is_nan & number);
        h8 stored = __builtin_convertvector(half | ((bits >> 16) & 0x8000), h8);
        memcpy(out + i, &stored, sizeof stored);
    }
}

static int64_t argmax(const float *x, int64_t n) {
    f8 lanes = splat8(-INFINITY);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        lanes = max8(load8(x + i), lanes);
    float largest = lanes[0];
    for (int k = 1; k < 8; k++)
        largest = lanes[k] > largest ? lanes[k] : largest;
    for (; i < n; i++)
        largest = x[i] > largest ? x[i] : largest;
    for (i = 0; i < n; i++) {
        if (x[i] == largest) return i;
    }
    return 0;
}

static float exps(const float *x, float largest, float scale, int64_t n, float *out) {
    f8 sum = {0};
    int64_t whole = n / 8 * 8;
    int64_t left = n - whole;
    for (int64_t i = 0; i < whole; i += 8) {
        f8 here = exp8((load8(x + i) - largest) * scale);
        store8(out + i, here);
        sum += here;
    }
    f8 last = splat8(largest);
    memcpy(&last, x + whole, (size_t)left * sizeof(float));
    last = exp8((last - largest) * scale);
    for (int64_t k = left; k < 8; k++)
        last[k] = 0;
    memcpy(out + whole, &last, (size_t)left * sizeof(float));
    return sum8(sum + last);
}

const fr_vector_ops FR_NAME(fr_vector_ops) = {norm, heads, gate, add, to_half, argmax, exps};
