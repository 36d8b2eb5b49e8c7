/* codec/rans.h - order-0 rANS of integer matrices, 32 lanes a stream, over static frequency tables.
 *
 * rANS is an entropy coder: it codes an index of a frequency table in about as many bits as its
 * probability asks for. Order 0: a cell is coded without regard to its neighbours. A cell is one
 * integer of a matrix. A strip is up to 32 neighbouring columns. A stream codes some of the strips,
 * with 32 rANS decoders side by side, its lanes: lane i has the i-th column, and a state of its
 * own. A class is the frequency table of a column, in a run of rows; codec/FORMAT.md has the rest
 * of the words.
 *
 * Surprises: (1) rANS is a stack: the encoder walks a stream backwards, the decoder forwards. (2)
 * The lanes share one sequence of words, in the order of FORMAT.md's phases. (3) A strip's rows lie
 * row_stride cells apart, so that a matrix need not be contiguous.
 * Method: Duda, arXiv:1311.2540; interleaving: Giesen, arXiv:1402.3392. Bytes: codec/FORMAT.md,
 * "Matrix of symbols".
 * Threads: classes are read-only once made; streams of one matrix may be decoded by several
 * threads.
 */
#ifndef CG_CODEC_RANS_H
#define CG_CODEC_RANS_H
#include "codec/cursor.h"
#include "codec/status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    CG_RANS_LANES = 32,
    CG_RANS_TOTAL_BITS = 14, /* frequencies sum to 1 << 14 */
    CG_RANS_TOTAL = 1 << CG_RANS_TOTAL_BITS,
    CG_RANS_BUCKET_SHIFT =
        CG_RANS_TOTAL_BITS - 8, /* a bucket is 2^6 slots; a search begins at its first index */
    CG_RANS_MAX_SYMBOLS = 64,
    CG_RANS_MAX_SHIFT = 12,
    CG_RANS_MAX_STREAMS = 65535,
    CG_RANS_STREAM_BYTES =
        4 + 4 * CG_RANS_LANES,  /* table entry and lane states: what a stream costs */
    CG_RANS_STREAM_PERCENT = 2, /* of a matrix that streams may cost */
    CG_RANS_STREAM_ROWS = 4096, /* most rows of a stream, times the percentage: 2 % has 2,048 */
    CG_RANS_SHORT_STREAM_PERCENT = 8, /* the same where they are to be short */
    CG_RANS_PACKED = 1,               /* align: streams lie one behind the other */
    CG_RANS_ALIGNED = 16,    /* align: the matrix and each stream begin at multiples of 16 bytes */
    CG_RANS_CELL_BYTES = 8,  /* most that a cell adds to a stream: a word in each of four phases */
    CG_RANS_REFINE_STEP = 3, /* a refined cell is 3 times the coarse one, plus -1, 0 or 1 */
    CG_RANS_REFINE_CONTEXTS = 3, /* the coarse one is 0; it is 1 or -1; it is larger */
};

/* A frequency table and what its indices mean. */
typedef struct cg_rans_class {
    uint8_t shift; /* these four come first, in this order: kernels load them at once */
    uint8_t n_symbols;
    uint8_t escape_bits; /* 5: signed symbols; 8: exponents */
    uint8_t top;         /* exponents: the value of index 0 */
    uint16_t escape;     /* these two come next: the first slot of the escape */
    uint16_t freq[CG_RANS_MAX_SYMBOLS];
    uint16_t cum[CG_RANS_MAX_SYMBOLS + 1];
    int16_t value[CG_RANS_MAX_SYMBOLS]; /* of each index but the escape */
    uint8_t first[256]; /* of slot >> CG_RANS_BUCKET_SHIFT: where the search begins */
    uint16_t cost[CG_RANS_MAX_SYMBOLS];   /* 1/256 bits, for estimates; the escape's without its raw
                                             bits */
    uint32_t packed[CG_RANS_MAX_SYMBOLS]; /* freq | cum << 16, for gathers */
    /* The same of first[...]: freq | cum << 14 | index << 28, of which 15 stands for all from 15
     * on. */
    uint32_t bucket[256];
    /* Of refined cells: frequency of +0 | frequency of a step away from zero << 16. What is left is
     * the frequency of a step back towards zero. */
    uint32_t refine[CG_RANS_REFINE_CONTEXTS];
    uint16_t refine_cost[CG_RANS_REFINE_CONTEXTS][3]; /* 1/256 bits */
} cg_rans_class;

/* Up to 32 columns of a matrix. Cell (row, lane) is cells[row * row_stride + lane]. coarse: the
 * same cells at the next coarser level, where encoder and decoder both know them. Then a cell can
 * only be one of three numbers, and only which of them is coded. */
typedef struct cg_rans_strip {
    int16_t *cells;
    size_t row_stride;
    const uint8_t *lane_class; /* [n_lanes], indices into the classes */
    uint32_t n_lanes;
    const int16_t *coarse; /* NULL: none */
    size_t coarse_stride;
} cg_rans_strip;

/* Neighbouring rows whose cells have the same classes: those of a strip's lanes are at lane_class +
 * classes_at. 0: the columns' own. A matrix has at least one run. */
