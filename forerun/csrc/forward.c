#include "forward.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "between.h"
#include "threads.h"

#define BLOCK 256     /* tokens that go through all layers together */
#define SHARED_FROM 512 /* entries from which on threads share units of attention, */
#define UNITS_SHARED 4  /* if there are fewer units for each thread */
#define SERIAL 16384  /* numbers that take less time than calling threads */

extern const fr_between fr_between_plain;
extern const fr_attention_steps fr_attention_steps_plain;
#if defined(__x86_64__)
extern const fr_between fr_between_avx2, fr_between_avxvnni, fr_between_avx512vnni;
extern const fr_attention_steps fr_attention_steps_avx2, fr_attention_steps_avxvnni, fr_attention_steps_avx512vnni;
#elif defined(__aarch64__)
extern const fr_between fr_between_neon;
extern const fr_attention_steps fr_attention_steps_neon;
#endif

static const fr_between *const between[FR_ISAS] = {
    &fr_between_plain,
#if defined(__x86_64__)
    &fr_between_avx2, &fr_between_avxvnni, &fr_between_avx512vnni,
#elif defined(__aarch64__)
    NULL, NULL, NULL, &fr_between_neon,
#endif
};

static const fr_attention_steps *const attention[FR_ISAS] = {
    &fr_attention_steps_plain,
#if defined(__x86_64__)
    &fr_attention_steps_avx2, &fr_attention_steps_avxvnni, &fr_attention_steps_avx512vnni,
#elif defined(__aarch64__)
    NULL, NULL, NULL, &fr_attention_steps_neon,
#endif
};

const fr_between *fr_between_chosen(void) { return between[fr_chosen()]; }

/* Adjacent tokens of a batch in one row of the cache, which share tiles of keys and values. */
typedef struct {
    int start, count;
} token_run;

/* The buffers of a block of tokens. `parts` [n, (H + 2 G) D] become queries, keys and values. */
typedef struct {
    const fr_model *model;
    const fr_layer *layer;
    const fr_cache *cache;
    const fr_batch *batch;
    const fr_between *do_;
    const fr_attention_steps *attention;
    int start, n; /* which tokens of the batch */
    int64_t attended, every, inner;
    float *x, *h, *parts, *out, *both, *y;
    void *records;
    int64_t longest, width;        /* entries that a token sees at most; floats of a query's scores */
    float *scores, *tiles;         /* of each thread or, if threads share units of attention, of each unit */
    token_run runs[BLOCK];
    int run_count;
} block;

/* Matrices of different sizes that multiply one input. */
typedef struct {
    const block *of;
    const fr_matrix *matrix[3];
    float *out[3];
    int64_t out_stride[3];
    int count;
    const float *x;
    int64_t stride;
    int rows;
} products;

static int panels(const fr_matrix *m) { return (m->outputs + FR_PANEL - 1) / FR_PANEL; }

static int superblocks(int64_t inputs) { return (int)((inputs + FR_SUPERBLOCK - 1) / FR_SUPERBLOCK); }

static void do_products(void *argument, int64_t first, int64_t last, int thread) {
    const products *p = argument;
    (void)thread;
    for (int i = 0; i < p->count && first < last; i++) {
        int64_t own = panels(p->matrix[i]), end = last < own ? last : own;
        if (first < end)
            fr_product(p->matrix[i], p->x, (int)p->stride, p->of->records, p->rows, p->out[i], (int)p->out_stride[i],
                       (int)first, (int)end);
        first = first > own ? first - own : 0;
        last -= own;
    }
}

/* Runs work over parts by all threads, or by this one if `numbers` are few. */
static void run(fr_work *work, void *argument, int64_t parts, int64_t numbers) {
    if (numbers < SERIAL) work(argument, 0, parts, 0);
    else fr_parallel(work, argument, parts, 0);
}

static void do_quantise(void *argument, int64_t first, int64_t last, int thread) {
    const products *p = argument;
    (void)thread;
    fr_quantise(p->x, p->rows, (int)p->stride, p->matrix[0]->inputs, p->of->records, (int)first, (int)last);
}

static void multiply(products *p, int is_quantised) {
    int64_t all = 0;
    int needs = 0, inputs = p->matrix[0]->inputs;
    for (int i = 0; i < p->count; i++) {
        all += panels(p->matrix[i]);
        needs |= !fr_is_float(p->matrix[i]->layout);
    }
    if (needs && !is_quantised) run(do_quantise, p, superblocks(inputs), (int64_t)inputs * p->rows);
    fr_parallel(do_products, p, all, 0);
}

