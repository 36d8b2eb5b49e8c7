// tests/connector/engine.h - an engine in small: a paged KV cache whose content follows from the
// tokens, a store in a temporary directory, and the calls that an engine makes. Everything goes
// through the ABI, as in a real one.
#ifndef CG_TESTS_CONNECTOR_ENGINE_H
#define CG_TESTS_CONNECTOR_ENGINE_H
#include "codec/codec.h"
#include "connector/cachegen.h"
#include "iouring/io.h"
#include "iouring/tree.h"
#include "tests/codec/profile_maker.h"
#include "tests/iouring/temp_dir.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <functional>
#include <numeric>

namespace cg_test
{

using Tokens = std::vector<uint32_t>;

inline std::string hex(const cg_fingerprint &fingerprint)
{
    char text[CG_KEY_HEX_BYTES];
    cg_key key;
    memcpy(key.bytes, fingerprint.bytes, sizeof key.bytes);
    cg_key_to_hex(&key, text);
    return text;
}

// As the profile tool makes them: levels nest.
inline ProfileSpec nesting_spec()
{
    ProfileSpec spec;
    spec.nests = true;
    return spec;
}

// A store with model.json, and with the profile of spec unless told otherwise.
struct Store {
    explicit Store(bool with_profile = false, const ProfileSpec &chosen = nesting_spec())
        : spec(chosen)
    {
        dir.write("m/model.json", model_json());
        if (with_profile) {
            const Bytes bytes = make_profile_bytes(spec);
            profile = open_profile(bytes);
            const std::string name = hex(*cg_profile_fingerprint(profile.get()));
            dir.write("m/profiles/" + name + ".cgp", bytes);
            dir.write("m/profiles/default", name + "\n");
        }
    }
    std::string model_json() const
    {
        return "{\"version\": 1, \"n_layers\": " + std::to_string(spec.n_layers) +
               ", \"n_kv_heads\": " + std::to_string(spec.n_kv_heads) +
               ", \"head_dim\": " + std::to_string(spec.head_dim) +
               ", \"dtype\": \"bf16\", \"model_fingerprint\": \"" + hex(model_of(spec)) +
               "\", \"rope\": null}";
    }
    // Objects at a level, in the order of their paths.
    std::vector<std::string> chunks(const std::string &level) const
    {
        std::vector<std::string> found;
        for (const std::string &path : dir.files("m/objects"))
            if (path.size() > 5 && path.substr(path.size() - 5) == level + ".kv")
                found.push_back(path);
        std::sort(found.begin(), found.end());
        return found;
    }
    ProfileSpec spec;
    Profile profile;
    TempDir dir;
};

// Polls op until it is done, sleeping on the connector's eventfd; fails the test after ten
// minutes: kernels that are emulated under a sanitizer are slow.
template <typename Poll> inline cachegen_status wait_for(cachegen *c, Poll poll_op)
{
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(600);
    cachegen_status status;
    while ((status = poll_op()) == CACHEGEN_AGAIN && std::chrono::steady_clock::now() < deadline) {
        pollfd fd = {cachegen_eventfd(c), POLLIN, 0};
        uint64_t events;
        if (poll(&fd, 1, 100) > 0 && read(fd.fd, &events, sizeof events) < 0)
            errno = 0; // another waiter was faster
    }
    return status;
}

// What a cut save still reads of blocks that are overwritten is thrown away. ThreadSanitizer would
// report it all the same: under it, blocks are overwritten when nothing is read.
#if defined(__SANITIZE_THREAD__)
constexpr bool SEES_RACES = true;
#else
constexpr bool SEES_RACES = false;
#endif

struct Load {
    cachegen_hit hit = {};
    cachegen_progress progress = {};
    std::vector<uint8_t> levels; // of the chunks that were delivered
    cachegen_status status = -1; // of the start, then of the load
};

// Where blocks lie, and how: as on vLLM's CPU, or as on its GPUs, where K and V of a token and head
// are one row.
struct Placement {
    enum Order { CPU, HEADS_FIRST, TOKENS_FIRST } order = CPU;
    char *gpu_memory = nullptr; // NULL: Engine::memory. Else that is a copy for the test
    uint32_t gpu = 0;           // where that is
};

// The KV heads that a rank of a tensor-parallel engine has; n == 0: all.
struct Heads {
    uint32_t first = 0, n = 0;
};

class Engine
{
  public:
    enum { BLOCK_TOKENS = 16, N_BLOCKS = 40 };
    float amplitude = 1;                // of what the model computes
    uint32_t spoilt_token = UINT32_MAX; // prefill() leaves a NaN in its K
    explicit Engine(const Store &store, const std::string &more = "", Heads heads = Heads(),
                    const Placement &placement = {})
        : Engine(store.dir.path, store.spec, more, heads, placement)
    {
    }
    Engine(const std::string &root, const ProfileSpec &spec, const std::string &more,
           Heads heads = Heads(), const Placement &placement = {})
        : spec_(spec), heads_(heads)
    {
        if (heads_.n == 0)
            heads_.n = spec.n_kv_heads;
        std::string json = "{\"root\": \"" + root + "\", \"model\": \"m\", \"tail_multiple\": 8";
        if (more.find("chunk_tokens") == std::string::npos)
            json += ", \"chunk_tokens\": 32";
        // Unless told to it remembers nothing, and encodes also where a machine is busy.
        for (const char *key : {"negative_ttl_ms", "positive_ttl_ms", "encode_nice"})
            if (more.find(key) == std::string::npos)
                json += std::string(", \"") + key + "\": 0";
        json += (more.empty() ? "" : ", " + more) + "}";
        open_status = cachegen_open(json.data(), json.size(), &c, error, sizeof error);
        if (open_status == CACHEGEN_OK) {
            cachegen_info info = {};
            info.struct_size = sizeof info;
            cachegen_get_info(c, &info);
            dtype_ = static_cast<uint8_t>(info.dtype);
            register_kv(placement);
        }
    }
    ~Engine()
    {
        cachegen_close(c);
    }
    Engine(const Engine &) = delete;
    Engine &operator=(const Engine &) = delete;

