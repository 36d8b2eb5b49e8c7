#include "connector/writer.h"

#include "connector/clock.h"
#include "connector/host_socket.h"
#include "connector/save_gather.h"

#include <stdlib.h>
#include <string.h>

/* Chunks whose encoding runs on the pool while the one before them is published: enough to keep the
 * pool busy, and few, because each holds its encoder until then. */
enum { ENCODE_AHEAD = 2, LOSSY_LEVELS = 1 << CG_L1 | 1 << CG_L2 | 1 << CG_L3 };

enum { CONTEXT_CHUNKS_AN_ANSWER = 8 };

static cg_save_chunk *chunk_of(cg_job *job)
{
    return (cg_save_chunk *)((char *)job - offsetof(cg_save_chunk, job));
}

/* A task's elements in the codec's layout: where they lie, or, of both planes, copied to tile, or
 * to the projector's memory, from where a GPU takes them without a further copy. */
static const uint8_t *gather(const cg_save_chunk *chunk, const cg_task_shape *shape,
                             const cg_projector *projector, uint8_t *tile)
{
    const uint32_t n_layers = chunk->save->op.connector->model.geometry.n_layers;
    const size_t layer_bytes = chunk->raw_bytes / CG_N_PLANES / n_layers,
                 plane_bytes = shape->n_layers * layer_bytes;
    const uint8_t *first =
        chunk->raw + ((size_t)shape->plane * n_layers + shape->first_layer) * layer_bytes;
    if (shape->n_planes == 1)
        return first;
    if (projector != NULL && shape->elements_bytes <= projector->memory_bytes)
        tile = projector->memory;
    for (uint32_t i = 0; i < shape->n_planes; i++)
        memcpy(tile + i * plane_bytes, first + i * n_layers * layer_bytes, plane_bytes);
    return tile;
}

/* KV that came off a GPU goes back there for what an encoder multiplies, which is most of its work.
 * NULL: the CPU does that, too. */
static cg_projector *take_projector(const cg_save_chunk *chunk)
{
    const cg_gpu *gpu = chunk->has_copy ? atomic_load(&chunk->save->op.connector->gpu) : NULL;
    return gpu != NULL ? gpu->functions->take_projector(gpu->device) : NULL;
}

/* Gives it back; returns how many tasks the CPU had to make in its place. */
static uint32_t return_projector(const cg_save_chunk *chunk, cg_projector *projector)
{
    cachegen *c = chunk->save->op.connector;
    const cg_gpu *gpu = atomic_load(&c->gpu);
    if (projector == NULL)
        return 0;
    const uint32_t n_failed = projector->n_failed;
    gpu->functions->return_projector(gpu->device, projector);
    if (n_failed > 0)
        cg_handle_check_gpu(c);
    return n_failed;
}

static void fail(cg_save_chunk *chunk, cg_status status)
{
    cg_status before = CG_OK;
    atomic_compare_exchange_strong(&chunk->status, &before, status);
}

/* Nobody wants it any more. */
static bool is_over(cg_save_chunk *chunk)
{
    const bool over = atomic_load(&chunk->save->is_over);
    if (over)
        fail(chunk, CG_ERR_CANCELLED);
    return over;
}

/* Which blocks get finer steps, as far as a layer tells. Before all tasks. */
static void run_weigh(cg_job *job, uint32_t layer, cg_scratch *scratch)
{
    cg_save_chunk *chunk = chunk_of(job);
    const size_t plane_bytes = chunk->raw_bytes / CG_N_PLANES,
                 layer_bytes = plane_bytes / job->n_tasks;
    const uint8_t *k = chunk->raw + layer * layer_bytes;
    if (is_over(chunk))
        return;
    const uint64_t began_ns = cg_now_ns();
    cg_status status = cg_scratch_reserve(scratch, cg_encoder_scratch_bytes(chunk->encoder), 0);
    if (status == CG_OK)
        status = cg_encoder_weigh(chunk->encoder, layer, scratch->codec, scratch->codec_bytes, k,
                                  k + plane_bytes);
    atomic_fetch_add(&chunk->encode_ns, cg_now_ns() - began_ns);
    if (status != CG_OK)
        fail(chunk, status);
}

