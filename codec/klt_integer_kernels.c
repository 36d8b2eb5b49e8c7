/* Compiled once per instruction set, with CG_KLT_INTEGERS the name of the table: see kernels.h.
 * Sums are integers modulo 2^32: the same in any order. */
#include "codec/kernels.h"

#include <string.h>

#if !defined(__AMX_INT8__)
#define tile_digits NULL
#define multiply_tiles NULL
#endif

#if !defined(__AVX2__) || defined(__AMX_INT8__)
#define accumulate_bytes NULL
#define list_pairs NULL
#define accumulate_words NULL
#endif

#if defined(__AVX512VNNI__) && !defined(__AMX_INT8__)
enum { TAKES_WHOLE_ROWS = true };
#else
enum { TAKES_WHOLE_ROWS = false };
#endif

#if !defined(__AVX2__)

static void accumulate_elements(const void *elements, bool is_wide, const int16_t *cells,
                                size_t n_cells, unsigned shift, size_t n_channels,
                                int32_t *restrict y)
{
    const int16_t *restrict wide = elements;
    const int8_t *restrict narrow = elements;
    uint32_t *restrict sum = (uint32_t *)y; /* wraps */
    for (size_t c = 0; c < n_cells; c++, wide += n_channels, narrow += n_channels) {
        const int16_t cell = cells[c];
        if (cell == 0)
            continue;
        for (size_t ch = 0; ch < n_channels && is_wide; ch++)
            sum[ch] += (uint32_t)((int32_t)cell * wide[ch]) << shift;
        for (size_t ch = 0; ch < n_channels && !is_wide; ch++)
            sum[ch] += (uint32_t)((int32_t)cell * narrow[ch]) << shift;
    }
}
#elif defined(__AMX_INT8__)
#include "codec/kernel_vectors.h"
#define accumulate_elements NULL

enum { TILE_BYTES = CG_TILE * CG_DIGIT_COMPONENTS, QUADS_A_TILE = CG_DIGIT_COMPONENTS / 4 };

/* What is left of numbers without their lowest digit. That is signed: where its top bit is set it
 * counts 256 less, and the rest one more. */
static inline __m512i without_digit(__m512i rest)
{
    const __m512i carry =
        _mm512_and_si512(_mm512_srli_epi16(rest, CG_DIGIT_BITS - 1), _mm512_set1_epi16(1));
    return _mm512_add_epi16(_mm512_srai_epi16(rest, CG_DIGIT_BITS), carry);
}

/* The digit-th digits of a tile's 64 columns of cells, of which there are n_left. *any_out: whether
 * one is not zero; *rest_out: whether there are higher ones. */
static void tile_digit(const int16_t *cells, size_t row_stride, size_t n_rows, size_t n_left,
                       unsigned digit, int8_t *tile, bool *any_out, bool *rest_out)
{
    const __mmask32 columns[2] = {n_left < 32 ? (1u << n_left) - 1 : ~0u,
                                  n_left >= 64   ? ~0u
                                  : n_left <= 32 ? 0
                                                 : (1u << (n_left - 32)) - 1};
    __m256i any = _mm256_setzero_si256();
    __m512i all_rest = _mm512_setzero_si512();
    for (size_t r = 0; r < CG_TILE; r++, tile += CG_DIGIT_COMPONENTS) {
        for (unsigned half = 0; half < 2; half++) {
            __m512i rest = _mm512_setzero_si512();
            if (r < n_rows)
                rest = _mm512_maskz_loadu_epi16(columns[half], cells + r * row_stride + 32 * half);
            for (unsigned i = 0; i < digit; i++)
                rest = without_digit(rest);
            const __m256i digits = _mm512_cvtepi16_epi8(rest);
            any = _mm256_or_si256(any, digits);
            all_rest = _mm512_or_si512(all_rest, without_digit(rest));
            _mm256_storeu_si256((void *)(tile + 32 * half), digits);
        }
    }
    *any_out = !_mm256_testz_si256(any, any);
    *rest_out |= _mm512_test_epi16_mask(all_rest, all_rest) != 0;
}

