#include "codec/symbols.h"

#include "codec/arena.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Strips of a matrix, at most: a run of columns that is cut in two, those that refine coarse ones
 * and the rest, may have one strip more. */
static size_t most_strips(const cg_level_columns *columns)
{
    return columns->n_strips + CG_DCT;
}

size_t cg_symbols_bytes(const cg_level_columns *columns, size_t n_rows)
{
    cg_arena arena = {0};
    (void)cg_arena_take(&arena, columns->n_columns * n_rows * sizeof(int16_t));
    (void)cg_arena_take(&arena, most_strips(columns) * sizeof(cg_rans_strip));
    return arena.used_bytes;
}

cg_symbols cg_symbols_lay(const cg_level_columns *columns, const cg_symbols *coarse,
                          const cg_rans_run *runs, size_t n_runs, void *memory)
{
    const size_t n_rows = cg_rans_n_rows(runs, n_runs);
    cg_symbols symbols = {.columns = columns, .n_rows = n_rows, .runs = runs, .n_runs = n_runs};
    cg_arena arena = {memory, 0};
    int16_t *cells = cg_arena_take(&arena, columns->n_columns * n_rows * sizeof *cells);
    symbols.strips = cg_arena_take(&arena, most_strips(columns) * sizeof *symbols.strips);
    for (unsigned f = 0; f < CG_DCT; f++) {
        const uint32_t n_active = columns->n_active[f],
                       n_coarse = coarse != NULL ? coarse->columns->n_active[f] : 0;
        /* The frequencies lie one behind the other; each is a matrix for itself, with rows of
         * n_active cells. */
        symbols.cells[f] = cells;
        for (uint32_t c = 0, n; c < n_active; c += n) {
            /* Strips of columns that the coarser level has, too, end where its columns do: in a
             * strip all cells are refined, or none. FORMAT.md, "A level given the next coarser
             * one". */
            const uint32_t end = c < n_coarse ? n_coarse : n_active;
            n = end - c < CG_RANS_LANES ? end - c : CG_RANS_LANES;
            symbols.strips[symbols.n_strips++] =
                (cg_rans_strip){.cells = cells + c,
                                .row_stride = n_active,
                                .lane_class = columns->column_class[f] + c,
                                .n_lanes = n,
                                .coarse = c < n_coarse ? coarse->cells[f] + c : NULL,
                                .coarse_stride = n_coarse};
        }
        cells += n_active * n_rows;
    }
    return symbols;
}

cg_status cg_symbols_take(const cg_profile *profile, const cg_symbols *symbols, cg_cursor *in)
{
    size_t used_bytes;
    const cg_status status = cg_rans_decode(
        profile->classes, symbols->strips, symbols->n_strips, symbols->runs, symbols->n_runs,
        cg_profile_align(profile), in->at, in->left_bytes, &used_bytes);
    if (status == CG_OK)
        (void)cg_cursor_skip(in, used_bytes);
    return status;
}

cg_status cg_symbols_decode(const cg_profile *profile, const cg_symbols *symbols, cg_coded src)
{
    cg_cursor in = {src.bytes, src.n_bytes};
    const cg_status status = cg_symbols_take(profile, symbols, &in);
    return status == CG_OK && in.left_bytes > 0 ? CG_ERR_CORRUPT : status;
}

uint8_t *cg_symbols_code(const cg_profile *profile, const cg_symbols *symbols, cg_coded head,
                         unsigned stream_percent, size_t *n_bytes_out)
{
    const uint64_t bits = cg_rans_estimate_bits(profile->classes, symbols->strips,
                                                symbols->n_strips, symbols->runs, symbols->n_runs);
    const size_t n_streams =
        cg_rans_choose_streams(bits, symbols->n_strips, symbols->n_rows, stream_percent);
    const size_t bound_bytes =
        cg_rans_bound_bytes(symbols->strips, symbols->n_strips, symbols->n_rows, n_streams);
    /* Head, result, and the words on their way there. A head ends at a multiple of the alignment,
     * so what is aligned from the start of the matrix is aligned in the section, too. */
    uint8_t *buffer = malloc(head.n_bytes + 2 * bound_bytes);
    if (buffer == NULL)
        return NULL;
    uint8_t *const matrix = buffer + head.n_bytes;
    if (head.n_bytes > 0) /* memcpy's pointer must not be NULL */
        memcpy(buffer, head.bytes, head.n_bytes);
    *n_bytes_out = head.n_bytes + cg_rans_encode(profile->classes, symbols->strips,
                                                 symbols->n_strips, symbols->runs, symbols->n_runs,
                                                 n_streams, cg_profile_align(profile), matrix,
                                                 bound_bytes, matrix + bound_bytes);
    /* The bound is several times the result. Where shrinking fails, the large block is as good. */
    uint8_t *fitted = realloc(buffer, *n_bytes_out);
    return fitted != NULL ? fitted : buffer;
}

