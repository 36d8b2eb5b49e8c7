#include "codec/cursor.h"

#include <gtest/gtest.h>
#include <limits>
#include <vector>

namespace
{

TEST(Cursor, ReadsLittleEndianFieldsInTheirOrder)
{
    const std::vector<uint8_t> bytes = {0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08,
                                        0x09, 0x0a, 0x0b, 0x0c, 0x0d, 0x0e, 0x0f};
    cg_cursor in = {bytes.data(), bytes.size()};
    uint8_t u8;
    uint16_t u16;
    uint32_t u32;
    uint64_t u64;
    ASSERT_TRUE(cg_cursor_u8(&in, &u8));
    ASSERT_TRUE(cg_cursor_u16(&in, &u16));
    ASSERT_TRUE(cg_cursor_u32(&in, &u32));
    ASSERT_TRUE(cg_cursor_u64(&in, &u64));
    EXPECT_EQ(u8, 0x01);
    EXPECT_EQ(u16, 0x0302);
    EXPECT_EQ(u32, 0x07060504u);
    EXPECT_EQ(u64, 0x0f0e0d0c0b0a0908u);
    EXPECT_EQ(in.left_bytes, 0u);
}

TEST(Cursor, AFailedReadLeavesItWhereItWas)
{
    const std::vector<uint8_t> bytes(7, 0xff); // of exactly its size: ASan sees an over-read
    cg_cursor in = {bytes.data(), bytes.size()};
    uint64_t u64 = 1;
    double f64 = 1;
    const uint8_t *at = nullptr;
    EXPECT_FALSE(cg_cursor_u64(&in, &u64));
    EXPECT_FALSE(cg_cursor_f64(&in, &f64));
    EXPECT_FALSE(cg_cursor_bytes(&in, 8, &at));
    EXPECT_FALSE(cg_cursor_skip(&in, std::numeric_limits<size_t>::max()));
    EXPECT_EQ(in.at, bytes.data());
    EXPECT_EQ(in.left_bytes, 7u);
    EXPECT_EQ(u64, 1u);
    EXPECT_EQ(f64, 1);
    EXPECT_EQ(at, nullptr);

    uint32_t u32;
    ASSERT_TRUE(cg_cursor_u32(&in, &u32));
    EXPECT_FALSE(cg_cursor_u32(&in, &u32));
    uint16_t u16;
    ASSERT_TRUE(cg_cursor_u16(&in, &u16));
    EXPECT_FALSE(cg_cursor_u16(&in, &u16));
    uint8_t u8;
    ASSERT_TRUE(cg_cursor_u8(&in, &u8));
    EXPECT_FALSE(cg_cursor_u8(&in, &u8));
    EXPECT_TRUE(cg_cursor_skip(&in, 0));
    EXPECT_TRUE(cg_cursor_bytes(&in, 0, &at));
}

TEST(Cursor, ReadsFloatsByTheirBits)
{
    const uint8_t bytes[] = {0, 0, 0x80, 0xbf, 0, 0, 0, 0, 0, 0, 0xf8, 0x3f};
    cg_cursor in = {bytes, sizeof bytes};
    float f32;
    double f64;
    ASSERT_TRUE(cg_cursor_f32(&in, &f32));
    ASSERT_TRUE(cg_cursor_f64(&in, &f64));
    EXPECT_EQ(f32, -1.0f);
    EXPECT_EQ(f64, 1.5);
}

TEST(Cursor, WhatIsStoredIsLoadedAtEveryWidth)
{
    const uint64_t value = 0xf1e2d3c4b5a69788;
    for (size_t n_bytes = 0; n_bytes <= 8; n_bytes++) {
        SCOPED_TRACE(n_bytes);
        std::vector<uint8_t> bytes(9, 0xee);
        cg_put_le(bytes.data(), n_bytes, value);
        EXPECT_EQ(bytes[n_bytes], 0xee);
        const uint64_t mask = n_bytes == 8 ? ~0ull : (1ull << (8 * n_bytes)) - 1;
        EXPECT_EQ(cg_get_le(bytes.data(), n_bytes), value & mask);
    }
}

TEST(SizeMath, ReportsOverflow)
{
    const size_t max = std::numeric_limits<size_t>::max();
    const struct {
        size_t a, b;
        bool product_fits, sum_fits;
    } cases[] = {
        {0, max, true, true},
        {1, max, true, false},
        {2, max / 2, true, true},
        {2, max / 2 + 1, false, true},
        {max, max, false, false},
        {size_t{1} << 32, size_t{1} << 32, false, true},
        {size_t{1} << 31, size_t{1} << 32, true, true},
    };
    for (const auto &c : cases) {
        SCOPED_TRACE(testing::Message() << c.a << " and " << c.b);
        size_t product, sum;
        EXPECT_EQ(cg_size_mul(c.a, c.b, &product), c.product_fits);
        EXPECT_EQ(cg_size_add(c.a, c.b, &sum), c.sum_fits);
        if (c.product_fits) {
            EXPECT_EQ(product, c.a * c.b);
        }
        if (c.sum_fits) {
            EXPECT_EQ(sum, c.a + c.b);
        }
    }
}

} // namespace
