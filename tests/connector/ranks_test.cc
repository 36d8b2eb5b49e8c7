// Ranks of a tensor-parallel engine: each has some of the KV heads, and the store has whole chunks.
#include "connector/gather_state.h"
#include "connector/host_socket.h"

#include "tests/connector/engine.h"
#include "tests/connector/touched_pages.h"
#include "tests/connector/watch.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <filesystem>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
#endif

namespace
{

// How many parts this thread has closed while lock_of_parts is set, and how many with that lock.
thread_local const pthread_mutex_t *lock_of_parts = nullptr;
thread_local int n_closed = 0, n_closed_with_lock = 0;

// What happens while a connector joins its ranks; once.
std::function<void()> while_joining;

} // namespace

// The linker has the library's calls come here (--wrap).
extern "C" int __real_close(int fd);
extern "C" int __wrap_close(int fd);
extern "C" int __wrap_close(int fd)
{
    if (lock_of_parts != nullptr && fcntl(fd, F_GET_SEALS) >= 0) {
        n_closed++;
        n_closed_with_lock += lock_of_parts->__data.__owner == gettid();
    }
    return __real_close(fd);
}
extern "C" cg_status __real_cg_gather_new(const cg_gather_config *config, cg_gather **gather_out);
extern "C" cg_status __wrap_cg_gather_new(const cg_gather_config *config, cg_gather **gather_out);
extern "C" cg_status __wrap_cg_gather_new(const cg_gather_config *config, cg_gather **gather_out)
{
    const std::function<void()> meanwhile = std::exchange(while_joining, nullptr);
    const cg_status status = __real_cg_gather_new(config, gather_out);
    if (meanwhile)
        meanwhile();
    return status;
}

