/* codec/profile_data.h - what is inside a cg_profile, for the codec's own modules.
 *
 * Bytes: codec/FORMAT.md, "Profile".
 *
 * Threads: read-only once opened.
 */
#ifndef CG_CODEC_PROFILE_DATA_H
#define CG_CODEC_PROFILE_DATA_H
#include "codec/bands.h"
#include "codec/basis.h"
#include "codec/chunk.h"
#include "codec/profile.h"
#include "codec/rans.h"
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    CG_N_LOSSY = CG_N_LEVELS - 1,
    CG_MAX_SINKS = 8,
    CG_MAX_ROPES = 4,
    CG_ANCHOR_TOKENS = 10, /* an anchor run: an anchor, and those coded as differences from it */
    CG_MOST_SHARED = 8192, /* shared components of all layer groups */
    CG_MOST_FRACTION_BITS = 8,
};

/* The columns of symbols of one level, layer group and matrix. With the DCT they are components, by
 * frequency. With anchors they are the channels, as frequency 0. With a joint matrix, symbols are
 * of a group's own components alone: column c is component n_shared + c. */
typedef struct cg_level_columns {
    uint16_t n_active[CG_DCT];
    const uint8_t *column_class[CG_DCT]; /* [n_active[f]] */
    uint32_t n_columns;                  /* sum of n_active */
    uint32_t n_strips;
} cg_level_columns;

/* A layer group: some consecutive layers. A matrix of it is the channels that are transformed
 * together: those of K, or of V; or, where the profile joins planes, of both. They stand slice by
 * slice, and a slice is one plane of one layer. A profile's joint matrix is kept as a group, too,
 * without layers: its channels are the shared components of all groups, [group][component]. */
typedef struct cg_group {
    uint32_t first_layer, n_layers;
    uint32_t n_slices;                  /* of a matrix */
    uint32_t n_channels;                /* of a matrix: of all its slices */
    uint16_t n_components[CG_N_PLANES]; /* from here on by matrix */
    uint16_t n_wide[CG_N_PLANES];       /* version 1 */
    size_t basis_offset[CG_N_PLANES];   /* version 1: in basis_bytes */
    cg_basis basis[CG_N_PLANES];        /* version 1 */
    cg_bands bands[CG_N_PLANES];        /* version 2 */
    cg_level_columns columns[CG_N_LOSSY][CG_N_PLANES];
    cg_level_columns anchors[CG_N_PLANES]; /* of every level; empty without anchors */
} cg_group;

typedef struct cg_slice {
    uint32_t layer; /* of the model */
    unsigned plane;
} cg_slice;

/* The n-th slice of a matrix: all layers of its plane; where it joins both, those of K, then those
 * of V. */
static inline cg_slice cg_group_slice(const cg_group *group, unsigned matrix, uint32_t slice)
{
    return (cg_slice){group->first_layer + slice % group->n_layers,
                      matrix + slice / group->n_layers};
}

