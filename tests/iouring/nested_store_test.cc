// Nested chunks in a store: one file with a name for each level that it holds.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "tests/iouring/store_fixture.h"

namespace
{

using cg_test::all_tokens;
using cg_test::Chunk;
using cg_test::draw_tokens;
using cg_test::fingerprint_of;
using cg_test::make_chunk;
using cg_test::object_dir;
using cg_test::token_bytes;

std::string level_path(const Chunk &chunk, unsigned level)
{
    char path[CG_TREE_PATH_BYTES];
    EXPECT_EQ(cg_tree_object_path("m", &chunk.header.key, cg_level(level), &chunk.header.profile,
                                  path, sizeof path),
              CG_OK);
    return path;
}

std::vector<uint8_t> prefix(const Chunk &chunk, unsigned level)
{
    return {chunk.bytes.begin(),
            chunk.bytes.begin() + static_cast<long>(chunk.header.level_bytes[level])};
}

class NestedStoreTest : public cg_test::StoreFixture
{
  protected:
    ino_t inode(const std::string &path)
    {
        struct stat s = {};
        EXPECT_EQ(fstatat(dir.fd, path.c_str(), &s, 0), 0) << path;
        return s.st_ino;
    }
    cg_status publish_bytes(const std::vector<uint8_t> &bytes, bool *existed = nullptr)
    {
        return cg_store_publish(store, io, bytes.data(), bytes.size(), existed);
    }

