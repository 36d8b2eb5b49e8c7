#include "connector/lookup.h"

#include "connector/abi_struct.h"
#include "connector/asking.h"
#include "connector/clock.h"
#include "connector/fetch_exit.h"
#include "connector/kl_bound.h"
#include "connector/operation.h"
#include "connector/plan.h"
#include "connector/prefix.h"
#include "connector/quality.h"

#include <stdlib.h>
#include <string.h>

/* With max_abandoned_reads' default it stays below 1,024, a common limit of open files, which
 * io_uring applies to its table of them. */
enum { LOOKUP_DEPTH = 896, LOOKUP_THREADS = 64, MOUNT_THREADS = 24 };
/* Between two questions to a store that does not answer, at most. */
static const uint64_t MAX_PAUSE_NS = UINT64_C(30000000000);
/* An engine begins a load a step or two after the answer, once it has blocks for it; or never. */
static const uint64_t PROMISE_NS = UINT64_C(2000000000);
static const double MOST_NS = 1e18; /* of what an engine takes, in ns; such speeds are configured */

struct cachegen_lookup {
    cg_operation op;
    uint64_t started_boot_ns; /* for the plan, which crosses processes */
    uint32_t from_token;
    uint8_t level_plus_1;         /* 0: the controller chooses */
    uint64_t budget_ns, spent_ns; /* spent before the look-up */
    uint32_t asked_tokens;        /* that loads were told of; 0: the answer was there at once */
    double max_kl;                /* of what is loaded; 0: any */
    cg_prefix prefix;

    /* The answer, constant once the look-up is done. */
    cachegen_hit hit;
    uint8_t *plan;
    size_t plan_bytes;
    bool is_taken; /* the plan was: a load of it may begin; the runtime's lock */
};

static void lookup_destroy(cg_operation *op)
{
    cachegen_lookup *l = (cachegen_lookup *)op;
    cg_prefix_destroy(&l->prefix);
    free(l->plan);
    free(l);
}

/* What was found, but for a tail. */
static const cg_key *last_key(const cg_prefix *prefix)
{
    const uint32_t end = prefix->first_chunk + prefix->n_chunks,
                   n_full = end < prefix->n_full ? end : prefix->n_full;
    return n_full > 0 ? &prefix->keys[n_full - 1] : &prefix->root;
}

/* With the lock held: what must arrive of the plan, the engine may want to have soon: others that
 * are looked up meanwhile count it. */
static void promise(cg_runtime *rt, const cachegen_lookup *l, const cg_plan *plan)
{
    const uint64_t now_ns = cg_now_ns();
    const bool is_anytime = plan->policy == CG_POLICY_TTFT_BUDGET && plan->level_plus_1 == 0;
    /* Where another process loads, nobody says here that it has begun: until it should be over. A
     * load that takes longer than its budget mostly ends before. */
    const uint64_t load_ns =
                       l->hit.predicted_ns < l->budget_ns ? l->hit.predicted_ns : l->budget_ns,
                   kept_ns = load_ns > PROMISE_NS ? load_ns : PROMISE_NS;
    cg_link_promise made = {.plan = cg_plan_id(l->plan, l->plan_bytes),
                            .prefix = *last_key(&l->prefix),
                            .until_ns = now_ns + kept_ns};
    for (uint32_t i = 0; i < plan->n_chunks; i++) {
        const cg_plan_chunk *chunk = &plan->chunks[i];
        const uint8_t level =
            is_anytime ? cg_controller_nearest(&chunk->sizes, CG_L3) : chunk->level;
        made.bytes += (double)chunk->sizes.bytes[level];
        made.decode_ns += cg_speeds_decode_chunk(&rt->speeds, level, chunk->sizes.n_tokens,
                                                 chunk->sizes.bytes[level]);
    }
    if (plan->n_chunks > 0 && !l->prefix.is_cancelled)
        cg_link_promise_add(rt->link, &made, now_ns);
}

/* With the lock held: what the controller is to know of the chunks that were found, all[], of which
 * the last ends at stored tokens. */
