/* connector/looker.h - the thread that asks the store for look-ups, those of many prompts at once.
 *
 * Threads: one, which lookup.c starts; the other functions want the runtime's lock.
 */
#ifndef CG_CONNECTOR_LOOKER_H
#define CG_CONNECTOR_LOOKER_H
#include "connector/lookup_state.h"

/* The thread's body; the argument is the cg_runtime. */
void *cg_looker_run(void *runtime);
/* With the lock held: loads under way expect a load of so many tokens more, or fewer. */
void cg_looker_expect(cg_runtime *rt, int64_t n_tokens);
/* With the lock held: ends a look-up. What was found of it is its hit and its plan, and what is not
 * loaded is the engine's. */
void cg_looker_finish(cg_runtime *rt, cachegen_lookup *l);
/* With the lock held: ends a look-up as a miss, whatever was found: the store is silent, or asking
 * it is not worth the wait any more. */
void cg_looker_skip(cg_runtime *rt, cachegen_lookup *l);
#endif
