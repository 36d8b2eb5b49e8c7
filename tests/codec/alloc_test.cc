// Every allocation of the codec may fail: the call reports it, leaks nothing, and leaves nothing
// half-made. malloc and its kin are wrapped at link time (CMakeLists.txt).
#include "codec/codec.h"
#include "codec/kernels.h"
#include "codec/safetensors.h"
#include "each_kernels.h"
#include "profile_maker.h"

#include <atomic>
#include <functional>
#include <gtest/gtest.h>
#include <jansson.h>
#include <malloc.h>

static std::atomic<long> n_until_failure{-1}; // -1: never
static std::atomic<long> n_live{0};
static std::atomic<bool> failed{false};
static std::atomic<long> live_bytes{0}, peak_bytes{0};

static bool fails()
{
    long n = n_until_failure.load();
    while (n >= 0 && !n_until_failure.compare_exchange_weak(n, n - 1))
        ;
    if (n == 0)
        failed = true;
    return n == 0;
}
static void *counted(void *memory)
{
    n_live += memory != nullptr;
    const long live = live_bytes += static_cast<long>(malloc_usable_size(memory));
    long peak = peak_bytes;
    while (peak < live && !peak_bytes.compare_exchange_weak(peak, live))
        ;
    return memory;
}
static void uncounted(void *memory)
{
    n_live -= memory != nullptr;
    live_bytes -= static_cast<long>(malloc_usable_size(memory));
}

extern "C" {
void *__real_malloc(size_t n_bytes);
void *__real_calloc(size_t n, size_t n_bytes);
void *__real_realloc(void *memory, size_t n_bytes);
void *__real_aligned_alloc(size_t align, size_t n_bytes);
void __real_free(void *memory);
void *__wrap_malloc(size_t n_bytes)
{
    return fails() ? nullptr : counted(__real_malloc(n_bytes));
}
void *__wrap_calloc(size_t n, size_t n_bytes)
{
    return fails() ? nullptr : counted(__real_calloc(n, n_bytes));
}
void *__wrap_realloc(void *memory, size_t n_bytes)
{
    if (fails())
        return nullptr;
    uncounted(memory);
    return counted(__real_realloc(memory, n_bytes));
}
void *__wrap_aligned_alloc(size_t align, size_t n_bytes)
{
    return fails() ? nullptr : counted(__real_aligned_alloc(align, n_bytes));
}
void __wrap_free(void *memory)
{
    uncounted(memory);
    __real_free(memory);
}
}

namespace
{

using namespace cg_test;

// Fails the first allocation of a call, then the second ... until it gets through. run() returns
// the call's status and frees what it made.
void expect_survives(const char *what, const std::function<cg_status()> &run)
{
    ASSERT_EQ(run(), CG_OK) << what;
    int n_refused = 0;
    for (long n = 0; n < 10000; n++) {
        const long live = n_live;
        failed = false;
        n_until_failure = n;
        const cg_status status = run();
        n_until_failure = -1;
        ASSERT_EQ(n_live, live) << what << ": leaks when allocation " << n << " fails";
        if (!failed) {
            EXPECT_EQ(status, CG_OK) << what;
            EXPECT_GT(n_refused, 0) << what << ": the wrapping does not work";
            return;
        }
        ASSERT_TRUE(status == CG_ERR_NO_MEMORY || status == CG_OK)
            << what << ": " << cg_strerror(status);
        n_refused += status == CG_ERR_NO_MEMORY;
    }
    FAIL() << what << ": never gets through";
}

class AllocTest : public testing::TestWithParam<const char *>
{ // whether the preset is paper
  protected:
    AllocTest()
    {
        const std::string kind = GetParam();
        if (kind.find("paper") != std::string::npos)
            spec = paper_spec();
        if (kind.back() == '2')
            spec = spec_2(kind == "joined2", spec);
        if (kind.back() == '3')
            spec = spec_3();
        if (kind.back() == '4')
            spec = spec_4(spec, 32);
        spec.all_active = false;
        profile_bytes = make_profile_bytes(spec);
        profile = open_profile(profile_bytes);
        header = make_header(spec, CG_DTYPE_BF16, 0, 20);
        tokens = make_tokens(20, 1);
        elements = make_elements(header, 1);
        for (int level = CG_L0; level <= CG_L3; level++)
            EXPECT_EQ(encode(profile.get(), header, tokens, elements, static_cast<cg_level>(level),
                             &chunks[level]),
                      CG_OK);
        decoded.resize(elements.size());
    }

