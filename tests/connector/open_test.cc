// Opening: what model.json, the configuration and the profile say must agree; and the edges of the
// ABI's calls.
#include "connector/clock.h"
#include "connector/plan.h"
#include "tests/connector/engine.h"
#include "tests/connector/watch.h"

#include <linux/capability.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <iterator>
#include <map>
#include <set>
#include <thread>

namespace
{

// Locks that were taken while they are watched. A plain flag guards the sets: a mutex would be
// watched, too.
std::atomic<bool> is_watched{false};
std::atomic_flag is_noting = ATOMIC_FLAG_INIT;
std::set<const void *> locks_of_engine, locks_of_nice;
thread_local bool is_engine = false;
int engine_niceness = 0;

void note_lock(const void *lock)
{
    const bool is_nice = getpriority(PRIO_PROCESS, 0) > engine_niceness;
    if (!is_engine && !is_nice)
        return;
    while (is_noting.test_and_set(std::memory_order_acquire))
        ;
    (is_nice ? locks_of_nice : locks_of_engine).insert(lock);
    is_noting.clear(std::memory_order_release);
}

} // namespace

// The linker has the library's calls come here (--wrap).
extern "C" int __real_pthread_mutex_lock(pthread_mutex_t *lock);
extern "C" int __wrap_pthread_mutex_lock(pthread_mutex_t *lock);
extern "C" int __wrap_pthread_mutex_lock(pthread_mutex_t *lock)
{
    if (is_watched)
        note_lock(lock);
    return __real_pthread_mutex_lock(lock);
}

