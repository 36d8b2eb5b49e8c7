#include "connector/controller.h"

uint8_t cg_controller_nearest(const cg_controller_chunk *chunk, uint8_t wish)
{
    for (uint8_t level = wish; level < CG_N_LEVELS; level++)
        if (chunk->bytes[level] > 0)
            return level;
    for (uint8_t level = wish; level > 0; level--)
        if (chunk->bytes[level - 1] > 0)
            return (uint8_t)(level - 1);
    return wish;
}

static double larger(double a, double b)
{
    return a > b ? a : b;
}

static double read_ns(const cg_controller_input *in, size_t i, uint8_t level)
{
    return (double)in->chunks[i].bytes[level] * 8e9 / in->link_bps;
}

double cg_controller_guess_decode_ns(uint8_t level, uint64_t bytes)
{
    static const double NS_PER_BYTE[CG_N_LEVELS] = {3, 120, 160, 270}; /* with AVX2 */
    return level < CG_N_LEVELS ? NS_PER_BYTE[level] * (double)bytes : 0;
}

static double decode_ns(const cg_controller_input *in, size_t i, uint8_t level)
{
    const double ns_per_token = in->decode_ns_per_token[level];
    if (ns_per_token > 0)
        return ns_per_token * in->chunks[i].n_tokens;
    return cg_controller_guess_decode_ns(level, in->chunks[i].bytes[level]);
}

static uint8_t fastest(const cg_controller_input *in, size_t i)
{
    uint8_t best = cg_controller_nearest(&in->chunks[i], CG_L0);
    for (uint8_t level = (uint8_t)(best + 1); level < CG_N_LEVELS; level++)
        if (in->chunks[i].bytes[level] > 0 && read_ns(in, i, level) + decode_ns(in, i, level) <
                                                  read_ns(in, i, best) + decode_ns(in, i, best))
            best = level;
    return best;
}

/* Of the prompt's last tokens: nothing behind a cut is loaded. */
static double recompute_ns(const cg_controller_input *in, double n_tokens)
{
    return cg_prefill_ns(in->recompute, n_tokens, in->end_token);
}

/* When a reader and a decoder that works behind it end. */
typedef struct pipeline {
    double read_end_ns, decode_end_ns;
} pipeline;

/* It begins when what others must have has been read and decoded. */
static pipeline pipeline_behind_others(const cg_controller_input *in)
{
    return (pipeline){in->queued_bytes * 8e9 / in->link_bps, in->queued_decode_ns};
}

/* Of what is loaded here. Its way to the store passes while others' bytes come. */
static pipeline own_pipeline(const cg_controller_input *in)
{
    pipeline p = pipeline_behind_others(in);
    if (in->policy != CG_POLICY_PAPER)
        p.read_end_ns = larger(p.read_end_ns, in->latency_ns);
    return p;
}

/* Whether so much is recomputed behind n_load chunks that the engine takes turns for it. */
static bool takes_turns(const cg_controller_input *in, size_t n_load)
{
    const bool is_much =
        n_load < in->n_chunks || (in->n_chunks > 0 && in->other_tokens >= in->chunks[0].n_tokens);
    return is_much && in->policy != CG_POLICY_PAPER;
}

/* When a load that ends at load_ns is over, and the rest of the prompt recomputed. */
static double end_ns(const cg_controller_input *in, size_t n_load, double load_ns, double n_tokens)
{
    const bool waits = n_tokens > 0 && takes_turns(in, n_load);
    return (waits ? larger(load_ns, in->engine_ns) : load_ns) + recompute_ns(in, n_tokens);
}

/* What a cut costs: the time to the end. If that is too late, or there is no budget, also what
 * others wait for that are loaded while the engine computes the rest; and each that is late by it
 * costs what there was left of the budget. */
