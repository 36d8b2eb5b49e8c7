#include "emulated_decode.h"

#include "cuda/coding.cuh"
#include "cuda/project.cuh"
#include "emulated_cta.h"

namespace cg_test
{

void emulate_project(const cg_cuda_projection &projection, uint64_t seed)
{
    for (uint32_t step = 0; step < CG_CUDA_N_PROJECT_STEPS; step++) {
        BlockEmulator emulator(CG_CUDA_PROJECT_THREADS, sizeof(cg_cuda_project_shared),
                               seed + step);
        emulator.run(cg_cuda_project_blocks(projection, step), [&](EmulatedCta &cta) {
            if (step == CG_CUDA_PROJECT_SPECTRA)
                cg_cuda_spectra_block(cta, projection);
            else if (step == CG_CUDA_PROJECT_SYMBOLS)
                cg_cuda_quantize_block(cta, projection);
            else if (step == CG_CUDA_PROJECT_REMOVE)
                cg_cuda_project_block<true>(cta, projection, step);
            else
                cg_cuda_project_block<false>(cta, projection, step);
        });
    }
}

namespace
{

template <uint32_t STEP> void run(const cg_cuda_coding &coding, uint64_t seed)
{
    BlockEmulator emulator(CG_CUDA_CODING_THREADS, cg_cuda_coding_shared_bytes(&coding, STEP),
                           seed);
    emulator.run(coding.n_ctas, [&](EmulatedCta &cta) { cg_cuda_coding_block<STEP>(cta, coding); });
}

} // namespace

void emulate_code(const cg_cuda_coding &coding, uint64_t seed)
{
    run<CG_CUDA_CODING_ESTIMATE>(coding, seed);
    run<CG_CUDA_CODING_CODE>(coding, seed + 1);
    run<CG_CUDA_CODING_PACK>(coding, seed + 2);
}

} // namespace cg_test
