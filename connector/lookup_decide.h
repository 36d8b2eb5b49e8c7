/* connector/lookup_decide.h - from the chunks that were found of a prompt to what is loaded of
 * them: hit and plan.
 *
 * Threads: wants the runtime's lock.
 */
#ifndef CG_CONNECTOR_LOOKUP_DECIDE_H
#define CG_CONNECTOR_LOOKUP_DECIDE_H
#include "connector/lookup_state.h"

/* With the lock held: levels, cut, hit and plan from the chunks that were found; what is not loaded
 * is the engine's. */
void cg_lookup_decide(cg_runtime *rt, cachegen_lookup *l);
#endif
