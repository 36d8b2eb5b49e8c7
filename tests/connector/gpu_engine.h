// tests/connector/gpu_engine.h - engine.h with its blocks in the memory of a GPU that a stand-in
// plays (tests/cuda/standin.h).
#ifndef CG_TESTS_CONNECTOR_GPU_ENGINE_H
#define CG_TESTS_CONNECTOR_GPU_ENGINE_H
#include "tests/connector/engine.h"
#include "tests/cuda/standin.h"

#include <dlfcn.h>

#include <memory>

namespace cg_test
{

inline const cg_standin &standin()
{
    static const cg_standin *control = [] {
        void *library = dlopen(CG_TEST_CUDA_STANDIN, RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr)
            throw std::runtime_error(dlerror());
        using Entry = const cg_standin *();
        return reinterpret_cast<Entry *>(dlsym(library, "cg_standin_control"))();
    }();
    return *control;
}

// The memory and the stream of an engine.
struct Gpu {
    explicit Gpu(size_t n_bytes)
        : memory(static_cast<char *>(standin().engine_malloc(n_bytes))),
          stream(standin().engine_stream())
    {
    }
    ~Gpu()
    {
        standin().engine_stream_destroy(stream);
        standin().engine_free(memory);
    }
    Gpu(const Gpu &) = delete;
    Gpu &operator=(const Gpu &) = delete;
    char *memory;
    void *stream;
};

// Emulated kernels are slow, and a save that waits for them is no store that hangs.
inline std::string gpu_config(const std::string &more)
{
    const bool has_timeout = more.find("save_timeout_ms") != std::string::npos;
    return std::string(has_timeout ? "" : "\"save_timeout_ms\": 600000, ") +
           std::string("\"gpu_staging_mib\": 1, \"ttft_budget_ms\": 600000, \"gpu_library\": \"") +
           CG_TEST_CUDA_STANDIN + "\"" + (more.empty() ? "" : ", " + more);
}

// `memory` is the test's copy of the blocks: what was put() there, or got from there by get().
class GpuEngine : private Gpu, public Engine
{
  public:
    using Engine::memory;
    using Gpu::stream;
    explicit GpuEngine(const Store &store, const std::string &more = "",
                       Placement::Order order = Placement::TOKENS_FIRST, size_t element = 2,
                       Heads heads = Heads(), uint32_t ordinal = 0)
        : Gpu(store.spec.n_layers *
              layer_bytes(store.spec, heads.n > 0 ? heads.n : store.spec.n_kv_heads, element)),
          Engine(store, gpu_config(more), heads, {order, Gpu::memory, ordinal})
    {
        after_kind = CACHEGEN_AFTER_STREAM;
        after = stream;
    }
    ~GpuEngine()
    {
        // While the memory is there. The base's destructor closes again, which does nothing.
        cachegen_close(c);
        c = nullptr;
    }
    // Enqueue on the engine's stream: the blocks become `memory`.
    void put()
    {
        standin().engine_write(Gpu::memory, memory.data(), memory.size(), stream);
    }
    // `memory` becomes the blocks.
    void get()
    {
        standin().engine_read(memory.data(), Gpu::memory, memory.size(), stream);
    }
    cachegen_status begin_save(const Tokens &tokens, const char *context, cachegen_save **op)
    {
        prefill(tokens);
        put();
        settle();
        return save_start(tokens, 0, static_cast<uint32_t>(tokens.size()), true, context, 0, op);
    }
    cachegen_status save(const Tokens &tokens, const char *context = nullptr)
    {
        cachegen_save *op;
        const cachegen_status status = begin_save(tokens, context, &op);
        return status == CACHEGEN_OK ? finish(op).status : status;
    }
    // Loads into poisoned blocks; then `memory` is what is in them.
    Load load(const Tokens &tokens, uint32_t from = 0)
    {
        Load l;
        l.hit = look_up(tokens, from);
        poison();
        put();
        settle();
        cachegen_load *op;
        l.progress.struct_size = sizeof l.progress;
        if ((l.status = load_start(from, std::max(from, l.hit.hit_tokens), &op)) == CACHEGEN_OK) {
            EXPECT_EQ(wait_for(c, [&] { return cachegen_load_poll(op, &l.progress); }),
                      CACHEGEN_OK);
            l.status = l.progress.status;
            cachegen_load_free(op);
        }
        get();
        return l;
    }
    // What is enqueued is over, where the library will not be told of it.
    void settle()
    {
        if (after_kind != CACHEGEN_AFTER_STREAM || after != stream)
            get();
    }
    cachegen_info info() const
    {
        cachegen_info i = {};
        i.struct_size = sizeof i;
        EXPECT_EQ(cachegen_get_info(c, &i), CACHEGEN_OK);
        return i;
    }
};

// The largest between the bf16 elements of two engines' blocks, which are laid out alike.
inline double difference(const Engine &a, const Engine &b)
{
    const auto in_a = to_floats(Bytes(a.memory.begin(), a.memory.end()), CG_DTYPE_BF16),
               in_b = to_floats(Bytes(b.memory.begin(), b.memory.end()), CG_DTYPE_BF16);
    double most = in_a.size() == in_b.size() ? 0 : INFINITY;
    for (size_t i = 0; i < in_a.size() && i < in_b.size(); i++)
        most = std::max(most, std::fabs(double{in_a[i]} - in_b[i]));
    return most;
}
// Projections of a GPU and of a CPU are rounded otherwise, so that a symbol here and there is
// another, by one. Wrong coefficients are off by the elements themselves, which are up to 2.
const double MOST_DIFFERENCE[] = {0, 0.25, 0.5, 1.2};

} // namespace cg_test
#endif
