/* codec/basis.h - the basis of a KLT in floats, that of profiles of version 1, laid out for
 * decoding; and how bases of all versions are laid out on this CPU.
 *
 * A basis has a row for each component, with an element for each channel of a layer group's matrix.
 * A decoder adds up rows, each times its symbol. Elements are bf16. Kernels want them in an order
 * and a type of their own, of which there are three: panels, quads and tiles. Bases of version 2:
 * codec/bands.h. Bases as encoders read them: codec/analysis.h.
 *
 * Threads: read-only once made.
 */
#ifndef CG_CODEC_BASIS_H
#define CG_CODEC_BASIS_H
#include "codec/kernels.h"
#include "codec/status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    CG_MAX_NARROW_BITS = 12, /* of an element of a row that is not bf16 */
    /* Quads (four neighbouring components, kernels.h) in a slab, which is summed together: in the
     * first slab of a basis, whose elements need more limbs, and in the others. At most 32. */
    CG_FIRST_SLAB_QUADS = 8,
    CG_SLAB_QUADS = 24,
    CG_MAX_LIMBS = 4, /* numbers of 8 bits that an element of a basis is cut into */
};

/* How all bases of a profile are laid out: by what this CPU's kernels read, and by the head size. A
 * panel is a run of channels whose sums a kernel holds in registers. A unit is whole heads. */
typedef struct cg_basis_layout {
    const cg_kernels *kernels;
    /* Version 1: channels in a panel, at most CG_PANEL_CHANNELS; the rest of it is zeros. */
    uint32_t panel_channels;
    uint32_t unit_channels; /* whole heads that are rotated and stored together */
    bool is_tiled;  /* the kernels have multiply_tiles(); version 1: synthesize(), and a unit is
                       whole tiles, too */
    bool has_quads; /* not is_tiled, and the kernels take components by quads */
} cg_basis_layout;

/* Chooses the layout. kernels outlives it. is_integer: for a profile of version 2.
 * CG_ERR_UNSUPPORTED, version 1: a head size whose panels would be nearly empty. */
cg_status cg_basis_layout_init(const cg_kernels *kernels, uint32_t head_dim, bool is_integer,
                               cg_basis_layout *layout);

/* A basis as a profile's file has it, checked. */
typedef struct cg_basis_rows {
    uint32_t n_channels, n_components;
    uint32_t n_exact; /* cg_analysis's */
    uint16_t *rows;   /* bf16 [n_components][n_channels] */
    float *scale;     /* [n_components, rounded up to 16s]: of narrow components; of the others 0 */
} cg_basis_rows;

/* A slab: neighbouring components of a basis that are summed together. Their elements are cut into
 * limbs, integers of 8 bits: an element is the sum over its limbs of unit[limb] * (byte - 128). */
typedef struct cg_slab {
    uint32_t first_component, n_quads;
    uint32_t limb_quads[CG_MAX_LIMBS]; /* bit i: quad i has a limb of this number that is not zero.
                                          Most components have one limb alone */
    size_t offset[CG_MAX_LIMBS];       /* in each panel's bytes, where the limb has quads */
    float unit[CG_MAX_LIMBS];          /* each 1/128 of the one before */
} cg_slab;

/* One layer group's plane; empty with anchors. */
typedef struct cg_basis {
    uint32_t n_channels, n_components;
    /* For decoding, where the profile is_tiled: cg_kernels.synthesize()'s panels, one each 32
     * channels. */
    uint16_t *tiles;
    /* For decoding with cg_kernels.accumulate_quads(): [n_panels][panel_bytes], in them the slabs'
     * limbs. */
    cg_slab *slabs;
    uint8_t *quads;
    uint32_t n_slabs;
    size_t panel_bytes;
    /* For decoding otherwise: [n_panels][n_components][CG_PANEL_CHANNELS / 2] words; word 16k + i
     * holds the panel's channel 32k + i in its low half and 32k + 16 + i in its high half. A panel
     * is whole heads where one fits, else an even part of a head. Missing channels are zero. */
    uint32_t *panels;
} cg_basis;

/* Lays a basis out. *basis is zeros before; the caller destroys it in any case. *in stays the
 * caller's. CG_ERR_NO_MEMORY. */
cg_status cg_basis_init(const cg_basis_layout *layout, const cg_basis_rows *in, cg_basis *basis);
void cg_basis_destroy(cg_basis *basis); /* zeros are fine */

#ifdef __cplusplus
}
#endif
#endif
