// What the core promises about files: checked at close, published atomically, immutable. No mount.
#include "codec/cursor.h"
#include "fusefs/pending.h"
#include "fusefs/staging.h"
#include "tests/fusefs/call_hooks.h"
#include "tests/fusefs/fs_fixture.h"

#include <sys/resource.h>
#include <sys/xattr.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <thread>

using namespace cg_test;

namespace
{

const cg_fs_caller STRANGER = {geteuid(), getegid(), 1};

uint64_t address_space_bytes()
{
    std::ifstream in("/proc/self/statm");
    uint64_t n_pages = 0;
    in >> n_pages;
    return n_pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

TEST_F(FsTest, PublishesAValidChunkAtCloseAndMakesItFindableByKey)
{
    EXPECT_EQ(fs.put(CHUNK, chunk.bytes), 0);
    EXPECT_EQ(fs.get(CHUNK), chunk.bytes);
    EXPECT_EQ(store.read(CHUNK), chunk.bytes);
    EXPECT_EQ(store.read(object_of(chunk)), chunk.bytes);
    EXPECT_EQ(fs.metric("published_total"), 1u);
    EXPECT_EQ(fs.metric("published_bytes_total"), chunk.bytes.size());
    EXPECT_EQ(fs.metric("adopted_total"), 1u);
    EXPECT_EQ(store.files(".cachegenfs-tmp").size(), 2u) << "only the lock and the name";
}

TEST_F(FsTest, RefusesWhatIsNoValidChunkAndLeavesNothing)
{
    Bytes flipped = chunk.bytes, longer = chunk.bytes;
    flipped[flipped.size() - 5] ^= 1;
    longer.push_back(0);
    const Bytes half(chunk.bytes.begin(),
                     chunk.bytes.begin() + static_cast<long>(chunk.bytes.size() / 2));
    const Chunk level_0 = make_chunk(nullptr, draw_tokens(16, 3), CG_L0);
    Bytes version_9 = chunk.bytes;
    version_9[8] = 9;
    const struct {
        const char *what;
        Bytes bytes;
        int want;
        const char *metric;
    } cases[] = {
        {"one bit", flipped, EBADMSG, "refused_total{reason=\"damaged\"}"},
        {"truncated", half, EBADMSG, "refused_total{reason=\"incomplete\"}"},
        {"one byte too many", longer, EBADMSG, "refused_total{reason=\"damaged\"}"},
        {"text", Bytes(500, 'x'), EBADMSG, "refused_total{reason=\"damaged\"}"},
        {"L0 in L1", level_0.bytes, EINVAL, "refused_total{reason=\"misplaced\"}"},
        {"a later version", version_9, EOPNOTSUPP, "refused_total{reason=\"unsupported\"}"},
    };
    for (const auto &c : cases) {
        SCOPED_TRACE(c.what);
        const uint64_t before = fs.metric(c.metric);
        EXPECT_EQ(fs.put(CHUNK, c.bytes), c.want);
        EXPECT_EQ(fs.metric(c.metric), before + 1);
        EXPECT_EQ(fs.look(CHUNK), ENOENT);
        EXPECT_TRUE(fs.list(L1).empty());
        EXPECT_FALSE(store.has("m/objects"));
    }
    EXPECT_EQ(store.files(".cachegenfs-tmp").size(), 2u);
    EXPECT_NE(fs.log().find("refused " + CHUNK), std::string::npos);
}

TEST_F(FsTest, ChunkUnderAnObjectNameMustHaveItsKeyAndProfile)
{
    const std::string path = object_of(chunk), folder = path.substr(0, path.rfind('/'));
    fs.mkdirs(folder);
    EXPECT_EQ(fs.put(path, other.bytes), EINVAL);
    EXPECT_EQ(fs.put(path, chunk.bytes), 0);
    EXPECT_EQ(fs.put(folder + "/00000000-L1.kv", chunk.bytes), EINVAL) << "another profile's";
}

class ProfileTest : public FsTest
{
  protected:
    static Bytes read_file(const std::string &path)
    {
        std::ifstream in(path, std::ios::binary);
        return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
    }
    static std::string path_of(const Bytes &profile)
    {
        char hex[CG_KEY_HEX_BYTES];
        const cg_key key = cg_key_of_bytes(profile.data(), profile.size());
        cg_key_to_hex(&key, hex);
        return "m/profiles/" + std::string(hex) + ".cgp";
    }
    const Bytes good = read_file(CG_GOLDEN "/profile.cgp");
};

// The kernel may not tell of the last closes before an unmount.
TEST_F(ProfileTest, IsInstalledAlsoWhenTheMountEndsBeforeItsLastClose)
{
    {
        Fs ending(store.path);
        cg_fs_file *file, *text;
        cg_fs_directory *directory, *root;
        ASSERT_EQ(ending.create("m/contexts/c/profile.cgp", &file), 0);
        ASSERT_EQ(ending.write(file, good), 0);
        /* AddressSanitizer tells if these are not freed. */
        ASSERT_EQ(ending.open(".cachegenfs/metrics", O_RDONLY, &text), 0);
        ASSERT_EQ(cg_fs_opendir(ending.fs, &ending.caller, ending.find("m/contexts/c"), &directory),
                  0);
        ASSERT_EQ(cg_fs_opendir(ending.fs, &ending.caller, cg_fs_root(ending.fs), &root), 0);
        EXPECT_EQ(fs.look(path_of(good)), ENOENT);
    }
    EXPECT_EQ(fs.get(path_of(good)), good);
}

TEST_F(ProfileTest, HasItsFingerprintAsItsNameAndIsImmutable)
{
    fs.mkdirs("m/profiles");
    Bytes damaged = good;
    damaged[good.size() / 2] ^= 1;
    EXPECT_EQ(fs.put(path_of(damaged), damaged), EBADMSG);
    EXPECT_EQ(fs.put("m/profiles/00000000000000000000000000000000.cgp", good), EINVAL);
    EXPECT_TRUE(fs.list("m/profiles").empty());
    EXPECT_EQ(fs.put(path_of(good), good), 0);
    EXPECT_EQ(fs.put(path_of(good), good), EPERM);
    EXPECT_EQ(fs.get(path_of(good)), good);
    EXPECT_EQ(fs.put("m/profiles/default", Bytes{'x'}), 0) << "an ordinary file";
}

TEST_F(ProfileTest, OfAContextIsInstalledForTheModelAndIsThenNoWayToChangeIt)
{
    EXPECT_EQ(fs.put("m/contexts/c/profile.cgp", good), 0);
    EXPECT_EQ(fs.get(path_of(good)), good);
    cg_fs_file *file;
    EXPECT_EQ(fs.open("m/contexts/c/profile.cgp", O_RDWR, &file), EPERM);
    EXPECT_EQ(fs.put("m/contexts/c/model.json", Bytes{'{', '}'}), 0);
    EXPECT_EQ(fs.get("m/model.json"), (Bytes{'{', '}'}));
    EXPECT_EQ(fs.put("m/.profile.tmp", good), 0);
    EXPECT_EQ(fs.unlink(path_of(good)), 0);
    EXPECT_EQ(fs.rename("m/.profile.tmp", "m/contexts/c/profile.cgp"), 0) << "as rsync does";
    EXPECT_EQ(fs.get(path_of(good)), good);
}

TEST_F(ProfileTest, OfFurtherContextsAreLinksOfTheInstalledOne)
{
    cg_fs_file *file, *reader;
    Bytes read(good.size());
    size_t n_read;
    ASSERT_EQ(fs.put("m/contexts/c/profile.cgp", good), 0);
    fs.mkdirs("m/contexts/d");
    ASSERT_EQ(fs.create("m/contexts/d/profile.cgp", &file), 0);
    ASSERT_EQ(fs.write(file, good), 0);
    ASSERT_EQ(fs.open("m/contexts/d/profile.cgp", O_RDONLY, &reader), 0);
    ASSERT_EQ(fs.close(file), 0);
    struct stat installed, of_context;
    ASSERT_EQ(::stat((store.path + "/" + path_of(good)).c_str(), &installed), 0);
    ASSERT_EQ(::stat((store.path + "/m/contexts/d/profile.cgp").c_str(), &of_context), 0);
    EXPECT_EQ(of_context.st_ino, installed.st_ino);
    EXPECT_EQ(installed.st_nlink, 3u);
    ASSERT_EQ(fs.read(reader, read.data(), read.size(), 0, &n_read), 0);
    EXPECT_EQ(read, good) << "who has it open keeps what he has";
    EXPECT_EQ(fs.close(reader), 0);
    EXPECT_EQ(fs.get("m/contexts/d/profile.cgp"), good);
    EXPECT_EQ(fs.open("m/contexts/d/profile.cgp", O_RDWR, &file), EPERM);
    EXPECT_EQ(fs.unlink("m/contexts/d/profile.cgp"), 0);
    EXPECT_EQ(fs.put("m/contexts/d/profile.cgp", good), 0);
}

// Connectors go by the model's default profile alone: without a word a copy would be of no use.
TEST_F(ProfileTest, ThatIsNotTheDefaultOneIsToldOf)
{
    static const char TOLD[] = "not served, as profiles/default names another profile: "
                               "m/contexts/";
    ASSERT_EQ(fs.put("m/contexts/c/profile.cgp", good), 0);
    fs.mkdirs("m/contexts/d");
    ASSERT_EQ(fs.put("m/contexts/d/profile.cgp", good), 0);
    EXPECT_EQ(fs.log().find(TOLD), std::string::npos) << fs.log();
    const std::string another = std::string(32, 'a') + "\n";
    ASSERT_EQ(fs.put("m/profiles/default", Bytes(another.begin(), another.end())), 0);
    fs.mkdirs("m/contexts/e");
    ASSERT_EQ(fs.put("m/contexts/e/profile.cgp", good), 0);
    EXPECT_NE(fs.log().find(TOLD + std::string("e/profile.cgp of user ")), std::string::npos)
        << fs.log();
}

// The kernel has few last closes under way at a time, and reading waits with them.
TEST_F(ProfileTest, OfAContextIsInstalledAfterTheAnswerToItsLastClose)
{
    std::thread ending([this] { cg_fs_end_closed(fs.fs); });
    std::thread adopting([this] { cg_fs_adopt_closed(fs.fs); });
    std::mutex lock;
    std::set<std::thread::id> installers;
    std::vector<std::string> models;
    std::atomic<bool> goes_on{true};
    // An install ends with a sync of the folder. While it waits for us, we hold no lock.
    const FsyncHook hook([&](int fd) {
        char path[PATH_MAX] = "";
        const std::string link = "/proc/self/fd/" + std::to_string(fd);
        EXPECT_GT(readlink(link.c_str(), path, sizeof path - 1), 0);
        const std::filesystem::path folder = path;
        if (folder.filename() != "profiles")
            return 0;
        {
            const std::lock_guard<std::mutex> hold(lock);
            installers.insert(std::this_thread::get_id());
            models.push_back(folder.parent_path().filename());
        }
        while (!goes_on)
            std::this_thread::yield();
        return 0;
    });
    const auto open_of = [&](const std::string &model, uid_t opener) {
        cg_fs_file *file = nullptr;
        fs.mkdirs(model + "/contexts/c");
        fs.mkdirs(model + "/profiles");
        std::ofstream(store.path + "/" + model + "/contexts/c/profile.cgp", std::ios::binary)
            .write(reinterpret_cast<const char *>(good.data()),
                   static_cast<std::streamsize>(good.size()));
        const cg_fs_caller me = fs.caller;
        fs.caller.uid = opener;
        EXPECT_EQ(fs.open(model + "/contexts/c/profile.cgp", O_WRONLY, &file), 0);
        fs.caller = me;
        return file;
    };
    const auto is_installed_by = [&](const std::thread &thread) {
        const std::lock_guard<std::mutex> hold(lock);
        return installers.count(thread.get_id()) > 0;
    };
    /* Until the threads are there, others do it. */
    uint64_t n_adopted = 0;
    while (!is_installed_by(adopting)) {
        cg_fs_release(fs.fs, open_of("early" + std::to_string(n_adopted++), 0));
        while (fs.metric("adopted_total") < n_adopted)
            std::this_thread::yield();
    }
    std::map<std::string, cg_fs_file *> files = {{"first", open_of("first", 0)},
                                                 {"a1", open_of("a1", 1001)},
                                                 {"a2", open_of("a2", 1001)},
                                                 {"a3", open_of("a3", 1001)},
                                                 {"b1", open_of("b1", 1002)}};
    const auto n_models = [&] {
        const std::lock_guard<std::mutex> hold(lock);
        return models.size();
    };
    const auto n_open = [] {
        return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
    };
    const size_t n_before = n_models();
    goes_on = false;
    cg_fs_release(fs.fs, files["first"]);
    while (n_models() == n_before)
        std::this_thread::yield();
    for (const char *model : {"a1", "a2", "a3", "b1"})
        cg_fs_release(fs.fs, files[model]);
    EXPECT_EQ(fs.metric("adopted_total"), n_adopted) << "nobody waited for it";
    /* All of them have come to the thread that adopts when the other one has closed this. */
    cg_fs_file *last;
    const auto n_files = n_open();
    ASSERT_EQ(fs.create("m/last", &last), 0);
    cg_fs_release(fs.fs, last);
    while (n_open() > n_files)
        std::this_thread::yield();
    goes_on = true;
    while (fs.metric("adopted_total") < n_adopted + 5)
        std::this_thread::yield();
    cg_fs_stop(fs.fs);
    ending.join();
    adopting.join();
    EXPECT_EQ(
        std::vector<std::string>(models.begin() + static_cast<ptrdiff_t>(n_before), models.end()),
        (std::vector<std::string>{"first", "a1", "b1", "a2", "a3"}))
        << "who brings many keeps nobody waiting";
}

// It is an ordinary file, so anybody may make it as large as they like, at once and for nothing.
TEST_F(ProfileTest, OfAContextTakesNoMoreMemoryThanOneUnderAStrictName)
{
    const auto peak_bytes = [] {
        struct rusage usage;
        getrusage(RUSAGE_SELF, &usage);
        return static_cast<uint64_t>(usage.ru_maxrss) << 10;
    };
    const uint64_t hole_bytes = UINT64_C(512) << 20, before = peak_bytes();
    cg_fs_file *file;
    fs.mkdirs("m/contexts/c");
    ASSERT_EQ(fs.create("m/contexts/c/profile.cgp", &file), 0);
    ASSERT_EQ(truncate((store.path + "/m/contexts/c/profile.cgp").c_str(),
                       static_cast<off_t>(hole_bytes)),
              0);
    cg_fs_release(fs.fs, file);
    EXPECT_NE(fs.log().find("not adopted: m/contexts/c/profile.cgp"), std::string::npos);
    EXPECT_LT(peak_bytes() - before, hole_bytes / 4);
}

// As on ext4, which gives a number to the next file at once. Whoever still has the removed file in
// the kernel, by O_PATH, would have the new one, whatever folder it lies in.
TEST_F(FsTest, AFileThatTakesOverTheNumberOfARemovedOneIsAnotherNode)
{
    const auto number_of = [this](const std::string &path) {
        struct stat attr;
        return stat((store.path + "/" + path).c_str(), &attr) == 0 ? attr.st_ino : 0;
    };
    bool came_back = false;
    for (int i = 0; i < 20; i++) {
        const std::string old = "m/old" + std::to_string(i), next = "m/next" + std::to_string(i);
        ASSERT_EQ(fs.put(old, Bytes{'x'}), 0);
        const cg_fs_node *const node = fs.find(old); // looked up, and not forgotten
        const ino_t number = number_of(old);
        if (i % 2 == 0)
            ASSERT_EQ(fs.unlink(old), 0);
        else // past the mount, as an eviction or another daemon does it
            ASSERT_TRUE(std::filesystem::remove(store.path + "/" + old));
        ASSERT_EQ(fs.put(next, Bytes{'y'}), 0);
        came_back |= number_of(next) == number;
        EXPECT_NE(fs.find(next), node);
        EXPECT_EQ(fs.find(next), fs.find(next));
        ASSERT_EQ(fs.link(next, next + "-link"), 0);
        EXPECT_EQ(fs.find(next + "-link"), fs.find(next));
    }
    if (!came_back)
        GTEST_SKIP() << "no inode number came back: files are not told apart by more";
}

// The number that it is known by is of the one file, and what tells that from others of the other.
TEST_F(FsTest, AFileWhoseNameGoesToAnotherDuringALookUpIsNotTakenForGone)
{
    cg_fs_file *file;
    bool is_moved = false;
    ASSERT_EQ(fs.put("m/first", Bytes{'x'}), 0);
    ASSERT_EQ(fs.put("m/second", Bytes{'y'}), 0);
    ASSERT_EQ(fs.link("m/first", "m/kept"), 0);
    cg_fs_node *const node = fs.find("m/kept");
    {
        const cg_test::StatHook hook([&](const char *name) {
            if (is_moved || strcmp(name, "first") != 0)
                return;
            is_moved = true; // past the mount, as a scrubber does it
            std::filesystem::rename(store.path + "/m/second", store.path + "/m/first");
        });
        EXPECT_NE(fs.find("m/first"), node);
    }
    EXPECT_TRUE(is_moved);
    ASSERT_EQ(cg_fs_open(fs.fs, &fs.caller, node, O_RDONLY, &file), 0);
    cg_fs_release(fs.fs, file);
    EXPECT_EQ(fs.find("m/kept"), node);
    EXPECT_EQ(fs.get("m/first"), Bytes{'y'});
}

// What another daemon of the store does at this moment.
TEST_F(FsTest, WhatTakesTheNameOfANewFolderIsLookedUpAgain)
{
    bool is_replaced = false;
    const size_t n_before = cg_nodes_count(cg_fs_nodes(fs.fs));
    {
        const cg_test::StatHook hook([&](const char *name) {
            if (is_replaced || strcmp(name, "made") != 0)
                return;
            is_replaced = true;
            std::filesystem::remove(store.path + "/m/made");
            store.write("m/made", Bytes{'y'});
        });
        EXPECT_EQ(fs.mkdir("m/made"), ESTALE);
    }
    EXPECT_LE(cg_nodes_count(cg_fs_nodes(fs.fs)), n_before + 1) << "the folder m";
    EXPECT_EQ(fs.get("m/made"), Bytes{'y'});
}

TEST_F(FsTest, WhatTakesTheNameOfANewFileStaysWhenThatFails)
{
    int n_replaced = 0;
    const auto replace = [&] {
        n_replaced++;
        std::filesystem::remove(store.path + "/m/made");
        store.write("m/made", Bytes{'y'});
    };
    {
        cg_fs_entry entry;
        cg_fs_node *const parent = fs.find("m");
        const cg_test::OpenHook hook([&](int, const char *name) {
            if (strcmp(name, "made") != 0)
                return 0;
            replace();
            return EMFILE;
        });
        const int error = cg_fs_mknod(fs.fs, &fs.caller, parent, "made", S_IFREG | 0644, 0, &entry);
        if (n_replaced == 0) // without identities a look-up opens nothing
            cg_fs_forget(fs.fs, entry.node, 1);
        else
            EXPECT_EQ(error, EMFILE);
    }
    if (n_replaced > 0) {
        EXPECT_EQ(fs.get("m/made"), Bytes{'y'});
    }
    if (geteuid() != 0)
        GTEST_SKIP() << "not root: a created file is not given to its caller";
    std::filesystem::remove(store.path + "/m/made");
    cg_fs_file *file;
    fs.caller.gid = static_cast<gid_t>(-1); // nobody can make files as it: they are given away
    {
        const cg_test::FchownHook hook([&](int) {
            replace();
            return EDQUOT;
        });
        EXPECT_EQ(fs.create("m/made", &file), EDQUOT);
    }
    EXPECT_EQ(fs.get("m/made"), Bytes{'y'});
}

TEST_F(ProfileTest, WhatTakesTheNameOfACheckedOneIsNotInstalled)
{
    EXPECT_EQ(fs.put("m/other", Bytes{'x'}), 0);
    {
        const FsyncHook hook([&](int) { // of the file that was checked
            if (fs.look("m/other") == 0) {
                EXPECT_EQ(fs.rename("m/contexts/c/profile.cgp", "m/contexts/c/checked"), 0);
                EXPECT_EQ(fs.rename("m/other", "m/contexts/c/profile.cgp"), 0);
            }
            return 0;
        });
        EXPECT_EQ(fs.put("m/contexts/c/profile.cgp", good), 0);
    }
    EXPECT_EQ(fs.get(path_of(good)), good);
    EXPECT_EQ(fs.get("m/contexts/c/profile.cgp"), Bytes{'x'});
}

TEST_F(FsTest, TakesWhatTheEncoderMakes)
{
    std::ifstream in(CG_GOLDEN "/bf16-0-L1.kv", std::ios::binary);
    const Bytes real{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
    EXPECT_EQ(fs.put(CHUNK, real), 0);
    EXPECT_EQ(fs.get(CHUNK), real);
}

TEST_F(FsTest, FlushBeforeTheFirstWriteIsFine)
{
    cg_fs_file *file;
    ASSERT_EQ(fs.create(CHUNK, &file), 0);
    EXPECT_EQ(cg_fs_flush(fs.fs, file), 0);
    EXPECT_EQ(fs.write(file, chunk.bytes), 0);
    EXPECT_EQ(fs.close(file), 0);
    EXPECT_EQ(fs.get(CHUNK), chunk.bytes);
}

TEST_F(FsTest, FlushHalfWayFailsAndTheFileMayBeCompleted)
{
    const Bytes first(chunk.bytes.begin(), chunk.bytes.begin() + 300),
        rest(chunk.bytes.begin() + 300, chunk.bytes.end());
    cg_fs_file *file;
    ASSERT_EQ(fs.create(CHUNK, &file), 0);
    EXPECT_EQ(fs.write(file, first), 0);
    EXPECT_EQ(cg_fs_flush(fs.fs, file), EBADMSG);
    EXPECT_EQ(cg_fs_fsync(fs.fs, file, false), EBADMSG);
    EXPECT_FALSE(store.has(CHUNK));
    EXPECT_EQ(fs.write(file, rest, 300), 0);
    EXPECT_EQ(fs.close(file), 0);
    EXPECT_EQ(fs.get(CHUNK), chunk.bytes);
}

// The last close comes behind the caller's close(), and so may the next look-up before it.
TEST_F(FsTest, WhatWasRefusedSinceTheLookUpIsLookedUpAgain)
{
    cg_fs_file *file;
    ASSERT_EQ(fs.create(CHUNK, &file), 0);
    ASSERT_EQ(fs.write(file, Bytes(10, 'x')), 0);
    cg_fs_node *const node = fs.find(CHUNK);
    ASSERT_NE(node, nullptr);
    ASSERT_EQ(fs.close(file), EBADMSG);
    for (const int flags : {O_WRONLY, O_WRONLY | O_TRUNC, O_RDONLY})
        EXPECT_EQ(cg_fs_open(fs.fs, &fs.caller, node, flags, &file), ESTALE) << flags;
    EXPECT_EQ(fs.look(CHUNK), ENOENT);
    EXPECT_EQ(fs.put(CHUNK, chunk.bytes), 0);
}

TEST_F(FsTest, FsyncPublishesAndSealsTheHandle)
{
    cg_fs_file *file;
    ASSERT_EQ(fs.create(CHUNK, &file), 0);
    EXPECT_EQ(fs.write(file, chunk.bytes), 0);
    EXPECT_EQ(cg_fs_fsync(fs.fs, file, true), 0);
    EXPECT_TRUE(store.has(CHUNK));
    EXPECT_EQ(fs.write(file, Bytes{0}), EPERM);
    EXPECT_EQ(cg_fs_fallocate(fs.fs, file, 0, 0, 1 << 20), EPERM);
    EXPECT_EQ(cg_fs_ftruncate(fs.fs, file, 0), EPERM);
    EXPECT_EQ(fs.truncate(CHUNK, 0), EPERM);
    EXPECT_EQ(fs.close(file), 0);
    EXPECT_EQ(store.read(CHUNK), chunk.bytes);
}

TEST_F(FsTest, FileBeingWrittenIsSeenByItsCreatorOnly)
{
    cg_fs_file *file, *second;
    cg_fs_entry entry;
    ASSERT_EQ(fs.create(CHUNK, &file), 0);
    ASSERT_EQ(fs.write(file, chunk.bytes), 0);
    EXPECT_EQ(fs.look(CHUNK), 0);
    EXPECT_EQ(cg_fs_lookup(fs.fs, &STRANGER, fs.find(L1), "00000.kv", &entry), ENOENT);
    EXPECT_TRUE(fs.list(L1).empty());
    EXPECT_EQ(fs.list("").back(), "m") << "the staging directory is hidden";
    ASSERT_EQ(fs.open(CHUNK, O_RDONLY, &second), 0);
    EXPECT_EQ(cg_fs_flush(fs.fs, second), 0) << "a reader's close publishes nothing";
    EXPECT_FALSE(store.has(CHUNK));
    cg_fs_release(fs.fs, second);
    EXPECT_EQ(fs.close(file), 0);
    ASSERT_EQ(cg_fs_lookup(fs.fs, &STRANGER, fs.find(L1), "00000.kv", &entry), 0);
    cg_fs_forget(fs.fs, entry.node, 1);
}

TEST_F(FsTest, PublishedChunkIsImmutableButItsModeAndTimesAreNot)
{
    ASSERT_EQ(fs.put(CHUNK, chunk.bytes), 0);
    cg_fs_file *file;
    EXPECT_EQ(fs.open(CHUNK, O_WRONLY, &file), EPERM);
    EXPECT_EQ(fs.open(CHUNK, O_RDWR, &file), EPERM);
    EXPECT_EQ(fs.open(CHUNK, O_RDONLY | O_TRUNC, &file), EPERM);
    EXPECT_EQ(fs.truncate(CHUNK, 10), EPERM);
    EXPECT_EQ(fs.create(CHUNK, &file, O_WRONLY | O_TRUNC), ESTALE);
    EXPECT_EQ(fs.create(CHUNK, &file, O_WRONLY | O_EXCL), EEXIST);
    struct stat attr = {};
    attr.st_mode = 0600;
    attr.st_mtim.tv_sec = 1000000000;
    EXPECT_EQ(cg_fs_setattr(fs.fs, fs.find(CHUNK), &attr, CG_SET_MODE | CG_SET_MTIME, &attr), 0);
    EXPECT_EQ(attr.st_mode & 07777, 0600u);
    EXPECT_EQ(attr.st_mtim.tv_sec, 1000000000);
    EXPECT_EQ(fs.get(CHUNK), chunk.bytes);
}

// The kernel takes it for new, and has not asked whether the caller may open it.
TEST_F(FsTest, CreateDoesNotOpenWhatHasComeSinceTheLookUp)
{
    cg_fs_file *file = nullptr;
    store.write("m/others", "text");
    store.write(CHUNK, chunk.bytes);
    for (const std::string &path : {std::string("m/others"), CHUNK}) {
        EXPECT_EQ(fs.create(path, &file, O_RDONLY), ESTALE);
        EXPECT_EQ(fs.create(path, &file, O_WRONLY | O_TRUNC), ESTALE);
        EXPECT_EQ(fs.create(path, &file, O_WRONLY | O_EXCL), EEXIST);
        EXPECT_EQ(file, nullptr);
    }
    EXPECT_EQ(store.read_text("m/others"), "text");
}

TEST_F(FsTest, HardLinkOfAPublishedChunkIsNoWayToChangeIt)
{
    ASSERT_EQ(fs.put(CHUNK, chunk.bytes), 0);
    ASSERT_EQ(fs.link(CHUNK, "m/backup"), 0);
    ASSERT_EQ(fs.unlink(CHUNK), 0); /* the object is still there */
    cg_fs_file *file;
    EXPECT_EQ(fs.open("m/backup", O_RDWR, &file), EPERM);
    EXPECT_EQ(fs.truncate("m/backup", 1), EPERM);
    ASSERT_EQ(fs.unlink(object_of(chunk)), 0);
    ASSERT_EQ(fs.open("m/backup", O_RDWR, &file), 0) << "now it is an ordinary file";
    EXPECT_EQ(fs.write(file, Bytes{1}), 0);
    EXPECT_EQ(fs.close(file), 0);
}

TEST_F(FsTest, SecondWriterOfTheSameContentSucceedsAndOfOtherContentFails)
{
    cg_fs_file *a, *b, *c;
    const cg_fs_caller me = fs.caller;
    ASSERT_EQ(fs.create(CHUNK, &a), 0);
    fs.caller.pid = 1; /* other processes, who don't see what is being written */
    ASSERT_EQ(fs.create(CHUNK, &b), 0);
    fs.caller.pid = 2;
    ASSERT_EQ(fs.create(CHUNK, &c), 0);
    fs.caller = me;
    EXPECT_EQ(fs.write(a, chunk.bytes), 0);
    EXPECT_EQ(fs.write(b, chunk.bytes), 0);
    EXPECT_EQ(fs.write(c, other.bytes), 0);
    EXPECT_EQ(fs.close(a), 0);
    EXPECT_EQ(fs.close(b), 0);
    EXPECT_EQ(fs.close(c), EEXIST);
    EXPECT_EQ(store.read(CHUNK), chunk.bytes);
}

TEST_F(FsTest, ChunkDamagedInTheStoreIsReplacedByAWholeOne)
{
    cg_fs_file *file;
    Bytes damaged = chunk.bytes;
    damaged[400] ^= 1;
    ASSERT_EQ(fs.create(CHUNK, &file), 0);
    ASSERT_EQ(fs.write(file, chunk.bytes), 0);
    store.write(CHUNK, damaged);
    EXPECT_EQ(fs.close(file), 0);
    EXPECT_EQ(store.read(CHUNK), chunk.bytes);
}

TEST_F(FsTest, UnlinkWhileWritingMeansNeverPublished)
{
    cg_fs_file *file;
    ASSERT_EQ(fs.create(CHUNK, &file), 0);
    ASSERT_EQ(fs.write(file, chunk.bytes), 0);
    EXPECT_EQ(fs.unlink(CHUNK), 0);
    EXPECT_EQ(fs.look(CHUNK), ENOENT);
    EXPECT_EQ(fs.close(file), 0);
    EXPECT_FALSE(store.has(CHUNK));
    EXPECT_EQ(fs.metric("files_pending"), 0u);
}

TEST_F(FsTest, FileMadeByMknodOutlivesItsHandlesAsNfsNeedsIt)
{
    cg_fs_entry entry;
    cg_fs_file *file;
    ASSERT_EQ(cg_fs_mknod(fs.fs, &fs.caller, fs.find(L1), "00000.kv", S_IFREG | 0644, 0, &entry),
              0);
    const Bytes first(chunk.bytes.begin(), chunk.bytes.begin() + 300),
        rest(chunk.bytes.begin() + 300, chunk.bytes.end());
    ASSERT_EQ(cg_fs_open(fs.fs, &fs.caller, entry.node, O_WRONLY, &file), 0);
    EXPECT_EQ(fs.write(file, first), 0);
    EXPECT_EQ(fs.close(file), EBADMSG);
    struct stat attr;
    EXPECT_EQ(cg_fs_getattr(fs.fs, entry.node, &attr), 0);
    EXPECT_EQ(attr.st_size, 300);
    attr.st_mode = S_IFREG | 0600;
    EXPECT_EQ(cg_fs_setattr(fs.fs, entry.node, &attr, CG_SET_MODE, &attr), 0);
    ASSERT_EQ(cg_fs_open(fs.fs, &fs.caller, entry.node, O_WRONLY, &file), 0);
    EXPECT_EQ(fs.write(file, rest, 300), 0);
    EXPECT_EQ(fs.close(file), 0);
    EXPECT_EQ(store.read(CHUNK), chunk.bytes);
    EXPECT_EQ(cg_fs_getattr(fs.fs, entry.node, &attr), 0);
    EXPECT_EQ(attr.st_mode, S_IFREG | 0600u);
    cg_fs_forget(fs.fs, entry.node, 1);

    ASSERT_EQ(cg_fs_mknod(fs.fs, &fs.caller, fs.find(L1), "00001.kv", S_IFREG | 0644, 0, &entry),
              0);
    EXPECT_EQ(fs.metric("files_pending"), 1u);
    cg_fs_forget(fs.fs, entry.node, 1);
    EXPECT_EQ(fs.metric("files_pending"), 0u) << "forgotten, so discarded";
}

TEST_F(FsTest, StrictNameHoldsNothingButAFile)
{
    cg_fs_entry entry;
    EXPECT_EQ(fs.mkdir(CHUNK), EPERM);
    EXPECT_EQ(fs.symlink("/etc/passwd", CHUNK), EPERM);
    EXPECT_EQ(cg_fs_mknod(fs.fs, &fs.caller, fs.find(L1), "00000.kv", S_IFIFO | 0644, 0, &entry),
              EPERM);
}

TEST_F(FsTest, SymbolicLinkStandsForNoFolderOfTheRules)
{
    EXPECT_EQ(fs.symlink("/etc", "model"), EPERM);
    EXPECT_EQ(fs.symlink("/etc", "m/objects"), EPERM);
    EXPECT_EQ(fs.symlink("/etc", "m/contexts/x"), EPERM);
    EXPECT_EQ(fs.symlink("/etc", "m/contexts/c/L2"), EPERM);
    EXPECT_EQ(fs.symlink("/etc", "m/contexts/c/README"), 0);
    EXPECT_EQ(fs.rename("m/contexts/c/README", "m/contexts/y"), EPERM);
    EXPECT_EQ(fs.link("m/contexts/c/README", "m/profiles"), EPERM);
    char target[100];
    EXPECT_EQ(cg_fs_readlink(fs.fs, fs.find("m/contexts/c/README"), target, sizeof target), 0);
    EXPECT_STREQ(target, "/etc");
}

TEST_F(FsTest, SymbolicLinkInTheStoreLeadsNowhere)
{
    TempDir outside;
    outside.write("secret", std::string("s"));
    ASSERT_EQ(::symlink(outside.path.c_str(), (store.path + "/m/way").c_str()), 0);
    int error = 0;
    cg_fs_entry entry;
    cg_fs_node *way = fs.find("m/way", &error);
    ASSERT_EQ(error, 0);
    EXPECT_EQ(cg_fs_lookup(fs.fs, &fs.caller, way, "secret", &entry), ESTALE);
    /* A directory that is replaced by a link after the kernel has seen it. */
    fs.mkdirs("m/dir");
    cg_fs_node *dir = fs.find("m/dir");
    ASSERT_EQ(::rmdir((store.path + "/m/dir").c_str()), 0);
    ASSERT_EQ(::symlink(outside.path.c_str(), (store.path + "/m/dir").c_str()), 0);
    EXPECT_EQ(cg_fs_lookup(fs.fs, &fs.caller, dir, "secret", &entry), ESTALE);
}

TEST_F(FsTest, FileReplacedBehindOurBackIsStaleAndFoundAgainByName)
{
    ASSERT_EQ(fs.put("m/a", Bytes{1}), 0);
    cg_fs_node *before = fs.find("m/a");
    store.write("m/new", Bytes{2, 2});
    ASSERT_EQ(::rename((store.path + "/m/new").c_str(), (store.path + "/m/a").c_str()), 0);
    struct stat attr;
    EXPECT_EQ(cg_fs_getattr(fs.fs, before, &attr), ESTALE);
    EXPECT_EQ(fs.get("m/a"), (Bytes{2, 2}));
}

TEST_F(FsTest, ANameInAFolderThatIsGoneHidesNoOther)
{
    cg_fs_file *reader, *again;
    struct stat attr;
    const std::string folder = store.path + "/m/contexts/gone";
    store.write(CHUNK, chunk.bytes);
    cg_fs_node *node = fs.find(CHUNK);
    ASSERT_EQ(cg_fs_open(fs.fs, &fs.caller, node, O_RDONLY, &reader), 0);
    fs.mkdirs("m/contexts/gone/L1");
    ASSERT_EQ(::link((store.path + "/" + CHUNK).c_str(), (folder + "/L1/00000.kv").c_str()), 0);
    ASSERT_EQ(fs.find("m/contexts/gone/L1/00000.kv"), node);
    std::filesystem::remove_all(folder);
    ASSERT_EQ(fs.look("m/contexts/gone"), ENOENT);
    EXPECT_EQ(cg_fs_open(fs.fs, &fs.caller, node, O_RDWR, &again), EPERM) << "it is published";
    EXPECT_EQ(fs.close(reader), 0);
    EXPECT_EQ(cg_fs_getattr(fs.fs, node, &attr), 0);
    ASSERT_EQ(cg_fs_open(fs.fs, &fs.caller, node, O_RDONLY, &again), 0);
    EXPECT_EQ(fs.close(again), 0);
}

// Two folders, open, that change places past the mount.
class CircleTest : public FsTest
{
  protected:
    CircleTest()
    {
        for (const char *path : {"m/a", "m/b", "m/x"})
            fs.mkdirs(path);
        a = fs.find("m/a");
        b = fs.find("m/b");
        EXPECT_EQ(cg_fs_opendir(fs.fs, &fs.caller, a, &in_a), 0);
        EXPECT_EQ(cg_fs_opendir(fs.fs, &fs.caller, b, &in_b), 0);
    }
    ~CircleTest() override
    {
        cg_fs_closedir(in_a);
        cg_fs_closedir(in_b);
    }
    void move(const std::string &from, const std::string &to)
    {
        ASSERT_EQ(::rename((store.path + "/m/" + from).c_str(), (store.path + "/m/" + to).c_str()),
                  0);
    }
    // As a listing with look-ups does.
    void see(cg_fs_directory *directory, const char *name, cg_fs_node *node)
    {
        cg_fs_entry entry;
        ASSERT_EQ(cg_fs_lookup_read(fs.fs, &fs.caller, directory, name, &entry), 0);
        EXPECT_EQ(entry.node, node);
        cg_fs_forget(fs.fs, entry.node, 1);
    }
    int getattr(cg_fs_node *node)
    {
        struct stat attr;
        return cg_fs_getattr(fs.fs, node, &attr);
    }
    cg_fs_node *a, *b;
    cg_fs_directory *in_a, *in_b;
};

TEST_F(CircleTest, FoldersThatWereSeenInEachOtherAreFoundWhereTheyAre)
{
    move("a", "b/a");
    see(in_b, "a", a);
    move("b/a", "a");
    move("b", "a/b");
    see(in_a, "b", b);
    EXPECT_EQ(getattr(b), 0);
    EXPECT_EQ(getattr(a), 0);
}

TEST_F(CircleTest, OldNamesThatComeToTheFrontLeadNobodyRound)
{
    move("a", "b/a");
    see(in_b, "a", a);
    move("b/a", "x/a");
    ASSERT_EQ(fs.find("m/x/a"), a);
    move("b", "x/a/b");
    see(in_a, "b", b);
    move("x/a", "a");
    ASSERT_EQ(fs.mkdir("m/x/a"), 0); // a loses that name; its latest is now the one in b
    EXPECT_EQ(getattr(b), ESTALE);
    EXPECT_EQ(getattr(a), 0); // by its other name; that in b is dropped
    EXPECT_EQ(getattr(b), 0);
}

TEST_F(FsTest, UnlinkedFileLivesAsLongAsItIsOpen)
{
    cg_fs_file *file, *again;
    struct stat attr;
    ASSERT_EQ(fs.create("m/a", &file, O_RDWR), 0);
    cg_fs_node *node = fs.find("m/a");
    ASSERT_EQ(fs.unlink("m/a"), 0);
    EXPECT_EQ(fs.write(file, Bytes{1, 2, 3}), 0);
    EXPECT_EQ(cg_fs_getattr(fs.fs, node, &attr), 0);
    EXPECT_EQ(attr.st_size, 3);
    EXPECT_EQ(attr.st_nlink, 0u);
    EXPECT_EQ(cg_fs_open(fs.fs, &fs.caller, node, O_RDONLY, &again), 0);
    EXPECT_EQ(fs.close(again), 0);
    EXPECT_EQ(fs.close(file), 0);
    EXPECT_EQ(cg_fs_getattr(fs.fs, node, &attr), ENOENT);
}

TEST_F(FsTest, AProgramOpensAlthoughTheKernelSaysThatItIsToRun)
{
    enum { KERNEL_RUNS_IT = 040 }; /* __FMODE_EXEC, beside the flags of open(2) */
    cg_fs_file *file;
    ASSERT_EQ(fs.put("m/run.sh", Bytes{'#', '!'}), 0);
    ASSERT_EQ(fs.open("m/run.sh", O_RDONLY | KERNEL_RUNS_IT, &file), 0);
    EXPECT_EQ(fs.close(file), 0);
}

TEST_F(FsTest, WhoEmptiesAProgramTakesItsOwnersRightsFromIt)
{
    const std::string path = store.path + "/m/program";
    struct stat attr;
    cg_fs_file *file;
    ASSERT_EQ(fs.put("m/program", Bytes{1}), 0);
    const auto mode_after = [&](uid_t uid, mode_t mode, int flags) {
        fs.caller.uid = uid;
        EXPECT_EQ(chmod(path.c_str(), mode), 0);
        EXPECT_EQ(fs.open("m/program", flags, &file), 0);
        EXPECT_EQ(fs.close(file), 0);
        EXPECT_EQ(stat(path.c_str(), &attr), 0);
        return attr.st_mode & 07777;
    };
    EXPECT_EQ(mode_after(12345, 06777, O_WRONLY | O_TRUNC), 0777u);
    EXPECT_EQ(mode_after(12345, 06777, O_RDONLY | O_TRUNC), 0777u);
    EXPECT_EQ(mode_after(12345, 04766, O_WRONLY | O_TRUNC), 0766u);
    EXPECT_EQ(mode_after(12345, 06777, O_WRONLY), 06777u) << "nothing is changed by it";
    if (geteuid() == 0) {
        EXPECT_EQ(mode_after(0, 06777, O_WRONLY | O_TRUNC), 06777u);
    }
}

TEST_F(FsTest, AContextWhereNobodyLooksForOneIsToldOf)
{
    static const char TOLD[] = "not served, contexts lie in MODEL/contexts/NAME: ";
    const Bytes json{'{', '}'};
    for (const char *folder : {"m/contexts/c", "m/contexts/c/old", "m/copies/c"}) {
        fs.mkdirs(folder);
        ASSERT_EQ(fs.put(std::string(folder) + "/context.json", json), 0);
    }
    ASSERT_EQ(fs.put("context.json", json), 0);
    EXPECT_EQ(fs.log().find(TOLD), std::string::npos) << fs.log();
    for (const char *folder : {"c", "m/c", "m/contexts"}) {
        fs.mkdirs(folder);
        const std::string path = std::string(folder) + "/context.json";
        ASSERT_EQ(fs.put(path, json), 0);
        EXPECT_NE(fs.log().find(TOLD + path + " of user "), std::string::npos) << fs.log();
        const std::string log = fs.log();
        ASSERT_EQ(fs.put(path, json), 0);
        EXPECT_EQ(fs.log(), log) << "once for a name";
    }
    // As rsync does, and mv of a folder.
    fs.mkdirs("rsync");
    ASSERT_EQ(fs.put("rsync/.context.json.AbCdEf", json), 0);
    ASSERT_EQ(fs.rename("rsync/.context.json.AbCdEf", "rsync/context.json"), 0);
    EXPECT_NE(fs.log().find(TOLD + std::string("rsync/context.json")), std::string::npos);
    ASSERT_EQ(fs.rename("m/contexts/c", "m/mv"), 0);
    EXPECT_NE(fs.log().find(TOLD + std::string("m/mv/context.json")), std::string::npos);
    const std::string log = fs.log();
    ASSERT_EQ(fs.rename("m/mv", "m/contexts/c"), 0);
    ASSERT_EQ(fs.rename("m/copies", "copies"), 0);
    EXPECT_EQ(fs.log(), log);
    ASSERT_EQ(fs.rename("m/contexts/c", "copies", RENAME_EXCHANGE), 0);
    EXPECT_NE(fs.log().find(TOLD + std::string("copies/context.json")), std::string::npos);
}

// A user whose lines are many has none left for it; another may tell later.
TEST_F(FsTest, AMisplacedContextThatTheLogLeftOutIsToldLater)
{
    static const char TOLD[] = "not served, contexts lie in MODEL/contexts/NAME: late/context.json";
    const Bytes json{'{', '}'};
    if (geteuid() != 0)
        GTEST_SKIP() << "cannot give a file away";
    for (int i = 0; i < 20; i++) {
        const std::string folder = "c" + std::to_string(i);
        fs.mkdirs(folder);
        ASSERT_EQ(fs.put(folder + "/context.json", json), 0);
    }
    fs.mkdirs("late");
    ASSERT_EQ(fs.put("late/context.json", json), 0);
    ASSERT_EQ(fs.log().find(TOLD), std::string::npos);
    ASSERT_EQ(fchownat(store.fd, "late/context.json", 1, 1, 0), 0);
    ASSERT_EQ(fs.put("late/context.json", json), 0);
    EXPECT_NE(fs.log().find(TOLD), std::string::npos) << fs.log();
}

TEST_F(FsTest, ControlDirectoryTellsVersionConfigAndMetrics)
{
    EXPECT_EQ(fs.list(""), (std::vector<std::string>{".cachegenfs", "m"}));
    EXPECT_EQ(fs.list(".cachegenfs"), (std::vector<std::string>{"config", "metrics", "version"}));
    const Bytes config = fs.get(".cachegenfs/config");
    EXPECT_EQ(std::string(config.begin(), config.end()),
              "a = b\npid = " + std::to_string(getpid()) + "\n");
    EXPECT_EQ(fs.get(".cachegenfs/version")[0], 'c');
    cg_fs_file *file;
    EXPECT_EQ(fs.open(".cachegenfs/config", O_WRONLY, &file), EACCES);
    EXPECT_EQ(fs.create(".cachegenfs/x", &file), EACCES);
    EXPECT_EQ(fs.rmdir(".cachegenfs"), EPERM);
    EXPECT_EQ(fs.rename("m", ".cachegenfs"), EPERM);
    EXPECT_EQ(fs.look(".cachegenfs-tmp"), ENOENT);
    EXPECT_EQ(fs.mkdir(".cachegenfs-tmp"), EPERM);
}

TEST_F(FsTest, ExtendedAttributesAreForOrdinaryFiles)
{
    size_t n = 0;
    char value[10];
    ASSERT_EQ(fs.put("m/a", Bytes{1}), 0);
    ASSERT_EQ(fs.put(CHUNK, chunk.bytes), 0);
    if (setxattr((store.path + "/m/a").c_str(), "user.probe", "x", 1, 0) != 0)
        GTEST_SKIP()
            << "the temporary directory has no user.* attributes: passing them on not checked";
    EXPECT_EQ(cg_fs_setxattr(fs.fs, fs.find("m/a"), "user.color", "red", 3, 0), 0);
    EXPECT_EQ(cg_fs_getxattr(fs.fs, fs.find("m/a"), "user.color", value, sizeof value, &n), 0);
    EXPECT_EQ(std::string(value, n), "red");
    EXPECT_EQ(cg_fs_listxattr(fs.fs, &fs.caller, fs.find("m/a"), nullptr, 0, &n), 0);
    EXPECT_GT(n, 0u);
    EXPECT_EQ(cg_fs_removexattr(fs.fs, fs.find("m/a"), "user.color"), 0);
    EXPECT_EQ(cg_fs_getxattr(fs.fs, fs.find("m/a"), "user.color", value, sizeof value, &n),
              ENODATA);
    EXPECT_EQ(cg_fs_setxattr(fs.fs, fs.find(CHUNK), "user.color", "red", 3, 0), EOPNOTSUPP);
    EXPECT_EQ(cg_fs_setxattr(fs.fs, fs.find("m/a"), "system.posix_acl_access", "red", 3, 0),
              EOPNOTSUPP);
}

TEST_F(FsTest, OnlyRootSeesTrustedAttributes)
{
    size_t n = 0;
    char list[1000];
    ASSERT_EQ(fs.put("m/a", Bytes{1}), 0);
    const std::string path = store.path + "/m/a";
    for (const char *name : {"user.first", "trusted.one", "user.second", "trusted.other"})
        if (setxattr(path.c_str(), name, "x", 1, 0) != 0)
            GTEST_SKIP() << "no right, or the temporary directory has no such attributes: who may "
                            "see trusted.* is not checked";
    const auto sees = [&](uid_t uid) {
        const cg_fs_caller caller = {uid, uid, getpid()};
        std::set<std::string> names;
        EXPECT_EQ(cg_fs_listxattr(fs.fs, &caller, fs.find("m/a"), nullptr, 0, &n), 0);
        const size_t n_wanted = n;
        EXPECT_EQ(cg_fs_listxattr(fs.fs, &caller, fs.find("m/a"), list, n_wanted, &n), 0);
        EXPECT_EQ(n, n_wanted);
        for (size_t at = 0; at < n; at += strlen(list + at) + 1)
            if (strncmp(list + at, "security.", 9) != 0) // of the system's policy
                names.insert(list + at);
        EXPECT_EQ(cg_fs_listxattr(fs.fs, &caller, fs.find("m/a"), list, n_wanted - 1, &n), ERANGE);
        return names;
    };
    const std::set<std::string> of_user = {"user.first", "user.second"};
    EXPECT_EQ(sees(12345), of_user);
    EXPECT_EQ(sees(0).size(), 4u);
}

TEST_F(FsTest, ReadOnlyRefusesEveryChange)
{
    ASSERT_EQ(fs.put(CHUNK, chunk.bytes), 0);
    Fs ro(store.path, /*read_only=*/true);
    cg_fs_file *file;
    EXPECT_EQ(ro.get(CHUNK), chunk.bytes);
    EXPECT_EQ(ro.put("m/a", Bytes{1}), EROFS);
    EXPECT_EQ(ro.mkdir("m/d"), EROFS);
    EXPECT_EQ(ro.unlink(CHUNK), EROFS);
    EXPECT_EQ(ro.rename(CHUNK, "m/x"), EROFS);
    EXPECT_EQ(ro.open("m/contexts", O_RDWR, &file), EROFS);
}

TEST_F(FsTest, StagedFilesOfADeadDaemonAreRemovedAndOfALivingOneAreNot)
{
    cg_fs_file *file;
    ASSERT_EQ(fs.create(CHUNK, &file), 0);
    ASSERT_EQ(fs.write(file, chunk.bytes), 0);
    const std::string dead = ".cachegenfs-tmp/dead";
    store.write(dead + "/0", Bytes{1, 2, 3});
    cg_life life = {};
    int lock_fd;
    const int dir_fd = open((store.path + "/" + dead).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    ASSERT_EQ(cg_life_begin(&life, dir_fd, CG_STAGING_SILENT_S, &lock_fd), 0);
    close(dir_fd);
    close(lock_fd); /* as by a kill */
    Fs second(store.path);
    EXPECT_FALSE(store.has(dead));
    EXPECT_EQ(fs.close(file), 0);
    EXPECT_EQ(second.get(CHUNK), chunk.bytes);
}

TEST_F(FsTest, WritersReadersAndPublishersOfOneDirectoryGetAlong)
{
    constexpr int n_threads = 4, n_rounds = 30;
    Fs others(store.path);
    std::vector<std::thread> threads;
    std::atomic<int> n_bad{0};
    for (int t = 0; t < n_threads; t++)
        threads.emplace_back([&, t] {
            for (int i = 0; i < n_rounds; i++) {
                const std::string path = L1 + "/0000" + std::to_string((i + t) % 5) + ".kv";
                const int error = fs.put(path, chunk.bytes);
                /* Another thread may be writing it (its creator sees it), or take it away. */
                n_bad += error != 0 && error != EPERM && error != EEXIST && error != ENOENT &&
                         error != ESTALE;
                /* Who looks from elsewhere sees all of it or nothing; here it may be unfinished. */
                const Bytes published = others.get(path), bytes = fs.get(path);
                n_bad += !published.empty() && published != chunk.bytes;
                n_bad += bytes.size() > chunk.bytes.size() ||
                         !std::equal(bytes.begin(), bytes.end(), chunk.bytes.begin());
                if (i % 3 == 0)
                    fs.unlink(path);
                if (i % 7 == 0)
                    fs.rename("m/contexts/c", "m/contexts/d"),
                        fs.rename("m/contexts/d", "m/contexts/c");
            }
        });
    for (std::thread &thread : threads)
        thread.join();
    EXPECT_EQ(n_bad, 0);
    EXPECT_EQ(fs.metric("files_pending"), 0u);
    EXPECT_EQ(fs.metric("files_open"), 0u);
    for (const std::string &name : fs.list(L1))
        EXPECT_EQ(store.read(L1 + "/" + name), chunk.bytes) << name;
}

TEST_F(FsTest, UserHasSoManyFilesUnderWayAndNoMore)
{
    const cg_fs_caller me = fs.caller;
    fs.caller.uid = 12345;
    cg_fs_node *folder = fs.find(L1);
    int n = 0, error = 0;
    for (; error == 0 && n < 5000; n++) {
        cg_fs_entry entry;
        char name[16];
        snprintf(name, sizeof name, "%05d.kv", n);
        error = cg_fs_mknod(fs.fs, &fs.caller, folder, name, S_IFREG | 0644, 0, &entry);
    }
    EXPECT_EQ(error, EDQUOT);
    EXPECT_EQ(fs.metric("files_pending"), static_cast<uint64_t>(n - 1));
    fs.caller = me;
    if (geteuid() == 0)
        fs.caller.uid = 54321;
    EXPECT_EQ(fs.put(CHUNK, chunk.bytes), geteuid() == 0 ? 0 : EDQUOT) << "others have their own";
}

// As of a program that ended, or a client of NFS that went away: the kernel keeps what it made.
TEST_F(FsTest, WhatMknodLeftKeepsNobodyOutForEver)
{
    cg_fs_node *folder = fs.find(L1);
    std::vector<cg_fs_node *> nodes;
    cg_fs_entry entry;
    const auto make = [&] {
        const std::string name = std::to_string(10000 + nodes.size()) + ".kv";
        const int error =
            cg_fs_mknod(fs.fs, &fs.caller, folder, name.c_str(), S_IFREG | 0644, 0, &entry);
        if (error == 0)
            nodes.push_back(entry.node);
        return error;
    };
    while (nodes.size() < 5000 && make() == 0) {
    }
    const size_t n = nodes.size();
    ASSERT_EQ(make(), EDQUOT);
    cg_fs_file *file;
    ASSERT_EQ(cg_fs_open(fs.fs, &fs.caller, nodes[3], O_WRONLY, &file), 0);
    for (const size_t i : {3, 5, 7})
        nodes[i]->pending->used_s -= CG_PENDING_IDLE_S + 10 - static_cast<int64_t>(i);
    EXPECT_EQ(fs.put(CHUNK, chunk.bytes), 0);
    struct stat attr;
    EXPECT_NE(cg_fs_getattr(fs.fs, nodes[5], &attr), 0) << "it was not used for longest";
    EXPECT_EQ(cg_fs_getattr(fs.fs, nodes[7], &attr), 0) << "which is a use";
    EXPECT_EQ(cg_fs_getattr(fs.fs, nodes[3], &attr), 0);
    EXPECT_EQ(make(), 0) << "the chunk is published, and counts no more";
    EXPECT_EQ(make(), EDQUOT);
    nodes[7]->pending->used_s -= CG_PENDING_IDLE_S;
    EXPECT_EQ(make(), 0);
    EXPECT_EQ(make(), EDQUOT) << "the other is open";
    EXPECT_EQ(fs.write(file, chunk.bytes), 0);
    EXPECT_EQ(fs.close(file), 0);
    EXPECT_EQ(fs.metric("files_pending"), n - 1);
    for (cg_fs_node *node : nodes)
        cg_fs_forget(fs.fs, node, 1);
    EXPECT_EQ(fs.metric("files_pending"), 0u);
}

TEST_F(FsTest, RefusalsOfOneUserFillNoLog)
{
    for (int i = 0; i < 100; i++)
        EXPECT_EQ(fs.put(CHUNK, Bytes(500, 'x')), EBADMSG);
    for (int i = 0; i < 100; i++)
        EXPECT_EQ(fs.put("m/contexts/c/profile.cgp", Bytes(500, 'x')), 0) << "an ordinary file";
    const std::string log = fs.log();
    const auto n_lines = std::count(log.begin(), log.end(), '\n');
    EXPECT_GE(n_lines, 1);
    EXPECT_LE(n_lines, 40);
    EXPECT_NE(log.find(" of user " + std::to_string(fs.caller.uid) + ": "), std::string::npos);
}

TEST_F(FsTest, ProfilesThatAreNoneAreLoggedWithTheirOwner)
{
    EXPECT_EQ(fs.put("m/contexts/c/profile.cgp", Bytes(500, 'x')), 0);
    EXPECT_NE(fs.log().find("not adopted: m/contexts/c/profile.cgp of user " +
                            std::to_string(fs.caller.uid) + ": "),
              std::string::npos)
        << fs.log();
}

TEST(ChunkSourceTest, SaysWhatACheckInMemorySays)
{
    const cg_fingerprint profile = fingerprint_of("a profile");
    const Bytes good = make_chunk(nullptr, draw_tokens(16, 1), CG_L1, &profile).bytes;
    const auto read = [](void *user, uint64_t offset, uint8_t *out, size_t n_bytes) {
        const Bytes &bytes = *static_cast<const Bytes *>(user);
        if (offset + n_bytes > bytes.size())
            return CG_ERR_TRUNCATED;
        std::copy_n(bytes.begin() + static_cast<long>(offset), n_bytes, out);
        return CG_OK;
    };
    cg_chunk_header header;
    for (size_t i = 0; i <= good.size(); i++) {
        SCOPED_TRACE(i);
        Bytes flipped = good, cut(good.begin(), good.begin() + static_cast<long>(i));
        if (i < good.size())
            flipped[i] ^= 0x41;
        for (Bytes *bytes : {&flipped, &cut})
            EXPECT_EQ(cg_chunk_verify_source(read, bytes, bytes->size(), &header),
                      cg_chunk_verify(bytes->data(), bytes->size()));
    }
}

// The disk would be full of what can never be published.
TEST_F(FsTest, AFileThatIsTooLargeToBePublishedGrowsNoFurther)
{
    const off_t most = off_t{4} << 30;
    cg_fs_file *file, *ordinary;
    struct stat attr = {};
    size_t n_copied = 0;
    ASSERT_EQ(fs.create(CHUNK, &file), 0);
    EXPECT_EQ(fs.write(file, Bytes{0}, most + 1), EFBIG);
    EXPECT_EQ(cg_fs_fallocate(fs.fs, file, 0, most, 1), EFBIG);
    EXPECT_EQ(cg_fs_ftruncate(fs.fs, file, most + 1), EFBIG);
    attr.st_size = most + 1;
    EXPECT_EQ(cg_fs_setattr(fs.fs, fs.find(CHUNK), &attr, CG_SET_SIZE, &attr), EFBIG);
    ASSERT_EQ(fs.put("m/ordinary", Bytes(100, 1)), 0);
    ASSERT_EQ(fs.open("m/ordinary", O_RDWR, &ordinary), 0);
    EXPECT_EQ(cg_fs_copy_range(fs.fs, ordinary, 0, file, most + 1, 100, &n_copied), EFBIG);
    EXPECT_EQ(cg_fs_copy_range(fs.fs, ordinary, 0, file, most - 40, 100, &n_copied), 0);
    EXPECT_EQ(n_copied, 40u);
    EXPECT_EQ(fs.write(ordinary, Bytes{0}, most + 1), 0) << "an ordinary file may";
    EXPECT_EQ(fs.close(ordinary), 0);
    EXPECT_NE(fs.close(file), 0);
}

// A chunk of 1 GiB with nothing in it, as a user makes one in no time.
TEST_F(FsTest, LargeSparseFileIsCheckedInLittleMemory)
{
    const uint64_t n_bytes = UINT64_C(1) << 30;
    Bytes head = chunk.bytes;
    head.resize(CG_CHUNK_FIXED_BYTES);
    cg_put_le(&head[16], 8, n_bytes); /* what the fixed header says of the file's size */
    cg_fs_file *file;
    ASSERT_EQ(fs.create(CHUNK, &file), 0);
    ASSERT_EQ(fs.write(file, head), 0);
    ASSERT_EQ(fs.write(file, Bytes{0}, static_cast<off_t>(n_bytes) - 1), 0);
    struct rlimit before, limit;
    ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
    limit = before;
    limit.rlim_cur = address_space_bytes() + (UINT64_C(256) << 20);
    ASSERT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
    const int error = cg_fs_flush(fs.fs, file);
    ASSERT_EQ(setrlimit(RLIMIT_AS, &before), 0);
    EXPECT_EQ(error, EBADMSG) << "not ENOMEM: it need not be in memory";
    cg_fs_release(fs.fs, file);
}

// Their number is a user's choice, who holds them with O_PATH: a look-up must not walk past them.
TEST(NodesTest, OfAllThatHadANumberOnlyTheLivingOneIsFound)
{
    cg_nodes nodes;
    cg_node_ref refs[CG_NODES_MAX_OF_FILE];
    std::vector<cg_fs_node *> held;
    struct stat attr = {};
    char *path;
    attr.st_mode = S_IFDIR | 0755;
    attr.st_ino = 1;
    ASSERT_EQ(cg_nodes_init(&nodes, &attr), 0);
    attr.st_mode = S_IFREG | 0644;
    attr.st_ino = 2;
    for (uint64_t identity = 1; identity <= 5000; identity++)
        held.push_back(cg_nodes_enter(&nodes, nodes.root, identity % 2 == 0 ? "even" : "odd", &attr,
                                      identity, nullptr));
    EXPECT_EQ(cg_nodes_of_file(&nodes, attr.st_dev, 2, refs), 1u);
    EXPECT_EQ(refs[0].node, held.back());
    EXPECT_EQ(cg_nodes_path(&nodes, held[4998], 0, nullptr, &path), ENOENT)
        << "its name is there, and leads to another file";
    ASSERT_EQ(cg_nodes_path(&nodes, held[4999], 0, nullptr, &path), 0);
    EXPECT_STREQ(path, "even");
    free(path);
    for (cg_fs_node *node : held)
        cg_nodes_forget(&nodes, node, 1);
    EXPECT_EQ(cg_nodes_count(&nodes), 1u) << "the root";
    cg_nodes_destroy(&nodes);
}

// Somebody still stands in the folder that was removed. If the new one were the same node, the
// kernel would answer ESTALE to mkdir, or show the new folder to whoever stands in the old one.
TEST(NodesTest, AFolderThatTakesOverTheNumberOfARemovedOneIsAnotherNode)
{
    cg_nodes nodes;
    struct stat attr = {};
    attr.st_mode = S_IFDIR | 0755;
    attr.st_ino = 1;
    ASSERT_EQ(cg_nodes_init(&nodes, &attr), 0);
    const auto enter = [&](ino_t ino, const char *name) {
        attr.st_ino = ino;
        return cg_nodes_enter(&nodes, nodes.root, name, &attr, 0, nullptr);
    };
    cg_fs_node *const old = enter(2, "a");
    cg_nodes_drop_name(&nodes, nodes.root, "a", /*is_removed=*/false);
    EXPECT_EQ(enter(2, "b"), old) << "it was moved past us";
    enter(2, "stale");
    cg_nodes_drop_name(&nodes, nodes.root, "stale", /*is_removed=*/true);
    EXPECT_EQ(enter(2, "b"), old) << "it was something else that was removed";
    cg_nodes_drop_name(&nodes, nodes.root, "b", /*is_removed=*/true);
    cg_fs_node *const next = enter(2, "b");
    EXPECT_NE(next, old);
    EXPECT_EQ(enter(2, "c"), next) << "a hit once more";
    cg_nodes_drop_name(&nodes, nodes.root, "c", /*is_removed=*/false);

    cg_fs_node *const mover = enter(3, "mover");
    cg_nodes_move_name(&nodes, nodes.root, "mover", nodes.root, "b", /*exchange=*/true);
    EXPECT_EQ(enter(2, "mover"), next) << "both are there";
    cg_nodes_move_name(&nodes, nodes.root, "b", nodes.root, "mover", /*exchange=*/false);
    EXPECT_EQ(enter(3, "mover"), mover);
    EXPECT_NE(enter(2, "new"), next) << "it was replaced";
    cg_nodes_destroy(&nodes);
}

// Whoever may write to the directory beside the daemon can put anything in a new name's place.
TEST(CrowdTest, ListingsBringNoFilesWhenManyAreKnown)
{
    const TempDir store;
    cg_fs_config config = {};
    config.store = store.path.c_str();
    config.max_listed_files = 2; // the root is one
    cg_fs *fs;
    ASSERT_EQ(cg_fs_new(&config, &fs), 0);
    const cg_fs_caller caller = {geteuid(), getegid(), getpid()};
    cg_fs_entry a, b;
    ASSERT_EQ(cg_fs_mkdir(fs, &caller, cg_fs_root(fs), "a", 0755, &a), 0);
    EXPECT_FALSE(cg_fs_is_crowded(fs));
    ASSERT_EQ(cg_fs_mkdir(fs, &caller, cg_fs_root(fs), "b", 0755, &b), 0);
    EXPECT_TRUE(cg_fs_is_crowded(fs));
    cg_fs_forget(fs, b.node, 1);
    EXPECT_FALSE(cg_fs_is_crowded(fs)) << "the kernel forgot it";
    cg_fs_forget(fs, a.node, 1);
    cg_fs_free(fs);
}

// Of a file or folder: read for user 1234.
bool set_acl(const std::string &path, const char *name)
{
    const uint32_t all = UINT32_MAX;
    struct __attribute__((packed)) {
        uint32_t version = 2;
        struct __attribute__((packed)) {
            uint16_t tag, rights;
            uint32_t id;
        } entries[5] = {{1, 7, all}, {2, 4, 1234}, {4, 5, all}, {16, 5, all}, {32, 0, all}};
    } list;
    for (auto &entry : list.entries)
        if (entry.tag != 2)
            entry.id = all;
    return setxattr(path.c_str(), name, &list, sizeof list, 0) == 0;
}

TEST_F(FsTest, AccessControlListsAreNotPassedOver)
{
    ASSERT_EQ(fs.put("m/file", {1}), 0);
    if (!set_acl(store.path + "/m/file", "system.posix_acl_access"))
        GTEST_SKIP() << "no access control lists here";
    cg_fs_file *file;
    EXPECT_EQ(fs.open("m/file", O_RDONLY, &file), EACCES);
    EXPECT_EQ(fs.open("m/file", O_WRONLY, &file), EACCES);
    cg_fs_directory *directory;
    EXPECT_EQ(cg_fs_opendir(fs.fs, &fs.caller, fs.find("m/contexts/c"), &directory), 0);
    cg_fs_closedir(directory);
    ASSERT_TRUE(set_acl(store.path + "/m/contexts/c", "system.posix_acl_default"));
    EXPECT_EQ(cg_fs_opendir(fs.fs, &fs.caller, fs.find("m/contexts/c"), &directory), EACCES);
    Fs later(store.path);
    EXPECT_EQ(cg_fs_opendir(later.fs, &fs.caller, later.find("m/contexts/c"), &directory), EACCES);
    EXPECT_EQ(later.look(L1), EACCES);
    ASSERT_TRUE(set_acl(store.path + "/m/contexts", "system.posix_acl_default"));

    std::string line;
    cg_fs *second;
    cg_fs_config config = {};
    config.store = store.path.c_str();
    config.log = [](void *to, cg_log_level, const char *text) {
        *static_cast<std::string *>(to) += text;
    };
    config.log_user = &line;
    EXPECT_EQ(cg_fs_new(&config, &second), ENOTSUP);
    EXPECT_NE(line.find("m/contexts has an access control list"), std::string::npos) << line;
    EXPECT_NE(line.find("-o ignore_acls"), std::string::npos) << line;
    config.ignores_acls = true;
    ASSERT_EQ(cg_fs_new(&config, &second), 0);
    cg_fs_free(second);
}

TEST_F(FsTest, AStartOpensNoFolderOfAContext)
{
    const auto n_opened = [&] {
        size_t n = 0;
        const OpenHook hook([&n](int, const char *) {
            n++;
            return 0;
        });
        const Fs started(store.path);
        return n;
    };
    const size_t n_with_one = n_opened();
    for (int i = 0; i < 100; i++)
        ASSERT_EQ(mkdirat(store.fd, ("m/contexts/" + std::to_string(i)).c_str(), 0755), 0);
    EXPECT_EQ(n_opened(), n_with_one);
}

TEST_F(FsTest, FolderWithAnAccessControlListIsClosed)
{
    fs.mkdirs("m/a/b/c/sub");
    ASSERT_EQ(fs.put("m/a/b/c/file", {1}), 0);
    ASSERT_EQ(fs.put("m/mine", {1}), 0);
    const std::string path = store.path + "/m/a/b/c";
    for (const std::string name : {"system.posix_acl_access", "system.posix_acl_default"}) {
        if (!set_acl(path, name.c_str()))
            GTEST_SKIP() << "no access control lists here";
        EXPECT_EQ(fs.look("m/a/b/c"), 0);
        EXPECT_EQ(fs.look("m/a/b/c/file"), EACCES);
        EXPECT_EQ(fs.put("m/a/b/c/new", {1}), EACCES);
        EXPECT_EQ(fs.mkdir("m/a/b/c/new"), EACCES);
        EXPECT_EQ(fs.symlink("x", "m/a/b/c/new"), EACCES);
        EXPECT_EQ(fs.link("m/mine", "m/a/b/c/new"), EACCES);
        EXPECT_EQ(fs.unlink("m/a/b/c/file"), EACCES);
        EXPECT_EQ(fs.rmdir("m/a/b/c/sub"), EACCES);
        EXPECT_EQ(fs.rename("m/a/b/c/file", "m/new"), EACCES);
        EXPECT_EQ(fs.rename("m/mine", "m/a/b/c/new"), EACCES);
        EXPECT_TRUE(store.has("m/a/b/c/file") && store.has("m/a/b/c/sub"));
        EXPECT_FALSE(store.has("m/a/b/c/new"));
        ASSERT_EQ(removexattr(path.c_str(), name.c_str()), 0);
        EXPECT_EQ(fs.look("m/a/b/c/file"), 0);
    }
    ASSERT_TRUE(set_acl(store.path + "/m/mine", "system.posix_acl_access"));
    EXPECT_EQ(fs.truncate("m/mine", 0), EACCES);
}

TEST_F(FsTest, WhatIsMadeIsItsCallersFromTheStartAndNotGivenAwayByName)
{
    if (geteuid() != 0)
        GTEST_SKIP() << "not root: what is made is always ours";
    fs.caller.uid = 12345;
    fs.caller.gid = 23456;
    store.write("victim", std::string("root's"));
    struct stat attr;
    {
        const ChownHook attack([&](int dir_fd, const char *name) {
            if (name[0] != '\0' && unlinkat(dir_fd, name, 0) == 0)
                linkat(store.fd, "victim", dir_fd, name, 0);
        });
        cg_fs_entry entry;
        ASSERT_EQ(cg_fs_mknod(fs.fs, &fs.caller, fs.find("m"), "node", S_IFREG | 0640, 0, &entry),
                  0);
        cg_fs_forget(fs.fs, entry.node, 1);
        ASSERT_EQ(fs.symlink("anywhere", "m/link"), 0);
        ASSERT_EQ(fs.mkdir("m/dir"), 0);
        ASSERT_EQ(fs.put("m/file", Bytes{1}), 0);
        ASSERT_EQ(fs.put(CHUNK, chunk.bytes), 0);
    }
    for (const char *path : {"m/node", "m/link", "m/dir", "m/file", "m/contexts/c/L1/00000.kv"}) {
        ASSERT_EQ(fstatat(store.fd, path, &attr, AT_SYMLINK_NOFOLLOW), 0);
        EXPECT_EQ(attr.st_uid, 12345u) << path;
        EXPECT_EQ(attr.st_gid, 23456u) << path;
    }
    ASSERT_EQ(fstatat(store.fd, "victim", &attr, AT_SYMLINK_NOFOLLOW), 0);
    EXPECT_EQ(attr.st_uid, 0u);
    ASSERT_EQ(fstatat(store.fd, "m/objects", &attr, AT_SYMLINK_NOFOLLOW), 0);
    EXPECT_EQ(attr.st_uid, 0u) << "as the model's folder";
    EXPECT_EQ(attr.st_mode & 07777, 0755u);
}

} // namespace
