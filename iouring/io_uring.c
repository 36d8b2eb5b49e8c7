/* The io_uring backend: what lands, and what follows from it.
 *
 * What becomes of an operation is decided here, when its entries have come back; which entries it
 * puts into the ring is in io_uring_flight.c.
 */
#include "iouring/clock.h"
#include "iouring/io_backend.h"
#include "iouring/io_read.h"
#include "iouring/io_steps.h"
#include "iouring/io_uring_flight.h"
#include "iouring/thread_signals.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

enum { KEEP_BYTES = 128 << 20, MAX_CHAIN_BYTES = 1 << 30, DESCRIPTORS_SHARE = 4 };

static void end_flight(cg_io *io, cg_io_flight *f)
{
    cg_io_uring *u = io->backend;
    cg_io_op *op = f->op;
    f->op = NULL;
    u->n_used--;
    /* Steps set the time when they finish. A chain has no last step. */
    if (op->completed_ns == 0)
        op->completed_ns = cg_now_ns();
    if (!cg_io_op_is_abandoned(op)) {
        cg_io_complete(io, op);
        return;
    }
    u->n_abandoned--;
    if (op->buffer != NULL && op->buffer->slot != CG_IO_NO_SLOT)
        cg_io_ring_evict(&u->ring, op->buffer->slot);
    if (op->buffer != NULL)
        cg_io_pool_discard(op->buffer);
    op->buffer = NULL;
    cg_io_op_free(op);
}

static void next_step(cg_io *io, cg_io_flight *f)
{
    if (f->op->step.kind == CG_IO_STEP_DONE)
        end_flight(io, f);
    else
        cg_io_flight_push_step(io->backend, f);
}

static void start_steps(cg_io *io, cg_io_flight *f)
{
    f->mode = CG_IO_MODE_STEPS;
    /* So that the steps look before they read: pread() refuses a FIFO, but io_uring waits for its
     * writer. */
    f->op->looks_first = true;
    cg_io_op_start(f->op);
    next_step(io, f);
}

static bool is_transient(int result)
{
    return result == -EINTR || result == -EAGAIN || result == -ECANCELED;
}

static void chain_landed(cg_io *io, cg_io_flight *f)
{
    cg_io_uring *u = io->backend;
    cg_io_op *op = f->op;
    /* After an open that failed the read was only cancelled: the open's error is the answer. */
    const int open_result = f->open_result, result = open_result < 0 ? open_result : f->read_result;
    if (cg_io_op_is_abandoned(op)) {
        end_flight(io, f);
    } else if (result == -EINVAL && op->direct) {
        op->direct = false;
        cg_io_flight_push_chain(u, f);
    } else if (open_result >= 0 && result == -ECANCELED && !op->lacks_workers) {
        op->lacks_workers = true; /* a container allows only so many threads */
        cg_io_flight_push_chain(u, f);
    } else if (open_result >= 0 && result == -EBADF) {
        u->ring.has_chains = false; /* the read was bound to the slot before the open filled it */
        start_steps(io, f);
    } else if (open_result == -EXDEV && f->how.resolve != 0) {
        /* The path leaves the device that the open was kept to: once more, in a worker. */
        f->crosses_mounts = true;
        cg_io_flight_push_chain(u, f);
    } else if (open_result == -EINVAL || is_transient(result)) {
        start_steps(io, f);
    } else if (result < 0) {
        cg_io_op_record_error(op, -result);
        end_flight(io, f);
    } else if ((size_t)result >= op->range_bytes) {
        op->file_bytes = op->range_bytes;
        op->buffer->buffer.n_bytes = op->range_bytes;
        end_flight(io, f);
    } else {
        start_steps(io, f); /* a short read, or a short file */
    }
}

/* Marks the flight as abandoned and asks the kernel to hurry. */
static void abandon_flight(cg_io_uring *u, cg_io_flight *f)
{
    cg_io_op_abandon(f->op);
    u->n_abandoned++;
    cg_io_flight_cancel(u, f);
}

