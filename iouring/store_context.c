/* Contexts: the directories contexts/<name>.
 *
 * A context is there when its context.json is. Everything else is installed first, in place, and
 * durably; the JSON comes last, by rename. When a file that the present context.json speaks of
 * would have to change, that context.json is removed first: at no moment does it name files of
 * another context. (A context that only grows keeps its own.)
 *
 * Two that publish one name at once can't be told apart by what lies in the folder. Who meets a
 * file of the other's gives up, and who finds the other's context.json removes nothing. That leaves
 * gaps, so callers on a host take turns (connector/writer.c).
 *
 * A conversation's context grows by a few chunks a turn, and the store may be a network away. So
 * what a context.json that is there says of chunks is believed: those that it names with the same
 * levels are asked for no more, only one listing of each level's folder tells whether their names
 * are still there. What is wrong inside a file is for readers and fsck to find.
 */
#include "codec/cursor.h"
#include "iouring/context_state.h"
#include "iouring/file.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* --- what is to be published --- */

static cg_status object_header(const cg_context *c, size_t index, cg_level level,
                               cg_chunk_header *header_out)
{
    char path[CG_TREE_PATH_BYTES];
    const cg_key *key = &c->links[index].key;
    const cg_status status =
        cg_tree_object_path(c->store->model, key, level, c->profile, path, sizeof path);
    return status == CG_OK
               ? cg_store_chunk_header(c->store->root_fd, path, level, key, c->profile, header_out)
               : status;
}

/* Finds the files of a chunk's levels. A nested one is asked once. */
static cg_status find_sources(const cg_context *c, size_t index)
{
    cg_chunk_header *agreed = &c->headers[index], h;
    cg_context_source *before = NULL;
    for (unsigned level = 0; level < CG_N_LEVELS; level++) {
        cg_context_source *s = &c->sources[index][level];
        if ((c->links[index].levels >> level & 1) == 0)
            continue;
        if (before != NULL && cg_chunk_holds(&h, level)) {
            *s = (cg_context_source){.from = before->from, .bytes = h.level_bytes[level]};
            continue;
        }
        const cg_status status = object_header(c, index, (cg_level)level, &h);
        if (status != CG_OK)
            return status;
        *s = (cg_context_source){.from = (cg_level)level, .bytes = h.level_bytes[level]};
        if (before == NULL)
            *agreed = h;
        else if (h.n_tokens != agreed->n_tokens || h.first_position != agreed->first_position)
            return CG_ERR_FOREIGN_TOKENS;
        else if (memcmp(h.model.bytes, agreed->model.bytes, sizeof h.model.bytes) != 0)
            return CG_ERR_FOREIGN_MODEL;
        before = s;
    }
    return CG_OK;
}

/* Chunk index must continue the chain, at the position where the one before ends, with these
 * tokens. */
static cg_status check_chain(const cg_context *c, size_t index, const uint32_t *tokens,
                             size_t n_tokens)
{
    const cg_chunk_header *h = &c->headers[index];
    const cg_chunk_header *before = index == 0 ? NULL : &c->headers[index - 1];
    const uint64_t position =
        before == NULL ? 0 : (uint64_t)before->first_position + before->n_tokens;
    if (before != NULL && !c->kept[index] && !cg_key_equal(&h->parent, &before->key))
        return CG_ERR_FOREIGN_TOKENS;
    if (before != NULL && memcmp(h->model.bytes, before->model.bytes, sizeof h->model.bytes) != 0)
        return CG_ERR_FOREIGN_MODEL;
    if (h->first_position != position || position + h->n_tokens > n_tokens)
        return CG_ERR_FOREIGN_TOKENS;
    if (c->kept[index]) /* the tokens that are there are ours, too */
        return CG_OK;
    /* The key is a hash of the tokens, so that it comes out the same proves that the tokens are the
     * chunk's. */
    const cg_key key = cg_key_chunk(&h->parent, &h->extra, tokens + position, h->n_tokens);
    return cg_key_equal(&key, &h->key) ? CG_OK : CG_ERR_FOREIGN_TOKENS;
}

static cg_status check_links(const cg_context *c, const uint32_t *tokens, size_t n_tokens)
{
    for (size_t i = 0; i < c->n_links; i++) {
        cg_status status = c->kept[i] ? CG_OK : find_sources(c, i);
        if (status == CG_OK)
            status = check_chain(c, i, tokens, n_tokens);
        if (status != CG_OK)
            return status;
    }
    const cg_chunk_header *last = &c->headers[c->n_links - 1];
    return (uint64_t)last->first_position + last->n_tokens == n_tokens ? CG_OK
                                                                       : CG_ERR_FOREIGN_TOKENS;
}

/* --- installing --- */

