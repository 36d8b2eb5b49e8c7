/* connector/prefix.h - the longest prefix of a prompt that a store has.
 *
 * A prompt is cut into full chunks, and may end in a tail: a shorter chunk, whose end is at a
 * multiple of tail_multiple tokens. A chunk's key names all tokens before it, too, so the first
 * chunk that is missing ends the prefix. Only a tail may still follow, left by a prompt that ended
 * there.
 * Answers come from the runtime's memory of chunks or, with a cg_io, from the store. The store is
 * asked in at most three batches, since it may be a network away; the questions of a batch go out
 * together. The first batch, for long prompts only, is a coarse look at how far the prefix can
 * reach. The second asks for all chunks, the third for tails at a hole.
 * Threads: a cg_prefix is used by one thread at a time. Functions take the runtime's lock
 * themselves, for moments.
 */
#ifndef CG_CONNECTOR_PREFIX_H
#define CG_CONNECTOR_PREFIX_H
#include "connector/plan.h"
#include "connector/runtime.h"

typedef struct cg_prefix {
    cg_runtime *runtime;
    uint32_t *tokens; /* the whole prompt */
    uint32_t n_tokens;
    cg_key root, extra;
    uint8_t worst_level;          /* provenance worse than this is not accepted */
    uint8_t accepted;             /* mask of levels that may be loaded */
    uint64_t deadline_ns;         /* CLOCK_MONOTONIC: no question to the store lasts longer */
    uint32_t first_chunk, n_full; /* chunks before first_chunk are not looked for */
    cg_key *keys;                 /* [n_full] */

    /* Found so far: chunks [first_chunk, first_chunk + n_chunks) with their accepted levels. */
    cg_plan_chunk *chunks; /* room for [n_full - first_chunk + 1] */
    uint32_t n_chunks;
    bool queue_failed; /* the cg_io did, and is of no more use */
    bool timed_out;    /* the store left a question open until deadline_ns */
} cg_prefix;

/* Copies what it needs of a request that was checked. The caller sets worst_level and accepted,
 * deadline_ns before the store is asked, and calls cg_prefix_destroy() also after an error.
 * CG_ERR_NO_MEMORY. */
cg_status cg_prefix_init(cg_prefix *prefix_out, cg_runtime *runtime,
                         const cachegen_request *request, uint32_t from_token);
void cg_prefix_destroy(cg_prefix *prefix);

/* Looks for the prefix from its start. CG_ERR_AGAIN: io is NULL and the runtime does not remember
 * enough; call again with one, which must be idle. CG_ERR_NO_MEMORY: what was found until then
 * stands. */
cg_status cg_prefix_find(cg_prefix *prefix, cg_io *io);
#endif