static cg_controller_input look_out(cg_runtime *rt, const cachegen_lookup *l,
                                    const cg_controller_chunk *all, uint32_t stored)
{
    const uint64_t spent_ns = l->spent_ns + (cg_now_ns() - l->op.started_ns);
    /* Neither the store nor the engine has what follows. */
    const uint32_t had = stored > l->from_token ? stored : l->from_token;
    double promised_decode_ns;
    const cg_wanted promised =
        cg_link_promised(rt->link, last_key(&l->prefix), cg_now_ns(), &promised_decode_ns);
    const cg_speeds *speeds = cg_runtime_speeds(rt);
    const cg_wanted own = cg_fetch_wanted(&rt->fetch_plan);
    const int64_t n_loads = promised.n_loads + speeds->others.n_loads + own.n_loads;
    cg_controller_input input = {
        .policy = (cg_policy)l->op.connector->config->policy,
        .chunks = all,
        .n_chunks = l->prefix.n_chunks,
        .budget_ns = l->budget_ns > spent_ns ? l->budget_ns - spent_ns : 0,
        .link_bps = cg_speeds_link_bps(speeds),
        .link_hope = cg_estimator_hope(&speeds->link),
        .queued_bytes = promised.bytes + speeds->others.bytes + own.bytes,
        .queued_loads = n_loads > 0 ? (uint32_t)n_loads : 0,
        .queued_decode_ns = promised_decode_ns + cg_fetch_undecoded_ns(&rt->fetch_plan, speeds),
        .recompute = cg_speeds_recompute(speeds),
        .engine_ns = cg_fetch_engine_ns(&rt->fetch_plan, speeds, cg_now_ns()),
        .other_tokens = l->prefix.n_tokens - had,
        .end_token = l->prefix.n_tokens};
    cg_speeds_decode(speeds, input.decode_ns_per_token);
    cg_runtime_speeds_end(rt);
    return input;
}

/* With the lock held: what the controller says to them. sizes_out[]: their levels, where KL is
 * bounded of those that are loaded the one that each needs for that. */
static cg_controller_decision choose(cg_runtime *rt, const cachegen_lookup *l,
                                     const cg_controller_chunk *all, uint32_t stored,
                                     cg_controller_chunk *sizes_out, uint8_t *levels_out)
{
    const cg_controller_input input = look_out(rt, l, all, stored);
    uint32_t n_asked;
    if (l->max_kl > 0 && input.n_chunks > 0)
        return cg_kl_bound_decide(&input, &l->op.connector->model.quality, l->max_kl, sizes_out,
                                  levels_out, &n_asked);
    memcpy(sizes_out, all, input.n_chunks * sizeof *all);
    return cg_controller_decide(&input, levels_out);
}

/* With the lock held: an outage, for one, leaves an estimate by which nothing pays. Now and then a
 * load is tried all the same; it ends early if it does not pay. */
static bool forget_old_link(cg_runtime *rt)
{
    const bool has_forgotten = cg_estimator_forget_old(&cg_runtime_speeds(rt)->link, cg_now_ns());
    cg_runtime_speeds_end(rt);
    return has_forgotten;
}

/* With the lock held: nothing is loaded because of what the configuration says of the link, which
 * may be wrong. Returns which time this is, from 1; 0: not now. */
static uint32_t doubts_prior(cg_runtime *rt, const cachegen_lookup *l)
{
    if (l->op.connector->config->policy != CG_POLICY_TTFT_BUDGET || l->max_kl > 0)
        return 0;
    const uint32_t doubts = cg_estimator_doubt_prior(&cg_runtime_speeds(rt)->link, cg_now_ns());
    cg_runtime_speeds_end(rt);
    return doubts;
}

/* The chunks' sizes to sizes[n_chunks]. Returns how many tokens they have. */
static uint32_t take_sizes(const cg_prefix *prefix, cg_controller_chunk *sizes)
{
    uint32_t n_tokens = 0;
    for (uint32_t i = 0; i < prefix->n_chunks; i++) {
        sizes[i] = prefix->chunks[i].sizes;
        n_tokens += sizes[i].n_tokens;
    }
    return n_tokens;
}

