// tests/sim/sim.h - a discrete-event simulator of loads: the connector's own planner
// (connector/fetch_plan.h, controller.h, estimator.h, speeds.h) on a link that follows a trace,
// with a virtual clock and no I/O.
//
// The link gives every read under way the same share, after a round trip. Decoding takes all
// threads, one chunk after the other, in the order in which the planner gave them. What was not
// loaded is recomputed after the load, at the model's speed: of several requests one after the
// other, each in a step of the engine, whose end those wait for that are loaded meanwhile. A
// request is over its budget when its TTFT is. A load by ttft_budget ends at its time, as the
// product's do; those of other policies, with which it is compared, take as long as they need.
#ifndef CG_TESTS_SIM_SIM_H
#define CG_TESTS_SIM_SIM_H
#include "connector/controller.h"
#include "tests/sim/trace.h"

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace cg_sim
{

struct Model {
    std::string name;
    uint32_t context_tokens, chunk_tokens;
    double elements_per_token;
    double bits_per_element[CG_N_LEVELS + 1]; // L0 to L3, and raw
    double decode_tokens_per_s[CG_N_LEVELS];  // on all threads
    cg_prefill_speed recompute;

    uint64_t chunk_bytes(unsigned level) const
    {
        return static_cast<uint64_t>(elements_per_token * chunk_tokens * bits_per_element[level] /
                                     8);
    }
    uint32_t n_chunks() const
    {
        return context_tokens / chunk_tokens;
    }
    double decode_s(unsigned level) const
    {
        return chunk_tokens / decode_tokens_per_s[level];
    }
};

// What a measured model and a large one look like; the figures are explained in the results.
Model smollm2();
Model llama8b();

// From at_s of the trace on reads fail, after a round trip: of one chunk of each context, or of
// all.
struct Fault {
    double at_s = std::numeric_limits<double>::infinity();
    int chunk = -1; // -1: all
};

struct Setup {
    cg_policy policy;
    int level; // a fixed one: 1 to 3, CG_N_LEVELS for raw; -1: the policy's
    double budget_s;
    double round_trip_s;
    double prior_factor; // the link is believed to be so many times as fast before it was measured;
                         // 0: nothing is believed
    std::vector<double> arrivals_s; // of the requests of a round, since its begin; they ascend
    Fault fault = {};
};

struct Outcome {
    double ttft_s, kl, bytes;
    uint32_t loaded_chunks;
};

// n_rounds times setup.arrivals_s requests for contexts of their own, each round some time after
// the one before has ended; what was learnt of the link stays. start_s: where in the trace it
// begins. arrivals_out: when each round began.
std::vector<Outcome> simulate(const Model &model, const Setup &setup, const Trace &trace,
                              double start_s, uint32_t n_rounds,
                              std::vector<double> *arrivals_out = nullptr);

// One request that knows the future of the link, at start_s. All is loaded, at the levels of least
// KL, if that can be in budget; else a part, where the cut between loading and recomputing is that
// of least KL of those in budget; if there is none, or with min_delay, that of least TTFT.
Outcome oracle(const Model &model, const Trace &trace, double start_s, double budget_s,
               double round_trip_s, bool min_delay);

// Of the last n_tokens of the context; without them of all.
double recompute_s(const Model &model, uint32_t n_tokens);
double recompute_s(const Model &model);

} // namespace cg_sim
#endif
