/* The order of a file's sections, computed instead of stored: the tokens; the steps of DCT blocks,
 * if there are any; for each layer group its matrices and sinks at the coarsest level; then, for
 * each finer level, a section for each task. A joint matrix has a section of its own in front of
 * each level's others. cg_section_plan_row() goes from an index to a section, the ..._index()
 * functions go back, and cg_section_plan_check() holds a file against the first. */
#include "codec/section_plan.h"

#include "codec/lossless.h"
#include "codec/preset.h"

#include <string.h>

cg_status cg_section_plan_profile_check(const cg_profile *profile, const cg_chunk_header *header)
{
    if (profile == NULL || memcmp(profile->fingerprint.bytes, header->profile.bytes,
                                  sizeof header->profile.bytes) != 0)
        return CG_ERR_FOREIGN_PROFILE;
    if (memcmp(profile->model.bytes, header->model.bytes, sizeof header->model.bytes) != 0)
        return CG_ERR_FOREIGN_MODEL;
    cg_geometry geometry = header->geometry;
    geometry.dtype = profile->geometry.dtype; /* a profile serves caches of any dtype */
    if (!cg_geometry_equal(&geometry, &profile->geometry))
        return CG_ERR_CORRUPT;
    if (header->cache_scales != profile->cache_scales)
        return CG_ERR_FOREIGN_MODEL;
    /* FORMAT.md, "Versions": chunks of profiles of version 1 have two. */
    const uint32_t version = cg_profile_chunk_version(profile);
    if (version == CG_CHUNK_VERSION_SINGLE ? header->version >= CG_CHUNK_VERSION_ALIGNED
                                           : header->version != version)
        return CG_ERR_CORRUPT;
    if (header->first_position % profile->preset->start_multiple != 0)
        return CG_ERR_CORRUPT;
    if (header->coarsest > header->level && !profile->nests) /* it has no refinement tables */
        return CG_ERR_CORRUPT;
    return CG_OK;
}

/* Planes of sinks that stand among a group's sections of the coarsest level. */
static uint32_t count_sinks(const cg_profile *profile, const cg_chunk_header *header)
{
    return profile != NULL && cg_section_plan_n_sinks(profile, header) > 0 ? CG_N_PLANES : 0;
}

/* A group's sections of the coarsest level. */
static uint32_t count_in_group(const cg_profile *profile, const cg_chunk_header *header)
{
    return cg_section_plan_n_matrices(profile) + count_sinks(profile, header);
}

static uint32_t count_groups(const cg_profile *profile, const cg_chunk_header *header)
{
    return cg_section_plan_n_tasks(profile, header) / cg_section_plan_n_matrices(profile);
}

/* Sections in front of all levels: the tokens, and the steps. */
static uint32_t count_first(const cg_profile *profile)
{
    return 1 + (profile != NULL && profile->version == CG_PROFILE_VERSION_STEPS);
}

/* The joint matrix's sections of a level. */
static uint32_t count_joint(const cg_profile *profile)
{
    return profile != NULL && profile->joint != NULL;
}

/* Sections of the coarsest level, the first ones apart; and of each finer one. */
static uint32_t count_coarsest(const cg_profile *profile, const cg_chunk_header *header)
{
    return count_joint(profile) + count_groups(profile, header) * count_in_group(profile, header);
}

static uint32_t count_finer(const cg_profile *profile, const cg_chunk_header *header)
{
    return count_joint(profile) + cg_section_plan_n_tasks(profile, header);
}

uint32_t cg_section_plan_n_sections(const cg_profile *profile, const cg_chunk_header *header)
{
    return count_first(profile) + count_coarsest(profile, header) +
           count_finer(profile, header) * (header->coarsest - header->level);
}

/* The i-th of a group's sections of the coarsest level. Sinks stand behind the matrix of their
 * plane: behind their own, or both behind the one that joins them. */
static cg_section row_in_group(const cg_profile *profile, uint32_t i, uint32_t n_in_group)
{
    const uint32_t n_matrices = cg_section_plan_n_matrices(profile);
    const bool has_sinks = n_in_group > n_matrices;
    const bool is_sinks = has_sinks && (n_matrices == 1 ? i > 0 : i % 2 == 1);
    return (cg_section){.kind = profile == NULL ? CG_SECTION_LOSSLESS
                                : is_sinks      ? CG_SECTION_SINKS
                                                : CG_SECTION_SYMBOLS,
                        .plane = (uint8_t)(!has_sinks        ? i
                                           : n_matrices == 1 ? (i > 0 ? i - 1 : 0)
                                                             : i / 2)};
}

