#include "codec/codec.h"

#include "codec/arena.h"
#include "codec/cursor.h"
#include "codec/lossless.h"
#include "codec/lossy.h"
#include "codec/paper.h"
#include "codec/section_plan.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct piece {
    uint8_t *bytes;
    size_t n_bytes;
} piece;

struct cg_encoder {
    cg_chunk_header header;
    uint32_t *tokens;
    unsigned level_mask; /* CG_NESTED apart */
    const cg_profile *profile;
    cg_lossy_context lossy;
    float *rotation;
    uint32_t n_tasks;
    uint32_t n_sink_tokens;
    /* A task writes only its own pieces. */
    piece *symbols[CG_N_LEVELS]; /* [n_tasks], levels of the mask but L0 */
    piece *sinks;                /* [n_tasks] */
    piece *lossless;             /* [n_layers * 2] */
};

bool cg_encoder_can_nest(const cg_profile *profile, uint8_t level_mask)
{
    const unsigned lossy = (unsigned)level_mask >> CG_L1, lowest = lossy & -lossy;
    return profile != NULL && profile->nests && lossy != 0 && (lossy & (lossy + lowest)) == 0;
}

cg_status cg_encoder_new(const cg_profile *profile, const cg_chunk_header *header,
                         const uint32_t *tokens, uint8_t level_mask, cg_encoder **encoder_out)
{
    *encoder_out = NULL;
    cg_status status = cg_geometry_check(&header->geometry);
    const bool is_nested = (level_mask & CG_NESTED) != 0;
    level_mask &= (uint8_t)~CG_NESTED;
    if (status != CG_OK)
        return status;
    if (is_nested && !cg_encoder_can_nest(profile, level_mask))
        return CG_ERR_INVALID_ARGUMENT;
    if (header->n_tokens == 0 || header->n_tokens > CG_MAX_CHUNK_TOKENS || level_mask == 0 ||
        level_mask >> CG_N_LEVELS != 0 || header->prefix_level >= CG_N_LEVELS ||
        header->first_position > UINT32_MAX - header->n_tokens)
        return CG_ERR_INVALID_ARGUMENT;
    if (((level_mask & 1 << CG_L0) != 0 && header->prefix_level > CG_L0) ||
        ((level_mask & 1 << CG_L1) != 0 && header->prefix_level > CG_L1))
        return CG_ERR_LOSSY_PREFIX;

    cg_encoder *e = calloc(1, sizeof *e);
    if (e == NULL)
        return CG_ERR_NO_MEMORY;
    e->header = *header;
    e->header.level = e->header.coarsest = 0;
    e->level_mask = level_mask;
    e->lossy.is_nested = is_nested;
    if (level_mask >> 1 != 0) {
        e->profile = profile;
        if (profile != NULL)
            e->header.profile = profile->fingerprint;
        if ((status = cg_section_plan_profile_check(profile, &e->header)) != CG_OK) {
            status = status == CG_ERR_CORRUPT ? CG_ERR_INVALID_ARGUMENT : status;
            goto done;
        }
        e->n_sink_tokens = cg_section_plan_n_sinks(profile, &e->header);
    }
    e->n_tasks =
        CG_N_PLANES * (e->profile != NULL ? e->profile->n_groups : header->geometry.n_layers);

    status = CG_ERR_NO_MEMORY;
    e->tokens = malloc(header->n_tokens * sizeof *e->tokens);
    e->lossless = calloc((size_t)header->geometry.n_layers * CG_N_PLANES, sizeof *e->lossless);
    e->sinks = calloc(e->n_tasks, sizeof *e->sinks);
    if (e->tokens == NULL || e->lossless == NULL || e->sinks == NULL)
        goto done;
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++) {
        if ((e->symbols[level] = calloc(e->n_tasks, sizeof *e->symbols[level])) == NULL)
            goto done;
    }
    uint32_t largest = 0;
    memcpy(e->tokens, tokens, header->n_tokens * sizeof *e->tokens);
    for (uint32_t i = 0; i < header->n_tokens; i++)
        largest |= tokens[i];
    e->header.token_bytes = largest >> 24 != 0 ? 4 : largest >> 16 != 0 ? 3 : 2;
    e->header.key = cg_key_chunk(&header->parent, &header->extra, tokens, header->n_tokens);
    if (e->profile != NULL) {
        const size_t n = cg_lossy_rotation_elements(profile, header->n_tokens);
        e->rotation = malloc((2 * n + 1) * sizeof *e->rotation);
        if (e->rotation == NULL)
            goto done;
        cg_lossy_rotation(profile, header->first_position, header->n_tokens, e->rotation,
                          e->rotation + n);
        e->lossy = (cg_lossy_context){.is_nested = is_nested,
                                      .profile = profile,
                                      .kernels = profile->kernels,
                                      .first_position = header->first_position,
                                      .n_tokens = header->n_tokens,
                                      .dtype = header->geometry.dtype,
                                      .cosine = e->rotation,
                                      .sine = e->rotation + n};
    }
    *encoder_out = e;
    e = NULL;
    status = CG_OK;