/* What the decision makes of the chunks, and what the look-up's hit is then. */
static void settle(cachegen_lookup *l, const cg_controller_decision *decision,
                   const cg_controller_chunk *sizes, const uint8_t *levels, uint32_t stored,
                   cg_plan *plan)
{
    const cg_prefix *prefix = &l->prefix;
    plan->n_chunks = (uint32_t)decision->n_load;
    /* The load leaves time for what is recomputed after it. */
    plan->budget_ns = l->budget_ns > decision->reserve_ns ? l->budget_ns - decision->reserve_ns : 0;
    for (uint32_t i = 0; i < plan->n_chunks; i++) {
        cg_plan_chunk *chunk = &prefix->chunks[i];
        chunk->level = levels[i];
        chunk->sizes = sizes[i];
        plan->n_tokens += sizes[i].n_tokens;
        l->hit.bytes += sizes[i].bytes[levels[i]];
        if (levels[i] > l->hit.worst_level)
            l->hit.worst_level = levels[i];
    }
    /* The engine computes the last token itself: its logits are what it wants. */
    const uint32_t most = prefix->n_tokens - 1;
    l->hit.stored_tokens = stored < most ? stored : most;
    l->hit.n_chunks = plan->n_chunks;
    l->hit.predicted_ns = decision->predicted_ns;
    if (plan->n_chunks > 0) {
        const uint32_t end = plan->first_position + plan->n_tokens;
        plan->hit_tokens = end < most ? end : most;
        if (plan->hit_tokens <= l->from_token) { /* nothing that the engine does not have */
            plan->n_chunks = plan->n_tokens = plan->hit_tokens = 0;
            memset(&l->hit, 0, sizeof l->hit);
        }
    }
    l->hit.hit_tokens = plan->hit_tokens;
    plan->tokens = prefix->tokens + (plan->n_tokens > 0 ? plan->first_position : 0);
}

/* With the lock held: adds what this look-up leaves to the engine, so that look-ups that are
 * answered before the engine's next report count it. An engine that never reports may not compute
 * it, so for that one nothing is added. */
static void leave_to_engine(cg_runtime *rt, const cachegen_lookup *l)
{
    const uint32_t n_tokens = l->prefix.n_tokens,
                   had = l->hit.hit_tokens > l->from_token ? l->hit.hit_tokens : l->from_token;
    if (rt->fetch_plan.is_engine_told && !l->prefix.is_cancelled)
        cg_fetch_engine_add(
            &rt->fetch_plan,
            cg_prefill_ns(cg_speeds_recompute(&rt->speeds), n_tokens - had, n_tokens), cg_now_ns());
}

/* With the lock held: levels, cut, hit and plan from the chunks that were found. */
static void decide(cg_runtime *rt, cachegen_lookup *l)
{
    const cachegen *c = l->op.connector;
    const cg_prefix *prefix = &l->prefix;
    const uint32_t chunk_tokens = c->config->chunk_tokens;
    uint8_t *levels = malloc(prefix->n_chunks + (size_t)1);
    cg_controller_chunk *all = malloc((prefix->n_chunks + (size_t)1) * sizeof *all),
                        *sizes = malloc((prefix->n_chunks + (size_t)1) * sizeof *sizes);
    cg_plan plan = {.model = c->model.fingerprint,
                    .profile = c->model.profile_fingerprint,
                    .dtype = c->model.geometry.dtype,
                    .worst_level = prefix->worst_level,
                    .level_plus_1 = l->level_plus_1,
                    .policy = (uint8_t)c->config->policy,
                    .chunk_tokens = chunk_tokens,
                    .first_position = prefix->first_chunk * chunk_tokens,
                    .started_boot_ns = l->started_boot_ns,
                    .clock_id = c->boot_clock_id,
                    .extra = prefix->extra,
                    .parent = prefix->first_chunk > 0 ? prefix->keys[prefix->first_chunk - 1]
                                                      : prefix->root,
                    .chunks = prefix->chunks};
    if (levels != NULL && all != NULL && sizes != NULL) {
        /* Chunks before first_position are the engine's already: they count as stored, so that a
         * prefix goes on from them. */
        const uint32_t stored =
            take_sizes(prefix, all) + (prefix->n_chunks > 0 ? plan.first_position : 0);
        cg_controller_decision decision = choose(rt, l, all, stored, sizes, levels);
        if (prefix->n_chunks > 0 && decision.n_load == 0 && forget_old_link(rt))
            decision = choose(rt, l, all, stored, sizes, levels);
        const uint32_t doubts =
            prefix->n_chunks > 0 && decision.n_load == 0 ? doubts_prior(rt, l) : 0;
        if (doubts > 0) {
            const cg_controller_input input = look_out(rt, l, all, stored);
            decision = cg_controller_probe(&input, doubts, levels);
        }
        settle(l, &decision, sizes, levels, stored, &plan);
        l->plan_bytes = cg_plan_bytes(&plan);
        if ((l->plan = malloc(l->plan_bytes)) != NULL) {
            cg_plan_write(&plan, l->plan);
            promise(rt, l, &plan);
        }
    }
    free(levels);
    free(all);
    free(sizes);
    /* Without memory for a plan it is a miss. */
    if (l->plan == NULL) {
        memset(&l->hit, 0, sizeof l->hit);
        l->plan_bytes = 0;
        rt->stats.lookup_errors++;
    }
}

