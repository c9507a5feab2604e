/* The pool of threads.

   The share of each active thread in a job, and where a piece's state is:

     shares[0]  pieces  next 0, end 5        thread 0 claims 0, 1, ...
     shares[1]  pieces  next 5, end 10       thread 1 claims 5, 6, ..., then what is left of others
     ...
     pool.done          pieces done so far   the caller waits until these are all

   A worker first spins and then sleeps on pool.calls, which changes with each job; one that is not
   active sleeps on pool.rises. */
#include "threads.h"

#include "system.h"

#include <stddef.h>

#define MAX_THREADS 256
#define MAX_CORES 1024
#define PIECES_PER_THREAD 8
#define SERIAL_NUMBERS 16384 /* fewer take less time than calling threads */

/* Checks before a thread sleeps: they take about the time that Python needs between two calls. */
#define SPINS 20000

/* A share's pieces are two numbers of so many bits in one word. */
#define PIECE_BITS 24
#define PIECE_MASK (((uint64_t)1 << PIECE_BITS) - 1)

/* How many threads do jobs on a machine with other work. Times are in ns. */
#define MS 1000000
#define BEARABLE_PERCENT 40 /* of the time: two threads that lose 50 are as fast as one */
#define MAX_LOSS (16 * MS)  /* more makes threads fewer: four time slices of a scheduler */
#define MAX_TRIAL_LOSS MS   /* the same in a trial of more threads: one slice */
#define MIN_STALL (MS / 2)  /* a slice is longer */
#define SHORT_SPINS 64      /* checks before a wait is timed, and between looks at the core */
#define TRIAL (30 * MS)
#define MIN_PAUSE (50 * MS) /* before a trial */
#define MAX_PAUSE (1000 * MS)
#define MAX_GAP (10 * MS) /* counts between two jobs, because the caller may have been idle */

/* A thread's share of the job, in its own cache line. `pieces` holds the end of its pieces (bits 24
   to 47) and the next one (bits 0 to 23). A job does not end before its claimed pieces are done, so
   the other fields are valid once a piece is claimed. */
typedef struct {
    _Alignas(64) _Atomic(uint64_t) pieces;
    fr_work *work;
    void *argument;
    int64_t parts, piece;
    uint32_t piece_count; /* of the job */
} share;

static share shares[MAX_THREADS];

static struct {
    int wanted, started, has_handlers;
    fr_thread threads[MAX_THREADS];
    _Alignas(64) fr_word done;    /* pieces of the job */
    _Alignas(64) fr_word calls;   /* changes with each job */
    fr_word asleep;               /* active workers that sleep */
    fr_word is_waiting;           /* the caller sleeps until the job is done */
    fr_word ends;                 /* workers shall end */
    fr_word active;               /* threads that do jobs, the first ones of those wanted */
    fr_word rises;                /* changes when `active` becomes larger */
    _Atomic(int) core;            /* of the job's caller */
    _Alignas(64) fr_word crowded; /* a worker did pieces on that core */
    void *scratch;
    int64_t scratch_bytes;
} pool;

/* The nodes of the memory, and the cores of each: those of node i begin at first[i]. */
static struct {
    int count; /* 0 or 1: workers stay nowhere */
    int32_t cores[MAX_CORES];
    int first[MAX_CORES + 1];
} nodes;

/* How the number of active threads follows the load of the machine. Other work makes jobs lose time
   in two ways. In a stall, a worker has claimed a piece but is not run, because another process, or
   another guest of the host, has its core; then all others wait. In a crowded job, a worker runs on
   the caller's core, because the other cores are busy; then one of the two waits. If jobs lose more
   than is bearable, fewer threads are faster. More are tried again after a pause, which grows while
   trials fail. Only the thread that has the pool uses this. */
static struct {
    int64_t lost;       /* time, less what was bearable since */
    int64_t counted_at; /* when `lost` was reduced last */
    int64_t trial_at;   /* when the last trial began */
    int64_t next_trial; /* when the next one may begin */
    int64_t pause;
    uint32_t before; /* threads before the last trial; 0: there was none */
    uint32_t step;   /* threads that the next trial adds */
} pace;

/* A test defines another clock and other cores. */
#ifndef FR_CLOCK
#define FR_CLOCK fr_now
#endif
#ifndef FR_CORE
#define FR_CORE fr_own_core
#endif

