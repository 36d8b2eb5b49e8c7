/* codec/bands.h - the basis of a KLT in integers: that of profiles of version 2.
 *
 * An element is a number of few bits times its component's multiple; 32 components are a band,
 * which has one shift. So a sum over components is one of integers: exact, and the same on every
 * processor.
 *
 * With a joint matrix, a layer group's first components are multiplied by the numbers that it
 * gives, in units of 2^-fraction_bits steps. The others are multiplied by symbols, in steps; these
 * products are shifted by fraction_bits more, so that all add up.
 *
 * Bytes and arithmetic: codec/FORMAT.md, "Basis in bands". Threads: read-only once made.
 */
#ifndef CG_CODEC_BANDS_H
#define CG_CODEC_BANDS_H
#include "codec/basis.h"
#include "codec/geometry.h"
#include "codec/stored_bands.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    CG_LEAST_UNIT_BITS = 8,
    CG_MOST_UNIT_BITS = 20,
    CG_SLAB_LINES =
        96, /* most in a slab: 24 KB of a panel of 64 channels, which stay in the first cache */
    CG_LINES_SLACK = 2 * CG_DIGIT_COMPONENTS / 4, /* lines of zeros that multiply_tiles() reads */
};

/* A slab: neighbouring bands that are summed together. They have one shift and one width, and are
 * all shared components or none. Elements are bytes where all of a band fit in one; otherwise the
 * band is wide, and they have 16 bits. A line is what kernels take at once: 4 bytes for each
 * channel. They are the elements of a quad of components, or of a pair where they are wide. For
 * matrix units, which take bytes alone, wide elements are two digits: a line holds the low ones of
 * a quad, and the next line the high ones. */
typedef struct cg_band_slab {
    uint32_t first_component, n_components;
    uint32_t first_line, n_lines;
    uint32_t shift;
    bool is_wide;
} cg_band_slab;

typedef struct cg_bands {
    /* The caller's, of cg_bands_read(). */
    uint32_t n_channels, n_components;
    unsigned unit_bits; /* an element of 1, without its shift, means 2^-unit_bits */
    uint32_t n_shared;  /* components that the joint matrix gives: a multiple of 32; 0 without */
    uint8_t fraction_bits[CG_N_LEVELS]; /* by level, with it; zeros without */
    /* What is read. */
    uint32_t n_exact; /* the first components, stored finely: see cg_analysis */
    cg_band_slab *slabs;
    uint32_t n_slabs;
    /* [n_components + 1]: sum over the components before this one of the largest magnitude that
     * each's elements can have, shifted. So symbols, or given numbers, of at most s sum to no more
     * than s times that. */
    uint64_t *most_before;
    /* For kernels with accumulate_bytes() or multiply_tiles(): unit by unit, and in a unit panel by
     * panel (the last may be narrower), [n_lines][channels of the panel][4]. A byte is an element +
     * 128 or, for matrix units, the element itself. Matrix units read CG_LINES_SLACK lines behind
     * the last. */
    uint8_t *lines;
    uint32_t n_lines;
    /* For the others, as many bytes: unit by unit, and in a unit slab by slab,
     * [n_components][channels of the unit], of 8 or 16 bits. */
    uint8_t *elements;
} cg_bands;

/* Channels that a unit of the layout is stored with: rounded up to a multiple of 16. */
static inline size_t cg_bands_unit_channels(const cg_basis_layout *layout)
{
    return cg_padded(layout->unit_channels, 16);
}

/* Lines that n_components neighbouring components of one slab take. */
static inline uint32_t cg_bands_n_lines(const cg_basis_layout *layout, bool is_wide,
                                        uint32_t n_components)
{
    const uint32_t n_quads = (n_components + CG_QUAD_COMPONENTS - 1) / CG_QUAD_COMPONENTS;
    return !is_wide ? n_quads : layout->is_tiled ? 2 * n_quads : (n_components + 1) / 2;
}

/* Channels of the panel that begins at channel `at` of a unit: a multiple of 16. */
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

/* Where the elements of component i of a slab begin, in the n-th unit. */
static inline uint8_t *cg_bands_elements(const cg_basis_layout *layout, const cg_bands *bands,
                                         size_t unit, const cg_band_slab *slab, uint32_t i)
{
    const size_t n_lines = unit * bands->n_lines + slab->first_line;
    return bands->elements +
           (4 * n_lines + (slab->is_wide ? 2 : 1) * i) * cg_bands_unit_channels(layout);
}

/* Reads a basis of n_components rows of n_channels from *in, which moves behind it, and lays it out
 * for the layout's kernels. The caller has filled the first fields of *bands, as said there, and
 * the rest with zeros; it destroys *bands in any case. is_only_checked: the bytes are checked, and
 * nothing is laid out. CG_ERR_TRUNCATED, CG_ERR_CORRUPT, CG_ERR_NO_MEMORY. */
cg_status cg_bands_read(const cg_basis_layout *layout, bool is_only_checked, cg_cursor *in,
                        cg_bands *bands);
void cg_bands_destroy(cg_bands *bands); /* zeros are fine */

/* How many steps a sum of 1 means at a level: 2^-(unit_bits + fraction_bits). */
static inline float cg_bands_unit(const cg_bands *bands, unsigned level)
{
    return 1.0f / (float)(1u << (bands->unit_bits + bands->fraction_bits[level]));
}

/* Bits by which products with a slab's elements are shifted at a level. */
static inline unsigned cg_bands_shift(const cg_bands *bands, const cg_band_slab *slab,
                                      unsigned level)
{
    return slab->shift +
           (slab->first_component < bands->n_shared ? 0 : bands->fraction_bits[level]);
}

/* Component c's elements as they are stored, to row_out[n_channels]. Returns its shift: an element
 * means row_out[ch] * 2^(shift - unit_bits). */
unsigned cg_bands_row(const cg_basis_layout *layout, const cg_bands *bands, uint32_t c,
                      int16_t *row_out);

#ifdef __cplusplus
}
#endif
#endif
