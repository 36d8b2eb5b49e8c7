/* Compiled once per instruction set: see kernels.h. Loops are written so that gcc vectorizes them,
 * or with the intrinsics that all vector widths have in common. */
#include "codec/bf16.h"
#include "codec/kernel_vectors.h"
#include "codec/kernels.h"

#include <string.h>

#if !defined(__AVX2__)
enum { QUAD_LIMIT = 0, DIGIT_BITS = 0 };
#define list_quads NULL
#define accumulate_quads NULL

static size_t list_nonzero(const int16_t *cells, size_t n_cells, cg_nonzero *list_out)
{
    size_t n = 0;
    size_t i = 0;
    for (; i + 4 <= n_cells; i += 4) { /* most cells are zero: four at a time */
        /* A little-endian word of four cells: the lowest bit that is set is of the first that is
         * not zero. */
        uint64_t four;
        memcpy(&four, cells + i, sizeof four);
        while (four != 0) {
            const unsigned lane = (unsigned)__builtin_ctzll(four) / 16;
            list_out[n++] = (cg_nonzero){(uint32_t)(i + lane), (float)cells[i + lane]};
            four &= ~((uint64_t)0xffff << 16 * lane);
        }
    }
    for (; i < n_cells; i++) {
        if (cells[i] != 0)
            list_out[n++] = (cg_nonzero){(uint32_t)i, (float)cells[i]};
    }
    return n;
}

/* 32 channels, whose sums live in registers. */
static void accumulate_part(const uint32_t *panel, const cg_nonzero *list, size_t n_list, float *y)
{
    vector_f32 low[VECTORS_A_PART], high[VECTORS_A_PART];
    for (unsigned k = 0; k < VECTORS_A_PART; k++)
        low[k] = high[k] = (vector_f32){0};
    for (size_t i = 0; i < n_list; i++) {
        const uint32_t *row = panel + (size_t)list[i].component * (CG_PANEL_CHANNELS / 2);
        const float value = list[i].value;
#pragma GCC unroll 8
        for (unsigned k = 0; k < VECTORS_A_PART; k++) {
            const vector_u32 words = *(const vector_u32 *)(const void *)(row + LANES * k);
            /* A bf16 is the high half of a float: one of a word needs a shift, the other a mask. */
            low[k] += value * (vector_f32)(words << 16);
            high[k] += value * (vector_f32)(words & 0xffff0000u);
        }
    }
    for (unsigned k = 0; k < VECTORS_A_PART; k++) {
        *(vector_f32 *)(void *)(y + LANES * k) = low[k];
        *(vector_f32 *)(void *)(y + 16 + LANES * k) = high[k];
    }
}

static void accumulate(const uint32_t *panel, const cg_nonzero *list, size_t n_list,
                       unsigned n_parts, float *y)
{
    for (unsigned k = 0; k < n_parts; k++)
        accumulate_part(panel + 16 * k, list, n_list, y + 32 * k);
}
#else
#include "codec/kernel_lists.h"
#define list_nonzero NULL
#define accumulate NULL

/* Sums in registers: what a pass over the quads holds. */
#if defined(__AVX512BW__)
enum { QUADS_A_PASS = 16 };
#else
enum { QUADS_A_PASS = 8 };
#endif

#if defined(__AVX512VNNI__)
enum { QUAD_LIMIT = 127, DIGIT_BITS = 7, QUADS_AT_ONCE = 1 };

static inline vector_i add_products(vector_i sum, const uint8_t *const at[],
                                    const vector_i symbols[])
{
    /* gcc 12 copies the sums of the intrinsic in each round. */
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(V_SI(loadu)(at[0])), "v"(symbols[0]));
    return sum;
}
#else
/* Two quads at once: 4 x 255 x 32 is still within int16. */
enum { QUAD_LIMIT = 32, DIGIT_BITS = 6, QUADS_AT_ONCE = 2 };

static inline vector_i add_products(vector_i sum, const uint8_t *const at[],
                                    const vector_i symbols[])
{
    const vector_i a = V(maddubs_epi16)(V_SI(loadu)((const void *)at[0]), symbols[0]);
    const vector_i b = V(maddubs_epi16)(V_SI(loadu)((const void *)at[1]), symbols[1]);
    return V(add_epi32)(sum, V(madd_epi16)(V(add_epi16)(a, b), V(set1_epi16)(1)));
}
#endif

/* Cells of two registers as the bytes of one, in order. */
static inline vector_i narrow(vector_i low, vector_i high)
{
#if defined(__AVX512BW__)
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(low)),
                              _mm512_cvtepi16_epi8(high), 1);
