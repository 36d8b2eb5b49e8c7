/* fusefs/requests.h - what the kernel's requests are, by the bytes in which they come.
 *
 * Threads: any. The request is not answered yet, so that its node is there.
 */
#ifndef CG_FUSEFS_REQUESTS_H
#define CG_FUSEFS_REQUESTS_H
#include "fusefs/lanes.h"
#include "fusefs/metrics.h"
#include <linux/fuse.h>
#include <stdbool.h>
#include <stdint.h>

cg_lane cg_request_lane(const struct fuse_in_header *header);
/* What it counts as in the metrics; CG_N_REQUESTS: as none. */
cg_request cg_request_counts_as(const struct fuse_in_header *header);
/* Whether it changes nothing, so that it need not be done once nobody waits for it. */
bool cg_request_only_asks(const struct fuse_in_header *header);
bool cg_request_lists(const struct fuse_in_header *header);
/* Whether it gives nodes back, or open files. Whether this node is among them, or the node of the
 * file. The kernel may use their addresses for nothing more then. */
bool cg_request_may_give_back(const struct fuse_in_header *header);
bool cg_request_gives_back(const struct fuse_in_header *header, uint64_t node_id);
/* Whether it waits for nothing, and is done in some microseconds. Whether it mostly is. */
bool cg_request_takes_no_time(const struct fuse_in_header *header);
bool cg_request_may_be_short(const struct fuse_in_header *header);
#endif
