// fusefs/watch.h without a mount: what the kernel would be told.
#include "fusefs/open_files.h"
#include "tests/fusefs/call_hooks.h"
#include "tests/fusefs/fs_fixture.h"

#include <sys/mount.h>
#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <map>
#include <memory>
#include <thread>

using namespace cg_test;

namespace
{

// Stands for the kernel.
struct Kernel {
    static void forget(void *self, const cg_node_ref *ref)
    {
        static_cast<Kernel *>(self)->n_told++;
        const std::lock_guard<std::mutex> hold(static_cast<Kernel *>(self)->lock);
        static_cast<Kernel *>(self)->forgotten[ref->node] = ref->is_folder;
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
    bool has_forgotten_listing(const cg_fs_node *node)
    {
        const std::lock_guard<std::mutex> hold(lock);
        return forgotten.count(node) > 0 && forgotten[node];
    }
    std::mutex lock;
    std::map<const cg_fs_node *, bool> forgotten; // is it a folder?
    // n_told: of files, also while somebody has the lock.
    std::atomic<int> n_doubts{0}, n_told{0};
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
        while (!condition()) {
            if (std::chrono::steady_clock::now() >= end)
                return false;
            std::this_thread::yield();
        }
        return true;
    }
    std::string below(const std::string &path) const
    {
        return store.path + "/" + path;
    }
    // Whether the kernel may remember that there is no such name.
    bool may_remember_missing(const std::string &path)
    {
        cg_fs_entry entry;
        const size_t slash = path.rfind('/');
        EXPECT_EQ(cg_fs_lookup(fs.fs, &fs.caller, fs.find(path.substr(0, slash)),
                               path.substr(slash + 1).c_str(), &entry),
                  ENOENT);
        return !entry.may_not_be_cached;
    }
    // All that was changed until now has been told.
    void come_to_here()
    {
        kernel.forget_all();
        ASSERT_EQ(chmod(below("m/other").c_str(), 0700), 0);
        ASSERT_TRUE(comes([&] { return kernel.has_forgotten(fs.find("m/other")); }));
    }
    // Its time of change is not that of what may still come.
    bool is_settled(const std::string &path) const
    {
        struct stat attr;
        return stat(below(path).c_str(), &attr) == 0 && attr.st_ctim.tv_sec + 2 < time(nullptr);
    }
    // Whether the kernel is told, when it is opened, that it may keep the file's pages.
    bool opens_unchanged(const std::string &path)
    {
        cg_fs_file *file;
        EXPECT_EQ(cg_fs_open(fs.fs, &fs.caller, fs.find(path), O_RDONLY, &file), 0);
        const bool is = file->unchanged;
        cg_fs_release(fs.fs, file);
        return is;
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

TEST_F(WatchTest, AFolderThatChangesLosesItsListing)
{
    fs.mkdirs("m/other");
    ASSERT_EQ(fs.put(CHUNK, chunk.bytes), 0);
    const cg_fs_node *folder = fs.find("m"), *file = fs.find(CHUNK);
    start();
    ASSERT_EQ(mknod(below("m/new").c_str(), S_IFREG | 0600, 0), 0);
    EXPECT_TRUE(comes([&] { return kernel.has_forgotten_listing(folder); }));
    kernel.forget_all();
    ASSERT_EQ(chmod(below("m").c_str(), 0700), 0);
    EXPECT_TRUE(comes([&] { return kernel.has_forgotten_listing(folder); }))
        << "it could have got an access control list";
    ASSERT_EQ(chmod(below(CHUNK).c_str(), 0600), 0);
    EXPECT_TRUE(comes([&] { return kernel.has_forgotten(file); }));
    EXPECT_FALSE(kernel.has_forgotten_listing(file)) << "that would wait for who reads it";
}

TEST_F(WatchTest, ALevelThatIsMissingIsRememberedUntilItComes)
{
    fs.mkdirs("m/other");
    const std::string folder = "m/contexts/c/L1/";
    ASSERT_EQ(fs.put(CHUNK, chunk.bytes), 0);
    EXPECT_FALSE(may_remember_missing(folder + "00007.kv")) << "nobody would see it come";
    start();
    ASSERT_TRUE(comes([&] { return cg_fs_is_watched(fs.fs); }));
    EXPECT_FALSE(may_remember_missing("m/contexts/c/tokens")) << "such names come all the time";
    EXPECT_TRUE(comes([&] { return may_remember_missing(folder + "00007.kv"); }));
    ASSERT_EQ(::link(below(CHUNK).c_str(), below(folder + "00008.kv").c_str()), 0);
    come_to_here();
    EXPECT_EQ(kernel.n_doubts, 0) << "of this name the kernel knows nothing";
    ASSERT_EQ(::link(below(CHUNK).c_str(), below(folder + "00007.kv").c_str()), 0);
    EXPECT_TRUE(comes([&] { return kernel.n_doubts > 0; }));

    ASSERT_EQ(::unlink(below(folder + "00007.kv").c_str()), 0);
    come_to_here();
    EXPECT_TRUE(comes([&] { return may_remember_missing(folder + "00007.kv"); }));
    kernel.n_doubts = 0;
    ASSERT_EQ(::rename(below(CHUNK).c_str(), below(folder + "00007.kv").c_str()), 0);
    EXPECT_TRUE(comes([&] { return kernel.n_doubts > 0; }));
}

TEST_F(WatchTest, WhatTheMountMakesWhereANameWasMissingNeedsNoDoubt)
{
    fs.mkdirs("m/other");
    ASSERT_EQ(fs.put("m/file", {1}), 0);
    start();
    ASSERT_TRUE(comes([&] { return cg_fs_is_watched(fs.fs); }));
    for (const char *name : {"m/a.kv", "m/b.kv", "m/c.kv"})
        ASSERT_TRUE(comes([&] { return may_remember_missing(name); }));
    // Step by step: a name that goes on while the watch looks at it is one that may be doubted.
    ASSERT_EQ(fs.put("m/a.kv", {1}), 0);
    come_to_here();
    ASSERT_EQ(fs.rename("m/a.kv", "m/b.kv"), 0);
    come_to_here();
    ASSERT_EQ(fs.link("m/b.kv", "m/c.kv"), 0);
    come_to_here();
    EXPECT_EQ(kernel.n_doubts, 0);
}

// The kernel has one answer for all, and its creator must find it.
TEST_F(WatchTest, AFileThatIsBeingWrittenIsNotRememberedAsMissing)
{
    fs.mkdirs("m/other");
    const std::string name = "m/contexts/c/L1/00007.kv";
    cg_fs_entry entry;
    cg_fs_file *file;
    start();
    ASSERT_TRUE(comes([&] { return may_remember_missing(name); }));
    ASSERT_EQ(cg_fs_create(fs.fs, &fs.caller, fs.find("m/contexts/c/L1"), "00007.kv", 0600, O_RDWR,
                           &entry, &file),
              0);
    come_to_here();
    const cg_fs_caller creator = fs.caller;
    fs.caller.pid = 1; // somebody else
    EXPECT_FALSE(may_remember_missing(name));
    fs.caller = creator;
    cg_fs_release(fs.fs, file);
    cg_fs_forget(fs.fs, entry.node, 1);
    EXPECT_TRUE(comes([&] { return may_remember_missing(name); }));
}

// A look-up found nothing, and says so when the file has been published meanwhile.
TEST_F(WatchTest, AnAnswerThatIsOlderThanTheNameIsDoubted)
{
    fs.mkdirs("m/other");
    const std::string folder = "m/contexts/c/L1/";
    start();
    ASSERT_TRUE(comes([&] { return cg_fs_is_watched(fs.fs); }));
    come_to_here();
    const int n_told = kernel.n_told;
    std::unique_lock<std::mutex> hold(kernel.lock);
    ASSERT_EQ(chmod(below("m/other").c_str(), 0755), 0);
    ASSERT_TRUE(comes([&] { return kernel.n_told > n_told; })) << "the watch waits for us now";
    // The name comes between the look at the store and the look at the table, and gets into the
    // table between that and the note.
    std::thread publisher;
    std::atomic<bool> is_there{false}, goes_on{false};
    const auto self = std::this_thread::get_id();
    const FsyncHook sync([&](int fd) {
        struct stat attr;
        is_there = fstat(fd, &attr) == 0 && S_ISDIR(attr.st_mode);
        while (is_there && !goes_on)
            std::this_thread::yield();
        return 0;
    });
    const StatHook look([&](const char *name) {
        if (std::this_thread::get_id() != self || publisher.joinable() ||
            name != std::string("00007.kv"))
            return;
        publisher = std::thread([&] { EXPECT_EQ(fs.put(folder + "00007.kv", chunk.bytes), 0); });
        EXPECT_TRUE(comes([&] { return is_there.load(); }));
    });
    const CloseHook end([&] {
        if (std::this_thread::get_id() != self || !publisher.joinable())
            return;
        goes_on = true;
        publisher.join();
    });
    ASSERT_TRUE(may_remember_missing(folder + "00007.kv"));
    EXPECT_TRUE(goes_on);
    hold.unlock();
    EXPECT_TRUE(comes([&] { return kernel.n_doubts > 0; }));
}

// The watch is of one file system.
TEST_F(WatchTest, WhatIsMountedFromElsewhereIsNotTrusted)
{
    fs.mkdirs("m/contexts/other/L1");
    const std::string place = below("m/contexts/other");
    if (mount("none", place.c_str(), "tmpfs", 0, nullptr) != 0)
        GTEST_SKIP() << "nothing can be mounted here";
    const auto unmount = [](const std::string *path) { umount2(path->c_str(), MNT_DETACH); };
    const std::unique_ptr<const std::string, decltype(unmount)> end(&place, unmount);
    ASSERT_EQ(mkdir((place + "/L1").c_str(), 0755), 0);
    std::ofstream(place + "/file") << "text";
    ASSERT_EQ(fs.put("m/file", {1}), 0);
    start();
    ASSERT_TRUE(comes([&] { return may_remember_missing("m/contexts/c/L1/00007.kv"); }));
    EXPECT_FALSE(may_remember_missing("m/contexts/other/L1/00007.kv"));
    EXPECT_TRUE(cg_fs_is_watched_file(fs.fs, fs.find("m/contexts/c")));
    EXPECT_TRUE(cg_fs_is_watched_file(fs.fs, fs.find(".cachegenfs")));
    EXPECT_FALSE(cg_fs_is_watched_file(fs.fs, fs.find("m/contexts/other")));
    EXPECT_FALSE(cg_fs_is_watched_file(fs.fs, fs.find("m/contexts/other/L1")));
    ASSERT_TRUE(comes([&] { return is_settled("m/file") && is_settled("m/contexts/other/file"); }));
    EXPECT_TRUE(comes([&] { return opens_unchanged("m/file"); }));
    opens_unchanged("m/contexts/other/file"); // which would note it
    EXPECT_FALSE(opens_unchanged("m/contexts/other/file"));
}

TEST_F(WatchTest, FoldersAndPublishedFilesLast)
{
    ASSERT_EQ(fs.put("m/file.kv", {1}), 0);
    ASSERT_EQ(fs.put(CHUNK, chunk.bytes), 0);
    const auto lasts = [&](const std::string &text) {
        const size_t slash = text.rfind('/');
        cg_fs_entry entry;
        EXPECT_EQ(cg_fs_lookup(fs.fs, &fs.caller, fs.find(text.substr(0, slash)),
                               text.substr(slash + 1).c_str(), &entry),
                  0);
        EXPECT_EQ(entry.is_lasting, cg_fs_is_lasting(fs.fs, entry.node));
        cg_fs_forget(fs.fs, entry.node, 1);
        return entry.is_lasting;
    };
    EXPECT_TRUE(lasts("m/contexts"));
    EXPECT_TRUE(lasts(CHUNK));
    EXPECT_FALSE(lasts("m/file.kv")) << "a mapping could change it";
    EXPECT_FALSE(lasts(".cachegenfs/metrics"));
}

TEST_F(WatchTest, PagesOfAFileAreKeptUntilItChanges)
{
    const auto is_unchanged = [&] { return opens_unchanged("m/file"); };
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

// By a mapping of which nobody tells, as what this process writes.
TEST_F(WatchTest, PagesAreNotKeptOfAFileWhoseTimeOfChangeIsAnother)
{
    ASSERT_EQ(fs.put("m/file", {1, 2, 3}), 0);
    start();
    ASSERT_TRUE(comes([&] { return cg_fs_is_watched(fs.fs); }));
    ASSERT_TRUE(comes([&] { return is_settled("m/file"); }));
    ASSERT_TRUE(comes([&] { return opens_unchanged("m/file"); }));
    std::ofstream(below("m/file"), std::ios::app) << "more";
    ASSERT_TRUE(comes([&] { return is_settled("m/file"); }));
    EXPECT_FALSE(opens_unchanged("m/file"));
}

TEST_F(WatchTest, WhatIsOpenForTheFirstTimeIsNotNoted)
{
    cg_fs_file *first, *second;
    ASSERT_EQ(fs.put("m/file", {1, 2, 3}), 0);
    start();
    ASSERT_TRUE(comes([&] { return cg_fs_is_watched(fs.fs); }));
    ASSERT_TRUE(comes([&] { return is_settled("m/file"); }));
    ASSERT_EQ(cg_fs_open(fs.fs, &fs.caller, fs.find("m/file"), O_RDONLY, &first), 0);
    EXPECT_EQ(cg_fs_open(fs.fs, &fs.caller, fs.find("m/file"), O_RDONLY, &second), 0);
    EXPECT_FALSE(second->unchanged) << "the kernel may still have older pages";
    cg_fs_release(fs.fs, first);
    cg_fs_release(fs.fs, second);
    EXPECT_EQ(cg_fs_open(fs.fs, &fs.caller, fs.find("m/file"), O_RDONLY, &second), 0);
    EXPECT_TRUE(second->unchanged);
    cg_fs_release(fs.fs, second);
}

// As at the end of a long write, whose time of change is that of its beginning. Another process:
// what this one writes the kernel knows.
TEST_F(WatchTest, AWriteThatEndsVoidsWhatWasNotedDuringIt)
{
    cg_fs_file *file;
    const auto is_unchanged = [&] { return opens_unchanged("m/file"); };
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
    ASSERT_EQ(cg_fs_open(fs.fs, &fs.caller, fs.find("m/file"), O_RDONLY, &file), 0);
    ASSERT_TRUE(end_write());
    cg_fs_release(fs.fs, file);
    EXPECT_FALSE(is_unchanged()) << "open at its end";
}

} // namespace
