#include "iouring/io_uring_flight.h"

#include "iouring/io_read.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>

static uint64_t user_data(const cg_io_uring *u, const cg_io_flight *f, unsigned tag)
{
    return (uint64_t)(f - u->flights) << CG_IO_TAG_BITS | tag;
}

void cg_io_uring_flush(cg_io_uring *u)
{
    /* What fails to be submitted stays in the queue, and goes with the next call. */
    while (io_uring_sq_ready(&u->ring.ring) > 0 && io_uring_submit(&u->ring.ring) == -EINTR)
        ;
}

static bool has_room(cg_io_uring *u, unsigned n_entries)
{
    if (io_uring_sq_space_left(&u->ring.ring) < n_entries)
        cg_io_uring_flush(u);
    return io_uring_sq_space_left(&u->ring.ring) >= n_entries;
}

static void stall(cg_io_uring *u, cg_io_flight *f)
{
    f->is_stalled = true;
    u->n_stalled++;
}

/* Whether the file system of an open file or directory lies on a block device, so that using it
 * asks nobody but the local kernel. The answer does not ask a server itself
 * (AT_STATX_DONT_SYNC). */
static bool is_on_device(int fd)
{
    struct statx statx_fd;
    return fd >= 0 &&
           statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_TYPE, &statx_fd) == 0 &&
           statx_fd.stx_dev_major != 0;
}

/* What is in the page cache is copied by whoever submits, one read after another. Many bytes had
 * better be copied by the kernel's workers, side by side: from here on that costs less than it
 * spares. */
static bool copies_much(const cg_io_op *op, uint64_t n_bytes)
{
    return !op->direct && !op->lacks_workers && n_bytes >= 64 << 10;
}

static void prepare_step(struct io_uring_sqe *sqe, const cg_io_op *op)
{
    const cg_io_step *s = &op->step;
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
     * thread. Reads from a disk the kernel itself hands to a worker where they cannot be
     * asynchronous; but FUSE first asks its daemon for the file's size, in whoever submits. */
    if (s->kind != CG_IO_STEP_READ || copies_much(op, s->n_bytes) || !is_on_device(s->fd))
        sqe->flags |= IOSQE_ASYNC;
}

void cg_io_flight_push_step(cg_io_uring *u, cg_io_flight *f)
{
    struct io_uring_sqe *sqe;
    if (!has_room(u, 1) || (sqe = io_uring_get_sqe(&u->ring.ring)) == NULL) {
        stall(u, f);
        return;
    }
    prepare_step(sqe, f->op);
    io_uring_sqe_set_data64(sqe, user_data(u, f, CG_IO_TAG_STEP));
    f->n_pending = 1;
}

/* Whether an open below dir_fd cannot ask anyone but the local kernel. RESOLVE_NO_XDEV then keeps
 * the open on that device. */
static bool is_local(const cg_io_op *op)
{
    return op->path[0] != '/' && is_on_device(op->dir_fd);
}

/* Between open and read. Whether it is taken does not matter, so the link is a hard one. */
static void push_advice(cg_io_uring *u, const cg_io_flight *f, bool local)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&u->ring.ring);
    io_uring_prep_fadvise(sqe, (int)(f - u->flights), 0, 0, POSIX_FADV_RANDOM);
    sqe->flags |= IOSQE_FIXED_FILE | IOSQE_IO_HARDLINK | (local ? 0 : IOSQE_ASYNC);
    io_uring_sqe_set_data64(sqe, user_data(u, f, CG_IO_TAG_ADVICE));
}

void cg_io_flight_push_chain(cg_io_uring *u, cg_io_flight *f)
{
    cg_io_op *op = f->op;
    /* The file slot has its flight's number: a flight has one file at a time. */
    const unsigned slot = (unsigned)(f - u->flights);
    const bool local = !f->crosses_mounts && is_local(op);
    f->mode = CG_IO_MODE_CHAIN;
    if (!has_room(u, 4)) { /* links must be submitted together */
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
    io_uring_sqe_set_data64(sqe, user_data(u, f, CG_IO_TAG_OPEN));

    push_advice(u, f, local);

    const unsigned n_bytes = (unsigned)cg_io_read_end(op);
    sqe = io_uring_get_sqe(&u->ring.ring);
    if (op->buffer->slot != CG_IO_NO_SLOT)
        io_uring_prep_read_fixed(sqe, (int)slot, op->buffer->buffer.data, n_bytes, op->offset,
                                 op->buffer->slot);
    else
        io_uring_prep_read(sqe, (int)slot, op->buffer->buffer.data, n_bytes, op->offset);
    /* Hard: a read that falls short would break a plain link and leave the file open. */
    /* Async: O_NONBLOCK makes io_uring believe that the file never blocks, which FUSE and NFS do
     * all the same. */
    sqe->flags |= IOSQE_FIXED_FILE | IOSQE_IO_HARDLINK |
                  (local && !copies_much(op, n_bytes) ? 0 : IOSQE_ASYNC);
    io_uring_sqe_set_data64(sqe, user_data(u, f, CG_IO_TAG_READ));

    sqe = io_uring_get_sqe(&u->ring.ring);
    io_uring_prep_close_direct(sqe, slot);
    io_uring_sqe_set_data64(sqe, user_data(u, f, CG_IO_TAG_CLOSE));
    f->n_pending = 4;
}

static void cancel_entry(cg_io_uring *u, const cg_io_flight *f, unsigned tag)
{
    struct io_uring_sqe *sqe;
    if (!has_room(u, 1) || (sqe = io_uring_get_sqe(&u->ring.ring)) == NULL)
        return; /* it only comes to its end later */
    io_uring_prep_cancel64(sqe, user_data(u, f, tag), 0);
    io_uring_sqe_set_data64(sqe, CG_IO_TAG_CANCEL);
}

void cg_io_flight_cancel(cg_io_uring *u, const cg_io_flight *f)
{
    if (f->mode == CG_IO_MODE_CHAIN) {
        cancel_entry(u, f, CG_IO_TAG_OPEN);
        cancel_entry(u, f, CG_IO_TAG_READ);
    } else if (f->op->step.kind != CG_IO_STEP_CLOSE && f->op->step.kind != CG_IO_STEP_UNLINK) {
        cancel_entry(u, f, CG_IO_TAG_STEP);
    }
}

void cg_io_uring_arm_wake(cg_io_uring *u)
{
    struct io_uring_sqe *sqe;
    if (u->wake_armed || !has_room(u, 1) || (sqe = io_uring_get_sqe(&u->ring.ring)) == NULL)
        return;
    io_uring_prep_poll_add(sqe, u->wake_fd, POLLIN);
    io_uring_sqe_set_data64(sqe, CG_IO_TAG_WAKE);
    u->wake_armed = true;
}
