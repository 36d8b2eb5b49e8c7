/* Compiled once per instruction set, with CG_EXACT_KERNELS the name of the table, and with
 * contraction off: see exact_kernels.h. Loops are written so that gcc vectorizes them; each
 * operation is rounded once, fmaf() and fma() as one. */
#include "codec/exact_kernels.h"

#include "codec/dct8.h"
#include "codec/exact_lane.h"

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

static void inverse_dct(const int32_t *restrict y, size_t y_stride, float unit,
                        const float *restrict scale, const float *restrict mean, size_t n_channels,
                        float *restrict x, size_t x_stride)
{
    float d[BLOCK][BLOCK];
    for (unsigned f = 0; f < BLOCK; f++) {
        for (unsigned t = 0; t < BLOCK / 2; t++)
            d[f][t] = DCT8[f][t] * unit; /* exact */
    }
    for (size_t ch = 0; ch < n_channels; ch++) {
        float in[BLOCK], z[BLOCK];
        for (unsigned f = 0; f < BLOCK; f++)
            in[f] = (float)y[f * y_stride + ch];
        cg_lane_inverse_dct((const float(*)[BLOCK])d, in, z);
        for (unsigned t = 0; t < BLOCK; t++)
            x[t * x_stride + ch] = cg_lane_dequantize(z[t], scale[ch], mean[ch]);
    }
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
const cg_exact_kernels CG_EXACT_KERNELS = {rotation, inverse_dct, rotate, dequantize_channels};
#endif
