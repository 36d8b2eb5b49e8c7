/* iouring/layout.h - which layout a store has: a number in the file .cachegenfs-layout of its root.
 *
 * Layout 1 is the tree of iouring/tree.h. A store without the file is of layout 1, too: the first
 * daemon that may write to the store makes the file. A later version of cachegenfs that changes
 * what names mean gives its stores a higher number; this version then refuses them.
 * Threads: any.
 */
#ifndef CG_IOURING_LAYOUT_H
#define CG_IOURING_LAYOUT_H
#include "codec/status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CG_LAYOUT_FILE ".cachegenfs-layout"
#define CG_LAYOUT_MOUNT ".cachegenfs" /* a folder in the root of a mount, and of no store */
enum { CG_LAYOUT_VERSION = 1 };

/* CG_ERR_UNSUPPORTED_VERSION: of another version than ours. CG_ERR_CORRUPT: the file holds no
 * number. CG_ERR_...: it cannot be read. */
cg_status cg_layout_check(int root_fd);
/* Makes the file where there is none. CG_ERR_...: it cannot be written. */
cg_status cg_layout_mark(int root_fd);

#ifdef __cplusplus
}
#endif
#endif
