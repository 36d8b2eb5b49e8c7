/* The thread backend: a pool of workers that run operations with plain system calls.
 *
 * A worker that a hung mount holds cannot be stopped. Its operation is abandoned, a new worker
 * takes its place, and when the queue is freed it is detached; whatever it may still touch belongs
 * to `threads`, which the last one frees.
 */
#include "iouring/clock.h"
#include "iouring/io_backend.h"
#include "iouring/io_steps.h"
#include "iouring/thread_signals.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

enum { KEEP_BYTES = 128 << 20, WORKER_STACK_BYTES = 1 << 20 };

typedef struct worker {
    pthread_t thread;
    bool is_started, is_finished; /* under the lock; finished: can be joined without waiting */
    cg_io_op *op;                 /* what it runs; under the lock */
    struct threads *threads;
} worker;

typedef struct op_list {
    cg_io_op *first, **end;
} op_list;

typedef struct threads {
    pthread_mutex_t lock; /* of everything below, and of ops while they are in a list */
    pthread_cond_t work, done;
    op_list waiting, finished;
    uint32_t n_running,
        n_abandoned;              /* workers that are not finished; operations that are held up */
    uint32_t n_wanted, n_workers; /* workers to have besides the held ones; places in workers[] */
    uint32_t n_idle, n_waiting;   /* workers without an op; ops without a worker */
    bool woken, stopping;
    cg_io_pool *pool;      /* held for workers that outlive the queue */
    uint32_t n_references; /* the queue's, and one for each worker */
    worker workers[];
} threads;

static void list_init(op_list *list)
{
    list->first = NULL;
    list->end = &list->first;
}

static void list_push(op_list *list, cg_io_op *op)
{
    op->next = NULL;
    *list->end = op;
    list->end = &op->next;
}

static cg_io_op *list_pop(op_list *list)
{
    cg_io_op *op = list->first;
    if (op != NULL && (list->first = op->next) == NULL)
        list->end = &list->first;
    return op;
}

/* Called with the lock, which it releases. */
static void drop_reference(threads *t)
{
    const bool last = --t->n_references == 0;
    pthread_mutex_unlock(&t->lock);
    if (!last)
        return;
    pthread_cond_destroy(&t->work);
    pthread_cond_destroy(&t->done);
    pthread_mutex_destroy(&t->lock);
    cg_io_pool_drop(t->pool);
    free(t);
}

/* The op has run to its end. With the lock. */
static void hand_back(threads *t, cg_io_op *op)
{
    if (!cg_io_op_is_abandoned(op)) { /* asked under the lock, which whoever abandons has */
        list_push(&t->finished, op);
        pthread_cond_signal(&t->done);
        return;
    }
    t->n_abandoned--;
    if (op->buffer != NULL)
        cg_io_pool_discard(op->buffer);
    op->buffer = NULL;
    cg_io_op_free(op);
}

static void *worker_main(void *argument)
{
    worker *w = argument;
    threads *t = w->threads;
    pthread_mutex_lock(&t->lock);
    /* Workers that took the place of a held one leave when that one is back. */
    while (t->n_running - t->n_abandoned <= t->n_wanted) {
        cg_io_op *op = list_pop(&t->waiting);
        if (op == NULL) {
            if (t->stopping)
                break;
            t->n_idle++;
            pthread_cond_wait(&t->work, &t->lock);
            t->n_idle--;
            continue;
        }
        t->n_waiting--;
        w->op = op;
        pthread_mutex_unlock(&t->lock);
        cg_io_op_run(op);
        pthread_mutex_lock(&t->lock);
        w->op = NULL;
        hand_back(t, op);
    }
    w->is_finished = true;
    t->n_running--;
    pthread_cond_signal(&t->done);
    pthread_cond_signal(&t->work); /* a signal that was meant for work may have come to this one */
    drop_reference(t);
    return NULL;
}

