#include "codec/lossy.h"

#include "codec/arena.h"
#include "codec/bf16.h"
#include "codec/paper.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

size_t cg_lossy_rotation_elements(const cg_profile *profile, uint32_t n_tokens)
{
    return (size_t)profile->n_ropes * n_tokens * (profile->rotary_dim / 2);
}

void cg_lossy_rotation(const cg_profile *profile, uint32_t first_position, uint32_t n_tokens,
                       float *cosine_out, float *sine_out)
{
    const size_t half = profile->rotary_dim / 2;
    for (size_t row = 0; row < (size_t)profile->n_ropes * n_tokens; row++) {
        const double *inv_freq = profile->inv_freq + row / n_tokens * half;
        for (size_t i = 0; i < half; i++) {
            const double angle = (double)(first_position + row % n_tokens) * inv_freq[i];
            cosine_out[row * half + i] = (float)cos(angle);
            sine_out[row * half + i] = (float)sin(angle);
        }
    }
}

/* Where a token's cosines and sines are, for a layer of the model. */
static size_t rotation_at(const cg_lossy_context *context, uint32_t layer, size_t t)
{
    const cg_profile *p = context->profile;
    return ((size_t)p->layer_rope[layer] * context->n_tokens + t) * (p->rotary_dim / 2);
}

/* ---- symbols ---- */

size_t cg_lossy_symbols_bytes(const cg_level_columns *columns, size_t n_blocks)
{
    cg_arena arena = {0};
    (void)cg_arena_take(&arena, columns->n_columns * n_blocks * sizeof(int16_t));
    (void)cg_arena_take(&arena, (columns->n_strips + CG_DCT) * sizeof(cg_rans_strip));
    return arena.used_bytes;
}

