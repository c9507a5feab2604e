/* A whole forward (forward.h): blocks of tokens go through all layers, one after the other.

   A block's buffers lie in one piece of scratch memory, each aligned to 64 bytes:

     residual | normed | delta | qkv | mixed | gate_up | scores | tiles | records

   Each step between products is a job of its own, whose parts are tokens (or superblocks of the
   gate, because these are quantised at once). */
#include "forward.h"

#include <math.h>
#include <string.h>

#include "attention.h"
#include "multiply.h"
#include "numbers.h"
#include "token_block.h"
#include "vector_ops.h"

#define LOGITS_PIECE 4096
#define TORCH_EPS 0x1p-23f /* torch's default of RMSNorm, which normed embeddings of heads have */

static void copy_floats(float *to, const float *from, int64_t n) {
    memcpy(to, from, (size_t)n * sizeof(float));
}

static void read_embedding(const fr_model *m, int32_t token, float *to) {
    const char *row = (const char *)m->embed + token * m->embed_row;
    fr_values(m->embed_format, row, (size_t)m->embed_row, m->d, to);
}

/* Multiplies a state by a factor of the model. */
static void multiply(const fr_token_block *b, float *state, float factor) {
    if (factor != 0 && factor != 1) b->ops->scale(state, factor, 0, b->model->d);
}

static void run_norm(const fr_token_block *b, const fr_norm *norm, const float *x, float *out) {
    const fr_model *m = b->model;
    if (m->norms_by_mean) {
        b->ops->norm_by_mean(x, norm->gain, norm->bias, m->eps, m->d, out);
    } else {
        b->ops->norm(x, norm->gain, norm->bias, m->eps, m->d, out);
    }
}

/* normed = the norm of a token's residual, or the residual itself without a gain. */
static void norm_state(const fr_token_block *b, const fr_norm *norm, int64_t token) {
    int64_t d = b->model->d;
    if (norm->gain) {
        run_norm(b, norm, b->residual + token * d, b->normed + token * d);
    } else {
        copy_floats(b->normed + token * d, b->residual + token * d, d);
    }
}

/* Writes inputs of the first layer to `residual` and `normed`. */
static void embed_job(void *argument, int64_t first, int64_t last, int thread) {
    const fr_token_block *b = argument;
    const fr_batch *batch = b->batch;
    int64_t d = b->model->d;
    (void)thread;
    for (int64_t i = first; i < last; i++) {
        int64_t at = b->start + i;
        if (batch->states) {
            copy_floats(b->residual + i * d, batch->states + at * d, d);
        } else {
            read_embedding(b->model, batch->tokens[at], b->residual + i * d);
            multiply(b, b->residual + i * d, b->model->embedding_factor);
        }
        norm_state(b, &b->model->layer->attention_norm, i);
    }
}

/* Writes inputs of a head's first matrix to `gate_up`: states and, beside them, the normed
   embeddings of the next tokens, if there are any. */
static void embed_beside_job(void *argument, int64_t first, int64_t last, int thread) {
    const fr_token_block *b = argument;
    const fr_batch *batch = b->batch;
    int64_t d = b->model->d;
    (void)thread;
    for (int64_t i = first; i < last; i++) {
        int64_t at = b->start + i;
        float *state = b->gate_up + 2 * i * d;
        float *embedding = state + d;
        copy_floats(state, batch->states + at * d, d);
        if (!batch->tokens) continue;
        read_embedding(b->model, batch->tokens[at], embedding);
        multiply(b, embedding, b->model->embedding_factor);
        b->ops->norm(embedding, NULL, NULL, TORCH_EPS, d, embedding);
    }
}

/* Stores a head's keys or values at a number of the cache. */
static void store(const fr_token_block *b, const float *x, void *numbers, int64_t at) {
    int64_t size = b->model->size;
    if (b->cache->is_float32) {
        copy_floats((float *)numbers + at, x, size);
    } else {
        b->ops->to_half(x, size, (uint16_t *)numbers + at);
    }
}

