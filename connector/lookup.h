/* connector/lookup.h - what a connector that closes asks of its look-ups. The look-up itself is
 * reached through cachegen.h.
 */
#ifndef CG_CONNECTOR_LOOKUP_H
#define CG_CONNECTOR_LOOKUP_H
#include "connector/runtime.h"

/* With the lock held: look-ups that wait in the queue end as misses. */
void cg_lookups_cancel(cg_runtime *runtime);
#endif
