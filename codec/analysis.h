/* codec/analysis.h - the basis of a KLT as an encoder projects on it.
 *
 * Decoders do not need it, so it is made for the first encoder of a profile. Its source is what a
 * profile has kept: bf16 rows of version 1 (codec/basis.h), integers of version 2 (codec/bands.h).
 * Threads: cg_analysis_ready() may be called by any; what it made is read-only.
 */
#ifndef CG_CODEC_ANALYSIS_H
#define CG_CODEC_ANALYSIS_H
#include "codec/profile_data.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cg_analysis {
    uint32_t n_channels, n_components;
    /* The first components, whose rows are stored finely: a multiple of 16, or all. Rows that are
     * stored coarsely are not quite orthogonal to them, and pick up what the largest components
     * hold of the data. An encoder takes that out of their coefficients. */
    uint32_t n_exact;
    /* cg_kernels.project()'s pairs, zeros behind channels and components; or, in version 2, digits
     * where the kernels take them. */
    uint32_t *pairs;
    /* The same of what is taken out, from coefficients of the exact components to those of the
     * others: [n_components - n_exact, in sixteens][exact_pairs][16], of the rows' scalar products.
     * NULL where there are none. */
    uint32_t *leaks;
    /* [n_components, in sixteens]: of components that are integers, what they are scaled with. In
     * version 1 they are the narrow ones behind the first n_exact, where the kernels have
     * project_narrow(). In version 2 all are, and the scales are powers of two. */
    float *scale;
    float *leak_scale; /* version 2: the same of leaks */
    /* Version 2, where the kernels take digits: how many the numbers of sixteen components have. */
    uint8_t *n_digits, *leak_digits;
    /* The largest Euclidean norm of integers: in version 1 of the components behind the first
     * n_exact; in version 2 of all, and of leaks. */
    float norm, leak_norm;
    /* Of the joint matrix, else NULL: how far symbols of a band of components can reach, per unit
     * of their Euclidean norm [bands]. The sum over a row's bands is a bound on the norm of what it
     * gives the groups, in steps. Up to most_reach neither those numbers nor the groups' sums of
     * them leave their bits, and an encoder need not look at them. */
    float *band_reach, most_reach[CG_N_LEVELS];
} cg_analysis;

/* Makes the tables of all the profile's bases, unless they are there. CG_ERR_NO_MEMORY: a later
 * call may succeed. */
cg_status cg_analysis_ready(const cg_profile *profile);
/* A basis's table, after cg_analysis_ready(). */
const cg_analysis *cg_analysis_of(const cg_profile *profile, const cg_group *group,
                                  unsigned matrix);

/* For cg_profile: what holds the tables. CG_ERR_NO_MEMORY. */
cg_status cg_analyses_new(uint32_t n_bases, struct cg_analyses **out);
void cg_analyses_free(struct cg_analyses *analyses); /* NULL is fine */

/* Pairs of channels that a projection walks: whole tiles. */
static inline size_t cg_analysis_pairs(uint32_t n_channels)
{
    return ((size_t)n_channels + 31) / 32 * 16;
}

/* Pairs of exact components that taking them out walks. */
static inline size_t cg_analysis_exact_pairs(const cg_analysis *analysis)
{
    return ((size_t)analysis->n_exact + 31) / 32 * 16;
}

#ifdef __cplusplus
}
#endif
#endif
