/* codec/projection.h - who multiplies in an encoder's place: a GPU beside the CPU.
 *
 * Most of an encoder's time goes into the projections of spectra on the KLT's basis (codec/klt.h).
 * A projector makes them elsewhere: the encoder lays a task's spectra out in its memory, and gets
 * the symbols of one level back. They need not be the CPU's, since an encoder is free to choose
 * symbols. With a joint matrix it gets coefficients, too: of the components that the group shares.
 * Those of all groups are the rows of one more projection, on the joint matrix.
 * What is wrong must not be stored, though: projecting is linear, so of each projection the encoder
 * makes that of a sum of all rows itself, each with a sign. Symbols tell such a sum only to within
 * a step a row, so a projector also tells what its symbols have left of it. Where the two do not
 * agree, or project() fails, all is made on the CPU.
 * Threads: a projector is used by one task at a time.
 */
#ifndef CG_CODEC_PROJECTION_H
#define CG_CODEC_PROJECTION_H
#include "codec/codec.h"
#include "codec/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One task's: rows of frequency f are multiplied by the first n_components[f] components of a basis
 * of the profile. A row is the spectrum of a block of tokens; for the joint matrix it is the shared
 * coefficients of all groups. */
typedef struct cg_projection {
    uint32_t basis;      /* of layer group and matrix, in the order of the encoder's tasks; behind
                            them the joint one */
    uint32_t n_rows;     /* of a frequency */
    uint32_t row_stride; /* elements: the basis's channels in whole 32s, behind them zeros */
    uint32_t n_components[CG_DCT];
    uint32_t n_shared;        /* the first components, of which no symbols are made; 0 without */
    uint32_t n_given[CG_DCT]; /* of those, the first ones, whose coefficients are wanted: at most
                                 n_shared and n_components[f] */
    float step;               /* of the quantizer */
} cg_projection;

/* Components of frequency f that become symbols: those behind the shared ones. */
static inline uint32_t cg_projection_n_cells(const cg_projection *projection, uint32_t f)
{
    const uint32_t n = projection->n_components[f], n_shared = projection->n_shared;
    return n > n_shared ? n - n_shared : 0;
}

/* What frequency f's rows became; n_cells is cg_projection_n_cells(). A coefficient is the sum over
 * the channels, after what the basis's first n_exact components (codec/bands.h) make of the row was
 * taken off, for the others. */
typedef struct cg_projected {
    const int16_t *cells[CG_DCT];  /* [n_rows][n_cells]: cg_lane_quantize(coefficient * (1 / step))
                                      (codec/exact_lane.h) */
    const float *residues[CG_DCT]; /* [n_cells]: sums over the rows of coefficient - symbol * step,
                                      each with cg_lane_row_sign() */
    const float *given[CG_DCT];    /* [n_rows][n_given[f]]: coefficients */
} cg_projected;

typedef struct cg_projector cg_projector;
struct cg_projector {
    float *rows; /* memory for [CG_DCT][n_rows][row_stride], 64-byte aligned; the encoder's */
    size_t rows_bytes;
    uint32_t n_failed; /* projections that the CPU made because project() failed or was wrong */
    /* *made_out points to what stays until the next call; the rows stay as they are. Any error:
     * there is nothing. */
    cg_status (*project)(cg_projector *projector, const cg_projection *projection,
                         cg_projected *made_out);
};

/* cg_encoder_run() with symbols made by the projector where it can: of preset klt, with a profile
 * of version 2 or 3, and of one lossy level or nested ones, whose finest tells the others. The task
 * that ends last has it project on the joint matrix, too. NULL: by the CPU. A projector's failures
 * are no error. */
cg_status cg_encoder_run_with(cg_encoder *encoder, uint32_t task_index, void *scratch,
                              size_t scratch_bytes, const void *in, cg_projector *projector);

/* Channels of a row in whole 32s. */
static inline uint32_t cg_projection_stride(uint32_t n_channels)
{
    return (n_channels + 31) / 32 * 32;
}

#ifdef __cplusplus
}
#endif
#endif
