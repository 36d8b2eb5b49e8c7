// Profiles from version 2 on: every instruction set decodes to the bits that FORMAT.md says. The
// reference here is written from its text: it reads the profile's bytes itself, and adds up one
// product after another.
#include "codec/codec.h"

#include "codec/kernels.h"
#include "codec/klt.h"
#include "codec/paper.h"
#include "codec/section_plan.h"
#include "each_kernels.h"
#include "profile_maker.h"

#include <array>
#include <gtest/gtest.h>
#include <thread>

namespace
{

using namespace cg_test;

// ---- the reference ----

struct Reference {
    struct Matrix {
        size_t n_channels, n_components;
        unsigned unit_bits;
        std::vector<unsigned> shift;                // of each component
        std::vector<std::vector<int32_t>> elements; // [component][channel]
    };
    unsigned n_layers, heads, dim, planes, rope, half;
    std::vector<double> inv_freq;
    std::vector<uint8_t> layer_rope;
    std::vector<unsigned> group_layers;
    float step[3][2];
    std::vector<float> mean, weight, anchor_step;
    std::vector<Matrix> matrices;   // [group][matrix]
    size_t n_shared = 0;            // from here on with a joint matrix
    unsigned fraction_bits[4] = {}; // by level
    Matrix joint = {};
    size_t n_given[3][8] = {};
    Bytes bytes;
    size_t at = 80;

    uint64_t take(size_t n)
    {
        at += n;
        return cg_get_le(bytes.data() + at - n, n);
    }
    float take_f32()
    {
        return cg_f32_from_bits(static_cast<uint32_t>(take(4)));
    }
    double take_f64()
    {
        const uint64_t bits = take(8);
        double value;
        memcpy(&value, &bits, 8);
        return value;
    }
    explicit Reference(const Bytes &profile) : bytes(profile)
    {
        n_layers = static_cast<unsigned>(cg_get_le(&bytes[40], 2));
        heads = static_cast<unsigned>(cg_get_le(&bytes[42], 2));
        dim = static_cast<unsigned>(cg_get_le(&bytes[44], 2));
        planes = bytes[78] + 1u;
        rope = bytes[66];
        half = static_cast<unsigned>(cg_get_le(&bytes[68], 2)) / 2;
        const bool is_paper = bytes[65] == 2;
        const size_t channels = heads * dim, n_ropes = rope == 2 ? bytes[76] : 1,
                     n_classes = cg_get_le(&bytes[74], 2);
        for (size_t i = 0; i < n_ropes * half; i++)
            inv_freq.push_back(take_f64());
        for (size_t i = 0; i < n_layers; i++)
            layer_rope.push_back(rope == 2 ? static_cast<uint8_t>(take(1)) : 0);
        for (size_t i = 0; i < cg_get_le(&bytes[72], 2); i++)
            group_layers.push_back(static_cast<unsigned>(take(2)));
        for (auto &level : step) {
            level[0] = take_f32();
            level[1] = take_f32();
        }
        for (auto *table : {&mean, &weight, &anchor_step}) {
            for (size_t i = 0; i < n_layers * 2 * channels && (table != &anchor_step || is_paper);
                 i++)
                table->push_back(take_f32());
        }
        for (size_t i = 0; i < n_classes; i++) {
            at++;
            at += 2 * take(1);
        }
        at += bytes[77] * n_classes * 12;
        if (is_paper)
            return;
        const uint64_t version = cg_get_le(&bytes[8], 4);
        const bool has_joint = version == 3 || bytes[79] == 1;
        if (version == 4) {
            at += 7 * n_classes;
            at += take(2) * n_layers * dim * 2;
        }
        if (has_joint) {
            n_shared = take(2);
            for (int level = 1; level <= 3; level++)
                fraction_bits[level] = static_cast<unsigned>(take(1));
            EXPECT_EQ(take(1), 0u);
            joint = take_sizes(n_shared * group_layers.size());
            for (auto &level : n_given) {
                for (size_t &n : level)
                    n = take(2);
            }
        }
        for (const unsigned n : group_layers) {
            for (unsigned m = 0; m < 2 / planes; m++)
                matrices.push_back(take_sizes(n * channels * planes));
        }
        for (size_t i = 0; i < 3 * (matrices.size() + has_joint); i++) {
            size_t n = 0;
            for (int f = 0; f < 8; f++)
                n += take(2);
            at += n;
        }
        if (has_joint)
            take_elements(&joint);
        for (Matrix &m : matrices)
            take_elements(&m);
        EXPECT_EQ(at + 8, bytes.size());
    }

    Matrix take_sizes(size_t n_channels)
    {
        Matrix matrix = {};
        matrix.n_channels = n_channels;
        matrix.n_components = take(2);
        matrix.unit_bits = static_cast<unsigned>(take(1));
        EXPECT_EQ(take(1), 0u);
        return matrix;
    }

    void take_elements(Matrix *m)
    {
        unsigned shift = 0;
        for (size_t c = 0; c < m->n_components; c++) {
            shift = c % 32 == 0 ? static_cast<unsigned>(take(1)) : shift;
            const auto bits = static_cast<unsigned>(take(1));
            const auto multiple = static_cast<int>(take(2));
            std::vector<int32_t> row;
            for (size_t ch = 0; ch < m->n_channels; ch++) {
                int number = 0;
                for (unsigned b = 0; b < bits; b++) {
                    const size_t bit = ch * bits + b;
                    number |= (bytes[at + bit / 8] >> (bit % 8) & 1) << b;
                }
                row.push_back((number - (number >> (bits - 1) << bits)) * multiple);
            }
            at += (m->n_channels * bits + 7) / 8;
            m->shift.push_back(shift);
            m->elements.push_back(row);
        }
    }

    // Layer and plane of a channel of a matrix, and which of a layer's channels it is.
    struct Channel {
        size_t layer, plane, ch;
    };
    Channel channel(size_t group, size_t matrix, size_t ch) const
    {
        size_t first = 0;
        for (size_t g = 0; g < group; g++)
            first += group_layers[g];
        const size_t channels = heads * dim, slice = ch / channels;
        return {first + slice % group_layers[group], matrix + slice / group_layers[group],
                ch % channels};
    }

    static void sincos_of(double angle, float *sine, float *cosine)
    {
        const double k = std::nearbyint(angle * 0x1.45f306dc9c883p-1);
        double r = std::fma(-k, 0x1.921fb54442d18p+0, angle);
        r = std::fma(-k, 0x1.1a62633145c07p-54, r);
        const double z = r * r;
        const double S[] = {-1.66666666666666324348e-01, 8.33333333332248946124e-03,
                            -1.98412698298579493134e-04, 2.75573137070700676789e-06,
                            -2.50507602534068634195e-08, 1.58969099521155010221e-10};
        const double C[] = {4.16666666666666019037e-02, -1.38888888888741095749e-03,
                            2.48015872894767294178e-05, -2.75573143513906633035e-07,
                            2.08757232129817482790e-09, -1.13596475577881948265e-11};
        double s = S[5], c = C[5];
        for (int i = 4; i >= 0; i--) {
            s = std::fma(z, s, S[i]);
            c = std::fma(z, c, C[i]);
        }
        s = std::fma(r * z, s, r);
        c = std::fma(z * z, c, std::fma(z, -0.5, 1));
        const auto quadrant = static_cast<int64_t>(k) & 3;
        const double by_quadrant[4][2] = {{s, c}, {c, -s}, {-s, -c}, {-c, s}};
        *sine = static_cast<float>(by_quadrant[quadrant][0]);
        *cosine = static_cast<float>(by_quadrant[quadrant][1]);
    }

