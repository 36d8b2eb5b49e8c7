#include "connector/save_gather.h"

#include "connector/clock.h"

#include <stdlib.h>

/* How long a rank's heads are waited for before somebody looks whether they still are wanted. */
enum { SLICE_MS = 20 };

static cg_gather *gather_of(const cachegen_save *save)
{
    return atomic_load_explicit(&save->op.connector->gather, memory_order_acquire);
}

/* All chunks, also those that this rank may know to be stored: the one that stores decides. */
static uint32_t list_chunks(const cachegen_save *save, uint32_t first, cg_gather_chunk *chunks)
{
    const uint32_t chunk_tokens = save->op.connector->config->chunk_tokens;
    for (uint32_t i = first; i < save->n_keys; i++) {
        const uint32_t left = save->n_tokens - i * chunk_tokens;
        chunks[i - first] = (cg_gather_chunk){.key = save->keys[i],
                                              .n_tokens = left < chunk_tokens ? left : chunk_tokens,
                                              .prefix_level = save->prefix_level};
    }
    return save->n_keys > first ? save->n_keys - first : 0;
}

static void copy_heads(const cachegen_save *save, const cg_kv_layout *layout, const int64_t *table,
                       uint32_t first_token, uint32_t n_tokens, uint8_t *data)
{
    const cg_geometry *g = &save->op.connector->model.geometry;
    const cg_kv_layout own = cg_kv_layout_own_heads(layout);
    const size_t tile_bytes =
        (size_t)n_tokens * layout->given.n_kv_heads * g->head_dim * layout->element_bytes;
    for (uint32_t plane = 0; plane < CG_N_PLANES; plane++)
        for (uint32_t layer = 0; layer < g->n_layers; layer++) {
            cg_blocks_read(&own, table, layer, plane, first_token, n_tokens, data);
            data += tile_bytes;
        }
}

cg_status cg_save_send_heads(const cachegen_save *save, const cg_kv_layout *layout,
                             const int64_t *table, uint32_t from_token)
{
    const uint32_t chunk_tokens = save->op.connector->config->chunk_tokens,
                   first = (from_token + chunk_tokens - 1) / chunk_tokens;
    cg_gather *gather = gather_of(save);
    cg_gather_part part;
    cg_gather_chunk *chunks = malloc((save->n_keys + (size_t)1) * sizeof *chunks);
    if (chunks == NULL)
        return CG_ERR_NO_MEMORY;
    const uint32_t n = list_chunks(save, first, chunks);
    cg_status status = n > 0 ? cg_gather_begin(gather, chunks, n, &part) : CG_OK;
    for (uint32_t i = 0; i < n && status == CG_OK; i++)
        copy_heads(save, layout, table, (first + i) * chunk_tokens, chunks[i].n_tokens,
                   part.data[i]);
    if (n > 0 && status == CG_OK)
        status = cg_gather_send(gather, &part);
    free(chunks);
    return status;
}

static bool is_wanted(const cachegen_save *save)
{
    cg_runtime *rt = save->op.runtime;
    pthread_mutex_lock(&rt->lock);
    const bool wanted = !save->op.done && !rt->stop; /* ranks end together: nothing more comes */
    pthread_mutex_unlock(&rt->lock);
    return wanted;
}

static cg_status gather_chunk(const cachegen_save *save, const cg_save_chunk *chunk,
                              uint64_t until_ns)
{
    const cg_gather_chunk wanted = {.key = save->keys[chunk->index],
                                    .n_tokens = chunk->n_tokens,
                                    .prefix_level = save->prefix_level};
    cg_status status;
    int timeout_ms = 0; /* what has come counts, however late it is asked for */
    while ((status = cg_gather_take(gather_of(save), &wanted, chunk->raw, timeout_ms)) ==
           CG_ERR_AGAIN) {
        if (timeout_ms > 0 && (cg_now_ns() >= until_ns || !is_wanted(save)))
            return CG_ERR_TIMED_OUT;
        timeout_ms = SLICE_MS;
    }
    return status;
}

cg_status cg_save_gather(cachegen_save *save)
{
    const uint64_t timeout_ns = save->op.connector->config->save_timeout_ms * UINT64_C(1000000);
    cg_status status = CG_OK;
    for (uint32_t i = 0; i < save->n_chunks && status == CG_OK; i++)
        status = gather_chunk(save, &save->chunks[i], save->op.started_ns + timeout_ns);
    if (save->n_keys > 0)
        cg_gather_drop(gather_of(save), &save->keys[save->n_keys - 1]);
    return status;
}
