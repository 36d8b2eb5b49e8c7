/* The io_uring backend.
 *
 * A read of known size, or of a file's start, is one chain: openat2 into a fixed file slot, read
 * into a registered buffer, close. Whatever the chain meets that is unusual (another size, a short
 * read, no O_DIRECT) is left to the steps of iouring/io_steps.h, which are also how stats and
 * writes run. One operation is one flight; entries name it by its index, so a late completion can
 * never be taken for another operation's: a flight is reused only when nothing of it is in the
 * kernel.
 */
#include "iouring/io_backend.h"
#include "iouring/io_read.h"
#include "iouring/io_steps.h"
#include "iouring/io_uring_ring.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { KEEP_BYTES = 128 << 20, MAX_CHAIN_BYTES = 1 << 30 };

/* What an entry was: the low bits of its user_data; above them the index of its flight. */
enum { TAG_STEP, TAG_OPEN, TAG_READ, TAG_CLOSE, TAG_CANCEL, TAG_WAKE, TAG_BITS = 3 };

typedef enum flight_mode { MODE_STEPS, MODE_LOOK, MODE_CHAIN } flight_mode;

typedef struct flight {
    cg_io_op *op; /* NULL: free */
    flight_mode mode;
    uint32_t n_pending; /* entries in the kernel, cancellations aside */
    bool is_stalled;    /* the submission queue had no room: to be pushed */
    bool crosses_mounts;
    int open_result, read_result;
    struct open_how how;
} flight;

typedef struct uring {
    cg_io_ring ring;
    int wake_fd;
    bool wake_armed, woken;
    uint32_t n_flights, n_used, n_abandoned, n_stalled;
    uint32_t next_free; /* where the search for a free flight starts */
    flight flights[];
} uring;

static uint64_t user_data(const uring *u, const flight *f, unsigned tag)
{
    return (uint64_t)(f - u->flights) << TAG_BITS | tag;
}

static void flush(uring *u)
{
    /* What fails to be submitted stays in the queue, and goes with the next call. */
    while (io_uring_sq_ready(&u->ring.ring) > 0 && io_uring_submit(&u->ring.ring) == -EINTR)
        ;
}

static bool has_room(uring *u, unsigned n_entries)
{
    if (io_uring_sq_space_left(&u->ring.ring) < n_entries)
        flush(u);
    return io_uring_sq_space_left(&u->ring.ring) >= n_entries;
}

static void stall(uring *u, flight *f)
{
    f->is_stalled = true;
    u->n_stalled++;
}

static void prepare_step(struct io_uring_sqe *sqe, const cg_io_step *s)
{
    switch (s->kind) {
    case CG_IO_STEP_OPEN: io_uring_prep_openat(sqe, s->fd, s->path, s->flags, 0600); break;
    case CG_IO_STEP_STATX:
        io_uring_prep_statx(sqe, s->fd, s->path, s->flags, STATX_TYPE | STATX_SIZE, s->statx);
        break;
    case CG_IO_STEP_READ:
        io_uring_prep_read(sqe, s->fd, s->bytes, (unsigned)s->n_bytes, s->offset);
        break;
    case CG_IO_STEP_WRITE:
        io_uring_prep_write(sqe, s->fd, s->bytes, (unsigned)s->n_bytes, s->offset);
        break;
    case CG_IO_STEP_FSYNC: io_uring_prep_fsync(sqe, s->fd, 0); break;
    case CG_IO_STEP_CLOSE: io_uring_prep_close(sqe, s->fd); break;
    case CG_IO_STEP_LINK: io_uring_prep_linkat(sqe, s->fd, s->path, s->fd, s->new_path, 0); break;
    case CG_IO_STEP_RENAME:
        io_uring_prep_renameat(sqe, s->fd, s->path, s->fd, s->new_path, 0);
        break;
    case CG_IO_STEP_UNLINK: io_uring_prep_unlinkat(sqe, s->fd, s->path, 0); break;
    case CG_IO_STEP_MKDIR: io_uring_prep_mkdirat(sqe, s->fd, s->path, 0700); break;
    case CG_IO_STEP_DONE: break;
    }
    /* An open may ask a FUSE daemon, a buffered write may wait for the disk: never in the caller's
     * thread. Reads the kernel itself hands to a worker where they cannot be asynchronous. */
    if (s->kind != CG_IO_STEP_READ)
        sqe->flags |= IOSQE_ASYNC;
}

