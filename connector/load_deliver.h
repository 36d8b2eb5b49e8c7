/* connector/load_deliver.h - verifies and decodes a chunk that arrived, and delivers it into the
 * engine's blocks, by jobs of the pool.
 *
 * One task verifies the chunk. Then there is a task for each layer group and plane, which
 * decodes into the thread's memory and copies from there what the load asked for. If the blocks are
 * in a GPU's memory, a chunk is one task, on a thread of the GPU: connector/load_gpu.h.
 * Threads: see the function.
 */
#ifndef CG_CONNECTOR_LOAD_DELIVER_H
#define CG_CONNECTOR_LOAD_DELIVER_H
#include "connector/load_state.h"

/* Without the lock: hands a chunk that cg_load_decode_begun() returned to the pool. Its last job
 * calls cg_load_decode_ended(). */
void cg_load_submit(cg_load_chunk *chunk);
#endif
