/* cuda/passes.cuh - which body a pass runs, for whoever launches one. */
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
    else if constexpr (KIND == CG_CUDA_ROTATION)
        cg_cuda_find_rotations(cta, pass, params);
    else if constexpr (KIND == CG_CUDA_JOINT)
        cg_cuda_invert_joint(cta, pass, params);
    else
        cg_cuda_invert_klt(cta, pass, params);
}

/* Whether a pass multiplies symbols by a basis. */
constexpr bool cg_cuda_pass_multiplies(uint32_t kind)
{
    return kind == CG_CUDA_KLT || kind == CG_CUDA_JOINT;
}

constexpr uint32_t cg_cuda_pass_threads(uint32_t kind)
{
    return kind == CG_CUDA_ROTATION        ? (uint32_t)CG_CUDA_ROTATION_THREADS
           : cg_cuda_pass_multiplies(kind) ? (uint32_t)CG_CUDA_KLT_THREADS
                                           : (uint32_t)CG_CUDA_STREAM_THREADS;
}

/* Whether the kernels can take the blocks: no division by zero, no address that is not aligned. */
static inline bool cg_cuda_can_take(const cg_cuda_plan *plan, const cg_cuda_blocks *b)
{
    const int64_t n = plan->element_bytes;
    bool is_aligned = n > 0 && b->block_stride % n == 0;
    for (int plane = 0; plane < CG_N_PLANES && is_aligned; plane++)
        is_aligned = b->offset_bytes[plane] % n == 0 && b->head_stride[plane] % n == 0 &&
                     b->token_stride[plane] % n == 0 && b->dim_stride[plane] % n == 0;
    return is_aligned && b->block_tokens > 0 && b->first_token <= UINT32_MAX - CG_MAX_CHUNK_TOKENS;
}
#endif
