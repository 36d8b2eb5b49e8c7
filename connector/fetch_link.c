#include "connector/fetch_link.h"

static const double QUIET_NS = 50e6; /* an answer may take so long, and two round trips */
static const double STALL = 2;       /* a link that is quiet for so many times what is under way */

/* For how long nothing has come although something should. What is asked for soon after the last
 * end is what a link that is busy is always asked for. What is asked for later may follow a read
 * that hangs, so it has its time. */
static double quiet_ns(const cg_fetch_plan *plan, uint64_t now_ns)
{
    const uint64_t soon_ns = cg_fetch_add_ns(plan->quiet_since_ns, (uint64_t)QUIET_NS);
    uint64_t since_ns = plan->quiet_since_ns;
    if (plan->window.n_reading == 0)
        return 0;
    for (uint32_t i = 0; i < plan->window.depth; i++) {
        const cg_fetch_read *read = &plan->reads[i];
        if (read->id != 0 && read->submitted_ns > soon_ns && read->submitted_ns > since_ns)
            since_ns = read->submitted_ns;
    }
    return now_ns > since_ns ? (double)(now_ns - since_ns) : 0;
}

double cg_fetch_link_bps(const cg_fetch_plan *plan, const cg_speeds *speeds, uint64_t now_ns,
                         bool *is_bound_out)
{
    const double bps = cg_estimator_bps(&speeds->link), quiet = quiet_ns(plan, now_ns);
    const double bits = 8 * (double)plan->window.bytes_reading;
    /* A prior is not known to be true: a load that is to find out waits as long as without. */
    const double known_bps = speeds->link.n_samples > 0 ? bps : 0;
    *is_bound_out = false;
    if (quiet <= QUIET_NS + 2 * speeds->latency_ns ||
        (known_bps > 0 && quiet * known_bps < STALL * bits * 1e9))
        return bps;
    /* Had the link done more, what is under way would have come. */
    const double most_bps = bits * 1e9 / quiet;
    *is_bound_out = true;
    return bps > 0 && bps < most_bps ? bps : most_bps;
}

uint64_t cg_fetch_silent_ns(const cg_fetch_plan *plan, const cg_fetch *fetch)
{
    if (plan->window.n_reading == 0 || fetch->silent_from_ns == UINT64_MAX ||
        cg_fetch_has_all(fetch))
        return UINT64_MAX;
    return cg_fetch_add_ns(plan->alive_ns > fetch->silent_from_ns ? plan->alive_ns
                                                                  : fetch->silent_from_ns,
                           plan->patience_ns);
}

double cg_fetch_rest_ns(const cg_fetch *fetch, uint32_t chunk_index, const cg_speeds *speeds)
{
    double tokens = 0;
    for (uint32_t i = chunk_index; i < fetch->end; i++)
        tokens += fetch->sizes[i].n_tokens;
    return cg_prefill_ns(cg_speeds_recompute(speeds), tokens, fetch->end_token);
}

double cg_fetch_lost_ns(const cg_fetch *fetch, const cg_speeds *speeds)
{
    return cg_fetch_rest_ns(fetch, fetch->wanted_end, speeds);
}

uint64_t cg_fetch_due_ns(const cg_fetch *fetch, const cg_speeds *speeds)
{
    const double ns = cg_fetch_lost_ns(fetch, speeds);
    return ns < (double)fetch->deadline_ns ? fetch->deadline_ns - (uint64_t)ns : 0;
}
