/* Drafted chains (chains.h).

   Buffers of a chain, in one piece of memory:

     row [count] | slot [count] | length [count] | logits [outputs + extras] */
#include "chains.h"

#include <stdlib.h>

#include "sampling.h"
#include "vector_ops.h"

static int fits_caches(const fr_model *m, const fr_cache *cache, int64_t row, int64_t end) {
    for (int i = 0; i < m->layers; i++) {
        if (end > cache[i].capacity || row < 0 || row >= cache[i].rows) return 0;
    }
    return 1;
}

static int head_names_fit(const fr_model *m, const fr_chain_request *c, const fr_matrix *head) {
    int64_t outputs = head->outputs;
    if (!c->names && outputs > m->vocabulary) return 0;
    if (c->names && !fr_are_below(c->names, outputs, m->vocabulary)) return 0;
    if (c->names && c->keys && !c->places) return 0;
    for (int64_t i = 0; c->places && i < m->vocabulary; i++) {
        if (c->places[i] >= outputs) return 0;
    }
    return 1;
}

static int extra_tokens_fit(const fr_model *m, const fr_chain_request *c) {
    int64_t end = m->vocabulary < m->head.outputs ? m->vocabulary : m->head.outputs;
    return fr_head_fits(m, &m->head) && fr_are_below(c->extra, c->extras, end);
}

static int chain_fits(const fr_model *m, const fr_cache *cache, const fr_chain_request *c,
                      const fr_matrix *head) {
    int64_t end = (int64_t)c->length + c->count + c->max_tokens - 1;
    if (c->length < 0 || c->count < 1 || c->max_tokens < 1) return 0;
    if (c->extras < 0 || c->ended < 0) return 0;
    if (end > m->positions || !fits_caches(m, cache, c->row, end)) return 0;
    if (!m->embed || !fr_are_below(c->pending, c->count, m->vocabulary)) return 0;
    if (m->fuse.panels) return 0; /* a head over hidden states drafts by fr_grow */
    if (!fr_head_fits(m, head) || !head_names_fit(m, c, head)) return 0;
    if (c->extras && !extra_tokens_fit(m, c)) return 0;
    /* Sampled tokens come from numbers or from keys, not from both. */
    int has_numbers = c->numbers != NULL;
    int has_keys = c->keys != NULL;
    return !c->probs || has_numbers != has_keys;
}

typedef struct {
    int64_t place; /* of the logits; -1: they are NaN */
    float probability;
} drafted_token;

static drafted_token choose_best(float *logits, int64_t size) {
    const fr_vector_ops *ops = fr_chosen_vector_ops();
    int64_t place = ops->argmax(logits, size);
    return (drafted_token){place, 1 / ops->exps(logits, logits[place], 1, size, logits)};
}

/* Samples the token of an index in the draft. */
static drafted_token sample(const fr_chain_request *c, const fr_candidates *candidates,
                            float *logits, int index) {
    int64_t size = candidates->outputs + candidates->extras;
    float *probs = c->keys ? c->probs : c->probs + index * size;
    if (!fr_make_probs(logits, size, c->inverse_temperature, c->top_p, probs)) {
        return (drafted_token){-1, 0};
    }
    int64_t place = c->numbers ? fr_sample(probs, size, c->numbers[index])
                               : fr_sample_seeded(candidates, probs, c->keys[index]);
    return (drafted_token){place, probs[place]};
}

static int is_one_of(int32_t token, const int32_t *tokens, int count) {
    for (int i = 0; i < count; i++) {
        if (token == tokens[i]) return 1;
    }
    return 0;
}

/* Drafts, in a thread that has the pool. `room` has the buffers. */
static int draft(const fr_model *m, const fr_cache *cache, const fr_chain_request *c,
                 const fr_matrix *head, void *room) {
    fr_candidates candidates = {
        .outputs = head->outputs,
        .names = c->names,
        .places = c->places,
        .extra = c->extra,
        .extras = c->extras,
        .vocabulary = m->vocabulary,
        .sampler_vocabulary = c->sampler_vocabulary,
    };
    int64_t size = candidates.outputs + candidates.extras;
    int32_t *row = room;
    int32_t *slot = row + c->count;
    int32_t *length = slot + c->count;
    float *logits = (float *)(length + c->count);
    int32_t last = c->count - 1;
    for (int i = 0; i < c->count; i++) {
        row[i] = c->row;
        slot[i] = c->length + i;
        length[i] = slot[i] + 1;
    }
    fr_batch batch = {
        .n = c->count,
        .tokens = c->pending,
        .row = row,
        .slot = slot,
        .position = slot,
        .length = length,
        .asked = &last,
        .asks = 1,
        .head = head,
        .extra = c->extra,
        .extras = c->extras,
        .logits = logits,
    };
    float product = 1;
    for (int i = 0; i < c->max_tokens; i++) {
        int failure = fr_run_batch(m, cache, &batch);
        if (failure) return failure;
        drafted_token token =
            c->probs ? sample(c, &candidates, logits, i) : choose_best(logits, size);
        if (token.place < 0) return i;
        c->drafted[i] = (int32_t)fr_candidate_token(&candidates, token.place);
        c->probabilities[i] = token.probability;
        product *= token.probability;
        /* Written so that NaN ends the draft. */
        if (!(token.probability >= c->min_probability && product >= c->min_product)) return i + 1;
        if (is_one_of(c->drafted[i], c->ends, c->ended)) return i + 1;
        slot[0] = c->length + c->count + i;
        length[0] = slot[0] + 1;
        last = 0;
        batch.tokens = c->drafted + i;
        batch.n = 1;
    }
    return c->max_tokens;
}

int fr_chain(const fr_model *model, const fr_cache *cache, const fr_chain_request *chain) {
    const fr_matrix *head = chain->head ? chain->head : &model->head;
    if (!fr_model_fits(model) || !chain_fits(model, cache, chain, head)) return FR_REFUSED;
    size_t integers = 3 * (size_t)chain->count;
    size_t floats = (size_t)head->outputs + chain->extras;
    void *room = malloc(integers * sizeof(int32_t) + floats * sizeof(float));
    if (!room) return FR_NO_MEMORY;
    fr_enter();
    int result = draft(model, cache, chain, head, room);
    fr_leave();
    free(room);
    return result;
}
