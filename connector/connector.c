/* The calls of the ABI that are about a connector as a whole: opening and closing it, registering
 * blocks, and what it is told or asked. Look-ups, loads and saves are in lookup.c, load.c and
 * save.c; what is held against a chunk in forget.c. */
#include "connector/abi_struct.h"
#include "connector/clock.h"
#include "connector/fetch_exit.h"
#include "connector/load.h"
#include "connector/lookup.h"
#include "connector/reader.h"
#include "connector/save_state.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const uint64_t EXPECTED_NS = 1000000000; /* what cachegen_expect() says holds so long */

uint32_t cachegen_abi_version(void)
{
    return CACHEGEN_ABI_VERSION;
}

/* What the library returns are cg_status values. */
#define SAME(NAME) _Static_assert((int)CACHEGEN_##NAME == (int)CG_##NAME, #NAME)
SAME(OK);
SAME(ERR_INVALID_ARGUMENT);
SAME(ERR_NO_MEMORY);
SAME(ERR_BUFFER_TOO_SMALL);
SAME(ERR_UNSUPPORTED);
SAME(ERR_CANCELLED);
SAME(ERR_TRUNCATED);
SAME(ERR_CORRUPT);
SAME(ERR_UNSUPPORTED_VERSION);
SAME(ERR_BAD_MAGIC);
SAME(ERR_FOREIGN_MODEL);
SAME(ERR_FOREIGN_PROFILE);
SAME(ERR_FOREIGN_TOKENS);
SAME(ERR_LOSSY_PREFIX);
SAME(ERR_NOT_FOUND);
SAME(ERR_EXISTS);
SAME(ERR_IO);
SAME(ERR_NO_SPACE);
SAME(ERR_PERMISSION);
SAME(ERR_TIMED_OUT);
SAME(ERR_READ_ONLY);
SAME(ERR_DEVICE);
_Static_assert((int)CACHEGEN_AGAIN == (int)CG_ERR_AGAIN, "AGAIN");

const char *cachegen_strerror(cachegen_status status)
{
    return cg_strerror((cg_status)status);
}

/* Which backend `auto` means here; an io_uring that was asked for and does not work is an error
 * that says why. */
static cg_status resolve_backend(cachegen *c, const cg_sentence *error)
{
    char reason[256];
    c->backend = (cg_io_backend)c->config->io_backend;
    if (c->backend == CG_IO_THREADS)
        return CG_OK;
    if (cg_io_uring_reason(reason, sizeof reason)) {
        c->backend = CG_IO_URING;
    } else if (c->backend == CG_IO_URING) {
        return cg_sentence_say(error, CG_ERR_UNSUPPORTED,
                               "\"io_backend\" is \"io_uring\", which does not work here: %s",
                               reason);
    } else {
        c->backend = CG_IO_THREADS;
    }
    return CG_OK;
}

/* Whether threads can be bound to the configured CPUs: only the kernel knows, so this thread
 * tries. */
static cg_status check_affinity(const cg_config *config, const cg_sentence *error)
{
    cpu_set_t before, wanted;
    if (config->n_cpus == 0 || sched_getaffinity(0, sizeof before, &before) != 0)
        return CG_OK;
    CPU_ZERO(&wanted);
    for (uint32_t i = 0; i < config->n_cpus; i++)
        CPU_SET(config->cpus[i], &wanted);
    if (sched_setaffinity(0, sizeof wanted, &wanted) != 0)
        return cg_sentence_say(error, CG_ERR_INVALID_ARGUMENT,
                               "\"cpu_affinity\" names no CPU that this process may use");
    sched_setaffinity(0, sizeof before, &before);
    return CG_OK;
}

/* An engine that computes on the CPU waits for the slowest of its threads. So a moment that an
 * encoder has on one CPU is one that all have not: encoders leave half of the CPUs alone. */
static uint32_t n_encoders(const cg_config *config, uint32_t n_cpus)
{
    if (config->encode_nice == 0 || config->threads <= n_cpus / 2)
        return config->threads;
    return n_cpus > 1 ? n_cpus / 2 : 1;
}

/* What a store or a GPU may hold up, on a thread of its own that can be left behind. */
typedef struct errand {
    void (*run)(void *job);
    void (*drop)(void *job); /* frees it when it was run and nobody waits for it any more */
    void *job;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    bool is_over, is_left; /* the lock; left: nobody waits for it any more */
} errand;

