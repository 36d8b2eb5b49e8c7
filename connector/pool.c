#include "connector/pool.h"

#include "iouring/thread_signals.h"

#include <dirent.h>
#include <fenv.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

/* Where nobody says how many: more would take an engine's CPUs from requests that run. */
enum { MOST_THREADS = 8, MOST_NICE = 19 };

struct cg_pool {
    pthread_mutex_t lock; /* of all below; nothing is called with it held */
    pthread_cond_t work;
    cg_job *head[CG_N_JOB_QUEUES], *tail[CG_N_JOB_QUEUES];
    uint32_t n_busy; /* tasks under way: their jobs may submit more */
    bool stop;
    bool started;
    int nice; /* constant */
    uint32_t n_threads, n_running, n_cpus;
    _Atomic uint32_t n_placed; /* threads that have begun */
    pthread_t *threads;
    _Atomic pid_t *ids; /* the kernel's, by the order in which they have begun; 0: not yet */
    uint32_t cpus[];
};

static cg_status reserve(void **piece, size_t *have_bytes, size_t n_bytes)
{
    if (n_bytes <= *have_bytes)
        return CG_OK;
    /* aligned_alloc() wants a multiple of the alignment. An overflow makes it less than n_bytes. */
    const size_t rounded = (n_bytes + 4095) / 4096 * 4096;
    void *larger = aligned_alloc(64, rounded);
    if (rounded < n_bytes || larger == NULL) {
        free(larger);
        return CG_ERR_NO_MEMORY;
    }
    free(*piece);
    *piece = larger;
    *have_bytes = rounded;
    return CG_OK;
}

cg_status cg_scratch_reserve(cg_scratch *s, size_t codec_bytes, size_t tile_bytes)
{
    const cg_status status = reserve(&s->codec, &s->codec_bytes, codec_bytes);
    return status == CG_OK ? reserve(&s->tile, &s->tile_bytes, tile_bytes) : status;
}

bool cg_thread_cpus(cpu_set_t *cpus_out)
{
    CPU_ZERO(cpus_out);
    DIR *threads = opendir("/proc/self/task");
    for (struct dirent *entry; threads != NULL && (entry = readdir(threads)) != NULL;) {
        cpu_set_t own;
        const pid_t thread = (pid_t)strtol(entry->d_name, NULL, 10); /* "." and "..": 0, this one */
        if (sched_getaffinity(thread, sizeof own, &own) == 0)        /* else it has just ended */
            CPU_OR(cpus_out, cpus_out, &own);
    }
    if (threads != NULL)
        closedir(threads);
    return CPU_COUNT(cpus_out) > 0;
}

uint32_t cg_pool_count_cpus(uint32_t n_cpus)
{
    cpu_set_t set;
    return n_cpus > 0 ? n_cpus : cg_thread_cpus(&set) ? (uint32_t)CPU_COUNT(&set) : 1;
}

uint32_t cg_pool_choose_threads(uint32_t n_wanted, uint32_t n_cpus)
{
    return n_wanted > 0 ? n_wanted : n_cpus < MOST_THREADS ? n_cpus : MOST_THREADS;
}

/* What a thread begins with. */
typedef struct beginning {
    void *(*body)(void *);
    void *argument;
    bool is_bound;
} beginning;

static void *begin(void *argument)
{
    const beginning own = *(const beginning *)argument;
    cpu_set_t cpus;
    free(argument);
    /* Threads also inherit how floats are computed: an engine may flush subnormal numbers to 0
     * (torch.set_flush_denormal()), and codec/FORMAT.md has none flushed. */
    (void)fesetenv(FE_DFL_ENV);
    if (!own.is_bound && cg_thread_cpus(&cpus))
        (void)sched_setaffinity(0, sizeof cpus, &cpus); /* otherwise it stays where it is */
    return own.body(own.argument);
}

