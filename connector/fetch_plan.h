/* connector/fetch_plan.h - what the reader does next: which range of which chunk to read, what to
 * decode, and when to give up.
 *
 * The rules:
 * 1. Loads with a budget read every chunk coarse first and refine while there is time. The planner
 * of connector/extents.h sees all loads at once and is asked anew whenever something has ended.
 * Where all would be in time at half the speed, and what must arrive at a tenth, each chunk is read
 * whole.
 * 2. Of all loads, what must arrive goes in the order of deadlines. But a load with a budget that
 * would be late even over a link twice as fast goes behind all that would not: it would only delay
 * them. That holds for one at a fixed level, too.
 * 3. A range is at most 1 MiB. If the rest of a chunk may have to be left out, it is at most what a
 * slow link moves in 30 ms. The window is what may be under way at once: what the link moves in 30
 * ms and two round trips, and at least two ranges. For a far store it may be smaller or larger:
 * three chunks, or what the link moves in two round trips, but no more than in 60 ms and two round
 * trips, in ranges of different size. A larger window delays the first chunks, because reads that
 * are under way together end together; decoding then starts late. And every question of another
 * request's look-up waits for what is under way before it. A link that was idle for half a second
 * may be slower now. So loads with a budget begin with 128 KiB under way, or what keeps the link
 * busy, and twice what has come since. The old estimate may be wrong by any factor. It is trusted
 * again after a sample that is as fast as before, after two samples of any speed, or after two
 * reads from memory. Until then every chunk is read coarse first, and of what need not arrive no
 * more than 128 KiB is under way; levels in files of their own are chosen as for a link ten times
 * slower. While the link's speed is unknown, ranges under way are of different files and of 16 KiB,
 * or by ttft_budget of a far store of a page for each millisecond until it answers, 128 KiB at
 * most: less would be measured as round trips. As long as what came may all be from memory, 512 KiB
 * at most are under way: the next chunk may be the first that comes over the link. A near store may
 * have a slow link. There the first range of a file is read alone: reading it opens the file, and
 * each opening may make a network file system forget what it has cached of it. The first range of a
 * chunk whose sizes are guessed is read alone, too; it is half of what the coarsest level is
 * thought to have, or the header where a file has not even that.
 * 4. A chunk is decoded once: when it is as fine as can be hoped for, when nothing more is read for
 * its load, when its time is up, or when the memory is needed. A range that arrives later is
 * dropped.
 * 5. What cannot arrive in time is given up where recomputing it is faster: the load fails from
 * that chunk on. As long as what was measured of a far store is little but round trips, its link
 * may be as fast as it is without them. What others have to read and to decode before it counts,
 * and what the engine has to compute before. Loads that end while the engine computes wait for
 * their first tokens until that is done. Where recomputing is late, too, it must also gain more
 * than it costs them, and none of them may be late by it that is in time; where it is in time
 * itself, only one may. What a link that has fallen silent still has to bring at the deadline is
 * given up, too, unless the engine is busy anyway.
 * 6. A read is given up after read_timeout and twice the time that all bytes under way should take.
 * It is not to blame for what a slow link moves before it.
 * 7. A fetch ends at a time of its own. While bytes arrive, and giving it up costs it and the
 * others more than it gains, that time is put off by half a second, at the latest until the engine
 * would have computed it and all that were put off before it. After its deadline it also ends when
 * nothing has arrived for a while: for half a second, or for twice the time that all bytes under
 * way should take over the link as it was measured; but not while the engine is busy for another
 * half a second. Its reads are given up then, and no others are begun.
 *
 * Other loads read each chunk at one level. It is the one they were told (fixed), or the
 * controller's choice, made anew for each chunk whenever the link was measured (min_delay, paper).
 * `paper` reads a chunk at a time, whole, and goes by the last one's throughput, as CacheGen's
 * section 5.3.
 *
 * No I/O, no clock, no lock in here: it is a function of its state and of the time it is told. The
 * reader drives it with the real clock, a test or a simulator with its own. Times are nanoseconds
 * of any one clock.
 * Threads: plain data; the owner locks.
 */