namespace
{

using namespace cg_test;

ProfileSpec four_heads()
{
    ProfileSpec spec = nesting_spec();
    spec.n_kv_heads = 4;
    return spec;
}

// A name that no other test of this machine has.
std::string new_group()
{
    static int n = 0;
    return "test-" + std::to_string(getpid()) + "-" + std::to_string(n++);
}

// One engine in several ranks.
struct Ranks {
    Ranks(const Store &store, const std::vector<Heads> &heads, const std::string &more = "")
        : group(new_group())
    {
        for (const Heads &h : heads)
            ranks.push_back(std::make_unique<Engine>(
                store, "\"group\": \"" + group + "\"" + (more.empty() ? "" : ", " + more), h));
    }
    Engine &operator[](size_t i)
    {
        return *ranks[i];
    }
    // What ranks have saved without one another counts no more.
    void agree()
    {
        n_agreed += 1000;
        for (auto &rank : ranks)
            rank->next_number = n_agreed;
    }
    static cachegen_status start(Engine &rank, const Tokens &tokens, cachegen_save **save,
                                 uint32_t from = 0, const char *context = nullptr)
    {
        rank.prefill(tokens);
        return rank.save_start(tokens, from, static_cast<uint32_t>(tokens.size()), true, context, 0,
                               save);
    }
    // Saves until a rank has no memory for more, since nobody asks for it.
    static void fill(Engine &rank)
    {
        cachegen_status status = CACHEGEN_OK;
        for (uint64_t seed = 10; seed < 20 && status == CACHEGEN_OK; seed++) {
            cachegen_save *save;
            if ((status = start(rank, prompt(128, seed), &save)) == CACHEGEN_OK)
                rank.finish(save);
        }
        ASSERT_EQ(status, CACHEGEN_AGAIN) << "what nobody asked for counts";
    }
    // All ranks save; the status of head 0's.
    cachegen_status save(const Tokens &tokens, const char *context = nullptr)
    {
        cachegen_status status = -1;
        std::vector<cachegen_save *> saves(ranks.size());
        for (size_t i = 0; i < ranks.size(); i++)
            EXPECT_EQ(start(*ranks[i], tokens, &saves[i], 0, context), CACHEGEN_OK) << i;
        for (size_t i = 0; i < ranks.size(); i++) {
            const cachegen_progress p = ranks[i]->finish(saves[i]);
            status = i == 0 ? p.status : status;
        }
        return status;
    }
    std::string group;
    std::vector<std::unique_ptr<Engine>> ranks;
    uint64_t n_agreed = 0;
};

const std::vector<Heads> TWO = {{0, 2}, {2, 2}}, THREE = {{0, 1}, {1, 2}, {3, 1}};
const Tokens LONG = prompt(32 * 3 + 16);

TEST(RanksTest, StoreTheSameFilesAsASingleEngine)
{
    for (const bool with_profile : {false, true})
        for (const auto &heads : {TWO, THREE}) {
            SCOPED_TRACE(heads.size());
            const Store single(with_profile, four_heads()), many(with_profile, four_heads());
            Engine engine(single);
            ASSERT_EQ(engine.save(LONG, "name"), CACHEGEN_OK);
            Ranks ranks(many, heads);
            ASSERT_EQ(ranks.save(LONG, "name"), CACHEGEN_OK);
            EXPECT_EQ(ranks[0].stats().chunks_saved[with_profile], 4u);
            size_t n_chunks = 0;
            EXPECT_EQ(many.dir.files("m/objects"), single.dir.files("m/objects"));
            for (const std::string &path : single.dir.files("m/objects")) {
                EXPECT_EQ(many.dir.read(path), single.dir.read(path)) << path;
                n_chunks += path.size() > 3 && path.substr(path.size() - 3) == ".kv";
            }
            EXPECT_GE(n_chunks, 4u);
            EXPECT_EQ(many.dir.files("m/contexts").size(), single.dir.files("m/contexts").size());
        }
}

TEST(RanksTest, LoadTheirHeadsOfWhatAnyEngineStored)
{
    const Store store(false, four_heads());
    Engine single(store);
    ASSERT_EQ(single.save(LONG), CACHEGEN_OK);
    Ranks ranks(store, THREE);
    for (auto &rank : ranks.ranks)
        for (uint32_t from : {0u, 40u}) {
            const Load l = rank->load(LONG, from);
            EXPECT_EQ(l.status, CACHEGEN_OK);
            EXPECT_EQ(l.progress.loaded_tokens, 111u);
            EXPECT_EQ(rank->error_of(LONG, from, 111), 0);
            EXPECT_TRUE(rank->is_untouched(111, 112));
        }
    const Tokens other = prompt(100, 2);
    ASSERT_EQ(ranks.save(other), CACHEGEN_OK);
    EXPECT_EQ(single.load(other).progress.loaded_tokens, 96u);
    EXPECT_EQ(single.error_of(other, 0, 96), 0);
}

TEST(RanksTest, BlocksThatAreCopiedLaterAreNotReadByTheThreadThatSaves)
{
    const Store store(false, four_heads());
    Ranks ranks(store, THREE);
    const Tokens tokens = prompt(32 * 16 + 16);
    cachegen_save *saves[3];
    for (size_t i : {2, 0, 1}) {
        Engine &rank = ranks[i];
        rank.prefill(tokens);
        rank.copies_later = true;
        {
            const TouchedPages blocks(rank.memory.data(), rank.memory.size());
            ASSERT_EQ(rank.save_start(tokens, 0, 32 * 16 + 16, true, nullptr, 0, &saves[i]),
                      CACHEGEN_OK);
            rank.wait_copied(saves[i]);
            EXPECT_NE(blocks.first_thread(), 0) << i;
            EXPECT_NE(blocks.first_thread(), gettid()) << i;
        }
        rank.poison();
    }
    for (size_t i = 0; i < 3; i++)
        EXPECT_EQ(ranks[i].finish(saves[i]).status, CACHEGEN_OK) << i;
    Engine single(store);
    EXPECT_EQ(single.load(tokens).progress.loaded_tokens, 32u * 16 + 15);
    EXPECT_EQ(single.error_of(tokens, 0, 32 * 16 + 15), 0);
}

TEST(RanksTest, ARankWhoseCopyIsCutPassesNothingOn)
{
    const Store store(false, four_heads());
    Ranks ranks(store, TWO, "\"threads\": 1");
    cachegen_save *saves[2];
    ASSERT_EQ(Ranks::start(ranks[0], LONG, &saves[0]), CACHEGEN_OK);
    ranks[1].copies_later = true;
    ranks[1].prefill(LONG);
    {
        TouchedPages blocks(ranks[1].memory.data(), ranks[1].memory.size(), true);
        ASSERT_EQ(ranks[1].save_start(LONG, 0, 112, true, nullptr, 0, &saves[1]), CACHEGEN_OK);
        ASSERT_TRUE(comes_true([&] { return blocks.first_thread() != 0; }));
        cachegen_save_cut_from(saves[1], 111); // what lies before that goes, too
        EXPECT_TRUE(Engine::is_copied(saves[1]));
        blocks.release_overwritten();
        ranks[1].wait_cut(saves[1]);
    }
    ranks[1].poison();
    cachegen_progress p = ranks[1].finish(saves[1]);
    EXPECT_EQ(p.status, CACHEGEN_OK);
    EXPECT_EQ(p.loaded_tokens, 0u);
    p = ranks[0].finish(saves[0]);
    EXPECT_EQ(p.loaded_tokens, 0u);
    EXPECT_EQ(ranks[0].stats().saves_dropped_incomplete, 4u);
    EXPECT_EQ(ranks[0].stats().save_errors, 0u) << "an engine that needs its blocks is no error";
    EXPECT_TRUE(store.chunks("L0").empty());
    // What comes next is whole again, also where the rank that stores is cut.
    EXPECT_EQ(ranks.save(LONG), CACHEGEN_OK);
    const Tokens other = prompt(112, 2);
    ranks[0].copies_later = ranks[1].copies_later = true;
    for (int i : {0, 1})
        ASSERT_EQ(Ranks::start(ranks[i], other, &saves[i]), CACHEGEN_OK);
    cachegen_save_cut(saves[0]);
    ranks[0].wait_cut(saves[0]);
    ranks[1].wait_copied(saves[1]);
    for (int i : {0, 1})
        ranks[i].poison();
    p = ranks[0].finish(saves[0]);
    EXPECT_EQ(p.status, CACHEGEN_OK);
    ranks[1].finish(saves[1]);
    EXPECT_EQ(ranks[0].load(other).progress.loaded_tokens, std::min(p.loaded_tokens, 111u));
    EXPECT_EQ(ranks[0].error_of(other, 0, std::min(p.loaded_tokens, 111u)), 0);
}

// What a rank could not pass on is told by its save, and freeing one waits for the copying.
TEST(RanksTest, ACopyThatNobodyListensForEndsItsSave)
{
    const Store store(false, four_heads());
    Ranks ranks(store, TWO);
    ranks.ranks[0].reset();
    Engine &rank = ranks[1];
    rank.copies_later = true;
    cachegen_save *save;
    ASSERT_EQ(Ranks::start(rank, LONG, &save), CACHEGEN_OK);
    const cachegen_progress p = rank.finish(save);
    EXPECT_EQ(p.status, CG_ERR_NOT_FOUND);
    EXPECT_EQ(p.copied, 1u);
    EXPECT_EQ(rank.stats().save_errors, 1u);
    for (uint64_t seed = 0; seed < 20; seed++) {
        ASSERT_EQ(Ranks::start(rank, prompt(32 * 16, seed), &save), CACHEGEN_OK);
        cachegen_save_free(save);
        rank.poison();
    }
}

TEST(RanksTest, ARankThatIsMissingCostsTheSaveAndNoMore)
{
    const Store store(false, four_heads());
    Ranks ranks(store, TWO, "\"save_timeout_ms\": 200");
    cachegen_save *save;
    ASSERT_EQ(Ranks::start(ranks[0], LONG, &save), CACHEGEN_OK);
    const cachegen_progress p = ranks[0].finish(save);
    EXPECT_EQ(p.status, CG_ERR_TIMED_OUT);
    EXPECT_EQ(p.loaded_tokens, 0u);
    EXPECT_EQ(ranks[0].stats().saves_dropped_incomplete, 4u);
    EXPECT_EQ(ranks[0].stats().saves_dropped, 4u);
    EXPECT_TRUE(store.chunks("L0").empty());
    // Nor does one whose parts nobody asks for. Time enough, since these are to be stored.
    Ranks patient(store, TWO);
    ASSERT_EQ(Ranks::start(patient[1], prompt(64, 3), &save), CACHEGEN_OK);
    EXPECT_EQ(patient[1].finish(save).status, CACHEGEN_OK);
    patient.agree();
    EXPECT_EQ(patient.save(LONG), CACHEGEN_OK);
    EXPECT_EQ(store.chunks("L0").size(), 4u);
}

TEST(RanksTest, APartThatComesLaterThanTheSaveIsWaitedFor)
{
    const Store store(false, four_heads());
    Ranks ranks(store, TWO);
    cachegen_save *first, *second;
    ASSERT_EQ(Ranks::start(ranks[0], LONG, &first), CACHEGEN_OK);
    std::thread late([&] {
        EXPECT_EQ(Ranks::start(ranks[1], LONG, &second), CACHEGEN_OK);
        ranks[1].finish(second);
    });
    EXPECT_EQ(ranks[0].finish(first).status, CACHEGEN_OK);
    late.join();
    Engine single(store);
    single.load(LONG);
    EXPECT_EQ(single.error_of(LONG, 0, 111), 0);
}

// Two ranks with a head each; a chunk's part is 8 KiB.
class GatherTest : public testing::Test
{
  protected:
    void open(uint64_t limit_bytes)
    {
        const std::string group = new_group();
        cg_gather_config config = {};
        config.rank_set = group.c_str();
        config.geometry = {1, 2, 4, CG_DTYPE_BF16, 2};
        config.n_heads = 1;
        config.limit_bytes = limit_bytes;
        ASSERT_EQ(cg_gather_new(&config, &listener), CG_OK);
        config.first_head = 1;
        ASSERT_EQ(cg_gather_new(&config, &sender), CG_OK);
    }
    void TearDown() override
    {
        cg_gather_free(sender);
        cg_gather_free(listener);
    }
    static cg_gather_chunk chunk(const char *name)
    {
        return {cg_key_of_bytes(name, strlen(name)), 512, 0};
    }
    cg_status begin(uint64_t number, cg_gather_part *part, const char *name = "chunk")
    {
        const cg_gather_chunk c = chunk(name);
        const cg_status status = cg_gather_begin(sender, number, &c, 1, part);
        if (status == CG_OK)
            memset(part->data[0], static_cast<int>(number), 2 * 512 * 8);
        return status;
    }
    cg_status send(uint64_t number, const char *name = "chunk")
    {
        cg_gather_part part;
        const cg_status status = begin(number, &part, name);
        return status == CG_OK ? cg_gather_send(sender, &part) : status;
    }
    // CG_OK: of the save's own part.
    cg_status take(uint64_t number, const char *name = "chunk")
    {
        const cg_gather_chunk c = chunk(name);
        memset(raw, 0, sizeof raw);
        const cg_status status = cg_gather_take(listener, number, &c, raw[0][0][0], 0);
        for (const auto &plane : raw)
            for (const auto &token : plane) {
                EXPECT_EQ(token[0][0], 0);
                EXPECT_EQ(token[1][0], status == CG_OK ? number : 0);
            }
        return status;
    }
    cg_gather *listener = nullptr, *sender = nullptr;
    uint8_t raw[2][512][2][8]; // planes, tokens, heads, bytes of the dims
};

TEST_F(GatherTest, APartIsTakenHoweverLate)
{
    ASSERT_NO_FATAL_FAILURE(open(UINT64_MAX));
    for (uint64_t number : {1, 2, 3})
        EXPECT_EQ(send(number), CG_OK);
    EXPECT_EQ(take(1), CG_OK);
    cg_gather_drop(listener, 1);
    EXPECT_EQ(take(2), CG_OK);
    EXPECT_EQ(take(3), CG_OK);
    cg_gather_drop(listener, 3);
    EXPECT_EQ(take(3), CG_ERR_AGAIN);
}

TEST_F(GatherTest, PartsAreOfTheirSavesInWhateverOrderTheyAreMade)
{
    ASSERT_NO_FATAL_FAILURE(open(UINT64_MAX));
    cg_gather_part first, second;
    ASSERT_EQ(begin(1, &first), CG_OK);
    ASSERT_EQ(begin(2, &second), CG_OK);
    EXPECT_EQ(cg_gather_send(sender, &second), CG_OK);
    EXPECT_EQ(take(1), CG_ERR_AGAIN) << "it still comes";
    EXPECT_EQ(cg_gather_send(sender, &first), CG_OK);
    EXPECT_EQ(take(1), CG_OK);
    EXPECT_EQ(take(2), CG_OK);
}

TEST_F(GatherTest, ARefusalDoesNotOvertakeThePartBeforeIt)
{
    ASSERT_NO_FATAL_FAILURE(open(12000)); // one at a time
    cg_gather_part first, second;
    ASSERT_EQ(begin(1, &first), CG_OK);
    EXPECT_EQ(begin(2, &second), CG_ERR_AGAIN) << "what is made counts";
    EXPECT_EQ(take(1), CG_ERR_AGAIN);
    EXPECT_EQ(take(2), CG_ERR_AGAIN);
    EXPECT_EQ(cg_gather_send(sender, &first), CG_OK);
    EXPECT_EQ(take(1), CG_OK);
    EXPECT_EQ(take(2), CG_ERR_CANCELLED);
    cg_gather_drop(listener, 1);
    EXPECT_EQ(take(2), CG_ERR_CANCELLED);
}

// The descriptors of parts that this process has.
std::vector<int> parts_in_memory()
{
    std::vector<int> fds;
    for (const auto &entry : std::filesystem::directory_iterator("/proc/self/fd")) {
        std::error_code gone; // as the one that lists them
        if (std::filesystem::read_symlink(entry, gone).string().rfind("/memfd:cachegenfs", 0) == 0)
            fds.push_back(std::stoi(entry.path().filename()));
    }
    return fds;
}

// Its memory may be large, and goes with the descriptor.
TEST_F(GatherTest, APartThatNobodyTakesIsFreedWithoutTheLockThatStepsTake)
{
    ASSERT_NO_FATAL_FAILURE(open(UINT64_MAX));
    cg_gather_free(listener);
    listener = nullptr;
    n_closed = n_closed_with_lock = 0;
    lock_of_parts = &sender->lock;
    EXPECT_EQ(send(1), CG_ERR_NOT_FOUND);
    lock_of_parts = nullptr;
    EXPECT_EQ(parts_in_memory().size(), 0u);
    EXPECT_GT(n_closed, 0);
    EXPECT_EQ(n_closed_with_lock, 0);
}

TEST_F(GatherTest, RefusalsBehindAPartThatHangsTakeNoMemory)
{
    ASSERT_NO_FATAL_FAILURE(open(24000)); // two at a time
    cg_gather_part first, abandoned, refused;
    ASSERT_EQ(begin(1, &first), CG_OK);
    EXPECT_EQ(begin(2, &abandoned), CG_OK);
    for (uint64_t number = 3; number < 100; number++)
        EXPECT_EQ(begin(number, &refused), CG_ERR_AGAIN);
    EXPECT_EQ(parts_in_memory().size(), 2u);
    cg_gather_abandon(sender, &abandoned);
    EXPECT_EQ(parts_in_memory().size(), 1u);
    EXPECT_EQ(take(1), CG_ERR_AGAIN);
    EXPECT_EQ(cg_gather_send(sender, &first), CG_OK);
    EXPECT_EQ(take(1), CG_OK);
    cg_gather_drop(listener, 1);
    for (uint64_t number : {2, 3, 50, 99})
        EXPECT_EQ(take(number), CG_ERR_CANCELLED) << number;
    EXPECT_EQ(take(100), CG_ERR_AGAIN);
    cg_gather_drop(listener, 99);
    EXPECT_EQ(send(100), CG_OK) << "their room is free";
    EXPECT_EQ(take(100), CG_OK);
}

// The listener, too, had no memory for it, and made no save.
TEST_F(GatherTest, ARefusalIsOfItsSaveOnly)
{
    ASSERT_NO_FATAL_FAILURE(open(12000));
    EXPECT_EQ(send(1, "other"), CG_OK);
    EXPECT_EQ(send(2), CG_ERR_AGAIN) << "what has been passed on counts";
    EXPECT_EQ(take(1, "other"), CG_OK);
    cg_gather_drop(listener, 1);
    EXPECT_EQ(take(3), CG_ERR_AGAIN);
    EXPECT_EQ(send(3), CG_OK);
    EXPECT_EQ(take(3), CG_OK);
    cg_gather_drop(listener, 3);
    EXPECT_EQ(send(4), CG_OK) << "what was dropped is free";
}

TEST_F(GatherTest, WhatWillNotComeIsNotWaitedFor)
{
    ASSERT_NO_FATAL_FAILURE(open(UINT64_MAX));
    cg_gather_part part;
    ASSERT_EQ(begin(2, &part), CG_OK);
    cg_gather_abandon(sender, &part);
    EXPECT_EQ(take(2), CG_ERR_CANCELLED);
    EXPECT_EQ(take(1), CG_ERR_CANCELLED) << "a later one has come";
    EXPECT_EQ(take(3), CG_ERR_AGAIN);
    EXPECT_EQ(send(3, "other"), CG_OK);
    EXPECT_EQ(take(3), CG_ERR_CANCELLED) << "the ranks have different chunks under one number";
}

TEST_F(GatherTest, ARefusalNeedsNoDescriptor)
{
    ASSERT_NO_FATAL_FAILURE(open(UINT64_MAX));
    EXPECT_EQ(send(1), CG_OK); // which connects
    EXPECT_EQ(take(1), CG_OK);
    rlimit all = {};
    ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &all), 0);
    const rlimit none = {0, all.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
    cg_gather_part part;
    EXPECT_EQ(begin(2, &part), CG_ERR_NO_MEMORY);
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &all), 0);
    EXPECT_EQ(take(2), CG_ERR_CANCELLED);
    EXPECT_EQ(send(3), CG_OK);
    EXPECT_EQ(take(3), CG_OK);
}

