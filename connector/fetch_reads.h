/* connector/fetch_reads.h - the table of the reads that are under way, and what becomes of a chunk
 * from the first range that is asked for of it until it is decoded.
 *
 * No I/O, no clock, no lock. Times are nanoseconds of any one clock.
 * Threads: plain data; the owner locks.
 */
#ifndef CG_CONNECTOR_FETCH_READS_H
#define CG_CONNECTOR_FETCH_READS_H
#include "connector/fetch_state.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The reads of a fetch are given up at until_ns, if not before: cg_fetch_give_up(). */
void cg_fetch_end_reads(cg_fetch_plan *plan, const cg_fetch *fetch, uint64_t until_ns);
/* The read of that id, if it is under way; else NULL. */
const cg_fetch_read *cg_fetch_find_read(const cg_fetch_plan *plan, uint64_t id);

typedef enum cg_fetch_verdict {
    CG_FETCH_DROP = 0, /* nobody wants its bytes: it came too late to be decoded */
    CG_FETCH_KEEP,     /* they are part of the chunk */
    CG_FETCH_FAIL,     /* the chunk cannot be had: cg_fetch_failed() */
} cg_fetch_verdict;

/* A read of this id ended at ended_ns, with so many bytes, which are all that it asked for, or with
 * 0: it failed. The speeds' link learns from it. */
cg_fetch_verdict cg_fetch_read_ended(cg_fetch_plan *plan, cg_speeds *speeds, uint64_t id,
                                     uint64_t n_bytes, uint64_t ended_ns);
/* A chunk's file is not what its sizes said: it is not nested. The chunk is read anew, one file for
 * each level; forget what was kept of it. */
void cg_fetch_not_nested(cg_fetch_plan *plan, cg_fetch *fetch, uint32_t chunk_index);
/* A range that a chunk cannot do without is more than its file has. True: no start of the file has
 * said its sizes yet; its header alone is read next, which may say why: forget what was kept of it.
 */
bool cg_fetch_shorter(cg_fetch_plan *plan, cg_fetch *fetch, uint32_t chunk_index);
/* The first range of a chunk whose sizes were guessed has arrived, and says where each level ends,
 * 0: it is not in the file. CG_ERR_NOT_FOUND: the file is of no use. After cg_fetch_shorter() the
 * chunk is read anew: forget what was kept of it; or CG_ERR_TRUNCATED: the file ends too soon. */
cg_status cg_fetch_sized(cg_fetch_plan *plan, cg_fetch *fetch, uint32_t chunk_index,
                         const uint64_t level_bytes[CG_N_LEVELS]);
/* The start of a chunk's file that was not guessed says where each level ends. True: elsewhere than
 * its sizes say, since the file was replaced after somebody remembered them. The chunk is read
 * anew: forget what was kept of it. That is done once for a file. */
bool cg_fetch_replaced(cg_fetch_plan *plan, cg_fetch *fetch, uint32_t chunk_index,
                       const uint64_t level_bytes[CG_N_LEVELS]);

/* What follows is connector/fetch_plan.c's. */

typedef struct cg_fetch_extent {
    cg_fetch_ref ref;   /* fetch is NULL: there is nothing to read now */
    uint8_t file_level; /* of this file, */
    uint64_t to;        /* up to there */
} cg_fetch_extent;

/* What the plan reads next. */
cg_fetch_extent cg_fetch_next_extent(cg_fetch_plan *plan, const cg_speeds *speeds, double link_bps);
/* Begins a read of that, of one range; NULL: it would not be wise now. */
const cg_fetch_read *cg_fetch_begin_read(cg_fetch_plan *plan, const cg_fetch_extent *extent,
                                         cg_speeds *speeds, double link_bps, uint64_t now_ns);
/* Whether a read of the fetch is under way. */
bool cg_fetch_is_reading(const cg_fetch_plan *plan, const cg_fetch *fetch);
/* The chunk's bytes are not held any more. */
void cg_fetch_let_go(cg_fetch_plan *plan, cg_fetch *fetch, const cg_fetch_chunk *chunk);

#ifdef __cplusplus
}
#endif
#endif
