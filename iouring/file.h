/* iouring/file.h - blocking file helpers of the store. Internal to iouring.
 *
 * Paths are relative to dir_fd. A symbolic link in the last component is not followed, and only
 * regular files are read. A new name is durable after cg_file_sync_dir(); cg_file_write() does that
 * itself.
 * Threads: each call stands alone.
 */
#ifndef CG_IOURING_FILE_H
#define CG_IOURING_FILE_H
#include "codec/chunk.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Opens a file to be read; the caller closes what it returns. -1: *status_out says why. */
int cg_file_open(int dir_fd, const char *path, cg_status *status_out);
/* Reads a whole file; the caller frees *bytes_out. CG_ERR_BUFFER_TOO_SMALL: it has more than
 * max_bytes. */
cg_status cg_file_read(int dir_fd, const char *path, size_t max_bytes, uint8_t **bytes_out,
                       size_t *n_bytes_out);
/* The same of a file that is open. */
cg_status cg_file_read_open(int fd, size_t max_bytes, uint8_t **bytes_out, size_t *n_bytes_out);
/* Reads the first n_bytes; CG_ERR_TRUNCATED when there are fewer. file_bytes_out may be NULL. */
cg_status cg_file_read_start(int dir_fd, const char *path, void *bytes_out, size_t n_bytes,
                             uint64_t *file_bytes_out);
/* The fixed header of a chunk file, changed to say what the file holds (cg_chunk_header_cut()).
 * CG_ERR_TRUNCATED also when the file does not end where a level ends. */
cg_status cg_file_chunk_header(int dir_fd, const char *path, cg_chunk_header *header_out);
/* The same, after a check of the whole file, which is read piece by piece
 * (cg_chunk_verify_source()). CG_ERR_BUFFER_TOO_SMALL: it has more than max_bytes. */
cg_status cg_file_chunk_verify(int dir_fd, const char *path, uint64_t max_bytes,
                               cg_chunk_header *header_out);
/* cg_io_write(), but in this thread: returns when it is done. */
cg_status cg_file_write(int dir_fd, const char *path, const void *bytes, size_t n_bytes,
                        bool replace);
/* cg_file_write() with replace, unless the file has these bytes already. */
cg_status cg_file_update(int dir_fd, const char *path, const void *bytes, size_t n_bytes);

/* Gives a file a second name: a hard link or, where links fail (EPERM, EMLINK, EXDEV, EOPNOTSUPP,
 * ENOSYS), a copy of its first copy_bytes (UINT64_MAX: of all). The content is on disk before the
 * name is there. Makes missing directories above `to`, as cg_io_write() does. With replace a file
 * that has the name loses it; without, CG_ERR_EXISTS. */
cg_status cg_file_install(int dir_fd, const char *from, const char *to, bool replace,
                          uint64_t copy_bytes);
/* The same of a file that is open to be read, whatever its names are now. */
cg_status cg_file_install_open(int fd, int dir_fd, const char *to, bool replace,
                               uint64_t copy_bytes);
/* Renames a file that is on disk from its temporary name to its own. The temporary name is gone
 * afterwards, also after an error. CG_ERR_EXISTS: another file has the name. Where links fail, two
 * callers that give the same name at once may both believe that they did it; the later one's file
 * stays. */
cg_status cg_file_name(int dir_fd, const char *temp, const char *to);
/* cg_file_install() without replace and with less to do: the file is on disk already, and the
 * directory is there. */
cg_status cg_file_link(int dir_fd, const char *from, const char *to, uint64_t copy_bytes);
/* Makes `to` another link of `from`, so that the two share their space. `from` must begin with all
 * the bytes of `to`. Links have owner, mode and time of modification in common, so these must
 * agree. (The time, too: by it rsync knows what it has brought. any_own_time: not where that of
 * `to` is when it was written, and nobody has set it since.) `to` keeps the bytes that it had, so
 * nothing needs to be synced afterwards. CG_ERR_FOREIGN_TOKENS: the bytes differ.
 * CG_ERR_PERMISSION: owner, mode or time do. CG_ERR_UNSUPPORTED: no hard links. */
cg_status cg_file_share(int dir_fd, const char *from, const char *to, bool any_own_time);
/* fsync of the directory that holds path. CG_OK also on a file system that cannot sync one. */
cg_status cg_file_sync_dir(int dir_fd, const char *path);

#ifdef __cplusplus
}
#endif
#endif
