// Look-ups of long prompts in a far store that answers few questions at a time: most chunks are not
// asked for, but guessed. A load finds out, and what it says it has loaded is right, whatever is
// there. The file system counts questions; no time is measured.
#include "tests/connector/engine.h"
#include "tests/connector/watch.h"
#include "tests/iouring/require.h"
#ifdef CG_TEST_HAS_FUSE
#include "tests/iouring/odd_fs.h"
#endif

#include <filesystem>
#include <memory>
#include <random>

namespace
{

using namespace cg_test;

#ifndef CG_TEST_HAS_FUSE
TEST(SparseTest, IsNotTested)
{
    CG_SKIP_OR_FAIL("fuse", "built without libfuse 3: far stores are not tested");
}
#else

constexpr uint32_t CHUNK = 8, N_CHUNKS = 80, N_TOKENS = CHUNK * N_CHUNKS;

std::string chunked()
{
    return "\"chunk_tokens\": " + std::to_string(CHUNK) +
           ", \"lookup_timeout_ms\": 600000, \"read_timeout_ms\": 600000, "
           "\"save_timeout_ms\": 600000, \"ttft_budget_ms\": 600000, \"retry_ms\": 600000";
}

// So large that few tokens are more than a few kB, of bases so small that they open at once.
ProfileSpec wide(bool nests)
{
    ProfileSpec spec = nesting_spec();
    spec.n_kv_heads = 16;
    spec.n_layers = 16;
    spec.group_layers.assign(spec.n_layers, 1);
    spec.nests = nests;
    return spec;
}

// A prompt that is stored, and what each level of it is decoded to.
struct Stored {
    explicit Stored(bool nests) : store(true, wide(nests)), tokens(prompt(N_TOKENS))
    {
        Engine near(store, chunked());
        EXPECT_EQ(near.save(tokens), CACHEGEN_OK) << near.error;
        for (uint32_t level = CG_L1; level < CG_N_LEVELS; level++) {
            near.level_plus_1 = level + 1;
            EXPECT_EQ(near.load(tokens).progress.loaded_tokens, N_TOKENS - 1);
            decoded[level] = near.memory;
        }
    }
    const Store store;
    const Tokens tokens;
    std::vector<uint8_t> decoded[CG_N_LEVELS];
};

// All tests run in one process, for this alone takes most of their time under a sanitizer.
class SparseTest : public testing::Test
{
  protected:
    static const Stored &nested()
    {
        static const Stored stored(true);
        return stored;
    }
    explicit SparseTest(const Stored &stored = nested())
        : store(true, stored.store.spec), tokens(stored.tokens)
    {
        using std::filesystem::copy_options;
        std::filesystem::copy(stored.store.dir.path, store.dir.path,
                              copy_options::recursive | copy_options::copy_symlinks |
                                  copy_options::overwrite_existing);
        std::copy(std::begin(stored.decoded), std::end(stored.decoded), decoded);
    }
    void SetUp() override
    {
        mount_anew();
        if (!odd->why().empty())
            CG_SKIP_OR_FAIL("fuse", odd->why() << ": far stores are not tested");
        open();
    }
    // Else the kernel remembers names that were there.
    void mount_anew()
    {
        far.reset();
        odd.reset();
        odd = std::make_unique<OddFs>(store.dir.path, mount.path, /*is_far=*/true,
                                      /*is_serial=*/false, "sshfs");
    }
    // A store that is far, as its connector finds when it asks how far.
    void open()
    {
        odd->set_mood(Mood::SLOW);
        far = std::make_unique<Engine>(mount.path, store.spec, chunked());
        odd->set_mood(Mood::GOOD);
    }
    void check(const Load &load)
    {
        const uint32_t end = load.progress.loaded_tokens;
        EXPECT_LE(end, load.hit.hit_tokens);
        for (uint32_t i = 0; i * CHUNK < end; i++) {
            const std::vector<uint8_t> &want = decoded[load.levels[i]];
            bool same = true;
            far->for_each(i * CHUNK, std::min(end, (i + 1) * CHUNK),
                          [&](uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint8_t *at) {
                              const auto offset = static_cast<size_t>(at - far->memory.data());
                              same = same && memcmp(at, &want[offset], far->element_bytes()) == 0;
                          });
            EXPECT_TRUE(same) << "chunk " << i;
        }
    }
    // A chunk's name at a level, below the store's root.
    std::string name(uint32_t index, unsigned level) const
    {
        cg_key key = root_of(store);
        const cg_key no_extra = {};
        for (uint32_t i = 0; i <= index; i++)
            key = cg_key_chunk(&key, &no_extra, &tokens[size_t{i} * CHUNK], CHUNK);
        char path[CG_TREE_PATH_BYTES];
        EXPECT_EQ(cg_tree_object_path("m", &key, static_cast<cg_level>(level),
                                      cg_profile_fingerprint(store.profile.get()), path,
                                      sizeof path),
                  CG_OK);
        return store.dir.path + "/" + path;
    }

