/* fusefs/start.c - the life of a mount, from its start to its end: its part of fusefs/core.h. */
#include "fusefs/acls.h"
#include "fusefs/closed.h"
#include "fusefs/fs.h"
#include "fusefs/lease.h"
#include "fusefs/left.h"
#include "fusefs/pending.h"
#include "fusefs/space.h"
#include "fusefs/watch.h"
#include "iouring/clock.h"
#include "iouring/layout.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MAX_PENDING = 1024 /* of a user */, KEEP_SECONDS = 2 /* also: ask for room again */ };
static const size_t DEFAULT_MAX_LISTED_FILES = 200000;
static const uint64_t DEFAULT_MAX_FILE_BYTES = UINT64_C(4) << 30;
static const uint64_t VALIDATION_BYTES = UINT64_C(256) << 20; /* of checks that run at once */

static void init_keep_stop(cg_fs *fs)
{
    cg_cond_init(&fs->keep_stop);
    pthread_mutex_init(&fs->keep_lock, NULL);
}

static int check_layout(cg_fs *fs)
{
    const cg_status status = cg_layout_check(fs->root_fd);
    if (status == CG_OK)
        return 0;
    cg_fs_log(fs, CG_LOG_ERROR,
              "the store's layout (" CG_LAYOUT_FILE "): %s; this version knows %d",
              cg_strerror(status), CG_LAYOUT_VERSION);
    return status == CG_ERR_UNSUPPORTED_VERSION || status == CG_ERR_CORRUPT ? EPROTONOSUPPORT : EIO;
}

static int upgrade_layout(cg_fs *fs)
{
    const cg_status status = cg_layout_upgrade(fs->root_fd);
    if (status == CG_OK)
        return 0;
    cg_fs_log(fs, CG_LOG_WARNING, "the store's layout cannot be noted: %s", cg_strerror(status));
    return check_layout(fs); /* again: another daemon may have made it a later one */
}

static int check_acls(cg_fs *fs)
{
    char path[CG_TREE_PATH_BYTES];
    if (fs->ignores_acls || !cg_acls_find(fs->root_fd, path, sizeof path))
        return 0;
    cg_fs_log(fs, CG_LOG_ERROR,
              "%s has an access control list, which a mount would not enforce: take lists away "
              "(setfacl -R -b), or mount with -o ignore_acls to go by the modes alone",
              path[0] != '\0' ? path : "the store's root");
    return ENOTSUP;
}

