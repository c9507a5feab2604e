/* fr_attention_steps for one instruction set; its variant_*.c includes this file.

   A tile of keys, [block of 8 keys][d / 8][8 keys][8 numbers]:

     block 0   places 0 to 7:   key 0 | 4 | 1 | 5 | 2 | 6 | 3 | 7, 8 numbers of each
               places 8 to 15:  key 0 | 4 | ...
     block 1   ...

   The keys have this order because 512 bits hold two keys, whose sums end in the two halves of a
   result. A tile of values lies entry by entry, only the columns that are wanted.

   The order of sums: A score is 8 sums of products, of the places that are 0 to 7 modulo 8, each in
   the order of places, and then sum8. Exponentials are summed in 8 lanes. Values are added entry by
   entry. So neither tiles nor the queries beside it change a number. */
#include "attention.h"
#include "numbers.h"
#include "vectors.h"

#if HAS_AVX512
#define REGISTER_QUERIES 6 /* whose sums stay in registers */
#define PART_COLUMNS 16    /* of a register */
#else
#define REGISTER_QUERIES 3
#define PART_COLUMNS 8
#endif
#define DIRECT_QUERIES 6 /* for so few, keys and values are converted where they are multiplied */
#define COLUMN_PARTS 4   /* registers of outputs for each query */
/* How many bytes ahead entries are prefetched. On an AMD EPYC (Zen 5) 4096 and 8192 are alike, and
   16384 is slower. */
#define PREFETCH_AHEAD 8192

FR_INLINE f8 stored8(const char *entry, int64_t place, int is_float32) {
    if (is_float32) return load8((const float *)(const void *)entry + place);
    return float16s(entry + 2 * place);
}

/* The bytes from one entry to the next. */
FR_INLINE int64_t entry_bytes(const fr_attention *a) { return a->is_float32 ? 4 * a->d : 2 * a->d; }

FR_INLINE float *scores_of(const fr_attention *a, int64_t row, int64_t head) {
    return a->scores + (row * a->heads + head) * a->width + FR_BEFORE;
}

/* Where the slots that the rows see begin, */
static int64_t first_slot(const fr_attention *a) {
    int64_t first = a->row[0].first;
    for (int r = 1; r < a->rows; r++)
        first = fr_min(first, a->row[r].first);
    return first;
}

/* and where they end. */
static int64_t end_of_slots(const fr_attention *a) {
    int64_t end = 0;
    for (int r = 0; r < a->rows; r++)
        end = fr_max(end, a->row[r].split);
    return end;
}

/* Prefetches what lies ahead of an entry's bytes [from, to). It is called entry by entry, because
   bursts of prefetches would wait for each other. */
FR_INLINE void prefetch_ahead(const char *entry, int64_t from, int64_t to) {
    for (int64_t at = from; at < to; at += 64)
        __builtin_prefetch(entry + PREFETCH_AHEAD + at);
}

/* Keys. */

#if HAS_AVX512
/* 8 numbers of two keys. */
FR_INLINE __m512 two_keys(const char *one, const char *two, int64_t place, int is_float32) {
    if (is_float32) {
        __m512 first = _mm512_castps256_ps512((__m256)stored8(one, place, 1));
        return _mm512_insertf32x8(first, (__m256)stored8(two, place, 1), 1);
    }
    __m128i low = _mm_loadu_si128((const __m128i *)(one + 2 * place));
    __m128i high = _mm_loadu_si128((const __m128i *)(two + 2 * place));
    return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
}
#endif

/* Converts 8 keys to a block of a tile. */
FR_INLINE void convert_block(const char *const *keys, int64_t d, int is_float32, float *block) {
    for (int i = 0; i < 4; i++) {
        float *to = block + 16 * i;
        for (int64_t place = 0; place < d; place += 8, to += 64) {
#if HAS_AVX512
            _mm512_store_ps(to, two_keys(keys[i], keys[i + 4], place, is_float32));
#else
            store8(to, stored8(keys[i], place, is_float32));
            store8(to + 8, stored8(keys[i + 4], place, is_float32));
#endif
        }
    }
}

