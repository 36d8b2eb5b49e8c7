// Levels of a nested chunk: each is a file of its own size, whatever lies beneath. No mount.
#include "tests/fusefs/call_hooks.h"
#include "tests/fusefs/fs_fixture.h"

#include <sys/stat.h>

#include <atomic>
#include <thread>

using namespace cg_test;

namespace
{

class ViewsTest : public FsTest
{
  protected:
    void SetUp() override
    {
        for (int level = 1; level <= 3; level++)
            fs.mkdirs("m/contexts/c/L" + std::to_string(level));
    }

    static std::string at(int level, const std::string &context = "c")
    {
        return "m/contexts/" + context + "/L" + std::to_string(level) + "/00000.kv";
    }
    // What a name of this level shows.
    Bytes cut(int level) const
    {
        const auto n_bytes = static_cast<long>(nested.header.level_bytes[level]);
        return Bytes(nested.bytes.begin(), nested.bytes.begin() + n_bytes);
    }
    std::string object(int level) const
    {
        char path[CG_TREE_PATH_BYTES];
        EXPECT_EQ(cg_tree_object_path("m", &nested.header.key, static_cast<cg_level>(level),
                                      &nested.header.profile, path, sizeof path),
                  CG_OK);
        return path;
    }
    struct stat attr_of(const std::string &path)
    {
        struct stat attr = {};
        EXPECT_EQ(cg_fs_getattr(fs.fs, fs.find(path), &attr), 0) << path;
        return attr;
    }
    // As a connector publishes through the mount: the finest, then its links.
    void publish(const std::string &context = "c")
    {
        ASSERT_EQ(fs.put(at(1, context), nested.bytes), 0);
        ASSERT_EQ(fs.link(at(1, context), at(2, context)), 0);
        ASSERT_EQ(fs.link(at(1, context), at(3, context)), 0);
    }
    // As it lies in a store: one file, a link a level.
    void lay_out(const std::string &context = "c") const
    {
        store.write(at(1, context), nested.bytes);
        for (int level = 2; level <= 3; level++) {
            store.write(at(level, context), Bytes{});
            const std::string path = store.path + "/" + at(level, context);
            ASSERT_EQ(::unlink(path.c_str()), 0);
            ASSERT_EQ(::link((store.path + "/" + at(1, context)).c_str(), path.c_str()), 0);
        }
    }

