#include "tests/sim/sim.h"

#include "connector/fetch_exit.h"
#include "connector/quality.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <memory>
#include <stdexcept>

namespace cg_sim
{

static const double NEVER_S = std::numeric_limits<double>::infinity();
static const double PAUSE_S = 2; // between the rounds
enum { DEPTH = 16, RAW = CG_N_LEVELS, SUBMIT_NS = 1000 };

// 30 layers, 3 KV heads of 64. Bits as once measured (chunks of version 5). Decoding,
// in tokens a second, stated: some 0.75 of what two cores do with AVX-512 VNNI (results/README.md,
// "Speed"). Recomputing: vLLM's CPU build on 2 cores.
Model smollm2()
{
    return {"SmolLM2-135M",
            3072,
            256,
            2.0 * 30 * 3 * 64,
            {10.67, 1.360, 0.570, 0.165, 16},
            {93700, 17900, 24900, 42700},
            {727, 0}};
}

// 32 layers, 8 KV heads of 128; bits as measured on SmolLM2. Decoding: the same speed a core, on 16
// cores. Recomputing: stated, for an H100 that serves others at the same time.
Model llama8b()
{
    return {"Llama-3.1-8B",
            8192,
            256,
            2.0 * 32 * 8 * 128,
            {10.67, 1.360, 0.570, 0.165, 16},
            {131700, 25100, 35000, 60100},
            {10000, 0}};
}

double recompute_s(const Model &model, uint32_t n_tokens)
{
    return cg_prefill_ns(model.recompute, n_tokens, model.context_tokens) / 1e9;
}

double recompute_s(const Model &model)
{
    return recompute_s(model, model.context_tokens);
}

static double chunk_kl(const Model &model, uint32_t index, unsigned level)
{
    if (level == CG_L0 || level == RAW)
        return 0;
    const uint32_t n_behind = (model.n_chunks() - 1 - index) * model.chunk_tokens;
    return cg_quality_kl(&cg_quality_built_in, n_behind, model.chunk_tokens, level);
}

namespace
{

uint64_t to_ns(double s)
{
    return s < 1e9 ? static_cast<uint64_t>(s * 1e9) : UINT64_MAX;
}

struct Read {
    uint64_t id;
    double left_bits, answered_s;
    bool may_fail;
};

// One context that is being loaded.
struct Load {
    Load() = default;
    ~Load()
    {
        cg_fetch_destroy(&fetch);
    }
    Load(const Load &) = delete;
    Load &operator=(const Load &) = delete;
    cg_fetch fetch = {};
    double arrived_s = 0, ended_s = -1, answered_s = -1;
    double bytes = 0;
    std::vector<bool> is_loaded;
};

class Run
{
  public:
    Run(const Model &model, const Setup &setup, const Trace &trace, double start_s)
        : model_(model), setup_(setup), trace_(trace), now_s_(start_s), zero_s_(start_s)
    {
        const double prior_bps = setup.prior_factor * trace.mean_bps();
        if (cg_fetch_plan_init(&plan_, DEPTH, uint64_t(4) << 30, uint64_t(3600) * 1000000000) !=
            CG_OK)
            throw std::bad_alloc();
        cg_estimator_init(
            &speeds_.link,
            setup.policy == CG_POLICY_PAPER ? CG_ESTIMATOR_LAST : CG_ESTIMATOR_HARMONIC, prior_bps);
        speeds_.latency_ns = speeds_.way_ns = 1e9 * setup.round_trip_s;
        speeds_.n_threads = 1;
        for (int level = 0; level < CG_N_LEVELS; level++)
            speeds_.decode_thread_ns[level] =
                setup.level == RAW ? 1 : 1e9 / model.decode_tokens_per_s[level];
        speeds_.configured_tokens_per_s = model.recompute.tokens_per_s;
        speeds_.configured_doubling_tokens = model.recompute.doubling_tokens;
    }
    ~Run()
    {
        cg_fetch_plan_destroy(&plan_);
    }
    Run(const Run &) = delete;
    Run &operator=(const Run &) = delete;

