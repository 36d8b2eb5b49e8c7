/* connector/operation.h - what look-ups, loads and saves have in common: who owns them, who holds
 * them, and whether they are done.
 *
 * Each of the three begins with a cg_operation. References are counted: the engine's handle holds
 * one, and the connector holds one until the operation is done. Whoever gives back the last one
 * frees it.
 * Threads: the runtime's lock guards what is not constant. Functions want it held, unless they say
 * otherwise.
 */
#ifndef CG_CONNECTOR_OPERATION_H
#define CG_CONNECTOR_OPERATION_H
#include "connector/runtime.h"

struct cg_operation {
    cachegen *connector;               /* constant */
    cg_runtime *runtime;               /* constant; not to be touched in another process than pid */
    pid_t pid;                         /* constant */
    uint64_t started_ns;               /* constant; CLOCK_MONOTONIC */
    void (*destroy)(cg_operation *op); /* constant: frees it and all that it owns */
    cg_operation *next;                /* in its queue */
    uint32_t n_refs;
    bool done;
};

/* Without the lock: makes an operation of this process's runtime: n_bytes that begin with a
 * cg_operation, the rest zeros. It starts now, and its handle holds it. NULL without memory. */
void *cg_operation_new(cachegen *connector, size_t n_bytes, void (*destroy)(cg_operation *op));
/* Without the lock: whether this process started it. After fork() a child finds copies of its
 * parent's operations, in whatever state they were; the parent's threads see to the real ones. */
bool cg_operation_is_ours(const cg_operation *op);

/* The connector holds the operation from here on. */
void cg_operation_begin(cg_operation *op);
/* The operation is done: wakes those who wait, signals the eventfd and gives back the connector's
 * reference. The operation may be gone afterwards. */
void cg_operation_finish(cg_operation *op);
void cg_operation_unref(cg_operation *op);
/* Waits until it is done. */
void cg_operation_wait(const cg_operation *op);

/* Puts it at the end of a queue and wakes the queue's worker. */
void cg_operation_put(cg_operation_queue *queue, cg_operation *op);
/* For a worker: waits for the oldest operation and takes it off. NULL: the queue is empty and the
 * runtime stops. */
cg_operation *cg_operation_take(cg_runtime *runtime, cg_operation_queue *queue);

/* Without the lock, for the ABI: gives the caller a load's or a save's progress. In another process
 * than its own the operation counts as cancelled, with tokens_before in the blocks and nothing
 * more. CACHEGEN_AGAIN: not done yet. */
cachegen_status cg_operation_poll(const cg_operation *op, const cachegen_progress *progress,
                                  uint32_t tokens_before, cachegen_progress *progress_out);
#endif
