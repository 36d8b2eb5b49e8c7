/* fusefs/published.h - which files are published, and who may change one.
 *
 * A file is published when one of its names is strict. Its content is immutable then.
 */
#ifndef CG_FUSEFS_PUBLISHED_H
#define CG_FUSEFS_PUBLISHED_H
#include "fusefs/core.h"

/* Whether a name of the node's file is strict. Counts names of all nodes that show the file. */
bool cg_published_by_name(cg_fs *fs, cg_fs_node *node);
/* Whether the file may be changed; if so, its gate is open from now on. Waits for a check under
 * way. EPERM: the file is published, or the node is a view. EPERM also for a chunk or profile with
 * a second link: that may well be a strict name that we have never seen. */
int cg_published_allow_change(cg_fs *fs, cg_fs_node *node);
#endif
