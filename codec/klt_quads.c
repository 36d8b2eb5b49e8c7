/* The inverse KLT in integers of 8 bits: symbols and, cut into limbs, the elements of the basis. A
 * CPU adds up four such products at once in each lane of 32 bits, so four neighbouring components
 * are a quad; quads of zeros are left out. */
#include "codec/klt_synthesis.h"

#include <string.h>

/* What is left of a symbol that a quad holds up to the limit. */
static int beyond(int symbol, int limit)
{
    return symbol > limit ? symbol - limit : symbol < -limit ? symbol + limit : 0;
}

/* What the row's quads lack of large symbols becomes more quads of the same components, while there
 * is room. */
static void list_large(const cg_kernels *kernels, const int16_t *cells, size_t n_cells,
                       cg_quad *quads, const cg_quad *end, cg_quad_row *row)
{
    int16_t rest[CG_SLAB_QUADS * CG_QUAD_COMPONENTS];
    while (row->limit != INT32_MAX && end - (quads + row->n_quads) >= CG_SLAB_QUADS) {
        cg_quad_row more;
        for (size_t c = 0; c < n_cells; c++)
            rest[c] = (int16_t)beyond(cells[c], row->limit);
        kernels->inverse->list_quads(rest, n_cells, quads + row->n_quads, &more);
        row->n_quads += more.n_quads;
        row->sum += more.sum;
        row->limit = more.limit == INT32_MAX ? INT32_MAX : row->limit + more.limit;
    }
}

/* The quads of a row that are in limb_quads, to quads_out. */
static cg_quad_row list_limb(const cg_quad_row *row, uint32_t limb_quads, cg_quad *quads_out)
{
    cg_quad_row limb = {.quads = quads_out, .limit = row->limit};
    for (const cg_quad *quad = row->quads; quad < row->quads + row->n_quads; quad++) {
        /* Written in any case; the next one overwrites what the limb has not. So there must be room
         * for one more than are kept. */
        quads_out[limb.n_quads] = *quad;
        if ((limb_quads >> quad->index & 1) != 0) {
            limb.n_quads++;
            limb.sum += quad->symbols[0] + quad->symbols[1] + quad->symbols[2] + quad->symbols[3];
        }
    }
    return limb;
}

/* Symbols of a batch of n blocks as quads, a slab's and limb's rows together. */
static void list_batch(const cg_synthesis *s, size_t batch, size_t n)
{
    const cg_kernels *kernels = s->profile->kernels;
    const cg_basis *basis = &s->group->basis[s->matrix];
    cg_quad *quads = s->quads, *end = quads + cg_klt_most_quads(s->symbols->columns, n);
    cg_quad_row *row = s->quad_rows;
    const size_t n_rows = CG_DCT * n;
    for (const cg_slab *slab = basis->slabs; slab < basis->slabs + basis->n_slabs; slab++) {
        const size_t first = slab->first_component,
                     most = (size_t)slab->n_quads * CG_QUAD_COMPONENTS;
        const uint32_t all = (uint32_t)((1ull << slab->n_quads) - 1); /* n_quads may be 32 */
        for (size_t r = 0; r < n_rows; r++, row++) {
            const size_t f = r / n, b = r % n, n_active = s->symbols->columns->n_active[f];
            const size_t left = n_active > first ? n_active - first : 0,
                         n_cells = left < most ? left : most;
            /* n_active - left is first; of a slab behind all columns it is the row's end. */
            const int16_t *cells = s->symbols->cells[f] + (batch + b) * n_active + n_active - left;
            cg_quad_row whole;
            kernels->inverse->list_quads(cells, n_cells, quads, &whole);
            /* end is where the room for quads of large symbols ends: it moves on by what rows take
             * for themselves. */
            end += (n_cells + CG_QUAD_COMPONENTS - 1) / CG_QUAD_COMPONENTS;
            list_large(kernels, cells, n_cells, quads, end, &whole);
            quads += whole.n_quads;
            for (unsigned limb = 0; limb < CG_MAX_LIMBS; limb++) {
                cg_quad_row *out = row + limb * n_rows;
                *out = whole;
                if (slab->limb_quads[limb] != all && slab->limb_quads[limb] != 0) {
                    *out = list_limb(&whole, slab->limb_quads[limb], quads);
                    quads += out->n_quads;
                    end += out->n_quads;
                }
            }
        }
        row += (CG_MAX_LIMBS - 1) * n_rows;
    }
}

/* What a row's quads lack of symbols beyond their limit, added to y[n]: for hostile or extreme
 * chunks alone, where list_large() has had no room left. Each digit of what is missing, in the base
 * that quads hold, is a row of quads of its own: three hold any symbol, so the time is bounded. */
