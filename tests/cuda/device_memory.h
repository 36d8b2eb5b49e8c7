/* tests/cuda/device_memory.h - memory that stands for a GPU's: behind its last byte is a page that
 * nobody may touch.
 *
 * The first byte is aligned to 16, as the kernels ask for at least.
 */
#ifndef CG_TESTS_CUDA_DEVICE_MEMORY_H
#define CG_TESTS_CUDA_DEVICE_MEMORY_H
#include <cstdint>
#include <cstring>
#include <new>
#include <sys/mman.h>

namespace cg_test
{

class DeviceMemory
{
  public:
    explicit DeviceMemory(size_t n_bytes, uint8_t fill = 0xee)
        : n_bytes_((n_bytes + 15) / 16 * 16),
          mapped_bytes_((n_bytes_ + PAGE - 1) / PAGE * PAGE + PAGE),
          mapped_(static_cast<uint8_t *>(mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE,
                                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)))
    {
        if (mapped_ == MAP_FAILED || mprotect(mapped_ + mapped_bytes_ - PAGE, PAGE, PROT_NONE) != 0)
            throw std::bad_alloc();
        memset(data(), fill, n_bytes_);
    }
    DeviceMemory(const void *bytes, size_t n_bytes) : DeviceMemory(n_bytes)
    {
        if (n_bytes > 0)
            memcpy(data(), bytes, n_bytes);
    }
    ~DeviceMemory()
    {
        munmap(mapped_, mapped_bytes_);
    }
    DeviceMemory(const DeviceMemory &) = delete;
    DeviceMemory &operator=(const DeviceMemory &) = delete;
    uint8_t *data() const
    {
        return mapped_ + mapped_bytes_ - PAGE - n_bytes_;
    }
    size_t size() const
    {
        return n_bytes_;
    }

  private:
    static const size_t PAGE = 4096;
    size_t n_bytes_, mapped_bytes_;
    uint8_t *mapped_;
};

} // namespace cg_test
#endif
