/* Compiled once per instruction set, with CG_KERNELS the name of the table and CG_KERNELS_NAME its
 * string, and with contraction on: see kernels.h. Loops are written so that gcc vectorizes them;
 * the 64-byte vectors are lowered to what the instruction set has. */
#include "codec/kernels.h"

#include "codec/bf16.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

/* One register of the instruction set: longer vectors than that gcc keeps in memory. */
#if defined(__AVX512F__)
enum { LANES = 16, ROWS_A_PASS = 8 };
#elif defined(__AVX2__)
enum { LANES = 8, ROWS_A_PASS = 4 };
#else
enum { LANES = 4, ROWS_A_PASS = 2 };
#endif
typedef float vector_f32 __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t vector_u32 __attribute__((vector_size(4 * LANES), aligned(4)));
/* Vectors of the low halves of a part's words, and as many of the high ones. */
enum { VECTORS_A_PART = 16 / LANES };

#if !defined(__AVX2__)
enum { QUAD_LIMIT = 0 };
#define list_quads NULL
#define accumulate_quads NULL

static size_t list_nonzero(const int16_t *cells, size_t n_cells, cg_nonzero *list_out)
{
    size_t n = 0;
    size_t i = 0;
    for (; i + 4 <= n_cells; i += 4) { /* most cells are zero: four at a time */
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
#define list_nonzero NULL
#define accumulate NULL

/* Vectors of integers, and what is done with them: bytes of a basis, which are unsigned, by
 * symbols. */
#if defined(__AVX512BW__)
typedef __m512i vector_i;
typedef __m512 vector_ps;
enum { QUADS_A_PASS = 16 };
#define V(name) _mm512_##name
#define V_SI(name) _mm512_##name##_si512
#else
typedef __m256i vector_i;
typedef __m256 vector_ps;
enum { QUADS_A_PASS = 8 };
#define V(name) _mm256_##name
#define V_SI(name) _mm256_##name##_si256
#endif

#if defined(__AVX512VNNI__)
enum { QUAD_LIMIT = 127, QUADS_AT_ONCE = 1 };

static inline vector_i add_products(vector_i sum, const uint8_t *const at[],
                                    const vector_i symbols[])
{
    /* gcc 12 copies the sums of the intrinsic in each round. */
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(V_SI(loadu)(at[0])), "v"(symbols[0]));
    return sum;
}
#else
/* Two quads at once: 4 x 255 x 32 is still within int16. */
enum { QUAD_LIMIT = 32, QUADS_AT_ONCE = 2 };

static inline vector_i add_products(vector_i sum, const uint8_t *const at[],
                                    const vector_i symbols[])
{
    const vector_i a = V(maddubs_epi16)(V_SI(loadu)((const void *)at[0]), symbols[0]);
    const vector_i b = V(maddubs_epi16)(V_SI(loadu)((const void *)at[1]), symbols[1]);
    return V(add_epi32)(sum, V(madd_epi16)(V(add_epi16)(a, b), V(set1_epi16)(1)));
}
#endif

static void list_quads(const int16_t *cells, size_t n_cells, cg_quad *quads_out,
                       cg_quad_row *row_out)
{
    uint32_t n = 0;
    int sum = 0;
    bool has_large = false;
#if defined(__AVX512BW__)
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high =
        _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    const __m512i most = _mm512_set1_epi16(QUAD_LIMIT), least = _mm512_set1_epi16(-QUAD_LIMIT);
    __m512i sums = _mm512_setzero_si512(), large = sums;
    for (size_t i = 0; i < n_cells;
         i += 64) { /* squeezed together in registers; the stores reach past the list's end */
        __m256i bytes[2];
        for (unsigned k = 0; k < 2; k++) {
            const size_t at = i + 32 * k, left = n_cells > at ? n_cells - at : 0;
            const __m512i cell =
                _mm512_maskz_loadu_epi16(left < 32 ? (1u << left) - 1 : ~0u, cells + at);
            const __m512i kept = _mm512_max_epi16(_mm512_min_epi16(cell, most), least);
            sums = _mm512_add_epi32(sums, _mm512_madd_epi16(kept, _mm512_set1_epi16(1)));
            large = _mm512_or_si512(large, _mm512_xor_si512(cell, kept));
            bytes[k] = _mm512_cvtepi16_epi8(kept);
        }
        const __m512i quads = _mm512_inserti64x4(_mm512_castsi256_si512(bytes[0]), bytes[1], 1);
        const __mmask16 found = _mm512_test_epi32_mask(quads, quads);
        const __m512i index = _mm512_maskz_compress_epi32(
            found, _mm512_add_epi32(lanes, _mm512_set1_epi32((int)(i / 4))));
        const __m512i symbols = _mm512_maskz_compress_epi32(found, quads);
        _mm512_storeu_si512(quads_out + n, _mm512_permutex2var_epi32(index, low, symbols));
        _mm512_storeu_si512(quads_out + n + 8, _mm512_permutex2var_epi32(index, high, symbols));
        n += (uint32_t)__builtin_popcount(found);
    }
    sum = _mm512_reduce_add_epi32(sums);
    has_large = _mm512_test_epi32_mask(large, large) != 0;
#else
    for (size_t i = 0; i < n_cells; i += 4) {
        uint64_t four = 0;
        memcpy(&four, cells + i, (n_cells - i < 4 ? n_cells - i : 4) * sizeof *cells);
        if (four == 0)
            continue;
        quads_out[n].index = (uint32_t)(i / 4);
        for (unsigned k = 0; k < 4; k++) {
            const int cell = (int16_t)(four >> 16 * k);
            const int kept = cell > QUAD_LIMIT    ? QUAD_LIMIT
                             : cell < -QUAD_LIMIT ? -QUAD_LIMIT
                                                  : cell;
            quads_out[n].symbols[k] = (int8_t)kept;
            sum += kept;
            has_large |= kept != cell;
        }
        n++;
    }
#endif
    *row_out = (cg_quad_row){quads_out, n, sum, has_large ? QUAD_LIMIT : INT32_MAX};
}

/* n is a constant where this is inlined: the sums then live in registers. */
static inline __attribute__((always_inline)) void accumulate_row(const uint8_t *slab,
                                                                 const cg_quad_row *row,
                                                                 const unsigned n, float unit,
                                                                 bool is_first, float *y)
{
    vector_i sum[QUADS_A_PASS];
    for (unsigned k = 0; k < n; k++)
        sum[k] = V(set1_epi32)(-128 * row->sum);
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
    for (size_t r = 0; r < n_rows; r++)
        accumulate_row(slab, &rows[r], n, unit, is_first, y + r * y_stride);
}

static void accumulate_quads(const uint8_t *slab, const cg_quad_row *rows, size_t n_rows,
                             unsigned n_sixteens, float unit, bool is_first, float *y,
                             size_t y_stride)
{
    for (unsigned k = 0, n; k < n_sixteens * VECTORS_A_PART; k += n) {
        const unsigned left = n_sixteens * VECTORS_A_PART - k;
        const uint8_t *at = slab + k * sizeof(vector_i);
        if (left >= QUADS_A_PASS)
            accumulate_rows(at, rows, n_rows, n = QUADS_A_PASS, unit, is_first, y + LANES * k,
                            y_stride);
        else if (left >= 12) /* heads of 64 or 96 */
            accumulate_rows(at, rows, n_rows, n = QUADS_A_PASS < 12 ? QUADS_A_PASS : 12, unit,
                            is_first, y + LANES * k, y_stride);
        else if (left >= 4)
            accumulate_rows(at, rows, n_rows, n = 4, unit, is_first, y + LANES * k, y_stride);
        else
            accumulate_rows(at, rows, n_rows, n = 1, unit, is_first, y + LANES * k, y_stride);
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

/* Eight tiles of 16 rows of 64 bytes: 0 to 3 are sums, 4 and 5 left factors, 6 and 7 right ones. */
static void configure_tiles(void)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t n_rows[16];
    } config = {.palette = 1};
    for (unsigned i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.n_rows[i] = 16;
    }
    _tile_loadconfig(&config);
}

static void synthesize(const cg_tiled_symbols symbols[CG_DCT], size_t n_blocks,
                       const uint16_t *panel, float *y, size_t f_stride, size_t b_stride)
{
    const size_t half = CG_TILE * CG_TILE / 2, row_bytes = b_stride * sizeof *y;
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
            if (n_blocks > CG_TILE / 2) {
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

static void inverse_dct(const float *restrict y, size_t y_stride, const float *restrict scale,
                        const float *restrict mean, unsigned n_channels, float *restrict x,
                        size_t x_stride)
{
    for (unsigned ch = 0; ch < n_channels; ch++) {
        const float *in = y + ch;
        /* D[f][7 - t] is D[f][t] for even f and -D[f][t] for odd f. */
        for (unsigned t = 0; t < CG_DCT / 2; t++) {
            float even = cg_dct8[0][t] * in[0], odd = cg_dct8[1][t] * in[y_stride];
            for (unsigned f = 2; f < CG_DCT; f += 2) {
                even += cg_dct8[f][t] * in[f * y_stride];
                odd += cg_dct8[f + 1][t] * in[(f + 1) * y_stride];
            }
            x[t * x_stride + ch] = (even + odd) * scale[ch] + mean[ch];
            x[(CG_DCT - 1 - t) * x_stride + ch] = (even - odd) * scale[ch] + mean[ch];
        }
    }
}

static void forward_dct(const float *restrict x, size_t x_stride, unsigned n_channels,
                        float *restrict y, size_t y_stride)
{
    for (unsigned f = 0; f < CG_DCT; f++) {
        for (unsigned ch = 0; ch < n_channels; ch++) {
            float sum = 0;
            for (unsigned t = 0; t < CG_DCT; t++)
                sum += cg_dct8[f][t] * x[t * x_stride + ch];
            y[f * y_stride + ch] = sum;
        }
    }
}

static void rotate(float *restrict head, const float *restrict cosine, const float *restrict sine,
                   unsigned half)
{
    for (unsigned i = 0; i < half; i++) {
        const float a = head[i], b = head[i + half];
        head[i] = a * cosine[i] - b * sine[i];
        head[i + half] = b * cosine[i] + a * sine[i];
    }
}

static void to_bf16(const float *values, size_t n_values, uint16_t *out)
{
    for (size_t i = 0; i < n_values; i++)
        out[i] = cg_bf16_from_f32(values[i]);
}

#if defined(__AMX_BF16__)
/* Rows in two bf16 numbers each, together exact to 16 bits: tiles [n_pairs / 16][2 halves][16
 * rows][32 channels]. */
static void split_rows(const float *rows, size_t row_stride, size_t n_rows, size_t n_pairs,
                       uint16_t *split)
{
    for (size_t r = 0; r < 16; r++) {
        for (size_t ch = 0; ch < 2 * n_pairs; ch += 32) {
            uint16_t *out = split + ch / 32 * 1024 + r * 32;
            __m512 a = _mm512_setzero_ps(), b = a;
            if (r < n_rows) {
                a = _mm512_loadu_ps(rows + r * row_stride + ch);
                b = _mm512_loadu_ps(rows + r * row_stride + ch + 16);
            }
            const __m512bh high = _mm512_cvtne2ps_pbh(b, a);
            const __m256i a_bits = _mm512_castsi512_si256((__m512i)high);
            const __m256i b_bits = _mm512_extracti64x4_epi64((__m512i)high, 1);
            a = _mm512_sub_ps(
                a, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(a_bits), 16)));
            b = _mm512_sub_ps(
                b, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(b_bits), 16)));
            _mm512_storeu_si512(out, (__m512i)high);
            _mm512_storeu_si512(out + 512, (__m512i)_mm512_cvtne2ps_pbh(b, a));
        }
    }
}

