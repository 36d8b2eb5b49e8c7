#include "connector/save_gather.h"

#include "connector/clock.h"

#include <stdlib.h>
#include <string.h>

/* How long a rank's heads are waited for before somebody looks whether they still are wanted. */
enum { SLICE_MS = 20 };

static cg_gather *gather_of(const cachegen_save *save)
{
    return atomic_load_explicit(&save->op.connector->gather, memory_order_acquire);
}

static uint32_t tokens_of(const cachegen_save *save, uint32_t index)
{
    const uint32_t chunk_tokens = save->op.connector->config->chunk_tokens,
                   left = save->n_tokens - index * chunk_tokens;
    return left < chunk_tokens ? left : chunk_tokens;
}

/* Also those that this rank may know to be stored: the one that stores decides. */
static uint32_t list_chunks(const cachegen_save *save, cg_gather_chunk *chunks)
{
    for (uint32_t i = save->from_key; i < save->heads_to; i++)
        *chunks++ = (cg_gather_chunk){.key = save->keys[i],
                                      .n_tokens = tokens_of(save, i),
                                      .prefix_level = save->prefix_level};
    return save->heads_to - save->from_key;
}

/* Of chunk i of the part. A cut ends it early. */
static void copy_heads(const cachegen_save *save, const cg_kv_layout *layout, const int64_t *table,
                       uint32_t i)
{
    const cg_geometry *g = &save->op.connector->model.geometry;
    const cg_kv_layout own = cg_kv_layout_own_heads(layout);
    const uint32_t index = save->from_key + i, n_tokens = tokens_of(save, index),
                   first_token = index * save->op.connector->config->chunk_tokens;
    uint8_t *data = save->part.data[i];
    const size_t tile_bytes =
        (size_t)n_tokens * layout->given.n_kv_heads * g->head_dim * layout->element_bytes;
    for (uint32_t plane = 0; plane < CG_N_PLANES; plane++)
        for (uint32_t layer = 0; layer < g->n_layers; layer++) {
            if (i >= atomic_load(&save->cut_index))
                return;
            cg_blocks_read(&own, table, layer, plane, first_token, n_tokens, data);
            data += tile_bytes;
        }
}

static cachegen_save *save_of_copy(cg_job *job)
{
    return (cachegen_save *)((char *)job - offsetof(cachegen_save, copy_job));
}

static void run_copy_heads(cg_job *job, uint32_t task_index, cg_scratch *scratch)
{
    (void)scratch;
    cachegen_save *save = save_of_copy(job);
    copy_heads(save, save->layout, save->table, task_index);
    cg_save_end_reading(save, task_index);
}

static void copy_heads_done(cg_job *job)
{
    cachegen_save *save = save_of_copy(job);
    cg_runtime *rt = save->op.runtime;
    /* The blocks are free, whatever becomes of the copy; and whoever sees that the other rank has
     * the heads sees this, too. */
    pthread_mutex_lock(&rt->lock);
    cg_save_end_copying(save);
    const bool is_whole = save->n_whole == job->n_tasks;
    cg_runtime_notify(rt);
    pthread_mutex_unlock(&rt->lock);
    cg_status status = CG_OK;
    if (is_whole)
        status = cg_gather_send(gather_of(save), &save->part);
    else
        cg_gather_abandon(gather_of(save), &save->part);
    pthread_mutex_lock(&rt->lock);
    save->end_token = is_whole && status == CG_OK ? save->n_tokens : 0;
    cg_save_finish(save, status);
    cg_operation_unref(&save->op);
    pthread_mutex_unlock(&rt->lock);
}

/* Chunks whose heads a GPU copies, to be passed on. */
typedef struct heads_job {
    cg_job job;
    cachegen *connector;
    cachegen_save *save; /* it ends with this, where that holds later; else it may be gone */
    const cg_gpu *gpu;
    const cg_kv_layout *layout;
    cg_gather_part part;
    cg_status status;
    uint32_t n_chunks;
    cg_device_run *runs; /* [n_chunks] */
    uint32_t *copies;    /* [n_chunks] */
} heads_job;

