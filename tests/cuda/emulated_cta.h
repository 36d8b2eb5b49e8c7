/* tests/cuda/emulated_cta.h - a thread block on the CPU, for the kernels' own bodies.
 *
 * Each thread is a fiber. It runs until it must wait for the others: those of its warp (ballot,
 * multiply) or of the block (barrier). Then any thread that can run is
 * next, drawn at random from a seed: what depends on an order that a GPU does not promise gives
 * other results with other seeds. Asynchronous copies arrive as late as they may. What would hang
 * or be undefined on a GPU (a warp whose lanes wait for different things, or not all of them)
 * throws std::logic_error. Surprise: the shared memory of a block is exactly as large as the launch
 * says, and full of noise.
 */
#ifndef CG_TESTS_CUDA_EMULATED_CTA_H
#define CG_TESTS_CUDA_EMULATED_CTA_H
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace cg_test
{

class BlockEmulator;

/* What a body gets as its Cta: cuda/cta.cuh says what the functions do. */
class EmulatedCta
{
  public:
    uint32_t block() const
    {
        return block_;
    }
    uint32_t pass() const
    {
        return pass_;
    }
    uint32_t thread() const
    {
        return thread_;
    }
    uint32_t lane() const
    {
        return thread_ % 32;
    }
    uint32_t ballot(bool bit);
    uint32_t count(uint32_t bits) const
    {
        return static_cast<uint32_t>(__builtin_popcount(bits));
    }
    uint32_t choose(bool first, uint32_t a, uint32_t b) const
    {
        return first ? a : b;
    }
    void barrier();
    void *shared();
    void copy16(void *to, const void *from, bool is_there = true);
    void clear16(void *to);
    void wait_copies();
    void end_copies();
    void wait_older_copies();
    void multiply(uint32_t d[4], const uint32_t a[4], const uint32_t b[2]);
    void load16(uint32_t out[4], const void *from) const;
    void load_shared16(uint32_t out[4], const void *from) const
    {
        load16(out, from);
    }
    void store_shared16(void *to, const uint32_t from[4]) const;
    void raise(uint32_t *status, uint32_t value);

  private:
    friend class BlockEmulator;
    BlockEmulator *emulator_ = nullptr;
    uint32_t block_ = 0, pass_ = 0, thread_ = 0;
    void arrive(size_t n_copies);
    std::vector<std::pair<void *, const void *>> copies_;
    size_t last_group_ = 0, n_in_groups_ = 0; /* copies before the last group, and with it */
};

/* Runs thread blocks, one after another, in a random order. */
class BlockEmulator
{
  public:
    BlockEmulator(uint32_t n_threads, size_t shared_bytes, uint64_t seed);
    ~BlockEmulator();
    BlockEmulator(const BlockEmulator &) = delete;
    BlockEmulator &operator=(const BlockEmulator &) = delete;
    void run(uint32_t n_blocks, const std::function<void(EmulatedCta &)> &body,
             uint32_t n_passes = 1);

  private:
    friend class EmulatedCta;
    struct Fiber;
    struct Warp;
    enum class Kind { NONE, BALLOT, MULTIPLY };
    struct Value {
        uint32_t of[6];
    };
    void run_block(uint32_t block, uint32_t pass);
    uint64_t random();
    void enter();
    static void start();
    void leave_to_scheduler();
    void wait();
    uint32_t meet(EmulatedCta &cta, Kind kind, const Value &value);
    void finish(Warp *warp);
    void barrier_reached();

    uint32_t n_threads_;
    uint64_t seed_;
    std::vector<std::unique_ptr<Fiber>> fibers_;
    std::vector<Warp> warps_;
    std::vector<uint32_t> runnable_;
    std::unique_ptr<uint8_t[]> shared_;
    size_t shared_bytes_;
    const std::function<void(EmulatedCta &)> *body_ = nullptr;
    uint32_t current_ = 0, n_at_barrier_ = 0, n_alive_ = 0;
    std::vector<uint32_t> at_barrier_;
    std::exception_ptr error_;
    void *scheduler_stack_ = nullptr;
    void *scheduler_fake_stack_ = nullptr;
    const void *scheduler_bottom_ = nullptr;
    size_t scheduler_bytes_ = 0;
};

} // namespace cg_test
#endif
