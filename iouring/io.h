/* iouring/io.h - a queue of reads, stats and atomic writes of whole files, on io_uring or on a pool
 * of threads.
 *
 * One queue belongs to one thread: all calls on a cg_io come from the thread that uses it
 * (cg_io_wake() excepted). Both backends promise the same: short reads and EINTR are continued,
 * unaligned tails are handled, completions arrive in any order, every submitted operation completes
 * exactly once, unless it is abandoned.
 * A hung mount can hold an operation for ever: cg_io_abandon() completes it towards the caller with
 * CG_ERR_TIMED_OUT; its buffer is then never used again and counts against max_abandoned.
 * Method: DESIGN.md section 4. io_uring: liburing; open, read, close are one chain
 * (IOSQE_IO_HARDLINK: a short read must not cancel the close).
 */
#ifndef CG_IOURING_IO_H
#define CG_IOURING_IO_H
#include "codec/status.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cg_io cg_io;

typedef enum cg_io_backend {
    CG_IO_AUTO = 0, /* io_uring where the kernel allows it, else threads */
    CG_IO_URING = 1,
    CG_IO_THREADS = 2, /* pread/pwrite; for containers that forbid io_uring */
} cg_io_backend;

typedef enum cg_io_cache {
    CG_IO_CACHED = 0, /* through the page cache */
    CG_IO_DIRECT = 1, /* O_DIRECT where the file system has it, else cached */
} cg_io_cache;

typedef struct cg_io_config {
    cg_io_backend backend;
    uint32_t queue_depth;   /* operations under way at most; 0 = 16 */
    uint32_t n_threads;     /* of the thread backend; 0 = 4 */
    uint32_t max_abandoned; /* 0 = 64; past it, submits fail with CG_ERR_TIMED_OUT */
} cg_io_config;

/* A buffer filled by a read. data is page-aligned and the caller's until cg_io_buffer_release(). */
typedef struct cg_io_buffer {
    uint8_t *data;
    size_t n_bytes; /* bytes of the file, or of its start */
    size_t capacity_bytes;
} cg_io_buffer;

typedef struct cg_io_completion {
    uint64_t user; /* as submitted */
    cg_status status;
    int error;            /* the errno behind status, or 0 */
    cg_io_buffer *buffer; /* reads that succeeded: the caller's, to release; else NULL */
    uint64_t file_bytes;  /* stats: the size; reads: bytes read */
    uint64_t submitted_ns, completed_ns; /* CLOCK_MONOTONIC */
} cg_io_completion;

/* CG_ERR_UNSUPPORTED: CG_IO_URING was asked for and the kernel refuses it (say why with
 * cg_io_uring_reason()). config NULL: all defaults. */
cg_status cg_io_new(const cg_io_config *config, cg_io **io_out);
/* Tries io_uring out. True: it works here, and reason_out is ""; else a short English sentence. */
bool cg_io_uring_reason(char *reason_out, size_t reason_bytes);
/* Reads and stats under way are cancelled, writes are finished; operations that stay hung are
 * abandoned after grace_ns. */
void cg_io_free(cg_io *io, uint64_t grace_ns); /* NULL is fine */
cg_io_backend cg_io_backend_in_use(const cg_io *io);
const char *cg_io_backend_name(cg_io_backend backend);

/* Submits never block on the disk; CG_ERR_AGAIN: queue_depth operations are under way: reap first.
 * path is relative to dir_fd (AT_FDCWD allowed) and copied. Nothing follows a symbolic link in the
 * last component; what is no regular file completes with CG_ERR_INVALID_ARGUMENT (error: EISDIR,
 * ELOOP, EINVAL). */

/* Reads a whole file of at most max_bytes; a larger one completes with CG_ERR_BUFFER_TOO_SMALL.
 * expected_bytes > 0 spares the size look-up, so it should come from one; a file of another size is
 * still read whole. */
cg_status cg_io_read(cg_io *io, int dir_fd, const char *path, uint64_t expected_bytes,
                     uint64_t max_bytes, cg_io_cache cache, uint64_t user);
/* Reads the first n_bytes of a file, exactly; CG_ERR_TRUNCATED: it has fewer. Nothing looks at it
 * before, so a device that has so many bytes to give passes for a file. CG_ERR_INVALID_ARGUMENT at
 * once: n_bytes is 0. */
cg_status cg_io_read_start(cg_io *io, int dir_fd, const char *path, uint64_t n_bytes,
                           cg_io_cache cache, uint64_t user);
/* Completes with CG_OK and file_bytes for a regular file, CG_ERR_NOT_FOUND, or another error. */
cg_status cg_io_stat(cg_io *io, int dir_fd, const char *path, uint64_t user);
/* Writes a new file at path, whole or not at all, durably: temporary file beside it, write, fsync,
 * link (so that an existing file wins: CG_ERR_EXISTS) or, with replace, rename; fsync of the
 * directory. bytes stay valid until completion. Missing parent directories are made (mode 0700). */
cg_status cg_io_write(cg_io *io, int dir_fd, const char *path, const void *bytes, size_t n_bytes,
                      bool replace, uint64_t user);

/* Waits until at least one completion is there, timeout_ns passed (UINT64_MAX: for ever; 0: poll),
 * or cg_io_wake(). Fills up to max_completions. CG_OK with *n_out == 0 is a wake-up or a
 * time-out. */
cg_status cg_io_wait(cg_io *io, uint64_t timeout_ns, cg_io_completion *completions_out,
                     size_t max_completions, size_t *n_out);
/* Any thread: makes the current or next cg_io_wait() return. */
void cg_io_wake(cg_io *io);
/* The operation(s) submitted with user complete at the next wait with CG_ERR_TIMED_OUT, unless they
 * have completed. They no longer count as under way but as abandoned, until the kernel lets go of
 * them. An abandoned write publishes nothing, or all of it if it was that far; the kernel may still
 * read its bytes, which then reach nobody. */
void cg_io_abandon(cg_io *io, uint64_t user);
uint32_t cg_io_n_abandoned(const cg_io *io);
/* Submitted and not yet taken with cg_io_wait(); 0: idle. */
uint32_t cg_io_n_under_way(const cg_io *io);
/* Any thread, also after cg_io_free(). NULL is fine. */
void cg_io_buffer_release(cg_io_buffer *buffer);

#ifdef __cplusplus
}
#endif
#endif
