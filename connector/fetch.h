/* connector/fetch.h - what the reader brings of a load, as the plan of reads sees it: chunks in
 * order, and how much of each has arrived.
 *
 * A chunk is WAITING at first. It is READING when ranges of its file have been asked for; they are
 * asked for in order, and arrive in any order. What has arrived without a gap from the start of the
 * file is enough for some level, or none. Then the chunk is DECODING, once, at one level, and ends
 * as DONE or FAILED.
 * Threads: plain data; the owner locks.
 */
#ifndef CG_CONNECTOR_FETCH_H
#define CG_CONNECTOR_FETCH_H
#include "codec/status.h"
#include "connector/quality.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cg_fetch_state {
    CG_FETCH_WAITING = 0,
    CG_FETCH_READING, /* or waiting for more to be asked for */
    CG_FETCH_DECODING,
    CG_FETCH_DONE,
    CG_FETCH_FAILED, /* or no longer wanted */
} cg_fetch_state;

typedef struct cg_fetch_chunk {
    cg_fetch_state state;
    bool is_nested;         /* its lossy levels are one file */
    bool is_guessed;        /* its sizes are another chunk's or file's, until its first range has
                               arrived */
    bool is_short;          /* and its file is shorter than the first range that was asked for */
    bool is_sized;          /* the start of its file has said its sizes */
    bool is_cut;            /* a range could not be had: no more is asked for */
    bool is_put_off;        /* it may be refined once those before it are decoded */
    uint8_t file_level;     /* of the name that is read */
    uint8_t planned;        /* it is read to this level */
    uint8_t hoped;          /* the finest level that the link can be expected to bring */
    uint8_t level;          /* of what is decoded */
    uint32_t n_reads;       /* under way */
    uint64_t asked_bytes;   /* of the file, from its start */
    uint64_t arrived_bytes; /* of those, without a gap */
    uint64_t good_bytes;    /* what lies behind could not be had */
    uint64_t held_bytes;    /* that arrived, also behind a gap */
} cg_fetch_chunk;

/* Chunks to decode, by the level at which they are. */
typedef struct cg_fetch_work {
    uint32_t n_tokens[CG_N_LEVELS];
    uint64_t bytes[CG_N_LEVELS];
} cg_fetch_work;

/* What is still to be done of a fetch: connector/fetch_exit.c's. */
typedef struct cg_fetch_todo {
    bool is_counted;      /* false: a chunk, a level or wanted_end has changed since */
    double missing_bytes; /* to come until all that is wanted can be decoded */
    cg_fetch_work undecoded, decoding;
} cg_fetch_todo;

typedef struct cg_fetch cg_fetch;
struct cg_fetch {
    cg_fetch *next; /* the plan's */
    cg_policy policy;
    const cg_quality *quality; /* the owner's; built-in unless it says so */
    bool has_fixed_level;      /* levels stay as they were set */
    uint64_t deadline_ns;      /* what levels are chosen by */
    uint64_t decode_at_ns;     /* decoding must start then to meet it; the plan's */
    uint64_t ends_at_ns;       /* then it ends with what has arrived; UINT64_MAX: never */
    uint64_t silent_from_ns;   /* from then on it also ends once nothing arrives, or is put off;
                                  UINT64_MAX: never */
    uint32_t n_chunks;
    uint32_t first, end;    /* the chunks to be loaded: [first, end) */
    uint32_t end_token;     /* position in the prompt behind chunk end - 1; the owner sets it */
    uint32_t prompt_tokens; /* those behind end_token the engine computes after the load:
                               deadline_ns leaves time for that; the owner sets it */
    uint32_t wanted_end;    /* nothing from here on is wanted: it failed, or was cut off */
    uint32_t n_whole;       /* chunks [first, first + n_whole) are done */
    uint64_t bytes_held;    /* by chunks that are not being decoded; the plan's */
    bool is_cancelled;
    bool is_late;                /* even over a faster link: it goes last; the plan's */
    bool has_no_reads_left;      /* nothing that the plan would read; the plan's */
    bool is_decided;             /* levels were chosen with the link's speed known: */
    uint32_t decided_generation; /* of the estimator */
    double link_ns;              /* its reads' share of the time in which the link was busy */
    uint64_t computed_by_ns;    /* when the engine would have computed it, had it been given up when
                                   its time was first over, with all that were put off before it;
                                   0: its time is not over; connector/fetch_exit.c's */
    double predicted_ns;        /* from when it was asked last, until it has what must arrive of it;
                                   connector/fetch_exit.c's */
    uint64_t dropped_bytes;     /* arrived, and not decoded */
    uint64_t memory_bytes;      /* arrived, but not over the link */
    uint8_t *levels;            /* [n_chunks] the first choice of the owner */
    cg_controller_chunk *sizes; /* [n_chunks]; the owner sets them */
    cg_fetch_chunk *chunks;     /* [n_chunks] */
    double *sensitivities;      /* [n_chunks] of connector/quality.h; the plan's */
    cg_fetch_todo todo;
};

