#include "connector/handle.h"

#include "connector/clock.h"

#include <stdio.h>
#include <stdlib.h>

uint64_t cg_handle_retry_ns(const cachegen *c, cg_status status, uint64_t waited_ns)
{
    const uint64_t retry_ns = cg_ms(c->config->retry_ms), least_ns = cg_ms(1000);
    if (waited_ns < least_ns) /* as where no more reads can be begun */
        waited_ns = least_ns;
    return status == CG_ERR_TIMED_OUT && waited_ns < retry_ns / 2 ? 2 * waited_ns : retry_ns;
}

cg_gpu *cg_handle_gpu(cachegen *c)
{
    cg_gpu *gpu = atomic_load(&c->gpu);
    return cg_gpu_is_ours(gpu) && atomic_load(&c->gpu_state) == CACHEGEN_GPU_ON ? gpu : NULL;
}

cg_status cg_handle_open_gpu(cachegen *c, uint32_t ordinal, bool encodes, cg_gpu **gpu_out)
{
    cg_gpu *gpu = NULL;
    pthread_mutex_lock(&c->gpu_lock);
    if (atomic_load(&c->gpu_state) == CACHEGEN_GPU_UNUSED) {
        const cg_sentence reason = {c->gpu_reason, sizeof c->gpu_reason};
        const bool is_open =
            cg_gpu_open(c->config, &c->model, ordinal, encodes, &gpu, &reason) == CG_OK;
        atomic_store(&c->gpu, gpu);
        atomic_store(&c->gpu_state, is_open ? CACHEGEN_GPU_ON : CACHEGEN_GPU_OFF);
    }
    /* Asked whoever has opened it: it may be off by now, or of the process before a fork(). */
    gpu = cg_handle_gpu(c);
    pthread_mutex_unlock(&c->gpu_lock);
    *gpu_out = gpu;
    return gpu != NULL && gpu->ordinal == ordinal ? CG_OK : CG_ERR_UNSUPPORTED;
}

void cg_handle_check_gpu(cachegen *c)
{
    pthread_mutex_lock(&c->gpu_lock);
    const cg_gpu *gpu = cg_handle_gpu(c);
    const char *reason = gpu != NULL ? gpu->functions->failure(gpu->device) : NULL;
    if (reason != NULL) {
        snprintf(c->gpu_reason, sizeof c->gpu_reason, "%s", reason);
        atomic_store(&c->gpu_state, CACHEGEN_GPU_OFF);
    }
    pthread_mutex_unlock(&c->gpu_lock);
}

void cg_handle_free(cachegen *c)
{
    cg_gpu_free(atomic_load(&c->gpu)); /* before the profile, which it uses */
    for (int i = 0; i < CG_MAX_KV_LAYOUTS; i++)
        free(atomic_load(&c->layouts[i]));
    cg_gather_free(atomic_load(&c->gather));
    cg_store_free(c->store);
    cg_model_destroy(&c->model);
    cg_config_free(c->config);
    pthread_mutex_destroy(&c->gpu_lock);
    free(c);
}
