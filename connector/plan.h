/* connector/plan.h - a look-up's result as bytes: what a load needs, in any process.
 *
 *   "CGPLAN\r\n" | u32 version = 4 | u32 bytes of all | model fingerprint 16 |
 *   profile fingerprint 16 | u8 dtype | u8 worst level accepted | u8 1 + fixed level | u8 policy |
 *   u32 chunk tokens | u32 first position | u32 n_tokens | u32 hit tokens | u32 prompt tokens |
 *   u32 n_chunks | u64 started (CLOCK_BOOTTIME, ns) | u64 budget of the load, ns | parent key 16 |
 *   extra key 16 | the clock's identity 16 (connector/clock.h)
 *   n_chunks times: u32 tokens | u8 level | u8 1: sizes are guessed | 2 zeros |
 *                   4 times u64 bytes at that level, 0 = not there or not accepted
 *   n_tokens times: u32 token id
 *   xxh3-128 of all before, 16
 *
 * Numbers are little-endian. Chunk keys are not in a plan: they follow from parent, extra and token
 * ids. So a plan cannot ask for a chunk under other tokens than it names. Any bytes are safe to
 * parse. Version 1 had `started` by CLOCK_REALTIME, which somebody may set, version 2 no guesses,
 * version 3 no prompt tokens. All three are refused. (A plan lives as long as its request; an older
 * one could only reach a worker that was replaced meanwhile.) Threads: pure functions; a plan is
 * read-only once made.
 */
#ifndef CG_CONNECTOR_PLAN_H
#define CG_CONNECTOR_PLAN_H
#include "codec/key.h"
#include "connector/controller.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cg_plan_chunk {
    uint32_t first_token; /* of the prompt */
    uint8_t level;        /* as the controller chose */
    bool is_guessed;      /* sizes are those of another chunk: nobody has asked for this one */
    cg_controller_chunk sizes;
} cg_plan_chunk;

typedef struct cg_plan {
    cg_fingerprint model, profile; /* profile: zeros without one */
    uint8_t dtype;
    uint8_t worst_level;
    uint8_t level_plus_1;
    uint8_t policy; /* cg_policy */
    uint32_t chunk_tokens;
    uint32_t first_position; /* of the first chunk; a multiple of chunk_tokens */
    uint32_t n_tokens;       /* of all chunks */
    uint32_t hit_tokens;     /* at most first_position + n_tokens */
    uint32_t prompt_tokens;  /* of all of it, at least first_position + n_tokens */
    uint64_t started_boot_ns, budget_ns;
    cg_key parent, extra; /* parent of the first chunk */
    cg_key clock_id;      /* whose started_boot_ns is */
    uint32_t n_chunks;
    cg_plan_chunk *chunks;
    uint32_t *tokens; /* [n_tokens] */
    cg_key *keys;     /* [1 + n_chunks]: keys[i] is chunk i's parent, keys[i + 1] its own. Computed,
                         not in the bytes */
} cg_plan;

size_t cg_plan_bytes(const cg_plan *plan);
/* Writes bytes[cg_plan_bytes(plan)]. plan->keys is not used. */
void cg_plan_write(const cg_plan *plan, uint8_t *bytes);

/* What tells a plan from any other: its last bytes, the checksum. The bytes are those that
 * cg_plan_write() wrote, or that cg_plan_parse() took. */
cg_key cg_plan_id(const uint8_t *bytes, size_t n_bytes);

/* The caller frees *plan_out with cg_plan_free(). CG_ERR_BAD_MAGIC, CG_ERR_UNSUPPORTED_VERSION,
 * CG_ERR_TRUNCATED, CG_ERR_CORRUPT, CG_ERR_NO_MEMORY. */
cg_status cg_plan_parse(const uint8_t *bytes, size_t n_bytes, cg_plan **plan_out);
void cg_plan_free(cg_plan *plan); /* NULL is fine */

#ifdef __cplusplus
}
#endif
#endif