    void round(std::vector<Outcome> *outcomes)
    {
        std::vector<std::unique_ptr<Load>> loads;
        const double began_s = now_s_;
        engine_free_s_ = now_s_;
        computed_s_.clear();
        const size_t n = setup_.arrivals_s.size();
        const auto all_ended = [&] {
            return loads.size() == n && std::all_of(loads.begin(), loads.end(),
                                                    [](const auto &l) { return l->ended_s >= 0; });
        };
        const auto next_s = [&] {
            return loads.size() < n ? began_s + setup_.arrivals_s[loads.size()] : NEVER_S;
        };
        for (;;) {
            while (next_s() <= now_s_) {
                tell_queue(loads);
                loads.push_back(begin());
                end_if_done(loads.back().get());
            }
            tell_queue(loads);
            if (!all_ended())
                act(loads);
            if (all_ended())
                break;
            advance(loads, next_s());
        }
        for (auto &load : loads)
            outcomes->push_back(outcome(*load));
        while (!reads_.empty()) { // of refinements that nobody wants any more: they still come
            act(loads);           // may give up the last one
            if (!reads_.empty())
                advance(loads, NEVER_S);
        }
        now_s_ += PAUSE_S;
    }
    double now_s() const
    {
        return now_s_;
    }

  private:
    uint64_t now_ns() const
    {
        return to_ns(now_s_ - zero_s_ + 1);
    }
    double s_of(uint64_t ns) const
    {
        return ns == UINT64_MAX ? NEVER_S : static_cast<double>(ns) / 1e9 - 1 + zero_s_;
    }

    // What an engine's plugin does before each step: what is left but for what fetches have lost.
    void tell_queue(const std::vector<std::unique_ptr<Load>> &loads)
    {
        double queue_s = std::max(engine_free_s_ - now_s_, 0.0);
        for (const auto &load : loads)
            if (load->ended_s < 0)
                queue_s += recompute_s(model_, model_.context_tokens - load->fetch.end_token);
        cg_fetch_engine_known(&plan_, untold_ns_);
        untold_ns_ = 0;
        cg_fetch_engine_told(&plan_, 1e9 * queue_s, now_ns());
    }

    // What a look-up decides, and a load starts with.
    std::unique_ptr<Load> begin()
    {
        auto load = std::make_unique<Load>();
        const uint32_t n = model_.n_chunks();
        std::vector<cg_controller_chunk> sizes(n);
        for (cg_controller_chunk &chunk : sizes) {
            chunk.n_tokens = model_.chunk_tokens;
            if (setup_.level == RAW)
                chunk.bytes[CG_L0] = model_.chunk_bytes(RAW);
            for (unsigned level = CG_L1; level < CG_N_LEVELS && setup_.level != RAW; level++)
                if (setup_.level < 0 || static_cast<int>(level) == setup_.level)
                    chunk.bytes[level] = model_.chunk_bytes(level);
        }
        cg_controller_input input = {};
        input.policy = setup_.policy;
        input.chunks = sizes.data();
        input.n_chunks = n;
        input.budget_ns = to_ns(setup_.budget_s);
        input.link_bps = cg_speeds_link_bps(&speeds_);
        input.link_hope = cg_estimator_hope(&speeds_.link);
        input.latency_ns = speeds_.way_ns;
        const cg_wanted wanted = cg_fetch_wanted(&plan_);
        input.queued_bytes = wanted.bytes;
        input.queued_loads = static_cast<uint32_t>(wanted.n_loads);
        input.queued_decode_ns = cg_fetch_undecoded_ns(&plan_, &speeds_);
        input.recompute = model_.recompute;
        input.engine_ns = cg_fetch_engine_ns(&plan_, &speeds_, now_ns());
        input.end_token = model_.context_tokens;
        cg_speeds_decode(&speeds_, input.decode_ns_per_token);
        std::vector<uint8_t> levels(n);
        cg_controller_decision decision = cg_controller_decide(&input, levels.data());
        if (decision.n_load == 0 && cg_estimator_forget_old(&speeds_.link, now_ns())) {
            input.link_bps = cg_speeds_link_bps(&speeds_);
            input.link_hope = cg_estimator_hope(&speeds_.link);
            decision = cg_controller_decide(&input, levels.data());
        }
        if (decision.n_load == 0 && setup_.policy != CG_POLICY_PAPER &&
            cg_estimator_doubt_prior(&speeds_.link, now_ns())) {
            input.link_bps = 0;
            decision = cg_controller_decide(&input, levels.data());
        }
        if (setup_.level >= 0)
            decision = {n, 0, 0};
        if (cg_fetch_init(&load->fetch, static_cast<uint32_t>(decision.n_load)) != CG_OK)
            throw std::bad_alloc();
        cg_fetch *fetch = &load->fetch;
        fetch->policy = setup_.policy;
        fetch->has_fixed_level = setup_.level >= 0;
        fetch->end_token = static_cast<uint32_t>(decision.n_load) * model_.chunk_tokens;
        fetch->prompt_tokens = model_.context_tokens;
        fetch->deadline_ns = now_ns() + to_ns(setup_.budget_s) -
                             std::min(to_ns(setup_.budget_s), decision.reserve_ns);
        for (uint32_t i = 0; i < decision.n_load; i++) {
            fetch->sizes[i] = sizes[i];
            fetch->levels[i] = levels[i];
        }
        if (cg_fetch_is_anytime(fetch)) {
            cg_fetch_nest(fetch);
            cg_fetch_set_end(fetch, &speeds_, now_ns());
        }
        load->arrived_s = now_s_;
        load->is_loaded.resize(n);
        if (cg_fetch_plan_add(&plan_, fetch) != CG_OK)
            throw std::bad_alloc();
        return load;
    }

