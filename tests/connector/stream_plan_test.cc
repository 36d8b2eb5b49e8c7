#include "connector/stream_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

namespace
{

constexpr uint64_t MS = 1000000, SECOND = 1000 * MS, KB = 1000;
constexpr uint64_t NEVER = UINT64_MAX;
constexpr uint64_t TIMEOUT = 10 * SECOND;

// A stream of chunks of 10 tokens that are all alike: 800, 400, 200 and 100 kB at L0 to L3.
class Stream
{
  public:
    explicit Stream(uint32_t n_chunks, uint64_t deadline_ns = 100 * SECOND, uint8_t level = CG_L2)
    {
        EXPECT_EQ(cg_stream_init(&s, n_chunks), CG_OK);
        s.deadline_ns = deadline_ns;
        for (uint32_t i = 0; i < n_chunks; i++) {
            s.levels[i] = level;
            s.sizes[i].n_tokens = 10;
            for (uint32_t l = 0; l < CG_N_LEVELS; l++)
                s.sizes[i].bytes[l] = 800 * KB >> l;
        }
    }
    ~Stream()
    {
        cg_stream_destroy(&s);
    }
    Stream(const Stream &) = delete;
    Stream &operator=(const Stream &) = delete;
    cg_stream s;
};

class StreamPlanTest : public testing::Test
{
  protected:
    void SetUp() override
    {
        start(16, 1000000 * KB);
        link(0);
    }
    void TearDown() override
    {
        cg_stream_plan_destroy(&plan);
    }
    void start(uint32_t depth, uint64_t staging_bytes)
    {
        cg_stream_plan_destroy(&plan);
        ASSERT_EQ(cg_stream_plan_init(&plan, depth, staging_bytes, TIMEOUT), CG_OK);
    }
    // What is believed of the link, without a sample: 0 is unknown.
    void link(double bytes_per_s)
    {
        speeds = {};
        speeds.n_threads = 1;
        cg_estimator_init(&speeds.link, CG_ESTIMATOR_HARMONIC, 8 * bytes_per_s);
    }
    cg_stream_verdict ended(uint64_t id, bool has_arrived, uint64_t now_ns = 0)
    {
        const cg_stream_read *read = cg_stream_find_read(&plan, id);
        const uint64_t n_bytes = has_arrived && read != nullptr ? read->bytes : 0;
        return cg_stream_read_ended(&plan, &speeds, id, n_bytes, now_ns);
    }
    const cg_stream_read *next(uint64_t now_ns = 0)
    {
        return cg_stream_next_read(&plan, &speeds, now_ns);
    }
    uint32_t begin_all(uint64_t now_ns = 0)
    {
        uint32_t n = 0;
        while (next(now_ns) != nullptr)
            n++;
        return n;
    }
    cg_stream_plan plan = {};
    cg_speeds speeds = {};
};

TEST_F(StreamPlanTest, AsManyReadsAreUnderWayAsTheLinkMovesInAQuarterOfASecond)
{
    const struct {
        const char *what;
        double link_bytes_per_s;
        uint32_t depth;
        uint64_t staging_bytes;
        uint32_t want;
    } cases[] = {
        {"unknown link", 0, 16, 100000 * KB, 1},
        {"slow link: two at least", 1000, 16, 100000 * KB, 2},
        {"a quarter of a second is one chunk", 800e3, 16, 100000 * KB, 2},
        {"three chunks", 2400e3, 16, 100000 * KB, 3},
        {"a byte less than three chunks", 2399e3, 16, 100000 * KB, 2},
        {"depth", 1e9, 5, 100000 * KB, 5},
        {"depth of one", 1e9, 1, 100000 * KB, 1},
        {"staging memory", 1e9, 16, 800 * KB, 4},
        {"staging memory of less than a chunk: one at least", 1e9, 16, 1, 1},
        {"no more than there are", 1e9, 64, 100000 * KB, 20},
    };
    for (const auto &c : cases) {
        Stream stream(20);
        stream.s.has_fixed_level = true; // L2: 200 kB
        start(c.depth, c.staging_bytes);
        link(c.link_bytes_per_s);
        cg_stream_plan_add(&plan, &stream.s);
        EXPECT_EQ(begin_all(), c.want) << c.what;
        EXPECT_EQ(plan.bytes_reading, c.want * 200 * KB) << c.what;
        EXPECT_EQ(stream.s.next_index, c.want) << c.what;
    }
}

TEST_F(StreamPlanTest, WhatIsNotDecodedYetTakesStagingMemory)
{
    Stream stream(20);
    stream.s.has_fixed_level = true;
    start(16, 800 * KB);
    link(1e9);
    cg_stream_plan_add(&plan, &stream.s);
    EXPECT_EQ(begin_all(), 4u);
    EXPECT_EQ(ended(1, true), CG_STREAM_DECODE);
    EXPECT_EQ(begin_all(), 0u);
    EXPECT_TRUE(cg_stream_decode_ended(&plan, &stream.s, 0, true));
    EXPECT_EQ(begin_all(), 1u);
}

TEST_F(StreamPlanTest, TheEarliestDeadlineGoesFirst)
{
    Stream late(2, 30 * SECOND), early(2, 10 * SECOND), middle(1, 20 * SECOND);
    link(1e9);
    for (Stream *stream : {&late, &early, &middle})
        cg_stream_plan_add(&plan, &stream->s);
    std::vector<cg_stream *> order;
    while (const cg_stream_read *read = next())
        order.push_back(read->stream);
    EXPECT_EQ(order, (std::vector<cg_stream *>{&early.s, &early.s, &middle.s, &late.s, &late.s}));
}

TEST_F(StreamPlanTest, OnlyTheCutIsReadAndNothingBehindAFailure)
{
    Stream stream(10);
    link(1e9);
    cg_stream_cut(&stream.s, 3, 8);
    cg_stream_plan_add(&plan, &stream.s);
    EXPECT_EQ(next()->chunk_index, 3u);
    EXPECT_EQ(next()->chunk_index, 4u);
    EXPECT_TRUE(cg_stream_failed(&stream.s, 6));
    EXPECT_FALSE(cg_stream_failed(&stream.s, 7)) << "nobody waits for it";
    EXPECT_EQ(next()->chunk_index, 5u);
    EXPECT_EQ(next(), nullptr);
    stream.s.is_cancelled = true;
    EXPECT_TRUE(cg_stream_is_settled(&stream.s));
    EXPECT_FALSE(cg_stream_wants(&stream.s, 3));
}

TEST_F(StreamPlanTest, ARemovedStreamIsNotReadAndOthersAre)
{
    Stream a(1), b(1), c(1);
    link(1e9);
    for (Stream *stream : {&a, &b, &c})
        cg_stream_plan_add(&plan, &stream->s);
    cg_stream_plan_remove(&plan, &b.s);
    EXPECT_EQ(begin_all(), 2u);
    EXPECT_EQ(b.s.next_index, 0u);
}

TEST_F(StreamPlanTest, LevelsAreDecidedAnewWhenTheLinkWasMeasured)
{
    const struct {
        const char *what;
        bool fixed;
        double bytes_per_s;
        uint8_t want; // of chunks of 800, 400, 200, 100 kB, ten of them in 4 s
    } cases[] = {
        {"fast enough for L0", false, 2000e3, CG_L0},
        {"for L1", false, 1001e3, CG_L1},
        {"for L2", false, 501e3, CG_L2},
        {"for L3", false, 251e3, CG_L3},
        {"for nothing", false, 10e3, CG_L3},
        {"a fixed level", true, 10e3, CG_L2},
    };
    for (const auto &c : cases) {
        Stream stream(10, 4 * SECOND);
        stream.s.has_fixed_level = c.fixed;
        start(16, 1000000 * KB);
        link(0);
        cg_stream_plan_add(&plan, &stream.s);
        const cg_stream_read *first = next();
        ASSERT_NE(first, nullptr);
        EXPECT_EQ(first->level, CG_L2) << c.what << ": the link is unknown, so the first choice";
        cg_stream_plan_remove(&plan, &stream.s);

        Stream again(10, 4 * SECOND);
        again.s.has_fixed_level = c.fixed;
        cg_estimator_add(&speeds.link, static_cast<uint64_t>(c.bytes_per_s), SECOND, SECOND);
        start(16, 1000000 * KB);
        cg_stream_plan_add(&plan, &again.s);
        EXPECT_EQ(next()->level, c.want) << c.what;
    }
}

TEST_F(StreamPlanTest, AskingAgainAtASmallerLevel)
{
    const struct {
        const char *what;
        cg_policy policy;
        bool fixed;
        uint8_t level;
        uint64_t deadline_ns, at_ns;
        bool again;
    } cases[] = {
        {"half of the time is left", CG_POLICY_TTFT_BUDGET, false, CG_L2, 4 * SECOND,
         2 * SECOND - 1, false},
        {"half of the time is gone", CG_POLICY_TTFT_BUDGET, false, CG_L2, 4 * SECOND, 2 * SECOND,
         true},
        {"the smallest already", CG_POLICY_TTFT_BUDGET, false, CG_L3, 4 * SECOND, 3 * SECOND,
         false},
        {"another policy", CG_POLICY_MIN_DELAY, false, CG_L2, 4 * SECOND, 3 * SECOND, false},
        {"a fixed level", CG_POLICY_TTFT_BUDGET, true, CG_L2, 4 * SECOND, 3 * SECOND, false},
        {"too late from the start", CG_POLICY_TTFT_BUDGET, false, CG_L2, 0, 3 * SECOND, false},
    };
    for (const auto &c : cases) {
        SCOPED_TRACE(c.what);
        Stream stream(1, c.deadline_ns, c.level);
        stream.s.policy = c.policy;
        stream.s.has_fixed_level = c.fixed;
        start(16, 1000000 * KB);
        cg_stream_plan_add(&plan, &stream.s);
        ASSERT_NE(next(0), nullptr);
        const cg_stream_read *again = next(c.at_ns);
        ASSERT_EQ(again != nullptr, c.again);
        if (!c.again)
            continue;
        EXPECT_EQ(again->level, CG_L3);
        EXPECT_EQ(again->chunk_index, 0u);
        EXPECT_EQ(next(c.at_ns), nullptr) << "once";
        EXPECT_EQ(next(c.deadline_ns), nullptr) << "once";
    }
}

TEST_F(StreamPlanTest, OfTwoReadsOfAChunkTheFirstThatArrivesCounts)
{
    for (const bool small_first : {false, true}) {
        Stream stream(1, 4 * SECOND);
        start(16, 1000000 * KB);
        cg_stream_plan_add(&plan, &stream.s);
        const uint64_t large = next(0)->id, small = next(3 * SECOND)->id;
        const uint64_t first = small_first ? small : large, second = small_first ? large : small;
        EXPECT_EQ(ended(first, true), CG_STREAM_DECODE);
        EXPECT_EQ(stream.s.chunks[0].level, small_first ? CG_L3 : CG_L2);
        EXPECT_EQ(ended(second, true), CG_STREAM_DROP);
        EXPECT_EQ(plan.n_reading, 0u);
        EXPECT_EQ(plan.bytes_reading, 0u);
    }
}

TEST_F(StreamPlanTest, AChunkFailsWithItsLastRead)
{
    Stream stream(1, 4 * SECOND);
    cg_stream_plan_add(&plan, &stream.s);
    const uint64_t large = next(0)->id, small = next(3 * SECOND)->id;
    EXPECT_EQ(ended(small, false), CG_STREAM_DROP);
    EXPECT_EQ(ended(small, false), CG_STREAM_DROP) << "ended before";
    EXPECT_EQ(ended(large, false), CG_STREAM_FAIL);
    EXPECT_FALSE(cg_stream_is_settled(&stream.s)) << "until the owner says so";
    EXPECT_TRUE(cg_stream_failed(&stream.s, 0));
    EXPECT_TRUE(cg_stream_is_settled(&stream.s));
}

TEST_F(StreamPlanTest, AReadThatNobodyWantsIsDropped)
{
    Stream stream(3);
    link(1e9);
    cg_stream_plan_add(&plan, &stream.s);
    EXPECT_EQ(begin_all(), 3u);
    EXPECT_TRUE(cg_stream_failed(&stream.s, 1));
    EXPECT_EQ(ended(3, true), CG_STREAM_DROP) << "behind a failure";
    EXPECT_EQ(ended(1, true), CG_STREAM_DECODE);
    stream.s.is_cancelled = true;
    EXPECT_FALSE(cg_stream_decode_ended(&plan, &stream.s, 0, true)) << "cancelled meanwhile";
    EXPECT_EQ(stream.s.n_whole, 0u);
    EXPECT_EQ(plan.bytes_decoding, 0u);
}

TEST_F(StreamPlanTest, AReadIsGivenUpOnceAndByTheLengthOfTheQueue)
{
    Stream stream(3);
    stream.s.has_fixed_level = true;
    link(800e3); // 200 kB take a quarter of a second: two reads are under way
    cg_stream_plan_add(&plan, &stream.s);
    EXPECT_EQ(cg_stream_wake_ns(&plan), NEVER);
    EXPECT_EQ(begin_all(), 2u);
    const uint64_t first_ns = TIMEOUT + 500 * MS, second_ns = TIMEOUT + 1000 * MS;
    EXPECT_EQ(cg_stream_wake_ns(&plan), first_ns);
    EXPECT_EQ(cg_stream_give_up(&plan, first_ns - 1), nullptr);
    EXPECT_EQ(cg_stream_give_up(&plan, first_ns)->chunk_index, 0u);
    EXPECT_EQ(cg_stream_give_up(&plan, first_ns), nullptr);
    EXPECT_EQ(cg_stream_wake_ns(&plan), second_ns);
    EXPECT_EQ(plan.n_reading, 2u) << "it is under way until it has ended";
    EXPECT_EQ(cg_stream_find_read(&plan, 1)->chunk_index, 0u);
    EXPECT_EQ(ended(1, false), CG_STREAM_FAIL);
    EXPECT_EQ(cg_stream_find_read(&plan, 1), nullptr);
    EXPECT_EQ(cg_stream_find_read(&plan, 0), nullptr);
}

TEST_F(StreamPlanTest, ItWakesForALateReadBeforeATimeOut)
{
    Stream stream(1, 4 * SECOND);
    cg_stream_plan_add(&plan, &stream.s);
    next(0);
    EXPECT_EQ(cg_stream_wake_ns(&plan), 2 * SECOND);
    next(2 * SECOND); // the second read: both now wait for their time-outs only
    EXPECT_EQ(cg_stream_wake_ns(&plan), TIMEOUT);
}

TEST_F(StreamPlanTest, ASlowLinkDoesNotOverflowTheTimeOut)
{
    Stream stream(1);
    stream.s.has_fixed_level = true;
    link(1e-9);
    cg_stream_plan_add(&plan, &stream.s);
    EXPECT_EQ(next(NEVER - SECOND)->give_up_ns, NEVER);
    ended(1, false);
    Stream other(1);
    other.s.has_fixed_level = true;
    cg_stream_plan_add(&plan, &other.s);
    EXPECT_EQ(next(0)->give_up_ns, TIMEOUT + 3600 * SECOND);
}

TEST_F(StreamPlanTest, TheWholePrefixGrowsInOrder)
{
    Stream stream(5);
    link(1e9);
    cg_stream_cut(&stream.s, 1, 5);
    cg_stream_plan_add(&plan, &stream.s);
    EXPECT_EQ(begin_all(), 4u);
    const struct {
        uint32_t chunk_index, n_whole;
    } steps[] = {{2, 0}, {1, 2}, {4, 2}, {3, 4}};
    for (const auto &step : steps) {
        ASSERT_EQ(ended(step.chunk_index, true), CG_STREAM_DECODE);
        EXPECT_FALSE(cg_stream_is_settled(&stream.s));
        EXPECT_TRUE(cg_stream_decode_ended(&plan, &stream.s, step.chunk_index, true));
        EXPECT_EQ(stream.s.n_whole, step.n_whole) << step.chunk_index;
    }
    EXPECT_TRUE(cg_stream_is_settled(&stream.s));
}

// A link, chunks and a decoder driven with a clock of the test's own. Whatever fails or is late,
// the sums agree, the limits hold and every stream comes to its end.
TEST_F(StreamPlanTest, RandomRunsEnd)
{
    for (uint32_t seed = 0; seed < 300; seed++) {
        SCOPED_TRACE(testing::Message() << "seed " << seed);
        std::mt19937 random(seed);
        const uint32_t depth = 1 + random() % 8;
        start(depth, (1 + random() % 40) * 100 * KB);
        link(random() % 2 ? 0 : 1e3 * (1 + random() % 10000));
        std::vector<std::unique_ptr<Stream>> streams;
        for (uint32_t i = 0; i < 1 + seed % 4; i++) {
            streams.push_back(std::make_unique<Stream>(random() % 12, random() % 9 * SECOND));
            streams.back()->s.policy = random() % 2 ? CG_POLICY_MIN_DELAY : CG_POLICY_TTFT_BUDGET;
            streams.back()->s.has_fixed_level = random() % 4 == 0;
            cg_stream_plan_add(&plan, &streams.back()->s);
        }
        uint64_t now_ns = 0;
        std::vector<uint64_t> under_way; // ids
        for (uint32_t step = 0; step < 10000; step++) {
            while (const cg_stream_read *read = next(now_ns)) {
                ASSERT_TRUE(cg_stream_wants(read->stream, read->chunk_index));
                under_way.push_back(read->id);
            }
            ASSERT_LE(plan.n_reading, depth);
            ASSERT_EQ(plan.n_reading, under_way.size());
            if (under_way.empty())
                break;
            if (const cg_stream_read *late = cg_stream_give_up(&plan, now_ns)) {
                const uint64_t id = late->id;
                under_way.erase(std::find(under_way.begin(), under_way.end(), id));
                cg_stream *stream = late->stream;
                const uint32_t index = late->chunk_index;
                if (ended(id, false) == CG_STREAM_FAIL)
                    cg_stream_failed(stream, index);
                continue;
            }
            const uint64_t wake_ns = cg_stream_wake_ns(&plan);
            ASSERT_GT(wake_ns, now_ns); // else the reader would spin
            if (random() % 4 == 0) {    // nothing comes until the plan wants to be asked
                now_ns = wake_ns;
                continue;
            }
            now_ns += random() % (20 * MS);
            const size_t at = random() % under_way.size();
            const cg_stream_read read = *cg_stream_find_read(&plan, under_way[at]);
            under_way.erase(under_way.begin() + static_cast<long>(at));
            const bool has_arrived = random() % 20 != 0;
            const cg_stream_verdict verdict = ended(read.id, has_arrived, now_ns);
            const bool decodes = random() % 20 != 0;
            if (verdict == CG_STREAM_FAIL ||
                (verdict == CG_STREAM_DECODE &&
                 !cg_stream_decode_ended(&plan, read.stream, read.chunk_index, decodes)))
                cg_stream_failed(read.stream, read.chunk_index);
        }
        EXPECT_EQ(plan.n_reading, 0u);
        EXPECT_EQ(plan.bytes_reading, 0u);
        EXPECT_EQ(plan.bytes_decoding, 0u);
        for (const auto &stream : streams) {
            EXPECT_TRUE(cg_stream_is_settled(&stream->s));
            for (uint32_t i = 0; i < stream->s.n_whole; i++)
                EXPECT_EQ(stream->s.chunks[i].state, CG_STREAM_DONE);
        }
    }
}

} // namespace
