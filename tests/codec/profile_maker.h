/* tests/codec/profile_maker.h - small synthetic profiles and caches for tests.
 *
 * A profile here has random orthonormal bases, random means and weights, and classes of every shape
 * (small and large alphabets, shifts), dealt out to the columns at random: real profiles are tamer.
 * Bytes: codec/FORMAT.md, "Profile". Everything follows from a seed.
 */
#ifndef CG_TESTS_CODEC_PROFILE_MAKER_H
#define CG_TESTS_CODEC_PROFILE_MAKER_H
#include "codec/bf16.h"
#include "codec/block_order.h"
#include "codec/codec.h"
#include "codec/cursor.h"
#include "codec/projection.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>
#include <xxhash.h>

namespace cg_test
{

using Bytes = std::vector<uint8_t>;

class Random
{
  public:
    explicit Random(uint64_t seed) : engine_(seed)
    {
    }
    uint32_t below(uint32_t n)
    {
        return static_cast<uint32_t>(engine_() % n);
    }
    double uniform(double from, double to)
    {
        return from + (to - from) * static_cast<double>(engine_() >> 11) * 0x1p-53;
    }
    // Of the standard normal distribution, nearly: a sum of twelve.
    double normal()
    {
        double sum = -6;
        for (int i = 0; i < 12; i++)
            sum += uniform(0, 1);
        return sum;
    }

