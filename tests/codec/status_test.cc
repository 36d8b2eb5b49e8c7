#include "codec/geometry.h"
#include "codec/status.h"

#include <cerrno>
#include <gtest/gtest.h>
#include <set>
#include <string>

namespace
{

// They cross the ABI of libcachegen.so and appear in logs: this list only ever grows.
const struct {
    cg_status status;
    int number;
} pinned[] = {
    {CG_OK, 0},
    {CG_ERR_INVALID_ARGUMENT, 1},
    {CG_ERR_NO_MEMORY, 2},
    {CG_ERR_BUFFER_TOO_SMALL, 3},
    {CG_ERR_UNSUPPORTED, 4},
    {CG_ERR_CANCELLED, 5},
    {CG_ERR_AGAIN, 6},
    {CG_ERR_TRUNCATED, 20},
    {CG_ERR_CORRUPT, 21},
    {CG_ERR_UNSUPPORTED_VERSION, 22},
    {CG_ERR_BAD_MAGIC, 23},
    {CG_ERR_FOREIGN_MODEL, 30},
    {CG_ERR_FOREIGN_PROFILE, 31},
    {CG_ERR_FOREIGN_TOKENS, 32},
    {CG_ERR_LOSSY_PREFIX, 33},
    {CG_ERR_NOT_FOUND, 40},
    {CG_ERR_EXISTS, 41},
    {CG_ERR_IO, 42},
    {CG_ERR_NO_SPACE, 43},
    {CG_ERR_PERMISSION, 44},
    {CG_ERR_TIMED_OUT, 45},
    {CG_ERR_READ_ONLY, 46},
    {CG_ERR_DEVICE, 47},
};

TEST(Status, NumbersArePinned)
{
    for (const auto &p : pinned)
        EXPECT_EQ(static_cast<int>(p.status), p.number) << cg_strerror(p.status);
}

TEST(Status, EachHasItsOwnMessage)
{
    std::set<std::string> messages;
    for (const auto &p : pinned)
        EXPECT_TRUE(messages.insert(cg_strerror(p.status)).second) << cg_strerror(p.status);
    for (const int number : {-1, 7, 19, 24, 48, 1 << 30}) {
        ASSERT_NE(cg_strerror(static_cast<cg_status>(number)), nullptr);
        EXPECT_TRUE(messages.insert(cg_strerror(static_cast<cg_status>(number))).second);
        messages.erase(cg_strerror(static_cast<cg_status>(number)));
    }
}

TEST(Status, ErrnoValuesAreMapped)
{
    EXPECT_EQ(cg_status_from_errno(0), CG_OK);
    EXPECT_EQ(cg_status_from_errno(ENOENT), CG_ERR_NOT_FOUND);
    EXPECT_EQ(cg_status_from_errno(ENOSPC), CG_ERR_NO_SPACE);
    EXPECT_EQ(cg_status_from_errno(EDQUOT), CG_ERR_NO_SPACE);
    EXPECT_EQ(cg_status_from_errno(EACCES), CG_ERR_PERMISSION);
    EXPECT_EQ(cg_status_from_errno(EROFS), CG_ERR_READ_ONLY);
    EXPECT_EQ(cg_status_from_errno(EIO), CG_ERR_IO);
    EXPECT_EQ(cg_status_from_errno(12345), CG_ERR_IO);
}

TEST(Geometry, RefusesWhatCannotBe)
{
    const cg_geometry good = {30, 3, 64, CG_DTYPE_BF16, 2};
    const struct {
        const char *what;
        cg_geometry geometry;
        cg_status want;
    } cases[] = {
        {"good", good, CG_OK},
        {"largest", {1024, 1024, 1024, CG_DTYPE_FP32, 2}, CG_OK},
        {"smallest", {1, 1, 2, CG_DTYPE_FP16, 2}, CG_OK},
        {"no layers", {0, 3, 64, CG_DTYPE_BF16, 2}, CG_ERR_INVALID_ARGUMENT},
        {"layers", {1025, 3, 64, CG_DTYPE_BF16, 2}, CG_ERR_INVALID_ARGUMENT},
        {"no heads", {30, 0, 64, CG_DTYPE_BF16, 2}, CG_ERR_INVALID_ARGUMENT},
        {"heads", {30, 1025, 64, CG_DTYPE_BF16, 2}, CG_ERR_INVALID_ARGUMENT},
        {"no head_dim", {30, 3, 0, CG_DTYPE_BF16, 2}, CG_ERR_INVALID_ARGUMENT},
        {"head_dim", {30, 3, 1026, CG_DTYPE_BF16, 2}, CG_ERR_INVALID_ARGUMENT},
        {"odd head_dim", {30, 3, 63, CG_DTYPE_BF16, 2}, CG_ERR_UNSUPPORTED},
        {"dtype 0", {30, 3, 64, 0, 2}, CG_ERR_UNSUPPORTED},
        {"dtype 6", {30, 3, 64, 6, 2}, CG_ERR_UNSUPPORTED},
        {"a latent plane", {30, 3, 64, CG_DTYPE_BF16, 1}, CG_ERR_UNSUPPORTED},
        {"three planes", {30, 3, 64, CG_DTYPE_BF16, 3}, CG_ERR_UNSUPPORTED},
    };
    for (const auto &c : cases) {
        EXPECT_EQ(cg_geometry_check(&c.geometry), c.want) << c.what;
        EXPECT_EQ(cg_geometry_equal(&good, &c.geometry), std::string("good") == c.what) << c.what;
    }
}

TEST(Geometry, ElementsOfTheLargestChunkDoNotOverflow)
{
    const cg_geometry largest = {1024, 1024, 1024, CG_DTYPE_FP32, 2};
    EXPECT_EQ(cg_geometry_elements(&largest, CG_MAX_CHUNK_TOKENS), uint64_t{1} << 47);
    EXPECT_EQ(cg_geometry_channels(&largest), size_t{1} << 20);
}

TEST(Geometry, NamesDtypes)
{
    EXPECT_EQ(cg_dtype_bytes(CG_DTYPE_BF16), 2u);
    EXPECT_EQ(cg_dtype_bytes(CG_DTYPE_FP16), 2u);
    EXPECT_EQ(cg_dtype_bytes(CG_DTYPE_FP32), 4u);
    EXPECT_EQ(cg_dtype_bytes(CG_DTYPE_FP8_E4M3), 1u);
    EXPECT_EQ(cg_dtype_bytes(CG_DTYPE_FP8_E5M2), 1u);
    EXPECT_EQ(cg_dtype_bytes(0), 0u);
    EXPECT_STREQ(cg_dtype_name(CG_DTYPE_BF16), "bf16");
    EXPECT_STREQ(cg_dtype_name(CG_DTYPE_FP16), "fp16");
    EXPECT_STREQ(cg_dtype_name(CG_DTYPE_FP32), "fp32");
    EXPECT_STREQ(cg_dtype_name(CG_DTYPE_FP8_E4M3), "fp8_e4m3");
    EXPECT_STREQ(cg_dtype_name(CG_DTYPE_FP8_E5M2), "fp8_e5m2");
    EXPECT_STREQ(cg_dtype_name(255), "unknown");
}

} // namespace
