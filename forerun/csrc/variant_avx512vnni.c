#define FR_VARIANT avx512vnni
#define FR_ISA FR_AVX512VNNI
#include "products.c"
#include "vector_ops.c"
#include "attention.c"