/* With the lock: makes a worker in a place that is free. */
static int start_worker(threads *t)
{
    worker *w = NULL;
    for (uint32_t i = 0; i < t->n_workers && w == NULL; i++)
        if (!t->workers[i].is_started || t->workers[i].is_finished)
            w = &t->workers[i];
    if (w == NULL)
        return EAGAIN;
    if (w->is_started)
        pthread_join(
            w->thread,
            NULL); /* it is on its last lines, and drop_reference() needs no lock that we hold */

    pthread_attr_t attributes;
    sigset_t before;
    int error = pthread_attr_init(&attributes);
    if (error != 0)
        return error;
    pthread_attr_setstacksize(&attributes, WORKER_STACK_BYTES);
    *w = (worker){.threads = t};
    cg_thread_signals_block(&before);
    error = pthread_create(&w->thread, &attributes, worker_main, w);
    cg_thread_signals_restore(&before);
    pthread_attr_destroy(&attributes);
    if (error == 0) {
        w->is_started = true;
        t->n_running++;
        t->n_references++;
    }
    return error;
}

static cg_status threads_submit(cg_io *io, cg_io_op *op)
{
    threads *t = io->backend;
    pthread_mutex_lock(&t->lock);
    list_push(&t->waiting, op);
    t->n_waiting++;
    pthread_cond_signal(&t->work);
    /* A worker that was signalled counts as idle until it runs, as its op counts as waiting: only
     * the two together tell whether there is a worker for each. */
    if (t->n_waiting > t->n_idle && t->n_running - t->n_abandoned < t->n_wanted)
        start_worker(t); /* without one more, the rest still work */
    pthread_mutex_unlock(&t->lock);
    return CG_OK;
}

/* With the lock. False when the time is up. */
static bool wait_done(threads *t, uint64_t deadline_ns)
{
    if (deadline_ns == UINT64_MAX)
        return pthread_cond_wait(&t->done, &t->lock) == 0;
    const struct timespec until = cg_deadline_at(deadline_ns);
    return pthread_cond_timedwait(&t->done, &t->lock, &until) == 0;
}

static cg_status threads_wait(cg_io *io, uint64_t timeout_ns)
{
    threads *t = io->backend;
    op_list finished;
    const uint64_t deadline_ns = cg_io_deadline_ns(timeout_ns);
    pthread_mutex_lock(&t->lock);
    while (t->finished.first == NULL && !t->woken && timeout_ns > 0 && wait_done(t, deadline_ns))
        ;
    /* With something to take, a wake-up stays for the next wait. */
    if (t->finished.first == NULL)
        t->woken = false;
    finished = t->finished;
    list_init(&t->finished);
    pthread_mutex_unlock(&t->lock);
    /* Without the lock: `io` is the queue's thread's, which this is. */
    while (finished.first != NULL) {
        cg_io_op *op = finished.first;
        finished.first = op->next;
        cg_io_complete(io, op);
    }
    return CG_OK;
}

static void threads_wake(cg_io *io)
{
    threads *t = io->backend;
    pthread_mutex_lock(&t->lock);
    t->woken = true;
    pthread_cond_signal(&t->done);
    pthread_mutex_unlock(&t->lock);
}

/* Takes the ops of `waiting` that match out of it. With the lock. */
static cg_io_op *take_waiting(threads *t, bool (*matches)(const cg_io_op *, uint64_t),
                              uint64_t user)
{
    op_list keep;
    cg_io_op *taken = NULL, *op;
    list_init(&keep);
    while ((op = list_pop(&t->waiting)) != NULL) {
        if (matches(op, user)) {
            t->n_waiting--;
            op->next = taken;
            taken = op;
        } else {
            list_push(&keep, op);
        }
    }
    list_init(&t->waiting);
    while ((op = list_pop(&keep)) != NULL)
        list_push(&t->waiting, op);
    return taken;
}

static bool has_user(const cg_io_op *op, uint64_t user)
{
    return op->user == user;
}

static bool is_not_write(const cg_io_op *op, uint64_t unused)
{
    (void)unused;
    return op->kind != CG_IO_OP_WRITE;
}

static bool is_any(const cg_io_op *op, uint64_t unused)
{
    (void)op, (void)unused;
    return true;
}

static void abandon_running(threads *t, cg_io_op *op)
{
    cg_io_op_abandon(op);
    t->n_abandoned++;
}

