// What cg_io does on file systems that hang, refuse and fall short.
#include <gtest/gtest.h>
#include <sys/stat.h>

#if __has_include(<sanitizer/lsan_interface.h>)
#include <sanitizer/lsan_interface.h>
#endif

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <thread>

#include "iouring/file.h"
#include "iouring/store.h"
#include "iouring/store_internal.h"
#include "tests/iouring/chunk_maker.h"
#include "tests/iouring/io_fixture.h"
#ifdef CG_TEST_HAS_FUSE
#include "tests/iouring/odd_fs.h"
#endif

namespace
{

using cg_test::Buffer;
using cg_test::draw_bytes;
using cg_test::SECOND_NS;

#ifndef CG_TEST_HAS_FUSE
TEST(OddFsTest, IsNotTested)
{
    CG_SKIP_OR_FAIL("fuse", "built without libfuse 3: hung mounts are not tested");
}
#else

// What the kernel may still write to when a queue is freed is left to it, on purpose.
#if defined(__SANITIZE_ADDRESS__)
using LeakOnPurpose = __lsan::ScopedDisabler;
#else
struct LeakOnPurpose {
    LeakOnPurpose()
    {
    }
};
#endif

uint64_t now_ns()
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * SECOND_NS + static_cast<uint64_t>(now.tv_nsec);
}

class OddFsTest : public cg_test::IoFixture
{
  protected:
    void SetUp() override
    {
        IoFixture::SetUp();
        if (io == nullptr)
            return;
        ASSERT_EQ(mkdirat(dir.fd, "backing", 0700), 0);
        ASSERT_EQ(mkdirat(dir.fd, "odd", 0700), 0);
        odd = std::make_unique<cg_test::OddFs>(dir.path + "/backing", dir.path + "/odd");
        if (!odd->why().empty())
            CG_SKIP_OR_FAIL("fuse", odd->why() << ": hung mounts are not tested");
    }
    void TearDown() override
    {
        if (odd != nullptr)
            odd->release();
        IoFixture::TearDown();
        odd.reset();
    }

    // Waits until n requests hang in the file system.
    void wait_for_hanging(int n)
    {
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        while (odd->n_hanging() < n && std::chrono::steady_clock::now() < deadline) {
            cg_io_completion completion;
            size_t n_done;
            ASSERT_EQ(cg_io_wait(io, 1000000, &completion, 1, &n_done), CG_OK);
            ASSERT_EQ(n_done, 0u);
        }
        ASSERT_GE(odd->n_hanging(), n);
    }

    void wait_for_none_abandoned()
    {
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        while (cg_io_n_abandoned(io) > 0 && std::chrono::steady_clock::now() < deadline) {
            cg_io_completion completion;
            size_t n_done;
            ASSERT_EQ(cg_io_wait(io, 1000000, &completion, 1, &n_done), CG_OK);
            ASSERT_EQ(n_done, 0u) << "an abandoned operation completes twice";
        }
        ASSERT_EQ(cg_io_n_abandoned(io), 0u);
    }

    // The kernel tells a file system of a close after close() has returned. Until then libfuse
    // keeps a file that is unlinked, under another name.
    static bool comes_true(const std::function<bool()> &condition)
    {
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        while (!condition())
            if (std::chrono::steady_clock::now() >= deadline)
                return false;
        return true;
    }
    bool comes_to_hold(size_t n_files) const
    {
        return comes_true([&] { return dir.files("backing").size() == n_files; });
    }

    std::unique_ptr<cg_test::OddFs> odd;
};
CG_ON_BOTH_BACKENDS(OddFsTest);

TEST_P(OddFsTest, ContinuesShortReads)
{
    const std::vector<uint8_t> bytes = draw_bytes(100000, 1);
    dir.write("backing/short", bytes);
    for (size_t n : {1, 999, 1000, 1001, 4096, 5000, 99999, 100000}) {
        std::vector<uint8_t> got;
        ASSERT_EQ(read("odd/short", &got, n), CG_OK) << n;
        EXPECT_TRUE(got ==
                    std::vector<uint8_t>(bytes.begin(), bytes.begin() + static_cast<long>(n)))
            << n;
        ASSERT_EQ(read("odd/short", &got, n + 100000), CG_ERR_TRUNCATED) << n;
    }
}

// As of a connection that is lost. Where the kernel keeps what it was told of a file, it takes a
// short read for the file's end, or what did not come for zeros: those nobody can tell from the
// file's.
TEST_P(OddFsTest, AFileIsNotTruncatedForThatLittleOfItCouldBeRead)
{
    enum { CAME = 100, WANTED = 160 };
    std::vector<uint8_t> got;
    uint8_t start[WANTED];
    dir.write("backing/short", draw_bytes(5000, 1)); // past the page cache
    dir.write("backing/plain", draw_bytes(5000, 2));
    dir.write("backing/ends", draw_bytes(CAME, 3));
    for (const bool is_far : {false, true}) {
        odd.reset();
        odd = std::make_unique<cg_test::OddFs>(dir.path + "/backing", dir.path + "/odd", is_far);
        ASSERT_EQ(odd->why(), "");
        for (const std::string path : {"odd/short", "odd/plain"}) {
            SCOPED_TRACE(path);
            const auto expect_lost = [&](cg_status status, const uint8_t *bytes, size_t n_came) {
                if (path == "odd/plain" && status == CG_OK)
                    EXPECT_EQ(std::count(bytes + n_came, bytes + WANTED, 0), WANTED - n_came);
                else
                    EXPECT_EQ(status, CG_ERR_IO);
            };
            for (const cg_io_cache cache : {CG_IO_CACHED, CG_IO_DIRECT}) {
                odd->set_mood(cg_test::Mood::CUT);
                expect_lost(read(path.c_str(), &got, WANTED, cache), got.data(), CAME);
                EXPECT_EQ(last.error, last.status == CG_OK ? 0 : EIO);
                expect_lost(cg_file_read_start(dir.fd, path.c_str(), start, sizeof start, nullptr),
                            start, CAME);
                EXPECT_EQ(read("odd/ends", &got, WANTED, cache), CG_ERR_TRUNCATED);
                odd->set_mood(cg_test::Mood::GOOD);
                EXPECT_EQ(read(path.c_str(), &got, 5000), CG_OK);
            }
            ASSERT_EQ(cg_io_read_open(io, dir.fd, path.c_str(), 0, WANTED, 1), CG_OK);
            cg_io_completion first = wait_for_one();
            ASSERT_EQ(first.status, CG_OK);
            cg_io_buffer_release(first.buffer);
            cg_open_file *file = cg_open_file_new(first.file);
            odd->set_mood(cg_test::Mood::CUT);
            ASSERT_EQ(posix_fadvise(first.file, 0, 0, POSIX_FADV_DONTNEED), 0);
            ASSERT_EQ(cg_io_read_file(io, file, 4096, WANTED, 1), CG_OK);
            const cg_io_completion second = wait_for_one();
            expect_lost(second.status, second.status == CG_OK ? second.buffer->data : nullptr, 0);
            if (second.status == CG_OK)
                cg_io_buffer_release(second.buffer);
            odd->set_mood(cg_test::Mood::GOOD);
            close(cg_open_file_drop(file));
        }
    }
}