static void landed(cg_io *io, uint64_t data, int result)
{
    cg_io_uring *u = io->backend;
    const unsigned tag = data & ((1u << CG_IO_TAG_BITS) - 1);
    uint64_t n;
    if (tag == CG_IO_TAG_CANCEL)
        return;
    if (tag == CG_IO_TAG_WAKE) {
        /* A poll is good for one wake-up. The next wait asks for another. */
        u->wake_armed = false;
        if (read(u->wake_fd, &n, sizeof n) == (ssize_t)sizeof n)
            u->woken = true;
        return;
    }
    cg_io_flight *f = &u->flights[data >> CG_IO_TAG_BITS];
    f->n_pending--;
    if (tag == CG_IO_TAG_OPEN)
        f->open_result = result;
    else if (tag == CG_IO_TAG_READ)
        f->read_result = result;
    if (f->n_pending > 0)
        return; /* the kernel may still write to the op and its buffer */
    switch (f->mode) {
    case CG_IO_MODE_STEPS:
        /* An abandoned op has its step cancelled: the next ones clean up, as after EINTR. And one
         * for which there is no worker: a read is done again, without. A close is never cancelled,
         * so there was none, and nobody else would ever close it. */
        f->op->lacks_workers |= result == -ECANCELED;
        if (result == -ECANCELED && f->op->step.kind == CG_IO_STEP_CLOSE)
            close(f->op->step.fd);
        cg_io_op_advance(f->op, result == -ECANCELED ? -EINTR : result);
        next_step(io, f);
        break;
    case CG_IO_MODE_CHAIN: chain_landed(io, f); break;
    }
}

static void push_stalled(cg_io *io)
{
    cg_io_uring *u = io->backend;
    for (uint32_t i = 0; i < u->n_flights && u->n_stalled > 0; i++) {
        cg_io_flight *f = &u->flights[i];
        if (!f->is_stalled)
            continue;
        f->is_stalled = false;
        u->n_stalled--;
        if (f->mode == CG_IO_MODE_STEPS)
            cg_io_flight_push_step(u, f);
        else if (cg_io_op_is_abandoned(f->op))
            end_flight(io, f);
        else
            cg_io_flight_push_chain(u, f);
        if (f->is_stalled)
            break; /* still no room */
    }
}

static void reap(cg_io *io)
{
    cg_io_uring *u = io->backend;
    struct io_uring_cqe *cqe;
    while (io_uring_peek_cqe(&u->ring.ring, &cqe) == 0) {
        const uint64_t data = io_uring_cqe_get_data64(cqe);
        const int result = cqe->res;
        /* Copied before: once it is seen the kernel may use the entry again. */
        io_uring_cqe_seen(&u->ring.ring, cqe);
        landed(io, data, result);
    }
    if (u->n_stalled > 0)
        push_stalled(io);
    cg_io_uring_flush(u);
}

static cg_status uring_submit(cg_io *io, cg_io_op *op)
{
    cg_io_uring *u = io->backend;
    if (u->n_used == u->n_flights)
        return CG_ERR_NO_MEMORY; /* abandoned ones hold all flights: cannot be, by n_flights */
    while (u->flights[u->next_free].op != NULL)
        u->next_free = (u->next_free + 1) % u->n_flights;
    cg_io_flight *f = &u->flights[u->next_free];
    *f = (cg_io_flight){.op = op};
    u->n_used++;
    /* A chain ends with a close, so it is no way for a file that stays open. */
    if (op->kind != CG_IO_OP_READ || op->keeps_open || !u->ring.has_chains ||
        op->range_bytes > MAX_CHAIN_BYTES)
        start_steps(io, f);
    else if (cg_io_read_reserve(op))
        cg_io_flight_push_chain(u, f);
    else
        end_flight(io, f);
    cg_io_uring_flush(u);
    return CG_OK;
}

