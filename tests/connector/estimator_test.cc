#include "connector/estimator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace
{

constexpr uint64_t MS = 1000000, SECOND = 1000 * MS;
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
    // 100 Mbit that came at mbps.
    void add(double mbps, uint64_t at_s)
    {
        cg_estimator_add(&e, 100 * MBIT, static_cast<uint64_t>(100 / mbps * SECOND), at_s * SECOND);
    }
    void feed(double mbps, int n = 1)
    {
        for (int i = 0; i < n; i++)
            add(mbps, 0);
    }
    double mbps() const
    {
        return cg_estimator_bps(&e) / 1e6;
    }
    cg_estimator e;
};

TEST_F(EstimatorTest, WhatWasOnlyToldLeavesMoreHope)
{
    EXPECT_GE(cg_estimator_hope(&e), 4);
    feed(100);
    EXPECT_LE(cg_estimator_hope(&e), 2);
    EXPECT_GT(cg_estimator_hope(&e), 1);
}

TEST_F(EstimatorTest, AWindowThatIsHalfAMinuteOldCanBeForgotten)
{
    start(CG_ESTIMATOR_HARMONIC, 50e6);
    EXPECT_FALSE(cg_estimator_forget_old(&e, 100 * SECOND)) << "there is nothing";
    for (int i = 0; i < CG_ESTIMATOR_WINDOW; i++)
        add(0.1, 10);
    EXPECT_FALSE(cg_estimator_forget_old(&e, 39 * SECOND));
    EXPECT_LT(mbps(), 1);
    EXPECT_TRUE(cg_estimator_forget_old(&e, 40 * SECOND));
    EXPECT_DOUBLE_EQ(mbps(), 50);
    EXPECT_FALSE(cg_estimator_forget_old(&e, 100 * SECOND));
}

TEST_F(EstimatorTest, APriorIsDoubtedLessAndLessOftenUntilTheLinkIsMeasured)
{
    start(CG_ESTIMATOR_HARMONIC, 50e6);
    std::vector<int> doubted_at_s;
    for (int s = 1; s < 2000; s++)
        if (cg_estimator_doubt_prior(&e, s * SECOND))
            doubted_at_s.push_back(s);
    EXPECT_EQ(doubted_at_s, (std::vector<int>{1, 31, 91, 211, 451, 931, 1411, 1891}));
    add(0.1, 2000);
    EXPECT_FALSE(cg_estimator_doubt_prior(&e, 4000 * SECOND)) << "it holds no more";
    ASSERT_TRUE(cg_estimator_forget_old(&e, 4000 * SECOND));
    EXPECT_TRUE(cg_estimator_doubt_prior(&e, 4000 * SECOND));
    start(CG_ESTIMATOR_HARMONIC, 0);
    EXPECT_FALSE(cg_estimator_doubt_prior(&e, 4000 * SECOND)) << "nothing was told";
}

TEST_F(EstimatorTest, FewSamplesCanBeForgottenSoonerAndEachTimeInVainHalfAsSoon)
{
    start(CG_ESTIMATOR_HARMONIC, 0);
    uint64_t at_s = 10;
    const auto seconds = [&](int n_samples) {
        uint64_t s = 0;
        for (int i = 0; i < n_samples; i++)
            add(0.1, at_s);
        while (!cg_estimator_forget_old(&e, at_s * SECOND + s))
            s += SECOND / 2;
        at_s += 100;
        return static_cast<double>(s) / SECOND;
    };
    EXPECT_EQ(seconds(1), 1.5);
    EXPECT_EQ(seconds(1), 3);
    EXPECT_EQ(seconds(2), 12);
    EXPECT_EQ(seconds(1), 12);
    EXPECT_EQ(seconds(3), 30);
    for (int i = 0; i < 40; i++)
        EXPECT_EQ(seconds(4), 30);
    EXPECT_EQ(seconds(5), 7.5) << "it has been measured since";
    EXPECT_EQ(seconds(1), 3);
}

