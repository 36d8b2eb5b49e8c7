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
 */
#include "codec/cursor.h"
#include "iouring/beneath.h"
#include "iouring/file.h"
#include "iouring/same_file.h"
#include "iouring/store_internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_SMALL_FILE_BYTES = 64 << 20 };

typedef struct context {
    const cg_store *store;
    const char *name;
    const cg_store_link *links;
    size_t n_links;
    const cg_fingerprint *profile;
    cg_chunk_header *headers; /* [n_links], of the finest level linked */
    uint8_t *tokens;          /* as the file has them */
    size_t tokens_bytes;
    bool has_lossy_level;
    char *json;
    size_t json_bytes;
} context;

/* --- what is to be published --- */

static cg_status check_level(const context *c, size_t index, cg_level level, bool first)
{
    char path[CG_TREE_PATH_BYTES];
    cg_chunk_header h;
    const cg_store_link *link = &c->links[index];
    cg_chunk_header *agreed = &c->headers[index];
    cg_status status =
        cg_tree_object_path(c->store->model, &link->key, level, c->profile, path, sizeof path);
    if (status != CG_OK || (status = cg_store_chunk_header(c->store->root_fd, path, level,
                                                           &link->key, c->profile, &h)) != CG_OK)
        return status;
    if (first)
        *agreed = h;
    else if (h.n_tokens != agreed->n_tokens || h.first_position != agreed->first_position)
        return CG_ERR_FOREIGN_TOKENS;
    else if (memcmp(h.model.bytes, agreed->model.bytes, sizeof h.model.bytes) != 0)
        return CG_ERR_FOREIGN_MODEL;
    return CG_OK;
}

/* Chunk index must continue the chain, at the position where the one before ends, with these
 * tokens. */
static cg_status check_chain(const context *c, size_t index, const uint32_t *tokens,
                             size_t n_tokens)
{
    const cg_chunk_header *h = &c->headers[index];
    const cg_chunk_header *before = index == 0 ? NULL : &c->headers[index - 1];
    const uint64_t position =
        before == NULL ? 0 : (uint64_t)before->first_position + before->n_tokens;
    if (before != NULL && !cg_key_equal(&h->parent, &before->key))
        return CG_ERR_FOREIGN_TOKENS;
    if (before != NULL && memcmp(h->model.bytes, before->model.bytes, sizeof h->model.bytes) != 0)
        return CG_ERR_FOREIGN_MODEL;
    if (h->first_position != position || position + h->n_tokens > n_tokens)
        return CG_ERR_FOREIGN_TOKENS;
    /* The key is a hash of the tokens, so that it comes out the same proves that the tokens are the
     * chunk's. */
    const cg_key key = cg_key_chunk(&h->parent, &h->extra, tokens + position, h->n_tokens);
    return cg_key_equal(&key, &h->key) ? CG_OK : CG_ERR_FOREIGN_TOKENS;
}

static cg_status check_links(context *c, const uint32_t *tokens, size_t n_tokens)
{
    for (size_t i = 0; i < c->n_links; i++) {
        bool first = true;
        for (unsigned level = 0; level < CG_N_LEVELS; level++) {
            if ((c->links[i].levels >> level & 1) == 0)
                continue;
            const cg_status status = check_level(c, i, (cg_level)level, first);
            if (status != CG_OK)
                return status;
            first = false;
            c->has_lossy_level |= level != CG_L0;
        }
        /* A chunk without a level, or with one that does not exist. */
        if (first || c->links[i].levels >> CG_N_LEVELS != 0)
            return CG_ERR_INVALID_ARGUMENT;
        const cg_status status = check_chain(c, i, tokens, n_tokens);
        if (status != CG_OK)
            return status;
    }
    const cg_chunk_header *last = &c->headers[c->n_links - 1];
    return (uint64_t)last->first_position + last->n_tokens == n_tokens ? CG_OK
                                                                       : CG_ERR_FOREIGN_TOKENS;
}

/* --- context.json --- */

/* Bytes of the UTF-8 character at text; 0 if there is none. */
static size_t utf8_bytes(const unsigned char *text)
{
    static const struct {
        unsigned char mask, lead;
        unsigned least;
    } forms[] = {{0x80, 0x00, 0}, {0xe0, 0xc0, 0x80}, {0xf0, 0xe0, 0x800}, {0xf8, 0xf0, 0x10000}};
    for (size_t i = 0; i < 4; i++) {
        if ((text[0] & forms[i].mask) != forms[i].lead)
            continue;
        unsigned code = text[0] & (unsigned char)~forms[i].mask;
        for (size_t j = 1; j <= i; j++) {
            if ((text[j] & 0xc0) != 0x80)
                return 0;
            code = code << 6 | (text[j] & 0x3fu);
        }
        return code < forms[i].least || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)
                   ? 0
                   : i + 1;
    }
    return 0;
}

