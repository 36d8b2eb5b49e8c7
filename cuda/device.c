/* Blocks that were registered, and the table of functions that a connector finds. */
#include "cuda/device_state.h"

static const char *device_failure(cg_device *d)
{
    return atomic_load(&d->is_broken) ? d->reason : NULL;
}

static bool is_aligned(const cg_device_blocks *b, uint32_t n_layers)
{
    /* All are multiples of a power of two where their bits together are. */
    uint64_t all = (uint64_t)b->block_stride;
    for (int plane = 0; plane < CG_N_PLANES; plane++)
        all |= (uint64_t)b->offset_bytes[plane] | (uint64_t)b->head_stride[plane] |
               (uint64_t)b->token_stride[plane];
    for (uint32_t i = 0; i < n_layers; i++)
        all |= (uint64_t)(uintptr_t)b->base[i];
    return all % CG_CUDA_COPY_UNIT_BYTES == 0;
}

/* base_dev: the array that kernels look layers up in. It is there when this returns: the caller's
 * may go. */
static cg_status upload_bases(cg_device *d, void *const *base, void **base_dev_out)
{
    const size_t n_bytes = d->config.geometry.n_layers * sizeof base[0];
    int error;
    if ((error = d->calls->malloc(base_dev_out, n_bytes)) != 0)
        return cg_device_error(d, "cudaMalloc", error, NULL);
    if ((error = d->calls->memcpy_async(*base_dev_out, base, n_bytes, d->read_stream)) == 0)
        error = d->calls->stream_synchronize(d->read_stream);
    if (error == 0)
        return CG_OK;
    const cg_status status = cg_device_error(d, "cudaMemcpyAsync", error, d->read_stream);
    d->calls->free(*base_dev_out);
    return status;
}

/* With the lock held. */
static cg_status append_blocks(cg_device *d, const cg_cuda_blocks *blocks, uint32_t *blocks_id_out)
{
    const uint32_t n = atomic_load(&d->n_blocks);
    if (n == CG_DEVICE_MAX_BLOCKS)
        return CG_ERR_NO_MEMORY;
    /* Written before it is counted: cg_device_take_run() takes no lock. */
    d->blocks[n] = *blocks;
    *blocks_id_out = n;
    atomic_store(&d->n_blocks, n + 1);
    return CG_OK;
}

cg_status cg_device_add_blocks(cg_device *d, const cg_device_blocks *given, uint32_t *blocks_id_out)
{
    const int64_t element_bytes = (int64_t)cg_dtype_bytes(d->config.geometry.dtype);
    cg_cuda_blocks blocks = {.block_stride = given->block_stride,
                             .block_tokens = given->block_tokens,
                             .n_blocks = given->n_blocks,
                             .head_from = given->first_head,
                             .n_heads = given->n_heads};
    const uint32_t n_kv_heads = d->config.geometry.n_kv_heads;
    void *base_dev = NULL;
    int before;
    if (!is_aligned(given, d->config.geometry.n_layers) || given->block_tokens == 0 ||
        given->n_heads == 0 || given->n_heads > n_kv_heads ||
        given->first_head > n_kv_heads - given->n_heads)
        return CG_ERR_INVALID_ARGUMENT;
    for (int plane = 0; plane < CG_N_PLANES; plane++) {
        blocks.offset_bytes[plane] = given->offset_bytes[plane];
        blocks.head_stride[plane] = given->head_stride[plane];
        blocks.token_stride[plane] = given->token_stride[plane];
        blocks.dim_stride[plane] = element_bytes;
    }
    cg_status status = cg_device_enter(d, &before);
    if (status == CG_OK && (status = upload_bases(d, given->base, &base_dev)) == CG_OK) {
        blocks.base_dev = base_dev;
        pthread_mutex_lock(&d->lock);
        status = append_blocks(d, &blocks, blocks_id_out);
        pthread_mutex_unlock(&d->lock);
        if (status != CG_OK)
            d->calls->free(base_dev);
    }
    cg_device_leave(d, before);
    return status;
}

static void *slot_memory(cg_device *d, uint32_t slot, size_t *n_bytes_out)
{
    *n_bytes_out = d->memory_bytes;
    return d->slots[slot].memory;
}

static const cg_device_functions FUNCTIONS = {.table_version = CG_DEVICE_TABLE_VERSION,
                                              .open = cg_device_open,
                                              .close = cg_device_close,
                                              .failure = device_failure,
                                              .add_blocks = cg_device_add_blocks,
                                              .mark = cg_device_mark_make,
                                              .mark_free = cg_device_mark_drop,
                                              .mark_is_past = cg_device_mark_is_past,
                                              .slot_memory = slot_memory,
                                              .decode = cg_device_decode,
                                              .write = cg_device_write,
                                              .read = cg_device_read,
                                              .hold = cg_device_hold,
                                              .read_wait = cg_device_read_wait,
                                              .read_release = cg_device_read_release,
                                              .take_projector = cg_device_take_projector,
                                              .return_projector = cg_device_return_projector};

cg_device_entry cachegen_cuda_functions __attribute__((visibility("default")));

const cg_device_functions *cachegen_cuda_functions(uint32_t table_version)
{
    return table_version == CG_DEVICE_TABLE_VERSION ? &FUNCTIONS : NULL;
}
