/* Products with weights in 4 and 8 bits, and all decoder layers of a forward in one call. Inputs of a product are rounded
   to 8 bits, 32 at a time with one scale, as llama.cpp does; for weights in 8 bits what is left over is another 8 bits.
   Products of integers are exact, and what is done with their sums is written out, so that a row has the same bits whatever
   rows stand beside it. */

#include "between.c"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(_OPENMP)
extern int omp_get_thread_num(void); /* torch's own, with its threads */

#define BLOCK 32
#define ROWS 8 /* that are worked on at once */
#define FINE 254 /* steps of the second 8 bits in one of the first */
#define AHEAD 3072 /* bytes that weights are asked for before they are used */

/* A weight [out, in]. data: of each 16 outputs, of each 32 inputs, the numbers, then 16 scales and 16 least values of
   IEEE's 16 bits, or 16 scales and 16 middles in bfloat16. Numbers stand as [8 times four inputs][16 outputs][4], those
   of 4 bits two to a byte, the second four times behind the first. */
typedef struct {
    const uint8_t *data;
    int64_t out, in, bits, ieee;
} tiles;

/* n inputs: numbers [n, in] and what they leave over in 1/254 of them, scales [n, in / 32], and sums of numbers times
   scales, without and with what was left over. */
typedef struct {
    int8_t *x, *rest;
    float *scales, *sums, *finer;
} inputs;

static inline __m512i four(const int8_t *x) {
    int32_t found;
    memcpy(&found, x, 4);
    return _mm512_set1_epi32(found);
}

/* A processor's own guesses end with each page, and do not reach far enough where other machines share its memory. */
static inline __attribute__((always_inline)) void ask_for(const uint8_t *data, int lines) {
    for (int k = 0; k < lines; k++) _mm_prefetch((const char *)data + AHEAD + 64 * k, _MM_HINT_T0);
}

static inline __m512 half_lanes(const uint8_t *from, int ieee) {
    __m256i bits = _mm256_loadu_si256((const __m256i *)from);
    return ieee ? _mm512_cvtph_ps(bits) : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

static inline void to_8_bits(const half *x, int8_t *to, int8_t *rest, float *scale, float *sum, float *finer) {
    const __m512 fine = _mm512_set1_ps(FINE);
    __m512 low = (__m512)wide(x), high = (__m512)wide(x + LANES);
    float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
    __m512 turn = _mm512_set1_ps(most > 1e-30f ? 127 / most : 0);
    low = _mm512_mul_ps(low, turn);
    high = _mm512_mul_ps(high, turn);
    __m512i first = _mm512_cvtps_epi32(low), second = _mm512_cvtps_epi32(high);
    __m512i left = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_sub_ps(low, _mm512_cvtepi32_ps(first)), fine));
    __m512i right = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_sub_ps(high, _mm512_cvtepi32_ps(second)), fine));
    _mm_storeu_si128((__m128i *)to, _mm512_cvtsepi32_epi8(first));
    _mm_storeu_si128((__m128i *)(to + LANES), _mm512_cvtsepi32_epi8(second));
    _mm_storeu_si128((__m128i *)rest, _mm512_cvtsepi32_epi8(left));
    _mm_storeu_si128((__m128i *)(rest + LANES), _mm512_cvtsepi32_epi8(right));
    float whole = _mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
    int is_none = _mm512_cmp_ps_mask(low, low, _CMP_UNORD_Q) | _mm512_cmp_ps_mask(high, high, _CMP_UNORD_Q);
    *scale = is_none ? NAN : most / 127;
    *sum = *scale * whole;
    *finer = *scale / FINE * (FINE * whole + _mm512_reduce_add_epi32(_mm512_add_epi32(left, right)));
}

static void row_to_8_bits(const half *x, int row, int size, int first, int last, inputs to) {
    for (int i = first; i < last; i += BLOCK) {
        size_t at = (size_t)row * size + i;
        size_t block = at / BLOCK;
        to_8_bits(x + at, to.x + at, to.rest + at, to.scales + block, to.sums + block, to.finer + block);
    }
}

