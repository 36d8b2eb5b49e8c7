/* Compiled once per instruction set, with CG_KLT_INTEGERS the name of the table: see kernels.h.
 * Sums are integers modulo 2^32: the same in any order. */
#include "codec/kernels.h"

#include <string.h>

#if !defined(__AVX2__)
#define accumulate_bytes NULL
#define list_pairs NULL
#define accumulate_words NULL

static void accumulate_elements(const int16_t *restrict elements, size_t element_stride,
                                const int16_t *cells, size_t n_cells, unsigned shift,
                                size_t n_channels, int32_t *restrict y)
{
    uint32_t *restrict sum = (uint32_t *)y; /* wraps */
    for (size_t c = 0; c < n_cells; c++, elements += element_stride) {
        const int16_t cell = cells[c];
        if (cell == 0)
            continue;
        for (size_t ch = 0; ch < n_channels; ch++)
            sum[ch] += (uint32_t)((int32_t)cell * elements[ch]) << shift;
    }
}
#else
#include "codec/kernel_lists.h"
#define accumulate_elements NULL

/* Sixteen bits need no digits: symbols are listed as they are. */
static void list_pairs(const int16_t *cells, size_t n_cells, cg_quad *quads_out,
                       cg_quad_row *row_out)
{
    uint32_t n = 0;
    for (size_t i = 0; i < n_cells; i += 2 * LISTED_WORDS)
        n += list_words(load_cells(cells + i, n_cells - i), (uint32_t)(i / 2), quads_out + n);
    *row_out = (cg_quad_row){quads_out, n, 0, INT32_MAX};
}

/* How lines become sums: LINES of them are read at once, and every SET-th shares its sums, so that
 * enough sums are under way for the products' latency. */
enum { MOST_VECTORS = CG_BAND_CHANNELS / LANES, N_SETS = LANES == 16 ? 2 : 1 };

static inline vector_i load(const uint8_t *at)
{
    return V_SI(loadu)((const void *)at);
}

static inline vector_i add_words(vector_i sum, const uint8_t *at, vector_i symbols)
{
#if defined(__AVX512VNNI__)
    /* gcc 12 copies the sums of the intrinsics in each round. */
    __asm__("vpdpwssd %2, %1, %0"
            : "+v"(sum)
            : "v"(symbols), "m"(*(const vector_i *)(const void *)at));
    return sum;
#else
    return V(add_epi32)(sum, V(madd_epi16)(load(at), symbols));
#endif
}

#if defined(__AVX512VNNI__)
static inline vector_i add_bytes(vector_i sum, const uint8_t *at, vector_i symbols)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(load(at)), "v"(symbols));
    return sum;
}
#else
/* Two lines: with symbols of at most quad_limit, 4 x 255 x 32 is still within int16. */
static inline vector_i add_two_bytes(vector_i sum, const uint8_t *const at[2],
                                     const vector_i symbols[2], size_t k)
{
    const vector_i a = V(maddubs_epi16)(load(at[0] + k), symbols[0]);
    const vector_i b = V(maddubs_epi16)(load(at[1] + k), symbols[1]);
    return V(add_epi32)(sum, V(madd_epi16)(V(add_epi16)(a, b), V(set1_epi16)(1)));
}
#endif

/* The i-th of a row's lines, n vectors wide, and its symbols in each lane; zeros behind the last.
 */
static inline vector_i take_line(const uint8_t *lines, const cg_quad_row *row, uint32_t i,
                                 const unsigned n, const uint8_t **at_out)
{
    int32_t four = 0;
    *at_out = lines;
    if (i < row->n_quads) {
        memcpy(&four, row->quads[i].symbols, sizeof four);
        *at_out = lines + (size_t)row->quads[i].index * n * sizeof(vector_i);
    }
    return V(set1_epi32)(four);
}

