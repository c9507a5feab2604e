/* Quantising inputs and products with panels, for one variant: variant_*.c sets FR_VARIANT and FR_ISA.
   For each output f[lane] = fma(x sum, minimum, fma(float(sum of q code) x scale, weight's scale, f[lane])), superblock by superblock, and then the
   lanes' sum (lanes8).  Integers are exact and the float part has one order, so variants and groups of rows give the same bits. */
#include "layouts.h"
#include "vectors.h"

#define ROWS 32                  /* rows that a unit is unpacked for */
#define NEAR_BYTES (384 * 1024)  /* records that stay in the L2 cache while panels pass */
#define AHEAD 4096               /* bytes to prefetch ahead into the L1 cache, and FAR into the L2 cache: measured on Intel */
#define FAR 16384
#define VNNI (FR_ISA == FR_AVXVNNI || FR_ISA == FR_AVX512VNNI)
#define WIDE (FR_ISA == FR_AVX512VNNI)
#define STEP (WIDE ? 4 : 1)      /* units at once */
#define SIGNED (FR_ISA == FR_PLAIN || FR_ISA == FR_NEON) /* how 6 and 8 bit codes are multiplied */
#define UNROLL _Pragma("GCC unroll 8")

typedef uint8_t b32 __attribute__((vector_size(32)));
typedef uint16_t h16 __attribute__((vector_size(32)));
typedef struct { f8 lane[10]; } sums; /* of a row: 8 outputs, the remaining blocks, alignment */

FR_INLINE b32 bytes_at(const void *p) { b32 v; memcpy(&v, p, 32); return v; }

/* The codes of a unit in 8 vectors; unsigned if the instruction needs it. */
FR_INLINE void unpack(int bits, const uint8_t *u, b32 w[8]) {
    const h16 low = (h16){} + 0x0f0f, fifth = (h16){} + 0x1010, top = (h16){} + 0x3030;
    if (bits == 8) {
        UNROLL for (int t = 0; t < 8; t++) w[t] = VNNI ? bytes_at(u + 32 * t) ^ 0x80 : bytes_at(u + 32 * t);
        return;
    }
    UNROLL for (int i = 0; i < 4; i++) {
        h16 v = (h16)bytes_at(u + 32 * i);
        w[i] = (b32)(v & low), w[i + 4] = (b32)(v >> 4 & low);
    }
    if (bits == 5) {
        h16 v = (h16)bytes_at(u + 128);
        UNROLL for (int t = 0; t < 8; t++) w[t] |= (b32)((t < 4 ? v << (4 - t) : v >> (t - 4)) & fifth);
    }
    if (bits == 6) {
        UNROLL for (int t = 0; t < 8; t++) {
            h16 v = (h16)bytes_at(u + 128 + 32 * (t % 2));
            int p = t / 2;
            w[t] |= (b32)((p < 2 ? v << (4 - 2 * p) : v >> (2 * p - 4)) & top);
            if (SIGNED) w[t] -= 32;
        }
    }
}

/* Sums of pairs of int16, times one number, for corrections. */
FR_INLINE i8 pairs(const int16_t *p, i8 by) {
    i8 v;
    memcpy(&v, p, 32);
    return ((v << 16 >> 16) + (v >> 16)) * by;
}

/* a + the products of four bytes a lane. */
FR_INLINE i8 dot4(i8 a, b32 w, const int8_t *x) {
#if FR_ISA == FR_AVX512VNNI
    return (i8)_mm256_dpbusd_epi32((__m256i)a, (__m256i)w, (__m256i)bytes_at(x));
#elif FR_ISA == FR_AVXVNNI
    return (i8)_mm256_dpbusd_avx_epi32((__m256i)a, (__m256i)w, (__m256i)bytes_at(x));
#elif FR_ISA == FR_NEON
    int8x16_t c[2];
    int32x4_t s[2];
    memcpy(c, &w, 32), memcpy(s, &a, 32);
    s[0] = vdotq_s32(s[0], c[0], vld1q_s8(x)), s[1] = vdotq_s32(s[1], c[1], vld1q_s8(x + 16));
    memcpy(&a, s, 32);
    return a;
#else /* plain C: signed bytes by pairs, as vectors of int16 can */
    typedef int16_t s16 __attribute__((vector_size(32)));
    s16 even = (s16)w << 8 >> 8, odd = (s16)w >> 8, v = (s16)bytes_at(x);
    s16 p = even * (v << 8 >> 8), q = odd * (v >> 8);
    return a + ((i8)p << 16 >> 16) + ((i8)p >> 16) + ((i8)q << 16 >> 16) + ((i8)q >> 16);
#endif
}

