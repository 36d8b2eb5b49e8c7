#include "codec/section_plan.h"

#include <string.h>

cg_status cg_section_plan_profile_check(const cg_profile *profile, const cg_chunk_header *header)
{
    if (profile == NULL ||
        memcmp(profile->fingerprint.bytes, header->profile.bytes, sizeof header->profile.bytes) != 0)
        return CG_ERR_FOREIGN_PROFILE;
    if (memcmp(profile->model.bytes, header->model.bytes, sizeof header->model.bytes) != 0)
        return CG_ERR_FOREIGN_MODEL;
    cg_geometry geometry = header->geometry;
    geometry.dtype = profile->geometry.dtype; /* a profile serves caches of any dtype */
    if (!cg_geometry_equal(&geometry, &profile->geometry))
        return CG_ERR_CORRUPT;
    if (profile->token_transform == CG_TOKENS_DCT && header->first_position % CG_DCT != 0)
        return CG_ERR_CORRUPT;
    return CG_OK;
}

cg_status cg_section_plan_check(const cg_profile *profile, const cg_chunk *chunk, cg_section *sections_out)
{
    const cg_chunk_header *h = &chunk->header;
    const uint32_t n_sinks = profile != NULL ? cg_section_plan_n_sinks(profile, h) : 0;
    const uint32_t n_groups = profile != NULL ? profile->n_groups : h->geometry.n_layers;
    const uint32_t n_kinds = n_sinks > 0 ? 2 : 1;
    const uint8_t kinds[2] = {profile != NULL ? CG_SECTION_SYMBOLS : CG_SECTION_LOSSLESS, CG_SECTION_SINKS};
    if (h->n_sections != 1 + n_groups * CG_N_PLANES * n_kinds)
        return CG_ERR_CORRUPT;
    cg_chunk_sections(chunk, sections_out);
    for (uint32_t i = 1; i < h->n_sections; i++) {
        const uint32_t task = (i - 1) / n_kinds;
        if (sections_out[i].kind != kinds[(i - 1) % n_kinds] || sections_out[i].group != task / CG_N_PLANES ||
            sections_out[i].plane != task % CG_N_PLANES)
            return CG_ERR_CORRUPT;
    }
    return CG_OK;
}