#define TINY 0x1p-23f /* torch's default epsilon of norms */

/* Inputs of the first layer, to y; a head's states, with embeddings beside them, to `both`. */
static void do_embed(void *argument, int64_t first, int64_t last, int thread) {
    const block *b = argument;
    const fr_model *m = b->model;
    const fr_batch *batch = b->batch;
    int64_t d = m->d;
    (void)thread;
    for (int64_t i = first; i < last; i++) {
        int64_t at = b->start + i;
        float *x = m->fuse.panels ? b->both + 2 * i * d : b->y + i * d, *beside = batch->states ? x + d : x;
        if (batch->states) memcpy(x, batch->states + at * d, (size_t)d * sizeof(float));
        if (!batch->tokens) continue;
        fr_values(m->embed_format, (const char *)m->embed + batch->tokens[at] * m->embed_row, (size_t)m->embed_row, m->d, beside);
        if (batch->states) b->do_->norm(beside, 0, 0, TINY, d, beside);
    }
}

static void keep(const block *b, const float *x, void *to, int64_t at) {
    if (b->cache->wide) memcpy((float *)to + at, x, (size_t)b->model->size * sizeof(float));
    else b->do_->to_half(x, b->model->size, (uint16_t *)to + at);
}

/* Queries and keys ready for attention; keys and values in the cache. */
static void do_heads(void *argument, int64_t first, int64_t last, int thread) {
    const block *b = argument;
    const fr_model *m = b->model;
    const fr_layer *l = b->layer;
    int64_t d = m->size, half = l->turned / 2;
    (void)thread;
    for (int64_t i = first; i < last; i++) {
        int64_t at = b->start + i, position = b->batch->position[at];
        float *q = b->parts + i * b->every, *k = q + b->attended, *v = k + m->groups * d;
        const float *cos = half ? m->cos + position * half : 0, *sin = half ? m->sin + position * half : 0;
        b->do_->heads(q, l->q_bias, l->q_norm, m->eps, cos, sin, l->turned, 1 / sqrtf((float)d), m->heads, d);
        b->do_->heads(k, l->k_bias, l->k_norm, m->eps, cos, sin, l->turned, 1, m->groups, d);
        if (l->v_bias) b->do_->add(v, l->v_bias, m->groups * d);
        int64_t to = b->batch->row[at] * b->cache->row + b->batch->slot[at] * d;
        for (int g = 0; g < m->groups; g++, to += b->cache->group) {
            keep(b, k + g * d, b->cache->keys, to);
            keep(b, v + g * d, b->cache->values, to);
        }
    }
}

/* A unit of attention is a run of tokens, a group, and a piece of the group's heads: all of them, if they are not very
   many. */
static int64_t heads_of_group(const fr_model *m) { return m->heads / m->groups; }

static int64_t pieces_of_group(const fr_model *m) { return (heads_of_group(m) + FR_QUERIES - 1) / FR_QUERIES; }

static int64_t tokens_of_run(const fr_model *m) {
    int64_t pieces = pieces_of_group(m);
    return FR_QUERIES / ((heads_of_group(m) + pieces - 1) / pieces);
}

static int64_t units_of(const block *b) { return b->run_count * b->model->groups * pieces_of_group(b->model); }

static void find_runs(block *b) {
    const int32_t *row = b->batch->row + b->start;
    int64_t most = tokens_of_run(b->model);
    b->run_count = 0;
    for (int i = 0; i < b->n; i++) {
        token_run *last = b->run_count ? b->runs + b->run_count - 1 : NULL;
        if (last && last->count < most && row[i] == row[last->start]) {
            last->count++;
            continue;
        }
        b->runs[b->run_count++] = (token_run){i, 1};
    }
}

static fr_attention_row row_of_unit(const block *b, int64_t token, int64_t head) {
    const fr_batch *batch = b->batch;
    int64_t at = b->start + token;
    int64_t window = b->layer->window;
    int64_t count = batch->length[at] + (batch->seen ? batch->seen[at] : 0);
    return (fr_attention_row){
        .first = window && count > window ? count - window : 0,
        .split = batch->length[at],
        .count = count,
        .path = batch->paths ? batch->paths + at * batch->path : 0,
        .queries = b->parts + token * b->every + head * b->model->size,
        .out = b->out + token * b->attended + head * b->model->size,
    };
}

