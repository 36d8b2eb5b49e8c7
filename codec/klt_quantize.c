/* Coefficients are rounded once, for the finest level of a nested encoding or for each level of
 * another. Then rows are made smaller whose sums a decoder could not hold. Nearly none are too
 * large, so a cheap bound goes before each exact one: the largest symbol times all elements for a
 * layer group's own sums, and norms (codec/analysis.h) for what the joint matrix gives. */
#include "codec/klt_quantize.h"

#include "codec/analysis.h"
#include "codec/arena.h"
#include "codec/klt.h"

#include <math.h>
#include <stdlib.h>

/* Of a decoder's sums. With a joint matrix, half of a group's is for its own components. */
enum { SUM_BITS = 31, HALF_SUM_BITS = 30 };

/* What keeps a decoder's sums of a row of symbols within 32 bits. */
typedef struct row_limits {
    const uint64_t *most_before; /* cg_bands's, of the first cell; NULL in version 1, whose sums are
                                    floats */
    unsigned sum_bits;
} row_limits;

static row_limits limits_of(const cg_profile *p, const cg_group *group, unsigned matrix,
                            unsigned level)
{
    const cg_bands *bands = &group->bands[matrix];
    if (p->version == 1)
        return (row_limits){0};
    return (row_limits){.most_before = bands->most_before + bands->n_shared,
                        .sum_bits = bands->n_shared > 0
                                        ? HALF_SUM_BITS - (unsigned)bands->fraction_bits[level]
                                        : SUM_BITS};
}

static bool is_within(const row_limits *limits, const int16_t *cells, size_t n_cells)
{
    uint64_t sum = 0;
    for (size_t c = 0; c < n_cells; c++) {
        const uint64_t most = limits->most_before[c + 1] - limits->most_before[c];
        sum += most * (uint64_t)(cells[c] < 0 ? -cells[c] : cells[c]);
        if (sum >> limits->sum_bits != 0) /* of a hostile profile, all of them may leave 64 bits */
            return false;
    }
    return true;
}

/* Returns how many symbols it has changed. */
static uint64_t halve(int16_t *cells, size_t n_cells)
{
    uint64_t n = 0;
    for (size_t c = 0; c < n_cells; c++) {
        n += cells[c] != 0;
        cells[c] = (int16_t)(cells[c] / 2);
    }
    return n;
}

/* Makes a row of symbols small enough for its limits. Returns how many were too large, for those or
 * for 16 bits. */
static uint64_t keep_in_range(const row_limits *limits, int16_t *cells, size_t n_cells)
{
    uint64_t n_saturated = cg_symbols_n_saturated(cells, n_cells);
    int16_t most_symbol = 0;
    for (size_t c = 0; c < n_cells; c++) {
        const int16_t symbol = cells[c] < 0 ? (int16_t)-cells[c] : cells[c];
        most_symbol = symbol > most_symbol ? symbol : most_symbol;
    }
    if (limits->most_before == NULL)
        return n_saturated;
    /* The cheap bound first: few rows come to the exact one below. */
    const double most = (double)(limits->most_before[n_cells] - limits->most_before[0]);
    if (most_symbol * most < (double)(1u << limits->sum_bits))
        return n_saturated;
    while (!is_within(limits, cells, n_cells)) /* which zeros are */
        n_saturated += halve(cells, n_cells);
    return n_saturated;
}

/* A level's row of frequency f and block b from the next finer level's. */
static void coarsen_row(const cg_profile *p, const cg_symbols symbols[CG_N_LEVELS], unsigned level,
                        unsigned f, size_t b)
{
    const cg_symbols *finer = &symbols[level - 1], *own = &symbols[level];
    const size_t n_finer = finer->columns->n_active[f], n_own = own->columns->n_active[f];
    p->kernels->coarsen(finer->cells[f] + b * n_finer, n_own, own->cells[f] + b * n_own);
}

/* Whether a level's symbols are made of those of the next finer one. */
static bool is_from_finer(const cg_encoding *encoding, unsigned level)
{
    return encoding->is_nested && level > CG_L1 && cg_encoding_has(encoding, level - 1);
}

uint64_t cg_klt_quantize(const cg_encoding *encoding, const cg_group *group, unsigned matrix,
                         unsigned f, const float *coef, size_t coef_stride,
                         const cg_symbols symbols[CG_N_LEVELS])
{
    const cg_profile *p = encoding->heads->profile;
    uint64_t n_saturated = 0;
    /* The finest first: nested, a coarser level is made of its symbols. */
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++) {
        if (!cg_encoding_has(encoding, level))
            continue;
        const row_limits limits = limits_of(p, group, matrix, level);
        const cg_symbols *own = &symbols[level];
        const size_t n_active = own->columns->n_active[f];
        const bool has_finer = is_from_finer(encoding, level);
        for (size_t b = 0; b < own->n_rows; b++) {
            int16_t *cells = own->cells[f] + b * n_active;
            if (has_finer) { /* no symbol is larger: its sums are smaller */
                coarsen_row(p, symbols, level, f, b);
                continue;
            }
            if (coef != NULL)
                p->kernels->quantize(coef + b * coef_stride, n_active,
                                     1.0f / p->step[level - 1][matrix], cells);
            n_saturated += keep_in_range(&limits, cells, n_active);
        }
    }
    return n_saturated;
}

