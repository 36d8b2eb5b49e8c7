#include "fusefs/space.h"

#include "fusefs/contexts.h"
#include "fusefs/drop.h"
#include "fusefs/fs.h"
#include "fusefs/grown.h"
#include "fusefs/lease.h"
#include "iouring/clock.h"
#include "iouring/store.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum {
    HIGH_PERCENT = 95,
    LOW_PERCENT = 90,
    SURVEY_SECONDS = 600,
    REST_SECONDS = 60, /* at least, where nothing more may go */
    REST_FACTOR = 10,  /* and so many times as long as a survey took */
    ASK_SECONDS = 10,
    GOOD_PART = 4,         /* of what goes the disk has at least one in so many */
    FIRST_BYTES = 1 << 20, /* more than a daemon's folder takes */
};
static const char LEASE[] = "evicting";

static uint64_t percent_of(uint64_t bytes, unsigned percent)
{
    return bytes / 100 * percent;
}

static uint64_t published_since(const cg_fs *fs)
{
    const uint64_t before = fs->space.published_bytes;
    return fs->metrics.published_bytes - before;
}

/* What has come through this mount since the survey. Most of what is published was written here,
 * and so was what is none, as a context's profile. What was written past us counts when it gets its
 * name. */
static uint64_t come_since(const cg_fs *fs)
{
    /* First what was at the survey: another may end meanwhile, and what the metrics were before
     * would be less. */
    const uint64_t written_before = fs->space.written_bytes, published = published_since(fs),
                   written = fs->metrics.written_bytes - written_before;
    return published > written ? published : written;
}

static uint64_t used_now(const cg_fs *fs)
{
    return fs->space.surveyed_bytes + come_since(fs);
}

static bool may_go_on(cg_fs *fs)
{
    return !fs->is_stopping && (fs->awaits_room || /* without a folder there is no lease */
                                cg_lease_still_holds(&fs->staging, LEASE, &fs->space.lease_seen_s));
}

static bool may_not_go_on(void *fs)
{
    return !may_go_on(fs);
}

static uint64_t bytes_of(fsblkcnt_t n_blocks, const struct statvfs *disk)
{
    /* What a disk says of itself need not fit. */
    return n_blocks < UINT64_MAX / disk->f_frsize ? n_blocks * disk->f_frsize : UINT64_MAX;
}

/* What is free on the disk for all, and what is with that which it keeps for root: where root has
 * filled that, too, it is what gets room first. False: the disk does not bound the store. One
 * without an end, as of tmpfs, has no blocks. */
static bool read_free(const cg_fs *fs, uint64_t *for_all_out, uint64_t *bytes_out)
{
    struct statvfs disk;
    if (fs->space.quota_bytes == 0 || fstatvfs(fs->root_fd, &disk) != 0 || disk.f_blocks == 0 ||
        disk.f_frsize == 0)
        return false;
    *for_all_out = bytes_of(disk.f_bavail, &disk);
    *bytes_out = bytes_of(disk.f_bfree, &disk);
    return true;
}

/* How much of what goes shows that the disk gets it. */
static uint64_t good_part(uint64_t bytes)
{
    return bytes / GOOD_PART;
}

/* Whether the disk has got a good part of what went for its sake. */
static bool has_gained(const cg_fs *fs, uint64_t free_bytes)
{
    return free_bytes >= fs->space.free_before_bytes &&
           free_bytes - fs->space.free_before_bytes >= good_part(fs->space.gone_bytes);
}

/* Whether what goes of all models goes for the disk's sake. */
static bool is_for_disk(const cg_fs *fs)
{
    return !fs->space.is_in_vain && fs->space.limit_bytes < fs->space.quota_bytes;
}