TEST_F(EstimatorTest, KnowsNothingBeforeTheFirstSampleButAPrior)
{
    EXPECT_EQ(mbps(), 0);
    start(CG_ESTIMATOR_HARMONIC, 50e6);
    EXPECT_DOUBLE_EQ(mbps(), 50);
    feed(100);
    EXPECT_DOUBLE_EQ(mbps(), 100);
}

TEST_F(EstimatorTest, IsTheBytesOfTheWindowOverItsTime)
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

TEST_F(EstimatorTest, OneShortSpikeChangesLittle)
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
    EXPECT_NEAR(mbps(), 7, 1e-6);
}

TEST_F(EstimatorTest, SamplesWithoutBytesOrTimeTeachNothing)
{
    cg_estimator_add(&e, 0, 1000, 0);
    cg_estimator_add(&e, 1000, 0, 0);
    EXPECT_EQ(mbps(), 0);
    EXPECT_EQ(e.generation, 0u);
}

// ---- the meter, on a link of the test's own ----

// A link that gives every read under way the same share (a TCP connection each), or that serves
// them in order (one connection), and takes a while to answer at all.
class Link
{
  public:
    Link(double mbps, bool in_order, uint64_t round_trip_ns, cg_estimator *estimator)
        : bytes_per_ns_(mbps * MBIT / 1e9), in_order_(in_order), round_trip_ns_(round_trip_ns),
          estimator_(estimator)
    {
    }
    // Reads of these sizes, so many at once.
    void run(const std::vector<uint64_t> &sizes, size_t n_at_once)
    {
        size_t next = 0;
        while (next < sizes.size() || !reads_.empty()) {
            while (next < sizes.size() && reads_.size() < n_at_once)
                begin(sizes[next++]);
            if (!reads_.empty() && next < sizes.size())
                busy_bps = cg_estimator_bps(estimator_);
            step();
        }
    }
    // Reads that the store does not answer.
    void hang(size_t n, uint64_t bytes)
    {
        const uint64_t begun_ns = static_cast<uint64_t>(now_ns_);
        for (size_t i = 0; i < n; i++)
            hanging_.push_back(
                {bytes, begun_ns, cg_link_meter_begin(&meter_, bytes, begun_ns), 0, 0});
    }
    // They end after all, with all of their bytes or with none.
    void end_hanging(bool with_bytes)
    {
        for (const Read &read : hanging_)
            cg_link_meter_end(&meter_, read.mark, with_bytes ? read.bytes : 0, read.begun_ns,
                              static_cast<uint64_t>(now_ns_), 0, estimator_);
        hanging_.clear();
    }
    void idle(uint64_t ns)
    {
        now_ns_ += static_cast<double>(ns);
    }
    double now_ns() const
    {
        return now_ns_;
    }
    double shares_ns = 0;
    double busy_bps = 0; // the estimate while reads were still coming

  private:
    struct Read {
        uint64_t bytes, begun_ns;
        cg_link_mark mark;
        double left_bytes, answered_ns;
    };
    void begin(uint64_t bytes)
    {
        const uint64_t begun_ns = static_cast<uint64_t>(now_ns_);
        reads_.push_back({bytes, begun_ns, cg_link_meter_begin(&meter_, bytes, begun_ns),
                          static_cast<double>(bytes),
                          now_ns_ + static_cast<double>(round_trip_ns_)});
    }
    double rate(size_t i, size_t n_moving) const
    {
        if (reads_[i].answered_ns > now_ns_)
            return 0;
        if (!in_order_)
            return bytes_per_ns_ / static_cast<double>(n_moving);
        for (size_t before = 0; before < i; before++)
            if (reads_[before].answered_ns <= now_ns_)
                return 0;
        return bytes_per_ns_;
    }
    // Until the next answer begins or the next read ends.
    void step()
    {
        size_t n_moving = 0;
        for (const Read &read : reads_)
            n_moving += read.answered_ns <= now_ns_;
        double ns = 1e18;
        for (size_t i = 0; i < reads_.size(); i++) {
            const double r = rate(i, n_moving);
            ns = std::min(ns, r > 0                             ? reads_[i].left_bytes / r
                              : reads_[i].answered_ns > now_ns_ ? reads_[i].answered_ns - now_ns_
                                                                : ns);
        }
        std::vector<double> rates;
        for (size_t i = 0; i < reads_.size(); i++)
            rates.push_back(rate(i, n_moving));
        for (size_t i = 0; i < reads_.size(); i++)
            reads_[i].left_bytes -= rates[i] * ns;
        now_ns_ += ns;
        for (size_t i = reads_.size(); i-- > 0;)
            if (reads_[i].left_bytes < 0.5) {
                shares_ns +=
                    cg_link_meter_end(&meter_, reads_[i].mark, reads_[i].bytes, reads_[i].begun_ns,
                                      static_cast<uint64_t>(now_ns_), 0, estimator_);
                reads_.erase(reads_.begin() + static_cast<long>(i));
            }
    }
    const double bytes_per_ns_;
    const bool in_order_;
    const uint64_t round_trip_ns_;
    cg_estimator *estimator_;
    cg_link_meter meter_ = {};
    double now_ns_ = 1e9;
    std::vector<Read> reads_, hanging_;
};

