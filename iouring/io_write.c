/* A write is a small machine of states. look(), open_temp(), write_next() and the like set a state
 * and its step; opened(), wrote(), linked() and the like take its result. Where these return bool,
 * true means that nothing is left to do. */
#include "iouring/io_write.h"
#include "iouring/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

enum {
    WRITE_LOOK,
    WRITE_OPEN,
    WRITE_MKDIR,
    WRITE_DATA,
    WRITE_FSYNC,
    WRITE_CLOSE,
    WRITE_LINK,
    WRITE_LOOK_AGAIN,
    WRITE_RENAME,
    /* From here on the file has its name, or never gets it; these run for abandoned operations
     * too. */
    WRITE_UNLINK,
    WRITE_DIR_OPEN,
    WRITE_DIR_FSYNC,
    WRITE_DIR_CLOSE,
    WRITE_GIVE_UP,
};

/* A name has at most 255 bytes. A long one is cut here, so that the digits and ".tmp" always
 * fit. */
enum { TEMP_NAME_BYTES = 200 };

void cg_io_temp_path(const char *path, char *temp_out)
{
    const char *slash = strrchr(path, '/');
    const int dir_bytes = slash == NULL ? 0 : (int)(slash - path) + 1;
    uint64_t random = 0;
    if (getrandom(&random, sizeof random, GRND_NONBLOCK) != (ssize_t)sizeof random)
        random =
            cg_now_ns() ^ (uint64_t)(uintptr_t)temp_out; /* O_EXCL and link() find a collision */
    sprintf(temp_out, "%.*s.%.*s.%016llx.tmp", dir_bytes, path, TEMP_NAME_BYTES, path + dir_bytes,
            (unsigned long long)random);
}

static void look(cg_io_op *op, int state)
{
    op->state = state;
    op->step = (cg_io_step){.kind = CG_IO_STEP_STATX,
                            .fd = op->dir_fd,
                            .path = op->path,
                            .flags = AT_SYMLINK_NOFOLLOW,
                            .statx = &op->statx};
}

static void open_temp(cg_io_op *op)
{
    if (op->is_temp)
        strcpy(op->temp_path, op->path); /* it has room for more */
    else
        cg_io_temp_path(op->path, op->temp_path);
    op->state = WRITE_OPEN;
    op->step = (cg_io_step){.kind = CG_IO_STEP_OPEN,
                            .fd = op->dir_fd,
                            .path = op->temp_path,
                            .flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC};
}

void cg_io_write_begin(cg_io_op *op)
{
    if (op->replace || op->is_temp)
        open_temp(op);
    else
        look(op, WRITE_LOOK);
}

static void close_file(cg_io_op *op, int state)
{
    op->state = state;
    op->step = (cg_io_step){.kind = CG_IO_STEP_CLOSE, .fd = op->fd};
    op->fd = -1;
}

static bool unlink_temp(cg_io_op *op)
{
    op->state = WRITE_UNLINK;
    op->step = (cg_io_step){.kind = CG_IO_STEP_UNLINK, .fd = op->dir_fd, .path = op->temp_path};
    op->temp_exists = false;
    return false;
}

/* Closes and removes what there is; true when nothing is left to do. Twice for a file that is open:
 * the step after its close comes here again (WRITE_GIVE_UP). */
static bool give_up(cg_io_op *op)
{
    if (op->fd >= 0) {
        close_file(op, WRITE_GIVE_UP);
        return false;
    }
    return op->temp_exists ? unlink_temp(op) : true;
}

static bool fail(cg_io_op *op, int error)
{
    cg_io_op_record_error(op, error);
    return give_up(op);
}

/* How many names the prefix has: a name ends before a slash or with the prefix. So "a//b" has
 * two. */
static unsigned prefix_components(const cg_io_op *op)
{
    unsigned n = 0;
    for (size_t i = 0; i < op->prefix_bytes; i++)
        n += op->prefix[i] != '/' && (i + 1 == op->prefix_bytes || op->prefix[i + 1] == '/');
    return n;
}

static void set_prefix(cg_io_op *op, size_t n_bytes)
{
    memcpy(op->prefix, op->path, n_bytes);
    op->prefix[n_bytes] = '\0';
    op->prefix_bytes = n_bytes;
}

