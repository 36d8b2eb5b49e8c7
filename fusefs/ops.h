/* fusefs/ops.h - the operations of libfuse's low-level API.
 *
 * Each is one call of fusefs/core.h and one reply. A request ends with its reply: after it, req is
 * gone, and the kernel may use or forget the node at once.
 * Threads: any, as libfuse or fusefs/loop.h calls them.
 */
#ifndef CG_FUSEFS_OPS_H
#define CG_FUSEFS_OPS_H
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

extern const struct fuse_lowlevel_ops CG_OPS;

/* For both halves of the edge, ops.c (names, attributes) and ops_files.c. */
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
/* The operations of open files and directories (ops_files.c). */
void cg_ops_create(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode,
                   struct fuse_file_info *fi);
void cg_ops_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi);
void cg_ops_read(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset,
                 struct fuse_file_info *fi);
void cg_ops_write_buf(fuse_req_t req, fuse_ino_t ino, struct fuse_bufvec *in, off_t offset,
                      struct fuse_file_info *fi);
void cg_ops_flush(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi);
void cg_ops_fsync(fuse_req_t req, fuse_ino_t ino, int data_only, struct fuse_file_info *fi);
void cg_ops_release(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi);
void cg_ops_fallocate(fuse_req_t req, fuse_ino_t ino, int mode, off_t offset, off_t length,
                      struct fuse_file_info *fi);
void cg_ops_copy_file_range(fuse_req_t req, fuse_ino_t ino_in, off_t off_in,
                            struct fuse_file_info *fi_in, fuse_ino_t ino_out, off_t off_out,
                            struct fuse_file_info *fi_out, size_t len, int flags);
void cg_ops_lseek(fuse_req_t req, fuse_ino_t ino, off_t offset, int whence,
                  struct fuse_file_info *fi);
void cg_ops_opendir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi);
void cg_ops_readdir(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset,
                    struct fuse_file_info *fi);
void cg_ops_readdirplus(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset,
                        struct fuse_file_info *fi);
void cg_ops_releasedir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi);
void cg_ops_fsyncdir(fuse_req_t req, fuse_ino_t ino, int data_only, struct fuse_file_info *fi);
#endif
