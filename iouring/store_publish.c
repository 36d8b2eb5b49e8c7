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

/* Coarser levels, but for those of `named`, get names of the finest's file, which is at
 * finest_path. Any that is there already stays as it is. is_new: that file is this chunk's and has
 * just come there, so that nothing needs to be looked at before linking. */
static cg_status publish_coarser(const cg_store *store, cg_io *io, const cg_chunk *chunk,
                                 const char *finest_path, bool is_new, uint8_t named)
{
    const cg_chunk_header *h = &chunk->header;
    char path[CG_TREE_PATH_BYTES];
    for (unsigned level = h->level + 1u; level <= h->coarsest; level++) {
        if ((named >> level & 1) != 0)
            continue;
        cg_status status = cg_tree_object_path(store->model, &h->key, (cg_level)level, &h->profile,
                                               path, sizeof path);
        if (status != CG_OK)
            return status;
        if (is_new)
            status = cg_file_link(store->root_fd, finest_path, path, h->level_bytes[level]);
        else if ((status = cg_store_stat(store, io, path)) == CG_ERR_NOT_FOUND)
            status = link_level(store, h, (cg_level)level, path);
        else
            status = status == CG_OK ? CG_ERR_EXISTS : status;
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

/* Gives the chunk's file, which is at temp, the name of its finest level, path; temp goes. In a
 * folder that we have just made no other names are to be expected: there temp is not removed, but
 * renamed to that of the coarsest level, a question less. A mount of cachegenfs refuses that, since
 * the name would show less. Of two who publish the chunk at that moment the finest name, a link,
 * lets one win. If the other has linked our file to the coarsest name by then, the rename does
 * nothing, and temp is left over as after a kill. A third who publishes the coarsest level alone
 * has his file replaced by this one, which is as good. CG_ERR_EXISTS: another's file has the finest
 * name. named_out: bit n: the coarser level n has its name. */
static cg_status name_file(const cg_store *store, const cg_chunk_header *h, const char *temp,
                           const char *path, bool is_alone, uint8_t *named_out)
{
    char coarsest[CG_TREE_PATH_BYTES];
    *named_out = 0;
    if (!is_alone || store->is_mount || h->coarsest == h->level ||
        cg_tree_object_path(store->model, &h->key, (cg_level)h->coarsest, &h->profile, coarsest,
                            sizeof coarsest) != CG_OK ||
        linkat(store->root_fd, temp, store->root_fd, path, 0) != 0)
        return cg_file_name(store->root_fd, temp, path);
    if (renameat(store->root_fd, temp, store->root_fd, coarsest) == 0)
        *named_out = (uint8_t)(1u << h->coarsest);
    else
        unlinkat(store->root_fd, temp, 0);
    return CG_OK;
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
    uint8_t named;
    cg_status status;
    if (existed_out != NULL)
        *existed_out = false;
    if ((status = check(io, chunk_bytes, n_bytes, &chunk)) != CG_OK)
        return status;
    const cg_chunk_header *h = &chunk.header;
    if ((status = cg_tree_object_path(store->model, &h->key, (cg_level)h->level, &h->profile, path,
                                      sizeof path)) != CG_OK)
        return status;

    /* Whether the chunk is there nobody asks here: its name tells, and a store may be a network
     * away. */
    const bool is_alone = make_folder(store, path);
    cg_io_temp_path(path, temp);
    if ((status = cg_store_write_temp(store, io, temp, chunk_bytes, n_bytes)) != CG_OK)
        return status;
    status = name_file(store, h, temp, path, is_alone, &named);
    if (status != CG_OK && status != CG_ERR_EXISTS)
        return status;
    if (existed_out != NULL)
        *existed_out = status == CG_ERR_EXISTS;
    return publish_coarser(store, io, &chunk, path, status == CG_OK, named);
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

/* Gives path to the file at from, which holds a finer level of the chunk. */
static cg_status replace_name(const cg_store *store, cg_io *io, const cg_chunk *chunk,
                              cg_level level, const char *from, const char *path)
{
    const uint64_t level_bytes = chunk->header.level_bytes[level];
    cg_status status = cg_file_install(store->root_fd, from, path, true, level_bytes);
    if (status != CG_ERR_IO)
        return status;
    /* EXDEV, perhaps: a cachegenfs mount renames no file to a name that shows a part of it, but
     * makes links there. The name goes for a moment; what it had was no good. */
    unlinkat(store->root_fd, path, 0);
    status = cg_file_link(store->root_fd, from, path, level_bytes);
    if (status != CG_OK && status != CG_ERR_EXISTS)
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
