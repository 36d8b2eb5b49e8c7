#include "codec/profile.h"

#include "codec/bf16.h"
#include "codec/cursor.h"
#include "codec/kernels.h"
#include "codec/profile_data.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

static const uint8_t MAGIC[8] = {'C', 'G', 'P', 'F', '\r', '\n', 0x1a, '\n'};

enum {
    FIXED_BYTES = 80,
    CHANNEL_NONE = 0,
    CHANNEL_KLT = 1,
    ROPE_NONE = 0,
    ROPE_TABLE = 1,
    ROPE_BY_LAYER = 2
};

/* Of an element or a scale of a basis, whose rows are about orthonormal: sums and units of elements
 * stay finite. */
static const float MOST_BASIS = 1e30f;

static bool read_finite(cg_cursor *in, float *values, size_t n_values, bool positive)
{
    for (size_t i = 0; i < n_values; i++) {
        if (!cg_cursor_f32(in, &values[i]) || !isfinite(values[i]) ||
            (positive && !(values[i] > 0)))
            return false;
    }
    return true;
}

static cg_status read_fixed(cg_cursor *in, cg_profile *p)
{
    const uint8_t *at = in->at;
    if (in->left_bytes < sizeof MAGIC)
        return CG_ERR_TRUNCATED;
    if (memcmp(at, MAGIC, sizeof MAGIC) != 0)
        return CG_ERR_BAD_MAGIC;
    if (in->left_bytes < FIXED_BYTES + 8)
        return CG_ERR_TRUNCATED;
    if (cg_get_le(at + 8, 4) != CG_PROFILE_VERSION)
        return CG_ERR_UNSUPPORTED_VERSION;
    const uint64_t file_bytes = cg_get_le(at + 16, 8);
    if (file_bytes > in->left_bytes)
        return CG_ERR_TRUNCATED;
    if (file_bytes < in->left_bytes ||
        XXH3_64bits(at, file_bytes - 8) != cg_get_le(at + file_bytes - 8, 8))
        return CG_ERR_CORRUPT;
    if (cg_get_le(at + 12, 4) != 0 || at[67] > 1 || at[77] > 1 || cg_get_le(at + 78, 2) != 0)
        return CG_ERR_CORRUPT;

    const cg_key fingerprint = cg_key_of_bytes(at, file_bytes);
    memcpy(p->fingerprint.bytes, fingerprint.bytes, sizeof p->fingerprint.bytes);
    memcpy(p->model.bytes, at + 24, sizeof p->model.bytes);
    p->geometry.n_layers = (uint16_t)cg_get_le(at + 40, 2);
    p->geometry.n_kv_heads = (uint16_t)cg_get_le(at + 42, 2);
    p->geometry.head_dim = (uint16_t)cg_get_le(at + 44, 2);
    p->geometry.dtype = at[46];
    p->geometry.n_planes = at[47];
    memcpy(p->preset, at + 48, 16);
    const unsigned rope = at[66];
    if (at[65] == CG_TOKENS_DCT
            ? at[64] != CHANNEL_KLT || rope > ROPE_BY_LAYER
            : at[65] != CG_TOKENS_ANCHORS || at[64] != CHANNEL_NONE || rope != ROPE_NONE)
        return CG_ERR_UNSUPPORTED;
    p->token_transform = at[65];
    p->is_packed = at[67] == 1;
    p->nests = at[77] == 1;
    if ((p->is_packed || p->nests) && at[64] != CHANNEL_KLT)
        return CG_ERR_CORRUPT;
    if (rope == ROPE_BY_LAYER ? at[76] < 2 || at[76] > CG_MAX_ROPES : at[76] != 0)
        return CG_ERR_CORRUPT;
    p->n_ropes = rope == ROPE_BY_LAYER ? at[76] : 1;
    p->rotary_dim = (uint32_t)cg_get_le(at + 68, 2);
    p->n_sinks = (uint32_t)cg_get_le(at + 70, 2);
    p->n_groups = (uint32_t)cg_get_le(at + 72, 2);
    p->n_classes = (uint32_t)cg_get_le(at + 74, 2);
    const cg_status status = cg_geometry_check(&p->geometry);
    if (status != CG_OK)
        return status == CG_ERR_UNSUPPORTED ? status : CG_ERR_CORRUPT;
    if (p->rotary_dim % 2 != 0 || p->rotary_dim > p->geometry.head_dim ||
        (rope == ROPE_NONE) != (p->rotary_dim == 0) || p->n_sinks > CG_MAX_SINKS ||
        p->n_groups == 0 || p->n_groups > p->geometry.n_layers || p->n_classes == 0 ||
        p->n_classes > 256)
        return CG_ERR_CORRUPT;
    in->left_bytes = file_bytes - 8;
    (void)cg_cursor_skip(in, FIXED_BYTES);
    return CG_OK;
}

