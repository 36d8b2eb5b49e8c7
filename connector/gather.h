/* connector/gather.h - brings the KV heads of chunks together, from the ranks of a tensor-parallel
 * engine to the one that stores them.
 *
 * The rank that has head 0 listens. Each other one copies its heads of a save's chunks into memory
 * of its own, a *part*, and passes that on: a sealed memfd, over a unix socket. So a rank that dies
 * leaves nothing behind, and handing over costs no second copy and never waits. Ranks find
 * each other by the name of their rank set (connector/host_socket.h): all are of one host, network
 * namespace and user.
 *
 * Each save has a number, the same on all ranks and rising; the parts of a save are found by it. A
 * rank sends its parts in the order in which they were begun, however long each is in the making.
 * Whoever gets a later number knows that no earlier one will come. So if a part fails, a refusal
 * tells the listener, which is that save's number alone; or the next part does. A refusal takes
 * neither memory nor a descriptor, once a rank is connected. Keys and levels of prefixes are
 * compared, too: ranks that number differently lose saves, and never store wrong KV.
 *
 * What it does not do: wait longer than it is told to. A part that does not come costs the save.
 * One that nobody asks for is dropped with those of the next save.
 * Memory: what a sender makes, or has passed on and the listener has not dropped yet, is at most
 * limit_bytes, but for a single part that is larger.
 * Threads: any thread may send; one thread at a time receives. After fork() it is the parent's.
 */
#ifndef CG_CONNECTOR_GATHER_H
#define CG_CONNECTOR_GATHER_H
#include "codec/key.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cg_gather cg_gather;

typedef struct cg_gather_config {
    const char *rank_set;         /* its name */
    cg_geometry geometry;         /* the model's */
    uint32_t first_head, n_heads; /* this rank's; head 0's listens */
    uint64_t limit_bytes;
} cg_gather_config;

/* A chunk's identity. */
typedef struct cg_gather_chunk {
    cg_key key;
    uint32_t n_tokens;
    uint32_t prefix_level;
} cg_gather_chunk;

/* The caller frees *gather_out. CG_ERR_EXISTS: another one listens for this rank set;
 * CG_ERR_NO_MEMORY, or what the system says. */
cg_status cg_gather_new(const cg_gather_config *config, cg_gather **gather_out);
void cg_gather_free(cg_gather *gather); /* NULL is fine */
bool cg_gather_listens(const cg_gather *gather);
/* Whether these are this rank's heads. */
bool cg_gather_is_of(const cg_gather *gather, uint32_t first_head, uint32_t n_heads);

/* ---- the sending ranks ---- */

/* A part that is being made: data[i] is for chunk i, [2][n_layers][n_tokens][n_heads][head_dim]. */
typedef struct cg_gather_part {
    struct cg_gather_turn *turn;
    uint8_t *map;
    uint8_t **data;
} cg_gather_part;

/* Memory for the part of the save with this number, for cg_gather_send() or cg_gather_abandon() to
 * take: until then those that were begun later wait. CG_ERR_AGAIN: there is none within
 * limit_bytes. CG_ERR_NO_MEMORY. Then the listener is told that this save's part does not come. */
cg_status cg_gather_begin(cg_gather *gather, uint64_t number, const cg_gather_chunk *chunks,
                          uint32_t n_chunks, cg_gather_part *part_out);
/* Passes it on, or drops it. CG_OK, too: it waits for those begun before it, and is passed on or
 * dropped after them. CG_ERR_NOT_FOUND: nobody listens. CG_ERR_AGAIN: the listener is far behind.
 * CG_ERR_PERMISSION: it is another user's. CG_ERR_CANCELLED: somebody else has the memory mapped,
 * and the listener is told that the part does not come. */
cg_status cg_gather_send(cg_gather *gather, cg_gather_part *part);

/* Drops it, and tells the listener that it does not come. */
void cg_gather_abandon(cg_gather *gather, cg_gather_part *part);
/* The same of a save whose part is not begun. */
void cg_gather_refuse(cg_gather *gather, uint64_t number);

/* ---- the rank that listens ---- */

/* Copies the other ranks' heads of a chunk of the save with this number into raw,
 * [2][n_layers][n_tokens][n_kv_heads][head_dim], once all have come. If they have not, waits up to
 * timeout_ms for something to come. CG_ERR_AGAIN: not yet, and raw is untouched. CG_ERR_CANCELLED:
 * they will not come, since a rank had no memory for them, or has other chunks under this number;
 * or this is not the process that listens. */
cg_status cg_gather_take(cg_gather *gather, uint64_t number, const cg_gather_chunk *chunk,
                         uint8_t *raw, int timeout_ms);
/* Parts of this save and of those before it are of no more use. */
void cg_gather_drop(cg_gather *gather, uint64_t number);

#ifdef __cplusplus
}
#endif
#endif
