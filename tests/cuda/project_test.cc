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
