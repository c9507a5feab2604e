/* The C library of forerun: few-bit matrices on CPUs.  Version: FORERUN_ABI; the loader also compares fr_sizes with its own structures.
   No state but the chosen variant; no threads are started here: a caller gives each thread its part (panels or superblocks).
   Functions that can be refused return 0, or -1 where the arguments are not allowed; nothing is written then. */
#ifndef FORERUN_H
#define FORERUN_H
#include <stddef.h>
#include <stdint.h>

#define FORERUN_ABI 4
#define FR_PANEL 8         /* outputs a panel */
#define FR_SUPERBLOCK 256  /* inputs a record */

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

/* The inputs of 8 blocks of 32, quantised: q x scale is near the input.  Input k = 32 l + 16 h + 4 p + b of 256 is byte 64 p + 32 h + 4 l + b.
   [superblock][row]; where inputs are no multiple of 256, each block of 32 that is left over has a record of its own, with the block in every lane. */
typedef struct {
    int8_t q[256];         /* within +-127 */
    float scale[8];        /* of each block of 32 */
    float sum[8];          /* scale x sum of q */
    int16_t correction[32]; /* [h][l][b / 2]: -32 x sum of q, over p and two b */
} fr_record;

int fr_abi(void);
/* sizeof of fr_matrix, fr_record and the structures that later parts add, in the order of this header; how many there are. */
int fr_sizes(int32_t *sizes, int n);

/* Choose the instruction set: "" (the best that this CPU has), "avx512vnni", "avxvnni", "avx2", "neon" or "plain".  Its index below,
   or -1 where the CPU or this build lacks it.  Called at load, before other threads use the library; without it "plain" runs. */
#define FR_PLAIN 0
#define FR_AVX2 1
#define FR_AVXVNNI 2
#define FR_AVX512VNNI 3
#define FR_NEON 4
#define FR_ISAS 5
int fr_select(const char *name);
const char *fr_variant(void);

/* Bytes of the panels of a matrix and their layout; 0 where the format does not have such inputs (multiples of 256 for K formats, of 32 for
   other few-bit ones, of 8 for floats). */
size_t fr_panel_bytes(int format, int outputs, int inputs, int32_t *layout);
/* Panels [first, end) from the file's rows; `bytes` are there, fewer than the shape needs is refused. */
int fr_pack(int format, const void *rows, size_t bytes, int outputs, int inputs, void *panels, int first_panel, int end_panel);
/* The exact values of one output's weights: from panels, or from one row as it is in the file (an embedding's). */
int fr_unpack(const fr_matrix *m, int output, float *values);
int fr_values(int format, const void *row, size_t bytes, int inputs, float *values);

/* Records of `rows` inputs (64-byte aligned).  Superblocks: (inputs + 255) / 256. */
size_t fr_record_bytes(int inputs, int rows);
void fr_quantise(const float *x, int rows, int stride, int inputs, void *records, int first_superblock, int end_superblock);

/* out[row][output] of the outputs of panels [first, end).  Few-bit layouts read `records` only (x may be NULL), float layouts read x only (records
   may be NULL).  A row's result has the same bits whatever rows stand beside it, whichever part a thread takes, and on each variant.
   Panels: (outputs + 7) / 8. */
int fr_is_float(int layout);
void fr_product(const fr_matrix *m, const float *x, int stride, const void *records, int rows, float *out, int out_stride, int first_panel,
                int end_panel);

#ifdef __cplusplus
}
#endif
#endif
