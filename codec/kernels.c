/* Compiled once per instruction set, with CG_KERNELS the name of the table and CG_KERNELS_NAME its
 * string, and with contraction on: see kernels.h. Loops are written so that gcc vectorizes them. */
#include "codec/kernels.h"

#include "codec/bf16.h"
#include "codec/dct8.h"
#include "codec/exact_lane.h"
#include "codec/geometry.h"
#include "codec/kernel_vectors.h"
#include "codec/rans_lane.h"

#include <string.h>

/* Even and odd frequencies are summed apart: by symmetry four such sums make eight tokens. */
static void inverse_dct(const float *restrict y, size_t y_stride, const float *restrict scale,
                        const float *restrict mean, unsigned n_channels, float *restrict x,
                        size_t x_stride)
{
    for (unsigned ch = 0; ch < n_channels; ch++) {
        const float *in = y + ch;
        /* D[f][7 - t] is D[f][t] for even f and -D[f][t] for odd f. */
        for (unsigned t = 0; t < CG_DCT / 2; t++) {
            float even = DCT8[0][t] * in[0], odd = DCT8[1][t] * in[y_stride];
            for (unsigned f = 2; f < CG_DCT; f += 2) {
                even += DCT8[f][t] * in[f * y_stride];
                odd += DCT8[f + 1][t] * in[(f + 1) * y_stride];
            }
            x[t * x_stride + ch] = (even + odd) * scale[ch] + mean[ch];
            x[(CG_DCT - 1 - t) * x_stride + ch] = (even - odd) * scale[ch] + mean[ch];
        }
    }
}

/* The same symmetry the other way round: sums, and differences, of a token and its mirror image. */
static void forward_dct(const float *restrict x, size_t x_stride, unsigned n_channels,
                        float *restrict y, size_t y_stride)
{
    unsigned ch = 0;
    /* All frequencies of a register of channels: x may not stay in the first cache. */
    for (; ch + LANES <= n_channels; ch += LANES) {
        vector_f32 both[2][CG_DCT / 2];
#pragma GCC unroll 4
        for (unsigned t = 0; t < CG_DCT / 2; t++) {
            const vector_f32 a = *(const vector_f32 *)(x + t * x_stride + ch),
                             b = *(const vector_f32 *)(x + (CG_DCT - 1 - t) * x_stride + ch);
            both[0][t] = a + b;
            both[1][t] = a - b;
        }
#pragma GCC unroll 8
        for (unsigned f = 0; f < CG_DCT; f++) {
            vector_f32 sum = DCT8[f][0] * both[f % 2][0];
#pragma GCC unroll 3
            for (unsigned t = 1; t < CG_DCT / 2; t++)
                sum += DCT8[f][t] * both[f % 2][t];
            *(vector_f32 *)(y + f * y_stride + ch) = sum;
        }
    }
    for (; ch < n_channels; ch++) {
        for (unsigned f = 0; f < CG_DCT; f++) {
            float sum = 0;
            for (unsigned t = 0; t < CG_DCT; t++)
                sum += DCT8[f][t] * x[t * x_stride + ch];
            y[f * y_stride + ch] = sum;
        }
    }
}

static void rotate(float *restrict head, const float *restrict cosine, const float *restrict sine,
                   size_t half)
{
    for (size_t i = 0; i < half; i++) {
        const float a = head[i], b = head[i + half];
        head[i] = a * cosine[i] - b * sine[i];
        head[i + half] = b * cosine[i] + a * sine[i];
    }
}

static void to_bf16(const float *restrict values, size_t n_values, uint16_t *restrict out)
{
    for (size_t i = 0; i < n_values; i++)
        out[i] = cg_bf16_from_f32(values[i]);
}

static bool load(unsigned dtype, const void *elements, size_t n_elements, float *restrict out)
{
    const uint16_t *restrict halves = elements;
    const uint8_t *restrict bytes = elements;
    uint32_t any_not_finite = 0; /* gathered: with a branch, loops would not vectorize */
    if (dtype == CG_DTYPE_BF16) {
        for (size_t i = 0; i < n_elements; i++) {
            out[i] = cg_bf16_to_f32(halves[i]);
            any_not_finite |= (halves[i] & 0x7f80u) == 0x7f80u;
        }
        return any_not_finite == 0;
    }
    if (dtype == CG_DTYPE_FP16) {
        for (size_t i = 0; i < n_elements; i++)
            out[i] = cg_fp16_to_f32(halves[i]);
    } else if (dtype == CG_DTYPE_FP32) {
        memcpy(out, elements, n_elements * sizeof *out);
    } else if (dtype == CG_DTYPE_FP8_E4M3) {
        for (size_t i = 0; i < n_elements; i++)
            out[i] = cg_e4m3_to_f32(bytes[i]);
    } else {
        for (size_t i = 0; i < n_elements; i++)
            out[i] = cg_e5m2_to_f32(bytes[i]);
    }
    for (size_t i = 0; i < n_elements; i++)
        any_not_finite |= (cg_f32_bits(out[i]) & 0x7f800000u) == 0x7f800000u;
    return any_not_finite == 0;
}

