// Nested chunks in a store: one file with a name for each level that it holds.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>

#include "tests/iouring/store_fixture.h"

namespace {

using cg_test::all_tokens;
using cg_test::Chunk;
using cg_test::draw_tokens;
using cg_test::fingerprint_of;
using cg_test::make_chunk;
using cg_test::object_dir;
using cg_test::token_bytes;

std::string level_path(const Chunk &chunk, unsigned level) {
    char path[CG_TREE_PATH_BYTES];
    EXPECT_EQ(cg_tree_object_path("m", &chunk.header.key, cg_level(level), &chunk.header.profile, path, sizeof path),
              CG_OK);
    return path;
}

std::vector<uint8_t> prefix(const Chunk &chunk, unsigned level) {
    return {chunk.bytes.begin(), chunk.bytes.begin() + static_cast<long>(chunk.header.level_bytes[level])};
}

class NestedStoreTest : public cg_test::StoreFixture {
protected:
    ino_t inode(const std::string &path) {
        struct stat s = {};
        EXPECT_EQ(fstatat(dir.fd, path.c_str(), &s, 0), 0) << path;
        return s.st_ino;
    }
    cg_status publish_bytes(const std::vector<uint8_t> &bytes, bool *existed = nullptr) {
        return cg_store_publish(store, io, bytes.data(), bytes.size(), existed);
    }

