/* iouring/io.h - a queue of reads, stats and atomic writes of files.
 *
 * It runs on io_uring or, where a kernel or a container forbids that, on a pool of threads. Both
 * backends promise the same. Short reads and EINTR are continued. Unaligned tails are handled.
 * Completions arrive in any order. Every operation that was submitted completes exactly once.
 *
 * A hung mount can hold an operation for ever. cg_io_abandon() then completes it for the caller,
 * with CG_ERR_TIMED_OUT. Its memory stays with the kernel until the kernel lets go of it, so there
 * may be only max_abandoned of them.
 *
 * Why a read opens and closes its file: the store is often a network away, and each system call on
 * it may be a round trip. With io_uring the three are one chain that the kernel works off alone,
 * and many are under way without a thread each. Only what may wait, or copies 64 KiB and more out
 * of the page cache, is done by the kernel's workers, side by side. They are threads of this
 * process, of which a container may allow only so many, and at most one for each operation.
 * Threads: a queue belongs to one thread, which makes all calls on it. Only cg_io_wake() may come
 * from others.
 */
#ifndef CG_IOURING_IO_H
#define CG_IOURING_IO_H
#include "codec/status.h"
#include "iouring/open_file.h"
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
    uint32_t queue_depth; /* operations under way at most; 0 = 16 */
    uint32_t n_threads;   /* of the thread backend, at most, and 256; 0 = 4. They start with need */
    uint32_t max_abandoned; /* 0 = 64. With so many, submits fail with CG_ERR_TIMED_OUT */
} cg_io_config;

/* A buffer filled by a read. data is page-aligned and the caller's until cg_io_buffer_release(). */
typedef struct cg_io_buffer {
    uint8_t *data;
    size_t n_bytes; /* as many as were asked for */
    size_t capacity_bytes;
} cg_io_buffer;

typedef struct cg_io_completion {
    uint64_t user; /* as submitted */
    cg_status status;
    int error;            /* the errno behind status, or 0 */
    cg_io_buffer *buffer; /* reads that succeeded: the caller's, to release; else NULL */
    uint64_t file_bytes;  /* stats: the size; reads: bytes read */
    uint64_t submitted_ns, completed_ns; /* CLOCK_MONOTONIC */
    int file; /* of cg_io_read_open(): the open file, the caller's to close; else -1 */
} cg_io_completion;

/* config NULL: all defaults.
 * CG_ERR_UNSUPPORTED: CG_IO_URING was asked for and the kernel refuses it. cg_io_uring_reason()
 * says why. */
cg_status cg_io_new(const cg_io_config *config, cg_io **io_out);
/* Tries io_uring out. True: it works here, and reason_out is "". Else reason_out is a short English
 * sentence. */
bool cg_io_uring_reason(char *reason_out, size_t reason_bytes);
/* Cancels reads and stats that are under way, and finishes writes. After grace_ns it abandons what
 * hangs. If that has a file open, a thread stays behind until it hangs no more, and closes it. */
void cg_io_free(cg_io *io, uint64_t grace_ns); /* NULL is fine */
cg_io_backend cg_io_backend_in_use(const cg_io *io);

/* Submitting. These calls never block on the disk. CG_ERR_AGAIN: queue_depth operations are under
 * way, so take completions first. path is relative to dir_fd (AT_FDCWD allowed) and is copied. A
 * symbolic link in its last component is not followed. What is no regular file completes with
 * CG_ERR_INVALID_ARGUMENT (error: EISDIR, ELOOP, EINVAL). */

/* Reads exactly n_bytes of a file, from offset on, and tells the kernel not to read ahead: over
 * sshfs read-ahead would move twice the bytes. It completes with CG_ERR_TRUNCATED when the file has
 * fewer, with CG_ERR_IO when it has more than could be read. (Of a FUSE file the kernel may give
 * zeros for what did not come: that only checksums tell.) The file's type is not checked first, so
 * a device that can give so many bytes passes for a file. Returns CG_ERR_INVALID_ARGUMENT when
 * n_bytes is 0, when no file can have such a range, or when offset is not a multiple of 4096 (which
 * O_DIRECT wants). */
cg_status cg_io_read_range(cg_io *io, int dir_fd, const char *path, uint64_t offset,
                           uint64_t n_bytes, cg_io_cache cache, uint64_t user);
/* The same through the page cache, but the file stays open: the completion has it, and the caller
 * closes it with cg_io_close(). Later reads need not open it again, which over a network costs a
 * round trip or more. */
cg_status cg_io_read_open(cg_io *io, int dir_fd, const char *path, uint64_t offset,
                          uint64_t n_bytes, uint64_t user);
/* The same for a file that cg_io_read_open() has opened. The read is one of its users until it has
 * ended, also where the caller has given it up: the last user closes it. */
cg_status cg_io_read_file(cg_io *io, cg_open_file *file, uint64_t offset, uint64_t n_bytes,
                          uint64_t user);
/* Closes such a file. On a FUSE file system its daemon is asked, which may take time; so this is an
 * operation, too. It completes with CG_OK. If the call itself fails, the file is still the
 * caller's. */
cg_status cg_io_close(cg_io *io, int file, uint64_t user);
/* Completes with CG_OK and file_bytes for a regular file, CG_ERR_NOT_FOUND, or another error. */
cg_status cg_io_stat(cg_io *io, int dir_fd, const char *path, uint64_t user);
/* Writes a new file at path, durably, and whole or not at all. Its steps: a temporary file beside
 * path, write, fsync, link, fsync of the directory. The link makes an existing file win: then it
 * completes with CG_ERR_EXISTS. With replace it is a rename, and the new file wins. Missing parent
 * directories are made (mode 0700), but for the first one of the path: CG_ERR_NOT_FOUND. bytes must
 * stay valid until completion. */
cg_status cg_io_write(cg_io *io, int dir_fd, const char *path, const void *bytes, size_t n_bytes,
                      bool replace, uint64_t user);

/* Writes a new file under a temporary name (iouring/io_write.h), which path is. Its content is on
 * disk when the operation completes. After CG_OK the file is the caller's to rename or remove.
 * CG_ERR_EXISTS: there is such a file. Missing parent directories are made as above, and no
 * directory is synced. bytes must stay valid until completion. */
cg_status cg_io_write_temp(cg_io *io, int dir_fd, const char *path, const void *bytes,
                           size_t n_bytes, uint64_t user);

/* Waits until a completion is there, timeout_ns have passed (UINT64_MAX: for ever; 0: poll), or
 * cg_io_wake() was called. Takes up to max_completions. CG_OK with *n_out == 0 is a wake-up or a
 * time-out. */
cg_status cg_io_wait(cg_io *io, uint64_t timeout_ns, cg_io_completion *completions_out,
                     size_t max_completions, size_t *n_out);
/* Any thread: makes the current or next cg_io_wait() return. */
void cg_io_wake(cg_io *io);
/* Gives up the operations that were submitted with user and have not completed: the next wait says
 * CG_ERR_TIMED_OUT for them. They then count as abandoned until the kernel lets go of them. An
 * abandoned write publishes the whole file, if it was that far, or nothing. Otherwise the kernel
 * may still read the write's bytes for a while, even after the caller has changed them, but nobody
 * will see those. */
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
