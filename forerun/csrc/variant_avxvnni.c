#define FR_VARIANT avxvnni
#define FR_ISA FR_AVXVNNI
#include "products.c"
#include "vector_ops.c"
#include "attention.c"
