/* Panels: 16 outputs, an output a lane.  Few-bit weights of a panel lie in groups of 8 blocks of 32
   inputs, a superblock of the K formats; a matrix whose inputs are no multiple of 256 ends with a
   group of fewer blocks.  A group of n blocks:

     codes of block 0 | ... of block n - 1 | scales of block 0 | ... of block n - 1 | group's scales

   Codes of a block are vectors of 64 bytes, four bytes for each of 16 outputs:

     byte    0 1 2 3   4 5 6 7   ...   60 61 62 63
     output  0         1         ...   15

   The four bytes belong to four inputs that follow each other: 4 t to 4 t + 3, for t = 0 to 7.
     4 bits  4 vectors: t = 2 i in the low half of vector i's bytes, t = 2 i + 1 in the high half
     5 bits  as 4 bits, then one vector: bit t of a byte is the highest bit for t
     6 bits  as 4 bits, then two vectors, t = 0 to 3 and 4 to 7: the highest two bits for t are bits
             2 (t % 4) and 2 (t % 4) + 1
     8 bits  8 vectors, one a t
   Codes are unsigned, because the products of x86 multiply unsigned bytes by signed ones.
   Scales, 16 of each, for the outputs; d and m are float16, others bytes:

          of a block             of the group   weight
     D    d                                     d (code - 8, 16 or 128 by bits)
     DM   d, m                                  d code + m
     K    sc, mn                 d, m           (d sc) code - m mn
     S    sc[0], sc[1]           d              (d sc) (code - 32), sc signed
     SM   sc[0], sc[1], mn[0],   d, m           (d sc) (code - 32) - m mn
          mn[1]
   sc[0] is that of a block's first 16 inputs, sc[1] that of its last.
   Floats are kept as they are: [64 inputs][output][64 values], the last inputs likewise. */
#ifndef FORERUN_LAYOUTS_H
#define FORERUN_LAYOUTS_H
#include "forerun.h"

enum { D, DM, K, S, SM, FLOATS };
typedef struct {
    uint8_t bits, scales;   /* of the codes, or of a float */
    uint16_t unit;          /* bytes of a block's codes and scales in panels, or of an input */
    uint16_t group;         /* bytes of a group's own scales */
    uint16_t block, inputs; /* bytes and inputs of a block in the file */
    uint8_t layout;         /* in panels */
} fr_layout;

/* Rows in the order of enum fr_format; X(format, bits, scales, bytes of a block's scales, of a
   group's, block, inputs, layout). */
#define FR_LAYOUTS(X)                                                  \
    X(FR_Q4_K, 4, K, 32, 64, 144, 256, FR_Q4_K)                        \
    X(FR_Q5_K, 5, K, 32, 64, 176, 256, FR_Q5_K)                        \
    X(FR_Q6_K, 6, S, 32, 32, 210, 256, FR_Q6_K)                        \
    X(FR_Q4_0, 4, D, 32, 0, 18, 32, FR_Q4_0)                           \
    X(FR_Q4_1, 4, DM, 64, 0, 20, 32, FR_Q4_1)                          \
    X(FR_Q5_0, 5, D, 32, 0, 22, 32, FR_Q5_0)                           \
    X(FR_Q5_1, 5, DM, 64, 0, 24, 32, FR_Q5_1)                          \
    X(FR_Q8_0, 8, D, 32, 0, 34, 32, FR_Q8_0)                           \
    X(FR_F16, 16, FLOATS, 0, 0, 16, 8, FR_F16)                         \
    X(FR_BF16, 16, FLOATS, 0, 0, 16, 8, FR_BF16)                       \
    X(FR_F32, 32, FLOATS, 0, 0, 32, 8, FR_F32)                         \
    X(FR_Q3_K, 6, S, 32, 32, 110, 256, FR_Q6_K)                        \
    X(FR_Q2_K, 6, SM, 64, 64, 84, 256, FR_Q2_K)
#define FR_UNIT_BYTES(bits, scale_bytes) (((bits) < 16 ? 64 * (bits) : 2 * (bits)) + (scale_bytes))

extern const fr_layout fr_layouts[FR_FORMATS];

/* Whether weights are fetched into the L1 cache too, ahead of their use: Intel's processors gain by
   it, AMD's lose.  fr_select sets it. */
extern int fr_fetches_near;

/* The functions of a variant; fr_select chooses one. */
typedef struct {
    const char *name;
    void (*quantise)(const float *, int, int, int, void *, int, int);
    void (*product)(const fr_matrix *, const float *, int, const void *, int, float *, int, int, int);
} fr_operations;
#endif
