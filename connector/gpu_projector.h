/* connector/gpu_projector.h - an encoder's projector (codec/projection.h) on the connector's GPU.
 *
 * Encoders are nice, and CUDA has locks of its own that an engine's launches take, too
 * (connector/pool.h). So an encoder calls nothing of CUDA: threads of the GPU's, which are not
 * nice, do it in its place, and it waits for them by a semaphore. Threads: any; a projector is used
 * by one at a time.
 */
#ifndef CG_CONNECTOR_GPU_PROJECTOR_H
#define CG_CONNECTOR_GPU_PROJECTOR_H
#include "connector/gpu.h"

#include <semaphore.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cg_gpu_projector {
    cg_projector base; /* the encoder's: a copy of the device's, which is put back */
    cg_gpu *gpu;
    cg_projector *of_device;
    cg_job job;
    sem_t is_made;
    /* Of the projection that is under way. */
    const cg_projection *what;
    cg_projected *made;
    cg_status status;
} cg_gpu_projector;

/* room: the caller's, until it is returned. NULL: none is free, and the CPU projects. */
cg_projector *cg_gpu_take_projector(cg_gpu *gpu, cg_gpu_projector *room);
void cg_gpu_return_projector(cg_gpu_projector *taken);

#ifdef __cplusplus
}
#endif
#endif