bool cg_symbols_are_coded_as(const cg_profile *profile, const cg_symbols *symbols,
                             const cg_symbols *coarse, cg_coded src)
{
    void *memory =
        aligned_alloc(CG_ARENA_ALIGN, cg_symbols_bytes(symbols->columns, symbols->n_rows));
    if (memory == NULL)
        return false;
    const cg_symbols decoded =
        cg_symbols_lay(symbols->columns, coarse, symbols->runs, symbols->n_runs, memory);
    /* Frequencies lie one behind the other. */
    const bool are = cg_symbols_decode(profile, &decoded, src) == CG_OK &&
                     memcmp(decoded.cells[0], symbols->cells[0],
                            symbols->columns->n_columns * symbols->n_rows * sizeof(int16_t)) == 0;
    free(memory);
    return are;
}

uint64_t cg_symbols_n_saturated(const int16_t *cells, size_t n_cells)
{
    int16_t most = 0, least = 0; /* in a loop that vectorizes: there are hardly ever some */
    for (size_t c = 0; c < n_cells; c++) {
        most = cells[c] > most ? cells[c] : most;
        least = cells[c] < least ? cells[c] : least;
    }
    uint64_t n = 0;
    for (size_t c = 0; c < n_cells && (most >= INT16_MAX || least <= -INT16_MAX); c++)
        n += cells[c] >= INT16_MAX || cells[c] <= -INT16_MAX;
    return n;
}

void cg_symbols_coarsen(const cg_symbols *fine, float ratio, const cg_symbols *coarse)
{
    for (unsigned f = 0; f < CG_DCT; f++) {
        const size_t n_fine = fine->columns->n_active[f], n_coarse = coarse->columns->n_active[f];
        for (size_t row = 0; row < coarse->n_rows; row++) {
            for (size_t c = 0; c < n_coarse; c++) {
                /* Where profiles do not nest, a coarser level may have columns that the finer one
                 * lacks. */
                const float q = c < n_fine ? (float)fine->cells[f][row * n_fine + c] * ratio : 0;
                float rounded = q < 0 ? ceilf(q - 0.5f) : floorf(q + 0.5f);
                /* In this order a NaN, of a hostile ratio, becomes a number. */
                rounded = rounded < 32767.0f ? rounded : 32767.0f;
                coarse->cells[f][row * n_coarse + c] =
                    (int16_t)(rounded > -32767.0f ? rounded : -32767.0f);
            }
        }
    }
}

cg_status cg_symbols_transcode(const cg_profile *profile, const cg_level_columns *fine,
                               const cg_level_columns *coarse, const cg_rans_run *runs,
                               size_t n_runs, float ratio, cg_coded head, cg_coded src,
                               uint8_t **bytes_out, size_t *n_bytes_out)
{
    const size_t n_rows = cg_rans_n_rows(runs, n_runs), fine_bytes = cg_symbols_bytes(fine, n_rows);
    uint8_t *memory = aligned_alloc(CG_ARENA_ALIGN,
                                    fine_bytes + cg_symbols_bytes(coarse, n_rows) + CG_ARENA_ALIGN);
    if (memory == NULL)
        return CG_ERR_NO_MEMORY;
    const cg_symbols from = cg_symbols_lay(fine, NULL, runs, n_runs, memory),
                     to = cg_symbols_lay(coarse, NULL, runs, n_runs, memory + fine_bytes);
    cg_status status = cg_symbols_decode(profile, &from, src);
    if (status == CG_OK) {
        cg_symbols_coarsen(&from, ratio, &to);
        *bytes_out = cg_symbols_code(profile, &to, head, CG_RANS_STREAM_PERCENT, n_bytes_out);
        status = *bytes_out != NULL ? CG_OK : CG_ERR_NO_MEMORY;
    }
    free(memory);
    return status;
}