/* Fills in a unit; `place`: which of the scores it takes, `thread`: whose tile. */
static void make_unit(const block *b, int64_t unit, int64_t place, int thread, fr_attention *a) {
    const fr_model *m = b->model;
    int64_t shared = heads_of_group(m);
    int64_t pieces = pieces_of_group(m);
    int64_t piece = unit % pieces;
    int64_t group = unit / pieces % m->groups;
    const token_run *run = b->runs + unit / pieces / m->groups;
    int64_t head = piece * shared / pieces;
    int64_t bytes = b->cache->wide ? 4 : 2;
    int64_t start = (b->batch->row[b->start + run->start] * b->cache->row + group * b->cache->group) * bytes;
    a->keys = (const char *)b->cache->keys + start;
    a->values = (const char *)b->cache->values + start;
    a->width = b->width;
    a->rows = run->count;
    a->heads = (int)((piece + 1) * shared / pieces - head);
    a->d = m->size;
    a->is_float32 = b->cache->wide;
    a->scores = b->scores + place * FR_QUERIES * b->width;
    a->tile = b->tiles + (int64_t)thread * FR_TILE * m->size;
    for (int i = 0; i < run->count; i++) a->row[i] = row_of_unit(b, run->start + i, group * shared + head);
}

/* A part is a unit. */
static void do_attend(void *argument, int64_t first, int64_t last, int thread) {
    const block *b = argument;
    fr_attention a;
    for (int64_t unit = first; unit < last; unit++) {
        make_unit(b, unit, thread, thread, &a);
        b->attention->scores(&a, 0, INT64_MAX);
        b->attention->weights(&a, 0, a.rows * a.heads);
        b->attention->values(&a, 0, a.d);
    }
}

/* The three steps of units that threads share: a part is a chunk of slots, a query, or a slice of columns. */
typedef struct {
    const block *of;
    int64_t chunks, slices, columns;
} shared_units;

static void do_scores(void *argument, int64_t first, int64_t last, int thread) {
    const shared_units *s = argument;
    fr_attention a;
    for (int64_t part = first; part < last; part++) {
        int64_t from = part % s->chunks * FR_CHUNK;
        make_unit(s->of, part / s->chunks, part / s->chunks, thread, &a);
        s->of->attention->scores(&a, from, from + FR_CHUNK);
    }
}

static void do_weights(void *argument, int64_t first, int64_t last, int thread) {
    const shared_units *s = argument;
    fr_attention a;
    for (int64_t part = first; part < last; part++) {
        int64_t query = part % FR_QUERIES;
        make_unit(s->of, part / FR_QUERIES, part / FR_QUERIES, thread, &a);
        if (query < a.rows * a.heads) s->of->attention->weights(&a, query, query + 1);
    }
}

static void do_values(void *argument, int64_t first, int64_t last, int thread) {
    const shared_units *s = argument;
    fr_attention a;
    for (int64_t part = first; part < last; part++) {
        int64_t from = part % s->slices * s->columns;
        make_unit(s->of, part / s->slices, part / s->slices, thread, &a);
        int64_t end = from + s->columns < a.d ? from + s->columns : a.d;
        s->of->attention->values(&a, from, end);
    }
}

/* Whether threads share units, because these are few and long. */
static int shares_units(int64_t units, int64_t longest) {
    return fr_workers() > 1 && units < UNITS_SHARED * (int64_t)fr_workers() && longest >= SHARED_FROM;
}

static void attend(const block *b) {
    int64_t units = units_of(b);
    int64_t size = b->model->size;
    if (!shares_units(units, b->longest)) {
        run(do_attend, (void *)b, units, b->n * b->attended * b->longest / 2);
        return;
    }
    shared_units s = {.of = b, .chunks = (b->longest + FR_CHUNK - 1) / FR_CHUNK, .columns = 64};
    while (s.columns > 32 && units * ((size + s.columns - 1) / s.columns) < fr_workers()) s.columns /= 2;
    s.slices = (size + s.columns - 1) / s.columns;
    fr_parallel(do_scores, &s, units * s.chunks, 0);
    fr_parallel(do_weights, &s, units * FR_QUERIES, 0);
    fr_parallel(do_values, &s, units * s.slices, 1);
}

/* x += y, and h its norm. */
static void do_norm(void *argument, int64_t first, int64_t last, int thread) {
    const products *p = argument;
    const block *b = p->of;
    int64_t d = b->model->d;
    (void)thread;
    for (int64_t i = first; i < last; i++) {
        if (p->x) b->do_->norm(b->x + i * d, b->y + i * d, p->x, b->model->eps, d, b->h + i * d);
        else {
            b->do_->add(b->x + i * d, b->y + i * d, d);
            memcpy(b->h + i * d, b->x + i * d, (size_t)d * sizeof(float));
        }
    }
}