/* What is not UTF-8 becomes U+FFFD: JSON has no other way, and a name here only informs. */
static void print_string(FILE *out, const char *text)
{
    fputc('"', out);
    while (*text != '\0') {
        const size_t n_bytes = utf8_bytes((const unsigned char *)text);
        if (n_bytes == 0)
            fputs("\\ufffd", out);
        else if (*text == '"' || *text == '\\')
            fprintf(out, "\\%c", *text);
        else if ((unsigned char)*text < 0x20)
            fprintf(out, "\\u%04x", (unsigned)*text);
        else
            fwrite(text, 1, n_bytes, out);
        text += n_bytes == 0 ? 1 : n_bytes;
    }
    fputc('"', out);
}

static void print_hex(FILE *out, const uint8_t bytes[CG_KEY_BYTES])
{
    char hex[CG_KEY_HEX_BYTES];
    cg_key key;
    memcpy(key.bytes, bytes, sizeof key.bytes);
    cg_key_to_hex(&key, hex);
    fprintf(out, "\"%s\"", hex);
}

static void print_chunk(FILE *out, const cg_chunk_header *h, uint8_t levels)
{
    const char *separator = "";
    fputs("{\"key\":", out);
    print_hex(out, h->key.bytes);
    fprintf(out, ",\"first_position\":%u,\"n_tokens\":%u,\"levels\":[", h->first_position,
            h->n_tokens);
    for (unsigned level = 0; level < CG_N_LEVELS; level++) {
        if ((levels >> level & 1) == 0)
            continue;
        fprintf(out, "%s\"L%u\"", separator, level);
        separator = ",";
    }
    fputs("]}", out);
}

static cg_status make_json(context *c)
{
    FILE *out = open_memstream(&c->json, &c->json_bytes);
    if (out == NULL)
        return CG_ERR_NO_MEMORY;
    fputs("{\"version\":1,\n\"model\":", out);
    print_string(out, c->store->model);
    fputs(",\n\"model_fingerprint\":", out);
    print_hex(out, c->headers[0].model.bytes);
    fputs(",\n\"profile\":", out);
    if (c->has_lossy_level)
        print_hex(out, c->profile->bytes);
    else
        fputs("null", out);
    fprintf(out, ",\n\"n_tokens\":%zu,\n\"chunks\":[\n", c->tokens_bytes / 4);
    for (size_t i = 0; i < c->n_links; i++) {
        fputs(i == 0 ? "" : ",\n", out);
        print_chunk(out, &c->headers[i], c->links[i].levels);
    }
    fputs("\n]}\n", out);
    const bool failed = ferror(out) != 0;
    return fclose(out) != 0 || failed ? CG_ERR_NO_MEMORY : CG_OK;
}

/* --- what is there already --- */

typedef enum presence { ABSENT, SAME, OTHER } presence;

static presence chunk_presence(const context *c, const char *path, size_t index, cg_level level)
{
    cg_chunk_header h;
    const cg_status status =
        cg_store_chunk_header(c->store->root_fd, path, level, &c->links[index].key, c->profile, &h);
    return status == CG_OK ? SAME : status == CG_ERR_NOT_FOUND ? ABSENT : OTHER;
}

/* Equal when they are one file, or have the same bytes. */
static presence file_presence(int dir_fd, const char *path, const char *wanted)
{
    struct stat a, b;
    uint8_t *a_bytes = NULL, *b_bytes = NULL;
    size_t a_size, b_size;
    presence result = OTHER;
    if (fstatat(dir_fd, path, &a, AT_SYMLINK_NOFOLLOW) != 0)
        return errno == ENOENT ? ABSENT : OTHER;
    if (fstatat(dir_fd, wanted, &b, AT_SYMLINK_NOFOLLOW) != 0 || a.st_size != b.st_size)
        return OTHER;
    if (cg_same_file(&a, &b))
        return SAME;
    if (cg_file_read(dir_fd, path, SIZE_MAX / 2, &a_bytes, &a_size) == CG_OK &&
        cg_file_read(dir_fd, wanted, SIZE_MAX / 2, &b_bytes, &b_size) == CG_OK &&
        a_size == b_size && memcmp(a_bytes, b_bytes, a_size) == 0)
        result = SAME;
    free(a_bytes);
    free(b_bytes);
    return result;
}

/* Whether the tokens of the context that is there go on in ours. */
static bool tokens_continue(const context *c, const char *path)
{
    uint8_t *old;
    size_t old_bytes;
    const cg_status status =
        cg_file_read(c->store->root_fd, path, c->tokens_bytes, &old, &old_bytes);
    const bool continues =
        status == CG_ERR_NOT_FOUND || (status == CG_OK && memcmp(old, c->tokens, old_bytes) == 0);
    free(old);
    return continues;
}

