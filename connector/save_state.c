#include "connector/save_state.h"

#include "connector/clock.h"

#include <stdlib.h>
#include <string.h>

uint8_t cg_save_outdoes(uint8_t prefix_level, const cg_store_entry *there)
{
    uint8_t outdone = 0;
    for (unsigned level = 0; level < CG_N_LEVELS; level++)
        if ((there->levels >> level & 1) != 0 && there->prefix_level[level] > CG_L1 &&
            there->prefix_level[level] > prefix_level)
            outdone |= (uint8_t)(1u << level);
    return outdone;
}

bool cg_save_free_raw(cg_save_chunk *chunk)
{
    const bool had_one = chunk->has_copy || chunk->raw != NULL;
    if (chunk->has_copy) {
        /* Not cg_handle_gpu(): a GPU that is off gets its copy back, too. */
        const cg_gpu *gpu = atomic_load(&chunk->save->op.connector->gpu);
        gpu->functions->read_release(gpu->device, chunk->copy);
    } else {
        free(chunk->raw);
    }
    chunk->has_copy = false;
    chunk->raw = NULL;
    return had_one;
}

cg_status cg_save_take_raw(cg_save_chunk *chunk)
{
    cachegen *c = chunk->save->op.connector;
    void *elements = NULL;
    if (!chunk->has_copy || chunk->raw != NULL)
        return CG_OK;
    const cg_gpu *gpu = atomic_load(&c->gpu);
    const cg_status status = gpu->functions->read_wait(gpu->device, chunk->copy, &elements);
    if (status == CG_ERR_DEVICE)
        cg_handle_check_gpu(c);
    if (status == CG_OK && !cg_save_is_in_time(chunk->save))
        return CG_ERR_CANCELLED;
    chunk->raw = status == CG_OK ? elements : NULL;
    return status;
}

bool cg_save_is_in_time(const cachegen_save *save)
{
    /* Asked after the copy is there: a cut that comes later is none of it. */
    return !save->holds_later || atomic_load(&save->cut_index) == UINT32_MAX;
}

cg_status cg_save_hold(cachegen_save *save, const cg_gpu *gpu, cg_after after)
{
    cg_runtime *rt = save->op.runtime;
    const cg_status status = gpu->functions->hold(gpu->device, save->last_copy, after);
    if (status == CG_ERR_DEVICE)
        cg_handle_check_gpu(save->op.connector);
    pthread_mutex_lock(&rt->lock);
    if (status != CG_OK)
        atomic_store(&save->cut_index, 0);
    save->progress.copied = 1;
    pthread_mutex_unlock(&rt->lock);
    return status;
}

void cg_save_release_raw(cg_save_chunk *chunk)
{
    cg_runtime *rt = chunk->save->op.runtime;
    /* While the pool copies into it, it must stay: then the copying or the writer releases it
     * later. */
    if (!chunk->save->is_copied)
        return;
    if (!chunk->has_copy && chunk->raw != NULL) {
        memcpy(chunk->raw, &rt->released, sizeof rt->released);
        rt->released = chunk->raw;
        chunk->raw = NULL;
        rt->staging_bytes -= chunk->raw_bytes;
    } else if (cg_save_free_raw(chunk)) {
        rt->staging_bytes -= chunk->raw_bytes;
    }
}

void cg_save_unlock(cg_runtime *rt)
{
    uint8_t *raw = rt->released, *next;
    rt->released = NULL;
    pthread_mutex_unlock(&rt->lock);
    for (; raw != NULL; raw = next) {
        memcpy(&next, raw, sizeof next);
        free(raw);
    }
}

bool cg_save_has_room(const cg_runtime *rt, uint64_t n_bytes, uint64_t encoder_bytes)
{
    const uint64_t limit = (uint64_t)rt->connector->config->staging_mib << 20;
    const uint64_t encoders =
        rt->encoding_bytes > encoder_bytes ? rt->encoding_bytes : encoder_bytes;
    return rt->staging_bytes + n_bytes + encoders <= limit;
}

void cg_save_note_peak(cg_runtime *rt)
{
    const uint64_t now_bytes = rt->staging_bytes + rt->encoding_bytes;
    if (now_bytes > rt->stats.staging_peak_bytes)
        rt->stats.staging_peak_bytes = now_bytes;
}

