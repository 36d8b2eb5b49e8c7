/* fusefs/beneath.h - opening paths that cannot leave the store.
 *
 * A symbolic link in the store is data. The kernel resolves it where the caller sees it; the daemon
 * never follows one.
 * Method: openat2(2) with RESOLVE_BENEATH and RESOLVE_NO_SYMLINKS. Some kernels and seccomp filters
 * lack it. There each component is opened on its own, with O_NOFOLLOW.
 * Threads: pure functions on descriptors.
 */
#ifndef CG_FUSEFS_BENEATH_H
#define CG_FUSEFS_BENEATH_H
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Opens path with flags, O_CLOEXEC and O_NOFOLLOW. path is relative to root_fd; "" is root_fd
 * itself. No component may be a symbolic link: ELOOP. Only the last may be one, with O_PATH. Not
 * for O_CREAT. After an error it is -1, with errno. */
int cg_beneath_open(int root_fd, const char *path, int flags);
/* The same without openat2. For kernels without it, for paths of PATH_MAX and more, and for
 * tests. */
int cg_beneath_open_by_step(int root_fd, const char *path, int flags);

#ifdef __cplusplus
}
#endif
#endif
