#define FR_VARIANT avx512vnni
#define FR_ISA FR_AVX512VNNI
#include "products.c"
#include "between.c"
#include "attention.c"