    size_t element_bytes() const
    {
        return cg_dtype_bytes(dtype_);
    }
    size_t layer_bytes() const
    {
        return layer_bytes(spec_, heads_.n, element_bytes());
    }
    static size_t layer_bytes(const ProfileSpec &spec, uint32_t n_heads, size_t element_bytes)
    {
        return N_BLOCKS * n_heads * 2 * BLOCK_TOKENS * spec.head_dim * element_bytes;
    }

    uint8_t *element(uint32_t layer, uint32_t plane, int64_t block, uint32_t t, uint32_t head,
                     uint32_t d)
    {
        return &memory[layer * layer_bytes() +
                       static_cast<size_t>(
                           layout_.offset_bytes[plane] + block * layout_.block_stride +
                           (head - heads_.first) * layout_.head_stride[plane] +
                           t * layout_.token_stride[plane] + d * layout_.dim_stride[plane])];
    }
    // What the model computes: an element depends on everything before it. Once for all elements:
    // value() of a token's hash.
    static std::vector<uint32_t> prefix_hashes(const Tokens &tokens)
    {
        std::vector<uint32_t> hashes;
        uint32_t hash = 1;
        for (const uint32_t token : tokens)
            hashes.push_back(hash = hash * 16777619u ^ token);
        return hashes;
    }
    void value(uint32_t prefix_hash, uint32_t layer, uint32_t plane, uint32_t head, uint32_t d,
               uint8_t *out) const
    {
        uint32_t x = prefix_hash ^ (((layer * 2 + plane) * 64 + head) * 1024 + d) * 2654435761u;
        x ^= x >> 15;
        x *= 2246822519u;
        x ^= x >> 13;
        const float f = amplitude * (static_cast<float>(x % 4096) / 1024 - 2);
        cg_put_le(out, element_bytes(), element_bits(dtype_, f));
    }
    template <typename Visit> void for_each(uint32_t from, uint32_t to, Visit visit)
    {
        for (uint32_t layer = 0; layer < spec_.n_layers; layer++)
            for (uint32_t plane = 0; plane < 2; plane++)
                for (uint32_t token = from; token < to; token++)
                    for (uint32_t head = heads_.first; head < heads_.first + heads_.n; head++)
                        for (uint32_t d = 0; d < spec_.head_dim; d++)
                            visit(token, layer, plane, head, d,
                                  element(layer, plane, table[token / BLOCK_TOKENS],
                                          token % BLOCK_TOKENS, head, d));
    }
    // Registers a further layout, of the same blocks as if they had these heads.
    cachegen_status register_more(const Heads &heads)
    {
        uint32_t id;
        cachegen_kv_layout layout = layout_;
        std::vector<void *> base(spec_.n_layers, memory.data());
        layout.base = base.data();
        layout.first_head = heads.first;
        layout.n_kv_heads = heads.n;
        return cachegen_register_kv(c, &layout, &id);
    }
    void prefill(const Tokens &tokens)
    {
        const std::vector<uint32_t> hashes = prefix_hashes(tokens);
        for_each(0, static_cast<uint32_t>(tokens.size()),
                 [&](uint32_t token, uint32_t layer, uint32_t plane, uint32_t head, uint32_t d,
                     uint8_t *at) { value(hashes[token], layer, plane, head, d, at); });
        if (spoilt_token < tokens.size())
            cg_put_le(element(0, 0, table[spoilt_token / BLOCK_TOKENS], spoilt_token % BLOCK_TOKENS,
                              heads_.first, 0),
                      element_bytes(), element_bits(dtype_, NAN));
    }
    void poison()
    {
        std::fill(memory.begin(), memory.end(), 0xcd);
    }
    bool is_poison() const
    {
        return std::all_of(memory.begin(), memory.end(), [](uint8_t b) { return b == 0xcd; });
    }
    // Largest difference from what the model computes, over tokens [from, to).
    double error_of(const Tokens &tokens, uint32_t from, uint32_t to)
    {
        const std::vector<uint32_t> hashes = prefix_hashes(tokens);
        double worst = 0;
        for_each(from, to,
                 [&](uint32_t token, uint32_t layer, uint32_t plane, uint32_t head, uint32_t d,
                     uint8_t *at) {
                     uint8_t want[4];
                     value(hashes[token], layer, plane, head, d, want);
                     if (memcmp(want, at, element_bytes()) == 0)
                         return;
                     const Bytes a(at, at + element_bytes()), b(want, want + element_bytes());
                     const double difference =
                         std::fabs(to_floats(a, dtype_)[0] - to_floats(b, dtype_)[0]);
                     worst = std::max(worst, difference > 0 ? difference : 1e-9);
                 });
        return worst;
    }
    // Of tokens [from, to) the one whose KV is farthest from what the model computes: the root of
    // the squared differences' sum over that of the squares. KV of another token has about the root
    // of 2, since values have nothing to do with each other.
    double relative_error_of(const Tokens &tokens, uint32_t from, uint32_t to)
    {
        const std::vector<uint32_t> hashes = prefix_hashes(tokens);
        std::vector<double> differences(to), squares(to);
        for_each(from, to,
                 [&](uint32_t token, uint32_t layer, uint32_t plane, uint32_t head, uint32_t d,
                     uint8_t *at) {
                     uint8_t bytes[4];
                     value(hashes[token], layer, plane, head, d, bytes);
                     const Bytes a(at, at + element_bytes()), b(bytes, bytes + element_bytes());
                     const double is = to_floats(a, dtype_)[0], want = to_floats(b, dtype_)[0];
                     differences[token] += (is - want) * (is - want);
                     squares[token] += want * want;
                 });
        double worst = 0;
        for (uint32_t token = from; token < to; token++)
            worst = std::max(worst, std::sqrt(differences[token] / squares[token]));
        return worst;
    }
    // Tokens [from, to) are still poison.
    bool is_untouched(uint32_t from, uint32_t to)
    {
        bool untouched = true;
        for_each(from, to, [&](uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint8_t *at) {
            for (size_t i = 0; i < element_bytes(); i++)
                untouched = untouched && at[i] == 0xcd;
        });
        return untouched;
    }

