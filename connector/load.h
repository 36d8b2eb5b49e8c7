/* connector/load.h - what a connector that closes asks of its loads. Engines reach a load through
 * cachegen.h.
 * Threads: any, as each function says.
 */
#ifndef CG_CONNECTOR_LOAD_H
#define CG_CONNECTOR_LOAD_H
#include "connector/runtime.h"

/* With the runtime's lock held: asks all loads to end. */
void cg_loads_cancel(cg_runtime *runtime);
/* With the runtime's lock held: whether a load into blocks in the host's memory is under way. */
bool cg_loads_on_host(const cg_runtime *runtime);
#endif
