/* Publishing: a chunk, and names of its coarser levels; replacing what is damaged. */
#include "iouring/file.h"
#include "iouring/io_write.h"
#include "iouring/same_file.h"
#include "iouring/store_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Makes path another name of a file that has the name of a finer level and holds this level, too.
 * The file may be another publisher's, who was faster. CG_ERR_NOT_FOUND: no finer name is of such a
 * file. */
static cg_status link_level(const cg_store *store, const cg_chunk_header *h, cg_level level,
                            const char *path)
{
    char from[CG_TREE_PATH_BYTES];
    cg_chunk_header there;
    /* The finest first: the file with the most levels is the one to share. */
    for (unsigned finer = h->level; finer < level; finer++) {
        const cg_status status = cg_tree_object_path(store->model, &h->key, (cg_level)finer,
                                                     &h->profile, from, sizeof from);
        if (status != CG_OK)
            return status;
        if (cg_store_chunk_header(store->root_fd, from, level, &h->key, &h->profile, &there) ==
            CG_OK)
            return cg_file_link(store->root_fd, from, path, there.level_bytes[level]);
    }
    return CG_ERR_NOT_FOUND;
}

/* Of a chunk whose finest level is there already: coarser levels get names of that file. Any that
 * is there stays as it is. */
static cg_status publish_coarser(const cg_store *store, cg_io *io, const cg_chunk *chunk)
{
    const cg_chunk_header *h = &chunk->header;
    char path[CG_TREE_PATH_BYTES];
    for (unsigned level = h->level + 1u; level <= h->coarsest; level++) {
        cg_status status = cg_tree_object_path(store->model, &h->key, (cg_level)level, &h->profile,
                                               path, sizeof path);
        if (status != CG_OK)
            return status;
        status = cg_store_stat(store, io, path);
        if (status == CG_ERR_NOT_FOUND)
            status = link_level(store, h, (cg_level)level, path);
        if (status == CG_ERR_NOT_FOUND)
            status = cg_store_write(store, io, path, chunk->bytes, h->level_bytes[level], false);
        if (status != CG_OK && status != CG_ERR_EXISTS)
            return status;
    }
    return CG_OK;
}

/* Whether this call has made the folder of path. Mostly it is all that is missing above a chunk,
 * and to make it tells at once what a file that cannot be made there would. Whatever else is wrong,
 * the write finds out. */
static bool make_folder(const cg_store *store, const char *path)
{
    char folder[CG_TREE_PATH_BYTES];
    strcpy(folder, path);
    *strrchr(folder, '/') = '\0';
    if (mkdirat(store->root_fd, folder, 0700) == 0)
        return true;
    if (errno != ENOENT)
        return false;
    char *slash = strrchr(folder, '/'); /* objects/ab, in a young store */
    *slash = '\0';
    mkdirat(store->root_fd, folder, 0700);
    *slash = '/';
    return mkdirat(store->root_fd, folder, 0700) == 0;
}

/* Gives the chunk's file, which is at temp, the names of its levels, path that of the finest; temp
 * goes. The finest comes last: who finds it takes the others for granted, so it must not be there
 * without them if this is killed or the disk is full. Coarser names that are there stay.
 * In a folder that we have just made no other names are to be expected: there temp is not removed,
 * but renamed to the finest name, a question less. Another who publishes the chunk at that moment
 * shows by a coarser name, mostly; then the finest is a link, which lets one win. If he comes by
 * between our last link and the rename, his file of the finest level is replaced by ours.
 * CG_ERR_EXISTS: another's file has the finest name. */
static cg_status name_file(const cg_store *store, const cg_chunk_header *h, const char *temp,
                           const char *path, bool is_alone)
{
    char coarser[CG_TREE_PATH_BYTES];
    for (unsigned level = h->coarsest; level > h->level; level--) {
        cg_status status = cg_tree_object_path(store->model, &h->key, (cg_level)level, &h->profile,
                                               coarser, sizeof coarser);
        if (status == CG_OK)
            status = cg_file_link(store->root_fd, temp, coarser, h->level_bytes[level]);
        if (status == CG_ERR_EXISTS) {
            is_alone = false;
        } else if (status != CG_OK) {
            unlinkat(store->root_fd, temp, 0);
            return status;
        }
    }
    if (is_alone && h->coarsest > h->level &&
        renameat(store->root_fd, temp, store->root_fd, path) == 0)
        return CG_OK;
    return cg_file_name(store->root_fd, temp, path);
}

/* What publishing and replacing want: an idle queue and a good chunk. */
static cg_status check(const cg_io *io, const uint8_t *chunk_bytes, size_t n_bytes,
                       cg_chunk *chunk_out)
{
    if (cg_io_n_under_way(io) > 0)
        return CG_ERR_INVALID_ARGUMENT;
    const cg_status status = cg_chunk_verify(chunk_bytes, n_bytes);
    return status == CG_OK ? cg_chunk_open(chunk_bytes, n_bytes, chunk_out) : status;
}

