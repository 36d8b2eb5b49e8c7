#include "codec/lossless.h"

#include "codec/lossless_lane.h"
#include "codec/rans.h"

#include "profile_maker.h"

#include <gtest/gtest.h>

namespace
{

using cg_test::Bytes;
using cg_test::Random;

class LosslessTest : public testing::TestWithParam<unsigned>
{
  protected:
    unsigned dtype() const
    {
        return GetParam();
    }

    void *scratch(size_t n_bytes)
    {
        scratch_.reset(static_cast<uint8_t *>(aligned_alloc(64, n_bytes)));
        return scratch_.get();
    }
    Bytes encode(const Bytes &elements, size_t n_columns, size_t n_rows)
    {
        Bytes coded(cg_lossless_bound_bytes(dtype(), n_columns, n_rows));
        const size_t n =
            cg_lossless_encode(dtype(), elements.data(), n_columns, n_rows, align,
                               scratch(cg_lossless_encode_scratch_bytes(n_columns, n_rows)),
                               coded.data(), coded.size());
        EXPECT_GT(n, 0u);
        coded.resize(n);
        return coded;
    }
    cg_status decode(const Bytes &coded, size_t n_columns, size_t n_rows, Bytes *elements)
    {
        elements->assign(n_columns * n_rows * cg_dtype_bytes(dtype()), 0xcc);
        const std::unique_ptr<uint8_t[]> exact(new uint8_t[coded.size()]);
        std::copy(coded.begin(), coded.end(), exact.get());
        return cg_lossless_decode(dtype(), exact.get(), coded.size(), n_columns, n_rows, align,
                                  scratch(cg_lossless_decode_scratch_bytes(n_columns, n_rows)),
                                  elements->data());
    }
    void expect_round_trip(const Bytes &elements, size_t n_columns, size_t n_rows)
    {
        for (const size_t each : {CG_RANS_ALIGNED, CG_RANS_PACKED}) {
            Bytes decoded;
            align = each;
            ASSERT_EQ(decode(encode(elements, n_columns, n_rows), n_columns, n_rows, &decoded),
                      CG_OK);
            ASSERT_EQ(decoded, elements);
        }
    }

