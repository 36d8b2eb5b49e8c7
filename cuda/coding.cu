/* The kernels of cuda/coding.h, one after another on a stream. */
#include "cuda/coding.cuh"
#include "cuda/cta.cuh"

#include <cuda_runtime.h>

/* Thread blocks of a multiprocessor at once, at least. */
enum { CODING_BLOCKS = 4 };

template <uint32_t STEP>
__global__ void __launch_bounds__(CG_CUDA_CODING_THREADS, CODING_BLOCKS)
    cg_cuda_coding_kernel(const __grid_constant__ cg_cuda_coding coding)
{
    cg_cuda_cta cta;
    cg_cuda_coding_block<STEP>(cta, coding);
}

static const void *const KERNELS[CG_CUDA_N_CODING_STEPS] = {
    (const void *)cg_cuda_coding_kernel<CG_CUDA_CODING_ESTIMATE>,
    (const void *)cg_cuda_coding_kernel<CG_CUDA_CODING_CODE>,
    (const void *)cg_cuda_coding_kernel<CG_CUDA_CODING_PACK>};

int cg_cuda_code_prepare(void)
{
    size_t shared_bytes = 0;
    cudaError_t error = (cudaError_t)cg_cuda_shared_limit(&shared_bytes);
    for (uint32_t step = 0; step < CG_CUDA_N_CODING_STEPS && error == cudaSuccess; step++)
        error = cudaFuncSetAttribute(KERNELS[step], cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     (int)shared_bytes);
    return error;
}

int cg_cuda_code(const cg_cuda_coding *coding, struct CUstream_st *stream)
{
    cudaError_t error = cudaSuccess;
    for (uint32_t step = 0; step < CG_CUDA_N_CODING_STEPS && error == cudaSuccess; step++) {
        cg_cuda_coding copy = *coding;
        void *arguments[] = {&copy};
        error = cudaLaunchKernel(KERNELS[step], dim3(coding->n_ctas), dim3(CG_CUDA_CODING_THREADS),
                                 arguments, cg_cuda_coding_shared_bytes(coding, step), stream);
    }
    return error;
}
