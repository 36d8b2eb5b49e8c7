// An engine's day over a store that misbehaves: saves, look-ups, loads, cancels and restarts at
// random, while the file system below is slow, full, read-only, gone or hangs, is unmounted and
// mounted anew, and files are damaged and removed. All that was loaded is checked: every byte at
// L0, and of lossy levels each token's distance from the computed one. What an engine calls in its
// steps runs on a thread whose waits are counted: there must be none.
//
// It runs for a minute, or for CG_STRESS_SECONDS. CG_STRESS_SEED repeats a run, as far as threads
// allow that.
#include "tests/connector/engine.h"
#include "tests/connector/step.h"
#include "tests/connector/watch.h"
#include "tests/iouring/require.h"
#ifdef CG_TEST_HAS_FUSE
#include "tests/iouring/odd_fs.h"
#endif

#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <random>

namespace
{

using namespace cg_test;

constexpr std::chrono::milliseconds CLOSE_TIMEOUT(600), SLACK(8000);

// Once all is closed: what libc and libfuse keep for later, and what each closing leaves to an
// io_uring whose store hangs, since the kernel may write there some day.
constexpr size_t MOST_LEFT_BYTES = 1 << 20, MOST_LEFT_BY_A_RESTART = 64 << 10;

#ifndef CG_TEST_HAS_FUSE
TEST(StressTest, IsNotRun)
{
    CG_SKIP_OR_FAIL("fuse", "built without libfuse 3: no stress over stores that misbehave");
}
#else

unsigned from_environment(const char *name, unsigned otherwise)
{
    const char *text = getenv(name);
    return text != nullptr ? static_cast<unsigned>(std::strtoul(text, nullptr, 10)) : otherwise;
}

struct Kind {
    std::string backend;
    bool is_lossy; // chunks of all lossy levels in one file, else exact ones
};

void PrintTo(const Kind &kind, std::ostream *out) // else a test's name shows the struct's bytes
{
    *out << kind.backend << (kind.is_lossy ? ", lossy" : "");
}

// KV of another token is farther off than any level (Engine::relative_error_of()).
constexpr double WORST_OF_L3 = 0.3;

class StressTest : public testing::TestWithParam<Kind>
{
  protected:
    void SetUp() override
    {
        char reason[256];
        if (GetParam().backend == "io_uring" && !cg_io_uring_reason(reason, sizeof reason))
            CG_SKIP_OR_FAIL("uring", "no io_uring here (" << reason << ")");
        n_bytes = n_allocated();
        mount_store();
        if (!odd->why().empty())
            CG_SKIP_OR_FAIL("fuse", odd->why() << ": no stress over stores that misbehave");
        step = std::make_unique<StepThread>();
        if (!step->why().empty() && is_required("seccomp"))
            FAIL() << step->why();
        if (!step->why().empty())
            printf("skipped: %s: waits within a step are not seen\n", step->why().c_str());
        n_descriptors = n_entries("/proc/self/fd");
        open();
    }
    void TearDown() override
    {
        if (odd != nullptr && !odd->why().empty())
            return; // skipped
        if (odd != nullptr)
            odd->release();
        engine.reset();
        SCOPED_TRACE("CG_STRESS_SEED=" + std::to_string(seed));
        EXPECT_TRUE(comes_true([] { return our_threads().empty(); }))
            << "threads are left: " << our_threads();
        EXPECT_TRUE(comes_true([&] { return n_entries("/proc/self/fd") <= n_descriptors; }))
            << "descriptors are left: " << n_descriptors << " were open, now " << descriptors();
        EXPECT_EQ(step->waits(), "") << "numbers of system calls within steps that wait";
        step.reset();
        odd.reset();
        EXPECT_LT(n_allocated(), n_bytes + MOST_LEFT_BYTES + n_restarts * MOST_LEFT_BY_A_RESTART)
            << "memory is left";
    }
    // Of a sanitizer's allocator this counts nothing; AddressSanitizer looks for leaks by itself.
    static size_t n_allocated()
    {
        const struct mallinfo2 all = mallinfo2();
        return all.uordblks + all.hblkhd;
    }
    uint32_t draw(uint32_t n)
    {
        return static_cast<uint32_t>(random() % n);
    }
    void mount_store()
    {
        if (odd != nullptr)
            return;
        for (const auto &entry : std::filesystem::recursive_directory_iterator(mount.path))
            ADD_FAILURE() << entry.path() << ": made where nothing was mounted";
        odd = std::make_unique<OddFs>(store.dir.path, mount.path);
    }
    // As when its server dies, with all that is under way.
    void unmount_store()
    {
        odd.reset();
        n_unmounts++;
    }
    void open()
    {
        mount_store();
        odd->set_mood(Mood::GOOD);
        const uint32_t staging_mib = 1 + draw(3);
        engine = std::make_unique<Engine>(
            mount.path, store.spec,
            "\"io_backend\": \"" + GetParam().backend +
                "\", \"lookup_timeout_ms\": 300, \"save_timeout_ms\": 300, \"read_timeout_ms\": 300"
                ", \"ttft_budget_ms\": 300, \"retry_ms\": 500, \"close_timeout_ms\": " +
                std::to_string(CLOSE_TIMEOUT.count()) +
                ", \"negative_ttl_ms\": 50, \"positive_ttl_ms\": 300, \"staging_mib\": " +
                std::to_string(staging_mib));
        ASSERT_EQ(engine->open_status, CACHEGEN_OK) << engine->error;
        // The library's threads begin when they are first needed; not in a step, where all they do
        // would be reported.
        engine->save(prompt(64));
        engine->load(prompt(64));
        engine->poison();
        engine->in_step = [this](const auto &call) { step->run(call); };
    }
    void change_mood()
    {
        static const Mood moods[] = {Mood::GOOD, Mood::GOOD,      Mood::GOOD, Mood::HANGING,
                                     Mood::SLOW, Mood::READ_ONLY, Mood::FULL, Mood::GONE};
        mount_store();
        ASSERT_EQ(odd->why(), "");
        odd->set_mood(moods[draw(8)]);
    }
    // One of a few prompts that begin alike, at one of a few lengths.
    Tokens draw_prompt()
    {
        Tokens tokens = prompt(32 * 18, 1 + draw(2));
        const Tokens other = prompt(32 * 18, 10 + draw(3));
        const uint32_t same = 32 * draw(12), n = same + 1 + draw(32 * 18 - same);
        std::copy(other.begin() + same, other.end(), tokens.begin() + same);
        tokens.resize(n);
        return tokens;
    }
    // Each action leaves the blocks poisoned. They are another request's then.
    void check_untouched()
    {
        ASSERT_TRUE(engine->is_poison()) << "written to after it was done";
    }
    void save_some()
    {
        const Tokens tokens = draw_prompt();
        cachegen_save *op;
        check_untouched();
        engine->prefill(tokens);
        const uint32_t n = static_cast<uint32_t>(tokens.size()), from = 32 * draw(4);
        engine->copies_later = draw(2) == 1;
        const cachegen_status status =
            engine->save_start(tokens, std::min(from, n), n, draw(2) == 1,
                               draw(4) == 0 ? "a-context" : nullptr, 0, &op);
        const bool is_cut = status == CACHEGEN_OK && draw(3) == 0;
        if (is_cut)
            engine->in_step([&] { cachegen_save_cut(op); });
        if (status == CACHEGEN_OK && draw(2) == 0 && !(is_cut && SEES_RACES))
            engine->wait_copied(op);
        else if (status == CACHEGEN_OK && engine->copies_later)
            cachegen_save_free(op), op = nullptr;
        engine->poison();
        if (status != CACHEGEN_OK)
            return;             // staging is full, or the store hangs
        cachegen_save_free(op); // ends in its time, or the test hangs
        n_saves++;
    }
    void load_some()
    {
        const Tokens tokens = draw_prompt();
        if (GetParam().is_lossy) { // one of the levels, or whichever the time allows
            const uint32_t level = draw(CG_N_LEVELS);
            engine->level_plus_1 = level == 0 ? 0 : level + 1;
        }
        const cachegen_hit hit = engine->look_up(tokens);
        ASSERT_LT(hit.hit_tokens, tokens.size());
        check_untouched();
        cachegen_load *op;
        cachegen_progress p = {};
        p.struct_size = sizeof p;
        p.abi_version = CACHEGEN_ABI_VERSION;
        ASSERT_EQ(engine->load_start(0, hit.hit_tokens, &op), CACHEGEN_OK);
        if (draw(4) == 0)
            cachegen_load_cancel(op);
        const auto poll_op = [&] { return cachegen_load_poll(op, &p); };
        ASSERT_EQ(wait_for(engine->c, [&] { return engine->within_step(poll_op); }), CACHEGEN_OK);
        cachegen_load_free(op);
        ASSERT_LE(p.loaded_tokens, hit.hit_tokens);
        if (GetParam().is_lossy) {
            ASSERT_LT(engine->relative_error_of(tokens, 0, p.loaded_tokens), WORST_OF_L3)
                << "wrong KV";
        } else {
            ASSERT_EQ(engine->error_of(tokens, 0, p.loaded_tokens), 0) << "wrong KV";
        }
        engine->in_step([&] {
            cachegen_forget_failed(engine->c, engine->plan.data(), engine->plan.size(), &p);
        });
        n_tokens_loaded += p.loaded_tokens;
        engine->poison();
    }
    void harm_a_file()
    {
        const std::vector<std::string> files = store.chunks(GetParam().is_lossy ? "L1" : "L0");
        if (files.empty())
            return;
        const std::string path = store.dir.path + "/" + files[draw(files.size())];
        if (draw(2) == 0) {
            std::filesystem::remove(path);
        } else if (draw(2) == 0) {
            (void)!truncate(path.c_str(), draw(4000));
        } else {
            std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
            file.seekp(draw(4000));
            file.put(static_cast<char>(draw(256)));
        }
    }
    // Closes in its time also where the store hangs: nothing releases it before. Besides, a busy
    // machine may take a while to run this thread.
    void restart()
    {
        const auto begin = std::chrono::steady_clock::now();
        cachegen_close(engine->c);
        EXPECT_LT(std::chrono::steady_clock::now() - begin, CLOSE_TIMEOUT + SLACK)
            << "closing was late";
        engine->c = nullptr;
        n_restarts++;
        open();
    }

