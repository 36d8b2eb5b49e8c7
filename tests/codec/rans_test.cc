#include "codec/rans.h"

#include "each_kernels.h"
#include "profile_maker.h"

#include <algorithm>
#include <gtest/gtest.h>

namespace
{

using cg_test::Bytes;
using cg_test::Random;

// A matrix whose columns stand next to each other, cut into strips of given widths.
struct Matrix {
    size_t n_rows = 0, n_columns = 0;
    std::vector<int16_t> cells, coarse;
    std::vector<uint8_t> column_class;
    std::vector<cg_rans_strip> strips;
    std::vector<cg_rans_run> runs; // all rows, unless cut

    Matrix(size_t rows, const std::vector<uint32_t> &widths, size_t n_classes, Random *random)
        : n_rows(rows), runs({{rows, 0}})
    {
        for (const uint32_t w : widths)
            n_columns += w;
        cells.resize(n_rows * n_columns);
        for (size_t c = 0; c < n_columns; c++)
            column_class.push_back(
                static_cast<uint8_t>(random->below(static_cast<uint32_t>(n_classes))));
        size_t at = 0;
        for (const uint32_t w : widths) {
            strips.push_back(
                {cells.data() + at, n_columns, column_class.data() + at, w, nullptr, 0});
            at += w;
        }
    }
    Matrix(const Matrix &) = delete;

    // Makes every second strip or so one that refines coarse cells.
    void refine_some(Random *random)
    {
        coarse.resize(cells.size());
        size_t at = 0;
        for (cg_rans_strip &strip : strips) {
            if (random->below(2)) {
                strip.coarse = coarse.data() + at;
                strip.coarse_stride = n_columns;
                const double spread = random->below(4) ? 1 : 3000;
                for (size_t row = 0; row < n_rows; row++) {
                    for (uint32_t lane = 0; lane < strip.n_lanes; lane++) {
                        const size_t i = at + row * n_columns + lane;
                        coarse[i] = static_cast<int16_t>(
                            std::clamp(std::lrint(spread * random->normal()), -10922L, 10922L));
                        cells[i] = static_cast<int16_t>(3 * coarse[i] +
                                                        static_cast<int>(random->below(3)) - 1);
                    }
                }
            }
            at += strip.n_lanes;
        }
    }

    // Cuts the rows into runs of these numbers, with classes of their own; those of the last are
    // the columns'.
    void cut_rows(const std::vector<size_t> &n, size_t n_classes, Random *random)
    {
        runs.clear();
        column_class.resize(n.size() * n_columns);
        for (size_t i = n_columns; i < column_class.size(); i++)
            column_class[i] = static_cast<uint8_t>(random->below(static_cast<uint32_t>(n_classes)));
        for (size_t i = 0; i < n.size(); i++)
            runs.push_back({n[i], i + 1 < n.size() ? (i + 1) * n_columns : 0});
        const uint8_t *at = column_class.data();
        for (cg_rans_strip &strip : strips) {
            strip.lane_class = at;
            at += strip.n_lanes;
        }
    }

