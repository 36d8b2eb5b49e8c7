/* connector/stream_exit.h - what takes too long: reads that hang, streams whose time is over, and
 * streams of which recomputing a part is faster than loading it.
 *
 * Rules 5 to 7 of connector/stream_plan.h. No I/O, clock or lock in here either.
 * Threads: plain data; the owner locks.
 */
#ifndef CG_CONNECTOR_STREAM_EXIT_H
#define CG_CONNECTOR_STREAM_EXIT_H
#include "connector/stream_plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Sets when a stream that is to be added at now_ns ends: half a second after its budget. A load may
 * be planned to take longer, because recomputing takes longer still. It has twice the time that
 * reading what must arrive should take, and with min_delay all that it needs; but after its budget
 * only as long as bytes arrive (cg_stream_silent_ns()). */
void cg_stream_set_end(cg_stream *stream, const cg_speeds *speeds, uint64_t now_ns);
/* A read whose time is over; NULL: none. Each is returned once. It is under way until
 * cg_stream_read_ended(). */
const cg_stream_read *cg_stream_give_up(cg_stream_plan *plan, uint64_t now_ns);
/* A stream whose time is over; NULL: none. Each is returned once. The caller fails it at
 * cg_stream_first_missing(), so that it settles once what has arrived is decoded. */
cg_stream *cg_stream_overdue(cg_stream_plan *plan, uint64_t now_ns);
/* A stream that would be late, and of which recomputing from *chunk_index_out on is faster; NULL:
 * none. The caller fails it there. */
cg_stream *cg_stream_hopeless(cg_stream_plan *plan, const cg_speeds *speeds, uint64_t now_ns,
                              uint32_t *chunk_index_out);
/* How many bytes are still to come until all streams have their floors. */
double cg_stream_wanted_bytes(const cg_stream_plan *plan);
/* The time for the decoding that all streams still need, on all threads. */
double cg_stream_undecoded_ns(const cg_stream_plan *plan, const cg_speeds *speeds);

#ifdef __cplusplus
}
#endif
#endif