TEST_P(OddFsTest, AsksForNoMoreThanTheStart)
{
    dir.write("backing/short_counted",
              draw_bytes(1 << 20, 1)); // past the page cache, which would read ahead
    std::vector<uint8_t> got;
    ASSERT_EQ(read("odd/short_counted", &got, 160), CG_OK);
    EXPECT_EQ(odd->most_asked(), 160u);
}

TEST_P(OddFsTest, AsksForNoMoreThanTheRangeThroughThePageCache)
{
    dir.write("backing/plain", draw_bytes(4 << 20, 1));
    for (const uint64_t offset : {uint64_t{0}, uint64_t{1} << 20}) {
        const size_t before = odd->n_asked();
        ASSERT_EQ(cg_io_read_range(io, dir.fd, "odd/plain", offset, 300 << 10, CG_IO_CACHED, 5),
                  CG_OK);
        const cg_io_completion done = wait_for_one();
        ASSERT_EQ(done.status, CG_OK);
        cg_io_buffer_release(done.buffer);
        EXPECT_EQ(odd->n_asked() - before, size_t{300} << 10) << offset;
    }
}

TEST_P(OddFsTest, ReadsThroughTheCacheWhereThereIsNoDirectIo)
{
    const std::vector<uint8_t> bytes = draw_bytes(10000, 1);
    for (const char *name : {"nodirect", "latedirect", "plain"}) {
        dir.write(std::string("backing/") + name, bytes);
        for (long n : {5000, 10000}) {
            std::vector<uint8_t> got;
            ASSERT_EQ(
                read(std::string("odd/") + name, &got, static_cast<uint64_t>(n), CG_IO_DIRECT),
                CG_OK)
                << name;
            EXPECT_TRUE(got == std::vector<uint8_t>(bytes.begin(), bytes.begin() + n)) << name;
        }
    }
}

TEST_P(OddFsTest, RenamesWhereThereAreNoLinks)
{
    const std::vector<uint8_t> first = draw_bytes(5000, 1), second = draw_bytes(6000, 2);
    EXPECT_EQ(write("odd/a/file", first), CG_OK);
    EXPECT_EQ(write("odd/a/file", second), CG_ERR_EXISTS);
    EXPECT_TRUE(dir.read("backing/a/file") == first);
    EXPECT_EQ(write("odd/a/file", second, true), CG_OK);
    EXPECT_TRUE(dir.read("backing/a/file") == second);
    EXPECT_TRUE(comes_to_hold(1)) << "a temporary file is left";
}

TEST_P(OddFsTest, CopiesWhereAFileCanHaveNoMoreLinks)
{
    const std::vector<uint8_t> bytes = draw_bytes(3 << 20, 1), other = draw_bytes(10, 2);
    dir.write("backing/source", bytes);
    dir.write("backing/full", bytes);
    for (const char *from : {"odd/source", "odd/full"})
        for (const char *to : {"odd/a/copy", "odd/links/copy"}) {
            SCOPED_TRACE(testing::Message() << from << " to " << to);
            const std::string made = "backing" + std::string(to).substr(3);
            ASSERT_EQ(cg_file_install(dir.fd, from, to, false, UINT64_MAX), CG_OK);
            EXPECT_TRUE(dir.read(made) == bytes);
            EXPECT_EQ(cg_file_install(dir.fd, from, to, false, UINT64_MAX), CG_ERR_EXISTS);
            dir.write(made + ".other", other);
            std::filesystem::rename(dir.path + "/" + made + ".other", dir.path + "/" + made);
            EXPECT_EQ(cg_file_install(dir.fd, from, to, false, UINT64_MAX), CG_ERR_EXISTS);
            EXPECT_TRUE(dir.read(made) == other);
            EXPECT_EQ(cg_file_install(dir.fd, from, to, true, UINT64_MAX), CG_OK);
            EXPECT_TRUE(dir.read(made) == bytes);
            EXPECT_EQ(cg_file_install(dir.fd, from, to, true, UINT64_MAX), CG_OK)
                << "also over itself";
            EXPECT_TRUE(comes_to_hold(3)) << "a temporary file is left";
            std::filesystem::remove(dir.path + "/" + to);
        }
}

TEST_P(OddFsTest, HoldsAStoreWithoutLinks)
{
    cg_store *store;
    ASSERT_EQ(cg_store_open((dir.path + "/odd").c_str(), "m", true, &store), CG_OK);
    const std::vector<cg_test::Chunk> chain = cg_test::make_chain(2, CG_L0);
    std::vector<cg_store_link> links;
    std::vector<uint32_t> tokens;
    bool existed;
    for (const cg_test::Chunk &chunk : chain) {
        EXPECT_EQ(cg_store_publish(store, io, chunk.bytes.data(), chunk.bytes.size(), &existed),
                  CG_OK);
        EXPECT_FALSE(existed);
        EXPECT_EQ(cg_store_publish(store, io, chunk.bytes.data(), chunk.bytes.size(), &existed),
                  CG_OK);
        EXPECT_TRUE(existed);
        links.push_back({chunk.header.key, 1});
        tokens.insert(tokens.end(), chunk.tokens.begin(), chunk.tokens.end());
    }
    for (int i = 0; i < 2; i++)
        ASSERT_EQ(cg_store_context_publish(store, io, "c", links.data(), links.size(), nullptr,
                                           tokens.data(), tokens.size()),
                  CG_OK);
    EXPECT_TRUE(dir.read("backing/m/contexts/c/L0/00001.kv") == chain[1].bytes);
    EXPECT_TRUE(dir.has("backing/m/contexts/c/context.json"));
    EXPECT_TRUE(comes_to_hold(6)) << "a temporary file is left";
    cg_store_free(store);
}