/* n and is_wide are constants where this is inlined: the sums then live in registers. */
static inline __attribute__((always_inline)) void accumulate_row(const uint8_t *lines,
                                                                 const cg_quad_row *row,
                                                                 const unsigned n,
                                                                 const bool is_wide, vector_i *sum)
{
    vector_i more[MOST_VECTORS];
    /* Bytes of a basis stand for byte - 128. */
    for (unsigned k = 0; k < n; k++) {
        sum[k] = V(set1_epi32)(is_wide ? 0 : -128 * row->sum);
        more[k] = V_SI(setzero)();
    }
    for (uint32_t i = 0; i < row->n_quads; i += 2) {
        const uint8_t *at[2];
        vector_i symbols[2];
        for (unsigned j = 0; j < 2; j++)
            symbols[j] = take_line(lines, row, i + j, n, &at[j]);
#pragma GCC unroll 8
        for (unsigned k = 0; k < n; k++) {
#if defined(__AVX512VNNI__)
            if (!is_wide) {
                sum[k] = add_bytes(sum[k], at[0] + k * sizeof(vector_i), symbols[0]);
                more[k] = add_bytes(more[k], at[1] + k * sizeof(vector_i), symbols[1]);
                continue;
            }
#else
            if (!is_wide) {
                sum[k] = add_two_bytes(sum[k], at, symbols, k * sizeof(vector_i));
                continue;
            }
#endif
            sum[k] = add_words(sum[k], at[0] + k * sizeof(vector_i), symbols[0]);
            if (N_SETS == 2)
                more[k] = add_words(more[k], at[1] + k * sizeof(vector_i), symbols[1]);
            else
                sum[k] = add_words(sum[k], at[1] + k * sizeof(vector_i), symbols[1]);
        }
    }
    for (unsigned k = 0; k < n && N_SETS == 2; k++)
        sum[k] = V(add_epi32)(sum[k], more[k]);
}

static inline __attribute__((always_inline)) void
accumulate_rows(const uint8_t *lines, const cg_quad_row *rows, size_t n_rows, const unsigned n,
                const bool is_wide, unsigned shift, bool is_first, int32_t *y, size_t y_stride)
{
    const __m128i count = _mm_cvtsi32_si128((int)shift);
    for (size_t r = 0; r < n_rows; r++, y += y_stride) {
        vector_i sum[MOST_VECTORS];
        if (rows[r].n_quads == 0 && !is_first)
            continue;
        accumulate_row(lines, &rows[r], n, is_wide, sum);
        for (unsigned k = 0; k < n; k++) {
            vector_i *out = (vector_i *)(void *)(y + k * LANES);
            const vector_i value = V(sll_epi32)(sum[k], count);
            V_SI(storeu)
            ((void *)out, is_first ? value : V(add_epi32)(value, V_SI(loadu)((const void *)out)));
        }
    }
}

/* n is a constant in each branch, so that the compiler keeps the sums in registers. */
static inline __attribute__((always_inline)) void
accumulate_all(const uint8_t *lines, const cg_quad_row *rows, size_t n_rows, unsigned n_sixteens,
               const bool is_wide, unsigned shift, bool is_first, int32_t *y, size_t y_stride)
{
    switch (n_sixteens) {
    case 1:
        accumulate_rows(lines, rows, n_rows, VECTORS_A_PART, is_wide, shift, is_first, y, y_stride);
        break;
    case 2:
        accumulate_rows(lines, rows, n_rows, 2 * VECTORS_A_PART, is_wide, shift, is_first, y,
                        y_stride);
        break;
    case 3:
        accumulate_rows(lines, rows, n_rows, 3 * VECTORS_A_PART, is_wide, shift, is_first, y,
                        y_stride);
        break;
    default:
        accumulate_rows(lines, rows, n_rows, 4 * VECTORS_A_PART, is_wide, shift, is_first, y,
                        y_stride);
    }
}

static void accumulate_bytes(const uint8_t *lines, const cg_quad_row *rows, size_t n_rows,
                             unsigned n_sixteens, unsigned shift, bool is_first, int32_t *y,
                             size_t y_stride)
{
    accumulate_all(lines, rows, n_rows, n_sixteens, false, shift, is_first, y, y_stride);
}

static void accumulate_words(const uint8_t *lines, const cg_quad_row *rows, size_t n_rows,
                             unsigned n_sixteens, unsigned shift, bool is_first, int32_t *y,
                             size_t y_stride)
{
    accumulate_all(lines, rows, n_rows, n_sixteens, true, shift, is_first, y, y_stride);
}
#endif

const cg_klt_integers CG_KLT_INTEGERS = {accumulate_bytes, list_pairs, accumulate_words,
                                         accumulate_elements};
