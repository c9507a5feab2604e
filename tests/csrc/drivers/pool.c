/* The pool's threads on a machine with other work. Time and cores are made up here, so nothing
   depends on the machine. Ends with 0, or names the line of what is wrong. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdint.h>

static int64_t made_up_time(void);
static int made_up_core(void);
#define FR_CLOCK made_up_time
#define FR_CORE made_up_core
#include "threads.c"

#include <sched.h>
#include <stdio.h>

#define JOB (MS / 10) /* from one to the next */
#define CHECK(is_so)                                                                               \
    if (!(is_so)) return __LINE__

static _Atomic(int64_t) the_time;
static atomic_int looks;   /* at the clock */
static atomic_int claimed; /* parts of the job */
static atomic_int worked;  /* by the caller: parts of the job */
static atomic_int done[2 * MAX_THREADS];
static atomic_int is_crowded; /* all threads run on one core */
static _Thread_local int is_caller;

static int64_t made_up_time(void) {
    atomic_fetch_add(&looks, 1);
    return atomic_load(&the_time);
}

static int made_up_core(void) { return is_caller || atomic_load(&is_crowded) ? 0 : 1; }

typedef struct {
    int is_together; /* no thread ends a part before each active thread has one */
    int late;        /* the thread that the caller waits for; 0: none */
    int64_t work;    /* the time that the caller takes for its first part */
    int64_t delay;   /* the time that it waits */
    int64_t gap;     /* the time since the job before; 0: JOB */
    int looks;       /* before the job */
} job;

static const job QUIET = {0};
static const job STALLED = {.is_together = 1, .late = 1, .delay = 4 * MS};

static void do_part(void *argument, int64_t first, int64_t last, int thread) {
    const job *of = argument;
    for (int64_t i = first; i < last; i++)
        atomic_fetch_add(&done[i], 1);
    atomic_fetch_add(&claimed, (int)(last - first));
    while (of->is_together && atomic_load(&claimed) < (int)active())
        sched_yield();
    if (thread == 0 && !atomic_fetch_add(&worked, 1)) atomic_fetch_add(&the_time, of->work);
    if (thread == 0 || thread != of->late) return;
    /* The caller looks at the clock when a job begins and when nothing is left but to wait. */
    while (atomic_load(&looks) < of->looks + 2)
        sched_yield();
    atomic_fetch_add(&the_time, of->delay);
}

/* Runs a job of two parts a thread; returns whether each was done once. */
static int runs(job of) {
    int parts = 2 * fr_threads(0);
    atomic_fetch_add(&the_time, of.gap ? of.gap : JOB);
    of.looks = atomic_load(&looks);
    atomic_store(&claimed, 0);
    atomic_store(&worked, 0);
    for (int i = 0; i < parts; i++)
        atomic_store(&done[i], 0);
    fr_enter();
    fr_parallel(do_part, &of, parts, 1);
    fr_leave();
    for (int i = 0; i < parts; i++)
        if (atomic_load(&done[i]) != 1) return 0;
    return 1;
}

/* Whether all of some jobs end with so many active threads. */
static int keep(int threads, int jobs, job of) {
    for (int i = 0; i < jobs; i++)
        if (!runs(of) || fr_active_threads() != threads) return 0;
    return 1;
}

/* Whether so many threads are active after so many jobs at most. */
static int become(int threads, int jobs, job of) {
    for (int i = 0; i < jobs; i++)
        if (!runs(of) || fr_active_threads() == threads) return fr_active_threads() == threads;
    return 0;
}

/* The longest pause, and a trial for each doubling. */
static int come_back(int threads) { return become(threads, (MAX_PAUSE + 8 * TRIAL) / JOB, QUIET); }

static int check_stalls(int threads) {
    CHECK(fr_threads(threads) == threads);
    CHECK(keep(threads, 300, QUIET));
    /* The first stall loses 4 ms, each further one 2.36 beyond what is bearable: 16 are passed. */
    CHECK(keep(threads, 6, STALLED));
    CHECK(keep((threads + 1) / 2, 1, STALLED));
    CHECK(become(1, 100, STALLED));
    /* Each trial ends with its first stall, and they become rare. */
    job rare = STALLED;
    rare.gap = MS;
    int64_t started_at = atomic_load(&the_time);
    CHECK(keep(1, 5000, rare));
    int64_t stalled = atomic_load(&the_time) - started_at - 5000LL * MS;
    CHECK(stalled >= STALLED.delay);
    CHECK(stalled < 5000LL * MS / 100);
    CHECK(come_back(threads));
    atomic_fetch_add(&the_time, MAX_PAUSE); /* and the pause is short again */
    CHECK(become(1, 100, STALLED));
    CHECK(become(threads, (MIN_PAUSE + 8 * TRIAL) / JOB, QUIET));
    return 0;
}

static int check_one_late_thread(void) {
    job last = {.is_together = 1, .late = 4, .delay = 4 * MS, .gap = MS};
    CHECK(fr_threads(5) == 5);
    atomic_fetch_add(&the_time, MAX_PAUSE);
    CHECK(become(3, 10, last));
    CHECK(become(4, MIN_PAUSE / MS + 10, last));
    CHECK(keep(4, 3 * TRIAL / MS, last)); /* a trial of five ends with its first stall */
    CHECK(come_back(5));
    return 0;
}

static int check_crowded_cores(int threads) {
    job of = {.is_together = 1, .work = MS};
    CHECK(fr_threads(threads) == threads);
    CHECK(keep(threads, 100, of));
    atomic_store(&is_crowded, 1);
    CHECK(become((threads + 1) / 2, 30, of));
    atomic_store(&is_crowded, 0);
    CHECK(come_back(threads));
    return 0;
}

/* Neither short waits, nor those beside longer work of the caller's, nor rare ones are stalls. */
static int check_what_is_bearable(void) {
    job brief = {.is_together = 1, .late = 1, .delay = MIN_STALL / 2};
    job long_one = {.is_together = 1, .late = 1, .work = 4 * MS, .delay = 4 * MS};
    CHECK(fr_threads(2) == 2);
    CHECK(keep(2, 200, brief));
    CHECK(keep(2, 200, long_one));
    for (int i = 0; i < 50; i++) {
        CHECK(keep(2, 1, STALLED));
        atomic_fetch_add(&the_time, 1000LL * MS);
    }
    return 0;
}

static int check_another_number(void) {
    CHECK(fr_threads(2) == 2);
    CHECK(become(1, 10, STALLED));
    CHECK(fr_threads(3) == 3);
    CHECK(fr_active_threads() == 3);
    CHECK(keep(3, 100, QUIET));
    return 0;
}

int main(void) {
    is_caller = 1;
    int wrong = check_stalls(2);
    if (!wrong) wrong = check_stalls(5);
    if (!wrong) wrong = check_one_late_thread();
    if (!wrong) wrong = check_crowded_cores(2);
    if (!wrong) wrong = check_crowded_cores(5);
    if (!wrong) wrong = check_what_is_bearable();
    if (!wrong) wrong = check_another_number();
    if (wrong) fprintf(stderr, "line %d is wrong\n", wrong);
    return wrong != 0;
}
