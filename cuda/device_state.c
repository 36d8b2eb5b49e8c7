/* What slots, copies and projectors share: the current device, errors, runs of tokens, and marks in
 * the engine's work. */
#include "cuda/device_state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

cg_status cg_device_enter(cg_device *d, int *before_out)
{
    int error;
    /* Where it cannot be learned which one is current, cg_device_leave() changes nothing. */
    *before_out = (int)d->config.ordinal;
    if (atomic_load(&d->is_broken))
        return CG_ERR_DEVICE;
    if ((error = d->calls->get_device(before_out)) != 0)
        return cg_device_error(d, "cudaGetDevice", error, NULL);
    if (*before_out != (int)d->config.ordinal &&
        (error = d->calls->set_device((int)d->config.ordinal)) != 0)
        return cg_device_error(d, "cudaSetDevice", error, NULL);
    return CG_OK;
}

void cg_device_leave(cg_device *d, int before)
{
    if (before != (int)d->config.ordinal && d->calls->set_device(before) != 0)
        d->calls->get_last_error();
}

void cg_device_relax(cg_device *d)
{
    static _Thread_local bool is_relaxed;
    if (!is_relaxed && d->calls->relax_capture() != 0)
        d->calls->get_last_error();
    is_relaxed = true;
}

cg_status cg_device_use(cg_device *d)
{
    int before;
    cg_device_relax(d);
    return cg_device_enter(d, &before);
}

static void break_device(cg_device *d, const char *call, int error)
{
    pthread_mutex_lock(&d->lock);
    if (!atomic_load(&d->is_broken)) { /* the first reason stays: others may be reading it */
        snprintf(d->reason, sizeof d->reason, "%s failed: %s", call,
                 d->calls->get_error_string(error));
        atomic_store(&d->is_broken, true);
    }
    pthread_mutex_unlock(&d->lock);
}

void cg_device_settle(cg_device *d, cg_cuda_stream stream)
{
    const int error = d->calls->stream_synchronize(stream);
    if (error == 0)
        return;
    d->calls->get_last_error();
    break_device(d, "cudaStreamSynchronize", error);
}

cg_status cg_device_error(cg_device *d, const char *call, int error, cg_cuda_stream stream)
{
    d->calls->get_last_error();
    if (stream != NULL && d->calls->stream_synchronize(stream) != 0) {
        d->calls->get_last_error();
        break_device(d, call, error);
    }
    return CG_ERR_DEVICE;
}

cg_status cg_device_take_run(const cg_device *d, const cg_device_run *run, int64_t *table,
                             cg_cuda_blocks *blocks_out)
{
    if (run->blocks_id >= atomic_load(&d->n_blocks) || run->from_token >= run->to_token ||
        run->to_token > run->n_tokens || run->n_tokens > d->config.chunk_tokens ||
        run->first_token > UINT32_MAX - run->n_tokens)
        return CG_ERR_INVALID_ARGUMENT;
    *blocks_out = d->blocks[run->blocks_id];
    const uint32_t block_tokens = blocks_out->block_tokens;
    /* From the engine's block of the chunk's first token to that of the last wanted one; the GPU
     * counts blocks from there. */
    const uint32_t first = run->first_token / block_tokens,
                   end = (run->first_token + run->to_token - 1) / block_tokens + 1;
    if (end > run->n_table || end - first > d->table_entries)
        return CG_ERR_INVALID_ARGUMENT;
    memcpy(table, run->table + first, (end - first) * sizeof *table);
    blocks_out->n_table = end - first;
    blocks_out->first_token = run->first_token % block_tokens;
    return CG_OK;
}