    Load *load_of(std::vector<std::unique_ptr<Load>> &loads, const cg_fetch *fetch)
    {
        for (auto &load : loads)
            if (&load->fetch == fetch)
                return load.get();
        throw std::logic_error("a fetch of nobody's");
    }

    void end_if_done(Load *load)
    {
        cg_fetch *fetch = &load->fetch;
        if (load->ended_s >= 0 || !cg_fetch_is_settled(fetch))
            return;
        for (const auto &job : decoding_)
            if (job.fetch == fetch)
                return;
        load->ended_s = now_s_;
        const uint32_t n_tokens = (model_.n_chunks() - fetch->n_whole) * model_.chunk_tokens;
        if (n_tokens > 0) {
            // One prompt after the other: two that are computed together take as long.
            engine_free_s_ = std::max(now_s_, engine_free_s_) + recompute_s(model_, n_tokens);
            computed_s_.push_back(engine_free_s_);
        }
        const auto ends = std::upper_bound(computed_s_.begin(), computed_s_.end(), now_s_);
        load->answered_s = n_tokens > 0                ? engine_free_s_
                           : ends == computed_s_.end() ? now_s_
                                                       : *ends;
        untold_ns_ += cg_fetch_engine_lost(&plan_, fetch, &speeds_, now_ns());
        cg_fetch_plan_remove(&plan_, fetch);
    }

    // What the reader does when it wakes up.
    void act(std::vector<std::unique_ptr<Load>> &loads)
    {
        uint32_t index;
        while (cg_fetch *fetch = cg_fetch_overdue(&plan_, &speeds_, now_ns())) {
            index = cg_fetch_first_missing(fetch);
            if (index < fetch->end)
                cg_fetch_failed(fetch, index);
            end_if_done(load_of(loads, fetch));
        }
        while (cg_fetch *fetch = cg_fetch_hopeless(&plan_, &speeds_, now_ns(), &index)) {
            cg_fetch_failed(fetch, index);
            end_if_done(load_of(loads, fetch));
        }
        while (const cg_fetch_read *late = cg_fetch_give_up(&plan_, now_ns()))
            end_read(loads, late->id, false);
        for (bool goes_on = true; goes_on;) {
            goes_on = false;
            while (cg_fetch *fetch = cg_fetch_next_decode(&plan_, &speeds_, now_ns(), &index)) {
                const uint8_t level = fetch->chunks[index].level;
                const double s = setup_.level == RAW ? 0 : model_.decode_s(level);
                decoder_free_s_ = std::max(decoder_free_s_, now_s_) + s;
                decoding_.push_back({fetch, index, decoder_free_s_});
                goes_on = true;
            }
            /* A real clock goes on between an end and what is asked for then. */
            const cg_fetch_read *read = cg_fetch_next_read(&plan_, &speeds_, now_ns() + SUBMIT_NS);
            goes_on = goes_on || plan_.must_free_bytes > 0;
            if (read != nullptr) {
                reads_.push_back(
                    {read->id, 8.0 * static_cast<double>(read->bytes), now_s_ + setup_.round_trip_s,
                     setup_.fault.chunk < 0 ||
                         read->chunk_index == static_cast<uint32_t>(setup_.fault.chunk)});
                goes_on = true;
            }
        }
    }

