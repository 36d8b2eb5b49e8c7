// Kernels write the bytes that the CPU's codec decodes, and nothing else: all presets, levels and
// layouts, damage, and what no engine should ask for.
#include "codec/klt.h"
#include "codec/section_plan.h"
#include "codec/symbols.h"
#include "cuda/passes.cuh"
#include "device.h"

#include <fstream>
#include <gtest/gtest.h>
#include <iterator>

namespace
{

using namespace cg_test;

// ---- one chunk ----

struct LaidFree {
    void operator()(cg_cuda_profile *laid) const
    {
        cg_cuda_profile_free(laid);
    }
};

// A profile and its blob; empty for L0.
struct Laid {
    Profile profile;
    std::unique_ptr<cg_cuda_profile, LaidFree> laid;
    Bytes blob;

    Laid() = default;
    explicit Laid(Profile opened) : profile(std::move(opened))
    {
        cg_cuda_profile *made = nullptr;
        EXPECT_EQ(cg_cuda_profile_new(profile.get(), &made), CG_OK);
        laid.reset(made);
        blob.resize(cg_cuda_profile_bytes(made));
        EXPECT_EQ(cg_cuda_profile_fill(made, blob.data()), CG_OK);
    }
    explicit Laid(const ProfileSpec &spec) : Laid(make_profile(spec))
    {
    }
};

struct Planned {
    cg_cuda_plan plan = {};
    Bytes bytes;
    cg_status status = CG_OK;
};

Planned make_plan(const Laid &laid, const Bytes &chunk, const cg_cuda_request &request)
{
    Planned out;
    cg_chunk_header header;
    size_t plan_bytes = 0, scratch_bytes = 0;
    EXPECT_EQ(cg_chunk_header_parse(chunk.data(), chunk.size(), &header), CG_OK);
    cg_cuda_plan_bound(header.level != CG_L0 ? laid.laid.get() : nullptr, &header.geometry,
                       header.n_tokens, &plan_bytes, &scratch_bytes);
    const std::unique_ptr<uint8_t[]> exact(new uint8_t[chunk.size()]),
        room(new uint8_t[plan_bytes]);
    std::copy(chunk.begin(), chunk.end(), exact.get());
    out.status = cg_cuda_plan_fill(laid.laid.get(), exact.get(), chunk.size(), &request, room.get(),
                                   plan_bytes, &out.plan);
    if (out.status == CG_OK) {
        EXPECT_LE(out.plan.plan_bytes, plan_bytes);
        EXPECT_LE(out.plan.scratch_bytes, scratch_bytes);
        out.bytes.assign(room.get(), room.get() + out.plan.plan_bytes);
    }
    return out;
}

cg_chunk_header header_of(const Bytes &chunk)
{
    cg_chunk_header header = {};
    EXPECT_EQ(cg_chunk_header_parse(chunk.data(), chunk.size(), &header), CG_OK);
    return header;
}

cg_cuda_request request_of(const Laid &laid, const Bytes &chunk)
{
    const cg_chunk_header header = header_of(chunk);
    return cg_cuda_request_all(laid.laid.get(), &header);
}

Bytes noise(size_t n_bytes, uint64_t seed)
{
    Random random(seed);
    Bytes out(n_bytes);
    for (uint8_t &byte : out)
        byte = static_cast<uint8_t>(random.below(256));
    return out;
}

uint64_t next_seed()
{
    static uint64_t seed = 0;
    return ++seed;
}

// Layers that a request's groups have: first, how many.
std::pair<uint32_t, uint32_t> layers_of(const ProfileSpec *spec, const cg_cuda_request &r)
{
    if (spec == nullptr)
        return {r.first_group, r.n_groups};
    uint32_t first = 0, n = 0;
    for (uint32_t g = 0; g < r.first_group; g++)
        first += spec->group_layers[g];
    for (uint32_t g = r.first_group; g < r.first_group + r.n_groups; g++)
        n += spec->group_layers[g];
    return {first, n};
}

// Something to decode. spec: NULL when groups are layers. reference: of another place, or NULL.
struct Wanted {
    const Laid *laid;
    const ProfileSpec *spec;
    Bytes chunk;
    cg_cuda_request request;
    BlockSpec blocks;
    const Bytes *reference_chunk = nullptr;
    cg_status status = CG_OK; // CG_ERR_CORRUPT: a stream is damaged
};

Bytes zeros_of(const cg_chunk_header &h)
{
    return Bytes(static_cast<size_t>(cg_geometry_elements(&h.geometry, h.n_tokens)) *
                 cg_dtype_bytes(h.geometry.dtype));
}

// Decodes all of it together, and compares all bytes of the blocks with what the CPU decodes placed
// into the same noise; of what is damaged, with all but what was wanted.
void expect_decodes_together(const std::vector<Wanted> &all)
{
    const uint64_t seed = next_seed();
    SCOPED_TRACE(testing::Message() << "seed=" << seed << " chunks=" << all.size());
    std::vector<Planned> planned(all.size());
    std::vector<Blocks> blocks(all.size());
    std::vector<Bytes> want(all.size());
    std::vector<Decoding> batch;
    const auto place_wanted = [&](size_t i, const Bytes &elements, Bytes *piece) {
        const Wanted &w = all[i];
        const cg_chunk_header h = header_of(w.chunk);
        const auto layers = layers_of(w.spec, w.request);
        place(elements, h.geometry, h.n_tokens, layers.first, layers.second, w.request, blocks[i],
              piece->data());
    };
    for (size_t i = 0; i < all.size(); i++) {
        const Wanted &w = all[i];
        const cg_chunk_header h = header_of(w.chunk);
        Bytes elements = zeros_of(h);
        if (w.status == CG_OK) {
            ASSERT_EQ(decode(h.level != CG_L0 ? w.laid->profile.get() : nullptr,
                             w.reference_chunk != nullptr ? *w.reference_chunk : w.chunk,
                             &elements),
                      CG_OK);
        }
        planned[i] = make_plan(*w.laid, w.chunk, w.request);
        ASSERT_EQ(planned[i].status, CG_OK);
        blocks[i] = make_blocks(w.blocks, h.geometry, h.n_tokens);
        Bytes piece = noise(blocks[i].n_bytes, seed + i);
        want[i] = piece;
        place_wanted(i, elements, &want[i]);
        batch.push_back({w.laid->blob, w.chunk, planned[i].plan, planned[i].bytes, blocks[i],
                         std::move(piece)});
    }
    run_decode(&batch, seed);
    for (size_t i = 0; i < all.size(); i++) {
        const cg_chunk_header h = header_of(all[i].chunk);
        SCOPED_TRACE(testing::Message() << "chunk " << i << " level=" << int{h.level} << " dtype="
                                        << int{h.geometry.dtype} << " tokens=" << h.n_tokens);
        ASSERT_EQ(batch[i].status == CG_OK, all[i].status == CG_OK);
        Bytes &piece = batch[i].piece;
        if (all[i].status != CG_OK)
            place_wanted(i, zeros_of(h), &piece);
        const auto differs = std::mismatch(piece.begin(), piece.end(), want[i].begin()).first;
        ASSERT_TRUE(differs == piece.end())
            << "byte " << differs - piece.begin() << " of " << piece.size();
    }
}

void expect_decodes(const Laid &laid, const ProfileSpec *spec, const Bytes &chunk,
                    const cg_cuda_request &request, const BlockSpec &block_spec,
                    const Bytes *reference_chunk = nullptr)
{
    expect_decodes_together({{&laid, spec, chunk, request, block_spec, reference_chunk}});
}

void expect_decodes_all(const Laid &laid, const ProfileSpec *spec, const Bytes &chunk,
                        const BlockSpec &block_spec = {})
{
    expect_decodes(laid, spec, chunk, request_of(laid, chunk), block_spec);
}

Bytes make_chunk(const Laid &laid, const ProfileSpec &spec, unsigned dtype, uint32_t first_position,
                 uint32_t n_tokens, cg_level level, cg_level coarsest = CG_L0, double scale = 1)
{
    const cg_chunk_header header =
        make_header(spec, static_cast<uint8_t>(dtype), first_position, n_tokens);
    Bytes chunk;
    /* Before version 4 of a profile blocks have no scales, and theirs are ignored. */
    EXPECT_EQ(encode_scaled(laid.profile.get(), header, make_tokens(n_tokens, 1),
                            make_elements(header, spec.seed + n_tokens, scale),
                            draw_scales(n_tokens, n_tokens + 7 * level), level, &chunk, coarsest),
              CG_OK);
    return chunk;
}

// ---- chunks of made-up symbols ----

// Draws a symbol.
using Draw = int16_t (*)(Random *);

int16_t draw_small(Random *random)
{
    return static_cast<int16_t>(random->below(21) - 10);
}

int16_t draw_large(Random *random)
{
    return static_cast<int16_t>(random->below(2001) - 1000);
}

int16_t draw_any(Random *random)
{
    return static_cast<int16_t>(random->below(65536));
}

// What rounding to 256 makes 128 of 256, which carries, or -128; and their neighbours.
int16_t draw_edge(Random *random)
{
    const int16_t edges[] = {INT16_MAX, 32640, 32639,  128,    127,
                             -128,      -129,  -32640, -32641, INT16_MIN};
    return edges[random->below(10)];
}

using Memory = std::unique_ptr<void, MallocFree>;

Memory allocate(size_t n_bytes)
{
    return Memory(aligned_alloc(64, cg_padded(n_bytes + 64, 64)));
}

// A matrix of symbols at one level, in memory of its own.
struct Symbols {
    Memory memory;
    cg_symbols of;

