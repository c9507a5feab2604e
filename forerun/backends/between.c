/* What stands between the products of a forward: norms, rotation, attention, gates. Each token is worked on by itself, in
   one order, so that its bits do not depend on what else is there. Numbers of 16 bits are bfloat16. All sizes are multiples
   of 16; every loop over them takes 16 at a time, written out as vectors, as a compiler's own would round the ends of
   loops otherwise, or their beginnings, depending on addresses. */

#ifdef __AVX512F__
#include <immintrin.h>
#endif
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define LARGEST 1024 /* numbers of a head */
typedef uint16_t half;
typedef float lanes __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef half halves __attribute__((vector_size(32)));

static inline lanes load(const float *from) {
    lanes found;
    memcpy(&found, from, sizeof found);
    return found;
}

static inline void put(float *to, lanes value) { memcpy(to, &value, sizeof value); }

static inline lanes wide(const half *from) {
#ifdef __AVX512F__ /* a compiler makes four instructions of it otherwise */
    return (lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#else
    halves stored;
    memcpy(&stored, from, sizeof stored);
    words bits = __builtin_convertvector(stored, words) << 16;
    return (lanes)bits;
#endif
}

/* To the nearest, to even ones between two. What is not a number stays none. */
static inline void narrow(half *to, lanes value) {
    words bits = (words)value, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    words none = (words)((bits & 0x7fffffff) > 0x7f800000);
    halves stored = __builtin_convertvector((rounded & ~none) | (none & 0x7fc0), halves);
    memcpy(to, &stored, sizeof stored);
}

static inline lanes all(float value) { return (lanes){0} + value; }

static inline lanes choose(ints which, lanes yes, lanes no) {
    return (lanes)(((ints)yes & which) | ((ints)no & ~which));
}

/* exp: a power of two times a polynomial (Taylor's, to the sixth) within half of ln 2 of zero. */
static inline lanes power(lanes x) {
    x = choose(x < -87.0f, all(-87.0f), choose(x > 88.0f, all(88.0f), x));
    lanes y = x * 1.44269504f + 0.5f;
    ints whole = __builtin_convertvector(y, ints);
    whole += __builtin_convertvector(whole, lanes) > y; /* the comparison gives -1 */
    lanes n = __builtin_convertvector(whole, lanes), r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    lanes found = r * 1.3888889e-3f + 8.3333338e-3f;
    found = found * r + 4.1666668e-2f;
    found = found * r + 1.6666667e-1f;
    found = found * r + 0.5f;
    found = found * r + 1.0f;
    found = found * r + 1.0f;
    return found * (lanes)((whole + 127) << 23);
}

/* The sum of all lanes, half on half. */
static inline float total(lanes values) {
    typedef float eight __attribute__((vector_size(32)));
    typedef float quad __attribute__((vector_size(16)));
    eight parts[2];
    memcpy(parts, &values, sizeof values);
    eight once = parts[0] + parts[1];
    quad halves_of[2];
    memcpy(halves_of, &once, sizeof once);
    quad twice = halves_of[0] + halves_of[1];
    return (twice[0] + twice[2]) + (twice[1] + twice[3]);
}

static inline lanes larger(lanes x, lanes y) { return choose(x > y, x, y); }

static float length_of(const float *x, int size, float floor) {
    lanes sum = {0};
    for (int i = 0; i < size; i += LANES) sum += load(x + i) * load(x + i);
    return sqrtf(total(sum) + floor);
}

#define REFUSED -1 /* what is returned where sizes do not fit; nothing has been read or written then */

/* x [n, d] += added [n, d], where there is some; out [n, d] = RMSNorm(x) with a gain that holds the root of d. `floor` is
   d eps. `whole` [n, d] takes the same in 32 bits where it is given. */
int add_and_norm(float *x, const half *added, const float *gain, float floor, int n, int d, half *out, float *whole) {
    if (n < 0 || d < LANES || d % LANES) return REFUSED;
    for (int row = 0; row < n; row++) {
        float *own = x + (size_t)row * d;
        const half *more = added + (size_t)row * d;
        for (int i = 0; added && i < d; i += LANES) put(own + i, load(own + i) + wide(more + i));
        float size = length_of(own, d, floor);
        for (int i = 0; i < d; i += LANES) {
            lanes normed = load(own + i) / size * load(gain + i);
            narrow(out + (size_t)row * d + i, normed);
            if (whole) put(whole + (size_t)row * d + i, normed);
        }
    }
    return 0;
}

/* out [d] = silu(gate) * up, of both in one [2 d]: the columns from `first` to `last`. */
static inline void gate_row(const half *both, int d, int first, int last, half *out) {
    for (int i = first; i < last; i += LANES) {
        lanes x = wide(both + i);
        narrow(out + i, x / (1.0f + power(-x)) * wide(both + d + i));
    }
}

/* The same of n rows. */
int gate(const half *both, int n, int d, half *out) {
    if (n < 0 || d < LANES || d % LANES) return REFUSED;
    for (int row = 0; row < n; row++) gate_row(both + (size_t)row * 2 * d, d, 0, d, out + (size_t)row * d);
    return 0;
}

/* The totals of 16 sums. */
static inline void totals(const lanes *sums, float *to) {
#ifdef __AVX512F__
    __m512 part[LANES]; /* in the order that makes the totals' */
    for (int k = 0; k < LANES; k++) part[k] = (__m512)sums[4 * (k % 4) + k / 4];
    for (int k = 0; k < 8; k++)
        part[k] = _mm512_add_ps(_mm512_shuffle_f32x4(part[2 * k], part[2 * k + 1], 0x44),
                                _mm512_shuffle_f32x4(part[2 * k], part[2 * k + 1], 0xee));
    for (int k = 0; k < 4; k++)
        part[k] = _mm512_add_ps(_mm512_shuffle_f32x4(part[2 * k], part[2 * k + 1], 0x88),
                                _mm512_shuffle_f32x4(part[2 * k], part[2 * k + 1], 0xdd));
    for (int k = 0; k < 2; k++)
        part[k] = _mm512_add_ps(_mm512_shuffle_ps(part[2 * k], part[2 * k + 1], 0x44),
                                _mm512_shuffle_ps(part[2 * k], part[2 * k + 1], 0xee));
    put(to, (lanes)_mm512_add_ps(_mm512_shuffle_ps(part[0], part[1], 0x88), _mm512_shuffle_ps(part[0], part[1], 0xdd)));
#else
    for (int k = 0; k < LANES; k++) to[k] = total(sums[k]);
#endif
}

/* Where the keys or values of a row stand that a token sees: the first `split` in order, the others at `slots`. */
typedef struct {
    const half *from;
    const int32_t *slots;
    int first, split, count;
} view;

static inline __attribute__((always_inline)) const half *entry(view of, int j, int d) {
    return of.from + (size_t)(j < of.split ? j : of.slots[j - of.split]) * d;
}

#define HEADS 4 /* that are worked on at once, so that keys and values are read once for them */

/* Scores of `heads` queries [heads, D] with all keys: rows of `width`. */
static inline __attribute__((always_inline)) void score_keys(const float *queries, view keys, int heads, int d,
                                                             float *scores, int width) {
    for (int start = keys.first; start < keys.count; start += LANES) {
        lanes sums[HEADS * LANES];
        for (int k = 0; k < LANES; k++) {
            int j = start + k < keys.count ? start + k : keys.count - 1;
            const half *key = entry(keys, j, d);
            for (int h = 0; h < heads; h++) {
                lanes sum = {0};
                for (int i = 0; i < d; i += LANES) sum += load(queries + h * d + i) * wide(key + i);
                sums[h * LANES + k] = sum;
            }
        }
        for (int h = 0; h < heads; h++) totals(sums + h * LANES, scores + h * width + start - keys.first);
    }
}

/* What `heads` rows of scores make of all values [heads, D]. */
static inline __attribute__((always_inline)) void mix_values(const float *scores, int width, view values, int heads,
                                                             int d, half *out) {
    lanes sums[HEADS * LARGEST / LANES];
    for (int k = 0; k < heads * d / LANES; k++) sums[k] = (lanes){0};
    for (int j = values.first; j < values.count; j++) {
        const half *value = entry(values, j, d);
        for (int i = 0; i < d / LANES; i++) {
            lanes part = wide(value + LANES * i);
            for (int h = 0; h < heads; h++) sums[h * d / LANES + i] += scores[h * width + j - values.first] * part;
        }
    }
    for (int k = 0; k < heads * d / LANES; k++) narrow(out + LANES * k, sums[k]);
}

/* A row of `seen` scores as shares of one; behind them it is filled up to 16s. */
static void to_shares(float *scores, int seen) {
    int end = (seen + LANES - 1) / LANES * LANES;
    float most = scores[0];
    for (int j = seen; j < end; j++) scores[j] = scores[0];
    lanes largest = load(scores), sum = {0};
    for (int j = LANES; j < end; j += LANES) largest = larger(largest, load(scores + j));
    for (int i = 0; i < LANES; i++) most = largest[i] > most ? largest[i] : most;
    for (int j = 0; j < end; j += LANES) put(scores + j, power(load(scores + j) - most));
    for (int j = seen; j < end; j++) scores[j] = 0;
    for (int j = 0; j < end; j += LANES) sum += load(scores + j);
    float whole = total(sum);
    for (int j = 0; j < end; j += LANES) put(scores + j, load(scores + j) / whole);
}

/* Attention of `heads` queries [heads, D] that share keys. scores: heads rows of `width`, a multiple of 16. */
static inline __attribute__((always_inline)) void some_heads(const float *queries, view keys, view values, int heads,
                                                             int d, float *scores, int width, half *out) {
    score_keys(queries, keys, heads, d, scores, width);
    for (int h = 0; h < heads; h++) to_shares(scores + h * width, keys.count - keys.first);
    mix_values(scores, width, values, heads, d, out);
}

static inline __attribute__((always_inline)) void group(const float *queries, view keys, view values, int shared, int d,
                                                        float *scores, int width, half *out) {
    int h = 0; /* numbers of heads are constants, so that their sums stay in registers */
    for (; d <= 64 && h + 4 <= shared; h += 4) some_heads(queries + h * d, keys, values, 4, d, scores, width, out + h * d);
    for (; d <= 64 && h + 3 <= shared; h += 3) some_heads(queries + h * d, keys, values, 3, d, scores, width, out + h * d);
    for (; d <= 128 && h + 2 <= shared; h += 2) some_heads(queries + h * d, keys, values, 2, d, scores, width, out + h * d);
    for (; h < shared; h++) some_heads(queries + h * d, keys, values, 1, d, scores, width, out + h * d);
}

/* Of one token: `count` heads [D] plus their biases, normed and rotated where that is wanted, times a scale. */
static void turned(const half *from, const float *bias, const float *gains, float floor, const float *cos,
                   const float *sin, int count, int d, float scale, float *to) {
    for (int h = 0; h < count; h++, from += d, to += d) {
        float size = 1, own[LARGEST];
        for (int k = 0; k < d; k += LANES) put(own + k, bias ? wide(from + k) + load(bias + h * d + k) : wide(from + k));
        if (gains) size = length_of(own, d, floor);
        for (int k = 0; gains && k < d; k += LANES) put(own + k, load(own + k) / size * load(gains + h * d + k));
        for (int k = 0; k < d; k += LANES) { /* the sines of the first half are negative */
            lanes x = load(own + k);
            if (cos) x = x * load(cos + k) + load(own + (k < d / 2 ? k + d / 2 : k - d / 2)) * load(sin + k);
            put(to + k, x * scale);
        }
    }
}

/* Puts keys and values of token i, from its queries, keys and values in [n, (H + 2 G) D], into the cache [rows, 2 G,
   capacity, D]. The rest as `attend` has it; scratch: G D numbers. */
static void keep_keys(const half *parts, const float *bias, const float *gains, float floor, const float *cos,
                      const float *sin, half *cache, int64_t capacity, int row, int slot, int i, int heads, int groups,
                      int d, float *scratch) {
    int every = heads + 2 * groups;
    size_t each = (size_t)capacity * d;
    const half *own = parts + ((size_t)i * every + heads) * d, *value = own + groups * d;
    half *to = cache + (size_t)row * 2 * groups * each + (size_t)slot * d;
    turned(own, bias ? bias + heads * d : 0, gains ? gains + heads * d : 0, floor, cos ? cos + (size_t)i * d : 0,
           sin ? sin + (size_t)i * d : 0, groups, d, 1, scratch);
    for (int g = 0; g < groups; g++)
        for (int k = 0; k < d; k += LANES) narrow(to + g * each + k, load(scratch + g * d + k));
    turned(value, bias ? bias + (heads + groups) * d : 0, 0, 0, 0, 0, groups, d, 1, scratch);
    for (int g = 0; g < groups; g++)
        for (int k = 0; k < d; k += LANES) narrow(to + (groups + g) * each + k, load(scratch + g * d + k));
}

/* Attention of token i in group g of heads, which goes into its place of out [n, H D]. */
static void attend_group(const half *parts, const float *bias, const float *gains, float floor, const float *cos,
                         const float *sin, const half *cache, int64_t capacity, int row, int length, int place,
                         const int32_t *path, int i, int g, int heads, int groups, int d, int window, int width,
                         float *scratch, half *out) {
    int shared = heads / groups, first_head = g * shared;
    float *queries = scratch, *scores = queries + shared * d;
    size_t each = (size_t)capacity * d;
    const half *own = cache + ((size_t)row * 2 * groups + g) * each;
    int count = place + 1, first = window && count > window ? count - window : 0;
    view keys = {own, path, first, length, count}, values = {own + groups * each, path, first, length, count};
    turned(parts + ((size_t)i * (heads + 2 * groups) + first_head) * d, bias ? bias + first_head * d : 0,
           gains ? gains + first_head * d : 0, floor, cos ? cos + (size_t)i * d : 0, sin ? sin + (size_t)i * d : 0,
           shared, d, 1 / sqrtf(d), queries);
    half *to = out + ((size_t)i * heads + first_head) * d;
    if (d == 64) group(queries, keys, values, shared, 64, scores, width, to);
    else if (d == 128) group(queries, keys, values, shared, 128, scores, width, to);
    else group(queries, keys, values, shared, d, scores, width, to);
}

/* Whether heads are of sizes that attention takes, and what it keeps beside `width` scores fits into `space` numbers. */
static int heads_fit(int64_t heads, int64_t groups, int64_t d, int64_t width, int64_t space) {
    if (groups < 1 || heads < groups || heads % groups || d < 2 * LANES || d % (2 * LANES) || d > LARGEST) return 0;
    int64_t queries = heads / groups * (d + width);
    return width >= 0 && width % LANES == 0 && space >= queries && space >= groups * d;
}

/* Whether n tokens stay within `rows` and `capacity` of a cache and `width` scores, as `attend` has them. Slots and places
   are [steps, n]. */
static int tokens_fit(const int32_t *row, const int32_t *length, const int32_t *slot, const int32_t *place,
                      const int32_t *paths, int64_t path, int64_t n, int64_t steps, int64_t rows, int64_t capacity,
                      int64_t width) {
    for (int64_t i = 0; i < n; i++) {
        int64_t last = 0, before = length[i];
        if (row[i] < 0 || row[i] >= rows || before < 0 || before > capacity) return 0;
        for (int64_t at = i; at < n * steps; at += n) {
            if (slot[at] < 0 || slot[at] >= capacity || place[at] < 0) return 0;
            last = place[at] > last ? place[at] : last;
        }
        if (last >= width || last - before >= path) return 0;
        for (int64_t k = 0; k <= last - before; k++)
            if (paths[i * path + k] < 0 || paths[i * path + k] >= capacity) return 0;
    }
    return 1;
}

/* Attention of n tokens from their queries, keys and values [n, (H + 2 G) D]; keys and values go into the cache [rows, 2 G,
   capacity, D].

   row, length, slot, place [n]: of each token its row of the cache, that row's committed length, where its keys go, and its
   position. paths [n, P]: where the tokens from the row's length to its own place stand. bias [(H + 2 G) D], gains [(H + G)
   D] of norms of queries and keys, cos and sin [n, D]: where they are given. window: how far a token sees back, 0 for
   everything. width: a multiple of 16 above all places. scratch: `space` numbers, G D, or the queries and `width` scores of
   each head of a group where these are more. out [n, H D]. */
int attend(const half *parts, const float *bias, const float *gains, float floor, const float *cos, const float *sin,
          half *cache, int64_t rows, int64_t capacity, const int32_t *row, const int32_t *length, const int32_t *slot,
           const int32_t *place, const int32_t *paths, int path, int n, int heads, int groups, int d, int window,
           int width, int64_t space, float *scratch, half *out) {
    if (n < 0 || window < 0 || !heads_fit(heads, groups, d, width, space)) return REFUSED;
    if (!tokens_fit(row, length, slot, place, paths, path, n, 1, rows, capacity, width)) return REFUSED;
    for (int i = 0; i < n; i++) /* all keys first, as queries may see each other's */
        keep_keys(parts, bias, gains, floor, cos, sin, cache, capacity, row[i], slot[i], i, heads, groups, d, scratch);
    for (int i = 0; i < n; i++)
        for (int g = 0; g < groups; g++)
            attend_group(parts, bias, gains, floor, cos, sin, cache, capacity, row[i], length[i], place[i],
                         paths + (size_t)i * path, i, g, heads, groups, d, window, width, scratch, out);
    return 0;
}
