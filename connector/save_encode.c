#include "connector/save_encode.h"

#include "connector/clock.h"
#include "connector/gpu_projector.h"

#include <string.h>

static cg_save_chunk *chunk_of(cg_job *job)
{
    return (cg_save_chunk *)((char *)job - offsetof(cg_save_chunk, job));
}

/* A task's elements in the codec's layout: where they lie, or, of both planes, copied to tile, or
 * to the projector's memory, from where a GPU takes them without a further copy. */
static const uint8_t *gather(const cg_save_chunk *chunk, const cg_task_shape *shape,
                             const cg_projector *projector, uint8_t *tile)
{
    const uint32_t n_layers = chunk->save->op.connector->model.geometry.n_layers;
    const size_t layer_bytes = chunk->raw_bytes / CG_N_PLANES / n_layers,
                 plane_bytes = shape->n_layers * layer_bytes;
    const uint8_t *first =
        chunk->raw + ((size_t)shape->plane * n_layers + shape->first_layer) * layer_bytes;
    if (shape->n_planes == 1)
        return first;
    if (projector != NULL && shape->elements_bytes <= projector->memory_bytes)
        tile = projector->memory;
    for (uint32_t i = 0; i < shape->n_planes; i++)
        memcpy(tile + i * plane_bytes, first + i * n_layers * layer_bytes, plane_bytes);
    return tile;
}

/* KV that came off a GPU goes back there for what an encoder multiplies, which is most of its work.
 * NULL: the CPU does that, too. */
static cg_projector *take_projector(const cg_save_chunk *chunk, cg_gpu_projector *room)
{
    cg_gpu *gpu = chunk->has_copy ? atomic_load(&chunk->save->op.connector->gpu) : NULL;
    return gpu != NULL ? cg_gpu_take_projector(gpu, room) : NULL;
}

static void fail(cg_save_chunk *chunk, cg_status status)
{
    cg_status before = CG_OK;
    atomic_compare_exchange_strong(&chunk->status, &before, status);
}

/* Nobody wants it any more. */
static bool is_over(cg_save_chunk *chunk)
{
    const bool over = atomic_load(&chunk->save->is_over);
    if (over)
        fail(chunk, CG_ERR_CANCELLED);
    return over;
}

/* Which blocks get finer steps, as far as a layer tells. Before all tasks. */
static void run_weigh(cg_job *job, uint32_t layer, cg_scratch *scratch)
{
    cg_save_chunk *chunk = chunk_of(job);
    const size_t plane_bytes = chunk->raw_bytes / CG_N_PLANES,
                 layer_bytes = plane_bytes / job->n_tasks;
    const uint8_t *k = chunk->raw + layer * layer_bytes;
    if (is_over(chunk))
        return;
    const uint64_t began_ns = cg_now_ns();
    cg_status status = cg_scratch_reserve(scratch, cg_encoder_scratch_bytes(chunk->encoder), 0);
    if (status == CG_OK)
        status = cg_encoder_weigh(chunk->encoder, layer, scratch->codec, scratch->codec_bytes, k,
                                  k + plane_bytes);
    atomic_fetch_add(&chunk->encode_ns, cg_now_ns() - began_ns);
    if (status != CG_OK)
        fail(chunk, status);
}

static void run_encode(cg_job *job, uint32_t task_index, cg_scratch *scratch)
{
    cg_save_chunk *chunk = chunk_of(job);
    if (is_over(chunk))
        return;
    const cg_task_shape shape = cg_encoder_task_shape(chunk->encoder, task_index);
    const uint64_t began_ns = cg_now_ns();
    cg_status status = cg_scratch_reserve(scratch, cg_encoder_scratch_bytes(chunk->encoder),
                                          shape.n_planes > 1 ? shape.elements_bytes : 0);
    cg_gpu_projector room;
    cg_projector *projector = status == CG_OK ? take_projector(chunk, &room) : NULL;
    if (status == CG_OK)
        status =
            cg_encoder_run_with(chunk->encoder, task_index, scratch->codec, scratch->codec_bytes,
                                gather(chunk, &shape, projector, scratch->tile), projector);
    if (projector != NULL) {
        atomic_fetch_add(&chunk->n_gpu_failed, projector->n_failed);
        cg_gpu_return_projector(&room);
    }
    atomic_fetch_add(&chunk->encode_ns, cg_now_ns() - began_ns);
    if (status != CG_OK)
        fail(chunk, status);
}

/* Without the runtime's lock, which steps of the engine take: who loses the CPU under it at the
 * lowest priority would hold them up for long. */
static void encode_done(cg_job *job)
{
    sem_post(&chunk_of(job)->encoded);
}

