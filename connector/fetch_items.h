/* connector/fetch_items.h - what the planner of connector/extents.h is asked: which chunks of which
 * loads, in which order, and what time there is for them.
 *
 * No I/O, no clock, no lock. Times are nanoseconds of any one clock.
 * Threads: plain data; the owner locks.
 */
#ifndef CG_CONNECTOR_FETCH_ITEMS_H
#define CG_CONNECTOR_FETCH_ITEMS_H
#include "connector/fetch_state.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The fetches in the order in which what must arrive is read, that of their deadlines, but those
 * that will be late in any case go last: the first (fetch is NULL), or the one after it; NULL: it
 * is the last. */
cg_fetch *cg_fetch_after(const cg_fetch_plan *plan, const cg_fetch *fetch);

/* Of prompts that are being looked up, here and elsewhere. */
double cg_fetch_expected_tokens(const cg_fetch_plan *plan, uint64_t now_ns);
/* Sets what is to be planned, as things are now: input, items and refs. Sets of the fetches whether
 * they are late, what the controller chooses of their levels, and when decoding must start. */
void cg_fetch_set_input(cg_fetch_plan *plan, const cg_speeds *speeds, uint64_t now_ns);

#ifdef __cplusplus
}
#endif
#endif
