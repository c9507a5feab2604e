/* How weights lie in panels.

   A panel holds 16 outputs, one in each lane. Weights of few bits lie in groups of 8 blocks of 32
   inputs; a group of the K formats is one of their superblocks. If the inputs of a matrix are no
   multiple of 256, its last group has fewer blocks. A group of n blocks:

     codes of block 0 | ... of block n - 1 | scales of block 0 | ... of block n - 1 | group's scales

   The codes of a block are vectors of 64 bytes, with four bytes for each of the 16 outputs:

     byte    0 1 2 3   4 5 6 7   ...   60 61 62 63
     output  0         1         ...   15

   The four bytes belong to four adjacent inputs, 4 t to 4 t + 3, where t goes from 0 to 7:

     4 bits  4 vectors: t = 2 i in the low half of vector i's bytes, t = 2 i + 1 in the high half
     5 bits  5 vectors: the low bits hold t = 0 to 4. The top three bits hold t = 5 in vectors 0
             (its three high bits) and 1 (bits 6 and 7), t = 6 in vectors 2 and 3 likewise, and
             t = 7 in vectors 4 (its three high bits), 1 and 3 (bit 5)
     6 bits  6 vectors: the low bits of vectors 0 to 2 hold t = 0 to 2, and the top two bits hold
             t = 3, the highest first; vectors 3 to 5 hold t = 4 to 7 likewise
     8 bits  8 vectors, one for each t

   Codes are unsigned, because the instructions of x86 multiply unsigned bytes by signed ones. The
   codes of NL, XS, FP4 and W are places in a table of 16 numbers (fr_numbers), which are 8-bit
   codes as those of D are.

   There are 16 of each scale, one for each output. d and m are float16, the others bytes; e is an
   exponent, of 2^(e - 128):

          of a block             of the group   weight
     D    d                                     d (code - 8, 16 or 128, by the number of bits)
     DM   d, m                                  d code + m
     K    sc, mn                 d, m           (d sc) code - m mn
     S    sc[0], sc[1]           d              (d sc) (code - 32), where sc is signed
     SM   sc[0], sc[1], mn[0],   d, m           (d sc) (code - 32) - m mn
          mn[1]

     NL   d                                     d (number - 128)
     XS   sc                  d                 (d sc) (number - 128), where sc is signed
     FP4  e                                     2^(e - 128) (number - 128)
     W    sc[0], sc[1]        d                 (d / 8 sc) (number - 128); W12, W3X and W3S differ
                                                in their numbers alone

   sc[0] belongs to the first 16 inputs of a block, sc[1] to the last 16; mn likewise.

   Floats are kept as they are, as [64 inputs][output][64 values]; the inputs that are left after
   the last 64 lie likewise. */
#ifndef FORERUN_LAYOUTS_H
#define FORERUN_LAYOUTS_H

#include "forerun.h"

/* Kinds of scales. */
enum { D, DM, K, S, SM, NL, XS, FP4, W12, W3X, W3S, FLOATS };

typedef struct {
    uint8_t bits;          /* of a code, or of a float */
    uint8_t scales;        /* the kind */
    uint16_t unit_bytes;   /* a block's codes and scales in panels; for floats, one input */
    uint16_t group_bytes;  /* the scales that a group has for itself */
    uint16_t block_bytes;  /* a block in the file */
    uint16_t block_inputs; /* its inputs */
    uint8_t layout;        /* in panels */
} fr_layout;

/* A table in the order of enum fr_format: X(format, bits, scales, bytes of a block's scales, bytes
   of a group's scales, bytes and inputs of a block in the file, layout). */
#define FR_LAYOUTS(X)                                                                              \
    X(FR_Q4_K, 4, K, 32, 64, 144, 256, FR_Q4_K)                                                    \
    X(FR_Q5_K, 5, K, 32, 64, 176, 256, FR_Q5_K)                                                    \
    X(FR_Q6_K, 6, S, 32, 32, 210, 256, FR_Q6_K)                                                    \
    X(FR_Q4_0, 4, D, 32, 0, 18, 32, FR_Q4_0)                                                       \
    X(FR_Q4_1, 4, DM, 64, 0, 20, 32, FR_Q4_1)                                                      \
    X(FR_Q5_0, 5, D, 32, 0, 22, 32, FR_Q5_0)                                                       \
    X(FR_Q5_1, 5, DM, 64, 0, 24, 32, FR_Q5_1)                                                      \
    X(FR_Q8_0, 8, D, 32, 0, 34, 32, FR_Q8_0)                                                       \
    X(FR_F16, 16, FLOATS, 0, 0, 16, 8, FR_F16)                                                     \
    X(FR_BF16, 16, FLOATS, 0, 0, 16, 8, FR_BF16)                                                   \
    X(FR_F32, 32, FLOATS, 0, 0, 32, 8, FR_F32)                                                     \
    X(FR_Q3_K, 6, S, 32, 32, 110, 256, FR_Q6_K)                                                    \
    X(FR_Q2_K, 6, SM, 64, 64, 84, 256, FR_Q2_K)                                                    \
    X(FR_IQ4_NL, 4, NL, 32, 0, 18, 32, FR_IQ4_NL)                                                  \
    X(FR_IQ4_XS, 4, XS, 16, 32, 136, 256, FR_IQ4_XS)                                               \
    X(FR_MXFP4, 4, FP4, 16, 0, 17, 32, FR_MXFP4)                                                   \
    X(FR_IQ12_WIDE, 4, W12, 32, 32, 146, 256, FR_IQ12_WIDE)                                        \
    X(FR_IQ3_XXS_WIDE, 4, W3X, 32, 32, 146, 256, FR_IQ3_XXS_WIDE)                                  \
    X(FR_IQ3_S_WIDE, 4, W3S, 32, 32, 146, 256, FR_IQ3_S_WIDE)

extern const fr_layout fr_layouts[FR_FORMATS];

/* The numbers of codes, more by 128, from NL on: those of the IQ4 formats, twice, twice those of
   MXFP4, and those of wide rows. */
extern const uint8_t fr_numbers[6][16];

static inline int fr_has_numbers(int scales) { return scales >= NL && scales <= W3S; }

static inline const uint8_t *fr_numbers_of(int scales) { return fr_numbers[scales - NL]; }

static inline int fr_is_wide(int scales) { return scales >= W12 && scales <= W3S; }

/* Whether each half of a block has its scale. */
static inline int fr_has_halves(int scales) {
    return scales == S || scales == SM || fr_is_wide(scales);
}

/* Whether weights are also fetched into the L1 cache ahead of their use. Processors of Intel gain
   by it, those of AMD lose. fr_select sets it. */
extern int fr_fetches_near;

/* The functions on matrices of one instruction set; fr_select chooses one. */
typedef struct {
    const char *name;
    void (*quantise)(const float *x, int rows, int stride, int inputs, void *records,
                     int first_superblock, int end_superblock);
    void (*product)(const fr_matrix *m, const float *x, int stride, const void *records, int rows,
                    float *out, int out_stride, int first_panel, int end_panel);
} fr_operations;

#endif
