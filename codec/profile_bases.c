/* The components of a profile's layer groups, and those that groups share. */
#include "codec/profile_bases.h"

#include "codec/cursor.h"
#include "codec/profile_columns.h"
#include "codec/profile_finite.h"
#include "codec/profile_floats.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Elements of all bases, padded: what a reader takes memory for, against the file's bytes. */
static const uint64_t MOST_PADDED_A_BYTE = 8, MOST_PADDED = 1 << 20;

/* A basis, of either version. */
static cg_status read_basis(cg_cursor *in, cg_profile *p, cg_group *group, unsigned matrix,
                            unsigned unit_bits)
{
    if (p->version == 1)
        return cg_profile_read_floats(in, p, group, matrix);
    cg_bands *bands = &group->bands[matrix];
    bands->n_channels = group->n_channels;
    bands->n_components = group->n_components[matrix];
    bands->unit_bits = unit_bits;
    unsigned least_fraction = 0;
    if (group != p->joint) {
        bands->n_shared = p->n_shared;
        memcpy(bands->fraction_bits, p->fraction_bits, sizeof bands->fraction_bits);
        least_fraction = CG_MOST_FRACTION_BITS;
        for (unsigned level = CG_L1; level < CG_N_LEVELS; level++)
            least_fraction =
                least_fraction < p->fraction_bits[level] ? least_fraction : p->fraction_bits[level];
    }
    /* Sums of 32 bits are at most 2^31 units, and a row of the DCT adds up to less than 4 of them.
     * The joint matrix has no slices: what it gives is within 16 bits. */
    const double most_sum = ldexp(1, 33 - (int)(unit_bits + least_fraction));
    return cg_profile_stays_finite(p, group, matrix, most_sum)
               ? cg_bands_read(&p->layout, p->is_only_checked, in, bands)
               : CG_ERR_CORRUPT;
}

/* Channels that a basis takes memory for: whole panels, which version 1 begins at whole heads or
 * parts of one. */
static uint64_t padded_channels(const cg_profile *p, uint32_t n_channels)
{
    const uint32_t n = p->version == 1 ? p->layout.panel_channels : (uint32_t)CG_PANEL_CHANNELS;
    return cg_padded(n_channels, n) / n * CG_PANEL_CHANNELS;
}

/* Which components the groups share: a group of their own, whose channels they are. */
static cg_status read_shared(cg_cursor *in, cg_profile *p)
{
    uint16_t n_shared;
    uint8_t reserved;
    if (!cg_cursor_u16(in, &n_shared))
        return CG_ERR_TRUNCATED;
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++) {
        if (!cg_cursor_u8(in, &p->fraction_bits[level]))
            return CG_ERR_TRUNCATED;
        /* Made of a finer level's, a coarser level's symbols are a third: their sums are no larger.
         */
        if (p->fraction_bits[level] > CG_MOST_FRACTION_BITS ||
            (level > CG_L1 && p->fraction_bits[level] > p->fraction_bits[level - 1] + 1))
            return CG_ERR_CORRUPT;
    }
    if (!cg_cursor_u8(in, &reserved))
        return CG_ERR_TRUNCATED;
    if (p->n_groups < 2 || n_shared == 0 || n_shared % CG_BAND_COMPONENTS != 0 ||
        p->n_groups * n_shared > CG_MOST_SHARED || reserved != 0)
        return CG_ERR_CORRUPT;
    p->n_shared = n_shared;
    p->groups[p->n_groups].n_channels = p->n_groups * n_shared;
    p->joint = &p->groups[p->n_groups];
    return CG_OK;
}

/* How many of them are given, by level and frequency. */
static cg_status read_given(cg_cursor *in, cg_profile *p)
{
    for (unsigned i = 0; i < CG_N_LOSSY * CG_DCT; i++) {
        uint16_t *n_given = &p->n_given[i / CG_DCT][i % CG_DCT];
        if (!cg_cursor_u16(in, n_given))
            return CG_ERR_TRUNCATED;
        if (*n_given > p->n_shared)
            return CG_ERR_CORRUPT;
    }
    return CG_OK;
}

/* How many components each basis has, and from version 2 on its unit: *unit_bits[n_bases], in the
 * file's order. What a reader takes memory for is known from here on. */
static cg_status read_sizes(cg_cursor *in, cg_profile *p, uint8_t *unit_bits)
{
    uint64_t n_padded = 0;
    unsigned most_fraction = 0;
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++)
        most_fraction =
            most_fraction < p->fraction_bits[level] ? p->fraction_bits[level] : most_fraction;
    for (uint32_t i = 0; i < cg_profile_n_bases(p); i++) {
        cg_group *group = cg_profile_file_group(p, i);
        const bool is_joint = group == p->joint;
        uint16_t *n_components = &group->n_components[i % p->n_matrices];
        uint8_t reserved = 0;
        unit_bits[i] = CG_LEAST_UNIT_BITS;
        if (!cg_cursor_u16(in, n_components) || *n_components > group->n_channels)
            return CG_ERR_CORRUPT;
        /* Version 1 has no unit_bits: the least passes the check below. */
        if (p->version == 1 ? !cg_cursor_u16(in, &group->n_wide[i % p->n_matrices])
                            : !cg_cursor_u8(in, &unit_bits[i]) || !cg_cursor_u8(in, &reserved))
            return CG_ERR_CORRUPT;
        if (group->n_wide[i % p->n_matrices] > *n_components || reserved != 0 ||
            unit_bits[i] < CG_LEAST_UNIT_BITS || unit_bits[i] > CG_MOST_UNIT_BITS)
            return CG_ERR_CORRUPT;
        /* A group has its shared components; sums of the joint matrix have bits to round off. */
        if (is_joint ? *n_components == 0 || unit_bits[i] <= most_fraction
                     : *n_components < p->n_shared)
            return CG_ERR_CORRUPT;
        const cg_status status = is_joint ? read_given(in, p) : CG_OK;
        if (status != CG_OK)
            return status;
        n_padded +=
            cg_padded(*n_components, CG_BAND_COMPONENTS) * padded_channels(p, group->n_channels);
    }
    return n_padded <= MOST_PADDED_A_BYTE * p->file_bytes + MOST_PADDED ? CG_OK : CG_ERR_CORRUPT;
}

cg_status cg_profile_read_bases(cg_cursor *in, cg_profile *p)
{
    cg_status status =
        cg_basis_layout_init(p->kernels, p->geometry.head_dim, p->version > 1, &p->layout);
    if (status == CG_OK && p->has_joint)
        status = read_shared(in, p);
    const uint32_t n_bases = cg_profile_n_bases(p);
    uint8_t *unit_bits = malloc(n_bases);
    if (status == CG_OK)
        status = unit_bits != NULL ? CG_OK : CG_ERR_NO_MEMORY;
    if (status == CG_OK)
        status = read_sizes(in, p, unit_bits);
    if (status == CG_OK)
        status = cg_profile_read_columns(in, p);
    const uint8_t *start = in->at;
    for (uint32_t i = 0; i < n_bases && status == CG_OK; i++) {
        cg_group *group = cg_profile_file_group(p, i);
        group->basis_offset[i % p->n_matrices] = (size_t)(in->at - start);
        status = read_basis(in, p, group, i % p->n_matrices, unit_bits[i]);
    }
    if (status == CG_OK && p->version == 1)
        status = cg_profile_keep_floats(p, start, in->at);
    free(unit_bits);
    return status;
}
