#include "connector/estimator.h"

#include <gtest/gtest.h>

namespace
{

constexpr uint64_t MS = 1000000;
constexpr uint64_t MBIT = 125000; // bytes of a Mbit

class EstimatorTest : public testing::Test
{
  protected:
    void SetUp() override
    {
        start(CG_ESTIMATOR_HARMONIC);
    }
    void start(cg_estimator_kind kind, double prior_bps = 0)
    {
        cg_estimator_init(&e, kind, prior_bps);
    }
    // One chunk that came at mbps.
    void feed(double mbps, int n = 1)
    {
        for (int i = 0; i < n; i++)
            cg_estimator_add(&e, static_cast<uint64_t>(mbps * MBIT), 1000 * MS);
    }
    double mbps() const
    {
        return cg_estimator_bps(&e) / 1e6;
    }
    cg_estimator e;
};

TEST_F(EstimatorTest, KnowsNothingBeforeTheFirstSampleButAPrior)
{
    EXPECT_EQ(mbps(), 0);
    start(CG_ESTIMATOR_HARMONIC, 50e6);
    EXPECT_DOUBLE_EQ(mbps(), 50);
    feed(100);
    EXPECT_DOUBLE_EQ(mbps(), 100);
}

TEST_F(EstimatorTest, IsTheHarmonicMeanOfTheWindow)
{
    feed(100);
    feed(150);
    EXPECT_NEAR(mbps(), 120, 1e-6);
}

TEST_F(EstimatorTest, ForgetsWhatIsOlderThanTwentySamples)
{
    feed(100);
    feed(150, CG_ESTIMATOR_WINDOW);
    EXPECT_NEAR(mbps(), 150, 1e-6);
}

TEST_F(EstimatorTest, OneSpikeChangesLittle)
{
    feed(100, 20);
    feed(10000);
    EXPECT_LT(mbps(), 106);
}

TEST_F(EstimatorTest, ADropByTenShowsAfterTwoSamples)
{
    feed(100, 20);
    feed(10);
    EXPECT_LT(mbps(), 75); // the mean alone
    feed(10);
    EXPECT_NEAR(mbps(), 10, 1e-6);
}

TEST_F(EstimatorTest, ARiseByTenShowsAfterThreeSamples)
{
    feed(10, 20);
    feed(100, 2);
    EXPECT_LT(mbps(), 12);
    feed(100);
    EXPECT_NEAR(mbps(), 100, 1e-6);
}

TEST_F(EstimatorTest, LastIsThePapersEstimator)
{
    start(CG_ESTIMATOR_LAST);
    feed(100, 5);
    feed(7);
    EXPECT_DOUBLE_EQ(mbps(), 7);
}

TEST_F(EstimatorTest, SamplesWithoutBytesOrTimeTeachNothing)
{
    cg_estimator_add(&e, 0, 1000);
    cg_estimator_add(&e, 1000, 0);
    EXPECT_EQ(mbps(), 0);
    EXPECT_EQ(e.generation, 0u);
}

// Two reads that share the link: each takes the whole time, and the link is twice as fast as either
// seems.
TEST_F(EstimatorTest, TheMeterCountsBytesOverBusyTime)
{
    cg_link_meter meter = {};
    const uint64_t second = 1000 * MS, bytes = 10 * MBIT;
    cg_link_meter_add(&meter, bytes, 0, second - 1, 1, &e);
    cg_link_meter_add(&meter, bytes, 0, second, 0, &e);
    cg_link_meter_add(&meter, 2 * bytes, 5 * second, 6 * second, 0, &e); // idle in between
    EXPECT_NEAR(mbps(), 20, 1) << e.n_samples << " samples";
}

TEST_F(EstimatorTest, TheMeterGathersReadsOfMicroseconds)
{
    cg_link_meter meter = {};
    for (uint64_t i = 0; i < 10; i++)
        cg_link_meter_add(&meter, 100000, 0, 1000 * (i + 1), i < 9, &e);
    EXPECT_EQ(e.n_samples, 1u);
    EXPECT_NEAR(mbps(), 800000, 1); // 1 MB in 10 us
}

} // namespace