    const Chunk nested = make_chunk(nullptr, draw_tokens(16, 7), CG_L1, &profile, 5000, 7, CG_L3);
};

TEST_F(ViewsTest, EachLevelIsAValidChunkOfItsOwnSize)
{
    lay_out();
    for (int level = 1; level <= 3; level++) {
        SCOPED_TRACE(level);
        const Bytes bytes = fs.get(at(level));
        EXPECT_EQ(bytes, cut(level));
        EXPECT_EQ(cg_chunk_verify(bytes.data(), bytes.size()), CG_OK);
        EXPECT_EQ(attr_of(at(level)).st_size, static_cast<off_t>(bytes.size()));
        EXPECT_LE(attr_of(at(level)).st_blocks, static_cast<blkcnt_t>(bytes.size() / 512 + 8));
        cg_fs_entry entry;
        ASSERT_EQ(cg_fs_lookup(fs.fs, &fs.caller, fs.parent_of(at(level)), "00000.kv", &entry), 0);
        EXPECT_EQ(entry.attr.st_size, static_cast<off_t>(bytes.size()));
        EXPECT_EQ(entry.attr.st_ino, attr_of(at(level)).st_ino);
        cg_fs_forget(fs.fs, entry.node, 1);
    }
    EXPECT_LT(attr_of(at(3)).st_blocks, attr_of(at(1)).st_blocks);
    EXPECT_EQ(store.read(at(3)), nested.bytes) << "one file beneath";
}

TEST_F(ViewsTest, LevelsAreDifferentFilesAndLinksOfALevelAreOne)
{
    lay_out();
    const ino_t one = attr_of(at(1)).st_ino, two = attr_of(at(2)).st_ino,
                three = attr_of(at(3)).st_ino;
    EXPECT_NE(one, two);
    EXPECT_NE(one, three);
    EXPECT_NE(two, three);
    fs.mkdirs("m/contexts/d/L2");
    ASSERT_EQ(fs.link(at(2), at(2, "d")), 0);
    EXPECT_EQ(fs.find(at(2)), fs.find(at(2, "d")));
    EXPECT_EQ(attr_of(at(2, "d")).st_ino, two);
    EXPECT_NE(fs.find(at(2)), fs.find(at(3)));
    EXPECT_GT(attr_of(at(2)).st_nlink, 1u) << "so that du, tar and rsync -H look for the others";
}

TEST_F(ViewsTest, EntriesOfAnOpenDirectoryShowWhatTheirNamesShow)
{
    lay_out();
    const auto look = [this](cg_fs_directory *directory, const char *name, int error_wanted) {
        cg_fs_entry entry;
        off_t size = -1;
        EXPECT_EQ(cg_fs_lookup_read(fs.fs, &fs.caller, directory, name, &entry), error_wanted);
        if (error_wanted != 0)
            return size;
        struct stat attr;
        EXPECT_EQ(cg_fs_getattr(fs.fs, entry.node, &attr), 0);
        EXPECT_EQ(attr.st_size, entry.attr.st_size);
        cg_fs_forget(fs.fs, entry.node, 1);
        return entry.attr.st_size;
    };
    cg_fs_directory *directory, *root;
    ASSERT_EQ(cg_fs_opendir(fs.fs, &fs.caller, fs.find("m/contexts/c/L2"), &directory), 0);
    EXPECT_EQ(look(directory, "00000.kv", 0), static_cast<off_t>(cut(2).size()));
    EXPECT_EQ(look(directory, "00001.kv", ENOENT), -1);
    ASSERT_EQ(fs.rename("m/contexts/c", "m/contexts/d"), 0);
    EXPECT_EQ(look(directory, "00000.kv", 0), static_cast<off_t>(cut(2).size()));
    // What is being written under another name of the directory shows to its writer only.
    cg_fs_file *file;
    ASSERT_EQ(fs.create("m/contexts/d/L2/00001.kv", &file), 0);
    EXPECT_EQ(look(directory, "00001.kv", 0), 0);
    cg_fs_release(fs.fs, file);
    cg_fs_closedir(directory);
    ASSERT_EQ(cg_fs_opendir(fs.fs, &fs.caller, cg_fs_root(fs.fs), &root), 0);
    EXPECT_EQ(look(root, ".cachegenfs-tmp", ENOENT), -1);
    cg_fs_closedir(root);
}

TEST_F(ViewsTest, NothingBehindAViewIsDelivered)
{
    lay_out();
    const Bytes want = cut(3);
    const off_t end = static_cast<off_t>(want.size());
    cg_fs_file *file, *copy;
    ASSERT_EQ(fs.open(at(3), O_RDONLY, &file), 0);
    Bytes bytes(1000);
    size_t n = 0;
    ASSERT_EQ(fs.read(file, bytes.data(), bytes.size(), end - 10, &n), 0);
    EXPECT_EQ(n, 10u);
    for (off_t offset : {end, end + 1, static_cast<off_t>(nested.bytes.size()) - 1}) {
        ASSERT_EQ(fs.read(file, bytes.data(), bytes.size(), offset, &n), 0);
        EXPECT_EQ(n, 0u) << offset;
    }
    ASSERT_EQ(fs.create("m/copy", &copy), 0);
    n = 1;
    ASSERT_EQ(cg_fs_copy_range(fs.fs, file, end, copy, 0, 1000, &n), 0);
    EXPECT_EQ(n, 0u);
    ASSERT_EQ(cg_fs_copy_range(fs.fs, file, 0, copy, 0, 1 << 20, &n), 0);
    EXPECT_EQ(n, want.size());
    EXPECT_EQ(fs.close(copy), 0);
    EXPECT_EQ(fs.get("m/copy"), want);
    off_t at = 0;
    EXPECT_EQ(cg_fs_seek(file, 0, SEEK_HOLE, &at), 0);
    EXPECT_EQ(at, end);
    EXPECT_EQ(cg_fs_seek(file, 5, SEEK_DATA, &at), 0);
    EXPECT_EQ(at, 5);
    EXPECT_EQ(cg_fs_seek(file, end, SEEK_DATA, &at), ENXIO);
    EXPECT_EQ(cg_fs_seek(file, end, SEEK_HOLE, &at), ENXIO);
    EXPECT_EQ(fs.close(file), 0);
}

TEST_F(ViewsTest, OneThatGoesWhileItIsLookedUpIsNotThere)
{
    lay_out();
    cg_fs_node *folder = fs.parent_of(at(3));
    cg_fs_entry entry;
    {
        const OpenHook goes([&](int, const char *name) {
            if (std::string(name) == "00000.kv")
                ::unlink((store.path + "/" + at(3)).c_str());
            return 0;
        });
        EXPECT_EQ(cg_fs_lookup(fs.fs, &fs.caller, folder, "00000.kv", &entry), ENOENT);
    }
    EXPECT_EQ(fs.get(at(2)), cut(2)) << "the file has other names";
}

TEST_F(ViewsTest, LinkOfThePublishedFileMakesAView)
{
    publish();
    for (int level = 1; level <= 3; level++) {
        EXPECT_EQ(fs.get(at(level)), cut(level));
        EXPECT_EQ(attr_of(at(level)).st_size, static_cast<off_t>(cut(level).size()));
    }
    cg_fs_entry entry;
    fs.mkdirs("m/contexts/d/L3");
    ASSERT_EQ(cg_fs_link(fs.fs, fs.find(at(1)), fs.find("m/contexts/d/L3"), "00000.kv", &entry), 0);
    EXPECT_EQ(entry.attr.st_size, static_cast<off_t>(cut(3).size())) << "what link() itself says";
    EXPECT_EQ(entry.node, fs.find(at(3)));
    cg_fs_forget(fs.fs, entry.node, 1);
    EXPECT_EQ(fs.get(object(1)), nested.bytes) << "adopted";
    struct stat a, b;
    ASSERT_EQ(::stat((store.path + "/" + at(1)).c_str(), &a), 0);
    ASSERT_EQ(::stat((store.path + "/" + at(3)).c_str(), &b), 0);
    EXPECT_EQ(a.st_ino, b.st_ino);
    const Chunk no_l3 = make_chunk(nullptr, draw_tokens(16, 8), CG_L1, &profile, 100, 8, CG_L2);
    ASSERT_EQ(fs.put("m/contexts/c/L1/00001.kv", no_l3.bytes), 0);
    EXPECT_EQ(fs.link("m/contexts/c/L1/00001.kv", "m/contexts/c/L3/00001.kv"), EINVAL);
}

TEST_F(ViewsTest, ObjectsHaveViewsToo)
{
    fs.mkdirs(object(1).substr(0, object(1).rfind('/')));
    ASSERT_EQ(fs.put(object(1), nested.bytes), 0);
    ASSERT_EQ(fs.link(object(1), object(2)), 0);
    EXPECT_EQ(fs.get(object(2)), cut(2));
    EXPECT_EQ(fs.link(object(2), at(2)), 0);
    EXPECT_EQ(fs.find(object(2)), fs.find(at(2)));
}

TEST_F(ViewsTest, WhatEndsWhereALevelEndsIsAnOrdinaryChunkOfThatLevel)
{
    for (int level = 3; level >= 1; level--) {
        EXPECT_EQ(fs.put(at(level), cut(level)), 0);
        EXPECT_EQ(store.read(at(level)), cut(level));
        EXPECT_EQ(store.read(object(level)), cut(level)) << "adopted at its level";
        EXPECT_EQ(fs.get(at(level)), cut(level));
    }
    Bytes longer = cut(2);
    longer.push_back(0);
    fs.mkdirs("m/contexts/d/L2");
    EXPECT_EQ(fs.put(at(2, "d"), longer), EBADMSG);
    EXPECT_EQ(fs.put(at(2, "d"), cut(3)), EINVAL) << "L2 is not in it";
    Bytes flipped = cut(2);
    flipped[flipped.size() - 1] ^= 1;
    EXPECT_EQ(fs.put(at(2, "d"), flipped), EBADMSG);
    EXPECT_EQ(fs.put(at(2, "d"), cut(2)), 0);
}

TEST_F(ViewsTest, FinerLevelsWrittenUnderACoarseNameAreCutOff)
{
    cg_fs_file *file;
    ASSERT_EQ(fs.create(at(2), &file), 0);
    ASSERT_EQ(fs.write(file, nested.bytes), 0);
    EXPECT_EQ(fs.close(file), 0);
    EXPECT_EQ(store.read(at(2)), cut(2));
    EXPECT_EQ(fs.get(at(2)), cut(2));
    EXPECT_EQ(store.read(object(2)), cut(2));
    EXPECT_FALSE(store.has(object(1)));
}

// cp -a and tar set times, close, and link the other names.
TEST_F(ViewsTest, FinerLevelsWrittenWithTheirTimesStayForLinks)
{
    cg_fs_file *file;
    ASSERT_EQ(fs.create(at(3), &file), 0);
    ASSERT_EQ(fs.write(file, nested.bytes), 0);
    struct stat attr = {};
    attr.st_mtim.tv_sec = 1000000000;
    ASSERT_EQ(cg_fs_setattr(fs.fs, file->node, &attr, CG_SET_MTIME, &attr), 0);
    EXPECT_EQ(fs.close(file), 0);
    EXPECT_EQ(fs.get(at(3)), cut(3));
    EXPECT_EQ(attr_of(at(3)).st_mtim.tv_sec, 1000000000);
    EXPECT_EQ(fs.link(at(3), at(1)), 0);
    EXPECT_EQ(fs.link(at(3), at(2)), 0);
    for (int level = 1; level <= 3; level++) {
        EXPECT_EQ(fs.get(at(level)), cut(level));
        EXPECT_EQ(fs.get(object(level)), cut(level));
    }
    ASSERT_EQ(fs.unlink(at(3)), 0);
    ASSERT_EQ(fs.create(at(3), &file), 0);
    ASSERT_EQ(fs.write(file, nested.bytes), 0);
    ASSERT_EQ(cg_fs_setattr(fs.fs, file->node, &attr, CG_SET_MTIME, &attr), 0);
    ASSERT_EQ(::link((store.path + "/" + at(1)).c_str(), (store.path + "/" + at(3)).c_str()), 0);
    EXPECT_EQ(fs.close(file), 0) << "the name that was taken shows the same";
}

TEST_F(ViewsTest, EqualContentUnderATakenNameIsNoError)
{
    cg_fs_file *file;
    ASSERT_EQ(fs.create(at(2), &file), 0);
    ASSERT_EQ(fs.write(file, cut(2)), 0);
    lay_out();
    EXPECT_EQ(fs.close(file), 0) << "the view there shows the same";
    ASSERT_EQ(fs.unlink(at(3)), 0);
    ASSERT_EQ(fs.create(at(3), &file), 0);
    ASSERT_EQ(fs.write(file, cut(3)), 0);
    store.write(at(3), make_chunk(nullptr, draw_tokens(16, 9), CG_L3, &profile).bytes);
    EXPECT_EQ(fs.close(file), EEXIST);
}

TEST_F(ViewsTest, RenameNeverChangesWhatAFileShows)
{
    lay_out();
    fs.mkdirs("m/contexts/d/L1");
    fs.mkdirs("m/contexts/d/L2");
    fs.mkdirs("m/contexts/d/L3");
    EXPECT_EQ(fs.rename(at(2), "m/file"), EXDEV);
    EXPECT_EQ(fs.rename(at(2), "m/contexts/c/L2/.00000.kv.new"), EXDEV);
    EXPECT_EQ(fs.rename(at(2), at(3, "d")), EXDEV);
    EXPECT_EQ(fs.rename(at(2), at(1, "d")), EXDEV);
    EXPECT_EQ(fs.rename(at(1), at(2, "d")), EXDEV);
    EXPECT_EQ(fs.rename(at(2), at(3), RENAME_EXCHANGE), EXDEV);
    EXPECT_EQ(fs.link(at(2), "m/file"), EXDEV);
    EXPECT_FALSE(store.has("m/file"));
    EXPECT_TRUE(fs.list("m/contexts/d/L3").empty());
    EXPECT_EQ(fs.link(at(2), at(3, "d")), 0) << "a link shows what its name says";
    EXPECT_EQ(fs.get(at(3, "d")), cut(3));
    for (int level = 1; level <= 3; level++)
        EXPECT_EQ(fs.get(at(level)), cut(level));

    EXPECT_EQ(fs.rename(at(2), at(2, "d")), 0);
    EXPECT_EQ(fs.get(at(2, "d")), cut(2));
    EXPECT_EQ(fs.look(at(2)), ENOENT);
    fs.mkdirs(object(2).substr(0, object(2).rfind('/')));
    EXPECT_EQ(fs.rename(at(2, "d"), object(2)), 0) << "another rule, the same level";
    EXPECT_EQ(fs.get(object(2)), cut(2));
    EXPECT_EQ(fs.rename(at(1), "m/whole"), 0) << "the finest level's name shows all there is";
    EXPECT_EQ(fs.get("m/whole"), nested.bytes);
    EXPECT_EQ(fs.rename("m/whole", at(2)), EXDEV);
    EXPECT_EQ(fs.rename("m/whole", at(1)), 0);
}

TEST_F(ViewsTest, CreatorRenamesWhatItIsWritingOnlyToANameThatShowsAllOfIt)
{
    cg_fs_file *file;
    ASSERT_EQ(fs.create(at(1), &file), 0);
    ASSERT_EQ(fs.write(file, nested.bytes), 0);
    EXPECT_EQ(fs.rename(at(1), at(2)), EXDEV);
    EXPECT_EQ(fs.close(file), 0);
    EXPECT_EQ(fs.get(at(1)), nested.bytes);
    ASSERT_EQ(fs.create("m/contexts/c/L1/00001.kv", &file), 0);
    ASSERT_EQ(fs.write(file, cut(2)), 0);
    EXPECT_EQ(fs.rename("m/contexts/c/L1/00001.kv", at(2)), 0);
    EXPECT_EQ(fs.close(file), 0);
    EXPECT_EQ(fs.get(at(2)), cut(2));
}

TEST_F(ViewsTest, ContextMovesAmongContextsAndNotToAnOrdinaryPlace)
{
    lay_out();
    EXPECT_EQ(fs.rename("m/contexts/c", "m/backup"), EXDEV);
    fs.mkdirs("m/a/b/c/d/e/f");
    EXPECT_EQ(fs.rename("m/contexts/c", "m/a/b/c/d/e/f/g"), EXDEV);
    EXPECT_EQ(fs.rename("m/contexts/c/L2", "m/a/b/c/d/e/f/g"), EXDEV);
    EXPECT_EQ(fs.rename("m/contexts/c", "m/contexts/d"), 0);
    for (int level = 1; level <= 3; level++)
        EXPECT_EQ(fs.get(at(level, "d")), cut(level));
    EXPECT_EQ(fs.rename("m", "n"), 0);
    EXPECT_EQ(fs.get("n/" + at(3, "d").substr(2)), cut(3));
    EXPECT_EQ(fs.rename("n", "n2/m"), ENOENT);
    EXPECT_EQ(fs.rename("n", "m"), 0);
    EXPECT_EQ(fs.rename("m/contexts/d/L1", "m/L1"), 0) << "no view in it";
    EXPECT_EQ(fs.rename("m/L1", "m/contexts/d/L1"), 0);

    fs.mkdirs("m/upload/L2");
    ASSERT_EQ(fs.put("m/upload/L2/00000.kv", nested.bytes), 0);
    EXPECT_EQ(fs.rename("m/upload", "m/contexts/e"), EXDEV);
    ASSERT_EQ(fs.put("m/upload/L2/cut", cut(2)), 0);
    ASSERT_EQ(fs.rename("m/upload/L2/cut", "m/upload/L2/00000.kv"), 0);
    EXPECT_EQ(fs.rename("m/upload", "m/contexts/e"), 0);
    EXPECT_EQ(fs.get(at(2, "e")), cut(2));
}

TEST_F(ViewsTest, UnlinkTakesOneNameAway)
{
    publish();
    cg_fs_file *file;
    Bytes bytes(nested.bytes.size());
    size_t n = 0;
    ASSERT_EQ(fs.open(at(3), O_RDONLY, &file), 0);
    EXPECT_EQ(fs.unlink(at(3)), 0);
    EXPECT_EQ(fs.look(at(3)), ENOENT);
    ASSERT_EQ(fs.read(file, bytes.data(), bytes.size(), 0, &n), 0);
    EXPECT_EQ(n, cut(3).size()) << "who has it open keeps the view";
    EXPECT_EQ(fs.close(file), 0);
    EXPECT_EQ(fs.get(at(1)), nested.bytes);
    EXPECT_EQ(fs.get(at(2)), cut(2));
    EXPECT_EQ(fs.unlink(at(1)), 0);
    EXPECT_EQ(fs.get(at(2)), cut(2)) << "the finest name is no better than others";
}

TEST_F(ViewsTest, ModeIsOfTheFileBeneathAndContentIsNobodysToChange)
{
    publish();
    ASSERT_EQ(fs.unlink(object(1)), 0);
    struct stat attr = {};
    attr.st_mode = 0600;
    ASSERT_EQ(cg_fs_setattr(fs.fs, fs.find(at(2)), &attr, CG_SET_MODE, &attr), 0);
    EXPECT_EQ(attr.st_size, static_cast<off_t>(cut(2).size()));
    EXPECT_EQ(attr.st_ino, attr_of(at(2)).st_ino);
    EXPECT_EQ(attr_of(at(1)).st_mode & 07777, 0600u);
    EXPECT_EQ(attr_of(at(3)).st_mode & 07777, 0600u);
    cg_fs_file *file;
    EXPECT_EQ(fs.open(at(2), O_RDWR, &file), EPERM);
    EXPECT_EQ(fs.truncate(at(2), 10), EPERM);
    EXPECT_EQ(fs.put(at(2), cut(2)), EPERM);
}

TEST_F(ViewsTest, OrdinaryNameOfAFileThatHasViewsIsImmutable)
{
    cg_fs_file *writer, *file;
    ASSERT_EQ(fs.create("m/part", &writer), 0);
    ASSERT_EQ(fs.write(writer, nested.bytes), 0);
    EXPECT_EQ(fs.link("m/part", at(2)), EBUSY) << "open for writing";
    EXPECT_EQ(fs.close(writer), 0);
    ASSERT_EQ(fs.link("m/part", at(2)), 0);
    EXPECT_EQ(fs.open("m/part", O_RDWR, &file), EPERM);
    EXPECT_EQ(fs.truncate("m/part", 0), EPERM);
    EXPECT_EQ(cg_fs_setxattr(fs.fs, fs.find("m/part"), "user.color", "red", 3, 0), EOPNOTSUPP)
        << "published, if by another node";
    EXPECT_EQ(fs.get(at(2)), cut(2));
    EXPECT_EQ(fs.get("m/part"), nested.bytes);
}

TEST_F(ViewsTest, ViewWithoutAnyNameIsStillNotWritable)
{
    lay_out();
    cg_fs_file *file, *again;
    ASSERT_EQ(fs.open(at(2), O_RDONLY, &file), 0);
    for (int level = 1; level <= 3; level++)
        ASSERT_EQ(fs.unlink(at(level)), 0);
    EXPECT_EQ(cg_fs_open(fs.fs, &fs.caller, file->node, O_RDWR, &again), EPERM);
    ASSERT_EQ(cg_fs_open(fs.fs, &fs.caller, file->node, O_RDONLY, &again), 0);
    Bytes bytes(nested.bytes.size());
    size_t n = 0;
    EXPECT_EQ(fs.read(again, bytes.data(), bytes.size(), 0, &n), 0);
    EXPECT_EQ(n, cut(2).size());
    EXPECT_EQ(fs.close(again), 0);
    EXPECT_EQ(fs.close(file), 0);
}

TEST_F(ViewsTest, LookingAtAViewIsNoAccess)
{
    lay_out();
    const struct timespec times[2] = {{1000000000, 0}, {1100000000, 0}};
    ASSERT_EQ(utimensat(store.fd, at(1).c_str(), times, 0), 0);
    EXPECT_EQ(fs.look(at(2)), 0);
    EXPECT_EQ(attr_of(at(2)).st_atim.tv_sec, 1000000000);
    EXPECT_EQ(attr_of(at(2)).st_size, static_cast<off_t>(cut(2).size()));
}

TEST_F(ViewsTest, FileThatBecameAnotherIsStaleAndFoundAgainByName)
{
    lay_out();
    cg_fs_node *before = fs.find(at(2));
    cg_fs_file *file;
    /* In place: the same inode is now a chunk of one level. */
    const Chunk plain = make_chunk(nullptr, draw_tokens(16, 7), CG_L2, &profile, 20000);
    store.write(at(2), plain.bytes);
    EXPECT_EQ(cg_fs_open(fs.fs, &fs.caller, before, O_RDONLY, &file), ESTALE);
    EXPECT_EQ(fs.get(at(2)), plain.bytes);
    cg_fs_node *whole = fs.find(at(2));
    store.write(at(2), nested.bytes);
    EXPECT_EQ(cg_fs_open(fs.fs, &fs.caller, whole, O_RDONLY, &file), ESTALE)
        << "all of it would be read";
    EXPECT_EQ(fs.get(at(2)), cut(2));
}

TEST_F(ViewsTest, WhatIsNoWholeNestedChunkIsShownAsItIs)
{
    Bytes torn = nested.bytes;
    torn.resize(torn.size() - 1);
    store.write(at(2), torn);
    EXPECT_EQ(fs.get(at(2)), torn);
    store.write(at(3), Bytes(50, 'x'));
    EXPECT_EQ(fs.get(at(3)), Bytes(50, 'x'));
    store.write("m/contexts/c/L2/00001.kv", cut(2));
    EXPECT_EQ(fs.get("m/contexts/c/L2/00001.kv"), cut(2));
    store.write("m/contexts/c/L2/part.kv", nested.bytes);
    EXPECT_EQ(fs.get("m/contexts/c/L2/part.kv"), nested.bytes) << "an ordinary name";
}

TEST_F(ViewsTest, ReadersOfALevelNeverSeeAnotherWhileNamesComeAndGo)
{
    publish();
    ASSERT_EQ(fs.link(at(1), "m/whole"), 0);
    std::atomic<int> n_bad{0}, n_read{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; t++)
        threads.emplace_back([&, t] {
            for (int i = 0; i < 40; i++) {
                const int level = 2 + (i + t) % 2;
                const std::string path = at(level);
                const Bytes bytes = fs.get(path); /* nothing while the name is away */
                n_bad += !bytes.empty() && bytes != cut(level);
                n_read += !bytes.empty();
                cg_fs_node *whole = fs.find("m/whole"), *folder = fs.parent_of(path);
                if (i % 4 == 0)
                    fs.unlink(path);
                cg_fs_entry entry;
                if (folder != nullptr &&
                    cg_fs_link(fs.fs, whole, folder, "00000.kv", &entry) == 0) {
                    n_bad += entry.attr.st_size != static_cast<off_t>(cut(level).size());
                    cg_fs_forget(fs.fs, entry.node, 1);
                }
                if (i % 7 == 0)
                    fs.rename("m/contexts/c", "m/contexts/d"),
                        fs.rename("m/contexts/d", "m/contexts/c");
                n_bad += fs.get("m/whole") != nested.bytes;
            }
        });
    for (std::thread &thread : threads)
        thread.join();
    EXPECT_EQ(n_bad, 0);
    EXPECT_GT(n_read, 0);
}

} // namespace
