/* A whole forward, and a whole drafted chain, in one call. The caller owns all pointers and all memory that outlives a
   call. Calls from several threads wait for each other. Functions return 0 (fr_chain: the number of tokens), FR_REFUSED
   if sizes do not fit together, before anything is written, or FR_NO_MEMORY.

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
    int32_t window;                        /* the last entries that a token sees, itself included; 0: all */
    int32_t turned;                        /* numbers of a head that are rotated, the first half with the second */
} fr_layer;

typedef struct {
    int32_t d, heads, groups, size;  /* size: D */
    int32_t layers, positions;       /* positions: length of cos and sin */
    int32_t vocabulary, embed_format;
    const fr_layer *layer;
    const float *norm;               /* [d] gain after the last layer; NULL: no norm */
    const float *cos, *sin;          /* [positions, turned / 2] */
    const void *embed;               /* [vocabulary] rows of embed_row bytes, as in the file */
    int64_t embed_row;
    fr_matrix head;                  /* the whole LM head */
    fr_matrix fuse, alone;           /* of a head over hidden states, else empty: its first matrix [d, 2 d], for states beside
                                        the normed embeddings of the next tokens, and [d, d], for states without tokens */
    float eps;
} fr_model;

/* One layer's keys and values: the entry of row r, group g and slot s begins at r row + g group + s D. */
typedef struct {
    void *keys, *values;
    int64_t row, group;
    int32_t rows, capacity;
    int32_t wide; /* whether they are float32 */
} fr_cache;

/* n tokens. Each is stored in a slot of its row of the cache. It sees, in this order, the row's slots below `length` and
   `seen` slots of its path. These include its own slot, and slots of this batch only if they come before it. Its window
   counts them from the end. So a chain's token has length = slot + 1 and seen = 0; a tree's has the committed length,
   and its ancestors as path. Pointers of outputs that are not wanted are NULL. */
typedef struct {
    int32_t n, path;        /* path: columns of paths */
    const int32_t *tokens;  /* [n], or NULL: */
    const float *states;    /* [n, d] inputs of the first layer in place of embeddings; a head takes both */
    const int32_t *row, *slot, *position, *length; /* [n] */
    const int32_t *seen, *paths;                   /* [n], [n, path]; NULL: none */
    float *normed;          /* [n, d] after the last norm */
    const int32_t *asked;   /* [asks] indices of the tokens whose logits are wanted */
    const fr_matrix *head;  /* NULL: the model's */
    const int32_t *extra;   /* [extras] tokens whose logits come from the model's own head, after those of `head` */
    float *logits;          /* [asks, outputs of the head + extras] */
    const int32_t *after;   /* [captures] numbers of layers, 0 to all, */
    float *captured;        /* [n, captures, d] and the states after that many */
    int32_t asks, extras, captures;
} fr_batch;

int fr_forward(const fr_model *model, const fr_cache *cache, const fr_batch *batch);

/* A draft of one row: run the `pending` tokens after `length` committed positions, then draft up to `most` tokens. The
   draft ends with a token that is less probable than `least`, or that brings the product of all probabilities below
   `product`, or that is one of `ends`. The last token is not run.

   Without `probs` each token is the argmax: of equal ones the first, the extra tokens last. With `probs` it is sampled
   from the softmax of logits times `turn`, cut to `top_p`: by `numbers` in [0, 1), with probs [most, S], or by the seeded
   samplers of `keys` (forerun/sampling/seeded.py), with probs [S]. S counts the head's outputs and the extra tokens. */
typedef struct {
    int32_t row, length, count, most;
    const int32_t *pending;  /* [count] */
    const fr_matrix *head;   /* NULL: the model's; else its rows of the hot tokens: */
    const int32_t *names;    /* [outputs] the hot tokens */
    const int32_t *places;   /* [vocabulary] index of each token in `names`, or -1 */
    const int32_t *extra;    /* [extras] */
    const int32_t *ends;     /* [ended] */
    const double *numbers;   /* [most] */
    const uint64_t *keys;    /* [most] */
    float *probs;
    int32_t *drafted;        /* [most] */
    float *probabilities;    /* [most] of the drafted tokens */
    int32_t extras, ended;
    int32_t among;           /* size of the vocabulary of seeded samplers */
    float least, product, turn, top_p;
} fr_chain_request;

int fr_chain(const fr_model *model, const fr_cache *cache, const fr_chain_request *chain);

/* Drafts of R rows by a head over hidden states: the next `most` places of a search with w beams. Run the `count`
   features of each row with the tokens after them, after `length` committed positions, then states from states alone or,
   if `alone` is empty and w is 1, with drafted tokens. The logits of a beam are those of its place, plus old ones that
   the row has for it, plus the token information of its last token. At each place the `nodes` paths with the largest
   values are found, sums of the logs of their tokens' probabilities, calibrated by `curves`; the first w are the next
   beams. A path without a value, or beyond its row's limit, is worth -inf.

   With a `start`, the number of places of earlier calls, `features` are the last states [R, d] of the call before, each
   count is 1, and `length` counts the start - 1 states that were run. */
typedef struct {
    int32_t rows, n, start, most, width, nodes, context; /* n: sum of count; context: positions beyond are its last */
    const int32_t *row, *length, *count, *limit; /* [R]; limit: places that a row may have in all */
    const int32_t *pending;  /* [n] */
    float *features;         /* [n, d]; overwritten */
    float *states;           /* [most, R, d] of the places */
    const fr_matrix *head;   /* of the hot tokens: */
    const int32_t *names;    /* [S] */
    float *logits;           /* [most, R, S] of the states alone */
    const fr_matrix *information; /* [S, r]; NULL: none */
    const float *token_states;    /* [vocabulary, r] its inputs */
    const float *const *old; /* [R] of each row, [olds, S] */
    const int32_t *olds;     /* [R] */
    const float *curves;     /* [R, most, 2] shift and slope; NULL: none */
    int32_t *beams;          /* [R, w] last tokens and values of the paths so far; those of this call afterwards */
    double *values;
    int32_t *tokens, *parents; /* [R, most, nodes] each path's last token, and which beam it continues */
    double *found;           /* [R, most, nodes] their values, the largest first */
} fr_growth;

int fr_grow(const fr_model *model, const fr_cache *cache, const fr_growth *growth);

/* Packs all panels of a matrix (fr_pack), by all threads. */
int fr_pack_all(int format, const void *rows, size_t bytes, int outputs, int inputs, void *panels);

/* Multiplies inputs [rows, inputs] to out [rows, outputs], by all threads. */
int fr_multiply(const fr_matrix *m, const float *x, int rows, float *out);

#endif
