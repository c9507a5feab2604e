/* Threads of our own, started once and shared by all models of a process.

     parts   0 1 2 3 | 4 5 6 7 | 8 9 10 11 | ...    of a job, a function over parts
     pieces  0       | 1       | 2         | ...    which threads claim

   A thread that the system does not run claims no piece, so no other thread waits for it. While
   other processes take the cores from threads that have claimed pieces, fewer threads do jobs. */
#ifndef FR_THREADS_H
#define FR_THREADS_H

#include <stdint.h>

/* Does the parts [first, last). `thread` counts from 0, and no thread's number runs twice at the
   same time. */
typedef void fr_work(void *argument, int64_t first, int64_t last, int thread);

/* Sets the number of threads, including the calling one, and returns it. 0 only returns it. */
int fr_threads(int count);

/* Spreads the workers over the nodes of the machine's memory: nodes[i] is that of cores[i], and
   nodes ascend from 0. A worker then stays on the cores of its node, and memory that it writes
   first lies there. The caller's thread stays free, because it is not ours. Returns the number of
   nodes, or 0 if there are too many cores; then nothing changes. Without a call there is one node.
 */
int fr_nodes(const int32_t *cores, const int32_t *nodes, int count);

/* The number of threads that do the jobs now: all, or fewer on a machine with other work. */
int fr_active_threads(void);

/* Takes the pool for the calling thread, so that the calls of other threads wait. */
void fr_enter(void);

/* Gives it back. */
void fr_leave(void);

/* The following functions are for a thread between fr_enter and fr_leave. */

/* The number of threads. */
int fr_workers(void);

/* The number of slices in which a job with several matrices divides each of them, so that a thread
   reads the panels that it has packed. 0: memory is the same for all threads. */
int64_t fr_slices(void);

/* Runs a job, in pieces of `piece` parts (0: the pool chooses). */
void fr_parallel(fr_work *work, void *argument, int64_t parts, int64_t piece);

/* Runs a job that computes so many numbers: by the calling thread alone, if they are so few that
   calling the others would take longer. */
void fr_run(fr_work *work, void *argument, int64_t parts, int64_t numbers);

/* Memory that is valid until fr_leave or the next call, aligned to 64 bytes. NULL: none is left. */
void *fr_scratch(int64_t bytes);

#endif