static int8_t *tile_digits(const int16_t *cells, size_t row_stride, size_t n_rows, size_t n_cells,
                           int8_t *tiles, cg_digit_tiles digits_out[CG_SYMBOL_DIGITS])
{
    bool has_rest = true;
    for (unsigned digit = 0; digit < CG_SYMBOL_DIGITS; digit++) {
        digits_out[digit] = (cg_digit_tiles){tiles, 0};
        bool has_higher = false;
        for (size_t c = 0; c < n_cells && has_rest; c += CG_DIGIT_COMPONENTS) {
            bool any;
            tile_digit(cells + c, row_stride, n_rows, n_cells - c, digit,
                       tiles + c / CG_DIGIT_COMPONENTS * TILE_BYTES, &any, &has_higher);
            if (any)
                digits_out[digit].n_tiles = c / CG_DIGIT_COMPONENTS + 1;
        }
        /* Most symbols have one digit: then the others are not even looked for. */
        has_rest = has_higher;
        tiles += digits_out[digit].n_tiles * TILE_BYTES;
    }
    return tiles;
}

/* Sums of CG_TILE rows by 16 channels, shifted, to y. */
static inline void put_sums(const int32_t sums[CG_TILE][16], size_t n_rows, unsigned shift,
                            bool is_first, int32_t *y, size_t y_stride)
{
    const __m128i count = _mm_cvtsi32_si128((int)shift);
    for (size_t r = 0; r < n_rows; r++, y += y_stride) {
        const __m512i sum = _mm512_sll_epi32(_mm512_load_si512(sums[r]), count);
        _mm512_storeu_si512(y, is_first ? sum : _mm512_add_epi32(sum, _mm512_loadu_si512(y)));
    }
}

static void multiply_tiles(const uint8_t *lines, bool is_wide, const cg_digit_tiles *digits,
                           size_t n_rows, unsigned n_sixteens, unsigned shift, bool is_first,
                           int32_t *y, size_t y_stride)
{
    /* Sums leave the tiles through memory: they have to be shifted, and added to those of other
     * shifts. */
    _Alignas(64) int32_t sums[2][CG_TILE][16];
    /* A wide quad has two lines, one behind the other: each digit is in every other line. */
    const size_t line_bytes = (size_t)n_sixteens * 64, right_stride = line_bytes << is_wide;
    configure_tiles();
    for (unsigned c = 0; c < n_sixteens; c += is_wide ? 1 : 2, y += is_wide ? 16 : 32) {
        /* Two right factors: low and high digits of 16 channels, or bytes of 32. */
        const bool has_second = is_wide || c + 1 < n_sixteens;
        const uint8_t *right = lines + (size_t)c * 64, *second = is_wide      ? right + line_bytes
                                                                 : has_second ? right + 64
                                                                              : right;
        const int8_t *left = digits->tiles;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (size_t k = 0; k < digits->n_tiles; k++, left += TILE_BYTES) {
            _tile_loadd(6, right + k * QUADS_A_TILE * right_stride, right_stride);
            _tile_loadd(7, second + k * QUADS_A_TILE * right_stride, right_stride);
            _tile_loadd(4, left, CG_DIGIT_COMPONENTS);
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 4, 7);
            if (n_rows > 16) { /* or the lower rows are zeros: products as dear as any */
                _tile_loadd(5, left + TILE_BYTES / 2, CG_DIGIT_COMPONENTS);
                _tile_dpbssd(2, 5, 6);
                _tile_dpbssd(3, 5, 7);
            }
        }
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        _tile_stored(2, sums[0] + 16, 64);
        _tile_stored(3, sums[1] + 16, 64);
        put_sums(sums[0], n_rows, shift, is_first, y, y_stride);
        if (is_wide)
            put_sums(sums[1], n_rows, shift + CG_DIGIT_BITS, false, y, y_stride);
        else if (has_second)
            put_sums(sums[1], n_rows, shift, is_first, y + 16, y_stride);
    }
    _tile_release();
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
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(symbols), "vm"(load(at)));
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