/* Lets the core do other work between two checks. */
static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Whether a share has a piece that no thread has claimed. */
static int is_open(uint64_t pieces) {
    return (pieces & PIECE_MASK) < (pieces >> PIECE_BITS & PIECE_MASK);
}

static int has_pieces(share *of) {
    return is_open(atomic_load_explicit(&of->pieces, memory_order_relaxed));
}

static uint32_t active(void) { return atomic_load(&pool.active); }

static int is_active(int thread) { return thread < (int)active(); }

/* Claims and does pieces of a share while there are any; returns their number. A thread claims only
   if it sees a piece left, so the number of the next piece passes the end by at most one for each
   thread. */
static uint32_t do_share(share *of, int thread) {
    uint32_t done = 0;
    while (has_pieces(of)) {
        uint64_t claimed = atomic_fetch_add_explicit(&of->pieces, 1, memory_order_acquire);
        if (!is_open(claimed)) break;
        int64_t first = (int64_t)(claimed & PIECE_MASK) * of->piece;
        int64_t last = first + of->piece;
        of->work(of->argument, first, last < of->parts ? last : of->parts, thread);
        done++;
    }
    return done;
}

/* Does the pieces of a thread's own share, which are adjacent in memory, and then those that are
   left in other shares. */
static void do_pieces(int thread) {
    int threads = (int)active();
    for (int i = 0; i < threads; i++) {
        share *from = &shares[(thread + i) % threads];
        uint32_t done = do_share(from, thread);
        if (!done) continue;
        /* Read before the pieces are counted, because then the job may end and the share change. */
        uint32_t piece_count = from->piece_count;
        int is_last = atomic_fetch_add(&pool.done, done) + done == piece_count;
        if (is_last && atomic_load(&pool.is_waiting)) fr_wake_one(&pool.done);
    }
}

/* Whether a job has begun since pool.calls was `seen`. */
static int is_called(uint32_t seen) {
    return atomic_load_explicit(&pool.calls, memory_order_acquire) != seen;
}

/* Whether the calling worker keeps the job's caller from its core. */
static int is_crowding(void) {
    int core = FR_CORE();
    return core >= 0 && core == atomic_load_explicit(&pool.core, memory_order_relaxed);
}

/* Whether a worker has something to do. Other threads may have taken its own pieces. */
static int has_work(int thread, uint32_t seen) {
    return has_pieces(&shares[thread]) || is_called(seen);
}

/* Checks for work until there is some, or the worker should rather sleep. */
static void spin(int thread, uint32_t seen) {
    for (int i = 0; i < SPINS && is_active(thread); i++) {
        if (has_work(thread, seen)) return;
        /* Seldom, because some systems need a system call for it. */
        if (i % SHORT_SPINS == 0 && is_crowding()) return;
        relax();
    }
}

/* Workers that are neighbours share a node, as their shares are adjacent in memory. A node gets as
   many workers as its share of the cores that this process may use. */
static void stay_on_node(int thread) {
    int core = (int)((int64_t)thread * nodes.first[nodes.count] / pool.wanted);
    int node = 0;
    while (core >= nodes.first[node + 1])
        node++;
    fr_stay_on(nodes.cores + nodes.first[node], nodes.first[node + 1] - nodes.first[node]);
}

static void run_worker(int thread) {
    if (nodes.count > 1) stay_on_node(thread);
    for (;;) {
        /* Both are read before all checks, that of `ends` too, so that a later change ends the
           sleep. */
        uint32_t seen = atomic_load(&pool.calls);
        uint32_t rises = atomic_load(&pool.rises);
        if (atomic_load(&pool.ends)) return;
        if (!is_active(thread)) {
            fr_sleep_while(&pool.rises, rises);
            continue;
        }
        spin(thread, seen);
        if (!is_active(thread)) continue;
        if (has_work(thread, seen)) {
            if (is_crowding()) atomic_store_explicit(&pool.crowded, 1, memory_order_relaxed);
            do_pieces(thread);
            continue;
        }
        atomic_fetch_add(&pool.asleep, 1);
        fr_sleep_while(&pool.calls, seen);
        atomic_fetch_sub(&pool.asleep, 1);
    }
}

static void call_workers(void) {
    atomic_fetch_add(&pool.calls, 1);
    if (atomic_load(&pool.asleep)) fr_wake_all(&pool.calls);
}

static void raise_workers(void) {
    atomic_fetch_add(&pool.rises, 1);
    fr_wake_all(&pool.rises);
}