static cg_status profile_paths(const context *c, char *installed_out, char *in_context_out)
{
    const cg_status status =
        cg_tree_profile_path(c->store->model, c->profile, installed_out, CG_TREE_PATH_BYTES);
    return status != CG_OK ? status
                           : cg_tree_context_file_path(c->store->model, c->name, "profile.cgp",
                                                       in_context_out, CG_TREE_PATH_BYTES);
}

/* Whether publishing changes a file of the context that is there, not only adds some. */
static cg_status find_conflict(const context *c, bool *conflict_out)
{
    char path[CG_TREE_PATH_BYTES], installed[CG_TREE_PATH_BYTES];
    cg_status status;
    *conflict_out = true;
    if ((status = cg_tree_context_file_path(c->store->model, c->name, "tokens", path,
                                            sizeof path)) != CG_OK)
        return status;
    if (!tokens_continue(c, path))
        return CG_OK;
    if (c->has_lossy_level) {
        if ((status = profile_paths(c, installed, path)) != CG_OK)
            return status;
        if (file_presence(c->store->root_fd, path, installed) == OTHER)
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
            if (chunk_presence(c, path, i, (cg_level)level) == OTHER)
                return CG_OK;
        }
    *conflict_out = false;
    return CG_OK;
}

static cg_status retire_json(const context *c, const char *json_path)
{
    if (unlinkat(c->store->root_fd, json_path, 0) != 0)
        return errno == ENOENT ? CG_OK : cg_status_from_errno(errno);
    return cg_file_sync_dir(c->store->root_fd, json_path);
}

/* --- installing --- */