static void errand_free(errand *e)
{
    pthread_cond_destroy(&e->ended);
    pthread_mutex_destroy(&e->lock);
    free(e);
}

static void *run_errand(void *argument)
{
    errand *e = argument;
    e->run(e->job);
    pthread_mutex_lock(&e->lock);
    e->is_over = true;
    const bool is_left = e->is_left;
    pthread_cond_signal(&e->ended);
    pthread_mutex_unlock(&e->lock);
    if (is_left) {
        e->drop(e->job);
        errand_free(e);
    }
    return NULL;
}

/* False: it was not done at the deadline. Then it ends by itself some day, and what it does is the
 * job's alone. Where no thread can be started it runs here, however long that takes. */
static bool do_until(uint64_t deadline_ns, const char *name, const cg_config *config,
                     void (*run)(void *), void (*drop)(void *), void *job)
{
    pthread_t thread;
    errand *e = calloc(1, sizeof *e);
    if (e != NULL) {
        *e = (errand){.run = run, .drop = drop, .job = job};
        pthread_mutex_init(&e->lock, NULL);
        cg_cond_init(&e->ended);
    }
    if (e == NULL ||
        cg_thread_start(&thread, name, config->cpus, config->n_cpus, run_errand, e) != CG_OK) {
        if (e != NULL)
            errand_free(e);
        run(job);
        return true;
    }
    pthread_mutex_lock(&e->lock);
    while (!e->is_over && cg_now_ns() < deadline_ns)
        cg_condition_wait(&e->ended, &e->lock, deadline_ns);
    const bool is_over = e->is_over;
    e->is_left = !is_over;
    if (!is_over)
        pthread_detach(thread);
    pthread_mutex_unlock(&e->lock);
    if (is_over) {
        pthread_join(thread, NULL);
        errand_free(e);
    }
    return is_over;
}

/* Asking the store what there is to be known of it before anything is loaded. */
typedef struct open_job {
    cachegen *c;
    cg_status status;
    char text[1024]; /* of the sentence */
} open_job;

static cg_status open_store(cachegen *c, const cg_sentence *error)
{
    /* cg_store_open() would make it: a misspelt root, or one that is not mounted yet, would become
     * an empty store beside the real one. */
    struct stat root;
    cg_status status;
    if (stat(c->config->root, &root) != 0)
        /* What the system says tells a mount that has died from one that was never there. */
        return cg_sentence_say(error, cg_status_from_errno(errno), "\"root\": %s: %s",
                               c->config->root, strerror(errno));
    if (!S_ISDIR(root.st_mode))
        return cg_sentence_say(error, CG_ERR_INVALID_ARGUMENT, "\"root\": %s is no directory",
                               c->config->root);
    c->device = root.st_dev;
    c->root = root.st_ino;
    if ((status = cg_model_init(&c->model, c->config, error)) != CG_OK ||
        (status = resolve_backend(c, error)) != CG_OK)
        return status;
    status = cg_store_open(c->config->root, c->config->model, !c->config->read_only, &c->store);
    if (status != CG_OK)
        return cg_sentence_say(error, status, "\"root\": %s/%s: %s", c->config->root,
                               c->config->model, cg_strerror(status));
    if (cg_store_is_begun(c->store))
        cg_sentence_say(error, CG_OK,
                        "\"root\": %s was no store: a new one is begun in it; is a mount missing?",
                        c->config->root);
    c->asks_by_threads =
        c->config->io_backend == CG_IO_AUTO && cg_store_is_of_type(c->store, "fuse.cachegenfs");
    c->is_sshfs = cg_store_is_of_type(c->store, "fuse.sshfs");
    c->latency_ns = cg_store_latency_ns(c->store);
    if (cg_handle_is_far(c)) {
        cg_store_open_folders(c->store, c->latency_ns); /* it may have none yet */
        c->folders_ns = cg_now_ns();
    }
    return CG_OK;
}

static void run_open(void *argument)
{
    open_job *job = argument;
    const cg_sentence error = {job->text, sizeof job->text};
    job->status = open_store(job->c, &error);
}

/* The store was late: nobody wants it any more. */
static void drop_open(void *argument)
{
    open_job *job = argument;
    cg_handle_free(job->c);
    free(job);
}

