/* fusefs/beneath.h - opening paths that cannot leave the store.
 *
 * A symbolic link in the store is data: the kernel resolves it in the caller's view, never in ours.
 * Method: openat2(2) with RESOLVE_BENEATH and RESOLVE_NO_SYMLINKS; where a kernel or a seccomp
 * filter lacks it, one openat(O_NOFOLLOW) a component.
 * Threads: pure functions on descriptors.
 */
#ifndef CG_FUSEFS_BENEATH_H
#define CG_FUSEFS_BENEATH_H
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Opens path (relative to root_fd, "" is root_fd itself) with flags, O_CLOEXEC and O_NOFOLLOW;
 * no component may be a symbolic link, except the last with O_PATH. -1 and errno; ELOOP for a
 * link. Not for O_CREAT. */
int cg_beneath_open(int root_fd, const char *path, int flags);
/* The same without openat2. For kernels without it, for paths of PATH_MAX and more, and for
 * tests. */
int cg_beneath_open_by_step(int root_fd, const char *path, int flags);

#ifdef __cplusplus
}
#endif
#endif
