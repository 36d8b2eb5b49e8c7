/* codec/exact_kernels.h - the float steps of profiles from version 2 on, one table per instruction
 * set.
 *
 * exact_kernels.c is compiled once per instruction set (CMakeLists.txt), without contraction: what
 * is fused is written so. All tables give the same bits. Arithmetic: codec/FORMAT.md, "Decoding,
 * version 2" to "version 4". Threads: pure functions on the caller's memory.
 */
#ifndef CG_CODEC_EXACT_KERNELS_H
#define CG_CODEC_EXACT_KERNELS_H
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cg_exact_kernels {
    /* Cosines and sines [n_tokens][half] of the angles position * inv_freq[half], positions from
     * first_position on. */
    void (*rotation)(uint32_t first_position, size_t n_tokens, const double *inv_freq, size_t half,
                     float *cosine, float *sine);
    /* Step 1a: out[n_channels], the sums rounded to nearest with k bits off. k is at least 1. */
    void (*give)(const int32_t *sums, unsigned k, size_t n_channels, int16_t *out);
    /* Steps 2 and 3 for one block of 8 tokens: x[8][x_stride] from the sums y[8][y_stride], of
     * n_channels channels. unit: cg_bands_unit() times the block's step factor. scale[n_channels]:
     * step / weight. */
    void (*inverse_dct)(const int32_t *y, size_t y_stride, float unit, const float *scale,
                        const float *mean, size_t n_channels, float *x, size_t x_stride);
    /* Step 4: one head of one token in place, by cosine[half] and sine[half]; half = rotary_dim /
     * 2. */
    void (*rotate)(float *head, const float *cosine, const float *sine, size_t half);
    /* x[ch] = fmaf(cells[ch], step[ch], base[ch]). */
    void (*dequantize_channels)(const int16_t *cells, const float *step, const float *base,
                                size_t n_channels, float *x);
} cg_exact_kernels;

extern const cg_exact_kernels cg_exact_kernels_baseline;
#if defined(__x86_64__)
extern const cg_exact_kernels cg_exact_kernels_avx2, cg_exact_kernels_avx512, cg_exact_kernels_vnni,
    cg_exact_kernels_amx;
#endif

#ifdef __cplusplus
}
#endif
#endif
