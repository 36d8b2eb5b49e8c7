#include "connector/speeds.h"

/* What was measured before counts for so much beside a new measurement: the last handful decide. */
static const double KEEP = 0.8;

void cg_speeds_add_decode(cg_speeds *speeds, unsigned level, uint32_t n_tokens, uint64_t decode_ns)
{
    const double ns_per_token = (double)decode_ns / n_tokens;
    double *mean = &speeds->decode_thread_ns[level];
    *mean = *mean > 0 ? KEEP * *mean + (1 - KEEP) * ns_per_token : ns_per_token;
}

void cg_speeds_add_prefill(cg_speeds *speeds, uint32_t n_tokens, uint64_t duration_ns)
{
    speeds->prefill_tokens = KEEP * speeds->prefill_tokens + n_tokens;
    speeds->prefill_ns = KEEP * speeds->prefill_ns + (double)duration_ns;
}

void cg_speeds_decode(const cg_speeds *speeds, double ns_per_token_out[CG_N_LEVELS])
{
    for (int level = 0; level < CG_N_LEVELS; level++)
        ns_per_token_out[level] = speeds->decode_thread_ns[level] / speeds->n_threads;
}

double cg_speeds_recompute(const cg_speeds *speeds)
{
    if (speeds->configured_tokens_per_s > 0)
        return speeds->configured_tokens_per_s;
    return speeds->prefill_ns > 0 ? speeds->prefill_tokens * 1e9 / speeds->prefill_ns : 0;
}
