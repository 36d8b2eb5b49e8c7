/* codec/projection.h - what multiplies and codes in the CPU's place when chunks are encoded: a GPU.
 *
 * Most of an encoder's time goes into spectra (K rotated back, centred, weighted, and the DCT of
 * each block) and their projections on the components of the KLT's basis (codec/klt.h). A projector
 * makes both elsewhere. The encoder hands it a task's K and V as the engine holds them, and gets
 * the symbols of one level back. They need not be those that the CPU would make, since an encoder
 * is free to choose symbols. With a joint matrix it also gets coefficients, of the components that
 * the layer group shares. Those of all groups are the rows of one more projection, on the joint
 * matrix.
 *
 * Wrong symbols must not be stored, though, so the encoder checks each projection. All of it is
 * linear: the encoder adds up the blocks, each with a sign, makes the spectrum of that one sum,
 * projects it on the CPU, and compares. Symbols tell such a sum only to within a step for each row.
 * So a projector also returns the residues, which are what its symbols have left over. Where the
 * two do not agree, or project() fails, the CPU makes all of it.
 *
 * A projector may also code the symbols: those of one level, from which it makes coarser ones, to
 * the bytes of their sections. To check those the CPU would have to decode them, which costs as
 * much as to code them. So it decodes one section of CG_CODED_SAMPLE, and compares. In the others a
 * mistake of a stream is found by who decodes it, as damage: a lane does not end in its start state
 * (codec/FORMAT.md).
 *
 * Threads: a projector is used by one task at a time.
 */
#ifndef CG_CODEC_PROJECTION_H
#define CG_CODEC_PROJECTION_H
#include "codec/block_order.h"
#include "codec/codec.h"
#include "codec/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CG_CODED_SAMPLE = 16 }; /* not a multiple of 3: sections of every level have their turn */

/* What to project, of one task: rows of frequency f on the first n_components[f] components of a
 * basis of the profile. A row is one frequency of a block of tokens, over all channels; for the
 * joint matrix it is the shared coefficients of all groups. */
typedef struct cg_projection {
    uint32_t basis;      /* of layer group and matrix, in the order of the encoder's tasks; behind
                            them the joint one */
    uint32_t n_rows;     /* of each frequency */
    uint32_t row_stride; /* elements: the basis's channels in whole 32s, behind them zeros */
    uint32_t n_components[CG_DCT];
    uint32_t n_shared;        /* the first components, of which no symbols are made; 0 without */
    uint32_t n_given[CG_DCT]; /* of those, the first ones, whose coefficients are wanted: at most
                                 n_shared and n_components[f] */
    float step;               /* of the quantizer */
    /* The levels whose symbols may be coded, too: bit n is level n. 0: none. The finest is the one
     * that symbols are made of; the others follow it without a gap. A level is coded given the next
     * coarser one, the coarsest alone. */
    uint32_t level_mask;
    uint32_t stream_percent; /* of cg_rans_choose_streams() */
    /* What the rows are made of: elements of the task, in the canonical layout of codec/codec.h, in
     * any memory of the host. Tokens of the profile's sinks are not coded; they, and what is past
     * the end of the last block, stand for the mean of the others of their block. NULL: the rows
     * are in the projector's memory, as those of the joint matrix always are. */
    const void *elements;
    uint32_t dtype, n_tokens, first_position;
    const cg_block_order *order; /* row r is of block order->block[r], over its factor */
} cg_projection;

/* Components of frequency f that become symbols: those behind the shared ones. */
static inline uint32_t cg_projection_n_cells(const cg_projection *projection, uint32_t f)
{
    const uint32_t n = projection->n_components[f], n_shared = projection->n_shared;
    return n > n_shared ? n - n_shared : 0;
}

/* What frequency f's rows became; n_cells is cg_projection_n_cells(). A coefficient is the sum over
 * the channels of row times element. The basis's first n_exact components (codec/bands.h) are
 * stored finely. What the others have picked up of those is taken off their coefficients
 * (codec/analysis.h). */
typedef struct cg_projected {
    const int16_t *cells[CG_DCT];  /* [n_rows][n_cells]: cg_lane_quantize(coefficient * (1 / step))
                                      (codec/exact_lane.h) */
    const float *residues[CG_DCT]; /* [n_cells]: sums over the rows of coefficient - symbol * step,
                                      each with cg_lane_row_sign() */
    const float *given[CG_DCT];    /* [n_rows][n_given[f]]: coefficients */
    /* By level of the mask: what cg_symbols_code() makes of its symbols without a head. None, also
     * of a few levels only: the CPU codes them. */
    cg_coded coded[CG_N_LEVELS];
} cg_projected;

typedef struct cg_projector cg_projector;
struct cg_projector {
    /* The projector's memory, 64-byte aligned, for the encoder to write: the joint matrix's rows,
     * f32 [CG_DCT][n_rows][row_stride]. Who has a task's elements to copy anyway may put them here:
     * from here they need not be copied once more. The task that ends last then has those rows in
     * their place, so if it fails, it cannot run again on them. */
    void *memory;
    size_t memory_bytes; /* enough for a task's elements, and for those rows */
    uint32_t n_tokens;   /* of a chunk, at most; that of a larger one is the CPU's */
    uint32_t n_failed;   /* projections, and codings, that the CPU made because project() failed or
                            was wrong */
    uint32_t n_coded;    /* sections that it has coded */
    bool miscodes;       /* one of them was wrong: it is not asked for more */
    /* Waits until all is made. What *made_out points to stays until the next call; elements and
     * memory stay as they are. On any error *made_out is not to be read. */
    cg_status (*project)(cg_projector *projector, const cg_projection *projection,
                         cg_projected *made_out);
};

/* cg_encoder_run(), but the projector makes the symbols where it can: with preset klt and a profile
 * from version 2 on, of one lossy level, or of nested levels, whose finest one tells the others.
 * The task that ends last has it project on the joint matrix, too. NULL: the CPU makes them. A
 * projector's failures are no error. */
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
