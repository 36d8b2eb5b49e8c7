/* codec/klt_quantize.h - preset klt: coefficients to the symbols of all levels.
 *
 * A decoder's sums have 32 bits (codec/FORMAT.md). A row of symbols, those of one block and
 * frequency, whose sums would need more is made smaller here. Threads: pure functions on the
 * caller's memory.
 */
#ifndef CG_CODEC_KLT_QUANTIZE_H
#define CG_CODEC_KLT_QUANTIZE_H
#include "codec/preset.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Makes the symbols of frequency f at all lossy levels of the encoding, symbols[level], which are
 * laid out. coef [n_rows][coef_stride]: the coefficients of the components that symbols are made
 * of. NULL: a projector has made the finest level's symbols already.
 *
 * Nested, a coarser level's symbols are made of the next finer level's, not of coefficients. Both
 * ways agree, except for coefficients that lie within f32's rounding of a border between two
 * symbols. There they could differ by one, and a nested section can only code a symbol that is
 * within 1 of 3 times the coarser one.
 *
 * Returns how many symbols cg_encoder_n_saturated() counts.
 */
uint64_t cg_klt_quantize(const cg_encoding *encoding, const cg_group *group, unsigned matrix,
                         unsigned f, const float *coef, size_t coef_stride,
                         const cg_symbols symbols[CG_N_LEVELS]);

size_t cg_klt_limit_scratch_bytes(const cg_profile *profile, uint32_t n_tokens);
/* Makes rows of the joint matrix's symbols smaller, at all levels of the encoding, until what they
 * give to the groups keeps every group's sums within their bits. Returns the number of symbols that
 * it made smaller, plus that of given numbers at the ends of their 16 bits. scratch: 64-byte
 * aligned, cg_klt_limit_scratch_bytes(). */
uint64_t cg_klt_limit_given(const cg_encoding *encoding, const cg_symbols symbols[CG_N_LEVELS],
                            void *scratch);

#ifdef __cplusplus
}
#endif
#endif
