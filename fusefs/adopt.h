/* fusefs/adopt.h - what comes in as part of a context becomes findable by its key. */
#ifndef CG_FUSEFS_ADOPT_H
#define CG_FUSEFS_ADOPT_H
#include "fusefs/core.h"
#include "iouring/tree.h"

/* After a file of the store became visible at path: what makes it findable.
 * header is NULL unless the file is a chunk. Failures are logged and counted: the file itself
 * stays. */
void cg_fs_adopt(cg_fs *fs, const char *path, const cg_tree_name *name,
                 const cg_chunk_header *header);
#endif
