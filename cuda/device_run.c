/* What a slot does: a chunk decoded into the engine's blocks, or tiles moved there. */
#include "cuda/device_state.h"

#include "codec/chunk.h"

static cg_status upload(cg_device *d, cg_device_slot *s, size_t n_bytes, size_t plan_bytes)
{
    /* The plan lies right behind the table, here and on the GPU: one copy. */
    const size_t n = (size_t)(s->plan - (uint8_t *)s->table) + plan_bytes;
    const cg_cuda_stream stream = d->upload_stream;
    int error;
    if ((error = d->calls->memcpy_async(s->chunk_dev, s->memory, n_bytes, stream)) != 0 ||
        (error = d->calls->memcpy_async(s->table_dev, s->table, n, stream)) != 0)
        return cg_device_error(d, "cudaMemcpyAsync", error, stream);
    if ((error = d->calls->event_record(s->uploaded, stream)) != 0)
        return cg_device_error(d, "cudaEventRecord", error, stream);
    return CG_OK;
}

cg_status cg_device_decode(cg_device *d, uint32_t slot, size_t n_bytes, const cg_device_run *run,
                           const cg_device_mark *mark)
{
    cg_device_slot *s = &d->slots[slot];
    cg_chunk_header header;
    cg_cuda_blocks blocks;
    cg_device_job job = {.uploaded = s->uploaded};
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
        cg_cuda_plan_fill(profile, s->memory, n_bytes, &request, s->plan, d->plan_bytes, &job.plan);
    /* Memory was sized when the device was opened; what needs more is the CPU's. */
    if (status == CG_OK && job.plan.scratch_bytes > d->scratch_bytes)
        status = CG_ERR_BUFFER_TOO_SMALL;
    if (status != CG_OK)
        return status;
    blocks.table_dev = (const int64_t *)s->table_dev;
    job.params = (cg_cuda_decode_params){.blob_dev = is_lossy ? d->blob_dev : NULL,
                                         .plan_dev = s->plan_dev,
                                         .chunk_dev = s->chunk_dev,
                                         .scratch_dev = s->scratch_dev,
                                         .blocks = blocks};
    if ((status = cg_device_use(d)) != CG_OK)
        return status;
    job.mark = cg_device_mark_is_past(d, mark) ? NULL : mark;
    status = upload(d, s, n_bytes, job.plan.plan_bytes);
    return status == CG_OK ? cg_device_run_job(d, &job) : status;
}

static cg_status write_tiles(cg_device *d, const cg_device_batch *batch,
                             const cg_cuda_blocks_copy *copy, const cg_device_mark *mark)
{
    cg_status status = cg_device_await(d, batch->stream, mark);
    const int error = status == CG_OK ? d->calls->blocks_copy(copy, batch->stream) : 0;
    if (error != 0)
        status = cg_device_error(d, "the copying kernel", error, batch->stream);
    return status == CG_OK ? cg_device_finish(d, batch->stream, batch->done) : status;
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
    if ((status = cg_device_use(d)) == CG_OK) {
        mark = cg_device_mark_is_past(d, mark) ? NULL : mark;
        cg_device_batch *batch = cg_device_take_batch(d, mark);
        status = write_tiles(d, batch, &copy, mark);
        cg_device_return_batch(d, batch);
    }
    return status;
}
