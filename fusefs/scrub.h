/* fusefs/scrub.h - a mount's scrubber: fusefs/fsck.h over the whole store, once a day.
 *
 * Of all daemons of a store one makes the day's pass: it holds a lease (fusefs/lease.h), and notes
 * at its end when it began (fusefs/stamp.h).
 * Threads: one (cg_fs_scrub() of fusefs/core.h).
 */
#ifndef CG_FUSEFS_SCRUB_H
#define CG_FUSEFS_SCRUB_H
#include "fusefs/core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Makes a pass if one is due. Returns after how many seconds to ask again. */
int64_t cg_scrub_tend(cg_fs *fs);

#ifdef __cplusplus
}
#endif
#endif
