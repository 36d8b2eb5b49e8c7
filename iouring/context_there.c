/* What the folder of a context has already, and whether that is what is to be published. */
#include "iouring/beneath.h"
#include "iouring/context_state.h"
#include "iouring/file.h"
#include "iouring/same_file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

cg_presence cg_context_chunk_presence(const cg_context *c, const char *path, size_t index,
                                      cg_level level)
{
    cg_chunk_header h;
    const cg_status status =
        cg_store_chunk_header(c->store->root_fd, path, level, &c->links[index].key, c->profile, &h);
    return status == CG_OK ? CG_SAME : status == CG_ERR_NOT_FOUND ? CG_ABSENT : CG_OTHER;
}

cg_presence cg_context_known_presence(const cg_context *c, const char *path, size_t index,
                                      cg_level level)
{
    if (c->is_listed && (c->there[index] >> level & 1) == 0)
        return CG_ABSENT;
    /* What is kept need not be read: context.json says the same of it, and each header would be
     * questions to a store that may be far. */
    return c->is_listed && c->kept[index] ? CG_SAME
                                          : cg_context_chunk_presence(c, path, index, level);
}

cg_presence cg_context_file_presence(int dir_fd, const char *path, const char *wanted)
{
    struct stat a, b;
    uint8_t *a_bytes = NULL, *b_bytes = NULL;
    size_t a_size, b_size;
    cg_presence result = CG_OTHER;
    if (fstatat(dir_fd, path, &a, AT_SYMLINK_NOFOLLOW) != 0)
        return errno == ENOENT ? CG_ABSENT : CG_OTHER;
    if (fstatat(dir_fd, wanted, &b, AT_SYMLINK_NOFOLLOW) != 0 || a.st_size != b.st_size)
        return CG_OTHER;
    if (cg_same_file(&a, &b))
        return CG_SAME;
    if (cg_file_read(dir_fd, path, SIZE_MAX / 2, &a_bytes, &a_size) == CG_OK &&
        cg_file_read(dir_fd, wanted, SIZE_MAX / 2, &b_bytes, &b_size) == CG_OK &&
        a_size == b_size && memcmp(a_bytes, b_bytes, a_size) == 0)
        result = CG_SAME;
    free(a_bytes);
    free(b_bytes);
    return result;
}

cg_status cg_context_profile_paths(const cg_context *c, char *installed_out, char *in_context_out)
{
    const cg_status status =
        cg_tree_profile_path(c->store->model, c->profile, installed_out, CG_TREE_PATH_BYTES);
    return status != CG_OK ? status
                           : cg_tree_context_file_path(c->store->model, c->name, "profile.cgp",
                                                       in_context_out, CG_TREE_PATH_BYTES);
}

cg_presence cg_context_profile_presence(const cg_context *c, const char *in_context,
                                        const char *installed)
{
    struct stat s;
    if (c->keeps_profile && fstatat(c->store->root_fd, in_context, &s, AT_SYMLINK_NOFOLLOW) == 0)
        return CG_SAME;
    return cg_context_file_presence(c->store->root_fd, in_context, installed);
}

cg_status cg_context_find_conflict(const cg_context *c, bool *conflict_out)
{
    char path[CG_TREE_PATH_BYTES], installed[CG_TREE_PATH_BYTES];
    cg_status status;
    *conflict_out = true;
    if (!c->tokens_continue)
        return CG_OK;
    if (c->has_lossy_level) {
        if ((status = cg_context_profile_paths(c, installed, path)) != CG_OK)
            return status;
        if (cg_context_profile_presence(c, path, installed) == CG_OTHER)
            return CG_OK;
    }
    for (size_t i = 0; i < c->n_links; i++)
        for (unsigned level = 0; level < CG_N_LEVELS; level++) {
            if ((c->links[i].levels >> level & 1) == 0)
                continue;
            status = cg_tree_context_path(c->store->model, c->name, (cg_level)level, (uint32_t)i,
                                          path, sizeof path);
            if (status != CG_OK)
                return status;
            if (cg_context_known_presence(c, path, i, (cg_level)level) == CG_OTHER)
                return CG_OK;
        }
    *conflict_out = false;
    return CG_OK;
}

