/* Preset klt, decoding: symbols of all levels that are needed, then one of the syntheses of
 * klt_synthesis.h. Which one, the profile's version and layout say; what memory it takes is laid
 * out here for all of them. The joint matrix is decoded as a layer group is, to numbers instead
 * of elements. */
#include "codec/klt.h"

#include "codec/arena.h"
#include "codec/klt_synthesis.h"

/* What a synthesis in integers takes. */
static void take_integers(cg_arena *arena, const cg_level_columns *columns, size_t n_blocks,
                          cg_synthesis *s)
{
    const cg_basis_layout *layout = &s->profile->layout;
    const cg_bands *bands = &s->group->bands[s->matrix];
    const size_t n = n_blocks < CG_TILE ? n_blocks : CG_TILE, n_rows = bands->n_slabs * n * CG_DCT;
    size_t n_cells = columns->n_columns;
    for (unsigned f = 0; f < CG_DCT && bands->n_shared > 0; f++)
        n_cells += s->n_given[f];
    s->y_stride = cg_bands_unit_channels(layout);
    s->f_stride = CG_TILE * s->y_stride + 16; /* a power of two would be few sets of a cache */
    s->sums = cg_arena_take(arena, CG_DCT * s->f_stride * sizeof *s->sums);
    if (layout->is_tiled) {
        s->digit_tiles = cg_arena_take(arena, cg_klt_digit_tiles_bytes(bands));
        s->digits =
            cg_arena_take(arena, bands->n_slabs * CG_DCT * CG_SYMBOL_DIGITS * sizeof *s->digits);
    }
    if (!layout->has_quads)
        return;
    s->quads = cg_arena_take(arena, cg_klt_exact_quads_bytes(n_cells, n));
    s->quad_rows = cg_arena_take(arena, n_rows * sizeof *s->quad_rows);
    /* Two more digits of each row at most, and the end. */
    s->large_rows = cg_arena_take(arena, (2 * n_rows + 1) * sizeof *s->large_rows);
}

/* The memory of the symbols of each level from this one to the coarsest. */
static void take_symbols(cg_arena *arena, unsigned level, unsigned coarsest, const cg_group *group,
                         unsigned matrix, size_t n_blocks, void *symbols[CG_N_LEVELS])
{
    for (unsigned i = level; i <= coarsest; i++)
        symbols[i] =
            cg_arena_take(arena, cg_symbols_bytes(&group->columns[i - 1][matrix], n_blocks));
}

/* The symbols of a level, from the coarsest on, each given the one before. */
static cg_status decode_symbols(const cg_profile *p, const cg_block_order *order, unsigned level,
                                unsigned coarsest, const cg_group *group, unsigned matrix,
                                const cg_coded sections[CG_N_LEVELS],
                                void *const memory[CG_N_LEVELS], cg_symbols *symbols_out)
{
    /* Strips point at cells in memory[], not at coarse, which changes. level is at least 1: i does
     * not wrap. */
    cg_symbols symbols = {0}, coarse;
    for (unsigned i = coarsest; i >= level; i--) {
        coarse = symbols;
        symbols = cg_symbols_lay(&group->columns[i - 1][matrix], i < coarsest ? &coarse : NULL,
                                 order->runs, order->n_runs, memory[i]);
        const cg_status status = cg_symbols_decode(p, &symbols, sections[i]);
        if (status != CG_OK)
            return status;
    }
    *symbols_out = symbols;
    return CG_OK;
}

/* The memory of a synthesis. */
static cg_synthesis take_synthesis(cg_arena *arena, const cg_profile *profile, unsigned level,
                                   const cg_group *group, unsigned matrix, size_t n_blocks)
{
    cg_synthesis s = {.profile = profile,
                      .group = group,
                      .matrix = matrix,
                      .level = level,
                      .n_given = profile->n_given[level - 1]};
    const cg_level_columns *columns = &group->columns[level - 1][matrix];
    s.scale = cg_arena_take(arena, group->n_channels * sizeof *s.scale);
    s.mean = cg_arena_take(arena, group->n_channels * sizeof *s.mean);
    s.x = cg_arena_take(arena, (size_t)CG_DCT * profile->layout.unit_channels * sizeof *s.x);
    if (profile->version > 1) {
        take_integers(arena, columns, n_blocks, &s);
        return s;
    }
    /* Profiles of version 1, whose elements are floats. */
    s.y_stride = profile->layout.unit_channels + (profile->layout.has_quads ? 16 : 0);
    if (profile->layout.is_tiled || profile->layout.has_quads)
        s.y = cg_arena_take(arena, CG_DCT * CG_TILE * s.y_stride * sizeof *s.y);
    if (profile->layout.has_quads) {
        const size_t n = n_blocks < CG_TILE ? n_blocks : CG_TILE,
                     n_rows = group->basis[matrix].n_slabs * CG_MAX_LIMBS * n * CG_DCT;
        s.quads = cg_arena_take(arena, cg_klt_quads_bytes(columns, n));
        s.quad_rows = cg_arena_take(arena, n_rows * sizeof *s.quad_rows);
    } else if (profile->layout.is_tiled) {
        for (unsigned f = 0; f < CG_DCT; f++) {
            /* A second tile of each for what bf16 rounds off large symbols. */
            const size_t n_tiles = 2 * ((columns->n_active[f] + CG_TILE - 1u) / CG_TILE);
            s.tiles[f] = cg_arena_take(arena, n_tiles * CG_TILE * CG_TILE * sizeof *s.tiles[f]);
            s.tile_components[f] = cg_arena_take(arena, n_tiles * sizeof *s.tile_components[f]);
        }
    } else {
        s.y = cg_arena_take(arena, CG_DCT * CG_PANEL_CHANNELS * sizeof *s.y);
        s.list = cg_arena_take(arena, columns->n_columns * n_blocks * sizeof *s.list);
        s.list_end = cg_arena_take(arena, n_blocks * CG_DCT * sizeof *s.list_end);
    }
    return s;
}

