/* connector/save_gather.h - saves of an engine whose ranks have some KV heads each:
 * connector/gather.h.
 *
 * All ranks get the same saves. That of head 0's rank is a save as any other, which waits for the
 * other ranks' heads before it encodes; theirs are done once their heads are passed on.
 * Threads: that of the engine which saves, and where it says so the writer's.
 */
#ifndef CG_CONNECTOR_SAVE_GATHER_H
#define CG_CONNECTOR_SAVE_GATHER_H
#include "connector/save_state.h"

/* Copies this rank's heads of the save's chunks, stored ones, too, out of the blocks and passes
 * them on. With copy_later this only prepares copy_job, for the caller to run, and sets
 * save->table; the save ends with the job. CG_ERR_AGAIN: the memory for it is full. Others: those
 * of cg_gather_send(). gpu: NULL, or whose memory the blocks are in. Then the copies are enqueued,
 * and passed on when they are there; what fails later costs the listener's save. */
cg_status cg_save_send_heads(cachegen_save *save, const cg_gpu *gpu, const cg_kv_layout *layout,
                             const cachegen_save_request *request);

/* For the writer: puts the other ranks' heads into all of the save's chunks, which the CPU or
 * cg_save_take_raw() has copied. CG_ERR_TIMED_OUT: they have not come save_timeout_ms (configured)
 * after the save began, or it was given up. CG_ERR_CANCELLED: a rank had no memory for them. */
cg_status cg_save_gather(cachegen_save *save);
/* For the writer: what has come of other ranks for the save, and for those before it, is of no more
 * use. */
void cg_save_drop_heads(const cachegen_save *save);
#endif