/* Sleeps until something lands or the deadline. CG_ERR_TIMED_OUT at the deadline. */
static cg_status sleep_until(cg_io_uring *u, uint64_t deadline_ns)
{
    struct io_uring_cqe *cqe;
    struct __kernel_timespec left = {0};
    if (deadline_ns != UINT64_MAX) {
        const uint64_t now_ns = cg_now_ns();
        if (now_ns >= deadline_ns)
            return CG_ERR_TIMED_OUT;
        left.tv_sec = (long long)((deadline_ns - now_ns) / 1000000000u);
        left.tv_nsec = (long long)((deadline_ns - now_ns) % 1000000000u);
    }
    const int result = io_uring_submit_and_wait_timeout(
        &u->ring.ring, &cqe, 1, deadline_ns == UINT64_MAX ? NULL : &left, NULL);
    /* A time-out, an interruption and a full completion queue (EBUSY) are one thing here: the
     * caller reaps and comes again, and then the deadline is asked first. */
    switch (result < 0 ? -result : 0) {
    case 0:
    case ETIME:
    case EINTR:
    case EAGAIN:
    case EBUSY: return CG_OK;
    default: return CG_ERR_IO;
    }
}

static cg_status uring_wait(cg_io *io, uint64_t timeout_ns)
{
    cg_io_uring *u = io->backend;
    const uint64_t deadline_ns = cg_io_deadline_ns(timeout_ns);
    cg_status status = CG_OK;
    cg_io_uring_arm_wake(u);
    reap(io);
    while (io->n_ready == 0 && !u->woken && timeout_ns > 0 &&
           (status = sleep_until(u, deadline_ns)) == CG_OK)
        reap(io);
    if (io->n_ready == 0)
        u->woken = false; /* with something to take, a wake-up stays for the next wait */
    return status == CG_ERR_TIMED_OUT ? CG_OK : status;
}

static void uring_wake(cg_io *io)
{
    const cg_io_uring *u = io->backend;
    const uint64_t one = 1;
    ssize_t n;
    do /* EAGAIN: the counter is full, so a wake-up is under way */
        n = write(u->wake_fd, &one, sizeof one);
    while (n < 0 && errno == EINTR);
}

static void uring_abandon(cg_io *io, uint64_t user)
{
    cg_io_uring *u = io->backend;
    for (uint32_t i = 0; i < u->n_flights; i++) {
        cg_io_flight *f = &u->flights[i];
        if (f->op == NULL || f->op->user != user || cg_io_op_is_abandoned(f->op))
            continue;
        cg_io_complete_abandoned(io, f->op);
        abandon_flight(u, f);
    }
    cg_io_uring_flush(u);
}

static uint32_t uring_n_abandoned(const cg_io *io)
{
    const cg_io_uring *u = io->backend;
    return u->n_abandoned;
}

static void abandon_all(cg_io_uring *u, bool writes_too)
{
    for (uint32_t i = 0; i < u->n_flights; i++) {
        cg_io_flight *f = &u->flights[i];
        if (f->op != NULL && !cg_io_op_is_abandoned(f->op) &&
            (writes_too || f->op->kind != CG_IO_OP_WRITE))
            abandon_flight(u, f);
    }
    cg_io_uring_flush(u);
}

/* Only the kernel points to it from here on, which LeakSanitizer cannot know. */
static void leave_to_kernel(const cg_io_op *op)
{
#if defined(__SANITIZE_ADDRESS__)
    if (op != NULL)
        __lsan_ignore_object(op);
#else
    (void)op;
#endif
}

/* liburing maps and unmaps rings by system calls that ThreadSanitizer does not see: the next ring
 * at the same place, in another thread, would look like a race with this one. */
#if defined(__SANITIZE_THREAD__)
static char places;
static void note_unmapping(void)
{
    __tsan_release(&places);
}
static void note_mapping(void)
{
    __tsan_acquire(&places);
}
#else
static void note_unmapping(void)
{
}
static void note_mapping(void)
{
}
#endif

/* What is still under way writes into memory of its op and its buffer some day: both are left to
 * it. */
static void destroy(cg_io_uring *u)
{
    for (uint32_t i = 0; i < u->n_flights; i++)
        leave_to_kernel(u->flights[i].op);
    note_unmapping();
    io_uring_queue_exit(&u->ring.ring);
    close(u->wake_fd);
    free(u);
}

/* Whether what is under way has a descriptor of this process, or will have one when its open comes
 * through after all. Without the ring nobody would close it. (A chain's file is the ring's.) */