static void project(const float *rows, size_t row_stride, size_t n_rows, const uint32_t *analysis,
                    size_t n_pairs, size_t n_sixteens, uint16_t *split, float *coef,
                    size_t coef_stride)
{
    const size_t tile_row_elements = n_pairs / 16 * 1024, row_bytes = coef_stride * sizeof *coef;
    configure_tiles();
    for (size_t r = 0; r < n_rows; r += CG_TILE) {
        const size_t n = n_rows - r;
        split_rows(rows + r * row_stride, row_stride, n, n_pairs, split);
        split_rows(rows + (r + 16) * row_stride, row_stride, n > 16 ? n - 16 : 0, n_pairs,
                   split + tile_row_elements);
        for (size_t c = 0; c < n_sixteens; c += 2) {
            const bool has_two = c + 1 < n_sixteens;
            const uint32_t *right = analysis + c * n_pairs * 16,
                           *second = has_two ? right + n_pairs * 16 : right;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (size_t k = 0; k < n_pairs / 16; k++) {
                const uint16_t *left = split + k * 1024;
                _tile_loadd(6, right + k * 256, 64);
                _tile_loadd(7, second + k * 256, 64);
                for (unsigned part = 0; part < 2; part++, left += 512) {
                    _tile_loadd(4, left, 64);
                    _tile_loadd(5, left + tile_row_elements, 64);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_dpbf16ps(1, 4, 7);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
            }
            float *out = coef + r * coef_stride + 16 * c;
            _tile_stored(0, out, row_bytes);
            _tile_stored(2, out + 16 * coef_stride, row_bytes);
            if (has_two) {
                _tile_stored(1, out + 16, row_bytes);
                _tile_stored(3, out + 16 * coef_stride + 16, row_bytes);
            }
        }
    }
    _tile_release();
}
#else
/* n_rows rows by 16 components, whose sums stay in registers. */
static inline __attribute__((always_inline)) void
project_tile(const float *rows, size_t row_stride, const unsigned n_rows, const uint32_t *analysis,
             size_t n_pairs, float *coef, size_t coef_stride)
{
    enum { N = 16 / LANES };
    vector_f32 sum[ROWS_A_PASS][N];
    for (unsigned r = 0; r < n_rows; r++) {
        for (unsigned k = 0; k < N; k++)
            sum[r][k] = (vector_f32){0};
    }
    for (size_t p = 0; p < n_pairs; p++) {
#pragma GCC unroll 4
        for (unsigned k = 0; k < N; k++) {
            const vector_u32 words =
                *(const vector_u32 *)(const void *)(analysis + p * 16 + LANES * k);
            const vector_f32 low = (vector_f32)(words << 16),
                             high = (vector_f32)(words & 0xffff0000u);
#pragma GCC unroll 8
            for (unsigned r = 0; r < n_rows; r++)
                sum[r][k] += rows[r * row_stride + 2 * p] * low;
#pragma GCC unroll 8
            for (unsigned r = 0; r < n_rows; r++)
                sum[r][k] += rows[r * row_stride + 2 * p + 1] * high;
        }
    }
    for (unsigned r = 0; r < n_rows; r++) {
        for (unsigned k = 0; k < N; k++)
            *(vector_f32 *)(void *)(coef + r * coef_stride + LANES * k) = sum[r][k];
    }
}

static void project(const float *rows, size_t row_stride, size_t n_rows, const uint32_t *analysis,
                    size_t n_pairs, size_t n_sixteens, uint16_t *split, float *coef,
                    size_t coef_stride)
{
    (void)split;
    for (size_t c = 0; c < n_sixteens; c++) {
        size_t r = 0;
        for (; r + ROWS_A_PASS <= n_rows; r += ROWS_A_PASS)
            project_tile(rows + r * row_stride, row_stride, ROWS_A_PASS,
                         analysis + c * n_pairs * 16, n_pairs, coef + r * coef_stride + 16 * c,
                         coef_stride);
        for (; r < n_rows; r++)
            project_tile(rows + r * row_stride, row_stride, 1, analysis + c * n_pairs * 16, n_pairs,
                         coef + r * coef_stride + 16 * c, coef_stride);
    }
}
#endif

static inline int16_t nearest_cell(float q)
{
    q = q < 32767.0f
            ? q
            : 32767.0f; /* in this order a NaN, of sums that overflowed, becomes a number */
    q = q > -32767.0f ? q : -32767.0f;
    return (int16_t)(int32_t)(q + copysignf(0.5f, q)); /* |q| + 0.5 is exact enough below 2^15 */
}

static void quantize(const float *restrict coef, size_t n_columns, float inv_step,
                     int16_t *restrict out)
{
    for (size_t c = 0; c < n_columns; c++)
        out[c] = nearest_cell(coef[c] * inv_step);
}

#if defined(__AVX2__) && !defined(__AMX_BF16__)
/* A row of [n] as int16, rounded. Returns what it was multiplied with: the sums of its products
 * with numbers of that norm stay within int32. */
static float narrow_row(const float *row, size_t n, float norm, uint16_t *out)
{
    const vector_u32 no_sign = {0};
    vector_f32 largest = {0}, square = {0};
    float peak = 1e-30f, sum = 0;
    for (size_t i = 0; i < n; i += LANES) {
        const vector_f32 x = *(const vector_f32 *)(const void *)(row + i);
        largest =
            (vector_f32)V(max_ps)(largest, (vector_f32)((vector_u32)x & (no_sign + 0x7fffffffu)));
        square += x * x;
    }
    for (unsigned i = 0; i < LANES; i++) {
        peak = largest[i] > peak ? largest[i] : peak;
        sum += square[i];
    }
    float factor = 2.1e9f / (norm * sqrtf(sum) + 1e-20f);
    factor = factor < 32767 / peak ? factor : 32767 / peak;
    for (size_t i = 0; i < n; i += LANES) {
        const vector_f32 scaled = factor * *(const vector_f32 *)(const void *)(row + i);
        const vector_i x = V(cvtps_epi32)((vector_ps)scaled);
#if defined(__AVX512BW__)
        _mm256_storeu_si256((__m256i *)(void *)(out + i), _mm512_cvtsepi32_epi16(x));
#else
        const __m128i eight =
            _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
        _mm_storeu_si128((__m128i *)(void *)(out + i), eight);
#endif
    }
    return factor;
}

static inline vector_i add_pairs(vector_i sum, vector_i numbers, vector_i row)
{
#if defined(__AVX512VNNI__)
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(numbers), "v"(row)); /* as add_products() */
    return sum;
#else
    return V(add_epi32)(sum, V(madd_epi16)(numbers, row));
#endif
}

