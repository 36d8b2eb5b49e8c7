#include "connector/load.h"

#include "connector/abi_struct.h"
#include "connector/clock.h"
#include "connector/fetch_exit.h"
#include "connector/load_state.h"
#include "connector/reader.h"
#include "connector/uses.h"

#include <stdlib.h>
#include <string.h>

static void load_destroy(cg_operation *op)
{
    cachegen_load *load = (cachegen_load *)op;
    if (load->chunks != NULL)
        for (uint32_t i = 0; i < load->plan->n_chunks; i++)
            cg_load_drop_pieces(&load->chunks[i]);
    cg_fetch_destroy(&load->fetch);
    cg_trace_free(load->trace);
    cg_load_drop_mark(load);
    free(load->table);
    free(load->chunks);
    cg_plan_free(load->plan);
    free(load);
}

static cg_status check_plan(const cachegen *c, const cg_plan *plan, const cachegen_load_request *r)
{
    if (memcmp(&plan->model, &c->model.fingerprint, sizeof plan->model) != 0 ||
        plan->dtype != c->model.geometry.dtype)
        return CG_ERR_FOREIGN_MODEL;
    if (memcmp(&plan->profile, &c->model.profile_fingerprint, sizeof plan->profile) != 0)
        return CG_ERR_FOREIGN_PROFILE;
    /* What lies before first_position was the engine's already: the plan has no chunks of it. */
    if (r->from_token > r->to_token || r->to_token > plan->hit_tokens ||
        (r->from_token < plan->first_position && r->from_token < r->to_token))
        return CG_ERR_INVALID_ARGUMENT;
    return CG_OK;
}

static cg_status fill(cachegen_load *load, const cachegen_load_request *r)
{
    const cg_plan *plan = load->plan;
    const cg_model *model = &load->op.connector->model;
    cg_fetch *fetch = &load->fetch;
    load->from_token = r->from_token;
    load->to_token = r->to_token;
    load->n_blocks = r->n_blocks;
    load->progress.loaded_tokens = r->from_token;
    load->table = malloc((r->n_blocks + (size_t)1) * sizeof *load->table);
    load->chunks = calloc(plan->n_chunks + (size_t)1, sizeof *load->chunks);
    if (load->table == NULL || load->chunks == NULL ||
        cg_fetch_init(fetch, plan->n_chunks) != CG_OK)
        return CG_ERR_NO_MEMORY;
    if (r->n_blocks > 0)
        memcpy(load->table, r->block_table, r->n_blocks * sizeof *load->table);
    /* Chunks that the range touches are read whole. */
    if (r->from_token < r->to_token)
        cg_fetch_cut(fetch, (r->from_token - plan->first_position) / plan->chunk_tokens,
                     (r->to_token - plan->first_position - 1) / plan->chunk_tokens + 1);
    else
        cg_fetch_cut(fetch, 0, 0);
    if (fetch->end > 0)
        fetch->end_token =
            plan->chunks[fetch->end - 1].first_token + plan->chunks[fetch->end - 1].sizes.n_tokens;
    fetch->prompt_tokens = plan->prompt_tokens;
    fetch->policy = (cg_policy)plan->policy;
    fetch->quality = &model->quality;
    fetch->has_fixed_level = plan->level_plus_1 > 0 || plan->policy == CG_POLICY_FIXED;
    for (uint32_t i = 0; i < plan->n_chunks; i++) {
        load->chunks[i].load = load;
        load->chunks[i].index = i;
        fetch->levels[i] = plan->chunks[i].level;
        fetch->sizes[i] = plan->chunks[i].sizes;
        fetch->chunks[i].is_guessed = plan->chunks[i].is_guessed;
    }
    if (cg_fetch_is_anytime(fetch) && model->profile != NULL && cg_profile_nests(model->profile))
        cg_fetch_nest(fetch);
    /* What has passed of the budget; of a plan from another machine that is not known. */
    const uint64_t spent_ns = cg_boot_elapsed_ns(&plan->clock_id, plan->started_boot_ns,
                                                 &load->op.connector->boot_clock_id, cg_boot_ns());
    const uint64_t left_ns = plan->budget_ns > spent_ns ? plan->budget_ns - spent_ns : 0;
    /* What is left of the budget is the plan's word: any number. */
    if (__builtin_add_overflow(cg_now_ns(), left_ns, &fetch->deadline_ns))
        fetch->deadline_ns = UINT64_MAX;
    return CG_OK;
}

/* What the engine has enqueued that may touch the blocks. */
static cg_status make_mark(cachegen_load *load, const cachegen_load_request *r)
{
    cachegen *c = load->op.connector;
    if (load->layout->given.memory != CACHEGEN_MEMORY_CUDA)
        return CG_OK;
    if (r->after_kind > CACHEGEN_AFTER_EVENT)
        return CG_ERR_INVALID_ARGUMENT;
    const cg_gpu *gpu = cg_handle_gpu(c);
    const cg_after after = {(cg_after_kind)r->after_kind, r->after};
    if (gpu == NULL)
        return CG_ERR_DEVICE;
    const cg_status status = gpu->functions->mark(gpu->device, after, &load->mark);
    if (status == CG_ERR_DEVICE)
        cg_handle_check_gpu(c);
    return status;
}

