#include "fusefs/space.h"

#include "fusefs/drop.h"
#include "fusefs/fs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { HIGH_PERCENT = 95, LOW_PERCENT = 90, SURVEY_SECONDS = 600, TOUCH_SECONDS = 3600 };
static const char LOCK_NAME[] = "evicting";

static uint64_t percent_of(uint64_t bytes, unsigned percent)
{
    return bytes / 100 * percent;
}

/* Of the survey, and what was published here since. */
static uint64_t used_now(const cg_fs *fs)
{
    return fs->space.surveyed_bytes + fs->metrics.published_bytes - fs->space.published_bytes;
}

/* The lock file stays, so that all daemons lock the same one. -1: another daemon is at it. */
static int lock_store(cg_fs *fs)
{
    const int fd = openat(fs->staging.all_fd, LOCK_NAME,
                          O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
    if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        close(fd);
        return -1;
    }
    return fd;
}

static void make_room(cg_fs *fs, const cg_survey *survey, uint64_t wanted_bytes)
{
    cg_eviction *steps;
    size_t n_steps, n_failed = 0;
    uint64_t freed_bytes = 0;
    int error = 0;
    if (cg_evict_choose(survey, time(NULL), wanted_bytes, &steps, &n_steps) != CG_OK) {
        cg_fs_log(fs, CG_LOG_WARNING, "making room: %s", strerror(ENOMEM));
        return;
    }
    for (size_t i = 0; i < n_steps && !fs->is_stopping; i++) {
        const cg_eviction *step = &steps[i];
        const int result = cg_drop(&fs->staging, fs->root_fd, survey, &survey->files[step->file],
                                   step->finest_left);
        if (result != 0) {
            error = result;
            n_failed++;
            continue;
        }
        freed_bytes += step->freed_bytes;
        cg_metrics_add(step->finest_left < CG_N_LEVELS ? &fs->metrics.cut : &fs->metrics.evicted,
                       1);
    }
    cg_metrics_add(&fs->metrics.evicted_bytes, freed_bytes);
    cg_metrics_add(&fs->metrics.evict_errors, n_failed);
    fs->space.surveyed_bytes -=
        freed_bytes < fs->space.surveyed_bytes ? freed_bytes : fs->space.surveyed_bytes;
    if (n_failed > 0)
        cg_fs_log(fs, CG_LOG_WARNING, "making room: %zu of %zu steps failed: %s", n_failed, n_steps,
                  strerror(error));
    free(steps);
}

void cg_space_tend(cg_fs *fs)
{
    cg_survey survey;
    struct timespec now;
    const uint64_t published_bytes = fs->metrics.published_bytes;
    const int lock_fd = lock_store(fs);
    const cg_status status = cg_survey_make(fs->root_fd, cg_fs_is_stopping, fs, &survey);
    clock_gettime(CLOCK_MONOTONIC, &now);
    fs->space.surveyed_at_s = now.tv_sec;
    if (status == CG_OK) {
        fs->space.surveyed_bytes = survey.used_bytes;
        fs->space.published_bytes = published_bytes;
        if (lock_fd >= 0 && survey.used_bytes > percent_of(fs->space.quota_bytes, HIGH_PERCENT))
            make_room(fs, &survey,
                      survey.used_bytes - percent_of(fs->space.quota_bytes, LOW_PERCENT));
        const bool is_full = used_now(fs) >= fs->space.quota_bytes;
        if (is_full && !fs->space.is_full)
            cg_fs_log(fs, CG_LOG_WARNING,
                      "the store takes more than its quota, and all of it is kept by contexts");
        fs->space.is_full = is_full;
        cg_survey_free(&survey);
    } else if (status != CG_ERR_CANCELLED) {
        cg_fs_log(fs, CG_LOG_WARNING, "looking for what takes the space: %s", cg_strerror(status));
    }
    fs->metrics.quota_bytes = fs->space.quota_bytes;
    fs->metrics.used_bytes = used_now(fs);
    if (lock_fd >= 0)
        close(lock_fd);
}

bool cg_space_is_due(cg_fs *fs, int64_t now_s)
{
    if (fs->space.quota_bytes == 0 || fs->read_only)
        return false;
    const int64_t age_s = now_s - fs->space.surveyed_at_s;
    return fs->space.surveyed_at_s == 0 || age_s >= SURVEY_SECONDS ||
           (used_now(fs) > percent_of(fs->space.quota_bytes, HIGH_PERCENT) &&
            fs->metrics.published_bytes > fs->space.published_bytes);
}

void cg_space_statfs(cg_fs *fs, struct statvfs *inout)
{
    const uint64_t quota = fs->space.quota_bytes, used = used_now(fs);
    if (quota == 0 || inout->f_frsize == 0)
        return;
    const uint64_t left = (used < quota ? quota - used : 0) / inout->f_frsize;
    inout->f_blocks = quota / inout->f_frsize;
    inout->f_bfree = inout->f_bfree < left ? inout->f_bfree : left;
    inout->f_bavail = inout->f_bavail < left ? inout->f_bavail : left;
}

void cg_space_touch(cg_fs *fs, int fd)
{
    static const struct timespec times[] = {{.tv_nsec = UTIME_NOW}, {.tv_nsec = UTIME_OMIT}};
    struct stat attr;
    if (fs->space.quota_bytes != 0 && !fs->read_only && fstat(fd, &attr) == 0 &&
        time(NULL) - attr.st_atim.tv_sec > TOUCH_SECONDS)
        (void)futimens(fd, times); /* it is as it was, then */
}

int cg_space_check(cg_fs *fs)
{
    return fs->space.is_full ? ENOSPC : 0;
}
