// Save, look up and load through the ABI over a real directory, with either backend.
#include "connector/clock.h"
#include "connector/plan.h"
#include "connector/uses.h"
#include "iouring/store.h"
#include "tests/connector/engine.h"
#include "tests/connector/inside.h"
#include "tests/connector/touched_pages.h"
#include "tests/connector/watch.h"

#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <thread>

namespace
{

using namespace cg_test;

class LoadTest : public testing::TestWithParam<const char *>
{
  protected:
    std::string with(const std::string &more = "") const
    {
        return std::string("\"io_backend\": \"") + GetParam() + "\"" +
               (more.empty() ? "" : ", " + more);
    }
    void SetUp() override
    {
        char reason[256];
        if (std::string(GetParam()) == "io_uring" && !cg_io_uring_reason(reason, sizeof reason))
            GTEST_SKIP() << "no io_uring here (" << reason << "): loads tested on threads only";
    }
};

TEST_P(LoadTest, WhatWasSavedComesBackBitForBitAtL0)
{
    const Store store;
    Engine cold(store, with()), warm(store, with());
    ASSERT_EQ(cold.open_status, CACHEGEN_OK) << cold.error;
    const Tokens tokens = prompt(32 * 5 + 19); // five chunks and a tail of 16
    ASSERT_EQ(cold.save(tokens), CACHEGEN_OK);
    EXPECT_EQ(cold.stats().chunks_saved[0], 6u);

    const Load l = warm.load(tokens);
    EXPECT_EQ(l.status, CACHEGEN_OK);
    EXPECT_EQ(l.hit.hit_tokens, 176u);
    EXPECT_EQ(l.hit.stored_tokens, 176u);
    EXPECT_EQ(l.hit.n_chunks, 6u);
    EXPECT_EQ(l.hit.worst_level, 0u);
    EXPECT_EQ(l.progress.loaded_tokens, 176u);
    EXPECT_EQ(l.progress.worst_level, 0u);
    EXPECT_EQ(l.progress.bytes_read, l.hit.bytes);
    EXPECT_EQ(warm.error_of(tokens, 0, 176), 0);
    EXPECT_TRUE(warm.is_untouched(176, 179));
    const cachegen_stats s = warm.stats();
    EXPECT_EQ(s.chunks_loaded[0], 6u);
    EXPECT_EQ(s.tokens_loaded, 176u);
    EXPECT_EQ(s.loads, 1u);
    EXPECT_EQ(s.loads_failed, 0u);
    EXPECT_EQ(s.lookups, 1u);
    EXPECT_EQ(s.lookup_hits, 1u);
    EXPECT_EQ(s.lookup_errors, 0u);
}

// A directory that is mounted so that the kernel sets no times of access in it.
class NoAtime
{
  public:
    explicit NoAtime(std::string mounted)
        : path(std::move(mounted)),
          is_mounted(mount(path.c_str(), path.c_str(), nullptr, MS_BIND, nullptr) == 0)
    {
        is_done = is_mounted && mount(nullptr, path.c_str(), nullptr,
                                      MS_REMOUNT | MS_BIND | MS_NOATIME, nullptr) == 0;
    }
    ~NoAtime()
    {
        if (is_mounted)
            umount2(path.c_str(), MNT_DETACH);
    }
    NoAtime(const NoAtime &) = delete;
    NoAtime &operator=(const NoAtime &) = delete;
    const std::string path;
    const bool is_mounted;
    bool is_done; // false: this process may not mount
};

// A daemon that makes room goes by times of access.
TEST_P(LoadTest, WhatIsLoadedFromTheStoreItselfCountsAsUsed)
{
    const time_t now = time(nullptr), accessed = now - 3 * 3600, modified = now - 4 * 3600;
    for (const bool has_profile : {false, true})
        for (const bool is_mount : {false, true}) {
            SCOPED_TRACE(testing::Message() << has_profile << is_mount);
            const Store store(has_profile);
            const Tokens used = prompt(32 * 5), other = prompt(32 * 5, 7);
            Engine(store, with()).save(used);
            const std::vector<std::string> of_used = store.dir.files("m/objects");
            Engine(store, with()).save(other);
            for (const std::string &path : store.dir.files("m/objects")) {
                const timespec times[] = {{accessed, 0}, {modified, 0}};
                ASSERT_EQ(utimensat(store.dir.fd, path.c_str(), times, 0), 0);
            }
            if (is_mount) // the daemon sees what is opened
                store.dir.write(".cachegenfs/version", std::string("x"));
            const NoAtime mounted(store.dir.path);
            if (!mounted.is_done)
                GTEST_SKIP() << "no mount: not tested that loads count as uses";
            // What is left at closing is told for a moment only, which a slow disk may take for the
            // first file: the next load tells of the others.
            size_t n_loads = 0, n_used, n_told;
            do {
                EXPECT_EQ(Engine(store, with()).load(used).progress.loaded_tokens, 159u);
                n_used = n_told = 0;
                for (const std::string &path : store.dir.files("m/objects")) {
                    struct stat s;
                    ASSERT_EQ(fstatat(store.dir.fd, path.c_str(), &s, 0), 0);
                    EXPECT_EQ(s.st_mtime, modified) << path;
                    const bool is_used =
                        std::find(of_used.begin(), of_used.end(), path) != of_used.end();
                    const bool is_told = s.st_atime != accessed;
                    EXPECT_FALSE(is_told && (is_mount || !is_used)) << path;
                    EXPECT_TRUE(!is_told || s.st_atime >= now - 60) << path;
                    n_used += is_used;
                    n_told += is_told;
                }
            } while (n_told < n_used && n_loads++ < n_used && !is_mount);
            EXPECT_EQ(n_told, is_mount ? 0 : n_used);
            EXPECT_GE(n_used, 5u);
        }
}

TEST(UsesTest, NotesAnObjectOnceInAWhileAndNoMoreThanThereIsRoomFor)
{
    constexpr uint64_t AGAIN_NS = UINT64_C(1000000000) * CG_STORE_TOUCH_SECONDS;
    const auto uses = std::make_unique<cg_uses>();
    const auto key_of = [](uint64_t number) {
        cg_key key = {};
        memcpy(key.bytes, &number, sizeof number);
        return key;
    };
    const auto take_all = [&] {
        std::vector<uint64_t> numbers;
        for (cg_use use; cg_uses_take(uses.get(), &use);) {
            uint64_t number;
            memcpy(&number, use.key.bytes, sizeof number);
            numbers.push_back(number);
        }
        return numbers;
    };
    const cg_key one = key_of(1), same_place = key_of(1 + CG_USES);
    EXPECT_TRUE(cg_uses_note(uses.get(), &one, CG_L1, 1));
    EXPECT_FALSE(cg_uses_note(uses.get(), &one, CG_L1, 2)) << "noted already";
    EXPECT_FALSE(cg_uses_note(uses.get(), &one, CG_L2, 2)) << "one waits before it";
    EXPECT_EQ(take_all(), (std::vector<uint64_t>{1, 1}));
    EXPECT_FALSE(cg_uses_note(uses.get(), &one, CG_L1, AGAIN_NS)) << "told a while ago";
    EXPECT_TRUE(cg_uses_note(uses.get(), &one, CG_L1, AGAIN_NS + 1));
    EXPECT_FALSE(cg_uses_note(uses.get(), &same_place, CG_L1, AGAIN_NS + 1));
    EXPECT_EQ(take_all(), std::vector<uint64_t>{1 + CG_USES}) << "once";
    for (uint64_t number = 0; number < 3 * CG_USES; number++) {
        const cg_key key = key_of(number);
        cg_uses_note(uses.get(), &key, CG_L3, 2 * AGAIN_NS);
    }
    const std::vector<uint64_t> first = take_all();
    EXPECT_EQ(first.size(), static_cast<size_t>(CG_USES_WAITING));
    EXPECT_EQ(first.back(), static_cast<uint64_t>(CG_USES_WAITING - 1));
    const cg_key left_out = key_of(CG_USES_WAITING);
    EXPECT_TRUE(cg_uses_note(uses.get(), &left_out, CG_L3, 2 * AGAIN_NS)) << "it was not noted";
}

TEST_P(LoadTest, ChunksMayBeSmallerThanBlocksAndLargerThanThePrompt)
{
    for (const uint32_t chunk_tokens : {8, 24, 64, 256, 2048}) {
        SCOPED_TRACE(chunk_tokens);
        const Store store;
        Engine engine(store, with("\"chunk_tokens\": " + std::to_string(chunk_tokens)));
        const Tokens tokens = prompt(500);
        ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
        EXPECT_EQ(store.chunks("L0").size(), (496 + chunk_tokens - 1) / chunk_tokens);
        EXPECT_EQ(engine.load(tokens).progress.loaded_tokens, 496u);
        EXPECT_EQ(engine.error_of(tokens, 0, 496), 0);
        EXPECT_EQ(engine.load(tokens, 400).progress.loaded_tokens, 496u);
        EXPECT_EQ(engine.error_of(tokens, 400, 496), 0);
        EXPECT_TRUE(engine.is_untouched(0, 400));
    }
}

TEST_P(LoadTest, LossyChunksMayBeOfAnySizeToo)
{
    for (const uint32_t chunk_tokens : {64, 128, 256, 512, 2048}) {
        SCOPED_TRACE(chunk_tokens);
        const Store store(true);
        Engine engine(store, with("\"chunk_tokens\": " + std::to_string(chunk_tokens) +
                                  ", \"ttft_budget_ms\": 600000"));
        const Tokens tokens = prompt(600);
        ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
        const size_t n_chunks = (600 + chunk_tokens - 1) / chunk_tokens;
        EXPECT_EQ(store.chunks("L1").size(), n_chunks);
        double before = 0;
        for (uint32_t level = CG_L1; level < CG_N_LEVELS; level++) {
            engine.level_plus_1 = level + 1;
            const Load l = engine.load(tokens);
            EXPECT_EQ(l.progress.loaded_tokens, 599u);
            EXPECT_EQ(l.progress.chunks_at[level], n_chunks);
            const double error = engine.error_of(tokens, 0, 599);
            EXPECT_GT(error, before) << "L" << level;
            before = error;
        }
        engine.level_plus_1 = 0;
        EXPECT_EQ(engine.load(tokens).progress.chunks_at[CG_L1], n_chunks) << "coarse first";
    }
}

TEST_P(LoadTest, AColdStoreIsAMissAndAnEmptyPlanLoadsNothing)
{
    const Store store;
    Engine engine(store, with());
    const Load l = engine.load(prompt(100));
    EXPECT_EQ(l.hit.hit_tokens, 0u);
    EXPECT_EQ(l.status, CACHEGEN_OK);
    EXPECT_EQ(l.progress.loaded_tokens, 0u);
    EXPECT_TRUE(engine.is_poison());
}

TEST_P(LoadTest, TheEngineComputesTheLastToken)
{
    const Store store;
    Engine engine(store, with());
    const Tokens tokens = prompt(64);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    const Load l = engine.load(tokens);
    EXPECT_EQ(l.hit.hit_tokens, 63u);
    EXPECT_EQ(l.progress.loaded_tokens, 63u);
    EXPECT_EQ(engine.error_of(tokens, 0, 63), 0);
    EXPECT_TRUE(engine.is_untouched(63, 64));
}

TEST_P(LoadTest, ALocalHitMayEndInsideAChunk)
{
    const Store store;
    Engine engine(store, with());
    const Tokens tokens = prompt(160);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    for (uint32_t from : {16u, 31u, 32u, 48u, 150u}) {
        SCOPED_TRACE(from);
        const Load l = engine.load(tokens, from);
        EXPECT_EQ(l.hit.hit_tokens, 159u);
        EXPECT_EQ(l.hit.n_chunks, 5 - from / 32) << "chunks that the engine has are not read";
        EXPECT_EQ(l.progress.loaded_tokens, 159u);
        EXPECT_EQ(engine.error_of(tokens, from, 159), 0);
    }
    EXPECT_EQ(engine.load(tokens, 159).hit.hit_tokens, 0u) << "nothing beyond what the engine has";
}

TEST_P(LoadTest, APrefixIsSharedAndATailIsFoundAtTheFirstHole)
{
    const Store store;
    Engine engine(store, with());
    const Tokens first = prompt(32 * 3 + 24);
    ASSERT_EQ(engine.save(first), CACHEGEN_OK);
    Tokens longer = first;
    const Tokens more = prompt(100, 2);
    longer.insert(longer.end(), more.begin(), more.end());
    Load l = engine.load(longer);
    EXPECT_EQ(l.hit.hit_tokens, 120u);
    EXPECT_EQ(engine.error_of(longer, 0, 120), 0);
    longer[110]++; // the tail differs
    l = engine.load(longer);
    EXPECT_EQ(l.hit.hit_tokens, 96u);
    EXPECT_EQ(engine.error_of(longer, 0, 96), 0);
}

TEST_P(LoadTest, SavesInStepsMakeOneChain)
{
    const Store store;
    Engine engine(store, with());
    const Tokens tokens = prompt(150);
    engine.prefill(tokens);
    const struct {
        uint32_t from, to;
        bool is_last;
    } steps[] = {{0, 50, false}, {32, 100, false}, {96, 150, true}};
    for (const auto &step : steps) {
        cachegen_save *save;
        ASSERT_EQ(
            engine.save_start(tokens, step.from, step.to, step.is_last, "a-context", 0, &save),
            CACHEGEN_OK);
        EXPECT_EQ(engine.finish(save).status, CACHEGEN_OK);
    }
    EXPECT_EQ(engine.load(tokens).hit.hit_tokens, 144u);
    EXPECT_EQ(engine.error_of(tokens, 0, 144), 0);
    EXPECT_TRUE(store.dir.has("m/contexts/a-context/context.json"));
    EXPECT_EQ(store.dir.files("m/contexts/a-context/L0").size(), 5u);
}

// The blocks before from_token need not have anything.
TEST_P(LoadTest, AChunkThatBeginsBeforeWhatIsSavedIsNotStored)
{
    const Store store;
    Engine engine(store, with());
    const Tokens tokens = prompt(128);
    engine.prefill(tokens);
    cachegen_save *save;
    ASSERT_EQ(engine.save_start(tokens, 0, 32, false, nullptr, 0, &save), CACHEGEN_OK);
    EXPECT_EQ(engine.finish(save).loaded_tokens, 32u);
    engine.for_each(0, 40, [&](uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint8_t *at) {
        memset(at, 0xcd, engine.element_bytes());
    });
    ASSERT_EQ(engine.save_start(tokens, 40, 128, true, nullptr, 0, &save), CACHEGEN_OK);
    engine.finish(save);
    EXPECT_EQ(store.chunks("L0").size(), 1u);
    EXPECT_EQ(engine.load(tokens).progress.loaded_tokens, 32u);
    EXPECT_EQ(engine.error_of(tokens, 0, 32), 0);
}

// ---- what a plan may ask for ----

TEST_P(LoadTest, WhatLiesBeforeAPlansChunksIsNotLoadedByIt)
{
    const Store store;
    Engine engine(store, with());
    const Tokens tokens = prompt(128);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    ASSERT_EQ(engine.look_up(tokens, 64).hit_tokens, 127u);
    engine.poison();
    cachegen_load *load = nullptr;
    for (const uint32_t from : {0u, 63u})
        EXPECT_EQ(engine.load_start(from, 127, &load), CG_ERR_INVALID_ARGUMENT) << from;
    EXPECT_TRUE(engine.is_poison());
    EXPECT_EQ(engine.load(tokens, 64).progress.loaded_tokens, 127u);
}

TEST_P(LoadTest, APlanThatSaysAChunkIsHugeTakesNoMemoryForIt)
{
    const Store store;
    Engine engine(store, with());
    const Tokens tokens = prompt(64);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    ASSERT_EQ(engine.look_up(tokens).hit_tokens, 63u);
    cg_plan *plan;
    ASSERT_EQ(cg_plan_parse(engine.plan.data(), engine.plan.size(), &plan), CG_OK);
    const uint64_t huge = plan->chunks[0].sizes.bytes[CG_L0] = CG_STORE_MOST_CHUNK_BYTES - 1;
    cg_plan_write(plan, engine.plan.data());
    cg_plan_free(plan);
    for (const std::string &path : store.chunks("L0")) { // and so do the files
        const int fd = openat(store.dir.fd, path.c_str(), O_WRONLY);
        EXPECT_EQ(pwrite(fd, &huge, sizeof huge, 16), 8) << "the file's bytes";
        EXPECT_EQ(ftruncate(fd, 16 << 20), 0);
        close(fd);
    }
    const cachegen_progress p = engine.load_planned(0, 63);
    EXPECT_EQ(p.status, CG_ERR_BUFFER_TOO_SMALL);
    EXPECT_EQ(p.loaded_tokens, 0u);
    EXPECT_LT(p.bytes_read, 2u << 20);
}

TEST_P(LoadTest, ANameThatIsGoneSaysNothingOfTheFilesOtherNames)
{
    const Store store(true);
    Engine engine(store, with("\"store_levels\": [\"L1\", \"L2\", \"L3\"]"));
    const Tokens tokens = prompt(96);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    ASSERT_EQ(engine.look_up(tokens).hit_tokens, 95u); // of which the file's finest name is read
    for (const std::string &path : store.chunks("L1"))
        std::filesystem::remove(store.dir.path + "/" + path);
    const cachegen_progress p = engine.load_planned(0, 95);
    EXPECT_EQ(p.status, CG_ERR_NOT_FOUND);
    EXPECT_EQ(p.failed_levels, 1u << CG_L1);
    engine.level_plus_1 = CG_L2 + 1;
    EXPECT_EQ(engine.load(tokens).progress.loaded_tokens, 95u);
}

TEST_P(LoadTest, WhatTheStoreHasIsNotSavedAgain)
{
    const Store store;
    Engine engine(store, with()), other(store, with("\"positive_ttl_ms\": 60000"));
    const Tokens tokens = prompt(96);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    for (int i = 0; i < 2; i++) {
        ASSERT_EQ(other.save(tokens), CACHEGEN_OK);
        const cachegen_stats s = other.stats();
        EXPECT_EQ(s.chunks_saved[0], 0u);
        EXPECT_EQ(s.chunks_existed, 3u * (i + 1));
        EXPECT_EQ(s.bytes_written, 0u);
    }
}

TEST_P(LoadTest, TheBlocksMayBeReusedAsSoonAsASaveHasStarted)
{
    const Store store;
    Engine engine(store, with());
    const Tokens tokens = prompt(128);
    engine.prefill(tokens);
    cachegen_save *save;
    ASSERT_EQ(engine.save_start(tokens, 0, 128, true, nullptr, 0, &save), CACHEGEN_OK);
    engine.poison();
    EXPECT_EQ(engine.finish(save).status, CACHEGEN_OK);
    engine.load(tokens);
    EXPECT_EQ(engine.error_of(tokens, 0, 127), 0);
}

TEST_P(LoadTest, BlocksThatAreCopiedLaterMayBeReusedOnceTheyAreCopied)
{
    const Store store(true);
    Engine engine(store, with("\"store_levels\": [\"L0\"]"));
    engine.copies_later = true;
    std::vector<cachegen_save *> saves(4);
    std::vector<Tokens> prompts;
    for (uint64_t i = 0; i < saves.size(); i++) {
        prompts.push_back(prompt(32 * 8 + 16, i));
        engine.prefill(prompts[i]);
        ASSERT_EQ(engine.save_start(prompts[i], 0, 272, true, nullptr, 0, &saves[i]), CACHEGEN_OK);
        engine.wait_copied(saves[i]);
        engine.poison();
    }
    for (cachegen_save *save : saves) {
        const cachegen_progress p = engine.finish(save);
        EXPECT_EQ(p.status, CACHEGEN_OK);
        EXPECT_EQ(p.copied, 1u);
    }
    for (const Tokens &tokens : prompts) {
        EXPECT_EQ(engine.load(tokens).progress.loaded_tokens, 271u);
        EXPECT_EQ(engine.error_of(tokens, 0, 271), 0);
    }
    EXPECT_EQ(engine.stats().staging_bytes, 0u);
}

TEST_P(LoadTest, BlocksThatAreCopiedLaterAreNotReadByTheThreadThatSaves)
{
    const Store store;
    Engine engine(store, with());
    const Tokens tokens = prompt(32 * 16);
    engine.prefill(tokens);
    for (const bool copies_later : {false, true}) {
        engine.copies_later = copies_later;
        const TouchedPages blocks(engine.memory.data(), engine.memory.size());
        cachegen_save *save;
        ASSERT_EQ(engine.save_start(tokens, 0, 32 * 16, true, nullptr, 0, &save), CACHEGEN_OK);
        engine.wait_copied(save);
        EXPECT_NE(blocks.first_thread(), 0);
        EXPECT_EQ(blocks.first_thread() == gettid(), !copies_later);
        EXPECT_EQ(engine.finish(save).status, CACHEGEN_OK);
    }
}

TEST_P(LoadTest, ASaveThatIsFreedReadsNoBlocksAnyMore)
{
    const Store store;
    Engine engine(store, with());
    engine.copies_later = true;
    for (uint64_t i = 0; i < 20; i++) {
        const Tokens tokens = prompt(32 * 16, i);
        engine.prefill(tokens);
        cachegen_save *save;
        ASSERT_EQ(engine.save_start(tokens, 0, 32 * 16, true, nullptr, 0, &save), CACHEGEN_OK);
        cachegen_save_free(save);
        engine.poison();
        engine.load(tokens);
        ASSERT_EQ(engine.error_of(tokens, 0, 32 * 16 - 1), 0);
    }
}

// The one thread that copies stands still in the last read of the first save's first chunk: in V of
// the last layer.
TEST_P(LoadTest, NoCopyThatIsCutIsWaitedForAndWhatItIsReadingIsNotSaved)
{
    ProfileSpec spec;
    spec.head_dim = 256; // so that K and V of a block have pages of their own
    const Store store(false, spec);
    Engine engine(store, with("\"threads\": 1"));
    const Tokens tokens = prompt(32 * 8);
    engine.prefill(tokens);
    engine.copies_later = true;
    cachegen_save *saves[2];
    {
        TouchedPages blocks(engine.element(spec.n_layers - 1, 1, engine.table[1], 0, 0, 0),
                            Engine::BLOCK_TOKENS * spec.head_dim * engine.element_bytes(), true);
        for (cachegen_save *&save : saves)
            ASSERT_EQ(engine.save_start(tokens, 0, 32 * 8, true, "name", 0, &save), CACHEGEN_OK);
        ASSERT_TRUE(comes_true([&] { return blocks.first_thread() != 0; }));
        for (cachegen_save *save : saves) {
            EXPECT_FALSE(Engine::is_copied(save));
            cachegen_save_cut(save);
            EXPECT_TRUE(Engine::is_copied(save));
        }
        blocks.release_overwritten();
        for (cachegen_save *save : saves) {
            const cachegen_progress p = engine.finish(save);
            EXPECT_EQ(p.status, CACHEGEN_OK);
            EXPECT_EQ(p.loaded_tokens, 0u);
        }
    }
    const cachegen_stats s = engine.stats();
    EXPECT_EQ(s.saves_dropped_overwritten, 16u);
    EXPECT_EQ(s.saves_dropped, 16u);
    EXPECT_EQ(s.save_errors, 0u);
    EXPECT_EQ(s.staging_bytes, 0u);
    EXPECT_TRUE(store.chunks("L0").empty());
    EXPECT_FALSE(store.dir.has("m/contexts/name"));
}

// It stands still in the third chunk, or the fourth: pages are not blocks.
TEST_P(LoadTest, ChunksThatWereCopiedBeforeACutAreSavedAndNoOther)
{
    const Store store;
    Engine engine(store, with("\"threads\": 1"));
    const Tokens tokens = prompt(32 * 8);
    std::sort(engine.table.begin(), engine.table.end());
    engine.prefill(tokens);
    engine.copies_later = true;
    cachegen_save *save;
    {
        uint8_t *const third = engine.element(0, 0, 64 / Engine::BLOCK_TOKENS, 0, 0, 0);
        TouchedPages blocks(third, engine.memory.data() + engine.layer_bytes() - third, true);
        ASSERT_EQ(engine.save_start(tokens, 0, 32 * 8, true, "name", 0, &save), CACHEGEN_OK);
        ASSERT_TRUE(comes_true([&] { return blocks.first_thread() != 0; }));
        cachegen_save_cut(save);
        blocks.release_overwritten();
        engine.wait_cut(save);
    }
    engine.poison();
    const cachegen_progress p = engine.finish(save);
    EXPECT_EQ(p.status, CACHEGEN_OK);
    EXPECT_GE(p.loaded_tokens, 64u);
    EXPECT_LE(p.loaded_tokens, 96u);
    EXPECT_EQ(store.chunks("L0").size(), p.loaded_tokens / 32);
    EXPECT_EQ(engine.stats().saves_dropped_overwritten, 8 - p.loaded_tokens / 32);
    EXPECT_EQ(engine.stats().save_errors, 0u);
    EXPECT_TRUE(store.dir.has("m/contexts/name/context.json")) << "as far as there are chunks";
    EXPECT_EQ(engine.stats().staging_bytes, 0u);
    EXPECT_EQ(engine.load(tokens).progress.loaded_tokens, p.loaded_tokens);
    EXPECT_EQ(engine.error_of(tokens, 0, p.loaded_tokens), 0);
}

// The one thread that copies stands still in the first chunk; the last block is wanted.
TEST_P(LoadTest, ChunksBeforeTheFirstBlockThatIsWantedAreCopiedOnAfterACut)
{
    const Store store;
    Engine engine(store, with("\"threads\": 1"));
    const Tokens tokens = prompt(32 * 8);
    engine.prefill(tokens);
    engine.copies_later = true;
    cachegen_save *save;
    {
        TouchedPages blocks(engine.memory.data(), engine.layer_bytes(), true);
        ASSERT_EQ(engine.save_start(tokens, 0, 32 * 8, true, "name", 0, &save), CACHEGEN_OK);
        ASSERT_TRUE(comes_true([&] { return blocks.first_thread() != 0; }));
        cachegen_save_cut_from(save, 32 * 8 - 1);
        cachegen_save_cut_from(save, 32 * 8); // of none of its blocks
        EXPECT_FALSE(Engine::is_copied(save)) << "the others are still needed";
        blocks.release();
        engine.wait_copied(save);
    }
    engine.poison();
    const cachegen_progress p = engine.finish(save);
    EXPECT_EQ(p.status, CACHEGEN_OK);
    EXPECT_EQ(p.loaded_tokens, 32u * 7);
    EXPECT_EQ(engine.stats().saves_dropped_overwritten, 1u);
    EXPECT_EQ(engine.load(tokens).progress.loaded_tokens, 32u * 7);
    EXPECT_EQ(engine.error_of(tokens, 0, 32 * 7), 0);
    EXPECT_EQ(engine.stats().staging_bytes, 0u);
}

TEST_P(LoadTest, WhereverASaveIsCutWhatItLeavesIsRight)
{
    const Store store;
    Engine engine(store, with());
    engine.copies_later = true;
    for (uint64_t i = 0; i < 60; i++) {
        const Tokens tokens = prompt(32 * 16, i);
        engine.prefill(tokens);
        cachegen_save *save;
        ASSERT_EQ(engine.save_start(tokens, 0, 32 * 16, true, nullptr, 0, &save), CACHEGEN_OK);
        if (i % 3 == 2) // it is too late to cut anything
            engine.wait_copied(save);
        const uint32_t token = i % 2 == 0 ? 0 : static_cast<uint32_t>(i) * 8;
        cachegen_save_cut_from(save, 32 * 16 - 8);
        cachegen_save_cut_from(save, token);
        if (token < 32) // of its first chunk, so of all
            engine.wait_cut(save);
        else
            engine.wait_copied(save);
        engine.poison();
        const cachegen_progress p = engine.finish(save);
        ASSERT_EQ(p.status, CACHEGEN_OK);
        ASSERT_TRUE(p.loaded_tokens == 32 * 16 || i % 3 != 2);
        const uint32_t n = std::min(p.loaded_tokens, 32u * 16 - 1);
        ASSERT_EQ(engine.load(tokens).progress.loaded_tokens, n);
        ASSERT_EQ(engine.error_of(tokens, 0, n), 0);
    }
    EXPECT_EQ(engine.stats().staging_bytes, 0u);
}

TEST_P(LoadTest, SaltsExtraKeysAndDtypesNeverShare)
{
    const Store store;
    Engine engine(store, with());
    const Tokens tokens = prompt(64);
    engine.salt = "tenant a";
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    EXPECT_EQ(engine.look_up(tokens).hit_tokens, 63u);
    for (const char *salt : {"tenant b", "", "tenant a2"}) {
        engine.salt = salt;
        EXPECT_EQ(engine.look_up(tokens).hit_tokens, 0u) << salt;
    }
    engine.salt = "tenant a";
    engine.extra = "lora 1";
    EXPECT_EQ(engine.look_up(tokens).hit_tokens, 0u);
    Engine fp32(store, with("\"geometry\": {\"dtype\": \"fp32\"}"));
    ASSERT_EQ(fp32.open_status, CACHEGEN_OK) << fp32.error;
    fp32.salt = "tenant a";
    EXPECT_EQ(fp32.look_up(tokens).hit_tokens, 0u);
    ASSERT_EQ(fp32.save(tokens), CACHEGEN_OK);
    EXPECT_EQ(fp32.load(tokens).progress.loaded_tokens, 63u);
    EXPECT_EQ(fp32.error_of(tokens, 0, 63), 0);
}

TEST_P(LoadTest, ResultsAreRememberedForTheirTime)
{
    const Store store;
    const std::string for_a_minute = "\"negative_ttl_ms\": 60000, \"positive_ttl_ms\": 60000";
    Engine writer(store, with()), early(store, with(for_a_minute)), late(store, with(for_a_minute));
    const Tokens tokens = prompt(96);
    EXPECT_EQ(early.look_up(tokens).hit_tokens, 0u);
    ASSERT_EQ(writer.save(tokens), CACHEGEN_OK);
    EXPECT_EQ(early.look_up(tokens).hit_tokens, 0u);
    EXPECT_EQ(late.look_up(tokens).hit_tokens, 95u);
    for (const std::string &path : store.chunks("L0"))
        std::filesystem::remove(store.dir.path + "/" + path);
    EXPECT_EQ(late.look_up(tokens).hit_tokens, 95u);
    EXPECT_EQ(writer.look_up(tokens).hit_tokens, 0u) << "remembers nothing";
    // What is remembered is answered at once, without a thread: the first poll says so.
    const cachegen_request r = late.request(tokens);
    cachegen_lookup *lookup;
    cachegen_hit hit = {};
    hit.struct_size = sizeof hit;
    ASSERT_EQ(cachegen_lookup_start(late.c, &r, 0, &lookup), CACHEGEN_OK);
    EXPECT_EQ(cachegen_lookup_poll(lookup, &hit), CACHEGEN_OK);
    cachegen_lookup_free(lookup);
}

// ---- damage: each shortens the load, is counted, and is not offered again ----

struct Damage {
    const char *name;
    void (*apply)(const Store &store, const std::string &path);
    uint64_t cachegen_stats::*counter;
};

void edit(const Store &store, const std::string &path, void (*change)(Bytes *))
{
    Bytes bytes = store.dir.read(path);
    change(&bytes);
    std::filesystem::remove(store.dir.path + "/" + path); // the file may have links
    store.dir.write(path, bytes);
}

// Bits of a byte at a place, with checksums that are right again.
template <size_t AT, uint8_t BITS> void flip_sealed(const Store &store, const std::string &path)
{
    edit(store, path, [](Bytes *b) {
        (*b)[AT] ^= BITS;
        seal_chunk(b);
    });
}

const Damage DAMAGES[] = {
    {"missing",
     [](const Store &s, const std::string &p) { std::filesystem::remove(s.dir.path + "/" + p); },
     &cachegen_stats::chunks_missing},
    {"truncated",
     [](const Store &s, const std::string &p) {
         edit(s, p, [](Bytes *b) { b->resize(b->size() / 2); });
     },
     &cachegen_stats::chunks_truncated},
    {"a bit in its header",
     [](const Store &s, const std::string &p) { edit(s, p, [](Bytes *b) { (*b)[60] ^= 1; }); },
     &cachegen_stats::chunks_corrupt},
    {"a bit in its last section",
     [](const Store &s, const std::string &p) { edit(s, p, [](Bytes *b) { b->back() ^= 8; }); },
     &cachegen_stats::chunks_corrupt},
    {"a bit in its token ids",
     [](const Store &s, const std::string &p) {
         edit(s, p, [](Bytes *b) { (*b)[cg_get_le(b->data() + 12, 4)] ^= 1; });
     },
     &cachegen_stats::chunks_corrupt},
    {"other token ids, sealed",
     [](const Store &s, const std::string &p) {
         edit(s, p, [](Bytes *b) {
             (*b)[cg_get_le(b->data() + 12, 4)] ^= 1;
             seal_chunk(b);
         });
     },
     &cachegen_stats::chunks_foreign_tokens},
    {"another position, sealed", flip_sealed<36, 32>, &cachegen_stats::chunks_foreign_tokens},
    {"another parent, sealed", flip_sealed<88, 1>, &cachegen_stats::chunks_foreign_tokens},
    {"another extra key, sealed", flip_sealed<104, 1>, &cachegen_stats::chunks_foreign_tokens},
    {"another key, sealed", flip_sealed<120, 1>, &cachegen_stats::chunks_foreign_tokens},
    {"another model, sealed", flip_sealed<56, 1>, &cachegen_stats::chunks_foreign_model},
    {"another dtype, sealed",
     [](const Store &s, const std::string &p) {
         edit(s, p, [](Bytes *b) {
             (*b)[27] = CG_DTYPE_FP16;
             seal_chunk(b);
         });
     },
     &cachegen_stats::chunks_foreign_model},
    {"scales of bf16, sealed", flip_sealed<48, 1>, &cachegen_stats::chunks_corrupt},
    {"L0 on a lossy prefix, sealed",
     [](const Store &s, const std::string &p) {
         edit(s, p, [](Bytes *b) {
             (*b)[25] = CG_L2;
             seal_chunk(b);
         });
     },
     &cachegen_stats::chunks_corrupt},
    {"not a regular file",
     [](const Store &s, const std::string &p) {
         std::filesystem::rename(s.dir.path + "/" + p, s.dir.path + "/elsewhere");
         std::filesystem::create_symlink(s.dir.path + "/elsewhere", s.dir.path + "/" + p);
     },
     &cachegen_stats::chunks_io_error},
};

// An fp8 engine with the profile of a bf16 cache. How close lossy levels are is the codec's test.
TEST_P(LoadTest, AnFp8CacheWithScalesIsLoadedExactlyAndLossily)
{
    const Store store(true, spec_2(true, nesting_spec()));
    const std::string fp8 = ", \"geometry\": {\"dtype\": \"fp8_e4m3\"",
                      scales = ", \"k_scales\": [0.25, 2, 1, 1.5], \"v_scales\": [1, 0.5, 3, 1]}";
    const Tokens tokens = prompt(32 * 3);
    const std::string levels = "\"store_levels\": [\"L0\", \"L1\"]";
    Engine engine(store, with(levels + fp8 + scales)), other(store, with(levels + fp8 + "}")),
        bf16(store, with(levels));
    ASSERT_EQ(engine.open_status, CACHEGEN_OK) << engine.error;
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);