/* What needs no store; close_all() takes it down. */
static void init(cg_fs *fs, const cg_fs_config *config)
{
    fs->read_only = config->read_only;
    fs->ignores_acls = config->ignores_acls;
    fs->dead_after_s = config->dead_after_s != 0 ? config->dead_after_s : CG_STAGING_SILENT_S;
    fs->is_root = geteuid() == 0;
    fs->max_file_bytes =
        config->max_file_bytes != 0 ? config->max_file_bytes : DEFAULT_MAX_FILE_BYTES;
    fs->max_listed_files =
        config->max_listed_files != 0 ? config->max_listed_files : DEFAULT_MAX_LISTED_FILES;
    fs->scrub_bytes_per_s = config->scrub_bytes_per_s;
    fs->log = config->log;
    fs->log_user = config->log_user;
    fs->staging = (cg_staging){.dir_fd = -1, .all_fd = -1, .lock_fd = -1};
    fs->root_fd = fs->proc_fd = -1;
    cg_watch_init(&fs->watch);
    cg_strict_budget_init(&fs->budget, VALIDATION_BYTES);
    pthread_mutex_init(&fs->log_lock, NULL);
    init_keep_stop(fs);
    cg_closed_init(&fs->closed);
    cg_users_init(&fs->pending_users, MAX_PENDING);
    cg_users_init(&fs->open_users,
                  config->max_user_files != 0 ? config->max_user_files : UINT64_MAX);
    cg_users_init(&fs->control_users, CG_MAX_CONTROLS);
    pthread_rwlockattr_t prefer_writers; /* else a stream of new files would starve a move */
    pthread_rwlockattr_init(&prefer_writers);
    pthread_rwlockattr_setkind_np(&prefer_writers, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(&fs->names_lock, &prefer_writers);
    pthread_rwlockattr_destroy(&prefer_writers);
}

static void close_all(cg_fs *fs)
{
    cg_staging_close(&fs->staging);
    if (fs->proc_fd >= 0)
        close(fs->proc_fd);
    if (fs->root_fd >= 0)
        close(fs->root_fd);
    pthread_rwlock_destroy(&fs->names_lock);
    pthread_mutex_destroy(&fs->log_lock);
    pthread_mutex_destroy(&fs->keep_lock);
    pthread_cond_destroy(&fs->keep_stop);
    cg_closed_destroy(&fs->closed);
    cg_users_destroy(&fs->pending_users);
    cg_users_destroy(&fs->open_users);
    cg_users_destroy(&fs->control_users);
    cg_strict_budget_destroy(&fs->budget);
    free(fs->space.model_quotas);
}

/* A store that cannot be written to is still good to be read: only other errors end the start. */
static int open_staging(cg_fs *fs)
{
    uint64_t n_removed;
    cg_staging_close(&fs->staging); /* of a try that found no room */
    const int error = cg_staging_open(&fs->staging, fs->root_fd, fs->dead_after_s, &n_removed);
    if (error == EROFS || error == EACCES || error == EPERM) {
        cg_fs_log(fs, CG_LOG_WARNING, "the store cannot be written (%s: %s): read-only",
                  CG_STAGING_DIRECTORY, strerror(error));
        fs->read_only = true;
        fs->awaits_room = false; /* more room would not help */
        return 0;
    }
    if (n_removed > 0)
        cg_fs_log(fs, CG_LOG_INFO, "removed %llu unfinished files of killed daemons",
                  (unsigned long long)n_removed);
    if (cg_staging_has_no_room(error)) {
        if (!fs->awaits_room)
            cg_fs_log(fs, CG_LOG_WARNING,
                      "the store is full (%s): read-only until there is room; %sremove something "
                      "past the mount, or what no context names (cachegenfs gc STORE --orphans "
                      "--remove)",
                      strerror(error),
                      fs->space.quota_bytes > 0 ? "where no file may go for it, " : "");
        fs->read_only = fs->awaits_room = true;
        return 0;
    }
    return error == 0 ? upgrade_layout(fs) : error;
}

static int open_store(cg_fs *fs, const cg_fs_config *config, struct stat *root_out)
{
    int error;
    fs->root_fd = open(config->store, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fs->root_fd < 0 || fstat(fs->root_fd, root_out) != 0 ||
        (fs->proc_fd = open("/proc/self/fd", O_PATH | O_DIRECTORY | O_CLOEXEC)) < 0)
        return errno;
    fs->has_identities = cg_fs_is_local(fs->root_fd);
    if ((error = check_layout(fs)) != 0 || (error = check_acls(fs)) != 0)
        return error;
    return fs->read_only ? 0 : open_staging(fs);
}

int cg_fs_new(const cg_fs_config *config, cg_fs **fs_out)
{
    struct stat root;
    int error;
    *fs_out = NULL;
    cg_fs *fs = calloc(1, sizeof *fs);
    if (fs == NULL)
        return ENOMEM;
    if ((error = cg_space_init(fs, config)) != 0) {
        free(fs); /* close_all() would take down locks that are not made yet */
        return error;
    }
    init(fs, config);
    if ((error = open_store(fs, config, &root)) != 0 ||
        (error = cg_control_init(&fs->control, config->config_text)) != 0)
        goto fail;
    if ((error = cg_nodes_init(&fs->nodes, &root)) != 0) {
        cg_control_destroy(&fs->control);
        goto fail;
    }
    cg_root_stat_init(&fs->root_stat, &root);
    *fs_out = fs;
    return 0;
fail:
    close_all(fs);
    free(fs);
    return error;
}

/* The kernel tells of a last close some time after it, and of those right before an unmount it may
 * not tell at all. */
static void release_left(cg_fs *fs)
{
    enum { PART_NODES = 256 };
    cg_node_ref refs[PART_NODES];
    size_t at = 0, n;
    while (fs->directories != NULL)
        cg_fs_closedir(fs->directories);
    for (size_t i = 0; i < CG_NODES_N_CONTROLS; i++)
        while (fs->nodes.controls[i] != NULL && fs->nodes.controls[i]->files != NULL)
            cg_fs_release(fs, fs->nodes.controls[i]->files);
    for (size_t from = 0; (n = cg_nodes_each(&fs->nodes, &at, refs, PART_NODES)) > 0; from = at)
        for (size_t i = 0; i < n; i++)
            if (refs[i].node->files != NULL) {
                cg_fs_release(fs, refs[i].node->files);
                at = from; /* it may have freed nodes: from the same bucket again */
                break;
            }
}

void cg_fs_free(cg_fs *fs)
{
    if (fs == NULL)
        return;
    cg_watch_close(&fs->watch);
    release_left(fs);
    cg_pending_discard_all(fs); /* first: they pin nodes and lie in the staging directory */
    cg_nodes_destroy(&fs->nodes);
    cg_control_destroy(&fs->control);
    cg_root_stat_destroy(&fs->root_stat);
    close_all(fs);
    free(fs);
}

void cg_fs_stop(cg_fs *fs)
{
    pthread_mutex_lock(&fs->keep_lock);
    /* Under the lock, so that nobody who has just asked misses the signal. */
    fs->is_stopping = true;
    pthread_cond_broadcast(&fs->keep_stop);
    pthread_mutex_unlock(&fs->keep_lock);
    cg_closed_stop(&fs->closed);
    cg_watch_stop(&fs->watch);
    cg_root_stat_stop(&fs->root_stat);
}

void cg_fs_look_at_root(cg_fs *fs)
{
    cg_root_stat_run(&fs->root_stat, fs->root_fd);
}

int cg_fs_watch_begin(cg_fs *fs, const cg_fs_kernel *kernel)
{
    fs->watch.kernel = kernel;
    return cg_watch_open(&fs->watch, fs->root_fd);
}

void cg_fs_watch(cg_fs *fs)
{
    cg_watch_run(fs);
}

bool cg_fs_is_watched(const cg_fs *fs)
{
    return fs->watch.is_trusted;
}

bool cg_fs_has_fine_times(const cg_fs *fs)
{
    return fs->watch.has_fine_times;
}

static void tell_of_life(void *user, uint64_t n_removed, bool was_taken_for_dead)
{
    cg_fs *fs = user;
    if (n_removed > 0)
        cg_fs_log(fs, CG_LOG_INFO, "removed %llu unfinished files of killed daemons",
                  (unsigned long long)n_removed);
    if (was_taken_for_dead)
        cg_fs_log(fs, CG_LOG_WARNING,
                  "the folder for files that are being written was gone; they are lost");
}

/* One daemon of the store at a time. */
static void sweep(cg_fs *fs)
{
    static const char LEASE[] = "sweeping";
    uint64_t n_removed;
    if (fs->read_only || !cg_lease_take(&fs->staging, LEASE))
        return;
    cg_left_remove(fs->root_fd, cg_staging_now_s(&fs->staging), cg_fs_is_stopping, fs, &n_removed);
    cg_lease_give_back(&fs->staging, LEASE);
    if (n_removed > 0)
        cg_fs_log(fs, CG_LOG_INFO, "removed %llu unfinished files of killed connectors",
                  (unsigned long long)n_removed);
}

static int64_t sweep_due_s(const cg_fs *fs)
{
    return cg_left_due_s(fs->root_fd, cg_staging_now_s(&fs->staging));
}

/* What reads the whole store, on a thread that stands back. The keeper goes on meanwhile, and does
 * not stand back: who waits for room waits for it. */
static void *look_through(void *arg)
{
    cg_fs *fs = arg;
    cg_fs_stand_back();
    cg_fs_adopt_tree(fs);
    int64_t wait_s = sweep_due_s(fs);
    while (!cg_fs_wait(fs, (uint64_t)wait_s * UINT64_C(1000000000))) {
        if ((wait_s = sweep_due_s(fs)) > 0) /* another daemon did it meanwhile */
            continue;
        sweep(fs);
        wait_s = CG_LEFT_EVERY_S; /* also if it could not be noted, or another daemon is at it */
    }
    return NULL;
}

typedef struct opening {
    cg_fs *fs;
    int error;
} opening;

/* False: there is still none. */
static bool finds_room(void *user)
{
    opening *o = user;
    o->error = open_staging(o->fs);
    return o->error != 0 || o->fs->staging.dir_fd >= 0;
}

/* Of a start on a full disk: the mount can be written once there is room, as after an eviction by
 * another daemon, or by this one if it has a quota. */
static void await_room(cg_fs *fs)
{
    bool is_told = false;
    while (fs->awaits_room && !cg_fs_wait(fs, KEEP_SECONDS * CG_SECOND_NS)) {
        opening o = {fs, 0};
        if (!finds_room(&o) && fs->awaits_room)
            cg_space_make_first_room(fs, cg_now_s(), finds_room, &o);
        const int error = o.error;
        if (error == 0 && fs->staging.dir_fd < 0)
            continue;
        if (error != 0 && error != EPROTONOSUPPORT) { /* as without a descriptor: it may pass */
            cg_staging_close(&fs->staging);
            if (!is_told)
                cg_fs_log(fs, CG_LOG_WARNING, "waiting for room: %s", strerror(error));
            is_told = true;
            continue;
        }
        cg_fs_log(fs, error == 0 ? CG_LOG_INFO : CG_LOG_WARNING,
                  error == 0 ? "the store has room again: it can be written"
                             : "the mount stays read-only: %s",
                  strerror(error));
        fs->space.is_full = false; /* others may have made what this daemon could not */
        fs->read_only = error != 0;
        fs->awaits_room = false;
    }
}

void cg_fs_keep(cg_fs *fs)
{
    pthread_t behind;
    await_room(fs);
    if (!fs->read_only && cg_staging_live(&fs->staging, tell_of_life, fs) != 0)
        cg_fs_log(fs, CG_LOG_ERROR, "no thread: other hosts will take this daemon for dead");
    const bool has_behind = pthread_create(&behind, NULL, look_through, fs) == 0;
    if (!has_behind) {
        cg_fs_log(fs, CG_LOG_WARNING, "no thread: the store is looked through at the start alone");
        cg_fs_adopt_tree(fs);
        sweep(fs);
    }
    pthread_mutex_lock(&fs->keep_lock);
    while (!fs->is_stopping) {
        /* The work is done without the lock, so that cg_fs_stop() need not wait for it to take the
         * lock. `continue`: the question whether to stop comes first again. */
        if (cg_space_is_due(fs, cg_now_s())) {
            pthread_mutex_unlock(&fs->keep_lock);
            cg_space_tend(fs);
            pthread_mutex_lock(&fs->keep_lock);
            continue;
        }
        const struct timespec until = cg_deadline_in(KEEP_SECONDS * CG_SECOND_NS);
        pthread_cond_timedwait(&fs->keep_stop, &fs->keep_lock, &until);
    }
    pthread_mutex_unlock(&fs->keep_lock);
    if (has_behind)
        pthread_join(behind, NULL);
}
