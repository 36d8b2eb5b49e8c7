#include "fusefs/loop.h"

#include "fusefs/at_hand.h"
#include "fusefs/lanes.h"
#include "fusefs/metrics.h"
#include "fusefs/overdue.h"
#include "fusefs/requests.h"
#include "iouring/clock.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    MAX_THREADS = 2 * CG_LANE_REQUESTS + 8,
    /* The kernel wakes the thread that has waited longest. With few that wait it is one whose
     * memory a processor still has in its cache. */
    MAX_WAITING = 2,
    /* To wake a thread whose processor sleeps takes longer than most requests, in a virtual machine
     * tens of microseconds. */
    POLL_NS = 20000,
    /* Requests that a program sends one after the other are closer together than this. */
    SOON_NS = 200000,
    /* When another thread had our processor for so long, all are busy. Then waking takes no time,
     * and looking takes somebody's. */
    BUSY_NS = 100000,
    STAY_BUSY_NS = 100000000
};

typedef struct loop {
    struct fuse_session *session;
    cg_metrics *metrics;
    cg_lanes lanes;
    cg_overdue overdue;
    cg_at_hand at_hand;
    _Atomic uint64_t last_ns; /* when the last request came */
    _Atomic bool comes_soon;  /* the next one, by what the last ones did */
    atomic_flag is_polled;    /* the device, by one thread */
    uint64_t busy_until_ns;   /* that thread's */
    sem_t called_main;        /* a thread has ended, or the main thread is to guard */
    pthread_mutex_t lock;     /* of the rest */
    pthread_cond_t called;
    pthread_t threads[MAX_THREADS];
    unsigned n_threads;
    unsigned n_waiting; /* for requests; one of them may poll */
    unsigned n_parked;  /* threads that nobody needs now */
    unsigned n_called;  /* were parked, and are on their way to wait for requests */
    bool is_over;
    int error;
} loop;

/* A request that waits for its lane, or for another request's thread, with its bytes. */
typedef struct waiting {
    cg_lane_job job;
    struct fuse_buf buf;
    uint64_t arrived_ns;
    cg_request request; /* that it counts as */
    _Alignas(struct fuse_in_header) uint8_t bytes[];
} waiting;

static bool job_gives_back(const cg_lane_job *job, uint64_t node_id)
{
    return cg_request_gives_back(((const waiting *)job)->buf.mem, node_id);
}

/* What was kept for a request that is over, unless another one wants it kept. */
static void run_kept(loop *l, cg_lane_job *job)
{
    for (cg_lane_job *next; job != NULL; job = next) {
        waiting *kept = (waiting *)job;
        next = job->next;
        if (cg_overdue_keep(&l->overdue, job))
            continue;
        fuse_session_process_buf(l->session, &kept->buf);
        free(kept);
    }
}

static void process(loop *l, struct fuse_buf *buf, cg_request request, uint64_t arrived_ns)
{
    const struct fuse_in_header *header = buf->mem;
    cg_overdue_request asking = {.number = header->unique,
                                 .node_id = header->nodeid,
                                 .arrived_ns = arrived_ns,
                                 .lists = cg_request_lists(header)};
    const bool asks = cg_request_only_asks(header);
    if (asks)
        cg_overdue_begin(&l->overdue, &asking);
    fuse_session_process_buf(l->session, buf);
    if (asks)
        run_kept(l, cg_overdue_end(&l->overdue, &asking));
    if (request != CG_N_REQUESTS)
        cg_metrics_observe(l->metrics, request, cg_now_ns() - arrived_ns);
}

/* NULL: without memory. The thread's own buffer is for the next request. */
static waiting *copy_request(const struct fuse_buf *buf, cg_lane lane, uid_t uid)
{
    waiting *copy = malloc(sizeof *copy + buf->size);
    if (copy == NULL)
        return NULL;
    copy->job = (cg_lane_job){.lane = lane, .uid = uid};
    copy->buf = (struct fuse_buf){.size = buf->size, .mem = copy->bytes};
    memcpy(copy->bytes, buf->mem, buf->size);
    return copy;
}

