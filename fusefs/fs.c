/* What all modules of the core share: the log, names that are ours, entering what a name shows into
 * the table of nodes, and checking content for a name. */
#include "fusefs/fs.h"

#include "fusefs/left.h"
#include "fusefs/stamp.h"
#include "iouring/adopted.h"
#include "iouring/clock.h"
#include "iouring/layout.h"
#include "iouring/same_file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/magic.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

void cg_fs_log(cg_fs *fs, cg_log_level level, const char *format, ...)
{
    char line[1024];
    va_list arguments;
    if (fs->log == NULL)
        return;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    for (char *c = line; *c != '\0'; c++) /* file names are in it */
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            *c = '?';
    fs->log(fs->log_user, level, line);
}

cg_fs_node *cg_fs_root(cg_fs *fs)
{
    return fs->nodes.root;
}

cg_nodes *cg_fs_nodes(cg_fs *fs)
{
    return &fs->nodes;
}

cg_metrics *cg_fs_metrics(cg_fs *fs)
{
    return &fs->metrics;
}

int cg_fs_root_fd(const cg_fs *fs)
{
    return fs->root_fd;
}

bool cg_fs_is_stopping(void *fs)
{
    return ((const cg_fs *)fs)->is_stopping;
}

void cg_fs_stand_back(void)
{
    enum { STEPS_BACK = 10, LAST_NICE = 19 };
    const int nice = getpriority(PRIO_PROCESS, 0) + STEPS_BACK; /* on Linux: of this thread */
    setpriority(PRIO_PROCESS, 0, nice < LAST_NICE ? nice : LAST_NICE);
}

bool cg_fs_wait(cg_fs *fs, uint64_t ns)
{
    const struct timespec until = cg_deadline_in(ns);
    int error = 0;
    pthread_mutex_lock(&fs->keep_lock);
    while (!fs->is_stopping && ns > 0 && error == 0)
        error = pthread_cond_timedwait(&fs->keep_stop, &fs->keep_lock, &until);
    const bool is_over = fs->is_stopping;
    pthread_mutex_unlock(&fs->keep_lock);
    return is_over;
}

/* Who can end the daemon need not be kept from anything. */
static bool has_no_limit(uid_t uid)
{
    return uid == 0 || uid == geteuid();
}

bool cg_fs_take_descriptor(cg_fs *fs, uid_t uid)
{
    return has_no_limit(uid) || cg_users_take(&fs->open_users, uid);
}

void cg_fs_give_back_descriptor(cg_fs *fs, uid_t uid)
{
    if (!has_no_limit(uid))
        cg_users_give_back(&fs->open_users, uid);
}

bool cg_fs_take_control(cg_fs *fs, uid_t uid)
{
    return has_no_limit(uid) || cg_users_take(&fs->control_users, uid);
}

void cg_fs_give_back_control(cg_fs *fs, uid_t uid)
{
    if (!has_no_limit(uid))
        cg_users_give_back(&fs->control_users, uid);
}

bool cg_fs_is_watched_file(const cg_fs *fs, const cg_fs_node *node)
{
    return fs->watch.is_trusted &&
           (node->dev == fs->nodes.root->dev || node->control != CG_CONTROL_NONE);
}

bool cg_fs_is_hidden(const char *name)
{
    return strcmp(name, CG_STAGING_DIRECTORY) == 0 || strcmp(name, CG_LAYOUT_FILE) == 0 ||
           strcmp(name, CG_ADOPTED_FILE) == 0 || strcmp(name, CG_LEFT_SWEPT_FILE) == 0 ||
           strcmp(name, CG_STAMP_SCRUBBED) == 0;
}

int cg_fs_name_is_free(cg_fs *fs, const cg_fs_node *parent, const char *name)
{
    if (parent->control != CG_CONTROL_NONE)
        return EACCES;
    if (strlen(name) > NAME_MAX)
        return ENAMETOOLONG;
    return parent == fs->nodes.root &&
                   (strcmp(name, CG_CONTROL_DIRECTORY) == 0 || cg_fs_is_hidden(name))
               ? EPERM
               : 0;
}

static bool is_strict_path(const char *path)
{
    cg_tree_name name;
    cg_tree_parse(path, &name);
    return cg_fs_is_strict(&name);
}

bool cg_fs_is_local(int fd)
{
    static const uint32_t LOCAL[] = {EXT4_SUPER_MAGIC, XFS_SUPER_MAGIC, BTRFS_SUPER_MAGIC,
                                     TMPFS_MAGIC, F2FS_SUPER_MAGIC};
    struct statfs attr;
    if (fstatfs(fd, &attr) != 0)
        return false;
    for (size_t i = 0; i < sizeof LOCAL / sizeof LOCAL[0]; i++)
        if ((uint32_t)attr.f_type == LOCAL[i])
            return true;
    return false;
}