/* 16 outputs of `rows` rows from row `first` on, as bfloat16. */
static inline __attribute__((always_inline)) void panel(const tiles *w, int which, inputs of, int first, int rows,
                                                        int bits, half *out) {
    int blocks = w->in / BLOCK, size = 64 * bits + 64;
    const uint8_t *tile = w->data + (size_t)which * blocks * size;
    __m512 y[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) y[r] = _mm512_setzero_ps();
    for (int b = 0; b < blocks; b++, tile += size) {
        __m512i part[8];
        const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++) {
            if (bits == 8) part[k] = _mm512_loadu_si512(tile + 64 * k);
            else if (k < 4) part[k] = _mm512_and_si512(_mm512_loadu_si512(tile + 64 * k), low);
            else part[k] = _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(tile + 64 * (k - 4)), 4), low);
        }
        ask_for(tile, bits + 1);
        __m512 scale = half_lanes(tile + 64 * bits, w->ieee), least = half_lanes(tile + 64 * bits + 32, w->ieee);
        if (!w->ieee) least = _mm512_fnmadd_ps(scale, _mm512_set1_ps(1 << (bits - 1)), least);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            size_t start = (size_t)(first + r) * w->in + b * BLOCK, at = (size_t)(first + r) * blocks + b;
            const int8_t *x = of.x + start, *rest = of.rest + start;
            __m512i one = _mm512_setzero_si512(), two = _mm512_setzero_si512();
            __m512 sum;
            if (bits == 4) {
#pragma GCC unroll 4
                for (int k = 0; k < 8; k += 2) {
                    one = _mm512_dpbusd_epi32(one, part[k], four(x + 4 * k));
                    two = _mm512_dpbusd_epi32(two, part[k + 1], four(x + 4 * k + 4));
                }
                sum = _mm512_cvtepi32_ps(_mm512_add_epi32(one, two));
            } else {
#pragma GCC unroll 8
                for (int k = 0; k < 8; k++) {
                    one = _mm512_dpbusd_epi32(one, part[k], four(x + 4 * k));
                    two = _mm512_dpbusd_epi32(two, part[k], four(rest + 4 * k));
                }
                sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(two), _mm512_set1_ps(1.0f / FINE), _mm512_cvtepi32_ps(one));
            }
            y[r] = _mm512_fmadd_ps(_mm512_mul_ps(scale, _mm512_set1_ps(of.scales[at])), sum, y[r]);
            y[r] = _mm512_fmadd_ps(least, _mm512_set1_ps(bits == 4 ? of.sums[at] : of.finer[at]), y[r]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) narrow(out + (size_t)(first + r) * w->out + which * LANES, (lanes)y[r]);
}

#define OF_ROWS(count)                                                                                              \
    case count:                                                                                                     \
        if (w->bits == 4) panel(w, which, of, first, count, 4, out);                                                \
        else panel(w, which, of, first, count, 8, out);                                                             \
        break;

/* 16 outputs of all n rows. */
static __attribute__((noinline)) void outputs(const tiles *w, int which, inputs of, int n, half *out) {
    for (int first = 0; first < n; first += ROWS) switch (n - first < ROWS ? n - first : ROWS) {
            OF_ROWS(1) OF_ROWS(2) OF_ROWS(3) OF_ROWS(4) OF_ROWS(5) OF_ROWS(6) OF_ROWS(7) OF_ROWS(8)
        }
}

static int tiles_fit(const tiles *w) {
    return w->out > 0 && w->out % LANES == 0 && w->in > 0 && w->in % BLOCK == 0 && (w->bits == 4 || w->bits == 8);
}

/* The product of x [n, in] with a weight: out [n, out]. room: what inputs need for n. */
int multiply(const tiles *w, const half *x, int n, inputs *room, half *out, int threads) {
    if (n < 0 || threads < 1 || !tiles_fit(w)) return REFUSED;
    inputs of = *room;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int row = 0; row < n; row++) row_to_8_bits(x, row, w->in, 0, w->in, of);
#pragma omp for schedule(static)
        for (int which = 0; which < w->out / LANES; which++) outputs(w, which, of, n, out);
    }
    return 0;
}

/* A decoder layer. second: the gain of its second norm; next: that of the norm behind it; bias and gains as `attend` has
   them. cache [rows, 2 G, capacity, D]. */
typedef struct {
    tiles qkv, out, up, down;
    const float *second, *next, *bias, *gains;
    half *cache;
    int64_t rows, capacity, rotates, window;
} layer;

/* What all layers share, and n tokens as `attend` has them. x [n, d] the residual stream; whole and, where it is given,
   below [n, d] take it behind the last norm and before the last layer. Of n rows each: h [n, d], parts
   [n, (H + 2 G) D], attended [n, H D], both [n, 2 I], inside [n, I], and `room` for the widest input. scratch: `space`
   numbers for each thread, as `attend` has them.

   Where `fuse` has data, x is its product with `entry` [n, in]. Then come `steps` - 1 further runs of all layers, one
   place further each, on what the last norm gave, or on its product with `between` where that has data. Each has its own
   cos, sin, slot, place and whole, one behind the other.

   What fills a batch in itself finds room for `most` tokens, and for so many slots and numbers of paths. */
typedef struct {
    int64_t layers, n, d, inner, heads, groups, size, path, width, space, threads, steps, most, slots, routes;
    const float *first, *cos, *sin;
    const int32_t *row, *length, *slot, *place, *paths;
    float *x, *whole, *below, *scratch;
    half *h, *parts, *attended, *both, *inside;
    const half *entry;
    tiles fuse, between;
    inputs room;
    float floor, floor_each;
} batch;

static void norm_row(const batch *b, int row, const half *added, const float *gain, float *whole) {
    size_t at = (size_t)row * b->d;
    add_and_norm(b->x + at, added ? added + at : 0, gain, b->floor, 1, b->d, b->h + at, whole ? whole + at : 0);
    row_to_8_bits(b->h, row, b->d, 0, b->d, b->room);
}

