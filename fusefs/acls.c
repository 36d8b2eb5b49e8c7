#include "fusefs/acls.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

enum { DEPTH = 3 };

bool cg_acls_are_on(int fd, bool is_folder)
{
    /* A list that a mode could say is not stored. */
    return fgetxattr(fd, "system.posix_acl_access", NULL, 0) > 0 ||
           (is_folder && fgetxattr(fd, "system.posix_acl_default", NULL, 0) > 0);
}

bool cg_acls_are_on_folder(cg_acl_notes *notes, int fd, uint64_t generation)
{
    enum { SETTLED_SECONDS = 2 };
    struct stat attr;
    char path[32];
    if (fstat(fd, &attr) != 0)
        return true;
    const int64_t changed_ns =
        (int64_t)attr.st_ctim.tv_sec * 1000000000 + (int64_t)attr.st_ctim.tv_nsec;
    /* No node has the number 0. Without a lock the number of one folder may come to stand with the
     * time of another: a time that is past, which the first folder will not have again. */
    _Atomic uint64_t *const noted = &notes->free_of_lists[generation % CG_N_ACL_NOTES].generation;
    _Atomic int64_t *const since = &notes->free_of_lists[generation % CG_N_ACL_NOTES].changed_ns;
    if (*noted == generation && *since == changed_ns)
        return false;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (getxattr(path, "system.posix_acl_access", NULL, 0) > 0 ||
        getxattr(path, "system.posix_acl_default", NULL, 0) > 0)
        return true;
    /* The clock of files is coarse: a list that comes right now could leave the time as it is. */
    if (time(NULL) - attr.st_ctim.tv_sec > SETTLED_SECONDS) {
        *noted = 0;
        *since = changed_ns;
        *noted = generation;
    }
    return false;
}

/* There may be a hundred thousand contexts, and a start must not wait for that: each is asked when
 * it is used. */
static bool is_of_contexts(const char *path, unsigned depth)
{
    return depth == 2 && strcmp(strchr(path, '/'), "/contexts") == 0;
}

/* The folder of fd, which it closes; its path is in path_out, and stays there if it is the one. */
static bool find_below(int fd, unsigned depth, char *path_out, size_t path_bytes)
{
    const size_t n = strlen(path_out);
    if (fd < 0)
        return false;
    const bool is_on = cg_acls_are_on(fd, true);
    DIR *dir = is_on || depth == DEPTH || is_of_contexts(path_out, depth) ? NULL : fdopendir(fd);
    if (dir == NULL) {
        close(fd);
        return is_on;
    }
    bool found = false;
    for (const struct dirent *e; !found && (e = readdir(dir)) != NULL;) {
        if ((e->d_type != DT_DIR && e->d_type != DT_UNKNOWN) || strcmp(e->d_name, ".") == 0 ||
            strcmp(e->d_name, "..") == 0)
            continue;
        snprintf(path_out + n, path_bytes - n, "%s%s", n > 0 ? "/" : "", e->d_name);
        found = find_below(openat(dirfd(dir), e->d_name,
                                  O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC),
                           depth + 1, path_out, path_bytes);
        if (!found)
            path_out[n] = '\0';
    }
    closedir(dir);
    return found;
}

bool cg_acls_find(int root_fd, char *path_out, size_t path_bytes)
{
    path_out[0] = '\0';
    const int fd = openat(root_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return find_below(fd, 0, path_out, path_bytes);
}
