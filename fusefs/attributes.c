/* fusefs/attributes.c - attributes of files and of the file system: their part of fusefs/core.h. */
#include "fusefs/acls.h"
#include "fusefs/contents.h"
#include "fusefs/contexts.h"
#include "fusefs/fs.h"
#include "fusefs/pending.h"
#include "fusefs/published.h"
#include "fusefs/reach.h"
#include "fusefs/space.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/xattr.h>
#include <unistd.h>

/* cg_reach(), also where the file has no name yet and nobody has it open, as over NFS. */
static int reach(cg_fs *fs, cg_fs_node *node, cg_reached *reached_out)
{
    int error = cg_reach(fs, node, reached_out);
    if (error != ENOENT && error != ESTALE)
        return error;
    cg_fs_pending *pending = cg_pending_of(fs, node);
    if (pending == NULL) /* it may have got its name meanwhile */
        return cg_reach(fs, node, reached_out);
    *reached_out = (cg_reached){.fd = fcntl(pending->fd, F_DUPFD_CLOEXEC, 0)};
    error = reached_out->fd < 0 ? errno : 0;
    cg_pending_put(fs, pending);
    return error;
}

int cg_fs_getattr(cg_fs *fs, cg_fs_node *node, struct stat *attr_out)
{
    cg_reached reached;
    if (node->control != CG_CONTROL_NONE) {
        cg_control_attr(&fs->control, node->control, attr_out);
        return 0;
    }
    int error = reach(fs, node, &reached);
    if (error != 0)
        return error;
    error = fstat(reached.fd, attr_out) == 0 ? 0 : errno;
    if (error == 0)
        cg_view_attr(&node->view, attr_out);
    cg_reach_end(fs, &reached);
    return error;
}

int cg_fs_getattr_root(cg_fs *fs, struct stat *attr_out, bool *is_old_out)
{
    return cg_root_stat_get(&fs->root_stat, fs->root_fd, attr_out, is_old_out);
}

bool cg_fs_is_lasting(cg_fs *fs, cg_fs_node *node)
{
    return S_ISDIR(node->type) || (S_ISREG(node->type) && node->control == CG_CONTROL_NONE &&
                                   cg_published_by_name(fs, node));
}

static int set_size(cg_fs *fs, cg_fs_node *node, off_t size)
{
    int fd, error;
    cg_fs_pending *pending = cg_pending_of(fs, node);
    if (pending != NULL) {
        /* It has no name yet by which it could be opened. */
        fd = pending->fd;
    } else {
        if ((error = cg_published_open_to_change(fs, node, O_WRONLY, &fd, NULL)) != 0)
            return error;
    }
    error = pending != NULL && (uint64_t)size > fs->max_file_bytes ? EFBIG
            : pending == NULL && !fs->ignores_acls && cg_acls_are_on(fd, false)
                ? EACCES
                : cg_contents_truncate(fs, node, fd, size);
    if (pending != NULL)
        cg_pending_put(fs, pending);
    else
        close(fd);
    return error;
}

static int set_times(int fd, const struct stat *attr, int mask)
{
    const struct timespec omit = {.tv_nsec = UTIME_OMIT};
    const struct timespec times[2] = {
        (mask & CG_SET_ATIME) != 0 ? attr->st_atim : omit,
        (mask & CG_SET_MTIME) != 0 ? attr->st_mtim : omit,
    };
    if (utimensat(fd, "", times, AT_EMPTY_PATH) == 0)
        return 0;
    if (errno != EINVAL) /* kernels before 5.8 */
        return errno;
    return utimensat(AT_FDCWD, cg_reach_proc_path(fd).text, times, 0) == 0 ? 0 : errno;
}

int cg_fs_setattr(cg_fs *fs, cg_fs_node *node, const struct stat *attr, int mask,
                  struct stat *attr_out)
{
    cg_reached reached;
    int error = 0;
    if (node->control != CG_CONTROL_NONE)
        return EACCES;
    if (fs->read_only)
        return EROFS;
    /* First, since it may be refused: then nothing else is changed either. */
    if ((mask & CG_SET_SIZE) != 0 && (error = set_size(fs, node, attr->st_size)) != 0)
        return error;
    if ((error = reach(fs, node, &reached)) != 0)
        return error;
    /* The owner before the mode: chown clears set-id bits. */
    if ((mask & (CG_SET_UID | CG_SET_GID)) != 0 &&
        fchownat(reached.fd, "", (mask & CG_SET_UID) != 0 ? attr->st_uid : (uid_t)-1,
                 (mask & CG_SET_GID) != 0 ? attr->st_gid : (gid_t)-1,
                 AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW) != 0)
        error = errno;
    if (error == 0 && (mask & CG_SET_MODE) != 0 &&
        (S_ISLNK(node->type)
             ? (errno = EOPNOTSUPP, -1)
             : chmod(cg_reach_proc_path(reached.fd).text, attr->st_mode & 07777)) != 0)
        error = errno;
    if (error == 0 && (mask & (CG_SET_ATIME | CG_SET_MTIME)) != 0)
        error = set_times(reached.fd, attr, mask);
    if (error == 0 && fstat(reached.fd, attr_out) != 0)
        error = errno;
    if (error == 0)
        cg_view_attr(&node->view, attr_out);
    cg_reach_end(fs, &reached);
    return error;
}

