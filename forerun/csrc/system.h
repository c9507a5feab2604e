/* What the library needs of the operating system. system.c is the only file whose calls differ
   between Linux, macOS and Windows. */
#ifndef FR_SYSTEM_H
#define FR_SYSTEM_H

#include <stdatomic.h>
#include <stdint.h>

#ifdef _WIN32
typedef void *fr_thread;
#else
#include <pthread.h>
typedef pthread_t fr_thread;
#endif

/* A number that threads can sleep on. */
typedef _Atomic(uint32_t) fr_word;

/* Sleeps until the word is changed and woken. It may return earlier. */
void fr_sleep_while(fr_word *at, uint32_t value);

/* Wakes one or all of the threads that sleep on a word. On macOS it may wake others too. */
void fr_wake_one(fr_word *at);
void fr_wake_all(fr_word *at);

/* Takes the only lock of the library, and gives it back. */
void fr_lock(void);
void fr_unlock(void);

/* Has functions called around each fork of the process, where there are forks. 0: it will. */
int fr_at_fork(void (*before)(void), void (*in_parent)(void), void (*in_child)(void));

/* Makes the locks anew, in a forked child. */
void fr_reset_locks(void);

/* Starts a thread that runs a function with its number, and handles no signals. 0: it runs. */
int fr_start_thread(fr_thread *thread, void (*run)(int number), int number);

/* Waits for its end. */
void fr_join_thread(fr_thread thread);

/* A clock in ns that never goes back. */
int64_t fr_now(void);

/* The core that runs the calling thread, or -1 where systems do not say. */
int fr_own_core(void);

/* The number of cores that this process may use. */
int fr_usable_cores(void);

/* Keeps the calling thread on some cores, where the system can. 0: it will stay there. */
int fr_stay_on(const int32_t *cores, int count);

/* Memory aligned to 64 bytes, or NULL. */
void *fr_allocate(int64_t bytes);
void fr_release(void *memory);

/* Whether an ARM processor has products of bytes: vectors of four, and matrices. */
int fr_has_dotprod(void);
int fr_has_i8mm(void);

#endif
