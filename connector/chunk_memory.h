/* connector/chunk_memory.h - what look-ups, loads and saves have learnt about chunks of the store,
 * for a while.
 *
 * A bounded table, 8 places a bucket, the oldest goes first: it forgets rather than grows. An
 * answer from it can be stale by its time to live; a load finds out and the chunk is not offered
 * again until retry_ms have passed.
 * Threads: the owner locks.
 */
#ifndef CG_CONNECTOR_CHUNK_MEMORY_H
#define CG_CONNECTOR_CHUNK_MEMORY_H
#include "iouring/store.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cg_chunk_memory cg_chunk_memory;

typedef struct cg_chunk_memory_entry {
    cg_key key;      /* all zeros: the place is free */
    uint8_t probed;  /* bit n: `entry` says whether level n is there */
    uint8_t bad;     /* bit n: level n failed, until bad_until_ns */
    uint8_t damaged; /* bit n: it failed because the file is not what its name says */
    uint8_t
        prefix_level[CG_N_LEVELS]; /* provenance where it is known, until bad_until_ns; else 0 */
    uint64_t probed_ns, bad_until_ns;
    cg_store_entry entry;
} cg_chunk_memory_entry;

/* CG_ERR_NO_MEMORY. */
cg_status cg_chunk_memory_new(uint64_t positive_ttl_ns, uint64_t negative_ttl_ns,
                              cg_chunk_memory **memory_out);
void cg_chunk_memory_free(cg_chunk_memory *memory);

/* True: the levels of `needed` are known at now_ns, and *entry_out tells (bad ones are cleared from
 * bad when their time is over). False: ask the store; *entry_out still has key, bad, damaged and
 * prefix_level. */
bool cg_chunk_memory_find(cg_chunk_memory *memory, const cg_key *key, uint8_t needed,
                          uint64_t now_ns, cg_chunk_memory_entry *entry_out);
/* The store answered. */
void cg_chunk_memory_put(cg_chunk_memory *memory, const cg_key *key, uint8_t probed,
                         const cg_store_entry *entry, uint64_t now_ns);
/* Its levels were found in the store by who wanted to save them: what was held against them no
 * longer counts, and the next look-up asks. */
void cg_chunk_memory_exists(cg_chunk_memory *memory, const cg_key *key, uint8_t levels);
/* A save published a level: it is there, and no longer bad. */
void cg_chunk_memory_saved(cg_chunk_memory *memory, const cg_key *key, uint8_t level,
                           uint64_t level_bytes, uint64_t now_ns);
/* The levels of the mask failed: not offered until until_ns. damaged: their files are wrong, a save
 * may replace them. */
void cg_chunk_memory_failed(cg_chunk_memory *memory, const cg_key *key, uint8_t levels,
                            bool damaged, uint64_t until_ns);
/* A load or a save knows the provenance of a level, which holds until until_ns. */
void cg_chunk_memory_provenance(cg_chunk_memory *memory, const cg_key *key, uint8_t level,
                                uint8_t prefix_level, uint64_t until_ns);

#ifdef __cplusplus
}
#endif
#endif
