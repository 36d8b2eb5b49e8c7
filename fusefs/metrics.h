/* fusefs/metrics.h - what a mount counts, and its text for Prometheus (.cachegenfs/metrics).
 *
 * Threads: counters are atomic; any thread adds, any thread prints.
 */
#ifndef CG_FUSEFS_METRICS_H
#define CG_FUSEFS_METRICS_H
#include "codec/chunk.h"
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* Why a file was refused under a strict name. */
typedef enum cg_refusal {
    CG_REFUSED_INCOMPLETE = 0, /* shorter than its header says */
    CG_REFUSED_DAMAGED = 1,    /* a checksum, count or magic is wrong */
    CG_REFUSED_MISPLACED = 2,  /* whole, but its header disagrees with its name */
    CG_REFUSED_UNSUPPORTED = 3,
    CG_N_REFUSALS = 4,
} cg_refusal;

/* What came of a name that the scrubber looked at. */
typedef enum cg_scrubbed {
    CG_SCRUBBED_WHOLE = 0,
    CG_SCRUBBED_CUT = 1,
    CG_SCRUBBED_QUARANTINED = 2,
    CG_SCRUBBED_LEFT = 3, /* an unfinished file, removed */
    CG_SCRUBBED_FAILED = 4,
    CG_SCRUBBED_BEING_WRITTEN = 5, /* not whole yet, and left alone */
    CG_N_SCRUBBED = 6,
} cg_scrubbed;

/* Requests of the kernel, by what they take. */
typedef enum cg_request {
    CG_REQUEST_NAME = 0, /* look-ups, attributes, listings */
    CG_REQUEST_OPEN = 1,
    CG_REQUEST_READ = 2,
    CG_REQUEST_WRITE = 3,
    CG_REQUEST_CLOSE = 4,  /* checks and publishes what was written */
    CG_REQUEST_CHANGE = 5, /* of names and attributes */
    CG_N_REQUESTS = 6,
} cg_request;

enum { CG_N_LATENCIES = 7 }; /* buckets: up to 0.1 ms, 1 ms, ... 10 s, and all */

/* From a request's arrival to its answer. */
typedef struct cg_latencies {
    _Atomic uint64_t n[CG_N_LATENCIES], sum_ns;
} cg_latencies;

typedef struct cg_metrics cg_metrics;
struct cg_metrics {
    _Atomic uint64_t opens_passthrough, opens_plain, opens_write;
    _Atomic uint64_t opens_of_level[CG_N_LEVELS]; /* published chunks, by the name's level */
    _Atomic uint64_t read_bytes, written_bytes;   /* through the daemon, not by passthrough */
    _Atomic uint64_t published, published_bytes;
    _Atomic uint64_t refused[CG_N_REFUSALS];
    _Atomic uint64_t discarded; /* never became valid, thrown away at the last close */
    _Atomic uint64_t adopted, adopt_errors;
    _Atomic uint64_t evicted, cut, evicted_bytes, evict_errors; /* making room: steps */
    _Atomic uint64_t expired;                                   /* contexts */
    _Atomic uint64_t scrubbed[CG_N_SCRUBBED], scrubbed_bytes, scrub_passes;
    _Atomic uint64_t watched, watch_doubts, watch_overflows; /* fusefs/watch.h */
    _Atomic uint64_t quota_bytes, used_bytes;                /* at the last survey; 0: none */
    cg_latencies latencies[CG_N_REQUESTS];
    _Atomic uint64_t errors;                    /* replies of EIO, ENOSPC, EDQUOT or ESTALE */
    _Atomic uint64_t given_up;                  /* requests; fusefs/overdue.h */
    _Atomic uint64_t files_open, files_pending; /* now */
    _Atomic uint32_t passthrough_in_use; /* of the last published file (no view) opened: 0 or 1 */
};

static inline void cg_metrics_add(_Atomic uint64_t *counter, uint64_t n)
{
    atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

static inline void cg_metrics_sub(_Atomic uint64_t *counter, uint64_t n)
{
    atomic_fetch_sub_explicit(counter, n, memory_order_relaxed);
}

void cg_metrics_observe(cg_metrics *metrics, cg_request request, uint64_t ns);

/* Counts an errno value that goes to a caller, if an administrator should know of it. 0 and the
 * everyday ones (ENOENT ...) are not counted. */
void cg_metrics_error(cg_metrics *metrics, int error);

/* The text, allocated with malloc(); NULL without memory. */
char *cg_metrics_text(const cg_metrics *metrics);
#endif