/* A row's sums, n vectors, shifted, to y. */
static inline __attribute__((always_inline)) void put_row(const vector_i *sum, const unsigned n,
                                                          __m128i shift, bool is_first, int32_t *y)
{
    for (unsigned k = 0; k < n; k++) {
        vector_i *out = (vector_i *)(void *)(y + k * LANES);
        const vector_i value = V(sll_epi32)(sum[k], shift);
        V_SI(storeu)
        ((void *)out, is_first ? value : V(add_epi32)(value, V_SI(loadu)((const void *)out)));
    }
}

#if defined(__AVX512VNNI__)
/* Rows that have all of a slab's first quads, at once: a line is loaded once for all of them. Where
 * a product takes more than one instruction, or sums of so many rows don't fit in registers, loads
 * are not what it waits for. */
enum { WHOLE_ROWS = 4 };

/* Whether the next WHOLE_ROWS rows are such rows. Indices rise: the last one tells. */
static inline bool are_whole(const cg_quad_row *rows, size_t n_left)
{
    const uint32_t n = rows[0].n_quads;
    bool are = n_left >= WHOLE_ROWS && n > 0;
    for (unsigned r = 0; r < WHOLE_ROWS && are; r++)
        are = rows[r].n_quads == n && rows[r].quads[n - 1].index == n - 1;
    return are;
}

static inline __attribute__((always_inline)) void
accumulate_whole(const uint8_t *lines, const cg_quad_row *rows, const unsigned n,
                 const bool is_wide, vector_i sum[WHOLE_ROWS][MOST_VECTORS])
{
#pragma GCC unroll 4
    for (unsigned r = 0; r < WHOLE_ROWS; r++) {
        for (unsigned k = 0; k < n; k++)
            sum[r][k] =
                V(set1_epi32)(is_wide ? 0 : -128 * rows[r].sum); /* bytes are element + 128 */
    }
    for (uint32_t i = 0; i < rows[0].n_quads; i++, lines += n * sizeof(vector_i)) {
        vector_i symbols[WHOLE_ROWS];
#pragma GCC unroll 4
        for (unsigned r = 0; r < WHOLE_ROWS; r++) {
            int32_t four;
            memcpy(&four, rows[r].quads[i].symbols, sizeof four);
            symbols[r] = V(set1_epi32)(four);
        }
#pragma GCC unroll 4
        for (unsigned k = 0; k < n; k++) {
            const uint8_t *at = lines + k * sizeof(vector_i);
#pragma GCC unroll 4
            for (unsigned r = 0; r < WHOLE_ROWS; r++)
                sum[r][k] = is_wide ? add_words(sum[r][k], at, symbols[r])
                                    : add_bytes(sum[r][k], at, symbols[r]);
        }
    }
}
#endif

static inline __attribute__((always_inline)) void
accumulate_rows(const uint8_t *lines, const cg_quad_row *rows, size_t n_rows, const unsigned n,
                const bool is_wide, unsigned shift, bool is_first, int32_t *y, size_t y_stride)
{
    const __m128i count = _mm_cvtsi32_si128((int)shift);
    size_t r = 0;
    while (r < n_rows) {
#if defined(__AVX512VNNI__)
        if (are_whole(rows + r, n_rows - r)) {
            vector_i sums[WHOLE_ROWS][MOST_VECTORS];
            accumulate_whole(lines, rows + r, n, is_wide, sums);
            for (unsigned i = 0; i < WHOLE_ROWS; i++)
                put_row(sums[i], n, count, is_first, y + (r + i) * y_stride);
            r += WHOLE_ROWS;
            continue;
        }
#endif
        if (rows[r].n_quads > 0 || is_first) {
            vector_i sum[MOST_VECTORS];
            accumulate_row(lines, &rows[r], n, is_wide, sum);
            put_row(sum, n, count, is_first, y + r * y_stride);
        }
        r++;
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

const cg_klt_integers CG_KLT_INTEGERS = {accumulate_bytes,    list_pairs,  accumulate_words,
                                         accumulate_elements, tile_digits, multiply_tiles,
                                         TAKES_WHOLE_ROWS};
