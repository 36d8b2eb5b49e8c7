/* connector/controller.h - at which level each chunk is loaded, and how much of the prompt is
 * recomputed instead.
 *
 * A pure function of sizes, speeds and the time that is left. The idea is that of CacheGen, SIGCOMM
 * 2024, section 5.3: when the link is slow, a coarser level now is better than a fine one too late.
 * The model of a load: chunks are read one after the other at the link's speed, from when the store
 * can have answered on, and decoded as they arrive, on all of the connector's threads.
 *
 * ttft_budget (time to first token): each chunk gets the finest level with which it and all that
 * remain still end in time. If no level ends in time, part of the prompt is recomputed. It is cut
 * where that costs least, and what is loaded gets the finest levels that still fit before the
 * recomputing.
 * min_delay: the least cost over the same choices, whatever the budget.
 *
 * The cost is the total time. A chunk or more is recomputed behind what the engine still has to
 * compute. (Less than a chunk is computed in the engine's next step, beside its other work.) Others
 * that are loaded while the engine computes wait until that is done. If the cut makes this request
 * late (with min_delay always), others' waiting counts as its own, and each late request costs the
 * budget that is left. Others are taken to have as much left. (paper knows nothing of the engine,
 * nor of the way to the store.)
 *
 * While the link's speed is unknown, all is loaded, at L2 or what is nearest to it (min_delay: L3),
 * unless the store alone answers too late, and recomputing all takes less.
 *
 * A load with a budget goes by these levels only where it cannot read coarse first and refine
 * (connector/extents.h). A look-up goes by them to tell how much of the prompt is loaded.
 * Threads: any; there is no state.
 */
#ifndef CG_CONNECTOR_CONTROLLER_H
#define CG_CONNECTOR_CONTROLLER_H
#include "codec/geometry.h"
#include "connector/prefill.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cg_policy {
    CG_POLICY_TTFT_BUDGET = 0,
    CG_POLICY_MIN_DELAY = 1,
    CG_POLICY_FIXED = 2, /* L2, or what is nearest to it */
    CG_POLICY_PAPER = 3, /* as the paper has it: decides as ttft_budget */
    CG_N_POLICIES
} cg_policy;

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
    double link_hope;                        /* it may prove so many times faster; 0: as it is */
    double latency_ns;                       /* the first byte comes no sooner */
    double queued_bytes;                     /* that other loads must have first */
    double queued_decode_ns;                 /* that decoding those takes, all threads at work */
    uint32_t queued_loads;                   /* how many; taken to end evenly along that */
    double decode_ns_per_token[CG_N_LEVELS]; /* wall time, all threads at work; 0: unknown, so that
                                                it is guessed from the bytes */
    cg_prefill_speed recompute;              /* unknown: everything is loaded */
    double engine_ns; /* the engine computes what it has before, if a chunk or more is recomputed */
    uint32_t other_tokens; /* that must be recomputed in any case */
    uint32_t end_token;    /* of the prompt, with those; 0: not known, so that
                              what is recomputed counts as a prompt's start */
} cg_controller_input;

typedef struct cg_controller_decision {
    size_t n_load;         /* chunks [0, n_load) are loaded, the rest is recomputed */
    uint64_t predicted_ns; /* reading and decoding of those; 0 while the link is unknown */
    uint64_t reserve_ns;   /* recomputing of the rest and of other_tokens; 0 while unknown */
} cg_controller_decision;

/* levels_out[n_chunks]: what lies behind n_load is filled too, with what a load would take. */
cg_controller_decision cg_controller_decide(const cg_controller_input *input, uint8_t *levels_out);

/* What decoding a chunk of so many coded bytes costs one thread, until it has been measured: rather
 * too much, for what is taken as free costs the deadline. */
double cg_controller_guess_decode_ns(uint8_t level, uint64_t bytes);

/* The level to use where wish is not there: the nearest coarser one, else the nearest finer one. */
uint8_t cg_controller_nearest(const cg_controller_chunk *chunk, uint8_t wish);

#ifdef __cplusplus
}
#endif
#endif
