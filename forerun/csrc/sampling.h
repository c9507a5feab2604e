/* Distributions from logits, and tokens that are sampled from them. */
#ifndef FR_SAMPLING_H
#define FR_SAMPLING_H

#include <stdint.h>

/* The tokens that the logits [outputs + extras] of a head belong to. */
typedef struct {
    int64_t outputs;
    const int32_t *names;  /* [outputs]; NULL: output i is token i */
    const int32_t *places; /* [vocabulary] the index of each token in `names`, or -1 */
    const int32_t *extra;  /* [extras] */
    int32_t extras;
    int32_t vocabulary;
    int32_t sampler_vocabulary; /* the size of the vocabulary that seeded samplers draw from */
} fr_candidates;

int64_t fr_candidate_token(const fr_candidates *of, int64_t place);

/* Writes the softmax of `size` logits times `inverse_temperature`, cut to `top_p`. The logits are
   overwritten. Returns 0 if they give no distribution, because one is NaN. */
int fr_make_probs(float *logits, int64_t size, float inverse_temperature, float top_p,
                  float *probs);

/* The place at which the cumulated probabilities pass a number in [0, 1). */
int64_t fr_sample(const float *probs, int64_t n, double number);

/* The place that the sampler with this key draws (forerun/sampling/seeded.py). */
int64_t fr_sample_seeded(const fr_candidates *of, const float *probs, uint64_t key);

#endif
