/* Distributions and samples of drafted tokens.

     logits --fr_make_probs--> probs [place 0 .. outputs - 1 | extra tokens] --fr_sample--> place

   The seeded sampler shares its random numbers with the target's, so that both tend to choose the
   same token. forerun/sampling/seeded.py describes it; its arithmetic is followed here step by
   step. */
#include "sampling.h"

#include <math.h>
#include <stdlib.h>

#include "logs.h"
#include "vector_ops.h"

/* As in forerun/sampling/seeded.py. */
#define FLOOR 0x1p-12f
#define REST 0x100000000u

#define TRIALS (1 << 20) /* numbers that a sampler takes at most to draw below FLOOR */

static double sum_of(const float *x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += x[i];
    return sum;
}

/* For qsort: the larger number first. */
static int by_size(const void *x, const void *y) {
    float a = *(const float *)x;
    float b = *(const float *)y;
    return (a < b) - (a > b);
}

/* Sets the least probable tokens to 0, so that the others have just top_p of the `total`; equal
   ones all stay. `buffer` has room for `size` numbers. */
static void cut_to_top_p(float *probs, int64_t size, double total, float top_p, float *buffer) {
    /* Only what is above is sorted: all tokens below have less than 1 - top_p together. */
    float floor = (1 - top_p) * (float)total / (float)size;
    int64_t count = 0;
    for (int64_t i = 0; i < size; i++) {
        if (probs[i] >= floor) buffer[count++] = probs[i];
    }
    qsort(buffer, count, sizeof(float), by_size);
    double enough = top_p * total;
    double sum = 0;
    int64_t kept = 0;
    do {
        sum += buffer[kept++];
    } while (kept < count && sum < enough);
    float smallest = buffer[kept - 1];
    for (int64_t i = 0; i < size; i++)
        probs[i] = probs[i] < smallest ? 0 : probs[i];
}

int fr_make_probs(float *logits, int64_t size, float inverse_temperature, float top_p,
                  float *probs) {
    const fr_vector_ops *ops = fr_chosen_vector_ops();
    float largest = logits[ops->argmax(logits, size)];
    ops->exps(logits, largest, inverse_temperature, size, probs);
    double total = sum_of(probs, size);
    if (!(total > 0 && total < INFINITY)) return 0;
    if (top_p < 1) {
        cut_to_top_p(probs, size, total, top_p, logits);
        total = sum_of(probs, size);
    }
    for (int64_t i = 0; i < size; i++)
        probs[i] *= (float)(1 / total);
    return 1;
}

int64_t fr_sample(const float *probs, int64_t n, double number) {
    double total = sum_of(probs, n);
    double sum = 0;
    int64_t last = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!(probs[i] > 0)) continue;
        sum += probs[i];
        last = i; /* the sample if rounding lets the number exceed all sums */
        if (number * total < sum) break;
    }
    return last;
}

int64_t fr_candidate_token(const fr_candidates *of, int64_t place) {
    if (place >= of->outputs) return of->extra[place - of->outputs];
    return of->names ? of->names[place] : place;
}

/* The place of a token, or -1. */
static int64_t place_of(const fr_candidates *of, int64_t token) {
    if (of->places && of->places[token] >= 0) return of->places[token];
    if (!of->places && token < of->outputs) return token;
    for (int i = 0; i < of->extras; i++) {
        if (of->extra[i] == token) return of->outputs + i;
    }
    return -1;
}

/* A number in (0, 1) that depends on a sampler's key and an index: SplitMix64. */
static double uniform(uint64_t key, uint64_t index) {
    uint64_t bits = key + (index + 1) * 0x9E3779B97F4A7C15u;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
    bits ^= bits >> 31;
    return ((double)(bits >> 12) + 0.5) * 0x1p-52;
}

static float below_floor(float probability) { return probability < FLOOR ? probability : FLOOR; }

/* Draws from the parts of probabilities below FLOOR, by rejection. Returns -1 after many trials. */
static int64_t sample_below_floor(const fr_candidates *of, const float *probs, uint64_t key) {
    for (uint64_t at = REST + 1; at < REST + TRIALS; at += 2) {
        int64_t token = (int64_t)(uniform(key, at) * of->sampler_vocabulary);
        int64_t place = token < of->vocabulary ? place_of(of, token) : -1;
        if (place >= 0 && uniform(key, at + 1) * FLOOR < below_floor(probs[place])) return place;
    }
    return -1;
}

int64_t fr_sample_seeded(const fr_candidates *of, const float *probs, uint64_t key) {
    int64_t count = of->outputs + of->extras;
    int64_t winner = -1;
    double earliest = INFINITY; /* the time of the winner, of exponential clocks */
    double below = 0;           /* the sum of the parts below FLOOR */
    for (int64_t i = 0; i < count; i++) {
        below += below_floor(probs[i]);
        if (probs[i] <= FLOOR) continue;
        double time = -fr_log(uniform(key, fr_candidate_token(of, i))) / ((double)probs[i] - FLOOR);
        if (time < earliest) {
            earliest = time;
            winner = i;
        }
    }
    int is_rest_earlier = -fr_log(uniform(key, REST)) / below < earliest;
    if (winner >= 0 && !is_rest_earlier) return winner;
    int64_t place = sample_below_floor(of, probs, key);
    if (place >= 0) return place;
    return winner < 0 ? 0 : winner; /* hardly ever; any token may be drafted */
}
