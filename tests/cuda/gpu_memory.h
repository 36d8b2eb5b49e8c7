/* tests/cuda/gpu_memory.h - memory of a GPU, and pinned memory, that free themselves; an error of
 * CUDA is an exception. */
#ifndef CG_TESTS_CUDA_GPU_MEMORY_H
#define CG_TESTS_CUDA_GPU_MEMORY_H
#include <cuda_runtime.h>
#include <stdexcept>
#include <string>

namespace cg_test
{

inline void require(int error, const char *what)
{
    if (error != cudaSuccess)
        throw std::runtime_error(std::string(what) + ": " +
                                 cudaGetErrorString(static_cast<cudaError_t>(error)));
}

class GpuMemory
{
  public:
    explicit GpuMemory(size_t n_bytes)
    {
        require(cudaMalloc(&data_, n_bytes + 1), "cudaMalloc");
    }
    GpuMemory(const void *bytes, size_t n_bytes) : GpuMemory(n_bytes)
    {
        require(cudaMemcpy(data_, bytes, n_bytes, cudaMemcpyHostToDevice), "copy to the GPU");
    }
    ~GpuMemory()
    {
        (void)cudaFree(data_);
    }
    GpuMemory(const GpuMemory &) = delete;
    GpuMemory &operator=(const GpuMemory &) = delete;
    uint8_t *data() const
    {
        return static_cast<uint8_t *>(data_);
    }

  private:
    void *data_ = nullptr;
};

class PinnedMemory // kernels can reach it
{
  public:
    explicit PinnedMemory(size_t n_bytes)
    {
        require(cudaHostAlloc(&data_, n_bytes + 1, cudaHostAllocPortable), "cudaHostAlloc");
    }
    ~PinnedMemory()
    {
        (void)cudaFreeHost(data_);
    }
    PinnedMemory(const PinnedMemory &) = delete;
    PinnedMemory &operator=(const PinnedMemory &) = delete;
    uint8_t *data() const
    {
        return static_cast<uint8_t *>(data_);
    }

  private:
    void *data_ = nullptr;
};

} // namespace cg_test
#endif