static void add_and_norm(const block *b, const float *gain) {
    products p = {.of = b, .x = gain};
    run(do_norm, &p, b->n, (int64_t)b->n * b->model->d);
}

/* A part is a superblock of all rows. */
static void do_gate(void *argument, int64_t first, int64_t last, int thread) {
    products *p = argument;
    const block *b = p->of;
    int64_t from = first * FR_SUPERBLOCK, end = last * FR_SUPERBLOCK < b->inner ? last * FR_SUPERBLOCK : b->inner;
    for (int64_t i = 0; i < b->n; i++) {
        float *gate = b->both + 2 * i * b->inner + from;
        b->do_->gate(gate, gate + b->inner, end - from);
    }
    if (!fr_is_float(p->matrix[0]->layout)) do_quantise(p, first, last, thread);
}

/* Copies the block's states after `layers` layers, if they are wanted. */
static void capture(const block *b, int layers) {
    const fr_batch *batch = b->batch;
    int64_t d = b->model->d;
    for (int c = 0; c < batch->captures; c++)
        for (int64_t i = 0; i < b->n && batch->after[c] == layers; i++)
            memcpy(batch->captured + ((b->start + i) * batch->captures + c) * d, b->x + i * d, (size_t)d * sizeof(float));
}

static void run_layers(block *b) {
    const fr_model *m = b->model;
    const fr_cache *cache = b->cache;
    int64_t n = b->n, d = m->d, kept = (int64_t)m->groups * m->size;
    run(do_embed, b, n, n * d);
    if (m->fuse.panels) {
        products fuse = {.of = b, .matrix = {b->batch->tokens ? &m->fuse : &m->alone}, .out = {b->y}, .out_stride = {d},
                         .count = 1, .x = b->both, .stride = 2 * d, .rows = b->n};
        multiply(&fuse, 0);
    }
    memset(b->x, 0, (size_t)(n * d) * sizeof(float));
    add_and_norm(b, m->layer->first);
    for (int i = 0; i < m->layers; i++) {
        const fr_layer *l = m->layer + i;
        capture(b, i);
        b->layer = l;
        b->cache = cache + i;
        float *k = b->parts + b->attended;
        products qkv = {.of = b, .matrix = {&l->q, &l->k, &l->v}, .out = {b->parts, k, k + kept},
                        .out_stride = {b->every, b->every, b->every}, .count = 3, .x = b->h, .stride = d, .rows = b->n};
        multiply(&qkv, 0);
        run(do_heads, b, n, n * b->every);
        attend(b);
        products o = {.of = b, .matrix = {&l->o}, .out = {b->y}, .out_stride = {d}, .count = 1, .x = b->out,
                      .stride = b->attended, .rows = b->n};
        multiply(&o, 0);
        add_and_norm(b, l->second);
        products both = {.of = b, .matrix = {&l->gate, &l->up}, .out = {b->both, b->both + b->inner},
                         .out_stride = {2 * b->inner, 2 * b->inner}, .count = 2, .x = b->h, .stride = d, .rows = b->n};
        multiply(&both, 0);
        products down = {.of = b, .matrix = {&l->down}, .out = {b->y}, .out_stride = {d}, .count = 1, .x = b->both,
                         .stride = 2 * b->inner, .rows = b->n};
        run(do_gate, &down, superblocks(b->inner), 4 * n * b->inner);
        multiply(&down, 1);
        add_and_norm(b, i + 1 < m->layers ? l[1].first : m->norm);
    }
    capture(b, m->layers);
    b->cache = cache;
}

static void do_extra(void *argument, int64_t first, int64_t last, int thread) {
    const products *p = argument;
    const fr_batch *batch = p->of->batch;
    const fr_matrix *head = &p->of->model->head;
    float found[BLOCK * FR_PANEL];
    (void)thread;
    for (; first < last; first++) {
        int panel = batch->extra[first] / FR_PANEL, lane = batch->extra[first] % FR_PANEL;
        /* outputs are columns of whole rows */
        fr_product(head, p->x, (int)p->stride, p->of->records, p->rows, found - (int64_t)panel * FR_PANEL, FR_PANEL, panel, panel + 1);
        for (int i = 0; i < p->rows; i++) p->out[0][i * p->out_stride[0] + first] = found[i * FR_PANEL + lane];
    }
}

