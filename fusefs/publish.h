/* fusefs/publish.h - a pending file gets its name, if its content may have it. */
#ifndef CG_FUSEFS_PUBLISH_H
#define CG_FUSEFS_PUBLISH_H
#include "fusefs/pending.h"

/* Publishes if the file is valid; nothing to do for an empty or published one. After an error the
 * file stays waiting. Errors are those of cg_strict_errno(), or EEXIST: another valid file of other
 * content took the name first. */
int cg_publish(cg_fs *fs, cg_fs_pending *pending);
/* rename() of a waiting file: publishes it under another name, also an ordinary one. */
int cg_publish_as(cg_fs *fs, cg_fs_pending *pending, cg_fs_node *parent, const char *name,
                  bool replace);
#endif
