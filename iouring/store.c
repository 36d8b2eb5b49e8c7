#include "iouring/store.h"

#include "codec/cursor.h"
#include "iouring/file.h"
#include "iouring/io_op.h"
#include "iouring/store_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { REAP_AT_ONCE = 64 };

static cg_status make_folders(int root_fd, const char *model)
{
    static const char *const folders[] = {"", "/objects", "/contexts", "/profiles"};
    char path[CG_TREE_PATH_BYTES];
    for (size_t i = 0; i < sizeof folders / sizeof folders[0]; i++) {
        snprintf(path, sizeof path, "%s%s", model, folders[i]);
        if (mkdirat(root_fd, path, 0700) != 0 && errno != EEXIST)
            return cg_status_from_errno(errno);
    }
    return CG_OK;
}

cg_status cg_store_open(const char *root, const char *model, bool create, cg_store **store_out)
{
    struct stat s;
    cg_status status = CG_ERR_NO_MEMORY;
    *store_out = NULL;
    if (!cg_tree_name_is_valid(model))
        return CG_ERR_INVALID_ARGUMENT;
    cg_store *store = calloc(1, sizeof *store);
    if (store == NULL)
        return status;
    strcpy(store->model, model); /* a valid name fits */
    store->root_fd = open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (store->root_fd < 0 && errno == ENOENT && create && mkdir(root, 0700) == 0)
        store->root_fd = open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (store->root_fd < 0) {
        status = cg_status_from_errno(errno);
        goto failed;
    }
    if (create && (status = make_folders(store->root_fd, model)) != CG_OK)
        goto failed;
    if (fstatat(store->root_fd, model, &s, 0) != 0) {
        status = cg_status_from_errno(errno);
        goto failed;
    }
    if (!S_ISDIR(s.st_mode)) {
        status = CG_ERR_NOT_FOUND;
        goto failed;
    }
    *store_out = store;
    return CG_OK;
failed:
    cg_store_free(store);
    return status;
}

void cg_store_free(cg_store *store)
{
    if (store == NULL)
        return;
    if (store->root_fd >= 0)
        close(store->root_fd);
    free(store);
}

int cg_store_root_fd(const cg_store *store)
{
    return store->root_fd;
}

const char *cg_store_model(const cg_store *store)
{
    return store->model;
}

void cg_store_put_tokens(const uint32_t *tokens, size_t n_tokens, uint8_t *bytes_out)
{
    for (size_t i = 0; i < n_tokens; i++)
        cg_put_le(bytes_out + 4 * i, 4, tokens[i]);
}

cg_status cg_store_sibling_path(const char *path, const char *leaf, char *path_out)
{
    const char *slash = strrchr(path, '/');
    const int dir_bytes = slash == NULL ? 0 : (int)(slash - path) + 1;
    const int n = snprintf(path_out, CG_TREE_PATH_BYTES, "%.*s%s", dir_bytes, path, leaf);
    return n < CG_TREE_PATH_BYTES ? CG_OK : CG_ERR_BUFFER_TOO_SMALL;
}

cg_status cg_store_chunk_header(int root_fd, const char *path, cg_level level, const cg_key *key,
                                const cg_fingerprint *profile, cg_chunk_header *header_out)
{
    const cg_status status = cg_file_chunk_header(root_fd, path, header_out);
    if (status != CG_OK)
        return status;
    if (!cg_chunk_holds(header_out, level) || !cg_key_equal(&header_out->key, key))
        return CG_ERR_FOREIGN_TOKENS;
    return level == CG_L0 ||
                   memcmp(header_out->profile.bytes, profile->bytes, sizeof profile->bytes) == 0
               ? CG_OK
               : CG_ERR_FOREIGN_PROFILE;
}

/* --- look-up ---
 *
 * A batch of stats, and then one of headers: names of several lossy levels that are as long as one
 * another are one nested file (on a cachegenfs mount they differ in length, for each ends with its
 * level). */

typedef struct lookup {
    const cg_store *store;
    cg_io *io;
    const cg_key *keys;
    const cg_fingerprint *profile;
    uint8_t level_mask;
    cg_store_entry *entries;
    uint64_t deadline_ns;
    uint32_t n_errors;
    bool reads_headers; /* the second batch */
} lookup;

static bool are_as_long(const cg_store_entry *entry, unsigned level, unsigned other)
{
    return (entry->levels >> level & entry->levels >> other & 1) != 0 &&
           entry->level_bytes[level] == entry->level_bytes[other];
}

/* Whether the level is the finest of several lossy ones whose names are as long as its own. */
static bool is_finest_of_file(const cg_store_entry *entry, unsigned level)
{
    bool finest = level != CG_L0, alone = true;
    for (unsigned other = CG_L1; other < CG_N_LEVELS; other++) {
        finest = finest && !(other < level && are_as_long(entry, level, other));
        alone = alone && !(other > level && are_as_long(entry, level, other));
    }
    return finest && !alone;
}

