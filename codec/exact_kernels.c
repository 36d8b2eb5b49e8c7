/* Compiled once per instruction set, with CG_EXACT_KERNELS the name of the table, and with
 * contraction off: see exact_kernels.h. Loops are written so that gcc vectorizes them; each
 * operation is rounded once, fmaf() and fma() as one. */
#include "codec/exact_kernels.h"

#include "codec/dct8.h"

#include <math.h>
#include <string.h>

enum { BLOCK = 8 };

/* Sine and cosine of r in [-pi/4, pi/4]: fdlibm's polynomials. */
static inline double sine_of(double r)
{
    const double z = r * r;
    double s = 1.58969099521155010221e-10;
    s = fma(z, s, -2.50507602534068634195e-08);
    s = fma(z, s, 2.75573137070700676789e-06);
    s = fma(z, s, -1.98412698298579493134e-04);
    s = fma(z, s, 8.33333333332248946124e-03);
    s = fma(z, s, -1.66666666666666324348e-01);
    return fma(r * z, s, r);
}

static inline double cosine_of(double r)
{
    const double z = r * r;
    double c = -1.13596475577881948265e-11;
    c = fma(z, c, 2.08757232129817482790e-09);
    c = fma(z, c, -2.75573143513906633035e-07);
    c = fma(z, c, 2.48015872894767294178e-05);
    c = fma(z, c, -1.38888888888741095749e-03);
    c = fma(z, c, 4.16666666666666019037e-02);
    return fma(z * z, c, fma(z, -0.5, 1));
}

static void rotation(uint32_t first_position, size_t n_tokens, const double *restrict inv_freq,
                     size_t half, float *restrict cosine, float *restrict sine)
{
    for (size_t t = 0; t < n_tokens; t++, cosine += half, sine += half) {
        const double position = (double)(first_position + (uint32_t)t);
        for (size_t i = 0; i < half; i++) {
            /* In f64: at position 100,000 an f32 angle is off by 2^-8. Added to 1.5 * 2^52, a
             * double has no bits left for a fraction, and its lowest are the quadrant. */
            const double angle = position * inv_freq[i];
            const double sum = angle * 0x1.45f306dc9c883p-1 + 0x1.8p52, k = sum - 0x1.8p52;
            const double r = fma(-k, 0x1.1a62633145c07p-54, fma(-k, 0x1.921fb54442d18p+0, angle));
            uint64_t quadrant;
            memcpy(&quadrant, &sum, sizeof quadrant);
            const double s = sine_of(r), c = cosine_of(r);
            const double swapped_s = (quadrant & 1) != 0 ? c : s,
                         swapped_c = (quadrant & 1) != 0 ? s : c;
            sine[i] = (float)((quadrant & 2) != 0 ? -swapped_s : swapped_s);
            cosine[i] = (float)(((quadrant + 1) & 2) != 0 ? -swapped_c : swapped_c);
        }
    }
}

static void inverse_dct(const int32_t *restrict y, size_t y_stride, float unit,
                        const float *restrict scale, const float *restrict mean, size_t n_channels,
                        float *restrict x, size_t x_stride)
{
    float d[BLOCK][BLOCK / 2];
    for (unsigned f = 0; f < BLOCK; f++) {
        for (unsigned t = 0; t < BLOCK / 2; t++)
            d[f][t] = DCT8[f][t] * unit; /* exact */
    }
    for (size_t ch = 0; ch < n_channels; ch++) {
        float in[BLOCK];
        for (unsigned f = 0; f < BLOCK; f++)
            in[f] = (float)y[f * y_stride + ch];
        /* D[f][7 - t] is D[f][t] for even f and -D[f][t] for odd f. */
        for (unsigned t = 0; t < BLOCK / 2; t++) {
            float even = d[0][t] * in[0], odd = d[1][t] * in[1];
            for (unsigned f = 2; f < BLOCK; f += 2) {
                even = fmaf(d[f][t], in[f], even);
                odd = fmaf(d[f + 1][t], in[f + 1], odd);
            }
            x[t * x_stride + ch] = fmaf(even + odd, scale[ch], mean[ch]);
            x[(BLOCK - 1 - t) * x_stride + ch] = fmaf(even - odd, scale[ch], mean[ch]);
        }
    }
}

static void rotate(float *restrict head, const float *restrict cosine, const float *restrict sine,
                   size_t half)
{
    float *restrict low = head, *restrict high = head + half;
    for (size_t i = 0; i < half; i++) {
        const float a = low[i], b = high[i], c = cosine[i], s = sine[i];
        low[i] = fmaf(-b, s, a * c);
        high[i] = fmaf(a, s, b * c);
    }
}

static void dequantize_channels(const int16_t *restrict cells, const float *restrict step,
                                const float *restrict base, size_t n_channels, float *restrict x)
{
    for (size_t ch = 0; ch < n_channels; ch++)
        x[ch] = fmaf((float)cells[ch], step[ch], base[ch]);
}

#if defined(CG_EXACT_KERNELS)
const cg_exact_kernels CG_EXACT_KERNELS = {rotation, inverse_dct, rotate, dequantize_channels};
#endif