    const Store store;
    const Tokens tokens;
    const TempDir mount;
    std::unique_ptr<OddFs> odd;
    std::unique_ptr<Engine> far;
    std::vector<uint8_t> decoded[CG_N_LEVELS];
};

class SparseLevelsTest : public SparseTest
{
  protected:
    SparseLevelsTest() : SparseTest(levels())
    {
    }
    static const Stored &levels()
    {
        static const Stored stored(false);
        return stored;
    }
};

TEST_F(SparseTest, FewChunksAreAskedForAndAllAreLoaded)
{
    for (const uint32_t level_plus_1 : {0, CG_L1 + 1, CG_L2 + 1, CG_L3 + 1}) {
        SCOPED_TRACE(level_plus_1);
        open(); // the kernel knows some names from the second time on
        far->level_plus_1 = level_plus_1;
        const int before = odd->n_calls();
        const cachegen_hit hit = far->look_up(tokens);
        EXPECT_EQ(hit.stored_tokens, N_TOKENS - 1);
        EXPECT_EQ(hit.n_chunks, N_CHUNKS);
        // Of all chunks it would be 80 * 6.
        EXPECT_LE(odd->n_calls() - before, 10 + 10 * 11) << "two folders, and of two names all";
        const Load load = far->load(tokens);
        EXPECT_EQ(load.status, CACHEGEN_OK);
        EXPECT_EQ(load.progress.loaded_tokens, N_TOKENS - 1);
        check(load);
        for (const uint8_t level : load.levels)
            EXPECT_EQ(level, std::max(level_plus_1, CG_L1 + 1u) - 1);
    }
}

TEST_F(SparseLevelsTest, FilesOfOneLevelAreLoadedToo)
{
    for (const uint32_t level_plus_1 : {0, CG_L1 + 1, CG_L3 + 1}) {
        far->level_plus_1 = level_plus_1;
        const Load load = far->load(tokens);
        EXPECT_EQ(load.status, CACHEGEN_OK);
        EXPECT_EQ(load.progress.loaded_tokens, N_TOKENS - 1);
        check(load);
    }
}

// From the front to the back, and what of the prompt is stored ends anywhere.
TEST_F(SparseTest, TheEndIsFoundExactly)
{
    for (const uint32_t n : {80, 79, 72, 71, 64, 63, 40, 37, 16, 8, 1, 0}) {
        for (uint32_t i = n; i < N_CHUNKS; i++)
            std::filesystem::remove_all(std::filesystem::path(name(i, CG_L1)).parent_path());
        mount_anew();
        open();
        EXPECT_EQ(far->look_up(tokens).stored_tokens, std::min(n * CHUNK, N_TOKENS - 1)) << n;
    }
}

// What lies between chunks that are there, and is not what was guessed.
TEST_F(SparseTest, WhatWasGuessedWrongEndsTheLoadAndTheNextLookUpKnows)
{
    constexpr uint32_t K = 31; // asked for by none of the rules
    const auto l1 = [&] { return name(K, CG_L1); };
    const std::string before = [&] {
        const Bytes bytes = store.dir.read(l1().substr(store.dir.path.size() + 1));
        return std::string(bytes.begin(), bytes.end());
    }();
    const std::string other = [&] { // a chunk of other tokens, by this one's name
        const Bytes bytes = store.dir.read(name(K + 1, CG_L1).substr(store.dir.path.size() + 1));
        return std::string(bytes.begin(), bytes.end());
    }();
    const struct {
        const char *what;
        std::string bytes; // of all levels' names; empty: none
        bool is_only_l3;   // or of that name alone
        uint32_t stored;   // that the look-up after it finds, in chunks
    } cases[] = {{"missing", "", false, K},
                 {"L3 alone", before, true, N_CHUNKS},
                 {"short", before.substr(0, 5000), false, K},
                 {"shorter than a header", before.substr(0, 50), false, K},
                 {"cut at the end", before.substr(0, before.size() - 1), false, K},
                 {"no chunk", std::string(before.size(), 'x'), false, K},
                 {"of other tokens", other, false, K}};
    for (const auto &c : cases) {
        SCOPED_TRACE(c.what);
        for (unsigned level = CG_L1; level < CG_N_LEVELS; level++) {
            std::filesystem::remove(name(K, level));
            if (!c.bytes.empty() && (!c.is_only_l3 || level == CG_L3))
                store.dir.write(name(K, level).substr(store.dir.path.size() + 1), c.bytes);
        }
        mount_anew();
        open();
        const Load load = far->load(tokens);
        EXPECT_EQ(load.hit.hit_tokens, N_TOKENS - 1);
        check(load);
        // A machine that decodes slowly plans with coarser levels, which a cut leaves whole.
        if (c.bytes.size() == before.size() - 1 && load.levels.size() > K &&
            load.levels[K] > CG_L1) {
            EXPECT_EQ(load.status, CACHEGEN_OK);
            continue;
        }
        EXPECT_NE(load.status, CACHEGEN_OK);
        EXPECT_EQ(load.progress.loaded_tokens, K * CHUNK);
        EXPECT_EQ(load.progress.failed_token, K * CHUNK);
        const Load next = far->load(tokens);
        EXPECT_EQ(next.hit.stored_tokens, std::min(c.stored * CHUNK, N_TOKENS - 1));
        EXPECT_EQ(next.status, CACHEGEN_OK);
        EXPECT_EQ(next.progress.loaded_tokens, next.hit.hit_tokens);
        check(next);
    }
}

// A chunk that takes few bytes, between others that take many: no damage.
TEST_F(SparseTest, AChunkOfLessThanHalfTheGuessedBytesIsLoadedToo)
{
    constexpr uint32_t K = 31;
    std::filesystem::remove_all(store.dir.path + "/m/objects");
    Engine near(store, chunked() + ", \"store_levels\": [\"L3\"]");
    ASSERT_EQ(near.element_bytes(), 2u);
    near.prefill(tokens);
    std::mt19937 random(1);
    near.for_each(0, N_TOKENS,
                  [&](uint32_t token, uint32_t, uint32_t, uint32_t, uint32_t, uint8_t *at) {
                      const uint32_t noise = 0x4080 | (random() & 0x80ff); // bf16: 4 to 16
                      cg_put_le(at, 2, token / CHUNK == K ? 0 : noise);
                  });
    cachegen_save *op;
    ASSERT_EQ(near.save_start(tokens, 0, N_TOKENS, true, nullptr, 0, &op), CACHEGEN_OK);
    ASSERT_EQ(near.finish(op).status, CACHEGEN_OK);
    ASSERT_LT(2 * std::filesystem::file_size(name(K, CG_L3)),
              std::filesystem::file_size(name(K - 1, CG_L3)) - 8192)
        << "of pages";
    ASSERT_EQ(near.load(tokens).progress.loaded_tokens, N_TOKENS - 1);
    decoded[CG_L3] = near.memory;
    mount_anew();
    open();
    const Load load = far->load(tokens);
    EXPECT_EQ(load.status, CACHEGEN_OK);
    EXPECT_EQ(load.progress.loaded_tokens, N_TOKENS - 1);
    check(load);
}

// As where room was made by keeping the coarsest level of some: one failed load is enough, in one
// process or, as an engine's scheduler and worker, in two.
TEST_F(SparseTest, OneFailedLoadTellsOfAllThatWasGuessedWrong)
{
    for (const uint32_t k : {13u, 31u, 47u, 58u})
        for (const unsigned level : {CG_L1, CG_L2})
            std::filesystem::remove(name(k, level));
    for (const bool in_two_processes : {false, true}) {
        SCOPED_TRACE(in_two_processes);
        mount_anew();
        open();
        const Load load = far->load(tokens);
        EXPECT_EQ(load.status, CG_ERR_NOT_FOUND);
        EXPECT_EQ(load.progress.loaded_tokens, 13 * CHUNK);
        if (in_two_processes) {
            const Bytes plan = far->plan;
            open();
            ASSERT_EQ(cachegen_forget_failed(far->c, plan.data(), plan.size(), &load.progress),
                      CACHEGEN_OK);
        }
        const Load next = far->load(tokens);
        EXPECT_EQ(next.status, CACHEGEN_OK);
        EXPECT_EQ(next.progress.loaded_tokens, N_TOKENS - 1);
        check(next);
    }
}

// Sizes of a file that somebody made, whose sums would overflow.
TEST_F(SparseTest, ASizeThatNoChunkHasEndsTheLoad)
{
    constexpr uint32_t K = 31;
    const std::string l1 = name(K, CG_L1).substr(store.dir.path.size() + 1);
    Bytes bytes = store.dir.read(l1);
    cg_put_le(&bytes[16], 8, UINT64_MAX); // of the file
    std::filesystem::remove(store.dir.path + "/" + l1);
    store.dir.write(l1, bytes);
    mount_anew();
    open();
    far->level_plus_1 = CG_L1 + 1;
    const Load load = far->load(tokens);
    check(load);
    EXPECT_EQ(load.status, CG_ERR_CORRUPT);
    EXPECT_EQ(load.progress.loaded_tokens, K * CHUNK);
}

TEST_F(SparseTest, AChunkOfAWorsePrefixIsNotTakenForOneOfABetter)
{
    constexpr uint32_t K = 31;
    const std::string folder = std::filesystem::path(name(K, CG_L1)).parent_path();
    std::filesystem::remove_all(folder);
    Engine near(store, chunked());
    near.prefill(tokens);
    cachegen_save *op;
    ASSERT_EQ(near.save_start(tokens, 0, N_TOKENS, true, nullptr, CG_L3, &op), CACHEGEN_OK);
    ASSERT_EQ(near.finish(op).status, CACHEGEN_OK);
    ASSERT_TRUE(std::filesystem::exists(folder));
    mount_anew();
    open();
    far->worst_level_plus_1 = far->level_plus_1 = CG_L2 + 1; // there is no L1 of it
    const Load load = far->load(tokens);
    EXPECT_EQ(load.status, CG_ERR_LOSSY_PREFIX);
    EXPECT_EQ(load.progress.loaded_tokens, K * CHUNK);
    check(load);
    EXPECT_EQ(far->look_up(tokens).stored_tokens, K * CHUNK);
    far->worst_level_plus_1 = far->level_plus_1 = 0;
    EXPECT_EQ(far->load(tokens).progress.loaded_tokens, N_TOKENS - 1);
}

// Their L0 has a name of its own, which the load would not see.
TEST_F(SparseTest, OfAStoreWithL0AllIsAskedFor)
{
    Engine near(store, chunked() + ", \"store_levels\": [\"L0\"]");
    ASSERT_EQ(near.open_status, CACHEGEN_OK) << near.error;
    ASSERT_EQ(near.save(tokens), CACHEGEN_OK);
    std::filesystem::remove(name(31, CG_L0));
    far->worst_level_plus_1 = CG_L0 + 1;
    EXPECT_EQ(far->look_up(tokens).stored_tokens, 31 * CHUNK);
    far->worst_level_plus_1 = 0;
    EXPECT_EQ(far->look_up(tokens).stored_tokens, N_TOKENS - 1);
}
#endif

} // namespace
