/* The C library of forerun: few-bit matrices on CPUs.  Version: FORERUN_ABI; the loader also compares fr_sizes with its own structures.
   These functions keep no state but the chosen variant and start no threads: a caller gives each thread its panels or superblocks.
   Those that can refuse their arguments return 0, or -1 before anything is written. */
#ifndef FORERUN_H
#define FORERUN_H
#include <stddef.h>
#include <stdint.h>

#define FORERUN_ABI 6
#define FR_PANEL 16        /* outputs a panel */
#define FR_SUPERBLOCK 256  /* inputs that fr_quantise counts by */
#define FR_TOGETHER 8      /* rows whose records lie together */

#ifdef __cplusplus
extern "C" {
#endif

/* Formats of weights as they are in GGUF files. */
enum fr_format { FR_Q4_K, FR_Q5_K, FR_Q6_K, FR_Q4_0, FR_Q4_1, FR_Q5_0, FR_Q5_1, FR_Q8_0, FR_F16, FR_BF16, FR_F32, FR_Q3_K, FR_Q2_K, FR_FORMATS };

/* A packed matrix.  `layout` is the format that panels are stored in: the file's own, but FR_Q6_K for FR_Q3_K. */
typedef struct {
    int32_t layout;
    int32_t outputs, inputs;
    const uint8_t *panels; /* 64-byte aligned, fr_panel_bytes long */
} fr_matrix;

/* 32 inputs of a row, quantised: q x scale approximates the input.  It fills a line of the cache.
   Products of unsigned codes need corrections, because the weights are codes less 8, 16, 32 or 128.
   Records lie as [rows by 8][block of 32 inputs][row of these 8], so that 8 rows are read in
   order. */
typedef struct {
    int8_t q[32];        /* within +-127 */
    float scale;
    float sum;           /* scale x sum of q */
    int32_t whole;       /* -128 x sum of q */
    int32_t half[2];     /* -32 x sum of q, of the first 16 inputs and of the last */
    int16_t pairs[2][2]; /* the same by halves and by (input / 2) % 2 */
    int16_t both[2];     /* -8 x sum of q, by (input / 2) % 2 */
} fr_record;

int fr_abi(void);
/* Fills in sizeof of fr_matrix, fr_record and the structures of forward.h, in this order; returns their number. */
int fr_sizes(int32_t *sizes, int n);

/* Choose the instruction set: "" (the best that this CPU has), "avx512vnni", "avxvnni", "avx2", "neon" or "plain".  Returns its
   index below, or -1 if the CPU or this build lacks it.  It waits until calls of other threads have
   ended.  Without it "plain" runs. */
#define FR_PLAIN 0
#define FR_AVX2 1
#define FR_AVXVNNI 2
#define FR_AVX512VNNI 3
#define FR_NEON 4
#define FR_ISAS 5
int fr_select(const char *name);
/* What fr_select would return.  It chooses nothing. */
int fr_find(const char *name);
const char *fr_variant(void);
/* What the library was built from: a hash of the sources, "-", and one of sources, flags, compiler. */
const char *fr_build(void);

/* Bytes of the panels of a matrix, and their layout; 0 if its inputs are no multiple of 256 (K formats), 32 (other few-bit ones) or 8 (floats). */
size_t fr_panel_bytes(int format, int outputs, int inputs, int32_t *layout);
/* Packs panels [first, end) from the `bytes` of the file's rows; too few for the shape are refused. */
int fr_pack(int format, const void *rows, size_t bytes, int outputs, int inputs, void *panels, int first_panel, int end_panel);
/* The exact weights of one output: from panels, or from one row of the file (of an embedding). */
int fr_unpack(const fr_matrix *m, int output, float *values);
int fr_values(int format, const void *row, size_t bytes, int inputs, float *values);

/* Records of `rows` inputs (64-byte aligned).  Superblocks: (inputs + 255) / 256. */
size_t fr_record_bytes(int inputs, int rows);
void fr_quantise(const float *x, int rows, int stride, int inputs, void *records, int first_superblock, int end_superblock);

/* Computes out[row][output] for the outputs of panels [first, end).  Few-bit layouts read `records` only (x may be NULL), float layouts read x only (records
   may be NULL).  A row's result is the same bits whatever rows run beside it, however threads share the panels, and on each variant.
   Panels: (outputs + FR_PANEL - 1) / FR_PANEL. */
int fr_is_float(int layout);
void fr_product(const fr_matrix *m, const float *x, int stride, const void *records, int rows, float *out, int out_stride, int first_panel,
                int end_panel);

#ifdef __cplusplus
}
#endif
#endif
