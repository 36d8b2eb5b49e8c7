/* fusefs/arrivals.h - files that get a strict name by a rename or a link, also of a folder above
 * them.
 *
 * Such a file is checked first. From its check on it is held: its gate is closed (fusefs/nodes.h),
 * and it is claimed (fusefs/claims.h). So nobody changes it while the files beside it are checked,
 * however long that takes, and it is whole when it has the name. Then it is sealed.
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
    size_t n_new;  /* of the held ones: not published before */
    size_t n_seen; /* for the caller */
} cg_arrivals;

/* Whether the file leaf in dir_fd, now at old_name, may stand at path, whose name is `name`. If so
 * it is put on the list, unless the move changes nothing for it.
 * 0 or an errno value. EBUSY: it is open for writing, or being checked by others. EXDEV: it would
 * show something else there, or the list has CG_ARRIVALS_MAX_HELD files. Else as cg_fs_check(). */
int cg_arrivals_add(cg_fs *fs, cg_arrivals *list, int dir_fd, const char *leaf,
                    const cg_tree_name *old_name, const char *path, const cg_tree_name *name);
/* Whether the file that is at leaf in dir_fd now needs no check for this name, or is held for
 * it. */
bool cg_arrivals_covers(const cg_arrivals *list, int dir_fd, const char *leaf,
                        const cg_tree_name *old_name, const cg_tree_name *name);
/* Lets the files go, and empties the list. moved: the files have their new names. Then those of
 * strict names are sealed, and chunks of contexts are adopted. */
void cg_arrivals_end(cg_fs *fs, cg_arrivals *list, bool moved);

/* Closes the node's gate because a strict name is to be given, and claims its file, which is open
 * as fd. 0 or EBUSY. *before_out: the gate's state before. */
int cg_arrivals_hold(cg_fs *fs, cg_fs_node *node, int fd, cg_gate *before_out);
#endif
