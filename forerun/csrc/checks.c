/* Whether the sizes of a model, a cache and a batch fit together, before anything is written.

   C reads and writes by these sizes alone, so a wrong one would reach foreign memory. */
#include "forward.h"

#include <stddef.h>

int fr_matrix_fits(const fr_matrix *m, int64_t outputs, int64_t inputs) {
    if (!m->panels || m->outputs != outputs || m->inputs != inputs) return 0;
    return fr_panel_bytes(m->layout, m->outputs, m->inputs, NULL) > 0;
}

int fr_head_fits(const fr_model *m, const fr_matrix *head) {
    return head->outputs > 0 && fr_matrix_fits(head, head->outputs, m->d);
}

int fr_are_below(const int32_t *x, int64_t n, int64_t end) {
    for (int64_t i = 0; i < n; i++) {
        if (x[i] < 0 || x[i] >= end) return 0;
    }
    return 1;
}

static int rotations_fit(const fr_model *m) {
    for (int i = 0; i < m->rotations; i++) {
        const fr_rotation *r = m->rotation + i;
        if (r->dims < 16 || r->dims > m->size || r->dims % 16 || !r->cos || !r->sin) return 0;
    }
    return 1;
}

static int attention_fits(const fr_model *m, const fr_layer *l) {
    int64_t d = m->d;
    int64_t query_width = (int64_t)m->heads * m->size;
    int64_t key_width = (int64_t)m->groups * m->size;
    if (l->window < 0 || l->rotation < -1 || l->rotation >= m->rotations) return 0;
    if (!fr_matrix_fits(&l->o, d, query_width)) return 0;
    if (!l->k.panels && !l->v.panels) return fr_matrix_fits(&l->q, query_width + 2 * key_width, d);
    return fr_matrix_fits(&l->q, query_width, d) && fr_matrix_fits(&l->k, key_width, d) &&
           fr_matrix_fits(&l->v, key_width, d);
}

/* Whether all matrices of a list have the form of the first one, which fits. */
static int list_fits(const fr_matrix *list, int count, int64_t outputs, int64_t inputs) {
    if (!list || !fr_matrix_fits(list, outputs, inputs)) return 0;
    for (int i = 1; i < count; i++) {
        const fr_matrix *m = list + i;
        if (!m->panels || m->layout != list->layout) return 0;
        if (m->outputs != outputs || m->inputs != inputs) return 0;
    }
    return 1;
}

static int experts_fit(const fr_model *m, const fr_experts *e) {
    int64_t d = m->d;
    int64_t inner = e->down ? e->down->inputs : 0;
    if (inner < 8 || inner % 8 || e->count < 1 || e->chosen < 1 || e->chosen > e->count) return 0;
    if (e->scoring < 0 || e->scoring >= FR_SCORINGS) return 0;
    if (!fr_matrix_fits(&e->router, e->count, d)) return 0;
    if (e->shared_gate.panels && !fr_matrix_fits(&e->shared_gate, 1, d)) return 0;
    return list_fits(e->gate, e->count, inner, d) && list_fits(e->up, e->count, inner, d) &&
           list_fits(e->down, e->count, d, inner);
}

static int mlp_fits(const fr_model *m, const fr_layer *l) {
    int64_t d = m->d;
    int64_t inner = l->down.inputs;
    if (l->activation < 0 || l->activation >= FR_ACTIVATIONS) return 0;
    if (l->experts && !experts_fit(m, l->experts)) return 0;
    if (l->experts && !l->down.panels) return !l->experts->shared_gate.panels;
    if (inner < 8 || inner % 8 || !fr_matrix_fits(&l->down, d, inner)) return 0;
    if (l->is_parallel && l->mlp_norm.gain) return 0;
    if (l->up_bias && !fr_is_gated(l)) return 0;
    if (l->up.panels) {
        return fr_matrix_fits(&l->gate, inner, d) && fr_matrix_fits(&l->up, inner, d);
    }
    return fr_matrix_fits(&l->gate, fr_is_gated(l) ? 2 * inner : inner, d);
}

int fr_model_fits(const fr_model *m) {
    int64_t d = m->d;
    if (d < 8 || d % 8 || m->size < 8 || m->size % 8) return 0;
    if (m->groups < 1 || m->heads < m->groups || m->heads % m->groups) return 0;
    if (m->layers < 1) return 0;
    if (m->fuse.panels && !fr_matrix_fits(&m->fuse, d, 2 * d)) return 0;
    if (m->alone.panels && (!m->fuse.panels || !fr_matrix_fits(&m->alone, d, d))) return 0;
    for (int i = 0; i < m->layers; i++) {
        const fr_layer *l = m->layer + i;
        if (!attention_fits(m, l) || !mlp_fits(m, l)) return 0;
    }
    return rotations_fit(m);
}

/* Whether a batch has the inputs that the model takes: states, and tokens too or a matrix for
   states alone, if it is a head over hidden states; else either tokens or states. */
static int inputs_fit(const fr_model *m, const fr_batch *b) {
    int has_tokens = b->tokens != NULL;
    int has_states = b->states != NULL;
    if (m->fuse.panels) {
        if (!has_states || (!has_tokens && !m->alone.panels)) return 0;
    } else if (has_tokens == has_states) {
        return 0;
    }
    return !has_tokens || (m->embed && fr_are_below(b->tokens, b->n, m->vocabulary));
}

static int entries_fit(const fr_model *m, const fr_cache *cache, const fr_batch *b) {
    int64_t rows = cache->rows;
    int64_t capacity = cache->capacity;
    for (int i = 1; i < m->layers; i++) {
        rows = cache[i].rows < rows ? cache[i].rows : rows;
        capacity = cache[i].capacity < capacity ? cache[i].capacity : capacity;
    }
    int has_seen = b->seen != NULL;
    int has_paths = b->paths != NULL;
    if (b->path < 0 || has_seen != has_paths) return 0;
    if (!fr_are_below(b->row, b->n, rows) || !fr_are_below(b->slot, b->n, capacity)) return 0;
    if (!fr_are_below(b->position, b->n, m->positions)) return 0;
    if (!fr_are_below(b->length, b->n, capacity + 1)) return 0;
    if (has_seen && !fr_are_below(b->seen, b->n, b->path + 1)) return 0;
    for (int64_t i = 0; i < b->n; i++) {
        if (b->length[i] + (has_seen ? b->seen[i] : 0) < 1) return 0;
        if (has_seen && !fr_are_below(b->paths + i * b->path, b->seen[i], capacity)) return 0;
    }
    return 1;
}

static int outputs_fit(const fr_model *m, const fr_batch *b) {
    if (b->asks < 0 || b->extras < 0 || b->captures < 0) return 0;
    if (b->extras && !b->asks) return 0;
    if (b->captures && !b->captured) return 0;
    if (!fr_are_below(b->after, b->captures, m->layers + 1)) return 0;
    if (!fr_are_below(b->asked, b->asks, b->n)) return 0;
    if (b->asks && !fr_head_fits(m, b->head ? b->head : &m->head)) return 0;
    if (!b->extras) return 1;
    return fr_head_fits(m, &m->head) && fr_are_below(b->extra, b->extras, m->head.outputs);
}

int fr_batch_fits(const fr_model *m, const fr_cache *cache, const fr_batch *b) {
    return b->n >= 0 && inputs_fit(m, b) && entries_fit(m, cache, b) && outputs_fit(m, b);
}
