#include "connector/load_verify.h"

#include <stdlib.h>
#include <string.h>

static cg_status check_tokens(const cg_chunk *parsed, const cg_plan *plan, uint32_t chunk_index)
{
    const cg_chunk_header *h = &parsed->header;
    const cg_plan_chunk *wanted = &plan->chunks[chunk_index];
    if (!cg_key_equal(&h->key, &plan->keys[chunk_index + 1]) ||
        !cg_key_equal(&h->parent, &plan->keys[chunk_index]) ||
        !cg_key_equal(&h->extra, &plan->extra) || h->first_position != wanted->first_token ||
        h->n_tokens != wanted->sizes.n_tokens)
        return CG_ERR_FOREIGN_TOKENS;
    /* The keys agree, but they are hashes: the token ids themselves decide. */
    uint32_t *tokens = malloc(h->n_tokens * sizeof *tokens);
    if (tokens == NULL)
        return CG_ERR_NO_MEMORY;
    cg_status status = cg_chunk_tokens(parsed, tokens);
    if (status == CG_OK &&
        memcmp(tokens, plan->tokens + (wanted->first_token - plan->first_position),
               h->n_tokens * sizeof *tokens) != 0)
        status = CG_ERR_FOREIGN_TOKENS;
    free(tokens);
    return status;
}

cg_status cg_load_verify(const cg_model *model, const cg_plan *plan, uint32_t chunk_index,
                         uint8_t level, const uint8_t *bytes, size_t n_bytes,
                         uint8_t *worst_level_out, cg_chunk *chunk_out)
{
    const cg_chunk_header *h = &chunk_out->header;
    cg_status status = cg_chunk_open(bytes, n_bytes, chunk_out);
    if (status == CG_OK && h->level < level &&
        cg_chunk_holds(h, level)) /* more was read than asked for */
        status = cg_chunk_open(bytes, h->level_bytes[level], chunk_out);
    if (status != CG_OK)
        return status;
    if (memcmp(&h->model, &model->fingerprint, sizeof h->model) != 0 ||
        !cg_geometry_equal(&h->geometry, &model->geometry) || h->cache_scales != model->scales)
        return CG_ERR_FOREIGN_MODEL;
    if (h->level != level)
        return CG_ERR_CORRUPT;
    if (h->level != CG_L0 &&
        memcmp(&h->profile, &model->profile_fingerprint, sizeof h->profile) != 0)
        return CG_ERR_FOREIGN_PROFILE;
    if ((status = check_tokens(chunk_out, plan, chunk_index)) != CG_OK)
        return status;
    *worst_level_out = h->prefix_level > h->level ? h->prefix_level : h->level;
    return *worst_level_out > plan->worst_level ? CG_ERR_LOSSY_PREFIX : CG_OK;
}

cg_status cg_load_decoder_new(const cg_model *model, const cg_chunk *chunk,
                              cg_decoder **decoder_out)
{
    return cg_decoder_new(chunk->header.level == CG_L0 ? NULL : model->profile, chunk->bytes,
                          chunk->n_bytes, decoder_out);
}