// It could be written to when the listener has it, so it is not sealed, and not passed on.
TEST_F(GatherTest, APartThatIsMappedElsewhereIsRefused)
{
    ASSERT_NO_FATAL_FAILURE(open(12000));
    cg_gather_part part;
    ASSERT_EQ(begin(1, &part), CG_OK);
    const std::vector<int> parts = parts_in_memory();
    ASSERT_EQ(parts.size(), 1u);
    void *other = mmap(nullptr, 1, PROT_READ | PROT_WRITE, MAP_SHARED, parts[0], 0);
    ASSERT_NE(other, MAP_FAILED);
    EXPECT_EQ(cg_gather_send(sender, &part), CG_ERR_CANCELLED);
    EXPECT_EQ(take(1), CG_ERR_CANCELLED);
    munmap(other, 1);
    EXPECT_EQ(parts_in_memory().size(), 0u);
    EXPECT_EQ(send(2), CG_OK) << "its room is free";
    EXPECT_EQ(take(2), CG_OK);
}

TEST_F(GatherTest, AChildThatIsForkedMeanwhileKeepsNoPartFromBeingPassedOn)
{
    ASSERT_NO_FATAL_FAILURE(open(UINT64_MAX));
    int until[2];
    cg_gather_part part;
    ASSERT_EQ(pipe2(until, O_CLOEXEC), 0);
    ASSERT_EQ(begin(1, &part), CG_OK);
    const pid_t child = fork();
    if (child == 0) {
        char byte;
        close(until[1]);
        _exit(read(until[0], &byte, 1) == 0 ? 0 : 1);
    }
    ASSERT_GT(child, 0);
    EXPECT_EQ(cg_gather_send(sender, &part), CG_OK);
    EXPECT_EQ(take(1), CG_OK);
    close(until[0]);
    close(until[1]);
    EXPECT_EQ(waitpid(child, nullptr, 0), child);
}

