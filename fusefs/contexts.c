#include "fusefs/contexts.h"

#include "fusefs/grown.h"
#include "fusefs/staging.h"
#include "fusefs/walk.h"
#include "iouring/beneath.h"
#include "iouring/same_file.h"
#include "iouring/tree.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

enum { TIME_BYTES = 24 };
static const int64_t MAX_SECONDS = INT64_C(1) << 40;

typedef struct expiry {
    const char *model; /* NULL: all */
    cg_staging *staging;
    int64_t now_s;
    bool (*is_over)(void *user);
    void *user;
    int64_t at_s; /* of the context that is looked at */
    cg_expired_file *files;
    size_t n_files, max_files, n_removed;
    unsigned n_moved; /* names in the staging folder that were tried */
} expiry;

bool cg_context_parse_time(const char *text, size_t n_bytes, int64_t *seconds_out)
{
    static const char UNITS[] = "smhdw";
    static const int64_t SECONDS[] = {1, 60, 3600, 24 * 3600, 7 * 24 * 3600};
    int64_t value = 0, unit = 1;
    size_t i = 0;
    for (; i < n_bytes && text[i] >= '0' && text[i] <= '9' && value < MAX_SECONDS; i++)
        /* At most 10 times the limit: no overflow. A digit that is left then makes the text no
         * time. */
        value = 10 * value + (text[i] - '0');
    if (i + 1 == n_bytes && i > 0) {
        const char *found = memchr(UNITS, text[i++], sizeof UNITS - 1);
        unit = found != NULL ? SECONDS[found - UNITS] : 0;
    }
    if (i != n_bytes || value == 0 || unit == 0 || value > MAX_SECONDS / unit)
        return false;
    *seconds_out = value * unit;
    return true;
}

static bool has_expired(int dir_fd, int64_t now_s, int64_t *at_s_out)
{
    char text[TIME_BYTES];
    struct stat attr;
    int64_t seconds;
    if (fgetxattr(dir_fd, CG_CONTEXT_PIN, NULL, 0) >= 0 || errno != ENODATA)
        return false;
    /* What cannot be read or understood never expires. Without a context.json, as while a context
     * is being copied in, the folder's own time counts. */
    const ssize_t n = fgetxattr(dir_fd, CG_CONTEXT_TTL, text, sizeof text);
    return n > 0 && cg_context_parse_time(text, (size_t)n, &seconds) &&
           (fstatat(dir_fd, "context.json", &attr, AT_SYMLINK_NOFOLLOW) == 0 ||
            fstat(dir_fd, &attr) == 0) &&
           !__builtin_add_overflow(attr.st_mtim.tv_sec, seconds, at_s_out) && now_s >= *at_s_out;
}

/* The files of a context that is in the staging folder already. */
static cg_status note_file(void *user, int dir_fd, const char *path, const struct stat *attr)
{
    expiry *e = user;
    (void)dir_fd, (void)path;
    if (!S_ISREG(attr->st_mode))
        return CG_OK;
    cg_expired_file *files = cg_grown(e->files, e->n_files, &e->max_files, sizeof *files);
    if (files == NULL)
        return CG_ERR_NO_MEMORY;
    e->files = files;
    e->files[e->n_files++] = (cg_expired_file){attr->st_ino, e->at_s};
    return CG_OK;
}

static const char MOVED[] = "expired-";

/* What an earlier expiry could not remove whole: over NFS and sshfs an open file holds its folder.
 * Returns a number behind theirs: what a rename over a full folder says differs, to sshfs it is
 * EPERM.
 */
