// Daemons of one store: what one at a time may do, and what becomes of their folders.
#include "fusefs/lease.h"
#include "tests/iouring/temp_dir.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <thread>
#include <vector>

namespace
{

class Daemon
{
  public:
    explicit Daemon(const std::string &store) : path_(store + "/" CG_STAGING_DIRECTORY)
    {
        root_fd_ = open(store.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        EXPECT_EQ(cg_staging_open(&staging, root_fd_, CG_STAGING_SILENT_S, &n_removed), 0);
    }
    ~Daemon()
    {
        cg_staging_close(&staging);
        close(root_fd_);
    }
    Daemon(const Daemon &) = delete;
    Daemon &operator=(const Daemon &) = delete;

    // Its lock falls as by a kill; its folder stays.
    void die()
    {
        close(staging.lock_fd);
        staging.lock_fd = -1;
    }
    std::string folder()
    {
        char own[CG_STAGING_OWN_BYTES];
        cg_staging_own(&staging, own);
        return path_ + "/" + own;
    }

    cg_staging staging = {};
    uint64_t n_removed = 0;

  private:
    std::string path_;
    int root_fd_;
};

class LeaseTest : public testing::Test
{
  protected:
    cg_test::TempDir dir;
    std::string lease = dir.path + "/" CG_STAGING_DIRECTORY "/evicting";
};

TEST_F(LeaseTest, OneAtATimeHasIt)
{
    Daemon a(dir.path), b(dir.path);
    EXPECT_TRUE(cg_lease_take(&a.staging, "evicting"));
    EXPECT_TRUE(cg_lease_take(&a.staging, "evicting")) << "it is ours already";
    EXPECT_FALSE(cg_lease_take(&b.staging, "evicting"));
    EXPECT_TRUE(cg_lease_take(&b.staging, "scrubbing"));
    cg_lease_give_back(&b.staging, "evicting");
    EXPECT_TRUE(cg_lease_holds(&a.staging, "evicting")) << "b had nothing to give back";
    cg_lease_give_back(&a.staging, "evicting");
    EXPECT_TRUE(cg_lease_take(&b.staging, "evicting"));
}

TEST_F(LeaseTest, ADeadHoldersLeaseIsTaken)
{
    Daemon a(dir.path), b(dir.path);
    ASSERT_TRUE(cg_lease_take(&a.staging, "evicting"));
    a.die();
    EXPECT_TRUE(cg_lease_take(&b.staging, "evicting"));
    EXPECT_FALSE(cg_lease_holds(&a.staging, "evicting")) << "if it was cut off, it stops";
    int64_t seen_s = 0;
    EXPECT_FALSE(cg_lease_still_holds(&a.staging, "evicting", &seen_s));
}

TEST_F(LeaseTest, SoIsThatOfOneWhoseFolderIsGoneAndWhatIsNoLease)
{
    Daemon a(dir.path), b(dir.path);
    ASSERT_TRUE(cg_lease_take(&a.staging, "evicting"));
    std::filesystem::remove_all(a.folder());
    EXPECT_TRUE(cg_lease_take(&b.staging, "evicting"));
    for (const char *text : {"", "../../../../../../../../../../../../", "x"}) {
        std::ofstream(lease, std::ios::trunc) << text;
        EXPECT_TRUE(cg_lease_take(&b.staging, "evicting")) << text;
    }
}

TEST_F(LeaseTest, OfManyWhoTakeItAtOnceOneGetsIt)
{
    constexpr int n = 8;
    std::vector<std::unique_ptr<Daemon>> daemons;
    for (int i = 0; i < n; i++)
        daemons.push_back(std::make_unique<Daemon>(dir.path));
    for (int round = 0; round < 20; round++) {
        std::atomic<int> n_holders{0};
        std::vector<std::thread> threads;
        for (auto &daemon : daemons)
            threads.emplace_back([&] { n_holders += cg_lease_take(&daemon->staging, "evicting"); });
        for (std::thread &thread : threads)
            thread.join();
        EXPECT_EQ(n_holders, 1) << round;
        for (auto &daemon : daemons)
            cg_lease_give_back(&daemon->staging, "evicting");
    }
}

TEST_F(LeaseTest, AFolderThatIsTakenAwayIsMadeAgainUnderAnotherName)
{
    Daemon a(dir.path);
    const std::string before = a.folder();
    EXPECT_EQ(cg_staging_make_again(&a.staging), 0);
    EXPECT_EQ(a.folder(), before) << "it was there";
    std::filesystem::remove_all(before);
    EXPECT_EQ(cg_staging_make_again(&a.staging), 0);
    EXPECT_NE(a.folder(), before);
    EXPECT_TRUE(std::filesystem::exists(a.folder()));
    EXPECT_EQ(a.staging.n_made_again, 1u);
}

TEST_F(LeaseTest, WhoStartsRemovesWhatADeadOneLeftAndNothingOfTheLiving)
{
    Daemon living(dir.path);
    std::ofstream(living.folder() + "/0") << "half";
    std::string dead;
    {
        Daemon daemon(dir.path);
        dead = daemon.folder();
    }
    EXPECT_FALSE(std::filesystem::exists(dead)) << "who ends takes it along";
    Daemon killed(dir.path);
    std::ofstream(killed.folder() + "/0") << "half";
    killed.die();
    Daemon next(dir.path);
    EXPECT_EQ(next.n_removed, 1u);
    EXPECT_FALSE(std::filesystem::exists(killed.folder()));
    EXPECT_TRUE(std::filesystem::exists(living.folder() + "/0"));
    std::filesystem::remove(living.folder() + "/0");
}

} // namespace
