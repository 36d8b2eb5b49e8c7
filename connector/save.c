#include "connector/abi_struct.h"
#include "connector/clock.h"
#include "connector/save_gather.h"
#include "connector/writer.h"

#include <stdlib.h>
#include <string.h>

/* Which of store_levels may be made of KV that was computed on a prefix of that level. What was
 * computed on lossy KV is off by more than a fine level would add: stored at L0 or L1 it would
 * claim a quality that it does not have, and it would pass its loss on with every turn. */
static uint8_t levels_to_make(uint32_t store_levels, uint8_t prefix_level)
{
    uint8_t levels = (uint8_t)store_levels;
    if (prefix_level > CG_L0)
        levels &= (uint8_t) ~(1u << CG_L0);
    if (prefix_level > CG_L1)
        levels &= (uint8_t) ~(1u << CG_L1);
    return levels;
}

static cachegen_save *save_of_copy(cg_job *job)
{
    return (cachegen_save *)((char *)job - offsetof(cachegen_save, copy_job));
}

static void save_destroy(cg_operation *op)
{
    cachegen_save *save = (cachegen_save *)op;
    for (uint32_t i = 0; i < save->n_chunks && save->chunks != NULL; i++)
        cg_save_free_raw(&save->chunks[i]);
    free(save->chunks);
    free(save->table);
    free(save->tokens);
    free(save->keys);
    free(save->context);
    free(save);
}

/* The keys of all chunks of the prompt's first r->to_token tokens, a tail included if this save
 * ends the prompt. */
static cg_status fill_keys(cachegen_save *save, const cachegen_save_request *r)
{
    const cachegen *c = save->op.connector;
    const uint32_t chunk_tokens = c->config->chunk_tokens;
    const uint32_t n_full = r->to_token / chunk_tokens, rest = r->to_token % chunk_tokens;
    const uint32_t tail = r->is_last ? rest - rest % c->config->tail_multiple : 0;
    save->n_keys = n_full + (tail > 0);
    /* Of chunks that begin before from_token the blocks need not have all. */
    const uint32_t from_key = r->from_token / chunk_tokens + (r->from_token % chunk_tokens > 0);
    save->from_key = from_key < save->n_keys ? from_key : save->n_keys;
    save->n_tokens = n_full * chunk_tokens + tail;
    save->tokens = malloc((save->n_tokens + (size_t)1) * sizeof *save->tokens);
    save->keys = malloc((save->n_keys + (size_t)1) * sizeof *save->keys);
    save->chunks = calloc(save->n_keys + (size_t)1, sizeof *save->chunks);
    if (save->tokens == NULL || save->keys == NULL || save->chunks == NULL)
        return CG_ERR_NO_MEMORY;
    memcpy(save->tokens, r->request.tokens, save->n_tokens * sizeof *save->tokens);
    save->root = cg_key_root(&c->model.key_fingerprint, r->request.salt, r->request.salt_bytes);
    if (r->request.extra_bytes > 0)
        save->extra = cg_key_of_bytes(r->request.extra, r->request.extra_bytes);
    cg_key_chain(&save->root, &save->extra, save->tokens, save->n_tokens, chunk_tokens, save->keys);
    return CG_OK;
}