/* Of the file's handle, which has a generation beside the number. FUSE's handles are not the same
 * for as long as the file is there, so that a store must be local. */
uint64_t cg_fs_identity(const cg_fs *fs, int dir_fd, const char *leaf)
{
    union {
        struct file_handle handle;
        uint8_t bytes[sizeof(struct file_handle) + MAX_HANDLE_SZ];
    } file;
    int mount_id;
    uint64_t identity;
    file.handle.handle_bytes = MAX_HANDLE_SZ;
    if (!fs->has_identities || name_to_handle_at(dir_fd, leaf, &file.handle, &mount_id,
                                                 leaf[0] == '\0' ? AT_EMPTY_PATH : 0) != 0)
        return 0;
    const cg_key key = cg_key_of_bytes(file.handle.f_handle, file.handle.handle_bytes);
    memcpy(&identity, key.bytes, sizeof identity);
    return identity;
}

void cg_fs_take_back(const cg_fs *fs, int dir_fd, const char *name, const struct stat *attr,
                     uint64_t identity)
{
    struct stat now;
    if (fstatat(dir_fd, name, &now, AT_SYMLINK_NOFOLLOW) == 0 && cg_same_file(&now, attr) &&
        cg_fs_identity(fs, dir_fd, name) == identity)
        unlinkat(dir_fd, name, S_ISDIR(attr->st_mode) ? AT_REMOVEDIR : 0);
}

enum { OTHER_FILE = -1, MAX_LOOKS = 100 };

/* Opens the file that has these attributes and this identity, if it still has the name. OTHER_FILE:
 * another one has it by now, or none has. They may even be of two files. */
