#include "connector/fetch_exit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace
{

constexpr uint64_t MS = 1000000, SECOND = 1000 * MS, KB = 1000, KIB = 1024;
constexpr uint64_t NEVER = UINT64_MAX;
constexpr uint64_t TIMEOUT = 10 * SECOND;

// A fetch of nested chunks of 256 tokens that are all alike: L1 400, L2 200, L3 100 kB.
class Fetch
{
  public:
    explicit Fetch(uint32_t n_chunks, uint64_t deadline_ns = 100 * SECOND, uint8_t fixed = 0)
    {
        EXPECT_EQ(cg_fetch_init(&s, n_chunks), CG_OK);
        s.deadline_ns = deadline_ns;
        s.has_fixed_level = fixed > 0;
        for (uint32_t i = 0; i < n_chunks; i++) {
            s.levels[i] = fixed > 0 ? fixed : static_cast<uint8_t>(CG_L2);
            s.sizes[i].n_tokens = 256;
            for (uint32_t l = CG_L1; l < CG_N_LEVELS; l++)
                s.sizes[i].bytes[l] = 800 * KB >> l;
        }
        if (fixed == 0)
            cg_fetch_nest(&s);
    }
    ~Fetch()
    {
        cg_fetch_destroy(&s);
    }
    Fetch(const Fetch &) = delete;
    Fetch &operator=(const Fetch &) = delete;
    cg_fetch s;
};

// All chunks have so many bytes at L3, three times as many at L2 and six times at L1.
void set_sizes(Fetch *fetch, uint64_t l3_bytes)
{
    const uint64_t bytes[] = {0, 6 * l3_bytes, 3 * l3_bytes, l3_bytes};
    for (uint32_t i = 0; i < fetch->s.n_chunks; i++)
        std::copy(std::begin(bytes), std::end(bytes), fetch->s.sizes[i].bytes);
    fetch->s.end_token = 256 * fetch->s.n_chunks;
}

class FetchPlanTest : public testing::Test
{
  protected:
    void SetUp() override
    {
        start(16, 1000000 * KB);
        link(0);
    }
    void TearDown() override
    {
        cg_fetch_plan_destroy(&plan);
    }
    void start(uint32_t depth, uint64_t staging_bytes)
    {
        cg_fetch_plan_destroy(&plan);
        ASSERT_EQ(cg_fetch_plan_init(&plan, depth, staging_bytes, TIMEOUT), CG_OK);
    }
    // What was measured of the link, just now; 0: nothing. Decoding a chunk takes 1 ms.
    void link(double bytes_per_s)
    {
        plan.window.bytes_since_idle = bytes_per_s > 0 ? uint64_t{1} << 40 : 0;
        speeds = {};
        speeds.n_threads = 1;
        for (double &ns : speeds.decode_thread_ns)
            ns = 1e6 / 256;
        cg_estimator_init(&speeds.link, CG_ESTIMATOR_HARMONIC, 0);
        for (int i = 0; i < 20 && bytes_per_s > 0; i++)
            cg_estimator_add(&speeds.link, static_cast<uint64_t>(bytes_per_s), SECOND, 0);
    }
    void add(Fetch *fetch)
    {
        ASSERT_EQ(cg_fetch_plan_add(&plan, &fetch->s), CG_OK);
    }
    const cg_fetch_read *next(uint64_t now_ns = 0)
    {
        return cg_fetch_next_read(&plan, &speeds, now_ns);
    }
    uint32_t begin_all(uint64_t now_ns = 0)
    {
        uint32_t n = 0;
        while (next(now_ns) != nullptr)
            n++;
        return n;
    }
    cg_fetch_verdict ended(uint64_t id, bool has_arrived, uint64_t now_ns = 0)
    {
        const cg_fetch_read *read = cg_fetch_find_read(&plan, id);
        const uint64_t n_bytes = has_arrived && read != nullptr ? read->bytes : 0;
        return cg_fetch_read_ended(&plan, &speeds, id, n_bytes, now_ns);
    }
    // The index of a chunk that is to be decoded now; -1: none.
    int decode(uint64_t now_ns = 0)
    {
        uint32_t index;
        return cg_fetch_next_decode(&plan, &speeds, now_ns, &index) != nullptr
                   ? static_cast<int>(index)
                   : -1;
    }
    // So many others, loaded in a moment at a fixed level.
    std::vector<std::unique_ptr<Fetch>> add_small(size_t n, uint64_t deadline_ns)
    {
        std::vector<std::unique_ptr<Fetch>> fetches;
        for (size_t i = 0; i < n; i++) {
            fetches.push_back(std::make_unique<Fetch>(1, deadline_ns, CG_L3));
            fetches.back()->s.sizes[0].bytes[CG_L3] = KB;
            add(fetches.back().get());
        }
        return fetches;
    }
    // The chunk from which a load is given up; -1: none is.
    int cut(uint64_t now_ns = 0)
    {
        uint32_t index;
        return cg_fetch_hopeless(&plan, &speeds, now_ns, &index) != nullptr
                   ? static_cast<int>(index)
                   : -1;
    }
    // Reads one range after the other over a link and decodes in no time: what was asked for, as
    // "chunk:from-to" in kB, and "chunk=level" of what was decoded.
    std::string run(double bytes_per_s)
    {
        std::string text;
        uint32_t index;
        uint64_t now_ns = 0;
        for (bool goes_on = true; goes_on;) {
            const cg_fetch_read *read = next(now_ns);
            goes_on = read != nullptr || plan.must_free_bytes > 0;
            while (cg_fetch *fetch = cg_fetch_next_decode(&plan, &speeds, now_ns, &index)) {
                text +=
                    std::to_string(index) + "=" + std::to_string(fetch->chunks[index].level) + " ";
                cg_fetch_decode_ended(&plan, fetch, index, true);
                goes_on = true;
            }
            if (read == nullptr)
                continue;
            text += std::to_string(read->chunk_index) + ":" + std::to_string(read->from / KB) +
                    "-" + std::to_string((read->from + read->bytes) / KB) + " ";
            now_ns += static_cast<uint64_t>(1e9 * static_cast<double>(read->bytes) / bytes_per_s);
            ended(read->id, true, now_ns);
        }
        EXPECT_EQ(plan.bytes_held + plan.window.bytes_reading + plan.bytes_decoding, 0u) << text;
        return text;
    }
    // A load to its end, or until it is given up, over a link that serves reads in order, each a
    // round trip after its turn; the first n_cached chunks come from the page cache.
    struct Loaded {
        bool is_given_up = false;
        uint64_t floors_ns = 0, ended_ns = 0;
    };
    Loaded load(Fetch *fetch, double mbps, double round_trip_ms, uint32_t n_cached = 0,
                uint64_t now_ns = 0)
    {
        struct Read {
            uint64_t id, ends_ns;
        };
        Loaded loaded;
        std::vector<Read> reads;
        uint64_t link_free_ns = 0;
        uint32_t index;
        const auto begin = [&] {
            while (const cg_fetch_read *read = next(now_ns)) {
                const double link_ns = static_cast<double>(read->bytes) * 8e3 / mbps;
                const bool is_cached = read->chunk_index < n_cached;
                if (!is_cached)
                    link_free_ns = std::max(link_free_ns, now_ns) + static_cast<uint64_t>(link_ns);
                reads.push_back({read->id, is_cached ? now_ns + 60000
                                                     : link_free_ns + static_cast<uint64_t>(
                                                                          round_trip_ms * 1e6)});
                now_ns += 1000;
            }
        };
        cg_fetch_set_end(&fetch->s, &speeds, now_ns);
        add(fetch);
        while (now_ns < 60 * SECOND) {
            loaded.is_given_up = cg_fetch_overdue(&plan, &speeds, now_ns) != nullptr ||
                                 cg_fetch_hopeless(&plan, &speeds, now_ns, &index) != nullptr;
            if (loaded.is_given_up)
                break;
            begin();
            for (int i; (i = decode(now_ns)) >= 0; begin())
                cg_fetch_decode_ended(&plan, &fetch->s, static_cast<uint32_t>(i), true);
            if (loaded.floors_ns == 0 && cg_fetch_has_all(&fetch->s))
                loaded.floors_ns = now_ns;
            if (cg_fetch_is_settled(&fetch->s))
                break;
            const auto first =
                std::min_element(reads.begin(), reads.end(), [](const Read &a, const Read &b) {
                    return a.ends_ns < b.ends_ns;
                });
            const uint64_t wake_ns = std::max(cg_fetch_wake_ns(&plan), now_ns + 1000);
            if (first == reads.end() || first->ends_ns > wake_ns) {
                now_ns = wake_ns;
                continue;
            }
            now_ns = std::max(now_ns, first->ends_ns);
            ended(first->id, true, now_ns);
            reads.erase(first);
        }
        loaded.ended_ns = now_ns;
        cg_fetch_plan_remove(&plan, &fetch->s);
        for (const Read &read : reads)
            ended(read.id, false, now_ns);
        return loaded;
    }
    // What is kept of what fetches still need is what counting all chunks anew says.
    void check_todo()
    {
        std::vector<cg_fetch_todo> kept;
        const auto count = [&] {
            cg_fetch_wanted(&plan);
            cg_fetch_undecoded_ns(&plan, &speeds);
        };
        count();
        for (cg_fetch *fetch = plan.fetches; fetch != nullptr; fetch = fetch->next) {
            kept.push_back(fetch->todo);
            fetch->todo.is_counted = false;
        }
        count();
        size_t i = 0;
        for (cg_fetch *fetch = plan.fetches; fetch != nullptr; fetch = fetch->next) {
            const cg_fetch_todo &was = kept[i++], &is = fetch->todo;
            for (int l = 0; l < CG_N_LEVELS && is.is_counted; l++) {
                ASSERT_EQ(was.decoding.n_tokens[l], is.decoding.n_tokens[l]);
                ASSERT_EQ(was.decoding.bytes[l], is.decoding.bytes[l]);
                if (fetch->is_cancelled)
                    continue; // nothing else is asked of it
                ASSERT_EQ(was.missing_bytes, is.missing_bytes);
                ASSERT_EQ(was.undecoded.n_tokens[l], is.undecoded.n_tokens[l]);
                ASSERT_EQ(was.undecoded.bytes[l], is.undecoded.bytes[l]);
            }
        }
    }
    cg_fetch_plan plan = {};
    cg_speeds speeds = {};
};

TEST_F(FetchPlanTest, APlanOfThousandsOfChunksStandsAsMuchLongerAsPlanningTakes)
{
    const struct {
        uint32_t n_chunks;
        uint64_t after_ms;
        bool is_new;
    } cases[] = {{60, 1, true},    {1000, 4, false},   {1000, 6, true},
                 {8000, 6, false}, {8000, 200, false}, {8000, 300, true}};
    for (const auto &c : cases) {
        SCOPED_TRACE(std::to_string(c.n_chunks) + " chunks, after " + std::to_string(c.after_ms));
        start(16, 1000000 * KB);
        link(1e9);
        Fetch fetch(c.n_chunks, 3600 * SECOND);
        add(&fetch);
        const cg_fetch_read *read = next();
        ASSERT_NE(read, nullptr);
        ended(read->id, true, MS);
        next(c.after_ms * MS);
        EXPECT_EQ(plan.planned_at_ns, c.is_new ? c.after_ms * MS : 0);
    }
}

TEST_F(FetchPlanTest, APlanThatStandsAndHasNothingMoreToReadIsMadeAnew)
{
    Fetch fetch(70, SECOND); // no time to refine; two reads at once, the first of a file alone
    link(1e6);
    add(&fetch);
    std::vector<uint64_t> ids;
    for (uint32_t i = 0; i < 70; i++) {
        if (i >= 2)
            ended(ids[i - 2], true);
        const cg_fetch_read *read = next();
        ASSERT_NE(read, nullptr);
        ASSERT_EQ(read->chunk_index, i);
        ids.push_back(read->id);
    }
    ended(ids[68], true);
    const cg_fetch_read *read = next();
    ASSERT_NE(read, nullptr);
    EXPECT_EQ(read->chunk_index, 0u);
}

TEST_F(FetchPlanTest, OfAGuessedChunkHalfOfWhatItMustHaveIsReadFirstAndAlone)
{
    link(1e9);
    for (const bool is_there : {true, false}) {
        Fetch fetch(1);
        fetch.s.chunks[0].is_guessed = true;
        add(&fetch);
        const cg_fetch_read *read = next();
        ASSERT_NE(read, nullptr);
        EXPECT_EQ(read->file_level, CG_L1);
        EXPECT_EQ(read->from, 0u);
        EXPECT_EQ(read->bytes, 12 * 4 * KIB); // of 100 kB
        EXPECT_EQ(next(), nullptr);
        EXPECT_EQ(ended(read->id, true, MS), CG_FETCH_KEEP);
        const uint64_t bytes[CG_N_LEVELS] = {0, is_there ? 500 * KB : 0, 0, 90 * KB};
        EXPECT_EQ(cg_fetch_sized(&plan, &fetch.s, 0, bytes), is_there ? CG_OK : CG_ERR_NOT_FOUND);
        EXPECT_FALSE(fetch.s.chunks[0].is_guessed);
        // A chunk of no level would be one that the plan cannot take.
        EXPECT_EQ(fetch.s.sizes[0].bytes[CG_L1], (is_there ? 500 : 400) * KB);
        EXPECT_EQ(fetch.s.sizes[0].bytes[CG_L2], is_there ? 0 : 200 * KB);
        EXPECT_EQ(decode(MS), -1);
        uint64_t end = 0;
        while (is_there && (read = next(MS)) != nullptr) {
            end = std::max(end, read->from + read->bytes);
            ended(read->id, true, MS);
        }
        EXPECT_EQ(end, bytes[CG_L1]);
        EXPECT_EQ(decode(MS), is_there ? 0 : -1);
        cg_fetch_plan_remove(&plan, &fetch.s);
    }
}

TEST_F(FetchPlanTest, ReadsCoarseFirstThenRefinesTheEndOfTheContext)
{
    const struct {
        const char *what;
        double believed, real; // kB/s; three chunks in a second
        std::vector<uint8_t> want;
    } cases[] = {
        {"too slow even for L3", 200, 200, {CG_L3, CG_L3, CG_L3}},
        {"L3 and no more", 350, 350, {CG_L3, CG_L3, CG_L3}},
        {"the last one at L2", 450, 450, {CG_L3, CG_L3, CG_L2}},
        {"the last two", 550, 550, {CG_L3, CG_L2, CG_L2}},
        {"slower than it was believed to be", 2000, 450, {CG_L3, CG_L3, CG_L2}},
        {"faster than it was believed to be", 100, 2000, {CG_L1, CG_L1, CG_L1}},
    };
    for (const auto &c : cases) {
        Fetch fetch(3, SECOND);
        start(16, 1000000 * KB);
        link(c.believed * 1e3);
        add(&fetch);
        const std::string text = run(c.real * 1e3);
        for (uint32_t i = 0; i < 3; i++) {
            EXPECT_EQ(fetch.s.chunks[i].state, CG_FETCH_DONE) << c.what << ": " << text;
            EXPECT_EQ(fetch.s.chunks[i].level, c.want[i]) << c.what << ": " << text;
        }
        EXPECT_LT(text.find("0:0-"), text.find("1:0-")) << text;
        EXPECT_LT(text.find("1:0-"), text.find("2:0-")) << text;
        EXPECT_LT(text.find("2:0-"), text.find("2:102-")) << text;
    }
}

TEST_F(FetchPlanTest, RefinesWhereTheCurveOfTheModelSaysThatMostLies)
{
    cg_quality start_heavy = cg_quality_built_in; // of a model unlike the built-in curve's
    start_heavy.n_points = 2;
    start_heavy.points[0] = {512, 0.1};
    start_heavy.points[1] = {768, 1};
    Fetch fetch(3, SECOND);
    fetch.s.quality = &start_heavy;
    link(450e3);
    add(&fetch);
    run(450e3);
    EXPECT_EQ(fetch.s.chunks[0].level, CG_L2);
    EXPECT_EQ(fetch.s.chunks[1].level, CG_L3);
    EXPECT_EQ(fetch.s.chunks[2].level, CG_L3);
}

TEST_F(FetchPlanTest, OnAFastLinkChunksAreReadToTheirEndsAndDecodedAtOnce)
{
    Fetch fetch(3);
    link(100e6);
    add(&fetch);
    EXPECT_EQ(run(100e6), "0:0-400 0=1 1:0-400 1=1 2:0-400 2=1 ");
    EXPECT_TRUE(cg_fetch_is_settled(&fetch.s));
}

TEST_F(FetchPlanTest, RangesAreOnPagesAndNoMoreThanHalfTheWindowWhereLessMayHaveToDo)
{
    const struct {
        const char *what;
        double bytes_per_s;
        uint8_t fixed;
        uint64_t deadline_ns, most_bytes;
        cg_policy policy = CG_POLICY_TTFT_BUDGET;
    } cases[] = {
        {"an unknown link", 0, 0, 100 * SECOND, 16 * KIB + 4096},
        {"a slow one", 100e3, 0, 100 * SECOND, 16 * KIB + 4096},
        {"one that is not fast enough for everything", 1e6, 0, 5 * SECOND, 15 * KB + 4096},
        {"one that is", 1e6, 0, 100 * SECOND, 15 * KB + 4096},
        {"a fast one", 1e9, 0, 100 * SECOND, 1024 * KIB},
        {"of one level all is read", 0, CG_L1, 100 * SECOND, 1024 * KIB},
        {"also over a slow link", 100e3, CG_L1, 5 * SECOND, 1024 * KIB},
        {"and where the controller chose the level", 100e3, 0, 5 * SECOND, 1024 * KIB,
         CG_POLICY_MIN_DELAY},
    };
    for (const auto &c : cases) {
        SCOPED_TRACE(c.what);
        Fetch fetch(6, c.deadline_ns, c.fixed);
        fetch.s.policy = c.policy;
        for (uint32_t i = 0; i < 6; i++)
            for (uint64_t &bytes : fetch.s.sizes[i].bytes)
                bytes *= 10;
        start(16, 1000000 * KB);
        link(c.bytes_per_s);
        add(&fetch);
        uint64_t at[6] = {}, largest = 0;
        for (int round = 0; round < (c.bytes_per_s > 0 ? 3 : 1); round++) {
            std::vector<uint64_t> ids;
            std::vector<uint32_t> chunks;
            while (const cg_fetch_read *read = next()) {
                EXPECT_EQ(read->from % 4096, 0u);
                EXPECT_EQ(read->from, at[read->chunk_index]) << "no gap, nothing twice";
                at[read->chunk_index] += read->bytes;
                largest = std::max(largest, read->bytes);
                ids.push_back(read->id);
                chunks.push_back(read->chunk_index);
            }
            if (round == 0) {
                EXPECT_GE(ids.size(), c.bytes_per_s > 0 ? 2u : 4u);
            }
            EXPECT_LE(ids.size(), 16u);
            std::sort(chunks.begin(), chunks.end());
            if (!(c.bytes_per_s > 0)) {
                EXPECT_EQ(std::unique(chunks.begin(), chunks.end()), chunks.end())
                    << "one range of a file at a time";
            }
            for (uint64_t id : ids)
                ended(id, true);
        }
        EXPECT_LE(largest, c.most_bytes);
        EXPECT_GT(largest, c.most_bytes / 3);
    }
}

// Each opening of a file may cost what another range of it has under way.
TEST_F(FetchPlanTest, OverASlowLinkAFilesFirstRangeComesAloneUnlessTheLookUpHasOpenedIt)
{
    const struct {
        const char *what;
        double link_bytes_per_s, latency_ns;
        bool is_alone;
    } cases[] = {{"slow", 1e6, 0, true}, {"fast", 50e6, 0, false}, {"far", 1e6, 10 * MS, false}};
    for (const auto &c : cases) {
        SCOPED_TRACE(c.what);
        Fetch fetch(1, 500 * MS); // enough for L1 of the slow link, but no slack
        for (uint64_t &bytes : fetch.s.sizes[0].bytes)
            bytes *= c.link_bytes_per_s / 1e6;
        start(16, 1000000 * KB);
        link(c.link_bytes_per_s);
        speeds.latency_ns = c.latency_ns;
        add(&fetch);
        const uint64_t first = next()->id;
        EXPECT_EQ(next() == nullptr, c.is_alone);
        ended(first, true);
        EXPECT_NE(next(), nullptr);
        begin_all();
        EXPECT_GE(plan.window.n_reading, c.latency_ns > 0 ? 3u : 2u)
            << "of a file that is open, several";
    }
}

TEST_F(FetchPlanTest, AsManyReadsAreUnderWayAsTheLinkMovesIn30MillisecondsAndTwoRoundTrips)
{
    const struct {
        const char *what;
        double link_bytes_per_s;
        uint32_t depth;
        uint64_t staging_bytes;
        uint32_t want; // of 200 kB each
        double latency_ns;
    } cases[] = {
        {"three chunks", 20e6 * 1.1, 16, 100000 * KB, 3, 0},
        {"and two round trips, of a store that is near", 24e6, 16, 100000 * KB, 4, 2.9e6},
        {"depth", 1e9, 5, 100000 * KB, 5, 0},
        {"depth of one", 1e9, 1, 100000 * KB, 1, 0},
        {"staging memory", 1e9, 16, 800 * KB, 4, 0},
        {"staging memory of less than a chunk: one at least", 1e9, 16, 1, 1, 0},
        {"no more than there are", 1e9, 64, 100000 * KB, 20, 0},
    };
    for (const auto &c : cases) {
        Fetch fetch(20, 100 * SECOND, CG_L2);
        start(c.depth, c.staging_bytes);
        link(c.link_bytes_per_s);
        speeds.latency_ns = c.latency_ns;
        add(&fetch);
        EXPECT_EQ(begin_all(), c.want) << c.what;
    }
}

// It may have become a slower one, where what is under way would delay what must arrive.
TEST_F(FetchPlanTest, WhilePromptsAreLookedUpTheLinkIsLeftToThem)
{
    // All chunks at L1 take 4 s of 5, and what must arrive 1 s.
    Fetch fetch(10, 5 * SECOND);
    const auto levels = [&](uint64_t now_ns) {
        const cg_fetch_read *read = next(now_ns);
        uint32_t n = 0;
        for (uint32_t i = 0; i < 10; i++)
            n += fetch.s.chunks[i].planned == CG_L1;
        if (read != nullptr)
            ended(read->id, true, now_ns);
        return n;
    };
    link(1e6);
    add(&fetch);
    EXPECT_EQ(levels(0), 10u);
    cg_fetch_plan_expect(&plan, 10 * 256 * 3, 2 * SECOND);
    EXPECT_LT(levels(MS), 5u);
    for (uint32_t i = 0; i < 10; i++)
        EXPECT_EQ(fetch.s.chunks[i].hoped, CG_L1) << "nothing is decoded for good before they come";
    EXPECT_LE(cg_fetch_wake_ns(&plan), 2 * SECOND);
    EXPECT_GT(levels(2 * SECOND), levels(2 * SECOND - MS)) << "nobody has come";
    EXPECT_GT(cg_fetch_wake_ns(&plan), 2 * SECOND);
    cg_fetch_plan_ask(&plan, 10 * 256 * 3);
    EXPECT_EQ(levels(2 * SECOND + MS), 0u);
    cg_fetch_plan_ask(&plan, 0);
    EXPECT_GT(levels(2 * SECOND + 2 * MS), 0u);
}

// What has arrived may yet be refined, if nobody comes.
TEST_F(FetchPlanTest, WhilePromptsAreLookedUpNothingIsDecodedForGood)
{
    Fetch fetch(4, 5 * SECOND);
    link(1e6);
    add(&fetch);
    cg_fetch_plan_ask(&plan, 4 * 256 * 1000);
    while (const cg_fetch_read *read = next(MS))
        ended(read->id, true, MS);
    for (uint32_t i = 0; i < 4; i++)
        ASSERT_GE(fetch.s.chunks[i].arrived_bytes, fetch.s.sizes[i].bytes[CG_L3]);
    EXPECT_EQ(decode(MS), -1);
    EXPECT_NE(cg_fetch_wake_ns(&plan), NEVER) << "until decoding must begin";
    cg_fetch_plan_ask(&plan, 0);
    EXPECT_NE(next(2 * MS), nullptr);
    EXPECT_EQ(decode(2 * MS), -1);
}

// Questions wait behind what is under way.
TEST_F(FetchPlanTest, WhilePromptsAreLookedUpLittleIsUnderWay)
{
    Fetch fetch(100, 1000 * SECOND);
    start(64, 1000000 * KB);
    link(40e6);
    add(&fetch);
    cg_fetch_plan_expect(&plan, 256, SECOND);
    begin_all(100 * MS);
    EXPECT_LE(plan.window.bytes_reading, 128 * KIB);
    cg_fetch_plan_expect(&plan, 0, 2 * SECOND);
    begin_all(100 * MS);
    EXPECT_GT(plan.window.bytes_reading, 1000 * KB);
}

TEST_F(FetchPlanTest, ALinkThatWasIdleIsTriedFirstWhereMoreIsReadThanMustArrive)
{
    const auto under_way = [&](Fetch *fetch, uint64_t now_ns) {
        start(64, 1000000 * KB);
        link(40e6);
        add(fetch);
        begin_all(now_ns);
        return plan.window.bytes_reading;
    };
    Fetch busy(20, 100 * SECOND), level(20, 100 * SECOND, CG_L1), idle(20, 100 * SECOND);
    EXPECT_GT(under_way(&busy, 400 * MS), 1000 * KB);
    EXPECT_GT(under_way(&level, 600 * MS), 1000 * KB);
    const uint64_t first = under_way(&idle, 600 * MS);
    EXPECT_GT(first, 64 * KIB);
    EXPECT_LE(first, 128 * KIB);

    // What the page cache brings says nothing of the link.
    const uint64_t bytes = plan.reads[0].bytes;
    ended(plan.reads[0].id, true, 600 * MS + 10000);
    begin_all(600 * MS + 10000);
    EXPECT_LE(plan.window.bytes_reading, 128 * KIB);
    ended(plan.reads[1].id, true, 602 * MS);
    begin_all(602 * MS);
    EXPECT_GT(plan.window.bytes_reading, 128 * KIB) << "twice as much as has come, more";
    EXPECT_LE(plan.window.bytes_reading, 128 * KIB + 2 * bytes);

    // Nothing came for a while, although a read is under way.
    while (plan.window.n_reading > 1)
        for (uint32_t i = 0; i < plan.window.depth && plan.window.n_reading > 1; i++)
            if (plan.reads[i].id != 0)
                ended(plan.reads[i].id, false, 700 * MS);
    const uint64_t left = plan.window.bytes_reading;
    EXPECT_GT(left, 0u);
    begin_all(1200 * MS);
    EXPECT_LE(plan.window.bytes_reading, left + 64 * KIB);
}

TEST_F(FetchPlanTest, AnEstimateOfBeforeTheLinkWasIdleIsNotReliedOn)
{
    const uint64_t l3_bytes = 104 * KB; // up to its end, on a page
    const auto first = [&](Fetch *fetch, uint64_t now_ns) {
        start(64, 1000000 * KB);
        link(1e8);
        add(fetch);
        const cg_fetch_read *read = next(now_ns);
        EXPECT_NE(read, nullptr);
        return read != nullptr ? *read : cg_fetch_read{};
    };
    const auto furthest = [&] {
        uint64_t bytes = 0;
        for (const cg_fetch_read *r = plan.reads; r < plan.reads + plan.window.depth; r++)
            bytes = r->id != 0 ? std::max(bytes, r->from + r->bytes) : bytes;
        return bytes;
    };
    Fetch busy(20), as_fast(20), slower(20);
    EXPECT_GE(first(&busy, 400 * MS).bytes, 400 * KB) << "a chunk is read whole";
    // A sample says that it is as fast as it was, or two that it is not.
    for (const uint32_t n_samples : {1, 2}) {
        first(n_samples == 1 ? &as_fast : &slower, 600 * MS);
        uint64_t now_ns = 600 * MS, n_ended = 0;
        while (speeds.link.n_added < 20 + n_samples) {
            begin_all(now_ns);
            EXPECT_LE(furthest(), l3_bytes) << "more than must arrive";
            while (cg_fetch_find_read(&plan, ++n_ended) == nullptr)
                ASSERT_LT(n_ended, plan.last_id);
            ended(n_ended, true, now_ns += n_samples == 1 ? MS : 20 * MS);
        }
        begin_all(now_ns);
        if (n_samples == 1) {
            EXPECT_GE(furthest(), 400 * KB);
        }
    }

    // Files of their own, which cannot be cut short, are chosen as for a link ten times slower.
    Fetch exact(20, 1500 * MS), exact_idle(20, 1500 * MS);
    for (Fetch *fetch : {&exact, &exact_idle})
        for (uint32_t i = 0; i < 20; i++)
            fetch->s.sizes[i].bytes[CG_L0] = 1600 * KB;
    EXPECT_EQ(first(&exact, 400 * MS).file_level, CG_L0);
    EXPECT_EQ(first(&exact_idle, 600 * MS).file_level, CG_L1);
}

// Reads that share a link end together, so what is read ahead delays the first chunks.
TEST_F(FetchPlanTest, OfAFarStoreFewChunksAreUnderWayInRangesThatEndOneAfterTheOther)
{
    const struct {
        const char *what;
        double link_bytes_per_s;
        uint64_t most_bytes; // of chunks of 200 kB
    } cases[] = {
        {"a link on which three chunks take long", 1000e3, 88 * KB},
        {"three chunks", 20e6, 600 * KB},
        {"what a fast link moves in two round trips and a bit", 100e6, 2200 * KB},
    };
    for (const auto &c : cases) {
        SCOPED_TRACE(c.what);
        Fetch fetch(20, 100 * SECOND, CG_L2);
        start(16, 100000 * KB);
        link(c.link_bytes_per_s);
        speeds.latency_ns = 10 * MS;
        add(&fetch);
        uint64_t sum = 0, first = 0, last = 0;
        while (const cg_fetch_read *read = next()) {
            sum += read->bytes;
            first = first == 0 ? read->bytes : first;
            last = std::max(last, read->bytes);
        }
        EXPECT_LE(sum, c.most_bytes);
        EXPECT_GT(sum, c.most_bytes * 2 / 3);
        EXPECT_GT(last, first * 3 / 2);
    }
}

// Pages are large beside what a slow link moves in a round trip.
TEST_F(FetchPlanTest, RangesOfAFarStoreThatBeginTogetherAreNotAllOfOneSize)
{
    for (double link_bytes_per_s : {375e3, 750e3, 1500e3}) {
        Fetch fetch(20, static_cast<uint64_t>(2300 * KB / link_bytes_per_s * 1e9)); // just L3
        start(16, 100000 * KB);
        link(link_bytes_per_s);
        speeds.latency_ns = 10 * MS;
        add(&fetch);
        std::vector<uint64_t> sizes;
        while (const cg_fetch_read *read = next())
            sizes.push_back(read->bytes);
        const auto [least, most] = std::minmax_element(sizes.begin(), sizes.end());
        EXPECT_LT(*least, *most) << sizes.size() << " reads at " << link_bytes_per_s;
    }
}

// In so many the first chunk is there soonest.
TEST_F(FetchPlanTest, WhereRangesOfAFarStoreAreOfPagesEnoughAsManyAreUnderWayAsMayBe)
{
    Fetch fetch(20, 100 * SECOND, CG_L3);
    for (uint32_t i = 0; i < 20; i++)
        fetch.s.sizes[i].bytes[CG_L3] = 55 * KB; // three chunks: 40 pages
    link(7e6);
    speeds.latency_ns = 10 * MS;
    add(&fetch);
    EXPECT_EQ(begin_all(), 16u);
}

TEST_F(FetchPlanTest, MemoryThatIsFullIsMadeFreeByDecodingWhatIsThere)
{
    Fetch fetch(20);
    link(2e6); // everything could be refined
    start(16, 450 * KB);
    add(&fetch);
    const std::string text = run(2e6);
    EXPECT_TRUE(cg_fetch_is_settled(&fetch.s)) << text;
}

TEST_F(FetchPlanTest, NoMoreIsDecodedForMemoryThanIsNeeded)
{
    Fetch fetch(4, SECOND); // enough for L2, with luck for L1
    link(1e6);
    start(16, 410 * KB);
    add(&fetch);
    while (cg_fetch_first_missing(&fetch.s) < 4) // L3 takes 410 kB, up to the next page
        ended(next()->id, true);
    EXPECT_EQ(decode(), -1);
    EXPECT_EQ(next(), nullptr);
    EXPECT_EQ(decode(), 0);
    EXPECT_EQ(decode(), -1) << "the others may be refined";
    EXPECT_TRUE(cg_fetch_decode_ended(&plan, &fetch.s, 0, true));
    EXPECT_NE(next(), nullptr);
}

TEST_F(FetchPlanTest, TheEarliestDeadlineGoesFirstForWhatMustArrive)
{
    Fetch late(2, 26 * SECOND), early(2, 11 * SECOND), middle(1, 16 * SECOND);
    link(20e3); // just enough for the floors
    for (Fetch *fetch : {&late, &early, &middle})
        add(fetch);
    std::vector<cg_fetch *> order;
    while (cg_fetch_first_missing(&late.s) < 2) {
        const cg_fetch_read *read = next();
        if (std::find(order.begin(), order.end(), read->fetch) == order.end())
            order.push_back(read->fetch);
        EXPECT_TRUE(read->fetch == &early.s || cg_fetch_first_missing(&early.s) == 2);
        ended(read->id, true);
    }
    EXPECT_EQ(order, (std::vector<cg_fetch *>{&early.s, &middle.s, &late.s}));
}

TEST_F(FetchPlanTest, ALoadThatIsLateEvenAtTwiceTheSpeedGoesLast)
{
    const struct {
        uint64_t deadline_ns;
        uint8_t fixed; // a level that a request asked for; it has its budget all the same
    } cases[] = {{SECOND, 0}, {SECOND, CG_L3}, {3 * SECOND, 0}, {3 * SECOND, CG_L3}};
    for (const auto &c : cases) { // at twice the speed it takes 2.5 s
        SCOPED_TRACE(std::to_string(c.deadline_ns) + ", level " + std::to_string(c.fixed));
        const bool is_late = c.deadline_ns == SECOND;
        Fetch early(10, c.deadline_ns, c.fixed), middle(2, 3 * SECOND), last(2, 4 * SECOND);
        start(16, 1000000 * KB);
        link(200e3);
        for (Fetch *fetch : {&early, &middle, &last})
            add(fetch);
        std::vector<cg_fetch *> order;
        for (int i = 0; i < 200 && order.size() < 3; i++) {
            const cg_fetch_read *read = next();
            if (std::find(order.begin(), order.end(), read->fetch) == order.end())
                order.push_back(read->fetch);
            ended(read->id, true);
        }
        EXPECT_EQ(order, is_late ? (std::vector<cg_fetch *>{&middle.s, &last.s, &early.s})
                                 : (std::vector<cg_fetch *>{&early.s, &middle.s, &last.s}));
    }
}

// Recomputing `late` takes longer still, so it is loaded; but not before `other`, which has time.
TEST_F(FetchPlanTest, ALoadThatIsLateInAnyCaseMakesNoOtherHopeless)
{
    Fetch late(100, SECOND), other(1, 2 * SECOND);
    link(1e6);
    speeds.configured_tokens_per_s = 1000;
    add(&late);
    add(&other);
    begin_all();
    EXPECT_EQ(cut(), -1);
}

// It goes last, so it may get nothing for as long as others come.
TEST_F(FetchPlanTest, ALoadAtAFixedLevelIsGivenUpWhereItIsLateInAnyCase)
{
    for (const uint64_t deadline_ns : {SECOND, 100 * SECOND}) { // it takes 10 s
        SCOPED_TRACE(deadline_ns);
        Fetch fetch(100, deadline_ns, CG_L3);
        start(16, 1000000 * KB);
        link(1e6);
        speeds.configured_tokens_per_s = 20000; // 1.3 s
        add(&fetch);
        begin_all();
        EXPECT_EQ(cut() >= 0, deadline_ns == SECOND);
    }
}

TEST_F(FetchPlanTest, OnlyTheCutIsReadAndNothingBehindAFailure)
{
    Fetch fetch(10, 100 * SECOND, CG_L2);
    link(1e9);
    cg_fetch_cut(&fetch.s, 3, 8);
    add(&fetch);
    EXPECT_EQ(next()->chunk_index, 3u);
    EXPECT_EQ(next()->chunk_index, 4u);
    EXPECT_TRUE(cg_fetch_failed(&fetch.s, 6));
    EXPECT_FALSE(cg_fetch_failed(&fetch.s, 7)) << "nobody waits for it";
    EXPECT_EQ(next()->chunk_index, 5u);
    EXPECT_EQ(next(), nullptr);
    fetch.s.is_cancelled = true;
    EXPECT_TRUE(cg_fetch_is_settled(&fetch.s));
    EXPECT_FALSE(cg_fetch_wants(&fetch.s, 3));
}

TEST_F(FetchPlanTest, ARemovedFetchIsNotReadAndOthersAre)
{
    Fetch a(1, SECOND, CG_L2), b(1, SECOND, CG_L2), c(1, SECOND, CG_L2);
    link(1e9);
    for (Fetch *fetch : {&a, &b, &c})
        add(fetch);
    cg_fetch_plan_remove(&plan, &b.s);
    EXPECT_EQ(begin_all(), 2u);
    EXPECT_EQ(b.s.chunks[0].state, CG_FETCH_WAITING);
}

// A plan of so many chunks stands for a while, but not for a fetch that is gone.
TEST_F(FetchPlanTest, ARemovedFetchIsForgottenAtOnce)
{
    Fetch a(40), b(40);
    link(1e9);
    add(&a);
    add(&b);
    const uint64_t id = next()->id;
    ended(id, true, MS);
    ASSERT_EQ(next(MS)->fetch, &a.s);
    EXPECT_EQ(plan.planned_at_ns, 0u) << "the plan stands";
    cg_fetch_plan_remove(&plan, &a.s);
    ended(2, true, MS);
    cg_fetch_destroy(&a.s);
    const cg_fetch_read *read = next(2 * MS);
    ASSERT_NE(read, nullptr);
    EXPECT_EQ(read->fetch, &b.s);
}

TEST_F(FetchPlanTest, OtherPoliciesReadOneLevelAChunkAndDecideAnewWhenTheLinkWasMeasured)
{
    const struct {
        const char *what;
        cg_policy policy;
        double bytes_per_s;
        uint8_t want; // of chunks of 400, 200, 100 kB, ten of them in 4 s
    } cases[] = {
        {"the paper's, unknown", CG_POLICY_PAPER, 0, CG_L2},
        {"for L1", CG_POLICY_PAPER, 1010e3, CG_L1},
        {"for L2", CG_POLICY_PAPER, 510e3, CG_L2},
        {"for L3", CG_POLICY_PAPER, 260e3, CG_L3},
        {"for nothing", CG_POLICY_PAPER, 10e3, CG_L3},
        {"least delay", CG_POLICY_MIN_DELAY, 1010e3, CG_L3},
    };
    for (const auto &c : cases) {
        Fetch fetch(10, 4 * SECOND);
        fetch.s.policy = c.policy;
        for (uint32_t i = 0; i < 10; i++)
            fetch.s.chunks[i].is_nested = false;
        start(16, 1000000 * KB);
        link(c.bytes_per_s);
        add(&fetch);
        const cg_fetch_read *read = next();
        ASSERT_NE(read, nullptr);
        EXPECT_EQ(read->file_level, c.want) << c.what;
        if (c.policy != CG_POLICY_PAPER)
            continue;
        EXPECT_EQ(read->bytes, fetch.s.sizes[0].bytes[c.want]) << "whole";
        EXPECT_EQ(next(), nullptr) << "one at a time";
        EXPECT_EQ(ended(read->id, true, 100 * MS), CG_FETCH_KEEP);
        EXPECT_EQ(decode(100 * MS), 0);
        EXPECT_EQ(next(100 * MS)->chunk_index, 1u);
    }
}

// ---- what is decoded when ----

TEST_F(FetchPlanTest, WhatCouldStillBeRefinedWaitsUntilDecodingMustStart)
{
    Fetch fetch(2, 2 * SECOND);
    link(150e3); // 300 kB in all: L3 and a bit
    add(&fetch);
    uint64_t id = 0;
    while (cg_fetch_first_missing(&fetch.s) < 2) {
        id = next()->id;
        ASSERT_EQ(ended(id, true), CG_FETCH_KEEP);
    }
    const cg_fetch_read *refinement = next();
    ASSERT_NE(refinement, nullptr);
    EXPECT_EQ(refinement->chunk_index, 1u) << "the end of the context";
    const uint64_t first_id = refinement->id, first_bytes = refinement->bytes;
    ASSERT_NE(refinement = next(), nullptr);
    EXPECT_EQ(refinement->chunk_index, 1u);
    id = refinement->id;
    const uint64_t second_bytes = refinement->bytes;
    EXPECT_EQ(ended(first_id, true), CG_FETCH_KEEP);
    EXPECT_EQ(decode(), -1);
    uint32_t index;
    EXPECT_EQ(cg_fetch_hopeless(&plan, &speeds, 0, &index), nullptr);
    const uint64_t wake_ns = cg_fetch_wake_ns(&plan);
    EXPECT_GT(wake_ns, 1900 * MS);
    EXPECT_LT(wake_ns, 2 * SECOND) << "two chunks take 2 ms";
    EXPECT_EQ(decode(wake_ns - 1), -1);
    EXPECT_EQ(decode(wake_ns), 0);
    EXPECT_EQ(decode(wake_ns), 1);
    EXPECT_EQ(fetch.s.chunks[1].level, CG_L3);
    EXPECT_EQ(fetch.s.dropped_bytes, first_bytes) << "half of a step to L2 is none";
    EXPECT_EQ(ended(id, true, wake_ns), CG_FETCH_DROP) << "too late";
    EXPECT_EQ(fetch.s.dropped_bytes, first_bytes + second_bytes);
    for (uint32_t i = 0; i < 2; i++)
        EXPECT_TRUE(cg_fetch_decode_ended(&plan, &fetch.s, i, true));
    EXPECT_TRUE(cg_fetch_is_settled(&fetch.s));
    cg_fetch_plan_remove(&plan, &fetch.s);
    EXPECT_EQ(plan.bytes_held + plan.window.bytes_reading + plan.bytes_decoding, 0u);
}

TEST_F(FetchPlanTest, ARefinementThatFailsLeavesTheCoarseChunk)
{
    Fetch fetch(1, 500 * MS); // enough for L1, but no slack
    link(1e6);
    speeds.link.n_samples = 1; // no slack is trusted: coarse first
    add(&fetch);
    while (fetch.s.chunks[0].arrived_bytes < 100 * KB)
        ended(next()->id, true);
    const uint64_t last = next()->id, before = fetch.s.chunks[0].arrived_bytes;
    EXPECT_EQ(ended(last, false), CG_FETCH_DROP);
    EXPECT_EQ(next(), nullptr) << "nothing more is asked of such a file";
    EXPECT_EQ(decode(), 0);
    EXPECT_EQ(fetch.s.chunks[0].level, before >= 200 * KB ? CG_L2 : CG_L3);
}

TEST_F(FetchPlanTest, ARefinementThatFailsBehindAGapDoesNotHurtWhatIsBeforeIt)
{
    Fetch fetch(1, 500 * MS); // enough for L1, but no slack
    link(1e6);
    add(&fetch);
    ended(next()->id, true); // it opens the file
    cg_fetch_read near = *next(), far = *next();
    while (far.from < 100 * KB) {
        ended(near.id, true);
        near = far;
        far = *next();
    }
    EXPECT_EQ(ended(far.id, false), CG_FETCH_DROP);
    EXPECT_EQ(decode(), -1);
    EXPECT_EQ(ended(near.id, true), CG_FETCH_KEEP);
    EXPECT_EQ(ended(far.id, true), CG_FETCH_DROP) << "ended before";
    EXPECT_EQ(fetch.s.chunks[0].arrived_bytes, far.from);
    EXPECT_EQ(decode(), 0);
    EXPECT_EQ(fetch.s.chunks[0].level, CG_L3);
}

TEST_F(FetchPlanTest, AChunkFailsWithItsStart)
{
    Fetch fetch(2);
    link(1e6);
    add(&fetch);
    const uint64_t id = next()->id;
    EXPECT_EQ(ended(id, false), CG_FETCH_FAIL);
    EXPECT_EQ(ended(id, false), CG_FETCH_DROP) << "ended before";
    EXPECT_FALSE(cg_fetch_is_settled(&fetch.s)) << "until the owner says so";
    EXPECT_TRUE(cg_fetch_failed(&fetch.s, 0));
    EXPECT_TRUE(cg_fetch_is_settled(&fetch.s));
}

TEST_F(FetchPlanTest, AFileThatIsNotNestedAfterAllIsReadAnew)
{
    Fetch fetch(1, 500 * MS);
    link(1e6);
    add(&fetch);
    const cg_fetch_read first = *next();
    EXPECT_EQ(first.file_level, CG_L1);
    EXPECT_EQ(ended(first.id, true), CG_FETCH_KEEP);
    const cg_fetch_read second = *next();
    cg_fetch_not_nested(&plan, &fetch.s, 0);
    EXPECT_EQ(plan.bytes_held, 0u);
    EXPECT_EQ(ended(second.id, true), CG_FETCH_DROP) << "of the other file";
    uint64_t at = 0;
    while (const cg_fetch_read *read = next()) {
        EXPECT_EQ(read->from, at);
        at += read->bytes;
        EXPECT_EQ(ended(read->id, true), CG_FETCH_KEEP);
    }
    EXPECT_EQ(decode(), 0);
    EXPECT_EQ(at, fetch.s.sizes[0].bytes[fetch.s.chunks[0].level]);
}

// A plan of so many chunks stands for a while, but not for a file that it took for a nested one.
TEST_F(FetchPlanTest, AFileThatIsNotNestedAfterAllWaitsForTheNextPlan)
{
    Fetch fetch(70, 8 * SECOND);
    link(2e6);
    add(&fetch);
    uint64_t id = next()->id;
    ended(id, true);
    cg_fetch_not_nested(&plan, &fetch.s, 0);
    // All of the plan but for the file's refinement, and of that its first range.
    for (const cg_fetch_read *read = next(); read != nullptr; read = next()) {
        id = read->id;
        if (read->chunk_index == 0)
            break;
        ended(id, true);
    }
    ended(id, true, SECOND);
    while (const cg_fetch_read *read = next(SECOND))
        ended(read->id, true, SECOND);
    for (int i; (i = decode(SECOND)) >= 0;)
        EXPECT_TRUE(cg_fetch_decode_ended(&plan, &fetch.s, static_cast<uint32_t>(i), true));
    EXPECT_EQ(fetch.s.n_whole, 70u);
}

// So the engine's steps, which take the lock that next() is called with, do not wait for it.
TEST_F(FetchPlanTest, APlanOfManyChunksIsMadeApartIfTheOwnerWantsThat)
{
    start(16, 1000000 * KB);
    link(1e9);
    Fetch few(4, 100 * SECOND);
    add(&few);
    EXPECT_FALSE(cg_fetch_plan_begin(&plan, &speeds, 0)) << "it takes no time";
    EXPECT_NE(next(), nullptr);
    Fetch many(1000, 200 * SECOND);
    add(&many);
    ASSERT_TRUE(cg_fetch_plan_begin(&plan, &speeds, MS));
    cg_fetch_plan_make(&plan);
    cg_fetch_plan_end(&plan);
    EXPECT_FALSE(cg_fetch_plan_begin(&plan, &speeds, MS)) << "nothing has changed";
    while (const cg_fetch_read *read = next(MS))
        ended(read->id, true, MS);
    EXPECT_TRUE(cg_fetch_plan_is_due(&plan));
    EXPECT_EQ(plan.planned_at_ns, MS);
    EXPECT_TRUE(cg_fetch_plan_begin(&plan, &speeds, SECOND));
    EXPECT_EQ(plan.planned_at_ns, SECOND);
    cg_fetch_plan_make(&plan);
    cg_fetch_plan_end(&plan);
    EXPECT_FALSE(cg_fetch_plan_is_due(&plan));
    Fetch more(1000, 300 * SECOND);
    add(&more);
    while (const cg_fetch_read *read = next(2 * SECOND))
        ended(read->id, true, 2 * SECOND);
    EXPECT_EQ(plan.planned_at_ns, SECOND) << "the owner asks";
}

TEST_F(FetchPlanTest, FetchesComeAndGoWhileAPlanIsMadeApart)
{
    link(1e9);
    auto gone = std::make_unique<Fetch>(100, 100 * SECOND);
    Fetch stays(100, 200 * SECOND), late(5000, 300 * SECOND);
    add(gone.get());
    add(&stays);
    ASSERT_TRUE(cg_fetch_plan_begin(&plan, &speeds, 0));
    const size_t capacity = plan.capacity;
    add(&late);
    EXPECT_EQ(plan.capacity, capacity) << "the maker's";
    cg_fetch_plan_make(&plan);
    cg_fetch_plan_remove(&plan, &gone->s);
    gone.reset();
    cg_fetch_plan_end(&plan);
    const cg_fetch_read *first = next();
    ASSERT_NE(first, nullptr);
    EXPECT_EQ(first->fetch, &stays.s);
    ended(first->id, true, MS);
    plan.check_ns = NEVER; // as the reader looks for what is hopeless meanwhile
    ASSERT_TRUE(cg_fetch_plan_begin(&plan, &speeds, MS)) << "the plan stands without what came";
    cg_fetch_plan_make(&plan);
    cg_fetch_plan_end(&plan);
    EXPECT_GT(plan.capacity, capacity);
    uint32_t n_late = 0;
    while (const cg_fetch_read *read = next(MS)) {
        n_late += read->fetch == &late.s;
        ended(read->id, true, MS);
    }
    EXPECT_GT(n_late, 0u);
}

TEST_F(FetchPlanTest, AReadThatNobodyWantsIsDropped)
{
    Fetch fetch(3, 100 * SECOND, CG_L2);
    link(1e9);
    add(&fetch);
    EXPECT_EQ(begin_all(), 3u);
    EXPECT_TRUE(cg_fetch_failed(&fetch.s, 1));
    EXPECT_EQ(ended(3, true), CG_FETCH_DROP) << "behind a failure";
    EXPECT_EQ(ended(1, true), CG_FETCH_KEEP);
    EXPECT_EQ(decode(), 0);
    fetch.s.is_cancelled = true;
    EXPECT_FALSE(cg_fetch_decode_ended(&plan, &fetch.s, 0, true)) << "cancelled meanwhile";
    EXPECT_EQ(fetch.s.n_whole, 0u);
    EXPECT_EQ(plan.bytes_decoding, 0u);
}

// ---- what takes too long ----

// Half of it is recomputed in any case. The other half takes 0.5 s at best, which is in time; what
// lies behind it is read by nobody.
TEST_F(FetchPlanTest, AShortenedLoadIsNotGivenUpForWhatIsNotRead)
{
    Fetch fetch(10, 800 * MS);
    link(500e3);
    speeds.configured_tokens_per_s = 1e4;
    add(&fetch);
    EXPECT_TRUE(cg_fetch_failed(&fetch.s, 5));
    begin_all();
    EXPECT_EQ(cut(), -1);
}

TEST_F(FetchPlanTest, OfALoadOfAFixedLevelThatLevelIsWanted)
{
    Fetch fetch(10, 100 * SECOND, CG_L1);
    link(1e6);
    speeds.decode_thread_ns[CG_L1] = 5e6 / 256;
    add(&fetch);
    EXPECT_DOUBLE_EQ(cg_fetch_wanted(&plan).bytes, 10 * 400e3);
    EXPECT_NEAR(cg_fetch_undecoded_ns(&plan, &speeds), 10 * 5e6, 1);
}

TEST_F(FetchPlanTest, WhatWillBeLateIsGivenUpWhereRecomputingIsFaster)
{
    const struct {
        const char *what;
        double bytes_per_s, tokens_per_s;
        uint64_t now_ns;
        int want; // of ten chunks of 100 kB and 256 tokens in 2 s; -1: goes on
        double doubling_tokens;
        uint32_t end_token;
    } cases[] = {
        {"in time", 1e6, 1e5, 0, -1, 0, 0},
        {"late, but recomputing is not known", 10e3, 0, 0, -1, 0, 0},
        {"late, and recomputing is slower still", 10e3, 10, 0, -1, 0, 0},
        {"late for sure", 10e3, 1e4, 0, 0, 0, 0},
        {"perhaps late: there is time to see", 400e3, 1e4, 0, -1, 0, 0},
        {"perhaps late, and recomputing must begin now", 100e3, 1500, 50 * MS, 0, 0, 0},
        {"all is late: the first by loading", 255e3, 257, 0, -1, 0, 0},
        {"late, and recomputing is slower still so far behind", 10e3, 1e4, 0, -1, 1000, 1000000},
        {"it would not be at the start of a prompt", 10e3, 1e4, 0, 0, 1000, 2560},
    };
    for (const auto &c : cases) {
        Fetch fetch(10, 2 * SECOND);
        start(16, 1000000 * KB);
        link(c.bytes_per_s);
        speeds.configured_tokens_per_s = c.tokens_per_s;
        speeds.configured_doubling_tokens = c.doubling_tokens;
        fetch.s.end_token = c.end_token;
        add(&fetch);
        begin_all(c.now_ns);
        plan.quiet_since_ns = c.now_ns;
        EXPECT_EQ(cut(c.now_ns), c.want) << c.what;
    }
}

// At half the speed not all would be at L1 in time, so that what must arrive goes first.
TEST_F(FetchPlanTest, OfManyChunksTheLastAreRefinedWhenThoseBeforeAreDecoded)
{
    for (const uint64_t staging_bytes : {1000000 * KB, 20000 * KB}) {
        SCOPED_TRACE(staging_bytes);
        Fetch first(CG_EXTENTS_MOST_REFINED, 1300 * MS), second(12, 1300 * MS);
        start(16, staging_bytes);
        link(1e9);
        for (double &ns : speeds.decode_thread_ns)
            ns = 1e5 / 256;
        add(&first);
        add(&second);
        run(1e9);
        EXPECT_TRUE(cg_fetch_is_settled(&first.s));
        EXPECT_TRUE(cg_fetch_is_settled(&second.s)) << "also where memory is short";
        for (uint32_t i = 0; i < 12 && staging_bytes == 1000000 * KB; i++)
            EXPECT_LT(second.s.chunks[i].level, CG_L3) << i;
    }
}

// The engine's steps want the lock under which it is done.
TEST_F(FetchPlanTest, OfManyChunksWhatIsHopelessIsNotLookedForAtEachEnd)
{
    for (const uint32_t n_chunks : {10, 3000}) {
        SCOPED_TRACE(n_chunks);
        Fetch fetch(n_chunks, 3600 * SECOND);
        start(16, 1000000 * KB);
        link(1e9);
        speeds.configured_tokens_per_s = 1e4;
        add(&fetch);
        uint32_t n_passes = 0, n_ends = 0;
        uint64_t checked_ns = NEVER;
        for (uint64_t now_ns = 1; now_ns < 5 * MS; now_ns += 5000, n_ends++) {
            const cg_fetch_read *read = next(now_ns);
            EXPECT_EQ(cut(now_ns), -1);
            n_passes += plan.checked_ns != checked_ns;
            checked_ns = plan.checked_ns;
            if (read != nullptr)
                ended(read->id, true, now_ns);
        }
        EXPECT_EQ(n_ends, 1000u);
        EXPECT_EQ(n_passes, n_chunks > 64 ? 1u : n_ends);
        Fetch other(1, 3600 * SECOND);
        add(&other);
        cut(5 * MS - 1);
        EXPECT_EQ(plan.checked_ns, 5 * MS - 1) << "a fetch came";
        for (uint64_t now_ns = 5 * MS; now_ns < 2 * SECOND; now_ns += MS) {
            cut(now_ns);
            EXPECT_GE(plan.checked_ns + 60 * MS, now_ns) << "it is looked at again";
        }
        cg_fetch_plan_remove(&plan, &other.s);
        cg_fetch_plan_remove(&plan, &fetch.s);
    }
}

// One after the other, in the same moment.
TEST_F(FetchPlanTest, OfManyChunksAllThatIsHopelessIsGivenUpAtOnce)
{
    Fetch a(100, 2 * SECOND), b(100, 2 * SECOND);
    link(10e3);
    speeds.configured_tokens_per_s = 1e6;
    add(&a);
    add(&b);
    begin_all(MS);
    plan.quiet_since_ns = MS;
    uint32_t index, n = 0;
    while (cg_fetch *fetch = cg_fetch_hopeless(&plan, &speeds, MS, &index)) {
        cg_fetch_failed(fetch, index);
        ASSERT_LT(n++, 10u);
    }
    EXPECT_GE(n, 2u);
    EXPECT_NE(plan.check_ns, 0u);
}

// The link is fast, but decoding a load takes longer than recomputing it, and others go before.
TEST_F(FetchPlanTest, WhatOthersDecodeCountsWhereALoadWillBeLate)
{
    for (double decode_ms : {1.0, 100.0}) {
        Fetch a(10, 2 * SECOND), b(10, 2 * SECOND);
        start(16, 1000000 * KB);
        link(1e9);
        for (double &ns : speeds.decode_thread_ns)
            ns = decode_ms * 1e6 / 256;
        speeds.configured_tokens_per_s = 2000; // ten chunks take 1.28 s
        add(&a);
        add(&b);
        uint32_t index = 99;
        const cg_fetch *late = cg_fetch_hopeless(&plan, &speeds, 700 * MS, &index);
        EXPECT_EQ(late, decode_ms > 1 ? &b.s : nullptr) << decode_ms;
        if (late != nullptr) {
            EXPECT_EQ(index, 0u);
        }
        EXPECT_NEAR(cg_fetch_undecoded_ns(&plan, &speeds), 20e6 * decode_ms, 1);
    }
}

// Four at once over Gluster at 25 Mbit/s: one whose bytes were all there, and that was late, lost
// its last chunk to half a second of computing, for the others' reads were counted before its
// decoding.
TEST_F(FetchPlanTest, WhatHasArrivedWaitsForNoBytesOfOthers)
{
    for (const bool has_arrived : {true, false}) {
        Fetch here(2, 2 * SECOND), others(10, 1900 * MS, CG_L3);
        start(16, 1000000 * KB);
        link(1e6); // the others take a second
        speeds.configured_tokens_per_s = 2000;
        add(&here);
        if (has_arrived) {
            while (cg_fetch_first_missing(&here.s) < 2) {
                const uint64_t id = next()->id;
                ASSERT_EQ(ended(id, true), CG_FETCH_KEEP);
            }
        }
        add(&others);
        EXPECT_EQ(cut(1990 * MS), has_arrived ? -1 : 0);
    }
}

// Sixteen at once over 25 Mbit/s: each late one found that computing is faster than the link, and
// the last was answered after five times as long as the link would have taken.
TEST_F(FetchPlanTest, WhatLoadsGiveUpIsComputedOneAfterTheOther)
{
    Fetch a(10, 2 * SECOND), b(10, 2 * SECOND);
    start(16, 1000000 * KB);
    link(100e3); // each takes 10 s, or half of that over a link twice as fast
    speeds.configured_tokens_per_s = 640; // or 4 s
    add(&a);
    add(&b);
    uint32_t index;
    cg_fetch *given_up = cg_fetch_hopeless(&plan, &speeds, 1900 * MS, &index);
    ASSERT_NE(given_up, nullptr);
    cg_fetch_failed(given_up, index);
    EXPECT_EQ(cut(1900 * MS), -1) << "the other would be computed in 8 s";
    cg_fetch_engine_lost(&plan, given_up, &speeds, 1900 * MS);
    cg_fetch_plan_remove(&plan, given_up);
    EXPECT_EQ(cut(1900 * MS), -1) << "now that is the engine's";
    EXPECT_EQ(cut(1900 * MS + 4 * SECOND), 0) << "in 4 s, now that the first is";
}

TEST_F(FetchPlanTest, WhatTheEngineHasToComputeIsWhatItWasToldAndWhatLoadsLostSince)
{
    Fetch fetch(10, 2 * SECOND);
    start(16, 1000000 * KB);
    speeds.configured_tokens_per_s = 640; // 0.4 s a chunk
    add(&fetch);
    const auto engine_s = [&](uint64_t now_ns) {
        return std::round(cg_fetch_engine_ns(&plan, &speeds, now_ns) / 1e6) / 1e3;
    };
    EXPECT_EQ(engine_s(0), 0);
    cg_fetch_engine_told(&plan, 3e9, SECOND);
    EXPECT_EQ(engine_s(SECOND), 3);
    EXPECT_EQ(engine_s(2 * SECOND), 2);
    cg_fetch_engine_add(&plan, 1e9, 2 * SECOND);
    EXPECT_EQ(engine_s(2 * SECOND), 3) << "of which it is told next time";
    cg_fetch_failed(&fetch.s, 5);
    EXPECT_EQ(engine_s(2 * SECOND), 5);
    cg_fetch_engine_told(&plan, 1e9, 2 * SECOND);
    EXPECT_EQ(engine_s(2 * SECOND), 3) << "what fetches have lost that are there goes on counting";
    const uint64_t lost_ns = cg_fetch_engine_lost(&plan, &fetch.s, &speeds, 2 * SECOND);
    cg_fetch_plan_remove(&plan, &fetch.s);
    EXPECT_EQ(engine_s(2 * SECOND), 3);
    cg_fetch_engine_told(&plan, 1e9, 2 * SECOND);
    EXPECT_EQ(engine_s(2 * SECOND), 3) << "who told of the engine has not heard of it";
    cg_fetch_engine_known(&plan, lost_ns);
    EXPECT_EQ(engine_s(2 * SECOND), 3) << "it counts it from now on";
    cg_fetch_engine_told(&plan, 2.5e9, 2 * SECOND);
    EXPECT_EQ(engine_s(2 * SECOND), 2.5);
    EXPECT_EQ(engine_s(9 * SECOND), 0);
    cg_fetch_engine_add(&plan, 1e30, 9 * SECOND);
    EXPECT_EQ(engine_s(9 * SECOND), 86400) << "no sum goes beyond its type";
}

// A document that is loaded, and a long question that is not: what the engine is told of has the
// question, too, and the deadline is before it already.
TEST_F(FetchPlanTest, WhatTheEngineComputesOfAPromptInAnyCaseIsNothingThatItComputesBefore)
{
    for (const bool is_own : {true, false}) {
        Fetch fetch(10, 2 * SECOND);
        start(16, 1000000 * KB);
        link(100e3); // it takes 10 s, or half of that over a link twice as fast
        speeds.configured_tokens_per_s = 640; // or 4 s
        fetch.s.prompt_tokens = fetch.s.end_token + (is_own ? 1280 : 0);
        add(&fetch);
        EXPECT_EQ(cut(1900 * MS), 0) << "nothing is known of the engine";
        cg_fetch_engine_told(&plan, 2e9, 1900 * MS);
        EXPECT_EQ(cut(1900 * MS), is_own ? 0 : -1);
        cg_fetch_engine_told(&plan, 4e9, 1900 * MS);
        EXPECT_EQ(cut(1900 * MS), -1) << "it has another prompt's, too";
    }
}

// An engine's step ends when all that it computes is computed: whoever is loaded meanwhile waits.
TEST_F(FetchPlanTest, ALateLoadGoesOnWhereGivingItUpWouldCostOthersMoreThanItGains)
{
    for (const size_t n_others : {0, 1, 2}) {
        SCOPED_TRACE(n_others);
        Fetch late(10, 2 * SECOND);
        start(16, 1000000 * KB);
        link(100e3);                          // it takes 10 s
        speeds.configured_tokens_per_s = 640; // or 4 s, in which the others wait 4 s each
        add(&late);
        const auto others = add_small(n_others, SECOND);
        EXPECT_EQ(cut(1900 * MS), n_others == 2 ? -1 : 0);
        for (const auto &other : others)
            other->s.is_cancelled = true;
        EXPECT_EQ(cut(1900 * MS), 0) << "nobody waits";
    }
}

// It takes 10 s, or 4 to compute: late in any case, or in time by that. Others are loaded in a
// moment and would be in time, but not behind that.
TEST_F(FetchPlanTest, NoLoadIsGivenUpWhereThatMakesMoreOfThemLate)
{
    const struct {
        uint64_t budget_s, other_s;
        size_t n_others;
        int want;
    } cases[] = {
        {2, 3, 1, -1}, {2, 9, 1, 0}, {4, 3, 1, 0}, {4, 3, 2, -1}, {4, 9, 2, 0},
    };
    for (const auto &c : cases) {
        SCOPED_TRACE(testing::Message()
                     << c.budget_s << " s, " << c.n_others << " of " << c.other_s);
        Fetch late(10, c.budget_s * SECOND);
        start(16, 1000000 * KB);
        link(100e3);
        speeds.configured_tokens_per_s = 640;
        add(&late);
        late.s.is_late = true; // as the plan has it, even over a link twice as fast: it goes last
        const auto others = add_small(c.n_others, c.other_s * SECOND);
        EXPECT_EQ(cut(), c.want);
        for (const auto &other : others)
            other->s.is_cancelled = true;
        EXPECT_EQ(cut(), 0) << "nobody waits";
    }
}

// At the deadline a silent link has had its time, and behind it each load half a second.
TEST_F(FetchPlanTest, WhileTheEngineIsBusyNothingIsGivenUpBecauseTheLinkIsSilent)
{
    for (const double engine_s : {0.0, 5.0}) {
        SCOPED_TRACE(engine_s);
        Fetch fetch(10, 2 * SECOND);
        start(16, 1000000 * KB);
        link(1e6);
        speeds.configured_tokens_per_s = 640;
        add(&fetch);
        fetch.s.ends_at_ns = 3 * SECOND;
        fetch.s.silent_from_ns = 2 * SECOND;
        begin_all();
        const uint64_t from_ns = 2 * SECOND, silent_ns = 2 * SECOND + plan.patience_ns;
        cg_fetch_engine_told(&plan, engine_s * 1e9, from_ns);
        const bool is_busy = engine_s > 0;
        EXPECT_EQ(cut(from_ns), is_busy ? -1 : 0);
        EXPECT_EQ(cg_fetch_overdue(&plan, &speeds, silent_ns), is_busy ? nullptr : &fetch.s);
        EXPECT_EQ(cg_fetch_overdue(&plan, &speeds, silent_ns + 1), nullptr) << "it looks again";
        EXPECT_EQ(cg_fetch_overdue(&plan, &speeds, 8 * SECOND), is_busy ? &fetch.s : nullptr)
            << "the engine is free";
    }
}

TEST_F(FetchPlanTest, WhatACancelledLoadLostNobodyComputes)
{
    Fetch fetch(10, 2 * SECOND);
    start(16, 1000000 * KB);
    speeds.configured_tokens_per_s = 640;
    add(&fetch);
    cg_fetch_failed(&fetch.s, 5);
    fetch.s.is_cancelled = true;
    EXPECT_EQ(cg_fetch_engine_ns(&plan, &speeds, 0), 0);
    cg_fetch_engine_lost(&plan, &fetch.s, &speeds, 0);
    cg_fetch_plan_remove(&plan, &fetch.s);
    EXPECT_EQ(cg_fetch_engine_ns(&plan, &speeds, 0), 0);
}

// What was failed is recomputed after the load, so the load has that much less time.
TEST_F(FetchPlanTest, AShortenedLoadLeavesTimeForRecomputing)
{
    Fetch fetch(4, 2 * SECOND);
    link(1e6);
    speeds.configured_tokens_per_s = 400; // three chunks take 1.92 s
    add(&fetch);
    EXPECT_TRUE(cg_fetch_failed(&fetch.s, 1));
    plan.is_stale = true;
    const std::string text = run(1e6);
    EXPECT_EQ(fetch.s.chunks[0].state, CG_FETCH_DONE) << text;
    EXPECT_EQ(fetch.s.chunks[0].level, CG_L3) << text;
}

TEST_F(FetchPlanTest, ALinkThatFallsSilentIsBelievedToBeSlow)
{
    Fetch fetch(10, 2 * SECOND);
    link(10e6);
    speeds.configured_tokens_per_s = 1e4;
    add(&fetch);
    begin_all();
    uint32_t index = 99;
    EXPECT_EQ(cg_fetch_hopeless(&plan, &speeds, 100 * MS, &index), nullptr);
    EXPECT_GT(cg_fetch_wake_ns(&plan), 100 * MS);
    EXPECT_LT(cg_fetch_wake_ns(&plan), 2 * SECOND) << "nothing ends, and yet it looks again";
    EXPECT_EQ(cg_fetch_hopeless(&plan, &speeds, 1700 * MS, &index), &fetch.s);
    EXPECT_EQ(index, 0u);
}

// A reader's clock goes on: what it asks for is always a little younger than the last end.
TEST_F(FetchPlanTest, ALinkThatFallsSilentInMidLoadIsSeenWhateverWasAskedForSince)
{
    for (const uint64_t step_ns : {UINT64_C(0), UINT64_C(1000), 5 * MS}) {
        SCOPED_TRACE(step_ns);
        Fetch fetch(10, 2 * SECOND);
        start(16, 1000000 * KB);
        link(10e6);
        speeds.configured_tokens_per_s = 2560; // all in a second
        fetch.s.end_token = 2560;
        add(&fetch);
        uint64_t now_ns = 0;
        const auto begin = [&] {
            while (next(now_ns) != nullptr)
                now_ns += step_ns;
        };
        begin();
        for (uint64_t id = 1; id <= 3; id++) {
            ended(id, true, now_ns += MS);
            now_ns += step_ns;
            begin();
        }
        ASSERT_GT(plan.window.n_reading, 0u);
        const uint64_t from_ns = now_ns;
        while (now_ns < 2 * SECOND && cut(now_ns) < 0)
            now_ns += 5 * MS;
        EXPECT_GE(now_ns, from_ns + 50 * MS);
        EXPECT_LE(now_ns, SECOND) << "recomputing can be in time";
    }
}

// What is asked for long after the last end follows a read that hangs, and has its time.
TEST_F(FetchPlanTest, AReadThatHangsMakesNoLinkSilentForThoseThatFollow)
{
    for (const double latency_ms : {0.0, 100.0}) {
        Fetch first(1, 100 * SECOND, CG_L3), second(1, 100 * SECOND, CG_L3);
        start(16, 1000000 * KB);
        link(10e6);
        speeds.latency_ns = latency_ms * 1e6;
        add(&first);
        ASSERT_GT(begin_all(), 0u);
        add(&second);
        const uint64_t asked_ns = SECOND;
        ASSERT_GT(begin_all(asked_ns), 0u);
        const uint64_t answer_ns = asked_ns + static_cast<uint64_t>(latency_ms * 1e6) + 50 * MS;
        bool is_bound;
        cg_fetch_link_bps(&plan, &speeds, answer_ns, &is_bound);
        EXPECT_FALSE(is_bound) << latency_ms;
        cg_fetch_link_bps(&plan, &speeds, answer_ns + 200 * MS, &is_bound);
        EXPECT_TRUE(is_bound) << latency_ms;
    }
}

// So little is under way at first that the first samples are round trips.
TEST_F(FetchPlanTest, OverAFarFastLinkThatIsNotKnownNoLoadIsGivenUp)
{
    const struct {
        double round_trip_ms, mbps;
        uint32_t n_chunks;
        uint64_t l3_bytes;
        double tokens_per_s;
        uint64_t budget_ms;
    } cases[] = {
        {60, 1000, 40, 426 * KB, 8000, 2000},     {100, 1000, 40, 426 * KB, 8000, 2000},
        {20, 1000, 128, 426 * KB, 20000, 2000},   {20, 1000, 512, 426 * KB, 30000, 5000},
        {20, 10000, 128, 1066 * KB, 10000, 2000}, {40, 1000, 40, 426 * KB, 8000, 1000},
        {40, 1000, 20, 426 * KB, 8000, 500},      {150, 1000, 60, 75 * KB, 20000, 2000},
    };
    for (const auto &c : cases)
        for (const double prior_bps : {0.0, 1e9}) {
            SCOPED_TRACE(testing::Message()
                         << c.round_trip_ms << " ms, " << c.mbps << " Mbit/s, " << c.n_chunks
                         << " of " << c.l3_bytes << " bytes, prior " << prior_bps);
            Fetch fetch(c.n_chunks, c.budget_ms * MS);
            set_sizes(&fetch, c.l3_bytes);
            start(16, 1000000 * KB);
            link(0);
            speeds.link.prior_bps = prior_bps;
            for (double &ns : speeds.decode_thread_ns)
                ns = 1e5 / 256;
            speeds.latency_ns = c.round_trip_ms * 1e6;
            speeds.configured_tokens_per_s = c.tokens_per_s;
            EXPECT_FALSE(load(&fetch, c.mbps, c.round_trip_ms).is_given_up);
            // Nor does the next look-up go by it.
            EXPECT_GE(cg_speeds_link_bps(&speeds), 2 * 8e3 * static_cast<double>(c.l3_bytes) *
                                                       c.n_chunks /
                                                       static_cast<double>(c.budget_ms));
        }
}

// Computing takes 51 ms, reading 2.
TEST_F(FetchPlanTest, UntilTheStoreHasAnsweredTheRestOfItsWayCounts)
{
    for (const bool has_answered : {false, true}) {
        SCOPED_TRACE(has_answered);
        Fetch fetch(2);
        fetch.s.policy = CG_POLICY_MIN_DELAY;
        start(16, 1000000 * KB);
        link(125e6);
        speeds.latency_ns = speeds.way_ns = 150e6;
        speeds.configured_tokens_per_s = 10000;
        add(&fetch);
        EXPECT_EQ(cut(), 0) << "nothing is asked for yet";
        ASSERT_GT(begin_all(), 0u);
        EXPECT_EQ(cut(90 * MS), 0);
        if (has_answered)
            ended(1, true, 90 * MS);
        EXPECT_EQ(cut((has_answered ? 90 : 110) * MS), -1);
    }
}

// A side of the engine that only loads is told of the store's answers by nothing else.
TEST_F(FetchPlanTest, AReadThatComesSoonerSaysHowFarTheStoreIs)
{
    Fetch first(2), second(2);
    start(16, 1000000 * KB);
    link(125e6);
    speeds.latency_ns = speeds.way_ns = 500e6;
    speeds.configured_tokens_per_s = 10000;
    second.s.policy = CG_POLICY_MIN_DELAY;
    add(&first);
    ASSERT_GT(begin_all(), 0u);
    ended(1, true, 10 * MS);
    cg_fetch_plan_remove(&plan, &first.s);
    add(&second);
    ASSERT_GT(begin_all(10 * MS), 0u);
    EXPECT_EQ(cut(10 * MS), -1);
    EXPECT_EQ(speeds.latency_ns, 500e6);
}

TEST_F(FetchPlanTest, AfterTwoLoadsALookUpTakesNoSteadyFarLinkForAFasterOne)
{
    for (const double round_trip_ms : {10.0, 20.0, 40.0, 60.0})
        for (double mbps = 86; mbps < 3000; mbps *= 2) {
            SCOPED_TRACE(testing::Message() << round_trip_ms << " ms, " << mbps << " Mbit/s");
            start(16, 1000000 * KB);
            link(0);
            speeds.latency_ns = round_trip_ms * 1e6;
            for (const uint64_t from_ns : {UINT64_C(0), 10 * SECOND}) {
                Fetch fetch(40, from_ns + 2 * SECOND);
                set_sizes(&fetch, 426 * KB);
                load(&fetch, mbps, round_trip_ms, 0, from_ns);
            }
            EXPECT_GT(speeds.link.n_samples, 3u);
            EXPECT_LE(cg_speeds_link_bps(&speeds), 1.3e6 * mbps);
        }
}

// An engine that has started anew: a prefix of others is in the page cache, its own document not.
TEST_F(FetchPlanTest, WhatThePageCacheBringsStakesLittleOnALinkThatIsNotKnown)
{
    const struct {
        double mbps, round_trip_ms;
        uint64_t l3_bytes;
    } cases[] = {{40, 20, 426 * KB}, {40, 0.5, 426 * KB}, {10, 20, 75 * KB}, {10, 0.5, 75 * KB}};
    for (const auto &c : cases)
        for (const uint32_t n_cached : {0, 2, 4, 6}) {
            SCOPED_TRACE(testing::Message() << c.mbps << " Mbit/s, " << c.round_trip_ms << " ms, "
                                            << n_cached << " of " << c.l3_bytes << " cached");
            Fetch fetch(20, 2 * SECOND);
            set_sizes(&fetch, c.l3_bytes);
            start(16, 1000000 * KB);
            link(0);
            speeds.latency_ns = c.round_trip_ms * 1e6;
            speeds.configured_tokens_per_s = 1000;
            const Loaded loaded = load(&fetch, c.mbps, c.round_trip_ms, n_cached);
            EXPECT_FALSE(loaded.is_given_up);
            // What must arrive of the others, and no more than 512 KiB besides.
            const double bytes = (20.0 - n_cached) * static_cast<double>(c.l3_bytes) + 512 * KIB;
            EXPECT_LE(static_cast<double>(loaded.floors_ns),
                      bytes * 8e3 / c.mbps + 2e6 * c.round_trip_ms);
            EXPECT_LE(loaded.ended_ns, 2 * SECOND);
        }
}

TEST_F(FetchPlanTest, WhileNothingIsKnownOfAFarLinkRangesAreAsLargeAsItIsFar)
{
    const struct {
        double latency_ms;
        uint64_t range;
        cg_policy policy = CG_POLICY_TTFT_BUDGET;
    } cases[] = {{0, 16 * KIB},   {2, 16 * KIB},    {10, 40 * KIB},
                 {32, 128 * KIB}, {500, 128 * KIB}, {500, 16 * KIB, CG_POLICY_MIN_DELAY}};
    for (const auto &c : cases) {
        Fetch fetch(10);
        for (uint32_t i = 0; i < 10; i++)
            for (uint32_t l = CG_L1; l < CG_N_LEVELS; l++)
                fetch.s.sizes[i].bytes[l] = 16384 * KIB >> l;
        fetch.s.policy = c.policy;
        start(16, 1000000 * KB);
        link(0);
        speeds.latency_ns = c.latency_ms * 1e6;
        add(&fetch);
        EXPECT_EQ(begin_all(), 4u);
        for (uint32_t i = 0; i < 4; i++)
            EXPECT_NEAR(static_cast<double>(plan.reads[i].bytes), static_cast<double>(c.range),
                        8192);
    }
}

TEST_F(FetchPlanTest, WhatHangsOfALoadThatEndsEarlyIsGivenUpAtItsEnd)
{
    Fetch fetch(10, 2 * SECOND);
    link(1e6);
    add(&fetch);
    fetch.s.ends_at_ns = 5 * SECOND / 2;
    const uint32_t n = begin_all();
    ASSERT_GT(n, 0u);
    cg_fetch_failed(&fetch.s, 0);
    cg_fetch_plan_remove(&plan, &fetch.s);
    EXPECT_EQ(cg_fetch_give_up(&plan, 5 * SECOND / 2 - 1), nullptr);
    EXPECT_LE(cg_fetch_wake_ns(&plan), 5 * SECOND / 2);
    for (uint32_t i = 0; i < n; i++)
        EXPECT_NE(cg_fetch_give_up(&plan, 5 * SECOND / 2), nullptr);
}

// Where half a second is less than what is under way should take.
TEST_F(FetchPlanTest, ATimeThatIsPutOffIsNoneInWhichALinkMayBeSilent)
{
    Fetch fetch(40, 2 * SECOND);
    start(16, 1000000 * KB);
    link(200e3); // it takes 20 s, or three hours to compute
    speeds.configured_tokens_per_s = 1;
    add(&fetch);
    fetch.s.ends_at_ns = fetch.s.silent_from_ns = 2 * SECOND;
    begin_all();
    ended(1, true, 2 * SECOND - 1);
    begin_all(2 * SECOND - 1);
    plan.patience_ns = 2 * SECOND;
    for (uint64_t ns = 2 * SECOND; ns < 4 * SECOND - 1; ns += SECOND / 2)
        EXPECT_EQ(cg_fetch_overdue(&plan, &speeds, ns), nullptr) << ns;
    EXPECT_EQ(cg_fetch_overdue(&plan, &speeds, 4 * SECOND), &fetch.s);
}

// Recomputing takes longer than the link may need: only the deadline decides, and what is missing.
TEST_F(FetchPlanTest, ASilentLinkHasItsTimeUntilTheDeadline)
{
    for (const uint64_t grace : {SECOND / 2, 60 * SECOND, NEVER}) {
        Fetch fetch(10, 2 * SECOND);
        start(16, 1000000 * KB);
        link(10e6);
        speeds.configured_tokens_per_s = 100;
        add(&fetch);
        fetch.s.silent_from_ns = fetch.s.deadline_ns;
        fetch.s.ends_at_ns = grace == NEVER ? NEVER : 2 * SECOND + grace;
        begin_all();
        uint32_t index = 99;
        EXPECT_EQ(cg_fetch_hopeless(&plan, &speeds, 2 * SECOND - 1, &index), nullptr);
        EXPECT_EQ(cg_fetch_wake_ns(&plan), 2 * SECOND) << "it looks again at the deadline";
        const bool is_cut = cg_fetch_hopeless(&plan, &speeds, 2 * SECOND, &index) != nullptr;
        EXPECT_EQ(is_cut, grace == SECOND / 2) << "else all may come before it must end";
        if (is_cut) {
            EXPECT_EQ(index, 0u);
        }
    }
}

TEST_F(FetchPlanTest, ALoadEndsWithItsBudgetOrAtTwiceTheTimeThatItsFloorsTake)
{
    Fetch fetch(10, 2 * SECOND); // 10 chunks of 100 kB
    start(16, 1000000 * KB);
    const auto end_ns = [&](uint64_t now_ns) {
        cg_fetch_set_end(&fetch.s, &speeds, now_ns);
        return fetch.s.ends_at_ns;
    };
    EXPECT_EQ(end_ns(SECOND), 5 * SECOND / 2) << "the link is not known";
    link(1e6);
    EXPECT_EQ(end_ns(SECOND), SECOND + 2 * SECOND + SECOND / 2) << "a second a megabyte";
    EXPECT_EQ(end_ns(3 * SECOND), 3 * SECOND + 2 * SECOND + SECOND / 2) << "late as it is";
    link(1e9);
    EXPECT_EQ(end_ns(SECOND), 5 * SECOND / 2);
    fetch.s.deadline_ns = NEVER;
    EXPECT_EQ(end_ns(SECOND), SECOND + 86400 * SECOND + SECOND / 2);
    fetch.s.policy = CG_POLICY_MIN_DELAY;
    EXPECT_EQ(end_ns(SECOND), NEVER);
}

TEST_F(FetchPlanTest, BehindItsDeadlineALoadEndsOnceNothingArrives)
{
    const struct {
        const char *what;
        cg_policy policy;
        double prior_bps, measured; // bytes/s
        uint64_t patience_ns;       // 0: more than half a second
    } cases[] = {
        {"a belief is no measurement", CG_POLICY_TTFT_BUDGET, 1e3, 0, SECOND / 2},
        {"min_delay", CG_POLICY_MIN_DELAY, 0, 0, SECOND / 2},
        {"a link of some speed", CG_POLICY_TTFT_BUDGET, 0, 400e3, SECOND / 2},
        {"one on which a range takes long", CG_POLICY_TTFT_BUDGET, 0, 20e3, 0},
    };
    for (const auto &c : cases) {
        SCOPED_TRACE(c.what);
        Fetch fetch(10, 2 * SECOND);
        fetch.s.policy = c.policy;
        start(16, 1000000 * KB);
        link(c.measured);
        speeds.link.prior_bps = c.prior_bps;
        cg_fetch_set_end(&fetch.s, &speeds, 0);
        EXPECT_GT(fetch.s.ends_at_ns, 4 * SECOND);
        add(&fetch);
        begin_all();
        uint64_t end_ns = 2 * SECOND + (c.patience_ns > 0 ? c.patience_ns : plan.patience_ns);
        EXPECT_EQ(plan.patience_ns > SECOND / 2, c.patience_ns == 0);
        EXPECT_EQ(cg_fetch_overdue(&plan, &speeds, end_ns - 1), nullptr);
        EXPECT_LE(cg_fetch_wake_ns(&plan), end_ns);
        ended(1, true, end_ns - 1); // it goes on
        EXPECT_EQ(cg_fetch_overdue(&plan, &speeds, end_ns), nullptr);
        begin_all(end_ns);
        end_ns += plan.patience_ns - 1;
        EXPECT_EQ(cg_fetch_overdue(&plan, &speeds, end_ns - 1), nullptr);
        EXPECT_EQ(cg_fetch_overdue(&plan, &speeds, end_ns), &fetch.s);
        EXPECT_EQ(cg_fetch_overdue(&plan, &speeds, end_ns), nullptr) << "once";
        cg_fetch_failed(&fetch.s, cg_fetch_first_missing(&fetch.s));
        for (uint32_t n = plan.window.n_reading; n > 0; n--)
            EXPECT_NE(cg_fetch_give_up(&plan, end_ns), nullptr) << "its reads end with it";
        cg_fetch_plan_remove(&plan, &fetch.s);
    }
}

TEST_F(FetchPlanTest, BehindItsTimeALoadGoesOnWhereBytesArriveAndComputingTakesLonger)
{
    for (const double tokens_per_s : {100.0, 1e6, 0.0}) { // ten chunks take 26 s, none, who knows
        SCOPED_TRACE(tokens_per_s);
        Fetch fetch(10, 2 * SECOND);
        start(16, 1000000 * KB);
        link(100e3); // or 10 s over the link
        speeds.configured_tokens_per_s = tokens_per_s;
        add(&fetch);
        fetch.s.ends_at_ns = 5 * SECOND / 2;
        begin_all(2 * SECOND);
        ended(1, true, 5 * SECOND / 2 - 1);
        const bool goes_on = tokens_per_s == 100;
        EXPECT_EQ(cg_fetch_overdue(&plan, &speeds, 5 * SECOND / 2), goes_on ? nullptr : &fetch.s);
        EXPECT_EQ(fetch.s.ends_at_ns, goes_on ? 3 * SECOND : NEVER) << "then it looks again";
        EXPECT_EQ(cg_fetch_give_up(&plan, 5 * SECOND / 2) == nullptr, goes_on) << "its reads, too";
        if (!goes_on)
            continue;
        // Computing would take 25.6 s. By then others may have come before it again and again.
        const uint64_t computed_ns = fetch.s.computed_by_ns;
        EXPECT_NEAR(static_cast<double>(computed_ns), 28.1e9, 0.1e9);
        for (uint64_t now_ns = 3 * SECOND; now_ns < computed_ns; now_ns += SECOND / 2) {
            ended(plan.last_id, true, now_ns - 1);
            cg_fetch_engine_told(&plan, 1000e9, now_ns);
            EXPECT_EQ(cg_fetch_overdue(&plan, &speeds, now_ns), nullptr);
        }
        EXPECT_EQ(cg_fetch_overdue(&plan, &speeds, computed_ns + SECOND / 2), &fetch.s);
    }
}

// Sixty-four at once: one that was given up when its time was over held up all that were loaded
// next, and seven went at once, each of them sure that it would be computed next.
TEST_F(FetchPlanTest, BehindItsTimeALoadGoesOnWhereGivingItUpWouldCostOthersMoreThanItGains)
{
    const struct {
        size_t n_others;
        uint64_t other_s;
        bool are_cancelled, goes_on;
    } cases[] = {{0, 1, false, false}, {1, 1, false, false}, {3, 1, false, true},
                 {3, 1, true, false},  {1, 4, false, true},  {1, 9, false, false}};
    for (const auto &c : cases) {
        SCOPED_TRACE(testing::Message() << c.n_others << " of " << c.other_s);
        Fetch late(10, 2 * SECOND);
        start(16, 1000000 * KB);
        link(100e3); // it takes 10 s, or 4 to compute
        speeds.configured_tokens_per_s = 640;
        add(&late);
        late.s.is_late = true;
        late.s.ends_at_ns = 5 * SECOND / 2;
        begin_all(2 * SECOND);
        ended(1, true, 5 * SECOND / 2 - 1);
        const auto others = add_small(c.n_others, c.other_s * SECOND);
        for (const auto &other : others)
            other->s.is_cancelled = c.are_cancelled;
        late.s.is_late = true;
        EXPECT_EQ(cg_fetch_overdue(&plan, &speeds, 5 * SECOND / 2), c.goes_on ? nullptr : &late.s);
    }
}

TEST_F(FetchPlanTest, LoadsThatGoOnBehindTheirTimeCountWhatTheEngineWouldComputeOfTheOthers)
{
    for (const bool is_shorter : {false, true}) {
        SCOPED_TRACE(is_shorter);
        Fetch a(10, 2 * SECOND), b(10, 2 * SECOND), gone(10, 2 * SECOND);
        start(16, 1000000 * KB);
        link(100e3); // each takes 10 s, or 25.6 to compute
        speeds.configured_tokens_per_s = 100;
        for (Fetch *fetch : {&a, &b, &gone}) {
            add(fetch);
            fetch->s.ends_at_ns = 5 * SECOND / 2;
        }
        gone.s.computed_by_ns = 1;
        gone.s.is_cancelled = true;
        begin_all(2 * SECOND);
        ended(1, true, 5 * SECOND / 2 - 1);
        if (is_shorter) // half of it is the engine's already, and counts once
            cg_fetch_failed(&a.s, 5);
        cg_fetch_overdue(&plan, &speeds, 5 * SECOND / 2);
        const auto [first_ns, last_ns] = std::minmax({a.s.computed_by_ns, b.s.computed_by_ns});
        EXPECT_NEAR(static_cast<double>(first_ns), 28.1e9, 0.2e9);
        EXPECT_NEAR(static_cast<double>(last_ns), 53.7e9, 0.2e9);
    }
}

// A thread that gets no CPU for a while takes a link for silent.
TEST_F(FetchPlanTest, BehindItsTimeALoadIsNotGivenUpBecauseNothingCameForAMoment)
{
    for (const uint64_t quiet_ns : {450 * MS, 600 * MS}) {
        Fetch fetch(10, 2 * SECOND);
        start(16, 1000000 * KB);
        link(1e6); // it takes 1 s, or 26 s to compute
        speeds.configured_tokens_per_s = 100;
        add(&fetch);
        fetch.s.ends_at_ns = 5 * SECOND / 2;
        fetch.s.silent_from_ns = 2 * SECOND;
        begin_all(SECOND);
        ended(1, true, 5 * SECOND / 2 - quiet_ns);
        begin_all(5 * SECOND / 2 - quiet_ns);
        bool is_bound;
        cg_fetch_link_bps(&plan, &speeds, 5 * SECOND / 2, &is_bound);
        EXPECT_TRUE(is_bound);
        EXPECT_EQ(cg_fetch_overdue(&plan, &speeds, 5 * SECOND / 2),
                  quiet_ns < plan.patience_ns ? nullptr : &fetch.s);
    }
}

TEST_F(FetchPlanTest, ALoadThatHadNoTimeLeftAtItsStartHasTheTimeThatReadingItTakes)
{
    for (const uint64_t start_ns : {SECOND, 3 * SECOND}) {
        Fetch fetch(10, 2 * SECOND);
        start(16, 1000000 * KB);
        link(1e6);
        cg_fetch_set_end(&fetch.s, &speeds, start_ns);
        EXPECT_NEAR(static_cast<double>(fetch.s.silent_from_ns), start_ns == SECOND ? 2e9 : 5e9,
                    1e6);
        EXPECT_NEAR(static_cast<double>(fetch.s.ends_at_ns), start_ns == SECOND ? 3.5e9 : 5.5e9,
                    1e6);
    }
}

TEST_F(FetchPlanTest, AReadIsGivenUpOnceAndByTheLengthOfTheQueue)
{
    Fetch fetch(3, 100 * SECOND, CG_L2);
    link(800e3); // 200 kB take a quarter of a second
    add(&fetch);
    EXPECT_EQ(cg_fetch_wake_ns(&plan), NEVER);
    const cg_fetch_read first = *next(), second = *next();
    EXPECT_EQ(first.give_up_ns,
              TIMEOUT + static_cast<uint64_t>(2e9 * static_cast<double>(first.bytes) / 800e3));
    EXPECT_GT(second.give_up_ns, first.give_up_ns);
    EXPECT_EQ(cg_fetch_give_up(&plan, first.give_up_ns - 1), nullptr);
    EXPECT_EQ(cg_fetch_give_up(&plan, first.give_up_ns)->id, first.id);
    EXPECT_EQ(cg_fetch_give_up(&plan, first.give_up_ns), nullptr);
    EXPECT_EQ(plan.window.n_reading, 2u) << "it is under way until it has ended";
    EXPECT_EQ(ended(first.id, false), CG_FETCH_FAIL);
    EXPECT_EQ(cg_fetch_find_read(&plan, first.id), nullptr);
    EXPECT_EQ(cg_fetch_find_read(&plan, 0), nullptr);
}

TEST_F(FetchPlanTest, ASlowLinkDoesNotOverflowTheTimeOut)
{
    Fetch fetch(1, 100 * SECOND, CG_L2);
    link(0);
    speeds.link.prior_bps = 1e-9;
    add(&fetch);
    EXPECT_EQ(next(NEVER - SECOND)->give_up_ns, NEVER);
    ended(1, false);
    cg_fetch_plan_remove(&plan, &fetch.s);
    Fetch other(1, 100 * SECOND, CG_L2);
    add(&other);
    EXPECT_EQ(next(0)->give_up_ns, TIMEOUT + 3600 * SECOND);
}

TEST_F(FetchPlanTest, TheWholePrefixGrowsInOrder)
{
    Fetch fetch(5, 100 * SECOND, CG_L2);
    link(1e9);
    cg_fetch_cut(&fetch.s, 1, 5);
    add(&fetch);
    EXPECT_EQ(begin_all(), 4u);
    const struct {
        uint32_t chunk_index, n_whole;
    } steps[] = {{2, 0}, {1, 2}, {4, 2}, {3, 4}};
    for (const auto &step : steps) {
        ASSERT_EQ(ended(step.chunk_index, true), CG_FETCH_KEEP);
        EXPECT_EQ(decode(), static_cast<int>(step.chunk_index));
        EXPECT_FALSE(cg_fetch_is_settled(&fetch.s));
        EXPECT_TRUE(cg_fetch_decode_ended(&plan, &fetch.s, step.chunk_index, true));
        EXPECT_EQ(fetch.s.n_whole, step.n_whole) << step.chunk_index;
    }
    EXPECT_TRUE(cg_fetch_is_settled(&fetch.s));
}

// A link, chunks and a decoder driven with a clock of the test's own. Whatever fails or is late,
// the sums agree, the limits hold and every fetch comes to its end.
TEST_F(FetchPlanTest, RandomRunsEnd)
{
    for (uint32_t seed = 0; seed < 1000; seed++) {
        SCOPED_TRACE(testing::Message() << "seed " << seed);
        std::mt19937 random(seed);
        const uint32_t depth = 1 + random() % 8;
        start(depth, (1 + random() % 40) * 100 * KB);
        link(random() % 2 ? 0 : 1e3 * (1 + random() % 10000));
        if (random() % 2)
            speeds.configured_tokens_per_s = 1 + random() % 10000;
        const bool removes = random() % 2 > 0;
        std::vector<std::unique_ptr<Fetch>> fetches, removed;
        for (uint32_t i = 0; i < 1 + seed % 4; i++) {
            const bool fixed = random() % 4 == 0;
            const uint32_t n_chunks = seed % 10 == 0 ? 30 + random() % 40 : random() % 12;
            fetches.push_back(
                std::make_unique<Fetch>(n_chunks, random() % 9 * SECOND,
                                        static_cast<uint8_t>(fixed ? 1 + random() % 3 : 0)));
            cg_fetch *fetch = &fetches.back()->s;
            const uint32_t n = random() % 8;
            if (!fixed && n < 2) {
                fetch->policy = n == 0 ? CG_POLICY_MIN_DELAY : CG_POLICY_PAPER;
                for (uint32_t j = 0; j < fetch->n_chunks; j++)
                    fetch->chunks[j].is_nested = false;
            }
            const bool guesses = random() % 4 == 0;
            for (uint32_t j = 0; j < fetch->n_chunks; j++)
                fetch->chunks[j].is_guessed = guesses && random() % 2 == 0;
            add(fetches.back().get());
        }
        uint64_t now_ns = 0;
        std::vector<uint64_t> under_way; // ids
        std::vector<cg_fetch_ref> being_decoded;
        const auto remove_settled = [&] {
            for (size_t i = 0; i < fetches.size(); i++) {
                const cg_fetch *s = &fetches[i]->s;
                if (!cg_fetch_is_settled(s) ||
                    std::any_of(being_decoded.begin(), being_decoded.end(),
                                [&](const cg_fetch_ref &ref) { return ref.fetch == s; }))
                    continue;
                for (uint32_t j = 0; j < s->n_whole; j++)
                    EXPECT_EQ(s->chunks[s->first + j].state, CG_FETCH_DONE);
                cg_fetch_plan_remove(&plan, &fetches[i]->s);
                removed.push_back(std::move(fetches[i]));
                fetches.erase(fetches.begin() + static_cast<long>(i--));
            }
            // Its owner keeps it for the reads that are under way, and no longer.
            for (size_t i = 0; i < removed.size(); i++)
                if (std::none_of(under_way.begin(), under_way.end(), [&](uint64_t id) {
                        return cg_fetch_find_read(&plan, id)->fetch == &removed[i]->s;
                    }))
                    removed.erase(removed.begin() + static_cast<long>(i--));
        };
        // As the reader does; meanwhile others end and go.
        const bool is_apart = seed % 20 == 10; // then three fetches are of many chunks
        const auto plan_apart = [&] {
            if (!is_apart || !cg_fetch_plan_begin(&plan, &speeds, now_ns))
                return;
            if (random() % 40 == 0 && fetches.size() < 6) {
                fetches.push_back(std::make_unique<Fetch>(random() % 80, now_ns + SECOND));
                add(fetches.back().get());
            }
            check_todo(); // of what is being planned, too
            if (!being_decoded.empty() && random() % 4 == 0) {
                const cg_fetch_ref ref = being_decoded.back();
                being_decoded.pop_back();
                if (!cg_fetch_decode_ended(&plan, ref.fetch, ref.chunk_index, true))
                    cg_fetch_failed(ref.fetch, ref.chunk_index);
                check_todo();
            }
            if (removes && random() % 40 == 0 && !fetches.empty())
                fetches[random() % fetches.size()]->s.is_cancelled = true;
            if (removes)
                remove_settled();
            cg_fetch_plan_make(&plan);
            cg_fetch_plan_end(&plan);
        };
        for (uint32_t step = 0; step < 100000; step++) {
            uint32_t index;
            if (removes && random() % 100 == 0 && !fetches.empty())
                fetches[random() % fetches.size()]->s.is_cancelled = true;
            if (removes)
                remove_settled();
            while (cg_fetch *late = cg_fetch_hopeless(&plan, &speeds, now_ns, &index)) {
                ASSERT_LT(index, late->wanted_end);
                cg_fetch_failed(late, index);
                check_todo();
            }
            for (bool goes_on = true; goes_on;) {
                goes_on = false;
                plan_apart();
                while (cg_fetch *s = cg_fetch_next_decode(&plan, &speeds, now_ns, &index)) {
                    ASSERT_TRUE(cg_fetch_wants(s, index));
                    ASSERT_GE(s->chunks[index].arrived_bytes,
                              s->sizes[index].bytes[s->chunks[index].level]);
                    being_decoded.push_back({s, index});
                    check_todo();
                    plan_apart();
                }
                plan_apart();
                const cg_fetch_read *read = next(now_ns);
                goes_on = plan.must_free_bytes > 0 || cg_fetch_plan_is_due(&plan);
                if (read != nullptr) {
                    ASSERT_TRUE(cg_fetch_wants(read->fetch, read->chunk_index));
                    under_way.push_back(read->id);
                    goes_on = true;
                }
                check_todo();
            }
            ASSERT_LE(plan.window.n_reading, depth);
            ASSERT_EQ(plan.window.n_reading, under_way.size());
            if (!being_decoded.empty() && (under_way.empty() || random() % 2)) {
                const cg_fetch_ref ref = being_decoded.back();
                being_decoded.pop_back();
                if (!cg_fetch_decode_ended(&plan, ref.fetch, ref.chunk_index, random() % 20 > 0))
                    cg_fetch_failed(ref.fetch, ref.chunk_index);
                check_todo();
                continue;
            }
            if (under_way.empty())
                break;
            if (const cg_fetch_read *late = cg_fetch_give_up(&plan, now_ns)) {
                const cg_fetch_read read = *late;
                under_way.erase(std::find(under_way.begin(), under_way.end(), read.id));
                if (ended(read.id, false, now_ns) == CG_FETCH_FAIL)
                    cg_fetch_failed(read.fetch, read.chunk_index);
                check_todo();
                continue;
            }
            if (plan.check_ns == 0)
                continue; // a fetch came
            const uint64_t wake_ns = cg_fetch_wake_ns(&plan);
            ASSERT_GT(wake_ns, now_ns); // else the reader would spin
            if (random() % 4 == 0) {    // nothing comes until the plan wants to be asked
                now_ns = wake_ns;
                continue;
            }
            now_ns += random() % (20 * MS);
            const size_t at = random() % under_way.size();
            const cg_fetch_read read = *cg_fetch_find_read(&plan, under_way[at]);
            under_way.erase(under_way.begin() + static_cast<long>(at));
            const cg_fetch_verdict verdict = ended(read.id, random() % 20 != 0, now_ns);
            check_todo();
            const cg_fetch_chunk *chunk = &read.fetch->chunks[read.chunk_index];
            if (verdict == CG_FETCH_KEEP && chunk->is_guessed) {
                const uint64_t kb = (50 + random() % 100) * KB;
                const uint64_t bytes[] = {0, random() % 8 == 0 ? 0 : 6 * kb, 3 * kb, kb};
                if (cg_fetch_sized(&plan, read.fetch, read.chunk_index, bytes) != CG_OK)
                    cg_fetch_failed(read.fetch, read.chunk_index);
            } else if (verdict == CG_FETCH_FAIL &&
                       !cg_fetch_shorter(&plan, read.fetch, read.chunk_index))
                cg_fetch_failed(read.fetch, read.chunk_index);
            else if (verdict == CG_FETCH_KEEP && read.from == 0 && random() % 20 == 0 &&
                     chunk->is_nested)
                cg_fetch_not_nested(&plan, read.fetch, read.chunk_index);
            else if (verdict == CG_FETCH_KEEP && read.from == 0 && random() % 20 == 0) {
                const uint64_t kb = (50 + random() % 100) * KB,
                               bytes[] = {9 * kb, 6 * kb, 3 * kb, kb};
                cg_fetch_replaced(&plan, read.fetch, read.chunk_index, bytes);
            }
            check_todo();
        }
        for (const auto &fetch : fetches) {
            EXPECT_TRUE(cg_fetch_is_settled(&fetch->s));
            for (uint32_t i = 0; i < fetch->s.n_whole; i++)
                EXPECT_EQ(fetch->s.chunks[i].state, CG_FETCH_DONE);
            cg_fetch_plan_remove(&plan, &fetch->s);
        }
        EXPECT_EQ(plan.window.n_reading, 0u);
        EXPECT_EQ(plan.window.bytes_reading, 0u);
        EXPECT_EQ(plan.bytes_decoding, 0u);
        EXPECT_EQ(plan.bytes_held, 0u);
    }
}

} // namespace
