/* The kernels of cuda/decode.h: a template of one body (cuda/passes.cuh), a kernel for each kind of
 * pass. */
#include "cuda/cta.cuh"
#include "cuda/passes.cuh"

#include <cuda_runtime.h>

/* One thread block that multiplies has all of a multiprocessor's registers; others share it. */
enum { BLOCKS = 4, MULTIPLYING_BLOCKS = 1 };

template <uint32_t KIND>
__global__ void __launch_bounds__(cg_cuda_pass_threads(KIND),
                                  cg_cuda_pass_multiplies(KIND) ? MULTIPLYING_BLOCKS : BLOCKS)
    cg_cuda_kernel(const __grid_constant__ cg_cuda_pass pass,
                   const __grid_constant__ cg_cuda_decode_params params)
{
    cg_cuda_cta cta;
    cg_cuda_run_pass<KIND>(cta, pass, params);
}

typedef void kernel(cg_cuda_pass, cg_cuda_decode_params);

static kernel *const KERNELS[CG_CUDA_N_KINDS] = {
    cg_cuda_kernel<CG_CUDA_SYMBOLS>,  cg_cuda_kernel<CG_CUDA_ANCHORS>,
    cg_cuda_kernel<CG_CUDA_DELTAS>,   cg_cuda_kernel<CG_CUDA_EXPONENTS>,
    cg_cuda_kernel<CG_CUDA_ROTATION>, cg_cuda_kernel<CG_CUDA_KLT>,
    cg_cuda_kernel<CG_CUDA_JOINT>};

int cg_cuda_shared_limit(size_t *n_bytes_out)
{
    int device, n_bytes;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&n_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error == cudaSuccess)
        *n_bytes_out = n_bytes < CG_CUDA_SHARED_BYTES ? n_bytes : CG_CUDA_SHARED_BYTES;
    return error;
}

int cg_cuda_decode_prepare(void)
{
    size_t shared_bytes = 0;
    cudaError_t error = (cudaError_t)cg_cuda_shared_limit(&shared_bytes);
    for (int kind = 0; kind < CG_CUDA_N_KINDS && error == cudaSuccess; kind++)
        error =
            cudaFuncSetAttribute((const void *)KERNELS[kind],
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes);
    return error;
}

int cg_cuda_decode(const cg_cuda_plan *plan, const cg_cuda_decode_params *params,
                   struct CUstream_st *stream)
{
    if (!cg_cuda_can_take(plan, &params->blocks))
        return cudaErrorInvalidValue;
    cudaError_t error = cudaSuccess;
    if (plan->zeroed_bytes > 0)
        error = cudaMemsetAsync(params->scratch_dev, 0, plan->zeroed_bytes, stream);
    for (uint32_t i = 0; i < plan->n_passes && error == cudaSuccess; i++) {
        cg_cuda_pass pass = plan->passes[i];
        cg_cuda_decode_params copy = *params;
        void *arguments[] = {&pass, &copy};
        error = cudaLaunchKernel((const void *)KERNELS[pass.kind], dim3(pass.n_blocks),
                                 dim3(cg_cuda_pass_threads(pass.kind)), arguments,
                                 pass.shared_bytes, stream);
    }
    return error;
}
