/* fusefs/acls.h - access control lists of a store, which the mount does not support.
 *
 * The mount does not pass lists on to the kernel. The kernel would then go by modes alone, and on a
 * file with a list the mode's group bits are the list's mask: the group would get rights that it
 * does not have. So a store that uses lists is not mounted, and a file that has one is not opened.
 * Threads: any.
 */
#ifndef CG_FUSEFS_ACLS_H
#define CG_FUSEFS_ACLS_H
#include <stdbool.h>
#include <stddef.h>

/* Whether the open file or folder has a list that says more than its mode, or a folder has a
 * default list for new files. fd: not O_PATH. */
bool cg_acls_are_on(int fd, bool is_folder);
/* Whether one of the store's folders has such a list, down to objects/ab and contexts/NAME; what
 * lies below takes its lists from them. path_out[path_bytes] then names it. */
bool cg_acls_find(int root_fd, char *path_out, size_t path_bytes);
#endif
