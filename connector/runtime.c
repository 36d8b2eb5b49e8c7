#include "connector/runtime.h"

#include "connector/clock.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

static const uint64_t REOPEN_NS = UINT64_C(1000000000);

static cg_runtime *runtime_new(cachegen *connector)
{
    const cg_config *config = connector->config;
    cg_runtime *rt = calloc(1, sizeof *rt);
    if (rt == NULL)
        return NULL;
    rt->pid = getpid();
    rt->connector = connector;
    if (cg_pool_new(config->threads, 0, config->cpus, config->n_cpus, &rt->pool) != CG_OK ||
        cg_pool_new(connector->n_encoders, (int)config->encode_nice, config->cpus, config->n_cpus,
                    &rt->encoders) != CG_OK ||
        cg_chunk_memory_new(cg_ms(config->positive_ttl_ms), cg_ms(config->negative_ttl_ms),
                            &rt->chunk_memory) != CG_OK ||
        cg_fetch_plan_init(&rt->fetch_plan, config->queue_depth,
                           (uint64_t)config->staging_mib << 20,
                           cg_ms(config->read_timeout_ms)) != CG_OK) {
        cg_chunk_memory_free(rt->chunk_memory);
        cg_pool_free(rt->encoders);
        cg_pool_free(rt->pool);
        free(rt);
        return NULL;
    }
    rt->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); /* -1: an engine can still poll */
    pthread_mutex_init(&rt->lock, NULL);
    cg_cond_init(&rt->changed);
    cg_cond_init(&rt->watched);
    cg_cond_init(&rt->used);
    cg_cond_init(&rt->lookups.filled);
    cg_cond_init(&rt->saves.filled);
    cg_cond_init(&rt->traces.filled);
    rt->step_until_ns = UINT64_MAX;
    rt->opener_ns = connector->folders_ns;
    cg_estimator_init(&rt->speeds.link, (cg_estimator_kind)config->estimator,
                      config->prior_mbps * 1e6);
    rt->speeds.latency_ns = rt->speeds.way_ns = (double)connector->latency_ns;
    rt->speeds.n_threads = config->threads;
    rt->speeds.configured_tokens_per_s = config->recompute_tokens_per_s;
    rt->speeds.configured_doubling_tokens = config->recompute_doubling_tokens;
    rt->link = cg_link_get(connector->device);
    return rt;
}

/* No thread is left that touches it. */
static void runtime_free(cg_runtime *rt)
{
    cg_pool_free(rt->encoders);
    cg_pool_free(rt->pool);
    cg_link_put(rt->link, rt->speeds.wanted);
    cg_chunk_memory_free(rt->chunk_memory);
    cg_fetch_plan_destroy(&rt->fetch_plan);
    free(rt->uses);
    if (rt->event_fd >= 0)
        close(rt->event_fd);
    pthread_cond_destroy(&rt->traces.filled);
    pthread_cond_destroy(&rt->saves.filled);
    pthread_cond_destroy(&rt->lookups.filled);
    pthread_cond_destroy(&rt->used);
    pthread_cond_destroy(&rt->watched);
    pthread_cond_destroy(&rt->changed);
    pthread_mutex_destroy(&rt->lock);
    free(rt);
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
    runtime_free(made);
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
    rt->n_inside += status == CG_OK;
    return status;
}

/* In a thread of its own: it has system calls that a store which hangs does not end. */
static void *open_store(void *argument)
{
    cg_runtime *rt = argument;
    cachegen *c = rt->connector;
    if (cg_store_is_gone(c->store))
        cg_store_reopen(c->store);
    uint64_t latency_ns = 0;
    if (cg_handle_is_far(c) && !cg_store_is_gone(c->store)) {
        cg_store_open_folders(c->store, c->latency_ns);
        latency_ns = cg_store_latency_ns(c->store);
    }
    pthread_mutex_lock(&rt->lock);
    /* It may have been busy when it was opened. */
    if (latency_ns > 0 && (double)latency_ns < rt->speeds.way_ns)
        rt->speeds.way_ns = (double)latency_ns;
    cg_runtime_resign(rt, &rt->opener);
    cg_runtime_leave(rt);
    return NULL;
}

void cg_runtime_refresh_store(cg_runtime *rt)
{
    const cachegen *c = rt->connector;
    const bool is_gone = cg_store_is_gone(c->store);
    const uint64_t now_ns = cg_now_ns(),
                   ttl_ns = is_gone ? REOPEN_NS : cg_ms(c->config->positive_ttl_ms);
    if ((!is_gone && !cg_handle_is_far(c)) || rt->opener.started || rt->stop ||
        now_ns - rt->opener_ns < ttl_ns)
        return;
    rt->opener_ns = now_ns;
    cg_runtime_start(rt, &rt->opener, "cachegen-open", open_store);
}

void cg_runtime_reopen_store(cg_runtime *rt)
{
    if (cg_store_is_gone(rt->connector->store))
        cg_runtime_refresh_store(rt);
}

void cg_runtime_resign(cg_runtime *rt, cg_worker *worker)
{
    if (rt->stop)
        return; /* somebody joins it */
    worker->started = false;
    /* Nobody joins it: its place may be another thread's by then. */
    pthread_detach(pthread_self());
}

