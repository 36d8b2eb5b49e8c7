/* fusefs/stamp.h - when the daemons of a store last did what one of them does once a day: the time
 * of modification of an empty file in the root.
 *
 * All times are of the store's clock (cg_staging_now_s()), so that hosts need not agree.
 * Threads: each call stands alone.
 */
#ifndef CG_FUSEFS_STAMP_H
#define CG_FUSEFS_STAMP_H
#include <stdint.h>
#include <time.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CG_STAMP_SCRUBBED ".cachegenfs-scrubbed" /* when the last pass of fusefs/scrub.h began */
enum { CG_STAMP_EVERY_S = 24 * 3600 };

/* Notes that it was done, at_s or, with 0, now. Where that cannot be noted, it is done again. */
void cg_stamp_set(int root_fd, const char *name, int64_t at_s);
/* In how many seconds it is to be done again: CG_STAMP_EVERY_S after the stamp. 0: now; also where
 * the stamp is of a time to come, since the store's clock was set back. (Not by a minute: a daemon
 * sees the clock as it stood at its last beat.) */
int64_t cg_stamp_due_s(int root_fd, const char *name, int64_t now_s);

#ifdef __cplusplus
}
#endif
#endif
