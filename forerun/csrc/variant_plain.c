#define FR_VARIANT plain
#define FR_ISA FR_PLAIN
#include "products.c"
#include "between.c"
#include "attention.c"