TEST_F(GatherTest, WhatIsPassedOnIsCountedOnce)
{
    ASSERT_NO_FATAL_FAILURE(open(20000)); // two at a time, and some 50 refusals
    std::atomic<int> turn{0};
    uint64_t n_refused = 0;
    const int n_turns = 3000;
    std::thread other([&] {
        for (int i = 0; i < n_turns; i++) {
            while (turn < i)
                std::this_thread::yield();
            for (int k = 0; k < 25 && turn == i; k++) {
                cg_gather_part part;
                if (begin(1, &part) == CG_OK)
                    cg_gather_abandon(sender, &part);
                else
                    n_refused++;
            }
        }
    });
    for (int i = 0; i < n_turns; i++) {
        EXPECT_EQ(send(2), CG_OK) << i;
        while (take(2) == CG_ERR_AGAIN) // until the other thread's one before it has ended
            std::this_thread::yield();
        cg_gather_drop(listener, 2);
        turn++;
    }
    other.join();
    EXPECT_EQ(n_refused, 0u);
}

// At the latest when the other rank has the heads.
TEST(RanksTest, BlocksAreFreeBeforeTheirHeadsArePassedOn)
{
    const Store store(false, four_heads());
    const std::string group = new_group();
    const cg_key name = cg_key_of_bytes(group.data(), group.size());
    int listener, connection = -1;
    ASSERT_EQ(cg_host_socket_listen(&name, 1, &listener), CG_OK);
    Engine rank(store, "\"group\": \"" + group + "\"", TWO[1]);
    rank.copies_later = true;
    for (int i = 0; i < 300; i++) {
        cachegen_save *save;
        cachegen_progress p = {};
        p.struct_size = sizeof p;
        ASSERT_EQ(Ranks::start(rank, LONG, &save), CACHEGEN_OK);
        while (connection < 0)
            connection = accept(listener, nullptr, nullptr);
        uint64_t n_bytes;
        ASSERT_EQ(recv(connection, &n_bytes, sizeof n_bytes, 0), ssize_t{sizeof n_bytes});
        cachegen_save_poll(save, &p);
        EXPECT_EQ(p.copied, 1u) << i;
        rank.finish(save);
    }
    close(connection);
    close(listener);
}