cg_status cg_store_publish(const cg_store *store, cg_io *io, const uint8_t *chunk_bytes,
                           size_t n_bytes, bool *existed_out)
{
    cg_chunk chunk;
    char path[CG_TREE_PATH_BYTES], temp[CG_TREE_PATH_BYTES + CG_IO_TEMP_SUFFIX_BYTES];
    cg_status status;
    if (existed_out != NULL)
        *existed_out = false;
    if ((status = check(io, chunk_bytes, n_bytes, &chunk)) != CG_OK)
        return status;
    const cg_chunk_header *h = &chunk.header;
    if ((status = cg_tree_object_path(store->model, &h->key, (cg_level)h->level, &h->profile, path,
                                      sizeof path)) != CG_OK)
        return status;

    /* Whether the chunk is there its folder mostly tells, or else the finest name when it is made:
     * a store may be a network away. Coarser names are made before that, and should be of the
     * file that has the finest. */
    const bool is_alone = make_folder(store, path);
    if (!is_alone && h->coarsest > h->level &&
        (status = cg_store_stat(store, io, path)) != CG_ERR_NOT_FOUND) {
        if (status != CG_OK &&
            status != CG_ERR_INVALID_ARGUMENT) /* no file, but the name is taken */
            return status;
        if (existed_out != NULL)
            *existed_out = true;
        return publish_coarser(store, io, &chunk);
    }
    cg_io_temp_path(path, temp);
    if ((status = cg_store_write_temp(store, io, temp, chunk_bytes, n_bytes)) != CG_OK)
        return status;
    status = name_file(store, h, temp, path, is_alone);
    if (existed_out != NULL)
        *existed_out = status == CG_ERR_EXISTS;
    return status == CG_ERR_EXISTS ? CG_OK : status;
}

cg_status cg_store_publish_model(const cg_store *store, cg_io *io, const char *json, size_t n_bytes)
{
    char path[CG_TREE_PATH_BYTES];
    cg_status status = cg_tree_model_file_path(store->model, "model.json", path, sizeof path);
    if (status == CG_OK)
        status = cg_store_write(store, io, path, json, n_bytes, false);
    return status == CG_ERR_EXISTS ? CG_OK : status;
}

/* --- replacing --- */

/* Whether two names are of one file. A cachegenfs mount numbers the levels of a file apart: there
 * it shows by the fixed header, which has the checksums of all sections. A damaged file may be
 * shorter than that, so the inode counts, too. */
static bool are_one_file(int root_fd, const char *path, const char *other)
{
    struct stat a, b;
    uint8_t a_start[CG_CHUNK_FIXED_BYTES], b_start[CG_CHUNK_FIXED_BYTES];
    if (fstatat(root_fd, path, &a, AT_SYMLINK_NOFOLLOW) != 0 ||
        fstatat(root_fd, other, &b, AT_SYMLINK_NOFOLLOW) != 0)
        return false;
    if (cg_same_file(&a, &b))
        return true;
    return cg_file_read_start(root_fd, path, a_start, sizeof a_start, NULL) == CG_OK &&
           cg_file_read_start(root_fd, other, b_start, sizeof b_start, NULL) == CG_OK &&
           memcmp(a_start, b_start, sizeof a_start) == 0;
}

cg_status cg_store_replace_by_link(const cg_store *store, const char *from, const char *path,
                                   uint64_t copy_bytes)
{
    const cg_status status = cg_file_install(store->root_fd, from, path, true, copy_bytes);
    /* EXDEV, perhaps, which is EPERM over sshfs: a mount makes links there. */
    if ((status != CG_ERR_IO && status != CG_ERR_PERMISSION) ||
        (unlinkat(store->root_fd, path, 0) != 0 && errno != ENOENT))
        return status;
    return cg_file_install(store->root_fd, from, path, false, copy_bytes);
}

/* Gives path to the file at from, which holds a finer level of the chunk. What path had was no
 * good. */
static cg_status replace_name(const cg_store *store, cg_io *io, const cg_chunk *chunk,
                              cg_level level, const char *from, const char *path)
{
    const uint64_t level_bytes = chunk->header.level_bytes[level];
    cg_status status = cg_store_replace_by_link(store, from, path, level_bytes);
    if (status == CG_ERR_IO || status == CG_ERR_PERMISSION)
        status = cg_store_write(store, io, path, chunk->bytes, level_bytes, true);
    return status == CG_ERR_EXISTS ? CG_OK : status; /* somebody published meanwhile */
}

cg_status cg_store_replace(const cg_store *store, cg_io *io, const uint8_t *chunk_bytes,
                           size_t n_bytes, uint8_t damaged, uint8_t *replaced_out)
{
    cg_chunk chunk;
    char paths[CG_N_LEVELS][CG_TREE_PATH_BYTES];
    uint8_t levels = 0;
    unsigned finest = CG_N_LEVELS;
    cg_status status;
    *replaced_out = 0;
    if ((status = check(io, chunk_bytes, n_bytes, &chunk)) != CG_OK)
        return status;
    const cg_chunk_header *h = &chunk.header;
    for (unsigned level = h->level; level <= h->coarsest; level++) {
        if ((status = cg_tree_object_path(store->model, &h->key, (cg_level)level, &h->profile,
                                          paths[level], sizeof paths[level])) != CG_OK)
            return status;
        levels |= damaged & 1u << level;
    }
    /* A name that is good may still be of a damaged file, read only up to its own level. Such names
     * move to the new file with the others. */
    const uint8_t bad = levels;
    for (unsigned level = h->level; level <= h->coarsest; level++)
        for (unsigned other = h->level; other <= h->coarsest && (levels >> level & 1) == 0; other++)
            if ((bad >> other & 1) != 0 && are_one_file(store->root_fd, paths[level], paths[other]))
                levels |= (uint8_t)(1u << level);

    for (unsigned level = h->level; level <= h->coarsest; level++) {
        if ((levels >> level & 1) == 0)
            continue;
        if (finest == CG_N_LEVELS) {
            finest = level;
            status =
                cg_store_write(store, io, paths[level], chunk_bytes, h->level_bytes[level], true);
        } else {
            status = replace_name(store, io, &chunk, (cg_level)level, paths[finest], paths[level]);
        }
        if (status != CG_OK)
            return status;
        *replaced_out |= (uint8_t)(1u << level);
    }
    /* The write synced the directory before the other names were there. */
    return (levels & (levels - 1)) != 0 ? cg_file_sync_dir(store->root_fd, paths[finest]) : CG_OK;
}
