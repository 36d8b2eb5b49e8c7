/* fusefs/published.h - which files are published, and which may still be changed.
 *
 * A file is published when one of its names is strict. From then on its content is immutable.
 * Threads: any.
 */
#ifndef CG_FUSEFS_PUBLISHED_H
#define CG_FUSEFS_PUBLISHED_H
#include "fusefs/core.h"

/* Whether a name of the node's file is strict. Counts names of all nodes that show the file. False
 * without memory: then nothing is left out because of it. */
bool cg_published_by_name(cg_fs *fs, cg_fs_node *node);
/* The same, but of names that lead to the file now. path: one that did a moment ago; "" where none
 * is known. False where that cannot be known. */
bool cg_published_for_sure(cg_fs *fs, cg_fs_node *node, const char *path);
/* Opens the file for writing with these flags, if it may be changed, and claims it
 * (fusefs/claims.h); its gate is open from now on. Waits for a check under way. The caller closes
 * *fd_out; path_out as in cg_reach_open(). EPERM: the file is published, or the node is a view.
 * EPERM also for a chunk or profile with a second link, or more names than are tried
 * (CG_NODES_MAX_TRIED): one may be a strict name that this daemon has never seen or tried. ETXTBSY:
 * another daemon is about to publish it, or it was published once and who wrote it then has it
 * still open. ESTALE, EPERM: another daemon has just published it. */
int cg_published_open_to_change(cg_fs *fs, cg_fs_node *node, int flags, int *fd_out,
                                char **path_out);
#endif
