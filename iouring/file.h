/* iouring/file.h - blocking file helpers of the store. Internal to iouring.
 *
 * Paths are relative to dir_fd; nothing follows a symbolic link in the last component, and only
 * regular files are read. Names are made durable with cg_file_sync_dir(), except by
 * cg_file_write(), which does it itself.
 * Threads: each call stands alone.
 */
#ifndef CG_IOURING_FILE_H
#define CG_IOURING_FILE_H
#include "codec/chunk.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Reads a whole file; the caller frees *bytes_out. CG_ERR_BUFFER_TOO_SMALL: it has more than
 * max_bytes. */
cg_status cg_file_read(int dir_fd, const char *path, size_t max_bytes, uint8_t **bytes_out,
                       size_t *n_bytes_out);
/* Reads the first n_bytes; CG_ERR_TRUNCATED when there are fewer. file_bytes_out may be NULL. */
cg_status cg_file_read_start(int dir_fd, const char *path, void *bytes_out, size_t n_bytes,
                             uint64_t *file_bytes_out);
/* The fixed header of a chunk file, of what it holds (cg_chunk_header_cut()); CG_ERR_TRUNCATED also
 * when the file does not end where a level ends. */
cg_status cg_file_chunk_header(int dir_fd, const char *path, cg_chunk_header *header_out);
/* As cg_io_write(), in this thread. */
cg_status cg_file_write(int dir_fd, const char *path, const void *bytes, size_t n_bytes,
                        bool replace);
/* cg_file_write() with replace, unless the file has these bytes already. */
cg_status cg_file_update(int dir_fd, const char *path, const void *bytes, size_t n_bytes);

/* Gives a file a second name: a hard link, or where there are none (EPERM, EMLINK, EXDEV,
 * EOPNOTSUPP) a copy of its first copy_bytes (UINT64_MAX: of all). The content is on disk before
 * the name is there. Makes missing directories above `to`. CG_ERR_EXISTS without replace. */
cg_status cg_file_install(int dir_fd, const char *from, const char *to, bool replace,
                          uint64_t copy_bytes);
/* cg_file_install() without replace, of a file that is on disk already, into a directory that is
 * there. */
cg_status cg_file_link(int dir_fd, const char *from, const char *to, uint64_t copy_bytes);
/* Makes `to` another link of `from`, of the same owner, mode and time of modification (by which
 * rsync knows what it has brought), if that begins with all that `to` has. What `to` had it still
 * has, so nothing needs to be synced after it.
 * CG_ERR_FOREIGN_TOKENS: it does not. CG_ERR_PERMISSION: another owner, mode or time.
 * CG_ERR_UNSUPPORTED: no hard links. */
cg_status cg_file_share(int dir_fd, const char *from, const char *to);
/* fsync of the directory that holds path. A file system that cannot is no error. */
cg_status cg_file_sync_dir(int dir_fd, const char *path);
/* mkdir -p (0700), durable, of the directories above path. */
cg_status cg_file_make_parents(int dir_fd, const char *path);

#ifdef __cplusplus
}
#endif
#endif
