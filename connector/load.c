#include "connector/load.h"

#include "connector/abi_struct.h"
#include "connector/clock.h"
#include "connector/reader.h"

#include <stdlib.h>
#include <string.h>

static void run_verify(cg_job *job, uint32_t task_index, cg_scratch *scratch);
static void run_decode(cg_job *job, uint32_t task_index, cg_scratch *scratch);
static void verify_done(cg_job *job);
static void decode_done(cg_job *job);

/* ---- the operation's life; the lock is held ---- */

static void load_destroy(cg_operation *op)
{
    cachegen_load *load = (cachegen_load *)op;
    cg_plan_free(load->plan);
    free(load->table);
    free(load->levels);
    free(load->sizes);
    free(load->chunks);
    free(load);
}

bool cg_load_wants(const cachegen_load *load)
{
    return !load->cancelled && load->next_index < load->fail_index;
}

void cg_load_settle(cachegen_load *load)
{
    cg_runtime *rt = load->op.runtime;
    if (load->op.done || load->n_jobs > 0 ||
        (!load->cancelled && load->whole_index < load->fail_index))
        return;
    cachegen_progress *p = &load->progress;
    p->total_ns = cg_now_ns() - load->op.started_ns;
    if (p->status == CACHEGEN_OK && load->cancelled && load->whole_index < load->end)
        p->status = CG_ERR_CANCELLED;
    rt->stats.loads++;
    rt->stats.loads_cancelled += p->status == CG_ERR_CANCELLED;
    rt->stats.loads_failed += p->status != CACHEGEN_OK && p->status != CG_ERR_CANCELLED;
    rt->stats.tokens_loaded += p->loaded_tokens - load->from_token;
    for (cachegen_load **at = &rt->loads; *at != NULL; at = &(*at)->next)
        if (*at == load) {
            *at = load->next;
            break;
        }
    cg_operation_finish(&load->op);
}

/* Counts a refusal; whether it means that the file itself is wrong. */
static bool count_refusal(cachegen_stats *stats, cg_status status)
{
    switch (status) {
    case CG_ERR_NOT_FOUND: stats->chunks_missing++; return false;
    case CG_ERR_LOSSY_PREFIX: stats->chunks_lossy_prefix++; return false;
    case CG_ERR_TIMED_OUT: stats->chunks_timed_out++; return false;
    case CG_ERR_IO:
    case CG_ERR_PERMISSION:
    case CG_ERR_NO_MEMORY:
    case CG_ERR_INVALID_ARGUMENT:
        stats->chunks_io_error++;
        return false; /* the last: a folder or link in its place */
    case CG_ERR_TRUNCATED: stats->chunks_truncated++; return true;
    case CG_ERR_FOREIGN_MODEL: stats->chunks_foreign_model++; return true;
    case CG_ERR_FOREIGN_PROFILE: stats->chunks_foreign_profile++; return true;
    case CG_ERR_FOREIGN_TOKENS: stats->chunks_foreign_tokens++; return true;
    default: stats->chunks_corrupt++; return true;
    }
}

static void fail(cg_load_chunk *chunk, uint8_t level, cg_status status)
{
    cachegen_load *load = chunk->load;
    cg_runtime *rt = load->op.runtime;
    chunk->state = CG_LOAD_FAILED;
    if (load->cancelled || chunk->index > load->fail_index)
        return; /* nobody waits for it */
    const bool damaged = count_refusal(&rt->stats, status);
    const uint64_t until_ns =
        cg_now_ns() + load->op.connector->config->retry_ms * UINT64_C(1000000);
    const cg_key *key = &load->plan->keys[chunk->index + 1];
    if (status == CG_ERR_LOSSY_PREFIX) /* good for others; chunk->worst_level is its provenance */
        cg_chunk_memory_provenance(rt->chunk_memory, key, level, chunk->worst_level, until_ns);
    else if (status != CG_ERR_NO_MEMORY)
        cg_chunk_memory_failed(rt->chunk_memory, key, (uint8_t)(1u << level), damaged, until_ns);
    load->fail_index = chunk->index;
    load->progress.status = status;
}

