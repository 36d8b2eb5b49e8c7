#include "fusefs/survey.h"

#include "fusefs/grown.h"
#include "fusefs/marks.h"
#include "fusefs/views.h"
#include "fusefs/walk.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { BYTES_A_BLOCK = 512 };
static const uint32_t NO_MODEL = UINT32_MAX;

/* A file of the store with several names, which is met several times. */
typedef struct space {
    ino_t ino;
    uint32_t model; /* NO_MODEL: in the root */
    uint64_t used_bytes;
} space;

typedef struct count {
    cg_survey *survey;
    bool (*is_over)(void *user);
    void *user;
    size_t max_files, n_spaces, max_spaces;
    space *spaces;
    cg_marks marks;
} count;

/* The model's index; models are walked one after another. */
static cg_status find_model(cg_survey *survey, const char *name, uint32_t *index_out)
{
    if (survey->n_models == 0 || strcmp(survey->models[survey->n_models - 1], name) != 0) {
        const size_t n = survey->n_models + 1;
        char **models = reallocarray(survey->models, n, sizeof *models);
        /* Each array is kept when it has grown, also if the other could not: cg_survey_free() frees
         * both. */
        survey->models = models != NULL ? models : survey->models;
        uint64_t *bytes = reallocarray(survey->model_bytes, n, sizeof *bytes);
        survey->model_bytes = bytes != NULL ? bytes : survey->model_bytes;
        if (models == NULL || bytes == NULL || (models[n - 1] = strdup(name)) == NULL)
            return CG_ERR_NO_MEMORY;
        bytes[n - 1] = 0;
        survey->n_models = n;
    }
    *index_out = (uint32_t)survey->n_models - 1;
    return CG_OK;
}

static void add_space(cg_survey *survey, uint32_t model, uint64_t used_bytes)
{
    survey->used_bytes += used_bytes;
    if (model != NO_MODEL)
        survey->model_bytes[model] += used_bytes;
}

/* The same by the path of the model's folder, or of what is in it. */
static cg_status find_model_of(cg_survey *survey, const char *path, uint32_t *index_out)
{
    char model[CG_TREE_NAME_BYTES];
    const size_t n = strcspn(path, "/");
    *index_out = NO_MODEL;
    if (n >= sizeof model)
        return CG_OK;
    memcpy(model, path, n);
    model[n] = '\0';
    return find_model(survey, model, index_out);
}

static cg_status count_space(count *w, const char *path, const struct stat *attr)
{
    uint32_t index = NO_MODEL;
    if (strchr(path, '/') != NULL || S_ISDIR(attr->st_mode)) {
        const cg_status status = find_model_of(w->survey, path, &index);
        if (status != CG_OK)
            return status;
    }
    const uint64_t used_bytes = (uint64_t)attr->st_blocks * BYTES_A_BLOCK;
    if (S_ISDIR(attr->st_mode) || attr->st_nlink == 1) { /* met once */
        add_space(w->survey, index, used_bytes);
        return CG_OK;
    }
    space *spaces = cg_grown(w->spaces, w->n_spaces, &w->max_spaces, sizeof *spaces);
    if (spaces == NULL)
        return CG_ERR_NO_MEMORY;
    w->spaces = spaces;
    w->spaces[w->n_spaces++] = (space){attr->st_ino, index, used_bytes};
    return CG_OK;
}

/* False: errno says why it cannot be read; 0: it can, and is no chunk. */
static bool read_header(int dir_fd, const char *leaf, const struct stat *attr,
                        cg_chunk_header *header_out)
{
    uint8_t bytes[CG_CHUNK_FIXED_BYTES];
    const int fd = cg_view_open_unnoticed(dir_fd, leaf);
    if (fd < 0)
        return false;
    const ssize_t n = pread(fd, bytes, sizeof bytes, 0);
    const int error = n < 0 ? errno : 0;
    close(fd);
    errno = error;
    return n == (ssize_t)sizeof bytes &&
           cg_chunk_header_parse(bytes, sizeof bytes, header_out) == CG_OK &&
           cg_chunk_header_cut(header_out, (uint64_t)attr->st_size) == CG_OK;
}

static int64_t ns_of(const struct timespec *time)
{
    return (int64_t)((uint64_t)time->tv_sec * 1000000000u + (uint64_t)time->tv_nsec);
}

bool cg_survey_is_same_content(const cg_object_file *file, const struct stat *attr)
{
    return S_ISREG(attr->st_mode) && attr->st_ino == file->ino &&
           (uint64_t)attr->st_size == file->level_bytes[file->finest] &&
           ns_of(&attr->st_mtim) == file->modified_ns;
}

