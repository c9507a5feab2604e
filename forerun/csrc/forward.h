/* A whole forward of a model in one call.

     tokens or states [n]
       -> embedding -> layer 0 -> ... -> layer L - 1 -> norm -> normed [n, d] -> head -> logits
                         |                                                              [asks, ..]
                       keys and values of the cache, [row][group][slot][D]

   The caller owns all pointers and all memory that outlives a call. Calls from several threads
   wait for each other. Functions return 0, or FR_REFUSED if sizes do not fit together, before
   anything is written, or FR_NO_MEMORY.

   The numbers of a token are computed in one order, whatever tokens stand beside it and however
   many threads work. Keys and values are float32 or float16. We take float16 because it is 8 times
   finer than bfloat16, and is converted from float32 and back by one instruction on AVX2 (F16C)
   and on NEON. Numbers beyond 65504 are cut. */
#ifndef FR_FORWARD_H
#define FR_FORWARD_H

#include "forerun.h"
#include "threads.h"

#define FR_REFUSED (-1)
#define FR_NO_MEMORY (-2)

/* Activations of an MLP of gate g and values u; without values u is 1. */
enum {
    FR_SILU,         /* g sigmoid(g) u */
    FR_GELU,         /* g sigmoid(1.596 (g + 0.0447 g^3)) u, the approximation of GELU by tanh */
    FR_RELU_SQUARED, /* max(g, 0)^2 u */
    FR_CLAMPED,      /* g sigmoid(1.702 g) (u + 1), g at most 7 and u within +-7 */
    FR_ACTIVATIONS
};

/* A norm of d numbers: their gain and their bias. Without a gain there is no norm. */
typedef struct {
    const float *gain, *bias; /* [d] */
} fr_norm;

/* Positions of queries and keys. */
typedef struct {
    const float *cos, *sin; /* [positions, dims / 2] */
    const float *scale;     /* [positions] by which queries are multiplied too; may be NULL */
    int32_t dims;           /* the first numbers of a head, which are rotated */
    int32_t is_interleaved; /* a number is rotated with its neighbour; else a half with the other */
} fr_rotation;

/* How scores of experts become weights. */
enum {
    FR_SOFTMAX,           /* of all experts */
    FR_SOFTMAX_OF_CHOSEN, /* of those that are chosen */
    FR_SIGMOID,
    FR_SCORINGS
};

/* MLPs of E experts, of which a token takes k. */
typedef struct {
    fr_matrix router;                  /* [E, d] */
    fr_matrix shared_gate;             /* [1, d] of the layer's own MLP; may be empty */
    const fr_matrix *gate, *up, *down; /* [E] */
    const float *router_bias;          /* [E] */
    const float *choice_bias;          /* [E] is added to scores for the choice alone */
    const float *gate_bias, *up_bias;  /* [E, I] */
    const float *down_bias;            /* [E, d] */
    int32_t count, chosen;             /* E, k */
    int32_t scoring;                   /* FR_SOFTMAX, ... */
    int32_t norms_weights;             /* those of a token are divided by their sum */
    float factor;                      /* of weights; 0: none */
} fr_experts;

/* A decoder layer: attention of H heads of D numbers over G groups of keys and values, and an MLP
   of I numbers. What a layer lacks is NULL or 0. Matrices that lie in one may stay together:
   `q` has the outputs of q, k and v then, or `gate` those of gate and up.

     state -> attention_norm -> attention -> attention_after -> add -> mlp_norm -> MLP -> mlp_after
           -> add */
typedef struct {
    fr_matrix q, k, v, o, gate, up, down;
    fr_norm attention_norm, mlp_norm;             /* of what attention and the MLP read */
    fr_norm attention_after, mlp_after;           /* of what they add to the state */
    const float *q_bias, *o_bias;                 /* [H D], [d] */
    const float *k_bias, *v_bias;                 /* [G D] */
    const float *gate_bias, *up_bias, *down_bias; /* [I], [I], [d] */
    const float *q_norm, *k_norm; /* [D] gains of the norms of heads, or [H D] and [G D] */
    const float *sinks;           /* [H] scores of an entry without a value */
    const fr_experts *experts;    /* whose sum is added to the MLP, which may be empty then */
    int32_t window;     /* a token sees so many last entries, itself included; 0: it sees all */
    int32_t rotation;   /* its number among the model's; -1: heads are not rotated */
    int32_t activation; /* FR_SILU, ... */
    int32_t norms_heads_together; /* q_norm norms all heads of a token as one, likewise k_norm */
    int32_t norms_heads_rotated;  /* they are normed after their rotation */
    int32_t is_parallel;          /* the MLP reads what attention reads, and mlp_norm is empty */
} fr_layer;

