/* Compiled once per instruction set, with CG_EXACT_KERNELS the name of the table, and with
 * contraction off: see exact_kernels.h. Loops are written so that gcc vectorizes them; each
 * operation is rounded once, fmaf() and fma() as one. */
#include "codec/exact_kernels.h"

#include "codec/dct8.h"
#include "codec/exact_lane.h"
#include "codec/kernel_vectors.h"

enum { BLOCK = 8 };

static void rotation(uint32_t first_position, size_t n_tokens, const double *restrict inv_freq,
                     size_t half, float *restrict cosine, float *restrict sine)
{
    for (size_t t = 0; t < n_tokens; t++, cosine += half, sine += half) {
        const double position = (double)(first_position + (uint32_t)t);
        for (size_t i = 0; i < half; i++)
            cg_lane_rotation(position, inv_freq[i], &cosine[i], &sine[i]);
    }
}

static void give(const int32_t *restrict sums, unsigned k, size_t n_channels, int16_t *restrict out)
{
    for (size_t ch = 0; ch < n_channels; ch++)
        out[ch] = (int16_t)cg_lane_given(sums[ch], k);
}

/* D scaled by unit: D' of FORMAT.md. unit is a scale times a power of two, and products with that
 * are exact: so one product rounds as D times the scale would. */
typedef float dct_matrix[BLOCK][BLOCK];

static inline void inverse_dct_channel(const int32_t *y, size_t y_stride, dct_matrix d, float scale,
                                       float mean, float *x, size_t x_stride)
{
    float in[BLOCK], z[BLOCK];
    for (unsigned f = 0; f < BLOCK; f++)
        in[f] = (float)y[f * y_stride];
    cg_lane_inverse_dct((const float(*)[BLOCK])d, in, z);
    for (unsigned t = 0; t < BLOCK; t++)
        x[t * x_stride] = cg_lane_dequantize(z[t], scale, mean);
}

#if defined(__AVX2__)
/* The same for a register of channels: gcc does not find it in a loop over the above. */
static inline void inverse_dct_vector(const int32_t *y, size_t y_stride, dct_matrix d,
                                      const float *scale, const float *mean, float *x,
                                      size_t x_stride)
{
    const vector_ps scales = V(loadu_ps)(scale), means = V(loadu_ps)(mean);
    vector_ps in[BLOCK];
    for (unsigned f = 0; f < BLOCK; f++)
        in[f] = V(cvtepi32_ps)(V_SI(loadu)((const void *)(y + f * y_stride)));
#pragma GCC unroll 4
    for (unsigned t = 0; t < BLOCK / 2; t++) {
        vector_ps even = V(mul_ps)(V(set1_ps)(d[0][t]), in[0]),
                  odd = V(mul_ps)(V(set1_ps)(d[1][t]), in[1]);
#pragma GCC unroll 3
        for (unsigned f = 2; f < BLOCK; f += 2) {
            even = V(fmadd_ps)(V(set1_ps)(d[f][t]), in[f], even);
            odd = V(fmadd_ps)(V(set1_ps)(d[f + 1][t]), in[f + 1], odd);
        }
        V(storeu_ps)(x + t * x_stride, V(fmadd_ps)(V(add_ps)(even, odd), scales, means));
        V(storeu_ps)
        (x + (BLOCK - 1 - t) * x_stride, V(fmadd_ps)(V(sub_ps)(even, odd), scales, means));
    }
}
#endif

/* unit goes into D once, instead of into each sum. */
static void inverse_dct(const int32_t *restrict y, size_t y_stride, float unit,
                        const float *restrict scale, const float *restrict mean, size_t n_channels,
                        float *restrict x, size_t x_stride)
{
    dct_matrix d;
    size_t ch = 0;
    for (unsigned f = 0; f < BLOCK; f++) {
        for (unsigned t = 0; t < BLOCK / 2; t++)
            d[f][t] = DCT8[f][t] * unit;
    }
#if defined(__AVX2__)
    for (; ch + LANES <= n_channels; ch += LANES)
        inverse_dct_vector(y + ch, y_stride, d, scale + ch, mean + ch, x + ch, x_stride);
#endif
    for (; ch < n_channels; ch++)
        inverse_dct_channel(y + ch, y_stride, d, scale[ch], mean[ch], x + ch, x_stride);
}

static void rotate(float *restrict head, const float *restrict cosine, const float *restrict sine,
                   size_t half)
{
    float *restrict low = head, *restrict high = head + half;
    for (size_t i = 0; i < half; i++)
        cg_lane_rotate(&low[i], &high[i], cosine[i], sine[i]);
}

static void dequantize_channels(const int16_t *restrict cells, const float *restrict step,
                                const float *restrict base, size_t n_channels, float *restrict x)
{
    for (size_t ch = 0; ch < n_channels; ch++)
        x[ch] = cg_lane_dequantize((float)cells[ch], step[ch], base[ch]);
}

#if defined(CG_EXACT_KERNELS)
const cg_exact_kernels CG_EXACT_KERNELS = {rotation, give, inverse_dct, rotate,
                                           dequantize_channels};
#endif
