/* codec/symbols.h - the matrix of symbols of a section: laid out in memory, coded and decoded.
 *
 * Columns are what a level of the profile holds of a layer group's matrix: components by frequency,
 * or channels. Rows are blocks of tokens, or tokens. Bytes: codec/FORMAT.md, "Matrix of
 * symbols". Threads: pure functions on the caller's memory.
 */
#ifndef CG_CODEC_SYMBOLS_H
#define CG_CODEC_SYMBOLS_H
#include "codec/cursor.h"
#include "codec/profile_data.h"

#ifdef __cplusplus
extern "C" {
#endif

/* For each frequency f, [n_rows][n_active[f]] cells, one frequency after another. */
typedef struct cg_symbols {
    const cg_level_columns *columns;
    size_t n_rows;
    int16_t *cells[CG_DCT];
    cg_rans_strip *strips; /* [n_strips] */
    size_t n_strips;
} cg_symbols;

/* A section's bytes, or a part of them. */
typedef struct cg_coded {
    const uint8_t *bytes;
    size_t n_bytes;
} cg_coded;

size_t cg_symbols_bytes(const cg_level_columns *columns, size_t n_rows);
/* Lays a matrix out in memory[cg_symbols_bytes()], 64-byte aligned. coarse: the matrix of the next
 * coarser level, which is known when this one is coded; it must stay. NULL: this one is coded
 * alone. */
cg_symbols cg_symbols_lay(const cg_level_columns *columns, const cg_symbols *coarse, size_t n_rows,
                          void *memory);

/* Decodes a matrix from the start of *in, and moves *in behind it. CG_ERR_TRUNCATED,
 * CG_ERR_CORRUPT. */
cg_status cg_symbols_take(const cg_profile *profile, const cg_symbols *symbols, cg_cursor *in);
/* Decodes a matrix that takes all of src. Errors as above; CG_ERR_CORRUPT: bytes are left over. */
cg_status cg_symbols_decode(const cg_profile *profile, const cg_symbols *symbols, cg_coded src);

/* Codes a matrix behind a copy of head (which may be empty): malloc'ed, the caller's. NULL: no
 * memory. */
uint8_t *cg_symbols_code(const cg_profile *profile, const cg_symbols *symbols, cg_coded head,
                         size_t *n_bytes_out);

/* Of a quantizer's cells: how many are at the ends of what it gives, and may have been beyond. */
uint64_t cg_symbols_n_saturated(const int16_t *cells, size_t n_cells);

/* The symbols of a coarser level: each times ratio, to nearest, ties away from zero. */
void cg_symbols_coarsen(const cg_symbols *fine, float ratio, const cg_symbols *coarse);
/* Decodes src (all of it), a matrix of n_rows rows of the columns fine, and codes its coarsened
 * symbols behind a copy of head. *bytes_out is malloc'ed, the caller's. Errors of
 * cg_symbols_decode(), CG_ERR_NO_MEMORY. */
cg_status cg_symbols_transcode(const cg_profile *profile, const cg_level_columns *fine,
                               const cg_level_columns *coarse, size_t n_rows, float ratio,
                               cg_coded head, cg_coded src, uint8_t **bytes_out,
                               size_t *n_bytes_out);

#ifdef __cplusplus
}
#endif
#endif
