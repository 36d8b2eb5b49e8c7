/* fusefs/ops.h - the operations of libfuse's low-level API.
 *
 * Each is one call of fusefs/core.h and one reply. A request ends with its reply: after it, req is
 * gone, and the kernel may use or forget the node at once.
 * Threads: any, as libfuse or fusefs/loop.h calls them.
 */
#ifndef CG_FUSEFS_OPS_H
#define CG_FUSEFS_OPS_H
#include "fusefs/ops_reply.h"

extern const struct fuse_lowlevel_ops CG_OPS; /* the session's userdata is a cg_mount */
#endif