cg_status cg_thread_start(pthread_t *thread_out, const char *name, const uint32_t *cpus,
                          uint32_t n_cpus, void *(*body)(void *), void *argument)
{
    pthread_attr_t attributes;
    beginning *first = malloc(sizeof *first);
    if (first == NULL || pthread_attr_init(&attributes) != 0) {
        free(first);
        return CG_ERR_NO_MEMORY;
    }
    *first = (beginning){body, argument, n_cpus > 0};
    if (n_cpus > 0) {
        cpu_set_t set;
        CPU_ZERO(&set);
        for (uint32_t i = 0; i < n_cpus; i++)
            CPU_SET(cpus[i], &set);
        pthread_attr_setaffinity_np(&attributes, sizeof set, &set);
    }
    sigset_t before;
    cg_thread_signals_block(&before);
    /* An engine's step may start threads, and must not wait: looking around is left to them. */
    const int error = pthread_create(thread_out, &attributes, begin, first);
    cg_thread_signals_restore(&before);
    pthread_attr_destroy(&attributes);
    if (error == 0)
        pthread_setname_np(*thread_out, name);
    else
        free(first);
    return cg_status_from_errno(error);
}

cg_status cg_pool_new(uint32_t n_threads, int nice, const uint32_t *cpus, uint32_t n_cpus,
                      cg_pool **pool_out)
{
    *pool_out = NULL;
    cg_pool *pool = calloc(1, sizeof *pool + n_cpus * sizeof pool->cpus[0]);
    if (pool == NULL || (pool->threads = calloc(n_threads, sizeof *pool->threads)) == NULL ||
        (pool->ids = calloc(n_threads, sizeof *pool->ids)) == NULL) {
        if (pool != NULL)
            free(pool->threads);
        free(pool);
        return CG_ERR_NO_MEMORY;
    }
    pool->n_threads = n_threads;
    pool->nice = nice;
    pool->n_cpus = n_cpus;
    if (n_cpus > 0)
        memcpy(pool->cpus, cpus, n_cpus * sizeof pool->cpus[0]);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    *pool_out = pool;
    return CG_OK;
}

/* With the lock held: the next task, or NULL. A job leaves its queue with its last task. */
static cg_job *take(cg_pool *pool, uint32_t *task_out)
{
    /* In the order of the queues: decoding goes first. */
    for (int queue = 0; queue < CG_N_JOB_QUEUES; queue++) {
        cg_job *job = pool->head[queue];
        if (job == NULL)
            continue;
        *task_out = job->next_task++;
        if (job->next_task == job->n_tasks && (pool->head[queue] = job->next) == NULL)
            pool->tail[queue] = NULL;
        return job;
    }
    return NULL;
}

/* Linux has a niceness a thread, and 0 means the thread that asks. The limit is the system's.
 * SCHED_IDLE is a fifth of what 19 alone gets of a CPU that is busy: an engine that computes on all
 * CPUs waits for its slowest thread, so the shares of all our threads add up. Whoever wakes up
 * beside it has the CPU at once. */
static void be_nice(int nice)
{
    const struct sched_param none = {0};
    if (nice != 0)
        setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) + nice);
    if (nice >= MOST_NICE)
        (void)sched_setscheduler(0, SCHED_IDLE, &none); /* where that is refused, 19 it is */
}

/* Whoever stops a pool waits for it, so its threads are as important as that one from now on. Where
 * that is refused (RLIMIT_NICE) they take the time that they get. They have not left: `stop` is not
 * set yet. */
static void be_nice_no_more(cg_pool *pool)
{
    const struct sched_param none = {0};
    const int own = getpriority(PRIO_PROCESS, 0);
    for (uint32_t i = 0; i < pool->n_threads && pool->nice != 0; i++) {
        const pid_t id = atomic_load(&pool->ids[i]);
        if (id == 0)
            continue;
        (void)sched_setscheduler(id, SCHED_OTHER, &none);
        (void)setpriority(PRIO_PROCESS, (id_t)id, own);
    }
}

/* With as many threads as CPUs each has one for itself. The kernel spreads threads by their number:
 * beside an engine's that polls (vLLM's does, for as long as a load lasts) it may leave two of ours
 * on one CPU, and that one alone on the other. Sharing, the poller yields. */
static void take_own_cpu(const cg_pool *pool, uint32_t index)
{
    cpu_set_t all, own;
    if (sched_getaffinity(0, sizeof all, &all) != 0 || (uint32_t)CPU_COUNT(&all) != pool->n_threads)
        return;
    int cpu = 0;
    for (uint32_t n = 0; !CPU_ISSET(cpu, &all) || n++ < index % pool->n_threads;)
        cpu++;
    CPU_ZERO(&own);
    CPU_SET(cpu, &own);
    (void)sched_setaffinity(0, sizeof own, &own);
}

