#define FR_VARIANT avxvnni
#define FR_ISA FR_AVXVNNI
#include "products.c"
#include "between.c"
#include "attention.c"
