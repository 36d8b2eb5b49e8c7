#include "codec/codec.h"

#include "codec/kernels.h"
#include "codec/klt.h"
#include "profile_maker.h"

#include <array>
#include <gtest/gtest.h>
#include <limits>
#include <thread>

namespace
{

using namespace cg_test;

// Index of an element of [n_layers][2][n_tokens][channels].
size_t element(const cg_chunk_header &h, size_t layer, size_t plane, size_t t, size_t ch)
{
    return ((layer * 2 + plane) * h.n_tokens + t) * cg_geometry_channels(&h.geometry) + ch;
}

// The symbols of every section, as decoded from the chunk's bytes: [group][plane], the joint
// matrix's first, cells in storage order.
std::vector<std::vector<int16_t>> symbols_of(const cg_profile *profile, const Bytes &bytes)
{
    std::vector<std::vector<int16_t>> all;
    cg_chunk chunk;
    EXPECT_EQ(cg_chunk_open(bytes.data(), bytes.size(), &chunk), CG_OK);
    const BlockOrder order(profile, chunk);
    const size_t n_blocks = order.of.n_blocks;
    for (uint32_t i = 0; i < chunk.header.n_sections; i++) {
        const cg_section s = cg_chunk_section(&chunk, i);
        if (s.kind != CG_SECTION_SYMBOLS && s.kind != CG_SECTION_JOINT)
            continue;
        const cg_group *group =
            s.kind == CG_SECTION_JOINT ? profile->joint : &profile->groups[s.group];
        const cg_level_columns &columns = group->columns[chunk.header.level - 1][s.plane];
        const std::unique_ptr<void, MallocFree> memory(
            aligned_alloc(64, cg_symbols_bytes(&columns, n_blocks) + 64));
        const cg_symbols symbols =
            cg_symbols_lay(&columns, nullptr, order.of.runs, order.of.n_runs, memory.get());
        size_t used;
        EXPECT_EQ(cg_rans_decode(profile->classes, symbols.strips, symbols.n_strips, order.of.runs,
                                 order.of.n_runs, cg_profile_align(profile),
                                 bytes.data() + s.offset, s.bytes, &used),
                  CG_OK);
        EXPECT_EQ(used, s.bytes);
        all.emplace_back(symbols.cells[0], symbols.cells[0] + columns.n_columns * n_blocks);
    }
    return all;
}

TEST(Codec, L0IsBitExactInEveryDtypeAndForAnyBits)
{
    const ProfileSpec spec;
    for (const unsigned dtype : all_dtypes) {
        for (const uint32_t n_tokens : {1, 9, 33, 256, 2048}) {
            SCOPED_TRACE(testing::Message() << cg_dtype_name(dtype) << " n_tokens=" << n_tokens);
            cg_chunk_header header = make_header(spec, static_cast<uint8_t>(dtype), 5, n_tokens);
            Bytes elements = make_elements(header, n_tokens), chunk, decoded;
            Random random(n_tokens);
            for (int i = 0; i < 200; i++) // NaNs, infinities, subnormals
                elements[random.below(static_cast<uint32_t>(elements.size()))] =
                    static_cast<uint8_t>(random.below(256));
            const auto tokens = make_tokens(n_tokens, 1);
            ASSERT_EQ(encode(nullptr, header, tokens, elements, CG_L0, &chunk), CG_OK);
            EXPECT_EQ(cg_chunk_verify(chunk.data(), chunk.size()), CG_OK);
            ASSERT_EQ(decode(nullptr, chunk, &decoded), CG_OK);
            ASSERT_EQ(decoded, elements);
        }
    }
}

// With all components active and a basis that is orthonormal, a coefficient is off by at most half
// a step, and so is the weighted error of a block, in its norm: sqrt(8 * channels of the group) / 2
// steps.
TEST(Codec, LossyErrorsStayWithinTheStep)
{
    ProfileSpec spec;
    spec.wide_share = 1;
    const Profile profile = make_profile(spec);
    const size_t channels = 32;
    for (const uint32_t first_position : {0u, 8u, 25600u}) {
        for (const uint32_t n_tokens : {1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 32, 33, 255, 256, 2048}) {
            for (int level = CG_L1; level <= CG_L3; level++) {
                SCOPED_TRACE(testing::Message() << "L" << level << " n_tokens=" << n_tokens
                                                << " at " << first_position);
                const Coded c = code(spec, profile.get(), CG_DTYPE_FP32, first_position, n_tokens,
                                     static_cast<cg_level>(level), n_tokens);
                ASSERT_EQ(c.status, CG_OK);
                ASSERT_EQ(cg_chunk_verify(c.chunk.data(), c.chunk.size()), CG_OK);
                Bytes decoded;
                ASSERT_EQ(decode(profile.get(), c.chunk, &decoded), CG_OK);
                const auto want = to_floats(c.elements, CG_DTYPE_FP32),
                           got = to_floats(decoded, CG_DTYPE_FP32);
                const uint32_t n_sinks = first_position == 0 ? std::min(n_tokens, 4u) : 0;
                for (size_t g = 0, layer = 0; g < spec.group_layers.size();
                     layer += spec.group_layers[g++]) {
                    for (unsigned plane = 0; plane < 2; plane++) {
                        const double n = 8.0 * static_cast<double>(channels * spec.group_layers[g]);
                        // bf16 bases are not quite orthonormal: 2^-9 of each value, and of the
                        // error.
                        const double bound =
                            0.5 * spec.step[level - 1][plane] * std::sqrt(n) * 1.02 +
                            0.02 * std::sqrt(n);
                        for (uint32_t b = 0; b < n_tokens; b += 8) {
                            double error = 0;
                            for (size_t l = 0; l < spec.group_layers[g]; l++) {
                                for (uint32_t t = b; t < std::min(b + 8, n_tokens); t++) {
                                    for (size_t ch = 0; ch < channels; ch++) {
                                        const size_t e = element(c.header, layer + l, plane, t, ch);
                                        if (t < n_sinks) {
                                            ASSERT_EQ(got[e], want[e]);
                                        } else {
                                            // A rotation turns pairs of channels whose weights may
                                            // differ: 2 at most.
                                            const float w =
                                                profile
                                                    ->weight[(2 * (layer + l) + plane) * channels +
                                                             ch];
                                            const double factor = plane == CG_K ? 0.5 : w;
                                            error += std::pow((got[e] - want[e]) * factor, 2);
                                        }
                                    }
                                }
                            }
                            ASSERT_LE(std::sqrt(error), bound)
                                << "block at " << b << " plane " << plane << " group " << g;
                        }
                    }
                }
            }
        }
    }
}

TEST(Codec, FinerLevelsAreCloserAndLarger)
{
    ProfileSpec spec;
    spec.all_active = false;
    const Profile profile = make_profile(spec);
    double last_error = 0;
    size_t last_bytes = std::numeric_limits<size_t>::max();
    for (int level = CG_L1; level <= CG_L3; level++) {
        const Coded c =
            code(spec, profile.get(), CG_DTYPE_BF16, 64, 256, static_cast<cg_level>(level));
        Bytes decoded;
        ASSERT_EQ(decode(profile.get(), c.chunk, &decoded), CG_OK);
        const auto want = to_floats(c.elements, CG_DTYPE_BF16),
                   got = to_floats(decoded, CG_DTYPE_BF16);
        double error = 0;
        for (size_t i = 0; i < want.size(); i++)
            error += std::pow(got[i] - want[i], 2);
        EXPECT_GT(error, last_error) << level;
        EXPECT_LT(c.chunk.size(), last_bytes) << level;
        last_error = error;
        last_bytes = c.chunk.size();
    }
}

TEST(Codec, TheFirstTokensAreExactInEveryDtype)
{
    for (const unsigned i : {0, 1, 2, 3, 4, 5, 6, 7}) {
        const uint16_t n_sinks = std::array<uint16_t, 4>{0, 1, 4, 8}[i % 4];
        ProfileSpec spec = i < 4 ? ProfileSpec() : spec_3();
        spec.n_sinks = n_sinks;
        const Profile profile = make_profile(spec);
        for (const unsigned dtype : all_dtypes) {
            for (const uint32_t n_tokens : {1, 3, 8, 20}) {
                const Coded c = code(spec, profile.get(), dtype, 0, n_tokens, CG_L3);
                ASSERT_EQ(c.status, CG_OK);
                Bytes decoded;
                ASSERT_EQ(decode(profile.get(), c.chunk, &decoded), CG_OK);
                const size_t n_bytes =
                    32 * cg_dtype_bytes(dtype) * std::min<size_t>(n_tokens, n_sinks);
                for (size_t plane = 0; plane < 2u * spec.n_layers; plane++) {
                    const size_t at = plane * n_tokens * 32 * cg_dtype_bytes(dtype);
                    EXPECT_TRUE(std::equal(decoded.begin() + at, decoded.begin() + at + n_bytes,
                                           c.elements.begin() + at));
                }
            }
        }
    }
}

TEST(Codec, ShapesOfHeadsAndRotations)
{
    const struct {
        uint16_t heads, head_dim, rotary_dim;
    } shapes[] = {
        {1, 2, 2},     {1, 2, 0},     {3, 6, 4},     {5, 64, 64},  {1, 66, 32},
        {2, 128, 128}, {1, 256, 256}, {1, 258, 258}, {1, 320, 64},
    };
    for (const auto &shape : shapes) {
        SCOPED_TRACE(testing::Message()
                     << shape.heads << " x " << shape.head_dim << " rotary " << shape.rotary_dim);
        ProfileSpec spec;
        spec.n_layers = 2;
        spec.n_kv_heads = shape.heads;
        spec.head_dim = shape.head_dim;
        spec.rotary_dim = shape.rotary_dim;
        spec.group_layers = {1, 1};
        spec.n_sinks = 0;
        spec.wide_share = 1; // bytes would add errors of their own
        const Profile profile = make_profile(spec);
        const Coded c = code(spec, profile.get(), CG_DTYPE_FP32, 800, 20, CG_L1);
        ASSERT_EQ(c.status, CG_OK);
        Bytes decoded;
        ASSERT_EQ(decode(profile.get(), c.chunk, &decoded), CG_OK);
        const auto want = to_floats(c.elements, CG_DTYPE_FP32),
                   got = to_floats(decoded, CG_DTYPE_FP32);
        double error = 0;
        for (size_t i = 0; i < want.size(); i++)
            error += std::pow(got[i] - want[i], 2);
        // Uniform errors of a step: 1/16 / sqrt(12), weights between 1/2 and 2.
        EXPECT_LT(std::sqrt(error / static_cast<double>(want.size())), 0.05);
    }
}

TEST(Codec, EachLayerIsRotatedByItsOwnTable)
{
    // Groups of layers of one table: each layer is as in a profile that has only that table.
    ProfileSpec spec;
    spec.group_layers = {2, 2};
    std::vector<Bytes> only(2);
    const auto decoded = [&](uint32_t first_position) {
        const Profile profile = make_profile(spec);
        const Coded c = code(spec, profile.get(), CG_DTYPE_FP32, first_position, 24, CG_L1);
        Bytes out;
        EXPECT_EQ(c.status, CG_OK);
        EXPECT_EQ(decode(profile.get(), c.chunk, &out), CG_OK);
        return out;
    };
    for (const uint32_t first_position : {0u, 256u}) {
        spec.layer_rope.clear();
        for (unsigned i = 0; i < 2; i++) {
            spec.theta = {i == 0 ? 10000.0 : 100.0};
            only[i] = decoded(first_position);
        }
        spec.theta = {10000.0, 100.0};
        spec.layer_rope = {0, 0, 1, 1};
        const Bytes both = decoded(first_position);
        const auto half = static_cast<std::ptrdiff_t>(both.size() / 2); // 2 of 4 layers
        EXPECT_FALSE(std::equal(only[0].begin(), only[0].begin() + half, only[1].begin()));
        EXPECT_TRUE(std::equal(both.begin(), both.begin() + half, only[0].begin()))
            << first_position;
        EXPECT_TRUE(std::equal(both.begin() + half, both.end(), only[1].begin() + half))
            << first_position;
    }
}

TEST(Codec, WhatExceedsFp16BecomesItsLargestNumber)
{
    ProfileSpec spec;
    spec.step[2][CG_V] = 4000;
    const Profile profile = make_profile(spec);
    Coded c = code(spec, profile.get(), CG_DTYPE_FP16, 8, 16, CG_L3);
    Random random(1);
    Bytes large;
    for (size_t i = 0; i < c.elements.size() / 2; i++)
        put_element(&large, CG_DTYPE_FP16, random.below(2) ? 65504.f : -65504.f);
    ASSERT_EQ(encode(profile.get(), c.header, c.tokens, large, CG_L3, &c.chunk), CG_OK);
    Bytes decoded;
    ASSERT_EQ(decode(profile.get(), c.chunk, &decoded), CG_OK);
    bool clamped = false;
    for (const float value : to_floats(decoded, CG_DTYPE_FP16)) {
        ASSERT_TRUE(std::isfinite(value));
        clamped |= std::fabs(value) == 65504.f;
    }
    EXPECT_TRUE(clamped);
}

// All numbers of a type, by the definition of its bits; ends with the one that would follow its
// largest.
std::vector<double> fp8_numbers(int mantissa_bits, int bias, size_t n)
{
    std::vector<double> numbers;
    for (int i = 0; numbers.size() <= n; i++) {
        const int exponent = i >> mantissa_bits, mantissa = i % (1 << mantissa_bits);
        numbers.push_back(std::ldexp((exponent > 0 ? 1 << mantissa_bits : 0) + mantissa,
                                     std::max(exponent, 1) - bias - mantissa_bits));
    }
    return numbers;
}

TEST(Fp8, RoundsToTheNearestAndTiesToEvenAndSaturates)
{
    const struct {
        unsigned dtype;
        uint8_t (*from)(float);
        float (*to)(uint8_t);
        std::vector<double> numbers;
        float largest;
    } types[] = {
        {CG_DTYPE_FP8_E4M3, cg_e4m3_from_f32, cg_e4m3_to_f32, fp8_numbers(3, 7, 127), 448},
        {CG_DTYPE_FP8_E5M2, cg_e5m2_from_f32, cg_e5m2_to_f32, fp8_numbers(2, 15, 124), 57344}};
    for (const auto &type : types) {
        SCOPED_TRACE(cg_dtype_name(type.dtype));
        const unsigned n = static_cast<unsigned>(type.numbers.size()) - 1;
        EXPECT_EQ(type.numbers[n - 1], type.largest);
        for (const unsigned sign : {0u, 0x80u}) {
            const float one = sign != 0 ? -1.f : 1.f;
            for (unsigned i = 0; i < n; i++) {
                const auto number = static_cast<float>(type.numbers[i]),
                           middle = static_cast<float>((type.numbers[i] + type.numbers[i + 1]) / 2);
                const unsigned above = std::min(i + 1, n - 1);
                EXPECT_EQ(cg_f32_bits(type.to(static_cast<uint8_t>(sign | i))),
                          cg_f32_bits(one * number));
                EXPECT_EQ(type.from(one * number), sign | i);
                EXPECT_EQ(type.from(one * std::nextafter(middle, 0.f)), sign | i);
                EXPECT_EQ(type.from(one * middle), sign | (i % 2 == 0 ? i : above));
                EXPECT_EQ(type.from(one * std::nextafter(middle, 1e9f)), sign | above);
            }
            for (const float huge : {type.largest * 4, 3.4e38f, HUGE_VALF})
                EXPECT_EQ(type.from(one * huge), sign | (n - 1));
            EXPECT_EQ(type.from(one * 0x1p-140f), sign);
            EXPECT_TRUE(std::isnan(type.to(static_cast<uint8_t>(sign | 0x7f))));
        }
        EXPECT_TRUE(std::isnan(type.to(type.from(NAN))));
    }
    EXPECT_TRUE(std::isinf(cg_e5m2_to_f32(0x7c)));
}

// Powers of two scale without rounding: so symbols and decoded elements are those of the elements
// times their scales, but for the last rounding.
TEST(Fp8, AScaledCacheIsCodedAsTheElementsThatItStandsFor)
{
    for (const bool is_paper : {false, true}) {
        const ProfileSpec spec = spec_2(false, is_paper ? paper_spec() : ProfileSpec());
        const Profile plain = make_profile(spec), scaled = make_profile(spec);
        std::vector<float> scales(2u * spec.n_layers);
        for (size_t i = 0; i < scales.size(); i++)
            scales[i] = std::ldexp(1.f, static_cast<int>(i % 5) - 3);
        const auto *pairs = reinterpret_cast<const float(*)[2]>(scales.data());
        ASSERT_EQ(cg_profile_for_cache_scales(scaled.get(), pairs), CG_OK);

        Coded c = code(spec, plain.get(), CG_DTYPE_FP8_E4M3, 0, 24, CG_L1);
        cg_chunk_header wide = c.header;
        wide.geometry.dtype = CG_DTYPE_FP32;
        const std::vector<float> stored = to_floats(c.elements, CG_DTYPE_FP8_E4M3);
        const size_t n_plane = stored.size() / scales.size();
        Bytes meant, want, got, chunk;
        for (size_t i = 0; i < stored.size(); i++)
            put_element(&meant, CG_DTYPE_FP32, stored[i] * scales[i / n_plane]);
        c.header.cache_scales = cg_cache_scales_hash(pairs, spec.n_layers);
        for (const cg_level level : {CG_L1, CG_L2, CG_L3}) {
            ASSERT_EQ(encode(scaled.get(), c.header, c.tokens, c.elements, level, &c.chunk), CG_OK);
            ASSERT_EQ(encode(plain.get(), wide, c.tokens, meant, level, &chunk), CG_OK);
            EXPECT_EQ(cg_chunk_verify(c.chunk.data(), c.chunk.size()), CG_OK);
            ASSERT_EQ(decode(scaled.get(), c.chunk, &got), CG_OK);
            ASSERT_EQ(decode(plain.get(), chunk, &want), CG_OK);
            const std::vector<float> values = to_floats(want, CG_DTYPE_FP32);
            want.clear();
            for (size_t i = 0; i < values.size(); i++)
                put_element(&want, CG_DTYPE_FP8_E4M3, values[i] / scales[i / n_plane]);
            EXPECT_EQ(got, want);
            // Other scales, or none: another cache.
            EXPECT_EQ(decode(plain.get(), c.chunk, &got), CG_ERR_FOREIGN_MODEL);
            EXPECT_EQ(decode(scaled.get(), chunk, &got), CG_ERR_FOREIGN_MODEL);
        }
        EXPECT_EQ(encode(plain.get(), c.header, c.tokens, c.elements, CG_L2, &chunk),
                  CG_ERR_FOREIGN_MODEL);
        ASSERT_EQ(encode(nullptr, c.header, c.tokens, c.elements, CG_L0, &chunk), CG_OK);
        EXPECT_EQ(cg_get_le(chunk.data() + 48, 8), c.header.cache_scales);
        ASSERT_EQ(decode(nullptr, chunk, &got), CG_OK);
        EXPECT_EQ(got, c.elements);
        chunk[27] = CG_DTYPE_BF16; // which has no scales
        seal_chunk(&chunk);
        EXPECT_EQ(decode(nullptr, chunk, &got), CG_ERR_CORRUPT);
    }
}

TEST(Fp8, RefusesScalesThatAreNone)
{
    const ProfileSpec spec = spec_2(true);
    std::vector<float> scales(2u * spec.n_layers, 1.f);
    const auto *pairs = reinterpret_cast<const float(*)[2]>(scales.data());
    EXPECT_EQ(cg_cache_scales_hash(pairs, spec.n_layers), 0u);
    EXPECT_EQ(cg_profile_for_cache_scales(make_profile(spec).get(), pairs), CG_OK);
    EXPECT_EQ(cg_profile_for_cache_scales(make_profile(ProfileSpec()).get(), pairs), CG_OK);
    for (const float bad : {0.f, -1.f, NAN, HUGE_VALF, 1e-40f, 1e-37f}) {
        scales.back() = bad; // with the last, elements would be no numbers
        EXPECT_EQ(cg_profile_for_cache_scales(make_profile(spec).get(), pairs),
                  CG_ERR_INVALID_ARGUMENT)
            << bad;
    }
    scales.back() = 0.5f;
    EXPECT_NE(cg_cache_scales_hash(pairs, spec.n_layers), 0u);
    EXPECT_EQ(cg_profile_for_cache_scales(make_profile(spec).get(), pairs), CG_OK);
    EXPECT_EQ(cg_profile_for_cache_scales(make_profile(ProfileSpec()).get(), pairs),
              CG_ERR_UNSUPPORTED);
}

TEST(Codec, CodesHugeFiniteNumbersWithoutHarm)
{
    const ProfileSpec spec;
    const Profile profile = make_profile(spec);
    Coded c = code(spec, profile.get(), CG_DTYPE_FP32, 0, 24, CG_L1);
    Random random(2);
    for (size_t i = 0; i < c.elements.size(); i += 4)
        cg_put_le(&c.elements[i], 4,
                  cg_f32_bits(random.below(2) ? 3.4e38f : -3.4e38f)); // the sums overflow
    ASSERT_EQ(encode(profile.get(), c.header, c.tokens, c.elements, CG_L1, &c.chunk), CG_OK);
    Bytes decoded;
    EXPECT_EQ(decode(profile.get(), c.chunk, &decoded), CG_OK);
}

TEST(Codec, CountsTheSymbolsAtTheEndsOf16Bits)
{
    const ProfileSpec spec; // of version 1: no row is halved
    const Profile profile = make_profile(spec);
    const cg_chunk_header header = make_header(spec, CG_DTYPE_FP32, 8, 24);
    const auto tokens = make_tokens(24, 1);
    for (const double scale : {1.0, 3000.0}) {
        const Bytes elements = make_elements(header, 1, scale);
        uint8_t *bytes = nullptr;
        size_t n_bytes = 0;
        uint64_t n_counted = 0, n_at_ends = 0;
        ASSERT_EQ(cg_encode_chunk(profile.get(), &header, tokens.data(), elements.data(),
                                  elements.size(), CG_L1, CG_L1, 1, &bytes, &n_bytes, &n_counted),
                  CG_OK);
        const std::unique_ptr<uint8_t, MallocFree> owner(bytes);
        for (const auto &symbols : symbols_of(profile.get(), Bytes(bytes, bytes + n_bytes)))
            for (const int16_t symbol : symbols)
                n_at_ends += std::abs(symbol) == INT16_MAX;
        EXPECT_EQ(n_counted, n_at_ends);
        EXPECT_EQ(n_at_ends > 0, scale > 1);
    }
}

TEST(Codec, LossyLevelsRefuseWhatIsNotFinite)
{
    const ProfileSpec spec;
    const Profile profile = make_profile(spec);
    for (const unsigned dtype : all_dtypes) {
        for (const float bad :
             {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
            Coded c = code(spec, profile.get(), dtype, 0, 10, CG_L2);
            Bytes one, chunk;
            if (dtype == CG_DTYPE_FP16)
                put(&one, std::isnan(bad) ? 0x7e00 : 0x7c00, 2);
            else if (dtype == CG_DTYPE_FP8_E4M3 || dtype == CG_DTYPE_FP8_E5M2) // e4m3 has only NaN
                put(&one, std::isnan(bad) || dtype == CG_DTYPE_FP8_E4M3 ? 0xff : 0xfc, 1);
            else
                put_element(&one, dtype, bad);
            std::copy(one.begin(), one.end(), c.elements.end() - static_cast<long>(one.size()));
            EXPECT_EQ(encode(profile.get(), c.header, c.tokens, c.elements, CG_L2, &chunk),
                      CG_ERR_INVALID_ARGUMENT);
            EXPECT_EQ(encode(nullptr, c.header, c.tokens, c.elements, CG_L0, &chunk), CG_OK);
        }
    }
}

class LevelsTest : public testing::TestWithParam<unsigned> // the profile's version
{
};

TEST_P(LevelsTest, AtOnceEqualOneAtATime)
{
    ProfileSpec spec = GetParam() == 4   ? spec_4(ProfileSpec(), 32)
                       : GetParam() == 3 ? spec_3()
                                         : ProfileSpec();
    spec.all_active = false;
    const Profile profile = make_profile(spec);
    const cg_chunk_header header = make_header(spec, CG_DTYPE_BF16, 0, 40);
    const auto tokens = make_tokens(40, 3, 1u << 25);
    const Bytes elements = make_elements(header, 3);
    cg_encoder *encoder;
    ASSERT_EQ(cg_encoder_new(profile.get(), &header, tokens.data(), 0xf, &encoder), CG_OK);
    const size_t scratch_bytes = cg_encoder_scratch_bytes(encoder);
    const std::unique_ptr<void, MallocFree> scratch(
        aligned_alloc(64, (scratch_bytes + 63) / 64 * 64));
    const size_t plane_bytes = 40 * 32 * 2;
    for (uint32_t task = cg_encoder_n_tasks(encoder); task-- > 0;) { // in any order
        const cg_task_shape shape = cg_encoder_task_shape(encoder, task);
        EXPECT_EQ(shape.plane, spec.joined ? 0 : task % 2);
        EXPECT_EQ(shape.n_planes, spec.joined ? 2u : 1u);
        EXPECT_EQ(shape.elements_bytes, shape.n_planes * shape.n_layers * plane_bytes);
        const Bytes in = elements_of(elements, header, shape);
        ASSERT_EQ(cg_encoder_run(encoder, task, scratch.get(), scratch_bytes, in.data()), CG_OK);
    }
    for (int level = CG_L0; level <= CG_L3; level++) {
        uint8_t *bytes;
        size_t n_bytes;
        ASSERT_EQ(cg_encoder_finish(encoder, static_cast<cg_level>(level), &bytes, &n_bytes),
                  CG_OK);
        const std::unique_ptr<uint8_t, MallocFree> owner(bytes);
        Bytes alone;
        ASSERT_EQ(encode(level == CG_L0 ? nullptr : profile.get(), header, tokens, elements,
                         static_cast<cg_level>(level), &alone, /*n_threads=*/3),
                  CG_OK);
        EXPECT_EQ(Bytes(bytes, bytes + n_bytes), alone) << "L" << level;
        EXPECT_EQ(cg_chunk_verify(bytes, n_bytes), CG_OK);
    }
    cg_encoder_free(encoder);
}

INSTANTIATE_TEST_SUITE_P(Versions, LevelsTest, testing::Values(1u, 3u, 4u));

// Of all sections of symbols.
uint32_t count_streams(const Bytes &bytes)
{
    cg_chunk chunk;
    EXPECT_EQ(cg_chunk_open(bytes.data(), bytes.size(), &chunk), CG_OK);
    std::vector<cg_section> sections(chunk.header.n_sections);
    cg_chunk_sections(&chunk, sections.data());
    uint32_t n = 0;
    for (const cg_section &section : sections)
        if (section.kind != CG_SECTION_TOKENS && section.kind != CG_SECTION_SINKS &&
            section.kind != CG_SECTION_STEPS)
            n += static_cast<uint32_t>(cg_get_le(bytes.data() + section.offset, 2));
    return n;
}

TEST(Codec, ShortStreamsAreMoreForSomeBytesAndDecodeToTheSame)
{
    ProfileSpec nests;
    nests.nests = true;
    for (const ProfileSpec &spec :
         {spec_2(true, nests), spec_3(nests), spec_4(nests), paper_spec()}) {
        SCOPED_TRACE(spec.version);
        const Profile profile = make_profile(spec);
        const cg_chunk_header header = make_header(spec, CG_DTYPE_BF16, 0, 512);
        const auto tokens = make_tokens(512, 3);
        const Bytes elements = make_elements(header, 3);
        const unsigned levels = spec.paper ? 1u << CG_L2 : 0xeu | CG_NESTED;
        const auto encode_with = [&](unsigned more) {
            cg_encoder *encoder;
            EXPECT_EQ(cg_encoder_new(profile.get(), &header, tokens.data(),
                                     static_cast<uint8_t>(levels | more), &encoder),
                      CG_OK);
            const size_t scratch_bytes = cg_encoder_scratch_bytes(encoder);
            const std::unique_ptr<void, MallocFree> scratch(
                aligned_alloc(64, (scratch_bytes + 63) / 64 * 64));
            for (uint32_t task = 0; task < cg_encoder_n_tasks(encoder); task++) {
                const Bytes in =
                    elements_of(elements, header, cg_encoder_task_shape(encoder, task));
                EXPECT_EQ(cg_encoder_run(encoder, task, scratch.get(), scratch_bytes, in.data()),
                          CG_OK);
            }
            uint8_t *bytes = nullptr;
            size_t n_bytes = 0;
            EXPECT_EQ(cg_encoder_finish(encoder, spec.paper ? CG_L2 : CG_L1, &bytes, &n_bytes),
                      CG_OK);
            cg_encoder_free(encoder);
            const std::unique_ptr<uint8_t, MallocFree> owner(bytes);
            return Bytes(bytes, bytes + n_bytes);
        };
        const Bytes few = encode_with(0), many = encode_with(CG_SHORT_STREAMS);
        Bytes of_few, of_many;
        ASSERT_EQ(decode(profile.get(), few, &of_few), CG_OK);
        ASSERT_EQ(decode(profile.get(), many, &of_many), CG_OK);
        EXPECT_EQ(of_many, of_few);
        if (!spec.paper) { // whose L2 here has streams for all strips
            EXPECT_GT(count_streams(many), 2 * count_streams(few));
        }
        EXPECT_GT(many.size(), few.size());
        EXPECT_LT(static_cast<double>(many.size()), 1.08 * static_cast<double>(few.size()));
    }
}

TEST(Codec, FinishingBeforeAllTasksHaveRunIsRefused)
{
    const ProfileSpec spec;
    const Profile profile = make_profile(spec);
    const cg_chunk_header header = make_header(spec, CG_DTYPE_BF16, 0, 8);
    const auto tokens = make_tokens(8, 1);
    cg_encoder *encoder;
    ASSERT_EQ(cg_encoder_new(profile.get(), &header, tokens.data(), 1 << CG_L2, &encoder), CG_OK);
    uint8_t *bytes;
    size_t n_bytes;
    EXPECT_EQ(cg_encoder_finish(encoder, CG_L2, &bytes, &n_bytes), CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(cg_encoder_finish(encoder, CG_L1, &bytes, &n_bytes), CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(bytes, nullptr);
    cg_encoder_free(encoder);
    cg_encoder_free(nullptr);
    cg_decoder_free(nullptr);
}

TEST(Codec, RecordsAndRefusesLossyPrefixes)
{
    const ProfileSpec spec;
    const Profile profile = make_profile(spec);
    for (int prefix = CG_L0; prefix <= CG_L3; prefix++) {
        for (int level = CG_L0; level <= CG_L3; level++) {
            cg_chunk_header header = make_header(spec, CG_DTYPE_BF16, 8, 8);
            header.prefix_level = static_cast<uint8_t>(prefix);
            Bytes chunk;
            const bool refused = level < CG_L2 && prefix > level;
            EXPECT_EQ(encode(profile.get(), header, make_tokens(8, 1), make_elements(header, 1),
                             static_cast<cg_level>(level), &chunk),
                      refused ? CG_ERR_LOSSY_PREFIX : CG_OK)
                << "L" << level << " on L" << prefix;
            cg_chunk opened;
            if (!refused) {
                ASSERT_EQ(cg_chunk_open(chunk.data(), chunk.size(), &opened), CG_OK);
                EXPECT_EQ(opened.header.prefix_level, prefix);
            }
        }
    }
}

TEST(Codec, RefusesForeignProfilesModelsAndShapes)
{
    ProfileSpec spec, other_spec;
    other_spec.seed = 2; // another model, too
    const Profile profile = make_profile(spec), other = make_profile(other_spec);
    const Coded c = code(spec, profile.get(), CG_DTYPE_BF16, 0, 16, CG_L2);
    ASSERT_EQ(c.status, CG_OK);
    Bytes decoded;
    EXPECT_EQ(decode(other.get(), c.chunk, &decoded), CG_ERR_FOREIGN_PROFILE);
    EXPECT_EQ(decode(nullptr, c.chunk, &decoded), CG_ERR_FOREIGN_PROFILE);
    uint8_t *bytes;
    size_t n_bytes;
    EXPECT_EQ(cg_transcode(other.get(), c.chunk.data(), c.chunk.size(), CG_L3, &bytes, &n_bytes),
              CG_ERR_FOREIGN_PROFILE);

    Bytes foreign = c.chunk; // the right profile, another model: a lie
    foreign[56] ^= 1;
    seal_chunk(&foreign);
    EXPECT_EQ(decode(profile.get(), foreign, &decoded), CG_ERR_FOREIGN_MODEL);

    Bytes shifted = c.chunk;
    cg_put_le(shifted.data() + 36, 4, 4);
    seal_chunk(&shifted);
    EXPECT_NE(decode(profile.get(), shifted, &decoded), CG_OK);
    cg_put_le(shifted.data() + 36, 4, 8); // past the sinks: their sections are too many
    seal_chunk(&shifted);
    EXPECT_EQ(decode(profile.get(), shifted, &decoded), CG_ERR_CORRUPT);

    cg_chunk_header header = c.header;
    Bytes chunk;
    header.first_position = 4;
    EXPECT_EQ(encode(profile.get(), header, c.tokens, c.elements, CG_L2, &chunk),
              CG_ERR_INVALID_ARGUMENT);
    header = c.header;
    header.model.bytes[0] ^= 1;
    EXPECT_EQ(encode(profile.get(), header, c.tokens, c.elements, CG_L2, &chunk),
              CG_ERR_FOREIGN_MODEL);
    EXPECT_NE(encode(nullptr, c.header, c.tokens, c.elements, CG_L2, &chunk), CG_OK);
    header = c.header;
    header.geometry.n_kv_heads = 1;
    EXPECT_NE(encode(profile.get(), header, c.tokens, c.elements, CG_L2, &chunk), CG_OK);
}

TEST(Codec, RefusesDamageOfEverySection)
{
    ProfileSpec spec;
    spec.group_layers = {4};
    const Profile profile = make_profile(spec);
    for (int level = CG_L0; level <= CG_L3; level++) {
        const Coded c =
            code(spec, profile.get(), CG_DTYPE_BF16, 0, 9, static_cast<cg_level>(level));
        ASSERT_EQ(c.status, CG_OK);
        Bytes decoded;
        Random random(static_cast<uint64_t>(level));
        cg_chunk chunk;
        ASSERT_EQ(cg_chunk_open(c.chunk.data(), c.chunk.size(), &chunk), CG_OK);
        for (uint32_t i = 1; i < chunk.header.n_sections; i++) {
            const cg_section s = cg_chunk_section(&chunk, i);
            Bytes damaged = c.chunk;
            damaged[s.offset + random.below(s.bytes)] ^= 1 << random.below(8);
            EXPECT_EQ(decode(profile.get(), damaged, &decoded), CG_ERR_CORRUPT)
                << "L" << level << " section " << i;
        }
        // With checksums put right, anything but a read outside may happen.
        for (int i = 0; i < 300; i++) {
            Bytes damaged = c.chunk;
            const size_t at = chunk.header.header_bytes + 18;
            for (uint32_t n = 1 + random.below(4); n > 0; n--)
                damaged[at + random.below(static_cast<uint32_t>(damaged.size() - at))] =
                    static_cast<uint8_t>(random.below(256));
            seal_chunk(&damaged);
            (void)decode(profile.get(), damaged, &decoded);
            uint8_t *bytes = nullptr;
            size_t n_bytes;
            if (level > CG_L0 && level < CG_L3)
                (void)cg_transcode(profile.get(), damaged.data(), damaged.size(), CG_L3, &bytes,
                                   &n_bytes);
            free(bytes);
        }
    }
}

// The chunk with the first n bytes of its last section, or that section and zeros, sealed.
Bytes with_last_section(const Bytes &chunk, uint32_t n)
{
    cg_chunk opened;
    EXPECT_EQ(cg_chunk_open(chunk.data(), chunk.size(), &opened), CG_OK);
    const uint32_t last = opened.header.n_sections - 1;
    const cg_section s = cg_chunk_section(&opened, last);
    Bytes out = chunk;
    out.resize(s.offset + std::min(n, s.bytes));
    out.resize(s.offset + cg_padded(n, cg_chunk_align(opened.header.version)));
    cg_put_le(out.data() + 16, 8, out.size());
    cg_put_le(out.data() + 160 + 16 * last + 4, 4, n);
    seal_chunk(&out);
    return out;
}

TEST(Codec, RefusesAChunkWhoseSectionsAreShortened)
{
    ProfileSpec spec;
    spec.group_layers = {4};
    const Profile profile = make_profile(spec);
    for (int level = CG_L0; level <= CG_L3; level++) {
        const Coded c =
            code(spec, profile.get(), CG_DTYPE_FP16, 0, 9, static_cast<cg_level>(level));
        cg_chunk chunk;
        ASSERT_EQ(cg_chunk_open(c.chunk.data(), c.chunk.size(), &chunk), CG_OK);
        const uint32_t last = chunk.header.n_sections - 1;
        const cg_section s = cg_chunk_section(&chunk, last);
        Bytes decoded;
        for (uint32_t n = 0; n < s.bytes; n += s.bytes < 64 ? 1 : 1 + s.bytes / 64)
            EXPECT_NE(decode(profile.get(), with_last_section(c.chunk, n), &decoded), CG_OK)
                << "L" << level << " " << n;
        EXPECT_EQ(decode(profile.get(), with_last_section(c.chunk, s.bytes + 1), &decoded),
                  CG_ERR_CORRUPT)
            << "L" << level;
    }
}

// A small file that claims much is to cost no memory: a decoder is not even made.
TEST(Codec, RefusesLosslessSectionsThatAreSmallerThanTheirMantissas)
{
    ProfileSpec spec;
    const Profile profile = make_profile(spec);
    for (const int level : {CG_L0, CG_L2}) { // of L2, the sinks
        const Coded c =
            code(spec, profile.get(), CG_DTYPE_FP32, 0, 9, static_cast<cg_level>(level));
        const uint32_t least = 3 * 32 * (level == CG_L0 ? 9 : 4); // the last group is one layer
        for (const uint32_t n : {uint32_t{0}, least - 1, least}) {
            const Bytes shorter = with_last_section(c.chunk, n);
            cg_decoder *decoder;
            EXPECT_EQ(cg_decoder_new(profile.get(), shorter.data(), shorter.size(), &decoder),
                      n < least ? CG_ERR_TRUNCATED : CG_OK)
                << "L" << level << " " << n;
            cg_decoder_free(decoder);
        }
    }
}

TEST(Codec, RefusesMissingAndAdditionalSections)
{
    ProfileSpec spec;
    const Profile profile = make_profile(spec);
    const Coded c = code(spec, profile.get(), CG_DTYPE_BF16, 0, 9, CG_L2);
    cg_chunk chunk;
    ASSERT_EQ(cg_chunk_open(c.chunk.data(), c.chunk.size(), &chunk), CG_OK);
    std::vector<cg_section> all(chunk.header.n_sections);
    for (uint32_t i = 0; i < all.size(); i++)
        all[i] = cg_chunk_section(&chunk, i);
    const auto rebuild = [&](const std::vector<cg_section> &sections, cg_chunk_header header) {
        header.n_sections = static_cast<uint32_t>(sections.size());
        Bytes bytes(CG_CHUNK_FIXED_BYTES + sections.size() * CG_CHUNK_SECTION_BYTES);
        for (const cg_section &s : sections) {
            bytes.insert(bytes.end(), c.chunk.begin() + static_cast<long>(s.offset),
                         c.chunk.begin() + static_cast<long>(s.offset + s.bytes));
            bytes.resize(cg_padded(bytes.size(), cg_chunk_align(header.version)));
        }
        EXPECT_EQ(cg_chunk_finish(&header, sections.data(), bytes.data(), bytes.size()), CG_OK);
        return bytes;
    };
    Bytes decoded;
    EXPECT_EQ(rebuild(all, chunk.header), c.chunk);
    for (size_t i = 1; i < all.size(); i++) {
        auto fewer = all;
        fewer.erase(fewer.begin() + static_cast<long>(i));
        EXPECT_EQ(decode(profile.get(), rebuild(fewer, chunk.header), &decoded), CG_ERR_CORRUPT)
            << i;
        auto renamed = all;
        renamed[i].kind = CG_SECTION_LOSSLESS;
        EXPECT_EQ(decode(profile.get(), rebuild(renamed, chunk.header), &decoded), CG_ERR_CORRUPT)
            << i;
    }
    auto more = all;
    more.push_back(all.back());
    more.back().group++;
    EXPECT_EQ(decode(profile.get(), rebuild(more, chunk.header), &decoded), CG_ERR_CORRUPT);
    cg_chunk_header lossless = chunk.header;
    lossless.level = CG_L0;
    EXPECT_NE(decode(profile.get(), rebuild(all, lossless), &decoded), CG_OK);
}

TEST(Codec, TranscodedSymbolsEqualThoseCodedDirectly)
{
    for (const unsigned i : {0, 1, 2, 3}) {
        ProfileSpec spec = i < 2 ? ProfileSpec() : spec_3();
        spec.all_active = i % 2 == 0;
        const Profile profile = make_profile(spec);
        for (const uint32_t n_tokens : {5, 64, 133}) {
            std::vector<Coded> direct;
            for (int level = CG_L1; level <= CG_L3; level++)
                direct.push_back(code(spec, profile.get(), CG_DTYPE_BF16, 0, n_tokens,
                                      static_cast<cg_level>(level), 5));
            for (const auto &step : {std::pair<int, int>{1, 2}, {2, 3}, {1, 3}}) {
                SCOPED_TRACE(testing::Message() << "L" << step.first << " to L" << step.second
                                                << " n_tokens=" << n_tokens);
                const Coded &from = direct[step.first - 1], &to = direct[step.second - 1];
                uint8_t *bytes;
                size_t n_bytes;
                ASSERT_EQ(cg_transcode(profile.get(), from.chunk.data(), from.chunk.size(),
                                       static_cast<cg_level>(step.second), &bytes, &n_bytes),
                          CG_OK);
                const std::unique_ptr<uint8_t, MallocFree> owner(bytes);
                const Bytes transcoded(bytes, bytes + n_bytes);
                EXPECT_EQ(cg_chunk_verify(bytes, n_bytes), CG_OK);
                EXPECT_EQ(transcoded.size(), to.chunk.size());
                EXPECT_EQ(symbols_of(profile.get(), transcoded),
                          symbols_of(profile.get(), to.chunk));
                Bytes a, b;
                ASSERT_EQ(decode(profile.get(), transcoded, &a), CG_OK);
                ASSERT_EQ(decode(profile.get(), to.chunk, &b), CG_OK);
                EXPECT_EQ(a, b);
            }
        }
    }
}

TEST(Codec, TranscodingGoesOnlyFromFinerToCoarserLossyLevels)
{
    const ProfileSpec spec;
    const Profile profile = make_profile(spec);
    for (int from = CG_L0; from <= CG_L3; from++) {
        const Coded c = code(spec, profile.get(), CG_DTYPE_BF16, 0, 9, static_cast<cg_level>(from));
        for (int to = CG_L0; to <= CG_L3 + 1; to++) {
            uint8_t *bytes;
            size_t n_bytes;
            const bool fine = from != CG_L0 && to > from && to <= CG_L3;
            EXPECT_EQ(cg_transcode(profile.get(), c.chunk.data(), c.chunk.size(),
                                   static_cast<cg_level>(to), &bytes, &n_bytes),
                      fine ? CG_OK : CG_ERR_INVALID_ARGUMENT)
                << from << " to " << to;
            EXPECT_EQ(bytes != nullptr, fine);
            free(bytes);
        }
    }
}

Coded code_nested(const ProfileSpec &spec, const cg_profile *profile, uint32_t first_position,
                  uint32_t n_tokens, cg_level level, cg_level coarsest)
{
    Coded c;
    c.header = make_header(spec, CG_DTYPE_BF16, first_position, n_tokens);
    c.tokens = make_tokens(n_tokens, 5);
    c.elements = make_elements(c.header, 5);
    c.status = encode(profile, c.header, c.tokens, c.elements, level, &c.chunk, 1, coarsest);
    return c;
}

// The most that lists of symbols can grow to: all of them large, and a basis whose elements need
// every limb but in one quad. Each instruction set, so that ASan sees what it writes.
TEST(Codec, LargeSymbolsAndElementsOfEverySizeStayInTheirMemory)
{
    ProfileSpec spec;
    spec.group_layers = {4};
    spec.wide_share = 1;
    Bytes bytes = make_profile_bytes(spec);
    const size_t n = size_t{4} * spec.n_kv_heads * spec.head_dim,
                 basis_at = bytes.size() - 8 - 2 * 2 * n * n;
    Random random(1);
    for (size_t i = 0; i < 2 * n * n; i++) {
        const size_t component = i / n % n;
        const float element = std::ldexp(1.0f + static_cast<float>(random.uniform(0, 1)),
                                         -static_cast<int>(random.below(16)));
        cg_put_le(bytes.data() + basis_at + 2 * i, 2,
                  component % 96 < 4 ? 0 : cg_bf16_from_f32(element));
    }
    seal_profile(&bytes);
    std::vector<Bytes> chunks; // of the first: each encoder sums up in its own way
    std::vector<std::vector<float>> exact;
    for (const char *name : {"baseline", "avx2", "avx512", "vnni", "amx"}) {
        SCOPED_TRACE(name);
        if (cg_kernels_named(name) == nullptr)
            continue;
        cg_kernels_use(cg_kernels_named(name));
        const Profile profile = open_profile(bytes);
        for (size_t i = 0; i < chunks.size(); i++) {
            Bytes decoded;
            EXPECT_EQ(decode(profile.get(), chunks[i], &decoded), CG_OK);
            const std::vector<float> values = to_floats(decoded, CG_DTYPE_FP32);
            float largest = 0, error = 0;
            for (size_t k = 0; k < values.size(); k++) {
                largest = std::max(largest, std::fabs(exact[i][k]));
                error = std::max(error, std::fabs(values[k] - exact[i][k]));
            }
            EXPECT_LT(error, largest * 1e-5f) << i;
        }
        for (const int level : {CG_L1, CG_L3}) {
            const cg_chunk_header header = make_header(spec, CG_DTYPE_FP32, 0, 256);
            const auto tokens = make_tokens(256, 1);
            Bytes elements = make_elements(header, 1), chunk, decoded;
            for (size_t i = 0; i < elements.size(); i += 4)
                cg_put_le(elements.data() + i, 4, cg_f32_bits(random.below(2) ? 1e7f : -1e7f));
            EXPECT_EQ(encode(profile.get(), header, tokens, elements, static_cast<cg_level>(level),
                             &chunk),
                      CG_OK);
            EXPECT_EQ(decode(profile.get(), chunk, &decoded), CG_OK);
            if (strcmp(name, "baseline") == 0) {
                chunks.push_back(chunk);
                exact.push_back(to_floats(decoded, CG_DTYPE_FP32));
            }
        }
        cg_kernels_use(nullptr);
    }
}

// A nested chunk, cut where a level ends, decodes to what that level alone decodes to; at its
// finest it is hardly larger.
TEST(NestedCodec, EveryLevelDecodesAsIfCodedAlone)
{
    for (const unsigned i : {0, 1, 2, 3}) {
        ProfileSpec spec = i < 2 ? ProfileSpec() : spec_3();
        spec.all_active = i % 2 == 0;
        spec.nests = true;
        const Profile profile = make_profile(spec);
        ASSERT_TRUE(cg_profile_nests(profile.get()));
        for (const auto &[finest, coarsest] :
             {std::pair{CG_L1, CG_L3}, {CG_L2, CG_L3}, {CG_L1, CG_L2}}) {
            for (const uint32_t first_position : {0u, 256u}) {
                for (const uint32_t n_tokens : {1, 5, 133}) {
                    const Coded c = code_nested(spec, profile.get(), first_position, n_tokens,
                                                finest, coarsest);
                    ASSERT_EQ(c.status, CG_OK);
                    ASSERT_EQ(cg_chunk_verify(c.chunk.data(), c.chunk.size()), CG_OK);
                    cg_chunk chunk;
                    ASSERT_EQ(cg_chunk_open(c.chunk.data(), c.chunk.size(), &chunk), CG_OK);
                    for (int level = finest; level <= coarsest; level++) {
                        SCOPED_TRACE(testing::Message()
                                     << "L" << level << " of L" << finest << " to L" << coarsest
                                     << " n_tokens=" << n_tokens << " at " << first_position);
                        const Bytes cut(c.chunk.begin(),
                                        c.chunk.begin() +
                                            static_cast<long>(chunk.header.level_bytes[level]));
                        const Coded alone = code(spec, profile.get(), CG_DTYPE_BF16, first_position,
                                                 n_tokens, static_cast<cg_level>(level), 5);
                        Bytes got, want;
                        ASSERT_EQ(decode(profile.get(), alone.chunk, &want), CG_OK);
                        ASSERT_EQ(decode(profile.get(), cut, &got), CG_OK);
                        ASSERT_EQ(got, want);
                        if (level == finest)
                            continue;
                        uint8_t *bytes;
                        size_t n_bytes;
                        ASSERT_EQ(cg_transcode(profile.get(), c.chunk.data(), c.chunk.size(),
                                               static_cast<cg_level>(level), &bytes, &n_bytes),
                                  CG_OK);
                        const std::unique_ptr<uint8_t, MallocFree> owner(bytes);
                        EXPECT_EQ(Bytes(bytes, bytes + n_bytes), cut);
                    }
                    if (coarsest == CG_L3)
                        continue;
                    uint8_t *bytes; // coarser than what it holds
                    size_t n_bytes;
                    ASSERT_EQ(cg_transcode(profile.get(), c.chunk.data(), c.chunk.size(), CG_L3,
                                           &bytes, &n_bytes),
                              CG_OK);
                    const std::unique_ptr<uint8_t, MallocFree> owner(bytes);
                    Bytes got, want;
                    ASSERT_EQ(decode(profile.get(), Bytes(bytes, bytes + n_bytes), &got), CG_OK);
                    ASSERT_EQ(decode(profile.get(),
                                     code(spec, profile.get(), CG_DTYPE_BF16, first_position,
                                          n_tokens, CG_L3, 5)
                                         .chunk,
                                     &want),
                              CG_OK);
                    EXPECT_EQ(got, want);
                }
            }
        }
    }
}

TEST(NestedCodec, RefusesDamageOfEverySectionThatALevelNeeds)
{
    ProfileSpec spec;
    spec.nests = true;
    spec.group_layers = {4};
    const Profile profile = make_profile(spec);
    const Coded c = code_nested(spec, profile.get(), 0, 9, CG_L1, CG_L3);
    cg_chunk chunk;
    ASSERT_EQ(cg_chunk_open(c.chunk.data(), c.chunk.size(), &chunk), CG_OK);
    Random random(1);
    Bytes decoded;
    for (uint32_t i = 1; i < chunk.header.n_sections; i++) {
        const cg_section s = cg_chunk_section(&chunk, i);
        Bytes damaged = c.chunk;
        damaged[s.offset + random.below(s.bytes)] ^= 1 << random.below(8);
        for (int level = CG_L1; level <= CG_L3; level++) {
            const uint64_t n = chunk.header.level_bytes[level];
            const Bytes cut(damaged.begin(), damaged.begin() + static_cast<long>(n));
            EXPECT_EQ(decode(profile.get(), cut, &decoded), s.offset < n ? CG_ERR_CORRUPT : CG_OK)
                << level << " " << i;
        }
    }
    // With checksums put right, anything but a read outside may happen.
    for (int i = 0; i < 1000; i++) {
        Bytes damaged = c.chunk;
        const size_t at = chunk.header.header_bytes + 18;
        for (uint32_t n = 1 + random.below(4); n > 0; n--)
            damaged[at + random.below(static_cast<uint32_t>(damaged.size() - at))] =
                static_cast<uint8_t>(random.below(256));
        seal_chunk(&damaged);
        (void)decode(profile.get(), damaged, &decoded);
    }
}

TEST(NestedCodec, NeedsNeighbouringLevelsAndAProfileThatNests)
{
    ProfileSpec spec;
    const Profile plain = make_profile(spec);
    EXPECT_FALSE(cg_profile_nests(plain.get()));
    EXPECT_EQ(code_nested(spec, plain.get(), 0, 9, CG_L1, CG_L3).status, CG_ERR_INVALID_ARGUMENT);
    spec.nests = true;
    const Profile profile = make_profile(spec);
    const cg_chunk_header header = make_header(spec, CG_DTYPE_BF16, 0, 9);
    const auto tokens = make_tokens(9, 1);
    for (unsigned mask = 0; mask < 1 << CG_N_LEVELS; mask++) {
        const bool neighbours = mask >> 1 == 1 || mask >> 1 == 2 || mask >> 1 == 3 ||
                                mask >> 1 == 4 || mask >> 1 == 6 || mask >> 1 == 7;
        cg_encoder *encoder = nullptr;
        EXPECT_EQ(cg_encoder_new(profile.get(), &header, tokens.data(),
                                 static_cast<uint8_t>(mask | CG_NESTED), &encoder),
                  neighbours ? CG_OK : CG_ERR_INVALID_ARGUMENT)
            << mask;
        cg_encoder_free(encoder);
    }
    // A nested chunk under a profile that says nothing of nesting, its fingerprint put right.
    Coded c = code_nested(spec, profile.get(), 0, 9, CG_L1, CG_L3);
    memcpy(c.chunk.data() + 72, cg_profile_fingerprint(plain.get())->bytes, 16);
    seal_chunk(&c.chunk);
    Bytes decoded;
    EXPECT_EQ(decode(plain.get(), c.chunk, &decoded), CG_ERR_CORRUPT);
}

// A file has at most CG_CHUNK_MAX_SECTIONS: 1,024 layers apart, with sinks and all levels, have one
// more. It is said before any work.
TEST(NestedCodec, RefusesMoreSectionsThanAFileMayHaveBeforeTheyAreCoded)
{
    ProfileSpec spec = spec_2(false);
    spec.n_layers = CG_MAX_LAYERS;
    spec.n_kv_heads = 1;
    spec.head_dim = spec.rotary_dim = 2;
    spec.group_layers.assign(CG_MAX_LAYERS, 1);
    spec.most_components = 0;
    spec.nests = spec.thin = true;
    spec.n_sinks = 1;
    const Profile profile = make_profile(spec);
    const auto tokens = make_tokens(8, 1);
    const struct {
        uint32_t first_position;
        uint8_t mask;
        cg_status want;
    } cases[] = {
        {0, 0xe | CG_NESTED, CG_ERR_INVALID_ARGUMENT}, // 1 + 1024 * (4 + 2 + 2)
        {8, 0xe | CG_NESTED, CG_OK},                   // no sinks
        {0, 0xc | CG_NESTED, CG_OK},
        {0, 0xf, CG_OK}, // a file for each level
    };
    for (const auto &c : cases) {
        SCOPED_TRACE(testing::Message() << c.first_position << " " << int(c.mask));
        const cg_chunk_header header = make_header(spec, CG_DTYPE_BF16, c.first_position, 8);
        cg_encoder *encoder = nullptr;
        EXPECT_EQ(cg_encoder_new(profile.get(), &header, tokens.data(), c.mask, &encoder), c.want);
        cg_encoder_free(encoder);
    }
}

TEST(Codec, TasksRunOnAnyThreads)
{
    ProfileSpec spec;
    spec.n_layers = 8;
    spec.group_layers = {2, 2, 2, 2};
    const Profile profile = make_profile(spec);
    for (int level = CG_L0; level <= CG_L3; level++) {
        const Coded c =
            code(spec, profile.get(), CG_DTYPE_BF16, 0, 100, static_cast<cg_level>(level));
        Bytes alone;
        ASSERT_EQ(decode(profile.get(), c.chunk, &alone), CG_OK);
        // Four threads share one decoder, and each decodes everything.
        cg_decoder *decoder;
        ASSERT_EQ(cg_decoder_new(profile.get(), c.chunk.data(), c.chunk.size(), &decoder), CG_OK);
        std::vector<std::thread> threads;
        std::vector<int> n_wrong(4);
        for (unsigned i = 0; i < 4; i++) {
            threads.emplace_back([&, i] {
                const size_t scratch_bytes = cg_decoder_scratch_bytes(decoder);
                const std::unique_ptr<void, MallocFree> scratch(
                    aligned_alloc(64, (scratch_bytes + 63) / 64 * 64));
                const uint32_t n_tasks = cg_decoder_n_tasks(decoder);
                for (uint32_t k = 0; k < n_tasks; k++) {
                    const uint32_t task = (k + i) % n_tasks;
                    const cg_task_shape shape = cg_decoder_task_shape(decoder, task);
                    Bytes out(shape.elements_bytes);
                    n_wrong[i] += cg_decoder_run(decoder, task, scratch.get(), scratch_bytes,
                                                 out.data()) != CG_OK;
                    const size_t plane_bytes = out.size() / shape.n_layers;
                    for (uint32_t l = 0; l < shape.n_layers; l++)
                        n_wrong[i] += !std::equal(
                            out.begin() + l * plane_bytes, out.begin() + (l + 1) * plane_bytes,
                            alone.begin() +
                                ((shape.first_layer + l) * 2 + shape.plane) * plane_bytes);
                }
            });
        }
        for (std::thread &thread : threads)
            thread.join();
        EXPECT_EQ(n_wrong, std::vector<int>(4));
        cg_decoder_free(decoder);
        Bytes together;
        ASSERT_EQ(decode(profile.get(), c.chunk, &together, /*n_threads=*/4), CG_OK);
        EXPECT_EQ(together, alone);
    }
}

TEST(Codec, RefusesSmallScratchAndOutput)
{
    const ProfileSpec spec;
    const Profile profile = make_profile(spec);
    const Coded c = code(spec, profile.get(), CG_DTYPE_BF16, 0, 9, CG_L1);
    cg_decoder *decoder;
    ASSERT_EQ(cg_decoder_new(profile.get(), c.chunk.data(), c.chunk.size(), &decoder), CG_OK);
    const size_t n = cg_decoder_scratch_bytes(decoder);
    alignas(64) static uint8_t scratch[1 << 20];
    ASSERT_LE(n, sizeof scratch);
    Bytes out(cg_decoder_task_shape(decoder, 0).elements_bytes);
    EXPECT_EQ(cg_decoder_run(decoder, 0, scratch, n - 1, out.data()), CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(cg_decoder_run(decoder, cg_decoder_n_tasks(decoder), scratch, n, out.data()),
              CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(cg_decoder_run(decoder, 0, scratch, n, out.data()), CG_OK);
    cg_decoder_free(decoder);
    Bytes small(c.elements.size() - 1);
    EXPECT_EQ(cg_decode_chunk(profile.get(), c.chunk.data(), c.chunk.size(), 1, small.data(),
                              small.size()),
              CG_ERR_BUFFER_TOO_SMALL);
}

} // namespace
