/* fusefs/lanes.h - how many requests of a kind, and of a user, may be under way.
 *
 * A request holds a thread until it is answered, and some take long: a check of a large file, any
 * change on a store that is frozen. So each kind has a lane of so many requests. In the lane of
 * changes a user has a part of it. What comes when its lane is full waits in line, without a
 * thread. Threads: any.
 */
#ifndef CG_FUSEFS_LANES_H
#define CG_FUSEFS_LANES_H
#include "fusefs/users.h"
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cg_lane {
    CG_LANE_FREE = 0, /* never waits: it does not touch the store */
    CG_LANE_READ = 1,
    CG_LANE_CHANGE = 2,
    CG_N_LANES = 3,
} cg_lane;

enum { CG_LANE_REQUESTS = 24, CG_LANE_USER_REQUESTS = 8 };

/* A request that waits; the first member of the caller's struct. */
typedef struct cg_lane_job cg_lane_job;
struct cg_lane_job {
    cg_lane lane;
    uid_t uid; /* (uid_t)-1: nobody's part counts */
    cg_lane_job *next;
};

typedef struct cg_lanes {
    pthread_mutex_t lock;
    uint32_t n_running[CG_N_LANES];
    cg_lane_job *first[CG_N_LANES], *last[CG_N_LANES];
    cg_users changing;
} cg_lanes;

void cg_lanes_init(cg_lanes *lanes);
/* Nobody runs any more. */
void cg_lanes_destroy(cg_lanes *lanes);
/* Whether a request may run now; then cg_lanes_end() comes after it. */
bool cg_lanes_begin(cg_lanes *lanes, cg_lane lane, uid_t uid);
/* The same; if it may not, the job waits, and is the lanes'. */
bool cg_lanes_begin_or_wait(cg_lanes *lanes, cg_lane_job *job);
/* The job to run next in this place, which is the caller's again; or NULL. */
cg_lane_job *cg_lanes_end(cg_lanes *lanes, cg_lane lane, uid_t uid);
/* At the end: one that still waits, or NULL. */
cg_lane_job *cg_lanes_take_waiting(cg_lanes *lanes);

#ifdef __cplusplus
}
#endif
#endif
