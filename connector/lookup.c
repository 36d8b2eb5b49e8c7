#include "connector/lookup.h"

#include "connector/abi_struct.h"
#include "connector/clock.h"
#include "connector/operation.h"
#include "connector/plan.h"

#include <stdlib.h>
#include <string.h>

/* Chunks in the first batch of probes; each next batch is BATCH_GROWTH times larger, so that a
 * prompt of any length takes a logarithmic number of round trips and a short hit does not probe all
 * of a long prompt. */
enum { FIRST_BATCH = 32, BATCH_GROWTH = 4 };

struct cachegen_lookup {
    cg_operation op;
    bool cancelled; /* the runtime's lock */
    uint64_t started_realtime_ns, deadline_ns;

    uint32_t *tokens;
    uint32_t n_tokens, from_token;
    cg_key root, extra;
    uint8_t worst_level, level_plus_1, accepted; /* accepted: mask of levels that may be loaded */
    uint64_t budget_ns;

    /* What is found so far: chunks [first_chunk, first_chunk + n_chunks), without holes. */
    uint32_t first_chunk, n_full;
    cg_key *keys;          /* [n_full] */
    cg_plan_chunk *chunks; /* [n_full - first_chunk + 1] */
    uint32_t n_chunks;
    bool ended; /* a hole was met: no further chunk can follow */

    cachegen_hit hit;
    uint8_t *plan;
    size_t plan_bytes;
};

static void lookup_destroy(cg_operation *op)
{
    cachegen_lookup *l = (cachegen_lookup *)op;
    free(l->tokens);
    free(l->keys);
    free(l->chunks);
    free(l->plan);
    free(l);
}

/* Sizes of the levels that this request may load; false: none. */
static bool usable(const cachegen_lookup *l, const cg_chunk_memory_entry *known,
                   cg_controller_chunk *sizes_out)
{
    bool any = false;
    for (uint8_t level = 0; level < CG_N_LEVELS; level++) {
        const bool there = (l->accepted & ~known->bad & known->entry.levels) >> level & 1;
        sizes_out->bytes[level] = there && known->prefix_level[level] <= l->worst_level
                                      ? known->entry.level_bytes[level]
                                      : 0;
        any = any || sizes_out->bytes[level] > 0;
    }
    return any;
}

/* What is known of keys[n_keys], asking the store (with io) where need be. False: something is not
 * known and there is no io. */
static bool resolve(cg_runtime *rt, cachegen_lookup *l, cg_io *io, const cg_key *keys,
                    size_t n_keys, cg_chunk_memory_entry *known_out)
{
    const cachegen *c = l->op.connector;
    size_t n_unknown = 0;
    pthread_mutex_lock(&rt->lock);
    const uint64_t now_ns = cg_now_ns();
    for (size_t i = 0; i < n_keys; i++)
        if (!cg_chunk_memory_find(rt->chunk_memory, &keys[i], l->accepted, now_ns, &known_out[i])) {
            known_out[i].probed = 0; /* stale: marks it for the question below */
            n_unknown++;
        }
    pthread_mutex_unlock(&rt->lock);
    if (n_unknown == 0)
        return true;
    if (io == NULL)
        return false;

    cg_key *unknown = malloc(n_unknown * sizeof *unknown);
    cg_store_entry *entries = calloc(n_unknown, sizeof *entries);
    cg_status status = CG_ERR_NO_MEMORY;
    uint32_t n_errors = 0;
    if (unknown != NULL && entries != NULL) {
        for (size_t i = 0, n = 0; i < n_keys; i++)
            if (known_out[i].probed == 0)
                unknown[n++] = keys[i];
        status = cg_store_lookup(c->store, io, unknown, n_unknown,
                                 c->model.profile != NULL ? &c->model.profile_fingerprint : NULL,
                                 l->accepted, l->deadline_ns, entries, &n_errors);
    }
    pthread_mutex_lock(&rt->lock);
    rt->stats.lookup_errors += n_errors + (status != CG_OK);
    for (size_t i = 0, n = 0; i < n_keys; i++) {
        if (known_out[i].probed != 0)
            continue;
        if (entries != NULL)
            known_out[i].entry = entries[n];
        else
            memset(&known_out[i].entry, 0, sizeof known_out[i].entry);
        /* After errors "not there" may be wrong: only what was seen is remembered. */
        if ((status == CG_OK && n_errors == 0) || known_out[i].entry.levels != 0)
            cg_chunk_memory_put(rt->chunk_memory, &keys[i], l->accepted, &known_out[i].entry,
                                cg_now_ns());
        n++;
    }
    pthread_mutex_unlock(&rt->lock);
    free(unknown);
    free(entries);
    return true;
}

