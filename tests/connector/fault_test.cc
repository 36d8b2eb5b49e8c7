// Faults in the middle of loads: whatever happens to the store, or to memory, a load ends, and what
// it says it has loaded is, byte for byte, what a chunk's file decodes to at one of its levels.
//
// Forty cases; CG_FAULT_CASES=1000 asks for more, CG_FAULT_SEED=n for those from n on. A case is
// wholly of its seed, but for which of two threads is faster.
#include "tests/connector/engine.h"
#include "tests/connector/watch.h"
#include "tests/iouring/require.h"
#ifdef CG_TEST_HAS_FUSE
#include "tests/iouring/odd_fs.h"
#endif

#include <sys/mman.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>

// ---- memory that is refused: to the connector, not to what the tests link as shared libraries
// ----

static std::atomic<long> n_until_refusal{-1}; // -1: never
static std::atomic<bool> goes_on_refusing{false}, was_refused{false};

static bool is_refused()
{
    long n = n_until_refusal;
    while (n >= 0 && !(n == 0 && goes_on_refusing) &&
           !n_until_refusal.compare_exchange_weak(n, n - 1))
        ;
    if (n == 0)
        was_refused = true;
    return n == 0;
}

extern "C" {
void *__real_malloc(size_t n_bytes);
void *__real_calloc(size_t n, size_t n_bytes);
void *__real_aligned_alloc(size_t align, size_t n_bytes);
void *__real_mmap(void *at, size_t n_bytes, int protection, int flags, int fd, off_t offset);
void *__wrap_malloc(size_t n_bytes)
{
    return is_refused() ? nullptr : __real_malloc(n_bytes);
}
void *__wrap_calloc(size_t n, size_t n_bytes)
{
    return is_refused() ? nullptr : __real_calloc(n, n_bytes);
}
void *__wrap_aligned_alloc(size_t align, size_t n_bytes)
{
    return is_refused() ? nullptr : __real_aligned_alloc(align, n_bytes);
}
void *__wrap_mmap(void *at, size_t n_bytes, int protection, int flags, int fd, off_t offset)
{
    return is_refused() ? MAP_FAILED : __real_mmap(at, n_bytes, protection, flags, fd, offset);
}
}