static void run_encode(cg_job *job, uint32_t task_index, cg_scratch *scratch)
{
    cg_save_chunk *chunk = chunk_of(job);
    if (is_over(chunk))
        return;
    const cg_task_shape shape = cg_encoder_task_shape(chunk->encoder, task_index);
    const uint64_t began_ns = cg_now_ns();
    cg_status status = cg_scratch_reserve(scratch, cg_encoder_scratch_bytes(chunk->encoder),
                                          shape.n_planes > 1 ? shape.elements_bytes : 0);
    cg_projector *projector = status == CG_OK ? take_projector(chunk) : NULL;
    if (status == CG_OK)
        status =
            cg_encoder_run_with(chunk->encoder, task_index, scratch->codec, scratch->codec_bytes,
                                gather(chunk, &shape, projector, scratch->tile), projector);
    atomic_fetch_add(&chunk->n_gpu_failed, return_projector(chunk, projector));
    atomic_fetch_add(&chunk->encode_ns, cg_now_ns() - began_ns);
    if (status != CG_OK)
        fail(chunk, status);
}

/* Without the runtime's lock, which steps of the engine take: who loses the CPU under it at the
 * lowest priority would hold them up for long. */
static void encode_done(cg_job *job)
{
    sem_post(&chunk_of(job)->encoded);
}

static cg_job encode_job(const cg_save_chunk *chunk)
{
    return (cg_job){
        .run = run_encode, .done = encode_done, .n_tasks = cg_encoder_n_tasks(chunk->encoder)};
}

static void weigh_done(cg_job *job)
{
    cg_save_chunk *chunk = chunk_of(job);
    *job = encode_job(chunk);
    cg_status status = atomic_load(&chunk->status);
    if (status == CG_OK)
        status = cg_pool_go_on(chunk->save->op.runtime->encoders, CG_JOB_ENCODE, job);
    if (status != CG_OK) {
        fail(chunk, status);
        encode_done(job);
    }
}

/* Lossy levels that are neighbours go to one nested file, which takes no more than its finest level
 * alone. */
static bool is_nested(const cg_save_chunk *chunk)
{
    const unsigned lossy = (unsigned)chunk->levels >> CG_L1;
    const bool is_one = (lossy & (lossy - 1)) == 0;
    return !is_one && cg_encoder_can_nest(chunk->save->op.connector->model.profile, chunk->levels);
}

/* Gives a chunk to the pool. What fails here is found by wait_encoded(). */
static void begin_encode(cg_save_chunk *chunk)
{
    const cachegen_save *save = chunk->save;
    const cachegen *c = save->op.connector;
    cg_runtime *rt = save->op.runtime;
    cg_chunk_header header = {.geometry = c->model.geometry,
                              .first_position = chunk->first_token,
                              .n_tokens = chunk->n_tokens,
                              .prefix_level = save->prefix_level,
                              .scales = c->model.scales,
                              .model = c->model.fingerprint,
                              .extra = save->extra,
                              .parent =
                                  chunk->index > 0 ? save->keys[chunk->index - 1] : save->root};
    cg_status status = chunk->levels != 0 ? cg_save_take_raw(chunk) : CG_OK;
    bool submitted = false;
    if (chunk->levels != 0 && status == CG_OK) {
        const unsigned mask = chunk->levels | (is_nested(chunk) ? CG_NESTED : 0u) |
                              (c->config->streams == CG_STREAMS_LATENCY ? CG_SHORT_STREAMS : 0u);
        status = cg_encoder_new(c->model.profile, &header, save->tokens + chunk->first_token,
                                (uint8_t)mask, &chunk->encoder);
        if (status == CG_OK) {
            pthread_mutex_lock(&rt->lock);
            rt->stats.chunks_encoded++;
            pthread_mutex_unlock(&rt->lock);
            const uint32_t n_weighings = cg_encoder_n_weighings(chunk->encoder);
            chunk->job =
                n_weighings > 0
                    ? (cg_job){.run = run_weigh, .done = weigh_done, .n_tasks = n_weighings}
                    : encode_job(chunk);
            sem_init(&chunk->encoded, 0, 0);
            status = cg_pool_submit(rt->encoders, CG_JOB_ENCODE, &chunk->job);
            submitted = status == CG_OK;
        }
    }
    if (!submitted) {
        atomic_store(&chunk->status, status);
        chunk->is_encoded = true;
    }
}