#define GATED 128 /* columns that a thread takes at once */

static void gate_part(const batch *b, int row, int part) {
    int first = part * GATED, last = first + GATED < b->inner ? first + GATED : b->inner;
    gate_row(b->both + (size_t)row * 2 * b->inner, b->inner, first, last, b->inside + (size_t)row * b->inner);
    row_to_8_bits(b->inside, row, b->inner, first, last, b->room);
}

/* One layer, by all threads together. */
static void run_layer(const layer *at, const batch *b, int is_last, float *scratch) {
    const float *cos = at->rotates ? b->cos : 0, *sin = at->rotates ? b->sin : 0;
    int n = b->n, chunks = (b->inner + GATED - 1) / GATED, wide_out = b->heads * b->size;
    if (b->below && is_last) {
#pragma omp for schedule(static)
        for (int row = 0; row < n; row++) memcpy(b->below + row * b->d, b->x + row * b->d, b->d * sizeof(float));
    }
#pragma omp for schedule(static)
    for (int which = 0; which < at->qkv.out / LANES; which++) outputs(&at->qkv, which, b->room, n, b->parts);
#pragma omp for schedule(static)
    for (int i = 0; i < n; i++)
        keep_keys(b->parts, at->bias, at->gains, b->floor_each, cos, sin, at->cache, at->capacity, b->row[i],
                  b->slot[i], i, b->heads, b->groups, b->size, scratch);
#pragma omp for schedule(static) collapse(2)
    for (int i = 0; i < n; i++)
        for (int g = 0; g < b->groups; g++)
            attend_group(b->parts, at->bias, at->gains, b->floor_each, cos, sin, at->cache, at->capacity, b->row[i],
                         b->length[i], b->place[i], b->paths + (size_t)i * b->path, i, g, b->heads, b->groups, b->size,
                         at->window, b->width, scratch, b->attended);
#pragma omp for schedule(static)
    for (int row = 0; row < n; row++) row_to_8_bits(b->attended, row, wide_out, 0, wide_out, b->room);
#pragma omp for schedule(static)
    for (int which = 0; which < at->out.out / LANES; which++) outputs(&at->out, which, b->room, n, b->h);
#pragma omp for schedule(static)
    for (int row = 0; row < n; row++) norm_row(b, row, b->h, at->second, 0);
#pragma omp for schedule(static)
    for (int which = 0; which < at->up.out / LANES; which++) outputs(&at->up, which, b->room, n, b->both);
#pragma omp for schedule(static) collapse(2)
    for (int row = 0; row < n; row++)
        for (int part = 0; part < chunks; part++) gate_part(b, row, part);
#pragma omp for schedule(static)
    for (int which = 0; which < at->down.out / LANES; which++) outputs(&at->down, which, b->room, n, b->h);
#pragma omp for schedule(static)
    for (int row = 0; row < n; row++) norm_row(b, row, b->h, at->next, is_last ? b->whole : 0);
}

/* Makes x of a step's input, by all threads together: `found` [n, d] is what the step before gave, 0 at the first. */
static void enter(const batch *b, const float *found) {
    const tiles *w = found ? &b->between : &b->fuse;
    int n = b->n, d = b->d;
    if (w->data && !found) { /* later inputs are in `room` since the last norm */
#pragma omp for schedule(static)
        for (int row = 0; row < n; row++) row_to_8_bits(b->entry, row, w->in, 0, w->in, b->room);
    }
    if (w->data) {
#pragma omp for schedule(static)
        for (int which = 0; which < w->out / LANES; which++) outputs(w, which, b->room, n, b->h);
    }
#pragma omp for schedule(static)
    for (int row = 0; row < n; row++) {
        size_t at = (size_t)row * d;
        for (int i = 0; w->data && i < d; i += LANES) put(b->x + at + i, wide(b->h + at + i));
        if (found && !w->data) memcpy(b->x + at, found + at, d * sizeof(float));
        norm_row(b, row, 0, b->first, 0);
    }
}

static void run_all(const layer *all, const batch *given) {
#pragma omp parallel num_threads(given->threads)
    {
        batch b = *given;
        float *found = 0, *scratch = b.scratch + (size_t)omp_get_thread_num() * b.space;
        for (int step = 0; step < b.steps; step++) {
            enter(&b, found);
            for (int l = 0; l < b.layers; l++) run_layer(all + l, &b, l + 1 == b.layers, scratch);
            found = b.whole;
            b.whole += b.n * b.d;
            b.cos += b.n * b.size;
            b.sin += b.n * b.size;
            b.slot += b.n;
            b.place += b.n;
        }
    }
}

