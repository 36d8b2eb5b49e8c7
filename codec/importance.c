#include "codec/importance.h"

#include "codec/arena.h"
#include "codec/block_order.h"
#include "codec/kernels.h"

#include <math.h>
#include <string.h>

enum { DISTANCES = 4, HEADS_AT_ONCE = CG_QUERIES / DISTANCES };

/* Of a query behind a token, in positions. */
static const uint32_t distances[DISTANCES] = {32, 128, 512, 2048};

/* Tokens of the chunk that are coded. */
typedef struct coded_tokens {
    uint32_t first, n;
} coded_tokens;

static coded_tokens coded_of(const cg_heads *heads)
{
    const uint32_t first =
        cg_profile_sink_tokens(heads->profile, heads->first_position, heads->n_tokens);
    return (coded_tokens){first, heads->n_tokens - first};
}

/* The coded tokens of block b: from *from on, to before *to, counted from the first coded one. */
static void block_tokens(coded_tokens coded, size_t b, size_t *from, size_t *to)
{
    const size_t first = b * CG_DCT, end = first + CG_DCT, all = (size_t)coded.first + coded.n;
    *from = (first > coded.first ? first : coded.first) - coded.first;
    *to = end > coded.first ? (end < all ? end : all) - coded.first : *from;
}

typedef struct weigh_work {
    float *rows;            /* [n_tokens][head_dim]: V of a head, then its K before rotation */
    float *values, *mean;   /* [head_dim] */
    float *spread;          /* [n_tokens] */
    float *scores, *counts; /* [n_tokens][CG_QUERIES] */
    float *queries;         /* [head_dim][CG_QUERIES] */
    float *cosine, *sine;   /* [DISTANCES][rotary_dim / 2] */
} weigh_work;

static weigh_work take_weigh_work(cg_arena *arena, const cg_profile *p, uint32_t n_tokens)
{
    const size_t n = p->geometry.head_dim, half = p->rotary_dim / 2;
    weigh_work w;
    w.rows = cg_arena_take(arena, n_tokens * n * sizeof *w.rows);
    w.values = cg_arena_take(arena, n * sizeof *w.values);
    w.mean = cg_arena_take(arena, n * sizeof *w.mean);
    w.spread = cg_arena_take(arena, n_tokens * sizeof *w.spread);
    w.scores = cg_arena_take(arena, (size_t)n_tokens * CG_QUERIES * sizeof *w.scores);
    w.counts = cg_arena_take(arena, (size_t)n_tokens * CG_QUERIES * sizeof *w.counts);
    w.queries = cg_arena_take(arena, n * CG_QUERIES * sizeof *w.queries);
    w.cosine = cg_arena_take(arena, DISTANCES * half * sizeof *w.cosine);
    w.sine = cg_arena_take(arena, DISTANCES * half * sizeof *w.sine);
    return w;
}

size_t cg_importance_scratch_bytes(const cg_profile *profile, uint32_t n_tokens)
{
    cg_arena arena = {0};
    (void)take_weigh_work(&arena, profile, n_tokens);
    return arena.used_bytes;
}

/* The i-th coded token's elements of a head, to row. */
static bool load_head(const cg_heads *heads, const void *in, coded_tokens coded, size_t i,
                      uint32_t head, float *row)
{
    enum { AHEAD = 16 };
    const size_t t = coded.first + i;
    if (i + AHEAD < coded.n)
        cg_heads_prefetch(heads, in, cg_heads_element(heads, 0, t + AHEAD, head));
    return cg_heads_load(heads, in, cg_heads_element(heads, 0, t, head), 1, row);
}

/* How far each token's V of a head lies from their mean: w->spread. */
static bool measure_spread(const cg_heads *heads, uint32_t head, coded_tokens coded, const void *v,
                           const weigh_work *w)
{
    const size_t n = heads->profile->geometry.head_dim;
    float *restrict mean = w->mean;
    bool finite = true;
    memset(mean, 0, n * sizeof *mean);
    for (size_t i = 0; i < coded.n; i++) {
        float *restrict row = w->rows + i * n;
        finite &= load_head(heads, v, coded, i, head, row);
        for (size_t d = 0; d < n; d++)
            mean[d] += row[d];
    }
    for (size_t d = 0; d < n; d++)
        mean[d] /= (float)coded.n;
    heads->profile->kernels->square_distances(w->rows, coded.n, n, mean, w->spread);
    return finite;
}

static bool load_keys(const cg_heads *heads, uint32_t layer, uint32_t head, coded_tokens coded,
                      const void *k, const weigh_work *w)
{
    bool finite = true;
    for (size_t i = 0; i < coded.n; i++) {
        float *row = w->rows + i * heads->profile->geometry.head_dim;
        finite &= load_head(heads, k, coded, i, head, row);
        cg_heads_unrotate(heads, layer, coded.first + i, row);
    }
    return finite;
}

/* The mean queries of n_heads heads, at most HEADS_AT_ONCE, turned by each distance: w->queries.
 * Times 2 log2(e): the square of an attention is a power of 2 then. */
