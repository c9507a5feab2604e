/* Panels: 8 outputs, stored as one unit for each 32 inputs.  A unit holds 8 blocks of 32 weights, one a lane.  A whole superblock of 256 inputs has
   one unit for each output, whose lanes are its 8 blocks.  Each remaining block (inputs no multiple of 256) has one unit, whose lanes are the outputs.
   Weight k = 16 h + 4 p + b of lane l is byte 4 l + b of vector t = 2 p + h (8 vectors of 32 bytes).  Codes of a unit:
     4 bits  128 bytes: vectors 0-3 in the low halves, 4-7 in the high halves
     5 bits  as 4 bits, then 32 bytes: bit t of a byte is vector t's highest bit
     6 bits  as 4 bits, then 32 bytes for h = 0 and 32 for h = 1: bits 2 p and 2 p + 1 are the highest bits
     8 bits  256 bytes, signed
   Scales follow the codes: float16 d and m, and bytes:
     D    d[8]: weight = d (code - 8, 16 or 0 by bits)
     DM   d[8] m[8]: d code + m
     K    sc[8] mn[8] d m: (d sc) code - m mn
     S    sc[h][8] d: (d sc) (code - 32), sc signed
     SM   sc[h][8] mn[h][8] d m: (d sc) (code - 32) - m mn
   Floats are kept as they are: [64 inputs][output][64 values], the last inputs likewise. */
#ifndef FORERUN_LAYOUTS_H
#define FORERUN_LAYOUTS_H
#include "forerun.h"

enum { D, DM, K, S, SM, FLOATS };
typedef struct {
    uint8_t bits, scales; /* of the codes, or of a float */
    uint16_t unit;        /* bytes in panels, of 8 blocks of 32 (a float layout: of 8 values) */
    uint16_t block, inputs; /* bytes and inputs of a block in the file */
    uint8_t layout;       /* in panels */
} fr_layout;

/* Rows in the order of enum fr_format; X(format, bits, scales, bytes of scales, block, inputs, layout). */
#define FR_LAYOUTS(X)                                                                                                                        \
    X(FR_Q4_K, 4, K, 20, 144, 256, FR_Q4_K)                                                                                                  \
    X(FR_Q5_K, 5, K, 20, 176, 256, FR_Q5_K)                                                                                                  \
    X(FR_Q6_K, 6, S, 18, 210, 256, FR_Q6_K)                                                                                                  \
    X(FR_Q4_0, 4, D, 16, 18, 32, FR_Q4_0)                                                                                                    \
    X(FR_Q4_1, 4, DM, 32, 20, 32, FR_Q4_1)                                                                                                   \
    X(FR_Q5_0, 5, D, 16, 22, 32, FR_Q5_0)                                                                                                    \
    X(FR_Q5_1, 5, DM, 32, 24, 32, FR_Q5_1)                                                                                                   \
    X(FR_Q8_0, 8, D, 16, 34, 32, FR_Q8_0)                                                                                                    \
    X(FR_F16, 16, FLOATS, 0, 16, 8, FR_F16)                                                                                                  \
    X(FR_BF16, 16, FLOATS, 0, 16, 8, FR_BF16)                                                                                                \
    X(FR_F32, 32, FLOATS, 0, 32, 8, FR_F32)                                                                                                  \
    X(FR_Q3_K, 6, S, 18, 110, 256, FR_Q6_K)                                                                                                  \
    X(FR_Q2_K, 6, SM, 36, 84, 256, FR_Q2_K)
#define FR_UNIT_BYTES(bits, scale_bytes) (((bits) < 16 ? 32 * (bits) : (bits)) + (scale_bytes))

extern const fr_layout fr_layouts[FR_FORMATS];

/* The functions of a variant; fr_select chooses one. */
typedef struct {
    const char *name;
    void (*quantise)(const float *, int, int, int, void *, int, int);
    void (*product)(const fr_matrix *, const float *, int, const void *, int, float *, int, int, int);
} fr_operations;
#endif
