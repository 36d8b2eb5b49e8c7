// Files that were written once keep decoding to what they decoded to then.
#include "codec/codec.h"

#include "codec/kernels.h"
#include "each_kernels.h"
#include "golden.h"

#include <fstream>
#include <gtest/gtest.h>
#include <iterator>

namespace
{

using namespace cg_test;

Bytes read_file(const std::string &name)
{
    std::ifstream file(CG_GOLDEN_DIR "/" + name, std::ios::binary);
    EXPECT_TRUE(file.good()) << name;
    return Bytes(std::istreambuf_iterator<char>(file), {});
}

// FORMAT.md: one unit in the last place of bf16, which for elements near zero is that of 2^-8 times
// the head's largest; two units in at most 0.1 % of the elements.
double bf16_unit(double value)
{
    int exponent;
    std::frexp(value, &exponent);
    return value == 0 ? 0 : std::ldexp(1, exponent - 8);
}

void expect_within_tolerance(const std::vector<float> &got, const std::vector<float> &want,
                             size_t head_dim)
{
    ASSERT_EQ(got.size(), want.size());
    size_t n_past_one = 0;
    for (size_t head = 0; head < want.size(); head += head_dim) {
        double largest = 0;
        for (size_t i = head; i < head + head_dim; i++)
            largest = std::max<double>(largest, std::fabs(want[i]));
        for (size_t i = head; i < head + head_dim; i++) {
            const double unit = std::max(bf16_unit(want[i]), bf16_unit(largest / 256));
            const double error = std::fabs(static_cast<double>(got[i]) - want[i]);
            n_past_one += error > unit;
            ASSERT_LE(error, 2 * unit) << "element " << i;
        }
    }
    EXPECT_LE(n_past_one, want.size() / 1000);
}

TEST(Golden, ProfilesHaveTheirFingerprints)
{
    for (const GoldenSet &set : golden_sets) {
        const Profile profile =
            open_profile(read_file(set.directory + std::string("/profile.cgp")));
        const cg_fingerprint fingerprint = *cg_profile_fingerprint(profile.get());
        cg_key key;
        memcpy(key.bytes, fingerprint.bytes, 16);
        char hex[CG_KEY_HEX_BYTES];
        cg_key_to_hex(&key, hex);
        EXPECT_STREQ(hex, set.profile_fingerprint);
    }
}

// With every instruction set that this CPU has: profiles are laid out for it, and other loops do
// the work.
class GoldenTest : public EachKernels
{
};

TEST_P(GoldenTest, ChunksDecodeToTheSameElements)
{
    for (const GoldenSet &set : golden_sets) {
        const std::string directory = set.directory + std::string("/");
        const Profile profile = golden_profile(set, read_file(directory + "profile.cgp"));
        for (const GoldenChunk &golden : set.chunks) {
            SCOPED_TRACE(directory + golden.name);
            const Bytes chunk = read_file(directory + golden.name + ".kv");
            const Bytes want = read_file(directory + golden.name + ".raw");
            ASSERT_EQ(cg_chunk_verify(chunk.data(), chunk.size()), CG_OK);
            Bytes got;
            ASSERT_EQ(decode(golden.level == 0 ? nullptr : profile.get(), chunk, &got), CG_OK);
            if (golden.level == 0 || set.spec.version > 1) // exact
                EXPECT_EQ(got, want);
            else
                expect_within_tolerance(to_floats(got, golden.dtype), to_floats(want, golden.dtype),
                                        set.spec.head_dim);
        }
    }
}

// Of a real model: elements of its bases differ in size as no synthetic ones do. What is wanted is
// what the second reader makes of it, in exact arithmetic.
TEST_P(GoldenTest, ARealProfileOfVersion1StaysWithinTheTolerance)
{
    const Profile profile = open_profile(read_file("v1-real/profile.cgp"));
    const Bytes want = read_file("v1-real/bf16-L1.raw");
    Bytes got;
    ASSERT_EQ(decode(profile.get(), read_file("v1-real/bf16-L1.kv"), &got), CG_OK);
    expect_within_tolerance(to_floats(got, CG_DTYPE_BF16), to_floats(want, CG_DTYPE_BF16),
                            cg_profile_geometry(profile.get())->head_dim);
}

// Symbols of all sizes: integer kernels take what is small at once.
TEST_P(GoldenTest, LargeSymbolsDecodeAsTheBaselineDecodesThem)
{
    for (const double scale : {1.0, 50.0, 3000.0}) {
        SCOPED_TRACE(scale);
        ProfileSpec spec;
        spec.packed = true;
        const Bytes bytes = make_profile_bytes(spec);
        const cg_chunk_header header = make_header(spec, CG_DTYPE_BF16, 0, 300);
        const std::vector<uint32_t> tokens = make_tokens(header.n_tokens, 1);
        Bytes chunk, got, want;
        ASSERT_EQ(encode(open_profile(bytes).get(), header, tokens, make_elements(header, 1, scale),
                         CG_L1, &chunk),
                  CG_OK);
        ASSERT_EQ(decode(open_profile(bytes).get(), chunk, &got), CG_OK);
        cg_kernels_use(&cg_kernels_baseline);
        ASSERT_EQ(decode(open_profile(bytes).get(), chunk, &want), CG_OK);
        cg_kernels_use(kernels);
        expect_within_tolerance(to_floats(got, CG_DTYPE_BF16), to_floats(want, CG_DTYPE_BF16),
                                spec.head_dim);
    }
}

INSTANTIATE_TEST_SUITE_P(Isas, GoldenTest,
                         testing::Values("baseline", "avx2", "avx512", "vnni", "amx"),
                         [](const auto &isa) { return std::string(isa.param); });

TEST(Golden, ChunksCarryTheirHeader)
{
    for (const GoldenSet &set : golden_sets) {
        for (const GoldenChunk &golden : set.chunks) {
            const std::string name = set.directory + std::string("/") + golden.name;
            SCOPED_TRACE(name);
            const Bytes bytes = read_file(name + ".kv");
            cg_chunk chunk;
            ASSERT_EQ(cg_chunk_open(bytes.data(), bytes.size(), &chunk), CG_OK);
            std::vector<uint32_t> want_tokens, tokens(chunk.header.n_tokens);
            const cg_chunk_header want =
                golden_header(set, golden.dtype, golden.chunk, &want_tokens);
            EXPECT_EQ(chunk.header.level, golden.level);
            EXPECT_EQ(chunk.header.first_position, want.first_position);
            EXPECT_EQ(chunk.header.cache_scales, want.cache_scales);
            EXPECT_TRUE(cg_geometry_equal(&chunk.header.geometry, &want.geometry));
            EXPECT_TRUE(cg_key_equal(&chunk.header.parent, &want.parent));
            EXPECT_TRUE(cg_key_equal(&chunk.header.extra, &want.extra));
            ASSERT_EQ(cg_chunk_tokens(&chunk, tokens.data()), CG_OK);
            EXPECT_EQ(tokens, want_tokens);
        }
    }
}

TEST(Golden, TranscodingGivesTheCoarserFilesSymbols)
{
    for (const GoldenSet &set : golden_sets) {
        const std::string directory = set.directory + std::string("/");
        const Profile profile = golden_profile(set, read_file(directory + "profile.cgp"));
        for (int level = 1; level < 3; level++) {
            for (const char *each : {"-0-L", "-1-L"}) {
                const std::string chunk = (set.has_scales ? "e4m3" : "bf16") + std::string(each);
                const Bytes fine = read_file(directory + chunk + std::to_string(level) + ".kv");
                const Bytes coarse =
                    read_file(directory + chunk + std::to_string(level + 1) + ".kv");
                uint8_t *bytes;
                size_t n_bytes;
                ASSERT_EQ(cg_transcode(profile.get(), fine.data(), fine.size(),
                                       static_cast<cg_level>(level + 1), &bytes, &n_bytes),
                          CG_OK);
                const Bytes transcoded(bytes, bytes + n_bytes);
                free(bytes);
                Bytes a, b;
                ASSERT_EQ(decode(profile.get(), transcoded, &a), CG_OK);
                ASSERT_EQ(decode(profile.get(), coarse, &b), CG_OK);
                EXPECT_EQ(a, b) << directory << chunk << level;
            }
        }
    }
}

} // namespace