static unsigned remove_moved(cg_staging *staging)
{
    unsigned n_moved = 0;
    DIR *dir = cg_beneath_list(openat(staging->dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (dir == NULL)
        return 0;
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;)
        if (strncmp(entry->d_name, MOVED, sizeof MOVED - 1) == 0) {
            const unsigned long n = strtoul(entry->d_name + sizeof MOVED - 1, NULL, 10) + 1;
            if (n > n_moved && n < UINT_MAX)
                n_moved = (unsigned)n;
            cg_staging_remove(staging->dir_fd, entry->d_name);
        }
    closedir(dir);
    return n_moved;
}

static bool is_it(int dir_fd, const char *leaf, int context_fd)
{
    struct stat there, context;
    return fstatat(dir_fd, leaf, &there, AT_SYMLINK_NOFOLLOW) == 0 &&
           fstat(context_fd, &context) == 0 && cg_same_file(&there, &context);
}

/* Of a rename over a folder that is not empty, or over a file. To sshfs it is EPERM, which may mean
 * something else as well. */
static bool is_taken(int error)
{
    return error == EEXIST || error == ENOTEMPTY || error == ENOTDIR || error == EPERM;
}

/* Another context had got the name: it has it again, or one beside it if that is taken by now. */
static void put_back(expiry *e, const char *moved, int dir_fd, const char *leaf)
{
    enum { MAX_TRIES = 100 };
    char beside[CG_TREE_NAME_BYTES];
    int error = renameat(e->staging->dir_fd, moved, dir_fd, leaf) == 0 ? 0 : errno;
    for (unsigned i = 1; is_taken(error) && i <= MAX_TRIES; i++) {
        snprintf(beside, sizeof beside, "%.*s.%u", CG_TREE_NAME_BYTES - 16, leaf, i);
        error = renameat(e->staging->dir_fd, moved, dir_fd, beside) == 0 ? 0 : errno;
    }
}

/* It moves first: nobody ever finds a part of it, and what a kill leaves, the next daemon removes.
 */
static cg_status remove_context(expiry *e, int dir_fd, const char *leaf, int context_fd)
{
    char moved[CG_STAGING_NAME_BYTES];
    int error;
    if (!is_it(dir_fd, leaf, context_fd))
        return CG_OK;
    do { /* the next name that is free */
        snprintf(moved, sizeof moved, "%s%u", MOVED, e->n_moved++);
        error = renameat(dir_fd, leaf, e->staging->dir_fd, moved) == 0 ? 0 : errno;
    } while (error == EEXIST || error == ENOTEMPTY);
    if (error != 0)
        return CG_OK; /* another time */
    if (!is_it(e->staging->dir_fd, moved, context_fd)) {
        put_back(e, moved, dir_fd, leaf);
        return CG_OK;
    }
    e->n_removed++;
    const cg_status status = cg_walk(context_fd, note_file, NULL, e);
    cg_staging_remove(e->staging->dir_fd, moved);
    return status;
}

typedef cg_status visitor(expiry *e, int dir_fd, const char *leaf);

/* Calls visit for each folder in dir_fd, which this closes. */
static cg_status for_each_folder(expiry *e, int dir_fd, visitor *visit)
{
    cg_status status = CG_OK;
    DIR *dir = cg_beneath_list(dir_fd);
    if (dir == NULL)
        return cg_status_from_errno(errno);
    for (const struct dirent *entry; status == CG_OK && (entry = readdir(dir)) != NULL;) {
        if (!cg_tree_name_is_valid(entry->d_name) ||
            (entry->d_type != DT_DIR && entry->d_type != DT_UNKNOWN))
            continue;
        status = e->is_over != NULL && e->is_over(e->user) ? CG_ERR_CANCELLED
                                                           : visit(e, dir_fd, entry->d_name);
    }
    closedir(dir);
    return status;
}

static cg_status visit_context(expiry *e, int dir_fd, const char *leaf)
{
    cg_status status = CG_OK;
    const int fd = openat(dir_fd, leaf, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return CG_OK;
    if (has_expired(fd, e->now_s, &e->at_s))
        status = remove_context(e, dir_fd, leaf, fd);
    close(fd);
    return status;
}

static cg_status visit_model(expiry *e, int root_fd, const char *model)
{
    char path[CG_TREE_NAME_BYTES + sizeof "/contexts"];
    if (!cg_tree_model_is_valid(model) || (e->model != NULL && strcmp(e->model, model) != 0))
        return CG_OK;
    snprintf(path, sizeof path, "%s/contexts", model);
    const int fd = cg_beneath_open(root_fd, path, O_RDONLY | O_DIRECTORY);
    return fd >= 0 ? for_each_folder(e, fd, visit_context) : CG_OK;
}

static int by_number_and_time(const void *a, const void *b)
{
    const cg_expired_file *x = a, *y = b;
    if (x->ino != y->ino)
        return x->ino < y->ino ? -1 : 1;
    return x->at_s < y->at_s ? -1 : x->at_s > y->at_s;
}

/* In order, each once: where it was in several contexts, as of the one whose time was over last. */
static void sort_files(expiry *e)
{
    size_t n = 0;
    if (e->n_files > 0)
        qsort(e->files, e->n_files, sizeof *e->files, by_number_and_time);
    for (size_t i = 0; i < e->n_files; i++)
        if (i + 1 == e->n_files || e->files[i].ino != e->files[i + 1].ino)
            e->files[n++] = e->files[i];
    e->n_files = n;
}

cg_status cg_contexts_expire(int root_fd, cg_staging *staging, const char *model,
                             bool (*is_over)(void *user), void *user, cg_expired_file **files_out,
                             size_t *n_files_out, size_t *n_removed_out)
{
    expiry e = {.model = model,
                .staging = staging,
                .now_s = cg_staging_now_s(staging),
                .is_over = is_over,
                .user = user};
    e.n_moved = remove_moved(staging);
    const cg_status status =
        for_each_folder(&e, openat(root_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), visit_model);
    sort_files(&e);
    *files_out = e.files;
    *n_files_out = e.n_files;
    *n_removed_out = e.n_removed;
    return status;
}