void cg_runtime_leave(cg_runtime *rt)
{
    cachegen *connector = rt->connector;
    const bool is_last = --rt->n_inside == 0 && rt->is_orphan;
    pthread_cond_broadcast(&rt->changed);
    pthread_mutex_unlock(&rt->lock);
    /* Who closes waits for the last one to leave, and then frees. Nobody waits for an orphan's. */
    if (!is_last)
        return;
    runtime_free(rt);
    cg_handle_free(connector);
}

void cg_condition_wait(pthread_cond_t *condition, pthread_mutex_t *lock, uint64_t deadline_ns)
{
    const struct timespec until = cg_deadline_at(deadline_ns);
    if (deadline_ns == UINT64_MAX)
        pthread_cond_wait(condition, lock);
    else
        pthread_cond_timedwait(condition, lock, &until);
}

void cg_runtime_wait(cg_runtime *rt, pthread_cond_t *condition, uint64_t deadline_ns)
{
    cg_condition_wait(condition, &rt->lock, deadline_ns);
}

bool cg_runtime_stop(cg_runtime *rt, uint64_t deadline_ns)
{
    rt->stop = true;
    pthread_cond_broadcast(&rt->lookups.filled);
    pthread_cond_broadcast(&rt->saves.filled);
    pthread_cond_broadcast(&rt->traces.filled);
    pthread_cond_broadcast(&rt->watched);
    pthread_cond_broadcast(&rt->used);
    cg_runtime_wake_reader(rt);
    if (rt->looker_io != NULL)
        cg_io_wake(rt->looker_io);
    while (rt->n_inside > 0 && cg_now_ns() < deadline_ns)
        cg_runtime_wait(rt, &rt->changed, deadline_ns);
    return rt->n_inside == 0;
}

/* A thread that has left may still be held: io_uring takes its requests back when the thread that
 * made them ends, and a file system may not give them. It touches nothing of ours then. */
static void join_until(pthread_t thread, uint64_t deadline_ns)
{
    /* Not pthread_clockjoin_np(): ThreadSanitizer does not know it. */
    const struct timespec a_moment = {.tv_nsec = 100000};
    int error;
    while ((error = pthread_tryjoin_np(thread, NULL)) == EBUSY && cg_now_ns() < deadline_ns)
        nanosleep(&a_moment, NULL);
    if (error == EBUSY)
        pthread_detach(thread);
}

void cg_runtime_close_eventfd(cg_runtime *rt)
{
    if (rt->event_fd >= 0)
        close(rt->event_fd);
    rt->event_fd = -1;
}

void cg_runtime_close(cg_runtime *rt, uint64_t deadline_ns)
{
    cachegen *connector = rt->connector;
    cg_pool_stop(rt->encoders); /* tasks compute, here or on the GPU: they end */
    cg_pool_stop(rt->pool);
    cg_gpu_stop(atomic_load(&connector->gpu));
    pthread_mutex_lock(&rt->lock);
    const cg_worker workers[] = {rt->looker, rt->reader, rt->writer, rt->watcher,
                                 rt->tracer, rt->teller, rt->opener};
    const size_t n_workers = sizeof workers / sizeof workers[0];
    const bool is_orphan = rt->is_orphan = rt->n_inside > 0;
    if (is_orphan)
        cg_runtime_close_eventfd(rt);
    /* Before the lock is released: with it the last worker may free all of this. */
    for (size_t i = 0; i < n_workers && is_orphan; i++)
        if (workers[i].started)
            pthread_detach(workers[i].thread);
    pthread_mutex_unlock(&rt->lock);
    if (is_orphan)
        return;
    for (size_t i = 0; i < n_workers; i++)
        if (workers[i].started)
            join_until(workers[i].thread, deadline_ns);
    runtime_free(rt);
    cg_handle_free(connector);
}

void cg_runtime_notify(cg_runtime *rt)
{
    const uint64_t one = 1;
    pthread_cond_broadcast(&rt->changed);
    /* An eventfd takes 2^64 - 2 events before this could fail. */
    if (rt->event_fd >= 0 && write(rt->event_fd, &one, sizeof one) != (ssize_t)sizeof one)
        return;
}

cg_speeds *cg_runtime_speeds(cg_runtime *rt)
{
    cg_link_borrow(rt->link, &rt->speeds);
    return &rt->speeds;
}

void cg_runtime_speeds_end(cg_runtime *rt)
{
    cg_link_return(rt->link, &rt->speeds);
}

void cg_runtime_wake_reader(cg_runtime *rt)
{
    if (rt->reader_io != NULL)
        cg_io_wake(rt->reader_io);
}

cg_io_config cg_runtime_io_config(const cachegen *connector)
{
    const cg_config *config = connector->config;
    /* One ring that works does not mean that the next has room: locked memory may be short. */
    const bool may_be_threads =
        config->io_backend == CG_IO_AUTO && connector->backend == CG_IO_URING;
    return (cg_io_config){.backend = may_be_threads ? CG_IO_AUTO : connector->backend,
                          .queue_depth = config->queue_depth,
                          .n_threads = config->queue_depth, /* so many the plan counts on */
                          .max_abandoned = config->max_abandoned_reads};
}
