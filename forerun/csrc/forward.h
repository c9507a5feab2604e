/* A whole forward, and a draft's chain, in one call. Pointers are the caller's, and all memory that outlives a call. Calls
   from several threads wait for each other. Functions return 0 (fr_chain: how many tokens), FR_REFUSED where sizes do
   not fit together, and then nothing has been written, or FR_NO_MEMORY.

   Every token's numbers are made in one order, whatever tokens stand beside it and however many threads work. Keys and
   values are float32 or IEEE's half precision: 8 times finer than bfloat16, and one instruction from float32 and back on
   AVX2 (F16C) and on NEON; larger numbers than 65504 are cut. */
#ifndef FR_FORWARD_H
#define FR_FORWARD_H
#include "forerun.h"
#include "threads.h"

#define FR_REFUSED -1
#define FR_NO_MEMORY -2

/* A decoder layer: two RMS norms, attention of H heads of D numbers over G heads of keys, a gated MLP. NULL and 0: none. */
typedef struct {
    fr_matrix q, k, v, o, gate, up, down;
    const float *first, *second;           /* [d] gains of the norms before attention and before the MLP */
    const float *q_bias, *k_bias, *v_bias; /* [H D], [G D], [G D] */
    const float *q_norm, *k_norm;          /* [D] gains */
    int32_t window;                        /* how many entries a token sees, itself counted; 0: all */
    int32_t turned;                        /* how many numbers of a head are rotated, the first half with the second */
} fr_layer;

typedef struct {
    int32_t d, heads, groups, size;  /* size: D */
    int32_t layers, positions;       /* positions: that cos and sin have */
    int32_t vocabulary, embed_format;
    const fr_layer *layer;
    const float *norm;               /* [d] gain after the last layer; NULL: no norm */
    const float *cos, *sin;          /* [positions, turned / 2] */
    const void *embed;               /* the file's rows, [vocabulary] of embed_row bytes */
    int64_t embed_row;
    fr_matrix head;                  /* the whole LM head */
    fr_matrix fuse, alone;           /* of a head over hidden states, else none: its first matrix, [d, 2 d] of states beside
                                        the normed embeddings of the tokens after them, and [d, d] of states without tokens */
    float eps;
} fr_model;

/* One layer's keys and values: the entry of row r, group g and slot s begins at r row + g group + s D. */
typedef struct {
    void *keys, *values;
    int64_t row, group;
    int32_t rows, capacity;
    int32_t wide; /* whether they are float32 */
} fr_cache;

/* n tokens. Each goes to a slot of its row of the cache, and sees, in this order, the row's slots below `length`, and
   `seen` slots of its path; its own slot is among them, other tokens' slots if they stand before it in the batch. Its
   window counts these from the end. So a chain's token has length = slot + 1 and seen = 0, a tree's the committed
   length and its ancestors. Only some outputs are wanted: the others' pointers are NULL. */
typedef struct {
    int32_t n, path;        /* path: slots that each token has room for in paths */
    const int32_t *tokens;  /* [n], or NULL: */
    const float *states;    /* [n, d] what goes into the first layer instead of embeddings; a head takes both */
    const int32_t *row, *slot, *position, *length; /* [n] */
    const int32_t *seen, *paths;                   /* [n], [n, path]; NULL: none */
    float *normed;          /* [n, d] after the last norm */
    const int32_t *asked;   /* [asks] tokens whose logits are wanted, by their places */
    const fr_matrix *head;  /* NULL: the model's */
    const int32_t *extra;   /* [extras] tokens of the model's own head, whose logits follow the head's */
    float *logits;          /* [asks, outputs of the head + extras] */
    int32_t asks, extras;
} fr_batch;

int fr_forward(const fr_model *model, const fr_cache *cache, const fr_batch *batch);

/* A model's own continuation of one row: the tokens `pending` after `length` committed positions, then up to `most`
   tokens drafted, ending with one whose probability is below `least`, or with which the product of all is below
   `product`, or which is one of `ends`. The last token is not run.

   Tokens are the argmax (of equal ones the first of the head's, then of the extra ones), or, where there are `probs`,
   sampled from distributions of logits times `turn`, of the most probable tokens that have `top_p` of all: by `numbers`
   in [0, 1), probs [most, S], or else by the races of `keys` (forerun/sampling/seeded.py), probs [S]; S is the head's
   outputs and the extra ones.

   A head over hidden states drafts from `states`: features before the pending tokens or, with a `start`, its own last
   state before the one pending token. Logits of places that old ones have are added up with them, and all with the token
   information of the token before. States without tokens follow, or if `alone` is none, states beside drafted tokens. */
typedef struct {
    int32_t row, length, count, most;
    const int32_t *pending;  /* [count] */
    const fr_matrix *head;   /* NULL: the model's; else a hot part of it: */
    const int32_t *names;    /* [outputs] its tokens */
    const int32_t *places;   /* [vocabulary] where tokens stand in it, -1 for none */
    const int32_t *extra;    /* [extras] */
    const int32_t *ends;     /* [ended] */
    const double *numbers;   /* [most] */
    const uint64_t *keys;    /* [most] */
    float *probs;
    int32_t *drafted;        /* [most] */
    float *chances;          /* [most] their probabilities */
    float *states;           /* [count, d] of a head, else NULL; replaced by those that it makes, the last one last */
    float *logits;           /* [most, S] of its states */
    const float *old;        /* [olds, S] */
    const fr_matrix *information; /* [S, r]; NULL: none */
    const float *token_states;    /* [vocabulary, r] its inputs */
    int32_t extras, ended;
    int32_t among;           /* races are run by this many tokens */
    int32_t start, olds;     /* start: tokens that earlier calls drafted */
    float least, product, turn, top_p;
    float weight;            /* of old logits */
} fr_chain_request;

int fr_chain(const fr_model *model, const fr_cache *cache, const fr_chain_request *chain);

/* All panels of a matrix by all threads, as fr_pack makes them. */
int fr_pack_all(int format, const void *rows, size_t bytes, int outputs, int inputs, void *panels);

/* out [rows, outputs] of inputs [rows, inputs], by all threads. */
int fr_multiply(const fr_matrix *m, const float *x, int rows, float *out);

#endif
