#include "fusefs/gc.h"

#include "fusefs/drop.h"
#include "fusefs/left.h"
#include "fusefs/staging.h"
#include "fusefs/survey.h"
#include "fusefs/walk.h"
#include "iouring/beneath.h"
#include "iouring/layout.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct gc {
    int root_fd;
    cg_staging staging;
    bool orphans, remove;
    FILE *out;
    int64_t now_s;
    uint64_t n_found, n_failed, bytes;
} gc;

static void found(gc *g, const char *path, const char *what, uint64_t bytes)
{
    fprintf(g->out, "%s: %s\n", path, what);
    g->n_found++;
    g->bytes += bytes;
}

static void fail(gc *g, const char *path, int error)
{
    fprintf(g->out, "%s: cannot be removed: %s\n", path, strerror(error));
    g->n_failed++;
}

static cg_status visit(void *user, int dir_fd, const char *path, const struct stat *attr)
{
    gc *g = user;
    if (!cg_left_is(dir_fd, path, attr, g->now_s))
        return CG_OK;
    found(g, path, "left unfinished", (uint64_t)attr->st_blocks * 512);
    if (g->remove && unlinkat(dir_fd, cg_walk_leaf(path), 0) != 0 && errno != ENOENT)
        fail(g, path, errno);
    return CG_OK;
}

/* Whether the model has the profile of a lossy file. What we cannot find out counts as there. */
static bool has_profile(const gc *g, const cg_survey *survey, const cg_object_file *file)
{
    char path[CG_TREE_PATH_BYTES];
    /* L0 is decoded without a profile. */
    if (file->finest == CG_L0 || cg_tree_profile_path(survey->models[file->model], &file->profile,
                                                      path, sizeof path) != CG_OK)
        return true;
    const int fd = cg_beneath_open(g->root_fd, path, O_PATH);
    if (fd < 0)
        return errno != ENOENT;
    close(fd);
    return true;
}

static void sweep(gc *g, const cg_survey *survey, const cg_object_file *file)
{
    char path[CG_TREE_PATH_BYTES];
    const bool is_readable = has_profile(g, survey, file);
    /* Names elsewhere are a context's, as a rule: then it stays. */
    if (file->n_names_elsewhere > 0 || (is_readable && !g->orphans))
        return;
    const cg_level level = (cg_level)__builtin_ctz(file->levels); /* it was found by a name */
    if (cg_tree_object_path(survey->models[file->model], &file->key, level, &file->profile, path,
                            sizeof path) != CG_OK)
        return;
    found(g, path, is_readable ? "no context names it" : "its profile is gone", file->used_bytes);
    const int error = g->remove ? cg_drop(&g->staging, g->root_fd, survey, file, CG_N_LEVELS) : 0;
    if (error != 0)
        fail(g, path, error);
}

static cg_status collect(gc *g)
{
    cg_survey survey;
    /* Two walks: a survey lists objects only, and unfinished files are none. */
    cg_status status = cg_walk(g->root_fd, visit, g);
    if (status != CG_OK || (status = cg_survey_make(g->root_fd, NULL, NULL, &survey)) != CG_OK)
        return status;
    for (size_t i = 0; i < survey.n_files; i++)
        sweep(g, &survey, &survey.files[i]);
    cg_survey_free(&survey);
    return CG_OK;
}

int cg_gc(const char *store, bool orphans, bool remove, FILE *out)
{
    gc g = {.root_fd = open(store, O_RDONLY | O_DIRECTORY | O_CLOEXEC),
            .staging = {.dir_fd = -1, .all_fd = -1, .lock_fd = -1},
            .orphans = orphans,
            .remove = remove,
            .out = out};
    uint64_t n_removed;
    int error = g.root_fd < 0 ? errno : 0;
    cg_status status = error == 0 ? cg_layout_check(g.root_fd) : cg_status_from_errno(error);
    if (status == CG_OK && remove &&
        ((error = cg_staging_open(&g.staging, g.root_fd, CG_STAGING_SILENT_S, &n_removed)) != 0 ||
         (error = cg_staging_live(&g.staging, NULL, NULL)) != 0))
        status = cg_status_from_errno(error);
    if (status == CG_OK) {
        g.now_s = cg_staging_now_s(remove ? &g.staging : NULL);
        status = collect(&g);
    }
    if (status != CG_OK) {
        fprintf(out, "%s: %s\n", store, error != 0 ? strerror(error) : cg_strerror(status));
        g.n_failed++;
    }
    fprintf(out, "%" PRIu64 " files, %" PRIu64 " bytes%s, %" PRIu64 " failures\n", g.n_found,
            g.bytes, remove ? " removed" : "", g.n_failed);
    cg_staging_close(&g.staging);
    if (g.root_fd >= 0)
        close(g.root_fd);
    return g.n_failed > 0 ? 2 : g.n_found > 0 && !remove ? 1 : 0;
}
