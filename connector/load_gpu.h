/* connector/load_gpu.h - decodes a chunk that arrived into blocks in a GPU's memory.
 *
 * A thread of the GPU puts the chunk's pieces together in pinned memory, verifies them there, and
 * has the GPU decode them. If the GPU has no kernels for the chunk, the same thread decodes it on
 * the CPU, task by task, and the GPU moves the result into the blocks.
 * Threads: that of the GPU's pool which runs the job.
 */
#ifndef CG_CONNECTOR_LOAD_GPU_H
#define CG_CONNECTOR_LOAD_GPU_H
#include "connector/load_state.h"

/* The body of a job of the GPU's pool, with one task: all of a chunk. */
void cg_load_gpu_run(cg_job *job, uint32_t task_index, cg_scratch *scratch);
#endif