void cg_load_read_begun(cg_load_chunk *chunk, uint64_t now_ns)
{
    cachegen_load *load = chunk->load;
    chunk->state = CG_LOAD_READING;
    chunk->n_reads++;
    load->op.n_refs++;
    if (load->n_reading++ == 0)
        load->reading_since_ns = now_ns;
}

bool cg_load_read_ended(cg_load_chunk *chunk, uint8_t level, cg_status status, cg_io_buffer *buffer,
                        uint64_t completed_ns)
{
    cachegen_load *load = chunk->load;
    bool submit = false;
    chunk->n_reads--;
    if (--load->n_reading == 0 && !load->op.done) {
        const uint64_t read_ns =
            completed_ns > load->reading_since_ns ? completed_ns - load->reading_since_ns : 0;
        load->progress.read_ns += read_ns;
        load->op.runtime->stats.read_ns += read_ns;
    }
    const size_t n_bytes = buffer != NULL ? buffer->n_bytes : 0;
    load->op.runtime->stats.bytes_read += n_bytes;
    if (!load->op.done)
        load->progress.bytes_read += n_bytes;
    if (chunk->state != CG_LOAD_READING || load->cancelled || load->op.done ||
        chunk->index >= load->fail_index) {
        cg_io_buffer_release(buffer); /* another read was faster, or it does not matter any more */
    } else if (status == CG_OK) {
        chunk->state = CG_LOAD_DECODING;
        chunk->level = level;
        chunk->buffer = buffer;
        load->n_jobs++;
        submit = true;
    } else if (chunk->n_reads == 0) {
        fail(chunk, level, status);
    }
    if (!submit)
        cg_load_settle(load);
    /* The read's reference. Jobs keep the load undone, and the list keeps it until then. */
    cg_operation_unref(&load->op);
    return submit;
}

uint8_t cg_load_level(cachegen_load *load)
{
    cg_runtime *rt = load->op.runtime;
    const cg_plan *plan = load->plan;
    const uint32_t i = load->next_index;
    if (plan->level_plus_1 == 0 && cg_estimator_bps(&rt->speeds.link) > 0 &&
        (!load->decided || load->decided_generation != rt->speeds.link.generation)) {
        const uint64_t now_ns = cg_now_ns();
        cg_controller_input input = {
            .policy = (cg_policy)plan->policy,
            .chunks = load->sizes + i,
            .n_chunks = load->end - i,
            .budget_ns = load->deadline_ns > now_ns ? load->deadline_ns - now_ns : 0,
            .link_bps = cg_estimator_bps(&rt->speeds.link)};
        cg_speeds_decode(&rt->speeds, input.decode_ns_per_token);
        cg_controller_decide(
            &input, load->levels + i); /* no recompute speed: how much is loaded was decided */
        load->decided = true;
        load->decided_generation = rt->speeds.link.generation;
    }
    return load->levels[i];
}

/* ---- a chunk that arrived; on the pool's threads, without the lock ---- */

void cg_load_submit(cg_load_chunk *chunk)
{
    cachegen_load *load = chunk->load;
    cg_runtime *rt = load->op.runtime;
    chunk->job = (cg_job){.run = run_verify, .done = verify_done, .n_tasks = 1};
    const cg_status status = cg_pool_submit(rt->pool, CG_JOB_DECODE, &chunk->job);
    if (status != CG_OK) {
        chunk->status = status;
        decode_done(&chunk->job);
    }
}

static cg_load_chunk *chunk_of(cg_job *job)
{
    return (cg_load_chunk *)((char *)job - offsetof(cg_load_chunk, job));
}

