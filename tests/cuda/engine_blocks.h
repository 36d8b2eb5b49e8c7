/* tests/cuda/engine_blocks.h - an engine's blocks and stream in a GPU's memory: gpu_device.cc on a
 * GPU, standin_engine.cc with what stands for one. The tests are the same.
 */
#ifndef CG_TESTS_CUDA_ENGINE_BLOCKS_H
#define CG_TESTS_CUDA_ENGINE_BLOCKS_H
#include <cstddef>
#include <cstdint>
#include <vector>

namespace cg_test
{

class EngineBlocks
{
  public:
    explicit EngineBlocks(size_t n_bytes);
    ~EngineBlocks();
    EngineBlocks(const EngineBlocks &) = delete;
    EngineBlocks &operator=(const EngineBlocks &) = delete;
    char *data() const
    {
        return data_;
    }
    void *stream() const
    {
        return stream_;
    }
    // Keep the stream busy for 20 ms, then write all of them: what does not wait for the stream
    // comes before.
    void write(const std::vector<uint8_t> &bytes);
    std::vector<uint8_t> read() const; // after what is on the stream

  private:
    size_t n_bytes_;
    char *data_;
    void *stream_;
    void *pinned_ = nullptr; // of a GPU's: what was written last
};

} // namespace cg_test
#endif