static void *worker(void *argument)
{
    cg_pool *pool = argument;
    cg_scratch scratch = {0};
    const uint32_t index = atomic_fetch_add(&pool->n_placed, 1);
    if (pool->nice == 0)
        take_own_cpu(pool, index);
    be_nice(pool->nice);
    atomic_store(&pool->ids[index], gettid());
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        uint32_t task;
        cg_job *job = take(pool, &task);
        if (job == NULL) {
            if (pool->stop && pool->n_busy == 0)
                break;
            pthread_cond_wait(&pool->work, &pool->lock);
            continue;
        }
        pool->n_busy++;
        pthread_mutex_unlock(&pool->lock);
        job->run(job, task, &scratch);
        pthread_mutex_lock(&pool->lock);
        if (++job->n_done == job->n_tasks) { /* the last to end, not the last to begin */
            pthread_mutex_unlock(&pool->lock);
            job->done(job); /* the job may be gone after this */
            pthread_mutex_lock(&pool->lock);
        }
        pool->n_busy--;
        /* All threads wait for the last task: what it submits is run, too. */
        if (pool->stop)
            pthread_cond_broadcast(&pool->work);
    }
    pthread_mutex_unlock(&pool->lock);
    free(scratch.codec);
    free(scratch.tile);
    return NULL;
}

/* With the lock held. */
static cg_status start_threads(cg_pool *pool)
{
    cg_status status = CG_OK;
    while (pool->n_running < pool->n_threads && status == CG_OK) {
        status = cg_thread_start(&pool->threads[pool->n_running],
                                 pool->nice != 0 ? "cachegen-encode" : "cachegen-work", pool->cpus,
                                 pool->n_cpus, worker, pool);
        if (status == CG_OK)
            pool->n_running++;
    }
    pool->started = pool->n_running > 0; /* fewer threads are slower, not wrong */
    return pool->started ? CG_OK : status;
}

cg_status cg_pool_start(cg_pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    const cg_status status = pool->stop      ? CG_ERR_CANCELLED
                             : pool->started ? CG_OK
                                             : start_threads(pool);
    pthread_mutex_unlock(&pool->lock);
    return status;
}

/* is_first: in front of those that wait. */
static cg_status put_in(cg_pool *pool, cg_job_queue queue, cg_job *job, bool is_first)
{
    pthread_mutex_lock(&pool->lock);
    cg_status status = CG_ERR_CANCELLED;
    if (!pool->stop || pool->n_busy > 0) /* else its threads may have left */
        status = pool->started ? CG_OK : start_threads(pool);
    if (status == CG_OK) {
        cg_job **link =
            is_first || pool->head[queue] == NULL ? &pool->head[queue] : &pool->tail[queue]->next;
        job->next_task = job->n_done = 0;
        if ((job->next = *link) == NULL)
            pool->tail[queue] = job;
        *link = job;
        if (job->n_tasks > 1)
            pthread_cond_broadcast(&pool->work);
        else
            pthread_cond_signal(&pool->work);
    }
    pthread_mutex_unlock(&pool->lock);
    return status;
}

cg_status cg_pool_submit(cg_pool *pool, cg_job_queue queue, cg_job *job)
{
    return put_in(pool, queue, job, false);
}

cg_status cg_pool_go_on(cg_pool *pool, cg_job_queue queue, cg_job *job)
{
    return put_in(pool, queue, job, true);
}

void cg_pool_stop(cg_pool *pool)
{
    if (pool == NULL)
        return;
    be_nice_no_more(pool);
    pthread_mutex_lock(&pool->lock);
    pool->stop = true;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    /* Once `stop` is set no more threads are started: a job is only taken while one of them is
     * busy. */
    for (uint32_t i = 0; i < pool->n_running; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_mutex_lock(&pool->lock);
    pool->n_running = 0;
    pthread_mutex_unlock(&pool->lock);
    for (uint32_t i = 0; i < pool->n_threads; i++)
        atomic_store(&pool->ids[i], 0); /* may be other threads' by now */
}

void cg_pool_free(cg_pool *pool)
{
    if (pool == NULL)
        return;
    cg_pool_stop(pool);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->lock);
    free(pool->threads);
    free(pool->ids);
    free(pool);
}
