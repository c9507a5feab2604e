/* What a forward computes between its products: one table of functions for each instruction set.

     normed = norm of the state                       norm
     queries and keys: bias, norm, rotation, scale    heads
     keys and values for the cache: float16           to_half
     silu(gate) x up, for example                     activate
     factors and limits                               scale
     softmax and argmax of logits                     exps, argmax

   Sums have one fixed order, and sizes are multiples of 8 (except those of argmax, exps and scale),
   so every table gives the same bits, whatever else runs. */
#ifndef FR_VECTOR_OPS_H
#define FR_VECTOR_OPS_H

#include <stdint.h>

/* What is done with the heads of a token. NULL and 0 skip a step. */
typedef struct {
    const float *bias;      /* [count, d] */
    const float *gain;      /* of the norm: [d], or [count, d] if heads are normed together */
    const float *cos, *sin; /* [dims / 2] */
    int64_t dims;           /* the first numbers of a head, which are rotated */
    float eps, scale;
    int is_interleaved, norms_together, norms_rotated; /* as in fr_rotation and fr_layer */
} fr_head_steps;

typedef struct {
    /* Writes RMSNorm(x) times the gain plus the bias to `out`, which may be x. NULL: 1 and 0. */
    void (*norm)(const float *x, const float *gain, const float *bias, float eps, int64_t d,
                 float *out);
    /* The same of the numbers less their mean. */
    void (*norm_by_mean)(const float *x, const float *gain, const float *bias, float eps, int64_t d,
                         float *out);
    /* Changes the heads x [count, d] in place: adds a bias, norms and rotates them, and multiplies
       them by a scale. */
    void (*heads)(float *x, const fr_head_steps *steps, int64_t count, int64_t d);
    /* Replaces the gate by an activation (forward.h) times `up`, which may be NULL. */
    void (*activate)(int activation, float *gate, const float *up, int64_t n);
    /* x becomes x factor and then, unless the cap is 0, cap tanh(x / cap). Any n. */
    void (*scale)(float *x, float factor, float cap, int64_t n);
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