    cg_rans_matrix of(const std::vector<cg_rans_class> &classes, size_t n_streams) const
    {
        return {classes.data(), strips.data(), strips.size(), runs.data(), runs.size(), n_streams};
    }
};

void draw_refinement(cg_rans_class *cls, Random *random)
{
    uint16_t freq[CG_RANS_REFINE_CONTEXTS][2];
    for (auto &of_context : freq) {
        of_context[0] = static_cast<uint16_t>(1 + random->below(CG_RANS_TOTAL - 2));
        of_context[1] =
            static_cast<uint16_t>(1 + random->below(CG_RANS_TOTAL - 1u - of_context[0]));
    }
    EXPECT_EQ(cg_rans_class_init_refinement(cls, freq), CG_OK);
}

std::vector<cg_rans_class> signed_classes()
{
    std::vector<cg_rans_class> classes;
    for (const auto &spec : cg_test::mixed_classes()) {
        cg_rans_class cls;
        EXPECT_EQ(cg_rans_class_init_signed(
                      &cls, spec.shift, static_cast<unsigned>(spec.freq.size()), spec.freq.data()),
                  CG_OK);
        Random random(classes.size());
        draw_refinement(&cls, &random);
        classes.push_back(cls);
    }
    return classes;
}

Bytes encode(const std::vector<cg_rans_class> &classes, const Matrix &m, size_t n_streams,
             size_t align = CG_RANS_PACKED)
{
    const size_t bound = cg_rans_bound_bytes(m.strips.data(), m.strips.size(), m.n_rows, n_streams);
    Bytes out(bound), scratch(bound);
    const size_t n =
        cg_rans_encode(classes.data(), m.strips.data(), m.strips.size(), m.runs.data(),
                       m.runs.size(), n_streams, align, out.data(), out.size(), scratch.data());
    EXPECT_GT(n, 0u);
    EXPECT_LE(n, bound);
    out.resize(n);
    return out;
}

// From an exact copy, into the matrix's cells.
cg_status decode(const std::vector<cg_rans_class> &classes, Matrix *m, const Bytes &src,
                 size_t *used_bytes, size_t align = CG_RANS_PACKED)
{
    const std::unique_ptr<uint8_t[]> exact(new uint8_t[src.size()]);
    std::copy(src.begin(), src.end(), exact.get());
    std::fill(m->cells.begin(), m->cells.end(), int16_t{0x5555});
    return cg_rans_decode(classes.data(), m->strips.data(), m->strips.size(), m->runs.data(),
                          m->runs.size(), align, exact.get(), src.size(), used_bytes);
}

int16_t draw(Random *random)
{
    switch (random->below(16)) {
    case 0: return static_cast<int16_t>(random->below(65536)); // mostly escapes
    case 1: return static_cast<int16_t>(random->below(2) ? INT16_MAX : INT16_MIN);
    case 2: return static_cast<int16_t>(static_cast<int>(random->below(256)) - 128);
    default: return static_cast<int16_t>(std::lrint(1.5 * random->normal()));
    }
}

TEST(Rans, DecodesWhatWasEncoded)
{
    const auto classes = signed_classes();
    const std::vector<std::vector<uint32_t>> shapes = {
        {1}, {31}, {32}, {32, 1}, {32, 32, 7, 32, 5}, {3, 32, 32, 32, 32, 32, 32, 9}};
    for (size_t n_rows : {1, 2, 7, 32, 129}) {
        for (size_t shape = 0; shape < shapes.size(); shape++) {
            for (size_t n_streams = 1; n_streams <= shapes[shape].size(); n_streams++) {
                const uint64_t seed = n_rows * 100 + shape * 10 + n_streams;
                SCOPED_TRACE(testing::Message() << "n_rows=" << n_rows << " shape=" << shape
                                                << " n_streams=" << n_streams << " seed=" << seed);
                Random random(seed);
                Matrix m(n_rows, shapes[shape], classes.size(), &random);
                for (int16_t &cell : m.cells)
                    cell = draw(&random);
                m.refine_some(&random);
                const auto cells = m.cells;
                for (const size_t align : {CG_RANS_PACKED, CG_RANS_ALIGNED}) {
                    Bytes coded = encode(classes, m, n_streams, align);
                    const size_t n_coded = coded.size();
                    size_t used = 0;
                    ASSERT_EQ(decode(classes, &m, coded, &used, align), CG_OK);
                    EXPECT_EQ(used, n_coded);
                    EXPECT_EQ(used % align, 0u);
                    ASSERT_EQ(m.cells, cells);
                    coded.push_back(1); // what follows is the caller's
                    ASSERT_EQ(decode(classes, &m, coded, &used, align), CG_OK);
                    EXPECT_EQ(used, n_coded);
                }
            }
        }
    }
}

TEST(Rans, EveryValueOfEveryClassRoundTrips)
{
    const auto classes = signed_classes();
    for (size_t k = 0; k < classes.size(); k++) {
        SCOPED_TRACE(k);
        Random random(k);
        Matrix m(65536 / 32, {32}, 1, &random);
        std::fill(m.column_class.begin(), m.column_class.end(), static_cast<uint8_t>(k));
        for (size_t i = 0; i < m.cells.size(); i++)
            m.cells[i] = static_cast<int16_t>(static_cast<int>(i) - 32768);
        const auto cells = m.cells;
        size_t used;
        ASSERT_EQ(decode(classes, &m, encode(classes, m, 1), &used), CG_OK);
        ASSERT_EQ(m.cells, cells);
    }
}

TEST(Rans, ExponentsRoundTripWithEscapesAboveAndBelow)
{
    for (const unsigned shift : {0u, 3u}) {
        const unsigned top = shift == 0 ? 130 : 20, n_exponents = shift == 0 ? 256 : 32;
        const auto freq = cg_test::falling_freq(10, 0.7);
        std::vector<cg_rans_class> classes(1);
        ASSERT_EQ(cg_rans_class_init_exponents(&classes[0], shift, top, 10, freq.data()), CG_OK);
        Random random(shift);
        Matrix m(n_exponents, {32, 3}, 1, &random);
        for (size_t i = 0; i < m.cells.size(); i++)
            m.cells[i] =
                static_cast<int16_t>((i / m.n_columns) << shift | random.below(1u << shift));
        const auto cells = m.cells;
        size_t used;
        ASSERT_EQ(decode(classes, &m, encode(classes, m, 2), &used), CG_OK);
        EXPECT_EQ(m.cells, cells);
    }
}

TEST(Rans, NoStripsTakeFourBytes)
{
    const auto classes = signed_classes();
    Random random(1);
    Matrix m(5, {}, 1, &random);
    const Bytes coded = encode(classes, m, 0);
    EXPECT_EQ(coded, Bytes(4));
    size_t used;
    EXPECT_EQ(decode(classes, &m, coded, &used), CG_OK);
    EXPECT_EQ(used, 4u);
    EXPECT_EQ(decode(classes, &m, {1, 0, 0, 0, 128, 0, 0, 0}, &used), CG_ERR_CORRUPT);
}

TEST(Rans, AlignedStreamsStandAtMultiplesOf16BehindZeros)
{
    const auto classes = signed_classes();
    Random random(1);
    Matrix m(21, {32, 32, 32, 32, 9}, classes.size(), &random);
    for (int16_t &cell : m.cells)
        cell = draw(&random);
    const Bytes packed = encode(classes, m, 4), aligned = encode(classes, m, 4, CG_RANS_ALIGNED);
    std::vector<size_t> zeros;
    size_t from = 20, to = 20;
    for (size_t s = 0; s <= 4; s++) {
        for (; to % 16 != 0; to++)
            zeros.push_back(to);
        const size_t n = s < 4 ? cg_get_le(packed.data() + 4 + 4 * s, 4) : 0;
        EXPECT_EQ(s < 4 ? cg_get_le(aligned.data() + 4 + 4 * s, 4) : 0, n);
        EXPECT_TRUE(std::equal(packed.begin() + static_cast<long>(from),
                               packed.begin() + static_cast<long>(from + n),
                               aligned.begin() + static_cast<long>(to)));
        from += n;
        to += n;
    }
    EXPECT_EQ(from, packed.size());
    EXPECT_EQ(to, aligned.size());
    size_t used;
    for (const size_t at : zeros) {
        Bytes damaged = aligned;
        damaged[at] = 1;
        EXPECT_EQ(decode(classes, &m, damaged, &used, CG_RANS_ALIGNED), CG_ERR_CORRUPT) << at;
    }
    for (size_t n = 0; n < aligned.size(); n++)
        EXPECT_NE(decode(classes, &m,
                         Bytes(aligned.begin(), aligned.begin() + static_cast<long>(n)), &used,
                         CG_RANS_ALIGNED),
                  CG_OK)
            << n;
    Matrix none(3, {}, classes.size(), &random);
    const Bytes empty = encode(classes, none, 0, CG_RANS_ALIGNED);
    EXPECT_EQ(empty, Bytes(16));
    EXPECT_EQ(decode(classes, &none, empty, &used, CG_RANS_ALIGNED), CG_OK);
    EXPECT_EQ(used, 16u);
}

TEST(Rans, CodesCloseToTheEntropy)
{
    std::vector<cg_rans_class> classes(1);
    const auto freq = cg_test::falling_freq(8, 0.4);
    ASSERT_EQ(cg_rans_class_init_signed(&classes[0], 0, 8, freq.data()), CG_OK);
    Random random(3);
    Matrix m(4096, {32}, 1, &random);
    double bits = 0;
    for (int16_t &cell : m.cells) { // drawn from the table itself
        const uint32_t slot = random.below(1 << 14);
        unsigned i = 0;
        while (slot >= classes[0].cum[i + 1])
            i++;
        cell = i == 7 ? 4 : classes[0].value[i];
        bits += 14 - std::log2(freq[i]) + (i == 7 ? 5 : 0);
    }
    const Bytes coded = encode(classes, m, 1);
    EXPECT_NEAR(8.0 * static_cast<double>(coded.size() - 4 - CG_RANS_STREAM_BYTES), bits,
                0.001 * bits + 16 * 32);
    EXPECT_NEAR(static_cast<double>(cg_rans_estimate_bits(classes.data(), m.strips.data(), 1,
                                                          m.runs.data(), m.runs.size())),
                bits, 0.01 * bits);
}

// FORMAT.md: within a strip the runs in order. So a matrix of runs as long as each other is, in one
// stream, one whose strips are the runs.
TEST(Rans, CodesAStripRunByRunWithTheClassesOfEach)
{
    const auto classes = signed_classes();
    for (const size_t n_rows : {1u, 5u}) {
        for (const bool is_refined : {false, true}) {
            Random random(n_rows);
            Matrix m(3 * n_rows, {32, 7, 32}, classes.size(), &random);
            m.cut_rows({n_rows, n_rows, n_rows}, classes.size(), &random);
            for (int16_t &cell : m.cells)
                cell = draw(&random);
            if (is_refined)
                m.refine_some(&random);
            std::vector<cg_rans_strip> parts;
            for (size_t i = 0; i < 9; i++) {
                cg_rans_strip part = m.strips[i / 3];
                part.lane_class += m.runs[i % 3].classes_at;
                part.cells += i % 3 * n_rows * part.row_stride;
                if (part.coarse != nullptr)
                    part.coarse += i % 3 * n_rows * part.coarse_stride;
                parts.push_back(part);
            }
            const Bytes got = encode(classes, m, 1);
            Bytes want(got.size() + 16 * 1024), scratch(want.size());
            const cg_rans_run all = {n_rows, 0};
            want.resize(cg_rans_encode(classes.data(), parts.data(), parts.size(), &all, 1, 1,
                                       CG_RANS_PACKED, want.data(), want.size(), scratch.data()));
            EXPECT_EQ(got, want);
            // Its estimate is theirs, too: of few rows each one is looked at.
            EXPECT_EQ(cg_rans_estimate_bits(classes.data(), m.strips.data(), 3, m.runs.data(), 3),
                      cg_rans_estimate_bits(classes.data(), parts.data(), 9, &all, 1));
            const auto cells = m.cells;
            size_t used;
            ASSERT_EQ(decode(classes, &m, got, &used), CG_OK);
            EXPECT_EQ(used, got.size());
            EXPECT_EQ(m.cells, cells);
        }
    }
}

// Of many rows some are looked at: of short runs no more of them than of long ones.
TEST(Rans, EstimatesRunsOfManyRows)
{
    const auto classes = signed_classes();
    Random random(3);
    Matrix m(400, {32, 32, 32, 32, 9}, classes.size(), &random);
    for (size_t i = 0; i < m.cells.size(); i++) {
        const int most = i < 40 * m.n_columns ? 10000 : 4; // the first rows are dear
        m.cells[i] = static_cast<int16_t>(
            static_cast<int>(random.below(static_cast<uint32_t>(2 * most + 1))) - most);
    }
    std::vector<size_t> short_ones(40, 1);
    short_ones.push_back(360);
    for (const std::vector<size_t> &n :
         {std::vector<size_t>{400}, {1, 2, 3, 194, 200}, {133, 134, 133}, short_ones}) {
        m.cut_rows(n, classes.size(), &random);
        const double bits = 8.0 * static_cast<double>(encode(classes, m, 1).size());
        EXPECT_NEAR(static_cast<double>(cg_rans_estimate_bits(classes.data(), m.strips.data(), 5,
                                                              m.runs.data(), m.runs.size())),
                    bits, 0.03 * bits);
    }
}

TEST(Rans, RefusesDamagedMatrices)
{
    const auto classes = signed_classes();
    Random random(7);
    Matrix m(40, {32, 20}, classes.size(), &random);
    for (int16_t &cell : m.cells)
        cell = draw(&random);
    const Bytes good = encode(classes, m, 2);
    const size_t first_bytes = cg_get_le(good.data() + 4, 4);
    size_t used;
    for (size_t n = 0; n < good.size(); n++)
        EXPECT_EQ(decode(classes, &m, Bytes(good.begin(), good.begin() + n), &used),
                  CG_ERR_TRUNCATED)
            << n;

    const struct {
        const char *what;
        size_t offset, bytes;
        uint64_t value;
    } cases[] = {
        {"no streams", 0, 2, 0},
        {"more streams than strips", 0, 2, 3},
        {"reserved", 2, 2, 1},
        {"a stream of 0 bytes", 4, 4, 0},
        {"a stream without all its lane states", 4, 4, 126},
        {"an odd stream", 4, 4, first_bytes + 1},
        {"a stream that starts late", 4, 4, first_bytes + 2},
        {"a stream that ends early", 4, 4, first_bytes - 2},
        {"a huge stream", 4, 4, 0xffffffff},
        {"a lane state below 2^16", 12, 4, 0xffff},
        {"another lane state", 12, 4, 0x7654321},
    };
    for (const auto &c : cases) {
        Bytes damaged = good;
        cg_put_le(damaged.data() + c.offset, c.bytes, c.value);
        EXPECT_NE(decode(classes, &m, damaged, &used), CG_OK) << c.what;
    }
    // A word too many in the first stream.
    Bytes longer = good;
    longer.insert(longer.begin() + 12 + first_bytes, 2, 0);
    cg_put_le(longer.data() + 4, 4, first_bytes + 2);
    EXPECT_NE(decode(classes, &m, longer, &used), CG_OK);
}

class RansKernelsTest : public cg_test::EachKernels
{
  protected:
    void SetUp() override
    {
        EachKernels::SetUp();
        rans = kernels != nullptr ? kernels->rans : nullptr;
    }
    // From an exact copy, into the matrix's cells; the first error of a stream.
    static cg_status decode_streams(const cg_rans_kernels *kernels,
                                    const std::vector<cg_rans_class> &classes, size_t n_streams,
                                    const std::vector<Bytes> &streams, Matrix *m)
    {
        const cg_rans_matrix matrix = m->of(classes, n_streams);
        std::fill(m->cells.begin(), m->cells.end(), int16_t{0x5555});
        for (size_t s = 0; s < n_streams; s++) {
            const std::unique_ptr<uint8_t[]> exact(new uint8_t[streams[s].size()]);
            std::copy(streams[s].begin(), streams[s].end(), exact.get());
            const cg_status status =
                kernels->decode_stream(&matrix, s, exact.get(), streams[s].size());
            if (status != CG_OK)
                return status;
        }
        return CG_OK;
    }
    static std::vector<Bytes> cut(const Bytes &coded, size_t n_streams)
    {
        std::vector<Bytes> streams;
        auto at = coded.begin() + 4 + 4 * n_streams;
        for (size_t s = 0; s < n_streams; s++) {
            const size_t n = cg_get_le(coded.data() + 4 + 4 * s, 4);
            streams.emplace_back(at, at + n);
            at += n;
        }
        return streams;
    }
    // Classes of every kind that can meet in one matrix, exponents and signed symbols too:
    // n_classes of them.
    static std::vector<cg_rans_class> draw_classes(size_t n_classes, Random *random)
    {
        std::vector<cg_rans_class> classes(n_classes);
        for (cg_rans_class &cls : classes) {
            const bool is_signed = random->below(3) > 0; // then symbols come in pairs
            const unsigned n_symbols =
                               is_signed ? 2 + 2 * random->below(32) : 2 + random->below(63),
                           shift = random->below(2) ? random->below(13) : 0;
            const auto freq = cg_test::falling_freq(n_symbols, random->uniform(0.05, 1));
            const unsigned top = n_symbols - 2 + random->below(100);
            EXPECT_EQ(is_signed ? cg_rans_class_init_signed(&cls, shift, n_symbols, freq.data())
                                : cg_rans_class_init_exponents(&cls, shift % 8, top, n_symbols,
                                                               freq.data()),
                      CG_OK);
            draw_refinement(&cls, random);
        }
        return classes;
    }
    static void draw_cells(const std::vector<cg_rans_class> &classes, Matrix *m, Random *random)
    {
        const bool calm = random->below(2); // few escapes, as in real columns
        for (size_t i = 0; i < m->cells.size(); i++) {
            const cg_rans_class &cls = classes[m->column_class[i % m->n_columns]];
            const int bound = 1 << (8 + cls.shift);
            const double spread = calm ? 1 << cls.shift : 2 << cls.shift;
            const int noise = static_cast<int>(std::lrint(spread * random->normal()));
            if (cls.escape_bits == 8) // below the top; without calm, above it too
                m->cells[i] = static_cast<int16_t>(std::clamp(
                    (cls.top << cls.shift) - (calm ? std::abs(noise) : noise), 0, bound - 1));
            else
                m->cells[i] =
                    calm ? static_cast<int16_t>(std::clamp(noise, -32768, 32767)) : draw(random);
        }
        m->refine_some(random);
    }