/* Finds up to 8 keys: those at `slots`, or from slot `start` on. Missing ones are replaced by the
   last one, because a block is multiplied whole; nobody reads their scores. */
FR_INLINE void find_keys(const fr_attention *a, const int32_t *slots, int64_t start, int64_t count,
                         const char **keys) {
    int64_t bytes = entry_bytes(a);
    for (int64_t i = 0; i < 8; i++) {
        int64_t key = fr_min(i, count - 1);
        keys[i] = (const char *)a->keys + (slots ? slots[key] : start + key) * bytes;
    }
}

/* Converts up to 8 keys to a block of a tile. */
static void convert_keys(const fr_attention *a, const int32_t *slots, int64_t start, int64_t count,
                         float *block) {
    const char *keys[8];
    find_keys(a, slots, start, count, keys);
    if (a->is_float32) {
        convert_block(keys, a->d, 1, block);
    } else {
        convert_block(keys, a->d, 0, block);
    }
}

/* Whether keys and values are converted where they are multiplied. For few queries, storing them in
   a tile would take as long as multiplying. */
FR_INLINE int is_direct(const fr_attention *a) {
    return !a->is_float32 && a->rows * a->heads <= DIRECT_QUERIES;
}

/* Prefetches a line of two of a block's 8 keys. Four such calls, in steps of 8 places, prefetch the
   lines of 32 places of all 8 keys in float16. */
FR_INLINE void prefetch_of_block(const char *const *keys, int64_t place) {
    int64_t key = place / 8 % 4 * 2;
    int64_t line = place / 32 * 64;
    __builtin_prefetch(keys[key] + PREFETCH_AHEAD + line);
    __builtin_prefetch(keys[key + 1] + PREFETCH_AHEAD + line);
}

#if HAS_AVX512
/* Sums of adjacent lanes of both, within 128 bits. */
FR_INLINE __m512 pairs16(__m512 x, __m512 y) {
    return _mm512_add_ps(_mm512_shuffle_ps(x, y, 0x88), _mm512_shuffle_ps(x, y, 0xdd));
}

/* Scores of `count` queries, a constant, with a block of 8 keys: those of `block` or, if `keys` is
   not NULL, those that are still to be converted. They are written from to[query] + at on. */