static void heads_job_free(heads_job *h)
{
    free(h->runs);
    free(h->copies);
    free(h);
}

/* The own heads of whole chunks' rows. */
static void pick_heads(const heads_job *h, uint32_t n_tokens, const uint8_t *from, uint8_t *to)
{
    const cg_geometry *g = &h->connector->model.geometry;
    const cachegen_kv_layout *own = &h->layout->given;
    const size_t head_bytes = g->head_dim * h->layout->element_bytes,
                 n_bytes = own->n_kv_heads * head_bytes;
    from += own->first_head * head_bytes;
    for (size_t row = 0; row < (size_t)CG_N_PLANES * g->n_layers * n_tokens; row++) {
        memcpy(to, from, n_bytes);
        from += g->n_kv_heads * head_bytes;
        to += n_bytes;
    }
}

static void run_heads(cg_job *job, uint32_t task_index, cg_scratch *scratch)
{
    heads_job *h = (heads_job *)((char *)job - offsetof(heads_job, job));
    (void)task_index;
    (void)scratch;
    for (uint32_t i = 0; i < h->n_chunks; i++) {
        void *elements = NULL;
        if (h->status == CG_OK)
            h->status = h->gpu->functions->read_wait(h->gpu->device, h->copies[i], &elements);
        if (h->status == CG_OK && h->save != NULL && !cg_save_is_in_time(h->save))
            h->status = CG_ERR_CANCELLED;
        if (h->status == CG_OK)
            pick_heads(h, h->runs[i].n_tokens, elements, h->part.data[i]);
        h->gpu->functions->read_release(h->gpu->device, h->copies[i]);
    }
}

static void end_heads(cachegen_save *save, cg_status status)
{
    cg_runtime *rt = save->op.runtime;
    pthread_mutex_lock(&rt->lock);
    save->is_copied = true;
    save->end_token = status == CG_OK ? save->n_tokens : 0;
    rt->stats.gpu_errors += status == CG_ERR_DEVICE;
    cg_save_finish(save, status);
    pthread_mutex_unlock(&rt->lock);
}

static void heads_done(cg_job *job)
{
    heads_job *h = (heads_job *)((char *)job - offsetof(heads_job, job));
    cg_gather *gather = atomic_load_explicit(&h->connector->gather, memory_order_acquire);
    if (h->status == CG_OK)
        h->status = cg_gather_send(gather, &h->part);
    else
        cg_gather_abandon(gather, &h->part);
    if (h->status == CG_ERR_DEVICE)
        cg_handle_check_gpu(h->connector);
    if (h->save != NULL)
        end_heads(h->save, h->status);
    heads_job_free(h);
}

/* The job that passes the heads on ends the save. */
static void begin_passing(cachegen_save *save)
{
    cg_runtime *rt = save->op.runtime;
    pthread_mutex_lock(&rt->lock);
    save->passes_later = true;
    cg_operation_begin(&save->op);
    pthread_mutex_unlock(&rt->lock);
}

