/* codec/klt.h - preset klt: a matrix of a layer group (K, V, or both) to symbols and back.
 *
 * Encoding: K is rotated back; the mean is taken off and each channel is weighted by what an error
 * in it costs the model; a DCT over blocks of 8 tokens; a KLT (the profile's basis) over all
 * channels of the group; a quantizer with one step for all. Decoding is the same the other way
 * round. Both walk the matrix of codec/symbols.h, whose rows are blocks of 8 tokens. Why KLT and
 * DCT: neighbouring layers and heads of a KV cache are correlated, and so are neighbouring tokens,
 * once K's rotation is undone. After both transforms most symbols are zero. Bytes and arithmetic:
 * codec/FORMAT.md, "What the lossy levels mean". Elements are in the canonical layout of
 * codec/codec.h. scratch: 64-byte aligned, cg_klt_..._scratch_bytes(). Threads: pure functions on
 * the caller's memory and a shared profile.
 */
#ifndef CG_CODEC_KLT_H
#define CG_CODEC_KLT_H
#include "codec/lossy.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows of a section's matrix. */
static inline size_t cg_klt_n_blocks(uint32_t n_tokens)
{
    return (n_tokens + CG_DCT - 1u) / CG_DCT;
}

/* What a profile's joint matrix gives to its groups for a chunk, V of FORMAT.md: int16
 * [CG_DCT][n_blocks][n_groups][n_shared], of units of 2^-fraction_bits steps. What is behind a
 * level's n_given is garbage. */
size_t cg_klt_given_bytes(const cg_profile *profile, uint32_t n_tokens);
size_t cg_klt_give_scratch_bytes(const cg_profile *profile, unsigned level, uint32_t n_tokens);
/* From the joint matrix's symbols of a level. */
void cg_klt_give(const cg_profile *profile, unsigned level, const cg_symbols *symbols,
                 void *scratch, int16_t *given_out);

size_t cg_klt_decode_joint_scratch_bytes(const cg_profile *profile, unsigned level,
                                         unsigned coarsest, uint32_t n_tokens);
/* The same from the joint matrix's sections, as cg_klt_decode() takes a group's. CG_ERR_TRUNCATED,
 * CG_ERR_CORRUPT. */
cg_status cg_klt_decode_joint(const cg_profile *profile, unsigned level, unsigned coarsest,
                              const cg_coded sections[CG_N_LEVELS], uint32_t n_tokens,
                              void *scratch, int16_t *given_out);

size_t cg_klt_decode_scratch_bytes(const cg_profile *profile, unsigned level, unsigned coarsest,
                                   const cg_group *group, unsigned matrix, uint32_t n_tokens);
/* Decodes sections[level] into out. Where coarsest is above level, the chunk is nested: the
 * sections of the levels from level to coarsest are needed. given: what the joint matrix gives at
 * the level; NULL without one. CG_ERR_TRUNCATED, CG_ERR_CORRUPT. */
cg_status cg_klt_decode(const cg_heads *heads, unsigned level, unsigned coarsest,
                        const cg_group *group, unsigned matrix,
                        const cg_coded sections[CG_N_LEVELS], const int16_t *given, void *scratch,
                        void *out);

size_t cg_klt_encode_scratch_bytes(const cg_profile *profile, const cg_group *group,
                                   unsigned matrix, uint32_t n_tokens);
/* Encodes in at every lossy level of the encoding: with a joint matrix the group's own components;
 * the others' coefficients are left in encoding->shared. sections_out[level].bytes is malloc'ed,
 * the caller's, also after an error (free all). *n_saturated grows by the number of symbols that
 * cg_encoder_n_saturated() counts. projector: NULL, or who makes the projections with a profile of
 * version 2 or 3; its failures are no error. CG_ERR_NO_MEMORY; CG_ERR_INVALID_ARGUMENT: an element
 * is not finite. */
cg_status cg_klt_encode(const cg_encoding *encoding, const cg_group *group, unsigned matrix,
                        const void *in, void *scratch, cg_projector *projector,
                        cg_piece sections_out[CG_N_LEVELS], uint64_t *n_saturated);

size_t cg_klt_shared_bytes(const cg_profile *profile, uint32_t n_tokens);
/* The same for the joint matrix, from encoding->shared, which all tasks have filled. scratch:
 * cg_klt_encode_scratch_bytes() of the joint matrix. CG_ERR_NO_MEMORY. */
cg_status cg_klt_encode_joint(const cg_encoding *encoding, void *scratch, cg_projector *projector,
                              cg_piece sections_out[CG_N_LEVELS], uint64_t *n_saturated);

/* A section of level from to one of the coarser level to. Errors of cg_symbols_transcode(). */
cg_status cg_klt_transcode(const cg_profile *profile, unsigned from, unsigned to,
                           const cg_group *group, unsigned matrix, uint32_t n_tokens,
                           cg_coded section, cg_piece *section_out);

#ifdef __cplusplus
}
#endif
#endif
