// evict_sim - replays a trace of requests against a store with a quota: fusefs/evict.c, against
// what others do. usage: evict_sim TRACE.jsonl
//
// A request is a timestamp in ms and a list of ids of 512-token blocks (Mooncake's format). What of
// its prefix is in the store is loaded, the rest is computed and published. The model is
// Llama-3.1-8B in bf16 with the bits an element of tests/bench/results/quality.json: an assumption,
// as are prefill at 10,000 tokens a second and a link of 10 Gbit/s. Time to first token is prefill
// of what is missing, and reading of what is there at L2 or, where that is gone, at L3.
//
// Policies: `ours`; `lru`: whole chunks, least recently used first; `lru_l2`: the same of a store
// that never keeps L1; `lru_l3`: nor L2; `belady`: whole chunks, the one that is used last in
// future first, which is the optimum for whole chunks of one size, also without L1; `belady_l3`:
// nor L2. No policy hits more than that one: it knows the future, and its chunks are the smallest.
// `to best` says how far `ours` is from the better of the two that know the future.
#include "fusefs/evict.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace
{

constexpr uint32_t BLOCK_TOKENS = 512;
constexpr double ELEMENTS = 32.0 * 2 * 8 * 128 * BLOCK_TOKENS; // of a block
constexpr uint64_t level_bytes(unsigned level)
{
    constexpr double BITS[CG_N_LEVELS] = {10.67, 1.361, 0.570, 0.165};
    return static_cast<uint64_t>(ELEMENTS * BITS[level] / 8);
}
constexpr double PREFILL_TOKENS_PER_S = 10000, LINK_BYTES_PER_S = 1.25e9;
constexpr double ATTENTION_TOKENS = 32768; // here attention costs a token as much as all else

struct Request {
    int64_t ms;
    std::vector<uint32_t> blocks;
};

std::vector<Request> read_trace(const char *path)
{
    std::ifstream in(path);
    std::vector<Request> requests;
    for (std::string line; std::getline(in, line);) {
        const size_t time = line.find("\"timestamp\":"), ids = line.find("\"hash_ids\": [");
        if (time == std::string::npos || ids == std::string::npos)
            throw std::runtime_error(std::string(path) + ": not a trace of requests");
        Request request = {std::strtoll(line.c_str() + time + 12, nullptr, 10), {}};
        for (const char *at = line.c_str() + ids + 13; *at != ']' && *at != '\0';) {
            char *end;
            request.blocks.push_back(static_cast<uint32_t>(std::strtoul(at, &end, 10)));
            at = *end == ',' ? end + 1 : end;
        }
        requests.push_back(request);
    }
    if (requests.empty())
        throw std::runtime_error(std::string(path) + ": no requests can be read");
    return requests;
}

// What happens to a store, in numbers.
struct Sum {
    uint64_t hit_tokens = 0, tokens = 0, coarse_tokens = 0;
    double ttft_s = 0;
};

double prefill_s(uint32_t first, uint32_t end)
{
    double s = 0;
    for (uint32_t i = first; i < end; i++)
        s += BLOCK_TOKENS * (1 + i * BLOCK_TOKENS / ATTENTION_TOKENS) / PREFILL_TOKENS_PER_S;
    return s;
}

class Store
{
  public:
    explicit Store(uint64_t quota_bytes) : quota_(quota_bytes)
    {
    }
    virtual ~Store() = default;
    void request(const Request &r, Sum *sum)
    {
        now_ms_ = r.ms;
        uint32_t n_hit = 0;
        while (n_hit < r.blocks.size() && finest(r.blocks[n_hit]) < CG_N_LEVELS)
            n_hit++;
        for (uint32_t i = 0; i < n_hit; i++) {
            const unsigned level = std::max<unsigned>(finest(r.blocks[i]), CG_L2);
            sum->ttft_s += static_cast<double>(level_bytes(level)) / LINK_BYTES_PER_S;
            sum->coarse_tokens += level > CG_L2 ? BLOCK_TOKENS : 0;
        }
        const uint32_t n = static_cast<uint32_t>(r.blocks.size());
        sum->hit_tokens += static_cast<uint64_t>(n_hit) * BLOCK_TOKENS;
        sum->tokens += static_cast<uint64_t>(n) * BLOCK_TOKENS;
        sum->ttft_s += prefill_s(n_hit, n);
        for (uint32_t i = 0; i < n; i++)
            use(r.blocks[i], i, i > 0 ? r.blocks[i - 1] : UINT32_MAX);
        if (used_ > quota_ / 100 * 95)
            make_room(used_ - quota_ / 100 * 90);
    }

  protected:
    virtual unsigned finest(uint32_t block) const = 0; // CG_N_LEVELS: it is not there
    virtual void use(uint32_t block, uint32_t index, uint32_t before) = 0;
    virtual void make_room(uint64_t bytes) = 0;
    const uint64_t quota_;
    uint64_t used_ = 0;
    int64_t now_ms_ = 0;
};

class Ours : public Store
{
  public:
    using Store::Store;

  private:
    unsigned finest(uint32_t block) const override
    {
        const auto at = files_.find(block);
        return at == files_.end() ? unsigned{CG_N_LEVELS} : at->second.finest;
    }
    void use(uint32_t block, uint32_t index, uint32_t before) override
    {
        cg_object_file file = {};
        file.used_at_s = now_ms_ / 1000;
        const auto at = files_.find(block);
        if (at != files_.end()) { // it stays at the levels that it has
            at->second.used_at_s = file.used_at_s;
            return;
        }
        file.modified_ns = file.used_at_s * 1'000'000'000;
        memcpy(file.key.bytes, &block, sizeof block);
        memcpy(file.parent.bytes, &before, sizeof before);
        file.first_position = index * BLOCK_TOKENS;
        file.n_tokens = BLOCK_TOKENS;
        file.levels = 2 | 4 | 8;
        file.finest = CG_L1;
        file.used_bytes = level_bytes(CG_L1);
        for (unsigned level = CG_L1; level <= CG_L3; level++)
            file.level_bytes[level] = level_bytes(level);
        files_[block] = file;
        used_ += file.used_bytes;
    }
    void make_room(uint64_t bytes) override
    {
        std::vector<cg_object_file> files;
        std::vector<uint32_t> blocks;
        for (const auto &[block, file] : files_) {
            files.push_back(file);
            blocks.push_back(block);
        }
        cg_survey survey = {};
        survey.files = files.data();
        survey.n_files = files.size();
        cg_eviction *steps;
        size_t n_steps;
        const cg_evict_policy policy = {now_ms_ / 1000, bytes, CG_EVICT_ALL_MODELS, {}, false};
        if (cg_evict_choose(&survey, &policy, &steps, &n_steps) != CG_OK)
            throw std::bad_alloc();
        for (size_t i = 0; i < n_steps; i++) {
            cg_object_file &file = files_[blocks[steps[i].file]];
            used_ -= file.used_bytes;
            if (steps[i].finest_left == CG_N_LEVELS) {
                files_.erase(blocks[steps[i].file]);
                continue;
            }
            file.finest = steps[i].finest_left;
            file.levels &= static_cast<uint8_t>(~0u << file.finest);
            file.used_bytes = file.level_bytes[file.finest];
            used_ += file.used_bytes;
        }
        free(steps);
    }
    std::map<uint32_t, cg_object_file> files_;
};

// Whole chunks, in the order of a number that a policy gives them.
class WholeChunks : public Store
{
  public:
    WholeChunks(uint64_t quota_bytes, unsigned level) : Store(quota_bytes), level_(level)
    {
    }

  protected:
    // The smallest goes first.
    virtual int64_t rank(uint32_t block, uint32_t index) = 0;

  private:
    unsigned finest(uint32_t block) const override
    {
        return ranks_.count(block) > 0 ? level_ : static_cast<unsigned>(CG_N_LEVELS);
    }
    void use(uint32_t block, uint32_t index, uint32_t) override
    {
        const auto known = ranks_.find(block);
        if (known != ranks_.end())
            order_.erase({known->second, block});
        else
            used_ += level_bytes(level_);
        ranks_[block] = rank(block, index);
        order_.insert({ranks_[block], block});
    }
    void make_room(uint64_t bytes) override
    {
        for (const uint64_t until = used_ - bytes; used_ > until && !order_.empty();
             used_ -= level_bytes(level_)) {
            ranks_.erase(order_.begin()->second);
            order_.erase(order_.begin());
        }
    }
    const unsigned level_;
    std::map<uint32_t, int64_t> ranks_;
    std::set<std::pair<int64_t, uint32_t>> order_;
};

class Lru : public WholeChunks
{
  public:
    using WholeChunks::WholeChunks;

  private:
    int64_t rank(uint32_t, uint32_t index) override // of one request the last chunk first
    {
        return now_ms_ * 4096 - index;
    }
};

class Belady : public WholeChunks
{
  public:
    Belady(uint64_t quota_bytes, unsigned level, const std::vector<Request> &requests)
        : WholeChunks(quota_bytes, level)
    {
        for (size_t i = 0; i < requests.size(); i++)
            for (uint32_t block : requests[i].blocks)
                uses_[block].push_back(static_cast<int64_t>(i));
    }

  private:
    int64_t rank(uint32_t block, uint32_t index) override
    {
        std::vector<int64_t> &uses = uses_[block];
        size_t &next = next_[block];
        next++;
        return next < uses.size() ? -(uses[next] * 4096 + index) : INT64_MIN + index;
    }
    std::map<uint32_t, std::vector<int64_t>> uses_;
    std::map<uint32_t, size_t> next_;
};

struct Result {
    double hit_percent, ttft_s;
};

Result replay(const char *name, double share, Store &&store, const std::vector<Request> &requests)
{
    Sum sum;
    for (const Request &request : requests)
        store.request(request, &sum);
    const Result result = {100.0 * static_cast<double>(sum.hit_tokens) /
                               static_cast<double>(sum.tokens),
                           sum.ttft_s / static_cast<double>(requests.size())};
    printf("%-9s %5.0f %% %9.1f %% %9.1f %% %9.3f\n", name, 100 * share, result.hit_percent,
           100.0 * static_cast<double>(sum.coarse_tokens) /
               static_cast<double>(std::max<uint64_t>(sum.hit_tokens, 1)),
           result.ttft_s);
    return result;
}

} // namespace

