// tests/iouring/store_fixture.h - a store in a directory of the test's own, on each backend of
// cg_io.
#ifndef CG_TESTS_IOURING_STORE_FIXTURE_H
#define CG_TESTS_IOURING_STORE_FIXTURE_H
#include "codec/cursor.h"
#include "iouring/store.h"
#include "tests/iouring/chunk_maker.h"
#include "tests/iouring/io_fixture.h"

namespace cg_test
{

inline std::string hex(const cg_key &key)
{
    char text[CG_KEY_HEX_BYTES];
    cg_key_to_hex(&key, text);
    return text;
}

inline std::string object_dir(const Chunk &chunk)
{
    const std::string key = hex(chunk.header.key);
    return "m/objects/" + key.substr(0, 2) + "/" + key + "/";
}

inline std::string object_path(const Chunk &chunk, const std::string &model = "m")
{
    char path[CG_TREE_PATH_BYTES];
    EXPECT_EQ(cg_tree_object_path(model.c_str(), &chunk.header.key, cg_level(chunk.header.level),
                                  &chunk.header.profile, path, sizeof path),
              CG_OK);
    return path;
}

inline std::vector<uint8_t> token_bytes(const std::vector<uint32_t> &tokens)
{
    std::vector<uint8_t> bytes(4 * tokens.size());
    for (size_t i = 0; i < tokens.size(); i++)
        cg_put_le(&bytes[4 * i], 4, tokens[i]);
    return bytes;
}

inline std::vector<uint32_t> all_tokens(const std::vector<Chunk> &chain)
{
    std::vector<uint32_t> tokens;
    for (const Chunk &chunk : chain)
        tokens.insert(tokens.end(), chunk.tokens.begin(), chunk.tokens.end());
    return tokens;
}

class StoreFixture : public IoFixture
{
  protected:
    void SetUp() override
    {
        IoFixture::SetUp();
        if (io == nullptr)
            return;
        ASSERT_EQ(cg_store_open(dir.path.c_str(), "m", true, &store), CG_OK);
    }
    void TearDown() override
    {
        cg_store_free(store);
        IoFixture::TearDown();
    }

    cg_status publish(const Chunk &chunk, bool *existed = nullptr)
    {
        return cg_store_publish(store, io, chunk.bytes.data(), chunk.bytes.size(), existed);
    }
    void publish_all(const std::vector<Chunk> &chain)
    {
        for (const Chunk &chunk : chain)
            ASSERT_EQ(publish(chunk), CG_OK);
    }

    std::vector<cg_store_entry> look_up(const std::vector<Chunk> &chain,
                                        const cg_fingerprint *profile, uint8_t level_mask = 0xf)
    {
        std::vector<cg_key> keys;
        for (const Chunk &chunk : chain)
            keys.push_back(chunk.header.key);
        std::vector<cg_store_entry> entries(keys.size(),
                                            cg_store_entry{0xff, {1, 1, 1, 1}, {1, 1, 1, 1}, 0xff});
        n_errors = 99;
        EXPECT_EQ(cg_store_lookup(store, io, keys.data(), keys.size(), profile, level_mask, 0,
                                  entries.data(), &n_errors),
                  CG_OK);
        EXPECT_EQ(cg_io_n_under_way(io), 0u);
        return entries;
    }

    // Installs a profile that lossy contexts can link to.
    cg_fingerprint install_profile(const std::string &text)
    {
        const std::string profile = std::string("CGPF\r\n\x1a\n", 8) + text;
        const cg_fingerprint fp = fingerprint_of(profile.c_str());
        char path[CG_TREE_PATH_BYTES];
        EXPECT_EQ(cg_tree_profile_path("m", &fp, path, sizeof path), CG_OK);
        dir.write(path, profile);
        return fp;
    }

    cg_status context(const std::string &name, const std::vector<Chunk> &chain, uint8_t levels,
                      const cg_fingerprint *profile = nullptr)
    {
        std::vector<cg_store_link> links;
        for (const Chunk &chunk : chain)
            links.push_back({chunk.header.key, levels});
        const std::vector<uint32_t> tokens = all_tokens(chain);
        return cg_store_context_publish(store, io, name.c_str(), links.data(), links.size(),
                                        profile, tokens.data(), tokens.size());
    }

    cg_store *store = nullptr;
    uint32_t n_errors = 0;
};

} // namespace cg_test
#endif