namespace
{

using namespace cg_test;

class OpenTest : public testing::Test
{
  protected:
    // The sentence of an open that must fail.
    std::string refused(const std::string &more = "", const std::string &root = "")
    {
        const Engine engine(root.empty() ? store.dir.path : root, store.spec, more);
        EXPECT_NE(engine.open_status, CACHEGEN_OK);
        EXPECT_EQ(engine.c, nullptr);
        return engine.error;
    }
    static bool has(const std::string &text, const std::string &part)
    {
        return text.find(part) != std::string::npos;
    }
    Store store;
};

TEST_F(OpenTest, TellsWhatWasOpened)
{
    const Store lossy(true);
    const Engine engine(lossy);
    cachegen_info info = {};
    info.struct_size = sizeof info;
    ASSERT_EQ(cachegen_get_info(engine.c, &info), CACHEGEN_OK);
    EXPECT_EQ(info.n_layers, 4u);
    EXPECT_EQ(info.n_kv_heads, 2u);
    EXPECT_EQ(info.head_dim, 16u);
    EXPECT_EQ(info.dtype, 1u);
    EXPECT_EQ(info.chunk_tokens, 32u);
    EXPECT_EQ(info.has_profile, 1u);
    EXPECT_EQ(info.store_levels, 0xeu);
    EXPECT_STREQ(info.model, "m");
    EXPECT_EQ(info.model_fingerprint_hex, hex(model_of(lossy.spec)));
    EXPECT_EQ(info.profile_fingerprint_hex, hex(*cg_profile_fingerprint(lossy.profile.get())));
}

TEST_F(OpenTest, AModelWithoutModelJsonNeedsAWholeGeometryAndGetsAModelJson)
{
    const std::string whole = store.model_json();
    std::filesystem::remove(store.dir.path + "/m/model.json");
    EXPECT_TRUE(has(refused(), "\"geometry\""));
    EXPECT_TRUE(has(refused("\"geometry\": {\"n_layers\": 4, \"n_kv_heads\": 2, \"head_dim\": 16, "
                            "\"dtype\": \"bf16\"}"),
                    "model_fingerprint"));
    {
        Engine engine(store, "\"geometry\": {\"n_layers\": 4, \"n_kv_heads\": 2, \"head_dim\": 16, "
                             "\"dtype\": \"bf16\", \"model_fingerprint\": \"" +
                                 hex(model_of(store.spec)) + "\"}");
        ASSERT_EQ(engine.open_status, CACHEGEN_OK) << engine.error;
        EXPECT_FALSE(store.dir.has("m/model.json"));
        ASSERT_EQ(engine.save(prompt(64)), CACHEGEN_OK);
        EXPECT_TRUE(store.dir.has("m/model.json"));
    }
    Engine plain(store); // now it suffices
    ASSERT_EQ(plain.open_status, CACHEGEN_OK) << plain.error;
    EXPECT_EQ(plain.look_up(prompt(64)).hit_tokens, 63u);
}

TEST_F(OpenTest, DisagreementNamesBothSides)
{
    const char *cases[][2] = {{"\"n_layers\": 5", "geometry.n_layers"},
                              {"\"n_kv_heads\": 1", "geometry.n_kv_heads"},
                              {"\"head_dim\": 32", "geometry.head_dim"},
                              {"\"model_fingerprint\": \"00000000000000000000000000000000\"",
                               "geometry.model_fingerprint"}};
    for (const auto &c : cases) {
        const std::string sentence = refused(std::string("\"geometry\": {") + c[0] + "}");
        EXPECT_TRUE(has(sentence, c[1]) && has(sentence, "model.json")) << sentence;
    }
}

TEST_F(OpenTest, ScalesThatDoNotFitAreRefusedByName)
{
    const std::string fp8 = "\"geometry\": {\"dtype\": \"fp8_e4m3\", ";
    EXPECT_TRUE(has(refused("\"geometry\": {\"k_scales\": [2, 2, 2, 2]}"), "geometry.k_scales"));
    EXPECT_TRUE(has(refused(fp8 + "\"v_scales\": [2, 2, 2]}"), "geometry.v_scales"));
    ProfileSpec old = nesting_spec();
    old.version = 1; // knows no scales
    const Store version_1(true, old);
    EXPECT_EQ(Engine(version_1, fp8 + "\"v_scales\": [1, 1, 1, 1]}").open_status, CACHEGEN_OK);
    const Engine scaled(version_1, fp8 + "\"v_scales\": [1, 1, 2, 1]}");
    EXPECT_EQ(scaled.open_status, CG_ERR_UNSUPPORTED);
    EXPECT_TRUE(has(scaled.error, ".cgp cannot code a cache of these scales")) << scaled.error;
}

TEST_F(OpenTest, AModelJsonThatIsNoneIsRefusedByName)
{
    for (const char *text :
         {"", "[]", "{\"version\": 2}", "{\"version\": 1}",
          "{\"version\": 1, \"n_layers\": 4, \"n_kv_heads\": 2, \"head_dim\": 15, "
          "\"dtype\": \"bf16\", \"model_fingerprint\": \"a0a1a2a3a4a5a6a7a8a9aaabacadaeaf\"}"}) {
        store.dir.write("m/model.json", std::string(text));
        EXPECT_TRUE(has(refused(), text[0] == '{' && has(text, "15") ? "geometry" : "model.json"))
            << text;
    }
}

TEST_F(OpenTest, ABadCurveOfQualityCostsTheCurveAlone)
{
    const Store lossy(true);
    std::string text = lossy.model_json();
    text.pop_back();
    text += ", \"quality\": {\"" + hex(*cg_profile_fingerprint(lossy.profile.get())) + "\": ";
    const char *cases[][2] = {
        {"{\"kl\": [1, 2, 3], \"last\": [[9, 1]], \"beyond\": 0.1}", ""},
        {"{\"kl\": [1, 2, 0], \"last\": [[9, 1]], \"beyond\": 0.1}", "quality.kl"}};
    for (const auto &c : cases) {
        lossy.dir.write("m/model.json", text + c[0] + "}}");
        const Engine engine(lossy);
        EXPECT_EQ(engine.open_status, CACHEGEN_OK) << engine.error;
        EXPECT_TRUE(has(engine.error, c[1])) << engine.error;
        EXPECT_EQ(strlen(engine.error) > 0, strlen(c[1]) > 0) << engine.error;
    }
}

TEST_F(OpenTest, ADamagedOrForeignProfileIsRefusedByName)
{
    store.dir.write("m/profiles/default", std::string("no digits\n"));
    EXPECT_TRUE(has(refused(), "profiles/default"));
    const std::string missing(32, 'a');
    store.dir.write("m/profiles/default", missing + "\n");
    EXPECT_TRUE(has(refused(), missing));
    ProfileSpec other = store.spec;
    other.seed = 2; // another model's fingerprint
    const Bytes bytes = make_profile_bytes(other);
    const std::string name = hex(*cg_profile_fingerprint(open_profile(bytes).get()));
    store.dir.write("m/profiles/" + name + ".cgp", bytes);
    store.dir.write("m/profiles/default", name + "\n");
    EXPECT_TRUE(has(refused(), "another model"));
    store.dir.write("m/profiles/" + missing + ".cgp", bytes);
    store.dir.write("m/profiles/default", missing);
    EXPECT_TRUE(has(refused(), missing));
}

// Without a writer: nobody waits for one.
TEST_F(OpenTest, AFifoInPlaceOfAFileIsRefused)
{
    const std::string missing(32, 'a');
    store.dir.write("m/profiles/default", missing + "\n");
    ASSERT_EQ(mkfifo((store.dir.path + "/m/profiles/" + missing + ".cgp").c_str(), 0600), 0);
    EXPECT_TRUE(has(refused(), missing));
    const std::string name = store.dir.path + "/m/profiles/default";
    ASSERT_EQ(unlink(name.c_str()), 0);
    ASSERT_EQ(mkfifo(name.c_str(), 0600), 0);
    EXPECT_TRUE(has(refused(), "profiles/default"));
}

// A dead mount, say, is not taken for one that does not exist.
TEST_F(OpenTest, ARootThatIsNoneIsRefusedWithWhatTheSystemSaysOfIt)
{
    const std::string loop = store.dir.path + "/loop", file = store.dir.path + "/m/model.json";
    ASSERT_EQ(symlink("loop", loop.c_str()), 0);
    const std::pair<std::string, std::string> roots[] = {
        {store.dir.path + "/nowhere", strerror(ENOENT)},
        {loop, strerror(ELOOP)},
        {file, "is no directory"},
    };
    for (const auto &[root, why] : roots) {
        const std::string said = refused("", root);
        EXPECT_TRUE(has(said, "\"root\": " + root) && has(said, why)) << said;
    }
}

// It may as well be the bare mount point of one.
TEST_F(OpenTest, ADirectoryThatWasNoStoreIsToldOf)
{
    const auto warning = [&](const std::string &root, const std::string &model) {
        const std::string geometry =
            "\"model\": \"" + model +
            "\", \"geometry\": {\"n_layers\": 4, \"n_kv_heads\": 2, \"head_dim\": 16, \"dtype\": "
            "\"bf16\", \"model_fingerprint\": \"" +
            hex(model_of(store.spec)) + "\"}";
        const std::string json = "{\"root\": \"" + root + "\", " + geometry + "}";
        char error[512];
        cachegen *c = nullptr;
        EXPECT_EQ(cachegen_open(json.data(), json.size(), &c, error, sizeof error), CACHEGEN_OK);
        cachegen_close(c);
        return std::string(error);
    };
    const TempDir bare, mount, empty_store;
    ASSERT_EQ(mkdirat(mount.fd, ".cachegenfs", 0700), 0);
    empty_store.write(".cachegenfs-layout", "1\n");
    EXPECT_TRUE(has(warning(bare.path, "m"), bare.path + " was no store"));
    EXPECT_EQ(warning(bare.path, "m"), "") << "now it is one";
    EXPECT_EQ(warning(bare.path, "another"), "");
    EXPECT_EQ(warning(mount.path, "m"), "");
    EXPECT_EQ(warning(empty_store.path, "m"), "");
}

TEST_F(OpenTest, CpusThatDoNotExistAreRefused)
{
    EXPECT_TRUE(has(refused("\"cpu_affinity\": [1023]"), "\"cpu_affinity\""));
    Engine bound(store, "\"cpu_affinity\": [0]");
    ASSERT_EQ(bound.open_status, CACHEGEN_OK) << bound.error;
    ASSERT_EQ(bound.save(prompt(64)), CACHEGEN_OK);
    EXPECT_EQ(bound.load(prompt(64)).progress.loaded_tokens, 63u);
}

TEST_F(OpenTest, AReadOnlyConnectorSavesNothing)
{
    {
        Engine writer(store);
        ASSERT_EQ(writer.save(prompt(64)), CACHEGEN_OK);
    }
    Engine reader(store, "\"read_only\": true");
    EXPECT_EQ(reader.save(prompt(64, 2)), CG_ERR_READ_ONLY);
    EXPECT_EQ(reader.load(prompt(64)).progress.loaded_tokens, 63u);
}

TEST_F(OpenTest, CallsRefuseNonsense)
{
    Engine engine(store);
    const Tokens tokens = prompt(64);
    cachegen_lookup *lookup;
    cachegen_load *load;
    cachegen_save *save;
    cachegen_request r = engine.request(tokens);
    EXPECT_EQ(cachegen_lookup_start(nullptr, &r, 0, &lookup), CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(cachegen_lookup_start(engine.c, nullptr, 0, &lookup), CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(cachegen_lookup_start(engine.c, &r, 65, &lookup), CG_ERR_INVALID_ARGUMENT);
    r.n_tokens = 0;
    EXPECT_EQ(cachegen_lookup_start(engine.c, &r, 0, &lookup), CG_ERR_INVALID_ARGUMENT);
    r = engine.request(tokens);
    r.level_plus_1 = 5;
    EXPECT_EQ(cachegen_lookup_start(engine.c, &r, 0, &lookup), CG_ERR_INVALID_ARGUMENT);

    EXPECT_EQ(engine.save_start(tokens, 0, 65, true, nullptr, 0, &save), CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(engine.save_start(tokens, 0, 64, true, "../up", 0, &save), CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(engine.save_start(tokens, 0, 64, true, nullptr, 4, &save), CG_ERR_INVALID_ARGUMENT);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);

    ASSERT_EQ(engine.look_up(tokens).hit_tokens, 63u);
    EXPECT_EQ(engine.load_start(0, 64, &load), CG_ERR_INVALID_ARGUMENT) << "beyond the hit";
    EXPECT_EQ(engine.load_start(5, 4, &load), CG_ERR_INVALID_ARGUMENT);
    const std::vector<int64_t> table = engine.table;
    engine.table.resize(3);
    EXPECT_EQ(engine.load_start(0, 63, &load), CG_ERR_INVALID_ARGUMENT) << "blocks are missing";
    EXPECT_EQ(engine.save_start(tokens, 0, 64, true, nullptr, 0, &save), CG_ERR_INVALID_ARGUMENT);
    engine.table = table;
    engine.table[0] = 40;
    EXPECT_EQ(engine.load_start(0, 63, &load), CG_ERR_INVALID_ARGUMENT) << "no such block";
    engine.table = table;
    engine.kv_id = 1;
    EXPECT_EQ(engine.load_start(0, 63, &load), CG_ERR_INVALID_ARGUMENT) << "no such layout";
    engine.kv_id = 0;
    ASSERT_EQ(engine.load_start(0, 63, &load), CACHEGEN_OK);
    cachegen_progress p = {};
    p.struct_size = sizeof p;
    EXPECT_EQ(wait_for(engine.c, [&] { return cachegen_load_poll(load, &p); }), CACHEGEN_OK);
    EXPECT_EQ(cachegen_load_levels(load, nullptr, 2), 2u) << "written to nowhere";
    cachegen_load_free(load);
    engine.plan[100] ^= 1;
    EXPECT_EQ(engine.load_start(0, 63, &load), CG_ERR_CORRUPT);
    cachegen_lookup_free(nullptr);
    cachegen_load_free(nullptr);
    cachegen_load_cancel(nullptr);
    EXPECT_EQ(cachegen_load_levels(nullptr, nullptr, 0), 0u);
    cachegen_save_free(nullptr);
    cachegen_close(nullptr);
}

TEST_F(OpenTest, StructsOfAnotherAbiAreRefusedByThatName)
{
    Engine engine(store);
    const Tokens tokens = prompt(64);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    ASSERT_EQ(engine.look_up(tokens).hit_tokens, 63u);
    for (const uint32_t abi_version : {CACHEGEN_ABI_VERSION + 1, ~0u}) {
        SCOPED_TRACE(abi_version);
        cachegen_request request = engine.request(tokens);
        request.abi_version = abi_version;
        cachegen_lookup *lookup;
        EXPECT_EQ(cachegen_lookup_start(engine.c, &request, 0, &lookup),
                  CG_ERR_UNSUPPORTED_VERSION);
        EXPECT_EQ(lookup, nullptr);
        request.abi_version = CACHEGEN_ABI_VERSION;
        cachegen_lookup_options options = {};
        options.struct_size = sizeof options;
        options.abi_version = abi_version;
        EXPECT_EQ(cachegen_lookup_start_with(engine.c, &request, 0, &options, &lookup),
                  CG_ERR_UNSUPPORTED_VERSION);
        EXPECT_EQ(lookup, nullptr);
        cachegen_load_request to_load = {};
        to_load.struct_size = sizeof to_load;
        to_load.abi_version = abi_version;
        cachegen_load *load;
        EXPECT_EQ(cachegen_load_start(engine.c, &to_load, &load), CG_ERR_UNSUPPORTED_VERSION);
        EXPECT_EQ(load, nullptr);
        cachegen_save_request to_save = {};
        to_save.struct_size = sizeof to_save;
        to_save.abi_version = abi_version;
        cachegen_save *save;
        EXPECT_EQ(cachegen_save_start(engine.c, &to_save, &save), CG_ERR_UNSUPPORTED_VERSION);
        EXPECT_EQ(save, nullptr);
        cachegen_kv_layout layout = {};
        layout.struct_size = sizeof layout;
        layout.abi_version = abi_version;
        uint32_t kv_id;
        EXPECT_EQ(cachegen_register_kv(engine.c, &layout, &kv_id), CG_ERR_UNSUPPORTED_VERSION);
        cachegen_progress progress = {};
        progress.struct_size = sizeof progress;
        progress.abi_version = abi_version;
        EXPECT_EQ(
            cachegen_forget_failed(engine.c, engine.plan.data(), engine.plan.size(), &progress),
            CG_ERR_UNSUPPORTED_VERSION);
    }
}

// Which signals the threads of this process block that are not in `except`, as the kernel has it: a
// mask a thread.
std::map<std::string, uint64_t> blocked_signals(const std::set<std::string> &except)
{
    std::map<std::string, uint64_t> blocked;
    for (const auto &thread : std::filesystem::directory_iterator("/proc/self/task")) {
        std::ifstream in(thread.path() / "status");
        std::string name;
        for (std::string line; std::getline(in, line) && name != "Name:\tiou";)
            if (line.rfind("Name:", 0) == 0)
                name = line.substr(0, 9); // the kernel's own threads for io_uring are not ours
            else if (line.rfind("SigBlk:", 0) == 0 && except.count(thread.path()) == 0)
                blocked[thread.path()] = std::stoull(line.substr(7), nullptr, 16);
    }
    return blocked;
}

// What a call says of each of this process's threads whose names begin so.
std::vector<int> of_threads(const std::string &name, const std::function<int(pid_t)> &call)
{
    std::vector<int> answers;
    for (const auto &thread : std::filesystem::directory_iterator("/proc/self/task")) {
        std::ifstream in(thread.path() / "comm");
        std::string is;
        if (std::getline(in, is) && is.rfind(name, 0) == 0)
            answers.push_back(call(std::stoi(thread.path().filename().string())));
    }
    return answers;
}

std::vector<int> niceness_of(const std::string &name)
{
    return of_threads(name,
                      [](pid_t id) { return getpriority(PRIO_PROCESS, static_cast<id_t>(id)); });
}

TEST_F(OpenTest, OnlyWhatEncodesHasTheLowestPriority)
{
    Engine engine(store, "\"threads\": 3, \"encode_nice\": 19");
    const Tokens tokens = prompt(64);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    ASSERT_EQ(engine.load(tokens).progress.loaded_tokens, 63u);
    // A thread has its name and its priority soon after it was made.
    cpu_set_t own;
    ASSERT_EQ(sched_getaffinity(0, sizeof own, &own), 0);
    const int half = std::max(CPU_COUNT(&own) / 2, 1); // of the CPUs is left to the engine
    const std::vector<int> nice(static_cast<size_t>(std::min(half, 3)), 19),
        normal(3, getpriority(PRIO_PROCESS, 0));
    EXPECT_TRUE(comes_true([&] { return niceness_of("cachegen-encode") == nice; }));
    EXPECT_TRUE(comes_true([&] { return niceness_of("cachegen-work") == normal; }));
    const std::vector<int> idle(nice.size(), SCHED_IDLE), other(normal.size(), SCHED_OTHER);
    EXPECT_TRUE(
        comes_true([&] { return of_threads("cachegen-encode", sched_getscheduler) == idle; }));
    EXPECT_EQ(of_threads("cachegen-work", sched_getscheduler), other);
    for (const int n : niceness_of("cachegen-save"))
        EXPECT_EQ(n, normal[0]) << "it takes the connector's lock";
}

std::atomic<int> n_held{0};
int hold_pipe[2];

// Of a signal: its thread gets no further until the pipe's other end closes.
void hold(int)
{
    char byte;
    n_held++;
    while (read(hold_pipe[0], &byte, 1) < 0)
        ;
    n_held--;
}

TEST_F(OpenTest, ClosingEndsInItsTimeThoughEncodersGetNoFurther)
{
    struct sigaction before, holding = {};
    holding.sa_handler = hold;
    ASSERT_EQ(pipe(hold_pipe), 0);
    ASSERT_EQ(sigaction(SIGTRAP, &holding, &before), 0); // which our threads do not block
    Engine engine(store, "\"close_timeout_ms\": 500, \"encode_nice\": 1");
    ASSERT_EQ(engine.save(prompt(64)), CACHEGEN_OK);
    std::vector<int> encoders;
    EXPECT_TRUE(comes_true([&] {
        encoders = of_threads("cachegen-encode", [](pid_t id) { return id; });
        return !encoders.empty();
    }));
    for (const int id : encoders)
        EXPECT_EQ(tgkill(getpid(), id, SIGTRAP), 0);
    EXPECT_TRUE(comes_true([&] { return n_held == static_cast<int>(encoders.size()); }));
    auto closed = std::async(std::launch::async, [&] { cachegen_close(engine.c); });
    EXPECT_EQ(closed.wait_for(std::chrono::seconds(20)), std::future_status::ready)
        << "waits for them";
    close(hold_pipe[1]);
    closed.wait();
    engine.c = nullptr;
    EXPECT_TRUE(comes_true([] { return our_threads().empty() && n_held == 0; })) << our_threads();
    close(hold_pipe[0]);
    EXPECT_EQ(sigaction(SIGTRAP, &before, nullptr), 0);
}

// Who loses the CPU at the lowest priority keeps what it has locked for long.
TEST_F(OpenTest, NoLockThatAnEngineTakesIsTakenByWhatHasTheLowestPriority)
{
    const Store lossy(true);
    const Tokens tokens = prompt(32 * 6);
    Engine engine(lossy, "\"encode_nice\": 19");
    is_engine = true;
    engine_niceness = getpriority(PRIO_PROCESS, 0);
    if (engine_niceness == 19)
        GTEST_SKIP() << "all have the lowest priority here";
    is_watched = true;
    EXPECT_EQ(engine.save(tokens), CACHEGEN_OK);
    EXPECT_EQ(engine.load(tokens).progress.loaded_tokens, 32u * 6 - 1);
    is_watched = false;
    std::vector<const void *> of_both;
    std::set_intersection(locks_of_engine.begin(), locks_of_engine.end(), locks_of_nice.begin(),
                          locks_of_nice.end(), std::back_inserter(of_both));
    EXPECT_EQ(of_both.size(), 0u);
    EXPECT_FALSE(locks_of_engine.empty());
    EXPECT_FALSE(locks_of_nice.empty()) << "that of the pool";
}

TEST_F(OpenTest, ThreadsBlockTheSignalsOfTheHostAndNotTheirOwn)
{
    constexpr size_t N_THREADS = 4 + 2 + 3;
    std::thread([] {}).join(); // with the first thread ThreadSanitizer makes one of its own
    std::set<std::string> before;
    for (const auto &thread : blocked_signals({}))
        before.insert(thread.first);
    Engine engine(store, "\"io_backend\": \"threads\"");
    const Tokens tokens = prompt(64);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    ASSERT_EQ(engine.load(tokens).progress.loaded_tokens, 63u);
    // A thread that is just being made blocks all until it runs.
    auto threads = blocked_signals(before);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    const auto is_new = [](const auto &thread) {
        return (thread.second >> (SIGSEGV - 1) & 1) != 0;
    };
    while ((threads.size() < N_THREADS || std::any_of(threads.begin(), threads.end(), is_new)) &&
           std::chrono::steady_clock::now() < deadline)
        threads = blocked_signals(before);
    EXPECT_GE(threads.size(), N_THREADS) << "workers, the pool, and queues";
    for (const auto &[thread, mask] : threads) {
        for (int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS})
            EXPECT_EQ(mask >> (own - 1) & 1, 0u) << strsignal(own) << ": " << thread;
        for (int hosts : {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGCHLD, SIGALRM, SIGPROF})
            EXPECT_EQ(mask >> (hosts - 1) & 1, 1u) << strsignal(hosts) << ": " << thread;
    }
}

TEST_F(OpenTest, APlanOfAnotherModelOrDtypeIsRefused)
{
    Engine engine(store), fp32(store, "\"geometry\": {\"dtype\": \"fp32\"}");
    const Tokens tokens = prompt(64);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    engine.look_up(tokens);
    fp32.plan = engine.plan;
    cachegen_load *load;
    EXPECT_EQ(fp32.load_start(0, 63, &load), CG_ERR_FOREIGN_MODEL);
}

TEST_F(OpenTest, APlanCrossesConnectors)
{
    Engine scheduler(store), worker(store);
    const Tokens tokens = prompt(64);
    ASSERT_EQ(scheduler.save(tokens), CACHEGEN_OK);
    scheduler.look_up(tokens);
    worker.plan = scheduler.plan;
    worker.poison();
    const cachegen_progress p = worker.load_planned(0, 63);
    EXPECT_EQ(p.loaded_tokens, 63u);
    EXPECT_EQ(worker.error_of(tokens, 0, 63), 0);
}

uint64_t clock_ns(clockid_t clock)
{
    timespec t;
    clock_gettime(clock, &t);
    return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

// Nobody sets the clock that a plan's budget is counted by.
TEST_F(OpenTest, APlanSaysByTheClockOfTheBootWhenItBegan)
{
    Engine engine(store);
    const uint64_t before_ns = clock_ns(CLOCK_BOOTTIME);
    engine.look_up(prompt(96));
    const uint64_t after_ns = clock_ns(CLOCK_BOOTTIME);
    cg_plan *plan;
    ASSERT_EQ(cg_plan_parse(engine.plan.data(), engine.plan.size(), &plan), CG_OK);
    EXPECT_GE(plan->started_boot_ns, before_ns);
    EXPECT_LE(plan->started_boot_ns, after_ns);
    const cg_key here = cg_boot_clock_id(), again = cg_boot_clock_id(), none = {};
    EXPECT_TRUE(cg_key_equal(&here, &again));
    EXPECT_FALSE(cg_key_equal(&here, &none));
    EXPECT_TRUE(cg_key_equal(&plan->clock_id, &here));
    cg_plan_free(plan);
}

TEST_F(OpenTest, WhatHasPassedIsOnlyKnownByTheSameClock)
{
    const cg_key none = {};
    cg_key here = {}, other = {};
    here.bytes[0] = 1;
    other.bytes[0] = 2;
    EXPECT_EQ(cg_boot_elapsed_ns(&here, 70, &here, 100), 30u);
    EXPECT_EQ(cg_boot_elapsed_ns(&here, 130, &here, 100), 0u) << "not yet";
    EXPECT_EQ(cg_boot_elapsed_ns(&other, 70, &here, 100), 0u) << "of another machine";
    EXPECT_EQ(cg_boot_elapsed_ns(&none, 70, &none, 100), 0u) << "neither knows";
}

TEST_F(OpenTest, RecomputingIsPreferredWhereItIsFaster)
{
    for (const char *policy : {"\"ttft_budget_ms\": 100", "\"policy\": \"min_delay\"",
                               "\"policy\": \"paper\", \"ttft_budget_ms\": 100"}) {
        SCOPED_TRACE(policy);
        Engine engine(store, std::string("\"prior_mbps\": 0.001, ") + policy);
        const Tokens tokens = prompt(96);
        ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
        EXPECT_EQ(engine.look_up(tokens).hit_tokens, 95u) << "speed of recomputing unknown";
        cachegen_report_prefill(engine.c, 1000, 100000000);
        if (strstr(policy, "paper") == nullptr) {
            EXPECT_EQ(engine.look_up(tokens).hit_tokens, 95u) << "whether the prior is true";
        }
        const cachegen_hit hit = engine.look_up(tokens);
        EXPECT_EQ(hit.hit_tokens, 0u);
        EXPECT_EQ(hit.stored_tokens, 95u);
        cachegen_progress p = {};
        p.struct_size = sizeof p;
        p.abi_version = CACHEGEN_ABI_VERSION;
        p.bytes_read = 1 << 20;
        p.read_ns = 10000000;
        cachegen_report_load(engine.c, 0, &p);
        EXPECT_EQ(engine.look_up(tokens).hit_tokens, 95u) << "it is not";
    }
}

// The test of a prior is due now, and then not for half a minute.
TEST_F(OpenTest, ABoundOfQualityThatNothingKeepsTestsNoPrior)
{
    const Store profiled(true);
    Engine engine(profiled, "\"prior_mbps\": 0.001, \"ttft_budget_ms\": 100, "
                            "\"store_levels\": [\"L3\"]");
    const Tokens tokens = prompt(96);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    cachegen_report_prefill(engine.c, 1000, 100000000);
    engine.options.max_kl_micronats = 1;
    EXPECT_EQ(engine.look_up(tokens).hit_tokens, 0u);
    engine.options.max_kl_micronats = 0;
    EXPECT_EQ(engine.look_up(tokens).hit_tokens, 95u) << "whether the prior is true";
}

// A look-up of which computing takes 0.8 of what loading does.
TEST_F(OpenTest, ALookUpCountsWhatTheEngineHasToComputeAndWhatOthersHaveLeftToIt)
{
    for (const bool is_told : {false, true}) {
        SCOPED_TRACE(is_told);
        Engine engine(store, "\"prior_mbps\": 0.001, \"policy\": \"min_delay\"");
        const Tokens tokens = prompt(96);
        ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
        const cachegen_hit all = engine.look_up(tokens);
        ASSERT_EQ(all.hit_tokens, 95u);
        cachegen_report_prefill(engine.c, 96, all.predicted_ns / 10 * 8);
        EXPECT_EQ(engine.look_up(tokens).hit_tokens, 95u) << "whether the prior is true";
        if (is_told)
            cachegen_report_queue(engine.c, 0, 0);
        EXPECT_EQ(engine.look_up(tokens).hit_tokens, 0u);
        EXPECT_EQ(engine.look_up(tokens).hit_tokens, is_told ? 95u : 0u)
            << "the engine may never compute what is looked up, unless it says what it does";
        cachegen_report_queue(engine.c, 0, 0);
        EXPECT_EQ(engine.look_up(tokens).hit_tokens, 0u) << "it has nothing to do any more";
        cachegen_report_queue(engine.c, 960, 0);
        EXPECT_EQ(engine.look_up(tokens).hit_tokens, 95u);
        cachegen_report_queue(engine.c, UINT64_MAX, UINT64_MAX);
        EXPECT_EQ(engine.look_up(tokens).hit_tokens, 95u);
    }
    cachegen_report_queue(nullptr, 1, 1);
}

TEST_F(OpenTest, LoadsThatAnotherProcessReportedTeachTheLink)
{
    Engine engine(store, "\"ttft_budget_ms\": 100, \"recompute_tokens_per_s\": 1e6");
    const Tokens tokens = prompt(96);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    EXPECT_EQ(engine.look_up(tokens).hit_tokens, 95u) << "the link is unknown";
    cachegen_progress p = {};
    p.struct_size = sizeof p;
    p.abi_version = CACHEGEN_ABI_VERSION;
    p.bytes_read = 100;
    p.read_ns = 1000000000;
    cachegen_report_load(engine.c, 0, &p);
    EXPECT_EQ(engine.look_up(tokens).hit_tokens, 0u) << "100 bytes a second";
}

// Chunks at L0 that were computed on a prefix at L3 are not decoded as fast as L3.
TEST_F(OpenTest, LoadsThatAnotherProcessReportedTeachTheLevelsThatTheyHad)
{
    Engine engine(store, "\"prior_mbps\": 1e9, \"threads\": 1");
    const Tokens tokens = prompt(96);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    cachegen_progress p = {};
    p.struct_size = sizeof p;
    p.abi_version = CACHEGEN_ABI_VERSION;
    p.loaded_tokens = 96;
    p.worst_level = CG_L3;
    p.chunks_at[CG_L0] = 3;
    p.decode_ns = 40 * 96000;
    p.copy_ns = 10 * 96000;
    cachegen_report_load(engine.c, 0, &p);
    EXPECT_NEAR(static_cast<double>(engine.look_up(tokens).predicted_ns), 50 * 96000, 96000);
    p.chunks_at[CG_L0] = 0; // of an older host
    p.worst_level = CG_L0;
    p.decode_ns = 300 * 96000;
    for (int i = 0; i < 100; i++)
        cachegen_report_load(engine.c, 0, &p);
    EXPECT_NEAR(static_cast<double>(engine.look_up(tokens).predicted_ns), 310 * 96000, 96000);
}

#if defined(__SANITIZE_THREAD__)
constexpr const char *no_fork = "TSan does not start threads in children of threaded processes";
#elif defined(__SANITIZE_ADDRESS__)
constexpr const char *no_fork = "ASan's allocator may be locked by another thread at the fork, and "
                                "stays locked in the child";
#else
constexpr const char *no_fork = nullptr;
#endif

TEST_F(OpenTest, AHandleWorksInAForkedChild)
{
    if (no_fork != nullptr)
        GTEST_SKIP() << no_fork << ": fork() not tested";
    for (const char *backend : {"io_uring", "threads"}) {
        char reason[256];
        if (std::string(backend) == "io_uring" && !cg_io_uring_reason(reason, sizeof reason))
            continue;
        SCOPED_TRACE(backend);
        Engine engine(store, std::string("\"io_backend\": \"") + backend + "\"");
        const Tokens tokens = prompt(96), others = prompt(96, 2);
        ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
        ASSERT_EQ(engine.load(tokens).progress.loaded_tokens, 95u); // all threads run
        const cachegen_request r = engine.request(tokens);
        cachegen_lookup *parents;
        ASSERT_EQ(cachegen_lookup_start(engine.c, &r, 0, &parents), CACHEGEN_OK);
        fflush(nullptr);
        const pid_t child = fork();
        ASSERT_GE(child, 0);
        if (child == 0) {
            cachegen_hit hit = {};
            hit.struct_size = sizeof hit;
            int wrong = cachegen_lookup_poll(parents, &hit) != CACHEGEN_OK || hit.hit_tokens != 0;
            cachegen_lookup_free(parents);
            wrong |= (engine.load(tokens).progress.loaded_tokens != 95) << 1;
            wrong |= (engine.error_of(tokens, 0, 95) != 0) << 2;
            wrong |= (engine.save(others) != CACHEGEN_OK) << 3;
            wrong |= (engine.stats().loads != 1) << 4;
            cachegen_close(engine.c);
            _exit(wrong);
        }
        int status = -1;
        ASSERT_EQ(waitpid(child, &status, 0), child);
        EXPECT_TRUE(WIFEXITED(status));
        EXPECT_EQ(WEXITSTATUS(status), 0) << "a bit a check";
        cachegen_lookup_free(parents);

        const pid_t idle =
            fork(); // a child that only closes leaves the parent's threads and locks alone
        ASSERT_GE(idle, 0);
        if (idle == 0) {
            alarm(20);
            cachegen_close(engine.c);
            _exit(0);
        }
        ASSERT_EQ(waitpid(idle, &status, 0), idle);
        EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
        EXPECT_EQ(engine.load(others).progress.loaded_tokens, 95u) << "what the child saved";
    }
}

// As in a container with a small --ulimit memlock: newer kernels count rings, too.
TEST_F(OpenTest, WhereNotAllRingsFitThreadsDoTheRest)
{
    char reason[256];
    if (no_fork != nullptr || !cg_io_uring_reason(reason, sizeof reason))
        GTEST_SKIP() << (no_fork != nullptr ? no_fork : reason) << ": fall-backs not tested";
    const Tokens tokens = prompt(96), others = prompt(96, 2);
    for (const rlim_t limit : {0, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 512 << 10}) {
        SCOPED_TRACE(limit);
        fflush(nullptr);
        const pid_t child = fork();
        ASSERT_GE(child, 0);
        if (child == 0) {
            const struct rlimit most = {limit, limit};
            struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
            const struct __user_cap_data_struct sets[2] = {};
            if (setrlimit(RLIMIT_MEMLOCK, &most) != 0 || syscall(SYS_capset, &header, sets) != 0)
                _exit(64);
            Engine one(store), two(store);
            int wrong = one.save(tokens) != CACHEGEN_OK;
            wrong |= (one.load(tokens).progress.loaded_tokens != 95) << 1;
            wrong |= (two.load(tokens).progress.loaded_tokens != 95) << 2;
            wrong |= (two.save(others) != CACHEGEN_OK) << 3;
            wrong |= (one.load(others).progress.loaded_tokens != 95) << 4;
            _exit(wrong);
        }
        int status = -1;
        ASSERT_EQ(waitpid(child, &status, 0), child);
        EXPECT_TRUE(WIFEXITED(status));
        EXPECT_EQ(WEXITSTATUS(status), 0) << "a bit a check";
    }
}

} // namespace
