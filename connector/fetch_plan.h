/* connector/fetch_plan.h - what the reader does next: which range of which chunk to read, what to
 * decode, and when to give up.
 *
 * The rules; more is said at the functions:
 * 1. Loads with a budget read every chunk coarse first and refine while there is time
 * (cg_fetch_set_input()).
 * 2. Of all loads, what must arrive goes in the order of deadlines (cg_fetch_after()).
 * 3. A range is at most 1 MiB (connector/fetch_window.h).
 * 4. A chunk is decoded once: when it is as fine as can be hoped for, when nothing more is read for
 * its load, when its time is up, or when the memory is needed (cg_fetch_next_decode()). Of many
 * chunks those behind the first CG_EXTENTS_MOST_REFINED wait for their turn to be refined.
 * 5. What cannot arrive in time is given up where recomputing it is faster: the load fails from
 * that chunk on (cg_fetch_hopeless()).
 * 6. A read is given up after read_timeout and twice the time that all bytes under way should take
 * (cg_fetch_give_up()).
 * 7. A fetch ends at a time of its own (cg_fetch_overdue()).
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
#include "connector/fetch_link.h"
#include "connector/fetch_reads.h"
#include "connector/fetch_state.h"

#ifdef __cplusplus
extern "C" {
#endif

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
/* How long a plan of many chunks stands although something has changed, in ns; 0: it does not. */
uint64_t cg_fetch_stands_ns(const cg_fetch_plan *plan);
/* When to ask this plan and connector/fetch_exit.h again even if nothing ends before; UINT64_MAX:
 * never. */
uint64_t cg_fetch_wake_ns(const cg_fetch_plan *plan);

/* Decoding of a chunk ended. True: it is DONE, and n_whole counts on. False: it failed, or is not
 * wanted any more. */
bool cg_fetch_decode_ended(cg_fetch_plan *plan, cg_fetch *fetch, uint32_t chunk_index,
                           bool has_succeeded);

#ifdef __cplusplus
}
#endif
#endif
