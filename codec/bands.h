/* codec/bands.h - the basis of a KLT in integers: that of profiles of version 2.
 *
 * A component's elements are a multiple of numbers of few bits; 32 components are a band, which
 * shares a shift. So a sum over components is exact, and the same on every processor. With a joint
 * matrix a group's first components are multiplied by what that gives, in units of 2^-fraction_bits
 * steps, and the others by symbols. So those products are shifted by fraction_bits more, and all
 * add up. Bytes and arithmetic: codec/FORMAT.md, "Basis in bands". Threads: read-only once made.
 */
#ifndef CG_CODEC_BANDS_H
#define CG_CODEC_BANDS_H
#include "codec/basis.h"
#include "codec/cursor.h"
#include "codec/geometry.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    CG_BAND_COMPONENTS = 32,
    CG_MAX_BAND_SHIFT = 16,
    CG_MAX_ELEMENT = 1 << 14, /* of a basis, in magnitude, before the shift */
    CG_LEAST_UNIT_BITS = 8,
    CG_MOST_UNIT_BITS = 20,
    CG_SLAB_LINES = 96, /* most in a slab: 24 KB of a panel, which stay in the first cache */
    CG_LINES_SLACK = 2 * CG_DIGIT_COMPONENTS / 4, /* zeros */
};

/* Neighbouring bands of one shift and width, shared or not. Elements are bytes where a band's all
 * fit in one, else 16 bits. A line is 4 bytes a channel: a quad of components, or a pair where they
 * have 16 bits. For matrix units, of those a line holds the low digits of a quad, and the next one
 * the high digits. */
typedef struct cg_band_slab {
    uint32_t first_component, n_components;
    uint32_t first_line, n_lines;
    uint32_t shift;
    bool is_wide;
} cg_band_slab;

typedef struct cg_bands {
    /* The caller's, of cg_bands_read(). */
    uint32_t n_channels, n_components;
    unsigned unit_bits; /* of an element without its shift: 2^-unit_bits */
    uint32_t n_shared;  /* components that the joint matrix gives: a multiple of 32; 0 without */
    uint8_t fraction_bits[CG_N_LEVELS]; /* by level, with it; zeros without */
    /* What is read. */
    uint32_t n_exact; /* the first components, stored finely: see cg_analysis */
    cg_band_slab *slabs;
    uint32_t n_slabs;
    /* [n_components + 1]: sum over the components before this one of their largest elements,
     * shifted. A row of symbols (given numbers) of at most s sums to no more than s times that. */
    uint64_t *most_before;
    /* For kernels with accumulate_bytes() or multiply_tiles(): unit by unit, in it panel by panel
     * (the last may be narrower) [n_lines][channels of the panel][4]; a byte is an element + 128,
     * or for matrix units the element. Those read CG_LINES_SLACK lines behind the last. */
    uint8_t *lines;
    uint32_t n_lines;
    /* For the others: [n_units][n_components][channels of a unit]. */
    int16_t *elements;
} cg_bands;

/* The channels of a unit of the layout that are stored: whole sixteens. */
static inline size_t cg_bands_unit_channels(const cg_basis_layout *layout)
{
    return cg_padded(layout->unit_channels, 16);
}

/* Lines of that many neighbouring components. */
static inline uint32_t cg_bands_n_lines(const cg_basis_layout *layout, bool is_wide,
                                        uint32_t n_components)
{
    const uint32_t n_quads = (n_components + CG_QUAD_COMPONENTS - 1) / CG_QUAD_COMPONENTS;
    return !is_wide ? n_quads : layout->is_tiled ? 2 * n_quads : (n_components + 1) / 2;
}

/* Channels of the panel that begins at channel `at` of a unit: whole sixteens. */
static inline size_t cg_bands_panel_channels(const cg_basis_layout *layout, size_t at)
{
    const size_t left = cg_bands_unit_channels(layout) - at;
    return left < CG_BAND_CHANNELS ? left : (size_t)CG_BAND_CHANNELS;
}

/* Where the lines of that panel of the n-th unit begin. */
static inline uint8_t *cg_bands_panel(const cg_basis_layout *layout, const cg_bands *bands,
                                      size_t unit, size_t at)
{
    return bands->lines + (unit * cg_bands_unit_channels(layout) + at) * 4 * bands->n_lines;
}

/* Reads a basis of n_components rows of n_channels from *in, which moves behind it, and lays it out
 * (kernels of the layout). *bands is zeros before but for what is the caller's; the caller destroys
 * it in any case. is_only_checked: nothing is laid out. CG_ERR_TRUNCATED, CG_ERR_CORRUPT,
 * CG_ERR_NO_MEMORY. */
cg_status cg_bands_read(const cg_basis_layout *layout, bool is_only_checked, cg_cursor *in,
                        cg_bands *bands);
void cg_bands_destroy(cg_bands *bands); /* zeros are fine */

/* What a level's sum of 1 is worth, in steps. */
static inline float cg_bands_unit(const cg_bands *bands, unsigned level)
{
    return 1.0f / (float)(1u << (bands->unit_bits + bands->fraction_bits[level]));
}

/* By what a level's products with a slab are shifted. */
static inline unsigned cg_bands_shift(const cg_bands *bands, const cg_band_slab *slab,
                                      unsigned level)
{
    return slab->shift +
           (slab->first_component < bands->n_shared ? 0 : bands->fraction_bits[level]);
}

/* Component c as it is stored: row_out[n_channels]; returns the shift, with which an element's
 * value is row_out * 2^(shift - unit_bits). */
unsigned cg_bands_row(const cg_basis_layout *layout, const cg_bands *bands, uint32_t c,
                      int16_t *row_out);

#ifdef __cplusplus
}
#endif
#endif
