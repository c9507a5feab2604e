#define FR_VARIANT neon
#define FR_ISA FR_NEON
#include "products.c"
#include "between.c"
#include "attention.c"