static double cost_ns(const cg_controller_input *in, size_t n_load, double load_ns, double n_tokens)
{
    const bool has_budget = in->policy == CG_POLICY_TTFT_BUDGET;
    const double budget_ns = (double)in->budget_ns, late_ns = has_budget ? budget_ns : 0,
                 ns = end_ns(in, n_load, load_ns, n_tokens),
                 from_ns = larger(load_ns, in->engine_ns);
    const pipeline others = pipeline_behind_others(in);
    const double queue_ns = larger(others.read_end_ns, others.decode_end_ns);
    if (has_budget && ns <= budget_ns) /* who waits until then is in time, too */
        return ns;
    double sum_ns = ns + late_ns;
    if (!takes_turns(in, n_load) || from_ns >= queue_ns)
        return sum_ns;
    for (uint32_t i = 1; i <= in->queued_loads; i++) {
        const double other_ns = queue_ns * i / in->queued_loads;
        if (other_ns >= from_ns && other_ns < ns)
            sum_ns += ns - other_ns + (other_ns <= budget_ns ? late_ns : 0);
    }
    return sum_ns;
}

static void pipeline_add(pipeline *p, double read, double decode)
{
    p->read_end_ns += read;
    if (p->decode_end_ns < p->read_end_ns)
        p->decode_end_ns = p->read_end_ns;
    p->decode_end_ns += decode;
}

/* The finest levels for chunks [0, n) that end within budget_ns; where none does, the fastest. Sums
 * of what remains at each level make it one pass. Returns when the last chunk is decoded. */
static double finest_in_time(const cg_controller_input *in, size_t n, double budget_ns,
                             uint8_t *levels_out)
{
    double read_left[CG_N_LEVELS] = {0}, decode_left[CG_N_LEVELS] = {0};
    for (uint8_t wish = 0; wish < CG_N_LEVELS; wish++)
        for (size_t i = 0; i < n; i++) {
            const uint8_t level = cg_controller_nearest(&in->chunks[i], wish);
            read_left[wish] += read_ns(in, i, level);
            decode_left[wish] += decode_ns(in, i, level);
        }
    pipeline p = own_pipeline(in);
    for (size_t i = 0; i < n; i++) {
        uint8_t chosen = fastest(in, i);
        for (uint8_t wish = 0; wish < CG_N_LEVELS; wish++) {
            /* Two bounds of the end: all is read and then the last chunk decoded, or all is decoded
             * without a pause. The later one holds. */
            const double last =
                decode_ns(in, n - 1, cg_controller_nearest(&in->chunks[n - 1], wish));
            if (larger(p.read_end_ns + read_left[wish] + last,
                       p.decode_end_ns + decode_left[wish]) <= budget_ns) {
                chosen = cg_controller_nearest(&in->chunks[i], wish);
                break;
            }
        }
        for (uint8_t wish = 0; wish < CG_N_LEVELS; wish++) {
            const uint8_t level = cg_controller_nearest(&in->chunks[i], wish);
            read_left[wish] -= read_ns(in, i, level);
            decode_left[wish] -= decode_ns(in, i, level);
        }
        levels_out[i] = chosen;
        pipeline_add(&p, read_ns(in, i, chosen), decode_ns(in, i, chosen));
    }
    return p.decode_end_ns;
}

/* How many chunks to load, at their fastest, for what costs least; *load_ns_out: of those. */
static size_t least_delay(const cg_controller_input *in, double tokens_in_all, uint8_t *levels_out,
                          double *load_ns_out)
{
    const bool may_cut = in->recompute.tokens_per_s > 0;
    double tokens_left = tokens_in_all, least_ns = cost_ns(in, 0, 0, tokens_left);
    size_t best = 0;
    pipeline p = own_pipeline(in);
    *load_ns_out = 0;
    for (size_t i = 0; i < in->n_chunks; i++) {
        levels_out[i] = fastest(in, i);
        pipeline_add(&p, read_ns(in, i, levels_out[i]), decode_ns(in, i, levels_out[i]));
        tokens_left -= in->chunks[i].n_tokens;
        const double ns = cost_ns(in, i + 1, p.decode_end_ns, tokens_left);
        /* Of cuts that are equally good the one that loads more. */
        if (!may_cut || ns <= least_ns) {
            least_ns = ns;
            best = i + 1;
            *load_ns_out = p.decode_end_ns;
        }
    }
    return best;
}

