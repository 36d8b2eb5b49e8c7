/* A read is a small machine of states. read_open(), read_stat(), read_next() and read_close() set a
 * state and its step; read_opened(), read_statted(), read_data() and read_cut() take the step's
 * result. */
#include "iouring/io_read.h"

#include <errno.h>
#include <fcntl.h>

/* The order counts: from READ_REOPEN on the step is a close, which is no reason to fail an
 * operation that was abandoned meanwhile. */
enum { READ_OPEN, READ_STAT, READ_DATA, READ_CUT, READ_REOPEN, READ_CLOSE, STAT_PATH };

/* Whether op->statx is of a regular file. Else status and error of op say what it is. */
static bool check_regular(cg_io_op *op)
{
    const unsigned mode = op->statx.stx_mode;
    if (S_ISREG(mode))
        return true;
    op->status = CG_ERR_INVALID_ARGUMENT;
    op->error = S_ISDIR(mode) ? EISDIR : S_ISLNK(mode) ? ELOOP : EINVAL;
    return false;
}

bool cg_io_read_reserve(cg_io_op *op)
{
    if (op->buffer == NULL)
        op->buffer = cg_io_pool_get(op->pool, op->range_bytes);
    if (op->buffer == NULL)
        op->status = CG_ERR_NO_MEMORY;
    return op->buffer != NULL;
}

static void read_open(cg_io_op *op)
{
    op->state = READ_OPEN;
    /* O_NONBLOCK: opening a FIFO must not wait for its writer. */
    op->step = (cg_io_step){
        .kind = CG_IO_STEP_OPEN,
        .fd = op->dir_fd,
        .path = op->path,
        .flags =
            O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NOCTTY | O_NONBLOCK | (op->direct ? O_DIRECT : 0),
    };
}

static void read_close(cg_io_op *op, int next_state)
{
    const bool is_given = op->given != NULL;
    op->state = next_state;
    if (is_given)
        op->fd = cg_open_file_drop(op->given);
    op->given = NULL;
    if (op->fd < 0 || (op->keeps_open && !is_given && op->status == CG_OK)) {
        cg_io_op_finish(op);
        return;
    }
    op->step = (cg_io_step){.kind = CG_IO_STEP_CLOSE, .fd = op->fd};
    op->fd = -1;
}

static void read_stat(cg_io_op *op, int state)
{
    op->state = state;
    /* A kernel takes a short read for the end of a FUSE file, and believes that for a while. */
    const int flags = state == READ_CUT ? AT_STATX_FORCE_SYNC : 0;
    op->step = (cg_io_step){.kind = CG_IO_STEP_STATX,
                            .fd = op->fd,
                            /* The open file, not its name, which may be another file's by now. */
                            .path = "",
                            .flags = AT_EMPTY_PATH | flags,
                            .statx = &op->statx};
}

static void read_next(cg_io_op *op)
{
    /* O_DIRECT wants aligned offsets: after an odd end its last block is read again. */
    const size_t offset =
        op->direct ? op->done_bytes / CG_IO_PAGE_BYTES * CG_IO_PAGE_BYTES : op->done_bytes;
    const size_t left_bytes = cg_io_read_end(op) - offset;
    op->state = READ_DATA;
    op->step = (cg_io_step){
        .kind = CG_IO_STEP_READ,
        .fd = op->fd,
        .bytes = op->buffer->buffer.data + offset,
        .n_bytes = left_bytes < CG_IO_STEP_BYTES ? left_bytes : CG_IO_STEP_BYTES,
        .offset = op->offset + offset,
    };
}

static void read_contents(cg_io_op *op)
{
    /* Also when a file is read anew: nothing that was read of it before counts. */
    op->done_bytes = 0;
    if (cg_io_read_reserve(op))
        read_next(op);
    else
        read_close(op, READ_CLOSE);
}

static void read_failed(cg_io_op *op, int error)
{
    cg_io_op_record_error(op, error);
    if (op->fd >= 0)
        read_close(op, READ_CLOSE);
    else
        cg_io_op_finish(op);
}

