/* Look-up: a batch of stats, and then one of headers.
 *
 * Names of several lossy levels that are as long as one another are one nested file. (On a
 * cachegenfs mount they differ in length, for each ends with its level.)
 */
#include "iouring/io_op.h"
#include "iouring/store_internal.h"

enum { REAP_AT_ONCE = 64 };

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

static cg_status submit(lookup *l, const cg_key *key, cg_level level, uint64_t user)
{
    char path[CG_TREE_PATH_BYTES];
    if (l->reads_headers)
        return cg_store_read(l->store, l->io, key, level, l->profile, CG_CHUNK_FIXED_BYTES,
                             CG_IO_CACHED, user);
    const cg_status status =
        cg_tree_object_path(l->store->model, key, level, l->profile, path, sizeof path);
    return status == CG_OK ? cg_io_stat(l->io, l->store->root_fd, path, user) : status;
}

/* user: of the completion, and which level of which key it is about. */
static cg_status ask(lookup *l, uint64_t user)
{
    for (;;) {
        cg_status status =
            submit(l, &l->keys[user / CG_N_LEVELS], (cg_level)(user % CG_N_LEVELS), user);
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
    if (status != CG_OK) /* a hung mount must not hold up the next caller of this queue */
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
