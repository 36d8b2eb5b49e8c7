/* Which columns each level has, and their classes. Counts are compared with the bytes that are left
 * before they are believed. */
#include "codec/profile_columns.h"

#include "codec/block_order.h"
#include "codec/cursor.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Decoders believe them (cg_rans_decode()), so this is where they are checked. */
cg_status cg_profile_read_column_classes(cg_cursor *in, const cg_profile *p, unsigned f,
                                         cg_level_columns *columns)
{
    const uint8_t *bytes;
    if (!cg_cursor_bytes(in, columns->n_active[f], &bytes))
        return CG_ERR_TRUNCATED;
    for (unsigned c = 0; c < columns->n_active[f]; c++) {
        if (bytes[c] >= p->n_classes)
            return CG_ERR_CORRUPT;
    }
    columns->column_class[f] = bytes;
    columns->n_columns += columns->n_active[f];
    columns->n_strips += (columns->n_active[f] + CG_RANS_LANES - 1u) / CG_RANS_LANES;
    return CG_OK;
}

static void move_classes(cg_level_columns *columns, const uint8_t *from, const uint8_t *to)
{
    for (unsigned f = 0; f < CG_DCT; f++) {
        if (columns->column_class[f] != NULL)
            columns->column_class[f] = to + (columns->column_class[f] - from);
    }
}

cg_status cg_profile_keep_column_classes(cg_profile *p, const uint8_t *start, const uint8_t *end)
{
    const size_t n_bytes = (size_t)(end - start),
                 n_factors = p->version == CG_PROFILE_VERSION_STEPS ? CG_N_STEP_FACTORS : 0;
    if (p->is_only_checked)
        return CG_OK;
    p->column_classes_bytes = n_bytes;
    p->column_classes = malloc((1 + n_factors) * n_bytes + 1); /* not 0 bytes */
    if (p->column_classes == NULL)
        return CG_ERR_NO_MEMORY;
    memcpy(p->column_classes, start, n_bytes);
    /* A copy for each factor, so that a run finds its classes by an offset alone. */
    for (size_t i = 0; i < n_factors; i++) {
        uint8_t class_of[256] = {0}; /* there are other bytes, too, which nobody looks at */
        memcpy(class_of, p->class_of + i * p->n_classes, p->n_classes);
        for (size_t at = 0; at < n_bytes; at++)
            p->column_classes[(1 + i) * n_bytes + at] = class_of[start[at]];
    }
    for (uint32_t i = 0; i < cg_profile_n_bases(p); i++) {
        cg_group *group = &p->groups[i / p->n_matrices];
        move_classes(&group->anchors[i % p->n_matrices], start, p->column_classes);
        for (unsigned level = 0; level < CG_N_LOSSY; level++)
            move_classes(&group->columns[level][i % p->n_matrices], start, p->column_classes);
    }
    return CG_OK;
}

/* Columns that a group's matrix may have. The joint one has some where it gives something. */
static uint32_t most_active(const cg_profile *p, const cg_group *group, unsigned matrix,
                            unsigned level, unsigned f)
{
    return group != p->joint          ? group->n_components[matrix] - p->n_shared
           : p->n_given[level][f] > 0 ? group->n_components[matrix]
                                      : 0;
}

/* Lists of all bases stand together in the file, so one copy keeps them. */
cg_status cg_profile_read_columns(cg_cursor *in, cg_profile *p)
{
    const uint8_t *start = in->at;
    const uint32_t n_bases = cg_profile_n_bases(p);
    cg_status status;
    for (uint32_t i = 0; i < CG_N_LOSSY * n_bases; i++) {
        const unsigned level = i / n_bases, matrix = i % n_bases % p->n_matrices;
        cg_group *group = cg_profile_file_group(p, i % n_bases);
        cg_level_columns *columns = &group->columns[level][matrix];
        for (unsigned f = 0; f < CG_DCT; f++) {
            if (!cg_cursor_u16(in, &columns->n_active[f]) ||
                columns->n_active[f] > most_active(p, group, matrix, level, f))
                return CG_ERR_CORRUPT;
        }
        for (unsigned f = 0; f < CG_DCT; f++) {
            if ((status = cg_profile_read_column_classes(in, p, f, columns)) != CG_OK)
                return status;
        }
    }
    return cg_profile_keep_column_classes(p, start, in->at);
}

/* Whether a coarser level has nowhere more than a finer one, by frequency. */
static bool counts_nest(const uint16_t fine[CG_DCT], const uint16_t coarse[CG_DCT])
{
    for (unsigned f = 0; f < CG_DCT; f++) {
        if (coarse[f] > fine[f])
            return false;
    }
    return true;
}

bool cg_profile_levels_nest(const cg_profile *p)
{
    for (unsigned level = 1; level < CG_N_LOSSY; level++) {
        for (unsigned plane = 0; plane < CG_N_PLANES; plane++) {
            if (fabsf(p->step[level][plane] / p->step[level - 1][plane] - CG_RANS_REFINE_STEP) >
                1e-6f)
                return false; /* steps are f32: three times one may be rounded */
        }
        for (uint32_t i = 0; i < cg_profile_n_bases(p); i++) {
            const cg_group *group = &p->groups[i / p->n_matrices];
            if (!counts_nest(group->columns[level - 1][i % p->n_matrices].n_active,
                             group->columns[level][i % p->n_matrices].n_active))
                return false;
        }
        if (!counts_nest(p->n_given[level - 1], p->n_given[level]))
            return false;
    }
    return true;
}