FR_INLINE void score_some(int count, const float *const *queries, const float *block,
                          const char *const *keys, int64_t d, float *const *to, int64_t at) {
    __m512 sums[REGISTER_QUERIES][4];
    UNROLL
    for (int q = 0; q < count; q++) {
        UNROLL
        for (int i = 0; i < 4; i++)
            sums[q][i] = _mm512_setzero_ps();
    }
    for (int64_t place = 0; place < d; place += 8) {
        __m512 pair[4];
        if (keys) prefetch_of_block(keys, place);
        UNROLL
        for (int i = 0; i < 4; i++) {
            pair[i] = keys ? two_keys(keys[i], keys[i + 4], place, 0)
                           : _mm512_load_ps(block + 8 * place + 16 * i);
        }
        UNROLL
        for (int q = 0; q < count; q++) {
            __m512 query = _mm512_broadcast_f32x8(_mm256_loadu_ps(queries[q] + place));
            UNROLL
            for (int i = 0; i < 4; i++)
                sums[q][i] = _mm512_fmadd_ps(query, pair[i], sums[q][i]);
        }
    }
    UNROLL
    for (int q = 0; q < count; q += 2) {
        int other = q + 1 < count ? q + 1 : q;
        __m512 one = pairs16(pairs16(sums[q][0], sums[q][1]), pairs16(sums[q][2], sums[q][3]));
        __m512 two = pairs16(pairs16(sums[other][0], sums[other][1]),
                             pairs16(sums[other][2], sums[other][3]));
        __m512 halves = _mm512_shuffle_f32x4(one, two, 0x88);
        __m512 totals = _mm512_add_ps(halves, _mm512_shuffle_f32x4(one, two, 0xdd));
        _mm256_storeu_ps(to[q] + at, _mm512_castps512_ps256(totals));
        if (other > q) _mm256_storeu_ps(to[other] + at, _mm512_extractf32x8_ps(totals, 1));
    }
}
#else
/* Scores of some queries with the first or the last four keys of a block. */
FR_INLINE void score_half(int count, const float *const *queries, const float *block,
                          const char *const *keys, int half, int64_t d, float *const *to,
                          int64_t at) {
    typedef float f4 __attribute__((vector_size(16)));
    f8 sums[REGISTER_QUERIES][4] = {{{0}}};
    for (int64_t place = 0; place < d; place += 8) {
        f8 query[REGISTER_QUERIES];
        if (keys && !half) prefetch_of_block(keys, place);
        UNROLL
        for (int q = 0; q < count; q++)
            query[q] = load8(queries[q] + place);
        UNROLL
        for (int i = 0; i < 4; i++) {
            f8 key = keys ? float16s(keys[4 * half + i] + 2 * place)
                          : load8(block + 8 * place + 16 * i + 8 * half);
            UNROLL
            for (int q = 0; q < count; q++)
                sums[q][i] = fma8(query[q], key, sums[q][i]);
        }
    }
    UNROLL
    for (int q = 0; q < count; q++) {
        f8 both =
            pair_sums8(pair_sums8(sums[q][0], sums[q][1]), pair_sums8(sums[q][2], sums[q][3]));
        f4 low = __builtin_shufflevector(both, both, 0, 1, 2, 3);
        f4 totals = low + __builtin_shufflevector(both, both, 4, 5, 6, 7);
        memcpy(to[q] + at + 4 * half, &totals, sizeof totals);
    }
}

/* Scores of `count` queries, a constant, with a block of 8 keys: those of `block` or, if `keys` is
   not NULL, those that are still to be converted. They are written from to[query] + at on. */
FR_INLINE void score_some(int count, const float *const *queries, const float *block,
                          const char *const *keys, int64_t d, float *const *to, int64_t at) {
    score_half(count, queries, block, keys, 0, d, to, at);
    score_half(count, queries, block, keys, 1, d, to, at);
}
#endif

/* score_some with a constant number of queries, so that their sums stay in registers. */
FR_INLINE void score_by_count(int count, const float *const *queries, const float *block,
                              const char *const *keys, int64_t d, float *const *to, int64_t at) {
    switch (count) {
    case 1: score_some(1, queries, block, keys, d, to, at); break;
    case 2: score_some(2, queries, block, keys, d, to, at); break;
#if REGISTER_QUERIES > 3
    case 3: score_some(3, queries, block, keys, d, to, at); break;
    case 4: score_some(4, queries, block, keys, d, to, at); break;
    case 5: score_some(5, queries, block, keys, d, to, at); break;
#endif
    default: score_some(REGISTER_QUERIES, queries, block, keys, d, to, at);
    }
}

static void score_block(int count, const float *const *queries, const float *block, int64_t d,
                        float *const *to, int64_t at) {
    score_by_count(count, queries, block, NULL, d, to, at);
}

static void score_keys(int count, const float *const *queries, const char *const *keys, int64_t d,
                       float *const *to, int64_t at) {
    score_by_count(count, queries, NULL, keys, d, to, at);
}

/* A list of queries, their outputs, and where their scores of the present tile are. */
typedef struct {
    int count;
    const float *queries[FR_QUERIES];
    float *scores[FR_QUERIES], *out[FR_QUERIES];
} query_list;

/* Adds the queries of a row, whose scores begin at an entry. */
static void add_queries(const fr_attention *a, int row, int64_t entry, query_list *list) {
    const fr_attention_row *of = &a->row[row];
    for (int h = 0; h < a->heads; h++) {
        int at = list->count++;
        list->queries[at] = of->queries + (int64_t)h * a->d;
        list->scores[at] = scores_of(a, row, h) + entry - of->first;
        list->out[at] = of->out + (int64_t)h * a->d;
    }
}

