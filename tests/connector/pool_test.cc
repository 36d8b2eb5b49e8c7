#include "connector/pool.h"
#include "tests/connector/watch.h"

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <future>
#include <string>
#include <sys/resource.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>
#include <xmmintrin.h>

namespace
{

// Of two stages, as a chunk's: one task, then three.
struct Job {
    cg_job base;
    cg_pool *pool;
    std::string *ran; // under the one thread
    char name;
    bool is_second;
};

void run(cg_job *job, uint32_t, cg_scratch *)
{
    const auto *self = reinterpret_cast<Job *>(job); // its first member
    *self->ran += self->name;
}

void done(cg_job *job)
{
    auto *self = reinterpret_cast<Job *>(job);
    if (self->is_second)
        return;
    self->is_second = true;
    self->base.n_tasks = 3;
    EXPECT_EQ(cg_pool_go_on(self->pool, CG_JOB_DECODE, job), CG_OK);
}

// Submits the others from inside, so that all of them wait at once.
struct Opener {
    cg_job base;
    cg_pool *pool;
    std::vector<Job> jobs;
};

TEST(PoolTest, WhatGoesOnGoesBeforeWhatWaits)
{
    cg_pool *pool;
    ASSERT_EQ(cg_pool_new(1, 0, nullptr, 0, &pool), CG_OK);
    std::string ran;
    Opener opener = {};
    opener.pool = pool;
    for (const char name : {'a', 'b', 'c'})
        opener.jobs.push_back({{run, done, 1, 0, 0, nullptr}, pool, &ran, name, false});
    opener.base.n_tasks = 1;
    opener.base.run = [](cg_job *job, uint32_t, cg_scratch *) {
        auto *self = reinterpret_cast<Opener *>(job);
        for (Job &each : self->jobs)
            EXPECT_EQ(cg_pool_submit(self->pool, CG_JOB_DECODE, &each.base), CG_OK);
    };
    opener.base.done = [](cg_job *) {};
    ASSERT_EQ(cg_pool_submit(pool, CG_JOB_DECODE, &opener.base), CG_OK);
    cg_pool_free(pool); // runs all that is queued
    EXPECT_EQ(ran, "aaaabbbbcccc");
}

// thread: 0 means the one that asks.
int bind_to(int cpu, pid_t thread = 0)
{
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    return sched_setaffinity(thread, sizeof one, &one);
}

// Sanitizers have threads of their own.
int bind_all_to(int cpu)
{
    int wrong = 0;
    for (const auto &thread : std::filesystem::directory_iterator("/proc/self/task"))
        wrong |= bind_to(cpu, std::stoi(thread.path().filename()));
    return wrong;
}

// Of a job: the CPUs of the thread that runs it.
struct Look {
    cg_job base;
    cpu_set_t got;
};

// Of a job of two tasks, which wait for each other: the CPUs of the threads that run them.
struct Meet {
    cg_job base;
    std::atomic<int> n_there;
    cpu_set_t got[2];
};

// 0: of two threads each has one CPU for itself, the first or the second.
int meet_on_two_cpus(int first, int second)
{
    Meet meet = {};
    meet.base.n_tasks = 2;
    meet.base.run = [](cg_job *job, uint32_t task, cg_scratch *) {
        auto *self = reinterpret_cast<Meet *>(job);
        sched_getaffinity(0, sizeof(cpu_set_t), &self->got[task]);
        for (self->n_there++; self->n_there < 2;)
            sched_yield();
    };
    meet.base.done = [](cg_job *) {};
    cg_pool *pool;
    int wrong = cg_pool_new(2, 0, nullptr, 0, &pool) != CG_OK ||
                cg_pool_submit(pool, CG_JOB_DECODE, &meet.base) != CG_OK;
    cg_pool_free(pool);
    cpu_set_t both;
    CPU_OR(&both, &meet.got[0], &meet.got[1]);
    wrong |= CPU_COUNT(&meet.got[0]) != 1 || CPU_COUNT(&meet.got[1]) != 1 || CPU_COUNT(&both) != 2;
    return wrong || !CPU_ISSET(first, &both) || !CPU_ISSET(second, &both);
}

// 0: a pool's thread may use both CPUs, of which this thread and another one have one each.
int look_from_bound_threads(int first, int second)
{
    std::promise<void> end;
    std::promise<int> bound;
    int wrong = bind_all_to(first);
    std::thread other([&] {
        bound.set_value(bind_to(second));
        end.get_future().wait();
    });
    wrong |= bound.get_future().get();
    Look look = {};
    look.base.n_tasks = 1;
    look.base.run = [](cg_job *job, uint32_t, cg_scratch *) {
        sched_getaffinity(0, sizeof(cpu_set_t), &reinterpret_cast<Look *>(job)->got);
    };
    look.base.done = [](cg_job *) {};
    cg_pool *pool;
    wrong |= cg_pool_choose_threads(0, cg_pool_count_cpus(0)) != 2;
    wrong |= cg_pool_new(1, 0, nullptr, 0, &pool) != CG_OK;
    wrong |= cg_pool_submit(pool, CG_JOB_DECODE, &look.base) != CG_OK;
    cg_pool_free(pool);
    wrong |=
        CPU_COUNT(&look.got) != 2 || !CPU_ISSET(first, &look.got) || !CPU_ISSET(second, &look.got);
    wrong |= meet_on_two_cpus(first, second);
    end.set_value();
    other.join();
    return wrong;
}

// As vLLM on CPUs does: each thread of the engine has one CPU, also the one that starts ours.
TEST(PoolTest, ThreadsHaveAllCpusOfAnEngineWhoseThreadsAreBound)
{
    cpu_set_t all;
    ASSERT_EQ(sched_getaffinity(0, sizeof all, &all), 0);
    if (CPU_COUNT(&all) < 2)
        GTEST_SKIP() << "one CPU: whether threads have all CPUs of a bound engine is not checked";
    std::vector<int> cpus;
    for (int cpu = 0; cpu < CPU_SETSIZE && cpus.size() < 2; cpu++)
        if (CPU_ISSET(cpu, &all))
            cpus.push_back(cpu);
    // A process of its own: other threads of this one are bound to nothing.
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0)
        _exit(look_from_bound_threads(cpus[0], cpus[1]));
    int status;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
}

