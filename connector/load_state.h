/* connector/load_state.h - a load under way, and what happens to it: chunks of a plan into paged
 * blocks.
 *
 * The reader (reader.c) reads the chunks of all loads. A chunk that arrived is verified
 * (load_verify.c), then decoded and delivered into the blocks on the pool (load_deliver.c). The
 * engine's calls are in load.c. All of them meet here. connector/fetch_plan.h decides what state a
 * chunk is in and what is read next. The functions here carry that over to the load: its progress,
 * the counters, the memory of chunks.
 *
 * Only decoding tasks write to blocks, so a load without jobs under way writes nothing: that is
 * when it may be done.
 * Threads: the runtime's lock guards the fields, except those marked constant and those of a chunk
 * that its own job writes. Functions want the lock held, unless they say otherwise.
 */
#ifndef CG_CONNECTOR_LOAD_STATE_H
#define CG_CONNECTOR_LOAD_STATE_H
#include "codec/codec.h"
#include "connector/operation.h"
#include "connector/plan.h"
#include "connector/trace.h"

/* A range of a chunk's file that has arrived. */
typedef struct cg_load_piece cg_load_piece;
struct cg_load_piece {
    cg_load_piece *next;
    uint64_t from;
    cg_io_buffer *buffer;
};

typedef struct cg_load_chunk {
    cg_job job;
    cachegen_load *load;   /* constant */
    uint32_t index;        /* constant: in the plan */
    cg_load_piece *pieces; /* the job's, while it runs */
    uint8_t *bytes;        /* the job's: the pieces put together, where they are several */
    cg_decoder *decoder;   /* the job's */
    uint8_t worst_level; /* the job's: the level that was decoded, or that of its prefix if worse */
    cg_status status;    /* the first task that failed, or CG_OK */
    uint64_t thread_ns;  /* that decoding and writing to blocks took */
    uint64_t decode_began_ns; /* of a load that is traced */
} cg_load_chunk;

struct cachegen_load {
    cg_operation op;
    const cg_kv_layout *layout;    /* constant */
    int64_t *table;                /* constant: [n_blocks] */
    uint32_t n_blocks;             /* constant */
    cg_device_mark *mark;          /* until done: what of the engine comes first, on a GPU */
    cg_plan *plan;                 /* constant */
    uint32_t from_token, to_token; /* constant: of the prompt */
    cg_fetch fetch;                /* in the runtime's plan until done */
    uint32_t n_jobs;               /* of chunks, on the pool */
    cachegen_progress progress;
    double predicted_kl;   /* of progress, which is rounded */
    uint64_t lost_ns;      /* of the engine's time, until the host knows that the load is done */
    cg_trace *trace;       /* until done; NULL: none */
    cg_load_chunk *chunks; /* [plan->n_chunks] */
};

/* The load that a fetch of the runtime's plan is part of. */
cachegen_load *cg_load_of_fetch(cg_fetch *fetch);

/* A read of a chunk was begun. It holds the load until it has ended. */
void cg_load_read_begun(cachegen_load *load);
/* The read ended at ended_ns. piece: what it brought of the chunk's file, which is the load's from
 * here on. NULL: nothing, and status says why. header: what the piece says if it is taken for the
 * start of a chunk, or NULL. */
void cg_load_read_ended(cg_runtime *runtime, const cg_fetch_read *read, cg_status status,
                        cg_load_piece *piece, const cg_chunk_header *header, uint64_t ended_ns);
/* The plan says that a chunk is to be decoded. The caller then gives what this returns to
 * cg_load_submit(). */
cg_load_chunk *cg_load_decode_begun(cg_fetch *fetch, uint32_t chunk_index);
/* Releases what has arrived of a chunk. A job calls it for its own chunk without the lock. */
void cg_load_drop_pieces(cg_load_chunk *chunk);
/* Gives the load's mark back. The lock is not needed where no job is under way. */
void cg_load_drop_mark(cachegen_load *load);
/* The last job of a chunk ended; its result stands in the chunk. */
void cg_load_decode_ended(cg_load_chunk *chunk);
/* Without the lock, for the chunk's job: the first n_bytes of its file, put together from pieces.
 */
void cg_load_copy_pieces(const cg_load_chunk *chunk, uint64_t n_bytes, uint8_t *bytes_out);
/* Whether the chunk is still worth decoding. */
bool cg_load_wants(const cg_load_chunk *chunk);

/* Completes the load if nothing is left to do. It may be gone afterwards. */
void cg_load_settle(cachegen_load *load);
/* The load's time is over: it ends with the chunks that have arrived. It may be gone afterwards. */
void cg_load_overdue(cachegen_load *load);
/* From this chunk on the load would be late, and recomputing is faster: it ends there. It may be
 * gone afterwards. */
void cg_load_shorten(cachegen_load *load, uint32_t chunk_index);
/* Asks the load to end. It may be gone afterwards. */
void cg_load_cancel(cachegen_load *load);
/* There is nothing to read with: ends all loads with status. */
void cg_loads_refuse(cg_runtime *runtime, cg_status status);
#endif