cg_symbols cg_lossy_lay_symbols(const cg_level_columns *columns, const cg_symbols *coarse,
                                size_t n_blocks, void *memory)
{
    cg_symbols symbols = {.columns = columns};
    cg_arena arena = {memory, 0};
    int16_t *cells = cg_arena_take(&arena, columns->n_columns * n_blocks * sizeof *cells);
    /* A run that is cut in two, the columns that refine others and the rest, may have one more. */
    symbols.strips = cg_arena_take(&arena, (columns->n_strips + CG_DCT) * sizeof *symbols.strips);
    for (unsigned f = 0; f < CG_DCT; f++) {
        const uint32_t n_active = columns->n_active[f],
                       n_coarse = coarse != NULL ? coarse->columns->n_active[f] : 0;
        symbols.cells[f] = cells;
        for (uint32_t c = 0, n; c < n_active; c += n) {
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
        cells += n_active * n_blocks;
    }
    return symbols;
}

uint8_t *cg_lossy_code_symbols(const cg_profile *profile, const cg_symbols *symbols,
                               size_t n_blocks, size_t *n_bytes_out)
{
    const uint64_t bits =
        cg_rans_estimate_bits(profile->classes, symbols->strips, symbols->n_strips, n_blocks);
    const size_t n_streams = cg_rans_choose_streams(bits, symbols->n_strips);
    const size_t bound_bytes =
        cg_rans_bound_bytes(symbols->strips, symbols->n_strips, n_blocks, n_streams);
    uint8_t *buffer = malloc(2 * bound_bytes); /* result, and the words on their way there */
    if (buffer == NULL)
        return NULL;
    *n_bytes_out = cg_rans_encode(profile->classes, symbols->strips, symbols->n_strips, n_blocks,
                                  n_streams, buffer, bound_bytes, buffer + bound_bytes);
    uint8_t *fitted = realloc(buffer, *n_bytes_out);
    return fitted != NULL ? fitted : buffer;
}

/* ---- decoding ---- */

typedef struct decode_work {
    void *symbols[CG_N_LEVELS]; /* of the levels from this one to the coarsest */
    float *scale, *mean;        /* [n_channels] */
    float *x;                   /* [CG_DCT][unit_channels] */
    /* Lists of symbols that are not zero, and a panel at a time. */
    cg_nonzero *list;   /* of all blocks and frequencies */
    uint32_t *list_end; /* [n_blocks][CG_DCT]: where each list ends */
    float *y;           /* [CG_DCT][CG_PANEL_CHANNELS]; otherwise: [CG_DCT][CG_TILE][y_stride] */
    size_t y_stride;    /* unit_channels; quads write whole sixteens */
    /* Or quads of symbols, and CG_TILE blocks at a time. */
    cg_quad *quads;         /* of a batch's blocks and all frequencies */
    cg_quad_row *quad_rows; /* [n_slabs][CG_MAX_LIMBS][CG_DCT][blocks of the batch] */
    /* Or tiles, and CG_TILE blocks at a time. */
    uint16_t *tiles[CG_DCT], *tile_components[CG_DCT];
} decode_work;

/* Quads of n blocks; as much again is taken for large symbols, and all that may be listed anew for
 * each limb. */
static size_t most_quads(const cg_level_columns *columns, size_t n)
{
    return (columns->n_columns / CG_QUAD_COMPONENTS + CG_DCT) * n;
}

static decode_work take_decode_work(cg_arena *arena, const cg_profile *profile, unsigned level,
                                    unsigned coarsest, const cg_group *group, unsigned plane,
                                    size_t n_blocks)
{
    decode_work w = {0};
    const cg_basis *basis = &group->basis[plane];
    const cg_level_columns *columns = &group->columns[level - 1][plane];
    for (unsigned i = level; i <= coarsest; i++)
        w.symbols[i] =
            cg_arena_take(arena, cg_lossy_symbols_bytes(&group->columns[i - 1][plane], n_blocks));
    w.scale = cg_arena_take(arena, group->n_channels * sizeof *w.scale);
    w.mean = cg_arena_take(arena, group->n_channels * sizeof *w.mean);
    w.x = cg_arena_take(arena, (size_t)CG_DCT * profile->unit_channels * sizeof *w.x);
    w.y_stride = profile->unit_channels + (profile->has_quads ? 16 : 0);
    if (profile->is_tiled || profile->has_quads)
        w.y = cg_arena_take(arena, CG_DCT * CG_TILE * w.y_stride * sizeof *w.y);
    if (profile->has_quads) {
        const size_t n = n_blocks < CG_TILE ? n_blocks : CG_TILE,
                     n_rows = basis->n_slabs * CG_MAX_LIMBS * n * CG_DCT;
        w.quads =
            cg_arena_take(arena, (2 * (1 + CG_MAX_LIMBS) * most_quads(columns, n) + CG_QUAD_SLACK) *
                                     sizeof *w.quads);
        w.quad_rows = cg_arena_take(arena, n_rows * sizeof *w.quad_rows);
    } else if (profile->is_tiled) {
        for (unsigned f = 0; f < CG_DCT; f++) {
            const size_t n_tiles = 2 * ((columns->n_active[f] + CG_TILE - 1u) / CG_TILE);
            w.tiles[f] = cg_arena_take(arena, n_tiles * CG_TILE * CG_TILE * sizeof *w.tiles[f]);
            w.tile_components[f] = cg_arena_take(arena, n_tiles * sizeof *w.tile_components[f]);
        }
    } else {
        w.y = cg_arena_take(arena, CG_DCT * CG_PANEL_CHANNELS * sizeof *w.y);
        w.list = cg_arena_take(arena, columns->n_columns * n_blocks * sizeof *w.list);
        w.list_end = cg_arena_take(arena, n_blocks * CG_DCT * sizeof *w.list_end);
    }
    return w;
}

size_t cg_lossy_decode_scratch_bytes(const cg_profile *profile, unsigned level, unsigned coarsest,
                                     const cg_group *group, unsigned plane, uint32_t n_tokens)
{
    cg_arena arena = {0};
    if (profile->token_transform == CG_TOKENS_ANCHORS)
        return cg_paper_decode_scratch_bytes(profile, group, n_tokens);
    (void)take_decode_work(&arena, profile, level, coarsest, group, plane,
                           cg_lossy_n_blocks(n_tokens));
    return arena.used_bytes;
}

void cg_lossy_store_head(const cg_lossy_context *context, const float *values, void *out,
                         size_t element)
{
    const size_t n = context->profile->geometry.head_dim;
    if (context->dtype == CG_DTYPE_BF16) {
        context->kernels->to_bf16(values, n, (uint16_t *)out + element);
    } else if (context->dtype == CG_DTYPE_FP16) {
        for (size_t i = 0; i < n; i++)
            ((uint16_t *)out)[element + i] = cg_fp16_from_f32(values[i]);
    } else {
        memcpy((float *)out + element, values, n * sizeof *values);
    }
}

/* Steps 4 and 5 of FORMAT.md for the n_heads heads of a unit, in one block's tokens. */
static void finish_unit(const cg_lossy_context *context, const cg_group *group, unsigned plane,
                        uint32_t first_head, uint32_t n_heads, size_t block, float *x,
                        size_t x_stride, void *out)
{
    const cg_geometry *g = &context->profile->geometry;
    const uint32_t half = context->profile->rotary_dim / 2;
    for (uint32_t i = 0; i < CG_DCT; i++) {
        const size_t t = block * CG_DCT + i;
        if (t >= context->n_tokens)
            break;
        for (uint32_t h = 0; h < n_heads; h++) {
            const uint32_t layer = (first_head + h) / g->n_kv_heads,
                           head = (first_head + h) % g->n_kv_heads;
            float *values = x + i * x_stride + (size_t)h * g->head_dim;
            if (plane == CG_K && half > 0) {
                const size_t at = rotation_at(context, group->first_layer + layer, t);
                context->kernels->rotate(values, context->cosine + at, context->sine + at, half);
            }
            cg_lossy_store_head(context, values, out,
                                (((size_t)layer * context->n_tokens + t) * g->n_kv_heads + head) *
                                    g->head_dim);
        }
    }
}

/* Steps 1 to 5 from lists of the symbols that are not zero. Panels outside, blocks inside: a
 * panel's basis stays in the cache for all blocks. */
static void synthesize_lists(const cg_lossy_context *context, const cg_group *group, unsigned plane,
                             const cg_level_columns *columns, const cg_symbols *symbols,
                             const decode_work *w, void *out)
{
    const cg_profile *p = context->profile;
    const cg_basis *basis = &group->basis[plane];
    const size_t n_blocks = cg_lossy_n_blocks(context->n_tokens);
    const uint32_t unit = p->unit_channels, head_dim = p->geometry.head_dim;
    uint32_t n_list = 0;
    for (size_t b = 0; b < n_blocks; b++) {
        for (unsigned f = 0; f < CG_DCT; f++) {
            const size_t n_active = columns->n_active[f];
            n_list += (uint32_t)context->kernels->list_nonzero(symbols->cells[f] + b * n_active,
                                                               n_active, w->list + n_list);
            w->list_end[b * CG_DCT + f] = n_list;
        }
    }
    for (uint32_t first = 0; first < group->n_channels; first += unit) {
        const uint32_t n_unit = group->n_channels - first < unit ? group->n_channels - first : unit;
        for (size_t b = 0; b < n_blocks; b++) {
            for (uint32_t at = 0; at < n_unit; at += p->panel_channels) {
                const uint32_t n =
                    n_unit - at < p->panel_channels ? n_unit - at : p->panel_channels;
                const uint32_t *panel = basis->panels + (size_t)((first + at) / p->panel_channels) *
                                                            basis->n_components *
                                                            (CG_PANEL_CHANNELS / 2);
                for (unsigned f = 0; f < CG_DCT; f++) {
                    const size_t i = b * CG_DCT + f, begin = i > 0 ? w->list_end[i - 1] : 0;
                    context->kernels->accumulate(panel, w->list + begin, w->list_end[i] - begin,
                                                 (n + 31) / 32, w->y + f * CG_PANEL_CHANNELS);
                }
                context->kernels->inverse_dct(w->y, CG_PANEL_CHANNELS, w->scale + first + at,
                                              w->mean + first + at, n, w->x + at, unit);
            }
            finish_unit(context, group, plane, first / head_dim, n_unit / head_dim, b, w->x, unit,
                        out);
        }
    }
}

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
        kernels->list_quads(rest, n_cells, quads + row->n_quads, &more);
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
        quads_out[limb.n_quads] = *quad;
        if ((limb_quads >> quad->index & 1) != 0) {
            limb.n_quads++;
            limb.sum += quad->symbols[0] + quad->symbols[1] + quad->symbols[2] + quad->symbols[3];
        }
    }
    return limb;
}