std::vector<uint64_t> draw_sizes(size_t n, uint32_t seed)
{
    std::mt19937 random(seed);
    std::vector<uint64_t> sizes;
    for (size_t i = 0; i < n; i++)
        sizes.push_back(16384 + random() % (256 << 10));
    return sizes;
}

TEST_F(EstimatorTest, ReadsThatOverlapAreCreditedWithTheirShareOfTheLink)
{
    for (const double rate : {20.0, 40.0, 300.0, 1000.0})
        for (const bool in_order : {false, true})
            for (size_t n_at_once = 1; n_at_once <= 16; n_at_once++) {
                SCOPED_TRACE(testing::Message() << rate << " Mbit/s, " << n_at_once << " at once"
                                                << (in_order ? ", in order" : ""));
                start(CG_ESTIMATOR_HARMONIC);
                Link link(rate, in_order, 0, &e);
                const double began_ns = link.now_ns();
                link.run(draw_sizes(400, static_cast<uint32_t>(n_at_once)), n_at_once);
                EXPECT_NEAR(link.busy_bps / 1e6 / rate, 1, 0.1);
                // In order, the last reads of a burst get what the first ones lacked.
                EXPECT_NEAR(mbps() / rate, 1, in_order ? 0.35 : 0.1);
                EXPECT_NEAR(link.shares_ns / (link.now_ns() - began_ns), 1, 1e-3)
                    << "shares add up to the time in which the link was busy";
            }
}

TEST_F(EstimatorTest, ReadsThatHangTakeNoShareOfTheLinkFromTheOthers)
{
    for (const bool in_order : {false, true})
        for (const size_t n_hanging : {1, 4, 12}) // with four others that do not
            for (const bool with_bytes : {false, true}) {
                SCOPED_TRACE(testing::Message()
                             << n_hanging << " hang" << (in_order ? ", in order" : "")
                             << (with_bytes ? ", and come" : ""));
                start(CG_ESTIMATOR_HARMONIC);
                Link link(100, in_order, 0, &e);
                link.hang(n_hanging, 128 << 10);
                link.run(draw_sizes(400, 1), 4);
                EXPECT_NEAR(link.busy_bps / 1e8, 1, 0.1);
                link.end_hanging(with_bytes);
                link.run(draw_sizes(100, 2), 4);
                EXPECT_NEAR(link.busy_bps / 1e8, 1, 0.15);
            }
}

TEST_F(EstimatorTest, OfReadsThatAllGetSlowNoneIsSetAside)
{
    for (const bool in_order : {false, true})
        for (const uint64_t round_trip_ns : {UINT64_C(0), 200 * MS}) {
            start(CG_ESTIMATOR_HARMONIC);
            Link fast(100, in_order, 0, &e), slow(1, in_order, round_trip_ns, &e);
            fast.run(draw_sizes(100, 1), 8);
            slow.run(draw_sizes(100, 2), 8);
            EXPECT_NEAR(slow.busy_bps / 1e6, 1, 0.15);
        }
}

