/* Quantised inputs and products with panels, for one instruction set; its variant_*.c includes this
   file.

   A panel times a row, where a lane is an output (layouts.h, and fr_record):

     panel of a block, t = 0   | output 0: 4 codes | output 1: 4 codes | ... | output 15: 4 codes
     the row's q, broadcast    | 4 inputs          | the same 4 inputs | ... | the same 4 inputs
     sums of four products     | sum               | sum               | ... | sum

   For each output and row, f = 0 at first. Then, for one block of 32 inputs after the other:

     dot = the sum of q x code (DM, K), or of q x (code less 8, 16, 32 or 128), an exact integer,
           where the code is a number of the table if the layout has one (NL, XS, FP4, W);
           with scales of 16 (S, SM, W) it is (first 16) x sc[0] + (last 16) x sc[1]
     f   = fma(float(dot) x scale of the inputs, d, (d x sc), d / 8 or 2^(e - 128), f)
     and then, if the layout has minimums, where `half` is that of the record:
     f   = fma(sum of the inputs, m or (-m x mn), f)                                      DM, K
     f   = fma(float(half[0] x mn[0] + half[1] x mn[1]) x scale of the inputs, m / 32, f)    SM

   f is the result. Integers are exact, and floats have this order on every variant and beside any
   rows, so the bits are always the same. */
#include "layouts.h"
#include "vectors.h"

#define IS_AVX2 (FR_ISA == FR_AVX2)
#define HAS_I8MM (FR_ISA == FR_I8MM)
#define HAS_NEON (FR_ISA == FR_NEON || HAS_I8MM)
#define HAS_VNNI (FR_ISA == FR_AVXVNNI || FR_ISA == FR_AVX512VNNI)
#define IS_SIGNED (IS_PLAIN || HAS_NEON) /* products are of two signed bytes */

#define LANES (HAS_AVX512 ? 16 : 8)
#define PARTS (FR_PANEL / LANES) /* of a panel */
/* Parts that share the broadcasts of inputs, because two loads a cycle would bound the others. */
#define SIDE (IS_AVX2 || FR_ISA == FR_AVXVNNI ? 2 : 1)
#define TILE (HAS_AVX512 ? 8 : (IS_PLAIN ? 1 : 4)) /* rows whose sums stay in registers */
#define PANEL_ROWS 32                              /* for which a panel is read at once */
#define NEAR_BYTES (384 * 1024) /* of records that stay in the L2 cache while panels pass */
#define L2_AHEAD 8192           /* bytes to prefetch ahead into the L2 cache */
#define L1_AHEAD 4096           /* and into the L1 cache, if fr_fetches_near */

typedef uint8_t codes __attribute__((vector_size(4 * LANES)));
typedef uint16_t words __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef float reals __attribute__((vector_size(4 * LANES)));

FR_INLINE codes codes_at(const void *p) {
    codes v;
    memcpy(&v, p, sizeof v);
    return v;
}

