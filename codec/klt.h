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
 * level is CG_L1 to CG_L3; coarsest is the chunk's coarsest level, level itself unless it is
 * nested. matrix is below profile->n_matrices. sections[] are by level. Elements (in, out) are in
 * the canonical layout of codec/codec.h. scratch: 64-byte aligned, of the function's own
 * cg_klt_..._scratch_bytes(). Threads: pure functions on the caller's memory and a shared profile.
 */
#ifndef CG_CODEC_KLT_H
#define CG_CODEC_KLT_H
#include "codec/preset.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of what a profile's joint matrix gives to all groups of a chunk, the G of FORMAT.md: int16
 * [CG_DCT][n_blocks][n_groups][n_shared], in units of 2^-fraction_bits steps. Components from a
 * level's n_given on are garbage. Only for profiles with a joint matrix. */
size_t cg_klt_given_bytes(const cg_profile *profile, uint32_t n_tokens);
size_t cg_klt_give_scratch_bytes(const cg_profile *profile, unsigned level, uint32_t n_tokens);
/* Makes given_out, of cg_klt_given_bytes(), from the joint matrix's symbols of a level. */
void cg_klt_give(const cg_profile *profile, unsigned level, const cg_symbols *symbols,
                 void *scratch, int16_t *given_out);

size_t cg_klt_decode_joint_scratch_bytes(const cg_profile *profile, unsigned level,
                                         unsigned coarsest, uint32_t n_tokens);
/* Decodes the joint matrix's sections, and makes given_out from them. Sections and order are as
 * cg_klt_decode() takes them. CG_ERR_TRUNCATED, CG_ERR_CORRUPT: given_out is garbage. */
cg_status cg_klt_decode_joint(const cg_profile *profile, const cg_block_order *order,
                              unsigned level, unsigned coarsest,
                              const cg_coded sections[CG_N_LEVELS], void *scratch,
                              int16_t *given_out);

size_t cg_klt_decode_scratch_bytes(const cg_profile *profile, unsigned level, unsigned coarsest,
                                   const cg_group *group, unsigned matrix, uint32_t n_tokens);
/* Decodes a group's matrix at a level into out. order: of the chunk's blocks. Where coarsest is
 * above level, the chunk is nested, and the sections of all levels from level to coarsest are
 * needed; otherwise sections[level] alone. given: what the joint matrix gives at the level; NULL
 * without one. CG_ERR_TRUNCATED, CG_ERR_CORRUPT: out is garbage. */
cg_status cg_klt_decode(const cg_heads *heads, const cg_block_order *order, unsigned level,
                        unsigned coarsest, const cg_group *group, unsigned matrix,
                        const cg_coded sections[CG_N_LEVELS], const int16_t *given, void *scratch,
                        void *out);

size_t cg_klt_encode_scratch_bytes(const cg_profile *profile, const cg_group *group,
                                   unsigned matrix, uint32_t n_tokens);
/* Encodes in at every lossy level of the encoding. With a joint matrix, sections hold the group's
 * own components alone, and the coefficients of the shared ones are left in encoding->shared.
 * sections_out is zeros before; its bytes are malloc'ed and the caller's, also after an error: free
 * all. *n_saturated grows by the number of symbols that cg_encoder_n_saturated() counts. projector:
 * NULL, or what multiplies in the CPU's place with a profile from version 2 on
 * (codec/projection.h). Its failures are no error: the CPU does it then. CG_ERR_NO_MEMORY;
 * CG_ERR_INVALID_ARGUMENT: an element is not finite. */
cg_status cg_klt_encode(const cg_encoding *encoding, const cg_group *group, unsigned matrix,
                        const void *in, void *scratch, cg_projector *projector,
                        cg_piece sections_out[CG_N_LEVELS], uint64_t *n_saturated);

/* Bytes of encoding->shared: f32 [CG_DCT][n_blocks][n_groups][n_shared]. */
size_t cg_klt_shared_bytes(const cg_profile *profile, uint32_t n_tokens);
/* cg_klt_encode() for the joint matrix, from encoding->shared, which all tasks have filled.
 * scratch: cg_klt_encode_scratch_bytes() of the joint matrix. CG_ERR_NO_MEMORY. */
cg_status cg_klt_encode_joint(const cg_encoding *encoding, void *scratch, cg_projector *projector,
                              cg_piece sections_out[CG_N_LEVELS], uint64_t *n_saturated);

/* Makes a section of the coarser level `to` from one of level `from`; both are coded alone, not
 * given another level. The order of the rows stays. section_out->bytes is malloc'ed, the caller's.
 * Errors of cg_symbols_transcode(). */
cg_status cg_klt_transcode(const cg_profile *profile, const cg_block_order *order, unsigned from,
                           unsigned to, const cg_group *group, unsigned matrix, uint32_t n_tokens,
                           cg_coded section, cg_piece *section_out);

#ifdef __cplusplus
}
#endif
#endif
