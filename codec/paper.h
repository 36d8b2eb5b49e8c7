/* codec/paper.h - preset paper: CacheGen's anchors and deltas over the channels as they are.
 *
 * Tokens stand in anchor runs of 10, counted from the chunk's first. The first of a run is its
 * anchor and is coded alone. The others are coded as differences from the decoded anchor. Nothing
 * is rotated: K is coded as the engine holds it. Chunks are never nested. Method: Liu et al.,
 * SIGCOMM 2024, arXiv:2310.07240, section 5. Bytes and arithmetic: codec/FORMAT.md, "Anchors and
 * deltas". Threads: pure functions on the caller's memory and a shared profile.
 */
#ifndef CG_CODEC_PAPER_H
#define CG_CODEC_PAPER_H
#include "codec/preset.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CG_PAPER_TRANSFORMS = 2 << 8 }; /* anchors over tokens, channels as they are */

static inline uint32_t cg_paper_n_anchors(uint32_t n_tokens)
{
    return (n_tokens + CG_ANCHOR_TOKENS - 1) / CG_ANCHOR_TOKENS;
}

extern const cg_preset cg_paper_preset;

#ifdef __cplusplus
}
#endif
#endif
