/* connector/lookup_state.h - a look-up: what lookup.c, looker.c and lookup_decide.c share.
 *
 * Threads: constant after the start, but for op, prefix and the answer. Those are the looker's
 * until the look-up is done.
 */
#ifndef CG_CONNECTOR_LOOKUP_STATE_H
#define CG_CONNECTOR_LOOKUP_STATE_H
#include "connector/operation.h"
#include "connector/prefix.h"

struct cachegen_lookup {
    cg_operation op;
    uint64_t started_boot_ns; /* for the plan, which crosses processes */
    uint32_t from_token;
    uint8_t level_plus_1;         /* 0: the controller chooses */
    uint64_t budget_ns, spent_ns; /* spent before the look-up */
    uint32_t asked_tokens;        /* that loads were told of; 0: the answer was there at once */
    double max_kl;                /* of what is loaded; 0: any */
    cg_prefix prefix;

    /* The answer, constant once the look-up is done. */
    cachegen_hit hit;
    uint8_t *plan;
    size_t plan_bytes;
    bool is_taken; /* the plan was: a load of it may begin; the runtime's lock */
};
#endif
