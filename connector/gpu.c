#include "connector/gpu.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PATH_BYTES = 4096, MOST_COPIES = 4096, MOST_PROJECTORS = 8 };
/* Slots that are not configured: the fewest that keep the batches of large chunks busy, and more of
 * small ones, up to as many K and V. */
enum { LEAST_SLOTS = 8, MOST_SLOTS = 32, SLOTS_BYTES = 256 << 20 };
static const char DEFAULT_NAME[] = "libcachegen_cuda.so";

/* The library's path where it lies beside this one; else its name, for the linker's search path. */
static void find_library(const cg_config *config, char *path_out, size_t path_bytes)
{
    Dl_info self;
    const char *slash = NULL;
    if (config->gpu_library != NULL) {
        snprintf(path_out, path_bytes, "%s", config->gpu_library);
        return;
    }
    /* The constant lies in this library, so its address tells where that was loaded from. */
    if (dladdr((const void *)DEFAULT_NAME, &self) != 0 && self.dli_fname != NULL)
        slash = strrchr(self.dli_fname, '/');
    if (slash != NULL) {
        const int n = snprintf(path_out, path_bytes, "%.*s/%s", (int)(slash - self.dli_fname),
                               self.dli_fname, DEFAULT_NAME);
        if (n > 0 && (size_t)n < path_bytes && access(path_out, F_OK) == 0)
            return;
    }
    snprintf(path_out, path_bytes, "%s", DEFAULT_NAME);
}

static const cg_device_functions *open_library(const cg_config *config, const cg_sentence *reason)
{
    char path[PATH_BYTES];
    find_library(config, path, sizeof path);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library == NULL) {
        cg_sentence_say(reason, CG_ERR_UNSUPPORTED, "%s", dlerror());
        return NULL;
    }
    cg_device_entry *entry;
    *(void **)&entry = dlsym(library, CG_DEVICE_ENTRY_NAME); /* as POSIX has it */
    const cg_device_functions *functions = entry != NULL ? entry(CG_DEVICE_TABLE_VERSION) : NULL;
    if (functions == NULL)
        cg_sentence_say(reason, CG_ERR_UNSUPPORTED, "%.200s is of another version", path);
    return functions;
}

/* K and V of a chunk. */
static uint64_t raw_bytes_of(const cg_config *config, const cg_model *model)
{
    return cg_geometry_elements(&model->geometry, config->chunk_tokens) *
           cg_dtype_bytes(model->geometry.dtype);
}

static uint32_t count_slots(const cg_config *config, const cg_model *model)
{
    const uint64_t n = SLOTS_BYTES / raw_bytes_of(config, model);
    return config->gpu_slots > 0 ? config->gpu_slots
           : n < LEAST_SLOTS     ? LEAST_SLOTS
           : n > MOST_SLOTS      ? MOST_SLOTS
                                 : (uint32_t)n;
}

/* Started here, and not by the first encoder: threads are as nice as the one that starts them. */
static void start_projecting(const cg_config *config, uint32_t n_projectors, cg_gpu *gpu)
{
    cg_projector *one = gpu->functions->take_projector(gpu->device);
    if (one == NULL)
        return; /* profiles that have none are many */
    gpu->functions->return_projector(gpu->device, one);
    if (cg_pool_new(n_projectors, 0, config->cpus, config->n_cpus, &gpu->projecting) == CG_OK &&
        cg_pool_start(gpu->projecting) != CG_OK) {
        cg_pool_free(gpu->projecting);
        gpu->projecting = NULL;
    }
}

