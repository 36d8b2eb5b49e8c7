#include "cuda/blocks_copy.h"

#include <cuda_runtime.h>

static __global__ void __launch_bounds__(CG_CUDA_COPY_THREADS)
    copy_units(const cg_cuda_blocks_copy copy, uint64_t n_units)
{
    const uint64_t step = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t unit = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; unit < n_units;
         unit += step)
        cg_cuda_blocks_copy_unit(&copy, unit);
}

/* Thread blocks beyond these wait: the bus is full long before. */
enum { MOST_THREAD_BLOCKS = 256 };

int cg_cuda_blocks_copy_prepare(void)
{
    cudaFuncAttributes attributes;
    return (int)cudaFuncGetAttributes(&attributes, (const void *)copy_units);
}

int cg_cuda_blocks_copy_launch(const cg_cuda_blocks_copy *copy, struct CUstream_st *stream)
{
    cg_cuda_blocks_copy given = *copy;
    uint64_t n_units = cg_cuda_blocks_copy_n_units(copy);
    const uint64_t n_blocks = (n_units + CG_CUDA_COPY_THREADS - 1) / CG_CUDA_COPY_THREADS;
    if (n_units == 0)
        return 0;
    void *arguments[] = {&given, &n_units};
    /* Not <<<>>>, whose error cudaGetLastError() has: that might be the engine's own. */
    return (int)cudaLaunchKernel(
        (const void *)copy_units,
        dim3((unsigned)(n_blocks < MOST_THREAD_BLOCKS ? n_blocks : MOST_THREAD_BLOCKS)),
        dim3(CG_CUDA_COPY_THREADS), arguments, 0, stream);
}
