// tests/iouring/io_fixture.h - runs a test on each backend of cg_io.
#ifndef CG_TESTS_IOURING_IO_FIXTURE_H
#define CG_TESTS_IOURING_IO_FIXTURE_H
#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "iouring/io.h"
#include "tests/iouring/require.h"
#include "tests/iouring/temp_dir.h"

namespace cg_test
{

constexpr uint64_t SECOND_NS = 1000000000u;

inline std::vector<uint8_t> draw_bytes(size_t n, uint32_t seed)
{
    std::mt19937 random(seed);
    std::vector<uint8_t> bytes(n);
    for (uint8_t &b : bytes)
        b = static_cast<uint8_t>(random());
    return bytes;
}

struct BufferRelease {
    void operator()(cg_io_buffer *buffer) const
    {
        cg_io_buffer_release(buffer);
    }
};
using Buffer = std::unique_ptr<cg_io_buffer, BufferRelease>;

class IoFixture : public testing::TestWithParam<cg_io_backend>
{
  protected:
    void SetUp() override
    {
        char reason[256];
        if (GetParam() == CG_IO_URING && !cg_io_uring_reason(reason, sizeof reason))
            CG_SKIP_OR_FAIL("uring", "the io_uring backend is not tested: " << reason);
        restart({});
    }
    void TearDown() override
    {
        cg_io_free(io, 10 * SECOND_NS);
    }

    void restart(cg_io_config config)
    {
        cg_io_free(io, 10 * SECOND_NS);
        config.backend = GetParam();
        ASSERT_EQ(cg_io_new(&config, &io), CG_OK);
        ASSERT_EQ(cg_io_backend_in_use(io), GetParam());
    }

    cg_io_completion wait_for_one()
    {
        cg_io_completion completion = {};
        size_t n = 0;
        while (n == 0) {
            if (cg_io_wait(io, 20 * SECOND_NS, &completion, 1, &n) != CG_OK || n == 0) {
                ADD_FAILURE() << "nothing completes";
                return {};
            }
        }
        return completion;
    }

    // What a read of the first n_bytes of path gives: its status, and the bytes.
    cg_status read(const std::string &path, std::vector<uint8_t> *bytes_out, uint64_t n_bytes,
                   cg_io_cache cache = CG_IO_CACHED)
    {
        EXPECT_EQ(cg_io_read_range(io, dir.fd, path.c_str(), 0, n_bytes, cache, 77), CG_OK);
        return take_read(bytes_out);
    }

    cg_status take_read(std::vector<uint8_t> *bytes_out)
    {
        bytes_out->clear();
        last = wait_for_one();
        EXPECT_EQ(last.user, 77u);
        EXPECT_EQ(last.buffer != nullptr, last.status == CG_OK);
        const Buffer buffer(last.buffer);
        if (buffer == nullptr)
            return last.status;
        EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data) % 4096, 0u);
        EXPECT_LE(buffer->n_bytes, buffer->capacity_bytes);
        EXPECT_EQ(buffer->n_bytes, last.file_bytes);
        bytes_out->assign(buffer->data, buffer->data + buffer->n_bytes);
        return last.status;
    }

    cg_status write(const std::string &path, const std::vector<uint8_t> &bytes,
                    bool replace = false)
    {
        EXPECT_EQ(cg_io_write(io, dir.fd, path.c_str(), bytes.data(), bytes.size(), replace, 78),
                  CG_OK);
        last = wait_for_one();
        EXPECT_EQ(last.user, 78u);
        return last.status;
    }

    cg_status stat(const std::string &path)
    {
        EXPECT_EQ(cg_io_stat(io, dir.fd, path.c_str(), 79), CG_OK);
        last = wait_for_one();
        EXPECT_EQ(last.user, 79u);
        return last.status;
    }

    TempDir dir;
    cg_io *io = nullptr;
    cg_io_completion last = {};
};

inline std::string backend_test_name(const testing::TestParamInfo<cg_io_backend> &info)
{
    return info.param == CG_IO_URING ? "uring" : "threads";
}

} // namespace cg_test

#define CG_ON_BOTH_BACKENDS(fixture)                                                               \
    INSTANTIATE_TEST_SUITE_P(Backends, fixture, testing::Values(CG_IO_URING, CG_IO_THREADS),       \
                             cg_test::backend_test_name)
#endif