    // [matrix of a group, behind them the joint one][f][b * n_active + c]
    using Symbols = std::vector<std::array<std::vector<int16_t>, 8>>;

    // A product of an element, shifted, and a symbol or what stands in its place.
    static uint32_t product(const Matrix &m, size_t c, size_t ch, unsigned shift, int32_t symbol)
    {
        return (static_cast<uint32_t>(m.elements[c][ch]) << shift) * static_cast<uint32_t>(symbol);
    }

    // What the joint matrix gives at frequency f of block b: [group][component].
    std::vector<int32_t> given(const Symbols &symbols, unsigned level, size_t f, size_t b,
                               size_t n_blocks) const
    {
        std::vector<int32_t> all(joint.n_channels);
        const unsigned k = joint.unit_bits - fraction_bits[level];
        for (size_t i = 0; i < all.size(); i++) {
            if (i % n_shared >= n_given[level - 1][f])
                continue;
            const auto &row = symbols.back()[f];
            const size_t n_active = row.size() / n_blocks;
            uint32_t sum = 0;
            for (size_t c = 0; c < n_active; c++)
                sum += product(joint, c, i, joint.shift[c], row[b * n_active + c]);
            const int64_t u = static_cast<int32_t>(sum), one = int64_t{1} << k;
            int64_t rounded = (u + one / 2) / one; // towards zero
            rounded -= rounded * one > u + one / 2;
            all[i] =
                static_cast<int32_t>(std::clamp(rounded, int64_t{INT16_MIN}, int64_t{INT16_MAX}));
        }
        return all;
    }

