#include "connector/prefill.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace
{

constexpr cg_prefill_speed MEASURED = {0, 0};

// An engine that computes a prompt in steps of so many tokens.
void compute(cg_prefills *prefills, cg_prefill_speed engine, uint32_t n_tokens, uint32_t step,
             std::mt19937 *noise = nullptr)
{
    for (uint32_t from = 0; from < n_tokens; from += step) {
        const uint32_t n = std::min(step, n_tokens - from);
        double ns = cg_prefill_ns(engine, n, from + n);
        if (noise != nullptr) // a tenth either way, and each fifth step is held up
            ns *= (0.9 + (*noise)() % 201 / 1000.0) * ((*noise)() % 5 == 0 ? 3 : 1);
        cg_prefills_add(prefills, n, uint64_t{n} * from + uint64_t{n} * n / 2,
                        static_cast<uint64_t>(ns));
    }
}

double predicted(const cg_prefills &prefills, double n_tokens, double end_token)
{
    return cg_prefill_ns(cg_prefills_speed(&prefills, MEASURED), n_tokens, end_token);
}

TEST(PrefillTest, NothingTakesNoTimeWhileTheSpeedIsUnknown)
{
    const cg_prefills none = {};
    EXPECT_EQ(cg_prefills_speed(&none, MEASURED).tokens_per_s, 0);
    EXPECT_EQ(predicted(none, 1000, 1000), 0);
}

TEST(PrefillTest, PartsOfAPromptTakeAsLongAsAllOfIt)
{
    const cg_prefill_speed speed = {1000, 4000};
    EXPECT_DOUBLE_EQ(cg_prefill_ns(speed, 4000, 4000), 4e9 * 1.5);
    EXPECT_DOUBLE_EQ(cg_prefill_ns(speed, 1000, 1000) + cg_prefill_ns(speed, 3000, 4000), 6e9);
    EXPECT_DOUBLE_EQ(cg_prefill_ns(speed, 1000, 0), cg_prefill_ns(speed, 1000, 1000));
    EXPECT_DOUBLE_EQ(cg_prefill_ns({1000, 0}, 1000, 90000), 1e9);
}

TEST(PrefillTest, LateTokensAreKnownToTakeLongerOnceLongPromptsWereComputed)
{
    for (double doubling : {4000.0, 8000.0, 30000.0})
        for (uint32_t step : {512u, 2048u, 8192u}) {
            const cg_prefill_speed engine = {10000, doubling};
            cg_prefills prefills = {};
            for (int i = 0; i < 8; i++) // of prompts of different length
                compute(&prefills, engine, i % 2 ? 32768 : 16384, step);
            for (uint32_t end : {4096u, 32768u, 65536u})
                EXPECT_NEAR(predicted(prefills, 2048, end) / cg_prefill_ns(engine, 2048, end), 1,
                            0.01)
                    << doubling << " " << step << " " << end;
        }
}

TEST(PrefillTest, StepsThatWereHeldUpDoNotMoveHowTheSpeedFalls)
{
    const cg_prefill_speed engine = {10000, 16000};
    for (uint32_t seed = 1; seed <= 200; seed++) {
        std::mt19937 random(seed);
        cg_prefills prefills = {};
        for (int i = 0; i < 4; i++)
            compute(&prefills, engine, 32768, 2048, &random);
        const double late = predicted(prefills, 2048, 32768), all = predicted(prefills, 2048, 2048);
        EXPECT_GT(late / all, 1.5) << seed; // it is 2.9
        EXPECT_LT(late / all, 11) << seed;
    }
}

TEST(PrefillTest, WhereAllPrefillsAreAlikeATokenTakesAlwaysAsLong)
{
    cg_prefills prefills = {};
    std::mt19937 random(1);
    for (int i = 0; i < 50; i++)
        compute(&prefills, {10000, 1000}, 700, 700, &random);
    EXPECT_EQ(cg_prefills_speed(&prefills, MEASURED).doubling_tokens, 0);
}

TEST(PrefillTest, ATokenTakesSomeTimeAtTheStartOfAPromptHoweverSteepTheSlope)
{
    cg_prefills prefills = {};
    for (int i = 0; i < 16; i++) // as if the first tokens took less than no time
        cg_prefills_add(&prefills, 1000, i % 2 ? 8000000 : 4000000, i % 2 ? 9000000 : 1000000);
    const cg_prefill_speed speed = cg_prefills_speed(&prefills, MEASURED);
    EXPECT_GT(speed.tokens_per_s, 0);
    EXPECT_LE(speed.tokens_per_s, 10.0 * 1e9 / 1000);
    EXPECT_TRUE(std::isfinite(speed.tokens_per_s));
    EXPECT_GT(speed.doubling_tokens, 0);
}

TEST(PrefillTest, WhatIsConfiguredHolds)
{
    cg_prefills prefills = {};
    compute(&prefills, {10000, 16000}, 32768, 2048);
    EXPECT_EQ(cg_prefills_speed(&prefills, {500, 0}).doubling_tokens, 0);
    EXPECT_EQ(cg_prefills_speed(&prefills, {500, 70}).doubling_tokens, 70);
    EXPECT_NEAR(cg_prefills_speed(&prefills, {0, 16000}).tokens_per_s, 10000, 1);
}

// Whatever was reported: a speed is a number above 0, and more tokens take longer.
TEST(PrefillTest, AnyReportsGiveATimeThatGrowsWithTheTokens)
{
    for (uint32_t seed = 1; seed <= 2000; seed++) {
        std::mt19937 random(seed);
        const auto any = [&] { return uint64_t{random()} >> (random() % 32); };
        cg_prefills prefills = {};
        for (uint32_t n = random() % 40; n > 0; n--)
            cg_prefills_add(&prefills, static_cast<uint32_t>(any()), any() * any(), any() * any());
        const cg_prefill_speed speed =
            cg_prefills_speed(&prefills, {0, random() % 2 ? 0.0 : 1.0 + random() % 100000});
        ASSERT_TRUE(std::isfinite(speed.tokens_per_s) && std::isfinite(speed.doubling_tokens));
        ASSERT_GE(speed.doubling_tokens, 0) << seed;
        if (!(speed.tokens_per_s > 0))
            continue;
        double before = 0;
        for (double n : {1.0, 100.0, 10000.0, 1e6}) {
            const double ns = cg_prefill_ns(speed, n, 1e6);
            ASSERT_GT(ns, before) << seed;
            before = ns;
        }
    }
}

} // namespace
