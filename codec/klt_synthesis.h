/* codec/klt_synthesis.h - from symbols to elements, in one of four ways, for klt_decode.c.
 *
 * The inverse KLT is a product of two matrices: symbols by basis. It is the largest part of
 * decoding, and most symbols are 0. Which way is fastest depends on the CPU; cg_basis_layout holds
 * the choice. Profiles of version 1 have three ways: lists of symbols, quads (four components at
 * once), and tiles for matrix units. Those of version 2 have one, in integers, whose sums are
 * exact.
 *
 * All ways go through the tokens in blocks of 8, and through the channels in units. A unit is whole
 * heads, so that what is rotated and stored together is in the cache. They end in
 * cg_klt_finish_unit(). What slabs, limbs and lines are: codec/basis.h and codec/bands.h.
 *
 * Threads: each has its own cg_synthesis.
 */
#ifndef CG_CODEC_KLT_SYNTHESIS_H
#define CG_CODEC_KLT_SYNTHESIS_H
#include "codec/block_order.h"
#include "codec/heads.h"
#include "codec/kernels.h"
#include "codec/symbols.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Symbols above 8 bits are cut into digits. These are the quads of one of the higher digits of a
 * row of symbols in one slab. */
typedef struct cg_large_row {
    cg_quad_row row;
    uint32_t slab, r; /* r: f * n_blocks + b, of the batch */
    unsigned shift;   /* the digit counts 2^shift */
} cg_large_row;

typedef struct cg_synthesis {
    const cg_profile *profile;
    const cg_heads *heads; /* NULL for the joint matrix, as order, out, scale, mean and x are */
    const cg_block_order *order;
    const cg_group *group;
    unsigned matrix, level;
    const cg_symbols *symbols;
    void *out;
    float *scale, *mean; /* [n_channels], of FORMAT.md's stage 3 */
    float *x;            /* [CG_DCT][unit_channels]: a block's tokens */
    float *y;            /* lists: [CG_DCT][CG_PANEL_CHANNELS]; else [CG_DCT][CG_TILE][y_stride] */
    int32_t *sums;       /* integers: [CG_DCT][f_stride], in it [CG_TILE][y_stride] */
    /* With a joint matrix: what it gives to all groups (cg_klt_given_bytes()). A group's synthesis
     * reads given, the joint matrix's own writes given_out. n_given[CG_DCT]: of the level; zeros
     * without a joint matrix; NULL in its own synthesis. */
    const int16_t *given;
    int16_t *given_out;
    const uint16_t *n_given;
    size_t f_stride;
    size_t y_stride; /* unit_channels; quads write whole sixteens */
    /* Lists: the symbols that are not zero. */
    cg_nonzero *list;   /* of all blocks and frequencies */
    uint32_t *list_end; /* [n_blocks][CG_DCT]: where each list ends */
    /* Quads, of CG_TILE blocks at a time. */
    cg_quad *quads;           /* of all frequencies */
    cg_quad_row *quad_rows;   /* [n_slabs][CG_MAX_LIMBS][CG_DCT][blocks]; integers: no limbs */
    cg_large_row *large_rows; /* integers: by slab; behind the last one whose slab is UINT32_MAX */
    /* Tiles, of CG_TILE blocks at a time. */
    int8_t *digit_tiles;    /* integers: of all digits */
    cg_digit_tiles *digits; /* integers: [n_slabs][CG_DCT][CG_SYMBOL_DIGITS] */
    uint16_t *tiles[CG_DCT], *tile_components[CG_DCT];
} cg_synthesis;

/* The most quads that n blocks have. */
static inline size_t cg_klt_most_quads(const cg_level_columns *columns, size_t n)
{
    return (columns->n_columns / CG_QUAD_COMPONENTS + CG_DCT) * n;
}

/* Memory for the quads of n blocks: as many again for large symbols, and all of it once more for
 * each limb, for which they are listed anew. */
static inline size_t cg_klt_quads_bytes(const cg_level_columns *columns, size_t n)
{
    return (2 * (1 + CG_MAX_LIMBS) * cg_klt_most_quads(columns, n) + CG_QUAD_SLACK) *
           sizeof(cg_quad);
}

/* The same for integers: a row's quads, for each digit that large symbols have.
 * n_cells: of a block, given numbers included, which make quads of their own. */
static inline size_t cg_klt_exact_quads_bytes(size_t n_cells, size_t n)
{
    return (CG_SYMBOL_DIGITS * (n_cells / CG_QUAD_COMPONENTS + 2 * CG_DCT) * n + CG_QUAD_SLACK) *
           sizeof(cg_quad);
}

/* Memory for integers in tiles: all digits of each slab and frequency. Any of them may be needed.
 */
static inline size_t cg_klt_digit_tiles_bytes(const cg_bands *bands)
{
    size_t n_tiles = 0;
    for (uint32_t i = 0; i < bands->n_slabs; i++)
        n_tiles += (bands->slabs[i].n_components + CG_DIGIT_COMPONENTS - 1u) / CG_DIGIT_COMPONENTS;
    return n_tiles * CG_DCT * CG_SYMBOL_DIGITS * CG_TILE * CG_DIGIT_COMPONENTS;
}

/* FORMAT.md's stages 1 to 5, into s->out. cg_klt_exact() is for profiles of version 2, the others
 * are for version 1. */
void cg_klt_lists(const cg_synthesis *s);
void cg_klt_quads(const cg_synthesis *s); /* klt_quads.c */
void cg_klt_tiles(const cg_synthesis *s);
void cg_klt_exact(const cg_synthesis *s); /* klt_exact.c; of the joint matrix stage 1a */

/* Steps 4 and 5 for the tokens of one row's block in s->x: n_channels channels from first on, which
 * are whole heads. */
void cg_klt_finish_unit(const cg_synthesis *s, uint32_t first, uint32_t n_channels, size_t row);

#ifdef __cplusplus
}
#endif
#endif