cg_cuda_blocks_copy cg_device_copy_of(const cg_device *d, const cg_device_run *run,
                                      const cg_device_tiles *tiles, void *memory, bool is_write)
{
    const cg_geometry *g = &d->config.geometry;
    const uint32_t head_bytes = g->head_dim * (uint32_t)cg_dtype_bytes(g->dtype);
    return (cg_cuda_blocks_copy){.tiles = memory,
                                 .first_layer = tiles->first_layer,
                                 .n_layers = tiles->n_layers,
                                 .first_plane = tiles->first_plane,
                                 .n_planes = tiles->n_planes,
                                 .n_tokens = run->n_tokens,
                                 .from_token = run->from_token,
                                 .to_token = run->to_token,
                                 .n_kv_heads = g->n_kv_heads,
                                 .head_units = head_bytes / CG_CUDA_COPY_UNIT_BYTES,
                                 .is_write = is_write};
}

/* A mark with an event of ours, new or used before. */
static cg_status take_mark(cg_device *d, cg_device_mark **mark_out)
{
    int error;
    pthread_mutex_lock(&d->lock);
    cg_device_mark *mark = d->free_marks;
    if (mark != NULL)
        d->free_marks = mark->next;
    pthread_mutex_unlock(&d->lock);
    if ((*mark_out = mark) != NULL)
        return CG_OK;
    if ((mark = calloc(1, sizeof *mark)) == NULL)
        return CG_ERR_NO_MEMORY;
    mark->is_ours = true;
    if ((error = d->calls->event_create(&mark->event)) != 0) {
        free(mark);
        return cg_device_error(d, "cudaEventCreate", error, NULL);
    }
    *mark_out = mark;
    return CG_OK;
}

static cg_status make_mark(cg_device *d, cg_after after, cg_device_mark **mark_out)
{
    cg_status status;
    int error;
    if (after.kind == CG_AFTER_EVENT) {
        if ((*mark_out = calloc(1, sizeof **mark_out)) == NULL)
            return CG_ERR_NO_MEMORY;
        (*mark_out)->event = after.handle;
        return CG_OK;
    }
    if ((status = take_mark(d, mark_out)) != CG_OK)
        return status;
    if ((error = d->calls->event_record((*mark_out)->event, after.handle)) == 0)
        return CG_OK;
    cg_device_mark_drop(d, *mark_out);
    *mark_out = NULL;
    return cg_device_error(d, "cudaEventRecord", error, NULL);
}

cg_status cg_device_mark_make(cg_device *d, cg_after after, cg_device_mark **mark_out)
{
    int before;
    *mark_out = NULL;
    if (after.kind == CG_AFTER_NONE)
        return CG_OK;
    cg_status status = cg_device_enter(d, &before);
    if (status == CG_OK)
        status = make_mark(d, after, mark_out);
    cg_device_leave(d, before);
    return status;
}

void cg_device_mark_drop(cg_device *d, cg_device_mark *mark)
{
    if (mark == NULL || !mark->is_ours) {
        free(mark);
        return;
    }
    pthread_mutex_lock(&d->lock);
    mark->next = d->free_marks;
    d->free_marks = mark;
    pthread_mutex_unlock(&d->lock);
}

bool cg_device_mark_is_past(cg_device *d, const cg_device_mark *mark)
{
    if (mark == NULL)
        return true;
    if (cg_device_use(d) != CG_OK)
        return false;
    if (d->calls->event_query(mark->event) == 0)
        return true;
    d->calls->get_last_error(); /* "not ready" would be one */
    return false;
}

cg_status cg_device_finish(cg_device *d, cg_cuda_stream stream, cg_cuda_event done)
{
    int error;
    /* By an event and not by the stream: a thread that waits for one sleeps (cuda/calls.h). */
    if ((error = d->calls->event_record(done, stream)) != 0)
        return cg_device_error(d, "cudaEventRecord", error, stream);
    if ((error = d->calls->event_synchronize(done)) != 0)
        return cg_device_error(d, "cudaEventSynchronize", error, stream);
    return CG_OK;
}

cg_status cg_device_await(cg_device *d, cg_cuda_stream stream, const cg_device_mark *mark)
{
    const int error = mark != NULL ? d->calls->stream_wait_event(stream, mark->event) : 0;
    return error == 0 ? CG_OK : cg_device_error(d, "cudaStreamWaitEvent", error, stream);
}
