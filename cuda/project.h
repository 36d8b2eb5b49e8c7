/* cuda/project.h - an encoder's projections on a GPU: K and V to symbols (codec/projection.h).
 *
 * Five kernels run one after another. The first makes the rows, spectra of K and V; of the joint
 * matrix they are there already. The second makes the coefficients of a basis's first n_exact
 * components. The third takes off the rows what these components make of them. The fourth makes the
 * coefficients of the other components. The fifth makes symbols, and lays out the coefficients that
 * the encoder wants as they are. Sums are of f32, and their order does not depend on how busy a GPU
 * is.
 *
 * Threads: functions are pure on the caller's memory.
 */
#ifndef CG_CUDA_PROJECT_H
#define CG_CUDA_PROJECT_H
#include "codec/projection.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st; /* cudaStream_t is a pointer to it */

enum {
    CG_CUDA_PROJECT_ROWS = 32, /* rows and columns of sums that a thread block makes */
    CG_CUDA_PROJECT_COLUMNS = 64,
    CG_CUDA_PROJECT_DEPTH = 32,    /* terms of a sum that are in shared memory at once */
    CG_CUDA_QUANTIZE_ROWS = 8,     /* whose symbols a thread makes side by side */
    CG_CUDA_PROJECT_THREADS = 128, /* also the columns of which a thread block makes symbols */
};

/* ---- the bases of a profile from version 2 on, as kernels read them; preset klt ---- */

/* How many bytes all bases take on the GPU: 16 bits an element, so twice as much as a profile that
 * has bytes; and behind them what spectra are made with. */
size_t cg_cuda_bases_bytes(const cg_profile *profile);
/* Writes the bases to cg_cuda_bases_bytes() of host memory, to be copied to the device. */
void cg_cuda_bases_fill(const cg_profile *profile, void *bases);
/* What the largest task of a chunk takes. */
typedef struct cg_cuda_projection_most {
    size_t n_rows, n_coefs; /* floats */
    size_t made_bytes;      /* results */
    size_t elements_bytes;
    size_t given_rows; /* floats of the rows that the encoder writes; 0 without a joint matrix */
    size_t n_places;   /* rows of a frequency that spectra are made of: blocks of the chunk */
} cg_cuda_projection_most;
cg_cuda_projection_most cg_cuda_projection_bound(const cg_profile *profile, uint32_t dtype,
                                                 uint32_t n_tokens);

/* ---- a task ---- */

/* Which tokens a row is made of. */
typedef struct cg_cuda_place {
    uint32_t block; /* of 8 tokens */
    float factor;   /* 1 over its step factor */
} cg_cuda_place;

typedef struct cg_cuda_spectra {
    const void *elements_dev; /* [n_slices][n_tokens][n_kv_heads][head_dim]; NULL: rows are there */
    const cg_cuda_place *places_dev;     /* [n_rows] */
    const float *mean_dev, *weight_dev;  /* [layers of the model][2][n_kv_heads][head_dim] */
    const double *inv_freq_dev;          /* [ropes][half] */
    const uint8_t *layer_rope_dev;       /* [layers of the model] */
    uint32_t n_slices, n_layers;         /* of the task; a slice is a plane of a layer */
    uint32_t first_layer, first_plane;   /* of the model: slices go layer by layer, then plane */
    uint32_t n_kv_heads, head_dim, half; /* half: rotary_dim / 2 */
    uint32_t n_tokens, n_sinks, first_position, dtype;
} cg_cuda_spectra;

typedef struct cg_cuda_projection {
    cg_cuda_spectra spectra;
    const int16_t *elements_dev; /* [components][row_stride], zeros behind the channels */
    const float *scale_dev;      /* [components]: what their elements are multiplied by */
    float *rows_dev; /* [CG_DCT][n_rows][row_stride], 16-byte aligned; the kernels overwrite them */
    float *coefs_dev; /* one frequency after another, [n_rows][n_components[f]] */
    /* One frequency after another, as cg_projected has them. */
    int16_t *cells_dev;
    float *residues_dev;
    float *given_dev;
    float step;
    uint32_t n_rows, row_stride;
    uint32_t n_exact, n_shared;
    uint32_t n_components[CG_DCT], n_given[CG_DCT];
} cg_cuda_projection;

/* Fills *out for a task, with the profile's bases at bases_dev. The caller adds the pointers to
 * what kernels write, and with elements those to these and to their places. Kernels believe it, so
 * the projection is checked. CG_ERR_INVALID_ARGUMENT: the profile has no such basis, components or
 * shared ones; there are elements of the joint matrix, or they are not as many as rows; or it is
 * more than *most. */
cg_status cg_cuda_projection_of(const cg_profile *profile, const cg_projection *projection,
                                const void *bases_dev, const cg_cuda_projection_most *most,
                                cg_cuda_projection *out);
/* Of a task's elements, 0 of the joint matrix. */
size_t cg_cuda_projection_elements_bytes(const cg_profile *profile,
                                         const cg_projection *projection);
/* places_out[n_rows]: where a task's rows come from. */
void cg_cuda_projection_places(const cg_projection *projection, cg_cuda_place *places_out);
size_t cg_cuda_projection_n_coefs(const cg_projection *projection); /* of all frequencies */
/* A task's results lie together: residues, given coefficients, symbols. Where, in bytes from their
 * start: */
typedef struct cg_cuda_made {
    size_t given_at; /* behind the residues; this and cells_at are multiples of 16 */
    size_t cells_at, n_bytes;
    size_t n_residues, n_given, n_cells; /* of all frequencies */
} cg_cuda_made;
cg_cuda_made cg_cuda_projection_made(const cg_projection *projection);

/* Loads the kernels into the thread's current device. Otherwise their first launch would do it, and
 * wait for the engine's streams. Returns a cudaError_t, 0 is success. */
int cg_cuda_project_prepare(void);

/* Enqueues the kernels on the stream; neither allocates nor waits. Returns a cudaError_t, 0 is
 * success. */
int cg_cuda_project(const cg_cuda_projection *projection, struct CUstream_st *stream);

#ifdef __cplusplus
}
#endif
#endif
