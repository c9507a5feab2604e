#define _GNU_SOURCE

#include "threads.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
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
    void *scratch;
    int64_t room;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER};

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

/* Does the pieces of a thread's own share, which are adjacent in memory, and then those left in other shares. A thread
   claims only if it sees a piece left, so the next piece's number passes the end by at most one for each thread. */
static void do_pieces(int thread) {
    for (int i = 0, threads = pool.wanted; i < threads; i++) {
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

static void *run_worker(void *number) {
    int thread = (int)(intptr_t)number;
    for (;;) {
        uint32_t seen = atomic_load(&pool.calls); /* before the last checks, that of `ends` too: a later call ends the sleep */
        if (atomic_load(&pool.ends)) return NULL;
        for (int i = 0; i < SPINS && !has_pieces(&shares[thread]) && !is_called(seen); i++) rest();
        if (has_pieces(&shares[thread]) || is_called(seen)) { /* other threads may have taken its own pieces */
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

static void end_workers(void) {
    atomic_store(&pool.ends, 1);
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

int fr_workers(void) {
    if (!pool.wanted) pool.wanted = usable();
    if (pool.wanted > MOST) pool.wanted = MOST;
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
        pool.wanted = count;
    }
    int found = fr_workers();
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

void fr_parallel(fr_work *work, void *argument, int64_t parts, int64_t piece) {
    int64_t threads = fr_workers();
    if (piece < 1) piece = (parts + threads * PIECES - 1) / (threads * PIECES);
    if (piece < parts / (int64_t)OF_HALF + 1) piece = parts / (int64_t)OF_HALF + 1;
    if (threads == 1 || parts <= piece) {
        if (parts > 0) work(argument, 0, parts, 0);
        return;
    }
    if (pool.started < threads - 1) start_workers();
    uint32_t pieces = (uint32_t)((parts + piece - 1) / piece), done;
    atomic_store(&pool.done, 0);
    for (int64_t t = threads - 1; t >= 0; t--) {
        share *to = &shares[t];
        to->work = work, to->argument = argument, to->parts = parts, to->piece = piece, to->all = pieces;
        uint64_t first = (uint64_t)(pieces * t / threads), end = (uint64_t)(pieces * (t + 1) / threads);
        atomic_store_explicit(&to->pieces, end << HALF | first, memory_order_release);
    }
    call_workers();
    do_pieces(0);
    for (int i = 0; i < SPINS && atomic_load_explicit(&pool.done, memory_order_acquire) != pieces; i++) rest();
    if (atomic_load(&pool.done) == pieces) return;
    atomic_store(&pool.is_waiting, 1);
    while ((done = atomic_load(&pool.done)) != pieces) sleep_while(&pool.done, done);
    atomic_store(&pool.is_waiting, 0);
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