/* Everything with a size known from the header: rotation, groups, steps, channel tables. */
static cg_status read_tables(cg_cursor *in, cg_profile *p)
{
    const size_t channels = cg_geometry_channels(&p->geometry);
    const size_t n_table = (size_t)p->geometry.n_layers * CG_N_PLANES * channels;
    uint32_t layer = 0;
    const bool has_anchors = p->token_transform == CG_TOKENS_ANCHORS;
    if (in->left_bytes / (has_anchors ? 12 : 8) <
        n_table) /* nothing is allocated that the file can't hold */
        return CG_ERR_TRUNCATED;
    p->inv_freq = calloc(p->n_ropes * p->rotary_dim / 2 + 1, sizeof *p->inv_freq);
    p->layer_rope = calloc(p->geometry.n_layers, sizeof *p->layer_rope);
    p->groups = calloc(p->n_groups, sizeof *p->groups);
    p->mean = malloc(n_table * sizeof *p->mean);
    p->weight = malloc(n_table * sizeof *p->weight);
    p->anchor_step = has_anchors ? malloc(n_table * sizeof *p->anchor_step) : NULL;
    if (p->inv_freq == NULL || p->layer_rope == NULL || p->groups == NULL || p->mean == NULL ||
        p->weight == NULL || (has_anchors && p->anchor_step == NULL))
        return CG_ERR_NO_MEMORY;

    for (uint32_t i = 0; i < p->n_ropes * p->rotary_dim / 2; i++) {
        if (!cg_cursor_f64(in, &p->inv_freq[i]) || !isfinite(p->inv_freq[i]))
            return CG_ERR_CORRUPT;
    }
    for (uint32_t i = 0; p->n_ropes > 1 && i < p->geometry.n_layers; i++) {
        if (!cg_cursor_u8(in, &p->layer_rope[i]) || p->layer_rope[i] >= p->n_ropes)
            return CG_ERR_CORRUPT;
    }
    for (uint32_t g = 0; g < p->n_groups; g++) {
        uint16_t n_layers;
        if (!cg_cursor_u16(in, &n_layers) || n_layers == 0 ||
            n_layers > p->geometry.n_layers - layer)
            return CG_ERR_CORRUPT;
        p->groups[g].first_layer = layer;
        p->groups[g].n_layers = n_layers;
        p->groups[g].n_channels = (uint32_t)(n_layers * channels);
        layer += n_layers;
    }
    if (layer != p->geometry.n_layers)
        return CG_ERR_CORRUPT;
    for (unsigned level = 0; level < CG_N_LOSSY; level++) {
        if (!read_finite(in, p->step[level], CG_N_PLANES, true))
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
            n_symbols > CG_RANS_MAX_SYMBOLS)
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

/* What nested chunks rely on: steps a factor 3 apart, and no coarser level has columns that the
 * finer one has not. */
static bool levels_nest(const cg_profile *p)
{
    for (unsigned level = 1; level < CG_N_LOSSY; level++) {
        for (unsigned plane = 0; plane < CG_N_PLANES; plane++) {
            if (fabsf(p->step[level][plane] / p->step[level - 1][plane] - CG_RANS_REFINE_STEP) >
                1e-6f)
                return false;
            for (uint32_t g = 0; g < p->n_groups; g++) {
                const cg_level_columns *fine = &p->groups[g].columns[level - 1][plane];
                const cg_level_columns *coarse = &p->groups[g].columns[level][plane];
                for (unsigned f = 0; f < CG_DCT; f++) {
                    if (coarse->n_active[f] > fine->n_active[f])
                        return false;
                }
            }
        }
    }
    return true;
}

/* Where the bytes of the columns' classes begin: they are copied whole, the cursor's memory is the
 * caller's. */
static cg_status keep_column_classes(const cg_cursor *in, cg_profile *p)
{
    p->column_classes = malloc(in->left_bytes > 0 ? in->left_bytes : 1);
    if (p->column_classes == NULL)
        return CG_ERR_NO_MEMORY;
    memcpy(p->column_classes, in->at, in->left_bytes);
    return CG_OK;
}

/* The classes of a run of columns->n_active[f] columns; start: what column_classes was copied
 * from. */
static cg_status read_run(cg_cursor *in, const cg_profile *p, const uint8_t *start, unsigned f,
                          cg_level_columns *columns)
{
    const uint8_t *bytes;
    if (!cg_cursor_bytes(in, columns->n_active[f], &bytes))
        return CG_ERR_TRUNCATED;
    for (unsigned c = 0; c < columns->n_active[f]; c++) {
        if (bytes[c] >= p->n_classes)
            return CG_ERR_CORRUPT;
    }
    columns->column_class[f] = p->column_classes + (bytes - start);
    columns->n_columns += columns->n_active[f];
    columns->n_strips += (columns->n_active[f] + CG_RANS_LANES - 1u) / CG_RANS_LANES;
    return CG_OK;
}

static cg_status read_columns(cg_cursor *in, cg_profile *p, const uint16_t *n_components)
{
    const uint8_t *start = in->at;
    cg_status status = keep_column_classes(in, p);
    if (status != CG_OK)
        return status;
    for (unsigned level = 0; level < CG_N_LOSSY; level++) {
        for (uint32_t g = 0; g < p->n_groups; g++) {
            for (unsigned plane = 0; plane < CG_N_PLANES; plane++) {
                cg_level_columns *columns = &p->groups[g].columns[level][plane];
                for (unsigned f = 0; f < CG_DCT; f++) {
                    if (!cg_cursor_u16(in, &columns->n_active[f]) ||
                        columns->n_active[f] > n_components[g * CG_N_PLANES + plane])
                        return CG_ERR_CORRUPT;
                }
                for (unsigned f = 0; f < CG_DCT; f++) {
                    if ((status = read_run(in, p, start, f, columns)) != CG_OK)
                        return status;
                }
            }
        }
    }
    return CG_OK;
}

/* n pieces of zeros for a basis as the kernels read it; NULL: no memory. each_bytes: a multiple of
 * 64. */
static void *take_zeros(size_t n, size_t each_bytes)
{
    size_t n_bytes;
    if (!cg_size_mul(n, each_bytes, &n_bytes))
        return NULL;
    void *memory = aligned_alloc(64, n_bytes > 0 ? n_bytes : 64);
    if (memory != NULL)
        memset(memory, 0, n_bytes);
    return memory;
}

/* To an integer; |x| is below 2^22. */
static float nearest(float x)
{
    return x + 0x1.8p23f - 0x1.8p23f;
}

/* Of the components behind the first n_exact, in place: bf16 to the numbers that they are scales
 * of. */
static void find_numbers(size_t n_channels, cg_basis *basis)
{
    for (uint32_t c = basis->n_exact; c < basis->n_components; c++) {
        uint16_t *row = basis->rows + c * n_channels;
        const float scale = basis->scale[c], most = 1 << CG_MAX_NARROW_BITS;
        float square = 0;
        for (size_t ch = 0; ch < n_channels; ch++) {
            float number = scale != 0 ? cg_bf16_to_f32(row[ch]) / scale : 0;
            number = nearest(number > most ? most : number < -most ? -most : number);
            square += number * number;
            row[ch] = (uint16_t)(int16_t)number;
        }
        basis->narrow_norm = fmaxf(basis->narrow_norm, sqrtf(square));
    }
}

static cg_status pack_analysis(const cg_profile *p, const cg_group *group, cg_basis *basis)
{
    const size_t n_pairs = cg_group_pairs(group), n_exact_pairs = cg_basis_exact_pairs(basis);
    basis->analysis =
        take_zeros((basis->n_components + 15u) / 16 + 1, n_pairs * 16 * sizeof *basis->analysis);
    basis->exact =
        take_zeros((group->n_channels + 15u) / 16 + 1, n_exact_pairs * 16 * sizeof *basis->exact);
    if (basis->analysis == NULL || basis->exact == NULL)
        return CG_ERR_NO_MEMORY;
    if (p->kernels->project_narrow != NULL)
        find_numbers(group->n_channels, basis);
    for (uint32_t c = 0; c < basis->n_components; c++) {
        const uint16_t *row = basis->rows + (size_t)c * group->n_channels;
        uint32_t *out = basis->analysis + c / 16 * n_pairs * 16 + c % 16;
        for (uint32_t ch = 0; ch < group->n_channels; ch++)
            out[ch / 2 * 16] |= (uint32_t)row[ch] << (ch % 2 * 16);
        for (uint32_t ch = 0; ch < group->n_channels && c < basis->n_exact; ch++)
            basis->exact[(ch / 16 * n_exact_pairs + c / 2) * 16 + ch % 16] |= (uint32_t)row[ch]
                                                                              << (c % 2 * 16);
    }
    return CG_OK;
}

static cg_status pack_panels(const cg_profile *p, const cg_group *group, cg_basis *basis)
{
    const size_t words = CG_PANEL_CHANNELS / 2;
    const uint32_t n_panels = (group->n_channels + p->panel_channels - 1) / p->panel_channels;
    basis->panels =
        take_zeros((size_t)n_panels * basis->n_components, words * sizeof *basis->panels);
    if (basis->panels == NULL)
        return CG_ERR_NO_MEMORY;
    for (uint32_t panel = 0; panel < n_panels; panel++) {
        const uint32_t first = panel * p->panel_channels;
        const uint32_t left = group->n_channels - first;
        const uint32_t n = left < p->panel_channels ? left : p->panel_channels;
        for (uint32_t c = 0; c < basis->n_components; c++) {
            const uint16_t *row = basis->rows + (size_t)c * group->n_channels + first;
            uint32_t *out = basis->panels + ((size_t)panel * basis->n_components + c) * words;
            for (uint32_t ch = 0; ch < n; ch++)
                out[ch / 32 * 16 + ch % 16] |= (uint32_t)row[ch] << (ch % 32 < 16 ? 0 : 16);
        }
    }
    return CG_OK;
}

static cg_status pack_tiles(const cg_group *group, cg_basis *basis)
{
    const size_t n_panels = (group->n_channels + CG_TILE - 1) / CG_TILE;
    const size_t n_deep = (basis->n_components + CG_TILE - 1) / CG_TILE;
    basis->tiles = take_zeros(n_panels * n_deep, CG_TILE * CG_TILE * sizeof *basis->tiles);
    if (basis->tiles == NULL)
        return CG_ERR_NO_MEMORY;
    for (uint32_t c = 0; c < basis->n_components; c++) {
        const uint16_t *row = basis->rows + (size_t)c * group->n_channels;
        uint16_t *out =
            basis->tiles + (c / CG_TILE) * (CG_TILE * CG_TILE) + c % CG_TILE / 2 * CG_TILE + c % 2;
        for (uint32_t ch = 0; ch < group->n_channels; ch++)
            out[ch / CG_TILE * n_deep * CG_TILE * CG_TILE +
                ch % CG_TILE / 16 * (CG_TILE * CG_TILE / 2) + ch % 16 * 2] = row[ch];
    }
    return CG_OK;
}

/* What decides on the limbs of a quad: its largest element, and the lowest bit that is set in one
 * of them. */
typedef struct quad_range {
    float largest, lowest;
} quad_range;

static quad_range find_range(const uint16_t *elements, size_t n_elements)
{
    unsigned largest = 0, lowest = 0xff + 7;
    for (size_t i = 0; i < n_elements; i++) {
        const unsigned magnitude = elements[i] & 0x7fffu;
        const unsigned bit = (magnitude >> 7) + (unsigned)__builtin_ctz(magnitude | 0x80);
        largest = magnitude > largest ? magnitude : largest;
        lowest = magnitude != 0 && bit < lowest ? bit : lowest;
    }
    return (quad_range){cg_bf16_to_f32((uint16_t)largest), ldexpf(1, (int)lowest - 127 - 7)};
}

/* The slab's units, the first of them 2^exponent, and the quads of each limb. Returns what they
 * cost. */
static unsigned try_units(const quad_range *ranges, int exponent, cg_slab *slab)
{
    unsigned cost = 0;
    for (int i = 0; i < CG_MAX_LIMBS; i++) {
        slab->unit[i] = ldexpf(1, exponent - 7 * i);
        slab->limb_quads[i] = 0;
    }
    for (uint32_t q = 0; q < slab->n_quads; q++) {
        for (unsigned i = 0; i < CG_MAX_LIMBS; i++) {
            const bool is_last = i == CG_MAX_LIMBS - 1;
            const bool has_high = i == 0 || ranges[q].lowest < slab->unit[i - 1];
            if (has_high && (is_last || ranges[q].largest > 127 * slab->unit[i + 1])) {
                slab->limb_quads[i] |= 1u << q;
                cost++;
            }
        }
        cost += ranges[q].lowest < slab->unit[CG_MAX_LIMBS - 1] ? 1000 : 0; /* not exact */
    }
    return cost;
}

static void choose_units(const quad_range *ranges, cg_slab *slab)
{
    float largest = 0;
    int exponent, best = 0;
    unsigned least = UINT_MAX;
    for (uint32_t q = 0; q < slab->n_quads; q++)
        largest = fmaxf(largest, ranges[q].largest);
    exponent =
        frexpf(largest / 127, &exponent) == 0.5f ? exponent - 1 : exponent; /* a power of two */
    exponent = exponent > -100 ? exponent : -100;
    for (int e = exponent; e < exponent + 7;
         e++) { /* a higher one where few quads have large elements */
        const unsigned cost = try_units(ranges, e, slab);
        best = cost < least ? e : best;
        least = cost < least ? cost : least;
    }
    (void)try_units(ranges, best, slab);
}

static void split_element(const cg_slab *slab, float element, int limbs[CG_MAX_LIMBS])
{
    for (unsigned i = 0; i < CG_MAX_LIMBS; i++) {
        const bool is_small = i + 1 < CG_MAX_LIMBS && fabsf(element) <= 127 * slab->unit[i + 1];
        const float limb = is_small ? 0 : nearest(element / slab->unit[i]);
        element -= limb * slab->unit[i];
        limbs[i] = (int)limb;
    }
}

static cg_status lay_slabs(const cg_group *group, cg_basis *basis)
{
    const uint32_t n_quads = (basis->n_components + CG_QUAD_COMPONENTS - 1) / CG_QUAD_COMPONENTS;
    const size_t n_elements = (size_t)basis->n_components * group->n_channels;
    basis->slabs = calloc(n_quads / CG_SLAB_QUADS + 2, sizeof *basis->slabs);
    if (basis->slabs == NULL)
        return CG_ERR_NO_MEMORY;
    for (uint32_t first = 0; first < n_quads;) {
        cg_slab *slab = &basis->slabs[basis->n_slabs++];
        const uint32_t most = first == 0 ? CG_FIRST_SLAB_QUADS : CG_SLAB_QUADS;
        quad_range ranges[CG_SLAB_QUADS];
        slab->first_component = first * CG_QUAD_COMPONENTS;
        slab->n_quads = n_quads - first < most ? n_quads - first : most;
        for (uint32_t q = 0; q < slab->n_quads; q++, first++) {
            const size_t n = (size_t)CG_QUAD_COMPONENTS * group->n_channels, at = first * n;
            ranges[q] = find_range(basis->rows + at, n_elements - at < n ? n_elements - at : n);
        }
        choose_units(ranges, slab);
        for (unsigned i = 0; i < CG_MAX_LIMBS; i++) {
            slab->offset[i] = basis->panel_bytes;
            basis->panel_bytes +=
                slab->limb_quads[i] != 0
                    ? (size_t)slab->n_quads * CG_QUAD_COMPONENTS * CG_PANEL_CHANNELS
                    : 0;
        }
    }
    return CG_OK;
}

static cg_status pack_quads(const cg_profile *p, const cg_group *group, cg_basis *basis)
{
    const uint32_t n_panels = (group->n_channels + p->panel_channels - 1) / p->panel_channels;
    const cg_status status = lay_slabs(group, basis);
    if (status != CG_OK)
        return status;
    basis->quads = take_zeros(n_panels, basis->panel_bytes);
    if (basis->quads == NULL)
        return CG_ERR_NO_MEMORY;
    memset(basis->quads, 128, n_panels * basis->panel_bytes);
    for (const cg_slab *slab = basis->slabs; slab < basis->slabs + basis->n_slabs; slab++) {
        for (uint32_t i = 0; i < slab->n_quads * CG_QUAD_COMPONENTS; i++) {
            const uint32_t c = slab->first_component + i;
            for (uint32_t ch = 0; ch < group->n_channels && c < basis->n_components; ch++) {
                int limbs[CG_MAX_LIMBS];
                split_element(slab, cg_bf16_to_f32(basis->rows[(size_t)c * group->n_channels + ch]),
                              limbs);
                uint8_t *out = basis->quads + ch / p->panel_channels * basis->panel_bytes +
                               ((size_t)i / 4 * CG_PANEL_CHANNELS + ch % p->panel_channels) *
                                   CG_QUAD_COMPONENTS +
                               i % 4;
                for (unsigned limb = 0; limb < CG_MAX_LIMBS; limb++) {
                    if (slab->limb_quads[limb] != 0)
                        out[slab->offset[limb]] = (uint8_t)(limbs[limb] + 128);
                }
            }
        }
    }
    return CG_OK;
}

/* A component in signed numbers of few bits, one after another from the lowest bit of the first
 * byte, and their scale. */
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
    if (n_channels * bits % 8 != 0 && bytes[n_bytes - 1] >> (n_channels * bits % 8) != 0)
        return CG_ERR_CORRUPT;
    for (size_t ch = 0; ch < n_channels; ch++) {
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

static cg_status read_basis(cg_cursor *in, const cg_profile *p, const cg_group *group,
                            unsigned n_components, unsigned n_wide, cg_basis *basis)
{
    const size_t n_channels = group->n_channels;
    const uint8_t *bytes;
    if (n_components * n_channels / 4 > in->left_bytes) /* at least two bits an element */
        return CG_ERR_TRUNCATED;
    basis->n_components = n_components;
    basis->n_exact = n_wide;
    basis->rows = malloc((n_components * n_channels + 1) * sizeof *basis->rows);
    basis->scale = calloc((n_components + 15) / 16 + 1, 16 * sizeof *basis->scale);
    if (basis->rows == NULL || basis->scale == NULL)
        return CG_ERR_NO_MEMORY;
    for (unsigned c = 0; c < n_components; c++) {
        uint16_t *row = basis->rows + c * n_channels;
        if (c < n_wide) {
            if (!cg_cursor_bytes(in, 2 * n_channels, &bytes))
                return CG_ERR_TRUNCATED;
            for (size_t ch = 0; ch < n_channels; ch++) {
                row[ch] = (uint16_t)cg_get_le(bytes + 2 * ch, 2);
                if (!(fabsf(cg_bf16_to_f32(row[ch])) <= MOST_BASIS))
                    return CG_ERR_CORRUPT;
            }
        } else {
            uint8_t bits;
            const cg_status status =
                read_narrow_row(in, p->is_packed, n_channels, row, &bits, &basis->scale[c]);
            if (status != CG_OK)
                return status;
            basis->n_exact += basis->n_exact == c && bits >= CG_EXACT_BITS;
        }
    }
    basis->n_exact = (basis->n_exact + 15) / 16 * 16 < n_components
                         ? (basis->n_exact + 15) / 16 * 16
                         : n_components;
    cg_status status = p->is_tiled    ? pack_tiles(group, basis)
                       : p->has_quads ? pack_quads(p, group, basis)
                                      : pack_panels(p, group, basis);
    if (status == CG_OK)
        status = pack_analysis(p, group, basis);
    free(basis->rows);
    basis->rows = NULL;
    return status;
}

/* What follows the classes, with a KLT. */
static cg_status read_klt(cg_cursor *in, cg_profile *p)
{
    const uint32_t head_dim = p->geometry.head_dim;
    p->panel_channels = CG_PANEL_CHANNELS / head_dim * head_dim;
    for (uint32_t n = CG_PANEL_CHANNELS; p->panel_channels == 0; n--)
        p->panel_channels = head_dim % n == 0 ? n : 0;
    /* A head of 514 would make panels of 2 channels, and 128 times the basis in memory. */
    if (p->panel_channels < CG_PANEL_CHANNELS / 8 && head_dim > CG_PANEL_CHANNELS)
        return CG_ERR_UNSUPPORTED;
    uint32_t tiled = head_dim;
    while (tiled % CG_TILE != 0)
        tiled += head_dim;
    p->is_tiled = p->kernels->synthesize != NULL && tiled <= 16 * CG_TILE;
    p->has_quads = !p->is_tiled && p->kernels->accumulate_quads != NULL;
    p->unit_channels = p->is_tiled                    ? tiled
                       : p->panel_channels > head_dim ? p->panel_channels
                                                      : head_dim;
    const size_t n_bases = (size_t)p->n_groups * CG_N_PLANES;
    cg_status status = CG_ERR_NO_MEMORY;
    uint16_t *n_components = malloc(n_bases * sizeof *n_components);
    uint16_t *n_wide = malloc(n_bases * sizeof *n_wide);
    if (n_components == NULL || n_wide == NULL)
        goto done;
    for (size_t i = 0; i < n_bases; i++) {
        status = CG_ERR_CORRUPT;
        if (!cg_cursor_u16(in, &n_components[i]) || !cg_cursor_u16(in, &n_wide[i]) ||
            n_wide[i] > n_components[i] || n_components[i] > p->groups[i / CG_N_PLANES].n_channels)
            goto done;
    }
    if ((status = read_columns(in, p, n_components)) != CG_OK)
        goto done;
    for (size_t i = 0; i < n_bases; i++) {
        cg_group *group = &p->groups[i / CG_N_PLANES];
        status =
            read_basis(in, p, group, n_components[i], n_wide[i], &group->basis[i % CG_N_PLANES]);
        if (status != CG_OK)
            goto done;
    }
done:
    free(n_components);
    free(n_wide);
    return status;
}

/* What follows the classes, with anchors. */
static cg_status read_anchors(cg_cursor *in, cg_profile *p)
{
    const uint8_t *start = in->at;
    cg_status status = keep_column_classes(in, p);
    for (unsigned level = 0; level <= CG_N_LOSSY && status == CG_OK;
         level++) { /* before the levels the anchors */
        for (uint32_t i = 0; i < p->n_groups * CG_N_PLANES && status == CG_OK; i++) {
            cg_group *group = &p->groups[i / CG_N_PLANES];
            cg_level_columns *columns = level == 0 ? &group->anchors[i % CG_N_PLANES]
                                                   : &group->columns[level - 1][i % CG_N_PLANES];
            if (group->n_channels > UINT16_MAX)
                return CG_ERR_UNSUPPORTED;
            columns->n_active[0] = (uint16_t)group->n_channels;
            status = read_run(in, p, start, 0, columns);
        }
    }
    return status;
}

static cg_status read_body(cg_cursor *in, cg_profile *p)
{
    cg_status status = read_tables(in, p);
    if (status == CG_OK)
        status = read_classes(in, p);
    if (status == CG_OK)
        status = p->token_transform == CG_TOKENS_ANCHORS ? read_anchors(in, p) : read_klt(in, p);
    return status == CG_OK && (in->left_bytes > 0 || (p->nests && !levels_nest(p))) ? CG_ERR_CORRUPT
                                                                                    : status;
}

cg_status cg_profile_open(const uint8_t *bytes, size_t n_bytes, cg_profile **profile_out)
{
    cg_cursor in = {bytes, n_bytes};
    *profile_out = NULL;
    cg_profile *p = calloc(1, sizeof *p);
    if (p == NULL)
        return CG_ERR_NO_MEMORY;
    p->kernels = cg_kernels_best();
    cg_status status = read_fixed(&in, p);
    if (status == CG_OK)
        status = read_body(&in, p);
    if (status != CG_OK) {
        cg_profile_free(p);
        return status;
    }
    *profile_out = p;
    return CG_OK;
}

cg_status cg_profile_open_file(const char *path, cg_profile **profile_out)
{
    cg_status status = CG_ERR_NO_MEMORY;
    uint8_t *bytes = NULL;
    *profile_out = NULL;
    FILE *file = fopen(path, "rbe");
    if (file == NULL)
        return cg_status_from_errno(errno);
    if (fseek(file, 0, SEEK_END) != 0) {
        status = CG_ERR_IO;
        goto done;
    }
    const long n_bytes = ftell(file);
    if (n_bytes < 0 || n_bytes > CG_PROFILE_MAX_BYTES) {
        status = n_bytes < 0 ? CG_ERR_IO : CG_ERR_CORRUPT;
        goto done;
    }
    rewind(file);
    bytes = malloc((size_t)n_bytes + 1);
    if (bytes == NULL)
        goto done;
    status = fread(bytes, 1, (size_t)n_bytes, file) == (size_t)n_bytes
                 ? cg_profile_open(bytes, (size_t)n_bytes, profile_out)
                 : CG_ERR_IO;
done:
    free(bytes);
    fclose(file);
    return status;
}

void cg_profile_free(cg_profile *p)
{
    if (p == NULL)
        return;
    for (uint32_t g = 0; p->groups != NULL && g < p->n_groups; g++) {
        for (unsigned plane = 0; plane < CG_N_PLANES; plane++) {
            free(p->groups[g].basis[plane].rows);
            free(p->groups[g].basis[plane].analysis);
            free(p->groups[g].basis[plane].exact);
            free(p->groups[g].basis[plane].scale);
            free(p->groups[g].basis[plane].panels);
            free(p->groups[g].basis[plane].tiles);
            free(p->groups[g].basis[plane].slabs);
            free(p->groups[g].basis[plane].quads);
        }
    }
    free(p->inv_freq);
    free(p->layer_rope);
    free(p->groups);
    free(p->mean);
    free(p->weight);
    free(p->anchor_step);
    free(p->classes);
    free(p->column_classes);
    free(p);
}

const cg_geometry *cg_profile_geometry(const cg_profile *p)
{
    return &p->geometry;
}
const cg_fingerprint *cg_profile_fingerprint(const cg_profile *p)
{
    return &p->fingerprint;
}
const cg_fingerprint *cg_profile_model(const cg_profile *p)
{
    return &p->model;
}
const char *cg_profile_preset(const cg_profile *p)
{
    return p->preset;
}
uint32_t cg_profile_n_groups(const cg_profile *p)
{
    return p->n_groups;
}
bool cg_profile_nests(const cg_profile *p)
{
    return p->nests;
}
