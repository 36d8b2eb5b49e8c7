/* connector/runtime.h - what a connector is made of, and what of it lives in one process.
 *
 * A cachegen handle is read-only after cachegen_open() but for `runtime`: threads, locks, queues,
 * counters and what was learnt live in a cg_runtime, made at first use. After fork() the child
 * finds a runtime of another process, leaves it alone (its locks may be held by threads that the
 * child does not have; its memory is lost to the child) and makes its own. No pthread_atfork:
 * handlers would be process-wide and outlive dlclose().
 *
 * Locks: cg_runtime.lock guards every field of operations and of the runtime that does not say
 * otherwise. It is never held across a system call on files, a codec call or a callback. The pool's
 * own lock is taken inside it, never outside.
 */
#ifndef CG_CONNECTOR_RUNTIME_H
#define CG_CONNECTOR_RUNTIME_H
#include "connector/blocks.h"
#include "connector/chunk_memory.h"
#include "connector/model.h"
#include "connector/pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

enum { CG_MAX_KV_LAYOUTS = 64 };

typedef struct cg_runtime cg_runtime;

struct cachegen {
    cg_config *config;
    cg_model model;
    cg_store *store;
    cg_io_backend backend; /* resolved: never CG_IO_AUTO */
    uint32_t store_levels; /* mask; L0 alone without a profile */
    char model_hex[CG_KEY_HEX_BYTES], profile_hex[CG_KEY_HEX_BYTES];
    _Atomic(cg_kv_layout *) layouts[CG_MAX_KV_LAYOUTS]; /* filled once each, from the front */
    _Atomic(cg_runtime *) runtime;
};

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
    cg_estimator estimator;
    cg_link_meter meter;
    double decode_ns_per_token[CG_N_LEVELS]; /* thread time, running mean; 0: unknown */
    double prefill_tokens, prefill_ns;       /* decayed sums */
    uint64_t staging_bytes;                  /* copied KV that waits to be saved */
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

/* With the lock held: prefill speed, configured or measured; 0 unknown. */
double cg_runtime_recompute_speed(const cg_runtime *runtime);
/* With the lock held: n_tokens of a level took decode_ns of thread time. */
void cg_runtime_decoded(cg_runtime *runtime, unsigned level, uint32_t n_tokens, uint64_t decode_ns);
/* With the lock held: what decoding costs in wall time, for the controller. */
void cg_runtime_decode_speed(const cg_runtime *runtime, double ns_per_token_out[CG_N_LEVELS]);
/* A configuration for a cg_io of this connector. */
cg_io_config cg_runtime_io_config(const cachegen *connector);

uint64_t cg_now_ns(void);      /* CLOCK_MONOTONIC */
uint64_t cg_realtime_ns(void); /* CLOCK_REALTIME */

/* Bodies of the workers; the argument is the runtime. */
void *cg_lookup_worker(void *runtime);
void *cg_load_reader(void *runtime);
void *cg_save_writer(void *runtime);
/* With the lock held: asks all loads and look-ups to end; saves run to their end. */
void cg_lookups_cancel(cg_runtime *runtime);
void cg_loads_cancel(cg_runtime *runtime);

/* ---- structs that cross the ABI ---- */

/* Copies min(struct_size, own_bytes) of a caller's struct into out[own_bytes], the rest zero.
 * False: no struct, or struct_size smaller than its head. */
bool cg_abi_take(const void *given, void *out, size_t own_bytes);
/* Copies own into the caller's struct, as much as its struct_size takes; struct_size stays the
 * caller's. */
bool cg_abi_give(void *given, const void *own, size_t own_bytes);
#endif
