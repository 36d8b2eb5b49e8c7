/* fusefs/scrub.c - a mount's scrubber: its part of fusefs/core.h. */
#include "fusefs/fs.h"
#include "fusefs/fsck.h"

#include <time.h>
#include <unistd.h>

/* A pass begins a day after the one before began, or at once if that took longer. While another
 * daemon is at it we ask now and then. */
enum { PASS_SECONDS = 24 * 3600, ASK_SECONDS = 600 };

typedef struct scrub {
    cg_fs *fs;
    cg_fsck_result told; /* what the metrics have of this pass */
} scrub;

/* True: the mount ends. */
static bool wait_ns(cg_fs *fs, uint64_t ns)
{
    struct timespec until;
    int error = 0;
    clock_gettime(CLOCK_MONOTONIC, &until);
    const uint64_t nsec = (uint64_t)until.tv_nsec + ns % 1000000000u;
    until.tv_sec += (time_t)(ns / 1000000000u + nsec / 1000000000u);
    until.tv_nsec = (long)(nsec % 1000000000u);
    pthread_mutex_lock(&fs->keep_lock);
    while (!fs->is_stopping && ns > 0 && error == 0)
        error = pthread_cond_timedwait(&fs->keep_stop, &fs->keep_lock, &until);
    const bool is_over = fs->is_stopping;
    pthread_mutex_unlock(&fs->keep_lock);
    return is_over;
}

static void tell(scrub *s, const cg_fsck_result *now)
{
    cg_metrics *m = &s->fs->metrics;
    const cg_fsck_result *told = &s->told;
    cg_metrics_add(&m->scrubbed_bytes, now->read_bytes - told->read_bytes);
    cg_metrics_add(&m->scrubbed[CG_SCRUBBED_WHOLE], now->n_whole - told->n_whole);
    cg_metrics_add(&m->scrubbed[CG_SCRUBBED_CUT], now->n_cut - told->n_cut);
    cg_metrics_add(&m->scrubbed[CG_SCRUBBED_QUARANTINED], now->n_quarantined - told->n_quarantined);
    cg_metrics_add(&m->scrubbed[CG_SCRUBBED_LEFT], now->n_left - told->n_left);
    cg_metrics_add(&m->scrubbed[CG_SCRUBBED_FAILED], now->n_failed - told->n_failed);
    s->told = *now;
}

static bool wait_and_tell(void *user, uint64_t ns, const cg_fsck_result *so_far)
{
    scrub *s = user;
    tell(s, so_far);
    return wait_ns(s->fs, ns);
}

static void report(void *user, const char *path, const char *what)
{
    cg_fs_log(((scrub *)user)->fs, CG_LOG_WARNING, "scrub: %s: %s", path, what);
}

static void make_pass(cg_fs *fs)
{
    scrub s = {.fs = fs};
    cg_fsck_result result;
    const cg_fsck_config config = {.root_fd = fs->root_fd,
                                   .staging = &fs->staging,
                                   .bytes_per_s = fs->scrub_bytes_per_s,
                                   .wait = wait_and_tell,
                                   .report = report,
                                   .user = &s};
    const cg_status status = cg_fsck_run(&config, &result);
    tell(&s, &result);
    if (status == CG_OK)
        cg_metrics_add(&fs->metrics.scrub_passes, 1);
    else if (status != CG_ERR_CANCELLED)
        cg_fs_log(fs, CG_LOG_WARNING, "scrub: %s", cg_strerror(status));
}

void cg_fs_scrub(cg_fs *fs)
{
    struct timespec start, now;
    if (fs->scrub_bytes_per_s == 0 || fs->read_only)
        return;
    do {
        uint64_t every_s = ASK_SECONDS;
        clock_gettime(CLOCK_MONOTONIC, &start);
        const int lock_fd = cg_staging_lock_store(&fs->staging, "scrubbing");
        if (lock_fd >= 0) {
            make_pass(fs);
            close(lock_fd);
            every_s = PASS_SECONDS;
        }
        clock_gettime(CLOCK_MONOTONIC, &now);
        const uint64_t passed_s = (uint64_t)(now.tv_sec - start.tv_sec);
        every_s = passed_s < every_s ? every_s - passed_s : 0;
        if (wait_ns(fs, every_s * 1000000000u))
            return;
    } while (true);
}
