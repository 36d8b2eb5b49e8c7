/* codec/kernels.h - the inner loops of the lossy levels, one table of them per instruction set.
 *
 * kernels.c and klt_*_kernels.c are compiled once per instruction set (CMakeLists.txt); what is
 * said here holds for each table. For profiles of version 1 FORMAT.md lets sums of floats be fused
 * and reordered, so tables agree within its tolerance, not bit for bit. What decodes profiles of
 * version 2 agrees bit for bit: accumulate_bytes(), _words(), _elements(), multiply_tiles() and
 * exact_kernels.h. So do the tables of rANS (rans_kernels.h).
 *
 * Words: a cell is a symbol, int16. A component has a row of the basis; four neighbouring ones are
 * a quad. A panel is a run of channels whose sums fit in registers; a slab is a run of components
 * that are summed together (codec/basis.h, codec/bands.h). A tile is what a matrix unit (AMX)
 * takes. A digit is 8 bits of a larger integer, signed. A row of symbols is those of one block of 8
 * tokens and one frequency. n_sixteens counts 16 channels or components.
 *
 * Threads: pure functions; cg_kernels_best() is set by the CPU, unless a test calls
 * cg_kernels_use().
 */
#ifndef CG_CODEC_KERNELS_H
#define CG_CODEC_KERNELS_H
#include "codec/exact_kernels.h"
#include "codec/geometry.h"
#include "codec/rans_kernels.h"
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    CG_DCT = CG_BLOCK_TOKENS, /* tokens of a DCT block, and its frequencies */
    CG_PANEL_CHANNELS = 256,  /* channels whose sums a decoding kernel holds in registers */
    CG_BAND_CHANNELS = 64,    /* the same of integers (codec/bands.h) */
    CG_TILE = 32,             /* blocks, components or channels of a tile */
    CG_QUAD_COMPONENTS = 4,
    CG_QUAD_SLACK = 16,       /* quads behind a list that may be overwritten */
    CG_DIGIT_COMPONENTS = 64, /* of a tile of digits */
    CG_DIGIT_BITS = 8,        /* of a digit in such a tile, signed */
    CG_SYMBOL_DIGITS = 3,     /* so many hold any symbol */
    CG_SQUARES = 16, /* sums that add_row() keeps apart: additions to a single one would wait for
                        each other */
    CG_QUERIES = 16, /* of what weigh_tokens() takes at once */
};

/* One symbol that is not zero. */
typedef struct cg_nonzero {
    uint32_t component;
    float value;
} cg_nonzero;

/* The symbols of four neighbouring components, not all of them zero. */
typedef struct cg_quad {
    uint32_t index; /* in its slab */
    int8_t symbols[CG_QUAD_COMPONENTS];
} cg_quad;

/* A row of symbols (one block and frequency) in one slab of components. */
typedef struct cg_quad_row {
    const cg_quad *quads;
    uint32_t n_quads;
    int32_t sum;   /* of the quads' symbols */
    int32_t limit; /* larger symbols stand as this in the quads; INT32_MAX: there are none */
} cg_quad_row;

/* One digit of a frequency's symbols in one slab, as matrix units take integers: tiles of 32 blocks
 * by 64 components. The slab's tiles from n_tiles on would be all zeros, and are not there. */
typedef struct cg_digit_tiles {
    const int8_t *tiles; /* [n_tiles][CG_TILE][CG_DIGIT_COMPONENTS] */
    size_t n_tiles;
} cg_digit_tiles;

/* A frequency's symbols as matrix units take them: tiles of 32 blocks by 32 components, bf16, row
 * by row. bf16 rounds symbols beyond 256; what that loses stands in a second tile of the same
 * components. */
typedef struct cg_tiled_symbols {
    const uint16_t *tiles;           /* [n_tiles][CG_TILE][CG_TILE] */
    const uint16_t *tile_components; /* [n_tiles]: a tile's first component / 32 */
    size_t n_tiles;
} cg_tiled_symbols;

/* The inverse KLT of profiles of version 1, from symbols to sums, in three ways. A table need not
 * have all, and has NULL for what it lacks. The last way that it has, and that suits the head size,
 * is taken (codec/basis.h). */
