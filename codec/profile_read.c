/* From the bytes of a .cgp file to a cg_profile that everybody may believe: FORMAT.md, "Profile".
 * The first 80 of them are read in profile_head.c. The functions stand in the order of the file.
 * Counts are compared with the bytes that are left before memory is taken by them. Numbers are held
 * within bounds in which no decoder leaves the range of f32, whatever the symbols are. */
#include "codec/profile_data.h"

#include "codec/bf16.h"
#include "codec/block_order.h"
#include "codec/cursor.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { EXACT_BITS = 9 /* of a component that an encoder takes for exact */ };

/* Of an element or a scale of a basis, whose rows are about orthonormal: sums and units of elements
 * stay finite. */
static const float MOST_BASIS = 1e30f;

/* Of what a decoder may come to, whatever the symbols are: below the largest bf16 and f32, with
 * room for a rotation. And of a frequency, whose angles must be numbers at every position. */
static const double MOST_ELEMENT = 1e38, MOST_FREQUENCY_1 = 1e30, MOST_SYMBOL = 32768;

/* In version 2, whose angles are reduced in f64: as fast as a model could turn, and more. */
static const double MOST_FREQUENCY = 16;

/* Elements of all bases, padded: what a reader takes memory for, against the file's bytes. */
static const uint64_t MOST_PADDED_A_BYTE = 8, MOST_PADDED = 1 << 20;

/* No NaN, no infinity; and where they must be positive, nothing from 0 down. */
static bool read_finite(cg_cursor *in, float *values, size_t n_values, bool positive)
{
    for (size_t i = 0; i < n_values; i++) {
        if (!cg_cursor_f32(in, &values[i]) || !isfinite(values[i]) ||
            (positive && !(values[i] > 0)))
            return false;
    }
    return true;
}

/* Tables that no layer has are left out, so that there are no more than layers: decoders take
 * memory by the number of tables. */
static void drop_unused_ropes(cg_profile *p)
{
    const size_t half = p->rotary_dim / 2;
    uint32_t n_used = 0;
    for (uint32_t rope = 0; rope < p->n_ropes; rope++) {
        bool is_used = false;
        for (uint32_t i = 0; i < p->geometry.n_layers; i++) {
            if (p->layer_rope[i] == rope) {
                p->layer_rope[i] = (uint8_t)n_used;
                is_used = true;
            }
        }
        if (is_used)
            memmove(p->inv_freq + n_used++ * half, p->inv_freq + rope * half,
                    half * sizeof *p->inv_freq);
    }
    p->n_ropes = n_used;
}