static void set_prefix_to_parent(cg_io_op *op, size_t n_bytes)
{
    while (n_bytes > 0 && op->path[n_bytes - 1] != '/')
        n_bytes--;
    while (n_bytes > 1 && op->path[n_bytes - 1] == '/')
        n_bytes--;
    set_prefix(op, n_bytes); /* "/" stays "/" */
}

static void make_dir(cg_io_op *op)
{
    op->state = WRITE_MKDIR;
    op->step = (cg_io_step){.kind = CG_IO_STEP_MKDIR, .fd = op->dir_fd, .path = op->prefix};
}

/* Makes the next directory below the prefix; then opens the temporary file again. Directories are
 * made in two directions: upwards until one can be made or is there (made_dir()), then downwards
 * again to the file's own. Never the first one of the path: of a store it is the model's, which was
 * there when the store was opened. Where it is missing, dir_fd may have become the bare mount point
 * of a file system that is exported to us, and what is written there is in no store. */
static void make_next_dir(cg_io_op *op)
{
    size_t start = op->prefix_bytes;
    while (op->path[start] == '/')
        start++;
    const char *slash = strchr(op->path + start, '/');
    if (slash == NULL) {
        open_temp(op);
        return;
    }
    set_prefix(op, (size_t)(slash - op->path));
    make_dir(op);
}

/* The lowest directory is asked for first, since mostly those above are there: then it is the only
 * question, and a kernel asks a far store for every name that it is to make. */
static bool made_dir(cg_io_op *op, int result)
{
    if (result == -ENOENT && !op->is_descending) {
        if (prefix_components(op) < 3)
            return fail(op, ENOENT);
        set_prefix_to_parent(op, op->prefix_bytes);
        make_dir(op);
        return false;
    }
    op->is_descending = true;
    if (result == 0)
        op->made_dirs |= 1ull << (prefix_components(op) - 1);
    else if (result != -EEXIST)
        op->mkdir_error =
            -result; /* it may be there all the same (read-only parents): the open tells */
    make_next_dir(op);
    return false;
}

static void write_next(cg_io_op *op)
{
    const size_t left_bytes = op->n_bytes - op->done_bytes;
    if (left_bytes == 0) {
        op->state = WRITE_FSYNC;
        op->step = (cg_io_step){.kind = CG_IO_STEP_FSYNC, .fd = op->fd};
        return;
    }
    op->state = WRITE_DATA;
    op->step =
        (cg_io_step){.kind = CG_IO_STEP_WRITE,
                     .fd = op->fd,
                     .bytes = (void *)(op->bytes + op->done_bytes), /* only read */
                     .n_bytes = left_bytes < CG_IO_STEP_BYTES ? left_bytes : CG_IO_STEP_BYTES,
                     .offset = op->done_bytes};
}

static bool opened(cg_io_op *op, int result)
{
    /* Directories are made only when they turn out to be missing: mostly they are there. */
    if (result == -ENOENT && !op->tried_mkdir) {
        op->tried_mkdir = true;
        set_prefix_to_parent(op, strlen(op->path));
        if (prefix_components(op) < 2) /* the first folder, or the directory itself, is gone */
            return fail(op, ENOENT);
        make_dir(op);
        return false;
    }
    if (result == -EEXIST && !op->is_temp && ++op->n_retries <= CG_IO_MAX_RETRIES) {
        open_temp(op);
        return false;
    }
    if (result < 0)
        return fail(op, result == -ENOENT && op->mkdir_error != 0 ? op->mkdir_error : -result);
    op->fd = result;
    op->temp_exists = true;
    write_next(op);
    return false;
}

static bool wrote(cg_io_op *op, int result)
{
    if (result == -EINTR || result == -EAGAIN)
        return ++op->n_retries > CG_IO_MAX_RETRIES ? fail(op, -result)
                                                   : false; /* the same step again */
    if (result <= 0)
        return fail(op, result == 0 ? EIO : -result);
    op->done_bytes += (size_t)result;
    write_next(op);
    return false;
}

static bool name_file(cg_io_op *op, int state)
{
    op->state = state;
    op->step = (cg_io_step){.kind = state == WRITE_LINK ? CG_IO_STEP_LINK : CG_IO_STEP_RENAME,
                            .fd = op->dir_fd,
                            .path = op->temp_path,
                            .new_path = op->path};
    return false;
}