// On a network each question is a round trip. The kernel asks too, before it makes a name: so a
// chunk of three levels is compared with a plain file that is given two more names.
TEST_P(OddFsTest, IsAskedOnlyByTheKernelWhetherAnObjectIsThere)
{
    const cg_fingerprint profile = cg_test::fingerprint_of("p");
    const cg_test::Chunk chunk =
        cg_test::make_chunk(nullptr, cg_test::draw_tokens(16, 1), CG_L1, &profile, 1000, 1, CG_L3);
    // A name's directory has to be there, or asking for it ends before the name.
    char path[CG_TREE_PATH_BYTES];
    ASSERT_EQ(cg_tree_object_path("links", &chunk.header.key, CG_L1, &profile, path, sizeof path),
              CG_OK);
    std::filesystem::create_directories(
        std::filesystem::path(dir.path + "/backing/" + path).parent_path());

    ASSERT_EQ(write("odd/links/plain", draw_bytes(1000, 1)), CG_OK);
    for (const char *linked : {"odd/links/second", "odd/links/third"})
        ASSERT_EQ(cg_file_link(dir.fd, "odd/links/plain", linked, 1000), CG_OK);
    cg_store *store;
    ASSERT_EQ(cg_store_open((dir.path + "/odd").c_str(), "links", true, &store), CG_OK);
    const int n_syncs = odd->calls()["fsyncdir"];
    ASSERT_EQ(cg_store_publish(store, io, chunk.bytes.data(), chunk.bytes.size(), nullptr), CG_OK);
    EXPECT_EQ(odd->calls()["fsyncdir"], n_syncs) << "names are not synced";
    cg_store_free(store);
    for (unsigned level = CG_L1; level <= CG_L3; level++) {
        ASSERT_EQ(cg_tree_object_path("links", &chunk.header.key, cg_level(level), &profile, path,
                                      sizeof path),
                  CG_OK);
        // A plain file's name is looked at before it is written, as the finest level's is where
        // the folder is there. The others' not even that.
        const int wanted =
            level == CG_L1 ? odd->n_stats("links/plain") : odd->n_stats("links/third");
        EXPECT_GE(wanted, 1);
        EXPECT_EQ(odd->n_stats(path), wanted) << path;
    }
}

// The last of the names is the temporary one, renamed; through a mount, too, since it is the
// finest. Not where another may have the name.
TEST_P(OddFsTest, PublishesANewChunkWithoutRemovingItsTemporaryName)
{
    const cg_fingerprint profile = cg_test::fingerprint_of("p");
    for (const std::string where : {"store", "mount", "folder"}) {
        SCOPED_TRACE(where);
        const std::string model = "links_" + where;
        const cg_test::Chunk chunk = cg_test::make_chunk(nullptr, cg_test::draw_tokens(16, 1),
                                                         CG_L1, &profile, 1000, 1, CG_L3);
        char path[CG_TREE_PATH_BYTES];
        ASSERT_EQ(cg_tree_object_path(model.c_str(), &chunk.header.key, CG_L1, &profile, path,
                                      sizeof path),
                  CG_OK);
        const auto folder = std::filesystem::path(dir.path + "/backing/" + path).parent_path();
        if (where == "mount")
            std::filesystem::create_directory(dir.path + "/backing/.cachegenfs");
        if (where == "folder")
            std::filesystem::create_directories(folder);
        cg_store *store;
        ASSERT_EQ(cg_store_open((dir.path + "/odd").c_str(), model.c_str(), true, &store), CG_OK);
        std::map<std::string, int> before = odd->calls();
        EXPECT_EQ(cg_store_publish(store, io, chunk.bytes.data(), chunk.bytes.size(), nullptr),
                  CG_OK);
        cg_store_free(store);
        std::map<std::string, int> after = odd->calls();
        const bool renames = where != "folder";
        EXPECT_EQ(after["rename"] - before["rename"], renames ? 1 : 0);
        EXPECT_EQ(after["unlink"] - before["unlink"], renames ? 0 : 1);
        EXPECT_EQ(after["link"] - before["link"], renames ? 2 : 3);
        EXPECT_TRUE(comes_true([&] {
            return std::distance(std::filesystem::directory_iterator(folder), {}) == 3;
        })) << "a temporary file is left";
        std::filesystem::remove(dir.path + "/backing/.cachegenfs");
    }
}

TEST_P(OddFsTest, ReplacesNestedChunksWithoutRenamesAndWithoutLinks)
{
    const cg_fingerprint profile = cg_test::fingerprint_of("p");
    const auto chunk = [&](uint32_t seed) {
        return cg_test::make_chunk(nullptr, cg_test::draw_tokens(16, 1), CG_L1, &profile, 1000,
                                   seed, CG_L3);
    };
    const cg_test::Chunk first = chunk(1), second = chunk(2);
    for (const std::string model : {"links_views", "links_views_sshfs", "copies"}) {
        SCOPED_TRACE(model);
        cg_store *store;
        ASSERT_EQ(cg_store_open((dir.path + "/odd").c_str(), model.c_str(), true, &store), CG_OK);
        ASSERT_EQ(cg_store_publish(store, io, first.bytes.data(), first.bytes.size(), nullptr),
                  CG_OK);
        uint8_t replaced = 0;
        ASSERT_EQ(
            cg_store_replace(store, io, second.bytes.data(), second.bytes.size(), 4, &replaced),
            CG_OK);
        cg_store_free(store);
        EXPECT_EQ(replaced, 2 | 4 | 8) << "copies begin alike, too";
        std::vector<ino_t> inodes;
        for (unsigned level = CG_L1; level <= CG_L3; level++) {
            char path[CG_TREE_PATH_BYTES];
            struct stat s = {};
            ASSERT_EQ(cg_tree_object_path(model.c_str(), &first.header.key, cg_level(level),
                                          &profile, path, sizeof path),
                      CG_OK);
            std::vector<uint8_t> got = dir.read(std::string("backing/") + path);
            got.resize(second.header.level_bytes[level]);
            EXPECT_TRUE(std::equal(got.begin(), got.end(), second.bytes.begin())) << level;
            ASSERT_EQ(fstatat(dir.fd, (std::string("backing/") + path).c_str(), &s, 0), 0);
            inodes.push_back(s.st_ino);
        }
        if (model != "copies") {
            EXPECT_EQ(inodes[0], inodes[1]);
            EXPECT_EQ(inodes[0], inodes[2]);
        }
        for (const std::string &name : dir.files("backing"))
            EXPECT_EQ(name.find(".tmp"), std::string::npos) << name;
    }
}

