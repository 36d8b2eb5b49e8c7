// fusefs/watch.h without a mount: what the kernel would be told.
#include "fusefs/open_files.h"
#include "tests/fusefs/fs_fixture.h"

#include <sys/stat.h>
#include <sys/xattr.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <set>
#include <thread>

using namespace cg_test;

namespace
{

// Stands for the kernel.
struct Kernel {
    static void forget(void *self, const cg_fs_node *node)
    {
        const std::lock_guard<std::mutex> hold(static_cast<Kernel *>(self)->lock);
        static_cast<Kernel *>(self)->forgotten.insert(node);
    }
    static void doubt(void *self)
    {
        static_cast<Kernel *>(self)->n_doubts++;
    }
    void forget_all()
    {
        const std::lock_guard<std::mutex> hold(lock);
        forgotten.clear();
    }
    bool has_forgotten(const cg_fs_node *node)
    {
        const std::lock_guard<std::mutex> hold(lock);
        return forgotten.count(node) > 0;
    }
    std::mutex lock;
    std::set<const cg_fs_node *> forgotten;
    std::atomic<int> n_doubts{0};
    cg_fs_kernel calls = {forget, doubt, this};
};

class WatchTest : public FsTest
{
  protected:
    void SetUp() override
    {
        FsTest::SetUp();
        const int error = cg_fs_watch_begin(fs.fs, &kernel.calls);
        if (error != 0)
            GTEST_SKIP() << "the store's changes cannot be watched: " << strerror(error);
    }
    void TearDown() override
    {
        cg_fs_stop(fs.fs);
        if (watcher.joinable())
            watcher.join();
    }
    void start()
    {
        watcher = std::thread([this] { cg_fs_watch(fs.fs); });
    }
    template <typename Condition> static bool comes(Condition condition)
    {
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
        while (!condition() && std::chrono::steady_clock::now() < end)
            std::this_thread::yield();
        return condition();
    }
    std::string below(const std::string &path) const
    {
        return store.path + "/" + path;
    }
    // Whether the kernel may keep the listing that it has of the folder.
    bool is_kept(const std::string &folder)
    {
        cg_fs_directory *directory;
        EXPECT_EQ(cg_fs_opendir(fs.fs, fs.find(folder), &directory), 0);
        const bool is = cg_fs_is_listed(directory);
        cg_fs_closedir(directory);
        return is;
    }
    // Its time of change is not that of what may still come.
    bool is_settled(const std::string &path) const
    {
        struct stat attr;
        return stat(below(path).c_str(), &attr) == 0 && attr.st_ctim.tv_sec + 2 < time(nullptr);
    }
    Kernel kernel;
    std::thread watcher;
};

TEST_F(WatchTest, IsToldOfFilesAndFolders)
{
    ASSERT_EQ(fs.put("m/file", {1, 2, 3}), 0);
    const cg_fs_node *file = fs.find("m/file"), *folder = fs.find("m");
    start();
    ASSERT_EQ(chmod(below("m/file").c_str(), 0600), 0);
    EXPECT_TRUE(comes([&] { return kernel.has_forgotten(file); }));
    EXPECT_EQ(kernel.n_doubts, 0);
    ASSERT_EQ(::rename(below("m/file").c_str(), below("file").c_str()), 0);
    EXPECT_TRUE(comes([&] { return kernel.n_doubts > 0; }));
    EXPECT_TRUE(kernel.has_forgotten(folder));
}

TEST_F(WatchTest, TooManyChangesMakeAllDoubtful)
{
    size_t max_events = 0;
    std::ifstream("/proc/sys/fs/fanotify/max_queued_events") >> max_events;
    if (max_events == 0 || max_events > 100000)
        GTEST_SKIP() << "the kernel notes too many changes to make more";
    const cg_fs_node *folder = fs.find(L1);
    for (size_t i = 0; i <= max_events; i++)
        ASSERT_EQ(mknod(below("file" + std::to_string(i)).c_str(), S_IFREG | 0600, 0), 0);
    start();
    EXPECT_TRUE(comes([&] { return kernel.n_doubts > 0; }));
    EXPECT_TRUE(kernel.has_forgotten(folder)) << "nothing happened to it";
    EXPECT_GE(fs.metric("watch_overflows_total"), 1u);
}

TEST_F(WatchTest, NothingIsTrustedAfterIt)
{
    start();
    EXPECT_TRUE(comes([&] { return cg_fs_is_watched(fs.fs); }));
    cg_fs_stop(fs.fs);
    watcher.join();
    EXPECT_FALSE(cg_fs_is_watched(fs.fs));
}

TEST_F(WatchTest, AListingIsKeptUntilItsFolderChanges)
{
    const auto is_listed = [this] { return is_kept("m"); };
    start();
    ASSERT_TRUE(comes([&] { return cg_fs_is_watched(fs.fs); }));
    EXPECT_FALSE(is_listed()) << "the folder has just changed";
    EXPECT_TRUE(comes(is_listed));
    ASSERT_EQ(mknod(below("m/new").c_str(), S_IFREG | 0600, 0), 0);
    EXPECT_FALSE(is_listed());
}

TEST_F(WatchTest, AListIsFoundOfAFolderWhoseListingIsKept)
{
    // An access control list that lets user 1 in, as the kernel takes it: tags, rights, users.
    const std::vector<uint32_t> list = {2,          0x70001, UINT32_MAX, 0x70002,
                                        1,          0x50004, UINT32_MAX, 0x70010,
                                        UINT32_MAX, 0x50020, UINT32_MAX};
    cg_fs_directory *directory;
    const auto is_listed = [this] { return is_kept("m"); };
    start();
    EXPECT_TRUE(comes(is_listed));
    if (setxattr(below("m").c_str(), "system.posix_acl_access", list.data(), 4 * list.size(), 0) !=
        0)
        GTEST_SKIP() << "the store has no access control lists";
    for (int i = 0; i < 2; i++)
        EXPECT_EQ(cg_fs_opendir(fs.fs, fs.find("m"), &directory), EACCES);
    EXPECT_TRUE(comes([&] { return is_settled("m"); }));
    for (int i = 0; i < 2; i++)
        EXPECT_EQ(cg_fs_opendir(fs.fs, fs.find("m"), &directory), EACCES);
}

TEST_F(WatchTest, PagesOfAFileAreKeptUntilItChanges)
{
    cg_fs_file *file;
    const auto is_unchanged = [&] {
        EXPECT_EQ(cg_fs_open(fs.fs, fs.find("m/file"), O_RDONLY, &file), 0);
        const bool is = file->unchanged;
        cg_fs_release(fs.fs, file);
        return is;
    };
    ASSERT_EQ(fs.put("m/file", {1, 2, 3}), 0);
    EXPECT_FALSE(is_unchanged()) << "nobody would see changes";
    start();
    ASSERT_TRUE(comes([&] { return cg_fs_is_watched(fs.fs); }));
    EXPECT_FALSE(is_unchanged()) << "the file has just changed";
    EXPECT_TRUE(comes(is_unchanged));
    EXPECT_TRUE(is_unchanged());
    std::ofstream(below("m/file"), std::ios::app) << "more";
    EXPECT_FALSE(is_unchanged());
    ASSERT_TRUE(comes([&] { return is_settled("m/file"); }));
    is_unchanged(); /* notes it, if the look before did not */
    EXPECT_TRUE(is_unchanged());
    ASSERT_EQ(fs.put("m/other", {4, 5, 6, 7}), 0);
    ASSERT_EQ(::rename(below("m/other").c_str(), below("m/file").c_str()), 0);
    EXPECT_FALSE(is_unchanged()) << "another file";
}

TEST_F(WatchTest, WhatIsOpenForTheFirstTimeIsNotNoted)
{
    cg_fs_file *first, *second;
    ASSERT_EQ(fs.put("m/file", {1, 2, 3}), 0);
    start();
    ASSERT_TRUE(comes([&] { return cg_fs_is_watched(fs.fs); }));
    ASSERT_TRUE(comes([&] { return is_settled("m/file"); }));
    ASSERT_EQ(cg_fs_open(fs.fs, fs.find("m/file"), O_RDONLY, &first), 0);
    EXPECT_EQ(cg_fs_open(fs.fs, fs.find("m/file"), O_RDONLY, &second), 0);
    EXPECT_FALSE(second->unchanged) << "the kernel may still have older pages";
    cg_fs_release(fs.fs, first);
    cg_fs_release(fs.fs, second);
    EXPECT_EQ(cg_fs_open(fs.fs, fs.find("m/file"), O_RDONLY, &second), 0);
    EXPECT_TRUE(second->unchanged);
    cg_fs_release(fs.fs, second);
}

// As at the end of a long write, whose time of change is that of its beginning. Another process:
// what this one writes the kernel knows.
TEST_F(WatchTest, AWriteThatEndsVoidsWhatWasNotedDuringIt)
{
    cg_fs_file *file;
    const auto is_unchanged = [&] {
        EXPECT_EQ(cg_fs_open(fs.fs, fs.find("m/file"), O_RDONLY, &file), 0);
        const bool is = file->unchanged;
        cg_fs_release(fs.fs, file);
        return is;
    };
    const auto end_write = [&] {
        kernel.forget_all();
        EXPECT_EQ(system((": >> '" + below("m/file") + "'").c_str()), 0);
        return comes([&] { return kernel.has_forgotten(fs.find("m/file")); });
    };
    ASSERT_EQ(fs.put("m/file", {1, 2, 3}), 0);
    start();
    ASSERT_TRUE(comes([&] { return cg_fs_is_watched(fs.fs); }));
    ASSERT_TRUE(comes([&] { return is_settled("m/file"); }));
    ASSERT_TRUE(comes(is_unchanged));
    ASSERT_TRUE(end_write());
    EXPECT_FALSE(is_unchanged()) << "noted before its end";
    ASSERT_TRUE(comes(is_unchanged));
    ASSERT_TRUE(end_write());
    ASSERT_EQ(cg_fs_open(fs.fs, fs.find("m/file"), O_RDONLY, &file), 0);
    ASSERT_TRUE(end_write());
    cg_fs_release(fs.fs, file);
    EXPECT_FALSE(is_unchanged()) << "open at its end";
}

} // namespace
