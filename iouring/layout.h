/* iouring/layout.h - which layout a store has: a number in the file .cachegenfs-layout of its root.
 *
 * Layout 1 is the tree of iouring/tree.h. Layout 0 is that of stores that were made before there
 * was the file: the same tree. The first daemon that may write to a store brings it up. A later
 * version of cachegenfs that changes what names mean gives its stores a higher number, and adds a
 * step that brings older ones there; this version then refuses them.
 * Threads: any.
 */
#ifndef CG_IOURING_LAYOUT_H
#define CG_IOURING_LAYOUT_H
#include "codec/status.h"
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CG_LAYOUT_FILE ".cachegenfs-layout"
#define CG_LAYOUT_MOUNT ".cachegenfs" /* a folder in the root of a mount, and of no store */
enum { CG_LAYOUT_VERSION = 1 };

/* CG_ERR_UNSUPPORTED_VERSION: of a later version than ours. CG_ERR_CORRUPT: the file holds no
 * number. CG_ERR_...: it cannot be read. */
cg_status cg_layout_check(int root_fd);
/* The same, and CG_ERR_NOT_FOUND where nothing says that there is a store: it has no number, is no
 * mount, and no folder in it is a model's. Connectors may have written a store without a number. So
 * it is with an empty folder: nobody could tell a new store from a disk that is not mounted. */
cg_status cg_layout_find(int root_fd);
#define CG_LAYOUT_NOT_FOUND                                                                        \
    "no store: neither " CG_LAYOUT_FILE " nor the folder of a model is there"

/* Brings a store from layout n to n + 1. It may be called again after a daemon was killed in the
 * middle of it, and by two daemons at once. */
typedef cg_status (*cg_layout_step)(int root_fd);

/* Brings a store of an earlier layout to ours, a step after the other. The number is written after
 * each step, and is on disk before the next: what was interrupted goes on where it was. Errors as
 * of cg_layout_check(), and those of a step: the store then has the layout before it.
 * CG_ERR_...: the file cannot be written. */
cg_status cg_layout_upgrade(int root_fd);
/* The same with these steps, to layout n_steps: for tests. A step may be NULL: there is nothing to
 * do. */
cg_status cg_layout_upgrade_by(int root_fd, const cg_layout_step *steps, uint32_t n_steps);

#ifdef __cplusplus
}
#endif
#endif
