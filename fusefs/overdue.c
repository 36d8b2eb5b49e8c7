#include "fusefs/overdue.h"

#include <stddef.h>

void cg_overdue_init(cg_overdue *overdue, uint64_t limit_ns, cg_overdue_gives_back *gives_back)
{
    *overdue = (cg_overdue){.limit_ns = limit_ns, .gives_back = gives_back};
    pthread_mutex_init(&overdue->lock, NULL);
}

void cg_overdue_destroy(cg_overdue *overdue)
{
    pthread_mutex_destroy(&overdue->lock);
}

void cg_overdue_begin(cg_overdue *overdue, cg_overdue_request *request)
{
    request->is_given_up = false;
    request->kept = NULL;
    request->previous = NULL;
    pthread_mutex_lock(&overdue->lock);
    if ((request->next = overdue->requests) != NULL)
        request->next->previous = request;
    overdue->requests = request;
    pthread_mutex_unlock(&overdue->lock);
}

cg_lane_job *cg_overdue_end(cg_overdue *overdue, cg_overdue_request *request)
{
    pthread_mutex_lock(&overdue->lock);
    if (request->next != NULL)
        request->next->previous = request->previous;
    if (request->previous != NULL)
        request->previous->next = request->next;
    else
        overdue->requests = request->next;
    __atomic_fetch_sub(&overdue->n_given_up, request->is_given_up, __ATOMIC_RELEASE);
    /* What came after it may have asked no store. */
    if (request->is_given_up || request->arrived_ns < overdue->hangs_since_ns)
        overdue->hangs = false;
    pthread_mutex_unlock(&overdue->lock);
    return request->kept;
}

/* The lock is held. */
static uint64_t limit_ns(const cg_overdue *overdue)
{
    if (overdue->limit_ns == 0)
        return UINT64_MAX;
    return overdue->hangs ? overdue->limit_ns / CG_OVERDUE_HANGING_PART : overdue->limit_ns;
}

uint64_t cg_overdue_limit_ns(cg_overdue *overdue)
{
    pthread_mutex_lock(&overdue->lock);
    const uint64_t limit = limit_ns(overdue);
    pthread_mutex_unlock(&overdue->lock);
    return limit;
}

bool cg_overdue_may_look(cg_overdue *overdue, uint64_t now_ns)
{
    const uint64_t gap_ns = now_ns - overdue->looked_ns;
    const bool is_first = overdue->looked_ns == 0;
    overdue->looked_ns = now_ns;
    return is_first || gap_ns < CG_OVERDUE_GAP_SECONDS * UINT64_C(1000000000);
}

bool cg_overdue_give_up(cg_overdue *overdue, uint64_t now_ns, uint64_t *number_out)
{
    pthread_mutex_lock(&overdue->lock);
    cg_overdue_request *r = overdue->requests;
    /* It may have begun after the caller looked at the clock. */
    while (r != NULL &&
           (r->is_given_up || now_ns < r->arrived_ns || now_ns - r->arrived_ns < limit_ns(overdue)))
        r = r->next;
    if (r != NULL) {
        r->is_given_up = true;
        *number_out = r->number;
        __atomic_fetch_add(&overdue->n_given_up, 1, __ATOMIC_RELEASE);
        overdue->hangs = true;
        overdue->hangs_since_ns = now_ns;
    }
    pthread_mutex_unlock(&overdue->lock);
    return r != NULL;
}

bool cg_overdue_keep(cg_overdue *overdue, cg_lane_job *job)
{
    if (!cg_overdue_any(overdue)) /* nearly always */
        return false;
    pthread_mutex_lock(&overdue->lock);
    cg_overdue_request *r = overdue->requests;
    while (r != NULL && !(r->is_given_up && overdue->gives_back(job, r->node_id)))
        r = r->next;
    if (r != NULL) {
        job->next = r->kept;
        r->kept = job;
    }
    pthread_mutex_unlock(&overdue->lock);
    return r != NULL;
}

bool cg_overdue_is_listing(cg_overdue *overdue, uint64_t node_id)
{
    if (!cg_overdue_any(overdue))
        return false;
    pthread_mutex_lock(&overdue->lock);
    const cg_overdue_request *r = overdue->requests;
    while (r != NULL && !(r->is_given_up && r->lists && r->node_id == node_id))
        r = r->next;
    pthread_mutex_unlock(&overdue->lock);
    return r != NULL;
}