    size_t align = CG_RANS_PACKED;
    std::unique_ptr<uint8_t, cg_test::MallocFree> scratch_;
};

TEST_P(LosslessTest, IsBitExactForAnyBits)
{
    for (const size_t n_columns : {1, 31, 32, 33, 100}) {
        for (const size_t n_rows : {1, 2, 63, 64, 65}) {
            const uint64_t seed = n_columns * 1000 + n_rows;
            SCOPED_TRACE(testing::Message()
                         << "n_columns=" << n_columns << " n_rows=" << n_rows << " seed=" << seed);
            Random random(seed);
            Bytes elements(n_columns * n_rows * cg_dtype_bytes(dtype()));
            for (uint8_t &byte :
                 elements) // NaNs, infinities, subnormals, negative zeros among them
                byte = static_cast<uint8_t>(random.below(256));
            expect_round_trip(elements, n_columns, n_rows);
        }
    }
}

TEST_P(LosslessTest, KeepsTheNumbersThatArithmeticWouldNot)
{
    const size_t n_bytes = cg_dtype_bytes(dtype());
    const unsigned mantissa = cg_lane_split(dtype()).mantissa_bits;
    const uint64_t exponent_ones = ((uint64_t{1} << (8 * n_bytes - 1 - mantissa)) - 1) << mantissa;
    const uint64_t sign = uint64_t{1} << (8 * n_bytes - 1);
    Bytes elements;
    for (const uint64_t bits :
         {uint64_t{0}, sign, uint64_t{1}, sign | 1, (uint64_t{1} << mantissa) - 1, exponent_ones,
          sign | exponent_ones, exponent_ones | 1,
          sign | exponent_ones | (uint64_t{1} << (mantissa - 1)), sign | (exponent_ones - 1)})
        cg_test::put(&elements, bits, n_bytes);
    expect_round_trip(elements, 10, 1);
    expect_round_trip(elements, 1, 10);
}

TEST_P(LosslessTest, ShrinksWhatACacheHolds)
{
    Random random(4);
    Bytes elements;
    for (size_t i = 0; i < 256 * 128; i++)
        cg_test::put_element(&elements, dtype(), static_cast<float>(random.normal()));
    const Bytes coded = encode(elements, 128, 256);
    EXPECT_LT(coded.size(), elements.size() * 9 / 10);
    expect_round_trip(elements, 128, 256);
}

// A reader takes memory by it.
TEST_P(LosslessTest, HasAtLeastAThirdOfTheElementsBytesWhateverTheyAre)
{
    for (const size_t n_columns : {1, 40, 96}) {
        const size_t n_rows = 4096 / n_columns;
        const Bytes elements(n_columns * n_rows * cg_dtype_bytes(dtype()), 0x55); // no noise at all
        const Bytes coded = encode(elements, n_columns, n_rows);
        const size_t least = cg_lossless_least_bytes(dtype(), n_columns, n_rows);
        EXPECT_GE(3 * least + 2, elements.size());
        EXPECT_GE(coded.size(), least);
        Bytes decoded;
        EXPECT_EQ(decode(Bytes(coded.begin(), coded.begin() + static_cast<long>(least) - 1),
                         n_columns, n_rows, &decoded),
                  CG_ERR_TRUNCATED);
    }
}

TEST_P(LosslessTest, RefusesDamage)
{
    const size_t n_columns = 40, n_rows = 70; // more than one class
    Random random(6);
    Bytes elements, decoded;
    for (size_t i = 0; i < n_columns * n_rows; i++)
        cg_test::put_element(&elements, dtype(),
                             static_cast<float>(random.normal() * std::exp2(i % n_columns % 5)));
    const Bytes good = encode(elements, n_columns, n_rows);
    ASSERT_GT(good[0], 1) << "the test wants a payload with several classes";
    for (size_t n = 0; n < good.size(); n++)
        EXPECT_NE(decode(Bytes(good.begin(), good.begin() + n), n_columns, n_rows, &decoded), CG_OK)
            << n;
    Bytes longer = good;
    longer.push_back(0);
    EXPECT_EQ(decode(longer, n_columns, n_rows, &decoded), CG_ERR_CORRUPT);

    const struct {
        const char *what;
        size_t offset;
        uint8_t value;
    } cases[] = {
        {"no classes", 0, 0},
        {"17 classes", 0, 17},
        {"reserved", 1, 1},
        {"index below exponent 0", 2, 0},
        {"alphabet of 1", 3, 1},
        {"alphabet of 65", 3, 65},
        {"a frequency too large", 5, 0xff},
    };
    for (const auto &c : cases) {
        Bytes damaged = good;
        damaged[c.offset] = c.value;
        EXPECT_NE(decode(damaged, n_columns, n_rows, &decoded), CG_OK) << c.what;
    }
    // The class of a column.
    size_t at = 2;
    for (unsigned k = 0; k < good[0]; k++)
        at += 2 + 2 * good[at + 1];
    Bytes damaged = good;
    damaged[at] = good[0];
    EXPECT_EQ(decode(damaged, n_columns, n_rows, &decoded), CG_ERR_CORRUPT);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, LosslessTest,
                         testing::Values(CG_DTYPE_BF16, CG_DTYPE_FP16, CG_DTYPE_FP32,
                                         CG_DTYPE_FP8_E4M3, CG_DTYPE_FP8_E5M2),
                         [](const auto &dtype) { return std::string(cg_dtype_name(dtype.param)); });

TEST(Lossless, RefusesAnExponentThatFp16DoesNotHave)
{
    // One element, one class: escape with raw(8) = 32.
    std::vector<cg_rans_class> classes(1);
    const uint16_t freq[] = {16383, 1};
    ASSERT_EQ(cg_rans_class_init_exponents(&classes[0], 3, 1, 2, freq), CG_OK);
    for (const int exponent : {31, 32, 255}) {
        int16_t cell = static_cast<int16_t>(exponent << 3);
        const uint8_t column_class = 0;
        const cg_rans_strip strip = {&cell, 1, &column_class, 1, nullptr, 0};
        Bytes coded = {1, 0, 1, 2, 0xff, 0x3f, 1, 0}, matrix(1000), scratch(1000);
        const cg_rans_run all = {1, 0};
        matrix.resize(cg_rans_encode(classes.data(), &strip, 1, &all, 1, 1, CG_RANS_PACKED,
                                     matrix.data(), matrix.size(), scratch.data()));
        coded.insert(coded.end(), matrix.begin(), matrix.end());
        coded.push_back(0);
        alignas(64) static uint8_t work[1 << 16];
        ASSERT_LE(cg_lossless_decode_scratch_bytes(1, 1), sizeof work);
        uint16_t element;
        EXPECT_EQ(cg_lossless_decode(CG_DTYPE_FP16, coded.data(), coded.size(), 1, 1,
                                     CG_RANS_PACKED, work, &element),
                  exponent < 32 ? CG_OK : CG_ERR_CORRUPT)
            << exponent;
    }
}

// What a thread that decodes a chunk's largest section holds beside the elements.
TEST(Lossless, DecodingTakesTwoBytesAnElement)
{
    for (const size_t n_rows : {256, 65536})
        EXPECT_LE(cg_lossless_decode_scratch_bytes(1024, n_rows), 2 * 1024 * n_rows + (64 << 10));
}

} // namespace
