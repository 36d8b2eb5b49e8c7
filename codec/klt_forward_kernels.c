/* Compiled once per instruction set: see kernels.h and klt_inverse_kernels.c. project() takes a
 * basis of bf16; project_narrow() and project_integers() one of whole numbers, for which AVX2 and
 * later round the rows to 16 bits. An encoder may choose its symbols, so tables need not agree bit
 * for bit. */
#include "codec/kernel_vectors.h"
#include "codec/kernels.h"

#include <math.h>
#include <string.h>

#if defined(__AMX_BF16__)
/* bf16 alone would round the data to 8 bits before quantizing it, and L1's steps are finer. So rows
 * are split in two bf16 numbers each, together exact to 16 bits: tiles [n_pairs / 16][2 halves][16
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
    /* Two tiles of 16 rows by two of 16 components: four sums, for which each factor is loaded once
     * and used twice. */
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
                /* High and low parts of the rows go into the same sums. */
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
            /* A bf16 is the high half of a float. */
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

#if defined(__AMX_INT8__)
/* Left factors are pairs of tiles, of low digits without a sign and of high ones with it. */
enum {
    TILE_CHANNELS = 64,
    TILE_ROWS = 16,
    TILE_BYTES = TILE_ROWS * TILE_CHANNELS,
    PAIR_BYTES = 2 * TILE_BYTES
};

static inline void store_digits(__m256i numbers, uint8_t *low)
{
    _mm_storeu_si128((void *)low, _mm256_cvtepi16_epi8(numbers));
    _mm_storeu_si128((void *)(low + TILE_BYTES),
                     _mm256_cvtepi16_epi8(_mm256_srai_epi16(numbers, 8)));
}
#endif

#if defined(__AVX2__)
/* A row of [n] as int16, rounded (for matrix units in digits). Returns what it was multiplied with:
 * the sums of its products with numbers of that norm stay within int32. */
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
    /* A sum of products is at most the product of the norms (Cauchy-Schwarz): held a little below
     * 2^31, since rounding adds to it. The tiny summands are for rows of zeros. */
    float factor = 2.1e9f / (norm * sqrtf(sum) + 1e-20f);
    factor = factor < 32767 / peak ? factor : 32767 / peak;
    for (size_t i = 0; i < n; i += LANES) {
        const vector_f32 scaled = factor * *(const vector_f32 *)(const void *)(row + i);
        const vector_i x = V(cvtps_epi32)((vector_ps)scaled);
#if defined(__AMX_INT8__)
        store_digits(_mm512_cvtsepi32_epi16(x),
                     (uint8_t *)out + i / TILE_CHANNELS * PAIR_BYTES + i % TILE_CHANNELS);
#elif defined(__AVX512BW__)
        _mm256_storeu_si256((__m256i *)(void *)(out + i), _mm512_cvtsepi32_epi16(x));
#else
        const __m128i eight =
            _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
        _mm_storeu_si128((__m128i *)(void *)(out + i), eight);
#endif
    }
    return factor;
}

#if defined(__AMX_INT8__)
/* TILE_ROWS rows, of which n_rows there are, by 16 components of two digits or 32 of one, whose
 * digits begin at right and second. */
static void digits_tile(const uint8_t *left, const float *inv_factor, size_t n_rows,
                        const uint8_t *right, const uint8_t *second, const float *scale,
                        size_t n_tiles, bool is_wide, bool has_second, float *coef,
                        size_t coef_stride)
{
    _Alignas(64) int32_t sums[4][TILE_ROWS][16];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (size_t k = 0; k < n_tiles; k++, left += PAIR_BYTES) {
        _tile_loadd(4, left, TILE_CHANNELS);
        _tile_loadd(5, left + TILE_BYTES, TILE_CHANNELS);
        _tile_loadd(6, right + k * TILE_BYTES, TILE_CHANNELS);
        _tile_loadd(7, second + k * TILE_BYTES, TILE_CHANNELS);
        _tile_dpbusd(0, 4, 6);
        _tile_dpbssd(1, 5, 6);
        _tile_dpbusd(2, 4, 7);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    for (size_t r = 0; r < n_rows; r++, coef += coef_stride) {
        __m512i sum[2];
        /* Modulo 2^32 on the way: what it comes to is within it (narrow_row()). */
        for (unsigned i = 0; i < 2; i++)
            sum[i] = _mm512_add_epi32(_mm512_load_si512(sums[2 * i][r]),
                                      _mm512_slli_epi32(_mm512_load_si512(sums[2 * i + 1][r]), 8));
        if (is_wide)
            sum[0] = _mm512_add_epi32(sum[0], _mm512_slli_epi32(sum[1], 8));
        for (unsigned i = 0; i < (has_second ? 2 : 1); i++) {
            const __m512 unit =
                _mm512_mul_ps(_mm512_set1_ps(inv_factor[r]), _mm512_loadu_ps(scale + 16 * i));
            _mm512_storeu_ps(coef + 16 * i, _mm512_mul_ps(unit, _mm512_cvtepi32_ps(sum[i])));
        }
    }
}

static void project_integers(const float *rows, size_t row_stride, size_t n_rows,
                             const uint32_t *analysis, const uint8_t *n_digits, const float *scale,
                             float norm, size_t n_pairs, size_t n_sixteens, uint16_t *split,
                             float *coef, size_t coef_stride)
{
    const size_t n_tiles = (2 * n_pairs + TILE_CHANNELS - 1) / TILE_CHANNELS;
    uint8_t *left = (uint8_t *)split;
    configure_tiles();
    for (size_t at = 0; at < n_rows; at += TILE_ROWS, rows += TILE_ROWS * row_stride) {
        const size_t n = n_rows - at < TILE_ROWS ? n_rows - at : (size_t)TILE_ROWS;
        float inv_factor[TILE_ROWS];
        memset(left + (n_tiles - 1) * PAIR_BYTES, 0, PAIR_BYTES); /* its end meets other numbers */
        for (size_t r = 0; r < n; r++)
            inv_factor[r] = 1 / narrow_row(rows + r * row_stride, 2 * n_pairs, norm,
                                           (uint16_t *)(void *)(left + r * TILE_CHANNELS));
        for (size_t c = 0, n_now; c < n_sixteens; c += n_now) {
            const uint8_t *right = (const uint8_t *)(analysis + c * n_pairs * 16);
            const bool is_wide = n_digits[c] == 2;
            /* Two sixteens at once where each has one digit. Of one with two, the second right
             * factor is its high digits. */
            n_now = !is_wide && c + 1 < n_sixteens && n_digits[c + 1] == 1 ? 2 : 1;
            digits_tile(left, inv_factor, n, right,
                        is_wide      ? right + n_pairs * 32
                        : n_now == 2 ? right + n_pairs * 64
                                     : right,
                        scale + 16 * c, n_tiles, is_wide, n_now == 2,
                        coef + at * coef_stride + 16 * c, coef_stride);
        }
    }
    _tile_release();
}
#else
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
    /* Two sixteens of components share what is loaded of a row, where there are registers for their
     * sums. split has room for 64 rows. */
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
            /* A last sixteen alone: a row by itself would wait for each of its sums. */
            for (; r + ROWS_A_PASS <= n; r += ROWS_A_PASS)
                narrow_tile(split + r * 2 * n_pairs, inv_factor + r, ROWS_A_PASS, numbers,
                            scale + 16 * c, n_pairs, 1, out + r * coef_stride, coef_stride);
            for (; r < n; r++) {
                for (size_t k = 0; k < n_now; k++)
                    narrow_tile(split + r * 2 * n_pairs, inv_factor + r, 1,
                                numbers + k * n_pairs * 16, scale + 16 * (c + k), n_pairs, 1,
                                out + r * coef_stride + 16 * k, coef_stride);
            }
        }
    }
}

