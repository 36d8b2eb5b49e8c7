// What keeps a daemon working for long: things that change past it, and callers it cannot tell
// apart. No mount.
#include "fusefs/at_hand.h"
#include "fusefs/lanes.h"
#include "fusefs/left.h"
#include "fusefs/overdue.h"
#include "iouring/adopted.h"
#include "iouring/store.h"
#include "tests/fusefs/call_hooks.h"
#include "tests/fusefs/fs_fixture.h"

#include <sys/stat.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <set>
#include <thread>

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

// Past the daemon, between the kernel's look-up and now: its mode is not the one that was asked.
TEST_F(FsTest, InodeNumberThatCameBackWithAnotherFileOpensNothing)
{
    store.write("m/file", Bytes{1});
    cg_fs_node *node = fs.find("m/file");
    if (node->identity == 0)
        GTEST_SKIP() << "files have no identity here: one that takes over a number is not told";
    node->identity ^= 1; /* the number was another file's when the kernel looked it up */
    cg_fs_file *file;
    struct stat attr;
    for (const int flags : {O_RDONLY, O_WRONLY, O_RDONLY | O_TRUNC})
        EXPECT_EQ(cg_fs_open(fs.fs, &fs.caller, node, flags, &file), ESTALE) << flags;
    EXPECT_EQ(cg_fs_getattr(fs.fs, node, &attr), ESTALE);
    EXPECT_EQ(fs.get("m/file"), Bytes{1}) << "as after another look-up";
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

// By how many chunks of contexts are opened, which is what takes the time.
class AdoptingTest : public testing::Test
{
  protected:
    enum { N_CHUNKS = 12 };
    void SetUp() override
    {
        const cg_fingerprint profile = cg_test::fingerprint_of("p");
        for (uint32_t i = 0; i < N_CHUNKS; i++) {
            char name[32];
            snprintf(name, sizeof name, "%05u.kv", i);
            chunks.push_back(cg_test::make_chunk(nullptr, cg_test::draw_tokens(16, i), CG_L1,
                                                 &profile, 1000, i));
            store.write(folder + name, chunks[i].bytes);
        }
        // Or a change in the same tick of the kernel's clock would leave the folder its time.
        const timespec long_ago[] = {{1000, 0}, {1000, 0}};
        ASSERT_EQ(utimensat(store.fd, folder.c_str(), long_ago, 0), 0);
    }
    // How many chunks of the contexts a start looks at, so long after all that was written.
    size_t look(uint32_t want_adopted, int64_t later_s = 100)
    {
        std::set<std::string> seen;
        uint32_t n_adopted = 99;
        const cg_test::OpenHook hook([&](int, const char *name) {
            const std::string path = name;
            std::error_code gone;
            const size_t slash = path.rfind('/');
            if (slash == std::string::npos ||
                path.substr(slash + 1).size() != (counts_models ? 10 : 8))
                return 0;
            const auto in = std::filesystem::read_symlink(path.substr(0, slash), gone);
            if (in.string().find("/contexts/") != std::string::npos)
                seen.insert(in.string() + path.substr(slash));
            return 0;
        });
        EXPECT_EQ(cg_store_adopt_new(store.fd, nullptr, time(nullptr) + later_s, &n_adopted),
                  CG_OK);
        EXPECT_EQ(n_adopted, want_adopted);
        return seen.size();
    }
    void damage_note(const std::function<void(cg_test::Bytes *)> &change)
    {
        cg_test::Bytes note = store.read(CG_ADOPTED_FILE);
        change(&note);
        store.write(CG_ADOPTED_FILE, note);
    }
    bool counts_models = false; // model.json, in place of 00000.kv
    const std::string folder = "m/contexts/c/L1/";
    cg_test::TempDir store;
    std::vector<cg_test::Chunk> chunks;
};

TEST_F(AdoptingTest, LooksAgainOnlyAtWhatIsNew)
{
    EXPECT_EQ(look(N_CHUNKS), static_cast<size_t>(N_CHUNKS));
    EXPECT_EQ(look(0), 1u) << "one of each folder";
    store.write("m/contexts/new/L1/00000.kv",
                cg_test::make_chunk(nullptr, cg_test::draw_tokens(16, 77), CG_L1,
                                    &chunks[0].header.profile, 1000, 77)
                    .bytes);
    EXPECT_EQ(look(1), 2u);
    ASSERT_EQ(unlinkat(store.fd, (folder + "00003.kv").c_str(), 0), 0);
    EXPECT_EQ(look(0), static_cast<size_t>(N_CHUNKS)) << "all that is left in it, and one";
    EXPECT_EQ(look(0), 2u);
}

TEST_F(AdoptingTest, LooksAgainAtTheModelOfAContextWhenTheModelHasAnother)
{
    counts_models = true;
    store.write("m/contexts/c/model.json", std::string("{}"));
    EXPECT_EQ(look(N_CHUNKS), 1u);
    ASSERT_EQ(store.read_text("m/model.json"), "{}");
    EXPECT_EQ(look(0), 1u) << "the model's folder is another one since";
    EXPECT_EQ(look(0), 0u);
    ASSERT_EQ(unlinkat(store.fd, "m/model.json", 0), 0);
    EXPECT_EQ(look(0), 1u);
    EXPECT_EQ(store.read_text("m/model.json"), "{}");
}

TEST_F(AdoptingTest, WhatIsYoungOrWasRefusedIsLookedAtAgain)
{
    EXPECT_EQ(look(N_CHUNKS, -1000), static_cast<size_t>(N_CHUNKS));
    EXPECT_EQ(look(0, -1000), static_cast<size_t>(N_CHUNKS)) << "it has changed since then";
    EXPECT_EQ(look(0), static_cast<size_t>(N_CHUNKS));
    EXPECT_EQ(look(0), 1u);
    // A file that is still being written, and then is whole: no folder changes by that.
    store.write(folder + "00099.kv", cg_test::Bytes(10));
    EXPECT_EQ(look(0), N_CHUNKS + 1u);
    const cg_test::Chunk late = cg_test::make_chunk(nullptr, cg_test::draw_tokens(16, 99), CG_L1,
                                                    &chunks[0].header.profile, 1000, 99);
    store.write(folder + "00099.kv", late.bytes);
    EXPECT_EQ(look(1), N_CHUNKS + 1u);
}

TEST_F(AdoptingTest, ANoteThatIsStaleOrDamagedHidesNothing)
{
    EXPECT_EQ(look(N_CHUNKS), static_cast<size_t>(N_CHUNKS));
    std::filesystem::remove_all(store.path + "/m/objects");
    EXPECT_EQ(look(N_CHUNKS), static_cast<size_t>(N_CHUNKS)) << "the objects are made again";
    EXPECT_EQ(look(0), 1u);
    const std::function<void(cg_test::Bytes *)> damages[] = {
        [](cg_test::Bytes *note) { note->clear(); },
        [](cg_test::Bytes *note) { note->pop_back(); },
        [](cg_test::Bytes *note) { note->at(0) ^= 1; },
        [](cg_test::Bytes *note) { note->at(9) ^= 1; },
        [](cg_test::Bytes *note) { note->resize(8); },
        [](cg_test::Bytes *note) { note->resize((size_t{1} << 22) + 24); },
    };
    for (const auto &damage : damages) {
        damage_note(damage);
        EXPECT_EQ(look(0), static_cast<size_t>(N_CHUNKS));
        EXPECT_EQ(look(0), 1u) << "it was written anew";
    }
    std::filesystem::remove(store.path + "/" + CG_ADOPTED_FILE);
    EXPECT_EQ(look(0), static_cast<size_t>(N_CHUNKS));
}

TEST_F(AdoptingTest, WhatCannotBeBroughtToDiskIsNotNoted)
{
    {
        const cg_test::FsyncHook hook([&](int fd) { return fd == store.fd ? EIO : 0; });
        EXPECT_EQ(look(N_CHUNKS), static_cast<size_t>(N_CHUNKS));
    }
    EXPECT_FALSE(store.has(CG_ADOPTED_FILE));
    EXPECT_EQ(look(0), static_cast<size_t>(N_CHUNKS));
    EXPECT_EQ(look(0), 1u);
}

TEST_F(AdoptingTest, ALookThatIsStoppedForgetsNothing)
{
    EXPECT_EQ(look(N_CHUNKS), static_cast<size_t>(N_CHUNKS));
    cg_store_hook hook = {};
    hook.is_over = [](void *) { return true; };
    EXPECT_EQ(cg_store_adopt_new(store.fd, &hook, time(nullptr) + 100, nullptr), CG_ERR_CANCELLED);
    EXPECT_EQ(look(0), 1u);
}

TEST_F(AdoptingTest, AMountWritesANoteByTheStoresClockAndHidesIt)
{
    Fs fs(store.path);
    const auto adopt_at = [&](time_t now) {
        const timespec times[] = {{now, 0}, {now, 0}};
        for (const std::string &path : store.files(".cachegenfs-tmp")) // where it has its time from
            EXPECT_EQ(utimensat(store.fd, path.c_str(), times, 0), 0);
        cg_fs_adopt_tree(fs.fs);
    };
    struct stat attr;
    ASSERT_EQ(fstatat(store.fd, folder.c_str(), &attr, 0), 0);
    adopt_at(attr.st_ctim.tv_sec);
    EXPECT_FALSE(store.has(CG_ADOPTED_FILE)) << "all is young yet";
    adopt_at(time(nullptr) + 100);
    EXPECT_TRUE(store.has(CG_ADOPTED_FILE));
    EXPECT_EQ(fs.look(CG_ADOPTED_FILE), ENOENT);
    EXPECT_EQ(fs.put(CG_ADOPTED_FILE, {1}), EPERM);
}

TEST_F(FsTest, WhatConnectorsLeftIsLookedForOnceADay)
{
    const auto remove = [&](bool is_stopped) {
        uint64_t n_removed = 99;
        bool stopped = is_stopped;
        cg_left_remove(
            store.fd, time(nullptr) + 7200, [](void *is) { return *static_cast<bool *>(is); },
            &stopped, &n_removed);
        return n_removed;
    };
    const int64_t now = time(nullptr);
    const std::string left = "m/.model.json.0123456789abcdef.tmp";
    store.write(left, Bytes{1});
    EXPECT_EQ(cg_left_due_s(store.fd, now), 0) << "never yet";
    EXPECT_EQ(remove(true), 0u);
    EXPECT_EQ(cg_left_due_s(store.fd, now), 0) << "it did not come to its end";
    EXPECT_EQ(remove(false), 1u);
    EXPECT_FALSE(store.has(left));
    const timespec at[] = {{now, 0}, {now, 0}};
    EXPECT_GT(cg_left_due_s(store.fd, time(nullptr) + CG_LEFT_EVERY_S / 2), 0);
    ASSERT_EQ(utimensat(store.fd, CG_LEFT_SWEPT_FILE, at, 0), 0);
    EXPECT_EQ(cg_left_due_s(store.fd, now + 10), CG_LEFT_EVERY_S - 10);
    EXPECT_EQ(cg_left_due_s(store.fd, now + CG_LEFT_EVERY_S), 0);
    EXPECT_EQ(cg_left_due_s(store.fd, now - 100), 0) << "the store's clock was set back";
    const timespec old[] = {{now - 2 * CG_LEFT_EVERY_S, 0}, {now - 2 * CG_LEFT_EVERY_S, 0}};
    ASSERT_EQ(utimensat(store.fd, CG_LEFT_SWEPT_FILE, old, 0), 0);
    remove(false);
    EXPECT_GT(cg_left_due_s(store.fd, time(nullptr) + 60), 0) << "noted anew";
    EXPECT_EQ(fs.look(CG_LEFT_SWEPT_FILE), ENOENT);
    EXPECT_EQ(fs.put(CG_LEFT_SWEPT_FILE, {1}), EPERM);
}

TEST_F(FsTest, ForgettingTouchesNoFile)
{
    const auto me = std::this_thread::get_id();
    std::atomic<int> n_mine{0}, n_others{0};
    std::thread discarder([this] { cg_fs_discard(fs.fs); });
    {
        CloseHook hook([&] { (std::this_thread::get_id() == me ? n_mine : n_others)++; });
        /* Until the thread is there, who forgets does it all. */
        for (int i = 0; n_others == 0; i++) {
            cg_fs_entry entry;
            const std::string name = std::to_string(10000 + i % 1000) + ".kv";
            ASSERT_EQ(cg_fs_mknod(fs.fs, &fs.caller, fs.find(L1), name.c_str(), S_IFREG | 0644, 0,
                                  &entry),
                      0);
            n_mine = 0;
            cg_fs_forget(fs.fs, entry.node, 1);
            while (n_mine == 0 && n_others == 0)
                std::this_thread::yield();
        }
        EXPECT_EQ(n_mine, 0);
    }
    cg_fs_stop(fs.fs);
    discarder.join();
    EXPECT_EQ(fs.metric("files_pending"), 0u);
}

TEST_F(FsTest, RootIsAsItIsWhenItIsAskedFor)
{
    std::thread looker([this] { cg_fs_look_at_root(fs.fs); });
    for (int i = 0; i < 300; i++) {
        struct stat attr, now;
        bool is_old;
        ASSERT_EQ(::mkdir((store.path + "/folder" + std::to_string(i)).c_str(), 0700), 0);
        ASSERT_EQ(cg_fs_getattr_root(fs.fs, &attr, &is_old), 0);
        ASSERT_EQ(fstat(store.fd, &now), 0);
        if (!is_old) { /* on a machine that is busy for more than a second it may be */
            EXPECT_EQ(attr.st_nlink, now.st_nlink);
            EXPECT_EQ(attr.st_mtim.tv_nsec, now.st_mtim.tv_nsec);
        }
    }
    cg_fs_stop(fs.fs);
    looker.join();
    struct stat attr;
    bool is_old;
    EXPECT_EQ(cg_fs_getattr_root(fs.fs, &attr, &is_old), 0);
    EXPECT_FALSE(is_old);
}

TEST_F(FsTest, UserHasAPartOfTheDescriptorsAndOthersTheRest)
{
    store.write("m/file", Bytes{1});
    Fs few(store.path, false, 0, 3);
    few.mkdirs("m/contexts/c/L1");
    ASSERT_EQ(few.put(CHUNK, chunk.bytes), 0);
    const uid_t user = geteuid() + 1, neighbour = user + 1;
    cg_fs_file *files[3], *one = nullptr;
    cg_fs_directory *directories[2];
    few.caller.uid = user;
    cg_fs_node *folder = few.find("m"), *published = few.find(CHUNK);
    for (int i = 0; i < 10; i++) // what fails takes no part
        EXPECT_EQ(cg_fs_open(few.fs, &few.caller, published, O_WRONLY, &one), EPERM);
    ASSERT_EQ(few.open("m/file", O_RDONLY, &files[0]), 0);
    ASSERT_EQ(few.create(L1 + "/00001.kv", &files[1]), 0);
    ASSERT_EQ(cg_fs_opendir(few.fs, &few.caller, folder, &directories[0]), 0);
    EXPECT_EQ(few.open("m/file", O_RDONLY, &one), ENFILE);
    EXPECT_EQ(few.create(L1 + "/00002.kv", &one), ENFILE);
    EXPECT_EQ(cg_fs_opendir(few.fs, &few.caller, folder, &directories[1]), ENFILE);
    EXPECT_NE(few.metric("published_total"), UINT64_MAX) << "that costs none";
    for (const uid_t free : {neighbour, uid_t{0}, geteuid()}) {
        few.caller.uid = free;
        ASSERT_EQ(few.open("m/file", O_RDONLY, &one), 0) << free;
        cg_fs_release(few.fs, one);
    }
    few.caller.uid = user;
    cg_fs_release(few.fs, files[1]);
    ASSERT_EQ(few.open("m/file", O_RDONLY, &files[1]), 0);
    cg_fs_closedir(directories[0]);
    ASSERT_EQ(few.open("m/file", O_RDONLY, &files[2]), 0);
    EXPECT_EQ(few.open("m/file", O_RDONLY, &one), ENFILE);
    for (cg_fs_file *file : files)
        cg_fs_release(few.fs, file);
}

// Each question for attributes asks whether a name of the file is strict.
TEST_F(FsTest, OfAFileWithManyNamesSomeAreTried)
{
    static std::atomic<unsigned> n_tried;
    cg_nodes *nodes = cg_fs_nodes(fs.fs);
    unsigned index = 0;
    char *path;
    ASSERT_EQ(fs.put("m/file", Bytes{1}), 0);
    cg_fs_node *file = fs.find("m/file"), *folder = fs.find("m");
    for (unsigned i = 0; i < 4 * CG_NODES_MAX_TRIED; i++)
        cg_nodes_add_name(nodes, file, folder, ("link" + std::to_string(i)).c_str());
    n_tried = 0;
    const auto none = [](const char *) {
        n_tried++;
        return false;
    };
    EXPECT_EQ(cg_nodes_path_of_file(nodes, file, none, &index, &path), EMLINK);
    EXPECT_EQ(n_tried, static_cast<unsigned>(CG_NODES_MAX_TRIED));
    const auto last = [](const char *text) {
        return strcmp(text, ("m/link" + std::to_string(4 * CG_NODES_MAX_TRIED - 1)).c_str()) == 0;
    };
    index = 0;
    ASSERT_EQ(cg_nodes_path_of_file(nodes, file, last, &index, &path), 0) << "the latest first";
    free(path);
    EXPECT_EQ(fs.put("m/file", Bytes{2}), 0) << "what is no chunk can be written";
}

TEST_F(FsTest, ChunkWhoseRightNameIsNotTriedStaysImmutable)
{
    cg_fs_file *file;
    ASSERT_EQ(fs.put(CHUNK, chunk.bytes), 0);
    const std::string object = object_of(chunk);
    ASSERT_EQ(fs.unlink(CHUNK), 0);
    cg_fs_node *node = fs.find(object);
    for (int i = 1; i <= 1100; i++) {
        const std::string name = L1 + "/" + std::to_string(100000 + i).substr(1) + ".kv";
        ASSERT_EQ(linkat(store.fd, object.c_str(), store.fd, name.c_str(), 0), 0);
        ASSERT_EQ(fs.find(name), node);
        ASSERT_EQ(unlinkat(store.fd, name.c_str(), 0), 0);
    }
    EXPECT_EQ(cg_fs_open(fs.fs, &fs.caller, node, O_WRONLY | O_TRUNC, &file), EPERM);
    EXPECT_EQ(store.read(object), chunk.bytes);
}

// As a kernel does that remembers the file and none of the folders above it.
cg_fs_node *find_and_forget_folders(Fs &fs, const std::filesystem::path &path)
{
    cg_fs_node *node = cg_fs_root(fs.fs);
    cg_fs_entry entry;
    for (const auto &part : path) {
        const int error = cg_fs_lookup(fs.fs, &fs.caller, node, part.c_str(), &entry);
        if (node != cg_fs_root(fs.fs))
            cg_fs_forget(fs.fs, node, 1);
        if (error != 0)
            return nullptr;
        node = entry.node;
    }
    return node;
}

TEST_F(FsTest, OldNamesOfAFileGoWithTheFoldersThatTheKernelForgot)
{
    ASSERT_EQ(fs.put(CHUNK, chunk.bytes), 0);
    const std::string object = object_of(chunk);
    ASSERT_EQ(fs.unlink(CHUNK), 0);
    Fs reader(store.path);
    cg_nodes *nodes = cg_fs_nodes(reader.fs);
    cg_fs_node *node = find_and_forget_folders(reader, object);
    ASSERT_NE(node, nullptr);
    cg_fs_file *open, *file;
    ASSERT_EQ(cg_fs_open(reader.fs, &reader.caller, node, O_RDONLY, &open), 0);
    /* Folders that were there, with a link of the object in each. */
    const auto enter_folder = [&](unsigned number) {
        struct stat attr = {};
        attr.st_dev = node->dev;
        attr.st_ino = (UINT64_C(1) << 40) + number;
        attr.st_mode = S_IFDIR;
        return cg_nodes_enter(nodes, nodes->root, std::to_string(number).c_str(), &attr, 0,
                              nullptr);
    };
    const unsigned n_folders = 3 * CG_NODES_MAX_TRIED, most = 3 * CG_NODES_MAX_TRIED / 2 + 100;
    cg_fs_node *held = enter_folder(0);
    for (unsigned i = 0; i < n_folders; i++) {
        cg_fs_node *folder = enter_folder(i);
        cg_nodes_add_name(nodes, node, folder, "file");
        cg_nodes_forget(nodes, folder, 1);
    }
    EXPECT_LE(cg_nodes_count(nodes), most);
    EXPECT_LE(nodes->n_names, 2 * most) << "a folder's and one in it";
    ino_t known;
    EXPECT_TRUE(cg_nodes_name_of(nodes, held->dev, held->ino, "file", &known))
        << "the kernel must be told when it changes";

    /* The name that is right went, too. The others go as by unlink(). */
    EXPECT_EQ(cg_fs_open(reader.fs, &reader.caller, node, O_WRONLY | O_TRUNC, &file), EPERM);
    for (unsigned i = 0; i < n_folders; i++) {
        cg_fs_node *folder = enter_folder(i);
        cg_nodes_drop_name(nodes, folder, "file", false);
        cg_nodes_forget(nodes, folder, 1);
    }
    cg_nodes_forget(nodes, held, 1);
    EXPECT_EQ(cg_fs_open(reader.fs, &reader.caller, node, O_WRONLY | O_TRUNC, &file), EPERM);
    EXPECT_EQ(find_and_forget_folders(reader, object), node);
    cg_fs_forget(reader.fs, node, 1);
    EXPECT_EQ(cg_fs_open(reader.fs, &reader.caller, node, O_WRONLY | O_TRUNC, &file), EPERM);
    EXPECT_EQ(reader.get(object), chunk.bytes);
    EXPECT_EQ(reader.close(open), 0);
    cg_fs_forget(reader.fs, node, 1);
}

TEST_F(FsTest, UserHasSoManyOpenOfWhatTheDaemonTells)
{
    const uid_t me = fs.caller.uid, user = geteuid() + 1;
    cg_fs_node *metrics = fs.find(".cachegenfs/metrics"), *folder = fs.find(".cachegenfs");
    std::vector<cg_fs_file *> files(1);
    cg_fs_file *one;
    cg_fs_directory *directory;
    fs.caller.uid = user;
    EXPECT_EQ(cg_fs_open(fs.fs, &fs.caller, metrics, O_WRONLY, &one), EACCES);
    int error = 0;
    while (files.size() < 1000 &&
           (error = cg_fs_open(fs.fs, &fs.caller, metrics, O_RDONLY, &files.back())) == 0)
        files.push_back(nullptr);
    EXPECT_EQ(error, ENFILE);
    files.pop_back();
    EXPECT_GE(files.size(), 16u);
    EXPECT_EQ(cg_fs_opendir(fs.fs, &fs.caller, folder, &directory), ENFILE);
    cg_fs_release(fs.fs, files.back());
    files.pop_back();
    ASSERT_EQ(cg_fs_opendir(fs.fs, &fs.caller, folder, &directory), 0);
    cg_fs_closedir(directory);
    EXPECT_EQ(fs.list(".cachegenfs").size(), 3u) << "it was given back";
    for (const uid_t uid : {user + 1, me}) {
        fs.caller.uid = uid;
        ASSERT_EQ(cg_fs_open(fs.fs, &fs.caller, metrics, O_RDONLY, &one), 0) << uid;
        cg_fs_release(fs.fs, one);
    }
    for (cg_fs_file *file : files)
        cg_fs_release(fs.fs, file);
}

class AtHandTest : public testing::Test
{
  protected:
    static constexpr uint64_t CLOSE_NS = CG_AT_HAND_CLOSE_NS / 4;
    void SetUp() override
    {
        EXPECT_FALSE(begin(true, CG_AT_HAND_CLOSE_NS)) << "after nothing";
        follow_through(CG_AT_HAND_APART_NS);
    }
    bool begin(bool may_be_short = true, uint64_t since_last_ns = CLOSE_NS)
    {
        now_ns += since_last_ns;
        return cg_at_hand_begin(&at_hand, may_be_short, now_ns, &turn, &wakes);
    }
    bool end(uint64_t took_ns = 0)
    {
        now_ns += took_ns;
        return cg_at_hand_end(&at_hand, turn, now_ns - took_ns, now_ns);
    }
    bool look()
    {
        return cg_at_hand_look(&at_hand, now_ns);
    }
    /* Close requests, of which none is at hand before the pause that has just begun is over. The
     * next one is. */
    void follow_through(uint64_t pause_ns)
    {
        for (uint64_t n = 1; n < pause_ns / CLOSE_NS; n++) {
            EXPECT_FALSE(begin());
            EXPECT_FALSE(cg_at_hand_is_on(&at_hand, now_ns));
        }
    }
    cg_at_hand at_hand = {};
    uint64_t now_ns = 0, turn = 0;
    bool wakes = false;
};

TEST_F(AtHandTest, OnlyShortRequestsThatFollowCloselyAre)
{
    ASSERT_TRUE(begin());
    EXPECT_FALSE(begin()) << "one at a time";
    EXPECT_TRUE(end());
    ASSERT_TRUE(begin());
    EXPECT_TRUE(end(CG_AT_HAND_SHORT_NS));
    const struct {
        std::function<void()> interrupt;
        uint64_t pause_ns;
    } cases[] = {
        {[&] { EXPECT_FALSE(begin(true, CG_AT_HAND_CLOSE_NS)); }, CG_AT_HAND_APART_NS},
        {[&] { EXPECT_FALSE(begin(false)); }, CG_AT_HAND_PAUSE_NS},
        {[&] { EXPECT_FALSE(begin(false, CG_AT_HAND_CLOSE_NS)); }, CG_AT_HAND_PAUSE_NS},
        {[&] {
             ASSERT_TRUE(begin());
             EXPECT_TRUE(end(CG_AT_HAND_SHORT_NS + 1));
         },
         CG_AT_HAND_PAUSE_NS},
    };
    for (const auto &[interrupt, pause_ns] : cases) {
        interrupt();
        follow_through(pause_ns);
        ASSERT_TRUE(begin());
        EXPECT_TRUE(cg_at_hand_is_on(&at_hand, now_ns));
        EXPECT_TRUE(end());
    }
}

TEST_F(AtHandTest, OneThatTakesLongIsFoundByTheSecondLook)
{
    ASSERT_TRUE(begin());
    EXPECT_FALSE(look());
    EXPECT_TRUE(end());
    ASSERT_TRUE(begin());
    EXPECT_FALSE(look()) << "another request";
    EXPECT_TRUE(look());
    EXPECT_FALSE(look()) << "another thread waits already";
    follow_through(CG_AT_HAND_PAUSE_NS);
    ASSERT_TRUE(begin());
    const uint64_t second = turn;
    EXPECT_FALSE(cg_at_hand_end(&at_hand, second - 2, now_ns, now_ns)) << "the first comes back";
    EXPECT_TRUE(end());
}

TEST_F(AtHandTest, GuardSleepsWhileNothingIs)
{
    EXPECT_FALSE(cg_at_hand_is_guarded(&at_hand));
    for (int round = 0; round < 2; round++) {
        ASSERT_TRUE(begin());
        EXPECT_TRUE(wakes);
        EXPECT_TRUE(end());
        ASSERT_TRUE(begin());
        EXPECT_FALSE(wakes);
        EXPECT_TRUE(end());
        EXPECT_FALSE(look());
        for (int i = 0; i < CG_AT_HAND_IDLE_LOOKS; i++) {
            EXPECT_TRUE(cg_at_hand_is_guarded(&at_hand));
            EXPECT_FALSE(look());
        }
        EXPECT_FALSE(cg_at_hand_is_guarded(&at_hand));
    }
}

TEST_F(AtHandTest, EachThatTheGuardFoundIsTold)
{
    std::atomic<int> n_found{0}, n_told{0}, n_left{4};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; i++)
        threads.emplace_back([&] {
            for (int k = 0; k < 1000; k++) {
                uint64_t mine;
                bool wakes_it;
                if (!cg_at_hand_begin(&at_hand, true, now_ns, &mine, &wakes_it))
                    continue;
                std::this_thread::yield();
                n_told += !cg_at_hand_end(&at_hand, mine, 0, 0);
            }
            n_left--;
        });
    /* At a time that is past: nothing pauses. */
    while (n_left > 0)
        n_found += cg_at_hand_look(&at_hand, 0);
    for (std::thread &thread : threads)
        thread.join();
    EXPECT_EQ(n_found, n_told);
    EXPECT_EQ(at_hand.turn % 2, 0u);
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

TEST_F(LanesTest, UserHasAPartOfALaneAndOthersTheRest)
{
    const struct {
        cg_lane lane, other;
        int part;
    } cases[] = {{CG_LANE_CHANGE, CG_LANE_READ, CG_LANE_USER_CHANGES},
                 {CG_LANE_READ, CG_LANE_CHANGE, CG_LANE_USER_READS}};
    for (const auto &[lane, other, part] : cases) {
        SCOPED_TRACE(lane);
        for (int i = 0; i < part; i++)
            EXPECT_TRUE(cg_lanes_begin(&lanes, lane, 1000));
        EXPECT_FALSE(cg_lanes_begin(&lanes, lane, 1000));
        EXPECT_TRUE(cg_lanes_begin(&lanes, lane, 1001));
        EXPECT_TRUE(cg_lanes_begin(&lanes, other, 1000));
        cg_lane_job mine{lane, 1000, nullptr, 0}, more{lane, 1000, nullptr, 0};
        EXPECT_FALSE(cg_lanes_begin_or_wait(&lanes, &mine));
        EXPECT_FALSE(cg_lanes_begin_or_wait(&lanes, &more));
        EXPECT_EQ(cg_lanes_end(&lanes, lane, 1001), nullptr) << "not for this user";
        EXPECT_EQ(cg_lanes_end(&lanes, lane, 1000), &mine);
        EXPECT_EQ(cg_lanes_take_waiting(&lanes), &more);
        EXPECT_EQ(cg_lanes_take_waiting(&lanes), nullptr);
        for (int i = 0; i < part; i++)
            EXPECT_EQ(cg_lanes_end(&lanes, lane, 1000), nullptr);
        EXPECT_EQ(cg_lanes_end(&lanes, other, 1000), nullptr);
    }
}

TEST_F(LanesTest, BytesThatWaitHaveALimitForEachUserAndForAll)
{
    const uint64_t large = 1 << 20;
    uint64_t n = 0;
    while (cg_lanes_hold(&lanes, 1000, large))
        n += large;
    EXPECT_EQ(n, static_cast<uint64_t>(CG_LANE_USER_BYTES));
    EXPECT_TRUE(cg_lanes_hold(&lanes, 1000, CG_LANE_SMALL_BYTES)) << "as the last close of a file";
    EXPECT_TRUE(cg_lanes_hold(&lanes, static_cast<uid_t>(-1), large));
    cg_lanes_let_go(&lanes, static_cast<uid_t>(-1), large);
    for (uid_t uid = 1001; cg_lanes_hold(&lanes, uid, large); uid += n % 8 == 0)
        n += large;
    EXPECT_EQ(n, static_cast<uint64_t>(CG_LANE_BYTES));
    EXPECT_FALSE(cg_lanes_hold(&lanes, 0, large)) << "root has a part of what is for all";
    cg_lanes_let_go(&lanes, 1000, large);
    EXPECT_TRUE(cg_lanes_hold(&lanes, 0, large));
    EXPECT_FALSE(cg_lanes_hold(&lanes, 1000, large)) << "all have too much";
    cg_lanes_let_go(&lanes, 0, large);
    EXPECT_TRUE(cg_lanes_hold(&lanes, 1000, large));
}

TEST_F(LanesTest, FullLaneKeepsNoOtherLaneWaiting)
{
    for (uid_t uid = 0; uid < CG_LANE_REQUESTS; uid++)
        EXPECT_TRUE(cg_lanes_begin(&lanes, CG_LANE_CHANGE, uid));
    cg_lane_job job{CG_LANE_CHANGE, 5000, nullptr, 0};
    EXPECT_FALSE(cg_lanes_begin_or_wait(&lanes, &job));
    for (uid_t uid = 0; uid < CG_LANE_REQUESTS; uid++)
        EXPECT_TRUE(cg_lanes_begin(&lanes, CG_LANE_READ, uid));
    EXPECT_FALSE(cg_lanes_begin(&lanes, CG_LANE_READ, 5000));
    EXPECT_TRUE(cg_lanes_begin(&lanes, CG_LANE_FREE, 0));
    EXPECT_EQ(cg_lanes_end(&lanes, CG_LANE_FREE, 0), nullptr);
    EXPECT_EQ(cg_lanes_end(&lanes, CG_LANE_READ, 0), nullptr);
    EXPECT_EQ(cg_lanes_end(&lanes, CG_LANE_CHANGE, 3), &job);
}

TEST_F(LanesTest, WhatNeedNotRunIsTakenOutOfALineByItsAge)
{
    for (int i = 0; i < CG_LANE_USER_READS; i++)
        EXPECT_TRUE(cg_lanes_begin(&lanes, CG_LANE_READ, 1000));
    cg_lane_job must{CG_LANE_READ, 1000, nullptr, 0}, old{CG_LANE_READ, 1000, nullptr, 5},
        older{CG_LANE_READ, 1000, nullptr, 3}, young{CG_LANE_READ, 1000, nullptr, 9};
    for (cg_lane_job *job : {&must, &old, &older, &young})
        EXPECT_FALSE(cg_lanes_begin_or_wait(&lanes, job));
    EXPECT_EQ(cg_lanes_take_late(&lanes, 3), nullptr);
    EXPECT_EQ(cg_lanes_take_late(&lanes, 9), &old);
    EXPECT_EQ(cg_lanes_take_late(&lanes, 9), &older);
    EXPECT_EQ(cg_lanes_take_late(&lanes, 9), nullptr);
    EXPECT_EQ(cg_lanes_end(&lanes, CG_LANE_READ, 1000), &must);
    EXPECT_EQ(cg_lanes_end(&lanes, CG_LANE_READ, 1000), &young);
    EXPECT_EQ(cg_lanes_take_waiting(&lanes), nullptr);
}

// Jobs give back the node that their user's number names.
class OverdueTest : public testing::Test
{
  protected:
    void SetUp() override
    {
        cg_overdue_init(&overdue, 100, [](const cg_lane_job *job, uint64_t node_id) {
            return job->uid == node_id;
        });
    }
    void TearDown() override
    {
        EXPECT_EQ(overdue.n_given_up, 0u);
        cg_overdue_destroy(&overdue);
    }
    static cg_overdue_request ask(uint64_t number, uint64_t node_id, uint64_t arrived_ns,
                                  bool lists = false)
    {
        cg_overdue_request request = {};
        request.number = number;
        request.node_id = node_id;
        request.arrived_ns = arrived_ns;
        request.lists = lists;
        return request;
    }
    cg_overdue overdue;
    uint64_t number = 0;
};

TEST_F(OverdueTest, IsGivenUpOnceAndTheNextOnesSooner)
{
    cg_overdue_request first = ask(2, 7, 1000), second = ask(4, 7, 1050), third = ask(6, 7, 1095);
    cg_overdue_begin(&overdue, &first);
    cg_overdue_begin(&overdue, &second);
    cg_overdue_begin(&overdue, &third);
    EXPECT_FALSE(cg_overdue_give_up(&overdue, 1099, &number));
    ASSERT_TRUE(cg_overdue_give_up(&overdue, 1100, &number));
    EXPECT_EQ(number, 2u);
    ASSERT_TRUE(cg_overdue_give_up(&overdue, 1100, &number)) << "the store hangs";
    EXPECT_EQ(number, 4u);
    EXPECT_FALSE(cg_overdue_give_up(&overdue, 1100, &number)) << "the third came 5 ns ago";
    EXPECT_EQ(cg_overdue_limit_ns(&overdue), 10u);
    cg_overdue_request from_memory = ask(8, 9, 1100);
    cg_overdue_begin(&overdue, &from_memory);
    cg_overdue_end(&overdue, &from_memory);
    EXPECT_EQ(cg_overdue_limit_ns(&overdue), 10u) << "it need not have asked the store";
    cg_overdue_end(&overdue, &third);
    EXPECT_EQ(cg_overdue_limit_ns(&overdue), 100u) << "it answers again";
    cg_overdue_end(&overdue, &second);
    cg_overdue_end(&overdue, &first);
    EXPECT_FALSE(cg_overdue_give_up(&overdue, 5000, &number));
}

TEST_F(OverdueTest, AfterAGapOfItsOwnLooksTheNextOneCounts)
{
    const uint64_t second = 1'000'000'000;
    for (const uint64_t at : {7 * second, 8 * second, 12 * second})
        EXPECT_TRUE(cg_overdue_may_look(&overdue, at));
    EXPECT_FALSE(cg_overdue_may_look(&overdue, 300 * second)) << "the process was stopped";
    EXPECT_TRUE(cg_overdue_may_look(&overdue, 301 * second));
}

TEST_F(OverdueTest, WithoutALimitNothingIsGivenUp)
{
    cg_overdue_request request = ask(2, 7, 0);
    overdue.limit_ns = 0;
    cg_overdue_begin(&overdue, &request);
    EXPECT_FALSE(cg_overdue_give_up(&overdue, UINT64_MAX - 1, &number));
    EXPECT_EQ(cg_overdue_end(&overdue, &request), nullptr);
}

TEST_F(OverdueTest, WhatItsThreadStillUsesIsKeptUntilItsEnd)
{
    cg_overdue_request given_up = ask(2, 7, 0), other = ask(4, 8, 200, true);
    cg_lane_job mine{CG_LANE_FREE, 7, nullptr, 0}, more{CG_LANE_FREE, 7, nullptr, 0},
        another{CG_LANE_FREE, 8, nullptr, 0};
    cg_overdue_begin(&overdue, &given_up);
    EXPECT_FALSE(cg_overdue_keep(&overdue, &mine)) << "it has its answer to come";
    ASSERT_TRUE(cg_overdue_give_up(&overdue, 150, &number));
    cg_overdue_begin(&overdue, &other);
    EXPECT_FALSE(cg_overdue_keep(&overdue, &another));
    EXPECT_TRUE(cg_overdue_keep(&overdue, &mine));
    EXPECT_TRUE(cg_overdue_keep(&overdue, &more));
    EXPECT_FALSE(cg_overdue_is_listing(&overdue, 8));
    ASSERT_TRUE(cg_overdue_give_up(&overdue, 400, &number));
    EXPECT_TRUE(cg_overdue_is_listing(&overdue, 8));
    EXPECT_FALSE(cg_overdue_is_listing(&overdue, 7)) << "which is a file";
    EXPECT_TRUE(cg_overdue_keep(&overdue, &another));
    EXPECT_EQ(cg_overdue_end(&overdue, &other), &another);
    EXPECT_FALSE(cg_overdue_is_listing(&overdue, 8));
    EXPECT_EQ(cg_overdue_end(&overdue, &given_up), &more);
    EXPECT_EQ(more.next, &mine);
    EXPECT_EQ(mine.next, nullptr);
}

} // namespace
