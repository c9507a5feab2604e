/* The matrices of the C library: packing, unpacking and multiplying weights of few bits on CPUs.

       rows of a GGUF file --fr_pack--> panels --+
                                                 +--fr_product--> out [rows, outputs]
       inputs [rows, inputs] --fr_quantise--> records

   FORERUN_ABI is the version of all headers; the loader in library.py compares it, and fr_sizes,
   with its own structures.

   The functions of this file start no threads. Their only state is the chosen instruction set. A
   caller divides a job over threads by giving each of them other panels or superblocks. A function
   that can refuse its arguments returns 0, or -1 before it has written anything. */
#ifndef FORERUN_H
#define FORERUN_H

#include <stddef.h>
#include <stdint.h>

#define FORERUN_ABI 9
#define FR_PANEL 16       /* outputs of a panel */
#define FR_SUPERBLOCK 256 /* inputs of a superblock, the unit that fr_quantise counts in */
#define FR_ROW_GROUP 8    /* rows whose records lie side by side */

#ifdef __cplusplus
extern "C" {
#endif

/* Formats of weights, as they are in GGUF files, and of wide rows (packing.c), which stand for the
   IQ1, IQ2 and IQ3 formats. */
enum fr_format {
    FR_Q4_K,
    FR_Q5_K,
    FR_Q6_K,
    FR_Q4_0,
    FR_Q4_1,
    FR_Q5_0,
    FR_Q5_1,
    FR_Q8_0,
    FR_F16,
    FR_BF16,
    FR_F32,
    FR_Q3_K,
    FR_Q2_K,
    FR_IQ4_NL,
    FR_IQ4_XS,
    FR_MXFP4,
    FR_IQ12_WIDE,
    FR_IQ3_XXS_WIDE,
    FR_IQ3_S_WIDE,
    FR_FORMATS
};

/* A packed matrix. `layout` is the format of its panels: the format of the file, except that Q3_K
   is stored as Q6_K. */
typedef struct {
    int32_t layout;
    int32_t outputs, inputs;
    const uint8_t *panels; /* fr_panel_bytes of them, aligned to 64 bytes */
} fr_matrix;

/* 32 inputs of one row, quantised: an input is about q x scale. A record fills a cache line.

   The weights are codes less an offset of 8, 16, 32 or 128 (layouts.h). Instructions that multiply
   unsigned codes therefore need a correction, -offset x sum of q, which a record holds ready for
   each offset and each way in which variants divide their sums.

   Records lie as [row / 8][block of 32 inputs][row % 8], so that 8 rows are read in order. */
typedef struct {
    int8_t q[32];             /* within +-127 */
    float scale;              /* NaN if an input is not finite */
    float sum;                /* scale x sum of q */
    int32_t whole;            /* -128 x sum of q */
    int32_t half[2];          /* -32 x sum of q, of the first 16 inputs and of the last 16 */
    int16_t half_pairs[2][2]; /* -32 x sum of q, by halves and by (input / 2) % 2 */
    int16_t pairs[2];         /* -8 x sum of q, by (input / 2) % 2 */
} fr_record;

int fr_abi(void);

/* Fills in the sizes of fr_matrix, fr_record, fr_layer, fr_model, fr_cache, fr_batch,
   fr_chain_request and fr_growth, in this order. Returns their number. */
int fr_sizes(int32_t *sizes, int n);

/* Indices of instruction sets. */
#define FR_PLAIN 0
#define FR_AVX2 1
#define FR_AVXVNNI 2
#define FR_AVX512VNNI 3
#define FR_NEON 4
#define FR_I8MM 5
#define FR_ISAS 6

/* Chooses the instruction set: "avx512vnni", "avxvnni", "avx2", "i8mm", "neon" or "plain", or ""
   for the best that this CPU has. Waits until the calls of other threads have ended. Returns the
   index of the choice, or -1 if the CPU or this build lacks it. "plain" runs until the first call.
 */
int fr_select(const char *name);

/* Returns what fr_select would return, without choosing. */
int fr_find(const char *name);

/* The name of the chosen instruction set. */
const char *fr_variant(void);

/* What the library was built from: a hash of the sources, "-", and a hash of the sources, the
   flags and the compiler. */
const char *fr_build(void);

/* The bytes of a matrix's panels, and their layout (NULL: not wanted). Returns 0 if `inputs` is no
   multiple of 256 (K formats), 32 (other formats of few bits) or 8 (floats). */
size_t fr_panel_bytes(int format, int outputs, int inputs, int32_t *layout);

/* Packs the panels [first, end) from the `bytes` bytes of the file's rows. Refuses rows that are
   too short for the shape. */
int fr_pack(int format, const void *rows, size_t bytes, int outputs, int inputs, void *panels,
            int first_panel, int end_panel);

/* Reads the exact weights of one output, from panels. */
int fr_unpack(const fr_matrix *m, int output, float *values);

/* Reads the exact weights of one row of the file, for example of an embedding. */
int fr_values(int format, const void *row, size_t bytes, int inputs, float *values);

/* The bytes of the records of `rows` rows, which must be aligned to 64 bytes. */
size_t fr_record_bytes(int inputs, int rows);

/* Quantises the superblocks [first, end) of the rows x. There are (inputs + 255) / 256 of them. */
void fr_quantise(const float *x, int rows, int stride, int inputs, void *records,
                 int first_superblock, int end_superblock);

/* Whether a layout holds floats. */
int fr_is_float(int layout);

/* Computes out[row][output] for the outputs of the panels [first, end), of which there are
   (outputs + FR_PANEL - 1) / FR_PANEL. Layouts of few bits read only `records`, and x may be NULL;
   float layouts read only x, and `records` may be NULL. The result of a row has the same bits
   whatever rows stand beside it, however threads share the panels, and on each instruction set. */
void fr_product(const fr_matrix *m, const float *x, int stride, const void *records, int rows,
                float *out, int out_stride, int first_panel, int end_panel);

#ifdef __cplusplus
}
#endif
#endif
