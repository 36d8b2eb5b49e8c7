// Locks that the processes of a host share, and engines that share the work of saving by them.
#include "connector/host_socket.h"

#include "tests/connector/engine.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <thread>

namespace
{

using namespace cg_test;

constexpr uint32_t CHUNK = 32, AHEAD = 3; // chunks that an engine has begun at most

cg_key new_name()
{
    static int n = 0;
    const std::string text = "test-" + std::to_string(getpid()) + "-" + std::to_string(n++);
    return cg_key_of_bytes(text.data(), text.size());
}

bool never(void *)
{
    return false;
}

// A process that runs body, which gets what it tells and what it is told by.
struct Child {
    template <typename Body> explicit Child(Body body)
    {
        int up[2], down[2];
        EXPECT_EQ(pipe2(up, O_CLOEXEC), 0);
        EXPECT_EQ(pipe2(down, O_CLOEXEC), 0);
        if ((pid = fork()) == 0) {
            close(up[0]);
            close(down[1]);
            body(up[1], down[0]);
            _exit(0);
        }
        close(up[1]);
        close(down[0]);
        told = up[0];
        go = down[1];
    }
    ~Child()
    {
        close(told);
        close(go);
        if (pid > 0) {
            kill(pid, SIGKILL);
            waitpid(pid, nullptr, 0);
        }
    }
    Child(const Child &) = delete;
    Child &operator=(const Child &) = delete;
    uint64_t hear() const
    {
        uint64_t n = UINT64_MAX;
        EXPECT_EQ(read(told, &n, sizeof n), ssize_t{sizeof n});
        return n;
    }
    void start() const
    {
        EXPECT_EQ(write(go, "", 1), 1);
    }
    static void tell(int fd, uint64_t n)
    {
        if (write(fd, &n, sizeof n) != ssize_t{sizeof n})
            _exit(1);
    }
    static void wait(int fd)
    {
        char byte; // no end of the pipe: children that were forked later have its other end, too
        if (read(fd, &byte, 1) != 1)
            _exit(1);
    }
    pid_t pid;
    int told, go;
};

TEST(HostLockTest, OneHasItUntilItIsReleased)
{
    const cg_key name = new_name();
    int first, second;
    ASSERT_EQ(cg_host_lock_take(&name, &first), CG_OK);
    EXPECT_EQ(cg_host_lock_take(&name, &second), CG_ERR_EXISTS);
    EXPECT_EQ(second, -1);
    EXPECT_EQ(cg_host_lock_wait(&name, 1, never, nullptr), CG_ERR_TIMED_OUT);
    EXPECT_EQ(cg_host_lock_wait(
                  &name, UINT64_MAX, [](void *) { return true; }, nullptr),
              CG_ERR_CANCELLED);
    cg_host_lock_release(&first);
    EXPECT_EQ(first, -1);
    cg_host_lock_release(&first);
    EXPECT_EQ(cg_host_lock_wait(&name, UINT64_MAX, never, nullptr), CG_OK);
    ASSERT_EQ(cg_host_lock_take(&name, &second), CG_OK);
    cg_host_lock_release(&second);
}

TEST(HostLockTest, WhoWaitsForAProcessThatDiesIsWoken)
{
    const cg_key name = new_name();
    Child holder([&](int told, int go) {
        int lock;
        Child::tell(told, cg_host_lock_take(&name, &lock) == CG_OK);
        Child::wait(go);
    });
    ASSERT_EQ(holder.hear(), 1u);
    int lock;
    ASSERT_EQ(cg_host_lock_take(&name, &lock), CG_ERR_EXISTS);
    const auto kill_it = [](void *user) {
        kill(*static_cast<const pid_t *>(user), SIGKILL);
        return false;
    };
    EXPECT_EQ(cg_host_lock_wait(&name, UINT64_MAX, kill_it, &holder.pid), CG_OK);
    ASSERT_EQ(cg_host_lock_take(&name, &lock), CG_OK);
    cg_host_lock_release(&lock);
}

TEST(HostLockTest, WhoWaitsIsWokenThoughAForkedChildHasTheSocket)
{
    const cg_key name = new_name();
    int lock, other;
    ASSERT_EQ(cg_host_lock_take(&name, &lock), CG_OK);
    Child child([&](int told, int go) {
        Child::tell(told, 1);
        Child::wait(go);
    });
    ASSERT_EQ(child.hear(), 1u);
    struct Release {
        int *lock;
        int n_asked;
    } release = {&lock, 0};
    const auto release_it = [](void *user) {
        Release *r = static_cast<Release *>(user);
        cg_host_lock_release(r->lock);
        return ++r->n_asked == 100;
    };
    EXPECT_EQ(cg_host_lock_wait(&name, UINT64_MAX, release_it, &release), CG_OK);
    EXPECT_EQ(cg_host_lock_take(&name, &other), CG_ERR_EXISTS) << "the child's";
    EXPECT_EQ(cg_host_lock_wait(
                  &name, UINT64_MAX, [](void *) { return true; }, nullptr),
              CG_OK);
}

class SharedSavesTest : public testing::Test
{
  protected:
    // Of the prompt's chunks, as the connector names it.
    cg_key lock_name(uint32_t index) const
    {
        struct stat root;
        EXPECT_EQ(stat(store.dir.path.c_str(), &root), 0);
        struct {
            cg_key key;
            uint64_t device, root;
        } what = {{}, root.st_dev, root.st_ino};
        what.key = key_of(root_of(store), tokens, index);
        return cg_key_of_bytes(&what, sizeof what);
    }
    const Store store{true};
    const Tokens tokens = prompt(CHUNK * 20);
};

TEST_F(SharedSavesTest, TwoEnginesThatSaveTheSameEncodeItOnce)
{
    const auto body = [&](int told, int go) {
        Engine engine(store, "\"save_timeout_ms\": 600000"); // a wait that ends early costs chunks
        engine.prefill(tokens);
        Child::tell(told, 0);
        Child::wait(go);
        cachegen_save *op;
        if (engine.save_start(tokens, 0, CHUNK * 20, true, nullptr, 0, &op) != CACHEGEN_OK ||
            engine.finish(op).status != CACHEGEN_OK)
            _exit(1);
        Child::tell(told, engine.stats().chunks_encoded);
        Child::tell(told, engine.stats().chunks_saved[CG_L1]);
        Child::tell(told, engine.stats().chunks_existed);
    };
    uint64_t n_encoded = 0, n_saved = 0, n_existed = 0;
    {
        Child first(body), second(body);
        first.hear();
        second.hear();
        first.start();
        second.start();
        for (Child *child : {&first, &second}) {
            n_encoded += child->hear();
            n_saved += child->hear();
            n_existed += child->hear();
        }
    }
    RecordProperty("encoded", static_cast<int>(n_encoded));
    EXPECT_EQ(n_saved, 20u);
    EXPECT_EQ(n_existed, 20u);
    EXPECT_GE(n_encoded, 20u);
    // One that asked the store before the other one began finds out when it publishes.
    EXPECT_LE(n_encoded, 20 + 2 * AHEAD);
    EXPECT_EQ(Engine(store).load(tokens).progress.loaded_tokens, CHUNK * 20 - 1);
}

// Of the connections to a lock that were made and not accepted yet, which are waits for it.
uint32_t count_waits(int lock)
{
    uint32_t n = 0;
    for (int fd; (fd = accept4(lock, nullptr, nullptr, SOCK_CLOEXEC)) >= 0; n++)
        close(fd);
    return n;
}

TEST_F(SharedSavesTest, AnEngineThatHangsIsWaitedForOnce)
{
    std::array<int, 20> locks;
    for (uint32_t i = 0; i < locks.size(); i++) {
        const cg_key name = lock_name(i);
        ASSERT_EQ(cg_host_lock_take(&name, &locks[i]), CG_OK);
    }
    Engine engine(store, "\"save_timeout_ms\": 5000");
    EXPECT_EQ(engine.save(tokens), CACHEGEN_OK);
    EXPECT_EQ(engine.stats().chunks_encoded, 20u);
    EXPECT_EQ(engine.stats().chunks_saved[CG_L1], 20u);
    uint32_t n_waits = 0;
    for (int &lock : locks) {
        n_waits += count_waits(lock);
        cg_host_lock_release(&lock);
    }
    EXPECT_EQ(n_waits, 1u);
}

TEST_F(SharedSavesTest, AnEngineThatIsSlowIsNotWaitedForChunkAfterChunk)
{
    std::array<int, 20> locks;
    int done[2];
    uint32_t n_waits = 0;
    for (uint32_t i = 0; i < locks.size(); i++) {
        const cg_key name = lock_name(i);
        ASSERT_EQ(cg_host_lock_take(&name, &locks[i]), CG_OK);
    }
    ASSERT_EQ(pipe2(done, O_CLOEXEC), 0);
    // Has a chunk ready when half of what the other one would wait is over.
    std::thread slow([&] {
        for (int &lock : locks) {
            pollfd for_wait[] = {{done[0], POLLIN, 0}, {lock, POLLIN, 0}};
            poll(for_wait, 2, -1);
            n_waits += count_waits(lock);
            poll(for_wait, 1, 1000);
            cg_host_lock_release(&lock);
        }
    });
    Engine engine(store, "\"save_timeout_ms\": 2000");
    engine.save(tokens);
    EXPECT_EQ(write(done[1], "", 1), 1);
    slow.join();
    EXPECT_GE(n_waits, 1u);
    EXPECT_LT(n_waits, 10u) << "one for each chunk, and two of them are as long as it waits";
    close(done[0]);
    close(done[1]);
}

} // namespace
