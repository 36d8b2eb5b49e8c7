#include "connector/load_gpu.h"

#include "connector/clock.h"
#include "connector/load_verify.h"

#include <stdlib.h>

static cg_load_chunk *chunk_of(cg_job *job)
{
    return (cg_load_chunk *)((char *)job - offsetof(cg_load_chunk, job));
}

static bool is_wanted(cg_load_chunk *chunk)
{
    cg_runtime *rt = chunk->load->op.runtime;
    pthread_mutex_lock(&rt->lock);
    const bool wanted = cg_load_wants(chunk);
    pthread_mutex_unlock(&rt->lock);
    return wanted;
}

static cg_device_run run_of(const cg_load_chunk *chunk)
{
    const cachegen_load *load = chunk->load;
    const cg_plan_chunk *planned = &load->plan->chunks[chunk->index];
    const uint32_t first = planned->first_token, n = planned->sizes.n_tokens;
    return (cg_device_run){.blocks_id = load->layout->gpu_blocks_id,
                           .table = load->table,
                           .n_table = load->n_blocks,
                           .first_token = first,
                           .n_tokens = n,
                           .from_token = load->from_token > first ? load->from_token - first : 0,
                           .to_token = load->to_token < first + n ? load->to_token - first : n};
}

static cg_status verify(cg_load_chunk *chunk, const uint8_t *bytes, size_t n_bytes,
                        cg_chunk *verified_out)
{
    const cachegen_load *load = chunk->load;
    const uint8_t level = load->fetch.chunks[chunk->index].level;
    return cg_load_verify(&load->op.connector->model, load->plan, chunk->index, level, bytes,
                          n_bytes, &chunk->worst_level, verified_out);
}

/* A thread's turn to decode passes to others while the GPU waits for the engine, which may take
 * long. Otherwise it keeps it, so that the chunks that came first are done first. */
static cg_status write_tiles(const cg_load_chunk *chunk, cg_gpu *gpu, uint32_t slot,
                             const cg_device_tiles *tiles)
{
    const cachegen_load *load = chunk->load;
    const cg_device_run run = run_of(chunk);
    const bool waits = !gpu->functions->mark_is_past(gpu->device, load->mark);
    if (waits)
        cg_gpu_end_decoding(gpu);
    const cg_status status = gpu->functions->write(gpu->device, slot, tiles, &run, load->mark);
    if (waits)
        cg_gpu_begin_decoding(gpu);
    return status;
}

/* Decodes on the CPU, one task after the other, and has the GPU move each into the blocks. */
static cg_status decode_on_cpu(cg_load_chunk *chunk, const cg_decoder *decoder, cg_gpu *gpu,
                               uint32_t slot, cg_scratch *scratch)
{
    size_t room;
    void *tiles = gpu->functions->slot_memory(gpu->device, slot, &room);
    cg_status status = cg_scratch_reserve(scratch, cg_decoder_scratch_bytes(decoder), 0);
    for (uint32_t i = 0; i < cg_decoder_n_tasks(decoder) && status == CG_OK; i++) {
        const cg_task_shape shape = cg_decoder_task_shape(decoder, i);
        const cg_device_tiles part = {.first_layer = shape.first_layer,
                                      .n_layers = shape.n_layers,
                                      .first_plane = shape.plane,
                                      .n_planes = shape.n_planes};
        if (!is_wanted(chunk))
            return CG_OK;
        status = shape.elements_bytes > room
                     ? CG_ERR_BUFFER_TOO_SMALL
                     : cg_decoder_run(decoder, i, scratch->codec, scratch->codec_bytes, tiles);
        if (status == CG_OK)
            status = write_tiles(chunk, gpu, slot, &part);
    }
    return status;
}

/* The chunk's bytes do not stay in the slot: what is decoded goes there. */
static cg_status decode_copied(cg_load_chunk *chunk, cg_gpu *gpu, uint32_t slot, uint64_t n_bytes,
                               cg_scratch *scratch)
{
    uint8_t *bytes = malloc(n_bytes);
    cg_decoder *decoder = NULL;
    cg_chunk verified;
    if (bytes == NULL)
        return CG_ERR_NO_MEMORY;
    cg_load_copy_pieces(chunk, n_bytes, bytes);
    cg_status status = verify(chunk, bytes, n_bytes, &verified);
    if (status == CG_OK)
        status = cg_load_decoder_new(&chunk->load->op.connector->model, &verified, &decoder);
    if (status == CG_OK)
        status = decode_on_cpu(chunk, decoder, gpu, slot, scratch);
    cg_decoder_free(decoder);
    free(bytes);
    return status;
}

