#include "connector/load_deliver.h"

#include "connector/clock.h"
#include "connector/load_gpu.h"
#include "connector/load_verify.h"

#include <stdlib.h>

static cg_load_chunk *chunk_of(cg_job *job)
{
    return (cg_load_chunk *)((char *)job - offsetof(cg_load_chunk, job));
}

/* Copies from tiles, one decoded task's planes and layers, what lies in the load's tokens and in
 * the layout's layers: an engine may have asked for part of a chunk, and a pipeline stage has part
 * of the layers. */
static void deliver(const cachegen_load *load, const cg_plan_chunk *planned,
                    const cg_task_shape *shape, const uint8_t *tiles)
{
    const cachegen_kv_layout *g = &load->layout->given;
    const uint32_t chunk_end = planned->first_token + planned->sizes.n_tokens;
    const uint32_t begin =
        planned->first_token > load->from_token ? planned->first_token : load->from_token;
    const uint32_t end = chunk_end < load->to_token ? chunk_end : load->to_token;
    const uint32_t n_tiles = shape->n_planes * shape->n_layers;
    const size_t tile_bytes = shape->elements_bytes / n_tiles;
    const size_t token_bytes = tile_bytes / planned->sizes.n_tokens;
    for (uint32_t i = 0; i < n_tiles; i++) {
        const uint32_t layer = shape->first_layer + i % shape->n_layers,
                       plane = shape->plane + i / shape->n_layers;
        if (layer >= g->first_layer && layer < g->first_layer + g->n_layers)
            cg_blocks_write(load->layout, load->table, layer, plane, begin, end - begin,
                            tiles + i * tile_bytes + (begin - planned->first_token) * token_bytes);
    }
}

static bool is_wanted(const cg_load_chunk *chunk)
{
    cg_runtime *rt = chunk->load->op.runtime;
    pthread_mutex_lock(&rt->lock);
    const bool wanted = cg_load_wants(chunk);
    pthread_mutex_unlock(&rt->lock);
    return wanted;
}

/* What a task of a chunk took of a thread, and how it went. */
static void count(cg_load_chunk *chunk, cg_status status, uint64_t decode_ns, uint64_t copy_ns)
{
    cachegen_load *load = chunk->load;
    cg_runtime *rt = load->op.runtime;
    pthread_mutex_lock(&rt->lock);
    if (status != CG_OK && chunk->status == CG_OK)
        chunk->status = status;
    chunk->thread_ns += decode_ns + copy_ns;
    load->progress.decode_ns += decode_ns;
    load->progress.copy_ns += copy_ns;
    rt->stats.decode_ns += decode_ns;
    rt->stats.copy_ns += copy_ns;
    pthread_mutex_unlock(&rt->lock);
}

static void run_decode(cg_job *job, uint32_t task_index, cg_scratch *scratch)
{
    cg_load_chunk *chunk = chunk_of(job);
    const cachegen_load *load = chunk->load;
    /* Asked before each task: the load may be cancelled by now, or another task of the chunk have
     * failed. */
    if (!is_wanted(chunk))
        return;

    const cg_task_shape shape = cg_decoder_task_shape(chunk->decoder, task_index);
    const uint64_t began_ns = cg_now_ns();
    uint64_t decoded_ns = began_ns, copied_ns = began_ns;
    cg_status status =
        cg_scratch_reserve(scratch, cg_decoder_scratch_bytes(chunk->decoder), shape.elements_bytes);
    if (status == CG_OK)
        status = cg_decoder_run(chunk->decoder, task_index, scratch->codec, scratch->codec_bytes,
                                scratch->tile);
    decoded_ns = copied_ns = cg_now_ns();
    if (status == CG_OK) {
        deliver(load, &load->plan->chunks[chunk->index], &shape, scratch->tile);
        copied_ns = cg_now_ns();
    }
    count(chunk, status, decoded_ns - began_ns, copied_ns - decoded_ns);
}

/* The job's last word on a chunk. */
static void decode_done(cg_job *job)
{
    cg_load_chunk *chunk = chunk_of(job);
    cg_runtime *rt = chunk->load->op.runtime;
    cg_decoder_free(chunk->decoder);
    free(chunk->bytes);
    cg_load_drop_pieces(chunk);
    chunk->decoder = NULL;
    chunk->bytes = NULL;
    pthread_mutex_lock(&rt->lock);
    cg_load_decode_ended(chunk);
    pthread_mutex_unlock(&rt->lock);
}