/* Keys or values of adjacent slots. */
typedef struct {
    int64_t start, count;
} tile_slots;

/* Columns [from, to) of the values; scores need none. */
typedef struct {
    int64_t from, to;
} column_range;

/* Does a step with the entries [first, end) of a tile, for a list of queries. */
typedef void tile_step(const fr_attention *a, const tile_slots *tile, const query_list *list,
                       int64_t first, int64_t end, column_range columns);

/* Does a step with a tile for all rows. Rows that see all of it are taken together, and each of the
   others alone. */
FR_INLINE void visit_tile(const fr_attention *a, const tile_slots *tile, column_range columns,
                          tile_step *step) {
    query_list together;
    together.count = 0;
    for (int r = 0; r < a->rows; r++) {
        int64_t first = fr_max(a->row[r].first - tile->start, 0);
        int64_t end = fr_min(a->row[r].split - tile->start, tile->count);
        if (first >= end) continue;
        if (!first && end == tile->count) {
            add_queries(a, r, tile->start, &together);
            continue;
        }
        query_list alone;
        alone.count = 0;
        add_queries(a, r, tile->start, &alone);
        step(a, tile, &alone, first, end, columns);
    }
    step(a, tile, &together, 0, tile->count, columns);
}

/* The bytes [from, to) of the next tile's entries. They are prefetched in as many shares as the
   present tile takes calls, because a burst would wait for memory instead of multiplying. */
typedef struct {
    const char *entry;
    int64_t left;  /* entries */
    int64_t bytes; /* from one to the next */
    int64_t from, to;
} spread_prefetch;

static spread_prefetch next_tile(const fr_attention *a, const void *entries, const tile_slots *tile,
                                 int64_t from, int64_t to) {
    int64_t bytes = entry_bytes(a);
    const char *entry = (const char *)entries + (tile->start + FR_TILE) * bytes;
    return (spread_prefetch){entry, FR_TILE, bytes, from, to};
}

FR_INLINE void prefetch_share(spread_prefetch *next, int64_t calls) {
    int64_t share = fr_min((FR_TILE + calls - 1) / calls, next->left);
    for (int64_t i = 0; i < share; i++, next->entry += next->bytes) {
        for (int64_t at = next->from; at < next->to; at += 64)
            __builtin_prefetch(next->entry + at);
    }
    next->left -= share;
}

/* Scores of a list of queries with the blocks [first, end) of a tile's keys, as they are stored. */
static void score_stored(const fr_attention *a, const tile_slots *tile, const query_list *list,
                         int64_t first, int64_t end) {
    for (int64_t block = first; block < end; block++) {
        const char *keys[8];
        find_keys(a, NULL, tile->start + 8 * block, fr_min(8, tile->count - 8 * block), keys);
        for (int q = 0; q < list->count; q += REGISTER_QUERIES) {
            int count = (int)fr_min(REGISTER_QUERIES, list->count - q);
            score_keys(count, list->queries + q, keys, a->d, list->scores + q, 8 * block);
        }
    }
}

/* The same with converted keys. */
static void score_converted(const fr_attention *a, const tile_slots *tile, const query_list *list,
                            int64_t first, int64_t end) {
    spread_prefetch next = next_tile(a, a->keys, tile, 0, entry_bytes(a));
    int64_t calls = (list->count + REGISTER_QUERIES - 1) / REGISTER_QUERIES * (end - first);
    for (int q = 0; q < list->count; q += REGISTER_QUERIES) {
        int count = (int)fr_min(REGISTER_QUERIES, list->count - q);
        for (int64_t block = first; block < end; block++) {
            prefetch_share(&next, calls);
            score_block(count, list->queries + q, a->tile + 8 * block * a->d, a->d,
                        list->scores + q, 8 * block);
        }
    }
}