/* Whether a batch and its layers are of sizes that go together; rows and capacity of the smallest cache. */
static int batch_fits(const layer *all, const batch *b, int64_t *rows, int64_t *capacity) {
    int64_t attended = b->heads * b->size, parts = attended + 2 * b->groups * b->size;
    const tiles *fuse = &b->fuse, *between = &b->between;
    if (b->layers < 1 || b->n < 0 || b->steps < 1 || b->threads < 1) return 0;
    if (!heads_fit(b->heads, b->groups, b->size, b->width, b->space)) return 0;
    if (fuse->data && (!tiles_fit(fuse) || fuse->out != b->d)) return 0;
    if (between->data && (!tiles_fit(between) || between->out != b->d || between->in != b->d)) return 0;
    *rows = all->rows;
    *capacity = all->capacity;
    for (const layer *at = all; at < all + b->layers; at++) {
        if (!tiles_fit(&at->qkv) || !tiles_fit(&at->out) || !tiles_fit(&at->up) || !tiles_fit(&at->down)) return 0;
        if (at->qkv.in != b->d || at->qkv.out != parts || at->out.in != attended || at->out.out != b->d) return 0;
        if (at->up.in != b->d || at->up.out != 2 * b->inner || at->down.in != b->inner || at->down.out != b->d) return 0;
        *rows = at->rows < *rows ? at->rows : *rows;
        *capacity = at->capacity < *capacity ? at->capacity : *capacity;
    }
    return 1;
}

int run_layers(const layer *all, const batch *b) {
    int64_t rows, capacity;
    if (!batch_fits(all, b, &rows, &capacity)) return REFUSED;
    if (!tokens_fit(b->row, b->length, b->slot, b->place, b->paths, b->path, b->n, b->steps, rows, capacity, b->width))
        return REFUSED;
    run_all(all, b);
    return 0;
}

/* Whether tokens [n] are among the first `size`. */
static int tokens_are(const int64_t *tokens, int64_t n, int64_t size) {
    for (int64_t i = 0; i < n; i++)
        if (tokens[i] < 0 || tokens[i] >= size) return 0;
    return 1;
}

/* Which of n numbers x, or of their sums with y, is the largest, the first of equal ones. n is a multiple of 16. */
static int largest_sum(const float *x, const half *y, int n) {
    __m512 best = _mm512_set1_ps(-INFINITY);
    __m512i where = _mm512_setzero_si512();
    for (int i = 0; i < n; i += LANES) {
        __m512 here = _mm512_loadu_ps(x + i);
        if (y) here = _mm512_add_ps(here, (__m512)wide(y + i));
        __mmask16 above = _mm512_cmp_ps_mask(here, best, _CMP_GT_OQ);
        best = _mm512_mask_mov_ps(best, above, here);
        where = _mm512_mask_mov_epi32(where, above, _mm512_set1_epi32(i));
    }
    __mmask16 equal = _mm512_cmp_ps_mask(best, _mm512_set1_ps(_mm512_reduce_max_ps(best)), _CMP_EQ_OQ);
    __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    int found = _mm512_mask_reduce_min_epi32(equal, _mm512_add_epi32(where, lane));
    return found < n ? found : 0; /* numbers that are none */
}

/* An LM head [V, d]. data: of each 16 outputs, of each four inputs, [16][4] numbers of 8 bits, 128 more than they are;
   scales [V]. Its own values: codes [V, d] with steps and least values [V, d / 32], or a table [V, d]. */
typedef struct {
    const uint8_t *data, *codes;
    const float *scales, *steps, *least;
    const half *table;
    int64_t out, in;
} head;

#define BEST 16

/* n states in two halves [n, d], the high ones first of all; sums of each [n], and the size of a step [n]. */
typedef struct {
    int8_t *high, *low;
    int32_t *highs, *lows;
    float *steps;
} states;

static void halve(const float *x, int row, int d, states to) {
    __m512 most = _mm512_setzero_ps();
    const float *own = x + (size_t)row * d;
    for (int i = 0; i < d; i += LANES) most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_loadu_ps(own + i)));
    float step = _mm512_reduce_max_ps(most) / 127;
    __m512 turn = _mm512_set1_ps(step > 1e-30f ? 1 / step : 0);
    __m512i highs = _mm512_setzero_si512(), lows = highs;
    int is_none = 0;
    for (int i = 0; i < d; i += LANES) {
        __m512 steps = _mm512_mul_ps(_mm512_loadu_ps(own + i), turn);
        is_none |= _mm512_cmp_ps_mask(steps, steps, _CMP_UNORD_Q);
        __m512i high = _mm512_cvtps_epi32(steps);
        __m512i low = _mm512_cvtps_epi32(
            _mm512_mul_ps(_mm512_sub_ps(steps, _mm512_cvtepi32_ps(high)), _mm512_set1_ps(FINE)));
        _mm_storeu_si128((__m128i *)(to.high + (size_t)row * d + i), _mm512_cvtsepi32_epi8(high));
        _mm_storeu_si128((__m128i *)(to.low + (size_t)row * d + i), _mm512_cvtsepi32_epi8(low));
        highs = _mm512_add_epi32(highs, high);
        lows = _mm512_add_epi32(lows, low);
    }
    to.highs[row] = _mm512_reduce_add_epi32(highs);
    to.lows[row] = _mm512_reduce_add_epi32(lows);
    to.steps[row] = is_none ? NAN : step / FINE;
}