/* The first n_bytes of the chunk's file, valid as long as its pieces; NULL without memory. */
static const uint8_t *put_together(cg_load_chunk *chunk, uint64_t n_bytes)
{
    const cg_load_piece *first = chunk->pieces;
    if (first != NULL && first->from == 0 && first->buffer->n_bytes >= n_bytes)
        return first->buffer->data;
    chunk->bytes = malloc(n_bytes);
    if (chunk->bytes != NULL)
        cg_load_copy_pieces(chunk, n_bytes, chunk->bytes);
    return chunk->bytes;
}

/* What all tasks of the chunk share. Here other threads have other chunks to do; if the first task
 * did it, they would wait. */
static void prepare(cg_load_chunk *chunk, cg_scratch *scratch)
{
    const uint64_t began_ns = cg_now_ns();
    const size_t codec_bytes = cg_decoder_scratch_bytes(chunk->decoder);
    cg_status status = cg_scratch_reserve(scratch, codec_bytes, 0);
    if (status == CG_OK)
        status = cg_decoder_prepare(chunk->decoder, scratch->codec, scratch->codec_bytes);
    count(chunk, status, cg_now_ns() - began_ns, 0);
}

static void run_verify(cg_job *job, uint32_t task_index, cg_scratch *scratch)
{
    (void)task_index;
    cg_load_chunk *chunk = chunk_of(job);
    const cachegen_load *load = chunk->load;
    if (!is_wanted(chunk))
        return;
    /* Level and pieces stay as they are until this job has ended. */
    const uint8_t level = load->fetch.chunks[chunk->index].level;
    const uint64_t n_bytes = load->fetch.sizes[chunk->index].bytes[level];
    const uint8_t *bytes = put_together(chunk, n_bytes);
    const cg_model *model = &load->op.connector->model;
    cg_chunk verified;
    chunk->status = bytes == NULL ? CG_ERR_NO_MEMORY
                                  : cg_load_verify(model, load->plan, chunk->index, level, bytes,
                                                   n_bytes, &chunk->worst_level, &verified);
    if (chunk->status == CG_OK)
        chunk->status = cg_load_decoder_new(model, &verified, &chunk->decoder);
    if (chunk->status == CG_OK && is_wanted(chunk))
        prepare(chunk, scratch);
}

static void verify_done(cg_job *job)
{
    cg_load_chunk *chunk = chunk_of(job);
    cg_runtime *rt = chunk->load->op.runtime;
    cg_status status = chunk->status;
    if (status == CG_OK && chunk->decoder != NULL) { /* else nobody wants it any more */
        /* The same job goes on with other tasks: a chunk has one at a time. Before the next chunks:
         * each that is prepared holds what its tasks share, and the prefix ends at the first that
         * is not done in time. */
        *job = (cg_job){
            .run = run_decode, .done = decode_done, .n_tasks = cg_decoder_n_tasks(chunk->decoder)};
        status = job->n_tasks > 0 ? cg_pool_go_on(rt->pool, CG_JOB_DECODE, job) : CG_ERR_CORRUPT;
        if (status == CG_OK)
            return; /* the chunk is its tasks' now, and may be gone */
    }
    chunk->status = status;
    decode_done(job);
}

void cg_load_submit(cg_load_chunk *chunk)
{
    const cachegen_load *load = chunk->load;
    const cg_gpu *gpu = atomic_load(&load->op.connector->gpu);
    const bool on_gpu = load->layout->given.memory == CACHEGEN_MEMORY_CUDA;
    chunk->job = on_gpu ? (cg_job){.run = cg_load_gpu_run, .done = decode_done, .n_tasks = 1}
                        : (cg_job){.run = run_verify, .done = verify_done, .n_tasks = 1};
    const cg_status status =
        cg_pool_submit(on_gpu ? gpu->pool : load->op.runtime->pool, CG_JOB_DECODE, &chunk->job);
    if (status != CG_OK) {
        chunk->status = status;
        decode_done(&chunk->job);
    }
}
