/* What the ways from symbols to elements share, and the two that work in floats: lists and tiles.
 * Quads and integers have files of their own. */
#include "codec/klt_synthesis.h"

void cg_klt_finish_unit(const cg_synthesis *s, uint32_t first, uint32_t n_channels, size_t row)
{
    const cg_heads *heads = s->heads;
    const cg_geometry *g = &heads->profile->geometry;
    const uint32_t first_head = first / g->head_dim, n_heads = n_channels / g->head_dim;
    for (uint32_t i = 0; i < CG_DCT; i++) {
        /* A chunk's last block may reach past its end. */
        const size_t t = (size_t)s->order->block[row] * CG_DCT + i;
        if (t >= heads->n_tokens)
            break;
        /* Those of one slice, which are neighbours, at once. */
        for (uint32_t h = 0, n; h < n_heads; h += n) {
            const uint32_t i_slice = (first_head + h) / g->n_kv_heads,
                           head = (first_head + h) % g->n_kv_heads, n_left = g->n_kv_heads - head;
            const cg_slice slice = cg_group_slice(s->group, s->matrix, i_slice);
            float *values =
                s->x + (size_t)i * heads->profile->layout.unit_channels + (size_t)h * g->head_dim;
            n = n_heads - h < n_left ? n_heads - h : n_left;
            for (uint32_t k = 0; k < n && slice.plane == CG_K; k++) /* V is not rotated */
                cg_heads_rotate(heads, slice.layer, t, values + (size_t)k * g->head_dim);
            cg_heads_store(heads, values, n, s->out, cg_heads_element(heads, i_slice, t, head));
        }
    }
}

/* ---- lists: a float product for each symbol that is not zero ---- */

/* All symbols that are not zero, in one list. Where a block's frequency ends in it, the next
 * begins. */
static void list_symbols(const cg_synthesis *s)
{
    uint32_t n_list = 0;
    for (size_t b = 0; b < s->symbols->n_rows; b++) {
        for (unsigned f = 0; f < CG_DCT; f++) {
            const size_t n_active = s->symbols->columns->n_active[f];
            n_list += (uint32_t)s->profile->kernels->inverse->list_nonzero(
                s->symbols->cells[f] + b * n_active, n_active, s->list + n_list);
            s->list_end[b * CG_DCT + f] = n_list;
        }
    }
}

/* Panels outside, blocks inside: a panel's basis stays in the cache for all blocks. */
void cg_klt_lists(const cg_synthesis *s)
{
    const cg_profile *p = s->profile;
    const cg_group *group = s->group;
    const cg_basis *basis = &group->basis[s->matrix];
    const uint32_t unit = p->layout.unit_channels;
    list_symbols(s);
    for (uint32_t first = 0; first < group->n_channels; first += unit) {
        const uint32_t n_unit = group->n_channels - first < unit ? group->n_channels - first : unit;
        for (size_t b = 0; b < s->symbols->n_rows; b++) {
            for (uint32_t at = 0; at < n_unit; at += p->layout.panel_channels) {
                const uint32_t n =
                    n_unit - at < p->layout.panel_channels ? n_unit - at : p->layout.panel_channels;
                const uint32_t *panel =
                    basis->panels + (size_t)((first + at) / p->layout.panel_channels) *
                                        basis->n_components * (CG_PANEL_CHANNELS / 2);
                /* A list begins where the one before it ends. */
                for (unsigned f = 0; f < CG_DCT; f++) {
                    const size_t i = b * CG_DCT + f, begin = i > 0 ? s->list_end[i - 1] : 0;
                    p->kernels->inverse->accumulate(panel, s->list + begin, s->list_end[i] - begin,
                                                    (n + 31) / 32, s->y + f * CG_PANEL_CHANNELS);
                }
                p->kernels->inverse_dct(s->y, CG_PANEL_CHANNELS, s->scale + first + at,
                                        s->mean + first + at, n, s->x + at, unit);
            }
            cg_klt_finish_unit(s, first, n_unit, b);
        }
    }
}

/* ---- tiles: a dense product on matrix units, which take zeros faster than others skip them ----
 */

/* Batches of blocks outside: their symbols stay in the cache for all channels. */
void cg_klt_tiles(const cg_synthesis *s)
{
    const cg_profile *p = s->profile;
    const cg_group *group = s->group;
    const cg_basis *basis = &group->basis[s->matrix];
    const size_t n_blocks = s->symbols->n_rows;
    const size_t panel_elements =
        (size_t)((basis->n_components + CG_TILE - 1) / CG_TILE) * CG_TILE * CG_TILE;
    const uint32_t unit = p->layout.unit_channels;
    for (size_t batch = 0; batch < n_blocks; batch += CG_TILE) {
        const size_t n = n_blocks - batch < CG_TILE ? n_blocks - batch : CG_TILE;
        cg_tiled_symbols tiled[CG_DCT];
        for (unsigned f = 0; f < CG_DCT; f++) {
            const size_t n_active = s->symbols->columns->n_active[f];
            tiled[f].tiles = s->tiles[f];
            tiled[f].tile_components = s->tile_components[f];
            tiled[f].n_tiles =
                p->kernels->inverse->tile_symbols(s->symbols->cells[f] + batch * n_active, n,
                                                  n_active, s->tiles[f], s->tile_components[f]);
        }
        for (uint32_t first = 0; first < group->n_channels; first += unit) {
            const uint32_t n_unit =
                group->n_channels - first < unit ? group->n_channels - first : unit;
            for (uint32_t at = 0; at < n_unit; at += CG_TILE)
                p->kernels->inverse->synthesize(
                    tiled, n, basis->tiles + (first + at) / CG_TILE * panel_elements, s->y + at,
                    (size_t)CG_TILE * unit, unit);
            for (size_t b = 0; b < n; b++) {
                p->kernels->inverse_dct(s->y + b * unit, (size_t)CG_TILE * unit, s->scale + first,
                                        s->mean + first, n_unit, s->x, unit);
                cg_klt_finish_unit(s, first, n_unit, batch + b);
            }
        }
    }
}