/* Without the directory's fsync a rename is lost in a power cut, on ext4 and xfs alike. */
static bool sync_dir(cg_io_op *op)
{
    op->state = WRITE_DIR_OPEN;
    op->step = (cg_io_step){.kind = CG_IO_STEP_OPEN,
                            .fd = op->dir_fd,
                            .path = op->prefix_bytes == 0 ? "." : op->prefix,
                            .flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC};
    return false;
}

/* A directory that we made is only as durable as its name in its own parent. */
static bool synced_dir(cg_io_op *op)
{
    const unsigned n_components = prefix_components(op);
    if (n_components == 0 || (op->made_dirs >> (n_components - 1) & 1) == 0)
        return true;
    set_prefix_to_parent(op, op->prefix_bytes);
    return sync_dir(op);
}

/* The temporary name goes before the directory is synced, so that one fsync covers both. */
static bool named(cg_io_op *op)
{
    if (op->temp_exists)
        return unlink_temp(op);
    set_prefix_to_parent(op, strlen(op->path));
    return sync_dir(op);
}

static bool linked(cg_io_op *op, int result)
{
    switch (-result) {
    case 0: return named(op);
    case EPERM:
    case EOPNOTSUPP:
    case ENOSYS:
    case EMLINK:
    case EXDEV: /* no hard links here */ look(op, WRITE_LOOK_AGAIN); return false;
    default: return fail(op, -result);
    }
}

/* True when nothing is left to do. */
static bool advance(cg_io_op *op, int result)
{
    if (cg_io_op_is_abandoned(op) && op->state < WRITE_UNLINK) {
        /* What the step that was under way has done decides what there is to clean up. */
        if (op->state == WRITE_OPEN && result >= 0) {
            op->fd = result;
            op->temp_exists = true;
        } else if (op->state == WRITE_RENAME && result == 0) {
            op->temp_exists = false; /* it has the final name, which stays */
        }
        return fail(op, ETIMEDOUT);
    }
    switch (op->state) {
    case WRITE_LOOK:
        if (result != -ENOENT)
            return fail(op, result < 0 ? -result : EEXIST);
        open_temp(op);
        return false;
    case WRITE_OPEN: return opened(op, result);
    case WRITE_MKDIR: return made_dir(op, result);
    case WRITE_DATA: return wrote(op, result);
    case WRITE_FSYNC:
        if (result < 0)
            return fail(op, -result);
        close_file(op, WRITE_CLOSE); /* before the name: FUSE and NFS report late errors here */
        return false;
    case WRITE_CLOSE:
        /* Linux closes the file also when close() is interrupted: never close twice. */
        if (result < 0 && result != -EINTR)
            return fail(op, -result);
        return op->is_temp ? true : name_file(op, op->replace ? WRITE_RENAME : WRITE_LINK);
    case WRITE_LINK: return linked(op, result);
    case WRITE_LOOK_AGAIN:
        return result == -ENOENT ? name_file(op, WRITE_RENAME)
                                 : fail(op, result < 0 ? -result : EEXIST);
    case WRITE_RENAME:
        if (result < 0)
            return fail(op, -result);
        op->temp_exists = false;
        return named(op);
    case WRITE_UNLINK:
        /* What another has published meanwhile lies in directories that we made. */
        return op->status == CG_OK || (op->status == CG_ERR_EXISTS && op->made_dirs != 0)
                   ? named(op)
                   : true;
    case WRITE_DIR_OPEN:
        if (result < 0)
            return fail(op, -result);
        op->fd = result;
        op->state = WRITE_DIR_FSYNC;
        op->step = (cg_io_step){.kind = CG_IO_STEP_FSYNC, .fd = op->fd};
        return false;
    case WRITE_DIR_FSYNC:
        if (result < 0 && result != -EINVAL && result != -ENOSYS && result != -EOPNOTSUPP)
            return fail(op, -result); /* those three: a file system without fsync of directories */
        /* An error up to here leaves the file its name, which a power failure may take: the caller
         * hears that it is not safe yet. */
        close_file(op, WRITE_DIR_CLOSE);
        return false;
    case WRITE_DIR_CLOSE: return synced_dir(op);
    default: return give_up(op);
    }
}

void cg_io_write_advance(cg_io_op *op, int result)
{
    if (advance(op, result))
        cg_io_op_finish(op);
}
