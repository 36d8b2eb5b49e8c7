/* The kernels of cuda/decode.h: a template of one body (cuda/passes.cuh), a kernel for each kind of
 * pass. */
#include "cuda/cta.cuh"
#include "cuda/passes.cuh"

#include <cuda_runtime.h>

/* Thread blocks of a multiprocessor, for which registers are shared out: 128 for each thread that
 * multiplies, which of two rows of tiles are all. Of one row two thread blocks fit: one goes on
 * while the other waits for memory or at a barrier, and it finds room beside thread blocks of
 * streams, which take long. Of thread blocks that decode symbols more than three would not fit,
 * because of real profiles' classes. */
static constexpr int blocks_of(uint32_t kind)
{
    return cg_cuda_pass_multiplies(kind) ? 512 / CG_CUDA_KLT_THREADS
           : kind == CG_CUDA_SYMBOLS     ? 3
                                         : 4;
}

template <uint32_t KIND>
__global__ void __launch_bounds__(cg_cuda_pass_threads(KIND), blocks_of(KIND))
    cg_cuda_kernel(const __grid_constant__ cg_cuda_launch launch)
{
    cg_cuda_cta cta;
    cg_cuda_run_launch<KIND>(cta, launch);
}

typedef void kernel(cg_cuda_launch);

static kernel *const KERNELS[CG_CUDA_N_KINDS] = {
    cg_cuda_kernel<CG_CUDA_START>,    cg_cuda_kernel<CG_CUDA_SYMBOLS>,
    cg_cuda_kernel<CG_CUDA_JOINT>,    cg_cuda_kernel<CG_CUDA_KLT>,
    cg_cuda_kernel<CG_CUDA_ANCHORS>,  cg_cuda_kernel<CG_CUDA_DELTAS>,
    cg_cuda_kernel<CG_CUDA_EXPONENTS>};

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
    for (int kind = 0; kind < CG_CUDA_N_KINDS && error == cudaSuccess; kind++) {
        error =
            cudaFuncSetAttribute((const void *)KERNELS[kind],
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes);
        /* A multiprocessor is split between shared memory and cache for one kernel, and runs no
         * other one that wants another split. */
        if (error == cudaSuccess && (kind == CG_CUDA_SYMBOLS || cg_cuda_pass_multiplies(kind)))
            error = cudaFuncSetAttribute((const void *)KERNELS[kind],
                                         cudaFuncAttributePreferredSharedMemoryCarveout,
                                         cudaSharedmemCarveoutMaxShared);
    }
    return error;
}

int cg_cuda_decode(const cg_cuda_decode_job *jobs, uint32_t n_jobs, struct CUstream_st *stream)
{
    uint32_t n_done[CG_CUDA_MAX_JOBS] = {};
    cg_cuda_launch launch;
    if (!cg_cuda_can_take_all(jobs, n_jobs))
        return cudaErrorInvalidValue;
    cudaError_t error = cudaSuccess;
    while (error == cudaSuccess && cg_cuda_next_launch(jobs, n_jobs, n_done, &launch)) {
        void *arguments[] = {&launch};
        error = cudaLaunchKernel(
            (const void *)KERNELS[launch.kind], dim3(launch.n_blocks, launch.n_passes),
            dim3(cg_cuda_pass_threads(launch.kind)), arguments, launch.shared_bytes, stream);
    }
    return error;
}