int main(int argc, char **argv)
try {
    if (argc != 2) {
        fprintf(stderr, "usage: evict_sim TRACE.jsonl\n");
        return 2;
    }
    const std::vector<Request> requests = read_trace(argv[1]);
    std::set<uint32_t> blocks;
    for (const Request &request : requests)
        blocks.insert(request.blocks.begin(), request.blocks.end());
    const double all_bytes = static_cast<double>(blocks.size() * level_bytes(CG_L1));
    printf("%s: %zu requests, %zu blocks, %.0f GB at L1, %.0f minutes\n"
           "policy    quota / all  hit tokens   of them L3   mean TTFT s\n",
           argv[1], requests.size(), blocks.size(), all_bytes / 1e9,
           static_cast<double>(requests.back().ms) / 60000);
    for (double share : {0.02, 0.05, 0.1, 0.2, 0.4}) {
        const uint64_t quota = static_cast<uint64_t>(share * all_bytes);
        const Result ours = replay("ours", share, Ours(quota), requests);
        replay("lru", share, Lru(quota, CG_L1), requests);
        replay("lru_l2", share, Lru(quota, CG_L2), requests);
        replay("lru_l3", share, Lru(quota, CG_L3), requests);
        const Result l2 = replay("belady", share, Belady(quota, CG_L2, requests), requests),
                     l3 = replay("belady_l3", share, Belady(quota, CG_L3, requests), requests);
        printf("%-9s %5.0f %% %+9.1f   %+21.3f\n", "to best", 100 * share,
               ours.hit_percent - std::max(l2.hit_percent, l3.hit_percent),
               ours.ttft_s - std::min(l2.ttft_s, l3.ttft_s));
    }
    return 0;
} catch (const std::exception &error) {
    fprintf(stderr, "evict_sim: %s\n", error.what());
    return 2;
}
