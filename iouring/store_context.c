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
#include "iouring/beneath.h"
#include "iouring/file.h"
#include "iouring/same_file.h"
#include "iouring/store_internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_SMALL_FILE_BYTES = 64 << 20 };

/* Which name among the objects a level is linked from: the finest that is of its file. */
typedef struct source {
    cg_level from;
    uint64_t bytes; /* that the level needs of it; 0: it is not known yet */
    bool is_synced; /* the file is on disk, as the name `from` of this context told */
} source;

typedef struct context {
    const cg_store *store;
    const char *name;
    const cg_store_link *links;
    size_t n_links;
    const cg_fingerprint *profile;
    cg_chunk_header *headers; /* [n_links], of the finest level linked. Of a chunk that is kept only
                                 what context.json says: model, key, first_position, n_tokens */
    source (*sources)[CG_N_LEVELS]; /* [n_links] */
    uint8_t *tokens;                /* as the file has them */
    size_t tokens_bytes;
    bool has_lossy_level;
    char *json;
    size_t json_bytes;
    /* Of the context that is there: */
    char *old_json; /* NULL: none, or it cannot be read */
    bool has_old_json;
    bool tokens_continue, tokens_are_same; /* its tokens go on in ours, or are ours */
    uint64_t n_old_tokens;                 /* which ours begin with */
    bool keeps_profile;                    /* its context.json speaks of the same */
    bool is_listed;                        /* there[] is known */
    bool *kept;                            /* [n_links]: its context.json says the same of it */
    uint8_t *there;                        /* [n_links]: levels whose names it has */
} context;

/* --- what is to be published --- */