/* What comes now asks the store for nothing. */
static void end_step(cg_runtime *rt)
{
    pthread_mutex_lock(&rt->lock);
    rt->step_until_ns = UINT64_MAX;
    pthread_mutex_unlock(&rt->lock);
}

/* Encoding takes as long as the host's CPUs are busy with other things. The store has no part in
 * it. */
static cg_status wait_encoded(cg_save_chunk *chunk)
{
    cg_runtime *rt = chunk->save->op.runtime;
    if (!chunk->is_encoded) {
        end_step(rt);
        while (sem_wait(&chunk->encoded) != 0)
            ; /* a signal */
        sem_destroy(&chunk->encoded);
        chunk->is_encoded = true;
    }
    pthread_mutex_lock(&rt->lock);
    cg_save_release_raw(chunk);
    rt->stats.encode_ns += atomic_exchange(&chunk->encode_ns, 0);
    rt->stats.gpu_errors += atomic_exchange(&chunk->n_gpu_failed, 0);
    pthread_mutex_unlock(&rt->lock);
    return atomic_load(&chunk->status);
}

/* What comes now may ask the store n_answers times for something that one answer is allowed
 * save_timeout_ms for. False: the save was given up. */
static bool begin_step(cachegen_save *save, uint32_t n_answers)
{
    cg_runtime *rt = save->op.runtime;
    const uint64_t timeout_ns = save->op.connector->config->save_timeout_ms * UINT64_C(1000000);
    pthread_mutex_lock(&rt->lock);
    const bool is_wanted = !save->op.done;
    if (is_wanted && rt->step_until_ns == UINT64_MAX) /* else the watcher finds out by itself */
        pthread_cond_signal(&rt->watched);
    if (is_wanted)
        rt->step_until_ns = cg_now_ns() + n_answers * timeout_ns;
    pthread_mutex_unlock(&rt->lock);
    return is_wanted;
}

/* The first publisher wins, but not with a file that a load found to be wrong: that one is
 * replaced. replaced_out: bit n: level n was. */
static cg_status replace_damaged(const cg_save_chunk *chunk, cg_io *io, const uint8_t *bytes,
                                 size_t n_bytes, uint8_t *replaced_out)
{
    const cachegen_save *save = chunk->save;
    cg_runtime *rt = save->op.runtime;
    cg_chunk_memory_entry known;
    *replaced_out = 0;
    pthread_mutex_lock(&rt->lock);
    cg_chunk_memory_find(rt->chunk_memory, &save->keys[chunk->index], 0, cg_now_ns(), &known);
    pthread_mutex_unlock(&rt->lock);
    const uint8_t damaged = known.damaged | chunk->damaged;
    return damaged == 0 ? CG_OK
                        : cg_store_replace(save->op.connector->store, io, bytes, n_bytes, damaged,
                                           replaced_out);
}

/* Publishes a file, or replaces what its names have. replaced_out: as above. */
static cg_status publish_file(const cg_save_chunk *chunk, cg_io *io, unsigned finest,
                              const uint8_t *bytes, size_t n_bytes, bool *existed_out,
                              uint8_t *replaced_out)
{
    const cg_store *store = chunk->save->op.connector->store;
    if ((chunk->outdone >> finest & 1) != 0) {
        *existed_out = true;
        return cg_store_replace(store, io, bytes, n_bytes, chunk->outdone, replaced_out);
    }
    const cg_status status = cg_store_publish(store, io, bytes, n_bytes, existed_out);
    return status == CG_OK ? replace_damaged(chunk, io, bytes, n_bytes, replaced_out) : status;
}

