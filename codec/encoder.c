/* Elements to chunk files, at several levels in one pass. Tasks run in any order on any threads;
 * each leaves its coded sections in slots of its own, so there is no lock. A joint matrix takes a
 * part of all layer groups: the task that ends last codes it. cg_encoder_finish() joins the slots
 * of one level into a file, in the order of section_plan.c. */
#include "codec/codec.h"

#include "codec/analysis.h"
#include "codec/arena.h"
#include "codec/block_order.h"
#include "codec/cursor.h"
#include "codec/importance.h"
#include "codec/lossless.h"
#include "codec/preset.h"
#include "codec/section_plan.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

struct cg_encoder {
    cg_chunk_header header;
    uint32_t *tokens;
    const cg_profile *profile; /* NULL when the mask is only L0; so are preset and heads */
    const cg_preset *preset;
    cg_heads heads;
    cg_encoding encoding; /* its mask has L0, too, and never what is not a level */
    cg_block_order order; /* with a profile, as steps */
    cg_piece steps;       /* the section: each block's factor */
    uint32_t n_tasks;
    /* With a joint matrix: whether a task has left its part [n_tasks], and how many have not. */
    bool *has_run;
    atomic_uint n_to_come;
    /* Of a profile with queries: what blocks count to each layer [n_layers][n_blocks], and how many
     * layers have not been weighed. */
    float *counts;
    atomic_uint n_to_weigh;
    uint32_t n_sink_tokens;
    /* A task writes only its own pieces; the joint matrix's are behind those of the tasks. */
    cg_piece *symbols[CG_N_LEVELS];   /* [n_tasks + 1], levels of the mask but L0 */
    cg_piece *sinks;                  /* [n_groups * 2], of the profile */
    uint32_t n_sinks;                 /* pieces of them */
    atomic_uint_fast64_t n_saturated; /* all that tasks share */
    cg_piece *lossless;               /* [n_layers * 2] */
};

bool cg_encoder_can_nest(const cg_profile *profile, uint8_t level_mask)
{
    /* Neighbours are one run of ones. Its lowest one, added, carries through all of it; a one that
     * stays is of another run. */
    const unsigned lossy = (unsigned)level_mask >> CG_L1, lowest = lossy & -lossy;
    return profile != NULL && profile->nests && lossy != 0 && (lossy & (lossy + lowest)) == 0;
}

/* Until somebody sets factors, all blocks have the level's own step. */
static cg_status prepare_steps(cg_encoder *e)
{
    const uint32_t n_blocks = cg_count_blocks(e->header.n_tokens);
    const cg_status status = cg_block_order_init(n_blocks, &e->order);
    if (status != CG_OK)
        return status;
    e->encoding.order = &e->order;
    e->steps = (cg_piece){malloc(n_blocks), n_blocks};
    if (e->steps.bytes == NULL)
        return CG_ERR_NO_MEMORY;
    memset(e->steps.bytes, CG_OWN_STEP_FACTOR, n_blocks);
    return cg_encoder_set_step_factors(e, e->steps.bytes);
}

/* Room for what tasks leave for the joint matrix. */
static cg_status prepare_joint(cg_encoder *e)
{
    atomic_init(&e->n_to_come, e->n_tasks);
    e->has_run = calloc(e->n_tasks, sizeof *e->has_run);
    e->encoding.shared = aligned_alloc(
        CG_ARENA_ALIGN,
        cg_padded(e->preset->shared_bytes(e->profile, e->header.n_tokens), CG_ARENA_ALIGN));
    return e->has_run != NULL && e->encoding.shared != NULL ? CG_OK : CG_ERR_NO_MEMORY;
}

/* Room for what layers tell of the blocks. */
static cg_status prepare_weighing(cg_encoder *e)
{
    const uint32_t n_layers = e->header.geometry.n_layers;
    atomic_init(&e->n_to_weigh, n_layers);
    e->counts = malloc((size_t)n_layers * cg_count_blocks(e->header.n_tokens) * sizeof *e->counts);
    return e->counts != NULL ? CG_OK : CG_ERR_NO_MEMORY;
}

