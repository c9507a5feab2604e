/* Drafts of several rows by a head over hidden states (forward.h). */
#include "forward.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "between.h"

#define CERTAIN (1 - 1e-6) /* these two as in forerun/methods/budget.py and beams.py */
#define CLOSER 1e-9

/* The beams of one place: sums [R w, S] of their logits, and the best outputs [R w, m] of each with their gains, the
   best first. */
typedef struct {
    const fr_growth *of;
    int place;
    float *sums, *inputs;
    int32_t *which;
    double *gains;
} search;

/* The m largest of x, the first of equal ones first; -1 if there are fewer. */
static void find_best(const float *x, int64_t n, int m, int32_t *which) {
    int count = 0;
    for (int64_t i = 0; i < n; i++) {
        if (count == m && !(x[i] > x[which[m - 1]])) continue;
        int at = count < m ? count++ : m - 1;
        for (; at > 0 && x[i] > x[which[at - 1]]; at--) which[at] = which[at - 1];
        which[at] = (int32_t)i;
    }
    while (count < m) which[count++] = -1;
}

/* The log of the calibrated probability, whose log-odds are shift + slope times those of exp(gain). */
static double calibrated(double gain, const float *curve) {
    double odds = gain - log1p(-fmin(exp(gain), CERTAIN)), against = -curve[0] - curve[1] * odds;
    return against > 0 ? -against - log1p(exp(-against)) : -log1p(exp(against));
}

static void do_beams(void *argument, int64_t first, int64_t last, int thread) {
    const search *s = argument;
    const fr_growth *g = s->of;
    const fr_between *do_ = fr_between_chosen();
    int64_t size = g->head->outputs;
    (void)thread;
    for (; first < last; first++) {
        int64_t row = first / g->width;
        float *sums = s->sums + first * size;
        const float *logits = g->logits + (s->place * (int64_t)g->rows + row) * size;
        int32_t *which = s->which + first * g->nodes;
        double *gains = s->gains + first * g->nodes;
        for (int i = 0; i < g->nodes; i++) which[i] = -1, gains[i] = -INFINITY;
        if (!(g->values[first] > -INFINITY)) continue;
        for (int64_t i = 0; i < size; i++) sums[i] = g->information ? sums[i] + logits[i] : logits[i];
        if (g->start + s->place < g->olds[row]) {
            const float *old = g->old[row] + (g->start + s->place) * size;
            for (int64_t i = 0; i < size; i++) sums[i] += old[i];
        }
        find_best(sums, size, g->nodes, which);
        float most = sums[which[0]];
        for (int i = 0; i < g->nodes && which[i] >= 0; i++) gains[i] = (double)sums[which[i]] - most;
        double whole = log(do_->exps(sums, most, 1, size, sums));
        for (int i = 0; i < g->nodes && which[i] >= 0; i++) {
            gains[i] -= whole;
            if (g->curves) gains[i] = calibrated(gains[i], g->curves + 2 * (row * g->most + s->place));
        }
    }
}

/* The best paths of a row's beams, which then begin with the first of these. An output that is missing has a gain of
   -inf, and w beams have at least m paths with these. */
static void choose(const search *s, int row) {
    const fr_growth *g = s->of;
    int w = g->width, m = g->nodes, count = 0, is_over = g->start + s->place >= g->limit[row];
    int64_t to = ((int64_t)row * g->most + s->place) * m;
    int32_t *tokens = g->tokens + to, *parents = g->parents + to;
    double *found = g->found + to;
    for (int beam = 0; beam < w; beam++) {
        const int32_t *which = s->which + ((int64_t)row * w + beam) * m;
        for (int i = 0; i < m; i++) {
            double value = is_over ? -INFINITY : g->values[row * w + beam] + s->gains[((int64_t)row * w + beam) * m + i] - CLOSER;
            if (count == m && !(value > found[m - 1])) continue;
            int at = count < m ? count++ : m - 1;
            for (; at > 0 && value > found[at - 1]; at--)
                found[at] = found[at - 1], tokens[at] = tokens[at - 1], parents[at] = parents[at - 1];
            found[at] = value, parents[at] = beam, tokens[at] = g->names[which[i] < 0 ? 0 : which[i]];
        }
    }
    for (int beam = 0; beam < w; beam++) {
        g->beams[row * w + beam] = beam < m ? tokens[beam] : g->names[0];
        g->values[row * w + beam] = beam < m ? found[beam] : -INFINITY;
    }
}