/* The file whose finest level this is. */
static cg_status publish_level(const cg_save_chunk *chunk, cg_io *io, cg_level level)
{
    cachegen_save *save = chunk->save;
    cg_runtime *rt = save->op.runtime;
    const cg_key *key = &save->keys[chunk->index];
    cg_chunk_header header;
    uint8_t *bytes = NULL;
    size_t n_bytes = 0;
    uint8_t replaced = 0;
    bool existed = false;
    cg_status status = cg_encoder_finish(chunk->encoder, level, &bytes, &n_bytes);
    if (status == CG_OK)
        status = cg_chunk_header_parse(bytes, n_bytes, &header);
    if (status == CG_OK)
        status = publish_file(chunk, io, level, bytes, n_bytes, &existed, &replaced);
    free(bytes);
    if (status != CG_OK)
        return status;
    /* Somebody was faster. */
    save->is_shared = save->is_shared || (existed && chunk->outdone == 0 && chunk->damaged == 0);
    pthread_mutex_lock(&rt->lock);
    const uint64_t now_ns = cg_now_ns();
    const bool written = !existed || replaced != 0;
    rt->stats.chunks_existed += !written;
    rt->stats.bytes_written += written ? n_bytes : 0;
    for (unsigned held = level; held <= header.coarsest; held++) {
        if (existed && (replaced >> held & 1) == 0) {
            cg_chunk_memory_exists(rt->chunk_memory, key, (uint8_t)(1u << held));
            continue;
        }
        cg_chunk_memory_saved(rt->chunk_memory, key, (uint8_t)held, header.level_bytes[held],
                              save->prefix_level, now_ns);
        rt->stats.chunks_saved[held]++;
    }
    pthread_mutex_unlock(&rt->lock);
    return CG_OK;
}

static cg_status publish_chunk(const cg_save_chunk *chunk, cg_io *io)
{
    cg_status status = CG_OK;
    const bool nested = is_nested(chunk);
    for (int level = CG_N_LEVELS - 1; level >= 0 && status == CG_OK;
         level--) { /* the smallest is the first to be of use */
        /* Its name is made together with the finer one's. */
        const bool is_in_finer = nested && level > CG_L1 && (chunk->levels >> (level - 1) & 1) != 0;
        if ((chunk->levels >> level & 1) != 0 && !is_in_finer)
            status = publish_level(chunk, io, (cg_level)level);
    }
    if (status == CG_OK && chunk->encoder != NULL) {
        cg_runtime *rt = chunk->save->op.runtime;
        pthread_mutex_lock(&rt->lock);
        rt->stats.symbols_saturated += cg_encoder_n_saturated(chunk->encoder);
        pthread_mutex_unlock(&rt->lock);
    }
    return status;
}

/* What of a chunk is to be made: not what is there, unless it is damaged or was computed on a worse
 * prefix. Lossy levels that are one file are made anew together, or they would be one no more. */
static void choose_levels(cg_save_chunk *chunk, const cg_store_entry *there, bool has_answered,
                          const cg_chunk_memory_entry *known)
{
    const uint8_t wanted = chunk->levels;
    uint8_t damaged = wanted & (known->damaged | there->damaged);
    uint8_t outdone = wanted & cg_save_outdoes(chunk->save->prefix_level, there);
    const uint8_t file = is_nested(chunk) ? wanted & LOSSY_LEVELS : 0;
    if (!has_answered) { /* what an earlier question found still holds */
        damaged |= wanted & chunk->damaged;
        outdone |= wanted & chunk->outdone;
    }
    chunk->damaged = damaged;
    chunk->outdone = outdone;
    if ((outdone & file) != 0)
        chunk->outdone |= file;
    chunk->levels &= (uint8_t) ~(there->levels & ~known->bad);
    chunk->levels |= chunk->outdone | damaged;
    if ((damaged & file) != 0)
        chunk->levels |= file;
}

