#include "fusefs/left.h"

#include "fusefs/staging.h"
#include "fusefs/walk.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LEFT_SECONDS = 3600 };

/* A lease on reading is refused while anybody has the file open for writing. Were it broken, the
 * signal would be one that is ignored. */
static bool is_being_written(int dir_fd, const char *leaf)
{
    const int fd = openat(dir_fd, leaf, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return false;
    fcntl(fd, F_SETSIG, SIGURG);
    const bool is = fcntl(fd, F_SETLEASE, F_RDLCK) != 0 && errno == EAGAIN;
    close(fd);
    return is;
}

static bool is_temporary_name(const char *leaf)
{
    const char *end = leaf + strlen(leaf);
    return leaf[0] == '.' && end - leaf > 4 && strcmp(end - 4, ".tmp") == 0;
}

bool cg_left_is(int dir_fd, const char *path, const struct stat *attr, int64_t now_s)
{
    const char *leaf = cg_walk_leaf(path);
    return S_ISREG(attr->st_mode) && is_temporary_name(leaf) &&
           now_s - attr->st_mtim.tv_sec > LEFT_SECONDS &&
           strncmp(path, CG_STAGING_DIRECTORY "/", sizeof CG_STAGING_DIRECTORY) != 0 &&
           !is_being_written(dir_fd, leaf);
}

typedef struct sweep {
    int64_t now_s;
    bool (*is_over)(void *user);
    void *user;
    uint64_t n_removed;
} sweep;

static cg_status visit(void *user, int dir_fd, const char *path, const struct stat *attr)
{
    sweep *s = user;
    if (s->is_over(s->user))
        return CG_ERR_CANCELLED;
    s->n_removed +=
        cg_left_is(dir_fd, path, attr, s->now_s) && unlinkat(dir_fd, cg_walk_leaf(path), 0) == 0;
    return CG_OK;
}

cg_status cg_left_remove(int root_fd, int64_t now_s, bool (*is_over)(void *user), void *user,
                         uint64_t *n_removed_out)
{
    sweep s = {.now_s = now_s, .is_over = is_over, .user = user};
    const cg_status status = cg_walk_named(root_fd, is_temporary_name, visit, &s);
    *n_removed_out = s.n_removed;
    if (status == CG_OK) { /* where it cannot be noted, the next daemon does it again */
        const int fd = openat(root_fd, CG_LEFT_SWEPT_FILE,
                              O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
        if (fd >= 0) {
            futimens(fd, NULL);
            close(fd);
        }
    }
    return status;
}

int64_t cg_left_due_s(int root_fd, int64_t now_s)
{
    struct stat attr;
    if (fstatat(root_fd, CG_LEFT_SWEPT_FILE, &attr, AT_SYMLINK_NOFOLLOW) != 0)
        return 0;
    const int64_t age_s = now_s - attr.st_mtim.tv_sec;
    return age_s >= 0 && age_s < CG_LEFT_EVERY_S ? CG_LEFT_EVERY_S - age_s : 0;
}
