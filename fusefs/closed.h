/* fusefs/closed.h - what is left to do of a file after its last close.
 *
 * The kernel tells of last closes in the background, and has only so many requests there at a
 * time. Reading ahead is among them: while that many closes wait, nobody's reading goes on. So a
 * close waits for nothing. What may take long is left to other threads. A few close the store's
 * files and note uses: on a frozen store either may wait for as long as that lasts. One adopts,
 * which reads all of a profile; of several openers it serves each in turn. Until all is done, the
 * file is one of those that its opener may have open. Only a few uses wait, and others are not
 * noted, so that reading a frozen store takes no descriptors.
 *
 * Without a thread, work is done at once by who brings it.
 * Threads: any; one adopts, any number end what was closed.
 */
#ifndef CG_FUSEFS_CLOSED_H
#define CG_FUSEFS_CLOSED_H
#include "fusefs/fs.h"

enum { CG_CLOSED_MAX_USES = 256 }; /* that wait to be noted */

void cg_closed_init(cg_closed *closed);
/* All its threads have ended. */
void cg_closed_destroy(cg_closed *closed);
/* The threads end when they have done what waits. */
void cg_closed_stop(cg_closed *closed);
/* Takes a file of the store, which has left its node's list (cg_fs_file_leave()). */
void cg_closed_take(cg_fs *fs, cg_fs_file *file);
#endif