#if FR_ISA == FR_AVX2
FR_INLINE __m256i maddubs(b32 w, const int8_t *x) { return _mm256_maddubs_epi16((__m256i)w, (__m256i)bytes_at(x)); }
FR_INLINE __m256i ones(void) { return _mm256_set1_epi16(1); }
#endif

/* The sums of 32 products a lane; sc: the scales of 16 (6 bits only). */
FR_INLINE i8 dot(int bits, const b32 w[8], const fr_record *x, const i8 sc[2]) {
#if FR_ISA == FR_AVX2 /* int16 sums hold: 8 pairs of 4 bits, 4 of 5, 4 of 6 after correction, 1 of 8 */
    __m256i a[2], total = _mm256_setzero_si256();
    if (bits == 8) {
        UNROLL for (int t = 0; t < 8; t++) {
            __m256i signs = _mm256_sign_epi8((__m256i)bytes_at(x->q + 32 * t), (__m256i)w[t]);
            __m256i m = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w[t]), signs);
            total = _mm256_add_epi32(total, _mm256_madd_epi16(m, ones()));
        }
        return (i8)total;
    }
    UNROLL for (int h = 0; h < 2; h++) {
        a[h] = maddubs(w[h], x->q + 32 * h);
        if (bits == 6) a[h] = _mm256_add_epi16(a[h], (__m256i)bytes_at(x->correction + 16 * h));
        UNROLL for (int p = 1; p < 4; p++) a[h] = _mm256_add_epi16(a[h], maddubs(w[2 * p + h], x->q + 64 * p + 32 * h));
    }
    if (bits == 4) return (i8)_mm256_madd_epi16(_mm256_add_epi16(a[0], a[1]), ones());
    if (bits == 5) return (i8)_mm256_add_epi32(_mm256_madd_epi16(a[0], ones()), _mm256_madd_epi16(a[1], ones()));
    return (i8)_mm256_add_epi32(_mm256_madd_epi16(a[0], (__m256i)sc[0]), _mm256_madd_epi16(a[1], (__m256i)sc[1]));
#else
    i8 a[2] = {{0}, {0}};
    UNROLL for (int h = 0; h < 2; h++) {
        if (!SIGNED && bits == 6) a[h] = pairs(x->correction + 16 * h, (i8){} + 1);
        if (!SIGNED && bits == 8) a[h] = pairs(x->correction + 16 * h, (i8){} + 4);
        UNROLL for (int p = 0; p < 4; p++) a[h] = dot4(a[h], w[2 * p + h], x->q + 64 * p + 32 * h);
    }
    return bits == 6 ? a[0] * sc[0] + a[1] * sc[1] : a[0] + a[1];
#endif
}

FR_INLINE i8 bytes8(const uint8_t *p, int is_signed) { /* compilers would convert byte by byte here */
#if defined(__AVX2__)
    __m128i v = _mm_loadl_epi64((const __m128i *)p);
    return is_signed ? (i8)_mm256_cvtepi8_epi32(v) : (i8)_mm256_cvtepu8_epi32(v);
#else
    i8 v;
    for (int i = 0; i < 8; i++) v[i] = is_signed ? (int8_t)p[i] : p[i];
    return v;
#endif
}

typedef struct {
    f8 d, m;        /* of weights and minimums, a lane each */
    i8 sc[2], mn[2]; /* of 16 weights (S, SM) */
} scales32;

FR_INLINE void unpack_scales(int bits, int scales, const uint8_t *p, scales32 *s) {
    if (scales == D || scales == DM) {
        s->d = float16s(p);
        s->m = scales == DM ? float16s(p + 16) : s->d * (bits == 4 ? -8.0f : -16.0f);
        return;
    }
    uint32_t both = 0; /* d, and m above it */
    memcpy(&both, p + (scales == SM ? 32 : 16), scales == S ? 2 : 4);
#if defined(__F16C__)
    __m128 halves = _mm_cvtph_ps(_mm_cvtsi32_si128((int)both));
    f8 d = (f8)_mm256_broadcastss_ps(halves), m = (f8)_mm256_broadcastss_ps(_mm_movehdup_ps(halves));
#else
    f8 d = splat8(float16((uint16_t)both)), m = splat8(float16((uint16_t)(both >> 16)));
#endif
    if (scales == K) {
        s->d = floats8(bytes8(p, 0)) * d, s->m = floats8(bytes8(p + 8, 0)) * -m;
        return;
    }
    s->d = d, s->m = m * 0x1p-5f;
    UNROLL for (int h = 0; h < 2; h++) {
        s->sc[h] = bytes8(p + 8 * h, 1);
        if (FR_ISA == FR_AVX2) s->sc[h] = (s->sc[h] & 0xffff) | s->sc[h] << 16; /* for both pairs of a lane */
        if (scales == SM) s->mn[h] = bytes8(p + 16 + 8 * h, 0);
    }
}

