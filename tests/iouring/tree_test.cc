#include "iouring/tree.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/iouring/chunk_maker.h"

namespace
{

const std::string KEY = "00112233445566778899aabbccddeeff";

cg_tree_name parse(const std::string &path)
{
    cg_tree_name name;
    memset(&name, 0xa5, sizeof name);
    cg_tree_parse(path.c_str(), &name);
    return name;
}

TEST(TreeTest, KnowsTheNamesThatHaveRules)
{
    const struct {
        std::string path;
        cg_tree_kind kind;
        unsigned level;
        uint32_t index;
    } cases[] = {
        {"m/objects/00/" + KEY + "/L0.kv", CG_TREE_OBJECT_CHUNK, 0, 0},
        {"m/objects/00/" + KEY + "/0123abcd-L1.kv", CG_TREE_OBJECT_CHUNK, 1, 0},
        {"m/objects/00/" + KEY + "/0123abcd-L3.kv", CG_TREE_OBJECT_CHUNK, 3, 0},
        {"m/contexts/c/L0/00000.kv", CG_TREE_CONTEXT_CHUNK, 0, 0},
        {"m/contexts/c/L3/99999.kv", CG_TREE_CONTEXT_CHUNK, 3, 99999},
        {"a model (v1.2)/contexts/a b-\xc3\xa4/L2/00012.kv", CG_TREE_CONTEXT_CHUNK, 2, 12},
        {"m/profiles/" + KEY + ".cgp", CG_TREE_PROFILE, 0, 0},
        {"m/contexts/c/profile.cgp", CG_TREE_CONTEXT_PROFILE, 0, 0},
        {"m/contexts/c/context.json", CG_TREE_CONTEXT_JSON, 0, 0},
        {"m/contexts/c/model.json", CG_TREE_CONTEXT_MODEL, 0, 0},
    };
    for (const auto &c : cases) {
        const cg_tree_name name = parse(c.path);
        EXPECT_EQ(name.kind, c.kind) << c.path;
        EXPECT_EQ(name.level, c.level) << c.path;
        EXPECT_EQ(name.index, c.index) << c.path;
        EXPECT_EQ(name.model, c.path.substr(0, c.path.find('/'))) << c.path;
    }
    EXPECT_STREQ(parse("m/contexts/some name/L2/00012.kv").context, "some name");
    EXPECT_STREQ(parse("m/objects/00/" + KEY + "/0123abcd-L2.kv").fp8, "0123abcd");
    EXPECT_STREQ(parse("m/objects/00/" + KEY + "/L0.kv").fp8, "");
    EXPECT_EQ(parse("m/objects/00/" + KEY + "/L0.kv").key.bytes[15], 0xff);
}

TEST(TreeTest, TakesEverythingElseForOrdinary)
{
    const std::string name_255(255, 'n'), name_256(256, 'n');
    ASSERT_EQ(parse(name_255 + "/contexts/c/context.json").kind, CG_TREE_CONTEXT_JSON);
    ASSERT_EQ(parse("m/contexts/" + name_255 + "/L1/00000.kv").kind, CG_TREE_CONTEXT_CHUNK);
    const std::string paths[] = {
        "",
        "/",
        ".",
        "..",
        "m",
        "m/",
        "m/model.json",
        "m/objects",
        "m/contexts/c",
        "/m/contexts/c/L0/00000.kv",
        "m//contexts/c/L0/00000.kv",
        "m/contexts/c/L0/00000.kv/",
        "m/contexts/c/L0//00000.kv",
        "./contexts/c/L0/00000.kv",
        "../contexts/c/L0/00000.kv",
        "m/contexts/./L0/00000.kv",
        "m/contexts/../L0/00000.kv",
        "m/contexts/c/../L0/00000.kv",
        ".m/contexts/c/L0/00000.kv",
        "m/contexts/.c/L0/00000.kv",
        "m/contexts/c\n/L0/00000.kv",
        "m/contexts/c\x7f/context.json",
        "m\x01/contexts/c/context.json",
        "m/contexts/c/L4/00000.kv",
        "m/contexts/c/L/00000.kv",
        "m/contexts/c/l0/00000.kv",
        "m/contexts/c/L00/00000.kv",
        "m/contexts/c/L0/0000.kv",
        "m/contexts/c/L0/000000.kv",
        "m/contexts/c/L0/-0001.kv",
        "m/contexts/c/L0/+0001.kv",
        "m/contexts/c/L0/0000a.kv",
        "m/contexts/c/L0/00000.KV",
        "m/contexts/c/L0/00000.kv.tmp",
        "m/contexts/c/L0/.00000.kv.Xa8f2.tmp",
        "m/contexts/c/L0/00000.kv~",
        "m/contexts/c/L0/00000",
        "m/contexts/c/L0/x/00000.kv",
        "m/contexts/c/00000.kv",
        "m/contexts/L0/00000.kv",
        "x/m/contexts/c/L0/00000.kv",
        "m/objects/01/" + KEY + "/L0.kv", // another key's folder
        "m/objects/0/" + KEY + "/L0.kv",
        "m/objects/" + KEY + "/L0.kv",
        "m/objects/00/" + KEY.substr(1) + "/L0.kv",
        "m/objects/00/" + KEY + "0/L0.kv",
        "m/objects/00/" + KEY.substr(0, 31) + "F/L0.kv", // capital digits
        "m/objects/00/" + KEY.substr(0, 31) + "g/L0.kv",
        "m/objects/00/" + KEY + "/L1.kv",
        "m/objects/00/" + KEY + "/0123abcd-L0.kv",
        "m/objects/00/" + KEY + "/0123abcd-L4.kv",
        "m/objects/00/" + KEY + "/0123ABCD-L1.kv",
        "m/objects/00/" + KEY + "/0123abc-L1.kv",
        "m/objects/00/" + KEY + "/0123abcd0-L1.kv",
        "m/objects/00/" + KEY + "/0123abcd_L1.kv",
        "m/objects/00/" + KEY + "/0123abcd-L1.kvx",
        "m/objects/00/" + KEY + "/tokens",
        "m/objects/00/" + KEY + "/.L0.kv.x.tmp",
        "m/profiles/default",
        "m/profiles/" + KEY,
        "m/profiles/" + KEY + ".cgpx",
        "m/profiles/" + KEY + "0.cgp",
        "m/profiles/x" + KEY.substr(1) + ".cgp",
        "m/contexts/c/tokens",
        "m/contexts/c/Context.json",
        name_256 + "/contexts/c/context.json",
        "m/contexts/" + name_256 + "/L1/00000.kv",
        "m/contexts/c/context.json/" + std::string(2000, 'x'),
        std::string(5000, '/'),
        ".cachegenfs/metrics",
        "quarantine/contexts/c/L1/00000.kv",
        "quarantine/profiles/" + KEY + ".cgp",
    };
    const cg_tree_name ordinary = {};
    for (const std::string &path : paths) {
        const cg_tree_name name = parse(path);
        EXPECT_EQ(name.kind, CG_TREE_ORDINARY) << path;
        EXPECT_EQ(memcmp(&name, &ordinary, sizeof name), 0) << "left-overs of: " << path;
    }
}

TEST(TreeTest, WritesThePathsThatItReads)
{
    const cg_fingerprint profile = cg_test::fingerprint_of("profile");
    cg_key key;
    char path[CG_TREE_PATH_BYTES];
    ASSERT_TRUE(cg_key_from_hex(KEY.c_str(), &key));
    for (unsigned level = 0; level < CG_N_LEVELS; level++) {
        ASSERT_EQ(cg_tree_object_path("m", &key, cg_level(level), &profile, path, sizeof path),
                  CG_OK);
        const cg_tree_name object = parse(path);
        EXPECT_EQ(object.kind, CG_TREE_OBJECT_CHUNK) << path;
        EXPECT_EQ(object.level, level);
        EXPECT_TRUE(cg_key_equal(&object.key, &key));
        ASSERT_EQ(cg_tree_context_path("m", "c", cg_level(level), 12, path, sizeof path), CG_OK);
        const cg_tree_name chunk = parse(path);
        EXPECT_EQ(chunk.kind, CG_TREE_CONTEXT_CHUNK) << path;
        EXPECT_EQ(chunk.level, level);
        EXPECT_EQ(chunk.index, 12u);
    }
    ASSERT_EQ(cg_tree_profile_path("m", &profile, path, sizeof path), CG_OK);
    const cg_tree_name installed = parse(path);
    EXPECT_EQ(installed.kind, CG_TREE_PROFILE) << path;
    EXPECT_EQ(memcmp(installed.key.bytes, profile.bytes, sizeof profile.bytes), 0);
    ASSERT_EQ(cg_tree_context_file_path("m", "c", "context.json", path, sizeof path), CG_OK);
    EXPECT_EQ(parse(path).kind, CG_TREE_CONTEXT_JSON);
}

TEST(TreeTest, RefusesToWriteBadPaths)
{
    const cg_fingerprint profile = {};
    const cg_key key = {};
    char path[CG_TREE_PATH_BYTES];
    EXPECT_EQ(cg_tree_object_path("a/b", &key, CG_L0, nullptr, path, sizeof path),
              CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(cg_tree_object_path("", &key, CG_L0, nullptr, path, sizeof path),
              CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(cg_tree_object_path("m", &key, cg_level(4), &profile, path, sizeof path),
              CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(cg_tree_object_path("m", &key, CG_L1, nullptr, path, sizeof path),
              CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(cg_tree_object_path("m", &key, CG_L0, nullptr, path, 51), CG_ERR_BUFFER_TOO_SMALL);
    EXPECT_EQ(cg_tree_object_path("m", &key, CG_L0, nullptr, path, 52), CG_OK);
    EXPECT_EQ(cg_tree_context_path("m", "..", CG_L0, 0, path, sizeof path),
              CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(cg_tree_context_path("m", "c", CG_L0, 100000, path, sizeof path),
              CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(cg_tree_context_file_path("m", ".c", "tokens", path, sizeof path),
              CG_ERR_INVALID_ARGUMENT);
}

TEST(TreeTest, TakesOnlyChunksThatAgreeWithTheirName)
{
    const cg_fingerprint profile = cg_test::fingerprint_of("p"),
                         other_profile = cg_test::fingerprint_of("q");
    const cg_test::Chunk lossless = cg_test::make_chain(1, CG_L0)[0];
    const cg_test::Chunk lossy = cg_test::make_chain(1, CG_L2, &profile)[0];
    const cg_key other_key = cg_key_of_bytes("x", 1);
    const auto object = [&](const cg_key &key, cg_level level, const cg_fingerprint *fp) {
        char path[CG_TREE_PATH_BYTES];
        EXPECT_EQ(cg_tree_object_path("m", &key, level, fp, path, sizeof path), CG_OK);
        return parse(path);
    };
    const struct {
        const char *what;
        cg_tree_name name;
        const cg_chunk_header *header;
        cg_status want;
    } cases[] = {
        {"its own name", object(lossless.header.key, CG_L0, nullptr), &lossless.header, CG_OK},
        {"its own name, lossy", object(lossy.header.key, CG_L2, &profile), &lossy.header, CG_OK},
        {"other key", object(other_key, CG_L2, &profile), &lossy.header, CG_ERR_FOREIGN_TOKENS},
        {"other profile", object(lossy.header.key, CG_L2, &other_profile), &lossy.header,
         CG_ERR_FOREIGN_PROFILE},
        {"other level", object(lossy.header.key, CG_L1, &profile), &lossy.header,
         CG_ERR_INVALID_ARGUMENT},
        {"in a context", parse("m/contexts/c/L2/00007.kv"), &lossy.header, CG_OK},
        {"in a context, other level", parse("m/contexts/c/L1/00007.kv"), &lossy.header,
         CG_ERR_INVALID_ARGUMENT},
        {"no chunk's name", parse("m/contexts/c/tokens"), &lossy.header, CG_ERR_INVALID_ARGUMENT},
    };
    for (const auto &c : cases)
        EXPECT_EQ(cg_tree_check(&c.name, c.header), c.want) << c.what;
}

TEST(TreeTest, KnowsWhatCanBeAName)
{
    for (const char *good : {"a", "a.b", "Llama-3.1-8B", "with space", "-x", "\xc3\xa4"})
        EXPECT_TRUE(cg_tree_name_is_valid(good)) << good;
    for (const char *bad : {"", ".", "..", ".hidden", "a/b", "a\nb", "\x7f"})
        EXPECT_FALSE(cg_tree_name_is_valid(bad)) << bad;
    EXPECT_TRUE(cg_tree_name_is_valid("quarantine"));
    EXPECT_FALSE(cg_tree_model_is_valid("quarantine"));
    EXPECT_TRUE(cg_tree_model_is_valid("quarantine2"));
    EXPECT_FALSE(cg_tree_model_is_valid(".hidden"));
    EXPECT_TRUE(cg_tree_name_is_valid(std::string(255, 'x').c_str()));
    EXPECT_FALSE(cg_tree_name_is_valid(std::string(256, 'x').c_str()));
}

TEST(TreeTest, KnowsTheFoldersOfTheRules)
{
    for (const char *path :
         {"m", "m/objects", "m/objects/ab", "m/objects/ab/00112233445566778899aabbccddeeff",
          "m/contexts", "m/contexts/c", "m/contexts/c/L1", "m/profiles"})
        EXPECT_TRUE(cg_tree_is_folder(path)) << path;
    for (const char *path : {"", ".hidden", "m/notes", "m/contexts/c/tokens", "m/contexts/c/L1/x",
                             "m/profiles/x", "m/objects/ab/key/x"})
        EXPECT_FALSE(cg_tree_is_folder(path)) << path;
}

} // namespace
