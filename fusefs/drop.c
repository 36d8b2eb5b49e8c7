#include "fusefs/drop.h"

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

/* Whether the level's name is one of the survey's file. */
static bool is_still(const place *p, unsigned level)
{
    struct stat attr;
    return (p->file->levels & 1u << level) != 0 &&
           fstatat(p->dir_fd, p->leaf[level], &attr, AT_SYMLINK_NOFOLLOW) == 0 &&
           S_ISREG(attr.st_mode) && attr.st_ino == p->file->ino;
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

static int cut(cg_staging *staging, const place *p, uint8_t finest_left)
{
    char staged[CG_STAGING_NAME_BYTES];
    struct stat attr;
    int error = 0;
    /* Somebody else has done the step, or published the level anew. */
    if (p->file->level_bytes[finest_left] == 0 || !is_still(p, finest_left))
        return 0;
    const int from =
        openat(p->dir_fd, p->leaf[finest_left], O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (from < 0)
        return errno;
    if (fstat(from, &attr) == 0 && attr.st_ino == p->file->ino) {
        error = cg_staging_copy(staging, from, p->file->level_bytes[finest_left], staged);
        /* First the names that stay get the new file, then the finer ones go: at any moment each
         * level that is to stay can be found. */
        for (unsigned level = finest_left; error == 0 && level < CG_N_LEVELS; level++)
            if (is_still(p, level))
                error = rename_over(staging, staged, p, level);
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
        return error == ENOENT ? 0 : error;
    if (finest_left < CG_N_LEVELS) {
        error = cut(staging, &p, finest_left);
    } else if ((error = unlink_names(&p, CG_N_LEVELS)) == 0) {
        remove_folder(root_fd, survey, &p);
    }
    close(p.dir_fd);
    return error;
}