/* *c is NULL afterwards where the store does not answer in its time: then it is the thread's that
 * still waits for it. */
static cg_status open_in_time(cachegen **c, const cg_sentence *error)
{
    const uint64_t until_ns = cg_now_ns() + cg_ms((*c)->config->open_timeout_ms);
    open_job *job = calloc(1, sizeof *job);
    if (job == NULL)
        return CG_ERR_NO_MEMORY;
    job->c = *c;
    snprintf(job->text, sizeof job->text, "%s", cg_strerror(CG_ERR_NO_MEMORY));
    /* Before: once it is late, what it is made of may be gone at any time. */
    cg_sentence_say(error, CG_ERR_TIMED_OUT,
                    "\"root\": %s does not answer: not open after \"open_timeout_ms\", %u",
                    (*c)->config->root, (*c)->config->open_timeout_ms);
    if (!do_until(until_ns, "cachegen-open", (*c)->config, run_open, drop_open, job)) {
        *c = NULL;
        return CG_ERR_TIMED_OUT;
    }
    const cg_status status = cg_sentence_say(error, job->status, "%s", job->text);
    free(job);
    return status;
}

cachegen_status cachegen_open(const char *json, size_t json_bytes, cachegen **out, char *error_text,
                              size_t error_bytes)
{
    const cg_sentence error = {error_text, error_bytes};
    cg_status status = CG_ERR_NO_MEMORY;
    cg_key key;
    if (out == NULL)
        return CG_ERR_INVALID_ARGUMENT;
    *out = NULL;
    cg_sentence_say(&error, status, "%s", cg_strerror(status)); /* until something says more */
    cachegen *c = calloc(1, sizeof *c);
    if (c == NULL)
        return status;
    pthread_mutex_init(&c->gpu_lock, NULL);
    if ((status = cg_config_parse(json, json_bytes, &c->config, &error)) != CG_OK)
        goto failed;
    if ((status = check_affinity(c->config, &error)) != CG_OK)
        goto failed;
    const uint32_t n_cpus = cg_pool_count_cpus(c->config->n_cpus);
    c->config->threads = cg_pool_choose_threads(c->config->threads, n_cpus);
    c->n_encoders = n_encoders(c->config, n_cpus);
    if ((status = open_in_time(&c, &error)) != CG_OK)
        goto failed;
    c->boot_clock_id = cg_boot_clock_id();
    c->store_levels = c->model.profile != NULL ? c->config->store_levels : 1u << CG_L0;
    memcpy(key.bytes, c->model.fingerprint.bytes, sizeof key.bytes);
    cg_key_to_hex(&key, c->model_hex);
    if (c->model.profile != NULL) {
        memcpy(key.bytes, c->model.profile_fingerprint.bytes, sizeof key.bytes);
        cg_key_to_hex(&key, c->profile_hex);
    }
    *out = c;
    return CG_OK;
failed:
    cachegen_close(c);
    return status;
}

/* What writes and reads blocks in the host's memory ends, since it only computes; and it has to end
 * here: when closing returns, the engine may free its blocks. */
static void end_work_on_host_blocks(cg_runtime *rt)
{
    pthread_mutex_lock(&rt->lock);
    cg_lookups_cancel(rt); /* nobody wants these any more */
    cg_loads_cancel(rt);
    while (cg_loads_on_host(rt) || rt->n_copying > 0)
        cg_runtime_wait(rt, &rt->changed, UINT64_MAX);
    pthread_mutex_unlock(&rt->lock);
}

/* rt: NULL, or this process's. Returns in time, unless a GPU does not answer or an encoder gets no
 * CPU. */
static void close_all(cachegen *c, cg_runtime *rt, uint64_t began_ns, uint64_t timeout_ns)
{
    if (rt == NULL) {
        cg_handle_free(c);
        return;
    }
    /* The saves run to their end, but for a last part of the time: a slow store is left the chance
     * to end the chunk that it has begun. */
    const uint64_t saves_until_ns = began_ns + timeout_ns / 4 * 3;
    pthread_mutex_lock(&rt->lock);
    while (rt->fetch_plan.fetches != NULL && cg_now_ns() < saves_until_ns) /* of a GPU */
        cg_runtime_wait(rt, &rt->changed, saves_until_ns);
    if (rt->writer_is_stuck || !cg_runtime_stop(rt, saves_until_ns)) {
        cg_saves_give_up(rt);
        cg_runtime_stop(rt, began_ns + timeout_ns);
    }
    while (rt->fetch_plan.fetches != NULL)
        cg_runtime_wait(rt, &rt->changed, UINT64_MAX);
    cg_save_unlock(rt);
    cg_runtime_close(rt, began_ns + timeout_ns);
}

