/* The inverse KLT of profiles of version 2: sums of integers, the same in any order and on every
 * processor. Where a CPU adds up four products of 8 bits at once, neighbouring components make a
 * quad, and quads of zeros are left out. Matrix units take all, zeros too. What is larger than 8
 * bits is cut into digits: elements of the basis when it is laid out, symbols when they are listed.
 * Where a CPU takes pairs of 16 bits, symbols need no digits. With a joint matrix, what that gives
 * stands in the place of the shared components' symbols; the same product makes it. */
#include "codec/klt_synthesis.h"

#include <string.h>

enum { SLAB_COMPONENTS = CG_SLAB_LINES * CG_QUAD_COMPONENTS };

/* Where one row of symbols (a block's frequency) lies in a slab; or of numbers that are given,
 * whose slabs are the first ones. A frequency has its first so many components; of a slab behind
 * those it has none. */
typedef struct slab_cells {
    const int16_t *cells;
    size_t n_cells;
    size_t row_stride; /* to the next block's */
} slab_cells;

static slab_cells cells_of(const cg_synthesis *s, const cg_band_slab *slab, unsigned f, size_t b)
{
    const cg_profile *p = s->profile;
    const uint32_t n_shared = s->group->bands[s->matrix].n_shared;
    const bool is_given = slab->first_component < n_shared;
    const size_t n = is_given ? s->n_given[f] : s->symbols->columns->n_active[f],
                 first = slab->first_component - (is_given ? 0 : n_shared),
                 left = n > first ? n - first : 0;
    slab_cells in = {.n_cells = left < slab->n_components ? left : slab->n_components};
    if (is_given) {
        in.row_stride = p->joint->n_channels;
        in.cells = s->given + (f * s->symbols->n_rows + b) * in.row_stride +
                   (size_t)(s->group - p->groups) * n_shared + first;
    } else {
        in.row_stride = n;
        in.cells = s->symbols->cells[f] + b * n + n - left;
    }
    return in;
}

/* Cuts symbols into signed digits of so many bits, and lists those: rows_out[CG_SYMBOL_DIGITS],
 * the lowest first. Three digits hold any symbol, so the time for large ones is bounded. Returns
 * where the quads end. */
static cg_quad *list_digits(const cg_klt_inverse *inverse, slab_cells in, cg_quad *quads,
                            cg_quad_row *rows_out)
{
    int rest[SLAB_COMPONENTS];
    const int half = 1 << (inverse->digit_bits - 1);
    for (size_t c = 0; c < in.n_cells; c++)
        rest[c] = in.cells[c];
    for (unsigned d = 0; d < CG_SYMBOL_DIGITS; d++) {
        int16_t digits[SLAB_COMPONENTS];
        for (size_t c = 0; c < in.n_cells; c++) {
            /* Rounded, not cut off: what is left is a digit from -half to half - 1. */
            const int higher = (rest[c] + half) >> inverse->digit_bits;
            digits[c] = (int16_t)(rest[c] - higher * 2 * half);
            rest[c] = higher;
        }
        inverse->list_quads(digits, in.n_cells, quads, &rows_out[d]);
        quads += rows_out[d].n_quads;
    }
    return quads;
}

/* Lists a row's quads of zeros, too, where they are few: see takes_whole_rows. quads, where the
 * others are, has room for all. */
static void list_zeros(slab_cells in, bool is_wide, cg_quad *quads, cg_quad_row *row)
{
    const size_t each = is_wide ? 2 : CG_QUAD_COMPONENTS, n = (in.n_cells + each - 1) / each;
    uint32_t from = row->n_quads;
    if (from == n || 4 * (size_t)from < 3 * n) /* of few: more products than loads saved */
        return;
    /* From the end: quads move up, by the zeros before them. */
    for (size_t at = n; at > from; at--) {
        const bool is_listed = from > 0 && quads[from - 1].index == at - 1;
        quads[at - 1] = is_listed ? quads[--from] : (cg_quad){.index = (uint32_t)(at - 1)};
    }
    row->n_quads = (uint32_t)n;
}

/* Symbols of a batch of n blocks as quads: a slab's rows together, [f][b]; and, for rows with
 * symbols of more than one digit, the others behind all slabs. */
