/* codec/rans_strips.h - codes one strip of a stream, for rans_kernels.c: a table per instruction
 * set.
 *
 * A strip's functions take over the lane states and the words where the strip before has left them,
 * and leave them for the next.
 * Threads: pure functions on the caller's memory.
 */
#ifndef CG_CODEC_RANS_STRIPS_H
#define CG_CODEC_RANS_STRIPS_H
#include "codec/rans_lane.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The words of a stream that are yet to come. */
typedef struct cg_word_reader {
    const uint8_t *at, *end;
    bool ended; /* a word was missing: the states are garbage from there on */
} cg_word_reader;

/* Decodes all rows of a strip to its cells. Where words are missing it goes on with garbage and
 * sets words->ended, which the caller must look at. CG_ERR_CORRUPT: a symbol is out of range. */
typedef cg_status cg_rans_decode_strip(const cg_rans_class *classes, const cg_rans_strip *strip,
                                       size_t n_rows, uint32_t states[CG_RANS_LANES],
                                       cg_word_reader *words);
/* Encodes all rows of a strip, the last one first. *at: where the words written so far begin; it
 * moves down. */
typedef void cg_rans_encode_strip(const cg_rans_class *classes, const cg_rans_strip *strip,
                                  size_t n_rows, uint32_t states[CG_RANS_LANES], uint8_t **at);
/* Roughly the 1/256 bits that a strip's cells take. */
typedef uint64_t cg_rans_estimate_strip(const cg_rans_class *classes, const cg_rans_strip *strip,
                                        size_t n_rows);

/* refined: of a strip whose coarse cells are known. */
typedef struct cg_rans_strips {
    cg_rans_decode_strip *decode, *decode_refined;
    cg_rans_encode_strip *encode, *encode_refined;
    cg_rans_estimate_strip *estimate, *estimate_refined;
} cg_rans_strips;

#if defined(CG_RANS_STRIPS) /* one of a table's files is being compiled */
extern const cg_rans_strips CG_RANS_STRIPS;
#endif

#ifdef __cplusplus
}
#endif
#endif