static void free_copy(loop *l, waiting *copy)
{
    cg_lanes_let_go(&l->lanes, copy->job.uid, copy->buf.size);
    free(copy);
}

/* False: it was answered already, or the caller is gone. */
static bool refuse(const loop *l, uint64_t number, int error)
{
    const struct fuse_out_header out = {.len = sizeof out, .error = -error, .unique = number};
    return write(fuse_session_fd(l->session), &out, sizeof out) == (ssize_t)sizeof out;
}

static void give_up(const loop *l, uint64_t number)
{
    cg_metrics_add(&l->metrics->given_up, refuse(l, number, ETIMEDOUT));
}

/* Answers what has waited too long for the store, or for its lane. */
static void give_up_late(loop *l)
{
    const uint64_t at_ns = cg_now_ns();
    uint64_t number;
    if (!cg_overdue_may_look(&l->overdue, at_ns))
        return;
    while (cg_overdue_give_up(&l->overdue, at_ns, &number))
        give_up(l, number);
    const uint64_t limit_ns = cg_overdue_limit_ns(&l->overdue);
    for (cg_lane_job *job;
         limit_ns < at_ns && (job = cg_lanes_take_late(&l->lanes, at_ns - limit_ns)) != NULL;) {
        waiting *late = (waiting *)job;
        give_up(l, ((const struct fuse_in_header *)late->buf.mem)->unique);
        free_copy(l, late);
    }
}

/* Runs what waits in the place that is free now. */
static void run_next(loop *l, cg_lane lane, uid_t uid)
{
    cg_lane_job *job;
    while ((job = cg_lanes_end(&l->lanes, lane, uid)) != NULL) {
        waiting *next = (waiting *)job;
        lane = job->lane;
        uid = job->uid;
        process(l, &next->buf, next->request, next->arrived_ns);
        free_copy(l, next);
    }
}

/* Whether the request gives back what a request that was given up still uses. Then it is done when
 * that one's thread has come back; without the memory for that never, which only wastes what it
 * gives back. */
static bool keep(loop *l, const struct fuse_buf *buf)
{
    const struct fuse_in_header *header = buf->mem;
    if (!cg_request_may_give_back(header) || !cg_overdue_any(&l->overdue))
        return false;
    waiting *copy = copy_request(buf, CG_LANE_FREE, header->uid);
    if (copy == NULL || cg_overdue_keep(&l->overdue, &copy->job))
        return true;
    free(copy);
    return false;
}

static void dispatch(loop *l, struct fuse_buf *buf, uint64_t arrived_ns)
{
    const struct fuse_in_header *header = buf->mem; /* never in a pipe: see op_init() */
    if (keep(l, buf))
        return;
    if (cg_request_lists(header) && cg_overdue_is_listing(&l->overdue, header->nodeid)) {
        give_up(l, header->unique);
        return;
    }
    const cg_lane lane = cg_request_lane(header);
    const uid_t uid = header->uid;
    const cg_request request = cg_request_counts_as(header);
    if (cg_lanes_begin(&l->lanes, lane, uid)) {
        process(l, buf, request, arrived_ns);
        run_next(l, lane, uid);
        return;
    }
    /* Too much waits already. ENOMEM says so to the caller: of EAGAIN many would think that they
     * can wait for the file with poll(2), and others would try again at once. */
    if (!cg_lanes_hold(&l->lanes, uid, buf->size)) {
        refuse(l, header->unique, ENOMEM);
        return;
    }
    waiting *copy = copy_request(buf, lane, uid);
    if (copy == NULL) { /* better late than never */
        cg_lanes_let_go(&l->lanes, uid, buf->size);
        process(l, buf, request, arrived_ns);
        return;
    }
    copy->request = request;
    copy->arrived_ns = arrived_ns;
    copy->job.arrived_ns = cg_request_only_asks(header) ? arrived_ns : 0;
    if (cg_lanes_begin_or_wait(&l->lanes, &copy->job)) { /* a place came free meanwhile */
        process(l, &copy->buf, request, arrived_ns);
        free_copy(l, copy);
        run_next(l, lane, uid);
    }
}