/* What the store has of keys[n_keys]; all zero where it does not say, and false: of one at least it
 * did not. Mostly it has nothing of them, and then their folders, one question each, say so. */
static bool ask_what_is_there(const cachegen *c, cg_io *io, const cg_key *keys, size_t n_keys,
                              cg_store_entry *entries_out)
{
    const uint64_t until_ns = cg_now_ns() + c->config->lookup_timeout_ms * UINT64_C(1000000);
    bool *there = calloc(n_keys + 1, sizeof *there);
    uint32_t n_errors = 0;
    cg_status status = there != NULL
                           ? cg_store_probe(c->store, io, keys, n_keys, until_ns, there, &n_errors)
                           : CG_ERR_NO_MEMORY;
    bool has_answered = status == CG_OK && n_errors == 0;
    if (status != CG_OK)
        n_keys = 0;
    while (n_keys > 0 && !there[n_keys - 1])
        n_keys--;
    if (n_keys > 0) {
        status = cg_store_lookup(c->store, io, keys, n_keys,
                                 c->model.profile != NULL ? &c->model.profile_fingerprint : NULL,
                                 (uint8_t)c->store_levels, until_ns, entries_out, &n_errors);
        has_answered = has_answered && status == CG_OK && n_errors == 0;
    }
    free(there);
    return has_answered;
}

/* Levels that the store has already of chunks[n_chunks] are not made again. */
static void skip_existing(cachegen_save *save, cg_save_chunk *chunks, uint32_t n_chunks, cg_io *io)
{
    const cachegen *c = save->op.connector;
    cg_key *keys = malloc((n_chunks + (size_t)1) * sizeof *keys);
    cg_store_entry *entries = calloc(n_chunks + (size_t)1, sizeof *entries);
    if (keys != NULL && entries != NULL) {
        for (uint32_t i = 0; i < n_chunks; i++)
            keys[i] = save->keys[chunks[i].index];
        const bool has_answered = ask_what_is_there(c, io, keys, n_chunks, entries);
        pthread_mutex_lock(&save->op.runtime->lock);
        for (uint32_t i = 0; i < n_chunks; i++) {
            cg_save_chunk *chunk = &chunks[i];
            cg_chunk_memory_entry
                known; /* a chunk that failed to load looks present: publishing decides */
            const uint64_t now_ns = cg_now_ns();
            cg_chunk_memory_find(save->op.runtime->chunk_memory, &keys[i], 0, now_ns, &known);
            if (entries[i].levels != 0)
                cg_chunk_memory_put(save->op.runtime->chunk_memory, &keys[i],
                                    (uint8_t)c->store_levels, &entries[i], now_ns);
            choose_levels(chunk, &entries[i], has_answered, &known);
            if (chunk->levels == 0)
                save->op.runtime->stats.chunks_existed++;
        }
        pthread_mutex_unlock(&save->op.runtime->lock);
    }
    free(keys);
    free(entries);
}

/* What look-ups of a chunk's key ask the store for. */
static bool store_has(const cachegen_save *save, cg_io *io, const cg_key *key, uint8_t levels,
                      bool *erred_out)
{
    const cachegen *c = save->op.connector;
    cg_store_entry entry;
    uint32_t n_errors = 0;
    const cg_status status = cg_store_lookup(
        c->store, io, key, 1, c->model.profile != NULL ? &c->model.profile_fingerprint : NULL,
        levels, cg_now_ns() + c->config->lookup_timeout_ms * UINT64_C(1000000), &entry, &n_errors);
    *erred_out = *erred_out || status != CG_OK || n_errors > 0;
    return entry.levels != 0;
}

