#include "connector/writer.h"

#include "connector/clock.h"
#include "connector/host_socket.h"
#include "connector/save_encode.h"
#include "connector/save_gather.h"
#include "connector/save_publish.h"
#include "connector/silence.h"

#include <stdlib.h>
#include <string.h>

/* Chunks whose encoding runs on the pool while the one before them is published: enough to keep the
 * pool busy, and few, because each holds its encoder until then. */
enum { ENCODE_AHEAD = 2, LOSSY_LEVELS = 1 << CG_L1 | 1 << CG_L2 | 1 << CG_L3 };

/* Of a context that is published: so many chunks are linked in the time that the store may take for
 * one answer, before it counts as hung. A link is a name, and no data. */
enum { CONTEXT_CHUNKS_AN_ANSWER = 8 };

/* So often at most others that publish a context of the same name are waited for. */
enum { MOST_OTHERS = 64 };

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
    if (!chunk->is_encoded)
        end_step(chunk->save->op.runtime);
    return cg_save_end_encode(chunk);
}

/* What comes now may ask the store n_answers times for something that one answer is allowed
 * save_timeout_ms for. False: the save was given up. */
static bool begin_step(cachegen_save *save, uint32_t n_answers)
{
    cg_runtime *rt = save->op.runtime;
    const uint64_t timeout_ns = cg_ms(save->op.connector->config->save_timeout_ms);
    pthread_mutex_lock(&rt->lock);
    const bool is_wanted = !save->op.done;
    if (is_wanted && rt->step_until_ns == UINT64_MAX) /* else the watcher finds out by itself */
        pthread_cond_signal(&rt->watched);
    if (is_wanted)
        rt->step_until_ns = cg_now_ns() + n_answers * timeout_ns;
    pthread_mutex_unlock(&rt->lock);
    return is_wanted;
}

/* What of a chunk is to be made: not what is there, unless it is damaged or was computed on a worse
 * prefix. Lossy levels that are one file are made anew together, or they would be one no more. */