static void score_queries(const fr_attention *a, const tile_slots *tile, const query_list *list,
                          int64_t first, int64_t end, column_range columns) {
    int64_t first_block = first / 8;
    int64_t end_block = (end + 7) / 8;
    (void)columns;
    if (is_direct(a)) {
        score_stored(a, tile, list, first_block, end_block);
    } else {
        score_converted(a, tile, list, first_block, end_block);
    }
}

static void score_tile(const fr_attention *a, const tile_slots *tile) {
    for (int64_t block = 0; !is_direct(a) && 8 * block < tile->count; block++) {
        float *to = a->tile + 8 * block * a->d;
        convert_keys(a, NULL, tile->start + 8 * block, fr_min(8, tile->count - 8 * block), to);
    }
    visit_tile(a, tile, (column_range){0, 0}, score_queries);
}

static void score_path(const fr_attention *a, int row) {
    const fr_attention_row *of = &a->row[row];
    for (int64_t entry = fr_max(of->first, of->split); entry < of->count; entry += 8) {
        query_list list;
        list.count = 0;
        convert_keys(a, of->path + entry - of->split, 0, fr_min(8, of->count - entry), a->tile);
        add_queries(a, row, entry, &list);
        for (int q = 0; q < list.count; q += REGISTER_QUERIES) {
            int count = (int)fr_min(REGISTER_QUERIES, list.count - q);
            score_block(count, list.queries + q, a->tile, a->d, list.scores + q, 0);
        }
    }
}

static void attention_scores(const fr_attention *a, int64_t from, int64_t end) {
    int64_t start = fr_max(from, first_slot(a) / FR_TILE * FR_TILE);
    int64_t last = fr_min(end, end_of_slots(a));
    for (; start < last; start += FR_TILE)
        score_tile(a, &(tile_slots){start, fr_min(FR_TILE, last - start)});
    for (int r = 0; r < a->rows; r++) {
        /* Blocks of a row's last slots reach into the scores of its path, so the path comes after
           them. */
        int64_t last_slot = fr_max(a->row[r].split - 1, 0);
        if (from <= last_slot && last_slot < end) score_path(a, r);
    }
}

/* Weights. */