static bool has_descriptors(const cg_io_uring *u)
{
    for (uint32_t i = 0; i < u->n_flights; i++) {
        const cg_io_op *op = u->flights[i].op;
        if (op == NULL || u->flights[i].mode != CG_IO_MODE_STEPS)
            continue;
        if (op->step.kind == CG_IO_STEP_OPEN || op->step.kind == CG_IO_STEP_CLOSE || op->fd >= 0)
            return true;
    }
    return false;
}

/* A ring that is left until all that hangs in it has come to its end. */
typedef struct left_ring {
    cg_io_uring *uring;
    cg_io_pool *pool; /* held */
} left_ring;

static void *finish_left(void *argument)
{
    const left_ring left = *(const left_ring *)argument;
    /* All of it is abandoned: nothing is handed to a caller any more. */
    cg_io io = {.backend = left.uring};
    free(argument);
    while (left.uring->n_used > 0 && sleep_until(left.uring, UINT64_MAX) == CG_OK)
        reap(&io);
    destroy(left.uring);
    cg_io_pool_drop(left.pool);
    return NULL;
}

/* Gives the ring to a thread of its own. False: there is none. */
static bool leave_ring(cg_io_uring *u, cg_io_pool *pool)
{
    pthread_t thread;
    sigset_t before;
    left_ring *left = malloc(sizeof *left);
    if (left == NULL)
        return false;
    *left = (left_ring){u, pool};
    cg_io_pool_hold(pool);
    cg_thread_signals_block(&before);
    const bool has_begun = pthread_create(&thread, NULL, finish_left, left) == 0;
    cg_thread_signals_restore(&before);
    if (has_begun) {
        pthread_detach(thread);
        return true;
    }
    cg_io_pool_drop(pool);
    free(left);
    return false;
}

static void uring_free(cg_io *io, uint64_t grace_ns)
{
    cg_io_uring *u = io->backend;
    const uint64_t deadline_ns = cg_io_deadline_ns(grace_ns);
    /* As cg_io_free() promises: reads and stats are cancelled, writes may finish until the
     * deadline. */
    abandon_all(u, false);
    reap(io);
    while (u->n_used > 0 && sleep_until(u, deadline_ns) == CG_OK)
        reap(io);
    abandon_all(u, true);
    reap(io);
    if (!has_descriptors(u) || !leave_ring(u, io->pool))
        destroy(u);
}

static const cg_io_backend_calls CALLS = {
    .submit = uring_submit,
    .wait = uring_wait,
    .wake = uring_wake,
    .abandon = uring_abandon,
    .n_abandoned = uring_n_abandoned,
    .free = uring_free,
};

/* Without chains each operation has a descriptor of the process, which needs some for itself. */
static void limit_depth(cg_io_config *config)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 &&
        limit.rlim_cur / DESCRIPTORS_SHARE < config->queue_depth)
        config->queue_depth =
            limit.rlim_cur > DESCRIPTORS_SHARE ? (uint32_t)(limit.rlim_cur / DESCRIPTORS_SHARE) : 1;
}

cg_status cg_io_uring_open(cg_io *io)
{
    /* Fewer than max_abandoned are held up when an operation is submitted, and then queue_depth may
     * hang too. */
    const uint32_t n_flights = io->config.queue_depth + io->config.max_abandoned;
    cg_status status = CG_ERR_NO_MEMORY;
    cg_io_uring *u = calloc(1, sizeof *u + n_flights * sizeof u->flights[0]);
    if (u == NULL)
        return status;
    u->n_flights = n_flights;
    u->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (u->wake_fd < 0) {
        status = cg_status_from_errno(errno);
        goto no_fd;
    }
    if (!cg_io_ring_init(&u->ring, n_flights, NULL, 0)) {
        status = CG_ERR_UNSUPPORTED;
        goto no_ring;
    }
    note_mapping();
    if (!u->ring.has_chains)
        limit_depth(&io->config);
    if ((status = cg_io_pool_new(KEEP_BYTES, cg_io_ring_evict, &u->ring, &io->pool)) != CG_OK)
        goto no_pool;
    io->calls = &CALLS;
    io->backend = u;
    return CG_OK;
no_pool:
    io_uring_queue_exit(&u->ring.ring);
no_ring:
    close(u->wake_fd);
no_fd:
    free(u);
    return status;
}