/* With the lock held: which chunks are to be copied, and how many bytes that takes. */
static void choose_chunks(cachegen_save *save, uint32_t most_chunks, uint64_t *staging_bytes_out)
{
    const cachegen *c = save->op.connector;
    cg_runtime *rt = save->op.runtime;
    const cg_geometry *g = &c->model.geometry;
    const uint32_t chunk_tokens = c->config->chunk_tokens;
    const uint8_t levels = levels_to_make(c->store_levels, save->prefix_level);
    const uint64_t now_ns = cg_now_ns(), limit = (uint64_t)c->config->staging_mib << 20;
    /* Copies leave room for one encoder: connector/save_state.h. */
    const uint64_t encoder_bytes = cg_geometry_elements(g, chunk_tokens) * cg_dtype_bytes(g->dtype);
    *staging_bytes_out = 0;
    save->end_token = save->n_tokens;
    for (uint32_t i = save->from_key; i < save->n_keys; i++) {
        const uint32_t first_token = i * chunk_tokens;
        const uint32_t left = save->n_tokens - first_token,
                       n_tokens = left < chunk_tokens ? left : chunk_tokens;
        const uint64_t raw_bytes = cg_geometry_elements(g, n_tokens) * cg_dtype_bytes(g->dtype);
        cg_chunk_memory_entry known;
        if (levels == 0) {
            rt->stats.saves_dropped++;
            rt->stats.saves_dropped_lossy++;
            continue;
        }
        if (cg_chunk_memory_find(rt->chunk_memory, &save->keys[i], levels, now_ns, &known) &&
            (levels & ~(known.entry.levels & ~known.bad)) == 0 &&
            (levels & cg_save_outdoes(save->prefix_level, &known.entry)) == 0) {
            rt->stats.chunks_existed++;
            continue;
        }
        /* More than the staging memory ever holds: what fits is a prefix, and a prefix is worth
         * having. */
        if ((*staging_bytes_out + raw_bytes + encoder_bytes > limit && save->n_chunks > 0) ||
            save->n_chunks == most_chunks || (save->has_some_heads && i >= save->heads_to)) {
            rt->stats.saves_dropped += save->n_keys - i;
            rt->stats.saves_dropped_staging += save->n_keys - i;
            save->end_token = first_token;
            break;
        }
        *staging_bytes_out += raw_bytes;
        save->chunks[save->n_chunks++] = (cg_save_chunk){.save = save,
                                                         .index = i,
                                                         .first_token = first_token,
                                                         .n_tokens = n_tokens,
                                                         .raw_bytes = raw_bytes,
                                                         .lock = -1,
                                                         .levels = levels};
    }
}

/* Chooses the chunks and takes the staging memory for them. CG_ERR_AGAIN: it is not free now. */
static cg_status reserve_staging(cachegen_save *save, uint32_t most_chunks,
                                 uint64_t *staging_bytes_out)
{
    cg_runtime *rt = save->op.runtime;
    pthread_mutex_lock(&rt->lock);
    if (rt->writer_is_stuck) {
        pthread_mutex_unlock(&rt->lock);
        return CG_ERR_TIMED_OUT;
    }
    const cachegen_stats before = rt->stats;
    choose_chunks(save, most_chunks, staging_bytes_out);
    /* While nothing else is staged a save is always taken, or a chunk larger than the limit would
     * be asked for again for ever. */
    const uint64_t encoder_bytes = save->n_chunks > 0 ? save->chunks[0].raw_bytes : 0;
    const bool is_full = rt->staging_bytes > 0 && save->n_chunks > 0 &&
                         !cg_save_has_room(rt, *staging_bytes_out, encoder_bytes);
    if (is_full)
        rt->stats = before; /* nothing was taken */
    else
        rt->staging_bytes += *staging_bytes_out;
    cg_save_note_peak(rt);
    pthread_mutex_unlock(&rt->lock);
    return is_full ? CG_ERR_AGAIN : CG_OK;
}

/* A cut ends it early. */
static void copy_chunk(const cachegen_save *save, uint32_t task_index, const cg_kv_layout *layout,
                       const int64_t *table)
{
    const cg_save_chunk *chunk = &save->chunks[task_index];
    const cg_geometry *g = &save->op.connector->model.geometry;
    const size_t tile_bytes = chunk->raw_bytes / CG_N_PLANES / g->n_layers;
    for (uint32_t plane = 0; plane < CG_N_PLANES; plane++)
        for (uint32_t layer = 0; layer < g->n_layers; layer++) {
            if (task_index >= atomic_load(&save->cut_index))
                return;
            cg_blocks_read(layout, table, layer, plane, chunk->first_token, chunk->n_tokens,
                           chunk->raw + ((size_t)plane * g->n_layers + layer) * tile_bytes);
        }
}

