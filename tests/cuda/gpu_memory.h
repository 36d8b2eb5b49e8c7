/* tests/cuda/gpu_memory.h - memory of a GPU that frees itself; a CUDA error is an exception. */
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

} // namespace cg_test
#endif
