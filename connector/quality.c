#include "connector/quality.h"

#include <math.h>
#include <stdlib.h>

const cg_quality cg_quality_built_in = {
    .n_points = 5,
    .points = {{256, 0.65}, {512, 0.76}, {1024, 0.84}, {2048, 0.93}, {3072, 1}},
    .beyond = 0.2, /* of longer contexts the start counts less and less, but never nothing */
    .errors = {0, 0.0028, 0.0101, 0.0566}};

static double sum_of_last(const cg_quality *quality, double tokens)
{
    cg_quality_point a = {0, 0};
    for (uint32_t i = 0; i < quality->n_points; i++) {
        const cg_quality_point b = quality->points[i];
        if (tokens <= b.tokens)
            return a.sum + (b.sum - a.sum) * (tokens - a.tokens) / (b.tokens - a.tokens);
        a = b;
    }
    return a.sum + quality->beyond * log(tokens / a.tokens);
}

double cg_quality_sensitivity(const cg_quality *quality, uint32_t n_behind, uint32_t n_tokens)
{
    return sum_of_last(quality, (double)n_behind + n_tokens) - sum_of_last(quality, n_behind);
}

double cg_quality_kl(const cg_quality *quality, uint32_t n_behind, uint32_t n_tokens,
                     unsigned level)
{
    return level < CG_N_LEVELS
               ? cg_quality_sensitivity(quality, n_behind, n_tokens) * quality->errors[level]
               : 0;
}

typedef struct step {
    double kl, rate; /* saved; saved by a byte */
    uint32_t chunk;
    uint8_t to;
} step;

static int by_rate(const void *a, const void *b)
{
    const step *x = a, *y = b;
    if (x->rate != y->rate)
        return x->rate > y->rate ? -1 : 1;
    return x->chunk != y->chunk ? (x->chunk > y->chunk ? -1 : 1) : y->to - x->to;
}

/* From a level on, the steps with the best rate there is from where the last one ended: so their
 * rates fall, and sorting keeps their order. */
static size_t add_steps(const cg_quality *quality, const cg_controller_chunk *chunk, uint32_t index,
                        uint32_t n_behind, uint8_t level, step *steps)
{
    size_t n = 0;
    for (;;) {
        step best = {.to = level};
        for (uint8_t to = 0; to < level; to++) {
            if (chunk->bytes[to] == 0)
                continue;
            const double kl = cg_quality_kl(quality, n_behind, chunk->n_tokens, level) -
                              cg_quality_kl(quality, n_behind, chunk->n_tokens, to);
            /* A finer level that takes no more bytes is the best step there is. */
            const double more = (double)chunk->bytes[to] - (double)chunk->bytes[level];
            const double rate = kl / (more > 1 ? more : 1);
            if (rate > best.rate)
                best = (step){kl, rate, index, to};
        }
        if (!(best.rate > 0))
            return n;
        steps[n++] = best;
        level = best.to;
    }
}

bool cg_quality_bound(const cg_quality *quality, cg_controller_chunk *chunks, size_t n_chunks,
                      double max_kl)
{
    uint8_t *levels = malloc(n_chunks + 1);
    step *steps = n_chunks < SIZE_MAX / CG_N_LEVELS / sizeof *steps
                      ? malloc((n_chunks + 1) * CG_N_LEVELS * sizeof *steps)
                      : NULL;
    double kl = 0;
    size_t n_steps = 0;
    uint32_t n_behind = 0;
    if (levels == NULL || steps == NULL)
        goto done;
    /* From the last chunk to the first, so that n_behind is known. */
    for (size_t i = n_chunks; i-- > 0;) {
        levels[i] = cg_controller_nearest(&chunks[i], CG_L3);
        kl += cg_quality_kl(quality, n_behind, chunks[i].n_tokens, levels[i]);
        n_steps +=
            add_steps(quality, &chunks[i], (uint32_t)i, n_behind, levels[i], steps + n_steps);
        n_behind += chunks[i].n_tokens;
    }
    qsort(steps, n_steps, sizeof *steps, by_rate);
    for (size_t i = 0; i < n_steps && kl > max_kl; i++) {
        levels[steps[i].chunk] = steps[i].to;
        kl -= steps[i].kl;
    }
    for (size_t i = 0; i < n_chunks && kl <= max_kl; i++)
        for (uint8_t level = 0; level < CG_N_LEVELS; level++)
            if (level != levels[i])
                chunks[i].bytes[level] = 0;
done:
    free(levels);
    free(steps);
    return levels != NULL && steps != NULL && kl <= max_kl;
}
