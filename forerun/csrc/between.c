/* `fr_between` for one instruction set, included by its translation unit after products.c. Vectors of
   eight are explicit, as a compiler would order the sums of its own as it likes. Compiled with -ffp-contract=off: each fused
   product is written as such. */

#include "between.h"
#include "vectors.h"

#include <math.h>

typedef uint32_t u8 __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16)));

FR_INLINE f8 choose8(i8 which, f8 yes, f8 no) { return (f8)(((i8)yes & which) | ((i8)no & ~which)); }

FR_INLINE f8 max8(f8 x, f8 y) { /* y, if either is NaN */
#if defined(__AVX__)
    return (f8)_mm256_max_ps((__m256)x, (__m256)y);
#else
    return choose8(x > y, x, y);
#endif
}

/* exp: a power of two times a polynomial (Cephes') within half of ln 2 of zero. */
FR_INLINE f8 exp8(f8 x) {
    x = choose8(x < -87.0f, splat8(-87.0f), choose8(x > 88.0f, splat8(88.0f), x));
    f8 shifted = fma8(x, splat8(1.44269504f), splat8(0x1.8p23f)), whole = shifted - 0x1.8p23f;
    f8 r = fma8(whole, splat8(2.12194440e-4f), fma8(whole, splat8(-0.693359375f), x)), y = splat8(1.9875691500e-4f);
    y = fma8(y, r, splat8(1.3981999507e-3f));
    y = fma8(y, r, splat8(8.3334519073e-3f));
    y = fma8(y, r, splat8(4.1665795894e-2f));
    y = fma8(y, r, splat8(1.6666665459e-1f));
    y = fma8(y, r, splat8(5.0000001201e-1f));
    y = fma8(y * r, r, r + 1.0f);
    return y * (f8)(((u8)shifted << 23) + 0x3f800000);
}

static float squares(const float *x, int64_t d) {
    f8 sums[4] = {{0}};
    int64_t i = 0;
    for (; i + 32 <= d; i += 32)
        for (int k = 0; k < 4; k++) sums[k] = fma8(load8(x + i + 8 * k), load8(x + i + 8 * k), sums[k]);
    for (; i < d; i += 8) sums[0] = fma8(load8(x + i), load8(x + i), sums[0]);
    return lanes8((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

static void add(float *x, const float *added, int64_t n) {
    for (int64_t i = 0; i < n; i += 8) store8(x + i, load8(x + i) + load8(added + i));
}

static void norm(float *x, const float *added, const float *gain, float eps, int64_t d, float *out) {
    if (added) add(x, added, d);
    float turn = 1 / sqrtf(squares(x, d) / (float)d + eps);
    for (int64_t i = 0; i < d; i += 8) store8(out + i, gain ? load8(x + i) * turn * load8(gain + i) : load8(x + i) * turn);
}

static void heads(float *x, const float *bias, const float *gain, float eps, const float *cos, const float *sin,
                  int64_t turned, float scale, int64_t count, int64_t d) {
    int64_t half = turned / 2;
    if (bias) add(x, bias, count * d);
    for (int64_t h = 0; h < count; h++, x += d) {
        if (gain) norm(x, 0, gain, eps, d, x);
        for (int64_t i = 0; i < half; i += 8) {
            f8 a = load8(x + i), b = load8(x + half + i), c = load8(cos + i), s = load8(sin + i);
            store8(x + i, fma8(a, c, -(b * s)));
            store8(x + half + i, fma8(b, c, a * s));
        }
        for (int64_t i = 0; scale != 1 && i < d; i += 8) store8(x + i, load8(x + i) * scale);
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
        u8 bits = (u8)load8(x + i), size = bits & 0x7fffffff, none = (u8)(size > 0x7f800000);
        u8 above = (u8)(size > 0x477fe000), small = (u8)(size < 0x38800000);
        size = (above & 0x477fe000) | (~above & size);
        u8 normal = ((size + 0xfff + ((size >> 13) & 1)) >> 13) - (112 << 10);
        u8 tiny = (u8)((f8)(size & small) + 0.5f) - 0x3f000000; /* the last bit of 0.5 is the smallest half */
        u8 found = (none & 0x7e00) | (~none & ((small & tiny) | (~small & normal)));
        h8 stored = __builtin_convertvector(found | ((bits >> 16) & 0x8000), h8);
        memcpy(out + i, &stored, sizeof stored);
    }
}

static int64_t argmax(const float *x, int64_t n) {
    f8 most = splat8(-INFINITY);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) most = max8(load8(x + i), most);
    float best = most[0];
    for (int k = 1; k < 8; k++) best = most[k] > best ? most[k] : best;
    for (; i < n; i++) best = x[i] > best ? x[i] : best;
    for (i = 0; i < n; i++)
        if (x[i] == best) return i;
    return 0;
}

static float exps(const float *x, float most, float scale, int64_t n, float *out) {
    f8 sum = {0}, last = splat8(most);
    int64_t whole = n / 8 * 8, left = n - whole;
    for (int64_t i = 0; i < whole; i += 8) {
        f8 here = exp8((load8(x + i) - most) * scale);
        store8(out + i, here);
        sum += here;
    }
    memcpy(&last, x + whole, (size_t)left * sizeof(float));
    last = exp8((last - most) * scale);
    for (int64_t k = left; k < 8; k++) last[k] = 0;
    memcpy(out + whole, &last, (size_t)left * sizeof(float));
    return lanes8(sum + last);
}

const fr_between FR_NAME(fr_between) = {norm, heads, gate, add, to_half, argmax, exps};
