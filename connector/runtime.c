#include "connector/runtime.h"

#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

static cg_runtime *runtime_new(cachegen *connector)
{
    const cg_config *config = connector->config;
    cg_runtime *rt = calloc(1, sizeof *rt);
    if (rt == NULL)
        return NULL;
    rt->pid = getpid();
    rt->connector = connector;
    if (cg_pool_new(config->threads, config->cpus, config->n_cpus, &rt->pool) != CG_OK ||
        cg_chunk_memory_new(config->positive_ttl_ms * UINT64_C(1000000),
                            config->negative_ttl_ms * UINT64_C(1000000),
                            &rt->chunk_memory) != CG_OK ||
        cg_stream_plan_init(&rt->stream_plan, config->queue_depth,
                            (uint64_t)config->staging_mib << 20,
                            config->read_timeout_ms * UINT64_C(1000000)) != CG_OK) {
        cg_chunk_memory_free(rt->chunk_memory);
        cg_pool_free(rt->pool);
        free(rt);
        return NULL;
    }
    rt->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); /* -1: an engine can still poll */
    pthread_mutex_init(&rt->lock, NULL);
    pthread_cond_init(&rt->changed, NULL);
    pthread_cond_init(&rt->lookups.filled, NULL);
    pthread_cond_init(&rt->saves.filled, NULL);
    cg_estimator_init(&rt->speeds.link, (cg_estimator_kind)config->estimator,
                      config->prior_mbps * 1e6);
    rt->speeds.n_threads = config->threads;
    rt->speeds.configured_tokens_per_s = config->recompute_tokens_per_s;
    return rt;
}

cg_runtime *cg_runtime_peek(cachegen *connector)
{
    cg_runtime *rt = atomic_load_explicit(&connector->runtime, memory_order_acquire);
    return rt != NULL && rt->pid == getpid() ? rt : NULL;
}

cg_runtime *cg_runtime_get(cachegen *connector)
{
    cg_runtime *rt = atomic_load_explicit(&connector->runtime, memory_order_acquire);
    const pid_t pid = getpid();
    if (rt != NULL && rt->pid == pid)
        return rt;
    cg_runtime *made = runtime_new(connector);
    if (made == NULL)
        return NULL;
    /* Several threads may come here at once: one wins. rt, of the parent, is left as it is: see
     * runtime.h. */
    if (atomic_compare_exchange_strong(&connector->runtime, &rt, made))
        return made;
    cg_runtime_free(made);
    return rt;
}

cg_status cg_runtime_start(cg_runtime *rt, cg_worker *worker, const char *name,
                           void *(*body)(void *))
{
    if (worker->started)
        return CG_OK;
    const cg_config *config = rt->connector->config;
    const cg_status status =
        cg_thread_start(&worker->thread, name, config->cpus, config->n_cpus, body, rt);
    worker->started = status == CG_OK;
    return status;
}

void cg_runtime_free(cg_runtime *rt)
{
    if (rt == NULL)
        return;
    pthread_mutex_lock(&rt->lock);
    rt->stop = true;
    pthread_cond_broadcast(&rt->lookups.filled);
    pthread_cond_broadcast(&rt->saves.filled);
    cg_runtime_wake_reader(rt);
    const cg_worker workers[] = {rt->looker, rt->reader, rt->writer};
    pthread_mutex_unlock(&rt->lock);
    for (int i = 0; i < 3; i++)
        if (workers[i].started)
            pthread_join(workers[i].thread, NULL);
    cg_pool_free(rt->pool);
    cg_chunk_memory_free(rt->chunk_memory);
    cg_stream_plan_destroy(&rt->stream_plan);
    if (rt->event_fd >= 0)
        close(rt->event_fd);
    pthread_cond_destroy(&rt->saves.filled);
    pthread_cond_destroy(&rt->lookups.filled);
    pthread_cond_destroy(&rt->changed);
    pthread_mutex_destroy(&rt->lock);
    free(rt);
}

void cg_runtime_notify(cg_runtime *rt)
{
    const uint64_t one = 1;
    pthread_cond_broadcast(&rt->changed);
    /* An eventfd takes 2^64 - 2 events before this could fail. */
    if (rt->event_fd >= 0 && write(rt->event_fd, &one, sizeof one) != (ssize_t)sizeof one)
        return;
}

void cg_runtime_wake_reader(cg_runtime *rt)
{
    if (rt->reader_io != NULL)
        cg_io_wake(rt->reader_io);
}

cg_io_config cg_runtime_io_config(const cachegen *connector)
{
    const cg_config *config = connector->config;
    return (cg_io_config){.backend = connector->backend,
                          .queue_depth = config->queue_depth,
                          .max_abandoned = config->max_abandoned_reads};
}