static void set_level(cg_store_entry *entry, unsigned level, uint64_t bytes)
{
    entry->levels &= (uint8_t) ~(1u << level);
    entry->levels |= (uint8_t)((bytes > 0) << level);
    entry->level_bytes[level] = bytes;
}

/* The header of the file that `level` and some coarser names show. */
static void take_header(cg_store_entry *entry, unsigned level, const cg_io_buffer *start)
{
    cg_chunk_header h = {0};
    const uint64_t file_bytes = entry->level_bytes[level];
    const bool good = start != NULL &&
                      cg_chunk_header_parse(start->data, start->n_bytes, &h) == CG_OK &&
                      cg_chunk_header_cut(&h, file_bytes) == CG_OK && cg_chunk_holds(&h, level);
    for (unsigned other = CG_L3; other >= level;
         other--) { /* its own last: the others are compared with it */
        if (!are_as_long(entry, level, other))
            continue;
        if (!good)
            set_level(entry, other, 0);
        else if (cg_chunk_holds(&h,
                                other)) /* else it is another file, which happens to be as long */
            set_level(entry, other, h.level_bytes[other]);
    }
}

static void take(lookup *l, const cg_io_completion *c)
{
    cg_store_entry *entry = &l->entries[c->user / CG_N_LEVELS];
    const unsigned level = c->user % CG_N_LEVELS;
    if (l->reads_headers)
        take_header(entry, level, c->buffer);
    /* What is shorter than a header is no chunk: someone wrote past the rules and did not
     * finish. */
    else if (c->status == CG_OK && c->file_bytes >= CG_CHUNK_FIXED_BYTES)
        set_level(entry, level, c->file_bytes);
    if (c->status != CG_OK && c->status != CG_ERR_NOT_FOUND && c->status != CG_ERR_TRUNCATED)
        l->n_errors++;
}

/* Waits for at least one answer. CG_ERR_TIMED_OUT at the deadline. */
static cg_status reap(lookup *l)
{
    cg_io_completion completions[REAP_AT_ONCE];
    size_t n = 0;
    while (n == 0) {
        const uint64_t now_ns = cg_io_now_ns();
        const uint64_t timeout_ns = l->deadline_ns == 0 ? UINT64_MAX : l->deadline_ns - now_ns;
        if (l->deadline_ns != 0 && now_ns >= l->deadline_ns)
            return CG_ERR_TIMED_OUT;
        const cg_status status = cg_io_wait(l->io, timeout_ns, completions, REAP_AT_ONCE, &n);
        if (status != CG_OK)
            return status;
    }
    for (size_t i = 0; i < n; i++) {
        take(l, &completions[i]);
        cg_io_buffer_release(completions[i].buffer);
    }
    return CG_OK;
}

/* Leaves the cg_io idle: takes what has come back, and gives the rest up. Flights are users [0,
 * n_users). */
static void give_up(lookup *l, uint64_t n_users)
{
    cg_io_completion completions[REAP_AT_ONCE];
    size_t n;
    for (uint64_t user = 0; user < n_users && cg_io_n_under_way(l->io) > 0; user++)
        cg_io_abandon(l->io, user);
    while (cg_io_n_under_way(l->io) > 0 &&
           cg_io_wait(l->io, 0, completions, REAP_AT_ONCE, &n) == CG_OK)
        for (size_t i = 0; i < n; i++) {
            if (completions[i].status == CG_OK || completions[i].status == CG_ERR_NOT_FOUND)
                take(l, &completions[i]);
            cg_io_buffer_release(completions[i].buffer);
        }
}

static cg_status ask(lookup *l, uint64_t user)
{
    char path[CG_TREE_PATH_BYTES];
    const cg_level level = (cg_level)(user % CG_N_LEVELS);
    cg_status status = cg_tree_object_path(l->store->model, &l->keys[user / CG_N_LEVELS], level,
                                           l->profile, path, sizeof path);
    if (status != CG_OK)
        return status;
    for (;;) {
        status = l->reads_headers ? cg_io_read_start(l->io, l->store->root_fd, path,
                                                     CG_CHUNK_FIXED_BYTES, CG_IO_CACHED, user)
                                  : cg_io_stat(l->io, l->store->root_fd, path, user);
        if (status != CG_ERR_AGAIN || (status = reap(l)) != CG_OK)
            return status;
    }
}

/* Asks for what there is to ask for of the levels of all chunks, and waits for the answers. */
static cg_status run_batch(lookup *l, size_t n_keys)
{
    cg_status status = CG_OK;
    uint64_t user = 0;
    for (; user < (uint64_t)n_keys * CG_N_LEVELS && status == CG_OK; user++) {
        const unsigned level = user % CG_N_LEVELS;
        if (l->reads_headers ? is_finest_of_file(&l->entries[user / CG_N_LEVELS], level)
                             : l->level_mask >> level & 1)
            status = ask(l, user);
    }
    while (status == CG_OK && cg_io_n_under_way(l->io) > 0)
        status = reap(l);
    if (status != CG_OK)
        give_up(l, user);
    return status;
}