/* took_ns_out: how long the CPU decoded. */
static cg_status fall_back(cg_load_chunk *chunk, cg_gpu *gpu, uint32_t slot, uint64_t n_bytes,
                           cg_scratch *scratch, uint64_t *took_ns_out)
{
    cg_gpu_begin_decoding(gpu);
    const uint64_t began_ns = cg_now_ns();
    const cg_status status =
        is_wanted(chunk) ? decode_copied(chunk, gpu, slot, n_bytes, scratch) : CG_OK;
    *took_ns_out = cg_now_ns() - began_ns;
    cg_gpu_end_decoding(gpu);
    return status;
}

static bool is_for_the_cpu(cg_status status)
{
    return status == CG_ERR_UNSUPPORTED_VERSION || status == CG_ERR_UNSUPPORTED ||
           status == CG_ERR_BUFFER_TOO_SMALL;
}

/* cpu_ns_out: stays as it is where the CPU does not decode. */
static cg_status decode(cg_load_chunk *chunk, cg_gpu *gpu, uint32_t slot, cg_scratch *scratch,
                        bool *on_gpu_out, uint64_t *cpu_ns_out)
{
    const cachegen_load *load = chunk->load;
    const uint8_t level = load->fetch.chunks[chunk->index].level;
    const uint64_t n_bytes = load->fetch.sizes[chunk->index].bytes[level];
    const cg_device_run run = run_of(chunk);
    size_t room;
    uint8_t *memory = gpu->functions->slot_memory(gpu->device, slot, &room);
    *on_gpu_out = false;
    if (n_bytes > room)
        return fall_back(chunk, gpu, slot, n_bytes, scratch, cpu_ns_out);
    cg_load_copy_pieces(chunk, n_bytes, memory);
    cg_chunk verified;
    cg_status status = verify(chunk, memory, n_bytes, &verified);
    if (status != CG_OK)
        return status;
    /* The level may end before what was read. The device checks what a decoder of the CPU's would;
     * none is made, since with a joint matrix that takes memory by the geometry. */
    status = gpu->functions->decode(gpu->device, slot, verified.n_bytes, &run, load->mark);
    *on_gpu_out = status == CG_OK;
    return is_for_the_cpu(status) ? fall_back(chunk, gpu, slot, n_bytes, scratch, cpu_ns_out)
                                  : status;
}

void cg_load_gpu_run(cg_job *job, uint32_t task_index, cg_scratch *scratch)
{
    (void)task_index;
    cg_load_chunk *chunk = chunk_of(job);
    cachegen_load *load = chunk->load;
    cg_runtime *rt = load->op.runtime;
    cg_gpu *gpu = cg_handle_gpu(load->op.connector);
    bool on_gpu = false, is_timed = false;
    if (!is_wanted(chunk))
        return;
    const uint64_t began_ns = cg_now_ns();
    uint64_t cpu_ns = 0;
    cg_status status = CG_ERR_DEVICE;
    if (gpu != NULL) {
        const uint32_t slot = cg_gpu_take_slot(gpu);
        is_timed = gpu->functions->mark_is_past(gpu->device, load->mark);
        status = decode(chunk, gpu, slot, scratch, &on_gpu, &cpu_ns);
        cg_gpu_return_slot(gpu, slot);
    }
    if (status == CG_ERR_DEVICE)
        cg_handle_check_gpu(load->op.connector);
    /* What waited for the engine's own work says nothing of decoding. And speeds count the time of
     * config->threads threads: as many decode on the CPU, and n_slots wait for the GPU. */
    const cg_config *config = load->op.connector->config;
    const uint64_t took_ns = !is_timed ? 0
                             : cpu_ns > 0
                                 ? cpu_ns
                                 : (cg_now_ns() - began_ns) * config->threads / gpu->n_slots;
    pthread_mutex_lock(&rt->lock);
    chunk->status = status;
    chunk->thread_ns += took_ns;
    load->progress.decode_ns += took_ns;
    rt->stats.decode_ns += took_ns;
    rt->stats.chunks_decoded_on_gpu += on_gpu;
    pthread_mutex_unlock(&rt->lock);
}
