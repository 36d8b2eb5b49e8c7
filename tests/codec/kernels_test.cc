// Each instruction set's kernels against the baseline's: integers bit for bit, sums within float's
// rounding.
#include "codec/bands.h"
#include "codec/kernels.h"

#include "each_kernels.h"
#include "profile_maker.h"

#include <gtest/gtest.h>
#include <limits>
#include <memory>

namespace
{

using namespace cg_test;

class KernelsTest : public EachKernels
{
  protected:
    std::vector<float> draw(size_t n, Random *random)
    {
        std::vector<float> values(n);
        for (float &x : values)
            x = static_cast<float>(random->normal());
        return values;
    }
    static void expect_near(const std::vector<float> &got, const std::vector<float> &want,
                            double tolerance)
    {
        ASSERT_EQ(got.size(), want.size());
        for (size_t i = 0; i < want.size(); i++)
            ASSERT_NEAR(got[i], want[i], tolerance) << "element " << i;
    }
    const cg_kernels *baseline = &cg_kernels_baseline;
};

TEST_P(KernelsTest, ListsEveryNonzeroSymbolInOrder)
{
    if (kernels->inverse->list_nonzero == nullptr)
        GTEST_SKIP() << GetParam() << " has quads or tiles instead";
    for (size_t n : {0, 1, 3, 4, 5, 7, 8, 31, 32, 33, 100}) {
        for (uint32_t one_in : {1u, 2u, 10u}) {
            Random random(n + one_in);
            SCOPED_TRACE(testing::Message() << "n=" << n << " one_in=" << one_in);
            std::vector<int16_t> cells(n);
            std::vector<std::pair<uint32_t, float>> want, got;
            for (size_t i = 0; i < n; i++) {
                cells[i] = random.below(one_in) == 0 ? static_cast<int16_t>(random.below(65536))
                                                     : int16_t{0};
                if (cells[i] != 0)
                    want.emplace_back(i, cells[i]);
            }
            std::vector<cg_nonzero> list(n);
            list.resize(kernels->inverse->list_nonzero(cells.data(), n, list.data()));
            for (const cg_nonzero &x : list)
                got.emplace_back(x.component, x.value);
            EXPECT_EQ(got, want);
        }
    }
}

TEST_P(KernelsTest, AccumulatesPanels)
{
    if (kernels->inverse->accumulate == nullptr)
        GTEST_SKIP() << GetParam() << " has quads or tiles instead";
    const size_t n_components = 50;
    Random random(1);
    std::vector<uint32_t> panel(n_components * CG_PANEL_CHANNELS / 2);
    for (uint32_t &word : panel)
        word = static_cast<uint32_t>(cg_bf16_from_f32(static_cast<float>(random.normal()))) << 16 |
               cg_bf16_from_f32(static_cast<float>(random.normal()));
    for (uint32_t n_list : {0u, 1u, 2u, 50u}) {
        std::vector<cg_nonzero> list(n_list);
        for (uint32_t i = 0; i < n_list; i++)
            list[i] = {i, static_cast<float>(static_cast<int>(random.below(201)) - 100)};
        for (unsigned n_parts = 1; n_parts <= 8; n_parts++) {
            SCOPED_TRACE(testing::Message() << "n_list=" << n_list << " n_parts=" << n_parts);
            std::vector<float> got(CG_PANEL_CHANNELS, 7), want = got;
            kernels->inverse->accumulate(panel.data(), list.data(), n_list, n_parts, got.data());
            for (size_t ch = 0; ch < 32 * n_parts; ch++) { // basis.h says where a channel lies
                double sum = 0;
                for (const cg_nonzero &x : list) {
                    const uint32_t word =
                        panel[x.component * (CG_PANEL_CHANNELS / 2) + ch / 32 * 16 + ch % 16];
                    sum += x.value *
                           cg_bf16_to_f32(static_cast<uint16_t>(ch % 32 < 16 ? word : word >> 16));
                }
                want[ch] = static_cast<float>(sum);
            }
            expect_near(got, want, 2e-3);
        }
    }
}

TEST_P(KernelsTest, ListsEveryQuadWithASymbol)
{
    if (kernels->inverse->list_quads == nullptr)
        GTEST_SKIP() << GetParam() << " has lists instead";
    const int limit = kernels->inverse->quad_limit;
    for (size_t n : {0, 1, 3, 4, 5, 31, 32, 33, 63, 64, 65, 92, 95, 96}) {
        for (uint32_t one_in : {1u, 2u, 10u}) {
            for (int largest : {1, limit, limit + 1, 32768}) {
                Random random(n + one_in);
                SCOPED_TRACE(testing::Message()
                             << "n=" << n << " one_in=" << one_in << " largest=" << largest);
                std::vector<int16_t> cells(n), got(n);
                for (int16_t &cell : cells)
                    cell = static_cast<int16_t>(
                        random.below(one_in) == 0 ? random.below(2 * largest) - largest : 0);
                std::vector<cg_quad> quads((n + 3) / 4 + CG_QUAD_SLACK);
                cg_quad_row row = {};
                kernels->inverse->list_quads(cells.data(), n, quads.data(), &row);
                ASSERT_EQ(row.quads, quads.data());
                int sum = 0;
                for (uint32_t i = 0; i < row.n_quads; i++) {
                    ASSERT_TRUE(i == 0 || quads[i].index > quads[i - 1].index);
                    int any = 0;
                    for (size_t k = 0; k < 4; k++) {
                        const size_t c = 4 * quads[i].index + k;
                        any |= quads[i].symbols[k];
                        sum += quads[i].symbols[k];
                        if (c < n)
                            got[c] = quads[i].symbols[k];
                        else
                            ASSERT_EQ(quads[i].symbols[k], 0);
                    }
                    ASSERT_NE(any, 0);
                }
                EXPECT_EQ(row.sum, sum);
                bool any_large = false;
                for (int16_t &cell : cells) {
                    any_large |= cell > limit || cell < -limit;
                    cell = std::min<int16_t>(std::max<int16_t>(cell, -limit), limit);
                }
                EXPECT_EQ(got, cells);
                EXPECT_EQ(row.limit, any_large ? limit : INT32_MAX);
            }
        }
    }
}

TEST_P(KernelsTest, AccumulatesQuads)
{
    if (kernels->inverse->accumulate_quads == nullptr)
        GTEST_SKIP() << GetParam() << " has lists instead";
    const int limit = kernels->inverse->quad_limit;
    Random random(1);
    std::vector<uint8_t> slab(CG_SLAB_QUADS * CG_PANEL_CHANNELS * 4);
    for (uint8_t &byte : slab) // the largest sums are those of the largest bytes
        byte = random.below(2) == 0 ? 255 : static_cast<uint8_t>(random.below(256));
    const size_t stride = CG_PANEL_CHANNELS + 5;
    for (unsigned n_sixteens = 1; n_sixteens <= CG_PANEL_CHANNELS / 16; n_sixteens++) {
        for (bool is_first : {true, false}) {
            SCOPED_TRACE(testing::Message()
                         << "n_sixteens=" << n_sixteens << " is_first=" << is_first);
            std::vector<cg_quad_row> rows;
            std::vector<std::vector<cg_quad>> quads;
            for (uint32_t n_quads : {0, 1, 2, 3, int{CG_SLAB_QUADS}}) {
                quads.emplace_back(n_quads);
                int sum = 0;
                for (uint32_t i = 0; i < n_quads; i++) {
                    quads.back()[i].index = i * CG_SLAB_QUADS / n_quads;
                    for (int8_t &symbol : quads.back()[i].symbols) {
                        symbol = static_cast<int8_t>(random.below(4) == 0
                                                         ? int(random.below(2 * limit + 1)) - limit
                                                         : limit);
                        sum += symbol;
                    }
                }
                rows.push_back({quads.back().data(), n_quads, sum, INT32_MAX});
            }
            std::vector<float> got(rows.size() * stride, 7), want = got;
            kernels->inverse->accumulate_quads(slab.data(), rows.data(), rows.size(), n_sixteens,
                                               0.25f, is_first, got.data(), stride);
            for (size_t r = 0; r < rows.size(); r++) {
                for (size_t ch = 0; ch < 16 * n_sixteens; ch++) {
                    int sum = 0;
                    for (const cg_quad &quad : quads[r]) {
                        for (size_t k = 0; k < 4; k++)
                            sum += quad.symbols[k] *
                                   (slab[(quad.index * CG_PANEL_CHANNELS + ch) * 4 + k] - 128);
                    }
                    want[r * stride + ch] =
                        (is_first ? 0.f : 7.f) + 0.25f * static_cast<float>(sum);
                }
            }
            EXPECT_EQ(got, want);
        }
    }
}

TEST_P(KernelsTest, AccumulatesIntegersModulo2To32)
{
    const cg_klt_integers *integers = kernels->integers;
    if (integers->accumulate_bytes == nullptr)
        GTEST_SKIP() << GetParam() << " takes one component after another, or tiles";
    const int byte_limit = kernels->inverse->quad_limit;
    const size_t n_lines = 9, stride = CG_BAND_CHANNELS + 16;
    Random random(1);
    for (bool is_wide : {false, true}) {
        for (unsigned n_sixteens = 1; n_sixteens <= CG_BAND_CHANNELS / 16; n_sixteens++) {
            for (bool is_first : {true, false}) {
                SCOPED_TRACE(testing::Message() << is_wide << " " << n_sixteens << " " << is_first);
                const size_t n_channels = 16 * n_sixteens, a_line = is_wide ? 2 : 4;
                // [line][channel][component of the line], as they are multiplied
                std::vector<int> elements(n_lines * n_channels * a_line);
                std::vector<uint8_t> lines(n_lines * n_channels * 4); // no byte behind: ASan sees
                for (size_t i = 0; i < elements.size(); i++) {
                    elements[i] = is_wide ? static_cast<int>(random.below(32769)) - 16384
                                          : (random.below(2) == 0 ? 255 : random.below(256)) - 128;
                    const auto word = static_cast<int16_t>(elements[i]);
                    if (is_wide)
                        memcpy(&lines[2 * i], &word, 2);
                    else
                        lines[i] = static_cast<uint8_t>(elements[i] + 128);
                }
                std::vector<std::vector<uint32_t>> used = {
                    {}, {8}, {0, 1}, {1, 4, 7}, {0, 1, 2, 3, 4, 5, 6, 7, 8}};
                // Neighbours that have all quads: some kernels take several at once. Then one that
                // has as many, but others.
                used.insert(used.end(), 5, {0, 1, 2});
                used.insert(used.end(), {{0, 1, 2}, {0, 1, 3}, {0, 1, 2}, {0, 1, 2}});
                std::vector<std::vector<cg_quad>> quads;
                std::vector<cg_quad_row> rows;
                std::vector<std::vector<int>> symbols; // [row][line * a_line + component]
                for (const auto &indices : used) {
                    quads.emplace_back();
                    symbols.emplace_back(n_lines * a_line);
                    int sum = 0;
                    for (const uint32_t index : indices) {
                        cg_quad quad = {index, {}};
                        uint32_t four = 0;
                        for (size_t k = 0; k < a_line; k++) {
                            const int limit = is_wide ? 32767 : byte_limit;
                            const int symbol = random.below(4) == 0 ? -limit : limit;
                            symbols.back()[index * a_line + k] = symbol;
                            sum += symbol;
                            four |= is_wide ? (static_cast<uint32_t>(symbol) & 0xffff) << 16 * k
                                            : (static_cast<uint32_t>(symbol) & 0xff) << 8 * k;
                        }
                        memcpy(quad.symbols, &four, sizeof four);
                        quads.back().push_back(quad);
                    }
                    rows.push_back({nullptr, static_cast<uint32_t>(indices.size()),
                                    is_wide ? 0 : sum, INT32_MAX});
                }
                for (size_t r = 0; r < rows.size(); r++)
                    rows[r].quads = quads[r].data();
                std::vector<int32_t> got(rows.size() * stride, 7), want = got;
                (is_wide ? integers->accumulate_words
                         : integers->accumulate_bytes)(lines.data(), rows.data(), rows.size(),
                                                       n_sixteens, 5, is_first, got.data(), stride);
                for (size_t r = 0; r < rows.size(); r++) {
                    for (size_t ch = 0; ch < n_channels; ch++) {
                        uint32_t sum = 0;
                        for (size_t c = 0; c < n_lines * a_line; c++)
                            sum +=
                                static_cast<uint32_t>(symbols[r][c]) *
                                static_cast<uint32_t>(
                                    elements[(c / a_line * n_channels + ch) * a_line + c % a_line]);
                        want[r * stride + ch] =
                            static_cast<int32_t>((is_first ? 0 : 7) + (sum << 5));
                    }
                }
                EXPECT_EQ(got, want);
            }
        }
    }
}

TEST_P(KernelsTest, MultipliesTilesModulo2To32)
{
    const cg_klt_integers *integers = kernels->integers;
    if (integers->multiply_tiles == nullptr)
        GTEST_SKIP() << GetParam() << " has no matrix units";
    const size_t stride = CG_BAND_CHANNELS + 16;
    const std::vector<int> extremes = {-32768, -32767, -129, -128, 127, 128, 32639, 32640, 32767};
    Random random(1);
    for (const bool is_wide : {false, true}) {
        for (const size_t n_cells : {0, 1, 32, 33, 64, 65, 192}) {
            for (const size_t n_rows : {1, 16, 17, 32}) {
                const unsigned n_sixteens = 1 + static_cast<unsigned>(random.below(4));
                const int most = is_wide ? 1 << 14 : 127; // of elements
                SCOPED_TRACE(testing::Message()
                             << is_wide << " " << n_cells << " " << n_rows << " " << n_sixteens);
                const size_t n_channels = 16 * n_sixteens, n_quads = (n_cells + 3) / 4,
                             digits_a_quad = is_wide ? 2 : 1;
                std::vector<int16_t> cells(n_rows * n_cells), elements(4 * n_quads * n_channels);
                for (int16_t &cell : cells) // most have one digit
                    cell = static_cast<int16_t>(random.below(9) == 0
                                                    ? extremes[random.below(extremes.size())]
                                                    : static_cast<int>(random.below(255)) - 127);
                // [quad][digit][channel][component of the quad], and garbage behind the slab
                std::vector<uint8_t> lines(
                    (n_quads * digits_a_quad + CG_LINES_SLACK) * n_channels * 4, 0x5a);
                for (size_t i = 0; i < elements.size(); i++) {
                    const int e = random.below(4) == 0
                                      ? (random.below(2) == 0 ? most : -most - 1)
                                      : static_cast<int>(random.below(2 * most)) - most;
                    elements[i] = static_cast<int16_t>(std::max(e, is_wide ? -most : e));
                    const size_t quad = i / (4 * n_channels), in_quad = i % (4 * n_channels);
                    uint8_t *at = &lines[quad * digits_a_quad * 4 * n_channels + in_quad];
                    at[0] = static_cast<uint8_t>(elements[i]);
                    if (is_wide)
                        at[4 * n_channels] = static_cast<uint8_t>((elements[i] + 128) >> 8);
                }
                std::vector<int8_t> tiles(CG_SYMBOL_DIGITS * 3 * CG_TILE * CG_DIGIT_COMPONENTS);
                cg_digit_tiles digits[CG_SYMBOL_DIGITS];
                const int8_t *end = integers->tile_digits(cells.data(), n_cells, n_rows, n_cells,
                                                          tiles.data(), digits);
                ASSERT_LE(end - tiles.data(),
                          static_cast<long>(CG_SYMBOL_DIGITS * ((n_cells + 63) / 64) * CG_TILE *
                                            CG_DIGIT_COMPONENTS));
                std::vector<int32_t> got(n_rows * stride, 7), want = got;
                for (unsigned d = 0; d < CG_SYMBOL_DIGITS; d++)
                    integers->multiply_tiles(lines.data(), is_wide, &digits[d], n_rows, n_sixteens,
                                             5 + 8 * d, d == 0, got.data(), stride);
                for (size_t r = 0; r < n_rows; r++) {
                    for (size_t ch = 0; ch < n_channels; ch++) {
                        uint32_t sum = 0;
                        for (size_t c = 0; c < n_cells; c++)
                            sum += static_cast<uint32_t>(
                                cells[r * n_cells + c] *
                                elements[(c / 4 * n_channels + ch) * 4 + c % 4]);
                        want[r * stride + ch] = static_cast<int32_t>(sum << 5);
                    }
                }
                EXPECT_EQ(got, want);
            }
        }
    }
}

TEST_P(KernelsTest, TransformsBackAndForth)
{
    for (unsigned n : {1u, 15u, 16u, 17u, 63u, 64u, 255u, 256u}) {
        SCOPED_TRACE(testing::Message() << "n_channels=" << n);
        Random random(n);
        const size_t stride = n + 3;
        const auto x = draw(8 * stride, &random), scale = draw(n, &random), mean = draw(n, &random);
        std::vector<float> want(8 * CG_PANEL_CHANNELS), got = want, a(8 * stride), b = a;
        baseline->forward_dct(x.data(), stride, n, want.data(), CG_PANEL_CHANNELS);
        kernels->forward_dct(x.data(), stride, n, got.data(), CG_PANEL_CHANNELS);
        expect_near(got, want, 1e-5);
        baseline->inverse_dct(want.data(), CG_PANEL_CHANNELS, scale.data(), mean.data(), n,
                              a.data(), stride);
        kernels->inverse_dct(want.data(), CG_PANEL_CHANNELS, scale.data(), mean.data(), n, b.data(),
                             stride);
        expect_near(b, a, 1e-5);
        for (unsigned t = 0; t < 8; t++) {
            for (unsigned ch = 0; ch < n; ch++)
                ASSERT_NEAR(b[t * stride + ch], x[t * stride + ch] * scale[ch] + mean[ch], 2e-5);
        }
    }
}

TEST_P(KernelsTest, RotatesPairsNeoxWise)
{
    for (unsigned half : {1u, 7u, 16u, 32u, 33u, 64u}) {
        Random random(half);
        const auto head = draw(2 * half + 5, &random);
        std::vector<float> cosine(half), sine(half), got = head;
        for (unsigned i = 0; i < half; i++) {
            cosine[i] = static_cast<float>(std::cos(0.1 * i));
            sine[i] = static_cast<float>(std::sin(0.1 * i));
        }
        kernels->rotate(got.data(), cosine.data(), sine.data(), half);
        auto want = head; // what lies past rotary_dim stays
        for (unsigned i = 0; i < half; i++) {
            want[i] = head[i] * cosine[i] - head[i + half] * sine[i];
            want[i + half] = head[i + half] * cosine[i] + head[i] * sine[i];
        }
        expect_near(got, want, 1e-6);
    }
}

TEST_P(KernelsTest, RoundsToBf16BitForBit)
{
    std::vector<float> values;
    for (uint32_t high = 0; high < 0x10000; high += 7) {
        for (const uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
            values.push_back(cg_f32_from_bits(high << 16 | low));
    }
    std::vector<uint16_t> want(values.size()), got(values.size());
    for (size_t i = 0; i < values.size(); i++)
        want[i] = cg_bf16_from_f32(values[i]);
    kernels->to_bf16(values.data(), values.size(), got.data());
    EXPECT_EQ(got, want);
}

TEST_P(KernelsTest, ProjectsOnTheBasis)
{
    for (size_t n_components : {1, 15, 16, 17, 50}) {
        for (size_t n_rows : {1, 2, 7, 16, 17, 32, 33, 40}) {
            SCOPED_TRACE(testing::Message()
                         << "n_components=" << n_components << " n_rows=" << n_rows);
            const size_t n_channels = 37, n_pairs = 32, stride = 2 * n_pairs,
                         n_sixteens = (n_components + 15) / 16;
            Random random(n_components + n_rows);
            auto rows = draw(n_rows * stride, &random);
            for (size_t i = 0; i < rows.size(); i++)
                rows[i] = i % stride < n_channels ? rows[i] : 0;
            std::vector<uint32_t> analysis(n_sixteens * n_pairs * 16);
            std::vector<float> basis(n_components * n_channels);
            for (size_t i = 0; i < basis.size(); i++) {
                const size_t c = i / n_channels, ch = i % n_channels;
                const uint16_t bits = cg_bf16_from_f32(static_cast<float>(random.normal()));
                basis[i] = cg_bf16_to_f32(bits);
                analysis[(c / 16 * n_pairs + ch / 2) * 16 + c % 16] |= static_cast<uint32_t>(bits)
                                                                       << (ch % 2 * 16);
            }
            const size_t coef_stride = 16 * n_sixteens + 16;
            const std::unique_ptr<void, MallocFree> split(aligned_alloc(64, 64 * stride * 2));
            std::vector<float> got((n_rows + 31) / 32 * 32 * coef_stride, 7);
            kernels->forward->project(rows.data(), stride, n_rows, analysis.data(), n_pairs,
                                      n_sixteens, static_cast<uint16_t *>(split.get()), got.data(),
                                      coef_stride);
            for (size_t r = 0; r < n_rows; r++) {
                for (size_t c = 0; c < 16 * n_sixteens; c++) {
                    double sum = 0;
                    for (size_t ch = 0; ch < n_channels && c < n_components; ch++)
                        sum += rows[r * stride + ch] * basis[c * n_channels + ch];
                    ASSERT_NEAR(got[r * coef_stride + c], sum, 5e-4) << r << " " << c;
                }
                ASSERT_EQ(got[r * coef_stride + 16 * n_sixteens], 7) << "a column behind the last";
            }
        }
    }
}

TEST_P(KernelsTest, ProjectsOnNarrowNumbers)
{
    const cg_klt_forward *forward = kernels->forward;
    if (forward->project_narrow == nullptr && !forward->takes_digits)
        GTEST_SKIP() << GetParam() << " projects in floats only";
    enum { ALIKE, MIXED, BYTES }; // alike: no sums are larger for numbers of that norm
    for (size_t n_sixteens : {1, 2, 3}) {
        for (size_t n_rows : {1, 7, 8, 9, 33, 70}) {
            for (const int kind : {ALIKE, MIXED, BYTES}) {
                SCOPED_TRACE(testing::Message() << n_sixteens << " " << n_rows << " " << kind);
                const size_t n_channels = 1000, n_pairs = 528, stride = 2 * n_pairs;
                Random random(n_sixteens + n_rows);
                std::vector<float> rows(n_rows * stride), scale(16 * n_sixteens);
                std::vector<int> numbers(16 * n_sixteens * n_channels);
                std::vector<uint32_t> analysis(n_sixteens * n_pairs * 16);
                std::vector<uint8_t> digits(analysis.size() * 4 + 1024), n_digits(n_sixteens, 1);
                double norm = 0;
                for (size_t c = 0; c < scale.size(); c++) {
                    double square = 0;
                    scale[c] = static_cast<float>(random.uniform(0.001, 0.1));
                    for (size_t ch = 0; ch < n_channels; ch++) {
                        const int range = 1 << (kind == BYTES ? 8 : c % 12);
                        const int x = kind == ALIKE
                                          ? 4096
                                          : static_cast<int>(random.below(range)) - range / 2;
                        square += x * x;
                        numbers[c * n_channels + ch] = x;
                        analysis[(c / 16 * n_pairs + ch / 2) * 16 + c % 16] |=
                            static_cast<uint32_t>(x & 0xffff) << (ch % 2 * 16);
                        const size_t low = c / 16 * n_pairs * 64 + (ch / 4 * 16 + c % 16) * 4;
                        digits[low + ch % 4] = static_cast<uint8_t>(x);
                        digits[low + ch % 4 + n_pairs * 32] = static_cast<uint8_t>((x + 128) >> 8);
                        if ((x + 128) >> 8 != 0)
                            n_digits[c / 16] = 2;
                    }
                    norm = std::max(norm, std::sqrt(square));
                }
                for (size_t i = 0; i < rows.size(); i++)
                    rows[i] = i % stride < n_channels
                                  ? static_cast<float>(kind == ALIKE ? -100 : random.normal())
                                  : 0;
                const size_t coef_stride = 16 * n_sixteens + 16;
                const std::unique_ptr<void, MallocFree> split(aligned_alloc(64, 64 * stride * 2));
                std::vector<float> got((n_rows + 31) / 32 * 32 * coef_stride, 7);
                if (forward->takes_digits) {
                    std::fill(digits.end() - 1024, digits.end(), 0x5a); // garbage behind the last
                    forward->project_integers(
                        rows.data(), stride, n_rows,
                        reinterpret_cast<const uint32_t *>(digits.data()), n_digits.data(),
                        scale.data(), static_cast<float>(norm), n_pairs, n_sixteens,
                        static_cast<uint16_t *>(split.get()), got.data(), coef_stride);
                } else {
                    forward->project_narrow(rows.data(), stride, n_rows, analysis.data(),
                                            scale.data(), static_cast<float>(norm), n_pairs,
                                            n_sixteens, static_cast<uint16_t *>(split.get()),
                                            got.data(), coef_stride);
                }
                for (size_t r = 0; r < n_rows; r++) {
                    double square = 0, largest = 0;
                    for (size_t ch = 0; ch < n_channels; ch++) {
                        square += std::pow(rows[r * stride + ch], 2);
                        largest = std::max<double>(largest, std::fabs(rows[r * stride + ch]));
                    }
                    const double unit = std::max(largest / 32767, std::sqrt(square) * norm / 2.1e9);
                    for (size_t c = 0; c < 16 * n_sixteens; c++) {
                        double sum = 0, size = 0;
                        for (size_t ch = 0; ch < n_channels; ch++) {
                            sum += rows[r * stride + ch] * numbers[c * n_channels + ch];
                            size += std::abs(numbers[c * n_channels + ch]);
                        }
                        ASSERT_NEAR(got[r * coef_stride + c], scale[c] * sum,
                                    scale[c] * (0.5001 * unit * size + 1e-6 * std::fabs(sum)))
                            << r << " " << c;
                    }
                    ASSERT_EQ(got[r * coef_stride + 16 * n_sixteens], 7)
                        << "a column behind the last";
                }
            }
        }
    }
}

TEST_P(KernelsTest, QuantizesLikeTheBaselineAndKeepsToInt16)
{
    Random random(3);
    auto coef = draw(100, &random);
    for (float &x : coef)
        x *= 10;
    for (const float x : {0.5f, -0.5f, 1.5f, -1.5f, 0.49999997f, 32767.f, 32768.f, -32768.f, 3e38f,
                          -3e38f, 0.f, -0.f})
        coef.push_back(x);
    coef.push_back(std::numeric_limits<float>::infinity());
    coef.push_back(-std::numeric_limits<float>::infinity());
    coef.push_back(std::numeric_limits<float>::quiet_NaN());
    std::vector<int16_t> want(coef.size(), 77), got = want;
    baseline->quantize(coef.data(), coef.size(), 1, want.data());
    kernels->quantize(coef.data(), coef.size(), 1, got.data());
    EXPECT_EQ(got, want);
    EXPECT_EQ(got[100], 1); // ties away from zero
    EXPECT_EQ(got[101], -1);
    EXPECT_EQ(got[102], 2);
    EXPECT_EQ(got[106], 32767);
    EXPECT_EQ(got[107], -32767);
    for (size_t i = 0; i < 100; i++)
        ASSERT_EQ(got[i], std::lround(coef[i])) << coef[i];
}

TEST_P(KernelsTest, CoarsensEachCellToTheNearestThird)
{
    std::vector<int16_t> cells(65536), coarse(cells.size());
    for (size_t i = 0; i < cells.size(); i++)
        cells[i] = static_cast<int16_t>(static_cast<int>(i) - 32768);
    kernels->coarsen(cells.data(), cells.size(), coarse.data());
    for (size_t i = 0; i < cells.size(); i++)
        ASSERT_EQ(coarse[i], std::lround(cells[i] / 3.0)) << cells[i];
}

TEST_P(KernelsTest, AddsRowsAndTheirSquares)
{
    for (size_t n : {0, 1, 15, 16, 17, 100}) {
        SCOPED_TRACE(n);
        Random random(n);
        const auto row = draw(n, &random), other = draw(n, &random);
        std::vector<float> sums(n + 1), squares(CG_SQUARES + 1);
        kernels->add_row(row.data(), n, 1, sums.data(), squares.data());
        kernels->add_row(other.data(), n, -1, sums.data(), squares.data());
        double want = 0, got = 0;
        for (size_t i = 0; i < n; i++) {
            ASSERT_NEAR(sums[i], row[i] - other[i], 1e-6) << i;
            want += row[i] * row[i] + other[i] * other[i];
        }
        for (const float x : squares)
            got += x;
        EXPECT_NEAR(got, want, 1e-5 * want);
        EXPECT_EQ(sums[n], 0);
        EXPECT_EQ(squares[CG_SQUARES], 0);
        std::vector<int16_t> cells(n);
        std::vector<float> cell_sums(n), cell_squares(CG_SQUARES);
        want = 0;
        got = 0;
        for (size_t i = 0; i < n; i++)
            cells[i] = static_cast<int16_t>(1000 * row[i]);
        kernels->add_cells(cells.data(), n, -1, cell_sums.data(), cell_squares.data());
        for (size_t i = 0; i < n; i++) {
            ASSERT_EQ(cell_sums[i], -cells[i]) << i;
            want += double{cells[i] * 1.0} * cells[i];
        }
        for (const float x : cell_squares)
            got += x;
        EXPECT_NEAR(got, want, 1e-5 * want);
    }
}

TEST_P(KernelsTest, AddsHeadsThatAreRotatedBack)
{
    for (const unsigned head_dim : {2u, 16u, 64u, 90u}) {
        for (const unsigned half : {0u, 1u, head_dim / 4, head_dim / 2}) {
            SCOPED_TRACE(testing::Message() << head_dim << ' ' << half);
            const unsigned n = 3 * head_dim;
            Random random(n + half);
            const auto values = draw(n, &random), before = draw(n + 1, &random);
            std::vector<float> cosine(half), sine(half), sums = before;
            for (unsigned i = 0; i < half; i++) {
                cosine[i] = static_cast<float>(std::cos(0.1 * i));
                sine[i] = static_cast<float>(std::sin(0.1 * i));
            }
            kernels->add_heads(values.data(), 3, head_dim, cosine.data(), sine.data(), half, -0.5f,
                               sums.data());
            for (unsigned ch = 0; ch < n; ch++) {
                const unsigned i = ch % head_dim;
                double want = double{values[ch]};
                if (i < half)
                    want = want * std::cos(0.1 * i) + values[ch + half] * std::sin(0.1 * i);
                else if (i < 2 * half)
                    want = want * std::cos(0.1 * (i - half)) -
                           values[ch - half] * std::sin(0.1 * (i - half));
                ASSERT_NEAR(sums[ch], before[ch] - 0.5 * want, 1e-5) << ch;
            }
            EXPECT_EQ(sums[n], before[n]);
        }
    }
}

TEST_P(KernelsTest, QuantizesChannelsWithinHalfAStepAndKeepsToInt16)
{
    for (size_t n : {1, 7, 8, 15, 16, 17, 192}) {
        SCOPED_TRACE(n);
        Random random(n);
        const auto base = draw(n, &random), x = draw(n, &random);
        std::vector<float> step(n), inv_step(n), back(n);
        for (size_t i = 0; i < n; i++) {
            step[i] = static_cast<float>(random.uniform(0.01, 1));
            inv_step[i] = 1 / step[i];
        }
        std::vector<int16_t> cells(n + 1, 77);
        kernels->quantize_channels(x.data(), base.data(), inv_step.data(), n, cells.data());
        EXPECT_EQ(cells[n], 77);
        kernels->dequantize_channels(cells.data(), step.data(), base.data(), n, back.data());
        for (size_t i = 0; i < n; i++)
            ASSERT_NEAR(back[i], x[i], 0.5001 * step[i]) << i;
        std::vector<float> zero(n), huge(n, 3e38f), ones(n, 1), below(n, -3e38f), nan(n, NAN);
        kernels->quantize_channels(huge.data(), zero.data(), ones.data(), n, cells.data());
        EXPECT_EQ(cells[n - 1], 32767);
        kernels->quantize_channels(below.data(), huge.data(), ones.data(), n,
                                   cells.data()); // the difference overflows
        EXPECT_EQ(cells[n - 1], -32767);
        kernels->quantize_channels(nan.data(), zero.data(), ones.data(), n, cells.data());
        EXPECT_EQ(cells[n - 1], 32767);
    }
}

// What the bits of a number of e exponent bits and m of mantissa mean; OCP's e4m3 has NaN alone,
// and the largest exponent is a number's.
double number_of(uint32_t bits, int e, int m, bool has_infinities)
{
    const int bias = (1 << (e - 1)) - 1;
    const uint32_t mantissa = bits & ((1u << m) - 1), exponent = bits >> m & ((1u << e) - 1);
    const double sign = bits >> (e + m) != 0 ? -1 : 1;
    if (exponent == (1u << e) - 1 && (has_infinities || mantissa == (1u << m) - 1))
        return has_infinities && mantissa == 0 ? sign * HUGE_VAL : std::nan("");
    if (exponent == 0)
        return sign * std::ldexp(mantissa, 1 - bias - m);
    return sign * std::ldexp(mantissa + (1u << m), static_cast<int>(exponent) - bias - m);
}

TEST_P(KernelsTest, LoadsEveryNumberOfADtype)
{
    const struct {
        unsigned dtype;
        int e, m;
    } cases[] = {{CG_DTYPE_BF16, 8, 7},
                 {CG_DTYPE_FP16, 5, 10},
                 {CG_DTYPE_FP8_E4M3, 4, 3},
                 {CG_DTYPE_FP8_E5M2, 5, 2}};
    for (const auto &c : cases) {
        const size_t n_bytes = cg_dtype_bytes(c.dtype), n = size_t{1} << (8 * n_bytes);
        Bytes all;
        for (size_t bits = 0; bits < n; bits++)
            put(&all, bits, n_bytes);
        std::vector<float> got(n);
        EXPECT_FALSE(kernels->load(c.dtype, all.data(), n, got.data()));
        for (uint32_t bits = 0; bits < n; bits++) {
            const double want = number_of(bits, c.e, c.m, c.dtype != CG_DTYPE_FP8_E4M3);
            float one;
            ASSERT_EQ(kernels->load(c.dtype, all.data() + bits * n_bytes, 1, &one),
                      std::isfinite(want))
                << bits;
            ASSERT_TRUE(std::isnan(want) ? std::isnan(one) && std::isnan(got[bits])
                                         : one == want && got[bits] == want &&
                                               std::signbit(one) == std::signbit(want) &&
                                               std::signbit(got[bits]) == std::signbit(want))
                << cg_dtype_name(c.dtype) << " " << bits << ": " << one << ", " << got[bits]
                << " for " << want;
        }
    }
    const std::vector<float> some = {1.5f, -0.0f, std::numeric_limits<float>::denorm_min()};
    std::vector<float> got(3);
    EXPECT_TRUE(kernels->load(CG_DTYPE_FP32, some.data(), 3, got.data()));
    EXPECT_EQ(got, some);
    got[1] = -std::numeric_limits<float>::infinity();
    EXPECT_FALSE(kernels->load(CG_DTYPE_FP32, std::vector<float>(got).data(), 3, got.data()));
}

INSTANTIATE_TEST_SUITE_P(Isas, KernelsTest,
                         testing::Values("baseline", "avx2", "avx512", "vnni", "amx"),
                         [](const auto &isa) { return std::string(isa.param); });

TEST(Kernels, TheBestIsOneOfTheNamed)
{
    EXPECT_EQ(cg_kernels_best(), cg_kernels_named(cg_kernels_best()->name));
    EXPECT_EQ(cg_kernels_named("none"), nullptr);
}

TEST(Kernels, SynthesizesTilesOnMatrixUnits)
{
    const cg_kernels *kernels = cg_kernels_named("amx");
    if (kernels == nullptr)
        GTEST_SKIP() << "this CPU or kernel has no AMX: its inverse KLT is not checked";
    for (size_t n_blocks : {1, 15, 16, 17, 32}) {
        for (size_t n_active : {0, 1, 31, 32, 33, 70}) {
            SCOPED_TRACE(testing::Message() << "n_blocks=" << n_blocks << " n_active=" << n_active);
            const size_t n_deep = 3, y_stride = 48, tile = CG_TILE * CG_TILE;
            Random random(n_blocks * 100 + n_active);
            std::vector<int16_t> cells(n_blocks * n_active);
            for (int16_t &x : cells) // all sizes: bf16 has 8 bits
                x = static_cast<int16_t>(static_cast<int>(random.below(65536)) - 32768) >>
                    random.below(16);
            if (!cells.empty())
                cells[0] = -32768;
            std::vector<uint16_t> basis(n_deep * tile), panel(basis.size());
            for (size_t c = 0; c < 32 * n_deep; c++) {
                for (size_t ch = 0; ch < 32; ch++) {
                    basis[c * 32 + ch] = cg_bf16_from_f32(static_cast<float>(random.normal()));
                    panel[c / 32 * tile + ch / 16 * (tile / 2) + c % 32 / 2 * 32 + ch % 16 * 2 +
                          c % 2] = basis[c * 32 + ch];
                }
            }
            std::vector<uint16_t> tiles(2 * n_deep * tile), of(2 * n_deep);
            cg_tiled_symbols symbols[CG_DCT] = {};
            symbols[3] = {tiles.data(), of.data(),
                          kernels->inverse->tile_symbols(cells.data(), n_blocks, n_active,
                                                         tiles.data(), of.data())};
            ASSERT_LE(symbols[3].n_tiles, 2 * ((n_active + 31) / 32));
            std::vector<float> y(CG_DCT * 32 * y_stride, 7);
            kernels->inverse->synthesize(symbols, n_blocks, panel.data(), y.data(), 32 * y_stride,
                                         y_stride);
            for (size_t f = 0; f < CG_DCT; f++) {
                for (size_t b = 0; b < n_blocks; b++) {
                    for (size_t ch = 0; ch < 32; ch++) {
                        double sum = 0, size = 1;
                        for (size_t c = 0; f == 3 && c < n_active; c++) {
                            const double x =
                                cells[b * n_active + c] * cg_bf16_to_f32(basis[c * 32 + ch]);
                            sum += x;
                            size += std::fabs(x);
                        }
                        ASSERT_NEAR(y[(f * 32 + b) * y_stride + ch], sum, 1e-6 * size)
                            << f << " " << b << " " << ch;
                    }
                    ASSERT_EQ(y[(f * 32 + b) * y_stride + 32], 7) << "a channel behind the last";
                }
            }
        }
    }
}

} // namespace
