/* fusefs/published.h - which files are published, and who may change one.
 *
 * A file is published when one of its names is strict. Its content is immutable then.
 */
#ifndef CG_FUSEFS_PUBLISHED_H
#define CG_FUSEFS_PUBLISHED_H
#include "fusefs/core.h"

/* Whether a name of the node's file is strict, by whatever node: what it holds is published. */
bool cg_published_by_name(cg_fs *fs, cg_fs_node *node);
/* Waits for the gate and opens it for good if the file is an ordinary one. EPERM: it is
 * published, or it is a chunk or profile with a second link, which may well be a published name, or
 * a view. */
int cg_published_allow_change(cg_fs *fs, cg_fs_node *node);
#endif