#ifndef CG_CONNECTOR_FETCH_PLAN_H
#define CG_CONNECTOR_FETCH_PLAN_H
#include "connector/extents.h"
#include "connector/fetch.h"
#include "connector/fetch_window.h"
#include "connector/speeds.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cg_fetch_read {
    uint64_t id; /* never the same twice; 0: this place is free */
    cg_fetch *fetch;
    uint32_t chunk_index;
    uint8_t file_level; /* the name to read */
    bool is_stale;      /* of a file that turned out not to be the one to read */
    uint64_t from, bytes;
    uint64_t submitted_ns;
    cg_link_mark meter_mark; /* of the link's meter */
    uint64_t give_up_ns;     /* UINT64_MAX: never */
} cg_fetch_read;

typedef struct cg_fetch_ref {
    cg_fetch *fetch;
    uint32_t chunk_index;
} cg_fetch_ref;

typedef struct cg_fetch_plan {
    /* Constant: */
    uint64_t staging_bytes;   /* under way, held and not yet decoded, at most */
    uint64_t read_timeout_ns; /* of a read that has the link to itself */

    cg_fetch *fetches; /* those that are not done, the earliest deadline first */
    cg_fetch_window window;
    uint64_t bytes_held, bytes_decoding, last_id;
    uint64_t quiet_since_ns;    /* no read has ended since */
    uint64_t alive_ns;          /* bytes arrived, or it was idle, and not because reads failed */
    uint64_t patience_ns;       /* for so long nothing may arrive of what is under way */
    bool has_failed;            /* the read that ended last */
    uint64_t check_ns;          /* when to look again at what may be hopeless, */
    uint64_t checked_ns;        /* and when it was looked at last */
    uint64_t must_free_bytes;   /* by decoding what has arrived: the memory is needed */
    uint64_t asked_tokens;      /* of prompts that the owner looks up */
    uint64_t expected_tokens;   /* that others look up, as the owner was told; */
    uint64_t expected_until_ns; /* until then that holds; 0: nothing was told */
    uint64_t engine_until_ns;   /* so long the engine computes what it was given before; */
    uint64_t engine_untold_ns;  /* of that, what fetches lost of whose end nobody has heard yet */
    bool is_engine_told;        /* the owner is told at all */
    uint32_t n_added;           /* fetches, ever */
    cg_fetch_read *reads;       /* [window.depth] */

    /* What was planned last: */
    bool is_stale;
    bool has_others;   /* fetches came or went since: it does not stand */
    bool may_be_apart; /* cg_fetch_plan_begin() is asked */
    bool is_making;    /* until cg_fetch_plan_end(): items and the plans are the maker's */
    bool is_link_known, any_open;
    cg_extents_input input;
    uint64_t planned_at_ns;
    size_t next_extent, capacity, n_items;
    cg_extents_chunk *items; /* [capacity], with what they stand for; */
    cg_fetch_ref *refs;      /* fetch is NULL: it was removed while the plan was made */
    cg_extents_plan planned, hoped;
} cg_fetch_plan;

/* CG_ERR_NO_MEMORY. */
cg_status cg_fetch_plan_init(cg_fetch_plan *plan_out, uint32_t depth, uint64_t staging_bytes,
                             uint64_t read_timeout_ns);
void cg_fetch_plan_destroy(cg_fetch_plan *plan);

/* Adds a fetch: the plan reads for it until it is removed. Its deadline must not change.
 * CG_ERR_NO_MEMORY: it was not added. */
cg_status cg_fetch_plan_add(cg_fetch_plan *plan, cg_fetch *fetch);
void cg_fetch_plan_remove(cg_fetch_plan *plan, cg_fetch *fetch);

/* Prompts of so many tokens are being looked up, so that fetches of them are likely to come. What
 * is refined until then leaves the link time for what must arrive of them, taken to be as large a
 * token as of the fetches that are here. Little is under way meanwhile: the store's answers wait
 * behind it. asked: to the owner, until it says otherwise. expected: elsewhere, until until_ns. */
void cg_fetch_plan_ask(cg_fetch_plan *plan, uint64_t asked_tokens);
void cg_fetch_plan_expect(cg_fetch_plan *plan, uint64_t expected_tokens, uint64_t until_ns);

/* The fetches in the order in which what must arrive is read: the first (fetch is NULL), or the
 * one after it; NULL: it is the last. */
cg_fetch *cg_fetch_after(const cg_fetch_plan *plan, const cg_fetch *fetch);

/* A plan for many chunks takes a while. An owner whose lock others wait for makes it without the
 * lock: begin and end with it, make without. True: there is one to be made now; _next_read() and
 * _next_decode() must not be called before its end. Where _begin() is asked they never make one of
 * many chunks themselves. Fetches may come and go, and reads and decoding end, while it is made. */
