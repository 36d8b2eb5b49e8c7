/* fusefs/files.h - open files of a node, and who may change one. */
#ifndef CG_FUSEFS_FILES_H
#define CG_FUSEFS_FILES_H
#include "fusefs/core.h"

/* A file that is open in node; takes fd. NULL without memory (fd is closed then). */
cg_fs_file *cg_files_new(cg_fs *fs, cg_fs_node *node, int fd, bool writable);
/* One of the node's open files, which stays until cg_files_unuse(); or NULL. */
cg_fs_file *cg_files_use_any(cg_nodes *nodes, cg_fs_node *node);
void cg_files_unuse(cg_nodes *nodes, cg_fs_file *file);
/* Whether the file that attr describes is open for writing. */
bool cg_files_is_being_written(cg_nodes *nodes, const struct stat *attr);

/* Whether a name of the node's file is strict, by whatever node: what it holds is published. */
bool cg_files_is_published(cg_fs *fs, cg_fs_node *node);
/* Waits for the gate and opens it for good if the file is an ordinary one. EPERM: it is
 * published, or it is a chunk or profile with a second link, which may well be a published name, or
 * a view. */
int cg_files_allow_change(cg_fs *fs, cg_fs_node *node);
#endif
