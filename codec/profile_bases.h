/* codec/profile_bases.h - reading a profile: the components of its layer groups.
 *
 * Bytes: codec/FORMAT.md, "Profile", "Basis in bands" and "Basis in floats".
 *
 * Threads: as codec/profile_columns.h.
 */
#ifndef CG_CODEC_PROFILE_BASES_H
#define CG_CODEC_PROFILE_BASES_H
#include "codec/profile_data.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What follows the classes, with a KLT: the joint matrix, sizes, columns and bases. */
cg_status cg_profile_read_bases(cg_cursor *in, cg_profile *p);

#ifdef __cplusplus
}
#endif
#endif
