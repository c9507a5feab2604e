/* Drafted trees (trees.h): a beam search over the hot tokens.

   Buffers of a search, in one piece of memory, for R w beams:

     gains [R w, nodes] | sums [R w, S] | inputs [R w, r] | which [R w, nodes] | 4 arrays [n] */
#include "trees.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "logs.h"
#include "multiply.h"
#include "vector_ops.h"

/* As in forerun/planning/tree_plan.py and forerun/drafters/beams.py. */
#define CERTAIN (1 - 1e-6) /* larger probabilities are cut before they are calibrated */
#define CLOSER 1e-9        /* what a path loses with each token, so that equal ones are short */

/* The beams of one place. */
typedef struct {
    const fr_growth *growth;
    int place;
    float *sums;    /* logits of each beam */
    float *inputs;  /* of the token information */
    int32_t *which; /* the best outputs of each beam, the best first; -1: there are fewer */
    double *gains;  /* the logs of their probabilities */
} search;

/* Finds the `count` largest of x, the first of equal ones first; -1 if there are fewer. */
static void find_best(const float *x, int64_t n, int count, int32_t *which) {
    int filled = 0;
    for (int64_t i = 0; i < n; i++) {
        if (filled == count && !(x[i] > x[which[count - 1]])) continue;
        int at = filled < count ? filled++ : count - 1;
        for (; at > 0 && x[i] > x[which[at - 1]]; at--)
            which[at] = which[at - 1];
        which[at] = (int32_t)i;
    }
    while (filled < count)
        which[filled++] = -1;
}

/* The log of a calibrated probability, whose log-odds are shift + slope times those of
   exp(gain). */
static double calibrated(double gain, const float *curve) {
    double odds = gain - fr_log1p(-fmin(fr_exp(gain), CERTAIN));
    double against = -curve[0] - curve[1] * odds;
    if (against > 0) return -against - fr_log1p(fr_exp(-against));
    return -fr_log1p(fr_exp(against));
}

/* Adds up the logits of a beam: the information of its last token, those of its place, and old
   ones. */
static void add_logits(const search *s, int64_t row, float *sums) {
    const fr_growth *g = s->growth;
    int64_t size = g->head->outputs;
    const float *logits = g->logits + (s->place * (int64_t)g->rows + row) * size;
    for (int64_t i = 0; i < size; i++)
        sums[i] = g->information ? sums[i] + logits[i] : logits[i];
    int place = g->start + s->place;
    if (place >= g->olds[row]) return;
    const float *old = g->old[row] + place * size;
    for (int64_t i = 0; i < size; i++)
        sums[i] += old[i];
}

/* Finds the best outputs of a beam and their gains. The logits are overwritten. */
static void find_gains(const search *s, int64_t row, float *sums, int32_t *which, double *gains) {
    const fr_growth *g = s->growth;
    int64_t size = g->head->outputs;
    find_best(sums, size, g->nodes, which);
    float largest = sums[which[0]];
    for (int i = 0; i < g->nodes && which[i] >= 0; i++)
        gains[i] = (double)sums[which[i]] - largest;
    double log_total = fr_log(fr_chosen_vector_ops()->exps(sums, largest, 1, size, sums));
    for (int i = 0; i < g->nodes && which[i] >= 0; i++) {
        gains[i] -= log_total;
        if (g->curves) {
            gains[i] = calibrated(gains[i], g->curves + 2 * (row * g->depth + s->place));
        }
    }
}

/* A part is a beam. */
static void beams_job(void *argument, int64_t first, int64_t last, int thread) {
    const search *s = argument;
    const fr_growth *g = s->growth;
    (void)thread;
    for (int64_t beam = first; beam < last; beam++) {
        int64_t row = beam / g->width;
        float *sums = s->sums + beam * g->head->outputs;
        int32_t *which = s->which + beam * g->nodes;
        double *gains = s->gains + beam * g->nodes;
        for (int i = 0; i < g->nodes; i++) {
            which[i] = -1;
            gains[i] = -INFINITY;
        }
        if (!(g->values[beam] > -INFINITY)) continue;
        add_logits(s, row, sums);
        find_gains(s, row, sums, which, gains);
    }
}

