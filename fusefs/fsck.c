#include "fusefs/fsck.h"

#include "fusefs/left.h"
#include "fusefs/staging.h"
#include "fusefs/strict.h"
#include "fusefs/views.h"
#include "fusefs/walk.h"
#include "iouring/clock.h"
#include "iouring/layout.h"
#include "iouring/same_file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NONE = CG_N_LEVELS, WRITTEN_SECONDS = 300 };
static const uint64_t MEMORY_BYTES = UINT64_C(256) << 20;

typedef struct fsck {
    const cg_fsck_config *config;
    cg_fsck_result result;
    int quarantine_fd; /* -1: not made yet */
    cg_strict_budget budget;
    /* Files that are whole: those with several names are read once. A hash table: a power of two of
     * places, at least half of them free (0). */
    ino_t *whole;
    size_t n_whole, n_places;
    int64_t now_s;
    uint64_t start_ns; /* later than the start: cg_fsck_wait_ns() */
    unsigned n_moved;  /* to the quarantine, for their names there */
} fsck;

static void report(const fsck *f, const char *path, const char *what)
{
    f->config->report(f->config->user, path, what);
}

static void fail(fsck *f, const char *path, const char *what, int error)
{
    char text[128];
    snprintf(text, sizeof text, "%s: %s", what, strerror(error));
    report(f, path, text);
    f->result.n_failed++;
}

/* ---- the rate ---- */

uint64_t cg_fsck_wait_ns(uint64_t *start_ns, uint64_t now_ns, uint64_t read_bytes,
                         uint64_t bytes_per_s)
{
    const uint64_t due_ns = *start_ns + (uint64_t)((double)read_bytes * 1e9 / (double)bytes_per_s);
    if (now_ns > due_ns + CG_SECOND_NS) /* time in which the disk was busy is no credit */
        *start_ns += now_ns - due_ns - CG_SECOND_NS;
    return due_ns > now_ns ? due_ns - now_ns : 0;
}

/* Waits until what was read is no more than the rate allows. True: the check is to end. */
static bool is_over(fsck *f)
{
    const cg_fsck_config *c = f->config;
    if (c->wait == NULL)
        return false;
    if (c->bytes_per_s == 0)
        return c->wait(c->user, 0, &f->result);
    const uint64_t ns =
        cg_fsck_wait_ns(&f->start_ns, cg_now_ns(), f->result.read_bytes, c->bytes_per_s);
    return c->wait(c->user, ns, &f->result);
}

/* ---- what is known ---- */

static ino_t *place_of(ino_t *whole, size_t n_places, ino_t ino)
{
    size_t at = (size_t)(ino * UINT64_C(0x9e3779b97f4a7c15)) & (n_places - 1);
    while (whole[at] != 0 && whole[at] != ino)
        at = (at + 1) & (n_places - 1);
    return &whole[at];
}

/* The file's place, which is 0 if it is not known as whole. NULL: no memory. */
static ino_t *find_whole(fsck *f, ino_t ino)
{
    /* Half of the places stay free, so that each search ends. */
    if (2 * f->n_whole >= f->n_places) {
        const size_t n = f->n_places > 0 ? 2 * f->n_places : 1024;
        ino_t *larger = calloc(n, sizeof *larger);
        if (larger == NULL)
            return NULL;
        for (size_t i = 0; i < f->n_places; i++)
            if (f->whole[i] != 0)
                *place_of(larger, n, f->whole[i]) = f->whole[i];
        free(f->whole);
        f->whole = larger;
        f->n_places = n;
    }
    return place_of(f->whole, f->n_places, ino);
}

/* ---- reading ---- */

static bool read_header(int fd, cg_chunk_header *header_out)
{
    uint8_t bytes[CG_CHUNK_FIXED_BYTES];
    return cg_strict_read(&fd, 0, bytes, sizeof bytes) == CG_OK &&
           cg_chunk_header_parse(bytes, sizeof bytes, header_out) == CG_OK;
}

