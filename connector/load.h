/* connector/load.h - what a connector that closes asks of its loads. The load itself is reached
 * through cachegen.h.
 */
#ifndef CG_CONNECTOR_LOAD_H
#define CG_CONNECTOR_LOAD_H
#include "connector/runtime.h"

/* With the lock held: all loads are asked to end. */
void cg_loads_cancel(cg_runtime *runtime);
/* With the lock held: whether one into blocks in the host's memory is under way. */
bool cg_loads_on_host(const cg_runtime *runtime);
#endif
