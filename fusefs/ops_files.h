/* fusefs/ops_files.h - the operations of the FUSE edge on open files and directories.
 *
 * fi->fh is a cg_fs_file or a cg_fs_directory.
 * Threads: as fusefs/ops.h.
 */
#ifndef CG_FUSEFS_OPS_FILES_H
#define CG_FUSEFS_OPS_FILES_H
#include "fusefs/ops_reply.h"

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