    const cg_fingerprint profile = fingerprint_of("p");
    const std::vector<uint32_t> tokens = draw_tokens(16, 1);
    Chunk whole = make_chunk(nullptr, tokens, CG_L1, &profile, 1000, /*seed=*/1, CG_L3);
    const Chunk others = make_chunk(nullptr, tokens, CG_L1, &profile, 1000, /*seed=*/2, CG_L3);
};
CG_ON_BOTH_BACKENDS(NestedStoreTest);

// --- publishing ---

TEST_P(NestedStoreTest, PublishesOneFileUnderTheNamesOfAllItsLevels)
{
    bool existed = true;
    ASSERT_EQ(publish(whole, &existed), CG_OK);
    EXPECT_FALSE(existed);
    for (unsigned level = CG_L1; level <= CG_L3; level++) {
        EXPECT_TRUE(dir.read(level_path(whole, level)) == whole.bytes) << level;
        EXPECT_EQ(inode(level_path(whole, level)), inode(level_path(whole, CG_L1))) << level;
    }
    EXPECT_EQ(dir.files().size(), 3u) << "a temporary file is left";
    ASSERT_EQ(publish(others, &existed), CG_OK);
    EXPECT_TRUE(existed);
    for (unsigned level = CG_L1; level <= CG_L3; level++)
        EXPECT_TRUE(dir.read(level_path(whole, level)) == whole.bytes) << level;
}

TEST_P(NestedStoreTest, PublishesTheLevelsOfACutChunk)
{
    ASSERT_EQ(publish_bytes(prefix(whole, CG_L2)), CG_OK);
    EXPECT_FALSE(dir.has(level_path(whole, CG_L1)));
    EXPECT_TRUE(dir.read(level_path(whole, CG_L2)) == prefix(whole, CG_L2));
    EXPECT_EQ(inode(level_path(whole, CG_L2)), inode(level_path(whole, CG_L3)));
    bool existed = true;
    ASSERT_EQ(publish(whole, &existed), CG_OK);
    EXPECT_FALSE(existed) << "its finest level is new";
    EXPECT_TRUE(dir.read(level_path(whole, CG_L1)) == whole.bytes);
    EXPECT_TRUE(dir.read(level_path(whole, CG_L3)) == prefix(whole, CG_L2))
        << "the first publisher wins";
    std::vector<uint8_t> cut_elsewhere(whole.bytes.begin(), whole.bytes.end() - 1);
    EXPECT_EQ(publish_bytes(cut_elsewhere), CG_ERR_TRUNCATED);
}

TEST_P(NestedStoreTest, GivesTheNamesThatAnInterruptedPublisherDidNot)
{
    ASSERT_EQ(publish(whole), CG_OK);
    for (unsigned level : {CG_L3, CG_L2}) {
        ASSERT_EQ(unlinkat(dir.fd, level_path(whole, level).c_str(), 0), 0);
        bool existed = false;
        ASSERT_EQ(publish(others, &existed), CG_OK);
        EXPECT_TRUE(existed);
        EXPECT_EQ(inode(level_path(whole, level)), inode(level_path(whole, CG_L1))) << level;
    }
}

TEST_P(NestedStoreTest, LeavesTheNamesOfOtherPublishers)
{
    const Chunk plain = make_chunk(nullptr, tokens, CG_L2, &profile, 500, /*seed=*/3);
    ASSERT_EQ(publish(plain), CG_OK);
    bool existed = true;
    ASSERT_EQ(publish(whole, &existed), CG_OK);
    EXPECT_FALSE(existed);
    EXPECT_TRUE(dir.read(level_path(whole, CG_L2)) == plain.bytes);
    EXPECT_EQ(inode(level_path(whole, CG_L3)), inode(level_path(whole, CG_L1)));
}

TEST_P(NestedStoreTest, PublishesCoarserLevelsWhereTheFinestIsOfAnother)
{
    const Chunk plain = make_chunk(nullptr, tokens, CG_L1, &profile, 500, /*seed=*/3);
    ASSERT_EQ(publish(plain), CG_OK);
    bool existed = false;
    ASSERT_EQ(publish(whole, &existed), CG_OK);
    EXPECT_TRUE(existed);
    EXPECT_TRUE(dir.read(level_path(whole, CG_L1)) == plain.bytes);
    EXPECT_TRUE(dir.read(level_path(whole, CG_L2)) == prefix(whole, CG_L2));
    EXPECT_EQ(inode(level_path(whole, CG_L2)), inode(level_path(whole, CG_L3)));
    EXPECT_EQ(dir.files().size(), 3u) << "a temporary file is left";
}

// --- replacing ---

TEST_P(NestedStoreTest, ReplacesADamagedFileAtAllNamesOfItsLevels)
{
    for (unsigned damaged = CG_L1; damaged <= CG_L3; damaged++) {
        SCOPED_TRACE(damaged);
        std::filesystem::remove_all(dir.path + "/m/objects");
        ASSERT_EQ(publish(whole), CG_OK);
        const ino_t before = inode(level_path(whole, CG_L1));
        uint8_t replaced = 0xff;
        ASSERT_EQ(cg_store_replace(store, io, others.bytes.data(), others.bytes.size(),
                                   static_cast<uint8_t>(1 | 1u << damaged), &replaced),
                  CG_OK);
        EXPECT_EQ(replaced, 2 | 4 | 8);
        for (unsigned level = CG_L1; level <= CG_L3; level++) {
            EXPECT_EQ(inode(level_path(whole, level)), inode(level_path(whole, CG_L1))) << level;
            EXPECT_NE(inode(level_path(whole, level)), before) << level;
            EXPECT_TRUE(dir.read(level_path(whole, level)) == others.bytes) << level;
        }
        EXPECT_EQ(dir.files().size(), 3u) << "a temporary file is left";
    }
}

TEST_P(NestedStoreTest, ReplacesWhatIsNoChunkAnyMore)
{
    ASSERT_EQ(publish(whole), CG_OK);
    ASSERT_EQ(truncate((dir.path + "/" + level_path(whole, CG_L1)).c_str(), 100), 0);
    ASSERT_EQ(unlinkat(dir.fd, level_path(whole, CG_L2).c_str(), 0), 0);
    uint8_t replaced = 0;
    ASSERT_EQ(cg_store_replace(store, io, whole.bytes.data(), whole.bytes.size(), 8, &replaced),
              CG_OK);
    EXPECT_EQ(replaced, 2 | 8);
    EXPECT_TRUE(dir.read(level_path(whole, CG_L1)) == whole.bytes);
    EXPECT_EQ(inode(level_path(whole, CG_L1)), inode(level_path(whole, CG_L3)));
    EXPECT_FALSE(dir.has(level_path(whole, CG_L2))) << "publishing gives it its name";
}

TEST_P(NestedStoreTest, ReplacesNothingOfOtherPublishers)
{
    const Chunk plain = make_chunk(nullptr, tokens, CG_L1, &profile, 500, /*seed=*/3);
    ASSERT_EQ(publish(plain), CG_OK);
    ASSERT_EQ(publish(whole), CG_OK);
    uint8_t replaced = 0;
    ASSERT_EQ(cg_store_replace(store, io, others.bytes.data(), others.bytes.size(), 8, &replaced),
              CG_OK);
    EXPECT_EQ(replaced, 4 | 8);
    EXPECT_TRUE(dir.read(level_path(whole, CG_L1)) == plain.bytes);
    EXPECT_TRUE(dir.read(level_path(whole, CG_L2)) == prefix(others, CG_L2));
    EXPECT_EQ(inode(level_path(whole, CG_L2)), inode(level_path(whole, CG_L3)));

    std::vector<uint8_t> bad = others.bytes;
    bad.back() ^= 1;
    EXPECT_EQ(cg_store_replace(store, io, bad.data(), bad.size(), 2, &replaced), CG_ERR_CORRUPT);
    EXPECT_EQ(replaced, 0);
    EXPECT_TRUE(dir.read(level_path(whole, CG_L1)) == plain.bytes);
}

// --- look-up ---

TEST_P(NestedStoreTest, FindsWhatEachLevelNeedsAtEachMask)
{
    const auto chunk = [&](cg_level level, size_t payload, uint32_t seed,
                           cg_level coarsest = CG_L0) {
        return make_chunk(nullptr, draw_tokens(16, seed), level,
                          level == CG_L0 ? nullptr : &profile, payload, seed, coarsest);
    };
    const std::vector<std::vector<Chunk>> files = {
        {chunk(CG_L1, 300, 1, CG_L3)},
        {chunk(CG_L2, 300, 2, CG_L3), chunk(CG_L0, 5000, 2)},
        {chunk(CG_L1, 300, 3, CG_L2), chunk(CG_L3, 200, 3)},
        {chunk(CG_L1, 300, 4), chunk(CG_L2, 200, 4), chunk(CG_L3, 100, 4)},
        {chunk(CG_L1, 300, 5), chunk(CG_L2, 300, 5),
         chunk(CG_L3, 300, 5)}, // as long as one another
        {chunk(CG_L3, 300, 6)},
        {},
    };
    std::vector<Chunk> chain;
    for (const std::vector<Chunk> &of_one : files) {
        publish_all(of_one);
        chain.push_back(of_one.empty() ? chunk(CG_L0, 10, 7) : of_one[0]);
    }
    for (unsigned mask = 0; mask < 16; mask++) {
        const std::vector<cg_store_entry> entries =
            look_up(chain, &profile, static_cast<uint8_t>(mask));
        EXPECT_EQ(n_errors, 0u);
        for (size_t i = 0; i < files.size(); i++) {
            cg_store_entry want = {};
            for (const Chunk &file : files[i])
                for (unsigned level = 0; level < CG_N_LEVELS; level++)
                    if ((mask >> level & 1) && cg_chunk_holds(&file.header, level)) {
                        want.levels |= static_cast<uint8_t>(1u << level);
                        want.level_bytes[level] = file.header.level_bytes[level];
                    }
            EXPECT_EQ(entries[i].levels, want.levels) << "chunk " << i << " mask " << mask;
            for (unsigned level = 0; level < CG_N_LEVELS; level++)
                EXPECT_EQ(entries[i].level_bytes[level], want.level_bytes[level])
                    << "chunk " << i << " mask " << mask << " level " << level;
        }
    }
}

TEST_P(NestedStoreTest, FindsManyNestedChunks)
{
    std::vector<Chunk> chain;
    for (uint32_t i = 0; i < 100; i++)
        chain.push_back(
            make_chunk(nullptr, draw_tokens(16, i), CG_L1, &profile, 100 + i, i, CG_L3));
    publish_all(chain);
    const std::vector<cg_store_entry> entries = look_up(chain, &profile);
    for (size_t i = 0; i < chain.size(); i++)
        for (unsigned level = CG_L1; level <= CG_L3; level++)
            EXPECT_EQ(entries[i].level_bytes[level], chain[i].header.level_bytes[level]) << i;
}

TEST_P(NestedStoreTest, FindsWhatALoneNameHolds)
{
    ASSERT_EQ(publish(whole), CG_OK);
    for (unsigned level : {CG_L1, CG_L3})
        ASSERT_EQ(unlinkat(dir.fd, level_path(whole, level).c_str(), 0), 0);
    const cg_store_entry entry = look_up({whole}, &profile, 1 << CG_L2)[0];
    EXPECT_EQ(entry.levels, 4);
    EXPECT_EQ(entry.level_bytes[CG_L2], whole.header.level_bytes[CG_L2]);
}

TEST_P(NestedStoreTest, TellsWhatEachLevelWasComputedOn)
{
    const std::vector<uint32_t> ids = draw_tokens(16, 9);
    const Chunk exact = make_chunk(nullptr, ids, CG_L1, &profile, 300, 1);
    const Chunk lossy = make_chunk(nullptr, ids, CG_L2, &profile, 300, 2, CG_L3, CG_L3);
    ASSERT_EQ(publish(exact), CG_OK);
    ASSERT_EQ(publish(lossy), CG_OK);
    const cg_store_entry entry = look_up({exact}, &profile)[0];
    EXPECT_EQ(entry.levels, 2 | 4 | 8);
    EXPECT_EQ(entry.prefix_level[CG_L1], 0);
    EXPECT_EQ(entry.prefix_level[CG_L2], 3);
    EXPECT_EQ(entry.prefix_level[CG_L3], 3);
    EXPECT_EQ(entry.damaged, 0);
}

TEST_P(NestedStoreTest, FindsTheLevelsOfAFileWhoseFinestNameIsGone)
{
    ASSERT_EQ(publish(whole), CG_OK);
    ASSERT_EQ(unlinkat(dir.fd, level_path(whole, CG_L1).c_str(), 0), 0);
    const cg_store_entry entry = look_up({whole}, &profile)[0];
    EXPECT_EQ(entry.levels, 4 | 8);
    EXPECT_EQ(entry.level_bytes[CG_L2], whole.header.level_bytes[CG_L2]);
    EXPECT_EQ(entry.level_bytes[CG_L3], whole.header.level_bytes[CG_L3]);
}

TEST_P(NestedStoreTest, FindsNothingInFilesThatAreNoChunks)
{
    std::vector<uint8_t> unreadable = whole.bytes,
                         stub(whole.bytes.begin(), whole.bytes.begin() + 9);
    unreadable[0] ^= 1;
    for (const std::vector<uint8_t> &bytes : {unreadable, stub}) {
        for (unsigned level = CG_L1; level <= CG_L3; level++)
            dir.write(level_path(whole, level), bytes);
        const cg_store_entry entry = look_up({whole}, &profile)[0];
        EXPECT_EQ(entry.levels, 0) << bytes.size();
        EXPECT_EQ(entry.damaged, 2 | 4 | 8) << "a save may replace them";
        EXPECT_EQ(n_errors, 0u) << "damage is no error of the disk";
    }
}

TEST_P(NestedStoreTest, ReadsWhatALevelNeeds)
{
    ASSERT_EQ(publish(whole), CG_OK);
    const cg_store_entry entry = look_up({whole}, &profile)[0];
    std::vector<uint8_t> got;
    for (unsigned level = CG_L1; level <= CG_L3; level++) {
        ASSERT_EQ(cg_store_read(store, io, &whole.header.key, cg_level(level), &profile, 0,
                                entry.level_bytes[level], CG_IO_CACHED, 77),
                  CG_OK);
        ASSERT_EQ(take_read(&got), CG_OK);
        EXPECT_TRUE(got == prefix(whole, level)) << level;
    }
    ASSERT_EQ(cg_store_read(store, io, &whole.header.key, CG_L0, nullptr, 0, 1, CG_IO_CACHED, 77),
              CG_OK);
    EXPECT_EQ(take_read(&got), CG_ERR_NOT_FOUND);
    EXPECT_EQ(cg_store_read(store, io, &whole.header.key, CG_L1, nullptr, 0, 1, CG_IO_CACHED, 77),
              CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(cg_io_n_under_way(io), 0u);
}

// --- contexts ---

TEST_P(NestedStoreTest, MakesContextsOfLinksOfOneFile)
{
    const cg_fingerprint fp = install_profile("x");
    std::vector<Chunk> chain = {make_chunk(nullptr, draw_tokens(16, 1), CG_L1, &fp, 300, 1, CG_L3)};
    chain.push_back(make_chunk(&chain[0], draw_tokens(16, 2), CG_L1, &fp, 300, 2, CG_L3));
    publish_all(chain);
    ASSERT_EQ(context("c", chain, 2 | 4 | 8, &fp), CG_OK);
    ASSERT_EQ(context("coarse", chain, 8, &fp), CG_OK);
    for (size_t i = 0; i < chain.size(); i++) {
        const std::string leaf = "/0000" + std::to_string(i) + ".kv";
        for (const std::string at : {"c/L1", "c/L2", "c/L3", "coarse/L3"})
            EXPECT_EQ(inode("m/contexts/" + at + leaf), inode(level_path(chain[i], CG_L1)))
                << at << leaf;
    }
    EXPECT_FALSE(dir.has("m/contexts/coarse/L1/00000.kv"));
    EXPECT_NE(dir.read_text("m/contexts/c/context.json").find("\"levels\":[\"L1\",\"L2\",\"L3\"]"),
              std::string::npos);
    EXPECT_NE(dir.read_text("m/contexts/coarse/context.json").find("\"levels\":[\"L3\"]"),
              std::string::npos);
    EXPECT_EQ(context("c", chain, 1 | 2, &fp), CG_ERR_NOT_FOUND);

    const ino_t before = inode("m/contexts/c/context.json");
    ASSERT_EQ(context("c", chain, 2 | 4 | 8, &fp), CG_OK);
    EXPECT_EQ(inode("m/contexts/c/context.json"), before) << "nothing has changed";
}

// The finest name of a file implies the others.
TEST_P(NestedStoreTest, MakesContextsAlsoOfAFileWithoutNamesOfItsCoarserLevels)
{
    const cg_fingerprint fp = install_profile("x");
    std::vector<Chunk> chain = {make_chunk(nullptr, draw_tokens(16, 1), CG_L1, &fp, 300, 1, CG_L3)};
    publish_all(chain);
    ASSERT_EQ(unlinkat(dir.fd, level_path(chain[0], CG_L3).c_str(), 0), 0);
    ASSERT_EQ(context("c", chain, 2 | 4 | 8, &fp), CG_OK);
    EXPECT_EQ(inode("m/contexts/c/L3/00000.kv"), inode(level_path(chain[0], CG_L1)));
}

// --- adoption ---

std::string context_path(unsigned level)
{
    return "m/contexts/c/L" + std::to_string(level) + "/00000.kv";
}

class NestedAdoptionTest : public NestedStoreTest
{
  protected:
    // With the times that rsync -a and cp -a bring from a mount: those of one file.
    void write(unsigned level, const std::vector<uint8_t> &bytes, time_t mtime = 1000)
    {
        dir.write(context_path(level), bytes);
        const struct timespec times[2] = {{mtime, 0}, {mtime, 0}};
        ASSERT_EQ(utimensat(dir.fd, context_path(level).c_str(), times, 0), 0);
    }
    cg_status adopt(unsigned level, const std::vector<uint8_t> &bytes)
    {
        write(level, bytes);
        cg_chunk_header header;
        EXPECT_EQ(cg_chunk_header_parse(bytes.data(), bytes.size(), &header), CG_OK);
        return cg_store_adopt(dir.fd, nullptr, context_path(level).c_str(), &header);
    }
    // How many different files have these names.
    size_t n_files(const std::vector<std::string> &names)
    {
        std::vector<ino_t> inodes;
        for (const std::string &name : names)
            inodes.push_back(inode(name));
        std::sort(inodes.begin(), inodes.end());
        return static_cast<size_t>(std::unique(inodes.begin(), inodes.end()) - inodes.begin());
    }
    std::vector<std::string> names(const Chunk &chunk)
    {
        std::vector<std::string> all;
        for (unsigned level = CG_L1; level <= CG_L3; level++) {
            all.push_back(level_path(chunk, level));
            all.push_back(context_path(level));
        }
        return all;
    }
};
CG_ON_BOTH_BACKENDS(NestedAdoptionTest);

TEST_P(NestedAdoptionTest, FindsAChunkAtAllLevelsThatItsFileHolds)
{
    ASSERT_EQ(adopt(CG_L2, prefix(whole, CG_L2)), CG_OK);
    const cg_store_entry entry = look_up({whole}, &profile)[0];
    EXPECT_EQ(entry.levels, 4 | 8);
    EXPECT_EQ(entry.level_bytes[CG_L3], whole.header.level_bytes[CG_L3]);
    EXPECT_EQ(n_files({context_path(CG_L2), level_path(whole, CG_L2), level_path(whole, CG_L3)}),
              1u);
    EXPECT_EQ(dir.files().size(), 3u) << "a temporary file is left";
    EXPECT_EQ(adopt(CG_L1, prefix(whole, CG_L2)), CG_ERR_INVALID_ARGUMENT)
        << "it does not hold that level";
}

TEST_P(NestedAdoptionTest, TakesTheSpaceOfTheFinestLevelWhateverComesFirst)
{
    // As a mount shows them, and as a plain store does; of both versions of nested chunks.
    for (const int kind : {0, 1, 2, 3}) {
        const bool are_whole = kind % 2 == 1;
        whole = make_chunk(nullptr, tokens, CG_L1, &profile, 1000, /*seed=*/1, CG_L3, CG_L0,
                           kind < 2 ? 1 : CG_CHUNK_VERSION_ALIGNED);
        ASSERT_EQ(whole.header.version, kind < 2 ? 2u : 3u);
        std::vector<unsigned> order = {CG_L1, CG_L2, CG_L3};
        do {
            for (const bool by_tree : {false, true}) {
                SCOPED_TRACE(testing::Message()
                             << order[0] << order[1] << order[2] << are_whole << by_tree);
                std::filesystem::remove_all(dir.path + "/m");
                for (unsigned level : order) {
                    const std::vector<uint8_t> bytes =
                        are_whole ? whole.bytes : prefix(whole, level);
                    write(level, bytes);
                    ASSERT_EQ(by_tree ? cg_store_adopt_new(dir.fd, nullptr, 0, nullptr)
                                      : cg_store_adopt(dir.fd, nullptr, context_path(level).c_str(),
                                                       &whole.header),
                              CG_OK);
                }
                EXPECT_EQ(n_files(names(whole)), 1u);
                for (const std::string &name : names(whole))
                    EXPECT_TRUE(dir.read(name) == whole.bytes) << name;
                for (const std::string &name : dir.files())
                    EXPECT_EQ(name.find(".tmp"), std::string::npos) << name;
            }
        } while (std::next_permutation(order.begin(), order.end()));
    }
}

TEST_P(NestedAdoptionTest, AdoptsACopiedTreeInOneGo)
{
    for (unsigned level = CG_L1; level <= CG_L3; level++)
        write(level, prefix(whole, level));
    uint32_t n_adopted;
    ASSERT_EQ(cg_store_adopt_new(dir.fd, nullptr, 0, &n_adopted), CG_OK);
    EXPECT_GE(n_adopted, 1u);
    EXPECT_EQ(n_files(names(whole)), 1u);
    ASSERT_EQ(cg_store_adopt_new(dir.fd, nullptr, 0, &n_adopted), CG_OK);
    EXPECT_EQ(n_adopted, 0u);
}

TEST_P(NestedAdoptionTest, LeavesObjectsOfAnotherEncoding)
{
    ASSERT_EQ(publish(others), CG_OK);
    for (unsigned level : {CG_L3, CG_L1, CG_L2})
        ASSERT_EQ(adopt(level, prefix(whole, level)), CG_OK);
    EXPECT_EQ(
        n_files({level_path(whole, CG_L1), level_path(whole, CG_L2), level_path(whole, CG_L3)}),
        1u);
    EXPECT_TRUE(dir.read(level_path(whole, CG_L3)) == others.bytes);
    EXPECT_EQ(n_files({context_path(CG_L1), context_path(CG_L2), context_path(CG_L3)}), 1u);
    EXPECT_TRUE(dir.read(context_path(CG_L3)) == whole.bytes);
}

TEST_P(NestedAdoptionTest, HealsDamagedObjectsOfCoarserLevels)
{
    ASSERT_EQ(adopt(CG_L1, whole.bytes), CG_OK);
    ASSERT_EQ(unlinkat(dir.fd, level_path(whole, CG_L3).c_str(), 0), 0);
    dir.write(level_path(whole, CG_L3),
              std::vector<uint8_t>(whole.bytes.begin(), whole.bytes.begin() + 170));
    ASSERT_EQ(adopt(CG_L2, prefix(whole, CG_L2)), CG_OK);
    EXPECT_EQ(n_files({level_path(whole, CG_L1), level_path(whole, CG_L3), context_path(CG_L2)}),
              1u);
    EXPECT_TRUE(dir.read(level_path(whole, CG_L3)) == whole.bytes);
}

TEST_P(NestedAdoptionTest, SharesNothingThatDiffersOrBelongsToOthers)
{
    std::vector<uint8_t> damaged = whole.bytes;
    damaged[whole.header.level_bytes[CG_L3] - 1] ^=
        1; // behind the header, which says nothing of it
    dir.write(level_path(whole, CG_L1), damaged);
    ASSERT_EQ(adopt(CG_L3, prefix(whole, CG_L3)), CG_OK);
    EXPECT_TRUE(dir.read(context_path(CG_L3)) == prefix(whole, CG_L3)) << "the good one stays";

    write(CG_L2, prefix(whole, CG_L2));
    ASSERT_EQ(fchmodat(dir.fd, context_path(CG_L2).c_str(), 0600, 0), 0);
    ASSERT_EQ(fchmodat(dir.fd, context_path(CG_L3).c_str(), 0640, 0), 0);
    std::filesystem::remove(dir.path + "/" + level_path(whole, CG_L1));
    ASSERT_EQ(cg_store_adopt(dir.fd, nullptr, context_path(CG_L2).c_str(), &whole.header), CG_OK);
    EXPECT_EQ(n_files({context_path(CG_L2), context_path(CG_L3)}), 2u);
    struct stat s;
    ASSERT_EQ(fstatat(dir.fd, context_path(CG_L3).c_str(), &s, 0), 0);
    EXPECT_EQ(s.st_mode & 0777u, 0640u);
    for (const std::string &name : dir.files())
        EXPECT_EQ(name.find(".tmp"), std::string::npos) << name;

    ASSERT_EQ(fchmodat(dir.fd, context_path(CG_L3).c_str(), 0600, 0), 0);
    write(CG_L2, prefix(whole, CG_L2),
          2000); // what rsync set stays, or it would bring the file anew each time
    ASSERT_EQ(cg_store_adopt(dir.fd, nullptr, context_path(CG_L2).c_str(), &whole.header), CG_OK);
    EXPECT_EQ(n_files({context_path(CG_L2), context_path(CG_L3)}), 2u);
    ASSERT_EQ(fstatat(dir.fd, context_path(CG_L3).c_str(), &s, 0), 0);
    EXPECT_EQ(s.st_mtime, 1000);
}

} // namespace