done:
    cg_encoder_free(e);
    return status;
}

void cg_encoder_free(cg_encoder *e)
{
    if (e == NULL)
        return;
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++) {
        for (uint32_t i = 0; e->symbols[level] != NULL && i < e->n_tasks; i++)
            free(e->symbols[level][i].bytes);
        free(e->symbols[level]);
    }
    for (uint32_t i = 0; e->sinks != NULL && i < e->n_tasks; i++)
        free(e->sinks[i].bytes);
    for (uint32_t i = 0;
         e->lossless != NULL && i < (uint32_t)e->header.geometry.n_layers * CG_N_PLANES; i++)
        free(e->lossless[i].bytes);
    free(e->sinks);
    free(e->lossless);
    free(e->tokens);
    free(e->rotation);
    free(e);
}

uint32_t cg_encoder_n_tasks(const cg_encoder *e)
{
    return e->n_tasks;
}

cg_task_shape cg_encoder_task_shape(const cg_encoder *e, uint32_t task_index)
{
    return cg_section_plan_task(e->profile, &e->header, task_index);
}

size_t cg_encoder_scratch_bytes(const cg_encoder *e)
{
    const cg_chunk_header *h = &e->header;
    const size_t channels = cg_geometry_channels(&h->geometry);
    size_t most = cg_lossless_scratch_bytes(h->geometry.dtype, channels, h->n_tokens);
    for (uint32_t i = 0; e->profile != NULL && i < e->n_tasks; i++) {
        const cg_group *group = &e->profile->groups[i / CG_N_PLANES];
        const size_t lossy =
            cg_lossy_encode_scratch_bytes(e->profile, group, i % CG_N_PLANES, h->n_tokens);
        cg_arena arena = {0};
        (void)cg_arena_take(&arena, (size_t)e->n_sink_tokens * group->n_channels *
                                        cg_dtype_bytes(h->geometry.dtype));
        (void)cg_arena_take(&arena, cg_lossless_scratch_bytes(h->geometry.dtype, group->n_channels,
                                                              e->n_sink_tokens));
        most = lossy > most ? lossy : most;
        most = arena.used_bytes > most ? arena.used_bytes : most;
    }
    return most;
}

static cg_status encode_lossless(unsigned dtype, const void *in, size_t n_columns, size_t n_rows,
                                 void *scratch, piece *out)
{
    const size_t bound_bytes = cg_lossless_bound_bytes(dtype, n_columns, n_rows);
    free(out->bytes);
    out->bytes = malloc(bound_bytes);
    if (out->bytes == NULL)
        return CG_ERR_NO_MEMORY;
    out->n_bytes =
        cg_lossless_encode(dtype, in, n_columns, n_rows, scratch, out->bytes, bound_bytes);
    uint8_t *fitted = realloc(out->bytes, out->n_bytes);
    out->bytes = fitted != NULL ? fitted : out->bytes;
    return CG_OK;
}

static cg_status encode_sinks(cg_encoder *e, const cg_group *group, const uint8_t *in,
                              void *scratch, piece *out)
{
    const cg_geometry *g = &e->header.geometry;
    const size_t row_bytes = cg_geometry_channels(g) * cg_dtype_bytes(g->dtype);
    cg_arena arena = {scratch, 0};
    uint8_t *sinks = cg_arena_take(&arena, (size_t)e->n_sink_tokens * group->n_layers * row_bytes);
    for (uint32_t t = 0; t < e->n_sink_tokens; t++) {
        for (uint32_t layer = 0; layer < group->n_layers; layer++)
            memcpy(sinks + ((size_t)t * group->n_layers + layer) * row_bytes,
                   in + ((size_t)layer * e->header.n_tokens + t) * row_bytes, row_bytes);
    }
    return encode_lossless(g->dtype, sinks, group->n_channels, e->n_sink_tokens,
                           cg_arena_take(&arena, 0), out);
}

