// Encoding with a joint matrix over all layer groups. That the other tests of codec_test.cc hold
// with one, too, is said there.
#include "codec/codec.h"

#include "codec/klt.h"
#include "profile_maker.h"

#include <gtest/gtest.h>
#include <thread>

namespace
{

using namespace cg_test;

// Bases that are exact enough for errors to be those of quantizers, and channels that no rotation
// mixes.
ProfileSpec fine_spec()
{
    ProfileSpec spec = spec_3();
    spec.rotary_dim = 0;
    spec.fine = true;
    spec.nests = true;
    return spec;
}

// Squared errors times squared weights of tokens from first to end, all layers and planes.
double weighted_square(const cg_profile *profile, const cg_chunk_header &h,
                       const std::vector<float> &want, const std::vector<float> &got,
                       uint32_t first, uint32_t end)
{
    const size_t channels = cg_geometry_channels(&h.geometry);
    double sum = 0;
    for (size_t plane = 0; plane < 2u * h.geometry.n_layers; plane++) {
        for (uint32_t t = first; t < end; t++) {
            for (size_t ch = 0; ch < channels; ch++) {
                const size_t i = (plane * h.n_tokens + t) * channels + ch;
                sum += std::pow((got[i] - want[i]) * profile->weight[plane * channels + ch], 2);
            }
        }
    }
    return sum;
}

// A quantizer's error is that of a uniform distribution over a step; and what the joint matrix
// gives is rounded to 2^-fraction_bits of one.
TEST(JointCodec, TheErrorOfALevelIsWhatItsStepSays)
{
    for (const unsigned fraction_bits : {0u, 3u}) {
        ProfileSpec spec = fine_spec();
        spec.fraction_bits.fill(fraction_bits);
        const Profile profile = make_profile(spec);
        const cg_chunk_header header = make_header(spec, CG_DTYPE_FP32, 512, 256);
        const double n_channels = 2.0 * 4 * 32, shared_share = 2 * 32 / n_channels;
        for (int level = CG_L1; level <= CG_L3; level++) {
            SCOPED_TRACE(testing::Message() << "L" << level << " fraction_bits=" << fraction_bits);
            // As large to the step at every level: few symbols are 0, and no row is halved.
            const Bytes elements =
                make_elements(header, 3, spec.step[level - 1][CG_K] / spec.step[0][CG_K]);
            Bytes chunk, decoded;
            ASSERT_EQ(encode(profile.get(), header, make_tokens(256, 1), elements,
                             static_cast<cg_level>(level), &chunk),
                      CG_OK);
            ASSERT_EQ(decode(profile.get(), chunk, &decoded), CG_OK);
            const double square =
                weighted_square(profile.get(), header, to_floats(elements, CG_DTYPE_FP32),
                                to_floats(decoded, CG_DTYPE_FP32), 0, 256) /
                (256 * n_channels);
            const double step = spec.step[level - 1][CG_K],
                         want = step * step / 12 *
                                (1 + shared_share * std::pow(4, -static_cast<int>(fraction_bits)));
            EXPECT_NEAR(square, want, 0.03 * want);
        }
    }
}

TEST(JointCodec, LastBlocksSinksAndPositionsAreAsAnywhere)
{
    const ProfileSpec spec = fine_spec();
    const Profile profile = make_profile(spec);
    for (const uint32_t first_position : {0u, 8u, 25600u}) {
        for (const uint32_t n_tokens : {1u, 3u, 7u, 8u, 9u, 33u, 255u, 264u}) {
            SCOPED_TRACE(testing::Message() << n_tokens << " at " << first_position);
            const cg_chunk_header header =
                make_header(spec, CG_DTYPE_FP32, first_position, n_tokens);
            const Bytes elements = make_elements(header, n_tokens);
            Bytes chunk, decoded;
            ASSERT_EQ(encode(profile.get(), header, make_tokens(n_tokens, 1), elements, CG_L1,
                             &chunk, 1, CG_L3),
                      CG_OK);
            ASSERT_EQ(cg_chunk_verify(chunk.data(), chunk.size()), CG_OK);
            ASSERT_EQ(decode(profile.get(), chunk, &decoded), CG_OK);
            const auto want = to_floats(elements, CG_DTYPE_FP32),
                       got = to_floats(decoded, CG_DTYPE_FP32);
            for (uint32_t b = 0; b < n_tokens; b += 8) {
                // Each of a block's coefficients is off by half a step at most, and what is given
                // by half a unit more.
                const double most = 0.5 * spec.step[0][CG_K] * std::sqrt(8 * 2 * 4 * 32) * 1.15;
                ASSERT_LE(std::sqrt(weighted_square(profile.get(), header, want, got, b,
                                                    std::min(b + 8, n_tokens))),
                          most)
                    << b;
            }
            const uint32_t n_sinks = first_position == 0 ? std::min(n_tokens, 4u) : 0;
            EXPECT_EQ(weighted_square(profile.get(), header, want, got, 0, n_sinks), 0);
        }
    }
}

// Tasks on several threads, whichever ends last, make the same bytes; and so does an encoder whose
// tasks run again.
TEST(JointCodec, TheOrderOfTasksAndThreadsChangesNothing)
{
    ProfileSpec spec = spec_3();
    spec.nests = true;
    spec.n_layers = 8;
    spec.group_layers = {2, 1, 2, 3};
    const Profile profile = make_profile(spec);
    const cg_chunk_header header = make_header(spec, CG_DTYPE_BF16, 0, 75);
    const auto tokens = make_tokens(75, 1);
    const Bytes elements = make_elements(header, 1);
    Bytes want;
    ASSERT_EQ(encode(profile.get(), header, tokens, elements, CG_L1, &want, 1, CG_L3), CG_OK);
    for (uint32_t last = 0; last < spec.group_layers.size(); last++) {
        cg_encoder *encoder;
        ASSERT_EQ(cg_encoder_new(profile.get(), &header, tokens.data(), 0xe | CG_NESTED, &encoder),
                  CG_OK);
        const size_t n_scratch = cg_encoder_scratch_bytes(encoder);
        const auto run = [&](uint32_t task) {
            const std::unique_ptr<void, MallocFree> scratch(
                aligned_alloc(64, (n_scratch + 63) / 64 * 64));
            const cg_task_shape shape = cg_encoder_task_shape(encoder, task);
            const size_t n = shape.elements_bytes / (2 * shape.n_layers);
            Bytes in;
            for (uint32_t i = 0; i < 2 * shape.n_layers; i++) {
                const size_t at =
                    ((shape.first_layer + i % shape.n_layers) * 2 + i / shape.n_layers) * n;
                in.insert(in.end(), elements.begin() + static_cast<long>(at),
                          elements.begin() + static_cast<long>(at + n));
            }
            EXPECT_EQ(cg_encoder_run(encoder, task, scratch.get(), n_scratch, in.data()), CG_OK);
        };
        uint8_t *bytes = nullptr;
        size_t n_bytes = 0;
        std::vector<std::thread> threads;
        for (uint32_t task = 0; task < spec.group_layers.size(); task++) {
            if (task != last)
                threads.emplace_back(run, task);
        }
        for (std::thread &thread : threads)
            thread.join();
        EXPECT_EQ(cg_encoder_finish(encoder, CG_L1, &bytes, &n_bytes), CG_ERR_INVALID_ARGUMENT);
        for (int again = 0; again < 2; again++) {
            run(last);
            ASSERT_EQ(cg_encoder_finish(encoder, CG_L1, &bytes, &n_bytes), CG_OK);
            EXPECT_EQ(Bytes(bytes, bytes + n_bytes), want) << last;
            free(bytes);
        }
        cg_encoder_free(encoder);
        Bytes together;
        ASSERT_EQ(encode(profile.get(), header, tokens, elements, CG_L1, &together, 4, CG_L3),
                  CG_OK);
        EXPECT_EQ(together, want);
    }
}

// Component c of a basis, in steps.
std::vector<double> component_of(const cg_profile *profile, const cg_group *group, uint32_t c)
{
    const cg_bands *bands = &group->bands[0];
    std::vector<int16_t> row(bands->n_channels);
    const int shift = static_cast<int>(cg_bands_row(&profile->layout, bands, c, row.data()));
    std::vector<double> component;
    for (const int16_t element : row)
        component.push_back(std::ldexp(element, shift - static_cast<int>(bands->unit_bits)));
    return component;
}

// A chunk whose blocks are, in the first frequency, sums of the first components of the joint
// matrix: the same sum in all groups, or another one in each. Nothing else is in it, and no group
// alone can tell the two.
Bytes make_related(const cg_profile *profile, const cg_chunk_header &h, bool are_related)
{
    const size_t channels = cg_geometry_channels(&h.geometry), n_shared = profile->n_shared;
    std::vector<double> elements(2 * h.geometry.n_layers * h.n_tokens * channels);
    Random random(1);
    for (uint32_t b = 0; b < h.n_tokens / 8; b++) {
        std::vector<double> given;
        for (uint32_t g = 0; g < profile->n_groups; g++) {
            if (g == 0 || !are_related) {
                given.assign(profile->joint->n_channels, 0);
                for (uint32_t c = 0; c < 8; c++)
                    add_scaled(&given, 100 * random.normal(),
                               component_of(profile, profile->joint, c));
            }
            const cg_group *group = &profile->groups[g];
            std::vector<double> sum(group->n_channels);
            for (uint32_t c = 0; c < n_shared; c++)
                add_scaled(&sum, given[g * n_shared + c], component_of(profile, group, c));
            for (size_t i = 0; i < 8 * sum.size(); i++) {
                const size_t slice = i / 8 / channels, ch = i / 8 % channels,
                             plane = 2 * (group->first_layer + slice % group->n_layers) +
                                     slice / group->n_layers;
                elements[(plane * h.n_tokens + 8 * b + i % 8) * channels + ch] =
                    sum[i / 8] / std::sqrt(8) * profile->step[0][CG_K] /
                    profile->weight[plane * channels + ch];
            }
        }
    }
    Bytes out;
    for (size_t i = 0; i < elements.size(); i++)
        put_element(&out, CG_DTYPE_FP32,
                    static_cast<float>(
                        elements[i] +
                        profile->mean[i / (h.n_tokens * channels) * channels + i % channels]));
    return out;
}

// What the joint matrix is for.
TEST(JointCodec, GroupsThatGoTogetherTakeFewerBytes)
{
    ProfileSpec spec = fine_spec();
    spec.group_layers = {1, 1, 1, 1};
    spec.n_sinks = 0;
    const std::vector<ClassSpec> mostly_zeros = {{0, falling_freq(6, 0.05)}};
    const Profile profile = open_profile(make_profile_bytes(spec, mostly_zeros));
    const cg_chunk_header header = make_header(spec, CG_DTYPE_FP32, 0, 256);
    size_t n_bytes[2];
    for (const bool are_related : {false, true}) {
        const Bytes elements = make_related(profile.get(), header, are_related);
        Bytes chunk, decoded;
        ASSERT_EQ(encode(profile.get(), header, make_tokens(256, 1), elements, CG_L1, &chunk),
                  CG_OK);
        ASSERT_EQ(decode(profile.get(), chunk, &decoded), CG_OK);
        const double square =
            weighted_square(profile.get(), header, to_floats(elements, CG_DTYPE_FP32),
                            to_floats(decoded, CG_DTYPE_FP32), 0, 256) /
            (256 * 2 * 4 * 32);
        EXPECT_LT(square, spec.step[0][CG_K] * spec.step[0][CG_K] / 12);
        n_bytes[are_related] = chunk.size();
    }
    EXPECT_LT(n_bytes[true], n_bytes[false] / 2);
}

// A matrix's symbols at the finest level of a chunk, from its coarsest on.
struct Decoded {
    std::vector<std::unique_ptr<void, MallocFree>> memory;
    std::unique_ptr<BlockOrder> order;
    cg_symbols symbols = {};

