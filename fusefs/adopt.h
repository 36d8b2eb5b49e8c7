/* fusefs/adopt.h - adopting: a chunk that comes in as part of a context becomes findable by its
 * key.
 *
 * The store does the work (iouring/store.h). Here it is told whom to give the new files to.
 * Threads: any.
 */
#ifndef CG_FUSEFS_ADOPT_H
#define CG_FUSEFS_ADOPT_H
#include "fusefs/core.h"
#include "iouring/tree.h"

/* To be called after a file became visible at path. Adopts chunks, profile.cgp and model.json of
 * contexts, and does nothing for other names. fd: the file, which nobody may write to until this
 * returns; -1: another name of one that was adopted. header: of a chunk, as cg_fs_check() gave it;
 * else NULL. A failure is logged and counted, and the file itself stays. */
void cg_fs_adopt(cg_fs *fs, const char *path, const cg_tree_name *name, int fd,
                 const cg_chunk_header *header);
#endif
