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