static cg_status open_device(const cg_config *config, const cg_model *model, bool encodes,
                             cg_gpu *gpu, const cg_sentence *reason)
{
    const uint32_t n_projectors = config->read_only || !encodes       ? 0
                                  : config->threads < MOST_PROJECTORS ? config->threads
                                                                      : MOST_PROJECTORS;
    const uint64_t n_copies =
        ((uint64_t)config->gpu_staging_mib << 20) / raw_bytes_of(config, model);
    if (!config->read_only)
        gpu->n_copies = n_copies < 1             ? 1
                        : n_copies < MOST_COPIES ? (uint32_t)n_copies
                                                 : MOST_COPIES;
    gpu->free_slots = gpu->n_slots < 64 ? (UINT64_C(1) << gpu->n_slots) - 1 : UINT64_MAX;
    if ((gpu->functions = open_library(config, reason)) == NULL)
        return CG_ERR_UNSUPPORTED;
    const cg_device_config device = {.ordinal = gpu->ordinal,
                                     .profile = model->profile,
                                     .geometry = model->geometry,
                                     .chunk_tokens = config->chunk_tokens,
                                     .n_slots = gpu->n_slots,
                                     .n_copies = gpu->n_copies,
                                     .n_projectors = n_projectors};
    const cg_status status =
        gpu->functions->open(&device, &gpu->device, reason->text, reason->bytes);
    if (status == CG_OK)
        start_projecting(config, n_projectors, gpu);
    return status;
}

cg_status cg_gpu_open(const cg_config *config, const cg_model *model, uint32_t ordinal,
                      bool encodes, cg_gpu **gpu_out, const cg_sentence *reason)
{
    *gpu_out = NULL;
    cg_sentence_say(reason, CG_OK, "%s", cg_strerror(CG_ERR_NO_MEMORY));
    cg_gpu *gpu = calloc(1, sizeof *gpu);
    if (gpu == NULL)
        return CG_ERR_NO_MEMORY;
    pthread_mutex_init(&gpu->lock, NULL);
    pthread_cond_init(&gpu->ended, NULL);
    gpu->most_decoding = config->threads;
    gpu->pid = getpid();
    gpu->ordinal = ordinal;
    gpu->n_slots = count_slots(config, model);
    cg_status status = cg_pool_new(gpu->n_slots, 0, config->cpus, config->n_cpus, &gpu->pool);
    if (status == CG_OK)
        status = open_device(config, model, encodes, gpu, reason);
    if (status != CG_OK) {
        cg_gpu_free(gpu);
        return status;
    }
    cg_sentence_say(reason, CG_OK, "%s", "");
    *gpu_out = gpu;
    return CG_OK;
}

bool cg_gpu_is_ours(const cg_gpu *gpu)
{
    return gpu != NULL && gpu->pid == getpid();
}

void cg_gpu_stop(cg_gpu *gpu)
{
    if (!cg_gpu_is_ours(gpu))
        return;
    cg_pool_stop(gpu->pool);
    cg_pool_stop(gpu->projecting);
}

void cg_gpu_free(cg_gpu *gpu)
{
    if (!cg_gpu_is_ours(gpu))
        return; /* threads and CUDA's context are the parent's */
    cg_pool_free(gpu->pool);
    cg_pool_free(gpu->projecting);
    if (gpu->device != NULL)
        gpu->functions->close(gpu->device);
    pthread_cond_destroy(&gpu->ended);
    pthread_mutex_destroy(&gpu->lock);
    free(gpu);
}

uint32_t cg_gpu_take_slot(cg_gpu *gpu)
{
    pthread_mutex_lock(&gpu->lock);
    const uint32_t slot = (uint32_t)__builtin_ctzll(gpu->free_slots);
    /* Clears the lowest bit that is set, which is the slot's. */
    gpu->free_slots &= gpu->free_slots - 1;
    pthread_mutex_unlock(&gpu->lock);
    return slot;
}

void cg_gpu_return_slot(cg_gpu *gpu, uint32_t slot)
{
    pthread_mutex_lock(&gpu->lock);
    gpu->free_slots |= UINT64_C(1) << slot;
    pthread_mutex_unlock(&gpu->lock);
}

void cg_gpu_begin_decoding(cg_gpu *gpu)
{
    pthread_mutex_lock(&gpu->lock);
    while (gpu->n_decoding >= gpu->most_decoding)
        pthread_cond_wait(&gpu->ended, &gpu->lock);
    gpu->n_decoding++;
    pthread_mutex_unlock(&gpu->lock);
}

void cg_gpu_end_decoding(cg_gpu *gpu)
{
    pthread_mutex_lock(&gpu->lock);
    gpu->n_decoding--;
    pthread_cond_signal(&gpu->ended);
    pthread_mutex_unlock(&gpu->lock);
}
