#include "connector/speeds.h"

#include "connector/controller.h"

/* What was measured before counts for so much beside a new measurement: the last handful decide. */
static const double KEEP = 0.8;

/* How decoding times of the levels relate, roughly, on any machine. */
static const double USUAL_COST[CG_N_LEVELS] = {1, 7, 4.5, 2.5};

static void add_decode(cg_speeds *speeds, int level, double ns_per_token)
{
    double *mean = &speeds->decode_thread_ns[level];
    *mean = *mean > 0 ? KEEP * *mean + (1 - KEEP) * ns_per_token : ns_per_token;
}

void cg_speeds_add_decode(cg_speeds *speeds, unsigned level, uint32_t n_tokens, uint64_t thread_ns)
{
    add_decode(speeds, (int)level, (double)thread_ns / n_tokens);
}

/* A token of a level, of one thread; 0: nothing was measured. */
static double decode_thread_ns(const cg_speeds *speeds, int level)
{
    if (speeds->decode_thread_ns[level] > 0)
        return speeds->decode_thread_ns[level];
    for (int other = 0; other < CG_N_LEVELS; other++)
        if (speeds->decode_thread_ns[other] > 0)
            return speeds->decode_thread_ns[other] * USUAL_COST[level] / USUAL_COST[other];
    return 0;
}

void cg_speeds_add_load(cg_speeds *speeds, const uint32_t chunks_at[CG_N_LEVELS], uint32_t n_tokens,
                        uint64_t thread_ns)
{
    double expected[CG_N_LEVELS], n_chunks = 0, expected_sum = 0;
    for (int level = 0; level < CG_N_LEVELS; level++) {
        const double known = decode_thread_ns(speeds, level);
        expected[level] = known > 0 ? known : USUAL_COST[level];
        n_chunks += chunks_at[level];
        expected_sum += chunks_at[level] * expected[level];
    }
    for (int level = 0; level < CG_N_LEVELS; level++)
        if (chunks_at[level] > 0)
            add_decode(speeds, level,
                       (double)thread_ns / n_tokens * n_chunks * expected[level] / expected_sum);
}

void cg_speeds_decode(const cg_speeds *speeds, double ns_per_token_out[CG_N_LEVELS])
{
    for (int level = 0; level < CG_N_LEVELS; level++)
        ns_per_token_out[level] = decode_thread_ns(speeds, level) / speeds->n_threads;
}

double cg_speeds_decode_chunk(const cg_speeds *speeds, uint8_t level, uint32_t n_tokens,
                              uint64_t bytes)
{
    const double measured_ns = decode_thread_ns(speeds, level) * n_tokens;
    return (measured_ns > 0 ? measured_ns : cg_controller_guess_decode_ns(level, bytes)) /
           speeds->n_threads;
}

double cg_speeds_link_bps(const cg_speeds *speeds)
{
    return cg_estimator_bps(&speeds->link) *
           cg_estimator_without_trip(&speeds->link, speeds->latency_ns);
}

cg_prefill_speed cg_speeds_recompute(const cg_speeds *speeds)
{
    const cg_prefill_speed configured = {speeds->configured_tokens_per_s,
                                         speeds->configured_doubling_tokens};
    return cg_prefills_speed(&speeds->prefills, configured);
}