#if HAS_AVX512
/* exp8 of 16 numbers. */
FR_INLINE __m512 exp16(__m512 x) {
    const __m512 half_turn = _mm512_set1_ps(0x1.8p23f);
    x = _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, _mm512_set1_ps(88.0f), _CMP_GT_OQ),
                           _mm512_set1_ps(88.0f));
    x = _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_LT_OQ),
                           _mm512_set1_ps(-87.0f));
    __m512 shifted = _mm512_fmadd_ps(x, _mm512_set1_ps(1.44269504f), half_turn);
    __m512 whole = _mm512_sub_ps(shifted, half_turn);
    __m512 r = _mm512_fmadd_ps(whole, _mm512_set1_ps(-0.693359375f), x);
    r = _mm512_fmadd_ps(whole, _mm512_set1_ps(2.12194440e-4f), r);
    __m512 y =
        _mm512_fmadd_ps(_mm512_set1_ps(1.9875691500e-4f), r, _mm512_set1_ps(1.3981999507e-3f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(8.3334519073e-3f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(4.1665795894e-2f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.6666665459e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.0000001201e-1f));
    y = _mm512_fmadd_ps(_mm512_mul_ps(y, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    __m512i power = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    power = _mm512_add_epi32(power, _mm512_set1_epi32(0x3f800000));
    return _mm512_mul_ps(y, _mm512_castsi512_ps(power));
}
#endif

/* Replaces n scores, a multiple of 8, by exp(score - largest). Returns 8 sums of these. */
static f8 exponentials(float *scores, int64_t n, float largest) {
    f8 sum = {0};
    int64_t i = 0;
#if HAS_AVX512
    for (; i + 16 <= n; i += 16) {
        __m512 both = exp16(_mm512_sub_ps(_mm512_loadu_ps(scores + i), _mm512_set1_ps(largest)));
        _mm512_storeu_ps(scores + i, both);
        sum += (f8)_mm512_castps512_ps256(both);
        sum += (f8)_mm512_extractf32x8_ps(both, 1);
    }
#endif
    for (; i < n; i += 8) {
        f8 here = exp8(load8(scores + i) - largest);
        store8(scores + i, here);
        sum += here;
    }
    return sum;
}

/* The largest of n numbers, a multiple of 8. */
static float largest_of(const float *x, int64_t n) {
    f8 lanes[4] = {load8(x), load8(x), load8(x), load8(x)};
    int64_t i = 8;
    for (; i + 32 <= n; i += 32) {
        UNROLL
        for (int k = 0; k < 4; k++)
            lanes[k] = max8(lanes[k], load8(x + i + 8 * k));
    }
    for (; i < n; i += 8)
        lanes[0] = max8(lanes[0], load8(x + i));
    f8 best = max8(max8(lanes[0], lanes[1]), max8(lanes[2], lanes[3]));
    float largest = best[0];
    for (int k = 1; k < 8; k++)
        largest = best[k] > largest ? best[k] : largest;
    return largest;
}

static void attention_weights(const fr_attention *a, int64_t from, int64_t end) {
    for (int64_t q = from; q < end; q++) {
        const fr_attention_row *row = &a->row[q / a->heads];
        float *scores = scores_of(a, 0, q);
        int64_t entries = row->count - row->first;
        int64_t whole = entries / 8 * 8;
        /* The rest is padded with a score, which does not change the largest, and not summed. */
        float *rest = scores + whole;
        for (int64_t j = entries - whole; j < 8; j++)
            rest[j] = scores[0];
        int64_t padded = entries > whole ? whole + 8 : whole;
        for (int64_t j = 0; a->cap != 0 && j < padded; j += 8)
            store8(scores + j, cap8(load8(scores + j), a->cap));
        float largest = largest_of(scores, padded);
        float sink = a->sinks ? a->sinks[q % a->heads] : largest;
        if (sink > largest) largest = sink;
        f8 sum = exponentials(scores, whole, largest);
        if (entries > whole) {
            f8 last = exp8(load8(rest) - largest);
            for (int64_t j = entries - whole; j < 8; j++)
                last[j] = 0;
            store8(rest, last);
            sum += last;
        }
        float total = sum8(sum);
        if (a->sinks) total += exp8(splat8(sink - largest))[0];
        scores[-FR_BEFORE] = 1 / total;
    }
}

/* Values. */

/* A register of columns. */
#if HAS_AVX512
typedef __m512 part;
FR_INLINE part load_part(const float *p) { return _mm512_loadu_ps(p); }
FR_INLINE void store_part(float *p, part v) { _mm512_storeu_ps(p, v); }
FR_INLINE part splat_part(float x) { return _mm512_set1_ps(x); }
FR_INLINE part fma_part(part a, part b, part c) { return _mm512_fmadd_ps(a, b, c); }
#else
typedef f8 part;
FR_INLINE part load_part(const float *p) { return load8(p); }
FR_INLINE void store_part(float *p, part v) { store8(p, v); }
FR_INLINE part splat_part(float x) { return splat8(x); }
FR_INLINE part fma_part(part a, part b, part c) { return fma8(a, b, c); }
#endif

/* Entries of a tile, in float32, or of the cache, in float16. */
typedef struct {
    const char *entries;
    int64_t bytes; /* from one to the next */
} value_rows;

FR_INLINE part value_part(const char *entry, int64_t column, int is_half) {
    if (!is_half) return load_part((const float *)(const void *)entry + column);
#if HAS_AVX512
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(entry + 2 * column)));
#else
    return float16s(entry + 2 * column);
#endif
}

/* Adds weights times `parts` registers of columns of the entries [first, end) to the outputs of
 * some queries. */
FR_INLINE void mix_some(int count, int parts, int is_half, const float *const *weights,
                        int64_t first, int64_t end, const value_rows *values, int64_t place,
                        float *const *out, int64_t column) {
    part sums[REGISTER_QUERIES][COLUMN_PARTS];
    const char *entry = values->entries + first * values->bytes;
    UNROLL
    for (int q = 0; q < count; q++) {
        UNROLL
        for (int i = 0; i < parts; i++)
            sums[q][i] = load_part(out[q] + column + PART_COLUMNS * i);
    }
    for (int64_t j = first; j < end; j++, entry += values->bytes) {
        part weight[REGISTER_QUERIES];
        if (is_half) prefetch_ahead(entry, 2 * place, 2 * (place + parts * PART_COLUMNS));
        UNROLL
        for (int q = 0; q < count; q++)
            weight[q] = splat_part(weights[q][j]);
        UNROLL
        for (int i = 0; i < parts; i++) {
            part value = value_part(entry, place + PART_COLUMNS * i, is_half);
            UNROLL
            for (int q = 0; q < count; q++)
                sums[q][i] = fma_part(weight[q], value, sums[q][i]);
        }
    }
    UNROLL
    for (int q = 0; q < count; q++) {
        UNROLL
        for (int i = 0; i < parts; i++)
            store_part(out[q] + column + PART_COLUMNS * i, sums[q][i]);
    }
}

/* The last 8 columns of a head whose size is no multiple of 16. */
FR_INLINE void mix_eight(int count, int is_half, const float *const *weights, int64_t first,
                         int64_t end, const value_rows *values, int64_t place, float *const *out,
                         int64_t column) {
    for (int q = 0; q < count; q++) {
        f8 sum = load8(out[q] + column);
        for (int64_t j = first; j < end; j++) {
            sum = fma8(splat8(weights[q][j]),
                       stored8(values->entries + j * values->bytes, place, !is_half), sum);
        }
        store8(out[q] + column, sum);
    }
}

/* mix_some with a constant number of queries, so that their sums stay in registers. */
FR_INLINE void mix_by_count(int count, int parts, int is_half, const float *const *weights,
                            int64_t first, int64_t end, const value_rows *values, int64_t place,
                            float *const *out, int64_t column) {
    switch (count) {
    case 1: mix_some(1, parts, is_half, weights, first, end, values, place, out, column); break;
    case 2: mix_some(2, parts, is_half, weights, first, end, values, place, out, column); break;
#if REGISTER_QUERIES > 3
    case 3: mix_some(3, parts, is_half, weights, first, end, values, place, out, column); break;
    case 4: mix_some(4, parts, is_half, weights, first, end, values, place, out, column); break;
    case 5: mix_some(5, parts, is_half, weights, first, end, values, place, out, column); break;
#endif
    default:
        mix_some(REGISTER_QUERIES, parts, is_half, weights, first, end, values, place, out, column);
    }
}

/* Adds the entries [first, end) of some columns to the outputs of a list of queries. */
FR_INLINE void mix_columns(const query_list *list, int is_half, const value_rows *values,
                           spread_prefetch next, int64_t first, int64_t end, column_range columns) {
    int64_t calls = (list->count + REGISTER_QUERIES - 1) / REGISTER_QUERIES;
    int64_t start = is_half ? 0 : columns.from; /* column of a tile's first number */
    int64_t step = COLUMN_PARTS * PART_COLUMNS;
    for (int q = 0; q < list->count; q += REGISTER_QUERIES) {
        int count = (int)fr_min(REGISTER_QUERIES, list->count - q);
        const float *const *weights = (const float *const *)(list->scores + q);
        float *const *out = list->out + q;
        int64_t column = columns.from;
        if (!is_half) prefetch_share(&next, calls);
        for (; column + step <= columns.to; column += step) {
            mix_by_count(count, COLUMN_PARTS, is_half, weights, first, end, values, column - start,
                         out, column);
        }
        for (; column + PART_COLUMNS <= columns.to; column += PART_COLUMNS) {
            mix_by_count(count, 1, is_half, weights, first, end, values, column - start, out,
                         column);
        }
        if (column < columns.to)
            mix_eight(count, is_half, weights, first, end, values, column - start, out, column);
    }
}

static void mix_stored(const query_list *list, const value_rows *values, int64_t first, int64_t end,
                       column_range columns) {
    mix_columns(list, 1, values, (spread_prefetch){0}, first, end, columns);
}

static void mix_converted(const query_list *list, const float *tile, spread_prefetch next,
                          int64_t first, int64_t end, column_range columns) {
    value_rows values = {(const char *)tile, 4 * (columns.to - columns.from)};
    mix_columns(list, 0, &values, next, first, end, columns);
}

/* Converts some columns of entries to a tile: of those at `slots`, or of the tile's slots. */
static void convert_values(const fr_attention *a, const int32_t *slots, const tile_slots *tile,
                           column_range columns) {
    int64_t bytes = entry_bytes(a);
    int64_t width = columns.to - columns.from;
    for (int64_t i = 0; i < tile->count; i++) {
        const char *entry = (const char *)a->values + (slots ? slots[i] : tile->start + i) * bytes;
        float *out = a->tile + i * width - columns.from;
        int64_t column = columns.from;
        if (a->is_float32) {
            memcpy(out + column, (const float *)(const void *)entry + column,
                   (size_t)width * sizeof(float));
            continue;
        }
        for (; column + PART_COLUMNS <= columns.to; column += PART_COLUMNS)
            store_part(out + column, value_part(entry, column, 1));
        for (; column < columns.to; column += 8)
            store8(out + column, float16s(entry + 2 * column));
    }
}

static void mix_queries(const fr_attention *a, const tile_slots *tile, const query_list *list,
                        int64_t first, int64_t end, column_range columns) {
    if (is_direct(a)) {
        const char *entries = (const char *)a->values + tile->start * entry_bytes(a);
        value_rows stored = {entries, entry_bytes(a)};
        mix_stored(list, &stored, first, end, columns);
        return;
    }
    int64_t size = a->is_float32 ? 4 : 2;
    spread_prefetch next = next_tile(a, a->values, tile, columns.from * size, columns.to * size);
    mix_converted(list, a->tile, next, first, end, columns);
}

static void mix_tile(const fr_attention *a, const tile_slots *tile, column_range columns) {
    if (!is_direct(a)) convert_values(a, NULL, tile, columns);
    visit_tile(a, tile, columns, mix_queries);
}

static void mix_path(const fr_attention *a, int row, column_range columns) {
    const fr_attention_row *of = &a->row[row];
    for (int64_t entry = fr_max(of->first, of->split); entry < of->count; entry += FR_TILE) {
        query_list list;
        list.count = 0;
        tile_slots path = {0, fr_min(FR_TILE, of->count - entry)};
        convert_values(a, of->path + entry - of->split, &path, columns);
        add_queries(a, row, entry, &list);
        mix_converted(&list, a->tile, (spread_prefetch){0}, 0, path.count, columns);
    }
}

static void attention_values(const fr_attention *a, int64_t from, int64_t to) {
    column_range columns = {from, to};
    int64_t start = first_slot(a) / FR_TILE * FR_TILE;
    int64_t last = end_of_slots(a);
    for (int r = 0; r < a->rows; r++) {
        for (int h = 0; h < a->heads; h++) {
            float *out = a->row[r].out + (int64_t)h * a->d;
            memset(out + from, 0, (size_t)(to - from) * sizeof(float));
        }
    }
    for (; start < last; start += FR_TILE)
        mix_tile(a, &(tile_slots){start, fr_min(FR_TILE, last - start)}, columns);
    for (int r = 0; r < a->rows; r++) {
        mix_path(a, r, columns);
        for (int h = 0; h < a->heads; h++) {
            float *out = a->row[r].out + (int64_t)h * a->d;
            float factor = scores_of(a, r, h)[-FR_BEFORE];
            for (int64_t i = from; i < to; i += 8)
                store8(out + i, load8(out + i) * factor);
        }
    }
}

const fr_attention_steps FR_NAME(fr_attention_steps) = {attention_scores, attention_weights,
                                                        attention_values};