TEST(RanksTest, SavesThatGoOnFromOneAnotherStoreTheWholePrompt)
{
    const Store store(false, four_heads());
    Ranks ranks(store, TWO);
    for (uint32_t from = 0; from < 112; from += 32) {
        const Tokens tokens(LONG.begin(), LONG.begin() + std::min(from + 32, 112u));
        cachegen_save *saves[2];
        for (int i : {1, 0}) // in either order
            ASSERT_EQ(Ranks::start(ranks[i], tokens, &saves[i], from), CACHEGEN_OK);
        for (int i : {0, 1})
            EXPECT_EQ(ranks[i].finish(saves[i]).status, CACHEGEN_OK) << from;
    }
    Engine single(store);
    EXPECT_EQ(single.load(LONG).progress.loaded_tokens, 111u);
    EXPECT_EQ(single.error_of(LONG, 0, 111), 0);
}

// Heads of 8 KiB a token, so that a chunk of 64 tokens is half a MiB a rank.
TEST(RanksTest, ARankWithoutMemoryEndsTheSaveOfTheOther)
{
    ProfileSpec spec = four_heads();
    spec.head_dim = 256;
    const Store store(false, spec);
    const std::string more =
        "\"staging_mib\": 1, \"chunk_tokens\": 128, \"save_timeout_ms\": 60000";
    Ranks ranks(store, TWO, more);
    cachegen_save *save;
    ASSERT_NO_FATAL_FAILURE(Ranks::fill(ranks[1]));
    ranks.agree();
    ASSERT_EQ(Ranks::start(ranks[1], prompt(128), &save), CACHEGEN_AGAIN);
    ASSERT_EQ(Ranks::start(ranks[0], prompt(128), &save), CACHEGEN_OK);
    EXPECT_EQ(ranks[0].finish(save).status, CG_ERR_CANCELLED);
    EXPECT_EQ(ranks[0].stats().saves_dropped_incomplete, 1u);
}

