/* The bases of profiles of version 1, laid out in one of three ways for this CPU: panels of bf16
 * pairs (lists), tiles of bf16 (matrix units), or quads of bytes (integer products). Quads take
 * most thought: an element of bf16 becomes up to four limbs of 8 bits, and each limb is a pass of
 * the decoder. */
#include "codec/basis.h"

#include "codec/bf16.h"
#include "codec/cursor.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Heads of a unit, for integers: few, so that a batch's sums stay in the second cache, and whole
 * panels where that is possible. */
static uint32_t integer_unit(uint32_t head_dim)
{
    for (uint32_t n = head_dim; n <= CG_PANEL_CHANNELS; n += head_dim) {
        if (n % CG_BAND_CHANNELS == 0)
            return n;
    }
    return head_dim < CG_PANEL_CHANNELS ? CG_PANEL_CHANNELS / head_dim * head_dim : head_dim;
}

cg_status cg_basis_layout_init(const cg_kernels *kernels, uint32_t head_dim, bool is_integer,
                               cg_basis_layout *layout)
{
    uint32_t tiled = head_dim;
    *layout = (cg_basis_layout){.kernels = kernels};
    if (is_integer) {
        layout->unit_channels = integer_unit(head_dim);
        layout->is_tiled = kernels->integers->multiply_tiles != NULL;
        layout->has_quads = kernels->integers->accumulate_bytes != NULL;
        return CG_OK;
    }
    /* Whole heads in a panel; of a larger head its largest divisor that fits, so that panels end
     * where heads do. */
    layout->panel_channels = CG_PANEL_CHANNELS / head_dim * head_dim;
    for (uint32_t n = CG_PANEL_CHANNELS; layout->panel_channels == 0; n--)
        layout->panel_channels = head_dim % n == 0 ? n : 0;
    /* A head of 514 would make panels of 2 channels, and 128 times the basis in memory. */
    if (layout->panel_channels < CG_PANEL_CHANNELS / 8 && head_dim > CG_PANEL_CHANNELS)
        return CG_ERR_UNSUPPORTED;
    /* Heads that are whole tiles together. Where that takes more than 16 tiles, quads are used
     * instead. */
    while (tiled % CG_TILE != 0)
        tiled += head_dim;
    layout->is_tiled = kernels->inverse->synthesize != NULL && tiled <= 16 * CG_TILE;
    layout->has_quads = !layout->is_tiled && kernels->inverse->accumulate_quads != NULL;
    layout->unit_channels = layout->is_tiled                    ? tiled
                            : layout->panel_channels > head_dim ? layout->panel_channels
                                                                : head_dim;
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

/* To an integer; |x| is below 2^22. Added to 1.5 * 2^23, a float has no bits left for a fraction.
 */
static float nearest(float x)
{
    return x + 0x1.8p23f - 0x1.8p23f;
}

/* Word 16 k + i holds channels 32 k + i and 32 k + 16 + i (basis.h): a kernel gets two registers of
 * neighbouring channels from one register of words. */
static cg_status pack_panels(const cg_basis_layout *layout, const cg_basis_rows *in,
                             cg_basis *basis)
{
    const size_t words = CG_PANEL_CHANNELS / 2;
    const uint32_t n_panels =
        (in->n_channels + layout->panel_channels - 1) / layout->panel_channels;
    basis->panels =
        take_zeros((size_t)n_panels * basis->n_components, words * sizeof *basis->panels);
    if (basis->panels == NULL)
        return CG_ERR_NO_MEMORY;
    for (uint32_t panel = 0; panel < n_panels; panel++) {
        const uint32_t first = panel * layout->panel_channels;
        const uint32_t left = in->n_channels - first;
        const uint32_t n = left < layout->panel_channels ? left : layout->panel_channels;
        for (uint32_t c = 0; c < basis->n_components; c++) {
            const uint16_t *row = in->rows + (size_t)c * in->n_channels + first;
            uint32_t *out = basis->panels + ((size_t)panel * basis->n_components + c) * words;
            for (uint32_t ch = 0; ch < n; ch++)
                out[ch / 32 * 16 + ch % 16] |= (uint32_t)row[ch] << (ch % 32 < 16 ? 0 : 16);
        }
    }
    return CG_OK;
}

/* Pairs of components side by side, as the matrix units' right factor wants bf16. */
static cg_status pack_tiles(const cg_basis_rows *in, cg_basis *basis)
{
    const size_t n_panels = (in->n_channels + CG_TILE - 1) / CG_TILE;
    const size_t n_deep = (basis->n_components + CG_TILE - 1) / CG_TILE;
    basis->tiles = take_zeros(n_panels * n_deep, CG_TILE * CG_TILE * sizeof *basis->tiles);
    if (basis->tiles == NULL)
        return CG_ERR_NO_MEMORY;
    for (uint32_t c = 0; c < basis->n_components; c++) {
        const uint16_t *row = in->rows + (size_t)c * in->n_channels;
        uint16_t *out =
            basis->tiles + (c / CG_TILE) * (CG_TILE * CG_TILE) + c % CG_TILE / 2 * CG_TILE + c % 2;
        for (uint32_t ch = 0; ch < in->n_channels; ch++)
            out[ch / CG_TILE * n_deep * CG_TILE * CG_TILE +
                ch % CG_TILE / 16 * (CG_TILE * CG_TILE / 2) + ch % 16 * 2] = row[ch];
    }
    return CG_OK;
}

/* An element of 8 significant bits fits in one limb of 8 bits when its quad's elements are of about
 * one size, and needs more when they are not: two in most quads of numbers, up to four in those of
 * bf16. What decides is a quad's largest element, and the lowest bit that is set in one of them. */
typedef struct quad_range {
    float largest, lowest;
} quad_range;

static quad_range find_range(const uint16_t *elements, size_t n_elements)
{
    unsigned largest = 0, lowest = 0xff + 7;
    for (size_t i = 0; i < n_elements; i++) {
        const unsigned magnitude = elements[i] & 0x7fffu;
        /* Exponent and number of the lowest bit of the mantissa that is set: 0x80 stands for the
         * leading one, which bf16 leaves out. */
        const unsigned bit = (magnitude >> 7) + (unsigned)__builtin_ctz(magnitude | 0x80);
        largest = magnitude > largest ? magnitude : largest;
        lowest = magnitude != 0 && bit < lowest ? bit : lowest;
    }
    return (quad_range){cg_bf16_to_f32((uint16_t)largest), ldexpf(1, (int)lowest - 127 - 7)};
}

/* What the units of a slab cost: a pass of the decoder for each limb of a quad. Where an element
 * has bits below the last unit, they are lost. */
typedef struct units_cost {
    unsigned n_passes;
    bool loses_bits;
} units_cost;

/* The slab's units, the first of them 2^exponent, and the quads of each limb. */
static units_cost try_units(const quad_range *ranges, int exponent, cg_slab *slab)
{
    units_cost cost = {0, false};
    for (int i = 0; i < CG_MAX_LIMBS; i++) {
        slab->unit[i] = ldexpf(1, exponent - 7 * i);
        slab->limb_quads[i] = 0;
    }
    for (uint32_t q = 0; q < slab->n_quads; q++) {
        for (unsigned i = 0; i < CG_MAX_LIMBS; i++) {
            /* A quad needs a limb where its largest element is too large for the limbs below, and
             * an element has bits below the limb above. */
            const bool is_last = i == CG_MAX_LIMBS - 1;
            const bool has_high = i == 0 || ranges[q].lowest < slab->unit[i - 1];
            if (has_high && (is_last || ranges[q].largest > 127 * slab->unit[i + 1])) {
                slab->limb_quads[i] |= 1u << q;
                cost.n_passes++;
            }
        }
        cost.loses_bits |= ranges[q].lowest < slab->unit[CG_MAX_LIMBS - 1];
    }
    return cost;
}

/* The lowest units lose the least: 2^-29 of the largest element, as little as f32 would. Higher
 * ones need fewer passes where few quads have large elements, but each step up would double a loss,
 * which symbols of thousands multiply. So they are for slabs that lose nothing. */
static void choose_units(const quad_range *ranges, cg_slab *slab)
{
    float largest = 0;
    int exponent, best;
    for (uint32_t q = 0; q < slab->n_quads; q++)
        largest = fmaxf(largest, ranges[q].largest);
    exponent =
        frexpf(largest / 127, &exponent) == 0.5f ? exponent - 1 : exponent; /* 127 units hold it */
    best = exponent = exponent > -100 ? exponent : -100; /* the last unit is a normal float, too */
    unsigned least = try_units(ranges, exponent, slab).n_passes;
    for (int e = exponent + 1; e < exponent + 7; e++) {
        const units_cost cost = try_units(ranges, e, slab);
        if (cost.loses_bits)
            break;
        best = cost.n_passes < least ? e : best;
        least = cost.n_passes < least ? cost.n_passes : least;
    }
    (void)try_units(ranges, best, slab);
}

/* Rounded to the nearest unit, limb by limb: the rest has a sign of its own, and is at most half a
 * unit. An element that the limbs below hold is left to them. */
static void split_element(const cg_slab *slab, float element, int limbs[CG_MAX_LIMBS])
{
    for (unsigned i = 0; i < CG_MAX_LIMBS; i++) {
        const bool is_small = i + 1 < CG_MAX_LIMBS && fabsf(element) <= 127 * slab->unit[i + 1];
        const float limb = is_small ? 0 : nearest(element / slab->unit[i]);
        element -= limb * slab->unit[i];
        limbs[i] = (int)limb;
    }
}

/* Which quads form a slab, and in which units: one set of units a slab, so that a kernel multiplies
 * sums of the whole slab. */
static cg_status lay_slabs(const cg_basis_rows *in, cg_basis *basis)
{
    const uint32_t n_quads = (basis->n_components + CG_QUAD_COMPONENTS - 1) / CG_QUAD_COMPONENTS;
    const size_t n_elements = (size_t)basis->n_components * in->n_channels;
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
            const size_t n = (size_t)CG_QUAD_COMPONENTS * in->n_channels, at = first * n;
            ranges[q] = find_range(in->rows + at, n_elements - at < n ? n_elements - at : n);
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

static cg_status pack_quads(const cg_basis_layout *layout, const cg_basis_rows *in, cg_basis *basis)
{
    const uint32_t n_panels =
        (in->n_channels + layout->panel_channels - 1) / layout->panel_channels;
    const cg_status status = lay_slabs(in, basis);
    if (status != CG_OK)
        return status;
    basis->quads = take_zeros(n_panels, basis->panel_bytes);
    if (basis->quads == NULL)
        return CG_ERR_NO_MEMORY;
    /* 128 is zero: the kernels' product takes the bytes of a basis as unsigned. */
    memset(basis->quads, 128, n_panels * basis->panel_bytes);
    for (const cg_slab *slab = basis->slabs; slab < basis->slabs + basis->n_slabs; slab++) {
        for (uint32_t i = 0; i < slab->n_quads * CG_QUAD_COMPONENTS; i++) {
            const uint32_t c = slab->first_component + i;
            for (uint32_t ch = 0; ch < in->n_channels && c < basis->n_components; ch++) {
                int limbs[CG_MAX_LIMBS];
                split_element(slab, cg_bf16_to_f32(in->rows[(size_t)c * in->n_channels + ch]),
                              limbs);
                uint8_t *out = basis->quads + ch / layout->panel_channels * basis->panel_bytes +
                               ((size_t)i / 4 * CG_PANEL_CHANNELS + ch % layout->panel_channels) *
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

cg_status cg_basis_init(const cg_basis_layout *layout, const cg_basis_rows *in, cg_basis *basis)
{
    basis->n_channels = in->n_channels;
    basis->n_components = in->n_components;
    return layout->is_tiled    ? pack_tiles(in, basis)
           : layout->has_quads ? pack_quads(layout, in, basis)
                               : pack_panels(layout, in, basis);
}

void cg_basis_destroy(cg_basis *basis)
{
    free(basis->panels);
    free(basis->tiles);
    free(basis->slabs);
    free(basis->quads);
}
