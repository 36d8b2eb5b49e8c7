// tests/sim/streaming.cc - how loads of a policy meet their budgets on links that were measured.
//
// usage: streaming TRACES_DIR OUT.json [ROUNDS]
// TRACES_DIR holds files of time_s,bandwidth_mbps. Prints a table; OUT.json has a row for each
// model, trace, scale, budget and policy, and sums over the traces ("all") for requests with a
// prior and for many at once. Deterministic.
#include "tests/sim/sim.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <stdexcept>

using namespace cg_sim;

namespace
{

constexpr double ROUND_TRIP_S = 0.01;
constexpr uint32_t N_STARTS = 3;

struct Policy {
    const char *name;
    cg_policy policy;
    int level;
};
const Policy POLICIES[] = {
    {"ttft_budget", CG_POLICY_TTFT_BUDGET, -1},
    {"min_delay", CG_POLICY_MIN_DELAY, -1},
    {"paper", CG_POLICY_PAPER, -1},
    {"L1", CG_POLICY_FIXED, 1},
    {"L2", CG_POLICY_FIXED, 2},
    {"L3", CG_POLICY_FIXED, 3},
    {"raw", CG_POLICY_FIXED, CG_N_LEVELS},
};

struct Row {
    uint32_t n = 0, n_could = 0, n_over = 0, n_over_could = 0, n_in = 0;
    double ttft_s = 0, kl = 0, kl_in = 0, bytes = 0;
    std::vector<double> ttfts;

    // A round of requests, of which so many could be in budget.
    void add(const Outcome *outcomes, uint32_t n_outcomes, double budget_s, uint32_t n_could_be)
    {
        uint32_t n_met = 0;
        for (uint32_t i = 0; i < n_outcomes; i++) {
            const Outcome &o = outcomes[i];
            const bool met = o.ttft_s <= budget_s * (1 + 1e-6);
            n_met += met;
            ttft_s += o.ttft_s;
            kl += o.kl;
            kl_in += met ? o.kl : 0;
            bytes += o.bytes;
            ttfts.push_back(o.ttft_s);
        }
        n += n_outcomes;
        n_could += n_could_be;
        n_over += n_outcomes - n_met;
        n_over_could += n_could_be > n_met ? n_could_be - n_met : 0;
        n_in += n_met;
    }
    void add(const Row &other)
    {
        n += other.n;
        n_could += other.n_could;
        n_over += other.n_over;
        n_over_could += other.n_over_could;
        n_in += other.n_in;
        ttft_s += other.ttft_s;
        kl += other.kl;
        kl_in += other.kl_in;
        bytes += other.bytes;
        ttfts.insert(ttfts.end(), other.ttfts.begin(), other.ttfts.end());
    }
    double p99_s() const
    {
        std::vector<double> sorted = ttfts;
        std::sort(sorted.begin(), sorted.end());
        return sorted[std::min(sorted.size() - 1, sorted.size() * 99 / 100)];
    }
    double over_share() const
    {
        return n_could > 0 ? static_cast<double>(n_over_could) / n_could : 0;
    }
};

class Report
{
  public:
    Report(const std::string &path) : file_(fopen(path.c_str(), "w"))
    {
        if (file_ == nullptr)
            throw std::runtime_error("cannot write " + path);
        fprintf(file_, "{\n \"rows\": [");
    }
    ~Report()
    {
        fclose(file_);
    }
    Report(const Report &) = delete;
    Report &operator=(const Report &) = delete;
    // Rows of all requests that come alone to an unknown link; of the others, sums over the traces.
    void add(const std::string &model, const std::string &trace, double scale, double budget_s,
             uint32_t n_at_once, double prior_factor, const std::string &policy, const Row &row)
    {
        sums_[{model, scale, n_at_once, prior_factor, policy}].add(row);
        if (n_at_once == 1 && prior_factor == 0)
            print(model, trace, scale, budget_s, n_at_once, prior_factor, policy, row);
        else
            over_traces_[{model, scale, budget_s, n_at_once, prior_factor, policy}].add(row);
    }
    void finish()
    {
        for (const auto &[key, row] : over_traces_) {
            const auto &[model, scale, budget_s, n_at_once, prior, policy] = key;
            print(model, "all", scale, budget_s, n_at_once, prior, policy, row);
        }
        fprintf(file_, "\n ]\n}\n");
        printf(
            "| model | scale | at once | prior | policy | requests | could | over budget | of all "
            "| TTFT mean s | p99 s | KL in budget | MB |\n|---|---|---|---|---|---|---|---|---|---|"
            "---|---|---|\n");
        for (const auto &[key, row] : sums_) {
            const auto &[model, scale, n_at_once, prior, policy] = key;
            printf("| %s | x%g | %u | %g | %s | %u | %u | %.1f %% | %.1f %% | %.3f | %.2f | %.5f | "
                   "%.2f |\n",
                   model.c_str(), scale, n_at_once, prior, policy.c_str(), row.n, row.n_could,
                   100 * row.over_share(), 100.0 * row.n_over / row.n, row.ttft_s / row.n,
                   row.p99_s(), row.n_in > 0 ? row.kl_in / row.n_in : 0, row.bytes / row.n / 1e6);
        }
    }