static void append(cachegen_lookup *l, uint32_t first_token, uint32_t n_tokens,
                   const cg_controller_chunk *sizes)
{
    cg_plan_chunk *chunk = &l->chunks[l->n_chunks++];
    chunk->first_token = first_token;
    chunk->sizes = *sizes;
    chunk->sizes.n_tokens = n_tokens;
}

/* Tails that may end the prefix at chunk index: how many, and their keys (may be NULL), the longest
 * first. */
static uint32_t tail_keys(const cachegen_lookup *l, uint32_t index, cg_key *keys_out)
{
    const cg_config *config = l->op.connector->config;
    const uint32_t first_token = index * config->chunk_tokens, left = l->n_tokens - first_token;
    const uint32_t longest = left < config->chunk_tokens ? left : config->chunk_tokens - 1;
    const uint32_t n = longest / config->tail_multiple;
    const cg_key *parent = index > 0 ? &l->keys[index - 1] : &l->root;
    for (uint32_t i = 0; i < n && keys_out != NULL; i++)
        keys_out[i] = cg_key_chunk(parent, &l->extra, l->tokens + first_token,
                                   (n - i) * config->tail_multiple);
    return n;
}

static void take_tail(cachegen_lookup *l, uint32_t index, const cg_chunk_memory_entry *known,
                      uint32_t n_tails)
{
    const cg_config *config = l->op.connector->config;
    cg_controller_chunk sizes;
    for (uint32_t i = 0; i < n_tails; i++)
        if (usable(l, &known[i], &sizes)) {
            append(l, index * config->chunk_tokens, (n_tails - i) * config->tail_multiple, &sizes);
            return;
        }
}

/* Walks the prompt's chunks until a hole. False: an answer is not known and there is no io; call
 * again with one. */
static bool walk(cg_runtime *rt, cachegen_lookup *l, cg_io *io, bool *no_memory_out)
{
    const uint32_t chunk_tokens = l->op.connector->config->chunk_tokens;
    uint32_t batch = FIRST_BATCH;
    bool answered = true;
    cg_key *keys = NULL;
    cg_chunk_memory_entry *known = NULL;
    l->n_chunks = 0;
    l->ended = false;
    for (uint32_t at = l->first_chunk; answered && !l->ended;) {
        const uint32_t n_full = l->n_full - at < batch ? l->n_full - at : batch;
        const bool reaches_end = at + n_full == l->n_full;
        const uint32_t n_tails = reaches_end ? tail_keys(l, l->n_full, NULL) : 0;
        const uint32_t most_tails = chunk_tokens / l->op.connector->config->tail_multiple;
        free(keys);
        free(known);
        keys = malloc((n_full + most_tails + 1) * sizeof *keys);
        known = malloc((n_full + most_tails + 1) * sizeof *known);
        if (keys == NULL || known == NULL) {
            *no_memory_out = true;
            break;
        }
        memcpy(keys, l->keys + at, n_full * sizeof *keys);
        tail_keys(l, l->n_full, reaches_end ? keys + n_full : NULL);
        if (!(answered = resolve(rt, l, io, keys, n_full + n_tails, known)))
            break;
        uint32_t i = 0;
        cg_controller_chunk sizes;
        while (i < n_full && usable(l, &known[i], &sizes)) {
            append(l, (at + i) * chunk_tokens, chunk_tokens, &sizes);
            i++;
        }
        if (i < n_full) { /* a hole before the end: a prompt that ended here may have left a tail */
            const uint32_t n = tail_keys(l, at + i, keys);
            if ((answered = resolve(rt, l, io, keys, n, known)))
                take_tail(l, at + i, known, n);
            l->ended = true;
        } else if (reaches_end) {
            take_tail(l, l->n_full, known + n_full, n_tails);
            l->ended = true;
        }
        at += n_full;
        batch *= BATCH_GROWTH;
    }
    free(keys);
    free(known);
    return answered;
}

