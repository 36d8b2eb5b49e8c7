/* codec/preset.h - what a preset is: the functions that code one lossy level of one task.
 *
 * A preset is a pair of transforms with its quantizer: klt or paper. A task is a layer group's
 * matrix (K, V, or both); levels are L1 to L3. Which preset a profile has: codec/lossy.h.
 *
 * A further preset is a file of its own, its line in CMakeLists.txt and a row in lossy.c, the one
 * file that knows all presets: elsewhere the codec goes by what a preset says below. Only tables
 * that no other preset has need a place in cg_profile (profile_data.h), which frees them. Which
 * presets a GPU has kernels for says cuda/profile_blob.c; the CPU decodes the others. Profiles are
 * written by connector/cachegen/profile_file.py; tests/codec/reader.py reads all of it a second
 * time.
 *
 * Threads: pure functions on the caller's memory and a shared profile.
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

/* In all of them: level is CG_L1 to CG_L3; coarsest is the chunk's coarsest level, level itself
 * unless it is nested. matrix is below profile->n_matrices. order is of the chunk's blocks.
 * sections[] are by level. Where coarsest is above level, the chunk is nested, and the sections of
 * all levels from level to coarsest are needed; otherwise sections[level] alone. Elements (in, out)
 * are in the canonical layout of codec/codec.h. scratch: 64-byte aligned, of the bytes that the
 * preset's own ..._scratch_bytes say. */
typedef struct cg_preset {
    /* ---- its profiles: codec/FORMAT.md, "Profile" ---- */

    uint32_t transforms;     /* over channels + 256 * over tokens, by the file's numbers */
    uint32_t start_multiple; /* a chunk's first position is a multiple of it */
    /* Columns of symbols are components of bases, and not the channels. Only then is K's rotation
     * undone, are planes joined or chunks nested, and are there versions 3 and 4. */
    bool has_bases;
    bool has_anchor_step; /* of each channel: a table behind mean and weight */
    const char *about;    /* how tokens are coded, for cgtool; of presets without bases */
    /* Reads what follows classes and steps, and makes what the preset keeps in a profile. Errors of
     * cg_profile_open(). */
    cg_status (*read_profile)(cg_cursor *in, cg_profile *profile);

    /* ---- the joint matrix, decoded before all tasks; NULL in presets without one ---- */

    /* Bytes of what a profile's joint matrix gives to all groups of a chunk, the G of FORMAT.md:
     * int16 [CG_DCT][n_blocks][n_groups][n_shared], in units of 2^-fraction_bits steps. Components
     * from a level's n_given on are garbage. Only for profiles with a joint matrix. */
    size_t (*given_bytes)(const cg_profile *profile, uint32_t n_tokens);
    size_t (*decode_joint_scratch_bytes)(const cg_profile *profile, unsigned level,
                                         unsigned coarsest, uint32_t n_tokens);
    /* Decodes the joint matrix's sections, and makes given_out from them. CG_ERR_TRUNCATED,
     * CG_ERR_CORRUPT: given_out is garbage. */
    cg_status (*decode_joint)(const cg_profile *profile, const cg_block_order *order,
                              unsigned level, unsigned coarsest,
                              const cg_coded sections[CG_N_LEVELS], void *scratch,
                              int16_t *given_out);

    /* ---- a task ---- */

    size_t (*decode_scratch_bytes)(const cg_profile *profile, unsigned level, unsigned coarsest,
                                   const cg_group *group, unsigned matrix, uint32_t n_tokens);
    /* Decodes a group's matrix at a level into out. given: what the joint matrix gives at the
     * level; NULL without one. CG_ERR_TRUNCATED, CG_ERR_CORRUPT: out is garbage. */
    cg_status (*decode)(const cg_heads *heads, const cg_block_order *order, unsigned level,
                        unsigned coarsest, const cg_group *group, unsigned matrix,
                        const cg_coded sections[CG_N_LEVELS], const int16_t *given, void *scratch,
                        void *out);
    size_t (*encode_scratch_bytes)(const cg_profile *profile, const cg_group *group,
                                   unsigned matrix, uint32_t n_tokens);
    /* Encodes in at every lossy level of the encoding. With a joint matrix, sections hold the
     * group's own components alone, and the coefficients of the shared ones are left in
     * encoding->shared. sections_out is zeros before; its bytes are malloc'ed and the caller's,
     * also after an error: free all. *n_saturated grows by the number of symbols that
     * cg_encoder_n_saturated() counts. projector: NULL, or what multiplies in the CPU's place with
     * a profile from version 2 on (codec/projection.h). Its failures are no error: the CPU does it
     * then. CG_ERR_NO_MEMORY; CG_ERR_INVALID_ARGUMENT: an element is not finite. */
    cg_status (*encode)(const cg_encoding *encoding, const cg_group *group, unsigned matrix,
                        const void *in, void *scratch, cg_projector *projector,
                        cg_piece sections_out[CG_N_LEVELS], uint64_t *n_saturated);

    /* ---- the joint matrix, encoded after all tasks; NULL in presets without one ---- */

    /* Bytes of encoding->shared: f32 [CG_DCT][n_blocks][n_groups][n_shared]. */
    size_t (*shared_bytes)(const cg_profile *profile, uint32_t n_tokens);
    /* encode() for the joint matrix, from encoding->shared, which all tasks have filled. scratch:
     * encode_scratch_bytes() of the joint matrix. CG_ERR_NO_MEMORY. */
    cg_status (*encode_joint)(const cg_encoding *encoding, void *scratch, cg_projector *projector,
                              cg_piece sections_out[CG_N_LEVELS], uint64_t *n_saturated);

    /* Makes a section of the coarser level `to` from one of level `from`; both are coded alone, not
     * given another level. The order of the rows stays. section_out->bytes is malloc'ed, the
     * caller's. Errors of cg_symbols_transcode(). */
    cg_status (*transcode)(const cg_profile *profile, const cg_block_order *order, unsigned from,
                           unsigned to, const cg_group *group, unsigned matrix, uint32_t n_tokens,
                           cg_coded section, cg_piece *section_out);
} cg_preset;

#ifdef __cplusplus
}
#endif
#endif
