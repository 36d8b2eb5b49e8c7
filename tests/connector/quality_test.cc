// The curve of quality: the built-in one, and those of model.json, of which every number is
// checked.
#include "connector/quality_read.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>

namespace
{

constexpr char PROFILE[] = "a0a1a2a3a4a5a6a7a8a9aaabacadaeaf";

// Reads a model.json; why: the sentence.
cg_status read_quality(const std::string &json, cg_quality *quality, std::string *why = nullptr)
{
    char text[256] = "";
    const cg_sentence error = {text, sizeof text};
    cg_fingerprint profile;
    cg_key key;
    EXPECT_TRUE(cg_key_from_hex(PROFILE, &key));
    memcpy(profile.bytes, key.bytes, sizeof key.bytes);
    const cg_status status = cg_quality_read(quality, json.c_str(), &profile, &error);
    if (why != nullptr)
        *why = text;
    return status;
}

std::string curve(const std::string &kl, const std::string &last, const std::string &beyond,
                  const std::string &profile = PROFILE)
{
    return R"({"version": 1, "quality": {")" + profile + R"(": {"kl": )" + kl + R"(, "last": )" +
           last + R"(, "beyond": )" + beyond + "}}}";
}

const std::string KL = "[0.002, 0.008, 0.05]", LAST = "[[64, 0.4], [512, 0.75], [3072, 1]]";

bool is_built_in(const cg_quality &quality)
{
    return quality.n_points == cg_quality_built_in.n_points &&
           cg_quality_kl(&quality, 100, 1000, CG_L3) ==
               cg_quality_kl(&cg_quality_built_in, 100, 1000, CG_L3);
}

TEST(QualityTest, IsTheCurveThatWasMeasured)
{
    EXPECT_DOUBLE_EQ(cg_quality_sensitivity(&cg_quality_built_in, 0, 3072), 1);
    EXPECT_DOUBLE_EQ(cg_quality_sensitivity(&cg_quality_built_in, 0, 256), 0.65);
    EXPECT_NEAR(cg_quality_sensitivity(&cg_quality_built_in, 256, 256), 0.11, 1e-12);
    EXPECT_NEAR(cg_quality_sensitivity(&cg_quality_built_in, 0, 100) +
                    cg_quality_sensitivity(&cg_quality_built_in, 100, 900),
                cg_quality_sensitivity(&cg_quality_built_in, 0, 1000), 1e-12);
    EXPECT_EQ(cg_quality_kl(&cg_quality_built_in, 0, 3072, CG_L0), 0);
    EXPECT_DOUBLE_EQ(cg_quality_kl(&cg_quality_built_in, 0, 3072, CG_L3), 0.0566);
    for (uint32_t n_behind = 0; n_behind < 100000; n_behind += 256) {
        const double here = cg_quality_kl(&cg_quality_built_in, n_behind, 256, CG_L2);
        EXPECT_GT(here, 0);
        EXPECT_GE(here * 1.001, cg_quality_kl(&cg_quality_built_in, n_behind + 256, 256, CG_L2))
            << n_behind;
        EXPECT_LT(here, cg_quality_kl(&cg_quality_built_in, n_behind, 256, CG_L3));
        EXPECT_GT(here, cg_quality_kl(&cg_quality_built_in, n_behind, 256, CG_L1));
    }
}

TEST(QualityTest, IsReadFromAModelJson)
{
    cg_quality quality;
    ASSERT_EQ(read_quality(curve(KL, LAST, "0.15"), &quality), CG_OK);
    EXPECT_DOUBLE_EQ(cg_quality_kl(&quality, 0, 3072, CG_L1), 0.002);
    EXPECT_DOUBLE_EQ(cg_quality_kl(&quality, 0, 64, CG_L2), 0.008 * 0.4);
    EXPECT_DOUBLE_EQ(cg_quality_kl(&quality, 0, 32, CG_L3), 0.05 * 0.2);
    EXPECT_DOUBLE_EQ(cg_quality_kl(&quality, 512, 2560, CG_L3), 0.05 * 0.25);
    EXPECT_DOUBLE_EQ(cg_quality_sensitivity(&quality, 3072, 3072), 0.15 * std::log(2));
    EXPECT_EQ(cg_quality_kl(&quality, 0, 3072, CG_L0), 0);
}

TEST(QualityTest, ThatOfAnotherProfileIsNotTaken)
{
    std::string why;
    cg_quality quality;
    const std::string other = "00a1a2a3a4a5a6a7a8a9aaabacadaeaf";
    for (const std::string &json :
         {std::string(R"({"version": 1})"), curve(KL, LAST, "0.15", other),
          curve("1", "2", "3", "x"), std::string("no JSON"), std::string("[]"), std::string()}) {
        EXPECT_EQ(read_quality(json, &quality, &why), CG_ERR_NOT_FOUND) << json;
        EXPECT_TRUE(is_built_in(quality));
        EXPECT_EQ(why, "") << "nothing to warn of";
    }
}

TEST(QualityTest, ABadNumberCostsTheCurveAndIsNamed)
{
    const struct {
        const char *names;
        std::string kl, last, beyond;
    } cases[] = {
        {"kl", "null", LAST, "0.1"},
        {"kl", "[0.002, 0.008]", LAST, "0.1"},
        {"kl", "[0.002, 0.008, 0.05, 0.1]", LAST, "0.1"},
        {"kl", "[0.002, 0.008, \"0.05\"]", LAST, "0.1"},
        {"kl", "[0, 0.008, 0.05]", LAST, "0.1"},
        {"kl", "[-0.002, 0.008, 0.05]", LAST, "0.1"},
        {"kl", "[0.002, 0.001, 0.05]", LAST, "0.1"},
        {"kl", "[0.002, 0.008, 1e300]", LAST, "0.1"},
        {"last", KL, "{}", "0.1"},
        {"last", KL, "[]", "0.1"},
        {"last", KL, "[[64], [3072, 1]]", "0.1"},
        {"last", KL, "[64, 1]", "0.1"},
        {"last", KL, "[[0, 0.4], [3072, 1]]", "0.1"},
        {"last", KL, "[[64, 0.4], [64, 0.5], [3072, 1]]", "0.1"},
        {"last", KL, "[[64, 0.4], [512, 0.4], [3072, 1]]", "0.1"},
        {"last", KL, "[[64, 0.4], [512, 0.3], [3072, 1]]", "0.1"},
        {"last", KL, "[[64, 0.4], [3072, 0.9]]", "0.1"},
        {"last", KL, "[[64, 0.4], [3072, 1.1]]", "0.1"},
        {"last", KL, "[[64, 0], [3072, 1]]", "0.1"},
        {"last", KL, "[[64, 0.4], [1e30, 1]]", "0.1"},
        {"last", KL,
         "[[1,0.1],[2,0.2],[3,0.3],[4,0.4],[5,0.41],[6,0.42],[7,0.43],[8,0.44],[9,0.45],"
         "[10,0.46],[11,0.47],[12,0.48],[13,0.49],[14,0.5],[15,0.6],[16,0.7],[17,1]]",
         "0.1"},
        {"beyond", KL, LAST, "0"},
        {"beyond", KL, LAST, "-1"},
        {"beyond", KL, LAST, "2"},
        {"beyond", KL, LAST, "true"},
    };
    for (const auto &c : cases) {
        std::string why;
        cg_quality quality;
        const std::string json = curve(c.kl, c.last, c.beyond);
        EXPECT_EQ(read_quality(json, &quality, &why), CG_ERR_CORRUPT) << json;
        EXPECT_NE(why.find(std::string("\"quality.") + c.names + "\""), std::string::npos) << why;
        EXPECT_TRUE(is_built_in(quality)) << json;
    }
    cg_quality quality;
    EXPECT_EQ(read_quality(R"({"quality": 3})", &quality), CG_ERR_CORRUPT);
    EXPECT_TRUE(is_built_in(quality));
}

// Whatever is done to the text, what is taken predicts finite figures that fall with the level.
TEST(QualityTest, DamagedTextGivesAUsableCurve)
{
    const std::string whole = curve(KL, LAST, "0.15");
    const std::string digits = "0123456789.-e[],\"{}: ";
    std::mt19937_64 random(12);
    uint32_t n_taken = 0;
    for (int round = 0; round < 20000; round++) {
        std::string text = whole;
        for (uint64_t edits = 1 + random() % 3; edits > 0; edits--) {
            const size_t at = text.find("kl") + random() % (text.size() - text.find("kl"));
            if (random() % 3 == 0)
                text.erase(at, 1 + random() % 4);
            else
                text[at] = digits[random() % digits.size()];
            if (text.find("kl") == std::string::npos)
                break;
        }
        cg_quality quality;
        n_taken += read_quality(text, &quality) == CG_OK;
        double before = 0;
        for (uint32_t tokens : {1u, 63u, 64u, 500u, 3072u, 100000u, 1u << 31}) {
            const double sum = cg_quality_sensitivity(&quality, 0, tokens);
            ASSERT_TRUE(std::isfinite(sum) && sum > before) << text;
            before = sum;
            for (unsigned level = CG_L2; level < CG_N_LEVELS; level++)
                ASSERT_GE(cg_quality_kl(&quality, 0, tokens, level),
                          cg_quality_kl(&quality, 0, tokens, level - 1))
                    << text;
        }
    }
    EXPECT_GT(n_taken, 100u); // else nothing was tried
}

} // namespace
