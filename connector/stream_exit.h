/* connector/stream_exit.h - what of the plan takes too long: reads that hang, streams whose time is
 * over, and streams of which recomputing a part is faster than loading it.
 *
 * Rules 5 to 7 of connector/stream_plan.h, of which this is the other half: as pure, and with the
 * same owner and lock.
 */
#ifndef CG_CONNECTOR_STREAM_EXIT_H
#define CG_CONNECTOR_STREAM_EXIT_H
#include "connector/stream_plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A read whose time is over, each once; NULL: none. It is under way until it has ended. */
const cg_stream_read *cg_stream_give_up(cg_stream_plan *plan, uint64_t now_ns);
/* A stream whose time is over, each once; NULL: none. It is to be failed at
 * cg_stream_first_missing(), so that it settles once what has arrived is decoded. */
cg_stream *cg_stream_overdue(cg_stream_plan *plan, uint64_t now_ns);
/* A stream that is to be failed at *chunk_index_out, because it would be late and recomputing from
 * there on is faster; NULL: none. */
cg_stream *cg_stream_hopeless(cg_stream_plan *plan, const cg_speeds *speeds, uint64_t now_ns,
                              uint32_t *chunk_index_out);
/* What is still to come for all streams to have their floors. */
double cg_stream_wanted_bytes(const cg_stream_plan *plan);
/* What decoding takes that all streams still need, on all threads. */
double cg_stream_undecoded_ns(const cg_stream_plan *plan, const cg_speeds *speeds);

#ifdef __cplusplus
}
#endif
#endif
