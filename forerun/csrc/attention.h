/* Attention by tiles: some rows of one sequence, and all heads of one group, share each tile of
 * keys and values. */
#ifndef FR_ATTENTION_H
#define FR_ATTENTION_H

#include <stdint.h>

/* Keys or values that are converted to float32 at a time, once for all queries. */
#define FR_TILE 32
/* Queries, rows times heads, that share a tile: what they are and were stays in the caches nearby. */
#define FR_QUERIES 48
/* Slots of a part, where threads share a long text: a multiple of FR_TILE. */
#define FR_CHUNK 256
/* Floats before a query's scores: a factor of its weights, and what a first block of 8 writes. */
#define FR_BEFORE 8

/* What one row sees: the entries from `first` to `count`. Those below `split` are slots in order,
   later ones are the slots path[0], path[1] and so on. */
typedef struct {
    int64_t first, split, count;
    const int32_t *path;
    const float *queries; /* [heads, d], rotated and scaled */
    float *out; /* [heads, d] */
} fr_attention_row;

/* Rows of one sequence and heads of one group. The keys and values of that group are entries of d
   numbers in the order of slots. The scores of query q, row by row and head by head, begin at
   scores + q * width + FR_BEFORE. `width` is fr_attention_width of the longest row at least,
   because blocks of 8 reach beyond both ends of what a row sees. */
typedef struct {
    const void *keys, *values;
    int64_t width;
    int rows, heads, d, is_float32; /* else half precision */
    float *scores;
    float *tile; /* [FR_TILE, d], the calling thread's own */
    fr_attention_row row[FR_QUERIES];
} fr_attention;

/* Returns the floats of one query's scores. An odd multiple of 16, so that queries do not share the
 * sets of a cache. */
static inline int64_t fr_attention_width(int64_t entries) {
    return ((FR_BEFORE + entries + 15 + 8) / 16 * 16) | 16;
}

/* The three steps of attention. Threads may share each step: scores by chunks of slots, weights by
   queries, values by columns. The bits do not depend on it, because each number is made in one
   order. */
typedef struct {
    /* Scores of the slots [from, end), multiples of FR_TILE. The last chunk of a row's slots has
     * its path too. */
    void (*scores)(const fr_attention *a, int64_t from, int64_t end);
    /* Softmax of the scores of the queries [from, end), up to a factor. */
    void (*weights)(const fr_attention *a, int64_t from, int64_t end);
    /* The columns [from, end) of the outputs; multiples of 8. */
    void (*values)(const fr_attention *a, int64_t from, int64_t end);
} fr_attention_steps;

#endif
