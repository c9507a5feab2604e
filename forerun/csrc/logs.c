/* exp and logs (logs.h) by sums of their series, in a range where few terms are enough. */
#include "logs.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

/* ln 2 as a sum. The high part has so few bits that its product with an exponent is exact. */
#define LN2_HIGH 0x1.62e42feep-1
#define LN2_LOW 0x1.a39ef35793c76p-33
#define LN2_INVERSE 0x1.71547652b82fep+0

#define ROUNDER 0x1.8p52 /* adding it rounds to an integer, in the lowest bits */
#define SQRT2 0x1.6a09e667f3bcdp+0
#define EXP_MAX 709.78271289338397 /* exp of more is infinite */
#define EXP_MIN (-745.2)           /* exp of less is 0 */
#define SUBNORMAL_BITS 54          /* that make a subnormal number normal */

static uint64_t bits_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, 8);
    return bits;
}

static double of_bits(uint64_t bits) {
    double x;
    memcpy(&x, &bits, 8);
    return x;
}

/* 2^n for a normal result. */
static double power_of_2(int64_t n) { return of_bits((uint64_t)(n + 1023) << 52); }

double fr_exp(double x) {
    if (!(x >= EXP_MIN)) return x < EXP_MIN ? 0 : x; /* NaN stays */
    if (x > EXP_MAX) return INFINITY;
    double n = (x * LN2_INVERSE + ROUNDER) - ROUNDER;
    double r = (x - n * LN2_HIGH) - n * LN2_LOW; /* within ln 2 / 2 of zero */
    double sum = 0;
    /* The terms r^k / k! from k = 2 on, divided by r^2. */
    for (int k = 13; k > 1; k--)
        sum = (sum * r + 1) / k;
    double result = 1 + (r + r * r * sum);
    /* In two steps, because the result may be subnormal or 2^1023 times a number below 2. */
    int64_t half = (int64_t)n / 2;
    return result * power_of_2(half) * power_of_2((int64_t)n - half);
}

double fr_log(double x) {
    if (!(x > 0)) return x == 0 ? -INFINITY : NAN;
    if (!(x < INFINITY)) return x;
    int64_t exponent = -1023;
    if (x < 0x1p-1022) {
        x *= power_of_2(SUBNORMAL_BITS);
        exponent -= SUBNORMAL_BITS;
    }
    uint64_t bits = bits_of(x);
    exponent += (int64_t)(bits >> 52);
    double m = of_bits((bits & 0xfffffffffffff) | (uint64_t)1023 << 52);
    if (m > SQRT2) {
        m /= 2;
        exponent++;
    }
    /* log(1 + f) = 2 s + 2 s^3 / 3 + 2 s^5 / 5 + ..., and 2 s = f - s f. */
    double f = m - 1;
    double s = f / (2 + f);
    double z = s * s;
    double sum = 0;
    for (int k = 21; k > 1; k -= 2)
        sum = (sum + 2.0 / k) * z;
    /* s (f - sum) is f - log(1 + f); of f, half a square is kept apart, because it is the largest
       part of it. */
    double square = f * f / 2;
    double rest = s * (square + sum);
    double n = (double)exponent;
    return n * LN2_HIGH - ((square - (rest + n * LN2_LOW)) - f);
}

double fr_log1p(double x) {
    double sum = 1 + x;
    if (sum == 1) return x;
    /* The log's slope makes up for what rounding the sum has lost. */
    return sum < INFINITY ? fr_log(sum) * (x / (sum - 1)) : fr_log(sum);
}
