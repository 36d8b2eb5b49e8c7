/* A chunk's bytes to a list of kernels and what each of their thread blocks does. All checks are
 * made here and in the planners of what a chunk can hold, on the host, so that kernels need none
 * but those on the words of streams. Nothing is allocated but the section table. */
#include "codec/paper.h"
#include "cuda/planner.h"

#include <stdlib.h>
#include <string.h>

cg_cuda_request cg_cuda_request_all(const cg_cuda_profile *profile, const cg_chunk_header *header)
{
    return (cg_cuda_request){.n_groups = profile != NULL && header->level != CG_L0
                                             ? profile->profile->n_groups
                                             : header->geometry.n_layers,
                             .token_to = header->n_tokens,
                             .head_to = header->geometry.n_kv_heads,
                             .first_position = header->first_position};
}

/* Kernels believe a request. */
static cg_status check_request(const cg_cuda_profile *laid, const cg_chunk_header *h,
                               const cg_cuda_request *r)
{
    const cg_profile *profile = laid != NULL ? laid->profile : NULL;
    const uint32_t n_groups = profile != NULL ? profile->n_groups : h->geometry.n_layers;
    if (r->n_groups == 0 || r->first_group >= n_groups || r->n_groups > n_groups - r->first_group ||
        r->token_from >= r->token_to || r->token_to > h->n_tokens || r->head_from >= r->head_to ||
        r->head_to > h->geometry.n_kv_heads || r->first_position > UINT32_MAX - h->n_tokens)
        return CG_ERR_INVALID_ARGUMENT;
    /* K of the other presets, and exact tokens, are turned to where they were computed. */
    const bool can_move = laid != NULL && laid->preset == CG_CUDA_PRESET_KLT &&
                          cg_section_plan_n_sinks(profile, h) == 0;
    return r->first_position == h->first_position || can_move ? CG_OK : CG_ERR_UNSUPPORTED;
}

/* Of the wanted layer groups, and of the joint matrix; that of the steps is checked where they are
 * read. */
static cg_status check_sums(const cg_planner *p)
{
    const cg_chunk_header *h = &p->chunk->header;
    for (uint32_t i = 1; i < h->n_sections; i++) {
        const cg_section *section = &p->sections[i];
        if (!cg_section_is_joint(section->kind) &&
            (section->group < p->request->first_group ||
             section->group - p->request->first_group >= p->request->n_groups))
            continue;
        const cg_status status = cg_chunk_section_check(p->chunk, section);
        if (status != CG_OK)
            return status;
    }
    return CG_OK;
}

static cg_status plan_lossy(cg_planner *p)
{
    return p->laid->preset == CG_CUDA_PRESET_KLT ? cg_cuda_plan_klt(p) : cg_cuda_plan_paper(p);
}

cg_status cg_cuda_plan_fill(const cg_cuda_profile *laid, const uint8_t *bytes, size_t n_bytes,
                            const cg_cuda_request *request, void *plan, size_t plan_bytes,
                            cg_cuda_plan *plan_out)
{
    cg_chunk chunk;
    cg_status status = cg_chunk_open(bytes, n_bytes, &chunk);
    if (status != CG_OK)
        return status;
    const cg_chunk_header *h = &chunk.header;
    if (h->version < CG_CHUNK_VERSION_ALIGNED)
        return CG_ERR_UNSUPPORTED_VERSION;
    if (h->level == CG_L0)
        laid = NULL; /* lossless chunks do not use it */
    const cg_profile *profile = laid != NULL ? laid->profile : NULL;
    if (h->level != CG_L0 && (status = cg_section_plan_profile_check(profile, h)) != CG_OK)
        return status;
    if ((status = check_request(laid, h, request)) != CG_OK)
        return status;
    memset(plan_out, 0, sizeof *plan_out);
    plan_out->element_bytes = (uint32_t)cg_dtype_bytes(h->geometry.dtype);
    cg_section *sections = malloc(h->n_sections * sizeof *sections);
    cg_planner p = {.laid = laid,
                    .profile = profile,
                    .chunk = &chunk,
                    .sections = sections,
                    .request = request,
                    .bytes = plan,
                    .left_bytes = plan_bytes,
                    .plan = plan_out};
    status = sections != NULL ? cg_section_plan_check(profile, &chunk, sections) : CG_ERR_NO_MEMORY;
    if (status == CG_OK)
        status = check_sums(&p);
    if (status == CG_OK && cg_planner_take(&p, 16) == NULL) /* no matrix is at 0 */
        status = CG_ERR_BUFFER_TOO_SMALL;
    if (status == CG_OK)
        status = profile == NULL ? cg_cuda_plan_lossless(&p) : plan_lossy(&p);
    if (status == CG_OK && profile != NULL)
        status = cg_cuda_plan_sinks(&p);
    free(sections);
    plan_out->plan_bytes = p.n_bytes;
    plan_out->scratch_bytes = (size_t)p.scratch_bytes;
    return status;
}