    // Until something happens: a request arrives, a read's answer begins or ends, a chunk is
    // decoded, or the plan wants to be asked.
    void advance(std::vector<std::unique_ptr<Load>> &loads, double arrival_s)
    {
        double next_s = std::max(now_s_ + 1e-9, s_of(cg_fetch_wake_ns(&plan_)) + 1e-9);
        next_s = std::min(next_s, arrival_s);
        if (!decoding_.empty())
            next_s = std::min(next_s, decoding_.front().ends_s);
        if (now_s_ < setup_.fault.at_s && !reads_.empty())
            next_s = std::min(next_s, setup_.fault.at_s);
        double n_moving = 0, least_bits = NEVER_S;
        for (const Read &read : reads_) {
            if (read.answered_s > now_s_) {
                next_s = std::min(next_s, read.answered_s);
            } else {
                n_moving++;
                least_bits = std::min(least_bits, read.left_bits);
            }
        }
        if (n_moving > 0)
            next_s = std::min(next_s, trace_.time_of(now_s_, least_bits * n_moving));
        if (next_s == NEVER_S)
            throw std::logic_error("nothing will ever happen");
        const double bits = n_moving > 0 ? trace_.bits_between(now_s_, next_s) / n_moving : 0;
        for (Read &read : reads_)
            if (read.answered_s <= now_s_)
                read.left_bits -= bits;
        now_s_ = next_s;
        end_reads(loads);
        while (!decoding_.empty() && decoding_.front().ends_s <= now_s_) {
            const Job job = decoding_.front();
            decoding_.pop_front();
            Load *load = load_of(loads, job.fetch);
            load->is_loaded[job.index] = cg_fetch_decode_ended(&plan_, job.fetch, job.index, true);
            end_if_done(load);
        }
    }

    void end_reads(std::vector<std::unique_ptr<Load>> &loads)
    {
        // On a fast link a step of the clock moves more than the last bit.
        const double least_bits = std::max(1e-3, trace_.bits_between(now_s_, now_s_ + 1e-9));
        for (size_t i = 0; i < reads_.size();) {
            const Read &read = reads_[i];
            const bool has_failed =
                read.may_fail && now_s_ >= setup_.fault.at_s && now_s_ >= read.answered_s;
            if (has_failed || read.left_bits <= least_bits)
                end_read(loads, read.id, !has_failed);
            else
                i++;
        }
    }

    void end_read(std::vector<std::unique_ptr<Load>> &loads, uint64_t id, bool has_succeeded)
    {
        const cg_fetch_read read = *cg_fetch_find_read(&plan_, id);
        Load *load = load_of(loads, read.fetch);
        reads_.erase(std::find_if(reads_.begin(), reads_.end(),
                                  [id](const Read &other) { return other.id == id; }));
        load->bytes += has_succeeded ? static_cast<double>(read.bytes) : 0;
        if (cg_fetch_read_ended(&plan_, &speeds_, id, has_succeeded ? read.bytes : 0, now_ns()) ==
            CG_FETCH_FAIL)
            cg_fetch_failed(read.fetch, read.chunk_index);
        end_if_done(load);
    }

    Outcome outcome(const Load &load) const
    {
        Outcome o = {load.answered_s - load.arrived_s, 0, load.bytes, load.fetch.n_whole};
        for (uint32_t i = 0; i < load.fetch.n_whole; i++)
            o.kl += chunk_kl(model_, i,
                             setup_.level == RAW ? unsigned{RAW} : load.fetch.chunks[i].level);
        return o;
    }