/* ---- what the joint matrix gives ---- */

/* Whether a bound on symbols alone says that the level's rows give nothing too large. */
static bool are_in_reach(const cg_analysis *joint, unsigned level, const cg_symbols *symbols)
{
    const cg_level_columns *columns = symbols->columns;
    float most = 0;
    for (size_t r = 0; r < CG_DCT * symbols->n_rows; r++) {
        const size_t f = r % CG_DCT, n_cells = columns->n_active[f];
        const int16_t *cells = symbols->cells[f] + r / CG_DCT * n_cells;
        float reach = 0;
        for (size_t c = 0; c < n_cells; c += CG_BAND_COMPONENTS) {
            const size_t left = n_cells - c;
            float square = 0;
            for (size_t i = 0; i < left && i < CG_BAND_COMPONENTS; i++)
                square += (float)cells[c + i] * cells[c + i];
            reach += joint->band_reach[c / CG_BAND_COMPONENTS] * sqrtf(square);
        }
        most = fmaxf(most, reach);
    }
    return most <= joint->most_reach[level];
}

/* Whether the groups' sums of a row of given numbers stay within their half. *n_ends grows by the
 * numbers that are at the ends of 16 bits. */
static bool sums_fit(const cg_profile *p, unsigned level, unsigned f, const int16_t *given,
                     uint64_t *n_ends)
{
    for (uint32_t g = 0; g < p->n_groups; g++) {
        const uint64_t *most_before = p->groups[g].bands[0].most_before;
        uint64_t sum = 0;
        for (size_t c = 0; c < p->n_given[level - 1][f]; c++) {
            const int number = given[g * p->n_shared + c];
            sum += (most_before[c + 1] - most_before[c]) * (uint64_t)abs(number);
            *n_ends += abs(number) >= INT16_MAX;
        }
        if (sum >> HALF_SUM_BITS != 0)
            return false;
    }
    return true;
}

/* Halves the level's row of frequency f and block b: nested, that is the finest level's, of which
 * the others are made. */
static uint64_t halve_row(const cg_encoding *encoding, const cg_symbols symbols[CG_N_LEVELS],
                          unsigned level, unsigned f, size_t b)
{
    /* A coarser row that is halved alone would not be a third of the finer one any more, and what
     * refines it could not be coded. */
    while (is_from_finer(encoding, level))
        level--;
    const size_t n_active = symbols[level].columns->n_active[f];
    const uint64_t n = halve(symbols[level].cells[f] + b * n_active, n_active);
    while (++level < CG_N_LEVELS && cg_encoding_has(encoding, level) &&
           is_from_finer(encoding, level))
        coarsen_row(encoding->heads->profile, symbols, level, f, b);
    return n;
}

typedef struct given_work {
    int16_t *given;
    void *scratch;
} given_work;

static given_work take_given_work(cg_arena *arena, const cg_profile *p, uint32_t n_tokens)
{
    size_t most = 0;
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++) {
        const size_t bytes = cg_klt_give_scratch_bytes(p, level, n_tokens);
        most = bytes > most ? bytes : most;
    }
    given_work w;
    w.given = cg_arena_take(arena, cg_klt_given_bytes(p, n_tokens));
    w.scratch = cg_arena_take(arena, most);
    return w;
}

size_t cg_klt_limit_scratch_bytes(const cg_profile *p, uint32_t n_tokens)
{
    cg_arena arena = {0};
    (void)take_given_work(&arena, p, n_tokens);
    return arena.used_bytes;
}

uint64_t cg_klt_limit_given(const cg_encoding *encoding, const cg_symbols symbols[CG_N_LEVELS],
                            void *scratch)
{
    const cg_profile *p = encoding->heads->profile;
    const cg_analysis *joint = cg_analysis_of(p, p->joint, 0);
    cg_arena arena = {scratch, 0};
    const given_work w = take_given_work(&arena, p, encoding->heads->n_tokens);
    uint64_t n_halved, n_saturated = 0, n_ends;
    do {
        n_halved = n_ends = 0;
        /* Nested, a row that is halved is another one at each level: back to the first. */
        for (unsigned level = CG_L1; level < CG_N_LEVELS && n_halved == 0; level++) {
            const size_t n_rows = symbols[level].n_rows;
            if (!cg_encoding_has(encoding, level) || are_in_reach(joint, level, &symbols[level]))
                continue;
            cg_klt_give(p, level, &symbols[level], w.scratch, w.given);
            for (size_t r = 0; r < CG_DCT * n_rows; r++) {
                const unsigned f = (unsigned)(r / n_rows);
                if (!sums_fit(p, level, f, w.given + r * p->joint->n_channels, &n_ends))
                    n_halved += halve_row(encoding, symbols, level, f, r % n_rows);
            }
        }
        n_saturated += n_halved;
    } while (n_halved > 0);
    return n_saturated + n_ends;
}
