/* codec/rans_kernels.h - the inner loops of rans.c, one table of them per instruction set.
 *
 * rans_kernels.c is compiled once per instruction set (CMakeLists.txt). All tables decode a stream
 * to the same cells and encode cells to the same bytes. Where a stream is damaged they may refuse
 * it for different reasons.
 * Threads: pure functions on the caller's memory.
 */
#ifndef CG_CODEC_RANS_KERNELS_H
#define CG_CODEC_RANS_KERNELS_H
#include "codec/rans.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Stream s of the matrix codes the strips s, s + n_streams, s + 2 n_streams ... */
typedef struct cg_rans_matrix {
    const cg_rans_class *classes;
    const cg_rans_strip *strips;
    size_t n_strips;
    const cg_rans_run *runs;
    size_t n_runs, n_streams;
} cg_rans_matrix;

/* A strip's part that is a run, or some of its rows: from a row of the strip on. */
static inline cg_rans_strip cg_rans_part(const cg_rans_strip *strip, size_t first_row,
                                         const cg_rans_run *run)
{
    cg_rans_strip part = *strip;
    part.cells += first_row * part.row_stride;
    if (part.coarse != NULL)
        part.coarse += first_row * part.coarse_stride;
    part.lane_class += run->classes_at;
    return part;
}

typedef struct cg_rans_kernels {
    /* Decodes one stream, src[src_bytes] with its lane states, into the cells of its strips. Errors
     * of cg_rans_decode(). */
    cg_status (*decode_stream)(const cg_rans_matrix *matrix, size_t stream, const uint8_t *src,
                               size_t src_bytes);
    /* Encodes one stream. Writes its words downwards from words_end, and returns where they begin;
     * states_out is what a decoder's lanes begin with. In front of words_end there must be room as
     * cg_rans_bound_bytes() says. */
    uint8_t *(*encode_stream)(const cg_rans_matrix *matrix, size_t stream, uint8_t *words_end,
                              uint32_t states_out[CG_RANS_LANES]);
    /* Roughly the 1/256 bits that a strip's cells take. */
    uint64_t (*estimate_strip)(const cg_rans_class *classes, const cg_rans_strip *strip,
                               size_t n_rows);
} cg_rans_kernels;

extern const cg_rans_kernels cg_rans_kernels_baseline;
#if defined(__x86_64__)
extern const cg_rans_kernels cg_rans_kernels_avx2, cg_rans_kernels_avx512, cg_rans_kernels_vnni,
    cg_rans_kernels_amx;
#endif

#ifdef __cplusplus
}
#endif
#endif
