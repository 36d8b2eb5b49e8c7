// What a connector promises of a store that hangs: every operation ends, and so does closing.
#include "tests/connector/engine.h"
#include "tests/connector/inside.h"
#include "tests/connector/step.h"
#include "tests/connector/touched_pages.h"
#include "tests/connector/watch.h"
#include "tests/iouring/require.h"
#ifdef CG_TEST_HAS_FUSE
#include "tests/iouring/odd_fs.h"
#endif

#include <fcntl.h>
#include <malloc.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <thread>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
#endif

namespace
{

// How often memory as large as a copy of a chunk's K and V was freed while lock_of_steps is set,
// and how often by a thread that had this lock.
constexpr size_t COPY_BYTES = 16 << 10; // 4 layers, K and V of 2 heads of 16 bf16, 32 tokens
std::atomic<pthread_mutex_t *> lock_of_steps{nullptr};
std::atomic<int> n_freed{0}, n_freed_with_lock{0};
thread_local bool tells_lock = false; // the last that it gives back

// Unless 0: what the thread of look-ups waits for so long or longer it waits for without end, and
// how often it has begun to.
std::atomic<uint64_t> endless_from_ns{0};
std::atomic<int> n_endless{0};

} // namespace

// The linker has the library's calls come here (--wrap).
extern "C" int __real_pthread_mutex_unlock(pthread_mutex_t *lock);
extern "C" int __wrap_pthread_mutex_unlock(pthread_mutex_t *lock);
extern "C" int __wrap_pthread_mutex_unlock(pthread_mutex_t *lock)
{
    if (tells_lock)
        lock_of_steps = lock;
    return __real_pthread_mutex_unlock(lock);
}
extern "C" cg_status __real_cg_io_wait(cg_io *io, uint64_t timeout_ns, cg_io_completion *out,
                                       size_t most, size_t *n_out);
extern "C" cg_status __wrap_cg_io_wait(cg_io *io, uint64_t timeout_ns, cg_io_completion *out,
                                       size_t most, size_t *n_out);
extern "C" cg_status __wrap_cg_io_wait(cg_io *io, uint64_t timeout_ns, cg_io_completion *out,
                                       size_t most, size_t *n_out)
{
    const uint64_t from_ns = endless_from_ns;
    char name[16] = "";
    if (from_ns > 0 && timeout_ns >= from_ns &&
        pthread_getname_np(pthread_self(), name, sizeof name) == 0 &&
        std::string(name) == "cachegen-look") {
        timeout_ns = UINT64_MAX;
        n_endless++;
    }
    return __real_cg_io_wait(io, timeout_ns, out, most, n_out);
}
extern "C" void __real_free(void *memory);
extern "C" void __wrap_free(void *memory);
extern "C" void __wrap_free(void *memory)
{
    const pthread_mutex_t *lock = lock_of_steps;
    if (lock != nullptr && memory != nullptr && malloc_usable_size(memory) >= COPY_BYTES) {
        n_freed++;
        n_freed_with_lock += __atomic_load_n(&lock->__data.__owner, __ATOMIC_RELAXED) == gettid();
    }
    __real_free(memory);
}

namespace
{

using namespace cg_test;

#ifndef CG_TEST_HAS_FUSE
TEST(HangTest, IsNotTested)
{
    CG_SKIP_OR_FAIL("fuse", "built without libfuse 3: hung stores are not tested");
}
#else

using Clock = std::chrono::steady_clock;
constexpr auto SLACK = std::chrono::seconds(8); // a loaded machine, a sanitizer

class HangTest : public testing::TestWithParam<const char *>
{
  protected:
    void SetUp() override
    {
        char reason[256];
        if (std::string(GetParam()) == "io_uring" && !cg_io_uring_reason(reason, sizeof reason))
            CG_SKIP_OR_FAIL("uring", "no io_uring here (" << reason << ")");
        odd = std::make_unique<OddFs>(store.dir.path, mount.path);
        if (!odd->why().empty())
            CG_SKIP_OR_FAIL("fuse", odd->why() << ": hung stores are not tested");
        n_threads = n_entries("/proc/self/task");
        n_descriptors = n_entries("/proc/self/fd");
        engine = open();
    }
    void TearDown() override
    {
        if (odd == nullptr || !odd->why().empty())
            return; // skipped
        odd->release();
        engine.reset();
        if (n_threads > 0) { // what was abandoned goes when the store answers; libfuse makes more
                             // threads as it needs them, so these are counted by their names
            EXPECT_TRUE(comes_true([] { return our_threads().empty(); }))
                << "threads are left: " << our_threads();
            EXPECT_TRUE(comes_true([&] { return n_entries("/proc/self/fd") <= n_descriptors; }))
                << "descriptors are left";
        }
        odd.reset();
    }
    std::unique_ptr<Engine> open(const std::string &more = "", int lookup_timeout_ms = 1000,
                                 int save_timeout_ms = 500) const
    {
        return std::make_unique<Engine>(
            mount.path, store.spec,
            std::string("\"io_backend\": \"") + GetParam() +
                "\", \"lookup_timeout_ms\": " + std::to_string(lookup_timeout_ms) +
                ", \"save_timeout_ms\": " + std::to_string(save_timeout_ms) +
                ", \"close_timeout_ms\": 1000" + more);
    }
    // What becomes of a load of 128 tokens from a store that hangs only meanwhile.
    cachegen_progress load_hung(const Tokens &tokens)
    {
        cachegen_progress p = {};
        p.struct_size = sizeof p;
        EXPECT_EQ(engine->save(tokens), CACHEGEN_OK);
        EXPECT_EQ(engine->look_up(tokens).hit_tokens, 127u);
        odd->set_mood(Mood::HANGING);
        cachegen_load *load = nullptr;
        EXPECT_EQ(engine->load_start(0, 127, &load), CACHEGEN_OK);
        ends_within(std::chrono::seconds(1), [&] {
            EXPECT_EQ(wait_for(engine->c, [&] { return cachegen_load_poll(load, &p); }),
                      CACHEGEN_OK);
        });
        cachegen_load_free(load);
        odd->set_mood(Mood::GOOD);
        return p;
    }
    // Runs what must end by itself. Where it does not, the store is woken, so that the test ends.
    template <typename Call> void ends_within(std::chrono::milliseconds limit, Call call)
    {
        auto ended = std::async(std::launch::async, call);
        if (ended.wait_for(limit + SLACK) == std::future_status::ready)
            return;
        ADD_FAILURE() << "hangs as long as the store does";
        odd->release();
        ended.wait();
    }
    void close_engine()
    {
        cachegen_close(engine->c);
        engine->c = nullptr;
    }
    // Starts a look-up and waits until the store holds it up in this mood.
    cachegen_lookup *start_held_lookup(const Tokens &tokens, Mood mood)
    {
        const int before = odd->n_hanging();
        odd->set_mood(mood);
        cachegen_lookup *lookup = start_lookup(tokens);
        EXPECT_TRUE(comes_true([&] { return odd->n_hanging() > before; }));
        return lookup;
    }
    cachegen_lookup *start_lookup(const Tokens &tokens) const
    {
        const cachegen_request r = engine->request(tokens);
        cachegen_lookup *lookup = nullptr;
        EXPECT_EQ(cachegen_lookup_start(engine->c, &r, 0, &lookup), CACHEGEN_OK);
        return lookup;
    }
    uint32_t finish(cachegen_lookup *lookup) const
    {
        cachegen_hit hit = {};
        hit.struct_size = sizeof hit;
        EXPECT_EQ(wait_for(engine->c, [&] { return cachegen_lookup_poll(lookup, &hit); }),
                  CACHEGEN_OK);
        cachegen_lookup_free(lookup);
        return hit.stored_tokens;
    }
    // A handle that is never freed, on purpose.
    static void forget([[maybe_unused]] cachegen_save *save)
    {
#if defined(__SANITIZE_ADDRESS__)
        __lsan_ignore_object(save);
#endif
    }
    // Starts a save and waits until the store holds it up.
    cachegen_save *start_hung_save(const Tokens &tokens)
    {
        cachegen_save *save = nullptr;
        engine->prefill(tokens);
        odd->set_mood(Mood::HANGING);
        EXPECT_EQ(engine->save_start(tokens, 0, static_cast<uint32_t>(tokens.size()), true, nullptr,
                                     0, &save),
                  CACHEGEN_OK);
        EXPECT_TRUE(comes_true([&] { return odd->n_hanging() > 0; }));
        return save;
    }

