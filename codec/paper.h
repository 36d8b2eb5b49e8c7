/* codec/paper.h - preset paper: CacheGen's anchors and deltas, in place of the KLT and DCT of
 * codec/lossy.h.
 *
 * Tokens stand in groups of 10, counted from the chunk's first: the first of a group, its anchor,
 * is coded alone, the others as differences from the decoded anchor. Nothing is rotated, K is coded
 * as the engine holds it.
 * Method: Liu et al., SIGCOMM 2024, arXiv:2310.07240, section 5; bytes and arithmetic:
 * codec/FORMAT.md, "Anchors and deltas". codec/lossy.h leads here by the profile; callers,
 * arguments and errors are its functions'.
 * Threads: pure functions on the caller's memory and a shared profile.
 */
#ifndef CG_CODEC_PAPER_H
#define CG_CODEC_PAPER_H
#include "codec/lossy.h"

#ifdef __cplusplus
extern "C" {
#endif

static inline uint32_t cg_paper_n_anchors(uint32_t n_tokens)
{
    return (n_tokens + CG_ANCHOR_TOKENS - 1) / CG_ANCHOR_TOKENS;
}

size_t cg_paper_decode_scratch_bytes(const cg_profile *profile, const cg_group *group,
                                     uint32_t n_tokens);
cg_status cg_paper_decode(const cg_lossy_context *context, unsigned level, const cg_group *group,
                          unsigned plane, const uint8_t *section, size_t section_bytes,
                          void *scratch, void *out);

size_t cg_paper_encode_scratch_bytes(const cg_profile *profile, const cg_group *group,
                                     uint32_t n_tokens);
cg_status cg_paper_encode(const cg_lossy_context *context, unsigned level_mask,
                          const cg_group *group, unsigned plane, const void *in, void *scratch,
                          uint8_t *sections_out[CG_N_LEVELS],
                          size_t section_bytes_out[CG_N_LEVELS]);

/* A symbols section of the bytes of its two matrices: malloc'ed, the caller's; deltas[*n_bytes] is
 * freed in any case. *n_bytes becomes the section's size. NULL: no memory. */
uint8_t *cg_paper_join(const uint8_t *anchors, size_t anchors_bytes, uint8_t *deltas,
                       size_t *n_bytes);

#ifdef __cplusplus
}
#endif
#endif