typedef struct cg_klt_inverse {
    /* 1. Lists, in floats. Lists those of cells[n_cells] that are not zero, in order, and returns
     * their number. list_out has room for n_cells. */
    size_t (*list_nonzero)(const int16_t *cells, size_t n_cells, cg_nonzero *list_out);
    /* y[CG_PANEL_CHANNELS] = sum over the list of value times the panel's row of that component,
     * for the first 32 * n_parts channels. */
    void (*accumulate)(const uint32_t *panel, const cg_nonzero *list, size_t n_list,
                       unsigned n_parts, float *y);
    /* 2. Quads, in integers of 8 bits. Lists those quads of cells[n_cells] that are not all zero,
     * in order. quads_out has room for n_cells / 4 + CG_QUAD_SLACK: what lies behind the listed
     * quads may be overwritten. */
    void (*list_quads)(const int16_t *cells, size_t n_cells, cg_quad *quads_out,
                       cg_quad_row *row_out);
    int quad_limit; /* largest magnitude of a symbol in a quad */
    unsigned
        digit_bits; /* of digits that large symbols are cut into: signed, and within quad_limit */
    /* y[r][ch] = unit * sum over rows[r] of symbol * (byte - 128), for n_rows rows and 16 *
     * n_sixteens channels; added to what y holds unless is_first. slab: bytes
     * [n_quads][CG_PANEL_CHANNELS][4]. */
    void (*accumulate_quads)(const uint8_t *slab, const cg_quad_row *rows, size_t n_rows,
                             unsigned n_sixteens, float unit, bool is_first, float *y,
                             size_t y_stride);
    /* 3. Matrix units. Cuts the first n_blocks rows of cells, at most CG_TILE, into tiles, with
     * zeros below them. Returns n_tiles, at most 2 * ceil(n_active / CG_TILE). */
    size_t (*tile_symbols)(const int16_t *cells, size_t n_blocks, size_t n_active, uint16_t *tiles,
                           uint16_t *tile_components);
    /* y[f][b][ch] = sum over c of S[f][b][c] * basis[c][ch] for CG_TILE blocks and channels.
     * y_strides: of f and of b. panel: bf16 [n_components / CG_TILE][2][16][32]; element i of row p
     * of half h is component 2p + i % 2 of channel 16h + i / 2. */
    void (*synthesize)(const cg_tiled_symbols symbols[CG_DCT], size_t n_blocks,
                       const uint16_t *panel, float *y, size_t f_stride, size_t b_stride);
} cg_klt_inverse;

/* The inverse KLT of profiles of version 2 (codec/bands.h), in integers modulo 2^32. A table has
 * one of three sets, and NULL for the others: accumulate_bytes(), list_pairs(), accumulate_words()
 * and list_quads() of above; or accumulate_elements(); or tile_digits() and multiply_tiles(). */
