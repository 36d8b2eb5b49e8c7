#include "emulated_cta.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <sys/mman.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

#if !defined(__x86_64__)
#error "the emulator's fibers are written for x86-64"
#endif

/* Saves what a call must keep on this stack, and goes on with another: a ucontext without its
 * system calls, which would take most of the time. */
extern "C" void cg_test_switch_stack(void **save_to, void *stack);
__asm__(".text\n"
        ".globl cg_test_switch_stack\n"
        ".type cg_test_switch_stack, @function\n"
        "cg_test_switch_stack:\n"
        "    pushq %rbp\n    pushq %rbx\n    pushq %r12\n"
        "    pushq %r13\n    pushq %r14\n    pushq %r15\n"
        "    movq %rsp, (%rdi)\n"
        "    movq %rsi, %rsp\n"
        "    popq %r15\n    popq %r14\n    popq %r13\n"
        "    popq %r12\n    popq %rbx\n    popq %rbp\n"
        "    ret\n"
        ".size cg_test_switch_stack, .-cg_test_switch_stack\n");

namespace cg_test
{

namespace
{
const size_t STACK_BYTES = 256 << 10, GUARD_BYTES = 4096;
thread_local BlockEmulator *running;

/* To TSan all lanes of a thread block are one thread, apart from the one that runs them: they run
 * one after another, and a switch that it knows of costs more than what a lane does in between.
 * Its reports show frames of several lanes as one call stack. It needs no end of the functions in
 * which lanes are left: that stack goes with the thread block. */
struct OneThread {
#if defined(__SANITIZE_THREAD__)
    void *const before = __tsan_get_current_fiber(), *const lanes = __tsan_create_fiber(0);
    OneThread()
    {
        __tsan_switch_to_fiber(lanes, 0);
    }
    ~OneThread()
    {
        __tsan_switch_to_fiber(before, 0);
        __tsan_destroy_fiber(lanes);
    }
#else
    OneThread()
    {
    }
#endif
};
} // namespace

struct BlockEmulator::Fiber {
    EmulatedCta cta;
    uint8_t *memory;
    void *stack = nullptr, *fake_stack = nullptr;
    bool is_done = false;

    Fiber()
        : memory(static_cast<uint8_t *>(mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE,
                                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)))
    {
        if (memory == MAP_FAILED || mprotect(memory, GUARD_BYTES, PROT_NONE) != 0)
            throw std::bad_alloc();
    }
    ~Fiber()
    {
        forget_frames();
        munmap(memory, STACK_BYTES);
    }
    /* A fiber is left where it ended: what ASan knows of the frames from there on is not true for
     * what comes next. Those of functions that have returned it has forgotten itself. */
    void forget_frames()
    {
#if defined(__SANITIZE_ADDRESS__)
        if (stack != nullptr)
            __asan_unpoison_memory_region(
                stack, static_cast<size_t>(memory + STACK_BYTES - static_cast<uint8_t *>(stack)));
#endif
    }
};

/* What the lanes of a warp have brought. A lane can bring its next only when all have come, and so
 * have read what was before the last: two are enough. */
struct BlockEmulator::Warp {
    Kind kind = Kind::NONE;
    uint32_t n_here = 0, n_lanes = 0, generation = 0;
    std::vector<uint32_t> waiting;
    Value in[32], out[2][32];
};

BlockEmulator::BlockEmulator(uint32_t n_threads, size_t shared_bytes, uint64_t seed)
    : n_threads_(n_threads), seed_(seed * 2654435761u + 88172645463325252u),
      shared_bytes_(shared_bytes)
{
    for (uint32_t i = 0; i < n_threads; i++)
        fibers_.push_back(std::make_unique<Fiber>());
    warps_.resize((n_threads + 31) / 32);
}

BlockEmulator::~BlockEmulator() = default;

uint64_t BlockEmulator::random()
{
    seed_ ^= seed_ << 13;
    seed_ ^= seed_ >> 7;
    seed_ ^= seed_ << 17;
    return seed_;
}

void BlockEmulator::run(uint32_t n_blocks, const std::function<void(EmulatedCta &)> &body,
                        uint32_t n_passes)
{
    std::vector<uint32_t> order(n_blocks * n_passes);
    for (uint32_t i = 0; i < order.size(); i++) {
        order[i] = i;
        std::swap(order[i], order[random() % (i + 1)]);
    }
    body_ = &body;
    for (const uint32_t i : order)
        run_block(i % n_blocks, i / n_blocks);
}