static void project_integers(const float *rows, size_t row_stride, size_t n_rows,
                             const uint32_t *analysis, const uint8_t *n_digits, const float *scale,
                             float norm, size_t n_pairs, size_t n_sixteens, uint16_t *split,
                             float *coef, size_t coef_stride)
{
    (void)n_digits;
    project_narrow(rows, row_stride, n_rows, analysis, scale, norm, n_pairs, n_sixteens, split,
                   coef, coef_stride);
}
#endif
#else
/* n_rows rows by 16 components of integers, whose sums stay in registers. */
static inline __attribute__((always_inline)) void
integer_tile(const float *rows, size_t row_stride, const unsigned n_rows, const uint32_t *analysis,
             const float *scale, size_t n_pairs, float *coef, size_t coef_stride)
{
    enum { N = 16 / LANES };
    typedef int32_t vector_i32 __attribute__((vector_size(4 * LANES), aligned(4)));
    vector_f32 sum[ROWS_A_PASS][N];
    for (unsigned r = 0; r < n_rows; r++) {
        for (unsigned k = 0; k < N; k++)
            sum[r][k] = (vector_f32){0};
    }
    for (size_t p = 0; p < n_pairs; p++) {
        for (unsigned k = 0; k < N; k++) {
            const vector_i32 words =
                *(const vector_i32 *)(const void *)(analysis + p * 16 + LANES * k);
            const vector_f32 low = __builtin_convertvector(words << 16 >> 16, vector_f32),
                             high = __builtin_convertvector(words >> 16, vector_f32);
            for (unsigned r = 0; r < n_rows; r++)
                sum[r][k] +=
                    rows[r * row_stride + 2 * p] * low + rows[r * row_stride + 2 * p + 1] * high;
        }
    }
    for (unsigned r = 0; r < n_rows; r++) {
        for (unsigned k = 0; k < N; k++)
            *(vector_f32 *)(void *)(coef + r * coef_stride + LANES * k) =
                sum[r][k] * *(const vector_f32 *)(const void *)(scale + LANES * k);
    }
}

static void project_integers(const float *rows, size_t row_stride, size_t n_rows,
                             const uint32_t *analysis, const uint8_t *n_digits, const float *scale,
                             float norm, size_t n_pairs, size_t n_sixteens, uint16_t *split,
                             float *coef, size_t coef_stride)
{
    (void)n_digits;
    (void)norm;
    (void)split;
    for (size_t c = 0; c < n_sixteens; c++) {
        const uint32_t *numbers = analysis + c * n_pairs * 16;
        float *out = coef + 16 * c;
        size_t r = 0;
        for (; r + ROWS_A_PASS <= n_rows; r += ROWS_A_PASS)
            integer_tile(rows + r * row_stride, row_stride, ROWS_A_PASS, numbers, scale + 16 * c,
                         n_pairs, out + r * coef_stride, coef_stride);
        for (; r < n_rows; r++)
            integer_tile(rows + r * row_stride, row_stride, 1, numbers, scale + 16 * c, n_pairs,
                         out + r * coef_stride, coef_stride);
    }
}
#endif

#if !defined(__AVX2__) || defined(__AMX_INT8__)
#define project_narrow NULL
#endif
#if defined(__AMX_INT8__)
enum { TAKES_DIGITS = true };
#else
enum { TAKES_DIGITS = false };
#endif

const cg_klt_forward CG_KLT_FORWARD = {project, project_narrow, project_integers, TAKES_DIGITS};
