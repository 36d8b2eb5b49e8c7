#include "fusefs/scrub.h"

#include "fusefs/fs.h"
#include "fusefs/fsck.h"
#include "fusefs/lease.h"
#include "fusefs/stamp.h"
#include "iouring/clock.h"

enum { ASK_SECONDS = 600 }; /* while another daemon is at it */

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
    cg_metrics_add(&m->scrubbed[CG_SCRUBBED_BEING_WRITTEN],
                   now->n_being_written - told->n_being_written);
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

/* In how many seconds to ask again. */
static int64_t make_pass(cg_fs *fs)
{
    scrub s = {.fs = fs};
    cg_fsck_result result;
    const int64_t start_s = cg_now_s(), began_s = cg_staging_now_s(&fs->staging);
    const cg_fsck_config config = {.root_fd = fs->root_fd,
                                   .staging = &fs->staging,
                                   .bytes_per_s = fs->scrub_bytes_per_s,
                                   .wait = wait_and_tell,
                                   .report = report,
                                   .user = &s};
    const cg_status status = cg_fsck_run(&config, &result);
    tell(&s, &result);
    if (status != CG_OK) {
        if (status != CG_ERR_CANCELLED)
            cg_fs_log(fs, CG_LOG_WARNING, "scrub: %s", cg_strerror(status));
        return ASK_SECONDS;
    }
    cg_metrics_add(&fs->metrics.scrub_passes, 1);
    cg_stamp_set(fs->root_fd, CG_STAMP_SCRUBBED, began_s);
    /* By our own clock: the stamp may have failed. */
    const int64_t passed_s = cg_now_s() - start_s;
    return passed_s < CG_STAMP_EVERY_S ? CG_STAMP_EVERY_S - passed_s : 0;
}

int64_t cg_scrub_tend(cg_fs *fs)
{
    if (!cg_lease_take(&fs->staging, LEASE))
        return ASK_SECONDS;
    /* Asked while nobody else can be at it: who had the lease before may have made the pass. */
    int64_t wait_s = cg_stamp_due_s(fs->root_fd, CG_STAMP_SCRUBBED, cg_staging_now_s(&fs->staging));
    if (wait_s == 0)
        wait_s = make_pass(fs);
    cg_lease_give_back(&fs->staging, LEASE);
    return wait_s;
}

void cg_fs_scrub(cg_fs *fs)
{
    if (fs->scrub_bytes_per_s == 0)
        return;
    while (fs->awaits_room && !cg_fs_wait(fs, ASK_SECONDS * CG_SECOND_NS))
        ;
    if (fs->read_only)
        return;
    cg_fs_stand_back();
    while (!cg_fs_wait(fs, (uint64_t)cg_scrub_tend(fs) * CG_SECOND_NS))
        ;
}
