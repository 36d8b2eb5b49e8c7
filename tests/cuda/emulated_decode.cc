#include "emulated_decode.h"

#include "cuda/passes.cuh"
#include "emulated_cta.h"

#include <stdexcept>

namespace cg_test
{

namespace
{

template <uint32_t KIND> void run(const cg_cuda_launch &launch, uint64_t seed)
{
    BlockEmulator emulator(cg_cuda_pass_threads(KIND), launch.shared_bytes, seed);
    emulator.run(
        launch.n_blocks, [&](EmulatedCta &cta) { cg_cuda_run_launch<KIND>(cta, launch); },
        launch.n_passes);
}

typedef void run_launch(const cg_cuda_launch &, uint64_t);
run_launch *const LAUNCHES[CG_CUDA_N_KINDS] = {
    run<CG_CUDA_START>,   run<CG_CUDA_SYMBOLS>, run<CG_CUDA_JOINT>,    run<CG_CUDA_KLT>,
    run<CG_CUDA_ANCHORS>, run<CG_CUDA_DELTAS>,  run<CG_CUDA_EXPONENTS>};

} // namespace

void emulate_decode(const std::vector<cg_cuda_decode_job> &jobs, uint64_t seed)
{
    const uint32_t n_jobs = static_cast<uint32_t>(jobs.size());
    uint32_t n_done[CG_CUDA_MAX_JOBS] = {};
    cg_cuda_launch launch;
    if (!cg_cuda_can_take_all(jobs.data(), n_jobs))
        throw std::logic_error("kernels cannot take these blocks, or so many jobs");
    while (cg_cuda_next_launch(jobs.data(), n_jobs, n_done, &launch))
        LAUNCHES[launch.kind](launch, seed++);
}

} // namespace cg_test