    const cg_fingerprint profile = fingerprint_of("p");
    const std::vector<uint32_t> tokens = draw_tokens(16, 1);
    const Chunk whole = make_chunk(nullptr, tokens, CG_L1, &profile, 1000, /*seed=*/1, CG_L3);
    const Chunk others = make_chunk(nullptr, tokens, CG_L1, &profile, 1000, /*seed=*/2, CG_L3);
};
CG_ON_BOTH_BACKENDS(NestedStoreTest);

// --- publishing ---

TEST_P(NestedStoreTest, PublishesOneFileUnderTheNamesOfAllItsLevels) {
    bool existed = true;
    ASSERT_EQ(publish(whole, &existed), CG_OK);
    EXPECT_FALSE(existed);
    for (unsigned level = CG_L1; level <= CG_L3; level++) {
        EXPECT_TRUE(dir.read(level_path(whole, level)) == whole.bytes) << level;
        EXPECT_EQ(inode(level_path(whole, level)), inode(level_path(whole, CG_L1))) << level;
    }
    EXPECT_TRUE(dir.read(object_dir(whole) + "tokens") == token_bytes(tokens));
    EXPECT_EQ(dir.files().size(), 4u) << "a temporary file is left";
    ASSERT_EQ(publish(others, &existed), CG_OK);
    EXPECT_TRUE(existed);
    for (unsigned level = CG_L1; level <= CG_L3; level++)
        EXPECT_TRUE(dir.read(level_path(whole, level)) == whole.bytes) << level;
}

TEST_P(NestedStoreTest, PublishesTheLevelsOfACutChunk) {
    ASSERT_EQ(publish_bytes(prefix(whole, CG_L2)), CG_OK);
    EXPECT_FALSE(dir.has(level_path(whole, CG_L1)));
    EXPECT_TRUE(dir.read(level_path(whole, CG_L2)) == prefix(whole, CG_L2));
    EXPECT_EQ(inode(level_path(whole, CG_L2)), inode(level_path(whole, CG_L3)));
    bool existed = true;
    ASSERT_EQ(publish(whole, &existed), CG_OK);
    EXPECT_FALSE(existed) << "its finest level is new";
    EXPECT_TRUE(dir.read(level_path(whole, CG_L1)) == whole.bytes);
    EXPECT_TRUE(dir.read(level_path(whole, CG_L3)) == prefix(whole, CG_L2)) << "the first publisher wins";
    std::vector<uint8_t> cut_elsewhere(whole.bytes.begin(), whole.bytes.end() - 1);
    EXPECT_EQ(publish_bytes(cut_elsewhere), CG_ERR_TRUNCATED);
}

TEST_P(NestedStoreTest, GivesTheNamesThatAnInterruptedPublisherDidNot) {
    ASSERT_EQ(publish(whole), CG_OK);
    for (unsigned level : {CG_L3, CG_L2}) {
        ASSERT_EQ(unlinkat(dir.fd, level_path(whole, level).c_str(), 0), 0);
        bool existed = false;
        ASSERT_EQ(publish(others, &existed), CG_OK);
        EXPECT_TRUE(existed);
        EXPECT_EQ(inode(level_path(whole, level)), inode(level_path(whole, CG_L1))) << level;
    }
}

TEST_P(NestedStoreTest, LeavesTheNamesOfOtherPublishers) {
    const Chunk plain = make_chunk(nullptr, tokens, CG_L2, &profile, 500, /*seed=*/3);
    ASSERT_EQ(publish(plain), CG_OK);
    bool existed = true;
    ASSERT_EQ(publish(whole, &existed), CG_OK);
    EXPECT_FALSE(existed);
    EXPECT_TRUE(dir.read(level_path(whole, CG_L2)) == plain.bytes);
    EXPECT_EQ(inode(level_path(whole, CG_L3)), inode(level_path(whole, CG_L1)));
}

TEST_P(NestedStoreTest, PublishesCoarserLevelsWhereTheFinestIsOfAnother) {
    const Chunk plain = make_chunk(nullptr, tokens, CG_L1, &profile, 500, /*seed=*/3);
    ASSERT_EQ(publish(plain), CG_OK);
    bool existed = false;
    ASSERT_EQ(publish(whole, &existed), CG_OK);
    EXPECT_TRUE(existed);
    EXPECT_TRUE(dir.read(level_path(whole, CG_L1)) == plain.bytes);
    EXPECT_TRUE(dir.read(level_path(whole, CG_L2)) == prefix(whole, CG_L2));
    EXPECT_EQ(inode(level_path(whole, CG_L2)), inode(level_path(whole, CG_L3)));
    EXPECT_EQ(dir.files().size(), 4u) << "a temporary file is left";
}

// --- look-up ---

TEST_P(NestedStoreTest, FindsWhatEachLevelNeedsAtEachMask) {
    const auto chunk = [&](cg_level level, size_t payload, uint32_t seed, cg_level coarsest = CG_L0) {
        return make_chunk(nullptr, draw_tokens(16, seed), level, level == CG_L0 ? nullptr : &profile, payload, seed,
                          coarsest);
    };
    const std::vector<std::vector<Chunk>> files = {
        {chunk(CG_L1, 300, 1, CG_L3)},
        {chunk(CG_L2, 300, 2, CG_L3), chunk(CG_L0, 5000, 2)},
        {chunk(CG_L1, 300, 3, CG_L2), chunk(CG_L3, 200, 3)},
        {chunk(CG_L1, 300, 4), chunk(CG_L2, 200, 4), chunk(CG_L3, 100, 4)},
        {chunk(CG_L1, 300, 5), chunk(CG_L2, 300, 5), chunk(CG_L3, 300, 5)}, // as long as one another
        {chunk(CG_L3, 300, 6)},
        {},
    };
    std::vector<Chunk> chain;
    for (const std::vector<Chunk> &of_one : files) {
        publish_all(of_one);
        chain.push_back(of_one.empty() ? chunk(CG_L0, 10, 7) : of_one[0]);
    }
    for (unsigned mask = 0; mask < 16; mask++) {
        const std::vector<cg_store_entry> entries = look_up(chain, &profile, static_cast<uint8_t>(mask));
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

TEST_P(NestedStoreTest, FindsManyNestedChunks) {
    std::vector<Chunk> chain;
    for (uint32_t i = 0; i < 100; i++)
        chain.push_back(make_chunk(nullptr, draw_tokens(16, i), CG_L1, &profile, 100 + i, i, CG_L3));
    publish_all(chain);
    const std::vector<cg_store_entry> entries = look_up(chain, &profile);
    for (size_t i = 0; i < chain.size(); i++)
        for (unsigned level = CG_L1; level <= CG_L3; level++)
            EXPECT_EQ(entries[i].level_bytes[level], chain[i].header.level_bytes[level]) << i;
}

TEST_P(NestedStoreTest, TakesALoneNameForTheWholeFile) {
    ASSERT_EQ(publish(whole), CG_OK);
    for (unsigned level : {CG_L1, CG_L3}) ASSERT_EQ(unlinkat(dir.fd, level_path(whole, level).c_str(), 0), 0);
    const cg_store_entry entry = look_up({whole}, &profile)[0];
    EXPECT_EQ(entry.levels, 4);
    EXPECT_EQ(entry.level_bytes[CG_L2], whole.bytes.size());
}

TEST_P(NestedStoreTest, FindsTheLevelsOfAFileWhoseFinestNameIsGone) {
    ASSERT_EQ(publish(whole), CG_OK);
    ASSERT_EQ(unlinkat(dir.fd, level_path(whole, CG_L1).c_str(), 0), 0);
    const cg_store_entry entry = look_up({whole}, &profile)[0];
    EXPECT_EQ(entry.levels, 4 | 8);
    EXPECT_EQ(entry.level_bytes[CG_L2], whole.header.level_bytes[CG_L2]);
    EXPECT_EQ(entry.level_bytes[CG_L3], whole.header.level_bytes[CG_L3]);
}

TEST_P(NestedStoreTest, FindsNothingInSharedFilesThatAreNoChunks) {
    const std::vector<uint8_t> good = whole.bytes;
    std::vector<uint8_t> unreadable = good, longer = good, cut(good.begin(), good.end() - 1);
    unreadable[0] ^= 1;
    longer.push_back(0);
    for (const std::vector<uint8_t> &bytes : {unreadable, longer, cut, prefix(whole, CG_L2)}) {
        for (unsigned level = CG_L1; level <= CG_L3; level++) dir.write(level_path(whole, level), bytes);
        EXPECT_EQ(look_up({whole}, &profile)[0].levels, 0) << bytes.size();
        EXPECT_EQ(n_errors, 0u) << "damage is no error of the disk";
    }
}

// --- contexts ---

TEST_P(NestedStoreTest, MakesContextsOfLinksOfOneFile) {
    const cg_fingerprint fp = install_profile("x");
    std::vector<Chunk> chain = {make_chunk(nullptr, draw_tokens(16, 1), CG_L1, &fp, 300, 1, CG_L3)};
    chain.push_back(make_chunk(&chain[0], draw_tokens(16, 2), CG_L1, &fp, 300, 2, CG_L3));
    publish_all(chain);
    ASSERT_EQ(context("c", chain, 2 | 4 | 8, &fp), CG_OK);
    ASSERT_EQ(context("coarse", chain, 8, &fp), CG_OK);
    for (size_t i = 0; i < chain.size(); i++) {
        const std::string leaf = "/0000" + std::to_string(i) + ".kv";
        for (const std::string at : {"c/L1", "c/L2", "c/L3", "coarse/L3"})
            EXPECT_EQ(inode("m/contexts/" + at + leaf), inode(level_path(chain[i], CG_L1))) << at << leaf;
    }
    EXPECT_FALSE(dir.has("m/contexts/coarse/L1/00000.kv"));
    EXPECT_NE(dir.read_text("m/contexts/c/context.json").find("\"levels\":[\"L1\",\"L2\",\"L3\"]"), std::string::npos);
    EXPECT_NE(dir.read_text("m/contexts/coarse/context.json").find("\"levels\":[\"L3\"]"), std::string::npos);
    EXPECT_EQ(context("c", chain, 1 | 2, &fp), CG_ERR_NOT_FOUND);

    const ino_t before = inode("m/contexts/c/context.json");
    ASSERT_EQ(context("c", chain, 2 | 4 | 8, &fp), CG_OK);
    EXPECT_EQ(inode("m/contexts/c/context.json"), before) << "nothing has changed";
}

} // namespace