typedef struct cg_rans_run {
    size_t n_rows, classes_at;
} cg_rans_run;

/* Rows of all runs. */
static inline size_t cg_rans_n_rows(const cg_rans_run *runs, size_t n_runs)
{
    size_t n_rows = 0;
    for (size_t i = 0; i < n_runs; i++)
        n_rows += runs[i].n_rows;
    return n_rows;
}

/* Signed symbols: 0, +1, -1, +2 ...; n_symbols even. CG_ERR_CORRUPT: a count, shift or sum is
 * wrong. */
cg_status cg_rans_class_init_signed(cg_rans_class *cls, unsigned shift, unsigned n_symbols,
                                    const uint16_t *freq);
/* Exponents top, top - 1, ...; exponents lie in [0, 1 << exponent_bits). CG_ERR_CORRUPT as
 * above. */
cg_status cg_rans_class_init_exponents(cg_rans_class *cls, unsigned shift, unsigned top,
                                       unsigned n_symbols, const uint16_t *freq);

/* How a class's cells refine coarse ones: freq[context][0, away from zero]. CG_ERR_CORRUPT: one of
 * the three is below 1. */
cg_status cg_rans_class_init_refinement(cg_rans_class *cls,
                                        const uint16_t freq[CG_RANS_REFINE_CONTEXTS][2]);

/* freq_out[n_symbols]: integers of at least 1 that sum to 1 << 14, in proportion to
 * counts[n_symbols], which may be 0. */
void cg_rans_normalize(const uint32_t *counts, unsigned n_symbols, uint16_t *freq_out);

/* Bytes that encoding the strips needs at most, at any align. */
size_t cg_rans_bound_bytes(const cg_rans_strip *strips, size_t n_strips, size_t n_rows,
                           size_t n_streams);

/* Roughly the bits that the strips' cells take, without the lane states. */
uint64_t cg_rans_estimate_bits(const cg_rans_class *classes, const cg_rans_strip *strips,
                               size_t n_strips, const cg_rans_run *runs, size_t n_runs);

/* How many streams to cut a matrix into, by its estimate. Threads and warps decode streams side by
 * side, but each costs CG_RANS_STREAM_BYTES. So it is as many as add at most so many percent, and
 * at least one. Matrices with few bits a row would have the longest streams, and a GPU waits for
 * the longest: so where one has more than CG_RANS_STREAM_ROWS / percent rows, there are more, as
 * long as they add at most twice as much. */
size_t cg_rans_choose_streams(uint64_t estimated_bits, size_t n_strips, size_t n_rows,
                              unsigned percent);

/* Writes the matrix, stream table and streams, to dst. align: CG_RANS_PACKED; or CG_RANS_ALIGNED,
 * with zeros behind the table and each stream. n_streams is at most n_strips, and 0 only without
 * strips. scratch_words: cg_rans_bound_bytes(). A cell must lie in [-32768, 32767]; an exponent in
 * its range; a refined cell at most 1 from 3 times its coarse one. Returns the bytes written, 0
 * when dst_bytes is below cg_rans_bound_bytes(). */
size_t cg_rans_encode(const cg_rans_class *classes, const cg_rans_strip *strips, size_t n_strips,
                      const cg_rans_run *runs, size_t n_runs, size_t n_streams, size_t align,
                      uint8_t *dst, size_t dst_bytes, uint8_t *scratch_words);

/* The streams of a matrix, one after another. */
typedef struct cg_rans_streams {
    cg_cursor in; /* behind the streams so far */
    const uint8_t *start, *table;
    size_t align;
    uint32_t n_streams, n_read;
} cg_rans_streams;

/* Reads the table of a matrix of n_strips strips at the start of in. CG_ERR_TRUNCATED;
 * CG_ERR_CORRUPT: counts are wrong, or padding is not zero. */
cg_status cg_rans_streams_open(cg_cursor in, size_t n_strips, size_t align,
                               cg_rans_streams *streams_out);
/* The next of the n_streams, its lane states and words. To be called n_streams times at most.
 * *stream_out points into what was opened. It fails as cg_rans_streams_open() does. */
cg_status cg_rans_streams_next(cg_rans_streams *streams, const uint8_t **stream_out,
                               size_t *stream_bytes_out);

/* Decodes a matrix from the start of src into the strips' cells. *used_bytes_out: where it ends.
 * align: as it was written, from src's start on. Never reads outside src, whatever its bytes are.
 * Allocates nothing. lane_class is believed, in every run: the caller checks that it is below the
 * number of classes. CG_ERR_TRUNCATED: src ends early. CG_ERR_CORRUPT: counts are wrong, words
 * are left over, padding is not zero, a lane does not end in its start state, or a symbol is out of
 * range. After an error the cells are garbage. */
cg_status cg_rans_decode(const cg_rans_class *classes, const cg_rans_strip *strips, size_t n_strips,
                         const cg_rans_run *runs, size_t n_runs, size_t align, const uint8_t *src,
                         size_t src_bytes, size_t *used_bytes_out);

#ifdef __cplusplus
}
#endif
#endif