FR_INLINE i8 minimums(const scales32 *s, const fr_record *x) { return pairs(x->correction, s->mn[0]) + pairs(x->correction + 16, s->mn[1]); }

FR_INLINE f8 add_row(int bits, int scales, const b32 w[8], const scales32 *s, const fr_record *x, f8 f) {
    f8 scale = load8(x->scale);
    f = fma8(floats8(dot(bits, w, x, s->sc)) * scale, s->d, f);
    if (scales == SM) return fma8(floats8(minimums(s, x)) * scale, s->m, f);
    return bits == 4 || bits == 5 ? fma8(load8(x->sum), s->m, f) : f;
}

#if WIDE /* four outputs at once, two in a register: 16 lanes that come out as two times 8 would */
FR_INLINE __m512i twice(const void *p) { return _mm512_broadcast_i64x4((__m256i)bytes_at(p)); }

/* The codes of two outputs side by side. */
FR_INLINE void unpack_wide(int bits, const uint8_t *one, const uint8_t *two, __m512i w[8]) {
    __m512i v[8];
    UNROLL for (int i = 0; i < bits; i++) v[i] = _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)bytes_at(one + 32 * i)), (__m256i)bytes_at(two + 32 * i), 1);
    if (bits == 8) {
        UNROLL for (int t = 0; t < 8; t++) w[t] = _mm512_xor_si512(v[t], _mm512_set1_epi8(-128));
        return;
    }
    UNROLL for (int t = 0; t < 8; t++) {
        w[t] = _mm512_and_si512(t < 4 ? v[t] : _mm512_srli_epi16(v[t - 4], 4), _mm512_set1_epi8(15));
        if (bits == 4) continue;
        __m512i high = v[bits == 5 ? 4 : 4 + t % 2];
        int by = bits == 5 ? 4 - t : 4 - t / 2 * 2;
        high = by > 0 ? _mm512_slli_epi16(high, by) : _mm512_srli_epi16(high, -by);
        w[t] = _mm512_or_si512(w[t], _mm512_and_si512(high, _mm512_set1_epi8(bits == 5 ? 16 : 48)));
    }
}

FR_INLINE __m512 wide(f8 a, f8 b) { return _mm512_insertf32x8(_mm512_castps256_ps512((__m256)a), (__m256)b, 1); }