/* Logits of the block's asked tokens. Adjacent rows in `asked` are multiplied together. */
static void ask(const block *b) {
    const fr_batch *batch = b->batch;
    const fr_matrix *whole = &b->model->head, *head = batch->head ? batch->head : whole;
    int64_t d = b->model->d, outputs = head->outputs, stride = outputs + batch->extras;
    for (int i = 0; i < batch->asks;) {
        int rows = 0, at = i;
        for (; i < batch->asks && rows < b->n; i++, rows++) {
            int64_t token = batch->asked[i] - b->start;
            if (token < 0 || token >= b->n) break;
            memcpy(b->y + rows * d, b->h + token * d, (size_t)d * sizeof(float));
        }
        if (!rows) {
            i++;
            continue;
        }
        products p = {.of = b, .matrix = {head}, .out = {batch->logits + at * stride}, .out_stride = {stride},
                      .count = 1, .x = b->y, .stride = d, .rows = rows};
        multiply(&p, 0);
        if (!batch->extras) continue;
        p.matrix[0] = whole;
        if (fr_is_float(head->layout) && !fr_is_float(whole->layout)) do_quantise(&p, 0, superblocks(d), 0);
        p.out[0] += outputs;
        fr_parallel(do_extra, &p, batch->extras, 0);
    }
}

static int matrix_fits(const fr_matrix *m, int64_t outputs, int64_t inputs) {
    return m->panels && m->outputs == outputs && m->inputs == inputs && fr_panel_bytes(m->layout, m->outputs, m->inputs, 0);
}

static int head_fits(const fr_model *m, const fr_matrix *head) { return matrix_fits(head, head->outputs, m->d) && head->outputs > 0; }

static int model_fits(const fr_model *m) {
    int64_t d = m->d, attended = (int64_t)m->heads * m->size, kept = (int64_t)m->groups * m->size;
    if (d < 8 || d % 8 || m->size < 8 || m->size % 8 || m->groups < 1 || m->heads < m->groups || m->heads % m->groups) return 0;
    if (m->layers < 1 || (m->fuse.panels && !matrix_fits(&m->fuse, d, 2 * d))) return 0;
    if (m->alone.panels && (!m->fuse.panels || !matrix_fits(&m->alone, d, d))) return 0;
    for (const fr_layer *l = m->layer; l < m->layer + m->layers; l++) {
        int64_t inner = l->gate.outputs;
        if (inner < 8 || inner % 8 || inner != m->layer->gate.outputs) return 0;
        if (!matrix_fits(&l->q, attended, d) || !matrix_fits(&l->k, kept, d) || !matrix_fits(&l->v, kept, d)) return 0;
        if (!matrix_fits(&l->o, d, attended) || !matrix_fits(&l->gate, inner, d) || !matrix_fits(&l->up, inner, d)) return 0;
        if (!matrix_fits(&l->down, d, inner) || !l->first || !l->second || l->window < 0) return 0;
        if (l->turned < 0 || l->turned > m->size || l->turned % 16 || (l->turned && (!m->cos || !m->sin))) return 0;
        /* all layers share the tables of rotations */
        if (l->turned && m->layer->turned && l->turned != m->layer->turned) return 0;
    }
    return 1;
}

static int within(const int32_t *x, int64_t n, int64_t end) {
    for (int64_t i = 0; i < n; i++)
        if (x[i] < 0 || x[i] >= end) return 0;
    return 1;
}

static int batch_fits(const fr_model *m, const fr_cache *cache, const fr_batch *b) {
    int64_t rows = cache->rows, capacity = cache->capacity;
    for (int i = 1; i < m->layers; i++) {
        rows = cache[i].rows < rows ? cache[i].rows : rows;
        capacity = cache[i].capacity < capacity ? cache[i].capacity : capacity;
    }
    if (b->n < 0 || b->path < 0 || !b->seen != !b->paths) return 0;
    if (m->fuse.panels ? !b->states || (!b->tokens && !m->alone.panels) : !b->tokens == !b->states) return 0;
    if (b->tokens && (!m->embed || !within(b->tokens, b->n, m->vocabulary))) return 0;
    if (!within(b->row, b->n, rows) || !within(b->slot, b->n, capacity) || !within(b->position, b->n, m->positions)) return 0;
    if (!within(b->length, b->n, capacity + 1) || (b->seen && !within(b->seen, b->n, b->path + 1))) return 0;
    for (int64_t i = 0; i < b->n; i++) {
        if (b->length[i] + (b->seen ? b->seen[i] : 0) < 1) return 0;
        if (b->seen && !within(b->paths + i * b->path, b->seen[i], capacity)) return 0;
    }
    if (b->asks < 0 || b->extras < 0 || (!b->asks && b->extras)) return 0;
    if (b->captures < 0 || (b->captures && (!b->captured || !within(b->after, b->captures, m->layers + 1)))) return 0;
    if (b->asks && (!within(b->asked, b->asks, b->n) || !head_fits(m, b->head ? b->head : &m->head))) return 0;
    return !b->extras || (head_fits(m, &m->head) && within(b->extra, b->extras, m->head.outputs));
}