typedef struct close_job {
    cachegen *c;
    cg_runtime *rt;
    uint64_t began_ns, timeout_ns;
} close_job;

static void run_close(void *argument)
{
    const close_job *job = argument;
    close_all(job->c, job->rt, job->began_ns, job->timeout_ns);
}

/* Almost every call of CUDA may wait for the GPU, and an encoder for a CPU that others keep busy;
 * nothing ends that. So this waits for a thread that closes, and leaves it behind when the time is
 * over: it frees all should they go on. */
static void close_in_time(const close_job *closing)
{
    close_job *job = malloc(sizeof *job);
    if (job == NULL) {
        close_all(closing->c, closing->rt, closing->began_ns, closing->timeout_ns);
        return;
    }
    *job = *closing;
    if (job->rt != NULL) {
        pthread_mutex_lock(&job->rt->lock);
        cg_runtime_close_eventfd(job->rt); /* before all of it may be gone, or left */
        pthread_mutex_unlock(&job->rt->lock);
    }
    if (do_until(job->began_ns + job->timeout_ns, "cachegen-close", job->c->config, run_close, free,
                 job))
        free(job);
}

void cachegen_close(cachegen *c)
{
    if (c == NULL)
        return;
    cg_runtime *rt = cg_runtime_peek(c); /* a parent's runtime is left alone */
    const uint64_t began_ns = cg_now_ns(),
                   timeout_ns = c->config != NULL ? cg_ms(c->config->close_timeout_ms) : 0;
    const close_job closing = {.c = c, .rt = rt, .began_ns = began_ns, .timeout_ns = timeout_ns};
    if (rt != NULL)
        end_work_on_host_blocks(rt);
    if (rt != NULL || cg_gpu_is_ours(atomic_load(&c->gpu)))
        close_in_time(&closing);
    else
        close_all(c, rt, began_ns, timeout_ns);
}

cachegen_status cachegen_get_info(cachegen *c, cachegen_info *info_out)
{
    if (c == NULL)
        return CG_ERR_INVALID_ARGUMENT;
    const cg_geometry *g = &c->model.geometry;
    const uint32_t gpu_state = atomic_load(&c->gpu_state); /* before the reason */
    const cachegen_info info = {.abi_version = CACHEGEN_ABI_VERSION,
                                .n_layers = g->n_layers,
                                .n_kv_heads = g->n_kv_heads,
                                .head_dim = g->head_dim,
                                .dtype = g->dtype,
                                .chunk_tokens = c->config->chunk_tokens,
                                .has_profile = c->model.profile != NULL,
                                .store_levels = c->store_levels,
                                .io_backend = (uint32_t)c->backend,
                                .model = c->config->model,
                                .model_fingerprint_hex = c->model_hex,
                                .profile_fingerprint_hex = c->profile_hex,
                                .gpu = gpu_state,
                                .gpu_reason = gpu_state == CACHEGEN_GPU_OFF ? c->gpu_reason : ""};
    return cg_abi_give(info_out, &info, sizeof info) ? CG_OK : CG_ERR_INVALID_ARGUMENT;
}

/* Tells the GPU of a layout in its memory. */
static cg_status register_on_gpu(cachegen *c, cg_kv_layout *layout)
{
    const cachegen_kv_layout *g = &layout->given;
    cg_gpu *gpu;
    /* Of ranks the one with the first head encodes. */
    cg_status status = cg_handle_open_gpu(c, g->device, g->first_head == 0, &gpu);
    if (status != CG_OK)
        return status;
    const cg_device_blocks blocks = {.base = g->base,
                                     .offset_bytes = {g->offset_bytes[CG_K], g->offset_bytes[CG_V]},
                                     .block_stride = g->block_stride,
                                     .head_stride = {g->head_stride[CG_K], g->head_stride[CG_V]},
                                     .token_stride = {g->token_stride[CG_K], g->token_stride[CG_V]},
                                     .block_tokens = g->block_tokens,
                                     .n_blocks = g->n_blocks,
                                     .first_head = g->first_head,
                                     .n_heads = g->n_kv_heads};
    status = gpu->functions->add_blocks(gpu->device, &blocks, &layout->gpu_blocks_id);
    if (status == CG_ERR_DEVICE)
        cg_handle_check_gpu(c);
    return status;
}