bool cg_survey_is_as_it_was(const cg_object_file *file, const struct stat *attr)
{
    return cg_survey_is_same_content(file, attr) && attr->st_nlink == file->n_links &&
           ns_of(&attr->st_atim) == file->accessed_ns && ns_of(&attr->st_ctim) == file->changed_ns;
}

static int64_t later(const struct timespec *a, const struct timespec *b)
{
    return a->tv_sec > b->tv_sec ? a->tv_sec : b->tv_sec;
}

/* The file, if it is known: names of one file stand in one folder, and folders are walked one after
 * another. */
static cg_object_file *find_known(cg_survey *survey, const cg_tree_name *name, ino_t ino)
{
    for (size_t i = survey->n_files; i-- > 0;) {
        cg_object_file *file = &survey->files[i];
        if (memcmp(&file->key, &name->key, sizeof file->key) != 0)
            return NULL;
        if (file->ino == ino && strcmp(survey->models[file->model], name->model) == 0)
            return file;
    }
    return NULL;
}

/* One more name of a file that is known. False: it is not. */
static bool add_name(cg_survey *survey, const cg_tree_name *name, ino_t ino)
{
    cg_object_file *known = find_known(survey, name, ino);
    if (known == NULL)
        return false;
    if (known->level_bytes[name->level] != 0)
        known->levels |= (uint8_t)(1u << name->level);
    /* It began with all links but one: what is left at the end are names that are no object's. */
    known->n_names_elsewhere--;
    return true;
}

/* A file of an object by the first of its names that is met. None that is not what its name says:
 * that one takes space alone. */
static cg_status count_object(count *w, int dir_fd, const char *path, const struct stat *attr,
                              const cg_tree_name *name)
{
    cg_survey *survey = w->survey;
    cg_chunk_header header;
    uint32_t model;
    if (!read_header(dir_fd, cg_walk_leaf(path), attr, &header) ||
        cg_tree_check(name, &header) != CG_OK)
        return count_space(w, path, attr);
    cg_status status = find_model(survey, name->model, &model);
    if (status != CG_OK)
        return status;
    cg_object_file *files = cg_grown(survey->files, survey->n_files, &w->max_files, sizeof *files);
    if (files == NULL)
        return CG_ERR_NO_MEMORY;
    survey->files = files;
    cg_object_file *file = &survey->files[survey->n_files++];
    *file = (cg_object_file){
        .key = header.key,
        .parent = header.parent,
        .profile = header.profile,
        .model = model,
        .first_position = header.first_position,
        .n_tokens = header.n_tokens,
        .levels = (uint8_t)(1u << name->level),
        .finest = header.level,
        .n_names_elsewhere = (uint32_t)attr->st_nlink - 1, /* but for this one */
        .ino = attr->st_ino,
        .used_bytes = (uint64_t)attr->st_blocks * BYTES_A_BLOCK,
        .used_at_s = later(&attr->st_atim, &attr->st_mtim),
        .accessed_ns = ns_of(&attr->st_atim),
        .modified_ns = ns_of(&attr->st_mtim),
        .changed_ns = ns_of(&attr->st_ctim),
        .n_links = (uint32_t)attr->st_nlink,
    };
    memcpy(file->level_bytes, header.level_bytes, sizeof file->level_bytes);
    return CG_OK;
}

/* For the log, which names one of them. */
static void note_forbidden(count *w, const char *path)
{
    if (w->marks.has_forbidden && w->survey->forbidden == NULL)
        w->survey->forbidden = strdup(path);
}

/* What a file of a context names. A chunk's file with links is not read: they tell of it. */
static cg_status mark(count *w, int dir_fd, const char *path, const struct stat *attr,
                      const cg_tree_name *name)
{
    cg_chunk_header header;
    uint32_t model;
    const bool is_json = name->kind == CG_TREE_CONTEXT_JSON;
    if (!is_json && (name->kind != CG_TREE_CONTEXT_CHUNK || attr->st_nlink != 1))
        return CG_OK;
    const cg_status status = find_model(w->survey, name->model, &model);
    if (status != CG_OK)
        return status;
    if (is_json)
        return cg_marks_add_json(&w->marks, model, dir_fd, cg_walk_leaf(path));
    if (read_header(dir_fd, cg_walk_leaf(path), attr, &header))
        return cg_marks_add(&w->marks, model, &header.key, (uint8_t)(1u << name->level));
    return cg_marks_add_unread(&w->marks, model, errno);
}