static cg_status object_header(const context *c, size_t index, cg_level level,
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
static cg_status find_sources(const context *c, size_t index)
{
    cg_chunk_header *agreed = &c->headers[index], h;
    source *before = NULL;
    for (unsigned level = 0; level < CG_N_LEVELS; level++) {
        source *s = &c->sources[index][level];
        if ((c->links[index].levels >> level & 1) == 0)
            continue;
        if (before != NULL && cg_chunk_holds(&h, level)) {
            *s = (source){.from = before->from, .bytes = h.level_bytes[level]};
            continue;
        }
        const cg_status status = object_header(c, index, (cg_level)level, &h);
        if (status != CG_OK)
            return status;
        *s = (source){.from = (cg_level)level, .bytes = h.level_bytes[level]};
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
static cg_status check_chain(const context *c, size_t index, const uint32_t *tokens,
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

static cg_status check_links(const context *c, const uint32_t *tokens, size_t n_tokens)
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

/* What does not change while a context grows. */
static void print_head(FILE *out, const context *c, const cg_fingerprint *model)
{
    fputs("{\"version\":1,\n\"model\":", out);
    print_string(out, c->store->model);
    fputs(",\n\"model_fingerprint\":", out);
    print_hex(out, model->bytes);
    fputs(",\n\"profile\":", out);
    if (c->has_lossy_level)
        print_hex(out, c->profile->bytes);
    else
        fputs("null", out);
    fputs(",\n\"n_tokens\":", out);
}

static cg_status make_json(context *c)
{
    FILE *out = open_memstream(&c->json, &c->json_bytes);
    if (out == NULL)
        return CG_ERR_NO_MEMORY;
    print_head(out, c, &c->headers[0].model);
    fprintf(out, "%zu,\n\"chunks\":[\n", c->tokens_bytes / 4);
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

/* The same, without a question where what is there is known. */
static presence known_presence(const context *c, const char *path, size_t index, cg_level level)
{
    if (c->is_listed && (c->there[index] >> level & 1) == 0)
        return ABSENT;
    return c->is_listed && c->kept[index] ? SAME : chunk_presence(c, path, index, level);
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

static cg_status profile_paths(const context *c, char *installed_out, char *in_context_out)
{
    const cg_status status =
        cg_tree_profile_path(c->store->model, c->profile, installed_out, CG_TREE_PATH_BYTES);
    return status != CG_OK ? status
                           : cg_tree_context_file_path(c->store->model, c->name, "profile.cgp",
                                                       in_context_out, CG_TREE_PATH_BYTES);
}

/* A profile of many MiB is not read, twice over a network, to see that it is what context.json
 * says. */
static presence profile_presence(const context *c, const char *in_context, const char *installed)
{
    struct stat s;
    if (c->keeps_profile && fstatat(c->store->root_fd, in_context, &s, AT_SYMLINK_NOFOLLOW) == 0)
        return SAME;
    return file_presence(c->store->root_fd, in_context, installed);
}

/* Whether publishing changes a file of the context that is there, not only adds some. */
static cg_status find_conflict(const context *c, bool *conflict_out)
{
    char path[CG_TREE_PATH_BYTES], installed[CG_TREE_PATH_BYTES];
    cg_status status;
    *conflict_out = true;
    if (!c->tokens_continue)
        return CG_OK;
    if (c->has_lossy_level) {
        if ((status = profile_paths(c, installed, path)) != CG_OK)
            return status;
        if (profile_presence(c, path, installed) == OTHER)
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
            if (known_presence(c, path, i, (cg_level)level) == OTHER)
                return CG_OK;
        }
    *conflict_out = false;
    return CG_OK;
}

/* Visits the files of chunks that the context's folder of this level has. */
static void list_chunks(const context *c, unsigned level,
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
    const context *c;
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

/* Whether the line, which lacks its comma, is what our context.json will say of the chunk. */
static bool is_same_line(const context *c, size_t index, const char *line, size_t n_bytes)
{
    char *want = NULL;
    size_t want_bytes = 0;
    FILE *out = open_memstream(&want, &want_bytes);
    if (out == NULL)
        return false;
    print_chunk(out, &c->headers[index], c->links[index].levels);
    const bool is_same =
        fclose(out) == 0 && want_bytes == n_bytes && memcmp(want, line, n_bytes) == 0;
    free(want);
    return is_same;
}

/* Where the chunks begin in the context.json that is there, if it is of our model and profile;
 * else NULL. */
static char *find_chunks(const context *c, cg_fingerprint *model_out)
{
    static const char before[] = "\"model_fingerprint\":\"", chunks[] = "\"chunks\":[\n";
    char *want = NULL;
    size_t want_bytes = 0;
    cg_key model;
    char *at = c->old_json != NULL ? strstr(c->old_json, before) : NULL;
    if (at == NULL || !cg_key_from_hex(at + strlen(before), &model))
        return NULL;
    memcpy(model_out->bytes, model.bytes, sizeof model_out->bytes);
    FILE *out = open_memstream(&want, &want_bytes);
    if (out == NULL)
        return NULL;
    print_head(out, c, model_out);
    const bool is_same = fclose(out) == 0 && strncmp(c->old_json, want, want_bytes) == 0;
    free(want);
    at = is_same ? strstr(c->old_json, chunks) : NULL;
    return at != NULL ? at + strlen(chunks) : NULL;
}

/* Which chunks the context.json that is there names as ours will: then their headers are made of
 * what it says. */
static void keep_chunks(context *c)
{
    cg_fingerprint model;
    char *line = find_chunks(c, &model);
    bool keeps_some = false;
    c->keeps_profile = line != NULL && c->has_lossy_level;
    for (size_t i = 0; line != NULL && *line == '{' && i < c->n_links; i++) {
        char *end = strchr(line, '\n');
        cg_chunk_header *h = &c->headers[i];
        if (end == NULL)
            break;
        *h = (cg_chunk_header){.key = c->links[i].key, .model = model};
        *end = '\0'; /* for a moment: sscanf() looks for the end of the text each time */
        if (sscanf(line,
                   "{\"key\":\"%*32[0-9a-f]\",\"first_position\":%" SCNu32 ",\"n_tokens\":%" SCNu32
                   ",",
                   &h->first_position, &h->n_tokens) == 2)
            c->kept[i] = (uint64_t)h->first_position + h->n_tokens <= c->n_old_tokens &&
                         is_same_line(c, i, line, (size_t)(end - line) - (end[-1] == ','));
        keeps_some = keeps_some || c->kept[i];
        *end = '\n';
        line = end + 1;
    }
    for (unsigned level = 0; level < CG_N_LEVELS && keeps_some; level++)
        list_chunks(c, level, note_there, &(listing){c, level});
    c->is_listed = keeps_some;
}

/* What the context.json that is there says is not believed, after all. */
static void forget_old(context *c)
{
    memset(c->kept, 0, c->n_links * sizeof *c->kept);
    c->keeps_profile = false;
}

/* What of the context that is there need not be asked for. */
static cg_status look_at_old(context *c)
{
    char path[CG_TREE_PATH_BYTES];
    uint8_t *old = NULL;
    size_t old_bytes;
    cg_status status =
        cg_tree_context_file_path(c->store->model, c->name, "context.json", path, sizeof path);
    if (status != CG_OK)
        return status;
    status = cg_file_read(c->store->root_fd, path, MAX_SMALL_FILE_BYTES, &old, &old_bytes);
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
    keep_chunks(c);
    return CG_OK;
}

static cg_status retire_json(const context *c, const char *json_path)
{
    if (unlinkat(c->store->root_fd, json_path, 0) != 0)
        return errno == ENOENT ? CG_OK : cg_status_from_errno(errno);
    return cg_file_sync_dir(c->store->root_fd, json_path);
}

/* --- installing --- */

static cg_status install_chunk(const context *c, size_t index, cg_level level, const char *path,
                               bool replace)
{
    char object[CG_TREE_PATH_BYTES];
    cg_chunk_header h;
    source *s = &c->sources[index][level];
    cg_status status = CG_OK;
    if (s->bytes == 0 && (status = object_header(c, index, level, &h)) == CG_OK)
        *s = (source){.from = level, .bytes = h.level_bytes[level]};
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
    status = cg_file_install(c->store->root_fd, object, path, replace, s->bytes);
    s->is_synced = status == CG_OK;
    return status;
}

static cg_status install_chunks(const context *c)
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
            const presence there = known_presence(c, path, i, (cg_level)level);
            if (there == SAME)
                continue;
            status = install_chunk(c, i, (cg_level)level, path, there == OTHER);
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
    const presence there = profile_presence(c, in_context, installed);
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

/* Whether the context.json that is there now is this text; NULL: whether there is none. */
static bool json_is(const context *c, const char *json)
{
    char path[CG_TREE_PATH_BYTES];
    uint8_t *now = NULL;
    size_t n_bytes;
    cg_status status =
        cg_tree_context_file_path(c->store->model, c->name, "context.json", path, sizeof path);
    if (status == CG_OK)
        status = cg_file_read(c->store->root_fd, path, MAX_SMALL_FILE_BYTES, &now, &n_bytes);
    const bool is_it = json == NULL ? status == CG_ERR_NOT_FOUND
                                    : status == CG_OK && n_bytes == strlen(json) &&
                                          memcmp(now, json, n_bytes) == 0;
    free(now);
    return is_it;
}

typedef struct removal {
    listing of;
    bool is_ours; /* as far as it is known */
    bool is_known;
} removal;

static bool remove_if_stale(void *user, int dir_fd, const char *leaf, uint32_t index)
{
    removal *r = user;
    const context *c = r->of.c;
    if (index < c->n_links && (c->links[index].levels >> r->of.level & 1) != 0)
        return true;
    if (!r->is_known)
        r->is_ours = json_is(c, c->json);
    r->is_known = true;
    if (r->is_ours)
        unlinkat(dir_fd, leaf, 0);
    return r->is_ours;
}

/* Removes chunk files that c's context.json, which is there, does not name. It is looked at once
 * more when there are some: others may have published the name meanwhile, and theirs are files that
 * came since. Failures only leave them there. */
static void remove_stale(const context *c)
{
    removal r = {.of = {.c = c}, .is_ours = true};
    for (; r.of.level < CG_N_LEVELS && r.is_ours; r.of.level++)
        list_chunks(c, r.of.level, remove_if_stale, &r);
}

static cg_status publish(context *c, cg_io *io)
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
        if ((status = find_conflict(c, &conflict)) != CG_OK)
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
    if (!same && !json_is(c, conflict ? NULL : c->old_json) && !json_is(c, c->json))
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
static bool take_levels(context *c)
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
    context c = {
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
    if ((status = look_at_old(&c)) != CG_OK)
        goto done;
    status = check_links(&c, tokens, n_tokens);
    if (status != CG_OK && c.is_listed) { /* it may be wrong */
        forget_old(&c);
        status = check_links(&c, tokens, n_tokens);
    }
    if (status != CG_OK || (status = make_json(&c)) != CG_OK)
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
