/* fusefs/drop.h - carries out one step of fusefs/evict.h on the disk.
 *
 * Nothing is cut in place, so readers that have a file open keep it. The part of a nested file that
 * stays is copied to a new file; on file systems that share extents the copy takes no new space.
 * The new file gets the names of the coarser levels, one after another and each atomically. Then
 * the finer names go. So each level that stays can be found all the time, and a kill in between
 * leaves whole chunks. Two daemons that do the same step at once do no harm: a name is changed only
 * while it still shows the file that was surveyed. A survey may be half an hour old, and inode
 * numbers come back. So a file is left alone that was used or changed since, and it is cut where
 * its own header says that the level ends.
 * Threads: each call stands alone.
 */
#ifndef CG_FUSEFS_DROP_H
#define CG_FUSEFS_DROP_H
#include "fusefs/evict.h"
#include "fusefs/staging.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Cuts the file behind the level finest_left, or removes it (finest_left: CG_N_LEVELS); with the
 * last file of a chunk its folder goes, too. 0 or an errno value. EALREADY: the names are gone or
 * show other files by now; somebody else did the step, and nothing was done. ESTALE: the file was
 * used or changed since the survey, or is another one of its number; nothing was done. */
int cg_drop(cg_staging *staging, int root_fd, const cg_survey *survey, const cg_object_file *file,
            uint8_t finest_left);

#ifdef __cplusplus
}
#endif
#endif
