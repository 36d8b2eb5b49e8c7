/* connector/runtime.h - what a connector has in one process: threads, locks, queues, counters and
 * what it has learnt.
 *
 * A runtime is made at first use. After fork() the child finds the runtime of another process and
 * leaves it alone: its locks may be held by threads that the child does not have. The child makes
 * its own; the memory of the parent's is lost to it. There is no pthread_atfork: handlers would be
 * process-wide and outlive dlclose().
 *
 * Threads: any. cg_runtime.lock guards every field of operations and of the runtime that does not
 * say otherwise. It is never held across a system call on files, a codec call or a callback. The
 * pool's own lock is taken inside it, never outside. Steps of the engine take it, and wait for
 * what it is held for. The longest of that is a few passes over the chunks of all loads: a plan of
 * reads for many chunks is made without it (connector/fetch_plan.h).
 *
 * A hung store can hold a worker for ever, in a system call that nobody can end. So closing waits
 * for the workers only until a deadline. If one is stuck then, the runtime becomes an orphan:
 * nothing of it is freed while that thread may use it. If the thread comes back some day, the last
 * one to leave frees all.
 */
#ifndef CG_CONNECTOR_RUNTIME_H
#define CG_CONNECTOR_RUNTIME_H
#include "connector/chunk_memory.h"
#include "connector/fetch_plan.h"
#include "connector/handle.h"
#include "connector/link.h"
#include "connector/pool.h"
#include "connector/speeds.h"

#include <pthread.h>
#include <sys/types.h>

/* A thread of the runtime. Three do I/O (look up, read, write), each with a cg_io of its own. One
 * watches the writer. One writes traces, if they are on. One tells what was used. One is started
 * from time to time: it opens a far store's folders anew, or a store that is gone. */
typedef struct cg_worker {
    pthread_t thread;
    bool started;
} cg_worker;

typedef struct cg_operation cg_operation; /* connector/operation.h */
typedef struct cg_uses cg_uses;           /* connector/uses.h */

/* Operations that wait for their worker, the oldest first. */
typedef struct cg_operation_queue {
    cg_operation *head, *tail;
    pthread_cond_t filled;
} cg_operation_queue;

struct cg_runtime {
    pid_t pid;           /* whose it is; constant */
    cachegen *connector; /* constant */
    cg_pool *pool;       /* constant: decodes, and copies out of blocks */
    cg_pool *encoders;   /* constant: nice, as configured; takes no lock of the runtime */
    int event_fd;        /* constant; -1: none */
    pthread_mutex_t lock;
    pthread_cond_t changed; /* an operation ended, a worker left */
    bool stop;
    bool is_orphan; /* closed, with a worker stuck */
    cg_worker looker, reader, writer, watcher, tracer, teller, opener;
    uint32_t n_inside; /* workers that may touch the runtime */

    cg_operation_queue lookups, saves;
    bool store_is_silent;     /* questions are not answered: look-ups are misses at once */
    uint64_t opener_ns;       /* when it last began */
    cg_fetch_plan fetch_plan; /* of the loads that are not done */
    cg_io *reader_io;         /* to wake; set while the reader runs */
    cg_io *looker_io;         /* the same, while the looker pauses */

    /* What the writer does, for the watcher (connector/save_state.h). */
    cg_operation *saving;
    uint64_t step_until_ns; /* the store hangs if the step is not over then; UINT64_MAX: none is
                               under way */
    bool writer_is_stuck;   /* what it does was given up */
    pthread_cond_t watched; /* a step was begun */

    cg_uses *uses;       /* constant once set; NULL: nobody wants to be told (connector/uses.h) */
    pthread_cond_t used; /* one waits */

    cg_operation_queue traces; /* of loads that are done: connector/trace.h */
    uint32_t n_traces, n_traces_waiting, n_traces_lost, n_trace_files;

    cg_chunk_memory *chunk_memory;
    cg_link *link;           /* constant; NULL: no memory, so it knows only its own */
    cg_speeds speeds;        /* what is of the link: between cg_runtime_speeds() and its end */
    uint32_t n_copying;      /* saves that the pool copies out of the engine's blocks */
    uint64_t staging_bytes;  /* copied KV that waits to be encoded */
    uint8_t *released;       /* copies to be freed without the lock, each begins with the next one's
                                address: cg_save_unlock() */
    uint64_t encoding_bytes; /* of encoders and what they have made: connector/save_state.h */
    cachegen_stats stats;
};

/* This process's runtime, made if need be; NULL without memory. */
cg_runtime *cg_runtime_get(cachegen *connector);
/* This process's runtime if there is one, else NULL. */
cg_runtime *cg_runtime_peek(cachegen *connector);
/* With the lock held: starts a worker unless it runs. body's argument is the runtime. The body ends
 * with cg_runtime_leave(). */
cg_status cg_runtime_start(cg_runtime *runtime, cg_worker *worker, const char *name,
                           void *(*body)(void *));
/* With the lock held, for a worker that is about to leave: it will be started anew when there is
 * work for it. */
void cg_runtime_resign(cg_runtime *runtime, cg_worker *worker);
/* For a worker, with the lock held; releases the lock. The worker must not touch the runtime
 * afterwards. */
void cg_runtime_leave(cg_runtime *runtime);
/* Waits until deadline_ns (UINT64_MAX: for ever). */
void cg_condition_wait(pthread_cond_t *condition, pthread_mutex_t *lock, uint64_t deadline_ns);
/* With the lock held: the same, for a condition of the runtime. */
void cg_runtime_wait(cg_runtime *runtime, pthread_cond_t *condition, uint64_t deadline_ns);

/* With the lock held: tells the workers to end when they have nothing left to do, and waits for
 * them until deadline_ns. Look-ups and loads must have been cancelled before. True: all have
 * left. */
bool cg_runtime_stop(cg_runtime *runtime, uint64_t deadline_ns);
/* After cg_runtime_stop(): frees runtime and connector, or leaves both to the worker that is stuck.
 * Waits for threads to end until deadline_ns. */
void cg_runtime_close(cg_runtime *runtime, uint64_t deadline_ns);
/* With the lock held: closes the eventfd. Its number is the host's again. */
void cg_runtime_close_eventfd(cg_runtime *runtime);
/* With the lock held or not: an operation completed. */
void cg_runtime_notify(cg_runtime *runtime);

/* With the lock held: borrows the speeds, with what all connectors of the process know of the link.
 * Give them back with cg_runtime_speeds_end(); hold the lock all the time. */
cg_speeds *cg_runtime_speeds(cg_runtime *runtime);
void cg_runtime_speeds_end(cg_runtime *runtime);

/* With the lock held: makes the reader look at its loads again, if it runs. */
void cg_runtime_wake_reader(cg_runtime *runtime);

/* With the lock held: what is known of a far store's folders is believed as long as what is known
 * of its chunks, and how soon it answers is measured anew with them. A store that is gone is looked
 * for once a second. Nobody waits for it. */
void cg_runtime_refresh_store(cg_runtime *runtime);
/* With the lock held: only the latter, for loads and saves. A far store's folders take time of the
 * link that they need. */
void cg_runtime_reopen_store(cg_runtime *runtime);

/* A configuration for a cg_io of this connector. */
cg_io_config cg_runtime_io_config(const cachegen *connector);

#endif