static inline __attribute__((always_inline)) void head_panel(const head *w, int which, states of, int first, int rows,
                                                             float *y) {
    const uint8_t *data = w->data + (size_t)which * LANES * w->in;
    __m512i high[ROWS], low[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) high[r] = low[r] = _mm512_setzero_si512();
    for (int i = 0; i < w->in; i += 4, data += 64) {
        __m512i part = _mm512_loadu_si512(data);
        ask_for(data, 1);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            size_t at = (size_t)(first + r) * w->in + i;
            high[r] = _mm512_dpbusd_epi32(high[r], part, four(of.high + at));
            low[r] = _mm512_dpbusd_epi32(low[r], part, four(of.low + at));
        }
    }
    int left = w->out - which * LANES;
    __mmask16 there = left < LANES ? (1 << left) - 1 : 0xffff;
    __m512 scales = _mm512_maskz_loadu_ps(there, w->scales + which * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        int row = first + r;
        __m512 coarse = _mm512_cvtepi32_ps(_mm512_sub_epi32(high[r], _mm512_set1_epi32(128 * of.highs[row])));
        __m512 fine = _mm512_cvtepi32_ps(_mm512_sub_epi32(low[r], _mm512_set1_epi32(128 * of.lows[row])));
        __m512 sum = _mm512_fmadd_ps(coarse, _mm512_set1_ps(FINE), fine);
        sum = _mm512_mul_ps(_mm512_mul_ps(sum, scales), _mm512_set1_ps(of.steps[row]));
        _mm512_mask_storeu_ps(y + (size_t)row * w->out + which * LANES, there, sum);
    }
}

/* Own values from a place on. */
static inline lanes own_values(const head *w, size_t at) {
    if (w->table) return wide(w->table + at);
    __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(w->codes + at)));
    return (lanes)_mm512_cvtepi32_ps(code) * w->steps[at / BLOCK] + w->least[at / BLOCK];
}

/* A state's product with one output's own values. */
static float own_product(const head *w, const float *x, int64_t which) {
    lanes sum = {0};
    for (int i = 0; i < w->in; i += LANES) sum += load(x + i) * own_values(w, (size_t)which * w->in + i);
    return total(sum);
}

/* The largest logits of a row again, from the weight's own values. */
static void own_best(const head *w, const float *x, float *y) {
    float best[BEST];
    int32_t where[BEST];
    int count = 0, least = 0;
    __m512 bar = _mm512_set1_ps(-INFINITY);
    for (int i = 0; i < w->out; i += LANES) {
        int left = w->out - i;
        __mmask16 there = left < LANES ? (1 << left) - 1 : 0xffff;
        __mmask16 above = _mm512_mask_cmp_ps_mask(there, _mm512_maskz_loadu_ps(there, y + i), bar, _CMP_GT_OQ);
        for (; above; above &= above - 1) {
            int at = i + __builtin_ctz(above);
            if (count == BEST && !(y[at] > best[least])) continue;
            int to = count < BEST ? count++ : least;
            best[to] = y[at];
            where[to] = at;
            if (count < BEST) continue;
            least = 0;
            for (int k = 1; k < BEST; k++) least = best[k] < best[least] ? k : least;
            bar = _mm512_set1_ps(best[least]);
        }
    }
    for (int k = 0; k < count; k++) y[where[k]] = own_product(w, x, where[k]);
}

#define HEAD_OF(count)                                                                                              \
    case count: head_panel(w, which, of, first, count, y); break;

/* Whether a head, which may be embeddings, is for states [n, d]. */
static int head_fits(const head *w, int64_t d) {
    return w->out > 0 && w->in > 0 && w->in == d && d % (w->codes ? BLOCK : LANES) == 0;
}

/* Logits y [n, V] of states x [n, d]. */
int score(const head *w, const float *x, int n, const states *room, float *y, int threads) {
    if (n < 0 || threads < 1 || !head_fits(w, w->in)) return REFUSED;
    states of = *room;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int row = 0; row < n; row++) halve(x, row, w->in, of);
#pragma omp for schedule(static)
        for (int which = 0; which < (w->out + LANES - 1) / LANES; which++)
            for (int first = 0; first < n; first += ROWS) switch (n - first < ROWS ? n - first : ROWS) {
                    HEAD_OF(1) HEAD_OF(2) HEAD_OF(3) HEAD_OF(4) HEAD_OF(5) HEAD_OF(6) HEAD_OF(7) HEAD_OF(8)
                }
#pragma omp for schedule(static)
        for (int row = 0; row < n; row++) own_best(w, x + (size_t)row * w->in, y + (size_t)row * w->out);
    }
    return 0;
}

