#include "codec/klt_quantize.h"

#include "codec/analysis.h"

#include <math.h>

/* What keeps a decoder's sums of a row of symbols within 32 bits. */
typedef struct row_limits {
    const uint64_t *most_before; /* cg_bands's, of the first cell; NULL in version 1, whose sums are
                                    floats */
    unsigned sum_bits;
    const cg_analysis *joint; /* NULL, or the joint matrix's: what it gives is summed up again */
} row_limits;

static row_limits limits_of(const cg_profile *p, const cg_group *group, unsigned matrix)
{
    const cg_bands *bands = &group->bands[matrix];
    if (p->version == 1)
        return (row_limits){0};
    /* Half of a group's sums is for its own components, half for the shared ones. */
    return (row_limits){.most_before = bands->most_before + bands->n_shared,
                        .sum_bits = bands->n_shared > 0 ? 30 : 31,
                        .joint = group == p->joint ? cg_analysis_of(p, group, matrix) : NULL};
}

/* Whether a row of the joint matrix's symbols stays within reach. */
static bool is_in_reach(const cg_analysis *joint, const int16_t *cells, size_t n_cells)
{
    float reach = 0;
    for (size_t first = 0; first < n_cells; first += CG_BAND_COMPONENTS) {
        const size_t left = n_cells - first,
                     n = left < CG_BAND_COMPONENTS ? left : (size_t)CG_BAND_COMPONENTS;
        int64_t square = 0;
        for (size_t c = first; c < first + n; c++)
            square += (int32_t)cells[c] * cells[c];
        reach += joint->band_reach[first / CG_BAND_COMPONENTS] * sqrtf((float)square);
    }
    return reach <= joint->most_reach;
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
    return limits->joint == NULL || is_in_reach(limits->joint, cells, n_cells);
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
    /* The cheap bound first: few rows of groups come to the exact one below. */
    const double most = (double)(limits->most_before[n_cells] - limits->most_before[0]);
    if (limits->joint == NULL && most_symbol * most < (double)(1u << limits->sum_bits))
        return n_saturated;
    while (!is_within(limits, cells, n_cells)) {
        for (size_t c = 0; c < n_cells; c++) {
            n_saturated += cells[c] != 0;
            cells[c] = (int16_t)(cells[c] / 2);
        }
    }
    return n_saturated;
}

uint64_t cg_klt_quantize(const cg_encoding *encoding, const cg_group *group, unsigned matrix,
                         unsigned f, const float *coef, size_t coef_stride,
                         const cg_symbols symbols[CG_N_LEVELS])
{
    const cg_profile *p = encoding->heads->profile;
    const row_limits limits = limits_of(p, group, matrix);
    uint64_t n_saturated = 0;
    /* The finest first: nested, a coarser level is made of its symbols. */
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++) {
        if (!cg_encoding_has(encoding, level))
            continue;
        const cg_symbols *own = &symbols[level], *finer = &symbols[level - 1];
        const size_t n_active = own->columns->n_active[f];
        const bool has_finer =
            encoding->is_nested && level > CG_L1 && cg_encoding_has(encoding, level - 1);
        for (size_t b = 0; b < own->n_rows; b++) {
            int16_t *cells = own->cells[f] + b * n_active;
            if (has_finer) { /* no symbol is larger: its sums are smaller */
                p->kernels->coarsen(finer->cells[f] + b * finer->columns->n_active[f], n_active,
                                    cells);
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
