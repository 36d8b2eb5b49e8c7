/* codec/lossy.h - one layer group's plane to symbols and back: rotation, mean, weight, KLT, DCT,
 * quantizer.
 *
 * Method: DESIGN.md section 3, preset klt; preset paper, behind the same functions, is
 * codec/paper.h's.
 * Bytes and arithmetic: codec/FORMAT.md, "What the lossy levels mean".
 * Elements are in the canonical layout of codec/codec.h. scratch: 64-byte aligned,
 * cg_lossy_..._scratch_bytes().
 * Threads: pure functions on the caller's memory and a shared profile.
 */
#ifndef CG_CODEC_LOSSY_H
#define CG_CODEC_LOSSY_H
#include "codec/kernels.h"
#include "codec/profile_data.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What the sections of one chunk have in common. */
typedef struct cg_lossy_context {
    const cg_profile *profile;
    const cg_kernels *kernels;
    uint32_t first_position, n_tokens; /* with a DCT first_position is a multiple of CG_DCT */
    unsigned dtype;
    bool is_nested;             /* finer levels are coded given the next coarser one */
    const float *cosine, *sine; /* [n_ropes][n_tokens][rotary_dim / 2], of the tokens' positions */
} cg_lossy_context;

/* Elements of cosine and of sine. */
size_t cg_lossy_rotation_elements(const cg_profile *profile, uint32_t n_tokens);
/* cosine_out, sine_out: [cg_lossy_rotation_elements()]. */
void cg_lossy_rotation(const cg_profile *profile, uint32_t first_position, uint32_t n_tokens,
                       float *cosine_out, float *sine_out);

/* A matrix of symbols: for each frequency f, [n_blocks][n_active[f]], one after another. Anchors
 * and deltas are one matrix each, all of it of frequency 0: n_blocks is then the number of rows. */
typedef struct cg_symbols {
    const cg_level_columns *columns;
    int16_t *cells[CG_DCT];
    cg_rans_strip *strips; /* [n_strips] */
    size_t n_strips;
} cg_symbols;

/* A section's bytes. */
typedef struct cg_coded {
    const uint8_t *bytes;
    size_t n_bytes;
} cg_coded;

static inline size_t cg_lossy_n_blocks(uint32_t n_tokens)
{
    return (n_tokens + CG_DCT - 1u) / CG_DCT;
}

size_t cg_lossy_symbols_bytes(const cg_level_columns *columns, size_t n_blocks);
/* Lays symbols out in memory[cg_lossy_symbols_bytes()], 64-byte aligned. coarse: the symbols of the
 * next coarser level, which are known when these are coded; NULL: they are coded alone. */
cg_symbols cg_lossy_lay_symbols(const cg_level_columns *columns, const cg_symbols *coarse,
                                size_t n_blocks, void *memory);

size_t cg_lossy_decode_scratch_bytes(const cg_profile *profile, unsigned level, unsigned coarsest,
                                     const cg_group *group, unsigned plane, uint32_t n_tokens);
/* Decodes sections[level] into out; where coarsest is above level, sections of the levels up to it
 * are what this one refines. CG_ERR_TRUNCATED, CG_ERR_CORRUPT. */
cg_status cg_lossy_decode(const cg_lossy_context *context, unsigned level, unsigned coarsest,
                          const cg_group *group, unsigned plane,
                          const cg_coded sections[CG_N_LEVELS], void *scratch, void *out);

size_t cg_lossy_encode_scratch_bytes(const cg_profile *profile, const cg_group *group,
                                     unsigned plane, uint32_t n_tokens);
/* Encodes in at every lossy level of level_mask, in a nested context each given the next coarser
 * one, the coarsest of the mask alone (then the mask has no hole): sections_out[level] is
 * malloc'ed, the caller's, also after an error (free all three). CG_ERR_NO_MEMORY;
 * CG_ERR_INVALID_ARGUMENT: an element is not finite. */
cg_status cg_lossy_encode(const cg_lossy_context *context, unsigned level_mask,
                          const cg_group *group, unsigned plane, const void *in, void *scratch,
                          uint8_t *sections_out[CG_N_LEVELS],
                          size_t section_bytes_out[CG_N_LEVELS]);

/* A head's values[head_dim] to out, the dtype's elements from index element on, rounded (FORMAT.md,
 * step 5); and back: false when one is not finite. */
void cg_lossy_store_head(const cg_lossy_context *context, const float *values, void *out,
                         size_t element);
bool cg_lossy_load_head(const cg_lossy_context *context, const void *in, size_t element,
                        float *values);

/* Writes a matrix of symbols as a section's bytes: malloc'ed, the caller's. NULL: no memory. */
uint8_t *cg_lossy_code_symbols(const cg_profile *profile, const cg_symbols *symbols,
                               size_t n_blocks, size_t *n_bytes_out);

#ifdef __cplusplus
}
#endif
#endif
