// An engine in small on real KV, for measuring loads over links: it saves a context into a store
// and loads it from there, by the ABI, as a serving engine does. link_bench.py drives it; see
// there.
//
// usage: link_driver save KV CONFIG N_CONTEXTS
//        link_driver load KV CONFIG N_CONTEXTS N_ROUNDS BUDGET_MS LEVEL [warm]
//
// KV: capture_kv.py's file. CONFIG: cachegen_open()'s JSON. The N_CONTEXTS contexts are the same
// tokens under different salts: in a store they are different files. `load` asks for all of them at
// once, N_ROUNDS times, with a new connector each time; LEVEL -1: the policy's. It prints a JSON
// line for each request; times in seconds, from before the look-up; kv_hash is of its blocks, equal
// where what was loaded is. A round begins with a line "ready", when the connector is open and has
// read its profile; it goes on when a line comes on the standard input. With `warm` it then loads
// one more context, of which the store has one more, prints nothing of that but a second "ready",
// and waits for another line: so the connector knows the link, and its threads are there.
#include "connector/cachegen.h"

#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace
{

constexpr uint32_t BLOCK = 16; // tokens

using Clock = std::chrono::steady_clock;

double s_since(Clock::time_point start)
{
    return std::chrono::duration<double>(Clock::now() - start).count();
}

void check(cachegen_status status, const char *what)
{
    if (status != CACHEGEN_OK)
        throw std::runtime_error(std::string(what) + ": " + cachegen_strerror(status));
}

// A context: its tokens, and K and V as [n_layers][2][n_tokens][n_kv_heads][head_dim].
struct Context {
    explicit Context(const std::string &path)
    {
        std::ifstream in(path, std::ios::binary);
        uint32_t n = 0;
        in.read(reinterpret_cast<char *>(&n), sizeof n);
        tokens.resize(n);
        in.read(reinterpret_cast<char *>(tokens.data()), n * sizeof tokens[0]);
        kv.assign(std::istreambuf_iterator<char>(in), {});
        if (n == 0 || kv.empty())
            throw std::runtime_error(path + ": no context");
    }
    uint32_t n_tokens() const
    {
        return static_cast<uint32_t>(tokens.size());
    }
    uint32_t n_blocks() const
    {
        return n_tokens() / BLOCK + 1;
    }
    std::vector<uint32_t> tokens;
    std::vector<char> kv;
};

// Blocks are [layer][block][plane][head][token][dim]; those of one context follow each other.
class Engine
{
  public:
    Engine(const Context &context, const std::string &config, uint32_t n_contexts)
        : context_(context), n_contexts_(n_contexts)
    {
        char error[512];
        if (cachegen_open(config.data(), config.size(), &c, error, sizeof error) != CACHEGEN_OK)
            throw std::runtime_error(error);
        info.struct_size = sizeof info;
        check(cachegen_get_info(c, &info), "info");
        element_bytes_ = info.dtype == 3 ? 4 : 2;
        const uint64_t elements = uint64_t{2} * info.n_layers * info.n_kv_heads * info.head_dim;
        if (context.kv.size() != elements * element_bytes_ * context.n_tokens())
            throw std::runtime_error("the KV is of another model");
        plane_bytes_ = uint64_t{BLOCK} * info.n_kv_heads * info.head_dim * element_bytes_;
        register_blocks();
    }
    ~Engine()
    {
        cachegen_close(c);
    }
    Engine(const Engine &) = delete;
    Engine &operator=(const Engine &) = delete;

    void prefill(uint32_t index)
    {
        const char *from = context_.kv.data();
        const uint64_t row = uint64_t{info.head_dim} * element_bytes_;
        for (uint32_t layer = 0; layer < info.n_layers; layer++)
            for (uint32_t plane = 0; plane < 2; plane++)
                for (uint32_t token = 0; token < context_.n_tokens(); token++)
                    for (uint32_t head = 0; head < info.n_kv_heads; head++, from += row) {
                        const uint64_t block =
                            uint64_t{index} * context_.n_blocks() + token / BLOCK;
                        memcpy(&memory_[((layer * n_blocks() + block) * 2 + plane) * plane_bytes_ +
                                        (head * BLOCK + token % BLOCK) * row],
                               from, row);
                    }
    }
    std::vector<int64_t> table(uint32_t index) const
    {
        std::vector<int64_t> blocks(context_.n_blocks());
        std::iota(blocks.begin(), blocks.end(), int64_t{index} * context_.n_blocks());
        return blocks;
    }
    cachegen_request request(const std::string &salt, int level, double budget_s) const
    {
        cachegen_request r = {};
        r.struct_size = sizeof r;
        r.abi_version = CACHEGEN_ABI_VERSION;
        r.tokens = context_.tokens.data();
        r.n_tokens = context_.n_tokens();
        r.salt = salt.data();
        r.salt_bytes = static_cast<uint32_t>(salt.size());
        r.level_plus_1 = static_cast<uint32_t>(level + 1);
        r.ttft_budget_ns = static_cast<uint64_t>(budget_s * 1e9);
        return r;
    }
    // Of what lies in a context's blocks.
    uint64_t hash(uint32_t index) const
    {
        const uint64_t bytes = context_.n_blocks() * 2 * plane_bytes_;
        uint64_t hash = 0xcbf29ce484222325; // FNV-1a
        for (uint32_t layer = 0; layer < info.n_layers; layer++) {
            const char *at = &memory_[(layer * uint64_t{n_contexts_} + index) * bytes];
            for (uint64_t i = 0; i < bytes; i++)
                hash = (hash ^ static_cast<uint8_t>(at[i])) * 0x100000001b3;
        }
        return hash;
    }
    void wait() const
    {
        pollfd fd = {cachegen_eventfd(c), POLLIN, 0};
        uint64_t n;
        if (poll(&fd, 1, 100) > 0 && read(fd.fd, &n, sizeof n) < 0)
            return;
    }

    cachegen *c = nullptr;
    uint32_t kv_id = 0;
    cachegen_info info = {};

  private:
    uint64_t n_blocks() const
    {
        return uint64_t{n_contexts_} * context_.n_blocks();
    }
    void register_blocks()
    {
        const uint64_t layer_bytes = n_blocks() * 2 * plane_bytes_;
        std::vector<void *> base;
        memory_.assign(info.n_layers * layer_bytes, 0);
        for (uint32_t layer = 0; layer < info.n_layers; layer++)
            base.push_back(&memory_[layer * layer_bytes]);
        cachegen_kv_layout l = {};
        l.struct_size = sizeof l;
        l.abi_version = CACHEGEN_ABI_VERSION;
        l.n_layers = info.n_layers;
        l.n_kv_heads = info.n_kv_heads;
        l.head_dim = info.head_dim;
        l.dtype = info.dtype;
        l.block_tokens = BLOCK;
        l.n_blocks = n_blocks();
        l.base = base.data();
        l.offset_bytes[1] = static_cast<int64_t>(plane_bytes_);
        l.block_stride = static_cast<int64_t>(2 * plane_bytes_);
        for (int plane = 0; plane < 2; plane++) {
            l.dim_stride[plane] = static_cast<int64_t>(element_bytes_);
            l.token_stride[plane] = l.dim_stride[plane] * info.head_dim;
            l.head_stride[plane] = l.token_stride[plane] * BLOCK;
        }
        check(cachegen_register_kv(c, &l, &kv_id), "blocks");
    }
    const Context &context_;
    uint32_t n_contexts_;
    uint64_t element_bytes_ = 0, plane_bytes_ = 0;
    std::vector<char> memory_;
};

std::string salt_of(uint32_t index)
{
    return "context " + std::to_string(index);
}

void save(const Context &context, const std::string &config, uint32_t n_contexts)
{
    Engine engine(context, config, 1);
    engine.prefill(0);
    const std::vector<int64_t> table = engine.table(0);
    for (uint32_t i = 0; i < n_contexts; i++) {
        const std::string salt = salt_of(i);
        cachegen_save_request r = {};
        r.struct_size = sizeof r;
        r.abi_version = CACHEGEN_ABI_VERSION;
        r.request = engine.request(salt, -1, 0);
        r.kv_id = engine.kv_id;
        r.to_token = context.n_tokens();
        r.is_last = 1;
        r.n_blocks = static_cast<uint32_t>(table.size());
        r.block_table = table.data();
        cachegen_save *op;
        cachegen_progress p = {};
        p.struct_size = sizeof p;
        check(cachegen_save_start(engine.c, &r, &op), "save");
        while (cachegen_save_poll(op, &p) == CACHEGEN_AGAIN)
            engine.wait();
        cachegen_save_free(op);
        check(p.status, "save");
        if (p.loaded_tokens != context.n_tokens())
            throw std::runtime_error("not all was saved");
    }
}

// A request: look-up, then load.
class Request
{
  public:
    Request(Engine *engine, uint32_t index, int level, double budget_s)
        : engine_(engine), index_(index), salt_(salt_of(index)), begun_(Clock::now())
    {
        const cachegen_request r = engine->request(salt_, level, budget_s);
        check(cachegen_lookup_start(engine->c, &r, 0, &lookup_), "look-up");
    }
    ~Request()
    {
        cachegen_lookup_free(lookup_);
        cachegen_load_free(load_);
    }
    Request(const Request &) = delete;
    Request &operator=(const Request &) = delete;

    bool is_done()
    {
        hit_.struct_size = sizeof hit_;
        progress_.struct_size = sizeof progress_;
        if (load_ == nullptr && cachegen_lookup_poll(lookup_, &hit_) == CACHEGEN_OK)
            start();
        if (load_ == nullptr || total_s_ > 0)
            return total_s_ > 0;
        if (cachegen_load_poll(load_, &progress_) == CACHEGEN_OK)
            total_s_ = s_since(begun_);
        return total_s_ > 0;
    }
    void print(uint32_t round) const
    {
        const cachegen_progress &p = progress_;
        printf("{\"round\": %u, \"context\": %u, \"status\": %d, \"lookup_s\": %.6f, "
               "\"total_s\": %.6f, \"hit_tokens\": %u, \"loaded_tokens\": %u, \"bytes\": %llu, "
               "\"dropped\": %llu, \"chunks_at\": [%u, %u, %u, %u], \"predicted_kl\": %.6f, "
               "\"kv_hash\": \"%016llx\"}\n",
               round, index_, p.status, lookup_s_, total_s_, hit_.hit_tokens, p.loaded_tokens,
               static_cast<unsigned long long>(p.bytes_read),
               static_cast<unsigned long long>(p.bytes_dropped), p.chunks_at[0], p.chunks_at[1],
               p.chunks_at[2], p.chunks_at[3], static_cast<double>(p.predicted_kl_micronats) / 1e6,
               static_cast<unsigned long long>(engine_->hash(index_)));
    }

  private:
    void start()
    {
        lookup_s_ = s_since(begun_);
        size_t n = 0;
        check(cachegen_lookup_plan(lookup_, nullptr, &n), "plan");
        std::vector<char> plan(n);
        check(cachegen_lookup_plan(lookup_, plan.data(), &n), "plan");
        const std::vector<int64_t> table = engine_->table(index_);
        cachegen_load_request r = {};
        r.struct_size = sizeof r;
        r.abi_version = CACHEGEN_ABI_VERSION;
        r.kv_id = engine_->kv_id;
        r.to_token = hit_.hit_tokens;
        r.n_blocks = static_cast<uint32_t>(table.size());
        r.block_table = table.data();
        r.plan = plan.data();
        r.plan_bytes = n;
        check(cachegen_load_start(engine_->c, &r, &load_), "load");
    }
    Engine *engine_;
    uint32_t index_;
    std::string salt_;
    Clock::time_point begun_;
    cachegen_lookup *lookup_ = nullptr;
    cachegen_load *load_ = nullptr;
    cachegen_hit hit_ = {};
    cachegen_progress progress_ = {};
    double lookup_s_ = 0, total_s_ = 0;
};

using Requests = std::vector<std::unique_ptr<Request>>;

// Contexts [begin, end), all at once.
Requests load_all(Engine *engine, uint32_t begin, uint32_t end, int level, double budget_s)
{
    Requests requests;
    for (uint32_t i = begin; i < end; i++)
        requests.push_back(std::make_unique<Request>(engine, i, level, budget_s));
    for (bool all = false; !all;) {
        all = true;
        for (auto &request : requests)
            all = request->is_done() && all;
        if (!all)
            engine->wait();
    }
    return requests;
}

// False: nobody wants it to go on.
bool goes_on()
{
    std::string line;
    puts("ready");
    fflush(stdout);
    return static_cast<bool>(std::getline(std::cin, line));
}

void load(const Context &context, const std::string &config, uint32_t n_contexts, uint32_t n_rounds,
          double budget_s, int level, bool is_warm)
{
    for (uint32_t round = 0; round < n_rounds; round++) {
        Engine engine(context, config, n_contexts + is_warm);
        if (!goes_on())
            return;
        load_all(&engine, n_contexts, n_contexts + is_warm, level, budget_s);
        if (is_warm && !goes_on())
            return;
        for (auto &request : load_all(&engine, 0, n_contexts, level, budget_s))
            request->print(round);
        fflush(stdout);
    }
}

} // namespace

int main(int argc, char **argv)
try {
    const std::string mode = argc > 1 ? argv[1] : "";
    if (!(mode == "save" && argc == 5) && !(mode == "load" && (argc == 8 || argc == 9))) {
        fprintf(stderr,
                "usage: %s save KV CONFIG N_CONTEXTS\n"
                "       %s load KV CONFIG N_CONTEXTS N_ROUNDS BUDGET_MS LEVEL [warm]\n",
                argv[0], argv[0]);
        return 2;
    }
    const Context context(argv[2]);
    const uint32_t n_contexts = static_cast<uint32_t>(std::atoi(argv[4]));
    if (mode == "save")
        save(context, argv[3], n_contexts);
    else
        load(context, argv[3], n_contexts, static_cast<uint32_t>(std::atoi(argv[5])),
             std::atof(argv[6]) / 1e3, std::atoi(argv[7]), argc == 9);
    return 0;
} catch (const std::exception &error) {
    fprintf(stderr, "%s\n", error.what());
    return 1;
}
