/* codec/klt.h - preset klt: a matrix of a layer group (K, V, or both) to symbols and back.
 *
 * Encoding takes these steps. K's rotation (RoPE) is undone. Each channel's mean is taken off, and
 * the channel is multiplied by its weight: what an error in it costs the model. A DCT runs over
 * blocks of 8 tokens. A KLT, with the profile's basis, runs over all channels of the group. A
 * quantizer with one step for all makes symbols, which rANS codes. Decoding is the same the other
 * way round. The symbols are a matrix of codec/symbols.h, whose rows are blocks of 8 tokens.
 *
 * Why KLT and DCT: neighbouring layers and heads of a KV cache are correlated, and so are
 * neighbouring tokens, once K's rotation is undone. After both transforms most symbols are zero.
 * Terms, bytes and arithmetic: codec/FORMAT.md, "What the lossy levels mean".
 *
 * Threads: pure functions on the caller's memory and a shared profile.
 */
#ifndef CG_CODEC_KLT_H
#define CG_CODEC_KLT_H
#include "codec/preset.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CG_KLT_TRANSFORMS = 1 << 8 | 1 }; /* DCT over tokens, KLT over channels */

extern const cg_preset cg_klt_preset;

/* Its functions (codec/preset.h). */

size_t cg_klt_given_bytes(const cg_profile *profile, uint32_t n_tokens);
size_t cg_klt_decode_joint_scratch_bytes(const cg_profile *profile, unsigned level,
                                         unsigned coarsest, uint32_t n_tokens);
cg_status cg_klt_decode_joint(const cg_profile *profile, const cg_block_order *order,
                              unsigned level, unsigned coarsest,
                              const cg_coded sections[CG_N_LEVELS], void *scratch,
                              int16_t *given_out);
size_t cg_klt_decode_scratch_bytes(const cg_profile *profile, unsigned level, unsigned coarsest,
                                   const cg_group *group, unsigned matrix, uint32_t n_tokens);
cg_status cg_klt_decode(const cg_heads *heads, const cg_block_order *order, unsigned level,
                        unsigned coarsest, const cg_group *group, unsigned matrix,
                        const cg_coded sections[CG_N_LEVELS], const int16_t *given, void *scratch,
                        void *out);
size_t cg_klt_encode_scratch_bytes(const cg_profile *profile, const cg_group *group,
                                   unsigned matrix, uint32_t n_tokens);
cg_status cg_klt_encode(const cg_encoding *encoding, const cg_group *group, unsigned matrix,
                        const void *in, void *scratch, cg_projector *projector,
                        cg_piece sections_out[CG_N_LEVELS], uint64_t *n_saturated);
size_t cg_klt_shared_bytes(const cg_profile *profile, uint32_t n_tokens);
cg_status cg_klt_encode_joint(const cg_encoding *encoding, void *scratch, cg_projector *projector,
                              cg_piece sections_out[CG_N_LEVELS], uint64_t *n_saturated);
cg_status cg_klt_transcode(const cg_profile *profile, const cg_block_order *order, unsigned from,
                           unsigned to, const cg_group *group, unsigned matrix, uint32_t n_tokens,
                           cg_coded section, cg_piece *section_out);

/* What an encoder shares with decode_joint(). */

size_t cg_klt_give_scratch_bytes(const cg_profile *profile, unsigned level, uint32_t n_tokens);
/* Makes given_out, of cg_klt_given_bytes(), from the joint matrix's symbols of a level. */
void cg_klt_give(const cg_profile *profile, unsigned level, const cg_symbols *symbols,
                 void *scratch, int16_t *given_out);

#ifdef __cplusplus
}
#endif
#endif
