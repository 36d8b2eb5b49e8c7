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
    uint32_t n_channels(uint32_t basis) const
    {
        return profile->groups[basis / profile->n_matrices].n_channels;
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

// The CPU's symbols of the coefficients, and what these leave.
void expect_symbols(const Projected &made, const cg_projection &what)
{
    std::vector<int16_t> want(made.coefs.size());
    cg_kernels_named("baseline")
        ->quantize(made.coefs.data(), want.size(), 1 / what.step, want.data());
    ASSERT_EQ(made.cells, want);
    size_t at = 0, column = 0;
    for (const uint32_t n : what.n_components) {
        for (uint32_t c = 0; c < n; c++, column++) {
            double left = 0, most = 0;
            for (uint32_t r = 0; r < what.n_rows; r++) {
                const size_t i = at + size_t{r} * n + c;
                left += double{cg_lane_row_sign(r)} *
                        (made.coefs[i] - static_cast<double>(made.cells[i]) * what.step);
                most = std::max(most, double{std::fabs(made.coefs[i])});
            }
            ASSERT_NEAR(made.residues[column], left, 1e-6 * what.n_rows * most) << column;
        }
        at += size_t{what.n_rows} * n;
    }
    ASSERT_EQ(at, made.cells.size());
}

// n_exact of these profiles: none, some, all; and fewer components than that.
TEST(Project, IsThatOfF64)
{
    for (const double wide_share : {0.0, 0.4, 1.0}) {
        for (const bool joined : {false, true}) {
            ProfileSpec spec;
            spec.wide_share = wide_share;
            const Case c(spec_2(joined, spec));
            const uint32_t n_bases = c.profile->n_groups * c.profile->n_matrices;
            for (uint32_t basis = 0; basis < n_bases; basis++) {
                const uint32_t n_channels = c.n_channels(basis), n = c.bands(basis).n_components;
                for (const uint32_t n_rows : {1u, 6u, 33u}) {
                    SCOPED_TRACE(testing::Message()
                                 << wide_share << ' ' << joined << ' ' << basis << ' ' << n_rows);
                    const cg_projection what = {basis,
                                                n_rows,
                                                cg_projection_stride(n_channels),
                                                {n, n - 1, n / 2, n / 2, 17, 3, 0, 0},
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
}

TEST(Project, TakesMatricesOfMoreThan2048Channels)
{
    const Case c(ten_layer_spec());
    // The step is so small that symbols reach the ends of what 16 bits hold.
    const cg_projection what = {0, 6, cg_projection_stride(c.n_channels(0)), {100, 99, 17}, 1e-5f};
    const auto rows = make_rows(what, c.n_channels(0));
    ASSERT_GT(c.n_channels(0), 2048u);
    const auto made = run_project(c.profile.get(), c.bases, what, rows, 1);
    expect_near(made.coefs, project_by_the_book(c.profile.get(), what, rows.data()), 1e-4);
    expect_symbols(made, what);
    EXPECT_EQ(*std::max_element(made.cells.begin(), made.cells.end()), 32767);
}

TEST(Project, TakesNothingThatDoesNotFit)
{
    const Case c(spec_2(false));
    const uint32_t n = c.bands(0).n_components;
    const cg_projection good = {0, 4, cg_projection_stride(c.n_channels(0)), {n, n}, 1};
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
}

} // namespace
