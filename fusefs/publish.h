/* fusefs/publish.h - publishing: a pending file gets its name, if its content may have it.
 *
 * Order: gate closed - content checked - fsync - rename to the name - fsync of the directory - gate
 * sealed. So nobody sees a name whose content is not on disk, and nobody changes what was checked.
 * Threads: any. Results are 0 or an errno value.
 */
#ifndef CG_FUSEFS_PUBLISH_H
#define CG_FUSEFS_PUBLISH_H
#include "fusefs/pending.h"

/* Publishes the file if it is valid. Does nothing for an empty file or a published one. After an
 * error the file still waits. Errors are those of cg_strict_errno() and of the store's file system.
 * EEXIST: another valid file, of other content, has taken the name. */
int cg_publish(cg_fs *fs, cg_fs_pending *pending);
/* rename() of a waiting file: publishes it under another name, or gives it an ordinary one.
 * replace: a file that has the name loses it; otherwise EEXIST. */
int cg_publish_as(cg_fs *fs, cg_fs_pending *pending, cg_fs_node *parent, const char *name,
                  bool replace);
/* fsync of an open directory, O_PATH or not: its names are on disk then. */
int cg_publish_sync_directory(int dir_fd);
#endif