    cachegen_request request(const Tokens &tokens) const
    {
        cachegen_request r = {};
        r.struct_size = sizeof r;
        r.abi_version = CACHEGEN_ABI_VERSION;
        r.tokens = tokens.data();
        r.n_tokens = static_cast<uint32_t>(tokens.size());
        r.salt = salt.data();
        r.salt_bytes = static_cast<uint32_t>(salt.size());
        r.extra = extra.data();
        r.extra_bytes = static_cast<uint32_t>(extra.size());
        r.worst_level_plus_1 = worst_level_plus_1;
        r.level_plus_1 = level_plus_1;
        return r;
    }
    // What an engine calls in its steps; "in_step" may be another thread's.
    template <typename Call> cachegen_status within_step(Call call)
    {
        cachegen_status status = -1;
        in_step([&] { status = call(); });
        return status;
    }
    cachegen_status save_start(const Tokens &tokens, uint32_t from, uint32_t to, bool is_last,
                               const char *context, uint32_t prefix_level, cachegen_save **save)
    {
        cachegen_save_request r = {};
        r.struct_size = sizeof r;
        r.abi_version = CACHEGEN_ABI_VERSION;
        r.request = request(tokens);
        r.kv_id = kv_id;
        r.from_token = from;
        r.to_token = to;
        r.is_last = is_last;
        r.context = context;
        r.after_kind = after_kind;
        r.after = after;
        r.prefix_level = prefix_level;
        r.n_blocks = static_cast<uint32_t>(table.size());
        r.block_table = table.data();
        r.copy_later = copies_later;
        r.hold_later = holds_later;
        r.number = next_number != 0 ? next_number++ : 0;
        return within_step([&] { return cachegen_save_start(c, &r, save); });
    }
    // Whether the blocks may be overwritten.
    static bool is_copied(cachegen_save *save)
    {
        cachegen_progress p = {};
        p.struct_size = sizeof p;
        cachegen_save_poll(save, &p);
        return p.copied != 0;
    }
    void wait_copied(cachegen_save *save)
    {
        const auto poll_op = [&] { return is_copied(save) ? CACHEGEN_OK : CACHEGEN_AGAIN; };
        EXPECT_EQ(wait_for(c, poll_op), CACHEGEN_OK);
    }
    // Before the blocks of a save that was cut are overwritten.
    void wait_cut(cachegen_save *save)
    {
        EXPECT_TRUE(is_copied(save));
        cachegen_progress p = {};
        p.struct_size = sizeof p;
        if (SEES_RACES) {
            EXPECT_EQ(wait_for(c, [&] { return cachegen_save_poll(save, &p); }), CACHEGEN_OK);
        }
    }
    cachegen_progress finish(cachegen_save *save)
    {
        cachegen_progress p = {};
        p.struct_size = sizeof p;
        EXPECT_EQ(wait_for(c, [&] { return cachegen_save_poll(save, &p); }), CACHEGEN_OK);
        cachegen_save_free(save);
        return p;
    }
    // Prefills and saves a whole prompt. The status of the save.
    cachegen_status save(const Tokens &tokens, const char *context = nullptr,
                         uint32_t prefix_level = 0)
    {
        cachegen_save *op;
        prefill(tokens);
        const cachegen_status status = save_start(tokens, 0, static_cast<uint32_t>(tokens.size()),
                                                  true, context, prefix_level, &op);
        return status == CACHEGEN_OK ? finish(op).status : status;
    }
    cachegen_hit look_up(const Tokens &tokens, uint32_t from = 0)
    {
        const cachegen_request r = request(tokens);
        cachegen_lookup *op;
        cachegen_hit hit = {};
        hit.struct_size = sizeof hit;
        options.struct_size = sizeof options;
        options.abi_version = CACHEGEN_ABI_VERSION;
        const cachegen_status status =
            within_step([&] { return cachegen_lookup_start_with(c, &r, from, &options, &op); });
        EXPECT_EQ(status, CACHEGEN_OK) << cachegen_strerror(status);
        if (status != CACHEGEN_OK)
            return hit;
        const auto poll_op = [&] { return cachegen_lookup_poll(op, &hit); };
        EXPECT_EQ(wait_for(c, [&] { return within_step(poll_op); }), CACHEGEN_OK);
        in_step([&] {
            size_t n = 0;
            EXPECT_EQ(cachegen_lookup_plan(op, nullptr, &n), CACHEGEN_OK);
            plan.resize(n);
            EXPECT_EQ(cachegen_lookup_plan(op, plan.data(), &n), CACHEGEN_OK);
            cachegen_lookup_free(op);
        });
        return hit;
    }
    cachegen_status load_start(uint32_t from, uint32_t to, cachegen_load **load)
    {
        cachegen_load_request r = {};
        r.struct_size = sizeof r;
        r.abi_version = CACHEGEN_ABI_VERSION;
        r.kv_id = kv_id;
        r.from_token = from;
        r.to_token = to;
        r.n_blocks = static_cast<uint32_t>(table.size());
        r.block_table = table.data();
        r.plan = plan.data();
        r.plan_bytes = plan.size();
        r.after_kind = after_kind;
        r.after = after;
        r.request_id = request_id;
        return within_step([&] { return cachegen_load_start(c, &r, load); });
    }
    // What an engine does for a request: look up, then load the hit into fresh blocks.
    Load load(const Tokens &tokens, uint32_t from = 0)
    {
        Load l;
        l.hit = look_up(tokens, from);
        poison();
        cachegen_load *op;
        l.progress.struct_size = sizeof l.progress;
        const uint32_t to = std::max(from, l.hit.hit_tokens);
        if ((l.status = load_start(from, to, &op)) != CACHEGEN_OK)
            return l;
        EXPECT_EQ(wait_for(c, [&] { return cachegen_load_poll(op, &l.progress); }), CACHEGEN_OK);
        l.status = l.progress.status;
        l.levels.resize(cachegen_load_levels(op, nullptr, 0));
        cachegen_load_levels(op, l.levels.data(), static_cast<uint32_t>(l.levels.size()));
        cachegen_load_free(op);
        EXPECT_TRUE(is_untouched(0, from));
        return l;
    }
    // Of the last look-up's plan, to its end.
    cachegen_progress load_planned(uint32_t from, uint32_t to)
    {
        cachegen_load *op = nullptr;
        cachegen_progress p = {};
        p.struct_size = sizeof p;
        EXPECT_EQ(load_start(from, to, &op), CACHEGEN_OK);
        if (op != nullptr) {
            EXPECT_EQ(wait_for(c, [&] { return cachegen_load_poll(op, &p); }), CACHEGEN_OK);
        }
        cachegen_load_free(op);
        return p;
    }
    // Tokens [from, to) as they are in the blocks, to the save's end.
    cachegen_progress save_part(const Tokens &tokens, uint32_t from, uint32_t to)
    {
        cachegen_save *op;
        EXPECT_EQ(save_start(tokens, from, to, false, nullptr, 0, &op), CACHEGEN_OK);
        return finish(op);
    }
    cachegen_stats stats() const
    {
        cachegen_stats s = {};
        s.struct_size = sizeof s;
        EXPECT_EQ(cachegen_get_stats(c, &s), CACHEGEN_OK);
        return s;
    }