/* Rounding and limits are those of the lane functions, which GPUs run, too. */
static void quantize(const float *restrict coef, size_t n_columns, float inv_step,
                     int16_t *restrict out)
{
    for (size_t c = 0; c < n_columns; c++)
        out[c] = (int16_t)cg_lane_quantize(coef[c] * inv_step);
}

static void coarsen(const int16_t *restrict fine, size_t n_columns, int16_t *restrict out)
{
    for (size_t c = 0; c < n_columns; c++)
        out[c] = (int16_t)cg_lane_coarsen(fine[c]);
}

/* CG_SQUARES sums side by side: so the order of additions is fixed, and a compiler may vectorize
 * them without leave to reorder. */
static void add_row(const float *restrict row, size_t n_columns, float sign, float *restrict sums,
                    float *restrict squares)
{
    size_t c = 0;
    for (; c + CG_SQUARES <= n_columns; c += CG_SQUARES) {
        for (size_t i = 0; i < CG_SQUARES; i++) {
            const float x = row[c + i];
            sums[c + i] += sign * x;
            squares[i] += x * x;
        }
    }
    for (; c < n_columns; c++) {
        sums[c] += sign * row[c];
        squares[c % CG_SQUARES] += row[c] * row[c];
    }
}

static void add_heads(const float *restrict values, size_t n_heads, size_t head_dim,
                      const float *restrict cosine, const float *restrict sine, size_t half,
                      float factor, float *restrict sums)
{
    /* What is not rotated is one long row. */
    const size_t n = half > 0 ? head_dim : n_heads * head_dim;
    for (size_t head = 0; head < (half > 0 ? n_heads : 1); head++, values += n, sums += n) {
        for (size_t i = 0; i < half; i++) {
            const float a = values[i], b = values[i + half];
            sums[i] += factor * (a * cosine[i] + b * sine[i]);
            sums[i + half] += factor * (b * cosine[i] - a * sine[i]);
        }
        for (size_t i = 2 * half; i < n; i++)
            sums[i] += factor * values[i];
    }
}

/* add_row() of symbols: as floats first, they would need a row of memory more. */
static void add_cells(const int16_t *restrict cells, size_t n_columns, float sign,
                      float *restrict sums, float *restrict squares)
{
    size_t c = 0;
    for (; c + CG_SQUARES <= n_columns; c += CG_SQUARES) {
        for (size_t i = 0; i < CG_SQUARES; i++) {
            const float x = cells[c + i];
            sums[c + i] += sign * x;
            squares[i] += x * x;
        }
    }
    for (; c < n_columns; c++) {
        const float x = cells[c];
        sums[c] += sign * x;
        squares[c % CG_SQUARES] += x * x;
    }
}

static void quantize_channels(const float *restrict x, const float *restrict base,
                              const float *restrict inv_step, size_t n_channels,
                              int16_t *restrict cells)
{
    for (size_t ch = 0; ch < n_channels; ch++)
        cells[ch] = (int16_t)cg_lane_quantize((x[ch] - base[ch]) * inv_step[ch]);
}

static void dequantize_channels(const int16_t *restrict cells, const float *restrict step,
                                const float *restrict base, size_t n_channels, float *restrict x)
{
    for (size_t ch = 0; ch < n_channels; ch++)
        x[ch] = (float)cells[ch] * step[ch] + base[ch];
}

/* Of scores and distances: sums of so many stay finite. */
static const float most = 1e30f;

static void square_distances(const float *restrict rows, size_t n_rows, size_t n_channels,
                             const float *restrict base, float *restrict out)
{
    for (size_t r = 0; r < n_rows; r++, rows += n_channels) {
        float squares[CG_SQUARES] = {0}, sum = 0;
        size_t ch = 0;
        for (; ch + CG_SQUARES <= n_channels; ch += CG_SQUARES) {
            for (size_t i = 0; i < CG_SQUARES; i++) {
                const float x = rows[ch + i] - base[ch + i];
                squares[i] += x * x;
            }
        }
        for (; ch < n_channels; ch++)
            sum += (rows[ch] - base[ch]) * (rows[ch] - base[ch]);
        for (size_t i = 0; i < CG_SQUARES; i++)
            sum += squares[i];
        out[r] = sum < most ? sum : most; /* in this order a NaN becomes a number */
    }
}

/* scores[r] = keys[r] times queries, for n_rows rows, at most ROWS_A_PASS: so many share each load
 * of the queries, and their sums fit in registers. */