    engine.worst_level_plus_1 = other.worst_level_plus_1 = 1;
    engine.poison();
    EXPECT_EQ(engine.load(tokens).progress.loaded_tokens, 95u);
    EXPECT_EQ(engine.error_of(tokens, 0, 95), 0);
    // With other scales the same bytes mean something else, exact ones, too.
    other.poison();
    EXPECT_EQ(other.load(tokens).progress.loaded_tokens, 0u);
    EXPECT_TRUE(other.is_poison());
    const uint64_t n_foreign = other.stats().chunks_foreign_model;
    EXPECT_GT(n_foreign, 0u);

    for (const std::string &path : store.chunks("L0"))
        std::filesystem::remove(store.dir.path + "/" + path);
    engine.worst_level_plus_1 = other.worst_level_plus_1 = 0;
    engine.poison();
    EXPECT_EQ(engine.load(tokens).progress.loaded_tokens, 95u);
    EXPECT_GT(engine.error_of(tokens, 0, 95), 0);

    other.poison();
    EXPECT_EQ(other.load(tokens).progress.loaded_tokens, 0u);
    EXPECT_TRUE(other.is_poison());
    EXPECT_GT(other.stats().chunks_foreign_model, n_foreign);
    // bf16 has other keys.
    EXPECT_EQ(bf16.look_up(tokens).hit_tokens, 0u);
}

