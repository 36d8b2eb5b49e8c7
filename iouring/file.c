#include "iouring/file.h"

#include "iouring/io_steps.h"
#include "iouring/io_write.h"
#include "iouring/same_file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h> /* renameat */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { COPY_BYTES = 1 << 20 };

static int open_regular(int dir_fd, const char *path, uint64_t *file_bytes_out,
                        cg_status *status_out)
{
    struct stat s;
    /* O_NONBLOCK: opening a FIFO must not wait for its writer. */
    const int fd = openat(dir_fd, path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
    if (fd < 0 || fstat(fd, &s) != 0)
        *status_out = errno == ELOOP ? CG_ERR_INVALID_ARGUMENT : cg_status_from_errno(errno);
    else if (!S_ISREG(s.st_mode))
        *status_out = CG_ERR_INVALID_ARGUMENT;
    else {
        *file_bytes_out = (uint64_t)s.st_size;
        *status_out = CG_OK;
        return fd;
    }
    if (fd >= 0)
        close(fd);
    return -1;
}

int cg_file_open(int dir_fd, const char *path, cg_status *status_out)
{
    uint64_t file_bytes;
    return open_regular(dir_fd, path, &file_bytes, status_out);
}

/* Up to n_bytes from offset on: fewer only at the end of the file. Where a file is longer than what
 * can be read of it a connection was lost, perhaps; a kernel's cache may not know the length. */
static cg_status read_fully(int fd, uint8_t *bytes, size_t n_bytes, uint64_t offset,
                            size_t *n_read_out)
{
    struct statx s;
    size_t done_bytes = 0;
    while (done_bytes < n_bytes) {
        const ssize_t n =
            pread(fd, bytes + done_bytes, n_bytes - done_bytes, (off_t)(offset + done_bytes));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return cg_status_from_errno(errno);
        if (n == 0) {
            if (statx(fd, "", AT_EMPTY_PATH | AT_STATX_FORCE_SYNC, STATX_SIZE, &s) != 0)
                return cg_status_from_errno(errno);
            if (s.stx_size > offset + done_bytes)
                return CG_ERR_IO;
            break;
        }
        done_bytes += (size_t)n;
    }
    *n_read_out = done_bytes;
    return CG_OK;
}

cg_status cg_file_read_open(int fd, size_t max_bytes, uint8_t **bytes_out, size_t *n_bytes_out)
{
    struct stat s;
    *bytes_out = NULL;
    *n_bytes_out = 0;
    if (fstat(fd, &s) != 0)
        return cg_status_from_errno(errno);
    const size_t file_bytes = (size_t)s.st_size;
    if (file_bytes > max_bytes)
        return CG_ERR_BUFFER_TOO_SMALL;
    uint8_t *bytes = malloc(file_bytes + 1); /* one more: malloc(0) may be NULL */
    if (bytes == NULL)
        return CG_ERR_NO_MEMORY;
    const cg_status status = read_fully(fd, bytes, file_bytes, 0, n_bytes_out);
    if (status == CG_OK)
        *bytes_out = bytes;
    else
        free(bytes);
    return status;
}

cg_status cg_file_read(int dir_fd, const char *path, size_t max_bytes, uint8_t **bytes_out,
                       size_t *n_bytes_out)
{
    cg_status status;
    *bytes_out = NULL;
    *n_bytes_out = 0;
    const int fd = cg_file_open(dir_fd, path, &status);
    if (fd < 0)
        return status;
    status = cg_file_read_open(fd, max_bytes, bytes_out, n_bytes_out);
    close(fd);
    return status;
}

cg_status cg_file_read_start(int dir_fd, const char *path, void *bytes_out, size_t n_bytes,
                             uint64_t *file_bytes_out)
{
    cg_status status;
    uint64_t file_bytes;
    size_t n_read = 0;
    const int fd = open_regular(dir_fd, path, &file_bytes, &status);
    if (fd < 0)
        return status;
    status = read_fully(fd, bytes_out, n_bytes, 0, &n_read);
    close(fd);
    if (file_bytes_out != NULL)
        *file_bytes_out = file_bytes;
    return status == CG_OK && n_read < n_bytes ? CG_ERR_TRUNCATED : status;
}

cg_status cg_file_chunk_header(int dir_fd, const char *path, cg_chunk_header *header_out)
{
    uint8_t bytes[CG_CHUNK_FIXED_BYTES];
    uint64_t file_bytes;
    cg_status status = cg_file_read_start(dir_fd, path, bytes, sizeof bytes, &file_bytes);
    if (status == CG_OK)
        status = cg_chunk_header_parse(bytes, sizeof bytes, header_out);
    return status == CG_OK ? cg_chunk_header_cut(header_out, file_bytes) : status;
}

/* A cg_chunk_source of *(const int *)fd. */
static cg_status read_exactly(void *fd, uint64_t offset, uint8_t *bytes_out, size_t n_bytes)
{
    size_t n_read = 0;
    const cg_status status = read_fully(*(const int *)fd, bytes_out, n_bytes, offset, &n_read);
    return status == CG_OK && n_read < n_bytes ? CG_ERR_TRUNCATED : status;
}

cg_status cg_file_chunk_verify(int dir_fd, const char *path, uint64_t max_bytes,
                               cg_chunk_header *header_out)
{
    cg_status status;
    uint64_t file_bytes;
    int fd = open_regular(dir_fd, path, &file_bytes, &status);
    if (fd < 0)
        return status;
    status = file_bytes > max_bytes
                 ? CG_ERR_BUFFER_TOO_SMALL
                 : cg_chunk_verify_source(read_exactly, &fd, file_bytes, header_out);
    close(fd);
    return status;
}

cg_status cg_file_write(int dir_fd, const char *path, const void *bytes, size_t n_bytes,
                        bool replace)
{
    cg_io_op *op;
    cg_status status = cg_io_op_new(CG_IO_OP_WRITE, dir_fd, path, &op);
    if (status != CG_OK)
        return status;
    op->bytes = bytes;
    op->n_bytes = n_bytes;
    op->replace = replace;
    cg_io_op_run(op);
    status = op->status;
    cg_io_op_free(op);
    return status;
}

cg_status cg_file_update(int dir_fd, const char *path, const void *bytes, size_t n_bytes)
{
    uint8_t *old;
    size_t old_bytes;
    const cg_status status = cg_file_read(dir_fd, path, n_bytes, &old, &old_bytes);
    const bool same = status == CG_OK && old_bytes == n_bytes && memcmp(old, bytes, n_bytes) == 0;
    free(old);
    return same ? CG_OK : cg_file_write(dir_fd, path, bytes, n_bytes, true);
}

/* "a/b" for "a/b/c", "." for "c"; false when it does not fit. */
static bool parent_of(const char *path, char parent_out[PATH_MAX])
{
    const char *slash = strrchr(path, '/');
    const size_t n_bytes = slash == NULL ? 1 : slash == path ? 1 : (size_t)(slash - path);
    if (n_bytes >= PATH_MAX)
        return false;
    memcpy(parent_out, slash == NULL ? "." : path, n_bytes);
    parent_out[n_bytes] = '\0';
    return true;
}

cg_status cg_file_sync_dir(int dir_fd, const char *path)
{
    char parent[PATH_MAX];
    if (!parent_of(path, parent))
        return CG_ERR_INVALID_ARGUMENT;
    const int fd = openat(dir_fd, parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return cg_status_from_errno(errno);
    const int error =
        fsync(fd) == 0 || errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP ? 0 : errno;
    close(fd);
    return cg_status_from_errno(error);
}

/* mkdir -p (0700), durable, of the directories above path, but for the first one, as
 * cg_io_write(). */
static cg_status make_parents(int dir_fd, const char *path)
{
    char prefix[PATH_MAX];
    struct stat s;
    if (!parent_of(path, prefix))
        return CG_ERR_INVALID_ARGUMENT;
    /* Mostly all of them are there: one look instead of a mkdir for each. */
    if (fstatat(dir_fd, prefix, &s, 0) == 0)
        return CG_OK;
    const char *slash = strchr(path + 1, '/');
    while (slash != NULL && (slash = strchr(slash + 1, '/')) != NULL) {
        memcpy(prefix, path, (size_t)(slash - path));
        prefix[slash - path] = '\0';
        if (mkdirat(dir_fd, prefix, 0700) == 0) {
            /* Of the folder above: a directory is only as durable as its name is there. */
            const cg_status status = cg_file_sync_dir(dir_fd, prefix);
            if (status != CG_OK)
                return status;
        } else if (errno != EEXIST) {
            return cg_status_from_errno(errno);
        }
    }
    return CG_OK;
}

static cg_status write_fully(int fd, const uint8_t *bytes, size_t n_bytes)
{
    while (n_bytes > 0) {
        const ssize_t n = write(fd, bytes, n_bytes);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n == 0 ? CG_ERR_IO : cg_status_from_errno(errno);
        bytes += n;
        n_bytes -= (size_t)n;
    }
    return CG_OK;
}

static cg_status copy_start(int from_fd, int to_fd, uint64_t n_bytes)
{
    cg_status status;
    size_t n_read;
    uint8_t *bytes = malloc(COPY_BYTES);
    if (bytes == NULL)
        return CG_ERR_NO_MEMORY;
    uint64_t offset = 0;
    do {
        const size_t wanted =
            n_bytes - offset < COPY_BYTES ? (size_t)(n_bytes - offset) : COPY_BYTES;
        if ((status = read_fully(from_fd, bytes, wanted, offset, &n_read)) == CG_OK)
            status = write_fully(to_fd, bytes, n_read);
        offset += n_read;
    } while (status == CG_OK && n_read == COPY_BYTES);
    free(bytes);
    if (status == CG_OK && fsync(to_fd) != 0)
        status = cg_status_from_errno(errno);
    return status;
}

/* Copies the start of from_fd to a new temporary file. */
static cg_status copy_to_temp(int from_fd, int dir_fd, const char *temp, uint64_t n_bytes)
{
    const int to_fd =
        openat(dir_fd, temp, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (to_fd < 0)
        return cg_status_from_errno(errno);
    cg_status status = copy_start(from_fd, to_fd, n_bytes);
    /* FUSE and NFS report late errors here. */
    if (close(to_fd) != 0 && status == CG_OK)
        status = cg_status_from_errno(errno);
    if (status != CG_OK)
        unlinkat(dir_fd, temp, 0);
    return status;
}

static bool means_no_links(int error)
{
    return error == EPERM || error == EMLINK || error == EXDEV || error == EOPNOTSUPP ||
           error == ENOSYS;
}

/* Gives a temporary file its final name, or removes it. */
static cg_status name_temp_file(int dir_fd, const char *temp, const char *to, bool replace)
{
    struct stat s;
    int error = 0;
    if (!replace && linkat(dir_fd, temp, dir_fd, to, 0) != 0) {
        error = errno;
        if (means_no_links(error)) {
            /* A look and a rename have to do for a link: cg_file_name() says what that leaves
             * open. */
            error = fstatat(dir_fd, to, &s, AT_SYMLINK_NOFOLLOW) == 0 ? EEXIST : 0;
            replace = error == 0;
        }
    }
    if (replace && error == 0 && renameat(dir_fd, temp, dir_fd, to) != 0)
        error = errno;
    /* Also after rename: between two names of one file it does nothing, and both stay. */
    unlinkat(dir_fd, temp, 0);
    return cg_status_from_errno(error);
}

cg_status cg_file_name(int dir_fd, const char *temp, const char *to)
{
    return name_temp_file(dir_fd, temp, to, false);
}

/* from: the file's name; NULL: it is linked by its descriptor. */
static cg_status install(int from_fd, const char *from, int dir_fd, const char *to, bool replace,
                         uint64_t copy_bytes)
{
    char temp[PATH_MAX], own[32];
    if (strnlen(to, PATH_MAX) + CG_IO_TEMP_SUFFIX_BYTES > PATH_MAX)
        return CG_ERR_INVALID_ARGUMENT;
    cg_io_temp_path(to, temp);
    snprintf(own, sizeof own, "/proc/self/fd/%d", from_fd);
    cg_status status = make_parents(dir_fd, to);
    if (status != CG_OK)
        return status;
    if (fsync(from_fd) != 0) /* whoever wrote it need not have */
        return cg_status_from_errno(errno);
    /* A link never overwrites. To replace, it gets a temporary name first and is renamed. */
    const char *link_to = replace ? temp : to;
    const int result = from != NULL ? linkat(dir_fd, from, dir_fd, link_to, 0)
                                    : linkat(AT_FDCWD, own, dir_fd, link_to, AT_SYMLINK_FOLLOW);
    const int error = result == 0 ? 0 : errno;
    status = cg_status_from_errno(error);
    if (means_no_links(error)) {
        if ((status = copy_to_temp(from_fd, dir_fd, temp, copy_bytes)) == CG_OK)
            status = name_temp_file(dir_fd, temp, to, replace);
    } else if (error == 0 && replace) {
        status = name_temp_file(dir_fd, temp, to, true);
    }
    return status;
}

cg_status cg_file_install(int dir_fd, const char *from, const char *to, bool replace,
                          uint64_t copy_bytes)
{
    cg_status status;
    const int from_fd = cg_file_open(dir_fd, from, &status);
    if (from_fd < 0)
        return status;
    status = install(from_fd, from, dir_fd, to, replace, copy_bytes);
    close(from_fd);
    return status;
}

cg_status cg_file_install_open(int fd, int dir_fd, const char *to, bool replace,
                               uint64_t copy_bytes)
{
    return install(fd, NULL, dir_fd, to, replace, copy_bytes);
}

cg_status cg_file_link(int dir_fd, const char *from, const char *to, uint64_t copy_bytes)
{
    if (linkat(dir_fd, from, dir_fd, to, 0) == 0)
        return CG_OK;
    return means_no_links(errno) ? cg_file_install(dir_fd, from, to, false, copy_bytes)
                                 : cg_status_from_errno(errno);
}

static cg_status check_start(int whole_fd, int start_fd)
{
    cg_status status = CG_ERR_NO_MEMORY;
    uint64_t offset = 0;
    size_t n_whole = 0, n_start = 0;
    uint8_t *bytes = malloc(2 * (size_t)COPY_BYTES);
    if (bytes == NULL)
        return status;
    do {
        /* Both halves of one buffer: as much of the whole file as the start has at this place. */
        if ((status = read_fully(start_fd, bytes, COPY_BYTES, offset, &n_start)) == CG_OK)
            status = read_fully(whole_fd, bytes + COPY_BYTES, n_start, offset, &n_whole);
        if (status == CG_OK &&
            (n_whole != n_start || memcmp(bytes, bytes + COPY_BYTES, n_start) != 0))
            status = CG_ERR_FOREIGN_TOKENS;
        offset += n_start;
    } while (status == CG_OK && n_start == COPY_BYTES);
    free(bytes);
    return status;
}

static bool same_time(const struct timespec *a, const struct timespec *b)
{
    return a->tv_sec == b->tv_sec && a->tv_nsec == b->tv_nsec;
}

/* Links have these in common, and nobody should find those of one file changed by the other's. To
 * set a time is a change, too, and so has a time of its own. */
static bool same_attributes(const struct stat *from, const struct stat *to, bool any_own_time)
{
    return from->st_uid == to->st_uid && from->st_gid == to->st_gid &&
           from->st_mode == to->st_mode &&
           (same_time(&from->st_mtim, &to->st_mtim) ||
            (any_own_time && same_time(&to->st_mtim, &to->st_ctim)));
}

/* from_fd: of `from`, under whatever name. */
static cg_status may_share(int from_fd, int dir_fd, const char *to, bool any_own_time)
{
    struct stat from_stat, to_stat, now;
    uint64_t to_bytes;
    cg_status status;
    const int to_fd = open_regular(dir_fd, to, &to_bytes, &status);
    if (to_fd < 0)
        return status;
    if (fstat(from_fd, &from_stat) != 0 || fstat(to_fd, &to_stat) != 0)
        status = cg_status_from_errno(errno);
    else if (!same_attributes(&from_stat, &to_stat, any_own_time))
        status = CG_ERR_PERMISSION;
    /* The sync comes before the name changes hands: what `to` has may be on disk already, and what
     * `from` has need not be. */
    else if ((status = check_start(from_fd, to_fd)) == CG_OK && fsync(from_fd) != 0)
        status = cg_status_from_errno(errno);
    /* Whoever gave the name to another file meanwhile is right. */
    if (status == CG_OK &&
        (fstatat(dir_fd, to, &now, AT_SYMLINK_NOFOLLOW) != 0 || !cg_same_file(&to_stat, &now)))
        status = CG_ERR_FOREIGN_TOKENS;
    close(to_fd);
    return status;
}

cg_status cg_file_share(int dir_fd, const char *from, const char *to, bool any_own_time)
{
    char temp[PATH_MAX];
    struct stat from_stat, to_stat;
    uint64_t from_bytes;
    cg_status status;
    if (strnlen(to, PATH_MAX) + CG_IO_TEMP_SUFFIX_BYTES > PATH_MAX)
        return CG_ERR_INVALID_ARGUMENT;
    if (fstatat(dir_fd, from, &from_stat, AT_SYMLINK_NOFOLLOW) != 0 ||
        fstatat(dir_fd, to, &to_stat, AT_SYMLINK_NOFOLLOW) != 0)
        return cg_status_from_errno(errno);
    if (cg_same_file(&from_stat, &to_stat))
        return CG_OK;
    if (!same_attributes(&from_stat, &to_stat, any_own_time)) /* before the directory is touched */
        return CG_ERR_PERMISSION;
    cg_io_temp_path(to, temp);
    if (linkat(dir_fd, from, dir_fd, temp, 0) !=
        0) /* first: without links nothing needs to be compared */
        return means_no_links(errno) ? CG_ERR_UNSUPPORTED : cg_status_from_errno(errno);
    const int from_fd = open_regular(dir_fd, temp, &from_bytes, &status);
    if (from_fd >= 0) {
        status = may_share(from_fd, dir_fd, to, any_own_time);
        close(from_fd);
    }
    if (status == CG_OK)
        return name_temp_file(dir_fd, temp, to, true);
    unlinkat(dir_fd, temp, 0);
    return status;
}
