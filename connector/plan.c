#include "connector/plan.h"

#include "codec/cursor.h"
#include "iouring/store.h"

#include <stdlib.h>
#include <string.h>

enum {
    VERSION = 4,
    FIXED_BYTES = 140,
    CHUNK_BYTES = 8 + 8 * CG_N_LEVELS,
    CHECK_BYTES = CG_KEY_BYTES
};
static const uint8_t MAGIC[8] = {'C', 'G', 'P', 'L', 'A', 'N', '\r', '\n'};

size_t cg_plan_bytes(const cg_plan *plan)
{
    return FIXED_BYTES + (size_t)plan->n_chunks * CHUNK_BYTES + (size_t)plan->n_tokens * 4 +
           CHECK_BYTES;
}

static uint8_t *put(uint8_t *at, size_t n_bytes, uint64_t value)
{
    cg_put_le(at, n_bytes, value);
    return at + n_bytes;
}

static uint8_t *put_bytes(uint8_t *at, const uint8_t *bytes)
{
    memcpy(at, bytes, CG_KEY_BYTES);
    return at + CG_KEY_BYTES;
}

void cg_plan_write(const cg_plan *plan, uint8_t *bytes)
{
    uint8_t *at = bytes;
    memcpy(at, MAGIC, sizeof MAGIC);
    at = put(at + sizeof MAGIC, 4, VERSION);
    at = put(at, 4, cg_plan_bytes(plan));
    at = put_bytes(at, plan->model.bytes);
    at = put_bytes(at, plan->profile.bytes);
    at = put(at, 1, plan->dtype);
    at = put(at, 1, plan->worst_level);
    at = put(at, 1, plan->level_plus_1);
    at = put(at, 1, plan->policy);
    at = put(at, 4, plan->chunk_tokens);
    at = put(at, 4, plan->first_position);
    at = put(at, 4, plan->n_tokens);
    at = put(at, 4, plan->hit_tokens);
    at = put(at, 4, plan->prompt_tokens);
    at = put(at, 4, plan->n_chunks);
    at = put(at, 8, plan->started_boot_ns);
    at = put(at, 8, plan->budget_ns);
    at = put_bytes(at, plan->parent.bytes);
    at = put_bytes(at, plan->extra.bytes);
    at = put_bytes(at, plan->clock_id.bytes);
    for (uint32_t i = 0; i < plan->n_chunks; i++) {
        at = put(at, 4, plan->chunks[i].sizes.n_tokens);
        /* The level, the guess and two zeros, as one number. */
        at = put(at, 4, plan->chunks[i].level | (uint64_t)plan->chunks[i].is_guessed << 8);
        for (int level = 0; level < CG_N_LEVELS; level++)
            at = put(at, 8, plan->chunks[i].sizes.bytes[level]);
    }
    for (uint32_t i = 0; i < plan->n_tokens; i++)
        at = put(at, 4, plan->tokens[i]);
    const cg_key check = cg_key_of_bytes(bytes, (size_t)(at - bytes));
    put_bytes(at, check.bytes);
}

cg_key cg_plan_id(const uint8_t *bytes, size_t n_bytes)
{
    cg_key id;
    memcpy(id.bytes, bytes + n_bytes - CHECK_BYTES, CHECK_BYTES);
    return id;
}

static bool read_key(cg_cursor *in, uint8_t *bytes_out)
{
    const uint8_t *bytes;
    if (!cg_cursor_bytes(in, CG_KEY_BYTES, &bytes))
        return false;
    memcpy(bytes_out, bytes, CG_KEY_BYTES);
    return true;
}

static cg_status read_fixed(cg_cursor *in, cg_plan *plan)
{
    if (!read_key(in, plan->model.bytes) || !read_key(in, plan->profile.bytes) ||
        !cg_cursor_u8(in, &plan->dtype) || !cg_cursor_u8(in, &plan->worst_level) ||
        !cg_cursor_u8(in, &plan->level_plus_1) || !cg_cursor_u8(in, &plan->policy) ||
        !cg_cursor_u32(in, &plan->chunk_tokens) || !cg_cursor_u32(in, &plan->first_position) ||
        !cg_cursor_u32(in, &plan->n_tokens) || !cg_cursor_u32(in, &plan->hit_tokens) ||
        !cg_cursor_u32(in, &plan->prompt_tokens) || !cg_cursor_u32(in, &plan->n_chunks) ||
        !cg_cursor_u64(in, &plan->started_boot_ns) || !cg_cursor_u64(in, &plan->budget_ns) ||
        !read_key(in, plan->parent.bytes) || !read_key(in, plan->extra.bytes) ||
        !read_key(in, plan->clock_id.bytes))
        return CG_ERR_TRUNCATED;
    if (cg_dtype_bytes(plan->dtype) == 0 || plan->worst_level >= CG_N_LEVELS ||
        plan->level_plus_1 > CG_N_LEVELS || plan->policy >= CG_N_POLICIES ||
        plan->chunk_tokens == 0 || plan->chunk_tokens > CG_MAX_CHUNK_TOKENS ||
        plan->first_position % plan->chunk_tokens != 0 ||
        plan->n_tokens > UINT32_MAX - plan->first_position ||
        plan->hit_tokens > plan->first_position + plan->n_tokens ||
        plan->prompt_tokens < plan->first_position + plan->n_tokens)
        return CG_ERR_CORRUPT;
    return CG_OK;
}