/* Of tokens_in_all, those that are not in the first n chunks. */
static double tokens_not_in(const cg_controller_input *in, size_t n, double tokens_in_all)
{
    for (size_t i = 0; i < n; i++)
        tokens_in_all -= in->chunks[i].n_tokens;
    return tokens_in_all;
}

/* Whether a load does not pay over any link, since the store answers too late. */
static bool is_too_far(const cg_controller_input *in, double tokens_in_all)
{
    const bool has_budget = in->policy == CG_POLICY_TTFT_BUDGET;
    const double load_ns = end_ns(in, in->n_chunks, in->latency_ns, in->other_tokens);
    return (has_budget || in->policy == CG_POLICY_MIN_DELAY) && in->recompute.tokens_per_s > 0 &&
           !(has_budget && load_ns <= (double)in->budget_ns) &&
           end_ns(in, 0, 0, tokens_in_all) < load_ns;
}

cg_controller_decision cg_controller_decide(const cg_controller_input *in, uint8_t *levels_out)
{
    cg_controller_decision decision = {.n_load = in->n_chunks};
    double tokens = in->other_tokens, load_ns = 0, tokens_in_all = tokens;
    for (size_t i = 0; i < in->n_chunks; i++)
        tokens_in_all += in->chunks[i].n_tokens;

    if (!(in->link_bps > 0) || in->policy == CG_POLICY_FIXED) {
        for (size_t i = 0; i < in->n_chunks; i++)
            levels_out[i] = cg_controller_nearest(
                &in->chunks[i], in->policy == CG_POLICY_MIN_DELAY ? CG_L3 : CG_L2);
        if (is_too_far(in, tokens_in_all))
            decision.n_load = 0;
        decision.reserve_ns =
            (uint64_t)recompute_ns(in, tokens_not_in(in, decision.n_load, tokens_in_all));
        return decision;
    }

    if (in->policy == CG_POLICY_MIN_DELAY) {
        decision.n_load = least_delay(in, tokens_in_all, levels_out, &load_ns);
    } else if (in->n_chunks > 0) {
        const double budget_ns = (double)in->budget_ns;
        load_ns =
            finest_in_time(in, in->n_chunks, budget_ns - recompute_ns(in, tokens), levels_out);
        /* Late at every level. Recompute so much that the total is least; if that leaves time,
         * spend it on the levels of what is loaded. */
        if (load_ns + recompute_ns(in, tokens) > budget_ns && in->recompute.tokens_per_s > 0) {
            decision.n_load = least_delay(in, tokens_in_all, levels_out, &load_ns);
            double rest = tokens_not_in(in, decision.n_load, tokens_in_all);
            if (end_ns(in, decision.n_load, load_ns, rest) > budget_ns &&
                in->policy != CG_POLICY_PAPER && in->link_hope > 0) {
                /* Late in any case by this estimate. It may be wrong, which only a load can tell;
                 * a load can still be cut short. */
                cg_controller_input hoped = *in;
                hoped.link_bps *= in->link_hope;
                decision.n_load = least_delay(&hoped, tokens_in_all, levels_out, &load_ns);
                if (decision.n_load > 0) /* the way to the store stays as it is */
                    load_ns = in->latency_ns + (load_ns - in->latency_ns) * in->link_hope;
                rest = tokens_not_in(in, decision.n_load, tokens_in_all);
            }
            if (decision.n_load > 0 && end_ns(in, decision.n_load, load_ns, rest) <= budget_ns)
                load_ns = finest_in_time(in, decision.n_load, budget_ns - recompute_ns(in, rest),
                                         levels_out);
        }
    }
    for (size_t i = decision.n_load; i < in->n_chunks; i++)
        tokens += in->chunks[i].n_tokens;
    decision.predicted_ns = (uint64_t)load_ns;
    decision.reserve_ns = (uint64_t)recompute_ns(in, tokens);
    return decision;
}
