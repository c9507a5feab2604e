#define _GNU_SOURCE

#include "threads.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#endif

#define MOST 256     /* threads */
#define SPINS 20000  /* checks before a thread sleeps: about the time that Python takes between two calls */
#define PIECES 8     /* of a job for each thread */
#define HALF 24      /* bits of a piece's number */
#define OF_HALF (((uint64_t)1 << HALF) - 1)

/* How many threads do jobs on a machine with other work. Times are in ns. */
#define MS 1000000
#define BEARABLE 40        /* percent of the time: two threads that lose 50 are as fast as one */
#define MUCH (16 * MS)     /* more is lost, and threads become fewer: four slices of a scheduler */
#define LITTLE MS          /* the same in a trial of more threads: one slice */
#define STALL (MS / 2)     /* the shortest: a slice is longer */
#define BRIEF 64           /* checks before a wait is timed, and between looks at the core */
#define TRIAL (30 * MS)
#define SHORTEST (50 * MS) /* pause before a trial */
#define LONGEST (1000 * MS)
#define GAP (10 * MS)      /* counts at most between two jobs: the caller may have been idle */

typedef _Atomic(uint32_t) word;

/* A thread's share of the job, in a cache line of its own. `pieces` holds the end of its pieces (bits 24 to 47) and the
   next one (below). A job cannot end before its claimed pieces: the further fields are valid once a piece is claimed. */
typedef struct {
    _Alignas(64) _Atomic(uint64_t) pieces;
    fr_work *work;
    void *argument;
    int64_t parts, piece;
    uint32_t all; /* pieces of the job */
} share;

static share shares[MOST];

