#include "connector/fetch.h"

#include <stdlib.h>

cg_status cg_fetch_init(cg_fetch *fetch, uint32_t n_chunks)
{
    *fetch =
        (cg_fetch){.n_chunks = n_chunks,
                   .quality = &cg_quality_built_in,
                   .ends_at_ns = UINT64_MAX,
                   .silent_from_ns = UINT64_MAX,
                   .decode_at_ns = UINT64_MAX,
                   .levels = calloc(n_chunks + (size_t)1, sizeof *fetch->levels),
                   .sizes = calloc(n_chunks + (size_t)1, sizeof *fetch->sizes),
                   .chunks = calloc(n_chunks + (size_t)1, sizeof *fetch->chunks),
                   .sensitivities = calloc(n_chunks + (size_t)1, sizeof *fetch->sensitivities)};
    cg_fetch_cut(fetch, 0, n_chunks);
    if (fetch->levels != NULL && fetch->sizes != NULL && fetch->chunks != NULL &&
        fetch->sensitivities != NULL)
        return CG_OK;
    cg_fetch_destroy(fetch);
    return CG_ERR_NO_MEMORY;
}

void cg_fetch_destroy(cg_fetch *fetch)
{
    free(fetch->levels);
    free(fetch->sizes);
    free(fetch->chunks);
    free(fetch->sensitivities);
    fetch->levels = NULL;
    fetch->sizes = NULL;
    fetch->chunks = NULL;
    fetch->sensitivities = NULL;
}

void cg_fetch_cut(cg_fetch *fetch, uint32_t first, uint32_t end)
{
    fetch->first = first;
    fetch->end = fetch->wanted_end = end;
}

static bool can_nest(const cg_controller_chunk *sizes)
{
    /* Levels of one file are starts of each other: a coarser one ends before a finer one. */
    uint64_t before = UINT64_MAX;
    int n = 0;
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++) {
        if (sizes->bytes[level] == 0)
            continue;
        if (sizes->bytes[level] >= before)
            return false;
        before = sizes->bytes[level];
        n++;
    }
    return n >= 2;
}

void cg_fetch_nest(cg_fetch *fetch)
{
    for (uint32_t i = 0; i < fetch->n_chunks; i++)
        fetch->chunks[i].is_nested = can_nest(&fetch->sizes[i]);
}

uint64_t cg_fetch_add_ns(uint64_t a, uint64_t b)
{
    return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

double cg_fetch_left_ns(uint64_t until_ns, uint64_t now_ns)
{
    return until_ns > now_ns ? (double)(until_ns - now_ns) : -(double)(now_ns - until_ns);
}

bool cg_fetch_is_papers(const cg_fetch *fetch)
{
    return fetch->policy == CG_POLICY_PAPER && !fetch->has_fixed_level;
}

bool cg_fetch_is_anytime(const cg_fetch *fetch)
{
    return fetch->policy == CG_POLICY_TTFT_BUDGET && !fetch->has_fixed_level;
}

bool cg_fetch_wants(const cg_fetch *fetch, uint32_t chunk_index)
{
    return !fetch->is_cancelled && chunk_index < fetch->wanted_end;
}

/* Chunks behind a hole may still be under way: they change nothing any more. */
bool cg_fetch_is_settled(const cg_fetch *fetch)
{
    return fetch->is_cancelled || fetch->first + fetch->n_whole >= fetch->wanted_end;
}

uint32_t cg_fetch_first_missing(const cg_fetch *fetch)
{
    uint32_t i = fetch->first;
    for (; i < fetch->end; i++) {
        const cg_fetch_chunk *chunk = &fetch->chunks[i];
        const bool is_there = chunk->state == CG_FETCH_DECODING || chunk->state == CG_FETCH_DONE ||
                              (chunk->state == CG_FETCH_READING &&
                               cg_fetch_level_in(fetch, i, chunk->arrived_bytes) < CG_N_LEVELS);
        if (!is_there)
            break;
    }
    return i;
}

bool cg_fetch_has_all(const cg_fetch *fetch)
{
    return cg_fetch_first_missing(fetch) >= fetch->wanted_end;
}

uint32_t cg_fetch_first_held(const cg_fetch *fetch)
{
    return fetch->bytes_held > 0 ? fetch->first + fetch->n_whole : fetch->wanted_end;
}

bool cg_fetch_is_decodable(const cg_fetch *fetch, uint32_t chunk_index)
{
    const cg_fetch_chunk *chunk = &fetch->chunks[chunk_index];
    return chunk->state == CG_FETCH_READING && cg_fetch_wants(fetch, chunk_index) &&
           cg_fetch_level_in(fetch, chunk_index, chunk->arrived_bytes) < CG_N_LEVELS;
}

void cg_fetch_shorten(cg_fetch *fetch, uint32_t wanted_end)
{
    fetch->wanted_end = wanted_end;
    fetch->todo.is_counted = false;
}

bool cg_fetch_failed(cg_fetch *fetch, uint32_t chunk_index)
{
    fetch->chunks[chunk_index].state = CG_FETCH_FAILED;
    /* Behind a chunk that failed before nothing was wanted any more. */
    if (fetch->is_cancelled || chunk_index >= fetch->wanted_end)
        return false;
    cg_fetch_shorten(fetch, chunk_index);
    return true;
}

uint8_t cg_fetch_floor(const cg_fetch *fetch, uint32_t chunk_index)
{
    return cg_controller_nearest(&fetch->sizes[chunk_index], CG_L3);
}

uint8_t cg_fetch_must_level(const cg_fetch *fetch, uint32_t chunk_index)
{
    const cg_fetch_chunk *chunk = &fetch->chunks[chunk_index];
    if (chunk->state == CG_FETCH_READING && (!chunk->is_nested || chunk->file_level == CG_L0))
        return chunk->file_level;
    return cg_fetch_is_anytime(fetch) ? cg_fetch_floor(fetch, chunk_index)
                                      : fetch->levels[chunk_index];
}

uint8_t cg_fetch_level_in(const cg_fetch *fetch, uint32_t chunk_index, uint64_t n_bytes)
{
    const cg_fetch_chunk *chunk = &fetch->chunks[chunk_index];
    const uint64_t *bytes = fetch->sizes[chunk_index].bytes;
    uint8_t level = chunk->file_level;
    /* From the file's finest level on, the first that ends within what is there. */
    if (chunk->is_nested && level != CG_L0)
        while (level < CG_N_LEVELS && (bytes[level] == 0 || bytes[level] > n_bytes))
            level++;
    else if (bytes[level] > n_bytes)
        level = CG_N_LEVELS; /* a file of one level is of use only whole */
    return n_bytes > 0 ? level : CG_N_LEVELS;
}

uint64_t cg_fetch_file_bytes(const cg_fetch *fetch, uint32_t chunk_index, uint8_t level)
{
    const uint64_t *bytes = fetch->sizes[chunk_index].bytes;
    uint8_t finest = CG_L1;
    if (!fetch->chunks[chunk_index].is_nested || level == CG_L0)
        return bytes[level];
    while (bytes[finest] == 0)
        finest++;
    return bytes[finest];
}

double cg_fetch_kl(const cg_fetch *fetch, uint32_t chunk_index, uint8_t level)
{
    return level < CG_N_LEVELS ? fetch->sensitivities[chunk_index] * fetch->quality->errors[level]
                               : 0;
}
