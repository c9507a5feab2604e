/* Threads of our own, started once and shared by all models of a process. A job is a function over
   parts [0, parts). Threads claim pieces of it. A thread that the system does not run claims none,
   and no other waits for it. While other processes take the cores from threads that have claimed
   pieces, fewer threads do the jobs. */

#ifndef FR_THREADS_H
#define FR_THREADS_H

#include <stdint.h>

/* Does the parts [first, last); `thread` counts from 0, and none runs twice at once. */
typedef void fr_work(void *argument, int64_t first, int64_t last, int thread);

/* Sets the number of threads, the calling one included, and returns it; 0 only returns it. */
int fr_threads(int count);

/* The number of threads that do the jobs now: all, or fewer on a machine with other work. */
int fr_active_threads(void);

/* Takes the pool for the calling thread, so that the calls of other threads wait, and gives it back. */
void fr_enter(void);
void fr_leave(void);

/* The number of threads, between `fr_enter` and `fr_leave`. */
int fr_workers(void);

/* Runs a job between `fr_enter` and `fr_leave`, in pieces of `piece` parts (0: chosen here). */
void fr_parallel(fr_work *work, void *argument, int64_t parts, int64_t piece);

/* Memory that is valid between `fr_enter` and `fr_leave`, aligned to 64 bytes; NULL if none is left. One at a time. */
void *fr_scratch(int64_t bytes);

#endif
