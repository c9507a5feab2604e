/* Products, and packing, by all threads.

   The parts of a job are panels: those of the first matrix, then those of the second, and so on.

     part    0 ... 55          56 ... 63   64 ... 71
     panel   0 ... 55 of q     0 ... 7 of k  0 ... 7 of v

   On a machine with several nodes of memory (fr_nodes) a part is a slice of each matrix instead,
   because a thread has packed a slice of each, which lies in the memory of its node. */
#include "multiply.h"

#include <stddef.h>

#include "forward.h"
#include "numbers.h"
#include "threads.h"

#define MULTIPLY_ROWS 256 /* rows that fr_multiply quantises together */

static void multiply_panels(const fr_products *p, int matrix, int64_t first, int64_t end) {
    if (first >= end) return;
    fr_product(p->matrix[matrix], p->x, (int)p->stride, p->records, p->rows, p->out[matrix],
               (int)p->out_stride[matrix], (int)first, (int)end);
}

static void slices_job(void *argument, int64_t first, int64_t last, int thread) {
    const fr_products *p = argument;
    (void)thread;
    for (int i = 0; i < p->count; i++) {
        int64_t panels = fr_panels(p->matrix[i]);
        multiply_panels(p, i, panels * first / p->slices, panels * last / p->slices);
    }
}

static void products_job(void *argument, int64_t first, int64_t last, int thread) {
    const fr_products *p = argument;
    (void)thread;
    int64_t start = 0; /* the part that is the first panel of the matrix */
    for (int i = 0; i < p->count; i++) {
        int64_t panels = fr_panels(p->matrix[i]);
        int64_t from = first > start ? first - start : 0;
        multiply_panels(p, i, from, fr_min(last - start, panels));
        start += panels;
    }
}

void fr_quantise_rows(const fr_products *p, int64_t first, int64_t last) {
    fr_quantise(p->x, p->rows, (int)p->stride, p->matrix[0]->inputs, p->records, (int)first,
                (int)last);
}

static void quantise_job(void *argument, int64_t first, int64_t last, int thread) {
    (void)thread;
    fr_quantise_rows(argument, first, last);
}

void fr_run_products(const fr_products *p, int is_quantised) {
    int64_t panels = 0;
    int needs_records = 0;
    int inputs = p->matrix[0]->inputs;
    for (int i = 0; i < p->count; i++) {
        panels += fr_panels(p->matrix[i]);
        needs_records |= !fr_is_float(p->matrix[i]->layout);
    }
    if (needs_records && !is_quantised) {
        fr_run(quantise_job, (void *)p, fr_superblocks(inputs), (int64_t)inputs * p->rows);
    }
    int64_t slices = p->count > 1 ? fr_slices() : 0;
    if (slices) {
        fr_products sliced = *p;
        sliced.slices = slices;
        fr_parallel(slices_job, &sliced, slices, 1);
    } else {
        fr_parallel(products_job, (void *)p, panels, 0);
    }
}

typedef struct {
    int format, outputs, inputs;
    const void *rows;
    size_t bytes;
    void *panels;
    _Atomic int is_wrong;
} packing;

static void pack_job(void *argument, int64_t first, int64_t last, int thread) {
    packing *p = argument;
    (void)thread;
    if (fr_pack(p->format, p->rows, p->bytes, p->outputs, p->inputs, p->panels, (int)first,
                (int)last)) {
        p->is_wrong = 1;
    }
}

int fr_pack_all(int format, const void *rows, size_t bytes, int outputs, int inputs, void *panels) {
    if (outputs < 1) return FR_REFUSED;
    packing p = {format, outputs, inputs, rows, bytes, panels, 0};
    fr_enter();
    fr_parallel(pack_job, &p, ((int64_t)outputs + FR_PANEL - 1) / FR_PANEL, 0);
    fr_leave();
    return p.is_wrong ? FR_REFUSED : 0;
}

/* Multiplies in a thread that has the pool, some rows at a time. */
static int multiply_rows(const fr_matrix *m, const float *x, int rows, float *out) {
    int is_float = fr_is_float(m->layout);
    for (int done = 0; done < rows; done += MULTIPLY_ROWS) {
        fr_products p = {
            .matrix = {m},
            .out = {out + (int64_t)done * m->outputs},
            .out_stride = {m->outputs},
            .count = 1,
            .x = x + (int64_t)done * m->inputs,
            .stride = m->inputs,
            .rows = (int)fr_min(rows - done, MULTIPLY_ROWS),
        };
        if (!is_float) {
            p.records = fr_scratch((int64_t)fr_record_bytes(m->inputs, p.rows));
            if (!p.records) return FR_NO_MEMORY;
        }
        fr_run_products(&p, 0);
    }
    return 0;
}

int fr_multiply(const fr_matrix *m, const float *x, int rows, float *out) {
    if (rows < 0 || m->outputs < 1 || !fr_matrix_fits(m, m->outputs, m->inputs)) return FR_REFUSED;
    fr_enter();
    int result = multiply_rows(m, x, rows, out);
    fr_leave();
    return result;
}
