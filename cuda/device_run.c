/* What a slot does: a chunk decoded into blocks, or tiles moved there. */
#include "cuda/device_state.h"

#include "codec/chunk.h"

static cg_status upload(cg_device *d, cg_device_slot *s, size_t n_bytes, size_t plan_bytes)
{
    /* The plan lies right behind the table, here and on the GPU: one copy. */
    const size_t n = (size_t)(s->plan - (uint8_t *)s->table) + plan_bytes;
    int error;
    if ((error = d->calls->memcpy_async(s->chunk_dev, s->memory, n_bytes, s->stream)) != 0 ||
        (error = d->calls->memcpy_async(s->table_dev, s->table, n, s->stream)) != 0)
        return cg_device_error(d, "cudaMemcpyAsync", error, s->stream);
    if ((error = d->calls->memset_async(s->status_dev, 0, sizeof *s->status, s->stream)) != 0)
        return cg_device_error(d, "cudaMemsetAsync", error, s->stream);
    return CG_OK;
}

static cg_status launch(cg_device *d, cg_device_slot *s, const cg_cuda_plan *plan,
                        const cg_cuda_blocks *blocks, const void *blob_dev)
{
    int error;
    cg_cuda_decode_params params = {.blob_dev = blob_dev,
                                    .plan_dev = s->plan_dev,
                                    .chunk_dev = s->chunk_dev,
                                    .scratch_dev = s->scratch_dev,
                                    .status_dev = (uint32_t *)s->status_dev,
                                    .blocks = *blocks};
    params.blocks.table_dev = (const int64_t *)s->table_dev;
    if ((error = d->calls->decode(plan, &params, s->stream)) != 0)
        return cg_device_error(d, "a decoding kernel", error, s->stream);
    if ((error = d->calls->memcpy_async(s->status, s->status_dev, sizeof *s->status, s->stream)) !=
        0)
        return cg_device_error(d, "cudaMemcpyAsync", error, s->stream);
    return CG_OK;
}

static cg_status decode(cg_device *d, cg_device_slot *s, size_t n_bytes, const cg_cuda_plan *plan,
                        const cg_cuda_blocks *blocks, const void *blob_dev,
                        const cg_device_mark *mark)
{
    cg_status status = upload(d, s, n_bytes, plan->plan_bytes);
    /* Uploads need not wait for the engine: only blocks are its own. */
    if (status == CG_OK)
        status = cg_device_await(d, s->stream, mark);
    if (status == CG_OK)
        status = launch(d, s, plan, blocks, blob_dev);
    if (status == CG_OK)
        status = cg_device_finish(d, s->stream, s->done);
    /* Pinned, and written by the stream before done. */
    return status == CG_OK ? (cg_status)*s->status : status;
}

cg_status cg_device_decode(cg_device *d, uint32_t slot, size_t n_bytes, const cg_device_run *run,
                           const cg_device_mark *mark)
{
    cg_device_slot *s = &d->slots[slot];
    cg_chunk_header header;
    cg_cuda_blocks blocks;
    cg_cuda_plan plan;
    if (n_bytes > d->memory_bytes)
        return CG_ERR_BUFFER_TOO_SMALL;
    /* Only to know what to ask for: cg_cuda_plan_fill() checks the chunk. */
    cg_status status = cg_chunk_header_parse(s->memory, n_bytes, &header);
    if (status == CG_OK)
        status = cg_device_take_run(d, run, s->table, &blocks);
    if (status != CG_OK)
        return status;
    const bool is_lossy = header.level != CG_L0;
    /* Kernels index bases and strides by the chunk's geometry; the blocks are of the device's. */
    if (!cg_geometry_equal(&header.geometry, &d->config.geometry))
        return CG_ERR_FOREIGN_MODEL;
    if (header.n_tokens != run->n_tokens)
        return CG_ERR_CORRUPT;
    if (is_lossy && d->profile == NULL)
        return CG_ERR_UNSUPPORTED_VERSION;
    const cg_cuda_profile *profile = is_lossy ? d->profile : NULL;
    cg_cuda_request request = cg_cuda_request_all(profile, &header);
    request.token_from = run->from_token;
    request.token_to = run->to_token;
    request.head_from = blocks.head_from;
    request.head_to = blocks.head_from + blocks.n_heads;
    status =
        cg_cuda_plan_fill(profile, s->memory, n_bytes, &request, s->plan, d->plan_bytes, &plan);
    /* Memory was sized when the device was opened; what needs more is the CPU's. */
    if (status == CG_OK && plan.scratch_bytes > d->scratch_bytes)
        status = CG_ERR_BUFFER_TOO_SMALL;
    if (status != CG_OK)
        return status;
    if ((status = cg_device_use(d)) == CG_OK)
        status = decode(d, s, n_bytes, &plan, &blocks, is_lossy ? d->blob_dev : NULL, mark);
    return status;
}

static cg_status write_tiles(cg_device *d, cg_device_slot *s, const cg_cuda_blocks_copy *copy,
                             const cg_device_mark *mark)
{
    cg_status status = cg_device_await(d, s->stream, mark);
    const int error = status == CG_OK ? d->calls->blocks_copy(copy, s->stream) : 0;
    if (error != 0)
        status = cg_device_error(d, "the copying kernel", error, s->stream);
    return status == CG_OK ? cg_device_finish(d, s->stream, s->done) : status;
}

cg_status cg_device_write(cg_device *d, uint32_t slot, const cg_device_tiles *tiles,
                          const cg_device_run *run, const cg_device_mark *mark)
{
    cg_device_slot *s = &d->slots[slot];
    const cg_geometry *g = &d->config.geometry;
    if (tiles->n_layers > g->n_layers || tiles->first_layer > g->n_layers - tiles->n_layers ||
        tiles->n_planes > CG_N_PLANES || tiles->first_plane > CG_N_PLANES - tiles->n_planes)
        return CG_ERR_INVALID_ARGUMENT;
    cg_cuda_blocks_copy copy = cg_device_copy_of(d, run, tiles, (char *)s->memory, true);
    cg_status status = cg_device_take_run(d, run, s->table, &copy.blocks);
    copy.blocks.table_dev = s->table; /* pinned: kernels read it where it is */
    if (status != CG_OK)
        return status;
    if ((status = cg_device_use(d)) == CG_OK)
        status = write_tiles(d, s, &copy, mark);
    return status;
}
