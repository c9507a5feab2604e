/* The tokens of a batch that go through all layers together, and their buffers.

   What a layer computes, and the buffer that it lies in:

     residual --norm--> normed --q, k, v--> qkv --attention--> mixed --o--> delta --+
        +<----------------------------------------------------------- norm, add ----+
        +-----norm--> normed --gate, up--> gate_up --silu(gate) x up, down--> delta --+
        +<----------------------------------------------------------- norm, add ------+ */
#ifndef FR_TOKEN_BLOCK_H
#define FR_TOKEN_BLOCK_H

#include "attention.h"
#include "forward.h"
#include "vector_ops.h"

#define FR_BLOCK_TOKENS 256

/* Adjacent tokens of a block in one row of the cache, which share tiles of keys and values. */
typedef struct {
    int start, count;
} fr_token_run;

/* Buffers of a layer with experts. A place is a token at one of the k experts that it chose. The
   places of an expert are adjacent. */
typedef struct {
    float *scores;   /* [n, E] */
    float *weights;  /* [n, k] */
    int32_t *chosen; /* [n, k] experts, */
    int32_t *place;  /* [n, k] and the token's places there */
    int32_t *token;  /* [places] */
    int32_t *expert; /* [places] */
    int32_t *first;  /* [E + 1] places */
    int32_t *active; /* [active_count] experts with places */
    float *inputs;   /* [places, d] */
    float *gate_up;  /* [places, 2 I] */
    float *outputs;  /* [places, d] */
    void *records;   /* of inputs, then of gate_up */
    int active_count;
} fr_expert_room;

typedef struct {
    const fr_model *model;
    const fr_layer *layer; /* the one that runs, and its cache */
    const fr_cache *cache;
    const fr_batch *batch;
    const fr_vector_ops *ops;
    const fr_attention_steps *attention;
    int start, n;        /* the tokens start to start + n - 1 of the batch */
    int64_t query_width; /* H D */
    int64_t qkv_width;   /* (H + 2 G) D */
    int64_t inner;       /* inputs of the layer's `down` */
    float *residual;     /* [n, d] */
    float *normed;       /* [n, d] */
    float *qkv;          /* [n, qkv_width] queries, keys and values */
    float *mixed;        /* [n, query_width] */
    float *gate_up;      /* [n, 2 inner]; the inputs [n, 2 d] of `fuse` before the first layer */
    float *delta;        /* [n, d] what is added to the residual next */
    void *records;       /* of quantised inputs */
    int64_t longest;     /* entries that a token sees at most */
    int64_t score_width; /* floats of a query's scores */
    float *scores;       /* of each thread or, if threads share units of attention, of each unit */
    float *tiles;        /* of each thread */
    fr_token_run runs[FR_BLOCK_TOKENS];
    int run_count;
    fr_expert_room experts;
} fr_token_block;

/* Divides the tokens into runs. */
void fr_find_runs(fr_token_block *b);

/* How many queries have their scores at the same time, at most, for blocks of so many tokens. */
int64_t fr_score_places(const fr_model *m, int64_t tokens, int64_t longest);

/* The MLP of a layer with experts: from `normed`, and `delta` if the layer has an MLP of its own,
   to `delta`, by all threads. */
void fr_mix_experts(fr_token_block *b);

/* Attention of a layer: from `qkv` and the cache to `mixed`, by all threads. */
void fr_attend(const fr_token_block *b);

#endif
