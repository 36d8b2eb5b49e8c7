#include "connector/pool.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

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

} // namespace
