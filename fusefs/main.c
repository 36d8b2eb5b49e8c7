/* cachegenfs: mounts a store. */
#include "fusefs/core.h"
#include "fusefs/fsck.h"
#include "fusefs/fuse_api.h"
#include "fusefs/gc.h"
#include "fusefs/loop.h"
#include "fusefs/mountpoint.h"
#include "fusefs/ops.h"
#include "fusefs/options.h"
#include "fusefs/persona.h"
#include "iouring/clock.h"

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <syslog.h>
#include <time.h>
#include <unistd.h>

enum {
    OVERLAYFS_MAGIC = 0x794c7630,
    FUSE_MAGIC = 0x65735546,
    MAX_IDLE_THREADS = 8,
    MAX_THREADS = 32,
    /* Below the 90 s that systemd waits before it kills. */
    END_SECONDS = 60
};

typedef struct log_target {
    bool to_syslog;
} log_target;

static void log_line(void *user, cg_log_level level, const char *line)
{
    const log_target *target = user;
    if (target->to_syslog)
        syslog((int)level, "%s", line);
    else
        fprintf(stderr, "cachegenfs: %s\n", line);
}

/* Each open file costs a descriptor here. Returns how many there may be of one user: half, and the
 * rest is for others and for the daemon's own work. */
static uint64_t raise_descriptor_limit(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return 0;
    if (limit.rlim_cur < limit.rlim_max) {
        const rlim_t before = limit.rlim_cur;
        limit.rlim_cur = limit.rlim_max;
        if (setrlimit(RLIMIT_NOFILE, &limit) != 0)
            limit.rlim_cur = before;
    }
    return limit.rlim_cur / 2;
}

/* Passthrough over a file system that is stacked itself (overlayfs, a FUSE mount with
 * passthrough) has to be announced, and then nothing can be stacked over us. */
static bool is_stacked(int fd)
{
    struct statfs store;
    return fstatfs(fd, &store) == 0 &&
           (store.f_type == OVERLAYFS_MAGIC || store.f_type == FUSE_MAGIC);
}

/* What goes on in the background until cg_fs_stop(), a thread each. Each step of it is atomic, so
 * that ending in the middle is fine. Of a store on a network closing waits for an answer: several
 * at a time. */
static void (*const WORKS[])(cg_fs *fs) = {
    cg_fs_keep,       cg_fs_scrub,      cg_fs_watch,      cg_fs_look_at_root, cg_fs_discard,
    cg_fs_end_closed, cg_fs_end_closed, cg_fs_end_closed, cg_fs_end_closed,   cg_fs_adopt_closed,
};
enum { N_WORKS = sizeof WORKS / sizeof WORKS[0] };

typedef struct worker {
    pthread_t thread;
    void (*work)(cg_fs *fs);
    cg_fs *fs;
    bool has_thread;
} worker;

static void *run_worker(void *arg)
{
    const worker *w = arg;
    w->work(w->fs);
    return NULL;
}

/* Without a watch the kernel trusts what it has for a second: slower, not wrong. */
static void begin_watch(const cg_options *options, cg_mount *mount, const cg_fs_kernel *kernel,
                        const log_target *target)
{
    char line[160];
    /* Both times were given on the command line: nothing depends on a watch. */
    if (options->attr_timeout_s >= 0 && options->entry_timeout_s >= 0)
        return;
    const int error = cg_fs_watch_begin(mount->fs, kernel);
    if (error == 0)
        return;
    snprintf(line, sizeof line,
             "changes past the mount cannot be watched here (%s): names and attributes are "
             "trusted for a second, and listings are slower",
             strerror(error));
    log_line((void *)target, CG_LOG_INFO, line);
}

static int serve(struct fuse_session *session, const cg_options *options, cg_metrics *metrics)
{
    if (options->single_thread)
        return fuse_session_loop(session);
    if (!options->io_uring)
        return cg_loop_run(session, metrics, options->store_timeout_s);
    /* That transport has queues and threads of its own. */
    struct fuse_loop_config *config = fuse_loop_cfg_create();
    if (config == NULL)
        return -ENOMEM;
    fuse_loop_cfg_set_idle_threads(config, MAX_IDLE_THREADS);
    fuse_loop_cfg_set_max_threads(config, MAX_THREADS);
    const int result = fuse_session_loop_mt(session, config);
    fuse_loop_cfg_destroy(config);
    return result;
}

