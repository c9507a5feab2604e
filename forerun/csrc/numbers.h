/* Minima and maxima of sizes. */
#ifndef FR_NUMBERS_H
#define FR_NUMBERS_H

#include <stdint.h>

static inline int64_t fr_min(int64_t x, int64_t y) { return x < y ? x : y; }

static inline int64_t fr_max(int64_t x, int64_t y) { return x > y ? x : y; }

#endif
