/* cuda/passes.cuh - which passes of a batch are one launch, and which body a pass runs, for whoever
 * launches them. */
#ifndef CG_CUDA_PASSES_CUH
#define CG_CUDA_PASSES_CUH
#include "cuda/joint.cuh"
#include "cuda/klt.cuh"
#include "cuda/sinks.cuh"
#include "cuda/streams.cuh"

template <uint32_t KIND, class Cta>
CG_LANE void cg_cuda_run_pass(Cta &cta, const cg_cuda_pass &pass,
                              const cg_cuda_decode_params &params)
{
    if constexpr (KIND == CG_CUDA_SYMBOLS)
        cg_cuda_decode_streams<Cta, cg_cuda_symbols_sink, cg_cuda_product>(cta, pass, params);
    else if constexpr (KIND == CG_CUDA_ANCHORS)
        cg_cuda_decode_streams<Cta, cg_cuda_anchors_sink, cg_cuda_paper>(cta, pass, params);
    else if constexpr (KIND == CG_CUDA_DELTAS)
        cg_cuda_decode_streams<Cta, cg_cuda_deltas_sink, cg_cuda_paper>(cta, pass, params);
    else if constexpr (KIND == CG_CUDA_EXPONENTS)
        cg_cuda_decode_streams<Cta, cg_cuda_exponents_sink, cg_cuda_exact>(cta, pass, params);
    else if constexpr (KIND == CG_CUDA_START)
        cg_cuda_begin(cta, pass, params);
    else if constexpr (KIND == CG_CUDA_JOINT)
        cg_cuda_invert_joint(cta, pass, params);
    else
        cg_cuda_invert_klt(cta, pass, params);
}

/* A kernel's argument: a pass of a job each, of one kind. */
struct cg_cuda_launch {
    uint32_t kind, n_passes;
    uint32_t n_blocks, shared_bytes; /* the most of a pass */
    struct {
        cg_cuda_pass pass;
        cg_cuda_decode_params params;
    } of[CG_CUDA_MAX_JOBS];
};

/* A thread block of the launch, of which passes that are smaller than others have too many. */
template <uint32_t KIND, class Cta>
CG_LANE void cg_cuda_run_launch(Cta &cta, const cg_cuda_launch &launch)
{
    const auto &of = launch.of[cta.pass()];
    if (cta.block() < of.pass.n_blocks)
        cg_cuda_run_pass<KIND>(cta, of.pass, of.params);
}

/* The next launch of a batch. n_done: passes of each job that have been launched; all zeros before
 * the first. False: there is none. */
static inline bool cg_cuda_next_launch(const cg_cuda_decode_job *jobs, uint32_t n_jobs,
                                       uint32_t n_done[CG_CUDA_MAX_JOBS], cg_cuda_launch *out)
{
    out->kind = CG_CUDA_N_KINDS;
    for (uint32_t i = 0; i < n_jobs; i++)
        if (n_done[i] < jobs[i].plan->n_passes && jobs[i].plan->passes[n_done[i]].kind < out->kind)
            out->kind = jobs[i].plan->passes[n_done[i]].kind;
    out->n_passes = out->n_blocks = out->shared_bytes = 0;
    for (uint32_t i = 0; i < n_jobs; i++) {
        const cg_cuda_pass *const pass = &jobs[i].plan->passes[n_done[i]];
        if (n_done[i] == jobs[i].plan->n_passes || pass->kind != out->kind)
            continue;
        out->of[out->n_passes].pass = *pass;
        out->of[out->n_passes++].params = jobs[i].params;
        out->n_blocks = pass->n_blocks > out->n_blocks ? pass->n_blocks : out->n_blocks;
        out->shared_bytes =
            pass->shared_bytes > out->shared_bytes ? pass->shared_bytes : out->shared_bytes;
        n_done[i]++;
    }
    return out->kind < CG_CUDA_N_KINDS;
}

/* Whether a pass multiplies symbols by a basis. */
constexpr bool cg_cuda_pass_multiplies(uint32_t kind)
{
    return kind == CG_CUDA_KLT || kind == CG_CUDA_JOINT;
}

constexpr uint32_t cg_cuda_pass_threads(uint32_t kind)
{
    return kind == CG_CUDA_START           ? (uint32_t)CG_CUDA_START_THREADS
           : cg_cuda_pass_multiplies(kind) ? (uint32_t)CG_CUDA_KLT_THREADS
                                           : (uint32_t)CG_CUDA_STREAM_THREADS;
}

/* Whether the kernels can take a job's blocks: no division by zero, no address that is not aligned.
 */
static inline bool cg_cuda_can_take(const cg_cuda_decode_job *job)
{
    const cg_cuda_blocks *const b = &job->params.blocks;
    const int64_t n = job->plan->element_bytes;
    bool is_aligned = n > 0 && b->block_stride % n == 0;
    for (int plane = 0; plane < CG_N_PLANES && is_aligned; plane++)
        is_aligned = b->offset_bytes[plane] % n == 0 && b->head_stride[plane] % n == 0 &&
                     b->token_stride[plane] % n == 0 && b->dim_stride[plane] % n == 0;
    return is_aligned && b->block_tokens > 0 && b->first_token <= UINT32_MAX - CG_MAX_CHUNK_TOKENS;
}

static inline bool cg_cuda_can_take_all(const cg_cuda_decode_job *jobs, uint32_t n_jobs)
{
    for (uint32_t i = 0; i < n_jobs && i < CG_CUDA_MAX_JOBS; i++)
        if (!cg_cuda_can_take(&jobs[i]))
            return false;
    return n_jobs <= CG_CUDA_MAX_JOBS;
}
#endif
