/* From a prompt to the chunks that the store has of it: their keys, what is asked in which stage,
 * and what of the answers the request may use. */
#include "connector/prefix.h"

#include "connector/clock.h"

#include <stdlib.h>
#include <string.h>

/* As few chunks are asked for at once; before more, a coarse look says how many are worth it. */
enum { ALL_AT_ONCE = 32 };
/* Of a sparse search: as many questions at a time as sshfs answers; how many chunks are asked for,
 * of a prefix of at least so many; and how large a guessed chunk is at least, so that its first
 * half has the header. */
enum { PROBES_AT_ONCE = 10, SAMPLES = 9, LEAST_SPARSE = 64, LEAST_GUESSED_BYTES = 8192 };

cg_status cg_prefix_init(cg_prefix *p, cg_runtime *runtime, const cachegen_request *r,
                         uint32_t from_token)
{
    const cg_config *config = runtime->connector->config;
    /* Rounded down: of the chunk that from_token lies in the engine has a part only. */
    *p = (cg_prefix){.runtime = runtime,
                     .n_tokens = r->n_tokens,
                     .n_full = r->n_tokens / config->chunk_tokens,
                     .first_chunk = from_token / config->chunk_tokens,
                     .stride = 1};
    p->reach = p->first_chunk;
    p->end = p->n_full;
    p->tokens = malloc(r->n_tokens * sizeof *p->tokens);
    p->keys = malloc((p->n_full + (size_t)1) * sizeof *p->keys);
    p->chunks = calloc(p->n_full - p->first_chunk + (size_t)1, sizeof *p->chunks);
    if (p->tokens == NULL || p->keys == NULL || p->chunks == NULL)
        return CG_ERR_NO_MEMORY;
    memcpy(p->tokens, r->tokens, r->n_tokens * sizeof *p->tokens);
    p->root = cg_key_root(&runtime->connector->model.key_fingerprint, r->salt, r->salt_bytes);
    if (r->extra_bytes > 0)
        p->extra = cg_key_of_bytes(r->extra, r->extra_bytes);
    cg_key_chain(&p->root, &p->extra, p->tokens, (size_t)p->n_full * config->chunk_tokens,
                 config->chunk_tokens, p->keys);
    return CG_OK;
}

void cg_prefix_destroy(cg_prefix *p)
{
    free(p->tokens);
    free(p->keys);
    free(p->chunks);
    free(p->wanted);
    free(p->known);
}

/* Sizes of the levels that this request may load; false: none. */
static bool usable(const cg_prefix *p, const cg_chunk_memory_entry *known,
                   cg_controller_chunk *sizes_out)
{
    bool any = false;
    for (uint8_t level = 0; level < CG_N_LEVELS; level++) {
        /* Its provenance counts twice: as a load has found it out, and as its header said. */
        const bool there = (p->accepted & ~known->bad & known->entry.levels) >> level & 1;
        sizes_out->bytes[level] = there && known->prefix_level[level] <= p->worst_level &&
                                          known->entry.prefix_level[level] <= p->worst_level
                                      ? known->entry.level_bytes[level]
                                      : 0;
        any = any || sizes_out->bytes[level] > 0;
    }
    return any;
}

/* Whether a load has found a chunk to be something else than a look-up would guess. */
static bool is_odd(const cg_chunk_memory_entry *known)
{
    uint8_t any = known->bad;
    for (unsigned level = 0; level < CG_N_LEVELS; level++)
        any |= known->prefix_level[level];
    return any != 0;
}

bool cg_prefix_asks(const cg_prefix *p, uint32_t index)
{
    /* Also the last one, and the tails behind it. */
    return p->stage != CG_PREFIX_CHUNKS || index % p->stride == 0 ||
           p->first_chunk + index + 1 >= p->end || is_odd(&p->known[index]);
}

/* Looks up in the runtime's memory what of the wanted chunks is not known yet. False: some that
 * must be asked for are not remembered. */
static bool recall_wanted(cg_prefix *p)
{
    cg_runtime *rt = p->runtime;
    bool all = true;
    pthread_mutex_lock(&rt->lock);
    const uint64_t now_ns = cg_now_ns();
    for (uint32_t i = 0; i < p->n_wanted; i++) {
        cg_chunk_memory_entry *known = &p->known[i];
        if (known->probed != 0)
            continue;
        if (!cg_chunk_memory_find(rt->chunk_memory, &p->wanted[i], p->accepted, now_ns, known)) {
            known->probed = 0; /* stale */
            all = all && !cg_prefix_asks(p, i);
        }
    }
    pthread_mutex_unlock(&rt->lock);
    return all;
}

static void append(cg_prefix *p, uint32_t first_token, uint32_t n_tokens, bool is_guessed,
                   const cg_controller_chunk *sizes)
{
    cg_plan_chunk *chunk = &p->chunks[p->n_chunks++];
    chunk->first_token = first_token;
    chunk->is_guessed = is_guessed;
    chunk->sizes = *sizes;
    chunk->sizes.n_tokens = n_tokens;
}

/* Tails that may end the prefix at chunk index: how many, and their keys (may be NULL), the longest
 * first. */