static int64_t take(int64_t *at, int64_t bytes) {
    int64_t found = *at;
    *at += (bytes + 63) / 64 * 64;
    return found;
}

/* Divides scratch memory for blocks of `rows` rows that see at most `longest` entries. */
static int make_room(block *b, int64_t rows, int64_t longest) {
    const fr_model *m = b->model;
    int64_t d = m->d, f = sizeof(float), total = 0;
    b->attended = (int64_t)m->heads * m->size;
    b->every = b->attended + 2 * (int64_t)m->groups * m->size;
    b->inner = m->layer->gate.outputs;
    b->longest = longest;
    b->width = fr_attention_width(longest);
    int64_t inputs[] = {d, b->attended, b->inner, m->fuse.panels ? 2 * d : d}, most = 0, both = d > b->inner ? d : b->inner;
    for (int i = 0; i < 4; i++) {
        int64_t own = (int64_t)fr_record_bytes((int)inputs[i], (int)rows);
        most = own > most ? own : most;
    }
    int64_t x = take(&total, rows * d * f), h = take(&total, rows * d * f), y = take(&total, rows * d * f);
    int64_t parts = take(&total, rows * b->every * f), out = take(&total, rows * b->attended * f);
    both = take(&total, 2 * rows * both * f);
    int64_t places = fr_workers();
    int64_t units = rows * m->groups * pieces_of_group(m);
    int64_t shared = units < UNITS_SHARED * places ? units : UNITS_SHARED * places;
    if (longest >= SHARED_FROM && shared > places) places = shared;
    int64_t scores = take(&total, places * FR_QUERIES * b->width * f);
    int64_t tiles = take(&total, fr_workers() * FR_TILE * m->size * f);
    int64_t records = take(&total, most);
    char *room = fr_scratch(total);
    if (!room) return 0;
    b->x = (float *)(room + x), b->h = (float *)(room + h), b->y = (float *)(room + y);
    b->parts = (float *)(room + parts), b->out = (float *)(room + out), b->both = (float *)(room + both);
    b->scores = (float *)(room + scores), b->tiles = (float *)(room + tiles), b->records = room + records;
    return 1;
}

/* Runs a batch that fits, in a thread that has the pool. */
static int forward(const fr_model *model, const fr_cache *cache, const fr_batch *batch) {
    int64_t longest = 1;
    for (int i = 0; i < batch->n; i++) {
        int64_t own = batch->length[i] + (batch->seen ? batch->seen[i] : 0);
        longest = own > longest ? own : longest;
    }
    block b = {.model = model, .cache = cache, .batch = batch, .do_ = fr_between_chosen(), .attention = attention[fr_chosen()]};
    if (!make_room(&b, batch->n < BLOCK ? batch->n : BLOCK, longest)) return FR_NO_MEMORY;
    if (batch->n && batch->tokens && fr_values(model->embed_format, model->embed, (size_t)model->embed_row, model->d, b.x)) return FR_REFUSED;
    for (; b.start < batch->n; b.start += b.n) {
        b.n = batch->n - b.start < BLOCK ? batch->n - b.start : BLOCK;
        find_runs(&b);
        run_layers(&b);
        if (batch->normed)
            memcpy(batch->normed + (int64_t)b.start * model->d, b.h, (size_t)b.n * model->d * sizeof(float));
        ask(&b);
    }
    return 0;
}

int fr_forward(const fr_model *model, const fr_cache *cache, const fr_batch *batch) {
    if (!model_fits(model) || !batch_fits(model, cache, batch)) return FR_REFUSED;
    fr_enter();
    int found = forward(model, cache, batch);
    fr_leave();
    return found;
}

typedef struct {
    int format, outputs, inputs;
    const void *rows;
    size_t bytes;
    void *panels;
    _Atomic int is_wrong;
} packing;

static void do_pack(void *argument, int64_t first, int64_t last, int thread) {
    packing *p = argument;
    (void)thread;
    if (fr_pack(p->format, p->rows, p->bytes, p->outputs, p->inputs, p->panels, (int)first, (int)last)) p->is_wrong = 1;
}

int fr_pack_all(int format, const void *rows, size_t bytes, int outputs, int inputs, void *panels) {
    packing p = {format, outputs, inputs, rows, bytes, panels, 0};
    if (outputs < 1) return FR_REFUSED;
    fr_enter();
    fr_parallel(do_pack, &p, ((int64_t)outputs + FR_PANEL - 1) / FR_PANEL, 0);
    fr_leave();
    return p.is_wrong ? FR_REFUSED : 0;
}