static struct {
    pthread_mutex_t lock;
    int wanted, started, has_handlers;
    pthread_t threads[MOST];
    _Alignas(64) word done;    /* pieces of the job */
    _Alignas(64) word calls;   /* changes with each job */
    word asleep, is_waiting, ends;
    word active;               /* threads that do jobs, the first ones of those wanted */
    word rises;                /* changes when they become more */
    _Atomic(int) core;         /* of the job's caller */
    _Alignas(64) word crowded; /* a worker did pieces on that core */
    void *scratch;
    int64_t room;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* The number of active threads. Other work on the machine makes jobs lose time in two ways. In a
   stall a worker has claimed a piece and is not run, because another process, or another guest of
   the host, has its core: everybody waits. In a crowded job a worker is run on the caller's core,
   because the others are busy: one of the two waits. Where more is lost than is bearable, fewer
   threads are faster. More are tried after a pause, which grows while trials fail. Only the thread
   that has the pool uses this. */
static struct {
    int64_t lost;      /* less what was bearable since */
    int64_t seen;      /* when that was reckoned */
    int64_t tried;     /* when the last trial began */
    int64_t next_trial;
    int64_t pause;
    uint32_t before;   /* threads before the last trial; 0: there was none */
    uint32_t step;     /* further threads of the next trial */
} pace;

/* A test has its own clock and cores. */
#ifndef FR_CLOCK
#define FR_CLOCK monotonic
static int64_t monotonic(void) {
    struct timespec found;
    clock_gettime(CLOCK_MONOTONIC, &found);
    return (int64_t)found.tv_sec * 1000 * MS + found.tv_nsec;
}
#endif

#ifndef FR_CORE
#define FR_CORE own_core
static int own_core(void) {
#ifdef __linux__
    return sched_getcpu();
#else
    return -1;
#endif
}
#endif

static inline void rest(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#ifdef __linux__
static void sleep_while(word *at, uint32_t value) { syscall(SYS_futex, at, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0); }

static void wake(word *at, int count) { syscall(SYS_futex, at, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0); }
#else
static pthread_mutex_t sleeping = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static void sleep_while(word *at, uint32_t value) {
    pthread_mutex_lock(&sleeping);
    while (atomic_load(at) == value) pthread_cond_wait(&changed, &sleeping);
    pthread_mutex_unlock(&sleeping);
}

static void wake(word *at, int count) {
    (void)at, (void)count;
    pthread_mutex_lock(&sleeping); /* a thread that has checked the word sleeps by now */
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&sleeping);
}
#endif

static int is_open(uint64_t pieces) { return (pieces & OF_HALF) < (pieces >> HALF & OF_HALF); }

static int has_pieces(share *of) { return is_open(atomic_load_explicit(&of->pieces, memory_order_relaxed)); }

static uint32_t active(void) { return atomic_load(&pool.active); }

static int is_active(int thread) { return thread < (int)active(); }

/* Does the pieces of a thread's own share, which are adjacent in memory, and then those left in other shares. A thread
   claims only if it sees a piece left, so the next piece's number passes the end by at most one for each thread. */
static void do_pieces(int thread) {
    int threads = (int)active();
    for (int i = 0; i < threads; i++) {
        share *from = &shares[(thread + i) % threads];
        uint32_t done = 0;
        while (has_pieces(from)) {
            uint64_t claimed = atomic_fetch_add_explicit(&from->pieces, 1, memory_order_acquire);
            if (!is_open(claimed)) break;
            int64_t first = (int64_t)(claimed & OF_HALF) * from->piece, last = first + from->piece;
            from->work(from->argument, first, last < from->parts ? last : from->parts, thread);
            done++;
        }
        if (!done) continue;
        uint32_t all = from->all;
        if (atomic_fetch_add(&pool.done, done) + done == all && atomic_load(&pool.is_waiting)) wake(&pool.done, 1);
    }
}

static int is_called(uint32_t seen) { return atomic_load_explicit(&pool.calls, memory_order_acquire) != seen; }

/* Whether the calling worker keeps the job's caller from its core. */
static int is_crowding(void) {
    int core = FR_CORE();
    return core >= 0 && core == atomic_load_explicit(&pool.core, memory_order_relaxed);
}

static void *run_worker(void *number) {
    int thread = (int)(intptr_t)number;
    for (;;) {
        /* Both before all checks, that of `ends` too: a later change ends the sleep. */
        uint32_t seen = atomic_load(&pool.calls);
        uint32_t rises = atomic_load(&pool.rises);
        if (atomic_load(&pool.ends)) return NULL;
        if (!is_active(thread)) {
            sleep_while(&pool.rises, rises);
            continue;
        }
        for (int i = 0; i < SPINS && is_active(thread); i++) {
            if (has_pieces(&shares[thread]) || is_called(seen)) break;
            /* Seldom, because some systems need a system call for it. */
            if (i % BRIEF == 0 && is_crowding()) break;
            rest();
        }
        if (!is_active(thread)) continue;
        if (has_pieces(&shares[thread]) || is_called(seen)) { /* other threads may have taken its own pieces */
            if (is_crowding()) atomic_store_explicit(&pool.crowded, 1, memory_order_relaxed);
            do_pieces(thread);
            continue;
        }
        atomic_fetch_add(&pool.asleep, 1);
        sleep_while(&pool.calls, seen);
        atomic_fetch_sub(&pool.asleep, 1);
    }
}

static void call_workers(void) {
    atomic_fetch_add(&pool.calls, 1);
    if (atomic_load(&pool.asleep)) wake(&pool.calls, MOST);
}

static void raise_workers(void) {
    atomic_fetch_add(&pool.rises, 1);
    wake(&pool.rises, MOST);
}

/* Threads that are no longer active see it before their next job, and sleep. */
static void set_active(uint32_t count) {
    int are_more = count > active();
    atomic_store(&pool.active, count);
    if (are_more) raise_workers();
}

static void end_workers(void) {
    atomic_store(&pool.ends, 1);
    raise_workers();
    call_workers();
    for (int i = 0; i < pool.started; i++) pthread_join(pool.threads[i], NULL);
    atomic_store(&pool.ends, 0);
    pool.started = 0;
}

static int usable(void) {
#ifdef __linux__
    cpu_set_t set;
    if (!sched_getaffinity(0, sizeof set, &set)) return CPU_COUNT(&set);
#endif
    long found = sysconf(_SC_NPROCESSORS_ONLN);
    return found > 0 ? (int)found : 1;
}

static void want(int count) {
    pool.wanted = count < MOST ? count : MOST;
    pace.before = 0;
    pace.lost = 0;
    set_active((uint32_t)pool.wanted);
}

int fr_workers(void) {
    if (!pool.wanted) want(usable());
    return pool.wanted;
}

/* A forked child has none of the threads, and starts its own. No job runs during a fork. */
static void reset_in_child(void) {
    pool.started = 0;
    atomic_store(&pool.asleep, 0);
    pthread_mutex_init(&pool.lock, NULL);
#ifndef __linux__
    pthread_mutex_init(&sleeping, NULL);
    pthread_cond_init(&changed, NULL);
#endif
}

void fr_enter(void) {
    pthread_mutex_lock(&pool.lock);
    if (!pool.has_handlers) pool.has_handlers = !pthread_atfork(fr_enter, fr_leave, reset_in_child);
}

void fr_leave(void) { pthread_mutex_unlock(&pool.lock); }

int fr_threads(int count) {
    fr_enter();
    if (count > 0 && count != pool.wanted) {
        end_workers();
        want(count);
    }
    int found = fr_workers();
    fr_leave();
    return found;
}

int fr_active_threads(void) {
    fr_enter();
    fr_workers();
    int found = (int)active();
    fr_leave();
    return found;
}

static void start_workers(void) {
    sigset_t all, before; /* the caller's threads handle signals */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.started < fr_workers() - 1) {
        if (pthread_create(&pool.threads[pool.started], NULL, run_worker, (void *)(intptr_t)(pool.started + 1))) break;
        pool.started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Takes what is bearable in the time that has passed. */
static void bear(int64_t passed, int64_t time) {
    pace.lost -= passed * BEARABLE / 100;
    if (pace.lost < 0) pace.lost = 0;
    pace.seen = time;
}

/* A trial that goes well is followed by one with twice as many further threads. */
static void try_more(int64_t time) {
    uint32_t most = (uint32_t)pool.wanted;
    if (active() == most || time < pace.next_trial) return;
    pace.before = active();
    pace.tried = time;
    pace.next_trial = time + TRIAL;
    pace.lost = MUCH - LITTLE;
    set_active(pace.before + pace.step < most ? pace.before + pace.step : most);
    pace.step *= 2;
}

/* Threads become as many as before a trial that fails, and half as many otherwise. */
static void have_fewer(int64_t time) {
    int is_trial = pace.before && time < pace.tried + TRIAL;
    int is_again = pace.before && time < pace.tried + LONGEST;
    pace.pause = is_again ? 2 * pace.pause : SHORTEST;
    if (pace.pause > LONGEST) pace.pause = LONGEST;
    pace.next_trial = time + pace.pause;
    pace.step = 1;
    pace.lost = 0;
    set_active(is_trial ? pace.before : (active() + 1) / 2);
}

/* What a job lost that waited for claimed pieces since a time. A wait that is no longer than the
   caller's own work is no stall, because pieces differ. */
static int64_t loss(int64_t begun, int64_t since, int64_t ended) {
    int64_t wait = ended - since;
    if (atomic_exchange(&pool.crowded, 0)) return ended - begun;
    return wait >= STALL && wait > since - begun ? wait : 0;
}

static int is_done(uint32_t pieces) {
    return atomic_load_explicit(&pool.done, memory_order_acquire) == pieces;
}

static void wait_for(uint32_t pieces) {
    uint32_t done;
    for (int i = 0; i < SPINS && !is_done(pieces); i++) rest();
    if (is_done(pieces)) return;
    atomic_store(&pool.is_waiting, 1);
    while ((done = atomic_load(&pool.done)) != pieces) sleep_while(&pool.done, done);
    atomic_store(&pool.is_waiting, 0);
}

/* Waits for the pieces of a job that other threads have claimed. */
static void finish(uint32_t pieces, int64_t begun) {
    for (int i = 0; i < BRIEF && !is_done(pieces); i++) rest();
    if (is_done(pieces) && !atomic_load(&pool.crowded)) return;
    int64_t since = FR_CLOCK();
    wait_for(pieces);
    int64_t ended = FR_CLOCK();
    bear(ended - begun, ended);
    pace.lost += loss(begun, since, ended);
    if (pace.lost > MUCH) have_fewer(ended);
}

/* Gives each active thread its share of a job. */
static void share_out(const share *job, int64_t threads) {
    for (int64_t t = threads - 1; t >= 0; t--) {
        share *to = &shares[t];
        to->work = job->work;
        to->argument = job->argument;
        to->parts = job->parts;
        to->piece = job->piece;
        to->all = job->all;
        uint64_t first = (uint64_t)(job->all * t / threads);
        uint64_t end = (uint64_t)(job->all * (t + 1) / threads);
        atomic_store_explicit(&to->pieces, end << HALF | first, memory_order_release);
    }
}

/* The number of threads for a job that begins at a time. */
static int64_t threads_at(int64_t time) {
    int64_t passed = time - pace.seen;
    bear(passed < GAP ? passed : GAP, time);
    try_more(time);
    return active();
}

void fr_parallel(fr_work *work, void *argument, int64_t parts, int64_t piece) {
    int64_t most = fr_workers();
    if (piece < 1) piece = (parts + most * PIECES - 1) / (most * PIECES);
    if (piece < parts / (int64_t)OF_HALF + 1) piece = parts / (int64_t)OF_HALF + 1;
    int is_shared = most > 1 && parts > piece;
    int64_t begun = is_shared ? FR_CLOCK() : 0;
    int64_t threads = is_shared ? threads_at(begun) : 1;
    if (threads == 1) {
        if (parts > 0) work(argument, 0, parts, 0);
        return;
    }
    if (pool.started < most - 1) start_workers();
    share job = {.work = work, .argument = argument, .parts = parts, .piece = piece};
    job.all = (uint32_t)((parts + piece - 1) / piece);
    atomic_store(&pool.done, 0);
    atomic_store_explicit(&pool.core, FR_CORE(), memory_order_relaxed);
    share_out(&job, threads);
    call_workers();
    do_pieces(0);
    finish(job.all, begun);
}

void *fr_scratch(int64_t bytes) {
    if (bytes > pool.room) {
        void *found = NULL;
        free(pool.scratch);
        pool.scratch = NULL;
        pool.room = 0;
        if (posix_memalign(&found, 64, (size_t)bytes)) return NULL;
        pool.scratch = found;
        pool.room = bytes;
    }
    return pool.scratch;
}