// Of a job: half of the smallest normal number, which is subnormal.
struct Halve {
    cg_job base;
    volatile float smallest, half;
};

// As torch.set_flush_denormal() has it: threads inherit it.
TEST(PoolTest, ThreadsComputeFloatsAsCDoes)
{
    const unsigned before = _mm_getcsr();
    for (const uint32_t n_cpus : {0u, 1u}) {
        SCOPED_TRACE(testing::Message() << "n_cpus=" << n_cpus);
        const auto cpu = static_cast<uint32_t>(sched_getcpu());
        Halve halve = {};
        halve.smallest = 0x1p-126f;
        halve.base.n_tasks = 1;
        halve.base.run = [](cg_job *job, uint32_t, cg_scratch *) {
            auto *self = reinterpret_cast<Halve *>(job);
            self->half = self->smallest * 0.5f;
        };
        halve.base.done = [](cg_job *) {};
        cg_pool *pool;
        ASSERT_EQ(cg_pool_new(1, 0, &cpu, n_cpus, &pool), CG_OK);
        _mm_setcsr(before | 0x8040); // flush to zero, denormals are zeros
        const cg_status status = cg_pool_submit(pool, CG_JOB_DECODE, &halve.base);
        _mm_setcsr(before);
        cg_pool_free(pool);
        ASSERT_EQ(status, CG_OK);
        EXPECT_EQ(halve.half, 0x1p-127f);
    }
}

// Of a job: tells its thread, and waits.
struct Stay {
    cg_job base;
    std::promise<pid_t> id;
    std::promise<void> end;
};

// Whether a thread may become less nice again (RLIMIT_NICE).
bool may_recover()
{
    bool may = false;
    std::thread([&] {
        const sched_param none = {};
        const int own = getpriority(PRIO_PROCESS, 0);
        setpriority(PRIO_PROCESS, 0, 19);
        sched_setscheduler(0, SCHED_IDLE, &none);
        may = sched_setscheduler(0, SCHED_OTHER, &none) == 0 &&
              setpriority(PRIO_PROCESS, 0, own) == 0;
    }).join();
    return may;
}

TEST(PoolTest, WhoStopsAPoolWaitsForNoThreadThatIsNicer)
{
    if (!may_recover())
        GTEST_SKIP()
            << "threads may not become less nice here: stopping a nice pool is not checked";
    const int own = getpriority(PRIO_PROCESS, 0);
    Stay stay = {};
    stay.base.n_tasks = 1;
    stay.base.run = [](cg_job *job, uint32_t, cg_scratch *) {
        auto *self = reinterpret_cast<Stay *>(job);
        self->id.set_value(gettid());
        self->end.get_future().wait();
    };
    stay.base.done = [](cg_job *) {};
    cg_pool *pool;
    ASSERT_EQ(cg_pool_new(1, 19, nullptr, 0, &pool), CG_OK);
    ASSERT_EQ(cg_pool_submit(pool, CG_JOB_ENCODE, &stay.base), CG_OK);
    const pid_t id = stay.id.get_future().get();
    EXPECT_EQ(sched_getscheduler(id), SCHED_IDLE);
    auto stopped = std::async(std::launch::async, [&] { cg_pool_stop(pool); });
    EXPECT_TRUE(cg_test::comes_true([&] {
        return sched_getscheduler(id) == SCHED_OTHER &&
               getpriority(PRIO_PROCESS, static_cast<id_t>(id)) == own;
    }));
    stay.end.set_value();
    stopped.wait();
    cg_pool_free(pool);
}

TEST(PoolTest, AsManyThreadsAsAreWantedOrCpusUpToEight)
{
    EXPECT_EQ(cg_pool_choose_threads(3, 64), 3u);
    EXPECT_EQ(cg_pool_choose_threads(100, 1), 100u);
    EXPECT_EQ(cg_pool_choose_threads(0, 5), 5u);
    EXPECT_EQ(cg_pool_choose_threads(0, 64), 8u);
}

} // namespace
