/* fusefs/lease.h - work that one daemon of a store at a time should do, on whatever host.
 *
 * A lease is a file in .cachegenfs-tmp with the name of its holder's folder. It ends when the
 * holder gives it back or is dead (fusefs/staging.h); there is no time in it. Two who take a dead
 * one's lease at the same moment may both believe that they have it until the next
 * cg_lease_holds(): what is done under a lease must be safe then, and only costs twice. Threads:
 * one at a time for each lease.
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
/* The same, before each step of the work: it asks when a second has passed since *seen_s, of
 * CLOCK_MONOTONIC, which begins at 0. So who hung in a step asks before the next one. */
bool cg_lease_still_holds(cg_staging *staging, const char *name, int64_t *seen_s);
void cg_lease_give_back(cg_staging *staging, const char *name);

#ifdef __cplusplus
}
#endif
#endif