/* A small model's own continuation of one row. table [V, d]: embeddings; rest [V, d]: the LM head's, of which the M tokens
   `met` are asked beside those that the head has, `names` (0: it has all). cos, sin [.., D]: of all positions. Behind
   `length` committed positions come the `count` tokens `pending`, then what is drafted: up to `most` tokens, ending with
   one whose chance is below `least`, or with which the product of all chances is below `product`, or which is one of the
   `ends`. logits [S + M, filled up to 16s]; drafted, chances
   [longest]; cos, sin [positions, D]. Places are slots.

   Tokens are the argmax, or where there are `laws` [most, as logits] sampled from these distributions, which are made
   here: of logits times `turn`, of the most probable tokens that have `top_p` of all. They are sampled by `numbers` in
   [0, 1), or else by the races of `keys` (`forerun.sampling.seeded`), in which tokens have numbers below V, `size`; `places` [V]:
   where a token stands in the head, -1 for none. */
typedef struct {
    const half *table, *rest;
    const int64_t *names, *met, *pending, *ends;
    const float *cos, *sin;
    float *logits, *chances;
    int64_t *drafted;
    const int32_t *places;
    const double *numbers;
    const uint64_t *keys;
    float *laws;
    states halves;
    int64_t at, length, count, most, known, ended, size, among, longest, positions;
    float least, product, turn, top_p;
} chain;

static int64_t name_of(const head *w, const chain *c, int place) {
    return place >= w->out ? c->met[place - w->out] : c->names ? c->names[place] : place;
}

static int place_of(const head *w, const chain *c, int64_t token) {
    int place = c->places ? c->places[token] : token;
    for (int i = 0; place < 0 && i < c->known; i++) place = c->met[i] == token ? w->out + i : -1;
    return place;
}

static double sum_of(const float *x, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += x[i];
    return sum;
}

static int descending(const void *x, const void *y) {
    float a = *(const float *)x, b = *(const float *)y;
    return (a < b) - (a > b);
}

/* A distribution [padded] from `size` logits, of which nothing is kept. Returns 0 where they are no numbers. */
static int make_law(const chain *c, float *logits, int size, int padded, float *law) {
    float most = logits[largest_sum(logits, 0, padded)];
    for (int i = 0; i < padded; i += LANES) put(law + i, power((load(logits + i) - most) * c->turn));
    memset(law + size, 0, (padded - size) * sizeof(float));
    double whole = sum_of(law, size);
    if (!(whole > 0 && whole < INFINITY)) return 0;
    if (c->top_p < 1) {
        float *best = logits, floor = (1 - c->top_p) * whole / size; /* tokens below it are less than what is left out */
        int count = 0, kept = 0;
        for (int i = 0; i < size; i++)
            if (law[i] >= floor) best[count++] = law[i];
        qsort(best, count, sizeof(float), descending);
        double before = 0, enough = c->top_p * whole;
        do before += best[kept++];
        while (kept < count && before < enough);
        for (int i = 0; i < size; i++) law[i] = law[i] < best[kept - 1] ? 0 : law[i];
        whole = sum_of(law, size);
    }
    for (int i = 0; i < padded; i += LANES) put(law + i, load(law + i) * (float)(1 / whole));
    return 1;
}

static int drawn(const float *law, int n, double number) {
    double below = 0, whole = sum_of(law, n);
    int last = -1;
    for (int i = 0; i < n; i++) {
        if (!(law[i] > 0)) continue;
        below += law[i];
        last = i; /* rounding may leave the number above all */
        if (number * whole < below) break;
    }
    return last;
}

#define FLOOR 0x1p-12f /* as `forerun.sampling.seeded` has these two */
#define REST 0x100000000u
#define TURNS (1 << 20)

static double uniform(uint64_t key, uint64_t which) {
    uint64_t bits = key + (which + 1) * 0x9E3779B97F4A7C15u;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
    bits ^= bits >> 31;
    return ((bits >> 12) + 0.5) * 0x1p-52;
}

static int raced(const head *w, const chain *c, const float *law, int n, uint64_t key) {
    double best = INFINITY, low = 0;
    int winner = -1;
    for (int i = 0; i < n; i++) {
        low += law[i] < FLOOR ? law[i] : FLOOR;
        if (law[i] <= FLOOR) continue;
        double time = -log(uniform(key, name_of(w, c, i))) / ((double)law[i] - FLOOR);
        if (time < best) best = time, winner = i;
    }
    if (winner >= 0 && !(-log(uniform(key, REST)) / low < best)) return winner;
    for (uint64_t at = REST + 1; at < REST + TURNS; at += 2) {
        int64_t token = uniform(key, at) * c->among;
        int place = token < c->size ? place_of(w, c, token) : -1;
        if (place >= 0 && uniform(key, at + 1) * FLOOR < (law[place] < FLOOR ? law[place] : FLOOR)) return place;
    }
    return winner; /* hardly ever: what is drafted is a guess */
}