static void run_copy(cg_job *job, uint32_t task_index, cg_scratch *scratch)
{
    (void)scratch;
    cachegen_save *save = save_of_copy(job);
    copy_chunk(save, task_index, save->layout, save->table);
    cg_save_end_reading(save, task_index);
}

/* With the lock held, and the copying over: chunks that a cut has left in the blocks, and those
 * behind them, are dropped. */
static void drop_uncopied(cachegen_save *save)
{
    cachegen_stats *stats = &save->op.runtime->stats;
    const uint32_t n_dropped = save->n_chunks - save->n_whole;
    if (n_dropped == 0)
        return;
    for (uint32_t i = save->n_whole; i < save->n_chunks; i++)
        cg_save_release_raw(&save->chunks[i]);
    save->end_token = save->chunks[save->n_whole].first_token;
    save->n_chunks = save->n_whole;
    if (!save->op.done) { /* else they are counted */
        stats->saves_dropped += n_dropped;
        stats->saves_dropped_overwritten += n_dropped;
    }
}

static void copy_done(cg_job *job)
{
    cachegen_save *save = save_of_copy(job);
    cg_runtime *rt = save->op.runtime;
    pthread_mutex_lock(&rt->lock);
    cg_save_end_copying(save);
    drop_uncopied(save);
    /* It was given up meanwhile: then these are nobody's, unless the writer has it. */
    for (uint32_t i = 0; i < save->n_chunks && save->op.done && rt->saving != &save->op; i++)
        cg_save_release_raw(&save->chunks[i]);
    cg_runtime_notify(rt);
    cg_operation_unref(&save->op);
    cg_save_unlock(rt);
}

/* Memory for the copies, and the copies unless they are made later. */
static cg_status begin_copy(cachegen_save *save, const cg_kv_layout *layout,
                            const cachegen_save_request *r)
{
    for (uint32_t i = 0; i < save->n_chunks; i++)
        /* With room for an address: cg_save_release_raw(). */
        if ((save->chunks[i].raw = malloc(save->chunks[i].raw_bytes + sizeof(uint8_t *))) == NULL)
            return CG_ERR_NO_MEMORY;
    if (r->copy_later != 0 && save->n_chunks > 0 && cg_save_keep_table(save, layout, r)) {
        save->copy_job = (cg_job){.run = run_copy, .done = copy_done, .n_tasks = save->n_chunks};
        save->n_whole = save->n_chunks;
        return CG_OK;
    }
    for (uint32_t i = 0; i < save->n_chunks; i++)
        copy_chunk(save, i, layout, r->block_table);
    save->is_copied = true;
    save->progress.copied = 1;
    return CG_OK;
}

/* Has the GPU copy the chunks; what it has not copied yet is waited for by the writer. */
static cg_status copy_off_gpu(cachegen_save *save, const cg_gpu *gpu, const cg_kv_layout *layout,
                              const cachegen_save_request *r)
{
    const cg_after after = {(cg_after_kind)r->after_kind, r->after};
    cg_device_run *runs = calloc(save->n_chunks + (size_t)1, sizeof *runs);
    uint32_t *copies = calloc(save->n_chunks + (size_t)1, sizeof *copies);
    cg_status status = CG_ERR_NO_MEMORY;
    if (runs == NULL || copies == NULL)
        goto done;
    for (uint32_t i = 0; i < save->n_chunks; i++)
        runs[i] = (cg_device_run){.blocks_id = layout->gpu_blocks_id,
                                  .table = r->block_table,
                                  .n_table = r->n_blocks,
                                  .first_token = save->chunks[i].first_token,
                                  .n_tokens = save->chunks[i].n_tokens,
                                  .to_token = save->chunks[i].n_tokens};
    status = gpu->functions->read(gpu->device, runs, save->n_chunks, after, copies);
    for (uint32_t i = 0; i < save->n_chunks && status == CG_OK; i++) {
        save->chunks[i].copy = copies[i];
        save->chunks[i].has_copy = true;
    }
    if (status == CG_ERR_DEVICE)
        cg_handle_check_gpu(save->op.connector);
    if (status == CG_OK && save->n_chunks > 0) {
        save->last_copy = copies[save->n_chunks - 1];
        if (!save->holds_later)
            status = cg_save_hold(save, gpu, after);
    }
    save->is_copied = true; /* no thread of ours reads the blocks */
    save->progress.copied = !save->holds_later || save->n_chunks == 0;
done:
    free(runs);
    free(copies);
    return status;
}

