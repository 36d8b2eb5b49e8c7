#include "fusefs/staging.h"

#include "iouring/beneath.h"
#include "iouring/clock.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { MAX_DEPTH = 32 };

static uint64_t remove_tree(int dir_fd, const char *name, unsigned depth)
{
    uint64_t n_removed = 0;
    const int fd = openat(dir_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *dir = cg_beneath_list(fd);
    if (dir == NULL)
        return 0;
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        /* What can't be removed stays, with the folders above it, for the next look. */
        if (unlinkat(fd, entry->d_name, 0) == 0)
            n_removed += strcmp(entry->d_name, CG_LIFE_FILE) != 0 &&
                         strcmp(entry->d_name, CG_STAGING_NAME_FILE) != 0;
        else if (errno == EISDIR && depth < MAX_DEPTH)
            n_removed += remove_tree(fd, entry->d_name, depth + 1);
    }
    closedir(dir);
    unlinkat(dir_fd, name, AT_REMOVEDIR);
    return n_removed;
}

uint64_t cg_staging_remove(int dir_fd, const char *name)
{
    return remove_tree(dir_fd, name, 0);
}

void cg_staging_own(cg_staging *staging, char own_out[CG_STAGING_OWN_BYTES])
{
    pthread_mutex_lock(&staging->remaking);
    memcpy(own_out, staging->own, CG_STAGING_OWN_BYTES);
    pthread_mutex_unlock(&staging->remaking);
}

int64_t cg_staging_now_s(const cg_staging *staging)
{
    struct stat attr;
    bool is_there = false;
    /* The store's server may have another clock than we. It dates what connectors leave, too, so
     * that only its own times are compared. */
    if (staging != NULL && staging->dir_fd >= 0) {
        is_there = fstatat(staging->dir_fd, CG_LIFE_FILE, &attr, AT_SYMLINK_NOFOLLOW) == 0;
    } else if (staging != NULL && staging->all_fd >= 0) {
        /* That takes no space. If it fails, the time is an earlier one: less is old. */
        utimensat(staging->root_fd, CG_STAGING_DIRECTORY, NULL, AT_SYMLINK_NOFOLLOW);
        is_there = fstat(staging->all_fd, &attr) == 0;
    }
    return is_there ? attr.st_mtim.tv_sec : time(NULL);
}

static cg_life own_life(cg_staging *staging)
{
    pthread_mutex_lock(&staging->remaking);
    const cg_life life = staging->life;
    pthread_mutex_unlock(&staging->remaking);
    return life;
}

bool cg_staging_is_dead(cg_staging *staging, const char *name)
{
    struct stat attr;
    const cg_life life = own_life(staging);
    if (fstatat(staging->all_fd, name, &attr, AT_SYMLINK_NOFOLLOW) != 0)
        return errno == ENOENT;
    return cg_life_is_dead(&staging->watch, &life, staging->all_fd, name, cg_now_s());
}

