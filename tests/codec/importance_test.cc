// Which blocks get finer steps, against FORMAT.md's formula in f64, on each instruction set.
#include "codec/importance.h"

#include "codec/block_order.h"
#include "codec/kernels.h"
#include "codec/profile_data.h"

#include "each_kernels.h"
#include "profile_maker.h"

#include <gtest/gtest.h>
#include <limits>

namespace
{

using namespace cg_test;

struct Spec {
    const char *name;
    uint16_t n_layers = 3, n_kv_heads = 2, head_dim = 16;
    uint32_t n_query_heads = 6;
    uint32_t rotary_dim = 16, n_sinks = 4, first_position = 0, n_tokens = 100;
    std::vector<double> theta = {10000.0}; // of each rope table
    std::vector<uint8_t> layer_rope = {0, 0, 0};
    uint8_t dtype = CG_DTYPE_FP32;
    double query_scale = 0.5, key_scale = 1;
};

const std::vector<Spec> specs = {
    {.name = "grouped queries"},
    {.name = "a query head for each KV head", .n_query_heads = 2},
    {.name = "one KV head", .n_kv_heads = 1, .n_query_heads = 5},
    {.name = "part of the head is rotated", .rotary_dim = 10},
    {.name = "no rope", .rotary_dim = 0},
    {.name = "a rope for some layers", .theta = {10000.0, 500000.0}, .layer_rope = {1, 0, 1}},
    {.name = "larger heads", .head_dim = 130, .rotary_dim = 130, .query_scale = 0.2},
    {.name = "further on", .first_position = 4096, .n_tokens = 256},
    {.name = "no sinks", .n_sinks = 0, .n_tokens = 96},
    {.name = "a block of sinks alone", .n_sinks = 8, .n_tokens = 97},
    {.name = "sinks that reach into the chunk", .n_sinks = 12, .first_position = 8},
    {.name = "sinks alone", .n_sinks = 8, .n_tokens = 8},
    {.name = "one coded token", .n_tokens = 5},
    {.name = "one block", .first_position = 64, .n_tokens = 8},
    {.name = "two blocks", .first_position = 64, .n_tokens = 9},
    {.name = "bf16", .dtype = CG_DTYPE_BF16},
    {.name = "fp16", .dtype = CG_DTYPE_FP16},
    {.name = "fp8 e4m3", .dtype = CG_DTYPE_FP8_E4M3},
    {.name = "fp8 e5m2", .dtype = CG_DTYPE_FP8_E5M2},
    {.name = "scores beyond what exp() has", .key_scale = 1000},
    {.name = "scores of nothing", .key_scale = 0},
};

struct FreeMemory {
    void operator()(void *memory) const
    {
        free(memory);
    }
};

// A profile's part that tells importance, and a chunk of it.
struct Case {
    Spec spec;
    std::vector<double> inv_freq;
    std::vector<float> query_mean;
    cg_profile profile = {};
    cg_chunk_header header = {};
    cg_heads heads = {};
    Bytes elements; // [n_layers][2][n_tokens][n_kv_heads][head_dim]

    Case(const Spec &of, const cg_kernels *kernels, uint64_t seed = 1) : spec(of)
    {
        Random random(seed);
        for (const double theta : spec.theta)
            for (unsigned i = 0; i < spec.rotary_dim / 2; i++)
                inv_freq.push_back(std::pow(theta, -2.0 * i / spec.rotary_dim));
        query_mean.resize(size_t{spec.n_layers} * spec.n_query_heads * spec.head_dim);
        for (float &x : query_mean)
            x = cg_bf16_to_f32(
                cg_bf16_from_f32(static_cast<float>(spec.query_scale * random.normal())));
        profile.kernels = kernels;
        profile.version = 4;
        profile.geometry = {spec.n_layers, spec.n_kv_heads, spec.head_dim, spec.dtype, 2};
        profile.rotary_dim = spec.rotary_dim;
        profile.n_ropes = static_cast<uint32_t>(spec.theta.size());
        profile.n_sinks = spec.n_sinks;
        profile.inv_freq = inv_freq.data();
        profile.layer_rope = spec.layer_rope.data();
        profile.n_query_heads = spec.n_query_heads;
        profile.query_mean = query_mean.data();
        header.geometry = profile.geometry;
        header.first_position = spec.first_position;
        header.n_tokens = spec.n_tokens;
        EXPECT_EQ(cg_heads_init(&profile, &header, &heads), CG_OK);
        // Some tokens' K and V are larger: that tells blocks apart.
        for (size_t layer = 0; layer < spec.n_layers; layer++)
            for (const double scale : {spec.key_scale, 1.0})
                for (size_t t = 0; t < spec.n_tokens; t++) {
                    const double larger = std::exp2(random.uniform(-2, 2)) * scale;
                    for (size_t i = 0; i < channels(); i++)
                        put_element(&elements, spec.dtype,
                                    static_cast<float>(larger * random.normal()));
                }
    }
    ~Case()
    {
        cg_heads_destroy(&heads);
    }
    Case(const Case &) = delete;
    Case &operator=(const Case &) = delete;