/* The finest level of a damaged chunk that is whole with all that it needs. */
static uint8_t find_whole_level(int fd)
{
    cg_chunk_header header, part;
    if (!read_header(fd, &header))
        return NONE;
    for (unsigned level = header.level; level <= header.coarsest; level++)
        if (cg_chunk_verify_source(cg_strict_read, &fd, header.level_bytes[level], &part) == CG_OK)
            return (uint8_t)level;
    return NONE;
}

/* The content was read by another name of the file; does it agree with this one, too? */
static cg_status check_name(int fd, const struct stat *attr, const cg_tree_name *name)
{
    cg_chunk_header header;
    if (name->kind == CG_TREE_PROFILE)
        return CG_OK; /* one with two names would have been refused by its first */
    if (!read_header(fd, &header))
        return CG_ERR_CORRUPT;
    const cg_status status = cg_chunk_header_cut(&header, (uint64_t)attr->st_size);
    return status == CG_OK ? cg_tree_check(name, &header) : status;
}

static cg_status check(fsck *f, int fd, const struct stat *attr, const cg_tree_name *name,
                       uint8_t *finest_whole_out)
{
    cg_chunk_header header;
    /* A pointer into the table, good until the next find: the table may grow then. */
    ino_t *known = find_whole(f, attr->st_ino);
    *finest_whole_out = NONE;
    if (known == NULL)
        return CG_ERR_NO_MEMORY;
    if (*known != 0)
        return check_name(fd, attr, name);
    f->result.read_bytes += (uint64_t)attr->st_size;
    const cg_status status = cg_strict_check(fd, name, &f->budget, UINT64_MAX, &header);
    if (cg_strict_errno(status) == EBADMSG && name->kind != CG_TREE_PROFILE)
        *finest_whole_out = find_whole_level(fd);
    /* Of a damaged file nothing is remembered. A pass may take days, and when the file is gone, as
     * after its repair, its number comes back: another file must not be condemned by it. */
    if (status == CG_OK) {
        *known = attr->st_ino;
        f->n_whole++;
    }
    return status;
}

/* ---- repairing ---- */

/* Whether the name is still the file's that was read: it may have been published again. That file
 * is open, so no other can have its number. */
static bool is_still(int dir_fd, const char *path, const struct stat *attr)
{
    struct stat now;
    return fstatat(dir_fd, cg_walk_leaf(path), &now, AT_SYMLINK_NOFOLLOW) == 0 &&
           cg_same_file(&now, attr);
}

static int open_quarantine(fsck *f)
{
    if (f->quarantine_fd >= 0)
        return 0;
    return cg_staging_folder(f->config->root_fd, CG_TREE_QUARANTINE, O_RDONLY, &f->quarantine_fd);
}

/* A FIFO in its place would hold who opens it until somebody reads. */
static int open_list(const fsck *f, int *fd_out)
{
    struct stat attr;
    const int flags = O_WRONLY | O_APPEND | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    int fd = openat(f->quarantine_fd, "list", flags | O_CREAT | O_EXCL, 0600);
    if (fd >= 0)
        cg_staging_give(f->config->root_fd, fd);
    else if (errno == EEXIST)
        fd = openat(f->quarantine_fd, "list", flags);
    if (fd < 0)
        return errno;
    if (fstat(fd, &attr) != 0 || !S_ISREG(attr.st_mode)) {
        close(fd);
        return EINVAL;
    }
    *fd_out = fd;
    return 0;
}

/* The list first: a file in the quarantine that nobody knows would be worse than a line too many.
 */
static int quarantine(fsck *f, int dir_fd, const char *path, const struct stat *attr,
                      const char *why)
{
    char name[CG_TREE_PATH_BYTES];
    int list_fd = -1;
    int error = open_quarantine(f);
    if (error == 0)
        error = open_list(f, &list_fd);
    if (error != 0)
        return error;
    /* A pass that began in the same second counts from 0, too, but has other files, which keep
     * their numbers. */
    snprintf(name, sizeof name, "%" PRId64 "-%ju-%u-%.200s", f->now_s, (uintmax_t)attr->st_ino,
             f->n_moved++, cg_walk_leaf(path));
    const bool is_told = dprintf(list_fd, "%s\t%s\t%s\n", name, path, why) > 0;
    close(list_fd);
    if (!is_told)
        return EIO;
    if (!is_still(dir_fd, path, attr))
        return ENOENT;
    if (renameat(dir_fd, cg_walk_leaf(path), f->quarantine_fd, name) != 0)
        return errno;
    f->result.n_quarantined++;
    return 0;
}

