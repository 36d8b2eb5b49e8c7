#include "fusefs/gc.h"

#include "fusefs/drop.h"
#include "fusefs/fsck.h"
#include "fusefs/left.h"
#include "fusefs/staging.h"
#include "fusefs/survey.h"
#include "fusefs/walk.h"
#include "iouring/beneath.h"
#include "iouring/layout.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct gc {
    int root_fd;
    cg_staging staging;
    bool orphans, remove;
    FILE *out;
    int64_t now_s;
    char asked[CG_TREE_PATH_BYTES]; /* the profile that was looked for last */
    bool is_there;                  /* and what came out */
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

static cg_status unread(void *user, const char *path, int error)
{
    gc *g = user;
    fprintf(g->out, "%s: cannot be read: %s\n", path, strerror(error));
    g->n_failed++;
    return CG_OK;
}

/* Whether the text file at path has a line that is_it. What cannot be known counts as yes. */
static bool has_line(int root_fd, const char *path, bool (*is_it)(void *user, const char *line),
                     void *user)
{
    struct stat attr;
    char *line = NULL;
    size_t line_bytes = 0;
    bool found = false;
    const int fd = cg_beneath_open(root_fd, path, O_RDONLY | O_NONBLOCK);
    if (fd < 0)
        return errno != ENOENT;
    /* A longer one could be a single line, for which getline() would take as much memory. */
    FILE *in =
        fstat(fd, &attr) == 0 && S_ISREG(attr.st_mode) && attr.st_size <= CG_TREE_MOST_TEXT_BYTES
            ? fdopen(fd, "r")
            : NULL;
    if (in == NULL) {
        close(fd);
        return true;
    }
    while (!found && getline(&line, &line_bytes, in) > 0) {
        line[strcspn(line, "\n")] = '\0';
        found = is_it(user, line);
    }
    found |= ferror(in) != 0;
    free(line);
    fclose(in);
    return found;
}

typedef struct wanted {
    int root_fd;
    char hex[CG_KEY_HEX_BYTES]; /* the profile's fingerprint */
    char path[CG_TREE_PATH_BYTES];
} wanted;

static bool is_fingerprint(void *user, const char *line)
{
    return strcmp(line, ((const wanted *)user)->hex) == 0;
}

/* "<name in the quarantine>\t<path>\t<why>", as fusefs/fsck.c writes it, and still there. */
static bool is_kept(void *user, const char *line)
{
    const wanted *w = user;
    char kept[CG_TREE_PATH_BYTES];
    struct stat attr;
    const size_t n_name = strcspn(line, "\t"), n_path = strlen(w->path);
    if (line[n_name] == '\0' || strncmp(line + n_name + 1, w->path, n_path) != 0 ||
        line[n_name + 1 + n_path] != '\t')
        return false;
    snprintf(kept, sizeof kept, CG_TREE_QUARANTINE "/%.*s", (int)n_name, line);
    return fstatat(w->root_fd, kept, &attr, AT_SYMLINK_NOFOLLOW) == 0 || errno != ENOENT;
}

/* Whether somebody may bring the profile back: it is the model's default one, or was damaged and
 * lies in the quarantine. Its objects are whole, and of use when it is there again. */
static bool may_come_back(const gc *g, const char *model, const cg_fingerprint *profile,
                          const char *path)
{
    wanted w = {.root_fd = g->root_fd};
    char by_default[CG_TREE_PATH_BYTES];
    cg_key key;
    memcpy(key.bytes, profile->bytes, sizeof key.bytes);
    cg_key_to_hex(&key, w.hex);
    snprintf(w.path, sizeof w.path, "%s", path);
    return (cg_tree_model_file_path(model, "profiles/default", by_default, sizeof by_default) ==
                CG_OK &&
            has_line(g->root_fd, by_default, is_fingerprint, &w)) ||
           has_line(g->root_fd, CG_TREE_QUARANTINE "/list", is_kept, &w);
}

/* Whether the model has the profile of a lossy file. What we cannot find out counts as there. */
static bool has_profile(gc *g, const cg_survey *survey, const cg_object_file *file)
{
    char path[CG_TREE_PATH_BYTES];
    /* L0 is decoded without a profile. */
    if (file->finest == CG_L0 || cg_tree_profile_path(survey->models[file->model], &file->profile,
                                                      path, sizeof path) != CG_OK)
        return true;
    if (strcmp(g->asked, path) == 0) /* most files of a model have the same */
        return g->is_there;
    const int fd = cg_beneath_open(g->root_fd, path, O_PATH);
    g->is_there = fd >= 0 || errno != ENOENT ||
                  may_come_back(g, survey->models[file->model], &file->profile, path);
    if (fd >= 0)
        close(fd);
    snprintf(g->asked, sizeof g->asked, "%s", path);
    return g->is_there;
}

