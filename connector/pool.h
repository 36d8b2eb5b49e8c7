/* connector/pool.h - the connector's worker threads, which run the codec's tasks beside an engine
 * without fighting it.
 *
 * A job is n_tasks independent tasks. Jobs wait in two queues, one to decode and one to encode. A
 * request waits for decoding and never for encoding, so decoding goes first. Within a queue the
 * oldest job goes first. Jobs live in the caller's memory: submitting allocates nothing, and fails
 * only where no thread can be started.
 * A pool whose threads are nice leaves the CPUs to whoever else has work. Its jobs must take no
 * lock that an engine's step takes, not even for a moment: a nice thread may lose the CPU for long
 * while it has the lock. The CUDA driver's locks are such: its jobs must not call it, either.
 * Threads start with the first job, on the CPUs of the configuration or all of the process, with
 * the host's signals blocked (iouring/thread_signals.h). A pool belongs to the process that made
 * it. After fork() the child makes its own (connector/runtime.h).
 * Threads: any may submit jobs; whose memory a job is frees it after its end.
 */
#ifndef CG_CONNECTOR_POOL_H
#define CG_CONNECTOR_POOL_H
#include "codec/status.h"
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cg_pool cg_pool;

/* One thread's memory, kept from task to task. */
typedef struct cg_scratch {
    void *codec, *tile;
    size_t codec_bytes, tile_bytes;
} cg_scratch;

/* Makes both parts at least as large, 64-byte aligned; what they held is lost. CG_ERR_NO_MEMORY. */
cg_status cg_scratch_reserve(cg_scratch *scratch, size_t codec_bytes, size_t tile_bytes);

typedef struct cg_job cg_job;
struct cg_job {
    void (*run)(cg_job *job, uint32_t task_index, cg_scratch *scratch);
    void (*done)(
        cg_job *job); /* after the last task, on its thread; may submit the job anew or free it */
    uint32_t n_tasks; /* at least 1 */
    uint32_t next_task, n_done; /* the pool's */
    cg_job *next;               /* the pool's */
};

typedef enum cg_job_queue {
    CG_JOB_DECODE = 0,
    CG_JOB_ENCODE = 1,
    CG_N_JOB_QUEUES = 2
} cg_job_queue;

/* The caller frees *pool_out with cg_pool_free(). cpus[n_cpus]: copied; n_cpus 0: cg_thread_cpus().
 * If there are as many of them as threads, and nice is 0, each thread is bound to one.
 * nice: added to the niceness of the thread that starts the pool's threads. With 19 they are
 * SCHED_IDLE, too. CG_ERR_NO_MEMORY. */
cg_status cg_pool_new(uint32_t n_threads, int nice, const uint32_t *cpus, uint32_t n_cpus,
                      cg_pool **pool_out);
/* Starts the threads now, as nice as the caller and the pool's nice: for a pool whose first job a
 * nice thread submits. Fewer than wanted are no error. CG_ERR_NO_MEMORY: none could be started. */
cg_status cg_pool_start(cg_pool *pool);
/* Runs what is queued, then ends the threads, which are as nice as the caller by then, if the
 * system lets them. From then on nothing can be submitted (CG_ERR_CANCELLED). NULL is fine. */
void cg_pool_stop(cg_pool *pool);
/* Stops and frees. NULL is fine. */
void cg_pool_free(cg_pool *pool);
/* Any thread, also from inside run and done. After an error the job was not taken: no thread could
 * be started, or CG_ERR_CANCELLED. */
cg_status cg_pool_submit(cg_pool *pool, cg_job_queue queue, cg_job *job);
/* The same from inside done, for a job that goes on with other tasks: it is older than those that
 * wait, so these go behind it. */
cg_status cg_pool_go_on(cg_pool *pool, cg_job_queue queue, cg_job *job);

/* The CPUs that the threads of this process may use, all together. A new thread inherits the CPUs
 * of the thread that starts it, and vLLM binds each of its threads to one. All our threads would
 * share that one if they did not ask for the process's. false: the CPUs are not known. */
bool cg_thread_cpus(cpu_set_t *cpus_out);
/* The number of CPUs that threads bound to n_cpus have; 0: to cg_thread_cpus(). At least 1. */
uint32_t cg_pool_count_cpus(uint32_t n_cpus);
/* How many threads decode: n_wanted or, where that is 0, one for each of n_cpus CPUs, 8 at most. */
uint32_t cg_pool_choose_threads(uint32_t n_wanted, uint32_t n_cpus);

/* Starts a thread as the pool's are: named (15 bytes), the host's signals blocked, floats computed
 * as C has them at the start, bound to cpus; with n_cpus 0 to cg_thread_cpus(). */
cg_status cg_thread_start(pthread_t *thread_out, const char *name, const uint32_t *cpus,
                          uint32_t n_cpus, void *(*body)(void *), void *argument);

#ifdef __cplusplus
}
#endif
#endif