void cg_context_list_chunks(const cg_context *c, unsigned level,
                            bool (*visit)(void *user, int dir_fd, const char *leaf, uint32_t index),
                            void *user)
{
    char dir_path[CG_TREE_PATH_BYTES], path[CG_TREE_PATH_BYTES + CG_TREE_NAME_BYTES];
    bool goes_on = true;
    snprintf(dir_path, sizeof dir_path, "%s/contexts/%s/L%u", c->store->model, c->name, level);
    const int fd =
        openat(c->store->root_fd, dir_path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *dir = cg_beneath_list(fd);
    if (dir == NULL)
        return;
    for (const struct dirent *e = readdir(dir); e != NULL && goes_on; e = readdir(dir)) {
        cg_tree_name name;
        snprintf(path, sizeof path, "%s/%s", dir_path, e->d_name);
        cg_tree_parse(path, &name);
        if (name.kind == CG_TREE_CONTEXT_CHUNK)
            goes_on = visit(user, fd, e->d_name, name.index);
    }
    closedir(dir);
}

typedef struct listing {
    const cg_context *c;
    unsigned level;
} listing;

static bool note_there(void *user, int dir_fd, const char *leaf, uint32_t index)
{
    const listing *l = user;
    (void)dir_fd;
    (void)leaf;
    if (index < l->c->n_links)
        l->c->there[index] |= (uint8_t)(1u << l->level);
    return true;
}

void cg_context_forget_old(cg_context *c)
{
    memset(c->kept, 0, c->n_links * sizeof *c->kept);
    c->keeps_profile = false;
}

cg_status cg_context_look_at_old(cg_context *c)
{
    char path[CG_TREE_PATH_BYTES];
    uint8_t *old = NULL;
    size_t old_bytes;
    cg_status status =
        cg_tree_context_file_path(c->store->model, c->name, "context.json", path, sizeof path);
    if (status != CG_OK)
        return status;
    status = cg_file_read(c->store->root_fd, path, CG_TREE_MOST_TEXT_BYTES, &old, &old_bytes);
    c->has_old_json = status != CG_ERR_NOT_FOUND;
    if (status == CG_OK && memchr(old, 0, old_bytes) == NULL)
        c->old_json = strndup((const char *)old, old_bytes);
    free(old);
    old = NULL;
    if ((status = cg_tree_context_file_path(c->store->model, c->name, "tokens", path,
                                            sizeof path)) != CG_OK)
        return status;
    status = cg_file_read(c->store->root_fd, path, c->tokens_bytes, &old, &old_bytes);
    const bool is_start = status == CG_OK && memcmp(old, c->tokens, old_bytes) == 0;
    c->tokens_continue = is_start || status == CG_ERR_NOT_FOUND;
    c->tokens_are_same = is_start && old_bytes == c->tokens_bytes;
    c->n_old_tokens = is_start ? old_bytes / 4 : 0;
    free(old);
    c->is_listed = cg_context_keep_chunks(c);
    for (unsigned level = 0; level < CG_N_LEVELS && c->is_listed; level++)
        cg_context_list_chunks(c, level, note_there, &(listing){c, level});
    return CG_OK;
}

bool cg_context_json_is(const cg_context *c, const char *json)
{
    char path[CG_TREE_PATH_BYTES];
    uint8_t *now = NULL;
    size_t n_bytes;
    cg_status status =
        cg_tree_context_file_path(c->store->model, c->name, "context.json", path, sizeof path);
    if (status == CG_OK)
        status = cg_file_read(c->store->root_fd, path, CG_TREE_MOST_TEXT_BYTES, &now, &n_bytes);
    const bool is_it = json == NULL ? status == CG_ERR_NOT_FOUND
                                    : status == CG_OK && n_bytes == strlen(json) &&
                                          memcmp(now, json, n_bytes) == 0;
    free(now);
    return is_it;
}
