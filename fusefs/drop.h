/* fusefs/drop.h - carries out one step of fusefs/evict.h on the disk.
 *
 * Nothing is cut in place, so readers that have a file open keep it. The part of a nested file that
 * stays is copied to a new file; on file systems that share extents the copy takes no new space.
 * The new file gets the names of the coarser levels, one after another and each atomically. Then
 * the finer names go. So each level that stays can be found all the time, and a kill in between
 * leaves whole chunks. Two daemons that do the same step at once do no harm: a name is changed only
 * while it still shows the file that was surveyed.
 * Threads: each call stands alone.
 */
#ifndef CG_FUSEFS_DROP_H
#define CG_FUSEFS_DROP_H
#include "fusefs/evict.h"
#include "fusefs/staging.h"

/* Cuts the file behind the level finest_left, or removes it (finest_left: CG_N_LEVELS); with the
 * last file of a chunk its folder goes, too. 0 or an errno value. That the file is another one by
 * now is no error. */
int cg_drop(cg_staging *staging, int root_fd, const cg_survey *survey, const cg_object_file *file,
            uint8_t finest_left);
#endif
