/* Mixtures of experts (token_block.h): the tokens of a block are grouped by the experts that they
   chose, so that each expert's weights are read once.

     normed -> router -> scores [n, E] -> chosen, weights [n, k]
     places   0 1 2      3        4 5 ...      token j of a group is at place first + j
     expert   2 2 2      7        9 9 ...
     inputs [places, d] -> gate, up -> gate_up [places, 2 I] -> down -> outputs [places, d]
     delta = the sum of weights x outputs, in the order in which a token chose

   The numbers of a token do not depend on its neighbours, because products and sums do not. */
#include <string.h>

#include "multiply.h"
#include "numbers.h"
#include "token_block.h"

static int32_t best_left(const float *scores, const float *bias, const int32_t *taken, int count,
                         int32_t experts) {
    int32_t best = -1;
    float highest = 0;
    for (int32_t e = 0; e < experts; e++) {
        float score = bias ? scores[e] + bias[e] : scores[e];
        int is_taken = 0;
        for (int i = 0; i < count; i++)
            is_taken |= taken[i] == e;
        if (is_taken || (best >= 0 && !(score > highest))) continue;
        best = e;
        highest = score;
    }
    return best;
}

/* Replaces logits by exp(logit - largest) over their sum. */
static void softmax(const fr_vector_ops *ops, float *x, int64_t n) {
    float total = ops->exps(x, x[ops->argmax(x, n)], 1, n, x);
    for (int64_t i = 0; i < n; i++)
        x[i] /= total;
}

static void sigmoid(const fr_vector_ops *ops, float *x, int64_t n) {
    ops->exps(x, 0, -1, n, x);
    for (int64_t i = 0; i < n; i++)
        x[i] = 1 / (1 + x[i]);
}

/* Chooses the experts of a token, and their weights. */
static void choose(const fr_token_block *b, int64_t token) {
    const fr_experts *e = b->layer->experts;
    float *scores = b->experts.scores + token * e->count;
    int32_t *chosen = b->experts.chosen + token * e->chosen;
    float *weights = b->experts.weights + token * e->chosen;
    float total = 0;
    for (int i = 0; e->router_bias && i < e->count; i++)
        scores[i] += e->router_bias[i];
    if (e->scoring == FR_SOFTMAX) softmax(b->ops, scores, e->count);
    if (e->scoring == FR_SIGMOID) sigmoid(b->ops, scores, e->count);
    for (int i = 0; i < e->chosen; i++) {
        chosen[i] = best_left(scores, e->choice_bias, chosen, i, e->count);
        weights[i] = scores[chosen[i]];
    }
    if (e->scoring == FR_SOFTMAX_OF_CHOSEN) softmax(b->ops, weights, e->chosen);
    for (int i = 0; i < e->chosen; i++)
        total += weights[i];
    for (int i = 0; i < e->chosen; i++) {
        if (e->norms_weights) weights[i] /= total;
        if (e->factor != 0) weights[i] *= e->factor;
    }
}

static void choose_job(void *argument, int64_t first, int64_t last, int thread) {
    (void)thread;
    for (int64_t i = first; i < last; i++)
        choose(argument, i);
}

/* Gives each token a place in the group of each of its experts. */
static void group(fr_token_block *b) {
    const fr_experts *e = b->layer->experts;
    fr_expert_room *room = &b->experts;
    int64_t places = (int64_t)b->n * e->chosen;
    memset(room->first, 0, (size_t)(e->count + 1) * sizeof(int32_t));
    for (int64_t i = 0; i < places; i++)
        room->first[room->chosen[i] + 1]++;
    room->active_count = 0;
    for (int32_t i = 0; i < e->count; i++) {
        if (room->first[i + 1]) room->active[room->active_count++] = i;
        room->first[i + 1] += room->first[i];
    }
    for (int64_t i = 0; i < places; i++) {
        int32_t expert = room->chosen[i];
        int32_t place = room->first[expert]++; /* for now the next place; moved back below */
        room->place[i] = place;
        room->token[place] = (int32_t)(i / e->chosen);
        room->expert[place] = expert;
    }
    for (int32_t i = e->count; i > 0; i--)
        room->first[i] = room->first[i - 1];
    room->first[0] = 0;
}

static void gather_job(void *argument, int64_t first, int64_t last, int thread) {
    const fr_token_block *b = argument;
    int64_t d = b->model->d;
    (void)thread;
    for (int64_t i = first; i < last; i++) {
        const float *from = b->normed + b->experts.token[i] * d;
        memcpy(b->experts.inputs + i * d, from, (size_t)d * sizeof(float));
    }
}

/* Products of each group with its expert's matrix. */
typedef struct {
    const fr_token_block *block;
    const fr_matrix *matrix; /* [E] */
    const float *x;
    float *out;
    int64_t stride, out_stride;
} group_products;

static int64_t rows_of(const fr_expert_room *room, int32_t expert) {
    return room->first[expert + 1] - room->first[expert];
}

static char *records_of(const group_products *p, int32_t expert) {
    const fr_expert_room *room = &p->block->experts;
    return (char *)room->records + fr_record_bytes(p->matrix->inputs, room->first[expert]);
}