cg_section cg_section_plan_row(const cg_profile *profile, const cg_chunk_header *header,
                               uint32_t section_index)
{
    const uint32_t n_matrices = cg_section_plan_n_matrices(profile),
                   n_in_group = count_in_group(profile, header), n_joint = count_joint(profile),
                   n_coarsest = count_coarsest(profile, header),
                   n_finer = count_finer(profile, header), n_first = count_first(profile);
    if (section_index < n_first)
        return (cg_section){.kind = section_index == 0 ? CG_SECTION_TOKENS : CG_SECTION_STEPS};
    /* Behind the coarsest level come the finer ones, the next finer first: a section a task. */
    section_index -= n_first;
    const bool is_finer = section_index >= n_coarsest;
    const uint32_t i = is_finer ? (section_index - n_coarsest) % n_finer : section_index;
    const uint32_t level =
        header->coarsest - (is_finer ? (section_index - n_coarsest) / n_finer + 1 : 0);
    if (i < n_joint)
        return (cg_section){.kind = is_finer ? cg_section_joint_to_level(level) : CG_SECTION_JOINT};
    if (is_finer)
        return (cg_section){.kind = cg_section_to_level(level),
                            .plane = (uint8_t)((i - n_joint) % n_matrices),
                            .group = (uint16_t)((i - n_joint) / n_matrices)};
    cg_section row = row_in_group(profile, (i - n_joint) % n_in_group, n_in_group);
    row.group = (uint16_t)((i - n_joint) / n_in_group);
    return row;
}

/* Where a level's sections begin. */
static uint32_t first_of_level(const cg_profile *profile, const cg_chunk_header *header,
                               unsigned level)
{
    return count_first(profile) +
           (level == header->coarsest
                ? 0
                : count_coarsest(profile, header) +
                      count_finer(profile, header) * (header->coarsest - 1 - level));
}

uint32_t cg_section_plan_index(const cg_profile *profile, const cg_chunk_header *header,
                               uint32_t task_index, unsigned level)
{
    const uint32_t n_matrices = cg_section_plan_n_matrices(profile),
                   n_in_group = count_in_group(profile, header);
    const uint32_t first = first_of_level(profile, header, level) + count_joint(profile);
    return level == header->coarsest
               ? first + task_index / n_matrices * n_in_group +
                     task_index % n_matrices * (n_in_group > n_matrices ? 2 : 1)
               : first + task_index;
}

uint32_t cg_section_plan_joint_index(const cg_profile *profile, const cg_chunk_header *header,
                                     unsigned level)
{
    return first_of_level(profile, header, level);
}

uint32_t cg_section_plan_sinks_index(const cg_profile *profile, const cg_chunk_header *header,
                                     uint32_t group, unsigned plane)
{
    /* Sinks are there once, among the coarsest level's sections, which come first. */
    return count_first(profile) + count_joint(profile) + group * count_in_group(profile, header) +
           (profile->n_matrices == 1 ? 1 + plane : 2 * plane + 1);
}

/* Bytes that a section cannot do without. Symbols that are certain take next to none. */
static size_t least_bytes(const cg_profile *profile, const cg_chunk_header *h,
                          const cg_section *section)
{
    if (section->kind == CG_SECTION_LOSSLESS)
        return cg_lossless_least_bytes(h->geometry.dtype, cg_geometry_channels(&h->geometry),
                                       h->n_tokens);
    if (section->kind == CG_SECTION_SINKS)
        return cg_lossless_least_bytes(
            h->geometry.dtype, cg_group_plane_channels(profile, &profile->groups[section->group]),
            cg_section_plan_n_sinks(profile, h));
    return 0;
}

cg_status cg_section_plan_check(const cg_profile *profile, const cg_chunk *chunk,
                                cg_section *sections_out)
{
    const cg_chunk_header *h = &chunk->header;
    if (h->n_sections != cg_section_plan_n_sections(profile, h))
        return CG_ERR_CORRUPT;
    cg_chunk_sections(chunk, sections_out);
    for (uint32_t i = 1; i < h->n_sections; i++) {
        const cg_section want = cg_section_plan_row(profile, h, i);
        if (sections_out[i].kind != want.kind || sections_out[i].group != want.group ||
            sections_out[i].plane != want.plane)
            return CG_ERR_CORRUPT;
        /* Exact elements: the file must have bytes for them before anybody takes memory for them.
         */
        if (sections_out[i].bytes < least_bytes(profile, h, &want))
            return CG_ERR_TRUNCATED;
    }
    return CG_OK;
}

cg_status cg_section_plan_block_order(const cg_profile *profile, const cg_chunk *chunk,
                                      const cg_section *sections, cg_block_order *order)
{
    cg_status status = cg_block_order_init(cg_count_blocks(chunk->header.n_tokens), order);
    if (status != CG_OK || profile->version < CG_PROFILE_VERSION_STEPS)
        return status;
    /* Behind the tokens, and of as many bytes as there are blocks: cg_chunk_open() has seen to it.
     */
    const cg_section *steps = &sections[1];
    status = cg_chunk_section_check(chunk, steps);
    return status == CG_OK ? cg_block_order_sort(profile, chunk->bytes + steps->offset, order)
                           : status;
}