cg_status cg_encoder_run(cg_encoder *e, uint32_t task_index, void *scratch, size_t scratch_bytes,
                         const void *in)
{
    const cg_chunk_header *h = &e->header;
    cg_status status = CG_OK;
    if (task_index >= e->n_tasks || scratch_bytes < cg_encoder_scratch_bytes(e) ||
        (uintptr_t)scratch % CG_ARENA_ALIGN != 0)
        return CG_ERR_INVALID_ARGUMENT;
    const cg_task_shape shape = cg_encoder_task_shape(e, task_index);
    if ((e->level_mask & 1 << CG_L0) != 0) {
        const size_t layer_bytes = shape.elements_bytes / shape.n_layers;
        for (uint32_t i = 0; i < shape.n_layers && status == CG_OK; i++)
            status =
                encode_lossless(h->geometry.dtype, (const uint8_t *)in + i * layer_bytes,
                                cg_geometry_channels(&h->geometry), h->n_tokens, scratch,
                                &e->lossless[(shape.first_layer + i) * CG_N_PLANES + shape.plane]);
    }
    if (status != CG_OK || e->profile == NULL)
        return status;
    const cg_group *group = &e->profile->groups[task_index / CG_N_PLANES];
    if (e->n_sink_tokens > 0 &&
        (status = encode_sinks(e, group, in, scratch, &e->sinks[task_index])) != CG_OK)
        return status;
    uint8_t *sections[CG_N_LEVELS] = {0};
    size_t section_bytes[CG_N_LEVELS] = {0};
    status = cg_lossy_encode(&e->lossy, e->level_mask, group, shape.plane, in, scratch, sections,
                             section_bytes);
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++) {
        free(e->symbols[level][task_index].bytes);
        e->symbols[level][task_index] = (piece){sections[level], section_bytes[level]};
    }
    return status;
}

/* Lays the pieces out behind header and table. pieces[n_sections]. */
static cg_status assemble(const cg_chunk_header *header, const cg_section *sections,
                          const piece *pieces, uint8_t **bytes_out, size_t *n_bytes_out)
{
    size_t n_bytes = CG_CHUNK_FIXED_BYTES + (size_t)header->n_sections * CG_CHUNK_SECTION_BYTES;
    size_t at = n_bytes;
    for (uint32_t i = 0; i < header->n_sections; i++)
        n_bytes += pieces[i].n_bytes;
    uint8_t *bytes = malloc(n_bytes);
    if (bytes == NULL)
        return CG_ERR_NO_MEMORY;
    for (uint32_t i = 0; i < header->n_sections; i++) {
        if (pieces[i].n_bytes > 0) /* memcpy's pointer must not be NULL */
            memcpy(bytes + at, pieces[i].bytes, pieces[i].n_bytes);
        at += pieces[i].n_bytes;
    }
    const cg_status status = cg_chunk_finish(header, sections, bytes, n_bytes);
    if (status != CG_OK) {
        free(bytes);
        return status;
    }
    *bytes_out = bytes;
    *n_bytes_out = n_bytes;
    return CG_OK;
}

static const piece *piece_of(const cg_encoder *e, const cg_chunk_header *header,
                             const cg_section *section)
{
    const uint32_t task = section->group * (uint32_t)CG_N_PLANES + section->plane;
    switch (section->kind) {
    case CG_SECTION_LOSSLESS: return &e->lossless[task];
    case CG_SECTION_SINKS: return &e->sinks[task];
    case CG_SECTION_TO_L2: return &e->symbols[CG_L2][task];
    case CG_SECTION_TO_L1: return &e->symbols[CG_L1][task];
    default: return &e->symbols[header->coarsest][task];
    }
}