/* With the lock held: levels, cut, hit and plan from the chunks that were found. */
static void decide(cg_runtime *rt, cachegen_lookup *l)
{
    const cachegen *c = l->op.connector;
    const uint32_t chunk_tokens = c->config->chunk_tokens;
    const uint64_t now_ns = cg_now_ns(), spent_ns = now_ns - l->op.started_ns;
    uint8_t *levels = malloc(l->n_chunks + (size_t)1);
    cg_controller_chunk *sizes = malloc((l->n_chunks + (size_t)1) * sizeof *sizes);
    cg_plan plan = {.model = c->model.fingerprint,
                    .profile = c->model.profile_fingerprint,
                    .dtype = c->model.geometry.dtype,
                    .worst_level = l->worst_level,
                    .level_plus_1 = l->level_plus_1,
                    .policy = (uint8_t)c->config->policy,
                    .chunk_tokens = chunk_tokens,
                    .first_position = l->first_chunk * chunk_tokens,
                    .started_realtime_ns = l->started_realtime_ns,
                    .extra = l->extra,
                    .chunks = l->chunks};
    if (levels == NULL || sizes == NULL)
        goto done;

    uint32_t stored = l->n_chunks > 0 ? plan.first_position : 0;
    for (uint32_t i = 0; i < l->n_chunks; i++) {
        sizes[i] = l->chunks[i].sizes;
        stored += sizes[i].n_tokens;
    }
    cg_controller_input input = {.policy = (cg_policy)c->config->policy,
                                 .chunks = sizes,
                                 .n_chunks = l->n_chunks,
                                 .budget_ns = l->budget_ns > spent_ns ? l->budget_ns - spent_ns : 0,
                                 .link_bps = cg_estimator_bps(&rt->speeds.link),
                                 .recompute_tokens_per_s = cg_speeds_recompute(&rt->speeds),
                                 .other_tokens = l->n_tokens -
                                                 (stored > l->from_token ? stored : l->from_token)};
    cg_speeds_decode(&rt->speeds, input.decode_ns_per_token);
    const cg_controller_decision decision = cg_controller_decide(&input, levels);
    plan.n_chunks = (uint32_t)decision.n_load;
    plan.budget_ns = l->budget_ns > decision.reserve_ns ? l->budget_ns - decision.reserve_ns : 0;

    for (uint32_t i = 0; i < plan.n_chunks; i++) {
        cg_plan_chunk *chunk = &l->chunks[i];
        chunk->level = levels[i];
        plan.n_tokens += sizes[i].n_tokens;
        l->hit.bytes += sizes[i].bytes[levels[i]];
        if (levels[i] > l->hit.worst_level)
            l->hit.worst_level = levels[i];
    }
    /* The engine computes the last token itself: its logits are what it wants. */
    const uint32_t most = l->n_tokens - 1;
    l->hit.stored_tokens = stored < most ? stored : most;
    l->hit.n_chunks = plan.n_chunks;
    l->hit.predicted_ns = decision.predicted_ns;
    if (plan.n_chunks > 0) {
        plan.hit_tokens =
            plan.first_position + plan.n_tokens < most ? plan.first_position + plan.n_tokens : most;
        if (plan.hit_tokens <= l->from_token) { /* nothing that the engine does not have */
            plan.n_chunks = plan.n_tokens = plan.hit_tokens = 0;
            memset(&l->hit, 0, sizeof l->hit);
        }
    }
    l->hit.hit_tokens = plan.hit_tokens;
    plan.parent = l->first_chunk > 0 ? l->keys[l->first_chunk - 1] : l->root;
    plan.tokens = l->tokens + (plan.n_tokens > 0 ? plan.first_position : 0);
    l->plan_bytes = cg_plan_bytes(&plan);
    if ((l->plan = malloc(l->plan_bytes)) != NULL)
        cg_plan_write(&plan, l->plan);
done:
    free(levels);
    free(sizes);
    if (l->plan == NULL) {
        memset(&l->hit, 0, sizeof l->hit);
        l->plan_bytes = 0;
        rt->stats.lookup_errors++;
    }
}

/* With the lock held. */
static void finish(cg_runtime *rt, cachegen_lookup *l)
{
    decide(rt, l);
    rt->stats.lookups++;
    rt->stats.lookup_hits += l->hit.hit_tokens > l->from_token;
    rt->stats.lookup_ns += cg_now_ns() - l->op.started_ns;
    cg_operation_finish(&l->op);
}

static void *look_up(void *argument)
{
    cg_runtime *rt = argument;
    const cg_io_config io_config = cg_runtime_io_config(rt->connector);
    cg_io *io = NULL;
    cg_operation *op;
    pthread_mutex_lock(&rt->lock);
    while ((op = cg_operation_take(rt, &rt->lookups)) != NULL) {
        cachegen_lookup *l = (cachegen_lookup *)op;
        if (!l->cancelled) {
            pthread_mutex_unlock(&rt->lock);
            bool no_memory = false;
            if (io == NULL && cg_io_new(&io_config, &io) != CG_OK)
                no_memory = true;
            else
                walk(rt, l, io, &no_memory);
            pthread_mutex_lock(&rt->lock);
            rt->stats.lookup_errors += no_memory;
        }
        finish(rt, l);
    }
    pthread_mutex_unlock(&rt->lock);
    cg_io_free(io, 0);
    return NULL;
}

