/* fusefs/passthrough.h - reads of published files without the daemon (FUSE passthrough, Linux 6.9).
 *
 * The daemon gives the kernel a backing file, the store's own, and the kernel reads that itself.
 * Such an open file is backed. All others are cached: read through the daemon and the page cache.
 * The kernel takes one backing file for an inode, and no mix of backed and cached files of it. So
 * later open files of an inode are what the first one is. Sometimes the kernel refuses: without
 * CAP_SYS_ADMIN, or over another passthrough mount. Then the file is cached.
 * Threads: any.
 */
#ifndef CG_FUSEFS_PASSTHROUGH_H
#define CG_FUSEFS_PASSTHROUGH_H
#include "fusefs/core.h"
#include "fusefs/fuse_api.h"
#include "fusefs/metrics.h"
#include <stdatomic.h>

typedef struct cg_passthrough {
    struct fuse_session *session;
    cg_nodes *nodes;
    cg_metrics *metrics;
    _Atomic bool enabled; /* until the kernel says that it may not be */
} cg_passthrough;

/* Chooses how the open file is read, and sets fi accordingly. */
void cg_passthrough_open(cg_passthrough *passthrough, fuse_req_t req, cg_fs_file *file,
                         struct fuse_file_info *fi);
/* After the last close, or when the kernel did not get the answer to the open. */
void cg_passthrough_release(cg_passthrough *passthrough, cg_fs_file *file);
#endif