static int search_place(search *s, int place) {
    const fr_growth *g = s->of;
    const fr_matrix *m = g->information;
    int beams = g->rows * g->width, found = 0;
    s->place = place;
    for (int i = 0; m && i < beams; i++)
        memcpy(s->inputs + (int64_t)i * m->inputs, g->token_states + (int64_t)g->beams[i] * m->inputs, (size_t)m->inputs * sizeof(float));
    if (m) found = fr_multiply(m, s->inputs, beams, s->sums);
    if (found) return found;
    fr_enter();
    fr_parallel(do_beams, s, beams, 1);
    fr_leave();
    for (int row = 0; row < g->rows; row++) choose(s, row);
    return 0;
}

static int growth_fits(const fr_model *m, const fr_cache *cache, const fr_growth *g) {
    const fr_matrix *more = g->information;
    int64_t n = 0;
    if (g->rows < 1 || g->most < 1 || g->width < 1 || g->nodes < 1 || g->start < 0 || g->context < 1) return 0;
    if (!m->fuse.panels || (!m->alone.panels && g->width > 1) || g->head->inputs != m->d || g->head->outputs < 1) return 0;
    if (more && (!g->token_states || more->outputs != g->head->outputs || more->inputs < 1)) return 0;
    for (int i = 0; i < g->head->outputs; i++)
        if (g->names[i] < 0 || g->names[i] >= m->vocabulary) return 0;
    for (int i = 0; i < g->rows * g->width; i++)
        if (g->beams[i] < 0 || g->beams[i] >= m->vocabulary) return 0;
    for (int row = 0; row < g->rows; row++) {
        int64_t end = (int64_t)g->length[row] + g->count[row] + g->most - 1;
        if (g->count[row] < 1 || g->length[row] < 0 || (g->start && g->count[row] > 1)) return 0;
        for (int i = 0; i < m->layers; i++)
            if (end > cache[i].capacity || g->row[row] < 0 || g->row[row] >= cache[i].rows) return 0;
        n += g->count[row];
    }
    return n == g->n;
}

static int grow(const fr_model *m, const fr_cache *cache, const fr_growth *g, search *s, int32_t *room) {
    int64_t d = m->d, size = g->head->outputs;
    int32_t *row = room, *slot = row + g->n, *position = slot + g->n, *length = position + g->n;
    int is_alone = m->alone.panels != 0;
    fr_batch b = {.n = g->n, .tokens = g->start && is_alone ? 0 : g->pending, .states = g->features, .row = row,
                  .slot = slot, .position = position, .length = length, .normed = g->features};
    for (int place = 0; place < g->most; place++) {
        float *states = g->states + place * g->rows * d;
        for (int r = 0, i = 0; r < g->rows; r++) {
            int count = place ? 1 : g->count[r], first = g->length[r] + (place ? g->count[r] + place - 1 : 0);
            for (int k = 0; k < count; k++, i++) {
                row[i] = g->row[r], slot[i] = first + k, length[i] = slot[i] + 1;
                position[i] = slot[i] < g->context ? slot[i] : g->context - 1;
            }
        }
        int found = fr_forward(m, cache, &b);
        if (found) return found;
        if (!place)
            for (int r = 0, end = 0; r < g->rows; r++)
                end += g->count[r], memcpy(states + r * d, g->features + (end - 1) * d, (size_t)d * sizeof(float));
        b.n = g->rows, b.tokens = is_alone ? 0 : g->beams, b.states = states, b.normed = states + g->rows * d;
        if (is_alone) continue;
        found = fr_multiply(g->head, states, g->rows, g->logits + place * g->rows * size);
        if (!found) found = search_place(s, place);
        if (found) return found;
    }
    int found = is_alone ? fr_multiply(g->head, g->states, g->most * g->rows, g->logits) : 0;
    for (int place = 0; is_alone && !found && place < g->most; place++) found = search_place(s, place);
    return found;
}

int fr_grow(const fr_model *model, const fr_cache *cache, const fr_growth *g) {
    if (!growth_fits(model, cache, g)) return FR_REFUSED;
    int64_t beams = (int64_t)g->rows * g->width, found = beams * g->nodes;
    int64_t floats = beams * (g->head->outputs + (g->information ? g->information->inputs : 0));
    double *room = malloc((size_t)found * sizeof(double) + (size_t)floats * sizeof(float) + (size_t)(found + 4 * g->n) * sizeof(int32_t));
    if (!room) return FR_NO_MEMORY;
    search s = {.of = g, .gains = room, .sums = (float *)(room + found)};
    s.inputs = s.sums + beams * g->head->outputs;
    s.which = (int32_t *)(s.sums + floats);
    int done = grow(model, cache, g, &s, s.which + found);
    free(room);
    return done;
}