    // factor_index: of each block. Returns [n_layers][2][n_tokens][heads][dim], not yet rounded.
    std::vector<float> decode(const Symbols &symbols, unsigned level, uint32_t first_position,
                              uint32_t n_tokens, const Bytes &factor_index) const
    {
        const size_t channels = heads * dim, n_blocks = (n_tokens + 7) / 8;
        std::vector<size_t> block_of(n_blocks); // of each row
        std::iota(block_of.begin(), block_of.end(), 0);
        std::stable_sort(block_of.begin(), block_of.end(),
                         [&](size_t a, size_t b) { return factor_index[a] < factor_index[b]; });
        std::vector<float> x(n_layers * 2 * n_tokens * channels);
        std::vector<std::vector<int32_t>> shared; // [b][f]
        for (size_t b = 0; b < n_blocks && n_shared > 0; b++) {
            for (size_t f = 0; f < 8; f++)
                shared.push_back(given(symbols, level, f, b, n_blocks));
        }
        for (size_t i = 0; i < matrices.size(); i++) {
            const Matrix &m = matrices[i];
            const float unit = std::ldexp(1.0f, -static_cast<int>(m.unit_bits) -
                                                    static_cast<int>(fraction_bits[level]));
            for (size_t ch = 0; ch < m.n_channels; ch++) {
                const Channel to = channel(i * planes / 2, planes == 2 ? 0 : i % 2, ch);
                const size_t row = (to.layer * 2 + to.plane) * channels + to.ch;
                for (size_t b = 0; b < n_blocks; b++) {
                    const size_t block = block_of[b];
                    const auto scale =
                        static_cast<float>(std::exp2((factor_index[block] - 3) / 2.0));
                    float y[8];
                    for (size_t f = 0; f < 8; f++) {
                        const size_t n_active = symbols[i][f].size() / n_blocks;
                        uint32_t sum = 0;
                        for (size_t c = 0; c < n_shared; c++)
                            sum +=
                                product(m, c, ch, m.shift[c], shared[8 * b + f][i * n_shared + c]);
                        for (size_t c = 0; c < n_active; c++)
                            sum += product(m, n_shared + c, ch,
                                           m.shift[n_shared + c] + fraction_bits[level],
                                           symbols[i][f][b * n_active + c]);
                        y[f] = static_cast<float>(static_cast<int32_t>(sum));
                    }
                    for (size_t t = 0; t < 8 && 8 * block + t < n_tokens; t++) {
                        const size_t u = t < 4 ? t : 7 - t;
                        float d[8];
                        for (int f = 0; f < 8; f++) {
                            d[f] = static_cast<float>(
                                std::sqrt((f ? 2 : 1) / 8.0) *
                                std::cos(M_PI * (static_cast<double>(u) + 0.5) * f / 8));
                            d[f] *= scale;
                            d[f] *= unit;
                        }
                        float even = d[0] * y[0], odd = d[1] * y[1];
                        for (int f = 2; f < 8; f += 2) {
                            even = std::fmaf(d[f], y[f], even);
                            odd = std::fmaf(d[f + 1], y[f + 1], odd);
                        }
                        const float z = t < 4 ? even + odd : even - odd;
                        const float q = step[level - 1][to.plane] / weight[row];
                        x[((to.layer * 2 + to.plane) * n_tokens + 8 * block + t) * channels +
                          to.ch] = std::fmaf(z, q, mean[row]);
                    }
                }
            }
        }
        for (size_t layer = 0; layer < n_layers && rope != 0; layer++) {
            for (size_t t = 0; t < n_tokens; t++) {
                for (size_t h = 0; h < heads; h++) {
                    float *head = &x[(layer * 2 * n_tokens + t) * channels + h * dim];
                    for (size_t i = 0; i < half; i++) {
                        const double angle =
                            static_cast<double>(first_position + static_cast<uint32_t>(t)) *
                            inv_freq[layer_rope[layer] * half + i];
                        float s, c;
                        sincos_of(angle, &s, &c);
                        const float a = head[i], b = head[i + half];
                        head[i] = std::fmaf(-b, s, a * c);
                        head[i + half] = std::fmaf(a, s, b * c);
                    }
                }
            }
        }
        return x;
    }
};

// ---- chunks with given symbols ----

enum class Fill { encoded, small, saturated, sparse, first, ones };
constexpr size_t N_FIRST = 32; // components that Fill::first draws

int16_t draw_symbol(Fill fill, size_t component, Random *random)
{
    switch (fill) {
    case Fill::ones: return 1;
    case Fill::first:
        return static_cast<int16_t>(component < N_FIRST ? static_cast<int>(random->below(601)) - 300
                                                        : 0);
    case Fill::small: return static_cast<int16_t>(static_cast<int>(random->below(7)) - 3);
    case Fill::saturated:
        return static_cast<int16_t>(random->below(4) == 0 ? static_cast<int>(random->below(65536))
                                    : random->below(2)    ? 32767
                                                          : -32768);
    default:
        return static_cast<int16_t>(
            random->below(50) ? 0 : static_cast<int>(random->below(4000)) - 2000);
    }
}

// Replaces the chunk's symbols by others, unless they are to stay, and says what they are.
Reference::Symbols set_symbols(const cg_profile *p, Fill fill, uint64_t seed, Bytes *bytes)
{
    cg_chunk chunk;
    EXPECT_EQ(cg_chunk_open(bytes->data(), bytes->size(), &chunk), CG_OK);
    const cg_chunk_header &h = chunk.header;
    Random random(seed);
    const BlockOrder order(p, chunk);
    const size_t n_blocks = order.of.n_blocks;
    Reference::Symbols all(cg_profile_n_bases(p)); // the joint one is the last
    std::vector<cg_section> sections(h.n_sections);
    std::vector<cg_piece> pieces(h.n_sections);
    std::vector<Bytes> kept(h.n_sections);
    cg_chunk_sections(&chunk, sections.data());
    for (uint32_t i = 0; i < h.n_sections; i++) {
        const cg_section s = sections[i];
        kept[i].assign(bytes->begin() + static_cast<long>(s.offset),
                       bytes->begin() + static_cast<long>(s.offset + s.bytes));
        if (s.kind == CG_SECTION_SYMBOLS || s.kind == CG_SECTION_JOINT) {
            const uint32_t group = s.kind == CG_SECTION_JOINT ? p->n_groups : s.group;
            const cg_level_columns &columns = p->groups[group].columns[h.level - 1][s.plane];
            const std::unique_ptr<void, MallocFree> memory(
                aligned_alloc(64, cg_symbols_bytes(&columns, n_blocks) + 64));
            const cg_symbols symbols =
                cg_symbols_lay(&columns, nullptr, order.of.runs, order.of.n_runs, memory.get());
            EXPECT_EQ(cg_symbols_decode(p, &symbols, {kept[i].data(), kept[i].size()}), CG_OK);
            auto &own = all[group * p->n_matrices + s.plane];
            for (unsigned f = 0; f < 8; f++) {
                const size_t n = n_blocks * columns.n_active[f];
                for (size_t c = 0; c < n && fill != Fill::encoded; c++)
                    symbols.cells[f][c] = draw_symbol(fill, c % columns.n_active[f], &random);
                own[f].assign(symbols.cells[f], symbols.cells[f] + n);
            }
            size_t n_bytes;
            uint8_t *coded =
                cg_symbols_code(p, &symbols, {nullptr, 0}, CG_RANS_STREAM_PERCENT, &n_bytes);
            kept[i].assign(coded, coded + n_bytes);
            free(coded);
        }
        sections[i].bytes = static_cast<uint32_t>(kept[i].size());
        pieces[i] = {kept[i].data(), kept[i].size()};
    }
    uint8_t *made;
    size_t n_made;
    EXPECT_EQ(cg_chunk_assemble(&h, sections.data(), pieces.data(), &made, &n_made), CG_OK);
    bytes->assign(made, made + n_made);
    free(made);
    return all;
}

// A chunk without sinks whose symbols are all zeros.
Bytes make_zeros(const cg_profile *p, cg_chunk_header header, const Bytes &factor_index, int level)
{
    const auto tokens = make_tokens(header.n_tokens, 1);
    const size_t n_blocks = cg_count_blocks(header.n_tokens);
    cg_block_order order;
    EXPECT_EQ(cg_block_order_init(static_cast<uint32_t>(n_blocks), &order), CG_OK);
    if (p->version == 4) {
        EXPECT_EQ(cg_block_order_sort(p, factor_index.data(), &order), CG_OK);
    }
    header.version = cg_profile_chunk_version(p);
    header.level = header.coarsest = static_cast<uint8_t>(level);
    header.profile = p->fingerprint;
    header.token_bytes = 2;
    header.key = cg_key_chunk(&header.parent, &header.extra, tokens.data(), tokens.size());
    header.n_sections = cg_section_plan_n_sections(p, &header);
    std::vector<cg_section> sections(header.n_sections);
    std::vector<cg_piece> pieces(header.n_sections);
    std::vector<Bytes> kept(header.n_sections);
    for (uint32_t i = 0; i < header.n_sections; i++) {
        const cg_section s = sections[i] = cg_section_plan_row(p, &header, i);
        for (size_t t = 0; i == 0 && t < tokens.size(); t++)
            put(&kept[0], tokens[t], 2);
        if (s.kind == CG_SECTION_STEPS)
            kept[i] = factor_index;
        if (i > 0 && s.kind != CG_SECTION_STEPS) {
            const uint32_t group = s.kind == CG_SECTION_JOINT ? p->n_groups : s.group;
            const cg_level_columns &columns = p->groups[group].columns[level - 1][s.plane];
            const std::unique_ptr<void, MallocFree> memory(
                aligned_alloc(64, cg_symbols_bytes(&columns, n_blocks) + 64));
            memset(memory.get(), 0, cg_symbols_bytes(&columns, n_blocks));
            const cg_symbols symbols =
                cg_symbols_lay(&columns, nullptr, order.runs, order.n_runs, memory.get());
            size_t n_bytes;
            const std::unique_ptr<uint8_t, MallocFree> coded(
                cg_symbols_code(p, &symbols, {nullptr, 0}, CG_RANS_STREAM_PERCENT, &n_bytes));
            kept[i].assign(coded.get(), coded.get() + n_bytes);
        }
        sections[i].bytes = static_cast<uint32_t>(kept[i].size());
        pieces[i] = {kept[i].data(), kept[i].size()};
    }
    uint8_t *made;
    size_t n_made;
    EXPECT_EQ(cg_chunk_assemble(&header, sections.data(), pieces.data(), &made, &n_made), CG_OK);
    cg_block_order_destroy(&order);
    const std::unique_ptr<uint8_t, MallocFree> owner(made);
    return Bytes(made, made + n_made);
}

// ---- kernels that count what they multiply: registers or tiles of elements ----

const cg_klt_integers *counted;
const cg_klt_inverse *counted_inverse;
uint64_t n_products;

uint64_t quads_of(const cg_quad_row *rows, size_t n_rows)
{
    return std::accumulate(rows, rows + n_rows, uint64_t{0},
                           [](uint64_t n, const cg_quad_row &row) { return n + row.n_quads; });
}

template <auto Kernel>
void count_quads(const uint8_t *lines, const cg_quad_row *rows, size_t n_rows, unsigned n_sixteens,
                 unsigned shift, bool is_first, int32_t *y, size_t y_stride)
{
    n_products += n_sixteens * quads_of(rows, n_rows);
    (counted->*Kernel)(lines, rows, n_rows, n_sixteens, shift, is_first, y, y_stride);
}

cg_klt_integers counting(const cg_klt_integers *integers)
{
    counted = integers;
    cg_klt_integers own = *integers;
    if (own.accumulate_bytes != nullptr)
        own.accumulate_bytes = count_quads<&cg_klt_integers::accumulate_bytes>;
    if (own.accumulate_words != nullptr)
        own.accumulate_words = count_quads<&cg_klt_integers::accumulate_words>;
    if (own.multiply_tiles != nullptr)
        own.multiply_tiles = [](const uint8_t *lines, bool is_wide, const cg_digit_tiles *digits,
                                size_t n_rows, unsigned n_sixteens, unsigned shift, bool is_first,
                                int32_t *y, size_t y_stride) {
            n_products += n_sixteens * digits->n_tiles << is_wide;
            counted->multiply_tiles(lines, is_wide, digits, n_rows, n_sixteens, shift, is_first, y,
                                    y_stride);
        };
    return own;
}

// What decoding a chunk of such symbols takes, by the kernels in use, which count.
uint64_t count_products(const ProfileSpec &spec, Fill fill)
{
    const Profile profile = make_profile(spec);
    const cg_chunk_header header = make_header(spec, CG_DTYPE_FP32, 8, 264);
    Bytes chunk, decoded;
    EXPECT_EQ(
        encode(profile.get(), header, make_tokens(264, 1), make_elements(header, 1), CG_L1, &chunk),
        CG_OK);
    (void)set_symbols(profile.get(), fill, 1, &chunk);
    n_products = 0;
    EXPECT_EQ(decode(profile.get(), chunk, &decoded), CG_OK);
    return n_products;
}

class ExactTest : public EachKernels
{
  protected:
    // One chunk against the reference.
    static void compare(const ProfileSpec &spec, unsigned dtype, uint32_t first_position,
                        uint32_t n_tokens, int level, Fill fill, double scale = 1)
    {
        SCOPED_TRACE(testing::Message() << cg_dtype_name(dtype) << " L" << level << " tokens "
                                        << n_tokens << " at " << first_position << " fill "
                                        << static_cast<int>(fill) << " joined " << spec.joined);
        const Bytes profile_bytes = make_profile_bytes(spec);
        const Profile profile = open_profile(profile_bytes);
        const cg_chunk_header header =
            make_header(spec, static_cast<uint8_t>(dtype), first_position, n_tokens);
        const Bytes elements = make_elements(header, 7, scale),
                    factor_index = spec.version == 4
                                       ? draw_scales(n_tokens, n_tokens)
                                       : Bytes(cg_count_blocks(n_tokens), CG_OWN_STEP_FACTOR);
        Bytes chunk, got;
        if (fill == Fill::encoded)
            ASSERT_EQ(encode_scaled(profile.get(), header, make_tokens(n_tokens, 1), elements,
                                    factor_index, static_cast<cg_level>(level), &chunk),
                      CG_OK);
        else
            chunk = make_zeros(profile.get(), header, factor_index, level);
        EXPECT_EQ(cg_get_le(chunk.data() + 8, 4), spec.version + 1);
        const auto symbols = set_symbols(profile.get(), fill, 3, &chunk);
        EXPECT_EQ(cg_chunk_verify(chunk.data(), chunk.size()), CG_OK);
        ASSERT_EQ(decode(profile.get(), chunk, &got), CG_OK);
        const auto x = Reference(profile_bytes)
                           .decode(symbols, static_cast<unsigned>(level), first_position, n_tokens,
                                   factor_index);
        Bytes want;
        for (const float value : x)
            put_element(&want, dtype, value);
        const size_t token_bytes = size_t{spec.n_kv_heads} * spec.head_dim * cg_dtype_bytes(dtype);
        for (size_t t = 0; t < n_tokens && first_position + t < spec.n_sinks; t++) {
            for (size_t i = 0; i < 2u * spec.n_layers; i++) {
                const size_t at = (i * n_tokens + t) * token_bytes;
                std::copy_n(elements.begin() + static_cast<long>(at), token_bytes,
                            want.begin() + static_cast<long>(at));
            }
        }
        ASSERT_EQ(got, want);
    }
};

TEST_P(ExactTest, DecodesToTheReferencesBits)
{
    for (const bool joined : {false, true}) {
        ProfileSpec spec = spec_2(joined);
        for (const unsigned dtype :
             {CG_DTYPE_BF16, CG_DTYPE_FP16, CG_DTYPE_FP32, CG_DTYPE_FP8_E4M3, CG_DTYPE_FP8_E5M2}) {
            for (const uint32_t n_tokens : {1u, 9u, 24u})
                compare(spec, dtype, 0, n_tokens, 1, Fill::encoded);
        }
        compare(spec, CG_DTYPE_FP32, 4294966784u, 300, 2, Fill::encoded); // more than a batch
        for (const Fill fill : {Fill::small, Fill::saturated, Fill::sparse}) {
            for (const int level : {1, 2, 3})
                compare(spec, CG_DTYPE_FP32, 800, 21, level, fill);
        }
        for (const double scale : {30.0, 3000.0})
            compare(spec, CG_DTYPE_BF16, 25600, 40, 1, Fill::encoded, scale);
        spec.all_active = false;
        for (const int level : {1, 2, 3})
            compare(spec, CG_DTYPE_BF16, 8, 17, level, Fill::encoded);
    }
}

TEST_P(ExactTest, DecodesHeadsAndRotationsOfEveryKind)
{
    const struct {
        uint16_t heads, head_dim, rotary_dim;
    } shapes[] = {
        {1, 2, 2},   {1, 2, 0},     {3, 6, 4},     {1, 64, 64},  {1, 66, 32},
        {5, 18, 18}, {1, 128, 128}, {1, 258, 258}, {1, 320, 64},
    };
    for (const auto &shape : shapes) {
        for (const bool joined : {false, true}) {
            SCOPED_TRACE(testing::Message() << shape.heads << " x " << shape.head_dim << " rotary "
                                            << shape.rotary_dim);
            ProfileSpec spec = spec_2(joined);
            spec.n_layers = 2;
            spec.n_kv_heads = shape.heads;
            spec.head_dim = shape.head_dim;
            spec.rotary_dim = shape.rotary_dim;
            spec.group_layers = {1, 1};
            spec.unit_bits = 8 + shape.head_dim % 13;
            compare(spec, CG_DTYPE_FP32, 8, 11, 1, Fill::encoded);
            compare(spec, CG_DTYPE_BF16, 8, 11, 3, Fill::sparse);
        }
    }
    ProfileSpec spec = spec_2(true);
    spec.theta = {10000.0, 500.0};
    spec.layer_rope = {0, 1, 0, 1};
    compare(spec, CG_DTYPE_FP32, 8, 11, 1, Fill::encoded);
}

TEST_P(ExactTest, KernelsGiveTheBaselinesBits)
{
    Random random(1);
    const cg_exact_kernels *exact = kernels->exact, *baseline = cg_kernels_baseline.exact;
    for (const size_t n : {1u, 3u, 15u, 16u, 17u, 64u, 200u}) {
        SCOPED_TRACE(n);
        std::vector<int32_t> y(8 * n);
        std::vector<float> scale(n), mean(n), want(8 * n), got(8 * n);
        std::vector<double> inv_freq(n);
        std::vector<int16_t> cells(n);
        for (int32_t &value : y)
            value = static_cast<int32_t>(random.below(UINT32_MAX)) >> random.below(32);
        for (size_t i = 0; i < n; i++) {
            scale[i] = static_cast<float>(std::exp2(random.uniform(-20, 20)));
            mean[i] = static_cast<float>(random.normal());
            inv_freq[i] = random.uniform(-16, 16) * std::exp2(-random.uniform(0, 30));
            cells[i] = static_cast<int16_t>(random.below(65536));
        }
        baseline->inverse_dct(y.data(), n, 0x1p-14f, scale.data(), mean.data(), n, want.data(), n);
        exact->inverse_dct(y.data(), n, 0x1p-14f, scale.data(), mean.data(), n, got.data(), n);
        EXPECT_EQ(got, want);
        baseline->dequantize_channels(cells.data(), scale.data(), mean.data(), n, want.data());
        exact->dequantize_channels(cells.data(), scale.data(), mean.data(), n, got.data());
        EXPECT_EQ(got, want);
        std::vector<float> want_c(5 * n), want_s(5 * n), got_c(5 * n), got_s(5 * n);
        for (const uint32_t position : {0u, 12345u, 4294967290u}) {
            baseline->rotation(position, 5, inv_freq.data(), n, want_c.data(), want_s.data());
            exact->rotation(position, 5, inv_freq.data(), n, got_c.data(), got_s.data());
            EXPECT_EQ(got_c, want_c);
            EXPECT_EQ(got_s, want_s);
            for (size_t i = 0; i < 5 * n; i++) {
                const double angle =
                    static_cast<double>(position + static_cast<uint32_t>(i / n)) * inv_freq[i % n];
                ASSERT_NEAR(got_c[i], std::cos(angle), 1e-7) << angle;
                ASSERT_NEAR(got_s[i], std::sin(angle), 1e-7) << angle;
            }
        }
        want.assign(mean.begin(), mean.end());
        want.insert(want.end(), scale.begin(), scale.end());
        got = want;
        baseline->rotate(want.data(), want_c.data(), want_s.data(), n);
        exact->rotate(got.data(), want_c.data(), want_s.data(), n);
        EXPECT_EQ(got, want);
    }
}

// An encoder may choose its symbols, but a lossy level's error is a matter of its step.
TEST_P(ExactTest, EncodesAsCloseAsTheStep)
{
    for (const bool joined : {false, true}) {
        const ProfileSpec spec = [&] {
            ProfileSpec s = spec_2(joined);
            s.unit_bits = 14;
            s.fine = true;
            return s;
        }();
        const Profile profile = make_profile(spec);
        const cg_chunk_header header = make_header(spec, CG_DTYPE_FP32, 256, 64);
        const Bytes elements = make_elements(header, 5);
        Bytes chunk, decoded;
        ASSERT_EQ(encode(profile.get(), header, make_tokens(64, 1), elements, CG_L1, &chunk),
                  CG_OK);
        ASSERT_EQ(decode(profile.get(), chunk, &decoded), CG_OK);
        const auto want = to_floats(elements, CG_DTYPE_FP32),
                   got = to_floats(decoded, CG_DTYPE_FP32);
        double error = 0;
        for (size_t i = 0; i < want.size(); i++)
            error += std::pow(got[i] - want[i], 2);
        EXPECT_LT(std::sqrt(error / static_cast<double>(want.size())), 0.06);
    }
}

// However large symbols are, they are at most three digits: a chunk that makes the most of that
// takes three times the products of one whose symbols are all ones.
TEST_P(ExactTest, SaturatedSymbolsTakeAtMostThreeTimesTheProducts)
{
    if (kernels->integers->accumulate_elements != nullptr)
        GTEST_SKIP() << GetParam() << " takes each symbol whole, whatever it is";
    const cg_klt_integers integers = counting(kernels->integers);
    cg_kernels table = *kernels;
    table.integers = &integers;
    cg_kernels_use(&table);
    const uint64_t ones = count_products(spec_2(true), Fill::ones),
                   saturated = count_products(spec_2(true), Fill::saturated);
    EXPECT_GT(ones, 0u);
    // Half of the elements here are of 16 bits: but for matrix units, those take symbols whole.
    EXPECT_LE(saturated, (integers.multiply_tiles != nullptr ? 3 : 2) * ones) << ones;
}

// Version 1 has no digits by specification. What quads cannot hold is listed again while there is
// room, which is about as much as they take, and then as three digits.
TEST_P(ExactTest, SaturatedSymbolsOfVersion1TakeAtMostSixTimesTheProducts)
{
    if (kernels->inverse->accumulate_quads == nullptr || kernels->inverse->synthesize != nullptr)
        GTEST_SKIP() << GetParam() << " takes symbols whole, or as two tiles";
    cg_klt_inverse inverse = *kernels->inverse;
    cg_kernels table = *kernels;
    counted_inverse = kernels->inverse;
    inverse.accumulate_quads = [](const uint8_t *slab, const cg_quad_row *rows, size_t n_rows,
                                  unsigned n_sixteens, float unit, bool is_first, float *y,
                                  size_t y_stride) {
        n_products += n_sixteens * quads_of(rows, n_rows);
        counted_inverse->accumulate_quads(slab, rows, n_rows, n_sixteens, unit, is_first, y,
                                          y_stride);
    };
    table.inverse = &inverse;
    cg_kernels_use(&table);
    for (const bool is_packed : {false, true}) {
        ProfileSpec spec;
        spec.packed = is_packed;
        spec.group_layers = {4};
        const uint64_t ones = count_products(spec, Fill::ones),
                       saturated = count_products(spec, Fill::saturated);
        EXPECT_GT(ones, 0u);
        EXPECT_GT(saturated, 2 * ones) << "nothing was large";
        EXPECT_LE(saturated, 6 * ones) << ones;
    }
}

// What components of few bits pick up of the large ones is taken out: data of the first 32
// components alone, those of many bits, leave next to nothing to the others.
TEST_P(ExactTest, EncodesNothingThatComponentsOfFewBitsPickUp)
{
    ProfileSpec older; // one third wide, the next of two bits
    older.packed = true;
    older.wide_share = 0.34;
    for (ProfileSpec spec : {spec_2(true), spec_2(false), older}) {
        SCOPED_TRACE(testing::Message() << "version " << spec.version << " joined " << spec.joined);
        spec.n_layers = 3;
        spec.group_layers = {3};
        spec.n_sinks = 0;
        const uint32_t n_tokens = 72, n_blocks = 9;
        const Profile profile = make_profile(spec);
        const cg_chunk_header header = make_header(spec, CG_DTYPE_FP32, 8, n_tokens);
        const auto tokens = make_tokens(n_tokens, 1);
        Bytes chunk, elements;
        ASSERT_EQ(encode(profile.get(), header, tokens, make_elements(header, 1), CG_L1, &chunk),
                  CG_OK);
        const auto want = set_symbols(profile.get(), Fill::first, 1, &chunk);
        ASSERT_EQ(decode(profile.get(), chunk, &elements), CG_OK);
        ASSERT_EQ(encode(profile.get(), header, tokens, elements, CG_L1, &chunk), CG_OK);
        const auto got = set_symbols(profile.get(), Fill::encoded, 1, &chunk);
        for (size_t i = 0; i < want.size(); i++) {
            for (size_t f = 0; f < 8; f++) {
                const size_t n = want[i][f].size() / n_blocks;
                for (size_t k = 0; k < want[i][f].size(); k++)
                    ASSERT_LE(std::abs(got[i][f][k] - want[i][f][k]), k % n < N_FIRST ? 8 : 1)
                        << "matrix " << i << " frequency " << f << " component " << k % n;
            }
        }
    }
}

TEST_P(ExactTest, PaperDecodesToTheReferencesBits)
{
    ProfileSpec spec = spec_2(false, paper_spec());
    const Bytes profile_bytes = make_profile_bytes(spec);
    const Profile profile = open_profile(profile_bytes);
    const Reference reference(profile_bytes);
    const uint32_t n_tokens = 23;
    const cg_chunk_header header = make_header(spec, CG_DTYPE_FP32, 3, n_tokens);
    Bytes chunk, got;
    ASSERT_EQ(encode(profile.get(), header, make_tokens(n_tokens, 1), make_elements(header, 2),
                     CG_L2, &chunk),
              CG_OK);
    EXPECT_EQ(cg_get_le(chunk.data() + 8, 4), 3u);
    ASSERT_EQ(decode(profile.get(), chunk, &got), CG_OK);
    const auto values = to_floats(got, CG_DTYPE_FP32);
    cg_chunk opened;
    ASSERT_EQ(cg_chunk_open(chunk.data(), chunk.size(), &opened), CG_OK);
    for (uint32_t i = 1; i < opened.header.n_sections; i++) {
        const cg_section s = cg_chunk_section(&opened, i);
        const cg_group &group = profile->groups[s.group];
        const size_t n_anchors = cg_paper_n_anchors(n_tokens), n = group.n_channels;
        const cg_level_columns *columns[] = {&group.anchors[s.plane], &group.columns[1][s.plane]};
        std::vector<int16_t> cells[2];
        cg_cursor in = {chunk.data() + s.offset, s.bytes};
        for (int k = 0; k < 2; k++) {
            const size_t n_rows = k == 0 ? n_anchors : n_tokens - n_anchors;
            const std::unique_ptr<void, MallocFree> memory(
                aligned_alloc(64, cg_symbols_bytes(columns[k], n_rows) + 64));
            const cg_rans_run all = {n_rows, 0};
            const cg_symbols symbols = cg_symbols_lay(columns[k], nullptr, &all, 1, memory.get());
            ASSERT_EQ(cg_symbols_take(profile.get(), &symbols, &in), CG_OK);
            cells[k].assign(symbols.cells[0], symbols.cells[0] + n_rows * n);
        }
        for (size_t ch = 0; ch < n; ch++) {
            const auto to = reference.channel(s.group, s.plane, ch);
            const size_t row = (to.layer * 2 + to.plane) * 32 + to.ch;
            float anchor = 0;
            for (size_t t = 0, delta = 0; t < n_tokens; t++) {
                const bool is_anchor = t % 10 == 0;
                if (is_anchor)
                    anchor = std::fmaf(cells[0][t / 10 * n + ch], reference.anchor_step[row],
                                       reference.mean[row]);
                const float q = reference.step[1][to.plane] / reference.weight[row];
                const float want =
                    is_anchor ? anchor : std::fmaf(cells[1][delta++ * n + ch], q, anchor);
                ASSERT_EQ(values[((to.layer * 2 + to.plane) * n_tokens + t) * 32 + to.ch], want);
            }
        }
    }
}

TEST_P(ExactTest, DecodesWhatTheJointMatrixGivesToTheReferencesBits)
{
    for (const auto &fraction_bits : {std::array{0u, 0u, 0u}, {2u, 3u, 4u}, {8u, 1u, 2u}}) {
        ProfileSpec spec = spec_3();
        spec.fraction_bits = fraction_bits;
        for (const Fill fill : {Fill::ones, Fill::small, Fill::saturated, Fill::sparse}) {
            for (const int level : {1, 2, 3})
                compare(spec, CG_DTYPE_FP32, 800, 21, level, fill);
        }
        for (const unsigned dtype : {CG_DTYPE_BF16, CG_DTYPE_FP32})
            compare(spec, dtype, 0, 24, 1, Fill::encoded); // with sinks
        spec.all_active = false;
        for (const int level : {1, 2, 3})
            compare(spec, CG_DTYPE_BF16, 8, 300, level, Fill::sparse); // more than a batch
    }
    // Shared components and others whose bands differ in nothing else.
    ProfileSpec fine = spec_3();
    fine.fine = true;
    fine.fraction_bits = {0, 0, 0};
    compare(fine, CG_DTYPE_FP32, 8, 11, 1, Fill::small);
    // Several bands of shared components, and units of channels that no group ends at.
    ProfileSpec spec = spec_3(ProfileSpec(), 64);
    spec.n_layers = 6;
    spec.n_kv_heads = 3;
    spec.head_dim = 18;
    spec.rotary_dim = 18;
    spec.group_layers = {2, 3, 1};
    spec.most_components = 150;
    for (const bool all_active : {false, true}) {
        spec.all_active = all_active;
        compare(spec, CG_DTYPE_FP32, 8, 11, 1, Fill::small);
        compare(spec, CG_DTYPE_FP32, 8, 11, 2, Fill::sparse);
    }
}

// Blocks with steps of their own, in any order, more than a batch of rows too.
TEST_P(ExactTest, DecodesBlocksOfEveryScaleToTheReferencesBits)
{
    ProfileSpec joined;
    joined.joined = true;
    for (ProfileSpec spec : {spec_4(), spec_4(joined), spec_4(joined, 32)}) {
        SCOPED_TRACE(testing::Message() << "shared " << spec.n_shared);
        for (const unsigned dtype : {CG_DTYPE_BF16, CG_DTYPE_FP32, CG_DTYPE_FP8_E4M3}) {
            for (const uint32_t n_tokens :
                 {1u, 9u, 75u}) // the last block is not always the last row
                compare(spec, dtype, 0, n_tokens, 1, Fill::encoded);
        }
        for (const Fill fill : {Fill::small, Fill::saturated, Fill::sparse}) {
            for (const int level : {1, 2, 3})
                compare(spec, CG_DTYPE_FP32, 800, 101, level, fill);
        }
        compare(spec, CG_DTYPE_BF16, 25600, 40, 1, Fill::encoded, 3000.0);
        spec.all_active = false;
        for (const int level : {1, 2, 3})
            compare(spec, CG_DTYPE_FP32, 8, 300, level, Fill::encoded);
    }
}

INSTANTIATE_TEST_SUITE_P(Isas, ExactTest,
                         testing::Values("baseline", "avx2", "avx512", "vnni", "amx"),
                         [](const auto &isa) { return std::string(isa.param); });

// ---- what is the same with every instruction set ----

TEST(Version2, NestedLevelsAndTranscodedOnesDecodeAsIfCodedAlone)
{
    for (const bool joined : {false, true}) {
        ProfileSpec spec = spec_2(joined);
        spec.nests = true;
        spec.all_active = false;
        const Profile profile = make_profile(spec);
        for (const uint32_t first_position : {0u, 256u}) {
            const cg_chunk_header header = make_header(spec, CG_DTYPE_BF16, first_position, 43);
            const auto tokens = make_tokens(43, 1);
            const Bytes elements = make_elements(header, 3);
            Bytes nested;
            ASSERT_EQ(encode(profile.get(), header, tokens, elements, CG_L1, &nested, 1, CG_L3),
                      CG_OK);
            ASSERT_EQ(cg_chunk_verify(nested.data(), nested.size()), CG_OK);
            cg_chunk_header made;
            ASSERT_EQ(cg_chunk_header_parse(nested.data(), nested.size(), &made), CG_OK);
            EXPECT_EQ(made.version, 3u);
            Bytes fine;
            for (int level = CG_L1; level <= CG_L3; level++) {
                SCOPED_TRACE(level);
                Bytes alone, a, b, c;
                ASSERT_EQ(encode(profile.get(), header, tokens, elements,
                                 static_cast<cg_level>(level), &alone),
                          CG_OK);
                if (level == CG_L1)
                    fine = alone;
                const Bytes cut(nested.begin(),
                                nested.begin() + static_cast<long>(made.level_bytes[level]));
                EXPECT_EQ(cut.size() % 16, 0u);
                ASSERT_EQ(decode(profile.get(), alone, &a), CG_OK);
                ASSERT_EQ(decode(profile.get(), cut, &b), CG_OK);
                EXPECT_EQ(a, b);
                if (level == CG_L1)
                    continue;
                for (const Bytes &from : {fine, nested}) {
                    uint8_t *bytes;
                    size_t n_bytes;
                    ASSERT_EQ(cg_transcode(profile.get(), from.data(), from.size(),
                                           static_cast<cg_level>(level), &bytes, &n_bytes),
                              CG_OK);
                    EXPECT_EQ(cg_chunk_verify(bytes, n_bytes), CG_OK);
                    ASSERT_EQ(decode(profile.get(), Bytes(bytes, bytes + n_bytes), &c), CG_OK);
                    free(bytes);
                    EXPECT_EQ(a, c);
                }
            }
        }
    }
}

TEST(Version2, TasksOfJoinedPlanesHaveBoth)
{
    const ProfileSpec spec = spec_2(true);
    const Profile profile = make_profile(spec);
    const cg_chunk_header header = make_header(spec, CG_DTYPE_BF16, 0, 20);
    Bytes chunk, all;
    ASSERT_EQ(encode(profile.get(), header, make_tokens(20, 1), make_elements(header, 3), CG_L2,
                     &chunk, /*n_threads=*/3),
              CG_OK);
    ASSERT_EQ(decode(profile.get(), chunk, &all, /*n_threads=*/3), CG_OK);
    cg_decoder *decoder;
    ASSERT_EQ(cg_decoder_new(profile.get(), chunk.data(), chunk.size(), &decoder), CG_OK);
    ASSERT_EQ(cg_decoder_n_tasks(decoder), 2u);
    EXPECT_EQ(cg_decoder_chunk(decoder)->header.n_sections, 1u + 2 * 3);
    const size_t n_scratch = cg_decoder_scratch_bytes(decoder), slice_bytes = 20 * 32 * 2;
    const std::unique_ptr<void, MallocFree> scratch(aligned_alloc(64, (n_scratch + 63) / 64 * 64));
    for (uint32_t task = 0; task < 2; task++) {
        const cg_task_shape shape = cg_decoder_task_shape(decoder, task);
        EXPECT_EQ(shape.n_planes, 2u);
        EXPECT_EQ(shape.plane, unsigned{CG_K});
        EXPECT_EQ(shape.n_layers, task == 0 ? 3u : 1u);
        Bytes out(shape.elements_bytes);
        ASSERT_EQ(out.size(), 2 * shape.n_layers * slice_bytes);
        ASSERT_EQ(cg_decoder_run(decoder, task, scratch.get(), n_scratch, out.data()), CG_OK);
        for (size_t i = 0; i < 2 * shape.n_layers; i++) {
            const size_t layer = shape.first_layer + i % shape.n_layers, plane = i / shape.n_layers;
            EXPECT_TRUE(
                std::equal(out.begin() + static_cast<long>(i * slice_bytes),
                           out.begin() + static_cast<long>((i + 1) * slice_bytes),
                           all.begin() + static_cast<long>((layer * 2 + plane) * slice_bytes)));
        }
    }
    cg_decoder_free(decoder);
}

TEST(Version2, MixedVersionsAreRefused)
{
    const ProfileSpec old_spec, new_spec = spec_2(false);
    const Profile older = make_profile(old_spec), newer = make_profile(new_spec);
    const cg_chunk_header header = make_header(old_spec, CG_DTYPE_BF16, 0, 9);
    Bytes old_chunk, new_chunk, decoded;
    ASSERT_EQ(
        encode(older.get(), header, make_tokens(9, 1), make_elements(header, 1), CG_L2, &old_chunk),
        CG_OK);
    ASSERT_EQ(
        encode(newer.get(), header, make_tokens(9, 1), make_elements(header, 1), CG_L2, &new_chunk),
        CG_OK);
    EXPECT_EQ(cg_get_le(old_chunk.data() + 8, 4), 1u);
    EXPECT_EQ(cg_get_le(new_chunk.data() + 8, 4), 3u);
    memcpy(old_chunk.data() + 72, cg_profile_fingerprint(newer.get())->bytes, 16);
    memcpy(new_chunk.data() + 72, cg_profile_fingerprint(older.get())->bytes, 16);
    seal_chunk(&old_chunk);
    seal_chunk(&new_chunk);
    EXPECT_EQ(decode(newer.get(), old_chunk, &decoded), CG_ERR_CORRUPT);
    EXPECT_EQ(decode(older.get(), new_chunk, &decoded), CG_ERR_CORRUPT);
}

// Sums of encoded symbols stay within 32 bits, and what that takes is counted.
TEST(Version2, AnEncoderKeepsItsSumsInRangeAndCountsIt)
{
    for (const double scale : {1.0, 1e30}) {
        ProfileSpec spec = spec_2(true);
        spec.n_sinks = 0;
        const Bytes profile_bytes = make_profile_bytes(spec);
        const Profile profile = open_profile(profile_bytes);
        const cg_chunk_header header = make_header(spec, CG_DTYPE_FP32, 8, 16);
        const Bytes elements = make_elements(header, 1, scale);
        const auto tokens = make_tokens(16, 1);
        cg_encoder *encoder;
        ASSERT_EQ(cg_encoder_new(profile.get(), &header, tokens.data(), 1 << CG_L1, &encoder),
                  CG_OK);
        const size_t n_scratch = cg_encoder_scratch_bytes(encoder), slice_bytes = 16 * 32 * 4;
        const std::unique_ptr<void, MallocFree> scratch(
            aligned_alloc(64, (n_scratch + 63) / 64 * 64));
        for (uint32_t task = 0; task < cg_encoder_n_tasks(encoder); task++) {
            const cg_task_shape shape = cg_encoder_task_shape(encoder, task);
            Bytes in;
            for (size_t i = 0; i < 2 * shape.n_layers; i++) {
                const size_t layer = shape.first_layer + i % shape.n_layers;
                const auto at = elements.begin() +
                                static_cast<long>((layer * 2 + i / shape.n_layers) * slice_bytes);
                in.insert(in.end(), at, at + static_cast<long>(slice_bytes));
            }
            ASSERT_EQ(cg_encoder_run(encoder, task, scratch.get(), n_scratch, in.data()), CG_OK);
        }
        EXPECT_EQ(cg_encoder_n_saturated(encoder) > 0, scale > 1);
        uint8_t *made;
        size_t n_made;
        ASSERT_EQ(cg_encoder_finish(encoder, CG_L1, &made, &n_made), CG_OK);
        cg_encoder_free(encoder);
        Bytes chunk(made, made + n_made);
        free(made);
        const auto symbols = set_symbols(profile.get(), Fill::encoded, 1, &chunk);
        const Reference reference(profile_bytes);
        for (size_t i = 0; i < symbols.size(); i++) {
            const auto &m = reference.matrices[i];
            for (size_t f = 0; f < 8; f++) {
                for (size_t b = 0; b < 2; b++) {
                    const size_t n = symbols[i][f].size() / 2;
                    for (size_t ch = 0; ch < m.n_channels; ch++) {
                        int64_t sum = 0;
                        for (size_t c = 0; c < n; c++)
                            sum += (int64_t{m.elements[c][ch]} * (1 << m.shift[c])) *
                                   symbols[i][f][b * n + c];
                        ASSERT_LT(std::abs(sum), int64_t{1} << 31);
                    }
                }
            }
        }
    }
}

TEST(Version2, OpensAsFarAsItIsCheckedAndNoFurther)
{
    for (const bool joined : {false, true}) {
        const ProfileSpec spec = spec_2(joined);
        const Bytes good = make_profile_bytes(spec);
        cg_profile *p;
        ASSERT_EQ(cg_profile_open(good.data(), good.size(), &p), CG_OK);
        EXPECT_EQ(p->n_matrices, joined ? 1u : 2u);
        cg_profile_free(p);
        const auto try_with = [&](size_t at, size_t n, uint64_t value) {
            Bytes hostile = good;
            cg_put_le(hostile.data() + at, n, value);
            seal_profile(&hostile);
            cg_fingerprint fingerprint;
            const cg_status status = cg_profile_open(hostile.data(), hostile.size(), &p);
            EXPECT_EQ(cg_profile_check(hostile.data(), hostile.size(), &fingerprint), status);
            cg_profile_free(p);
            return status;
        };
        const size_t n_bases = joined ? 2 : 4, groups_at = 80 + 8 * 8, steps_at = groups_at + 4;
        size_t sizes_at = steps_at + 24 + 2 * 4 * 2 * 32 * 4;
        for (const ClassSpec &c : mixed_classes())
            sizes_at += 2 + 2 * c.freq.size();
        size_t bands_at = sizes_at + 4 * n_bases;
        for (unsigned i = 0; i < 3; i++)
            bands_at += n_bases * 16 + 8 * 2 * (96 + 32);
        EXPECT_EQ(try_with(12, 4, 0), CG_OK);
        EXPECT_EQ(try_with(8, 4, 5), CG_ERR_UNSUPPORTED_VERSION);
        EXPECT_EQ(try_with(67, 1, 1), CG_ERR_CORRUPT);
        EXPECT_EQ(try_with(78, 1, 2), CG_ERR_CORRUPT);
        EXPECT_EQ(try_with(79, 1, 1), CG_ERR_CORRUPT);
        EXPECT_EQ(try_with(80, 8, 0x4030000000000001), CG_ERR_CORRUPT); // just above 16
        EXPECT_EQ(try_with(80, 8, 0xc030000000000000), CG_OK);          // -16
        EXPECT_EQ(try_with(80, 8, 0x7ff8000000000000), CG_ERR_CORRUPT);
        EXPECT_EQ(try_with(steps_at, 4, cg_f32_bits(0.5f)), joined ? CG_ERR_CORRUPT : CG_OK);
        EXPECT_EQ(try_with(sizes_at, 2, joined ? 193 : 97), CG_ERR_CORRUPT);
        EXPECT_EQ(try_with(sizes_at + 2, 1, 7), CG_ERR_CORRUPT);
        EXPECT_EQ(try_with(sizes_at + 2, 1, 8), CG_OK);
        EXPECT_EQ(try_with(sizes_at + 2, 1, 20), CG_OK);
        EXPECT_EQ(try_with(sizes_at + 2, 1, 21), CG_ERR_CORRUPT);
        EXPECT_EQ(try_with(sizes_at + 3, 1, 1), CG_ERR_CORRUPT);
        EXPECT_EQ(try_with(bands_at, 1, 16), CG_OK);
        EXPECT_EQ(try_with(bands_at, 1, 17), CG_ERR_CORRUPT);
        EXPECT_EQ(try_with(bands_at + 1, 1, 1), CG_ERR_CORRUPT);
        EXPECT_EQ(try_with(bands_at + 1, 1, 16), CG_ERR_CORRUPT);
        EXPECT_EQ(try_with(bands_at + 2, 2, 0), CG_ERR_CORRUPT);
        EXPECT_EQ(try_with(bands_at + 2, 2, 2), CG_ERR_CORRUPT); // of 15 bits: above 2^14
        // 1e38 is what mean and a step may come to: 2^(33 - 12) x step / weight.
        EXPECT_EQ(try_with(steps_at + 24, 4, cg_f32_bits(1.01e38f)), CG_ERR_CORRUPT);
        EXPECT_EQ(try_with(steps_at + 24, 4, cg_f32_bits(9.9e37f)), CG_OK);
        for (size_t n = 0; n < good.size(); n += n < 400 ? 1 : 97) {
            Bytes cut(good.begin(), good.begin() + static_cast<long>(n));
            EXPECT_EQ(cg_profile_open(cut.data(), cut.size(), &p), CG_ERR_TRUNCATED);
            if (n < 96)
                continue;
            seal_profile(&cut);
            EXPECT_NE(cg_profile_open(cut.data(), cut.size(), &p), CG_OK) << n;
        }
    }
    ProfileSpec paper = spec_2(false, paper_spec());
    paper.joined = true;
    const Bytes bytes = make_profile_bytes(paper);
    cg_profile *p;
    EXPECT_EQ(cg_profile_open(bytes.data(), bytes.size(), &p), CG_ERR_CORRUPT);
}

// Many bases of few channels take far more memory than their bytes: rows and channels are padded.
TEST(Version2, RefusesBasesThatWouldTakeTooMuchMemory)
{
    for (const unsigned version : {1u, 2u}) {
        for (const uint16_t n_layers : {64, 1024}) {
            ProfileSpec spec;
            spec.version = version;
            spec.n_layers = n_layers;
            spec.n_kv_heads = 1;
            spec.head_dim = spec.rotary_dim = 2;
            spec.group_layers.assign(n_layers, 1);
            const Bytes bytes = make_profile_bytes(spec);
            cg_profile *p;
            EXPECT_EQ(cg_profile_open(bytes.data(), bytes.size(), &p),
                      n_layers == 64 ? CG_OK : CG_ERR_CORRUPT);
            cg_profile_free(p);
        }
    }
}

// Bases of nothing, and of less than a band; and encoders of one profile on several threads, whose
// tables the first of them makes.
TEST(Version2, FewComponentsAndManyEncodersOnThreads)
{
    for (const uint16_t dim : {2, 4, 36}) {
        ProfileSpec spec = spec_2(dim == 4);
        spec.n_layers = 1;
        spec.n_kv_heads = 1;
        spec.head_dim = dim;
        spec.rotary_dim = 2;
        spec.group_layers = {1};
        const Profile profile = make_profile(spec);
        const cg_chunk_header header = make_header(spec, CG_DTYPE_BF16, 0, 300);
        const auto tokens = make_tokens(300, 1);
        const Bytes elements = make_elements(header, 1);
        std::vector<Bytes> chunks(4);
        std::vector<std::thread> threads;
        for (Bytes &chunk : chunks)
            threads.emplace_back(
                [&] { (void)encode(profile.get(), header, tokens, elements, CG_L1, &chunk); });
        for (std::thread &thread : threads)
            thread.join();
        Bytes decoded;
        EXPECT_EQ(decode(profile.get(), chunks[0], &decoded), CG_OK);
        for (const Bytes &chunk : chunks)
            EXPECT_EQ(chunk, chunks[0]);
    }
}

} // namespace