static cg_status check_request(const cg_profile *profile, const cg_chunk_header *header,
                               uint8_t level_mask, bool is_nested)
{
    const cg_status status = cg_geometry_check(&header->geometry);
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
    return CG_OK;
}

/* For lossy levels: the chunk is of this profile's version and bytes. */
static cg_status take_profile(cg_encoder *e, const cg_profile *profile)
{
    e->profile = profile;
    if (profile != NULL) {
        e->header.profile = profile->fingerprint;
        e->header.version = cg_profile_chunk_version(profile);
    }
    const cg_status status = cg_section_plan_profile_check(profile, &e->header);
    if (status == CG_OK)
        e->n_sink_tokens = cg_section_plan_n_sinks(profile, &e->header);
    /* No file is corrupt here: the caller has asked for what the profile does not fit. */
    return status == CG_ERR_CORRUPT ? CG_ERR_INVALID_ARGUMENT : status;
}

/* Of the file that finish() makes of a level. */
static cg_chunk_header header_of_file(const cg_encoder *e, cg_level level)
{
    cg_chunk_header header = e->header;
    header.level = header.coarsest = (uint8_t)level;
    /* All coarser levels of the mask: they are neighbours, and this one's sections refine their
     * symbols. */
    while (level != CG_L0 && e->encoding.is_nested &&
           cg_encoding_has(&e->encoding, header.coarsest + 1))
        header.coarsest++;
    header.n_sections = cg_section_plan_n_sections(level == CG_L0 ? NULL : e->profile, &header);
    if (level == CG_L0) {
        header.version = CG_CHUNK_VERSION_ALIGNED;
        memset(&header.profile, 0, sizeof header.profile);
    }
    return header;
}

/* Nested chunks of a thousand layers may have too many. */
static bool has_too_many_sections(const cg_encoder *e)
{
    for (unsigned level = CG_L0; level < CG_N_LEVELS; level++) {
        if (cg_encoding_has(&e->encoding, level) &&
            header_of_file(e, (cg_level)level).n_sections > CG_CHUNK_MAX_SECTIONS)
            return true;
    }
    return false;
}

/* Room for what the tasks make. */
static cg_status reserve_output(cg_encoder *e)
{
    const cg_chunk_header *h = &e->header;
    e->n_tasks = cg_section_plan_n_tasks(e->profile, h);
    /* Not 0: calloc() of nothing may be NULL. */
    e->n_sinks = e->profile != NULL ? CG_N_PLANES * e->profile->n_groups : 1;
    e->tokens = malloc(h->n_tokens * sizeof *e->tokens);
    e->lossless = calloc((size_t)h->geometry.n_layers * CG_N_PLANES, sizeof *e->lossless);
    e->sinks = calloc(e->n_sinks, sizeof *e->sinks);
    if (e->tokens == NULL || e->lossless == NULL || e->sinks == NULL)
        return CG_ERR_NO_MEMORY;
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++) {
        if ((e->symbols[level] = calloc(e->n_tasks + 1u, sizeof *e->symbols[level])) == NULL)
            return CG_ERR_NO_MEMORY;
    }
    return CG_OK;
}

static void take_tokens(cg_encoder *e, const uint32_t *tokens)
{
    cg_chunk_header *h = &e->header;
    uint32_t largest = 0;
    memcpy(e->tokens, tokens, h->n_tokens * sizeof *e->tokens);
    for (uint32_t i = 0; i < h->n_tokens; i++)
        largest |= tokens[i]; /* has the highest bit of the largest one */
    h->token_bytes = largest >> 24 != 0 ? 4 : largest >> 16 != 0 ? 3 : 2;
    h->key = cg_key_chunk(&h->parent, &h->extra, tokens, h->n_tokens);
}

