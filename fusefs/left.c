#include "fusefs/left.h"

#include "fusefs/stamp.h"
#include "fusefs/walk.h"
#include "iouring/adopted.h"
#include "iouring/layout.h"
#include "iouring/tree.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LEFT_SECONDS = 3600 };

/* A lease on reading is refused while anybody has the file open for writing. Were it broken, the
 * signal would be one that is ignored. */
bool cg_left_is_being_written(int dir_fd, const char *leaf)
{
    const int fd = openat(dir_fd, leaf, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return false;
    fcntl(fd, F_SETSIG, SIGURG);
    const bool is = fcntl(fd, F_SETLEASE, F_RDLCK) != 0 && errno == EAGAIN;
    close(fd);
    return is;
}

static const char *const TAIL = ".0123456789abcdef.tmp"; /* 16 such digits, in any order */

/* ".NAME.<16 digits>.tmp", as cg_io_temp_path() makes it. */
static bool is_temporary_name(const char *leaf)
{
    const size_t n = strlen(leaf), n_tail = strlen(TAIL);
    return leaf[0] == '.' && n > 1 + n_tail && leaf[n - n_tail] == '.' &&
           strspn(leaf + n - n_tail + 1, "0123456789abcdef") == 16 &&
           strcmp(leaf + n - 4, ".tmp") == 0;
}

/* Whether cachegenfs writes a file of this path: all the others are somebody's own. */
static bool is_ours(const char *path)
{
    char model[CG_TREE_NAME_BYTES];
    cg_tree_name name;
    const char *rest = strchr(path, '/');
    if (rest == NULL)
        return strcmp(path, CG_ADOPTED_FILE) == 0 || strcmp(path, CG_LAYOUT_FILE) == 0;
    cg_tree_parse(path, &name);
    if (name.kind != CG_TREE_ORDINARY)
        return true;
    snprintf(model, sizeof model, "%.*s", (int)(rest - path), path);
    return cg_tree_model_is_valid(model) &&
           (strcmp(rest, "/model.json") == 0 || strcmp(rest, "/profiles/default") == 0);
}

/* Whether path is the temporary name of a file that cachegenfs writes. */
static bool is_temporary(const char *path)
{
    char final[CG_TREE_PATH_BYTES];
    const char *leaf = cg_walk_leaf(path);
    if (!is_temporary_name(leaf) || strlen(path) >= sizeof final)
        return false;
    const int n_folder = (int)(leaf - path), n_leaf = (int)(strlen(leaf) - strlen(TAIL)) - 1;
    snprintf(final, sizeof final, "%.*s%.*s", n_folder, path, n_leaf, leaf + 1);
    if (is_ours(final))
        return true;
    /* A context has one file more that no rule speaks of. */
    if (n_leaf != (int)strlen("tokens") || strncmp(leaf + 1, "tokens", (size_t)n_leaf) != 0)
        return false;
    snprintf(final, sizeof final, "%.*scontext.json", n_folder, path);
    cg_tree_name name;
    cg_tree_parse(final, &name);
    return name.kind == CG_TREE_CONTEXT_JSON;
}

bool cg_left_is(int dir_fd, const char *path, const struct stat *attr, int64_t now_s)
{
    const char *leaf = cg_walk_leaf(path);
    /* A temporary link of an old file, as adopting makes it, is as young as the link. */
    return S_ISREG(attr->st_mode) && is_temporary(path) &&
           now_s - attr->st_mtim.tv_sec > LEFT_SECONDS &&
           (attr->st_nlink == 1 || now_s - attr->st_ctim.tv_sec > LEFT_SECONDS) &&
           !cg_left_is_being_written(dir_fd, leaf);
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
    if (status == CG_OK)
        cg_stamp_set(root_fd, CG_LEFT_SWEPT_FILE, 0);
    return status;
}

int64_t cg_left_due_s(int root_fd, int64_t now_s)
{
    return cg_stamp_due_s(root_fd, CG_LEFT_SWEPT_FILE, now_s);
}