static void push_step(uring *u, flight *f, const cg_io_step *step)
{
    struct io_uring_sqe *sqe;
    if (!has_room(u, 1) || (sqe = io_uring_get_sqe(&u->ring.ring)) == NULL) {
        stall(u, f);
        return;
    }
    prepare_step(sqe, step);
    io_uring_sqe_set_data64(sqe, user_data(u, f, TAG_STEP));
    f->n_pending = 1;
}

static void push_look(uring *u, flight *f)
{
    const cg_io_step step = {.kind = CG_IO_STEP_STATX,
                             .fd = f->op->dir_fd,
                             .path = f->op->path,
                             .flags = AT_SYMLINK_NOFOLLOW,
                             .statx = &f->op->statx};
    f->mode = MODE_LOOK;
    push_step(u, f, &step);
}

/* Whether an open below dir_fd cannot ask anyone but the local kernel: its file system lies on a
 * block device. The answer does not ask a server itself (AT_STATX_DONT_SYNC). RESOLVE_NO_XDEV then
 * keeps the open on that device. */
static bool is_local(const cg_io_op *op)
{
    struct statx statx_dir;
    return op->dir_fd >= 0 && op->path[0] != '/' &&
           statx(op->dir_fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_TYPE, &statx_dir) == 0 &&
           statx_dir.stx_dev_major != 0;
}

static void push_chain(uring *u, flight *f)
{
    cg_io_op *op = f->op;
    const unsigned slot = (unsigned)(f - u->flights);
    const bool local = !f->crosses_mounts && is_local(op);
    f->mode = MODE_CHAIN;
    if (!has_room(u, 3)) { /* links must be submitted together */
        stall(u, f);
        return;
    }
    cg_io_ring_register(&u->ring, op->buffer);
    /* O_NONBLOCK: opening a FIFO must not wait for its writer. */
    f->how = (struct open_how){.flags = O_RDONLY | O_NOFOLLOW | O_NOCTTY | O_NONBLOCK |
                                        (op->direct ? O_DIRECT : 0u),
                               .resolve = local ? RESOLVE_NO_XDEV : 0};

    struct io_uring_sqe *sqe = io_uring_get_sqe(&u->ring.ring);
    io_uring_prep_openat2_direct(sqe, op->dir_fd, op->path, &f->how, slot);
    sqe->flags |= IOSQE_IO_LINK | (local ? 0 : IOSQE_ASYNC);
    io_uring_sqe_set_data64(sqe, user_data(u, f, TAG_OPEN));

    /* One byte more than the file has, or it could have grown unnoticed. */
    const unsigned n_bytes =
        op->start_only ? (unsigned)cg_io_read_start_end(op)
                       : (unsigned)((op->size_bytes / CG_IO_PAGE_BYTES + 1) * CG_IO_PAGE_BYTES);
    sqe = io_uring_get_sqe(&u->ring.ring);
    if (op->buffer->slot != CG_IO_NO_SLOT)
        io_uring_prep_read_fixed(sqe, (int)slot, op->buffer->buffer.data, n_bytes, 0,
                                 op->buffer->slot);
    else
        io_uring_prep_read(sqe, (int)slot, op->buffer->buffer.data, n_bytes, 0);
    /* Hard: the read is nearly always short of n_bytes, which would break a plain link and leave
     * the file open. */
    /* Async: O_NONBLOCK makes io_uring believe that the file never blocks, which FUSE and NFS do
     * all the same. */
    sqe->flags |= IOSQE_FIXED_FILE | IOSQE_IO_HARDLINK | (local ? 0 : IOSQE_ASYNC);
    io_uring_sqe_set_data64(sqe, user_data(u, f, TAG_READ));

    sqe = io_uring_get_sqe(&u->ring.ring);
    io_uring_prep_close_direct(sqe, slot);
    io_uring_sqe_set_data64(sqe, user_data(u, f, TAG_CLOSE));
    f->n_pending = 3;
}