// It began before the others, and the cache says nothing of the link.
TEST_F(EstimatorTest, WhatThePageCacheBringsSetsNothingAside)
{
    cg_link_meter meter = {};
    const cg_link_mark mark = cg_link_meter_begin(&meter, 64 << 10, 0);
    for (uint64_t now_ns = MS; now_ns < SECOND; now_ns += MS)
        cg_link_meter_end(&meter, cg_link_meter_begin(&meter, 256 << 10, now_ns), 256 << 10, now_ns,
                          now_ns + 50000, 0, &e);
    EXPECT_EQ(meter.n_reading, 1u);
    EXPECT_GT(cg_link_meter_end(&meter, mark, 64 << 10, 0, SECOND, 0, &e), 900.0 * MS);
    EXPECT_EQ(meter.n_reading, 0u);
}

TEST_F(EstimatorTest, MoreReadsThanAMeterFollowsAreMeasuredAllTheSame)
{
    for (const size_t n_at_once : {CG_METER_READS + 1, 3 * CG_METER_READS}) {
        start(CG_ESTIMATOR_HARMONIC);
        Link link(100, false, 0, &e);
        link.run(draw_sizes(1000, 1), n_at_once);
        EXPECT_NEAR(link.busy_bps / 1e8, 1, 0.15);
    }
}

TEST_F(EstimatorTest, ASmallTailOverARoundTripSaysNothingOfTheLink)
{
    Link link(1000, false, 20 * MS, &e);
    link.run(std::vector<uint64_t>(64, 256 << 10), 16);
    const double before = mbps();
    EXPECT_GT(before, 600) << "sixteen reads fill most of such a link";
    for (int i = 0; i < 20; i++) {
        link.idle(100 * MS);
        link.run({8192}, 1);
    }
    EXPECT_NEAR(mbps() / before, 1, 0.1);
}

// However long the round trip is.
TEST_F(EstimatorTest, OfAFarStoreASmallTailAloneIsNoSample)
{
    for (const uint64_t round_trip_ns : {20 * MS, 60 * MS, 150 * MS})
        for (const bool is_measured : {true, false}) {
            SCOPED_TRACE(testing::Message() << round_trip_ns << (is_measured ? "" : ", a prior"));
            start(CG_ESTIMATOR_HARMONIC);
            if (is_measured)
                cg_estimator_add(&e, 125 << 20, SECOND, 0);
            else
                e.prior_bps = 1e9;
            const double before = mbps();
            cg_link_meter meter = {};
            for (uint64_t now_ns = SECOND; now_ns < 10 * SECOND; now_ns += SECOND) {
                const cg_link_mark mark = cg_link_meter_begin(&meter, 9000, now_ns);
                cg_link_meter_end(&meter, mark, 9000, now_ns, now_ns + round_trip_ns + MS,
                                  static_cast<double>(round_trip_ns), &e);
            }
            EXPECT_EQ(mbps(), before);
            const cg_reported_load tail = {9000, 0, round_trip_ns + MS, 0};
            cg_estimator_add_load(&e, &tail, static_cast<double>(round_trip_ns), 10 * SECOND);
            EXPECT_EQ(mbps(), before) << "nor if another process tells of it";
        }
}

TEST_F(EstimatorTest, ASampleThatIsLittleButARoundTripMayBeOfAMuchFasterLink)
{
    const struct {
        const char *what;
        uint64_t bytes, took_ns, latency_ns;
        double want;
    } cases[] = {
        {"near", 64 << 10, 2 * MS, 2 * MS, 1},
        {"a round trip and no more", 64 << 10, 60 * MS, 60 * MS, 8},
        {"a fifth of it is the link's", 64 << 10, 75 * MS, 60 * MS, 5},
        {"half of it is the link's", 64 << 10, 120 * MS, 60 * MS, 1},
        {"it is nearer than it was", 64 << 10, 20 * MS, 60 * MS, 1},
    };
    for (const auto &c : cases) {
        start(CG_ESTIMATOR_HARMONIC);
        const double latency_ns = static_cast<double>(c.latency_ns);
        EXPECT_EQ(cg_estimator_without_trip(&e, latency_ns), 1) << c.what;
        cg_estimator_add(&e, c.bytes, c.took_ns, 0);
        EXPECT_NEAR(cg_estimator_without_trip(&e, latency_ns), c.want, 1e-6) << c.what;
    }
    start(CG_ESTIMATOR_HARMONIC); // beside what is known it is at least as fast as that
    for (int i = 0; i < 20; i++)
        cg_estimator_add(&e, 125 << 20, SECOND, 0);
    cg_estimator_add(&e, 64 << 10, 60 * MS, 0);
    EXPECT_EQ(cg_estimator_without_trip(&e, 60e6), 1);
}