FR_INLINE void group(int bits, int scales, size_t unit, const uint8_t *u, const fr_record *x, int n, sums *f, int o) {
    __m512i w[STEP / 2][8];
    __m512 d[STEP / 2], m[STEP / 2], sc[STEP / 2][2];
    scales32 s[STEP];
    UNROLL for (int i = 0; i < STEP; i++) unpack_scales(bits, scales, u + unit * (size_t)i + 32 * bits, &s[i]);
    UNROLL for (int i = 0; i < STEP / 2; i++) {
        unpack_wide(bits, u + unit * (size_t)(2 * i), u + unit * (size_t)(2 * i + 1), w[i]);
        d[i] = wide(s[2 * i].d, s[2 * i + 1].d), m[i] = wide(s[2 * i].m, s[2 * i + 1].m);
        UNROLL for (int h = 0; bits == 6 && h < 2; h++) sc[i][h] = wide(floats8(s[2 * i].sc[h]), floats8(s[2 * i + 1].sc[h]));
    }
    for (int r = 0; r < n; r++, x++) {
        __m512i a[STEP / 2][2], start[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        __m512 at, v, scale = _mm512_castsi512_ps(twice(x->scale)), sum = _mm512_castsi512_ps(twice(x->sum));
        UNROLL for (int h = 0; h < 2; h++)
            if (bits == 6 || bits == 8) start[h] = _mm512_madd_epi16(twice(x->correction + 16 * h), _mm512_set1_epi16(bits == 6 ? 1 : 4));
        UNROLL for (int t = 0; t < 8; t++)
            UNROLL for (int i = 0; i < STEP / 2; i++)
                a[i][t % 2] = _mm512_dpbusd_epi32(t < 2 ? start[t] : a[i][t % 2], w[i][t], twice(x->q + 32 * t));
        UNROLL for (int i = 0; i < STEP / 2; i++) {
            if (bits == 6) { /* what dot has: both products and their sum are below 2^24, so floats are exact, in fewer steps */
                v = _mm512_mul_ps(_mm512_cvtepi32_ps(a[i][0]), sc[i][0]);
                v = _mm512_fmadd_ps(_mm512_cvtepi32_ps(a[i][1]), sc[i][1], v);
            } else v = _mm512_cvtepi32_ps(_mm512_add_epi32(a[i][0], a[i][1]));
            v = _mm512_mul_ps(v, scale);
            at = _mm512_fmadd_ps(v, d[i], _mm512_load_ps(&f[r].lane[o + 2 * i]));
            if (bits == 4 || bits == 5) at = _mm512_fmadd_ps(sum, m[i], at);
            if (scales == SM) {
                v = wide(floats8(minimums(&s[2 * i], x)), floats8(minimums(&s[2 * i + 1], x)));
                at = _mm512_fmadd_ps(_mm512_mul_ps(v, scale), m[i], at);
            }
            _mm512_store_ps(&f[r].lane[o + 2 * i], at);
        }
    }
}
#endif

FR_INLINE void one(int bits, int scales, const uint8_t *u, const fr_record *x, int n, sums *f, int o) {
    b32 w[8];
    scales32 s;
    unpack(bits, u, w);
    unpack_scales(bits, scales, u + 32 * bits, &s);
    for (int r = 0; r < n; r++) f[r].lane[o] = add_row(bits, scales, w, &s, x + r, f[r].lane[o]);
}

FR_INLINE void prefetch(const uint8_t *from, size_t bytes) {
    UNROLL for (size_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(from + AHEAD + i);
        __builtin_prefetch(from + FAR + i, 0, 2);
    }
}

/* One panel for n rows; x: records of the first row, `rows` of them from superblock to superblock. */
FR_INLINE void panel(int bits, int scales, size_t unit, const uint8_t *u, int inputs, const fr_record *x, int rows, int n, sums *f) {
    for (int s = 0; s < inputs / 256; s++, x += rows)
        for (int o = 0; o < 8; o += STEP, u += unit * STEP) {
            prefetch(u, unit * STEP);
#if WIDE
            group(bits, scales, unit, u, x, n, f, o);
#else
            one(bits, scales, u, x, n, f, o);
#endif
        }
    if (scales == D || scales == DM) /* other formats have whole superblocks */
        for (int b = 0; b < inputs / 32 % 8; b++, u += unit, x += rows) {
            prefetch(u, unit);
            one(bits, scales, u, x, n, f, 8);
        }
}

#define X(format, bits, scales, scale_bytes, block, inputs_, layout)                                                          \
    static void panel_##format(const uint8_t *u, int inputs, const fr_record *x, int rows, int n, sums *f) {                  \
        if (scales != FLOATS) panel(bits, scales, FR_UNIT_BYTES(bits, scale_bytes), u, inputs, x, rows, n, f);                \
    }
FR_LAYOUTS(X)
#undef X
#define X(format, bits, scales, scale_bytes, block, inputs, layout) panel_##format,
static void (*const panels[])(const uint8_t *, int, const fr_record *, int, int, sums *) = {FR_LAYOUTS(X)};
#undef X

FR_INLINE f8 float_weights(int layout, const uint8_t *p, int i) {
    if (layout == FR_F32) return load8((const float *)(const void *)p + 8 * i);
    return layout == FR_F16 ? float16s(p + 16 * i) : bfloat16s(p + 16 * i);
}

/* 8 inputs `count` times, a constant so that weights stay in registers, of one output. */
FR_INLINE void add_floats(int layout, int count, const uint8_t *p, const float *x, int stride, int n, sums *f, int o) {
    f8 w[8];
    UNROLL for (int i = 0; i < count; i++) w[i] = float_weights(layout, p, i);
    for (int r = 0; r < n; r++, x += stride) {
        f8 sum = f[r].lane[o];
        UNROLL for (int i = 0; i < count; i++) sum = fma8(load8(x + 8 * i), w[i], sum);
        f[r].lane[o] = sum;
    }
}

