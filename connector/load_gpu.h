/* connector/load_gpu.h - a chunk that arrived, decoded into blocks in a GPU's memory.
 *
 * A thread of the GPU puts the chunk's pieces together in pinned memory, verifies them there, and
 * has the GPU decode them. What the GPU has no kernels for the same thread decodes on the CPU, task
 * by task, and the GPU moves it into the blocks.
 */
#ifndef CG_CONNECTOR_LOAD_GPU_H
#define CG_CONNECTOR_LOAD_GPU_H
#include "connector/load_state.h"

/* The body of a job of the GPU's pool, with one task: all of a chunk. */
void cg_load_gpu_run(cg_job *job, uint32_t task_index, cg_scratch *scratch);
#endif
