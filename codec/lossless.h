/* codec/lossless.h - elements bit for bit: exponents through rANS, signs and mantissas as they are.
 *
 * The exponents of a KV cache's channel take few values, so they are coded. Sign and mantissa are
 * noise, so they are stored as they are: those of fp8 in the same streams, the others behind them.
 * The tables are part of the payload, so a lossless chunk needs no profile. Bytes: codec/FORMAT.md,
 * "Lossless payload". Elements are a matrix [n_rows][n_columns] of the dtype. align:
 * CG_RANS_ALIGNED in a chunk of version 3, else CG_RANS_PACKED. scratch:
 * cg_lossless_..._scratch_bytes() bytes, 64-byte aligned. Threads: pure functions on the caller's
 * memory.
 */
#ifndef CG_CODEC_LOSSLESS_H
#define CG_CODEC_LOSSLESS_H
#include "codec/geometry.h"
#include "codec/rans.h"

#ifdef __cplusplus
extern "C" {
#endif

/* About 10 bytes an element for encoding, whose streams are made there; 2 for decoding. */
size_t cg_lossless_encode_scratch_bytes(size_t n_columns, size_t n_rows);
size_t cg_lossless_decode_scratch_bytes(size_t n_columns, size_t n_rows);
/* The most bytes that encoding can take. */
size_t cg_lossless_bound_bytes(unsigned dtype, size_t n_columns, size_t n_rows);
/* The fewest: a payload of fewer bytes is not whole. It is at least a third of the elements' bytes.
 */
size_t cg_lossless_least_bytes(unsigned dtype, size_t n_columns, size_t n_rows);
/* Returns the bytes written to dst[dst_bytes], 0 when that is below the bound. */
size_t cg_lossless_encode(unsigned dtype, const void *elements, size_t n_columns, size_t n_rows,
                          size_t align, void *scratch, uint8_t *dst, size_t dst_bytes);
/* Decodes a payload, all of src, to elements_out, and reads nothing outside src. CG_ERR_TRUNCATED,
 * CG_ERR_CORRUPT (also where bytes are left over): elements_out is garbage. */
cg_status cg_lossless_decode(unsigned dtype, const uint8_t *src, size_t src_bytes, size_t n_columns,
                             size_t n_rows, size_t align, void *scratch, void *elements_out);

enum { CG_LOSSLESS_MAX_CLASSES = 16 };

/* What stands in front of a payload's matrix of exponents. */
typedef struct cg_lossless_head {
    unsigned n_classes;
    const uint8_t *column_class; /* [n_columns], in the payload; NULL: all of class 0 */
    cg_cursor matrix;            /* from the matrix on */
} cg_lossless_head;

/* Reads a payload's head, and its classes to classes[n_classes]. Nothing is decoded. Errors of
 * cg_lossless_decode(). */
cg_status cg_lossless_read_head(unsigned dtype, const uint8_t *src, size_t src_bytes,
                                size_t n_columns, size_t n_rows, size_t align,
                                cg_rans_class classes[CG_LOSSLESS_MAX_CLASSES],
                                cg_lossless_head *head_out);

#ifdef __cplusplus
}
#endif
#endif