/* The end, which a store that hangs could put off without end. */
typedef struct ending {
    unsigned limit_s; /* 0: none */
    const log_target *target;
    const char *mountpoint;
    sem_t is_over;
    bool has_thread;
    pthread_t thread;
    pthread_mutex_t lock;         /* of the next */
    struct fuse_session *session; /* NULL: it is unmounted */
} ending;

/* Seconds that the end takes so far are counted, not measured: those in which all of us was stopped
 * are none. */
static void *end_in_time(void *arg)
{
    ending *e = arg;
    for (unsigned n_s = 0; n_s <= e->limit_s;) {
        const struct timespec soon = cg_deadline_in(CG_SECOND_NS);
        if (sem_clockwait(&e->is_over, CLOCK_MONOTONIC, &soon) == 0)
            return NULL;
        pthread_mutex_lock(&e->lock);
        n_s += e->session == NULL || fuse_session_exited(e->session);
        pthread_mutex_unlock(&e->lock);
    }
    log_line((void *)e->target, CG_LOG_ERROR, "the store hangs: what waits for it is given up");
    pthread_mutex_lock(&e->lock); /* for good */
    if (e->session != NULL) {
        /* Closed first, since detaching would wait for an answer of ours. Other threads still read
         * from it, which ThreadSanitizer takes for a race with close(); all of us ends at once. */
        syscall(SYS_close, fuse_session_fd(e->session));
        cg_mountpoint_detach(e->mountpoint);
    }
    syscall(SYS_exit_group, EXIT_FAILURE); /* threads are left: that is no leak */
    return NULL;
}

static void begin_ending(ending *e, const cg_options *options, const log_target *target,
                         struct fuse_session *session)
{
    *e = (ending){.limit_s = options->store_timeout_s < END_SECONDS ? options->store_timeout_s
                                                                    : END_SECONDS,
                  .target = target,
                  .mountpoint = options->mountpoint,
                  .session = session};
    sem_init(&e->is_over, 0, 0);
    pthread_mutex_init(&e->lock, NULL);
    e->has_thread = e->limit_s > 0 && pthread_create(&e->thread, NULL, end_in_time, e) == 0;
}

static void unmount(ending *e)
{
    pthread_mutex_lock(&e->lock);
    fuse_session_unmount(e->session);
    e->session = NULL;
    pthread_mutex_unlock(&e->lock);
}

static void end_ending(ending *e)
{
    if (!e->has_thread)
        return;
    sem_post(&e->is_over);
    pthread_join(e->thread, NULL);
    pthread_mutex_destroy(&e->lock);
    sem_destroy(&e->is_over);
}

/* Answers requests until the end, beside the threads that tend the store. Returns the program's
 * exit status. */
static int work(cg_mount *mount, const cg_options *options, log_target *target)
{
    worker workers[N_WORKS];
    for (int i = 0; i < N_WORKS; i++) {
        workers[i] = (worker){.work = WORKS[i], .fs = mount->fs};
        workers[i].has_thread =
            pthread_create(&workers[i].thread, NULL, run_worker, &workers[i]) == 0;
    }
    const int result = serve(mount->session, options, cg_fs_metrics(mount->fs));
    if (result < 0)
        log_line(target, CG_LOG_ERROR, strerror(-result));
    cg_fs_stop(mount->fs);
    for (int i = 0; i < N_WORKS; i++)
        if (workers[i].has_thread)
            pthread_join(workers[i].thread, NULL);
    return result < 0 ? EXIT_FAILURE : EXIT_SUCCESS; /* a signal that ends us is a good end */
}

