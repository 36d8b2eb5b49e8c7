/* From a prompt to the chunks that the store has of it: their keys, the questions in batches, and
 * what of the answers the request may use. */
#include "connector/prefix.h"

#include "connector/clock.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* As few chunks are asked for at once; before more, a coarse look says how many are worth it. */
enum { ALL_AT_ONCE = 32, MAX_PROBES = 34 };

cg_status cg_prefix_init(cg_prefix *p, cg_runtime *runtime, const cachegen_request *r,
                         uint32_t from_token)
{
    const cg_config *config = runtime->connector->config;
    /* Rounded down: of the chunk that from_token lies in the engine has a part only. */
    *p = (cg_prefix){.runtime = runtime,
                     .n_tokens = r->n_tokens,
                     .n_full = r->n_tokens / config->chunk_tokens,
                     .first_chunk = from_token / config->chunk_tokens};
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

/* What a look-up opens of a far store stays open for the load that follows. */
typedef struct keeping {
    cg_runtime *runtime;
    const cg_key *keys;
} keeping;

static void keep_file(void *user, size_t index, cg_level level, int file)
{
    const keeping *kept = user;
    const cachegen *c = kept->runtime->connector;
    const cg_reader_name name = {.store = c->root,
                                 .key = kept->keys[index],
                                 .profile = c->model.profile_fingerprint,
                                 .level = level};
    if (!cg_reader_files_put(cg_link_files(kept->runtime->link), &name, file, cg_now_ns()))
        close(file);
}

/* How many files may stay open. */
static size_t keepable(const cg_runtime *rt)
{
    cg_reader_files *files = cg_link_files(rt->link);
    return files != NULL && cg_handle_is_far(rt->connector) ? cg_reader_files_room(files) : 0;
}

/* What is known of keys[n_keys], asking the store (with io) where need be. CG_ERR_AGAIN: something
 * is not known and there is no io. */
static cg_status resolve(cg_prefix *p, cg_io *io, const cg_key *keys, size_t n_keys,
                         cg_chunk_memory_entry *known_out)
{
    cg_runtime *rt = p->runtime;
    const cachegen *c = rt->connector;
    size_t n_unknown = 0;
    pthread_mutex_lock(&rt->lock);
    const uint64_t now_ns = cg_now_ns();
    for (size_t i = 0; i < n_keys; i++)
        if (!cg_chunk_memory_find(rt->chunk_memory, &keys[i], p->accepted, now_ns, &known_out[i])) {
            known_out[i].probed = 0; /* stale: marks it for the question below */
            n_unknown++;
        }
    pthread_mutex_unlock(&rt->lock);
    if (n_unknown == 0)
        return CG_OK;
    if (io == NULL)
        return CG_ERR_AGAIN;

    cg_key *unknown = malloc(n_unknown * sizeof *unknown);
    cg_store_entry *entries = calloc(n_unknown, sizeof *entries);
    cg_status status = CG_ERR_NO_MEMORY;
    uint32_t n_errors = 0;
    if (unknown != NULL && entries != NULL) {
        for (size_t i = 0, n = 0; i < n_keys; i++)
            if (known_out[i].probed == 0)
                unknown[n++] = keys[i];
        keeping kept = {rt, unknown};
        const cg_store_keeper keeper = {keep_file, &kept, keepable(rt)};
        status = cg_store_lookup_open(
            c->store, io, unknown, n_unknown,
            c->model.profile != NULL ? &c->model.profile_fingerprint : NULL, p->accepted,
            p->deadline_ns, keeper.n_most > 0 ? &keeper : NULL, entries, &n_errors);
    }
    /* A queue with a question still under way cannot be asked again: its owner makes another
     * one. */
    p->queue_failed = p->queue_failed || cg_io_n_under_way(io) > 0 ||
                      (status != CG_OK && status != CG_ERR_TIMED_OUT && status != CG_ERR_NO_MEMORY);
    p->timed_out = p->timed_out || status == CG_ERR_TIMED_OUT;
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
            cg_chunk_memory_put(rt->chunk_memory, &keys[i], p->accepted, &known_out[i].entry,
                                cg_now_ns());
        n++;
    }
    pthread_mutex_unlock(&rt->lock);
    free(unknown);
    free(entries);
    return CG_OK; /* errors are misses; the store's are counted above */
}

static void append(cg_prefix *p, uint32_t first_token, uint32_t n_tokens,
                   const cg_controller_chunk *sizes)
{
    cg_plan_chunk *chunk = &p->chunks[p->n_chunks++];
    chunk->first_token = first_token;
    chunk->sizes = *sizes;
    chunk->sizes.n_tokens = n_tokens;
}