FR_INLINE reals reals_at(const float *p) {
    reals v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* Four bytes in every lane. */
FR_INLINE ints broadcast(const void *p) {
    int32_t v;
    memcpy(&v, p, 4);
    return (ints){} + v;
}

FR_INLINE reals to_reals(ints v) { return __builtin_convertvector(v, reals); }

#if HAS_AVX512
FR_INLINE reals everywhere(float x) { return (reals)_mm512_set1_ps(x); }

FR_INLINE reals fused(reals a, reals b, reals c) {
    return (reals)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

FR_INLINE ints unsigned_bytes(const uint8_t *p) {
    return (ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
}

FR_INLINE ints signed_bytes(const uint8_t *p) {
    return (ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
}

FR_INLINE reals float16_reals(const uint8_t *p) {
    return (reals)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
#else
FR_INLINE reals everywhere(float x) { return splat8(x); }

FR_INLINE reals fused(reals a, reals b, reals c) { return fma8(a, b, c); }

#if defined(__AVX2__) /* compilers would convert byte by byte */
FR_INLINE ints unsigned_bytes(const uint8_t *p) {
    return (ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
}

FR_INLINE ints signed_bytes(const uint8_t *p) {
    return (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
}
#else
FR_INLINE ints unsigned_bytes(const uint8_t *p) {
    typedef uint8_t bytes __attribute__((vector_size(LANES)));
    bytes v;
    memcpy(&v, p, LANES);
    return __builtin_convertvector(v, ints);
}

FR_INLINE ints signed_bytes(const uint8_t *p) {
    typedef int8_t bytes __attribute__((vector_size(LANES)));
    bytes v;
    memcpy(&v, p, LANES);
    return __builtin_convertvector(v, ints);
}
#endif

FR_INLINE reals float16_reals(const uint8_t *p) { return float16s(p); }
#endif

/* Bits of a code that products are of: those of a number of a table, or the layout's. */
FR_INLINE int code_bits(int bits, int scales) { return fr_has_numbers(scales) ? 8 : bits; }

/* What is subtracted from a code of so many bits, besides minimums. */
FR_INLINE int offset(int bits, int scales) {
    if (scales == D || fr_has_numbers(scales)) return 1 << (bits - 1);
    return bits == 6 ? 32 : 0;
}

/* What vectors of a block hold for later t: a vector of 4 bits, or the codes of 5 and 6 bits that
   have no vector of their own. */
typedef struct {
    words of[3];
} rest_codes;

/* Reads a vector once, because compilers would read it for each use, and a single row is bound by
   loads. */
FR_INLINE words read_once(const uint8_t *p) {
    words v = (words)codes_at(p);
#if HAS_AVX512
    __asm__("" : "+v"(v));
#endif
    return v;
}

/* The numbers of a table at the places w. */
FR_INLINE codes numbers_at(const uint8_t *table, codes w) {
#if HAS_AVX512
    __m128i numbers = _mm_loadu_si128((const __m128i *)table);
    return (codes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(numbers), (__m512i)w);
#elif defined(__AVX2__)
    __m128i numbers = _mm_loadu_si128((const __m128i *)table);
    return (codes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(numbers), (__m256i)w);
#elif HAS_NEON
    uint8x16_t at[2];
    memcpy(at, &w, 32);
    for (int i = 0; i < 2; i++)
        at[i] = vqtbl1q_u8(vld1q_u8(table), at[i]);
    memcpy(&w, at, 32);
    return w;
#else
    for (int i = 0; i < 4 * LANES; i++)
        w[i] = table[w[i]];
    return w;
#endif
}

/* The bits of a mask in each byte of v, which is shifted to the right first. */
FR_INLINE words bits_of(words v, int right, int mask) {
    return v >> right & (uint16_t)(mask * 0x101);
}

FR_INLINE codes unpacked4(const uint8_t *block, int t, rest_codes *rest) {
    if (t % 2) return (codes)bits_of(rest->of[0], 4, 15);
    rest->of[0] = read_once(block + 32 * t);
    return (codes)bits_of(rest->of[0], 0, 15);
}

/* t = 5 to 7 are put together from the top bits of the vectors of the others (layouts.h). */
FR_INLINE codes unpacked5(const uint8_t *block, int t, rest_codes *rest) {
    if (t > 4) return (codes)rest->of[t - 5];
    words v = read_once(block + 64 * t);
    switch (t) {
    case 0: rest->of[0] = bits_of(v, 3, 28); break;
    case 1:
        rest->of[0] |= bits_of(v, 6, 3);
        rest->of[2] = bits_of(v, 4, 2);
        break;
    case 2: rest->of[1] = bits_of(v, 3, 28); break;
    case 3:
        rest->of[1] |= bits_of(v, 6, 3);
        rest->of[2] |= bits_of(v, 5, 1);
        break;
    default: rest->of[2] |= bits_of(v, 3, 28); break;
    }
    return (codes)bits_of(v, 0, 31);
}

/* So is the last one of four. */
FR_INLINE codes unpacked6(const uint8_t *block, int t, rest_codes *rest) {
    int i = t % 4;
    if (i == 3) return (codes)rest->of[0];
    words v = read_once(block + 64 * (t / 4 * 3 + i));
    words part = bits_of(v, 2 + 2 * i, 48 >> 2 * i);
    rest->of[0] = i ? rest->of[0] | part : part;
    return (codes)bits_of(v, 0, 63);
}

/* The codes for the inputs 4 t to 4 t + 3. It is called for one t after the other. If products are
   of signed bytes, the offset is subtracted. */
FR_INLINE codes unpacked(int bits, int scales, const uint8_t *block, int t, rest_codes *rest) {
    codes w;
    switch (bits) {
    case 4: w = unpacked4(block, t, rest); break;
    case 5: w = unpacked5(block, t, rest); break;
    case 6: w = unpacked6(block, t, rest); break;
    default: w = codes_at(block + 64 * t); break;
    }
    if (fr_has_numbers(scales)) w = numbers_at(fr_numbers_of(scales), w);
    int bits_of_code = code_bits(bits, scales);
    int is_signed = IS_SIGNED || (IS_AVX2 && bits_of_code == 8);
    return is_signed ? w - (uint8_t)offset(bits_of_code, scales) : w;
}

/* What sums of products with codes start from: -offset x the sum of q, if the offset was not
   subtracted from the codes. */
FR_INLINE ints start(int bits, int scales, const fr_record *x, int half) {
    if (IS_SIGNED || !offset(bits, scales)) return (ints){};
#if IS_AVX2 /* sums of int16 */
    if (bits == 8) return (ints){};
    if (bits == 6) return broadcast(x->half_pairs[half]);
    ints pairs = broadcast(x->pairs);
    return bits == 5 ? (ints)_mm256_add_epi16((__m256i)pairs, (__m256i)pairs) : pairs;
#else /* shifts divide exactly */
    if (bits == 6) return broadcast(&x->half[half]);
    if (fr_has_halves(scales)) return broadcast(&x->half[half]) << 2;
    return broadcast(&x->whole) >> (bits == 4 ? 4 : bits == 5 ? 3 : 0);
#endif
}

/* a + the products of four bytes in each lane. AVX2 without VNNI sums them in pairs of int16. */
FR_INLINE ints add_products(int bits, ints a, codes w, ints x) {
    (void)bits;
#if HAS_AVX512
    return (ints)_mm512_dpbusd_epi32((__m512i)a, (__m512i)w, (__m512i)x);
#elif HAS_VNNI
    return (ints)_mm256_dpbusd_avx_epi32((__m256i)a, (__m256i)w, (__m256i)x);
#elif IS_AVX2
    if (bits < 8) {
        a = (ints)_mm256_add_epi16((__m256i)a, _mm256_maddubs_epi16((__m256i)w, (__m256i)x));
        /* Else compilers order the sums anew, and keep all products, in memory. */
        __asm__("" : "+x"(a));
        return a;
    }
    /* Codes are signed here: their sign goes over to the inputs. An int16 holds two products of
       128 x 127. */
    __m256i signed_x = _mm256_sign_epi8((__m256i)x, (__m256i)w);
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w), signed_x);
    a += (ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    __asm__("" : "+x"(a));
    return a;
#elif HAS_NEON
    int8x16_t c[2];
    int8x16_t b[2];
    int32x4_t s[2];
    memcpy(c, &w, 32);
    memcpy(b, &x, 32);
    memcpy(s, &a, 32);
    s[0] = vdotq_s32(s[0], c[0], b[0]);
    s[1] = vdotq_s32(s[1], c[1], b[1]);
    memcpy(&a, s, 32);
    return a;
#else /* plain C: signed bytes by pairs, in vectors of int16, which hold two of 128 x 127 */
    typedef int16_t shorts __attribute__((vector_size(4 * LANES)));
    shorts even = ((shorts)w << 8 >> 8) * ((shorts)x << 8 >> 8);
    shorts pairs = even + ((shorts)w >> 8) * ((shorts)x >> 8);
    return a + ((ints)pairs << 16 >> 16) + ((ints)pairs >> 16);
#endif
}

#if HAS_I8MM
/* Sums of two rows. Each vector has two outputs: output 0 row 0, output 0 row 1, output 1 row 0,
   output 1 row 1. */
typedef struct {
    int32x4_t of[4];
} pair_sums;

/* Adds the products of two rows with the codes for 8 inputs, which two vectors hold by fours. */
FR_INLINE void add_matrices(pair_sums *a, codes first, codes last, const int8_t *q,
                            const int8_t *r) {
    int32x4_t x[2];
    int32x4_t y[2];
    int8x16_t inputs = vcombine_s8(vld1_s8(q), vld1_s8(r));
    memcpy(x, &first, 32);
    memcpy(y, &last, 32);
    UNROLL
    for (int i = 0; i < 2; i++) {
        int8x16_t low = vreinterpretq_s8_s32(vzip1q_s32(x[i], y[i]));
        int8x16_t high = vreinterpretq_s8_s32(vzip2q_s32(x[i], y[i]));
        a->of[2 * i] = vmmlaq_s32(a->of[2 * i], low, inputs);
        a->of[2 * i + 1] = vmmlaq_s32(a->of[2 * i + 1], high, inputs);
    }
}

/* The sums of one of the two rows. */
FR_INLINE ints sums_of(const pair_sums *a, int row) {
    int32x4_t s[2];
    ints sums;
    UNROLL
    for (int i = 0; i < 2; i++) {
        int32x4_t low = a->of[2 * i];
        int32x4_t high = a->of[2 * i + 1];
        s[i] = row ? vuzp2q_s32(low, high) : vuzp1q_s32(low, high);
    }
    memcpy(&sums, s, 32);
    return sums;
}
#endif

/* Whether the halves of a block are summed apart, because each has its scale, or because int16
   would overflow. 16 products of 4 bits fill it (15 x 127 x 16 = 30480), and so do 16 of 5 bits
   less 16, or 8 of 5 bits or of 6 bits less 32. Sums that start from an offset may overflow on
   their way, as they are right modulo 2^16. */
FR_INLINE int is_halved(int bits, int scales) {
    return fr_has_halves(scales) || (IS_AVX2 && bits == 5 && scales != D);
}

/* The dot of a block as floats, from its sums. With scales of halves it is below 2^24, also for the
   widest numbers: 2 x 16 x 127 x 124 x 31 = 15,622,016. */
FR_INLINE reals dot(int bits, int scales, const ints sum[2], const ints sc[2]) {
#if IS_AVX2
    if (bits == 8) {
        int is_one = !fr_has_halves(scales);
        return to_reals(is_one ? sum[0] : sum[0] * sc[0] + sum[1] * sc[1]);
    }
    const ints ones = (ints){} + 0x10001;
    ints total = {};
    for (int h = 0; h < (is_halved(bits, scales) ? 2 : 1); h++) {
        ints factor = bits == 6 ? sc[h] : ones;
        total += (ints)_mm256_madd_epi16((__m256i)sum[h], (__m256i)factor);
    }
    return to_reals(total);
#elif HAS_VNNI /* floats are exact, in fewer steps */
    (void)bits;
    if (!fr_has_halves(scales)) return to_reals(sum[0]);
    return fused(to_reals(sum[1]), to_reals(sc[1]), to_reals(sum[0]) * to_reals(sc[0]));
#else
    (void)bits;
    return to_reals(fr_has_halves(scales) ? sum[0] * sc[0] + sum[1] * sc[1] : sum[0]);
#endif
}

typedef struct {
    reals d, m;        /* times those of the block, for K */
    ints sc[2], mn[2]; /* of 16 weights; sc of S and SM as multipliers() has it */
} block_scales;

/* Signed bytes, in each lane one; for AVX2 twice, as int16 for both of the lane's sums. */
FR_INLINE ints multipliers(const uint8_t *p) {
#if IS_AVX2
    __m128i bytes = _mm_loadl_epi64((const __m128i *)p);
    return (ints)_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(bytes, bytes));
#else
    return signed_bytes(p);
#endif
}

/* Reads the scales of a block; d and m are those of its group. */
FR_INLINE block_scales read_scales(int scales, const uint8_t *block, reals d, reals m) {
    block_scales s = {.d = d, .m = m};
    if (scales == D || scales == DM || scales == NL) s.d = float16_reals(block);
    if (scales == XS) s.d = to_reals(signed_bytes(block)) * d;
    if (scales == FP4) { /* the bits of the larger one are right, for subnormal numbers too */
        ints e = unsigned_bytes(block);
        ints normal = (e - 1) * (1 << 23);
        ints subnormal = (e + 1) * (1 << 21);
        ints is_normal = normal > subnormal;
        s.d = (reals)((normal & is_normal) | (subnormal & ~is_normal));
    }
    if (scales == DM) s.m = float16_reals(block + 32);
    if (scales == K) {
        s.d = to_reals(unsigned_bytes(block)) * d;
        s.m = to_reals(unsigned_bytes(block + 16)) * m;
    }
    for (int h = 0; fr_has_halves(scales) && h < 2; h++) {
        const uint8_t *at = block + 16 * h;
        s.sc[h] = fr_is_wide(scales) ? signed_bytes(at) : multipliers(at);
        if (scales == SM) s.mn[h] = unsigned_bytes(block + 32 + 16 * h);
    }
    return s;
}

/* f and the products of a block (the formulas at the head of this file). */
FR_INLINE reals add_block(int bits, int scales, const ints sum[2], const block_scales *s,
                          const fr_record *x, reals f) {
    reals scale = everywhere(x->scale);
    f = fused(dot(bits, scales, sum, s->sc) * scale, s->d, f);
    if (scales == K || scales == DM) f = fused(everywhere(x->sum), s->m, f);
    if (scales == SM) { /* integers below 2^24, so floats are exact */
        reals minimums = to_reals(broadcast(&x->half[0])) * to_reals(s->mn[0]);
        minimums = fused(to_reals(broadcast(&x->half[1])), to_reals(s->mn[1]), minimums);
        f = fused(minimums * scale, s->m, f);
    }
    return f;
}

/* A layout of few bits, as constants of the functions that are inlined below. */
typedef struct {
    int bits, scales;
    size_t scale_bytes; /* of a block */
    size_t group_bytes; /* of the scales that a group has for itself */
} shape;

FR_INLINE size_t unit_bytes(shape l) { return 64 * (size_t)l.bits + l.scale_bytes; }

/* Prefetches what lies ahead. It is called evenly over blocks, because bursts of prefetches would
   wait for each other. */
FR_INLINE void prefetch(const uint8_t *from, size_t bytes) {
    UNROLL
    for (size_t i = 0; i < bytes; i += 64)
        __builtin_prefetch(from + L2_AHEAD + i, 0, 2);
    if (!fr_fetches_near) return;
    UNROLL
    for (size_t i = 0; i < bytes; i += 64)
        __builtin_prefetch(from + L1_AHEAD + i);
}

/* What is done about the codes of a group: they are unpacked, unpacked and kept for other rows, or
   read as they were kept, [part][8 block + t]. */
typedef struct {
    enum { UNPACK, KEEP, READ } step;
    codes (*kept)[64]; /* not for UNPACK */
} code_source;

/* The codes of a part of block b, which begins at `block`, for t. */
FR_INLINE codes codes_of(shape l, code_source from, const uint8_t *block, int part, int b, int t,
                         rest_codes *rest) {
    if (from.step == READ) return from.kept[part][8 * b + t];
    codes w = unpacked(l.bits, l.scales, block + 4 * LANES * part, t, rest);
    if (from.step == KEEP) from.kept[part][8 * b + t] = w;
    return w;
}

/* The sums of SIDE parts of block b of a group times n rows. */
FR_INLINE void sum_block(shape l, int n, code_source from, const uint8_t *block, int part, int b,
                         const fr_record *x, ints sum[TILE][SIDE][2]) {
    rest_codes rest[SIDE] = {0};
    codes w[SIDE];
    int bits = code_bits(l.bits, l.scales);
    int halves = is_halved(bits, l.scales) ? 2 : 1;
    UNROLL
    for (int half = 0; half < halves; half++) {
        UNROLL
        for (int r = 0; r < n; r++) {
            ints first = start(bits, l.scales, x + r, half);
            UNROLL
            for (int i = 0; i < SIDE; i++)
                sum[r][i][half] = first;
        }
        UNROLL
        for (int t = 8 / halves * half; t < 8 / halves * (half + 1); t++) {
            UNROLL
            for (int i = 0; i < SIDE; i++)
                w[i] = codes_of(l, from, block, part + i, b, t, &rest[i]);
            UNROLL
            for (int r = 0; r < n; r++) {
                ints q = broadcast(x[r].q + 4 * t);
                UNROLL
                for (int i = 0; i < SIDE; i++)
                    sum[r][i][half] = add_products(bits, sum[r][i][half], w[i], q);
            }
        }
    }
}

#if HAS_I8MM
/* The same for two rows or more, which are multiplied by pairs; a last odd one, by itself. */
FR_INLINE void sum_pairs(shape l, int n, code_source from, const uint8_t *block, int part, int b,
                         const fr_record *x, ints sum[TILE][SIDE][2]) {
    rest_codes rest = {0};
    pair_sums pairs[TILE / 2][2];
    memset(pairs, 0, sizeof pairs);
    UNROLL
    for (int t = 0; t < 8; t += 2) {
        int half = is_halved(l.bits, l.scales) ? t / 4 : 0;
        codes first = codes_of(l, from, block, part, b, t, &rest);
        codes last = codes_of(l, from, block, part, b, t + 1, &rest);
        UNROLL
        for (int r = 0; r < n; r += 2) {
            int other = r + 1 < n ? r + 1 : r;
            add_matrices(&pairs[r / 2][half], first, last, x[r].q + 4 * t, x[other].q + 4 * t);
        }
    }
    UNROLL
    for (int r = 0; r < n; r++) {
        sum[r][0][0] = sums_of(&pairs[r / 2][0], r % 2);
        sum[r][0][1] = sums_of(&pairs[r / 2][1], r % 2);
    }
}
#endif

/* SIDE parts of a group of `count` blocks times n rows; n is a constant, so that f stays in
   registers. x is the first row's record, with `stride` records from one block to the next.
   `fetches` says whether later groups are prefetched, which the first rows of a panel do for all.
 */
FR_INLINE void tile(shape l, int n, code_source from, const uint8_t *group, int count, int part,
                    const fr_record *x, int stride, int fetches, float (*sums)[FR_PANEL]) {
    const uint8_t *scales = group + 64 * (size_t)(l.bits * count);
    const uint8_t *group_scales = group + unit_bytes(l) * (size_t)count;
    reals f[TILE][SIDE];
    reals d[SIDE] = {};
    reals m[SIDE] = {};
    UNROLL
    for (int i = 0; i < SIDE; i++) {
        int first = LANES * (part + i); /* output */
        if (l.group_bytes) d[i] = float16_reals(group_scales + 2 * first);
        if (fr_is_wide(l.scales)) d[i] = d[i] * 0x1p-3f;
        if (l.scales == K) m[i] = -float16_reals(group_scales + 32 + 2 * first);
        if (l.scales == SM) m[i] = float16_reals(group_scales + 32 + 2 * first) * 0x1p-5f;
        UNROLL
        for (int r = 0; r < n; r++)
            f[r][i] = reals_at(sums[r] + first);
    }
    for (int b = 0; b < count; b++, x += stride) {
        const uint8_t *block = group + 64 * (size_t)(l.bits * b);
        const uint8_t *at = scales + l.scale_bytes * (size_t)b;
        size_t share = (unit_bytes(l) + l.group_bytes / 8) / (PARTS / SIDE);
        ints sum[TILE][SIDE][2];
        int bits = code_bits(l.bits, l.scales);
        if (fetches) prefetch(group + share * (size_t)(count * part / SIDE + b), share);
        int scale_size = l.scales == D || l.scales == DM || l.scales == NL ? 2 : 1;
        const uint8_t *own_scales = at + scale_size * LANES * part;
        /* With one part registers suffice to read them early, and a single row waits less. */
        block_scales s = {0};
        if (SIDE == 1) s = read_scales(l.scales, own_scales, d[0], m[0]);
#if HAS_I8MM
        if (n > 1) {
            sum_pairs(l, n, from, block, part, b, x, sum);
        } else {
            sum_block(l, n, from, block, part, b, x, sum);
        }
#else
        sum_block(l, n, from, block, part, b, x, sum);
#endif
        UNROLL
        for (int i = 0; i < SIDE; i++) {
            if (SIDE > 1)
                s = read_scales(l.scales, own_scales + scale_size * LANES * i, d[i], m[i]);
            UNROLL
            for (int r = 0; r < n; r++)
                f[r][i] = add_block(bits, l.scales, sum[r][i], &s, x + r, f[r][i]);
        }
    }
    UNROLL
    for (int i = 0; i < SIDE; i++) {
        UNROLL
        for (int r = 0; r < n; r++)
            memcpy(sums[r] + LANES * (part + i), &f[r][i], sizeof f[r][i]);
    }
}

/* All parts of a group times n rows. */
FR_INLINE void group_rows(shape l, int n, code_source from, const uint8_t *group, int count,
                          const fr_record *x, int stride, int fetches, float (*sums)[FR_PANEL]) {
    for (int part = 0; part < PARTS; part += SIDE)
        tile(l, n, from, group, count, part, x, stride, fetches, sums);
}

/* All of a panel times n rows. */
FR_INLINE void few_rows(shape l, int n, const uint8_t *panel, int blocks, const fr_record *x,
                        int stride, int fetches, float (*sums)[FR_PANEL]) {
    code_source unpack = {UNPACK, 0};
    for (; blocks > 0; blocks -= 8, x += 8 * (size_t)stride) {
        int count = blocks < 8 ? blocks : 8;
        group_rows(l, n, unpack, panel, count, x, stride, fetches, sums);
        panel += 8 * unit_bytes(l) + l.group_bytes;
    }
}

/* The records of all rows. */
typedef struct {
    const fr_record *all;
    int rows, blocks;
} records;

/* The records from one block of a row to the next. */
FR_INLINE int stride_of(const records *x, int row) {
    int left = x->rows - row / FR_ROW_GROUP * FR_ROW_GROUP;
    return left < FR_ROW_GROUP ? left : FR_ROW_GROUP;
}

/* The record of a row's block. */
FR_INLINE const fr_record *record_of(const records *x, int row, int block) {
    size_t before = (size_t)(row / FR_ROW_GROUP * FR_ROW_GROUP) * (size_t)x->blocks;
    return x->all + before + (size_t)(stride_of(x, row) * block + row % FR_ROW_GROUP);
}

/* Whether it is faster to keep unpacked codes than to unpack them for each tile. Measured on an
   AMD EPYC (Zen 5). */
FR_INLINE int pays_keeping(int bits) { return HAS_VNNI ? bits == 6 : bits < 8; }

/* All of a panel times n rows, more than TILE: a group is unpacked once for all of them, beside
   the products of the first ones. */
FR_INLINE void many_rows(shape l, const uint8_t *panel, const records *x, int row, int n,
                         float (*sums)[FR_PANEL]) {
    codes kept[PARTS][64];
    code_source keep = {KEEP, kept};
    code_source read = {READ, kept};
    for (int first = 0; first < x->blocks; first += 8) {
        int count = x->blocks - first < 8 ? x->blocks - first : 8;
        for (int r = 0; r < n; r += TILE) {
            const fr_record *at = record_of(x, row + r, first);
            int stride = stride_of(x, row + r);
            int rows = n - r < TILE ? n - r : TILE;
            switch (r ? rows : 0) {
            case 0: group_rows(l, TILE, keep, panel, count, at, stride, 1, sums); break;
            case 1: group_rows(l, 1, read, panel, count, at, stride, 0, sums + r); break;
#if TILE > 1
            case 2: group_rows(l, 2, read, panel, count, at, stride, 0, sums + r); break;
            case 3: group_rows(l, 3, read, panel, count, at, stride, 0, sums + r); break;
            case 4: group_rows(l, 4, read, panel, count, at, stride, 0, sums + r); break;
#endif
#if TILE > 4
            case 5: group_rows(l, 5, read, panel, count, at, stride, 0, sums + r); break;
            case 6: group_rows(l, 6, read, panel, count, at, stride, 0, sums + r); break;
            case 7: group_rows(l, 7, read, panel, count, at, stride, 0, sums + r); break;
            case 8: group_rows(l, 8, read, panel, count, at, stride, 0, sums + r); break;
#endif
            default: break;
            }
        }
        panel += 8 * unit_bytes(l) + l.group_bytes;
    }
}

/* A panel times n rows from `row` on. The number of rows is a constant in each case. */
FR_INLINE void few_bits(shape l, const uint8_t *panel, const records *x, int row, int n,
                        float (*sums)[FR_PANEL]) {
    if (n > TILE && pays_keeping(l.bits)) {
        many_rows(l, panel, x, row, n, sums);
        return;
    }
    for (int done = 0; done < n; done += TILE) {
        const fr_record *first = record_of(x, row + done, 0);
        int stride = stride_of(x, row + done);
        switch (n - done < TILE ? n - done : TILE) {
        case 1: few_rows(l, 1, panel, x->blocks, first, stride, done == 0, sums + done); break;
#if TILE > 1
        case 2: few_rows(l, 2, panel, x->blocks, first, stride, done == 0, sums + done); break;
        case 3: few_rows(l, 3, panel, x->blocks, first, stride, done == 0, sums + done); break;
        case 4: few_rows(l, 4, panel, x->blocks, first, stride, done == 0, sums + done); break;
#endif
#if TILE > 4
        case 5: few_rows(l, 5, panel, x->blocks, first, stride, done == 0, sums + done); break;
        case 6: few_rows(l, 6, panel, x->blocks, first, stride, done == 0, sums + done); break;
        case 7: few_rows(l, 7, panel, x->blocks, first, stride, done == 0, sums + done); break;
        case 8: few_rows(l, 8, panel, x->blocks, first, stride, done == 0, sums + done); break;
#endif
        default: break;
        }
    }
}

/* panel_FR_Q4_0 is few_bits for one format, for example. */
#define X(format, bits, scales, scale_bytes, group, block, inputs, layout)                         \
    static void panel_##format(const uint8_t *panel, const records *x, int row, int n,             \
                               float (*sums)[FR_PANEL]) {                                          \
        if ((scales) != FLOATS)                                                                    \
            few_bits((shape){bits, scales, scale_bytes, group}, panel, x, row, n, sums);           \
    }
FR_LAYOUTS(X)
#undef X
#define X(format, bits, scales, scale_bytes, group, block, inputs, layout) panel_##format,
static void (*const panels[])(const uint8_t *, const records *, int, int,
                              float (*)[FR_PANEL]) = {FR_LAYOUTS(X)};
#undef X

/* Floats have 8 partial sums for each output, which sum8 adds up. */
typedef struct {
    f8 of[FR_PANEL];
} partials;

FR_INLINE f8 float_weights(int layout, const uint8_t *p, int i) {
    if (layout == FR_F32) return load8((const float *)(const void *)p + 8 * i);
    return layout == FR_F16 ? float16s(p + 16 * i) : bfloat16s(p + 16 * i);
}

/* Adds the products of `count` times 8 inputs with output o; `count` is a constant, so that weights
   stay in registers. */
FR_INLINE void add_floats(int layout, int count, const uint8_t *p, const float *x, int stride,
                          int n, partials *f, int o) {
    f8 w[8];
    UNROLL
    for (int i = 0; i < count; i++)
        w[i] = float_weights(layout, p, i);
    for (int r = 0; r < n; r++, x += stride) {
        f8 sum = f[r].of[o];
        UNROLL
        for (int i = 0; i < count; i++)
            sum = fma8(load8(x + 8 * i), w[i], sum);
        f[r].of[o] = sum;
    }
}

#if HAS_AVX512
#define FLOAT_OUTPUTS 4 /* that are multiplied together */
FR_INLINE __m512 side_by_side(f8 a, f8 b) {
    return _mm512_insertf32x8(_mm512_castps256_ps512((__m256)a), (__m256)b, 1);
}

/* Adds the products of 64 inputs with the outputs o to o + 3, two in each register. */
FR_INLINE void add_wide_floats(int layout, int size, const uint8_t *p, const float *x, int stride,
                               int n, partials *f, int o) {
    __m512 w[2][8];
    UNROLL
    for (int i = 0; i < 8; i++) {
        for (int j = 0; j < 2; j++) {
            const uint8_t *at = p + 128 * size * j;
            w[j][i] = side_by_side(float_weights(layout, at, i),
                                   float_weights(layout, at + 64 * size, i));
        }
    }
    for (int r = 0; r < n; r++, x += stride) {
        float *to = (float *)&f[r].of[o];
        __m512 one = _mm512_load_ps(to);
        __m512 two = _mm512_load_ps(to + 16);
        UNROLL
        for (int i = 0; i < 8; i++) {
            __m512 at = _mm512_broadcast_f32x8((__m256)load8(x + 8 * i));
            one = _mm512_fmadd_ps(at, w[0][i], one);
            two = _mm512_fmadd_ps(at, w[1][i], two);
        }
        _mm512_store_ps(to, one);
        _mm512_store_ps(to + 16, two);
    }
}
#else
#define FLOAT_OUTPUTS 1
#endif

/* Adds the products of a panel, whose floats have `size` bytes, with n rows. */
FR_INLINE void add_panel(int layout, int size, const uint8_t *p, int inputs, const float *x,
                         int stride, int n, partials *f) {
    int left = inputs % 64 / 8;
    for (int first = 0; first + 64 <= inputs; first += 64, x += 64) {
        for (int o = 0; o < FR_PANEL; o += FLOAT_OUTPUTS, p += 64 * size * FLOAT_OUTPUTS) {
            prefetch(p, 64 * (size_t)size * FLOAT_OUTPUTS);
#if HAS_AVX512
            add_wide_floats(layout, size, p, x, stride, n, f, o);
#else
            add_floats(layout, 8, p, x, stride, n, f, o);
#endif
        }
    }
    for (int o = 0; o < FR_PANEL; o++) {
        for (int i = 0; i < left; i++, p += 8 * size)
            add_floats(layout, 1, p, x + 8 * i, stride, n, f, o);
    }
}

FR_INLINE void floats(int layout, const uint8_t *panel, int inputs, const float *x, int stride,
                      int n, float (*sums)[FR_PANEL]) {
    _Alignas(64) partials f[PANEL_ROWS];
    memset(f, 0, sizeof *f * (size_t)n);
    if (layout == FR_F32) {
        add_panel(FR_F32, 4, panel, inputs, x, stride, n, f);
    } else if (layout == FR_F16) {
        add_panel(FR_F16, 2, panel, inputs, x, stride, n, f);
    } else {
        add_panel(FR_BF16, 2, panel, inputs, x, stride, n, f);
    }
    for (int r = 0; r < n; r++) {
        for (int o = 0; o < FR_PANEL; o += 8)
            store8(sums[r] + o, sums8(f[r].of + o));
    }
}

/* How a matrix is read. */
typedef struct {
    int is_float;
    size_t panel_bytes;
    int near_rows; /* whose inputs stay in the L2 cache while panels pass; multiple of PANEL_ROWS */
} product_plan;

static product_plan plan_product(const fr_matrix *m) {
    const fr_layout *l = &fr_layouts[m->layout];
    int is_float = l->scales == FLOATS;
    int blocks = m->inputs / 32;
    size_t units = (size_t)(is_float ? m->inputs : blocks);
    size_t group_bytes = (size_t)l->group_bytes * (size_t)(blocks / 8); /* 0 for most layouts */
    size_t row_bytes = is_float ? 4 * (size_t)m->inputs : fr_record_bytes(m->inputs, 1);
    int near_rows = (int)(NEAR_BYTES / row_bytes) / PANEL_ROWS * PANEL_ROWS;
    return (product_plan){
        .is_float = is_float,
        .panel_bytes = (size_t)l->unit_bytes * units + group_bytes,
        .near_rows = near_rows < PANEL_ROWS ? PANEL_ROWS : near_rows,
    };
}

static void FR_NAME(product)(const fr_matrix *m, const float *x, int stride, const void *from,
                             int rows, float *out, int out_stride, int first_panel, int end_panel) {
    _Alignas(64) float sums[PANEL_ROWS][FR_PANEL];
    product_plan plan = plan_product(m);
    records quantised = {from, rows, m->inputs / 32};
    for (int first = 0; first < rows; first += plan.near_rows) {
        for (int p = first_panel; p < end_panel; p++) {
            const uint8_t *panel = m->panels + plan.panel_bytes * (size_t)p;
            int left = m->outputs - FR_PANEL * p;
            size_t count = (size_t)(left < FR_PANEL ? left : FR_PANEL);
            for (int r = first; r < rows && r < first + plan.near_rows; r += PANEL_ROWS) {
                int n = rows - r < PANEL_ROWS ? rows - r : PANEL_ROWS;
                memset(sums, 0, sizeof *sums * (size_t)n);
                if (plan.is_float) {
                    const float *at = x + (size_t)stride * (size_t)r;
                    floats(m->layout, panel, m->inputs, at, stride, n, sums);
                } else {
                    panels[m->layout](panel, &quantised, r, n, sums);
                }
                for (int i = 0; i < n; i++) {
                    float *to = out + (size_t)out_stride * (size_t)(r + i) + FR_PANEL * (size_t)p;
                    memcpy(to, sums[i], sizeof(float) * count);
                }
            }
        }
    }
}

FR_INLINE i8 max_ints8(i8 a, i8 b) {
#if defined(__AVX2__)
    return (i8)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    i8 is_more = a > b;
    return (a & is_more) | (b & ~is_more);
#endif
}

/* Fills in what follows from q. The sums of q are by halves and by (input / 2) % 2. */
FR_INLINE void add_sums(const int16_t sums[4], fr_record *to) {
    int first = sums[0] + sums[1];
    int last = sums[2] + sums[3];
    to->sum = to->scale * (float)(first + last);
    to->whole = -128 * (first + last);
    to->half[0] = -32 * first;
    to->half[1] = -32 * last;
    for (int i = 0; i < 4; i++)
        to->half_pairs[i / 2][i % 2] = (int16_t)(-32 * sums[i]);
    for (int i = 0; i < 2; i++)
        to->pairs[i] = (int16_t)(-8 * (sums[i] + sums[i + 2]));
}

/* The largest absolute value of 32 floats, as bits, in each lane. Floats without their sign have
   the order of their bits, and NaN is the largest. */
FR_INLINE i8 largest_bits(const f8 v[4]) {
    i8 largest = {0};
    UNROLL
    for (int i = 0; i < 4; i++)
        largest = max_ints8(largest, (i8)v[i] & 0x7fffffff);
    largest = max_ints8(largest, __builtin_shufflevector(largest, largest, 4, 5, 6, 7, 0, 1, 2, 3));
    largest = max_ints8(largest, __builtin_shufflevector(largest, largest, 2, 3, 0, 1, 6, 7, 4, 5));
    return max_ints8(largest, __builtin_shufflevector(largest, largest, 1, 0, 3, 2, 5, 4, 7, 6));
}

/* Stores q as bytes, and sums them by halves and by (input / 2) % 2. */
FR_INLINE void store_bytes(const i8 q[4], int8_t bytes[32], int16_t sums[4]) {
#if defined(__AVX2__)
    __m256i low = _mm256_packs_epi32((__m256i)q[0], (__m256i)q[1]);
    __m256i high = _mm256_packs_epi32((__m256i)q[2], (__m256i)q[3]);
    __m256i all = _mm256_packs_epi16(low, high);
    all = _mm256_permutevar8x32_epi32(all, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    memcpy(bytes, &all, 32);
    all = _mm256_maddubs_epi16(_mm256_set1_epi8(1), all);
    all = _mm256_add_epi16(all, _mm256_shuffle_epi32(all, 0x4e));
    all = _mm256_add_epi16(all, _mm256_shuffle_epi32(all, 0xb1));
    int32_t halves[2] = {_mm256_extract_epi32(all, 0), _mm256_extract_epi32(all, 4)};
    memcpy(sums, halves, 8);
#else
    memset(sums, 0, 4 * sizeof *sums);
    for (int i = 0; i < 32; i++) {
        bytes[i] = (int8_t)q[i / 8][i % 8];
        int16_t *sum = &sums[i / 16 * 2 + i % 4 / 2];
        *sum = (int16_t)(*sum + bytes[i]);
    }
#endif
}

/* Quantises 32 inputs. If one is not finite, the scale is NaN. If all are so small that
   127 / largest would not be finite, they become zeros. */
FR_INLINE void quantise32(const float *x, fr_record *to) {
    f8 v[4];
    i8 q[4];
    int16_t sums[4];
    UNROLL
    for (int i = 0; i < 4; i++)
        v[i] = load8(x + 8 * i);
    i8 bits = largest_bits(v);
    float largest = ((f8)bits)[0];
    float inverse = 0;
    float scale = 0;
    if (bits[0] >= 0x7f800000) {
        scale = __builtin_nanf("");
    } else if (largest > 0x1p-120f) {
        scale = largest / 127.0f;
        inverse = 127.0f / largest;
    }
    UNROLL
    for (int i = 0; i < 4; i++) {
        /* Adding 1.5 x 2^23 rounds to even, and leaves the integer in the lowest bits. */
        q[i] = (i8)(v[i] * inverse + 12582912.0f) - 0x4b400000;
    }
    if (inverse == 0) memset(q, 0, sizeof q);
    store_bytes(q, to->q, sums);
    to->scale = scale;
    add_sums(sums, to);
}

static void FR_NAME(quantise)(const float *x, int rows, int stride, int inputs, void *to,
                              int first_superblock, int end_superblock) {
    records all = {to, rows, inputs / 32};
    int first = 8 * first_superblock;
    int end = 8 * end_superblock < all.blocks ? 8 * end_superblock : all.blocks;
    for (int r = 0; r < rows; r++) {
        for (int b = first; b < end; b++) {
            quantise32(x + (size_t)stride * (size_t)r + 32 * (size_t)b,
                       (fr_record *)record_of(&all, r, b));
        }
    }
}

#define QUOTE(name) #name
#define QUOTE_VALUE(name) QUOTE(name)
const fr_operations FR_NAME(fr_operations) = {QUOTE_VALUE(FR_VARIANT), FR_NAME(quantise),
                                              FR_NAME(product)};
