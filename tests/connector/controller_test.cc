#include "connector/controller.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace
{

constexpr uint64_t S = 1000000000;

// Chunks of 256 tokens: L1 4 MB, L2 2 MB, L3 1 MB unless said otherwise; a link of 8 Mbit/s moves 1
// MB a second.
class ControllerTest : public testing::Test
{
  protected:
    void SetUp() override
    {
        set_chunks(10);
        in.policy = CG_POLICY_TTFT_BUDGET;
        in.link_bps = 8e6;
        in.budget_ns = 100 * S;
        for (double &ns : in.decode_ns_per_token)
            ns = 1e-6; // next to nothing, and known
    }
    void set_chunks(size_t n)
    {
        chunks.assign(n, {256, {0, 4000000, 2000000, 1000000}});
    }
    void decide()
    {
        in.chunks = chunks.data();
        in.n_chunks = chunks.size();
        levels.assign(chunks.size() + 1, 9);
        out = cg_controller_decide(&in, levels.data());
        EXPECT_EQ(levels.back(), 9); // not written
        levels.pop_back();
    }
    std::vector<cg_controller_chunk> chunks;
    cg_controller_input in = {};
    std::vector<uint8_t> levels;
    cg_controller_decision out = {};
};

using Levels = std::vector<uint8_t>;

TEST_F(ControllerTest, TakesTheFinestLevelThatMeetsTheBudget)
{
    in.budget_ns = 41 * S;
    decide();
    EXPECT_EQ(levels, Levels(10, CG_L1));
    in.budget_ns = 21 * S;
    decide();
    EXPECT_EQ(levels[0], CG_L2);
    EXPECT_LE(out.predicted_ns, 21 * S);
    EXPECT_EQ(out.n_load, 10u);
}

TEST_F(ControllerTest, SpendsWhatIsLeftOfTheBudgetOnFinerLevelsAtTheEnd)
{
    in.budget_ns = 25 * S; // ten at L2 take 20
    decide();
    EXPECT_EQ(levels.front(), CG_L2);
    EXPECT_EQ(levels.back(), CG_L1);
    EXPECT_LE(out.predicted_ns, 25 * S);
}

TEST_F(ControllerTest, WhatOthersMustHaveComesFirst)
{
    in.budget_ns = 41 * S;
    in.queued_bytes = 20e6;
    decide();
    EXPECT_EQ(levels.front(), CG_L2) << "21 s are left";
    EXPECT_EQ(out.n_load, 10u);
    EXPECT_LE(out.predicted_ns, 41 * S);
    EXPECT_GT(out.predicted_ns, 39 * S);
    in.queued_bytes = 0; // the same of decoding
    in.queued_decode_ns = 41e9;
    in.recompute.tokens_per_s = 102.4;
    decide();
    EXPECT_EQ(out.n_load, 0u);
    in.queued_decode_ns = 0;
    in.queued_bytes = 400e6; // not in budget at any level, and recomputing takes 25 s
    decide();
    EXPECT_EQ(out.n_load, 0u);
}

TEST_F(ControllerTest, TheFirstByteComesNoSoonerThanTheStoreAnswers)
{
    const struct {
        cg_policy policy;
        double queued_bytes;
        uint64_t load_s;
    } cases[] = {{CG_POLICY_TTFT_BUDGET, 0, 43},
                 {CG_POLICY_MIN_DELAY, 0, 13},
                 {CG_POLICY_TTFT_BUDGET, 20e6, 60}, // meanwhile others' bytes come
                 {CG_POLICY_PAPER, 0, 40}};
    in.latency_ns = 3e9;
    for (const auto &c : cases) {
        in.policy = c.policy;
        in.queued_bytes = c.queued_bytes;
        decide();
        EXPECT_EQ(out.predicted_ns, c.load_s * S) << c.policy << ", " << c.queued_bytes;
    }
}

// To compute all takes a second, the way to the store three.
TEST_F(ControllerTest, OverNoLinkAStoreIsAskedThatAnswersTooLate)
{
    const struct {
        cg_policy policy;
        uint64_t budget_ns;
        size_t n_load;
    } cases[] = {{CG_POLICY_TTFT_BUDGET, 2 * S, 0},
                 {CG_POLICY_TTFT_BUDGET, 4 * S, 10},
                 {CG_POLICY_MIN_DELAY, 4 * S, 0},
                 {CG_POLICY_PAPER, 2 * S, 10},
                 {CG_POLICY_FIXED, 2 * S, 10}};
    in.link_bps = 0;
    in.latency_ns = 3e9;
    in.recompute.tokens_per_s = 2560;
    for (const auto &c : cases) {
        in.policy = c.policy;
        in.budget_ns = c.budget_ns;
        decide();
        EXPECT_EQ(out.n_load, c.n_load) << c.policy << ", " << c.budget_ns;
        EXPECT_EQ(out.reserve_ns, c.n_load > 0 ? 0 : S);
    }
}

TEST_F(ControllerTest, PrefersLosslessWhereItFits)
{
    for (auto &chunk : chunks)
        chunk.bytes[CG_L0] = 8000000;
    decide();
    EXPECT_EQ(levels, Levels(10, CG_L0));
}

TEST_F(ControllerTest, WithoutAnEstimateEverythingIsLoadedAtL2)
{
    in.link_bps = 0;
    in.budget_ns = 1;
    in.recompute.tokens_per_s = 1e6;
    chunks[3].bytes[CG_L2] = 0; // coarser first
    chunks[4].bytes[CG_L2] = chunks[4].bytes[CG_L3] = 0;
    decide();
    EXPECT_EQ(levels, (Levels{2, 2, 2, 3, 1, 2, 2, 2, 2, 2}));
    EXPECT_EQ(out.n_load, 10u);
    EXPECT_EQ(out.predicted_ns, 0u);
}

TEST_F(ControllerTest, LoadsTheSmallestWhenLateAndRecomputingIsUnknown)
{
    in.budget_ns = 3 * S;
    decide();
    EXPECT_EQ(levels, Levels(10, CG_L3));
    EXPECT_EQ(out.n_load, 10u);
    EXPECT_EQ(out.predicted_ns, 10 * S);
}

TEST_F(ControllerTest, CutsWhereRecomputingFitsBetter)
{
    in.budget_ns = 3 * S;
    in.recompute.tokens_per_s = 2560; // a chunk in 0.1 s, ten times faster than L3 comes
    decide();
    EXPECT_EQ(out.n_load, 0u);
    EXPECT_EQ(out.reserve_ns, 1 * S);
    in.recompute.tokens_per_s = 25.6; // ten times slower
    decide();
    EXPECT_EQ(out.n_load, 10u);
}

TEST_F(ControllerTest, CutsBeforeTheChunksThatAreLarge)
{
    for (size_t i = 6; i < 10; i++)
        for (uint64_t &bytes : chunks[i].bytes)
            bytes *= 100;
    in.budget_ns = 16 * S;
    in.recompute.tokens_per_s = 128; // a chunk in 2 s
    decide();
    EXPECT_EQ(out.n_load, 6u);
    EXPECT_EQ(levels, (Levels{3, 3, 3, 3, 3, 2, 3, 3, 3, 3})); // 8 s are left for the six
    EXPECT_EQ(out.predicted_ns, 7 * S);
    EXPECT_EQ(out.reserve_ns, 8 * S);
}

// Ten chunks take 10 s at L3, or 5 to compute.
TEST_F(ControllerTest, RecomputingBeginsBehindWhatTheEngineHasToCompute)
{
    for (const cg_policy policy : {CG_POLICY_TTFT_BUDGET, CG_POLICY_MIN_DELAY, CG_POLICY_PAPER}) {
        SCOPED_TRACE(policy);
        in.policy = policy;
        in.budget_ns = 4 * S;
        in.recompute.tokens_per_s = 512;
        in.engine_ns = 0;
        decide();
        EXPECT_EQ(out.n_load, 0u);
        in.engine_ns = 2e9;
        decide();
        EXPECT_EQ(out.n_load, policy == CG_POLICY_PAPER ? 0u : 2u) << "loaded meanwhile";
        in.engine_ns = 20e9;
        decide();
        EXPECT_EQ(out.n_load, policy == CG_POLICY_PAPER ? 0u : 10u) << "later than the link";
        in.other_tokens = 10;
        decide();
        EXPECT_EQ(out.n_load, policy == CG_POLICY_PAPER ? 0u : 10u) << "a few tokens wait not";
        in.engine_ns = 2e9;
        in.other_tokens = 256;
        decide();
        EXPECT_EQ(out.n_load, policy == CG_POLICY_PAPER ? 0u : 2u) << "but a chunk's does";
        in.other_tokens = 0;
    }
}

// Ten chunks take 10 s at L3 behind 3 s of others, or 5 to compute now. The others are loaded
// meanwhile, and wait for the end of that. Behind them it takes 8.5, with the first chunk loaded.
TEST_F(ControllerTest, WhoIsLoadedWhileTheEngineComputesCountsToo)
{
    const struct {
        const char *what;
        cg_policy policy;
        uint64_t budget_ns;
        uint32_t n_others;
        size_t n_load;
        double link_hope;
    } cases[] = {
        {"nobody else", CG_POLICY_TTFT_BUDGET, 4 * S, 0, 0, 0},
        {"the other would be late", CG_POLICY_TTFT_BUDGET, 4 * S, 1, 1, 0},
        {"three would", CG_POLICY_TTFT_BUDGET, 4 * S, 3, 1, 0},
        {"all are in time", CG_POLICY_TTFT_BUDGET, 6 * S, 3, 0, 0},
        {"all of many are", CG_POLICY_TTFT_BUDGET, 6 * S, 40, 0, 0},
        {"and need not hope for a faster link", CG_POLICY_TTFT_BUDGET, 6 * S, 40, 0, 2},
        {"it is late in any case, and waits for 2 s", CG_POLICY_TTFT_BUDGET, 1 * S, 1, 0, 0},
        {"the same, for 9", CG_POLICY_TTFT_BUDGET, S / 2, 3, 1, 0},
        {"for 2 s", CG_POLICY_MIN_DELAY, 0, 1, 0, 0},
        {"for 9", CG_POLICY_MIN_DELAY, 0, 3, 1, 0},
        {"it knows nothing of them", CG_POLICY_PAPER, 4 * S, 3, 0, 0},
        {"it is late in any case, but perhaps the link is faster", CG_POLICY_TTFT_BUDGET, 4 * S, 1,
         10, 2},
        {"that helps nobody else", CG_POLICY_TTFT_BUDGET, 4 * S, 0, 0, 2},
    };
    in.recompute.tokens_per_s = 512;
    in.queued_bytes = 3000000;
    for (const auto &c : cases) {
        in.policy = c.policy;
        in.budget_ns = c.budget_ns;
        in.queued_loads = c.n_others;
        in.link_hope = c.link_hope;
        decide();
        EXPECT_EQ(out.n_load, c.n_load) << c.what;
    }
}

// The first chunk takes about as long to compute as to load, the last almost four times as long.
TEST_F(ControllerTest, TheEndOfALongPromptIsLoadedWhereItsStartWouldBeRecomputed)
{
    in.policy = CG_POLICY_MIN_DELAY;
    in.recompute.tokens_per_s = 270; // a chunk in 0.95 s, and in one at L3
    decide();
    EXPECT_EQ(out.n_load, 0u);
    in.recompute.doubling_tokens = 850;
    in.end_token = 2560;
    decide();
    EXPECT_EQ(out.n_load, 10u);
    EXPECT_EQ(out.reserve_ns, 0u);
    in.policy = CG_POLICY_TTFT_BUDGET;
    in.budget_ns = 1 * S;
    in.link_bps /= 2; // a chunk in 2 s: the last ones take longer, the first ones do not
    decide();
    EXPECT_EQ(out.n_load, 10u);
}

TEST_F(ControllerTest, TheRestOfThePromptCountsAgainstTheBudget)
{
    in.budget_ns = 41 * S;
    in.recompute.tokens_per_s = 100;
    in.other_tokens = 2000; // 20 s
    decide();
    EXPECT_EQ(levels[0], CG_L2);
    EXPECT_LE(out.predicted_ns, 21 * S);
}

TEST_F(ControllerTest, DecodingCounts)
{
    in.link_bps = 8e12;                        // reading is free
    in.decode_ns_per_token[CG_L1] = 1e9 / 256; // a second a chunk
    in.decode_ns_per_token[CG_L2] = 0.25e9 / 256;
    in.budget_ns = 5 * S;
    decide();
    EXPECT_EQ(levels[0], CG_L2);
    EXPECT_LE(out.predicted_ns, 5 * S);
    EXPECT_GE(out.predicted_ns, 2 * S);
}

TEST_F(ControllerTest, DecodingThatIsUnknownIsNotFree)
{
    for (double &ns : in.decode_ns_per_token)
        ns = 0;
    decide();
    const uint64_t guessed_ns = out.predicted_ns;
    EXPECT_GT(guessed_ns, 40 * S + S / 10) << "ten at L1, and the last one's decoding";
    EXPECT_LT(guessed_ns, 42 * S);
    in.link_bps = 8e12; // reading is free
    decide();
    EXPECT_GT(out.predicted_ns, 3 * S);
}

TEST_F(ControllerTest, FixedIsL2AndAllOfIt)
{
    in.policy = CG_POLICY_FIXED;
    in.budget_ns = 1;
    in.recompute.tokens_per_s = 1e9;
    chunks[3].bytes[CG_L2] = 0;
    decide();
    EXPECT_EQ(levels, (Levels{2, 2, 2, 3, 2, 2, 2, 2, 2, 2}));
    EXPECT_EQ(out.n_load, 10u);
}

TEST_F(ControllerTest, WhereAllIsLateALoadIsTriedThatALinkAsFastAsIsHopedWouldWin)
{
    in.budget_ns = 3 * S; // ten at L3 take 10
    in.recompute.tokens_per_s = 256.0 * 10 / 8;
    decide();
    EXPECT_EQ(out.n_load, 0u) << "no hope";
    in.link_hope = 1.2;
    decide();
    EXPECT_EQ(out.n_load, 0u) << "8.3 s, against 8";
    in.link_hope = 2;
    decide();
    EXPECT_EQ(out.n_load, 10u) << "5 s at twice the speed, against 8";
    in.policy = CG_POLICY_PAPER;
    decide();
    EXPECT_EQ(out.n_load, 0u) << "goes by the estimate as it is";
}

TEST_F(ControllerTest, MinDelayTakesTheFastestOfEachChunk)
{
    in.policy = CG_POLICY_MIN_DELAY;
    in.decode_ns_per_token[CG_L3] = 10e9 / 256; // L3 is small but slow to decode
    decide();
    EXPECT_EQ(levels, Levels(10, CG_L2));
    in.recompute.tokens_per_s = 256; // a second a chunk: faster than 2 MB
    decide();
    EXPECT_EQ(out.n_load, 0u);
}

TEST_F(ControllerTest, UsesOnlyLevelsThatAreThere)
{
    std::mt19937 random(7);
    for (int round = 0; round < 500; round++) {
        SCOPED_TRACE(round);
        set_chunks(1 + random() % 20);
        for (auto &chunk : chunks) {
            chunk.n_tokens = 1 + random() % 256;
            for (uint64_t &bytes : chunk.bytes)
                bytes = random() % 2 ? 1 + random() % 10000000 : 0;
            chunk.bytes[random() % 4] = 1000;
        }
        in.policy = random() % 2 ? CG_POLICY_MIN_DELAY : CG_POLICY_TTFT_BUDGET;
        in.link_bps = random() % 4 ? static_cast<double>(random() % 1000000000) : 0;
        in.budget_ns = random() % 3 ? random() * S : 0;
        in.recompute.tokens_per_s = random() % 2 ? random() % 10000 : 0;
        in.other_tokens = random() % 1000;
        for (double &ns : in.decode_ns_per_token)
            ns = random() % 1000000;
        decide();
        EXPECT_LE(out.n_load, chunks.size());
        for (size_t i = 0; i < chunks.size(); i++) {
            ASSERT_LT(levels[i], CG_N_LEVELS);
            EXPECT_GT(chunks[i].bytes[levels[i]], 0u);
        }
    }
}

TEST_F(ControllerTest, NothingToLoadIsFine)
{
    chunks.clear();
    in.other_tokens = 100;
    in.recompute.tokens_per_s = 100;
    decide();
    EXPECT_EQ(out.n_load, 0u);
    EXPECT_EQ(out.reserve_ns, 1 * S);
}

} // namespace
