/* fusefs/published.h - which files are published, and who may change one.
 *
 * A file is published when one of its names is strict. Its content is immutable then.
 */
#ifndef CG_FUSEFS_PUBLISHED_H
#define CG_FUSEFS_PUBLISHED_H
#include "fusefs/core.h"

/* Whether a name of the node's file is strict. Counts names of all nodes that show the file. False
 * without memory: then nothing is left out because of it. */
bool cg_published_by_name(cg_fs *fs, cg_fs_node *node);
/* Whether the file may be changed; if so, its gate is open from now on. Waits for a check under
 * way. EPERM: the file is published, or the node is a view. EPERM also for a chunk or profile with
 * a second link: that may well be a strict name that we have never seen. */
int cg_published_allow_change(cg_fs *fs, cg_fs_node *node);
/* Opens the file with these flags, to be written to, if it may be changed; claims it
 * (fusefs/claims.h). path_out as in cg_reach_open(). ETXTBSY: a daemon is about to publish it.
 * ESTALE, EPERM: it did so just now. */
int cg_published_open_to_change(cg_fs *fs, cg_fs_node *node, int flags, int *fd_out,
                                char **path_out);
#endif
