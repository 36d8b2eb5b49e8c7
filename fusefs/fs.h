/* fusefs/fs.h - the inside of a cg_fs, for the modules of the core. */
#ifndef CG_FUSEFS_FS_H
#define CG_FUSEFS_FS_H
#include "fusefs/control.h"
#include "fusefs/core.h"
#include "fusefs/metrics.h"
#include "fusefs/staging.h"
#include "fusefs/strict.h"
#include "iouring/tree.h"

struct cg_fs {
    int root_fd;
    int proc_fd;    /* /proc/self/fd */
    bool read_only; /* asked for, or the store is */
    bool is_root;   /* what is created is given to its caller */
    uint64_t max_file_bytes;
    void (*log)(void *log_user, cg_log_level level, const char *line);
    void *log_user;
    cg_control control;
    cg_nodes nodes;
    cg_staging staging;
    cg_strict_budget budget;
    cg_fs_pending *pendings; /* under the nodes' lock */
    cg_metrics metrics;
};

void cg_fs_log(cg_fs *fs, cg_log_level level, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Whether a name can be made or removed here: EPERM for what cachegenfs keeps for itself, EACCES
 * in .cachegenfs. */
int cg_fs_name_is_free(cg_fs *fs, const cg_fs_node *parent, const char *name);

/* Stats name in dir_fd, which is parent's, and enters its node. path: the same relative to the
 * store, or NULL where no rule can speak of it. */
int cg_fs_enter(cg_fs *fs, cg_fs_node *parent, int dir_fd, const char *name, const char *path,
                cg_fs_entry *entry_out);

/* Gives a new file or directory in dir_fd to its caller; mode's set-id bits, which chown clears,
 * are set again. */
int cg_fs_give_away(cg_fs *fs, const cg_fs_caller *caller, int dir_fd, const char *name,
                    mode_t mode);
/* The same for an open file that will be seen in dir_fd. */
int cg_fs_give_away_fd(cg_fs *fs, const cg_fs_caller *caller, int dir_fd, int fd, mode_t mode);

/* Whether a strict rule speaks of this path. */
static inline bool cg_fs_is_strict(const cg_tree_name *name)
{
    return name->kind == CG_TREE_OBJECT_CHUNK || name->kind == CG_TREE_CONTEXT_CHUNK ||
           name->kind == CG_TREE_PROFILE;
}

/* Checks the content of fd for the name; logs and counts a refusal. */
int cg_fs_check(cg_fs *fs, int fd, const char *path, const cg_tree_name *name,
                cg_chunk_header *header_out);
#endif