/* A factor or a limit of 0 is none. */
typedef struct {
    int32_t d;                   /* numbers of a token's state */
    int32_t heads, groups, size; /* H, G, D */
    int32_t layers;
    int32_t positions; /* rows of the rotations */
    int32_t rotations;
    int32_t vocabulary;
    int32_t embed_format;
    int32_t norms_by_mean;       /* norms subtract the mean first (LayerNorm); else they are RMS */
    const fr_layer *layer;       /* [layers] */
    const fr_rotation *rotation; /* [rotations] */
    fr_norm norm;                /* after the last layer */
    const void *embed;           /* [vocabulary] rows of embed_row bytes, as in the file */
    int64_t embed_row;
    fr_matrix head;  /* the whole LM head */
    fr_matrix fuse;  /* [d, 2 d] first matrix of a head over hidden states, for states beside the
                        normed embeddings of their next tokens; empty for other models */
    fr_matrix alone; /* [d, d] the same for states without tokens; may be empty */
    float eps;
    float attention_scale;  /* of scores; 0: 1 / sqrt(D) */
    float score_cap;        /* scores s become cap tanh(s / cap), */
    float logit_cap;        /* and so do logits, after their factor */
    float embedding_factor; /* of embeddings, */
    float residual_factor;  /* of what attention and MLPs add to the state, */
    float logit_factor;     /* and of logits */
} fr_model;

/* The keys and values of one layer. The entry of row r, group g and slot s begins at the number
   r row + g group + s D. */
typedef struct {
    void *keys, *values;
    int64_t row, group; /* strides */
    int32_t rows, capacity;
    int32_t is_float32; /* else they are float16 */
} fr_cache;

/* n new tokens. The keys and values of each are stored in a slot of its row of the cache. A token
   sees, in this order, the slots of its row below `length`, and `seen` slots of its path, which
   include its own slot. It sees slots that are written in the same batch only if their tokens come
   before it. The window of a layer counts entries from the end.

   So a token of a chain has length = slot + 1 and seen = 0. A node of a tree has the committed
   length, and its ancestors and itself as its path. */
typedef struct {
    int32_t n;
    int32_t path;          /* columns of `paths` */
    const int32_t *tokens; /* [n]; NULL: `states` replace the embeddings */
    const float *states;   /* [n, d] inputs of the first layer; a head over hidden states takes
                              tokens and states */
    const int32_t *row, *slot, *position, *length; /* [n] */
    const int32_t *seen, *paths;                   /* [n] and [n, path]; NULL: no paths */
    float *normed;         /* [n, d] states after the last norm; NULL: not wanted */
    const int32_t *asked;  /* [asks] indices of the tokens whose logits are wanted */
    const fr_matrix *head; /* NULL: the model's */
    const int32_t *extra;  /* [extras] tokens whose logits come from the model's own head, and
                              follow those of `head` */
    float *logits;         /* [asks, outputs of the head + extras] */
    const int32_t *after;  /* [captures] numbers of layers, from 0 to all */
    float *captured;       /* [n, captures, d] the states after so many layers */
    int32_t asks, extras, captures;
} fr_batch;

/* Whether a layer's MLP has a gate, beside its values or in one matrix with them. */
static inline int fr_is_gated(const fr_layer *l) {
    return l->up.panels != NULL || l->gate.outputs != l->down.inputs;
}

int fr_forward(const fr_model *model, const fr_cache *cache, const fr_batch *batch);

/* fr_forward of a batch that is known to fit, for a thread between fr_enter and fr_leave. */
int fr_run_batch(const fr_model *model, const fr_cache *cache, const fr_batch *batch);

/* Checks that callers of several kinds share; each returns whether all is well. */
int fr_model_fits(const fr_model *m);
int fr_batch_fits(const fr_model *m, const fr_cache *cache, const fr_batch *b);
int fr_matrix_fits(const fr_matrix *m, int64_t outputs, int64_t inputs);
int fr_head_fits(const fr_model *m, const fr_matrix *head);

/* Whether all n numbers are in [0, end). */
int fr_are_below(const int32_t *x, int64_t n, int64_t end);

#endif
