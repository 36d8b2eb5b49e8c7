#include "connector/lookup_decide.h"

#include "connector/clock.h"
#include "connector/fetch_exit.h"
#include "connector/handle.h"
#include "connector/kl_bound.h"
#include "connector/plan.h"

#include <stdlib.h>
#include <string.h>

/* An engine begins a load a step or two after the answer, once it has blocks for it; or never. */
static const uint64_t PROMISE_NS = UINT64_C(2000000000);

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
        .latency_ns = speeds->way_ns,
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
                                     bool is_link_unknown, cg_controller_chunk *sizes_out,
                                     uint8_t *levels_out)
{
    cg_controller_input input = look_out(rt, l, all, stored);
    uint32_t n_asked;
    if (is_link_unknown)
        input.link_bps = 0;
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
 * may be wrong. True: a load is to find out now. */
static bool doubts_prior(cg_runtime *rt, cg_policy policy)
{
    if (policy == CG_POLICY_PAPER) /* as published */
        return false;
    const bool doubts = cg_estimator_doubt_prior(&cg_runtime_speeds(rt)->link, cg_now_ns());
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

void cg_lookup_decide(cg_runtime *rt, cachegen_lookup *l)
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
                    .prompt_tokens = prefix->n_tokens,
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
        cg_controller_decision decision = choose(rt, l, all, stored, false, sizes, levels);
        /* Is it what is believed of the link that keeps all away, and not a bound of quality, or
         * the way to the store? */
        if (prefix->n_chunks > 0 && decision.n_load == 0 &&
            choose(rt, l, all, stored, true, sizes, levels).n_load > 0) {
            if (forget_old_link(rt))
                decision = choose(rt, l, all, stored, false, sizes, levels);
            if (decision.n_load == 0 && doubts_prior(rt, (cg_policy)c->config->policy))
                decision = choose(rt, l, all, stored, true, sizes, levels);
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
    leave_to_engine(rt, l);
}