TEST_P(LoadTest, DamageIsAShorterLoadACounterAndNoSecondOffer)
{
    for (const Damage &damage : DAMAGES) {
        SCOPED_TRACE(damage.name);
        const Store store;
        Engine engine(store, with());
        engine.worst_level_plus_1 = 1;
        const Tokens tokens = prompt(32 * 5);
        ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
        engine.look_up(tokens); // the plan is made before the damage is done
        const cg_key root = root_of(store), third = key_of(root, tokens, 2);
        char path[CG_TREE_PATH_BYTES];
        ASSERT_EQ(cg_tree_object_path("m", &third, CG_L0, nullptr, path, sizeof path), CG_OK);
        damage.apply(store, path);

        engine.poison();
        cachegen_load *op;
        cachegen_progress p = {};
        p.struct_size = sizeof p;
        ASSERT_EQ(engine.load_start(0, 159, &op), CACHEGEN_OK);
        ASSERT_EQ(wait_for(engine.c, [&] { return cachegen_load_poll(op, &p); }), CACHEGEN_OK);
        cachegen_load_free(op);
        EXPECT_EQ(p.loaded_tokens, 64u);
        EXPECT_NE(p.status, CACHEGEN_OK);
        EXPECT_EQ(engine.error_of(tokens, 0, 64), 0);
        const cachegen_stats s = engine.stats();
        EXPECT_EQ(s.*damage.counter, 1u);
        EXPECT_EQ(s.chunks_missing + s.chunks_truncated + s.chunks_corrupt +
                      s.chunks_foreign_model + s.chunks_foreign_profile + s.chunks_foreign_tokens +
                      s.chunks_lossy_prefix + s.chunks_timed_out + s.chunks_io_error,
                  1u);
        EXPECT_EQ(s.loads_failed, 1u);
        EXPECT_EQ(engine.look_up(tokens).hit_tokens, 64u)
            << "a chunk that failed is not offered again";

        // The engine recomputes and saves: what was damaged is replaced.
        if (damage.counter == &cachegen_stats::chunks_io_error ||
            damage.counter == &cachegen_stats::chunks_lossy_prefix)
            continue;
        ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
        const Load healed = engine.load(tokens);
        EXPECT_EQ(healed.progress.loaded_tokens, 159u);
        EXPECT_EQ(engine.error_of(tokens, 0, 159), 0);
    }
}

// What is remembered of a chunk says that it is there; what a load has found counts more.
TEST_P(LoadTest, ADamagedChunkThatIsRememberedIsReplaced)
{
    const Store store;
    Engine engine(store, with("\"positive_ttl_ms\": 60000"));
    const Tokens tokens = prompt(96);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    ASSERT_EQ(engine.look_up(tokens).hit_tokens, 95u);
    for (const std::string &path : store.chunks("L0"))
        edit(store, path, [](Bytes *b) { b->back() ^= 8; });
    EXPECT_EQ(engine.load(tokens).progress.loaded_tokens, 0u);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    Engine fresh(store, with());
    fresh.load(tokens);
    EXPECT_EQ(fresh.error_of(tokens, 0, 32), 0) << "at least what was found to be damaged";
}

// A load reads what its level needs of a file, and no more.
TEST_P(LoadTest, WhatFollowsAChunkInItsFileIsNotRead)
{
    const Store store;
    Engine engine(store, with("\"positive_ttl_ms\": 60000"));
    const Tokens tokens = prompt(32 * 3);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    engine.look_up(tokens);
    for (const std::string &path : store.chunks("L0"))
        edit(store, path, [](Bytes *b) { b->push_back(0); });
    EXPECT_EQ(engine.load(tokens).progress.loaded_tokens, 95u);
    EXPECT_EQ(engine.error_of(tokens, 0, 95), 0);
    Engine fresh(store, with()); // also where it was there before the look-up
    EXPECT_EQ(fresh.load(tokens).progress.loaded_tokens, 95u);
    EXPECT_EQ(fresh.error_of(tokens, 0, 95), 0);
}

TEST_P(LoadTest, CountsSymbolsThatDidNotFit)
{
    const Store store(true);
    Engine engine(store, with("\"store_levels\": [\"L1\", \"L2\", \"L3\"]"));
    ASSERT_EQ(engine.save(prompt(32 * 3)), CACHEGEN_OK);
    EXPECT_EQ(engine.stats().symbols_saturated, 0u);
    engine.amplitude = 1e6f;
    Tokens others = prompt(32);
    others[0]++;
    ASSERT_EQ(engine.save(others), CACHEGEN_OK);
    EXPECT_GT(engine.stats().symbols_saturated, 0u);
    EXPECT_EQ(engine.stats().chunks_saved[1], 4u);
}

