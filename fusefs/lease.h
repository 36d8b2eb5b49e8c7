/* fusefs/lease.h - work that only one daemon of a store should do at a time, whatever hosts they
 * run on.
 *
 * A lease is a file in .cachegenfs-tmp that holds the name of its holder's folder. It ends when the
 * holder gives it back or is dead (fusefs/staging.h); there is no time in it. Two daemons that take
 * a dead one's lease at the same moment may both believe that they have it, until the next
 * cg_lease_holds(). So what is done under a lease must be safe if two do it, and only cost twice.
 * Threads: one at a time for each lease.
 */
#ifndef CG_FUSEFS_LEASE_H
#define CG_FUSEFS_LEASE_H
#include "fusefs/staging.h"

#ifdef __cplusplus
extern "C" {
#endif

/* False: somebody else has it, or the store cannot tell. */
bool cg_lease_take(cg_staging *staging, const char *name);
/* Whether it is still ours. */
bool cg_lease_holds(cg_staging *staging, const char *name);
/* The same, for the time before each step of the work. It looks only when a second has passed since
 * *seen_s (CLOCK_MONOTONIC; begin with 0). So whoever hung in a step looks before the next one. */
bool cg_lease_still_holds(cg_staging *staging, const char *name, int64_t *seen_s);
void cg_lease_give_back(cg_staging *staging, const char *name);

#ifdef __cplusplus
}
#endif
#endif
