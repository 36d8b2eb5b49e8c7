/* codec/profile_columns.h - reading a profile: which columns each level has, and their classes.
 *
 * Bytes: codec/FORMAT.md, "Profile". What is read before is in *p already.
 *
 * Threads: as codec/profile_data.h; a profile that is read is one thread's.
 */
#ifndef CG_CODEC_PROFILE_COLUMNS_H
#define CG_CODEC_PROFILE_COLUMNS_H
#include "codec/profile_data.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The layer group of the file's i-th basis: the joint one comes first there. */
static inline cg_group *cg_profile_file_group(const cg_profile *p, uint32_t i)
{
    if (p->joint != NULL)
        return &p->groups[i > 0 ? i - 1 : p->n_groups];
    return &p->groups[i / p->n_matrices];
}

/* With a KLT: how many components each frequency has at each level, and their classes. */
cg_status cg_profile_read_columns(cg_cursor *in, cg_profile *p);
/* What follows the classes, with anchors: the classes of all channels. */
cg_status cg_profile_read_anchors(cg_cursor *in, cg_profile *p);
/* Whether it has what nested chunks rely on: steps a factor 3 apart, and no coarser level has
 * columns that the finer one has not. */
bool cg_profile_levels_nest(const cg_profile *p);

#ifdef __cplusplus
}
#endif
#endif