/* Tails that may end the prefix at chunk index: how many, and their keys (may be NULL), the longest
 * first. */
static uint32_t tail_keys(const cg_prefix *p, uint32_t index, cg_key *keys_out)
{
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
        if (usable(p, &known[i], &sizes)) {
            append(p, index * config->chunk_tokens, (n_tails - i) * config->tail_multiple, &sizes);
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

/* Asks for some chunks beyond `at`, at distances that double: the prefix ends before the first that
 * is missing. That is one question for each power of two, all at once, in place of one for each
 * chunk of a long prompt of which little is stored. */
static cg_status look_ahead(cg_prefix *p, cg_io *io, uint32_t at, uint32_t *end_out)
{
    cg_runtime *rt = p->runtime;
    uint32_t indices[MAX_PROBES], n = 0, n_errors = 0;
    cg_key keys[MAX_PROBES];
    bool there[MAX_PROBES];
    for (uint64_t distance = 0; at + distance < p->n_full; distance = 2 * distance + 1)
        indices[n++] = at + (uint32_t)distance;
    /* Also the last one, which doubling may pass over. */
    indices[n++] = p->n_full - 1;
    for (uint32_t i = 0; i < n; i++)
        keys[i] = p->keys[indices[i]];
    const cg_status status =
        cg_store_probe(rt->connector->store, io, keys, n, p->deadline_ns, there, &n_errors);
    const bool is_sure = status == CG_OK && n_errors == 0;
    p->timed_out = p->timed_out || status == CG_ERR_TIMED_OUT;
    *end_out = p->n_full;
    pthread_mutex_lock(&rt->lock);
    rt->stats.lookup_errors += n_errors + (status != CG_OK);
    /* From the far end, so that the nearest that is missing is what stays. */
    for (uint32_t i = n; i-- > 0;)
        if (!there[i]) {
            const cg_store_entry none = {0};
            *end_out = indices[i];
            if (is_sure)
                cg_chunk_memory_put(rt->chunk_memory, &keys[i], p->accepted, &none, cg_now_ns());
        }
    pthread_mutex_unlock(&rt->lock);
    return status;
}

/* Chunks [first_chunk, *end_out) are to be asked for: what follows is known to be of no use. */
static cg_status find_end(cg_prefix *p, cg_io *io, uint32_t *end_out)
{
    uint32_t at = p->first_chunk;
    bool is_usable;
    *end_out = p->n_full;
    /* What is remembered needs no question, and may show the end by itself. */
    while (at < p->n_full && is_known(p, &p->keys[at], &is_usable)) {
        if (!is_usable) {
            *end_out = at;
            return CG_OK;
        }
        at++;
    }
    if (p->n_full - at > ALL_AT_ONCE)
        return io != NULL ? look_ahead(p, io, at, end_out) : CG_ERR_AGAIN;
    return CG_OK;
}

cg_status cg_prefix_find(cg_prefix *p, cg_io *io)
{
    const cg_config *config = p->runtime->connector->config;
    const uint32_t chunk_tokens = config->chunk_tokens;
    const uint32_t most_tails = chunk_tokens / config->tail_multiple;
    uint32_t end;
    p->n_chunks = 0;
    cg_status status = find_end(p, io, &end);
    if (status != CG_OK)
        return status;
    /* Tails are asked for together with the chunks that they follow, if it is known which. */
    const uint32_t n_full = end - p->first_chunk, n_tails = tail_keys(p, end, NULL);
    cg_key *keys = malloc((n_full + most_tails + 1) * sizeof *keys);
    cg_chunk_memory_entry *known = malloc((n_full + most_tails + 1) * sizeof *known);
    status = CG_ERR_NO_MEMORY;
    if (keys == NULL || known == NULL)
        goto done;
    memcpy(keys, p->keys + p->first_chunk, n_full * sizeof *keys);
    tail_keys(p, end, keys + n_full);
    if ((status = resolve(p, io, keys, n_full + n_tails, known)) != CG_OK)
        goto done;
    uint32_t i = 0;
    cg_controller_chunk sizes;
    while (i < n_full && usable(p, &known[i], &sizes)) {
        append(p, (p->first_chunk + i) * chunk_tokens, chunk_tokens, &sizes);
        i++;
    }
    if (i == n_full) {
        take_tail(p, end, known + n_full, n_tails);
    } else { /* a hole before the end: a prompt that ended here may have left a tail */
        /* The first answers are used up, so that their memory serves again. */
        const uint32_t n = tail_keys(p, p->first_chunk + i, keys);
        if ((status = resolve(p, io, keys, n, known)) == CG_OK)
            take_tail(p, p->first_chunk + i, known, n);
    }
done:
    free(keys);
    free(known);
    return status;
}