/* With the lock held: there may be copying to be done later, which holds a reference. */
static void expect_copy(cachegen_save *save)
{
    save->op.n_refs += save->table != NULL;
    save->op.runtime->n_copying += save->table != NULL;
}

/* Gives it to the pool, before what that encodes. */
static void submit_copy(cachegen_save *save)
{
    cg_runtime *rt = save->op.runtime;
    cg_job *job = &save->copy_job;
    if (save->table == NULL || cg_pool_submit(rt->pool, CG_JOB_DECODE, job) == CG_OK)
        return;
    for (uint32_t i = 0; i < job->n_tasks; i++)
        job->run(job, i, NULL);
    job->done(job);
}

static bool request_is_valid(const cachegen_save_request *r)
{
    const cachegen_request *q = &r->request;
    return q->tokens != NULL && r->from_token <= r->to_token && r->to_token <= q->n_tokens &&
           r->to_token > 0 && (q->salt != NULL || q->salt_bytes == 0) &&
           (q->extra != NULL || q->extra_bytes == 0) && r->prefix_level < CG_N_LEVELS &&
           (r->context == NULL || cg_tree_name_is_valid(r->context));
}

/* With the lock held: nothing of it is left to do. */
static void end_at_once(cachegen_save *save)
{
    save->progress.loaded_tokens = save->n_tokens;
    save->progress.copied = 1;
    save->is_copied = true;
    cg_operation_begin(&save->op);
    cg_operation_finish(&save->op);
}

/* Where a save's K and V are, and which of its heads. */
typedef struct source {
    const cg_kv_layout *layout;
    const cg_gpu *gpu; /* NULL: the CPU reads the blocks */
    bool has_some_heads;
} source;

/* Checks all of a request before anything is changed. */
static cg_status find_source(cachegen *c, const cachegen_save_request *r, source *out)
{
    *out = (source){.layout = NULL};
    if (!request_is_valid(r))
        return CG_ERR_INVALID_ARGUMENT;
    if (c->config->read_only)
        return CG_ERR_READ_ONLY;
    out->layout = cg_handle_layout(c, r->kv_id);
    if (out->layout == NULL ||
        !cg_kv_layout_covers(out->layout, r->block_table, r->n_blocks, r->to_token))
        return CG_ERR_INVALID_ARGUMENT;
    if (out->layout->given.n_layers != c->model.geometry.n_layers)
        return CG_ERR_UNSUPPORTED; /* a pipeline stage has a part of each chunk only */
    out->has_some_heads = !cg_kv_layout_is_whole(out->layout, c->model.geometry.n_kv_heads);
    if (out->layout->given.memory != CACHEGEN_MEMORY_CUDA)
        return CG_OK;
    if (r->after_kind > CACHEGEN_AFTER_EVENT)
        return CG_ERR_INVALID_ARGUMENT;
    out->gpu = cg_handle_gpu(c);
    return out->gpu != NULL ? CG_OK : CG_ERR_DEVICE;
}

/* Of a rank that counts its calls. */
static uint64_t next_number(cachegen *c)
{
    return atomic_fetch_add(&c->n_saves, 1) + 1;
}

/* What a save is of: its number and keys. */
static cg_status describe(cachegen_save *save, const source *from, const cachegen_save_request *r)
{
    save->prefix_level = (uint8_t)r->prefix_level;
    save->has_some_heads = from->has_some_heads;
    save->holds_later =
        from->gpu != NULL && r->hold_later != 0 && r->after_kind == CACHEGEN_AFTER_STREAM;
    save->number = r->number;
    const cg_status status = fill_keys(save, r);
    if (status != CG_OK)
        return status;
    /* All ranks come to the same: they have the same configuration and model. */
    save->heads_to = from->gpu != NULL && save->n_keys - save->from_key > from->gpu->n_copies
                         ? save->from_key + from->gpu->n_copies
                         : save->n_keys;
    return CG_OK;
}

