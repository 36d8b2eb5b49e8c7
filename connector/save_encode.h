/* connector/save_encode.h - encodes a chunk of a save, by jobs of the pool.
 *
 * One job weighs the chunk's blocks, a task a layer, where they get steps of their own; a second
 * one encodes. Tasks take no lock, and call no CUDA, which has locks: they have the lowest
 * priority, and may lose the CPU under it. What they count and what fails is in the chunk, for
 * cg_save_end_encode() to take. Threads: the functions are the writer's (connector/writer.h), and
 * want no lock held.
 */
#ifndef CG_CONNECTOR_SAVE_ENCODE_H
#define CG_CONNECTOR_SAVE_ENCODE_H
#include "connector/save_state.h"

/* Lossy levels that are neighbours go to one nested file, which takes no more than its finest level
 * alone. */
bool cg_save_is_nested(const cg_save_chunk *chunk);
/* True: only lossy levels failed, because K or V is not finite, and L0 is to be stored. L0 takes
 * any bits, so this chunk is stored at L0 alone, and the save goes on. */
bool cg_save_is_exact_left(const cg_save_chunk *chunk, cg_status status);
/* Makes the encoder for the chunk's levels, and gives the work to the pool. What fails here is told
 * by cg_save_end_encode(), which follows in any case. */
void cg_save_begin_encode(cg_save_chunk *chunk);
/* Waits until the tasks are over, frees the copy of K and V, and adds to the counters. Returns what
 * failed first. CG_ERR_CANCELLED: the save was given up meanwhile. */
cg_status cg_save_end_encode(cg_save_chunk *chunk);
#endif
