// Nothing damaged comes under a strict name, or becomes so there: who writes when, and by which
// daemon. No mount.
#include "tests/fusefs/call_hooks.h"
#include "tests/fusefs/fs_fixture.h"

#include <sys/stat.h>

#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

using namespace cg_test;

namespace
{

bool is_directory(int fd)
{
    struct stat attr;
    return fstat(fd, &attr) == 0 && S_ISDIR(attr.st_mode);
}

class SealedTest : public FsTest
{
  protected:
    Bytes damaged() const
    {
        Bytes bytes = chunk.bytes;
        bytes[bytes.size() - 1] ^= 1;
        return bytes;
    }
    static Bytes valid_profile()
    {
        std::ifstream in(CG_GOLDEN "/profile.cgp", std::ios::binary);
        return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
    }
    // A directory of two chunks; during() runs when the second one of them is being checked.
    int move_directory(const std::function<void()> &during)
    {
        fs.mkdirs("m/upload/L1");
        EXPECT_EQ(fs.put("m/upload/L1/00000.kv", chunk.bytes), 0);
        EXPECT_EQ(fs.put("m/upload/L1/00001.kv", other.bytes), 0);
        int n_checked = 0;
        const FsyncHook hook([&](int fd) {
            if (!is_directory(fd) && ++n_checked == 2)
                during();
            return 0;
        });
        return fs.rename("m/upload", "m/contexts/d");
    }
    // What the names below contexts/ hold is whole.
    void expect_whole()
    {
        for (const char *level : {"c/L1", "d/L1"})
            for (const char *leaf : {"00000.kv", "00001.kv"}) {
                const std::string path = std::string("m/contexts/") + level + "/" + leaf;
                if (store.has(path)) {
                    const Bytes bytes = store.read(path);
                    EXPECT_EQ(cg_chunk_verify(bytes.data(), bytes.size()), CG_OK) << path;
                }
            }
    }
};

TEST_F(SealedTest, FileOfAMovedDirectoryCannotBeOpenedForWritingAfterItsCheck)
{
    std::mutex lock;
    std::condition_variable changed;
    bool opened = false;
    int results[2] = {-1, -1};
    std::thread writer;
    const std::string both[2] = {"m/upload/L1/00000.kv", "m/upload/L1/00001.kv"};
    cg_fs_node *nodes[2];
    EXPECT_EQ(move_directory([&] {
                  for (int i = 0; i < 2; i++)
                      nodes[i] = fs.find(both[i]);
                  writer = std::thread([&] {
                      for (int i = 0; i < 2; i++) {
                          cg_fs_file *file;
                          results[i] = cg_fs_open(fs.fs, &fs.caller, nodes[i], O_RDWR, &file);
                          if (results[i] != 0)
                              continue;
                          {
                              const std::lock_guard<std::mutex> hold(lock);
                              opened = true;
                          }
                          changed.notify_one();
                          fs.write(file, Bytes{0}, 500);
                          cg_fs_release(fs.fs, file);
                      }
                  });
                  std::unique_lock<std::mutex> hold(lock);
                  changed.wait_for(hold, std::chrono::milliseconds(200), [&] { return opened; });
              }),
              0);
    writer.join();
    EXPECT_EQ(results[0], EPERM);
    EXPECT_EQ(results[1], EPERM);
    EXPECT_TRUE(store.has("m/contexts/d/L1/00001.kv"));
    expect_whole();
}

TEST_F(SealedTest, WhatComesIntoAMovedDirectoryAfterItsWalkIsNotMovedUnchecked)
{
    ASSERT_EQ(fs.put("m/bad", damaged()), 0);
    EXPECT_EQ(move_directory([&] { EXPECT_EQ(fs.rename("m/bad", "m/upload/L1/00000.kv"), 0); }),
              EXDEV)
        << "mv copies";
    expect_whole();
    EXPECT_TRUE(store.has("m/upload/L1/00001.kv"));
}

TEST_F(SealedTest, PlaceThatMovesUnderOtherRulesDuringACheckIsBusy)
{
    const Chunk level_0 = make_chunk(nullptr, draw_tokens(16, 3), CG_L0);
    fs.mkdirs("m/contexts/c/L0");
    ASSERT_EQ(fs.put("m/part", level_0.bytes), 0);
    bool once = false;
    const FsyncHook hook([&](int fd) {
        if (!is_directory(fd) && !once) {
            once = true;
            EXPECT_EQ(fs.rename("m/contexts/c/L0", "m/contexts/c/old"), 0);
            EXPECT_EQ(fs.rename(L1, "m/contexts/c/L0"), 0);
            EXPECT_EQ(fs.rename("m/contexts/c/old", L1), 0);
        }
        return 0;
    });
    EXPECT_EQ(fs.rename("m/part", "m/contexts/c/L0/00000.kv"), EBUSY);
    EXPECT_TRUE(store.has("m/part"));
}

TEST_F(SealedTest, FileThatWasClosedButIsNotReleasedYetIsWaitedFor)
{
    cg_fs_file *file;
    ASSERT_EQ(fs.create("m/part", &file), 0);
    ASSERT_EQ(fs.write(file, chunk.bytes), 0);
    ASSERT_EQ(cg_fs_flush(fs.fs, file), 0);
    std::thread kernel([&] { cg_fs_release(fs.fs, file); });
    EXPECT_EQ(fs.rename("m/part", CHUNK), 0);
    kernel.join();
    EXPECT_EQ(fs.get(CHUNK), chunk.bytes);
}

TEST_F(SealedTest, FileWithAMappingIsBusyThoughItWasClosed)
{
    cg_fs_file *file;
    ASSERT_EQ(fs.put("m/part", chunk.bytes), 0);
    ASSERT_EQ(fs.open("m/part", O_RDWR, &file), 0);
    ASSERT_EQ(cg_fs_flush(fs.fs, file), 0); /* what a process sees as closed, its mapping keeps */
    EXPECT_EQ(fs.rename("m/part", CHUNK), EBUSY);
    EXPECT_EQ(fs.link("m/part", CHUNK), EBUSY);
    EXPECT_EQ(fs.write(file, Bytes{0}, 500), 0);
    cg_fs_release(fs.fs, file);
    EXPECT_EQ(fs.rename("m/part", CHUNK), EBADMSG);
}

TEST_F(SealedTest, ChunkWhoseDirectoryCannotBeSyncedIsSealedAllTheSame)
{
    cg_fs_file *file;
    ASSERT_EQ(fs.create(CHUNK, &file), 0);
    ASSERT_EQ(fs.write(file, chunk.bytes), 0);
    {
        const FsyncHook hook([](int fd) { return is_directory(fd) ? EIO : 0; });
        EXPECT_EQ(cg_fs_flush(fs.fs, file), EIO);
    }
    EXPECT_TRUE(store.has(CHUNK));
    EXPECT_EQ(fs.write(file, Bytes{0}, 500), EPERM);
    EXPECT_EQ(fs.truncate(CHUNK, 10), EPERM);
    EXPECT_EQ(fs.close(file), 0);
    EXPECT_EQ(fs.get(CHUNK), chunk.bytes);
    expect_whole();
}

// The kernel tells of it once, and keeps the pages that it could not write.
TEST_F(SealedTest, FileThatCouldNotBeSyncedIsNotPublishedBeforeItIsWrittenAnew)
{
    for (const bool by_fsync : {false, true}) {
        cg_fs_file *file;
        ASSERT_EQ(fs.create(CHUNK, &file), 0);
        ASSERT_EQ(fs.write(file, chunk.bytes), 0);
        {
            const FsyncHook hook([](int) { return EIO; });
            EXPECT_EQ(by_fsync ? cg_fs_fsync(fs.fs, file, false) : cg_fs_flush(fs.fs, file), EIO);
        }
        EXPECT_EQ(cg_fs_flush(fs.fs, file), EIO);
        EXPECT_FALSE(store.has(CHUNK));
        EXPECT_EQ(fs.truncate(CHUNK, 0), 0);
        EXPECT_EQ(fs.write(file, chunk.bytes), 0);
        EXPECT_EQ(fs.close(file), 0);
        EXPECT_EQ(fs.get(CHUNK), chunk.bytes);
        EXPECT_EQ(fs.unlink(CHUNK), 0);
    }
}

TEST_F(SealedTest, OrdinaryFileThatCouldNotBeSyncedGetsNoStrictName)
{
    ASSERT_EQ(fs.put("m/part", chunk.bytes), 0);
    {
        const FsyncHook hook([](int) { return EIO; });
        EXPECT_EQ(fs.rename("m/part", CHUNK), EIO);
    }
    EXPECT_EQ(fs.rename("m/part", CHUNK), EIO);
    EXPECT_EQ(fs.link("m/part", CHUNK), EIO);
    EXPECT_FALSE(store.has(CHUNK));
    ASSERT_EQ(fs.unlink("m/part"), 0);
    ASSERT_EQ(fs.put("m/part", chunk.bytes), 0);
    EXPECT_EQ(fs.rename("m/part", CHUNK), 0);
}

TEST_F(SealedTest, EqualFileThatCannotBeSyncedIsReplaced)
{
    cg_fs_file *file;
    struct stat there = {}, now = {};
    ASSERT_EQ(fs.create(CHUNK, &file), 0);
    ASSERT_EQ(fs.write(file, chunk.bytes), 0);
    store.write(CHUNK, chunk.bytes);
    ASSERT_EQ(fstatat(store.fd, CHUNK.c_str(), &there, 0), 0);
    {
        const FsyncHook hook(
            [&](int fd) { return fstat(fd, &now) == 0 && now.st_ino == there.st_ino ? EIO : 0; });
        EXPECT_EQ(fs.close(file), 0);
    }
    ASSERT_EQ(fstatat(store.fd, CHUNK.c_str(), &now, 0), 0);
    EXPECT_NE(now.st_ino, there.st_ino);
    EXPECT_EQ(fs.get(CHUNK), chunk.bytes);
}

TEST_F(SealedTest, OpeningWithTruncationWhatOthersReadPastTheDaemonChangesNothing)
{
    cg_fs_file *file;
    ASSERT_EQ(fs.put("m/file", chunk.bytes), 0);
    cg_fs_node *node = fs.find("m/file");
    node->n_backed = 1; /* as for a reader who opened it by a strict name, which it had then */
    EXPECT_EQ(cg_fs_open(fs.fs, &fs.caller, node, O_WRONLY | O_TRUNC, &file), ETXTBSY);
    EXPECT_EQ(store.read("m/file"), chunk.bytes);
    node->n_backed = 0;
    ASSERT_EQ(cg_fs_open(fs.fs, &fs.caller, node, O_WRONLY | O_TRUNC, &file), 0);
    EXPECT_EQ(fs.close(file), 0);
    EXPECT_TRUE(store.read("m/file").empty());
}

TEST_F(SealedTest, ProfileOfAContextIsInstalledOnlyWhenNobodyWritesToIt)
{
    const Bytes good = valid_profile();
    cg_fs_file *file;
    ASSERT_EQ(fs.create("m/profile.tmp", &file), 0);
    ASSERT_EQ(fs.write(file, good), 0);
    EXPECT_EQ(fs.rename("m/profile.tmp", "m/contexts/c/profile.cgp"), EBUSY);
    EXPECT_EQ(fs.link("m/profile.tmp", "m/contexts/c/profile.cgp"), EBUSY);
    EXPECT_FALSE(store.has("m/profiles"));
    EXPECT_EQ(fs.close(file), 0);
    EXPECT_EQ(fs.rename("m/profile.tmp", "m/contexts/c/profile.cgp"), 0);
    EXPECT_TRUE(store.has("m/profiles"));
}

TEST_F(SealedTest, ProfileThatWasWrittenUnderAStrictNameIsInstalledAtItsLastClose)
{
    const Bytes good = valid_profile(), byte{static_cast<uint8_t>(~good.back())};
    cg_fs_file *file;
    ASSERT_EQ(fs.create(CHUNK, &file), 0);
    ASSERT_EQ(fs.write(file, good), 0);
    ASSERT_EQ(fs.rename(CHUNK, "m/contexts/c/profile.cgp"), 0);
    EXPECT_FALSE(store.has("m/profiles"));
    EXPECT_EQ(fs.write(file, byte, static_cast<off_t>(good.size() - 1)), 0);
    EXPECT_EQ(fs.close(file), 0);
    EXPECT_FALSE(store.has("m/profiles"));
    ASSERT_EQ(fs.create(CHUNK, &file), 0);
    ASSERT_EQ(fs.write(file, good), 0);
    ASSERT_EQ(fs.rename(CHUNK, "m/contexts/c/profile.cgp"), 0);
    EXPECT_EQ(fs.close(file), 0);
    EXPECT_TRUE(store.has("m/profiles/default"));
    EXPECT_EQ(fs.open("m/contexts/c/profile.cgp", O_RDWR, &file), EPERM);
}

// A second daemon on the same store: another machine's, or another mount's.
class TwoDaemonsTest : public SealedTest
{
  protected:
    Fs second{store.path};
};

TEST_F(TwoDaemonsTest, FileThatIsOpenForWritingInOneIsBusyInTheOther)
{
    cg_fs_file *file;
    ASSERT_EQ(second.create("m/part", &file), 0);
    ASSERT_EQ(second.write(file, chunk.bytes), 0);
    EXPECT_EQ(fs.rename("m/part", CHUNK), EBUSY);
    EXPECT_EQ(fs.link("m/part", CHUNK), EBUSY);
    ASSERT_EQ(fs.mkdir("m/upload"), 0);
    ASSERT_EQ(fs.mkdir("m/upload/L1"), 0);
    ASSERT_EQ(fs.rename("m/part", "m/upload/L1/00000.kv"), 0);
    EXPECT_EQ(fs.rename("m/upload", "m/contexts/d"), EBUSY);
    EXPECT_EQ(second.write(file, Bytes{chunk.bytes[0]}), 0);
    EXPECT_EQ(second.close(file), 0);
    EXPECT_EQ(fs.rename("m/upload", "m/contexts/d"), 0);
    EXPECT_EQ(fs.get("m/contexts/d/L1/00000.kv"), chunk.bytes);
}

// The one still knows the strict name that the other took away.
TEST_F(TwoDaemonsTest, AFileThatWasPublishedOnceAndChangedSinceIsCheckedAgain)
{
    const std::string object = object_of(chunk);
    cg_fs_file *file;
    fs.mkdirs(object.substr(0, object.rfind('/')));
    ASSERT_EQ(fs.put(object, chunk.bytes), 0);
    ASSERT_EQ(second.rename(object, "m/ordinary"), 0);
    ASSERT_EQ(second.open("m/ordinary", O_RDWR, &file), 0);
    EXPECT_EQ(second.write(file, Bytes{static_cast<uint8_t>(~chunk.bytes.back())},
                           static_cast<off_t>(chunk.bytes.size() - 1)),
              0);
    EXPECT_EQ(second.close(file), 0);
    EXPECT_EQ(fs.link("m/ordinary", CHUNK), EBADMSG);
    ASSERT_EQ(second.open("m/ordinary", O_RDWR, &file), 0);
    EXPECT_EQ(second.write(file, chunk.bytes), 0);
    EXPECT_EQ(second.close(file), 0);
    EXPECT_EQ(fs.link("m/ordinary", CHUNK), 0);
}

TEST_F(TwoDaemonsTest, FileThatOnePublishesCannotBeOpenedForWritingInTheOther)
{
    cg_fs_file *file;
    ASSERT_EQ(fs.put("m/part", chunk.bytes), 0);
    cg_fs_node *known = second.find("m/part");
    int during = 0;
    {
        const FsyncHook hook([&](int fd) {
            if (!is_directory(fd) && during == 0)
                during = cg_fs_open(second.fs, &second.caller, known, O_RDWR, &file);
            return 0;
        });
        ASSERT_EQ(fs.rename("m/part", CHUNK), 0);
    }
    EXPECT_EQ(during, ETXTBSY);
    EXPECT_EQ(cg_fs_open(second.fs, &second.caller, known, O_RDWR, &file), ESTALE)
        << "by its old name";
    EXPECT_EQ(second.open(CHUNK, O_RDWR, &file), EPERM);
    expect_whole();
}

TEST_F(TwoDaemonsTest, ChunkThatWasPublishedWhileItIsOpenCanBeMovedByBoth)
{
    cg_fs_file *file;
    ASSERT_EQ(fs.create(CHUNK, &file), 0);
    ASSERT_EQ(fs.write(file, chunk.bytes), 0);
    ASSERT_EQ(cg_fs_fsync(fs.fs, file, false), 0);
    EXPECT_EQ(second.rename(CHUNK, "m/moved"), 0);
    EXPECT_EQ(second.rename("m/moved", CHUNK), 0);
    EXPECT_EQ(fs.write(file, Bytes{0}), EPERM);
    EXPECT_EQ(fs.close(file), 0);
}

TEST_F(TwoDaemonsTest, ProfileThatIsOpenForWritingInEitherIsNotInstalledByALookAtTheTree)
{
    store.write("m/contexts/c/profile.cgp", valid_profile());
    for (Fs *writer : {&fs, &second}) {
        cg_fs_file *file;
        ASSERT_EQ(writer->open("m/contexts/c/profile.cgp", O_RDWR, &file), 0);
        cg_fs_adopt_tree(fs.fs);
        EXPECT_FALSE(store.has("m/profiles"));
        /* Away from where its release would install it. */
        ASSERT_EQ(writer->rename("m/contexts/c/profile.cgp", "m/profile"), 0);
        EXPECT_EQ(writer->close(file), 0);
        store.write("m/contexts/c/profile.cgp", valid_profile());
    }
    cg_fs_adopt_tree(fs.fs);
    EXPECT_TRUE(store.has("m/profiles/default"));
}

// Its writer has no claim any more that would keep the other daemon from publishing it.
TEST_F(TwoDaemonsTest, PublishedChunkIsNotChangedByItsWriterAfterItLostItsName)
{
    cg_fs_file *file, *again;
    ASSERT_EQ(fs.create(CHUNK, &file), 0);
    ASSERT_EQ(fs.write(file, chunk.bytes), 0);
    ASSERT_EQ(cg_fs_fsync(fs.fs, file, false), 0);
    std::filesystem::remove_all(store.path + "/m/objects"); /* the other link */
    ASSERT_EQ(fs.rename(CHUNK, "m/moved"), 0);
    EXPECT_EQ(fs.open("m/moved", O_RDWR, &again), ETXTBSY);
    EXPECT_EQ(fs.truncate("m/moved", 10), ETXTBSY);
    ASSERT_EQ(second.rename("m/moved", CHUNK), 0);
    EXPECT_EQ(fs.write(file, Bytes{0}), EPERM);
    EXPECT_EQ(fs.close(file), 0);
    std::filesystem::remove_all(store.path + "/m/objects");
    ASSERT_EQ(fs.rename(CHUNK, "m/moved"), 0);
    ASSERT_EQ(fs.open("m/moved", O_RDWR, &file), 0);
    EXPECT_EQ(second.rename("m/moved", CHUNK), EBUSY);
    EXPECT_EQ(fs.close(file), 0);
}

TEST_F(TwoDaemonsTest, ChunkThatIsPutInPlaceOfWhatAnotherMakesStaysSealed)
{
    cg_fs_file *file;
    cg_fs_entry entry;
    ASSERT_EQ(fs.create(CHUNK, &file), 0);
    ASSERT_EQ(fs.write(file, chunk.bytes), 0);
    ASSERT_EQ(cg_fs_fsync(fs.fs, file, false), 0);
    std::filesystem::remove_all(store.path + "/m/objects");
    cg_fs_node *parent = fs.find("m");
    bool once = false;
    {
        const StatHook hook([&](const char *name) {
            if (std::string(name) == "made" && !once) {
                once = true;
                EXPECT_EQ(second.rename(CHUNK, "m/made"), 0);
            }
        });
        ASSERT_EQ(cg_fs_mknod(fs.fs, &fs.caller, parent, "made", S_IFREG | 0644, 0, &entry), 0);
    }
    EXPECT_TRUE(once);
    ASSERT_EQ(second.rename("m/made", CHUNK), 0);
    EXPECT_EQ(fs.write(file, Bytes{0}), EPERM);
    expect_whole();
    EXPECT_EQ(fs.close(file), 0);
    cg_fs_forget(fs.fs, entry.node, 1);
}

} // namespace