/* Whether positions from `length` to `end` of row `at` fit, of which `count` come at once. */
static int row_fits(const layer *all, const batch *b, int64_t at, int64_t length, int64_t count, int64_t end,
                    int64_t positions) {
    int64_t rows, capacity;
    if (!batch_fits(all, b, &rows, &capacity) || at < 0 || at >= rows || length < 0 || count < 1) return 0;
    if (count > b->most || count > b->slots || count * count > b->routes) return 0;
    return end <= capacity && end <= positions && end <= b->width;
}

int draft_chain(const layer *all, const batch *given, const head *w, const chain *c) {
    int64_t end = c->length + c->count + c->most - 1; /* the last token is not run */
    if (!row_fits(all, given, c->at, c->length, c->count, end, c->positions) || !head_fits(w, given->d)) return REFUSED;
    if (c->most < 0 || c->most > c->longest || c->known < 0 || c->ended < 0) return REFUSED;
    if (!tokens_are(c->pending, c->count, c->size) || !tokens_are(c->met, c->known, c->size)) return REFUSED;
    batch b = *given;
    int32_t *row = (int32_t *)b.row, *behind = (int32_t *)b.length, *slot = (int32_t *)b.slot, *paths = (int32_t *)b.paths;
    float product = 1;
    int done = 0, n = c->count, length = c->length, size = w->out + c->known, padded = (size + LANES - 1) / LANES * LANES;
    for (; done < c->most; length += n, n = 1) {
        for (int i = 0; i < n; i++) {
            const half *token = c->table + (done ? c->drafted[done - 1] : c->pending[i]) * b.d;
            for (int k = 0; k < b.d; k += LANES) put(b.x + (size_t)i * b.d + k, wide(token + k));
            row[i] = c->at;
            behind[i] = length;
            slot[i] = length + i;
            for (int k = 0; k < n; k++) paths[i * n + k] = length + k;
        }
        b.n = b.path = n;
        b.cos = c->cos + (size_t)length * b.size;
        b.sin = c->sin + (size_t)length * b.size;
        run_all(all, &b);
        const float *state = b.whole + (size_t)(n - 1) * b.d;
        score(w, state, 1, &c->halves, c->logits, b.threads);
        for (int i = w->out; i < padded; i++) {
            lanes sum = {0};
            const half *own = i < size ? c->rest + c->met[i - w->out] * b.d : 0;
            for (int k = 0; own && k < b.d; k += LANES) sum += load(state + k) * wide(own + k);
            c->logits[i] = own ? total(sum) : -INFINITY;
        }
        int best;
        float chance;
        if (c->laws) {
            float *law = c->laws + (c->keys ? 0 : (size_t)done * padded);
            if (!make_law(c, c->logits, size, padded, law)) break;
            best = c->numbers ? drawn(law, size, c->numbers[done]) : raced(w, c, law, size, c->keys[done]);
            chance = law[best];
        } else {
            lanes sum = {0};
            best = largest_sum(c->logits, 0, padded);
            for (int i = 0; i < padded; i += LANES) sum += power(load(c->logits + i) - c->logits[best]);
            chance = 1 / total(sum);
        }
        int64_t token = name_of(w, c, best);
        c->chances[done] = chance;
        c->drafted[done++] = token;
        product *= chance;
        int is_end = !(chance >= c->least) || !(product >= c->product);
        for (int i = 0; i < c->ended; i++) is_end |= token == c->ends[i];
        if (is_end) break;
    }
    return done;
}

/* What a head over hidden states drafts for one row. Behind `length` committed entries come `count` states `given`
   [count, d] with the tokens `behind` them (0: without), whose embeddings are `embed`'s own values. Then come `most`
   tokens, the first of which is number `start` of the draft: later calls of a step go on where the last one ended.

   A state is made of the one before, by `between` where that has data; where `sees`, of that and of the token drafted
   behind it, by `both`. Each token has the largest sum of its state's logits, of `old` [olds, S] times `weight`, and of
   `answer`'s product with the state in `tokens` [V, r] of the token before it; that of the first one is `root`.
   hot [S]: the tokens. logits [.., S], chances, drafted: of all tokens of the draft; found [.., d]: their states.
   cos, sin [positions, D]. Drafts have at most `longest` tokens. entry [count, 2 d], sums and own [S, filled up to 16s], and
   `room` for a product's input. */
typedef struct {
    head embed;
    tiles both, alone, between, answer;
    const float *given, *old, *cos, *sin;
    const int64_t *behind, *hot;
    const half *tokens;
    float *found, *logits, *sums, *chances;
    int64_t *drafted;
    half *entry, *own;
    states halves;
    inputs room;
    int64_t at, length, count, start, most, olds, root, sees, longest, positions;
    float weight;
} guess;