int cg_fs_statfs(cg_fs *fs, struct statvfs *out)
{
    if (fstatvfs(fs->root_fd, out) != 0)
        return errno;
    cg_space_statfs(fs, out);
    return 0;
}

/* ACLs (system.*) would ask the kernel's permission check for more than it does; strict files
 * carry nothing that a copy on another store would lose. */
static int reach_for_xattr(cg_fs *fs, cg_fs_node *node, const char *name, bool changes,
                           cg_reached *reached_out)
{
    if (node->control != CG_CONTROL_NONE)
        return EOPNOTSUPP;
    if (changes && fs->read_only)
        return EROFS;
    if (name != NULL && strncmp(name, "user.", 5) != 0 && strncmp(name, "trusted.", 8) != 0 &&
        strncmp(name, "security.", 9) != 0)
        return EOPNOTSUPP;
    if (!S_ISREG(node->type) && !S_ISDIR(node->type))
        return EOPNOTSUPP;
    cg_fs_pending *pending = cg_pending_of(fs, node);
    if (pending != NULL) {
        cg_pending_put(fs, pending);
        return EOPNOTSUPP;
    }
    return S_ISREG(node->type) && cg_published_by_name(fs, node) ? EOPNOTSUPP
                                                                 : cg_reach(fs, node, reached_out);
}

int cg_fs_getxattr(cg_fs *fs, cg_fs_node *node, const char *name, void *value, size_t size,
                   size_t *n_bytes_out)
{
    cg_reached reached;
    int error = reach_for_xattr(fs, node, name, false, &reached);
    if (error != 0)
        return error;
    const ssize_t n = getxattr(cg_reach_proc_path(reached.fd).text, name, value, size);
    error = n < 0 ? errno : 0;
    *n_bytes_out = n < 0 ? 0 : (size_t)n;
    cg_reach_end(fs, &reached);
    return error;
}

/* Takes the names of trusted.* out of a list. */
static ssize_t drop_trusted(char *list, ssize_t n_bytes)
{
    ssize_t n_kept_bytes = 0;
    for (ssize_t at = 0, n_name_bytes; at < n_bytes; at += n_name_bytes) {
        n_name_bytes = (ssize_t)strlen(list + at) + 1;
        if (strncmp(list + at, "trusted.", 8) == 0)
            continue;
        memmove(list + n_kept_bytes, list + at, (size_t)n_name_bytes);
        n_kept_bytes += n_name_bytes;
    }
    return n_kept_bytes;
}

int cg_fs_listxattr(cg_fs *fs, const cg_fs_caller *caller, cg_fs_node *node, char *list,
                    size_t size, size_t *n_bytes_out)
{
    cg_reached reached;
    *n_bytes_out = 0;
    int error = reach_for_xattr(fs, node, NULL, false, &reached);
    if (error != 0)
        return error;
    /* Of the daemon the store's file system keeps no names back. */
    char *all = malloc(XATTR_LIST_MAX);
    ssize_t n =
        all == NULL ? -1 : listxattr(cg_reach_proc_path(reached.fd).text, all, XATTR_LIST_MAX);
    error = n < 0 ? errno : 0;
    if (n > 0 && caller->uid != 0)
        n = drop_trusted(all, n);
    if (error == 0 && size > 0 && (size_t)n > size)
        error = ERANGE;
    if (error == 0) {
        *n_bytes_out = (size_t)n;
        if (size > 0)
            memcpy(list, all, (size_t)n);
    }
    free(all);
    cg_reach_end(fs, &reached);
    return error;
}

int cg_fs_setxattr(cg_fs *fs, cg_fs_node *node, const char *name, const void *value, size_t size,
                   int flags)
{
    cg_reached reached;
    int64_t seconds;
    int error = reach_for_xattr(fs, node, name, true, &reached);
    if (error != 0)
        return error;
    if (strcmp(name, CG_CONTEXT_TTL) == 0 && !cg_context_parse_time(value, size, &seconds)) {
        cg_reach_end(fs, &reached);
        return EINVAL;
    }
    error =
        setxattr(cg_reach_proc_path(reached.fd).text, name, value, size, flags) == 0 ? 0 : errno;
    cg_space_failed(fs, error);
    cg_reach_end(fs, &reached);
    return error;
}

int cg_fs_removexattr(cg_fs *fs, cg_fs_node *node, const char *name)
{
    cg_reached reached;
    int error = reach_for_xattr(fs, node, name, true, &reached);
    if (error != 0)
        return error;
    error = removexattr(cg_reach_proc_path(reached.fd).text, name) == 0 ? 0 : errno;
    cg_reach_end(fs, &reached);
    return error;
}