/* Everything that shows before decoding whether these are the bytes that were asked for. */
static cg_status verify(cg_load_chunk *chunk)
{
    const cachegen_load *load = chunk->load;
    const cg_model *model = &load->op.connector->model;
    const cg_plan *plan = load->plan;
    const cg_plan_chunk *wanted = &plan->chunks[chunk->index];
    cg_chunk parsed;
    const cg_chunk_header *h = &parsed.header;
    cg_status status = cg_chunk_open(chunk->buffer->data, chunk->buffer->n_bytes, &parsed);
    if (status == CG_OK && h->level < chunk->level &&
        cg_chunk_holds(h, chunk->level)) /* more was read than asked for */
        status = cg_chunk_open(chunk->buffer->data, h->level_bytes[chunk->level], &parsed);
    if (status != CG_OK)
        return status;
    if (memcmp(&h->model, &model->fingerprint, sizeof h->model) != 0 ||
        !cg_geometry_equal(&h->geometry, &model->geometry))
        return CG_ERR_FOREIGN_MODEL;
    if (h->level != chunk->level)
        return CG_ERR_CORRUPT;
    if (h->level != CG_L0 &&
        memcmp(&h->profile, &model->profile_fingerprint, sizeof h->profile) != 0)
        return CG_ERR_FOREIGN_PROFILE;
    if (!cg_key_equal(&h->key, &plan->keys[chunk->index + 1]) ||
        !cg_key_equal(&h->parent, &plan->keys[chunk->index]) ||
        !cg_key_equal(&h->extra, &plan->extra) || h->first_position != wanted->first_token ||
        h->n_tokens != wanted->sizes.n_tokens)
        return CG_ERR_FOREIGN_TOKENS;
    uint32_t *tokens = malloc(h->n_tokens * sizeof *tokens);
    if (tokens == NULL)
        return CG_ERR_NO_MEMORY;
    status = cg_chunk_tokens(&parsed, tokens);
    if (status == CG_OK &&
        memcmp(tokens, plan->tokens + (wanted->first_token - plan->first_position),
               h->n_tokens * sizeof *tokens) != 0)
        status = CG_ERR_FOREIGN_TOKENS;
    free(tokens);
    if (status != CG_OK)
        return status;
    chunk->worst_level = h->prefix_level > h->level ? h->prefix_level : h->level;
    if (chunk->worst_level > plan->worst_level)
        return CG_ERR_LOSSY_PREFIX;
    return cg_decoder_new(h->level == CG_L0 ? NULL : model->profile, parsed.bytes, parsed.n_bytes,
                          &chunk->decoder);
}

static void run_verify(cg_job *job, uint32_t task_index, cg_scratch *scratch)
{
    (void)task_index;
    (void)scratch;
    cg_load_chunk *chunk = chunk_of(job);
    chunk->status = verify(chunk);
}

static void verify_done(cg_job *job)
{
    cg_load_chunk *chunk = chunk_of(job);
    cg_runtime *rt = chunk->load->op.runtime;
    cg_status status = chunk->status;
    if (status == CG_OK) {
        *job = (cg_job){
            .run = run_decode, .done = decode_done, .n_tasks = cg_decoder_n_tasks(chunk->decoder)};
        status = job->n_tasks > 0 ? cg_pool_submit(rt->pool, CG_JOB_DECODE, job) : CG_ERR_CORRUPT;
        if (status == CG_OK)
            return; /* the chunk is its tasks' now, and may be gone */
    }
    chunk->status = status;
    decode_done(job);
}

/* Writes what lies in [from, to) of one decoded tile group. */
static void deliver(const cachegen_load *load, const cg_plan_chunk *planned,
                    const cg_task_shape *shape, const uint8_t *tiles)
{
    const cachegen_kv_layout *g = &load->layout->given;
    const uint32_t chunk_end = planned->first_token + planned->sizes.n_tokens;
    const uint32_t begin =
        planned->first_token > load->from_token ? planned->first_token : load->from_token;
    const uint32_t end = chunk_end < load->to_token ? chunk_end : load->to_token;
    const size_t tile_bytes = shape->elements_bytes / shape->n_layers;
    const size_t token_bytes = tile_bytes / planned->sizes.n_tokens;
    for (uint32_t i = 0; i < shape->n_layers; i++) {
        const uint32_t layer = shape->first_layer + i;
        if (layer >= g->first_layer && layer < g->first_layer + g->n_layers)
            cg_blocks_write(load->layout, load->table, layer, shape->plane, begin, end - begin,
                            tiles + i * tile_bytes + (begin - planned->first_token) * token_bytes);
    }
}

