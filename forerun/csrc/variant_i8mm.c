#define FR_VARIANT i8mm
#define FR_ISA FR_I8MM
#include "products.c"
#include "vector_ops.c"
#include "attention.c"
