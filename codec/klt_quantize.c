#include "codec/klt_quantize.h"

/* Makes a row of symbols small enough for its sums to stay within 32 bits. Returns how many were
 * too large, for that or for 16 bits. bands: NULL in version 1, whose sums are floats. */
static uint64_t keep_in_range(const cg_bands *bands, int16_t *cells, size_t n_cells)
{
    uint64_t n_saturated = cg_symbols_n_saturated(cells, n_cells);
    int16_t most_symbol = 0;
    for (size_t c = 0; c < n_cells; c++) {
        const int16_t symbol = cells[c] < 0 ? (int16_t)-cells[c] : cells[c];
        most_symbol = symbol > most_symbol ? symbol : most_symbol;
    }
    /* The cheap bound first: few rows come to the exact one below. */
    if (bands == NULL || (uint64_t)most_symbol * bands->most_before[n_cells] >> 31 == 0)
        return n_saturated;
    for (;;) {
        uint64_t sum = 0;
        for (size_t c = 0; c < n_cells; c++) {
            const uint32_t most = (uint32_t)(bands->most_before[c + 1] - bands->most_before[c]);
            const uint32_t symbol = (uint32_t)(cells[c] < 0 ? -cells[c] : cells[c]);
            sum += (uint64_t)symbol * most;
        }
        if (sum >> 31 == 0)
            return n_saturated;
        for (size_t c = 0; c < n_cells; c++) {
            n_saturated += cells[c] != 0;
            cells[c] = (int16_t)(cells[c] / 2);
        }
    }
}

uint64_t cg_klt_quantize(const cg_encoding *encoding, const cg_group *group, unsigned matrix,
                         unsigned f, const float *coef, size_t coef_stride,
                         const cg_symbols symbols[CG_N_LEVELS])
{
    const cg_profile *p = encoding->heads->profile;
    const cg_bands *bands = p->version > 1 ? &group->bands[matrix] : NULL;
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
            if (has_finer) { /* its sums are smaller */
                p->kernels->coarsen(finer->cells[f] + b * finer->columns->n_active[f], n_active,
                                    cells);
                continue;
            }
            if (coef != NULL)
                p->kernels->quantize(coef + b * coef_stride, n_active,
                                     1.0f / p->step[level - 1][matrix], cells);
            n_saturated += keep_in_range(bands, cells, n_active);
        }
    }
    return n_saturated;
}
