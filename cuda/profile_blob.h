/* cuda/profile_blob.h - where a profile's parts lie in its blob, for cuda/plan.c.
 *
 * The blob is what kernels read of a profile (cuda/decode.h). Offsets, ..._at, are bytes from its
 * start.
 * Threads: read-only once made.
 */
#ifndef CG_CUDA_PROFILE_BLOB_H
#define CG_CUDA_PROFILE_BLOB_H
#include "codec/profile_data.h"
#include "cuda/layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The strips of a level's matrix: n of cg_cuda_strip. */
typedef struct cg_cuda_strips {
    uint64_t at;
    uint64_t classes_at; /* of their columns */
    uint32_t n;
} cg_cuda_strips;

/* What the blob has of a layer group's matrix, or of the joint one. */
typedef struct cg_cuda_matrix {
    uint32_t n_bands[CG_N_LOSSY][CG_DCT]; /* of columns of symbols; preset klt */
    cg_cuda_strips strips[CG_N_LOSSY][2]; /* alone; given the next coarser level */
    cg_cuda_strips anchors;
    uint64_t mean_at, basis_at;
    uint64_t weight_at, anchor_step_at;                  /* preset paper */
    uint64_t steps_at[CG_N_LOSSY], scale_at[CG_N_LOSSY]; /* preset klt */
    uint32_t n_steps[CG_N_LOSSY], n_all_steps;
} cg_cuda_matrix;

/* The presets that there are kernels for. */
typedef enum cg_cuda_preset { CG_CUDA_PRESET_KLT, CG_CUDA_PRESET_PAPER } cg_cuda_preset;

struct cg_cuda_profile {
    const cg_profile *profile;
    cg_cuda_preset preset;
    uint64_t n_bytes;
    uint64_t classes_at, class_of_at, costs_at, inv_freq_at, layer_rope_at;
    uint32_t head_tiles;       /* tiles of CG_CUDA_TILE_PAIRS pairs a head has */
    cg_cuda_matrix matrices[]; /* [n_groups][n_matrices], and the joint one */
};

/* A class as kernels hold it. */
void cg_cuda_class_fill(const cg_rans_class *cls, cg_cuda_class *out);
/* The class of lanes without a column, which stands behind the others: it leaves a lane's state as
 * it is. */
void cg_cuda_class_fill_idle(cg_cuda_class *out);

/* Bands of a frequency's columns, in scratch: the last one is padded to a whole band. */
static inline uint32_t cg_cuda_n_bands(uint32_t n_active)
{
    return (n_active + CG_BAND_COMPONENTS - 1) / CG_BAND_COMPONENTS;
}

#ifdef __cplusplus
}
#endif
#endif
