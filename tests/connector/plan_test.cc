#include "connector/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

namespace
{

class PlanTest : public testing::Test
{
  protected:
    void SetUp() override
    {
        for (uint32_t i = 0; i < 40; i++)
            tokens.push_back(1000 + i);
        chunks.resize(3);
        for (uint32_t i = 0; i < 3; i++) {
            chunks[i].sizes = {i < 2 ? 16u : 8u, {0, 400, 200, 100}};
            chunks[i].level = 1 + i % 3;
            chunks[i].is_guessed = i == 1;
        }
        plan.model.bytes[0] = 1;
        plan.profile.bytes[0] = 2;
        plan.dtype = CG_DTYPE_BF16;
        plan.worst_level = CG_L3;
        plan.level_plus_1 = 0;
        plan.policy = CG_POLICY_MIN_DELAY;
        plan.chunk_tokens = 16;
        plan.first_position = 32;
        plan.n_tokens = 40;
        plan.hit_tokens = 70;
        plan.prompt_tokens = 90;
        plan.started_boot_ns = 123456789012345;
        plan.budget_ns = 2000000000;
        plan.parent.bytes[3] = 4;
        plan.extra.bytes[5] = 6;
        plan.clock_id.bytes[7] = 8;
        plan.n_chunks = 3;
    }
    std::vector<uint8_t> written()
    {
        plan.chunks = chunks.data();
        plan.tokens = tokens.data();
        std::vector<uint8_t> bytes(cg_plan_bytes(&plan));
        cg_plan_write(&plan, bytes.data());
        return bytes;
    }
    // Parses from memory of exactly that size, so that ASan sees over-reads.
    static cg_status parse(const std::vector<uint8_t> &bytes)
    {
        uint8_t *copy = static_cast<uint8_t *>(malloc(bytes.size() + 1));
        std::copy(bytes.begin(), bytes.end(), copy + 1); // at an odd address
        cg_plan *parsed = nullptr;
        const cg_status status = cg_plan_parse(copy + 1, bytes.size(), &parsed);
        EXPECT_EQ(parsed != nullptr, status == CG_OK);
        cg_plan_free(parsed);
        free(copy);
        return status;
    }
    static void seal(std::vector<uint8_t> *bytes)
    {
        const cg_key check = cg_key_of_bytes(bytes->data(), bytes->size() - 16);
        memcpy(bytes->data() + bytes->size() - 16, check.bytes, 16);
    }
    cg_plan plan = {};
    std::vector<cg_plan_chunk> chunks;
    std::vector<uint32_t> tokens;
};

TEST_F(PlanTest, ComesBackAsItWasWritten)
{
    const std::vector<uint8_t> bytes = written();
    cg_plan *back;
    ASSERT_EQ(cg_plan_parse(bytes.data(), bytes.size(), &back), CG_OK);
    EXPECT_EQ(memcmp(&back->model, &plan.model, 16), 0);
    EXPECT_EQ(memcmp(&back->profile, &plan.profile, 16), 0);
    EXPECT_EQ(back->dtype, plan.dtype);
    EXPECT_EQ(back->worst_level, plan.worst_level);
    EXPECT_EQ(back->policy, plan.policy);
    EXPECT_EQ(back->chunk_tokens, 16u);
    EXPECT_EQ(back->first_position, 32u);
    EXPECT_EQ(back->hit_tokens, 70u);
    EXPECT_EQ(back->prompt_tokens, 90u);
    EXPECT_EQ(back->started_boot_ns, plan.started_boot_ns);
    EXPECT_EQ(back->budget_ns, plan.budget_ns);
    EXPECT_TRUE(cg_key_equal(&back->clock_id, &plan.clock_id));
    ASSERT_EQ(back->n_chunks, 3u);
    EXPECT_EQ(std::vector<uint32_t>(back->tokens, back->tokens + 40), tokens);
    cg_key parent = plan.parent;
    for (uint32_t i = 0; i < 3; i++) {
        EXPECT_EQ(back->chunks[i].first_token, 32 + 16 * i);
        EXPECT_EQ(back->chunks[i].level, chunks[i].level);
        EXPECT_EQ(back->chunks[i].is_guessed, chunks[i].is_guessed);
        EXPECT_EQ(back->chunks[i].sizes.n_tokens, chunks[i].sizes.n_tokens);
        for (int level = 0; level < CG_N_LEVELS; level++)
            EXPECT_EQ(back->chunks[i].sizes.bytes[level], chunks[i].sizes.bytes[level]);
        const cg_key key =
            cg_key_chunk(&parent, &plan.extra, &tokens[16 * i], chunks[i].sizes.n_tokens);
        EXPECT_TRUE(cg_key_equal(&back->keys[i], &parent));
        EXPECT_TRUE(cg_key_equal(&back->keys[i + 1], &key));
        parent = key;
    }
    cg_plan_free(back);
}

TEST_F(PlanTest, APlanOfNothingIsAPlan)
{
    plan.n_chunks = plan.n_tokens = plan.hit_tokens = 0;
    EXPECT_EQ(parse(written()), CG_OK);
}

TEST_F(PlanTest, RefusesEveryTruncation)
{
    const std::vector<uint8_t> good = written();
    for (size_t n = 0; n < good.size(); n++)
        EXPECT_EQ(parse({good.begin(), good.begin() + static_cast<long>(n)}), CG_ERR_TRUNCATED)
            << n;
    std::vector<uint8_t> longer = good;
    longer.push_back(0);
    EXPECT_EQ(parse(longer), CG_ERR_CORRUPT);
}

TEST_F(PlanTest, RefusesEveryFlippedBit)
{
    const std::vector<uint8_t> good = written();
    for (size_t bit = 0; bit < 8 * good.size(); bit++) {
        std::vector<uint8_t> bad = good;
        bad[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
        EXPECT_NE(parse(bad), CG_OK) << "bit " << bit;
    }
}

TEST_F(PlanTest, RefusesWhatItsChecksumWouldLetThrough)
{
    const size_t chunk_at = 140;
    const struct {
        const char *what;
        size_t at, n;
        uint64_t value;
        cg_status want;
    } cases[] = {
        {"magic", 0, 1, 'X', CG_ERR_BAD_MAGIC},
        {"an older version", 8, 4, 1, CG_ERR_UNSUPPORTED_VERSION},
        {"a newer version", 8, 4, 5, CG_ERR_UNSUPPORTED_VERSION},
        {"dtype", 48, 1, 0, CG_ERR_CORRUPT},
        {"worst level", 49, 1, 4, CG_ERR_CORRUPT},
        {"fixed level", 50, 1, 5, CG_ERR_CORRUPT},
        {"policy", 51, 1, CG_N_POLICIES, CG_ERR_CORRUPT},
        {"no chunk size", 52, 4, 0, CG_ERR_CORRUPT},
        {"chunk size", 52, 4, 1 << 20, CG_ERR_CORRUPT},
        {"first position between chunks", 56, 4, 33, CG_ERR_CORRUPT},
        {"first position at the end of numbers", 56, 4, 0xfffffff0, CG_ERR_CORRUPT},
        {"more tokens than bytes", 60, 4, 0xffffffff, CG_ERR_CORRUPT},
        {"hit beyond the tokens", 64, 4, 73, CG_ERR_CORRUPT},
        {"a prompt of less than is loaded", 68, 4, 71, CG_ERR_CORRUPT},
        {"more chunks than bytes", 72, 4, 0xffffffff, CG_ERR_CORRUPT},
        {"empty chunk", chunk_at, 4, 0, CG_ERR_CORRUPT},
        {"short chunk in the middle", chunk_at, 4, 8, CG_ERR_CORRUPT},
        {"long chunk", chunk_at, 4, 17, CG_ERR_CORRUPT},
        {"level", chunk_at + 4, 4, 4, CG_ERR_CORRUPT},
        {"level that is not there", chunk_at + 4, 4, 0, CG_ERR_CORRUPT},
        {"no zero behind the level", chunk_at + 5, 1, 2, CG_ERR_CORRUPT},
        {"huge level", chunk_at + 16, 8, UINT64_C(1) << 41, CG_ERR_CORRUPT},
    };
    for (const auto &c : cases) {
        std::vector<uint8_t> bad = written();
        for (size_t i = 0; i < c.n; i++)
            bad[c.at + i] = static_cast<uint8_t>(c.value >> (8 * i));
        seal(&bad);
        EXPECT_EQ(parse(bad), c.want) << c.what;
    }
}

// Seeds of an older version would all be refused by their first bytes.
TEST_F(PlanTest, AFuzzerStartsFromPlansOfThisVersion)
{
    for (const char *name : {"empty", "one_full", "two_chunks_and_tail"}) {
        std::ifstream file(std::string(CG_PLAN_SEEDS "/") + name, std::ios::binary);
        std::vector<uint8_t> bytes((std::istreambuf_iterator<char>(file)), {});
        ASSERT_GE(bytes.size(), 16u) << name;
        seal(&bytes); // as the fuzzer does
        EXPECT_EQ(parse(bytes), CG_OK) << name;
    }
}

TEST_F(PlanTest, NoiseIsSafe)
{
    std::mt19937 random(11);
    for (int round = 0; round < 3000; round++) {
        SCOPED_TRACE(round);
        std::vector<uint8_t> bytes = written();
        for (int i = 0; i < 3; i++)
            bytes[16 + random() % (bytes.size() - 32)] = static_cast<uint8_t>(random());
        seal(&bytes);
        parse(bytes); // whatever it says, it neither crashes nor leaks
    }
}

} // namespace