static uint32_t tail_keys(const cg_prefix *p, uint32_t index, cg_key *keys_out)
{
    if (p->no_tail_at_hole && index < p->n_full)
        return 0;
    const cg_config *config = p->runtime->connector->config;
    const uint32_t first_token = index * config->chunk_tokens, left = p->n_tokens - first_token;
    const uint32_t longest = left < config->chunk_tokens ? left : config->chunk_tokens - 1;
    const uint32_t n = longest / config->tail_multiple;
    const cg_key *parent = index > 0 ? &p->keys[index - 1] : &p->root;
    for (uint32_t i = 0; i < n && keys_out != NULL; i++)
        keys_out[i] = cg_key_chunk(parent, &p->extra, p->tokens + first_token,
                                   (n - i) * config->tail_multiple);
    return n;
}

static void take_tail(cg_prefix *p, uint32_t index, const cg_chunk_memory_entry *known,
                      uint32_t n_tails)
{
    const cg_config *config = p->runtime->connector->config;
    cg_controller_chunk sizes;
    for (uint32_t i = 0; i < n_tails; i++)
        if (known[i].probed != 0 && usable(p, &known[i], &sizes)) {
            append(p, index * config->chunk_tokens, (n_tails - i) * config->tail_multiple, false,
                   &sizes);
            return;
        }
}

/* Whether a chunk is known without asking the store, and then whether it can be loaded. */
static bool is_known(cg_prefix *p, const cg_key *key, bool *usable_out)
{
    cg_runtime *rt = p->runtime;
    cg_chunk_memory_entry known;
    cg_controller_chunk sizes;
    pthread_mutex_lock(&rt->lock);
    const bool found =
        cg_chunk_memory_find(rt->chunk_memory, key, p->accepted, cg_now_ns(), &known);
    pthread_mutex_unlock(&rt->lock);
    *usable_out = found && usable(p, &known, &sizes);
    return found;
}

/* What is remembered needs no question, and may show the end by itself: *is_end_out. Returns the
 * first chunk that is not known, or is of no use. */
static uint32_t known_until(cg_prefix *p, bool *is_end_out)
{
    uint32_t at = p->reach;
    bool is_usable = true;
    *is_end_out = false;
    while (at < p->end && is_known(p, &p->keys[at], &is_usable)) {
        if (!is_usable) {
            *is_end_out = true;
            break;
        }
        at++;
    }
    return at;
}

uint32_t cg_prefix_probes(cg_prefix *p, uint32_t *indices_out)
{
    /* At distances that double: the prefix ends before the first that is missing. That is one
     * question for each power of two, all at once, in place of one for each chunk of a long prompt
     * of which little is stored. */
    uint32_t n = 0;
    if (p->is_sparse) { /* between two that were asked for */
        const uint32_t gap = p->end - p->reach, most = gap < PROBES_AT_ONCE ? gap : PROBES_AT_ONCE;
        for (; n < most; n++)
            indices_out[n] = p->reach + (uint32_t)((uint64_t)gap * n / most);
        return n;
    }
    for (uint64_t distance = 0; p->reach + distance < p->end; distance = 2 * distance + 1)
        indices_out[n++] = p->reach + (uint32_t)distance;
    /* Also the last one, which doubling may pass over. */
    if (indices_out[n - 1] != p->end - 1)
        indices_out[n++] = p->end - 1;
    return n;
}

/* From here on n more are wanted, keys that the caller fills in. */
static void want(cg_prefix *p, cg_prefix_stage stage, uint32_t n)
{
    p->stage = stage;
    p->n_wanted = n;
    for (uint32_t i = 0; i < n; i++)
        p->known[i].probed = 0;
}

/* It is known where the chunks end that are worth asking for. */
static cg_status begin_chunks(cg_prefix *p, uint32_t end)
{
    const cg_config *config = p->runtime->connector->config;
    const uint32_t most_tails = config->chunk_tokens / config->tail_multiple;
    /* Tails are asked for together with the chunks that they follow, if it is known which. */
    const uint32_t n_full = end - p->first_chunk, n_tails = tail_keys(p, end, NULL);
    p->end = end;
    p->wanted = malloc((n_full + most_tails + (size_t)1) * sizeof *p->wanted);
    p->known = malloc((n_full + most_tails + (size_t)1) * sizeof *p->known);
    if (p->wanted == NULL || p->known == NULL) {
        p->stage = CG_PREFIX_DONE;
        return CG_ERR_NO_MEMORY;
    }
    memcpy(p->wanted, p->keys + p->first_chunk, n_full * sizeof *p->wanted);
    tail_keys(p, end, p->wanted + n_full);
    want(p, CG_PREFIX_CHUNKS, n_full + n_tails);
    p->stride = p->is_sparse && n_full >= LEAST_SPARSE ? (n_full + SAMPLES - 1) / SAMPLES : 1;
    return CG_OK;
}

cg_status cg_prefix_reaches(cg_prefix *p, uint32_t reach, uint32_t end, bool is_sparse)
{
    p->is_sparse = is_sparse;
    p->reach = reach;
    p->end = end;
    /* What else is asked for says where all others end. */
    return is_sparse && reach < end ? CG_OK : begin_chunks(p, end);
}