/* What the preset's tasks share. */
static cg_status prepare_lossy(cg_encoder *e)
{
    const cg_profile *profile = e->profile;
    e->preset = profile->preset;
    cg_status status = cg_analysis_ready(profile);
    if (status == CG_OK)
        status = cg_heads_init(profile, &e->header, &e->heads);
    if (status == CG_OK)
        status = prepare_steps(e);
    if (status == CG_OK && profile->joint != NULL)
        status = prepare_joint(e);
    if (status == CG_OK && profile->n_query_heads > 0)
        status = prepare_weighing(e);
    return status;
}

cg_status cg_encoder_new(const cg_profile *profile, const cg_chunk_header *header,
                         const uint32_t *tokens, uint8_t level_mask, cg_encoder **encoder_out)
{
    const bool is_nested = (level_mask & CG_NESTED) != 0,
               is_short = (level_mask & CG_SHORT_STREAMS) != 0;
    *encoder_out = NULL;
    level_mask &= (uint8_t) ~(CG_NESTED | CG_SHORT_STREAMS);
    cg_status status = check_request(profile, header, level_mask, is_nested);
    if (status != CG_OK)
        return status;
    cg_encoder *e = calloc(1, sizeof *e);
    if (e == NULL)
        return CG_ERR_NO_MEMORY;
    e->header = *header;
    /* The mask says which levels, never the caller's header, in which take_profile() would see a
     * nested file. */
    e->header.level = e->header.coarsest = 0;
    e->encoding = (cg_encoding){.heads = &e->heads,
                                .level_mask = level_mask,
                                .is_nested = is_nested,
                                .stream_percent = is_short ? CG_RANS_SHORT_STREAM_PERCENT
                                                           : CG_RANS_STREAM_PERCENT};
    if (level_mask >> 1 != 0)
        status = take_profile(e, profile);
    if (status == CG_OK && has_too_many_sections(e))
        status = CG_ERR_INVALID_ARGUMENT;
    if (status == CG_OK)
        status = reserve_output(e);
    if (status == CG_OK) {
        take_tokens(e, tokens);
        if (e->profile != NULL)
            status = prepare_lossy(e);
    }
    if (status != CG_OK) {
        cg_encoder_free(e);
        return status;
    }
    *encoder_out = e;
    return CG_OK;
}

void cg_encoder_free(cg_encoder *e)
{
    if (e == NULL)
        return;
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++) {
        for (uint32_t i = 0; e->symbols[level] != NULL && i <= e->n_tasks; i++)
            free(e->symbols[level][i].bytes);
        free(e->symbols[level]);
    }
    for (uint32_t i = 0; e->sinks != NULL && i < e->n_sinks; i++)
        free(e->sinks[i].bytes);
    for (uint32_t i = 0;
         e->lossless != NULL && i < (uint32_t)e->header.geometry.n_layers * CG_N_PLANES; i++)
        free(e->lossless[i].bytes);
    free(e->sinks);
    free(e->lossless);
    free(e->tokens);
    free(e->has_run);
    free(e->counts);
    free(e->encoding.shared);
    free(e->steps.bytes);
    cg_block_order_destroy(&e->order);
    cg_heads_destroy(&e->heads);
    free(e);
}

cg_status cg_encoder_set_step_factors(cg_encoder *e, const uint8_t *factor_index)
{
    if (e->profile == NULL || e->profile->version < CG_PROFILE_VERSION_STEPS)
        return CG_OK;
    if (cg_block_order_sort(e->profile, factor_index, &e->order) != CG_OK)
        return CG_ERR_INVALID_ARGUMENT;
    memmove(e->steps.bytes, factor_index, e->steps.n_bytes); /* they may be these bytes */
    return CG_OK;
}

