#include "fusefs/staging.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { MAX_DEPTH = 32, HOST_BYTES = 65, FOREIGN_SECONDS = 24 * 60 * 60 };

static void host_name(char host_out[HOST_BYTES])
{
    if (gethostname(host_out, HOST_BYTES) != 0)
        strcpy(host_out, "localhost");
    host_out[HOST_BYTES - 1] = '\0';
    for (char *c = host_out; *c != '\0'; c++)
        if (*c == '/' || *c == '@')
            *c = '_';
}

/* Whether the daemon that made this directory is gone. */
static bool is_stale(int all_fd, const char *name, const char *host)
{
    struct stat attr;
    char path[CG_STAGING_OWN_BYTES + 8];
    const char *at = strrchr(name, '@');
    /* A name that starts with '.' is not locked yet. */
    const bool is_ours = at != NULL && strcmp(at + 1, host) == 0 && name[0] != '.';
    if (snprintf(path, sizeof path, "%s/lock", name) >= (int)sizeof path)
        return false;
    if (!is_ours && (fstatat(all_fd, name, &attr, AT_SYMLINK_NOFOLLOW) != 0 ||
                     time(NULL) - attr.st_mtime < FOREIGN_SECONDS))
        return false;
    const int fd = openat(all_fd, path, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT;
    const bool is_free = flock(fd, LOCK_EX | LOCK_NB) == 0;
    close(fd);
    return is_free;
}

int cg_staging_lock_store(const cg_staging *staging, const char *name)
{
    const int fd =
        openat(staging->all_fd, name, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
    if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        close(fd);
        return -1;
    }
    return fd;
}

static uint64_t remove_tree(int dir_fd, const char *name, unsigned depth)
{
    uint64_t n_removed = 0;
    const int fd = openat(dir_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (dir == NULL) {
        if (fd >= 0)
            close(fd);
        return 0;
    }
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        if (unlinkat(fd, entry->d_name, 0) == 0)
            n_removed += strcmp(entry->d_name, "lock") != 0;
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

static uint64_t remove_stale(int all_fd, const char *host)
{
    uint64_t n_removed = 0;
    const int fd = openat(all_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (dir == NULL) {
        if (fd >= 0)
            close(fd);
        return 0;
    }
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0 &&
            is_stale(all_fd, entry->d_name, host))
            n_removed += cg_staging_remove(all_fd, entry->d_name);
    closedir(dir);
    return n_removed;
}

/* The lock is taken before the directory gets the name under which others look for stale ones. */
static int make_own(cg_staging *staging, const char *host)
{
    struct timespec now;
    char path[CG_STAGING_OWN_BYTES + 8], fresh[CG_STAGING_OWN_BYTES];
    clock_gettime(CLOCK_REALTIME, &now);
    snprintf(staging->own, sizeof staging->own, "%ld-%" PRIx64 "@%s", (long)getpid(),
             (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec, host);
    snprintf(fresh, sizeof fresh, ".%.126s", staging->own);
    if (mkdirat(staging->all_fd, fresh, 0700) != 0)
        return errno;
    staging->dir_fd =
        openat(staging->all_fd, fresh, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    snprintf(path, sizeof path, "%s/lock", fresh);
    staging->lock_fd =
        openat(staging->all_fd, path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    struct stat attr;
    if (staging->dir_fd < 0 || staging->lock_fd < 0 || fstat(staging->dir_fd, &attr) != 0)
        return errno;
    staging->dev = attr.st_dev;
    flock(staging->lock_fd,
          LOCK_EX | LOCK_NB); /* a file system without locks: only we look for our own */
    return renameat(staging->all_fd, fresh, staging->all_fd, staging->own) == 0 ? 0 : errno;
}

static int open_all(cg_staging *staging)
{
    if (mkdirat(staging->root_fd, CG_STAGING_DIRECTORY, 0700) != 0 && errno != EEXIST)
        return errno;
    staging->all_fd = openat(staging->root_fd, CG_STAGING_DIRECTORY,
                             O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    return staging->all_fd < 0 ? errno : 0;
}

/* The descriptors keep their numbers: other threads may be using them. */
int cg_staging_make_again(cg_staging *staging)
{
    char host[HOST_BYTES];
    struct stat attr;
    int error = 0;
    pthread_mutex_lock(&staging->remaking);
    if (fstat(staging->dir_fd, &attr) != 0 || attr.st_nlink == 0) { /* else another thread did it */
        cg_staging fresh = {.dir_fd = -1, .all_fd = -1, .lock_fd = -1, .root_fd = staging->root_fd};
        host_name(host);
        if ((error = open_all(&fresh)) == 0 && (error = make_own(&fresh, host)) == 0 &&
            (dup3(fresh.all_fd, staging->all_fd, O_CLOEXEC) < 0 ||
             dup3(fresh.lock_fd, staging->lock_fd, O_CLOEXEC) < 0 ||
             dup3(fresh.dir_fd, staging->dir_fd, O_CLOEXEC) < 0))
            error = errno;
        if (error == 0)
            memcpy(staging->own, fresh.own, sizeof staging->own);
        const int fds[] = {fresh.all_fd, fresh.lock_fd, fresh.dir_fd};
        for (size_t i = 0; i < sizeof fds / sizeof fds[0]; i++)
            if (fds[i] >= 0)
                close(fds[i]);
    }
    pthread_mutex_unlock(&staging->remaking);
    return error;
}

int cg_staging_open(cg_staging *staging, int root_fd, uint64_t *n_removed_out)
{
    char host[HOST_BYTES];
    *staging = (cg_staging){.dir_fd = -1, .all_fd = -1, .lock_fd = -1};
    *n_removed_out = 0;
    staging->root_fd = root_fd;
    pthread_mutex_init(&staging->remaking, NULL);
    host_name(host);
    int error = open_all(staging);
    if (error != 0)
        return error;
    *n_removed_out = remove_stale(staging->all_fd, host);
    error = make_own(staging, host);
    if (error != 0)
        cg_staging_close(staging);
    return error;
}

void cg_staging_close(cg_staging *staging)
{
    if (staging->lock_fd >=
        0) /* first: an open file that is removed keeps sshfs and NFS from removing its directory */
        close(staging->lock_fd);
    if (staging->dir_fd >= 0) {
        unlinkat(staging->dir_fd, "lock", 0);
        unlinkat(staging->all_fd, staging->own, AT_REMOVEDIR);
        close(staging->dir_fd);
    }
    if (staging->all_fd >= 0)
        close(staging->all_fd);
    *staging = (cg_staging){.dir_fd = -1, .all_fd = -1, .lock_fd = -1};
}

int cg_staging_create(cg_staging *staging, char name_out[CG_STAGING_NAME_BYTES], int *fd_out)
{
    const uint64_t number = atomic_fetch_add(&staging->n_created, 1);
    snprintf(name_out, CG_STAGING_NAME_BYTES, "%" PRIu64, number);
    *fd_out =
        openat(staging->dir_fd, name_out, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    return *fd_out < 0 ? errno : 0;
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
    const struct timespec times[] = {attr.st_atim, attr.st_mtim};
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