/* Makes queries and keys ready for attention, and stores keys and values in the cache. */
static void heads_job(void *argument, int64_t first, int64_t last, int thread) {
    const fr_token_block *b = argument;
    const fr_model *m = b->model;
    const fr_layer *l = b->layer;
    int64_t size = m->size;
    const fr_rotation *rotation = l->rotation < 0 ? NULL : m->rotation + l->rotation;
    float scale = m->attention_scale != 0 ? m->attention_scale : 1 / sqrtf((float)size);
    (void)thread;
    for (int64_t i = first; i < last; i++) {
        int64_t at = b->start + i;
        int64_t position = b->batch->position[at];
        float *q = b->qkv + i * b->qkv_width;
        float *k = q + b->query_width;
        float *v = k + m->groups * size;
        fr_head_steps steps = {
            .bias = l->q_bias,
            .gain = l->q_norm,
            .eps = m->eps,
            .scale = scale,
            .norms_together = l->norms_heads_together,
            .norms_rotated = l->norms_heads_rotated,
        };
        if (rotation) {
            steps.dims = rotation->dims;
            steps.cos = rotation->cos + position * (rotation->dims / 2);
            steps.sin = rotation->sin + position * (rotation->dims / 2);
            steps.is_interleaved = rotation->is_interleaved;
            if (rotation->scale) steps.scale *= rotation->scale[position];
        }
        b->ops->heads(q, &steps, m->heads, size);
        steps.bias = l->k_bias;
        steps.gain = l->k_norm;
        steps.scale = 1;
        b->ops->heads(k, &steps, m->groups, size);
        if (l->v_bias) b->ops->add(v, l->v_bias, m->groups * size);
        int64_t entry = b->batch->row[at] * b->cache->row + b->batch->slot[at] * size;
        for (int g = 0; g < m->groups; g++) {
            store(b, k + g * size, b->cache->keys, entry + g * b->cache->group);
            store(b, v + g * size, b->cache->values, entry + g * b->cache->group);
        }
    }
}

typedef struct {
    const fr_token_block *block;
    const float *bias;    /* of `delta`; NULL: there is none */
    const fr_norm *after; /* of `delta` */
    const fr_norm *next;  /* of what is read next; NULL: `normed` stays */
} norm_request;

static void norm_job(void *argument, int64_t first, int64_t last, int thread) {
    const norm_request *request = argument;
    const fr_token_block *b = request->block;
    int64_t d = b->model->d;
    (void)thread;
    for (int64_t i = first; i < last; i++) {
        float *delta = b->delta + i * d;
        if (request->bias) b->ops->add(delta, request->bias, d);
        if (request->after->gain) run_norm(b, request->after, delta, delta);
        multiply(b, delta, b->model->residual_factor);
        b->ops->add(b->residual + i * d, delta, d);
        if (request->next) norm_state(b, request->next, i);
    }
}

/* Adds `delta`, with its bias, norm and factor, to the residual, and norms that for what reads it
   next. */
static void add_and_norm(const fr_token_block *b, const float *bias, const fr_norm *after,
                         const fr_norm *next) {
    norm_request request = {b, bias, after, next};
    fr_run(norm_job, &request, b->n, (int64_t)b->n * b->model->d);
}

typedef struct {
    const fr_token_block *block;
    const fr_products *down; /* what the gate is multiplied with next */
} gate_request;

/* A part is a superblock of all rows. */
static void gate_job(void *argument, int64_t first, int64_t last, int thread) {
    const gate_request *request = argument;
    const fr_token_block *b = request->block;
    const fr_layer *l = b->layer;
    int64_t from = first * FR_SUPERBLOCK;
    int64_t end = fr_min(last * FR_SUPERBLOCK, b->inner);
    (void)thread;
    for (int64_t i = 0; i < b->n; i++) {
        float *gate = b->gate_up + 2 * i * b->inner + from;
        float *up = fr_is_gated(l) ? gate + b->inner : NULL;
        if (l->gate_bias) b->ops->add(gate, l->gate_bias + from, end - from);
        if (l->up_bias) b->ops->add(up, l->up_bias + from, end - from);
        b->ops->activate(l->activation, gate, up, end - from);
    }
    if (!fr_is_float(request->down->matrix[0]->layout)) {
        fr_quantise_rows(request->down, first, last);
    }
}

