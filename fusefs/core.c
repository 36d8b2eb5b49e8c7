#include "fusefs/core.h"

#include "fusefs/fs.h"
#include "fusefs/pending.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const uint64_t DEFAULT_MAX_FILE_BYTES = UINT64_C(4) << 30;
static const uint64_t VALIDATION_BYTES = UINT64_C(1) << 30; /* of files that are checked at once */

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

int cg_fs_new(const cg_fs_config *config, cg_fs **fs_out)
{
    struct stat attr;
    uint64_t n_removed;
    int error;
    *fs_out = NULL;
    cg_fs *fs = calloc(1, sizeof *fs);
    if (fs == NULL)
        return ENOMEM;
    fs->read_only = config->read_only;
    fs->is_root = geteuid() == 0;
    fs->max_file_bytes =
        config->max_file_bytes != 0 ? config->max_file_bytes : DEFAULT_MAX_FILE_BYTES;
    fs->log = config->log;
    fs->log_user = config->log_user;
    fs->staging = (cg_staging){.dir_fd = -1, .all_fd = -1, .lock_fd = -1};
    fs->proc_fd = -1;
    cg_strict_budget_init(&fs->budget, VALIDATION_BYTES);
    fs->root_fd = open(config->store, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fs->root_fd < 0 || fstat(fs->root_fd, &attr) != 0 ||
        (fs->proc_fd = open("/proc/self/fd", O_PATH | O_DIRECTORY | O_CLOEXEC)) < 0) {
        error = errno;
        goto fail;
    }
    if (!fs->read_only) {
        error = cg_staging_open(&fs->staging, fs->root_fd, &n_removed);
        if (error == EROFS || error == EACCES || error == EPERM) {
            cg_fs_log(fs, CG_LOG_WARNING, "the store cannot be written (%s): read-only",
                      strerror(error));
            fs->read_only = true;
        } else if (error != 0) {
            goto fail;
        } else if (n_removed > 0) {
            cg_fs_log(fs, CG_LOG_INFO, "removed %llu unfinished files of killed daemons",
                      (unsigned long long)n_removed);
        }
    }
    if ((error = cg_control_init(&fs->control, config->config_text)) != 0)
        goto fail;
    if ((error = cg_nodes_init(&fs->nodes, &attr)) != 0) {
        cg_control_destroy(&fs->control);
        goto fail;
    }
    *fs_out = fs;
    return 0;
fail:
    cg_staging_close(&fs->staging);
    if (fs->proc_fd >= 0)
        close(fs->proc_fd);
    if (fs->root_fd >= 0)
        close(fs->root_fd);
    cg_strict_budget_destroy(&fs->budget);
    free(fs);
    return error;
}

void cg_fs_free(cg_fs *fs)
{
    if (fs == NULL)
        return;
    cg_pending_discard_all(fs);
    cg_nodes_destroy(&fs->nodes);
    cg_control_destroy(&fs->control);
    cg_staging_close(&fs->staging);
    close(fs->proc_fd);
    close(fs->root_fd);
    cg_strict_budget_destroy(&fs->budget);
    free(fs);
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

void cg_fs_forget(cg_fs *fs, cg_fs_node *node, uint64_t n_lookups)
{
    if (node == fs->nodes.root)
        return;
    cg_pending_forget(fs, node, n_lookups);
    cg_nodes_forget(&fs->nodes, node, n_lookups);
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

int cg_fs_give_away(cg_fs *fs, const cg_fs_caller *caller, int dir_fd, const char *name,
                    mode_t mode)
{
    struct stat attr;
    if (!fs->is_root)
        return 0;
    const gid_t gid = group_in(dir_fd, caller->gid);
    if (fstatat(dir_fd, name, &attr, AT_SYMLINK_NOFOLLOW) == 0 &&
        has_owner(&attr, caller->uid, gid))
        return 0;
    if (fchownat(dir_fd, name, caller->uid, gid, AT_SYMLINK_NOFOLLOW) != 0)
        return errno;
    return S_ISREG(mode) && (mode & (S_ISUID | S_ISGID)) != 0 &&
                   fchmodat(dir_fd, name, mode & 07777, 0) != 0
               ? errno
               : 0;
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

static cg_refusal refusal_of(cg_status status)
{
    switch (cg_strict_errno(status)) {
    case EINVAL: return CG_REFUSED_MISPLACED;
    case EOPNOTSUPP: return CG_REFUSED_UNSUPPORTED;
    default: return status == CG_ERR_TRUNCATED ? CG_REFUSED_INCOMPLETE : CG_REFUSED_DAMAGED;
    }
}

int cg_fs_check(cg_fs *fs, int fd, const char *path, const cg_tree_name *name,
                cg_chunk_header *header_out)
{
    const cg_status status = cg_strict_check(fd, name, &fs->budget, fs->max_file_bytes, header_out);
    const int error = cg_strict_errno(status);
    if (error == 0)
        return 0;
    if (error == EBADMSG || error == EINVAL || error == EOPNOTSUPP)
        cg_metrics_add(&fs->metrics.refused[refusal_of(status)], 1);
    cg_fs_log(fs, CG_LOG_WARNING, "refused %s: %s", path, cg_strerror(status));
    return error;
}