    size_t channels() const
    {
        return size_t{spec.n_kv_heads} * spec.head_dim;
    }
    size_t n_blocks() const
    {
        return (spec.n_tokens + 7) / 8;
    }
    size_t n_sinks() const // in the chunk
    {
        const uint32_t left =
            spec.first_position < spec.n_sinks ? spec.n_sinks - spec.first_position : 0;
        return std::min(left, spec.n_tokens);
    }
    uint8_t *at(size_t layer, size_t plane, size_t t = 0)
    {
        return elements.data() +
               ((layer * 2 + plane) * spec.n_tokens + t) * channels() * cg_dtype_bytes(spec.dtype);
    }
    void set(size_t layer, size_t plane, size_t t, float value) // all of a token
    {
        Bytes token;
        for (size_t i = 0; i < channels(); i++)
            put_element(&token, spec.dtype, value);
        std::copy(token.begin(), token.end(), at(layer, plane, t));
    }
    // counts [n_layers][n_blocks]
    cg_status weigh(std::vector<float> *counts)
    {
        const size_t n_bytes = cg_importance_scratch_bytes(&profile, spec.n_tokens);
        // Exactly as much: ASan sees what lies beyond. Not zeros: nothing may be taken for granted.
        std::unique_ptr<void, FreeMemory> scratch(aligned_alloc(64, n_bytes));
        memset(scratch.get(), 0xff, n_bytes);
        counts->assign(spec.n_layers * n_blocks(), std::numeric_limits<float>::quiet_NaN());
        for (uint32_t layer = 0; layer < spec.n_layers; layer++) {
            const cg_status status =
                cg_importance_of_layer(&heads, layer, at(layer, CG_K), at(layer, CG_V),
                                       scratch.get(), counts->data() + layer * n_blocks());
            if (status != CG_OK)
                return status;
        }
        return CG_OK;
    }
    std::vector<uint8_t> scales(std::vector<float> counts) const
    {
        std::vector<uint8_t> index(n_blocks(), 99);
        cg_importance_step_factors(&heads, counts.data(), index.data());
        return index;
    }
};

// Turned by a position, as the model turns it.
std::vector<double> turned(const Case &c, size_t layer, std::vector<double> x, double position)
{
    const size_t half = c.spec.rotary_dim / 2;
    for (size_t i = 0; i < half; i++) {
        const double angle = position * c.inv_freq[c.spec.layer_rope[layer] * half + i], a = x[i],
                     b = x[i + half];
        x[i] = a * std::cos(angle) - b * std::sin(angle);
        x[i + half] = b * std::cos(angle) + a * std::sin(angle);
    }
    return x;
}

double dot(const std::vector<double> &a, const std::vector<double> &b)
{
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

// Divided by their mean; where all are 0, all are alike.
std::vector<double> over_mean(std::vector<double> x)
{
    const double sum = std::accumulate(x.begin(), x.end(), 0.0);
    for (double &one : x)
        one = sum > 0 ? one * static_cast<double>(x.size()) / sum : 1;
    return x;
}

// What blocks count to one layer. Of a block without coded tokens 0.
std::vector<double> counts_by_the_book(const Case &c, size_t layer)
{
    const Spec &s = c.spec;
    const std::vector<float> elements = to_floats(c.elements, s.dtype);
    const size_t first = c.n_sinks(), n = s.n_tokens - first, dim = s.head_dim;
    std::vector<double> of_token(n);
    for (size_t query = 0; query < s.n_query_heads && n > 0; query++) {
        const size_t head = query / (s.n_query_heads / s.n_kv_heads);
        std::vector<std::vector<double>> k, v;
        std::vector<double> mean(dim), mu(dim), spread;
        for (size_t t = first; t < s.n_tokens; t++) {
            const auto *row = elements.data() + layer * 2 * s.n_tokens * c.channels() +
                              t * c.channels() + head * dim;
            k.push_back(turned(c, layer, {row, row + dim}, -double(s.first_position + t)));
            row += s.n_tokens * c.channels();
            v.emplace_back(row, row + dim);
            for (size_t d = 0; d < dim; d++)
                mean[d] += row[d] / static_cast<double>(n);
        }
        for (const auto &of : v) {
            std::vector<double> off(dim);
            for (size_t d = 0; d < dim; d++)
                off[d] = of[d] - mean[d];
            spread.push_back(dot(off, off));
        }
        for (size_t d = 0; d < dim; d++)
            mu[d] = c.query_mean[(layer * s.n_query_heads + query) * dim + d];
        for (const double distance : {32, 128, 512, 2048}) {
            const auto q = turned(c, layer, mu, distance);
            std::vector<double> scores, for_k;
            for (const auto &of : k)
                scores.push_back(2 * dot(q, of));
            const double most = *std::max_element(scores.begin(), scores.end());
            for (size_t i = 0; i < n; i++) {
                scores[i] = std::exp(scores[i] - most);
                for_k.push_back(scores[i] * spread[i]);
            }
            scores = over_mean(scores);
            for_k = over_mean(for_k);
            for (size_t i = 0; i < n; i++)
                of_token[i] += (scores[i] + for_k[i]) / 2 / 4 / s.n_query_heads;
        }
    }
    std::vector<double> counts;
    for (size_t b = 0; b < c.n_blocks(); b++) {
        double sum = 0, n_coded = 0;
        for (size_t t = b * 8; t < std::min(size_t{s.n_tokens}, b * 8 + 8); t++) {
            sum += t < first ? 0 : of_token[t - first];
            n_coded += t < first ? 0 : 1;
        }
        counts.push_back(n_coded > 0 ? sum / n_coded : 0);
    }
    return counts;
}

// 2 x octaves of each block's step before it is rounded, from counts [n_layers][n_blocks]; of a
// block without coded tokens 0.
std::vector<double> steps_by_the_book(const Case &c, const std::vector<double> &counts)
{
    const size_t n = c.n_blocks();
    std::vector<double> octaves;
    for (size_t b = c.n_sinks() / 8; b < n; b++) {
        double sum = 0;
        for (size_t layer = 0; layer < c.spec.n_layers; layer++)
            sum += counts[layer * n + b] / c.spec.n_layers;
        octaves.push_back(-0.7 / 2 * std::log2(std::max(sum, 1e-9)));
    }
    for (int pass = 0; pass < 2; pass++) {
        const double mean = std::accumulate(octaves.begin(), octaves.end(), 0.0) /
                            static_cast<double>(octaves.size());
        for (double &o : octaves)
            o = pass == 0 ? std::min(std::max(o - mean, -1.5), 1.5) : o - mean;
    }
    octaves.insert(octaves.begin(), n - octaves.size(), 0.0);
    if (c.n_sinks() == c.spec.n_tokens)
        octaves.assign(n, 0.0);
    for (double &o : octaves)
        o *= 2;
    return octaves;
}

class ImportanceTest : public EachKernels
{
};

TEST_P(ImportanceTest, IsThatOfTheFormula)
{
    for (const Spec &spec : specs) {
        SCOPED_TRACE(spec.name);
        Case c(spec, kernels);
        std::vector<float> counts;
        std::vector<double> want;
        ASSERT_EQ(c.weigh(&counts), CG_OK);
        for (size_t layer = 0; layer < spec.n_layers; layer++)
            for (const double x : counts_by_the_book(c, layer))
                want.push_back(x);
        // An f32 score of hundreds is off by 2^-14, and so is its power of e.
        const double tolerance = spec.key_scale > 1 ? 0.2 : 1e-3;
        for (size_t i = 0; i < want.size(); i++)
            ASSERT_NEAR(counts[i], want[i], tolerance * want[i] + 1e-6) << "block " << i;
        // To nearest; a hair's breadth decides nothing.
        const std::vector<uint8_t> index = c.scales(counts);
        const std::vector<double> steps = steps_by_the_book(c, {counts.begin(), counts.end()});
        for (size_t b = 0; b < index.size(); b++) {
            ASSERT_LT(index[b], CG_N_STEP_FACTORS);
            ASSERT_LE(std::fabs(steps[b] - (index[b] - 3.0)), 0.501)
                << "block " << b << ", scale " << int{index[b]};
        }
    }
}

TEST_P(ImportanceTest, TellsBlocksApart)
{
    Case c(specs[0], kernels);
    std::vector<float> counts;
    ASSERT_EQ(c.weigh(&counts), CG_OK);
    const std::vector<uint8_t> index = c.scales(counts);
    EXPECT_GE(*std::max_element(index.begin(), index.end()) -
                  *std::min_element(index.begin(), index.end()),
              2);
}

// Of alike K all tokens get the same attention; of alike V none of them matters to an error of K.
TEST_P(ImportanceTest, AlikeTokensCountAlike)
{
    Case c(specs[0], kernels);
    std::vector<float> counts;
    c.profile.rotary_dim = 0;
    for (size_t layer = 0; layer < c.spec.n_layers; layer++)
        for (size_t plane = 0; plane < 2; plane++)
            for (size_t t = 0; t < c.spec.n_tokens; t++)
                c.set(layer, plane, t, 1.5f);
    ASSERT_EQ(c.weigh(&counts), CG_OK);
    for (const float x : counts)
        EXPECT_NEAR(x, 1, 1e-4);
    for (const uint8_t index : c.scales(counts))
        EXPECT_EQ(index, CG_OWN_STEP_FACTOR);
}

TEST_P(ImportanceTest, NumbersBeyondF32AreNoHarm)
{
    Spec spec = specs[0];
    spec.dtype = CG_DTYPE_FP32;
    for (const float huge : {1e20f, std::numeric_limits<float>::max()}) {
        for (const size_t n_huge : {1, 50, 96}) {
            SCOPED_TRACE(testing::Message() << huge << ", tokens " << n_huge);
            Case c(spec, kernels);
            std::vector<float> counts;
            for (float &x : c.query_mean)
                x *= 1e30f;
            for (size_t layer = 0; layer < spec.n_layers; layer++)
                for (size_t plane = 0; plane < 2; plane++)
                    for (size_t t = 0; t < n_huge; t++)
                        c.set(layer, plane, c.spec.n_tokens - 1 - t, t % 2 == 0 ? huge : -huge);
            ASSERT_EQ(c.weigh(&counts), CG_OK);
            double sum = 0;
            for (const float x : counts) {
                ASSERT_TRUE(std::isfinite(x) && x >= 0) << x;
                sum += x;
            }
            EXPECT_GT(sum, 0);
            for (const uint8_t index : c.scales(counts))
                EXPECT_LT(index, CG_N_STEP_FACTORS);
        }
    }
}

TEST_P(ImportanceTest, RefusesElementsThatAreNotFinite)
{
    for (const float bad :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        for (const uint8_t dtype : {CG_DTYPE_FP32, CG_DTYPE_BF16}) {
            for (size_t plane = 0; plane < 2; plane++) {
                Spec spec = specs[0];
                spec.dtype = dtype;
                Case c(spec, kernels);
                std::vector<float> counts;
                c.set(1, plane, spec.n_tokens - 1, bad);
                EXPECT_EQ(c.weigh(&counts), CG_ERR_INVALID_ARGUMENT) << bad << " plane " << plane;
            }
        }
    }
}

// ---- encoders ----

struct FreeEncoder {
    void operator()(cg_encoder *encoder) const
    {
        cg_encoder_free(encoder);
    }
};
using Encoder = std::unique_ptr<cg_encoder, FreeEncoder>;

Encoder new_encoder(const cg_profile *profile, const cg_chunk_header &header,
                    const std::vector<uint32_t> &tokens, uint8_t level_mask)
{
    cg_encoder *encoder = nullptr;
    EXPECT_EQ(cg_encoder_new(profile, &header, tokens.data(), level_mask, &encoder), CG_OK);
    return Encoder(encoder);
}

Bytes steps_of(const Bytes &chunk)
{
    cg_chunk opened;
    EXPECT_EQ(cg_chunk_open(chunk.data(), chunk.size(), &opened), CG_OK);
    const cg_section steps = cg_chunk_section(&opened, 1);
    EXPECT_EQ(steps.kind, CG_SECTION_STEPS);
    return Bytes(chunk.begin() + static_cast<long>(steps.offset),
                 chunk.begin() + static_cast<long>(steps.offset + steps.bytes));
}

TEST(Weighing, AChunksBlocksHaveTheStepsThatItsKAndVAskFor)
{
    ProfileSpec spec = spec_4(ProfileSpec(), 32);
    spec.nests = true;
    const Profile profile = make_profile(spec);
    const cg_chunk_header header = make_header(spec, CG_DTYPE_BF16, 0, 75);
    const auto tokens = make_tokens(75, 1);
    const Bytes elements = make_elements(header, 1);
    const size_t plane_bytes = elements.size() / spec.n_layers / 2;
    // Last layer first: in no order but the chunk's do layers count.
    const Encoder encoder = new_encoder(profile.get(), header, tokens, 1 << CG_L2);
    ASSERT_EQ(cg_encoder_n_weighings(encoder.get()), spec.n_layers);
    const size_t n_scratch = cg_encoder_scratch_bytes(encoder.get());
    const std::unique_ptr<void, FreeMemory> scratch(aligned_alloc(64, (n_scratch + 63) / 64 * 64));
    cg_heads heads;
    ASSERT_EQ(cg_heads_init(profile.get(), &header, &heads), CG_OK);
    std::vector<float> counts(spec.n_layers * 10);
    Bytes want(10);
    for (uint32_t layer = spec.n_layers; layer-- > 0;) {
        const uint8_t *k = elements.data() + layer * 2 * plane_bytes;
        ASSERT_EQ(cg_importance_of_layer(&heads, layer, k, k + plane_bytes, scratch.get(),
                                         counts.data() + layer * 10),
                  CG_OK);
        ASSERT_EQ(
            cg_encoder_weigh(encoder.get(), layer, scratch.get(), n_scratch, k, k + plane_bytes),
            CG_OK);
    }
    cg_importance_step_factors(&heads, counts.data(), want.data());
    cg_heads_destroy(&heads);
    ASSERT_NE(want, Bytes(10, CG_OWN_STEP_FACTOR));

    Bytes alone, by_three, nested, by_hand;
    ASSERT_EQ(encode(profile.get(), header, tokens, elements, CG_L2, &alone), CG_OK);
    ASSERT_EQ(encode(profile.get(), header, tokens, elements, CG_L2, &by_three, 3), CG_OK);
    ASSERT_EQ(encode(profile.get(), header, tokens, elements, CG_L1, &nested, 1, CG_L3), CG_OK);
    ASSERT_EQ(encode_scaled(profile.get(), header, tokens, elements, want, CG_L2, &by_hand), CG_OK);
    EXPECT_EQ(steps_of(alone), want);
    EXPECT_EQ(alone, by_three);
    EXPECT_EQ(alone, by_hand);
    EXPECT_EQ(steps_of(nested), want);
    for (uint32_t task = 0; task < cg_encoder_n_tasks(encoder.get()); task++) { // one a group
        const cg_task_shape shape = cg_encoder_task_shape(encoder.get(), task);
        Bytes in;
        for (uint32_t i = 0; i < shape.n_planes * shape.n_layers; i++) {
            const size_t at = (shape.first_layer + i % shape.n_layers) * 2 + i / shape.n_layers;
            in.insert(in.end(), elements.begin() + static_cast<long>(at * plane_bytes),
                      elements.begin() + static_cast<long>((at + 1) * plane_bytes));
        }
        ASSERT_EQ(cg_encoder_run(encoder.get(), task, scratch.get(), n_scratch, in.data()), CG_OK);
    }
    uint8_t *bytes = nullptr;
    size_t n_bytes = 0;
    ASSERT_EQ(cg_encoder_finish(encoder.get(), CG_L2, &bytes, &n_bytes), CG_OK);
    const std::unique_ptr<uint8_t, MallocFree> owner(bytes);
    EXPECT_EQ(Bytes(bytes, bytes + n_bytes), alone);
}

TEST(Weighing, NothingIsWeighedWithoutQueriesOrLossyLevels)
{
    ProfileSpec unknown = spec_4();
    unknown.n_query_heads = 0;
    const std::pair<ProfileSpec, int> cases[] = {
        {unknown, CG_L2}, {spec_3(), CG_L2}, {spec_2(true), CG_L2}, {{}, CG_L2}, {spec_4(), CG_L0}};
    for (const auto &[spec, level] : cases) {
        SCOPED_TRACE(testing::Message() << "version " << spec.version << " L" << level);
        const Profile profile = make_profile(spec);
        const cg_chunk_header header = make_header(spec, CG_DTYPE_BF16, 0, 16);
        const Encoder encoder = new_encoder(profile.get(), header, make_tokens(16, 1),
                                            static_cast<uint8_t>(1 << level));
        const Bytes elements = make_elements(header, 1);
        const size_t n_scratch = cg_encoder_scratch_bytes(encoder.get());
        const std::unique_ptr<void, FreeMemory> scratch(
            aligned_alloc(64, (n_scratch + 63) / 64 * 64));
        EXPECT_EQ(cg_encoder_n_weighings(encoder.get()), 0u);
        EXPECT_EQ(cg_encoder_weigh(encoder.get(), 0, scratch.get(), n_scratch, elements.data(),
                                   elements.data()),
                  CG_ERR_INVALID_ARGUMENT);
    }
    const Profile profile = make_profile(unknown);
    const cg_chunk_header header = make_header(unknown, CG_DTYPE_BF16, 0, 16);
    Bytes chunk;
    ASSERT_EQ(
        encode(profile.get(), header, make_tokens(16, 1), make_elements(header, 1), CG_L2, &chunk),
        CG_OK);
    EXPECT_EQ(steps_of(chunk), Bytes(2, CG_OWN_STEP_FACTOR));
}

TEST(Weighing, RefusesWhatItCannotWeigh)
{
    const ProfileSpec spec = spec_4();
    const Profile profile = make_profile(spec);
    const cg_chunk_header header = make_header(spec, CG_DTYPE_BF16, 0, 16);
    const Encoder encoder = new_encoder(profile.get(), header, make_tokens(16, 1), 1 << CG_L2);
    Bytes elements = make_elements(header, 1);
    const size_t n_scratch = cg_encoder_scratch_bytes(encoder.get());
    const std::unique_ptr<void, FreeMemory> memory(aligned_alloc(64, n_scratch + 64));
    auto *scratch = static_cast<uint8_t *>(memory.get());
    const auto weigh = [&](uint32_t layer, void *at, size_t n_bytes) {
        return cg_encoder_weigh(encoder.get(), layer, at, n_bytes, elements.data(),
                                elements.data());
    };
    EXPECT_EQ(weigh(spec.n_layers, scratch, n_scratch), CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(weigh(0, scratch, n_scratch - 1), CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(weigh(0, scratch + 1, n_scratch), CG_ERR_INVALID_ARGUMENT);
    elements[elements.size() / spec.n_layers / 2 - 1] = 0x7f; // of the layer's last K
    elements[elements.size() / spec.n_layers / 2 - 2] = 0x80;
    EXPECT_EQ(weigh(0, scratch, n_scratch), CG_ERR_INVALID_ARGUMENT);
    Bytes chunk;
    EXPECT_EQ(encode(profile.get(), header, make_tokens(16, 1), elements, CG_L2, &chunk),
              CG_ERR_INVALID_ARGUMENT);
}

INSTANTIATE_TEST_SUITE_P(Isas, ImportanceTest,
                         testing::Values("baseline", "avx2", "avx512", "vnni", "amx"));

} // namespace
