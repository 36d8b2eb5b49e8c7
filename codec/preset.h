/* codec/preset.h - what a preset is: the functions that code one lossy level of one task.
 *
 * A preset is a pair of transforms with its quantizer: klt or paper. A task is a layer group's
 * matrix (K, V, or both); levels are L1 to L3. What the functions promise is said in codec/klt.h.
 * Which preset a profile has: codec/lossy.h. A further preset is a file of its own and a row in
 * lossy.c. Its number is in profile_data.h and accepted by profile_head.c, and profile_read.c reads
 * its tables. Some places differ by preset and name token_transform: where a chunk may begin, what
 * an encoder prepares, what cgtool prints, GPU kernels.
 */
#ifndef CG_CODEC_PRESET_H
#define CG_CODEC_PRESET_H
#include "codec/block_order.h"
#include "codec/heads.h"
#include "codec/projection.h"
#include "codec/symbols.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What the encoding tasks of a chunk have in common. */
typedef struct cg_encoding {
    const cg_heads *heads;
    const cg_block_order *order;
    unsigned level_mask; /* bit n: level n */
    bool is_nested; /* each level is coded given the next coarser one, the coarsest alone; then the
                       mask has no hole */
    unsigned stream_percent; /* of a matrix's bytes, what its streams may cost */
    /* With a joint matrix, else NULL: what tasks leave for it, the shared components' coefficients
     * [CG_DCT][blocks][its channels]. A task writes those of its group. */
    float *shared;
} cg_encoding;

static inline bool cg_encoding_has(const cg_encoding *encoding, unsigned level)
{
    return (encoding->level_mask >> level & 1) != 0;
}

typedef struct cg_preset {
    /* The joint matrix, decoded before all tasks of a chunk whose profile has one. NULL in presets
     * without one. */
    size_t (*given_bytes)(const cg_profile *profile, uint32_t n_tokens);
    size_t (*decode_joint_scratch_bytes)(const cg_profile *profile, unsigned level,
                                         unsigned coarsest, uint32_t n_tokens);
    cg_status (*decode_joint)(const cg_profile *profile, const cg_block_order *order,
                              unsigned level, unsigned coarsest,
                              const cg_coded sections[CG_N_LEVELS], void *scratch,
                              int16_t *given_out);
    size_t (*decode_scratch_bytes)(const cg_profile *profile, unsigned level, unsigned coarsest,
                                   const cg_group *group, unsigned matrix, uint32_t n_tokens);
    cg_status (*decode)(const cg_heads *heads, const cg_block_order *order, unsigned level,
                        unsigned coarsest, const cg_group *group, unsigned matrix,
                        const cg_coded sections[CG_N_LEVELS], const int16_t *given, void *scratch,
                        void *out);
    size_t (*encode_scratch_bytes)(const cg_profile *profile, const cg_group *group,
                                   unsigned matrix, uint32_t n_tokens);
    cg_status (*encode)(const cg_encoding *encoding, const cg_group *group, unsigned matrix,
                        const void *in, void *scratch, cg_projector *projector,
                        cg_piece sections_out[CG_N_LEVELS], uint64_t *n_saturated);
    /* The joint matrix, encoded after all tasks. NULL in presets without one. */
    size_t (*shared_bytes)(const cg_profile *profile, uint32_t n_tokens); /* of cg_encoding */
    cg_status (*encode_joint)(const cg_encoding *encoding, void *scratch, cg_projector *projector,
                              cg_piece sections_out[CG_N_LEVELS], uint64_t *n_saturated);
    cg_status (*transcode)(const cg_profile *profile, const cg_block_order *order, unsigned from,
                           unsigned to, const cg_group *group, unsigned matrix, uint32_t n_tokens,
                           cg_coded section, cg_piece *section_out);
} cg_preset;

#ifdef __cplusplus
}
#endif
#endif