/* A layout that lacks heads is one of a tensor-parallel engine's: its saves need those of the other
 * ranks. */
static cg_status join_ranks(cachegen *c, const cg_kv_layout *layout)
{
    const cg_config *config = c->config;
    if (cg_kv_layout_is_whole(layout, c->model.geometry.n_kv_heads))
        return CG_OK;
    if (config->group == NULL)
        return CG_ERR_INVALID_ARGUMENT;
    if (config->read_only) /* who never saves has nothing to gather */
        return CG_OK;
    const cg_gather_config joined = {.rank_set = config->group,
                                     .geometry = c->model.geometry,
                                     .first_head = layout->given.first_head,
                                     .n_heads = layout->given.n_kv_heads,
                                     .limit_bytes = (uint64_t)config->staging_mib << 20};
    cg_gather *gather = atomic_load(&c->gather), *first = NULL;
    if (gather == NULL) {
        const cg_status status = cg_gather_new(&joined, &gather);
        if (status != CG_OK)
            return status;
        if (!atomic_compare_exchange_strong(&c->gather, &first, gather)) {
            cg_gather_free(gather); /* another thread was faster: its one counts */
            gather = first;
        }
    }
    /* Who has joined need not join again: parts are of the heads that it joined with. */
    return cg_gather_is_of(gather, joined.first_head, joined.n_heads) ? CG_OK
                                                                      : CG_ERR_INVALID_ARGUMENT;
}

/* There will be loads: where the store is far, files that look-ups open stay open for them. */
static void await_loads(cachegen *c)
{
    cg_runtime *rt = cg_handle_is_far(c) ? cg_runtime_get(c) : NULL;
    if (rt == NULL)
        return;
    pthread_mutex_lock(&rt->lock);
    cg_runtime_start(rt, &rt->reader, "cachegen-read", cg_load_reader);
    pthread_mutex_unlock(&rt->lock);
}

cachegen_status cachegen_register_kv(cachegen *c, const cachegen_kv_layout *given,
                                     uint32_t *kv_id_out)
{
    cachegen_kv_layout layout;
    cg_kv_layout *made;
    if (c == NULL || kv_id_out == NULL)
        return CG_ERR_INVALID_ARGUMENT;
    cg_status status = cg_abi_take(given, &layout, sizeof layout);
    if (status == CG_OK)
        status = cg_kv_layout_new(&layout, &c->model.geometry, &made);
    if (status != CG_OK)
        return status;
    if ((status = join_ranks(c, made)) != CG_OK || (made->given.memory == CACHEGEN_MEMORY_CUDA &&
                                                    (status = register_on_gpu(c, made)) != CG_OK)) {
        free(made);
        return status;
    }
    for (uint32_t i = 0; i < CG_MAX_KV_LAYOUTS; i++) {
        cg_kv_layout *none = NULL;
        /* A place is filled once and for good, so that loads and saves read it without a lock. */
        if (atomic_compare_exchange_strong(&c->layouts[i], &none, made)) {
            *kv_id_out = i;
            await_loads(c);
            return CG_OK;
        }
    }
    free(made);
    return CG_ERR_NO_MEMORY;
}

int cachegen_eventfd(cachegen *c)
{
    const cg_runtime *rt = c != NULL ? cg_runtime_get(c) : NULL;
    return rt != NULL ? rt->event_fd : -1;
}

void cachegen_report_prefill(cachegen *c, uint32_t n_tokens, uint64_t duration_ns)
{
    cachegen_report_prefill_at(c, n_tokens, (uint64_t)n_tokens * n_tokens / 2, duration_ns);
}

