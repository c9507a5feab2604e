#define FR_VARIANT neon
#define FR_ISA FR_NEON
#include "products.c"
#include "vector_ops.c"
#include "attention.c"
