/* codec/paper.h - preset paper: CacheGen's anchors and deltas over the channels as they are.
 *
 * Tokens stand in groups of 10, counted from the chunk's first. The first of a group is its anchor
 * and is coded alone. The others are coded as differences from the decoded anchor. Nothing is
 * rotated: K is coded as the engine holds it. Chunks are never nested.
 * Method: Liu et al., SIGCOMM 2024, arXiv:2310.07240, section 5. Bytes and arithmetic:
 * codec/FORMAT.md, "Anchors and deltas".
 * Arguments, results and errors are those of the functions in codec/klt.h, which is the other
 * preset. Threads: pure functions on the caller's memory and a shared profile.
 */
#ifndef CG_CODEC_PAPER_H
#define CG_CODEC_PAPER_H
#include "codec/preset.h"

#ifdef __cplusplus
extern "C" {
#endif

static inline uint32_t cg_paper_n_anchors(uint32_t n_tokens)
{
    return (n_tokens + CG_ANCHOR_TOKENS - 1) / CG_ANCHOR_TOKENS;
}

size_t cg_paper_decode_scratch_bytes(const cg_profile *profile, unsigned level, unsigned coarsest,
                                     const cg_group *group, unsigned matrix, uint32_t n_tokens);
cg_status cg_paper_decode(const cg_heads *heads, const cg_block_order *order, unsigned level,
                          unsigned coarsest, const cg_group *group, unsigned matrix,
                          const cg_coded sections[CG_N_LEVELS], const int16_t *given, void *scratch,
                          void *out);

size_t cg_paper_encode_scratch_bytes(const cg_profile *profile, const cg_group *group,
                                     unsigned matrix, uint32_t n_tokens);
cg_status cg_paper_encode(const cg_encoding *encoding, const cg_group *group, unsigned matrix,
                          const void *in, void *scratch, cg_projector *projector,
                          cg_piece sections_out[CG_N_LEVELS], uint64_t *n_saturated);

cg_status cg_paper_transcode(const cg_profile *profile, const cg_block_order *order, unsigned from,
                             unsigned to, const cg_group *group, unsigned matrix, uint32_t n_tokens,
                             cg_coded section, cg_piece *section_out);

#ifdef __cplusplus
}
#endif
#endif
