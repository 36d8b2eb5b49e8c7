#include "iouring/beneath.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MAX_TRIES = 16 };

int cg_beneath_open_by_step(int root_fd, const char *path, int flags)
{
    char name[NAME_MAX + 1];
    int dir_fd = root_fd, fd = -1, error = 0;
    flags |= O_CLOEXEC | O_NOFOLLOW;
    if (path[0] == '\0')
        return openat(root_fd, ".", flags);
    for (;;) {
        const size_t n_bytes = strcspn(path, "/");
        const int last = path[n_bytes] == '\0';
        /* The errors are those that openat2() gives: EXDEV for a path that would lead out. */
        if (n_bytes > NAME_MAX) {
            errno = ENAMETOOLONG;
        } else if (n_bytes == 0 || (n_bytes == 2 && path[0] == '.' && path[1] == '.')) {
            errno = EXDEV;
        } else {
            memcpy(name, path, n_bytes);
            name[n_bytes] = '\0';
            /* O_PATH: to go through a folder wants no right to list it. */
            fd = openat(dir_fd, name, last ? flags : O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        }
        error = errno;
        if (dir_fd != root_fd)
            close(dir_fd);
        if (fd < 0 || last)
            break;
        dir_fd = fd;
        fd = -1;
        path += n_bytes + 1;
    }
    if (fd < 0)
        errno = error;
    return fd;
}

int cg_beneath_open(int root_fd, const char *path, int flags)
{
    struct open_how how = {
        .flags = (uint64_t)(unsigned)(flags | O_CLOEXEC | O_NOFOLLOW),
        .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS,
    };
    if (path[0] == '\0')
        path = ".";
    else if (strlen(path) >= PATH_MAX)
        return cg_beneath_open_by_step(root_fd, path, flags);
    for (int n_tries = 1;; n_tries++) {
        const int fd = (int)syscall(SYS_openat2, root_fd, path, &how, sizeof how);
        if (fd >= 0)
            return fd;
        /* A rename elsewhere made ".." uncertain: again. Or, with O_NONBLOCK, somebody has a lease
         * on the file. He is told to give it up, and may take 45 s for that. */
        if (errno == EAGAIN && n_tries < MAX_TRIES)
            continue;
        if (errno != ENOSYS && errno != EPERM) /* EPERM: what seccomp filters answer */
            return -1;
        return cg_beneath_open_by_step(root_fd, path, flags);
    }
}

DIR *cg_beneath_list(int fd)
{
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    const int error = errno;
    if (dir == NULL && fd >= 0)
        close(fd);
    errno = error;
    return dir;
}

cg_status cg_beneath_locate_in(int dir_fd, const char *path, cg_located *located_out)
{
    const char *slash = strrchr(path, '/');
    located_out->dir_fd = dir_fd;
    const int n = snprintf(located_out->at, sizeof located_out->at, "/proc/self/fd/%d/%s", dir_fd,
                           slash == NULL ? path : slash + 1);
    return n < (int)sizeof located_out->at ? CG_OK : CG_ERR_INVALID_ARGUMENT;
}

cg_status cg_beneath_locate(int root_fd, const char *path, cg_located *located_out)
{
    char folder[CG_TREE_PATH_BYTES];
    const char *slash = strrchr(path, '/');
    const size_t n_bytes = slash == NULL ? 0 : (size_t)(slash - path);
    located_out->dir_fd = -1;
    if (n_bytes >= sizeof folder)
        return CG_ERR_INVALID_ARGUMENT;
    memcpy(folder, path, n_bytes);
    folder[n_bytes] = '\0';
    /* Only the folder is opened this way. The last component is the caller's, who must not follow
     * it. */
    const int fd = cg_beneath_open(root_fd, folder, O_PATH | O_DIRECTORY);
    if (fd < 0)
        return errno == ELOOP || errno == ENOTDIR ? CG_ERR_PERMISSION : cg_status_from_errno(errno);
    const cg_status status = cg_beneath_locate_in(fd, path, located_out);
    if (status != CG_OK) {
        close(fd);
        located_out->dir_fd = -1;
    }
    return status;
}
