/* iouring/io_uring_flight.h - what an operation puts into the ring. Internal to iouring.
 *
 * An operation on io_uring is a flight. A read flies as one chain of entries: openat2 into a fixed
 * file slot, the advice not to read ahead, read into a registered buffer, close. If the chain meets
 * anything unusual (a short read, say), the steps of iouring/io_steps.h do the rest. Stats, writes
 * and reads of files that stay open are steps from the start: one entry at a time.
 *
 * An entry names its flight by index. A flight is reused only when nothing of it is in the kernel,
 * so a late completion can never be taken for another operation's.
 * Threads: the queue's.
 */
#ifndef CG_IOURING_IO_URING_FLIGHT_H
#define CG_IOURING_IO_URING_FLIGHT_H
#include "iouring/io_op.h"
#include "iouring/io_uring_ring.h"

/* What an entry was: the low bits of its user_data. Above them is the index of its flight. */
enum {
    CG_IO_TAG_STEP,
    CG_IO_TAG_OPEN,
    CG_IO_TAG_READ,
    CG_IO_TAG_CLOSE,
    CG_IO_TAG_CANCEL,
    CG_IO_TAG_WAKE,
    CG_IO_TAG_ADVICE,
    CG_IO_TAG_BITS = 3,
};

typedef enum cg_io_flight_mode {
    CG_IO_MODE_STEPS, /* op->step is in the kernel */
    CG_IO_MODE_CHAIN,
} cg_io_flight_mode;

typedef struct cg_io_flight {
    cg_io_op *op; /* NULL: free */
    cg_io_flight_mode mode;
    uint32_t n_pending; /* entries in the kernel, cancellations aside */
    bool is_stalled;    /* the submission queue had no room: to be pushed */
    bool crosses_mounts;
    int open_result, read_result;
    struct open_how how;
} cg_io_flight;

typedef struct cg_io_uring {
    cg_io_ring ring;
    int wake_fd;
    bool wake_armed, woken;
    uint32_t n_flights, n_used, n_abandoned, n_stalled;
    uint32_t next_free; /* where the search for a free flight starts */
    cg_io_flight flights[];
} cg_io_uring;

/* Each puts entries into the submission queue; cg_io_uring_flush() hands them to the kernel. If the
 * queue has no room, the flight is stalled: push it again later. */
void cg_io_flight_push_step(cg_io_uring *u, cg_io_flight *f);
/* op->buffer has room for what is to be read. */
void cg_io_flight_push_chain(cg_io_uring *u, cg_io_flight *f);
/* Asks the kernel to give up the flight's entries. Those that clean up (close, unlink) still
 * run. */
void cg_io_flight_cancel(cg_io_uring *u, const cg_io_flight *f);
/* Puts an entry tagged CG_IO_TAG_WAKE into the ring that completes on cg_io_wake(), unless there is
 * one already. */
void cg_io_uring_arm_wake(cg_io_uring *u);
void cg_io_uring_flush(cg_io_uring *u);
#endif
