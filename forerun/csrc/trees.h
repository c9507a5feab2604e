/* Drafted trees of R rows by a head over hidden states, in one call.

     place      0        1        2       ...      depth - 1
     states     [R, d]   [R, d]   [R, d]           [R, d]        one for each row and place
     logits     [R, S]   [R, S]   [R, S]           [R, S]
     beams      w paths of each row go on from place to place
     found      the `nodes` best paths of each row at each place

   The first call runs the `count` features of each row, with the tokens after them, behind `length`
   committed positions. The last output is the state of the row's first place. Each further state
   comes from the state before it alone or, if the model has no matrix `alone` and w is 1, from that
   state and the drafted token.

   The logits of a beam are those of its place, plus old ones that the row has for this place, plus
   the token information of the beam's last token. The value of a path is the sum of the logs of its
   tokens' probabilities, calibrated by `curves`. At each place the `nodes` paths with the largest
   values are found; the first w of them are the next beams. A path without a value, or beyond its
   row's limit, is worth -inf.

   A later call goes on. Its `start` is the number of places of earlier calls, its `features` are
   the last states [R, d] of the call before, each count is 1, and `length` counts the start - 1
   states that were run. */
#ifndef FR_TREES_H
#define FR_TREES_H

#include "forward.h"

typedef struct {
    int32_t rows;
    int32_t n; /* the sum of `count` */
    int32_t start;
    int32_t depth;
    int32_t width; /* w */
    int32_t nodes;
    int32_t context; /* later positions are replaced by the last one before it */
    const int32_t *row, *length, *count; /* [R] */
    const int32_t *limit;                /* [R] places that a row may have in all */
    const int32_t *pending;              /* [n] the tokens after the features */
    float *features;                     /* [n, d]; overwritten */
    float *states;                       /* [depth, R, d] */
    const fr_matrix *head;               /* of S hot tokens */
    const int32_t *names;                /* [S] the hot tokens */
    float *logits;                       /* [depth, R, S] of the states alone */
    const fr_matrix *information;        /* [S, r] token information; NULL: there is none */
    const float *token_states;           /* [vocabulary, r] its inputs */
    const float *const *old;             /* [R] old logits of each row, [olds, S] */
    const int32_t *olds;                 /* [R] */
    const float *curves; /* [R, depth, 2] shift and slope of the calibration; NULL: there is none */
    int32_t *beams;   /* [R, w] the last token of each beam; those of the last place afterwards */
    double *values;   /* [R, w] the values of these paths */
    int32_t *tokens;  /* [R, depth, nodes] the last token of each path found */
    int32_t *parents; /* [R, depth, nodes] the beam that the path continues */
    double *found;    /* [R, depth, nodes] the value of the path, the largest first */
} fr_growth;

/* Returns 0, FR_REFUSED or FR_NO_MEMORY (forward.h). */
int fr_grow(const fr_model *model, const fr_cache *cache, const fr_growth *growth);

#endif