/* Symbols of a batch of n blocks as quads, a slab's and limb's rows together. */
static void list_batch(const cg_kernels *kernels, const cg_basis *basis,
                       const cg_level_columns *columns, const cg_symbols *symbols, size_t batch,
                       size_t n, const decode_work *w)
{
    cg_quad *quads = w->quads, *end = quads + most_quads(columns, n);
    cg_quad_row *row = w->quad_rows;
    const size_t n_rows = CG_DCT * n;
    for (const cg_slab *slab = basis->slabs; slab < basis->slabs + basis->n_slabs; slab++) {
        const size_t first = slab->first_component,
                     most = (size_t)slab->n_quads * CG_QUAD_COMPONENTS;
        const uint32_t all = (uint32_t)((1ull << slab->n_quads) - 1);
        for (size_t r = 0; r < n_rows; r++, row++) {
            const size_t f = r / n, b = r % n, n_active = columns->n_active[f];
            const size_t left = n_active > first ? n_active - first : 0,
                         n_cells = left < most ? left : most;
            const int16_t *cells = symbols->cells[f] + (batch + b) * n_active + n_active - left;
            cg_quad_row whole;
            kernels->list_quads(cells, n_cells, quads, &whole);
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

/* What a row's quads lack of symbols beyond their limit: y[n] of it. */
static void add_large(const cg_quad_row *row, const cg_slab *slab, const uint8_t *panel,
                      const int16_t *cells, size_t n_cells, uint32_t n, float *y)
{
    for (size_t c = 0; c < n_cells && c < (size_t)slab->n_quads * CG_QUAD_COMPONENTS; c++) {
        const int more = beyond(cells[c], row->limit);
        for (unsigned limb = 0; limb < CG_MAX_LIMBS && more != 0; limb++) {
            if ((slab->limb_quads[limb] >> c / 4 & 1) == 0)
                continue;
            const uint8_t *at =
                panel + slab->offset[limb] + c / 4 * CG_QUAD_COMPONENTS * CG_PANEL_CHANNELS + c % 4;
            for (uint32_t ch = 0; ch < n; ch++)
                y[ch] +=
                    (float)more * slab->unit[limb] * (float)(at[ch * CG_QUAD_COMPONENTS] - 128);
        }
    }
}

/* y[f][b][n] of a panel, in rows of y_stride. Slabs outside, rows inside: a slab stays in the first
 * cache for all rows. */
static void accumulate_batch(const cg_kernels *kernels, const cg_basis *basis,
                             const cg_level_columns *columns, const cg_symbols *symbols,
                             size_t batch, size_t n_blocks, const uint8_t *panel, uint32_t n,
                             const decode_work *w, float *y, size_t y_stride)
{
    const cg_quad_row *rows = w->quad_rows;
    bool is_first = true;
    for (const cg_slab *slab = basis->slabs; slab < basis->slabs + basis->n_slabs; slab++) {
        for (unsigned limb = 0; limb < CG_MAX_LIMBS; limb++) {
            for (unsigned f = 0; f < CG_DCT && slab->limb_quads[limb] != 0; f++) {
                if (is_first || columns->n_active[f] > slab->first_component)
                    kernels->accumulate_quads(panel + slab->offset[limb],
                                              rows + (limb * CG_DCT + f) * n_blocks, n_blocks,
                                              (n + 15) / 16, slab->unit[limb], is_first,
                                              y + f * CG_TILE * y_stride, y_stride);
            }
            is_first &= slab->limb_quads[limb] == 0;
        }
        for (size_t r = 0; r < CG_DCT * n_blocks; r++) {
            const size_t f = r / n_blocks, b = r % n_blocks, n_active = columns->n_active[f];
            if (rows[r].limit != INT32_MAX)
                add_large(&rows[r], slab, panel,
                          symbols->cells[f] + (batch + b) * n_active + slab->first_component,
                          n_active - slab->first_component, n, y + (f * CG_TILE + b) * y_stride);
        }
        rows += CG_MAX_LIMBS * CG_DCT * n_blocks;
    }
    for (size_t r = 0; r < (size_t)CG_DCT * CG_TILE && is_first; r++) /* a basis of nothing */
        memset(y + r * y_stride, 0, n * sizeof *y);
}

/* Steps 1 to 5 in integers of 8 bits. */
static void synthesize_quads(const cg_lossy_context *context, const cg_group *group, unsigned plane,
                             const cg_level_columns *columns, const cg_symbols *symbols,
                             const decode_work *w, void *out)
{
    const cg_profile *p = context->profile;
    const cg_basis *basis = &group->basis[plane];
    const size_t n_blocks = cg_lossy_n_blocks(context->n_tokens);
    const uint32_t unit = p->unit_channels, head_dim = p->geometry.head_dim;
    for (size_t batch = 0; batch < n_blocks; batch += CG_TILE) {
        const size_t n = n_blocks - batch < CG_TILE ? n_blocks - batch : CG_TILE;
        list_batch(context->kernels, basis, columns, symbols, batch, n, w);
        for (uint32_t first = 0; first < group->n_channels; first += unit) {
            const uint32_t n_unit =
                group->n_channels - first < unit ? group->n_channels - first : unit;
            for (uint32_t at = 0; at < n_unit; at += p->panel_channels) {
                const uint32_t n_panel =
                    n_unit - at < p->panel_channels ? n_unit - at : p->panel_channels;
                accumulate_batch(context->kernels, basis, columns, symbols, batch, n,
                                 basis->quads +
                                     (first + at) / p->panel_channels * basis->panel_bytes,
                                 n_panel, w, w->y + at, w->y_stride);
            }
            for (size_t b = 0; b < n; b++) {
                context->kernels->inverse_dct(w->y + b * w->y_stride, CG_TILE * w->y_stride,
                                              w->scale + first, w->mean + first, n_unit, w->x,
                                              unit);
                finish_unit(context, group, plane, first / head_dim, n_unit / head_dim, batch + b,
                            w->x, unit, out);
            }
        }
    }
}

/* The same on matrix units. Batches of blocks outside: their symbols stay in the cache for all
 * channels. */
static void synthesize_tiles(const cg_lossy_context *context, const cg_group *group, unsigned plane,
                             const cg_level_columns *columns, const cg_symbols *symbols,
                             const decode_work *w, void *out)
{
    const cg_profile *p = context->profile;
    const cg_basis *basis = &group->basis[plane];
    const size_t n_blocks = cg_lossy_n_blocks(context->n_tokens);
    const size_t panel_elements =
        (size_t)((basis->n_components + CG_TILE - 1) / CG_TILE) * CG_TILE * CG_TILE;
    const uint32_t unit = p->unit_channels, head_dim = p->geometry.head_dim;
    for (size_t batch = 0; batch < n_blocks; batch += CG_TILE) {
        const size_t n = n_blocks - batch < CG_TILE ? n_blocks - batch : CG_TILE;
        cg_tiled_symbols tiled[CG_DCT];
        for (unsigned f = 0; f < CG_DCT; f++) {
            const size_t n_active = columns->n_active[f];
            tiled[f].tiles = w->tiles[f];
            tiled[f].tile_components = w->tile_components[f];
            tiled[f].n_tiles =
                context->kernels->tile_symbols(symbols->cells[f] + batch * n_active, n, n_active,
                                               w->tiles[f], w->tile_components[f]);
        }
        for (uint32_t first = 0; first < group->n_channels; first += unit) {
            const uint32_t n_unit =
                group->n_channels - first < unit ? group->n_channels - first : unit;
            for (uint32_t at = 0; at < n_unit; at += CG_TILE)
                context->kernels->synthesize(tiled, n,
                                             basis->tiles + (first + at) / CG_TILE * panel_elements,
                                             w->y + at, (size_t)CG_TILE * unit, unit);
            for (size_t b = 0; b < n; b++) {
                context->kernels->inverse_dct(w->y + b * unit, (size_t)CG_TILE * unit,
                                              w->scale + first, w->mean + first, n_unit, w->x,
                                              unit);
                finish_unit(context, group, plane, first / head_dim, n_unit / head_dim, batch + b,
                            w->x, unit, out);
            }
        }
    }
}

cg_status cg_lossy_decode(const cg_lossy_context *context, unsigned level, unsigned coarsest,
                          const cg_group *group, unsigned plane,
                          const cg_coded sections[CG_N_LEVELS], void *scratch, void *out)
{
    const cg_profile *p = context->profile;
    if (p->token_transform == CG_TOKENS_ANCHORS)
        return cg_paper_decode(context, level, group, plane, sections[level].bytes,
                               sections[level].n_bytes, scratch, out);
    const cg_level_columns *columns = &group->columns[level - 1][plane];
    const size_t n_blocks = cg_lossy_n_blocks(context->n_tokens),
                 channels = cg_geometry_channels(&p->geometry);
    cg_arena arena = {scratch, 0};
    const decode_work w = take_decode_work(&arena, p, level, coarsest, group, plane, n_blocks);

    cg_symbols symbols = {0}, coarse;
    for (unsigned i = coarsest; i >= level; i--) {
        size_t used_bytes;
        coarse = symbols;
        symbols = cg_lossy_lay_symbols(&group->columns[i - 1][plane], i < coarsest ? &coarse : NULL,
                                       n_blocks, w.symbols[i]);
        const cg_status status =
            cg_rans_decode(p->classes, symbols.strips, symbols.n_strips, n_blocks,
                           sections[i].bytes, sections[i].n_bytes, &used_bytes);
        if (status != CG_OK)
            return status;
        if (used_bytes != sections[i].n_bytes)
            return CG_ERR_CORRUPT;
    }
    for (uint32_t layer = 0; layer < group->n_layers; layer++) {
        const float *weight = cg_profile_row(p, p->weight, group->first_layer + layer, plane);
        const float *mean = cg_profile_row(p, p->mean, group->first_layer + layer, plane);
        for (size_t ch = 0; ch < channels; ch++) {
            w.scale[layer * channels + ch] = p->step[level - 1][plane] / weight[ch];
            w.mean[layer * channels + ch] = mean[ch];
        }
    }
    (p->is_tiled    ? synthesize_tiles
     : p->has_quads ? synthesize_quads
                    : synthesize_lists)(context, group, plane, columns, &symbols, &w, out);
    return CG_OK;
}

/* ---- encoding ---- */

typedef struct encode_work {
    size_t row_stride, coef_stride;
    float *block; /* [CG_DCT][n_channels]: the tokens of a block */
    float *rows;  /* [CG_DCT][n_blocks][row_stride]: their spectra */
    float *coef;  /* [n_blocks, in whole tiles][coef_stride]: of one frequency */
    float *known; /* [n_blocks, in whole tiles][row_stride]: what the exact components make of it */
    uint16_t *split;
    void *symbols[CG_N_LEVELS]; /* of the lossy levels */
} encode_work;

static encode_work take_encode_work(cg_arena *arena, const cg_group *group, unsigned plane,
                                    size_t n_blocks)
{
    encode_work w = {.row_stride = 2 * cg_group_pairs(group),
                     .coef_stride = (group->basis[plane].n_components + 31u) / 32 * 32};
    w.block = cg_arena_take(arena, (size_t)CG_DCT * group->n_channels * sizeof *w.block);
    w.rows = cg_arena_take(arena, CG_DCT * n_blocks * w.row_stride * sizeof *w.rows);
    w.coef = cg_arena_take(arena, (n_blocks + CG_TILE - 1) / CG_TILE * CG_TILE * w.coef_stride *
                                      sizeof *w.coef);
    w.known = cg_arena_take(arena, (n_blocks + CG_TILE - 1) / CG_TILE * CG_TILE * w.row_stride *
                                       sizeof *w.known);
    w.split = cg_arena_take(arena, 64 * w.row_stride * sizeof *w.split);
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++)
        w.symbols[level] = cg_arena_take(
            arena, cg_lossy_symbols_bytes(&group->columns[level - 1][plane], n_blocks));
    return w;
}

size_t cg_lossy_encode_scratch_bytes(const cg_profile *profile, const cg_group *group,
                                     unsigned plane, uint32_t n_tokens)
{
    cg_arena arena = {0};
    if (profile->token_transform == CG_TOKENS_ANCHORS)
        return cg_paper_encode_scratch_bytes(profile, group, n_tokens);
    (void)take_encode_work(&arena, group, plane, cg_lossy_n_blocks(n_tokens));
    return arena.used_bytes;
}

bool cg_lossy_load_head(const cg_lossy_context *context, const void *in, size_t element,
                        float *restrict values)
{
    const uint16_t *restrict halves = (const uint16_t *)in + element;
    const size_t n = context->profile->geometry.head_dim;
    uint32_t any_not_finite = 0; /* in loops that vectorize */
    if (context->dtype == CG_DTYPE_BF16) {
        for (size_t i = 0; i < n; i++)
            values[i] = cg_bf16_to_f32(halves[i]);
    } else if (context->dtype == CG_DTYPE_FP16) {
        for (size_t i = 0; i < n; i++)
            values[i] = cg_fp16_to_f32(halves[i]);
    } else {
        memcpy(values, (const float *)in + element, n * sizeof *values);
    }
    for (size_t i = 0; i < n; i++)
        any_not_finite |= (cg_f32_bits(values[i]) & 0x7f800000u) == 0x7f800000u;
    return any_not_finite == 0;
}

/* One token's row [n_channels]: rotated back, centred, weighted. */
static bool load_token(const cg_lossy_context *context, const cg_group *group, unsigned plane,
                       size_t t, const void *in, float *row)
{
    const cg_profile *p = context->profile;
    const cg_geometry *g = &p->geometry;
    const uint32_t half = p->rotary_dim / 2;
    bool finite = true;
    for (uint32_t layer = 0; layer < group->n_layers; layer++) {
        const float *weight = cg_profile_row(p, p->weight, group->first_layer + layer, plane);
        const float *mean = cg_profile_row(p, p->mean, group->first_layer + layer, plane);
        float *layer_row = row + layer * cg_geometry_channels(g);
        for (uint32_t head = 0; head < g->n_kv_heads; head++) {
            const size_t element =
                (((size_t)layer * context->n_tokens + t) * g->n_kv_heads + head) * g->head_dim;
            float *values = layer_row + (size_t)head * g->head_dim;
            finite &= cg_lossy_load_head(context, in, element, values);
            if (plane == CG_K) {
                const size_t at = rotation_at(context, group->first_layer + layer, t);
                const float *cosine = context->cosine + at, *sine = context->sine + at;
                for (uint32_t i = 0; i < half; i++) {
                    const float a = values[i], b = values[i + half];
                    values[i] = a * cosine[i] + b * sine[i];
                    values[i + half] = b * cosine[i] - a * sine[i];
                }
            }
        }
        for (size_t ch = 0; ch < cg_geometry_channels(g); ch++)
            layer_row[ch] = (layer_row[ch] - mean[ch]) * weight[ch];
    }
    return finite;
}

/* Rows of a block that are no coded tokens (sinks, which lie exactly on top, and what is past the
 * end) become the mean of those that are: that leaves the fewest coefficients. */
static void fill_rows(float *block, size_t n_channels, unsigned first, unsigned end)
{
    for (size_t ch = 0; ch < n_channels; ch++) {
        float mean = 0;
        for (unsigned t = first; t < end; t++)
            mean += block[t * n_channels + ch];
        mean = end > first ? mean / (float)(end - first) : 0;
        for (unsigned t = 0; t < CG_DCT; t++) {
            if (t < first || t >= end)
                block[t * n_channels + ch] = mean;
        }
    }
}

static bool load_rows(const cg_lossy_context *context, const cg_group *group, unsigned plane,
                      const void *in, size_t n_blocks, encode_work *w)
{
    const size_t n = group->n_channels, f_stride = n_blocks * w->row_stride;
    bool finite = true;
    for (size_t r = 0; r < CG_DCT * n_blocks; r++)
        memset(w->rows + r * w->row_stride + n, 0, (w->row_stride - n) * sizeof *w->rows);
    for (size_t b = 0; b < n_blocks; b++) {
        const uint32_t position = context->first_position + (uint32_t)b * CG_DCT;
        const uint32_t n_sinks = context->profile->n_sinks;
        const unsigned first = position < n_sinks ? n_sinks - position : 0;
        const size_t left = context->n_tokens - b * CG_DCT;
        const unsigned end = left < CG_DCT ? (unsigned)left : CG_DCT;
        for (unsigned t = 0; t < end; t++)
            finite &= load_token(context, group, plane, b * CG_DCT + t, in, w->block + t * n);
        if (first > 0 || end < CG_DCT)
            fill_rows(w->block, n, first < end ? first : end, end);
        context->kernels->forward_dct(w->block, n, (unsigned)n, w->rows + b * w->row_stride,
                                      f_stride);
    }
    return finite;
}

/* Coefficients of the components behind the first n_exact sixteens, of n_sixteens. */
static void project_rest(const cg_kernels *kernels, const cg_basis *basis, size_t n_pairs,
                         size_t n_blocks, size_t n_exact, size_t n_sixteens, const float *rows,
                         const encode_work *w)
{
    const uint32_t *analysis = basis->analysis + n_exact * n_pairs * 16;
    float *coef = w->coef + 16 * n_exact;
    if (kernels->project_narrow != NULL)
        kernels->project_narrow(rows, w->row_stride, n_blocks, analysis,
                                basis->scale + 16 * n_exact, basis->narrow_norm, n_pairs,
                                n_sixteens - n_exact, w->split, coef, w->coef_stride);
    else
        kernels->project(rows, w->row_stride, n_blocks, analysis, n_pairs, n_sixteens - n_exact,
                         w->split, coef, w->coef_stride);
}

/* Coefficients of the first n components, in sixteens, of the rows of one frequency; the rows are
 * used up. */
static void project(const cg_kernels *kernels, const cg_group *group, const cg_basis *basis,
                    size_t n_blocks, uint32_t n, float *rows, const encode_work *w)
{
    const size_t n_pairs = cg_group_pairs(group), n_exact_pairs = cg_basis_exact_pairs(basis);
    const size_t n_sixteens = (n + 15u) / 16, all_exact = (basis->n_exact + 15u) / 16;
    const size_t n_exact = all_exact < n_sixteens ? all_exact : n_sixteens;
    if (n_exact > 0)
        kernels->project(rows, w->row_stride, n_blocks, basis->analysis, n_pairs, n_exact, w->split,
                         w->coef, w->coef_stride);
    if (n_exact == n_sixteens)
        return;
    for (size_t b = 0; b < n_blocks && n_exact % 2 != 0; b++)
        memset(w->coef + b * w->coef_stride + 16 * n_exact, 0, 16 * sizeof *w->coef);
    if (n_exact > 0)
        kernels->project(w->coef, w->coef_stride, n_blocks, basis->exact, n_exact_pairs,
                         (group->n_channels + 15u) / 16, w->split, w->known, w->row_stride);
    for (size_t b = 0; b < n_blocks && n_exact > 0; b++) {
        for (size_t ch = 0; ch < group->n_channels; ch++)
            rows[b * w->row_stride + ch] -= w->known[b * w->row_stride + ch];
    }
    project_rest(kernels, basis, n_pairs, n_blocks, n_exact, n_sixteens, rows, w);
}

/* The symbols of a step three times as large: to nearest, there are no ties. */
static void coarsen(const int16_t *fine, size_t n, int16_t *coarse)
{
    for (size_t c = 0; c < n; c++)
        coarse[c] = (int16_t)((fine[c] + (fine[c] < 0 ? -1 : 1)) / CG_RANS_REFINE_STEP);
}

cg_status cg_lossy_encode(const cg_lossy_context *context, unsigned level_mask,
                          const cg_group *group, unsigned plane, const void *in, void *scratch,
                          uint8_t *sections_out[CG_N_LEVELS], size_t section_bytes_out[CG_N_LEVELS])
{
    const cg_profile *p = context->profile;
    if (p->token_transform == CG_TOKENS_ANCHORS)
        return cg_paper_encode(context, level_mask, group, plane, in, scratch, sections_out,
                               section_bytes_out);
    const cg_basis *basis = &group->basis[plane];
    const size_t n_blocks = cg_lossy_n_blocks(context->n_tokens);
    cg_arena arena = {scratch, 0};
    encode_work w = take_encode_work(&arena, group, plane, n_blocks);
    if (!load_rows(context, group, plane, in, n_blocks, &w))
        return CG_ERR_INVALID_ARGUMENT;

    cg_symbols symbols[CG_N_LEVELS];
    for (unsigned level = CG_N_LEVELS - 1; level >= CG_L1; level--) {
        const bool refines =
            context->is_nested && level < CG_N_LEVELS - 1 && (level_mask >> (level + 1) & 1) != 0;
        symbols[level] =
            cg_lossy_lay_symbols(&group->columns[level - 1][plane],
                                 refines ? &symbols[level + 1] : NULL, n_blocks, w.symbols[level]);
    }
    for (unsigned f = 0; f < CG_DCT; f++) {
        uint32_t most = 0;
        for (unsigned level = CG_L1; level < CG_N_LEVELS; level++) {
            const uint32_t n_active = group->columns[level - 1][plane].n_active[f];
            most = (level_mask >> level & 1) != 0 && n_active > most ? n_active : most;
        }
        project(context->kernels, group, basis, n_blocks, most,
                w.rows + f * n_blocks * w.row_stride, &w);
        for (unsigned level = CG_L1; level < CG_N_LEVELS; level++) {
            if ((level_mask >> level & 1) == 0)
                continue;
            const cg_level_columns *columns = &group->columns[level - 1][plane];
            const size_t n_active = columns->n_active[f];
            const bool has_finer =
                context->is_nested && (level_mask >> (level - 1) & 1) != 0 && level > CG_L1;
            for (size_t b = 0; b < n_blocks; b++) {
                int16_t *cells = symbols[level].cells[f] + b * n_active;
                if (has_finer)
                    coarsen(symbols[level - 1].cells[f] +
                                b * symbols[level - 1].columns->n_active[f],
                            n_active, cells);
                else
                    context->kernels->quantize(w.coef + b * w.coef_stride, n_active,
                                               1.0f / p->step[level - 1][plane], cells);
            }
        }
    }
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++) {
        if ((level_mask >> level & 1) == 0)
            continue;
        sections_out[level] =
            cg_lossy_code_symbols(p, &symbols[level], n_blocks, &section_bytes_out[level]);
        if (sections_out[level] == NULL)
            return CG_ERR_NO_MEMORY;
    }
    return CG_OK;
}
