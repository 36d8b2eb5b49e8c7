#include "fusefs/fsck.h"

#include "fusefs/staging.h"
#include "fusefs/strict.h"
#include "fusefs/views.h"
#include "fusefs/walk.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define QUARANTINE "quarantine"
enum { LEFT_SECONDS = 24 * 3600, NONE = CG_N_LEVELS };
static const uint64_t MEMORY_BYTES = UINT64_C(256) << 20;

/* What is known of a file: those with several names are read once. */
typedef struct verdict {
    ino_t ino; /* 0: this place is free */
    cg_status status;
    uint8_t finest_whole; /* of a damaged nested chunk; NONE: no level is */
} verdict;

typedef struct fsck {
    bool repair;
    FILE *out;
    int root_fd, quarantine_fd; /* -1: not made yet */
    cg_staging staging;         /* where repaired */
    cg_strict_budget budget;
    verdict *verdicts; /* a hash table: a power of two of places, at least half of them free */
    size_t n_verdicts, n_places;
    time_t now;
    unsigned n_quarantined;
    uint64_t n_whole, n_damaged, n_left, n_failed;
} fsck;

static void fail(fsck *f, const char *path, const char *what, int error)
{
    fprintf(f->out, "%s: %s: %s\n", path, what, strerror(error));
    f->n_failed++;
}

/* ---- what is known ---- */

static verdict *place_of(verdict *verdicts, size_t n_places, ino_t ino)
{
    size_t at = (size_t)(ino * UINT64_C(0x9e3779b97f4a7c15)) & (n_places - 1);
    while (verdicts[at].ino != 0 && verdicts[at].ino != ino)
        at = (at + 1) & (n_places - 1);
    return &verdicts[at];
}

/* The file's place; its ino is 0 if it is not known. NULL: no memory. */
static verdict *find_verdict(fsck *f, ino_t ino)
{
    if (2 * f->n_verdicts >= f->n_places) {
        const size_t n = f->n_places > 0 ? 2 * f->n_places : 1024;
        verdict *larger = calloc(n, sizeof *larger);
        if (larger == NULL)
            return NULL;
        for (size_t i = 0; i < f->n_places; i++)
            if (f->verdicts[i].ino != 0)
                *place_of(larger, n, f->verdicts[i].ino) = f->verdicts[i];
        free(f->verdicts);
        f->verdicts = larger;
        f->n_places = n;
    }
    return place_of(f->verdicts, f->n_places, ino);
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
    verdict *known = find_verdict(f, attr->st_ino);
    *finest_whole_out = NONE;
    if (known == NULL)
        return CG_ERR_NO_MEMORY;
    if (known->ino != 0) {
        *finest_whole_out = known->finest_whole;
        return known->status == CG_OK ? check_name(fd, attr, name) : known->status;
    }
    const cg_status status = cg_strict_check(fd, name, &f->budget, UINT64_MAX, &header);
    const int kind = cg_strict_errno(status);
    if (kind == EBADMSG && name->kind != CG_TREE_PROFILE)
        *finest_whole_out = find_whole_level(fd);
    if (status == CG_OK || kind == EBADMSG) {
        *known = (verdict){attr->st_ino, status, *finest_whole_out};
        f->n_verdicts++;
    }
    return status;
}

/* ---- repairing ---- */

