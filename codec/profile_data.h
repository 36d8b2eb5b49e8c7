/* codec/profile_data.h - what is inside a cg_profile, for the codec's own modules. Bytes:
 * codec/FORMAT.md, "Profile".
 *
 * Threads: read-only once opened.
 */
#ifndef CG_CODEC_PROFILE_DATA_H
#define CG_CODEC_PROFILE_DATA_H
#include "codec/profile.h"
#include "codec/rans.h"
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    CG_DCT = 8, /* tokens of a DCT block, and its frequencies */
    CG_N_LOSSY = CG_N_LEVELS - 1,
    CG_MAX_SINKS = 8,
    CG_EXACT_BITS = 9,       /* of a component that an encoder takes for exact */
    CG_MAX_NARROW_BITS = 12, /* of an element of a basis that is no bf16 */
    CG_MAX_ROPES = 4,
    CG_PANEL_CHANNELS = 256, /* channels that a decoding kernel holds in registers */
    CG_FIRST_SLAB_QUADS =
        8, /* quads of components (kernels.h) that are summed together: in a basis the first, */
    CG_SLAB_QUADS = 24,    /* and the others; at most 32 */
    CG_MAX_LIMBS = 3,      /* numbers of 8 bits that an element of a basis is cut into */
    CG_ANCHOR_TOKENS = 10, /* an anchor, and the tokens that are coded as differences from it */
};

/* What a profile does along the tokens, and with it across the channels; numbers are those of the
 * file. */
typedef enum cg_token_transform {
    CG_TOKENS_DCT = 1,     /* 8 tokens; KLT over the channels of a group */
    CG_TOKENS_ANCHORS = 2, /* anchor and deltas over 10 tokens; channels as they are */
} cg_token_transform;

/* The columns of one level, group and plane. With anchors they are the channels, as frequency 0. */
typedef struct cg_level_columns {
    uint16_t n_active[CG_DCT];
    const uint8_t *column_class[CG_DCT]; /* [n_active[f]] */
    uint32_t n_columns;                  /* sum of n_active */
    uint32_t n_strips;
} cg_level_columns;

/* Neighbouring components of a basis in integers of 8 bits: element = sum over limbs of unit *
 * (byte - 128). */
typedef struct cg_slab {
    uint32_t first_component, n_quads;
    uint32_t limb_quads[CG_MAX_LIMBS]; /* bits: quads with a limb other than zero. One is enough for
                                          most components */
    size_t offset[CG_MAX_LIMBS];       /* in each panel's bytes, where the limb has quads */
    float unit[CG_MAX_LIMBS];          /* each 1/128 of the one before */
} cg_slab;

/* One layer group's plane; empty with anchors. */
typedef struct cg_basis {
    uint32_t n_components;
    uint16_t *rows; /* bf16 [n_components][n_channels]; only while the profile is read */
    /* Components, a multiple of 16 unless all of them, that are stored finely. An encoder takes
     * them out of its data before it projects on the others, whose coarser rows would pick them up;
     * exact: their project() pairs, of components, [channels, in sixteens][exact_pairs][16]. */
    uint32_t n_exact;
    uint32_t *exact;
    uint32_t *analysis; /* the same for encoding: cg_kernels.project()'s pairs, zeros behind
                           channels and components */
    /* Where the kernels have project_narrow(), the components behind the first n_exact are its
     * numbers; [n_components, in sixteens]: scales of the narrow ones. */
    float *scale;
    float narrow_norm;
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

typedef struct cg_group {
    uint32_t first_layer, n_layers,
        n_channels; /* n_channels: of one plane, all the group's layers */
    cg_basis basis[CG_N_PLANES];
    cg_level_columns columns[CG_N_LOSSY][CG_N_PLANES];
    cg_level_columns anchors[CG_N_PLANES]; /* of every level; empty without anchors */
} cg_group;

struct cg_kernels;

struct cg_profile {
    const struct cg_kernels *kernels; /* what the bases are laid out for */
    cg_geometry geometry;
    cg_fingerprint fingerprint, model;
    char preset[17];
    cg_token_transform token_transform;
    uint32_t rotary_dim, n_ropes, n_sinks, n_groups, n_classes; /* n_ropes: at least 1 */
    double *inv_freq;                                           /* [n_ropes][rotary_dim / 2] */
    uint8_t *layer_rope;                                        /* [n_layers] */
    float step[CG_N_LOSSY][CG_N_PLANES];
    float *mean, *weight; /* [n_layers][2][channels] */
    float *anchor_step;   /* the same; NULL without anchors */
    cg_rans_class *classes;
    cg_group *groups;
    uint8_t *column_classes; /* what column_class points into */
    uint32_t panel_channels; /* channels of a panel that count, at most CG_PANEL_CHANNELS */
    uint32_t unit_channels;  /* whole heads that are rotated and stored together */
    bool is_packed;          /* the file's narrow components have bits of their own */
    bool nests;     /* a finer level can be coded given the next coarser one: nested chunks */
    bool is_tiled;  /* unit_channels is whole tiles, too, and the kernels have synthesize() */
    bool has_quads; /* not is_tiled, and the kernels have accumulate_quads() */
};

/* Pairs of channels that a projection walks: whole tiles. */
static inline size_t cg_group_pairs(const cg_group *group)
{
    return ((size_t)group->n_channels + 31) / 32 * 16;
}

/* Pairs of components that their taking out walks. */
static inline size_t cg_basis_exact_pairs(const cg_basis *basis)
{
    return ((size_t)basis->n_exact + 31) / 32 * 16;
}

static inline const float *cg_profile_row(const cg_profile *p, const float *table, uint32_t layer,
                                          unsigned plane)
{
    return table + ((size_t)layer * CG_N_PLANES + plane) * cg_geometry_channels(&p->geometry);
}

#ifdef __cplusplus
}
#endif
#endif
