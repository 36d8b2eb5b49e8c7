#include "connector/extents.h"

#include "connector/quality.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

namespace
{

constexpr double S = 1e9;
constexpr uint8_t NONE = CG_N_LEVELS;

// Nested chunks of 256 tokens of a context, all alike: L1 600, L2 250, L3 100 kB; a link of 8
// Mbit/s moves 1 MB a second, for sure.
class ExtentsTest : public testing::Test
{
  protected:
    void SetUp() override
    {
        set_chunks(4);
        in.link_bps = in.low_bps = 8e6;
    }
    void TearDown() override
    {
        cg_extents_plan_destroy(&plan);
    }
    void set_chunks(size_t n)
    {
        chunks.clear();
        for (size_t i = 0; i < n; i++) {
            cg_extents_chunk chunk = {};
            chunk.bytes[CG_L1] = 600000;
            chunk.bytes[CG_L2] = 250000;
            chunk.bytes[CG_L3] = 100000;
            for (unsigned level = 0; level < CG_N_LEVELS; level++)
                chunk.kl[level] = cg_quality_kl(
                    &cg_quality_built_in, static_cast<uint32_t>(256 * (n - 1 - i)), 256, level);
            chunk.floor = CG_L3;
            chunk.asked = NONE;
            chunk.is_nested = true;
            chunks.push_back(chunk);
        }
        set_left(100);
    }
    void set_left(double seconds)
    {
        for (cg_extents_chunk &chunk : chunks)
            chunk.left_ns = seconds * S;
    }
    void make()
    {
        in.chunks = chunks.data();
        in.n_chunks = chunks.size();
        ASSERT_TRUE(cg_extents_plan_reserve(&plan, chunks.size()));
        cg_extents_plan_make(&plan, &in);
    }
    // "0:3 1:3 1:2": chunk 0 to L3, then chunk 1 to L3, then on to L2.
    std::string extents() const
    {
        std::string text;
        for (size_t i = 0; i < plan.n_extents; i++)
            text += (i > 0 ? " " : "") + std::to_string(plan.extents[i].chunk) + ":" +
                    std::to_string(plan.extents[i].level);
        return text;
    }
    // What it takes to do what the plan says, with nothing known of the plan but its extents.
    double seconds_of_plan() const
    {
        std::vector<uint64_t> at(chunks.size());
        std::vector<size_t> last(chunks.size());
        for (size_t i = 0; i < chunks.size(); i++)
            at[i] = chunks[i].asked_bytes;
        for (size_t i = 0; i < plan.n_extents; i++)
            last[plan.extents[i].chunk] = i;
        double read_ns = in.queued_bytes * 8e9 / in.link_bps, decoded_ns = in.decoding_ns;
        for (size_t i = 0; i < plan.n_extents; i++) {
            const uint32_t c = plan.extents[i].chunk;
            const uint8_t level = plan.extents[i].level;
            EXPECT_GT(chunks[c].bytes[level], at[c]) << "no byte is read twice";
            read_ns += static_cast<double>(chunks[c].bytes[level] - at[c]) * 8e9 / in.link_bps;
            at[c] = chunks[c].bytes[level];
            if (last[c] == i)
                decoded_ns = std::max(decoded_ns, read_ns) + chunks[c].decode_ns[level];
        }
        return std::max(read_ns, decoded_ns) / S;
    }
    std::vector<cg_extents_chunk> chunks;
    cg_extents_input in = {};
    cg_extents_plan plan = {};
};

TEST_F(ExtentsTest, WhatMustArriveComesFirstAndThenTheEndOfTheContext)
{
    const struct {
        const char *what;
        double left_s;
        const char *want;
        bool in_time;
    } cases[] = {
        {"not even the coarsest", 0.39, "0:3 1:3 2:3 3:3", false},
        {"the coarsest", 0.41, "0:3 1:3 2:3 3:3", true},
        {"the last chunk better", 0.56, "0:3 1:3 2:3 3:3 3:2", true},
        {"the last two", 0.71, "0:3 1:3 2:3 3:3 3:2 2:2", true},
        {"the last one finer still before those far away", 1.11, "0:3 1:3 2:3 3:3 3:2 2:2 3:1",
         true},
    };
    for (const auto &c : cases) {
        set_left(c.left_s);
        make();
        EXPECT_EQ(extents(), c.want) << c.what;
        EXPECT_EQ(plan.in_time, c.in_time) << c.what;
        EXPECT_LE(seconds_of_plan(), c.in_time ? c.left_s : 0.41) << c.what;
    }
}

TEST_F(ExtentsTest, WithTimeForAllChunksAreReadToTheirEndsOneAfterTheOther)
{
    make();
    EXPECT_EQ(extents(), "0:1 1:1 2:1 3:1");
    in.low_bps = in.link_bps / 100; // but not where that is a hope only
    make();
    EXPECT_EQ(extents().substr(0, 15), "0:3 1:3 2:3 3:3");
    EXPECT_EQ(plan.n_extents, 12u);
}

TEST_F(ExtentsTest, NothingIsReadTwiceAndWhatIsClosedIsNotRefined)
{
    chunks[0].asked = chunks[1].asked = chunks[2].asked = CG_L3;
    chunks[0].asked_bytes = chunks[1].asked_bytes = chunks[2].asked_bytes = 100000;
    chunks[2].asked_bytes = 200000; // on its way to L2
    chunks[1].is_closed = true;
    in.low_bps = 1;
    make();
    EXPECT_EQ(extents(), "3:3 3:2 2:2 3:1 0:2 2:1 0:1");
    EXPECT_EQ(plan.levels[1], CG_L3);
    EXPECT_DOUBLE_EQ(seconds_of_plan(), 0.6 + 0.4 + 0.5);
}

TEST_F(ExtentsTest, OfVeryManyChunksTheFirstAreRefinedAndWhatMustArriveOfTheOthersCounts)
{
    set_chunks(3 * CG_EXTENTS_MOST_REFINED);
    const auto n_refined = [&] {
        make();
        for (size_t i = CG_EXTENTS_MOST_REFINED; i < chunks.size(); i++)
            EXPECT_EQ(plan.levels[i], CG_L3) << i;
        return std::count_if(plan.levels, plan.levels + chunks.size(),
                             [](uint8_t level) { return level < CG_L3; });
    };
    set_left(1e6);
    EXPECT_EQ(n_refined(), CG_EXTENTS_MOST_REFINED);
    const double floors_s = 0.1 * static_cast<double>(chunks.size());
    set_left(floors_s + 10 * 0.15 + 0.01); // and ten times from L3 to L2
    EXPECT_EQ(n_refined(), 10);
}

// A chunk's nested file, and L0 beside it: no step is known to be in time without looking at all.
TEST_F(ExtentsTest, LookingAtAStepTakesFewJoinsHoweverManyChunksThereAre)
{
    for (const size_t n : {10, 500, 2048, 20000}) {
        SCOPED_TRACE(n);
        set_chunks(n);
        for (cg_extents_chunk &chunk : chunks)
            chunk.bytes[CG_L0] = 2000000;
        const size_t n_steps = 3 * std::min<size_t>(n, CG_EXTENTS_MOST_REFINED);
        for (const double part : {0.2, 0.5, 0.9}) { // of what L0 of all takes
            set_left(part * 2 * static_cast<double>(n));
            make();
            EXPECT_LT(plan.n_joins, n_steps * 200);
        }
    }
}

TEST_F(ExtentsTest, LevelsInFilesOfTheirOwnAreChosenBeforeTheyAreBegunByWhatASlowLinkCanDo)
{
    set_chunks(2);
    for (cg_extents_chunk &chunk : chunks) {
        chunk.is_nested = false;
        chunk.bytes[CG_L0] = 2000000;
    }
    set_left(1.3);
    make();
    EXPECT_EQ(extents(), "0:1 1:1") << "each level is a file: none is read for another's sake";
    in.low_bps = in.link_bps / 2;
    make();
    EXPECT_EQ(extents(), "0:2 1:2") << "0.5 of 0.65 MB";
    chunks[0].asked_bytes = 1;
    make();
    EXPECT_EQ(plan.levels[0], CG_L3) << "it was begun";

    set_chunks(1); // a nested file, and L0 beside it
    chunks[0].bytes[CG_L0] = 2000000;
    make();
    EXPECT_EQ(extents(), "0:0");
    chunks[0].asked = CG_L3;
    chunks[0].asked_bytes = 100000;
    make();
    EXPECT_EQ(extents(), "0:1");
}

TEST_F(ExtentsTest, DecodingBytesUnderWayAndOtherDeadlinesCount)
{
    for (cg_extents_chunk &chunk : chunks)
        for (double &ns : chunk.decode_ns)
            ns = 0.2 * S;
    set_left(0.89); // 0.1 until the first chunk is there, and four times 0.2
    make();
    EXPECT_FALSE(plan.in_time);
    set_left(0.91);
    make();
    EXPECT_EQ(extents(), "0:3 1:3 2:3 3:3 3:2")
        << "the last is decoded last: reading it costs nothing";
    EXPECT_LE(seconds_of_plan(), 0.91);
    in.queued_bytes = 20000;
    make();
    EXPECT_FALSE(plan.in_time);
    in.queued_bytes = 0;
    in.decoding_ns = 0.2 * S;
    make();
    EXPECT_FALSE(plan.in_time);

    SetUp(); // the first two are another load's, which has less time
    chunks[0].left_ns = chunks[1].left_ns = 0.22 * S;
    make();
    EXPECT_EQ(plan.levels[0], CG_L3);
    EXPECT_EQ(plan.levels[1], CG_L3);
    EXPECT_EQ(plan.levels[3], CG_L1);
}

// Their bytes and their decoding come before the refinements; what must arrive goes before both.
TEST_F(ExtentsTest, RefinementsLeaveTimeForLoadsThatAreLikelyToCome)
{
    set_left(1.4); // at 1 MB/s, of 4 * 0.1 MB that must arrive and 4 * 0.15 of the first refinement
    make();
    const size_t n_alone = plan.n_extents;
    EXPECT_EQ(std::count(plan.levels, plan.levels + 4, CG_L3), 0);
    in.expected_bytes = 600000;
    make();
    EXPECT_TRUE(plan.in_time);
    EXPECT_EQ(extents().substr(0, 15), "0:3 1:3 2:3 3:3");
    EXPECT_EQ(std::count(plan.levels, plan.levels + 4, CG_L3), 2);
    EXPECT_LT(plan.n_extents, n_alone);
    in.expected_decode_ns = 0.5 * S;
    make();
    EXPECT_EQ(extents(), "0:3 1:3 2:3 3:3") << "the decoder is free at 1.5 s";
    in.expected_decode_ns = 0;
    in.expected_bytes = 10e6;
    make();
    EXPECT_TRUE(plan.in_time) << "what must arrive is not late for others";
    EXPECT_EQ(extents(), "0:3 1:3 2:3 3:3");
}

TEST_F(ExtentsTest, ThereIsNoSlackWithoutTimeForLoadsThatAreLikelyToCome)
{
    set_left(30);
    make();
    EXPECT_TRUE(plan.has_slack);
    in.expected_bytes = 3e6; // at a tenth of the speed another 30 s
    make();
    EXPECT_FALSE(plan.has_slack);
}

TEST_F(ExtentsTest, ALoadThatIsLateInAnyCaseKeepsNoOtherFromBeingRefined)
{
    chunks[2].load = chunks[3].load = 1;
    for (const double left_s : {0.05, 0.15}) { // of both chunks of the first, or of its second
        chunks[0].left_ns = chunks[1].left_ns = left_s * S;
        make();
        EXPECT_FALSE(plan.in_time);
        EXPECT_EQ(extents(), "0:3 1:3 2:3 3:3 3:2 2:2 3:1 2:1") << left_s;
    }
    chunks[2].left_ns = chunks[3].left_ns =
        0.56 * S; // what goes before takes its time all the same
    make();
    EXPECT_EQ(extents(), "0:3 1:3 2:3 3:3 3:2");
}

// ---- against an exact solution ----

class RandomExtentsTest : public ExtentsTest
{
  protected:
    void draw(uint32_t seed, bool decodes, bool has_l0 = false)
    {
        std::mt19937 random(seed);
        const auto between = [&](double low, double high) {
            return low + (high - low) * static_cast<double>(random() % 10001) / 10000;
        };
        set_chunks(1 + random() % 5);
        for (cg_extents_chunk &chunk : chunks) {
            const double sensitivity = between(0.01, 1);
            chunk.bytes[CG_L3] = static_cast<uint64_t>(between(5e4, 2e5));
            chunk.bytes[CG_L2] = chunk.bytes[CG_L3] + static_cast<uint64_t>(between(5e4, 4e5));
            chunk.bytes[CG_L1] = chunk.bytes[CG_L2] + static_cast<uint64_t>(between(5e4, 8e5));
            if (random() % 4 == 0)
                chunk.bytes[CG_L2] = 0;
            if (has_l0)
                chunk.bytes[CG_L0] = static_cast<uint64_t>(between(3e5, 3e6));
            for (unsigned level = 0; level < CG_N_LEVELS; level++) {
                chunk.kl[level] = sensitivity * std::vector<double>{0, 3, 10, 57}[level];
                chunk.decode_ns[level] = decodes ? between(0.01, 0.1) * S : 0;
            }
        }
        left_s = between(0.05, 3);
        set_left(left_s);
    }
    // In Johnson's order, in which reads one after the other, and decodes one after the other, end
    // first.
    double least_seconds(const std::vector<uint8_t> &levels)
    {
        std::vector<std::pair<double, double>> jobs; // read, decoded
        for (size_t i = 0; i < chunks.size(); i++)
            jobs.emplace_back(static_cast<double>(chunks[i].bytes[levels[i]]) * 8e9 / in.link_bps,
                              chunks[i].decode_ns[levels[i]]);
        std::sort(jobs.begin(), jobs.end(), [](const auto &left, const auto &right) {
            return std::min(left.first, right.second) < std::min(right.first, left.second);
        });
        double read_ns = 0, decoded_ns = 0;
        for (const auto &[read, decode] : jobs) {
            read_ns += read;
            decoded_ns = std::max(decoded_ns, read_ns) + decode;
        }
        return decoded_ns / S;
    }
    // The least KL of all plans that end in time; below 0 if none does.
    double exact()
    {
        double best = -1;
        std::vector<uint8_t> levels(chunks.size(), CG_L3);
        for (;;) {
            double kl = 0;
            for (size_t i = 0; i < chunks.size(); i++)
                kl += chunks[i].kl[levels[i]];
            if (least_seconds(levels) <= left_s && (best < 0 || kl < best))
                best = kl;
            size_t i = 0;
            for (; i < chunks.size(); i++) {
                bool is_there = false;
                while (levels[i] > 0 && !is_there)
                    is_there = chunks[i].bytes[--levels[i]] != 0;
                if (is_there)
                    break;
                levels[i] = CG_L3;
            }
            if (i == chunks.size())
                return best;
        }
    }
    struct Sums {
        double ours = 0, best = 0;
        int n_same = 0, n = 0, n_missed = 0;
    };
    Sums compare(bool decodes, bool has_l0)
    {
        Sums sums;
        for (uint32_t seed = 0; seed < 2000 && !HasFailure(); seed++) {
            SCOPED_TRACE(seed);
            draw(seed, decodes, has_l0);
            make();
            const double least = exact();
            EXPECT_TRUE(!plan.in_time || least >= 0);
            sums.n_missed += !plan.in_time && least >= 0;
            if (!plan.in_time)
                continue;
            EXPECT_GE(plan.kl, least - 1e-9);
            sums.n++;
            sums.n_same += plan.kl <= least + 1e-9;
            sums.ours += plan.kl;
            sums.best += least;
            double coarsest = 0;
            for (const cg_extents_chunk &chunk : chunks)
                coarsest += chunk.kl[CG_L3];
            if (!decodes && !has_l0) {
                EXPECT_GE((coarsest - plan.kl) * 4, coarsest - least - 1e-9)
                    << "a fourth of what can be gained, at the very least";
            }
        }
        return sums;
    }
    // How many of 500 times 300 plans are worse than one with 10 ms less; none by more than `most`.
    int worse_with_more_time(bool decodes, bool has_l0, double most)
    {
        int n_worse = 0;
        for (uint32_t seed = 0; seed < 500 && !HasFailure(); seed++) {
            SCOPED_TRACE(seed);
            draw(seed, decodes, has_l0);
            double before = 1e9;
            for (int i = 0; i < 300; i++) {
                set_left(left_s + i * 0.01);
                make();
                n_worse += plan.kl > before + 1e-9;
                EXPECT_LE(plan.kl, before * (1 + most) + 1e-9) << i;
                before = plan.kl;
            }
        }
        return n_worse;
    }
    double left_s = 0;
};

TEST_F(RandomExtentsTest, NeverOverBudgetWhenTheCoarsestFits)
{
    for (uint32_t seed = 0; seed < 2000; seed++) {
        SCOPED_TRACE(seed);
        draw(seed, seed % 2 == 0, seed % 3 == 0);
        make();
        if (plan.in_time)
            EXPECT_LE(seconds_of_plan(), left_s * (1 + 1e-9));
        else
            for (size_t i = 0; i < chunks.size(); i++)
                EXPECT_EQ(plan.levels[i], CG_L3);
    }
}

TEST_F(RandomExtentsTest, IsNearlyAsGoodAsTheExactSolution)
{
    for (const bool has_l0 : {false, true}) {
        const Sums sums = compare(false, has_l0);
        EXPECT_GT(sums.n, 1000);
        EXPECT_EQ(sums.n_missed, 0);
        EXPECT_GT(sums.n_same, sums.n * 8 / 10);
        EXPECT_LT(sums.ours, sums.best * 1.05);
    }
}

// Chunks keep the order they are given in; the exact solution has any.
TEST_F(RandomExtentsTest, IsNearlyAsGoodWhereDecodingTakesTimeToo)
{
    for (const bool has_l0 : {false, true}) {
        const Sums sums = compare(true, has_l0);
        EXPECT_GT(sums.n, 1000);
        EXPECT_LT(sums.n_missed, sums.n / 50);
        EXPECT_GT(sums.n_same, sums.n * 7 / 10);
        EXPECT_LT(sums.ours, sums.best * 1.12);
    }
}

TEST_F(RandomExtentsTest, MoreTimeNeverMakesAWorsePlanWhereDecodingTakesNoTime)
{
    for (const bool has_l0 : {false, true})
        EXPECT_EQ(worse_with_more_time(false, has_l0, 0), 0);
}

// There an extent that just fits may keep out two that would have fitted with less time.
TEST_F(RandomExtentsTest, MoreTimeHardlyEverMakesAWorsePlanWhereDecodingTakesTimeToo)
{
    for (const bool has_l0 : {false, true})
        EXPECT_LT(worse_with_more_time(true, has_l0, 0.1), 500 * 300 / 10000);
}

TEST(QualityTest, ABoundLeavesTheLevelsThatKeepItAndALooserOneNoMoreBytes)
{
    std::mt19937 random(3);
    for (int round = 0; round < 300; round++) {
        SCOPED_TRACE(round);
        std::vector<cg_controller_chunk> all(1 + random() % 20);
        for (auto &chunk : all) {
            chunk = {static_cast<uint32_t>(64 + random() % 193),
                     {0, 4000 + random() % 4000, 1500 + random() % 1500, 500}};
            const uint32_t there = 1 + random() % 3;
            for (uint32_t level = CG_L1; level < CG_N_LEVELS; level++)
                if (level != there && random() % 4 == 0)
                    chunk.bytes[level] = 0;
        }
        double before_bytes = 1e18;
        bool was_kept = false;
        for (const double max_kl : {0.0005, 0.002, 0.008, 0.03, 1.0}) {
            std::vector<cg_controller_chunk> chunks = all;
            const bool is_kept =
                cg_quality_bound(&cg_quality_built_in, chunks.data(), chunks.size(), max_kl);
            EXPECT_TRUE(is_kept || !was_kept);
            was_kept = is_kept;
            double kl = 0, bytes = 0;
            uint32_t n_behind = 0;
            for (size_t i = chunks.size(); i-- > 0;) {
                int n_levels = 0;
                for (uint8_t level = 0; level < CG_N_LEVELS; level++) {
                    if (!is_kept) {
                        EXPECT_EQ(chunks[i].bytes[level], all[i].bytes[level]);
                    }
                    if (chunks[i].bytes[level] == 0)
                        continue;
                    EXPECT_EQ(chunks[i].bytes[level], all[i].bytes[level]);
                    n_levels++;
                    kl += cg_quality_kl(&cg_quality_built_in, n_behind, chunks[i].n_tokens, level);
                    bytes += static_cast<double>(chunks[i].bytes[level]);
                }
                n_behind += chunks[i].n_tokens;
                if (is_kept) {
                    EXPECT_EQ(n_levels, 1);
                }
            }
            if (!is_kept)
                continue;
            EXPECT_LE(kl, max_kl * (1 + 1e-9));
            EXPECT_LE(bytes, before_bytes);
            before_bytes = bytes;
        }
        EXPECT_TRUE(was_kept);
    }
}

TEST_F(ExtentsTest, AnEmptyPlanIsFine)
{
    chunks.clear();
    make();
    EXPECT_EQ(plan.n_extents, 0u);
    EXPECT_TRUE(plan.in_time);
}

} // namespace