/* The name becomes a copy of the levels that are whole. */
static int cut(fsck *f, int dir_fd, const char *path, int fd, const struct stat *attr,
               uint8_t finest_whole)
{
    cg_chunk_header header;
    char staged[CG_STAGING_NAME_BYTES];
    cg_staging *staging = f->config->staging;
    if (!read_header(fd, &header))
        return EIO;
    int error = cg_staging_copy(staging, fd, header.level_bytes[finest_whole], staged);
    if (error != 0)
        return error;
    /* Asked again: copying may take long, and the name may be another's since. */
    if (!is_still(dir_fd, path, attr))
        error = ENOENT;
    else if (renameat(staging->dir_fd, staged, dir_fd, cg_walk_leaf(path)) != 0)
        error = errno;
    if (error != 0)
        unlinkat(staging->dir_fd, staged, 0);
    f->result.n_cut += error == 0;
    return error;
}

static void repair(fsck *f, int dir_fd, const char *path, int fd, const struct stat *attr,
                   const cg_tree_name *name, const char *why, uint8_t finest_whole)
{
    /* A name of a level finer than what is whole has nothing to show any more. */
    const bool keeps = finest_whole != NONE && name->level >= finest_whole;
    if (!is_still(dir_fd, path, attr))
        return;
    const int error = keeps ? cut(f, dir_fd, path, fd, attr, finest_whole)
                            : quarantine(f, dir_fd, path, attr, why);
    if (error == ENOENT) /* another one has repaired it, or published it again */
        return;
    if (error != 0)
        fail(f, path, keeps ? "cannot be cut" : "cannot be moved to " CG_TREE_QUARANTINE, error);
    else
        report(f, path,
               keeps ? "cut behind the levels that are whole" : "moved to " CG_TREE_QUARANTINE);
}

/* Whether a file that is not whole may become so: somebody writes it in place past the mounts, as
 * `tar` and `cp` do. before: as it was when we began to read it. */
static bool is_being_written(const fsck *f, int dir_fd, const char *path, int fd,
                             const struct stat *before)
{
    struct stat now;
    /* Asked now: a pass may take days. A time that is far ahead is somebody's own. */
    const int64_t age_s = cg_staging_now_s(f->config->staging) - before->st_mtim.tv_sec;
    return (age_s < WRITTEN_SECONDS && age_s > -WRITTEN_SECONDS) || fstat(fd, &now) != 0 ||
           now.st_size != before->st_size || now.st_mtim.tv_sec != before->st_mtim.tv_sec ||
           now.st_mtim.tv_nsec != before->st_mtim.tv_nsec ||
           cg_left_is_being_written(dir_fd, cg_walk_leaf(path));
}

static void check_file(fsck *f, int dir_fd, const char *path, const cg_tree_name *name)
{
    struct stat attr; /* of the file that is read: the name may be another's since it was listed */
    uint8_t finest_whole;
    const int fd = cg_view_open_unnoticed(dir_fd, cg_walk_leaf(path));
    if (fd < 0 || fstat(fd, &attr) != 0) {
        if (errno != ENOENT)
            fail(f, path, "cannot be read", errno);
        if (fd >= 0)
            close(fd);
        return;
    }
    const cg_status status = check(f, fd, &attr, name, &finest_whole);
    const int kind = status == CG_OK ? 0 : cg_strict_errno(status);
    const bool is_damaged = kind == EBADMSG || kind == EINVAL;
    if (kind == 0) {
        f->result.n_whole++;
    } else if (is_damaged && is_being_written(f, dir_fd, path, fd, &attr)) {
        f->result.n_being_written++;
        report(f, path, "not whole, but being written");
    } else if (is_damaged) {
        f->result.n_damaged++;
        report(f, path, cg_strerror(status));
        if (f->config->staging != NULL)
            repair(f, dir_fd, path, fd, &attr, name, cg_strerror(status), finest_whole);
    } else { /* of a later version, or not to be read now: nobody's fault that we could repair */
        char text[128];
        snprintf(text, sizeof text, "not checked: %s", cg_strerror(status));
        report(f, path, text);
        f->result.n_failed++;
    }
    close(fd);
}

