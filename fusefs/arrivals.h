/* fusefs/arrivals.h - files that come under the rules by a rename or a link.
 *
 * From its check on, such a file is held: its gate is closed, and it is claimed (fusefs/claims.h).
 * So it is whole when the name is there, however long the checks of the files beside it take. Then
 * it is sealed.
 * Threads: a list belongs to one operation.
 */
#ifndef CG_FUSEFS_ARRIVALS_H
#define CG_FUSEFS_ARRIVALS_H
#include "fusefs/core.h"
#include "iouring/tree.h"

/* Each file held costs a descriptor while the operation lasts. */
enum { CG_ARRIVALS_MAX_HELD = 4096 };

typedef struct cg_arrival cg_arrival;

typedef struct cg_arrivals {
    cg_arrival *items;
    size_t n_items, n_held, n_published;
} cg_arrivals;

/* Whether the file leaf in dir_fd, now at old_name, may stand at path, which is of this name. If so
 * it is in the list, unless nothing changes by that.
 * EBUSY: it is open for writing, or being checked by others. EXDEV: it shows something else there,
 * or the list has CG_ARRIVALS_MAX_HELD files. Else as cg_fs_check(). */
int cg_arrivals_add(cg_fs *fs, cg_arrivals *list, int dir_fd, const char *leaf,
                    const cg_tree_name *old_name, const char *path, const cg_tree_name *name);
/* Whether what leaf in dir_fd is now needs no check for this name, or is held for it. */
bool cg_arrivals_covers(const cg_arrivals *list, int dir_fd, const char *leaf,
                        const cg_tree_name *old_name, const cg_tree_name *name);
/* Lets the files go, and empties the list. moved: they have their names; those of strict ones are
 * sealed, and what is to be found by its key is adopted. */
void cg_arrivals_end(cg_fs *fs, cg_arrivals *list, bool moved);

/* Closes the node's gate for the sake of a strict name, and claims fd, its file. EBUSY. */
int cg_arrivals_hold(cg_fs *fs, cg_fs_node *node, int fd, cg_gate *before_out);
#endif