    ProfileSpec spec;
    Bytes profile_bytes, elements, chunks[4], decoded;
    Profile profile;
    cg_chunk_header header;
    std::vector<uint32_t> tokens;
};

TEST_P(AllocTest, OpeningAProfile)
{
    expect_survives("open", [&] {
        cg_profile *opened;
        const cg_status status =
            cg_profile_open(profile_bytes.data(), profile_bytes.size(), &opened);
        EXPECT_EQ(opened != nullptr, status == CG_OK);
        cg_profile_free(opened);
        return status;
    });
}

TEST_P(AllocTest, Decoding)
{
    for (int level = CG_L0; level <= CG_L3; level++) {
        for (unsigned n_threads : {1, 3}) {
            expect_survives("decode", [&] {
                return cg_decode_chunk(profile.get(), chunks[level].data(), chunks[level].size(),
                                       n_threads, decoded.data(), decoded.size());
            });
        }
        expect_survives(
            "verify", [&] { return cg_chunk_verify(chunks[level].data(), chunks[level].size()); });
    }
}

TEST_P(AllocTest, Encoding)
{
    for (int level = CG_L0; level <= CG_L3; level++) {
        for (unsigned n_threads : {1, 3}) {
            expect_survives("encode", [&] {
                uint8_t *bytes;
                size_t n_bytes;
                const cg_status status = cg_encode_chunk(
                    profile.get(), &header, tokens.data(), elements.data(), elements.size(),
                    static_cast<cg_level>(level), static_cast<cg_level>(level), n_threads, &bytes,
                    &n_bytes, nullptr);
                EXPECT_EQ(bytes != nullptr, status == CG_OK);
                if (status == CG_OK) {
                    EXPECT_EQ(Bytes(bytes, bytes + n_bytes), chunks[level]);
                }
                free(bytes);
                return status;
            });
        }
    }
}

// The first encoder of a profile makes what all of them need.
TEST_P(AllocTest, TheFirstEncoder)
{
    expect_survives("first encoder", [&] {
        cg_encoder *encoder = nullptr;
        cg_profile *opened;
        cg_status status = cg_profile_open(profile_bytes.data(), profile_bytes.size(), &opened);
        if (status == CG_OK)
            status = cg_encoder_new(opened, &header, tokens.data(), 1 << CG_L1, &encoder);
        EXPECT_EQ(encoder != nullptr, status == CG_OK);
        cg_encoder_free(encoder);
        cg_profile_free(opened);
        return status;
    });
}

TEST_P(AllocTest, ATaskThatFailedCanRunAgain)
{
    cg_encoder *encoder;
    ASSERT_EQ(cg_encoder_new(profile.get(), &header, tokens.data(), 0xf, &encoder), CG_OK);
    const size_t scratch_bytes = cg_encoder_scratch_bytes(encoder);
    const std::unique_ptr<void, MallocFree> scratch(
        aligned_alloc(64, (scratch_bytes + 63) / 64 * 64));
    for (uint32_t task = 0; task < cg_encoder_n_tasks(encoder); task++) {
        const cg_task_shape shape = cg_encoder_task_shape(encoder, task);
        const Bytes in = elements_of(elements, header, shape);
        for (long n = 0;; n++) {
            failed = false;
            n_until_failure = n;
            const cg_status status =
                cg_encoder_run(encoder, task, scratch.get(), scratch_bytes, in.data());
            n_until_failure = -1;
            if (!failed && status == CG_OK)
                break;
            ASSERT_LT(n, 1000);
        }
    }
    for (int level = CG_L0; level <= CG_L3; level++) {
        uint8_t *bytes;
        size_t n_bytes;
        ASSERT_EQ(cg_encoder_finish(encoder, static_cast<cg_level>(level), &bytes, &n_bytes),
                  CG_OK);
        EXPECT_EQ(Bytes(bytes, bytes + n_bytes), chunks[level]);
        free(bytes);
    }
    cg_encoder_free(encoder);
}

TEST_P(AllocTest, Transcoding)
{
    expect_survives("transcode", [&] {
        uint8_t *bytes;
        size_t n_bytes;
        const cg_status status = cg_transcode(profile.get(), chunks[1].data(), chunks[1].size(),
                                              CG_L3, &bytes, &n_bytes);
        EXPECT_EQ(bytes != nullptr, status == CG_OK);
        free(bytes);
        return status;
    });
}

INSTANTIATE_TEST_SUITE_P(Presets, AllocTest,
                         testing::Values("klt", "paper", "klt2", "joined2", "paper2", "joint3",
                                         "steps4"),
                         [](const auto &kind) { return std::string(kind.param); });

// ---- how much memory ----

// Profiles that take much for their size: many small bases or few large ones, of heads that fill
// panels badly, with the fewest bits that an element has.
ProfileSpec draw_hungry(Random *random)
{
    static const uint16_t dims[] = {2, 4, 18, 130, 258, 722};
    const unsigned version = 1 + random->below(4);
    ProfileSpec spec = version == 1   ? ProfileSpec()
                       : version == 2 ? spec_2(random->below(2))
                       : version == 3 ? spec_3()
                                      : spec_4(ProfileSpec(), 32);
    const bool are_many = random->below(2);
    spec.packed = spec.version == 1;
    spec.wide_share = 0;
    spec.thin = true;
    spec.n_kv_heads = static_cast<uint16_t>(1 + random->below(are_many ? 2 : 3));
    spec.head_dim =
        are_many ? static_cast<uint16_t>(2 + 2 * random->below(8)) : dims[random->below(6)];
    spec.rotary_dim = 2;
    spec.n_layers = static_cast<uint16_t>(1 + random->below(are_many ? 300 : 3));
    const unsigned n_together = are_many ? 1 : 1 + random->below(spec.n_layers);
    spec.group_layers.clear();
    for (unsigned layer = 0; layer < spec.n_layers; layer += spec.group_layers.back())
        spec.group_layers.push_back(
            static_cast<uint16_t>(std::min(n_together, spec.n_layers - layer)));
    if (random->below(2))
        spec.most_components = random->below(2) ? random->below(40) : 0;
    if (version == 4)
        spec.n_query_heads = static_cast<uint16_t>(spec.n_kv_heads * (1 + random->below(8)));
    if (version >= 3 && random->below(2))
        spec.n_shared = 32 * (1 + random->below(4));
    // Each group has as many components.
    spec.most_components = std::max(spec.most_components, spec.n_shared);
    while (size_t{2} * spec.n_kv_heads * spec.head_dim < spec.n_shared)
        spec.head_dim = static_cast<uint16_t>(spec.head_dim + 2);
    return spec;
}

// The most bases that there can be, of nothing.
ProfileSpec empty_bases()
{
    ProfileSpec spec = spec_2(false);
    spec.n_layers = CG_MAX_LAYERS;
    spec.n_kv_heads = 1;
    spec.head_dim = spec.rotary_dim = 2;
    spec.group_layers.assign(CG_MAX_LAYERS, 1);
    spec.most_components = 0;
    spec.thin = true;
    return spec;
}

// One head, whose rotation is as large as it is.
ProfileSpec one_layer_spec()
{
    ProfileSpec spec = spec_2(false);
    spec.n_layers = spec.n_kv_heads = 1;
    spec.head_dim = 256;
    spec.group_layers = {1};
    spec.most_components = 8;
    return spec;
}

class MemoryTest : public EachKernels
{
  protected:
    // The most that run() holds at a time.
    template <typename Run> static size_t peak_of(const Run &run)
    {
        const long before = live_bytes;
        peak_bytes = before;
        run();
        return static_cast<size_t>(peak_bytes - before);
    }
};

// The bounds that codec/profile.h states, of profiles that are opened and of such as are refused.
// How much is allocated is the same in all builds: with AddressSanitizer a fifth is enough.
TEST_P(MemoryTest, OpeningTakesAMultipleOfTheFile)
{
#if defined(__SANITIZE_ADDRESS__)
    const unsigned n_seeds = 10;
#else
    const unsigned n_seeds = 50;
#endif
    unsigned n_opened = 0, n_joint = 0;
    for (uint64_t seed = 0; seed < n_seeds; seed++) {
        Random random(seed);
        const ProfileSpec spec = seed == 0 ? empty_bases() : draw_hungry(&random);
        const Bytes bytes = make_profile_bytes(spec);
        SCOPED_TRACE(testing::Message()
                     << "seed=" << seed << " version=" << spec.version
                     << " head_dim=" << spec.head_dim << " groups=" << spec.group_layers.size()
                     << " most_components=" << spec.most_components << " bytes=" << bytes.size());
        cg_profile *opened = nullptr;
        cg_status status = CG_OK;
        cg_fingerprint fingerprint;
        const size_t check_bytes =
            peak_of([&] { status = cg_profile_check(bytes.data(), bytes.size(), &fingerprint); });
        EXPECT_LE(check_bytes, bytes.size() + (2 << 20));
        const size_t open_bytes =
            peak_of([&] { status = cg_profile_open(bytes.data(), bytes.size(), &opened); });
        EXPECT_LE(open_bytes, (spec.version == 1 ? 42 : 26) * bytes.size() + (8 << 20));
        if (status != CG_OK) {
            EXPECT_EQ(status == CG_ERR_CORRUPT || status == CG_ERR_UNSUPPORTED, true);
            continue;
        }
        n_opened++;
        n_joint += spec.version >= 3;
        const cg_chunk_header header = make_header(spec, CG_DTYPE_BF16, 0, 256);
        const auto tokens = make_tokens(256, 1);
        cg_encoder *encoder = nullptr;
        const size_t encode_bytes = peak_of(
            [&] { status = cg_encoder_new(opened, &header, tokens.data(), 1 << CG_L1, &encoder); });
        EXPECT_EQ(status, CG_OK);
        EXPECT_LE(encode_bytes, 56 * bytes.size() + (8 << 20));
        cg_encoder_free(encoder);
        cg_profile_free(opened);
    }
    EXPECT_GT(n_opened, n_seeds * 2 / 5);
    EXPECT_GT(n_joint, n_seeds / 15);
}

// Of a profile as our tools make them, whose bases fill panels and have elements of 5 to 15 bits.
TEST_P(MemoryTest, OpeningTakesTwiceTheFileOfOurTools)
{
    ProfileSpec spec = spec_4(ProfileSpec(), 32);
    spec.head_dim = spec.rotary_dim = 64;
    spec.group_layers = {1, 1, 1, 1};
    const Bytes bytes = make_profile_bytes(spec);
    cg_profile *opened = nullptr;
    const size_t open_bytes =
        peak_of([&] { EXPECT_EQ(cg_profile_open(bytes.data(), bytes.size(), &opened), CG_OK); });
    EXPECT_LE(open_bytes, 2 * bytes.size());
    cg_profile_free(opened);
}

// The bounds that codec/codec.h states, however many tables of a rotation a profile has.
TEST_P(MemoryTest, ADecoderTakesAMultipleOfTheElements)
{
    for (uint64_t seed = 0; seed < 12; seed++) {
        Random random(seed);
        ProfileSpec spec = seed == 0   ? one_layer_spec()
                           : seed == 1 ? paper_spec()
                                       : draw_hungry(&random);
        if (!spec.paper) {
            spec.all_active = true;
            spec.rotary_dim = spec.head_dim;
            spec.theta = {10000.0, 100.0, 10.0, 1000.0};
            spec.layer_rope.resize(spec.n_layers);
            for (uint8_t &rope : spec.layer_rope)
                rope = seed % 2 == 0 ? 3 : static_cast<uint8_t>(random.below(4));
            spec.nests = random.below(2);
        }
        cg_profile *opened = nullptr;
        const Bytes bytes = make_profile_bytes(spec);
        if (cg_profile_open(bytes.data(), bytes.size(), &opened) != CG_OK)
            continue;
        const Profile profile(opened);
        const uint32_t n_tokens = seed == 0 ? 2048 : 1 + random.below(700);
        const cg_chunk_header header = make_header(spec, CG_DTYPE_BF16, 8, n_tokens);
        const auto tokens = make_tokens(n_tokens, 1);
        const Bytes elements(cg_geometry_elements(&header.geometry, n_tokens) * 2);
        uint8_t *chunk = nullptr;
        size_t n_chunk = 0;
        ASSERT_EQ(cg_encode_chunk(profile.get(), &header, tokens.data(), elements.data(),
                                  elements.size(), CG_L1, spec.nests ? CG_L3 : CG_L1, 1, &chunk,
                                  &n_chunk, nullptr),
                  CG_OK);
        cg_decoder *decoder = nullptr;
        cg_status status = CG_OK;
        const size_t state_bytes =
            peak_of([&] { status = cg_decoder_new(profile.get(), chunk, n_chunk, &decoder); });
        ASSERT_EQ(status, CG_OK);
        const size_t n_elements = elements.size() / 2;
        EXPECT_LE(state_bytes, 4 * n_elements + (1 << 20))
            << "seed=" << seed << " version=" << spec.version << " head_dim=" << spec.head_dim
            << " layers=" << spec.n_layers << " elements=" << n_elements;
        const size_t of_whole =
            cg_geometry_elements(&header.geometry, (n_tokens + 255) / 256 * 256);
        EXPECT_LE(cg_decoder_scratch_bytes(decoder), 24 * of_whole + (1 << 20))
            << "seed=" << seed << " version=" << spec.version << " head_dim=" << spec.head_dim
            << " layers=" << spec.n_layers << " elements=" << of_whole;
        cg_decoder_free(decoder);
        free(chunk);
    }
}

INSTANTIATE_TEST_SUITE_P(Isas, MemoryTest,
                         testing::Values("baseline", "avx2", "avx512", "vnni", "amx"),
                         [](const auto &isa) { return std::string(isa.param); });

TEST(Alloc, Safetensors)
{
    json_set_alloc_funcs(__wrap_malloc, __wrap_free);
    cg_safetensor tensor = {};
    strcpy(tensor.name, "K");
    strcpy(tensor.dtype, "F32");
    tensor.rank = 1;
    tensor.shape[0] = 2;
    tensor.data_bytes = 8;
    const cg_safetensors_text text = {"a name", "a text"};
    Bytes file;
    expect_survives("write", [&] {
        uint8_t *bytes;
        size_t n_bytes;
        const cg_status status = cg_safetensors_header(&tensor, 1, &text, 1, &bytes, &n_bytes);
        EXPECT_EQ(bytes != nullptr, status == CG_OK);
        if (status == CG_OK)
            file.assign(bytes, bytes + n_bytes);
        free(bytes);
        return status;
    });
    file.resize(file.size() + 8);
    for (long n = 0;; n++) { // jansson does not tell no memory from bad JSON
        const long live = n_live;
        failed = false;
        n_until_failure = n;
        cg_safetensors *tensors;
        const cg_status status = cg_safetensors_open(file.data(), file.size(), &tensors, nullptr);
        cg_safetensors_free(tensors);
        n_until_failure = -1;
        ASSERT_EQ(n_live, live) << n;
        if (!failed) {
            EXPECT_EQ(status, CG_OK);
            break;
        }
        ASSERT_LT(n, 1000);
    }
}

} // namespace
