#include "fusefs/mountpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <mntent.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>

extern char **environ;

/* Resolves all but the last component: a dead mount cannot be asked. */
static bool absolute(const char *path, char out[PATH_MAX])
{
    char folder[PATH_MAX], real[PATH_MAX];
    size_t n_bytes = strlen(path);
    while (n_bytes > 1 && path[n_bytes - 1] == '/')
        n_bytes--;
    if (n_bytes >= PATH_MAX)
        return false;
    memcpy(folder, path, n_bytes);
    folder[n_bytes] = '\0';
    char *slash = strrchr(folder, '/');
    const char *leaf = slash == NULL ? folder : slash + 1;
    if (strcmp(leaf, ".") == 0 || strcmp(leaf, "..") == 0 || leaf[0] == '\0')
        return false;
    char *kept = strdup(leaf);
    if (slash != NULL)
        slash[slash == folder ? 1 : 0] = '\0';
    const bool fits =
        kept != NULL && realpath(slash == NULL ? "." : folder, real) != NULL &&
        snprintf(out, PATH_MAX, "%s/%s", strcmp(real, "/") == 0 ? "" : real, kept) < PATH_MAX;
    free(kept);
    return fits;
}

static bool is_our_mount(const char *path)
{
    FILE *mounts = setmntent("/proc/self/mounts", "re");
    bool found = false;
    if (mounts == NULL)
        return false;
    /* The last one that is mounted there counts. */
    for (const struct mntent *entry; (entry = getmntent(mounts)) != NULL;)
        if (strcmp(entry->mnt_dir, path) == 0)
            found = strcmp(entry->mnt_type, "fuse.cachegenfs") == 0;
    endmntent(mounts);
    return found;
}

void cg_mountpoint_detach(const char *path)
{
    char *const arguments[] = {"fusermount3", "-u", "-z", (char *)path, NULL};
    pid_t child;
    int status;
    /* Without the right to, fusermount3 has it for mounts of one's own. */
    if (umount2(path, MNT_DETACH | UMOUNT_NOFOLLOW) == 0)
        return;
    if (posix_spawnp(&child, arguments[0], NULL, NULL, arguments, environ) == 0)
        waitpid(child, &status, 0);
}

/* Of a mount without a daemon the kernel says ENOTCONN; but not as long as it trusts what it has of
 * the root, unless it must ask. */
static bool has_daemon(const char *path)
{
    struct statx attr;
    return statx(AT_FDCWD, path, AT_STATX_FORCE_SYNC, STATX_BASIC_STATS, &attr) == 0 ||
           errno != ENOTCONN;
}

bool cg_mountpoint_clear(const char *path)
{
    char real[PATH_MAX];
    /* Several may lie on top of each other. */
    while (absolute(path, real) && is_our_mount(real)) {
        if (has_daemon(real)) {
            fprintf(stderr, "cachegenfs: %s: a daemon serves it already\n", path);
            return false;
        }
        cg_mountpoint_detach(real);
        if (!has_daemon(real))
            break; /* we may not: mounting will tell */
    }
    return true;
}