namespace
{

using namespace cg_test;

// Refuses the n-th allocation from now on, and all that follow or not.
void refuse_memory(long n, bool goes_on)
{
    was_refused = false;
    goes_on_refusing = goes_on;
    n_until_refusal = n;
}
// True: some was refused.
bool allow_memory()
{
    n_until_refusal = -1;
    return was_refused;
}

// Of a tensor-parallel engine: whatever memory the rank that sends its heads lacks, the one that
// stores them is not left to wait for it, and their numbers agree afterwards.
TEST(SenderFaultTest, WhicheverAllocationFailsTheOtherRankWaitsForNothing)
{
    const Store store;
    const Tokens tokens = prompt(64);
    for (const bool goes_on : {false, true})
        for (const bool copies_later : {false, true}) {
            long n = 0;
            for (bool refused = true; refused && !HasFailure(); n++) {
                SCOPED_TRACE(testing::Message() << "allocation " << n << ", goes on: " << goes_on
                                                << ", copied later: " << copies_later);
                const std::string group = "\"group\": \"fault-" + std::to_string(getpid()) +
                                          "\", \"threads\": 1, \"save_timeout_ms\": 60000";
                Engine storing(store, group, {0, 1}), sending(store, group, {1, 1});
                sending.copies_later = copies_later;
                cachegen_save *sent = nullptr, *stored = nullptr;
                sending.prefill(tokens);
                refuse_memory(n, goes_on);
                const cachegen_status begun =
                    sending.save_start(tokens, 0, 64, true, nullptr, 0, &sent);
                if (begun == CACHEGEN_OK)
                    sending.finish(sent);
                refused = allow_memory();
                EXPECT_TRUE(begun == CACHEGEN_OK || begun == CACHEGEN_ERR_NO_MEMORY) << begun;
                storing.prefill(tokens);
                ASSERT_EQ(storing.save_start(tokens, 0, 64, true, nullptr, 0, &stored),
                          CACHEGEN_OK);
                EXPECT_EQ(storing.finish(stored).status,
                          begun == CACHEGEN_OK ? CACHEGEN_OK : CACHEGEN_ERR_CANCELLED);
                EXPECT_EQ(sending.save_start(tokens, 0, 64, true, nullptr, 0, &sent), CACHEGEN_OK);
                ASSERT_EQ(storing.save_start(tokens, 0, 64, true, nullptr, 0, &stored),
                          CACHEGEN_OK);
                sending.finish(sent);
                EXPECT_EQ(storing.finish(stored).status, CACHEGEN_OK) << "the next";
            }
            EXPECT_GT(n, 4) << "allocations are not refused";
        }
}

// The copies' memory comes back however far a save comes.
TEST(SaveFaultTest, WhicheverAllocationFailsNoStagingMemoryStaysTaken)
{
    constexpr long STEP = SEES_RACES ? 5 : 1; // then each takes seconds
    const Store store;
    const Tokens tokens = prompt(96);
    for (const bool goes_on : {false, true})
        for (const bool copies_later : {false, true}) {
            long n = 0;
            for (bool refused = true; refused && !HasFailure(); n += STEP) {
                SCOPED_TRACE(testing::Message() << "allocation " << n << ", goes on: " << goes_on
                                                << ", copied later: " << copies_later);
                Engine engine(store, "\"threads\": 1");
                const Tokens other = prompt(96, static_cast<uint64_t>(n) + 2);
                engine.copies_later = copies_later;
                engine.prefill(other);
                cachegen_save *save = nullptr;
                refuse_memory(n, goes_on);
                const cachegen_status begun =
                    engine.save_start(other, 0, 96, true, "name", 0, &save);
                if (begun == CACHEGEN_OK)
                    engine.finish(save);
                refused = allow_memory();
                EXPECT_TRUE(begun == CACHEGEN_OK || begun == CACHEGEN_ERR_NO_MEMORY) << begun;
                EXPECT_EQ(engine.stats().staging_bytes, 0u);
                EXPECT_EQ(engine.save(tokens), CACHEGEN_OK);
            }
            EXPECT_GT(n, 8) << "allocations are not refused";
        }
}

#ifndef CG_TEST_HAS_FUSE
TEST(FaultTest, IsNotTested)
{
    CG_SKIP_OR_FAIL("fuse", "built without libfuse 3: faults in mid-load are not tested");
}
#else

enum Fault {
    SERVER_GONE, // each call is an error, as after the server was killed
    LINK_CUT,    // nothing is answered
    LINK_SLOW,   // files open, and their bytes do not come in time
    EIO_SOON_GOOD,
    DAMAGED,   // a byte of a chunk's file, between look-up and load
    TRUNCATED, // the file
    REMOVED,   // the file
    STORE_FULL,
    FEW_RESOURCES, // one read at a time, and none to be abandoned
    NO_MEMORY,     // every allocation fails, or just one
    N_FAULTS
};

constexpr uint32_t CHUNK = 64, N_TOKENS = 512;

uint64_t from_environment(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text != nullptr ? strtoull(text, nullptr, 10) : otherwise;
}

class FaultTest : public testing::Test
{
  protected:
    FaultTest() : store(true, wide()), tokens(prompt(N_TOKENS))
    {
    }
    static ProfileSpec wide()
    {
        ProfileSpec spec = nesting_spec();
        spec.n_kv_heads = 8;
        return spec;
    }
    static std::string chunked(const std::string &more = "")
    {
        return "\"chunk_tokens\": " + std::to_string(CHUNK) + more;
    }
    void SetUp() override
    {
        odd = std::make_unique<OddFs>(store.dir.path, mount.path, /*is_far=*/true);
        if (!odd->why().empty())
            CG_SKIP_OR_FAIL("fuse", odd->why() << ": faults in mid-load are not tested");
        Engine near(store, chunked());
        ASSERT_EQ(near.save(tokens), CACHEGEN_OK);
        for (uint32_t level = CG_L1; level < CG_N_LEVELS; level++) {
            near.level_plus_1 = level + 1;
            ASSERT_EQ(near.load(tokens).progress.loaded_tokens, N_TOKENS - 1);
            decoded[level] = near.memory;
        }
    }
    // Whether tokens [from, to) are what one level decodes to.
    bool is_of_a_level(Engine *engine, uint32_t from, uint32_t to) const
    {
        for (uint32_t level = CG_L1; level < CG_N_LEVELS; level++) {
            bool same = true;
            engine->for_each(
                from, to, [&](uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint8_t *at) {
                    const ptrdiff_t offset = at - engine->memory.data();
                    same = same && memcmp(at, &decoded[level][static_cast<size_t>(offset)],
                                          engine->element_bytes()) == 0;
                });
            if (same)
                return true;
        }
        return false;
    }
    void check_blocks(Engine *engine, const Load &load, uint32_t end)
    {
        ASSERT_LE(load.progress.loaded_tokens, load.hit.hit_tokens);
        for (uint32_t from = 0; from < load.progress.loaded_tokens; from += CHUNK)
            EXPECT_TRUE(
                is_of_a_level(engine, from, std::min(from + CHUNK, load.progress.loaded_tokens)))
                << "tokens from " << from;
        const uint32_t n_all = Engine::N_BLOCKS * Engine::BLOCK_TOKENS;
        EXPECT_TRUE(engine->is_untouched(
            (end + Engine::BLOCK_TOKENS - 1) / Engine::BLOCK_TOKENS * Engine::BLOCK_TOKENS, n_all))
            << "blocks of others";
    }

