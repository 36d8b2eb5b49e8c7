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

__global__ void __launch_bounds__(CG_CUDA_PROJECT_THREADS)
    cg_cuda_spectra_kernel(const __grid_constant__ cg_cuda_projection projection)
{
    cg_cuda_cta cta;
    cg_cuda_spectra_block(cta, projection);
}

__global__ void __launch_bounds__(CG_CUDA_PROJECT_THREADS)
    cg_cuda_quantize_kernel(const __grid_constant__ cg_cuda_projection projection)
{
    cg_cuda_cta cta;
    cg_cuda_quantize_block(cta, projection);
}

/* Of the kernel that takes a step. */
static const void *kernel_of(uint32_t step)
{
    return step == CG_CUDA_PROJECT_SPECTRA   ? (const void *)cg_cuda_spectra_kernel
           : step == CG_CUDA_PROJECT_SYMBOLS ? (const void *)cg_cuda_quantize_kernel
           : step == CG_CUDA_PROJECT_REMOVE  ? (const void *)cg_cuda_project_kernel<true>
                                             : (const void *)cg_cuda_project_kernel<false>;
}

int cg_cuda_project_prepare(void)
{
    cudaFuncAttributes attributes;
    cudaError_t error = cudaSuccess;
    for (uint32_t step = 0; step < CG_CUDA_N_PROJECT_STEPS && error == cudaSuccess; step++)
        error = cudaFuncGetAttributes(&attributes, kernel_of(step));
    return error;
}

int cg_cuda_project(const cg_cuda_projection *projection, struct CUstream_st *stream)
{
    cudaError_t error = cudaSuccess;
    for (uint32_t step = 0; step < CG_CUDA_N_PROJECT_STEPS && error == cudaSuccess; step++) {
        cg_cuda_projection copy = *projection;
        const uint32_t n_blocks = cg_cuda_project_blocks(copy, step);
        const bool makes_sums = step != CG_CUDA_PROJECT_SPECTRA && step != CG_CUDA_PROJECT_SYMBOLS;
        void *arguments[] = {&copy, &step}; /* who makes no sums takes the first */
        if (n_blocks > 0)
            error = cudaLaunchKernel(kernel_of(step), dim3(n_blocks), dim3(CG_CUDA_PROJECT_THREADS),
                                     arguments, makes_sums ? sizeof(cg_cuda_project_shared) : 0,
                                     stream);
    }
    return error;
}
