/* What a caller of a queue sees: its limits, submitting, and the ring of completions that wait to
 * be taken. How an operation runs is the backend's matter (iouring/io_backend.h). */
#include "iouring/io.h"

#include "iouring/clock.h"
#include "iouring/io_backend.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    DEFAULT_QUEUE_DEPTH = 16,
    DEFAULT_THREADS = 4,
    DEFAULT_MAX_ABANDONED = 64,
    MAX_QUEUE_DEPTH = 4096,
    MAX_THREADS = 256,
    MAX_MAX_ABANDONED = 4096,
};

/* In place of a path, where a file is open already. */
static const char OPEN_FILE[] = ".";

static uint32_t default_and_limit(uint32_t value, uint32_t default_value, uint32_t limit)
{
    if (value == 0)
        return default_value;
    return value < limit ? value : limit;
}

cg_status cg_io_new(const cg_io_config *config, cg_io **io_out)
{
    static const cg_io_config defaults;
    cg_status status = CG_ERR_NO_MEMORY;
    *io_out = NULL;
    if (config == NULL)
        config = &defaults;
    if ((unsigned)config->backend > CG_IO_THREADS)
        return CG_ERR_INVALID_ARGUMENT;

    cg_io *io = calloc(1, sizeof *io);
    if (io == NULL)
        return status;
    io->config.queue_depth =
        default_and_limit(config->queue_depth, DEFAULT_QUEUE_DEPTH, MAX_QUEUE_DEPTH);
    io->config.n_threads = default_and_limit(config->n_threads, DEFAULT_THREADS, MAX_THREADS);
    io->config.max_abandoned =
        default_and_limit(config->max_abandoned, DEFAULT_MAX_ABANDONED, MAX_MAX_ABANDONED);
    io->ready = calloc(io->config.queue_depth, sizeof *io->ready);
    if (io->ready == NULL)
        goto failed;

    /* Whether io_uring works is known only by trying: a container may forbid it. */
    status = CG_ERR_UNSUPPORTED;
    if (config->backend != CG_IO_THREADS) {
        io->backend_in_use = CG_IO_URING;
        status = cg_io_uring_open(io);
    }
    if (config->backend == CG_IO_THREADS || (config->backend == CG_IO_AUTO && status != CG_OK)) {
        io->backend_in_use = CG_IO_THREADS;
        status = cg_io_threads_open(io);
    }
    if (status != CG_OK)
        goto failed;
    *io_out = io;
    return CG_OK;
failed:
    free(io->ready);
    free(io);
    return status;
}

void cg_io_free(cg_io *io, uint64_t grace_ns)
{
    if (io == NULL)
        return;
    /* First: what the backend still finishes becomes a completion that must be released below. */
    io->calls->free(io, grace_ns);
    for (; io->n_ready > 0; io->n_ready--) {
        cg_io_buffer_release(io->ready[io->first_ready].buffer);
        if (io->ready[io->first_ready].file >= 0)
            close(io->ready[io->first_ready].file);
        io->first_ready = (io->first_ready + 1) % io->config.queue_depth;
    }
    cg_io_pool_close(io->pool);
    free(io->ready);
    free(io);
}

cg_io_backend cg_io_backend_in_use(const cg_io *io)
{
    return io->backend_in_use;
}

uint64_t cg_io_deadline_ns(uint64_t timeout_ns)
{
    const uint64_t now_ns = cg_now_ns();
    return timeout_ns > UINT64_MAX - now_ns ? UINT64_MAX : now_ns + timeout_ns;
}

uint32_t cg_io_n_under_way(const cg_io *io)
{
    return io->n_under_way;
}

static cg_status submit(cg_io *io, cg_io_op *op)
{
    const cg_status status = io->calls->submit(io, op);
    if (status == CG_OK)
        io->n_under_way++;
    else
        cg_io_op_free(op);
    return status;
}

static cg_status new_op(cg_io *io, cg_io_op_kind kind, int dir_fd, const char *path, uint64_t user,
                        cg_io_op **op_out)
{
    /* Both limits are kept here. The backends have places (flights, workers) for so many operations
     * and no more. */
    if (io->n_under_way == io->config.queue_depth)
        return CG_ERR_AGAIN;
    if (io->calls->n_abandoned(io) >= io->config.max_abandoned)
        return CG_ERR_TIMED_OUT;
    const cg_status status = cg_io_op_new(kind, dir_fd, path, op_out);
    if (status == CG_OK) {
        (*op_out)->user = user;
        (*op_out)->pool = io->pool;
    }
    return status;
}

static cg_status new_range(cg_io *io, int dir_fd, const char *path, uint64_t offset,
                           uint64_t n_bytes, uint64_t user, cg_io_op **op_out)
{
    /* The end of a range must be an off_t, which is signed, and its bytes fit in memory. */
    if (n_bytes == 0 || n_bytes > PTRDIFF_MAX || offset % CG_IO_PAGE_BYTES != 0 ||
        offset > INT64_MAX - n_bytes)
        return CG_ERR_INVALID_ARGUMENT;
    const cg_status status = new_op(io, CG_IO_OP_READ, dir_fd, path, user, op_out);
    if (status == CG_OK) {
        (*op_out)->offset = offset;
        (*op_out)->range_bytes = (size_t)n_bytes;
    }
    return status;
}

cg_status cg_io_read_range(cg_io *io, int dir_fd, const char *path, uint64_t offset,
                           uint64_t n_bytes, cg_io_cache cache, uint64_t user)
{
    cg_io_op *op;
    const cg_status status = new_range(io, dir_fd, path, offset, n_bytes, user, &op);
    if (status != CG_OK)
        return status;
    op->direct = cache == CG_IO_DIRECT;
    return submit(io, op);
}