static cg_job encode_job(const cg_save_chunk *chunk)
{
    return (cg_job){
        .run = run_encode, .done = encode_done, .n_tasks = cg_encoder_n_tasks(chunk->encoder)};
}

static void weigh_done(cg_job *job)
{
    cg_save_chunk *chunk = chunk_of(job);
    *job = encode_job(chunk);
    cg_status status = atomic_load(&chunk->status);
    /* Tasks leave L0, also of what cannot be weighed. */
    if (status == CG_OK || cg_save_is_exact_left(chunk, status))
        status = cg_pool_go_on(chunk->save->op.runtime->encoders, CG_JOB_ENCODE, job);
    if (status != CG_OK) {
        fail(chunk, status);
        encode_done(job);
    }
}

bool cg_save_is_nested(const cg_save_chunk *chunk)
{
    const unsigned lossy = (unsigned)chunk->levels >> CG_L1;
    const bool is_one = (lossy & (lossy - 1)) == 0;
    return !is_one && cg_encoder_can_nest(chunk->save->op.connector->model.profile, chunk->levels);
}

bool cg_save_is_exact_left(const cg_save_chunk *chunk, cg_status status)
{
    const cachegen_save *save = chunk->save;
    const uint32_t levels = save->op.connector->store_levels;
    return status == CG_ERR_INVALID_ARGUMENT && chunk->encoder != NULL &&
           (levels >> CG_L0 & 1) != 0 && save->prefix_level == CG_L0;
}

/* The chunk's encoder, for the levels that are to be made. */
static cg_status make_encoder(cg_save_chunk *chunk)
{
    const cachegen_save *save = chunk->save;
    const cachegen *c = save->op.connector;
    const cg_chunk_header header = {.geometry = c->model.geometry,
                                    .first_position = chunk->first_token,
                                    .n_tokens = chunk->n_tokens,
                                    .prefix_level = save->prefix_level,
                                    .cache_scales = c->model.scales,
                                    .model = c->model.fingerprint,
                                    .extra = save->extra,
                                    .parent = chunk->index > 0 ? save->keys[chunk->index - 1]
                                                               : save->root};
    const unsigned mask = chunk->levels | (cg_save_is_nested(chunk) ? CG_NESTED : 0u) |
                          (c->config->streams == CG_STREAMS_LATENCY ? CG_SHORT_STREAMS : 0u);
    return cg_encoder_new(c->model.profile, &header, save->tokens + chunk->first_token,
                          (uint8_t)mask, &chunk->encoder);
}

static cg_status submit(cg_save_chunk *chunk)
{
    cg_runtime *rt = chunk->save->op.runtime;
    const uint32_t n_weighings = cg_encoder_n_weighings(chunk->encoder);
    pthread_mutex_lock(&rt->lock);
    rt->stats.chunks_encoded++;
    pthread_mutex_unlock(&rt->lock);
    chunk->job = n_weighings > 0
                     ? (cg_job){.run = run_weigh, .done = weigh_done, .n_tasks = n_weighings}
                     : encode_job(chunk);
    sem_init(&chunk->encoded, 0, 0);
    return cg_pool_submit(rt->encoders, CG_JOB_ENCODE, &chunk->job);
}

void cg_save_begin_encode(cg_save_chunk *chunk)
{
    cg_status status = CG_OK;
    if (chunk->levels != 0) {
        status = cg_save_take_raw(chunk);
        if (status == CG_OK)
            status = make_encoder(chunk);
        if (status == CG_OK)
            status = submit(chunk);
    }
    if (chunk->levels == 0 || status != CG_OK) { /* no task will say so */
        atomic_store(&chunk->status, status);
        chunk->is_encoded = true;
    }
}

cg_status cg_save_end_encode(cg_save_chunk *chunk)
{
    cg_runtime *rt = chunk->save->op.runtime;
    if (!chunk->is_encoded) {
        while (sem_wait(&chunk->encoded) != 0)
            ; /* a signal */
        sem_destroy(&chunk->encoded);
        chunk->is_encoded = true;
    }
    const uint32_t n_gpu_failed = atomic_exchange(&chunk->n_gpu_failed, 0);
    if (n_gpu_failed > 0)
        cg_handle_check_gpu(chunk->save->op.connector);
    pthread_mutex_lock(&rt->lock);
    cg_save_release_raw(chunk);
    rt->stats.encode_ns += atomic_exchange(&chunk->encode_ns, 0);
    rt->stats.gpu_errors += n_gpu_failed;
    cg_save_unlock(rt);
    return atomic_load(&chunk->status);
}