static int run(cg_options *options)
{
    ending end = {.limit_s = 0};
    log_target target = {.to_syslog = false};
    cg_mount mount = {
        .attr_timeout_s = options->attr_timeout_s,
        .entry_timeout_s = options->entry_timeout_s,
        .wants_passthrough = options->passthrough,
    };
    cg_fs_config config = {
        .store = options->store,
        .read_only = options->read_only,
        .ignores_acls = options->ignores_acls,
        .quota_bytes = options->quota_bytes,
        .scrub_bytes_per_s = options->scrub_bytes_per_s,
        .dead_after_s = options->dead_after_s,
        .model_quotas = options->model_quotas,
        .n_model_quotas = options->n_model_quotas,
        .max_user_files = raise_descriptor_limit(),
        .config_text = options->config_text,
        .log = log_line,
        .log_user = &target,
    };
    memcpy(config.keep_s, options->keep_s, sizeof config.keep_s);
    const cg_fs_kernel kernel = {cg_ops_forget, cg_ops_doubt_names, &mount};
    int result = EXIT_FAILURE;
    const int error = cg_fs_new(&config, &mount.fs);
    if (error != 0) {
        fprintf(stderr, "cachegenfs: store %s: %s\n", options->store, strerror(error));
        return result;
    }
    mount.store_is_stacked = is_stacked(cg_fs_root_fd(mount.fs));
    mount.passthrough.nodes = cg_fs_nodes(mount.fs);
    mount.passthrough.metrics = cg_fs_metrics(mount.fs);

    struct fuse_session *session = fuse_session_new(&options->fuse, &CG_OPS, sizeof CG_OPS, &mount);
    if (session == NULL) /* libfuse has said why */
        goto no_session;
    if (fuse_set_signal_handlers(session) != 0)
        goto no_handlers;
    if (fuse_session_mount(session, options->mountpoint) != 0)
        goto no_mount;
    if (!options->foreground) {
        openlog("cachegenfs", LOG_PID, LOG_DAEMON);
        target.to_syslog = true;
    }
    /* After mounting, so that its errors reach the terminal; before threads, which fork() loses. */
    if (fuse_daemonize(options->foreground) != 0)
        goto no_daemon;
    mount.session = mount.passthrough.session = session;
    begin_watch(options, &mount, &kernel, &target);
    cg_persona_drop_capabilities(); /* threads that are made later get what is left */
    begin_ending(&end, options, &target, session);
    result = work(&mount, options, &target);
    unmount(&end);
no_daemon:
    fuse_session_unmount(session); /* once more does nothing */
no_mount:
    fuse_remove_signal_handlers(session);
no_handlers:
    fuse_session_destroy(session);
no_session:
    cg_fs_free(mount.fs);
    end_ending(&end);
    return result;
}

/* cachegenfs fsck STORE [--repair]. As mount(8) and /etc/fstab want two folders, a mount cannot be
 * meant; a store of the name fsck is ./fsck. */
static int run_fsck(int argc, char **argv)
{
    const bool repair = argc == 4 && strcmp(argv[3], "--repair") == 0;
    if (argc < 3 || argc > 4 || (argc == 4 && !repair)) {
        fprintf(stderr, "usage: cachegenfs fsck STORE [--repair]\n");
        return 2;
    }
    return cg_fsck(argv[2], repair, stdout);
}

/* cachegenfs gc STORE [--orphans] [--remove] */
static int run_gc(int argc, char **argv)
{
    bool orphans = false, remove = false, is_right = argc >= 3;
    for (int i = 3; i < argc; i++) {
        orphans |= strcmp(argv[i], "--orphans") == 0;
        remove |= strcmp(argv[i], "--remove") == 0;
        is_right &= strcmp(argv[i], "--orphans") == 0 || strcmp(argv[i], "--remove") == 0;
    }
    if (!is_right) {
        fprintf(stderr, "usage: cachegenfs gc STORE [--orphans] [--remove]\n");
        return 2;
    }
    return cg_gc(argv[2], orphans, remove, stdout);
}

int main(int argc, char **argv)
{
    cg_options options;
    if (argc > 1 && strcmp(argv[1], "fsck") == 0)
        return run_fsck(argc, argv);
    if (argc > 1 && strcmp(argv[1], "gc") == 0)
        return run_gc(argc, argv);
    switch (cg_options_parse(argc, argv, &options)) {
    case CG_OPTIONS_DONE: return EXIT_SUCCESS;
    case CG_OPTIONS_ERROR: return EXIT_FAILURE;
    default: break;
    }
    umask(0); /* the kernel has applied the caller's */
    const int result = run(&options);
    cg_options_destroy(&options);
    return result;
}