  private:
    std::mt19937_64 engine_;
};

inline void put(Bytes *out, uint64_t value, size_t n_bytes)
{
    out->resize(out->size() + n_bytes);
    cg_put_le(out->data() + out->size() - n_bytes, n_bytes, value);
}
inline void put_f32(Bytes *out, float value)
{
    put(out, cg_f32_bits(value), 4);
}
inline void put_f64(Bytes *out, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    put(out, bits, 8);
}

struct ProfileSpec {
    uint16_t n_layers = 4, n_kv_heads = 2, head_dim = 16;
    uint8_t dtype = CG_DTYPE_BF16;
    std::vector<uint16_t> group_layers = {3, 1}; // uneven
    uint16_t rotary_dim = 16;                    // 0: no rope
    uint16_t n_sinks = 4;
    // Factor 3 apart, and exact in binary: coarser levels nest exactly.
    float step[3][2] = {{1 / 16.f, 3 / 64.f}, {3 / 16.f, 9 / 64.f}, {9 / 16.f, 27 / 64.f}};
    bool all_active = true;     // else fewer components, fewest at L3 and high frequencies
    double wide_share = 0.5;    // of the components whose basis is bf16, not scaled bytes
    bool packed = false;        // narrow components of 2 to 12 bits
    bool nests = false;         // has tables for nested chunks
    bool rising_active = false; // L1 has fewer components than coarser levels
    uint64_t seed = 1;
    size_t excess_active = 0;              // columns beyond the components: a lie
    std::vector<double> theta = {10000.0}; // of each rope table
    std::vector<uint8_t> layer_rope = {};  // of each layer, when there are several
    bool paper = false; // anchors and deltas instead of KLT and DCT; no rope then
    unsigned version = 1;
    bool joined = false;     // version 2: K and V in one matrix
    unsigned unit_bits = 12; // version 2
    size_t n_shared = 0;     // version 3, and 4 unless 0: of each group's components
    std::array<unsigned, 3> fraction_bits = {2, 3, 4}; // with them: of L1, L2, L3
    uint16_t n_query_heads = 0;                        // version 4
    bool fine = false;                                 // version 2: no component of few bits
    unsigned least_shift = 0;                          // version 2: of a band
    bool thin = false;                 // two bits an element: the most memory for a file's bytes
    size_t most_components = SIZE_MAX; // of a basis
};

// Of version 2: steps are the same for K and V where they are joined.
inline ProfileSpec spec_2(bool joined, ProfileSpec spec = ProfileSpec())
{
    spec.version = 2;
    spec.joined = joined;
    for (auto &level : spec.step)
        level[CG_V] = joined ? level[CG_K] : level[CG_V];
    return spec;
}

// With a joint matrix over the first components of all groups.
inline ProfileSpec spec_3(ProfileSpec spec = ProfileSpec(), size_t n_shared = 32)
{
    spec = spec_2(true, spec);
    spec.version = 3;
    spec.n_shared = n_shared;
    return spec;
}

// Blocks with steps of their own; n_shared 0: without a joint matrix.
inline ProfileSpec spec_4(ProfileSpec spec = ProfileSpec(), size_t n_shared = 0)
{
    spec = n_shared > 0 ? spec_3(spec, n_shared) : spec_2(spec.joined, spec);
    spec.version = 4;
    spec.n_query_heads = static_cast<uint16_t>(2 * spec.n_kv_heads);
    return spec;
}

// K and V of 10 layers of SmolLM2-135M in one matrix: the profile tool's --prefer smallest.
inline ProfileSpec ten_layer_spec()
{
    ProfileSpec spec = spec_2(true);
    spec.n_layers = 10;
    spec.n_kv_heads = 3;
    spec.head_dim = spec.rotary_dim = 64;
    spec.group_layers = {10};
    spec.most_components = 100;
    return spec;
}

// Steps of anchors are far below those of deltas: a token on the wrong side of a group's border
// shows in its error.
inline ProfileSpec paper_spec()
{
    ProfileSpec spec;
    spec.rotary_dim = 0;
    spec.n_sinks = 0;
    spec.paper = true;
    return spec;
}

// Frequencies of n symbols that fall by `fall` from one index to the next, as integers that sum to
// 1 << 14.
inline std::vector<uint16_t> falling_freq(unsigned n_symbols, double fall)
{
    std::vector<double> share(n_symbols);
    for (unsigned i = 0; i < n_symbols; i++)
        share[i] = std::pow(fall, i);
    const double sum = std::accumulate(share.begin(), share.end(), 0.0);
    std::vector<uint16_t> freq(n_symbols);
    int left = 1 << 14;
    for (unsigned i = 0; i < n_symbols; i++) {
        freq[i] =
            static_cast<uint16_t>(1 + (((1 << 14) - static_cast<int>(n_symbols)) * share[i] / sum));
        left -= freq[i];
    }
    freq[0] = static_cast<uint16_t>(freq[0] + left);
    return freq;
}

struct ClassSpec {
    uint8_t shift;
    std::vector<uint16_t> freq;
};

inline std::vector<ClassSpec> mixed_classes()
{
    return {{0, falling_freq(16, 0.7)}, {0, falling_freq(2, 0.1)},  {0, falling_freq(64, 0.9)},
            {2, falling_freq(8, 0.6)},  {5, falling_freq(4, 0.3)},  {12, falling_freq(2, 0.01)},
            {0, falling_freq(6, 0.05)}, {1, falling_freq(64, 0.95)}};
}

inline double dot(const std::vector<double> &a, const std::vector<double> &b)
{
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}
inline void add_scaled(std::vector<double> *a, double factor, const std::vector<double> &b)
{
    for (size_t i = 0; i < b.size(); i++)
        (*a)[i] += factor * b[i];
}

// Rows are orthonormal: Gram-Schmidt, twice, of random rows; for large n a few random reflections,
// which are faster.
inline std::vector<std::vector<double>> random_orthonormal(size_t n, Random *random)
{
    std::vector<std::vector<double>> rows(n, std::vector<double>(n));
    if (n > 64) {
        for (size_t i = 0; i < n; i++)
            rows[i][i] = 1;
        for (int reflection = 0; reflection < 4; reflection++) {
            std::vector<double> v(n);
            for (double &x : v)
                x = random->normal();
            const double squared = dot(v, v);
            for (auto &row : rows)
                add_scaled(&row, -2 * dot(row, v) / squared, v);
        }
        return rows;
    }
    for (size_t i = 0; i < n; i++) {
        for (double &x : rows[i])
            x = random->normal();
        for (int pass = 0; pass < 2; pass++) {
            for (size_t k = 0; k < i; k++)
                add_scaled(&rows[i], -dot(rows[i], rows[k]), rows[k]);
        }
        const double norm = std::sqrt(dot(rows[i], rows[i]));
        for (double &x : rows[i])
            x /= norm;
    }
    return rows;
}

// Fills in file_bytes and the hash at the end, after the bytes were changed.
inline void seal_profile(Bytes *bytes)
{
    cg_put_le(bytes->data() + 16, 8, bytes->size());
    cg_put_le(bytes->data() + bytes->size() - 8, 8, XXH3_64bits(bytes->data(), bytes->size() - 8));
}

inline cg_fingerprint model_of(const ProfileSpec &spec)
{
    cg_fingerprint model;
    for (size_t i = 0; i < sizeof model.bytes; i++)
        model.bytes[i] = static_cast<uint8_t>(0xa0 + i + spec.seed);
    return model;
}

// Numbers of few bits, one after another from the lowest bit of the first byte on.
inline void put_numbers(Bytes *out, const std::vector<int> &numbers, unsigned bits)
{
    uint32_t pending = 0;
    unsigned n_pending = 0;
    for (const int number : numbers) {
        pending |= (static_cast<uint32_t>(number) & ((1u << bits) - 1)) << n_pending;
        for (n_pending += bits; n_pending >= 8; n_pending -= 8, pending >>= 8)
            put(out, pending & 0xff, 1);
    }
    if (n_pending > 0)
        put(out, pending, 1);
}

// Version 2: in turn bands of large elements and of such as fit in a byte, whose bits fall from
// component to component.
inline void put_bands(Bytes *out, const std::vector<std::vector<double>> &basis,
                      size_t n_components, const ProfileSpec &spec)
{
    const unsigned unit_bits = spec.unit_bits;
    for (size_t c = 0; c < n_components; c++) {
        const bool is_small = !spec.fine && c / 32 % 2 == 1;
        double largest = 0;
        for (const double x : basis[c])
            largest = std::max(largest, std::fabs(x));
        // Of the band: what its elements need to stay below 127 or 2^14.
        unsigned shift = spec.least_shift;
        for (; std::ldexp(1, static_cast<int>(unit_bits - shift)) > (is_small ? 64 : 1 << 13);)
            shift++;
        if (c % 32 == 0)
            put(out, shift, 1);
        const double unit = std::ldexp(1, static_cast<int>(shift) - static_cast<int>(unit_bits));
        const unsigned bits = is_small ? 8 - static_cast<unsigned>(c % 4)
                                       : 15 - static_cast<unsigned>(c % (spec.fine ? 3 : 7));
        const double most = (1 << (bits - 1)) - 1;
        const int multiple = std::max(1, static_cast<int>(std::ceil(largest / unit / most)));
        std::vector<int> numbers;
        for (const double x : basis[c])
            numbers.push_back(static_cast<int>(std::lrint(x / unit / multiple)));
        put(out, bits, 1);
        put(out, static_cast<uint64_t>(multiple), 2);
        put_numbers(out, numbers, bits);
    }
}

// Elements of two bits, which a reader of version 2 takes for large ones; of version 1, packed
// ones.
inline void put_thin(Bytes *out, size_t n_channels, size_t n_components, unsigned version)
{
    for (size_t c = 0; c < n_components; c++) {
        if (version > 1 && c % 32 == 0)
            put(out, 0, 1);
        put(out, 2, 1);
        put(out, version > 1 ? 1 << 13 : cg_f32_bits(0.25f), version > 1 ? 2 : 4);
        put_numbers(out, std::vector<int>(n_channels, 1), 2);
    }
}

// Of n columns, how many a level has at frequency f.
inline size_t n_active_of(const ProfileSpec &spec, size_t n, unsigned level, unsigned f)
{
    if (spec.all_active)
        return spec.rising_active && level == 1 ? n - 1 : n;
    return f + 2 * level >= 12 ? 0 : n - n * (f + 2 * (level - 1)) / 12; // 0 of some
}

inline Bytes make_profile_bytes(const ProfileSpec &spec,
                                const std::vector<ClassSpec> &classes = mixed_classes())
{
    Random random(spec.seed);
    const size_t channels = size_t{spec.n_kv_heads} * spec.head_dim;
    const size_t n_table = size_t{spec.n_layers} * 2 * channels;
    Bytes out = {'C', 'G', 'P', 'F', '\r', '\n', 0x1a, '\n'};
    put(&out, spec.version, 4);
    put(&out, 0, 4);
    put(&out, 0, 8); // file_bytes
    const cg_fingerprint model = model_of(spec);
    out.insert(out.end(), model.bytes, model.bytes + 16);
    put(&out, spec.n_layers, 2);
    put(&out, spec.n_kv_heads, 2);
    put(&out, spec.head_dim, 2);
    put(&out, spec.dtype, 1);
    put(&out, 2, 1);
    char preset[16] = {};
    strcpy(preset, spec.paper ? "paper" : "klt");
    out.insert(out.end(), preset, preset + 16);
    const bool by_layer = spec.theta.size() > 1;
    put(&out, spec.paper ? 0 : 1, 1);
    put(&out, spec.paper ? 2 : 1, 1);
    put(&out, by_layer ? 2 : spec.rotary_dim > 0, 1);
    put(&out, spec.packed, 1);
    put(&out, spec.rotary_dim, 2);
    put(&out, spec.n_sinks, 2);
    put(&out, spec.group_layers.size(), 2);
    put(&out, classes.size(), 2);
    put(&out, by_layer ? spec.theta.size() : 0, 1);
    put(&out, spec.nests, 1);
    put(&out, spec.joined, 1);
    const bool has_joint = spec.version >= 3 && spec.n_shared > 0;
    put(&out, spec.version == 4 && has_joint, 1);

    for (const double theta : spec.theta) {
        for (unsigned i = 0; i < spec.rotary_dim / 2u; i++)
            put_f64(&out, std::pow(theta, -2.0 * i / spec.rotary_dim));
    }
    out.insert(out.end(), spec.layer_rope.begin(), spec.layer_rope.end());
    for (const uint16_t n : spec.group_layers)
        put(&out, n, 2);
    for (const auto &level : spec.step) {
        put_f32(&out, level[CG_K]);
        put_f32(&out, level[CG_V]);
    }
    for (size_t i = 0; i < n_table; i++)
        put_f32(&out, static_cast<float>(random.uniform(-2, 2)));
    for (size_t i = 0; i < n_table; i++)
        put_f32(&out, static_cast<float>(std::exp2(random.uniform(-1, 1))));
    for (size_t i = 0; spec.paper && i < n_table; i++)
        put_f32(&out, static_cast<float>(std::exp2(random.uniform(-9, -8))));
    for (const ClassSpec &c : classes) {
        put(&out, c.shift, 1);
        put(&out, c.freq.size(), 1);
        for (const uint16_t f : c.freq)
            put(&out, f, 2);
    }
    for (size_t i = 0; spec.nests && i < 3 * classes.size(); i++) { // by class and context
        const uint32_t same = 5000 + random.below(5000);
        put(&out, same, 2);
        put(&out, 1000 + random.below(((1 << 14) - same) / 2), 2);
    }
    if (spec.version == 4) {
        for (size_t i = 0; i < 7 * classes.size(); i++) // the columns' own at the level's own step
            put(&out,
                i / classes.size() == 3 ? i % classes.size()
                                        : random.below(static_cast<uint32_t>(classes.size())),
                1);
        put(&out, spec.n_query_heads, 2);
        for (size_t i = 0; i < size_t{spec.n_layers} * spec.n_query_heads * spec.head_dim; i++)
            put(&out, cg_bf16_from_f32(static_cast<float>(random.normal())), 2);
    }
    if (spec.paper) { // the classes of every channel's anchors, and of its deltas at each level
        for (size_t i = 0; i < 4 * n_table; i++)
            put(&out, random.below(static_cast<uint32_t>(classes.size())), 1);
        put(&out, 0, 8);
        seal_profile(&out);
        return out;
    }
    std::vector<size_t> n_channels, n_components, n_wide; // [group][matrix], the joint one first
    if (has_joint) {
        n_channels.push_back(spec.group_layers.size() * spec.n_shared);
        const size_t most = spec.all_active ? n_channels[0] : n_channels[0] * 7 / 8;
        n_components.push_back(std::min(most, spec.most_components));
        n_wide.push_back(0);
        put(&out, spec.n_shared, 2);
        for (const unsigned bits : spec.fraction_bits)
            put(&out, bits, 1);
        put(&out, 0, 1); // reserved
        put(&out, n_components[0], 2);
        put(&out, spec.unit_bits, 2);
        for (unsigned i = 0; i < 3 * 8; i++)
            put(&out, n_active_of(spec, spec.n_shared, 1 + i / 8, i % 8), 2);
    }
    for (const uint16_t n_layers : spec.group_layers) {
        for (unsigned matrix = 0; matrix < (spec.joined ? 1 : 2); matrix++) {
            const size_t n = n_layers * channels * (spec.joined ? 2 : 1);
            n_channels.push_back(n);
            n_components.push_back(std::min(spec.all_active ? n : n * 7 / 8, spec.most_components));
            n_wide.push_back(
                static_cast<size_t>(spec.wide_share * static_cast<double>(n_components.back())));
            put(&out, n_components.back(), 2);
            if (spec.version == 1)
                put(&out, n_wide.back(), 2);
            else
                put(&out, spec.unit_bits, 2); // and a reserved byte
        }
    }
    for (unsigned level = 1; level <= 3; level++) {
        for (size_t i = 0; i < n_components.size(); i++) {
            const size_t n_others = has_joint && i > 0 ? spec.n_shared : 0;
            if (n_components[i] < n_others)
                throw std::runtime_error("profile_maker: fewer components than are shared");
            const size_t n = n_components[i] - n_others;
            std::vector<size_t> n_active;
            for (unsigned f = 0; f < 8; f++) {
                n_active.push_back(n_active_of(spec, n, level, f) + spec.excess_active);
                put(&out, n_active.back(), 2);
            }
            for (const size_t active : n_active) {
                for (size_t c = 0; c < active; c++)
                    put(&out, random.below(static_cast<uint32_t>(classes.size())), 1);
            }
        }
    }
    for (size_t i = 0; i < n_components.size() && spec.thin; i++)
        put_thin(&out, n_channels[i], n_components[i], spec.version);
    for (size_t i = 0; i < n_components.size() && !spec.thin; i++) {
        const auto basis = random_orthonormal(n_channels[i], &random);
        if (spec.version > 1) {
            put_bands(&out, basis, n_components[i], spec);
            continue;
        }
        for (size_t c = 0; c < n_components[i]; c++) {
            if (c < n_wide[i]) {
                for (const double x : basis[c])
                    put(&out, cg_bf16_from_f32(static_cast<float>(x)), 2);
                continue;
            }
            double largest = 0;
            for (const double x : basis[c])
                largest = std::max(largest, std::fabs(x));
            const unsigned bits = spec.packed ? 12 - static_cast<unsigned>(c % 11) : 8;
            const float scale = static_cast<float>(largest / ((1 << (bits - 1)) - 1));
            if (spec.packed)
                put(&out, bits, 1);
            put_f32(&out, scale);
            std::vector<int> numbers;
            for (const double x : basis[c])
                numbers.push_back(static_cast<int>(std::lrint(x / scale)));
            put_numbers(&out, numbers, bits);
        }
    }
    put(&out, 0, 8);
    seal_profile(&out);
    return out;
}

struct ProfileFree {
    void operator()(cg_profile *profile) const
    {
        cg_profile_free(profile);
    }
};
using Profile = std::unique_ptr<cg_profile, ProfileFree>;

inline Profile open_profile(const Bytes &bytes)
{
    cg_profile *profile;
    const cg_status status = cg_profile_open(bytes.data(), bytes.size(), &profile);
    if (status != CG_OK)
        throw std::runtime_error(std::string("profile_maker: ") + cg_strerror(status));
    return Profile(profile);
}
inline Profile make_profile(const ProfileSpec &spec)
{
    return open_profile(make_profile_bytes(spec));
}

// n_tokens of a context at first_position, with keys that follow from it.
inline cg_chunk_header make_header(const ProfileSpec &spec, uint8_t dtype, uint32_t first_position,
                                   uint32_t n_tokens)
{
    cg_chunk_header header = {};
    header.geometry = {spec.n_layers, spec.n_kv_heads, spec.head_dim, dtype, 2};
    header.first_position = first_position;
    header.n_tokens = n_tokens;
    header.model = model_of(spec);
    header.parent = cg_key_root(&header.model, nullptr, 0);
    return header;
}

inline std::vector<uint32_t> make_tokens(uint32_t n_tokens, uint64_t seed,
                                         uint32_t vocabulary = 49152)
{
    Random random(seed);
    std::vector<uint32_t> tokens(n_tokens);
    for (uint32_t &token : tokens)
        token = random.below(vocabulary);
    return tokens;
}

// Elements of one dtype, from and to floats.
inline uint64_t element_bits(unsigned dtype, float value)
{
    switch (dtype) {
    case CG_DTYPE_FP32: return cg_f32_bits(value);
    case CG_DTYPE_FP8_E4M3: return cg_e4m3_from_f32(value);
    case CG_DTYPE_FP8_E5M2: return cg_e5m2_from_f32(value);
    case CG_DTYPE_BF16: return cg_bf16_from_f32(value);
    default: return cg_fp16_from_f32(value);
    }
}
inline void put_element(Bytes *out, unsigned dtype, float value)
{
    put(out, element_bits(dtype, value), cg_dtype_bytes(dtype));
}
inline std::vector<float> to_floats(const Bytes &elements, unsigned dtype)
{
    const size_t n_bytes = cg_dtype_bytes(dtype);
    std::vector<float> values(elements.size() / n_bytes);
    for (size_t i = 0; i < values.size(); i++) {
        const auto bits = static_cast<uint32_t>(cg_get_le(elements.data() + i * n_bytes, n_bytes));
        values[i] = dtype == CG_DTYPE_FP32       ? cg_f32_from_bits(bits)
                    : dtype == CG_DTYPE_BF16     ? cg_bf16_to_f32(static_cast<uint16_t>(bits))
                    : dtype == CG_DTYPE_FP8_E4M3 ? cg_e4m3_to_f32(static_cast<uint8_t>(bits))
                    : dtype == CG_DTYPE_FP8_E5M2 ? cg_e5m2_to_f32(static_cast<uint8_t>(bits))
                                                 : cg_fp16_to_f32(static_cast<uint16_t>(bits));
    }
    return values;
}

// A cache [n_layers][2][n_tokens][n_kv_heads][head_dim] that is smooth along tokens, as real ones
// are somewhat.
inline Bytes make_elements(const cg_chunk_header &header, uint64_t seed, double scale = 1.0)
{
    const cg_geometry &g = header.geometry;
    Random random(seed);
    const size_t channels = cg_geometry_channels(&g);
    Bytes out;
    out.reserve(static_cast<size_t>(cg_geometry_elements(&g, header.n_tokens)) *
                cg_dtype_bytes(g.dtype));
    for (unsigned plane = 0; plane < 2u * g.n_layers; plane++) {
        std::vector<double> state(channels);
        for (double &x : state)
            x = random.normal();
        for (uint32_t t = 0; t < header.n_tokens; t++) {
            for (double &x : state) {
                x = 0.8 * x + 0.6 * random.normal();
                put_element(&out, g.dtype, static_cast<float>(scale * x));
            }
        }
    }
    return out;
}

inline constexpr unsigned all_dtypes[] = {CG_DTYPE_BF16, CG_DTYPE_FP16, CG_DTYPE_FP32,
                                          CG_DTYPE_FP8_E4M3, CG_DTYPE_FP8_E5M2};

struct MallocFree {
    void operator()(void *memory) const
    {
        free(memory);
    }
};

inline cg_status encode(const cg_profile *profile, const cg_chunk_header &header,
                        const std::vector<uint32_t> &tokens, const Bytes &elements, cg_level level,
                        Bytes *chunk_out, unsigned n_threads = 1, cg_level coarsest = CG_L0)
{
    uint8_t *bytes = nullptr;
    size_t n_bytes = 0;
    const cg_status status =
        cg_encode_chunk(profile, &header, tokens.data(), elements.data(), elements.size(), level,
                        std::max(level, coarsest), n_threads, &bytes, &n_bytes, nullptr);
    const std::unique_ptr<uint8_t, MallocFree> owner(bytes);
    chunk_out->clear();
    if (status == CG_OK)
        chunk_out->assign(bytes, bytes + n_bytes);
    return status;
}

// A chunk, with what it was made from.
struct Coded {
    cg_chunk_header header;
    std::vector<uint32_t> tokens;
    Bytes elements, chunk;
    cg_status status;
};

inline Coded code(const ProfileSpec &spec, const cg_profile *profile, unsigned dtype,
                  uint32_t first_position, uint32_t n_tokens, cg_level level, uint64_t seed = 1)
{
    Coded c;
    c.header = make_header(spec, static_cast<uint8_t>(dtype), first_position, n_tokens);
    c.tokens = make_tokens(n_tokens, seed);
    c.elements = make_elements(c.header, seed);
    c.status = encode(profile, c.header, c.tokens, c.elements, level, &c.chunk);
    return c;
}

// A task's part of a chunk's elements.
inline Bytes elements_of(const Bytes &elements, const cg_chunk_header &header,
                         const cg_task_shape &shape)
{
    const size_t slice_bytes = elements.size() / header.geometry.n_layers / CG_N_PLANES;
    Bytes in;
    for (uint32_t i = 0; i < shape.n_planes * shape.n_layers; i++) {
        const size_t layer = shape.first_layer + i % shape.n_layers,
                     plane = shape.plane + i / shape.n_layers;
        const auto at = elements.begin() + static_cast<long>((layer * 2 + plane) * slice_bytes);
        in.insert(in.end(), at, at + static_cast<long>(slice_bytes));
    }
    return in;
}

// From an exact copy, so that ASan sees an over-read.
inline cg_status decode(const cg_profile *profile, const Bytes &chunk, Bytes *elements_out,
                        unsigned n_threads = 1)
{
    cg_chunk_header header;
    cg_status status = cg_chunk_header_parse(chunk.data(), chunk.size(), &header);
    if (status != CG_OK)
        return status;
    elements_out->assign(
        static_cast<size_t>(cg_geometry_elements(&header.geometry, header.n_tokens)) *
            cg_dtype_bytes(header.geometry.dtype),
        0xcc);
    const std::unique_ptr<uint8_t[]> exact(new uint8_t[chunk.size()]);
    std::copy(chunk.begin(), chunk.end(), exact.get());
    return cg_decode_chunk(profile, exact.get(), chunk.size(), n_threads, elements_out->data(),
                           elements_out->size());
}

// Of each of a chunk's blocks, in no order.
inline Bytes draw_scales(uint32_t n_tokens, uint64_t seed)
{
    Random random(seed);
    Bytes factor_index;
    for (uint32_t b = 0; b < cg_count_blocks(n_tokens); b++)
        factor_index.push_back(static_cast<uint8_t>(random.below(CG_N_STEP_FACTORS)));
    return factor_index;
}

// encode(), but each block's step is the level's times its scale.
inline cg_status encode_scaled(const cg_profile *profile, const cg_chunk_header &header,
                               const std::vector<uint32_t> &tokens, const Bytes &elements,
                               const Bytes &factor_index, cg_level level, Bytes *chunk_out,
                               cg_level coarsest = CG_L0, cg_projector *projector = nullptr)
{
    coarsest = std::max(level, coarsest);
    cg_encoder *made = nullptr;
    cg_status status = cg_encoder_new(
        profile, &header, tokens.data(),
        static_cast<uint8_t>((2u << coarsest) - (1u << level) + (coarsest > level ? CG_NESTED : 0)),
        &made);
    const std::unique_ptr<cg_encoder, decltype(&cg_encoder_free)> encoder(made, cg_encoder_free);
    if (status == CG_OK)
        status = cg_encoder_set_step_factors(made, factor_index.data());
    if (status != CG_OK)
        return status;
    const size_t n_scratch = cg_encoder_scratch_bytes(made);
    const std::unique_ptr<void, MallocFree> scratch(aligned_alloc(64, (n_scratch + 63) / 64 * 64));
    for (uint32_t task = 0; status == CG_OK && task < cg_encoder_n_tasks(made); task++) {
        const cg_task_shape shape = cg_encoder_task_shape(made, task);
        const uint32_t n_slices = shape.n_planes * shape.n_layers;
        const size_t slice_bytes = shape.elements_bytes / n_slices;
        Bytes in;
        for (uint32_t i = 0; i < n_slices; i++) {
            const size_t layer = shape.first_layer + i % shape.n_layers,
                         plane = shape.plane + i / shape.n_layers;
            const auto at = elements.begin() + static_cast<long>((layer * 2 + plane) * slice_bytes);
            in.insert(in.end(), at, at + static_cast<long>(slice_bytes));
        }
        status = cg_encoder_run_with(made, task, scratch.get(), n_scratch, in.data(), projector);
    }
    uint8_t *bytes = nullptr;
    size_t n_bytes = 0;
    if (status == CG_OK)
        status = cg_encoder_finish(made, level, &bytes, &n_bytes);
    const std::unique_ptr<uint8_t, MallocFree> owner(bytes);
    chunk_out->assign(bytes, bytes + n_bytes);
    return status;
}

// Of a whole lossy chunk's rows; the profile must outlive it.
struct BlockOrder {
    cg_block_order of;

