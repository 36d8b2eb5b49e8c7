// What is loaded of a prompt where its request bounds the KL divergence.
#include "connector/kl_bound.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace
{

using Chunks = std::vector<cg_controller_chunk>;

// 131,072 tokens on some link, of a model and sizes that are drawn, too; some levels are missing.
struct Case {
    explicit Case(unsigned seed)
    {
        std::mt19937 draw(seed);
        const auto between = [&](double a, double b) {
            return std::uniform_real_distribution<double>(a, b)(draw);
        };
        for (cg_controller_chunk &chunk : chunks) {
            const double size = between(0.7, 1.3);
            chunk = {256,
                     {0, draw() % 10 == 0 ? 0 : static_cast<uint64_t>(1.4e6 * size),
                      static_cast<uint64_t>(5.8e5 * size),
                      draw() % 20 == 0 ? 0 : static_cast<uint64_t>(1.7e5 * size)}};
        }
        input.policy = draw() % 3 == 0 ? CG_POLICY_MIN_DELAY : CG_POLICY_TTFT_BUDGET;
        input.chunks = chunks.data();
        input.n_chunks = chunks.size();
        input.budget_ns = static_cast<uint64_t>(between(1e8, 4e9));
        input.link_bps = 5e9 * between(0.001, 1) * between(0.1, 1);
        input.link_hope = 2;
        input.recompute.tokens_per_s = between(500, 20000);
        input.other_tokens = draw() % 5000;
        for (unsigned level = 0; level < CG_N_LEVELS; level++)
            input.decode_ns_per_token[level] = (CG_N_LEVELS - level) * between(100, 5000);
        max_kl = between(0.002, 0.08);
    }

    Chunks chunks = Chunks(512);
    cg_controller_input input = {};
    double max_kl = 0;
};

// What is decided of it.
struct Answer {
    Answer(const Case &c, double max_kl)
        : sizes(c.chunks.size()), levels(c.chunks.size()),
          decision(cg_kl_bound_decide(&c.input, &cg_quality_built_in, max_kl, sizes.data(),
                                      levels.data(), &n_asked))
    {
    }
    uint32_t n_asked = 0;
    Chunks sizes;
    std::vector<uint8_t> levels;
    cg_controller_decision decision;
};

TEST(KlBoundTest, WhatIsLoadedKeepsTheBoundAndTheRestIsRecomputed)
{
    size_t n_some = 0, n_cut = 0;
    for (unsigned seed = 1; seed <= 300; seed++) {
        SCOPED_TRACE(testing::Message() << "seed=" << seed);
        const Case c(seed);
        const Answer a(c, c.max_kl);
        const Chunks &sizes = a.sizes;
        const std::vector<uint8_t> &levels = a.levels;
        const cg_controller_decision &decision = a.decision;
        double kl = 0, rest = c.input.other_tokens;
        uint32_t n_behind = 0;
        for (size_t i = c.chunks.size(); i-- > decision.n_load;)
            rest += c.chunks[i].n_tokens;
        for (size_t i = decision.n_load; i-- > 0; n_behind += c.chunks[i].n_tokens) {
            kl += cg_quality_kl(&cg_quality_built_in, n_behind, c.chunks[i].n_tokens, levels[i]);
            ASSERT_EQ(sizes[i].bytes[levels[i]], c.chunks[i].bytes[levels[i]]);
            ASSERT_GT(sizes[i].bytes[levels[i]], 0u);
        }
        EXPECT_LE(kl, c.max_kl * (1 + 1e-9));
        if (decision.n_load > 0) {
            EXPECT_NEAR(static_cast<double>(decision.reserve_ns),
                        rest * 1e9 / c.input.recompute.tokens_per_s, 1);
        }
        n_some += decision.n_load > 0;
        n_cut += decision.n_load > 0 && decision.n_load < c.chunks.size();
    }
    EXPECT_GT(n_some, 100u);
    EXPECT_GT(n_cut, 20u); // else the cases show nothing
}

TEST(KlBoundTest, ALongPromptTakesFewQuestions)
{
    uint32_t most = 0;
    for (unsigned seed = 1; seed <= 2000; seed++) {
        const Case c(seed);
        most = std::max(most, Answer(c, c.max_kl).n_asked);
    }
    EXPECT_LE(most, 22u); // 2 log2(512) + 4
    EXPECT_GT(most, 4u);  // else the cases show nothing
}

TEST(KlBoundTest, NothingIsLoadedWhereNoLevelKeepsTheBound)
{
    Case c(1);
    for (cg_controller_chunk &chunk : c.chunks)
        chunk.bytes[CG_L1] = chunk.bytes[CG_L2] = 0, chunk.bytes[CG_L3] = 170000;
    const Answer a(c, 0.001);
    EXPECT_EQ(a.decision.n_load, 0u);
    EXPECT_EQ(a.n_asked, 0u);
}

TEST(KlBoundTest, AllIsLoadedWhereTheLinkIsUnknown)
{
    Case c(1);
    c.input.link_bps = 0;
    const Answer a(c, 0.08);
    EXPECT_EQ(a.decision.n_load, c.chunks.size());
    EXPECT_EQ(a.n_asked, 1u);
}

} // namespace
