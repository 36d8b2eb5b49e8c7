/* fusefs/loop.h - the threads that take requests from the kernel and answer them.
 *
 * As fuse_session_loop_mt(), but each request goes through its lane (fusefs/lanes.h). So when all
 * that touches the store hangs, threads are left for .cachegenfs; when only changes hang, threads
 * are left for reading.
 */
#ifndef CG_FUSEFS_LOOP_H
#define CG_FUSEFS_LOOP_H
#include "fusefs/fuse_api.h"
#include "fusefs/metrics.h"

/* Serves until a signal (fuse_set_signal_handlers()) or an unmount ends the session. Then waits for
 * what is under way. 0 or -errno. */
int cg_loop_run(struct fuse_session *session, cg_metrics *metrics);
#endif
