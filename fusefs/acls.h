/* fusefs/acls.h - access control lists of a store. The mount does not pass them on, so that the
 * kernel would go by the modes alone: the mask of a list would count as the rights of the group.
 * So a store that uses them is not mounted, and what has one is not opened. Threads: any. */
#ifndef CG_FUSEFS_ACLS_H
#define CG_FUSEFS_ACLS_H
#include <stdbool.h>
#include <stddef.h>

/* Whether the open file or folder has a list that says more than its mode, or a folder one for new
 * files. fd: not O_PATH. */
bool cg_acls_are_on(int fd);
/* Whether one of the store's folders has, down to objects/ab and contexts/NAME: what lies below
 * takes its lists from them. Which: path_out[path_bytes]. */
bool cg_acls_find(int root_fd, char *path_out, size_t path_bytes);
#endif