    // What a fault does to a chunk's file; undone by putting its bytes back.
    void harm(Fault fault, const std::string &path)
    {
        std::string bytes = contents(path);
        if (fault == REMOVED) {
            std::filesystem::remove(path);
            return;
        }
        if (fault == DAMAGED)
            bytes[random() % bytes.size()] ^= static_cast<char>(1 + random() % 255);
        else
            bytes.resize(random() % bytes.size());
        put(path, bytes);
    }
    static std::string contents(const std::string &path)
    {
        std::ifstream in(path, std::ios::binary);
        return {std::istreambuf_iterator<char>(in), {}};
    }
    static void put(const std::string &path, const std::string &bytes)
    {
        std::ofstream(path, std::ios::binary) << bytes;
    }

    std::string config_of(Fault fault)
    {
        std::string more = ", \"read_timeout_ms\": 200, \"ttft_budget_ms\": " +
                           std::to_string(50 + random() % 300) +
                           ", \"save_timeout_ms\": 300, \"close_timeout_ms\": 500";
        if (random() % 3 == 0)
            more += ", \"io_backend\": \"threads\"";
        if (fault == FEW_RESOURCES)
            more += ", \"queue_depth\": 1, \"max_abandoned_reads\": 1, \"staging_mib\": 1";
        return chunked(more);
    }
    static Mood mood_of(Fault fault)
    {
        switch (fault) {
        case SERVER_GONE:
        case EIO_SOON_GOOD: return Mood::GONE;
        case LINK_CUT: return Mood::HANGING;
        case LINK_SLOW: return Mood::TRICKLING;
        case STORE_FULL: return Mood::FULL;
        default: return Mood::GOOD;
        }
    }
    // Strikes when the store has been asked so many times more, or the load has ended.
    void strike(Fault fault, uint32_t n_calls, cachegen_load *load, Load *l)
    {
        const int until = odd->n_calls() + static_cast<int>(n_calls);
        EXPECT_TRUE(comes_true([&] {
            return odd->n_calls() >= until ||
                   cachegen_load_poll(load, &l->progress) != CACHEGEN_AGAIN;
        }));
        odd->set_mood(mood_of(fault));
        if (fault == NO_MEMORY) {
            const long n = static_cast<long>(random() % 30);
            refuse_memory(n, random() % 2 == 0);
        }
        if (fault == EIO_SOON_GOOD)
            odd->set_mood(Mood::GOOD);
    }

