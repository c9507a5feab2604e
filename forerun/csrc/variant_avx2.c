#define FR_VARIANT avx2
#define FR_ISA FR_AVX2
#include "products.c"
#include "vector_ops.c"
#include "attention.c"