static inline void score(const float *restrict keys, size_t n_rows, size_t head_dim,
                         const float *restrict queries, float *restrict scores)
{
    enum { VECTORS = CG_QUERIES / LANES };
    vector_f32 sums[ROWS_A_PASS][VECTORS] = {{{0}}};
    for (size_t d = 0; d < head_dim; d++)
        for (size_t v = 0; v < VECTORS; v++) {
            const vector_f32 query = *(const vector_f32 *)(queries + d * CG_QUERIES + v * LANES);
            for (size_t r = 0; r < n_rows; r++)
                sums[r][v] += query * keys[r * head_dim + d];
        }
    for (size_t r = 0; r < n_rows; r++)
        for (size_t v = 0; v < VECTORS; v++)
            *(vector_f32 *)(scores + r * CG_QUERIES + v * LANES) = sums[r][v];
}

/* 2^x for x of at most 0, to 2^-18; below -125 as there: the exponents' sum would leave the normal
 * floats. 2^f is a Taylor series. */
static inline float exp2_of(float x)
{
    x = x > -125.0f ? x : -125.0f;
    /* Added to 1.5 * 2^23, x has no bits left for a fraction: the lowest ones are the integer. */
    const float sum = x + 0x1.8p23f, y = (x - (sum - 0x1.8p23f)) * 0x1.62e430p-1f;
    const float power =
        1 + y * (1 + y * (1 / 2.0f + y * (1 / 6.0f + y * (1 / 24.0f + y * (1 / 120.0f)))));
    return cg_f32_from_bits(cg_f32_bits(power) + (cg_f32_bits(sum) << 23));
}

static void weigh_tokens(const float *restrict keys, size_t n_tokens, size_t head_dim,
                         const float *restrict queries, size_t n_queries,
                         const float *restrict spread, float *restrict scores,
                         float *restrict counts)
{
    float top[CG_QUERIES], of_v[CG_QUERIES] = {0}, of_k[CG_QUERIES] = {0}, of_all[CG_QUERIES];
    size_t t = 0;
    for (; t + ROWS_A_PASS <= n_tokens; t += ROWS_A_PASS)
        score(keys + t * head_dim, ROWS_A_PASS, head_dim, queries, scores + t * CG_QUERIES);
    for (; t < n_tokens; t++) /* one by one: a constant count is what unrolls score() */
        score(keys + t * head_dim, 1, head_dim, queries, scores + t * CG_QUERIES);
    for (size_t i = 0; i < CG_QUERIES; i++)
        top[i] = -most;
    for (t = 0; t < n_tokens; t++) {
        for (size_t i = 0; i < CG_QUERIES; i++) {
            float x = scores[t * CG_QUERIES + i];
            x = x < most ? x : most; /* in this order a NaN becomes a number */
            x = x > -most ? x : -most;
            scores[t * CG_QUERIES + i] = x;
            top[i] = x > top[i] ? x : top[i];
        }
    }
    /* The largest is taken off first, so that no power overflows.
     * Squared attentions, up to a factor: that of the largest is 1. Their sums, and with spread. */
    for (t = 0; t < n_tokens; t++) {
        for (size_t i = 0; i < CG_QUERIES; i++) {
            const float attention = exp2_of(scores[t * CG_QUERIES + i] - top[i]);
            scores[t * CG_QUERIES + i] = attention;
            of_v[i] += attention;
            of_k[i] += attention * spread[t];
        }
    }
    for (size_t i = 0; i < CG_QUERIES; i++) {
        /* Where V are alike, an error of K moves nothing: no token counts more than another. */
        const bool is_query = i < n_queries, is_alike = of_k[i] < 1 / most;
        of_v[i] = is_query ? 1 / of_v[i] : 0;
        of_k[i] = is_query && !is_alike ? 1 / of_k[i] : 0;
        of_all[i] = is_query && is_alike ? 1 / (float)n_tokens : 0;
    }
    for (t = 0; t < n_tokens; t++)
        for (size_t i = 0; i < CG_QUERIES; i++)
            counts[t * CG_QUERIES + i] +=
                of_all[i] + scores[t * CG_QUERIES + i] * (of_v[i] + of_k[i] * spread[t]);
}

const cg_kernels CG_KERNELS = {CG_KERNELS_NAME,
                               inverse_dct,
                               forward_dct,
                               rotate,
                               to_bf16,
                               load,
                               quantize,
                               coarsen,
                               add_row,
                               add_heads,
                               add_cells,
                               quantize_channels,
                               dequantize_channels,
                               square_distances,
                               weigh_tokens,
                               &CG_KLT_INVERSE,
                               &CG_KLT_INTEGERS,
                               &CG_KLT_FORWARD,
                               &CG_RANS_KERNELS,
                               &CG_EXACT_KERNELS};
