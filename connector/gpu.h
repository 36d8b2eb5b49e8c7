/* connector/gpu.h - libcachegen_cuda.so, opened at run time, and the one GPU that a connector uses.
 *
 * Nothing here is CUDA: see codec/device.h. The library is opened when an engine registers blocks
 * in a GPU's memory, and never before: a CUDA context costs hundreds of MiB, and a scheduler's
 * process needs none. It is never closed.
 * The GPU has threads of its own, one for each slot. A thread takes a chunk, prepares it, hands it
 * to the GPU and sleeps until it is done. So as many chunks are under way as there are slots.
 * Others call CUDA in the place of encoders (connector/gpu_projector.h). A GPU that hangs holds the
 * threads that wait for it, in a call that nobody can end. These are its own, those that encode,
 * the one that writes saves, and the one that closes (connector.c). After an error that stays
 * (codec/device.h) the GPU is off until the process ends. Loads into its blocks and saves out of
 * them fail at once, which costs a recompute. Threads: any. It belongs to the process that opened
 * it: a forked child has none.
 */
#ifndef CG_CONNECTOR_GPU_H
#define CG_CONNECTOR_GPU_H
#include "codec/device.h"
#include "connector/config.h"
#include "connector/model.h"
#include "connector/pool.h"

#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { CG_GPU_REASON_BYTES = 256 };

typedef struct cg_gpu {
    const cg_device_functions *functions;
    cg_device *device;
    cg_pool *pool;       /* of n_slots threads */
    cg_pool *projecting; /* a thread a projector, started; NULL: there are none */
    uint32_t ordinal, n_slots, n_copies;
    pid_t pid;
    pthread_mutex_t lock;
    uint64_t free_slots;  /* the lock: bit n: slot n */
    uint32_t n_decoding;  /* the lock: threads that decode on the CPU */
    pthread_cond_t ended; /* one of them */
    uint32_t most_decoding;
} cg_gpu;

/* Opens library and GPU. encodes: this process may encode saves, and not only pass on its heads.
 * On failure *gpu_out is NULL and reason says why. */
cg_status cg_gpu_open(const cg_config *config, const cg_model *model, uint32_t ordinal,
                      bool encodes, cg_gpu **gpu_out, const cg_sentence *reason);
/* Whether this process has opened it. NULL is fine. */
bool cg_gpu_is_ours(const cg_gpu *gpu);
/* Runs what is queued; nothing can be submitted afterwards. NULL is fine. */
void cg_gpu_stop(cg_gpu *gpu);
/* Stops, and gives back all that the GPU holds. In another process than the one that opened it,
 * nothing. NULL is fine. */
void cg_gpu_free(cg_gpu *gpu);

/* For a thread of gpu->pool: takes a free slot. There always is one, as there are as many
 * threads. */
uint32_t cg_gpu_take_slot(cg_gpu *gpu);
void cg_gpu_return_slot(cg_gpu *gpu, uint32_t slot);
/* For a thread of gpu->pool that is to decode on the CPU: waits until fewer do so than the
 * configured `threads`, and takes a turn. There are more slots than an engine can spare CPUs. */
void cg_gpu_begin_decoding(cg_gpu *gpu);
void cg_gpu_end_decoding(cg_gpu *gpu);

#ifdef __cplusplus
}
#endif
#endif
