/* fusefs/contents.h - changing what a file holds. The rest of contents.c is in fusefs/core.h. */
#ifndef CG_FUSEFS_CONTENTS_H
#define CG_FUSEFS_CONTENTS_H
#include "fusefs/core.h"

/* ftruncate() through the gate; fd is a descriptor of the node's file. 0 or an errno value; EPERM:
 * the file is published. Threads: any. */
int cg_contents_truncate(cg_fs *fs, cg_fs_node *node, int fd, off_t size);
#endif