// Lossy levels cannot have it, but L0 can, and so the prompt is found as far as it goes.
TEST_P(LoadTest, WhatIsNotFiniteIsStoredAtL0WhereThatIsOneOfTheLevels)
{
    for (const ProfileSpec &spec : {nesting_spec(), spec_4(), spec_4(ProfileSpec(), 32)}) {
        const Store store(true, spec);
        Engine engine(store, with("\"store_levels\": [\"L0\", \"L2\"]"));
        ASSERT_EQ(engine.open_status, CACHEGEN_OK) << engine.error;
        engine.level_plus_1 = 1;
        engine.spoilt_token = 32 + 20; // of the second chunk
        const Tokens tokens = prompt(32 * 3);
        EXPECT_EQ(engine.save(tokens), CACHEGEN_OK);
        const cachegen_stats s = engine.stats();
        EXPECT_EQ(s.save_errors, 1u) << "the lossy levels";
        EXPECT_EQ(s.saves_dropped, 0u);
        EXPECT_EQ(s.chunks_saved[0], 3u);
        EXPECT_EQ(s.chunks_saved[2], 2u);
        EXPECT_EQ(s.symbols_saturated, 0u);
        const std::vector<uint8_t> computed = engine.memory;
        const Load l = engine.load(tokens);
        EXPECT_EQ(l.progress.loaded_tokens, 95u);
        engine.for_each(0, 95, [&](uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint8_t *at) {
            const uint8_t *want = computed.data() + (at - engine.memory.data());
            ASSERT_EQ(memcmp(at, want, engine.element_bytes()), 0);
        });
        // What is behind it is saved as well when the store has its L0.
        const Tokens longer = prompt(32 * 4);
        EXPECT_EQ(engine.save(longer), CACHEGEN_OK);
        EXPECT_EQ(engine.stats().chunks_saved[0], 4u);
        EXPECT_EQ(engine.stats().chunks_saved[2], 3u);
        EXPECT_EQ(engine.load(longer).progress.loaded_tokens, 127u);
    }
    // Where L0 is not asked for nothing is stored of it, nor of what is behind it.
    const Store store(true);
    Engine engine(store, with("\"store_levels\": [\"L2\"]"));
    engine.spoilt_token = 32 + 20;
    EXPECT_EQ(engine.save(prompt(32 * 3)), CACHEGEN_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(engine.stats().chunks_saved[2], 1u);
    EXPECT_EQ(engine.stats().saves_dropped_failed, 2u);
}

TEST_P(LoadTest, LossyLevelsAreNamesOfOneFileAndEachLoadReadsItsOwnPart)
{
    const Store store(true);
    Engine engine(store, with("\"store_levels\": [\"L1\", \"L2\", \"L3\"]"));
    const Tokens tokens = prompt(32 * 3);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    cachegen_stats s = engine.stats();
    uint64_t stored_bytes = 0;
    for (const std::string &path : store.chunks("L1")) {
        struct stat finest, coarsest;
        ASSERT_EQ(fstatat(store.dir.fd, path.c_str(), &finest, 0), 0);
        ASSERT_EQ(fstatat(store.dir.fd, (path.substr(0, path.size() - 5) + "L3.kv").c_str(),
                          &coarsest, 0),
                  0);
        EXPECT_EQ(finest.st_ino, coarsest.st_ino);
        stored_bytes += static_cast<uint64_t>(finest.st_size);
    }
    EXPECT_EQ(s.bytes_written, stored_bytes);
    for (unsigned level = 1; level <= 3; level++)
        EXPECT_EQ(s.chunks_saved[level], 3u);
    double error = 0;
    std::vector<uint64_t> read_bytes;
    for (int level = 1; level <= 3; level++) {
        SCOPED_TRACE(level);
        Engine fresh(store, with());
        fresh.level_plus_1 = static_cast<uint32_t>(level + 1);
        const Load l = fresh.load(tokens);
        EXPECT_EQ(l.progress.loaded_tokens, 95u);
        EXPECT_EQ(l.progress.worst_level, static_cast<uint32_t>(level));
        EXPECT_GT(fresh.error_of(tokens, 0, 95), error); // each coarser than the one before
        error = fresh.error_of(tokens, 0, 95);
        read_bytes.push_back(fresh.stats().bytes_read);
    }
    EXPECT_EQ(read_bytes[0], stored_bytes);
    EXPECT_LT(read_bytes[1], read_bytes[0]);
    EXPECT_LT(read_bytes[2], read_bytes[1]);

    // An administrator took the finer names away: what is left still loads, at the level of its
    // name.
    for (const char *level : {"L1", "L2"})
        for (const std::string &path : store.chunks(level))
            ASSERT_EQ(unlinkat(store.dir.fd, path.c_str(), 0), 0);
    Engine left(store, with());
    const Load l = left.load(tokens);
    EXPECT_EQ(l.progress.loaded_tokens, 95u);
    EXPECT_EQ(l.progress.worst_level, 3u);
}

TEST_P(LoadTest, BlocksOfSavedChunksHaveTheStepsThatTheirKAndVAskFor)
{
    ProfileSpec spec = spec_4(nesting_spec());
    spec.n_layers = 2; // what many layers and heads look at is even
    spec.group_layers = {1, 1};
    spec.n_kv_heads = spec.n_query_heads = 1;
    const Store store(true, spec);
    Engine engine(store, with("\"store_levels\": [\"L1\", \"L2\", \"L3\"]"));
    const Tokens tokens = prompt(32 * 3);
    // What cannot be weighed fails its save, and no other.
    engine.amplitude = HUGE_VALF;
    EXPECT_EQ(engine.save(tokens), CG_ERR_INVALID_ARGUMENT);
    engine.amplitude = 1;
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    const std::vector<std::string> paths = store.chunks("L1");
    ASSERT_EQ(paths.size(), 3u);
    Bytes scales;
    for (const std::string &path : paths) {
        const Bytes stored = store.dir.read(path);
        cg_chunk chunk;
        ASSERT_EQ(cg_chunk_open(stored.data(), stored.size(), &chunk), CG_OK);
        const cg_section steps = cg_chunk_section(&chunk, 1);
        ASSERT_EQ(steps.kind, CG_SECTION_STEPS);
        scales.insert(scales.end(), stored.begin() + static_cast<long>(steps.offset),
                      stored.begin() + static_cast<long>(steps.offset + steps.bytes));
        // As the codec's own function makes it, which weighs, too.
        const cg_chunk_header &h = chunk.header;
        Bytes elements(cg_geometry_elements(&h.geometry, h.n_tokens) * 2), want;
        const std::vector<uint32_t> hashes = Engine::prefix_hashes(tokens);
        uint8_t *at = elements.data();
        for (uint32_t layer = 0; layer < h.geometry.n_layers; layer++)
            for (uint32_t plane = 0; plane < 2; plane++)
                for (uint32_t t = h.first_position; t < h.first_position + h.n_tokens; t++)
                    for (uint32_t head = 0; head < h.geometry.n_kv_heads; head++)
                        for (uint32_t d = 0; d < h.geometry.head_dim; d++, at += 2)
                            engine.value(hashes[t], layer, plane, head, d, at);
        const Tokens of_chunk(tokens.begin() + h.first_position,
                              tokens.begin() + h.first_position + h.n_tokens);
        ASSERT_EQ(encode(store.profile.get(), h, of_chunk, elements, CG_L1, &want, 1, CG_L3),
                  CG_OK);
        EXPECT_EQ(stored, want);
    }
    EXPECT_NE(scales, Bytes(12, CG_OWN_STEP_FACTOR));
    Engine fresh(store, with());
    EXPECT_EQ(fresh.load(tokens).progress.loaded_tokens, 95u);
}

TEST_P(LoadTest, ADamagedNestedFileIsReplacedAtAllItsLevels)
{
    for (uint32_t level = 1; level <= 3; level++) {
        SCOPED_TRACE(level);
        const Store store(true);
        Engine engine(store, with("\"store_levels\": [\"L1\", \"L2\", \"L3\"]"));
        const Tokens tokens = prompt(32);
        ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
        engine.level_plus_1 = level + 1;
        engine.look_up(tokens); // the plan is made before the damage is done
        const std::string path = store.chunks("L1")[0], stem = path.substr(0, path.size() - 5);
        const uint8_t changed = store.dir.read(path)[200] ^ 1;       // in what all levels need
        const int fd = openat(store.dir.fd, path.c_str(), O_WRONLY); // the links stay
        ASSERT_EQ(pwrite(fd, &changed, 1, 200), 1);
        close(fd);
        ASSERT_EQ(engine.load(tokens).progress.loaded_tokens, 0u);
        ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
        for (const char *name : {"L1.kv", "L2.kv", "L3.kv"}) {
            struct stat finest = {}, other = {};
            ASSERT_EQ(fstatat(store.dir.fd, path.c_str(), &finest, 0), 0);
            ASSERT_EQ(fstatat(store.dir.fd, (stem + name).c_str(), &other, 0), 0) << name;
            EXPECT_EQ(finest.st_ino, other.st_ino) << name;
        }
        const Bytes healed = store.dir.read(path);
        EXPECT_EQ(cg_chunk_verify(healed.data(), healed.size()), CG_OK);
    }
}

TEST_P(LoadTest, AProfileThatDoesNotNestKeepsAFileALevel)
{
    const Store store(true, ProfileSpec());
    Engine engine(store, with("\"store_levels\": [\"L1\", \"L2\", \"L3\"]"));
    const Tokens tokens = prompt(32 * 3);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    for (const std::string &path : store.chunks("L1")) {
        struct stat attr;
        ASSERT_EQ(fstatat(store.dir.fd, path.c_str(), &attr, 0), 0);
        EXPECT_EQ(attr.st_nlink, 1u);
    }
    for (int level = 1; level <= 3; level++) {
        engine.level_plus_1 = static_cast<uint32_t>(level + 1);
        EXPECT_EQ(engine.load(tokens).progress.loaded_tokens, 95u);
    }
}

TEST_P(LoadTest, StreamsForLatencyCostBytesAndLoadToTheSame)
{
    const std::string more = with("\"chunk_tokens\": 512, \"streams\": ");
    const Store few(true), many(true);
    const Tokens tokens = prompt(512 + 1);
    Engine of_few(few, more + "\"bytes\""), of_many(many, more + "\"latency\"");
    for (Engine *engine : {&of_few, &of_many}) {
        ASSERT_EQ(engine->save(tokens), CACHEGEN_OK);
        engine->level_plus_1 = CG_L1 + 1;
        engine->poison();
        ASSERT_EQ(engine->load(tokens).progress.loaded_tokens, 512u);
    }
    EXPECT_EQ(of_many.memory, of_few.memory);
    EXPECT_GT(of_many.stats().bytes_written, of_few.stats().bytes_written);
}

TEST_P(LoadTest, SwappedChunksAreForeign)
{
    const Store store;
    Engine engine(store, with());
    const Tokens tokens = prompt(32 * 3), others = prompt(32 * 3, 2);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    ASSERT_EQ(engine.save(others), CACHEGEN_OK);
    const std::vector<std::string> files = store.chunks("L0");
    ASSERT_EQ(files.size(), 6u);
    std::vector<Bytes> contents;
    for (const auto &file : files)
        contents.push_back(store.dir.read(file));
    for (size_t i = 0; i < files.size(); i++) {
        std::filesystem::remove(store.dir.path + "/" + files[i]);
        store.dir.write(files[i], contents[(i + 1) % files.size()]);
    }
    EXPECT_EQ(engine.load(tokens).progress.loaded_tokens, 0u);
    EXPECT_EQ(engine.load(others).progress.loaded_tokens, 0u);
    EXPECT_GE(engine.stats().chunks_foreign_tokens,
              2u); // more where a later chunk was decoded first
}

TEST_P(LoadTest, AForgottenPlanIsNotOfferedUntilItIsSavedAnew)
{
    const Store store;
    Engine engine(store, with());
    const Tokens tokens = prompt(96);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    ASSERT_EQ(engine.look_up(tokens).hit_tokens, 95u);
    EXPECT_EQ(cachegen_forget(engine.c, engine.plan.data(), engine.plan.size()), CACHEGEN_OK);
    EXPECT_EQ(engine.look_up(tokens).hit_tokens, 0u);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    EXPECT_EQ(engine.look_up(tokens).hit_tokens, 95u);
    engine.plan.back() ^= 1;
    EXPECT_NE(cachegen_forget(engine.c, engine.plan.data(), engine.plan.size()), CACHEGEN_OK);
}

TEST_P(LoadTest, AForgottenPlanIsHeldAgainstNoLevelThatItCouldNotRead)
{
    for (const ProfileSpec &spec : {ProfileSpec(), nesting_spec()}) { // a file a level, or one
        const Store store(true, spec);
        for (const bool is_fixed : {true, false}) {
            SCOPED_TRACE(testing::Message() << "nests " << spec.nests << ", fixed " << is_fixed);
            Engine engine(store, with("\"store_levels\": [\"L1\", \"L2\", \"L3\"]"));
            const Tokens tokens = prompt(96);
            ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
            engine.level_plus_1 = is_fixed ? CG_L1 + 1 : 0;
            engine.worst_level_plus_1 = is_fixed ? 0 : CG_L1 + 1;
            ASSERT_EQ(engine.look_up(tokens).hit_tokens, 95u);
            EXPECT_EQ(cachegen_forget(engine.c, engine.plan.data(), engine.plan.size()),
                      CACHEGEN_OK);
            EXPECT_EQ(engine.look_up(tokens).hit_tokens, 0u);
            engine.level_plus_1 = engine.worst_level_plus_1 = 0;
            EXPECT_EQ(engine.look_up(tokens).hit_tokens, 95u) << "others take what is coarser";
        }
    }
}

// ---- what a load in another process came to ----

// An engine as vLLM has it: one connector plans, one loads and saves.
struct TwoProcesses {
    TwoProcesses(const Store &store, const std::string &more)
        : scheduler(store, more), worker(store, more)
    {
    }
    // The worker carries out what the scheduler's last look-up planned, and the scheduler is told.
    cachegen_progress run(uint32_t to)
    {
        worker.plan = scheduler.plan;
        cachegen_load *op;
        cachegen_progress p = {};
        p.struct_size = sizeof p;
        p.abi_version = CACHEGEN_ABI_VERSION;
        EXPECT_EQ(worker.load_start(0, to, &op), CACHEGEN_OK);
        EXPECT_EQ(wait_for(worker.c, [&] { return cachegen_load_poll(op, &p); }), CACHEGEN_OK);
        cachegen_load_free(op);
        EXPECT_EQ(
            cachegen_forget_failed(scheduler.c, scheduler.plan.data(), scheduler.plan.size(), &p),
            CACHEGEN_OK);
        return p;
    }
    cachegen_hit look_up(const Tokens &tokens, uint32_t worst_level_plus_1,
                         uint32_t level_plus_1 = 0)
    {
        scheduler.worst_level_plus_1 = worst_level_plus_1;
        scheduler.level_plus_1 = level_plus_1;
        return scheduler.look_up(tokens);
    }
    Engine scheduler, worker;
};

TEST_P(LoadTest, ARequestThatAcceptsNoLossyPrefixDoesNotMakeOthersMiss)
{
    const Store store(true);
    TwoProcesses engine(store, with("\"store_levels\": [\"L2\"], \"positive_ttl_ms\": 60000"));
    const Tokens tokens = prompt(96);
    ASSERT_EQ(Engine(store, with("\"store_levels\": [\"L2\"]")).save(tokens), CACHEGEN_OK);
    ASSERT_EQ(engine.look_up(tokens, 3).hit_tokens, 95u);
    for (const std::string &path : store.chunks("L2")) // which is remembered
        std::filesystem::remove(store.dir.path + "/" + path);
    ASSERT_EQ(engine.worker.save(tokens, nullptr, /*prefix_level=*/3), CACHEGEN_OK);
    const cachegen_progress p = engine.run(95);
    EXPECT_EQ(p.status, CG_ERR_LOSSY_PREFIX);
    EXPECT_EQ(p.failed_token, 0u);
    EXPECT_EQ(p.failed_levels, 1u << CG_L2);
    EXPECT_EQ(p.failed_worst_level, 3u);
    EXPECT_EQ(engine.look_up(tokens, 3).hit_tokens, 0u) << "it would fail again";
    EXPECT_EQ(engine.look_up(tokens, 4).hit_tokens, 95u);
    EXPECT_EQ(engine.run(95).loaded_tokens, 95u);
}

TEST_P(LoadTest, OnlyTheChunkAndTheLevelThatFailedAreNotOfferedAgain)
{
    const Store store(true, ProfileSpec()); // a file a level
    TwoProcesses engine(store, with("\"store_levels\": [\"L1\", \"L2\", \"L3\"]"));
    const Tokens tokens = prompt(160);
    ASSERT_EQ(engine.worker.save(tokens), CACHEGEN_OK);
    const cg_key third = key_of(root_of(store), tokens, 2);
    char path[CG_TREE_PATH_BYTES];
    ASSERT_EQ(cg_tree_object_path("m", &third, CG_L1, cg_profile_fingerprint(store.profile.get()),
                                  path, sizeof path),
              CG_OK);
    edit(store, path, [](Bytes *b) { b->back() ^= 8; });
    ASSERT_EQ(engine.look_up(tokens, 0, 2).hit_tokens, 159u);
    const cachegen_progress p = engine.run(159);
    EXPECT_EQ(p.status, CG_ERR_CORRUPT);
    EXPECT_EQ(p.loaded_tokens, 64u);
    EXPECT_EQ(p.failed_token, 64u);
    EXPECT_EQ(engine.look_up(tokens, 0, 2).hit_tokens, 64u);
    EXPECT_EQ(engine.look_up(tokens, 0, 3).hit_tokens, 159u) << "L2 is good";
    EXPECT_EQ(engine.look_up(tokens, 0, 0).hit_tokens, 159u);
}

TEST_P(LoadTest, NoChunkIsToBlameForACancelledOrALateLoad)
{
    const Store store;
    Engine engine(store, with());
    const Tokens tokens = prompt(96);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    ASSERT_EQ(engine.look_up(tokens).hit_tokens, 95u);
    cachegen_progress p = {};
    p.struct_size = sizeof p;
    p.abi_version = CACHEGEN_ABI_VERSION;
    const auto forget = [&] {
        return cachegen_forget_failed(engine.c, engine.plan.data(), engine.plan.size(), &p);
    };
    for (const cachegen_status status : {CG_OK, CG_ERR_CANCELLED, CG_ERR_NO_MEMORY}) {
        p.status = status;
        EXPECT_EQ(forget(), CACHEGEN_OK);
        EXPECT_EQ(engine.look_up(tokens).hit_tokens, 95u) << cachegen_strerror(status);
    }
    p.status = CG_ERR_TIMED_OUT;
    p.failed_token = 32;
    p.failed_levels = 1u << CG_L0;
    p.bytes_read = 1; // something came: for a request with more time it will do
    EXPECT_EQ(forget(), CACHEGEN_OK);
    EXPECT_EQ(engine.look_up(tokens).hit_tokens, 95u);
    p.failed_levels = p.bytes_read = 0; // nothing did: it had little time
    EXPECT_EQ(forget(), CACHEGEN_OK);
    EXPECT_EQ(engine.look_up(tokens).hit_tokens, 95u);
    p.failed_levels = 1u << CG_L0; // nothing did for long: the store hangs
    p.total_ns = UINT64_C(3600) * 1000000000;
    EXPECT_EQ(forget(), CACHEGEN_OK);
    EXPECT_EQ(engine.look_up(tokens).hit_tokens, 32u);
    EXPECT_EQ(cachegen_forget_failed(engine.c, engine.plan.data(), engine.plan.size(), nullptr),
              CG_ERR_INVALID_ARGUMENT);
    engine.plan.back() ^= 1;
    EXPECT_NE(forget(), CACHEGEN_OK);
}

// ---- a queue that fails ----

// Takes the rings away from under the process: every call on them fails from now on.
size_t break_rings()
{
    size_t n = 0;
    const int other = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (int fd = 0; fd < 1024; fd++) {
        char target[64] = "";
        if (readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), target, sizeof target - 1) >
                0 &&
            std::string(target) == "anon_inode:[io_uring]") {
            dup3(other, fd, O_CLOEXEC);
            n++;
        }
    }
    close(other);
    return n;
}

