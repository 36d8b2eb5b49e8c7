// Which daemons live, as other daemons see it, and what only one of them may do. Time is made up.
#include "fusefs/life.h"
#include "tests/iouring/temp_dir.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <string>

namespace
{

constexpr unsigned SILENT_S = 60;

// A store's folders of daemons: ours, which watches, and those of others.
class LifeTest : public testing::Test
{
  protected:
    void SetUp() override
    {
        cg_life_watch_init(&watch);
        all_fd = open(dir.path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        close(begin("own", &own));
    }
    void TearDown() override
    {
        cg_life_watch_destroy(&watch);
        close(all_fd);
    }
    // The lock.
    int begin(const std::string &name, cg_life *life)
    {
        int lock_fd = -1;
        EXPECT_EQ(mkdirat(all_fd, name.c_str(), 0700), 0);
        const int fd = openat(all_fd, name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        EXPECT_EQ(cg_life_begin(life, fd, SILENT_S, &lock_fd), 0);
        close(fd);
        return lock_fd;
    }
    // On another host, whose locks do not reach us.
    cg_life begin_far(const std::string &name)
    {
        cg_life life = {};
        close(begin(name, &life));
        life.boot[0] ^= 1;
        EXPECT_EQ(beat(&life, name), 0);
        return life;
    }
    int beat(cg_life *life, const std::string &name)
    {
        const int fd = openat(all_fd, name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        const int error = cg_life_beat(life, fd);
        close(fd);
        return error;
    }
    bool is_dead(const std::string &name, int64_t now_s)
    {
        return cg_life_is_dead(&watch, &own, all_fd, name.c_str(), now_s);
    }
    // Looks every ten seconds, from after begin_s on; the first time at which it is dead.
    int64_t dies_at(const std::string &name, int64_t begin_s, int64_t end_s)
    {
        for (int64_t now_s = begin_s; now_s <= end_s; now_s += 10)
            if (is_dead(name, now_s))
                return now_s;
        return -1;
    }

    cg_test::TempDir dir;
    cg_life_watch watch = {};
    cg_life own = {};
    int all_fd = -1;
};

TEST_F(LifeTest, OnOneHostTheLockTellsAtOnce)
{
    cg_life life = {};
    const int lock_fd = begin("other", &life);
    EXPECT_EQ(dies_at("other", 1000, 2000), -1);
    close(lock_fd);
    EXPECT_TRUE(is_dead("other", 2001));
}

TEST_F(LifeTest, WhoIsSilentForAsLongAsItSaysIsDead)
{
    cg_life life = begin_far("far");
    EXPECT_EQ(dies_at("far", 1000, 2000), 1060);
    EXPECT_EQ(beat(&life, "far"), 0);
    EXPECT_FALSE(is_dead("far", 1070));
}

TEST_F(LifeTest, WhoBeatsLives)
{
    cg_life life = begin_far("far");
    for (int64_t now_s = 1000; now_s < 3000; now_s += 25) {
        EXPECT_FALSE(is_dead("far", now_s)) << now_s;
        if (now_s % 50 == 0) {
            EXPECT_EQ(beat(&life, "far"), 0);
        }
    }
}

TEST_F(LifeTest, AGapInOurLooksSaysNothing)
{
    begin_far("far");
    EXPECT_EQ(dies_at("far", 1000, 1050), -1);
    EXPECT_EQ(dies_at("far", 5000, 5050), -1) << "we were cut off, and it perhaps with us";
    EXPECT_EQ(dies_at("far", 5060, 9000), 5060);
}

TEST_F(LifeTest, AFolderWithoutAFileIsOfOneThatWasKilledAndOneWithAnEmptyFileIsOld)
{
    ASSERT_EQ(mkdirat(all_fd, "bare", 0700), 0);
    ASSERT_EQ(mkdirat(all_fd, "empty", 0700), 0);
    std::ofstream(dir.path + "/empty/lock").close();
    EXPECT_EQ(dies_at("bare", 1000, 2000), 1060);
    EXPECT_EQ(dies_at("empty", 1000, 1000 + 23 * 3600), -1);
}

TEST_F(LifeTest, WhatIsNoTextIsWatchedAllTheSame)
{
    ASSERT_EQ(mkdirat(all_fd, "odd", 0700), 0);
    std::ofstream(dir.path + "/odd/lock") << std::string(CG_LIFE_TEXT_BYTES, '\xff');
    EXPECT_EQ(dies_at("odd", 1000, 2000), 1060);
    std::ofstream(dir.path + "/file") << "x";
    EXPECT_EQ(dies_at("file", 1000, 2000), -1) << "no folder of a daemon";
}

TEST_F(LifeTest, WhoseFolderIsGoneLearnsIt)
{
    cg_life life = begin_far("far");
    ASSERT_EQ(unlinkat(all_fd, "far/lock", 0), 0);
    EXPECT_EQ(beat(&life, "far"), ENOENT);
}

} // namespace