/* The save of a rank whose heads another one stores: they are passed on. */
static cg_status start_sending(cachegen_save *save, const source *from,
                               const cachegen_save_request *r)
{
    cg_runtime *rt = save->op.runtime;
    const cg_status status = cg_save_send_heads(save, from->gpu, from->layout, r);
    if (status != CG_OK)
        return status;
    pthread_mutex_lock(&rt->lock);
    expect_copy(save);
    if (save->table != NULL)
        cg_operation_begin(&save->op);
    else if (!save->passes_later)
        end_at_once(save);
    pthread_mutex_unlock(&rt->lock);
    return CG_OK;
}

/* Gives the save to the writer, unless there is nothing to write. */
static cg_status queue(cachegen_save *save)
{
    cg_runtime *rt = save->op.runtime;
    cg_status status = CG_OK;
    pthread_mutex_lock(&rt->lock);
    /* The store has it all; other ranks' heads may have come all the same, for the writer to drop.
     */
    if (save->n_chunks == 0 && save->context == NULL && !save->has_some_heads) {
        end_at_once(save);
    } else if (rt->writer_is_stuck) {
        status = CG_ERR_TIMED_OUT;
    } else if ((status = cg_runtime_start(rt, &rt->watcher, "cachegen-watch", cg_saves_watch)) ==
                   CG_OK &&
               (status = cg_runtime_start(rt, &rt->writer, "cachegen-save", cg_save_writer)) ==
                   CG_OK) {
        cg_operation_begin(&save->op);
        cg_operation_put(&rt->saves, &save->op);
        cg_runtime_reopen_store(rt);
        expect_copy(save);
    }
    pthread_mutex_unlock(&rt->lock);
    return status;
}

/* The save of a rank that stores: staged, copied and queued. */
static cg_status start_storing(cachegen_save *save, const source *from,
                               const cachegen_save_request *r)
{
    cg_runtime *rt = save->op.runtime;
    uint64_t staging_bytes = 0;
    if (r->is_last && r->context != NULL && (save->context = strdup(r->context)) == NULL)
        return CG_ERR_NO_MEMORY;
    cg_status status =
        reserve_staging(save, from->gpu != NULL ? from->gpu->n_copies : UINT32_MAX, &staging_bytes);
    if (status != CG_OK)
        return status;
    status = from->gpu != NULL ? copy_off_gpu(save, from->gpu, from->layout, r)
                               : begin_copy(save, from->layout, r);
    if (status == CG_OK)
        status = queue(save);
    if (status == CG_OK)
        return CG_OK;
    pthread_mutex_lock(&rt->lock);
    rt->staging_bytes -= staging_bytes;
    if (status != CG_ERR_AGAIN) /* the GPU's copies wait to be encoded */
        cg_save_count_dropped(rt, save->n_chunks, status);
    rt->stats.gpu_errors += status == CG_ERR_DEVICE;
    pthread_mutex_unlock(&rt->lock);
    return status;
}

static cg_status start(cachegen *c, const cachegen_save_request *r, cachegen_save **out)
{
    source from;
    cg_status status = find_source(c, r, &from);
    if (status != CG_OK)
        return status;
    cachegen_save *save = cg_operation_new(c, sizeof *save, save_destroy);
    if (save == NULL)
        return CG_ERR_NO_MEMORY;
    atomic_init(&save->cut_index, UINT32_MAX);
    const cg_gather *gather = atomic_load_explicit(&c->gather, memory_order_acquire);
    status = describe(save, &from, r);
    if (status == CG_OK)
        status = from.has_some_heads && !cg_gather_listens(gather) ? start_sending(save, &from, r)
                                                                   : start_storing(save, &from, r);
    if (status != CG_OK) {
        save_destroy(&save->op);
        return status;
    }
    submit_copy(save);
    *out = save;
    return CG_OK;
}

