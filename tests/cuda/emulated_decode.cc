#include "emulated_decode.h"

#include "cuda/passes.cuh"
#include "emulated_cta.h"

namespace cg_test
{

namespace
{

template <uint32_t KIND>
void run(const cg_cuda_pass &pass, const cg_cuda_decode_params &params, uint64_t seed)
{
    BlockEmulator emulator(cg_cuda_pass_threads(KIND), pass.shared_bytes, seed);
    emulator.run(pass.n_blocks,
                 [&](EmulatedCta &cta) { cg_cuda_run_pass<KIND>(cta, pass, params); });
}

typedef void run_pass(const cg_cuda_pass &, const cg_cuda_decode_params &, uint64_t);
run_pass *const PASSES[CG_CUDA_N_KINDS] = {
    run<CG_CUDA_SYMBOLS>,  run<CG_CUDA_ANCHORS>, run<CG_CUDA_DELTAS>, run<CG_CUDA_EXPONENTS>,
    run<CG_CUDA_ROTATION>, run<CG_CUDA_KLT>,     run<CG_CUDA_JOINT>};

} // namespace

bool emulate_decode(const cg_cuda_plan &plan, const cg_cuda_decode_params &params, uint64_t seed)
{
    if (!cg_cuda_can_take(&plan, &params.blocks))
        return false;
    memset(params.scratch_dev, 0, plan.zeroed_bytes);
    for (uint32_t i = 0; i < plan.n_passes; i++)
        PASSES[plan.passes[i].kind](plan.passes[i], params, seed + i);
    return true;
}

} // namespace cg_test