// A turn ends in a part of a chunk, in whose place the next turn has the whole one.
TEST_P(OddFsTest, AContextGrowsWhereAFileIsNotRenamedToANameOfAPart)
{
    const std::string text = std::string("CGPF\r\n\x1a\n", 8) + "x";
    const cg_fingerprint profile = cg_test::fingerprint_of(text.c_str());
    const auto make = [&](const cg_test::Chunk *before, const std::vector<uint32_t> &tokens) {
        return cg_test::make_chunk(before, tokens, CG_L1, &profile, 1000, 1, CG_L3);
    };
    std::vector<uint32_t> tokens = cg_test::draw_tokens(32, 1);
    const auto middle = tokens.begin() + 16;
    const cg_test::Chunk first = make(nullptr, {tokens.begin(), middle}),
                         tail = make(&first, {middle, middle + 8}),
                         whole = make(&first, {middle, tokens.end()});
    for (const std::string model : {"links_views", "links_views_sshfs"}) {
        SCOPED_TRACE(model);
        const std::string context = "backing/" + model + "/contexts/c/";
        char path[CG_TREE_PATH_BYTES];
        ASSERT_EQ(cg_tree_profile_path(model.c_str(), &profile, path, sizeof path), CG_OK);
        dir.write(std::string("backing/") + path, text);
        cg_store *store;
        ASSERT_EQ(cg_store_open((dir.path + "/odd").c_str(), model.c_str(), true, &store), CG_OK);
        for (const cg_test::Chunk *chunk : {&first, &tail, &whole})
            ASSERT_EQ(
                cg_store_publish(store, io, chunk->bytes.data(), chunk->bytes.size(), nullptr),
                CG_OK);
        for (const cg_test::Chunk *end : {&tail, &whole}) {
            const cg_store_link links[] = {{first.header.key, 2 | 4 | 8},
                                           {end->header.key, 2 | 4 | 8}};
            EXPECT_EQ(cg_store_context_publish(store, io, "c", links, 2, &profile, tokens.data(),
                                               16 + end->tokens.size()),
                      CG_OK);
            EXPECT_TRUE(dir.has(context + "context.json"));
            for (const char *level : {"L1", "L2", "L3"})
                EXPECT_TRUE(dir.read(context + level + "/00001.kv") == end->bytes) << level;
        }
        cg_store_free(store);
        for (const std::string &name : dir.files("backing"))
            EXPECT_EQ(name.find(".tmp"), std::string::npos) << name;
    }
}

// Two publishers of one context's name at once, as of two hosts: one through the file system, where
// it stands still, the other past it.
class TwoPublishersTest : public OddFsTest
{
  protected:
    void SetUp() override
    {
        OddFsTest::SetUp();
        if (odd == nullptr || !odd->why().empty())
            return;
        ASSERT_EQ(cg_store_open((dir.path + "/odd").c_str(), "links", true, &store), CG_OK);
        ASSERT_EQ(cg_store_open((dir.path + "/backing").c_str(), "links", true, &past), CG_OK);
        ASSERT_EQ(cg_io_new(nullptr, &past_io), CG_OK);
        for (const cg_test::Chunk &chunk : chain)
            ASSERT_EQ(
                cg_store_publish(past, past_io, chunk.bytes.data(), chunk.bytes.size(), nullptr),
                CG_OK);
    }
    void TearDown() override
    {
        cg_store_free(store);
        cg_store_free(past);
        cg_io_free(past_io, 0);
        OddFsTest::TearDown();
    }
    cg_status context(const cg_store *of, cg_io *queue, size_t n_chunks) const
    {
        std::vector<cg_store_link> links;
        std::vector<uint32_t> tokens;
        for (size_t i = 0; i < n_chunks; i++) {
            links.push_back({chain[i].header.key, 1});
            tokens.insert(tokens.end(), chain[i].tokens.begin(), chain[i].tokens.end());
        }
        return cg_store_context_publish(of, queue, "c", links.data(), links.size(), nullptr,
                                        tokens.data(), tokens.size());
    }
    const std::vector<cg_test::Chunk> chain = cg_test::make_chain(4, CG_L0);
    cg_store *store = nullptr, *past = nullptr;
    cg_io *past_io = nullptr;
};
CG_ON_BOTH_BACKENDS(TwoPublishersTest);

TEST_P(TwoPublishersTest, NoContextHasAFileThatAnotherPutThereMeanwhile)
{
    odd->hold_next("name", "/contexts/c/L0/00001.kv");
    cg_status status = CG_OK;
    std::thread publisher([&] { status = context(store, io, 2); });
    EXPECT_TRUE(comes_true([&] { return odd->n_hanging() > 0; }));
    const cg_test::Chunk other =
        cg_test::make_chunk(nullptr, cg_test::draw_tokens(16, 9), CG_L0, nullptr);
    dir.write("backing/links/contexts/c/L0/00001.kv", other.bytes);
    odd->release();
    publisher.join();
    EXPECT_EQ(status, CG_ERR_EXISTS);
    EXPECT_FALSE(dir.has("backing/links/contexts/c/context.json"));
    EXPECT_EQ(context(store, io, 2), CG_OK) << "a later one replaces what nothing speaks of";
    EXPECT_TRUE(dir.read("backing/links/contexts/c/L0/00001.kv") == chain[1].bytes);
}

// What was believed of the old one may not hold of the new one's files.
TEST_P(TwoPublishersTest, AContextThatCameMeanwhileStays)
{
    ASSERT_EQ(context(past, past_io, 2), CG_OK);
    const std::string json = "backing/links/contexts/c/context.json";
    odd->hold_next("name", "/contexts/c/L0/00002.kv");
    cg_status status = CG_OK;
    std::thread publisher([&] { status = context(store, io, 3); });
    EXPECT_TRUE(comes_true([&] { return odd->n_hanging() > 0; }));
    const std::vector<uint8_t> before = dir.read(json), other = {'{', '}'};
    dir.write(json, other);
    odd->release();
    publisher.join();
    EXPECT_EQ(status, CG_ERR_EXISTS);
    EXPECT_TRUE(dir.read(json) == other);
    EXPECT_EQ(context(store, io, 3), CG_OK) << "a later one replaces what makes no sense";
    EXPECT_FALSE(dir.read(json) == other);
    EXPECT_FALSE(dir.read(json) == before);
}

TEST_P(TwoPublishersTest, AContextLosesNoFileToWhoPublishedTheNameBefore)
{
    odd->hold_next("readdir", "/contexts/c/L0");
    std::thread publisher([&] { EXPECT_EQ(context(store, io, 2), CG_OK); });
    EXPECT_TRUE(comes_true([&] { return odd->n_hanging() > 0; }));
    EXPECT_EQ(context(past, past_io, 4), CG_OK);
    odd->release();
    publisher.join();
    EXPECT_EQ(dir.files("backing/links/contexts/c/L0").size(), 4u);
    EXPECT_EQ(context(store, io, 2), CG_OK);
    EXPECT_EQ(dir.files("backing/links/contexts/c/L0").size(), 2u) << "its own stale ones go";
}

