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

/* Opens path with flags, O_CLOEXEC and O_NOFOLLOW; the caller closes what it returns. path is
 * relative to root_fd; "" is root_fd itself. No component may be a symbolic link: ELOOP. With
 * O_PATH the last one may. Not for O_CREAT.
 * -1 and errno after an error. EAGAIN, with O_NONBLOCK: somebody has a lease on the file
 * (fcntl(F_SETLEASE)). The kernel has told them to give it up; this call does not wait for that. */
int cg_beneath_open(int root_fd, const char *path, int flags);
/* The same without openat2. For kernels without it, for paths of PATH_MAX and more, and for
 * tests. */
int cg_beneath_open_by_step(int root_fd, const char *path, int flags);

/* The entries of the open folder fd. The caller ends the listing with closedir(), which closes fd,
 * too. NULL: fd is closed, and errno says why. fd may be -1; then errno stays as it is. */
DIR *cg_beneath_list(int fd);

/* A file, by the folder that it lies in. The folder was opened beneath the root, so whatever is
 * done with `at` stays in that folder, even if a folder above is replaced by a link meanwhile. */
typedef struct cg_located {
    int dir_fd;                  /* the caller closes it */
    char at[CG_TREE_PATH_BYTES]; /* "/proc/self/fd/<dir_fd>/<last component>" */
} cg_located;

/* CG_ERR_PERMISSION: a folder above path is a symbolic link or no folder. CG_ERR_NOT_FOUND: it is
 * missing. After an error dir_fd is -1. */
cg_status cg_beneath_locate(int root_fd, const char *path, cg_located *located_out);
/* The same for path's last component in the folder dir_fd, which is open already and stays the
 * caller's. CG_ERR_INVALID_ARGUMENT: too long. */
cg_status cg_beneath_locate_in(int dir_fd, const char *path, cg_located *located_out);

#ifdef __cplusplus
}
#endif
#endif
