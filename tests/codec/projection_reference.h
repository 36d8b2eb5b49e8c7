// tests/codec/projection_reference.h - what a projector (codec/projection.h) is to give, in f64.
#ifndef CG_TESTS_CODEC_PROJECTION_REFERENCE_H
#define CG_TESTS_CODEC_PROJECTION_REFERENCE_H
#include "codec/exact_lane.h"
#include "codec/profile_data.h"
#include "codec/projection.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace cg_test
{

// One component of a basis of a profile of version 2, as an encoder projects on it.
inline std::vector<double> component(const cg_profile *p, uint32_t basis, uint32_t c)
{
    const cg_bands &bands = p->groups[basis / p->n_matrices].bands[basis % p->n_matrices];
    std::vector<int16_t> numbers(bands.n_channels);
    const int shift = static_cast<int>(cg_bands_row(&p->layout, &bands, c, numbers.data()));
    std::vector<double> out;
    for (const int16_t number : numbers)
        out.push_back(std::ldexp(number, shift - static_cast<int>(bands.unit_bits)));
    return out;
}

// The coefficients of all frequencies, one after another: [n_rows][n_components[f]] each.
inline std::vector<float> project_by_the_book(const cg_profile *p, const cg_projection &what,
                                              const float *rows)
{
    const cg_bands &bands = p->groups[what.basis / p->n_matrices].bands[what.basis % p->n_matrices];
    std::vector<std::vector<double>> components;
    for (uint32_t c = 0; c < what.n_components[0] || c < bands.n_components; c++)
        components.push_back(component(p, what.basis, c));
    std::vector<float> out;
    for (uint32_t f = 0; f < CG_DCT; f++) {
        for (uint32_t r = 0; r < what.n_rows; r++) {
            const float *row = rows + (size_t{f} * what.n_rows + r) * what.row_stride;
            std::vector<double> left(row, row + bands.n_channels);
            std::vector<double> sums;
            for (uint32_t c = 0; c < what.n_components[f]; c++) {
                if (c == bands.n_exact)
                    for (uint32_t k = 0; k < c; k++)
                        for (uint32_t ch = 0; ch < bands.n_channels; ch++)
                            left[ch] -= sums[k] * components[k][ch];
                double sum = 0;
                for (uint32_t ch = 0; ch < bands.n_channels; ch++)
                    sum += left[ch] * components[c][ch];
                sums.push_back(sum);
                out.push_back(static_cast<float>(sum));
            }
        }
    }
    return out;
}

// What a projector is to give for these coefficients. round: the quantizer.
struct Quantized {
    std::vector<int16_t> cells;
    std::vector<float> residues;

    void make(
        const cg_projection &what, const std::vector<float> &coefs,
        int32_t (*round)(float) = [](float q) { return cg_lane_quantize(q); })
    {
        cells.clear();
        residues.clear();
        for (const uint32_t n : what.n_components) {
            const size_t first = cells.size();
            for (uint32_t c = 0; c < n; c++) {
                double left = 0;
                for (uint32_t r = 0; r < what.n_rows; r++) {
                    const float coef = coefs[first + size_t{r} * n + c];
                    left += double{cg_lane_row_sign(r)} *
                            (coef - double{what.step} * round(coef * (1 / what.step)));
                }
                residues.push_back(static_cast<float>(left));
            }
            for (size_t i = first; i < first + size_t{what.n_rows} * n; i++)
                cells.push_back(static_cast<int16_t>(round(coefs[i] * (1 / what.step))));
        }
    }
    cg_projected of(const cg_projection &what) const
    {
        cg_projected made = {};
        size_t cell = 0, column = 0;
        for (uint32_t f = 0; f < CG_DCT; f++) {
            made.cells[f] = cells.data() + cell;
            made.residues[f] = residues.data() + column;
            cell += size_t{what.n_rows} * what.n_components[f];
            column += what.n_components[f];
        }
        return made;
    }
};

} // namespace cg_test
#endif
