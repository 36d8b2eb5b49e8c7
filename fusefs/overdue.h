/* fusefs/overdue.h - requests that have waited for the store longer than a limit.
 *
 * The thread that waits cannot be called back, but its request can be given up: it is answered with
 * an error. What the thread answers later has no request any more, and the kernel drops it. That is
 * for requests that change nothing, and for those whose late answer can be taken back, as a look-up
 * and an open.
 *
 * Until the thread comes back it goes on using the node that its request was about. The kernel
 * knows nothing of that: it may give the node back, or its open file. Such a request is kept until
 * then.
 *
 * From the first request that is given up until one comes back that waited meanwhile, the store
 * hangs, and the limit is a tenth: those who want the same name ask for it one after the other. (A
 * request that came later may be answered from memory, and says nothing of the store.)
 * Threads: any.
 */
#ifndef CG_FUSEFS_OVERDUE_H
#define CG_FUSEFS_OVERDUE_H
#include "fusefs/lanes.h"
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { CG_OVERDUE_HANGING_PART = 10, CG_OVERDUE_GAP_SECONDS = 5 };

/* A request that is under way; its thread's. */
typedef struct cg_overdue_request cg_overdue_request;
struct cg_overdue_request {
    uint64_t number; /* the kernel's */
    uint64_t node_id;
    uint64_t arrived_ns;
    bool lists; /* a folder: what it keeps of the listing is no other request's meanwhile */
    bool is_given_up;
    cg_lane_job *kept; /* until its end */
    cg_overdue_request *next, *previous;
};

/* Whether the job gives back this node, or an open file of it. */
typedef bool cg_overdue_gives_back(const cg_lane_job *job, uint64_t node_id);

typedef struct cg_overdue {
    uint64_t limit_ns; /* 0: none */
    cg_overdue_gives_back *gives_back;
    uint32_t n_given_up;  /* of requests; changed under the lock, read without it */
    pthread_mutex_t lock; /* of the rest */
    cg_overdue_request *requests;
    bool hangs;
    uint64_t hangs_since_ns; /* when a request was given up the last time */
    uint64_t looked_ns;      /* by one thread; 0: never */
} cg_overdue;

void cg_overdue_init(cg_overdue *overdue, uint64_t limit_ns, cg_overdue_gives_back *gives_back);
/* No request is under way. */
void cg_overdue_destroy(cg_overdue *overdue);
/* Before and after a request goes to the store. At its end the jobs that were kept for it are the
 * caller's: another request may still want them kept. */
void cg_overdue_begin(cg_overdue *overdue, cg_overdue_request *request);
cg_lane_job *cg_overdue_end(cg_overdue *overdue, cg_overdue_request *request);
/* For how long a request may wait now. UINT64_MAX: without end. */
uint64_t cg_overdue_limit_ns(cg_overdue *overdue);
/* Before each look for what has waited too long, which is to come every second. False after a gap:
 * the process was stopped, and its requests are late for that. They have until the next look. */
bool cg_overdue_may_look(cg_overdue *overdue, uint64_t now_ns);
/* Gives up a request that has waited too long, if there is one. The caller answers it: only from
 * now on is kept what the kernel sends after that answer. If its thread was faster, the kernel does
 * not take the answer. */
bool cg_overdue_give_up(cg_overdue *overdue, uint64_t now_ns, uint64_t *number_out);
/* Whether a request was given up, and its thread has not come back. */
static inline bool cg_overdue_any(const cg_overdue *overdue)
{
    return __atomic_load_n(&overdue->n_given_up, __ATOMIC_ACQUIRE) > 0;
}
/* Keeps the job if a request that was given up uses what it gives back. */
bool cg_overdue_keep(cg_overdue *overdue, cg_lane_job *job);
/* Whether a listing of this folder was given up, and its thread has not come back. */
bool cg_overdue_is_listing(cg_overdue *overdue, uint64_t node_id);

#ifdef __cplusplus
}
#endif
#endif