// On a network each question is a round trip, and a conversation's context grows every turn.
TEST_P(OddFsTest, AContextThatGrowsCostsWhatIsNew)
{
    const std::string text = std::string("CGPF\r\n\x1a\n", 8) + std::string(300 << 10, 'x');
    const cg_fingerprint profile = cg_test::fingerprint_of(text.c_str());
    char path[CG_TREE_PATH_BYTES];
    ASSERT_EQ(cg_tree_profile_path("links", &profile, path, sizeof path), CG_OK);
    dir.write(std::string("backing/") + path, text);
    std::vector<cg_test::Chunk> chain;
    for (uint32_t i = 0; i < 41; i++)
        chain.push_back(cg_test::make_chunk(i == 0 ? nullptr : &chain.back(),
                                            cg_test::draw_tokens(16, i), CG_L1, &profile, 300, i,
                                            CG_L3));
    cg_store *store;
    ASSERT_EQ(cg_store_open((dir.path + "/odd").c_str(), "links", true, &store), CG_OK);
    for (const cg_test::Chunk &chunk : chain)
        ASSERT_EQ(cg_store_publish(store, io, chunk.bytes.data(), chunk.bytes.size(), nullptr),
                  CG_OK);
    const auto cost_of = [&](const std::string &name, size_t n_chunks) {
        std::vector<cg_store_link> links;
        std::vector<uint32_t> tokens;
        for (size_t i = 0; i < n_chunks; i++) {
            links.push_back({chain[i].header.key, 2 | 4 | 8});
            tokens.insert(tokens.end(), chain[i].tokens.begin(), chain[i].tokens.end());
        }
        const int before = odd->n_calls();
        EXPECT_EQ(cg_store_context_publish(store, io, name.c_str(), links.data(), links.size(),
                                           &profile, tokens.data(), tokens.size()),
                  CG_OK);
        return odd->n_calls() - before;
    };
    const int first_of_one = cost_of("a", 1), second_of_one = cost_of("a", 2),
              first_of_many = cost_of("b", 40);
    // A profile of another number, as sshfs may show it, with a new connection each name's.
    const std::string at = "backing/links/contexts/b/profile.cgp";
    std::filesystem::remove(dir.path + "/" + at);
    dir.write(at, text);
    const size_t n_read = odd->n_asked();
    const int second_of_many = cost_of("b", 41);
    RecordProperty("first_of_many", first_of_many);
    RecordProperty("second_of_many", second_of_many);
    EXPECT_LE(first_of_many - first_of_one, 39 * 20) << "a chunk";
    EXPECT_LE(second_of_many - second_of_one, 4) << "the pages of longer listings";
    EXPECT_LT(odd->n_asked() - n_read, text.size());
    EXPECT_EQ(dir.files("backing/links/contexts/b/L3").size(), 41u);
    cg_store_free(store);
}

TEST_P(OddFsTest, HoldsNestedChunksAsCopiesOfTheirLevels)
{
    const std::string text = std::string("CGPF\r\n\x1a\n", 8) + "x";
    const cg_fingerprint profile = cg_test::fingerprint_of(text.c_str());
    const cg_test::Chunk chunk = cg_test::make_chunk(nullptr, cg_test::draw_tokens(16, 1), CG_L1,
                                                     &profile, 1 << 20, 1, CG_L3);
    const cg_store_link link = {chunk.header.key, 2 | 4 | 8};
    for (const std::string objects_in :
         {"/odd", "/backing"}) { // copies from the start, or only in the context
        const char *model = objects_in == "/odd" ? "a" : "b";
        cg_store *store, *objects;
        char path[CG_TREE_PATH_BYTES];
        ASSERT_EQ(cg_store_open((dir.path + "/odd").c_str(), model, true, &store), CG_OK);
        ASSERT_EQ(cg_store_open((dir.path + objects_in).c_str(), model, true, &objects), CG_OK);
        ASSERT_EQ(cg_tree_profile_path(model, &profile, path, sizeof path), CG_OK);
        dir.write(std::string("backing/") + path, text);
        for (int i = 0; i < 2; i++) {
            ASSERT_EQ(
                cg_store_publish(objects, io, chunk.bytes.data(), chunk.bytes.size(), nullptr),
                CG_OK);
            ASSERT_EQ(cg_store_context_publish(store, io, "c", &link, 1, &profile,
                                               chunk.tokens.data(), 16),
                      CG_OK);
        }
        const std::string at = "backing/" + std::string(model);
        for (unsigned level = CG_L1; level <= CG_L3; level++) {
            const std::vector<uint8_t> want(chunk.bytes.begin(),
                                            chunk.bytes.begin() +
                                                static_cast<long>(chunk.header.level_bytes[level]));
            ASSERT_EQ(cg_tree_object_path(model, &chunk.header.key, cg_level(level), &profile, path,
                                          sizeof path),
                      CG_OK);
            EXPECT_TRUE(dir.read("backing/" + std::string(path)) ==
                        (objects_in == "/odd" ? want : chunk.bytes))
                << level;
            EXPECT_TRUE(dir.read(at + "/contexts/c/L" + std::to_string(level) + "/00000.kv") ==
                        want)
                << level;
        }
        EXPECT_EQ(dir.files(at).size(), 10u) << "a temporary file is left";
        cg_store_free(objects);
        cg_store_free(store);
    }
}

TEST_P(OddFsTest, AdoptsNestedChunksAsCopiesOfTheirLevels)
{
    const cg_fingerprint profile = cg_test::fingerprint_of("p");
    const cg_test::Chunk chunk =
        cg_test::make_chunk(nullptr, cg_test::draw_tokens(16, 1), CG_L1, &profile, 1000, 1, CG_L3);
    for (unsigned level : {CG_L2, CG_L1, CG_L3})
        dir.write("backing/m/contexts/c/L" + std::to_string(level) + "/00000.kv", chunk.bytes);
    const int fd = openat(dir.fd, "odd", O_RDONLY | O_DIRECTORY);
    for (const char *path :
         {"m/contexts/c/L3/00000.kv", "m/contexts/c/L1/00000.kv", "m/contexts/c/L1/00000.kv"})
        ASSERT_EQ(cg_store_adopt(fd, nullptr, path, &chunk.header), CG_OK);
    close(fd);
    for (unsigned level = CG_L1; level <= CG_L3; level++) {
        char path[CG_TREE_PATH_BYTES];
        ASSERT_EQ(cg_tree_object_path("m", &chunk.header.key, cg_level(level), &profile, path,
                                      sizeof path),
                  CG_OK);
        EXPECT_EQ(dir.read("backing/" + std::string(path)).size(), chunk.header.level_bytes[level]);
    }
    EXPECT_TRUE(comes_to_hold(6)) << "a temporary file is left";
}

TEST_P(OddFsTest, AdoptsWhatIsNewInAFolderThatKeepsItsTime)
{
    const int fd = openat(dir.fd, "odd", O_RDONLY | O_DIRECTORY);
    const auto look = [&] {
        uint32_t n_adopted = 99;
        EXPECT_EQ(cg_store_adopt_new(fd, nullptr, time(nullptr) + 100, &n_adopted), CG_OK);
        return n_adopted;
    };
    for (const uint32_t seed : {1, 2, 3, 4, 5}) { // one by one: the first in a list may be any
        const cg_test::Chunk chunk = cg_test::make_chunk(nullptr, cg_test::draw_tokens(16, seed),
                                                         CG_L0, nullptr, 1000, seed);
        dir.write("backing/m/contexts/timeless/L0/0000" + std::to_string(seed) + ".kv",
                  chunk.bytes);
        EXPECT_EQ(look(), 1u);
        EXPECT_EQ(look(), 0u);
    }
    close(fd);
}

