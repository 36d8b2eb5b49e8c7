/* The kernels of cuda/project.h, one after another on a stream. */
#include "cuda/cta.cuh"
#include "cuda/project.cuh"

#include <cuda_runtime.h>

/* Thread blocks of a multiprocessor at once, at least: one waits for memory while others add. */
enum { PROJECT_BLOCKS = 6 };

template <bool REMOVES>
__global__ void __launch_bounds__(CG_CUDA_PROJECT_THREADS, PROJECT_BLOCKS)
    cg_cuda_project_kernel(const __grid_constant__ cg_cuda_projection projection, uint32_t step)
{
    cg_cuda_cta cta;
    cg_cuda_project_block<REMOVES>(cta, projection, step);
}

int cg_cuda_project_prepare(void)
{
    cudaFuncAttributes attributes;
    const cudaError_t error =
        cudaFuncGetAttributes(&attributes, (const void *)cg_cuda_project_kernel<false>);
    return error != cudaSuccess
               ? error
               : cudaFuncGetAttributes(&attributes, (const void *)cg_cuda_project_kernel<true>);
}

int cg_cuda_project(const cg_cuda_projection *projection, struct CUstream_st *stream)
{
    cudaError_t error = cudaSuccess;
    for (uint32_t step = 0; step < CG_CUDA_N_PROJECT_STEPS && error == cudaSuccess; step++) {
        cg_cuda_projection copy = *projection;
        const uint32_t n_blocks = cg_cuda_project_blocks(copy, step);
        void *arguments[] = {&copy, &step};
        if (n_blocks > 0)
            error = cudaLaunchKernel(step == CG_CUDA_PROJECT_REMOVE
                                         ? (const void *)cg_cuda_project_kernel<true>
                                         : (const void *)cg_cuda_project_kernel<false>,
                                     dim3(n_blocks), dim3(CG_CUDA_PROJECT_THREADS), arguments,
                                     sizeof(cg_cuda_project_shared), stream);
    }
    return error;
}