static void end_flight(cg_io *io, flight *f)
{
    uring *u = io->backend;
    cg_io_op *op = f->op;
    f->op = NULL;
    u->n_used--;
    if (op->completed_ns == 0)
        op->completed_ns = cg_io_now_ns();
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

static void next_step(cg_io *io, flight *f)
{
    if (f->op->step.kind == CG_IO_STEP_DONE)
        end_flight(io, f);
    else
        push_step(io->backend, f, &f->op->step);
}

static void start_steps(cg_io *io, flight *f)
{
    f->mode = MODE_STEPS;
    f->op->expected_bytes =
        0; /* look before reading: pread() refuses a FIFO, io_uring waits for its writer */
    cg_io_op_start(f->op);
    next_step(io, f);
}

static void start_chain(cg_io *io, flight *f, uint64_t file_bytes)
{
    if (file_bytes > MAX_CHAIN_BYTES)
        start_steps(io, f);
    else if (cg_io_read_reserve(f->op, file_bytes))
        push_chain(io->backend, f);
    else
        end_flight(io, f);
}

static void looked(cg_io *io, flight *f, int result)
{
    if (cg_io_op_is_abandoned(f->op)) {
        end_flight(io, f);
    } else if (result < 0) {
        cg_io_op_record_error(f->op, -result);
        end_flight(io, f);
    } else if (cg_io_read_check_regular(f->op, &f->op->statx) != CG_OK) {
        end_flight(io, f);
    } else {
        start_chain(io, f, f->op->statx.stx_size);
    }
}

static bool is_transient(int result)
{
    return result == -EINTR || result == -EAGAIN || result == -ECANCELED;
}

static void chain_landed(cg_io *io, flight *f)
{
    uring *u = io->backend;
    cg_io_op *op = f->op;
    const int open_result = f->open_result, result = open_result < 0 ? open_result : f->read_result;
    if (cg_io_op_is_abandoned(op)) {
        end_flight(io, f);
    } else if (result == -EINVAL && op->direct) {
        op->direct = false;
        push_chain(u, f);
    } else if (open_result >= 0 && result == -EBADF) {
        u->ring.has_chains = false; /* the read was bound to the slot before the open filled it */
        start_steps(io, f);
    } else if (open_result == -EXDEV && f->how.resolve != 0) {
        f->crosses_mounts = true;
        push_chain(u, f);
    } else if (open_result == -EINVAL || is_transient(result)) {
        start_steps(io, f);
    } else if (result < 0) {
        cg_io_op_record_error(op, -result);
        end_flight(io, f);
    } else if ((uint64_t)result == op->size_bytes ||
               (op->start_only && (uint64_t)result > op->size_bytes)) {
        /* Whole, or a file that has grown since its size was looked up, read short just there: no
         * file system that is known does that to a regular file, and a second read would cost a
         * round trip on a network. */
        op->file_bytes = op->size_bytes;
        op->buffer->buffer.n_bytes = (size_t)op->size_bytes;
        end_flight(io, f);
    } else {
        start_steps(io, f); /* another size than expected, or a short read */
    }
}

static void cancel_entry(uring *u, const flight *f, unsigned tag)
{
    struct io_uring_sqe *sqe;
    if (!has_room(u, 1) || (sqe = io_uring_get_sqe(&u->ring.ring)) == NULL)
        return; /* it only comes to its end later */
    io_uring_prep_cancel64(sqe, user_data(u, f, tag), 0);
    io_uring_sqe_set_data64(sqe, TAG_CANCEL);
}

/* Marks the flight as abandoned and asks the kernel to hurry. What cleans up is left to run. */
static void abandon_flight(uring *u, flight *f)
{
    cg_io_op_abandon(f->op);
    u->n_abandoned++;
    if (f->mode == MODE_CHAIN) {
        cancel_entry(u, f, TAG_OPEN);
        cancel_entry(u, f, TAG_READ);
    } else if (f->op->step.kind != CG_IO_STEP_CLOSE && f->op->step.kind != CG_IO_STEP_UNLINK) {
        cancel_entry(u, f, TAG_STEP);
    }
}

static void landed(cg_io *io, uint64_t data, int result)
{
    uring *u = io->backend;
    const unsigned tag = data & ((1u << TAG_BITS) - 1);
    uint64_t n;
    if (tag == TAG_CANCEL)
        return;
    if (tag == TAG_WAKE) {
        u->wake_armed = false;
        if (read(u->wake_fd, &n, sizeof n) == (ssize_t)sizeof n)
            u->woken = true;
        return;
    }
    flight *f = &u->flights[data >> TAG_BITS];
    f->n_pending--;
    if (tag == TAG_OPEN)
        f->open_result = result;
    else if (tag == TAG_READ)
        f->read_result = result;
    if (f->n_pending > 0)
        return;
    switch (f->mode) {
    case MODE_STEPS:
        cg_io_op_advance(f->op, result == -ECANCELED ? -EINTR : result);
        next_step(io, f);
        break;
    case MODE_LOOK: looked(io, f, result); break;
    case MODE_CHAIN: chain_landed(io, f); break;
    }
}

static void push_stalled(cg_io *io)
{
    uring *u = io->backend;
    for (uint32_t i = 0; i < u->n_flights && u->n_stalled > 0; i++) {
        flight *f = &u->flights[i];
        if (!f->is_stalled)
            continue;
        f->is_stalled = false;
        u->n_stalled--;
        if (cg_io_op_is_abandoned(f->op) && f->mode != MODE_STEPS)
            end_flight(io, f);
        else if (f->mode == MODE_CHAIN)
            push_chain(u, f);
        else if (f->mode == MODE_LOOK)
            push_look(u, f);
        else
            push_step(u, f, &f->op->step);
        if (f->is_stalled)
            break; /* still no room */
    }
}

static void reap(cg_io *io)
{
    uring *u = io->backend;
    struct io_uring_cqe *cqe;
    while (io_uring_peek_cqe(&u->ring.ring, &cqe) == 0) {
        const uint64_t data = io_uring_cqe_get_data64(cqe);
        const int result = cqe->res;
        io_uring_cqe_seen(&u->ring.ring, cqe);
        landed(io, data, result);
    }
    if (u->n_stalled > 0)
        push_stalled(io);
    flush(u);
}

static cg_status uring_submit(cg_io *io, cg_io_op *op)
{
    uring *u = io->backend;
    if (u->n_used == u->n_flights)
        return CG_ERR_NO_MEMORY; /* abandoned ones hold all flights: cannot be, by n_flights */
    while (u->flights[u->next_free].op != NULL)
        u->next_free = (u->next_free + 1) % u->n_flights;
    flight *f = &u->flights[u->next_free];
    *f = (flight){.op = op};
    u->n_used++;
    if (op->kind != CG_IO_OP_READ || !u->ring.has_chains)
        start_steps(io, f);
    else if (op->expected_bytes > 0 && op->expected_bytes <= op->max_bytes)
        start_chain(io, f, op->expected_bytes);
    else
        push_look(u, f);
    flush(u);
    return CG_OK;
}

static void arm_wake(uring *u)
{
    struct io_uring_sqe *sqe;
    if (u->wake_armed || !has_room(u, 1) || (sqe = io_uring_get_sqe(&u->ring.ring)) == NULL)
        return;
    io_uring_prep_poll_add(sqe, u->wake_fd, POLLIN);
    io_uring_sqe_set_data64(sqe, TAG_WAKE);
    u->wake_armed = true;
}

/* Sleeps until something lands or the deadline. CG_ERR_TIMED_OUT at the deadline. */
static cg_status sleep_until(uring *u, uint64_t deadline_ns)
{
    struct io_uring_cqe *cqe;
    struct __kernel_timespec left = {0};
    if (deadline_ns != UINT64_MAX) {
        const uint64_t now_ns = cg_io_now_ns();
        if (now_ns >= deadline_ns)
            return CG_ERR_TIMED_OUT;
        left.tv_sec = (long long)((deadline_ns - now_ns) / 1000000000u);
        left.tv_nsec = (long long)((deadline_ns - now_ns) % 1000000000u);
    }
    const int result = io_uring_submit_and_wait_timeout(
        &u->ring.ring, &cqe, 1, deadline_ns == UINT64_MAX ? NULL : &left, NULL);
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
    uring *u = io->backend;
    const uint64_t deadline_ns = cg_io_deadline_ns(timeout_ns);
    cg_status status = CG_OK;
    arm_wake(u);
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
    const uring *u = io->backend;
    const uint64_t one = 1;
    ssize_t n;
    do /* EAGAIN: the counter is full, so a wake-up is under way */
        n = write(u->wake_fd, &one, sizeof one);
    while (n < 0 && errno == EINTR);
}

static void uring_abandon(cg_io *io, uint64_t user)
{
    uring *u = io->backend;
    for (uint32_t i = 0; i < u->n_flights; i++) {
        flight *f = &u->flights[i];
        if (f->op == NULL || f->op->user != user || cg_io_op_is_abandoned(f->op))
            continue;
        cg_io_complete_abandoned(io, f->op);
        abandon_flight(u, f);
    }
    flush(u);
}

static uint32_t uring_n_abandoned(const cg_io *io)
{
    const uring *u = io->backend;
    return u->n_abandoned;
}

static void abandon_all(uring *u, bool writes_too)
{
    for (uint32_t i = 0; i < u->n_flights; i++) {
        flight *f = &u->flights[i];
        if (f->op != NULL && !cg_io_op_is_abandoned(f->op) &&
            (writes_too || f->op->kind != CG_IO_OP_WRITE))
            abandon_flight(u, f);
    }
    flush(u);
}

static void uring_free(cg_io *io, uint64_t grace_ns)
{
    uring *u = io->backend;
    const uint64_t deadline_ns = cg_io_deadline_ns(grace_ns);
    abandon_all(u, false);
    reap(io);
    while (u->n_used > 0 && sleep_until(u, deadline_ns) == CG_OK)
        reap(io);
    abandon_all(u, true);
    reap(io);
    /* What is still under way writes into memory of its op and its buffer some day: both are left
     * to it. */
    io_uring_queue_exit(&u->ring.ring);
    close(u->wake_fd);
    free(u);
}

static const cg_io_backend_calls CALLS = {
    .submit = uring_submit,
    .wait = uring_wait,
    .wake = uring_wake,
    .abandon = uring_abandon,
    .n_abandoned = uring_n_abandoned,
    .free = uring_free,
};

cg_status cg_io_uring_open(cg_io *io)
{
    /* Fewer than max_abandoned are held up when an operation is submitted, and then queue_depth may
     * hang too. */
    const uint32_t n_flights = io->config.queue_depth + io->config.max_abandoned;
    cg_status status = CG_ERR_NO_MEMORY;
    uring *u = calloc(1, sizeof *u + n_flights * sizeof u->flights[0]);
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
