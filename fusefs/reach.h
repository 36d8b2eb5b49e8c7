/* fusefs/reach.h - from a node to a descriptor of its file.
 *
 * The file is opened by a name of the node, and compared with the node's device and inode number.
 * So a file that was put in its place is never taken for it. That is ESTALE, upon which the kernel
 * looks the name up again. If a rename was under way, it is tried again.
 */
#ifndef CG_FUSEFS_REACH_H
#define CG_FUSEFS_REACH_H
#include "fusefs/core.h"

typedef struct cg_reached {
    int fd;
    cg_fs_file *file; /* whose fd this is; NULL: ours */
} cg_reached;

/* A new descriptor with these open flags. *path_out (path_out may be NULL) is the path that led
 * there, "" if the file has no name any more; the caller frees it. ESTALE: all names of the node
 * hold other files or nothing. ENOENT: it has none. */
int cg_reach_open(cg_fs *fs, cg_fs_node *node, int flags, int *fd_out, char **path_out);
/* An O_PATH descriptor of a directory, and in path_out (may be NULL) the path of leaf in it. */
int cg_reach_dir(cg_fs *fs, cg_fs_node *node, const char *leaf, int *fd_out, char **path_out);
/* Any descriptor, for attributes: that of an open file, if there is one. cg_reach_end() ends it. */
int cg_reach(cg_fs *fs, cg_fs_node *node, cg_reached *reached_out);
void cg_reach_end(cg_fs *fs, cg_reached *reached);

/* "/proc/self/fd/<fd>", for system calls that take no O_PATH descriptor. */
typedef struct cg_proc_path {
    char text[32];
} cg_proc_path;
cg_proc_path cg_reach_proc_path(int fd);
#endif
