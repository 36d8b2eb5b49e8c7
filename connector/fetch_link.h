/* connector/fetch_link.h - what a plan of reads knows of time: how fast the link is now, since when
 * it is silent, and when a load must be done.
 *
 * No I/O, no clock, no lock. Times are nanoseconds of any one clock.
 * Threads: plain data; the owner locks.
 */
#ifndef CG_CONNECTOR_FETCH_LINK_H
#define CG_CONNECTOR_FETCH_LINK_H
#include "connector/fetch_state.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The link's speed; 0: unknown. If no read has ended for longer than the estimate explains, this is
 * an upper bound, and *is_bound_out is true: bytes under way over the time waited. */
double cg_fetch_link_bps(const cg_fetch_plan *plan, const cg_speeds *speeds, uint64_t now_ns,
                         bool *is_bound_out);
/* When a fetch ends because nothing arrives: after its deadline for half a second, or for twice the
 * time that all bytes under way should take over the link as it was measured. UINT64_MAX: it is not
 * under way, or has all it must have. */
uint64_t cg_fetch_silent_ns(const cg_fetch_plan *plan, const cg_fetch *fetch);
/* What recomputing a fetch's tokens from a chunk on takes; 0 where its speed is unknown. */
double cg_fetch_rest_ns(const cg_fetch *fetch, uint32_t chunk_index, const cg_speeds *speeds);
/* What recomputing the tokens takes that are recomputed in any case: nothing from wanted_end on
 * is loaded. 0 where its speed is unknown. */
double cg_fetch_lost_ns(const cg_fetch *fetch, const cg_speeds *speeds);
/* When a load must be done: by its deadline, less cg_fetch_lost_ns(). */
uint64_t cg_fetch_due_ns(const cg_fetch *fetch, const cg_speeds *speeds);

#ifdef __cplusplus
}
#endif
#endif
