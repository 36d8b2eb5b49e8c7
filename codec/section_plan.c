#include "codec/section_plan.h"

#include "codec/lossless.h"

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
    if ((header->version == CG_CHUNK_VERSION) !=
        (cg_profile_chunk_version(profile) == CG_CHUNK_VERSION))
        return CG_ERR_CORRUPT;
    if (profile->token_transform == CG_TOKENS_DCT && header->first_position % CG_DCT != 0)
        return CG_ERR_CORRUPT;
    if (header->coarsest > header->level && !profile->nests)
        return CG_ERR_CORRUPT;
    return CG_OK;
}

static uint32_t count_tasks(const cg_profile *profile, const cg_chunk_header *header)
{
    return CG_N_PLANES * (profile != NULL ? profile->n_groups : header->geometry.n_layers);
}

/* Sections of a task at the coarsest level: with sinks they are two. */
static uint32_t count_kinds(const cg_profile *profile, const cg_chunk_header *header)
{
    return profile != NULL && cg_section_plan_n_sinks(profile, header) > 0 ? 2 : 1;
}

uint32_t cg_section_plan_n_sections(const cg_profile *profile, const cg_chunk_header *header)
{
    const uint32_t n_tasks = count_tasks(profile, header), n_kinds = count_kinds(profile, header);
    return 1 + n_tasks * (n_kinds + header->coarsest - header->level);
}

cg_section cg_section_plan_row(const cg_profile *profile, const cg_chunk_header *header,
                               uint32_t section_index)
{
    const uint32_t n_tasks = count_tasks(profile, header), n_kinds = count_kinds(profile, header);
    if (section_index == 0)
        return (cg_section){.kind = CG_SECTION_TOKENS};
    const uint32_t i = section_index - 1;
    const bool refines = i >= n_tasks * n_kinds;
    const uint32_t j = refines ? i - n_tasks * n_kinds : i,
                   task = refines ? j % n_tasks : j / n_kinds;
    return (cg_section){.kind = profile == NULL ? CG_SECTION_LOSSLESS
                                : refines ? cg_section_to_level(header->coarsest - 1u - j / n_tasks)
                                : j % n_kinds == 1 ? CG_SECTION_SINKS
                                                   : CG_SECTION_SYMBOLS,
                        .plane = task % CG_N_PLANES,
                        .group = (uint16_t)(task / CG_N_PLANES)};
}

uint32_t cg_section_plan_index(const cg_profile *profile, const cg_chunk_header *header,
                               uint32_t task_index, unsigned level)
{
    const uint32_t n_tasks = count_tasks(profile, header), n_kinds = count_kinds(profile, header);
    return level == header->coarsest
               ? 1 + task_index * n_kinds
               : 1 + n_tasks * (n_kinds + header->coarsest - 1 - level) + task_index;
}

/* Bytes that a section cannot do without. Symbols that are certain take next to none. */
static size_t least_bytes(const cg_profile *profile, const cg_chunk_header *h,
                          const cg_section *section)
{
    if (section->kind == CG_SECTION_LOSSLESS)
        return cg_lossless_least_bytes(h->geometry.dtype, cg_geometry_channels(&h->geometry),
                                       h->n_tokens);
    if (section->kind == CG_SECTION_SINKS)
        return cg_lossless_least_bytes(h->geometry.dtype,
                                       profile->groups[section->group].n_channels,
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
        if (sections_out[i].bytes < least_bytes(profile, h, &want))
            return CG_ERR_TRUNCATED;
    }
    return CG_OK;
}
