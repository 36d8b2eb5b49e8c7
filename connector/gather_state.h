/* connector/gather_state.h - what the two halves of connector/gather.h share: that of the ranks
 * which send (gather_send.c), and that of the rank which listens (gather_take.c).
 * Threads: said at the fields.
 */
#ifndef CG_CONNECTOR_GATHER_STATE_H
#define CG_CONNECTOR_GATHER_STATE_H
#include "connector/gather.h"

#include <pthread.h>
#include <sys/types.h>

enum {
    CG_GATHER_MAX_RANKS = 256,
    CG_GATHER_ALIGNMENT = 64,     /* of a part's data */
    CG_GATHER_MAGIC = 0x32706763, /* of this version's parts */
};

/* A part's memory: the head, the chunks, then their data. A message with it is the memory's
 * descriptor and size; one without is a head without chunks, a refusal. Sender and listener are of
 * one machine. */
typedef struct cg_gather_head {
    uint32_t magic, n_chunks;
    uint32_t first_head, n_heads;
    uint64_t number;
} cg_gather_head;

struct cg_gather {
    cg_gather_config config; /* constant; rank_set is not kept */
    pid_t pid;               /* constant: of the process that it works in */
    cg_key name;             /* constant: of its socket */
    int listener;            /* constant; -1: this one sends */

    /* What listens: one thread at a time. */
    int connections[CG_GATHER_MAX_RANKS];
    uint32_t n_connections;
    struct cg_gather_received *parts;

    /* What sends. */
    pthread_mutex_t lock;
    int sender;                           /* the lock; -1: not connected */
    uint64_t passed_bytes;                /* the lock: that the listener has not dropped yet */
    uint64_t begun_bytes;                 /* the lock: of all turns */
    uint64_t refused;                     /* the lock: the last save whose part does not come, until
                                             the listener is told; 0: none */
    struct cg_gather_turn *first, **last; /* the lock: turns, as they were begun */
};

static inline uint64_t cg_gather_chunk_bytes(const cg_gather *g, uint32_t n_tokens,
                                             uint32_t n_heads)
{
    const cg_geometry *m = &g->config.geometry;
    return (uint64_t)CG_N_PLANES * m->n_layers * n_tokens * n_heads * m->head_dim *
           cg_dtype_bytes(m->dtype);
}

static inline cg_gather_head cg_gather_head_of(const cg_gather *g, uint64_t number,
                                               uint32_t n_chunks)
{
    return (cg_gather_head){.magic = CG_GATHER_MAGIC,
                            .n_chunks = n_chunks,
                            .first_head = g->config.first_head,
                            .n_heads = g->config.n_heads,
                            .number = number};
}

static inline uint64_t cg_gather_data_begin(uint32_t n_chunks)
{
    const uint64_t end = sizeof(cg_gather_head) + n_chunks * sizeof(cg_gather_chunk);
    return (end + CG_GATHER_ALIGNMENT - 1) / CG_GATHER_ALIGNMENT * CG_GATHER_ALIGNMENT;
}

/* For cg_gather_free(). */
void cg_gather_free_turns(cg_gather *g);
void cg_gather_free_parts(cg_gather *g);
#endif