    BlockOrder(const cg_profile *profile, const cg_chunk &chunk)
    {
        cg_status status = cg_block_order_init(cg_count_blocks(chunk.header.n_tokens), &of);
        const cg_section steps = cg_chunk_section(&chunk, 1);
        if (status == CG_OK && steps.kind == CG_SECTION_STEPS)
            status = cg_block_order_sort(profile, chunk.bytes + steps.offset, &of);
        if (status != CG_OK)
            throw std::runtime_error(std::string("profile_maker: ") + cg_strerror(status));
    }
    BlockOrder(const BlockOrder &) = delete;
    ~BlockOrder()
    {
        cg_block_order_destroy(&of);
    }
};

// Corrects the checksums of a chunk whose sections were changed: what an attacker does, too.
inline void seal_chunk(Bytes *chunk)
{
    const size_t n_sections = cg_get_le(chunk->data() + 44, 4);
    size_t at = CG_CHUNK_FIXED_BYTES + n_sections * CG_CHUNK_SECTION_BYTES;
    Bytes hashed(chunk->begin(), chunk->begin() + 152);
    for (size_t i = 0; i < n_sections; i++) {
        uint8_t *row = chunk->data() + CG_CHUNK_FIXED_BYTES + i * CG_CHUNK_SECTION_BYTES;
        const size_t n_bytes = cg_get_le(row + 4, 4);
        cg_put_le(row + 8, 8, XXH3_64bits(chunk->data() + at, n_bytes));
        at += cg_padded(n_bytes, cg_chunk_align(cg_get_le(chunk->data() + 8, 4)));
        hashed.insert(hashed.end(), row, row + CG_CHUNK_SECTION_BYTES);
    }
    cg_put_le(chunk->data() + 152, 8, XXH3_64bits(hashed.data(), hashed.size()));
}

} // namespace cg_test
#endif
