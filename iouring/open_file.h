/* iouring/open_file.h - a file that is open for several users: the last one closes it.
 *
 * A read that a hung mount holds up goes on after its caller has given it up. If the file were
 * closed then, its number could be another file's when the read takes its next step. So each read
 * is a user, until it has really ended.
 * Threads: any.
 */
#ifndef CG_IOURING_OPEN_FILE_H
#define CG_IOURING_OPEN_FILE_H

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cg_open_file cg_open_file;

/* Takes over a descriptor, for one user. NULL: no memory, and it is the caller's still. */
cg_open_file *cg_open_file_new(int fd);
/* For a user. */
int cg_open_file_fd(const cg_open_file *file);
/* For a user: one more. */
void cg_open_file_hold(cg_open_file *file);
/* One user less. After the last: the descriptor, which is the caller's to close; else -1. */
int cg_open_file_drop(cg_open_file *file);

#ifdef __cplusplus
}
#endif
#endif