    const Store store;
    const TempDir mount;
    std::unique_ptr<OddFs> odd;
    std::unique_ptr<Engine> engine;
    size_t n_threads = 0, n_descriptors = 0;
};

TEST_P(HangTest, ClosingEndsInItsTime)
{
    const Tokens tokens = prompt(32 * 4);
    ASSERT_EQ(engine->save(tokens), CACHEGEN_OK);
    ASSERT_EQ(engine->look_up(tokens).hit_tokens, 127u);
    // Not freed, since that would wait for it; invalid after the close.
    forget(start_hung_save(prompt(32 * 4, 2)));
    cachegen_load *load;
    ASSERT_EQ(engine->load_start(0, 127, &load), CACHEGEN_OK);
    const cachegen_request r = engine->request(tokens);
    cachegen_lookup *lookup;
    ASSERT_EQ(cachegen_lookup_start(engine->c, &r, 0, &lookup), CACHEGEN_OK);
    cachegen_lookup_free(lookup);
    ends_within(std::chrono::seconds(2), [&] {
        cachegen_load_free(load);
        close_engine();
    });
}

TEST_P(HangTest, ClosingBeforeAnythingWasGivenUpEndsInItsTime)
{
    engine = open(", \"read_timeout_ms\": 60000");
    const Tokens tokens = prompt(32 * 4);
    ASSERT_EQ(engine->save(tokens), CACHEGEN_OK);
    ASSERT_EQ(engine->look_up(tokens).hit_tokens, 127u);
    odd->set_mood(Mood::HANGING);
    cachegen_load *load;
    ASSERT_EQ(engine->load_start(0, 127, &load), CACHEGEN_OK);
    ASSERT_TRUE(comes_true([&] { return odd->n_hanging() > 0; }));
    ends_within(std::chrono::seconds(1), [&] {
        cachegen_load_free(load);
        close_engine();
    });
}

// A far store's files are shared by reads. Who closes one that a read is still held up by lets the
// read's next step meet another file of that number.
TEST_P(HangTest, AFileOfAReadThatWasGivenUpStaysOpenUntilItHasEnded)
{
    const auto n_files = [&] {
        const std::string objects = mount.path + "/m/objects/";
        size_t n = 0;
        std::error_code gone;
        for (const auto &entry : std::filesystem::directory_iterator("/proc/self/fd")) {
            const std::string to = std::filesystem::read_symlink(entry.path(), gone).string();
            n += to.compare(0, objects.size(), objects) == 0 &&
                 std::filesystem::is_regular_file(store.dir.path + to.substr(mount.path.size()));
        }
        return n;
    };
    odd->set_mood(Mood::SLOW); // as connectors find when they ask how far the store is
    engine = open(", \"read_timeout_ms\": 200, \"ttft_budget_ms\": 60000", 60000);
    odd->set_mood(Mood::GOOD);
    const Tokens tokens = prompt(32 * 4);
    ASSERT_TRUE(comes_true([&] { return engine->save(tokens) == CACHEGEN_OK; }));
    // The first has no reader yet, and nothing stays open.
    ASSERT_TRUE(comes_true(
        [&] { return engine->load(tokens).progress.loaded_tokens == 127 && n_files() > 0; }));
    ASSERT_EQ(engine->look_up(tokens).hit_tokens, 127u);
    for (const std::string &path : store.chunks("L0")) { // or nobody asks the store for them
        const int fd = ::open((mount.path + "/" + path).c_str(), O_RDONLY | O_CLOEXEC);
        EXPECT_EQ(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
        ::close(fd);
    }
    odd->set_mood(Mood::HANGING);
    cachegen_load *load;
    ASSERT_EQ(engine->load_start(0, 127, &load), CACHEGEN_OK);
    ASSERT_TRUE(comes_true([&] { return odd->n_hanging() > 0; }));
    cachegen_progress p = {};
    p.struct_size = sizeof p;
    EXPECT_EQ(wait_for(engine->c, [&] { return cachegen_load_poll(load, &p); }), CACHEGEN_OK);
    EXPECT_EQ(p.status, CG_ERR_TIMED_OUT);
    cachegen_load_free(load);
    close_engine();
    EXPECT_GT(odd->n_hanging(), 0);
    if (std::string(GetParam()) == "threads") { // a kernel may let go of a read that is cancelled
        EXPECT_GT(n_files(), 0u);
    }
    odd->release();
    EXPECT_TRUE(comes_true([&] { return n_files() == 0; }));
}

// A store that is a network away, with prompts of 80 small chunks, and a connector that is patient
// but for reads.
struct Far {
    Far(const Store &store, const std::vector<Tokens> &prompts, const std::string &backend,
        int read_timeout_ms)
        : odd(store.dir.path, mount.path, /*is_far=*/true)
    {
        Engine near(store, "\"chunk_tokens\": 8");
        for (const Tokens &tokens : prompts)
            EXPECT_EQ(near.save(tokens), CACHEGEN_OK);
        odd.set_mood(Mood::SLOW); // as the connector finds when it asks how far the store is
        engine = std::make_unique<Engine>(
            mount.path, store.spec,
            "\"io_backend\": \"" + backend +
                "\", \"chunk_tokens\": 8, \"lookup_timeout_ms\": 60000, \"retry_ms\": 0, "
                "\"ttft_budget_ms\": 600000, \"read_timeout_ms\": " +
                std::to_string(read_timeout_ms));
        odd.set_mood(Mood::GOOD);
    }
    const TempDir mount;
    OddFs odd;
    std::unique_ptr<Engine> engine; // before the mount goes
};

// The plan counts on so many round trips at once.
TEST_P(HangTest, AsManyReadsAreUnderWayAsTheQueueIsDeep)
{
    const Tokens tokens = prompt(640);
    Far far(store, {tokens}, GetParam(), 600000);
    ASSERT_EQ(far.odd.why(), "");
    ASSERT_EQ(far.engine->look_up(tokens).hit_tokens, 639u);
    for (int i = 0; i < 8; i++) // a link that takes them all
        cg_test_bytes_came(far.engine->c, 100000000);
    far.odd.set_mood(Mood::TRICKLING);
    cachegen_load *load = nullptr;
    ASSERT_EQ(far.engine->load_start(0, 639, &load), CACHEGEN_OK);
    EXPECT_TRUE(comes_true([&] { return far.odd.n_hanging() >= 16; })) << far.odd.n_hanging();
    far.odd.set_mood(Mood::GOOD);
    cachegen_load_free(load);
}

// More files are open than stay so, and closing one takes as long as the store hangs.
TEST_P(HangTest, ALoadEndsInItsTimeWhileFilesDoNotClose)
{
    const Tokens tokens[] = {prompt(640, 1), prompt(640, 2)};
    Far far(store, {tokens[0], tokens[1]}, GetParam(), 500);
    ASSERT_EQ(far.odd.why(), "");
    std::vector<uint8_t> plans[2];
    for (int i = 0; i < 2; i++) {
        ASSERT_EQ(far.engine->look_up(tokens[i]).hit_tokens, 639u);
        plans[i] = far.engine->plan;
    }
    far.odd.set_mood(Mood::NO_CLOSES);
    for (const std::vector<uint8_t> &plan : plans) {
        cachegen_load *load = nullptr;
        cachegen_progress p = {};
        p.struct_size = sizeof p;
        far.engine->plan = plan;
        ASSERT_EQ(far.engine->load_start(0, 639, &load), CACHEGEN_OK);
        auto ended = std::async(std::launch::async, [&] {
            return wait_for(far.engine->c, [&] { return cachegen_load_poll(load, &p); });
        });
        const bool has_ended = ended.wait_for(SLACK) == std::future_status::ready;
        EXPECT_TRUE(has_ended) << "the reader closes a file";
        if (!has_ended)
            far.odd.set_mood(Mood::GOOD);
        EXPECT_EQ(ended.get(), CACHEGEN_OK);
        cachegen_load_free(load);
    }
    EXPECT_TRUE(comes_true([&] { return far.odd.n_hanging() >= 8; }));
    far.odd.set_mood(Mood::GOOD);
    EXPECT_TRUE(
        comes_true([&] { return far.engine->load(tokens[1]).progress.loaded_tokens == 639u; }));
    far.engine.reset();
    EXPECT_TRUE(comes_true([&] { return far.odd.n_open() == 0; }));
}

TEST_P(HangTest, OpeningEndsInItsTime)
{
    for (const Mood mood : {Mood::HANGING, Mood::TRICKLING}) {
        SCOPED_TRACE("mood " + std::to_string(static_cast<int>(mood)));
        odd->set_mood(mood);
        std::unique_ptr<Engine> late;
        ends_within(std::chrono::seconds(1), [&] { late = open(", \"open_timeout_ms\": 500"); });
        EXPECT_EQ(late->open_status, CG_ERR_TIMED_OUT);
        EXPECT_EQ(late->c, nullptr);
        EXPECT_NE(std::string(late->error).find("\"open_timeout_ms\", 500"), std::string::npos)
            << late->error;
        odd->set_mood(Mood::GOOD);
        EXPECT_EQ(open()->open_status, CACHEGEN_OK);
    }
}

TEST_P(HangTest, ALoadEndsWithItsBudgetAndIsOfferedAgain)
{
    for (const char *more : {"", ", \"prior_mbps\": 0.01", ", \"policy\": \"min_delay\""}) {
        SCOPED_TRACE(more);
        engine = open(std::string(", \"read_timeout_ms\": 60000, \"ttft_budget_ms\": 100") + more);
        const Tokens tokens = prompt(32 * 4);
        const cachegen_progress p = load_hung(tokens);
        EXPECT_EQ(p.status, CG_ERR_TIMED_OUT);
        EXPECT_EQ(p.loaded_tokens, 0u);
        EXPECT_EQ(p.failed_token, 0u);
        if (p.total_ns < 1'000'000'000) { // on a loaded machine it may look silent
            EXPECT_EQ(p.failed_levels, 0u);
        }
        EXPECT_EQ(engine->load(tokens).progress.loaded_tokens, 127u)
            << "that it was late once is nothing to hold against a chunk";
    }
}

// Two engines' sides in one: it loads, and is told of a load as by a process that did.
TEST_P(HangTest, WhoeverHasLittleTimeTakesNothingFromTheNext)
{
    uint64_t seed = 0;
    ASSERT_TRUE(comes_true([&] {
        engine = open(", \"read_timeout_ms\": 60000, \"ttft_budget_ms\": 1, \"retry_ms\": 3600000");
        const Tokens tokens = prompt(32 * 4, ++seed);
        const cachegen_progress p = load_hung(tokens);
        EXPECT_EQ(p.status, CG_ERR_TIMED_OUT);
        EXPECT_EQ(p.bytes_read, 0u);
        EXPECT_EQ(cachegen_forget_failed(engine->c, engine->plan.data(), engine->plan.size(), &p),
                  CACHEGEN_OK);
        EXPECT_EQ(engine->look_up(tokens).hit_tokens, p.failed_levels == 0 ? 127u : 0u);
        return p.failed_levels == 0; // unless the machine itself stood still
    }));
}

// Not each request finds out anew. But who was told looks again, long before retry_ms.
TEST_P(HangTest, AStoreThatIsSilentForLongIsLeftAloneForTwiceAsLong)
{
    for (const char *times : {"\"read_timeout_ms\": 1500, \"ttft_budget_ms\": 60000",
                              "\"read_timeout_ms\": 60000, \"ttft_budget_ms\": 3000"}) {
        SCOPED_TRACE(times);
        engine = open(std::string(", \"retry_ms\": 3600000, ") + times);
        const Tokens tokens = prompt(32 * 4);
        const cachegen_progress p = load_hung(tokens);
        EXPECT_EQ(p.status, CG_ERR_TIMED_OUT);
        EXPECT_EQ(p.failed_levels, 1u << CG_L0) << "the only one that is stored";
        EXPECT_EQ(cachegen_forget_failed(engine->c, engine->plan.data(), engine->plan.size(), &p),
                  CACHEGEN_OK);
        EXPECT_EQ(engine->look_up(tokens).hit_tokens, 0u);
        EXPECT_TRUE(comes_true([&] { return engine->look_up(tokens).hit_tokens == 127; }));
    }
}

TEST_P(HangTest, ALoadsTraceHasTheReadThatHung)
{
    const TempDir traces;
    engine = open(", \"read_timeout_ms\": 60000, \"ttft_budget_ms\": 500, \"trace_dir\": \"" +
                  traces.path + "\"");
    load_hung(prompt(32 * 4));
    engine.reset(); // which waits for traces
    const std::vector<std::string> files = traces.files();
    ASSERT_EQ(files.size(), 1u);
    const std::string text = traces.read_text(files[0]);
    const size_t read = text.find("\"name\": \"read\"");
    ASSERT_NE(read, std::string::npos) << text;
    EXPECT_NE(text.find(cg_strerror(CG_ERR_CANCELLED), read), std::string::npos) << text;
}

TEST_P(HangTest, ASaveEndsInItsTimeAndSoDoWhatWaitsBehindIt)
{
    cachegen_save *save = start_hung_save(prompt(32 * 4)), *behind;
    ASSERT_NE(save, nullptr);
    ASSERT_EQ(engine->save_start(prompt(64, 2), 0, 64, true, nullptr, 0, &behind), CACHEGEN_OK);
    ends_within(std::chrono::seconds(1), [&] {
        EXPECT_EQ(engine->finish(save).status, CG_ERR_TIMED_OUT);
        const cachegen_progress p = engine->finish(behind);
        EXPECT_EQ(p.status, CG_ERR_TIMED_OUT);
        EXPECT_EQ(p.loaded_tokens, 0u);
    });
    EXPECT_EQ(engine->stats().saves_dropped, 6u);
    EXPECT_EQ(engine->stats().saves_dropped_timed_out, 6u);
    EXPECT_EQ(engine->save_start(prompt(64, 3), 0, 64, true, nullptr, 0, &behind), CG_ERR_TIMED_OUT)
        << "nothing is copied for a store that hangs";

    odd->set_mood(Mood::GOOD);
    cachegen_status status = CG_ERR_TIMED_OUT;
    EXPECT_TRUE(comes_true([&] {
        status = engine->save(prompt(64, 3));
        return status != CG_ERR_TIMED_OUT;
    }));
    EXPECT_EQ(status, CACHEGEN_OK) << "when the store is back, so are saves";
    EXPECT_EQ(engine->load(prompt(64, 3)).progress.loaded_tokens, 63u);
}

TEST_P(HangTest, FreeingASaveDoesNotWaitForTheStore)
{
    cachegen_save *save = start_hung_save(prompt(32 * 4));
    ends_within(std::chrono::seconds(1), [&] { cachegen_save_free(save); });
}

TEST_P(HangTest, AStoreThatDoesNotAnswerCostsOneLookUpItsTimeAndNoOther)
{
    const Tokens tokens = prompt(32 * 4);
    ASSERT_EQ(engine->save(tokens), CACHEGEN_OK);
    odd->set_mood(Mood::HANGING);
    EXPECT_EQ(engine->look_up(prompt(64, 2)).hit_tokens, 0u);
    for (uint64_t seed = 3; seed < 20; seed++) {
        const Tokens other = prompt(64, seed);
        const cachegen_request r = engine->request(other);
        cachegen_lookup *lookup;
        cachegen_hit hit = {};
        hit.struct_size = sizeof hit;
        ASSERT_EQ(cachegen_lookup_start(engine->c, &r, 0, &lookup), CACHEGEN_OK);
        EXPECT_EQ(cachegen_lookup_poll(lookup, &hit), CACHEGEN_OK) << "waits for the store";
        EXPECT_EQ(hit.hit_tokens, 0u);
        cachegen_lookup_free(lookup);
    }
    EXPECT_EQ(engine->stats().lookups_skipped, 17u);
    odd->set_mood(Mood::GOOD);
    odd->release();
    EXPECT_TRUE(comes_true([&] { return engine->look_up(tokens).hit_tokens == 127; }))
        << "it answers again";
    EXPECT_EQ(engine->load(tokens).progress.loaded_tokens, 127u);
}

TEST_P(HangTest, ALateAnswerEndsThePauseBeforeTheStoreIsAskedAgain)
{
    const Tokens tokens = prompt(32 * 4), longer = prompt(32 * 20, 3);
    ASSERT_TRUE(comes_true([&] { return engine->save(longer) == CACHEGEN_OK; }));
    engine.reset();
    odd.reset();
    odd = std::make_unique<OddFs>(store.dir.path, mount.path, /*is_far=*/true); // to be asked much
    ASSERT_EQ(odd->why(), "");
    engine = open();
    ASSERT_TRUE(comes_true([&] { return engine->save(tokens) == CACHEGEN_OK; }));
    n_endless = 0;
    endless_from_ns = 500000000; // half of lookup_timeout_ms; in between looks are more often
    odd->set_mood(Mood::HANGING);
    EXPECT_EQ(engine->look_up(prompt(64, 2)).hit_tokens, 0u);
    EXPECT_TRUE(comes_true([] { return n_endless > 0; })) << "it pauses";
    EXPECT_EQ(engine->look_up(tokens).hit_tokens, 0u);
    odd->set_mood(Mood::GOOD);
    EXPECT_TRUE(comes_true([&] { return engine->look_up(tokens).hit_tokens == 127; }));
    // With all its questions at once, as before.
    cachegen_lookup *lookup = start_held_lookup(longer, Mood::TRICKLING);
    EXPECT_TRUE(comes_true([&] { return odd->n_hanging() >= 20; })) << odd->n_hanging();
    odd->set_mood(Mood::GOOD);
    finish(lookup);
    endless_from_ns = 0;
}

TEST_P(HangTest, LookUpsThatWaitBehindTheFirstEndWithIt)
{
    std::vector<cachegen_lookup *> lookups = {start_held_lookup(prompt(64, 2), Mood::HANGING)};
    for (uint64_t seed = 3; seed < 22; seed++)
        lookups.push_back(start_lookup(prompt(64, seed)));
    ends_within(std::chrono::seconds(1), [&] {
        for (cachegen_lookup *lookup : lookups)
            EXPECT_EQ(finish(lookup), 0u);
    });
    EXPECT_EQ(engine->stats().lookups_skipped, lookups.size() - 1);
}

// The second look-up is in line for most of the time that the store may take, and then the store
// takes as long for it.
TEST_P(HangTest, TimeInLineIsNotTheStoresSilence)
{
    constexpr std::chrono::milliseconds TIMEOUT(3000), HELD(1800), IN_TIME(2500);
    const auto hold = [=] {
        const Clock::time_point begun = Clock::now();
        comes_true([=] { return Clock::now() - begun > HELD; });
    };
    // Anew on a machine on which this thread itself came late.
    bool is_sure = false;
    for (int i = 0; i < 10 && !is_sure; i++) {
        engine = open(", \"recompute_tokens_per_s\": 0.001", TIMEOUT.count());
        const Tokens first = prompt(64, 2), second = prompt(64, 3);
        for (const Tokens &tokens : {first, second})
            ASSERT_TRUE(comes_true([&] { return engine->save(tokens) == CACHEGEN_OK; }));
        const Clock::time_point begun = Clock::now();
        cachegen_lookup *held = start_held_lookup(first, Mood::TRICKLING);
        cachegen_lookup *in_line = start_lookup(second);
        hold();
        const Clock::time_point released = Clock::now();
        odd->set_mood(Mood::HANGING);
        const uint32_t found = finish(held);
        EXPECT_TRUE(comes_true([&] { return odd->n_hanging() > 0; })) << "the next is asked";
        hold();
        odd->set_mood(Mood::GOOD);
        const uint32_t found_then = finish(in_line);
        is_sure = released - begun < IN_TIME && Clock::now() - released < IN_TIME;
        if (!is_sure)
            continue;
        EXPECT_EQ(found, 63u);
        EXPECT_EQ(found_then, 63u);
        EXPECT_EQ(engine->stats().lookup_errors, 0u) << "no question was left open";
        EXPECT_EQ(engine->stats().lookups_skipped, 0u);
    }
    EXPECT_TRUE(is_sure) << "this machine is too busy";
}

// Answers come sooner than a store is taken for silent, all together later: worth waiting for where
// the engine is slower still.
TEST_P(HangTest, AStoreThatAnswersSlowlyIsNotSilent)
{
    constexpr std::chrono::milliseconds TIMEOUT(1600), PAUSE(400), LATE(500);
    const Tokens tokens = prompt(32 * 40), saved(tokens.begin(), tokens.begin() + 64);
    for (const bool is_fast_engine : {false, true}) {
        bool is_sure = false; // else this thread itself came late
        for (int i = 0; i < 10 && !is_sure; i++) {
            engine = open(std::string(", \"recompute_tokens_per_s\": ") +
                              (is_fast_engine ? "1e9" : "0.001"),
                          TIMEOUT.count());
            ASSERT_TRUE(comes_true([&] { return engine->save(saved) == CACHEGEN_OK; }));
            const Clock::time_point begun = Clock::now();
            Clock::time_point last = begun;
            is_sure = true;
            cachegen_lookup *lookup = start_held_lookup(tokens, Mood::HANGING);
            std::future<uint32_t> found =
                std::async(std::launch::async, [&] { return finish(lookup); });
            while (found.wait_for(PAUSE) != std::future_status::ready) {
                odd->answer_what_hangs();
                is_sure = is_sure && Clock::now() - last < LATE;
                last = Clock::now();
            }
            const uint32_t n_found = found.get();
            const bool took_long = Clock::now() - begun > TIMEOUT;
            odd->set_mood(Mood::GOOD);
            if (!is_sure)
                continue;
            EXPECT_TRUE(took_long) << "too few waves to tell";
            if (is_fast_engine)
                EXPECT_LT(n_found, 64u);
            else
                EXPECT_EQ(n_found, 64u);
            EXPECT_EQ(engine->stats().lookup_errors > 0, is_fast_engine);
        }
        EXPECT_TRUE(is_sure) << "this machine is too busy";
    }
}

// What a store has that is slow to say so is not encoded again.
TEST_P(HangTest, ASaveWaitsForAStoreThatAnswersSlowly)
{
    constexpr std::chrono::milliseconds TIMEOUT(1600), PAUSE(400), LATE(1200);
    constexpr int MOST_WAVES = 60, N_CHUNKS = 20;
    const Tokens tokens = prompt(32 * N_CHUNKS);
    ASSERT_EQ(engine->save(tokens), CACHEGEN_OK);
    bool is_sure = false; // else this thread itself came late
    for (int i = 0; i < 10 && !is_sure; i++) {
        engine = open("", TIMEOUT.count(), TIMEOUT.count());
        ASSERT_TRUE(comes_true([&] { return engine->save(prompt(32, 2)) == CACHEGEN_OK; }))
            << "after that only chunks are asked for";
        const uint64_t n_before = engine->stats().chunks_existed;
        int n_waves = 0;
        is_sure = true;
        cachegen_save *save = start_hung_save(tokens);
        ASSERT_NE(save, nullptr);
        const Clock::time_point begun = Clock::now();
        Clock::time_point last = begun;
        std::future<cachegen_progress> saved =
            std::async(std::launch::async, [&] { return engine->finish(save); });
        while (n_waves++ < MOST_WAVES && saved.wait_for(PAUSE) != std::future_status::ready) {
            odd->answer_what_hangs();
            is_sure = is_sure && Clock::now() - last < LATE;
            last = Clock::now();
        }
        odd->set_mood(Mood::GOOD);
        const cachegen_status status = saved.get().status;
        if (!is_sure)
            continue;
        EXPECT_EQ(status, CACHEGEN_OK);
        EXPECT_GT(last - begun, TIMEOUT) << "too few waves to tell";
        EXPECT_EQ(engine->stats().chunks_existed - n_before, N_CHUNKS);
    }
    EXPECT_TRUE(is_sure) << "this machine is too busy";
}

TEST_P(HangTest, APromptWhoseTimeIsOverLeavesTheOthersTheirs)
{
    constexpr uint64_t LONG_NS = 600000000000, NO_SILENCE_NS = 4;
    const Tokens tokens = prompt(32 * 4);
    ASSERT_EQ(engine->save(tokens), CACHEGEN_OK);
    const cachegen_request request = engine->request(tokens);
    cg_test_asking *asking = cg_test_asking_new(engine->c, &request, 1, LONG_NS);
    ASSERT_NE(asking, nullptr);
    odd->set_mood(Mood::HANGING);
    EXPECT_EQ(cg_test_asking_ask(asking, NO_SILENCE_NS, false), CG_ASKED_LATE);
    EXPECT_EQ(cg_test_asking_found(asking, 0), 0);
    EXPECT_EQ(cg_test_asking_found(asking, 1), -1) << "it was given up";
    EXPECT_EQ(cg_test_asking_ask(asking, 1000000, false), CG_ASKED_IN_VAIN);
    EXPECT_EQ(cg_test_asking_found(asking, 1), 0) << "of a silent store all end";
    cg_test_asking_free(asking);

    asking = cg_test_asking_new(engine->c, &request, 1, LONG_NS);
    ASSERT_NE(asking, nullptr);
    EXPECT_EQ(cg_test_asking_ask(asking, NO_SILENCE_NS, false), CG_ASKED_LATE);
    odd->set_mood(Mood::GOOD);
    EXPECT_EQ(cg_test_asking_ask(asking, LONG_NS, false), CG_ASKED);
    EXPECT_EQ(cg_test_asking_found(asking, 1), 4);
    cg_test_asking_free(asking);
}

// Where so much was left open that nothing can be asked any more, or the queue was to be replaced.
TEST_P(HangTest, AQueueThatIsFullOfAbandonedQuestionsIsNotAskedAgain)
{
    constexpr uint64_t LONG_NS = 600000000000, SECOND_NS = 1000000000, NO_SILENCE_NS = 4;
    engine = open(", \"max_abandoned_reads\": 1");
    const Tokens tokens = prompt(32 * 4);
    ASSERT_TRUE(comes_true([&] { return engine->save(tokens) == CACHEGEN_OK; }));
    const cachegen_request request = engine->request(tokens);
    cg_test_asking *asking = cg_test_asking_new(engine->c, &request, 1, LONG_NS);
    ASSERT_NE(asking, nullptr);
    odd->set_mood(Mood::HANGING);
    EXPECT_EQ(cg_test_asking_ask(asking, NO_SILENCE_NS, true), CG_ASKED_LATE);
    EXPECT_EQ(cg_test_asking_ask(asking, SECOND_NS, true), CG_ASKED_IN_VAIN);
    EXPECT_EQ(cg_test_asking_found(asking, 1), 0);
    cg_test_asking_free(asking);
}

// Questions wait behind what loads have under way, over a link that became slow; but one that is
// still open when far more has come hangs.
TEST_P(HangTest, AStoreThatBringsBytesOfLoadsIsNotSilent)
{
    constexpr std::chrono::milliseconds TIMEOUT(1000), PAUSE(100), LATE(500);
    constexpr int N_READS = 20;
    const Tokens tokens = prompt(64);
    for (const uint64_t under_way : {uint64_t{10000}, uint64_t{100}}) {
        SCOPED_TRACE(under_way);
        bool is_sure = false; // else this thread itself came late
        for (int i = 0; i < 10 && !is_sure; i++) {
            engine.reset(); // and the link that it knows
            engine = open(", \"recompute_tokens_per_s\": 0.001", TIMEOUT.count());
            ASSERT_TRUE(comes_true([&] { return engine->save(tokens) == CACHEGEN_OK; }));
            cg_test_bytes_begin(engine->c, under_way);
            Clock::time_point last = Clock::now();
            cachegen_lookup *lookup = start_held_lookup(tokens, Mood::HANGING);
            std::future<uint32_t> found =
                std::async(std::launch::async, [&] { return finish(lookup); });
            is_sure = true;
            for (int read = 0; read < N_READS && is_sure; read++) {
                found.wait_for(PAUSE);
                cg_test_bytes_came(engine->c, 1000);
                is_sure = Clock::now() - last < LATE;
                last = Clock::now();
            }
            odd->set_mood(Mood::GOOD);
            const uint32_t n_found = found.get();
            if (!is_sure)
                continue;
            EXPECT_EQ(n_found, under_way > 1000 ? 63u : 0u);
            EXPECT_EQ(engine->stats().lookup_errors, under_way > 1000 ? 0u : 1u);
        }
        EXPECT_TRUE(is_sure) << "this machine is too busy";
    }
}

// Where the engine computes a prompt faster than any look-up waits.
TEST_P(HangTest, ALookUpWaitsForOthersNoLongerThanItsRequestMayTake)
{
    for (const int budget_ms : {1, 600000}) {
        engine = open(", \"recompute_tokens_per_s\": 1e9, \"ttft_budget_ms\": " +
                          std::to_string(budget_ms),
                      600000);
        const Tokens tokens = prompt(32 * 2);
        ASSERT_TRUE(comes_true([&] { return engine->save(tokens) == CACHEGEN_OK; }));
        std::vector<cachegen_lookup *> lookups = {start_held_lookup(tokens, Mood::HANGING)};
        for (int i = 0; i < 19; i++)
            lookups.push_back(start_lookup(tokens));
        const Clock::time_point begun = Clock::now();
        EXPECT_TRUE(
            comes_true([&] { return Clock::now() - begun > std::chrono::milliseconds(1); }));
        odd->set_mood(Mood::GOOD);
        EXPECT_EQ(finish(lookups[0]), 63u) << "the first waits for nobody";
        for (size_t i = 1; i < lookups.size(); i++)
            EXPECT_EQ(finish(lookups[i]), budget_ms > 1 ? 63u : 0u);
        EXPECT_EQ(engine->stats().lookups_skipped, budget_ms > 1 ? 0u : 19u);
        EXPECT_EQ(engine->look_up(tokens).stored_tokens, 63u) << "nor does one that comes later";
    }
}

TEST_P(HangTest, SavesThatTheStoreRefusesAreCountedAsFailed)
{
    uint64_t seed = 70;
    for (const Mood mood : {Mood::READ_ONLY, Mood::FULL, Mood::GONE}) {
        SCOPED_TRACE("mood " + std::to_string(static_cast<int>(mood)));
        odd->set_mood(mood);
        const cachegen_stats before = engine->stats();
        EXPECT_NE(engine->save(prompt(64, seed++)), CACHEGEN_OK);
        const cachegen_stats after = engine->stats();
        EXPECT_EQ(after.saves_dropped_failed - before.saves_dropped_failed, 2u);
        EXPECT_EQ(after.saves_dropped - before.saves_dropped, 2u);
    }
    odd->set_mood(Mood::GOOD);
    EXPECT_TRUE(comes_true([&] { return engine->save(prompt(64, seed)) == CACHEGEN_OK; }));
}

// As after a FUSE daemon has died, and was started again. One connector looks up and saves, the
// other loads, as an engine's two sides do.
TEST_P(HangTest, AStoreThatIsMountedAnewIsFoundAgain)
{
    const Tokens tokens = prompt(32 * 4);
    std::unique_ptr<Engine> worker = open();
    const auto is_loaded = [&] {
        if (engine->look_up(tokens).hit_tokens != 127)
            return false;
        cachegen_load *load = nullptr;
        cachegen_progress p = {};
        p.struct_size = sizeof p;
        worker->plan = engine->plan;
        EXPECT_EQ(worker->load_start(0, 127, &load), CACHEGEN_OK);
        wait_for(worker->c, [&] { return cachegen_load_poll(load, &p); });
        cachegen_load_free(load);
        return p.loaded_tokens == 127;
    };
    ASSERT_TRUE(comes_true([&] { return engine->save(tokens) == CACHEGEN_OK; }));
    ASSERT_TRUE(comes_true(is_loaded));
    for (uint64_t seed : {80, 81}) {
        SCOPED_TRACE(seed);
        const Tokens other = prompt(64, seed);
        odd.reset();
        // An engine that started before the mount made these.
        std::filesystem::create_directories(mount.path + "/m/objects");
        const auto until = Clock::now() + std::chrono::milliseconds(1200); // is looked for once
        do {
            EXPECT_FALSE(is_loaded());
            EXPECT_NE(engine->save(other), CACHEGEN_OK);
        } while (Clock::now() < until);
        for (const auto &entry : std::filesystem::recursive_directory_iterator(mount.path))
            EXPECT_TRUE(entry.is_directory()) << entry.path() << ": nothing is mounted there";
        odd = std::make_unique<OddFs>(store.dir.path, mount.path);
        ASSERT_EQ(odd->why(), "");
        EXPECT_TRUE(comes_true(is_loaded));
        EXPECT_TRUE(comes_true([&] { return engine->save(other) == CACHEGEN_OK; }));
    }
}

// A store that is gone says nothing of its chunks: who looks up and loads offers them as soon as it
// is back, however long levels that failed are not tried again.
TEST_P(HangTest, WhatCouldNotBeReadOfAStoreThatWasGoneIsOfferedWhenItIsBack)
{
    engine = open(", \"retry_ms\": 3600000");
    const Tokens tokens = prompt(32 * 4);
    const auto is_loaded = [&] { return engine->load(tokens).progress.loaded_tokens == 127; };
    ASSERT_TRUE(comes_true([&] { return engine->save(tokens) == CACHEGEN_OK; }));
    ASSERT_TRUE(comes_true([&] { return engine->look_up(tokens).hit_tokens == 127; }));
    odd.reset();
    const cachegen_progress p = engine->load_planned(0, 127);
    EXPECT_EQ(p.status, CG_ERR_IO);
    EXPECT_EQ(p.failed_levels, 0u);
    odd = std::make_unique<OddFs>(store.dir.path, mount.path);
    ASSERT_EQ(odd->why(), "");
    EXPECT_TRUE(comes_true(is_loaded));
}

// What could not be read is whole in the store. (The kernel may give zeros for what is missing of a
// page, beside other reads of the file: then a checksum is wrong, and the chunk is stored again.)
TEST_P(HangTest, AChunkIsNotTakenForTruncatedWhenTheConnectionToItIsLost)
{
    const Tokens tokens = prompt(32 * 4);
    ASSERT_TRUE(comes_true([&] { return engine->save(tokens) == CACHEGEN_OK; }));
    ASSERT_TRUE(comes_true([&] { return engine->look_up(tokens).hit_tokens == 127; }));
    odd->set_mood(Mood::CUT);
    const cachegen_progress p = engine->load_planned(0, 127);
    EXPECT_NE(p.status, CG_OK);
    EXPECT_EQ(engine->stats().chunks_truncated, 0u);
    odd->set_mood(Mood::GOOD);
    EXPECT_TRUE(comes_true([&] { return engine->save(tokens) == CACHEGEN_OK; }));
    EXPECT_TRUE(comes_true([&] { return engine->look_up(tokens).hit_tokens == 127; }));
}

// As over sshfs, which lives on when a daemon on the store's host ends.
TEST_P(HangTest, NothingIsSavedInTheBareMountPointThatTheStoresHostExports)
{
    const Tokens tokens = prompt(32 * 4), other = prompt(64, 80);
    const TempDir host, reached;
    const std::string bare = host.path + "/srv";
    std::filesystem::create_directory(bare);
    auto served = std::make_unique<OddFs>(store.dir.path, bare);
    ASSERT_EQ(served->why(), "");
    // The kernel looks up each name anew.
    const OddFs link(host.path, reached.path, false, false, "odd,entry_timeout=0");
    ASSERT_EQ(link.why(), "");
    Engine far(reached.path + "/srv", store.spec,
               std::string("\"io_backend\": \"") + GetParam() + "\", \"save_timeout_ms\": 60000");
    ASSERT_EQ(far.save(tokens, "c"), CACHEGEN_OK);
    ASSERT_EQ(far.look_up(tokens).hit_tokens, 127u);
    for (int i = 0; i < 2; i++) {
        served.reset();
        const uint64_t n_errors = far.stats().save_errors;
        EXPECT_EQ(far.save(other, "d"), CG_ERR_NOT_FOUND);
        EXPECT_EQ(far.save(tokens, "c"), CG_ERR_NOT_FOUND);
        EXPECT_GE(far.stats().save_errors - n_errors, 2u);
        EXPECT_TRUE(std::filesystem::is_empty(bare));
        served = std::make_unique<OddFs>(store.dir.path, bare);
        ASSERT_EQ(served->why(), "");
        EXPECT_EQ(far.save(prompt(64, 81 + static_cast<uint64_t>(i)), "d"), CACHEGEN_OK);
    }
}

// What an engine calls in its steps, over a store in each mood. Operations end between the steps.
TEST_P(HangTest, NoCallOfAStepWaits)
{
    const Tokens tokens = prompt(32 * 4);
    // Until all threads have begun; on a busy machine one of the timeouts may end the first tries.
    ASSERT_TRUE(comes_true([&] { return engine->save(tokens) == CACHEGEN_OK; }));
    ASSERT_TRUE(comes_true([&] { return engine->load(tokens).progress.loaded_tokens == 127u; }));
    StepThread step;
    if (!step.why().empty())
        CG_SKIP_OR_FAIL("seccomp", step.why() << ": waits within a step are not seen");
    uint64_t seed = 10;
    for (const Mood mood :
         {Mood::GOOD, Mood::SLOW, Mood::READ_ONLY, Mood::FULL, Mood::GONE, Mood::HANGING}) {
        SCOPED_TRACE("mood " + std::to_string(static_cast<int>(mood)));
        odd->set_mood(mood);
        const Tokens other = prompt(64, seed++);
        const cachegen_request r = engine->request(other);
        cachegen_lookup *lookup = nullptr;
        cachegen_load *load = nullptr;
        cachegen_progress p = {};
        p.struct_size = sizeof p;
        step.run([&] {
            cachegen_hit hit = {};
            hit.struct_size = sizeof hit;
            ASSERT_EQ(cachegen_lookup_start(engine->c, &r, 0, &lookup), CACHEGEN_OK);
            cachegen_lookup_poll(lookup, &hit);
            ASSERT_EQ(engine->load_start(0, 127, &load), CACHEGEN_OK);
            cachegen_load_poll(load, &p);
            cachegen_lookup_free(lookup);
            engine->stats();
        });
        ASSERT_FALSE(HasFatalFailure());
        ASSERT_EQ(wait_for(engine->c, [&] { return cachegen_load_poll(load, &p); }), CACHEGEN_OK);
        step.run([&] {
            cachegen_forget_failed(engine->c, engine->plan.data(), engine->plan.size(), &p);
            cachegen_load_free(load);
        });
        enum { AT_ONCE, LATER, CUT };
        for (const int copying : {AT_ONCE, LATER, CUT}) {
            cachegen_save *save = nullptr;
            engine->copies_later = copying != AT_ONCE;
            step.run([&] {
                if (engine->save_start(other, 0, 64, true, "name", 0, &save) == CACHEGEN_OK)
                    cachegen_save_poll(save, &p);
                if (copying == CUT)
                    cachegen_save_cut(save);
            });
            if (save == nullptr)
                continue; // it hangs
            ASSERT_EQ(wait_for(engine->c, [&] { return cachegen_save_poll(save, &p); }),
                      CACHEGEN_OK);
            step.run([&] { cachegen_save_free(save); });
        }
        EXPECT_EQ(step.waits(), "") << "numbers of system calls that wait";
    }
}

// One copy is read when it is cut, the other has not begun. What else the threads do may take long.
TEST_P(HangTest, FreeingASaveThatWasCutAndGivenUpWaitsForNoThread)
{
    engine = open(", \"threads\": 1", 1000, 2000);
    ASSERT_TRUE(comes_true([&] { return engine->save(prompt(32)) == CACHEGEN_OK; }));
    const Tokens tokens = prompt(32 * 4, 2);
    engine->prefill(tokens);
    odd->set_mood(Mood::HANGING);
    cachegen_save *hung = nullptr, *cut[2] = {};
    ASSERT_EQ(engine->save_start(tokens, 0, 32, false, nullptr, 0, &hung), CACHEGEN_OK);
    engine->copies_later = true;
    TouchedPages blocks(engine->memory.data(), engine->memory.size(), true);
    for (cachegen_save *&save : cut)
        ASSERT_EQ(engine->save_start(tokens, 0, 32 * 4, true, nullptr, 0, &save), CACHEGEN_OK);
    ASSERT_TRUE(comes_true([&] { return blocks.first_thread() != 0; }));
    for (cachegen_save *save : cut)
        cachegen_save_cut(save);
    EXPECT_EQ(engine->finish(hung).status, CG_ERR_TIMED_OUT);
    auto freed = std::async(std::launch::async, [&] {
        for (cachegen_save *save : cut)
            EXPECT_EQ(engine->finish(save).status, CG_ERR_TIMED_OUT);
    });
    EXPECT_EQ(freed.wait_for(SLACK), std::future_status::ready) << "waits for the thread";
    blocks.release_overwritten();
    freed.wait();
    odd->set_mood(Mood::GOOD);
    EXPECT_TRUE(comes_true([&] { return engine->stats().staging_bytes == 0; }));
}

// The pool goes on reading blocks for a save that nobody waits for any more, and into memory that
// must stay for it.
TEST_P(HangTest, WhatIsCopiedForASaveThatWasGivenUpIsFreedOnceItIsCopied)
{
    engine = open(", \"threads\": 1");
    ASSERT_TRUE(comes_true([&] { return engine->save(prompt(32)) == CACHEGEN_OK; }));
    const Tokens tokens = prompt(32 * 4, 2);
    engine->prefill(tokens);
    odd->set_mood(Mood::HANGING);
    cachegen_save *hung = nullptr, *copied = nullptr;
    ASSERT_EQ(engine->save_start(tokens, 0, 32, false, nullptr, 0, &hung), CACHEGEN_OK);
    engine->copies_later = true;
    {
        TouchedPages blocks(engine->memory.data(), engine->memory.size(), true);
        ASSERT_EQ(engine->save_start(tokens, 0, 32 * 4, true, nullptr, 0, &copied), CACHEGEN_OK);
        ASSERT_TRUE(comes_true([&] { return blocks.first_thread() != 0; }));
        EXPECT_EQ(engine->finish(hung).status, CG_ERR_TIMED_OUT);
        cachegen_progress p = {};
        p.struct_size = sizeof p;
        EXPECT_EQ(wait_for(engine->c, [&] { return cachegen_save_poll(copied, &p); }), CACHEGEN_OK);
        EXPECT_EQ(p.status, CG_ERR_TIMED_OUT);
        EXPECT_GE(engine->stats().staging_bytes, 4 * COPY_BYTES) << "the pool still writes there";
        cachegen_save_cut_from(copied, 32 * 4 - 1); // what lies before that is still copied
        auto freed = std::async(std::launch::async, [&] { cachegen_save_free(copied); });
        EXPECT_EQ(freed.wait_for(std::chrono::milliseconds(300)), std::future_status::timeout)
            << "the blocks are still read";
        blocks.release();
        freed.wait();
    }
    odd->set_mood(Mood::GOOD);
    EXPECT_TRUE(comes_true([&] { return engine->stats().staging_bytes == 0; }));
}

// The engine may free its blocks when closing has returned.
TEST_P(HangTest, ClosingWaitsForWhatIsCopiedOutOfTheBlocks)
{
    engine = open(", \"threads\": 1");
    const Tokens tokens = prompt(32 * 4);
    engine->prefill(tokens);
    engine->copies_later = true;
    TouchedPages blocks(engine->memory.data(), engine->memory.size(), true);
    cachegen_save *save = nullptr;
    ASSERT_EQ(engine->save_start(tokens, 0, 32 * 4, true, nullptr, 0, &save), CACHEGEN_OK);
    forget(save);
    ASSERT_TRUE(comes_true([&] { return blocks.first_thread() != 0; }));
    auto closed = std::async(std::launch::async, [&] { close_engine(); });
    // However long: it is over the time for closing.
    EXPECT_EQ(closed.wait_for(std::chrono::seconds(2)), std::future_status::timeout)
        << "the blocks are still read";
    blocks.release();
    closed.wait();
}

TEST_P(HangTest, CopiesAreFreedWithoutTheLockThatStepsTake)
{
    uint64_t seed = 10;
    // On a busy machine one of the timeouts may end a try.
    const auto succeeds = [](const std::function<bool()> &save) {
        bool has = false;
        return comes_true([&] { return has = has || save(); });
    };
    const auto is_stored = [&] { return engine->save(prompt(32 * 4, seed++)) == CACHEGEN_OK; };
    const auto is_cut = [&] { // unless the copying has ended before
        const Tokens tokens = prompt(32 * 16, seed++);
        cachegen_save *save = nullptr;
        engine->copies_later = true;
        if (engine->save_start(tokens, 0, 32 * 16, true, nullptr, 0, &save) == CACHEGEN_OK) {
            cachegen_save_cut(save);
            engine->finish(save);
        }
        engine->copies_later = false;
        return engine->stats().saves_dropped_overwritten > 0;
    };
    const auto is_given_up = [&] { // what waits behind the save that hangs
        odd->set_mood(Mood::GOOD);
        EXPECT_TRUE(succeeds(is_stored));
        odd->set_mood(Mood::HANGING);
        cachegen_status status = CACHEGEN_OK;
        cachegen_save *saves[2] = {};
        for (cachegen_save *&save : saves)
            engine->save_start(prompt(64, seed++), 0, 64, true, nullptr, 0, &save);
        for (cachegen_save *save : saves)
            status = save != nullptr ? engine->finish(save).status : CACHEGEN_OK;
        return status == CG_ERR_TIMED_OUT;
    };
    const auto frees_copies = [&](const std::function<bool()> &save) {
        n_freed = n_freed_with_lock = 0;
        EXPECT_TRUE(succeeds(save));
        EXPECT_TRUE(comes_true([] { return n_freed > 0; }));
        EXPECT_EQ(n_freed_with_lock, 0);
    };
    tells_lock = true;
    engine->stats();
    tells_lock = false;
    ASSERT_NE(lock_of_steps, nullptr);
    frees_copies(is_stored);
    frees_copies(is_cut);
    frees_copies(is_given_up);
    lock_of_steps = nullptr;
}

// One stands still before it writes context.json, with all its links made.
TEST_P(HangTest, TwoEnginesDoNotPublishOneNameAtOnce)
{
    const auto other = open("", 1000, 60000);
    const Tokens longer = prompt(32 * 4), shorter(longer.begin(), longer.begin() + 64);
    const auto holds = [&](const Tokens &tokens) {
        const std::string json = store.dir.read_text("m/contexts/c/context.json");
        for (uint32_t i = 0; i < tokens.size() / 32; i++) {
            char key[CG_KEY_HEX_BYTES];
            const cg_key of_chunk = key_of(root_of(store), tokens, i);
            cg_key_to_hex(&of_chunk, key);
            EXPECT_NE(json.find(key), std::string::npos) << i;
        }
        EXPECT_EQ(std::count(json.begin(), json.end(), '{') - 1, tokens.size() / 32);
        EXPECT_EQ(store.dir.files("m/contexts/c/L0").size(), tokens.size() / 32);
        EXPECT_EQ(store.dir.read("m/contexts/c/tokens").size(), 4 * tokens.size());
    };
    cachegen_save *held;
    other->prefill(longer);
    odd->hold_next("write", "/c/.context.json.");
    ASSERT_EQ(other->save_start(longer, 0, 32 * 4, true, "c", 0, &held), CACHEGEN_OK);
    ASSERT_TRUE(comes_true([&] { return odd->n_hanging() > 0; }));
    EXPECT_EQ(engine->save(shorter, "c"), CACHEGEN_OK) << "the name is the other's for too long";
    EXPECT_FALSE(store.dir.has("m/contexts/c/context.json"));
    odd->release();
    EXPECT_EQ(other->finish(held).status, CACHEGEN_OK);
    holds(longer);
    EXPECT_EQ(engine->save(shorter, "c"), CACHEGEN_OK);
    holds(shorter);
}

INSTANTIATE_TEST_SUITE_P(Backends, HangTest, testing::Values("io_uring", "threads"),
                         [](const auto &chosen) {
                             return std::string(chosen.param) == "io_uring" ? "uring" : "threads";
                         });
#endif

} // namespace