bool cg_save_claim_encoder(cg_save_chunk *chunk)
{
    cg_runtime *rt = chunk->save->op.runtime;
    const uint64_t limit = (uint64_t)rt->connector->config->staging_mib << 20;
    /* The only encoder always gets its memory, or a chunk larger than the limit would never be
     * encoded. */
    if (rt->encoding_bytes > 0 && rt->staging_bytes + rt->encoding_bytes + chunk->raw_bytes > limit)
        return false;
    chunk->encoding_bytes = chunk->raw_bytes;
    rt->encoding_bytes += chunk->raw_bytes;
    cg_save_note_peak(rt);
    return true;
}

void cg_save_release_encoder(cg_save_chunk *chunk)
{
    chunk->save->op.runtime->encoding_bytes -= chunk->encoding_bytes;
    chunk->encoding_bytes = 0;
}

bool cg_save_keep_table(cachegen_save *save, const cg_kv_layout *layout,
                        const cachegen_save_request *r)
{
    const size_t n_bytes = r->n_blocks * sizeof *save->table;
    if ((save->table = malloc(n_bytes)) == NULL)
        return false;
    memcpy(save->table, r->block_table, n_bytes);
    save->layout = layout;
    return true;
}

void cg_save_end_reading(cachegen_save *save, uint32_t task_index)
{
    cg_runtime *rt = save->op.runtime;
    pthread_mutex_lock(&rt->lock);
    if (task_index >= atomic_load(&save->cut_index) && task_index < save->n_whole)
        save->n_whole = task_index;
    pthread_mutex_unlock(&rt->lock);
}

void cg_save_end_copying(cachegen_save *save)
{
    save->is_copied = true;
    save->progress.copied = 1;
    save->op.runtime->n_copying--;
}

void cg_save_count_dropped(cg_runtime *rt, uint32_t n_chunks, cg_status status)
{
    cachegen_stats *stats = &rt->stats;
    stats->saves_dropped += n_chunks;
    if (status == CG_OK)
        stats->saves_dropped_unreachable += n_chunks;
    else if (status == CG_ERR_TIMED_OUT)
        stats->saves_dropped_timed_out += n_chunks;
    else
        stats->saves_dropped_failed += n_chunks;
}

void cg_save_finish(cachegen_save *save, cg_status status)
{
    cg_runtime *rt = save->op.runtime;
    cachegen_progress *p = &save->progress;
    if (save->op.done)
        return;
    atomic_store(&save->is_over, true);
    p->status = status;
    p->loaded_tokens =
        save->n_saved == save->n_chunks ? save->end_token : save->chunks[save->n_saved].first_token;
    p->total_ns = cg_now_ns() - save->op.started_ns;
    /* Another rank's heads do not come where its engine needed the blocks, which is no error. */
    rt->stats.save_errors += status != CG_OK && status != CG_ERR_CANCELLED;
    const uint32_t n_dropped = save->n_chunks - save->n_saved;
    if (save->is_incomplete) {
        rt->stats.saves_dropped += n_dropped;
        rt->stats.saves_dropped_incomplete += n_dropped;
    } else {
        cg_save_count_dropped(rt, n_dropped, save->is_behind_hole ? CG_OK : status);
    }
    cg_operation_finish(&save->op);
}

static void end_all_that_wait(cg_runtime *rt, cg_status status)
{
    while (rt->saves.head != NULL) {
        cachegen_save *save = (cachegen_save *)cg_operation_take(rt, &rt->saves);
        for (uint32_t i = 0; i < save->n_chunks; i++)
            cg_save_release_raw(&save->chunks[i]);
        cg_save_finish(save, status);
    }
}

void cg_saves_give_up(cg_runtime *rt)
{
    /* A writer that has no save only waits for one. */
    rt->writer_is_stuck = rt->saving != NULL;
    rt->step_until_ns = UINT64_MAX;
    if (rt->saving != NULL)
        cg_save_finish((cachegen_save *)rt->saving, CG_ERR_TIMED_OUT);
    end_all_that_wait(rt, CG_ERR_TIMED_OUT);
}

void *cg_saves_watch(void *argument)
{
    cg_runtime *rt = argument;
    pthread_mutex_lock(&rt->lock);
    while (!rt->stop)
        if (cg_now_ns() >= rt->step_until_ns) {
            cg_saves_give_up(rt);
            cg_save_unlock(rt);
            pthread_mutex_lock(&rt->lock);
        } else {
            cg_runtime_wait(rt, &rt->watched, rt->step_until_ns);
        }
    cg_runtime_leave(rt);
    return NULL;
}