static void run_decode(cg_job *job, uint32_t task_index, cg_scratch *scratch)
{
    cg_load_chunk *chunk = chunk_of(job);
    cachegen_load *load = chunk->load;
    cg_runtime *rt = load->op.runtime;
    pthread_mutex_lock(&rt->lock);
    const bool pointless =
        load->cancelled || chunk->index > load->fail_index || chunk->status != CG_OK;
    pthread_mutex_unlock(&rt->lock);
    if (pointless)
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
    pthread_mutex_lock(&rt->lock);
    if (status != CG_OK && chunk->status == CG_OK)
        chunk->status = status;
    chunk->decode_ns += decoded_ns - began_ns;
    load->progress.decode_ns += decoded_ns - began_ns;
    load->progress.copy_ns += copied_ns - decoded_ns;
    rt->stats.decode_ns += decoded_ns - began_ns;
    rt->stats.copy_ns += copied_ns - decoded_ns;
    pthread_mutex_unlock(&rt->lock);
}

static void advance(cachegen_load *load)
{
    cachegen_progress *p = &load->progress;
    while (load->whole_index < load->end && load->chunks[load->whole_index].state == CG_LOAD_DONE) {
        const cg_load_chunk *chunk = &load->chunks[load->whole_index++];
        const cg_plan_chunk *planned = &load->plan->chunks[chunk->index];
        const uint32_t chunk_end = planned->first_token + planned->sizes.n_tokens;
        p->loaded_tokens = chunk_end < load->to_token ? chunk_end : load->to_token;
        if (chunk->worst_level > p->worst_level)
            p->worst_level = chunk->worst_level;
    }
}

/* The job's last word on a chunk; takes the lock itself. */
static void decode_done(cg_job *job)
{
    cg_load_chunk *chunk = chunk_of(job);
    cachegen_load *load = chunk->load;
    cg_runtime *rt = load->op.runtime;
    cg_decoder_free(chunk->decoder);
    cg_io_buffer_release(chunk->buffer);
    chunk->decoder = NULL;
    chunk->buffer = NULL;

    pthread_mutex_lock(&rt->lock);
    load->n_jobs--;
    if (chunk->status != CG_OK) {
        fail(chunk, chunk->level, chunk->status);
    } else if (!load->cancelled &&
               chunk->index < load->fail_index) { /* else tasks may have been skipped */
        cg_speeds_add_decode(&rt->speeds, chunk->level,
                             load->plan->chunks[chunk->index].sizes.n_tokens, chunk->decode_ns);
        chunk->state = CG_LOAD_DONE;
        rt->stats.chunks_loaded[chunk->level]++;
        advance(load);
    }
    cg_runtime_wake_reader(rt);
    cg_load_settle(load);
    pthread_mutex_unlock(&rt->lock);
}

/* ---- the ABI ---- */

static cg_status check_plan(const cachegen *c, const cg_plan *plan, const cachegen_load_request *r)
{
    if (memcmp(&plan->model, &c->model.fingerprint, sizeof plan->model) != 0 ||
        plan->dtype != c->model.geometry.dtype)
        return CG_ERR_FOREIGN_MODEL;
    if (memcmp(&plan->profile, &c->model.profile_fingerprint, sizeof plan->profile) != 0)
        return CG_ERR_FOREIGN_PROFILE;
    if (r->from_token > r->to_token || r->to_token > plan->hit_tokens ||
        (r->from_token < plan->first_position && r->from_token < r->to_token))
        return CG_ERR_INVALID_ARGUMENT;
    return CG_OK;
}

static cg_status fill(cachegen_load *load, const cachegen_load_request *r)
{
    const cg_plan *plan = load->plan;
    load->from_token = r->from_token;
    load->to_token = r->to_token;
    load->progress.loaded_tokens = r->from_token;
    load->table = malloc((r->n_blocks + (size_t)1) * sizeof *load->table);
    load->levels = malloc(plan->n_chunks + (size_t)1);
    load->sizes = malloc((plan->n_chunks + (size_t)1) * sizeof *load->sizes);
    load->chunks = calloc(plan->n_chunks + (size_t)1, sizeof *load->chunks);
    if (load->table == NULL || load->levels == NULL || load->sizes == NULL || load->chunks == NULL)
        return CG_ERR_NO_MEMORY;
    if (r->n_blocks > 0)
        memcpy(load->table, r->block_table, r->n_blocks * sizeof *load->table);
    if (r->from_token < r->to_token) {
        load->first = (r->from_token - plan->first_position) / plan->chunk_tokens;
        load->end = (r->to_token - plan->first_position - 1) / plan->chunk_tokens + 1;
    }
    load->next_index = load->whole_index = load->first;
    load->fail_index = load->end;
    for (uint32_t i = 0; i < plan->n_chunks; i++) {
        load->chunks[i].load = load;
        load->chunks[i].index = i;
        load->levels[i] = plan->chunks[i].level;
        load->sizes[i] = plan->chunks[i].sizes;
    }
    /* What has passed of the budget is counted by the wall clock: the plan may come from another
     * process. */
    const uint64_t wall_ns = cg_realtime_ns();
    const uint64_t spent_ns =
        wall_ns > plan->started_realtime_ns ? wall_ns - plan->started_realtime_ns : 0;
    const uint64_t left_ns = plan->budget_ns > spent_ns ? plan->budget_ns - spent_ns : 0;
    if (__builtin_add_overflow(cg_now_ns(), left_ns, &load->deadline_ns))
        load->deadline_ns = UINT64_MAX;
    return CG_OK;
}