TEST_F(EstimatorTest, WhatRoundTripsAloneSayEndsWithTheFirstSampleThatIsNone)
{
    EXPECT_EQ(cg_estimator_trips_alone(&e, 60e6), 1) << "nothing was seen";
    for (int i = 0; i < 3; i++)
        cg_estimator_add(&e, 64 << 10, 61 * MS, 0);
    EXPECT_EQ(cg_estimator_trips_alone(&e, 60e6), CG_ESTIMATOR_MOST_TRIP);
    start(CG_ESTIMATOR_HARMONIC, 0);
    cg_estimator_add(&e, 64 << 10, 11 * MS, 0);
    EXPECT_GT(cg_estimator_without_trip(&e, 10e6), 1);
    EXPECT_EQ(cg_estimator_trips_alone(&e, 10e6), 1) << "too near";
    start(CG_ESTIMATOR_HARMONIC, 0);
    for (int i = 0; i < 3; i++)
        cg_estimator_add(&e, 64 << 10, 61 * MS, 0);
    cg_estimator_add(&e, 256 << 10, 120 * MS, 0);
    cg_estimator_add(&e, 64 << 10, 61 * MS, 0);
    EXPECT_EQ(cg_estimator_without_trip(&e, 60e6), 1);
    EXPECT_EQ(cg_estimator_trips_alone(&e, 60e6), 1);
}

TEST_F(EstimatorTest, AfterManyReadsAtOnceASlowLinkIsStillSeen)
{
    Link fast(100, false, 0, &e);
    fast.run(draw_sizes(40, 1), 4);
    EXPECT_NEAR(mbps(), 100, 10);
    Link slow(0.5, false, 0, &e); // 8 kB take 131 ms: no round trip is that long
    slow.run({8192, 8192}, 1);
    EXPECT_NEAR(mbps(), 0.5, 0.05);
}

TEST_F(EstimatorTest, ThePageCacheIsNotTheLink)
{
    Link link(40, false, 0, &e);
    link.run(draw_sizes(20, 1), 4);
    cg_link_meter meter = {};
    for (uint64_t i = 0; i < 100; i++) { // 256 KiB in 50 us
        const uint64_t now_ns = i * 100000;
        const cg_link_mark mark = cg_link_meter_begin(&meter, 256 << 10, now_ns);
        cg_link_meter_end(&meter, mark, 256 << 10, now_ns, now_ns + 50000, 0, &e);
    }
    EXPECT_NEAR(mbps(), 40, 4);

    start(CG_ESTIMATOR_HARMONIC); // but where it is all that there is, it is known
    cg_link_meter_end(&meter, cg_link_meter_begin(&meter, 256 << 10, 0), 256 << 10, 0, 50000, 0,
                      &e);
    EXPECT_NEAR(mbps(), 8 * 262144 / 50.0, 1);
    link.run({1 << 20}, 1);
    EXPECT_NEAR(mbps(), 40, 4);
}

// 16 KiB in 100 us are 1.3 Gbit/s, which a link may have; but not that of a store which takes 20 ms
// to answer.
TEST_F(EstimatorTest, AFarStoreSendsNothingSoonerThanItAnswers)
{
    const struct {
        uint64_t latency_ns, took_ns;
        bool is_from_memory;
    } cases[] = {
        {20 * MS, 100000, true},   {20 * MS, 4 * MS, true},
        {20 * MS, 12 * MS, false}, {400 * MS, 9 * MS, false}, // it may be near by now
        {0, 100000, false},        {2 * MS, 500000, false},
    };
    for (const auto &c : cases) {
        SCOPED_TRACE(std::to_string(c.latency_ns) + " " + std::to_string(c.took_ns));
        start(CG_ESTIMATOR_HARMONIC);
        Link link(10, false, 0, &e);
        link.run(draw_sizes(20, 1), 4);
        const uint32_t n_before = e.n_added;
        cg_link_meter meter = {};
        for (uint64_t i = 0; i < 40; i++) {
            const uint64_t now_ns = i * 100 * MS;
            const cg_link_mark mark = cg_link_meter_begin(&meter, 16 << 10, now_ns);
            cg_link_meter_end(&meter, mark, 16 << 10, now_ns, now_ns + c.took_ns,
                              static_cast<double>(c.latency_ns), &e);
        }
        EXPECT_EQ(e.n_added == n_before, c.is_from_memory);
        if (c.is_from_memory) {
            EXPECT_NEAR(mbps(), 10, 1);
        }
    }
}

