#include "connector/looker.h"

#include "connector/asking.h"
#include "connector/clock.h"
#include "connector/fetch_exit.h"
#include "connector/handle.h"
#include "connector/lookup_decide.h"

/* With max_abandoned_reads' default it stays below 1,024, a common limit of open files, which
 * io_uring applies to its table of them. */
enum { LOOKUP_DEPTH = 896, LOOKUP_THREADS = 64, MOUNT_THREADS = 24 };
/* Between two questions to a store that does not answer, at most. */
static const uint64_t MAX_PAUSE_NS = UINT64_C(30000000000);
static const double MOST_NS = 1e18; /* of what an engine takes, in ns; such speeds are configured */

void cg_looker_expect(cg_runtime *rt, int64_t n_tokens)
{
    cg_fetch_plan_ask(&rt->fetch_plan, rt->fetch_plan.asked_tokens + (uint64_t)n_tokens);
    if (n_tokens < 0 && rt->fetch_plan.fetches != NULL)
        cg_runtime_wake_reader(rt); /* there may be time for more */
}

void cg_looker_finish(cg_runtime *rt, cachegen_lookup *l)
{
    cg_lookup_decide(rt, l);
    cg_looker_expect(rt, -(int64_t)l->asked_tokens);
    rt->stats.lookups++;
    rt->stats.lookup_hits += l->hit.hit_tokens > l->from_token;
    rt->stats.lookup_ns += cg_now_ns() - l->op.started_ns;
    cg_operation_finish(&l->op);
}

/* Deep enough for all chunks of a long prompt at once: questions are small, and the store may be a
 * network away. Where that is refused (limits of locked memory, of open files) threads do it, or
 * the configured depth of what was configured. A mount of cachegenfs on this host has a daemon that
 * works on 24 questions at once. io_uring would give each open to a thread of the kernel's, which
 * costs half as much CPU time again as as many threads of ours. */
static cg_status new_queue(const cg_runtime *rt, cg_io **io_out)
{
    const cg_io_config config = cg_runtime_io_config(rt->connector);
    cg_io_config deep = config;
    deep.n_threads = rt->connector->asks_by_threads ? MOUNT_THREADS : LOOKUP_THREADS;
    if (rt->connector->asks_by_threads)
        deep.backend = CG_IO_THREADS;
    if (deep.queue_depth < LOOKUP_DEPTH)
        deep.queue_depth = LOOKUP_DEPTH;
    const cg_status status = cg_io_new(&deep, io_out);
    return status == CG_OK ? status : cg_io_new(&config, io_out);
}

void cg_looker_skip(cg_runtime *rt, cachegen_lookup *l)
{
    l->prefix.n_chunks = 0;
    rt->stats.lookups_skipped++;
    cg_looker_finish(rt, l);
}

/* With the lock held: how long the engine would take until it has computed what a look-up is for;
 * 0: not known. */
static uint64_t computed_in_ns(cg_runtime *rt, const cachegen_lookup *l)
{
    const uint32_t n_tokens = l->prefix.n_tokens;
    const cg_speeds *speeds = cg_runtime_speeds(rt);
    const double engine_ns = cg_fetch_engine_ns(&rt->fetch_plan, speeds, cg_now_ns()),
                 ns =
                     cg_prefill_ns(cg_speeds_recompute(speeds), n_tokens - l->from_token, n_tokens);
    cg_runtime_speeds_end(rt);
    return ns > 0 ? (uint64_t)(engine_ns + ns < MOST_NS ? engine_ns + ns : MOST_NS) : 0;
}

/* With the lock held: whether a look-up that nothing was asked for yet is worth asking for. No: it
 * has waited for others, who left the line at free_ns, for longer than the engine would take until
 * it had computed the prompt, and than the store may take, or all that the request may. */
static bool is_in_time(cg_runtime *rt, const cachegen_lookup *l, uint64_t free_ns)
{
    const uint64_t timeout_ns = cg_ms(l->op.connector->config->lookup_timeout_ms),
                   left_ns = l->budget_ns > l->spent_ns ? l->budget_ns - l->spent_ns : 0,
                   patience_ns = left_ns < timeout_ns ? left_ns : timeout_ns,
                   waited_ns = free_ns > l->op.started_ns ? free_ns - l->op.started_ns : 0;
    return waited_ns <= patience_ns || waited_ns <= computed_in_ns(rt, l);
}

/* With the lock held: a store that answers, slowly, may take as long as the engine would. */
static void set_patience(cg_runtime *rt, cachegen_lookup *l)
{
    if (l->prefix.patience_ns > 0)
        return;
    const uint64_t timeout_ns = cg_ms(l->op.connector->config->lookup_timeout_ms),
                   computed_ns = computed_in_ns(rt, l);
    l->prefix.patience_ns = computed_ns > timeout_ns ? computed_ns : timeout_ns;
}

/* With the lock held: one small question, and a pause if there is no answer in the time of a
 * look-up; an error is one. The pause ends where the answer comes after all, or the runtime stops.
 * False: neither came. */