static void list_batch(const cg_synthesis *s, size_t batch, size_t n)
{
    const cg_klt_inverse *inverse = s->profile->kernels->inverse;
    const cg_klt_integers *integers = s->profile->kernels->integers;
    const cg_bands *bands = &s->group->bands[s->matrix];
    cg_quad *quads = s->quads;
    cg_quad_row *row = s->quad_rows;
    cg_large_row *large = s->large_rows;
    for (uint32_t i = 0; i < bands->n_slabs; i++) {
        const cg_band_slab *slab = &bands->slabs[i];
        for (size_t r = 0; r < CG_DCT * n; r++, row++) {
            const slab_cells in = cells_of(s, slab, (unsigned)(r / n), batch + r % n);
            (slab->is_wide ? integers->list_pairs : inverse->list_quads)(in.cells, in.n_cells,
                                                                         quads, row);
            if (row->limit == INT32_MAX) {
                if (integers->takes_whole_rows)
                    list_zeros(in, slab->is_wide, quads, row);
                quads += row->n_quads;
                continue;
            }
            cg_quad_row digits[CG_SYMBOL_DIGITS];
            quads = list_digits(inverse, in, quads, digits);
            *row = digits[0];
            for (unsigned d = 1; d < CG_SYMBOL_DIGITS; d++) {
                if (digits[d].n_quads > 0)
                    *large++ = (cg_large_row){digits[d], i, (uint32_t)r, d * inverse->digit_bits};
            }
        }
    }
    large->slab = UINT32_MAX; /* the end */
}

/* The same as digits in tiles. */
static void tile_batch(const cg_synthesis *s, size_t batch, size_t n)
{
    const cg_klt_integers *integers = s->profile->kernels->integers;
    const cg_bands *bands = &s->group->bands[s->matrix];
    int8_t *tiles = s->digit_tiles;
    for (uint32_t i = 0; i < bands->n_slabs * CG_DCT; i++) {
        const unsigned f = i % CG_DCT;
        const slab_cells in = cells_of(s, &bands->slabs[i / CG_DCT], f, batch);
        tiles = integers->tile_digits(in.cells, in.row_stride, n, in.n_cells, tiles,
                                      s->digits + i * CG_SYMBOL_DIGITS);
    }
}

/* Y of a batch of n_blocks blocks in one panel, of tiles. Slabs outside, as below. */
static void multiply_batch(const cg_synthesis *s, size_t n_blocks, const uint8_t *panel,
                           size_t n_channels, int32_t *y)
{
    const cg_klt_integers *integers = s->profile->kernels->integers;
    const cg_bands *bands = &s->group->bands[s->matrix];
    for (uint32_t i = 0; i < bands->n_slabs * CG_DCT; i++) {
        const cg_band_slab *slab = &bands->slabs[i / CG_DCT];
        const cg_digit_tiles *digits = s->digits + i * CG_SYMBOL_DIGITS;
        for (unsigned d = 0; d < CG_SYMBOL_DIGITS; d++) {
            /* The first product of a frequency overwrites its sums instead of adding to them. So it
             * is made even where there are no symbols. */
            const bool is_first = i < CG_DCT && d == 0;
            if (is_first || digits[d].n_tiles > 0)
                integers->multiply_tiles(panel + slab->first_line * 4 * n_channels, slab->is_wide,
                                         &digits[d], n_blocks, (unsigned)n_channels / 16,
                                         cg_bands_shift(bands, slab, s->level) + d * CG_DIGIT_BITS,
                                         is_first, y + i % CG_DCT * s->f_stride, s->y_stride);
        }
    }
}

/* Y of a batch of n_blocks blocks in one panel. Slabs outside, rows inside: a slab stays in the
 * first cache for all rows. */
static void accumulate_batch(const cg_synthesis *s, size_t n_blocks, const uint8_t *panel,
                             size_t n_channels, int32_t *y)
{
    const cg_klt_integers *integers = s->profile->kernels->integers;
    const cg_bands *bands = &s->group->bands[s->matrix];
    const cg_large_row *large = s->large_rows;
    const unsigned n_sixteens = (unsigned)n_channels / 16;
    for (uint32_t i = 0; i < bands->n_slabs; i++) {
        const cg_band_slab *slab = &bands->slabs[i];
        const unsigned shift = cg_bands_shift(bands, slab, s->level);
        const cg_quad_row *rows = s->quad_rows + i * CG_DCT * n_blocks;
        const uint8_t *lines = panel + slab->first_line * 4 * n_channels;
        for (unsigned f = 0; f < CG_DCT; f++) {
            if (i == 0 || cells_of(s, slab, f, 0).n_cells > 0)
                (slab->is_wide ? integers->accumulate_words : integers->accumulate_bytes)(
                    lines, rows + f * n_blocks, n_blocks, n_sixteens, shift, i == 0,
                    y + f * s->f_stride, s->y_stride);
        }
        for (; large->slab == i; large++)
            integers->accumulate_bytes(
                lines, &large->row, 1, n_sixteens, shift + large->shift, false,
                y + large->r / n_blocks * s->f_stride + large->r % n_blocks * s->y_stride,
                s->y_stride);
    }
}