// A store in the backing directory whose one chunk is looked up through the odd file system.
struct NestedLookup {
    NestedLookup(cg_test::TempDir &dir, cg_io *io, const char *model_name, bool names_differ)
        : model(model_name)
    {
        cg_store *below;
        EXPECT_EQ(cg_store_open((dir.path + "/backing").c_str(), model, true, &below), CG_OK);
        EXPECT_EQ(cg_store_publish(below, io, chunk.bytes.data(), chunk.bytes.size(), nullptr),
                  CG_OK);
        cg_store_free(below);
        for (unsigned level = CG_L1; level <= CG_L3 && names_differ; level++) {
            char path[CG_TREE_PATH_BYTES];
            EXPECT_EQ(cg_tree_object_path(model, &chunk.header.key, cg_level(level), &profile, path,
                                          sizeof path),
                      CG_OK);
            EXPECT_EQ(unlinkat(dir.fd, (std::string("backing/") + path).c_str(), 0), 0);
            dir.write(std::string("backing/") + path,
                      std::vector<uint8_t>(chunk.bytes.begin(),
                                           chunk.bytes.begin() +
                                               static_cast<long>(chunk.header.level_bytes[level])));
        }
        EXPECT_EQ(cg_store_open((dir.path + "/odd").c_str(), model, false, &store), CG_OK);
    }
    ~NestedLookup()
    {
        cg_store_free(store);
    }
    cg_status run(cg_io *io, uint64_t deadline_ns, uint32_t *n_errors = nullptr)
    {
        return cg_store_lookup(store, io, &chunk.header.key, 1, &profile, 0xf, deadline_ns, &entry,
                               n_errors);
    }
    // Below the mount, that of the 256 which the chunk is in.
    std::string folder() const
    {
        char path[CG_TREE_PATH_BYTES];
        EXPECT_EQ(cg_tree_object_path(model, &chunk.header.key, CG_L0, nullptr, path, sizeof path),
                  CG_OK);
        return std::filesystem::path(path).parent_path().parent_path();
    }

    const char *const model;
    const cg_fingerprint profile = cg_test::fingerprint_of("p");
    const cg_test::Chunk chunk =
        cg_test::make_chunk(nullptr, cg_test::draw_tokens(16, 1), CG_L1, &profile, 1000, 1, CG_L3);
    cg_store *store = nullptr;
    cg_store_entry entry = {};
};

TEST_P(OddFsTest, LooksAtOneNameOfANestedChunkAlsoWhereEachEndsWithItsLevel)
{
    for (const bool names_differ : {true, false}) {
        NestedLookup lookup(dir, io, names_differ ? "a" : "b", names_differ);
        ASSERT_EQ(lookup.run(io, 0), CG_OK);
        EXPECT_EQ(lookup.entry.levels, 2 | 4 | 8);
        for (unsigned level = CG_L1; level <= CG_L3; level++) {
            char path[CG_TREE_PATH_BYTES];
            ASSERT_EQ(cg_tree_object_path(names_differ ? "a" : "b", &lookup.chunk.header.key,
                                          cg_level(level), &lookup.profile, path, sizeof path),
                      CG_OK);
            EXPECT_EQ(lookup.entry.level_bytes[level], lookup.chunk.header.level_bytes[level])
                << level;
            EXPECT_EQ(odd->n_stats(path) > 0, level == CG_L1) << level;
        }
    }
}

TEST_P(OddFsTest, StopsALookUpThatHangsInAHeader)
{
    NestedLookup lookup(dir, io, "hang_read", false);
    EXPECT_EQ(lookup.run(io, now_ns() + SECOND_NS / 10), CG_ERR_TIMED_OUT);
    EXPECT_EQ(odd->n_hanging(), 1);
    EXPECT_EQ(cg_io_n_under_way(io), 0u);
    EXPECT_EQ(lookup.entry.levels, 0);
    odd->release();
    wait_for_none_abandoned();
    ASSERT_EQ(lookup.run(io, 0), CG_OK);
    EXPECT_EQ(lookup.entry.level_bytes[CG_L3], lookup.chunk.header.level_bytes[CG_L3]);
}

// That another look-up has seen it first does not tell this one where the chunk is.
TEST_P(OddFsTest, FindsWhatLiesInAFolderThatIsGoneAlsoWhereAnotherLookUpSawThatFirst)
{
    NestedLookup lookup(dir, io, "m", false);
    const uint8_t folder = lookup.chunk.header.key.bytes[0];
    for (const bool is_probe : {false, true}) {
        SCOPED_TRACE(is_probe ? "probe" : "look-up");
        uint32_t n_errors = 0;
        bool is_there = false;
        ASSERT_EQ(cg_store_open_folders(lookup.store, SECOND_NS), CG_OK);
        ASSERT_GE(cg_folders_get(lookup.store->folders, folder), 0);
        odd->lose(lookup.folder());
        odd->set_mood(cg_test::Mood::HANGING);
        std::thread asking([&] {
            if (is_probe) {
                EXPECT_EQ(cg_store_probe(lookup.store, io, &lookup.chunk.header.key, 1, nullptr,
                                         &is_there, &n_errors),
                          CG_OK);
                return;
            }
            EXPECT_EQ(lookup.run(io, 0, &n_errors), CG_OK);
            is_there = lookup.entry.levels == (2 | 4 | 8);
        });
        EXPECT_TRUE(comes_true([&] { return odd->n_hanging() > 0; }));
        cg_folders_lose(lookup.store->folders, folder); // as another look-up does
        odd->set_mood(cg_test::Mood::GOOD);
        asking.join();
        EXPECT_TRUE(is_there);
        EXPECT_EQ(n_errors, 0u);
    }
}

// One name of a chunk is answered before the folder is gone, the next one is not.
TEST_P(OddFsTest, FindsAllLevelsOfAChunkWhoseFolderIsGoneInTheMiddleOfALookUp)
{
    restart({CG_IO_AUTO, 1, 0, 0}); // one question at a time
    NestedLookup lookup(dir, io, "m", false);
    const cg_key key = lookup.chunk.header.key;
    for (const cg_level level : {CG_L0, CG_L1, CG_L2}) { // each on its own
        char path[CG_TREE_PATH_BYTES];
        ASSERT_EQ(cg_tree_object_path("m", &key, level, &lookup.profile, path, sizeof path), CG_OK);
        std::filesystem::remove(dir.path + "/backing/" + path);
        dir.write(std::string("backing/") + path,
                  cg_test::make_chunk(nullptr, lookup.chunk.tokens, level, &lookup.profile).bytes);
    }
    struct Losing {
        cg_test::OddFs *odd;
        const std::string folder;
        int n_kept;
    } losing = {odd.get(), lookup.folder(), 0};
    const cg_store_keeper keeper = {[](void *user, size_t, cg_level, int file) {
                                        Losing *l = static_cast<Losing *>(user);
                                        close(file);
                                        if (l->n_kept++ == 0)
                                            l->odd->lose(l->folder);
                                    },
                                    &losing, 1};
    // L0 is asked for in the first batch, as L1 is, and L2 in the second.
    for (const uint8_t levels : {1 | 2, 2 | 4}) {
        SCOPED_TRACE(int(levels));
        uint32_t n_errors = 0;
        losing.n_kept = 0;
        ASSERT_EQ(cg_store_open_folders(lookup.store, SECOND_NS), CG_OK);
        ASSERT_GE(cg_folders_get(lookup.store->folders, key.bytes[0]), 0);
        ASSERT_EQ(cg_store_lookup_open(lookup.store, io, &key, 1, &lookup.profile, levels, nullptr,
                                       &keeper, &lookup.entry, &n_errors),
                  CG_OK);
        EXPECT_LT(cg_folders_get(lookup.store->folders, key.bytes[0]), 0) << "it was not gone";
        EXPECT_EQ(lookup.entry.levels, levels);
        EXPECT_EQ(n_errors, 0u);
    }
}