/* n_rows rows by n_sixteens of components. inv_factor: of the rows. */
static inline __attribute__((always_inline)) void
narrow_tile(const uint16_t *rows, const float *inv_factor, const unsigned n_rows,
            const uint32_t *analysis, const float *scale, size_t n_pairs, const unsigned n_sixteens,
            float *coef, size_t coef_stride)
{
    enum { N = 16 / LANES };
    vector_i sum[ROWS_A_PASS][2 * N];
    for (unsigned r = 0; r < n_rows; r++) {
        for (unsigned k = 0; k < N * n_sixteens; k++)
            sum[r][k] = V_SI(setzero)();
    }
    for (size_t p = 0; p < n_pairs; p++) {
        vector_i numbers[2 * N];
#pragma GCC unroll 4
        for (unsigned k = 0; k < N * n_sixteens; k++)
            numbers[k] =
                V_SI(loadu)((const void *)(analysis + (k / N * n_pairs + p) * 16 + k % N * LANES));
#pragma GCC unroll 8
        for (unsigned r = 0; r < n_rows; r++) {
            int32_t pair;
            memcpy(&pair, rows + (r * n_pairs + p) * 2, sizeof pair);
#pragma GCC unroll 4
            for (unsigned k = 0; k < N * n_sixteens; k++)
                sum[r][k] = add_pairs(sum[r][k], numbers[k], V(set1_epi32)(pair));
        }
    }
    for (unsigned r = 0; r < n_rows; r++) {
        for (unsigned k = 0; k < N * n_sixteens; k++) {
            const vector_f32 unit =
                inv_factor[r] * *(const vector_f32 *)(const void *)(scale + LANES * k);
            *(vector_f32 *)(void *)(coef + r * coef_stride + LANES * k) =
                unit * (vector_f32)V(cvtepi32_ps)(sum[r][k]);
        }
    }
}

