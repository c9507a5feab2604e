/* The operating system (system.h), in one part for each of them. */
#define _GNU_SOURCE
#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#ifndef _WIN32_WINNT
#define _WIN32_WINNT 0x0A00 /* Windows 10 */
#endif
#endif

#include "system.h"

#include <stdlib.h>

#ifdef _WIN32
#include <malloc.h>
#include <windows.h>
#else
#include <signal.h>
#include <time.h>
#include <unistd.h>
#endif

#ifdef __linux__
#include <linux/futex.h>
#include <sched.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#endif

#ifdef __APPLE__
#include <sys/sysctl.h>
#endif

#define NS 1000000000

/* Sleeping. */

#if defined(__linux__)
void fr_sleep_while(fr_word *at, uint32_t value) {
    syscall(SYS_futex, at, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(fr_word *at, int count) {
    syscall(SYS_futex, at, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

void fr_wake_one(fr_word *at) { wake(at, 1); }

void fr_wake_all(fr_word *at) { wake(at, INT32_MAX); }
#elif defined(_WIN32)
void fr_sleep_while(fr_word *at, uint32_t value) {
    WaitOnAddress((volatile void *)at, &value, sizeof value, INFINITE);
}

void fr_wake_one(fr_word *at) { WakeByAddressSingle((void *)at); }

void fr_wake_all(fr_word *at) { WakeByAddressAll((void *)at); }
#else
/* One condition for all words. The systems' calls for single words are private (macOS before 14.4)
   or differ between systems. */
static pthread_mutex_t sleeping = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

void fr_sleep_while(fr_word *at, uint32_t value) {
    pthread_mutex_lock(&sleeping);
    while (atomic_load(at) == value)
        pthread_cond_wait(&changed, &sleeping);
    pthread_mutex_unlock(&sleeping);
}

void fr_wake_all(fr_word *at) {
    (void)at;
    pthread_mutex_lock(&sleeping); /* a thread that has checked the word sleeps by now */
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&sleeping);
}

void fr_wake_one(fr_word *at) { fr_wake_all(at); }
#endif

/* Locks, threads and the clock. */

#ifdef _WIN32
static SRWLOCK lock = SRWLOCK_INIT;

void fr_lock(void) { AcquireSRWLockExclusive(&lock); }

void fr_unlock(void) { ReleaseSRWLockExclusive(&lock); }

int fr_at_fork(void (*before)(void), void (*in_parent)(void), void (*in_child)(void)) {
    (void)before;
    (void)in_parent;
    (void)in_child;
    return 0;
}

void fr_reset_locks(void) {}
#else
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void fr_lock(void) { pthread_mutex_lock(&lock); }

void fr_unlock(void) { pthread_mutex_unlock(&lock); }

int fr_at_fork(void (*before)(void), void (*in_parent)(void), void (*in_child)(void)) {
    return pthread_atfork(before, in_parent, in_child);
}

void fr_reset_locks(void) {
    pthread_mutex_init(&lock, NULL);
#ifndef __linux__
    pthread_mutex_init(&sleeping, NULL);
    pthread_cond_init(&changed, NULL);
#endif
}
#endif

/* What all threads run; their number is their argument. */
typedef void run_with_number(int number);
static _Atomic(run_with_number *) thread_main;

#ifdef _WIN32
static DWORD WINAPI run_thread(void *number) {
    atomic_load (&thread_main)((int)(intptr_t)number);
    return 0;
}

int fr_start_thread(fr_thread *thread, void (*run)(int), int number) {
    atomic_store(&thread_main, run);
    *thread = CreateThread(NULL, 0, run_thread, (void *)(intptr_t)number, 0, NULL);
    return *thread == NULL;
}

void fr_join_thread(fr_thread thread) {
    WaitForSingleObject(thread, INFINITE);
    CloseHandle(thread);
}

int64_t fr_now(void) {
    LARGE_INTEGER ticks;
    LARGE_INTEGER rate; /* ticks in a second */
    QueryPerformanceCounter(&ticks);
    QueryPerformanceFrequency(&rate);
    int64_t seconds = ticks.QuadPart / rate.QuadPart;
    int64_t rest = ticks.QuadPart % rate.QuadPart; /* apart, because the product would overflow */
    return seconds * NS + rest * NS / rate.QuadPart;
}
#else
static void *run_thread(void *number) {
    atomic_load (&thread_main)((int)(intptr_t)number);
    return NULL;
}

int fr_start_thread(fr_thread *thread, void (*run)(int), int number) {
    /* The thread inherits that all signals are blocked, because the caller's threads handle
       them. */
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    atomic_store(&thread_main, run);
    int failure = pthread_create(thread, NULL, run_thread, (void *)(intptr_t)number);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failure;
}

void fr_join_thread(fr_thread thread) { pthread_join(thread, NULL); }

int64_t fr_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * NS + now.tv_nsec;
}
#endif

/* Cores. */

int fr_own_core(void) {
#if defined(__linux__)
    return sched_getcpu();
#elif defined(_WIN32)
    return (int)GetCurrentProcessorNumber();
#else
    return -1;
#endif
}

int fr_usable_cores(void) {
    long count = 0;
#if defined(_WIN32)
    count = (long)GetActiveProcessorCount(ALL_PROCESSOR_GROUPS);
#else
#ifdef __linux__
    cpu_set_t set;
    if (!sched_getaffinity(0, sizeof set, &set)) return CPU_COUNT(&set);
#endif
    count = sysconf(_SC_NPROCESSORS_ONLN);
#endif
    return count > 0 ? (int)count : 1;
}

int fr_stay_on(const int32_t *cores, int count) {
#ifdef __linux__
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int i = 0; i < count; i++) {
        if (cores[i] < 0 || cores[i] >= CPU_SETSIZE) return -1;
        CPU_SET(cores[i], &set);
    }
    return sched_setaffinity(0, sizeof set, &set);
#else
    (void)cores;
    (void)count;
    return -1;
#endif
}

/* Memory. */

void *fr_allocate(int64_t bytes) {
#ifdef _WIN32
    return _aligned_malloc((size_t)bytes, 64);
#else
    void *memory = NULL;
    return posix_memalign(&memory, 64, (size_t)bytes) ? NULL : memory;
#endif
}

void fr_release(void *memory) {
#ifdef _WIN32
    _aligned_free(memory);
#else
    free(memory);
#endif
}

/* Instructions of ARM. Their bits are those of the Linux kernel's <asm/hwcap.h>, and numbers of
   Windows that older headers lack. */

#if defined(__aarch64__) && defined(__linux__)
int fr_has_dotprod(void) { return (getauxval(AT_HWCAP) >> 20 & 1) != 0; }

int fr_has_i8mm(void) { return (getauxval(AT_HWCAP2) >> 13 & 1) != 0; }
#elif defined(__aarch64__) && defined(__APPLE__)
static int has(const char *name) {
    int value = 0;
    size_t size = sizeof value;
    return !sysctlbyname(name, &value, &size, NULL, 0) && value;
}

/* All processors of Apple's for macOS have it; the first macOS for them does not know the name. */
int fr_has_dotprod(void) { return 1; }

int fr_has_i8mm(void) { return has("hw.optional.arm.FEAT_I8MM"); }
#elif defined(__aarch64__) && defined(_WIN32)
int fr_has_dotprod(void) { return IsProcessorFeaturePresent(43) != 0; }

int fr_has_i8mm(void) { return IsProcessorFeaturePresent(66) != 0; }
#else
int fr_has_dotprod(void) { return 0; }

int fr_has_i8mm(void) { return 0; }
#endif
