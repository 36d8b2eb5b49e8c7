/* Chunks copied out of the engine's blocks. An engine must not overwrite a block before it is
 * copied: then it is held. Where it gives its stream, that stream waits for the copies, and its
 * thread does not. */
#include "cuda/device_state.h"

/* With the lock held. A copy that was released and cannot be asked about stays as it is. */
static bool is_free(cg_device *d, cg_device_copy *copy)
{
    if (copy->state == CG_COPY_RELEASED) {
        if (d->calls->event_query(copy->done) == 0)
            copy->state = CG_COPY_FREE;
        else
            d->calls->get_last_error(); /* "not ready" would be one */
    }
    return copy->state == CG_COPY_FREE;
}

static cg_status take_copies(cg_device *d, uint32_t n_wanted, uint32_t *copies_out)
{
    uint32_t n = 0;
    pthread_mutex_lock(&d->lock);
    for (uint32_t i = 0; i < d->config.n_copies && n < n_wanted; i++)
        if (is_free(d, &d->copies[i]))
            copies_out[n++] = i;
    /* All or none: who got a part could only give it back. */
    for (uint32_t i = 0; i < n && n == n_wanted; i++)
        d->copies[copies_out[i]].state = CG_COPY_TAKEN;
    pthread_mutex_unlock(&d->lock);
    return n == n_wanted ? CG_OK : CG_ERR_AGAIN;
}

/* Nothing is under way in them. */
static void return_copies(cg_device *d, const uint32_t *copies, uint32_t n)
{
    pthread_mutex_lock(&d->lock);
    for (uint32_t i = 0; i < n; i++)
        d->copies[copies[i]].state = CG_COPY_FREE;
    pthread_mutex_unlock(&d->lock);
}

static cg_status enqueue(cg_device *d, const cg_device_run *run, cg_device_copy *to)
{
    const cg_device_tiles all = {.n_layers = d->config.geometry.n_layers, .n_planes = CG_N_PLANES};
    cg_cuda_blocks_copy copy = cg_device_copy_of(d, run, &all, (char *)to->elements, false);
    int error;
    cg_status status = cg_device_take_run(d, run, to->table, &copy.blocks);
    copy.blocks.table_dev = to->table; /* pinned: kernels read it where it is */
    if (status != CG_OK)
        return status;
    if ((error = d->calls->blocks_copy(&copy, d->read_stream)) != 0)
        return cg_device_error(d, "the copying kernel", error, d->read_stream);
    if ((error = d->calls->event_record(to->done, d->read_stream)) != 0)
        return cg_device_error(d, "cudaEventRecord", error, d->read_stream);
    return CG_OK;
}

static cg_status hold(cg_device *d, uint32_t index, cg_after after)
{
    /* A copy that came later may have this event by now: it is behind, on the same stream. */
    const cg_cuda_event done = d->copies[index].done;
    int error;
    /* Without a stream there is only the engine's thread to hold back: this one. */
    if (after.kind == CG_AFTER_STREAM)
        error = d->calls->stream_wait_event(after.handle, done);
    else
        error = d->calls->event_synchronize(done);
    return error == 0 ? CG_OK
                      : cg_device_error(d, "waiting for copied blocks", error, d->read_stream);
}

static cg_status read_all(cg_device *d, const cg_device_run *runs, uint32_t n_runs, cg_after after,
                          const uint32_t *copies)
{
    cg_device_mark *mark;
    cg_status status = cg_device_mark_make(d, after, &mark);
    if (status == CG_OK)
        status = cg_device_await(d, d->read_stream, mark);
    for (uint32_t i = 0; i < n_runs && status == CG_OK; i++)
        status = enqueue(d, &runs[i], &d->copies[copies[i]]);
    if (status != CG_OK)
        cg_device_settle(d, d->read_stream); /* the runs before */
    cg_device_mark_drop(d, mark);            /* what waits for it has been enqueued */
    return status;
}

cg_status cg_device_read(cg_device *d, const cg_device_run *runs, uint32_t n_runs, cg_after after,
                         uint32_t *copies_out)
{
    int before;
    if (n_runs == 0)
        return CG_OK;
    cg_status status = cg_device_enter(d, &before);
    if (status == CG_OK && (status = take_copies(d, n_runs, copies_out)) == CG_OK &&
        (status = read_all(d, runs, n_runs, after, copies_out)) != CG_OK)
        return_copies(d, copies_out, n_runs);
    cg_device_leave(d, before);
    return status;
}

cg_status cg_device_hold(cg_device *d, uint32_t index, cg_after after)
{
    int before;
    cg_status status = cg_device_enter(d, &before);
    if (status == CG_OK)
        status = hold(d, index, after);
    cg_device_leave(d, before);
    return status;
}

cg_status cg_device_read_wait(cg_device *d, uint32_t index, void **elements_out)
{
    int error;
    *elements_out = d->copies[index].elements;
    cg_status status = cg_device_use(d);
    if (status == CG_OK && (error = d->calls->event_synchronize(d->copies[index].done)) != 0)
        status = cg_device_error(d, "cudaEventSynchronize", error, d->read_stream);
    if (status == CG_OK) {
        /* So that the engine's thread need not ask, whose last error "not ready" would replace. */
        pthread_mutex_lock(&d->lock);
        d->copies[index].state = CG_COPY_DONE;
        pthread_mutex_unlock(&d->lock);
    }
    return status;
}

void cg_device_read_release(cg_device *d, uint32_t index)
{
    pthread_mutex_lock(&d->lock);
    cg_device_copy *copy = &d->copies[index];
    copy->state = copy->state == CG_COPY_DONE ? CG_COPY_FREE : CG_COPY_RELEASED;
    pthread_mutex_unlock(&d->lock);
}
