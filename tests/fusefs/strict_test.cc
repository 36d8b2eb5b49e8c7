// What a check of a file under a strict name takes. No mount, and no file system core.
#include "codec/cursor.h"
#include "fusefs/strict.h"
#include "tests/iouring/temp_dir.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <fstream>
#include <iterator>
#include <mutex>
#include <thread>
#include <vector>

using namespace cg_test;

namespace
{

using Bytes = std::vector<uint8_t>;

class StrictTest : public testing::Test
{
  protected:
    StrictTest()
    {
        cg_strict_budget_init(&budget, UINT64_C(256) << 20);
        std::ifstream in(CG_GOLDEN "/profile.cgp", std::ios::binary);
        good.assign(std::istreambuf_iterator<char>(in), {});
        fd = open((dir.path + "/file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    }
    ~StrictTest() override
    {
        close(fd);
        cg_strict_budget_destroy(&budget);
    }
    void put(const Bytes &bytes)
    {
        ASSERT_EQ(pwrite(fd, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    }
    static cg_tree_name profile_name(const Bytes &bytes)
    {
        cg_tree_name name = {};
        name.kind = CG_TREE_PROFILE;
        name.key = cg_key_of_bytes(bytes.data(), bytes.size());
        return name;
    }
    cg_status check(const cg_tree_name &name)
    {
        cg_chunk_header header;
        return cg_strict_check(fd, &name, &budget, UINT64_MAX, &header);
    }
    // The most memory that the process has had.
    static uint64_t peak_bytes()
    {
        struct rusage usage;
        getrusage(RUSAGE_SELF, &usage);
        return static_cast<uint64_t>(usage.ru_maxrss) << 10;
    }

    TempDir dir;
    cg_strict_budget budget;
    Bytes good;
    int fd;
};

TEST_F(StrictTest, HoleUnderTheNameOfAProfileTakesNoMemory)
{
    const uint64_t hole_bytes = UINT64_C(512) << 20, before = peak_bytes();
    Bytes head(good.begin(), good.begin() + 80);
    ASSERT_EQ(ftruncate(fd, static_cast<off_t>(hole_bytes)), 0);
    EXPECT_EQ(check(profile_name(good)), CG_ERR_BAD_MAGIC);
    put(head);
    EXPECT_EQ(check(profile_name(good)), CG_ERR_CORRUPT) << "of another size";
    cg_put_le(head.data() + 16, 8, hole_bytes);
    put(head);
    EXPECT_EQ(check(profile_name(good)), CG_ERR_CORRUPT) << "of another checksum";
    EXPECT_LT(peak_bytes() - before, hole_bytes / 4);
}

TEST_F(StrictTest, ProfileWaitsForTwiceItsSize)
{
    const uint64_t memory_bytes = 2 * good.size() + (2 << 20);
    put(good);
    std::mutex lock;
    std::condition_variable changed;
    bool is_done = false;
    budget.limit_bytes = memory_bytes;
    budget.used_bytes = 1;
    std::thread checker([&] {
        EXPECT_EQ(check(profile_name(good)), CG_OK);
        const std::lock_guard<std::mutex> hold(lock);
        is_done = true;
        changed.notify_one();
    });
    {
        std::unique_lock<std::mutex> hold(lock);
        EXPECT_FALSE(
            changed.wait_for(hold, std::chrono::milliseconds(200), [&] { return is_done; }));
    }
    pthread_mutex_lock(&budget.lock);
    EXPECT_EQ(budget.used_bytes, 1u);
    budget.used_bytes = 0;
    pthread_cond_broadcast(&budget.freed);
    pthread_mutex_unlock(&budget.lock);
    checker.join();
    EXPECT_EQ(budget.used_bytes, 0u);
}

} // namespace