TEST_P(LoadTest, AQueueThatFailsEndsItsLoadsAndTheNextHaveANewOne)
{
    if (std::string(GetParam()) != "io_uring")
        GTEST_SKIP() << "only io_uring has a queue that can fail";
    const Store store;
    Engine engine(store, with("\"read_timeout_ms\": 60000, \"ttft_budget_ms\": 60000"));
    const Tokens tokens = prompt(128);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    ASSERT_EQ(engine.load(tokens).progress.loaded_tokens, 127u);
    ASSERT_GE(break_rings(), 3u);
    cachegen_load *op;
    cachegen_progress p = {};
    p.struct_size = sizeof p;
    ASSERT_EQ(engine.load_start(0, 127, &op), CACHEGEN_OK);
    ASSERT_EQ(wait_for(engine.c, [&] { return cachegen_load_poll(op, &p); }), CACHEGEN_OK);
    cachegen_load_free(op);
    // A reader that was awake when its ring broke has given way to a new one before this load.
    EXPECT_EQ(p.status, p.loaded_tokens == 127 ? CG_OK : CG_ERR_IO);
    engine.look_up(tokens); // may be a miss, of the look-up's own queue
    EXPECT_EQ(engine.load(tokens).progress.loaded_tokens, 127u);
}

// ---- lossy levels ----

// Chunks of 24 tokens: anchor runs of 10, 10 and 4, the next chunk's begin at its own first token.
TEST_P(LoadTest, AnchorsAndDeltasComeBackNearly)
{
    const Store store(true, paper_spec());
    Engine engine(store, with("\"store_levels\": [\"L1\", \"L2\", \"L3\"], \"chunk_tokens\": 24"));
    ASSERT_EQ(engine.open_status, CACHEGEN_OK) << engine.error;
    const Tokens tokens = prompt(24 * 4 + 8);
    ASSERT_EQ(engine.save(tokens, "paper"), CACHEGEN_OK);
    double before = 0;
    for (uint32_t level = 1; level < 4; level++) {
        SCOPED_TRACE(level);
        engine.level_plus_1 = level + 1;
        const Load l = engine.load(tokens);
        EXPECT_EQ(l.progress.loaded_tokens, 103u);
        EXPECT_EQ(l.progress.worst_level, level);
        const double error = engine.error_of(tokens, 0, 103);
        EXPECT_GT(error, before) << "coarser levels are worse";
        EXPECT_LT(error, store.spec.step[level - 1][CG_K] * 1.01 + 0.02)
            << "half a step, weights of at least a half";
        before = error;
    }
}

// Tasks of a profile that joins K and V have both planes.
TEST_P(LoadTest, LevelsOfAProfileThatJoinsPlanesComeBackNearly)
{
    ProfileSpec spec = spec_2(true, nesting_spec());
    spec.fine = true;
    const Store store(true, spec);
    Engine engine(store, with("\"store_levels\": [\"L0\", \"L1\", \"L2\", \"L3\"]"));
    ASSERT_EQ(engine.open_status, CACHEGEN_OK) << engine.error;
    const Tokens tokens = prompt(32 * 4 + 8);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    double before = -1;
    for (uint32_t level = 0; level < 4; level++) {
        SCOPED_TRACE(level);
        engine.level_plus_1 = level + 1;
        const Load l = engine.load(tokens);
        EXPECT_EQ(l.progress.loaded_tokens, 135u);
        EXPECT_EQ(l.progress.worst_level, level);
        const double error = engine.error_of(tokens, 0, 135);
        EXPECT_GT(error, before) << "coarser levels are worse";
        EXPECT_LT(error, 4);
        before = error;
    }
}

TEST_P(LoadTest, LossyLevelsComeBackNearly)
{
    const Store store(true);
    Engine engine(store, with("\"store_levels\": [\"L0\", \"L1\", \"L2\", \"L3\"]"));
    ASSERT_EQ(engine.open_status, CACHEGEN_OK) << engine.error;
    const Tokens tokens = prompt(32 * 4 + 8);
    ASSERT_EQ(engine.save(tokens, "all-levels"), CACHEGEN_OK);
    for (int level = 0; level < 4; level++) {
        EXPECT_EQ(store.chunks("L" + std::to_string(level)).size(), 5u);
        EXPECT_EQ(store.dir.files("m/contexts/all-levels/L" + std::to_string(level)).size(), 5u);
    }
    double before = -1;
    for (uint32_t level = 0; level < 4; level++) {
        SCOPED_TRACE(level);
        engine.level_plus_1 = level + 1;
        const Load l = engine.load(tokens);
        EXPECT_EQ(l.progress.loaded_tokens, 135u);
        EXPECT_EQ(l.hit.worst_level, level);
        EXPECT_EQ(l.progress.worst_level, level);
        const double error = engine.error_of(tokens, 0, 135);
        EXPECT_GT(error, before) << "coarser levels are worse";
        EXPECT_LT(error, 4);
        before = error;
        EXPECT_EQ(engine.stats().chunks_loaded[level], 5u);
    }
    // Without a wish: L2 first, then by what the disk allows, the finest that is accepted.
    engine.level_plus_1 = 0;
    engine.worst_level_plus_1 = 2;
    const Load l = engine.load(tokens);
    EXPECT_EQ(l.progress.loaded_tokens, 135u);
    EXPECT_LE(l.progress.worst_level, 1u);
}

TEST_P(LoadTest, ARequestThatAcceptsL1IsNotGivenL2)
{
    const Store store(true);
    Engine engine(store, with("\"store_levels\": [\"L2\", \"L3\"]"));
    const Tokens tokens = prompt(96);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    engine.worst_level_plus_1 = 2;
    EXPECT_EQ(engine.look_up(tokens).hit_tokens, 0u);
    engine.worst_level_plus_1 = 3;
    EXPECT_EQ(engine.load(tokens).progress.worst_level, 2u);
}

TEST_P(LoadTest, WhatAnEngineAcceptsHoldsWhateverARequestDoes)
{
    const Store store(true);
    const Tokens tokens = prompt(96);
    ASSERT_EQ(Engine(store, with("\"store_levels\": [\"L2\", \"L3\"]")).save(tokens), CACHEGEN_OK);
    Engine engine(store, with("\"worst_level\": \"L1\""));
    for (const uint32_t accepted : {0, CG_L2 + 1, CG_L3 + 1})
        for (const uint32_t level : {0, CG_L2 + 1, CG_L3 + 1}) {
            engine.worst_level_plus_1 = accepted;
            engine.level_plus_1 = level;
            EXPECT_EQ(engine.look_up(tokens).hit_tokens, 0u) << accepted << " " << level;
        }
}

TEST_P(LoadTest, NothingFineIsMadeOfALossyPrefixAndProvenanceCounts)
{
    const Store store(true);
    Engine engine(store, with("\"store_levels\": [\"L0\", \"L1\", \"L2\", \"L3\"]"));
    const Tokens tokens = prompt(96);
    ASSERT_EQ(engine.save(tokens, nullptr, /*prefix_level=*/3), CACHEGEN_OK);
    EXPECT_EQ(store.chunks("L0").size(), 0u);
    EXPECT_EQ(store.chunks("L1").size(), 0u);
    EXPECT_EQ(store.chunks("L2").size(), 3u);
    Engine fresh(store, with());
    fresh.worst_level_plus_1 = 1;
    EXPECT_EQ(fresh.look_up(tokens).hit_tokens, 0u);
    // An L2 chunk computed on an L3 prefix is as bad as L3: the look-up knows.
    fresh.worst_level_plus_1 = 3;
    EXPECT_EQ(fresh.look_up(tokens).hit_tokens, 0u);
    EXPECT_EQ(engine.look_up(tokens).hit_tokens, 95u);
    EXPECT_EQ(engine.stats().chunks_saved[2], 3u);
    fresh.worst_level_plus_1 = 4;
    const Load accepted = fresh.load(tokens);
    EXPECT_EQ(accepted.progress.loaded_tokens, 95u);
    EXPECT_EQ(accepted.progress.worst_level, 3u);
}

uint64_t inode_of(const Store &store, const std::string &path)
{
    struct stat attr = {};
    EXPECT_EQ(fstatat(store.dir.fd, path.c_str(), &attr, 0), 0) << path;
    return attr.st_ino;
}

TEST_P(LoadTest, BetterProvenanceReplacesWorse)
{
    for (const bool nests : {true, false})
        for (const char *ttl : {"0", "60000"}) {
            SCOPED_TRACE(nests ? "nested" : "a file a level");
            const Store store(true, nests ? nesting_spec() : ProfileSpec());
            const std::string more = with(std::string("\"positive_ttl_ms\": ") + ttl);
            Engine lossy(store, more), exact(store, more), reader(store, with());
            const Tokens tokens = prompt(96);
            ASSERT_EQ(lossy.save(tokens, nullptr, /*prefix_level=*/3), CACHEGEN_OK);
            reader.worst_level_plus_1 = 3;
            EXPECT_EQ(reader.look_up(tokens).hit_tokens, 0u);
            EXPECT_EQ(exact.look_up(tokens).hit_tokens, 95u) << "which it may remember";

            ASSERT_EQ(exact.save(tokens), CACHEGEN_OK);
            for (uint32_t level = 1; level <= 3; level++) {
                reader.worst_level_plus_1 = reader.level_plus_1 = level + 1;
                const Load l = reader.load(tokens);
                EXPECT_EQ(l.progress.loaded_tokens, 95u);
                EXPECT_EQ(l.progress.worst_level, level);
            }
            const std::string path = store.chunks("L1")[0], stem = path.substr(0, path.size() - 5);
            for (const char *name : {"L2.kv", "L3.kv"})
                EXPECT_EQ(inode_of(store, stem + name) == inode_of(store, path), nests) << name;

            const uint64_t written = exact.stats().bytes_written, inode = inode_of(store, path);
            ASSERT_EQ(exact.save(tokens), CACHEGEN_OK);
            ASSERT_EQ(lossy.save(tokens, nullptr, 3), CACHEGEN_OK);
            EXPECT_EQ(exact.stats().bytes_written, written) << "once is enough";
            EXPECT_EQ(inode_of(store, path), inode) << "worse does not replace better";
            EXPECT_EQ(reader.load(tokens).progress.loaded_tokens, 95u);

            const Tokens other = prompt(96, 2); // L1 is near enough to exact
            ASSERT_EQ(lossy.save(other, nullptr, /*prefix_level=*/1), CACHEGEN_OK);
            ASSERT_EQ(exact.save(other), CACHEGEN_OK);
            EXPECT_EQ(exact.stats().bytes_written, written) << "it is left";
        }
}

// A look-up that remembers a chunk has its old sizes, which say nothing against the new one.
TEST_P(LoadTest, AChunkThatWasReplacedSinceItIsRememberedIsReadAsItIsNow)
{
    const struct {
        const char *what, *more;
        bool has_profile, nests;
        uint32_t level_plus_1;
    } cases[] = {
        {"L0", "", false, false, 0},
        {"a nested file at its finest level", "", true, true, 3},
        {"at its coarsest", "", true, true, 4},
        {"a file a level", "", true, false, 4},
        {"a nested file refined", ", \"ttft_budget_ms\": 60000", true, true, 0},
        {"by the paper's policy", ", \"policy\": \"paper\"", true, true, 0},
    };
    for (const auto &c : cases)
        for (const float amplitude : {0.1f, 1.9f}) { // of larger files, and of smaller ones
            SCOPED_TRACE(testing::Message() << c.what << ", then times " << amplitude);
            const Store store(c.has_profile, c.nests ? nesting_spec() : ProfileSpec());
            Engine before(store, with()), after(store, with()), fresh(store, with()),
                reader(store, with(std::string("\"positive_ttl_ms\": 60000") + c.more));
            const Tokens tokens = prompt(96);
            const uint32_t prefix_level = c.has_profile ? 3 : 0;
            ASSERT_EQ(before.save(tokens, nullptr, prefix_level), CACHEGEN_OK);
            reader.worst_level_plus_1 = fresh.worst_level_plus_1 = 4;
            reader.level_plus_1 = fresh.level_plus_1 = c.level_plus_1;
            const uint64_t old_bytes = reader.look_up(tokens).bytes;
            for (const std::string &path : store.chunks("L0")) // else by better provenance
                std::filesystem::remove(store.dir.path + "/" + path);
            after.amplitude = amplitude;
            ASSERT_EQ(after.save(tokens), CACHEGEN_OK);

            const Load l = reader.load(tokens);
            EXPECT_EQ(l.hit.bytes, old_bytes) << "it remembers";
            EXPECT_EQ(l.status, CACHEGEN_OK);
            EXPECT_EQ(l.progress.loaded_tokens, 95u);
            const cachegen_stats s = reader.stats();
            EXPECT_EQ(s.chunks_corrupt + s.chunks_truncated + s.loads_failed, 0u);
            fresh.level_plus_1 = l.progress.worst_level + 1;
            const Load now = fresh.load(tokens);
            EXPECT_NE(now.hit.bytes, old_bytes);
            EXPECT_TRUE(fresh.memory == reader.memory);
            reader.level_plus_1 = fresh.level_plus_1;
            EXPECT_EQ(reader.look_up(tokens).bytes, now.hit.bytes) << "it has asked";
        }
}