static cg_status install_chunk(const cg_context *c, size_t index, cg_level level, const char *path,
                               bool replace)
{
    char object[CG_TREE_PATH_BYTES];
    cg_chunk_header h;
    cg_context_source *s = &c->sources[index][level];
    cg_status status = CG_OK;
    if (s->bytes == 0 && (status = object_header(c, index, level, &h)) == CG_OK)
        *s = (cg_context_source){.from = level, .bytes = h.level_bytes[level]};
    if (status == CG_OK)
        status = cg_tree_object_path(c->store->model, &c->links[index].key, s->from, c->profile,
                                     object, sizeof object);
    if (status != CG_OK)
        return status;
    if (c->sources[index][s->from].is_synced && !replace) {
        status = cg_file_link(c->store->root_fd, object, path, s->bytes);
        if (status != CG_ERR_NOT_FOUND) /* else the folder is missing, perhaps */
            return status;
    }
    status = replace ? cg_store_replace_by_link(c->store, object, path, s->bytes)
                     : cg_file_install(c->store->root_fd, object, path, false, s->bytes);
    s->is_synced = status == CG_OK;
    return status;
}

static cg_status install_chunks(const cg_context *c)
{
    char path[CG_TREE_PATH_BYTES];
    for (unsigned level = 0; level < CG_N_LEVELS; level++) {
        bool changed = false;
        for (size_t i = 0; i < c->n_links; i++) {
            if ((c->links[i].levels >> level & 1) == 0)
                continue;
            cg_status status = cg_tree_context_path(c->store->model, c->name, (cg_level)level,
                                                    (uint32_t)i, path, sizeof path);
            if (status != CG_OK)
                return status;
            const cg_presence there = cg_context_known_presence(c, path, i, (cg_level)level);
            if (there == CG_SAME)
                continue;
            status = install_chunk(c, i, (cg_level)level, path, there == CG_OTHER);
            /* Another publisher: of the same, or to lose to. */
            if (status == CG_ERR_EXISTS &&
                cg_context_chunk_presence(c, path, i, (cg_level)level) == CG_SAME)
                status = CG_OK;
            if (status != CG_OK)
                return status;
            changed = true;
        }
        if (changed) {
            const cg_status status = cg_file_sync_dir(c->store->root_fd, path);
            if (status != CG_OK)
                return status;
        }
    }
    return CG_OK;
}

static cg_status install_profile(const cg_context *c)
{
    char installed[CG_TREE_PATH_BYTES], in_context[CG_TREE_PATH_BYTES];
    cg_status status = cg_context_profile_paths(c, installed, in_context);
    if (status != CG_OK)
        return status;
    const cg_presence there = cg_context_profile_presence(c, in_context, installed);
    if (there == CG_SAME)
        return CG_OK;
    status =
        cg_file_install(c->store->root_fd, installed, in_context, there == CG_OTHER, UINT64_MAX);
    return status == CG_ERR_EXISTS &&
                   cg_context_file_presence(c->store->root_fd, in_context, installed) == CG_SAME
               ? CG_OK
               : status;
}

/* A copy, not a link: unlike profiles, the model's model.json may be edited in place. */
static cg_status install_model(const cg_context *c)
{
    char path[CG_TREE_PATH_BYTES], in_context[CG_TREE_PATH_BYTES];
    uint8_t *bytes = NULL;
    size_t n_bytes;
    cg_status status =
        cg_tree_context_file_path(c->store->model, c->name, "model.json", in_context, sizeof path);
    if (status == CG_OK)
        status = cg_tree_model_file_path(c->store->model, "model.json", path, sizeof path);
    if (status != CG_OK)
        return status;
    status = cg_file_read(c->store->root_fd, path, CG_TREE_MOST_TEXT_BYTES, &bytes, &n_bytes);
    if (status == CG_OK)
        status = cg_file_update(c->store->root_fd, in_context, bytes, n_bytes);
    else if (status == CG_ERR_NOT_FOUND)
        status = CG_OK; /* a model without a profile has none */
    free(bytes);
    return status;
}

static cg_status retire_json(const cg_context *c, const char *json_path)
{
    if (unlinkat(c->store->root_fd, json_path, 0) != 0)
        return errno == ENOENT ? CG_OK : cg_status_from_errno(errno);
    return cg_file_sync_dir(c->store->root_fd, json_path);
}

typedef struct removal {
    const cg_context *c;
    unsigned level;
    bool is_ours; /* as far as it is known */
    bool is_known;
} removal;

static bool remove_if_stale(void *user, int dir_fd, const char *leaf, uint32_t index)
{
    removal *r = user;
    const cg_context *c = r->c;
    if (index < c->n_links && (c->links[index].levels >> r->level & 1) != 0)
        return true;
    if (!r->is_known)
        r->is_ours = cg_context_json_is(c, c->json);
    r->is_known = true;
    if (r->is_ours)
        unlinkat(dir_fd, leaf, 0);
    return r->is_ours;
}