cg_status cg_encoder_finish(cg_encoder *e, cg_level level, uint8_t **bytes_out, size_t *n_bytes_out)
{
    *bytes_out = NULL;
    if (level < 0 || level >= CG_N_LEVELS || (e->level_mask >> level & 1) == 0)
        return CG_ERR_INVALID_ARGUMENT;
    cg_chunk_header header = e->header;
    const cg_profile *profile = level == CG_L0 ? NULL : e->profile;
    header.level = header.coarsest = (uint8_t)level;
    while (level != CG_L0 && e->lossy.is_nested &&
           (e->level_mask >> (header.coarsest + 1) & 1) != 0)
        header.coarsest++;
    header.n_sections = cg_section_plan_n_sections(profile, &header);
    if (level == CG_L0)
        memset(&header.profile, 0, sizeof header.profile);

    cg_status status = CG_ERR_NO_MEMORY;
    const size_t token_bytes = header.token_bytes, tokens_bytes = header.n_tokens * token_bytes;
    uint8_t *tokens = malloc(tokens_bytes);
    cg_section *sections = calloc(header.n_sections, sizeof *sections);
    piece *pieces = calloc(header.n_sections, sizeof *pieces);
    if (tokens == NULL || sections == NULL || pieces == NULL)
        goto done;
    for (uint32_t i = 0; i < header.n_tokens; i++)
        cg_put_le(tokens + i * token_bytes, token_bytes, e->tokens[i]);
    sections[0] = (cg_section){.kind = CG_SECTION_TOKENS, .bytes = (uint32_t)tokens_bytes};
    pieces[0] = (piece){tokens, tokens_bytes};
    for (uint32_t i = 1; i < header.n_sections; i++) {
        sections[i] = cg_section_plan_row(profile, &header, i);
        pieces[i] = *piece_of(e, &header, &sections[i]);
        if (pieces[i].bytes == NULL || pieces[i].n_bytes > UINT32_MAX) {
            status = CG_ERR_INVALID_ARGUMENT; /* a task has not run, or failed */
            goto done;
        }
        sections[i].bytes = (uint32_t)pieces[i].n_bytes;
    }
    status = assemble(&header, sections, pieces, bytes_out, n_bytes_out);
done:
    free(tokens);
    free(sections);
    free(pieces);
    return status;
}

/* ---- transcoding ---- */

/* Decodes a section's symbols at one level and codes them at another; anchors stay as they are. */
static cg_status transcode_section(const cg_profile *profile, const cg_group *group, unsigned plane,
                                   unsigned from, unsigned to, uint32_t n_tokens,
                                   const uint8_t *src, size_t src_bytes, piece *out)
{
    const cg_level_columns *fine = &group->columns[from - 1][plane],
                           *coarse = &group->columns[to - 1][plane];
    const bool has_anchors = profile->token_transform == CG_TOKENS_ANCHORS;
    const size_t n_anchors = has_anchors ? cg_paper_n_anchors(n_tokens) : 0;
    const size_t n_blocks = has_anchors ? n_tokens - n_anchors : cg_lossy_n_blocks(n_tokens);
    const size_t fine_bytes = cg_lossy_symbols_bytes(fine, n_blocks);
    const size_t coarse_bytes = cg_lossy_symbols_bytes(coarse, n_blocks);
    const size_t anchor_bytes = cg_lossy_symbols_bytes(&group->anchors[plane], n_anchors);
    size_t kept_bytes = 0, used_bytes;
    uint8_t *memory =
        aligned_alloc(CG_ARENA_ALIGN, fine_bytes + coarse_bytes + anchor_bytes + CG_ARENA_ALIGN);
    if (memory == NULL)
        return CG_ERR_NO_MEMORY;
    const cg_symbols in = cg_lossy_lay_symbols(fine, NULL, n_blocks, memory);
    const cg_symbols symbols = cg_lossy_lay_symbols(coarse, NULL, n_blocks, memory + fine_bytes);
    const cg_symbols anchors = cg_lossy_lay_symbols(&group->anchors[plane], NULL, n_anchors,
                                                    memory + fine_bytes + coarse_bytes);
    cg_status status = CG_OK;
    if (has_anchors)
        status = cg_rans_decode(profile->classes, anchors.strips, anchors.n_strips, n_anchors, src,
                                src_bytes, &kept_bytes);
    if (status == CG_OK)
        status = cg_rans_decode(profile->classes, in.strips, in.n_strips, n_blocks,
                                src + kept_bytes, src_bytes - kept_bytes, &used_bytes);
    if (status == CG_OK && used_bytes != src_bytes - kept_bytes)
        status = CG_ERR_CORRUPT;
    if (status == CG_OK) {
        const float ratio = profile->step[from - 1][plane] / profile->step[to - 1][plane];
        for (unsigned f = 0; f < CG_DCT; f++) {
            const size_t n_in = fine->n_active[f], n_out = coarse->n_active[f];
            for (size_t b = 0; b < n_blocks; b++) {
                for (size_t c = 0; c < n_out; c++) {
                    const float q = c < n_in ? (float)in.cells[f][b * n_in + c] * ratio : 0;
                    float rounded = q < 0 ? ceilf(q - 0.5f) : floorf(q + 0.5f);
                    rounded = rounded < 32767.0f ? rounded
                                                 : 32767.0f; /* a NaN, of a hostile ratio, too */
                    symbols.cells[f][b * n_out + c] =
                        (int16_t)(rounded > -32767.0f ? rounded : -32767.0f);
                }
            }
        }
        out->bytes = cg_lossy_code_symbols(profile, &symbols, n_blocks, &out->n_bytes);
        if (has_anchors && out->bytes != NULL)
            out->bytes = cg_paper_join(src, kept_bytes, out->bytes, &out->n_bytes);
        status = out->bytes != NULL ? CG_OK : CG_ERR_NO_MEMORY;
    }
    free(memory);
    return status;
}

