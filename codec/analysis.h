/* codec/analysis.h - the basis of a KLT as an encoder projects on it.
 *
 * An encoder projects a row (the spectrum of a block of tokens) on each component: the sum over the
 * channels of row times element is the component's coefficient. Decoders do not need these tables,
 * so they are made for the first encoder of a profile, from what the profile has kept: bf16 rows of
 * version 1 (codec/basis.h), or integers of version 2 (codec/bands.h).
 *
 * "In sixteens" is: rounded up to a multiple of 16.
 *
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
     * hold of the data. An encoder takes that out of their coefficients. 0: none are stored so, or
     * it has been taken out of the rows themselves. */
    uint32_t n_exact;
    /* What cg_klt_forward's functions read: pairs of elements, with zeros behind channels and
     * components; or, in version 2, digits where the kernels take them. */
    uint32_t *pairs;
    /* The same for what is taken out: the scalar products of the other rows with the exact ones,
     * [n_components - n_exact, in sixteens][exact_pairs][16]. Times the exact components'
     * coefficients they are what the other coefficients have picked up. NULL where there are none.
     */
    uint32_t *leaks;
    /* [n_components, in sixteens]: what the elements of components that are kept as integers are
     * multiplied by. In version 1 these are the narrow ones behind the first n_exact, where the
     * kernels have project_narrow(). In version 2 all are, and the scales are powers of two. */
    float *scale;
    float *leak_scale; /* version 2: the same of leaks */
    /* Version 2, where the kernels take digits: how many digits, 1 or 2, each sixteen of components
     * has. */
    uint8_t *n_digits, *leak_digits;
    /* The largest Euclidean norm of a row of integers: in version 1 among the components behind the
     * first n_exact; from version 2 on among all. leak_norm: version 2, among the leaks. */
    float norm, leak_norm;
    /* Of the joint matrix, else NULL. A row's reach is the sum over its bands of band_reach times
     * the Euclidean norm of the band's symbols: a bound on what they give to layer groups, in
     * steps. If it is at most most_reach[level], neither the given numbers nor the groups' sums of
     * them leave their bits, and an encoder need not compute them to know. */
    float *band_reach, most_reach[CG_N_LEVELS];
} cg_analysis;

/* Makes the tables of all the profile's bases, unless they are there. CG_ERR_NO_MEMORY: a later
 * call may succeed. */
cg_status cg_analysis_ready(const cg_profile *profile);
/* A basis's table, after cg_analysis_ready(). It lives as long as the profile. */
const cg_analysis *cg_analysis_of(const cg_profile *profile, const cg_group *group,
                                  unsigned matrix);

/* For cg_profile: what holds the tables. CG_ERR_NO_MEMORY. */
cg_status cg_analyses_new(uint32_t n_bases, struct cg_analyses **out);
void cg_analyses_free(struct cg_analyses *analyses); /* NULL is fine */

/* Pairs of channels that a projection walks: a multiple of 16. */
static inline size_t cg_analysis_pairs(uint32_t n_channels)
{
    return ((size_t)n_channels + 31) / 32 * 16;
}

/* Pairs of exact components that a projection on the leaks walks: a multiple of 16. */
static inline size_t cg_analysis_exact_pairs(const cg_analysis *analysis)
{
    return ((size_t)analysis->n_exact + 31) / 32 * 16;
}

#ifdef __cplusplus
}
#endif
#endif
