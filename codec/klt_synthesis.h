/* codec/klt_synthesis.h - from symbols to elements, in one of four ways, for klt_decode.c: in three
 * with profiles of version 1, in integers with those of version 2.
 *
 * The inverse KLT is a product of matrices, symbols by basis. It is nearly all that decoding costs
 * (57 % on AVX2), and most symbols are 0, so what CPUs are good at decides on the way:
 * cg_basis_layout. All walk units (whole heads, so that what is rotated and stored together
 * is in the cache) and blocks of 8 tokens, and end in cg_klt_finish_unit(). Threads: each has its
 * own cg_synthesis.
 */
#ifndef CG_CODEC_KLT_SYNTHESIS_H
#define CG_CODEC_KLT_SYNTHESIS_H
#include "codec/heads.h"
#include "codec/kernels.h"
#include "codec/symbols.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Quads of a slab's row that belong to a higher digit of its symbols. */
typedef struct cg_large_row {
    cg_quad_row row;
    uint32_t slab, r; /* r: f * n_blocks + b */
    unsigned shift;
} cg_large_row;

typedef struct cg_synthesis {
    const cg_profile *profile;
    const cg_heads *heads; /* not of the joint matrix, nor out, scale, mean and x */
    const cg_group *group;
    unsigned matrix, level;
    const cg_symbols *symbols;
    void *out;
    float *scale, *mean; /* [n_channels], of FORMAT.md's step 3 */
    float *x;            /* [CG_DCT][unit_channels]: a block's tokens */
    float *y;            /* lists: [CG_DCT][CG_PANEL_CHANNELS]; else [CG_DCT][CG_TILE][y_stride] */
    int32_t *sums;       /* integers: [CG_DCT][f_stride], in it [CG_TILE][y_stride] */
    /* With a joint matrix, cg_klt_given's numbers of all groups: a group reads, the joint matrix
     * writes. n_given[CG_DCT]: of the level; zeros without. Of the joint matrix NULL. */
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

/* Quads of n blocks. As many again are taken for large symbols, and all that for each limb in which
 * they are listed anew. */
static inline size_t cg_klt_most_quads(const cg_level_columns *columns, size_t n)
{
    return (columns->n_columns / CG_QUAD_COMPONENTS + CG_DCT) * n;
}

static inline size_t cg_klt_quads_bytes(const cg_level_columns *columns, size_t n)
{
    return (2 * (1 + CG_MAX_LIMBS) * cg_klt_most_quads(columns, n) + CG_QUAD_SLACK) *
           sizeof(cg_quad);
}

/* Integers: each row's quads, again for each digit of large symbols. n_cells: of a block; those
 * that are given make quads of their own. */
static inline size_t cg_klt_exact_quads_bytes(size_t n_cells, size_t n)
{
    return (3 * (n_cells / CG_QUAD_COMPONENTS + 2 * CG_DCT) * n + CG_QUAD_SLACK) * sizeof(cg_quad);
}

/* Integers in tiles: each slab's and frequency's digits, all of which may be needed. */
static inline size_t cg_klt_digit_tiles_bytes(const cg_bands *bands)
{
    size_t n_tiles = 0;
    for (uint32_t i = 0; i < bands->n_slabs; i++)
        n_tiles += (bands->slabs[i].n_components + CG_DIGIT_COMPONENTS - 1u) / CG_DIGIT_COMPONENTS;
    return n_tiles * CG_DCT * CG_SYMBOL_DIGITS * CG_TILE * CG_DIGIT_COMPONENTS;
}

/* FORMAT.md's steps 1 to 5. */
void cg_klt_lists(const cg_synthesis *s);
void cg_klt_quads(const cg_synthesis *s); /* klt_quads.c */
void cg_klt_tiles(const cg_synthesis *s);
void cg_klt_exact(const cg_synthesis *s); /* klt_exact.c; of the joint matrix step 1a */

/* Steps 4 and 5 for n_channels channels from first on, whole heads, of one block's tokens in s->x.
 */
void cg_klt_finish_unit(const cg_synthesis *s, uint32_t first, uint32_t n_channels, size_t block);

#ifdef __cplusplus
}
#endif
#endif