/* Multiplies the rows of a buffer by one matrix, to `delta`. */
static fr_products to_delta(const fr_token_block *b, const fr_matrix *m, const float *x,
                            int64_t stride) {
    return (fr_products){
        .matrix = {m},
        .out = {b->delta},
        .out_stride = {b->model->d},
        .count = 1,
        .x = x,
        .stride = stride,
        .rows = b->n,
        .records = b->records,
    };
}

/* Writes what the first layer reads to `residual` and `normed`. */
static void run_embedding(const fr_token_block *b) {
    const fr_model *m = b->model;
    const fr_norm none = {NULL, NULL};
    int64_t numbers = (int64_t)b->n * m->d;
    if (!m->fuse.panels) {
        fr_run(embed_job, (void *)b, b->n, numbers);
        return;
    }
    fr_run(embed_beside_job, (void *)b, b->n, numbers);
    const fr_matrix *first = b->batch->tokens ? &m->fuse : &m->alone;
    fr_products p = to_delta(b, first, b->gate_up, 2 * (int64_t)m->d);
    fr_run_products(&p, 0);
    memset(b->residual, 0, (size_t)numbers * sizeof(float));
    add_and_norm(b, NULL, &none, &m->layer->attention_norm);
}

/* Adds a matrix to products, unless it is empty. */
static void add_matrix(fr_products *p, const fr_matrix *m, float *out, int64_t stride) {
    if (!m->panels) return;
    p->matrix[p->count] = m;
    p->out[p->count] = out;
    p->out_stride[p->count] = stride;
    p->count++;
}

static fr_products of_normed(const fr_token_block *b) {
    return (fr_products){
        .x = b->normed,
        .stride = b->model->d,
        .rows = b->n,
        .records = b->records,
    };
}

static void run_attention(const fr_token_block *b) {
    const fr_layer *l = b->layer;
    float *k = b->qkv + b->query_width;
    float *v = k + (int64_t)b->model->groups * b->model->size;
    fr_products qkv = of_normed(b);
    add_matrix(&qkv, &l->q, b->qkv, b->qkv_width);
    add_matrix(&qkv, &l->k, k, b->qkv_width);
    add_matrix(&qkv, &l->v, v, b->qkv_width);
    fr_run_products(&qkv, 0);
    fr_run(heads_job, (void *)b, b->n, b->n * b->qkv_width);
    fr_attend(b);
    fr_products o = to_delta(b, &l->o, b->mixed, b->query_width);
    fr_run_products(&o, 0);
}

static void run_mlp(const fr_token_block *b) {
    const fr_layer *l = b->layer;
    fr_products gate_up = of_normed(b);
    add_matrix(&gate_up, &l->gate, b->gate_up, 2 * b->inner);
    add_matrix(&gate_up, &l->up, b->gate_up + b->inner, 2 * b->inner);
    fr_run_products(&gate_up, 0);
    fr_products down = to_delta(b, &l->down, b->gate_up, 2 * b->inner);
    gate_request request = {b, &down};
    /* Exponentials take about as long as four other numbers. */
    fr_run(gate_job, &request, fr_superblocks(b->inner), 4 * b->n * b->inner);
    fr_run_products(&down, 1);
}

/* Copies the block's states after so many layers, if they are wanted. */
static void capture(const fr_token_block *b, int layers) {
    const fr_batch *batch = b->batch;
    int64_t d = b->model->d;
    for (int c = 0; c < batch->captures; c++) {
        if (batch->after[c] != layers) continue;
        for (int64_t i = 0; i < b->n; i++) {
            float *to = batch->captured + ((b->start + i) * batch->captures + c) * d;
            copy_floats(to, b->residual + i * d, d);
        }
    }
}

