/* How threads divide the attention of a layer.

   A unit is a run of tokens of one row, times some heads of one group:

                 group 0                  group 1          ...
                 heads 0 1 2 | 3 4 5      heads 6 7 8 | 9 ...
     run 0       unit 0      | unit 1     unit 2      |
     run 1       unit ...

   The heads of a group are divided into pieces only if they are more than FR_QUERIES. The queries
   of a unit, tokens times heads, share tiles of keys and values.

   Usually a thread does whole units. If units are few and texts are long, threads share each unit,
   in three jobs: scores by chunks of slots, weights by queries, and values by columns. */
#include "token_block.h"

#include <stddef.h>

#include "numbers.h"

#define SHARED_FROM 512 /* entries from which on threads share units, */
#define SHARED_UNITS 4  /* if there are fewer units than so many for each thread */
#define COLUMNS 64      /* of the values in a part of a shared unit, at first */
#define MIN_COLUMNS 32

static int64_t heads_of_group(const fr_model *m) { return m->heads / m->groups; }

static int64_t pieces_of_group(const fr_model *m) {
    return (heads_of_group(m) + FR_QUERIES - 1) / FR_QUERIES;
}

/* The number of tokens of a run, at most. */
static int64_t run_tokens(const fr_model *m) {
    int64_t pieces = pieces_of_group(m);
    int64_t heads_of_piece = (heads_of_group(m) + pieces - 1) / pieces;
    return FR_QUERIES / heads_of_piece;
}

static int64_t units_of(const fr_token_block *b) {
    return b->run_count * b->model->groups * pieces_of_group(b->model);
}

void fr_find_runs(fr_token_block *b) {
    const int32_t *row = b->batch->row + b->start;
    int64_t max_count = run_tokens(b->model);
    b->run_count = 0;
    for (int i = 0; i < b->n; i++) {
        fr_token_run *last = b->run_count ? b->runs + b->run_count - 1 : NULL;
        if (last && last->count < max_count && row[i] == row[last->start]) {
            last->count++;
            continue;
        }
        b->runs[b->run_count++] = (fr_token_run){i, 1};
    }
}

int64_t fr_score_places(const fr_model *m, int64_t tokens, int64_t longest) {
    int64_t threads = fr_workers();
    if (longest < SHARED_FROM) return threads;
    int64_t units = fr_min(tokens * m->groups * pieces_of_group(m), SHARED_UNITS * threads);
    return units > threads ? units : threads;
}

static fr_attention_row row_of_unit(const fr_token_block *b, int64_t token, int64_t head) {
    const fr_batch *batch = b->batch;
    int64_t at = b->start + token;
    int64_t window = b->layer->window;
    int64_t count = batch->length[at] + (batch->seen ? batch->seen[at] : 0);
    return (fr_attention_row){
        .first = window && count > window ? count - window : 0,
        .split = batch->length[at],
        .count = count,
        .path = batch->paths ? batch->paths + at * batch->path : NULL,
        .queries = b->qkv + token * b->qkv_width + head * b->model->size,
        .out = b->mixed + token * b->query_width + head * b->model->size,
    };
}

/* Fills in a unit. `place` says which scores it uses, `thread` whose tile. */
static void make_unit(const fr_token_block *b, int64_t unit, int64_t place, int thread,
                      fr_attention *a) {
    const fr_model *m = b->model;
    int64_t group_heads = heads_of_group(m);
    int64_t pieces = pieces_of_group(m);
    int64_t piece = unit % pieces;
    int64_t group = unit / pieces % m->groups;
    const fr_token_run *run = b->runs + unit / pieces / m->groups;
    int64_t head = piece * group_heads / pieces;
    int64_t row = b->batch->row[b->start + run->start];
    int64_t number_bytes = b->cache->is_float32 ? 4 : 2;
    int64_t start = (row * b->cache->row + group * b->cache->group) * number_bytes;
    a->keys = (const char *)b->cache->keys + start;
    a->values = (const char *)b->cache->values + start;
    a->width = b->score_width;
    a->rows = run->count;
    a->heads = (int)((piece + 1) * group_heads / pieces - head);
    a->d = m->size;
    a->is_float32 = b->cache->is_float32;
    a->cap = m->score_cap;
    a->sinks = b->layer->sinks ? b->layer->sinks + group * group_heads + head : NULL;
    a->scores = b->scores + place * FR_QUERIES * b->score_width;
    a->tile = b->tiles + (int64_t)thread * FR_TILE * m->size;
    for (int i = 0; i < run->count; i++)
        a->row[i] = row_of_unit(b, run->start + i, group * group_heads + head);
}