static void threads_abandon(cg_io *io, uint64_t user)
{
    threads *t = io->backend;
    pthread_mutex_lock(&t->lock);
    for (cg_io_op *op = take_waiting(t, has_user, user), *next; op != NULL; op = next) {
        next = op->next;
        op->completed_ns = cg_now_ns();
        cg_io_op_record_error(op, ETIMEDOUT);
        list_push(&t->finished, op);
    }
    for (uint32_t i = 0; i < t->n_workers; i++) {
        cg_io_op *op = t->workers[i].op;
        if (op == NULL || op->user != user || cg_io_op_is_abandoned(op))
            continue;
        abandon_running(t, op);
        cg_io_complete_abandoned(io, op);
        start_worker(t); /* without one more, the rest still work */
    }
    pthread_mutex_unlock(&t->lock);
}

static uint32_t threads_n_abandoned(const cg_io *io)
{
    threads *t = io->backend;
    pthread_mutex_lock(&t->lock);
    const uint32_t n = t->n_abandoned;
    pthread_mutex_unlock(&t->lock);
    return n;
}

static void free_ops(cg_io_op *op)
{
    while (op != NULL) {
        cg_io_op *next = op->next;
        cg_io_op_free(op);
        op = next;
    }
}

static void threads_free(cg_io *io, uint64_t grace_ns)
{
    threads *t = io->backend;
    const uint64_t deadline_ns = cg_io_deadline_ns(grace_ns);
    pthread_mutex_lock(&t->lock);
    t->stopping = true;
    free_ops(take_waiting(t, is_not_write, 0));
    for (uint32_t i = 0; i < t->n_workers; i++)
        if (t->workers[i].op != NULL && t->workers[i].op->kind != CG_IO_OP_WRITE &&
            !cg_io_op_is_abandoned(t->workers[i].op))
            abandon_running(t, t->workers[i].op);
    pthread_cond_broadcast(&t->work);
    while (t->n_running > 0 && wait_done(t, deadline_ns))
        ;
    free_ops(take_waiting(t, is_any, 0));
    for (uint32_t i = 0; i < t->n_workers; i++) {
        worker *w = &t->workers[i];
        if (w->op != NULL && !cg_io_op_is_abandoned(w->op))
            abandon_running(t, w->op);
        if (w->is_started && w->is_finished)
            pthread_join(w->thread, NULL); /* on its last lines, which need no lock */
        else if (w->is_started)
            pthread_detach(w->thread);
    }
    free_ops(t->finished.first);
    list_init(&t->finished);
    drop_reference(t);
}

static const cg_io_backend_calls CALLS = {
    .submit = threads_submit,
    .wait = threads_wait,
    .wake = threads_wake,
    .abandon = threads_abandon,
    .n_abandoned = threads_n_abandoned,
    .free = threads_free,
};

static int init_locks(threads *t)
{
    int error;
    if ((error = pthread_mutex_init(&t->lock, NULL)) == 0 &&
        (error = pthread_cond_init(&t->work, NULL)) == 0)
        error = cg_cond_init(&t->done);
    return error;
}

cg_status cg_io_threads_open(cg_io *io)
{
    /* Fewer than max_abandoned are held up when an operation is submitted, and then queue_depth may
     * hang too; each held worker has a successor. */
    const uint32_t n_workers =
        io->config.n_threads + io->config.max_abandoned + io->config.queue_depth;
    cg_status status = cg_io_pool_new(KEEP_BYTES, NULL, NULL, &io->pool);
    if (status != CG_OK)
        return status;
    threads *t = calloc(1, sizeof *t + n_workers * sizeof t->workers[0]);
    if (t == NULL || init_locks(t) != 0) {
        free(t);
        cg_io_pool_close(io->pool);
        io->pool = NULL;
        return CG_ERR_NO_MEMORY;
    }
    list_init(&t->waiting);
    list_init(&t->finished);
    t->n_wanted = io->config.n_threads;
    t->n_workers = n_workers;
    t->n_references = 1;
    t->pool = io->pool;
    cg_io_pool_hold(io->pool);
    io->calls = &CALLS;
    io->backend = t;

    pthread_mutex_lock(&t->lock);
    /* The others start when there is work for them. */
    const bool has_workers = start_worker(t) == 0;
    pthread_mutex_unlock(&t->lock);
    if (!has_workers) {
        pthread_mutex_lock(&t->lock);
        drop_reference(t);
        cg_io_pool_close(io->pool);
        io->pool = NULL;
        return CG_ERR_NO_MEMORY;
    }
    return CG_OK;
}
