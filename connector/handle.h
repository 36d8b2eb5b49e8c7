/* connector/handle.h - what a `cachegen` handle is made of.
 *
 * All of it is constant after cachegen_open(), except the fields that say otherwise. What changes
 * while a connector works (threads, locks, queues, counters, what it has learnt) belongs to one
 * process and is in a cg_runtime: connector/runtime.h.
 * Threads: any.
 */
#ifndef CG_CONNECTOR_HANDLE_H
#define CG_CONNECTOR_HANDLE_H
#include "connector/blocks.h"
#include "connector/gather.h"
#include "connector/gpu.h"
#include "connector/model.h"
#include "connector/speeds.h"
#include "iouring/store.h"

#include <stdatomic.h>

enum { CG_MAX_KV_LAYOUTS = 64 };

typedef struct cg_runtime cg_runtime;

struct cachegen {
    cg_config *config; /* its threads: resolved, never 0 */
    uint32_t n_encoders;
    cg_model model;
    cg_store *store;
    cg_io_backend backend; /* resolved: never CG_IO_AUTO */
    cg_key boot_clock_id;  /* connector/clock.h */
    uint64_t device, root; /* of the root: st_dev and st_ino */
    uint64_t latency_ns;   /* of a question to the store, when it was opened */
    bool asks_by_threads;  /* look-ups do; see new_queue() in looker.c */
    bool is_sshfs;         /* which answers ten questions at a time */
    uint64_t folders_ns;   /* CLOCK_MONOTONIC: when its folders were opened, if it is far */
    uint32_t store_levels; /* mask; L0 alone without a profile */
    char model_hex[CG_KEY_HEX_BYTES], profile_hex[CG_KEY_HEX_BYTES];
    _Atomic(cg_kv_layout *) layouts[CG_MAX_KV_LAYOUTS]; /* filled once each, from the front */
    _Atomic(cg_gather *) gather;   /* of ranks, made with the first layout that lacks heads */
    _Atomic uint64_t n_saves;      /* of ranks: the last save's number */
    _Atomic(cg_runtime *) runtime; /* of the process that last made one */

    pthread_mutex_t gpu_lock;             /* of opening a GPU, and of the reason */
    _Atomic(cg_gpu *) gpu;                /* set once */
    char gpu_reason[CG_GPU_REASON_BYTES]; /* written once, before gpu_state says OFF */
    _Atomic uint32_t gpu_state;           /* CACHEGEN_GPU_...; OFF is for good */
};

/* Registered layout kv_id; NULL: there is none. */
static inline const cg_kv_layout *cg_handle_layout(cachegen *connector, uint32_t kv_id)
{
    return kv_id < CG_MAX_KV_LAYOUTS
               ? atomic_load_explicit(&connector->layouts[kv_id], memory_order_acquire)
               : NULL;
}

/* Whether the store is a network away, so that each question to it counts. */
static inline bool cg_handle_is_far(const cachegen *connector)
{
    return connector->latency_ns >= CG_FAR_NS;
}

/* How long a chunk is not offered after a load that failed at it so, waited_ns after its start:
 * retry_ms. Of a store that brought nothing no longer than twice the time that this took, or two
 * seconds: then somebody finds out again. */
uint64_t cg_handle_retry_ns(const cachegen *connector, cg_status status, uint64_t waited_ns);

/* This process's GPU, opened before and working; else NULL. */
cg_gpu *cg_handle_gpu(cachegen *connector);
/* Opens the GPU `ordinal` unless it is open; encodes: connector/gpu.h. CG_ERR_UNSUPPORTED: there is
 * none, and gpu_reason says why; or another one is open. */
cg_status cg_handle_open_gpu(cachegen *connector, uint32_t ordinal, bool encodes, cg_gpu **gpu_out);
/* After CG_ERR_DEVICE: notes whether the GPU is off from now on. */
void cg_handle_check_gpu(cachegen *connector);

/* Frees what cachegen_open() made, also a part of it. The runtime must be gone. */
void cg_handle_free(cachegen *connector);
#endif