/* Sets the number of active threads. Those that are no longer active see it before their next job,
   and sleep. */
static void set_active(uint32_t count) {
    int is_raised = count > active();
    atomic_store(&pool.active, count);
    if (is_raised) raise_workers();
}

static void end_workers(void) {
    atomic_store(&pool.ends, 1);
    raise_workers();
    call_workers();
    for (int i = 0; i < pool.started; i++)
        fr_join_thread(pool.threads[i]);
    atomic_store(&pool.ends, 0);
    pool.started = 0;
}

static void want(int count) {
    pool.wanted = count < MAX_THREADS ? count : MAX_THREADS;
    pace.before = 0;
    pace.lost = 0;
    set_active((uint32_t)pool.wanted);
}

int fr_workers(void) {
    if (!pool.wanted) want(fr_usable_cores());
    return pool.wanted;
}

/* A forked child has none of the threads, and starts its own. No job runs during a fork, because
   fr_at_fork takes the pool before it. */
static void reset_in_child(void) {
    pool.started = 0;
    atomic_store(&pool.asleep, 0);
    fr_reset_locks();
}

void fr_enter(void) {
    fr_lock();
    if (!pool.has_handlers) pool.has_handlers = !fr_at_fork(fr_enter, fr_leave, reset_in_child);
}

void fr_leave(void) { fr_unlock(); }

int fr_threads(int count) {
    fr_enter();
    if (count > 0 && count != pool.wanted) {
        end_workers();
        want(count);
    }
    int threads = fr_workers();
    fr_leave();
    return threads;
}

int fr_nodes(const int32_t *cores, const int32_t *node_of, int count) {
    if (count < 1 || count > MAX_CORES) return 0;
    fr_enter();
    end_workers(); /* the next ones stay where these say */
    nodes.count = 0;
    for (int i = 0; i < count; i++) {
        nodes.cores[i] = cores[i];
        if (!i || node_of[i] != node_of[i - 1]) nodes.first[nodes.count++] = i;
    }
    nodes.first[nodes.count] = count;
    int found = nodes.count;
    fr_leave();
    return found;
}

int64_t fr_slices(void) { return nodes.count > 1 ? (int64_t)fr_workers() * PIECES_PER_THREAD : 0; }

int fr_active_threads(void) {
    fr_enter();
    fr_workers();
    int threads = (int)active();
    fr_leave();
    return threads;
}

static void start_workers(void) {
    while (pool.started < fr_workers() - 1) {
        fr_thread *thread = &pool.threads[pool.started];
        if (fr_start_thread(thread, run_worker, pool.started + 1)) break;
        pool.started++;
    }
}

/* Reduces the loss by what is bearable in the time that has passed. */
static void bear(int64_t passed, int64_t time) {
    pace.lost -= passed * BEARABLE_PERCENT / 100;
    if (pace.lost < 0) pace.lost = 0;
    pace.counted_at = time;
}

/* Begins a trial of more threads, if it is time for one. A trial that goes well is followed by one
   that adds twice as many. */
static void try_more(int64_t time) {
    uint32_t wanted = (uint32_t)pool.wanted;
    if (active() == wanted || time < pace.next_trial) return;
    uint32_t more = active() + pace.step;
    pace.before = active();
    pace.trial_at = time;
    pace.next_trial = time + TRIAL;
    pace.lost = MAX_LOSS - MAX_TRIAL_LOSS;
    set_active(more < wanted ? more : wanted);
    pace.step *= 2;
}

/* Makes threads fewer: as many as before a trial that fails, and otherwise half as many. The pause
   grows if the last trial is not long ago. */
static void have_fewer(int64_t time) {
    int is_trial = pace.before && time < pace.trial_at + TRIAL;
    int is_soon = pace.before && time < pace.trial_at + MAX_PAUSE;
    pace.pause = is_soon ? 2 * pace.pause : MIN_PAUSE;
    if (pace.pause > MAX_PAUSE) pace.pause = MAX_PAUSE;
    pace.next_trial = time + pace.pause;
    pace.step = 1;
    pace.lost = 0;
    set_active(is_trial ? pace.before : (active() + 1) / 2);
}

/* The time that a job lost. It started and ended at two times, and waited for claimed pieces since
   a third one. A wait that is not longer than the caller's own work is no stall, because pieces
   differ. */