/* Quantises the superblocks [first, last) of all groups. */
static void quantise_groups(const group_products *p, int64_t first, int64_t last) {
    const fr_expert_room *room = &p->block->experts;
    if (fr_is_float(p->matrix->layout)) return;
    for (int i = 0; i < room->active_count; i++) {
        int32_t expert = room->active[i];
        fr_quantise(p->x + room->first[expert] * p->stride, (int)rows_of(room, expert),
                    (int)p->stride, p->matrix->inputs, records_of(p, expert), (int)first,
                    (int)last);
    }
}

static void quantise_job(void *argument, int64_t first, int64_t last, int thread) {
    (void)thread;
    quantise_groups(argument, first, last);
}

/* A part is a panel of an active expert. */
static void products_job(void *argument, int64_t first, int64_t last, int thread) {
    const group_products *p = argument;
    const fr_expert_room *room = &p->block->experts;
    int64_t panels = fr_panels(p->matrix);
    (void)thread;
    for (int64_t part = first; part < last;) {
        int32_t expert = room->active[part / panels];
        int64_t from = part % panels;
        int64_t end = fr_min(panels, from + last - part);
        int64_t place = room->first[expert];
        fr_product(p->matrix + expert, p->x + place * p->stride, (int)p->stride,
                   records_of(p, expert), (int)rows_of(room, expert),
                   p->out + place * p->out_stride, (int)p->out_stride, (int)from, (int)end);
        part += end - from;
    }
}

static void run_group_products(const group_products *p) {
    int64_t parts = p->block->experts.active_count * (int64_t)fr_panels(p->matrix);
    fr_parallel(products_job, (void *)p, parts, 0);
}

/* A part is a superblock of all places. */
static void activate_job(void *argument, int64_t first, int64_t last, int thread) {
    const group_products *down = argument;
    const fr_token_block *b = down->block;
    const fr_experts *e = b->layer->experts;
    int64_t inner = e->down->inputs;
    int64_t from = first * FR_SUPERBLOCK;
    int64_t n = fr_min(last * FR_SUPERBLOCK, inner) - from;
    (void)thread;
    for (int64_t i = 0; i < (int64_t)b->n * e->chosen; i++) {
        float *gate = b->experts.gate_up + 2 * i * inner + from;
        float *up = gate + inner;
        int64_t bias = b->experts.expert[i] * inner + from;
        if (e->gate_bias) b->ops->add(gate, e->gate_bias + bias, n);
        if (e->up_bias) b->ops->add(up, e->up_bias + bias, n);
        b->ops->activate(b->layer->activation, gate, up, n);
    }
    quantise_groups(down, first, last);
}

/* Adds up what the experts of each token say. `delta` holds what the layer's own MLP says, if it
   has one, and `scores` the logits of its gate. */
static void mix_job(void *argument, int64_t first, int64_t last, int thread) {
    const fr_token_block *b = argument;
    const fr_experts *e = b->layer->experts;
    int64_t d = b->model->d;
    (void)thread;
    for (int64_t i = first; i < last; i++) {
        float *delta = b->delta + i * d;
        if (!b->layer->down.panels) memset(delta, 0, (size_t)d * sizeof(float));
        if (e->shared_gate.panels) {
            sigmoid(b->ops, b->experts.scores + i, 1);
            b->ops->scale(delta, b->experts.scores[i], 0, d);
        }
        for (int64_t j = i * e->chosen; j < (i + 1) * e->chosen; j++) {
            float *out = b->experts.outputs + b->experts.place[j] * d;
            if (e->down_bias) b->ops->add(out, e->down_bias + b->experts.chosen[j] * d, d);
            b->ops->scale(out, b->experts.weights[j], 0, d);
            b->ops->add(delta, out, d);
        }
    }
}

/* Multiplies the block's states by a matrix, to `scores`. */
static void score_tokens(const fr_token_block *b, const fr_matrix *m) {
    fr_products p = {
        .matrix = {m},
        .out = {b->experts.scores},
        .out_stride = {m->outputs},
        .count = 1,
        .x = b->normed,
        .stride = b->model->d,
        .rows = b->n,
        .records = b->records,
    };
    fr_run_products(&p, 0);
}

void fr_mix_experts(fr_token_block *b) {
    const fr_experts *e = b->layer->experts;
    const fr_expert_room *room = &b->experts;
    int64_t d = b->model->d;
    int64_t inner = e->down->inputs;
    int64_t places = (int64_t)b->n * e->chosen;
    score_tokens(b, &e->router);
    fr_run(choose_job, b, b->n, (int64_t)b->n * e->count * e->chosen);
    group(b);
    fr_run(gather_job, b, places, places * d);
    group_products gate = {b, e->gate, room->inputs, room->gate_up, d, 2 * inner};
    group_products up = {b, e->up, room->inputs, room->gate_up + inner, d, 2 * inner};
    group_products down = {b, e->down, room->gate_up, room->outputs, 2 * inner, d};
    fr_run(quantise_job, &gate, fr_superblocks(d), places * d);
    run_group_products(&gate);
    run_group_products(&up);
    fr_run(activate_job, &down, fr_superblocks(inner), 4 * places * inner);
    run_group_products(&down);
    if (e->shared_gate.panels) score_tokens(b, &e->shared_gate);
    fr_run(mix_job, b, b->n, places * d);
}
