/* tests/cuda/device_memory.h - memory that stands for a GPU's, between pages that nobody may touch.
 *
 * It ends where the one behind begins, or begins where the one in front ends: there is a page's
 * slack at the other side. The first byte is aligned to 16, as the kernels ask for at least.
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
        : n_bytes_((n_bytes + 15) / 16 * 16), pages_bytes_((n_bytes_ + PAGE - 1) / PAGE * PAGE),
          mapped_(static_cast<uint8_t *>(mmap(nullptr, pages_bytes_ + 2 * PAGE, PROT_NONE,
                                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))),
          data_(mapped_ + PAGE + (at_front() ? 0 : pages_bytes_ - n_bytes_))
    {
        if (mapped_ == MAP_FAILED ||
            (n_bytes_ > 0 && mprotect(mapped_ + PAGE, pages_bytes_, PROT_READ | PROT_WRITE) != 0))
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
        munmap(mapped_, pages_bytes_ + 2 * PAGE);
    }
    DeviceMemory(const DeviceMemory &) = delete;
    DeviceMemory &operator=(const DeviceMemory &) = delete;
    uint8_t *data() const
    {
        return data_;
    }
    size_t size() const
    {
        return n_bytes_;
    }

    // Whether what is made from now on by this thread begins at its guard page.
    static bool &at_front()
    {
        static thread_local bool is_so = false;
        return is_so;
    }

  private:
    static const size_t PAGE = 4096;
    size_t n_bytes_, pages_bytes_;
    uint8_t *mapped_, *data_;
};

} // namespace cg_test
#endif
