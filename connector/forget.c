/* What a connector holds against chunks because a load elsewhere found them bad: cachegen_forget()
 * and cachegen_forget_failed(). */
#include "connector/abi_struct.h"
#include "connector/clock.h"
#include "connector/prefix.h"
#include "connector/runtime.h"

enum { ALL_LEVELS = (1 << CG_N_LEVELS) - 1 };

/* What a load of the plan may have read of a chunk: the level that was asked for, or any that the
 * store had and the request accepts. */
static uint8_t levels_of(const cg_plan *plan, uint32_t chunk_index)
{
    const cg_plan_chunk *chunk = &plan->chunks[chunk_index];
    uint8_t levels = (uint8_t)(1u << chunk->level);
    for (unsigned level = 0; level < CG_N_LEVELS && plan->level_plus_1 == 0; level++)
        if (chunk->sizes.bytes[level] > 0)
            levels |= (uint8_t)(1u << level);
    return levels;
}

cachegen_status cachegen_forget(cachegen *connector, const void *plan_bytes, size_t n_bytes)
{
    cg_plan *plan;
    if (connector == NULL || plan_bytes == NULL)
        return CG_ERR_INVALID_ARGUMENT;
    cg_runtime *rt = cg_runtime_get(connector);
    if (rt == NULL)
        return CG_ERR_NO_MEMORY;
    const cg_status status = cg_plan_parse(plan_bytes, n_bytes, &plan);
    if (status != CG_OK)
        return status;
    const uint64_t until = cg_now_ns() + cg_ms(connector->config->retry_ms);
    pthread_mutex_lock(&rt->lock);
    for (uint32_t i = 0; i < plan->n_chunks; i++)
        cg_chunk_memory_failed(rt->chunk_memory, &plan->keys[i + 1], levels_of(plan, i), false,
                               until);
    pthread_mutex_unlock(&rt->lock);
    cg_plan_free(plan);
    return CG_OK;
}

/* Whether a chunk is to blame for how the load ended. */
static bool blames_a_chunk(const cachegen_progress *p)
{
    if (p->status == CACHEGEN_OK || (p->failed_levels & ALL_LEVELS) == 0)
        return false;
    /* Nothing came at all for long: the next one need not find out again. */
    return p->status != CG_ERR_TIMED_OUT || p->bytes_read == 0;
}

/* The plan's chunk that begins at a token of the prompt; n_chunks: none does. */
static uint32_t chunk_at(const cg_plan *plan, uint32_t first_token)
{
    uint32_t i = 0;
    while (i < plan->n_chunks && plan->chunks[i].first_token != first_token)
        i++;
    return i;
}

cachegen_status cachegen_forget_failed(cachegen *connector, const void *plan_bytes, size_t n_bytes,
                                       const cachegen_progress *progress)
{
    cachegen_progress p;
    cg_plan *plan;
    if (connector == NULL || plan_bytes == NULL)
        return CG_ERR_INVALID_ARGUMENT;
    cg_status status = cg_abi_take(progress, &p, sizeof p);
    if (status != CG_OK)
        return status;
    cg_runtime *rt = cg_runtime_get(connector);
    if (rt == NULL)
        return CG_ERR_NO_MEMORY;
    if ((status = cg_plan_parse(plan_bytes, n_bytes, &plan)) != CG_OK)
        return status;
    const uint32_t i = chunk_at(plan, p.failed_token);
    if (blames_a_chunk(&p) && i < plan->n_chunks) {
        const uint8_t levels = (uint8_t)(p.failed_levels & ALL_LEVELS);
        const cg_key *key = &plan->keys[i + 1];
        const uint64_t until =
            cg_now_ns() + cg_handle_retry_ns(connector, (cg_status)p.status, p.total_ns);
        const bool is_known = p.status == CG_ERR_LOSSY_PREFIX && p.failed_worst_level < CG_N_LEVELS;
        pthread_mutex_lock(&rt->lock);
        if (p.status != CG_ERR_TIMED_OUT)
            cg_prefix_doubt(rt, plan, i, until);
        if (!is_known)
            cg_chunk_memory_failed(rt->chunk_memory, key, levels, false, until);
        for (unsigned level = 0; is_known && level < CG_N_LEVELS; level++)
            if ((levels >> level & 1) != 0)
                cg_chunk_memory_provenance(rt->chunk_memory, key, (uint8_t)level,
                                           (uint8_t)p.failed_worst_level, until);
        pthread_mutex_unlock(&rt->lock);
    }
    cg_plan_free(plan);
    return CG_OK;
}
