// How many questions a connector asks a store that is a network away, and how many of them it waits
// for one after the other. A file system in user space counts them: no time is measured.
#include "connector/asking.h"
#include "tests/connector/engine.h"
#include "tests/connector/watch.h"
#include "tests/iouring/require.h"
#ifdef CG_TEST_HAS_FUSE
#include "tests/iouring/odd_fs.h"
#endif

#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <numeric>
#include <thread>

namespace
{

using namespace cg_test;

TEST(AskingTest, IsAsWideAsAnswersComeInFewRoundTrips)
{
    constexpr uint64_t ROUND_TRIP = 100000000, FAST = 6 * ROUND_TRIP, SLOW = 10 * ROUND_TRIP;
    uint64_t now_ns = 1;
    cg_asking_width width = {CG_ASKING_LEAST, 0, 0};
    const auto learn = [&](uint32_t n_chunks, uint64_t took_ns) {
        cg_asking_learn(&width, n_chunks, took_ns, ROUND_TRIP, now_ns);
        return width.n_chunks;
    };
    EXPECT_EQ(learn(8, FAST), 32u) << "of so few it says nothing";
    EXPECT_EQ(learn(19, FAST), 128u);
    EXPECT_EQ(learn(120, FAST), 512u);
    EXPECT_EQ(learn(512, FAST), CG_ASKING_MOST);
    EXPECT_EQ(learn(CG_ASKING_MOST, FAST), CG_ASKING_MOST);
    EXPECT_EQ(learn(100, SLOW), 50u);
    EXPECT_EQ(learn(50, FAST), 58u) << "with care";
    EXPECT_EQ(learn(512, SLOW), 58u) << "one long prompt's time says nothing of less";
    EXPECT_EQ(learn(19, SLOW), CG_ASKING_LEAST);
    EXPECT_EQ(learn(UINT32_MAX, 0), CG_ASKING_LEAST + 8);
    now_ns = width.slow_until_ns;
    EXPECT_EQ(learn(40, FAST), 160u) << "what was slow need not be so for ever";
}

TEST(AskingTest, ThatAStoreIsSlowIsBelievedForAMinuteAndLongerEachTimeThatItTurnsOutSo)
{
    constexpr uint64_t ROUND_TRIP = 100000000, SLOW = 10 * ROUND_TRIP, MINUTE = 60000000000;
    cg_asking_width width = {CG_ASKING_LEAST, 0, 0};
    uint64_t now_ns = 1;
    const auto learn = [&](uint64_t took_ns) {
        cg_asking_learn(&width, 100, took_ns, ROUND_TRIP, now_ns);
        return width.slow_until_ns - now_ns;
    };
    EXPECT_EQ(learn(SLOW), MINUTE);
    now_ns += MINUTE / 2;
    EXPECT_EQ(learn(SLOW), MINUTE) << "the same time still";
    for (const uint64_t minutes : {2, 4, 8, 16, 32, 60, 60}) {
        now_ns = width.slow_until_ns;
        EXPECT_EQ(learn(SLOW), minutes * MINUTE);
    }
    now_ns = width.slow_until_ns;
    learn(0);
    EXPECT_LE(width.slow_until_ns, now_ns);
    now_ns++;
    EXPECT_EQ(learn(SLOW), MINUTE) << "it was fast in between";
}

#ifndef CG_TEST_HAS_FUSE
TEST(FarStoreTest, IsNotTested)
{
    CG_SKIP_OR_FAIL("fuse", "built without libfuse 3: questions to far stores are not counted");
}
#else

constexpr uint32_t CHUNK = 32;
// Nothing is given up because a machine is busy.
const char *const PATIENT = "\"lookup_timeout_ms\": 60000, \"ttft_budget_ms\": 600000";

struct Cost {
    int n_calls, n_rounds;
};

class FarStoreTest : public testing::Test
{
  protected:
    void SetUp() override
    {
        char reason[256];
        if (!cg_io_uring_reason(reason, sizeof reason))
            CG_SKIP_OR_FAIL("uring", "no io_uring here (" << reason << ")");
        odd = std::make_unique<OddFs>(store.dir.path, mount.path, /*is_far=*/true);
        if (!odd->why().empty())
            CG_SKIP_OR_FAIL("fuse", odd->why() << ": questions to far stores are not counted");
        far = std::make_unique<Engine>(mount.path, store.spec, PATIENT);
    }
    void TearDown() override
    {
        far.reset();
    }
    // Saves a prompt past the mount. Its blocks are the cache's, over and over: their content does
    // not matter.
    void save(const Tokens &tokens)
    {
        Engine near(store);
        near.table = blocks(near, tokens);
        cachegen_save *op;
        ASSERT_EQ(
            near.save_start(tokens, 0, static_cast<uint32_t>(tokens.size()), true, nullptr, 0, &op),
            CACHEGEN_OK);
        ASSERT_EQ(near.finish(op).status, CACHEGEN_OK);
    }
    static std::vector<int64_t> blocks(const Engine &engine, const Tokens &tokens)
    {
        std::vector<int64_t> table;
        for (size_t i = 0; i < tokens.size() / Engine::BLOCK_TOKENS + 1; i++)
            table.push_back(engine.table[i % engine.table.size()]);
        return table;
    }
    template <typename Call> Cost cost_of(Call call)
    {
        const Cost before = {odd->n_calls(), odd->n_rounds()};
        odd->set_mood(Mood::IN_ROUNDS);
        call();
        odd->set_mood(Mood::GOOD);
        return {odd->n_calls() - before.n_calls, odd->n_rounds() - before.n_rounds};
    }