static void project_narrow(const float *rows, size_t row_stride, size_t n_rows,
                           const uint32_t *analysis, const float *scale, float norm, size_t n_pairs,
                           size_t n_sixteens, uint16_t *split, float *coef, size_t coef_stride)
{
    enum { N_TOGETHER = LANES == 16 ? 2 : 1, BATCH = 64 };
    float inv_factor[BATCH];
    for (size_t at = 0; at < n_rows;
         at += BATCH, rows += BATCH * row_stride, coef += BATCH * coef_stride) {
        const size_t n = n_rows - at < BATCH ? n_rows - at : BATCH;
        for (size_t r = 0; r < n; r++)
            inv_factor[r] =
                1 / narrow_row(rows + r * row_stride, 2 * n_pairs, norm, split + r * 2 * n_pairs);
        for (size_t c = 0, n_now; c < n_sixteens; c += n_now) {
            const uint32_t *numbers = analysis + c * n_pairs * 16;
            float *out = coef + 16 * c;
            size_t r = 0;
            n_now = n_sixteens - c < N_TOGETHER ? 1 : N_TOGETHER;
            for (; r + ROWS_A_PASS <= n && n_now == N_TOGETHER; r += ROWS_A_PASS)
                narrow_tile(split + r * 2 * n_pairs, inv_factor + r, ROWS_A_PASS, numbers,
                            scale + 16 * c, n_pairs, N_TOGETHER, out + r * coef_stride,
                            coef_stride);
            for (; r < n; r++) {
                for (size_t k = 0; k < n_now; k++)
                    narrow_tile(split + r * 2 * n_pairs, inv_factor + r, 1,
                                numbers + k * n_pairs * 16, scale + 16 * (c + k), n_pairs, 1,
                                out + r * coef_stride + 16 * k, coef_stride);
            }
        }
    }
}
#else
#define project_narrow NULL
#endif

static void quantize_channels(const float *restrict x, const float *restrict base,
                              const float *restrict inv_step, size_t n_channels,
                              int16_t *restrict cells)
{
    for (size_t ch = 0; ch < n_channels; ch++)
        cells[ch] = nearest_cell((x[ch] - base[ch]) * inv_step[ch]);
}

static void dequantize_channels(const int16_t *restrict cells, const float *restrict step,
                                const float *restrict base, size_t n_channels, float *restrict x)
{
    for (size_t ch = 0; ch < n_channels; ch++)
        x[ch] = (float)cells[ch] * step[ch] + base[ch];
}

const cg_kernels CG_KERNELS = {CG_KERNELS_NAME,
                               list_nonzero,
                               accumulate,
                               list_quads,
                               QUAD_LIMIT,
                               accumulate_quads,
                               tile_symbols,
                               synthesize,
                               inverse_dct,
                               forward_dct,
                               rotate,
                               to_bf16,
                               project,
                               project_narrow,
                               quantize,
                               quantize_channels,
                               dequantize_channels,
                               &CG_RANS_KERNELS};