static void read_opened(cg_io_op *op, int result)
{
    if (result == -EINVAL && op->direct) {
        op->direct = false; /* the file system has no O_DIRECT */
        read_open(op);
        return;
    }
    if (result < 0) {
        read_failed(op, -result);
        return;
    }
    op->fd = result;
    /* Off again before reading: io_uring takes a non-blocking file as one that never blocks, and
     * reads inline. */
    fcntl(op->fd, F_SETFL, op->direct ? O_DIRECT : 0);
    posix_fadvise(op->fd, 0, 0, POSIX_FADV_RANDOM);
    /* What was looked at before may be another file, now that it is opened again. */
    if (op->looks_first || op->is_regular)
        read_stat(op, READ_STAT);
    else
        read_contents(op);
}

static void read_statted(cg_io_op *op, int result)
{
    if (result < 0) {
        read_failed(op, -result);
        return;
    }
    if (!check_regular(op)) {
        read_close(op, READ_CLOSE);
        return;
    }
    op->is_regular = true;
    read_contents(op);
}

static void read_complete(cg_io_op *op)
{
    op->file_bytes = op->range_bytes;
    op->buffer->buffer.n_bytes = op->range_bytes;
    read_close(op, READ_CLOSE);
}

static void read_data(cg_io_op *op, int result)
{
    if (result == -EINVAL && op->direct) {
        op->direct = false;
        read_close(op, READ_REOPEN);
        return;
    }
    if (result == -EINTR || result == -EAGAIN) {
        if (++op->n_retries > CG_IO_MAX_RETRIES)
            read_failed(op, -result);
        return; /* the same step again */
    }
    /* The step may have begun before done_bytes (O_DIRECT): only what goes beyond is new. */
    const size_t end = result < 0 ? 0 : (size_t)(op->step.offset - op->offset) + (size_t)result;
    if (end > op->done_bytes) {
        op->done_bytes = end;
        if (end < op->range_bytes)
            read_next(op);
        else
            read_complete(op);
    } else if (!op->is_regular) {
        read_stat(op, READ_STAT); /* no regular file, perhaps: that is the better answer */
    } else if (result < 0) {
        read_failed(op, -result);
    } else {
        read_stat(op, READ_CUT);
    }
}

/* Less came than was asked for. A file that is longer is whole: a connection was lost, perhaps. */
static void read_cut(cg_io_op *op, int result)
{
    if (result < 0 || op->statx.stx_size > op->offset + op->done_bytes) {
        read_failed(op, result < 0 ? -result : EIO);
        return;
    }
    op->status = CG_ERR_TRUNCATED;
    read_close(op, READ_CLOSE);
}

void cg_io_read_begin(cg_io_op *op)
{
    if (op->given == NULL) {
        read_open(op);
        return;
    }
    op->is_regular = true; /* it was looked at when it was opened */
    read_contents(op);
}

void cg_io_close_begin(cg_io_op *op)
{
    op->step = (cg_io_step){.kind = CG_IO_STEP_CLOSE, .fd = op->fd};
    op->fd = -1;
}

void cg_io_read_advance(cg_io_op *op, int result)
{
    if (cg_io_op_is_abandoned(op) && op->state < READ_REOPEN) {
        /* An open that came through after all: nobody else would close it. */
        if (op->state == READ_OPEN && result >= 0)
            op->fd = result;
        read_failed(op, ETIMEDOUT);
        return;
    }
    switch (op->state) {
    case READ_OPEN: read_opened(op, result); break;
    case READ_STAT: read_statted(op, result); break;
    case READ_DATA: read_data(op, result); break;
    case READ_CUT: read_cut(op, result); break;
    case READ_REOPEN: read_open(op); break;
    default:
        cg_io_op_finish(op);
        break; /* READ_CLOSE: of a file that was only read, nothing is lost */
    }
}

void cg_io_stat_begin(cg_io_op *op)
{
    op->state = STAT_PATH;
    op->step = (cg_io_step){.kind = CG_IO_STEP_STATX,
                            .fd = op->dir_fd,
                            .path = op->path,
                            .flags = AT_SYMLINK_NOFOLLOW,
                            .statx = &op->statx};
}

void cg_io_stat_advance(cg_io_op *op, int result)
{
    if (result < 0)
        cg_io_op_record_error(op, -result);
    else if (check_regular(op))
        op->file_bytes = op->statx.stx_size;
    cg_io_op_finish(op);
}