typedef struct cg_klt_integers {
    /* y[r][ch] = 2^shift * sum over rows[r] of symbol * (byte - 128), for n_rows rows and 16 *
     * n_sixteens channels, at most CG_BAND_CHANNELS; added to what y holds unless is_first.
     * lines: bytes [n_quads][16 * n_sixteens][4]. */
    void (*accumulate_bytes)(const uint8_t *lines, const cg_quad_row *rows, size_t n_rows,
                             unsigned n_sixteens, unsigned shift, bool is_first, int32_t *y,
                             size_t y_stride);
    /* Elements of 16 bits, by pairs of components. Lists those pairs of cells[n_cells] that are not
     * both zero, in order: as quads whose four bytes are two symbols of 16 bits. quads_out has room
     * for n_cells / 2 + CG_QUAD_SLACK. lines: [n_pairs][16 * n_sixteens][2] of 16 bits. */
    void (*list_pairs)(const int16_t *cells, size_t n_cells, cg_quad *quads_out,
                       cg_quad_row *row_out);
    void (*accumulate_words)(const uint8_t *lines, const cg_quad_row *rows, size_t n_rows,
                             unsigned n_sixteens, unsigned shift, bool is_first, int32_t *y,
                             size_t y_stride);
    /* y[n_channels] += 2^shift * sum over c of cells[c] * elements[c][n_channels]. elements: of 16
     * bits, or bytes with a sign where they are not wide. */
    void (*accumulate_elements)(const void *elements, bool is_wide, const int16_t *cells,
                                size_t n_cells, unsigned shift, size_t n_channels, int32_t *y);
    /* Matrix units. Cuts n_cells cells in each of n_rows rows, at most CG_TILE, into digits, the
     * lowest first. Returns where its tiles end in tiles_out, which has room for CG_SYMBOL_DIGITS *
     * ceil(n_cells / CG_DIGIT_COMPONENTS) tiles. */
    int8_t *(*tile_digits)(const int16_t *cells, size_t row_stride, size_t n_rows, size_t n_cells,
                           int8_t *tiles_out, cg_digit_tiles digits_out[CG_SYMBOL_DIGITS]);
    /* y[r][ch] = 2^shift * sum over c of digit[r][c] * element[c][ch], for n_rows rows and 16 *
     * n_sixteens channels; added to what y holds unless is_first. lines: bytes [n_quads][16 *
     * n_sixteens][4]; is_wide: [n_quads][2][...][4], the low digits of elements and the high ones.
     * Whole tiles of quads are read: what lies behind the slab's own is multiplied by zeros. */
    void (*multiply_tiles)(const uint8_t *lines, bool is_wide, const cg_digit_tiles *digits,
                           size_t n_rows, unsigned n_sixteens, unsigned shift, bool is_first,
                           int32_t *y, size_t y_stride);
    /* Quads of zeros among others are better listed: neighbouring rows that have all their quads
     * are then multiplied together. */
    bool takes_whole_rows;
} cg_klt_integers;

/* The KLT of an encoder, from channels to coefficients: a projection of rows on the basis's
 * components. */
typedef struct cg_klt_forward {
    /* coef[r][c] = sum over ch of rows[r][ch] * basis[c][ch], for 16 * n_sixteens components.
     * rows[n_rows][row_stride]: zeros from n_channels to 2 * n_pairs. n_pairs: a multiple of 16.
     * analysis[n_sixteens][n_pairs][16]: pairs of bf16. The low half of word c of row p is
     * basis[c][2p], the high one basis[c][2p + 1].
     * split: room for 64 * 2 * n_pairs bf16, 64-byte aligned.
     * coef has rows up to the next multiple of CG_TILE; those behind n_rows become garbage. */
    void (*project)(const float *rows, size_t row_stride, size_t n_rows, const uint32_t *analysis,
                    size_t n_pairs, size_t n_sixteens, uint16_t *split, float *coef,
                    size_t coef_stride);
    /* The same, where integers are faster; otherwise NULL. analysis holds int16, and a component's
     * sum is multiplied by scale[c]. The rows are rounded to 16 bits, or to as few as keep the sums
     * within 32. norm: the largest Euclidean norm of a component's numbers. */
    void (*project_narrow)(const float *rows, size_t row_stride, size_t n_rows,
                           const uint32_t *analysis, const float *scale, float norm, size_t n_pairs,
                           size_t n_sixteens, uint16_t *split, float *coef, size_t coef_stride);
    /* The same for integers of at most 15 bits; each table has it. Where it takes_digits:
     * analysis[n_sixteens][2][n_pairs / 2][16][4]: signed digits of 8 bits, four neighbouring
     * channels together: first all the low ones, then the high ones.
     * n_digits[n_sixteens]: 1 where the high ones are not to be read.
     * It is read up to the next multiple of 64 channels. */
    void (*project_integers)(const float *rows, size_t row_stride, size_t n_rows,
                             const uint32_t *analysis, const uint8_t *n_digits, const float *scale,
                             float norm, size_t n_pairs, size_t n_sixteens, uint16_t *split,
                             float *coef, size_t coef_stride);
    bool takes_digits;
} cg_klt_forward;

