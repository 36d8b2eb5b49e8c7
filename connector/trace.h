/* connector/trace.h - what a load did and when, as a file that Perfetto and Chrome's trace viewer
 * open.
 *
 * With the key `trace_dir` each load collects its events in memory that it took when it began. When
 * it is done, a thread of the connector's own writes them, which may block: a directory that hangs
 * costs traces, and closing its timeout. Files appear whole, by rename, and are their owner's
 * alone. Times are CLOCK_MONOTONIC in microseconds, so that the files of several loads go together.
 * Threads: a trace is its load's, under the runtime's lock, until it is ended; then the writer's.
 */
#ifndef CG_CONNECTOR_TRACE_H
#define CG_CONNECTOR_TRACE_H
#include "connector/cachegen.h"
#include "connector/fetch.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    CG_TRACE_MAX_EVENTS = 4096, /* of a load; what comes later is only counted */
    CG_TRACE_MAX_WAITING = 64,  /* that are not written yet; what comes then is lost */
    CG_TRACE_MAX_FILES = 1000,  /* of a connector in a process */
    CG_TRACE_ID_BYTES = 128,    /* of a request's id; what is longer is cut */
};

typedef enum cg_trace_kind {
    CG_TRACE_READ = 0,   /* a range of a chunk's file; "cancelled": under way when the load ended */
    CG_TRACE_DECODE = 1, /* from when the plan says so, also waiting for a thread */
    CG_TRACE_PLAN = 2,   /* chunks are now to be had at other levels */
    CG_TRACE_CUT = 3,    /* nothing is loaded from a chunk on */
} cg_trace_kind;

typedef struct cg_trace_event {
    cg_trace_kind kind;
    cg_status status;
    uint32_t chunk_index;
    uint8_t level;                     /* READ: of the name that was read */
    uint64_t began_ns, ended_ns;       /* PLAN and CUT: alike */
    uint64_t from, asked_bytes, bytes; /* READ */
    double estimated_bps;              /* READ, PLAN: before it; 0: unknown */
    double actual_bps;                 /* READ: of the link, as its meter has it; 0: unknown */
    double estimated_ns, thread_ns;    /* DECODE: with all threads; what its tasks took in all */
    uint32_t chunks_at[CG_N_LEVELS];   /* PLAN */
} cg_trace_event;

typedef struct cg_trace cg_trace;

/* Without the lock: a trace of a load that began at began_ns. request_id: of cachegen_load_request,
 * may be NULL. NULL: traces are off, no more are kept, or there is no memory or thread for one. */
cg_trace *cg_trace_new(cachegen *connector, uint64_t began_ns, const char *request_id);
/* NULL is fine. */
void cg_trace_free(cg_trace *trace);
void cg_trace_add(cg_trace *trace, const cg_trace_event *event);
/* Adds a PLAN if the levels of the fetch's chunks are others than the last time. */
void cg_trace_add_plan(cg_trace *trace, const cg_fetch *fetch, double estimated_bps,
                       uint64_t now_ns);
/* With the lock held: the load is done, with this progress. The trace is the writer's. */
void cg_trace_end(cg_trace *trace, const cachegen_progress *progress);

/* Writes a trace into a directory, under a name that no other trace has. CG_ERR_NO_MEMORY, and what
 * the directory answers. */
cg_status cg_trace_write(const cg_trace *trace, const char *directory);

#ifdef __cplusplus
}
#endif
#endif