/* A program that opens or lists files sends a request as soon as it has the answer to the last one.
 * So one thread looks for it a moment before it sleeps, if nobody else wants the processor. When no
 * more come that was POLL_NS for nothing; where requests are rare nobody looks. */
static void await_soon(loop *l)
{
    struct pollfd device = {.fd = fuse_session_fd(l->session), .events = POLLIN};
    if (!l->comes_soon || atomic_flag_test_and_set(&l->is_polled))
        return;
    const uint64_t begun_ns = cg_now_ns();
    uint64_t at_ns = begun_ns;
    while (at_ns >= l->busy_until_ns && at_ns - begun_ns < POLL_NS && poll(&device, 1, 0) == 0) {
        const uint64_t before_ns = at_ns;
        sched_yield();
        at_ns = cg_now_ns();
        if (at_ns - before_ns > BUSY_NS)
            l->busy_until_ns = at_ns + STAY_BUSY_NS;
    }
    if (at_ns - begun_ns >= POLL_NS)
        l->comes_soon = false;
    atomic_flag_clear(&l->is_polled);
}

static void start_thread(loop *l);

/* A thread that is about to work leaves one that waits for requests, until there are MAX_THREADS:
 * more than all lanes together, so that requests without a lane find one. */
static void begin_work(loop *l)
{
    pthread_mutex_lock(&l->lock);
    l->n_waiting--;
    if (l->n_waiting == 0 && l->n_parked > 0) {
        l->n_parked--;
        l->n_called++;
        l->n_waiting++;
        pthread_cond_signal(&l->called);
    } else if (l->n_waiting == 0) {
        start_thread(l);
    }
    pthread_mutex_unlock(&l->lock);
}

/* Returns when the thread is wanted to wait for requests, or the session is over. waits: it counts
 * as one that does. */
static void end_work(loop *l, bool waits)
{
    const unsigned n_wanted = cg_at_hand_is_on(&l->at_hand, cg_now_ns()) ? 1 : MAX_WAITING;
    pthread_mutex_lock(&l->lock);
    l->n_waiting += !waits;
    if (l->n_waiting > n_wanted) {
        l->n_waiting--;
        l->n_parked++;
        while (l->n_called == 0 && !l->is_over)
            pthread_cond_wait(&l->called, &l->lock);
        l->n_called -= l->n_called > 0;
    }
    pthread_mutex_unlock(&l->lock);
}

static void take(loop *l, struct fuse_buf *buf)
{
    const struct fuse_in_header *header = buf->mem;
    const uint64_t arrived_ns = cg_now_ns();
    /* Another thread's request may have come after it. */
    const int64_t since_ns = (int64_t)(arrived_ns - atomic_exchange(&l->last_ns, arrived_ns));
    uint64_t turn;
    bool waits = true, wakes;
    l->comes_soon = since_ns < SOON_NS;
    if (cg_request_takes_no_time(header)) {
        dispatch(l, buf, arrived_ns);
    } else if (cg_at_hand_begin(&l->at_hand, cg_request_may_be_short(header), arrived_ns, &turn,
                                &wakes)) {
        if (wakes)
            sem_post(&l->called_main);
        dispatch(l, buf, arrived_ns);
        waits = cg_at_hand_end(&l->at_hand, turn, arrived_ns, cg_now_ns());
    } else {
        begin_work(l);
        dispatch(l, buf, arrived_ns);
        waits = false;
    }
    end_work(l, waits);
}

static void free_memory(void *buf)
{
    free(((struct fuse_buf *)buf)->mem);
}

