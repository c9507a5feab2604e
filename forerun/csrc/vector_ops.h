/* What a forward computes between its products: one table of functions for each instruction set.

     residual += delta; normed = RMSNorm(residual)   norm
     queries and keys: bias, norm, rotation, scale    heads
     keys and values for the cache: float16           to_half
     silu(gate) x up                                  gate
     softmax and argmax of logits                     exps, argmax

   Sums have one fixed order, and sizes are multiples of 8 (except those of argmax and exps), so
   every table gives the same bits, whatever else runs. */
#ifndef FR_VECTOR_OPS_H
#define FR_VECTOR_OPS_H

#include <stdint.h>

typedef struct {
    /* Adds `added` to x in place, and writes RMSNorm(x) times the gain to `out`. NULL: no `added`,
       no gain. */
    void (*norm)(float *x, const float *added, const float *gain, float eps, int64_t d, float *out);
    /* Changes the heads x [count, d] in place: adds a bias [count, d], norms each head with a gain
       [d], rotates the first rotary_dims numbers of each by cos and sin [rotary_dims / 2], and
       multiplies by a scale. NULL and 0 skip a step. */
    void (*heads)(float *x, const float *bias, const float *gain, float eps, const float *cos,
                  const float *sin, int64_t rotary_dims, float scale, int64_t count, int64_t d);
    /* gate = silu(gate) * up */
    void (*gate)(float *gate, const float *up, int64_t n);
    /* x += added */
    void (*add)(float *x, const float *added, int64_t n);
    /* Converts to float16: rounds to even, cuts at +-65504 and keeps NaN. */
    void (*to_half)(const float *x, int64_t n, uint16_t *out);
    /* The index of the largest number, the first of equal ones; 0 if all are NaN. */
    int64_t (*argmax)(const float *x, int64_t n);
    /* out = exp((x - largest) * scale); returns the sum. `out` may be x. */
    float (*exps)(const float *x, float largest, float scale, int64_t n, float *out);
} fr_vector_ops;

/* The index of the chosen instruction set, and its table. */
int fr_chosen(void);
const fr_vector_ops *fr_chosen_vector_ops(void);

#endif