static void choose_levels(cg_save_chunk *chunk, const cg_store_entry *there, bool has_answered,
                          const cg_chunk_memory_entry *known)
{
    const uint8_t wanted = chunk->levels;
    uint8_t damaged = wanted & (known->damaged | there->damaged);
    uint8_t outdone = wanted & cg_save_outdoes(chunk->save->prefix_level, there);
    const uint8_t file = cg_save_is_nested(chunk) ? wanted & LOSSY_LEVELS : 0;
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

/* A question to the store, waited for while the store is not silent: what it has is not to be
 * encoded again because it is slow to say so. */
typedef struct waiting {
    cachegen_save *save;
    cg_silence silence;
} waiting;

static waiting wait_for(cachegen_save *save)
{
    const uint64_t silence_ns = cg_ms(save->op.connector->config->lookup_timeout_ms);
    return (waiting){save, {.runtime = save->op.runtime, .silence_ns = silence_ns}};
}

static uint64_t until_ns(void *user, uint64_t answered_ns)
{
    waiting *w = user;
    cg_runtime *rt = w->save->op.runtime;
    const uint64_t alive_ns = w->silence.alive_ns;
    pthread_mutex_lock(&rt->lock);
    const uint64_t silent_ns = cg_silence_ns(&w->silence, answered_ns);
    pthread_mutex_unlock(&rt->lock);
    /* A sign of life is as an answer: the step begins anew. (A save that was given up may wait on:
     * until the store is known to be silent or alive, others are refused and not copied.) */
    if (w->silence.alive_ns != alive_ns && !begin_step(w->save, 1))
        return 0;
    return cg_silence_look_ns(&w->silence, silent_ns);
}

/* What the store has of keys[n_keys]; all zero where it does not say, and false: of one at least it
 * did not. Mostly it has nothing of them, and then their folders, one question each, say so. */
static bool ask_what_is_there(cachegen_save *save, cg_io *io, const cg_key *keys, size_t n_keys,
                              cg_store_entry *entries_out)
{
    const cachegen *c = save->op.connector;
    waiting w = wait_for(save);
    const cg_store_patience patience = {until_ns, &w};
    bool *there = calloc(n_keys + 1, sizeof *there);
    uint32_t n_errors = 0;
    cg_status status = there != NULL
                           ? cg_store_probe(c->store, io, keys, n_keys, &patience, there, &n_errors)
                           : CG_ERR_NO_MEMORY;
    bool has_answered = status == CG_OK && n_errors == 0;
    if (status != CG_OK)
        n_keys = 0;
    while (n_keys > 0 && !there[n_keys - 1])
        n_keys--;
    if (n_keys > 0) {
        status =
            cg_store_lookup_open(c->store, io, keys, n_keys, cg_model_profile(&c->model),
                                 (uint8_t)c->store_levels, &patience, NULL, entries_out, &n_errors);
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
        const bool has_answered = ask_what_is_there(save, io, keys, n_chunks, entries);
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
static bool store_has(cachegen_save *save, cg_io *io, const cg_key *key, uint8_t levels,
                      bool *erred_out)
{
    const cachegen *c = save->op.connector;
    cg_store_entry entry;
    uint32_t n_errors = 0;
    waiting w = wait_for(save);
    const cg_status status =
        cg_store_lookup_open(c->store, io, key, 1, cg_model_profile(&c->model), levels,
                             &(cg_store_patience){until_ns, &w}, NULL, &entry, &n_errors);
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

/* Frees what a chunk that was begun still has. */
static void clear_chunk(cg_save_chunk *chunk)
{
    cg_runtime *rt = chunk->save->op.runtime;
    cg_encoder_free(chunk->encoder);
    chunk->encoder = NULL;
    pthread_mutex_lock(&rt->lock);
    cg_save_release_raw(chunk);
    cg_save_release_encoder(chunk);
    cg_save_unlock(rt);
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

/* A chunk or a context of one store; the mounts of a store are several. */
static cg_key lock_name(const cachegen *c, const cg_key *of)
{
    const struct {
        cg_key key;
        uint64_t device, root;
    } what = {*of, c->device, c->root};
    return cg_key_of_bytes(&what, sizeof what);
}

static cg_key chunk_lock_name(const cg_save_chunk *chunk)
{
    return lock_name(chunk->save->op.connector, &chunk->save->keys[chunk->index]);
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
    const cg_key name = chunk_lock_name(chunk);
    end_step(save->op.runtime);
    if (save->wait_until_ns == 0)
        save->wait_until_ns = cg_now_ns() + cg_ms(c->config->save_timeout_ms);
    if (!save->waits_for_nobody &&
        cg_host_lock_wait(&name, save->wait_until_ns, stops, save) != CG_OK)
        save->waits_for_nobody = true;
}

/* Takes the chunk's lock, before it is encoded. False: another engine has it, and this chunk is not
 * the next to be published. Two engines must not wait for each other, so only the next one is
 * waited for. */
static bool lock_chunk(cg_save_chunk *chunk, bool is_next, cg_io *io)
{
    cachegen_save *save = chunk->save;
    const cg_key name = chunk_lock_name(chunk);
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
        cg_save_begin_encode(chunk);
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
    bool lacks_levels = false;
    uint32_t n_begun = 0;
    for (uint32_t i = 0; i < save->n_chunks && status == CG_OK; i++) {
        while (n_begun < save->n_chunks && n_begun < i + 1 + ENCODE_AHEAD &&
               begin_chunk(&save->chunks[n_begun], n_begun == i, io))
            n_begun++;
        cg_save_chunk *chunk = &save->chunks[i];
        status = wait_encoded(chunk);
        if (cg_save_is_exact_left(chunk, status)) {
            /* Without L0 among them the store has that. */
            chunk->levels &= 1u << CG_L0;
            lacks_levels = true;
            status = CG_OK;
        }
        if (status == CG_OK && !begin_step(save, 1))
            status = CG_ERR_TIMED_OUT;
        if (status == CG_OK)
            status = cg_save_publish_chunk(chunk, io);
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
    /* The save goes on as if all were well, and what the engine saves behind it, too. */
    pthread_mutex_lock(&rt->lock);
    rt->stats.save_errors += status == CG_OK && lacks_levels;
    pthread_mutex_unlock(&rt->lock);
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

/* Takes the lock of the save's context: two who publish one name at once would leave a context.json
 * that names files of the other one, or none. False: others have it for too long, and the name
 * stays theirs. Where this host has no locks, or only another user's, it is done without. */
static bool lock_context(cachegen_save *save, int *lock_out)
{
    const cachegen *c = save->op.connector;
    const uint64_t until_ns = cg_now_ns() + cg_ms(c->config->save_timeout_ms);
    char path[CG_TREE_PATH_BYTES];
    if (cg_tree_context_file_path(c->config->model, save->context, "", path, sizeof path) != CG_OK)
        return true;
    const cg_key key = cg_key_of_bytes(path, strlen(path)), name = lock_name(c, &key);
    end_step(save->op.runtime);
    for (int i = 0; i < MOST_OTHERS; i++) {
        if (cg_host_lock_take(&name, lock_out) != CG_ERR_EXISTS)
            return true;
        const cg_status status = cg_host_lock_wait(&name, until_ns, stops, save);
        if (status != CG_OK)
            return status == CG_ERR_PERMISSION;
    }
    /* Nobody needs to be waited for, and yet it is taken: by a child that was forked while its
     * parent had it, and that publishes nothing. */
    return true;
}

/* A context is made of links, several a chunk. */
static cg_status publish_context(cachegen_save *save, cg_io *io)
{
    cg_status status = CG_OK;
    int lock = -1;
    if (lock_context(save, &lock) && begin_step(save, 1 + save->n_keys / CONTEXT_CHUNKS_AN_ANSWER))
        status = cg_save_publish_context(save, io);
    cg_host_lock_release(&lock);
    return status;
}

static cg_status run_save(cachegen_save *save, cg_io *io, bool *model_json_written)
{
    cg_runtime *rt = save->op.runtime;
    cg_status status = CG_OK;
    wait_copied(save);
    /* Whether the save was given up is asked again before each chunk. */
    begin_step(save, 1);
    if (!*model_json_written && (status = cg_save_publish_model(save->op.connector, io)) == CG_OK)
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
    if (save->context != NULL) {
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
        cg_save_unlock(rt);
        pthread_mutex_lock(&rt->lock);
    }
    pthread_mutex_unlock(&rt->lock);
    cg_io_free(io, 0);
    pthread_mutex_lock(&rt->lock);
    cg_runtime_leave(rt);
    return NULL;
}