/* Whether the store has the chunk that this save goes on from, at any level. Look-ups stop at the
 * first hole, so what is saved behind one is never found. Where the store does not say, it has. */
static bool is_reachable(cachegen_save *save, cg_io *io)
{
    cg_runtime *rt = save->op.runtime;
    const uint8_t levels = (uint8_t)save->op.connector->store_levels;
    cg_chunk_memory_entry known;
    bool has_erred = false;
    if (save->n_chunks == 0 || save->chunks[0].index == 0)
        return true;
    const cg_key *before = &save->keys[save->chunks[0].index - 1];
    pthread_mutex_lock(&rt->lock);
    const bool is_known =
        cg_chunk_memory_find(rt->chunk_memory, before, levels, cg_now_ns(), &known);
    pthread_mutex_unlock(&rt->lock);
    if (is_known && (known.entry.levels & ~known.bad) != 0)
        return true;
    return store_has(save, io, before, levels, &has_erred) || has_erred ||
           store_has(save, io, before, 0xf, &has_erred) || has_erred;
}

/* Contexts hold every chunk of the prompt; one that lacks some is published as far as it goes
 * without a hole. */
static cg_status publish_context(cachegen_save *save, cg_io *io)
{
    const cachegen *c = save->op.connector;
    const cg_fingerprint *profile = c->model.profile != NULL ? &c->model.profile_fingerprint : NULL;
    cg_store_entry *entries = calloc(save->n_keys + (size_t)1, sizeof *entries);
    cg_store_link *links = calloc(save->n_keys + (size_t)1, sizeof *links);
    cg_status status = CG_ERR_NO_MEMORY;
    if (entries == NULL || links == NULL)
        goto done;
    status =
        cg_store_lookup(c->store, io, save->keys, save->n_keys, profile, 0xf, 0, entries, NULL);
    if (status != CG_OK)
        goto done;
    uint32_t n = 0;
    while (n < save->n_keys && entries[n].levels != 0) {
        links[n] = (cg_store_link){.key = save->keys[n], .levels = entries[n].levels};
        n++;
    }
    const uint32_t n_tokens = n < save->n_keys ? n * c->config->chunk_tokens : save->n_tokens;
    status = n > 0 ? cg_store_context_publish(c->store, io, save->context, links, n, profile,
                                              save->tokens, n_tokens)
                   : CG_ERR_NOT_FOUND;
    if (status == CG_OK && n < save->n_keys)
        status = CG_ERR_NOT_FOUND;
done:
    free(entries);
    free(links);
    return status;
}

static cg_status write_model_json(const cachegen *c, cg_io *io)
{
    if (c->model.has_json)
        return CG_OK;
    char *text = cg_model_json(&c->model);
    if (text == NULL)
        return CG_ERR_NO_MEMORY;
    const cg_status status = cg_store_publish_model(c->store, io, text, strlen(text));
    free(text);
    return status;
}

/* Frees what a chunk that was begun still has. */
static void clear_chunk(cg_save_chunk *chunk)
{
    cg_runtime *rt = chunk->save->op.runtime;
    cg_encoder_free(chunk->encoder);
    chunk->encoder = NULL;
    pthread_mutex_lock(&rt->lock);
    cg_save_release_raw(chunk);
    cg_save_release_encoder(chunk);
    pthread_mutex_unlock(&rt->lock);
    cg_host_lock_release(&chunk->lock);
}

/* Where there is no other encoder, there is always room for one. */
static bool claim_encoder(cg_save_chunk *chunk)
{
    cg_runtime *rt = chunk->save->op.runtime;
    pthread_mutex_lock(&rt->lock);
    const bool has_room = chunk->levels == 0 || cg_save_claim_encoder(chunk);
    pthread_mutex_unlock(&rt->lock);
    return has_room;
}

/* A chunk of one store; the mounts of a store are several. */
static cg_key lock_name(const cg_save_chunk *chunk)
{
    const cachegen *c = chunk->save->op.connector;
    const struct {
        cg_key key;
        uint64_t device, root;
    } what = {chunk->save->keys[chunk->index], c->device, c->root};
    return cg_key_of_bytes(&what, sizeof what);
}

