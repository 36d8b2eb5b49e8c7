#include "connector/lookup.h"

#include "connector/abi_struct.h"
#include "connector/clock.h"
#include "connector/handle.h"
#include "connector/looker.h"
#include "connector/plan.h"

#include <stdlib.h>
#include <string.h>

static void lookup_destroy(cg_operation *op)
{
    cachegen_lookup *l = (cachegen_lookup *)op;
    cg_prefix_destroy(&l->prefix);
    free(l->plan);
    free(l);
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
    prefix->no_tail_at_hole = options->no_tail_at_hole != 0;
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
        status = cg_runtime_start(rt, &rt->looker, "cachegen-look", cg_looker_run);
    if (status == CG_OK) {
        cg_operation_begin(&l->op);
        if (is_silent)
            cg_looker_skip(rt, l);
        else if (known)
            cg_looker_finish(rt, l);
        else {
            l->asked_tokens = l->prefix.n_tokens - from_token;
            cg_looker_expect(rt, l->asked_tokens);
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
