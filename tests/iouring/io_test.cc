#include "iouring/io.h"
#include "iouring/io_uring_ring.h"

#include <gtest/gtest.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <thread>

#include "tests/iouring/io_fixture.h"

namespace
{

using cg_test::Buffer;
using cg_test::draw_bytes;
using cg_test::SECOND_NS;

const size_t SIZES[] = {0, 1, 4095, 4096, 4097, (1 << 20) + 3};

unsigned long pinned_kib()
{
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);)
        if (line.rfind("VmPin:", 0) == 0)
            return std::stoul(line.substr(6));
    throw std::runtime_error("no VmPin");
}

class IoTest : public cg_test::IoFixture
{
};
CG_ON_BOTH_BACKENDS(IoTest);

TEST_P(IoTest, ReadsTheStartOfAFileAndNoMore)
{
    for (size_t n : SIZES) {
        const std::vector<uint8_t> bytes = draw_bytes(n, n);
        dir.write("file", bytes);
        for (size_t wanted : {size_t{1}, size_t{160}, size_t{4095}, size_t{4096}, size_t{4097},
                              n / 2 + 1, n, n + 1, n + 4096})
            for (cg_io_cache cache : {CG_IO_CACHED, CG_IO_DIRECT}) {
                if (wanted == 0)
                    continue;
                SCOPED_TRACE(testing::Message()
                             << "bytes=" << n << " wanted=" << wanted << " cache=" << cache);
                std::vector<uint8_t> got;
                ASSERT_EQ(read("file", &got, wanted, cache),
                          wanted <= n ? CG_OK : CG_ERR_TRUNCATED);
                if (wanted > n)
                    continue;
                ASSERT_EQ(got.size(), wanted);
                ASSERT_TRUE(std::equal(got.begin(), got.end(), bytes.begin()));
            }
    }
}

TEST_P(IoTest, RefusesWhatIsNoRegularFile)
{
    ASSERT_EQ(mkdirat(dir.fd, "folder", 0700), 0);
    ASSERT_EQ(mkfifo((dir.path + "/fifo").c_str(), 0600), 0);
    dir.write("file", std::string("text"));
    ASSERT_EQ(symlinkat("file", dir.fd, "symlink"), 0);
    ASSERT_EQ(symlinkat("nowhere", dir.fd, "dangling"), 0);
    const struct {
        const char *path;
        cg_status want;
        int error;
    } cases[] = {
        {"missing", CG_ERR_NOT_FOUND, ENOENT},       {"missing/too", CG_ERR_NOT_FOUND, ENOENT},
        {"file/below", CG_ERR_NOT_FOUND, ENOTDIR},   {"folder", CG_ERR_INVALID_ARGUMENT, EISDIR},
        {"symlink", CG_ERR_INVALID_ARGUMENT, ELOOP}, {"dangling", CG_ERR_INVALID_ARGUMENT, ELOOP},
        {"fifo", CG_ERR_INVALID_ARGUMENT, EINVAL},
    };
    for (const auto &c : cases) {
        std::vector<uint8_t> got;
        for (cg_io_cache cache : {CG_IO_CACHED, CG_IO_DIRECT}) {
            EXPECT_EQ(read(c.path, &got, 4, cache), c.want) << c.path << " cache=" << cache;
            EXPECT_EQ(last.error, c.error) << c.path << " cache=" << cache;
        }
        ASSERT_EQ(cg_io_read_open(io, dir.fd, c.path, 0, 4, 77), CG_OK);
        EXPECT_EQ(take_read(&got), c.want) << c.path << " to stay open";
        EXPECT_EQ(last.error, c.error) << c.path << " to stay open";
        EXPECT_EQ(stat(c.path), c.want) << c.path;
        EXPECT_EQ(last.error, c.error) << c.path;
    }
    std::vector<uint8_t> got;
    EXPECT_EQ(read("file", &got, 4), CG_OK);
}