static bool ask_and_pause(cg_runtime *rt, uint64_t pause_ns)
{
    const cg_io_config config = cg_runtime_io_config(rt->connector);
    cg_io_completion late;
    size_t n = 0;
    pthread_mutex_unlock(&rt->lock);
    cg_io *io = NULL;
    /* Without a queue the next look-up will see what that means. */
    const bool is_silent =
        cg_io_new(&config, &io) == CG_OK &&
        cg_asking_is_silent(rt, io, cg_ms(rt->connector->config->lookup_timeout_ms));
    pthread_mutex_lock(&rt->lock);
    rt->store_is_silent = is_silent;
    if (is_silent && !rt->stop) {
        rt->looker_io = io;
        pthread_mutex_unlock(&rt->lock);
        cg_io_wait(io, pause_ns, &late, 1, &n);
        pthread_mutex_lock(&rt->lock);
        rt->looker_io = NULL;
    }
    pthread_mutex_unlock(&rt->lock);
    cg_io_free(io, 0);
    pthread_mutex_lock(&rt->lock);
    return n > 0 || !is_silent;
}

/* With the lock held: a look-up has waited in vain. Until the store answers again look-ups are
 * misses at once, those that wait, too, and only this thread asks: one question at a time, the less
 * often the longer it takes, since each may leave a system call behind that hangs. After a late
 * answer it asks again at once: the store may be back, or as slow as before. */
static void await_answer(cg_runtime *rt)
{
    const uint64_t least_ns = cg_ms(rt->connector->config->lookup_timeout_ms);
    uint64_t pause_ns = least_ns;
    rt->store_is_silent = true;
    while (!rt->stop && rt->store_is_silent) {
        while (rt->lookups.head != NULL)
            cg_looker_skip(rt, (cachegen_lookup *)cg_operation_take(rt, &rt->lookups));
        if (ask_and_pause(rt, pause_ns))
            pause_ns = least_ns;
        else
            pause_ns = 2 * pause_ns < MAX_PAUSE_NS ? 2 * pause_ns : MAX_PAUSE_NS;
    }
    rt->store_is_silent = false;
}

/* Look-ups that were taken off the queue, the oldest first. */
typedef struct line {
    cachegen_lookup *lookups[CG_ASKING_PROMPTS];
    size_t n;
    uint64_t free_ns; /* when what was asked for the others was answered */
} line;

/* With the lock held: fills the line from the queue, and waits for the first. False: the runtime
 * stops, and none is left. */
static bool line_fill(cg_runtime *rt, line *at)
{
    while (at->n < CG_ASKING_PROMPTS && (at->n == 0 || rt->lookups.head != NULL)) {
        cg_operation *op = cg_operation_take(rt, &rt->lookups);
        if (op == NULL)
            return false;
        at->lookups[at->n++] = (cachegen_lookup *)op;
    }
    return true;
}

/* With the lock held: ends those that need no more answers. */
static void line_leave(cg_runtime *rt, line *at, bool is_silent)
{
    size_t n = 0;
    for (size_t i = 0; i < at->n; i++) {
        cachegen_lookup *l = at->lookups[i];
        const bool is_new = l->prefix.asked_ns == 0;
        if (l->prefix.is_cancelled || rt->stop || l->prefix.stage == CG_PREFIX_DONE)
            cg_looker_finish(rt, l);
        else if (is_silent || (is_new && !is_in_time(rt, l, at->free_ns)))
            cg_looker_skip(rt, l);
        else {
            set_patience(rt, l);
            at->lookups[n++] = l;
        }
    }
    at->n = n;
}

/* Without the lock: one stage further for those in line, or some of them. */
static cg_asked line_ask(cg_runtime *rt, const line *at, cg_asking_width *width, cg_io **io)
{
    cg_prefix *prefixes[CG_ASKING_PROMPTS];
    for (size_t i = 0; i < at->n; i++)
        prefixes[i] = &at->lookups[i]->prefix;
    if (*io == NULL && new_queue(rt, io) != CG_OK) {
        pthread_mutex_lock(&rt->lock);
        rt->stats.lookup_errors += at->n;
        pthread_mutex_unlock(&rt->lock);
        for (size_t i = 0; i < at->n; i++)
            cg_prefix_give_up(prefixes[i]);
        return CG_ASKED_BROKEN;
    }
    const uint64_t timeout_ns = cg_ms(rt->connector->config->lookup_timeout_ms);
    const cg_asked asked = cg_asking_ask(width, *io, prefixes, at->n, timeout_ns);
    /* It has failed, or questions are left behind that take up the queue. */
    if (asked != CG_ASKED) {
        cg_io_free(*io, 0);
        *io = NULL;
    }
    return asked;
}

void *cg_looker_run(void *argument)
{
    cg_runtime *rt = argument;
    cg_io *io = NULL;
    cg_asking_width width = {.n_chunks = CG_ASKING_LEAST};
    line at = {.n = 0};
    pthread_mutex_lock(&rt->lock);
    while (line_fill(rt, &at)) {
        line_leave(rt, &at, false);
        if (at.n == 0)
            continue;
        cg_runtime_refresh_store(rt);
        pthread_mutex_unlock(&rt->lock);
        const cg_asked asked = line_ask(rt, &at, &width, &io);
        pthread_mutex_lock(&rt->lock);
        at.free_ns = cg_now_ns();
        line_leave(rt, &at, asked == CG_ASKED_IN_VAIN);
        if (asked == CG_ASKED_IN_VAIN)
            await_answer(rt);
    }
    pthread_mutex_unlock(&rt->lock);
    cg_io_free(io, 0);
    pthread_mutex_lock(&rt->lock);
    cg_runtime_leave(rt);
    return NULL;
}