static void run_layers(fr_token_block *b, const fr_cache *cache) {
    const fr_model *m = b->model;
    run_embedding(b);
    for (int i = 0; i < m->layers; i++) {
        capture(b, i);
        b->layer = m->layer + i;
        b->cache = cache + i;
        b->inner = b->layer->down.inputs;
        const fr_layer *l = b->layer;
        const fr_norm *next = i + 1 < m->layers ? &l[1].attention_norm : &m->norm;
        run_attention(b);
        add_and_norm(b, l->o_bias, &l->attention_after, l->is_parallel ? NULL : &l->mlp_norm);
        if (l->down.panels) run_mlp(b);
        if (l->experts) fr_mix_experts(b);
        add_and_norm(b, l->down_bias, &l->mlp_after, next);
    }
    capture(b, m->layers);
}

/* Products with single outputs of the model's own head. */
typedef struct {
    const fr_batch *batch;
    const fr_products *products;
} extra_request;

/* A part is an extra token. The panel that has it is multiplied, and the other outputs of the panel
   are dropped. */
static void extra_job(void *argument, int64_t first, int64_t last, int thread) {
    const extra_request *request = argument;
    const fr_products *p = request->products;
    float outputs[FR_BLOCK_TOKENS * FR_PANEL];
    (void)thread;
    for (int64_t i = first; i < last; i++) {
        int panel = request->batch->extra[i] / FR_PANEL;
        int lane = request->batch->extra[i] % FR_PANEL;
        /* fr_product writes to the columns of whole rows, so these begin before the buffer. */
        float *rows = outputs - (int64_t)panel * FR_PANEL;
        fr_product(p->matrix[0], p->x, (int)p->stride, p->records, p->rows, rows, FR_PANEL, panel,
                   panel + 1);
        for (int r = 0; r < p->rows; r++)
            p->out[0][r * p->out_stride[0] + i] = outputs[r * FR_PANEL + lane];
    }
}

/* The rows of logits [rows, width], which are changed in pieces. */
typedef struct {
    const fr_token_block *block;
    float *logits;
    int64_t numbers;
} logits_request;

/* A part is LOGITS_PIECE logits. */
static void finish_job(void *argument, int64_t first, int64_t last, int thread) {
    const logits_request *request = argument;
    const fr_model *m = request->block->model;
    int64_t from = first * LOGITS_PIECE;
    int64_t end = fr_min(last * LOGITS_PIECE, request->numbers);
    float factor = m->logit_factor != 0 ? m->logit_factor : 1;
    (void)thread;
    request->block->ops->scale(request->logits + from, factor, m->logit_cap, end - from);
}

/* Applies the model's factor and limit to logits. */
static void finish_logits(const fr_token_block *b, float *logits, int64_t numbers) {
    const fr_model *m = b->model;
    if (m->logit_cap == 0 && (m->logit_factor == 0 || m->logit_factor == 1)) return;
    logits_request request = {b, logits, numbers};
    fr_run(finish_job, &request, (numbers + LOGITS_PIECE - 1) / LOGITS_PIECE, numbers);
}

/* Copies the states of asked tokens to `delta`, from index `from` of `asked` on, while they are
   tokens of the block and there is room. Returns their number. */
static int gather_asked(const fr_token_block *b, int from) {
    const fr_batch *batch = b->batch;
    int64_t d = b->model->d;
    int rows = 0;
    while (from + rows < batch->asks && rows < b->n) {
        int64_t token = batch->asked[from + rows] - b->start;
        if (token < 0 || token >= b->n) break;
        copy_floats(b->delta + rows * d, b->normed + token * d, d);
        rows++;
    }
    return rows;
}

/* Computes the logits of extra tokens, which follow those of a head, whose inputs are quantised if
   it needs it. */
static void add_extras(const fr_token_block *b, fr_products *p) {
    const fr_matrix *head = p->matrix[0];
    const fr_matrix *whole = &b->model->head;
    p->matrix[0] = whole;
    p->out[0] += head->outputs;
    int is_quantised = !fr_is_float(head->layout);
    if (!is_quantised && !fr_is_float(whole->layout)) {
        fr_quantise_rows(p, 0, fr_superblocks(b->model->d));
    }
    extra_request request = {b->batch, p};
    fr_parallel(extra_job, &request, b->batch->extras, 0);
}