uint64_t cg_encoder_n_saturated(const cg_encoder *e)
{
    return atomic_load(&e->n_saturated);
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
    /* L0, sinks and lossy levels of a task are coded one after the other, in the same memory. */
    size_t most = cg_lossless_encode_scratch_bytes(channels, h->n_tokens);
    if (e->profile != NULL && e->profile->joint != NULL) {
        const size_t joint =
            e->preset->encode_scratch_bytes(e->profile, e->profile->joint, 0, h->n_tokens);
        most = joint > most ? joint : most;
    }
    if (e->counts != NULL) {
        const size_t weighing = cg_importance_scratch_bytes(e->profile, h->n_tokens);
        most = weighing > most ? weighing : most;
    }
    for (uint32_t i = 0; e->profile != NULL && i < e->n_tasks; i++) {
        const cg_group *group = &e->profile->groups[i / e->profile->n_matrices];
        const size_t lossy = e->preset->encode_scratch_bytes(
            e->profile, group, i % e->profile->n_matrices, h->n_tokens);
        const size_t n_channels = cg_group_plane_channels(e->profile, group);
        cg_arena arena = {0};
        (void)cg_arena_take(&arena, (size_t)e->n_sink_tokens * n_channels *
                                        cg_dtype_bytes(h->geometry.dtype));
        (void)cg_arena_take(&arena, cg_lossless_encode_scratch_bytes(n_channels, e->n_sink_tokens));
        most = lossy > most ? lossy : most;
        most = arena.used_bytes > most ? arena.used_bytes : most;
    }
    return most;
}

uint32_t cg_encoder_n_weighings(const cg_encoder *e)
{
    return e->counts != NULL ? e->header.geometry.n_layers : 0;
}

cg_status cg_encoder_weigh(cg_encoder *e, uint32_t layer, void *scratch, size_t scratch_bytes,
                           const void *k, const void *v)
{
    const uint32_t n_blocks = cg_count_blocks(e->header.n_tokens);
    if (layer >= cg_encoder_n_weighings(e) || scratch_bytes < cg_encoder_scratch_bytes(e) ||
        (uintptr_t)scratch % CG_ARENA_ALIGN != 0)
        return CG_ERR_INVALID_ARGUMENT;
    cg_status status = cg_importance_of_layer(&e->heads, layer, k, v, scratch,
                                              e->counts + (size_t)layer * n_blocks);
    if (status == CG_OK && atomic_fetch_sub(&e->n_to_weigh, 1) == 1) {
        uint8_t factor_index[CG_MAX_CHUNK_TOKENS / CG_BLOCK_TOKENS];
        cg_importance_step_factors(&e->heads, e->counts, factor_index);
        status = cg_encoder_set_step_factors(e, factor_index);
    }
    return status;
}

/* What is coded is known to fit only behind the coding: the bound is taken first, and then given
 * back. */
static cg_status encode_lossless(unsigned dtype, const void *in, size_t n_columns, size_t n_rows,
                                 size_t align, void *scratch, cg_piece *out)
{
    const size_t bound_bytes = cg_lossless_bound_bytes(dtype, n_columns, n_rows);
    /* What an earlier run of the task has left. */
    free(out->bytes);
    out->bytes = malloc(bound_bytes);
    if (out->bytes == NULL)
        return CG_ERR_NO_MEMORY;
    out->n_bytes =
        cg_lossless_encode(dtype, in, n_columns, n_rows, align, scratch, out->bytes, bound_bytes);
    uint8_t *fitted = realloc(out->bytes, out->n_bytes);
    out->bytes = fitted != NULL ? fitted : out->bytes;
    return CG_OK;
}

static cg_status encode_sinks(cg_encoder *e, const cg_group *group, const uint8_t *in,
                              void *scratch, cg_piece *out)
{
    const cg_geometry *g = &e->header.geometry;
    const size_t row_bytes = cg_geometry_channels(g) * cg_dtype_bytes(g->dtype);
    cg_arena arena = {scratch, 0};
    /* As a sinks section has them: [token][layer][head][dim]. */
    uint8_t *sinks = cg_arena_take(&arena, (size_t)e->n_sink_tokens * group->n_layers * row_bytes);
    for (uint32_t t = 0; t < e->n_sink_tokens; t++) {
        for (uint32_t layer = 0; layer < group->n_layers; layer++)
            memcpy(sinks + ((size_t)t * group->n_layers + layer) * row_bytes,
                   in + ((size_t)layer * e->header.n_tokens + t) * row_bytes, row_bytes);
    }
    return encode_lossless(g->dtype, sinks, cg_group_plane_channels(e->profile, group),
                           e->n_sink_tokens, cg_profile_align(e->profile), cg_arena_take(&arena, 0),
                           out);
}