    Symbols(const cg_level_columns *columns, const Symbols *coarse, const cg_block_order &order)
        : memory(allocate(cg_symbols_bytes(columns, order.n_blocks))),
          of(cg_symbols_lay(columns, coarse != nullptr ? &coarse->of : nullptr, order.runs,
                            order.n_runs, memory.get()))
    {
    }
    Symbols(const Symbols &) = delete;
};

// The blocks' order by factor_index, or without scales where the profile is older than these.
struct Sorted {
    cg_block_order of;

    Sorted(const cg_profile *p, const Bytes &factor_index)
    {
        EXPECT_EQ(cg_block_order_init(static_cast<uint32_t>(factor_index.size()), &of), CG_OK);
        if (p->version >= CG_PROFILE_VERSION_STEPS) {
            EXPECT_EQ(cg_block_order_sort(p, factor_index.data(), &of), CG_OK);
        }
    }
    Sorted(const Sorted &) = delete;
    ~Sorted()
    {
        cg_block_order_destroy(&of);
    }
};

// A matrix's sections at the header's levels, the coarsest first. Symbols are drawn for the finest;
// a third of a number, and a ninth, are no ties.
std::vector<Bytes> draw_sections(const cg_profile *p, const cg_group *group,
                                 const cg_chunk_header &h, const cg_block_order &order, Draw draw,
                                 Random *random)
{
    const auto columns = [&](unsigned level) { return &group->columns[level - 1][0]; };
    const Symbols fine(columns(h.level), nullptr, order);
    for (unsigned f = 0; f < CG_DCT; f++) {
        for (size_t i = 0; i < order.n_blocks * columns(h.level)->n_active[f]; i++)
            fine.of.cells[f][i] = draw(random);
    }
    std::vector<Bytes> out;
    std::unique_ptr<Symbols> coarse;
    for (unsigned level = h.coarsest; level >= h.level; level--) {
        const float ratio[] = {1, 1 / 3.f, 1 / 9.f};
        auto own = std::make_unique<Symbols>(columns(level), coarse.get(), order);
        cg_symbols_coarsen(&fine.of, ratio[level - h.level], &own->of);
        size_t n_bytes;
        uint8_t *coded =
            cg_symbols_code(p, &own->of, {nullptr, 0}, CG_RANS_STREAM_PERCENT, &n_bytes);
        const Memory owner(coded);
        out.emplace_back(coded, coded + n_bytes);
        coarse = std::move(own);
    }
    return out;
}

// Of a profile that joins K and V, behind its exact first tokens.
Bytes draw_chunk(const Laid &laid, const ProfileSpec &spec, unsigned dtype, uint32_t first_position,
                 uint32_t n_tokens, cg_level level, cg_level coarsest, Draw draw)
{
    const cg_profile *p = laid.profile.get();
    const auto tokens = make_tokens(n_tokens, 1);
    cg_chunk_header h = make_header(spec, static_cast<uint8_t>(dtype), first_position, n_tokens);
    h.version = cg_profile_chunk_version(p);
    h.profile = p->fingerprint;
    h.level = static_cast<uint8_t>(level);
    h.coarsest = static_cast<uint8_t>(coarsest);
    h.token_bytes = 2;
    h.key = cg_key_chunk(&h.parent, &h.extra, tokens.data(), n_tokens);
    h.n_sections = cg_section_plan_n_sections(p, &h);
    Random random(spec.seed + n_tokens);
    std::vector<Bytes> bytes(h.n_sections);
    for (const uint32_t token : tokens)
        put(&bytes[0], token, 2);
    const Bytes factor_index = draw_scales(n_tokens, spec.seed + n_tokens);
    const Sorted order(p, factor_index);
    if (cg_section_plan_row(p, &h, 1).kind == CG_SECTION_STEPS)
        bytes[1] = factor_index;
    for (uint32_t i = 0; i < cg_profile_n_bases(p); i++) {
        const cg_group *group = &p->groups[i];
        const auto coded = draw_sections(p, group, h, order.of, draw, &random);
        for (unsigned l = h.coarsest; l >= h.level; l--)
            bytes[group == p->joint ? cg_section_plan_joint_index(p, &h, l)
                                    : cg_section_plan_index(p, &h, i, l)] = coded[h.coarsest - l];
    }
    std::vector<cg_section> sections;
    std::vector<cg_piece> pieces;
    for (uint32_t i = 0; i < h.n_sections; i++) {
        sections.push_back(cg_section_plan_row(p, &h, i));
        sections[i].bytes = static_cast<uint32_t>(bytes[i].size());
        pieces.push_back({bytes[i].data(), bytes[i].size()});
    }
    uint8_t *made = nullptr;
    size_t n_made = 0;
    EXPECT_EQ(cg_chunk_assemble(&h, sections.data(), pieces.data(), &made, &n_made), CG_OK);
    const Memory owner(made);
    return Bytes(made, made + n_made);
}

const unsigned DTYPES[] = {CG_DTYPE_BF16, CG_DTYPE_FP16, CG_DTYPE_FP32, CG_DTYPE_FP8_E4M3,
                           CG_DTYPE_FP8_E5M2};

// ---- presets, levels, dtypes ----

struct KltCase {
    const char *name;
    bool joined, all_active, is_scaled;
};

void PrintTo(const KltCase &klt, std::ostream *out) // else a test's name shows the struct's bytes
{
    *out << klt.name;
}

class KltDecodeTest : public testing::TestWithParam<KltCase>
{
  protected:
    KltDecodeTest() : spec(spec_2(GetParam().joined))
    {
        if (GetParam().is_scaled)
            spec = spec_4(spec);
        spec.all_active = GetParam().all_active;
    }
    ProfileSpec spec;
};

TEST_P(KltDecodeTest, WritesWhatTheCpuDecodes)
{
    const Laid laid(spec);
    for (const unsigned dtype : DTYPES) {
        for (const cg_level level : {CG_L1, CG_L2, CG_L3})
            expect_decodes_all(laid, &spec, make_chunk(laid, spec, dtype, 8, 21, level));
    }
}

TEST_P(KltDecodeTest, RefinesNestedLevelsAsFarAsTheyAreThere)
{
    spec.nests = true;
    const Laid laid(spec);
    const Bytes whole = make_chunk(laid, spec, CG_DTYPE_BF16, 16, 45, CG_L1, CG_L3);
    const cg_chunk_header header = header_of(whole);
    for (const cg_level level : {CG_L1, CG_L2, CG_L3}) {
        const Bytes cut(whole.begin(),
                        whole.begin() + static_cast<std::ptrdiff_t>(header.level_bytes[level]));
        expect_decodes_all(laid, &spec, cut);
    }
    expect_decodes_all(laid, &spec, make_chunk(laid, spec, CG_DTYPE_FP16, 16, 9, CG_L2, CG_L3));
}

TEST_P(KltDecodeTest, KeepsExactFirstTokens)
{
    const Laid laid(spec);
    for (const unsigned dtype : DTYPES) {
        for (const uint32_t n_tokens : {3, 4, 17})
            expect_decodes_all(laid, &spec, make_chunk(laid, spec, dtype, 0, n_tokens, CG_L2));
    }
}

TEST_P(KltDecodeTest, TakesSymbolsOfEverySize)
{
    const Laid laid(spec);
    for (const double scale : {30.0, 300.0, 3000.0}) /* beyond 8 bits, and up to 16 */
        expect_decodes_all(laid, &spec,
                           make_chunk(laid, spec, CG_DTYPE_FP32, 8, 24, CG_L1, CG_L0, scale));
}

INSTANTIATE_TEST_SUITE_P(Profiles, KltDecodeTest,
                         testing::Values(KltCase{"Apart", false, true, false},
                                         KltCase{"Joined", true, true, false},
                                         KltCase{"ApartSomeActive", false, false, false},
                                         KltCase{"JoinedSomeActive", true, false, false},
                                         KltCase{"ApartScaled", false, true, true},
                                         KltCase{"JoinedScaledSomeActive", true, false, true}),
                         [](const auto &c) { return c.param.name; });

TEST(PaperDecodeTest, WritesWhatTheCpuDecodes)
{
    ProfileSpec spec = paper_spec();
    spec.version = 2;
    for (const uint16_t n_sinks : {0, 4}) {
        spec.n_sinks = n_sinks;
        const Laid laid(spec);
        for (const unsigned dtype : DTYPES) {
            for (const uint32_t n_tokens : {1, 10, 11, 37}) {
                for (const cg_level level : {CG_L1, CG_L3})
                    expect_decodes_all(laid, &spec,
                                       make_chunk(laid, spec, dtype, 0, n_tokens, level));
            }
        }
    }
}

TEST(LosslessDecodeTest, WritesWhatTheCpuDecodes)
{
    const ProfileSpec spec = spec_2(true);
    const Laid laid(spec), none;
    for (const unsigned dtype : DTYPES) {
        for (const uint32_t n_tokens : {1, 16, 100}) { /* from 64 on there are several classes */
            const Bytes chunk = make_chunk(laid, spec, dtype, 8, n_tokens, CG_L0);
            expect_decodes_all(laid, nullptr, chunk);
            expect_decodes_all(none, nullptr, chunk);
        }
    }
}

// A profile of scales is laid out with them.
TEST(ScaledDecodeTest, WritesWhatTheCpuDecodes)
{
    for (const bool is_paper : {false, true}) {
        ProfileSpec spec = is_paper ? paper_spec() : spec_2(true);
        spec.version = 2;
        std::vector<float> scales(2u * spec.n_layers);
        for (size_t i = 0; i < scales.size(); i++)
            scales[i] = 0.03f * static_cast<float>(i * i + 1);
        const auto *pairs = reinterpret_cast<const float(*)[2]>(scales.data());
        Profile profile = make_profile(spec);
        ASSERT_EQ(cg_profile_for_cache_scales(profile.get(), pairs), CG_OK);
        const Laid laid(std::move(profile));
        cg_chunk_header header = make_header(spec, CG_DTYPE_FP8_E4M3, 0, 24);
        header.cache_scales = cg_cache_scales_hash(pairs, spec.n_layers);
        for (const cg_level level : {CG_L0, CG_L1, CG_L3}) {
            Bytes chunk;
            ASSERT_EQ(encode(laid.profile.get(), header, make_tokens(24, 1),
                             make_elements(header, 5, 30), level, &chunk),
                      CG_OK);
            expect_decodes_all(laid, level != CG_L0 ? &spec : nullptr, chunk);
        }
    }
}

// ---- a joint matrix ----

struct JointCase {
    const char *name;
    size_t n_shared;
    std::array<unsigned, 3> fraction_bits;
    unsigned unit_bits;
    bool all_active;
    unsigned least_shift;
    bool is_scaled = false;
};

void PrintTo(const JointCase &joint, std::ostream *out)
{
    *out << joint.name;
}

class JointDecodeTest : public testing::TestWithParam<JointCase>
{
  protected:
    JointDecodeTest()
    {
        spec.group_layers = {2, 2};
        spec = GetParam().is_scaled ? spec_4(spec, GetParam().n_shared)
                                    : spec_3(spec, GetParam().n_shared);
        spec.fraction_bits = GetParam().fraction_bits;
        spec.unit_bits = GetParam().unit_bits;
        spec.all_active = GetParam().all_active;
        spec.least_shift = GetParam().least_shift;
        spec.fine = GetParam().least_shift > 0;
        spec.nests = true;
    }
    ProfileSpec spec;
};

TEST_P(JointDecodeTest, WritesWhatTheCpuDecodes)
{
    const Laid laid(spec);
    for (const unsigned dtype : DTYPES) {
        for (const cg_level level : {CG_L1, CG_L2, CG_L3})
            expect_decodes_all(laid, &spec,
                               draw_chunk(laid, spec, dtype, 8, 21, level, level, draw_small));
    }
}

// What is given has more than 8 bits, or all of 16 and beyond; so have symbols.
TEST_P(JointDecodeTest, TakesSymbolsOfEverySize)
{
    const Laid laid(spec);
    for (const Draw draw : {draw_large, draw_any, draw_edge}) {
        for (const cg_level level : {CG_L1, CG_L2, CG_L3})
            expect_decodes_all(laid, &spec,
                               draw_chunk(laid, spec, CG_DTYPE_FP32, 8, 24, level, level, draw));
    }
}

TEST_P(JointDecodeTest, RefinesNestedLevelsAsFarAsTheyAreThere)
{
    const Laid laid(spec);
    for (const Draw draw : {draw_small, draw_any}) {
        const Bytes whole = draw_chunk(laid, spec, CG_DTYPE_BF16, 16, 53, CG_L1, CG_L3, draw);
        const cg_chunk_header header = header_of(whole);
        for (const cg_level level : {CG_L1, CG_L2, CG_L3})
            expect_decodes_all(
                laid, &spec,
                Bytes(whole.begin(),
                      whole.begin() + static_cast<std::ptrdiff_t>(header.level_bytes[level])));
    }
}

TEST_P(JointDecodeTest, KeepsExactFirstTokens)
{
    const Laid laid(spec);
    for (const uint32_t n_tokens : {3, 4, 17})
        expect_decodes_all(laid, &spec, make_chunk(laid, spec, CG_DTYPE_FP16, 0, n_tokens, CG_L2));
}

INSTANTIATE_TEST_SUITE_P(
    Profiles, JointDecodeTest,
    testing::Values(JointCase{"OneBand", 32, {2, 3, 4}, 12, true, 0},
                    JointCase{"AllComponentsShared", 128, {6, 5, 5}, 12, true, 0},
                    JointCase{"NoFraction", 32, {0, 0, 0}, 12, false, 0},
                    JointCase{"TwoBandsOneBitRounded", 64, {8, 8, 8}, 9, false, 0},
                    /* high digits are shifted by up to 28 bits */
                    JointCase{"ShiftsNearAWord", 32, {7, 8, 7}, 20, true, 12},
                    JointCase{"OneBandScaled", 32, {2, 3, 4}, 12, true, 0, true},
                    JointCase{"TwoBandsScaled", 64, {8, 8, 8}, 9, false, 0, true}),
    [](const auto &c) { return c.param.name; });

// A tile that has nothing large, and no rest, is not marked as if it had: that would only take
// time.
TEST(MarksDecodeTest, OnlyTilesThatHaveThemAreMarked)
{
    ProfileSpec spec;
    spec.group_layers = {2, 2};
    spec = spec_4(spec, 32);
    const Laid laid(spec);
    const auto marks = [&](Draw draw) {
        const Bytes chunk = draw_chunk(laid, spec, CG_DTYPE_BF16, 8, 21, CG_L2, CG_L2, draw);
        const cg_chunk_header h = header_of(chunk);
        const Planned planned = make_plan(laid, chunk, request_of(laid, chunk));
        const Blocks blocks = make_blocks(BlockSpec(), h.geometry, h.n_tokens);
        std::vector<Decoding> batch = {
            {laid.blob, chunk, planned.plan, planned.bytes, blocks, Bytes(blocks.n_bytes)}};
        run_decode(&batch, next_seed());
        EXPECT_EQ(batch[0].status, 0u);
        EXPECT_EQ(planned.plan.passes[0].kind, uint32_t{CG_CUDA_START});
        cg_cuda_start start;
        memcpy(&start, &planned.bytes[planned.plan.passes[0].jobs_at], sizeof start);
        EXPECT_GT(start.n_zeros, 0u);
        const auto first = batch[0].scratch.begin();
        return Bytes(first, first + static_cast<std::ptrdiff_t>(16 * start.n_zeros));
    };
    const auto small = marks([](Random *) { return int16_t{0}; }), any = marks(draw_any);
    EXPECT_EQ(small, Bytes(small.size(), 0));
    EXPECT_EQ(*std::max_element(any.begin(), any.end()), 1);
}

// ---- geometries ----

TEST(GeometryDecodeTest, WritesWhatTheCpuDecodes)
{
    struct Geometry {
        const char *name;
        uint16_t n_layers, n_kv_heads, head_dim, rotary_dim;
        std::vector<uint16_t> group_layers;
        uint32_t n_tokens;
    };
    const Geometry cases[] = {
        {"SmolLM2", 2, 3, 64, 64, {1, 1}, 61},  {"Qwen2.5", 2, 2, 128, 128, {2}, 40},
        {"Llama-3.1", 1, 8, 128, 128, {1}, 24}, {"head of 256", 1, 2, 256, 256, {1}, 16},
        {"one KV head", 2, 1, 64, 64, {2}, 33}, {"partial rotation", 2, 2, 64, 24, {1, 1}, 19},
        {"no rotation", 2, 2, 32, 0, {2}, 19},  {"odd pairs", 2, 3, 18, 10, {1, 1}, 19},
        {"tiny heads", 2, 5, 6, 6, {2}, 9},     {"several warps of rows", 1, 1, 32, 32, {1}, 300},
    };
    for (const Geometry &g : cases) {
        SCOPED_TRACE(g.name);
        ProfileSpec spec = spec_2(true);
        spec.n_layers = g.n_layers;
        spec.n_kv_heads = g.n_kv_heads;
        spec.head_dim = g.head_dim;
        spec.rotary_dim = g.rotary_dim;
        spec.group_layers = g.group_layers;
        spec.all_active = false;
        spec.nests = true;
        BlockSpec blocks;
        blocks.order = Order::PLANE_BLOCK_TOKEN_HEAD;
        const Laid laid(spec);
        expect_decodes_all(laid, &spec, make_chunk(laid, spec, CG_DTYPE_BF16, 0, g.n_tokens, CG_L2),
                           blocks);
        expect_decodes_all(laid, &spec,
                           make_chunk(laid, spec, CG_DTYPE_BF16, 8, g.n_tokens, CG_L1, CG_L3),
                           blocks);
        expect_decodes_all(laid, nullptr,
                           make_chunk(laid, spec, CG_DTYPE_BF16, 8, g.n_tokens, CG_L0), blocks);
    }
}

TEST(GeometryDecodeTest, TakesAJointMatrixOfAnyWidth)
{
    struct Geometry {
        const char *name;
        uint16_t n_layers, n_kv_heads, head_dim, rotary_dim;
        uint32_t n_tokens;
        size_t n_shared;
    };
    const Geometry cases[] = {
        {"SmolLM2", 2, 3, 64, 64, 61, 96},
        {"Llama-3.1", 2, 8, 128, 128, 24, 64},
        {"many groups", 10, 1, 32, 32, 19, 32}, /* a third of a thread block, and more than one */
        {"partial rotation", 3, 2, 64, 24, 19, 64},
        {"odd pairs", 3, 3, 18, 10, 19, 32},
        {"several warps of rows", 2, 1, 32, 32, 300, 32},
    };
    for (const Geometry &g : cases) {
        SCOPED_TRACE(g.name);
        ProfileSpec spec;
        spec.n_layers = g.n_layers;
        spec.n_kv_heads = g.n_kv_heads;
        spec.head_dim = g.head_dim;
        spec.rotary_dim = g.rotary_dim;
        spec.group_layers.assign(g.n_layers, 1);
        spec.most_components = 200;
        spec.all_active = false;
        spec.nests = true;
        spec = spec_3(spec, g.n_shared);
        const Laid laid(spec);
        for (const cg_level coarsest : {CG_L1, CG_L3}) {
            const Bytes chunk =
                draw_chunk(laid, spec, CG_DTYPE_BF16, 8, g.n_tokens, CG_L1, coarsest, draw_large);
            expect_decodes_all(laid, &spec, chunk);
            cg_cuda_request last = request_of(laid, chunk); /* a group whose tiles come late */
            last.first_group = g.n_layers - 1u;
            last.n_groups = 1;
            last.token_from = g.n_tokens - 1;
            expect_decodes(laid, &spec, chunk, last, BlockSpec());
        }
    }
}

TEST(GeometryDecodeTest, TakesMatricesOfMoreThan2048Channels)
{
    ProfileSpec spec = ten_layer_spec();
    spec.nests = true;
    const Laid laid(spec);
    expect_decodes_all(laid, &spec, make_chunk(laid, spec, CG_DTYPE_BF16, 0, 21, CG_L1, CG_L3));
}

TEST(GeometryDecodeTest, TurnsEachLayerByItsTable)
{
    ProfileSpec spec = spec_2(false);
    spec.theta = {10000.0, 500.0};
    spec.layer_rope = {0, 1, 1, 0};
    const Laid laid(spec);
    expect_decodes_all(laid, &spec, make_chunk(laid, spec, CG_DTYPE_BF16, 4096, 24, CG_L2));
}

// Rows of a chunk that are wanted lie anywhere in the order of scales, and so do thread blocks.
TEST(GeometryDecodeTest, FindsTokensWhereverTheirScalesPutThem)
{
    for (const size_t n_shared : {0, 32}) {
        ProfileSpec spec;
        spec.n_layers = 2;
        spec.group_layers = {1, 1};
        spec.nests = true;
        spec = spec_4(spec, n_shared);
        const Laid laid(spec);
        for (const uint32_t n_tokens : {8, 250, 1000}) {
            const Bytes chunk = make_chunk(laid, spec, CG_DTYPE_BF16, 8, n_tokens, CG_L1, CG_L3);
            BlockSpec blocks;
            blocks.n_blocks = 70;
            expect_decodes_all(laid, &spec, chunk, blocks);
            Random random(n_tokens);
            for (int i = 0; i < 8; i++) {
                cg_cuda_request r = request_of(laid, chunk);
                r.token_from = random.below(n_tokens);
                r.token_to =
                    r.token_from + 1 + random.below(std::min(40u, n_tokens - r.token_from));
                expect_decodes(laid, &spec, chunk, r, blocks);
            }
        }
    }
}

// ---- blocks and requests ----

TEST(BlocksDecodeTest, EveryLayout)
{
    const ProfileSpec spec = spec_2(true);
    ProfileSpec paper = paper_spec();
    paper.version = 2;
    const Laid laid(spec), laid_paper(paper);
    for (const Order order : {Order::PLANE_BLOCK_TOKEN_HEAD, Order::BLOCK_PLANE_TOKEN_HEAD,
                              Order::BLOCK_PLANE_HEAD_TOKEN, Order::BLOCK_HEAD_DIM_TOKEN}) {
        for (const uint32_t block_tokens : {1, 16, 128}) {
            for (const unsigned dtype : {CG_DTYPE_BF16, CG_DTYPE_FP32, CG_DTYPE_FP8_E4M3}) {
                BlockSpec blocks;
                blocks.order = order;
                blocks.block_tokens = block_tokens;
                blocks.first_token = 11;
                blocks.seed = block_tokens;
                expect_decodes_all(laid, &spec, make_chunk(laid, spec, dtype, 8, 21, CG_L2),
                                   blocks);
                expect_decodes_all(laid, nullptr, make_chunk(laid, spec, dtype, 8, 21, CG_L0),
                                   blocks);
                expect_decodes_all(laid_paper, &paper,
                                   make_chunk(laid_paper, paper, dtype, 8, 21, CG_L2), blocks);
            }
        }
    }
}

TEST(RequestDecodeTest, WritesOnlyWhatIsWanted)
{
    ProfileSpec klt = spec_2(true), joint = spec_3(), scaled = spec_4({}, 32), paper = paper_spec();
    klt.n_kv_heads = joint.n_kv_heads = scaled.n_kv_heads = paper.n_kv_heads = 4;
    paper.version = 2;
    paper.n_sinks = 3;
    for (const ProfileSpec &spec : {klt, joint, scaled, paper}) {
        const Laid laid(spec);
        for (const cg_level level : {CG_L0, CG_L2}) {
            const Bytes chunk = make_chunk(laid, spec, CG_DTYPE_BF16, 0, 37, level);
            const ProfileSpec *groups = level != CG_L0 ? &spec : nullptr;
            Random random(7);
            for (int i = 0; i < 12; i++) {
                cg_cuda_request r = request_of(laid, chunk);
                BlockSpec blocks;
                r.token_from = random.below(37);
                r.token_to = r.token_from + 1 + random.below(37 - r.token_from);
                r.head_from = blocks.head_from = random.below(4);
                r.head_to = blocks.head_to = r.head_from + 1 + random.below(4 - r.head_from);
                r.first_group = random.below(r.n_groups);
                r.n_groups = 1 + random.below(r.n_groups - r.first_group);
                expect_decodes(laid, groups, chunk, r, blocks);
            }
        }
    }
}

TEST(RequestDecodeTest, PlacesAChunkAtAnotherPosition)
{
    const ProfileSpec spec = spec_4(spec_2(true));
    const Laid laid(spec);
    const Bytes chunk = make_chunk(laid, spec, CG_DTYPE_BF16, 64, 24, CG_L2);
    for (const uint32_t position : {8, 72, 100000}) {
        Bytes there = chunk;
        cg_put_le(there.data() + 36, 4, position);
        seal_chunk(&there);
        cg_cuda_request r = request_of(laid, chunk);
        r.first_position = position;
        expect_decodes(laid, &spec, chunk, r, BlockSpec(), &there);
    }
    cg_cuda_request r = request_of(laid, chunk);
    r.first_position = 13; /* any position, also where no chunk could begin */
    EXPECT_EQ(make_plan(laid, chunk, r).status, CG_OK);
}

TEST(RequestDecodeTest, RefusesWhatItCannotDo)
{
    ProfileSpec spec = spec_2(true);
    const Laid laid(spec);
    const Bytes chunk = make_chunk(laid, spec, CG_DTYPE_BF16, 0, 24, CG_L2),
                exact = make_chunk(laid, spec, CG_DTYPE_BF16, 8, 24, CG_L0);
    cg_cuda_request r = request_of(laid, chunk);
    const auto status_of = [&](const Bytes &c, void (*change)(cg_cuda_request *)) {
        cg_cuda_request changed = request_of(laid, c);
        change(&changed);
        return make_plan(laid, c, changed).status;
    };
    EXPECT_EQ(status_of(chunk, [](auto *q) { q->first_position = 8; }), CG_ERR_UNSUPPORTED);
    EXPECT_EQ(status_of(exact, [](auto *q) { q->first_position = 16; }), CG_ERR_UNSUPPORTED);
    EXPECT_EQ(status_of(chunk, [](auto *q) { q->n_groups++; }), CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(status_of(chunk, [](auto *q) { q->n_groups = 0; }), CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(status_of(chunk, [](auto *q) { q->first_group = UINT32_MAX; }),
              CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(status_of(chunk, [](auto *q) { q->token_from = q->token_to; }),
              CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(status_of(chunk, [](auto *q) { q->token_to++; }), CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(status_of(chunk, [](auto *q) { q->head_to++; }), CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(status_of(chunk, [](auto *q) { q->head_from = q->head_to; }),
              CG_ERR_INVALID_ARGUMENT);

    cg_cuda_plan plan;
    Bytes room(1 << 20);
    EXPECT_EQ(
        cg_cuda_plan_fill(nullptr, chunk.data(), chunk.size(), &r, room.data(), room.size(), &plan),
        CG_ERR_FOREIGN_PROFILE);
    EXPECT_EQ(cg_cuda_plan_fill(laid.laid.get(), chunk.data(), chunk.size() - 1, &r, room.data(),
                                room.size(), &plan),
              CG_ERR_TRUNCATED);
}

TEST(RequestDecodeTest, RefusesPlansThatAreTooSmall)
{
    for (const ProfileSpec &spec : {spec_2(true), spec_3(), spec_4()}) {
        const Laid laid(spec);
        const Bytes chunk = make_chunk(laid, spec, CG_DTYPE_BF16, 0, 24, CG_L2);
        const cg_cuda_request r = request_of(laid, chunk);
        const Planned planned = make_plan(laid, chunk, r);
        ASSERT_EQ(planned.status, CG_OK);
        for (size_t n = 0; n < planned.plan.plan_bytes; n += 16) {
            const std::unique_ptr<uint8_t[]> small(new uint8_t[n + 1]);
            cg_cuda_plan unused;
            EXPECT_EQ(cg_cuda_plan_fill(laid.laid.get(), chunk.data(), chunk.size(), &r,
                                        small.get(), n, &unused),
                      CG_ERR_BUFFER_TOO_SMALL);
        }
    }
}

TEST(RequestDecodeTest, LeavesOlderVersionsToTheCpu)
{
    ProfileSpec spec;
    const Profile old = make_profile(spec);
    cg_cuda_profile *laid = nullptr;
    EXPECT_EQ(cg_cuda_profile_new(old.get(), &laid), CG_ERR_UNSUPPORTED_VERSION);
    EXPECT_EQ(laid, nullptr);

    const cg_chunk_header header = make_header(spec, CG_DTYPE_BF16, 8, 16);
    Bytes chunk;
    ASSERT_EQ(
        encode(old.get(), header, make_tokens(16, 1), make_elements(header, 1), CG_L2, &chunk),
        CG_OK);
    const Laid none;
    cg_cuda_request r = request_of(none, chunk);
    EXPECT_EQ(make_plan(none, chunk, r).status, CG_ERR_UNSUPPORTED_VERSION);
}

// ---- batches ----

// Chunks of several profiles, geometries, presets, dtypes and levels.
class BatchDecodeTest : public testing::Test
{
  protected:
    BatchDecodeTest()
    {
        ProfileSpec klt = spec_2(true), heads = spec_2(false), joint, paper = paper_spec();
        klt.nests = heads.nests = true;
        heads.n_layers = 1;
        heads.group_layers = {1};
        heads.n_kv_heads = 8;
        heads.head_dim = heads.rotary_dim = 128;
        joint.group_layers = {2, 2};
        joint.nests = true;
        joint = spec_4(joint, 64);
        paper.version = 2;
        paper.n_sinks = 3;
        specs = {klt, heads, joint, paper};
        for (const ProfileSpec &spec : specs)
            laid.push_back(std::make_unique<Laid>(spec));
    }
    // The i-th profile's. coarsest: L0 where levels are not nested.
    Wanted one(size_t i, unsigned dtype, uint32_t n_tokens, cg_level level,
               cg_level coarsest = CG_L0) const
    {
        const uint32_t position = n_tokens % 2 == 0 ? 0 : 8; // 0: exact first tokens
        Wanted w = {laid[i].get(),
                    level != CG_L0 ? &specs[i] : nullptr,
                    make_chunk(*laid[i], specs[i], dtype, position, n_tokens, level, coarsest),
                    {},
                    {}};
        w.request = request_of(*laid[i], w.chunk);
        w.blocks.seed = n_tokens;
        return w;
    }
    std::vector<Wanted> some() const
    {
        std::vector<Wanted> all = {
            one(0, CG_DTYPE_BF16, 21, CG_L1, CG_L3),  one(0, CG_DTYPE_BF16, 22, CG_L2, CG_L3),
            one(0, CG_DTYPE_FP16, 9, CG_L3),          one(1, CG_DTYPE_BF16, 24, CG_L1, CG_L2),
            one(1, CG_DTYPE_FP32, 17, CG_L2),         one(2, CG_DTYPE_BF16, 45, CG_L1, CG_L3),
            one(2, CG_DTYPE_BF16, 30, CG_L2, CG_L3),  one(2, CG_DTYPE_FP8_E4M3, 64, CG_L3),
            one(2, CG_DTYPE_BF16, 300, CG_L2, CG_L3), one(3, CG_DTYPE_BF16, 37, CG_L2),
            one(3, CG_DTYPE_FP32, 10, CG_L1),         one(0, CG_DTYPE_BF16, 16, CG_L0),
            one(1, CG_DTYPE_FP8_E5M2, 100, CG_L0)};
        all[1].blocks.order = Order::BLOCK_HEAD_DIM_TOKEN;
        all[5].blocks.block_tokens = 1;
        all[5].blocks.n_blocks = 64;
        all[5].request.token_from = 19;
        all[5].request.n_groups = 1;
        all[9].request.token_to = 12;
        return all;
    }
    std::vector<ProfileSpec> specs;
    std::vector<std::unique_ptr<Laid>> laid;
};

TEST_F(BatchDecodeTest, DecodesEachAsIfItWereAlone)
{
    const std::vector<Wanted> all = some();
    expect_decodes_together(all);
    Random random(3);
    for (int n = 0; n < 6; n++) {
        std::vector<Wanted> batch;
        for (uint32_t i = 1 + random.below(8); i > 0; i--)
            batch.push_back(all[random.below(static_cast<uint32_t>(all.size()))]);
        expect_decodes_together(batch);
    }
    const Wanted small = one(0, CG_DTYPE_BF16, 9, CG_L2, CG_L3);
    expect_decodes_together(std::vector<Wanted>(CG_CUDA_MAX_JOBS, small));
    expect_decodes_together({});
    EXPECT_ANY_THROW(expect_decodes_together(std::vector<Wanted>(CG_CUDA_MAX_JOBS + 1, small)));
}

// A chunk with a damaged stream that only kernels can find.
bool damage(Wanted *w, Random *random)
{
    Bytes bad = w->chunk, elements;
    const size_t first = header_of(bad).header_bytes;
    for (int i = 0; i < 3; i++)
        bad[first + random->below(static_cast<uint32_t>(bad.size() - first))] ^= 0x55;
    seal_chunk(&bad);
    w->status =
        decode(header_of(bad).level != CG_L0 ? w->laid->profile.get() : nullptr, bad, &elements);
    if (w->status != CG_ERR_CORRUPT && w->status != CG_ERR_TRUNCATED)
        return false;
    if (make_plan(*w->laid, bad, w->request).status != CG_OK)
        return false;
    w->chunk = bad;
    return true;
}

TEST_F(BatchDecodeTest, WhatIsWrongWithOneIsToldOfThatOneAlone)
{
    const std::vector<Wanted> all = some();
    int n_damaged = 0;
    Random random(11);
    for (int n = 0; n < 60 && n_damaged < 10; n++) {
        std::vector<Wanted> batch;
        for (uint32_t i = 0; i < 5; i++)
            batch.push_back(all[random.below(static_cast<uint32_t>(all.size()))]);
        const uint32_t which = random.below(5);
        Wanted &bad = batch[which];
        bad.request = request_of(*bad.laid, bad.chunk); /* all of it, as the CPU's decoder */
        if (!damage(&bad, &random))
            continue;
        n_damaged++;
        expect_decodes_together(batch);
    }
    EXPECT_EQ(n_damaged, 10);
}

TEST_F(BatchDecodeTest, TakesAsManyLaunchesAsTheJobWithTheMost)
{
    std::vector<Planned> plans;
    std::vector<cg_cuda_decode_job> jobs;
    for (const Wanted &w : some())
        plans.push_back(make_plan(*w.laid, w.chunk, w.request));
    for (const Planned &planned : plans)
        jobs.push_back({&planned.plan, {}});
    const auto launches = [](const std::vector<cg_cuda_decode_job> &of) {
        std::vector<std::pair<uint32_t, uint32_t>> out;
        uint32_t n_done[CG_CUDA_MAX_JOBS] = {};
        cg_cuda_launch launch;
        while (cg_cuda_next_launch(of.data(), static_cast<uint32_t>(of.size()), n_done, &launch))
            out.emplace_back(launch.kind, launch.n_passes);
        return out;
    };
    using Launches = std::vector<std::pair<uint32_t, uint32_t>>;
    EXPECT_EQ(launches({jobs[6]}), (Launches{{CG_CUDA_START, 1},
                                             {CG_CUDA_SYMBOLS, 1},
                                             {CG_CUDA_SYMBOLS, 1},
                                             {CG_CUDA_JOINT, 1},
                                             {CG_CUDA_KLT, 1},
                                             {CG_CUDA_EXPONENTS, 1}}));
    EXPECT_EQ(launches(jobs), (Launches{{CG_CUDA_START, 9},
                                        {CG_CUDA_SYMBOLS, 9},
                                        {CG_CUDA_SYMBOLS, 6},
                                        {CG_CUDA_SYMBOLS, 2},
                                        {CG_CUDA_JOINT, 4},
                                        {CG_CUDA_KLT, 9},
                                        {CG_CUDA_ANCHORS, 2},
                                        {CG_CUDA_DELTAS, 2},
                                        {CG_CUDA_EXPONENTS, 8}}));
    EXPECT_TRUE(launches({}).empty());
}

// ---- what must not be believed ----

TEST(HostileDecodeTest, BlocksThatAreNotThereAreSkippedAndTold)
{
    const ProfileSpec spec = spec_2(true);
    ProfileSpec paper = paper_spec();
    paper.version = 2;
    for (const ProfileSpec &s : {spec, paper}) {
        const Laid laid(s);
        for (const cg_level level : {CG_L0, CG_L2}) {
            const Bytes chunk = make_chunk(laid, s, CG_DTYPE_BF16, 8, 40, level);
            const cg_chunk_header header = header_of(chunk);
            for (const int64_t id : {int64_t{-1}, int64_t{40}, INT64_MIN, INT64_MAX}) {
                Blocks blocks = make_blocks(BlockSpec(), header.geometry, header.n_tokens);
                const cg_cuda_request r = request_of(laid, chunk);
                const Planned planned = make_plan(laid, chunk, r);
                Bytes elements, piece = noise(blocks.n_bytes, 3), want = piece;
                ASSERT_EQ(decode(laid.profile.get(), chunk, &elements), CG_OK);
                cg_cuda_request before = r, behind = r; /* tokens of the block in the middle */
                before.token_to = 16;
                behind.token_from = 32;
                for (const cg_cuda_request &part : {before, behind})
                    place(elements, header.geometry, 40, 0, s.n_layers, part, blocks, want.data());
                blocks.table[1] = id;
                EXPECT_EQ(run_decode(laid.blob, chunk, planned.plan, planned.bytes, blocks,
                                     next_seed(), &piece),
                          uint32_t{CG_ERR_INVALID_ARGUMENT});
                EXPECT_TRUE(piece == want);
            }
            Blocks blocks = make_blocks(BlockSpec(), header.geometry, header.n_tokens);
            blocks.layout.n_table--; /* a table that ends early */
            const Planned planned = make_plan(laid, chunk, request_of(laid, chunk));
            Bytes piece = noise(blocks.n_bytes, 3);
            EXPECT_EQ(run_decode(laid.blob, chunk, planned.plan, planned.bytes, blocks, next_seed(),
                                 &piece),
                      uint32_t{CG_ERR_INVALID_ARGUMENT});
        }
    }
}

// Checksums are corrected after each change, as an attacker would.
void expect_takes_damage_as_the_cpu_does(const Laid &laid, const ProfileSpec &spec,
                                         const Bytes &good, int n_tries)
{
    const cg_chunk_header header = header_of(good);
    const Blocks blocks = make_blocks(BlockSpec(), header.geometry, header.n_tokens);
    int n_refused = 0, n_by_kernels = 0;
    for (int i = 0; i < n_tries; i++) {
        Random random(next_seed());
        Bytes bad = good;
        for (uint32_t n = 1 + random.below(3); n > 0; n--) {
            const size_t at =
                header.header_bytes +
                random.below(static_cast<uint32_t>(good.size() - header.header_bytes));
            bad[at] = static_cast<uint8_t>(random.below(2) != 0 ? bad[at] ^ 1 << random.below(8)
                                                                : random.below(256));
        }
        seal_chunk(&bad);
        SCOPED_TRACE(testing::Message() << "try " << i);
        Bytes elements;
        const cg_status cpu = decode(laid.profile.get(), bad, &elements);
        const Planned planned = make_plan(laid, bad, request_of(laid, bad));
        Bytes piece = noise(blocks.n_bytes, 5), want = piece;
        uint32_t status = planned.status;
        if (status == CG_OK) {
            status = run_decode(laid.blob, bad, planned.plan, planned.bytes, blocks, next_seed(),
                                &piece);
            n_by_kernels += status != CG_OK;
        }
        ASSERT_EQ(status == CG_OK, cpu == CG_OK);
        n_refused += status != CG_OK;
        if (status == CG_OK) {
            place(elements, header.geometry, header.n_tokens, 0, spec.n_layers,
                  request_of(laid, bad), blocks, want.data());
            ASSERT_TRUE(piece == want);
            continue;
        }
        /* What is not the tokens' place is as it was. */
        const Bytes zeros = zeros_of(header);
        for (Bytes *side : {&piece, &want})
            place(zeros, header.geometry, header.n_tokens, 0, spec.n_layers, request_of(laid, bad),
                  blocks, side->data());
        ASSERT_TRUE(piece == want);
    }
    EXPECT_GT(n_refused, n_tries / 4);
    EXPECT_GT(n_by_kernels, 0);
}

TEST(HostileDecodeTest, TakesDamageAsTheCpuDoes)
{
    ProfileSpec klt = spec_2(true), paper = paper_spec();
    klt.nests = true;
    klt.n_layers = paper.n_layers = 2;
    klt.group_layers = paper.group_layers = {1, 1};
    paper.version = 2;
    const ProfileSpec joint = spec_3(klt), scaled = spec_4(klt, 32);
    const Laid laid_klt(klt), laid_joint(joint), laid_scaled(scaled), laid_paper(paper);
    expect_takes_damage_as_the_cpu_does(
        laid_klt, klt, make_chunk(laid_klt, klt, CG_DTYPE_BF16, 0, 24, CG_L1, CG_L3), 150);
    expect_takes_damage_as_the_cpu_does(
        laid_klt, klt, make_chunk(laid_klt, klt, CG_DTYPE_FP16, 8, 24, CG_L0), 150);
    expect_takes_damage_as_the_cpu_does(
        laid_joint, joint, make_chunk(laid_joint, joint, CG_DTYPE_BF16, 0, 24, CG_L1, CG_L3), 150);
    expect_takes_damage_as_the_cpu_does(
        laid_scaled, scaled, make_chunk(laid_scaled, scaled, CG_DTYPE_BF16, 0, 24, CG_L1, CG_L3),
        150);
    expect_takes_damage_as_the_cpu_does(
        laid_paper, paper, make_chunk(laid_paper, paper, CG_DTYPE_BF16, 0, 24, CG_L2), 150);
}

// The steps of blocks are checked before anything follows from them.
TEST(HostileDecodeTest, TakesOnlyScalesThatThereAre)
{
    const ProfileSpec spec = spec_4({}, 32);
    const Laid laid(spec);
    const Bytes good = make_chunk(laid, spec, CG_DTYPE_BF16, 0, 45, CG_L1);
    cg_chunk chunk;
    ASSERT_EQ(cg_chunk_open(good.data(), good.size(), &chunk), CG_OK);
    const cg_section steps = cg_chunk_section(&chunk, 1);
    ASSERT_EQ(steps.kind, CG_SECTION_STEPS);
    ASSERT_EQ(steps.bytes, 6u);
    for (size_t b = 0; b < steps.bytes; b++) {
        for (const unsigned scale : {CG_N_STEP_FACTORS + 0, 8, 255}) {
            Bytes bad = good, elements;
            bad[steps.offset + b] = static_cast<uint8_t>(scale);
            EXPECT_EQ(make_plan(laid, bad, request_of(laid, bad)).status, CG_ERR_CORRUPT);
            seal_chunk(&bad);
            EXPECT_EQ(make_plan(laid, bad, request_of(laid, bad)).status, CG_ERR_CORRUPT);
            EXPECT_EQ(decode(laid.profile.get(), bad, &elements), CG_ERR_CORRUPT);
        }
    }
    for (const uint32_t n_bytes : {0, 5, 7}) { // in rows of the table; what follows is elsewhere
        Bytes bad = good, elements;
        cg_put_le(bad.data() + CG_CHUNK_FIXED_BYTES + CG_CHUNK_SECTION_BYTES + 4, 4, n_bytes);
        seal_chunk(&bad);
        const cg_status cpu = decode(laid.profile.get(), bad, &elements);
        EXPECT_NE(cpu, CG_OK);
        cg_chunk_header header;
        size_t plan_bytes, scratch_bytes;
        ASSERT_EQ(cg_chunk_header_parse(good.data(), good.size(), &header), CG_OK);
        cg_cuda_plan_bound(laid.laid.get(), &header.geometry, header.n_tokens, &plan_bytes,
                           &scratch_bytes);
        Bytes room(plan_bytes);
        cg_cuda_plan plan;
        const cg_cuda_request r = request_of(laid, good);
        EXPECT_EQ(cg_cuda_plan_fill(laid.laid.get(), bad.data(), bad.size(), &r, room.data(),
                                    room.size(), &plan),
                  cpu);
    }
}

// Every group needs the joint matrix and the blocks' steps, whichever are wanted.
TEST(HostileDecodeTest, ChecksJointSectionsForAnyGroup)
{
    const ProfileSpec spec = spec_4({}, 32);
    const Laid laid(spec);
    const Bytes good = draw_chunk(laid, spec, CG_DTYPE_BF16, 8, 24, CG_L2, CG_L2, draw_small);
    cg_chunk chunk;
    ASSERT_EQ(cg_chunk_open(good.data(), good.size(), &chunk), CG_OK);
    for (uint32_t i = 1; i < chunk.header.n_sections; i++) {
        const cg_section section = cg_chunk_section(&chunk, i);
        Bytes bad = good;
        bad[section.offset + section.bytes / 2] ^= 1; /* in a stream */
        for (uint32_t g = 0; g < 2; g++) {
            cg_cuda_request r = request_of(laid, bad);
            r.first_group = g;
            r.n_groups = 1;
            EXPECT_EQ(make_plan(laid, bad, r).status, cg_section_is_joint(section.kind) ||
                                                              section.kind == CG_SECTION_STEPS ||
                                                              section.group == g
                                                          ? CG_ERR_CORRUPT
                                                          : CG_OK);
        }
    }
}

// Profiles that a reader takes, however odd: other shifts, digits, classes, means.
TEST(HostileDecodeTest, TakesAnyProfileThatTheCpuTakes)
{
    ProfileSpec klt = spec_2(true), paper = paper_spec();
    klt.n_layers = paper.n_layers = 2;
    klt.group_layers = paper.group_layers = {1, 1};
    klt.head_dim = paper.head_dim = 8;
    klt.rotary_dim = 6;
    paper.version = 2;
    ProfileSpec joint = spec_3(klt);
    joint.head_dim = 12; /* so that groups have components of their own */
    for (const ProfileSpec &spec : {klt, joint, spec_4(klt), paper}) {
        const Bytes good = make_profile_bytes(spec);
        int n_taken = 0;
        for (int i = 0; i < 300 && n_taken < 40; i++) {
            Random random(next_seed());
            Bytes bad = good;
            for (uint32_t n = 1 + random.below(4); n > 0; n--)
                bad[76 + random.below(static_cast<uint32_t>(bad.size()) - 76)] =
                    static_cast<uint8_t>(random.below(256));
            seal_profile(&bad);
            cg_profile *opened = nullptr;
            if (cg_profile_open(bad.data(), bad.size(), &opened) != CG_OK)
                continue;
            const Laid laid{Profile(opened)};
            SCOPED_TRACE(testing::Message() << "try " << i);
            const cg_chunk_header header = make_header(spec, CG_DTYPE_FP32, 8, 13);
            Bytes chunk;
            if (spec.n_shared > 0)
                chunk = draw_chunk(laid, spec, CG_DTYPE_FP32, 8, 13, CG_L1, CG_L1, draw_any);
            else
                ASSERT_EQ(encode_scaled(laid.profile.get(), header, make_tokens(13, 1),
                                        make_elements(header, 1), draw_scales(13, next_seed()),
                                        CG_L1, &chunk),
                          CG_OK);
            expect_decodes_all(laid, &spec, chunk);
            n_taken++;
        }
        EXPECT_EQ(n_taken, 40);
    }
}

// ---- files that were once written ----

Bytes read_file(const std::string &path)
{
    std::ifstream in(path, std::ios::binary);
    return Bytes(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
}

TEST(GoldenDecodeTest, WritesTheElementsOfTheFiles)
{
    const std::pair<const char *, std::vector<const char *>> sets[] = {
        {"v3",
         {"bf16-0-L0", "bf16-0-L1", "bf16-0-L2", "bf16-0-L3", "bf16-1-L1-streams", "fp16-0-L0",
          "fp16-0-L2", "fp32-0-L0", "fp32-0-L2"}},
        {"v3-joined", {"bf16-0-L1", "bf16-0-L2-streams", "bf16-1-L1", "fp16-0-L1", "fp32-1-L2"}},
        {"v3-paper", {"bf16-0-L1", "bf16-1-L3", "fp16-1-L2", "fp32-1-L2"}},
        {"v4",
         {"bf16-0-L1", "bf16-0-L2-streams", "bf16-0-L3", "bf16-1-L2", "fp16-0-L1", "fp32-0-L3",
          "fp32-1-L2"}},
        {"v5",
         {"bf16-0-L1", "bf16-0-L2-streams", "bf16-0-L2", "bf16-0-L3", "bf16-1-L1", "bf16-1-L2",
          "bf16-1-L3", "fp16-0-L1", "fp32-0-L3", "fp32-1-L2"}},
        {"v5-apart",
         {"bf16-0-L1", "bf16-0-L2-streams", "bf16-0-L2", "bf16-0-L3", "bf16-1-L1", "bf16-1-L2",
          "bf16-1-L3", "fp16-0-L1", "fp32-0-L3", "fp32-1-L2"}}};
    for (const auto &set : sets) {
        const std::string folder = std::string(CG_GOLDEN_DIR) + "/" + set.first + "/";
        const Laid laid(open_profile(read_file(folder + "profile.cgp")));
        for (const char *name : set.second) {
            SCOPED_TRACE(set.first + std::string("/") + name);
            const Bytes chunk = read_file(folder + name + ".kv"),
                        raw = read_file(folder + name + ".raw");
            const cg_chunk_header header = header_of(chunk);
            const cg_cuda_request r = request_of(laid, chunk);
            const Planned planned = make_plan(laid, chunk, r);
            ASSERT_EQ(planned.status, CG_OK);
            const Blocks blocks = make_blocks(BlockSpec(), header.geometry, header.n_tokens);
            Bytes piece = noise(blocks.n_bytes, 9), want = piece;
            place(raw, header.geometry, header.n_tokens, 0, header.geometry.n_layers, r, blocks,
                  want.data());
            EXPECT_EQ(run_decode(laid.blob, chunk, planned.plan, planned.bytes, blocks, next_seed(),
                                 &piece),
                      0u);
            EXPECT_TRUE(piece == want);
        }
    }
}

} // namespace
