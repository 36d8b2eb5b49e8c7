#include "iouring/io_op.h"
#include "iouring/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h> /* renameat */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

cg_status cg_io_op_new(cg_io_op_kind kind, int dir_fd, const char *path, cg_io_op **op_out)
{
    *op_out = NULL;
    const size_t path_bytes = strnlen(path, PATH_MAX);
    /* The temporary file beside it needs a path that the kernel takes, too. */
    if (path_bytes == 0 || path_bytes + CG_IO_TEMP_SUFFIX_BYTES >= PATH_MAX)
        return CG_ERR_INVALID_ARGUMENT;
    size_t n_components = 0;
    for (const char *at = path; *at != '\0'; at++)
        n_components += *at == '/';
    if (n_components > 62) /* made_dirs has a bit for each */
        return CG_ERR_INVALID_ARGUMENT;

    /* One allocation for all three paths, which begins with op->path: so freeing that frees all. */
    const bool writes = kind == CG_IO_OP_WRITE;
    cg_io_op *op = calloc(1, sizeof *op);
    char *paths =
        malloc(path_bytes + 1 + (writes ? 2 * (path_bytes + CG_IO_TEMP_SUFFIX_BYTES) : 0));
    if (op == NULL || paths == NULL) {
        free(op);
        free(paths);
        return CG_ERR_NO_MEMORY;
    }
    memcpy(paths, path, path_bytes + 1);
    op->path = paths;
    if (writes) {
        op->temp_path = paths + path_bytes + 1;
        op->prefix = op->temp_path + path_bytes + CG_IO_TEMP_SUFFIX_BYTES;
    }
    op->kind = kind;
    op->dir_fd = dir_fd;
    op->fd = -1;
    op->submitted_ns = cg_now_ns();
    *op_out = op;
    return CG_OK;
}

void cg_io_op_free(cg_io_op *op)
{
    if (op == NULL)
        return;
    if (op->buffer != NULL)
        cg_io_buffer_release(&op->buffer->buffer);
    if (op->given != NULL) /* it was never run */
        op->fd = cg_open_file_drop(op->given);
    /* In all other cases a step closes the file: op->fd is -1 when the op has come to its end. */
    if (op->fd >= 0 && (op->kind == CG_IO_OP_CLOSE || op->keeps_open))
        close(op->fd);
    free(op->path);
    free(op);
}

void cg_io_op_record_error(cg_io_op *op, int error)
{
    /* The first failure is the answer. What cleaning up meets later is not. */
    if (op->status != CG_OK)
        return;
    op->error = error;
    op->status =
        error == ELOOP || error == EISDIR ? CG_ERR_INVALID_ARGUMENT : cg_status_from_errno(error);
}

void cg_io_op_finish(cg_io_op *op)
{
    op->step = (cg_io_step){.kind = CG_IO_STEP_DONE};
    op->completed_ns = cg_now_ns();
}

static int64_t run(const cg_io_step *s)
{
    switch (s->kind) {
    case CG_IO_STEP_OPEN: return openat(s->fd, s->path, s->flags, 0600);
    case CG_IO_STEP_STATX:
        return statx(s->fd, s->path, s->flags, STATX_TYPE | STATX_SIZE, s->statx);
    case CG_IO_STEP_READ: return pread(s->fd, s->bytes, s->n_bytes, (off_t)s->offset);
    case CG_IO_STEP_WRITE: return pwrite(s->fd, s->bytes, s->n_bytes, (off_t)s->offset);
    case CG_IO_STEP_FSYNC: return fsync(s->fd);
    case CG_IO_STEP_CLOSE: return close(s->fd);
    case CG_IO_STEP_LINK: return linkat(s->fd, s->path, s->fd, s->new_path, 0);
    case CG_IO_STEP_RENAME: return renameat(s->fd, s->path, s->fd, s->new_path);
    case CG_IO_STEP_UNLINK: return unlinkat(s->fd, s->path, 0);
    case CG_IO_STEP_MKDIR: return mkdirat(s->fd, s->path, 0700);
    case CG_IO_STEP_DONE: break;
    }
    return 0;
}

int cg_io_step_run(const cg_io_step *step)
{
    const int64_t result = run(step);
    /* A read or write moves at most CG_IO_STEP_BYTES, so the number of bytes fits. */
    return result < 0 ? -errno : (int)result;
}
