// tests/codec/projection_reference.h - what a projector (codec/projection.h) is to give, in f64.
#ifndef CG_TESTS_CODEC_PROJECTION_REFERENCE_H
#define CG_TESTS_CODEC_PROJECTION_REFERENCE_H
#include "codec/exact_lane.h"
#include "codec/profile_data.h"
#include "codec/projection.h"
#include "profile_maker.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace cg_test
{

// One component of a basis of a profile of version 2 or 3, as an encoder projects on it.
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

// A channel's tokens in each block, as coded: [n_rows][8]; x: of all tokens.
inline std::vector<double> coded_blocks(const cg_profile *p, const cg_projection &what,
                                        const std::vector<double> &x)
{
    std::vector<double> out;
    for (uint32_t r = 0; r < what.n_rows; r++) {
        const uint32_t first = 8u * what.order->block[r];
        std::vector<double> block(8);
        std::vector<uint32_t> coded;
        double mean = 0;
        for (uint32_t t = 0; t < 8; t++)
            if (first + t < what.n_tokens && what.first_position + first + t >= p->n_sinks)
                coded.push_back(t);
        for (const uint32_t t : coded)
            mean += x[first + t] / static_cast<double>(coded.size());
        std::fill(block.begin(), block.end(), mean);
        for (const uint32_t t : coded)
            block[t] = x[first + t];
        for (const double value : block)
            out.push_back(value / double{CG_STEP_FACTORS[what.order->factor_index[r]]});
    }
    return out;
}

// The spectra of a task's elements: [CG_DCT][n_rows][row_stride].
inline std::vector<float> spectra_by_the_book(const cg_profile *p, const cg_projection &what)
{
    const cg_group &group = p->groups[what.basis / p->n_matrices];
    const uint32_t matrix = what.basis % p->n_matrices, head_dim = p->geometry.head_dim,
                   n_heads = p->geometry.n_kv_heads, channels = n_heads * head_dim,
                   half = p->rotary_dim / 2;
    const auto *bytes = static_cast<const uint8_t *>(what.elements);
    const size_t n = size_t{group.n_slices} * what.n_tokens * channels;
    const auto elements =
        to_floats(Bytes(bytes, bytes + n * cg_dtype_bytes(what.dtype)), what.dtype);
    std::vector<float> rows(size_t{CG_DCT} * what.n_rows * what.row_stride);
    for (uint32_t slice = 0; slice < group.n_slices; slice++) {
        const cg_slice of = cg_group_slice(&group, matrix, slice);
        const double *inv_freq = p->inv_freq + p->layer_rope[of.layer] * half;
        for (uint32_t ch = 0; ch < channels; ch++) {
            const uint32_t i = ch % head_dim;
            std::vector<double> x;
            for (uint32_t t = 0; t < what.n_tokens; t++) {
                const float *token = &elements[(size_t{slice} * what.n_tokens + t) * channels];
                double value = double{token[ch]};
                if (of.plane == CG_K && i < 2 * half) {
                    const double angle =
                        (static_cast<double>(what.first_position) + t) * inv_freq[i % half];
                    const double other = double{token[i < half ? ch + half : ch - half]};
                    value = value * std::cos(angle) + (i < half ? other : -other) * std::sin(angle);
                }
                x.push_back((value - double{cg_profile_row(p, p->mean, of)[ch]}) *
                            double{cg_profile_row(p, p->weight, of)[ch]});
            }
            const auto blocks = coded_blocks(p, what, x);
            for (uint32_t f = 0; f < CG_DCT; f++)
                for (uint32_t r = 0; r < what.n_rows; r++) {
                    double sum = 0;
                    for (uint32_t t = 0; t < 8; t++)
                        sum += blocks[size_t{r} * 8 + t] * std::sqrt((f > 0 ? 2 : 1) / 8.0) *
                               std::cos(M_PI * (t + 0.5) * f / 8);
                    rows[(size_t{f} * what.n_rows + r) * what.row_stride + slice * channels + ch] =
                        static_cast<float>(sum);
                }
        }
    }
    return rows;
}

// What a projector is to project: of its memory, or of a task's elements.
inline std::vector<float> rows_by_the_book(const cg_profile *p, const cg_projector &projector,
                                           const cg_projection &what)
{
    const auto *rows = static_cast<const float *>(projector.memory);
    return what.elements != nullptr
               ? spectra_by_the_book(p, what)
               : std::vector<float>(rows, rows + size_t{CG_DCT} * what.n_rows * what.row_stride);
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
    std::vector<float> residues, given;

    void make(
        const cg_projection &what, const std::vector<float> &coefs,
        int32_t (*round)(float) = [](float q) { return cg_lane_quantize(q); })
    {
        const float inv_step = 1 / what.step;
        cells.clear();
        residues.clear();
        given.clear();
        auto row = coefs.begin();
        for (uint32_t f = 0; f < CG_DCT; f++) {
            const uint32_t n = what.n_components[f], n_cells = cg_projection_n_cells(&what, f);
            std::vector<double> left(n_cells);
            for (uint32_t r = 0; r < what.n_rows; r++, row += n) {
                given.insert(given.end(), row, row + what.n_given[f]);
                for (uint32_t c = 0; c < n_cells; c++) {
                    const float coef = row[what.n_shared + c];
                    const int32_t cell = round(coef * inv_step);
                    left[c] += double{cg_lane_row_sign(r)} * (coef - double{what.step} * cell);
                    cells.push_back(static_cast<int16_t>(cell));
                }
            }
            residues.insert(residues.end(), left.begin(), left.end());
        }
    }
    cg_projected of(const cg_projection &what) const
    {
        cg_projected made = {};
        size_t cell = 0, column = 0, coef = 0;
        for (uint32_t f = 0; f < CG_DCT; f++) {
            made.cells[f] = cells.data() + cell;
            made.residues[f] = residues.data() + column;
            made.given[f] = given.data() + coef;
            cell += size_t{what.n_rows} * cg_projection_n_cells(&what, f);
            column += cg_projection_n_cells(&what, f);
            coef += size_t{what.n_rows} * what.n_given[f];
        }
        return made;
    }
};

} // namespace cg_test
#endif
