/* fusefs/loop.h - the threads that take requests from the kernel and answer them.
 *
 * As fuse_session_loop_mt(), but each request goes through its lane (fusefs/lanes.h). So when all
 * that touches the store hangs, threads are left for .cachegenfs; when only changes hang, threads
 * are left for reading. A request that changes nothing gets ETIMEDOUT when it has waited too long.
 * Threads: the mount's main thread calls cg_loop_run(), which starts the others.
 */
#ifndef CG_FUSEFS_LOOP_H
#define CG_FUSEFS_LOOP_H
#include "fusefs/core.h"
#include "fusefs/fuse_api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Serves until a signal (fuse_set_signal_handlers()) or an unmount ends the session. Then waits for
 * what is under way. store_timeout_s: for so long, and up to a second more, a request that changes
 * nothing waits for the store; 0: without end (fusefs/overdue.h). 0, the number of the signal, or
 * -errno: also where libfuse ended the session, as it does when it refuses the kernel's first
 * request. */
int cg_loop_run(struct fuse_session *session, cg_metrics *metrics, unsigned store_timeout_s);

#ifdef __cplusplus
}
#endif
#endif
