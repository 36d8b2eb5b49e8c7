/* Publishing: a chunk, its tokens, and names of its coarser levels. */
#include "iouring/file.h"
#include "iouring/store_internal.h"

#include <stdlib.h>

static cg_status publish_tokens(const cg_store *store, cg_io *io, const cg_chunk *chunk,
                                const char *object_path)
{
    char path[CG_TREE_PATH_BYTES];
    const size_t n_tokens = chunk->header.n_tokens;
    uint32_t *tokens = malloc(n_tokens * sizeof *tokens);
    uint8_t *bytes = malloc(n_tokens * 4);
    cg_status status = CG_ERR_NO_MEMORY;
    if (tokens == NULL || bytes == NULL)
        goto done;
    if ((status = cg_store_sibling_path(object_path, "tokens", path)) != CG_OK ||
        (status = cg_chunk_tokens(chunk, tokens)) != CG_OK)
        goto done;
    cg_store_put_tokens(tokens, n_tokens, bytes);
    status = cg_store_write(store, io, path, bytes, n_tokens * 4, false);
    if (status == CG_ERR_EXISTS)
        status = CG_OK; /* of another level: the key says that they are the same */
done:
    free(tokens);
    free(bytes);
    return status;
}

/* Makes path another name of the file that stands under a finer level's and holds this one, too:
 * where this chunk's own was there before, of another's. CG_ERR_NOT_FOUND: no finer name is of such
 * a file. */
static cg_status link_level(const cg_store *store, const cg_chunk_header *h, cg_level level,
                            const char *path)
{
    char from[CG_TREE_PATH_BYTES];
    cg_chunk_header there;
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

/* Coarser levels get names of the finest's file, which is at finest_path. Any that is there already
 * stays as it is. is_new: that file is this chunk's and has just come there, so that nothing needs
 * to be looked at before linking. */
static cg_status publish_coarser(const cg_store *store, cg_io *io, const cg_chunk *chunk,
                                 const char *finest_path, bool is_new)
{
    const cg_chunk_header *h = &chunk->header;
    char path[CG_TREE_PATH_BYTES];
    bool linked = false;
    for (unsigned level = h->level + 1u; level <= h->coarsest; level++) {
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
        linked = linked || status == CG_OK;
    }
    return linked ? cg_file_sync_dir(store->root_fd, path) : CG_OK;
}

cg_status cg_store_publish(const cg_store *store, cg_io *io, const uint8_t *chunk_bytes,
                           size_t n_bytes, bool *existed_out)
{
    cg_chunk chunk;
    char path[CG_TREE_PATH_BYTES];
    cg_status status;
    if (existed_out != NULL)
        *existed_out = false;
    if (cg_io_n_under_way(io) > 0)
        return CG_ERR_INVALID_ARGUMENT;
    if ((status = cg_chunk_verify(chunk_bytes, n_bytes)) != CG_OK ||
        (status = cg_chunk_open(chunk_bytes, n_bytes, &chunk)) != CG_OK)
        return status;
    const cg_chunk_header *h = &chunk.header;
    if ((status = cg_tree_object_path(store->model, &h->key, (cg_level)h->level, &h->profile, path,
                                      sizeof path)) != CG_OK)
        return status;

    /* Tokens first: where a chunk is, they are. Whether the chunk is there nobody asks here: its
     * write does, and a store may be a network away. */
    if ((status = publish_tokens(store, io, &chunk, path)) != CG_OK)
        return status;
    status = cg_store_write(store, io, path, chunk_bytes, n_bytes, false);
    if (status != CG_OK && status != CG_ERR_EXISTS)
        return status;
    if (existed_out != NULL)
        *existed_out = status == CG_ERR_EXISTS;
    return publish_coarser(store, io, &chunk, path, status == CG_OK);
}
