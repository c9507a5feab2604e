/* fr_vector_ops for one instruction set; its variant_*.c includes this file.

   Each function reads and writes 8 floats at a time:

     x   [ 0 .. 7 | 8 .. 15 | ... ]   sums: lane i holds those of the places i modulo 8 */
#include "vector_ops.h"
#include "forward.h"
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

static void norm(const float *x, const float *gain, const float *bias, float eps, int64_t d,
                 float *out) {
    float factor = 1 / sqrtf(sum_of_squares(x, d) / (float)d + eps);
    for (int64_t i = 0; i < d; i += 8) {
        f8 normed = load8(x + i) * factor;
        if (gain) normed = normed * load8(gain + i);
        store8(out + i, bias ? normed + load8(bias + i) : normed);
    }
}

static void norm_by_mean(const float *x, const float *gain, const float *bias, float eps, int64_t d,
                         float *out) {
    f8 sum = {0};
    for (int64_t i = 0; i < d; i += 8)
        sum += load8(x + i);
    float mean = sum8(sum) / (float)d;
    for (int64_t i = 0; i < d; i += 8)
        store8(out + i, load8(x + i) - mean);
    norm(out, gain, bias, eps, d, out);
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

/* Rotates x[2 i] with x[2 i + 1]. */
FR_INLINE void rotate_neighbours(float *x, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i += 8) {
        f8 low = load8(x + 2 * i);
        f8 high = load8(x + 2 * i + 8);
        f8 a = __builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14);
        f8 b = __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15);
        f8 c = load8(cos + i);
        f8 s = load8(sin + i);
        f8 first = fma8(a, c, -(b * s));
        f8 second = fma8(b, c, a * s);
        store8(x + 2 * i, __builtin_shufflevector(first, second, 0, 8, 1, 9, 2, 10, 3, 11));
        store8(x + 2 * i + 8, __builtin_shufflevector(first, second, 4, 12, 5, 13, 6, 14, 7, 15));
    }
}

static void heads(float *x, const fr_head_steps *s, int64_t count, int64_t d) {
    int norms_each = s->gain && !s->norms_together;
    if (s->bias) add(x, s->bias, count * d);
    if (s->gain && s->norms_together) norm(x, s->gain, NULL, s->eps, count * d, x);
    for (int64_t h = 0; h < count; h++, x += d) {
        if (norms_each && !s->norms_rotated) norm(x, s->gain, NULL, s->eps, d, x);
        if (s->is_interleaved) {
            rotate_neighbours(x, s->cos, s->sin, s->dims / 2);
        } else {
            rotate(x, s->cos, s->sin, s->dims / 2);
        }
        if (norms_each && s->norms_rotated) norm(x, s->gain, NULL, s->eps, d, x);
        if (s->scale == 1) continue;
        for (int64_t i = 0; i < d; i += 8)
            store8(x + i, load8(x + i) * s->scale);
    }
}

/* The activation of 8 numbers, without the factor of `up`. */
FR_INLINE f8 activated(int activation, f8 x) {
    switch (activation) {
    case FR_GELU: {
        f8 inner = fma8(x * x, x * 0.044715f, x) * 1.5957691216f;
        return x / (1.0f + exp8(-inner));
    }
    case FR_RELU_SQUARED: {
        f8 positive = max8(x, splat8(0));
        return positive * positive;
    }
    case FR_CLAMPED: x = choose8(x > 7.0f, splat8(7), x); return x / (1.0f + exp8(x * -1.702f));
    default: return x / (1.0f + exp8(-x));
    }
}

FR_INLINE void activate_as(int activation, float *gates, const float *up, int64_t n) {
    for (int64_t i = 0; i < n; i += 8) {
        f8 y = activated(activation, load8(gates + i));
        if (up && activation == FR_CLAMPED) {
            f8 u = load8(up + i);
            u = choose8(u > 7.0f, splat8(7), choose8(u < -7.0f, splat8(-7), u));
            y = y * (u + 1.0f);
        } else if (up) {
            y = y * load8(up + i);
        }
        store8(gates + i, y);
    }
}

/* activate_as with a constant activation, so that the loop has no branches. */
static void activate(int activation, float *gates, const float *up, int64_t n) {
    switch (activation) {
    case FR_GELU: activate_as(FR_GELU, gates, up, n); break;
    case FR_RELU_SQUARED: activate_as(FR_RELU_SQUARED, gates, up, n); break;
    case FR_CLAMPED: activate_as(FR_CLAMPED, gates, up, n); break;
    default: activate_as(FR_SILU, gates, up, n);
    }
}

FR_INLINE f8 scaled(f8 x, float factor, float cap) {
    x = x * factor;
    return cap != 0 ? cap8(x, cap) : x;
}

static void scale(float *x, float factor, float cap, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        store8(x + i, scaled(load8(x + i), factor, cap));
    f8 last = {0};
    memcpy(&last, x + i, (size_t)(n - i) * sizeof(float));
    last = scaled(last, factor, cap);
    memcpy(x + i, &last, (size_t)(n - i) * sizeof(float));
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

const fr_vector_ops FR_NAME(fr_vector_ops) = {
    norm, norm_by_mean, heads, activate, scale, add, to_half, argmax, exps,
};