#else
    /* It packs halves of 128 bits apart: 0xd8 puts the quarters in order. */
    return _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8);
#endif
}

/* All lanes of a register added up. */
static inline int32_t sum_of(vector_i sums)
{
#if defined(__AVX512BW__)
    return _mm512_reduce_add_epi32(sums);
#else
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
#endif
}

static inline bool is_zero(vector_i bits)
{
#if defined(__AVX512BW__)
    return _mm512_test_epi32_mask(bits, bits) == 0;
#else
    return _mm256_testz_si256(bits, bits);
#endif
}

static void list_quads(const int16_t *cells, size_t n_cells, cg_quad *quads_out,
                       cg_quad_row *row_out)
{
    enum { CELLS = 2 * LISTED_WORDS }; /* of a register */
    const vector_i most = V(set1_epi16)(QUAD_LIMIT), least = V(set1_epi16)(-QUAD_LIMIT);
    vector_i sums = V_SI(setzero)(), large = sums;
    uint32_t n = 0;
    for (size_t i = 0; i < n_cells; i += 2 * CELLS) {
        vector_i kept[2];
        for (unsigned k = 0; k < 2; k++) {
            const size_t at = i + CELLS * k, left = n_cells > at ? n_cells - at : 0;
            const vector_i cell = load_cells(cells + at, left);
            kept[k] = V(max_epi16)(V(min_epi16)(cell, most), least);
            sums = V(add_epi32)(sums, V(madd_epi16)(kept[k], V(set1_epi16)(1)));
            /* Bits that a quad cannot hold, of any cell. */
            large = V_SI(or)(large, V_SI(xor)(cell, kept[k]));
        }
        n += list_words(narrow(kept[0], kept[1]), (uint32_t)(i / 4), quads_out + n);
    }
    const bool has_large = !is_zero(large);
    *row_out = (cg_quad_row){quads_out, n, sum_of(sums), has_large ? QUAD_LIMIT : INT32_MAX};
}

/* n is a constant where this is inlined: the sums then live in registers. */
static inline __attribute__((always_inline)) void accumulate_row(const uint8_t *slab,
                                                                 const cg_quad_row *row,
                                                                 const unsigned n, float unit,
                                                                 bool is_first, float *y)
{
    vector_i sum[QUADS_A_PASS];
    for (unsigned k = 0; k < n; k++)
        sum[k] = V(set1_epi32)(-128 * row->sum); /* bytes of a basis stand for byte - 128 */
    for (uint32_t i = 0; i < row->n_quads; i += QUADS_AT_ONCE) {
        vector_i symbols[QUADS_AT_ONCE];
        const uint8_t *at[QUADS_AT_ONCE];
        for (unsigned j = 0; j < QUADS_AT_ONCE; j++) {
            int32_t four = 0;
            at[j] = slab;
            if (j == 0 || i + j < row->n_quads) {
                memcpy(&four, row->quads[i + j].symbols, sizeof four);
                at[j] += (size_t)row->quads[i + j].index * CG_QUAD_COMPONENTS * CG_PANEL_CHANNELS;
            }
            symbols[j] = V(set1_epi32)(four);
        }
#pragma GCC unroll 16
        for (unsigned k = 0; k < n; k++) {
            sum[k] = add_products(sum[k], at, symbols);
            for (unsigned j = 0; j < QUADS_AT_ONCE; j++)
                at[j] += sizeof(vector_i);
        }
    }
    for (unsigned k = 0; k < n; k++) {
        vector_f32 *out = (vector_f32 *)(void *)(y + LANES * k);
        const vector_f32 product = unit * (vector_f32)V(cvtepi32_ps)(sum[k]);
        *out = is_first ? product : *out + product;
    }
}

static inline __attribute__((always_inline)) void
accumulate_rows(const uint8_t *slab, const cg_quad_row *rows, size_t n_rows, const unsigned n,
                float unit, bool is_first, float *y, size_t y_stride)
{
    for (size_t r = 0; r < n_rows; r++) {
        if (rows[r].n_quads > 0 || is_first)
            accumulate_row(slab, &rows[r], n, unit, is_first, y + r * y_stride);
    }
}