/* A state, and behind it a token's embedding with a root mean square of 1 where there is a token. */
static void put_entry(const guess *c, const float *x, int64_t token, int d, half *to) {
    for (int i = 0; i < d; i += LANES) narrow(to + i, load(x + i));
    if (token < 0) return;
    size_t from = (size_t)token * d;
    lanes squares = {0};
    for (int i = 0; i < d; i += LANES) squares += own_values(&c->embed, from + i) * own_values(&c->embed, from + i);
    float turn = 1 / sqrtf(total(squares) / d + 1.1920929e-7f);
    for (int i = 0; i < d; i += LANES) narrow(to + d + i, own_values(&c->embed, from + i) * turn);
}

/* Runs n entries at slots from `slot` on, `steps` times one after the other; each sees all from `length` on before it. */
static void run_entries(const layer *all, batch *b, const guess *c, int length, int slot, int n, int steps, float *whole) {
    int path = slot + n + steps - 1 - length;
    for (int i = 0; i < n; i++) {
        ((int32_t *)b->row)[i] = c->at;
        ((int32_t *)b->length)[i] = length;
        for (int k = 0; k < path; k++) ((int32_t *)b->paths)[i * path + k] = length + k;
    }
    for (int i = 0; i < n + steps - 1; i++) ((int32_t *)b->slot)[i] = slot + i;
    b->n = n;
    b->path = path;
    b->steps = steps;
    b->entry = c->entry;
    b->cos = c->cos + (size_t)slot * b->size;
    b->sin = c->sin + (size_t)slot * b->size;
    b->whole = whole;
    run_all(all, b);
}

int draft_states(const layer *all, const batch *given, const head *w, const guess *c) {
    int64_t drafts = c->start + c->most, ends = c->length + c->count + drafts - 1; /* the last token is not run */
    if (c->start < 0 || c->most < 1 || drafts > c->longest || drafts > given->slots || drafts > given->routes ||
        c->olds < 0)
        return REFUSED;
    if (!row_fits(all, given, c->at, c->length, c->count, ends, c->positions)) return REFUSED;
    if (!head_fits(w, given->d) || !head_fits(&c->embed, given->d)) return REFUSED;
    if (!tokens_are(&c->root, 1, c->embed.out)) return REFUSED;
    if (c->behind && !c->start && !tokens_are(c->behind, c->count, c->embed.out)) return REFUSED;
    batch b = *given;
    int d = b.d, out = w->out, last = c->start + c->most, behind = c->length + c->count;
    float *found = c->found;
    if (!c->start) {
        int wide_in = c->behind ? 2 * d : d;
        for (int i = 0; i < c->count; i++)
            put_entry(c, c->given + (size_t)i * d, c->behind ? c->behind[i] : -1, d, c->entry + (size_t)i * wide_in);
        b.fuse = c->behind ? c->both : c->alone;
        run_entries(all, &b, c, c->length, c->length, c->count, 1, given->whole);
        memcpy(found, given->whole + (size_t)(c->count - 1) * d, d * sizeof(float));
    }
    int there = c->start ? c->start : 1;
    if (!c->sees && last > there) {
        float *before = found + (size_t)(there - 1) * d;
        put_entry(c, before, -1, d, c->entry);
        memcpy(b.x, before, d * sizeof(float));
        b.fuse = b.between = c->between;
        run_entries(all, &b, c, behind, behind + there - 1, 1, last - there, before + d);
    }
    if (!c->sees) score(w, found + (size_t)c->start * d, c->most, &c->halves, c->logits + (size_t)c->start * out, b.threads);
    for (int k = c->start; k < last; k++) {
        int64_t before = k ? c->drafted[k - 1] : c->root;
        const float *here = c->logits + (size_t)k * out;
        if (c->sees && k) {
            put_entry(c, found + (size_t)(k - 1) * d, before, d, c->entry);
            b.fuse = c->both;
            run_entries(all, &b, c, behind, behind + k - 1, 1, 1, found + (size_t)k * d);
        }
        if (c->sees) score(w, found + (size_t)k * d, 1, &c->halves, c->logits + (size_t)k * out, b.threads);
        inputs room = c->room;
        if (c->answer.data) multiply(&c->answer, c->tokens + before * c->answer.in, 1, &room, c->own, b.threads);
        for (int i = 0; i < out; i += LANES) {
            __mmask16 there = out - i < LANES ? (1 << (out - i)) - 1 : 0xffff;
            lanes sum = (lanes)_mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), there, here + i);
            if (k < c->olds) sum += (lanes)_mm512_maskz_loadu_ps(there, c->old + (size_t)k * out + i) * c->weight;
            if (c->answer.data) sum += wide(c->own + i);
            put(c->sums + i, sum);
        }
        lanes sum = {0};
        int best = largest_sum(c->sums, 0, out);
        for (int i = 0; i < out; i += LANES) sum += power(load(c->sums + i) - c->sums[best]);
        c->chances[k] = 1 / total(sum);
        c->drafted[k] = c->hot[best];
    }
    return 0;
}

int has_products(void) { return 1; }
#else
int has_products(void) { return 0; }
#endif
