/* connector/load.h - a load: chunks of a plan into paged blocks. Between load.c (the operation, and
 * the decoding of a chunk that arrived) and reader.c (the thread that reads the chunks of all
 * loads).
 *
 * A chunk's way: WAITING - READING (one read, or two: a late one is asked for again at a smaller
 * level) - DECODING (verified, then one task a layer group and plane, on the pool) - DONE or
 * FAILED. Blocks are written by decoding tasks only, so a load without jobs under way writes
 * nothing: that is when it may be done.
 * All fields are guarded by the runtime's lock but for those marked constant, or written by a
 * chunk's own job.
 */
#ifndef CG_CONNECTOR_LOAD_H
#define CG_CONNECTOR_LOAD_H
#include "codec/codec.h"
#include "connector/operation.h"
#include "connector/plan.h"

typedef enum cg_load_state {
    CG_LOAD_WAITING = 0,
    CG_LOAD_READING,
    CG_LOAD_DECODING,
    CG_LOAD_DONE,
    CG_LOAD_FAILED,
} cg_load_state;

typedef struct cg_load_chunk {
    cg_job job;
    cachegen_load *load; /* constant */
    uint32_t index;      /* constant: in the plan */
    cg_load_state state;
    uint32_t n_reads; /* under way */
    bool asked_smaller;
    uint8_t level; /* of what is decoded; its worst with provenance: */
    uint8_t worst_level;
    cg_io_buffer *buffer; /* the job's, while it runs */
    cg_decoder *decoder;  /* the job's */
    cg_status status;     /* the first task that failed, or CG_OK */
    uint64_t decode_ns;
} cg_load_chunk;

struct cachegen_load {
    cg_operation op;
    const cg_kv_layout *layout;    /* constant */
    int64_t *table;                /* constant */
    cg_plan *plan;                 /* constant */
    uint32_t from_token, to_token; /* constant */
    uint32_t first, end;           /* constant: the plan's chunks that hold them */
    uint64_t deadline_ns;          /* constant; CLOCK_MONOTONIC */

    cachegen_load *next; /* in the runtime's list, until done */
    uint32_t n_jobs;     /* each read under way holds the operation, too */
    bool cancelled;
    uint32_t next_index;  /* the next chunk to read */
    uint32_t fail_index;  /* the first chunk that failed; end: none */
    uint32_t whole_index; /* chunks [first, whole_index) are in the blocks */
    uint32_t n_reading;   /* reads under way, and since when */
    uint64_t reading_since_ns;
    uint32_t decided_generation; /* of the estimator, when levels were chosen */
    bool decided;
    uint8_t *levels;            /* [plan->n_chunks] */
    cg_controller_chunk *sizes; /* [plan->n_chunks] */
    cachegen_progress progress;
    cg_load_chunk *chunks; /* [plan->n_chunks] */
};

/* All with the lock held. */

/* A read of a chunk ended: with a buffer, which becomes the chunk's and whose job the caller then
 * submits with cg_load_submit(); or with a status, which fails the chunk unless another read of it
 * is under way. True: submit. */
bool cg_load_read_ended(cg_load_chunk *chunk, uint8_t level, cg_status status, cg_io_buffer *buffer,
                        uint64_t completed_ns);
/* A read was begun. */
void cg_load_read_begun(cg_load_chunk *chunk, uint64_t now_ns);
/* Whether anything of this load is still to be read. */
bool cg_load_wants(const cachegen_load *load);
/* The level to read the load's next chunk at. */
uint8_t cg_load_level(cachegen_load *load);
/* Completes the load if nothing is left to do. */
void cg_load_settle(cachegen_load *load);
/* All loads are asked to end. */
void cg_loads_cancel(cg_runtime *runtime);

/* Without the lock: hands a chunk that was read to the pool. */
void cg_load_submit(cg_load_chunk *chunk);
#endif
