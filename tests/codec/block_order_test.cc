// Blocks with steps of their own: profiles of version 4, chunks of version 5. That these decode to
// the bits of FORMAT.md is tested in exact_test.cc.
#include "codec/block_order.h"

#include "codec/profile_data.h"
#include "hostile_profiles.h"

#include <gtest/gtest.h>

namespace
{

using namespace cg_test;

// Bases that are exact enough for errors to be those of quantizers, and channels that no rotation
// mixes.
ProfileSpec fine_spec(bool joined, size_t n_shared)
{
    ProfileSpec spec;
    spec.joined = joined;
    spec = spec_4(spec, n_shared);
    spec.rotary_dim = 0;
    spec.fine = true;
    spec.nests = true;
    return spec;
}

// Without a joint matrix, K and V apart and joined; and with one.
std::vector<ProfileSpec> fine_specs()
{
    return {fine_spec(false, 0), fine_spec(true, 0), fine_spec(true, 32)};
}

// ---- the order ----

TEST(BlockOrder, SortsRowsByScaleThenByBlock)
{
    const Profile profile = make_profile(spec_4());
    cg_block_order order;
    ASSERT_EQ(cg_block_order_init(7, &order), CG_OK);
    EXPECT_EQ(order.n_runs, 1u);
    EXPECT_EQ(order.runs[0].n_rows, 7u);
    EXPECT_EQ(order.runs[0].classes_at, 0u);
    EXPECT_EQ(Bytes(order.factor_index, order.factor_index + 7), Bytes(7, 3));
    const uint8_t factor_index[] = {3, 0, 6, 0, 3, 3, 1};
    ASSERT_EQ(cg_block_order_sort(profile.get(), factor_index, &order), CG_OK);
    EXPECT_EQ(std::vector<uint16_t>(order.block, order.block + 7),
              (std::vector<uint16_t>{1, 3, 6, 0, 4, 5, 2}));
    EXPECT_EQ(Bytes(order.factor_index, order.factor_index + 7), (Bytes{0, 0, 1, 3, 3, 3, 6}));
    ASSERT_EQ(order.n_runs, 4u);
    const size_t n_rows[] = {2, 1, 3, 1}, scale[] = {0, 1, 3, 6};
    for (int i = 0; i < 4; i++) {
        EXPECT_EQ(order.runs[i].n_rows, n_rows[i]);
        const cg_level_columns &columns = profile->groups[0].columns[CG_L2 - 1][CG_K];
        for (unsigned c = 0; c < columns.n_active[7]; c++)
            ASSERT_EQ(
                columns.column_class[7][order.runs[i].classes_at + c],
                profile->class_of[scale[i] * profile->n_classes + columns.column_class[7][c]]);
    }
    const uint8_t none[] = {3, 3, 3, 3, 3, 3, 7};
    EXPECT_EQ(cg_block_order_sort(profile.get(), none, &order), CG_ERR_CORRUPT);
    EXPECT_EQ(order.n_runs, 4u);
    cg_block_order_destroy(&order);
}

// ---- profiles ----

TEST(BlockOrder, AProfileHasClassesOfScalesAndMeanQueries)
{
    for (const ProfileSpec &spec : fine_specs()) {
        const Bytes bytes = make_profile_bytes(spec);
        const Profile p = open_profile(bytes);
        EXPECT_EQ(p->joint != nullptr, spec.n_shared > 0);
        ASSERT_EQ(p->n_query_heads, 4u);
        const size_t at = behind_classes(spec), query_at = at + 7 * p->n_classes + 2;
        EXPECT_EQ(Bytes(p->class_of, p->class_of + 7 * p->n_classes),
                  Bytes(bytes.begin() + static_cast<long>(at),
                        bytes.begin() + static_cast<long>(query_at - 2)));
        for (size_t i = 0; i < size_t{4} * 4 * 16; i++)
            ASSERT_EQ(p->query_mean[i], cg_bf16_to_f32(static_cast<uint16_t>(
                                            cg_get_le(bytes.data() + query_at + 2 * i, 2))));
    }
    ProfileSpec unknown = fine_spec(true, 0);
    unknown.n_query_heads = 0;
    const Profile p = make_profile(unknown);
    EXPECT_EQ(p->n_query_heads, 0u);
    EXPECT_EQ(p->query_mean, nullptr);
}

TEST(BlockOrder, RefusesHostileProfiles)
{
    for (const ProfileSpec &spec : fine_specs()) {
        SCOPED_TRACE(testing::Message() << spec.joined << ' ' << spec.n_shared);
        const Bytes good = make_profile_bytes(spec);
        const size_t at = behind_classes(spec), heads_at = at + 7 * 8;
        const ProfileField cases[] = {
            {"unchanged", 12, 4, 0, CG_OK},
            {"joint 2", 79, 1, 2, CG_ERR_CORRUPT},
            {"of another joint", 79, 1, spec.n_shared == 0, CG_ERR_CORRUPT},
            {"joint with planes apart", 78, 2, 0x0100, CG_ERR_CORRUPT},
            {"anchors", 64, 2, 0x0200, CG_ERR_CORRUPT},
            {"the last class", at, 1, 7, CG_OK},
            {"a class that is not there", at, 1, 8, CG_ERR_CORRUPT},
            {"the last scale's", heads_at - 1, 1, 8, CG_ERR_CORRUPT},
            {"no multiple of KV heads", heads_at, 2, 5, CG_ERR_CORRUPT},
            {"more query heads than bytes", heads_at, 2, 65534, CG_ERR_TRUNCATED},
            {"a query that is infinite", heads_at + 2, 2, 0x7f80, CG_ERR_CORRUPT},
            {"a query that is no number", heads_at + 2 + 2 * 255, 2, 0xffc0, CG_ERR_CORRUPT},
            {"a large query", heads_at + 2, 2, 0xff7f, CG_OK},
        };
        for (const ProfileField &field : cases)
            expect_status_with(good, field);
        for (size_t n = 96; n < good.size(); n += n < heads_at + 600 ? 1 : 97) {
            Bytes cut(good.begin(), good.begin() + static_cast<long>(n));
            EXPECT_EQ(profile_status(cut), CG_ERR_TRUNCATED) << n;
            seal_profile(&cut);
            EXPECT_NE(profile_status(cut), CG_OK) << n;
        }
    }
}

// The coarsest step that a block may have: 2^1.5 times 2^(33 - 12) x 9/16 / weight, at L3, is at
// most 10^38.
TEST(BlockOrder, BoundsWhatIsDecodedByTheLargestScale)
{
    ProfileSpec spec = fine_spec(true, 0);
    spec.step[2][0] = spec.step[2][1] = 9 / 16.f;
    const size_t weight_at = 80 + 4 + 24 + 4 * 2 * 32 * 4;
    for (const auto &[weight, want] : {std::pair{3.4e-32f, CG_OK}, {3.3e-32f, CG_ERR_CORRUPT}}) {
        Bytes bytes = make_profile_bytes(spec);
        cg_put_le(bytes.data() + weight_at, 4, cg_f32_bits(weight));
        seal_profile(&bytes);
        EXPECT_EQ(profile_status(bytes), want) << weight;
    }
}

// A query times the stored K is what it is times the true one.
TEST(BlockOrder, ScalesOfTheCacheScaleQueriesToo)
{
    const Profile p = make_profile(spec_4()), scaled = make_profile(spec_4());
    const float scales[4][2] = {{1, 2}, {0.5f, 2}, {2, 0.25f}, {8, 1}};
    ASSERT_EQ(cg_profile_for_cache_scales(scaled.get(), scales), CG_OK);
    for (size_t i = 0; i < size_t{4} * 4 * 16; i++)
        ASSERT_EQ(scaled->query_mean[i], p->query_mean[i] * scales[i / 64][0]);
    Bytes large = make_profile_bytes(spec_4());
    cg_put_le(large.data() + behind_classes(spec_4()) + 7 * 8 + 2 + 2 * 64 * 3, 2, 0x7f00);
    seal_profile(&large);
    const Profile too_large = open_profile(large);
    EXPECT_EQ(cg_profile_for_cache_scales(too_large.get(), scales), CG_ERR_INVALID_ARGUMENT);
}

// ---- chunks ----

struct Section {
    cg_section at;
    Bytes bytes;
};

std::vector<Section> sections_of(const Bytes &bytes)
{
    cg_chunk chunk;
    EXPECT_EQ(cg_chunk_open(bytes.data(), bytes.size(), &chunk), CG_OK);
    std::vector<Section> all;
    for (uint32_t i = 0; i < chunk.header.n_sections; i++) {
        const cg_section s = cg_chunk_section(&chunk, i);
        all.push_back({s, Bytes(bytes.begin() + static_cast<long>(s.offset),
                                bytes.begin() + static_cast<long>(s.offset + s.bytes))});
    }
    return all;
}

TEST(BlockOrder, AnEncoderTakesScalesThatThereAre)
{
    ProfileSpec spec = fine_spec(true, 32);
    const ProfileSpec older = spec_3(spec);
    spec.n_query_heads = 0; // or encode() weighs blocks
    const Profile profile = make_profile(spec), before = make_profile(older);
    const cg_chunk_header header = make_header(spec, CG_DTYPE_BF16, 8, 75);
    const auto tokens = make_tokens(75, 1);
    const Bytes elements = make_elements(header, 1), own(10, 3), drawn = draw_scales(75, 1);
    Bytes chunk, other;
    // Without any they are the level's own.
    ASSERT_EQ(encode(profile.get(), header, tokens, elements, CG_L2, &chunk), CG_OK);
    ASSERT_EQ(encode_scaled(profile.get(), header, tokens, elements, own, CG_L2, &other), CG_OK);
    EXPECT_EQ(chunk, other);
    EXPECT_EQ(sections_of(chunk)[1].at.kind, CG_SECTION_STEPS);
    EXPECT_EQ(sections_of(chunk)[1].bytes, own);
    ASSERT_EQ(encode_scaled(profile.get(), header, tokens, elements, drawn, CG_L2, &other), CG_OK);
    EXPECT_EQ(sections_of(other)[1].bytes, drawn);
    Bytes none = own;
    none[9] = 7;
    EXPECT_EQ(encode_scaled(profile.get(), header, tokens, elements, none, CG_L2, &other),
              CG_ERR_INVALID_ARGUMENT);
    // Older profiles have no steps of blocks, and L0 none at all.
    ASSERT_EQ(encode(before.get(), header, tokens, elements, CG_L2, &chunk), CG_OK);
    ASSERT_EQ(encode_scaled(before.get(), header, tokens, elements, drawn, CG_L2, &other), CG_OK);
    EXPECT_EQ(chunk, other);
    ASSERT_EQ(encode(nullptr, header, tokens, elements, CG_L0, &chunk), CG_OK);
    ASSERT_EQ(encode_scaled(nullptr, header, tokens, elements, drawn, CG_L0, &other), CG_OK);
    EXPECT_EQ(chunk, other);
    EXPECT_EQ(cg_get_le(chunk.data() + 8, 4), 3u);
}

// What a quantizer's error is: that of a uniform distribution over the block's own step.
TEST(BlockOrder, ABlocksErrorIsWhatItsStepSays)
{
    for (ProfileSpec spec : fine_specs()) {
        spec.unit_bits = 13;
        for (auto &level : spec.step)
            level[CG_V] = level[CG_K];
        const Profile profile = make_profile(spec);
        const uint32_t n_tokens = 8 * 7 * 16;
        const cg_chunk_header header = make_header(spec, CG_DTYPE_FP32, 512, n_tokens);
        const Bytes scales = draw_scales(n_tokens, 5);
        const size_t channels = 32;
        for (const cg_level level : {CG_L1, CG_L3}) {
            // Noise about the mean, as large to the step at both levels: few symbols are 0, and
            // sums are small.
            Random random(3);
            Bytes elements;
            for (size_t i = 0; i < 2 * 4 * n_tokens * channels; i++) {
                const size_t ch = i / (n_tokens * channels) * channels + i % channels;
                put_element(&elements, CG_DTYPE_FP32,
                            static_cast<float>(profile->mean[ch] + 0.5 * random.normal() *
                                                                       spec.step[level - 1][CG_K] /
                                                                       spec.step[0][CG_K]));
            }
            Bytes chunk, decoded;
            ASSERT_EQ(encode_scaled(profile.get(), header, make_tokens(n_tokens, 1), elements,
                                    scales, level, &chunk),
                      CG_OK);
            ASSERT_EQ(decode(profile.get(), chunk, &decoded), CG_OK);
            const auto want = to_floats(elements, CG_DTYPE_FP32),
                       got = to_floats(decoded, CG_DTYPE_FP32);
            double square[CG_N_STEP_FACTORS] = {}, n[CG_N_STEP_FACTORS] = {};
            for (size_t i = 0; i < want.size(); i++) {
                const size_t plane = i / (n_tokens * channels), t = i / channels % n_tokens;
                square[scales[t / 8]] += std::pow(
                    (got[i] - want[i]) * profile->weight[plane * channels + i % channels], 2);
                n[scales[t / 8]]++;
            }
            for (int i = 0; i < CG_N_STEP_FACTORS; i++) {
                const double step = spec.step[level - 1][CG_K] * std::exp2((i - 3) / 2.0);
                EXPECT_NEAR(square[i] / n[i], step * step / 12, 0.06 * step * step / 12)
                    << "L" << level << " scale " << i << " shared " << spec.n_shared;
            }
        }
    }
}

TEST(BlockOrder, NestedLevelsAndTranscodedOnesDecodeAsIfCodedAlone)
{
    for (ProfileSpec spec : fine_specs()) {
        spec.all_active = false;
        const Profile profile = make_profile(spec);
        for (const uint32_t first_position : {0u, 256u}) {
            const cg_chunk_header header = make_header(spec, CG_DTYPE_BF16, first_position, 75);
            const auto tokens = make_tokens(75, 1);
            const Bytes elements = make_elements(header, 3), scales = draw_scales(75, 2);
            Bytes nested, fine;
            ASSERT_EQ(encode_scaled(profile.get(), header, tokens, elements, scales, CG_L1, &nested,
                                    CG_L3),
                      CG_OK);
            cg_chunk_header made;
            ASSERT_EQ(cg_chunk_header_parse(nested.data(), nested.size(), &made), CG_OK);
            EXPECT_EQ(made.version, 5u);
            for (int level = CG_L1; level <= CG_L3; level++) {
                SCOPED_TRACE(testing::Message()
                             << "L" << level << " at " << first_position << " joined "
                             << spec.joined << " shared " << spec.n_shared);
                Bytes alone, a, b;
                ASSERT_EQ(encode_scaled(profile.get(), header, tokens, elements, scales,
                                        static_cast<cg_level>(level), &alone),
                          CG_OK);
                const Bytes cut(nested.begin(),
                                nested.begin() + static_cast<long>(made.level_bytes[level]));
                EXPECT_EQ(cg_chunk_verify(cut.data(), cut.size()), CG_OK);
                ASSERT_EQ(decode(profile.get(), alone, &a), CG_OK);
                ASSERT_EQ(decode(profile.get(), cut, &b), CG_OK);
                EXPECT_EQ(a, b);
                if (level == CG_L1) {
                    fine = alone;
                    continue;
                }
                for (const Bytes &from : {fine, nested}) {
                    uint8_t *bytes = nullptr;
                    size_t n_bytes = 0;
                    ASSERT_EQ(cg_transcode(profile.get(), from.data(), from.size(),
                                           static_cast<cg_level>(level), &bytes, &n_bytes),
                              CG_OK);
                    const Bytes coarse(bytes, bytes + n_bytes);
                    free(bytes);
                    EXPECT_EQ(cg_chunk_verify(coarse.data(), coarse.size()), CG_OK);
                    EXPECT_EQ(sections_of(coarse)[1].bytes, scales);
                    ASSERT_EQ(decode(profile.get(), coarse, &b), CG_OK);
                    EXPECT_EQ(a, b);
                }
            }
        }
    }
}

// The chunk of other sections, sealed.
Bytes rebuild(const Bytes &chunk, const std::vector<Section> &sections, uint32_t version = 5)
{
    cg_chunk opened;
    EXPECT_EQ(cg_chunk_open(chunk.data(), chunk.size(), &opened), CG_OK);
    cg_chunk_header header = opened.header;
    header.version = version;
    header.n_sections = static_cast<uint32_t>(sections.size());
    std::vector<cg_section> rows;
    std::vector<cg_piece> pieces;
    std::vector<Bytes> kept;
    for (const Section &s : sections)
        kept.push_back(s.bytes);
    for (size_t i = 0; i < sections.size(); i++) {
        rows.push_back(sections[i].at);
        rows[i].bytes = static_cast<uint32_t>(kept[i].size());
        pieces.push_back({kept[i].data(), kept[i].size()});
    }
    uint8_t *bytes = nullptr;
    size_t n_bytes = 0;
    EXPECT_EQ(cg_chunk_assemble(&header, rows.data(), pieces.data(), &bytes, &n_bytes), CG_OK);
    const std::unique_ptr<uint8_t, MallocFree> owner(bytes);
    return Bytes(bytes, bytes + n_bytes);
}

TEST(BlockOrder, RefusesHostileSteps)
{
    for (const ProfileSpec &spec : fine_specs()) {
        const Profile profile = make_profile(spec);
        const cg_chunk_header header = make_header(spec, CG_DTYPE_BF16, 0, 33);
        Bytes chunk, decoded;
        ASSERT_EQ(encode_scaled(profile.get(), header, make_tokens(33, 1), make_elements(header, 1),
                                draw_scales(33, 1), CG_L2, &chunk, CG_L3),
                  CG_OK);
        const auto good = sections_of(chunk);
        ASSERT_EQ(rebuild(chunk, good), chunk);
        const auto expect_refused = [&](const char *what, const Bytes &bad) {
            uint8_t *coarse = nullptr;
            size_t n_coarse;
            EXPECT_EQ(cg_chunk_verify(bad.data(), bad.size()), CG_ERR_CORRUPT) << what;
            EXPECT_EQ(decode(profile.get(), bad, &decoded), CG_ERR_CORRUPT) << what;
            EXPECT_EQ(
                cg_transcode(profile.get(), bad.data(), bad.size(), CG_L3, &coarse, &n_coarse),
                CG_ERR_CORRUPT)
                << what;
            EXPECT_EQ(coarse, nullptr) << what;
        };
        auto bad = good;
        bad[1].bytes[4] = 7;
        expect_refused("no scale", rebuild(chunk, bad));
        bad[1].bytes = Bytes(4, 3);
        expect_refused("too few", rebuild(chunk, bad));
        bad[1].bytes = Bytes(6, 3);
        expect_refused("too many", rebuild(chunk, bad));
        bad = good;
        bad.insert(bad.begin() + 1, bad[1]);
        expect_refused("twice", rebuild(chunk, bad));
        bad = good;
        bad.erase(bad.begin() + 1);
        expect_refused("none", rebuild(chunk, bad));
        expect_refused("in an older version", rebuild(chunk, good, spec.n_shared > 0 ? 4 : 3));
        Bytes damaged = chunk; // and nothing else is wrong
        damaged[CG_CHUNK_FIXED_BYTES + CG_CHUNK_SECTION_BYTES + 8] ^= 1;
        Bytes hashed(damaged.begin(), damaged.begin() + 152);
        hashed.insert(hashed.end(), damaged.begin() + CG_CHUNK_FIXED_BYTES,
                      damaged.begin() + static_cast<long>(good[0].at.offset));
        cg_put_le(damaged.data() + 152, 8, XXH3_64bits(hashed.data(), hashed.size()));
        expect_refused("of another checksum", damaged);
    }
}

// The version is the profile's, and so is whether there is a joint matrix.
TEST(BlockOrder, AChunkAndItsProfileAreOfOneVersion)
{
    const ProfileSpec spec = fine_spec(true, 32), older = spec_3(spec), plain = fine_spec(true, 0);
    const Profile profile = make_profile(spec);
    const cg_chunk_header header = make_header(spec, CG_DTYPE_BF16, 8, 20);
    Bytes chunk, decoded;
    ASSERT_EQ(
        encode(profile.get(), header, make_tokens(20, 1), make_elements(header, 1), CG_L2, &chunk),
        CG_OK);
    for (const ProfileSpec &other : {older, plain}) {
        const Profile foreign = make_profile(other);
        Bytes lie = chunk, theirs;
        memcpy(lie.data() + 72, cg_profile_fingerprint(foreign.get())->bytes, 16);
        seal_chunk(&lie);
        EXPECT_EQ(decode(foreign.get(), lie, &decoded), CG_ERR_CORRUPT);
        ASSERT_EQ(encode(foreign.get(), header, make_tokens(20, 1), make_elements(header, 1), CG_L2,
                         &theirs),
                  CG_OK);
        memcpy(theirs.data() + 72, cg_profile_fingerprint(profile.get())->bytes, 16);
        seal_chunk(&theirs);
        EXPECT_EQ(decode(profile.get(), theirs, &decoded), CG_ERR_CORRUPT);
    }
}

} // namespace