static void *work(void *arg)
{
    loop *l = arg;
    struct fuse_buf buf = {.mem = NULL};
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    pthread_cleanup_push(free_memory, &buf);
    while (!fuse_session_exited(l->session)) {
        await_soon(l);
        pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL);
        const int n = fuse_session_receive_buf(l->session, &buf);
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
        if (n == -EINTR || n == -EAGAIN)
            continue;
        if (n <= 0) {
            pthread_mutex_lock(&l->lock);
            if (n < 0 && n != -ENODEV)
                l->error = n;
            pthread_mutex_unlock(&l->lock);
            break;
        }
        take(l, &buf);
    }
    pthread_cleanup_pop(1);
    /* One thread that ends ends the session: it was unmounted, or its device fails. */
    fuse_session_exit(l->session);
    sem_post(&l->called_main);
    return NULL;
}

/* The lock is held. Without a further thread those that there are go on. */
static void start_thread(loop *l)
{
    sigset_t all, before;
    if (l->n_threads == MAX_THREADS)
        return;
    sigfillset(&all); /* signals are for the thread that waits for them */
    pthread_sigmask(SIG_BLOCK, &all, &before);
    if (pthread_create(&l->threads[l->n_threads], NULL, work, l) == 0) {
        l->n_threads++;
        l->n_waiting++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Why libfuse has ended the session: as the kernel's first request was refused, say. Its own loop
 * does nothing more of a session that is over, and tells. */
static int error_of(struct fuse_session *session)
{
    const int error = fuse_session_loop(session);
    fuse_session_exit(session); /* it was reset */
    return error;
}

int cg_loop_run(struct fuse_session *session, cg_metrics *metrics, unsigned store_timeout_s)
{
    loop *l = calloc(1, sizeof *l);
    if (l == NULL)
        return -ENOMEM;
    l->session = session;
    l->metrics = metrics;
    cg_lanes_init(&l->lanes);
    cg_overdue_init(&l->overdue, (uint64_t)store_timeout_s * 1000000000u, job_gives_back);
    atomic_flag_clear(&l->is_polled);
    sem_init(&l->called_main, 0, 0);
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->called, NULL);
    pthread_mutex_lock(&l->lock);
    start_thread(l);
    int error = l->n_threads == 0 ? -EAGAIN : 0;
    pthread_mutex_unlock(&l->lock);
    uint64_t due_ns = cg_now_ns() + CG_SECOND_NS;
    while (error == 0 && !fuse_session_exited(session)) {
        const bool guards = cg_at_hand_is_guarded(&l->at_hand);
        /* A signal between the question and the wait wakes nobody. */
        const struct timespec soon =
            cg_deadline_at(guards ? cg_now_ns() + CG_AT_HAND_LOOK_NS : due_ns);
        sem_clockwait(&l->called_main, CLOCK_MONOTONIC, &soon);
        if (guards && cg_at_hand_look(&l->at_hand, cg_now_ns()))
            begin_work(l); /* for the thread that has it at hand */
        if (cg_now_ns() >= due_ns) {
            give_up_late(l);
            due_ns = cg_now_ns() + CG_SECOND_NS;
        }
    }
    pthread_mutex_lock(&l->lock);
    const unsigned n_threads = l->n_threads;
    l->n_threads = MAX_THREADS; /* no more of them */
    l->is_over = true;
    pthread_cond_broadcast(&l->called);
    pthread_mutex_unlock(&l->lock);
    for (unsigned i = 0; i < n_threads; i++)
        /* Wakes those that wait for a request. Elsewhere cancelling is disabled, so what is under
         * way is answered. */
        pthread_cancel(l->threads[i]);
    for (unsigned i = 0; i < n_threads; i++)
        pthread_join(l->threads[i], NULL);
    for (cg_lane_job *job; (job = cg_lanes_take_waiting(&l->lanes)) != NULL;)
        free(job);
    error = error != 0 ? error : l->error;
    error = error != 0 ? error : error_of(session);
    pthread_cond_destroy(&l->called);
    pthread_mutex_destroy(&l->lock);
    sem_destroy(&l->called_main);
    cg_overdue_destroy(&l->overdue);
    cg_lanes_destroy(&l->lanes);
    free(l);
    return error;
}
