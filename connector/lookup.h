/* connector/lookup.h - what a connector that closes asks of its look-ups. Engines reach a look-up
 * through cachegen.h.
 * Threads: any, as the function says.
 */
#ifndef CG_CONNECTOR_LOOKUP_H
#define CG_CONNECTOR_LOOKUP_H
#include "connector/runtime.h"

/* With the runtime's lock held: ends look-ups that wait in the queue as misses. */
void cg_lookups_cancel(cg_runtime *runtime);
#endif