#if WIDE /* 64 inputs of four outputs, two in a register */
FR_INLINE void add_wide_floats(int layout, int size, const uint8_t *p, const float *x, int stride, int n, sums *f, int o) {
    __m512 w[2][8];
    UNROLL for (int i = 0; i < 8; i++)
        UNROLL for (int j = 0; j < 2; j++)
            w[j][i] = wide(float_weights(layout, p + 128 * size * j, i), float_weights(layout, p + 128 * size * j + 64 * size, i));
    for (int r = 0; r < n; r++, x += stride) {
        float *to = (float *)&f[r].lane[o];
        __m512 one = _mm512_load_ps(to), two = _mm512_load_ps(to + 16);
        UNROLL for (int i = 0; i < 8; i++) {
            __m512 at = _mm512_broadcast_f32x8((__m256)load8(x + 8 * i));
            one = _mm512_fmadd_ps(at, w[0][i], one), two = _mm512_fmadd_ps(at, w[1][i], two);
        }
        _mm512_store_ps(to, one), _mm512_store_ps(to + 16, two);
    }
}
#endif

FR_INLINE void floats(int layout, int size, const uint8_t *p, int inputs, const float *x, int stride, int n, sums *f) {
    int left = inputs % 64 / 8;
    for (int first = 0; first + 64 <= inputs; first += 64, x += 64)
        for (int o = 0; o < 8; o += STEP, p += 64 * size * STEP) {
            prefetch(p, (size_t)(64 * size * STEP));
#if WIDE
            add_wide_floats(layout, size, p, x, stride, n, f, o);
#else
            add_floats(layout, 8, p, x, stride, n, f, o);
#endif
        }
    for (int o = 0; o < 8; o++)
        for (int i = 0; i < left; i++, p += 8 * size) add_floats(layout, 1, p, x + 8 * i, stride, n, f, o);
}

/* lanes8 of 8 outputs at once, with shuffles that stay in halves. */
FR_INLINE f8 pairs8(f8 a, f8 b) {
    return __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) + __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
}
FR_INLINE f8 totals(const f8 f[8]) {
    f8 a = pairs8(pairs8(f[0], f[1]), pairs8(f[2], f[3])), b = pairs8(pairs8(f[4], f[5]), pairs8(f[6], f[7]));
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}

static void FR_NAME(product)(const fr_matrix *m, const float *x, int stride, const void *records, int rows, float *out, int out_stride,
                             int first_panel, int end_panel) {
    _Alignas(64) sums f[ROWS];
    memset(f, 0, sizeof *f * (size_t)(rows < ROWS ? rows : ROWS));
    const fr_layout *l = &fr_layouts[m->layout];
    int is_float = l->scales == FLOATS, inputs = m->inputs, left = !is_float && inputs % 256;
    size_t bytes = (size_t)l->unit * (size_t)(is_float ? inputs : inputs / 32), row_bytes = is_float ? 4 * (size_t)inputs : fr_record_bytes(inputs, 1);
    int near = (int)(NEAR_BYTES / row_bytes) / ROWS * ROWS;
    if (near < ROWS) near = ROWS;
    for (int first = 0; first < rows; first += near)
        for (int p = first_panel; p < end_panel; p++) {
            const uint8_t *u = m->panels + bytes * (size_t)p;
            int count = m->outputs - 8 * p < 8 ? m->outputs - 8 * p : 8;
            for (int r = first; r < rows && r < first + near; r += ROWS) {
                int n = rows - r < ROWS ? rows - r : ROWS;
                const float *at = is_float ? x + (size_t)stride * (size_t)r : x;
                if (m->layout == FR_F32) floats(FR_F32, 4, u, inputs, at, stride, n, f);
                else if (m->layout == FR_F16) floats(FR_F16, 2, u, inputs, at, stride, n, f);
                else if (m->layout == FR_BF16) floats(FR_BF16, 2, u, inputs, at, stride, n, f);
                else panels[m->layout](u, inputs, (const fr_record *)records + r, rows, n, f);
                for (int i = 0; i < n; i++) {
                    f8 total = totals(f[i].lane);
                    if (left) total += f[i].lane[8];
                    _Pragma("GCC unroll 10") for (int o = 0; o < 10; o++) f[i].lane[o] = (f8){0}; /* for the next panel */
                    float *to = out + (size_t)out_stride * (size_t)(r + i) + 8 * (size_t)p;
                    if (count == 8) store8(to, total);
                    else memcpy(to, &total, 4 * (size_t)count);
                }
            }
        }
}