/* Making room by one survey. */
typedef struct room {
    cg_fs *fs;
    const cg_survey *survey;
    cg_evict_policy policy;
    bool *stays;        /* [n_files] by number: a chunk goes on from this one, and could not go */
    cg_eviction *whole; /* steps that need no room, chosen when the first cut has none */
    size_t n_whole, next_whole;
    size_t n_failed, n_stale;
    uint64_t freed_bytes;
    uint64_t gained_bytes; /* of what went for the disk's sake, as far as it was asked */
    int error;
} room;

/* Whether it is still to be seen that the disk gets what goes. Right before and after a step, since
 * others may take the room before the next one. False: not, or *free_bytes_out is not known. */
static bool asks_disk(const room *r, uint64_t *free_bytes_out)
{
    uint64_t for_all;
    return r->policy.model == CG_EVICT_ALL_MODELS && is_for_disk(r->fs) &&
           r->gained_bytes < good_part(r->policy.wanted_bytes) &&
           read_free(r->fs, &for_all, free_bytes_out);
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* What went for the disk's sake. Others may take the room at once, and some disks have it only
 * after a while: so each step, the end and the next look count. */
static void note_gone(const room *r)
{
    cg_space *space = &r->fs->space;
    uint64_t for_all, free_bytes;
    if (r->policy.model != CG_EVICT_ALL_MODELS || r->policy.wanted_bytes == 0 ||
        !is_for_disk(r->fs))
        return;
    space->gone_bytes = r->freed_bytes;
    if (r->gained_bytes >= good_part(least(r->freed_bytes, r->policy.wanted_bytes)) ||
        (read_free(r->fs, &for_all, &free_bytes) && has_gained(r->fs, free_bytes)))
        space->gone_bytes = 0;
}

/* Counts what it does. 0 or an errno value. */
static int take_step(room *r, const cg_eviction *step)
{
    cg_metrics *metrics = &r->fs->metrics;
    const bool is_cut = step->finest_left < CG_N_LEVELS;
    uint64_t before_bytes = 0, after_bytes, for_all;
    const bool asks = asks_disk(r, &before_bytes);
    int error = ESTALE;
    if (is_cut || !r->stays[step->chunk])
        error = cg_drop(&r->fs->staging, r->fs->root_fd, r->survey, &r->survey->files[step->file],
                        step->finest_left);
    if (error == 0) {
        r->freed_bytes += step->freed_bytes;
        if (asks && read_free(r->fs, &for_all, &after_bytes) && after_bytes > before_bytes)
            r->gained_bytes += least(after_bytes - before_bytes, step->freed_bytes);
        cg_metrics_add(is_cut ? &metrics->cut : &metrics->evicted, 1);
    } else if (step->parent != CG_EVICT_NO_CHUNK &&
               (error == ESTALE || (!is_cut && error != EALREADY))) {
        r->stays[step->parent] = true; /* a chain has no hole before what was used or is there */
    }
    return error;
}

/* The next survey sees what was used or changed since this one, and what errors left. */
static void note_error(room *r, int error)
{
    if (error == ESTALE || error == EALREADY) {
        r->n_stale++;
    } else {
        r->error = error;
        r->n_failed++;
    }
}

/* Whether a file went as a whole, so that there may be room for a copy. */
static bool free_whole(room *r)
{
    if (r->whole == NULL) {
        cg_evict_policy policy = r->policy;
        policy.takes_no_cuts = true;
        policy.wanted_bytes = UINT64_MAX;
        if (cg_evict_choose(r->survey, &policy, &r->whole, &r->n_whole) != CG_OK)
            return false;
    }
    while (r->next_whole < r->n_whole && may_go_on(r->fs)) {
        const int error = take_step(r, &r->whole[r->next_whole++]);
        if (error == 0)
            return true;
        note_error(r, error);
    }
    return false;
}

static void take_steps(room *r, const cg_eviction *steps, size_t n_steps)
{
    const uint64_t wanted_bytes = r->policy.wanted_bytes;
    for (size_t i = 0; i < n_steps && may_go_on(r->fs); i++) {
        int error = take_step(r, &steps[i]);
        /* The disk is full: that is when a cut is of most use, and has no room for its copy. */
        while (cg_staging_has_no_room(error) && r->freed_bytes < wanted_bytes && free_whole(r))
            error = take_step(r, &steps[i]);
        if (error != 0)
            note_error(r, error);
        if (r->next_whole > 0 && r->freed_bytes >= wanted_bytes)
            break; /* what went as a whole was not among what these steps were to free */
    }
}

static void tell_of_steps(const room *r, size_t n_steps)
{
    cg_fs *fs = r->fs;
    const uint64_t freed_bytes = r->freed_bytes;
    cg_metrics_add(&fs->metrics.evicted_bytes, freed_bytes);
    cg_metrics_add(&fs->metrics.evict_errors, r->n_failed);
    note_gone(r);
    fs->space.surveyed_bytes -=
        freed_bytes < fs->space.surveyed_bytes ? freed_bytes : fs->space.surveyed_bytes;
    /* Two who look through a store at once can make all that they read look used to each other. The
     * next survey may also know what this one could not read, but not what we may not read. */
    fs->space.is_unfinished |=
        freed_bytes < r->policy.wanted_bytes && (r->n_stale > 0 || r->survey->has_leased);
    if (r->n_failed > 0)
        cg_fs_log(fs, CG_LOG_WARNING, "making room: %zu of %zu steps failed: %s", r->n_failed,
                  n_steps + r->next_whole, strerror(r->error));
}

/* What is due by age, and wanted_bytes of the model or of all. Whether anything changed. */
static bool make_room(cg_fs *fs, const cg_survey *survey, uint32_t model, uint64_t wanted_bytes)
{
    cg_eviction *steps;
    size_t n_steps;
    /* The store's clock: ours may be wrong, and the files' times are the store's. */
    room r = {.fs = fs,
              .survey = survey,
              .policy = {.now_s = cg_staging_now_s(&fs->staging),
                         .wanted_bytes = wanted_bytes,
                         .model = model}};
    memcpy(r.policy.keep_s, fs->space.keep_s, sizeof r.policy.keep_s);
    const cg_status status = cg_evict_choose(survey, &r.policy, &steps, &n_steps);
    r.stays = n_steps > 0 ? calloc(survey->n_files, sizeof *r.stays) : NULL;
    if (status != CG_OK || (n_steps > 0 && r.stays == NULL)) {
        cg_fs_log(fs, CG_LOG_WARNING, "making room: %s", strerror(ENOMEM));
        n_steps = 0;
    }
    take_steps(&r, steps, n_steps);
    tell_of_steps(&r, n_steps);
    free(steps);
    free(r.whole);
    free(r.stays);
    return n_steps > 0;
}

/* How much is to go of what takes used_bytes. */
static uint64_t wanted_of(uint64_t quota_bytes, uint64_t used_bytes)
{
    return quota_bytes > 0 && used_bytes > percent_of(quota_bytes, HIGH_PERCENT)
               ? used_bytes - percent_of(quota_bytes, LOW_PERCENT)
               : 0;
}

/* The same of all models. */
static uint64_t wanted_of_all(const cg_fs *fs, const cg_survey *survey)
{
    return wanted_of(fs->space.is_in_vain ? fs->space.quota_bytes : fs->space.limit_bytes,
                     survey->used_bytes);
}

/* The first model that takes more than it may, and by how much; or all models. */
static uint64_t find_wanted(const cg_fs *fs, const cg_survey *survey, size_t *next_quota,
                            uint32_t *model_out)
{
    for (; *next_quota < fs->space.n_model_quotas; ++*next_quota) {
        const cg_model_quota *quota = &fs->space.model_quotas[*next_quota];
        for (uint32_t model = 0; model < survey->n_models; model++) {
            const uint64_t wanted = strcmp(survey->models[model], quota->model) == 0
                                        ? wanted_of(quota->bytes, survey->model_bytes[model])
                                        : 0;
            if (wanted == 0)
                continue;
            *model_out = model;
            ++*next_quota;
            return wanted;
        }
    }
    *model_out = CG_EVICT_ALL_MODELS;
    return wanted_of_all(fs, survey);
}

/* The quota, or what the disk can hold of the store beside all else if that is less: else a quota
 * beyond the disk would never make room. Also whether that still does anything: where a snapshot
 * has what goes, or somebody has it open, each look would take more until nothing is left. */
static void find_limit(cg_fs *fs, uint64_t used_bytes)
{
    cg_space *space = &fs->space;
    const uint64_t quota_bytes = space->quota_bytes,
                   left_bytes = used_bytes < quota_bytes ? quota_bytes - used_bytes : 0;
    uint64_t for_all = UINT64_MAX, free_bytes = UINT64_MAX;
    const bool is_bound = read_free(fs, &for_all, &free_bytes) && for_all < left_bytes;
    const uint64_t limit_bytes = is_bound ? used_bytes + for_all : quota_bytes;
    space->limit_bytes = limit_bytes;
    const bool was_in_vain = space->is_in_vain;
    space->is_in_vain = is_bound && space->gone_bytes > 0 && !has_gained(fs, free_bytes) &&
                        wanted_of(limit_bytes, used_bytes) > 0;
    if (space->is_in_vain && !was_in_vain)
        cg_fs_log(fs, CG_LOG_WARNING,
                  "what went gave its disk no room, as where a snapshot has it: the disk counts as "
                  "full, and nothing more goes for its sake");
    if (space->is_in_vain)
        return;
    space->gone_bytes = 0;
    space->free_before_bytes = free_bytes;
}

static bool survey_again(cg_fs *fs, cg_survey *survey)
{
    const uint64_t start_ns = cg_now_ns();
    /* Read before the survey: what comes while it runs counts twice rather than not at all. */
    const uint64_t published_bytes = fs->metrics.published_bytes,
                   written_bytes = fs->metrics.written_bytes;
    fs->space.lacks_room = false;
    cg_survey_free(survey);
    if (fs->staging.dir_fd >= 0)
        cg_staging_make_again(&fs->staging); /* a beat: the store's clock as it is now */
    const cg_status status = cg_survey_make(fs->root_fd, cg_fs_is_stopping, fs, survey);
    fs->space.survey_ms = (int64_t)((cg_now_ns() - start_ns) / 1000000u);
    if (status == CG_OK) {
        fs->space.surveyed_bytes = survey->used_bytes;
        find_limit(fs, survey->used_bytes);
        fs->space.published_bytes = published_bytes;
        fs->space.written_bytes = written_bytes;
        fs->space.is_known = true;
        if (survey->has_forbidden && !fs->space.has_forbidden)
            cg_fs_log(fs, CG_LOG_WARNING,
                      "the daemon may not read all contexts: nothing of their models goes: %s",
                      survey->forbidden != NULL ? survey->forbidden : "");
        fs->space.has_forbidden = survey->has_forbidden;
        if (survey->crowded != NULL && !fs->space.has_crowded)
            cg_fs_log(fs, CG_LOG_WARNING,
                      "the contexts name too many chunks: nothing of their model goes: %s",
                      survey->crowded);
        fs->space.has_crowded = survey->crowded != NULL;
    }
    if (status != fs->space.survey_status && status != CG_ERR_CANCELLED)
        cg_fs_log(fs, status == CG_OK ? CG_LOG_INFO : CG_LOG_WARNING,
                  "looking for what takes the space: %s",
                  status == CG_OK ? "it can be read again" : cg_strerror(status));
    fs->space.survey_status = status;
    return status == CG_OK;
}

static int by_number(const void *a, const void *b)
{
    const cg_expired_file *x = a, *y = b;
    return x->ino < y->ino ? -1 : x->ino > y->ino;
}

/* What expired contexts named, and when their time was over. By what it is: a file that loses its
 * finest levels gets another number. */
typedef struct expired_chunk {
    cg_key id;
    int64_t at_s;
} expired_chunk;

typedef struct expired {
    expired_chunk *chunks;
    size_t n_chunks, max_chunks;
} expired;

static cg_key id_of(const cg_survey *survey, const cg_object_file *file)
{
    struct {
        cg_key key;
        cg_fingerprint profile;
        char model[CG_TREE_NAME_BYTES];
    } id = {.key = file->key, .profile = file->profile};
    strncpy(id.model, survey->models[file->model], sizeof id.model - 1);
    return cg_key_of_bytes(&id, sizeof id);
}

static int by_id(const void *a, const void *b)
{
    const expired_chunk *x = a, *y = b;
    return memcmp(&x->id, &y->id, sizeof x->id);
}

/* What nobody has used since goes first. */
static void put_first(cg_survey *survey, const expired *gone)
{
    for (size_t i = 0; gone->n_chunks > 0 && i < survey->n_files; i++) {
        cg_object_file *file = &survey->files[i];
        const expired_chunk wanted = {.id = id_of(survey, file)};
        const expired_chunk *found =
            bsearch(&wanted, gone->chunks, gone->n_chunks, sizeof wanted, by_id);
        if (found != NULL && file->used_at_s < found->at_s)
            file->used_at_s = 0;
    }
}

/* In order, each once. */
static void sort_expired(expired *gone)
{
    size_t n = 0;
    if (gone->n_chunks == 0)
        return;
    qsort(gone->chunks, gone->n_chunks, sizeof *gone->chunks, by_id);
    for (size_t i = 1; i < gone->n_chunks; i++) {
        if (by_id(&gone->chunks[n], &gone->chunks[i]) != 0)
            gone->chunks[++n] = gone->chunks[i];
        else if (gone->chunks[n].at_s < gone->chunks[i].at_s)
            gone->chunks[n] = gone->chunks[i];
    }
    gone->n_chunks = n + 1;
}

/* Removes what has expired, of the model or of all. False: there is no survey any more. The caller
 * frees the chunks. */
static bool expire(cg_fs *fs, cg_survey *survey, uint32_t model, expired *inout)
{
    const char *name = model != CG_EVICT_ALL_MODELS ? survey->models[model] : NULL;
    cg_expired_file *files;
    size_t n_files, n_removed;
    cg_contexts_expire(fs->root_fd, &fs->staging, name, may_not_go_on, fs, &files, &n_files,
                       &n_removed);
    cg_metrics_add(&fs->metrics.expired, n_removed);
    const bool is_there = n_removed == 0 || survey_again(fs, survey);
    for (size_t i = 0; is_there && n_files > 0 && i < survey->n_files; i++) {
        const cg_expired_file wanted = {.ino = survey->files[i].ino};
        const cg_expired_file *found = bsearch(&wanted, files, n_files, sizeof wanted, by_number);
        if (found == NULL)
            continue;
        expired_chunk *chunks =
            cg_grown(inout->chunks, inout->n_chunks, &inout->max_chunks, sizeof *chunks);
        if (chunks == NULL)
            break; /* the rest goes in its turn */
        inout->chunks = chunks;
        chunks[inout->n_chunks++] = (expired_chunk){id_of(survey, &survey->files[i]), found->at_s};
    }
    sort_expired(inout);
    free(files);
    return is_there;
}

/* One quota after another: each needs to know what is left. */
static void tend_survey(cg_fs *fs, cg_survey *survey)
{
    size_t next_quota = 0, next_expired = 0;
    uint32_t model;
    bool is_there = true;
    expired gone = {.n_chunks = 0};
    while (is_there) {
        const size_t this_quota = next_quota;
        const uint64_t wanted = find_wanted(fs, survey, &next_quota, &model);
        /* Their numbers from 1 on; that of all models together is the last. */
        const size_t quota = next_quota + (model == CG_EVICT_ALL_MODELS);
        /* Only now that room is wanted: until then an expired context is as good as any. It may
         * have been enough, so the same quota is asked again. */
        if (wanted > 0 && next_expired <= quota) {
            next_expired = quota + 1;
            if (!expire(fs, survey, model, &gone))
                break;
            next_quota = this_quota;
            continue;
        }
        put_first(survey, &gone);
        const bool has_changed = make_room(fs, survey, model, wanted);
        if (model == CG_EVICT_ALL_MODELS)
            break;
        is_there = !has_changed || survey_again(fs, survey);
    }
    free(gone.chunks);
}

/* Whether anything ever goes. */
static bool is_bounded(const cg_fs *fs)
{
    bool found = fs->space.quota_bytes > 0 || fs->space.n_model_quotas > 0;
    for (unsigned level = 0; level < CG_N_LEVELS; level++)
        found |= fs->space.keep_s[level] > 0;
    return found;
}

/* Whether what has come since the survey can have filled the quota. */
static bool may_be_full(const cg_fs *fs)
{
    return fs->space.limit_bytes > 0 && come_since(fs) > 0 &&
           used_now(fs) > percent_of(fs->space.limit_bytes, HIGH_PERCENT);
}

/* The same of a model's quota. What a model took at the survey is not kept: at most the high mark.
 * So much more may fill its quota, if it came to that model: of all models together that may come
 * soon, so that such a survey is never due at once. */
static bool may_model_be_full(const cg_fs *fs)
{
    bool may = false;
    for (size_t i = 0; i < fs->space.n_model_quotas; i++)
        may |= come_since(fs) >
               percent_of(fs->space.model_quotas[i].bytes, HIGH_PERCENT - LOW_PERCENT);
    return may;
}

/* Whether the last survey is so long ago that another costs little. */
static bool has_rested(const cg_fs *fs, int64_t passed_s, int64_t least_s)
{
    const int64_t rest_s = REST_FACTOR * fs->space.survey_ms / 1000;
    return passed_s >= (rest_s > least_s ? rest_s : least_s);
}

/* Contexts take nearly all, say: each file that comes may fill the quota, and another survey at
 * once would find again that nothing may go. Or it would fail again. */
static bool is_no_use_at_once(const cg_fs *fs)
{
    return fs->space.survey_status != CG_OK ||
           (fs->space.limit_bytes > 0 &&
            fs->space.surveyed_bytes > percent_of(fs->space.limit_bytes, HIGH_PERCENT));
}

/* Whether a writer found none since the survey, and a survey makes some. */
static bool lacks_room(const cg_fs *fs)
{
    return fs->space.lacks_room && fs->space.quota_bytes > 0;
}

static bool is_survey_due(const cg_fs *fs, int64_t now_s)
{
    const int64_t passed_s = now_s - fs->space.surveyed_at_s;
    if (fs->space.surveyed_at_s == 0 || has_rested(fs, passed_s, SURVEY_SECONDS))
        return true;
    /* While it is full nothing is published, and somebody may have made room past the mount. */
    if (has_rested(fs, passed_s, REST_SECONDS) &&
        (may_be_full(fs) || may_model_be_full(fs) || fs->space.is_full || fs->space.is_unfinished ||
         lacks_room(fs) || fs->space.survey_status != CG_OK))
        return true;
    /* Writers may only wait for room that is there: of what was written some came anew for old, or
     * went again. */
    if (fs->space.is_kept && used_now(fs) >= fs->space.limit_bytes &&
        passed_s >= ASK_SECONDS + (int64_t)fs->space.survey_ms / 1000)
        return true;
    return (may_be_full(fs) && !is_no_use_at_once(fs) &&
            (published_since(fs) > 0 || has_rested(fs, passed_s, ASK_SECONDS))) ||
           (((fs->space.is_unfinished && fs->space.survey_status == CG_OK) ||
             (lacks_room(fs) && !is_no_use_at_once(fs))) &&
            has_rested(fs, passed_s, ASK_SECONDS));
}

static const char *limit_name(const cg_fs *fs)
{
    return fs->space.limit_bytes < fs->space.quota_bytes ? "what its disk has for it" : "its quota";
}

static void note_full(cg_fs *fs, bool is_full)
{
    if (is_full && !fs->space.is_full)
        cg_fs_log(fs, CG_LOG_WARNING, "the store takes all of %s, and nothing is left that may go",
                  limit_name(fs));
    fs->space.is_full = is_full;
}

void cg_space_make_first_room(cg_fs *fs, int64_t now_s, bool (*is_enough)(void *user), void *user)
{
    cg_survey survey = {0};
    if (fs->space.quota_bytes == 0 || !has_rested(fs, now_s - fs->space.waits_since_s, ASK_SECONDS))
        return;
    fs->space.waits_since_s = now_s;
    const uint64_t wanted = survey_again(fs, &survey) ? wanted_of_all(fs, &survey) : 0;
    room r = {.fs = fs,
              .survey = &survey,
              .policy = {.now_s = cg_staging_now_s(&fs->staging),
                         .wanted_bytes = wanted,
                         .model = CG_EVICT_ALL_MODELS},
              .stays = wanted > 0 ? calloc(survey.n_files + 1, sizeof *r.stays) : NULL};
    if (r.stays != NULL) {
        uint64_t asked_bytes = 0;
        bool is_over = false;
        /* No more than is needed: the rest goes when there is room for cuts, which cost less. */
        while (!is_over && r.freed_bytes < wanted && free_whole(&r)) {
            const bool asks = r.freed_bytes - asked_bytes >= FIRST_BYTES || r.freed_bytes >= wanted;
            asked_bytes = asks ? r.freed_bytes : asked_bytes;
            is_over = asks && is_enough(user);
        }
        tell_of_steps(&r, 0);
        note_full(fs, r.whole != NULL && may_go_on(fs) && r.freed_bytes == 0 && r.n_stale == 0 &&
                          r.n_failed == 0 && !survey.has_leased);
    }
    free(r.whole);
    free(r.stays);
    cg_survey_free(&survey);
}

/* Says what the store's file system makes of times of access. */
static void warn_of_times(cg_fs *fs)
{
    struct statvfs store;
    if (fstatvfs(fs->root_fd, &store) != 0 || (store.f_flag & ST_RDONLY) != 0)
        return;
    if ((store.f_flag & ST_NOATIME) != 0)
        cg_fs_log(
            fs, CG_LOG_WARNING,
            "the store is mounted noatime: past this mount only connectors' loads count as used");
    else if (!cg_fs_is_local(fs->root_fd)) /* O_NOATIME does not cross a network */
        cg_fs_log(fs, CG_LOG_WARNING,
                  "the store may be another host's: unless its disk is mounted noatime there, "
                  "looking through the store counts as use of it");
}

void cg_space_tend(cg_fs *fs)
{
    cg_survey survey = {0};
    if (fs->space.surveyed_at_s == 0)
        warn_of_times(fs);
    /* Who does not get it still makes surveys: its mount shows and checks how full the store is. */
    const bool is_ours = cg_lease_take(&fs->staging, LEASE);
    const int64_t now_s = cg_now_s();
    fs->space.is_waiting = !is_ours;
    fs->space.waits_since_s = now_s;
    if (!is_ours && !is_survey_due(fs, now_s))
        return;
    const bool is_surveyed = survey_again(fs, &survey);
    fs->space.surveyed_at_s = cg_now_s();
    if (is_surveyed && is_ours) {
        fs->space.is_unfinished = false;
        tend_survey(fs, &survey);
    }
    const bool holds = is_ours && cg_lease_holds(&fs->staging, LEASE); /* or lost in the middle */
    if (is_surveyed && fs->space.survey_status == CG_OK) { /* nor has a later one failed */
        /* Without what was published since the survey: some of it may go, and the next survey,
         * which is due at once, tells. Only who makes room knows that there is none to be made. */
        note_full(fs, fs->space.limit_bytes > 0 &&
                          fs->space.surveyed_bytes >= fs->space.limit_bytes &&
                          ((holds && !fs->space.is_unfinished) || fs->space.is_full));
        const bool is_kept =
            is_no_use_at_once(fs) && ((holds && !fs->space.is_unfinished) || fs->space.is_kept);
        if (is_kept && !fs->space.is_full && !fs->space.is_kept)
            cg_fs_log(fs, CG_LOG_WARNING,
                      "more than %d %% of %s is taken, and nothing is left that may go",
                      HIGH_PERCENT, limit_name(fs));
        fs->space.is_kept = is_kept;
    }
    cg_survey_free(&survey);
    fs->metrics.quota_bytes = fs->space.quota_bytes;
    fs->metrics.used_bytes = used_now(fs);
    if (!is_ours)
        return;
    fs->space.is_waiting = !holds;
    cg_lease_give_back(&fs->staging, LEASE);
}

int cg_space_init(cg_fs *fs, const cg_fs_config *config)
{
    const size_t n = config->n_model_quotas;
    fs->space.quota_bytes = fs->space.limit_bytes = config->quota_bytes;
    memcpy(fs->space.keep_s, config->keep_s, sizeof fs->space.keep_s);
    if (n == 0)
        return 0;
    fs->space.model_quotas = reallocarray(NULL, n, sizeof *config->model_quotas);
    if (fs->space.model_quotas == NULL)
        return ENOMEM;
    memcpy(fs->space.model_quotas, config->model_quotas, n * sizeof *config->model_quotas);
    fs->space.n_model_quotas = n;
    return 0;
}

bool cg_space_is_due(cg_fs *fs, int64_t now_s)
{
    if (!is_bounded(fs) || fs->read_only)
        return false;
    if (fs->space.is_waiting) /* the holder may be killed before it is done */
        return now_s - fs->space.waits_since_s >= ASK_SECONDS;
    return is_survey_due(fs, now_s);
}

void cg_space_statfs(cg_fs *fs, struct statvfs *inout)
{
    const uint64_t quota = fs->space.quota_bytes, used = used_now(fs);
    if (quota == 0 || !fs->space.is_known || inout->f_frsize == 0)
        return;
    const uint64_t left = (used < quota ? quota - used : 0) / inout->f_frsize;
    const uint64_t blocks = quota / inout->f_frsize;
    inout->f_blocks = inout->f_blocks < blocks ? inout->f_blocks : blocks;
    inout->f_bfree = inout->f_bfree < left ? inout->f_bfree : left;
    inout->f_bavail = inout->f_bavail < left ? inout->f_bavail : left;
}

void cg_space_failed(cg_fs *fs, int error)
{
    if (cg_staging_has_no_room(error))
        fs->space.lacks_room = true;
}

void cg_space_arrived(cg_fs *fs, int fd)
{
    struct stat attr;
    if (fstat(fd, &attr) == 0)
        cg_metrics_add(&fs->metrics.published_bytes, (uint64_t)attr.st_size);
}

void cg_space_touch(cg_fs *fs, int fd)
{
    if (is_bounded(fs) && !fs->read_only)
        cg_store_touch_file(fd, ""); /* or it is as it was */
}

bool cg_space_wants_touch(const cg_fs *fs, const struct stat *attr)
{
    return is_bounded(fs) && !fs->read_only && cg_store_touch_is_due(attr);
}

int cg_space_check(cg_fs *fs)
{
    /* A survey looks for what may go of what has come since. It comes after a while, and without
     * this a store of contexts would take all that is written until then. */
    return fs->space.is_full || (fs->space.is_kept && used_now(fs) >= fs->space.limit_bytes)
               ? ENOSPC
               : 0;
}
