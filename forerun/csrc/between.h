/* What a forward computes between its products, in one table for each instruction set. Sums have one fixed order, and
   sizes are multiples of 8, so every table gives the same bits, whatever else runs. */

#ifndef FR_BETWEEN_H
#define FR_BETWEEN_H

#include <stdint.h>

typedef struct {
    /* out = RMSNorm(x) times the gain, if any; `added`, if any, is added to x first. */
    void (*norm)(float *x, const float *added, const float *gain, float eps, int64_t d, float *out);
    /* Heads [count, d] in place: plus a bias, normed with a gain [d], `turned` numbers of each rotated by cos and sin
       [turned / 2], times a scale; NULL and 0 skip a step. */
    void (*heads)(float *x, const float *bias, const float *gain, float eps, const float *cos, const float *sin,
                  int64_t turned, float scale, int64_t count, int64_t d);
    void (*gate)(float *gate, const float *up, int64_t n); /* gate = silu(gate) * up */
    void (*add)(float *x, const float *added, int64_t n);
    /* To float16, rounded to even and clamped to +-65504; NaN stays NaN. */
    void (*to_half)(const float *x, int64_t n, uint16_t *out);
    int64_t (*argmax)(const float *x, int64_t n); /* the first of equal ones; 0 if all are NaN */
    /* out = exp((x - most) * scale), and their sum. */
    float (*exps)(const float *x, float most, float scale, int64_t n, float *out);
} fr_between;

int fr_chosen(void); /* the index of the chosen instruction set */
const fr_between *fr_between_chosen(void);

#endif