static void turn_queries(const cg_profile *p, uint32_t layer, uint32_t first_head, uint32_t n_heads,
                         const weigh_work *w)
{
    const size_t n = p->geometry.head_dim, half = p->rotary_dim / 2;
    const float *mean = p->query_mean + ((size_t)layer * p->n_query_heads + first_head) * n;
    memset(w->queries, 0, n * CG_QUERIES * sizeof *w->queries);
    for (size_t i = 0; i < (size_t)n_heads * DISTANCES; i++) {
        const size_t at = i % DISTANCES * half;
        for (size_t d = 0; d < n; d++)
            w->values[d] = mean[i / DISTANCES * n + d] * 0x1.715476p+1f;
        p->kernels->exact->rotate(w->values, w->cosine + at, w->sine + at, half);
        for (size_t d = 0; d < n; d++)
            w->queries[d * CG_QUERIES + i] = w->values[d];
    }
}

cg_status cg_importance_of_layer(const cg_heads *heads, uint32_t layer, const void *k,
                                 const void *v, void *scratch, float *counts_out)
{
    const cg_profile *p = heads->profile;
    const cg_geometry *g = &p->geometry;
    const size_t half = p->rotary_dim / 2, n_blocks = cg_count_blocks(heads->n_tokens);
    const uint32_t per_kv_head = p->n_query_heads / g->n_kv_heads;
    const coded_tokens coded = coded_of(heads);
    cg_arena arena = {scratch, 0};
    const weigh_work w = take_weigh_work(&arena, p, heads->n_tokens);
    for (size_t i = 0; i < DISTANCES; i++)
        p->kernels->exact->rotation(distances[i], 1, p->inv_freq + p->layer_rope[layer] * half,
                                    half, w.cosine + i * half, w.sine + i * half);
    memset(w.counts, 0, (size_t)heads->n_tokens * CG_QUERIES * sizeof *w.counts);
    for (uint32_t head = 0; head < g->n_kv_heads && coded.n > 0; head++) {
        if (!measure_spread(heads, head, coded, v, &w) ||
            !load_keys(heads, layer, head, coded, k, &w))
            return CG_ERR_INVALID_ARGUMENT;
        for (uint32_t i = 0; i < per_kv_head; i += HEADS_AT_ONCE) {
            const uint32_t left = per_kv_head - i,
                           n_heads = left < HEADS_AT_ONCE ? left : HEADS_AT_ONCE;
            turn_queries(p, layer, head * per_kv_head + i, n_heads, &w);
            p->kernels->weigh_tokens(w.rows, coded.n, g->head_dim, w.queries,
                                     (size_t)n_heads * DISTANCES, w.spread, w.scores, w.counts);
        }
    }
    /* Each query and each of K and V has given 1 to all tokens together. */
    const float n_given = 2.0f * DISTANCES * (float)p->n_query_heads;
    for (size_t b = 0; b < n_blocks; b++) {
        size_t from, to;
        float sum = 0;
        block_tokens(coded, b, &from, &to);
        for (size_t i = from * CG_QUERIES; i < to * CG_QUERIES; i++)
            sum += w.counts[i];
        counts_out[b] = to > from ? sum * (float)coded.n / (n_given * (float)(to - from)) : 0;
    }
    return CG_OK;
}

/* Of a block's step, by what the block counts: FORMAT.md. */
static const float exponent = 0.35f, most_octaves = 1.5f, least_count = 1e-9f;

static float limited(float octaves)
{
    return fminf(fmaxf(octaves, -most_octaves), most_octaves);
}

/* Subtracts the mean of octaves[from] to before octaves[to]. */
static void subtract_mean(float *octaves, size_t from, size_t to)
{
    double sum = 0;
    for (size_t b = from; b < to; b++)
        sum += octaves[b];
    for (size_t b = from; b < to; b++)
        octaves[b] -= (float)(sum / (double)(to - from));
}

void cg_importance_step_factors(const cg_heads *heads, float *counts, uint8_t *factor_index_out)
{
    const size_t n_blocks = cg_count_blocks(heads->n_tokens),
                 n_layers = heads->profile->geometry.n_layers;
    const coded_tokens coded = coded_of(heads);
    const size_t first = coded.n > 0 ? coded.first / CG_DCT : n_blocks;
    float *octaves = counts;
    for (size_t i = n_blocks; i < n_layers * n_blocks; i++)
        counts[i % n_blocks] += counts[i];
    for (size_t b = first; b < n_blocks; b++)
        octaves[b] = -exponent * log2f(fmaxf(counts[b] / (float)n_layers, least_count));
    subtract_mean(octaves, first, n_blocks);
    for (size_t b = first; b < n_blocks; b++)
        octaves[b] = limited(octaves[b]);
    subtract_mean(octaves, first, n_blocks);
    memset(factor_index_out, CG_OWN_STEP_FACTOR, n_blocks);
    for (size_t b = first; b < n_blocks; b++) {
        const float index = CG_OWN_STEP_FACTOR + nearbyintf(2 * octaves[b]);
        factor_index_out[b] = (uint8_t)fminf(fmaxf(index, 0), CG_N_STEP_FACTORS - 1);
    }
}