TEST(RanksTest, ACallThatIsRefusedCountsAsOneWhereRanksCountTheirCalls)
{
    ProfileSpec spec = four_heads();
    spec.head_dim = 256;
    const Store store(false, spec);
    Ranks ranks(store, TWO,
                "\"staging_mib\": 1, \"chunk_tokens\": 128, \"save_timeout_ms\": 60000");
    cachegen_save *save;
    cachegen_status status = CACHEGEN_OK;
    uint64_t seed = 10;
    for (; seed < 20 && status == CACHEGEN_OK; seed++)
        if ((status = Ranks::start(ranks[1], prompt(128, seed), &save)) == CACHEGEN_OK)
            ranks[1].finish(save);
    ASSERT_EQ(status, CACHEGEN_AGAIN);
    for (uint64_t asked = 10; asked < seed; asked++) {
        ASSERT_EQ(Ranks::start(ranks[0], prompt(128, asked), &save), CACHEGEN_OK);
        EXPECT_EQ(ranks[0].finish(save).status, asked + 1 < seed ? CG_OK : CG_ERR_CANCELLED);
    }
    EXPECT_EQ(ranks.save(prompt(128, 30)), CACHEGEN_OK);
}

// Whether its call fails, or its engine does not make one.
TEST(RanksTest, ARankThatDoesNotStartASaveEndsThatOfTheOther)
{
    const Store store(false, four_heads());
    Ranks ranks(store, TWO, "\"save_timeout_ms\": 20000");
    cachegen_save *save;
    for (const bool is_counted : {true, false}) {
        SCOPED_TRACE(is_counted);
        if (!is_counted)
            ranks.agree();
        for (auto &rank : ranks.ranks)
            rank->next_number = is_counted ? 0 : rank->next_number;
        ASSERT_EQ(Ranks::start(ranks[0], LONG, &save), CACHEGEN_OK);
        cachegen_save_refuse(ranks[1].c, is_counted ? 0 : ranks[1].next_number++);
        EXPECT_EQ(ranks[0].finish(save).status, CG_ERR_CANCELLED);

        ASSERT_EQ(Ranks::start(ranks[0], LONG, &save), CACHEGEN_OK);
        const std::vector<int64_t> table = ranks[1].table;
        cachegen_save *none;
        ranks[1].table.assign(table.size(), -1);
        EXPECT_EQ(ranks[1].save_start(LONG, 0, 112, true, nullptr, 0, &none),
                  CG_ERR_INVALID_ARGUMENT);
        EXPECT_EQ(ranks[0].finish(save).status, CG_ERR_CANCELLED);
        ranks[1].table = table;
    }
    ranks.agree();
    // The rank that stores tells nobody.
    cachegen_save_refuse(ranks[0].c, ranks[0].next_number++);
    ranks[1].next_number++;
    cachegen_save_refuse(nullptr, 1);
    EXPECT_EQ(ranks.save(LONG), CACHEGEN_OK);
    EXPECT_EQ(store.chunks("L0").size(), 4u);
}

// A rank that had no memory for a part of a prompt may pass nothing of the rest on.
TEST(RanksTest, WhatFollowsASaveThatCameToNothingWaitsForNoRank)
{
    ProfileSpec spec = four_heads();
    spec.head_dim = 256;
    const Store store(false, spec);
    Ranks ranks(store, TWO,
                "\"staging_mib\": 1, \"chunk_tokens\": 128, \"save_timeout_ms\": 20000");
    const Tokens tokens = prompt(256), first(tokens.begin(), tokens.begin() + 128);
    cachegen_save *save;
    ASSERT_NO_FATAL_FAILURE(Ranks::fill(ranks[1]));
    ranks.agree();
    ASSERT_EQ(Ranks::start(ranks[1], first, &save), CACHEGEN_AGAIN);
    ASSERT_EQ(Ranks::start(ranks[0], first, &save), CACHEGEN_OK);
    EXPECT_EQ(ranks[0].finish(save).status, CG_ERR_CANCELLED);
    ASSERT_EQ(Ranks::start(ranks[0], tokens, &save, 128), CACHEGEN_OK);
    const cachegen_progress p = ranks[0].finish(save);
    EXPECT_EQ(p.status, CACHEGEN_OK);
    EXPECT_EQ(p.loaded_tokens, 128u);
    EXPECT_EQ(ranks[0].stats().saves_dropped_unreachable, 1u);
}

TEST(RanksTest, MemoryOfWhatIsStoredIsFreeAgain)
{
    ProfileSpec spec = four_heads();
    spec.head_dim = 256;
    const Store store(false, spec);
    Ranks ranks(store, TWO,
                "\"staging_mib\": 1, \"chunk_tokens\": 128, \"save_timeout_ms\": 120000");
    for (uint64_t seed = 10; seed < 30; seed++)
        ASSERT_EQ(ranks.save(prompt(128, seed)), CACHEGEN_OK) << seed;
}

