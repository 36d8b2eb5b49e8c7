#include "cuda/planner.h"

#include <string.h>

void *cg_planner_take(cg_planner *p, size_t n_bytes)
{
    const size_t padded = (size_t)cg_padded(n_bytes, 16);
    if (padded > p->left_bytes)
        return NULL;
    uint8_t *out = p->bytes + p->n_bytes;
    memset(out, 0, padded);
    p->n_bytes += padded;
    p->left_bytes -= padded;
    return out;
}

uint64_t cg_planner_at(const cg_planner *p, const void *part)
{
    return (uint64_t)((const uint8_t *)part - p->bytes);
}

uint64_t cg_planner_take_scratch(cg_planner *p, uint64_t n_bytes)
{
    const uint64_t at = p->scratch_bytes;
    p->scratch_bytes = cg_padded(at + n_bytes, 16);
    return at;
}

cg_cuda_pass *cg_planner_add_pass(cg_planner *p, uint32_t kind)
{
    cg_cuda_pass *pass = &p->plan->passes[p->plan->n_passes++];
    *pass = (cg_cuda_pass){.kind = kind};
    return pass;
}

bool cg_planner_take_jobs(cg_planner *p, size_t n_room, cg_stream_jobs *out)
{
    n_room = (size_t)cg_padded(n_room, CG_CUDA_STREAM_WARPS);
    *out = (cg_stream_jobs){cg_planner_take(p, n_room * sizeof *out->jobs), 0, n_room};
    return out->jobs != NULL;
}

void cg_stream_jobs_end_block(cg_stream_jobs *jobs)
{
    jobs->n = (size_t)cg_padded(jobs->n, CG_CUDA_STREAM_WARPS);
}

cg_status cg_planner_add_streams(const cg_planner *p, cg_cursor *in, uint64_t matrix_at,
                                 cg_cuda_streams *m, const cg_cuda_stream_job *like,
                                 cg_stream_jobs *jobs)
{
    cg_rans_streams streams;
    cg_status status = cg_rans_streams_open(*in, m->n_strips, CG_RANS_ALIGNED, &streams);
    for (uint32_t s = 0; status == CG_OK && s < streams.n_streams; s++) {
        const uint8_t *bytes;
        size_t n_bytes;
        status = cg_rans_streams_next(&streams, &bytes, &n_bytes);
        if (status != CG_OK)
            break;
        /* The lane states are there, and whole words: kernels read both without looking. */
        if (n_bytes < 4 * CG_RANS_LANES || n_bytes % 2 != 0)
            return CG_ERR_CORRUPT;
        cg_cuda_stream_job job = *like;
        job.matrix_at = matrix_at;
        job.stream_at = (uint64_t)(bytes - p->chunk->bytes);
        job.stream_bytes = (uint32_t)n_bytes;
        job.stream = s;
        jobs->jobs[jobs->n++] = job; /* at most a job a strip */
    }
    m->n_streams = streams.n_streams;
    *in = streams.in;
    return status;
}

void cg_planner_end_streams(const cg_planner *p, cg_cuda_pass *pass, cg_stream_jobs *jobs)
{
    cg_stream_jobs_end_block(jobs);
    pass->jobs_at = cg_planner_at(p, jobs->jobs);
    pass->n_blocks = (uint32_t)(jobs->n / CG_CUDA_STREAM_WARPS);
    pass->shared_bytes = pass->tables_bytes;
    if (pass->n_blocks == 0) /* CUDA refuses an empty launch; the pass is the last one so far */
        p->plan->n_passes--;
}

cg_cursor cg_planner_section(const cg_planner *p, const cg_section *section)
{
    return (cg_cursor){p->chunk->bytes + section->offset, section->bytes};
}

cg_cuda_target cg_planner_target(const cg_planner *p, uint32_t first_layer, uint32_t plane)
{
    const cg_geometry *g = &p->chunk->header.geometry;
    return (cg_cuda_target){.first_layer = first_layer,
                            .plane = plane,
                            .n_kv_heads = g->n_kv_heads,
                            .head_dim = g->head_dim,
                            .head_from = p->request->head_from,
                            .head_to = p->request->head_to,
                            .token_from = p->request->token_from,
                            .token_to = p->request->token_to,
                            .dtype = g->dtype};
}

cg_cuda_pass *cg_planner_add_lossy(cg_planner *p, uint32_t kind)
{
    cg_cuda_pass *pass = cg_planner_add_pass(p, kind);
    pass->tables_at = p->laid->classes_at;
    /* One more than there are: that of lanes without a column. */
    pass->tables_bytes = (uint32_t)((p->profile->n_classes + 1U) * sizeof(cg_cuda_class));
    return pass;
}

size_t cg_planner_n_wanted(const cg_planner *p)
{
    return (size_t)p->request->n_groups * p->profile->n_matrices;
}

cg_wanted_matrix cg_planner_wanted(const cg_planner *p, size_t n)
{
    if (n == cg_planner_n_wanted(p))
        return (cg_wanted_matrix){
            .group = p->profile->joint,
            .laid = &p->laid->matrices[p->profile->n_groups * p->profile->n_matrices]};
    const uint32_t n_matrices = p->profile->n_matrices,
                   task = p->request->first_group * n_matrices + (uint32_t)n;
    return (cg_wanted_matrix){&p->profile->groups[task / n_matrices], &p->laid->matrices[task],
                              task % n_matrices, task};
}