FR_INLINE i8 larger(i8 a, i8 b) {
#if defined(__AVX2__)
    return (i8)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    i8 more = a > b;
    return (a & more) | (b & ~more);
#endif
}

/* 32 inputs into lane l of a record, or of several.  Not finite: the scale is NaN.  So small that 127 / largest is none: zeros. */
FR_INLINE void quantise32(const float *x, fr_record *to, int l, int lanes) {
    f8 v[4];
    i8 q[4], most = {0};
    UNROLL for (int i = 0; i < 4; i++) v[i] = load8(x + 8 * i), most = larger(most, (i8)v[i] & 0x7fffffff);
    most = larger(most, __builtin_shufflevector(most, most, 4, 5, 6, 7, 0, 1, 2, 3));
    most = larger(most, __builtin_shufflevector(most, most, 2, 3, 0, 1, 6, 7, 4, 5));
    most = larger(most, __builtin_shufflevector(most, most, 1, 0, 3, 2, 5, 4, 7, 6));
    float top = ((f8)most)[0], inverse = 0, scale = 0;
    if (most[0] >= 0x7f800000) scale = __builtin_nanf("");
    else if (top > 0x1p-120f) scale = top / 127.0f, inverse = 127.0f / top;
    UNROLL for (int i = 0; i < 4; i++) q[i] = (i8)(v[i] * inverse + 12582912.0f) - 0x4b400000; /* 1.5 x 2^23: rounds to even */
    if (inverse == 0) memset(q, 0, sizeof q);
    int16_t sums16[4]; /* [h][b / 2] */
    int8_t bytes[32];
#if defined(__AVX2__)
    __m256i all = _mm256_packs_epi16(_mm256_packs_epi32((__m256i)q[0], (__m256i)q[1]), _mm256_packs_epi32((__m256i)q[2], (__m256i)q[3]));
    all = _mm256_permutevar8x32_epi32(all, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *)bytes, all);
    all = _mm256_maddubs_epi16(_mm256_set1_epi8(1), all);
    all = _mm256_add_epi16(all, _mm256_shuffle_epi32(all, 0x4e));
    all = _mm256_add_epi16(all, _mm256_shuffle_epi32(all, 0xb1));
    int32_t halves[2] = {_mm256_extract_epi32(all, 0), _mm256_extract_epi32(all, 4)};
    memcpy(sums16, halves, 8);
#else
    memset(sums16, 0, sizeof sums16);
    for (int i = 0; i < 32; i++) bytes[i] = (int8_t)q[i / 8][i % 8], sums16[i / 16 * 2 + i % 4 / 2] += bytes[i];
#endif
    float sum = scale * (float)(sums16[0] + sums16[1] + sums16[2] + sums16[3]);
    for (int i = 0; i < 4; i++) sums16[i] *= -32;
    for (int end = l + lanes; l < end; l++) {
        UNROLL for (int j = 0; j < 8; j++) memcpy(to->q + 64 * (j / 2) + 32 * (j % 2) + 4 * l, bytes + 16 * (j % 2) + 4 * (j / 2), 4);
        UNROLL for (int h = 0; h < 2; h++) memcpy(to->correction + 16 * h + 2 * l, sums16 + 2 * h, 4);
        to->scale[l] = scale, to->sum[l] = sum;
    }
}

static void FR_NAME(quantise)(const float *x, int rows, int stride, int inputs, void *records, int first_superblock, int end_superblock) {
    int whole = inputs / 256;
    for (int s = first_superblock; s < end_superblock; s++)
        for (int r = 0; r < rows; r++) {
            const float *from = x + (size_t)stride * (size_t)r + 256 * (size_t)s;
            fr_record *to = (fr_record *)records + (size_t)rows * (size_t)s + (size_t)r;
            if (s < whole)
                for (int l = 0; l < 8; l++) quantise32(from + 32 * l, to, l, 1);
            else
                for (int l = 0; l < inputs / 32 % 8; l++) quantise32(from + 32 * l, to + (size_t)rows * (size_t)l, 0, 8);
        }
}

#define TEXT1(name) #name
#define TEXT(name) TEXT1(name)
const fr_operations FR_NAME(fr_operations) = {TEXT(FR_VARIANT), FR_NAME(quantise), FR_NAME(product)};
