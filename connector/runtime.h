/* connector/runtime.h - what of a connector lives in one process: threads, locks, queues, counters
 * and what was learnt.
 *
 * It is made at first use. After fork() the child finds a runtime of another process and leaves it
 * alone: its locks may be held by threads that the child does not have. The child makes its own;
 * the parent's memory is lost to it. There is no pthread_atfork: handlers would be process-wide and
 * outlive dlclose().
 *
 * Locks: cg_runtime.lock guards every field of operations and of the runtime that does not say
 * otherwise. It is never held across a system call on files, a codec call or a callback. The pool's
 * own lock is taken inside it, never outside.
 */
#ifndef CG_CONNECTOR_RUNTIME_H
#define CG_CONNECTOR_RUNTIME_H
#include "connector/chunk_memory.h"
#include "connector/handle.h"
#include "connector/pool.h"
#include "connector/speeds.h"

#include <pthread.h>
#include <sys/types.h>

/* One of the three threads that do I/O: looks up, reads, or writes. Each makes its own cg_io. */
typedef struct cg_worker {
    pthread_t thread;
    bool started;
} cg_worker;

struct cg_runtime {
    pid_t pid;           /* whose it is; constant */
    cachegen *connector; /* constant */
    cg_pool *pool;       /* constant */
    int event_fd;        /* constant; -1: none */
    pthread_mutex_t lock;
    pthread_cond_t changed; /* an operation ended, an encoding ended, staging memory came back */
    pthread_cond_t lookups_queued, saves_queued;
    bool stop;
    cg_worker looker, reader, writer;

    cachegen_lookup *lookups_head, *lookups_tail;
    cachegen_save *saves_head, *saves_tail;
    cachegen_load *loads; /* active ones, unordered */
    cg_io *reader_io;     /* to wake; set while the reader runs */

    cg_chunk_memory *chunk_memory;
    cg_speeds speeds;
    uint64_t staging_bytes; /* copied KV that waits to be saved */
    cachegen_stats stats;
};

/* This process's runtime, made if need be; NULL without memory. */
cg_runtime *cg_runtime_get(cachegen *connector);
/* This process's runtime if there is one, else NULL. */
cg_runtime *cg_runtime_peek(cachegen *connector);
/* With the lock held: starts a worker unless it runs. */
cg_status cg_runtime_start(cg_runtime *runtime, cg_worker *worker, const char *name,
                           void *(*body)(void *));
/* Ends all threads and frees. Operations must have ended. */
void cg_runtime_free(cg_runtime *runtime);
/* With the lock held or not: an operation completed. */
void cg_runtime_notify(cg_runtime *runtime);

/* A configuration for a cg_io of this connector. */
cg_io_config cg_runtime_io_config(const cachegen *connector);

/* Bodies of the workers; the argument is the runtime. */
void *cg_lookup_worker(void *runtime);
void *cg_load_reader(void *runtime);
void *cg_save_writer(void *runtime);
/* With the lock held: asks all loads and look-ups to end; saves run to their end. */
void cg_lookups_cancel(cg_runtime *runtime);
void cg_loads_cancel(cg_runtime *runtime);

#endif
