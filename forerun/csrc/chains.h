/* A whole drafted chain of one row in one call.

     committed positions   pending tokens   drafted tokens
     0 ... length - 1      count of them    at most max_tokens

   Runs the pending tokens, then drafts token by token. The draft ends with a token that is less
   probable than `min_probability`, or that brings the product of all probabilities below
   `min_product`, or that is one of `ends`. The last token is not run.

   Without `probs`, each token is the argmax: the first of equal ones, where the extra tokens come
   last. With `probs`, it is sampled from the softmax of the logits times `inverse_temperature`, cut
   to `top_p`: by `numbers` in [0, 1), and probs is [max_tokens, S]; or by the seeded samplers of
   `keys` (sampling.h), and probs is [S]. S counts the outputs of the head and the extra tokens. */
#ifndef FR_CHAINS_H
#define FR_CHAINS_H

#include "forward.h"

typedef struct {
    int32_t row, length, count, max_tokens;
    const int32_t *pending; /* [count] */
    const fr_matrix *head;  /* NULL: the model's; else its rows of the hot tokens */
    const int32_t *names;   /* [outputs] the hot tokens */
    const int32_t *places;  /* [vocabulary] the index of each token in `names`, or -1 */
    const int32_t *extra;   /* [extras] tokens whose logits come from the model's own head */
    const int32_t *ends;    /* [ended] */
    const double *numbers;  /* [max_tokens] */
    const uint64_t *keys;   /* [max_tokens] */
    float *probs;
    int32_t *drafted;           /* [max_tokens] */
    float *probabilities;       /* [max_tokens] of the drafted tokens */
    int32_t extras, ended;      /* lengths of `extra` and `ends` */
    int32_t sampler_vocabulary; /* the size of the vocabulary that seeded samplers draw from */
    float min_probability, min_product, inverse_temperature, top_p;
} fr_chain_request;

/* Returns the number of drafted tokens, FR_REFUSED or FR_NO_MEMORY (forward.h). */
int fr_chain(const fr_model *model, const fr_cache *cache, const fr_chain_request *chain);

#endif
