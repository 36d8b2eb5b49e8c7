/* connector/controller.h - at which level each chunk is loaded, and how much of the prompt is
 * recomputed instead.
 *
 * A pure function of sizes, speeds and the time that is left (DESIGN.md section 6; the idea:
 * CacheGen, SIGCOMM 2024, section 5.3). Model: chunks are read one after the other at the link's
 * speed and decoded as they arrive, on all of the connector's threads. ttft_budget: per chunk the
 * finest level with which all remaining chunks still end in time. If none does, the cut between
 * loading and recomputing with the least total time, then the finest levels that still fit before
 * it. min_delay: the least total time over the same choices.
 * While the link's speed is unknown: L2, or what is nearest to it, and no cut.
 */
#ifndef CG_CONNECTOR_CONTROLLER_H
#define CG_CONNECTOR_CONTROLLER_H
#include "codec/geometry.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cg_policy { CG_POLICY_TTFT_BUDGET = 0, CG_POLICY_MIN_DELAY = 1 } cg_policy;

typedef struct cg_controller_chunk {
    uint32_t n_tokens;
    uint64_t bytes[CG_N_LEVELS]; /* 0: not there or not accepted; at least one level is there */
} cg_controller_chunk;

typedef struct cg_controller_input {
    cg_policy policy;
    const cg_controller_chunk *chunks;
    size_t n_chunks;
    uint64_t budget_ns;                      /* what is left of it */
    double link_bps;                         /* 0: unknown */
    double decode_ns_per_token[CG_N_LEVELS]; /* wall time, all threads at work; 0: unknown, taken as
                                                free */
    double recompute_tokens_per_s;           /* 0: unknown: everything is loaded */
    uint32_t other_tokens;                   /* that must be recomputed in any case */
} cg_controller_input;

typedef struct cg_controller_decision {
    size_t n_load;         /* chunks [0, n_load) are loaded, the rest is recomputed */
    uint64_t predicted_ns; /* reading and decoding of those; 0 while the link is unknown */
    uint64_t reserve_ns;   /* recomputing of the rest and of other_tokens; 0 while unknown */
} cg_controller_decision;

/* levels_out[n_chunks]: what lies behind n_load is filled too, with what a load would take. */
cg_controller_decision cg_controller_decide(const cg_controller_input *input, uint8_t *levels_out);

/* The level to use where wish is not there: the nearest coarser one, else the nearest finer one. */
uint8_t cg_controller_nearest(const cg_controller_chunk *chunk, uint8_t wish);

#ifdef __cplusplus
}
#endif
#endif
