/* From the bytes of a .cgp file to a cg_profile that everybody may believe: FORMAT.md, "Profile".
 * In the order of the file: profile_head.c reads the first 80; this file what all profiles have;
 * the preset the rest. Counts are compared with the bytes that are left before memory is taken by
 * them. Numbers are held within bounds in which no decoder leaves the range of f32, whatever the
 * symbols are (profile_finite.h). */
#include "codec/profile_data.h"

#include "codec/bf16.h"
#include "codec/block_order.h"
#include "codec/cursor.h"
#include "codec/preset.h"
#include "codec/profile_columns.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Of a frequency, whose angles must be numbers at every position. */
static const double MOST_FREQUENCY_1 = 1e30;

/* In version 2, whose angles are reduced in f64: as fast as a model could turn, and more. */
static const double MOST_FREQUENCY = 16;

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

/* Everything with a size known from the header: rotation, layer groups, steps, channel tables. */
static cg_status read_tables(cg_cursor *in, cg_profile *p)
{
    const size_t channels = cg_geometry_channels(&p->geometry);
    const size_t n_table = (size_t)p->geometry.n_layers * CG_N_PLANES * channels;
    uint32_t layer = 0;
    const bool has_anchor_step = p->preset->has_anchor_step;
    /* Nothing is allocated that the file can't hold: counts are only its claim. Elements are f32,
     * of mean, weight and anchor_step. */
    if (in->left_bytes / (has_anchor_step ? 12 : 8) < n_table)
        return CG_ERR_TRUNCATED;
    p->inv_freq = calloc(p->n_ropes * p->rotary_dim / 2 + 1, sizeof *p->inv_freq);
    p->layer_rope = calloc(p->geometry.n_layers, sizeof *p->layer_rope);
    p->groups = calloc(p->n_groups + 1, sizeof *p->groups); /* the joint one, too */
    p->mean = malloc(n_table * sizeof *p->mean);
    p->weight = malloc(n_table * sizeof *p->weight);
    p->anchor_step = has_anchor_step ? malloc(n_table * sizeof *p->anchor_step) : NULL;
    if (p->inv_freq == NULL || p->layer_rope == NULL || p->groups == NULL || p->mean == NULL ||
        p->weight == NULL || (has_anchor_step && p->anchor_step == NULL))
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
                   (!has_anchor_step || read_finite(in, p->anchor_step, n_table, true))
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
        status = p->preset->read_profile(&in, p);
    return status == CG_OK && (in.left_bytes > 0 || (p->nests && !cg_profile_levels_nest(p)))
               ? CG_ERR_CORRUPT
               : status;
}