/* Everything with a size known from the header: rotation, groups, steps, channel tables. */
static cg_status read_tables(cg_cursor *in, cg_profile *p)
{
    const size_t channels = cg_geometry_channels(&p->geometry);
    const size_t n_table = (size_t)p->geometry.n_layers * CG_N_PLANES * channels;
    uint32_t layer = 0;
    const bool has_anchors = p->token_transform == CG_TOKENS_ANCHORS;
    /* Nothing is allocated that the file can't hold: counts are only its claim. */
    if (in->left_bytes / (has_anchors ? 12 : 8) < n_table)
        return CG_ERR_TRUNCATED;
    p->inv_freq = calloc(p->n_ropes * p->rotary_dim / 2 + 1, sizeof *p->inv_freq);
    p->layer_rope = calloc(p->geometry.n_layers, sizeof *p->layer_rope);
    p->groups = calloc(p->n_groups + 1, sizeof *p->groups); /* the joint one, too */
    p->mean = malloc(n_table * sizeof *p->mean);
    p->weight = malloc(n_table * sizeof *p->weight);
    p->anchor_step = has_anchors ? malloc(n_table * sizeof *p->anchor_step) : NULL;
    if (p->inv_freq == NULL || p->layer_rope == NULL || p->groups == NULL || p->mean == NULL ||
        p->weight == NULL || (has_anchors && p->anchor_step == NULL))
        return CG_ERR_NO_MEMORY;

    const double most_frequency = p->version == 1 ? MOST_FREQUENCY_1 : MOST_FREQUENCY;
    for (uint32_t i = 0; i < p->n_ropes * p->rotary_dim / 2; i++) {
        if (!cg_cursor_f64(in, &p->inv_freq[i]) ||
            !(fabs(p->inv_freq[i]) <= most_frequency)) /* so that a NaN fails */
            return CG_ERR_CORRUPT;
    }
    for (uint32_t i = 0; p->n_ropes > 1 && i < p->geometry.n_layers; i++) {
        if (!cg_cursor_u8(in, &p->layer_rope[i]) || p->layer_rope[i] >= p->n_ropes)
            return CG_ERR_CORRUPT;
    }
    drop_unused_ropes(p);
    for (uint32_t g = 0; g < p->n_groups; g++) {
        uint16_t n_layers;
        if (!cg_cursor_u16(in, &n_layers) || n_layers == 0 ||
            n_layers > p->geometry.n_layers - layer)
            return CG_ERR_CORRUPT;
        p->groups[g].first_layer = layer;
        p->groups[g].n_layers = n_layers;
        p->groups[g].n_slices = n_layers * cg_profile_matrix_planes(p);
        p->groups[g].n_channels = (uint32_t)(p->groups[g].n_slices * channels);
        layer += n_layers;
    }
    if (layer != p->geometry.n_layers)
        return CG_ERR_CORRUPT;
    for (unsigned level = 0; level < CG_N_LOSSY; level++) {
        /* A joined matrix has one quantizer: both planes name its step. */
        if (!read_finite(in, p->step[level], CG_N_PLANES, true) ||
            (p->n_matrices == 1 && p->step[level][CG_K] != p->step[level][CG_V]))
            return CG_ERR_CORRUPT;
    }
    return read_finite(in, p->mean, n_table, false) && read_finite(in, p->weight, n_table, true) &&
                   (!has_anchors || read_finite(in, p->anchor_step, n_table, true))
               ? CG_OK
               : CG_ERR_CORRUPT;
}

static cg_status read_classes(cg_cursor *in, cg_profile *p)
{
    p->classes = calloc(p->n_classes, sizeof *p->classes);
    if (p->classes == NULL)
        return CG_ERR_NO_MEMORY;
    for (uint32_t i = 0; i < p->n_classes; i++) {
        uint8_t shift, n_symbols;
        uint16_t freq[CG_RANS_MAX_SYMBOLS];
        if (!cg_cursor_u8(in, &shift) || !cg_cursor_u8(in, &n_symbols) ||
            n_symbols > CG_RANS_MAX_SYMBOLS) /* what freq has room for; the class checks the rest */
            return CG_ERR_CORRUPT;
        for (unsigned s = 0; s < n_symbols; s++) {
            if (!cg_cursor_u16(in, &freq[s]))
                return CG_ERR_TRUNCATED;
        }
        const cg_status status = cg_rans_class_init_signed(&p->classes[i], shift, n_symbols, freq);
        if (status != CG_OK)
            return status;
    }
    for (uint32_t i = 0; p->nests && i < p->n_classes; i++) {
        uint16_t freq[CG_RANS_REFINE_CONTEXTS][2];
        for (unsigned c = 0; c < CG_RANS_REFINE_CONTEXTS; c++) {
            if (!cg_cursor_u16(in, &freq[c][0]) || !cg_cursor_u16(in, &freq[c][1]))
                return CG_ERR_TRUNCATED;
        }
        const cg_status status = cg_rans_class_init_refinement(&p->classes[i], freq);
        if (status != CG_OK)
            return status;
    }
    return CG_OK;
}

/* What blocks with steps of their own need: which classes their factors make of the columns', and
 * what encoders choose the steps by. */