static size_t bound_matrix(const cg_cuda_profile *l, uint32_t index, uint32_t n_tokens,
                           size_t *scratch)
{
    const cg_profile *p = l->profile;
    const cg_group *group = &p->groups[index / p->n_matrices];
    const cg_cuda_matrix *m = &l->matrices[index];
    /* Never less than plan_fill() takes, and simple rather than close: whole thread blocks too
     * many, and both presets at once. */
    const uint32_t n_rows = cg_count_blocks(n_tokens) + CG_CUDA_TILE_BLOCKS,
                   n_tiles = group == p->joint
                                 ? group->n_channels / CG_CUDA_JOINT_CHANNELS
                                 : group->n_slices * p->geometry.n_kv_heads * l->head_tiles;
    const size_t n_anchors = cg_paper_n_anchors(n_tokens);
    size_t n_jobs = m->anchors.n, most_cells = 0;
    for (unsigned level = 0; level < CG_N_LOSSY; level++) {
        size_t n_cells = 0;
        for (unsigned f = 0; f < CG_DCT; f++)
            n_cells += (size_t)m->n_bands[level][f] * CG_BAND_COMPONENTS *
                       cg_padded(cg_count_blocks(n_tokens), CG_CUDA_TILE_BLOCKS);
        n_jobs += m->strips[level][0].n + m->strips[level][1].n;
        most_cells = n_cells > most_cells ? n_cells : most_cells;
    }
    *scratch += most_cells * 4 + n_anchors * group->n_channels * sizeof(int16_t) + 64;
    return (n_jobs + 8) * sizeof(cg_cuda_stream_job) +
           4 * (sizeof(cg_cuda_product) + sizeof(cg_cuda_paper)) + sizeof(cg_cuda_klt) +
           sizeof(cg_cuda_joint) +
           cg_klt_row_pairs(n_rows / CG_CUDA_TILE_BLOCKS + 1) * cg_klt_thread_blocks(n_tiles) *
               sizeof(cg_cuda_klt_job) +
           cg_cuda_plan_exact_bound(CG_N_PLANES, cg_group_plane_channels(p, group));
}

void cg_cuda_plan_bound(const cg_cuda_profile *laid, const cg_geometry *geometry, uint32_t n_tokens,
                        size_t *plan_bytes_out, size_t *scratch_bytes_out)
{
    size_t plan_bytes = 0, scratch_bytes = 0;
    const size_t lossless = cg_cuda_plan_exact_bound((size_t)geometry->n_layers * CG_N_PLANES,
                                                     cg_geometry_channels(geometry));
    if (laid != NULL) {
        const cg_profile *p = laid->profile;
        scratch_bytes = (size_t)p->n_ropes * n_tokens * (p->rotary_dim / 2) * 2 * sizeof(float);
        plan_bytes = cg_count_blocks(n_tokens) * sizeof(cg_cuda_row) +
                     CG_PLANNER_MOST_RUNS * sizeof(cg_cuda_row_run);
        for (uint32_t i = 0; i < cg_profile_n_bases(p); i++)
            plan_bytes += bound_matrix(laid, i, n_tokens, &scratch_bytes);
    }
    *plan_bytes_out = (plan_bytes > lossless ? plan_bytes : lossless) + 1024;
    *scratch_bytes_out = scratch_bytes + 1024;
}
