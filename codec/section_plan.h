/* codec/section_plan.h - which sections a chunk has, and which tasks they make: shared by decoder,
 * encoder, transcoder.
 *
 * Threads: pure functions.
 */
#ifndef CG_CODEC_SECTION_PLAN_H
#define CG_CODEC_SECTION_PLAN_H
#include "codec/block_order.h"
#include "codec/codec.h"
#include "codec/profile_data.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Tokens of the chunk that are kept exact: those at positions below the profile's n_sinks. */
static inline uint32_t cg_section_plan_n_sinks(const cg_profile *profile,
                                               const cg_chunk_header *header)
{
    return cg_profile_sink_tokens(profile, header->first_position, header->n_tokens);
}

/* Tasks of a layer group: one for each of its matrices. profile NULL (L0): a group is one layer,
 * and a task one of its planes. */
static inline uint32_t cg_section_plan_n_matrices(const cg_profile *profile)
{
    return profile != NULL ? profile->n_matrices : (uint32_t)CG_N_PLANES;
}

/* Tasks of the chunk. */
static inline uint32_t cg_section_plan_n_tasks(const cg_profile *profile,
                                               const cg_chunk_header *header)
{
    return cg_section_plan_n_matrices(profile) *
           (profile != NULL ? profile->n_groups : header->geometry.n_layers);
}

/* What a task, below cg_section_plan_n_tasks(), is about. */
static inline cg_task_shape cg_section_plan_task(const cg_profile *profile,
                                                 const cg_chunk_header *header, uint32_t task_index)
{
    const uint32_t n_matrices = cg_section_plan_n_matrices(profile),
                   group = task_index / n_matrices;
    const size_t layer_bytes = (size_t)header->n_tokens * cg_geometry_channels(&header->geometry) *
                               cg_dtype_bytes(header->geometry.dtype);
    cg_task_shape shape;
    shape.first_layer = profile != NULL ? profile->groups[group].first_layer : group;
    shape.n_layers = profile != NULL ? profile->groups[group].n_layers : 1;
    shape.plane = task_index % n_matrices;
    shape.n_planes = CG_N_PLANES / n_matrices;
    shape.elements_bytes = (size_t)shape.n_planes * shape.n_layers * layer_bytes;
    return shape;
}

/* Whether a lossy chunk can be coded with the profile. CG_ERR_FOREIGN_PROFILE: it names another
 * profile, or there is none. CG_ERR_FOREIGN_MODEL: it is of another model, or of other cache
 * scales. CG_ERR_CORRUPT: the geometry is another, the version is not that of the profile's chunks,
 * the first position is not at the start of a DCT block, or it is nested and the profile has no
 * tables for that. */
cg_status cg_section_plan_profile_check(const cg_profile *profile, const cg_chunk_header *header);

/* How many sections a chunk with the header's levels has. And the kind, plane and group of one of
 * them, whose index is below that number. */
uint32_t cg_section_plan_n_sections(const cg_profile *profile, const cg_chunk_header *header);
cg_section cg_section_plan_row(const cg_profile *profile, const cg_chunk_header *header,
                               uint32_t section_index);
/* The way back, to the index of a section: a task's at a level that the chunk holds, the joint
 * matrix's where the profile has one, and a plane's sinks where the chunk has them. */
uint32_t cg_section_plan_index(const cg_profile *profile, const cg_chunk_header *header,
                               uint32_t task_index, unsigned level);
uint32_t cg_section_plan_joint_index(const cg_profile *profile, const cg_chunk_header *header,
                                     unsigned level);
uint32_t cg_section_plan_sinks_index(const cg_profile *profile, const cg_chunk_header *header,
                                     uint32_t group, unsigned plane);

/* Reads the chunk's section table to sections_out[header.n_sections], in file order, with offsets,
 * and checks it. Decodes nothing. CG_ERR_CORRUPT: these are not the sections that the chunk's
 * levels and profile ask for. CG_ERR_TRUNCATED: a section of exact elements has fewer bytes than
 * cg_lossless_least_bytes(). */
cg_status cg_section_plan_check(const cg_profile *profile, const cg_chunk *chunk,
                                cg_section *sections_out);

/* The order of a lossy chunk's blocks, from its section of steps, whose checksum is checked;
 * without one it is that of cg_block_order_init(). sections: of cg_section_plan_check(). The caller
 * destroys *order_out in any case; the profile must outlive it. CG_ERR_CORRUPT, CG_ERR_NO_MEMORY.
 */
cg_status cg_section_plan_block_order(const cg_profile *profile, const cg_chunk *chunk,
                                      const cg_section *sections, cg_block_order *order_out);

#ifdef __cplusplus
}
#endif
#endif