static cg_status read_steps(cg_cursor *in, cg_profile *p)
{
    const size_t n_class_of = (size_t)CG_N_STEP_FACTORS * p->n_classes;
    const uint8_t *bytes;
    uint16_t n_query_heads;
    if (!cg_cursor_bytes(in, n_class_of, &bytes) || !cg_cursor_u16(in, &n_query_heads))
        return CG_ERR_TRUNCATED;
    for (size_t i = 0; i < n_class_of; i++) {
        if (bytes[i] >= p->n_classes)
            return CG_ERR_CORRUPT;
    }
    if (n_query_heads % p->geometry.n_kv_heads != 0)
        return CG_ERR_CORRUPT;
    p->n_query_heads = n_query_heads;
    p->class_of = malloc(n_class_of);
    if (p->class_of == NULL)
        return CG_ERR_NO_MEMORY;
    memcpy(p->class_of, bytes, n_class_of);
    const size_t n_query = (size_t)p->geometry.n_layers * n_query_heads * p->geometry.head_dim;
    if (in->left_bytes / 2 < n_query)
        return CG_ERR_TRUNCATED;
    if (n_query > 0 && !p->is_only_checked &&
        (p->query_mean = malloc(n_query * sizeof *p->query_mean)) == NULL)
        return CG_ERR_NO_MEMORY;
    for (size_t i = 0; i < n_query; i++) {
        uint16_t bits;
        if (!cg_cursor_u16(in, &bits) || !isfinite(cg_bf16_to_f32(bits)))
            return CG_ERR_CORRUPT;
        if (p->query_mean != NULL)
            p->query_mean[i] = cg_bf16_to_f32(bits);
    }
    return CG_OK;
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

/* What nested chunks rely on: steps a factor 3 apart, and no coarser level has columns that the
 * finer one has not. */
static bool levels_nest(const cg_profile *p)
{
    for (unsigned level = 1; level < CG_N_LOSSY; level++) {
        for (unsigned plane = 0; plane < CG_N_PLANES; plane++) {
            if (fabsf(p->step[level][plane] / p->step[level - 1][plane] - CG_RANS_REFINE_STEP) >
                1e-6f)
                return false;
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

/* The classes of a run of columns->n_active[f] columns: for now in the file's bytes. Decoders
 * believe them (cg_rans_decode()), so this is where they are checked. */
static cg_status read_run(cg_cursor *in, const cg_profile *p, unsigned f, cg_level_columns *columns)
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

/* Copies the columns' classes, which lie in the bytes from start to end: the bytes are the caller's
 * and may go. */
static cg_status keep_classes(cg_profile *p, const uint8_t *start, const uint8_t *end)
{
    const size_t n_bytes = (size_t)(end - start),
                 n_scales = p->version == CG_PROFILE_VERSION_STEPS ? CG_N_STEP_FACTORS : 0;
    if (p->is_only_checked)
        return CG_OK;
    p->column_classes_bytes = n_bytes;
    p->column_classes = malloc((1 + n_scales) * n_bytes + 1); /* not 0 bytes */
    if (p->column_classes == NULL)
        return CG_ERR_NO_MEMORY;
    memcpy(p->column_classes, start, n_bytes);
    for (size_t i = 0; i < n_scales; i++) {
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

/* The group of the file's i-th basis: the joint one comes first there. */
static cg_group *group_of_basis(const cg_profile *p, uint32_t i)
{
    if (p->joint != NULL)
        return &p->groups[i > 0 ? i - 1 : p->n_groups];
    return &p->groups[i / p->n_matrices];
}

/* Columns that a group's matrix may have. The joint one has some where it gives something. */
static uint32_t most_active(const cg_profile *p, const cg_group *group, unsigned matrix,
                            unsigned level, unsigned f)
{
    return group != p->joint          ? group->n_components[matrix] - p->n_shared
           : p->n_given[level][f] > 0 ? group->n_components[matrix]
                                      : 0;
}

/* How many components each frequency has at each level, and their classes. Lists of all bases stand
 * together in the file, so one copy keeps them. */
static cg_status read_columns(cg_cursor *in, cg_profile *p)
{
    const uint8_t *start = in->at;
    const uint32_t n_bases = cg_profile_n_bases(p);
    cg_status status;
    for (uint32_t i = 0; i < CG_N_LOSSY * n_bases; i++) {
        const unsigned level = i / n_bases, matrix = i % n_bases % p->n_matrices;
        cg_group *group = group_of_basis(p, i % n_bases);
        cg_level_columns *columns = &group->columns[level][matrix];
        for (unsigned f = 0; f < CG_DCT; f++) {
            if (!cg_cursor_u16(in, &columns->n_active[f]) ||
                columns->n_active[f] > most_active(p, group, matrix, level, f))
                return CG_ERR_CORRUPT;
        }
        for (unsigned f = 0; f < CG_DCT; f++) {
            if ((status = read_run(in, p, f, columns)) != CG_OK)
                return status;
        }
    }
    return keep_classes(p, start, in->at);
}

/* Whether elements stay finite that are most_sum times a channel's step off its mean, or its
 * anchor. In f64, where these sums cannot overflow; a quotient that is infinite in f32 fails, too.
 */
bool cg_profile_stays_finite(const cg_profile *p, const cg_group *group, unsigned matrix,
                             double most_sum)
{
    if (p->version == CG_PROFILE_VERSION_STEPS)
        most_sum *=
            CG_STEP_FACTORS[CG_N_STEP_FACTORS - 1]; /* the coarsest steps that blocks may have */
    const size_t channels = cg_geometry_channels(&p->geometry);
    for (uint32_t i = 0; i < group->n_slices; i++) {
        const cg_slice slice = cg_group_slice(group, matrix, i);
        const float *mean = cg_profile_row(p, p->mean, slice);
        const float *weight = cg_profile_row(p, p->weight, slice);
        const float *anchor_step =
            p->anchor_step != NULL ? cg_profile_row(p, p->anchor_step, slice) : NULL;
        for (size_t ch = 0; ch < channels; ch++) {
            const double anchor = anchor_step != NULL ? MOST_SYMBOL * anchor_step[ch] : 0;
            for (unsigned level = 0; level < CG_N_LOSSY; level++) {
                const float step = p->step[level][slice.plane] / weight[ch];
                if (!(fabs(mean[ch]) + anchor + most_sum * step <= MOST_ELEMENT))
                    return false;
            }
        }
    }
    return true;
}

/* A component in bf16. row: NULL, or where its elements go. */
static cg_status read_wide_row(cg_cursor *in, size_t n_channels, uint16_t *row, float *most_out)
{
    const uint8_t *bytes;
    uint16_t most = 0;
    if (!cg_cursor_bytes(in, 2 * n_channels, &bytes))
        return CG_ERR_TRUNCATED;
    for (size_t ch = 0; ch < n_channels; ch++) {
        const uint16_t element = (uint16_t)cg_get_le(bytes + 2 * ch, 2);
        if (!(fabsf(cg_bf16_to_f32(element)) <= MOST_BASIS)) /* so that a NaN fails */
            return CG_ERR_CORRUPT;
        /* Without their signs, floats are ordered as the integers that their bits are. */
        most = (element & 0x7fff) > most ? element & 0x7fff : most;
        if (row != NULL)
            row[ch] = element;
    }
    *most_out = cg_bf16_to_f32(most);
    return CG_OK;
}

/* A component in signed numbers of few bits, one after another from the lowest bit of the first
 * byte, and their scale. row: as above. */
static cg_status read_narrow_row(cg_cursor *in, bool is_packed, size_t n_channels, uint16_t *row,
                                 uint8_t *bits_out, float *scale_out)
{
    uint8_t bits = 8;
    float scale;
    const uint8_t *bytes;
    if (is_packed && (!cg_cursor_u8(in, &bits) || bits < 2 || bits > CG_MAX_NARROW_BITS))
        return CG_ERR_CORRUPT;
    if (!read_finite(in, &scale, 1, false) || fabsf(scale) > MOST_BASIS)
        return CG_ERR_CORRUPT;
    const size_t n_bytes = (n_channels * bits + 7) / 8;
    if (!cg_cursor_bytes(in, n_bytes, &bytes))
        return CG_ERR_TRUNCATED;
    /* A basis has one form: the bits that are left over are zeros. */
    if (n_channels * bits % 8 != 0 && bytes[n_bytes - 1] >> (n_channels * bits % 8) != 0)
        return CG_ERR_CORRUPT;
    for (size_t ch = 0; ch < n_channels && row != NULL; ch++) {
        /* Twelve bits lie in at most three bytes. */
        const size_t at = ch * bits / 8, left = n_bytes - at;
        const unsigned three =
            (unsigned)cg_get_le(bytes + at, left < 3 ? left : 3) >> (ch * bits % 8);
        const int value =
            (int)(three & ((1u << bits) - 1)) - (int)((three >> (bits - 1) & 1) << bits);
        row[ch] = cg_bf16_from_f32(scale * (float)value);
    }
    *bits_out = bits;
    *scale_out = scale;
    return CG_OK;
}

/* The rows of a basis. basis->rows and basis->scale: NULL, and the file's bytes are only checked.
 */
static cg_status read_rows(cg_cursor *in, const cg_profile *p, const cg_group *group,
                           unsigned plane, unsigned n_wide, cg_basis_rows *basis)
{
    const size_t n_channels = basis->n_channels;
    cg_status status = CG_OK;
    double sum = 0; /* of each component's largest element */
    basis->n_exact = n_wide;
    for (unsigned c = 0; c < basis->n_components && status == CG_OK; c++) {
        uint16_t *row = basis->rows != NULL ? basis->rows + c * n_channels : NULL;
        uint8_t bits = 0;
        float scale = 0, most = 0;
        if (c < n_wide) {
            status = read_wide_row(in, n_channels, row, &most);
            sum += most;
            continue;
        }
        status = read_narrow_row(in, p->is_packed, n_channels, row, &bits, &scale);
        sum += ldexp(fabs(scale), bits - 1);
        basis->n_exact += basis->n_exact == c && bits >= EXACT_BITS;
        if (basis->scale != NULL)
            basis->scale[c] = scale;
    }
    /* Kernels walk components in sixteens, exact ones and others apart. */
    const uint32_t sixteens = (basis->n_exact + 15) / 16 * 16;
    basis->n_exact = sixteens < basis->n_components ? sixteens : basis->n_components;
    if (status != CG_OK)
        return status;
    /* No row of the DCT sums to more than 4. Sums before the step is multiplied are f32, too. */
    sum *= 4 * MOST_SYMBOL;
    return sum <= MOST_ELEMENT && cg_profile_stays_finite(p, group, plane, sum) ? CG_OK
                                                                                : CG_ERR_CORRUPT;
}

cg_status cg_profile_read_rows(const cg_profile *p, const cg_group *group, unsigned plane,
                               cg_basis_rows *rows)
{
    cg_cursor in = {p->basis_bytes + group->basis_offset[plane], SIZE_MAX}; /* checked before */
    return read_rows(&in, p, group, plane, group->n_wide[plane], rows);
}

/* A basis of version 1. */
static cg_status read_basis(cg_cursor *in, const cg_profile *p, cg_group *group, unsigned plane)
{
    cg_basis_rows rows = {.n_channels = group->n_channels,
                          .n_components = group->n_components[plane]};
    const size_t n_elements = (size_t)rows.n_components * rows.n_channels;
    if (n_elements / 4 > in->left_bytes) /* at least two bits an element */
        return CG_ERR_TRUNCATED;
    if (p->is_only_checked)
        return read_rows(in, p, group, plane, group->n_wide[plane], &rows);
    rows.rows = malloc((n_elements + 1) * sizeof *rows.rows);
    cg_status status = rows.rows != NULL ? CG_OK : CG_ERR_NO_MEMORY;
    if (status == CG_OK)
        status = read_rows(in, p, group, plane, group->n_wide[plane], &rows);
    if (status == CG_OK)
        status = cg_basis_init(&p->layout, &rows, &group->basis[plane]);
    free(rows.rows);
    return status;
}

/* Keeps the bytes of version 1's bases for encoders (analysis.c): what is laid out for decoding
 * differs from CPU to CPU, and has no scales. Version 2's can be read back from what is laid out.
 */
static cg_status keep_bases(cg_profile *p, const uint8_t *start, const uint8_t *end)
{
    const size_t n_bytes = (size_t)(end - start);
    if (p->is_only_checked || p->version > 1)
        return CG_OK;
    p->basis_bytes = malloc(n_bytes + 1); /* not 0 bytes */
    if (p->basis_bytes == NULL)
        return CG_ERR_NO_MEMORY;
    memcpy(p->basis_bytes, start, n_bytes);
    return CG_OK;
}

/* A basis, of either version. */
static cg_status read_either(cg_cursor *in, cg_profile *p, cg_group *group, unsigned matrix,
                             unsigned unit_bits)
{
    if (p->version == 1)
        return read_basis(in, p, group, matrix);
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
        cg_group *group = group_of_basis(p, i);
        const bool is_joint = group == p->joint;
        uint16_t *n_components = &group->n_components[i % p->n_matrices];
        uint8_t reserved = 0;
        unit_bits[i] = CG_LEAST_UNIT_BITS;
        if (!cg_cursor_u16(in, n_components) || *n_components > group->n_channels)
            return CG_ERR_CORRUPT;
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

/* What follows the classes, with a KLT. */
static cg_status read_klt(cg_cursor *in, cg_profile *p)
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
        status = read_columns(in, p);
    const uint8_t *start = in->at;
    for (uint32_t i = 0; i < n_bases && status == CG_OK; i++) {
        cg_group *group = group_of_basis(p, i);
        group->basis_offset[i % p->n_matrices] = (size_t)(in->at - start);
        status = read_either(in, p, group, i % p->n_matrices, unit_bits[i]);
    }
    if (status == CG_OK)
        status = keep_bases(p, start, in->at);
    free(unit_bits);
    return status;
}

/* What follows the classes, with anchors. */
static cg_status read_anchors(cg_cursor *in, cg_profile *p)
{
    const uint8_t *start = in->at;
    cg_status status = CG_OK;
    for (unsigned level = 0; level <= CG_N_LOSSY && status == CG_OK;
         level++) { /* before the levels the anchors */
        for (uint32_t i = 0; i < p->n_groups * CG_N_PLANES && status == CG_OK; i++) {
            cg_group *group = &p->groups[i / CG_N_PLANES];
            cg_level_columns *columns = level == 0 ? &group->anchors[i % CG_N_PLANES]
                                                   : &group->columns[level - 1][i % CG_N_PLANES];
            /* All channels are columns of frequency 0, and n_active has 16 bits. */
            if (group->n_channels > UINT16_MAX)
                return CG_ERR_UNSUPPORTED;
            columns->n_active[0] = (uint16_t)group->n_channels;
            status = cg_profile_stays_finite(p, group, i % CG_N_PLANES, MOST_SYMBOL)
                         ? read_run(in, p, 0, columns)
                         : CG_ERR_CORRUPT;
        }
    }
    return status == CG_OK ? keep_classes(p, start, in->at) : status;
}

static cg_status read_preset(cg_cursor *in, cg_profile *p)
{
    switch (p->token_transform) {
    case CG_TOKENS_DCT: return read_klt(in, p);
    case CG_TOKENS_ANCHORS: return read_anchors(in, p);
    }
    return CG_ERR_UNSUPPORTED;
}

cg_status cg_profile_read(const uint8_t *bytes, size_t n_bytes, cg_profile *p)
{
    cg_cursor in = {bytes, n_bytes};
    cg_status status = cg_profile_read_head(&in, p);
    if (status == CG_OK)
        status = read_tables(&in, p);
    if (status == CG_OK)
        status = read_classes(&in, p);
    if (status == CG_OK && p->version == CG_PROFILE_VERSION_STEPS)
        status = read_steps(&in, p);
    if (status == CG_OK)
        status = read_preset(&in, p);
    return status == CG_OK && (in.left_bytes > 0 || (p->nests && !levels_nest(p))) ? CG_ERR_CORRUPT
                                                                                   : status;
}