TEST(RanksTest, SavesOfOnePromptThatAreUnderWayTogetherHaveAPartEach)
{
    const Store store(false, four_heads());
    Ranks ranks(store, TWO, "\"save_timeout_ms\": 20000");
    cachegen_save *saves[2][3];
    for (int rank : {1, 0})
        for (int i = 0; i < 3; i++) // the last one has only a name to publish
            ASSERT_EQ(Ranks::start(ranks[rank], LONG, &saves[rank][i], i < 2 ? 0 : 112,
                                   i < 2 ? nullptr : "name"),
                      CACHEGEN_OK);
    for (int rank : {1, 0})
        for (cachegen_save *save : saves[rank])
            EXPECT_EQ(ranks[rank].finish(save).status, CACHEGEN_OK) << rank;
    EXPECT_EQ(store.chunks("L0").size(), 4u);
}

TEST(RanksTest, ANameThatIsPublishedAloneTakesNoPartOfTheSaveBehindIt)
{
    const Store store(false, four_heads());
    Ranks ranks(store, TWO, "\"save_timeout_ms\": 20000");
    cachegen_save *saves[2][2];
    ASSERT_EQ(ranks.save(LONG), CACHEGEN_OK);
    for (int rank : {1, 0})
        for (int i = 0; i < 2; i++)
            ASSERT_EQ(Ranks::start(ranks[rank], LONG, &saves[rank][i], i == 0 ? 112 : 0,
                                   i == 0 ? "name" : nullptr),
                      CACHEGEN_OK);
    for (int rank : {1, 0})
        for (cachegen_save *save : saves[rank])
            EXPECT_EQ(ranks[rank].finish(save).status, CACHEGEN_OK) << rank;
}

TEST(RanksTest, MemoryOfWhatIsKnownToBeStoredIsFreeAgain)
{
    ProfileSpec spec = four_heads();
    spec.head_dim = 256;
    const Store store(false, spec);
    Ranks ranks(store, TWO,
                "\"staging_mib\": 1, \"chunk_tokens\": 128, \"positive_ttl_ms\": 86400000");
    for (int i = 0; i < 10; i++) {
        cachegen_save *saves[2];
        for (int rank : {1, 0})
            ASSERT_EQ(Ranks::start(ranks[rank], prompt(128), &saves[rank]), CACHEGEN_OK) << i;
        for (int rank : {1, 0})
            EXPECT_EQ(ranks[rank].finish(saves[rank]).status, CACHEGEN_OK) << i;
    }
    EXPECT_EQ(store.chunks("L0").size(), 1u);
}

TEST(RanksTest, ClosingDoesNotWaitForARank)
{
    const Store store(false, four_heads());
    Ranks ranks(store, TWO, "\"save_timeout_ms\": 86400000, \"close_timeout_ms\": 86400000");
    cachegen_save *save;
    ASSERT_EQ(Ranks::start(ranks[0], LONG, &save), CACHEGEN_OK);
#if defined(__SANITIZE_ADDRESS__)
    __lsan_ignore_object(save); // never freed, on purpose
#endif
    ranks.ranks.clear(); // with a day's patience it would never come back
    EXPECT_TRUE(store.chunks("L0").empty());
}

TEST(RanksTest, ARankThatDiedAndCameBackIsHeardAgain)
{
    const Store store(false, four_heads());
    Ranks ranks(store, TWO, "\"save_timeout_ms\": 5000");
    ASSERT_EQ(ranks.save(LONG), CACHEGEN_OK);
    ranks.ranks[1] = std::make_unique<Engine>(store, "\"group\": \"" + ranks.group + "\"", TWO[1]);
    ranks.agree();
    EXPECT_EQ(ranks.save(prompt(64, 4)), CACHEGEN_OK);
    ranks.ranks[0].reset();
    ranks.ranks[0] = std::make_unique<Engine>(store, "\"group\": \"" + ranks.group + "\"", TWO[0]);
    cachegen_save *save;
    if (Ranks::start(ranks[1], prompt(64, 5), &save) == CACHEGEN_OK)
        ranks[1].finish(save);
    ranks.agree();
    EXPECT_EQ(ranks.save(prompt(64, 6)), CACHEGEN_OK);
}

TEST(RanksTest, HeadsThatCannotBeAreRefused)
{
    const Store store(false, four_heads());
    EXPECT_EQ(Engine(store, "", {0, 2}).register_status, CG_ERR_INVALID_ARGUMENT) << "no group";
    for (const Heads &heads : {Heads{3, 2}, Heads{4, 1}, Heads{0, 5}, Heads{4294967295u, 2}})
        EXPECT_EQ(Engine(store, "\"group\": \"g\"", heads).register_status,
                  CG_ERR_INVALID_ARGUMENT);
    Ranks ranks(store, TWO);
    const std::string group = "\"group\": \"" + ranks.group + "\"";
    EXPECT_EQ(Engine(store, group, TWO[0]).register_status, CG_ERR_EXISTS);
    EXPECT_EQ(Engine(store, group + ", \"read_only\": true", TWO[0]).register_status, CACHEGEN_OK);
}

// Parts are of the heads that a rank joined with: others would lie beyond them, or be taken for
// them.
TEST(RanksTest, ALayoutOfOtherHeadsThanTheRanksIsRefused)
{
    const Store store(false, four_heads());
    Ranks ranks(store, TWO);
    for (auto &rank : ranks.ranks)
        for (const Heads &other : {Heads{0, 1}, Heads{1, 2}, Heads{1, 3}})
            EXPECT_EQ(rank->register_more(other), CG_ERR_INVALID_ARGUMENT)
                << other.first << ", " << other.n;
    for (size_t i = 0; i < 2; i++) {
        EXPECT_EQ(ranks[i].register_more(TWO[i]), CACHEGEN_OK);
        EXPECT_EQ(ranks[i].register_more(TWO[1 - i]), CG_ERR_INVALID_ARGUMENT);
        EXPECT_EQ(ranks[i].register_more({0, 4}), CACHEGEN_OK) << "whole chunks need no rank";
    }
    EXPECT_EQ(ranks.save(LONG), CACHEGEN_OK);
    // Who saves nothing passes nothing on.
    Engine reader(store, "\"group\": \"g\", \"read_only\": true", TWO[0]);
    EXPECT_EQ(reader.register_more({1, 3}), CACHEGEN_OK);
}

