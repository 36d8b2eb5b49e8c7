/* connector/stream_plan.h - what the reader does next: which chunk to read at which level, when to
 * ask for a late one again, and when to give a read up.
 *
 * A stream is a load as the plan sees it: chunks in order, each WAITING - READING (one read, or
 * two: a late one is asked for again at a smaller level) - DECODING - DONE or FAILED. A read is one
 * chunk at one level, under way.
 *
 * The rules. (1) The stream with the earliest deadline goes first. (2) The level of its next chunk
 * comes from the controller, anew whenever the link was measured. (3) As much is under way as the
 * link moves in a quarter of a second, but at least two reads: more would only delay a change of
 * level. Until the link was measured it is one read. (4) A read that still runs when half of the
 * time that was left is gone may be in time at the smallest level. (5) A read ends by read_timeout
 * and twice the time that all bytes under way should take: what waits before it on a slow link is
 * not its fault. (6) A stream ends at a time of its own: its reads are given up then, and what was
 * not begun is not read.
 *
 * No I/O, no clock, no lock in here: it is a function of its state and of the time it is told. The
 * reader drives it with the real clock, a test or a simulator with its own. Times are nanoseconds
 * of any one clock.
 * Threads: plain data; the owner locks.
 */
#ifndef CG_CONNECTOR_STREAM_PLAN_H
#define CG_CONNECTOR_STREAM_PLAN_H
#include "connector/controller.h"
#include "connector/speeds.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cg_stream_state {
    CG_STREAM_WAITING = 0,
    CG_STREAM_READING,
    CG_STREAM_DECODING,
    CG_STREAM_DONE,
    CG_STREAM_FAILED, /* or no longer wanted */
} cg_stream_state;

typedef struct cg_stream_chunk {
    cg_stream_state state;
    uint32_t n_reads;   /* under way */
    bool asked_smaller; /* a second read of it was begun */
    uint8_t level;      /* of what is decoded */
} cg_stream_chunk;

typedef struct cg_stream cg_stream;
struct cg_stream {
    cg_stream *next; /* the plan's */
    cg_policy policy;
    bool has_fixed_level; /* levels stay as they were set */
    uint64_t deadline_ns; /* what levels are chosen by */
    uint64_t ends_at_ns;  /* then it ends with what has arrived; UINT64_MAX: never */
    uint32_t n_chunks;
    uint32_t first, end;   /* the chunks to be loaded: [first, end) */
    uint32_t next_index;   /* the next one to read */
    uint32_t first_failed; /* nothing from here on is wanted; end: none failed */
    uint32_t n_whole;      /* chunks [first, first + n_whole) are done */
    bool is_cancelled;
    double link_ns;              /* its reads' share of the time in which the link was busy */
    bool is_decided;             /* levels were chosen with the link's speed known: */
    uint32_t decided_generation; /* of the estimator */
    uint8_t *levels;             /* [n_chunks] to read at; the owner sets the first choice */
    cg_controller_chunk *sizes;  /* [n_chunks]; the owner sets them */
    cg_stream_chunk *chunks;     /* [n_chunks] */
};

typedef struct cg_stream_read {
    uint64_t id; /* never the same twice; 0: this place is free */
    cg_stream *stream;
    uint32_t chunk_index;
    uint8_t level;
    uint64_t bytes; /* expected */
    uint64_t submitted_ns;
    double meter_mark;                  /* of the link's meter */
    uint64_t smaller_at_ns, give_up_ns; /* UINT64_MAX: never */
} cg_stream_read;

typedef struct cg_stream_plan {
    /* Constant: */
    uint32_t depth;           /* reads under way, at most */
    uint64_t staging_bytes;   /* under way and not yet decoded, at most */
    uint64_t read_timeout_ns; /* of a read that nothing waits before */

    cg_stream *streams; /* unordered */
    uint32_t n_reading;
    uint64_t bytes_reading, bytes_decoding, last_id;
    cg_stream_read *reads; /* [depth] */
} cg_stream_plan;

/* CG_ERR_NO_MEMORY. */
cg_status cg_stream_plan_init(cg_stream_plan *plan_out, uint32_t depth, uint64_t staging_bytes,
                              uint64_t read_timeout_ns);
void cg_stream_plan_destroy(cg_stream_plan *plan);

/* A stream of n_chunks, all of them to be loaded, at a deadline that the owner sets.
 * CG_ERR_NO_MEMORY. */
cg_status cg_stream_init(cg_stream *stream_out, uint32_t n_chunks);
void cg_stream_destroy(cg_stream *stream);
/* Only chunks [first, end) of it are to be loaded. */
void cg_stream_cut(cg_stream *stream, uint32_t first, uint32_t end);

/* The plan reads for the stream until it is removed. */
void cg_stream_plan_add(cg_stream_plan *plan, cg_stream *stream);
void cg_stream_plan_remove(cg_stream_plan *plan, cg_stream *stream);

/* The read to begin now, late ones first; NULL: none is wise now. Each must be ended with
 * cg_stream_read_ended(), also if it cannot be begun. */
const cg_stream_read *cg_stream_next_read(cg_stream_plan *plan, cg_speeds *speeds, uint64_t now_ns);
/* The read of that id, if it is under way; else NULL. */
const cg_stream_read *cg_stream_find_read(const cg_stream_plan *plan, uint64_t id);
/* A read whose time is over, each once; NULL: none. It is under way until it has ended. */
const cg_stream_read *cg_stream_give_up(cg_stream_plan *plan, uint64_t now_ns);
/* A stream whose time is over, each once; NULL: none. It is to be failed at
 * cg_stream_first_missing(), so that it settles once what has arrived is decoded. */
cg_stream *cg_stream_overdue(cg_stream_plan *plan, uint64_t now_ns);
/* The first chunk that has not arrived; stream->end: all have. */
uint32_t cg_stream_first_missing(const cg_stream *stream);
/* When cg_stream_give_up(), cg_stream_overdue() or cg_stream_next_read() will have something new to
 * say though nothing ends before; UINT64_MAX: never. */
uint64_t cg_stream_wake_ns(const cg_stream_plan *plan);

typedef enum cg_stream_verdict {
    CG_STREAM_DROP = 0, /* another read of it is under way or was faster, or it is not wanted */
    CG_STREAM_DECODE,   /* the chunk is to be decoded, and ended with cg_stream_decode_ended() */
    CG_STREAM_FAIL,     /* the chunk cannot be had: cg_stream_failed() */
} cg_stream_verdict;

/* A read of this id ended at ended_ns, with so many bytes of the chunk, or with 0: it failed. The
 * speeds' link learns from it. */
cg_stream_verdict cg_stream_read_ended(cg_stream_plan *plan, cg_speeds *speeds, uint64_t id,
                                       uint64_t n_bytes, uint64_t ended_ns);
/* Decoding of a chunk ended. True: it is DONE, and n_whole counts on. False: it failed, or is not
 * wanted any more. */
bool cg_stream_decode_ended(cg_stream_plan *plan, cg_stream *stream, uint32_t chunk_index,
                            bool has_succeeded);
/* A chunk cannot be had: nothing from it on is wanted. False: that was so before. */
bool cg_stream_failed(cg_stream *stream, uint32_t chunk_index);

/* Whether chunk_index is wanted still. */
bool cg_stream_wants(const cg_stream *stream, uint32_t chunk_index);
/* Whether all that is wanted is done. */
bool cg_stream_is_settled(const cg_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
