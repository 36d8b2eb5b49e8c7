/* codec/exact_lane.h - the float steps of profiles from version 2 on, for one channel or a pair.
 *
 * They are those of FORMAT.md's "Decoding, version 2". With them are the rounding of the joint
 * matrix's sums, and an encoder's way to its symbols. Each operation is rounded once, fmaf() and
 * fma() as one. Shared with CUDA code. Threads: pure functions.
 */
#ifndef CG_CODEC_EXACT_LANE_H
#define CG_CODEC_EXACT_LANE_H
#include "codec/lane.h"
#include <math.h>
#include <stdint.h>
#include <string.h>

/* Stage 1a: from a sum of the joint matrix to the number that a layer group's basis is multiplied
 * by (G in FORMAT.md). The last k bits, at least 1, are rounded off, half up. What does not fit in
 * 16 bits becomes the nearer end. */
CG_LANE int32_t cg_lane_given(int32_t sum, unsigned k)
{
    const int32_t rounded = (sum >> k) + (sum >> (k - 1) & 1);
    return rounded > 32767 ? 32767 : rounded < -32768 ? -32768 : rounded;
}

/* Stage 2, of a block's frequencies y[8]: z[8], its tokens. d: D', or D where y is multiplied by
 * 2^-unit_bits instead, which gives the same bits: such products are exact. By symmetry four pairs
 * of sums make eight tokens: D[f][7 - t] is D[f][t] for even f, and -D[f][t] for odd f. */
CG_LANE void cg_lane_inverse_dct(const float d[8][8], const float y[8], float z[8])
{
    CG_UNROLL
    for (int t = 0; t < 4; t++) {
        float even = d[0][t] * y[0], odd = d[1][t] * y[1];
        CG_UNROLL
        for (int f = 2; f < 8; f += 2) {
            even = fmaf(d[f][t], y[f], even);
            odd = fmaf(d[f + 1][t], y[f + 1], odd);
        }
        z[t] = even + odd;
        z[7 - t] = even - odd;
    }
}

/* Stage 3, and a symbol of an anchor or a delta. */
CG_LANE float cg_lane_dequantize(float symbol, float step, float base)
{
    return fmaf(symbol, step, base);
}

/* A symbol from q, a coefficient over the step: to nearest, ties away from zero as in transcoding,
 * within -32767 and 32767. */
CG_LANE int32_t cg_lane_quantize(float q)
{
    q = q < 32767.0f
            ? q
            : 32767.0f; /* in this order a NaN, of sums that overflowed, becomes a number */
    q = q > -32767.0f ? q : -32767.0f;
    return (int32_t)(q + copysignf(0.5f, q)); /* |q| + 0.5 is exact enough below 2^15 */
}

/* A row's sign in the sums that an encoder checks a projector by (codec/projection.h). */
CG_LANE float cg_lane_row_sign(uint32_t row)
{
    return ((row + 1) * 2654435769u & 1u << 30) != 0 ? -1.0f : 1.0f;
}

/* Stage 4. */
CG_LANE void cg_lane_rotate(float *low, float *high, float cosine, float sine)
{
    const float a = *low, b = *high;
    *low = fmaf(-b, sine, a * cosine);
    *high = fmaf(a, sine, b * cosine);
}

/* ---- for encoders alone: their rounding is free ---- */

/* Tokens of a block of 8 that are coded: from first on, to before end. Before them are sinks, which
 * lie exactly on top; behind them is nothing. */
typedef struct cg_lane_coded_tokens {
    uint32_t first, end;
} cg_lane_coded_tokens;

/* block: below ceil(n_tokens / 8). */
CG_LANE cg_lane_coded_tokens cg_lane_find_coded(uint32_t block, uint32_t first_position,
                                                uint32_t n_tokens, uint32_t n_sinks)
{
    const uint32_t left = n_tokens - 8 * block, end = left < 8 ? left : 8,
                   position = first_position + 8 * block,
                   n_exact = position < n_sinks ? n_sinks - position : 0;
    cg_lane_coded_tokens coded;
    coded.first = n_exact < end ? n_exact : end;
    coded.end = end;
    return coded;
}

/* Stage 4, backwards. */
CG_LANE void cg_lane_unrotate(float *low, float *high, float cosine, float sine)
{
    const float a = *low, b = *high;
    *low = a * cosine + b * sine;
    *high = b * cosine - a * sine;
}

/* A block's frequencies, y[f] = sum over t of d[f][t] * x[t], of its tokens x[8]. By symmetry a sum
 * has four terms: d[f][7 - t] is d[f][t] for even f, and -d[f][t] for odd f. */
CG_LANE void cg_lane_forward_dct(const float d[8][8], const float x[8], float y[8])
{
    CG_UNROLL
    for (int f = 0; f < 8; f++) {
        float sum = 0;
        CG_UNROLL
        for (int t = 0; t < 4; t++)
            sum = fmaf(d[f][t], f % 2 == 0 ? x[t] + x[7 - t] : x[t] - x[7 - t], sum);
        y[f] = sum;
    }
}

/* ---- for both ---- */

/* Sine and cosine of r in [-pi/4, pi/4]: fdlibm's polynomials. */
CG_LANE double cg_lane_sine_of(double r)
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

CG_LANE double cg_lane_cosine_of(double r)
{
    const double z = r * r;
    double c = -1.13596475577881948265e-11;
    c = fma(z, c, 2.08757232129817482790e-09);
    c = fma(z, c, -2.75573143513906633035e-07);
    c = fma(z, c, 2.48015872894767294178e-05);
    c = fma(z, c, -1.38888888888741095749e-03);
    c = fma(z, c, 4.16666666666666019037e-02);
    return fma(z * z, c, fma(z, -0.5, 1.0));
}

/* c and s of stage 4, of a token's position. In f64: at position 100,000 an f32 angle is off by
 * 2^-8. A double that is added to 1.5 * 2^52 has no bits left for a fraction, so it is rounded to
 * an integer; the lowest bits of that are the quadrant. */
CG_LANE void cg_lane_rotation(double position, double inv_freq, float *cosine, float *sine)
{
    const double angle = position * inv_freq;
    const double sum = angle * 0x1.45f306dc9c883p-1 + 0x1.8p52, k = sum - 0x1.8p52;
    const double r = fma(-k, 0x1.1a62633145c07p-54, fma(-k, 0x1.921fb54442d18p+0, angle));
    uint64_t quadrant;
    memcpy(&quadrant, &sum, sizeof quadrant);
    const double s = cg_lane_sine_of(r), c = cg_lane_cosine_of(r);
    const double swapped_s = (quadrant & 1) != 0 ? c : s, swapped_c = (quadrant & 1) != 0 ? s : c;
    *sine = (float)((quadrant & 2) != 0 ? -swapped_s : swapped_s);
    *cosine = (float)(((quadrant + 1) & 2) != 0 ? -swapped_c : swapped_c);
}
#endif
