/* iouring/io_op.h - an operation of a cg_io, and the system call that is its next step. Internal to
 * iouring.
 *
 * An operation is a sequence of steps. A thread runs a step with cg_io_step_run(), io_uring submits
 * it. Either hands the result to cg_io_op_advance() (iouring/io_steps.h), which sets the next step.
 * So the backends run the same sequence, and cannot differ in what they promise.
 * Threads: an op belongs to whoever runs it. Only `abandoned` is set from outside.
 */
#ifndef CG_IOURING_IO_OP_H
#define CG_IOURING_IO_OP_H
#include "iouring/io_buffer.h"

#include <sys/stat.h>

enum {
    CG_IO_MAX_RETRIES = 64,       /* of EINTR, EAGAIN, and of temporary names that are taken */
    CG_IO_STEP_BYTES = 1 << 30,   /* Linux moves at most 0x7ffff000 bytes a call */
    CG_IO_TEMP_SUFFIX_BYTES = 32, /* what a temporary file's path is longer than the file's */
};

typedef enum cg_io_step_kind {
    CG_IO_STEP_DONE = 0,
    CG_IO_STEP_OPEN,  /* openat(fd, path, flags, 0600) */
    CG_IO_STEP_STATX, /* statx(fd, path, flags, type and size) */
    CG_IO_STEP_READ,  /* pread */
    CG_IO_STEP_WRITE, /* pwrite */
    CG_IO_STEP_FSYNC,
    CG_IO_STEP_CLOSE,
    CG_IO_STEP_LINK,   /* linkat(fd, path, fd, new_path) */
    CG_IO_STEP_RENAME, /* renameat(fd, path, fd, new_path) */
    CG_IO_STEP_UNLINK, /* unlinkat(fd, path) */
    CG_IO_STEP_MKDIR,  /* mkdirat(fd, path, 0700) */
} cg_io_step_kind;

typedef struct cg_io_step {
    cg_io_step_kind kind;
    int fd; /* the file, or the directory that the paths are relative to */
    int flags;
    const char *path, *new_path;
    void *bytes;
    size_t n_bytes;
    uint64_t offset;
    struct statx *statx;
} cg_io_step;

typedef enum cg_io_op_kind {
    CG_IO_OP_READ,
    CG_IO_OP_STAT,
    CG_IO_OP_WRITE,
    CG_IO_OP_CLOSE,
} cg_io_op_kind;

typedef struct cg_io_op {
    struct cg_io_op *next; /* the backend's list */
    cg_io_op_kind kind;
    int dir_fd;
    uint64_t user, submitted_ns;
    char *path;
    bool abandoned; /* atomic, see cg_io_op_abandon(). It means: stop after the step that is under
                       way, clean up, report to nobody */

    uint64_t offset; /* reads: of the range; on a page */
    size_t range_bytes;
    bool direct;
    bool looks_first;    /* at the file's type, before it is read */
    bool lacks_workers;  /* to copy with: the kernel has cancelled a read that waited for one */
    bool keeps_open;     /* the file is the caller's once it was read */
    cg_open_file *given; /* the caller's file: the op is a user of it until its end; else NULL */
    cg_io_pool *pool;
    cg_io_pool_buffer *buffer;

    const uint8_t *bytes; /* writes; the caller's */
    size_t n_bytes;
    bool replace, is_temp; /* is_temp: path is a temporary file's, which gets no other name */
    char *temp_path;
    char *prefix; /* of path: a directory to make or to sync */
    size_t prefix_bytes;
    uint64_t made_dirs; /* bit n: we made the directory of n + 1 components */
    bool temp_exists, tried_mkdir, is_descending; /* the last: in making directories */
    int mkdir_error;

    int state;
    cg_io_step step;
    int fd;
    struct statx statx;
    bool is_regular; /* the file to read, as a look has shown */
    size_t done_bytes;
    unsigned n_retries;

    cg_status status; /* the result */
    int error;
    uint64_t file_bytes, completed_ns;
} cg_io_op;

/* From any thread. (Compiler builtins, because C++17 does not know C11's atomic_bool.) */
static inline void cg_io_op_abandon(cg_io_op *op)
{
    __atomic_store_n(&op->abandoned, true, __ATOMIC_RELEASE);
}

static inline bool cg_io_op_is_abandoned(const cg_io_op *op)
{
    return __atomic_load_n(&op->abandoned, __ATOMIC_ACQUIRE);
}

/* Copies path. CG_ERR_INVALID_ARGUMENT: it is empty, longer than PATH_MAX, or has more than 62
 * slashes. CG_ERR_NO_MEMORY. */
cg_status cg_io_op_new(cg_io_op_kind kind, int dir_fd, const char *path, cg_io_op **op_out);
/* Releases the buffer too, unless it was taken out, and closes a file that was left open for a
 * caller. No step of the op may be under way. NULL is fine. */
void cg_io_op_free(cg_io_op *op);

/* Runs one step in this thread. The system call's result, or -errno. */
int cg_io_step_run(const cg_io_step *step);
/* Records a failure, unless there is one already. ELOOP and EISDIR are CG_ERR_INVALID_ARGUMENT: no
 * regular file. */
void cg_io_op_record_error(cg_io_op *op, int error);
/* Ends the op: its step becomes CG_IO_STEP_DONE; status, error and the rest are final. */
void cg_io_op_finish(cg_io_op *op);
#endif
