/* iouring/io_backend.h - what a backend of cg_io provides. Internal to iouring.
 *
 * io.c owns what the caller sees: limits, and the completions that wait to be taken. A backend
 * (io_uring.c, io_threads.c) runs operations. It hands each result over with cg_io_complete(), in
 * the thread of the queue.
 *
 * io.c and the backends call each other: down through the table of functions below, up through the
 * functions at the end. This is the one circle in this folder, and it is meant: io.c picks a
 * backend when a queue is made and knows nothing of it afterwards.
 * Threads: the queue's own, but for workers of io_threads.c, which io.c does not see.
 */
#ifndef CG_IOURING_IO_BACKEND_H
#define CG_IOURING_IO_BACKEND_H
#include "iouring/io_op.h"

typedef struct cg_io_backend_calls {
    /* Takes the op. It can fail only with CG_ERR_NO_MEMORY or CG_ERR_IO; the op is the caller's
     * then. */
    cg_status (*submit)(cg_io *io, cg_io_op *op);
    /* Returns when a completion is there, cg_io_wake() was called or the time is up. */
    cg_status (*wait)(cg_io *io, uint64_t timeout_ns);
    void (*wake)(cg_io *io);
    void (*abandon)(cg_io *io, uint64_t user);
    uint32_t (*n_abandoned)(const cg_io *io);
    void (*free)(cg_io *io, uint64_t grace_ns);
} cg_io_backend_calls;

struct cg_io {
    const cg_io_backend_calls *calls;
    void *backend; /* cg_io_uring or cg_io_threads */
    cg_io_backend backend_in_use;
    cg_io_config config; /* defaults filled in */
    cg_io_pool *pool;
    cg_io_completion *ready; /* a ring of queue_depth completions that the caller has not taken */
    uint32_t first_ready, n_ready;
    uint32_t n_under_way; /* submitted and not taken: at most queue_depth */
};

/* Each fills io->calls, io->backend and io->pool. */
cg_status cg_io_uring_open(cg_io *io);
cg_status cg_io_threads_open(cg_io *io);

/* Queues the op's result for the caller, with its buffer, and frees the op. */
void cg_io_complete(cg_io *io, cg_io_op *op);
/* Queues CG_ERR_TIMED_OUT in the name of an op that is still held up. */
void cg_io_complete_abandoned(cg_io *io, const cg_io_op *op);
/* now + timeout, saturated. */
uint64_t cg_io_deadline_ns(uint64_t timeout_ns);
#endif