/* With the lock held: loads under way expect a load of so many tokens more, or fewer. */
static void expect(cg_runtime *rt, int64_t n_tokens)
{
    cg_fetch_plan_ask(&rt->fetch_plan, rt->fetch_plan.asked_tokens + (uint64_t)n_tokens);
    if (n_tokens < 0 && rt->fetch_plan.fetches != NULL)
        cg_runtime_wake_reader(rt); /* there may be time for more */
}

/* With the lock held: ends a look-up. What was found of it is its hit and its plan, and what is not
 * loaded is the engine's. */
static void finish(cg_runtime *rt, cachegen_lookup *l)
{
    decide(rt, l);
    leave_to_engine(rt, l);
    expect(rt, -(int64_t)l->asked_tokens);
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

/* With the lock held: ends a look-up as a miss, whatever was found: the store is silent, or asking
 * it is not worth the wait any more. */
static void skip(cg_runtime *rt, cachegen_lookup *l)
{
    l->prefix.n_chunks = 0;
    rt->stats.lookups_skipped++;
    finish(rt, l);
}

/* Frees a queue that failed, or whose questions may never be answered. */
static void drop_stuck_queue(cg_io **io, bool has_failed)
{
    if (*io != NULL && (has_failed || cg_io_n_under_way(*io) > 0)) {
        cg_io_free(*io, 0);
        *io = NULL;
    }
}

/* One small question. False: no answer in the time of a look-up; an error is one. */
static bool store_answers(cg_runtime *rt, cg_io **io)
{
    const cachegen *c = rt->connector;
    const cg_io_config config = cg_runtime_io_config(c);
    if (*io == NULL && cg_io_new(&config, io) != CG_OK)
        return true; /* what that means the next look-up will see */
    const bool is_silent = cg_asking_is_silent(rt, *io, cg_ms(c->config->lookup_timeout_ms));
    drop_stuck_queue(io, is_silent);
    return !is_silent;
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

/* With the lock held: a look-up has waited in vain. Until the store answers again look-ups are
 * misses at once, those that wait, too, and only this thread asks: one question at a time, the less
 * often the longer it takes, since each may leave a system call behind that hangs. */
static void await_answer(cg_runtime *rt, cg_io **io)
{
    uint64_t pause_ns = cg_ms(rt->connector->config->lookup_timeout_ms);
    rt->store_is_silent = true;
    while (!rt->stop && rt->store_is_silent) {
        while (rt->lookups.head != NULL)
            skip(rt, (cachegen_lookup *)cg_operation_take(rt, &rt->lookups));
        pthread_mutex_unlock(&rt->lock);
        const bool answers = store_answers(rt, io);
        pthread_mutex_lock(&rt->lock);
        rt->store_is_silent = !answers;
        if (!answers && !rt->stop)
            cg_runtime_wait(rt, &rt->lookups.filled, cg_now_ns() + pause_ns);
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
            finish(rt, l);
        else if (is_silent || (is_new && !is_in_time(rt, l, at->free_ns)))
            skip(rt, l);
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
    /* Of a call that was late, questions are left behind that take up the queue. */
    drop_stuck_queue(io, asked == CG_ASKED_BROKEN || asked == CG_ASKED_LATE);
    return asked;
}

static void *look_up(void *argument)
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
            await_answer(rt, &io);
    }
    pthread_mutex_unlock(&rt->lock);
    cg_io_free(io, 0);
    pthread_mutex_lock(&rt->lock);
    cg_runtime_leave(rt);
    return NULL;
}

void cg_lookups_cancel(cg_runtime *rt)
{
    for (cg_operation *op = rt->lookups.head; op != NULL; op = op->next)
        ((cachegen_lookup *)op)->prefix.is_cancelled = true;
}

/* Everything that a look-up copies and computes from its request. */
static cg_status fill(cachegen_lookup *l, const cachegen_request *r,
                      const cachegen_lookup_options *options, uint32_t from_token)
{
    const cg_config *config = l->op.connector->config;
    const uint8_t has_levels = l->op.connector->model.profile != NULL ? 0xf : 1;
    cg_prefix *prefix = &l->prefix;
    l->from_token = from_token;
    l->started_boot_ns = cg_boot_ns();
    l->spent_ns = options->spent_ns < l->started_boot_ns ? options->spent_ns : l->started_boot_ns;
    l->started_boot_ns -= l->spent_ns;
    l->max_kl = (double)options->max_kl_micronats / 1e6;
    l->level_plus_1 = (uint8_t)(r->level_plus_1 > 0 ? r->level_plus_1 : config->level_plus_1);
    l->budget_ns = r->ttft_budget_ns > 0 ? r->ttft_budget_ns : cg_ms(config->ttft_budget_ms);
    const cg_status status = cg_prefix_init(prefix, l->op.runtime, r, from_token);
    prefix->worst_level =
        (uint8_t)(r->worst_level_plus_1 > 0 ? r->worst_level_plus_1 - 1 : config->worst_level);
    if (prefix->worst_level > config->worst_level)
        prefix->worst_level = (uint8_t)config->worst_level;
    prefix->accepted = (uint8_t)(has_levels & ((2u << prefix->worst_level) - 1));
    if (l->level_plus_1 > 0)
        prefix->accepted &= (uint8_t)(1u << (l->level_plus_1 - 1));
    return status;
}

cachegen_status cachegen_lookup_start(cachegen *connector, const cachegen_request *request,
                                      uint32_t from_token, cachegen_lookup **out)
{
    return cachegen_lookup_start_with(connector, request, from_token, NULL, out);
}

cachegen_status cachegen_lookup_start_with(cachegen *connector, const cachegen_request *request,
                                           uint32_t from_token,
                                           const cachegen_lookup_options *options,
                                           cachegen_lookup **out)
{
    cachegen_request r;
    cachegen_lookup_options o = {0};
    if (out == NULL)
        return CG_ERR_INVALID_ARGUMENT;
    *out = NULL;
    if (connector == NULL)
        return CG_ERR_INVALID_ARGUMENT;
    cg_status status = cg_abi_take(request, &r, sizeof r);
    if (status == CG_OK && options != NULL)
        status = cg_abi_take(options, &o, sizeof o);
    if (status != CG_OK)
        return status;
    if (r.tokens == NULL || r.n_tokens == 0 || from_token > r.n_tokens ||
        (r.salt == NULL && r.salt_bytes > 0) || (r.extra == NULL && r.extra_bytes > 0) ||
        r.worst_level_plus_1 > CG_N_LEVELS || r.level_plus_1 > CG_N_LEVELS ||
        (r.level_plus_1 > 0 && o.max_kl_micronats > 0))
        return CG_ERR_INVALID_ARGUMENT;
    cachegen_lookup *l = cg_operation_new(connector, sizeof *l, lookup_destroy);
    status = CG_ERR_NO_MEMORY;
    if (l == NULL)
        goto done;
    cg_runtime *rt = l->op.runtime;
    if ((status = fill(l, &r, &o, from_token)) != CG_OK)
        goto done;

    /* What is remembered answers at once, on the caller's thread. Where no level may be loaded
     * there is nothing to ask. */
    const bool known = l->prefix.accepted == 0 || cg_prefix_recall(&l->prefix) != CG_ERR_AGAIN;
    pthread_mutex_lock(&rt->lock);
    const bool is_silent = rt->store_is_silent;
    if (!known && !is_silent)
        status = cg_runtime_start(rt, &rt->looker, "cachegen-look", look_up);
    if (status == CG_OK) {
        cg_operation_begin(&l->op);
        if (is_silent)
            skip(rt, l);
        else if (known)
            finish(rt, l);
        else {
            l->asked_tokens = l->prefix.n_tokens - from_token;
            expect(rt, l->asked_tokens);
            cg_operation_put(&rt->lookups, &l->op);
        }
    }
    pthread_mutex_unlock(&rt->lock);
    if (status == CG_OK) {
        *out = l;
        l = NULL;
    }
done:
    if (l != NULL)
        lookup_destroy(&l->op);
    return status;
}

cachegen_status cachegen_lookup_poll(cachegen_lookup *lookup, cachegen_hit *hit_out)
{
    cachegen_hit hit = {.abi_version = CACHEGEN_ABI_VERSION};
    if (lookup == NULL)
        return CG_ERR_INVALID_ARGUMENT;
    bool done = true;
    if (cg_operation_is_ours(&lookup->op)) { /* else the parent's: a miss here */
        cg_runtime *rt = lookup->op.runtime;
        pthread_mutex_lock(&rt->lock);
        if ((done = lookup->op.done)) {
            hit = lookup->hit;
            hit.abi_version = CACHEGEN_ABI_VERSION;
        }
        pthread_mutex_unlock(&rt->lock);
    }
    if (!cg_abi_give(hit_out, &hit, sizeof hit))
        return CG_ERR_INVALID_ARGUMENT;
    return done ? CACHEGEN_OK : CACHEGEN_AGAIN;
}

cachegen_status cachegen_lookup_plan(cachegen_lookup *lookup, void *plan, size_t *plan_bytes)
{
    if (lookup == NULL || plan_bytes == NULL || !cg_operation_is_ours(&lookup->op))
        return CG_ERR_INVALID_ARGUMENT;
    cg_runtime *rt = lookup->op.runtime;
    pthread_mutex_lock(&rt->lock);
    const bool done = lookup->op.done; /* after it, hit and plan are constant */
    pthread_mutex_unlock(&rt->lock);
    if (!done)
        return CG_ERR_AGAIN;
    if (lookup->plan == NULL)
        return CG_ERR_NO_MEMORY;
    const size_t room = *plan_bytes;
    *plan_bytes = lookup->plan_bytes;
    if (plan == NULL)
        return CG_OK;
    if (room < lookup->plan_bytes)
        return CG_ERR_BUFFER_TOO_SMALL;
    memcpy(plan, lookup->plan, lookup->plan_bytes);
    pthread_mutex_lock(&rt->lock);
    lookup->is_taken = true;
    pthread_mutex_unlock(&rt->lock);
    return CG_OK;
}

void cachegen_lookup_free(cachegen_lookup *lookup)
{
    if (lookup == NULL)
        return;
    if (!cg_operation_is_ours(&lookup->op)) {
        lookup_destroy(&lookup->op); /* this process's copy, which no thread works on */
        return;
    }
    cg_runtime *rt = lookup->op.runtime;
    pthread_mutex_lock(&rt->lock);
    lookup->prefix.is_cancelled = true;
    if (lookup->op.done && lookup->plan != NULL && !lookup->is_taken) {
        const cg_key plan_id = cg_plan_id(lookup->plan, lookup->plan_bytes);
        cg_link_promise_end(rt->link, &plan_id);
    }
    cg_operation_unref(&lookup->op); /* not done: the worker frees it */
    pthread_mutex_unlock(&rt->lock);
}
