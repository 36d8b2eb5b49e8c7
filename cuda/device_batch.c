/* Chunks that are decoded together: which, and how. */
#include "cuda/device_state.h"

/* With the lock held. The last free batch is for those who need not wait for the engine: its work
 * may take long. */
static cg_device_batch *find_batch(cg_device *d, const cg_device_mark *mark)
{
    cg_device_batch *found = NULL;
    int n_free = 0;
    for (int i = 0; i < CG_DEVICE_BATCHES; i++)
        if (!d->batches[i].is_taken) {
            found = &d->batches[i];
            n_free++;
        }
    if (n_free == 0 || (mark != NULL && n_free == 1))
        return NULL;
    found->is_taken = true;
    return found;
}

cg_device_batch *cg_device_take_batch(cg_device *d, const cg_device_mark *mark)
{
    cg_device_batch *batch;
    pthread_mutex_lock(&d->lock);
    while ((batch = find_batch(d, mark)) == NULL)
        pthread_cond_wait(&d->changed, &d->lock);
    pthread_mutex_unlock(&d->lock);
    return batch;
}

/* With the lock held. */
static void return_batch(cg_device *d, cg_device_batch *batch)
{
    batch->is_taken = false;
    pthread_cond_broadcast(&d->changed);
}

void cg_device_return_batch(cg_device *d, cg_device_batch *batch)
{
    pthread_mutex_lock(&d->lock);
    return_batch(d, batch);
    pthread_mutex_unlock(&d->lock);
}

/* With the lock held: takes out of the line, as a list, the job and those that came first of the
 * others that need not wait for the engine longer than it. Half of the slots at most: so there is
 * work for another batch; and one that is larger takes hardly longer. */
static cg_device_job *take_jobs(cg_device *d, cg_device_job *job)
{
    const uint32_t half = (d->config.n_slots + 1) / 2,
                   most = half < CG_CUDA_MAX_JOBS ? half : CG_CUDA_MAX_JOBS;
    cg_device_job *first = NULL, **end = &first, **at = &d->waiting;
    uint32_t n = 1; /* with the job */
    while (*at != NULL) {
        cg_device_job *next = *at;
        if (next != job && (n == most || next->mark != job->mark)) {
            at = &next->next;
            continue;
        }
        n += next != job;
        *at = next->next;
        next->is_waiting = false;
        *end = next;
        end = &next->next;
    }
    *end = NULL;
    return first;
}

static cg_status launch(cg_device *d, const cg_device_batch *batch, const cg_device_job *first)
{
    cg_cuda_decode_job jobs[CG_CUDA_MAX_JOBS];
    uint32_t n = 0;
    int error;
    for (const cg_device_job *job = first; job != NULL; job = job->next) {
        if ((error = d->calls->stream_wait_event(batch->stream, job->uploaded)) != 0)
            return cg_device_error(d, "cudaStreamWaitEvent", error, batch->stream);
        jobs[n] = (cg_cuda_decode_job){&job->plan, job->params};
        jobs[n].params.status_dev = (uint32_t *)batch->status_dev + n;
        n++;
    }
    const size_t status_bytes = n * sizeof *batch->status;
    if ((error = d->calls->memset_async(batch->status_dev, 0, status_bytes, batch->stream)) != 0)
        return cg_device_error(d, "cudaMemsetAsync", error, batch->stream);
    /* Uploads need not wait for the engine: only blocks are its own. */
    const cg_status status = cg_device_await(d, batch->stream, first->mark);
    if (status != CG_OK)
        return status;
    if ((error = d->calls->decode(jobs, n, batch->stream)) != 0)
        return cg_device_error(d, "a decoding kernel", error, batch->stream);
    if ((error = d->calls->memcpy_async(batch->status, batch->status_dev, status_bytes,
                                        batch->stream)) != 0)
        return cg_device_error(d, "cudaMemcpyAsync", error, batch->stream);
    return cg_device_finish(d, batch->stream, batch->done);
}

static void run(cg_device *d, cg_device_batch *batch, cg_device_job *first)
{
    const cg_status status = launch(d, batch, first);
    if (status != CG_OK) /* what has not been waited for on the batch's stream */
        cg_device_settle(d, d->upload_stream);
    pthread_mutex_lock(&d->lock);
    uint32_t i = 0;
    for (cg_device_job *job = first, *next; job != NULL; job = next) {
        next = job->next; /* once it is done, a job is its thread's again */
        job->status = status == CG_OK ? (cg_status)batch->status[i++] : status;
        job->is_done = true;
    }
    return_batch(d, batch);
    pthread_mutex_unlock(&d->lock);
}

cg_status cg_device_run_job(cg_device *d, cg_device_job *job)
{
    cg_device_batch *batch = NULL;
    cg_device_job *first = NULL, **end = &d->waiting;
    pthread_mutex_lock(&d->lock);
    while (*end != NULL)
        end = &(*end)->next;
    *end = job;
    job->next = NULL;
    job->is_waiting = true;
    while (!job->is_done && !(job->is_waiting && (batch = find_batch(d, job->mark)) != NULL))
        pthread_cond_wait(&d->changed, &d->lock);
    if (batch != NULL)
        first = take_jobs(d, job);
    pthread_mutex_unlock(&d->lock);
    if (batch != NULL)
        run(d, batch, first);
    return job->status;
}