/* A part is a unit. */
static void units_job(void *argument, int64_t first, int64_t last, int thread) {
    const fr_token_block *b = argument;
    fr_attention a;
    for (int64_t unit = first; unit < last; unit++) {
        make_unit(b, unit, thread, thread, &a);
        b->attention->scores(&a, 0, INT64_MAX);
        b->attention->weights(&a, 0, a.rows * a.heads);
        b->attention->values(&a, 0, a.d);
    }
}

/* Units that threads share, and the parts of each. */
typedef struct {
    const fr_token_block *block;
    int64_t chunks;          /* of slots */
    int64_t slices, columns; /* slices of the columns, and the columns of each */
} shared_units;

/* A part is a chunk of slots. */
static void scores_job(void *argument, int64_t first, int64_t last, int thread) {
    const shared_units *s = argument;
    fr_attention a;
    for (int64_t part = first; part < last; part++) {
        int64_t unit = part / s->chunks;
        int64_t from = part % s->chunks * FR_CHUNK;
        make_unit(s->block, unit, unit, thread, &a);
        s->block->attention->scores(&a, from, from + FR_CHUNK);
    }
}

/* A part is a query. */
static void weights_job(void *argument, int64_t first, int64_t last, int thread) {
    const shared_units *s = argument;
    fr_attention a;
    for (int64_t part = first; part < last; part++) {
        int64_t unit = part / FR_QUERIES;
        int64_t query = part % FR_QUERIES;
        make_unit(s->block, unit, unit, thread, &a);
        if (query < a.rows * a.heads) s->block->attention->weights(&a, query, query + 1);
    }
}

/* A part is a slice of columns. */
static void values_job(void *argument, int64_t first, int64_t last, int thread) {
    const shared_units *s = argument;
    fr_attention a;
    for (int64_t part = first; part < last; part++) {
        int64_t unit = part / s->slices;
        int64_t from = part % s->slices * s->columns;
        make_unit(s->block, unit, unit, thread, &a);
        s->block->attention->values(&a, from, fr_min(from + s->columns, a.d));
    }
}

static int are_units_shared(int64_t units, int64_t longest) {
    int64_t threads = fr_workers();
    return threads > 1 && units < SHARED_UNITS * threads && longest >= SHARED_FROM;
}

/* Attention of units that threads share. */
static void attend_shared(const fr_token_block *b, int64_t units) {
    int64_t size = b->model->size;
    int64_t columns = COLUMNS;
    while (columns > MIN_COLUMNS && units * ((size + columns - 1) / columns) < fr_workers())
        columns /= 2;
    shared_units s = {
        .block = b,
        .chunks = (b->longest + FR_CHUNK - 1) / FR_CHUNK,
        .slices = (size + columns - 1) / columns,
        .columns = columns,
    };
    fr_parallel(scores_job, &s, units * s.chunks, 0);
    fr_parallel(weights_job, &s, units * FR_QUERIES, 0);
    fr_parallel(values_job, &s, units * s.slices, 1);
}

void fr_attend(const fr_token_block *b) {
    int64_t units = units_of(b);
    if (are_units_shared(units, b->longest)) {
        attend_shared(b, units);
        return;
    }
    fr_run(units_job, (void *)b, units, b->n * b->query_width * b->longest / 2);
}