    // A round ends when no more calls come for a moment. On a busy machine calls of one round may
    // come so late that they seem to be the next: then a new connector asks again.
    Cost least_rounds(int most, const std::function<void()> &look_up)
    {
        Cost cost = cost_of(look_up);
        for (int i = 0; i < 9 && cost.n_rounds > most; i++) {
            far.reset();
            far = std::make_unique<Engine>(mount.path, store.spec, PATIENT);
            cost = cost_of(look_up);
        }
        return cost;
    }

    const Store store{true};
    const TempDir mount;
    std::unique_ptr<OddFs> odd;
    std::unique_ptr<Engine> far;
};

TEST_F(FarStoreTest, ALongPromptTakesTenRoundTripsAndAFewQuestionsAChunk)
{
    const Tokens tokens = prompt(CHUNK * 512);
    save(tokens);
    cachegen_hit hit;
    const Cost cost = least_rounds(10, [&] { hit = far->look_up(tokens); });
    EXPECT_EQ(hit.stored_tokens, CHUNK * 512 - 1);
    EXPECT_LE(cost.n_rounds, 10);
    EXPECT_LE(cost.n_calls, 512 * 6 + 20);
    RecordProperty("rounds", cost.n_rounds);
    RecordProperty("calls", cost.n_calls);
}

// What look-ups that are started together find, in stored tokens.
std::vector<uint32_t> look_up_at_once(const Engine &engine,
                                      const std::vector<cachegen_request> &requests)
{
    std::vector<cachegen_lookup *> lookups(requests.size());
    std::vector<uint32_t> found;
    for (size_t i = 0; i < requests.size(); i++)
        EXPECT_EQ(cachegen_lookup_start(engine.c, &requests[i], 0, &lookups[i]), CACHEGEN_OK);
    for (cachegen_lookup *lookup : lookups) {
        cachegen_hit hit = {};
        hit.struct_size = sizeof hit;
        EXPECT_EQ(wait_for(engine.c, [&] { return cachegen_lookup_poll(lookup, &hit); }),
                  CACHEGEN_OK);
        found.push_back(hit.stored_tokens);
        cachegen_lookup_free(lookup);
    }
    return found;
}

TEST_F(FarStoreTest, WhatIsComputedSoonerThanItAnswersIsNotLoaded)
{
    const Tokens tokens = prompt(CHUNK * 2);
    save(tokens);
    EXPECT_EQ(far->look_up(tokens).hit_tokens, CHUNK * 2 - 1) << "it is not known how soon";
    for (const char *prior : {"", ", \"prior_mbps\": 1000000"}) {
        SCOPED_TRACE(prior);
        Engine engine(mount.path, store.spec,
                      std::string(PATIENT) + ", \"policy\": \"min_delay\"" + prior);
        cachegen_report_prefill(engine.c, 1000000, 1000000);
        const cachegen_hit hit = engine.look_up(tokens);
        EXPECT_EQ(hit.stored_tokens, CHUNK * 2 - 1);
        EXPECT_EQ(hit.hit_tokens, 0u);
    }
}

// That it was slow when it was opened counts no longer than until it is asked again.
TEST_F(FarStoreTest, HowSoonItAnswersIsMeasuredAgain)
{
    const Tokens tokens = prompt(CHUNK * 2);
    save(tokens);
    odd->set_mood(Mood::SLOW);
    Engine engine(mount.path, store.spec,
                  std::string(PATIENT) + ", \"policy\": \"min_delay\", \"prior_mbps\": 1000000, "
                                         "\"positive_ttl_ms\": 1");
    cachegen_report_prefill(engine.c, CHUNK * 2, 4000000); // in 4 ms; it answers in 5
    EXPECT_EQ(engine.look_up(tokens).hit_tokens, 0u);
    odd->set_mood(Mood::GOOD);
    uint32_t hit_tokens = 0;
    for (int i = 0; i < 6000 && hit_tokens == 0; i++) {
        hit_tokens = engine.look_up(tokens).hit_tokens;
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    EXPECT_EQ(hit_tokens, CHUNK * 2 - 1);
}

// The first may be asked alone, before the others have come.
TEST_F(FarStoreTest, LookUpsAtOnceShareRounds)
{
    std::vector<Tokens> prompts;
    for (uint64_t seed = 1; seed <= 16; seed++) {
        prompts.push_back(prompt(CHUNK * 2, seed));
        save(prompts.back());
    }
    const auto look_up = [&](size_t n) {
        std::vector<cachegen_request> requests;
        for (size_t i = 0; i < n; i++)
            requests.push_back(far->request(prompts[i]));
        EXPECT_EQ(look_up_at_once(*far, requests), std::vector<uint32_t>(n, CHUNK * 2 - 1));
    };
    const Cost one = least_rounds(7, [&] { look_up(1); });
    const Cost all = least_rounds(2 * one.n_rounds, [&] { look_up(16); });
    EXPECT_LE(all.n_rounds, 2 * one.n_rounds);
    RecordProperty("rounds_of_one", one.n_rounds);
    RecordProperty("rounds_of_all", all.n_rounds);
}

// Nothing is remembered here. The kernel keeps names, so the first look-up costs more than others.
TEST_F(FarStoreTest, AChunkThatSeveralLookUpsWantIsAskedForOnce)
{
    const Tokens tokens = prompt(CHUNK * 8);
    save(tokens);
    EXPECT_EQ(far->look_up(tokens).stored_tokens, CHUNK * 8 - 1);
    const Cost one = cost_of([&] { far->look_up(tokens); });
    // On a busy machine they may come one by one: then once more.
    Cost all = {99 * one.n_calls, 0};
    for (int i = 0; i < 10 && all.n_calls > 3 * one.n_calls; i++)
        all = cost_of([&] {
            const std::vector<cachegen_request> requests(16, far->request(tokens));
            EXPECT_EQ(look_up_at_once(*far, requests), std::vector<uint32_t>(16, CHUNK * 8 - 1));
        });
    RecordProperty("calls_of_one", one.n_calls);
    RecordProperty("calls_of_all", all.n_calls);
    EXPECT_GT(one.n_calls, 0);
    EXPECT_LE(all.n_calls, 3 * one.n_calls);
}

// Short prompts and long ones, with tails, holes and levels of their own.
TEST_F(FarStoreTest, LookUpsAtOnceFindWhatEachFindsAlone)
{
    const Tokens base = prompt(CHUNK * 44);
    const auto start_of = [&](uint32_t n_tokens, uint32_t n_other, uint64_t seed) {
        Tokens tokens(base.begin(), base.begin() + n_tokens);
        const Tokens more = prompt(n_other + 1, seed);
        tokens.insert(tokens.end(), more.begin(), more.begin() + n_other);
        return tokens;
    };
    save(start_of(CHUNK * 40 + 8, 0, 1));
    std::vector<Tokens> prompts;
    for (uint32_t i = 0; i < 20; i++) {
        prompts.push_back(start_of(CHUNK * 5 * i % (CHUNK * 43) + i % 3 * 8, i * 67 % 900 + 1, i));
        if (i % 4 == 3)
            save(Tokens(prompts.back().begin(), prompts.back().end() - 1));
    }
    std::vector<cachegen_request> requests;
    for (size_t i = 0; i < prompts.size(); i++) {
        requests.push_back(far->request(prompts[i]));
        requests.back().worst_level_plus_1 = i % 5 == 0 ? 1 : 0;
        requests.back().level_plus_1 = i % 5 == 1 ? CG_L2 + 1 : 0;
    }
    std::vector<uint32_t> alone;
    for (const cachegen_request &request : requests)
        alone.push_back(look_up_at_once(*far, {request})[0]);
    EXPECT_GT(std::accumulate(alone.begin(), alone.end(), 0u), 20u * CHUNK);
    odd->set_mood(Mood::SLOW); // so that they are many at once
    EXPECT_EQ(look_up_at_once(*far, requests), alone);
    EXPECT_EQ(far->stats().lookup_errors, 0u);
}

int n_rings()
{
    int n = 0;
    for (const auto &entry : std::filesystem::directory_iterator("/proc/self/fd")) {
        std::error_code gone; // as the one that lists them
        n += std::filesystem::read_symlink(entry, gone) == "anon_inode:[io_uring]";
    }
    return n;
}

TEST_F(FarStoreTest, AMountOfCachegenfsOnThisHostIsLookedUpByThreads)
{
    const Tokens tokens = prompt(CHUNK * 4);
    save(tokens);
    const struct {
        const char *type, *config;
        int n_rings;
    } cases[] = {{"cachegenfs", "", 0},
                 {"cachegenfs", ", \"io_backend\": \"io_uring\"", 1},
                 {"cachegenfs2", "", 1},
                 {"sshfs", "", 1}};
    for (const auto &c : cases) {
        const TempDir at;
        const OddFs fs(store.dir.path, at.path, false, false, c.type);
        ASSERT_EQ(fs.why(), "");
        // On a busy machine the answer at the opening may take as long as of a far store. Of that
        // one the reader has a ring from the start, too.
        int n_new = -1;
        for (int tries = 0; tries < 20 && n_new != c.n_rings; tries++) {
            Engine engine(at.path, store.spec,
                          "\"lookup_timeout_ms\": 60000" + std::string(c.config));
            const int before = n_rings();
            EXPECT_EQ(engine.look_up(tokens).stored_tokens, CHUNK * 4 - 1) << c.type;
            n_new = n_rings() - before;
        }
        EXPECT_EQ(n_new, c.n_rings) << c.type << c.config;
    }
}

ProfileSpec wide_spec()
{
    ProfileSpec spec = nesting_spec();
    spec.n_kv_heads = 16;
    return spec;
}

// A store whose chunks are large enough to be read in ranges, and where an opening is a question.
struct Wide {
    cachegen_status save(const Tokens &tokens) const
    {
        Engine near(store, "\"chunk_tokens\": 128");
        return near.save(tokens);
    }
    const Store store{true, wide_spec()};
    const TempDir mount;
    OddFs odd{store.dir.path, mount.path, /*is_far=*/true};
};

TEST_F(FarStoreTest, ALoadOfOneLevelOpensAChunkOnceAndMovesItsBytesOnce)
{
    Wide wide;
    ASSERT_EQ(wide.odd.why(), "");
    const Tokens tokens = prompt(640);
    ASSERT_EQ(wide.save(tokens), CACHEGEN_OK);
    for (const uint32_t level : {CG_L3, CG_L1}) {
        Engine engine(wide.mount.path, wide.store.spec,
                      "\"chunk_tokens\": 128, \"lookup_timeout_ms\": 60000");
        engine.level_plus_1 = level + 1;
        ASSERT_EQ(engine.look_up(tokens).n_chunks, 5u);
        const size_t n_asked = wide.odd.n_asked();
        const int n_opens = wide.odd.n_opens();
        cachegen_load *op;
        cachegen_progress p = {};
        p.struct_size = sizeof p;
        ASSERT_EQ(engine.load_start(0, 639, &op), CACHEGEN_OK);
        wait_for(engine.c, [&] { return cachegen_load_poll(op, &p); });
        cachegen_load_free(op);
        EXPECT_EQ(p.loaded_tokens, 639u);
        EXPECT_EQ(wide.odd.n_opens() - n_opens, 5);
        EXPECT_GT(p.bytes_read, 5u * 16384) << "or a page of the cache counts too much";
        EXPECT_LE(wide.odd.n_asked() - n_asked, p.bytes_read + size_t{5} * 4096) << level;
    }
}

// The reader is there since the first load, and leaves when the connector closes.
TEST_F(FarStoreTest, LookUpAndLoadOpenAChunkOnceAndLeaveNothingOpen)
{
    Wide wide;
    ASSERT_EQ(wide.odd.why(), "");
    const Tokens first = prompt(640), tokens = prompt(640, 2);
    ASSERT_EQ(wide.save(first), CACHEGEN_OK);
    ASSERT_EQ(wide.save(tokens), CACHEGEN_OK);
    wide.odd.set_mood(Mood::SLOW); // as the connector finds when it asks how far the store is
    auto engine = std::make_unique<Engine>(
        wide.mount.path, wide.store.spec,
        "\"chunk_tokens\": 128, \"lookup_timeout_ms\": 60000, \"ttft_budget_ms\": 60000");
    wide.odd.set_mood(Mood::GOOD);
    EXPECT_EQ(engine->load(first).progress.loaded_tokens, 639u);
    // On a machine that is busy enough files may close before they are used: then once more.
    int n_opened = 0;
    for (int i = 0; i < 10 && n_opened != 5; i++) {
        const int n_before = wide.odd.n_opens();
        const Load load = engine->load(tokens);
        n_opened = wide.odd.n_opens() - n_before;
        EXPECT_EQ(load.progress.loaded_tokens, 639u);
        EXPECT_GT(load.progress.bytes_read, 5u * 16384) << "or one range is all of a chunk";
    }
    EXPECT_EQ(n_opened, 5);
    engine.reset();
    EXPECT_TRUE(comes_true([&] { return wide.odd.n_open() == 0; }));
}

// A network's file system may forget at each opening what it holds of a file. While the link is
// unknown, ranges are small. A fast link would read the next one without waiting for the first.
TEST_F(FarStoreTest, WhatIsReadInPartsIsOpenedOnceAlsoOfANearStore)
{
    Wide wide;
    ASSERT_EQ(wide.odd.why(), "");
    const Tokens tokens = prompt(640);
    ASSERT_EQ(wide.save(tokens), CACHEGEN_OK);
    {
        Engine engine(wide.mount.path, wide.store.spec,
                      "\"chunk_tokens\": 128, \"lookup_timeout_ms\": 60000, "
                      "\"ttft_budget_ms\": 60000");
        wide.odd.set_mood(Mood::SLOW);
        const int n_before = wide.odd.n_opens();
        const Load load = engine.load(tokens);
        wide.odd.set_mood(Mood::GOOD);
        EXPECT_EQ(load.progress.loaded_tokens, 639u);
        EXPECT_GT(load.progress.bytes_read, 5u * 16384) << "or one range is all of a chunk";
        EXPECT_LE(wide.odd.n_opens() - n_before, 5 + 5) << "by the look-up, then by the load";
    }
    EXPECT_TRUE(comes_true([&] { return wide.odd.n_open() == 0; }));
}

// Files of a near store that are read in parts stay open for their load, and for no other.
TEST_F(FarStoreTest, ANearStoreIsLoadedAsItIsNow)
{
    const Store near{false, wide_spec()};
    Engine engine(near, "\"chunk_tokens\": 640, \"positive_ttl_ms\": 60000");
    const Tokens tokens = prompt(640);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    const std::vector<std::string> chunks = near.chunks("L0");
    ASSERT_EQ(chunks.size(), 1u);
    ASSERT_GT(std::filesystem::file_size(near.dir.path + "/" + chunks[0]), 1u << 20)
        << "or one range is all of a chunk";
    ASSERT_EQ(engine.load(tokens).progress.loaded_tokens, 639u);
    std::filesystem::remove_all(near.dir.path + "/m/objects");
    const Load gone = engine.load(tokens);
    EXPECT_EQ(gone.hit.hit_tokens, 639u) << "known by the memory";
    EXPECT_EQ(gone.progress.loaded_tokens, 0u);
}

// A store that is a network away for its connectors, whose files stay open.
struct Held {
    Held()
    {
        odd.set_mood(Mood::SLOW); // as connectors find when they ask how far the store is
        for (std::unique_ptr<Engine> *engine : {&reader, &writer})
            *engine = std::make_unique<Engine>(mount.path, store.spec,
                                               "\"lookup_timeout_ms\": 60000, \"retry_ms\": 0, "
                                               "\"ttft_budget_ms\": 600000");
        odd.set_mood(Mood::GOOD);
    }
    const Store store{true};
    const TempDir mount;
    OddFs odd{store.dir.path, mount.path};
    std::unique_ptr<Engine> reader, writer; // before the mount goes
};

TEST_F(FarStoreTest, AfterAFailedLoadTheNameDecidesWhichFileIsRead)
{
    Held held;
    ASSERT_EQ(held.odd.why(), "");
    const Tokens tokens = prompt(CHUNK * 4);
    {
        Engine near(held.store);
        ASSERT_EQ(near.save(tokens), CACHEGEN_OK);
    }
    std::vector<std::pair<std::string, Bytes>> good;
    for (const char *level : {"L1", "L2", "L3"})
        for (const std::string &path : held.store.chunks(level)) {
            good.emplace_back(path, held.store.dir.read(path));
            Bytes bytes = good.back().second;
            bytes[bytes.size() / 2] ^= 1;
            std::filesystem::remove(held.store.dir.path + "/" + path);
            held.store.dir.write(path, bytes);
        }
    held.reader->load(tokens); // the first has no reader yet, and nothing stays open
    EXPECT_EQ(held.reader->load(tokens).progress.loaded_tokens, 0u);
    for (const auto &[path, bytes] : good) { // as where another engine replaces them
        held.store.dir.write(path + ".new", bytes);
        std::filesystem::rename(held.store.dir.path + "/" + path + ".new",
                                held.store.dir.path + "/" + path);
    }
    // Reads that were under way when the first chunk failed leave their files open.
    uint32_t n_loaded = 0;
    for (int i = 0; i < 10 && n_loaded < CHUNK * 4 - 1; i++)
        n_loaded = held.reader->load(tokens).progress.loaded_tokens;
    EXPECT_EQ(n_loaded, CHUNK * 4 - 1);
}

TEST_F(FarStoreTest, WhatASaveHasReplacedIsNotReadAsItWas)
{
    Held held;
    ASSERT_EQ(held.odd.why(), "");
    const Tokens tokens = prompt(CHUNK * 4);
    Engine &reader = *held.reader, &writer = *held.writer;
    ASSERT_EQ(writer.save(tokens, nullptr, /*prefix_level=*/3), CACHEGEN_OK);
    for (int i = 0; i < 2; i++)
        EXPECT_EQ(reader.load(tokens).progress.loaded_tokens, CHUNK * 4 - 1);
    ASSERT_EQ(writer.save(tokens), CACHEGEN_OK);
    reader.worst_level_plus_1 = reader.level_plus_1 = 3; // L2, the finest of both
    const Load load = reader.load(tokens);
    EXPECT_EQ(load.hit.hit_tokens, CHUNK * 4 - 1);
    EXPECT_EQ(load.status, CACHEGEN_OK);
    EXPECT_EQ(load.progress.loaded_tokens, CHUNK * 4 - 1);
}

// The second look-up opens files that are open since the first.
TEST_F(FarStoreTest, ALookUpWaitsForNoFileToBeClosed)
{
    const Tokens tokens = prompt(CHUNK * 4);
    save(tokens);
    odd->set_mood(Mood::SLOW); // as the connector finds when it asks how far the store is
    auto engine = std::make_unique<Engine>(
        mount.path, store.spec, "\"lookup_timeout_ms\": 500, \"ttft_budget_ms\": 600000");
    odd->set_mood(Mood::GOOD);
    const auto is_found = [&] { return engine->look_up(tokens).hit_tokens == CHUNK * 4 - 1; };
    ASSERT_TRUE(comes_true([&] { // the first has no reader yet, and nothing stays open
        return engine->load(tokens).progress.loaded_tokens == CHUNK * 4 - 1 && odd->n_open() >= 4;
    }));
    ASSERT_TRUE(comes_true(is_found));
    odd->set_mood(Mood::NO_CLOSES);
    auto ended = std::async(std::launch::async, [&] { engine->look_up(tokens); });
    const bool has_ended = ended.wait_for(std::chrono::seconds(10)) == std::future_status::ready;
    EXPECT_TRUE(has_ended);
    odd->set_mood(Mood::GOOD);
    ended.wait();
    EXPECT_TRUE(comes_true(is_found));
    engine.reset();
    EXPECT_TRUE(comes_true([&] { return odd->n_open() == 0; }));
}

TEST_F(FarStoreTest, ALongPromptOfWhichLittleIsStoredTakesFewQuestions)
{
    Tokens tokens = prompt(CHUNK * 512);
    const Cost miss = least_rounds(10, [&] { EXPECT_EQ(far->look_up(tokens).stored_tokens, 0u); });
    EXPECT_LE(miss.n_rounds, 10);
    EXPECT_LE(miss.n_calls, 60);
    tokens.resize(CHUNK * 20);
    save(tokens);
    const Tokens more = prompt(CHUNK * 492, 2);
    tokens.insert(tokens.end(), more.begin(), more.end());
    const Cost part = cost_of([&] { EXPECT_EQ(far->look_up(tokens).stored_tokens, CHUNK * 20); });
    EXPECT_LE(part.n_calls, 20 * 6 + 12 * 2 + 60);
}

// A mount of the store that looks up one name of a folder at a time, and a connector that knows how
// far it is.
struct SerialMount {
    SerialMount(const Store &of, const std::string &more)
        : odd(of.dir.path, dir.path, /*is_far=*/true, /*is_serial=*/true)
    {
        odd.set_mood(Mood::SLOW);
        far = std::make_unique<Engine>(dir.path, of.spec, "\"lookup_timeout_ms\": 60000" + more);
        odd.set_mood(Mood::GOOD);
    }
    const TempDir dir;
    OddFs odd;
    std::unique_ptr<Engine> far;
};

size_t n_folders(const Store &store)
{
    return n_entries((store.dir.path + "/m/objects").c_str());
}

TEST_F(FarStoreTest, ALookUpWaitsForNoFolderAfterAnother)
{
    const Tokens tokens = prompt(CHUNK * 64);
    save(tokens);
    ASSERT_GT(n_folders(store), 40u);
    // On a busy machine a round may be counted twice, and folders may seem to answer slowly: then
    // a new connector asks again.
    int n_rounds = 99;
    for (int i = 0; i < 10 && n_rounds > 20; i++) {
        SerialMount serial(store, ", \"positive_ttl_ms\": 60000");
        ASSERT_EQ(serial.odd.why(), "");
        serial.odd.set_mood(Mood::IN_ROUNDS);
        EXPECT_EQ(serial.far->look_up(tokens).stored_tokens, CHUNK * 64 - 1);
        serial.odd.set_mood(Mood::GOOD);
        n_rounds = serial.odd.n_rounds();
    }
    EXPECT_LE(n_rounds, 20); // of more than 40
}

TEST_F(FarStoreTest, FoldersThatAppearAreOpenedBehindALookUp)
{
    SerialMount serial(store, "");
    ASSERT_EQ(serial.odd.why(), "");
    EXPECT_EQ(serial.dir.n_open("m/objects"), 0u);
    const Tokens tokens = prompt(CHUNK * 20);
    save(tokens);
    const auto all_are_open = [&] {
        EXPECT_EQ(serial.far->look_up(tokens).stored_tokens, CHUNK * 20 - 1);
        return serial.dir.n_open("m/objects") == n_folders(store);
    };
    EXPECT_TRUE(comes_true(all_are_open));
    serial.far.reset();
    EXPECT_EQ(serial.dir.n_open("m/objects"), 0u);
}

TEST_F(FarStoreTest, WhatLiesInAFolderThatIsGoneIsFoundByItsName)
{
    const Tokens tokens = prompt(CHUNK * 20);
    save(tokens);
    SerialMount serial(store, "");
    ASSERT_EQ(serial.odd.why(), "");
    // On a machine that is busy opening may end early: then behind a look-up of something else.
    EXPECT_TRUE(comes_true([&] {
        serial.far->look_up(prompt(CHUNK, 9));
        return serial.dir.n_open("m/objects") == n_folders(store);
    }));
    for (const auto &folder : std::filesystem::directory_iterator(store.dir.path + "/m/objects"))
        serial.odd.lose("m/objects/" + folder.path().filename().string());
    EXPECT_EQ(serial.far->look_up(tokens).stored_tokens, CHUNK * 20 - 1);
    EXPECT_EQ(serial.far->stats().lookup_errors, 0u);
}

TEST_F(FarStoreTest, AProfileIsReadWithManyReadsUnderWay)
{
    const std::string path = mount.path + "/m/profiles/long.cgp";
    store.dir.write("m/profiles/long.cgp", std::string(2 << 20, 'x')); // all of it is read first
    cg_profile *profile = nullptr;
    cg_status status = CG_OK;
    odd->set_mood(Mood::TRICKLING);
    std::thread opening([&] { status = cg_profile_open_file(path.c_str(), &profile); });
    EXPECT_TRUE(comes_true([&] { return odd->n_hanging() >= 8; })) << odd->n_hanging();
    odd->set_mood(Mood::GOOD);
    opening.join();
    EXPECT_EQ(status, CG_ERR_BAD_MAGIC);
}

// In a store that is in use, the folders above those of chunks are there. The looks are the
// kernel's, which asks for the status of each name before something is made of it. The bytes come
// besides.
TEST_F(FarStoreTest, ASaveTakesAFewQuestionsAChunk)
{
    for (int i = 0; i < 256; i++) {
        char folder[32];
        snprintf(folder, sizeof folder, "/m/objects/%02x", i);
        ASSERT_TRUE(mkdir((store.dir.path + folder).c_str(), 0700) == 0 || errno == EEXIST);
    }
    const Tokens tokens = prompt(CHUNK * 16);
    std::map<std::string, int> before = odd->calls();
    ASSERT_EQ(far->save(tokens), CACHEGEN_OK);
    int n_questions = 0, n_looks = 0;
    for (const auto &[kind, n] : odd->calls()) {
        RecordProperty(kind, n - before[kind]);
        if (kind != "write")
            (kind == "getattr" ? n_looks : n_questions) += n - before[kind];
    }
    EXPECT_LE(n_questions, 16 * 6) << "mkdir, create, fsync, two links, rename";
    // Two threads may look for one name at once, before the kernel remembers it.
    EXPECT_LE(n_looks, 16 * 9) << "the chunk's folder twice and the one above, five names";
}

// What is there while a name is being made is what a kill at that moment leaves.
TEST_F(FarStoreTest, ASaveThatEndedBetweenTheNamesOfAChunkIsMadeGoodByTheNext)
{
    for (const std::string held : {"-L3.kv", "-L2.kv"}) {
        SCOPED_TRACE(held);
        const Store begun(true);
        const TempDir at, left;
        OddFs fs(begun.dir.path, at.path, /*is_far=*/true);
        Engine killed(at.path, begun.spec, PATIENT);
        const Tokens tokens = prompt(CHUNK * 2);
        cachegen_save *save;
        killed.prefill(tokens);
        fs.hold_next("name", held);
        ASSERT_EQ(killed.save_start(tokens, 0, CHUNK * 2, true, nullptr, 0, &save), CACHEGEN_OK);
        ASSERT_TRUE(comes_true([&] { return fs.n_hanging() > 0; }));
        std::filesystem::copy(begun.dir.path, left.path, std::filesystem::copy_options::recursive);
        fs.release();
        EXPECT_EQ(killed.finish(save).status, CACHEGEN_OK);

        Engine next(left.path, begun.spec, PATIENT);
        ASSERT_EQ(next.save(tokens, "a-context"), CACHEGEN_OK);
        for (uint32_t i = 0; i < 2; i++)
            for (const unsigned level : {CG_L1, CG_L2, CG_L3}) {
                char path[CG_TREE_PATH_BYTES];
                const cg_key key = key_of(root_of(begun), tokens, i);
                ASSERT_EQ(cg_tree_object_path("m", &key, cg_level(level),
                                              cg_profile_fingerprint(begun.profile.get()), path,
                                              sizeof path),
                          CG_OK);
                EXPECT_TRUE(left.has(path)) << i << " " << level;
            }
        EXPECT_TRUE(left.has("m/contexts/a-context/L3/00001.kv"));
        EXPECT_EQ(next.load(tokens).progress.loaded_tokens, CHUNK * 2 - 1);
    }
}
#endif

} // namespace