/* A name alone does not tell whether its file goes on behind its level. Beside that of the next
 * finer level it does. */
static uint8_t levels_to_probe(uint8_t level_mask)
{
    return (uint8_t)(level_mask | (level_mask & (1u << CG_L2 | 1u << CG_L3)) >> 1);
}

cg_status cg_store_lookup(const cg_store *store, cg_io *io, const cg_key *keys, size_t n_keys,
                          const cg_fingerprint *profile, uint8_t level_mask, uint64_t deadline_ns,
                          cg_store_entry *entries_out, uint32_t *n_errors_out)
{
    lookup l = {.store = store,
                .io = io,
                .keys = keys,
                .profile = profile,
                .entries = entries_out,
                .deadline_ns = deadline_ns};
    if (cg_io_n_under_way(io) > 0)
        return CG_ERR_INVALID_ARGUMENT;
    for (size_t i = 0; i < n_keys; i++)
        entries_out[i] = (cg_store_entry){0};
    if (profile == NULL)
        level_mask &= 1u << CG_L0;
    l.level_mask = levels_to_probe(level_mask);

    cg_status status = run_batch(&l, n_keys);
    l.reads_headers = true;
    if (status == CG_OK)
        status = run_batch(&l, n_keys);
    for (size_t i = 0; i < n_keys && l.level_mask != level_mask; i++)
        for (unsigned level = 0; level < CG_N_LEVELS; level++)
            if ((level_mask >> level & 1) == 0)
                set_level(&entries_out[i], level, 0);
    if (n_errors_out != NULL)
        *n_errors_out = l.n_errors;
    return status;
}

/* --- publish --- */

static cg_status wait_for_one(cg_io *io, cg_io_completion *completion_out)
{
    size_t n = 0;
    while (n == 0) {
        const cg_status status = cg_io_wait(io, UINT64_MAX, completion_out, 1, &n);
        if (status != CG_OK)
            return status;
    }
    return completion_out->status;
}

cg_status cg_store_write(const cg_store *store, cg_io *io, const char *path, const void *bytes,
                         size_t n_bytes, bool replace)
{
    cg_io_completion completion;
    const cg_status status = cg_io_write(io, store->root_fd, path, bytes, n_bytes, replace, 0);
    return status == CG_OK ? wait_for_one(io, &completion) : status;
}

static cg_status stat_file(const cg_store *store, cg_io *io, const char *path)
{
    cg_io_completion completion;
    const cg_status status = cg_io_stat(io, store->root_fd, path, 0);
    return status == CG_OK ? wait_for_one(io, &completion) : status;
}

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

/* Coarser levels get names of the finest's file, which is there. Any that is there already stays as
 * it is. */
static cg_status publish_coarser(const cg_store *store, cg_io *io, const cg_chunk *chunk)
{
    const cg_chunk_header *h = &chunk->header;
    char path[CG_TREE_PATH_BYTES];
    cg_status status = CG_OK;
    bool linked = false;
    for (unsigned level = h->level + 1u; level <= h->coarsest; level++) {
        if (status != CG_OK && status != CG_ERR_EXISTS)
            return status;
        status = cg_tree_object_path(store->model, &h->key, (cg_level)level, &h->profile, path,
                                     sizeof path);
        if (status != CG_OK || (status = stat_file(store, io, path)) != CG_ERR_NOT_FOUND)
            continue;
        if ((status = link_level(store, h, (cg_level)level, path)) == CG_ERR_NOT_FOUND)
            status = cg_store_write(store, io, path, chunk->bytes, h->level_bytes[level], false);
        linked = linked || status == CG_OK;
    }
    if (status == CG_ERR_EXISTS)
        status = CG_OK;
    return status == CG_OK && linked ? cg_file_sync_dir(store->root_fd, path) : status;
}

cg_status cg_store_publish(const cg_store *store, cg_io *io, const uint8_t *chunk_bytes,
                           size_t n_bytes, bool *existed_out)
{
    cg_chunk chunk;
    char path[CG_TREE_PATH_BYTES];
    cg_status status;
    bool existed = false;
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

    status = stat_file(store, io, path);
    if (status == CG_ERR_NOT_FOUND) {
        /* Tokens first: where a chunk is, they are. */
        if ((status = publish_tokens(store, io, &chunk, path)) != CG_OK)
            return status;
        status = cg_store_write(store, io, path, chunk_bytes, n_bytes, false);
        existed = status == CG_ERR_EXISTS;
    } else {
        existed = status == CG_OK;
    }
    if (existed_out != NULL)
        *existed_out = existed;
    return existed || status == CG_OK ? publish_coarser(store, io, &chunk) : status;
}