    cachegen *c = nullptr;
    cachegen_status open_status, register_status = -1;
    char error[512] = "";
    uint32_t kv_id = 99;
    std::vector<int64_t> table;
    std::vector<uint8_t> memory;
    Bytes plan;
    std::string salt, extra;
    uint32_t worst_level_plus_1 = 0, level_plus_1 = 0;
    uint32_t after_kind = CACHEGEN_AFTER_NONE;
    void *after = nullptr;
    bool copies_later = false;
    bool holds_later = false;         // of blocks in a GPU's memory
    uint64_t next_number = 0;         // of its saves; 0: the library counts
    const char *request_id = nullptr; // of its loads
    std::function<void(std::function<void()>)> in_step = [](const auto &call) { call(); };
    cachegen_lookup_options options = {};

  private:
    // Strides of the order.
    void set_strides(Placement::Order order)
    {
        const int64_t E = static_cast<int64_t>(element_bytes()), D = spec_.head_dim,
                      N = BLOCK_TOKENS, H = heads_.n;
        cachegen_kv_layout &g = layout_;
        g.block_stride = H * 2 * N * D * E;
        if (order == Placement::CPU) { // a (block, head) is a transposed K area and a V area
            g.offset_bytes[1] = N * D * E;
            g.head_stride[0] = g.head_stride[1] = 2 * N * D * E;
            g.token_stride[0] = E;
            g.dim_stride[0] = N * E;
            g.token_stride[1] = D * E;
            g.dim_stride[1] = E;
            return;
        }
        g.offset_bytes[1] = D * E;
        for (int plane = 0; plane < 2; plane++) {
            const bool heads_first = order == Placement::HEADS_FIRST;
            g.head_stride[plane] = heads_first ? N * 2 * D * E : 2 * D * E;
            g.token_stride[plane] = heads_first ? 2 * D * E : H * 2 * D * E;
            g.dim_stride[plane] = E;
        }
    }
    void register_kv(const Placement &placement)
    {
        memory.assign(spec_.n_layers * layer_bytes(), 0xcd);
        std::vector<void *> base;
        for (uint32_t i = 0; i < spec_.n_layers; i++)
            base.push_back(placement.gpu_memory != nullptr
                               ? static_cast<void *>(placement.gpu_memory + i * layer_bytes())
                               : &memory[i * layer_bytes()]);
        set_strides(placement.order);
        cachegen_kv_layout &g = layout_;
        g.memory = placement.gpu_memory != nullptr ? CACHEGEN_MEMORY_CUDA : CACHEGEN_MEMORY_HOST;
        g.device = placement.gpu;
        g.struct_size = sizeof g;
        g.abi_version = CACHEGEN_ABI_VERSION;
        g.n_layers = spec_.n_layers;
        g.n_kv_heads = heads_.n;
        g.first_head = heads_.first;
        g.head_dim = spec_.head_dim;
        g.dtype = dtype_;
        g.block_tokens = BLOCK_TOKENS;
        g.n_blocks = N_BLOCKS;
        g.base = base.data();
        register_status = cachegen_register_kv(c, &g, &kv_id);
        if (heads_.n == spec_.n_kv_heads && placement.gpu_memory == nullptr) {
            EXPECT_EQ(register_status, CACHEGEN_OK);
        }
        g.base = nullptr; // ends here
        table.resize(N_BLOCKS);
        std::iota(table.begin(), table.end(), 0);
        std::shuffle(table.begin(), table.end(), std::mt19937(5));
    }
    ProfileSpec spec_;
    cachegen_kv_layout layout_ = {};
    Heads heads_;
    uint8_t dtype_ = 0;
};

// The root of the chain of keys, and the key of one of the chunks, of 32 tokens.
inline cg_key root_of(const Store &store, const char *dtype = "bf16", const std::string &salt = "")
{
    const cg_fingerprint model = model_of(store.spec);
    const std::string text =
        std::string(reinterpret_cast<const char *>(model.bytes), sizeof model.bytes) + dtype;
    const cg_key key = cg_key_of_bytes(text.data(), text.size());
    cg_fingerprint rooted;
    memcpy(rooted.bytes, key.bytes, sizeof rooted.bytes);
    return cg_key_root(&rooted, salt.data(), salt.size());
}
inline cg_key key_of(cg_key parent, const Tokens &tokens, uint32_t index)
{
    const cg_key no_extra = {};
    for (uint32_t i = 0; i <= index; i++)
        parent = cg_key_chunk(&parent, &no_extra, &tokens[i * 32], 32);
    return parent;
}

inline Tokens prompt(uint32_t n_tokens, uint64_t seed = 1)
{
    return make_tokens(n_tokens, seed);
}

} // namespace cg_test
#endif
