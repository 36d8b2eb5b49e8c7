#include "connector/prefill.h"

#include <stdlib.h>

enum {
    LEAST_PREFILL = 256, /* tokens that say what many take */
    APART = 1024,        /* positions so far apart say how the speed falls */
    LEAST_PAIRS = 8,     /* of prefills that are */
    MOST_PAIRS = CG_PREFILL_SAMPLES * (CG_PREFILL_SAMPLES - 1) / 2,
};
/* What was measured before counts for so much beside a new measurement: the last handful decide. */
static const double KEEP = 0.8;
static const double LEAST_PART = 0.1; /* of the mean that a token takes at the start, at least */

static void add(cg_prefill_sum *sum, double tokens, double pairs, double ns)
{
    sum->tokens = KEEP * sum->tokens + tokens;
    sum->pairs = KEEP * sum->pairs + pairs;
    sum->ns = KEEP * sum->ns + ns;
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median of the slopes (Theil, Sen); 0: it falls, or it is not known. */
static double median_slope(const cg_prefills *p)
{
    double slopes[MOST_PAIRS];
    uint32_t n = 0;
    for (uint32_t i = 0; i < p->n_samples; i++)
        for (uint32_t j = 0; j < i; j++) {
            const double apart = p->positions[i] - p->positions[j];
            if (apart >= APART || apart <= -APART)
                slopes[n++] = (p->token_ns[i] - p->token_ns[j]) / apart;
        }
    if (n < LEAST_PAIRS)
        return 0;
    qsort(slopes, n, sizeof *slopes, ascending);
    const double median = slopes[(n - 1) / 2]; /* of an even number the smaller: it is careful */
    return median > 0 ? median : 0;
}

void cg_prefills_add(cg_prefills *p, uint32_t n_tokens, uint64_t n_pairs, uint64_t duration_ns)
{
    if (n_tokens == 0 || duration_ns == 0)
        return;
    if (n_tokens < LEAST_PREFILL) {
        add(&p->short_sum, n_tokens, (double)n_pairs, (double)duration_ns);
        return;
    }
    add(&p->sum, n_tokens, (double)n_pairs, (double)duration_ns);
    p->positions[p->next] = (double)n_pairs / n_tokens;
    p->token_ns[p->next] = (double)duration_ns / n_tokens;
    p->next = (p->next + 1) % CG_PREFILL_SAMPLES;
    p->n_samples += p->n_samples < CG_PREFILL_SAMPLES;
    p->pair_ns = median_slope(p);
}

/* With a slope that what was measured in all bears. */
static cg_prefill_speed split(const cg_prefill_sum *sum, double pair_ns)
{
    double token_ns = (sum->ns - pair_ns * sum->pairs) / sum->tokens;
    const double least_ns = LEAST_PART * sum->ns / sum->tokens;
    if (token_ns < least_ns) {
        token_ns = least_ns;
        pair_ns = (1 - LEAST_PART) * sum->ns / sum->pairs;
    }
    return (cg_prefill_speed){1e9 / token_ns, pair_ns > 0 ? token_ns / pair_ns : 0};
}

cg_prefill_speed cg_prefills_speed(const cg_prefills *p, cg_prefill_speed configured)
{
    if (configured.tokens_per_s > 0)
        return configured;
    const cg_prefill_sum *sum = p->sum.ns > 0 ? &p->sum : &p->short_sum;
    if (!(sum->ns > 0))
        return (cg_prefill_speed){0, 0};
    if (configured.doubling_tokens > 0)
        return (cg_prefill_speed){(sum->tokens + sum->pairs / configured.doubling_tokens) * 1e9 /
                                      sum->ns,
                                  configured.doubling_tokens};
    return split(sum, sum == &p->sum ? p->pair_ns : 0);
}

double cg_prefill_pairs_ns(cg_prefill_speed speed, double n_tokens, double n_pairs)
{
    if (!(speed.tokens_per_s > 0))
        return 0;
    const double later = speed.doubling_tokens > 0 ? n_pairs / speed.doubling_tokens : 0;
    return (n_tokens + later) * 1e9 / speed.tokens_per_s;
}

double cg_prefill_ns(cg_prefill_speed speed, double n_tokens, double end_token)
{
    const double first = end_token > n_tokens ? end_token - n_tokens : 0;
    return cg_prefill_pairs_ns(speed, n_tokens, n_tokens * (first + n_tokens / 2));
}
