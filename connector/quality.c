#include "connector/quality.h"

#include <math.h>

/* Of a context of 3,072 tokens: how much lies in its last tokens. */
static const struct point {
    double tokens, sum;
} CURVE[] = {{0, 0}, {256, 0.65}, {512, 0.76}, {1024, 0.84}, {2048, 0.93}, {3072, 1}};
enum { N_POINTS = sizeof CURVE / sizeof CURVE[0] };

/* Of longer contexts the start counts less and less, but never nothing. */
static const double BEYOND = 0.2;

static const double ERRORS[CG_N_LEVELS] = {0, 0.0028, 0.0101, 0.0566};

static double sum_of_last(double tokens)
{
    for (int i = 1; i < N_POINTS; i++) {
        const struct point *a = &CURVE[i - 1], *b = &CURVE[i];
        if (tokens <= b->tokens)
            return a->sum + (b->sum - a->sum) * (tokens - a->tokens) / (b->tokens - a->tokens);
    }
    const struct point *last = &CURVE[N_POINTS - 1];
    return last->sum + BEYOND * log(tokens / last->tokens);
}

double cg_quality_sensitivity(uint32_t n_behind, uint32_t n_tokens)
{
    return sum_of_last((double)n_behind + n_tokens) - sum_of_last(n_behind);
}

double cg_quality_kl(uint32_t n_behind, uint32_t n_tokens, unsigned level)
{
    return level < CG_N_LEVELS ? cg_quality_sensitivity(n_behind, n_tokens) * ERRORS[level] : 0;
}