static void take_marks(cg_survey *survey, cg_marks *marks)
{
    cg_marks_sort(marks);
    survey->has_unknown = marks->has_unknown;
    survey->has_forbidden = marks->has_forbidden;
    survey->has_leased = marks->has_leased;
    survey->crowded = marks->has_crowded ? survey->models[marks->crowded] : NULL;
    for (size_t i = 0; i < survey->n_files; i++) {
        cg_object_file *file = &survey->files[i];
        if (file->n_names_elsewhere == 0 &&
            (cg_marks_of(marks, file->model, &file->key) & file->levels) != 0)
            file->n_names_elsewhere = 1;
    }
}

static cg_status visit(void *user, int dir_fd, const char *path, const struct stat *attr)
{
    count *w = user;
    cg_tree_name name;
    cg_status status = CG_OK;
    if (w->is_over != NULL && w->is_over(w->user))
        return CG_ERR_CANCELLED;
    if (!S_ISDIR(attr->st_mode)) {
        cg_tree_parse(path, &name);
        /* Most names of a store are further ones of an object's file. */
        if (name.kind == CG_TREE_OBJECT_CHUNK)
            return add_name(w->survey, &name, attr->st_ino)
                       ? CG_OK
                       : count_object(w, dir_fd, path, attr, &name);
        status = mark(w, dir_fd, path, attr, &name);
        note_forbidden(w, path);
    }
    return status == CG_OK ? count_space(w, path, attr) : status;
}

/* What cannot be read may name objects, if it is where contexts are: then nobody knows which of
 * them may go. Elsewhere only its space is unknown. What is not ours to read will not be later, and
 * names objects of its model only. */
static cg_status unread(void *user, const char *path, int error)
{
    count *w = user;
    uint32_t model;
    if (path[0] == '.' || (strchr(path, '/') != NULL && !cg_walk_is_of_contexts(path)))
        return CG_OK;
    if (!cg_marks_is_forbidden(error))
        return cg_status_from_errno(error);
    cg_status status = find_model_of(w->survey, path, &model);
    if (status == CG_OK)
        status = cg_marks_add_all(&w->marks, model, error);
    note_forbidden(w, path);
    return status;
}

static int by_ino(const void *a, const void *b)
{
    const space *x = a, *y = b;
    return x->ino < y->ino ? -1 : x->ino > y->ino;
}

static int by_ino_and_model(const void *a, const void *b)
{
    const space *x = a, *y = b;
    const int order = by_ino(a, b);
    return order != 0 ? order : x->model < y->model ? -1 : x->model > y->model;
}

/* Adds each file of spaces, which may be there several times, once. Not those of counted. */
static void add_spaces(cg_survey *survey, space *spaces, size_t n, const space *counted,
                       size_t n_counted)
{
    if (n == 0)
        return;
    qsort(spaces, n, sizeof *spaces, by_ino_and_model);
    for (size_t i = 0; i < n; i++)
        if ((i == 0 || spaces[i].ino != spaces[i - 1].ino) &&
            (n_counted == 0 ||
             bsearch(&spaces[i], counted, n_counted, sizeof *counted, by_ino) == NULL))
            add_space(survey, spaces[i].model, spaces[i].used_bytes);
}

/* What all files take, those with several names once. Files are told by their numbers: how many
 * names one has may change while they are met. An object's file may have been met in several
 * models, too, as after `cp -al`. */
static cg_status add_up(space *spaces, size_t n, cg_survey *survey)
{
    space *objects = malloc((survey->n_files + 1) * sizeof *objects);
    if (objects == NULL)
        return CG_ERR_NO_MEMORY;
    for (size_t i = 0; i < survey->n_files; i++) {
        const cg_object_file *file = &survey->files[i];
        objects[i] = (space){file->ino, file->model, file->used_bytes};
    }
    add_spaces(survey, objects, survey->n_files, NULL, 0);
    add_spaces(survey, spaces, n, objects, survey->n_files);
    free(objects);
    return CG_OK;
}

cg_status cg_survey_make(int root_fd, bool (*is_over)(void *user), void *user,
                         cg_survey *survey_out)
{
    *survey_out = (cg_survey){0};
    count w = {.survey = survey_out, .is_over = is_over, .user = user};
    cg_status status = cg_walk(root_fd, visit, unread, &w);
    if (status == CG_OK)
        status = add_up(w.spaces, w.n_spaces, survey_out);
    if (status == CG_OK)
        take_marks(survey_out, &w.marks);
    cg_marks_free(&w.marks);
    free(w.spaces);
    if (status != CG_OK)
        cg_survey_free(survey_out);
    return status;
}

void cg_survey_free(cg_survey *survey)
{
    for (size_t i = 0; i < survey->n_models; i++)
        free(survey->models[i]);
    free(survey->models);
    free(survey->model_bytes);
    free(survey->files);
    free(survey->forbidden);
    *survey = (cg_survey){0};
}
