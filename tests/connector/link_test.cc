// What connectors of one process share of a link.
#include "connector/link.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "connector/clock.h"
#include "tests/connector/engine.h"

namespace
{

using namespace cg_test;

constexpr uint64_t SECOND = 1000000000;

class LinkTest : public testing::Test
{
  protected:
    // Reads once and returns what is known then.
    static double measure(cg_link *link, cg_speeds *speeds, uint64_t bytes, uint64_t at_ns)
    {
        cg_link_borrow(link, speeds);
        const double mark = cg_link_meter_begin(&speeds->meter, at_ns);
        cg_link_return(link, speeds);
        cg_link_borrow(link, speeds);
        cg_link_meter_end(&speeds->meter, mark, bytes, at_ns, at_ns + SECOND, &speeds->link);
        cg_link_return(link, speeds);
        return cg_estimator_bps(&speeds->link);
    }
    static void tell(cg_link *link, cg_speeds *speeds, double wanted_bytes)
    {
        cg_link_borrow(link, speeds);
        speeds->wanted_bytes = wanted_bytes;
        cg_link_return(link, speeds);
    }
    static double others(cg_link *link, cg_speeds *speeds)
    {
        cg_link_borrow(link, speeds);
        cg_link_return(link, speeds);
        return speeds->others_bytes;
    }
};

TEST_F(LinkTest, WhatOneMeasuresAllOfTheDeviceKnowAndNobodyElse)
{
    cg_link *link = cg_link_get(1), *same = cg_link_get(1), *other = cg_link_get(2);
    ASSERT_EQ(link, same);
    ASSERT_NE(link, other);
    cg_speeds a = {}, b = {}, c = {};
    b.link.prior_bps = 5;
    c.link.prior_bps = 7;
    EXPECT_DOUBLE_EQ(measure(link, &a, 1000000, SECOND), 8e6);
    others(same, &b);
    others(other, &c);
    EXPECT_DOUBLE_EQ(cg_estimator_bps(&b.link), 8e6);
    EXPECT_EQ(b.link.prior_bps, 5) << "its own";
    EXPECT_DOUBLE_EQ(cg_estimator_bps(&c.link), 7);
    for (cg_link *l : {link, same, other})
        cg_link_put(l, 0);
    link = cg_link_get(1);
    cg_speeds d = {};
    others(link, &d);
    EXPECT_EQ(cg_estimator_bps(&d.link), 0) << "it ends with its last user";
    cg_link_put(link, 0);
}

TEST_F(LinkTest, ReadsOfTwoConnectorsAtOnceAreOneLinksBusyTime)
{
    cg_link *link = cg_link_get(1), *same = cg_link_get(1);
    cg_speeds a = {}, b = {};
    cg_link_borrow(link, &a);
    const double mark_a = cg_link_meter_begin(&a.meter, SECOND);
    cg_link_return(link, &a);
    cg_link_borrow(same, &b);
    const double mark_b = cg_link_meter_begin(&b.meter, SECOND);
    cg_link_return(same, &b);
    cg_link_borrow(link, &a);
    cg_link_meter_end(&a.meter, mark_a, 1000000, SECOND, 2 * SECOND, &a.link);
    cg_link_return(link, &a);
    cg_link_borrow(same, &b);
    cg_link_meter_end(&b.meter, mark_b, 1000000, SECOND, 2 * SECOND, &b.link);
    cg_link_return(same, &b);
    EXPECT_DOUBLE_EQ(cg_estimator_bps(&b.link), 16e6) << "two megabytes in a second";
    cg_link_put(link, 0);
    cg_link_put(same, 0);
}

TEST_F(LinkTest, TellsWhatOthersWant)
{
    cg_link *link = cg_link_get(1), *same = cg_link_get(1), *third = cg_link_get(1);
    cg_speeds a = {}, b = {}, c = {};
    tell(link, &a, 300);
    tell(same, &b, 50);
    EXPECT_EQ(others(link, &a), 50);
    EXPECT_EQ(others(same, &b), 300);
    EXPECT_EQ(others(third, &c), 350);
    tell(link, &a, 100);
    EXPECT_EQ(others(third, &c), 150);
    cg_link_put(link, a.wanted_bytes);
    EXPECT_EQ(others(third, &c), 50) << "one that was closed wants nothing";
    cg_link_put(same, b.wanted_bytes);
    cg_link_put(third, 0);
}

TEST_F(LinkTest, AChildBeginsAnew)
{
    cg_link *link = cg_link_get(1);
    cg_speeds a = {};
    measure(link, &a, 1000000, SECOND);
    cg_link_borrow(link, &a); /* as if another thread held the lock */
    const pid_t child = fork();
    if (child == 0) {
        cg_link *own = cg_link_get(1);
        cg_speeds b = {};
        others(own, &b);
        _exit(cg_estimator_bps(&b.link) == 0 ? 0 : 1);
    }
    cg_link_return(link, &a);
    int status = 1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    cg_link_put(link, 0);
}

TEST_F(LinkTest, ASchedulersConnectorKnowsWhatItsWorkersMeasuredAndCountsItOnce)
{
    const Store store;
    Engine worker(store), scheduler(store);
    const Tokens tokens = prompt(256);
    ASSERT_EQ(worker.save(tokens), CACHEGEN_OK);
    ASSERT_EQ(worker.load(tokens).progress.loaded_tokens, 255u);
    const uint64_t measured_bps = worker.stats().throughput_bps;
    EXPECT_GT(measured_bps, 0u);
    EXPECT_EQ(scheduler.stats().throughput_bps, measured_bps);
    cachegen_progress report = {};
    report.struct_size = sizeof report;
    report.bytes_read = 1000000;
    report.read_ns = SECOND;
    cachegen_report_load(scheduler.c, 0, &report);
    EXPECT_EQ(scheduler.stats().throughput_bps, measured_bps) << "it was measured here";
}

// Nobody would measure anew.
TEST_F(LinkTest, ALookUpByWhoseEstimateNothingPaysTriesAgainWhenThatIsOld)
{
    const Store store(true);
    Engine engine(store, "\"policy\": \"min_delay\", \"recompute_tokens_per_s\": 1e6");
    const Tokens tokens = prompt(128);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    struct stat root;
    ASSERT_EQ(stat(store.dir.path.c_str(), &root), 0);
    cg_link *link = cg_link_get(root.st_dev);
    const auto hit_tokens = [&](uint64_t age_ns) {
        cg_speeds speeds = {};
        cg_link_borrow(link, &speeds);
        cg_estimator_init(&speeds.link, CG_ESTIMATOR_HARMONIC, 0);
        for (int i = 0; i < CG_ESTIMATOR_WINDOW; i++) // as in an outage
            cg_estimator_add(&speeds.link, 1, SECOND, cg_now_ns() - age_ns);
        cg_link_return(link, &speeds);
        return engine.look_up(tokens).hit_tokens;
    };
    ASSERT_GT(cg_now_ns(), 40 * SECOND);
    EXPECT_EQ(hit_tokens(0), 0u);
    EXPECT_EQ(hit_tokens(31 * SECOND), 127u);
    EXPECT_EQ(engine.stats().throughput_bps, 0u) << "the link counts as unknown";
    cg_link_put(link, 0);
}

} // namespace