static int hold(const cg_fs *fs, int dir_fd, const char *name, const struct stat *attr,
                uint64_t identity, int *fd_out)
{
    struct stat held;
    *fd_out = openat(dir_fd, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (*fd_out < 0)
        return errno == ENOENT ? OTHER_FILE : errno;
    if (fstat(*fd_out, &held) == 0 && cg_same_file(&held, attr) &&
        cg_fs_identity(fs, *fd_out, "") == identity)
        return 0;
    close(*fd_out);
    return OTHER_FILE;
}

/* The look at a file and its node. */
static int look(cg_fs *fs, cg_fs_node *parent, int dir_fd, const char *name, const char *path,
                struct stat *attr_out, cg_view *view_out, cg_fs_node **node_out)
{
    int held_fd = -1, error = cg_view_stat(dir_fd, name, path, attr_out, view_out);
    if (error != 0)
        return error;
    const uint64_t identity = cg_fs_identity(fs, dir_fd, name);
    if (identity != 0 && (*node_out = cg_nodes_enter_known(&fs->nodes, parent, name, attr_out,
                                                           identity, view_out)) != NULL)
        return 0;
    if (identity != 0 && (error = hold(fs, dir_fd, name, attr_out, identity, &held_fd)) != 0)
        return error;
    *node_out = cg_nodes_enter(&fs->nodes, parent, name, attr_out, identity, view_out);
    if (held_fd >= 0)
        close(held_fd);
    return *node_out == NULL ? ENOMEM : 0;
}

int cg_fs_enter(cg_fs *fs, cg_fs_node *parent, int dir_fd, const char *name, const char *path,
                cg_fs_entry *entry_out)
{
    cg_view view;
    int error = OTHER_FILE;
    /* Read before the stat: a change that the watch sees in between makes the answer one that the
     * kernel must not trust for long. */
    const uint64_t seen = fs->watch.n_seen;
    for (int i = 0; error == OTHER_FILE && i < MAX_LOOKS; i++)
        error = look(fs, parent, dir_fd, name, path, &entry_out->attr, &view, &entry_out->node);
    if (error != 0)
        return error == OTHER_FILE ? ESTALE : error;
    entry_out->may_not_be_cached = false;
    entry_out->may_be_old = seen != fs->watch.n_seen;
    entry_out->is_lasting =
        S_ISDIR(entry_out->attr.st_mode) ||
        (path != NULL && is_strict_path(path) && S_ISREG(entry_out->attr.st_mode));
    cg_view_attr(&view, &entry_out->attr);
    return 0;
}

/* In a set-group-id directory the group is the directory's. */
static gid_t group_in(int dir_fd, gid_t gid)
{
    struct stat dir;
    return fstat(dir_fd, &dir) == 0 && (dir.st_mode & S_ISGID) != 0 ? dir.st_gid : gid;
}

/* What already has its owner is left alone: some stores cannot chown everything, as sshfs a
 * symbolic link. */
static bool has_owner(const struct stat *attr, uid_t uid, gid_t gid)
{
    return attr->st_uid == uid && attr->st_gid == gid;
}

int cg_fs_give_away_fd(cg_fs *fs, const cg_fs_caller *caller, int dir_fd, int fd, mode_t mode)
{
    struct stat attr;
    const gid_t gid = group_in(dir_fd, caller->gid);
    if (fs->is_root && (fstat(fd, &attr) != 0 || !has_owner(&attr, caller->uid, gid)) &&
        fchown(fd, caller->uid, gid) != 0)
        return errno;
    return fchmod(fd, mode & 07777) != 0 ? errno : 0;
}

int cg_fs_sync(cg_fs *fs, cg_fs_node *node, int fd, bool data_only)
{
    const int error = (data_only ? fdatasync(fd) : fsync(fd)) == 0 ? 0 : errno;
    if (error != 0 && error != EINTR) {
        pthread_mutex_lock(&fs->nodes.lock);
        node->has_lost = 1;
        pthread_mutex_unlock(&fs->nodes.lock);
    }
    return error;
}

int cg_fs_sync_to_publish(cg_fs *fs, cg_fs_node *node, int fd)
{
    pthread_mutex_lock(&fs->nodes.lock);
    const bool has_lost = node->has_lost;
    pthread_mutex_unlock(&fs->nodes.lock);
    return has_lost ? EIO : cg_fs_sync(fs, node, fd, false);
}

static cg_refusal refusal_of(cg_status status)
{
    switch (cg_strict_errno(status)) {
    case EINVAL: return CG_REFUSED_MISPLACED;
    case EOPNOTSUPP: return CG_REFUSED_UNSUPPORTED;
    default: return status == CG_ERR_TRUNCATED ? CG_REFUSED_INCOMPLETE : CG_REFUSED_DAMAGED;
    }
}

/* Whether one more line about a file of this owner may go to the log. *left_out_out: how many did
 * not since the last that did. */
static bool may_log(cg_fs *fs, uid_t uid, uint64_t *left_out_out)
{
    /* One more, since 0 stands for a quota that is unused. */
    const uint64_t now_s = (uint64_t)cg_now_s() + 1;
    cg_log_quota *quota = &fs->log_quotas[uid % CG_N_LOG_QUOTAS];
    *left_out_out = 0;
    pthread_mutex_lock(&fs->log_lock);
    if (quota->since_s == 0 || now_s - quota->since_s >= CG_LOG_SECONDS) {
        *left_out_out = quota->n_left_out;
        *quota = (cg_log_quota){.since_s = now_s};
    }
    const bool may = quota->n_lines < CG_LOG_LINES;
    quota->n_lines += may;
    quota->n_left_out += !may;
    pthread_mutex_unlock(&fs->log_lock);
    return may;
}

bool cg_fs_log_of_file(cg_fs *fs, int fd, const char *what, const char *path, cg_status status)
{
    struct stat attr;
    uint64_t n_left_out;
    const bool is_known = fstat(fd, &attr) == 0;
    if (!is_known)
        attr.st_uid = (uid_t)-1;
    if (!may_log(fs, attr.st_uid, &n_left_out))
        return false;
    if (n_left_out > 0)
        cg_fs_log(fs, CG_LOG_WARNING, "%llu more lines about files of user %u were not logged",
                  (unsigned long long)n_left_out, (unsigned)attr.st_uid);
    if (is_known)
        cg_fs_log(fs, CG_LOG_WARNING, "%s %s of user %u: %s", what, path, (unsigned)attr.st_uid,
                  cg_strerror(status));
    else
        cg_fs_log(fs, CG_LOG_WARNING, "%s %s: %s", what, path, cg_strerror(status));
    return true;
}

/* The errno value of a check; a refusal is counted and logged. */
static int told(cg_fs *fs, int fd, const char *path, cg_status status)
{
    const int error = cg_strict_errno(status);
    if (error == 0)
        return 0;
    if (error == EBADMSG || error == EINVAL || error == EOPNOTSUPP)
        cg_metrics_add(&fs->metrics.refused[refusal_of(status)], 1);
    cg_fs_log_of_file(fs, fd, "refused", path, status);
    return error;
}

int cg_fs_check(cg_fs *fs, int fd, const char *path, const cg_tree_name *name,
                cg_chunk_header *header_out)
{
    return told(fs, fd, path,
                cg_strict_check(fd, name, &fs->budget, fs->max_file_bytes, header_out));
}

int cg_fs_check_place(cg_fs *fs, int fd, const char *path, const cg_tree_name *name,
                      cg_chunk_header *header_out)
{
    uint8_t first[CG_CHUNK_FIXED_BYTES];
    struct stat attr;
    const ssize_t n = pread(fd, first, sizeof first, 0);
    if (n < 0 || fstat(fd, &attr) != 0)
        return errno;
    cg_status status = cg_chunk_header_parse(first, (size_t)n, header_out);
    if (status == CG_OK)
        status = cg_chunk_header_cut(header_out, (uint64_t)attr.st_size);
    if (status == CG_OK)
        status = cg_tree_check(name, header_out);
    return told(fs, fd, path, status);
}