void cg_lookups_cancel(cg_runtime *rt)
{
    for (cg_operation *op = rt->lookups.head; op != NULL; op = op->next)
        ((cachegen_lookup *)op)->cancelled = true;
}

/* Everything that a look-up copies and computes from its request. */
static cg_status fill(cachegen_lookup *l, const cachegen_request *r)
{
    const cg_config *config = l->op.connector->config;
    const uint8_t has_levels = l->op.connector->model.profile != NULL ? 0xf : 1;
    l->n_tokens = r->n_tokens;
    l->worst_level =
        (uint8_t)(r->worst_level_plus_1 > 0 ? r->worst_level_plus_1 - 1 : config->worst_level);
    if (l->worst_level > config->worst_level)
        l->worst_level = (uint8_t)config->worst_level;
    l->level_plus_1 = (uint8_t)(r->level_plus_1 > 0 ? r->level_plus_1 : config->level_plus_1);
    l->accepted = (uint8_t)(has_levels & ((2u << l->worst_level) - 1));
    if (l->level_plus_1 > 0)
        l->accepted &= (uint8_t)(1u << (l->level_plus_1 - 1));
    l->budget_ns =
        r->ttft_budget_ns > 0 ? r->ttft_budget_ns : config->ttft_budget_ms * UINT64_C(1000000);
    l->started_realtime_ns = cg_realtime_ns();
    l->deadline_ns = l->op.started_ns + config->lookup_timeout_ms * UINT64_C(1000000);

    l->n_full = r->n_tokens / config->chunk_tokens;
    l->first_chunk = l->from_token / config->chunk_tokens;
    l->tokens = malloc(r->n_tokens * sizeof *l->tokens);
    l->keys = malloc((l->n_full + (size_t)1) * sizeof *l->keys);
    l->chunks = calloc(l->n_full - l->first_chunk + (size_t)1, sizeof *l->chunks);
    if (l->tokens == NULL || l->keys == NULL || l->chunks == NULL)
        return CG_ERR_NO_MEMORY;
    memcpy(l->tokens, r->tokens, r->n_tokens * sizeof *l->tokens);
    l->root = cg_key_root(&l->op.connector->model.key_fingerprint, r->salt, r->salt_bytes);
    if (r->extra_bytes > 0)
        l->extra = cg_key_of_bytes(r->extra, r->extra_bytes);
    cg_key_chain(&l->root, &l->extra, l->tokens, (size_t)l->n_full * config->chunk_tokens,
                 config->chunk_tokens, l->keys);
    return CG_OK;
}

cachegen_status cachegen_lookup_start(cachegen *connector, const cachegen_request *request,
                                      uint32_t from_token, cachegen_lookup **out)
{
    cachegen_request r;
    if (out == NULL)
        return CG_ERR_INVALID_ARGUMENT;
    *out = NULL;
    if (connector == NULL || !cg_abi_take(request, &r, sizeof r) || r.tokens == NULL ||
        r.n_tokens == 0 || from_token > r.n_tokens || (r.salt == NULL && r.salt_bytes > 0) ||
        (r.extra == NULL && r.extra_bytes > 0) || r.worst_level_plus_1 > CG_N_LEVELS ||
        r.level_plus_1 > CG_N_LEVELS)
        return CG_ERR_INVALID_ARGUMENT;
    cachegen_lookup *l = cg_operation_new(connector, sizeof *l, lookup_destroy);
    cg_status status = CG_ERR_NO_MEMORY;
    bool no_memory = false;
    if (l == NULL)
        goto done;
    cg_runtime *rt = l->op.runtime;
    l->from_token = from_token;
    if ((status = fill(l, &r)) != CG_OK)
        goto done;

    /* What is remembered answers at once, on the caller's thread. */
    const bool known = l->accepted == 0 || walk(rt, l, NULL, &no_memory);
    pthread_mutex_lock(&rt->lock);
    if (!known)
        status = cg_runtime_start(rt, &rt->looker, "cachegen-look", look_up);
    if (status == CG_OK) {
        cg_operation_begin(&l->op);
        if (known)
            finish(rt, l);
        else
            cg_operation_put(&rt->lookups, &l->op);
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
    lookup->cancelled = true;
    cg_operation_unref(&lookup->op); /* not done: the worker frees it */
    pthread_mutex_unlock(&rt->lock);
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
    pthread_mutex_lock(&rt->lock);
    const uint64_t until_ns = cg_now_ns() + connector->config->retry_ms * UINT64_C(1000000);
    for (uint32_t i = 0; i < plan->n_chunks; i++)
        cg_chunk_memory_failed(rt->chunk_memory, &plan->keys[i + 1], 0xf, false, until_ns);
    pthread_mutex_unlock(&rt->lock);
    cg_plan_free(plan);
    return CG_OK;
}
