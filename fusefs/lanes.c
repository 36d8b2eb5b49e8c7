#include "fusefs/lanes.h"

#include <stddef.h>

void cg_lanes_init(cg_lanes *lanes)
{
    *lanes = (cg_lanes){.n_running = {0}};
    pthread_mutex_init(&lanes->lock, NULL);
    cg_users_init(&lanes->reading, CG_LANE_USER_READS);
    cg_users_init(&lanes->changing, CG_LANE_USER_CHANGES);
    cg_users_init(&lanes->holding, CG_LANE_USER_BYTES);
}

void cg_lanes_destroy(cg_lanes *lanes)
{
    cg_users_destroy(&lanes->reading);
    cg_users_destroy(&lanes->changing);
    cg_users_destroy(&lanes->holding);
    pthread_mutex_destroy(&lanes->lock);
}

/* Whose part of the lane counts; NULL: nobody's. */
static cg_users *users_of(cg_lanes *lanes, cg_lane lane, uid_t uid)
{
    return uid == (uid_t)-1         ? NULL
           : lane == CG_LANE_READ   ? &lanes->reading
           : lane == CG_LANE_CHANGE ? &lanes->changing
                                    : NULL;
}

/* The lock is held. */
static bool take_place(cg_lanes *lanes, cg_lane lane, uid_t uid)
{
    cg_users *users = users_of(lanes, lane, uid);
    if (lane == CG_LANE_FREE)
        return true;
    if (lanes->n_running[lane] >= CG_LANE_REQUESTS || (users != NULL && !cg_users_take(users, uid)))
        return false;
    lanes->n_running[lane]++;
    return true;
}

bool cg_lanes_begin(cg_lanes *lanes, cg_lane lane, uid_t uid)
{
    pthread_mutex_lock(&lanes->lock);
    const bool may = take_place(lanes, lane, uid);
    pthread_mutex_unlock(&lanes->lock);
    return may;
}

bool cg_lanes_begin_or_wait(cg_lanes *lanes, cg_lane_job *job)
{
    pthread_mutex_lock(&lanes->lock);
    const bool may = take_place(lanes, job->lane, job->uid);
    if (!may) {
        job->next = NULL;
        if (lanes->first[job->lane] == NULL)
            lanes->first[job->lane] = job;
        else
            lanes->last[job->lane]->next = job;
        lanes->last[job->lane] = job;
    }
    pthread_mutex_unlock(&lanes->lock);
    return may;
}

/* Takes *link out of the lane; before: the one before it, or NULL. */
static cg_lane_job *unlink_job(cg_lanes *lanes, cg_lane lane, cg_lane_job *before)
{
    cg_lane_job **link = before == NULL ? &lanes->first[lane] : &before->next;
    cg_lane_job *job = *link;
    *link = job->next;
    if (lanes->last[lane] == job)
        lanes->last[lane] = before;
    return job;
}

cg_lane_job *cg_lanes_end(cg_lanes *lanes, cg_lane lane, uid_t uid)
{
    cg_lane_job *next = NULL, *before = NULL;
    cg_users *users = users_of(lanes, lane, uid);
    if (lane == CG_LANE_FREE)
        return NULL;
    pthread_mutex_lock(&lanes->lock);
    lanes->n_running[lane]--;
    if (users != NULL)
        cg_users_give_back(users, uid);
    /* The first whose user has a place free. Its place is the one that was just given back, or none
     * is taken: so no lane ever has more than its number. */
    for (cg_lane_job *job = lanes->first[lane]; job != NULL && next == NULL; job = job->next) {
        if (take_place(lanes, lane, job->uid))
            next = unlink_job(lanes, lane, before);
        else
            before = job;
        if (next != NULL)
            break;
    }
    pthread_mutex_unlock(&lanes->lock);
    return next;
}

static bool holds(uid_t uid, uint64_t n_bytes)
{
    return uid != (uid_t)-1 && n_bytes > CG_LANE_SMALL_BYTES;
}

bool cg_lanes_hold(cg_lanes *lanes, uid_t uid, uint64_t n_bytes)
{
    if (!holds(uid, n_bytes))
        return true;
    pthread_mutex_lock(&lanes->lock);
    const bool may = n_bytes <= CG_LANE_BYTES - lanes->n_held_bytes &&
                     (uid == 0 || cg_users_take_n(&lanes->holding, uid, n_bytes));
    if (may)
        lanes->n_held_bytes += n_bytes;
    pthread_mutex_unlock(&lanes->lock);
    return may;
}

void cg_lanes_let_go(cg_lanes *lanes, uid_t uid, uint64_t n_bytes)
{
    if (!holds(uid, n_bytes))
        return;
    pthread_mutex_lock(&lanes->lock);
    lanes->n_held_bytes -= n_bytes;
    if (uid != 0)
        cg_users_give_back_n(&lanes->holding, uid, n_bytes);
    pthread_mutex_unlock(&lanes->lock);
}

cg_lane_job *cg_lanes_take_late(cg_lanes *lanes, uint64_t before_ns)
{
    cg_lane_job *late = NULL;
    pthread_mutex_lock(&lanes->lock);
    for (int lane = 0; lane < CG_N_LANES && late == NULL; lane++) {
        cg_lane_job *before = NULL, *job = lanes->first[lane];
        while (job != NULL && (job->arrived_ns == 0 || job->arrived_ns >= before_ns)) {
            before = job;
            job = job->next;
        }
        if (job != NULL)
            late = unlink_job(lanes, (cg_lane)lane, before);
    }
    pthread_mutex_unlock(&lanes->lock);
    return late;
}

cg_lane_job *cg_lanes_take_waiting(cg_lanes *lanes)
{
    cg_lane_job *job = NULL;
    pthread_mutex_lock(&lanes->lock);
    for (int lane = 0; lane < CG_N_LANES && job == NULL; lane++)
        if (lanes->first[lane] != NULL)
            job = unlink_job(lanes, (cg_lane)lane, NULL);
    pthread_mutex_unlock(&lanes->lock);
    return job;
}