/* Removes chunk files that c's context.json, which is there, does not name. It is looked at once
 * more when there are some: others may have published the name meanwhile, and theirs are files that
 * came since. Failures only leave them there. */
static void remove_stale(const cg_context *c)
{
    removal r = {.c = c, .is_ours = true};
    for (; r.level < CG_N_LEVELS && r.is_ours; r.level++)
        cg_context_list_chunks(c, r.level, remove_if_stale, &r);
}

static cg_status publish(cg_context *c, cg_io *io)
{
    char path[CG_TREE_PATH_BYTES], json_path[CG_TREE_PATH_BYTES];
    bool conflict = false;
    const int root_fd = c->store->root_fd;
    cg_status status =
        cg_tree_context_file_path(c->store->model, c->name, "context.json", json_path, sizeof path);
    if (status != CG_OK)
        return status;
    const bool same = c->old_json != NULL && strcmp(c->old_json, c->json) == 0;
    /* Without a context.json nothing speaks of the files that are there: they may change at
     * will. */
    if (!same && c->has_old_json) {
        if ((status = cg_context_find_conflict(c, &conflict)) != CG_OK)
            return status;
        conflict |= c->old_json == NULL; /* it tells nobody anything */
        if (conflict && (status = retire_json(c, json_path)) != CG_OK)
            return status;
    }
    if ((status = install_chunks(c)) != CG_OK || (status = install_model(c)) != CG_OK)
        return status;
    if (c->has_lossy_level && (status = install_profile(c)) != CG_OK)
        return status;
    if ((status = cg_tree_context_file_path(c->store->model, c->name, "tokens", path,
                                            sizeof path)) != CG_OK ||
        (!c->tokens_are_same &&
         (status = cg_file_write(root_fd, path, c->tokens, c->tokens_bytes, true)) != CG_OK))
        return status;
    /* Of what was there some was believed since it was looked at. Meanwhile another host may have
     * published the name, and then the files are of its context. */
    if (!same && !cg_context_json_is(c, conflict ? NULL : c->old_json) &&
        !cg_context_json_is(c, c->json))
        return CG_ERR_EXISTS;
    /* The folder first: it holds names that cg_file_install() has not synced. A context.json that
     * is on disk names files that are. */
    if (!same &&
        ((status = cg_file_sync_dir(root_fd, json_path)) != CG_OK ||
         (status = cg_store_write(c->store, io, json_path, c->json, c->json_bytes, true)) != CG_OK))
        return status;
    remove_stale(c);
    return CG_OK;
}

/* A link has levels, and none that does not exist. */
static bool take_levels(cg_context *c)
{
    bool are_valid = true;
    for (size_t i = 0; i < c->n_links; i++) {
        are_valid = are_valid && c->links[i].levels != 0 && c->links[i].levels >> CG_N_LEVELS == 0;
        c->has_lossy_level |= c->links[i].levels >> CG_L1 != 0;
    }
    return are_valid;
}

cg_status cg_store_context_publish(const cg_store *store, cg_io *io, const char *name,
                                   const cg_store_link *links, size_t n_links,
                                   const cg_fingerprint *profile, const uint32_t *tokens,
                                   size_t n_tokens)
{
    cg_context c = {
        .store = store, .name = name, .links = links, .n_links = n_links, .profile = profile};
    cg_status status = CG_ERR_NO_MEMORY;
    if (!cg_tree_name_is_valid(name) || n_links == 0 || n_links > CG_TREE_MAX_CHUNKS ||
        cg_io_n_under_way(io) > 0 || !cg_size_mul(n_tokens, 4, &c.tokens_bytes) || !take_levels(&c))
        return CG_ERR_INVALID_ARGUMENT;
    c.headers = calloc(n_links, sizeof *c.headers);
    c.sources = calloc(n_links, sizeof *c.sources);
    c.kept = calloc(n_links, sizeof *c.kept);
    c.there = calloc(n_links, sizeof *c.there);
    c.tokens = malloc(c.tokens_bytes + 1);
    if (c.headers == NULL || c.sources == NULL || c.kept == NULL || c.there == NULL ||
        c.tokens == NULL)
        goto done;
    for (size_t i = 0; i < n_tokens; i++)
        cg_put_le(c.tokens + 4 * i, 4, tokens[i]);
    if ((status = cg_context_look_at_old(&c)) != CG_OK)
        goto done;
    status = check_links(&c, tokens, n_tokens);
    if (status != CG_OK && c.is_listed) { /* it may be wrong */
        cg_context_forget_old(&c);
        status = check_links(&c, tokens, n_tokens);
    }
    if (status != CG_OK || (status = cg_context_make_json(&c)) != CG_OK)
        goto done;
    status = publish(&c, io);
done:
    free(c.old_json);
    free(c.json);
    free(c.tokens);
    free(c.there);
    free(c.kept);
    free(c.sources);
    free(c.headers);
    return status;
}