TEST_P(OddFsTest, ClosesWhatItReads)
{
    dir.write("backing/file", draw_bytes(5000, 1));
    for (size_t n : {1, 4001, 5000, 5001}) {
        std::vector<uint8_t> got;
        ASSERT_EQ(read("odd/file", &got, n), n > 5000 ? CG_ERR_TRUNCATED : CG_OK);
        EXPECT_TRUE(comes_true([&] { return odd->n_open() == 0; })) << n;
    }
}

TEST_P(OddFsTest, PublishesNothingOfAnAbandonedWrite)
{
    const std::vector<uint8_t> bytes = draw_bytes(100, 1);
    ASSERT_EQ(cg_io_write(io, dir.fd, "odd/b/hang_write", bytes.data(), bytes.size(), false, 1),
              CG_OK);
    wait_for_hanging(1);
    cg_io_abandon(io, 1);
    EXPECT_EQ(wait_for_one().status, CG_ERR_TIMED_OUT);
    odd->release();
    wait_for_none_abandoned();
    EXPECT_TRUE(comes_to_hold(0)) << "neither the file nor its temporary file stays";
}

// Another may sync the file's own directory only, which it found there.
TEST_P(OddFsTest, SyncsDirectoriesThatItMadeAlsoWhereAnotherPublishesFirst)
{
    const std::vector<uint8_t> bytes = draw_bytes(100, 1), others = draw_bytes(100, 2);
    ASSERT_EQ(cg_io_write(io, dir.fd, "odd/b/hang_write", bytes.data(), bytes.size(), false, 1),
              CG_OK);
    wait_for_hanging(1);
    dir.write("backing/b/hang_write", others);
    EXPECT_EQ(odd->calls()["fsyncdir"], 0);
    odd->release();
    EXPECT_EQ(wait_for_one().status, CG_ERR_EXISTS);
    EXPECT_EQ(odd->calls()["fsyncdir"], 2) << "its own, and the one above";
    EXPECT_TRUE(dir.read("backing/b/hang_write") == others);
    EXPECT_TRUE(comes_to_hold(1)) << "a temporary file is left";
}

TEST_P(OddFsTest, WritesTemporaryFilesWithoutSyncingDirectories)
{
    const std::vector<uint8_t> bytes = draw_bytes(5000, 1), others = draw_bytes(100, 2);
    const auto write_temp = [&](const char *path, const std::vector<uint8_t> &content) {
        EXPECT_EQ(cg_io_write_temp(io, dir.fd, path, content.data(), content.size(), 1), CG_OK);
        return wait_for_one().status;
    };
    EXPECT_EQ(write_temp("odd/a/b/.x.tmp", bytes), CG_OK) << "the folders are missing";
    EXPECT_EQ(write_temp("odd/a/b/.x.tmp", others), CG_ERR_EXISTS);
    EXPECT_TRUE(dir.read("backing/a/b/.x.tmp") == bytes);
    EXPECT_EQ(odd->calls()["fsync"], 1);
    EXPECT_EQ(odd->calls()["fsyncdir"], 0);

    ASSERT_EQ(cg_io_write_temp(io, dir.fd, "odd/a/hang_write", bytes.data(), bytes.size(), 2),
              CG_OK);
    wait_for_hanging(1);
    cg_io_abandon(io, 2);
    EXPECT_EQ(wait_for_one().status, CG_ERR_TIMED_OUT);
    odd->release();
    wait_for_none_abandoned();
    EXPECT_TRUE(comes_to_hold(1)) << "nothing stays of an abandoned one";
}

TEST_P(OddFsTest, NeverBlocksInOpenAlsoWhereTheNameIsCached)
{
    dir.write("backing/hang_open", draw_bytes(8192, 1));
    const int fd = openat(dir.fd, "odd", O_RDONLY | O_DIRECTORY);
    ASSERT_EQ(stat("odd/hang_open"), CG_OK); // the kernel knows the name from now on
    ASSERT_EQ(cg_io_read_range(io, fd, "hang_open", 0, 8192, CG_IO_CACHED, 1),
              CG_OK); // returning is the test
    wait_for_hanging(1);
    cg_io_abandon(io, 1);
    EXPECT_EQ(wait_for_one().status, CG_ERR_TIMED_OUT);
    close(fd);
}

TEST_P(OddFsTest, NeverBlocksInSubmit)
{
    const char *names[] = {"hang_stat", "hang_open", "hang_read"};
    for (const char *name : names)
        dir.write(std::string("backing/a/") + name, draw_bytes(8192, 1));
    dir.write(
        "good",
        draw_bytes(8192, 2)); // the kernel itself lets a hanging look-up hold up its directory
    uint64_t user = 0;
    for (const char *name : names) { // returning is the test
        const std::string path = std::string("odd/a/") + name;
        for (uint64_t n_bytes : {160, 8192})
            for (cg_io_cache cache : {CG_IO_CACHED, CG_IO_DIRECT})
                ASSERT_EQ(cg_io_read_range(io, dir.fd, path.c_str(), 0, n_bytes, cache, user++),
                          CG_OK);
        ASSERT_EQ(cg_io_read_open(io, dir.fd, path.c_str(), 0, 8192, user++), CG_OK);
    }
    const std::vector<uint8_t> bytes = draw_bytes(100, 1);
    ASSERT_EQ(
        cg_io_write(io, dir.fd, "odd/b/hang_write", bytes.data(), bytes.size(), false, user++),
        CG_OK);
    for (uint64_t u = 0; u < user; u++)
        cg_io_abandon(io, u);
    for (uint64_t u = 0; u < user; u++)
        EXPECT_EQ(wait_for_one().status, CG_ERR_TIMED_OUT);
    std::vector<uint8_t> got;
    EXPECT_EQ(read("good", &got, 8192), CG_OK) << "what hangs does not hold up what does not";
    odd->release();
    wait_for_none_abandoned();
    EXPECT_TRUE(comes_to_hold(3)) << "the abandoned write is gone, and its temporary file";
}