static void add_large(const cg_kernels *kernels, const cg_quad_row *row, const cg_slab *slab,
                      const uint8_t *panel, const int16_t *cells, size_t n_cells, uint32_t n,
                      float *y)
{
    enum { MOST_CELLS = CG_SLAB_QUADS * CG_QUAD_COMPONENTS };
    const int most = kernels->inverse->quad_limit, base = 2 * most + 1;
    const size_t in_slab = (size_t)slab->n_quads * CG_QUAD_COMPONENTS;
    int rest[MOST_CELLS];
    bool has_more = true;
    n_cells = n_cells < in_slab ? n_cells : in_slab;
    for (size_t c = 0; c < n_cells; c++)
        rest[c] = beyond(cells[c], row->limit);
    for (float factor = 1; has_more; factor *= (float)base) {
        int16_t digits[MOST_CELLS];
        cg_quad quads[CG_SLAB_QUADS + CG_QUAD_SLACK], limb_quads[CG_SLAB_QUADS + 1];
        cg_quad_row whole;
        has_more = false;
        for (size_t c = 0; c < n_cells; c++) {
            const int high = (rest[c] + (rest[c] < 0 ? -most : most)) / base;
            digits[c] = (int16_t)(rest[c] - high * base);
            rest[c] = high;
            has_more |= high != 0;
        }
        kernels->inverse->list_quads(digits, n_cells, quads, &whole);
        for (unsigned limb = 0; limb < CG_MAX_LIMBS; limb++) {
            const cg_quad_row part = list_limb(&whole, slab->limb_quads[limb], limb_quads);
            if (part.n_quads > 0)
                kernels->inverse->accumulate_quads(panel + slab->offset[limb], &part, 1,
                                                   (n + 15) / 16, slab->unit[limb] * factor, false,
                                                   y, 0);
        }
    }
}

/* y[f][b][n] of a batch of n_blocks blocks in one panel. Slabs outside, rows inside: a slab stays
 * in the first cache for all rows. */
static void accumulate_batch(const cg_synthesis *s, size_t batch, size_t n_blocks,
                             const uint8_t *panel, uint32_t n, float *y)
{
    const cg_kernels *kernels = s->profile->kernels;
    const cg_basis *basis = &s->group->basis[s->matrix];
    const uint16_t *n_active = s->symbols->columns->n_active;
    const cg_quad_row *rows = s->quad_rows;
    const size_t y_stride = s->y_stride;
    bool is_first = true;
    for (const cg_slab *slab = basis->slabs; slab < basis->slabs + basis->n_slabs; slab++) {
        for (unsigned limb = 0; limb < CG_MAX_LIMBS; limb++) {
            for (unsigned f = 0; f < CG_DCT && slab->limb_quads[limb] != 0; f++) {
                if (is_first || n_active[f] > slab->first_component)
                    kernels->inverse->accumulate_quads(
                        panel + slab->offset[limb], rows + (limb * CG_DCT + f) * n_blocks, n_blocks,
                        (n + 15) / 16, slab->unit[limb], is_first, y + f * CG_TILE * y_stride,
                        y_stride);
            }
            /* The first limb that has quads overwrites y, for all frequencies; later ones add to
             * it. */
            is_first &= slab->limb_quads[limb] == 0;
        }
        for (size_t r = 0; r < CG_DCT * n_blocks; r++) {
            const size_t f = r / n_blocks, b = r % n_blocks;
            /* Then the slab has cells of the row, and what is left of n_active is not negative. */
            if (rows[r].limit != INT32_MAX)
                add_large(kernels, &rows[r], slab, panel,
                          s->symbols->cells[f] + (batch + b) * n_active[f] + slab->first_component,
                          n_active[f] - slab->first_component, n, y + (f * CG_TILE + b) * y_stride);
        }
        rows += CG_MAX_LIMBS * CG_DCT * n_blocks;
    }
    for (size_t r = 0; r < (size_t)CG_DCT * CG_TILE && is_first; r++) /* a basis of nothing */
        memset(y + r * y_stride, 0, n * sizeof *y);
}

/* Batches of blocks outside: their quads are listed once for all channels. */
void cg_klt_quads(const cg_synthesis *s)
{
    const cg_profile *p = s->profile;
    const cg_group *group = s->group;
    const cg_basis *basis = &group->basis[s->matrix];
    const size_t n_blocks = s->symbols->n_rows;
    const uint32_t unit = p->layout.unit_channels;
    for (size_t batch = 0; batch < n_blocks; batch += CG_TILE) {
        const size_t n = n_blocks - batch < CG_TILE ? n_blocks - batch : CG_TILE;
        list_batch(s, batch, n);
        for (uint32_t first = 0; first < group->n_channels; first += unit) {
            const uint32_t n_unit =
                group->n_channels - first < unit ? group->n_channels - first : unit;
            for (uint32_t at = 0; at < n_unit; at += p->layout.panel_channels) {
                const uint32_t n_panel =
                    n_unit - at < p->layout.panel_channels ? n_unit - at : p->layout.panel_channels;
                accumulate_batch(s, batch, n,
                                 basis->quads +
                                     (first + at) / p->layout.panel_channels * basis->panel_bytes,
                                 n_panel, s->y + at);
            }
            for (size_t b = 0; b < n; b++) {
                p->kernels->inverse_dct(s->y + b * s->y_stride, CG_TILE * s->y_stride,
                                        s->scale + first, s->mean + first, n_unit, s->x, unit);
                cg_klt_finish_unit(s, first, n_unit, batch + b);
            }
        }
    }
}