bool cg_fetch_plan_begin(cg_fetch_plan *plan, const cg_speeds *speeds, uint64_t now_ns);
void cg_fetch_plan_make(cg_fetch_plan *plan);
void cg_fetch_plan_end(cg_fetch_plan *plan);
/* After _next_read() had none, of a plan that stood: there may be one after _begin(). */
bool cg_fetch_plan_is_due(const cg_fetch_plan *plan);

/* The read to begin now; NULL: none should begin now. Each must be ended with
 * cg_fetch_read_ended(), even if it could not be begun. */
const cg_fetch_read *cg_fetch_next_read(cg_fetch_plan *plan, cg_speeds *speeds, uint64_t now_ns);
/* A fetch with a chunk to be decoded now, at the level chunk.level, from the first bytes of its
 * file; NULL: none. Each must be ended with cg_fetch_decode_ended(). Ask before and after
 * cg_fetch_next_read(). */
cg_fetch *cg_fetch_next_decode(cg_fetch_plan *plan, const cg_speeds *speeds, uint64_t now_ns,
                               uint32_t *chunk_index_out);
/* The reads of a fetch are given up at until_ns, if not before: cg_fetch_give_up(). */
void cg_fetch_end_reads(cg_fetch_plan *plan, const cg_fetch *fetch, uint64_t until_ns);
/* The read of that id, if it is under way; else NULL. */
const cg_fetch_read *cg_fetch_find_read(const cg_fetch_plan *plan, uint64_t id);
/* The link's speed; 0: unknown. If nothing has ended for longer than the estimate allows, it is
 * less: then *is_bound_out is true, and the speed is what is under way over the time that has
 * passed, which the link does not reach. */
double cg_fetch_link_bps(const cg_fetch_plan *plan, const cg_speeds *speeds, uint64_t now_ns,
                         bool *is_bound_out);
/* When a fetch ends because nothing arrives; UINT64_MAX: it is not under way, or has all it must
 * have. */
uint64_t cg_fetch_silent_ns(const cg_fetch_plan *plan, const cg_fetch *fetch);
/* What recomputing a fetch's tokens from a chunk on takes; 0 where its speed is unknown. */
double cg_fetch_rest_ns(const cg_fetch *fetch, uint32_t chunk_index, const cg_speeds *speeds);
/* What recomputing the tokens takes that are recomputed in any case: nothing from first_failed on
 * is loaded. 0 where its speed is unknown. */
double cg_fetch_lost_ns(const cg_fetch *fetch, const cg_speeds *speeds);
/* When a load must be done: by its deadline, less cg_fetch_lost_ns(). */
uint64_t cg_fetch_due_ns(const cg_fetch *fetch, const cg_speeds *speeds);
/* How long a plan of many chunks stands although something has changed, in ns; 0: it does not. */
uint64_t cg_fetch_stands_ns(const cg_fetch_plan *plan);
/* When to ask this plan and connector/fetch_exit.h again even if nothing ends before; UINT64_MAX:
 * never. */
uint64_t cg_fetch_wake_ns(const cg_fetch_plan *plan);

typedef enum cg_fetch_verdict {
    CG_FETCH_DROP = 0, /* nobody wants its bytes */
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
/* The first range of a chunk whose sizes were guessed is more than its file has. True: its header
 * alone is read next, which may say why. False: this was no such range, or it was the header. */
bool cg_fetch_shorter(cg_fetch_plan *plan, cg_fetch *fetch, uint32_t chunk_index);
/* The first range of a chunk whose sizes were guessed has arrived, and says where each level ends,
 * 0: it is not in the file. False: the file is of no use. After cg_fetch_shorter() the chunk is
 * read anew: forget what was kept of it. */
bool cg_fetch_sized(cg_fetch_plan *plan, cg_fetch *fetch, uint32_t chunk_index,
                    const uint64_t level_bytes[CG_N_LEVELS]);
/* Decoding of a chunk ended. True: it is DONE, and n_whole counts on. False: it failed, or is not
 * wanted any more. */
bool cg_fetch_decode_ended(cg_fetch_plan *plan, cg_fetch *fetch, uint32_t chunk_index,
                           bool has_succeeded);

#ifdef __cplusplus
}
#endif
#endif