typedef struct {
    const fr_matrix *m;
    const float *x;
    void *records;
    int rows;
    float *out;
} multiplying;

static void do_multiply(void *argument, int64_t first, int64_t last, int thread) {
    multiplying *p = argument;
    (void)thread;
    fr_product(p->m, p->x, p->m->inputs, p->records, p->rows, p->out, p->m->outputs, (int)first, (int)last);
}

static int multiply_rows(const fr_matrix *m, const float *x, int rows, float *out) {
    multiplying p = {m, x, NULL, 0, out};
    int found = 0, few = !fr_is_float(m->layout);
    for (int done = 0; done < rows && !found; done += p.rows) {
        p.rows = rows - done < BLOCK ? rows - done : BLOCK;
        p.x = x + (int64_t)done * m->inputs, p.out = out + (int64_t)done * m->outputs;
        if (few && !(p.records = fr_scratch((int64_t)fr_record_bytes(m->inputs, p.rows)))) found = FR_NO_MEMORY;
        if (few && !found) fr_quantise(p.x, p.rows, m->inputs, m->inputs, p.records, 0, (m->inputs + 255) / 256);
        if (!found) fr_parallel(do_multiply, &p, panels(m), 0);
    }
    return found;
}

int fr_multiply(const fr_matrix *m, const float *x, int rows, float *out) {
    if (rows < 0 || m->outputs < 1 || !matrix_fits(m, m->outputs, m->inputs)) return FR_REFUSED;
    fr_enter();
    int found = multiply_rows(m, x, rows, out);
    fr_leave();
    return found;
}

static double sum_of(const float *x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i];
    return sum;
}

static int descending(const void *x, const void *y) {
    float a = *(const float *)x, b = *(const float *)y;
    return (a < b) - (a > b);
}

/* A distribution from `size` logits, which are overwritten. Returns 0 if they are NaN. */
static int make_probs(const fr_chain_request *c, float *logits, int64_t size, float *probs) {
    const fr_between *do_ = fr_between_chosen();
    do_->exps(logits, logits[do_->argmax(logits, size)], c->turn, size, probs);
    double whole = sum_of(probs, size);
    if (!(whole > 0 && whole < INFINITY)) return 0;
    if (c->top_p < 1) {
        float *best = logits, floor = (1 - c->top_p) * (float)whole / size; /* tokens below it have less than 1 - top_p together */
        int64_t count = 0, kept = 0;
        for (int64_t i = 0; i < size; i++)
            if (probs[i] >= floor) best[count++] = probs[i];
        qsort(best, count, sizeof(float), descending);
        double before = 0, enough = c->top_p * whole;
        do before += best[kept++];
        while (kept < count && before < enough);
        for (int64_t i = 0; i < size; i++) probs[i] = probs[i] < best[kept - 1] ? 0 : probs[i];
        whole = sum_of(probs, size);
    }
    for (int64_t i = 0; i < size; i++) probs[i] *= (float)(1 / whole);
    return 1;
}

static int64_t sampled_at(const float *probs, int64_t n, double number) {
    double below = 0, whole = sum_of(probs, n);
    int64_t last = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!(probs[i] > 0)) continue;
        below += probs[i];
        last = i; /* after rounding the number may exceed all sums */
        if (number * whole < below) break;
    }
    return last;
}

#define FLOOR 0x1p-12f /* these two as in forerun/sampling/seeded.py */
#define REST 0x100000000u
#define TURNS (1 << 20)

static double uniform(uint64_t key, uint64_t which) {
    uint64_t bits = key + (which + 1) * 0x9E3779B97F4A7C15u;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
    bits ^= bits >> 31;
    return ((bits >> 12) + 0.5) * 0x1p-52;
}

static int64_t name_of(const fr_chain_request *c, int64_t outputs, int64_t place) {
    return place >= outputs ? c->extra[place - outputs] : c->names ? c->names[place] : place;
}

static int64_t place_of(const fr_chain_request *c, int64_t outputs, int64_t token) {
    int64_t place = c->places ? c->places[token] : token;
    for (int i = 0; place < 0 && i < c->extras; i++) place = c->extra[i] == token ? outputs + i : -1;
    return place;
}

