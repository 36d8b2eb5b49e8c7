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
        const cg_link_mark mark = cg_link_meter_begin(&speeds->meter, bytes, at_ns);
        cg_link_return(link, speeds);
        cg_link_borrow(link, speeds);
        cg_link_meter_end(&speeds->meter, mark, bytes, at_ns, at_ns + SECOND, 0, &speeds->link);
        cg_link_return(link, speeds);
        return cg_estimator_bps(&speeds->link);
    }
    static void tell(cg_link *link, cg_speeds *speeds, double wanted_bytes)
    {
        cg_link_borrow(link, speeds);
        speeds->wanted = {wanted_bytes, wanted_bytes > 0};
        cg_link_return(link, speeds);
    }
    static double others(cg_link *link, cg_speeds *speeds)
    {
        cg_link_borrow(link, speeds);
        cg_link_return(link, speeds);
        return speeds->others.bytes;
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
        cg_link_put(l, {});
    link = cg_link_get(1);
    cg_speeds d = {};
    others(link, &d);
    EXPECT_EQ(cg_estimator_bps(&d.link), 0) << "it ends with its last user";
    cg_link_put(link, {});
}

TEST_F(LinkTest, ReadsOfTwoConnectorsAtOnceAreOneLinksBusyTime)
{
    cg_link *link = cg_link_get(1), *same = cg_link_get(1);
    cg_speeds a = {}, b = {};
    cg_link_borrow(link, &a);
    const cg_link_mark mark_a = cg_link_meter_begin(&a.meter, 1000000, SECOND);
    cg_link_return(link, &a);
    cg_link_borrow(same, &b);
    const cg_link_mark mark_b = cg_link_meter_begin(&b.meter, 1000000, SECOND);
    cg_link_return(same, &b);
    cg_link_borrow(link, &a);
    cg_link_meter_end(&a.meter, mark_a, 1000000, SECOND, 2 * SECOND, 0, &a.link);
    cg_link_return(link, &a);
    cg_link_borrow(same, &b);
    cg_link_meter_end(&b.meter, mark_b, 1000000, SECOND, 2 * SECOND, 0, &b.link);
    cg_link_return(same, &b);
    EXPECT_DOUBLE_EQ(cg_estimator_bps(&b.link), 16e6) << "two megabytes in a second";
    cg_link_put(link, {});
    cg_link_put(same, {});
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
    EXPECT_EQ(c.others.n_loads, 2);
    tell(link, &a, 100);
    EXPECT_EQ(others(third, &c), 150);
    tell(same, &b, 0);
    EXPECT_EQ(others(third, &c), 100);
    EXPECT_EQ(c.others.n_loads, 1);
    tell(same, &b, 50);
    cg_link_put(link, a.wanted);
    EXPECT_EQ(others(third, &c), 50) << "one that was closed wants nothing";
    EXPECT_EQ(c.others.n_loads, 1);
    cg_link_put(same, b.wanted);
    cg_link_put(third, {});
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
    cg_link_put(link, {});
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

TEST_F(LinkTest, APromiseIsKeptUntilItsLoadBeginsOrItsTimeIsOver)
{
    cg_link *link = cg_link_get(1);
    const auto key = [](const char *text) { return cg_key_of_bytes(text, strlen(text)); };
    const auto add = [&](const char *plan, const char *prefix, double bytes, uint64_t until_s) {
        const cg_link_promise promise = {key(plan), key(prefix), bytes, 2 * bytes,
                                         until_s * SECOND};
        cg_link_promise_add(link, &promise, SECOND);
    };
    int64_t n_loads = 0;
    const auto promised = [&](const char *prefix, uint64_t now_s) {
        const cg_key own = key(prefix);
        double decode_ns;
        const cg_wanted sum = cg_link_promised(link, &own, now_s * SECOND, &decode_ns);
        EXPECT_EQ(decode_ns, 2 * sum.bytes);
        n_loads = sum.n_loads;
        return sum.bytes;
    };
    EXPECT_EQ(promised("x", 1), 0);
    add("plan a", "a", 100, 3);
    add("plan b", "b", 20, 4);
    EXPECT_EQ(promised("x", 2), 120);
    EXPECT_EQ(promised("a", 2), 20) << "its load would be shared";
    add("plan c", "a", 150, 5);
    EXPECT_EQ(promised("x", 2), 170) << "and so it counts once";
    EXPECT_EQ(n_loads, 2);
    EXPECT_EQ(promised("x", 3), 20) << "the first one's time is over";
    const cg_key plan_a = key("plan a"), plan_b = key("plan b");
    cg_link_promise_end(link, &plan_b);
    EXPECT_EQ(promised("x", 2), 150);
    cg_link_promise_end(link, &plan_a);
    EXPECT_EQ(promised("x", 2), 0);
    for (int i = 0; i < 1000; i++) // more than there is room for: the newest count
        add(("plan " + std::to_string(i)).c_str(), std::to_string(i).c_str(), 1, 10 + i);
    EXPECT_GT(promised("x", 2), 30);
    EXPECT_EQ(promised("x", 1009), 0);
    EXPECT_EQ(promised("x", 1008), 1);
    double decode_ns;
    cg_link_promise_end(nullptr, &plan_a);
    EXPECT_EQ(cg_link_promised(nullptr, &plan_a, 0, &decode_ns).bytes + decode_ns, 0);
    cg_link_put(link, {});
}

TEST(ReaderFilesTest, WherePlacesAreFewFilesThatWereReadMakeRoom)
{
    cg_reader_files *files = cg_reader_files_new();
    cg_reader_files_begin(files);
    const auto name = [](uint8_t i) {
        cg_reader_name of = {};
        of.key.bytes[0] = i;
        return of;
    };
    const auto put = [&](uint8_t i, bool is_read) {
        const cg_reader_name of = name(i);
        return cg_reader_files_put(files, &of, 1000 + i, is_read, 2);
    };
    const auto take = [&](uint8_t i) {
        const cg_reader_name of = name(i);
        return cg_reader_files_take(files, &of);
    };
    for (uint8_t i = 0; i < CG_READER_FILES; i++)
        EXPECT_TRUE(put(i, false));
    EXPECT_FALSE(put(200, false));
    EXPECT_EQ(cg_reader_files_drop(files, 3), -1);
    cg_reader_files_give(files, take(7), /*is_read=*/true, 4);
    cg_reader_files_give(files, take(9), /*is_read=*/true, 3);
    cg_reader_files_give(files, take(11), /*is_read=*/true, 3);
    cg_open_file *again = take(11);
    EXPECT_EQ(cg_reader_files_wake_ns(files), 0u);
    EXPECT_EQ(cg_reader_files_drop(files, 5), 1009) << "the one that was used first";
    EXPECT_EQ(cg_reader_files_drop(files, 5), 1007);
    EXPECT_EQ(cg_reader_files_drop(files, 5), -1) << "it is read again";
    cg_reader_files_give(files, again, /*is_read=*/false, 5);
    EXPECT_EQ(cg_reader_files_drop(files, 5), -1);
    EXPECT_EQ(cg_reader_files_room(files), 2u);
    for (const uint8_t i : {201, 202})
        EXPECT_TRUE(put(i, /*is_read=*/true));
    // Of all that are read so many go that a load finds room for its next files.
    for (uint8_t i = 20; i < 90; i++)
        cg_reader_files_give(files, take(i), /*is_read=*/true, 6);
    size_t n_dropped = 0;
    while (cg_reader_files_drop(files, 7) >= 0)
        n_dropped++;
    EXPECT_EQ(n_dropped, CG_READER_FILES / 3u);
    EXPECT_EQ(cg_reader_files_room(files), n_dropped);
    EXPECT_EQ(cg_reader_files_wake_ns(files), 2 + 5 * SECOND) << "the others stay for their time";
    cg_reader_files_end(files);
    while (cg_reader_files_drop(files, 7) >= 0)
        n_dropped++;
    EXPECT_EQ(n_dropped, size_t{CG_READER_FILES});
    cg_reader_files_free(files);
}

// Whoever opened it must not wait until it is closed.
TEST(ReaderFilesTest, ASecondFileOfANameIsTheReadersToClose)
{
    cg_reader_files *files = cg_reader_files_new();
    const cg_reader_name name = {};
    EXPECT_FALSE(cg_reader_files_put(files, &name, 1000, false, 1)) << "there is no reader";
    cg_reader_files_begin(files);
    EXPECT_TRUE(cg_reader_files_put(files, &name, 1000, false, 1));
    EXPECT_TRUE(cg_reader_files_put(files, &name, 1001, false, 1));
    cg_open_file *file = cg_reader_files_take(files, &name);
    EXPECT_EQ(cg_open_file_fd(file), 1000);
    EXPECT_EQ(cg_reader_files_drop(files, 2), 1001);
    EXPECT_EQ(cg_reader_files_drop(files, 2), -1);
    cg_reader_files_give(files, file, false, 2);
    cg_reader_files_end(files);
    EXPECT_EQ(cg_reader_files_drop(files, 2), 1000);
    cg_reader_files_free(files);
}

// A promise of a short load lasts two seconds, and a busy machine may take longer for two calls:
// then once more.
class PromiseTest : public LinkTest
{
  protected:
    void SetUp() override
    {
        struct stat root;
        ASSERT_EQ(stat(store.dir.path.c_str(), &root), 0);
        link = cg_link_get(root.st_dev);
        for (uint32_t seed : {1, 2})
            ASSERT_EQ(engine.save(prompt(128, seed)), CACHEGEN_OK);
        cg_speeds speeds = {};
        cg_link_borrow(link, &speeds);
        cg_estimator_add(&speeds.link, 100000, SECOND, cg_now_ns());
        cg_link_return(link, &speeds);
    }
    void TearDown() override
    {
        cg_link_put(link, {});
    }
    double promised(uint64_t at_ns = cg_now_ns()) const
    {
        const cg_key none = {};
        double decode_ns;
        return cg_link_promised(link, &none, at_ns, &decode_ns).bytes;
    }
    template <typename Try> static bool comes_true_at_once(Try attempt)
    {
        for (int i = 0; i < 100; i++)
            if (attempt())
                return true;
        return false;
    }
    const Store store;
    Engine engine{store}, other{store};
    cg_link *link = nullptr;
};

TEST_F(PromiseTest, ALookUpCountsWhatThoseBeforeItWerePromised)
{
    const auto alone_ns = engine.look_up(prompt(128, 1)).predicted_ns;
    ASSERT_GT(alone_ns, 0u);
    EXPECT_TRUE(comes_true_at_once([&] {
        engine.look_up(prompt(128, 1));
        return other.look_up(prompt(128, 2)).predicted_ns > alone_ns * 3 / 2;
    }));
}

TEST_F(PromiseTest, ALoadThatBeginsHasItsPromise)
{
    EXPECT_TRUE(comes_true_at_once([&] {
        engine.look_up(prompt(128));
        const double before = promised();
        cachegen_load *load;
        other.plan = engine.plan; // as a worker's, in the same process
        EXPECT_EQ(other.load_start(0, 127, &load), CACHEGEN_OK);
        const double after = promised();
        cachegen_load_free(load);
        return before > 0 && after == 0;
    }));
}

TEST_F(PromiseTest, ALookUpThatIsFreedWithoutItsPlanPromisesNothing)
{
    const Tokens tokens = prompt(128);
    EXPECT_TRUE(comes_true_at_once([&] {
        const cachegen_request request = engine.request(tokens);
        cachegen_lookup *lookup;
        cachegen_hit hit = {};
        hit.struct_size = sizeof hit;
        EXPECT_EQ(cachegen_lookup_start(engine.c, &request, 0, &lookup), CACHEGEN_OK);
        const auto poll_op = [&] { return cachegen_lookup_poll(lookup, &hit); };
        EXPECT_EQ(wait_for(engine.c, poll_op), CACHEGEN_OK);
        const double before = promised();
        cachegen_lookup_free(lookup);
        return before > 0 && promised() == 0;
    }));
}

// In a process whose loads another one makes nobody says that they have begun.
TEST_F(PromiseTest, APromiseOfALongLoadIsKeptUntilThatShouldBeOver)
{
    cg_speeds speeds = {};
    cg_link_borrow(link, &speeds);
    cg_estimator_init(&speeds.link, CG_ESTIMATOR_HARMONIC, 0);
    cg_estimator_add(&speeds.link, 10000, SECOND, cg_now_ns());
    cg_link_return(link, &speeds);
    Engine slow(store, "\"ttft_budget_ms\": 600000");
    const uint64_t before_ns = cg_now_ns();
    const cachegen_hit hit = slow.look_up(prompt(128));
    const uint64_t after_ns = cg_now_ns();
    ASSERT_GT(hit.predicted_ns, 4 * SECOND);
    ASSERT_EQ(hit.hit_tokens, 127u);
    EXPECT_GT(promised(before_ns + hit.predicted_ns - 1), 0);
    EXPECT_EQ(promised(after_ns + hit.predicted_ns), 0);
}

// Nobody would measure anew.
TEST_F(LinkTest, ALookUpByWhoseEstimateNothingPaysTriesAgainWhenThatIsOld)
{
    const Store store(true);
    // In 12.8 ms: more than a store takes to answer that is here, on a busy machine, too.
    Engine engine(store, "\"policy\": \"min_delay\", \"recompute_tokens_per_s\": 1e4");
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
    cg_link_put(link, {});
}

} // namespace