/* Takes the part, and drops it where this fails. */
static cg_status copy_heads_off_gpu(cachegen_save *save, const cg_gpu *gpu,
                                    const cg_kv_layout *layout, const cachegen_save_request *r,
                                    const cg_gather_chunk *chunks, uint32_t n_chunks,
                                    cg_gather_part *part)
{
    const uint32_t chunk_tokens = save->op.connector->config->chunk_tokens, first = save->from_key;
    const cg_after after = {(cg_after_kind)r->after_kind, r->after};
    cg_status status = CG_ERR_NO_MEMORY;
    heads_job *h = calloc(1, sizeof *h);
    if (h == NULL)
        goto failed;
    *h = (heads_job){.job = {.run = run_heads, .done = heads_done, .n_tasks = 1},
                     .connector = save->op.connector,
                     .save = save->holds_later ? save : NULL,
                     .gpu = gpu,
                     .layout = layout,
                     .part = *part,
                     .n_chunks = n_chunks,
                     .runs = calloc(n_chunks, sizeof *h->runs),
                     .copies = calloc(n_chunks, sizeof *h->copies)};
    if (h->runs == NULL || h->copies == NULL)
        goto failed;
    for (uint32_t i = 0; i < n_chunks; i++)
        h->runs[i] = (cg_device_run){.blocks_id = layout->gpu_blocks_id,
                                     .table = r->block_table,
                                     .n_table = r->n_blocks,
                                     .first_token = (first + i) * chunk_tokens,
                                     .n_tokens = chunks[i].n_tokens,
                                     .to_token = chunks[i].n_tokens};
    status = gpu->functions->read(gpu->device, h->runs, n_chunks, after, h->copies);
    if (status == CG_OK) {
        save->last_copy = h->copies[n_chunks - 1];
        if (save->holds_later)
            begin_passing(save);
        else
            h->status = cg_save_hold(save, gpu, after);
        if (cg_pool_submit(gpu->pool, CG_JOB_ENCODE, &h->job) != CG_OK) {
            run_heads(&h->job, 0, NULL);
            heads_done(&h->job);
        }
        return CG_OK;
    }
    if (status == CG_ERR_DEVICE)
        cg_handle_check_gpu(save->op.connector);
failed:
    if (h != NULL)
        heads_job_free(h);
    cg_gather_abandon(gather_of(save), part);
    return status;
}

cg_status cg_save_send_heads(cachegen_save *save, const cg_gpu *gpu, const cg_kv_layout *layout,
                             const cachegen_save_request *r)
{
    cg_gather *gather = gather_of(save);
    cg_gather_chunk *chunks = malloc((save->n_keys + (size_t)1) * sizeof *chunks);
    if (chunks == NULL)
        return CG_ERR_NO_MEMORY;
    const uint32_t n = list_chunks(save, chunks);
    cg_status status =
        n > 0 ? cg_gather_begin(gather, save->number, chunks, n, &save->part) : CG_OK;
    if (n > 0 && status == CG_OK && gpu != NULL) {
        status = copy_heads_off_gpu(save, gpu, layout, r, chunks, n, &save->part);
    } else if (n > 0 && status == CG_OK && r->copy_later && cg_save_keep_table(save, layout, r)) {
        save->copy_job = (cg_job){.run = run_copy_heads, .done = copy_heads_done, .n_tasks = n};
        save->n_whole = n;
    } else if (n > 0 && status == CG_OK) {
        for (uint32_t i = 0; i < n; i++)
            copy_heads(save, layout, r->block_table, i);
        status = cg_gather_send(gather, &save->part);
    }
    free(chunks);
    return status;
}

static bool is_wanted(const cachegen_save *save)
{
    cg_runtime *rt = save->op.runtime;
    pthread_mutex_lock(&rt->lock);
    const bool wanted = !save->op.done && !rt->stop; /* ranks end together: nothing more comes */
    pthread_mutex_unlock(&rt->lock);
    return wanted;
}

static cg_status gather_chunk(const cachegen_save *save, const cg_save_chunk *chunk,
                              uint64_t until_ns)
{
    const cg_gather_chunk wanted = {.key = save->keys[chunk->index],
                                    .n_tokens = chunk->n_tokens,
                                    .prefix_level = save->prefix_level};
    cg_status status;
    int timeout_ms = 0; /* what has come counts, however late it is asked for */
    while ((status = cg_gather_take(gather_of(save), save->number, &wanted, chunk->raw,
                                    timeout_ms)) == CG_ERR_AGAIN) {
        if (timeout_ms > 0 && (cg_now_ns() >= until_ns || !is_wanted(save)))
            return CG_ERR_TIMED_OUT;
        timeout_ms = SLICE_MS;
    }
    return status;
}

cg_status cg_save_gather(cachegen_save *save)
{
    const uint64_t timeout_ns = cg_ms(save->op.connector->config->save_timeout_ms);
    cg_status status = CG_OK;
    for (uint32_t i = 0; i < save->n_chunks && status == CG_OK; i++)
        status = gather_chunk(save, &save->chunks[i], save->op.started_ns + timeout_ns);
    return status;
}

void cg_save_drop_heads(const cachegen_save *save)
{
    cg_gather_drop(gather_of(save), save->number);
}
