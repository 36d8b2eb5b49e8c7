/* iouring/beneath.h - opening paths that cannot leave the store.
 *
 * A symbolic link in the store is data. The kernel resolves it where the caller sees it; the daemon
 * never follows one.
 * Method: openat2(2) with RESOLVE_BENEATH and RESOLVE_NO_SYMLINKS. Some kernels and seccomp filters
 * lack it. There each component is opened on its own, with O_NOFOLLOW.
 * Threads: pure functions on descriptors.
 */
#ifndef CG_IOURING_BENEATH_H
#define CG_IOURING_BENEATH_H
#include "codec/status.h"
#include "iouring/tree.h"
#include <dirent.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Opens path with flags, O_CLOEXEC and O_NOFOLLOW. path is relative to root_fd; "" is root_fd
 * itself. No component may be a symbolic link: ELOOP. Only the last may be one, with O_PATH. Not
 * for O_CREAT. After an error it is -1, with errno. EAGAIN, with O_NONBLOCK: somebody has a lease
 * on the file (fcntl(F_SETLEASE)), who has been told to give it up; nobody waits for that. */
int cg_beneath_open(int root_fd, const char *path, int flags);
/* The same without openat2. For kernels without it, for paths of PATH_MAX and more, and for
 * tests. */
int cg_beneath_open_by_step(int root_fd, const char *path, int flags);

/* The entries of the open folder fd, which closedir() closes with them. NULL: fd is closed, and
 * errno says why; fd may be -1, and then errno stays. */
DIR *cg_beneath_list(int fd);

/* A file by the folder that it lies in, which was opened beneath the root: whatever is done with
 * `at` stays in that folder, also when a folder above is replaced by a link meanwhile. */
typedef struct cg_located {
    int dir_fd;                  /* the caller closes it */
    char at[CG_TREE_PATH_BYTES]; /* "/proc/self/fd/<dir_fd>/<last component>" */
} cg_located;

/* CG_ERR_PERMISSION: a folder above path is a symbolic link or no folder. CG_ERR_NOT_FOUND: it is
 * missing. After an error dir_fd is -1. */
cg_status cg_beneath_locate(int root_fd, const char *path, cg_located *located_out);
/* path's last component in a folder that is open already. CG_ERR_INVALID_ARGUMENT: too long. */
cg_status cg_beneath_locate_in(int dir_fd, const char *path, cg_located *located_out);

#ifdef __cplusplus
}
#endif
#endif
