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

/* The classes of columns->n_active[f] columns: for now in the file's bytes. */
cg_status cg_profile_read_column_classes(cg_cursor *in, const cg_profile *p, unsigned f,
                                         cg_level_columns *columns);
/* Copies the columns' classes, which lie in the bytes from start to end: the bytes are the caller's
 * and may go. */
cg_status cg_profile_keep_column_classes(cg_profile *p, const uint8_t *start, const uint8_t *end);

/* With a KLT: how many components each frequency has at each level, and their classes. */
cg_status cg_profile_read_columns(cg_cursor *in, cg_profile *p);
/* Whether it has what nested chunks rely on: steps a factor 3 apart, and no coarser level has
 * columns that the finer one has not. */
bool cg_profile_levels_nest(const cg_profile *p);

#ifdef __cplusplus
}
#endif
#endif