static bool stops(void *user)
{
    cachegen_save *save = user;
    cg_runtime *rt = save->op.runtime;
    pthread_mutex_lock(&rt->lock);
    const bool does = rt->stop || save->op.done;
    pthread_mutex_unlock(&rt->lock);
    return does;
}

/* Waits for the engine that encodes this chunk now. */
static void wait_for_other(cg_save_chunk *chunk)
{
    cachegen_save *save = chunk->save;
    const cachegen *c = save->op.connector;
    const cg_key name = lock_name(chunk);
    end_step(save->op.runtime);
    if (save->wait_until_ns == 0)
        save->wait_until_ns = cg_now_ns() + c->config->save_timeout_ms * UINT64_C(1000000);
    if (!save->waits_for_nobody &&
        cg_host_lock_wait(&name, save->wait_until_ns, stops, save) != CG_OK)
        save->waits_for_nobody = true;
}

/* Takes the chunk's lock, before it is encoded. False: another engine has it, and this chunk is not
 * the next to be published; so nothing is waited for, that waits for this engine. */
static bool lock_chunk(cg_save_chunk *chunk, bool is_next, cg_io *io)
{
    cachegen_save *save = chunk->save;
    const cg_key name = lock_name(chunk);
    if (chunk->levels == 0)
        return true;
    if (cg_host_lock_take(&name, &chunk->lock) == CG_ERR_EXISTS) {
        save->is_shared = true;
        if (!is_next)
            return false;
        wait_for_other(chunk);
        cg_host_lock_take(&name, &chunk->lock); /* else it is made without */
    }
    if (save->is_shared && begin_step(save, 1))
        skip_existing(save, chunk, 1, io);
    if (chunk->levels == 0)
        cg_host_lock_release(&chunk->lock);
    return true;
}

/* Begins with a chunk. False: not yet. */
static bool begin_chunk(cg_save_chunk *chunk, bool is_next, cg_io *io)
{
    cg_runtime *rt = chunk->save->op.runtime;
    if (!claim_encoder(chunk))
        return false;
    if (lock_chunk(chunk, is_next, io)) {
        begin_encode(chunk);
        return true;
    }
    pthread_mutex_lock(&rt->lock);
    cg_save_release_encoder(chunk);
    pthread_mutex_unlock(&rt->lock);
    return false;
}

static cg_status save_chunks(cachegen_save *save, cg_io *io)
{
    cg_runtime *rt = save->op.runtime;
    cg_status status = CG_OK;
    uint32_t n_begun = 0;
    for (uint32_t i = 0; i < save->n_chunks && status == CG_OK; i++) {
        while (n_begun < save->n_chunks && n_begun < i + 1 + ENCODE_AHEAD &&
               begin_chunk(&save->chunks[n_begun], n_begun == i, io))
            n_begun++;
        cg_save_chunk *chunk = &save->chunks[i];
        status = wait_encoded(chunk);
        if (status == CG_OK && !begin_step(save, 1))
            status = CG_ERR_TIMED_OUT;
        if (status == CG_OK)
            status = publish_chunk(chunk, io);
        clear_chunk(chunk);
        pthread_mutex_lock(&rt->lock);
        /* A save that was given up has told the engine by then how far it came. */
        save->n_saved += status == CG_OK && !save->op.done;
        pthread_mutex_unlock(&rt->lock);
    }
    /* After a failure the rest is given up: nothing that follows a hole in the chain can be
     * found. */
    for (uint32_t i = 0; i < save->n_chunks; i++) {
        if (i < n_begun)
            wait_encoded(&save->chunks[i]);
        clear_chunk(&save->chunks[i]);
    }
    return status;
}