struct cg_profile {
    const cg_kernels *kernels; /* what the bases are laid out for */
    cg_basis_layout layout;    /* zeros with anchors */
    uint64_t file_bytes;
    uint32_t version;             /* of the file */
    uint32_t n_matrices;          /* of a group: CG_N_PLANES, or 1 that joins K and V */
    uint8_t *basis_bytes;         /* version 1: the file's bases, for encoders */
    struct cg_analyses *analyses; /* codec/analysis.h; NULL with anchors */
    cg_geometry geometry;
    cg_fingerprint fingerprint, model;
    char preset_name[17];           /* as the file has it */
    const struct cg_preset *preset; /* codec/preset.h; never NULL once the head is read */
    uint32_t rotary_dim, n_ropes, n_sinks, n_groups, n_classes; /* n_ropes: at least 1 */
    double *inv_freq;                                           /* [n_ropes][rotary_dim / 2] */
    uint8_t *layer_rope;                                        /* [n_layers] */
    uint64_t
        cache_scales; /* cg_cache_scales_hash(); mean, weight and anchor_step are scaled already */
    float step[CG_N_LOSSY][CG_N_PLANES];
    float *mean, *weight; /* [n_layers][2][channels] */
    float *anchor_step;   /* the same; NULL without anchors */
    cg_rans_class *classes;
    uint8_t
        *class_of; /* [CG_N_STEP_FACTORS][n_classes], version 4: of columns, in rows of a factor */
    uint32_t n_query_heads; /* 0: unknown */
    float *query_mean;      /* [n_layers][n_query_heads][head_dim], for encoders; of K as the cache
                               has it, where that has scales. NULL where n_query_heads is 0 or
                               is_only_checked */
    cg_group *groups;       /* [n_groups], and behind them the joint one */
    bool has_joint;         /* the file has what follows; joint says it once that is read */
    const cg_group *joint;  /* the matrix over the groups' shared components; or NULL */
    uint32_t n_shared;      /* with it: of each group, its first components; a multiple of 32 */
    /* By level: shared components are given in units of 2^-fraction_bits steps. */
    uint8_t fraction_bits[CG_N_LEVELS];
    uint16_t n_given[CG_N_LOSSY][CG_DCT]; /* how many of them the joint matrix gives each group; at
                                             most n_shared */
    /* What column_class points into; version 4: [1 + CG_N_STEP_FACTORS][column_classes_bytes], the
     * columns' own classes and those that they have in rows of each factor. */
    uint8_t *column_classes;
    size_t column_classes_bytes;
    bool is_packed;       /* the file's narrow components have bits of their own */
    bool nests;           /* a finer level can be coded given the next coarser one: nested chunks */
    bool is_only_checked; /* by cg_profile_check(): no bases, and classes are in its bytes */
};

/* Fills *p from a file's bytes. Before, all of *p is zeros except kernels and is_only_checked. The
 * caller frees it with cg_profile_free() in any case. Errors of cg_profile_open(). */
cg_status cg_profile_read(const uint8_t *bytes, size_t n_bytes, cg_profile *p);

/* The part of it that reads the head, and checks the checksum: *in goes on behind the head, and
 * ends in front of the checksum. */
cg_status cg_profile_read_head(cg_cursor *in, cg_profile *p);

/* Planes of a matrix. */
static inline uint32_t cg_profile_matrix_planes(const cg_profile *p)
{
    return CG_N_PLANES / p->n_matrices;
}

/* The version of the chunks that are coded with the profile, nested ones apart. */
static inline uint32_t cg_profile_chunk_version(const cg_profile *p)
{
    return p->version == 1                          ? CG_CHUNK_VERSION_SINGLE
           : p->version == CG_PROFILE_VERSION_STEPS ? CG_CHUNK_VERSION_STEPS
           : p->joint == NULL                       ? CG_CHUNK_VERSION_ALIGNED
                                                    : CG_CHUNK_VERSION_JOINT;
}

/* Of so many tokens from a position on, those that are kept exact: the ones below n_sinks. */
static inline uint32_t cg_profile_sink_tokens(const cg_profile *p, uint32_t first_position,
                                              uint32_t n_tokens)
{
    const uint32_t n = first_position < p->n_sinks ? p->n_sinks - first_position : 0;
    return n < n_tokens ? n : n_tokens;
}

/* How many bases there are. The i-th is that of matrix i % n_matrices of groups[i / n_matrices];
 * the joint one is the last. */
static inline uint32_t cg_profile_n_bases(const cg_profile *p)
{
    return p->n_groups * p->n_matrices + (p->joint != NULL);
}

/* At multiples of how many bytes matrices and streams begin in a section (codec/rans.h). */
static inline size_t cg_profile_align(const cg_profile *p)
{
    return cg_chunk_align(cg_profile_chunk_version(p));
}

/* Channels of one plane of a group. */
static inline size_t cg_group_plane_channels(const cg_profile *p, const cg_group *group)
{
    return group->n_layers * cg_geometry_channels(&p->geometry);
}

/* A slice's row of mean, weight or anchor_step. */
static inline const float *cg_profile_row(const cg_profile *p, const float *table, cg_slice slice)
{
    return table +
           ((size_t)slice.layer * CG_N_PLANES + slice.plane) * cg_geometry_channels(&p->geometry);
}

#ifdef __cplusplus
}
#endif
#endif