/* A fetch of n_chunks, all of them to be loaded, at a deadline that the owner sets.
 * CG_ERR_NO_MEMORY. */
cg_status cg_fetch_init(cg_fetch *fetch_out, uint32_t n_chunks);
void cg_fetch_destroy(cg_fetch *fetch);
/* Only chunks [first, end) of it are to be loaded. */
void cg_fetch_cut(cg_fetch *fetch, uint32_t first, uint32_t end);
/* For a model whose profile nests, once the sizes are set: chunks with two lossy levels or more are
 * taken for nested files. */
void cg_fetch_nest(cg_fetch *fetch);

/* a + b, at most UINT64_MAX, which is never. */
uint64_t cg_fetch_add_ns(uint64_t a, uint64_t b);
/* How long it is from now_ns to until_ns; negative: it is over. */
double cg_fetch_left_ns(uint64_t until_ns, uint64_t now_ns);

/* Whether its levels are chosen as the paper has it: a chunk at a time. */
bool cg_fetch_is_papers(const cg_fetch *fetch);
/* Whether it reads coarse first and refines; else each chunk has one level. */
bool cg_fetch_is_anytime(const cg_fetch *fetch);
/* Whether chunk_index is wanted still. */
bool cg_fetch_wants(const cg_fetch *fetch, uint32_t chunk_index);
/* Whether all that is wanted is done. */
bool cg_fetch_is_settled(const cg_fetch *fetch);
/* The first chunk that cannot be decoded from what has arrived; fetch->end: all can. */
uint32_t cg_fetch_first_missing(const cg_fetch *fetch);
/* Whether all that is wanted has arrived, at some level. */
bool cg_fetch_has_all(const cg_fetch *fetch);
/* The first chunk that may be decodable: what is whole is decoded, and what has arrived is held. */
uint32_t cg_fetch_first_held(const cg_fetch *fetch);
/* Whether a chunk is wanted and can be decoded from what has arrived of it. */
bool cg_fetch_is_decodable(const cg_fetch *fetch, uint32_t chunk_index);
/* Nothing from a chunk on is wanted any more. */
void cg_fetch_shorten(cg_fetch *fetch, uint32_t wanted_end);
/* Notes that a chunk cannot be had: nothing from it on is wanted. False: that was so before. */
bool cg_fetch_failed(cg_fetch *fetch, uint32_t chunk_index);

/* The coarsest level of a chunk. */
uint8_t cg_fetch_floor(const cg_fetch *fetch, uint32_t chunk_index);
/* The level that must arrive of a chunk. Once a file of one level alone is begun, that is its
 * level: no other file of the chunk will be read. */
uint8_t cg_fetch_must_level(const cg_fetch *fetch, uint32_t chunk_index);
/* The finest level that is in the first n_bytes of the file that is read of a chunk; CG_N_LEVELS:
 * none. */
uint8_t cg_fetch_level_in(const cg_fetch *fetch, uint32_t chunk_index, uint64_t n_bytes);
/* Where the file that holds a level of the chunk ends. */
uint64_t cg_fetch_file_bytes(const cg_fetch *fetch, uint32_t chunk_index, uint8_t level);
/* The predicted KL divergence of the chunk at a level, of a fetch that was added to a plan. */
double cg_fetch_kl(const cg_fetch *fetch, uint32_t chunk_index, uint8_t level);

#ifdef __cplusplus
}
#endif
#endif