// The scheduler of several ranks measures nothing itself.
TEST_F(EstimatorTest, ALoadThatAnotherProcessReportsIsJudgedAsItsReadsAre)
{
    constexpr uint64_t MIB = 1 << 20, MIB_NS = 8388608; // at 1,000 Mbit/s
    const auto report = [&](int n, const cg_reported_load &load, uint64_t at_ns) {
        for (int i = 0; i < n; i++)
            cg_estimator_add_load(&e, &load, 0, at_ns);
    };
    report(20, {MIB, 0, MIB_NS, 0}, 0);
    EXPECT_NEAR(mbps(), 1000, 1);
    report(3, {8000, 0, 20 * MS, 0}, SECOND); // a tail, and a round trip
    EXPECT_NEAR(mbps(), 1000, 1);
    report(3, {100 * MIB, 100 * MIB, 10 * MS, 10 * MS}, SECOND); // the page cache
    EXPECT_NEAR(mbps(), 1000, 1);
    report(3, {91 * MIB, 90 * MIB, 45 * MS + MIB_NS, 45 * MS}, SECOND); // mostly
    EXPECT_NEAR(mbps(), 1000, 1);
    report(2, {MIB, 0, 100 * MIB_NS, 0}, 2 * SECOND); // but a link may have become slow
    EXPECT_NEAR(mbps(), 10, 0.1);

    start(CG_ESTIMATOR_HARMONIC);
    report(1, {1000, 0, SECOND, 0}, 0);
    EXPECT_NEAR(mbps(), 0.008, 1e-6) << "better than nothing";
    start(CG_ESTIMATOR_HARMONIC);
    report(1, {MIB, MIB, 1048576, 1048576}, 0);
    EXPECT_NEAR(mbps(), 8000, 1) << "where every read came from memory it is the memory's speed";
}

TEST_F(EstimatorTest, AReadThatFailedTeachesNothing)
{
    cg_link_meter meter = {};
    EXPECT_EQ(cg_link_meter_end(&meter, cg_link_meter_begin(&meter, 7, 5), 0, 5, 905, 0, &e), 900);
    EXPECT_EQ(e.generation, 0u);
    EXPECT_EQ(meter.n_reading, 0u);
}

TEST_F(EstimatorTest, ASampleCountsLessTheOlderItIs)
{
    add(100, 0);
    add(50, 0);
    add(60, 300); // five minutes later
    EXPECT_NEAR(mbps(), 60, 0.1);
}

TEST_F(EstimatorTest, TheLinkIsTrustedLessWhereSamplesDifferAreFewOrOld)
{
    const auto low = [&](uint64_t at_s) { return cg_estimator_low_bps(&e, at_s * SECOND) / 1e6; };
    EXPECT_EQ(low(0), 0);
    add(100, 0);
    const double one = low(0);
    EXPECT_LT(one, 70);
    for (int i = 0; i < 19; i++)
        add(100, 0);
    const double many = low(0);
    EXPECT_GT(many, 90);
    EXPECT_LT(many, 100);
    EXPECT_LT(low(10), many * 0.7);
    EXPECT_GT(low(1000), many * 0.49);
    add(60, 0);
    EXPECT_LT(low(0), many * 0.97);
    start(CG_ESTIMATOR_HARMONIC, 80e6);
    EXPECT_NEAR(low(0), 10, 1e-6) << "a prior is a guess";
}

} // namespace