/* Which levels a chunk has, and that it can be guessed from: 0: it cannot. */
static uint8_t levels_to_guess(const cg_controller_chunk *sizes)
{
    uint8_t levels = 0;
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++)
        if (sizes->bytes[level] >= LEAST_GUESSED_BYTES)
            levels |= (uint8_t)(1u << level);
        else if (sizes->bytes[level] > 0)
            return 0;
    return sizes->bytes[CG_L0] > 0 ? 0 : levels;
}

/* Whether others can be guessed from what is known of a wanted chunk. */
static bool is_sample(const cg_prefix *p, uint32_t index)
{
    return p->known[index].probed != 0 && !is_odd(&p->known[index]);
}

/* Whether the chunks that are known are alike, and no other is doubted, so that the others can be
 * guessed. */
static bool can_guess(const cg_prefix *p)
{
    cg_controller_chunk sizes;
    uint8_t levels = 0;
    if (!is_sample(p, 0))
        return false;
    for (uint32_t i = 0; p->first_chunk + i < p->end; i++) {
        const cg_chunk_memory_entry *known = &p->known[i];
        if (known->probed != 0 && !usable(p, known, &sizes))
            break; /* nothing behind it counts */
        if (known->probed == 0 && known->is_doubted)
            return false;
        if (!is_sample(p, i))
            continue;
        const uint8_t here = levels_to_guess(&sizes);
        if (here == 0 || (levels != 0 && levels != here))
            return false;
        levels = here;
    }
    return true;
}

void cg_prefix_doubt(cg_runtime *rt, const cg_plan *plan, uint32_t chunk_index, uint64_t until_ns)
{
    if (!plan->chunks[chunk_index].is_guessed)
        return;
    for (uint32_t i = chunk_index + 1; i < plan->n_chunks; i++)
        if (plan->chunks[i].is_guessed)
            cg_chunk_memory_doubt(rt->chunk_memory, &plan->keys[i + 1], until_ns);
}

/* What is known of a wanted chunk, or is taken to be so; false: it is of no use. sample: of the
 * last one before it. */
static bool take_chunk(const cg_prefix *p, uint32_t index, cg_controller_chunk *sample,
                       cg_controller_chunk *sizes_out)
{
    const bool is_known = p->known[index].probed != 0;
    if (is_known && !usable(p, &p->known[index], sizes_out))
        return false;
    if (!is_known && (p->is_given_up || cg_prefix_asks(p, index)))
        return false;
    if (!is_known)
        *sizes_out = *sample;
    else if (is_sample(p, index))
        *sample = *sizes_out;
    return true;
}

/* What is known of all chunks that were wanted, or as much as there was an answer for. */
static void take_chunks(cg_prefix *p)
{
    const uint32_t chunk_tokens = p->runtime->connector->config->chunk_tokens,
                   n_full = p->end - p->first_chunk;
    cg_controller_chunk sample = {0}, sizes;
    uint32_t i = 0;
    for (; i < n_full && take_chunk(p, i, &sample, &sizes); i++)
        append(p, (p->first_chunk + i) * chunk_tokens, chunk_tokens, p->known[i].probed == 0,
               &sizes);
    p->stage = CG_PREFIX_DONE;
    if (i == n_full) {
        take_tail(p, p->end, p->known + n_full, p->n_wanted - n_full);
    } else if (!p->is_given_up) {
        /* A hole before the end: a prompt that ended here may have left a tail. What was known of
         * chunks is used up, so that its memory serves again. */
        want(p, CG_PREFIX_TAILS, tail_keys(p, p->first_chunk + i, p->wanted));
    }
}

cg_status cg_prefix_recall(cg_prefix *p)
{
    cg_status status;
    if (p->stage == CG_PREFIX_END && !p->is_given_up) {
        bool is_end;
        p->reach = known_until(p, &is_end);
        if (!is_end && p->end - p->reach > (p->is_sparse ? 0 : ALL_AT_ONCE))
            return CG_ERR_AGAIN;
        if ((status = begin_chunks(p, is_end ? p->reach : p->end)) != CG_OK)
            return status;
    }
    if (p->stage == CG_PREFIX_CHUNKS) {
        if (!recall_wanted(p) && !p->is_given_up)
            return CG_ERR_AGAIN;
        if (p->stride > 1 && !can_guess(p)) {
            p->stride = 1;
            if (!recall_wanted(p) && !p->is_given_up)
                return CG_ERR_AGAIN;
        }
        take_chunks(p);
    }
    if (p->stage == CG_PREFIX_TAILS) {
        if (!recall_wanted(p) && !p->is_given_up)
            return CG_ERR_AGAIN;
        take_tail(p, p->first_chunk + p->n_chunks, p->known, p->n_wanted);
    }
    p->stage = CG_PREFIX_DONE;
    return CG_OK;
}

void cg_prefix_give_up(cg_prefix *p)
{
    p->is_given_up = true;
    cg_prefix_recall(p); /* which asks for no memory then */
}
