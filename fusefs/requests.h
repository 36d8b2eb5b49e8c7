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
#endif
