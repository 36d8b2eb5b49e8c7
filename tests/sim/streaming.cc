// tests/sim/streaming.cc - how loads of a policy meet their budgets on links that were measured.
//
// usage: streaming TRACES_DIR OUT.json [ROUNDS [REQUESTS.jsonl]]
// TRACES_DIR holds files of time_s,bandwidth_mbps, REQUESTS.jsonl lines with a "timestamp" in ms.
// Prints a table, and to stderr how many jobs are done. OUT.json has a row for each model, trace,
// scale, budget and policy, and sums over the traces ("all") for requests with a prior, for many at
// once, and for those that arrive as the first N_ARRIVALS of REQUESTS.jsonl do ("at_once": 0).
// Deterministic.
#include "tests/sim/sim.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <stdexcept>
#include <thread>

using namespace cg_sim;

namespace
{

constexpr double ROUND_TRIP_S = 0.01;
constexpr uint32_t N_STARTS = 3, N_ARRIVALS = 64;

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
    void add(const std::string &model, const Trace &trace, double scale, double budget_s,
             uint32_t n_at_once, double prior_factor, const std::string &policy, const Row &row)
    {
        sums_[{model, scale, n_at_once, prior_factor, policy}].add(row);
        if (n_at_once == 1 && prior_factor == 0)
            print(model, trace.name, trace.mean_bps() / 1e6, scale, budget_s, n_at_once,
                  prior_factor, policy, row);
        else
            over_traces_[{model, scale, budget_s, n_at_once, prior_factor, policy}].add(row);
    }
    void finish()
    {
        for (const auto &[key, row] : over_traces_) {
            const auto &[model, scale, budget_s, n_at_once, prior, policy] = key;
            print(model, "all", 0, scale, budget_s, n_at_once, prior, policy, row);
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
    void print(const std::string &model, const std::string &trace, double mean_mbps, double scale,
               double budget_s, uint32_t n_at_once, double prior_factor, const std::string &policy,
               const Row &row)
    {
        fprintf(file_,
                "%s\n  {\"model\": \"%s\", \"trace\": \"%s\", \"scale\": %g, \"budget_s\": %g, ",
                first_ ? "" : ",", model.c_str(), trace.c_str(), scale, budget_s);
        if (mean_mbps > 0)
            fprintf(file_, "\"mean_mbps\": %.4g, ", mean_mbps);
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

// How many of a round's requests could have met their budget at all: by loading at L3, one after
// the other, those that come in time, and by computing others, one after the other, too. (All are
// of one size and one budget, so that to leave out the first that would be late costs no other its
// place.)
uint32_t n_could(const Model &model, const Trace &trace, double at_s, double budget_s,
                 const std::vector<double> &arrivals_s)
{
    const bool first_could =
        oracle(model, trace, at_s, budget_s, ROUND_TRIP_S, false).ttft_s <= budget_s * (1 + 1e-6);
    if (arrivals_s.size() == 1)
        return first_could;
    const double bits = 8.0 * static_cast<double>(model.chunk_bytes(CG_L3)) * model.n_chunks();
    const double chunk_s = model.decode_s(CG_L3);
    double link_free_s = 0, decoder_free_s = 0, engine_free_s = 0;
    uint32_t n = 0;
    for (double arrival_s : arrivals_s) {
        const double arrived_s = at_s + arrival_s;
        const double first_bit_s = std::max(arrived_s + ROUND_TRIP_S, link_free_s);
        const double last_bit_s = trace.time_of(first_bit_s, bits);
        const double ends_s = std::max(last_bit_s + chunk_s, std::max(decoder_free_s, first_bit_s) +
                                                                 chunk_s * model.n_chunks());
        const double until_s = arrived_s + budget_s * (1 + 1e-6);
        if (ends_s > until_s) {
            const double computed_s = std::max(arrived_s, engine_free_s) + recompute_s(model);
            if (computed_s <= until_s) {
                engine_free_s = computed_s;
                n++;
            }
            continue;
        }
        link_free_s = last_bit_s;
        decoder_free_s = ends_s;
        n++;
    }
    return std::max(n, uint32_t{first_could});
}

// What one model does on one trace with one budget, to be added to the report in order.
struct Result {
    uint32_t n_at_once;
    double prior_factor;
    std::string policy;
    Row row;
};

struct Job {
    Model model;
    Trace trace;
    double scale, budget_s;
    std::vector<Result> results;
};

Row run(const Model &model, const Trace &trace, const Setup &setup, uint32_t n_rounds,
        std::vector<double> *all_arrivals)
{
    Row row;
    for (uint32_t start = 0; start < N_STARTS; start++) {
        std::vector<double> arrivals;
        const std::vector<Outcome> outcomes =
            simulate(model, setup, trace, trace.length_s() * start / N_STARTS, n_rounds, &arrivals);
        for (size_t round = 0; round < arrivals.size(); round++)
            row.add(&outcomes[round * setup.arrivals_s.size()],
                    static_cast<uint32_t>(setup.arrivals_s.size()), setup.budget_s,
                    n_could(model, trace, arrivals[round], setup.budget_s, setup.arrivals_s));
        all_arrivals->insert(all_arrivals->end(), arrivals.begin(), arrivals.end());
    }
    return row;
}

void run_job(Job *job, uint32_t n_rounds, const std::vector<double> &requests_s)
{
    const Model &model = job->model;
    const Trace &trace = job->trace;
    const double budget_s = job->budget_s;
    std::vector<Result> *results = &job->results;
    std::map<std::string, std::vector<double>> arrivals;
    for (const Policy &policy : POLICIES) {
        const Setup setup = {policy.policy, policy.level, budget_s, ROUND_TRIP_S, 0, {0}};
        results->push_back(
            {1, 0, policy.name, run(model, trace, setup, n_rounds, &arrivals[policy.name])});
    }
    // The oracle has the requests of the policy that it is compared with: at other times the link
    // is another one.
    Row best, best_delay, recomputed;
    for (double at_s : arrivals["ttft_budget"]) {
        const Outcome o = oracle(model, trace, at_s, budget_s, ROUND_TRIP_S, false);
        const bool met = o.ttft_s <= budget_s * (1 + 1e-6);
        const Outcome recompute = {recompute_s(model), 0, 0, 0};
        best.add(&o, 1, budget_s, met);
        recomputed.add(&recompute, 1, budget_s, met);
    }
    for (double at_s : arrivals["min_delay"]) {
        const Outcome o = oracle(model, trace, at_s, budget_s, ROUND_TRIP_S, true);
        best_delay.add(&o, 1, budget_s, n_could(model, trace, at_s, budget_s, {0}) > 0);
    }
    results->push_back({1, 0, "oracle", best});
    results->push_back({1, 0, "oracle_min_delay", best_delay});
    results->push_back({1, 0, "recompute", recomputed});
    // A wrong belief before the first measurement, and many requests at once.
    for (double prior : {0.25, 1.0, 4.0}) {
        std::vector<double> own;
        const Setup setup = {CG_POLICY_TTFT_BUDGET, -1, budget_s, ROUND_TRIP_S, prior, {0}};
        results->push_back({1, prior, "ttft_budget", run(model, trace, setup, n_rounds, &own)});
    }
    for (const Policy &policy : {POLICIES[0], POLICIES[2], POLICIES[5]}) {
        std::vector<double> own;
        for (uint32_t n : {16u, 64u}) {
            const Setup setup = {policy.policy,         policy.level, budget_s, ROUND_TRIP_S, 0,
                                 std::vector<double>(n)};
            results->push_back({n, 0, policy.name, run(model, trace, setup, n > 16 ? 1 : 2, &own)});
        }
        if (requests_s.empty())
            continue;
        const Setup setup = {policy.policy, policy.level, budget_s, ROUND_TRIP_S, 0, requests_s};
        results->push_back({0, 0, policy.name, run(model, trace, setup, 1, &own)});
    }
}

void run_jobs(std::vector<Job> *jobs, uint32_t n_rounds, const std::vector<double> &requests_s)
{
    std::atomic<size_t> next{0}, n_done{0};
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); i++)
        threads.emplace_back([&] { // jobs are independent, and their order is kept
            for (size_t at; (at = next++) < jobs->size();) {
                run_job(&(*jobs)[at], n_rounds, requests_s);
                fprintf(stderr, "\r%zu of %zu", ++n_done, jobs->size());
            }
        });
    for (std::thread &thread : threads)
        thread.join();
    fprintf(stderr, "\n");
}

// The times at which the first requests of a file arrive.
std::vector<double> read_arrivals(const std::string &path)
{
    static const std::string KEY = "\"timestamp\":";
    std::ifstream in(path);
    std::vector<double> arrivals_s;
    for (std::string line; arrivals_s.size() < N_ARRIVALS && std::getline(in, line);) {
        const size_t at = line.find(KEY);
        if (at == std::string::npos)
            throw std::runtime_error(path + ": no timestamp in: " + line);
        arrivals_s.push_back(std::stod(line.substr(at + KEY.size())) / 1e3);
    }
    if (arrivals_s.empty())
        throw std::runtime_error(path + ": no requests");
    return arrivals_s;
}

} // namespace

int main(int argc, char **argv)
try {
    if (argc < 3) {
        fprintf(stderr, "usage: %s TRACES_DIR OUT.json [ROUNDS [REQUESTS.jsonl]]\n", argv[0]);
        return 2;
    }
    const uint32_t n_rounds = argc > 3 ? static_cast<uint32_t>(std::atoi(argv[3])) : 4;
    const std::vector<double> requests_s =
        argc > 4 ? read_arrivals(argv[4]) : std::vector<double>();
    std::vector<std::string> paths;
    for (const auto &entry : std::filesystem::directory_iterator(argv[1]))
        if (entry.path().extension() == ".csv")
            paths.push_back(entry.path());
    std::sort(paths.begin(), paths.end());
    Report report(argv[2]);
    std::vector<Job> jobs;
    for (const Model &model : {smollm2(), llama8b()})
        for (double scale : {1, 10, 100, 1000})
            for (const std::string &path : paths)
                for (double budget_s : {0.5, 1.0, 2.0, 5.0})
                    jobs.push_back({model, Trace::read(path, scale), scale, budget_s, {}});
    run_jobs(&jobs, n_rounds, requests_s);
    for (const Job &job : jobs)
        for (const Result &r : job.results)
            report.add(job.model.name, job.trace, job.scale, job.budget_s, r.n_at_once,
                       r.prior_factor, r.policy, r.row);
    report.finish();
    return 0;
} catch (const std::exception &error) {
    fprintf(stderr, "%s\n", error.what());
    return 1;
}