/* Keeps what was made at each level, after an error, too: it is freed with the encoder. */
static void keep_sections(cg_encoder *e, uint32_t slot, const cg_piece sections[CG_N_LEVELS])
{
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++) {
        free(e->symbols[level][slot].bytes); /* what an earlier run has left */
        e->symbols[level][slot] = sections[level];
    }
}

/* Behind a task. The last of all codes the joint matrix, for which each has left its part. Should
 * that fail, it is done again with the task. */
static cg_status end_task(cg_encoder *e, uint32_t task_index, void *scratch,
                          cg_projector *projector)
{
    const bool is_new = !e->has_run[task_index];
    e->has_run[task_index] = true;
    /* Who counts down to 0 is the last; two that looked afterwards could both see it. */
    const unsigned n_to_come =
        is_new ? atomic_fetch_sub(&e->n_to_come, 1) - 1 : atomic_load(&e->n_to_come);
    if (n_to_come > 0)
        return CG_OK;
    cg_piece sections[CG_N_LEVELS] = {0};
    uint64_t n_saturated = 0;
    const cg_status status =
        e->preset->encode_joint(&e->encoding, scratch, projector, sections, &n_saturated);
    atomic_fetch_add(&e->n_saturated, n_saturated);
    keep_sections(e, e->n_tasks, sections);
    return status;
}

cg_status cg_encoder_run(cg_encoder *e, uint32_t task_index, void *scratch, size_t scratch_bytes,
                         const void *in)
{
    return cg_encoder_run_with(e, task_index, scratch, scratch_bytes, in, NULL);
}

cg_status cg_encoder_run_with(cg_encoder *e, uint32_t task_index, void *scratch,
                              size_t scratch_bytes, const void *in, cg_projector *projector)
{
    const cg_chunk_header *h = &e->header;
    cg_status status = CG_OK;
    if (task_index >= e->n_tasks || scratch_bytes < cg_encoder_scratch_bytes(e) ||
        (uintptr_t)scratch % CG_ARENA_ALIGN != 0)
        return CG_ERR_INVALID_ARGUMENT;
    const cg_task_shape shape = cg_encoder_task_shape(e, task_index);
    if (cg_encoding_has(&e->encoding, CG_L0)) {
        const uint32_t n_slices = shape.n_planes * shape.n_layers;
        const size_t layer_bytes = shape.elements_bytes / n_slices;
        /* L0 knows no groups: each layer and plane is a section, of a chunk of version 3 whatever
         * the profile's version is. */
        for (uint32_t i = 0; i < n_slices && status == CG_OK; i++) {
            const uint32_t layer = shape.first_layer + i % shape.n_layers,
                           plane = shape.plane + i / shape.n_layers;
            status =
                encode_lossless(h->geometry.dtype, (const uint8_t *)in + i * layer_bytes,
                                cg_geometry_channels(&h->geometry), h->n_tokens, CG_RANS_ALIGNED,
                                scratch, &e->lossless[layer * CG_N_PLANES + plane]);
        }
    }
    if (status != CG_OK || e->profile == NULL)
        return status;
    const uint32_t group_index = task_index / e->profile->n_matrices;
    const cg_group *group = &e->profile->groups[group_index];
    for (uint32_t i = 0; i < shape.n_planes && e->n_sink_tokens > 0; i++) {
        status = encode_sinks(e, group,
                              (const uint8_t *)in + i * (shape.elements_bytes / shape.n_planes),
                              scratch, &e->sinks[group_index * CG_N_PLANES + shape.plane + i]);
        if (status != CG_OK)
            return status;
    }
    cg_piece sections[CG_N_LEVELS] = {0};
    uint64_t n_saturated = 0;
    status = e->preset->encode(&e->encoding, group, shape.plane, in, scratch, projector, sections,
                               &n_saturated);
    atomic_fetch_add(&e->n_saturated, n_saturated);
    keep_sections(e, task_index, sections);
    return status == CG_OK && e->profile->joint != NULL
               ? end_task(e, task_index, scratch, projector)
               : status;
}

