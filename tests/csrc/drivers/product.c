/* Multiplies a matrix, read from stdin, by rows of inputs, and writes the results to stdout.

     product VARIANT FORMAT OUTPUTS INPUTS ROWS BYTES < weights (BYTES of them), then float inputs

   Ends with 3 if this processor lacks the variant, and with another number if something fails. */
#include "forerun.h"
#include "streams.h"
#include "system.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv) {
    if (argc != 7 || fr_select(argv[1]) < 0) return 3;
    have_bytes_in_streams();
    int format = atoi(argv[2]);
    int outputs = atoi(argv[3]);
    int inputs = atoi(argv[4]);
    int rows = atoi(argv[5]);
    size_t bytes = (size_t)atol(argv[6]);
    size_t input_count = (size_t)rows * inputs;
    size_t output_count = (size_t)rows * outputs;
    int panel_count = (outputs + FR_PANEL - 1) / FR_PANEL;
    fr_matrix m = {0, outputs, inputs, NULL};
    void *weights = malloc(bytes);
    void *panels = fr_allocate((int64_t)fr_panel_bytes(format, outputs, inputs, &m.layout));
    void *records = fr_allocate((int64_t)fr_record_bytes(inputs, rows));
    float *x = malloc(sizeof(float) * input_count);
    float *out = malloc(sizeof(float) * output_count);
    if (fread(weights, 1, bytes, stdin) != bytes) return 4;
    if (fread(x, sizeof(float), input_count, stdin) != input_count) return 4;
    if (fr_pack(format, weights, bytes, outputs, inputs, panels, 0, panel_count)) return 5;
    m.panels = panels;
    fr_quantise(x, rows, inputs, inputs, records, 0, (inputs + FR_SUPERBLOCK - 1) / FR_SUPERBLOCK);
    fr_product(&m, x, inputs, records, rows, out, outputs, 0, panel_count);
    return fwrite(out, sizeof(float), output_count, stdout) == output_count ? 0 : 6;
}
