/* codec/klt_quantize.h - preset klt: coefficients to the symbols of all levels.
 *
 * A decoder's sums have 32 bits (codec/FORMAT.md), so a row of symbols (a block's frequency) that
 * would leave them is made smaller here. Threads: pure functions on the caller's memory.
 */
#ifndef CG_CODEC_KLT_QUANTIZE_H
#define CG_CODEC_KLT_QUANTIZE_H
#include "codec/lossy.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Symbols of frequency f at all levels of the encoding: from coefficients [n_rows][coef_stride]
 * (NULL: the finest level's symbols are there) or, nested, from the next finer level's symbols. The
 * two agree but for coefficients that lie on a border within f32's rounding, and a nested section
 * can only code a symbol that is within 1 of 3 times the coarser one. Returns how many symbols
 * cg_encoder_n_saturated() counts. */
uint64_t cg_klt_quantize(const cg_encoding *encoding, const cg_group *group, unsigned matrix,
                         unsigned f, const float *coef, size_t coef_stride,
                         const cg_symbols symbols[CG_N_LEVELS]);

size_t cg_klt_limit_scratch_bytes(const cg_profile *profile, uint32_t n_tokens);
/* Of the joint matrix's symbols, all levels: makes rows smaller until no group's sums of what they
 * give leave their bits. Returns the number of symbols that it made smaller, and of given numbers
 * that are at the ends of their 16 bits. scratch: 64-byte aligned, cg_klt_limit_scratch_bytes(). */
uint64_t cg_klt_limit_given(const cg_encoding *encoding, const cg_symbols symbols[CG_N_LEVELS],
                            void *scratch);

#ifdef __cplusplus
}
#endif
#endif
