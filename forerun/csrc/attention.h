/* Attention by tiles: some rows of one sequence, and some heads of one group, share each tile of
   keys and values.

     slots of the sequence    | tile 0: 32 entries | tile 1 | ...   then each row's own path
     query 0 (row 0, head 0)  | scores             | scores | ...   scores of the path
     query 1 (row 0, head 1)  | ...
     query 2 (row 1, head 0)
     ... */
#ifndef FR_ATTENTION_H
#define FR_ATTENTION_H

#include <stdint.h>

/* Keys or values that are converted to float32 at a time, once for all queries. */
#define FR_TILE 32
/* Queries, rows times heads, that share a tile at most, so that they and their outputs stay in the
   caches nearby. */
#define FR_QUERIES 48
/* Slots of a part, where threads share a long text; a multiple of FR_TILE. */
#define FR_CHUNK 256
/* Floats before a query's scores: for a factor of its weights, and for what a first block of 8
   writes. */
#define FR_BEFORE 8

/* What one row sees: the entries `first` to `count` - 1. Those below `split` are slots in order;
   the later ones are the slots path[0], path[1] and so on. */
typedef struct {
    int64_t first, split, count;
    const int32_t *path;
    const float *queries; /* [heads, d], rotated and scaled */
    float *out;           /* [heads, d] */
} fr_attention_row;

/* Rows of one sequence and heads of one group. `keys` and `values` are those of the group: entries
   of d numbers in the order of slots. The scores of query q, counted row by row and head by head,
   begin at scores + q * width + FR_BEFORE. `width` is at least fr_attention_width of the longest
   row, because blocks of 8 reach beyond both ends of what a row sees. */
typedef struct {
    const void *keys, *values;
    int64_t width;
    int rows, heads, d;
    int is_float32;     /* else keys and values are float16 */
    float cap;          /* scores s become cap tanh(s / cap); 0: they do not */
    const float *sinks; /* [heads] scores of an entry without a value; NULL: there is none */
    float *scores;
    float *tile; /* [FR_TILE, d], the calling thread's own */
    fr_attention_row row[FR_QUERIES];
} fr_attention;

/* The floats of one query's scores: an odd multiple of 16, so that queries do not share the sets of
   a cache. */
static inline int64_t fr_attention_width(int64_t entries) {
    return ((FR_BEFORE + entries + 15 + 8) / 16 * 16) | 16;
}

/* The three steps of attention. Threads may share each step: scores by chunks of slots, weights by
   queries, values by columns. The bits do not depend on it, because each number is computed in one
   order. */
typedef struct {
    /* Scores of the slots [from, end), multiples of FR_TILE. The last chunk of a row's slots
       includes its path. */
    void (*scores)(const fr_attention *a, int64_t from, int64_t end);
    /* Softmax of the scores of the queries [from, end), up to a factor. */
    void (*weights)(const fr_attention *a, int64_t from, int64_t end);
    /* The columns [from, end) of the outputs, multiples of 8. */
    void (*values)(const fr_attention *a, int64_t from, int64_t end);
} fr_attention_steps;

const fr_attention_steps *fr_chosen_attention(void);

#endif