    const cg_rans_kernels *rans = nullptr, *baseline = cg_kernels_baseline.rans;
};

TEST_P(RansKernelsTest, DecodesWhatTheScalarCodeDecodes)
{
    for (uint64_t seed = 0; seed < 300; seed++) {
        SCOPED_TRACE(testing::Message() << "seed=" << seed);
        Random random(seed);
        const auto classes = draw_classes(1 + random.below(seed % 3 ? 4 : 100), &random);
        std::vector<uint32_t> widths(1 + random.below(6));
        for (uint32_t &width : widths)
            width = random.below(2) ? 32 : 1 + random.below(32);
        Matrix m(1 + random.below(60), widths, classes.size(), &random);
        draw_cells(classes, &m, &random);
        const auto cells = m.cells;
        const size_t n_streams = 1 + random.below(static_cast<uint32_t>(widths.size()));
        const auto streams = cut(encode(classes, m, n_streams), n_streams);
        ASSERT_EQ(decode_streams(baseline, classes, n_streams, streams, &m), CG_OK);
        ASSERT_EQ(m.cells, cells);
        ASSERT_EQ(decode_streams(rans, classes, n_streams, streams, &m), CG_OK);
        ASSERT_EQ(m.cells, cells);
    }
}

TEST_P(RansKernelsTest, EncodesAndEstimatesAsTheScalarCodeDoes)
{
    for (uint64_t seed = 0; seed < 300; seed++) {
        SCOPED_TRACE(testing::Message() << "seed=" << seed);
        Random random(seed);
        const auto classes = draw_classes(1 + random.below(4), &random);
        Matrix m(1 + random.below(60), {32, 1 + random.below(32), 32}, classes.size(), &random);
        draw_cells(classes, &m, &random);
        for (const cg_rans_strip &strip : m.strips)
            EXPECT_EQ(rans->estimate_strip(classes.data(), &strip, m.n_rows),
                      baseline->estimate_strip(classes.data(), &strip, m.n_rows));
        const cg_rans_matrix matrix = m.of(classes, 2);
        Bytes want(cg_rans_bound_bytes(m.strips.data(), m.strips.size(), m.n_rows, 2)),
            got(want.size());
        for (size_t stream = 0; stream < 2; stream++) {
            uint32_t want_states[CG_RANS_LANES], got_states[CG_RANS_LANES];
            const uint8_t *end = want.data() + want.size();
            const uint8_t *at =
                baseline->encode_stream(&matrix, stream, want.data() + want.size(), want_states);
            ASSERT_EQ(end - at, got.data() + got.size() -
                                    rans->encode_stream(&matrix, stream, got.data() + got.size(),
                                                        got_states));
            ASSERT_TRUE(std::equal(at, end, got.data() + got.size() - (end - at)));
            ASSERT_TRUE(std::equal(want_states, want_states + CG_RANS_LANES, got_states));
        }
    }
}

TEST_P(RansKernelsTest, CodesRunsAsTheScalarCodeDoes)
{
    const auto classes = signed_classes();
    for (uint64_t seed = 0; seed < 100; seed++) {
        SCOPED_TRACE(testing::Message() << "seed=" << seed);
        Random random(seed);
        const std::vector<size_t> n = {1 + random.below(4), 1 + random.below(30),
                                       1 + random.below(4)};
        Matrix m(n[0] + n[1] + n[2], {32, 1 + random.below(32), 32}, classes.size(), &random);
        m.cut_rows(n, classes.size(), &random);
        for (int16_t &cell : m.cells)
            cell = draw(&random);
        if (random.below(2))
            m.refine_some(&random);
        const cg_rans_matrix matrix = m.of(classes, 2);
        const Bytes coded = encode(classes, m, 2);
        const auto cells = m.cells;
        const auto streams = cut(coded, 2);
        for (size_t stream = 0; stream < 2; stream++) {
            uint32_t states[CG_RANS_LANES];
            Bytes words(cg_rans_bound_bytes(m.strips.data(), m.strips.size(), m.n_rows, 2));
            uint8_t *end = words.data() + words.size();
            const uint8_t *at = baseline->encode_stream(&matrix, stream, end, states);
            ASSERT_EQ(Bytes(at, static_cast<const uint8_t *>(end)),
                      Bytes(streams[stream].begin() + 4 * CG_RANS_LANES, streams[stream].end()));
        }
        for (const cg_rans_kernels *table : {rans, baseline}) {
            ASSERT_EQ(decode_streams(table, classes, 2, streams, &m), CG_OK);
            ASSERT_EQ(m.cells, cells);
        }
    }
}

TEST_P(RansKernelsTest, RefusesWhatTheScalarCodeRefuses)
{
    for (uint64_t seed = 0; seed < 6; seed++) {
        SCOPED_TRACE(testing::Message() << "seed=" << seed);
        Random random(seed);
        const auto classes = draw_classes(3, &random);
        Matrix m(1 + random.below(20), {32, 1 + random.below(32)}, classes.size(), &random);
        draw_cells(classes, &m, &random);
        const auto streams = cut(encode(classes, m, 1), 1);
        for (size_t n = 0; n < streams[0].size(); n++)
            ASSERT_NE(decode_streams(rans, classes, 1,
                                     {Bytes(streams[0].begin(), streams[0].begin() + n)}, &m),
                      CG_OK)
                << n << " bytes left";
        Bytes longer = streams[0];
        longer.resize(longer.size() + 2);
        EXPECT_EQ(decode_streams(rans, classes, 1, {longer}, &m), CG_ERR_CORRUPT);
        for (int i = 0; i < 2000; i++) {
            Bytes damaged = streams[0];
            for (uint32_t n_flips = 1 + random.below(3); n_flips > 0; n_flips--) {
                const uint32_t bit = random.below(static_cast<uint32_t>(8 * damaged.size()));
                damaged[bit / 8] ^= 1 << bit % 8;
            }
            const cg_status want = decode_streams(baseline, classes, 1, {damaged}, &m);
            const auto cells = m.cells;
            const cg_status got = decode_streams(rans, classes, 1, {damaged}, &m);
            ASSERT_EQ(got == CG_OK, want == CG_OK) << "damage " << i << ": " << cg_strerror(got);
            if (want == CG_OK) {
                ASSERT_EQ(m.cells, cells) << "damage " << i;
            }
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Isas, RansKernelsTest, testing::Values("avx2", "avx512"),
                         [](const auto &isa) { return std::string(isa.param); });

// Raw bits carry no redundancy, so most damage decodes; a section's checksum is what sees it. Here:
// nothing is read outside, and what decodes does so again from its own encoding.
TEST(Rans, FlippedBitsAreRefusedOrOtherSymbols)
{
    const auto classes = signed_classes();
    Random random(9);
    Matrix m(20, {32, 9}, classes.size(), &random);
    for (int16_t &cell : m.cells)
        cell = draw(&random);
    const auto cells = m.cells;
    const Bytes good = encode(classes, m, 1);
    size_t used;
    for (size_t bit = 0; bit < 8 * good.size(); bit++) {
        Bytes damaged = good;
        damaged[bit / 8] ^= 1 << bit % 8;
        if (decode(classes, &m, damaged, &used) != CG_OK)
            continue;
        EXPECT_NE(m.cells, cells) << "bit " << bit;
        const auto others = m.cells;
        ASSERT_EQ(decode(classes, &m, encode(classes, m, 1), &used), CG_OK) << "bit " << bit;
        ASSERT_EQ(m.cells, others) << "bit " << bit;
    }
}

TEST(Rans, RefusesImpossibleClasses)
{
    const auto init = [](unsigned shift, std::vector<uint16_t> freq) {
        cg_rans_class cls;
        return cg_rans_class_init_signed(&cls, shift, static_cast<unsigned>(freq.size()),
                                         freq.data());
    };
    EXPECT_EQ(init(0, {16383, 1}), CG_OK);
    EXPECT_EQ(init(12, {16383, 1}), CG_OK);
    EXPECT_EQ(init(13, {16383, 1}), CG_ERR_CORRUPT);
    EXPECT_EQ(init(0, {16384}), CG_ERR_CORRUPT);
    EXPECT_EQ(init(0, {}), CG_ERR_CORRUPT);
    EXPECT_EQ(init(0, {16384, 0}), CG_ERR_CORRUPT);
    EXPECT_EQ(init(0, {16382, 1}), CG_ERR_CORRUPT);
    EXPECT_EQ(init(0, {16383, 2}), CG_ERR_CORRUPT);
    EXPECT_EQ(init(0, {65535, 1}), CG_ERR_CORRUPT);
    EXPECT_EQ(init(0, {16382, 1, 1}), CG_ERR_CORRUPT); // signed alphabets are even
    EXPECT_EQ(init(0, cg_test::falling_freq(66, 0.9)), CG_ERR_CORRUPT);

    cg_rans_class cls;
    const auto freq = cg_test::falling_freq(10, 0.7);
    EXPECT_EQ(cg_rans_class_init_exponents(&cls, 0, 8, 10, freq.data()), CG_OK); // 8 ... 0, escape
    EXPECT_EQ(cg_rans_class_init_exponents(&cls, 0, 7, 10, freq.data()), CG_ERR_CORRUPT);
    EXPECT_EQ(cg_rans_class_init_exponents(&cls, 0, 255, 10, freq.data()), CG_OK);
    EXPECT_EQ(cg_rans_class_init_exponents(&cls, 0, 256, 10, freq.data()), CG_ERR_CORRUPT);
}

TEST(Rans, RefusesImpossibleRefinements)
{
    cg_rans_class cls = signed_classes()[0];
    const uint16_t good[3][2] = {{1, 1}, {16382, 1}, {1, 16382}};
    EXPECT_EQ(cg_rans_class_init_refinement(&cls, good), CG_OK);
    const uint16_t values[][2] = {{0, 1}, {1, 0}, {16383, 1}, {8192, 8192}, {65535, 65535}};
    for (const auto &value : values) {
        uint16_t bad[3][2] = {{1, 1}, {1, 1}, {1, 1}};
        bad[2][0] = value[0];
        bad[2][1] = value[1];
        EXPECT_EQ(cg_rans_class_init_refinement(&cls, bad), CG_ERR_CORRUPT)
            << value[0] << " " << value[1];
    }
}

TEST(Rans, RefusesRefinedSymbolsPastSixteenBits)
{
    const auto classes = signed_classes();
    Random random(1);
    Matrix m(4, {32}, classes.size(), &random);
    m.coarse.assign(m.cells.size(), 10922);
    m.strips[0].coarse = m.coarse.data();
    m.strips[0].coarse_stride = m.n_columns;
    for (int16_t &cell : m.cells)
        cell = 32767;
    const Bytes coded = encode(classes, m, 1);
    size_t used;
    EXPECT_EQ(decode(classes, &m, coded, &used), CG_OK);
    for (int16_t &cell : m.coarse)
        cell = 10923; // the same words mean 32,770
    EXPECT_EQ(decode(classes, &m, coded, &used), CG_ERR_CORRUPT);
}

TEST(Rans, RefusesSymbolsPastSixteenBits)
{
    // One escaped symbol of a class with shift 12: v = 8 is the first whose v * 2^12 no longer
    // fits.
    std::vector<cg_rans_class> classes(2);
    const uint16_t freq[] = {16383, 1};
    ASSERT_EQ(cg_rans_class_init_signed(&classes[0], 12, 2, freq), CG_OK);
    ASSERT_EQ(cg_rans_class_init_signed(&classes[1], 11, 2, freq), CG_OK);
    Random random(1);
    Matrix m(1, {1}, 1, &random);
    m.column_class[0] = 1;
    m.cells[0] = 8 << 11;
    const Bytes coded = encode(classes, m, 1);
    size_t used;
    EXPECT_EQ(decode(classes, &m, coded, &used), CG_OK);
    EXPECT_EQ(m.cells[0], 8 << 11);
    m.column_class[0] =
        0; // the same bits, read with one bit more of shift, are 2^15 or end elsewhere
    EXPECT_EQ(decode(classes, &m, coded, &used), CG_ERR_CORRUPT);
}

TEST(Rans, StreamsAreAsManyAsTheirShareOfTheBytesPaysFor)
{
    const uint64_t bits = 8 * 50 * 132; // of which one stream is 2 %
    const struct {
        uint64_t bits;
        size_t n_strips, n_rows;
        unsigned percent;
        size_t want;
    } cases[] = {{bits, 99, 1, 2, 1},
                 {2 * bits - 8, 99, 1, 2, 1},
                 {2 * bits, 99, 1, 2, 2},
                 {bits, 99, 1, 8, 4},
                 {bits - 8, 99, 1, 8, 3},
                 {0, 99, 1, 8, 1},
                 {99 * bits, 20, 1, 2, 20},
                 {99 * bits, 0, 1, 8, 0},
                 // Long ones are cut, as long as that costs at most twice as much.
                 {3 * bits, 64, 32, 2, 3},
                 {3 * bits, 64, 96, 2, 3},
                 {3 * bits, 65, 96, 2, 4},
                 {3 * bits, 64, 1000, 2, 6},
                 {bits / 2, 64, 1000, 2, 1},
                 {bits, 64, 32, 8, 4},
                 {bits, 65, 32, 8, 5},
                 {bits, 64, 1000, 8, 8}};
    for (const auto &c : cases)
        EXPECT_EQ(cg_rans_choose_streams(c.bits, c.n_strips, c.n_rows, c.percent), c.want)
            << c.bits << ' ' << c.n_rows << ' ' << c.percent;
}

TEST(Rans, NormalizedFrequenciesSumUpAndLeaveNoneOut)
{
    Random random(5);
    for (unsigned n : {2u, 3u, 17u, 64u}) {
        for (int kind = 0; kind < 4; kind++) {
            std::vector<uint32_t> counts(n);
            for (uint32_t &c : counts)
                c = kind == 0   ? 0
                    : kind == 1 ? random.below(10)
                    : kind == 2 ? random.below(1u << 31)
                                : 0;
            if (kind == 3)
                counts[n / 2] = 0xffffffff;
            std::vector<uint16_t> freq(n);
            cg_rans_normalize(counts.data(), n, freq.data());
            EXPECT_EQ(std::accumulate(freq.begin(), freq.end(), 0u), 1u << 14) << n << " " << kind;
            EXPECT_GT(*std::min_element(freq.begin(), freq.end()), 0);
        }
    }
}

} // namespace
