// Spectra and projections by kernels are those of f64, but for rounding, and whatever the order of
// threads; and symbols are those of the CPU's quantizer, bit for bit.
#include "device.h"

#include "codec/kernels.h"
#include "encoder_kernels.h"

#include <gtest/gtest.h>

namespace
{

using namespace cg_test;

// A projection of rows.
cg_projection of_rows(uint32_t basis, uint32_t n_rows, uint32_t row_stride,
                      const std::vector<uint32_t> &n_components, uint32_t n_shared,
                      const std::vector<uint32_t> &n_given, float step)
{
    cg_projection what = {};
    what.basis = basis;
    what.n_rows = n_rows;
    what.row_stride = row_stride;
    what.n_shared = n_shared;
    what.step = step;
    std::copy(n_components.begin(), n_components.end(), what.n_components);
    std::copy(n_given.begin(), n_given.end(), what.n_given);
    return what;
}

std::vector<float> make_rows(const cg_projection &what, uint32_t n_channels)
{
    Random random(what.n_rows);
    std::vector<float> rows(size_t{CG_DCT} * what.n_rows * what.row_stride);
    for (size_t i = 0; i < rows.size(); i++)
        rows[i] = i % what.row_stride < n_channels ? static_cast<float>(random.normal()) : 0;
    return rows;
}

void expect_near(const std::vector<float> &is, const std::vector<float> &should, double bound)
{
    ASSERT_EQ(is.size(), should.size());
    for (size_t i = 0; i < is.size(); i++)
        ASSERT_NEAR(is[i], should[i], bound) << i;
}

// The CPU's symbols of the coefficients, what these leave, and those that are given as they are.
void expect_symbols(const Projected &made, const cg_projection &what)
{
    Quantized want;
    want.make(what, made.coefs, [](float q) {
        int16_t cell;
        cg_kernels_named("baseline")->quantize(&q, 1, 1, &cell);
        return int32_t{cell};
    });
    ASSERT_EQ(made.cells, want.cells);
    ASSERT_EQ(made.given, want.given);
    float most = 0;
    for (const float coef : made.coefs)
        most = std::max(most, std::fabs(coef));
    expect_near(made.residues, want.residues, 1e-6 * what.n_rows * most);
}

enum class Kind { APART, JOINED, JOINT };

void PrintTo(Kind kind, std::ostream *out) // the tests' names
{
    *out << (kind == Kind::APART ? "Apart" : kind == Kind::JOINED ? "Joined" : "Joint");
}

class ProjectTest : public testing::TestWithParam<Kind>
{
};

// n_exact of these profiles: none, some, all; and fewer components than that. With a joint matrix:
// its own projection, and those of groups with some, all and none of the shared ones given.
TEST_P(ProjectTest, IsThatOfF64)
{
    for (const double wide_share : {0.0, 0.4, 1.0}) {
        ProfileSpec spec;
        spec.wide_share = wide_share;
        const EncoderCase c(GetParam() == Kind::JOINT ? spec_3(spec)
                                                      : spec_2(GetParam() == Kind::JOINED, spec));
        for (uint32_t basis = 0; basis < cg_profile_n_bases(c.profile.get()); basis++) {
            const uint32_t n_shared = c.bands(basis).n_shared,
                           n_channels = c.bands(basis).n_channels, n = c.bands(basis).n_components;
            for (const uint32_t n_rows : {1u, 6u, 33u}) {
                SCOPED_TRACE(testing::Message() << wide_share << ' ' << basis << ' ' << n_rows);
                const cg_projection what = of_rows(
                    basis, n_rows, cg_projection_stride(n_channels),
                    {n, n - 1, n / 2, n / 2, 17, 3, 0, 0}, n_shared,
                    {n_shared, n_shared / 2, 0, n_shared / 3, std::min(17u, n_shared), 0, 0, 0},
                    0.1f + 0.2f * static_cast<float>(basis));
                const auto rows = make_rows(what, n_channels);
                const auto made = run_project(c.profile.get(), c.bases, what, rows, n_rows);
                expect_near(made.coefs, project_by_the_book(c.profile.get(), what, rows.data()),
                            1e-4);
                expect_symbols(made, what);
                EXPECT_TRUE(made == run_project(c.profile.get(), c.bases, what, rows, 99));
            }
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Kinds, ProjectTest,
                         testing::Values(Kind::APART, Kind::JOINED, Kind::JOINT),
                         testing::PrintToStringParamName());

// A task's elements, and what is to be made of them: all components, as they are where shared.
struct Task {
    cg_projection what = {};
    Bytes elements;
    DrawnOrder order;

    Task(const EncoderCase &c, const ProfileSpec &spec, uint32_t basis, uint8_t dtype,
         uint32_t n_tokens, uint32_t position)
        : order(c.profile.get(), n_tokens, n_tokens + basis)
    {
        const cg_bands &bands = c.bands(basis);
        cg_chunk_header header = make_header(spec, dtype, position, n_tokens);
        header.geometry.n_layers =
            static_cast<uint16_t>(c.profile->groups[basis / c.profile->n_matrices].n_layers);
        elements = make_elements(header, basis + 1);
        what.basis = basis;
        what.n_rows = cg_count_blocks(n_tokens);
        what.row_stride = cg_projection_stride(bands.n_channels);
        what.n_shared = bands.n_shared;
        for (unsigned f = 0; f < CG_DCT; f++) {
            what.n_components[f] = f == 5 ? 0 : bands.n_components;
            what.n_given[f] = f == 5 ? 0 : bands.n_shared;
        }
        what.step = 0.1f;
        what.elements = elements.data();
        what.dtype = dtype;
        what.n_tokens = n_tokens;
        what.first_position = position;
        what.order = &order.order;
    }
};

// Heads that are rotated wholly, partly, by layers, and not; sinks, blocks of them alone, tails,
// far positions; every type of numbers; rows that end with zeros, and no room behind anything.
TEST(Spectra, AreThoseOfF64)
{
    ProfileSpec spec;
    spec.nests = true;
    ProfileSpec partly = spec, many = spec, none = spec, odd = spec;
    partly.rotary_dim = 6;
    many.theta = {10000.0, 100.0};
    many.layer_rope = {1, 0, 1, 1};
    none.rotary_dim = 0;
    none.n_sinks = 8;
    odd.n_kv_heads = 3;
    odd.head_dim = odd.rotary_dim = 6;
    const std::vector<ProfileSpec> specs = {spec, partly, many, none, odd};
    for (const ProfileSpec &of : specs) {
        const ProfileSpec made_of = spec_4(of, 0);
        const EncoderCase c(made_of);
        for (const uint8_t dtype :
             {CG_DTYPE_BF16, CG_DTYPE_FP16, CG_DTYPE_FP32, CG_DTYPE_FP8_E4M3, CG_DTYPE_FP8_E5M2}) {
            if (dtype != CG_DTYPE_BF16 && &of != &specs[0])
                continue;
            for (const auto &[n_tokens, position] :
                 {std::pair{3u, 0u}, {8u, 0u}, {45u, 0u}, {24u, 80000u}}) {
                for (uint32_t basis = 0; basis < cg_profile_n_bases(c.profile.get()); basis++) {
                    SCOPED_TRACE(testing::Message()
                                 << of.rotary_dim << ' ' << of.theta.size() << ' ' << int{dtype}
                                 << ' ' << n_tokens << ' ' << basis);
                    const Task task(c, made_of, basis, dtype, n_tokens, position);
                    const auto rows = spectra_by_the_book(c.profile.get(), task.what);
                    const std::vector<float> noise(rows.size(), NAN);
                    const auto made =
                        run_project(c.profile.get(), c.bases, task.what, noise, n_tokens);
                    expect_near(made.coefs,
                                project_by_the_book(c.profile.get(), task.what, rows.data()), 2e-4);
                    EXPECT_TRUE(made ==
                                run_project(c.profile.get(), c.bases, task.what, noise, 99));
                }
            }
        }
    }
}

TEST(Spectra, AreMadeOfNothingThatDoesNotFit)
{
    ProfileSpec spec;
    spec.nests = true;
    const ProfileSpec made_of = spec_4(spec, 32);
    const EncoderCase c(made_of);
    const Task task(c, made_of, 0, CG_DTYPE_BF16, 45, 0);
    const cg_cuda_projection_most enough = most_of(c.profile.get(), task.what);
    const auto status_of = [&](const cg_projection &what, const cg_cuda_projection_most &most) {
        cg_cuda_projection out;
        return cg_cuda_projection_of(c.profile.get(), &what, c.bases.data(), &most, &out);
    };
    EXPECT_EQ(status_of(task.what, enough), CG_OK);
    cg_cuda_projection_most less = enough;
    less.elements_bytes--;
    EXPECT_EQ(status_of(task.what, less), CG_ERR_INVALID_ARGUMENT);
    less = enough;
    less.n_places--;
    EXPECT_EQ(status_of(task.what, less), CG_ERR_INVALID_ARGUMENT);
    for (const uint32_t n_tokens : {0u, 40u, 49u, CG_MAX_CHUNK_TOKENS + 1u}) { // of 6 blocks
        cg_projection bad = task.what;
        bad.n_tokens = n_tokens;
        EXPECT_EQ(status_of(bad, enough), CG_ERR_INVALID_ARGUMENT);
    }
    cg_projection bad = task.what;
    bad.dtype = 99;
    EXPECT_EQ(status_of(bad, enough), CG_ERR_INVALID_ARGUMENT);
    bad = task.what;
    bad.elements = nullptr; // rows, for which there is less room
    less = enough;
    less.given_rows--;
    EXPECT_EQ(status_of(bad, enough), CG_OK);
    EXPECT_EQ(status_of(bad, less), CG_ERR_INVALID_ARGUMENT);
    cg_projection joint = task.what;
    joint.basis = cg_profile_n_bases(c.profile.get()) - 1;
    joint.row_stride = cg_projection_stride(c.bands(joint.basis).n_channels);
    joint.n_shared = 0;
    for (unsigned f = 0; f < CG_DCT; f++) {
        joint.n_components[f] = c.bands(joint.basis).n_components;
        joint.n_given[f] = 0;
    }
    cg_cuda_projection_most all = {SIZE_MAX, SIZE_MAX, SIZE_MAX, SIZE_MAX, SIZE_MAX, SIZE_MAX};
    EXPECT_EQ(status_of(joint, all), CG_ERR_INVALID_ARGUMENT);
    joint.elements = nullptr;
    EXPECT_EQ(status_of(joint, all), CG_OK);
}

double rms_error(const Bytes &elements, const cg_profile *profile, const Bytes &chunk)
{
    Bytes decoded;
    EXPECT_EQ(decode(profile, chunk, &decoded), CG_OK);
    const auto was = to_floats(elements, CG_DTYPE_FP32), is = to_floats(decoded, CG_DTYPE_FP32);
    double sum = 0;
    for (size_t i = 0; i < was.size(); i++)
        sum += std::pow(double{is[i]} - was[i], 2);
    return std::sqrt(sum / static_cast<double>(was.size()));
}

// Rows come sorted by their blocks' scales, and divided by these.
TEST_P(ProjectTest, MakesAnEncodersSymbolsWhateverTheBlocksSteps)
{
    ProfileSpec spec = spec_2(GetParam() != Kind::APART);
    spec.nests = true;
    const EncoderCase c(spec_4(spec, GetParam() == Kind::JOINT ? 32 : 0));
    const uint32_t n_tokens = 75;
    const cg_chunk_header header = make_header(spec, CG_DTYPE_FP32, 8, n_tokens);
    const auto tokens = make_tokens(n_tokens, 1);
    const Bytes elements = make_elements(header, 1);
    for (const Bytes &scales : {Bytes(10, CG_OWN_STEP_FACTOR), draw_scales(n_tokens, 2)}) {
        KernelProjector kernels(c);
        Bytes by_kernels, by_cpu;
        ASSERT_EQ(encode_scaled(c.profile.get(), header, tokens, elements, scales, CG_L1,
                                &by_kernels, CG_L3, &kernels.base),
                  CG_OK);
        ASSERT_EQ(
            encode_scaled(c.profile.get(), header, tokens, elements, scales, CG_L1, &by_cpu, CG_L3),
            CG_OK);
        EXPECT_EQ(kernels.n_made(), cg_profile_n_bases(c.profile.get()));
        EXPECT_EQ(kernels.base.n_failed, 0u);
        EXPECT_EQ(cg_get_le(by_kernels.data() + 8, 4), uint64_t{CG_CHUNK_VERSION_STEPS});
        const double error = rms_error(elements, c.profile.get(), by_cpu);
        EXPECT_NEAR(rms_error(elements, c.profile.get(), by_kernels), error, 0.01 * error);
    }
}

TEST(Project, TakesMatricesOfMoreThan2048Channels)
{
    const EncoderCase c(ten_layer_spec());
    // The step is so small that symbols reach the ends of what 16 bits hold.
    const cg_projection what =
        of_rows(0, 6, cg_projection_stride(c.bands(0).n_channels), {100, 99, 17}, 0, {}, 1e-5f);
    const auto rows = make_rows(what, c.bands(0).n_channels);
    ASSERT_GT(c.bands(0).n_channels, 2048u);
    const auto made = run_project(c.profile.get(), c.bases, what, rows, 1);
    expect_near(made.coefs, project_by_the_book(c.profile.get(), what, rows.data()), 1e-4);
    expect_symbols(made, what);
    EXPECT_EQ(*std::max_element(made.cells.begin(), made.cells.end()), 32767);
}

TEST(Project, TakesNothingThatDoesNotFit)
{
    const EncoderCase c(spec_2(false));
    const uint32_t n = c.bands(0).n_components;
    const cg_projection good =
        of_rows(0, 4, cg_projection_stride(c.bands(0).n_channels), {n, n}, 0, {}, 1);
    const size_t n_rows = size_t{8} * 4 * good.row_stride, n_coefs = size_t{8} * n;
    cg_cuda_projection out;
    const auto status_of = [&](const cg_projection &p, size_t max_rows, size_t max_coefs) {
        const cg_cuda_projection_most most = {max_rows, max_coefs, 0, 0, SIZE_MAX, 0};
        return cg_cuda_projection_of(c.profile.get(), &p, c.bases.data(), &most, &out);
    };
    EXPECT_EQ(status_of(good, n_rows, n_coefs), CG_OK);
    EXPECT_EQ(status_of(good, n_rows - 1, n_coefs), CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(status_of(good, n_rows, n_coefs - 1), CG_ERR_INVALID_ARGUMENT);
    cg_projection bad = good;
    bad.basis = c.profile->n_groups * c.profile->n_matrices;
    EXPECT_EQ(status_of(bad, n_rows, n_coefs), CG_ERR_INVALID_ARGUMENT);
    bad = good;
    bad.row_stride += 32;
    EXPECT_EQ(status_of(bad, 2 * n_rows, n_coefs), CG_ERR_INVALID_ARGUMENT);
    bad = good;
    bad.n_components[7] = n + 1;
    EXPECT_EQ(status_of(bad, n_rows, 2 * n_coefs), CG_ERR_INVALID_ARGUMENT);
    bad = good;
    bad.n_shared = 32; // this profile shares none
    EXPECT_EQ(status_of(bad, n_rows, n_coefs), CG_ERR_INVALID_ARGUMENT);
    bad = good;
    bad.n_given[1] = 1;
    EXPECT_EQ(status_of(bad, n_rows, n_coefs), CG_ERR_INVALID_ARGUMENT);
}

TEST(Project, GivesSharedComponentsThatItMakesAndNoOthers)
{
    const EncoderCase c(spec_3());
    const uint32_t n = c.bands(0).n_components, n_shared = c.bands(0).n_shared;
    const cg_projection good = of_rows(0, 4, cg_projection_stride(c.bands(0).n_channels), {n, 5},
                                       n_shared, {n_shared, 5}, 1);
    cg_cuda_projection out;
    const auto status_of = [&](const cg_projection &p) {
        const cg_cuda_projection_most most = {SIZE_MAX, SIZE_MAX, 0, 0, SIZE_MAX, 0};
        return cg_cuda_projection_of(c.profile.get(), &p, c.bases.data(), &most, &out);
    };
    EXPECT_EQ(status_of(good), CG_OK);
    cg_projection bad = good;
    bad.n_given[0] = n_shared + 1;
    EXPECT_EQ(status_of(bad), CG_ERR_INVALID_ARGUMENT);
    bad = good;
    bad.n_given[1] = 6;
    EXPECT_EQ(status_of(bad), CG_ERR_INVALID_ARGUMENT);
    bad = good;
    bad.n_shared = 0;
    EXPECT_EQ(status_of(bad), CG_ERR_INVALID_ARGUMENT);
}

// All that a device takes memory for holds what any task of the profile needs.
TEST(Project, IsBoundedForEveryBasis)
{
    ProfileSpec spec;
    spec.nests = true;
    for (const ProfileSpec &of : {spec_2(false), spec_4(spec, 0), spec_4(spec, 32)}) {
        const EncoderCase c(of);
        const cg_profile *p = c.profile.get();
        const cg_cuda_projection_most most = cg_cuda_projection_bound(p, CG_DTYPE_BF16, 45);
        EXPECT_EQ(most.given_rows > 0, p->joint != nullptr);
        for (uint32_t basis = 0; basis < cg_profile_n_bases(p); basis++) {
            const cg_bands &bands = c.bands(basis);
            const DrawnOrder order(p, 45, 1);
            const Bytes elements(1);
            cg_projection what = of_rows(basis, 6, cg_projection_stride(bands.n_channels), {},
                                         bands.n_shared, {}, 1);
            std::fill_n(what.n_components, CG_DCT, bands.n_components);
            std::fill_n(what.n_given, CG_DCT, bands.n_shared);
            what.dtype = CG_DTYPE_BF16;
            what.n_tokens = 45;
            what.order = &order.order;
            const bool is_joint = basis == p->n_groups * p->n_matrices;
            what.elements = is_joint ? nullptr : elements.data();
            cg_cuda_projection out;
            EXPECT_EQ(cg_cuda_projection_of(p, &what, c.bases.data(), &most, &out), CG_OK);
            EXPECT_LE(cg_cuda_projection_made(&what).n_bytes, most.made_bytes);
        }
    }
}

} // namespace
