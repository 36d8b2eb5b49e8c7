/* iouring/clock.h - the clock of all deadlines and durations: CLOCK_MONOTONIC, which nobody sets.
 *
 * Threads: any.
 */
#ifndef CG_IOURING_CLOCK_H
#define CG_IOURING_CLOCK_H
#include <pthread.h>
#include <stdint.h>
#include <time.h>

#define CG_SECOND_NS UINT64_C(1000000000)

/* Now, in nanoseconds. */
static inline uint64_t cg_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * CG_SECOND_NS + (uint64_t)now.tv_nsec;
}

/* Now, in whole seconds. */
static inline int64_t cg_now_s(void)
{
    return (int64_t)(cg_now_ns() / CG_SECOND_NS);
}

/* A time of this clock as pthread_cond_timedwait() on a cg_cond_init() takes it. */
static inline struct timespec cg_deadline_at(uint64_t at_ns)
{
    struct timespec at;
    at.tv_sec = (time_t)(at_ns / CG_SECOND_NS);
    at.tv_nsec = (long)(at_ns % CG_SECOND_NS);
    return at;
}

/* The same of the time in ns nanoseconds. */
static inline struct timespec cg_deadline_in(uint64_t ns)
{
    return cg_deadline_at(cg_now_ns() + ns);
}

/* A condition whose deadlines are of this clock; pthread's own are of the clock that is set.
 * Returns 0 or an errno value. */
static inline int cg_cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t monotonic;
    int error = pthread_condattr_init(&monotonic);
    if (error != 0)
        return error;
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    error = pthread_cond_init(cond, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return error;
}
#endif
