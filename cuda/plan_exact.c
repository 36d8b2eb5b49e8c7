/* Exact elements: L0, and sinks. */
#include "codec/lossless.h"
#include "codec/lossless_lane.h"
#include "cuda/planner.h"

enum { MOST_EXACT_TABLES = (CG_LOSSLESS_MAX_CLASSES + 1) * sizeof(cg_cuda_class) };

static uint32_t count_exact_strips(size_t n_columns)
{
    return (uint32_t)((n_columns + CG_RANS_LANES - 1) / CG_RANS_LANES);
}

/* Strips of columns one after another: the same for all sections of a width. */
static uint64_t add_exact_strips(cg_planner *p, size_t n_columns)
{
    const uint32_t n_strips = count_exact_strips(n_columns);
    cg_cuda_strip *strips = cg_planner_take(p, n_strips * sizeof *strips);
    if (strips == NULL)
        return 0;
    for (uint32_t s = 0; s < n_strips; s++) {
        const size_t first = (size_t)s * CG_RANS_LANES, left = n_columns - first;
        strips[s] = (cg_cuda_strip){.column = (uint32_t)first,
                                    .class_at = (uint32_t)first,
                                    .n_lanes = (uint8_t)(left < CG_RANS_LANES ? left : 32)};
    }
    return cg_planner_at(p, strips);
}

/* A section of exact elements: its tables into the plan, a job for each of its streams. */
static cg_status add_exact(cg_planner *p, const cg_section *section, uint64_t strips_at,
                           size_t n_columns, uint32_t n_rows, cg_cuda_target target,
                           cg_cuda_pass *pass, cg_stream_jobs *jobs)
{
    cg_rans_class classes[CG_LOSSLESS_MAX_CLASSES];
    cg_lossless_head head;
    cg_cursor in = cg_planner_section(p, section);
    cg_status status = cg_lossless_read_head(target.dtype, in.at, in.left_bytes, n_columns, n_rows,
                                             CG_RANS_ALIGNED, classes, &head);
    if (status != CG_OK)
        return status;
    cg_cuda_exact *m = cg_planner_take(p, sizeof *m);
    cg_cuda_class *tables = cg_planner_take(p, (head.n_classes + 1U) * sizeof *tables);
    if (m == NULL || tables == NULL)
        return CG_ERR_BUFFER_TOO_SMALL;
    for (unsigned k = 0; k < head.n_classes; k++)
        cg_cuda_class_fill(&classes[k], &tables[k]);
    cg_cuda_class_fill_idle(&tables[head.n_classes]);
    m->streams = (cg_cuda_streams){
        .strips_at = strips_at,
        .classes_at =
            head.column_class != NULL ? (uint64_t)(head.column_class - p->chunk->bytes) : 0,
        .n_strips = count_exact_strips(n_columns),
        .n_rows = n_rows,
        .n_classes = head.n_classes};
    m->n_columns = (uint32_t)n_columns;
    m->target = target;
    const cg_cuda_stream_job like = {.tables_at = cg_planner_at(p, tables),
                                     .tables_bytes =
                                         (uint32_t)((head.n_classes + 1U) * sizeof *tables)};
    status = cg_planner_add_streams(p, &head.matrix, cg_planner_at(p, m), &m->streams, &like, jobs);
    if (status != CG_OK)
        return status;
    cg_stream_jobs_end_block(jobs); /* the next section has other classes */
    const size_t low_bytes = n_columns * n_rows * cg_lane_split(target.dtype).low_bytes;
    if (head.matrix.left_bytes != low_bytes)
        return head.matrix.left_bytes < low_bytes ? CG_ERR_TRUNCATED : CG_ERR_CORRUPT;
    m->low_at = (uint64_t)(head.matrix.at - p->chunk->bytes);
    /* Shared memory is of a launch: the most that one of its thread blocks wants. */
    if (like.tables_bytes > pass->tables_bytes)
        pass->tables_bytes = like.tables_bytes;
    return CG_OK;
}

static size_t room_of_exact(size_t n_columns)
{
    return (size_t)cg_padded(count_exact_strips(n_columns), CG_CUDA_STREAM_WARPS);
}

cg_status cg_cuda_plan_lossless(cg_planner *p)
{
    const cg_chunk_header *h = &p->chunk->header;
    const cg_cuda_request *r = p->request;
    const size_t channels = cg_geometry_channels(&h->geometry);
    const uint64_t strips_at = add_exact_strips(p, channels);
    cg_stream_jobs jobs;
    cg_cuda_pass *pass = cg_planner_add_pass(p, CG_CUDA_EXPONENTS);
    if (strips_at == 0 ||
        !cg_planner_take_jobs(p, r->n_groups * CG_N_PLANES * room_of_exact(channels), &jobs))
        return CG_ERR_BUFFER_TOO_SMALL;
    cg_status status = CG_OK;
    for (uint32_t i = 0; i < r->n_groups * CG_N_PLANES && status == CG_OK; i++) {
        const uint32_t task = r->first_group * CG_N_PLANES + i;
        const cg_section *section = &p->sections[cg_section_plan_index(NULL, h, task, CG_L0)];
        status =
            add_exact(p, section, strips_at, channels, h->n_tokens,
                      cg_planner_target(p, task / CG_N_PLANES, task % CG_N_PLANES), pass, &jobs);
    }
    cg_planner_end_streams(p, pass, &jobs);
    return status;
}

cg_status cg_cuda_plan_sinks(cg_planner *p)
{
    const cg_chunk_header *h = &p->chunk->header;
    const cg_cuda_request *r = p->request;
    const uint32_t n_sinks = cg_section_plan_n_sinks(p->profile, h);
    size_t n_room = 0;
    /* The wanted tokens begin behind them. */
    if (n_sinks <= r->token_from)
        return CG_OK;
    for (uint32_t g = r->first_group; g < r->first_group + r->n_groups; g++)
        n_room += CG_N_PLANES *
                  room_of_exact(cg_group_plane_channels(p->profile, &p->profile->groups[g]));
    cg_stream_jobs jobs;
    cg_cuda_pass *pass = cg_planner_add_pass(p, CG_CUDA_EXPONENTS);
    if (!cg_planner_take_jobs(p, n_room, &jobs))
        return CG_ERR_BUFFER_TOO_SMALL;
    cg_status status = CG_OK;
    for (uint32_t g = r->first_group; g < r->first_group + r->n_groups; g++) {
        const cg_group *group = &p->profile->groups[g];
        const size_t n_columns = cg_group_plane_channels(p->profile, group);
        const uint64_t strips_at = add_exact_strips(p, n_columns);
        for (uint32_t plane = 0; plane < CG_N_PLANES && status == CG_OK; plane++) {
            const uint32_t index = cg_section_plan_sinks_index(p->profile, h, g, plane);
            status = strips_at == 0
                         ? CG_ERR_BUFFER_TOO_SMALL
                         : add_exact(p, &p->sections[index], strips_at, n_columns, n_sinks,
                                     cg_planner_target(p, group->first_layer, plane), pass, &jobs);
        }
    }
    cg_planner_end_streams(p, pass, &jobs);
    return status;
}

size_t cg_cuda_plan_exact_bound(size_t n_sections, size_t n_columns)
{
    return n_sections * (sizeof(cg_cuda_exact) + MOST_EXACT_TABLES + 64 +
                         room_of_exact(n_columns) * sizeof(cg_cuda_stream_job)) +
           count_exact_strips(n_columns) * sizeof(cg_cuda_strip) + 64;
}
