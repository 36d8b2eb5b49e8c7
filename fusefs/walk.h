/* fusefs/walk.h - all files and folders of a store, by their names. No link is followed.
 * Threads: each call stands alone.
 */
#ifndef CG_FUSEFS_WALK_H
#define CG_FUSEFS_WALK_H
#include "codec/status.h"
#include <stdbool.h>
#include <sys/stat.h>

/* Called for an entry of a folder, before what is in that entry. path is relative to the root;
 * dir_fd is the folder, and attr describes the entry. It may remove or rename the entry. Anything
 * but CG_OK ends the walk. */
typedef cg_status cg_walk_visit(void *user, int dir_fd, const char *path, const struct stat *attr);

/* Told of what cannot be read now, by the error: path is a folder, "" the root, or an entry whose
 * status is unknown. Anything but CG_OK ends the walk. */
typedef cg_status cg_walk_unread(void *user, const char *path, int error);

/* Calls visit for each regular file and folder. A folder that is gone meanwhile, or is not ours to
 * read, counts as empty; but not one of contexts that is not ours: it may name objects. So does one
 * that is deeper than any rule reaches, or whose path is too long. What cannot be read for another
 * reason is passed over, and unread (may be NULL) is told.
 * Returns what visit or unread returned. CG_ERR_...: the root cannot be opened. */
cg_status cg_walk(int root_fd, cg_walk_visit *visit, cg_walk_unread *unread, void *user);
/* The same, but of files only those whose name is_wanted, and of errors nobody is told. The other
 * files are not even looked at, where a folder tells what its entries are: on a cold disk their
 * inodes are not read. */
cg_status cg_walk_named(int root_fd, bool (*is_wanted)(const char *leaf), cg_walk_visit *visit,
                        void *user);

/* Whether it is a model's folder of contexts, or in it. */
bool cg_walk_is_of_contexts(const char *path);
/* The last component of a path. */
const char *cg_walk_leaf(const char *path);
#endif