void BlockEmulator::run_block(uint32_t block, uint32_t pass)
{
    shared_.reset(new uint8_t[shared_bytes_]);
    for (size_t i = 0; i < shared_bytes_; i += sizeof(uint64_t)) {
        const uint64_t any = random();
        memcpy(&shared_[i], &any, std::min(sizeof any, shared_bytes_ - i));
    }
    runnable_.clear();
    at_barrier_.clear();
    n_alive_ = n_threads_;
    error_ = nullptr;
    for (Warp &warp : warps_)
        warp = Warp();
    for (uint32_t i = 0; i < n_threads_; i++) {
        Fiber &fiber = *fibers_[i];
        fiber.cta = EmulatedCta();
        fiber.cta.emulator_ = this;
        fiber.cta.block_ = block;
        fiber.cta.pass_ = pass;
        fiber.cta.thread_ = i;
        fiber.is_done = false;
        fiber.fake_stack = nullptr;
        fiber.forget_frames();
        void **top = reinterpret_cast<void **>(fiber.memory + STACK_BYTES) - 1;
        *--top = reinterpret_cast<void *>(&BlockEmulator::start);
        top -= 6;
        memset(top, 0, 6 * sizeof *top);
        fiber.stack = top;
        warps_[i / 32].n_lanes++;
        runnable_.push_back(i);
    }
    {
        const OneThread all_lanes;
        while (!runnable_.empty() && error_ == nullptr) {
            const size_t i = random() % runnable_.size();
            current_ = runnable_[i];
            runnable_[i] = runnable_.back();
            runnable_.pop_back();
            enter();
        }
    }
    if (error_ != nullptr)
        std::rethrow_exception(error_);
    if (n_alive_ > 0)
        throw std::logic_error("threads wait for others that never come");
}

/* From the scheduler to the current fiber, and back when that waits or ends. */
void BlockEmulator::enter()
{
    Fiber &fiber = *fibers_[current_];
    running = this;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&scheduler_fake_stack_, fiber.memory, STACK_BYTES);
#endif
    cg_test_switch_stack(&scheduler_stack_, fiber.stack);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(scheduler_fake_stack_, nullptr, nullptr);
#endif
}

void BlockEmulator::leave_to_scheduler()
{
    Fiber &fiber = *fibers_[current_];
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(fiber.is_done ? nullptr : &fiber.fake_stack, scheduler_bottom_,
                                   scheduler_bytes_);
#endif
    cg_test_switch_stack(&fiber.stack, scheduler_stack_);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fiber.fake_stack, &scheduler_bottom_, &scheduler_bytes_);
#endif
}

void BlockEmulator::start()
{
    BlockEmulator *e = running;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &e->scheduler_bottom_, &e->scheduler_bytes_);
#endif
    Fiber &fiber = *e->fibers_[e->current_];
    try {
        (*e->body_)(fiber.cta);
        if (!fiber.cta.copies_.empty())
            throw std::logic_error("a thread ends before its copies have arrived");
    } catch (...) {
        e->error_ = std::current_exception();
    }
    fiber.is_done = true;
    Warp &warp = e->warps_[fiber.cta.thread_ / 32];
    warp.n_lanes--;
    e->n_alive_--;
    if (warp.n_here > 0)
        e->error_ = std::make_exception_ptr(
            std::logic_error("a lane ends while others of its warp wait for it"));
    e->barrier_reached();
    e->leave_to_scheduler();
    abort(); /* it is never entered again */
}

void BlockEmulator::wait()
{
    leave_to_scheduler();
}

/* Threads that have ended are not waited for. */
void BlockEmulator::barrier_reached()
{
    if (at_barrier_.size() < n_alive_ || at_barrier_.empty())
        return;
    runnable_.insert(runnable_.end(), at_barrier_.begin(), at_barrier_.end());
    at_barrier_.clear();
}

void EmulatedCta::barrier()
{
    emulator_->at_barrier_.push_back(thread_);
    emulator_->barrier_reached();
    emulator_->wait();
}

/* Waits until all lanes of the warp have come for the same thing. Returns which of the two results
 * is its. */
uint32_t BlockEmulator::meet(EmulatedCta &cta, Kind kind, const Value &value)
{
    Warp &warp = warps_[cta.thread_ / 32];
    if (warp.n_here > 0 && warp.kind != kind)
        throw std::logic_error("lanes of a warp wait for different things");
    if (warp.n_lanes != 32)
        throw std::logic_error("a lane waits for others of its warp that have ended");
    warp.kind = kind;
    warp.in[cta.lane()] = value;
    const uint32_t generation = warp.generation;
    if (++warp.n_here < 32) {
        warp.waiting.push_back(cta.thread_);
        wait();
        return generation % 2;
    }
    finish(&warp);
    warp.n_here = 0;
    warp.generation++;
    runnable_.insert(runnable_.end(), warp.waiting.begin(), warp.waiting.end());
    warp.waiting.clear();
    return generation % 2;
}