TEST_P(LoadTest, AFileThatALookUpFindsToBeNoChunkIsReplaced)
{
    const Store store(true);
    Engine engine(store, with());
    const Tokens tokens = prompt(32);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    const std::string path = store.chunks("L1")[0];
    for (const bool has_magic : {false, true}) {
        SCOPED_TRACE(has_magic);
        const int fd = openat(store.dir.fd, path.c_str(), O_WRONLY); // the links stay
        if (has_magic)
            ASSERT_EQ(pwrite(fd, "\1", 1, 16 + 5), 1) << "the file's bytes: a TiB more";
        else
            ASSERT_EQ(pwrite(fd, "no magic", 8, 0), 8);
        close(fd);
        Engine other(store, with()); // which remembers nothing
        const Load found = other.load(tokens);
        EXPECT_EQ(found.status, CACHEGEN_OK) << "a plan that its own reader takes";
        EXPECT_EQ(found.hit.hit_tokens, 0u);
        ASSERT_EQ(other.save(tokens), CACHEGEN_OK);
        EXPECT_EQ(other.load(tokens).progress.loaded_tokens, 31u);
        EXPECT_EQ(inode_of(store, path.substr(0, path.size() - 5) + "L3.kv"),
                  inode_of(store, path));
    }
}

TEST_P(LoadTest, ChunksOfAnotherProfileAreForeign)
{
    const Store store(true);
    Engine engine(store, with("\"store_levels\": [\"L2\"]"));
    const Tokens tokens = prompt(64);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    for (const std::string &path : store.chunks("L2"))
        edit(store, path, [](Bytes *b) {
            (*b)[87] ^= 1;
            seal_chunk(b);
        }); // not in the digits that name it
    const Load l = engine.load(tokens);
    EXPECT_EQ(l.hit.hit_tokens, 63u);
    EXPECT_EQ(l.progress.loaded_tokens, 0u);
    EXPECT_GE(engine.stats().chunks_foreign_profile, 1u); // and here
}

// Each version of a profile has chunks of a version of its own, side by side in the chunk's folder.
// Those of the profile that profiles/default names are served.
TEST_P(LoadTest, AStoreServesChunksOfEveryVersionOfTheFormat)
{
    const Store store(true, spec_2(true, nesting_spec())); // the same steps in all versions
    ProfileSpec oldest = store.spec;
    oldest.version = 1;
    oldest.joined = false;
    const Tokens tokens = prompt(32 * 3);
    const std::vector<ProfileSpec> specs = {oldest, store.spec, spec_3(store.spec),
                                            spec_4(store.spec, 32)};
    std::vector<std::string> names;
    for (const ProfileSpec &spec : specs) {
        const Bytes bytes = make_profile_bytes(spec);
        names.push_back(hex(*cg_profile_fingerprint(open_profile(bytes).get())));
        store.dir.write("m/profiles/" + names.back() + ".cgp", bytes);
        store.dir.write("m/profiles/default", names.back() + "\n");
        Engine engine(store, with("\"store_levels\": [\"L1\", \"L2\", \"L3\"]"));
        ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
        EXPECT_EQ(engine.stats().chunks_saved[CG_L1], 3u);
    }
    std::vector<unsigned> n_of_version(CG_CHUNK_VERSION_STEPS + 1);
    for (const std::string &path : store.chunks("L1"))
        n_of_version.at(store.dir.read(path).at(8))++;
    EXPECT_EQ(n_of_version, (std::vector<unsigned>{0, 0, 3, 3, 3, 3})); // nested: version 2, not 1

    for (size_t i = 0; i < specs.size(); i++) {
        store.dir.write("m/profiles/default", names[i] + "\n");
        Engine engine(store, with());
        for (uint32_t level = CG_L1; level <= CG_L3; level++) {
            SCOPED_TRACE(testing::Message() << "profile " << i + 1 << ", level " << level);
            engine.level_plus_1 = level + 1;
            engine.poison();
            const Load l = engine.load(tokens);
            EXPECT_EQ(l.progress.loaded_tokens, 95u);
            EXPECT_EQ(l.progress.worst_level, level);
            EXPECT_LT(engine.error_of(tokens, 0, 95), 4);
        }
    }
}

TEST_P(LoadTest, AStoreWithoutAProfileKeepsL0)
{
    const Store store;
    Engine engine(store, with());
    cachegen_info info = {};
    info.struct_size = sizeof info;
    ASSERT_EQ(cachegen_get_info(engine.c, &info), CACHEGEN_OK);
    EXPECT_EQ(info.has_profile, 0u);
    EXPECT_EQ(info.store_levels, 1u);
    EXPECT_STREQ(info.profile_fingerprint_hex, "");
    EXPECT_EQ(info.io_backend, std::string(GetParam()) == "io_uring" ? 1u : 2u);
    ASSERT_EQ(engine.save(prompt(64)), CACHEGEN_OK);
    // On a lossily loaded prefix nothing can be kept, and that is no error.
    ASSERT_EQ(engine.save(prompt(64, 9), nullptr, 2), CACHEGEN_OK);
    EXPECT_EQ(store.chunks("L0").size(), 2u);
    EXPECT_EQ(engine.stats().saves_dropped, 2u);
    EXPECT_EQ(engine.stats().saves_dropped_lossy, 2u);
}

// ---- coarse first ----

// What the blocks hold after a load, and of which level it was.
struct Loaded {
    std::vector<uint8_t> blocks;
    Load load;
};

class AnytimeTest : public LoadTest
{
  protected:
    static constexpr uint32_t N_TOKENS = 32 * 6;
    void SetUp() override
    {
        LoadTest::SetUp();
        if (IsSkipped())
            return;
        Engine engine(store, with("\"store_levels\": [\"L1\", \"L2\", \"L3\"]"));
        ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    }
    Loaded load(const std::string &more, uint32_t level_plus_1 = 0) const
    {
        Engine engine(store, with(more));
        engine.level_plus_1 = level_plus_1;
        Loaded loaded;
        loaded.load = engine.load(tokens);
        loaded.blocks = engine.memory;
        return loaded;
    }
    uint64_t bytes_of(const char *level) const
    {
        return load("", static_cast<uint32_t>(level[1] - '0' + 1)).load.progress.bytes_read;
    }
    const Store store{true};
    const Tokens tokens = prompt(N_TOKENS);
};

TEST_P(AnytimeTest, WithTimeItReadsUpToTheFinestLevelAndNoByteTwice)
{
    const Loaded fixed = load("", CG_L1 + 1), anytime = load("\"ttft_budget_ms\": 60000");
    EXPECT_EQ(anytime.load.progress.loaded_tokens, N_TOKENS - 1);
    EXPECT_EQ(anytime.load.progress.worst_level, 1u);
    EXPECT_EQ(anytime.load.progress.bytes_read, fixed.load.progress.bytes_read);
    EXPECT_TRUE(anytime.blocks == fixed.blocks) << "the same bytes as a load at that level";
    EXPECT_EQ(anytime.load.progress.chunks_at[CG_L1], 6u);
    EXPECT_EQ(anytime.load.progress.chunks_at[CG_L3], 0u);
    EXPECT_EQ(anytime.load.progress.bytes_dropped, 0u);
    EXPECT_EQ(anytime.load.progress.predicted_kl_micronats,
              fixed.load.progress.predicted_kl_micronats);
    EXPECT_LT(anytime.load.progress.predicted_kl_micronats,
              load("", CG_L3 + 1).load.progress.predicted_kl_micronats);
}

