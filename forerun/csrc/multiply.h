/* Products by all threads, of one to three matrices with one input. */
#ifndef FR_MULTIPLY_H
#define FR_MULTIPLY_H

#include "forerun.h"

/* Matrices with the same inputs that multiply the same rows:

     x [rows, inputs] --+--> matrix[0] --> out[0] [rows, outputs of matrix 0]
                        +--> matrix[1] --> out[1]
                        +--> matrix[2] --> out[2]

   `stride` and `out_stride` are the numbers from one row to the next. */
typedef struct {
    const fr_matrix *matrix[3];
    float *out[3];
    int64_t out_stride[3];
    int count;
    const float *x;
    int64_t stride;
    int rows;
    void *records;  /* room for the quantised rows */
    int64_t slices; /* of each matrix, if the parts of the job are slices */
} fr_products;

static inline int fr_panels(const fr_matrix *m) { return (m->outputs + FR_PANEL - 1) / FR_PANEL; }

static inline int fr_superblocks(int64_t inputs) {
    return (int)((inputs + FR_SUPERBLOCK - 1) / FR_SUPERBLOCK);
}

/* Quantises the superblocks [first, last) of the rows, in the calling thread. */
void fr_quantise_rows(const fr_products *p, int64_t first, int64_t last);

/* Computes the products. The rows are quantised first, if a matrix of few bits needs it and
   `is_quantised` does not say that they are. */
void fr_run_products(const fr_products *p, int is_quantised);

/* Packs all panels of a matrix (fr_pack), by all threads. */
int fr_pack_all(int format, const void *rows, size_t bytes, int outputs, int inputs, void *panels);

/* Multiplies inputs [rows, inputs] to out [rows, outputs], by all threads. */
int fr_multiply(const fr_matrix *m, const float *x, int rows, float *out);

#endif
