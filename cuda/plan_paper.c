/* Preset paper: anchors, then the deltas that stand on them. */
#include "codec/paper.h"
#include "cuda/planner.h"

static cg_cuda_paper paper_of(const cg_planner *p, cg_wanted_matrix w, uint32_t n_rows,
                              const cg_cuda_strips *strips)
{
    return (cg_cuda_paper){.streams = {.strips_at = strips->at,
                                       .classes_at = strips->classes_at,
                                       .n_strips = strips->n,
                                       .n_rows = n_rows,
                                       .n_classes = p->profile->n_classes},
                           .mean_at = w.laid->mean_at,
                           .weight_at = w.laid->weight_at,
                           .anchor_step_at = w.laid->anchor_step_at,
                           .n_columns = w.group->n_channels,
                           .step = p->profile->step[p->chunk->header.level - 1][w.matrix],
                           .target = cg_planner_target(p, w.group->first_layer, w.matrix)};
}

cg_status cg_cuda_plan_paper(cg_planner *p)
{
    const cg_chunk_header *h = &p->chunk->header;
    const uint32_t n_anchors = cg_paper_n_anchors(h->n_tokens);
    const size_t n = cg_planner_n_wanted(p);
    cg_cuda_paper *matrices[2] = {cg_planner_take(p, n * sizeof **matrices),
                                  cg_planner_take(p, n * sizeof **matrices)};
    /* Anchors and deltas have the same columns, and so as many strips: room for one is room for the
     * other. */
    cg_stream_jobs jobs[2];
    size_t n_room = 0;
    for (size_t i = 0; i < n; i++)
        n_room += cg_planner_wanted(p, i).laid->anchors.n;
    if (matrices[0] == NULL || matrices[1] == NULL || !cg_planner_take_jobs(p, n_room, &jobs[0]) ||
        !cg_planner_take_jobs(p, n_room, &jobs[1]))
        return CG_ERR_BUFFER_TOO_SMALL;
    const cg_cuda_stream_job none = {0};
    for (size_t i = 0; i < n; i++) {
        const cg_wanted_matrix w = cg_planner_wanted(p, i);
        cg_cuda_paper *anchors = &matrices[0][i], *deltas = &matrices[1][i];
        *anchors = paper_of(p, w, n_anchors, &w.laid->anchors);
        *deltas = paper_of(p, w, h->n_tokens - n_anchors, &w.laid->strips[h->level - 1][0]);
        anchors->anchors_at = deltas->anchors_at =
            cg_planner_take_scratch(p, (uint64_t)n_anchors * w.group->n_channels * sizeof(int16_t));
        const uint32_t index = cg_section_plan_index(p->profile, h, w.task, h->level);
        cg_cursor in = cg_planner_section(p, &p->sections[index]);
        cg_status status = cg_planner_add_streams(p, &in, cg_planner_at(p, anchors),
                                                  &anchors->streams, &none, &jobs[0]);
        /* The deltas' matrix counts its padding from its own start, which is as aligned. */
        if (status == CG_OK)
            status = cg_planner_add_streams(p, &in, cg_planner_at(p, deltas), &deltas->streams,
                                            &none, &jobs[1]);
        if (status == CG_OK && in.left_bytes > 0)
            status = CG_ERR_CORRUPT;
        if (status != CG_OK)
            return status;
    }
    cg_planner_end_streams(p, cg_planner_add_lossy(p, CG_CUDA_ANCHORS), &jobs[0]);
    cg_planner_end_streams(p, cg_planner_add_lossy(p, CG_CUDA_DELTAS), &jobs[1]);
    return CG_OK;
}