size_t cg_klt_decode_scratch_bytes(const cg_profile *profile, unsigned level, unsigned coarsest,
                                   const cg_group *group, unsigned matrix, uint32_t n_tokens)
{
    cg_arena arena = {0};
    void *symbols[CG_N_LEVELS];
    take_symbols(&arena, level, coarsest, group, matrix, cg_count_blocks(n_tokens), symbols);
    (void)take_synthesis(&arena, profile, level, group, matrix, cg_count_blocks(n_tokens));
    return arena.used_bytes;
}

/* Of the matrix's slices, one after another. */
static void fill_scale_and_mean(const cg_profile *p, unsigned level, const cg_synthesis *s)
{
    const size_t channels = cg_geometry_channels(&p->geometry);
    for (uint32_t i = 0; i < s->group->n_slices; i++) {
        const cg_slice slice = cg_group_slice(s->group, s->matrix, i);
        const float *weight = cg_profile_row(p, p->weight, slice);
        const float *mean = cg_profile_row(p, p->mean, slice);
        for (size_t ch = 0; ch < channels; ch++) {
            s->scale[i * channels + ch] = p->step[level - 1][slice.plane] / weight[ch];
            s->mean[i * channels + ch] = mean[ch];
        }
    }
}

cg_status cg_klt_decode(const cg_heads *heads, const cg_block_order *order, unsigned level,
                        unsigned coarsest, const cg_group *group, unsigned matrix,
                        const cg_coded sections[CG_N_LEVELS], const int16_t *given, void *scratch,
                        void *out)
{
    const cg_profile *p = heads->profile;
    const size_t n_blocks = cg_count_blocks(heads->n_tokens);
    cg_arena arena = {scratch, 0};
    cg_symbols symbols;
    void *memory[CG_N_LEVELS];
    /* By the calls that cg_klt_decode_scratch_bytes() counts with, in their order. */
    take_symbols(&arena, level, coarsest, group, matrix, n_blocks, memory);
    cg_synthesis s = take_synthesis(&arena, p, level, group, matrix, n_blocks);
    const cg_status status =
        decode_symbols(p, order, level, coarsest, group, matrix, sections, memory, &symbols);
    if (status != CG_OK)
        return status;
    s.heads = heads;
    s.order = order;
    s.symbols = &symbols;
    s.given = given;
    s.out = out;
    fill_scale_and_mean(p, level, &s);
    /* Version 1 is only approximated, so each CPU takes its fastest way; later bits are fixed. */
    (p->version > 1        ? cg_klt_exact
     : p->layout.is_tiled  ? cg_klt_tiles
     : p->layout.has_quads ? cg_klt_quads
                           : cg_klt_lists)(&s);
    return CG_OK;
}

size_t cg_klt_given_bytes(const cg_profile *profile, uint32_t n_tokens)
{
    return (size_t)CG_DCT * cg_count_blocks(n_tokens) * profile->joint->n_channels *
           sizeof(int16_t);
}

/* The memory of the joint matrix's synthesis. */
static cg_synthesis take_joint(cg_arena *arena, const cg_profile *profile, unsigned level,
                               size_t n_blocks)
{
    cg_synthesis s = {.profile = profile, .group = profile->joint, .level = level};
    take_integers(arena, &profile->joint->columns[level - 1][0], n_blocks, &s);
    return s;
}

size_t cg_klt_give_scratch_bytes(const cg_profile *profile, unsigned level, uint32_t n_tokens)
{
    cg_arena arena = {0};
    (void)take_joint(&arena, profile, level, cg_count_blocks(n_tokens));
    return arena.used_bytes;
}

void cg_klt_give(const cg_profile *profile, unsigned level, const cg_symbols *symbols,
                 void *scratch, int16_t *given_out)
{
    cg_arena arena = {scratch, 0};
    cg_synthesis s = take_joint(&arena, profile, level, symbols->n_rows);
    s.symbols = symbols;
    s.given_out = given_out;
    cg_klt_exact(&s);
}

size_t cg_klt_decode_joint_scratch_bytes(const cg_profile *profile, unsigned level,
                                         unsigned coarsest, uint32_t n_tokens)
{
    void *symbols[CG_N_LEVELS];
    cg_arena arena = {0};
    take_symbols(&arena, level, coarsest, profile->joint, 0, cg_count_blocks(n_tokens), symbols);
    return arena.used_bytes + cg_klt_give_scratch_bytes(profile, level, n_tokens);
}

cg_status cg_klt_decode_joint(const cg_profile *profile, const cg_block_order *order,
                              unsigned level, unsigned coarsest,
                              const cg_coded sections[CG_N_LEVELS], void *scratch,
                              int16_t *given_out)
{
    cg_arena arena = {scratch, 0};
    cg_symbols symbols;
    void *memory[CG_N_LEVELS];
    take_symbols(&arena, level, coarsest, profile->joint, 0, order->n_blocks, memory);
    const cg_status status = decode_symbols(profile, order, level, coarsest, profile->joint, 0,
                                            sections, memory, &symbols);
    if (status == CG_OK) /* its scratch begins behind the symbols, which it reads */
        cg_klt_give(profile, level, &symbols, cg_arena_take(&arena, 0), given_out);
    return status;
}
