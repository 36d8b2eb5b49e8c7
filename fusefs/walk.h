/* fusefs/walk.h - all files and folders of a store, by their names. No link is followed.
 * Threads: each call stands alone.
 */
#ifndef CG_FUSEFS_WALK_H
#define CG_FUSEFS_WALK_H
#include "codec/status.h"
#include <stdbool.h>
#include <sys/stat.h>

/* path, relative to the root, is dir_fd's entry of path's last component; attr describes it. Comes
 * before what is in a folder. It may remove or rename the entry. Anything but CG_OK ends the
 * walk. */
typedef cg_status cg_walk_visit(void *user, int dir_fd, const char *path, const struct stat *attr);

/* Calls visit for each regular file and folder. A folder that cannot be read counts as empty; so
 * does one that is deeper than any rule reaches, or whose path is too long for one. What visit
 * returns; CG_ERR_...: the root cannot be read. */
cg_status cg_walk(int root_fd, cg_walk_visit *visit, void *user);
/* The same, but of files only those whose name is_wanted. The others are not even looked at, where
 * a folder tells what its entries are: on a cold disk their inodes are not read. */
cg_status cg_walk_named(int root_fd, bool (*is_wanted)(const char *leaf), cg_walk_visit *visit,
                        void *user);

/* The last component of a path. */
const char *cg_walk_leaf(const char *path);
#endif
