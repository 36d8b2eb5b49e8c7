/* fusefs/ops_reply.h - what the operations of fusefs/ops.h and fusefs/ops_files.h share: what they
 * ask about a request, and replies.
 *
 * Threads: as fusefs/ops.h.
 */
#ifndef CG_FUSEFS_OPS_REPLY_H
#define CG_FUSEFS_OPS_REPLY_H
#include "fusefs/core.h"
#include "fusefs/fuse_api.h"
#include "fusefs/metrics.h"
#include "fusefs/passthrough.h"

/* The session's userdata. */
typedef struct cg_mount {
    cg_fs *fs;
    struct fuse_session *session;
    double attr_timeout_s, entry_timeout_s; /* negative: as long as may be */
    bool knows_epochs;                      /* the kernel: its names can become doubtful */
    bool may_keep_listings;                 /* by the times of folders; see cg_ops_opendir() */
    bool wants_passthrough;
    bool store_is_stacked; /* the store's file system lies on another one, as overlayfs does */
    cg_passthrough passthrough;
} cg_mount;

cg_mount *cg_ops_mount(fuse_req_t req);
cg_fs_node *cg_ops_node(const cg_mount *mount, fuse_ino_t ino);
cg_fs_caller cg_ops_caller(fuse_req_t req);
void cg_ops_reply_error(fuse_req_t req, int error);
/* For cg_fs_kernel: make the kernel forget what it remembers. mount is the cg_mount, which
 * serves. */
void cg_ops_forget(void *mount, const cg_node_ref *ref);
void cg_ops_doubt_names(void *mount);
/* Whether the kernel may trust names, because it is told when one that it has goes away. */
bool cg_ops_trusts_names(const cg_mount *mount);
struct fuse_entry_param cg_ops_entry(const cg_mount *mount, const cg_fs_entry *entry);
/* A look-up that the kernel did not get, because its reply failed. */
void cg_ops_take_back(cg_mount *mount, cg_fs_node *node);
/* Replies of a look-up, and of attributes; if error is not 0, it is the reply. */
void cg_ops_reply_entry(fuse_req_t req, int error, const cg_fs_entry *entry);
/* If the store has changed since, the kernel was told, and does not trust this. */
void cg_ops_reply_attr(fuse_req_t req, int error, cg_fs_node *node, const struct stat *attr);
#endif
