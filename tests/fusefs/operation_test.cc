// What keeps a daemon working for long: things that change past it, and callers it cannot tell
// apart. No mount.
#include "fusefs/lanes.h"
#include "tests/fusefs/fs_fixture.h"

#include <filesystem>

using namespace cg_test;

namespace
{

TEST_F(FsTest, CallersWithoutAProcessNumberShareNothing)
{
    cg_fs_file *file, *second;
    fs.caller.pid = 0; /* as the kernel says of processes outside of our PID namespace */
    ASSERT_EQ(fs.create(CHUNK, &file), 0);
    ASSERT_EQ(fs.write(file, Bytes(100, 'x')), 0);
    EXPECT_EQ(fs.look(CHUNK), ENOENT) << "it may be another process";
    ASSERT_EQ(fs.create(CHUNK, &second), 0);
    EXPECT_EQ(fs.write(second, chunk.bytes), 0);
    EXPECT_EQ(fs.close(second), 0);
    cg_fs_release(fs.fs, file);
    EXPECT_EQ(fs.get(CHUNK), chunk.bytes);
}

TEST_F(FsTest, NamesThatWentPastTheDaemonAreForgotten)
{
    store.write("m/file", Bytes{1});
    cg_fs_node *node = fs.find("m/file");
    for (int i = 0; i < 50; i++) {
        const std::string name = "m/link" + std::to_string(i);
        ASSERT_EQ(linkat(store.fd, "m/file", store.fd, name.c_str(), 0), 0);
        ASSERT_EQ(fs.find(name), node);
        ASSERT_EQ(unlinkat(store.fd, name.c_str(), 0), 0);
    }
    struct stat attr;
    ASSERT_EQ(cg_fs_getattr(fs.fs, node, &attr), 0);
    EXPECT_LE(cg_fs_nodes(fs.fs)->n_names, 10u);
    EXPECT_EQ(fs.get("m/file"), Bytes{1});
}

TEST_F(FsTest, InodeNumberThatComesBackIsNoPublishedFile)
{
    ASSERT_EQ(fs.put(CHUNK, chunk.bytes), 0);
    cg_fs_node *node = fs.find(CHUNK);
    /* Past the daemon the chunk goes, and its number comes back: the same file stands for it. */
    ASSERT_EQ(unlinkat(store.fd, object_of(chunk).c_str(), 0), 0);
    ASSERT_EQ(renameat(store.fd, CHUNK.c_str(), store.fd, "m/ordinary"), 0);
    ASSERT_EQ(fs.find("m/ordinary"), node);
    cg_fs_file *file;
    ASSERT_EQ(fs.open("m/ordinary", O_RDWR, &file), 0);
    EXPECT_EQ(fs.write(file, Bytes{1}), 0);
    EXPECT_EQ(fs.close(file), 0);
}

TEST_F(FsTest, StagingFolderThatWasRemovedIsMadeAgain)
{
    ASSERT_EQ(fs.put(CHUNK, chunk.bytes), 0);
    std::filesystem::remove_all(store.path + "/.cachegenfs-tmp");
    EXPECT_EQ(fs.put(L1 + "/00001.kv", other.bytes), 0);
    for (const auto &entry : std::filesystem::directory_iterator(store.path + "/.cachegenfs-tmp"))
        std::filesystem::remove_all(entry);
    EXPECT_EQ(fs.put(L1 + "/00002.kv", other.bytes), 0);
    EXPECT_EQ(fs.get(L1 + "/00002.kv"), other.bytes);
    {
        Fs second(store.path);
        EXPECT_EQ(fs.put(L1 + "/00003.kv", other.bytes), 0) << "it is locked, as the first was";
    }
}

TEST_F(FsTest, AdoptingEndsWhenItIsToldTo)
{
    store.write("m/contexts/past/L1/00000.kv", chunk.bytes);
    cg_fs_stop(fs.fs);
    cg_fs_adopt_tree(fs.fs);
    EXPECT_FALSE(store.has("m/objects"));
}

class LanesTest : public testing::Test
{
  protected:
    void SetUp() override
    {
        cg_lanes_init(&lanes);
    }
    void TearDown() override
    {
        cg_lanes_destroy(&lanes);
    }
    cg_lanes lanes;
};

TEST_F(LanesTest, UserHasAPartOfTheChangesAndOthersTheRest)
{
    for (int i = 0; i < CG_LANE_USER_REQUESTS; i++)
        EXPECT_TRUE(cg_lanes_begin(&lanes, CG_LANE_CHANGE, 1000));
    EXPECT_FALSE(cg_lanes_begin(&lanes, CG_LANE_CHANGE, 1000));
    EXPECT_TRUE(cg_lanes_begin(&lanes, CG_LANE_CHANGE, 1001));
    EXPECT_TRUE(cg_lanes_begin(&lanes, CG_LANE_READ, 1000));
    cg_lane_job mine{CG_LANE_CHANGE, 1000, nullptr}, more{CG_LANE_CHANGE, 1000, nullptr};
    EXPECT_FALSE(cg_lanes_begin_or_wait(&lanes, &mine));
    EXPECT_FALSE(cg_lanes_begin_or_wait(&lanes, &more));
    EXPECT_EQ(cg_lanes_end(&lanes, CG_LANE_CHANGE, 1001), nullptr) << "not for this user";
    EXPECT_EQ(cg_lanes_end(&lanes, CG_LANE_CHANGE, 1000), &mine);
    EXPECT_EQ(cg_lanes_take_waiting(&lanes), &more);
    EXPECT_EQ(cg_lanes_take_waiting(&lanes), nullptr);
}

TEST_F(LanesTest, FullLaneKeepsNoOtherLaneWaiting)
{
    for (uid_t uid = 0; uid < CG_LANE_REQUESTS; uid++)
        EXPECT_TRUE(cg_lanes_begin(&lanes, CG_LANE_CHANGE, uid));
    cg_lane_job job{CG_LANE_CHANGE, 5000, nullptr};
    EXPECT_FALSE(cg_lanes_begin_or_wait(&lanes, &job));
    for (int i = 0; i < CG_LANE_REQUESTS; i++)
        EXPECT_TRUE(cg_lanes_begin(&lanes, CG_LANE_READ, 0));
    EXPECT_FALSE(cg_lanes_begin(&lanes, CG_LANE_READ, 0));
    EXPECT_TRUE(cg_lanes_begin(&lanes, CG_LANE_FREE, 0));
    EXPECT_EQ(cg_lanes_end(&lanes, CG_LANE_FREE, 0), nullptr);
    EXPECT_EQ(cg_lanes_end(&lanes, CG_LANE_READ, 0), nullptr);
    EXPECT_EQ(cg_lanes_end(&lanes, CG_LANE_CHANGE, 3), &job);
}

} // namespace
