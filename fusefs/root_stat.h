/* fusefs/root_stat.h - the root's attributes, also while the store hangs.
 *
 * The kernel asks for them before it lets anybody into .cachegenfs. So a thread asks the store for
 * those who want them, and they wait for it at most CG_ROOT_STAT_SECONDS. Once somebody has waited
 * in vain, nobody waits until the thread has come back. Then the answer is what it saw last.
 * Threads: any. The lock is not held while the store is asked.
 */
#ifndef CG_FUSEFS_ROOT_STAT_H
#define CG_FUSEFS_ROOT_STAT_H
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>

enum { CG_ROOT_STAT_SECONDS = 1 };

typedef struct cg_root_stat {
    pthread_mutex_t lock;
    pthread_cond_t changed;              /* any of what follows; CLOCK_MONOTONIC */
    bool has_thread, is_late, is_over;   /* late: somebody waited for nothing */
    uint64_t n_wanted, n_begun, n_ended; /* looks, which are numbered */
    int error;                           /* of the last look */
    struct stat attr;                    /* of the last look that had one */
} cg_root_stat;

/* attr: as it is at the start. */
void cg_root_stat_init(cg_root_stat *root, const struct stat *attr);
/* Nobody asks, and the thread has ended. */
void cg_root_stat_destroy(cg_root_stat *root);
/* The thread's work: asks fd, until cg_root_stat_stop(). */
void cg_root_stat_run(cg_root_stat *root, int fd);
void cg_root_stat_stop(cg_root_stat *root);
/* The attributes, as they were at a time after the call; *is_old_out: before. Without the thread
 * fd is asked at once. 0 or an errno value. */
int cg_root_stat_get(cg_root_stat *root, int fd, struct stat *attr_out, bool *is_old_out);
#endif