TEST(RanksTest, OfLayoutsThatJoinAtOnceTheFasterOnesHeadsCount)
{
    const Store store(false, four_heads());
    Engine rank(store, "\"group\": \"" + new_group() + "\"", {3, 2});
    ASSERT_EQ(rank.register_status, CG_ERR_INVALID_ARGUMENT);
    while_joining = [&] { EXPECT_EQ(rank.register_more(TWO[1]), CACHEGEN_OK); };
    EXPECT_EQ(rank.register_more({1, 3}), CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(rank.register_more(TWO[1]), CACHEGEN_OK);
}

// A descriptor with those bytes in it, passed on as a part is; or the same one several times.
void send_bytes(const std::string &group, const std::string &bytes, uint64_t said, bool sealed,
                size_t n_fds = 1)
{
    sockaddr_un address = {};
    char hex_name[CG_KEY_HEX_BYTES];
    const cg_key key = cg_key_of_bytes(group.data(), group.size());
    cg_key_to_hex(&key, hex_name);
    address.sun_family = AF_UNIX;
    const int n = snprintf(address.sun_path + 1, 100, "cachegenfs-%s", hex_name);
    const int s = socket(AF_UNIX, SOCK_SEQPACKET, 0), fd = memfd_create("test", MFD_ALLOW_SEALING);
    ASSERT_EQ(write(fd, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
    if (sealed) {
        ASSERT_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    }
    ASSERT_EQ(connect(s, reinterpret_cast<sockaddr *>(&address),
                      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + n)),
              0);
    const std::vector<int> fds(n_fds, fd);
    const size_t fds_bytes = n_fds * sizeof fd;
    std::vector<std::max_align_t> control(CMSG_SPACE(fds_bytes) / sizeof(std::max_align_t) + 1);
    iovec content = {&said, sizeof said};
    msghdr message = {};
    message.msg_iov = &content;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(fds_bytes);
    cmsghdr *attached = CMSG_FIRSTHDR(&message);
    attached->cmsg_level = SOL_SOCKET;
    attached->cmsg_type = SCM_RIGHTS;
    attached->cmsg_len = CMSG_LEN(fds_bytes);
    memcpy(CMSG_DATA(attached), fds.data(), fds_bytes);
    EXPECT_GT(sendmsg(s, &message, 0), 0);
    message.msg_controllen = 0; // and one without any
    message.msg_control = nullptr;
    EXPECT_GT(sendmsg(s, &message, 0), 0);
    close(fd);
    close(s);
}

TEST(RanksTest, PartsThatAreNoneAreNotRead)
{
    const Store store(false, four_heads());
    Ranks ranks(store, TWO);
    // magic, n_chunks, first_head, n_heads, number; then chunks of 24 bytes.
    const auto head = [](uint32_t magic, uint32_t n_chunks, uint32_t first, uint32_t n,
                         uint32_t n_tokens, size_t size) {
        const uint32_t words[] = {magic, n_chunks, first, n, 0xffffffff, 0xffffffff};
        std::string bytes(reinterpret_cast<const char *>(words), sizeof words);
        bytes += std::string(16, 'k');
        bytes += std::string(reinterpret_cast<const char *>(&n_tokens), 4);
        bytes.resize(size);
        return bytes;
    };
    const uint32_t magic = 0x32706763;
    for (const std::string &bytes :
         {std::string(), std::string(23, 'x'), head(7, 1, 2, 2, 32, 4096),
          head(magic, 0, 2, 2, 32, 4096), head(magic, 0xffffffff, 2, 2, 32, 4096),
          head(magic, 1, 3, 2, 32, 4096), head(magic, 1, 2, 0, 32, 4096),
          head(magic, 1, 0xffffffff, 2, 32, 4096), head(magic, 1, 2, 2, 32, 4096),
          head(magic, 1, 2, 2, 0xffffffff, 4096), head(magic, 1, 2, 2, 1, 48)})
        for (const bool sealed : {false, true})
            for (const uint64_t said : {static_cast<uint64_t>(bytes.size()), UINT64_MAX})
                send_bytes(ranks.group, bytes, said, sealed);
    EXPECT_EQ(ranks.save(LONG), CACHEGEN_OK);
    Engine single(store);
    single.load(LONG);
    EXPECT_EQ(single.error_of(LONG, 0, 111), 0);
}

// Those of send_bytes() that this process has open.
size_t n_open_parts()
{
    size_t n = 0;
    for (const auto &entry : std::filesystem::directory_iterator("/proc/self/fd")) {
        std::error_code gone;
        const std::string target = std::filesystem::read_symlink(entry, gone);
        n += target.rfind("/memfd:test", 0) == 0;
    }
    return n;
}

TEST(RanksTest, DescriptorsThatAreTooManyAreClosed)
{
    const Store store(false, four_heads());
    Ranks ranks(store, TWO);
    for (const size_t n_fds : {2, 3, 8})
        send_bytes(ranks.group, std::string(4096, 'x'), 4096, true, n_fds);
    EXPECT_EQ(ranks.save(LONG), CACHEGEN_OK);
    EXPECT_EQ(n_open_parts(), 0u);
}

} // namespace
