#include "fusefs/drop.h"

#include "fusefs/views.h"
#include "iouring/beneath.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* A chunk's folder and the names of one of its files in it. */
typedef struct place {
    int dir_fd;
    const cg_object_file *file;
    char leaf[CG_N_LEVELS][CG_TREE_NAME_BYTES];
} place;

static int open_place(int root_fd, const cg_survey *survey, const cg_object_file *file,
                      place *place_out)
{
    char path[CG_TREE_PATH_BYTES];
    place_out->file = file;
    for (unsigned level = 0; level < CG_N_LEVELS; level++) {
        if (cg_tree_object_path(survey->models[file->model], &file->key, (cg_level)level,
                                &file->profile, path, sizeof path) != CG_OK)
            return EINVAL;
        char *slash = strrchr(path, '/');
        snprintf(place_out->leaf[level], sizeof place_out->leaf[level], "%.*s",
                 CG_TREE_NAME_BYTES - 1, slash + 1);
        *slash = '\0';
    }
    place_out->dir_fd = cg_beneath_open(root_fd, path, O_RDONLY | O_DIRECTORY);
    return place_out->dir_fd < 0 ? errno : 0;
}

static bool has_name(const place *p, unsigned level, struct stat *attr_out)
{
    return (p->file->levels & 1u << level) != 0 &&
           fstatat(p->dir_fd, p->leaf[level], attr_out, AT_SYMLINK_NOFOLLOW) == 0;
}

/* Whether the level's name is still one of the survey's file. What this step does to the file's
 * other names changes its links and times, so only what stays is compared. */
static bool is_still(const place *p, unsigned level)
{
    struct stat attr;
    return has_name(p, level, &attr) && cg_survey_is_same_content(p->file, &attr);
}

/* The first level whose name shows the file as it was at the survey; CG_N_LEVELS: none. *error_out:
 * ESTALE if a name shows the file, or one of its number, and it is not as it was. */
static unsigned find_as_it_was(const place *p, int *error_out)
{
    struct stat attr;
    *error_out = 0;
    for (unsigned level = 0; level < CG_N_LEVELS; level++) {
        if (!has_name(p, level, &attr) || attr.st_ino != p->file->ino)
            continue;
        if (cg_survey_is_as_it_was(p->file, &attr))
            return level;
        *error_out = ESTALE;
    }
    return CG_N_LEVELS;
}

/* Takes away the names of the levels below `end`. */
static int unlink_names(const place *p, unsigned end)
{
    int error = 0;
    for (unsigned level = 0; level < end; level++)
        if (is_still(p, level) && unlinkat(p->dir_fd, p->leaf[level], 0) != 0 && errno != ENOENT)
            error = errno;
    return error;
}

static bool holds_chunks(int dir_fd)
{
    bool found = false;
    DIR *dir = cg_beneath_list(openat(dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (dir == NULL)
        return true;
    for (const struct dirent *e; !found && (e = readdir(dir)) != NULL;)
        found = strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0 &&
                strcmp(e->d_name, "tokens") != 0;
    closedir(dir);
    return found;
}

/* Somebody may publish the chunk again at this moment: then the folder is not empty and stays.
 * Older stores have `tokens` there, too, which nothing reads. */
static void remove_folder(int root_fd, const cg_survey *survey, const place *p)
{
    char path[CG_TREE_PATH_BYTES];
    if (holds_chunks(p->dir_fd) ||
        cg_tree_object_path(survey->models[p->file->model], &p->file->key, CG_L0, NULL, path,
                            sizeof path) != CG_OK)
        return;
    unlinkat(p->dir_fd, "tokens", 0);
    *strrchr(path, '/') = '\0';
    char *leaf = strrchr(path, '/');
    *leaf++ = '\0';
    const int above = cg_beneath_open(root_fd, path, O_RDONLY | O_DIRECTORY);
    if (above >= 0) {
        unlinkat(above, leaf, AT_REMOVEDIR);
        close(above);
    }
}

/* Gives a staged file the level's name, in place of the survey's file. The staged name stays. */
static int rename_over(cg_staging *staging, const char *staged, const place *p, unsigned level)
{
    char link[CG_STAGING_NAME_BYTES + 2];
    snprintf(link, sizeof link, "%s-%u", staged, level);
    /* By way of a link: the staged name is needed for the next level, too. */
    if (linkat(staging->dir_fd, staged, staging->dir_fd, link, 0) != 0)
        return errno;
    if (renameat(staging->dir_fd, link, p->dir_fd, p->leaf[level]) == 0)
        return 0;
    const int error = errno;
    unlinkat(staging->dir_fd, link, 0);
    return error;
}

/* Where the level ends in the file, by the file's own header. 0: it holds no such level, or is not
 * the survey's chunk. */
static uint64_t level_end(const place *p, int fd, const struct stat *attr, uint8_t level)
{
    uint8_t bytes[CG_CHUNK_FIXED_BYTES];
    cg_chunk_header header;
    return pread(fd, bytes, sizeof bytes, 0) == (ssize_t)sizeof bytes &&
                   cg_chunk_header_parse(bytes, sizeof bytes, &header) == CG_OK &&
                   cg_chunk_header_cut(&header, (uint64_t)attr->st_size) == CG_OK &&
                   cg_key_equal(&header.key, &p->file->key) &&
                   memcmp(&header.profile, &p->file->profile, sizeof header.profile) == 0
               ? header.level_bytes[level]
               : 0;
}

static int cut(cg_staging *staging, const place *p, unsigned level, uint8_t finest_left)
{
    char staged[CG_STAGING_NAME_BYTES];
    struct stat attr;
    int error = ESTALE;
    const int from = cg_view_open_unnoticed(p->dir_fd, p->leaf[level]);
    if (from < 0)
        return errno == ENOENT ? ESTALE : errno;
    /* While it is open no other file can get its number. */
    const bool is_it = fstat(from, &attr) == 0 && cg_survey_is_as_it_was(p->file, &attr);
    const uint64_t n_bytes = is_it ? level_end(p, from, &attr, finest_left) : 0;
    if (n_bytes > 0 && (error = cg_staging_copy(staging, from, n_bytes, staged)) == 0) {
        /* First the names that stay get the new file, then the finer ones go: at any moment each
         * level that is to stay can be found. */
        for (unsigned i = finest_left; error == 0 && i < CG_N_LEVELS; i++)
            if (is_still(p, i))
                error = rename_over(staging, staged, p, i);
        if (error == 0)
            error = unlink_names(p, finest_left);
        unlinkat(staging->dir_fd, staged, 0);
    }
    close(from);
    return error;
}

int cg_drop(cg_staging *staging, int root_fd, const cg_survey *survey, const cg_object_file *file,
            uint8_t finest_left)
{
    place p;
    int error = open_place(root_fd, survey, file, &p);
    if (error != 0)
        return error == ENOENT ? EALREADY : error;
    const unsigned level = find_as_it_was(&p, &error);
    if (level < CG_N_LEVELS && finest_left < CG_N_LEVELS)
        error = cut(staging, &p, level, finest_left);
    else if (level < CG_N_LEVELS)
        error = unlink_names(&p, CG_N_LEVELS);
    if (error == 0 && finest_left == CG_N_LEVELS)
        remove_folder(root_fd, survey, &p); /* also if it is all that was left to do */
    if (error == 0 && level == CG_N_LEVELS)
        error = EALREADY;
    close(p.dir_fd);
    return error;
}