cg_status cg_io_read_open(cg_io *io, int dir_fd, const char *path, uint64_t offset,
                          uint64_t n_bytes, uint64_t user)
{
    cg_io_op *op;
    const cg_status status = new_range(io, dir_fd, path, offset, n_bytes, user, &op);
    if (status != CG_OK)
        return status;
    op->looks_first = true;
    op->keeps_open = true;
    return submit(io, op);
}

cg_status cg_io_read_file(cg_io *io, cg_open_file *file, uint64_t offset, uint64_t n_bytes,
                          uint64_t user)
{
    cg_io_op *op;
    const cg_status status = new_range(io, -1, OPEN_FILE, offset, n_bytes, user, &op);
    if (status != CG_OK)
        return status;
    cg_open_file_hold(file);
    op->given = file;
    op->fd = cg_open_file_fd(file);
    op->keeps_open = true;
    return submit(io, op);
}

cg_status cg_io_close(cg_io *io, int file, uint64_t user)
{
    cg_io_op *op;
    if (file < 0)
        return CG_ERR_INVALID_ARGUMENT;
    cg_status status = new_op(io, CG_IO_OP_CLOSE, -1, OPEN_FILE, user, &op);
    if (status != CG_OK)
        return status;
    op->fd = file;
    /* Not submit(): after an error it frees the op, and freeing an op of this kind closes its file.
     * The file is the caller's still. */
    status = io->calls->submit(io, op);
    if (status == CG_OK) {
        io->n_under_way++;
    } else {
        op->fd = -1;
        cg_io_op_free(op);
    }
    return status;
}

cg_status cg_io_stat(cg_io *io, int dir_fd, const char *path, uint64_t user)
{
    cg_io_op *op;
    const cg_status status = new_op(io, CG_IO_OP_STAT, dir_fd, path, user, &op);
    return status == CG_OK ? submit(io, op) : status;
}

static cg_status submit_write(cg_io *io, int dir_fd, const char *path, const void *bytes,
                              size_t n_bytes, bool replace, bool is_temp, uint64_t user)
{
    cg_io_op *op;
    const cg_status status = new_op(io, CG_IO_OP_WRITE, dir_fd, path, user, &op);
    if (status != CG_OK)
        return status;
    op->bytes = bytes;
    op->n_bytes = n_bytes;
    op->replace = replace;
    op->is_temp = is_temp;
    return submit(io, op);
}

cg_status cg_io_write(cg_io *io, int dir_fd, const char *path, const void *bytes, size_t n_bytes,
                      bool replace, uint64_t user)
{
    return submit_write(io, dir_fd, path, bytes, n_bytes, replace, false, user);
}

cg_status cg_io_write_temp(cg_io *io, int dir_fd, const char *path, const void *bytes,
                           size_t n_bytes, uint64_t user)
{
    return submit_write(io, dir_fd, path, bytes, n_bytes, false, true, user);
}

static cg_io_completion *push_ready(cg_io *io)
{
    /* Cannot overflow: n_under_way counts what is ready too. */
    return &io->ready[(io->first_ready + io->n_ready++) % io->config.queue_depth];
}

void cg_io_complete(cg_io *io, cg_io_op *op)
{
    cg_io_completion *c = push_ready(io);
    *c = (cg_io_completion){
        .user = op->user,
        .status = op->status,
        .error = op->error,
        .file_bytes = op->status == CG_OK ? op->file_bytes : 0,
        .submitted_ns = op->submitted_ns,
        .completed_ns = op->completed_ns,
        .file = -1,
    };
    /* File and buffer change hands: what stays in the op goes with it. */
    if (op->status == CG_OK && op->keeps_open) {
        c->file = op->fd;
        op->fd = -1;
    }
    if (op->status == CG_OK && op->buffer != NULL) {
        c->buffer = &op->buffer->buffer;
        op->buffer = NULL;
    }
    cg_io_op_free(op);
}

void cg_io_complete_abandoned(cg_io *io, const cg_io_op *op)
{
    /* The op itself stays with the backend, which frees it when the kernel lets go of it. */
    *push_ready(io) = (cg_io_completion){
        .user = op->user,
        .status = CG_ERR_TIMED_OUT,
        .error = ETIMEDOUT,
        .submitted_ns = op->submitted_ns,
        .completed_ns = cg_now_ns(),
        .file = -1,
    };
}

cg_status cg_io_wait(cg_io *io, uint64_t timeout_ns, cg_io_completion *completions_out,
                     size_t max_completions, size_t *n_out)
{
    /* With something ready already, only collects what else has come in. */
    const cg_status status = io->calls->wait(io, io->n_ready > 0 ? 0 : timeout_ns);
    size_t n = 0;
    for (; n < max_completions && io->n_ready > 0; n++) {
        completions_out[n] = io->ready[io->first_ready];
        io->first_ready = (io->first_ready + 1) % io->config.queue_depth;
        io->n_ready--;
        io->n_under_way--;
    }
    *n_out = n;
    return n > 0 ? CG_OK : status;
}

void cg_io_wake(cg_io *io)
{
    io->calls->wake(io);
}

void cg_io_abandon(cg_io *io, uint64_t user)
{
    io->calls->abandon(io, user);
}

uint32_t cg_io_n_abandoned(const cg_io *io)
{
    return io->calls->n_abandoned(io);
}
