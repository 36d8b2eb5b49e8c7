#include "connector/stream.h"

#include <stdlib.h>

cg_status cg_stream_init(cg_stream *stream, uint32_t n_chunks)
{
    *stream = (cg_stream){.n_chunks = n_chunks,
                          .quality = &cg_quality_built_in,
                          .ends_at_ns = UINT64_MAX,
                          .silent_from_ns = UINT64_MAX,
                          .decode_at_ns = UINT64_MAX,
                          .levels = calloc(n_chunks + (size_t)1, sizeof *stream->levels),
                          .sizes = calloc(n_chunks + (size_t)1, sizeof *stream->sizes),
                          .chunks = calloc(n_chunks + (size_t)1, sizeof *stream->chunks)};
    cg_stream_cut(stream, 0, n_chunks);
    if (stream->levels != NULL && stream->sizes != NULL && stream->chunks != NULL)
        return CG_OK;
    cg_stream_destroy(stream);
    return CG_ERR_NO_MEMORY;
}

void cg_stream_destroy(cg_stream *stream)
{
    free(stream->levels);
    free(stream->sizes);
    free(stream->chunks);
    stream->levels = NULL;
    stream->sizes = NULL;
    stream->chunks = NULL;
}

void cg_stream_cut(cg_stream *stream, uint32_t first, uint32_t end)
{
    stream->first = first;
    stream->end = stream->first_failed = end;
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

void cg_stream_nest(cg_stream *stream)
{
    for (uint32_t i = 0; i < stream->n_chunks; i++)
        stream->chunks[i].is_nested = can_nest(&stream->sizes[i]);
}

uint64_t cg_stream_add_ns(uint64_t a, uint64_t b)
{
    return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

double cg_stream_left_ns(uint64_t until_ns, uint64_t now_ns)
{
    return until_ns > now_ns ? (double)(until_ns - now_ns) : -(double)(now_ns - until_ns);
}

bool cg_stream_is_papers(const cg_stream *stream)
{
    return stream->policy == CG_POLICY_PAPER && !stream->has_fixed_level;
}

bool cg_stream_is_anytime(const cg_stream *stream)
{
    return stream->policy == CG_POLICY_TTFT_BUDGET && !stream->has_fixed_level;
}

bool cg_stream_wants(const cg_stream *stream, uint32_t chunk_index)
{
    return !stream->is_cancelled && chunk_index < stream->first_failed;
}

/* Chunks behind a hole may still be under way: they change nothing any more. */
bool cg_stream_is_settled(const cg_stream *stream)
{
    return stream->is_cancelled || stream->first + stream->n_whole >= stream->first_failed;
}

uint32_t cg_stream_first_missing(const cg_stream *stream)
{
    uint32_t i = stream->first;
    for (; i < stream->end; i++) {
        const cg_stream_chunk *chunk = &stream->chunks[i];
        const bool is_there = chunk->state == CG_STREAM_DECODING ||
                              chunk->state == CG_STREAM_DONE ||
                              (chunk->state == CG_STREAM_READING &&
                               cg_stream_level_in(stream, i, chunk->arrived_bytes) < CG_N_LEVELS);
        if (!is_there)
            break;
    }
    return i;
}

bool cg_stream_has_all(const cg_stream *stream)
{
    return cg_stream_first_missing(stream) >= stream->first_failed;
}

bool cg_stream_is_decodable(const cg_stream *stream, uint32_t chunk_index)
{
    const cg_stream_chunk *chunk = &stream->chunks[chunk_index];
    return chunk->state == CG_STREAM_READING && cg_stream_wants(stream, chunk_index) &&
           cg_stream_level_in(stream, chunk_index, chunk->arrived_bytes) < CG_N_LEVELS;
}

bool cg_stream_failed(cg_stream *stream, uint32_t chunk_index)
{
    stream->chunks[chunk_index].state = CG_STREAM_FAILED;
    /* Behind a chunk that failed before nothing was wanted any more. */
    if (stream->is_cancelled || chunk_index >= stream->first_failed)
        return false;
    stream->first_failed = chunk_index;
    return true;
}

uint8_t cg_stream_floor(const cg_stream *stream, uint32_t chunk_index)
{
    return cg_controller_nearest(&stream->sizes[chunk_index], CG_L3);
}

uint8_t cg_stream_must_level(const cg_stream *stream, uint32_t chunk_index)
{
    const cg_stream_chunk *chunk = &stream->chunks[chunk_index];
    if (chunk->state == CG_STREAM_READING && (!chunk->is_nested || chunk->file_level == CG_L0))
        return chunk->file_level;
    return cg_stream_is_anytime(stream) ? cg_stream_floor(stream, chunk_index)
                                        : stream->levels[chunk_index];
}

uint8_t cg_stream_level_in(const cg_stream *stream, uint32_t chunk_index, uint64_t n_bytes)
{
    const cg_stream_chunk *chunk = &stream->chunks[chunk_index];
    const uint64_t *bytes = stream->sizes[chunk_index].bytes;
    uint8_t level = chunk->file_level;
    /* From the file's finest level on, the first that ends within what is there. */
    if (chunk->is_nested && level != CG_L0)
        while (level < CG_N_LEVELS && (bytes[level] == 0 || bytes[level] > n_bytes))
            level++;
    else if (bytes[level] > n_bytes)
        level = CG_N_LEVELS; /* a file of one level is of use only whole */
    return n_bytes > 0 ? level : CG_N_LEVELS;
}

uint64_t cg_stream_file_bytes(const cg_stream *stream, uint32_t chunk_index, uint8_t level)
{
    const uint64_t *bytes = stream->sizes[chunk_index].bytes;
    uint8_t finest = CG_L1;
    if (!stream->chunks[chunk_index].is_nested || level == CG_L0)
        return bytes[level];
    while (bytes[finest] == 0)
        finest++;
    return bytes[finest];
}

double cg_stream_kl(const cg_stream *stream, uint32_t chunk_index, uint8_t level)
{
    uint32_t n_behind = 0;
    for (uint32_t i = chunk_index + 1; i < stream->end; i++)
        n_behind += stream->sizes[i].n_tokens;
    return cg_quality_kl(stream->quality, n_behind, stream->sizes[chunk_index].n_tokens, level);
}
