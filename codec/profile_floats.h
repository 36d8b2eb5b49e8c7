/* codec/profile_floats.h - reading a profile of version 1: its bases.
 *
 * Bytes: codec/FORMAT.md, "Basis in floats".
 *
 * Threads: as codec/profile_columns.h.
 */
#ifndef CG_CODEC_PROFILE_FLOATS_H
#define CG_CODEC_PROFILE_FLOATS_H
#include "codec/profile_data.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Reads a basis, whose sizes are known, and lays it out. */
cg_status cg_profile_read_floats(cg_cursor *in, const cg_profile *p, cg_group *group,
                                 unsigned plane);
/* Keeps the bytes of all bases for encoders (analysis.c): what is laid out for decoding differs
 * from CPU to CPU, and has no scales. (Of later versions it can be read back.) */
cg_status cg_profile_keep_floats(cg_profile *p, const uint8_t *start, const uint8_t *end);
/* Reads a basis anew, as the file has it, into the caller's rows->rows and rows->scale, and sets
 * rows->n_exact. */
cg_status cg_profile_read_rows(const cg_profile *p, const cg_group *group, unsigned plane,
                               cg_basis_rows *rows);

#ifdef __cplusplus
}
#endif
#endif
