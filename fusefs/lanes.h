/* fusefs/lanes.h - how many requests of a kind, and of a user, may be under way.
 *
 * A request holds a thread until it is answered. Some take long: a check of a large file, or any
 * change while the store is frozen. So each kind of request has a lane, which takes a fixed number
 * of them. Each user has a smaller number. A request whose lane is full waits in line, and holds no
 * thread. It holds memory, of which there is a limit for each user and one for all.
 * Threads: any. The lanes have their own lock.
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

enum { CG_LANE_REQUESTS = 24, CG_LANE_USER_READS = 16, CG_LANE_USER_CHANGES = 8 };
/* What may wait. Small requests do not count: each keeps a thread of a program waiting, which takes
 * more of the kernel's memory, and some of them, as a close, must be done. */
enum { CG_LANE_BYTES = 256 << 20, CG_LANE_USER_BYTES = 64 << 20, CG_LANE_SMALL_BYTES = 8192 };

/* A request that waits; the first member of the caller's struct. */
typedef struct cg_lane_job cg_lane_job;
struct cg_lane_job {
    cg_lane lane;
    uid_t uid; /* (uid_t)-1: nobody's part counts */
    cg_lane_job *next;
    uint64_t arrived_ns; /* 0: it must run, however late */
};

typedef struct cg_lanes {
    pthread_mutex_t lock;
    uint32_t n_running[CG_N_LANES];
    cg_lane_job *first[CG_N_LANES], *last[CG_N_LANES];
    cg_users reading, changing;
    cg_users holding; /* bytes of requests that wait; root's are not in it */
    uint64_t n_held_bytes;
} cg_lanes;

void cg_lanes_init(cg_lanes *lanes);
/* Nobody runs any more. */
void cg_lanes_destroy(cg_lanes *lanes);
/* Whether a request may run now. If so, cg_lanes_end() must come after it. */
bool cg_lanes_begin(cg_lanes *lanes, cg_lane lane, uid_t uid);
/* The same for a job. If it may not run now, it waits, and belongs to the lanes until it comes out
 * of cg_lanes_end() or cg_lanes_take_waiting(). */
bool cg_lanes_begin_or_wait(cg_lanes *lanes, cg_lane_job *job);
/* A request has ended. Returns the waiting job that may run now, the caller's again; or NULL. */
cg_lane_job *cg_lanes_end(cg_lanes *lanes, cg_lane lane, uid_t uid);
/* Before a request may wait: takes room for its bytes, until cg_lanes_let_go(). False: its user
 * has too many bytes there, or all have. Requests without a user are few: the kernel counts
 * them. */
bool cg_lanes_hold(cg_lanes *lanes, uid_t uid, uint64_t n_bytes);
void cg_lanes_let_go(cg_lanes *lanes, uid_t uid, uint64_t n_bytes);
/* Takes out a waiting job that need not run and arrived before this time, or returns NULL. */
cg_lane_job *cg_lanes_take_late(cg_lanes *lanes, uint64_t before_ns);
/* For the end of a mount: takes out one job that still waits, or returns NULL. */
cg_lane_job *cg_lanes_take_waiting(cg_lanes *lanes);

#ifdef __cplusplus
}
#endif
#endif