TEST_P(AnytimeTest, ABoundOfKlIsKeptWithNoByteMoreThanThatNeeds)
{
    const struct {
        const char *what;
        double max_kl;
        uint32_t worst_level_plus_1, budget_ms;
        std::vector<uint32_t> chunks_at; // L0 to L3; none: nothing is loaded
    } cases[] = {
        // All six cost 0.0276 at L3, 0.0049 at L2, 0.0014 at L1.
        {"anything does", 1, 0, 60000, {0, 0, 0, 6}},
        {"some finer", 0.010, 0, 60000, {0, 0, 5, 1}},
        {"all at L1", 0.00137, 0, 60000, {0, 6, 0, 0}},
        {"what L1 cannot do", 0.001, 0, 60000, {}},
        {"the worst level is the tighter bound", 1, 3, 60000, {0, 0, 6, 0}},
        {"without time, too", 0.010, 0, 1, {0, 0, 5, 1}},
    };
    for (const auto &c : cases) {
        SCOPED_TRACE(c.what);
        Engine engine(store, with("\"ttft_budget_ms\": " + std::to_string(c.budget_ms)));
        engine.worst_level_plus_1 = c.worst_level_plus_1;
        engine.options.max_kl_micronats = static_cast<uint64_t>(c.max_kl * 1e6);
        const Load load = engine.load(tokens);
        if (c.chunks_at.empty()) {
            EXPECT_EQ(load.hit.hit_tokens, 0u);
            continue;
        }
        EXPECT_EQ(load.progress.loaded_tokens, N_TOKENS - 1);
        EXPECT_LE(static_cast<double>(load.progress.predicted_kl_micronats), c.max_kl * 1e6);
        for (int level = 0; level < CG_N_LEVELS; level++) {
            EXPECT_EQ(load.progress.chunks_at[level], c.chunks_at[level]) << level;
            EXPECT_EQ(std::count(load.levels.begin(), load.levels.end(), level),
                      c.chunks_at[level]);
        }
        EXPECT_TRUE(std::is_sorted(load.levels.rbegin(), load.levels.rend()))
            << "the end of the prefix counts most";
        EXPECT_EQ(load.progress.bytes_read, load.hit.bytes);
    }
    Engine engine(store, with(""));
    cachegen_request r = engine.request(tokens);
    r.level_plus_1 = 2;
    engine.options.struct_size = sizeof engine.options;
    engine.options.abi_version = CACHEGEN_ABI_VERSION;
    engine.options.max_kl_micronats = 1;
    cachegen_lookup *op = nullptr;
    EXPECT_EQ(cachegen_lookup_start_with(engine.c, &r, 0, &engine.options, &op),
              CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(op, nullptr);
}

TEST_P(AnytimeTest, TheCurveOfTheProfileIsWhatABoundGoesBy)
{
    const std::string profile = hex(*cg_profile_fingerprint(store.profile.get()));
    std::string text = store.model_json();
    text.pop_back();
    // All six cost 0.01 at L3, half of it the last one.
    store.dir.write("m/model.json",
                    text + ", \"quality\": {\"" + profile +
                        "\": {\"kl\": [0.0001, 0.001, 0.01], \"last\": [[32, 0.5], [192, 1]], "
                        "\"beyond\": 0.1}}}");
    const struct {
        uint64_t max_micronats, predicted_micronats;
        std::vector<uint32_t> chunks_at;
    } cases[] = {{12000, 10000, {0, 0, 0, 6}}, {6000, 5500, {0, 0, 1, 5}}};
    for (const auto &c : cases) {
        Engine engine(store, with("\"ttft_budget_ms\": 60000"));
        EXPECT_STREQ(engine.error, "");
        engine.options.max_kl_micronats = c.max_micronats;
        const Load load = engine.load(tokens);
        for (int level = 0; level < CG_N_LEVELS; level++)
            EXPECT_EQ(load.progress.chunks_at[level], c.chunks_at[level]) << level;
        EXPECT_NEAR(static_cast<double>(load.progress.predicted_kl_micronats),
                    static_cast<double>(c.predicted_micronats), 1);
    }
}

TEST_P(AnytimeTest, WhatManyChunksCostIsRoundedOnce)
{
    const Store other(true);
    std::string text = other.model_json();
    text.pop_back();
    // Each costs less than half a micronat.
    other.dir.write("m/model.json",
                    text + ", \"quality\": {\"" +
                        hex(*cg_profile_fingerprint(other.profile.get())) +
                        "\": {\"kl\": [0.00001, 0.00002, 0.00003], \"last\": [[8, 0.0125], [640, "
                        "1]], \"beyond\": 0.1}}}");
    Engine engine(other, with("\"chunk_tokens\": 8, \"store_levels\": [\"L3\"]"));
    EXPECT_STREQ(engine.error, "");
    const Tokens many = prompt(640);
    ASSERT_EQ(engine.save(many), CACHEGEN_OK);
    const Load load = engine.load(many);
    EXPECT_EQ(load.progress.chunks_at[CG_L3], 80u);
    EXPECT_NEAR(static_cast<double>(load.progress.predicted_kl_micronats), 30, 1);
}

// An engine that computes a chunk whole which the store lacks loads no tail in its place.
TEST_P(AnytimeTest, ATailThatIsNotLoadedIsCountedNeitherInTimeNorInQuality)
{
    Engine engine(store, with("\"store_levels\": [\"L1\", \"L2\", \"L3\"], "
                              "\"ttft_budget_ms\": 60000, \"recompute_tokens_per_s\": 10"));
    Tokens shorter = prompt(32 * 4 + 24, 2), longer = shorter;
    const Tokens more = prompt(100, 3);
    longer.insert(longer.end(), more.begin(), more.end());
    ASSERT_EQ(engine.save(shorter), CACHEGEN_OK);
    ASSERT_EQ(engine.look_up(longer).hit_tokens, 152u);
    engine.options.no_tail_at_hole = 1;
    EXPECT_EQ(engine.look_up(shorter).hit_tokens, 151u) << "the end of the prompt is no hole";
    for (const uint64_t max_micronats : {0, 20000}) {
        SCOPED_TRACE(max_micronats);
        engine.options.max_kl_micronats = max_micronats;
        const Load load = engine.load(longer);
        EXPECT_EQ(load.hit.hit_tokens, 128u);
        EXPECT_EQ(load.hit.stored_tokens, 128u);
        cg_plan *plan;
        ASSERT_EQ(cg_plan_parse(engine.plan.data(), engine.plan.size(), &plan), CG_OK);
        EXPECT_EQ(plan->budget_ns, (60000 - (252 - 128) * 100) * UINT64_C(1000000));
        cg_plan_free(plan);
        EXPECT_EQ(load.progress.loaded_tokens, 128u);
        if (max_micronats > 0) {
            EXPECT_LE(load.progress.predicted_kl_micronats, max_micronats);
        }
    }
}

TEST_P(AnytimeTest, WhatARequestHasWaitedIsSpentOfItsBudget)
{
    // At 100 kbit/s L1 takes seconds.
    const std::string config = "\"ttft_budget_ms\": 600000, \"prior_mbps\": 0.1";
    Engine engine(store, with(config));
    EXPECT_EQ(engine.look_up(tokens).worst_level, 1u);
    engine.options.spent_ns = UINT64_C(599999) * 1000000;
    EXPECT_EQ(engine.look_up(tokens).worst_level, 3u);
    cg_plan *plan;
    ASSERT_EQ(cg_plan_parse(engine.plan.data(), engine.plan.size(), &plan), CG_OK);
    EXPECT_LE(plan->started_boot_ns + engine.options.spent_ns, cg_boot_ns());
    cg_plan_free(plan);
    engine.options.spent_ns = UINT64_MAX; // before the machine was started
    EXPECT_EQ(engine.look_up(tokens).worst_level, 3u);
}

TEST_P(AnytimeTest, WithoutTimeItTakesWhatMustArriveAndNoMore)
{
    Engine fixed(store, with()), anytime(store, with("\"ttft_budget_ms\": 1"));
    fixed.level_plus_1 = CG_L3 + 1;
    fixed.load(tokens);
    const Load l = anytime.load(tokens);
    EXPECT_EQ(l.progress.loaded_tokens, N_TOKENS - 1);
    EXPECT_LT(l.progress.bytes_read, bytes_of("L1"));
    // Reads end on pages, so these small chunks may hold more than was asked for.
    EXPECT_LE(anytime.error_of(tokens, 0, N_TOKENS - 1), fixed.error_of(tokens, 0, N_TOKENS - 1));
}

TEST_P(AnytimeTest, PoliciesWithALevelForAChunkDeliverThatLevel)
{
    EXPECT_TRUE(load("\"policy\": \"fixed\"").blocks == load("", CG_L2 + 1).blocks);
    const Loaded least = load("\"policy\": \"min_delay\"");
    EXPECT_EQ(least.load.progress.loaded_tokens, N_TOKENS - 1);
    EXPECT_EQ(least.load.progress.worst_level, 3u) << "the first chunk, before the link is known";
    const Loaded paper = load("\"policy\": \"paper\", \"ttft_budget_ms\": 60000");
    EXPECT_EQ(paper.load.progress.loaded_tokens, N_TOKENS - 1);
    EXPECT_EQ(paper.load.progress.worst_level, 2u) << "the first chunk, before the link is known";
}

// Everything behind L3 is gone from one file, after the look-up: that chunk comes at L3.
TEST_P(AnytimeTest, ARefinementThatIsDamagedCostsQualityAndNotTheLoad)
{
    Engine engine(store, with("\"ttft_budget_ms\": 60000"));
    ASSERT_EQ(engine.look_up(tokens).hit_tokens, N_TOKENS - 1);
    const cg_key third = key_of(root_of(store), tokens, 2);
    char path[CG_TREE_PATH_BYTES];
    ASSERT_EQ(cg_tree_object_path("m", &third, CG_L1, cg_profile_fingerprint(store.profile.get()),
                                  path, sizeof path),
              CG_OK);
    const Bytes whole = store.dir.read(path);
    cg_chunk_header header;
    ASSERT_EQ(cg_chunk_header_parse(whole.data(), whole.size(), &header), CG_OK);
    // The first range of an unknown link is 16 KiB: the file is to be longer than that at L1.
    ASSERT_EQ(truncate((store.dir.path + "/" + path).c_str(),
                       static_cast<off_t>(header.level_bytes[CG_L3])),
              0);
    engine.poison();
    cachegen_load *op;
    cachegen_progress p = {};
    p.struct_size = sizeof p;
    ASSERT_EQ(engine.load_start(0, N_TOKENS - 1, &op), CACHEGEN_OK);
    ASSERT_EQ(wait_for(engine.c, [&] { return cachegen_load_poll(op, &p); }), CACHEGEN_OK);
    cachegen_load_free(op);
    // Where the first range asked for more than L3, nothing of the chunk could be had.
    EXPECT_TRUE((p.loaded_tokens == N_TOKENS - 1 && p.worst_level == 3) || p.loaded_tokens == 64)
        << p.loaded_tokens;
    EXPECT_EQ(engine.stats().chunks_truncated, 1u);
    const Loaded fine = load("", CG_L1 + 1);
    engine.poison();
    EXPECT_EQ(engine.look_up(tokens).hit_tokens, 64u) << "and is not offered again";
}

// Levels that were saved one at a time are files of their own, though the profile nests.
TEST_P(AnytimeTest, FilesThatAreNotNestedAfterAllAreReadOneALevel)
{
    const Store other(true);
    for (const char *level : {"L1", "L2", "L3"}) {
        Engine engine(other, with(std::string("\"store_levels\": [\"") + level + "\"]"));
        ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    }
    Engine fixed(other, with()), anytime(other, with("\"ttft_budget_ms\": 60000"));
    const Load l = anytime.load(tokens);
    EXPECT_EQ(l.progress.loaded_tokens, N_TOKENS - 1);
    EXPECT_EQ(l.status, CACHEGEN_OK);
    fixed.level_plus_1 = l.progress.worst_level + 1;
    fixed.load(tokens);
    EXPECT_LE(anytime.error_of(tokens, 0, N_TOKENS - 1), fixed.error_of(tokens, 0, N_TOKENS - 1));
    EXPECT_EQ(anytime.stats().chunks_corrupt, 0u);
}

// Whatever happens to the files between the look-up and the load, and however it is loaded: each
// chunk of the prefix that is said to be whole is, to the last bit, that chunk at one of its
// levels.
TEST_P(AnytimeTest, WhatIsDeliveredIsAChunkAtALevelWhateverIsDamaged)
{
    std::vector<std::vector<uint8_t>> at_level(CG_N_LEVELS);
    for (uint32_t level = CG_L1; level < CG_N_LEVELS; level++)
        at_level[level] = load("", level + 1).blocks;
    const std::vector<std::string> policies = {"ttft_budget", "ttft_budget", "min_delay", "paper"};
    for (uint32_t seed = 0; seed < 60; seed++) {
        SCOPED_TRACE(testing::Message() << "seed " << seed);
        std::mt19937 random(seed);
        Engine engine(store, with("\"policy\": \"" + policies[random() % 4] +
                                  "\", \"retry_ms\": 1, \"ttft_budget_ms\": " +
                                  (random() % 4 == 0 ? "1" : "60000") +
                                  ", \"queue_depth\": " + std::to_string(1 + random() % 8)));
        ASSERT_EQ(engine.look_up(tokens).hit_tokens, N_TOKENS - 1);
        const std::vector<std::string> files = store.chunks("L1");
        const std::string path = store.dir.path + "/" + files[random() % files.size()];
        const Bytes before = store.dir.read(path.substr(store.dir.path.size() + 1));
        const int fd = ::open(path.c_str(), O_WRONLY);
        const off_t at = static_cast<off_t>(random() % before.size());
        const uint8_t flipped =
            before[static_cast<size_t>(at)] ^ static_cast<uint8_t>(1 << seed % 8);
        ASSERT_EQ(seed % 3 == 0 ? ftruncate(fd, at) : pwrite(fd, &flipped, 1, at) - 1, 0);
        engine.poison();
        cachegen_load *op;
        cachegen_progress p = {};
        p.struct_size = sizeof p;
        ASSERT_EQ(engine.load_start(0, N_TOKENS - 1, &op), CACHEGEN_OK);
        if (random() % 4 == 0)
            cachegen_load_cancel(op);
        ASSERT_EQ(wait_for(engine.c, [&] { return cachegen_load_poll(op, &p); }), CACHEGEN_OK);
        cachegen_load_free(op);
        ASSERT_EQ(ftruncate(fd, static_cast<off_t>(before.size())), 0); // heal it
        ASSERT_EQ(pwrite(fd, before.data(), before.size(), 0), static_cast<ssize_t>(before.size()));
        close(fd);
        for (uint32_t chunk = 0; chunk * 32 < p.loaded_tokens; chunk++) {
            bool is[CG_N_LEVELS] = {false, true, true, true};
            const uint32_t end = std::min(chunk * 32 + 32, p.loaded_tokens);
            engine.for_each(chunk * 32, end,
                            [&](uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint8_t *byte) {
                                const size_t i = static_cast<size_t>(byte - engine.memory.data());
                                for (uint32_t level = CG_L1; level < CG_N_LEVELS; level++)
                                    is[level] = is[level] && memcmp(byte, &at_level[level][i],
                                                                    engine.element_bytes()) == 0;
                            });
            EXPECT_TRUE(is[CG_L1] || is[CG_L2] || is[CG_L3]) << "chunk " << chunk;
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Backends, AnytimeTest, testing::Values("io_uring", "threads"),
                         [](const auto &chosen) {
                             return std::string(chosen.param) == "io_uring" ? "uring" : "threads";
                         });

// ---- cancelling, and many at once ----

TEST_P(LoadTest, NothingIsWrittenAfterACancelledLoadIsDone)
{
    const Store store;
    Engine engine(store, with());
    const Tokens tokens = prompt(32 * 18);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    for (int round = 0; round < 50; round++) {
        const cachegen_hit hit = engine.look_up(tokens);
        ASSERT_EQ(hit.hit_tokens, 575u);
        engine.poison();
        cachegen_load *op;
        cachegen_progress p = {};
        p.struct_size = sizeof p;
        ASSERT_EQ(engine.load_start(0, hit.hit_tokens, &op), CACHEGEN_OK);
        for (int i = 0; i < round && cachegen_load_poll(op, &p) == CACHEGEN_AGAIN; i++)
            std::this_thread::yield();
        cachegen_load_cancel(op);
        ASSERT_EQ(wait_for(engine.c, [&] { return cachegen_load_poll(op, &p); }), CACHEGEN_OK);
        EXPECT_EQ(p.done, 1u);
        EXPECT_TRUE(p.status == CG_ERR_CANCELLED || p.loaded_tokens == 575u);
        EXPECT_EQ(engine.error_of(tokens, 0, p.loaded_tokens), 0);
        engine.poison(); // the blocks are another request's now
        std::this_thread::yield();
        cachegen_load_free(op);
        EXPECT_TRUE(engine.is_poison());
    }
    EXPECT_TRUE(engine.is_poison());
}

ProfileSpec wide_spec()
{
    ProfileSpec spec;
    spec.n_layers = 2;
    spec.n_kv_heads = 4;
    spec.head_dim = 128;
    return spec;
}

// Tasks of milliseconds are under way when the load is cancelled: it may not be done before they
// are.
TEST_P(LoadTest, ACancelledLoadIsDoneOnlyWhenItsTasksAre)
{
    const Store store(false, wide_spec());
    Engine engine(store, with("\"chunk_tokens\": 256"));
    const Tokens tokens = prompt(512);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    for (int round = 0; round < 30; round++) {
        ASSERT_EQ(engine.look_up(tokens).hit_tokens, 511u);
        engine.poison();
        cachegen_load *op;
        cachegen_progress p = {};
        p.struct_size = sizeof p;
        ASSERT_EQ(engine.load_start(0, 511, &op), CACHEGEN_OK);
        while (cachegen_load_poll(op, &p) == CACHEGEN_AGAIN && p.bytes_read == 0)
            std::this_thread::yield();
        for (int i = 0; i < 200 * round; i++)
            std::this_thread::yield();
        cachegen_load_cancel(op);
        ASSERT_EQ(wait_for(engine.c, [&] { return cachegen_load_poll(op, &p); }), CACHEGEN_OK);
        const std::vector<uint8_t> at_done = engine.memory;
        const uint64_t decoded_ns = engine.stats().decode_ns;
        EXPECT_EQ(cachegen_load_poll(op, &p), CACHEGEN_OK);
        cachegen_load_free(op);
        // A task that still ran would count its time: give it some, for want of an event that must
        // not come.
        for (int i = 0; i < 10; i++)
            usleep(500);
        EXPECT_EQ(engine.stats().decode_ns, decoded_ns)
            << "a task ended after the load was done, round " << round;
        ASSERT_TRUE(at_done == engine.memory) << "written to after it was done, round " << round;
    }
}

// One thread, which stands still in the first chunk's blocks while the others wait for it.
TEST_P(LoadTest, ChunksOfACancelledLoadAreNotVerified)
{
    const Store store;
    Engine engine(store, with("\"threads\": 1"));
    const Tokens tokens = prompt(32 * 8);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    const cachegen_hit hit = engine.look_up(tokens);
    ASSERT_EQ(hit.hit_tokens, 255u);
    const int n_before = cg_test_n_verified();
    cachegen_load *op = nullptr;
    cachegen_progress p = {};
    p.struct_size = sizeof p;
    {
        TouchedPages blocks(engine.memory.data(), engine.memory.size(), /*holds=*/true);
        ASSERT_EQ(engine.load_start(0, 255, &op), CACHEGEN_OK);
        EXPECT_TRUE(comes_true([&] { return blocks.first_thread() != 0; }));
        EXPECT_TRUE(comes_true([&] {
            cachegen_load_poll(op, &p);
            return p.bytes_read >= hit.bytes;
        }));
        cachegen_load_cancel(op);
        blocks.release();
        EXPECT_EQ(wait_for(engine.c, [&] { return cachegen_load_poll(op, &p); }), CACHEGEN_OK);
    }
    EXPECT_EQ(p.status, CG_ERR_CANCELLED);
    cachegen_load_free(op);
    EXPECT_EQ(cg_test_n_verified(), n_before + 1);
}

TEST_P(LoadTest, FreeingCancelsAndClosingCompletes)
{
    const Store store;
    const Tokens tokens = prompt(32 * 16);
    {
        Engine engine(store, with());
        engine.prefill(tokens);
        cachegen_save *save;
        ASSERT_EQ(engine.save_start(tokens, 0, 512, true, "at-exit", 0, &save), CACHEGEN_OK);
        cachegen_save_free(save); // waits
        engine.look_up(tokens);
        engine.poison();
        cachegen_load *load;
        ASSERT_EQ(engine.load_start(0, 511, &load), CACHEGEN_OK);
        cachegen_load_free(load);
        engine.poison();
        const cachegen_request r = engine.request(tokens);
        cachegen_lookup *lookup;
        ASSERT_EQ(cachegen_lookup_start(engine.c, &r, 0, &lookup), CACHEGEN_OK);
        cachegen_lookup_free(lookup);
        EXPECT_TRUE(engine.is_poison());
    }
    EXPECT_TRUE(store.dir.has("m/contexts/at-exit/context.json"));
}

TEST_P(LoadTest, ManyConnectorsAndThreadsShareAStore)
{
    const Store store(true);
    std::vector<std::thread> threads;
    for (uint32_t i = 0; i < 4; i++)
        threads.emplace_back([&, i] {
            Engine engine(store, with("\"threads\": 1, \"store_levels\": [\"L0\", \"L2\"]"));
            ASSERT_EQ(engine.open_status, CACHEGEN_OK) << engine.error;
            engine.level_plus_1 = 1;
            for (uint32_t round = 0; round < 3; round++) {
                const Tokens tokens = prompt(100, (i + round) % 3 + 1);
                ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
                const Load l = engine.load(tokens);
                EXPECT_EQ(l.progress.loaded_tokens, 96u);
                EXPECT_EQ(engine.error_of(tokens, 0, 96), 0);
            }
        });
    for (auto &thread : threads)
        thread.join();
    EXPECT_EQ(store.chunks("L0").size(), 9u);
}

TEST_P(LoadTest, LoadsAtOnceAllComplete)
{
    const Store store;
    Engine engine(store, with("\"queue_depth\": 3, \"staging_mib\": 1"));
    const Tokens tokens = prompt(32 * 6);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    ASSERT_EQ(engine.look_up(tokens).hit_tokens, 191u);
    const std::vector<int64_t> all = engine.table;
    std::vector<cachegen_load *> loads(3);
    engine.poison();
    for (size_t i = 0; i < loads.size(); i++) { // twelve blocks each
        engine.table.assign(all.begin() + static_cast<long>(12 * i),
                            all.begin() + static_cast<long>(12 * i + 12));
        ASSERT_EQ(engine.load_start(0, 191, &loads[i]), CACHEGEN_OK);
    }
    for (size_t i = 0; i < loads.size(); i++) {
        cachegen_progress p = {};
        p.struct_size = sizeof p;
        ASSERT_EQ(wait_for(engine.c, [&] { return cachegen_load_poll(loads[i], &p); }),
                  CACHEGEN_OK);
        EXPECT_EQ(p.loaded_tokens, 191u);
        engine.table.assign(all.begin() + static_cast<long>(12 * i),
                            all.begin() + static_cast<long>(12 * i + 12));
        EXPECT_EQ(engine.error_of(tokens, 0, 191), 0);
        cachegen_load_free(loads[i]);
    }
}

// The first load has so many chunks that its plans are made beside what adds and removes loads.
TEST_P(LoadTest, LoadsOfManyChunksComeAndGo)
{
    const Store store;
    Engine engine(store, with("\"chunk_tokens\": 8"));
    const Tokens tokens = prompt(34 * 16);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    const std::vector<int64_t> all = engine.table;
    for (int round = 0; round < 20; round++) {
        cachegen_load *loads[2];
        cachegen_progress p = {};
        p.struct_size = sizeof p;
        engine.poison();
        for (const int i : {0, 1}) {
            const uint32_t n_blocks = i == 0 ? 34 : 6;
            const Tokens some(tokens.begin(), tokens.begin() + 16 * n_blocks);
            ASSERT_EQ(engine.look_up(some).hit_tokens, 16 * n_blocks - 1);
            engine.table.assign(all.begin() + 34 * i, all.begin() + 34 * i + n_blocks);
            ASSERT_EQ(engine.load_start(0, 16 * n_blocks - 1, &loads[i]), CACHEGEN_OK);
        }
        for (int i = 0; i < 5 * round && cachegen_load_poll(loads[1], &p) == CACHEGEN_AGAIN; i++)
            std::this_thread::yield();
        if (round % 2 == 0)
            cachegen_load_free(loads[0]); // cancels it
        ASSERT_EQ(wait_for(engine.c, [&] { return cachegen_load_poll(loads[1], &p); }),
                  CACHEGEN_OK);
        EXPECT_EQ(p.loaded_tokens, 95u);
        EXPECT_EQ(engine.error_of(tokens, 0, 95), 0);
        cachegen_load_free(loads[1]);
        if (round % 2 == 0)
            continue;
        ASSERT_EQ(wait_for(engine.c, [&] { return cachegen_load_poll(loads[0], &p); }),
                  CACHEGEN_OK);
        EXPECT_EQ(p.loaded_tokens, 543u);
        engine.table.assign(all.begin(), all.begin() + 34);
        EXPECT_EQ(engine.error_of(tokens, 0, 543), 0);
        cachegen_load_free(loads[0]);
    }
}

TEST_P(LoadTest, FullStagingMemoryIsAskAgain)
{
    const Store store;
    Engine engine(store, with("\"staging_mib\": 1, \"threads\": 1"));
    engine.prefill(prompt(576));
    int again = 0;
    std::vector<cachegen_save *> saves;
    for (uint32_t seed = 1; seed <= 40;
         seed++) { // 295 KB each, far faster than they are encoded and synced
        cachegen_save *save;
        const cachegen_status status =
            engine.save_start(prompt(576, seed), 0, 576, false, nullptr, 0, &save);
        if (status == CACHEGEN_AGAIN) {
            EXPECT_EQ(save, nullptr);
            again++;
        } else {
            ASSERT_EQ(status, CACHEGEN_OK);
            saves.push_back(save);
        }
    }
    EXPECT_GT(again, 0);
    EXPECT_GE(saves.size(), 3u);
    for (cachegen_save *save : saves)
        EXPECT_EQ(engine.finish(save).status, CACHEGEN_OK);
    EXPECT_EQ(store.chunks("L0").size(), 18 * saves.size());
    EXPECT_EQ(engine.stats().saves_dropped, 0u) << "nothing was taken, so nothing was dropped";
    cachegen_save *save;
    ASSERT_EQ(engine.save_start(prompt(576, 99), 0, 576, false, nullptr, 0, &save), CACHEGEN_OK)
        << "it came back";
    engine.finish(save);
}

// The pool's thread stands still in the first copy, so that nothing is freed.
TEST_P(LoadTest, ASaveThatIsToAskAgainCountsNothing)
{
    const Store store;
    Engine engine(store, with("\"staging_mib\": 1, \"threads\": 1, \"positive_ttl_ms\": 60000"));
    Tokens longer = prompt(64);
    ASSERT_EQ(engine.save(longer), CACHEGEN_OK); // which it remembers
    const Tokens more = prompt(512, 2);
    longer.insert(longer.end(), more.begin(), more.end());
    engine.prefill(longer);
    engine.copies_later = true;
    cachegen_save *saves[3], *refused;
    cachegen_stats before = {}, after = {};
    {
        TouchedPages blocks(engine.memory.data(), engine.memory.size(), true);
        for (uint64_t i = 0; i < 3; i++) // of 288 KiB
            ASSERT_EQ(engine.save_start(prompt(576, 10 + i), 0, 576, false, nullptr, 0, &saves[i]),
                      CACHEGEN_OK);
        before = engine.stats();
        EXPECT_EQ(engine.save_start(longer, 0, 576, true, nullptr, 0, &refused), CACHEGEN_AGAIN);
        after = engine.stats();
        blocks.release();
        for (cachegen_save *save : saves)
            EXPECT_EQ(engine.finish(save).status, CACHEGEN_OK);
    }
    EXPECT_EQ(after.chunks_existed, before.chunks_existed);
    EXPECT_EQ(after.staging_bytes, before.staging_bytes);
    EXPECT_EQ(engine.save(longer), CACHEGEN_OK);
    EXPECT_EQ(engine.stats().chunks_existed, before.chunks_existed + 2);
}

TEST_P(LoadTest, EncodersTakeTheirMemoryFromTheSameBudget)
{
    const Store store(false, wide_spec()); // 4 KiB a token: 256 KiB a chunk
    Engine engine(store, with("\"staging_mib\": 1, \"chunk_tokens\": 64, \"threads\": 4"));
    const Tokens tokens = prompt(64 * 8);
    EXPECT_EQ(engine.save(tokens), CACHEGEN_OK);
    EXPECT_EQ(engine.stats().chunks_saved[0], 3u) << "three copies and one encoder";
    EXPECT_EQ(engine.stats().saves_dropped, 5u);
    EXPECT_EQ(engine.stats().saves_dropped_staging, 5u);
    for (int i = 0; i < 3; i++) { // the rest, from the hole on
        cachegen_save *save;
        const uint32_t from = 64 * 3 * static_cast<uint32_t>(i);
        ASSERT_EQ(engine.save_start(tokens, from, 512, false, nullptr, 0, &save), CACHEGEN_OK);
        const cachegen_progress p = engine.finish(save);
        EXPECT_EQ(p.status, CACHEGEN_OK);
        EXPECT_EQ(p.loaded_tokens, std::min(512u, from + 64 * 3));
    }
    EXPECT_EQ(engine.load(tokens).progress.loaded_tokens, 511u);
    EXPECT_EQ(engine.stats().staging_peak_bytes, 1u << 20);
}

TEST_P(LoadTest, NothingIsSavedBehindAHole)
{
    for (const char *ttl : {"0", "60000"}) {
        const Store store;
        Engine engine(store, with(std::string("\"positive_ttl_ms\": ") + ttl +
                                  ", \"negative_ttl_ms\": " + ttl));
        const Tokens tokens = prompt(32 * 6);
        engine.prefill(tokens);
        const auto save = [&](uint32_t from, uint32_t to) {
            cachegen_save *op;
            EXPECT_EQ(engine.save_start(tokens, from, to, to == 192, "a-context", 0, &op),
                      CACHEGEN_OK);
            return engine.finish(op);
        };
        EXPECT_EQ(save(0, 64).loaded_tokens, 64u);
        const cachegen_progress p = save(96, 160); // 64 to 96 was dropped
        EXPECT_EQ(p.status, CACHEGEN_OK);
        EXPECT_EQ(p.loaded_tokens, 96u) << "as far as it was saved before";
        EXPECT_EQ(save(160, 192).loaded_tokens, 160u);
        EXPECT_EQ(store.chunks("L0").size(), 2u);
        EXPECT_EQ(engine.stats().saves_dropped, 3u);
        EXPECT_EQ(engine.stats().saves_dropped_unreachable, 3u);
        EXPECT_EQ(engine.stats().save_errors, 0u) << "nor is the name's context longer";
        EXPECT_EQ(save(64, 192).loaded_tokens, 192u) << "from the hole on";
        EXPECT_EQ(store.chunks("L0").size(), 6u);
        EXPECT_EQ(engine.load(tokens).progress.loaded_tokens, 191u);
    }
}

TEST_P(LoadTest, AChunkThatTheStoreSaysNothingOfIsNoHole)
{
    const Store store;
    Engine engine(store, with());
    const Tokens tokens = prompt(128);
    engine.prefill(tokens);
    EXPECT_EQ(engine.save_part(tokens, 0, 64).loaded_tokens, 64u);
    const cg_key second = key_of(root_of(store), tokens, 1);
    char object[CG_TREE_PATH_BYTES];
    ASSERT_EQ(cg_tree_object_path("m", &second, CG_L0, nullptr, object, sizeof object), CG_OK);
    const std::string path = store.dir.path + "/" + object;
    std::filesystem::rename(path, path + ".aside");
    std::filesystem::create_symlink("elsewhere", path); // an error for root, too
    EXPECT_EQ(engine.save_part(tokens, 64, 128).loaded_tokens, 128u);
    EXPECT_EQ(engine.stats().saves_dropped_unreachable, 0u);
    std::filesystem::rename(path + ".aside", path);
    EXPECT_EQ(engine.load(tokens).progress.loaded_tokens, 127u);
    EXPECT_EQ(engine.error_of(tokens, 0, 127), 0);
}

TEST_P(LoadTest, NothingIsSavedBehindAChunkThatALoadHasFoundToBeGone)
{
    const Store store;
    Engine engine(store, with("\"positive_ttl_ms\": 60000"));
    const Tokens tokens = prompt(32 * 4);
    engine.prefill(tokens);
    EXPECT_EQ(engine.save_part(tokens, 0, 64).loaded_tokens, 64u);
    const cg_key second = key_of(root_of(store), tokens, 1);
    char path[CG_TREE_PATH_BYTES];
    ASSERT_EQ(cg_tree_object_path("m", &second, CG_L0, nullptr, path, sizeof path), CG_OK);
    std::filesystem::remove(store.dir.path + "/" + path);
    ASSERT_EQ(engine.load(tokens).progress.loaded_tokens, 32u) << "that it was there is remembered";
    engine.prefill(tokens);
    EXPECT_EQ(engine.save_part(tokens, 64, 128).loaded_tokens, 64u);
    EXPECT_EQ(engine.stats().saves_dropped_unreachable, 2u);
    EXPECT_EQ(store.chunks("L0").size(), 1u);
}

TEST_P(LoadTest, AContextStaysWholeWhereAChunkOfItCannotBeReadForAMoment)
{
    const Store store;
    Engine engine(store, with(""));
    const Tokens tokens = prompt(32 * 5);
    ASSERT_EQ(engine.save(tokens, "a-context"), CACHEGEN_OK);
    const std::string at = "m/contexts/a-context/", json = store.dir.read_text(at + "context.json");
    char object[CG_TREE_PATH_BYTES];
    const cg_key key = key_of(root_of(store), tokens, 3);
    ASSERT_EQ(cg_tree_object_path("m", &key, CG_L0, nullptr, object, sizeof object), CG_OK);
    const std::string path = store.dir.path + "/" + object;
    std::filesystem::rename(path, path + ".aside");
    std::filesystem::create_symlink("elsewhere", path); // an error for root, too
    EXPECT_EQ(engine.save(tokens, "a-context"), CACHEGEN_ERR_IO);
    EXPECT_EQ(engine.stats().save_errors, 1u);
    EXPECT_EQ(store.dir.read_text(at + "context.json"), json);
    EXPECT_EQ(store.dir.files(at + "L0").size(), 5u);
    EXPECT_EQ(store.dir.read(at + "tokens").size(), 4 * tokens.size());
    std::filesystem::rename(path + ".aside", path);
    EXPECT_EQ(engine.save(tokens, "a-context"), CACHEGEN_OK);
    EXPECT_EQ(store.dir.read_text(at + "context.json"), json);
}

INSTANTIATE_TEST_SUITE_P(Backends, LoadTest, testing::Values("io_uring", "threads"),
                         [](const auto &chosen) {
                             return std::string(chosen.param) == "io_uring" ? "uring" : "threads";
                         });

} // namespace