/* Where a section of a file was left, mostly by its task. A file that is not nested has its whole
 * matrix at its own level, which is then the coarsest, too. */
static const cg_piece *piece_of(const cg_encoder *e, const cg_chunk_header *header,
                                const cg_section *section)
{
    const uint32_t by_plane = section->group * (uint32_t)CG_N_PLANES + section->plane;
    const uint32_t task = section->group * cg_section_plan_n_matrices(e->profile) + section->plane;
    switch (section->kind) {
    case CG_SECTION_LOSSLESS: return &e->lossless[by_plane];
    case CG_SECTION_SINKS: return &e->sinks[by_plane];
    case CG_SECTION_TO_L2: return &e->symbols[CG_L2][task];
    case CG_SECTION_TO_L1: return &e->symbols[CG_L1][task];
    case CG_SECTION_STEPS: return &e->steps;
    case CG_SECTION_JOINT: return &e->symbols[header->coarsest][e->n_tasks];
    case CG_SECTION_JOINT_TO_L2: return &e->symbols[CG_L2][e->n_tasks];
    case CG_SECTION_JOINT_TO_L1: return &e->symbols[CG_L1][e->n_tasks];
    default: return &e->symbols[header->coarsest][task];
    }
}

cg_status cg_encoder_finish(cg_encoder *e, cg_level level, uint8_t **bytes_out, size_t *n_bytes_out)
{
    *bytes_out = NULL;
    if (level < 0 || level >= CG_N_LEVELS || !cg_encoding_has(&e->encoding, level))
        return CG_ERR_INVALID_ARGUMENT;
    const cg_profile *profile = level == CG_L0 ? NULL : e->profile;
    const cg_chunk_header header = header_of_file(e, level);
    cg_status status = CG_ERR_NO_MEMORY;
    const size_t token_bytes = header.token_bytes, tokens_bytes = header.n_tokens * token_bytes;
    uint8_t *tokens = malloc(tokens_bytes);
    cg_section *sections = calloc(header.n_sections, sizeof *sections);
    cg_piece *pieces = calloc(header.n_sections, sizeof *pieces);
    if (tokens == NULL || sections == NULL || pieces == NULL)
        goto done;
    for (uint32_t i = 0; i < header.n_tokens; i++)
        cg_put_le(tokens + i * token_bytes, token_bytes, e->tokens[i]);
    sections[0] = (cg_section){.kind = CG_SECTION_TOKENS, .bytes = (uint32_t)tokens_bytes};
    pieces[0] = (cg_piece){tokens, tokens_bytes};
    for (uint32_t i = 1; i < header.n_sections; i++) {
        sections[i] = cg_section_plan_row(profile, &header, i);
        /* The bytes stay the encoder's; another level's file may need them again. */
        pieces[i] = *piece_of(e, &header, &sections[i]);
        if (pieces[i].bytes == NULL || pieces[i].n_bytes > UINT32_MAX) {
            status = CG_ERR_INVALID_ARGUMENT; /* a task has not run, or failed */
            goto done;
        }
        sections[i].bytes = (uint32_t)pieces[i].n_bytes;
    }
    status = cg_chunk_assemble(&header, sections, pieces, bytes_out, n_bytes_out);
done:
    free(tokens);
    free(sections);
    free(pieces);
    return status;
}
