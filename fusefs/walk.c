#include "fusefs/walk.h"

#include "iouring/beneath.h"
#include "iouring/tree.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_DEPTH = 32 };

typedef struct walk {
    cg_walk_visit *visit;
    cg_walk_unread *unread;              /* NULL: nobody wants to know */
    bool (*is_wanted)(const char *leaf); /* NULL: every file */
    void *user;
    char path[CG_TREE_PATH_BYTES]; /* of the folder that is being read, without a slash behind */
} walk;

const char *cg_walk_leaf(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash != NULL ? slash + 1 : path;
}

bool cg_walk_is_of_contexts(const char *path)
{
    static const char CONTEXTS[] = "/contexts";
    const size_t n = sizeof CONTEXTS - 1;
    const char *rest = path + strcspn(path, "/");
    return strncmp(rest, CONTEXTS, n) == 0 && (rest[n] == '/' || rest[n] == '\0');
}

/* What stands at w->path cannot be read. What is gone, or another thing by now, is no matter. */
static cg_status pass_over(walk *w, int error)
{
    const bool is_forbidden = error == EACCES || error == EPERM,
               is_empty = error == ENOENT || error == ENOTDIR || error == ELOOP ||
                          (is_forbidden && !cg_walk_is_of_contexts(w->path));
    return is_empty || w->unread == NULL ? CG_OK : w->unread(w->user, w->path, error);
}

static cg_status walk_folder(walk *w, int fd, unsigned depth);

/* The entry at w->path. */
static cg_status walk_entry(walk *w, int dir_fd, const char *leaf, unsigned depth)
{
    struct stat attr;
    cg_status status = CG_OK;
    if (fstatat(dir_fd, leaf, &attr, AT_SYMLINK_NOFOLLOW) != 0)
        return pass_over(w, errno);
    if (S_ISDIR(attr.st_mode) ||
        (S_ISREG(attr.st_mode) && (w->is_wanted == NULL || w->is_wanted(leaf))))
        status = w->visit(w->user, dir_fd, w->path, &attr);
    if (status != CG_OK || !S_ISDIR(attr.st_mode) || depth == MAX_DEPTH)
        return status;
    /* The visitor may have removed or renamed it: then there is nothing to walk. */
    const int fd = openat(dir_fd, leaf, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    return fd >= 0 ? walk_folder(w, fd, depth + 1) : pass_over(w, errno);
}

static cg_status walk_named_entry(walk *w, int dir_fd, const char *leaf, unsigned depth)
{
    const size_t n = strlen(w->path), n_leaf = strlen(leaf);
    if (n + 1 + n_leaf >= sizeof w->path)
        return CG_OK;
    if (n > 0)
        w->path[n] = '/';
    memcpy(w->path + n + (n > 0), leaf, n_leaf + 1);
    const cg_status status = walk_entry(w, dir_fd, leaf, depth);
    w->path[n] = '\0';
    return status;
}

/* The folder at w->path; takes over its fd. */
static cg_status walk_folder(walk *w, int fd, unsigned depth)
{
    cg_status status = CG_OK;
    int error = 0;
    DIR *dir = cg_beneath_list(fd);
    if (dir == NULL)
        return pass_over(w, errno);
    while (status == CG_OK) {
        errno = 0;
        const struct dirent *e = readdir(dir);
        if (e == NULL) {
            error = errno;
            break;
        }
        const bool may_be_folder = e->d_type == DT_DIR || e->d_type == DT_UNKNOWN;
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0 &&
            (may_be_folder || w->is_wanted == NULL || w->is_wanted(e->d_name)))
            status = walk_named_entry(w, fd, e->d_name, depth);
    }
    closedir(dir);
    return error != 0 ? pass_over(w, error) : status;
}

static cg_status walk_root(walk *w, int root_fd)
{
    const int fd = openat(root_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return fd >= 0 ? walk_folder(w, fd, 0) : cg_status_from_errno(errno);
}

cg_status cg_walk(int root_fd, cg_walk_visit *visit, cg_walk_unread *unread, void *user)
{
    walk w = {.visit = visit, .unread = unread, .user = user};
    return walk_root(&w, root_fd);
}

cg_status cg_walk_named(int root_fd, bool (*is_wanted)(const char *leaf), cg_walk_visit *visit,
                        void *user)
{
    walk w = {.visit = visit, .is_wanted = is_wanted, .user = user};
    return walk_root(&w, root_fd);
}