static int64_t loss(int64_t started_at, int64_t waited_at, int64_t ended_at) {
    int64_t wait = ended_at - waited_at;
    int is_crowded = (int)atomic_exchange(&pool.crowded, 0);
    if (is_crowded) return ended_at - started_at;
    int is_stall = wait >= MIN_STALL && wait > waited_at - started_at;
    return is_stall ? wait : 0;
}

static int is_done(uint32_t pieces) {
    return atomic_load_explicit(&pool.done, memory_order_acquire) == pieces;
}

static void wait_for(uint32_t pieces) {
    for (int i = 0; i < SPINS && !is_done(pieces); i++)
        relax();
    if (is_done(pieces)) return;
    atomic_store(&pool.is_waiting, 1);
    for (;;) {
        uint32_t done = atomic_load(&pool.done);
        if (done == pieces) break;
        fr_sleep_while(&pool.done, done);
    }
    atomic_store(&pool.is_waiting, 0);
}

/* Waits for the pieces of a job that other threads have claimed, and counts what was lost. */
static void finish(uint32_t pieces, int64_t started_at) {
    for (int i = 0; i < SHORT_SPINS && !is_done(pieces); i++)
        relax();
    if (is_done(pieces) && !atomic_load(&pool.crowded)) return;
    int64_t waited_at = FR_CLOCK();
    wait_for(pieces);
    int64_t ended_at = FR_CLOCK();
    bear(ended_at - started_at, ended_at);
    pace.lost += loss(started_at, waited_at, ended_at);
    if (pace.lost > MAX_LOSS) have_fewer(ended_at);
}

/* Gives each active thread its share of a job. */
static void share_out(const share *job, int64_t threads) {
    for (int64_t t = threads - 1; t >= 0; t--) {
        share *to = &shares[t];
        to->work = job->work;
        to->argument = job->argument;
        to->parts = job->parts;
        to->piece = job->piece;
        to->piece_count = job->piece_count;
        uint64_t first = (uint64_t)(job->piece_count * t / threads);
        uint64_t end = (uint64_t)(job->piece_count * (t + 1) / threads);
        /* Last, because a thread may claim a piece from now on. */
        atomic_store_explicit(&to->pieces, end << PIECE_BITS | first, memory_order_release);
    }
}

/* The number of threads for a job that starts at a time. */
static int64_t threads_at(int64_t time) {
    int64_t passed = time - pace.counted_at;
    bear(passed < MAX_GAP ? passed : MAX_GAP, time);
    try_more(time);
    return active();
}

/* The parts of a piece, so that each thread has several pieces. */
static int64_t piece_for(int64_t parts, int64_t threads) {
    return (parts + threads * PIECES_PER_THREAD - 1) / (threads * PIECES_PER_THREAD);
}

void fr_parallel(fr_work *work, void *argument, int64_t parts, int64_t piece) {
    int64_t workers = fr_workers();
    int64_t min_piece = parts / (int64_t)PIECE_MASK + 1;
    if (piece < 1) piece = piece_for(parts, workers);
    if (piece < min_piece) piece = min_piece;
    int is_shared = workers > 1 && parts > piece;
    int64_t started_at = is_shared ? FR_CLOCK() : 0;
    int64_t threads = is_shared ? threads_at(started_at) : 1;
    if (threads == 1) {
        if (parts > 0) work(argument, 0, parts, 0);
        return;
    }
    if (pool.started < workers - 1) start_workers();
    share job = {.work = work, .argument = argument, .parts = parts, .piece = piece};
    job.piece_count = (uint32_t)((parts + piece - 1) / piece);
    atomic_store(&pool.done, 0);
    atomic_store_explicit(&pool.core, FR_CORE(), memory_order_relaxed);
    share_out(&job, threads);
    call_workers();
    do_pieces(0);
    finish(job.piece_count, started_at);
}

void fr_run(fr_work *work, void *argument, int64_t parts, int64_t numbers) {
    if (numbers < SERIAL_NUMBERS) {
        work(argument, 0, parts, 0);
    } else {
        fr_parallel(work, argument, parts, 0);
    }
}

void *fr_scratch(int64_t bytes) {
    if (bytes <= pool.scratch_bytes) return pool.scratch;
    fr_release(pool.scratch);
    pool.scratch = fr_allocate(bytes);
    pool.scratch_bytes = pool.scratch ? bytes : 0;
    return pool.scratch;
}