cachegen_status cachegen_load_start(cachegen *connector, const cachegen_load_request *request,
                                    cachegen_load **out)
{
    cachegen_load_request r;
    if (out == NULL)
        return CG_ERR_INVALID_ARGUMENT;
    *out = NULL;
    if (connector == NULL || !cg_abi_take(request, &r, sizeof r) || r.plan == NULL)
        return CG_ERR_INVALID_ARGUMENT;
    const cg_kv_layout *layout = cg_handle_layout(connector, r.kv_id);
    if (layout == NULL || !cg_kv_layout_covers(layout, r.block_table, r.n_blocks, r.to_token))
        return CG_ERR_INVALID_ARGUMENT;
    cachegen_load *load = cg_operation_new(connector, sizeof *load, load_destroy);
    cg_status status = CG_ERR_NO_MEMORY;
    if (load == NULL)
        goto done;
    cg_runtime *rt = load->op.runtime;
    load->layout = layout;
    if ((status = cg_plan_parse(r.plan, r.plan_bytes, &load->plan)) != CG_OK ||
        (status = check_plan(connector, load->plan, &r)) != CG_OK ||
        (status = fill(load, &r)) != CG_OK)
        goto done;

    pthread_mutex_lock(&rt->lock);
    if (load->first < load->end)
        status = cg_runtime_start(rt, &rt->reader, "cachegen-read", cg_load_reader);
    if (status == CG_OK) {
        cg_operation_begin(&load->op);
        load->next = rt->loads;
        rt->loads = load;
        cg_runtime_wake_reader(rt);
        *out = load;
        cg_load_settle(load); /* an empty load is done */
        load = NULL;
    }
    pthread_mutex_unlock(&rt->lock);
done:
    if (load != NULL)
        load_destroy(&load->op);
    return status;
}

cachegen_status cachegen_load_poll(cachegen_load *load, cachegen_progress *progress_out)
{
    if (load == NULL)
        return CG_ERR_INVALID_ARGUMENT;
    return cg_operation_poll(&load->op, &load->progress, load->from_token, progress_out);
}

static void cancel(cachegen_load *load)
{
    load->cancelled = true;
    cg_runtime_wake_reader(load->op.runtime);
    cg_load_settle(load);
}

void cachegen_load_cancel(cachegen_load *load)
{
    if (load == NULL || !cg_operation_is_ours(&load->op))
        return;
    pthread_mutex_lock(&load->op.runtime->lock);
    if (!load->op.done)
        cancel(load);
    pthread_mutex_unlock(&load->op.runtime->lock);
}

void cg_loads_cancel(cg_runtime *rt)
{
    for (cachegen_load *load = rt->loads, *next; load != NULL; load = next) {
        next = load->next; /* cancelling may take it off the list */
        cancel(load);
    }
}

void cachegen_load_free(cachegen_load *load)
{
    if (load == NULL || !cg_operation_is_ours(&load->op))
        return; /* a parent's is left as it is */
    cg_runtime *rt = load->op.runtime;
    pthread_mutex_lock(&rt->lock);
    if (!load->op.done)
        cancel(load);
    cg_operation_wait(&load->op);
    cg_operation_unref(&load->op);
    pthread_mutex_unlock(&rt->lock);
}