void cachegen_report_prefill_at(cachegen *c, uint32_t n_tokens, uint64_t n_pairs,
                                uint64_t duration_ns)
{
    cg_runtime *rt = c != NULL && n_tokens > 0 && duration_ns > 0 ? cg_runtime_get(c) : NULL;
    if (rt == NULL)
        return;
    pthread_mutex_lock(&rt->lock);
    cg_prefills_add(&rt->speeds.prefills, n_tokens, n_pairs, duration_ns);
    pthread_mutex_unlock(&rt->lock);
}

void cachegen_report_queue(cachegen *c, uint64_t n_tokens, uint64_t n_pairs)
{
    cg_runtime *rt = c != NULL ? cg_runtime_get(c) : NULL;
    if (rt == NULL)
        return;
    pthread_mutex_lock(&rt->lock);
    const double ns =
        cg_prefill_pairs_ns(cg_speeds_recompute(&rt->speeds), (double)n_tokens, (double)n_pairs);
    cg_fetch_engine_told(&rt->fetch_plan, ns, cg_now_ns());
    pthread_mutex_unlock(&rt->lock);
}

void cachegen_expect(cachegen *c, uint64_t n_tokens)
{
    cg_runtime *rt = c != NULL ? cg_runtime_get(c) : NULL;
    if (rt == NULL)
        return;
    pthread_mutex_lock(&rt->lock);
    const bool is_less = n_tokens < rt->fetch_plan.expected_tokens;
    cg_fetch_plan_expect(&rt->fetch_plan, n_tokens, cg_now_ns() + EXPECTED_NS);
    if (is_less && rt->fetch_plan.fetches != NULL)
        cg_runtime_wake_reader(rt);
    pthread_mutex_unlock(&rt->lock);
}

void cachegen_report_load(cachegen *c, uint32_t from_token, const cachegen_progress *progress)
{
    cachegen_progress p;
    cg_runtime *rt =
        c != NULL && cg_abi_take(progress, &p, sizeof p) == CG_OK ? cg_runtime_get(c) : NULL;
    if (rt == NULL)
        return;
    pthread_mutex_lock(&rt->lock);
    cg_speeds *speeds = cg_runtime_speeds(rt);
    if (speeds->meter.last_ns == 0) /* else the load was in this process, and was measured */
        cg_estimator_add_load(&speeds->link,
                              &(cg_reported_load){.bytes = p.bytes_read,
                                                  .memory_bytes = p.bytes_from_memory,
                                                  .ns = p.read_ns,
                                                  .memory_ns = p.memory_ns},
                              speeds->latency_ns, cg_now_ns());
    cg_runtime_speeds_end(rt);
    if (p.loaded_tokens > from_token && p.decode_ns > 0) {
        /* A host of before chunks_at, or that does not fill it, tells one level. */
        const uint32_t all_at_worst[CG_N_LEVELS] = {[CG_L0] = p.worst_level == CG_L0,
                                                    [CG_L1] = p.worst_level == CG_L1,
                                                    [CG_L2] = p.worst_level == CG_L2,
                                                    [CG_L3] = p.worst_level == CG_L3};
        uint32_t n_told = 0;
        for (unsigned level = 0; level < CG_N_LEVELS; level++)
            n_told += p.chunks_at[level] > 0;
        cg_speeds_add_load(&rt->speeds, n_told > 0 ? p.chunks_at : all_at_worst,
                           p.loaded_tokens - from_token, p.decode_ns + p.copy_ns);
    }
    pthread_mutex_unlock(&rt->lock);
}

cachegen_status cachegen_get_stats(cachegen *c, cachegen_stats *stats_out)
{
    cachegen_stats stats = {0};
    cg_runtime *rt = c != NULL ? cg_runtime_get(c) : NULL;
    if (rt == NULL)
        return c == NULL ? CG_ERR_INVALID_ARGUMENT : CG_ERR_NO_MEMORY;
    pthread_mutex_lock(&rt->lock);
    stats = rt->stats;
    stats.staging_bytes = rt->staging_bytes + rt->encoding_bytes;
    stats.throughput_bps = (uint64_t)cg_estimator_bps(&cg_runtime_speeds(rt)->link);
    cg_runtime_speeds_end(rt);
    pthread_mutex_unlock(&rt->lock);
    stats.abi_version = CACHEGEN_ABI_VERSION;
    return cg_abi_give(stats_out, &stats, sizeof stats) ? CG_OK : CG_ERR_INVALID_ARGUMENT;
}