    const unsigned seed = from_environment("CG_STRESS_SEED", std::random_device()());
    std::mt19937 random{seed};
    const Store store{GetParam().is_lossy};
    const TempDir mount;
    std::unique_ptr<OddFs> odd;
    std::unique_ptr<StepThread> step;
    std::unique_ptr<Engine> engine;
    size_t n_descriptors = 0, n_bytes = 0;
    uint64_t n_restarts = 0, n_unmounts = 0, n_saves = 0, n_tokens_loaded = 0;
};

TEST_P(StressTest, NothingIsWrongAndNothingIsLeft)
{
    SCOPED_TRACE("CG_STRESS_SEED=" + std::to_string(seed));
    using Clock = std::chrono::steady_clock;
    const auto length = std::chrono::seconds(from_environment("CG_STRESS_SECONDS", 60) / 4);
    const auto begin = Clock::now();
    const auto goes_on = [&] { // longer where a busy machine has loaded nothing yet
        return Clock::now() < begin + length * (n_tokens_loaded == 0 ? 10 : 1);
    };
    uint64_t n_rounds = 0;
    while (goes_on() && !HasFatalFailure()) {
        const uint32_t what = draw(100);
        if (what < 11)
            change_mood();
        else if (what < 12)
            unmount_store();
        else if (what < 45)
            save_some();
        else if (what < 94)
            load_some();
        else if (what < 98)
            harm_a_file();
        else
            restart();
        n_rounds++;
    }
    mount_store();
    RecordProperty("unmounts", std::to_string(n_unmounts));
    RecordProperty("rounds", std::to_string(n_rounds));
    RecordProperty("saves", std::to_string(n_saves));
    RecordProperty("tokens_loaded", std::to_string(n_tokens_loaded));
    EXPECT_GT(n_tokens_loaded, 0u) << "nothing was tested";
}

INSTANTIATE_TEST_SUITE_P(Backends, StressTest,
                         testing::Values(Kind{"io_uring", false}, Kind{"threads", false},
                                         Kind{"io_uring", true}, Kind{"threads", true}),
                         [](const auto &chosen) {
                             const std::string of =
                                 chosen.param.backend == "io_uring" ? "uring" : "threads";
                             return chosen.param.is_lossy ? of + "Lossy" : of;
                         });
#endif

} // namespace