    struct Job {
        cg_fetch *fetch;
        uint32_t index;
        double ends_s;
    };
    const Model &model_;
    const Setup &setup_;
    const Trace &trace_;
    uint64_t untold_ns_ = 0; // of engine_free_s_, what tell_queue() has not told yet
    double now_s_, zero_s_, decoder_free_s_ = 0, engine_free_s_ = 0;
    std::vector<double> computed_s_; // when the engine has computed each prompt that it was given
    cg_fetch_plan plan_ = {};
    cg_speeds speeds_ = {};
    std::vector<Read> reads_;
    std::deque<Job> decoding_;
};

} // namespace

std::vector<Outcome> simulate(const Model &model, const Setup &setup, const Trace &trace,
                              double start_s, uint32_t n_rounds, std::vector<double> *arrivals_out)
{
    Run run(model, setup, trace, start_s);
    std::vector<Outcome> outcomes;
    for (uint32_t i = 0; i < n_rounds; i++) {
        if (arrivals_out != nullptr)
            arrivals_out->push_back(run.now_s());
        run.round(&outcomes);
    }
    return outcomes;
}

// ---- the oracle ----

// The best levels for chunks [0, n) that are read by end_s; false: none. It is a little better than
// any plan could be: decoding waits only for the last byte, or for itself.
static bool best_levels(const Model &model, const Trace &trace, double first_bit_s, double end_s,
                        uint32_t n, std::vector<unsigned> *levels_out, double *ends_s_out)
{
    std::vector<unsigned> levels(n, CG_L3);
    const auto ends = [&] {
        double bits = 0, decode_s = 0;
        for (unsigned level : levels) {
            bits += 8.0 * static_cast<double>(model.chunk_bytes(level));
            decode_s += model.decode_s(level);
        }
        return std::max(trace.time_of(first_bit_s, bits) + (n > 0 ? model.decode_s(CG_L3) : 0),
                        first_bit_s + decode_s);
    };
    *ends_s_out = n > 0 ? ends() : first_bit_s;
    if (*ends_s_out > end_s)
        return false;
    struct Step {
        double rate;
        uint32_t chunk;
        unsigned to;
    };
    std::vector<Step> steps;
    for (uint32_t i = 0; i < n; i++)
        for (unsigned to : {2u, 1u})
            steps.push_back(
                {(chunk_kl(model, i, to + 1) - chunk_kl(model, i, to)) /
                     static_cast<double>(model.chunk_bytes(to) - model.chunk_bytes(to + 1)),
                 i, to});
    std::sort(steps.begin(), steps.end(),
              [](const Step &a, const Step &b) { return a.rate > b.rate; });
    for (const Step &step : steps) {
        if (levels[step.chunk] != step.to + 1)
            continue;
        levels[step.chunk] = step.to;
        if (ends() > end_s)
            levels[step.chunk] = step.to + 1;
    }
    *ends_s_out = n > 0 ? ends() : first_bit_s;
    *levels_out = levels;
    return true;
}

Outcome oracle(const Model &model, const Trace &trace, double start_s, double budget_s,
               double round_trip_s, bool min_delay)
{
    const uint32_t n = model.n_chunks();
    Outcome best = {recompute_s(model), 0, 0, 0};
    bool best_in_time = false;
    for (uint32_t cut = n; cut > 0; cut--) {
        const double rest_s = recompute_s(model, (n - cut) * model.chunk_tokens);
        const double first_bit_s = start_s + round_trip_s;
        std::vector<unsigned> levels;
        double ends_s;
        const bool in_time =
            !min_delay && best_levels(model, trace, first_bit_s, start_s + budget_s - rest_s, cut,
                                      &levels, &ends_s);
        if (!in_time) {
            levels.assign(cut, CG_L3);
            const double bits = 8.0 * static_cast<double>(model.chunk_bytes(CG_L3)) * cut;
            ends_s = std::max(trace.time_of(first_bit_s, bits) + model.decode_s(CG_L3),
                              first_bit_s + cut * model.decode_s(CG_L3));
        }
        Outcome o = {ends_s - start_s + rest_s, 0, 0, cut};
        for (uint32_t i = 0; i < cut; i++) {
            o.kl += chunk_kl(model, i, levels[i]);
            o.bytes += static_cast<double>(model.chunk_bytes(levels[i]));
        }
        const bool better = in_time != best_in_time ? in_time
                            : in_time               ? o.kl < best.kl
                                                    : o.ttft_s < best.ttft_s;
        if (better) {
            best = o;
            best_in_time = in_time;
        }
        if (in_time && cut == n)
            return best; /* nothing is recomputed that can be loaded in time */
    }
    if (best_in_time || min_delay || recompute_s(model) > budget_s)
        return best;
    return {recompute_s(model), 0, 0, 0};
}

} // namespace cg_sim