static void remove_left(fsck *f, int dir_fd, const char *path)
{
    f->result.n_left++;
    report(f, path, "left unfinished");
    if (f->config->staging != NULL && unlinkat(dir_fd, cg_walk_leaf(path), 0) != 0 &&
        errno != ENOENT)
        fail(f, path, "cannot be removed", errno);
}

static cg_status visit(void *user, int dir_fd, const char *path, const struct stat *attr)
{
    fsck *f = user;
    cg_tree_name name;
    if (S_ISDIR(attr->st_mode) ||
        strncmp(path, CG_STAGING_DIRECTORY "/", sizeof CG_STAGING_DIRECTORY) == 0)
        return CG_OK;
    if (is_over(f))
        return CG_ERR_CANCELLED;
    cg_tree_parse(path, &name);
    if (name.kind == CG_TREE_OBJECT_CHUNK || name.kind == CG_TREE_CONTEXT_CHUNK ||
        name.kind == CG_TREE_PROFILE)
        check_file(f, dir_fd, path, &name);
    else if (cg_left_is(dir_fd, path, attr, f->now_s))
        remove_left(f, dir_fd, path);
    return CG_OK;
}

static cg_status unread(void *user, const char *path, int error)
{
    fail(user, path, "cannot be read", error);
    return CG_OK;
}

cg_status cg_fsck_run(const cg_fsck_config *config, cg_fsck_result *result_out)
{
    fsck f = {.config = config,
              .quarantine_fd = -1,
              .now_s = cg_staging_now_s(config->staging),
              .start_ns = cg_now_ns()};
    cg_strict_budget_init(&f.budget, MEMORY_BYTES);
    const cg_status status = cg_walk(config->root_fd, visit, unread, &f);
    cg_strict_budget_destroy(&f.budget);
    if (f.quarantine_fd >= 0)
        close(f.quarantine_fd);
    free(f.whole);
    *result_out = f.result;
    return status;
}

/* ---- the command ---- */

static void print(void *out, const char *path, const char *what)
{
    fprintf(out, "%s: %s\n", path, what);
}

int cg_fsck(const char *store, bool repair, FILE *out)
{
    cg_staging staging = {.dir_fd = -1, .all_fd = -1, .lock_fd = -1};
    cg_fsck_result r = {0};
    const int root_fd = open(store, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int error = root_fd < 0 ? errno : 0;
    const cg_status found = error == 0 ? cg_layout_find(root_fd) : CG_OK;
    if (found != CG_OK)
        error = found == CG_ERR_NOT_FOUND ? ENOENT : EPROTONOSUPPORT;
    if (error == 0 && repair)
        error = cg_staging_open_to_remove(&staging, root_fd);
    if (found == CG_ERR_NOT_FOUND) {
        print(out, store, CG_LAYOUT_NOT_FOUND);
        r.n_failed++;
    } else if (error != 0) {
        fprintf(out, "%s: cannot be opened: %s\n", store, strerror(error));
        r.n_failed++;
    } else {
        const cg_fsck_config config = {
            .root_fd = root_fd, .staging = repair ? &staging : NULL, .report = print, .user = out};
        const cg_status status = cg_fsck_run(&config, &r);
        if (status != CG_OK) {
            print(out, store, cg_strerror(status));
            r.n_failed++;
        }
        fprintf(out,
                "%" PRIu64 " names whole, %" PRIu64 " damaged, %" PRIu64
                " files left unfinished, %" PRIu64 " names being written, %" PRIu64 " failures\n",
                r.n_whole, r.n_damaged, r.n_left, r.n_being_written, r.n_failed);
    }
    cg_staging_close(&staging);
    if (root_fd >= 0)
        close(root_fd);
    return r.n_failed + r.n_being_written > 0 ? 2 : r.n_damaged + r.n_left > 0 ? 1 : 0;
}