static cg_status install_chunks(const context *c)
{
    char path[CG_TREE_PATH_BYTES], object[CG_TREE_PATH_BYTES];
    cg_chunk_header h;
    for (unsigned level = 0; level < CG_N_LEVELS; level++) {
        bool changed = false;
        for (size_t i = 0; i < c->n_links; i++) {
            cg_status status;
            if ((c->links[i].levels >> level & 1) == 0)
                continue;
            if ((status = cg_tree_object_path(c->store->model, &c->links[i].key, (cg_level)level,
                                              c->profile, object, sizeof object)) != CG_OK ||
                (status = cg_tree_context_path(c->store->model, c->name, (cg_level)level,
                                               (uint32_t)i, path, sizeof path)) != CG_OK)
                return status;
            const presence there = chunk_presence(c, path, i, (cg_level)level);
            if (there == SAME)
                continue;
            status = cg_store_chunk_header(c->store->root_fd, object, (cg_level)level,
                                           &c->links[i].key, c->profile, &h);
            if (status == CG_OK)
                status = cg_file_install(c->store->root_fd, object, path, there == OTHER,
                                         h.level_bytes[level]);
            /* Another publisher: of the same, or to lose to. */
            if (status == CG_ERR_EXISTS && chunk_presence(c, path, i, (cg_level)level) == SAME)
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

static cg_status install_profile(const context *c)
{
    char installed[CG_TREE_PATH_BYTES], in_context[CG_TREE_PATH_BYTES];
    cg_status status = profile_paths(c, installed, in_context);
    if (status != CG_OK)
        return status;
    const presence there = file_presence(c->store->root_fd, in_context, installed);
    if (there == SAME)
        return CG_OK;
    status = cg_file_install(c->store->root_fd, installed, in_context, there == OTHER, UINT64_MAX);
    return status == CG_ERR_EXISTS &&
                   file_presence(c->store->root_fd, in_context, installed) == SAME
               ? CG_OK
               : status;
}

/* A copy, not a link: unlike profiles, the model's model.json may be edited in place. */
static cg_status install_model(const context *c)
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
    status = cg_file_read(c->store->root_fd, path, MAX_SMALL_FILE_BYTES, &bytes, &n_bytes);
    if (status == CG_OK)
        status = cg_file_update(c->store->root_fd, in_context, bytes, n_bytes);
    else if (status == CG_ERR_NOT_FOUND)
        status = CG_OK; /* a model without a profile has none */
    free(bytes);
    return status;
}

static bool is_stale(const context *c, unsigned level, const char *path)
{
    cg_tree_name name;
    cg_tree_parse(path, &name);
    return name.kind == CG_TREE_CONTEXT_CHUNK &&
           (name.index >= c->n_links || (c->links[name.index].levels >> level & 1) == 0);
}

/* Whether the context.json that is there is c's; in *is_there_out, whether there is any. */
static bool json_is_ours(const context *c, const char *json_path, bool *is_there_out)
{
    uint8_t *old = NULL;
    size_t old_bytes;
    const cg_status status =
        cg_file_read(c->store->root_fd, json_path, MAX_SMALL_FILE_BYTES, &old, &old_bytes);
    const bool is_ours =
        status == CG_OK && old_bytes == c->json_bytes && memcmp(old, c->json, old_bytes) == 0;
    free(old);
    *is_there_out = status != CG_ERR_NOT_FOUND;
    return is_ours;
}

/* Removes chunk files that c's context.json, which is there, does not name. It is looked at once
 * more when there are some: others may have published the name meanwhile, and theirs are files that
 * came since. Failures only leave them there. */
static void remove_stale(const context *c, const char *json_path)
{
    char dir_path[CG_TREE_PATH_BYTES], path[CG_TREE_PATH_BYTES + CG_TREE_NAME_BYTES];
    bool is_ours = true, is_known = false;
    for (unsigned level = 0; level < CG_N_LEVELS && is_ours; level++) {
        snprintf(dir_path, sizeof dir_path, "%s/contexts/%s/L%u", c->store->model, c->name, level);
        const int fd =
            openat(c->store->root_fd, dir_path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        DIR *dir = cg_beneath_list(fd);
        if (dir == NULL)
            continue;
        for (const struct dirent *e = readdir(dir); e != NULL && is_ours; e = readdir(dir)) {
            snprintf(path, sizeof path, "%s/%s", dir_path, e->d_name);
            if (!is_stale(c, level, path))
                continue;
            bool is_there;
            if (!is_known)
                is_ours = json_is_ours(c, json_path, &is_there);
            is_known = true;
            if (is_ours)
                unlinkat(fd, e->d_name, 0);
        }
        closedir(dir);
    }
}

static cg_status publish(context *c, cg_io *io)
{
    char path[CG_TREE_PATH_BYTES], json_path[CG_TREE_PATH_BYTES];
    bool conflict, is_there;
    const int root_fd = c->store->root_fd;
    cg_status status =
        cg_tree_context_file_path(c->store->model, c->name, "context.json", json_path, sizeof path);
    if (status != CG_OK)
        return status;
    const bool same = json_is_ours(c, json_path, &is_there);
    /* Without a context.json nothing speaks of the files that are there: they may change at
     * will. */
    if (!same && is_there) {
        if ((status = find_conflict(c, &conflict)) != CG_OK)
            return status;
        if (conflict && (status = retire_json(c, json_path)) != CG_OK)
            return status;
    }
    if ((status = install_chunks(c)) != CG_OK || (status = install_model(c)) != CG_OK)
        return status;
    if (c->has_lossy_level && (status = install_profile(c)) != CG_OK)
        return status;
    if ((status = cg_tree_context_file_path(c->store->model, c->name, "tokens", path,
                                            sizeof path)) != CG_OK ||
        (status = cg_file_update(root_fd, path, c->tokens, c->tokens_bytes)) != CG_OK)
        return status;
    /* The folder first: it holds names that cg_file_install() has not synced. A context.json that
     * is on disk names files that are. */
    if (!same &&
        ((status = cg_file_sync_dir(root_fd, json_path)) != CG_OK ||
         (status = cg_store_write(c->store, io, json_path, c->json, c->json_bytes, true)) != CG_OK))
        return status;
    remove_stale(c, json_path);
    return CG_OK;
}

cg_status cg_store_context_publish(const cg_store *store, cg_io *io, const char *name,
                                   const cg_store_link *links, size_t n_links,
                                   const cg_fingerprint *profile, const uint32_t *tokens,
                                   size_t n_tokens)
{
    context c = {
        .store = store, .name = name, .links = links, .n_links = n_links, .profile = profile};
    cg_status status = CG_ERR_NO_MEMORY;
    if (!cg_tree_name_is_valid(name) || n_links == 0 || n_links > CG_TREE_MAX_CHUNKS ||
        cg_io_n_under_way(io) > 0 || !cg_size_mul(n_tokens, 4, &c.tokens_bytes))
        return CG_ERR_INVALID_ARGUMENT;
    c.headers = calloc(n_links, sizeof *c.headers);
    c.tokens = malloc(c.tokens_bytes + 1);
    if (c.headers == NULL || c.tokens == NULL)
        goto done;
    for (size_t i = 0; i < n_tokens; i++)
        cg_put_le(c.tokens + 4 * i, 4, tokens[i]);
    if ((status = check_links(&c, tokens, n_tokens)) != CG_OK || (status = make_json(&c)) != CG_OK)
        goto done;
    status = publish(&c, io);
done:
    free(c.json);
    free(c.tokens);
    free(c.headers);
    return status;
}