static void wait_copied(const cachegen_save *save)
{
    cg_runtime *rt = save->op.runtime;
    pthread_mutex_lock(&rt->lock);
    while (!save->is_copied)
        pthread_cond_wait(&rt->changed, &rt->lock);
    pthread_mutex_unlock(&rt->lock);
}

/* A GPU that hangs is as a store that does. */
static cg_status take_all_heads(cachegen_save *save)
{
    cg_runtime *rt = save->op.runtime;
    cg_status status = CG_OK;
    begin_step(save, 1);
    for (uint32_t i = 0; i < save->n_chunks && status == CG_OK; i++)
        status = cg_save_take_raw(&save->chunks[i]);
    end_step(rt);
    if (status == CG_OK)
        status = cg_save_gather(save);
    pthread_mutex_lock(&rt->lock);
    save->is_incomplete = status != CG_OK;
    pthread_mutex_unlock(&rt->lock);
    return status;
}

static cg_status run_save(cachegen_save *save, cg_io *io, bool *model_json_written)
{
    cg_runtime *rt = save->op.runtime;
    cg_status status = CG_OK;
    wait_copied(save);
    /* Whether the save was given up is asked again before each chunk. */
    begin_step(save, 1);
    if (!*model_json_written && (status = write_model_json(save->op.connector, io)) == CG_OK)
        *model_json_written = true;
    const bool is_behind_hole = status == CG_OK && !is_reachable(save, io);
    pthread_mutex_lock(&rt->lock);
    save->is_behind_hole = is_behind_hole;
    pthread_mutex_unlock(&rt->lock);
    /* Behind a hole the other ranks' heads may never come. */
    if (save->has_some_heads && status == CG_OK && !is_behind_hole)
        status = take_all_heads(save);
    if (save->has_some_heads)
        cg_save_drop_heads(save);
    if (status == CG_OK && !is_behind_hole) {
        begin_step(save, 1);
        skip_existing(save, save->chunks, save->n_chunks, io);
        status = save_chunks(save, io);
    }
    /* A context is made of links, several a chunk. */
    if (save->context != NULL && begin_step(save, 1 + save->n_keys / CONTEXT_CHUNKS_AN_ANSWER)) {
        const cg_status context_status = publish_context(save, io);
        pthread_mutex_lock(&rt->lock);
        rt->stats.save_errors += status != CG_OK && context_status != CG_OK; /* a second one */
        pthread_mutex_unlock(&rt->lock);
        status = status != CG_OK ? status : context_status;
    }
    return status;
}

void *cg_save_writer(void *argument)
{
    cg_runtime *rt = argument;
    const cg_io_config io_config = cg_runtime_io_config(rt->connector);
    cg_io *io = NULL;
    bool model_json_written = false;
    cg_operation *op;
    pthread_mutex_lock(&rt->lock);
    while ((op = cg_operation_take(rt, &rt->saves)) != NULL) {
        cachegen_save *save = (cachegen_save *)op;
        op->n_refs++; /* it may be given up, and freed by the engine, under the writer */
        rt->saving = op;
        pthread_mutex_unlock(&rt->lock);
        cg_status status = io == NULL ? cg_io_new(&io_config, &io) : CG_OK;
        if (status == CG_OK)
            status = run_save(save, io, &model_json_written);
        else
            wait_copied(save);
        if (io != NULL &&
            cg_io_n_under_way(io) > 0) { /* its queue failed: with a new one, perhaps */
            cg_io_free(io, 0);
            io = NULL;
        }
        pthread_mutex_lock(&rt->lock);
        for (uint32_t i = 0; i < save->n_chunks; i++)
            cg_save_release_raw(&save->chunks[i]);
        rt->saving = NULL;
        rt->step_until_ns = UINT64_MAX;
        rt->writer_is_stuck = false;
        cg_save_finish(save, status);
        cg_operation_unref(op);
    }
    pthread_mutex_unlock(&rt->lock);
    cg_io_free(io, 0);
    pthread_mutex_lock(&rt->lock);
    cg_runtime_leave(rt);
    return NULL;
}