typedef struct cg_kernels {
    const char *name; /* "baseline", "avx2", "avx512", "vnni", "amx" */
    /* x[t][ch] = fmaf(sum over f of D[f][t] y[f][ch], scale[ch], mean[ch]); y[8][y_stride],
     * x[8][x_stride]. */
    void (*inverse_dct)(const float *y, size_t y_stride, const float *scale, const float *mean,
                        unsigned n_channels, float *x, size_t x_stride);
    /* y[f][ch] = sum over t of D[f][t] x[t][ch]; rows lie stride apart in both. */
    void (*forward_dct)(const float *x, size_t x_stride, unsigned n_channels, float *y,
                        size_t y_stride);
    /* NeoX rotation of one head in place, by cos[half], sin[half]; half = rotary_dim / 2. */
    void (*rotate)(float *head, const float *cosine, const float *sine, size_t half);
    void (*to_bf16)(const float *values, size_t n_values, uint16_t *out);
    /* From elements of a dtype; exact. False: one is not finite. */
    bool (*load)(unsigned dtype, const void *elements, size_t n_elements, float *out);
    /* out[c] = coef[c] * inv_step, to nearest, within -32767 and 32767. */
    void (*quantize)(const float *coef, size_t n_columns, float inv_step, int16_t *out);
    /* out[c] = fine[c] / 3, to nearest: there are no ties. */
    void (*coarsen)(const int16_t *fine, size_t n_columns, int16_t *out);
    /* sums[c] += sign * row[c]; squares[c % CG_SQUARES] += row[c]^2. */
    void (*add_row)(const float *row, size_t n_columns, float sign, float *sums, float *squares);
    /* sums[ch] += factor * x[ch] of a token's heads, values[n_heads][head_dim]; x: each rotated
     * back by cosine[half] and sine[half], half = rotary_dim / 2. With half 0 they are as they are.
     */
    void (*add_heads)(const float *values, size_t n_heads, size_t head_dim, const float *cosine,
                      const float *sine, size_t half, float factor, float *sums);
    /* As add_row(), of symbols. */
    void (*add_cells)(const int16_t *cells, size_t n_columns, float sign, float *sums,
                      float *squares);
    /* cells[ch] = (x[ch] - base[ch]) * inv_step[ch], to nearest, within -32767 and 32767. */
    void (*quantize_channels)(const float *x, const float *base, const float *inv_step,
                              size_t n_channels, int16_t *cells);
    /* x[ch] = fmaf(cells[ch], step[ch], base[ch]). */
    void (*dequantize_channels)(const int16_t *cells, const float *step, const float *base,
                                size_t n_channels, float *x);
    /* out[r] = sum over ch of (rows[r][ch] - base[ch])^2, at most 10^30. */
    void (*square_distances)(const float *rows, size_t n_rows, size_t n_channels, const float *base,
                             float *out);
    /* Adds to counts[n_tokens][CG_QUERIES] what the tokens count to each of n_queries queries (at
     * most CG_QUERIES). What all tokens count to a query is 2 in all.
     * keys[n_tokens][head_dim].
     * queries[head_dim][CG_QUERIES]: a product with a key is the logarithm of the squared
     * attention, to base 2.
     * spread[n_tokens]: of the tokens' V, as square_distances() has it.
     * scores: room for [n_tokens][CG_QUERIES]. */
    void (*weigh_tokens)(const float *keys, size_t n_tokens, size_t head_dim, const float *queries,
                         size_t n_queries, const float *spread, float *scores, float *counts);
    const cg_klt_inverse *inverse;
    const cg_klt_integers *integers;
    const cg_klt_forward *forward;
    const cg_rans_kernels *rans;
    const cg_exact_kernels *exact;
} cg_kernels;

/* The best table of this CPU. */
const cg_kernels *cg_kernels_best(void);
/* The table of that name, or NULL where this CPU or build has none: lets a test run each. */
const cg_kernels *cg_kernels_named(const char *name);
/* Makes cg_kernels_best() return this table from now on; NULL: the CPU's best again. For tests and
 * benchmarks; no other thread may use the codec meanwhile. Profiles that are open keep their table.
 */
void cg_kernels_use(const cg_kernels *kernels);

extern const cg_kernels cg_kernels_baseline;
#if defined(__x86_64__)
extern const cg_kernels cg_kernels_avx2, cg_kernels_avx512, cg_kernels_vnni, cg_kernels_amx;
#endif

#if defined(CG_KLT_INVERSE) /* one of a table's files is being compiled */
extern const cg_klt_inverse CG_KLT_INVERSE;
extern const cg_klt_integers CG_KLT_INTEGERS;
extern const cg_klt_forward CG_KLT_FORWARD;
#endif

#ifdef __cplusplus
}
#endif
#endif