static uint64_t remove_dead(cg_staging *staging)
{
    uint64_t n_removed = 0;
    char own[CG_STAGING_OWN_BYTES];
    const cg_life life = own_life(staging);
    cg_staging_own(staging, own);
    DIR *dir = cg_beneath_list(openat(staging->all_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (dir == NULL)
        return 0;
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0 &&
            strcmp(entry->d_name, own) != 0 &&
            cg_life_is_dead(&staging->watch, &life, staging->all_fd, entry->d_name, cg_now_s()))
            n_removed += cg_staging_remove(staging->all_fd, entry->d_name);
    closedir(dir);
    return n_removed;
}

static int write_name(const cg_staging *staging)
{
    char text[CG_STAGING_OWN_BYTES];
    memcpy(text, staging->own, sizeof text);
    text[sizeof text - 1] = '\n';
    const int fd = openat(staging->dir_fd, CG_STAGING_NAME_FILE,
                          O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0)
        return errno;
    const ssize_t n = write(fd, text, sizeof text);
    const int error = n == (ssize_t)sizeof text ? 0 : n < 0 ? errno : EIO;
    return close(fd) != 0 && error == 0 ? errno : error; /* NFS tells here that a disk is full */
}

/* It lives before it gets the name under which others look for dead ones. */
static int fill_own(cg_staging *staging, const char *fresh)
{
    struct stat attr;
    staging->dir_fd =
        openat(staging->all_fd, fresh, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (staging->dir_fd < 0 || fstat(staging->dir_fd, &attr) != 0)
        return errno;
    staging->dev = attr.st_dev;
    int error =
        cg_life_begin(&staging->life, staging->dir_fd, staging->silent_s, &staging->lock_fd);
    if (error == 0)
        error = write_name(staging);
    if (error == 0 && renameat(staging->all_fd, fresh, staging->all_fd, staging->own) != 0)
        error = errno;
    return error;
}

static int make_own(cg_staging *staging)
{
    uint64_t random[2];
    char fresh[CG_STAGING_OWN_BYTES + 1];
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
        return errno;
    snprintf(staging->own, sizeof staging->own, "%016" PRIx64 "%016" PRIx64, random[0], random[1]);
    snprintf(fresh, sizeof fresh, ".%s", staging->own);
    if (mkdirat(staging->all_fd, fresh, 0700) != 0)
        return errno;
    const int error = fill_own(staging, fresh);
    if (error == 0)
        return 0;
    /* Nothing stays: a daemon that is started again and again on a full disk would fill it. */
    if (staging->lock_fd >= 0)
        close(staging->lock_fd);
    if (staging->dir_fd >= 0)
        close(staging->dir_fd);
    staging->lock_fd = staging->dir_fd = -1;
    cg_staging_remove(staging->all_fd, fresh);
    return error;
}

void cg_staging_give(int root_fd, int fd)
{
    struct stat attr;
    if (geteuid() != 0 || fstat(root_fd, &attr) != 0)
        return;
    const int result = fchownat(fd, "", attr.st_uid, attr.st_gid, AT_EMPTY_PATH);
    (void)result; /* where root may not, as over NFS, it stays as it is */
}

int cg_staging_folder(int root_fd, const char *name, int flags, int *fd_out)
{
    *fd_out = -1;
    const bool is_made = mkdirat(root_fd, name, 0700) == 0;
    if (!is_made && errno != EEXIST)
        return errno;
    *fd_out = openat(root_fd, name, flags | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (*fd_out < 0)
        return errno;
    if (is_made)
        cg_staging_give(root_fd, *fd_out);
    return 0;
}

static int open_all(cg_staging *staging)
{
    return cg_staging_folder(staging->root_fd, CG_STAGING_DIRECTORY, O_PATH, &staging->all_fd);
}

/* The descriptors keep their numbers: other threads may be using them. */
static int replace_own(cg_staging *staging)
{
    cg_staging fresh = {.dir_fd = -1,
                        .all_fd = -1,
                        .lock_fd = -1,
                        .root_fd = staging->root_fd,
                        .silent_s = staging->silent_s};
    int error = open_all(&fresh);
    if (error == 0 && (error = make_own(&fresh)) == 0 &&
        (dup3(fresh.all_fd, staging->all_fd, O_CLOEXEC) < 0 ||
         dup3(fresh.lock_fd, staging->lock_fd, O_CLOEXEC) < 0 ||
         dup3(fresh.dir_fd, staging->dir_fd, O_CLOEXEC) < 0))
        error = errno;
    if (error == 0) {
        memcpy(staging->own, fresh.own, sizeof staging->own);
        staging->life = fresh.life;
        staging->n_made_again++;
    }
    const int fds[] = {fresh.all_fd, fresh.lock_fd, fresh.dir_fd};
    for (size_t i = 0; i < sizeof fds / sizeof fds[0]; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    return error;
}

int cg_staging_make_again(cg_staging *staging)
{
    pthread_mutex_lock(&staging->remaking);
    /* Under the lock, so that of several threads that find the folder gone one makes it. */
    int error = cg_life_beat(&staging->life, staging->dir_fd);
    if (error == ENOENT) /* else another thread did it */
        error = replace_own(staging);
    pthread_mutex_unlock(&staging->remaking);
    return error;
}

int cg_staging_open(cg_staging *staging, int root_fd, unsigned silent_s, uint64_t *n_removed_out)
{
    *staging = (cg_staging){
        .dir_fd = -1, .all_fd = -1, .lock_fd = -1, .root_fd = root_fd, .silent_s = silent_s};
    *n_removed_out = 0;
    int error = open_all(staging);
    if (error != 0)
        return error;
    pthread_mutex_init(&staging->remaking, NULL);
    pthread_mutex_init(&staging->ending_lock, NULL);
    cg_cond_init(&staging->ending);
    cg_life_watch_init(&staging->watch);
    /* Before our own folder: what a killed daemon left may be what fills the disk. At the start
     * only those go whose locks say that they are dead: for the others it takes more than one
     * look. */
    error = cg_life_init(&staging->life, staging->all_fd, silent_s);
    if (error == 0) {
        *n_removed_out = remove_dead(staging);
        error = make_own(staging);
    }
    if (error != 0 && !cg_staging_has_no_room(error))
        cg_staging_close(staging);
    return error;
}

/* True: the end. */
static bool wait_for_beat(cg_staging *staging)
{
    const struct timespec until =
        cg_deadline_in((uint64_t)(staging->silent_s / CG_LIFE_BEATS) * CG_SECOND_NS);
    int error = 0;
    pthread_mutex_lock(&staging->ending_lock);
    while (!staging->is_ending && error == 0)
        error = pthread_cond_timedwait(&staging->ending, &staging->ending_lock, &until);
    const bool is_over = staging->is_ending;
    pthread_mutex_unlock(&staging->ending_lock);
    return is_over;
}

static void *live(void *user)
{
    cg_staging *staging = user;
    uint64_t n_told = 0;
    /* At once: the text still names the process that went to the background. */
    cg_staging_make_again(staging);
    while (!wait_for_beat(staging)) {
        cg_staging_make_again(staging); /* which beats; if it cannot, then the next time */
        const uint64_t n_removed = remove_dead(staging);
        pthread_mutex_lock(&staging->remaking);
        const uint64_t n_made_again = staging->n_made_again;
        pthread_mutex_unlock(&staging->remaking);
        const bool was_taken_for_dead = n_made_again > n_told;
        n_told = n_made_again;
        if (staging->told != NULL && (n_removed > 0 || was_taken_for_dead))
            staging->told(staging->told_user, n_removed, was_taken_for_dead);
    }
    return NULL;
}

int cg_staging_live(cg_staging *staging, cg_staging_told *told, void *told_user)
{
    staging->told = told;
    staging->told_user = told_user;
    const int error = pthread_create(&staging->living, NULL, live, staging);
    staging->is_living = error == 0;
    return error;
}

static void stop_living(cg_staging *staging)
{
    if (!staging->is_living)
        return;
    pthread_mutex_lock(&staging->ending_lock);
    staging->is_ending = true;
    pthread_cond_signal(&staging->ending);
    pthread_mutex_unlock(&staging->ending_lock);
    pthread_join(staging->living, NULL);
}

void cg_staging_close(cg_staging *staging)
{
    stop_living(staging);
    if (staging->lock_fd >=
        0) /* first: an open file that is removed keeps sshfs and NFS from removing its directory */
        close(staging->lock_fd);
    if (staging->dir_fd >= 0) {
        unlinkat(staging->dir_fd, CG_LIFE_FILE, 0);
        unlinkat(staging->dir_fd, CG_STAGING_NAME_FILE, 0);
        unlinkat(staging->all_fd, staging->own, AT_REMOVEDIR);
        close(staging->dir_fd);
    }
    if (staging->all_fd >= 0) {
        close(staging->all_fd);
        cg_life_watch_destroy(&staging->watch);
        pthread_mutex_destroy(&staging->remaking);
        pthread_mutex_destroy(&staging->ending_lock);
        pthread_cond_destroy(&staging->ending);
    }
    *staging = (cg_staging){.dir_fd = -1, .all_fd = -1, .lock_fd = -1};
}

int cg_staging_open_to_remove(cg_staging *staging, int root_fd)
{
    uint64_t n_removed;
    const int error = cg_staging_open(staging, root_fd, CG_STAGING_SILENT_S, &n_removed);
    if (error != 0)
        return cg_staging_has_no_room(error) ? 0 : error;
    return cg_staging_live(staging, NULL, NULL);
}

static void next_name(cg_staging *staging, char name_out[CG_STAGING_NAME_BYTES])
{
    const uint64_t number = __atomic_fetch_add(&staging->n_created, 1, __ATOMIC_RELAXED);
    snprintf(name_out, CG_STAGING_NAME_BYTES, "%" PRIu64, number);
}

int cg_staging_link_name(cg_staging *staging, char name_out[CG_STAGING_NAME_BYTES])
{
    next_name(staging, name_out);
    return linkat(staging->dir_fd, CG_STAGING_NAME_FILE, staging->dir_fd, name_out, 0) == 0 ? 0
                                                                                            : errno;
}

int cg_staging_create(cg_staging *staging, char name_out[CG_STAGING_NAME_BYTES], int *fd_out)
{
    if (staging->dir_fd < 0) /* nor was there for the folder */
        return ENOSPC;
    next_name(staging, name_out);
    *fd_out =
        openat(staging->dir_fd, name_out, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    return *fd_out >= 0 ? 0 : errno == ESTALE ? ENOENT : errno;
}

static int copy_bytes(int from, int to, uint64_t n_bytes)
{
    off_t at = 0;
    while ((uint64_t)at < n_bytes) {
        const ssize_t n = copy_file_range(from, &at, to, NULL, n_bytes - (uint64_t)at, 0);
        if (n < 0)
            return errno;
        if (n == 0)
            return EIO; /* it has become shorter */
    }
    return 0;
}

int cg_staging_copy(cg_staging *staging, int from, uint64_t n_bytes,
                    char name_out[CG_STAGING_NAME_BYTES])
{
    struct stat attr;
    int to;
    if (fstat(from, &attr) != 0)
        return errno;
    int error = cg_staging_create(staging, name_out, &to);
    if (error != 0)
        return error;
    /* The times, too: making room goes by the time of access. */
    const struct timespec times[] = {attr.st_atim, attr.st_mtim};
    /* Who is not root cannot give files away: then the copy stays ours. */
    error = copy_bytes(from, to, n_bytes);
    if (error == 0 &&
        ((fchown(to, attr.st_uid, attr.st_gid) != 0 && geteuid() == 0) ||
         fchmod(to, attr.st_mode & 07777) != 0 || futimens(to, times) != 0 || fsync(to) != 0))
        error = errno;
    close(to);
    if (error != 0)
        unlinkat(staging->dir_fd, name_out, 0);
    return error;
}