/* The same without quads: a product for each symbol that is not zero. */
static void accumulate_cells(const cg_synthesis *s, size_t batch, size_t n_blocks, size_t unit)
{
    const cg_klt_integers *integers = s->profile->kernels->integers;
    const cg_bands *bands = &s->group->bands[s->matrix];
    for (size_t r = 0; r < CG_DCT * n_blocks; r++) {
        const size_t f = r / n_blocks, b = r % n_blocks;
        int32_t *row = s->sums + f * s->f_stride + b * s->y_stride;
        memset(row, 0, s->y_stride * sizeof *row);
        for (const cg_band_slab *slab = bands->slabs; slab < bands->slabs + bands->n_slabs;
             slab++) {
            const slab_cells in = cells_of(s, slab, (unsigned)f, batch + b);
            integers->accumulate_elements(
                cg_bands_elements(&s->profile->layout, bands, unit, slab, 0), slab->is_wide,
                in.cells, in.n_cells, cg_bands_shift(bands, slab, s->level), s->y_stride, row);
        }
    }
}

/* A batch's sums of the unit of channels that begins at first. */
static void accumulate_unit(const cg_synthesis *s, size_t batch, size_t n_blocks, uint32_t first)
{
    const cg_basis_layout *layout = &s->profile->layout;
    const cg_bands *bands = &s->group->bands[s->matrix];
    const size_t unit = first / layout->unit_channels;
    if (bands->elements != NULL) {
        accumulate_cells(s, batch, n_blocks, unit);
        return;
    }
    if (bands->n_slabs == 0) /* a basis of nothing */
        memset(s->sums, 0, CG_DCT * s->f_stride * sizeof *s->sums);
    for (size_t at = 0; at < s->y_stride; at += CG_BAND_CHANNELS)
        (layout->is_tiled ? multiply_batch
                          : accumulate_batch)(s, n_blocks, cg_bands_panel(layout, bands, unit, at),
                                              cg_bands_panel_channels(layout, at), s->sums + at);
}

/* A batch's elements of n_unit channels from first on. */
static void finish_batch(const cg_synthesis *s, size_t batch, size_t n_blocks, uint32_t first,
                         uint32_t n_unit)
{
    const cg_profile *p = s->profile;
    const float unit = cg_bands_unit(&s->group->bands[s->matrix], s->level);
    for (size_t b = 0; b < n_blocks; b++) {
        /* The block's step factor goes into D', too. */
        const float factor = CG_STEP_FACTORS[s->order->factor_index[batch + b]];
        p->kernels->exact->inverse_dct(s->sums + b * s->y_stride, s->f_stride, unit * factor,
                                       s->scale + first, s->mean + first, n_unit, s->x,
                                       p->layout.unit_channels);
        cg_klt_finish_unit(s, first, n_unit, batch + b);
    }
}

/* A batch's numbers of n_unit channels of the joint matrix from first on. */
static void give_batch(const cg_synthesis *s, size_t batch, size_t n_blocks, uint32_t first,
                       uint32_t n_unit)
{
    const cg_profile *p = s->profile;
    const unsigned k = p->joint->bands[0].unit_bits - p->fraction_bits[s->level];
    for (size_t r = 0; r < CG_DCT * n_blocks; r++) {
        const size_t f = r / n_blocks, b = r % n_blocks, row = f * s->symbols->n_rows + batch + b;
        p->kernels->exact->give(s->sums + f * s->f_stride + b * s->y_stride, k, n_unit,
                                s->given_out + row * p->joint->n_channels + first);
    }
}

/* Batches of blocks outside: their symbols are listed once for all channels. */
void cg_klt_exact(const cg_synthesis *s)
{
    const cg_basis_layout *layout = &s->profile->layout;
    const uint32_t n_channels = s->group->n_channels, unit = layout->unit_channels;
    const size_t n_blocks = s->symbols->n_rows;
    for (size_t batch = 0; batch < n_blocks; batch += CG_TILE) {
        const size_t n = n_blocks - batch < CG_TILE ? n_blocks - batch : CG_TILE;
        if (layout->is_tiled)
            tile_batch(s, batch, n);
        else if (layout->has_quads)
            list_batch(s, batch, n);
        for (uint32_t first = 0; first < n_channels; first += unit) {
            accumulate_unit(s, batch, n, first);
            (s->given_out != NULL ? give_batch : finish_batch)(
                s, batch, n, first, n_channels - first < unit ? n_channels - first : unit);
        }
    }
}