/* Computes the logits of the asked tokens at the indices [from, from + rows), whose states are in
   `delta`. */
static void compute_logits(const fr_token_block *b, int from, int rows) {
    const fr_batch *batch = b->batch;
    const fr_matrix *whole = &b->model->head;
    const fr_matrix *head = batch->head ? batch->head : whole;
    int64_t stride = head->outputs + batch->extras;
    fr_products p = {
        .matrix = {head},
        .out = {batch->logits + from * stride},
        .out_stride = {stride},
        .count = 1,
        .x = b->delta,
        .stride = b->model->d,
        .rows = rows,
        .records = b->records,
    };
    float *logits = p.out[0];
    fr_run_products(&p, 0);
    if (batch->extras) add_extras(b, &p);
    finish_logits(b, logits, rows * stride);
}
/* Computes the logits of the block's asked tokens; adjacent ones in `asked` are multiplied
   together. */
static void answer_asked(const fr_token_block *b) {
    for (int i = 0; i < b->batch->asks;) {
        int rows = gather_asked(b, i);
        if (rows) compute_logits(b, i, rows);
        i += rows ? rows : 1;
    }
}

/* Takes bytes of scratch memory, and returns where they begin. */
static int64_t take(int64_t *end, int64_t bytes) {
    int64_t start = *end;
    *end += (bytes + 63) / 64 * 64;
    return start;
}

/* The numbers of buffers of experts, at most. */
typedef struct {
    int64_t count, chosen, inner;
} expert_sizes;

static expert_sizes sizes_of_experts(const fr_model *m) {
    expert_sizes s = {0, 0, 0};
    for (int i = 0; i < m->layers; i++) {
        const fr_experts *e = m->layer[i].experts;
        if (!e) continue;
        s.count = fr_max(s.count, e->count);
        s.chosen = fr_max(s.chosen, e->chosen);
        s.inner = fr_max(s.inner, e->down->inputs);
    }
    return s;
}

/* Takes the buffers of experts; writes where they begin to `at`, in the order of fr_expert_room. */
static void take_expert_room(const expert_sizes *s, int64_t rows, int64_t d, int64_t *total,
                             int64_t at[12]) {
    int64_t places = rows * s->chosen;
    const int64_t numbers[] = {
        rows * s->count, places,       places,   places,     places,
        places,          s->count + 1, s->count, places * d, 2 * places * s->inner,
        places * d,
    };
    for (int i = 0; i < 11; i++)
        at[i] = take(total, numbers[i] * 4);
    at[11] = take(total, (int64_t)fr_record_bytes((int)fr_max(d, s->inner), (int)places));
}

static void place_expert_room(fr_expert_room *e, char *room, const int64_t at[12]) {
    e->scores = (float *)(room + at[0]);
    e->weights = (float *)(room + at[1]);
    e->chosen = (int32_t *)(room + at[2]);
    e->place = (int32_t *)(room + at[3]);
    e->token = (int32_t *)(room + at[4]);
    e->expert = (int32_t *)(room + at[5]);
    e->first = (int32_t *)(room + at[6]);
    e->active = (int32_t *)(room + at[7]);
    e->inputs = (float *)(room + at[8]);
    e->gate_up = (float *)(room + at[9]);
    e->outputs = (float *)(room + at[10]);
    e->records = room + at[11];
}

/* The bytes of the records of a layer's widest input. */
static int64_t widest_records(const fr_token_block *b, int64_t rows) {
    const fr_model *m = b->model;
    int64_t width = fr_max(m->d, fr_max(b->query_width, b->inner));
    if (m->fuse.panels) width = fr_max(width, 2 * (int64_t)m->d);
    return (int64_t)fr_record_bytes((int)width, (int)rows);
}

/* Divides scratch memory for blocks of `rows` tokens that see at most `longest` entries. Returns 0
   if there is no memory. */
