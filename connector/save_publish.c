#include "connector/save_publish.h"

#include "connector/clock.h"
#include "connector/save_encode.h"

#include <stdlib.h>
#include <string.h>

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
    if (replaced != 0)
        cg_reader_files_forget(cg_link_files(rt->link), save->op.connector->root, key, 1);
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

cg_status cg_save_publish_chunk(const cg_save_chunk *chunk, cg_io *io)
{
    cg_status status = CG_OK;
    const bool nested = cg_save_is_nested(chunk);
    for (int level = CG_N_LEVELS - 1; level >= 0 && status == CG_OK;
         level--) { /* the smallest is the first to be of use */
        /* Its name is made together with the finer one's. */
        const bool is_in_finer = nested && level > CG_L1 && (chunk->levels >> (level - 1) & 1) != 0;
        if ((chunk->levels >> level & 1) != 0 && !is_in_finer)
            status = publish_level(chunk, io, (cg_level)level);
    }
    /* Not of lossy levels that could not be made. */
    if (status == CG_OK && chunk->levels >> CG_L1 != 0) {
        cg_runtime *rt = chunk->save->op.runtime;
        pthread_mutex_lock(&rt->lock);
        rt->stats.symbols_saturated += cg_encoder_n_saturated(chunk->encoder);
        pthread_mutex_unlock(&rt->lock);
    }
    return status;
}

cg_status cg_save_publish_context(cachegen_save *save, cg_io *io)
{
    const cachegen *c = save->op.connector;
    const cg_fingerprint *profile = cg_model_profile(&c->model);
    cg_store_entry *entries = calloc(save->n_keys + (size_t)1, sizeof *entries);
    cg_store_link *links = calloc(save->n_keys + (size_t)1, sizeof *links);
    cg_status status = CG_ERR_NO_MEMORY;
    uint32_t n_errors = 0;
    if (entries == NULL || links == NULL)
        goto done;
    status = cg_store_lookup(c->store, io, save->keys, save->n_keys, profile, 0xf, 0, entries,
                             &n_errors);
    /* What cannot be read for a moment may be there: a whole context is not cut short for it. */
    if (status == CG_OK && n_errors > 0)
        status = CG_ERR_IO;
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
                   : CG_OK;
    if (status == CG_ERR_EXISTS) /* another host has the name now; the chunks are stored */
        status = CG_OK;
    /* Chunks that were dropped are counted as that. The writer itself has set is_behind_hole. */
    const bool may_lack = save->is_behind_hole || save->end_token < save->n_tokens;
    if (status == CG_OK && n < save->n_keys && !may_lack)
        status = CG_ERR_NOT_FOUND;
done:
    free(entries);
    free(links);
    return status;
}

cg_status cg_save_publish_model(const cachegen *c, cg_io *io)
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