TEST_P(IoTest, ReadsRangesAndNoMore)
{
    constexpr size_t N = 700001;
    const std::vector<uint8_t> all = draw_bytes(N, 3);
    dir.write("file", all);
    const struct {
        uint64_t offset, n_bytes;
        cg_status want;
    } cases[] = {
        {0, 1, CG_OK},
        {4096, 262144, CG_OK},
        {262144, 100, CG_OK},
        {696320, N - 696320, CG_OK},
        {696320, N - 696320 + 1, CG_ERR_TRUNCATED},
        {704512, 1, CG_ERR_TRUNCATED},
    };
    for (const auto &c : cases)
        for (cg_io_cache cache : {CG_IO_CACHED, CG_IO_DIRECT}) {
            SCOPED_TRACE(testing::Message() << c.offset << "+" << c.n_bytes << " cache=" << cache);
            std::vector<uint8_t> got;
            ASSERT_EQ(cg_io_read_range(io, dir.fd, "file", c.offset, c.n_bytes, cache, 77), CG_OK);
            EXPECT_EQ(take_read(&got), c.want);
            if (c.want == CG_OK) {
                ASSERT_EQ(got.size(), c.n_bytes);
                EXPECT_TRUE(
                    std::equal(got.begin(), got.end(), all.begin() + static_cast<long>(c.offset)));
            }
        }
    for (const auto &[offset, n_bytes] :
         std::vector<std::pair<uint64_t, uint64_t>>{{1, 10}, {0, 0}, {1ull << 63, 4096}})
        EXPECT_EQ(cg_io_read_range(io, dir.fd, "file", offset, n_bytes, CG_IO_CACHED, 1),
                  CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(cg_io_n_under_way(io), 0u);
}

TEST_P(IoTest, AFileStaysOpenForMoreReadsUntilItIsClosed)
{
    const std::vector<uint8_t> all = draw_bytes(20000, 5);
    ASSERT_EQ(write("file", all), CG_OK);
    EXPECT_EQ(last.file, -1);
    ASSERT_EQ(cg_io_read_open(io, dir.fd, "file", 4096, 5000, 77), CG_OK);
    std::vector<uint8_t> got;
    ASSERT_EQ(take_read(&got), CG_OK);
    EXPECT_TRUE(std::equal(got.begin(), got.end(), all.begin() + 4096));
    const int fd = last.file;
    ASSERT_GE(fd, 0);
    cg_open_file *file = cg_open_file_new(fd);
    ASSERT_EQ(unlinkat(dir.fd, "file", 0), 0); // what follows cannot open it
    for (const auto &[offset, n_bytes, want] :
         std::vector<std::tuple<uint64_t, uint64_t, cg_status>>{
             {0, 4096, CG_OK}, {8192, 20000 - 8192, CG_OK}, {16384, 4096, CG_ERR_TRUNCATED}}) {
        ASSERT_EQ(cg_io_read_file(io, file, offset, n_bytes, 77), CG_OK);
        EXPECT_EQ(take_read(&got), want);
        EXPECT_EQ(last.file, -1) << "it is the caller's already";
        if (want == CG_OK) {
            ASSERT_EQ(got.size(), n_bytes);
            EXPECT_TRUE(
                std::equal(got.begin(), got.end(), all.begin() + static_cast<long>(offset)));
        }
    }
    EXPECT_GE(fcntl(fd, F_GETFD), 0);
    ASSERT_EQ(cg_open_file_drop(file), fd);
    ASSERT_EQ(cg_io_close(io, fd, 80), CG_OK);
    EXPECT_EQ(wait_for_one().status, CG_OK);
    EXPECT_EQ(fcntl(fd, F_GETFD), -1);
    EXPECT_EQ(cg_io_n_under_way(io), 0u);
}

TEST_P(IoTest, WhatCannotBeReadDoesNotStayOpen)
{
    ASSERT_EQ(write("short", draw_bytes(100, 6)), CG_OK);
    ASSERT_EQ(mkdirat(dir.fd, "folder", 0700), 0);
    const std::vector<std::pair<const char *, cg_status>> cases = {
        {"short", CG_ERR_TRUNCATED},
        {"folder", CG_ERR_INVALID_ARGUMENT},
        {"none", CG_ERR_NOT_FOUND}};
    for (const auto &[path, want] : cases) {
        std::vector<uint8_t> got;
        ASSERT_EQ(cg_io_read_open(io, dir.fd, path, 0, 200, 77), CG_OK);
        EXPECT_EQ(take_read(&got), want) << path;
        EXPECT_EQ(last.file, -1) << path;
    }
    EXPECT_EQ(cg_io_read_open(io, dir.fd, "short", 1, 10, 1), CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(cg_io_close(io, -1, 1), CG_ERR_INVALID_ARGUMENT);
}

TEST_P(IoTest, StatsRegularFiles)
{
    for (size_t n : SIZES) {
        dir.write("file", draw_bytes(n, n));
        ASSERT_EQ(stat("file"), CG_OK);
        EXPECT_EQ(last.file_bytes, n);
        EXPECT_EQ(last.buffer, nullptr);
        EXPECT_LE(last.submitted_ns, last.completed_ns);
    }
}

TEST_P(IoTest, RefusesBadPathsAtOnce)
{
    EXPECT_EQ(cg_io_stat(io, dir.fd, "", 1), CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(cg_io_read_range(io, dir.fd, "file", 0, 0, CG_IO_CACHED, 1), CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(cg_io_stat(io, dir.fd, std::string(5000, 'x').c_str(), 1), CG_ERR_INVALID_ARGUMENT);
    const uint64_t most = INT64_MAX;
    for (const uint64_t n_bytes : {most + 1, UINT64_MAX - 4095, UINT64_MAX}) {
        EXPECT_EQ(cg_io_read_range(io, dir.fd, "file", 0, n_bytes, CG_IO_CACHED, 1),
                  CG_ERR_INVALID_ARGUMENT);
        EXPECT_EQ(cg_io_read_range(io, dir.fd, "file", 8192, n_bytes, CG_IO_CACHED, 1),
                  CG_ERR_INVALID_ARGUMENT);
    }
    EXPECT_EQ(cg_io_read_range(io, dir.fd, "file", 4096, most, CG_IO_CACHED, 1),
              CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(cg_io_n_under_way(io), 0u);
}

TEST_P(IoTest, SaysWhenThereIsNoMemoryForARange)
{
    dir.write("file", std::string("text"));
    for (const uint64_t n_bytes : {uint64_t{1} << 60, uint64_t{INT64_MAX}})
        for (cg_io_cache cache : {CG_IO_CACHED, CG_IO_DIRECT}) {
            std::vector<uint8_t> got;
            EXPECT_EQ(read("file", &got, n_bytes, cache), CG_ERR_NO_MEMORY) << n_bytes;
        }
}

TEST_P(IoTest, KeepsManyReadsUnderWay)
{
    constexpr unsigned N = 200, DEPTH = 8;
    restart({CG_IO_AUTO, DEPTH, 3, 0});
    std::map<uint64_t, std::vector<uint8_t>> files;
    for (unsigned i = 0; i < N; i++) {
        files[i] = draw_bytes((i * 7919) % 100000 + 1, i);
        dir.write(std::to_string(i), files[i]);
    }
    unsigned submitted = 0, done = 0;
    std::set<uint64_t> seen;
    while (done < N) {
        while (submitted < N) {
            const std::string path = std::to_string(submitted);
            const size_t n_bytes = files[submitted].size();
            const cg_status status =
                submitted % 3 == 0
                    ? cg_io_read_open(io, dir.fd, path.c_str(), 0, n_bytes, submitted)
                    : cg_io_read_range(io, dir.fd, path.c_str(), 0, n_bytes,
                                       submitted % 2 == 0 ? CG_IO_DIRECT : CG_IO_CACHED, submitted);
            if (status == CG_ERR_AGAIN)
                break;
            ASSERT_EQ(status, CG_OK);
            submitted++;
            ASSERT_LE(cg_io_n_under_way(io), DEPTH);
        }
        cg_io_completion completions[3];
        size_t n;
        ASSERT_EQ(cg_io_wait(io, 20 * SECOND_NS, completions, 3, &n), CG_OK);
        ASSERT_GT(n, 0u);
        for (size_t i = 0; i < n; i++) {
            const Buffer buffer(completions[i].buffer);
            ASSERT_EQ(completions[i].status, CG_OK);
            EXPECT_TRUE(seen.insert(completions[i].user).second) << "twice";
            const std::vector<uint8_t> &want = files[completions[i].user];
            ASSERT_EQ(buffer->n_bytes, want.size());
            EXPECT_TRUE(std::equal(want.begin(), want.end(), buffer->data)) << completions[i].user;
            EXPECT_EQ(completions[i].file >= 0, completions[i].user % 3 == 0);
            if (completions[i].file >= 0)
                close(completions[i].file);
        }
        done += n;
    }
}

TEST_P(IoTest, WritesWholeFilesAndMakesTheirFoldersButForTheFirst)
{
    for (const char *path : {"a/file", "a/b/file", "a/b/c/file"})
        EXPECT_EQ(write(path, {1}), CG_ERR_NOT_FOUND) << path;
    EXPECT_FALSE(dir.has("a"));
    ASSERT_EQ(mkdirat(dir.fd, "a", 0700), 0);
    for (size_t n : SIZES) {
        const std::vector<uint8_t> bytes = draw_bytes(n, n);
        const std::string path = "a/b" + std::to_string(n) + "/c/file";
        ASSERT_EQ(write(path, bytes), CG_OK) << n;
        EXPECT_TRUE(dir.read(path) == bytes) << n;
    }
    EXPECT_EQ(dir.files().size(), std::size(SIZES)) << "a temporary file is left";
    struct stat s;
    ASSERT_EQ(fstatat(dir.fd, "a/b1/c/file", &s, 0), 0);
    EXPECT_EQ(s.st_mode & 07777, 0600u);
    ASSERT_EQ(fstatat(dir.fd, "a/b1", &s, 0), 0);
    EXPECT_EQ(s.st_mode & 07777, 0700u);
}

TEST_P(IoTest, LetsTheExistingFileWinUnlessReplacing)
{
    const std::vector<uint8_t> first = draw_bytes(5000, 1), second = draw_bytes(100, 2);
    ASSERT_EQ(write("file", first), CG_OK);
    EXPECT_EQ(write("file", second), CG_ERR_EXISTS);
    EXPECT_TRUE(dir.read("file") == first);
    EXPECT_EQ(write("file", second, true), CG_OK);
    EXPECT_TRUE(dir.read("file") == second);
    EXPECT_EQ(dir.files().size(), 1u) << "a temporary file is left";
}

TEST_P(IoTest, LetsExactlyOneOfManyWritersWin)
{
    constexpr unsigned N = 12;
    std::vector<std::vector<uint8_t>> contents;
    for (unsigned i = 0; i < N; i++)
        contents.push_back(draw_bytes(20000, i));
    ASSERT_EQ(mkdirat(dir.fd, "x", 0700), 0);
    for (unsigned i = 0; i < N; i++)
        ASSERT_EQ(
            cg_io_write(io, dir.fd, "x/y/file", contents[i].data(), contents[i].size(), false, i),
            CG_OK);
    unsigned n_won = 0, winner = N;
    for (unsigned i = 0; i < N; i++) {
        const cg_io_completion c = wait_for_one();
        EXPECT_TRUE(c.status == CG_OK || c.status == CG_ERR_EXISTS) << c.status;
        if (c.status != CG_OK)
            continue;
        n_won++;
        winner = static_cast<unsigned>(c.user);
    }
    ASSERT_EQ(n_won, 1u);
    EXPECT_TRUE(dir.read("x/y/file") == contents[winner]);
    EXPECT_EQ(dir.files().size(), 1u) << "a temporary file is left";
}

TEST_P(IoTest, LeavesNothingWhenAFileMayNotGrowThatLarge)
{
    struct sigaction ignore = {}, before;
    ignore.sa_handler = SIG_IGN;
    sigaction(SIGXFSZ, &ignore, &before);
    struct rlimit old;
    ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
    const struct rlimit small = {10000, old.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
    const cg_status status = write("file", draw_bytes(50000, 1));
    setrlimit(RLIMIT_FSIZE, &old);
    sigaction(SIGXFSZ, &before, nullptr);
    EXPECT_EQ(status, CG_ERR_IO);
    EXPECT_EQ(last.error, EFBIG);
    EXPECT_TRUE(dir.files().empty());
}

TEST_P(IoTest, LeavesNothingOnAFullDisk)
{
    ASSERT_EQ(mkdirat(dir.fd, "small", 0700), 0);
    const std::string mount_point = dir.path + "/small";
    if (mount("tmpfs", mount_point.c_str(), "tmpfs", MS_NOSUID | MS_NODEV, "size=64k") != 0)
        GTEST_SKIP() << "cannot mount a small tmpfs: a full disk is not tested";
    EXPECT_EQ(write("small/file", draw_bytes(200000, 1)), CG_ERR_NO_SPACE);
    EXPECT_TRUE(dir.files("small").empty());
    EXPECT_EQ(write("small/file", draw_bytes(20000, 1)), CG_OK) << "the space is free again";
    std::vector<uint8_t> got;
    EXPECT_EQ(read("small/file", &got, 20000, CG_IO_DIRECT), CG_OK) << "across a mount point";
    EXPECT_TRUE(got == draw_bytes(20000, 1));
    umount2(mount_point.c_str(), MNT_DETACH);
}

TEST_P(IoTest, SaysWhyAFileCannotBeWritten)
{
    ASSERT_EQ(mkdirat(dir.fd, "folder", 0700), 0);
    dir.write("file", std::string("x"));
    EXPECT_EQ(write("folder", draw_bytes(10, 1)), CG_ERR_EXISTS);
    EXPECT_NE(write("folder", draw_bytes(10, 1), true), CG_OK);
    EXPECT_EQ(write("file/below", draw_bytes(10, 1)), CG_ERR_NOT_FOUND);
    EXPECT_EQ(write("file/further/below", draw_bytes(10, 1), true), CG_ERR_NOT_FOUND);
    EXPECT_EQ(dir.files().size(), 1u) << "a temporary file is left";
}

TEST_P(IoTest, WakesAWaiterFromAnyThread)
{
    cg_io_completion completion;
    size_t n = 99;
    cg_io_wake(io); // before the wait
    ASSERT_EQ(cg_io_wait(io, UINT64_MAX, &completion, 1, &n), CG_OK);
    EXPECT_EQ(n, 0u);
    std::thread waker([&] { cg_io_wake(io); });
    ASSERT_EQ(cg_io_wait(io, UINT64_MAX, &completion, 1, &n), CG_OK);
    EXPECT_EQ(n, 0u);
    waker.join();
    for (int i = 0; i < 3; i++)
        ASSERT_EQ(cg_io_wait(io, 1000, &completion, 1, &n), CG_OK) << "a time-out is no error";
}

TEST_P(IoTest, LetsBuffersOutliveTheQueue)
{
    const std::vector<uint8_t> bytes = draw_bytes(300000, 1);
    dir.write("file", bytes);
    std::vector<Buffer> buffers;
    for (int i = 0; i < 5; i++) {
        ASSERT_EQ(cg_io_read_range(io, dir.fd, "file", 0, bytes.size(), CG_IO_DIRECT, 1), CG_OK);
        buffers.emplace_back(wait_for_one().buffer);
    }
    cg_io_free(io, SECOND_NS);
    io = nullptr;
    for (const Buffer &buffer : buffers) {
        ASSERT_NE(buffer, nullptr);
        EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), buffer->data));
    }
    std::vector<std::thread> threads;
    for (Buffer &buffer : buffers)
        threads.emplace_back([b = std::move(buffer)]() mutable { b.reset(); });
    for (std::thread &thread : threads)
        thread.join();
}

TEST_P(IoTest, ReusesBuffers)
{
    dir.write("file", draw_bytes(300000, 1));
    std::set<const uint8_t *> seen;
    for (int i = 0; i < 50; i++) {
        ASSERT_EQ(cg_io_read_range(io, dir.fd, "file", 0, 300000, CG_IO_DIRECT, 1), CG_OK);
        const Buffer buffer(wait_for_one().buffer);
        ASSERT_NE(buffer, nullptr);
        seen.insert(buffer->data);
    }
    EXPECT_EQ(seen.size(), 1u);
}

// A look-up has hundreds of them under way.
TEST_P(IoTest, ReadsOfAFewBytesTakeAPageEachAndPinNothing)
{
    dir.write("file", draw_bytes(300000, 1));
    const unsigned long before = pinned_kib();
    std::vector<Buffer> held;
    for (int i = 0; i < 20; i++) {
        const uint64_t n_bytes = i % 2 == 0 ? 100 : 4096;
        ASSERT_EQ(cg_io_read_range(io, dir.fd, "file", 0, n_bytes, CG_IO_CACHED, 1), CG_OK);
        held.emplace_back(wait_for_one().buffer);
        ASSERT_NE(held.back(), nullptr);
        EXPECT_EQ(held.back()->capacity_bytes, 4096u);
    }
    EXPECT_LE(pinned_kib(), before); // rings of tests before this one are taken down by and by
}

TEST_P(IoTest, StaysWholeWhileOthersKeepManyBuffers)
{
    const size_t n = 3 << 20; // past what the pool keeps and the ring registers
    const std::vector<uint8_t> bytes = draw_bytes(n, 1);
    dir.write("file", bytes);
    for (int round = 0; round < 3; round++) {
        std::vector<Buffer> held;
        for (int i = 0; i < 100; i++) {
            ASSERT_EQ(cg_io_read_range(io, dir.fd, "file", 0, n, CG_IO_CACHED, 1), CG_OK);
            held.emplace_back(wait_for_one().buffer);
            ASSERT_NE(held.back(), nullptr);
        }
        for (const Buffer &buffer : held)
            ASSERT_EQ(memcmp(buffer->data, bytes.data(), n), 0);
    }
}

TEST_P(IoTest, CanBeFreedWithEverythingUnderWay)
{
    const std::vector<uint8_t> bytes = draw_bytes(1 << 20, 1);
    for (int i = 0; i < 8; i++)
        dir.write("file" + std::to_string(i), bytes);
    for (int i = 0; i < 8; i++)
        ASSERT_EQ(cg_io_read_range(io, dir.fd, ("file" + std::to_string(i)).c_str(), 0,
                                   bytes.size(), CG_IO_DIRECT, 1),
                  CG_OK);
    for (int i = 0; i < 4; i++)
        ASSERT_EQ(cg_io_write(io, dir.fd, ("new" + std::to_string(i)).c_str(), bytes.data(),
                              bytes.size(), false, 2),
                  CG_OK);
    cg_io_free(io, 20 * SECOND_NS);
    io = nullptr;
    for (int i = 0; i < 4; i++)
        EXPECT_TRUE(dir.read("new" + std::to_string(i)) == bytes) << "writes are finished";
    EXPECT_EQ(dir.files().size(), 12u) << "a temporary file is left";
}

TEST_P(IoTest, CompletesAbandonedOperationsOnce)
{
    dir.write("file", draw_bytes(1 << 20, 1));
    for (uint64_t i = 0; i < 10; i++)
        ASSERT_EQ(
            cg_io_read_range(io, dir.fd, "file", 0, i % 4 == 0 ? 500000 : 1 << 20, CG_IO_DIRECT, i),
            CG_OK);
    for (uint64_t i = 0; i < 10; i += 2)
        cg_io_abandon(io, i);
    cg_io_abandon(io, 12345);
    std::set<uint64_t> seen;
    for (int i = 0; i < 10; i++) {
        const cg_io_completion c = wait_for_one();
        const Buffer buffer(c.buffer);
        EXPECT_TRUE(seen.insert(c.user).second) << "twice";
        EXPECT_TRUE(c.status == CG_OK || (c.status == CG_ERR_TIMED_OUT && c.user % 2 == 0))
            << c.status;
    }
    EXPECT_EQ(cg_io_n_under_way(io), 0u);
    // What was abandoned and is not hung is let go of.
    cg_io_completion completion;
    size_t n;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (cg_io_n_abandoned(io) > 0 && std::chrono::steady_clock::now() < deadline)
        ASSERT_EQ(cg_io_wait(io, 1000000, &completion, 1, &n), CG_OK);
    EXPECT_EQ(cg_io_n_abandoned(io), 0u);
    std::vector<uint8_t> got;
    EXPECT_EQ(read("file", &got, 1 << 20), CG_OK);
}

TEST_P(IoTest, PublishesNothingOfAWriteAbandonedEarlyOrAllOfIt)
{
    const std::vector<uint8_t> bytes = draw_bytes(1 << 20, 1);
    for (int i = 0; i < 20; i++) {
        const std::string name = "file" + std::to_string(i);
        ASSERT_EQ(cg_io_write(io, dir.fd, name.c_str(), bytes.data(), bytes.size(), false, 5),
                  CG_OK);
        cg_io_abandon(io, 5);
        wait_for_one();
    }
    cg_io_free(io, 20 * SECOND_NS); // waits for their clean-up
    io = nullptr;
    for (const std::string &name : dir.files()) {
        EXPECT_NE(name[0], '.') << "a temporary file is left";
        EXPECT_TRUE(dir.read(name) == bytes) << name;
    }
}

TEST(IoNewTest, ChoosesABackend)
{
    cg_io *io;
    ASSERT_EQ(cg_io_new(nullptr, &io), CG_OK);
    char reason[256] = "unset";
    EXPECT_EQ(cg_io_backend_in_use(io),
              cg_io_uring_reason(reason, sizeof reason) ? CG_IO_URING : CG_IO_THREADS);
    EXPECT_EQ(cg_io_backend_in_use(io) == CG_IO_URING, reason[0] == '\0');
    cg_io_free(io, 0);
    cg_io_free(nullptr, 0);
    cg_io_buffer_release(nullptr);
    cg_io_config bad = {};
    bad.backend = static_cast<cg_io_backend>(3);
    EXPECT_EQ(cg_io_new(&bad, &io), CG_ERR_INVALID_ARGUMENT);
}

// Runs in a process of its own, which may give up what it is allowed. What it returns is its exit
// status; it says on stderr what is wrong.
template <typename Run> int status_of_child(const Run &run)
{
    const pid_t child = fork();
    if (child == 0)
        _exit(run());
    int status = -1;
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status)
               ? WEXITSTATUS(status)
               : -1;
}

int complain(const char *what)
{
    fprintf(stderr, "%s\n", what);
    return 1;
}

// Waits for a read of so many bytes, and of these (NULL: any).
int take_bytes(cg_io *io, uint64_t n_bytes, const uint8_t *bytes)
{
    cg_io_completion done;
    size_t n = 0;
    if (cg_io_wait(io, 20 * SECOND_NS, &done, 1, &n) != CG_OK || n != 1)
        return complain("a read does not complete");
    const Buffer buffer(done.buffer);
    if (done.status != CG_OK || buffer->n_bytes != n_bytes ||
        (bytes != nullptr && memcmp(buffer->data, bytes, n_bytes) != 0))
        return complain("a read is wrong");
    return 0;
}

// Reads the file of these bytes three times: the same buffer again.
int read_thrice(cg_io *io, int dir_fd, const std::vector<uint8_t> &bytes)
{
    for (int i = 0; i < 3; i++) {
        if (cg_io_read_range(io, dir_fd, "file", 0, bytes.size(), CG_IO_CACHED, 1) != CG_OK)
            return complain("a read does not begin");
        if (take_bytes(io, bytes.size(), bytes.data()) != 0)
            return 1;
    }
    return 0;
}

// As in a container with a small --ulimit memlock.
TEST(IoNewTest, WithoutLockedMemoryNothingIsPinned)
{
    char reason[256];
    if (!cg_io_uring_reason(reason, sizeof reason))
        CG_SKIP_OR_FAIL("uring", "nothing would be pinned: " << reason);
    const cg_test::TempDir dir;
    const std::vector<uint8_t> bytes = draw_bytes(300000, 1);
    dir.write("file", bytes);
    enum { PINNED = 2 };
    const auto read = [&](cg_io_backend backend, rlim_t limit) {
        const struct rlimit most = {limit, limit};
        struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
        const struct __user_cap_data_struct sets[2] = {};
        if (limit != RLIM_INFINITY &&
            (setrlimit(RLIMIT_MEMLOCK, &most) != 0 || syscall(SYS_capset, &header, sets) != 0))
            return complain("it may still lock memory");
        const cg_io_config config = {backend, 0, 0, 0};
        cg_io *io;
        if (cg_io_new(&config, &io) != CG_OK)
            return complain("no queue");
        const unsigned long before = pinned_kib();
        const int status = read_thrice(io, dir.fd, bytes);
        return status == 0 && pinned_kib() > before ? PINNED : status;
    };
    // Enough for the rings, which newer kernels count, too, and not for a buffer.
    EXPECT_EQ(status_of_child([&] { return read(CG_IO_URING, 256 << 10); }), 0);
    // Not even for the rings: with those kernels threads read.
    EXPECT_EQ(status_of_child([&] { return read(CG_IO_AUTO, 0); }), 0);
    if (status_of_child([&] { return read(CG_IO_URING, RLIM_INFINITY); }) != PINNED)
        GTEST_SKIP() << "nothing is pinned here in any case";
}

// Threads of the kernel's that work for rings of this process.
size_t n_workers()
{
    size_t n = 0;
    for (const auto &task : std::filesystem::directory_iterator("/proc/self/task")) {
        std::ifstream comm(task.path() / "comm");
        std::string name;
        n += std::getline(comm, name) && name.rfind("iou-wrk", 0) == 0;
    }
    return n;
}

// As with a small --ulimit nofile, or a kernel before 5.19.
TEST(IoNewTest, WithFewDescriptorsTheQueueIsNotAsDeep)
{
    char reason[256];
    if (!cg_io_uring_reason(reason, sizeof reason))
        CG_SKIP_OR_FAIL("uring", "threads have few descriptors in any case: " << reason);
    const cg_test::TempDir dir;
    const std::vector<uint8_t> bytes = draw_bytes(4096, 1);
    dir.write("file", bytes);
    EXPECT_EQ(status_of_child([&] {
                  const struct rlimit few = {256, 256};
                  const cg_io_config config = {CG_IO_URING, 896, 0, 0};
                  cg_io *io;
                  if (setrlimit(RLIMIT_NOFILE, &few) != 0 || cg_io_new(&config, &io) != CG_OK)
                      return complain("no queue");
                  uint64_t n = 0;
                  while (cg_io_read_range(io, dir.fd, "file", 0, 4096, CG_IO_CACHED, n) == CG_OK)
                      n++;
                  if (n < 16 || n > 128)
                      return complain("as many as ever, or next to none");
                  while (cg_io_n_under_way(io) > 0)
                      if (take_bytes(io, bytes.size(), bytes.data()) != 0)
                          return 1;
                  cg_io_free(io, 0);
                  return 0;
              }),
              0);
}

// As in a container with a small --pids-limit.
TEST(IoNewTest, WithFewThreadsMostOfThemAreTheHosts)
{
    char reason[256];
    if (!cg_io_uring_reason(reason, sizeof reason))
        CG_SKIP_OR_FAIL("uring", "there are no workers: " << reason);
    EXPECT_EQ(status_of_child([&] {
                  const struct rlimit few = {200, 200};
                  static cg_io_ring ring;
                  unsigned workers[2] = {};
                  if (setrlimit(RLIMIT_NPROC, &few) != 0 ||
                      !cg_io_ring_init(&ring, 960, nullptr, 0) ||
                      io_uring_register_iowq_max_workers(&ring.ring, workers) != 0)
                      return complain("no ring");
                  return workers[0] > 0 && workers[0] <= 50 ? 0 : complain("too many, or none");
              }),
              0);
}

// Reads parts of the file, all at once. open: NULL, or the open file.
int read_parts(cg_io *io, int dir_fd, uint64_t n_bytes, cg_open_file *open)
{
    for (uint32_t i = 0; i < 8; i++)
        if ((open != nullptr ? cg_io_read_file(io, open, i * n_bytes, n_bytes, i)
                             : cg_io_read_range(io, dir_fd, "file", i * n_bytes, n_bytes,
                                                CG_IO_CACHED, i)) != CG_OK)
            return complain("a read does not begin");
    while (cg_io_n_under_way(io) > 0)
        if (take_bytes(io, n_bytes, nullptr) != 0)
            return 1;
    return 0;
}

// What is cached comes with the call that asks for it, unless a worker is told to copy it.
TEST(IoNewTest, WorkersCopyLargeReads)
{
    char reason[256];
    if (!cg_io_uring_reason(reason, sizeof reason))
        CG_SKIP_OR_FAIL("uring", "there are no workers: " << reason);
    const cg_test::TempDir dir;
    dir.write("file", draw_bytes(8 << 20, 1));
    enum { NOT_LOCAL = 2, BY_THE_CALLER = 3 };
    for (const bool is_open : {false, true}) {
        SCOPED_TRACE(is_open);
        const int status = status_of_child([&] {
            const cg_io_config config = {CG_IO_URING, 0, 0, 0};
            cg_io *io;
            if (cg_io_new(&config, &io) != CG_OK)
                return complain("no queue");
            cg_open_file *const file =
                is_open ? cg_open_file_new(openat(dir.fd, "file", O_RDONLY)) : nullptr;
            if (read_parts(io, dir.fd, 4096, file) != 0)
                return 1;
            if (n_workers() > 0)
                return int{NOT_LOCAL};
            if (read_parts(io, dir.fd, 1 << 20, file) != 0)
                return 1;
            return n_workers() > 0 ? 0 : int{BY_THE_CALLER};
        });
        if (status == NOT_LOCAL)
            GTEST_SKIP() << "this file system's files are always read by workers";
        EXPECT_EQ(status, 0);
    }
}

// As in a container that has all the threads it may have.
TEST(IoNewTest, WithoutWorkersLargeReadsAreCopiedByTheCallerAndFilesClosed)
{
    char reason[256];
    if (!cg_io_uring_reason(reason, sizeof reason))
        CG_SKIP_OR_FAIL("uring", "there are no workers: " << reason);
    if (geteuid() != 0)
        GTEST_SKIP() << "only root can become a user without other threads";
    const cg_test::TempDir dir;
    const uid_t NOBODY = 65534 - 4321;
    dir.write("file", draw_bytes(8 << 20, 1));
    ASSERT_EQ(fchown(dir.fd, NOBODY, NOBODY), 0);
    ASSERT_EQ(fchownat(dir.fd, "file", NOBODY, NOBODY, 0), 0);
    enum { NOT_LIMITED = 2 };
    for (const bool is_open : {false, true}) {
        SCOPED_TRACE(is_open);
        const int status = status_of_child([&] {
            const struct rlimit one = {1, 1};
            const cg_io_config config = {CG_IO_URING, 0, 0, 0};
            cg_io *io;
            if (setresgid(NOBODY, NOBODY, NOBODY) != 0 || setresuid(NOBODY, NOBODY, NOBODY) != 0 ||
                setrlimit(RLIMIT_NPROC, &one) != 0 || cg_io_new(&config, &io) != CG_OK)
                return complain("no queue");
            cg_open_file *const file =
                is_open ? cg_open_file_new(openat(dir.fd, "file", O_RDONLY)) : nullptr;
            if (read_parts(io, dir.fd, 1 << 20, file) != 0)
                return 1;
            const int extra = openat(dir.fd, "file", O_RDONLY);
            cg_io_completion closed;
            size_t n_closed = 0;
            if (cg_io_close(io, extra, 1) != CG_OK ||
                cg_io_wait(io, UINT64_MAX, &closed, 1, &n_closed) != CG_OK || n_closed != 1)
                return complain("a close does not end");
            if (fcntl(extra, F_GETFD) >= 0)
                return complain("a file stays open");
            return n_workers() == 0 ? 0 : int{NOT_LIMITED};
        });
        if (status == NOT_LIMITED)
            GTEST_SKIP() << "this kernel gives workers beyond the limit";
        EXPECT_EQ(status, 0);
    }
}

// As the default filters of containers.
TEST(IoNewTest, WhereSeccompForbidsIoUringThreadsRead)
{
    const cg_test::TempDir dir;
    const std::vector<uint8_t> bytes = draw_bytes(300000, 1);
    dir.write("file", bytes);
    EXPECT_EQ(status_of_child([&] {
                  struct sock_filter filter[] = {
                      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
                      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
                      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
                      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
                  };
                  const struct sock_fprog program = {sizeof filter / sizeof filter[0], filter};
                  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
                      prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
                      return complain("no filter");
                  cg_io *io;
                  char reason[256];
                  const cg_io_config config = {CG_IO_URING, 0, 0, 0};
                  if (cg_io_new(&config, &io) != CG_ERR_UNSUPPORTED)
                      return complain("io_uring is not refused");
                  if (cg_io_uring_reason(reason, sizeof reason) ||
                      strstr(reason, "seccomp") == nullptr)
                      return complain(reason);
                  if (cg_io_new(nullptr, &io) != CG_OK || cg_io_backend_in_use(io) != CG_IO_THREADS)
                      return complain("no threads in its place");
                  const int status = read_thrice(io, dir.fd, bytes);
                  cg_io_free(io, SECOND_NS);
                  return status;
              }),
              0);
}

} // namespace
