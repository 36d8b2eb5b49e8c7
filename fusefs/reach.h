/* fusefs/reach.h - from a node to a descriptor of its file.
 *
 * The file is opened by a name of the node, and compared with the node's device, inode number and
 * identity (cg_fs_identity()). So another file that was put in its place is never taken for it,
 * where files have an identity. That case is ESTALE, upon which the kernel looks the name up again.
 * If a rename was under way, the name is tried again.
 * Threads: any. Results are 0 or an errno value.
 */
#ifndef CG_FUSEFS_REACH_H
#define CG_FUSEFS_REACH_H
#include "fusefs/core.h"

typedef struct cg_reached {
    int fd;
    cg_fs_file *file; /* whose fd this is; NULL: ours */
} cg_reached;

/* Opens a new descriptor with these flags; the caller closes it. *path_out (path_out may be NULL)
 * is the path that led there, "" if the file has no name any more; the caller frees it. ESTALE: all
 * names of the node hold other files or nothing. ENOENT: it has no name. */
int cg_reach_open(cg_fs *fs, cg_fs_node *node, int flags, int *fd_out, char **path_out);
/* Opens an O_PATH descriptor of a directory; the caller closes it. *path_out (path_out may be NULL)
 * is the path of leaf in it; the caller frees it. EACCES: it has an access control list. */
int cg_reach_dir(cg_fs *fs, cg_fs_node *node, const char *leaf, int *fd_out, char **path_out);
/* Whether fd, which may be O_PATH, is the node's file. */
bool cg_reach_is_node(const cg_fs *fs, int fd, const cg_fs_node *node);
/* A descriptor for attributes: that of an open file if there is one, else a new one. cg_reach_end()
 * gives it back. */
int cg_reach(cg_fs *fs, cg_fs_node *node, cg_reached *reached_out);
void cg_reach_end(cg_fs *fs, cg_reached *reached);

/* "/proc/self/fd/<fd>", for system calls that take no O_PATH descriptor. */
typedef struct cg_proc_path {
    char text[32];
} cg_proc_path;
cg_proc_path cg_reach_proc_path(int fd);
#endif
