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
/* Whether it is the context.json of a context in the root or in a model's folder, as where a copy
 * went there because contexts/ was not there: all went well, and nothing in it is ever found.
 * Deeper down people may keep what they like. */
bool cg_fs_is_misplaced(const char *path);
/* Says so in the log, once for each of the last CG_N_MISPLACED names. */
void cg_fs_tell_misplaced(cg_fs *fs, const char *path, int fd);
#endif
