// Preset paper: what codec_test.cc asks of klt, of anchors and deltas.
#include "codec/paper.h"
#include "profile_maker.h"

#include <gtest/gtest.h>
#include <limits>

namespace
{

using namespace cg_test;

const size_t channels = 32; // of paper_spec()

Bytes transcode(const cg_profile *profile, const Bytes &chunk, cg_level level)
{
    uint8_t *bytes = nullptr;
    size_t n_bytes = 0;
    EXPECT_EQ(cg_transcode(profile, chunk.data(), chunk.size(), level, &bytes, &n_bytes), CG_OK);
    const std::unique_ptr<uint8_t, MallocFree> owner(bytes);
    return Bytes(bytes, bytes + n_bytes);
}

// A decoded element is off by at most `steps` of its steps, and what rounding to the dtype adds.
void expect_errors_within(const cg_profile *p, const Coded &c, const Bytes &decoded, int level,
                          double steps)
{
    const unsigned dtype = c.header.geometry.dtype;
    const double relative = dtype == CG_DTYPE_BF16       ? 0x1p-8
                            : dtype == CG_DTYPE_FP16     ? 0x1p-11
                            : dtype == CG_DTYPE_FP8_E4M3 ? 0x1p-4
                            : dtype == CG_DTYPE_FP8_E5M2 ? 0x1p-3
                                                         : 0x1p-22;
    const auto want = to_floats(c.elements, dtype), got = to_floats(decoded, dtype);
    const uint32_t n_tokens = c.header.n_tokens;
    for (size_t plane = 0; plane < 2u * p->geometry.n_layers; plane++) {
        for (uint32_t t = 0; t < n_tokens; t++) {
            for (size_t ch = 0; ch < channels; ch++) {
                const size_t of = plane * channels + ch, e = (plane * n_tokens + t) * channels + ch;
                const double bound = t % 10 == 0
                                         ? 0.5 * p->anchor_step[of]
                                         : steps * p->step[level - 1][plane % 2] / p->weight[of];
                ASSERT_NEAR(got[e], want[e], bound * 1.0001 + relative * (std::fabs(want[e]) + 4))
                    << "layer " << plane / 2 << " plane " << plane % 2 << " token " << t
                    << " channel " << ch;
            }
        }
    }
}

TEST(Paper, ErrorsStayWithinHalfAStepAtAnyPosition)
{
    const ProfileSpec spec = paper_spec();
    const Profile profile = make_profile(spec);
    for (const uint32_t first_position : {0u, 3u, 25600u}) {
        for (const uint32_t n_tokens : {1, 2, 9, 10, 11, 12, 20, 21, 255, 256}) {
            for (int level = CG_L1; level <= CG_L3; level++) {
                SCOPED_TRACE(testing::Message()
                             << "L" << level << " tokens=" << n_tokens << " at " << first_position);
                const Coded c = code(spec, profile.get(), CG_DTYPE_FP32, first_position, n_tokens,
                                     static_cast<cg_level>(level));
                ASSERT_EQ(c.status, CG_OK);
                ASSERT_EQ(cg_chunk_verify(c.chunk.data(), c.chunk.size()), CG_OK);
                Bytes decoded;
                ASSERT_EQ(decode(profile.get(), c.chunk, &decoded), CG_OK);
                expect_errors_within(profile.get(), c, decoded, level, 0.5);
            }
        }
    }
}

TEST(Paper, ErrorsStayWithinHalfAStepInEveryDtype)
{
    for (const uint16_t head_dim :
         {uint16_t{2}, uint16_t{16}, uint16_t{32}}) { // 32 channels are one to 16 heads
        ProfileSpec spec = paper_spec();
        spec.head_dim = head_dim;
        spec.n_kv_heads = static_cast<uint16_t>(channels / head_dim);
        const Profile profile = make_profile(spec);
        for (const unsigned dtype : all_dtypes) {
            SCOPED_TRACE(cg_dtype_name(dtype));
            const Coded c = code(spec, profile.get(), dtype, 0, 33, CG_L1);
            ASSERT_EQ(c.status, CG_OK);
            Bytes decoded;
            ASSERT_EQ(decode(profile.get(), c.chunk, &decoded), CG_OK);
            expect_errors_within(profile.get(), c, decoded, CG_L1, 0.5);
        }
    }
}

TEST(Paper, ChannelsThatAreNoMultipleOfTheLanes)
{
    ProfileSpec spec = paper_spec();
    spec.n_kv_heads = 3;
    spec.head_dim = 14;
    spec.group_layers = {1, 2, 1};
    const Profile profile = make_profile(spec);
    const Coded c = code(spec, profile.get(), CG_DTYPE_FP32, 0, 25, CG_L2);
    ASSERT_EQ(c.status, CG_OK);
    Bytes decoded;
    ASSERT_EQ(decode(profile.get(), c.chunk, &decoded), CG_OK);
    const auto want = to_floats(c.elements, CG_DTYPE_FP32), got = to_floats(decoded, CG_DTYPE_FP32);
    for (size_t i = 0; i < want.size(); i++)
        ASSERT_NEAR(got[i], want[i], 0.5 * spec.step[1][0] * 2.001) << i; // no weight is below 1/2
}

TEST(Paper, TheFirstTokensAreExactWhereAProfileAsksForIt)
{
    ProfileSpec spec = paper_spec();
    spec.n_sinks = 4;
    const Profile profile = make_profile(spec);
    const Coded c = code(spec, profile.get(), CG_DTYPE_BF16, 0, 24, CG_L3);
    ASSERT_EQ(c.status, CG_OK);
    Bytes decoded;
    ASSERT_EQ(decode(profile.get(), c.chunk, &decoded), CG_OK);
    const size_t token_bytes = 2 * channels;
    for (size_t at = 0; at < decoded.size(); at += 24 * token_bytes)
        EXPECT_TRUE(std::equal(decoded.begin() + at, decoded.begin() + at + 4 * token_bytes,
                               c.elements.begin() + at));
    EXPECT_NE(decoded, c.elements);
}

TEST(Paper, ManyLevelsAtOnceEqualOneAtATime)
{
    const ProfileSpec spec = paper_spec();
    const Profile profile = make_profile(spec);
    Coded c = code(spec, profile.get(), CG_DTYPE_BF16, 0, 47, CG_L1);
    cg_encoder *encoder;
    ASSERT_EQ(cg_encoder_new(profile.get(), &c.header, c.tokens.data(), 0xe, &encoder), CG_OK);
    const size_t scratch_bytes = cg_encoder_scratch_bytes(encoder);
    const std::unique_ptr<void, MallocFree> scratch(
        aligned_alloc(64, (scratch_bytes + 63) / 64 * 64));
    const size_t plane_bytes = 47 * channels * 2;
    for (uint32_t task = 0; task < cg_encoder_n_tasks(encoder); task++) {
        const cg_task_shape shape = cg_encoder_task_shape(encoder, task);
        Bytes in;
        for (uint32_t l = 0; l < shape.n_layers; l++) {
            const auto at =
                c.elements.begin() + ((shape.first_layer + l) * 2 + shape.plane) * plane_bytes;
            in.insert(in.end(), at, at + plane_bytes);
        }
        ASSERT_EQ(cg_encoder_run(encoder, task, scratch.get(), scratch_bytes, in.data()), CG_OK);
    }
    for (int level = CG_L1; level <= CG_L3; level++) {
        uint8_t *bytes;
        size_t n_bytes;
        ASSERT_EQ(cg_encoder_finish(encoder, static_cast<cg_level>(level), &bytes, &n_bytes),
                  CG_OK);
        const std::unique_ptr<uint8_t, MallocFree> owner(bytes);
        EXPECT_EQ(
            Bytes(bytes, bytes + n_bytes),
            code(spec, profile.get(), CG_DTYPE_BF16, 0, 47, static_cast<cg_level>(level)).chunk)
            << "L" << level;
    }
    cg_encoder_free(encoder);
}

TEST(Paper, TranscodingAFactor3IsCodingDirectly)
{
    const ProfileSpec spec = paper_spec();
    const Profile profile = make_profile(spec);
    for (const uint32_t n_tokens : {1, 10, 133}) {
        for (const auto &step : {std::pair<int, int>{1, 2}, {2, 3}, {1, 3}}) {
            SCOPED_TRACE(testing::Message() << "L" << step.first << " to L" << step.second
                                            << " n_tokens=" << n_tokens);
            const auto from = static_cast<cg_level>(step.first),
                       to = static_cast<cg_level>(step.second);
            const Bytes fine = code(spec, profile.get(), CG_DTYPE_BF16, 5, n_tokens, from).chunk;
            const Bytes direct = code(spec, profile.get(), CG_DTYPE_BF16, 5, n_tokens, to).chunk;
            EXPECT_EQ(transcode(profile.get(), fine, to), direct);
        }
    }
}

TEST(Paper, TranscodingOtherRatiosErrsByBothSteps)
{
    ProfileSpec spec = paper_spec();
    for (unsigned level = 0; level < 3; level++)
        spec.step[level][CG_K] = spec.step[level][CG_V] = static_cast<float>(level + 1) / 16;
    const Profile profile = make_profile(spec);
    for (const auto &step : {std::pair<int, int>{1, 2}, {2, 3}}) {
        const Coded c =
            code(spec, profile.get(), CG_DTYPE_FP32, 0, 64, static_cast<cg_level>(step.first));
        Bytes decoded;
        const Bytes coarse = transcode(profile.get(), c.chunk, static_cast<cg_level>(step.second));
        ASSERT_EQ(decode(profile.get(), coarse, &decoded), CG_OK);
        expect_errors_within(profile.get(), c, decoded, step.second,
                             0.5 + 0.5 * step.first / step.second);
    }
}

TEST(Paper, RefusesWhatIsNotFinite)
{
    const ProfileSpec spec = paper_spec();
    const Profile profile = make_profile(spec);
    for (const unsigned dtype : all_dtypes) {
        for (const size_t token :
             {0, 3, 20}) { // of 21: an anchor, a delta, the last group's only token
            for (const float bad : {std::numeric_limits<float>::quiet_NaN(),
                                    std::numeric_limits<float>::infinity()}) {
                Coded c = code(spec, profile.get(), dtype, 0, 21, CG_L2);
                Bytes one;
                if (dtype == CG_DTYPE_FP16)
                    put(&one, std::isnan(bad) ? 0x7e00 : 0x7c00, 2);
                else if (dtype == CG_DTYPE_FP8_E4M3 || dtype == CG_DTYPE_FP8_E5M2)
                    put(&one, 0x7f, 1);
                else
                    put_element(&one, dtype, bad);
                std::copy(one.begin(), one.end(),
                          c.elements.begin() + static_cast<long>(token * channels * one.size()));
                EXPECT_EQ(encode(profile.get(), c.header, c.tokens, c.elements, CG_L2, &c.chunk),
                          CG_ERR_INVALID_ARGUMENT);
            }
        }
    }
}

TEST(Paper, CodesHugeFiniteNumbersWithoutHarm)
{
    const ProfileSpec spec = paper_spec();
    const Profile profile = make_profile(spec);
    Coded c = code(spec, profile.get(), CG_DTYPE_FP32, 0, 24, CG_L1);
    Random random(2);
    for (size_t i = 0; i < c.elements.size(); i += 4)
        cg_put_le(&c.elements[i], 4,
                  cg_f32_bits(random.below(2) ? 3.4e38f : -3.4e38f)); // differences overflow
    uint8_t *bytes = nullptr;
    size_t n_bytes = 0;
    uint64_t n_saturated = 0;
    ASSERT_EQ(cg_encode_chunk(profile.get(), &c.header, c.tokens.data(), c.elements.data(),
                              c.elements.size(), CG_L1, CG_L1, 1, &bytes, &n_bytes, &n_saturated),
              CG_OK);
    EXPECT_GT(n_saturated, 0u);
    c.chunk.assign(bytes, bytes + n_bytes);
    free(bytes);
    Bytes decoded;
    EXPECT_EQ(decode(profile.get(), c.chunk, &decoded), CG_OK);
}

// The chunk with its first symbols section replaced, and all checksums right.
Bytes with_section(const Bytes &chunk, const Bytes &section)
{
    cg_chunk opened;
    EXPECT_EQ(cg_chunk_open(chunk.data(), chunk.size(), &opened), CG_OK);
    std::vector<cg_section> sections(opened.header.n_sections);
    cg_chunk_sections(&opened, sections.data());
    Bytes bytes(opened.header.header_bytes);
    for (size_t i = 0; i < sections.size(); i++) {
        const auto at = chunk.begin() + static_cast<long>(sections[i].offset);
        const Bytes part = i == 1 ? section : Bytes(at, at + static_cast<long>(sections[i].bytes));
        sections[i].bytes = static_cast<uint32_t>(part.size());
        bytes.insert(bytes.end(), part.begin(), part.end());
    }
    EXPECT_EQ(cg_chunk_finish(&opened.header, sections.data(), bytes.data(), bytes.size()), CG_OK);
    return bytes;
}

TEST(Paper, RefusesSectionsThatAreNotTwoMatrices)
{
    const ProfileSpec spec = paper_spec();
    const Profile profile = make_profile(spec);
    const Coded c = code(spec, profile.get(), CG_DTYPE_BF16, 0, 12, CG_L1);
    cg_chunk opened;
    ASSERT_EQ(cg_chunk_open(c.chunk.data(), c.chunk.size(), &opened), CG_OK);
    const cg_section s = cg_chunk_section(&opened, 1);
    const Bytes good(c.chunk.begin() + static_cast<long>(s.offset),
                     c.chunk.begin() + static_cast<long>(s.offset + s.bytes));
    size_t anchors_bytes = 4; // one stream: its size stands behind the count
    ASSERT_EQ(cg_get_le(good.data(), 2), 1u);
    anchors_bytes += 4 + cg_get_le(good.data() + 4, 4);
    const auto border = good.begin() + static_cast<long>(anchors_bytes);
    Bytes decoded;
    EXPECT_EQ(decode(profile.get(), with_section(c.chunk, good), &decoded), CG_OK);
    for (size_t n = 0; n < good.size(); n++) {
        const Bytes chunk =
            with_section(c.chunk, Bytes(good.begin(), good.begin() + static_cast<long>(n)));
        EXPECT_EQ(decode(profile.get(), chunk, &decoded), CG_ERR_TRUNCATED) << n;
        uint8_t *coarse;
        size_t n_coarse;
        EXPECT_EQ(
            cg_transcode(profile.get(), chunk.data(), chunk.size(), CG_L2, &coarse, &n_coarse),
            CG_ERR_TRUNCATED)
            << n;
    }
    Bytes bad = good;
    bad.push_back(0);
    const Bytes longer = with_section(c.chunk, bad);
    EXPECT_EQ(decode(profile.get(), longer, &decoded), CG_ERR_CORRUPT);
    uint8_t *coarse;
    size_t n_coarse;
    EXPECT_EQ(cg_transcode(profile.get(), longer.data(), longer.size(), CG_L2, &coarse, &n_coarse),
              CG_ERR_CORRUPT);
    bad = good;
    bad.insert(bad.end(), good.begin(), border); // a third matrix
    EXPECT_EQ(decode(profile.get(), with_section(c.chunk, bad), &decoded), CG_ERR_CORRUPT);
    bad.assign(border, good.end()); // deltas first
    bad.insert(bad.end(), good.begin(), border);
    EXPECT_NE(decode(profile.get(), with_section(c.chunk, bad), &decoded), CG_OK);
}

TEST(Paper, SurvivesDamagedSections)
{
    const ProfileSpec spec = paper_spec();
    const Profile profile = make_profile(spec);
    const Coded c = code(spec, profile.get(), CG_DTYPE_BF16, 0, 12, CG_L1);
    const size_t payload = 160 + 16 * (1 + 4) + 2 * 12;
    Random random(9);
    for (int i = 0; i < 3000; i++) {
        Bytes damaged = c.chunk, decoded;
        const size_t at = payload + random.below(static_cast<uint32_t>(damaged.size() - payload));
        damaged[at] ^= static_cast<uint8_t>(1 << random.below(8));
        EXPECT_EQ(cg_chunk_verify(damaged.data(), damaged.size()), CG_ERR_CORRUPT);
        seal_chunk(&damaged);
        (void)decode(profile.get(), damaged, &decoded); // ASan and UBSan look on
    }
}

} // namespace