static cg_status read_chunks(cg_cursor *in, cg_plan *plan)
{
    uint32_t first_token = plan->first_position;
    const uint32_t end_token = plan->first_position + plan->n_tokens;
    for (uint32_t i = 0; i < plan->n_chunks; i++) {
        cg_plan_chunk *chunk = &plan->chunks[i];
        uint32_t level;
        if (!cg_cursor_u32(in, &chunk->sizes.n_tokens) || !cg_cursor_u32(in, &level))
            return CG_ERR_TRUNCATED;
        chunk->is_guessed = (level >> 8 & 1) != 0;
        level &= ~(1u << 8); /* too large for a level where anything else is not zero */
        for (int l = 0; l < CG_N_LEVELS; l++) {
            if (!cg_cursor_u64(in, &chunk->sizes.bytes[l]))
                return CG_ERR_TRUNCATED;
            if (chunk->sizes.bytes[l] > CG_STORE_MOST_CHUNK_BYTES)
                return CG_ERR_CORRUPT;
        }
        /* Only the last chunk may be a tail. */
        const uint32_t n = chunk->sizes.n_tokens;
        if (level >= CG_N_LEVELS || chunk->sizes.bytes[level] == 0 || n == 0 ||
            n > plan->chunk_tokens || n > end_token - first_token ||
            (n < plan->chunk_tokens && i + 1 < plan->n_chunks))
            return CG_ERR_CORRUPT;
        chunk->level = (uint8_t)level;
        chunk->first_token = first_token;
        first_token += n;
    }
    return first_token == end_token ? CG_OK : CG_ERR_CORRUPT;
}

cg_status cg_plan_parse(const uint8_t *bytes, size_t n_bytes, cg_plan **plan_out)
{
    cg_cursor in = {bytes, n_bytes};
    cg_status status = CG_ERR_TRUNCATED;
    const uint8_t *magic, *check_bytes;
    uint32_t version, total;
    size_t chunks_bytes, tokens_bytes, rest;
    *plan_out = NULL;

    cg_plan *plan = calloc(1, sizeof *plan);
    if (plan == NULL)
        return CG_ERR_NO_MEMORY;
    if (!cg_cursor_bytes(&in, sizeof MAGIC, &magic))
        goto done;
    status = CG_ERR_BAD_MAGIC;
    if (memcmp(magic, MAGIC, sizeof MAGIC) != 0)
        goto done;
    status = CG_ERR_TRUNCATED;
    if (!cg_cursor_u32(&in, &version))
        goto done;
    status = CG_ERR_UNSUPPORTED_VERSION;
    if (version != VERSION)
        goto done;
    status = CG_ERR_TRUNCATED;
    /* More bytes than it says are corruption, which is found below. */
    if (!cg_cursor_u32(&in, &total) || n_bytes < total)
        goto done;
    if ((status = read_fixed(&in, plan)) != CG_OK)
        goto done;

    /* The counts are only a claim: they must be what is left, exactly. */
    status = CG_ERR_CORRUPT;
    if (n_bytes != total || !cg_size_mul(plan->n_chunks, CHUNK_BYTES, &chunks_bytes) ||
        !cg_size_mul(plan->n_tokens, 4, &tokens_bytes) ||
        !cg_size_add(chunks_bytes, tokens_bytes, &rest) || !cg_size_add(rest, CHECK_BYTES, &rest) ||
        rest != in.left_bytes)
        goto done;
    /* Finds accidents only: who made the bytes can make their hash. All else is checked as well. */
    const cg_key check = cg_key_of_bytes(bytes, n_bytes - CHECK_BYTES);
    check_bytes = bytes + n_bytes - CHECK_BYTES;
    if (memcmp(check.bytes, check_bytes, CHECK_BYTES) != 0)
        goto done;
    plan->chunks = calloc(plan->n_chunks + (size_t)1, sizeof *plan->chunks);
    plan->tokens = calloc(plan->n_tokens + (size_t)1, sizeof *plan->tokens);
    plan->keys = calloc(plan->n_chunks + (size_t)1, sizeof *plan->keys);
    status = CG_ERR_NO_MEMORY;
    if (plan->chunks == NULL || plan->tokens == NULL || plan->keys == NULL)
        goto done;
    if ((status = read_chunks(&in, plan)) != CG_OK)
        goto done;
    for (uint32_t i = 0; i < plan->n_tokens; i++)
        (void)cg_cursor_u32(&in, &plan->tokens[i]); /* fits: counted above */

    plan->keys[0] = plan->parent; /* read_chunks() saw to it that only the last chunk is shorter */
    cg_key_chain(&plan->parent, &plan->extra, plan->tokens, plan->n_tokens, plan->chunk_tokens,
                 plan->keys + 1);
    *plan_out = plan;
    plan = NULL;
    status = CG_OK;
done:
    cg_plan_free(plan);
    return status;
}

void cg_plan_free(cg_plan *plan)
{
    if (plan == NULL)
        return;
    free(plan->chunks);
    free(plan->keys);
    free(plan->tokens);
    free(plan);
}