cachegen_status cachegen_load_start(cachegen *connector, const cachegen_load_request *request,
                                    cachegen_load **out)
{
    cachegen_load_request r;
    if (out == NULL)
        return CG_ERR_INVALID_ARGUMENT;
    *out = NULL;
    if (connector == NULL)
        return CG_ERR_INVALID_ARGUMENT;
    cg_status status = cg_abi_take(request, &r, sizeof r);
    if (status != CG_OK)
        return status;
    if (r.plan == NULL)
        return CG_ERR_INVALID_ARGUMENT;
    const cg_kv_layout *layout = cg_handle_layout(connector, r.kv_id);
    if (layout == NULL || !cg_kv_layout_covers(layout, r.block_table, r.n_blocks, r.to_token))
        return CG_ERR_INVALID_ARGUMENT;
    cachegen_load *load = cg_operation_new(connector, sizeof *load, load_destroy);
    status = CG_ERR_NO_MEMORY;
    if (load == NULL)
        goto done;
    cg_runtime *rt = load->op.runtime;
    load->layout = layout;
    if ((status = cg_plan_parse(r.plan, r.plan_bytes, &load->plan)) != CG_OK ||
        (status = check_plan(connector, load->plan, &r)) != CG_OK ||
        (status = fill(load, &r)) != CG_OK || (status = make_mark(load, &r)) != CG_OK)
        goto done;
    if (load->fetch.first < load->fetch.end)
        load->trace = cg_trace_new(connector, load->op.started_ns, r.request_id);

    pthread_mutex_lock(&rt->lock);
    if (load->fetch.first < load->fetch.end) {
        status = cg_runtime_start(rt, &rt->reader, "cachegen-read", cg_load_reader);
        cg_uses_begin(rt);
        cg_runtime_reopen_store(rt);
    }
    cg_fetch_set_end(&load->fetch, cg_runtime_speeds(rt), cg_now_ns());
    cg_runtime_speeds_end(rt);
    if (status == CG_OK)
        status = cg_fetch_plan_add(&rt->fetch_plan, &load->fetch);
    if (status == CG_OK) {
        const cg_key plan_id = cg_plan_id(r.plan, r.plan_bytes);
        cg_link_promise_end(rt->link, &plan_id);
        cg_operation_begin(&load->op);
        cg_runtime_wake_reader(rt);
        *out = load;
        cg_load_settle(load); /* an empty load is done */
        load = NULL;
    }
    pthread_mutex_unlock(&rt->lock);
done:
    if (load != NULL)
        load_destroy(&load->op);
    return status;
}

/* With the lock held: the host knows how the load has ended, and counts what it lacks. */
static void tell_lost(cachegen_load *load)
{
    if (!load->op.done)
        return;
    cg_fetch_engine_known(&load->op.runtime->fetch_plan, load->lost_ns);
    load->lost_ns = 0;
}

cachegen_status cachegen_load_poll(cachegen_load *load, cachegen_progress *progress_out)
{
    if (load == NULL)
        return CG_ERR_INVALID_ARGUMENT;
    const cachegen_status status =
        cg_operation_poll(&load->op, &load->progress, load->from_token, progress_out);
    if (status == CACHEGEN_OK && cg_operation_is_ours(&load->op)) {
        pthread_mutex_lock(&load->op.runtime->lock);
        tell_lost(load);
        pthread_mutex_unlock(&load->op.runtime->lock);
    }
    return status;
}

uint32_t cachegen_load_levels(cachegen_load *load, uint8_t *levels_out, uint32_t n_levels)
{
    if (load == NULL || !cg_operation_is_ours(&load->op))
        return 0;
    pthread_mutex_lock(&load->op.runtime->lock);
    const cg_fetch *fetch = &load->fetch;
    const uint32_t n = fetch->n_whole;
    for (uint32_t i = 0; i < n && i < n_levels && levels_out != NULL; i++)
        levels_out[i] = fetch->chunks[fetch->first + i].level;
    pthread_mutex_unlock(&load->op.runtime->lock);
    return n;
}

void cachegen_load_cancel(cachegen_load *load)
{
    if (load == NULL || !cg_operation_is_ours(&load->op))
        return;
    pthread_mutex_lock(&load->op.runtime->lock);
    if (!load->op.done)
        cg_load_cancel(load);
    pthread_mutex_unlock(&load->op.runtime->lock);
}

void cg_loads_cancel(cg_runtime *rt)
{
    for (cg_fetch *fetch = rt->fetch_plan.fetches, *next; fetch != NULL; fetch = next) {
        next = fetch->next; /* cancelling may take it off the list */
        cg_load_cancel(cg_load_of_fetch(fetch));
    }
}

bool cg_loads_on_host(const cg_runtime *rt)
{
    for (cg_fetch *fetch = rt->fetch_plan.fetches; fetch != NULL; fetch = fetch->next)
        if (cg_load_of_fetch(fetch)->layout->given.memory == CACHEGEN_MEMORY_HOST)
            return true;
    return false;
}

void cachegen_load_free(cachegen_load *load)
{
    if (load == NULL || !cg_operation_is_ours(&load->op))
        return; /* a parent's is left as it is */
    cg_runtime *rt = load->op.runtime;
    pthread_mutex_lock(&rt->lock);
    if (!load->op.done)
        cg_load_cancel(load);
    cg_operation_wait(&load->op);
    tell_lost(load);
    cg_operation_unref(&load->op);
    pthread_mutex_unlock(&rt->lock);
}
