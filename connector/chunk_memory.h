/* connector/chunk_memory.h - what a connector remembers of chunks, for a while.
 *
 * Look-ups learn which levels of a chunk the store has; loads learn that a level is bad; saves
 * learn that it is there. All of it is kept by the chunk's key, so that the next look-up need not
 * ask the store. What is remembered may be wrong by then, for as long as its time to live. Then a
 * load finds out, and the level is not offered again for a while (cg_handle_retry_ns()).
 * Of a file that was replaced since, it learns the sizes from the file (cg_fetch_replaced()). The
 * memory is bounded: 2,048 buckets of 8 entries. It forgets the oldest rather than grow.
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
    uint8_t prefix_level[CG_N_LEVELS]; /* what a load found out of provenance, until bad_until_ns;
                                          else 0. What `entry` says of it was asked for before. */
    bool is_doubted; /* a load has found another chunk to be something else than was guessed, until
                        bad_until_ns: what is guessed of this one may be wrong, too */
    uint64_t probed_ns, bad_until_ns;
    cg_store_entry entry;
} cg_chunk_memory_entry;

/* CG_ERR_NO_MEMORY. */
cg_status cg_chunk_memory_new(uint64_t positive_ttl_ns, uint64_t negative_ttl_ns,
                              cg_chunk_memory **memory_out);
void cg_chunk_memory_free(cg_chunk_memory *memory);

/* Fills *entry_out with what is known at now_ns; bad levels whose time is over are no longer bad.
 * True: the entry answers for the levels of `needed`. False: ask the store; of *entry_out only key,
 * bad, damaged, prefix_level and is_doubted are valid. */
bool cg_chunk_memory_find(cg_chunk_memory *memory, const cg_key *key, uint8_t needed,
                          uint64_t now_ns, cg_chunk_memory_entry *entry_out);
/* The store was asked for the levels of `probed` and answered with entry. */
void cg_chunk_memory_put(cg_chunk_memory *memory, const cg_key *key, uint8_t probed,
                         const cg_store_entry *entry, uint64_t now_ns);
/* A save found these levels in the store, or a load that their file is not the one whose sizes are
 * remembered. What was held against them no longer counts; the next look-up asks. */
void cg_chunk_memory_exists(cg_chunk_memory *memory, const cg_key *key, uint8_t levels);
/* A save published a level, of that provenance. It is there, and no longer bad. */
void cg_chunk_memory_saved(cg_chunk_memory *memory, const cg_key *key, uint8_t level,
                           uint64_t level_bytes, uint8_t prefix_level, uint64_t now_ns);
/* Loading these levels (a mask) failed: they are not offered until until_ns. damaged: their files
 * are wrong, and a save may replace them. */
void cg_chunk_memory_failed(cg_chunk_memory *memory, const cg_key *key, uint8_t levels,
                            bool damaged, uint64_t until_ns);
/* Until until_ns nothing is to be guessed of this chunk. */
void cg_chunk_memory_doubt(cg_chunk_memory *memory, const cg_key *key, uint64_t until_ns);
/* A load found out what prefix a level was computed on; that is known until until_ns. */
void cg_chunk_memory_provenance(cg_chunk_memory *memory, const cg_key *key, uint8_t level,
                                uint8_t prefix_level, uint64_t until_ns);

#ifdef __cplusplus
}
#endif
#endif
