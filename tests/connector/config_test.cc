#include "connector/config.h"

#include <gtest/gtest.h>

#include <string>

namespace
{

struct Parsed {
    cg_status status;
    cg_config *config = nullptr;
    char error[256] = "";
    explicit Parsed(const std::string &json)
    {
        const cg_sentence sentence = {error, sizeof error};
        status = cg_config_parse(json.data(), json.size(), &config, &sentence);
    }
    ~Parsed()
    {
        cg_config_free(config);
    }
};

std::string with(const std::string &more)
{
    return "{\"root\": \"/r\", \"model\": \"m\", " + more + "}";
}

TEST(ConfigTest, TwoKeysAreEnoughAndTheRestHasDefaults)
{
    const Parsed p("{\"root\": \"/r\", \"model\": \"m\"}");
    ASSERT_EQ(p.status, CG_OK) << p.error;
    const cg_config &c = *p.config;
    EXPECT_STREQ(c.root, "/r");
    EXPECT_STREQ(c.model, "m");
    EXPECT_EQ(c.chunk_tokens, 256u);
    EXPECT_EQ(c.tail_multiple, 32u);
    EXPECT_EQ(c.store_levels, 0xeu);
    EXPECT_EQ(c.streams, static_cast<uint32_t>(CG_STREAMS_BYTES));
    EXPECT_EQ(c.level_plus_1, 0u);
    EXPECT_EQ(c.worst_level, 3u);
    EXPECT_EQ(c.policy, static_cast<uint32_t>(CG_POLICY_TTFT_BUDGET));
    EXPECT_EQ(c.ttft_budget_ms, 2000u);
    EXPECT_EQ(c.prior_mbps, 0);
    EXPECT_EQ(c.estimator, static_cast<uint32_t>(CG_ESTIMATOR_HARMONIC));
    EXPECT_EQ(c.recompute_tokens_per_s, 0);
    EXPECT_EQ(c.recompute_doubling_tokens, 0);
    EXPECT_EQ(c.threads, 0u);
    EXPECT_EQ(c.encode_nice, 19u);
    EXPECT_EQ(c.n_cpus, 0u);
    EXPECT_EQ(c.io_backend, static_cast<uint32_t>(CG_IO_AUTO));
    EXPECT_EQ(c.io_cache, static_cast<uint32_t>(CG_IO_CACHED));
    EXPECT_EQ(c.queue_depth, 16u);
    EXPECT_EQ(c.read_timeout_ms, 10000u);
    EXPECT_EQ(c.lookup_timeout_ms, 2000u);
    EXPECT_EQ(c.staging_mib, 1024u);
    EXPECT_EQ(c.gpu_library, nullptr);
    EXPECT_EQ(c.trace_dir, nullptr);
    EXPECT_EQ(c.gpu_slots, 0u);
    EXPECT_EQ(c.gpu_staging_mib, 512u);
    EXPECT_EQ(c.negative_ttl_ms, 1000u);
    EXPECT_EQ(c.positive_ttl_ms, 10000u);
    EXPECT_EQ(c.retry_ms, 30000u);
    EXPECT_EQ(c.max_abandoned_reads, 64u);
    EXPECT_FALSE(c.read_only);
    EXPECT_FALSE(c.has_geometry);
}

TEST(ConfigTest, PoliciesAreThoseOfTheController)
{
    const struct {
        const char *name;
        cg_policy want;
    } cases[] = {{"ttft_budget", CG_POLICY_TTFT_BUDGET},
                 {"min_delay", CG_POLICY_MIN_DELAY},
                 {"fixed", CG_POLICY_FIXED},
                 {"paper", CG_POLICY_PAPER}};
    static_assert(sizeof cases / sizeof cases[0] == CG_N_POLICIES, "a policy has no name");
    for (const auto &c : cases) {
        const Parsed p(with(std::string("\"policy\": \"") + c.name + "\""));
        ASSERT_EQ(p.status, CG_OK) << p.error;
        EXPECT_EQ(p.config->policy, static_cast<uint32_t>(c.want));
    }
}

TEST(ConfigTest, TakesEveryKey)
{
    const Parsed p(with(
        "\"chunk_tokens\": 1536, \"tail_multiple\": 16, \"store_levels\": [\"L0\", \"L2\"],"
        "\"streams\": \"latency\","
        "\"level\": \"L1\", \"worst_level\": \"L2\", \"policy\": \"min_delay\","
        "\"ttft_budget_ms\": 500, \"prior_mbps\": 100.5, \"estimator\": \"last\","
        "\"recompute_tokens_per_s\": 1000, \"recompute_doubling_tokens\": 9000,"
        "\"threads\": 4, \"cpu_affinity\": [1, 3],"
        "\"io_backend\": \"threads\", \"io_cache\": \"direct\", \"queue_depth\": 8,"
        "\"read_timeout_ms\": 1, \"lookup_timeout_ms\": 2, \"staging_mib\": 3,"
        "\"negative_ttl_ms\": 4, \"positive_ttl_ms\": 5, \"retry_ms\": 6,"
        "\"max_abandoned_reads\": 7, \"read_only\": true,"
        "\"gpu_library\": \"/x.so\", \"gpu_slots\": 7, \"gpu_staging_mib\": 9,"
        "\"trace_dir\": \"/t\","
        "\"geometry\": {\"n_layers\": 30, \"n_kv_heads\": 3, \"head_dim\": 64, \"dtype\": \"fp32\","
        "\"model_fingerprint\": \"00112233445566778899aabbccddeeff\"}"));
    ASSERT_EQ(p.status, CG_OK) << p.error;
    const cg_config &c = *p.config;
    EXPECT_EQ(c.chunk_tokens, 1536u);
    EXPECT_EQ(c.tail_multiple, 16u);
    EXPECT_EQ(c.store_levels, 5u);
    EXPECT_EQ(c.streams, static_cast<uint32_t>(CG_STREAMS_LATENCY));
    EXPECT_EQ(c.level_plus_1, 2u);
    EXPECT_EQ(c.worst_level, 2u);
    EXPECT_EQ(c.policy, static_cast<uint32_t>(CG_POLICY_MIN_DELAY));
    EXPECT_EQ(c.prior_mbps, 100.5);
    EXPECT_EQ(c.estimator, static_cast<uint32_t>(CG_ESTIMATOR_LAST));
    EXPECT_EQ(c.recompute_doubling_tokens, 9000);
    ASSERT_EQ(c.n_cpus, 2u);
    EXPECT_EQ(c.cpus[1], 3u);
    EXPECT_EQ(c.io_backend, static_cast<uint32_t>(CG_IO_THREADS));
    EXPECT_EQ(c.io_cache, static_cast<uint32_t>(CG_IO_DIRECT));
    EXPECT_EQ(c.max_abandoned_reads, 7u);
    EXPECT_STREQ(c.gpu_library, "/x.so");
    EXPECT_EQ(c.gpu_slots, 7u);
    EXPECT_EQ(c.gpu_staging_mib, 9u);
    EXPECT_STREQ(c.trace_dir, "/t");
    EXPECT_TRUE(c.read_only);
    EXPECT_EQ(c.geometry.n_layers, 30u);
    EXPECT_EQ(c.geometry.dtype, static_cast<uint32_t>(CG_DTYPE_FP32));
    EXPECT_EQ(c.geometry.model_fingerprint.bytes[15], 0xff);
}

TEST(ConfigTest, EveryErrorNamesItsKey)
{
    const struct {
        const char *json, *named;
    } cases[] = {
        {"", "no JSON"},
        {"[]", "object"},
        {"{\"root\": \"/r\"", "no JSON"},
        {"{\"model\": \"m\"}", "\"root\""},
        {"{\"root\": \"/r\"}", "\"model\""},
        {"{\"root\": \"\", \"model\": \"m\"}", "\"root\""},
        {"{\"root\": 1, \"model\": \"m\"}", "\"root\""},
        {"{\"root\": \"/r\", \"root\": \"/s\", \"model\": \"m\"}", "no JSON"},
        {"{\"root\": \"/r\", \"model\": \"../m\"}", "\"model\""},
        {"{\"root\": \"/r\", \"model\": \"a/b\"}", "\"model\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"rooot\": 1}", "\"rooot\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"chunk_tokens\": \"256\"}", "\"chunk_tokens\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"chunk_tokens\": 0}", "\"chunk_tokens\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"chunk_tokens\": 256.5}", "\"chunk_tokens\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"chunk_tokens\": 65537}", "\"chunk_tokens\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"tail_multiple\": 33}", "\"tail_multiple\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"store_levels\": []}", "\"store_levels\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"streams\": \"many\"}", "\"streams\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"store_levels\": \"L1\"}", "\"store_levels\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"store_levels\": [\"L4\"]}", "\"store_levels\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"level\": \"L4\"}", "\"level\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"level\": 2}", "\"level\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"level\": \"L3\", \"worst_level\": \"L1\"}",
         "\"worst_level\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"worst_level\": \"auto\"}", "\"worst_level\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"policy\": \"fast\"}", "\"policy\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"prior_mbps\": -1}", "\"prior_mbps\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"prior_mbps\": \"1\"}", "\"prior_mbps\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"threads\": 1025}", "\"threads\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"encode_nice\": 20}", "\"encode_nice\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"cpu_affinity\": 1}", "\"cpu_affinity\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"cpu_affinity\": [-1]}", "\"cpu_affinity\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"cpu_affinity\": [1024]}", "\"cpu_affinity\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"io_backend\": \"aio\"}", "\"io_backend\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"read_only\": 1}", "\"read_only\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"geometry\": []}", "\"geometry\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"geometry\": {\"layers\": 1}}",
         "\"geometry.layers\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"geometry\": {\"n_layers\": 0}}",
         "\"geometry.n_layers\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"geometry\": {\"dtype\": \"float32\"}}",
         "\"geometry.dtype\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"geometry\": {\"k_scales\": 1}}",
         "\"geometry.k_scales\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"geometry\": {\"v_scales\": []}}",
         "\"geometry.v_scales\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"geometry\": {\"v_scales\": [1, \"1\"]}}",
         "\"geometry.v_scales\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"geometry\": {\"v_scales\": [1, -1, 1]}}",
         "\"geometry.v_scales\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"geometry\": {\"k_scales\": [1e-300]}}",
         "\"geometry.k_scales\""},
        {"{\"root\": \"/r\", \"model\": \"m\", \"geometry\": {\"model_fingerprint\": \"00\"}}",
         "\"geometry.model_fingerprint\""},
    };
    for (const auto &c : cases) {
        const Parsed p(c.json);
        EXPECT_EQ(p.status, CG_ERR_INVALID_ARGUMENT) << c.json;
        EXPECT_EQ(p.config, nullptr);
        EXPECT_NE(std::string(p.error).find(c.named), std::string::npos)
            << c.json << ": " << p.error;
    }
}

TEST(ConfigTest, AnErrorNeedsNoRoomForItsSentence)
{
    cg_config *config;
    const cg_sentence none = {nullptr, 0};
    EXPECT_EQ(cg_config_parse("{}", 2, &config, &none), CG_ERR_INVALID_ARGUMENT);
    char one;
    const cg_sentence empty = {&one, 1};
    EXPECT_EQ(cg_config_parse("{}", 2, &config, &empty), CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(one, '\0');
}

} // namespace