/* The best paths of a row at a place, the best first. */
typedef struct {
    int count;
    double *values;
    int32_t *tokens, *parents;
} path_list;

/* Puts a path behind all that are as good, unless the list is full of these. */
static void insert_path(path_list *list, int size, double value, int32_t token, int32_t parent) {
    if (list->count == size && !(value > list->values[size - 1])) return;
    int at = list->count < size ? list->count++ : size - 1;
    for (; at > 0 && value > list->values[at - 1]; at--) {
        list->values[at] = list->values[at - 1];
        list->tokens[at] = list->tokens[at - 1];
        list->parents[at] = list->parents[at - 1];
    }
    list->values[at] = value;
    list->tokens[at] = token;
    list->parents[at] = parent;
}

/* Chooses the best paths of a row's beams; the first of them are the next beams. A missing output
   has a gain of -inf, and with these w beams have at least `nodes` paths. */
static void choose_paths(const search *s, int row) {
    const fr_growth *g = s->growth;
    int64_t first_beam = (int64_t)row * g->width;
    int64_t first_path = ((int64_t)row * g->depth + s->place) * g->nodes;
    int is_over = g->start + s->place >= g->limit[row];
    path_list list = {0, g->found + first_path, g->tokens + first_path, g->parents + first_path};
    for (int beam = 0; beam < g->width; beam++) {
        const int32_t *which = s->which + (first_beam + beam) * g->nodes;
        const double *gains = s->gains + (first_beam + beam) * g->nodes;
        for (int i = 0; i < g->nodes; i++) {
            double value = is_over ? -INFINITY : g->values[first_beam + beam] + gains[i] - CLOSER;
            insert_path(&list, g->nodes, value, g->names[which[i] < 0 ? 0 : which[i]], beam);
        }
    }
    for (int beam = 0; beam < g->width; beam++) {
        int is_found = beam < g->nodes;
        g->beams[first_beam + beam] = is_found ? list.tokens[beam] : g->names[0];
        g->values[first_beam + beam] = is_found ? list.values[beam] : -INFINITY;
    }
}

/* Multiplies the token information of each beam's last token, to `sums`. */
static int add_information(search *s) {
    const fr_growth *g = s->growth;
    const fr_matrix *m = g->information;
    int beams = g->rows * g->width;
    for (int i = 0; i < beams; i++) {
        const float *from = g->token_states + (int64_t)g->beams[i] * m->inputs;
        memcpy(s->inputs + (int64_t)i * m->inputs, from, (size_t)m->inputs * sizeof(float));
    }
    return fr_multiply(m, s->inputs, beams, s->sums);
}

/* Extends the beams by a place, whose logits are known. */
static int search_place(search *s, int place) {
    const fr_growth *g = s->growth;
    s->place = place;
    int failure = g->information ? add_information(s) : 0;
    if (failure) return failure;
    fr_enter();
    fr_parallel(beams_job, s, g->rows * g->width, 1);
    fr_leave();
    for (int row = 0; row < g->rows; row++)
        choose_paths(s, row);
    return 0;
}

static int row_fits(const fr_model *m, const fr_cache *cache, const fr_growth *g, int row) {
    int64_t end = (int64_t)g->length[row] + g->count[row] + g->depth - 1;
    if (g->count[row] < 1 || g->length[row] < 0 || (g->start && g->count[row] > 1)) return 0;
    for (int i = 0; i < m->layers; i++) {
        if (end > cache[i].capacity || g->row[row] < 0 || g->row[row] >= cache[i].rows) return 0;
    }
    return 1;
}

/* Sizes that fr_forward and fr_multiply do not check. */
static int growth_fits(const fr_model *m, const fr_cache *cache, const fr_growth *g) {
    const fr_matrix *information = g->information;
    if (g->rows < 1 || g->depth < 1 || g->width < 1 || g->nodes < 1) return 0;
    if (g->start < 0 || g->context < 1) return 0;
    if (!m->fuse.panels || (!m->alone.panels && g->width > 1)) return 0;
    if (g->head->inputs != m->d || g->head->outputs < 1) return 0;
    if (information) {
        if (!g->token_states || information->inputs < 1) return 0;
        if (information->outputs != g->head->outputs) return 0;
    }
    if (!fr_are_below(g->names, g->head->outputs, m->vocabulary)) return 0;
    if (!fr_are_below(g->beams, (int64_t)g->rows * g->width, m->vocabulary)) return 0;
    int64_t n = 0;
    for (int row = 0; row < g->rows; row++) {
        if (!row_fits(m, cache, g, row)) return 0;
        n += g->count[row];
    }
    return n == g->n;
}