static int64_t sampled_seeded(const fr_model *m, const fr_chain_request *c, int64_t outputs, const float *probs, uint64_t key) {
    double best = INFINITY, low = 0;
    int64_t winner = -1, n = outputs + c->extras;
    for (int64_t i = 0; i < n; i++) {
        low += probs[i] < FLOOR ? probs[i] : FLOOR;
        if (probs[i] <= FLOOR) continue;
        double time = -log(uniform(key, name_of(c, outputs, i))) / ((double)probs[i] - FLOOR);
        if (time < best) best = time, winner = i;
    }
    if (winner >= 0 && !(-log(uniform(key, REST)) / low < best)) return winner;
    for (uint64_t at = REST + 1; at < REST + TURNS; at += 2) {
        int64_t token = (int64_t)(uniform(key, at) * c->among);
        int64_t place = token < m->vocabulary ? place_of(c, outputs, token) : -1;
        if (place < 0) continue;
        if (uniform(key, at + 1) * FLOOR < (probs[place] < FLOOR ? probs[place] : FLOOR)) return place;
    }
    return winner < 0 ? 0 : winner; /* hardly ever; any token may be drafted */
}

static int chain_fits(const fr_model *m, const fr_cache *cache, const fr_chain_request *c, const fr_matrix *head) {
    int64_t end = (int64_t)c->length + c->count + c->most - 1, outputs = head->outputs, size = m->vocabulary;
    if (c->length < 0 || c->count < 1 || c->most < 1 || c->extras < 0 || c->ended < 0 || end > m->positions) return 0;
    for (int i = 0; i < m->layers; i++)
        if (end > cache[i].capacity || c->row < 0 || c->row >= cache[i].rows) return 0;
    if (!m->embed || !within(c->pending, c->count, size) || !head_fits(m, head)) return 0;
    if (c->names ? !within(c->names, outputs, size) || (c->keys && !c->places) : outputs > size) return 0;
    if (m->fuse.panels) return 0;
    for (int64_t i = 0; c->places && i < size; i++)
        if (c->places[i] >= outputs) return 0;
    if (c->extras && (!head_fits(m, &m->head) || !within(c->extra, c->extras, size < m->head.outputs ? size : m->head.outputs))) return 0;
    return !c->probs || !c->numbers != !c->keys;
}

static int draft(const fr_model *m, const fr_cache *cache, const fr_chain_request *c, const fr_matrix *head, void *room) {
    int64_t outputs = head->outputs, size = outputs + c->extras;
    int32_t *row = room, *slot = row + c->count, *length = slot + c->count, last = c->count - 1;
    float *logits = (float *)(length + c->count), product = 1;
    fr_batch b = {.n = c->count, .tokens = c->pending, .row = row, .slot = slot, .position = slot, .length = length,
                  .asked = &last, .asks = 1, .head = head, .extra = c->extra, .extras = c->extras, .logits = logits};
    int done = 0;
    for (int i = 0; i < c->count; i++) row[i] = c->row, slot[i] = c->length + i, length[i] = slot[i] + 1;
    while (done < c->most) {
        int found = forward(m, cache, &b);
        if (found) return found;
        int64_t best;
        float probability;
        if (c->probs) {
            float *probs = c->probs + (c->keys ? 0 : done * size);
            if (!make_probs(c, logits, size, probs)) break;
            best = c->numbers ? sampled_at(probs, size, c->numbers[done]) : sampled_seeded(m, c, outputs, probs, c->keys[done]);
            probability = probs[best];
        } else {
            best = fr_between_chosen()->argmax(logits, size);
            probability = 1 / fr_between_chosen()->exps(logits, logits[best], 1, size, logits);
        }
        c->drafted[done] = (int32_t)name_of(c, outputs, best);
        c->probabilities[done] = probability;
        product *= probability;
        int is_end = !(probability >= c->least) || !(product >= c->product);
        for (int i = 0; i < c->ended; i++) is_end |= c->drafted[done] == c->ends[i];
        slot[0] = c->length + c->count + done;
        length[0] = slot[0] + 1;
        b.tokens = c->drafted + done++;
        b.n = 1;
        last = 0;
        if (is_end) break;
    }
    return done;
}

int fr_chain(const fr_model *model, const fr_cache *cache, const fr_chain_request *chain) {
    const fr_matrix *head = chain->head ? chain->head : &model->head;
    if (!model_fits(model) || !chain_fits(model, cache, chain, head)) return FR_REFUSED;
    void *room = malloc(3 * (size_t)chain->count * sizeof(int32_t) + ((size_t)head->outputs + chain->extras) * sizeof(float));
    if (!room) return FR_NO_MEMORY;
    fr_enter();
    int found = draft(model, cache, chain, head, room);
    fr_leave();
    free(room);
    return found;
}