static void sweep(gc *g, const cg_survey *survey, const cg_object_file *file)
{
    char path[CG_TREE_PATH_BYTES];
    const bool is_readable = has_profile(g, survey, file);
    if (file->n_names_elsewhere > 0 || (is_readable && !g->orphans))
        return;
    const cg_level level = (cg_level)__builtin_ctz(file->levels); /* it was found by a name */
    if (cg_tree_object_path(survey->models[file->model], &file->key, level, &file->profile, path,
                            sizeof path) != CG_OK)
        return;
    const int error = g->remove ? cg_drop(&g->staging, g->root_fd, survey, file, CG_N_LEVELS) : 0;
    if (error == ESTALE || error == EALREADY) /* somebody has it in use, or it is gone */
        return;
    found(g, path, is_readable ? "no context names it" : "its profile is gone", file->used_bytes);
    if (error != 0)
        fail(g, path, error);
}

static bool is_default(const gc *g, const cg_survey *survey, const cg_object_file *file)
{
    wanted w = {.root_fd = g->root_fd};
    char path[CG_TREE_PATH_BYTES];
    cg_key key;
    memcpy(key.bytes, file->profile.bytes, sizeof key.bytes);
    cg_key_to_hex(&key, w.hex);
    return cg_tree_model_file_path(survey->models[file->model], "profiles/default", path,
                                   sizeof path) != CG_OK ||
           has_line(g->root_fd, path, is_fingerprint, &w);
}

/* What can be decoded, and is not served now. It is no garbage: the default may change again. Files
 * of a model follow one another. */
static void tell_unserved(gc *g, const cg_survey *survey)
{
    const cg_object_file *before = NULL;
    bool is_served = true;
    uint64_t n_unserved = 0;
    for (size_t i = 0; i <= survey->n_files; i++) {
        const cg_object_file *file = i < survey->n_files ? &survey->files[i] : NULL;
        if (n_unserved > 0 && (file == NULL || file->model != before->model)) {
            fprintf(g->out,
                    "%s: %" PRIu64 " files of chunks are not served: profiles/default does "
                    "not name their profile\n",
                    survey->models[before->model], n_unserved);
            n_unserved = 0;
        }
        if (file == NULL || file->finest == CG_L0 || !has_profile(g, survey, file))
            continue;
        if (before == NULL || before->model != file->model ||
            memcmp(&before->profile, &file->profile, sizeof file->profile) != 0)
            is_served = is_default(g, survey, file);
        n_unserved += !is_served;
        before = file;
    }
}

static cg_status collect(gc *g)
{
    cg_survey survey;
    /* Two walks: a survey lists objects only, and unfinished files are none. */
    cg_status status = cg_walk(g->root_fd, visit, unread, g);
    if (status != CG_OK || (status = cg_survey_make(g->root_fd, NULL, NULL, &survey)) != CG_OK)
        return status;
    if (survey.crowded != NULL)
        fprintf(g->out, "%s: contexts name too many chunks: all of its objects stay\n",
                survey.crowded);
    if (survey.has_forbidden || survey.has_leased)
        fputs("a context has a lease now, or may not be read: nobody knows what it names, "
              "and all objects of its model stay\n",
              g->out);
    g->n_failed += survey.has_unknown;
    tell_unserved(g, &survey);
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
    int error = g.root_fd < 0 ? errno : 0;
    cg_status status = error == 0 ? cg_layout_find(g.root_fd) : cg_status_from_errno(error);
    const bool is_store = g.root_fd < 0 || status != CG_ERR_NOT_FOUND;
    if (status == CG_OK && remove &&
        (error = cg_staging_open_to_remove(&g.staging, g.root_fd)) != 0)
        status = cg_status_from_errno(error);
    if (status == CG_OK) {
        g.now_s = cg_staging_now_s(remove ? &g.staging : NULL);
        status = collect(&g);
    }
    if (status != CG_OK) {
        fprintf(out, "%s: %s\n", store,
                !is_store    ? CG_LAYOUT_NOT_FOUND
                : error != 0 ? strerror(error)
                             : cg_strerror(status));
        g.n_failed++;
    }
    fprintf(out, "%" PRIu64 " files, %" PRIu64 " bytes%s, %" PRIu64 " failures\n", g.n_found,
            g.bytes, remove ? " removed" : "", g.n_failed);
    cg_staging_close(&g.staging);
    if (g.root_fd >= 0)
        close(g.root_fd);
    return g.n_failed > 0 ? 2 : g.n_found > 0 && !remove ? 1 : 0;
}
