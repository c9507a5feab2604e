/* exp and logs in double precision. The systems' own differ in their last bits, and these are the
   same on each of them. They are within 1 unit in the last place of the exact values (log1p: 3). */
#ifndef FR_LOGS_H
#define FR_LOGS_H

double fr_exp(double x);

double fr_log(double x);

/* log(1 + x) */
double fr_log1p(double x);

#endif