    Decoded(const cg_profile *profile, const Bytes &bytes, const cg_group *group)
    {
        cg_chunk chunk;
        EXPECT_EQ(cg_chunk_open(bytes.data(), bytes.size(), &chunk), CG_OK);
        const cg_chunk_header &h = chunk.header;
        order = std::make_unique<BlockOrder>(profile, chunk);
        const size_t n_blocks = order->of.n_blocks;
        const bool is_joint = group == profile->joint;
        cg_symbols coarse;
        for (unsigned level = h.coarsest; level >= h.level; level--) {
            uint8_t kind = is_joint ? CG_SECTION_JOINT : CG_SECTION_SYMBOLS;
            if (level < h.coarsest)
                kind = is_joint ? cg_section_joint_to_level(level) : cg_section_to_level(level);
            const cg_level_columns &columns = group->columns[level - 1][0];
            memory.emplace_back(aligned_alloc(64, cg_symbols_bytes(&columns, n_blocks) + 64));
            coarse = symbols;
            symbols = cg_symbols_lay(&columns, level < h.coarsest ? &coarse : nullptr,
                                     order->of.runs, order->of.n_runs, memory.back().get());
            for (uint32_t i = 0; i < h.n_sections; i++) {
                const cg_section s = cg_chunk_section(&chunk, i);
                if (s.kind == kind && (is_joint || s.group == group - profile->groups)) {
                    EXPECT_EQ(
                        cg_symbols_decode(profile, &symbols, {bytes.data() + s.offset, s.bytes}),
                        CG_OK);
                }
            }
        }
    }
    // The symbols of frequency f and row b.
    const int16_t *row(unsigned f, size_t b) const
    {
        return symbols.cells[f] + b * symbols.columns->n_active[f];
    }
};

// FORMAT.md's sums of a chunk's symbols, in 64 bits: none leaves its bits. Returns how many given
// numbers are beyond 16 bits.
uint64_t check_sums(const cg_profile *profile, const Bytes &bytes)
{
    const cg_group *joint = profile->joint;
    const cg_bands *bands = &joint->bands[0];
    const Decoded given_by(profile, bytes, joint);
    std::vector<std::vector<int64_t>> basis;
    for (uint32_t c = 0; c < bands->n_components; c++) {
        std::vector<int16_t> row(bands->n_channels);
        const unsigned shift = cg_bands_row(&profile->layout, bands, c, row.data());
        basis.emplace_back(row.begin(), row.end());
        for (int64_t &element : basis.back())
            element *= int64_t{1} << shift;
    }
    cg_chunk_header h;
    EXPECT_EQ(cg_chunk_header_parse(bytes.data(), bytes.size(), &h), CG_OK);
    const unsigned k = bands->unit_bits - profile->fraction_bits[h.level];
    const size_t n_blocks = given_by.symbols.n_rows;
    std::vector<Decoded> groups;
    for (uint32_t g = 0; g < profile->n_groups; g++)
        groups.emplace_back(profile, bytes, &profile->groups[g]);
    uint64_t n_beyond = 0;
    for (size_t r = 0; r < 8 * n_blocks; r++) {
        const auto f = static_cast<unsigned>(r % 8);
        const size_t b = r / 8;
        std::vector<int64_t> sums(bands->n_channels);
        for (uint32_t c = 0; c < given_by.symbols.columns->n_active[f]; c++) {
            for (size_t i = 0; i < sums.size(); i++)
                sums[i] += basis[c][i] * given_by.row(f, b)[c];
        }
        for (uint32_t g = 0; g < profile->n_groups; g++) {
            const uint64_t *most_before = profile->groups[g].bands[0].most_before;
            double sum = 0;
            for (size_t c = 0; c < profile->n_given[h.level - 1][f]; c++) {
                const int64_t u = sums[g * profile->n_shared + c];
                EXPECT_LT(std::abs(u), int64_t{1} << 31);
                const int64_t v = (u >> k) + (u >> (k - 1) & 1);
                n_beyond += v > 32767 || v < -32768;
                sum += static_cast<double>(std::min<int64_t>(std::abs(v), 32768)) *
                       static_cast<double>(most_before[c + 1] - most_before[c]);
            }
            for (size_t c = 0; c < groups[g].symbols.columns->n_active[f]; c++)
                sum += std::abs(groups[g].row(f, b)[c]) *
                       std::ldexp(static_cast<double>(most_before[profile->n_shared + c + 1] -
                                                      most_before[profile->n_shared + c]),
                                  profile->fraction_bits[h.level]);
            EXPECT_LT(sum, 0x1p31) << "f=" << f << " b=" << b << " group " << g;
        }
    }
    return n_beyond;
}

// The profile's means, as the elements of a chunk.
std::vector<float> means_of(const cg_profile *profile, const cg_chunk_header &h)
{
    const size_t channels = cg_geometry_channels(&h.geometry);
    std::vector<float> means(size_t{2} * h.geometry.n_layers * h.n_tokens * channels);
    for (size_t i = 0; i < means.size(); i++)
        means[i] = profile->mean[i / (h.n_tokens * channels) * channels + i % channels];
    return means;
}

TEST(JointCodec, RowsWhoseSumsWouldLeaveTheirBitsAreHalved)
{
    // With units of 2^-12 the given numbers leave 16 bits first, with 2^-16 the groups' sums.
    const struct {
        unsigned unit_bits;
        double scale;
        bool is_halved;
    } cases[] = {{12, 1, false},       {12, 100, true}, {12, 1e5, true}, {12, 1e30, true},
                 {16, 1 / 16., false}, {16, 1, true},   {16, 30, true},  {16, 1e30, true}};
    for (const auto &c : cases) {
        ProfileSpec spec = fine_spec();
        spec.unit_bits = c.unit_bits;
        spec.all_active = false;
        const Profile profile = make_profile(spec);
        for (const int coarsest : {CG_L1, CG_L3}) {
            SCOPED_TRACE(testing::Message() << "unit_bits=" << c.unit_bits << " scale=" << c.scale
                                            << " coarsest=L" << coarsest);
            const cg_chunk_header header = make_header(spec, CG_DTYPE_FP32, 0, 24);
            const auto means = means_of(profile.get(), header),
                       noise = to_floats(make_elements(header, 1, c.scale), CG_DTYPE_FP32);
            Bytes elements;
            for (size_t i = 0; i < means.size(); i++)
                put_element(&elements, CG_DTYPE_FP32, means[i] + noise[i]);
            uint8_t *bytes;
            size_t n_bytes;
            uint64_t n_saturated;
            ASSERT_EQ(cg_encode_chunk(profile.get(), &header, make_tokens(24, 1).data(),
                                      elements.data(), elements.size(), CG_L1,
                                      static_cast<cg_level>(coarsest), 1, &bytes, &n_bytes,
                                      &n_saturated),
                      CG_OK);
            const Bytes chunk(bytes, bytes + n_bytes);
            free(bytes);
            cg_chunk_header h;
            ASSERT_EQ(cg_chunk_header_parse(chunk.data(), chunk.size(), &h), CG_OK);
            uint64_t n_beyond = 0;
            for (int level = CG_L1; level <= coarsest; level++)
                n_beyond += check_sums(
                    profile.get(),
                    Bytes(chunk.begin(), chunk.begin() + static_cast<long>(h.level_bytes[level])));
            EXPECT_EQ(n_saturated > 0, c.is_halved) << n_saturated;
            EXPECT_LE(n_beyond, n_saturated);
            if (c.scale > 1e5)
                continue;
            Bytes decoded;
            ASSERT_EQ(decode(profile.get(), chunk, &decoded), CG_OK);
            // What is halved is nearer to the mean. Sums that wrapped would be anything.
            const auto want = to_floats(elements, CG_DTYPE_FP32),
                       got = to_floats(decoded, CG_DTYPE_FP32);
            EXPECT_LT(weighted_square(profile.get(), header, want, got, 0, 24),
                      weighted_square(profile.get(), header, want, means, 0, 24));
        }
    }
}

} // namespace