    void run(uint64_t seed)
    {
        random.seed(seed);
        const Fault fault = static_cast<Fault>(random() % N_FAULTS);
        SCOPED_TRACE(testing::Message() << "seed " << seed << ", fault " << fault);
        const uint32_t n = 2 * Engine::BLOCK_TOKENS + random() % (N_TOKENS - 64);
        const Tokens request(tokens.begin(), tokens.begin() + n);
        const std::vector<std::string> files = store.chunks("L1");
        const std::string path = store.dir.path + "/" + files[random() % files.size()];
        const std::string before = contents(path);
        // To half of them the store is far, so that files stay open.
        odd->set_mood(random() % 2 == 0 ? Mood::SLOW : Mood::GOOD);
        auto engine = std::make_unique<Engine>(mount.path, store.spec, config_of(fault));
        odd->set_mood(Mood::GOOD);
        ASSERT_EQ(engine->open_status, CACHEGEN_OK) << engine->error;
        Load l;
        l.progress.struct_size = sizeof l.progress;
        l.hit = engine->look_up(request);
        if (fault == DAMAGED || fault == TRUNCATED || fault == REMOVED)
            harm(fault, path);
        engine->poison();
        cachegen_load *load;
        ASSERT_EQ(engine->load_start(0, l.hit.hit_tokens, &load), CACHEGEN_OK);
        strike(fault, random() % 40, load, &l);
        ASSERT_EQ(wait_for(engine->c, [&] { return cachegen_load_poll(load, &l.progress); }),
                  CACHEGEN_OK)
            << "a load does not end";
        allow_memory();
        check_blocks(engine.get(), l, n);
        cachegen_load_free(load);
        const std::vector<uint8_t> after = engine->memory;
        if (fault == STORE_FULL)
            save_into_full(engine.get());
        odd->set_mood(Mood::GOOD);
        if (fault != STORE_FULL) {
            EXPECT_EQ(after, engine->memory) << "written to after the load had ended";
        }
        engine.reset();
        put(path, before);
        expect_all_is_well(request);
    }
    static void save_into_full(Engine *engine)
    {
        const Tokens other = prompt(CHUNK * 2, 99);
        EXPECT_NE(engine->save(other), CACHEGEN_OK);
        EXPECT_EQ(engine->look_up(other).stored_tokens, 0u);
    }
    // After the fault the store is as good as before.
    void expect_all_is_well(const Tokens &request)
    {
        Engine engine(store, chunked(", \"ttft_budget_ms\": 60000"));
        const Load l = engine.load(request);
        EXPECT_EQ(l.progress.loaded_tokens, l.hit.hit_tokens);
        check_blocks(&engine, l, static_cast<uint32_t>(request.size()));
    }

    const Store store;
    const Tokens tokens;
    const TempDir mount;
    std::unique_ptr<OddFs> odd;
    std::vector<uint8_t> decoded[CG_N_LEVELS];
    std::mt19937_64 random;
};

TEST_F(FaultTest, EveryByteOfALoadIsRightWhateverHappens)
{
    const uint64_t first = from_environment("CG_FAULT_SEED", 1);
    const uint64_t n_cases = from_environment("CG_FAULT_CASES", 40);
    for (uint64_t seed = first; seed < first + n_cases && !HasFailure(); seed++)
        run(seed);
}

TEST_F(FaultTest, WhicheverAllocationFailsALoadEndsAndTheNextIsWhole)
{
    constexpr long STEP = SEES_RACES ? 3 : 1; // then each takes seconds
    for (const bool goes_on : {false, true}) {
        long n = goes_on ? STEP - 1 : 0;
        for (bool refused = true; refused && !HasFailure(); n += STEP) {
            SCOPED_TRACE(testing::Message() << "allocation " << n << ", goes on: " << goes_on);
            Engine engine(store, chunked(", \"threads\": 2, \"ttft_budget_ms\": 600000, "
                                         "\"lookup_timeout_ms\": 600000"));
            Load l;
            l.progress.struct_size = sizeof l.progress;
            l.hit = engine.look_up(tokens);
            engine.poison();
            cachegen_load *load = nullptr;
            refuse_memory(n, goes_on);
            const cachegen_status begun = engine.load_start(0, l.hit.hit_tokens, &load);
            if (begun == CACHEGEN_OK) {
                ASSERT_EQ(wait_for(engine.c, [&] { return cachegen_load_poll(load, &l.progress); }),
                          CACHEGEN_OK)
                    << "a load does not end";
            }
            refused = allow_memory();
            check_blocks(&engine, l, N_TOKENS);
            if (!refused) {
                EXPECT_EQ(l.progress.loaded_tokens, N_TOKENS - 1);
            } else if (begun != CACHEGEN_OK) {
                EXPECT_EQ(begun, CG_ERR_NO_MEMORY);
            } else if (l.progress.loaded_tokens < N_TOKENS - 1) {
                EXPECT_EQ(l.progress.status, CG_ERR_NO_MEMORY);
            }
            cachegen_load_free(load);
            EXPECT_EQ(engine.load(tokens).progress.loaded_tokens, N_TOKENS - 1);
        }
        EXPECT_GT(n, 8) << "allocations are not refused";
    }
}
#endif

} // namespace