/* A copy, its sections checked. */
static cg_status copy_chunk(const cg_chunk *chunk, const cg_section *sections, uint8_t **bytes_out,
                            size_t *n_bytes_out)
{
    for (uint32_t i = 0; i < chunk->header.n_sections; i++) {
        const cg_status status = cg_chunk_section_check(chunk, &sections[i]);
        if (status != CG_OK)
            return status;
    }
    if ((*bytes_out = malloc(chunk->n_bytes)) == NULL)
        return CG_ERR_NO_MEMORY;
    memcpy(*bytes_out, chunk->bytes, chunk->n_bytes);
    *n_bytes_out = chunk->n_bytes;
    return CG_OK;
}

cg_status cg_transcode(const cg_profile *profile, const uint8_t *bytes, size_t n_bytes,
                       cg_level level, uint8_t **bytes_out, size_t *n_bytes_out)
{
    cg_chunk chunk;
    *bytes_out = NULL;
    cg_status status = cg_chunk_open(bytes, n_bytes, &chunk);
    if (status != CG_OK)
        return status;
    if (chunk.header.level == CG_L0 || level <= (cg_level)chunk.header.level ||
        level >= CG_N_LEVELS)
        return CG_ERR_INVALID_ARGUMENT;
    if (chunk.header.coarsest >
        chunk.header.level) { /* what it holds at that level, or at its coarsest */
        const unsigned held =
            level < (cg_level)chunk.header.coarsest ? (unsigned)level : chunk.header.coarsest;
        if ((status = cg_chunk_open(bytes, chunk.header.level_bytes[held], &chunk)) != CG_OK)
            return status;
    }
    cg_chunk_header header = chunk.header;
    if ((status = cg_section_plan_profile_check(profile, &header)) != CG_OK)
        return status;

    cg_section *sections = calloc(header.n_sections, sizeof *sections);
    piece *pieces = calloc(header.n_sections, sizeof *pieces);
    status = CG_ERR_NO_MEMORY;
    if (sections == NULL || pieces == NULL)
        goto done;
    if ((status = cg_section_plan_check(profile, &chunk, sections)) != CG_OK)
        goto done;
    if (header.level == level) {
        status = copy_chunk(&chunk, sections, bytes_out, n_bytes_out);
        goto done;
    }
    for (uint32_t i = 0; i < header.n_sections; i++) {
        const uint8_t *src = bytes + sections[i].offset;
        if ((status = cg_chunk_section_check(&chunk, &sections[i])) != CG_OK)
            goto done;
        if (sections[i].kind == CG_SECTION_SYMBOLS) {
            status = transcode_section(profile, &profile->groups[sections[i].group],
                                       sections[i].plane, header.level, level, header.n_tokens, src,
                                       sections[i].bytes, &pieces[i]);
        } else {
            pieces[i].n_bytes = sections[i].bytes;
            pieces[i].bytes = malloc(sections[i].bytes + (size_t)1);
            status = pieces[i].bytes != NULL ? CG_OK : CG_ERR_NO_MEMORY;
            if (status == CG_OK)
                memcpy(pieces[i].bytes, src, sections[i].bytes);
        }
        if (status != CG_OK)
            goto done;
        sections[i].bytes = (uint32_t)pieces[i].n_bytes;
    }
    header.level = header.coarsest = (uint8_t)level;
    status = assemble(&header, sections, pieces, bytes_out, n_bytes_out);
done:
    for (uint32_t i = 0; pieces != NULL && i < header.n_sections; i++)
        free(pieces[i].bytes);
    free(pieces);
    free(sections);
    return status;
}
