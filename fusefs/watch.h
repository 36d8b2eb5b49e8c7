/* fusefs/watch.h - tells the kernel of changes of the store that did not come through this mount.
 *
 * So the kernel may trust names and attributes for longer than a second. A fanotify mark on the
 * store's file system tells of all changes, with the id of the process that made them. The kernel
 * is then told to forget what it remembers of the file or folder. Its attributes are forgotten at
 * once. A name that is gone or has another file makes all names doubtful (an epoch of the kernel,
 * Linux 6.16): they are looked up again. To take out a single name would need the lock of its
 * folder; a request that waits for a killed daemon may hold that for ever. A new name also makes
 * all names doubtful if the kernel may remember it as missing; cg_nodes_note_missing() notes such
 * names. Other new names need nothing.
 *
 * There is no watch where the kernel or our privileges don't allow it (CAP_SYS_ADMIN, Linux 5.17),
 * and none on file systems that other hosts change, because this host is not told of those changes.
 * Threads: cg_watch_run() is for one thread; the rest may be called by any.
 */
#ifndef CG_FUSEFS_WATCH_H
#define CG_FUSEFS_WATCH_H
#include "fusefs/fs.h"

/* What a file or a folder was like at a moment, by its time of change. */
typedef struct cg_settled {
    int64_t changed_ns;   /* 0: unknown */
    uint32_t looked_at_s; /* CLOCK_MONOTONIC */
} cg_settled;

/* Looks at fd. The result is "unknown" if nothing is watched, so that it could change unseen, and
 * if it has just changed: the clock of files is coarse, so it could change again and keep its
 * time. */
cg_settled cg_watch_settle(const cg_fs *fs, int fd);
/* Whether the file or folder is as it was at the earlier look. Not all changes show in the time
 * (fusefs/open_files.h), so no look is good for longer than CG_FS_TRUST_SECONDS. */
bool cg_watch_is_as_before(const cg_settled *now, const cg_settled *before);

/* A watch that is off: all zeros, and descriptors of -1. */
void cg_watch_init(cg_watch *watch);
/* Begins to note changes. 0 or an errno value. ENOTSUP: the store is on a file system that other
 * hosts may change. EPERM, EINVAL, ENOSYS ...: the kernel's. */
int cg_watch_open(cg_watch *watch, int root_fd);
/* Tells the kernel of changes until cg_watch_stop(). If the watch breaks, nothing is trusted. */
void cg_watch_run(cg_fs *fs);
void cg_watch_stop(cg_watch *watch);
void cg_watch_close(cg_watch *watch);
#endif
