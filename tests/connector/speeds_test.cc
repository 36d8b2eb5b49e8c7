#include "connector/speeds.h"

#include <gtest/gtest.h>

namespace
{

class SpeedsTest : public testing::Test
{
  protected:
    void SetUp() override
    {
        speeds.n_threads = 4;
    }
    double decode_ns(unsigned level) const
    {
        double ns_per_token[CG_N_LEVELS];
        cg_speeds_decode(&speeds, ns_per_token);
        return ns_per_token[level];
    }
    cg_speeds speeds = {};
};

TEST_F(SpeedsTest, NothingIsKnownBeforeTheFirstMeasurement)
{
    EXPECT_EQ(decode_ns(CG_L2), 0);
    EXPECT_GT(cg_speeds_decode_chunk(&speeds, CG_L2, 256, 250000), 1e6)
        << "but a chunk of 250 kB is not decoded in no time";
    EXPECT_EQ(cg_speeds_recompute(&speeds).tokens_per_s, 0);
}

TEST_F(SpeedsTest, DecodingIsThreadTimeSharedByAllThreadsAndOtherLevelsGoByTheOneMeasured)
{
    cg_speeds_add_decode(&speeds, CG_L2, 100, 40000);
    EXPECT_DOUBLE_EQ(decode_ns(CG_L2), 100);
    EXPECT_GT(decode_ns(CG_L1), 100);
    EXPECT_LT(decode_ns(CG_L3), 100);
    EXPECT_DOUBLE_EQ(cg_speeds_decode_chunk(&speeds, CG_L2, 50, 1), 5000);
    cg_speeds_add_decode(&speeds, CG_L1, 100, 120000);
    EXPECT_DOUBLE_EQ(decode_ns(CG_L1), 300);
}

TEST_F(SpeedsTest, AMeasurementMovesTheMeanByAFifth)
{
    cg_speeds_add_decode(&speeds, CG_L2, 100, 40000);
    cg_speeds_add_decode(&speeds, CG_L2, 10, 8000); // twice as slow, however few tokens
    EXPECT_DOUBLE_EQ(decode_ns(CG_L2), 120);
}

TEST_F(SpeedsTest, LevelsOfALoadShareItsTimeAsTheyWouldByWhatIsKnown)
{
    const uint32_t half[CG_N_LEVELS] = {0, 2, 2, 0}, none[CG_N_LEVELS] = {};
    speeds.n_threads = 1;
    cg_speeds_add_load(&speeds, none, 100, 1000000);
    EXPECT_EQ(decode_ns(CG_L2), 0);
    cg_speeds_add_decode(&speeds, CG_L1, 100, 30000);
    cg_speeds_add_decode(&speeds, CG_L2, 100, 10000);
    for (int i = 0; i < 100; i++) // twice of what both were
        cg_speeds_add_load(&speeds, half, 100, 40000);
    EXPECT_NEAR(decode_ns(CG_L1), 600, 1e-3);
    EXPECT_NEAR(decode_ns(CG_L2), 200, 1e-3);

    speeds = {};
    speeds.n_threads = 1;
    cg_speeds_add_load(&speeds, half, 100, 40000); // nothing was known: as it is anywhere
    EXPECT_NEAR(decode_ns(CG_L1) + decode_ns(CG_L2), 800, 1e-3);
    EXPECT_GT(decode_ns(CG_L1), decode_ns(CG_L2));
    EXPECT_GT(decode_ns(CG_L2), decode_ns(CG_L3)) << "not loaded";
}

TEST_F(SpeedsTest, ALinkThatIsKnownIsNoFasterForASampleThatIsAsLongAsARoundTrip)
{
    constexpr uint64_t MS = 1000000, BYTES_PER_MS = 172000; // 1,376 Mbit/s
    cg_estimator_init(&speeds.link, CG_ESTIMATOR_HARMONIC, 0);
    speeds.latency_ns = 20e6;
    for (int i = 0; i < 19; i++)
        cg_estimator_add(&speeds.link, 40 * BYTES_PER_MS, 40 * MS, 0);
    cg_estimator_add(&speeds.link, 20 * BYTES_PER_MS, 20 * MS, 0);
    EXPECT_NEAR(cg_speeds_link_bps(&speeds), 8e3 * BYTES_PER_MS, 1);

    // But of round trips alone the link may be that much faster.
    cg_estimator_init(&speeds.link, CG_ESTIMATOR_HARMONIC, 0);
    for (int i = 0; i < 3; i++)
        cg_estimator_add(&speeds.link, 64 << 10, 20 * MS, 0);
    EXPECT_DOUBLE_EQ(cg_speeds_link_bps(&speeds),
                     CG_ESTIMATOR_MOST_TRIP * cg_estimator_bps(&speeds.link));
}

TEST_F(SpeedsTest, RecomputingIsTokensOverTimeAndTheLastPrefillsCountMost)
{
    cg_prefills_add(&speeds.prefills, 1000, 0, 1000000000);
    EXPECT_DOUBLE_EQ(cg_speeds_recompute(&speeds).tokens_per_s, 1000);
    for (int i = 0; i < 30; i++)
        cg_prefills_add(&speeds.prefills, 1000, 0, 500000000);
    EXPECT_NEAR(cg_speeds_recompute(&speeds).tokens_per_s, 2000, 5);
}

TEST_F(SpeedsTest, ShortPrefillsCountOnlyWhileThereAreNoLongerOnes)
{
    const auto add = [&](uint32_t n_tokens) { // 20 ms a step, and 10,000 tokens a second
        cg_prefills_add(&speeds.prefills, n_tokens, 0, 20000000 + n_tokens * UINT64_C(100000));
    };
    add(64);
    EXPECT_NEAR(cg_speeds_recompute(&speeds).tokens_per_s, 64 / 0.0264, 1);
    add(8192);
    for (int i = 0; i < 30; i++)
        add(64);
    EXPECT_NEAR(cg_speeds_recompute(&speeds).tokens_per_s, 8192 / 0.8392, 1);
}

TEST_F(SpeedsTest, AConfiguredSpeedOfRecomputingStands)
{
    speeds.configured_tokens_per_s = 123;
    cg_prefills_add(&speeds.prefills, 1000, 0, 1000000000);
    EXPECT_EQ(cg_speeds_recompute(&speeds).tokens_per_s, 123);
}

} // namespace