static int make_room(fr_token_block *b, int64_t rows, int64_t longest) {
    const fr_model *m = b->model;
    int64_t d = m->d;
    int64_t float_bytes = sizeof(float);
    int64_t total = 0;
    b->query_width = (int64_t)m->heads * m->size;
    b->qkv_width = b->query_width + 2 * (int64_t)m->groups * m->size;
    b->inner = 0;
    for (int i = 0; i < m->layers; i++)
        b->inner = fr_max(b->inner, m->layer[i].down.inputs);
    b->longest = longest;
    b->score_width = fr_attention_width(longest);
    int64_t places = fr_score_places(m, rows, longest);
    int64_t residual = take(&total, rows * d * float_bytes);
    int64_t normed = take(&total, rows * d * float_bytes);
    int64_t delta = take(&total, rows * d * float_bytes);
    int64_t qkv = take(&total, rows * b->qkv_width * float_bytes);
    int64_t mixed = take(&total, rows * b->query_width * float_bytes);
    int64_t gate_up = take(&total, 2 * rows * fr_max(d, b->inner) * float_bytes);
    int64_t scores = take(&total, places * FR_QUERIES * b->score_width * float_bytes);
    int64_t tiles = take(&total, fr_workers() * FR_TILE * m->size * float_bytes);
    int64_t records = take(&total, widest_records(b, rows));
    int64_t of_experts[12];
    const expert_sizes sizes = sizes_of_experts(m);
    take_expert_room(&sizes, rows, d, &total, of_experts);
    char *room = fr_scratch(total);
    if (!room) return 0;
    place_expert_room(&b->experts, room, of_experts);
    b->residual = (float *)(room + residual);
    b->normed = (float *)(room + normed);
    b->delta = (float *)(room + delta);
    b->qkv = (float *)(room + qkv);
    b->mixed = (float *)(room + mixed);
    b->gate_up = (float *)(room + gate_up);
    b->scores = (float *)(room + scores);
    b->tiles = (float *)(room + tiles);
    b->records = room + records;
    return 1;
}

/* The number of entries that a token of a batch sees at most; at least 1. */
static int64_t longest_of(const fr_batch *batch) {
    int64_t longest = 1;
    for (int i = 0; i < batch->n; i++) {
        int64_t count = batch->length[i] + (batch->seen ? batch->seen[i] : 0);
        longest = fr_max(longest, count);
    }
    return longest;
}

/* Whether rows of the embedding can be read. All have one format and length, so the first one is
   tried. */
static int are_embeddings_readable(const fr_model *m, float *buffer) {
    return !fr_values(m->embed_format, m->embed, (size_t)m->embed_row, m->d, buffer);
}

int fr_run_batch(const fr_model *model, const fr_cache *cache, const fr_batch *batch) {
    fr_token_block b = {
        .model = model,
        .batch = batch,
        .ops = fr_chosen_vector_ops(),
        .attention = fr_chosen_attention(),
    };
    int64_t rows = fr_min(batch->n, FR_BLOCK_TOKENS);
    if (!make_room(&b, rows, longest_of(batch))) return FR_NO_MEMORY;
    if (batch->n && batch->tokens && !are_embeddings_readable(model, b.residual)) {
        return FR_REFUSED;
    }
    for (; b.start < batch->n; b.start += b.n) {
        b.n = (int)fr_min(batch->n - b.start, FR_BLOCK_TOKENS);
        fr_find_runs(&b);
        run_layers(&b, cache);
        if (batch->normed) {
            int64_t d = model->d;
            copy_floats(batch->normed + b.start * d, b.normed, b.n * d);
        }
        answer_asked(&b);
    }
    return 0;
}

int fr_forward(const fr_model *model, const fr_cache *cache, const fr_batch *batch) {
    if (!fr_model_fits(model) || !fr_batch_fits(model, cache, batch)) return FR_REFUSED;
    fr_enter();
    int result = fr_run_batch(model, cache, batch);
    fr_leave();
    return result;
}