static void accumulate_quads(const uint8_t *slab, const cg_quad_row *rows, size_t n_rows,
                             unsigned n_sixteens, float unit, bool is_first, float *y,
                             size_t y_stride)
{
    /* n is a constant in each branch, so that the compiler keeps n sums in registers. */
    for (unsigned k = 0, n; k < n_sixteens * VECTORS_A_PART; k += n) {
        const unsigned left = n_sixteens * VECTORS_A_PART - k;
        const uint8_t *at = slab + k * sizeof(vector_i);
        float *out = y + k * LANES;
        if (left >= QUADS_A_PASS)
            accumulate_rows(at, rows, n_rows, n = QUADS_A_PASS, unit, is_first, out, y_stride);
        else if (left >= 12) /* heads of 64 or 96 */
            accumulate_rows(at, rows, n_rows, n = QUADS_A_PASS < 12 ? QUADS_A_PASS : 12, unit,
                            is_first, out, y_stride);
        else if (left >= 4)
            accumulate_rows(at, rows, n_rows, n = 4, unit, is_first, out, y_stride);
        else
            accumulate_rows(at, rows, n_rows, n = 1, unit, is_first, out, y_stride);
    }
}
#endif

#if defined(__AMX_BF16__)
static size_t tile_symbols(const int16_t *cells, size_t n_blocks, size_t n_active, uint16_t *tiles,
                           uint16_t *tile_components)
{
    size_t n_tiles = 0;
    for (size_t c = 0; c < n_active; c += CG_TILE) {
        const size_t n = n_active - c < CG_TILE ? n_active - c : CG_TILE;
        const __mmask32 lanes = n < CG_TILE ? (1u << n) - 1 : ~0u;
        uint16_t *rounded = tiles + n_tiles * CG_TILE * CG_TILE,
                 *missing = rounded + CG_TILE * CG_TILE;
        __mmask32 any_large = 0;
        tile_components[n_tiles++] = (uint16_t)(c / CG_TILE);
        for (size_t b = 0; b < CG_TILE; b++) {
            const __m512i row = b < n_blocks
                                    ? _mm512_maskz_loadu_epi16(lanes, cells + b * n_active + c)
                                    : _mm512_setzero_si512();
            const __m512 low =
                _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(row)));
            const __m512 high =
                _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(row, 1)));
            const __m512i bits = (__m512i)_mm512_cvtne2ps_pbh(high, low);
            _mm512_storeu_si512(rounded + b * CG_TILE, bits);
            /* Integers up to 256 are exact in bf16. The magnitude of INT16_MIN is itself. */
            any_large |= _mm512_cmpgt_epi16_mask(_mm512_abs_epi16(row), _mm512_set1_epi16(256)) |
                         _mm512_cmpeq_epi16_mask(row, _mm512_set1_epi16(INT16_MIN));
        }
        if (any_large == 0)
            continue;
        for (size_t b = 0; b < CG_TILE; b++) {
            for (size_t i = 0; i < CG_TILE; i++) {
                const float symbol = b < n_blocks && i < n ? cells[b * n_active + c + i] : 0;
                missing[b * CG_TILE + i] =
                    cg_bf16_from_f32(symbol - cg_bf16_to_f32(rounded[b * CG_TILE + i]));
            }
        }
        tile_components[n_tiles++] = (uint16_t)(c / CG_TILE);
    }
    return n_tiles;
}

static void synthesize(const cg_tiled_symbols symbols[CG_DCT], size_t n_blocks,
                       const uint16_t *panel, float *y, size_t f_stride, size_t b_stride)
{
    const size_t half = CG_TILE * CG_TILE / 2, row_bytes = b_stride * sizeof *y;
    /* A tile of rounded symbols and one of what is missing name the same components: both are
     * multiplied with the same part of the panel. */
    configure_tiles();
    for (unsigned f = 0; f < CG_DCT; f++, y += f_stride) {
        const cg_tiled_symbols *s = &symbols[f];
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (size_t i = 0; i < s->n_tiles; i++) {
            const uint16_t *left = s->tiles + i * 2 * half,
                           *right = panel + s->tile_components[i] * 2 * half;
            _tile_loadd(6, right, 64);
            _tile_loadd(7, right + half, 64);
            _tile_loadd(4, left, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (n_blocks > CG_TILE / 2) { /* or the lower rows are zeros: products as dear as any */
                _tile_loadd(5, left + half, 64);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, y, row_bytes);
        _tile_stored(1, y + 16, row_bytes);
        _tile_stored(2, y + 16 * b_stride, row_bytes);
        _tile_stored(3, y + 16 * b_stride + 16, row_bytes);
    }
    _tile_release();
}
#else
#define tile_symbols NULL
#define synthesize NULL
#endif

const cg_klt_inverse CG_KLT_INVERSE = {list_nonzero, accumulate,       list_quads,   QUAD_LIMIT,
                                       DIGIT_BITS,   accumulate_quads, tile_symbols, synthesize};
