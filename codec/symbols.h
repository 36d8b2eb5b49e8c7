/* codec/symbols.h - the matrix of symbols of a section: laid out in memory, coded and decoded.
 *
 * With preset klt, columns are the components that a level of the profile holds, frequency by
 * frequency, and rows are blocks of 8 tokens. With preset paper, columns are channels and rows are
 * tokens. A cell is one symbol. Bytes: codec/FORMAT.md, "Matrix of symbols". Threads: pure
 * functions on the caller's memory.
 */
#ifndef CG_CODEC_SYMBOLS_H
#define CG_CODEC_SYMBOLS_H
#include "codec/cursor.h"
#include "codec/profile_data.h"

#ifdef __cplusplus
extern "C" {
#endif

/* cells[f]: [n_rows][columns->n_active[f]] of frequency f. All lie in the caller's memory, as the
 * strips do, and the runs of rows. */
typedef struct cg_symbols {
    const cg_level_columns *columns;
    size_t n_rows;
    const cg_rans_run *runs; /* [n_runs], of n_rows rows in all */
    size_t n_runs;
    int16_t *cells[CG_DCT];
    cg_rans_strip *strips; /* [n_strips] */
    size_t n_strips;
} cg_symbols;

/* Memory that a matrix takes, cells and strips. */
size_t cg_symbols_bytes(const cg_level_columns *columns, size_t n_rows);
/* Lays a matrix of the rows of runs[n_runs] out in memory[cg_symbols_bytes()], 64-byte aligned; its
 * cells are not written. The runs must stay where they are. coarse: the matrix of the next coarser
 * level. Then this one is coded given that one's cells, which must stay where they are. NULL: this
 * one is coded alone. */
cg_symbols cg_symbols_lay(const cg_level_columns *columns, const cg_symbols *coarse,
                          const cg_rans_run *runs, size_t n_runs, void *memory);

/* Decodes a matrix from the start of *in, and moves *in behind it. CG_ERR_TRUNCATED,
 * CG_ERR_CORRUPT. */
cg_status cg_symbols_take(const cg_profile *profile, const cg_symbols *symbols, cg_cursor *in);
/* Decodes a matrix that takes all of src. Errors as above; CG_ERR_CORRUPT: bytes are left over. */
cg_status cg_symbols_decode(const cg_profile *profile, const cg_symbols *symbols, cg_coded src);

/* Codes a matrix behind a copy of head, which may be empty. Returns *n_bytes_out bytes, malloc'ed,
 * the caller's. NULL: no memory. stream_percent: of cg_rans_choose_streams(). */
uint8_t *cg_symbols_code(const cg_profile *profile, const cg_symbols *symbols, cg_coded head,
                         unsigned stream_percent, size_t *n_bytes_out);

/* Whether src, all of it, decodes to the matrix's symbols. False without memory, too. coarse: as in
 * cg_symbols_lay(). */
bool cg_symbols_are_coded_as(const cg_profile *profile, const cg_symbols *symbols,
                             const cg_symbols *coarse, cg_coded src);

/* How many of a quantizer's cells are at the ends of its range, -32767 or 32767, and may have been
 * beyond. */
uint64_t cg_symbols_n_saturated(const int16_t *cells, size_t n_cells);

/* Makes the symbols of a coarser level: each fine one times ratio, to nearest, ties away from zero.
 * Columns that fine lacks become 0. */
void cg_symbols_coarsen(const cg_symbols *fine, float ratio, const cg_symbols *coarse);
/* Decodes src, all of it: a matrix of the rows of runs[n_runs] and the columns fine. Codes its
 * symbols, coarsened by ratio, as one of the columns coarse behind a copy of head. *bytes_out is
 * malloc'ed, the caller's. Errors of cg_symbols_decode(), CG_ERR_NO_MEMORY. */
cg_status cg_symbols_transcode(const cg_profile *profile, const cg_level_columns *fine,
                               const cg_level_columns *coarse, const cg_rans_run *runs,
                               size_t n_runs, float ratio, cg_coded head, cg_coded src,
                               uint8_t **bytes_out, size_t *n_bytes_out);

#ifdef __cplusplus
}
#endif
#endif
