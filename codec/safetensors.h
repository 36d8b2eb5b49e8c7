/* codec/safetensors.h - reading and writing safetensors files, as far as cgtool needs them.
 *
 * A file is u64 header_bytes, a JSON object {"name": {"dtype", "shape", "data_offsets": [begin,
 * end]}, ...}, and the tensors' bytes. The reader takes bytes that it does not trust and checks,
 * like the reference implementation (github.com/huggingface/safetensors): every range lies in the
 * file, agrees with dtype and shape, and the ranges cover the data without overlap or hole.
 * Sub-byte dtypes are refused.
 * Threads: an opened file is read-only; any number of threads may share it.
 */
#ifndef CG_CODEC_SAFETENSORS_H
#define CG_CODEC_SAFETENSORS_H
#include "codec/status.h"
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { CG_SAFETENSORS_MAX_RANK = 8, CG_SAFETENSORS_MAX_HEADER_BYTES = 100 << 20 };

typedef struct cg_safetensor {
    char name[64]; /* longer names are cut: such tensors can be walked, not found */
    char dtype[8]; /* "BF16", "F16", "F32", "I32", "U32", "I64" ... */
    uint32_t rank;
    uint64_t shape[CG_SAFETENSORS_MAX_RANK];
    const uint8_t
        *data; /* in the caller's bytes when read, the caller's when written; any alignment */
    uint64_t data_bytes;
} cg_safetensor;

typedef struct cg_safetensors cg_safetensors;

/* Parses bytes[n_bytes], a whole file, which must outlive *tensors_out. The caller frees it with
 * cg_safetensors_free(). what_out: NULL, or receives a string (static storage) that says what is
 * wrong.
 * CG_ERR_TRUNCATED, CG_ERR_CORRUPT, CG_ERR_UNSUPPORTED (a dtype or rank), CG_ERR_NO_MEMORY. */
cg_status cg_safetensors_open(const uint8_t *bytes, size_t n_bytes, cg_safetensors **tensors_out,
                              const char **what_out);
void cg_safetensors_free(cg_safetensors *tensors); /* NULL is fine */

size_t cg_safetensors_count(const cg_safetensors *tensors);
const cg_safetensor *cg_safetensors_at(const cg_safetensors *tensors,
                                       size_t tensor_index); /* in file order */
const cg_safetensor *cg_safetensors_find(const cg_safetensors *tensors,
                                         const char *name); /* NULL: none */

/* A text of the file's "__metadata__", the tensors' own; NULL: there is none of that name. */
const char *cg_safetensors_metadata(const cg_safetensors *tensors, const char *name);

/* Bytes of one element of a dtype by its name; 0 for an unknown one. */
size_t cg_safetensors_dtype_bytes(const char *dtype);

/* A text of "__metadata__". */
typedef struct cg_safetensors_text {
    const char *name, *text;
} cg_safetensors_text;

/* The bytes in front of the data of a file that holds these tensors in this order (length and JSON,
 * padded so that the data is 8-byte aligned), malloc'ed: the caller frees them with free(). data of
 * the tensors is not used. metadata[n_metadata]: NULL is fine where there is none.
 * CG_ERR_INVALID_ARGUMENT: data_bytes does not agree with dtype and shape. CG_ERR_NO_MEMORY. */
cg_status cg_safetensors_header(const cg_safetensor *tensors, size_t n_tensors,
                                const cg_safetensors_text *metadata, size_t n_metadata,
                                uint8_t **bytes_out, size_t *n_bytes_out);

#ifdef __cplusplus
}
#endif
#endif