  private:
    void print(const std::string &model, const std::string &trace, double scale, double budget_s,
               uint32_t n_at_once, double prior_factor, const std::string &policy, const Row &row)
    {
        fprintf(file_,
                "%s\n  {\"model\": \"%s\", \"trace\": \"%s\", \"scale\": %g, \"budget_s\": %g, ",
                first_ ? "" : ",", model.c_str(), trace.c_str(), scale, budget_s);
        if (n_at_once != 1 || prior_factor > 0)
            fprintf(file_, "\"at_once\": %u, \"prior_factor\": %g, ", n_at_once, prior_factor);
        fprintf(file_,
                "\"policy\": \"%s\", \"requests\": %u, \"could\": %u, \"over_budget\": %.4g, "
                "\"over_budget_of_all\": %.4g, \"ttft_mean_s\": %.4g, \"ttft_p99_s\": %.4g, "
                "\"mean_kl\": %.3g, \"mean_kl_in_budget\": %.3g, \"bytes\": %.0f}",
                policy.c_str(), row.n, row.n_could, row.over_share(),
                static_cast<double>(row.n_over) / row.n, row.ttft_s / row.n, row.p99_s(),
                row.kl / row.n, row.n_in > 0 ? row.kl_in / row.n_in : 0, row.bytes / row.n);
        first_ = false;
    }
    std::map<std::tuple<std::string, double, double, uint32_t, double, std::string>, Row>
        over_traces_;
    FILE *file_;
    bool first_ = true;
    std::map<std::tuple<std::string, double, uint32_t, double, std::string>, Row> sums_;
};

// How many of n requests that come at once could have met their budget at all: by recomputing (each
// as if it were alone), or by loading as many as the link can, one after the other, at L3.
uint32_t n_could(const Model &model, const Trace &trace, double at_s, double budget_s, uint32_t n)
{
    if (oracle(model, trace, at_s, budget_s, ROUND_TRIP_S, false).ttft_s > budget_s * (1 + 1e-6))
        return 0;
    if (n == 1 || recompute_s(model) <= budget_s)
        return n;
    const double bits = trace.bits_between(at_s + ROUND_TRIP_S, at_s + budget_s);
    const double each = 8.0 * static_cast<double>(model.chunk_bytes(CG_L3)) * model.n_chunks();
    const double decode_s = model.decode_s(CG_L3) * model.n_chunks();
    return std::max(1u,
                    static_cast<uint32_t>(std::min({1.0 * n, bits / each, budget_s / decode_s})));
}

Row run(const Model &model, const Trace &trace, const Setup &setup, uint32_t n_rounds,
        std::vector<double> *all_arrivals)
{
    Row row;
    for (uint32_t start = 0; start < N_STARTS; start++) {
        std::vector<double> arrivals;
        const std::vector<Outcome> outcomes =
            simulate(model, setup, trace, trace.length_s() * start / N_STARTS, n_rounds, &arrivals);
        for (size_t round = 0; round < arrivals.size(); round++)
            row.add(&outcomes[round * setup.n_at_once], setup.n_at_once, setup.budget_s,
                    n_could(model, trace, arrivals[round], setup.budget_s, setup.n_at_once));
        all_arrivals->insert(all_arrivals->end(), arrivals.begin(), arrivals.end());
    }
    return row;
}

void run_trace(Report *report, const Model &model, const Trace &trace, double scale,
               double budget_s, uint32_t n_rounds)
{
    std::vector<double> arrivals;
    for (const Policy &policy : POLICIES) {
        std::vector<double> own;
        const Setup setup = {policy.policy, policy.level, budget_s, ROUND_TRIP_S, 0, 1};
        report->add(model.name, trace.name, scale, budget_s, 1, 0, policy.name,
                    run(model, trace, setup, n_rounds, &own));
        if (arrivals.empty())
            arrivals = own;
    }
    Row best, best_delay, recomputed;
    for (double at_s : arrivals) {
        const Outcome o = oracle(model, trace, at_s, budget_s, ROUND_TRIP_S, false);
        const bool met = o.ttft_s <= budget_s * (1 + 1e-6);
        const Outcome delay = oracle(model, trace, at_s, budget_s, ROUND_TRIP_S, true);
        const Outcome recompute = {recompute_s(model), 0, 0, 0};
        best.add(&o, 1, budget_s, met);
        best_delay.add(&delay, 1, budget_s, met);
        recomputed.add(&recompute, 1, budget_s, met);
    }
    report->add(model.name, trace.name, scale, budget_s, 1, 0, "oracle", best);
    report->add(model.name, trace.name, scale, budget_s, 1, 0, "oracle_min_delay", best_delay);
    report->add(model.name, trace.name, scale, budget_s, 1, 0, "recompute", recomputed);
    // A wrong belief before the first measurement, and many requests at once.
    for (double prior : {0.25, 1.0, 4.0}) {
        std::vector<double> own;
        const Setup setup = {CG_POLICY_TTFT_BUDGET, -1, budget_s, ROUND_TRIP_S, prior, 1};
        report->add(model.name, trace.name, scale, budget_s, 1, prior, "ttft_budget",
                    run(model, trace, setup, n_rounds, &own));
    }
    for (const Policy &policy : {POLICIES[0], POLICIES[2], POLICIES[5]}) {
        std::vector<double> own;
        const Setup setup = {policy.policy, policy.level, budget_s, ROUND_TRIP_S, 0, 16};
        report->add(model.name, trace.name, scale, budget_s, 16, 0, policy.name,
                    run(model, trace, setup, 2, &own));
    }
}

} // namespace

int main(int argc, char **argv)
try {
    if (argc < 3) {
        fprintf(stderr, "usage: %s TRACES_DIR OUT.json [ROUNDS]\n", argv[0]);
        return 2;
    }
    const uint32_t n_rounds = argc > 3 ? static_cast<uint32_t>(std::atoi(argv[3])) : 4;
    std::vector<std::string> paths;
    for (const auto &entry : std::filesystem::directory_iterator(argv[1]))
        if (entry.path().extension() == ".csv")
            paths.push_back(entry.path());
    std::sort(paths.begin(), paths.end());
    Report report(argv[2]);
    const struct {
        Model model;
        double scale;
    } runs[] = {{smollm2(), 1}, {smollm2(), 10}, {llama8b(), 10}, {llama8b(), 100}};
    for (const auto &r : runs)
        for (const std::string &path : paths) {
            const Trace trace = Trace::read(path, r.scale);
            for (double budget_s : {0.5, 1.0, 2.0, 5.0})
                run_trace(&report, r.model, trace, r.scale, budget_s, n_rounds);
        }
    report.finish();
    return 0;
} catch (const std::exception &error) {
    fprintf(stderr, "%s\n", error.what());
    return 1;
}
