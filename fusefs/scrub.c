/* fusefs/scrub.c - a mount's scrubber: its part of fusefs/core.h. */
#include "fusefs/fs.h"
#include "fusefs/fsck.h"
#include "fusefs/lease.h"
#include "iouring/clock.h"

/* A pass begins a day after the one before began, or at once if that took longer. While another
 * daemon is at it we ask now and then. */
enum { PASS_SECONDS = 24 * 3600, ASK_SECONDS = 600 };

static const char LEASE[] = "scrubbing";

typedef struct scrub {
    cg_fs *fs;
    int64_t lease_seen_s; /* when it was ours the last time; CLOCK_MONOTONIC */
    cg_fsck_result told;  /* what the metrics have of this pass */
} scrub;

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
    /* The sums of a pass grow, the metrics' are of all passes: only the difference is added. */
    tell(s, so_far);
    return cg_fs_wait(s->fs, ns) || !cg_lease_still_holds(&s->fs->staging, LEASE, &s->lease_seen_s);
}

static void report(void *user, const char *path, const char *what)
{
    cg_fs_log(((scrub *)user)->fs, CG_LOG_WARNING, "scrub: %s: %s", path, what);
}

/* Whether it came to its end. */
static bool make_pass(cg_fs *fs)
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
    return status != CG_ERR_CANCELLED;
}

void cg_fs_scrub(cg_fs *fs)
{
    if (fs->scrub_bytes_per_s == 0 || fs->read_only)
        return;
    cg_fs_stand_back();
    do {
        uint64_t every_s = ASK_SECONDS;
        const int64_t start_s = cg_now_s();
        if (cg_lease_take(&fs->staging, LEASE)) {
            every_s = make_pass(fs) ? PASS_SECONDS : ASK_SECONDS;
            cg_lease_give_back(&fs->staging, LEASE);
        }
        const uint64_t passed_s = (uint64_t)(cg_now_s() - start_s);
        every_s = passed_s < every_s ? every_s - passed_s : 0;
        if (cg_fs_wait(fs, every_s * 1000000000u))
            return;
    } while (true);
}
