/* Threads of our own, started once and shared by all models of a process. A job is a function over parts [0, parts);
   threads claim pieces of them, and nobody waits for a thread that has claimed none: one that the system does not let
   run costs no time. */

#ifndef FR_THREADS_H
#define FR_THREADS_H

#include <stdint.h>

/* Does the parts from `first` to `last`; `thread` counts from 0, and none runs twice at once. */
typedef void fr_work(void *argument, int64_t first, int64_t last, int thread);

/* Sets how many threads work, the calling one counted, and returns it; 0 asks. */
int fr_threads(int count);

/* Takes the pool for the calling thread, so that the calls of other threads wait, and gives it back. */
void fr_enter(void);
void fr_leave(void);

/* How many threads work, between `fr_enter` and `fr_leave`. */
int fr_workers(void);

/* Runs a job between `fr_enter` and `fr_leave`, in pieces of `piece` parts (0: chosen here). */
void fr_parallel(fr_work *work, void *argument, int64_t parts, int64_t piece);

/* Memory that lives between `fr_enter` and `fr_leave`, at a multiple of 64; NULL where there is none. One at a time. */
void *fr_scratch(int64_t bytes);

#endif
