/* connector/fetch_exit.h - what takes too long: reads that hang, fetches whose time is over, and
 * fetches of which recomputing a part is faster than loading it.
 *
 * Rules 5 to 7 of connector/fetch_plan.h. No I/O, clock or lock in here either.
 * Threads: plain data; the owner locks.
 */
#ifndef CG_CONNECTOR_FETCH_EXIT_H
#define CG_CONNECTOR_FETCH_EXIT_H
#include "connector/fetch_plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Sets when a fetch that is to be added at now_ns ends: half a second after its budget. A load may
 * be planned to take longer, because recomputing takes longer still. It has twice the time that
 * reading what must arrive should take, and with min_delay all that it needs; but after its budget,
 * or of a load that has none left, after twice that time, only as long as bytes arrive
 * (cg_fetch_silent_ns()). */
void cg_fetch_set_end(cg_fetch *fetch, const cg_speeds *speeds, uint64_t now_ns);
/* A read whose time is over; NULL: none. Each is returned once. It is under way until
 * cg_fetch_read_ended(). */
const cg_fetch_read *cg_fetch_give_up(cg_fetch_plan *plan, uint64_t now_ns);
/* A fetch whose time is over; NULL: none. Each is returned once. Its reads are given up. The caller
 * fails it at cg_fetch_first_missing(), so that no others are begun, and it settles once what has
 * arrived is decoded.
 * The end may move, half a second at a time, but no more once the engine would have recomputed this
 * load and all others put off before it. It moves as long as bytes arrive and giving it up costs
 * more than it gains: what is missing comes sooner than the engine would compute it, or later by
 * less than others would be held up, or one that is in time would be late; and as long as none
 * arrive and the engine is busy. */
cg_fetch *cg_fetch_overdue(cg_fetch_plan *plan, const cg_speeds *speeds, uint64_t now_ns);
/* A fetch that would be late, and of which recomputing from *chunk_index_out on is faster; NULL:
 * none. The caller fails it there. Of many chunks nothing is looked at anew as long as a plan of
 * them stands, unless check_ns is due or a fetch came. */
cg_fetch *cg_fetch_hopeless(cg_fetch_plan *plan, const cg_speeds *speeds, uint64_t now_ns,
                            uint32_t *chunk_index_out);
/* How many fetches are not settled yet, and what is still to come until all have their floors. */
cg_wanted cg_fetch_wanted(const cg_fetch_plan *plan);
/* The time for the decoding that all fetches still need, on all threads. */
double cg_fetch_undecoded_ns(const cg_fetch_plan *plan, const cg_speeds *speeds);

/* What is given up the engine computes, one prompt after the other: however it mixes them, all of
 * them take as long. So it matters what it has to compute before. */

/* The owner was told: at now_ns the engine has ns of it to compute, with what all fetches have lost
 * that are cg_fetch_engine_known(). */
void cg_fetch_engine_told(cg_fetch_plan *plan, double ns, uint64_t now_ns);
/* The engine gets so much more, of which the owner will be told. */
void cg_fetch_engine_add(cg_fetch_plan *plan, double ns, uint64_t now_ns);
/* It gets what a fetch has lost that is about to be removed. Returns how long it takes that, for
 * cg_fetch_engine_known(). */
uint64_t cg_fetch_engine_lost(cg_fetch_plan *plan, const cg_fetch *fetch, const cg_speeds *speeds,
                              uint64_t now_ns);
/* Who tells the owner of the engine has heard of the end of a fetch that has lost that, and counts
 * it from now on. */
void cg_fetch_engine_known(cg_fetch_plan *plan, uint64_t lost_ns);
/* How long the engine will take for what it has and what the fetches of the plan have lost. */
double cg_fetch_engine_ns(const cg_fetch_plan *plan, const cg_speeds *speeds, uint64_t now_ns);

#ifdef __cplusplus
}
#endif
#endif
