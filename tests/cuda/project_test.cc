// Projections by kernels are those of f64, but for rounding, and whatever the order of threads; and
// symbols are those of the CPU's quantizer, bit for bit.
#include "device.h"

#include "codec/kernels.h"
#include "projection_reference.h"

#include <gtest/gtest.h>

namespace
{

using namespace cg_test;

struct Case {
    Profile profile;
    Bytes bases;

    explicit Case(const ProfileSpec &spec) : profile(make_profile(spec))
    {
        bases.resize(cg_cuda_bases_bytes(profile.get()));
        cg_cuda_bases_fill(profile.get(), bases.data());
    }
    const cg_bands &bands(uint32_t basis) const
    {
        return profile->groups[basis / profile->n_matrices].bands[basis % profile->n_matrices];
    }
};

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
        const Case c(GetParam() == Kind::JOINT ? spec_3(spec)
                                               : spec_2(GetParam() == Kind::JOINED, spec));
        for (uint32_t basis = 0; basis < cg_profile_n_bases(c.profile.get()); basis++) {
            const uint32_t n_shared = c.bands(basis).n_shared,
                           n_channels = c.bands(basis).n_channels, n = c.bands(basis).n_components;
            for (const uint32_t n_rows : {1u, 6u, 33u}) {
                SCOPED_TRACE(testing::Message() << wide_share << ' ' << basis << ' ' << n_rows);
                const cg_projection what = {
                    basis,
                    n_rows,
                    cg_projection_stride(n_channels),
                    {n, n - 1, n / 2, n / 2, 17, 3, 0, 0},
                    n_shared,
                    {n_shared, n_shared / 2, 0, n_shared / 3, std::min(17u, n_shared), 0, 0, 0},
                    0.1f + 0.2f * static_cast<float>(basis)};
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

// An encoder's projector that the kernels are.
class KernelProjector
{
  public:
    cg_projector base = {};

    explicit KernelProjector(const Case &c) : case_(c)
    {
        base.rows_bytes = size_t{1} << 20;
        rows_.reset(aligned_alloc(64, base.rows_bytes));
        base.rows = static_cast<float *>(rows_.get());
        base.project = [](cg_projector *projector, const cg_projection *what, cg_projected *out) {
            return reinterpret_cast<KernelProjector *>(projector)->project(*what, out);
        };
    }
    size_t n_made() const
    {
        return n_made_;
    }

  private:
    cg_status project(const cg_projection &what, cg_projected *out)
    {
        const std::vector<float> rows(base.rows,
                                      base.rows + size_t{CG_DCT} * what.n_rows * what.row_stride);
        const Projected made = run_project(case_.profile.get(), case_.bases, what, rows, ++n_made_);
        made_.cells = made.cells;
        made_.residues = made.residues;
        made_.given = made.given;
        *out = made_.of(what);
        return CG_OK;
    }
    const Case &case_;
    std::unique_ptr<void, MallocFree> rows_;
    Quantized made_;
    size_t n_made_ = 0;
};

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
    const Case c(spec_4(spec, GetParam() == Kind::JOINT ? 32 : 0));
    const uint32_t n_tokens = 75;
    const cg_chunk_header header = make_header(spec, CG_DTYPE_FP32, 8, n_tokens);
    const auto tokens = make_tokens(n_tokens, 1);
    const Bytes elements = make_elements(header, 1);
    for (const Bytes &scales : {Bytes(10, CG_OWN_SCALE), draw_scales(n_tokens, 2)}) {
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
    const Case c(ten_layer_spec());
    // The step is so small that symbols reach the ends of what 16 bits hold.
    const cg_projection what = {
        0, 6, cg_projection_stride(c.bands(0).n_channels), {100, 99, 17}, 0, {}, 1e-5f};
    const auto rows = make_rows(what, c.bands(0).n_channels);
    ASSERT_GT(c.bands(0).n_channels, 2048u);
    const auto made = run_project(c.profile.get(), c.bases, what, rows, 1);
    expect_near(made.coefs, project_by_the_book(c.profile.get(), what, rows.data()), 1e-4);
    expect_symbols(made, what);
    EXPECT_EQ(*std::max_element(made.cells.begin(), made.cells.end()), 32767);
}

TEST(Project, TakesNothingThatDoesNotFit)
{
    const Case c(spec_2(false));
    const uint32_t n = c.bands(0).n_components;
    const cg_projection good = {0,  4, cg_projection_stride(c.bands(0).n_channels), {n, n}, 0,
                                {}, 1};
    const size_t n_rows = size_t{8} * 4 * good.row_stride, n_coefs = size_t{8} * n;
    cg_cuda_projection out;
    const auto status_of = [&](const cg_projection &p, size_t max_rows, size_t max_coefs) {
        return cg_cuda_projection_of(c.profile.get(), &p, c.bases.data(), max_rows, max_coefs,
                                     &out);
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
    const Case c(spec_3());
    const uint32_t n = c.bands(0).n_components, n_shared = c.bands(0).n_shared;
    const cg_projection good = {
        0, 4, cg_projection_stride(c.bands(0).n_channels), {n, 5}, n_shared, {n_shared, 5}, 1};
    cg_cuda_projection out;
    const auto status_of = [&](const cg_projection &p) {
        return cg_cuda_projection_of(c.profile.get(), &p, c.bases.data(), SIZE_MAX, SIZE_MAX, &out);
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
    for (const ProfileSpec &spec : {spec_2(false), spec_3()}) {
        const Case c(spec);
        size_t max_rows, max_coefs, max_made;
        cg_cuda_projection_bound(c.profile.get(), 45, &max_rows, &max_coefs, &max_made);
        for (uint32_t basis = 0; basis < cg_profile_n_bases(c.profile.get()); basis++) {
            const cg_bands &bands = c.bands(basis);
            cg_projection what = {
                basis, 6, cg_projection_stride(bands.n_channels), {}, bands.n_shared, {}, 1};
            std::fill_n(what.n_components, CG_DCT, bands.n_components);
            std::fill_n(what.n_given, CG_DCT, bands.n_shared);
            cg_cuda_projection out;
            EXPECT_EQ(cg_cuda_projection_of(c.profile.get(), &what, c.bases.data(), max_rows,
                                            max_coefs, &out),
                      CG_OK);
            EXPECT_LE(cg_cuda_projection_made(&what).n_bytes, max_made);
        }
    }
}

} // namespace