namespace
{

/* PTX, "Matrix Fragments for mma.m16n8k32", .s8: where lane and register i's byte k lie. Tests of
 * the kernels are mostly this; so that sanitizers need not look at each of 4,096 products of local
 * arrays, they look at none. */
__attribute__((optimize("O3"), no_sanitize("address", "undefined", "thread"))) void
multiply_fragments(const uint32_t a[32][4], const uint32_t b[32][2], int32_t out[32][4])
{
    int16_t rows[16][32], columns[8][32];
    for (unsigned lane = 0; lane < 32; lane++) {
        for (unsigned k = 0; k < 4; k++) {
            const unsigned at = lane % 4 * 4 + k;
            for (unsigned i = 0; i < 4; i++)
                rows[lane / 4 + i % 2 * 8][at + i / 2 * 16] =
                    static_cast<int8_t>(a[lane][i] >> (8 * k));
            for (unsigned i = 0; i < 2; i++)
                columns[lane / 4][at + i * 16] = static_cast<int8_t>(b[lane][i] >> (8 * k));
        }
    }
    for (unsigned lane = 0; lane < 32; lane++) {
        for (unsigned i = 0; i < 4; i++) {
            const int16_t *row = rows[lane / 4 + i / 2 * 8],
                          *column = columns[lane % 4 * 2 + i % 2];
            int32_t sum = 0;
            for (unsigned k = 0; k < 32; k++)
                sum += row[k] * column[k];
            out[lane][i] = sum;
        }
    }
}

} // namespace

void BlockEmulator::finish(Warp *warp)
{
    Value *out = warp->out[warp->generation % 2];
    if (warp->kind == Kind::BALLOT) {
        uint32_t bits = 0;
        for (unsigned lane = 0; lane < 32; lane++)
            bits |= warp->in[lane].of[0] << lane;
        for (unsigned lane = 0; lane < 32; lane++)
            out[lane].of[0] = bits;
    } else {
        uint32_t a[32][4], b[32][2];
        int32_t sums[32][4];
        for (unsigned lane = 0; lane < 32; lane++) {
            memcpy(a[lane], warp->in[lane].of, sizeof a[lane]);
            memcpy(b[lane], warp->in[lane].of + 4, sizeof b[lane]);
        }
        multiply_fragments(a, b, sums);
        for (unsigned lane = 0; lane < 32; lane++)
            memcpy(out[lane].of, sums[lane], sizeof sums[lane]);
    }
}

uint32_t EmulatedCta::ballot(bool bit)
{
    const uint32_t which = emulator_->meet(*this, BlockEmulator::Kind::BALLOT, {{bit}});
    return emulator_->warps_[thread_ / 32].out[which][lane()].of[0];
}

void EmulatedCta::multiply(uint32_t d[4], const uint32_t a[4], const uint32_t b[2])
{
    const uint32_t which = emulator_->meet(*this, BlockEmulator::Kind::MULTIPLY,
                                           {{a[0], a[1], a[2], a[3], b[0], b[1]}});
    for (unsigned i = 0; i < 4; i++)
        d[i] += emulator_->warps_[thread_ / 32].out[which][lane()].of[i];
}

void *EmulatedCta::shared()
{
    return emulator_->shared_.get();
}

void EmulatedCta::copy16(void *to, const void *from, bool is_there)
{
    if (reinterpret_cast<uintptr_t>(to) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0)
        throw std::logic_error("a copy that is not aligned");
    copies_.emplace_back(to, is_there ? from : nullptr);
}

void EmulatedCta::clear16(void *to)
{
    memset(to, 0, 16);
}

/* The first copies that are on their way. */
void EmulatedCta::arrive(size_t n_copies)
{
    for (size_t i = 0; i < n_copies; i++) {
        const auto &copy = copies_[i];
        if (copy.second != nullptr)
            memcpy(copy.first, copy.second, 16);
        else
            memset(copy.first, 0, 16);
    }
    copies_.erase(copies_.begin(), copies_.begin() + static_cast<std::ptrdiff_t>(n_copies));
    n_in_groups_ -= std::min(n_in_groups_, n_copies);
    last_group_ -= std::min(last_group_, n_copies);
}

void EmulatedCta::wait_copies()
{
    arrive(copies_.size());
}

void EmulatedCta::end_copies()
{
    last_group_ = n_in_groups_;
    n_in_groups_ = copies_.size();
}

void EmulatedCta::wait_older_copies()
{
    arrive(last_group_);
}

void EmulatedCta::load16(uint32_t out[4], const void *from) const
{
    if (reinterpret_cast<uintptr_t>(from) % 16 != 0)
        throw std::logic_error("a load that is not aligned");
    memcpy(out, from, 16);
}

void EmulatedCta::store_shared16(void *to, const uint32_t from[4]) const
{
    if (reinterpret_cast<uintptr_t>(to) % 16 != 0)
        throw std::logic_error("a store that is not aligned");
    memcpy(to, from, 16);
}

void EmulatedCta::raise(uint32_t *status, uint32_t value)
{
    *status = value > *status ? value : *status;
}

} // namespace cg_test
