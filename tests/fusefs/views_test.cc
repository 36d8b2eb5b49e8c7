// Levels of a nested chunk: each is a file of its own size, whatever lies beneath. No mount.
#include "tests/fusefs/fs_fixture.h"

#include <sys/stat.h>

using namespace cg_test;

namespace {

class ViewsTest : public FsTest {
protected:
    void SetUp() override {
        for (int level = 1; level <= 3; level++)
            fs.mkdirs("m/contexts/c/L" + std::to_string(level));
    }

    static std::string at(int level, const std::string &context = "c") {
        return "m/contexts/" + context + "/L" + std::to_string(level) + "/00000.kv";
    }
    // What a name of this level shows.
    Bytes cut(int level) const {
        const auto n_bytes = static_cast<long>(nested.header.level_bytes[level]);
        return Bytes(nested.bytes.begin(), nested.bytes.begin() + n_bytes);
    }
    std::string object(int level) const {
        char path[CG_TREE_PATH_BYTES];
        EXPECT_EQ(cg_tree_object_path("m", &nested.header.key, static_cast<cg_level>(level),
                                      &nested.header.profile, path, sizeof path),
                  CG_OK);
        return path;
    }
    struct stat attr_of(const std::string &path) {
        struct stat attr = {};
        EXPECT_EQ(cg_fs_getattr(fs.fs, fs.find(path), &attr), 0) << path;
        return attr;
    }
    // As a connector publishes through the mount: the finest, then its links.
    void publish(const std::string &context = "c") {
        ASSERT_EQ(fs.put(at(1, context), nested.bytes), 0);
        ASSERT_EQ(fs.link(at(1, context), at(2, context)), 0);
        ASSERT_EQ(fs.link(at(1, context), at(3, context)), 0);
    }
    // As it lies in a store: one file, a link a level.
    void lay_out(const std::string &context = "c") const {
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

TEST_F(ViewsTest, WhatEndsWhereALevelEndsIsAnOrdinaryChunkOfThatLevel) {
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

}  // namespace
