/* fusefs/acls.h - access control lists of a store, which the mount does not support.
 *
 * The mount does not pass lists on to the kernel. The kernel would then go by modes alone, and on a
 * file with a list the mode's group bits are the list's mask: the group would get rights that it
 * does not have. So a store that uses lists is not mounted, a file that has one is not opened, and
 * in a folder that has one nothing is looked up, made or removed.
 * Threads: any.
 */
#ifndef CG_FUSEFS_ACLS_H
#define CG_FUSEFS_ACLS_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Whether the open file or folder has a list that says more than its mode, or a folder has a
 * default list for new files. fd: not O_PATH. */
bool cg_acls_are_on(int fd, bool is_folder);
/* Folders that had no list, by the number of their node (cg_fs_node.generation) and their time of
 * change, which a new list changes: so a folder is asked once, and not at each look-up. Zeroed it
 * is empty. */
enum { CG_N_ACL_NOTES = 4096 }; /* those that share one take it from each other */
typedef struct cg_acl_notes {
    struct {
        _Atomic uint64_t generation;
        _Atomic int64_t changed_ns;
    } free_of_lists[CG_N_ACL_NOTES];
} cg_acl_notes;
/* The same as cg_acls_are_on() of the folder fd, which may be O_PATH. */
bool cg_acls_are_on_folder(cg_acl_notes *notes, int fd, uint64_t generation);

/* Whether one of the store's folders has such a list, down to objects/ab and contexts; what is made
 * below takes its lists from them. path_out[path_bytes] then names it. */
bool cg_acls_find(int root_fd, char *path_out, size_t path_bytes);
#endif