TEST_P(OddFsTest, AbandonsWhatHangsAndLimitsIt)
{
    constexpr uint32_t LIMIT = 3;
    restart({CG_IO_AUTO, 4, 2, LIMIT});
    dir.write("backing/hang_read", draw_bytes(8192, 1));
    dir.write("good", draw_bytes(8192, 2));
    for (uint64_t i = 0; i < LIMIT; i++) {
        ASSERT_EQ(cg_io_read_range(io, dir.fd, "odd/hang_read", 0, 8192, CG_IO_DIRECT, i), CG_OK);
        wait_for_hanging(static_cast<int>(i) + 1);
        EXPECT_EQ(cg_io_n_abandoned(io), i);
        cg_io_abandon(io, i);
        const cg_io_completion c = wait_for_one();
        EXPECT_EQ(c.status, CG_ERR_TIMED_OUT);
        EXPECT_EQ(c.user, i);
        EXPECT_EQ(c.buffer, nullptr);
        EXPECT_EQ(cg_io_n_abandoned(io), i + 1);
        EXPECT_EQ(cg_io_n_under_way(io), 0u);
        if (i + 1 < LIMIT) {
            std::vector<uint8_t> got;
            EXPECT_EQ(read("good", &got, 8192), CG_OK) << "more hang than there are threads";
            EXPECT_TRUE(got == draw_bytes(8192, 2)) << "in no buffer that may still be written to";
        }
    }
    EXPECT_EQ(cg_io_stat(io, dir.fd, "good", 1), CG_ERR_TIMED_OUT) << "past the limit";
    odd->release();
    wait_for_none_abandoned();
    std::vector<uint8_t> got;
    EXPECT_EQ(read("good", &got, 8192), CG_OK) << "the mount is back";
}

TEST_P(OddFsTest, CanBeFreedWhileOperationsHang)
{
    const LeakOnPurpose leak;
    restart({});
    dir.write("backing/hang_read", draw_bytes(8192, 1));
    dir.write("backing/a/hang_stat", draw_bytes(8192, 1));
    const std::vector<uint8_t> &bytes =
        *new std::vector<uint8_t>(draw_bytes(8192, 2)); // a hung write may read it
    for (cg_io_cache cache : {CG_IO_CACHED, CG_IO_DIRECT})
        ASSERT_EQ(cg_io_read_range(io, dir.fd, "odd/hang_read", 0, 8192, cache, 1), CG_OK);
    ASSERT_EQ(cg_io_stat(io, dir.fd, "odd/a/hang_stat", 2), CG_OK);
    ASSERT_EQ(cg_io_write(io, dir.fd, "odd/b/hang_write", bytes.data(), bytes.size(), false, 3),
              CG_OK);
    wait_for_hanging(3); // one stat and one read at least: the kernel may hold the second read back
    cg_io_abandon(io, 1);
    cg_io_free(io, SECOND_NS / 20); // returning is the test: nothing is released before
    io = nullptr;
    EXPECT_GE(odd->n_hanging(), 3);
    odd->release();
}

size_t n_descriptors()
{
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return static_cast<size_t>(std::distance(begin(all), end(all)));
}

// Of files that stay open for the caller: one that is being opened when the queue goes, and one
// that is open.
TEST_P(OddFsTest, LeavesNothingOpenOfWhatHungWhenItWasFreed)
{
    for (const char *name : {"hang_open", "hang_read"}) {
        SCOPED_TRACE(name);
        dir.write("backing/" + std::string(name), draw_bytes(8192, 1));
        cg_io_free(io, 0);
        io = nullptr;
        const size_t n_before = n_descriptors();
        restart({});
        ASSERT_EQ(cg_io_read_open(io, dir.fd, ("odd/" + std::string(name)).c_str(), 0, 8192, 1),
                  CG_OK);
        wait_for_hanging(1);
        cg_io_free(io, 0);
        io = nullptr;
        odd->release();
        EXPECT_TRUE(comes_true([&] { return n_descriptors() <= n_before; }))
            << n_before << " before, now " << n_descriptors();
        odd.reset();
        odd = std::make_unique<cg_test::OddFs>(dir.path + "/backing", dir.path + "/odd");
        ASSERT_EQ(odd->why(), "");
    }
}

// Its number would be another file's, which the read could meet with its next step.
TEST_P(OddFsTest, AFileStaysOpenUntilAReadThatWasGivenUpHasEnded)
{
    dir.write("backing/hang_read", draw_bytes(8192, 1));
    for (const bool queue_goes : {false, true}) {
        SCOPED_TRACE(queue_goes);
        const int fd = openat(dir.fd, "odd/hang_read", O_RDONLY | O_CLOEXEC);
        ASSERT_GE(fd, 0);
        cg_open_file *file = cg_open_file_new(fd);
        ASSERT_EQ(cg_io_read_file(io, file, 0, 8192, 1), CG_OK);
        wait_for_hanging(1);
        cg_io_abandon(io, 1);
        EXPECT_EQ(wait_for_one().status, CG_ERR_TIMED_OUT);
        if (queue_goes)
            cg_io_free(io, 0);
        const int left = cg_open_file_drop(file);
        if (GetParam() == CG_IO_THREADS) { // a kernel may let go of a read that is cancelled
            EXPECT_EQ(left, -1);
            EXPECT_GE(fcntl(fd, F_GETFD), 0);
        }
        if (left >= 0)
            close(left);
        odd->release();
        if (queue_goes)
            io = nullptr;
        else
            wait_for_none_abandoned();
        EXPECT_TRUE(comes_true([&] { return fcntl(fd, F_GETFD) < 0; }));
        odd.reset();
        odd = std::make_unique<cg_test::OddFs>(dir.path + "/backing", dir.path + "/odd");
        ASSERT_EQ(odd->why(), "");
    }
}

// FUSE asks for the file's size before it reads, whoever reads.
TEST_P(OddFsTest, WhoReadsAnOpenFileDoesNotWaitForItsServer)
{
    dir.write("backing/file", draw_bytes(8192, 1));
    const int fd = openat(dir.fd, "odd/file", O_RDONLY | O_CLOEXEC);
    ASSERT_GE(fd, 0);
    cg_open_file *file = cg_open_file_new(fd);
    std::atomic<bool> has_returned{false};
    odd->set_mood(cg_test::Mood::HANGING);
    std::thread watchdog([&] {
        EXPECT_TRUE(comes_true([&] { return has_returned.load(); }));
        if (!has_returned)
            odd->release();
    });
    EXPECT_EQ(cg_io_read_file(io, file, 0, 8192, 1), CG_OK);
    has_returned = true;
    watchdog.join();
    cg_io_abandon(io, 1);
    EXPECT_EQ(wait_for_one().user, 1u);
    odd->release();
    wait_for_none_abandoned();
    EXPECT_EQ(cg_open_file_drop(file), fd);
    close(fd);
}

#endif

} // namespace
