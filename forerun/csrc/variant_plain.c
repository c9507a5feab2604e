#define FR_VARIANT plain
#define FR_ISA FR_PLAIN
#include "products.c"
#include "vector_ops.c"
#include "attention.c"