static int open_quarantine(fsck *f)
{
    if (f->quarantine_fd >= 0)
        return 0;
    if (mkdirat(f->root_fd, QUARANTINE, 0700) != 0 && errno != EEXIST)
        return errno;
    f->quarantine_fd =
        openat(f->root_fd, QUARANTINE, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    return f->quarantine_fd < 0 ? errno : 0;
}

/* The list first: a file in the quarantine that nobody knows would be worse than a line too many.
 */
static int quarantine(fsck *f, int dir_fd, const char *path, const char *why)
{
    char name[CG_TREE_PATH_BYTES];
    const int error = open_quarantine(f);
    if (error != 0)
        return error;
    snprintf(name, sizeof name, "%" PRId64 "-%u-%.200s", (int64_t)f->now, f->n_quarantined++,
             cg_walk_leaf(path));
    const int fd = openat(f->quarantine_fd, "list",
                          O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0)
        return errno;
    const bool is_told = dprintf(fd, "%s\t%s\t%s\n", name, path, why) > 0;
    close(fd);
    if (!is_told)
        return EIO;
    return renameat(dir_fd, cg_walk_leaf(path), f->quarantine_fd, name) == 0 ? 0 : errno;
}

/* The name becomes a copy of the levels that are whole. */
static int cut(fsck *f, int dir_fd, const char *path, int fd, uint8_t finest_whole)
{
    cg_chunk_header header;
    char staged[CG_STAGING_NAME_BYTES];
    if (!read_header(fd, &header))
        return EIO;
    int error = cg_staging_copy(&f->staging, fd, header.level_bytes[finest_whole], staged);
    if (error == 0 && renameat(f->staging.dir_fd, staged, dir_fd, cg_walk_leaf(path)) != 0) {
        error = errno;
        unlinkat(f->staging.dir_fd, staged, 0);
    }
    return error;
}

static void repair(fsck *f, int dir_fd, const char *path, int fd, const cg_tree_name *name,
                   const char *why, uint8_t finest_whole)
{
    const bool keeps = finest_whole != NONE && name->level >= finest_whole;
    const int error =
        keeps ? cut(f, dir_fd, path, fd, finest_whole) : quarantine(f, dir_fd, path, why);
    if (error != 0)
        fail(f, path, keeps ? "cannot be cut" : "cannot be moved to " QUARANTINE, error);
    else
        fprintf(f->out, "%s: %s\n", path,
                keeps ? "cut behind the levels that are whole" : "moved to " QUARANTINE);
}

static void check_file(fsck *f, int dir_fd, const char *path, const struct stat *attr,
                       const cg_tree_name *name)
{
    uint8_t finest_whole;
    const int fd = cg_view_open_unnoticed(dir_fd, cg_walk_leaf(path));
    if (fd < 0) {
        if (errno != ENOENT)
            fail(f, path, "cannot be read", errno);
        return;
    }
    const cg_status status = check(f, fd, attr, name, &finest_whole);
    const int kind = status == CG_OK ? 0 : cg_strict_errno(status);
    if (kind == 0) {
        f->n_whole++;
    } else if (kind == EBADMSG || kind == EINVAL) {
        f->n_damaged++;
        fprintf(f->out, "%s: %s\n", path, cg_strerror(status));
        if (f->repair)
            repair(f, dir_fd, path, fd, name, cg_strerror(status), finest_whole);
    } else { /* of a later version, or not to be read now: nobody's fault that we could repair */
        fprintf(f->out, "%s: not checked: %s\n", path, cg_strerror(status));
        f->n_failed++;
    }
    close(fd);
}

/* What a killed connector left: hidden files that end in .tmp (iouring/io_write.h). */
static bool is_left(const fsck *f, const char *path, const struct stat *attr)
{
    const char *leaf = cg_walk_leaf(path), *end = leaf + strlen(leaf);
    return leaf[0] == '.' && end - leaf > 4 && strcmp(end - 4, ".tmp") == 0 &&
           f->now - attr->st_mtim.tv_sec > LEFT_SECONDS;
}

static void remove_left(fsck *f, int dir_fd, const char *path)
{
    f->n_left++;
    fprintf(f->out, "%s: left unfinished\n", path);
    if (f->repair && unlinkat(dir_fd, cg_walk_leaf(path), 0) != 0)
        fail(f, path, "cannot be removed", errno);
}

static cg_status visit(void *user, int dir_fd, const char *path, const struct stat *attr)
{
    fsck *f = user;
    cg_tree_name name;
    if (S_ISDIR(attr->st_mode) ||
        strncmp(path, CG_STAGING_DIRECTORY "/", sizeof CG_STAGING_DIRECTORY) == 0)
        return CG_OK;
    cg_tree_parse(path, &name);
    if (name.kind == CG_TREE_OBJECT_CHUNK || name.kind == CG_TREE_CONTEXT_CHUNK ||
        name.kind == CG_TREE_PROFILE)
        check_file(f, dir_fd, path, attr, &name);
    else if (is_left(f, path, attr))
        remove_left(f, dir_fd, path);
    return CG_OK;
}

int cg_fsck(const char *store, bool repair, FILE *out)
{
    uint64_t n_removed;
    int error = 0;
    fsck f = {.repair = repair,
              .out = out,
              .root_fd = open(store, O_RDONLY | O_DIRECTORY | O_CLOEXEC),
              .quarantine_fd = -1,
              .staging = {.dir_fd = -1, .all_fd = -1, .lock_fd = -1},
              .now = time(NULL)};
    if (f.root_fd < 0 ||
        (repair && (error = cg_staging_open(&f.staging, f.root_fd, &n_removed)) != 0)) {
        fail(&f, store, "cannot be opened", error != 0 ? error : errno);
    } else {
        cg_strict_budget_init(&f.budget, MEMORY_BYTES);
        const cg_status status = cg_walk(f.root_fd, visit, &f);
        if (status != CG_OK) {
            fprintf(out, "%s: %s\n", store, cg_strerror(status));
            f.n_failed++;
        }
        cg_strict_budget_destroy(&f.budget);
        fprintf(out,
                "%" PRIu64 " names whole, %" PRIu64 " damaged, %" PRIu64
                " files left unfinished, %" PRIu64 " failures\n",
                f.n_whole, f.n_damaged, f.n_left, f.n_failed);
    }
    cg_staging_close(&f.staging);
    if (f.quarantine_fd >= 0)
        close(f.quarantine_fd);
    if (f.root_fd >= 0)
        close(f.root_fd);
    free(f.verdicts);
    return f.n_failed > 0 ? 2 : f.n_damaged + f.n_left > 0 ? 1 : 0;
}
