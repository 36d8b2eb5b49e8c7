/* fusefs/evict.h - what a store that is too full gives up first.
 *
 * Each step takes the finest levels from an object's file, as many as it must to free space, or the
 * whole file. Steps are chosen by what they cost for each byte that they free: first what costs the
 * least. What a step costs is
 *
 *     heat x recompute x (quality before - quality after)
 *
 * heat is 1 / (a minute + the time since the last use of the chunk, or of one that goes on from
 * it). It is twice that if this use was after the writing: most of what is written is never used.
 * A use that is still to come, by a wrong clock or a wrong `touch`, counts from when it was noted.
 * recompute is what computing the chunk's KV again costs: it grows with the chunk's position,
 * because attention looks at all tokens before. quality is how good a level is: nearly 1 at L2, 0
 * without the chunk. Before, it is that of the finest level that goes, and after, of the finest
 * coarser one that stays, in whichever file. So cold chunks lose their fine levels first. Of a
 * chunk that is there at several profiles, each is a thing of its own; what was not used last of
 * them is as hot as its own last use. The last file of a chunk goes only when no chunk goes on from
 * it, for a chain is useless behind its first hole. A file that has names elsewhere, as in a
 * context, stays: giving up its names here would free nothing. So does one that a context names
 * without a link.
 * No I/O and no clock in here. Threads: pure functions.
 */
#ifndef CG_FUSEFS_EVICT_H
#define CG_FUSEFS_EVICT_H
#include "fusefs/survey.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cg_eviction {
    uint64_t freed_bytes; /* about */
    uint32_t file;        /* of the survey */
    uint8_t finest_left;  /* the file is cut behind this level; CG_N_LEVELS: it goes as a whole */
    uint32_t chunk;       /* a number below n_files, the same at each choice from one survey */
    uint32_t parent;      /* that of the chunk before it; CG_EVICT_NO_CHUNK: none */
} cg_eviction;

enum { CG_EVICT_ALL_MODELS = UINT32_MAX, CG_EVICT_NO_CHUNK = UINT32_MAX };

typedef struct cg_evict_policy {
    int64_t now_s;         /* by the store's clock, as the files' times are */
    uint64_t wanted_bytes; /* to be freed; 0: only what is due by age */
    uint32_t model;        /* index in cg_survey.models, to free bytes of; or CG_EVICT_ALL_MODELS */
    /* [level]: after so many seconds without use nothing finer than this level is kept; 0: no such
     * rule. It never takes the last file of a chunk. */
    int64_t keep_s[CG_N_LEVELS];
    bool takes_no_cuts; /* whole files only, and nothing by age: a cut needs room for a copy */
} cg_evict_policy;

/* Chooses the steps that are due by age, and those that free wanted_bytes, or all that there are.
 * At most one step for each file; they are to be done in this order. The caller frees *steps_out
 * with free(). CG_ERR_NO_MEMORY, also of a billion files. It takes 64 bytes of memory for each file
 * of the survey, and 24 for each step; none if the policy wants nothing. */
cg_status cg_evict_choose(const cg_survey *survey, const cg_evict_policy *policy,
                          cg_eviction **steps_out, size_t *n_steps_out);

#ifdef __cplusplus
}
#endif
#endif
