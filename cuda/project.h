/* cuda/project.h - an encoder's projections on a GPU: spectra to symbols (codec/projection.h).
 *
 * Four kernels, one after another: coefficients of a basis's first n_exact components; what those
 * make of the rows is taken off; coefficients of the others; their symbols. Sums are of f32, and
 * their order does not depend on how a GPU is busy. Threads: functions are pure on the caller's
 * memory.
 */
#ifndef CG_CUDA_PROJECT_H
#define CG_CUDA_PROJECT_H
#include "codec/projection.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st; /* cudaStream_t is a pointer to it */

enum {
    CG_CUDA_PROJECT_ROWS = 32, /* that a thread block makes */
    CG_CUDA_PROJECT_COLUMNS = 64,
    CG_CUDA_PROJECT_DEPTH = 32,    /* what is summed over, at once in shared memory */
    CG_CUDA_QUANTIZE_ROWS = 8,     /* whose symbols a thread makes side by side */
    CG_CUDA_PROJECT_THREADS = 128, /* also the columns of which a block makes symbols */
};

/* ---- the bases of a profile of version 2, as kernels read them; preset klt ---- */

/* How many bytes all take on the GPU: 16 bits an element, twice a profile of bytes. */
size_t cg_cuda_bases_bytes(const cg_profile *profile);
/* Writes them, to be copied to the device. */
void cg_cuda_bases_fill(const cg_profile *profile, void *bases);
/* Of the largest task of n_tokens: floats of the rows and of the coefficients, and bytes of what it
 * leaves. */
void cg_cuda_projection_bound(const cg_profile *profile, uint32_t n_tokens, size_t *n_rows_out,
                              size_t *n_coefs_out, size_t *made_bytes_out);

/* ---- a task ---- */

typedef struct cg_cuda_projection {
    const int16_t *elements_dev; /* [components][row_stride], zeros behind the channels */
    const float *scale_dev;      /* [components]: what their elements are multiples of */
    float *rows_dev;             /* [CG_DCT][n_rows][row_stride], 16-byte aligned: used up */
    float *coefs_dev;            /* one frequency after another, [n_rows][n_components[f]] */
    int16_t *cells_dev;          /* the same of symbols */
    float *residues_dev;         /* one frequency after another, [n_components[f]] */
    float step;
    uint32_t n_rows, row_stride;
    uint32_t n_exact;
    uint32_t n_components[CG_DCT];
} cg_cuda_projection;

/* The task's, with the profile's bases at bases_dev. CG_ERR_INVALID_ARGUMENT: the profile has no
 * such basis, or the projection is more than max_rows and max_coefs floats. */
cg_status cg_cuda_projection_of(const cg_profile *profile, const cg_projection *projection,
                                const void *bases_dev, size_t max_rows, size_t max_coefs,
                                cg_cuda_projection *out);
/* Residues of all frequencies; and coefficients, or symbols. */
size_t cg_cuda_projection_n_columns(const cg_projection *projection);
size_t cg_cuda_projection_n_coefs(const cg_projection *projection);
/* What a task leaves lies together: the residues, and so many bytes on the symbols. */
static inline size_t cg_cuda_projection_cells_at(size_t n_columns)
{
    return cg_padded(n_columns * sizeof(float), 16);
}

/* Loads the kernels into the current device, which their first launch would do otherwise, and wait
 * for the engine's streams. A cudaError_t. */
int cg_cuda_project_prepare(void);

/* Enqueues the kernels on the stream; neither allocates nor waits. Returns a cudaError_t, 0 is
 * success. */
int cg_cuda_project(const cg_cuda_projection *projection, struct CUstream_st *stream);

#ifdef __cplusplus
}
#endif
#endif
