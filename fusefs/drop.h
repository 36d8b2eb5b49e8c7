/* fusefs/drop.h - one step of fusefs/evict.h on the disk.
 *
 * Readers that have a file open keep it: nothing is cut in place. The part of a nested file that
 * stays is copied to a new one (on file systems that share extents it takes no new space), which
 * gets the names of the coarser levels, one after another and each atomically; then the finer names
 * go. So each level that stays can be found all the time, and a kill in between leaves whole
 * chunks. Two daemons that do the same step at once do no harm: names are changed only while they
 * are the survey's file.
 */
#ifndef CG_FUSEFS_DROP_H
#define CG_FUSEFS_DROP_H
#include "fusefs/evict.h"
#include "fusefs/staging.h"

/* Cuts the file behind a level, or removes it (finest_left: CG_N_LEVELS), and with the last file of
 * a chunk the chunk's folder. 0 or an errno value; a file that is another one by now is no
 * error. */
int cg_drop(cg_staging *staging, int root_fd, const cg_survey *survey, const cg_object_file *file,
            uint8_t finest_left);
#endif