/* The arrays of the batches that are run. */
typedef struct {
    int32_t *row, *slot, *position, *length;
} entry_arrays;

/* Fills in the entries of a place: all features of each row at place 0, then one state. */
static void place_entries(const fr_growth *g, int place, const entry_arrays *entries) {
    int i = 0;
    for (int r = 0; r < g->rows; r++) {
        int count = place ? 1 : g->count[r];
        int first = g->length[r] + (place ? g->count[r] + place - 1 : 0);
        for (int k = 0; k < count; k++) {
            int32_t slot = first + k;
            entries->row[i] = g->row[r];
            entries->slot[i] = slot;
            entries->length[i] = slot + 1;
            entries->position[i] = slot < g->context ? slot : g->context - 1;
            i++;
        }
    }
}

/* Copies the last output of each row to the states of place 0. */
static void take_last_outputs(const fr_growth *g, int64_t d) {
    int end = 0;
    for (int r = 0; r < g->rows; r++) {
        end += g->count[r];
        memcpy(g->states + r * d, g->features + (end - 1) * d, (size_t)d * sizeof(float));
    }
}

static int grow(const fr_model *m, const fr_cache *cache, search *s, const entry_arrays *entries) {
    const fr_growth *g = s->growth;
    int64_t states_size = g->rows * (int64_t)m->d;
    int64_t logits_size = g->rows * (int64_t)g->head->outputs;
    int is_alone = m->alone.panels != NULL;
    fr_batch batch = {
        .n = g->n,
        .tokens = g->start && is_alone ? NULL : g->pending,
        .states = g->features,
        .row = entries->row,
        .slot = entries->slot,
        .position = entries->position,
        .length = entries->length,
        .normed = g->features,
    };
    for (int place = 0; place < g->depth; place++) {
        float *states = g->states + place * states_size;
        place_entries(g, place, entries);
        int failure = fr_forward(m, cache, &batch);
        if (failure) return failure;
        if (!place) take_last_outputs(g, m->d);
        batch.n = g->rows;
        batch.tokens = is_alone ? NULL : g->beams;
        batch.states = states;
        batch.normed = states + states_size;
        if (is_alone) continue; /* states depend on no drafted token */
        failure = fr_multiply(g->head, states, g->rows, g->logits + place * logits_size);
        if (!failure) failure = search_place(s, place);
        if (failure) return failure;
    }
    if (!is_alone) return 0;
    int failure = fr_multiply(g->head, g->states, g->depth * g->rows, g->logits);
    for (int place = 0; !failure && place < g->depth; place++)
        failure = search_place(s, place);
    return failure;
}

int fr_grow(const fr_model *model, const fr_cache *cache, const fr_growth *growth) {
    if (!growth_fits(model, cache, growth)) return FR_REFUSED;
    int64_t beams = (int64_t)growth->rows * growth->width;
    int64_t paths = beams * growth->nodes;
    int64_t sums = beams * growth->head->outputs;
    int64_t inputs = growth->information ? beams * growth->information->inputs : 0;
    size_t double_bytes = (size_t)paths * sizeof(double);
    size_t float_bytes = (size_t)(sums + inputs) * sizeof(float);
    size_t integer_bytes = (size_t)(paths + 4 * (int64_t)growth->n) * sizeof(int32_t);
    double *room = malloc(double_bytes + float_bytes + integer_bytes);
    if (!room) return FR_NO_MEMORY;
    search s = {.growth = growth, .gains = room};
    s.sums = (float *)(s.gains + paths);
    s.inputs = s.sums + sums;
    s.which = (int32_t *)(s.inputs + inputs);
    entry_arrays entries;
    entries.row = s.which + paths;
    entries.slot = entries.row + growth->n;
    entries.position = entries.slot + growth->n;
    entries.length = entries.position + growth->n;
    int result = grow(model, cache, &s, &entries);
    free(room);
    return result;
}
