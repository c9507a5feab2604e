#include "forerun.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* Variant, format, outputs, inputs, rows, bytes of weights; from stdin: weights, inputs; to stdout: results. */
int main(int argc, char **argv) {
    int format = atoi(argv[2]), outputs = atoi(argv[3]), inputs = atoi(argv[4]), rows = atoi(argv[5]);
    size_t bytes = (size_t)atol(argv[6]), count = (size_t)rows * inputs;
    if (argc != 7 || fr_select(argv[1]) < 0) return 3;
    fr_matrix m = {0, outputs, inputs, NULL};
    size_t size = fr_panel_bytes(format, outputs, inputs, &m.layout);
    void *weights = malloc(bytes), *panels = aligned_alloc(64, (size + 63) / 64 * 64);
    void *records = aligned_alloc(64, (fr_record_bytes(inputs, rows) + 63) / 64 * 64);
    float *x = malloc(4 * count), *out = malloc(4 * (size_t)rows * outputs);
    if (fread(weights, 1, bytes, stdin) != bytes || fread(x, 4, count, stdin) != count) return 4;
    if (fr_pack(format, weights, bytes, outputs, inputs, panels, 0, (outputs + FR_PANEL - 1) / FR_PANEL)) return 5;
    m.panels = panels;
    fr_quantise(x, rows, inputs, inputs, records, 0, (inputs + 255) / 256);
    fr_product(&m, x, inputs, records, rows, out, outputs, 0, (outputs + FR_PANEL - 1) / FR_PANEL);
    return fwrite(out, 4, (size_t)rows * outputs, stdout) == (size_t)rows * outputs ? 0 : 6;
}
