// rename and link: what comes under a strict name is checked first. No mount.
#include "fusefs/arrivals.h"
#include "tests/fusefs/call_hooks.h"
#include "tests/fusefs/fs_fixture.h"

#include <set>

using namespace cg_test;

namespace
{

class MovesTest : public FsTest
{
  protected:
    Bytes damaged() const
    {
        Bytes bytes = chunk.bytes;
        bytes[bytes.size() - 1] ^= 1;
        return bytes;
    }
};

TEST_F(MovesTest, TemporaryNamesOfRsyncAreOrdinaryAndTheRenamePublishes)
{
    const std::string temporary = L1 + "/.00000.kv.Ab3dEf";
    ASSERT_EQ(fs.put(temporary, chunk.bytes), 0);
    EXPECT_FALSE(store.has("m/objects"));
    EXPECT_EQ(fs.rename(temporary, CHUNK), 0);
    EXPECT_EQ(fs.get(CHUNK), chunk.bytes);
    EXPECT_EQ(store.read(object_of(chunk)), chunk.bytes);
    EXPECT_EQ(fs.metric("published_total"), 1u);
}

TEST_F(MovesTest, RenameAndLinkOfADamagedFileToAStrictNameFailAndChangeNothing)
{
    ASSERT_EQ(fs.put(CHUNK, chunk.bytes), 0);
    ASSERT_EQ(fs.put("m/part", damaged()), 0);
    EXPECT_EQ(fs.rename("m/part", CHUNK), EBADMSG);
    EXPECT_EQ(fs.rename("m/part", L1 + "/00001.kv"), EBADMSG);
    EXPECT_EQ(fs.link("m/part", L1 + "/00001.kv"), EBADMSG);
    EXPECT_EQ(fs.get(CHUNK), chunk.bytes);
    EXPECT_EQ(store.read("m/part"), damaged());
    EXPECT_EQ(fs.list(L1), std::vector<std::string>{"00000.kv"});
}

TEST_F(MovesTest, RenameReplacesAPublishedChunk)
{
    ASSERT_EQ(fs.put(CHUNK, chunk.bytes), 0);
    ASSERT_EQ(fs.put("m/part", other.bytes), 0);
    EXPECT_EQ(fs.rename("m/part", CHUNK, RENAME_NOREPLACE), EEXIST);
    EXPECT_EQ(fs.rename("m/part", CHUNK), 0);
    EXPECT_EQ(fs.get(CHUNK), other.bytes);
}

TEST_F(MovesTest, ExchangeChecksBothDirections)
{
    ASSERT_EQ(fs.put(CHUNK, chunk.bytes), 0);
    ASSERT_EQ(fs.put("m/good", other.bytes), 0);
    ASSERT_EQ(fs.put("m/bad", damaged()), 0);
    EXPECT_EQ(fs.rename("m/bad", CHUNK, RENAME_EXCHANGE), EBADMSG);
    EXPECT_EQ(fs.rename(CHUNK, "m/bad", RENAME_EXCHANGE), EBADMSG);
    EXPECT_EQ(fs.rename(CHUNK, "m/good", RENAME_EXCHANGE), 0);
    EXPECT_EQ(fs.get(CHUNK), other.bytes);
    EXPECT_EQ(fs.get("m/good"), chunk.bytes);
}

TEST_F(MovesTest, ExchangeReachesTheDiskInBothFolders)
{
    fs.mkdirs("m/d");
    ASSERT_EQ(fs.put(CHUNK, chunk.bytes), 0);
    ASSERT_EQ(fs.put("m/d/good", other.bytes), 0);
    const auto ino_of = [this](const std::string &path) {
        struct stat attr = {};
        EXPECT_EQ(stat((store.path + "/" + path).c_str(), &attr), 0);
        return attr.st_ino;
    };
    for (const bool is_from_strict : {true, false}) {
        std::set<ino_t> synced;
        const FsyncHook hook([&](int fd) {
            struct stat attr;
            if (fstat(fd, &attr) == 0)
                synced.insert(attr.st_ino);
            return 0;
        });
        ASSERT_EQ(is_from_strict ? fs.rename(CHUNK, "m/d/good", RENAME_EXCHANGE)
                                 : fs.rename("m/d/good", CHUNK, RENAME_EXCHANGE),
                  0);
        EXPECT_EQ(synced.count(ino_of(L1)), 1u) << is_from_strict;
        EXPECT_EQ(synced.count(ino_of("m/d")), 1u) << is_from_strict;
    }
}

TEST_F(MovesTest, FileThatIsOpenForWritingIsBusy)
{
    cg_fs_file *file;
    ASSERT_EQ(fs.create("m/part", &file), 0);
    ASSERT_EQ(fs.write(file, chunk.bytes), 0);
    EXPECT_EQ(fs.rename("m/part", CHUNK), EBUSY);
    EXPECT_EQ(fs.link("m/part", CHUNK), EBUSY);
    EXPECT_EQ(fs.look(CHUNK), ENOENT);
    EXPECT_EQ(fs.write(file, Bytes{chunk.bytes[0]}), 0) << "nothing has changed for the writer";
    EXPECT_EQ(fs.close(file), 0);
    EXPECT_EQ(fs.link("m/part", L1 + "/00001.kv"), 0);
    EXPECT_EQ(fs.rename("m/part", CHUNK), 0);
    EXPECT_EQ(fs.get(CHUNK), chunk.bytes);
}

TEST_F(MovesTest, ChunkMovedToAnOrdinaryNameIsOrdinary)
{
    ASSERT_EQ(fs.put(CHUNK, chunk.bytes), 0);
    ASSERT_EQ(fs.unlink(object_of(chunk)), 0);
    ASSERT_EQ(fs.rename(CHUNK, "m/file"), 0);
    cg_fs_file *file;
    ASSERT_EQ(fs.open("m/file", O_RDWR, &file), 0);
    EXPECT_EQ(fs.write(file, Bytes{0}), 0);
    EXPECT_EQ(fs.close(file), 0);
    EXPECT_EQ(fs.rename("m/file", CHUNK), EBADMSG);
}

TEST_F(MovesTest, ContextIsRenamedWithoutReadingItsChunks)
{
    ASSERT_EQ(fs.put(CHUNK, chunk.bytes), 0);
    store.write(L1 + "/00001.kv", damaged()); /* only one who reads it would notice */
    EXPECT_EQ(fs.rename("m/contexts/c", "m/contexts/d"), 0);
    EXPECT_EQ(fs.get("m/contexts/d/L1/00000.kv"), chunk.bytes);
    EXPECT_EQ(fs.rename("m", "n"), 0);
    EXPECT_EQ(fs.get("n/contexts/d/L1/00000.kv"), chunk.bytes);
}

TEST_F(MovesTest, WhatMovesToAnotherModelIsAdoptedThere)
{
    const Chunk nested = make_chunk(nullptr, draw_tokens(16, 3), CG_L1, &profile, 1000, 1, CG_L3);
    const Bytes json = {'{', '}'};
    fs.mkdirs("m/contexts/c/L3");
    ASSERT_EQ(fs.put(CHUNK, chunk.bytes), 0);
    ASSERT_EQ(fs.put(L1 + "/00001.kv", nested.bytes), 0);
    ASSERT_EQ(fs.link(L1 + "/00001.kv", "m/contexts/c/L3/00001.kv"), 0);
    ASSERT_EQ(fs.put("m/contexts/c/model.json", json), 0);
    const uint64_t n_bytes = fs.metric("published_bytes_total");
    const auto expect_objects_of = [&](const std::string &model) {
        SCOPED_TRACE(model);
        for (const Chunk *each : {&chunk, &nested})
            EXPECT_EQ(store.read(model + object_of(*each).substr(1)), each->bytes);
        EXPECT_EQ(store.read(model + "/model.json"), json);
    };
    fs.mkdirs("n/contexts");
    ASSERT_EQ(fs.rename("m/contexts/c", "n/contexts/c"), 0);
    expect_objects_of("n");
    fs.mkdirs("o");
    ASSERT_EQ(fs.rename("n/contexts", "o/contexts"), 0);
    expect_objects_of("o");
    fs.mkdirs("p/contexts/c/L1");
    for (const char *file : {"model.json", "L1/00000.kv", "L1/00001.kv"})
        ASSERT_EQ(
            fs.rename(std::string("o/contexts/c/") + file, std::string("p/contexts/c/") + file), 0);
    expect_objects_of("p");
    EXPECT_EQ(fs.metric("published_bytes_total"), n_bytes);
}

TEST_F(MovesTest, DirectoryThatComesUnderTheRulesIsCheckedWhole)
{
    fs.mkdirs("m/upload/L1");
    ASSERT_EQ(fs.put("m/upload/L1/00000.kv", chunk.bytes), 0);
    ASSERT_EQ(fs.put("m/upload/L1/00001.kv", damaged()), 0);
    ASSERT_EQ(fs.put("m/upload/context.json", Bytes{'{', '}'}), 0);
    EXPECT_EQ(fs.rename("m/upload", "m/contexts/d"), EBADMSG);
    EXPECT_FALSE(store.has("m/contexts/d"));
    EXPECT_FALSE(store.has("m/objects"));
    ASSERT_EQ(fs.unlink("m/upload/L1/00001.kv"), 0);
    cg_fs_file *file;
    ASSERT_EQ(fs.open("m/upload/L1/00000.kv", O_RDWR, &file), 0);
    EXPECT_EQ(fs.rename("m/upload", "m/contexts/d"), EBUSY);
    EXPECT_EQ(fs.close(file), 0);
    EXPECT_EQ(fs.rename("m/upload", "m/contexts/d"), 0);
    EXPECT_EQ(store.read(object_of(chunk)), chunk.bytes);
    EXPECT_EQ(fs.open("m/contexts/d/L1/00000.kv", O_RDWR, &file), EPERM);
}

TEST_F(MovesTest, DirectoryThatCannotBeReadToItsEndDoesNotMove)
{
    fs.mkdirs("m/upload/L1");
    ASSERT_EQ(fs.put("m/upload/L1/00000.kv", chunk.bytes), 0);
    const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    int upload = -1;
    {
        // While the walk is in L1 something else takes the place of the folder above, of which it
        // has not seen the end.
        const OpenHook hook([&](int dir_fd, const char *name) {
            if (strcmp(name, "L1") == 0)
                upload = dir_fd;
            else if (strcmp(name, "00000.kv") == 0)
                dup3(null, upload, O_CLOEXEC);
            return 0;
        });
        EXPECT_EQ(fs.rename("m/upload", "m/contexts/d"), ENOTDIR);
    }
    EXPECT_GE(upload, 0);
    close(null);
    EXPECT_TRUE(store.has("m/upload/L1/00000.kv"));
    EXPECT_EQ(fs.rename("m/upload", "m/contexts/d"), 0);
}

TEST_F(MovesTest, LevelFolderCannotBecomeAnotherLevel)
{
    ASSERT_EQ(fs.put(CHUNK, chunk.bytes), 0);
    EXPECT_EQ(fs.rename(L1, "m/contexts/c/L2"), EINVAL);
    EXPECT_EQ(fs.rename(L1, "m/contexts/c/old"), 0);
    EXPECT_EQ(fs.rename("m/contexts/c/old", L1), 0);
}

TEST_F(MovesTest, DirectoryWithASymbolicLinkInPlaceOfAFolderIsRefused)
{
    fs.mkdirs("m/upload");
    ASSERT_EQ(fs.symlink("/etc", "m/upload/L1"), 0);
    EXPECT_EQ(fs.rename("m/upload", "m/contexts/d"), EPERM);
}

TEST_F(MovesTest, ChunkIsWrittenToItsEndWhileItsContextIsRenamed)
{
    cg_fs_file *file;
    ASSERT_EQ(fs.create(CHUNK, &file), 0);
    ASSERT_EQ(fs.write(file, chunk.bytes), 0);
    ASSERT_EQ(fs.rename("m/contexts/c", "m/contexts/d"), 0);
    EXPECT_EQ(fs.close(file), 0);
    EXPECT_EQ(fs.get("m/contexts/d/L1/00000.kv"), chunk.bytes);
}

TEST_F(MovesTest, CreatorRenamesWhatItIsWriting)
{
    cg_fs_file *file;
    ASSERT_EQ(fs.create(CHUNK, &file), 0);
    ASSERT_EQ(fs.write(file, Bytes(chunk.bytes.begin(), chunk.bytes.begin() + 100)), 0);
    EXPECT_EQ(fs.rename(CHUNK, L1 + "/00001.kv"), EBADMSG);
    EXPECT_EQ(fs.rename(CHUNK, L1 + "/.partial"), 0) << "as an ordinary file it is what it is";
    EXPECT_EQ(fs.write(file, Bytes(chunk.bytes.begin() + 100, chunk.bytes.end()), 100), 0);
    EXPECT_EQ(fs.close(file), 0);
    EXPECT_EQ(store.read(L1 + "/.partial"), chunk.bytes);
    EXPECT_EQ(fs.rename(L1 + "/.partial", L1 + "/00001.kv"), 0);
}

TEST_F(MovesTest, LinkFromAnObjectToAContextChecksThePlaceOnly)
{
    const std::string object = object_of(chunk);
    fs.mkdirs(object.substr(0, object.rfind('/')));
    ASSERT_EQ(fs.put(object, chunk.bytes), 0);
    EXPECT_EQ(fs.link(object, CHUNK), 0);
    fs.mkdirs("m/contexts/c/L2");
    EXPECT_EQ(fs.link(object, "m/contexts/c/L2/00000.kv"), EINVAL);
    struct stat attr;
    EXPECT_EQ(cg_fs_getattr(fs.fs, fs.find(CHUNK), &attr), 0);
    EXPECT_EQ(attr.st_nlink, 2u);
    EXPECT_EQ(fs.find(CHUNK), fs.find(object)) << "two names, one node";
}

// Walking it would keep everybody from changing a name.
TEST_F(MovesTest, OnlyFoldersThatRulesReachAreWalkedAndTheyMayNotBeLarge)
{
    const int n_names = 4 * CG_ARRIVALS_MAX_HELD + 1;
    fs.mkdirs("m/contexts/c/junk");
    for (int i = 0; i < n_names; i++)
        store.write("m/contexts/c/junk/" + std::to_string(i), Bytes{});
    EXPECT_EQ(fs.rename("m/contexts/c/junk", "m/contexts/c/more"), 0);
    EXPECT_EQ(fs.rename("m/contexts/c/more", "m/contexts/c/L2"), EXDEV);
    ASSERT_EQ(unlink((store.path + "/m/contexts/c/more/0").c_str()), 0);
    EXPECT_EQ(fs.rename("m/contexts/c/more", "m/contexts/c/L2"), 0);
    store.write("m/contexts/c/L2/0", Bytes{});
    EXPECT_EQ(fs.rename("m/contexts/c/L2", "m/contexts/c/more"), 0) << "what leaves may be large";
    ASSERT_EQ(fs.rename("m/contexts/c/more", "m/contexts/c/L2"), EXDEV) << "one too many again";
    fs.mkdirs("other");
    EXPECT_EQ(fs.rename("m/contexts", "other/contexts"), 0) << "of a model as of the other";
}

TEST_F(MovesTest, AStrictNameIsFoundAmongHundredsOfOthers)
{
    ASSERT_EQ(fs.put(CHUNK, chunk.bytes), 0);
    for (int i = 0; i < 600; i++)
        ASSERT_EQ(fs.link(CHUNK, "m/" + std::to_string(i)), 0);
    EXPECT_TRUE(cg_fs_is_lasting(fs.fs, fs.find("m/599")));
    ASSERT_EQ(fs.unlink(CHUNK), 0);
    EXPECT_FALSE(cg_fs_is_lasting(fs.fs, fs.find("m/599")));
}

TEST_F(MovesTest, NamesOfANodeFollowRenamesOfAllTheirDirectories)
{
    fs.mkdirs("m/a/b/c");
    ASSERT_EQ(fs.put("m/a/b/c/f", Bytes{1}), 0);
    cg_fs_node *node = fs.find("m/a/b/c/f");
    ASSERT_EQ(fs.link("m/a/b/c/f", "m/g"), 0);
    ASSERT_EQ(fs.rename("m/a", "m/x"), 0);
    ASSERT_EQ(fs.unlink("m/g"), 0);
    struct stat attr;
    EXPECT_EQ(cg_fs_getattr(fs.fs, node, &attr), 0);
    EXPECT_EQ(fs.get("m/x/b/c/f"), Bytes{1});
}

} // namespace