cachegen_status cachegen_save_start(cachegen *connector, const cachegen_save_request *request,
                                    cachegen_save **out)
{
    cachegen_save_request r;
    if (out == NULL)
        return CG_ERR_INVALID_ARGUMENT;
    *out = NULL;
    if (connector == NULL)
        return CG_ERR_INVALID_ARGUMENT;
    cg_status status = cg_abi_take(request, &r, sizeof r);
    if (status != CG_OK)
        return status;
    /* What fails counts, too, and what is refused: other ranks may have taken it. */
    if (r.number == 0)
        r.number = next_number(connector);
    status = start(connector, &r, out);
    /* CG_ERR_AGAIN: the rank that stores knows, or hears it by the next number. */
    if (status != CG_OK && status != CG_ERR_AGAIN)
        cachegen_save_refuse(connector, r.number);
    return status;
}

void cachegen_save_refuse(cachegen *connector, uint64_t number)
{
    if (connector == NULL)
        return;
    cg_gather *gather = atomic_load_explicit(&connector->gather, memory_order_acquire);
    if (number == 0)
        number = next_number(connector);
    if (gather != NULL && !cg_gather_listens(gather))
        cg_gather_refuse(gather, number);
}

cachegen_status cachegen_save_poll(cachegen_save *save, cachegen_progress *progress_out)
{
    if (save == NULL)
        return CG_ERR_INVALID_ARGUMENT;
    if (save->holds_later && cg_operation_is_ours(&save->op)) {
        cg_runtime *rt = save->op.runtime;
        pthread_mutex_lock(&rt->lock);
        /* A save that was given up is the writer's, too. */
        if (save->op.done && rt->saving != &save->op)
            save->progress.copied = 1;
        pthread_mutex_unlock(&rt->lock);
    }
    return cg_operation_poll(&save->op, &save->progress, 0, progress_out);
}

cachegen_status cachegen_save_hold(cachegen_save *save, void *stream)
{
    if (save == NULL)
        return CG_ERR_INVALID_ARGUMENT;
    if (!save->holds_later || !cg_operation_is_ours(&save->op))
        return CG_OK; /* nothing of it reads blocks that the engine may not overwrite */
    const cg_gpu *gpu = atomic_load(&save->op.connector->gpu);
    return cg_save_hold(save, gpu, (cg_after){CG_AFTER_STREAM, stream});
}

void cachegen_save_cut(cachegen_save *save)
{
    cachegen_save_cut_from(save, 0);
}

void cachegen_save_cut_from(cachegen_save *save, uint32_t token)
{
    uint32_t index = 0;
    if (save == NULL || !cg_operation_is_ours(&save->op))
        return;
    cg_runtime *rt = save->op.runtime;
    pthread_mutex_lock(&rt->lock);
    /* A GPU's copies are known as a whole only. A rank that passes its heads on has no chunks. */
    while (!save->holds_later && index < save->n_chunks &&
           save->chunks[index].first_token + save->chunks[index].n_tokens <= token)
        index++;
    if (index < atomic_load(&save->cut_index))
        atomic_store(&save->cut_index, index);
    if (index == 0)
        save->progress.copied = 1;
    pthread_mutex_unlock(&rt->lock);
}

void cachegen_save_free(cachegen_save *save)
{
    if (save == NULL || !cg_operation_is_ours(&save->op))
        return; /* a parent's is left as it is */
    cg_runtime *rt = save->op.runtime;
    pthread_mutex_lock(&rt->lock);
    cg_operation_wait(&save->op);
    /* After a cut of all nobody wants the copy, and the copying holds the save as long as it needs
     * it. */
    while (!save->is_copied && atomic_load(&save->cut_index) > 0)
        pthread_cond_wait(&rt->changed, &rt->lock);
    cg_operation_unref(&save->op);
    pthread_mutex_unlock(&rt->lock);
}
