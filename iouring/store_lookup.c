/* Look-up: batches of the starts of files.
 *
 * The header of a chunk says which levels its file holds, where each ends, and what the chunk was
 * computed on. So one name answers for all levels of a nested file, and to open it and read its
 * start is as many questions to a far store as its size alone would be. The first batch asks for
 * the finest lossy level that is wanted, and for L0; the second for what the first left open.
 */
#include "iouring/clock.h"
#include "iouring/io_op.h"
#include "iouring/store_internal.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

enum { REAP_AT_ONCE = 64, LOSSY_LEVELS = 1 << CG_L1 | 1 << CG_L2 | 1 << CG_L3 };

typedef struct lookup lookup;
struct lookup {
    const cg_store *store;
    cg_io *io;
    const cg_key *keys;
    const cg_fingerprint *profile;
    uint8_t level_mask;
    const cg_store_keeper *keeper; /* may be NULL */
    cg_store_entry *entries;
    bool *there; /* of cg_store_probe(): in place of entries */
    const cg_store_patience *patience;
    uint64_t answered_ns; /* when the last answer came, or this call began */
    uint32_t n_errors;
    bool is_kept[CG_N_FOLDERS]; /* folders below whose descriptor something was asked for */
    bool is_lost[CG_N_FOLDERS]; /* those of them that turned out to be gone */
    bool has_lost, is_again;    /* one did; the batch is asked again for what lies in them */
    /* Of a batch: which levels' names are asked for; and asking for one, or taking the answer. */
    uint8_t (*names)(const lookup *l, size_t index);
    cg_status (*submit)(lookup *l, size_t index, unsigned level, uint64_t user);
    void (*take)(lookup *l, size_t index, unsigned level, const cg_io_completion *c);
};

/* The lowest bit that is set. L1 is the finest lossy level. */
static uint8_t finest_bit(uint8_t levels)
{
    return levels & (uint8_t)-levels;
}

static uint8_t first_names(const lookup *l, size_t index)
{
    (void)index;
    const uint8_t lossy = l->level_mask & LOSSY_LEVELS;
    return (uint8_t)((l->level_mask & 1u << CG_L0) | finest_bit(lossy));
}

/* What the first batch asked for by name and what it found in files need not be asked for. */
static uint8_t other_names(const lookup *l, size_t index)
{
    return (uint8_t)(l->level_mask & ~l->entries[index].levels & ~first_names(l, index));
}

static uint8_t one_name(const lookup *l, size_t index)
{
    (void)l;
    (void)index;
    return 1u << CG_L0;
}

/* Of a batch that is asked again, what lies in a folder that was gone and is not found yet. */
static uint8_t names_to_ask(const lookup *l, size_t index)
{
    if (!l->is_again)
        return l->names(l, index);
    if (!l->is_lost[l->keys[index].bytes[0]])
        return 0;
    const uint8_t found = l->there != NULL ? l->there[index] << CG_L0 : l->entries[index].levels;
    return (uint8_t)(l->names(l, index) & ~found);
}

/* What is asked for again is not asked for below a folder that may be open anew, and as stale. */
static cg_status place_of(lookup *l, size_t index, unsigned level, const cg_fingerprint *profile,
                          cg_store_place *place)
{
    const cg_status status =
        cg_store_object_place(l->store, &l->keys[index], (cg_level)level, profile, place);
    if (status == CG_OK && l->is_again) {
        place->dir_fd = l->store->root_fd;
        place->path = place->whole;
    }
    if (status == CG_OK && place->dir_fd != l->store->root_fd)
        l->is_kept[l->keys[index].bytes[0]] = true;
    return status;
}

static cg_status submit_header(lookup *l, size_t index, unsigned level, uint64_t user)
{
    cg_store_place place;
    const cg_status status = place_of(l, index, level, l->profile, &place);
    if (status != CG_OK)
        return status;
    if (l->keeper != NULL && index < l->keeper->n_most &&
        level != CG_L0) /* L0 is mostly not there */
        return cg_io_read_open(l->io, place.dir_fd, place.path, 0, CG_CHUNK_FIXED_BYTES, user);
    return cg_io_read_range(l->io, place.dir_fd, place.path, 0, CG_CHUNK_FIXED_BYTES, CG_IO_CACHED,
                            user);
}

static cg_status submit_folder(lookup *l, size_t index, unsigned level, uint64_t user)
{
    cg_store_place place;
    const cg_status status = place_of(l, index, level, NULL, &place);
    if (status != CG_OK)
        return status;
    /* The chunk's folder: the path without its leaf. place.path lies in place.whole. */
    *strrchr(place.whole, '/') = '\0';
    return cg_io_stat(l->io, place.dir_fd, place.path, user);
}

static void count_error(lookup *l, const cg_io_completion *c)
{
    l->n_errors +=
        c->status != CG_OK && c->status != CG_ERR_NOT_FOUND && c->status != CG_ERR_TRUNCATED;
    cg_store_note(l->store, c);
}

/* Whether the answer is about a kept folder that is gone, whichever look-up has seen that first. */
static bool was_lost(lookup *l, size_t index, const cg_io_completion *c)
{
    const uint8_t folder = l->keys[index].bytes[0];
    if (!cg_store_is_of_the_gone(c) || l->is_again || !l->is_kept[folder])
        return false;
    if (!l->is_lost[folder]) /* it may be open anew by now: then its name is the way for a while */
        cg_folders_lose(l->store->folders, folder);
    l->is_lost[folder] = l->has_lost = true;
    return true;
}

static void end_file(const lookup *l, size_t index, unsigned level, int file, bool is_good)
{
    if (file >= 0 && is_good)
        l->keeper->keep(l->keeper->user, index, (cg_level)level, file);
    else if (file >= 0)
        close(file);
}

/* The start of the file that has the level's name. */
static void take_header(lookup *l, size_t index, unsigned level, const cg_io_completion *c)
{
    cg_store_entry *entry = &l->entries[index];
    cg_chunk_header h;
    if (was_lost(l, index, c))
        return;
    count_error(l, c);
    if (c->status != CG_OK && c->status != CG_ERR_TRUNCATED)
        return;
    if (c->status != CG_OK ||
        cg_chunk_header_parse(c->buffer->data, c->buffer->n_bytes, &h) != CG_OK ||
        h.file_bytes > CG_STORE_MOST_CHUNK_BYTES || !cg_chunk_holds(&h, level)) {
        entry->damaged |= (uint8_t)(1u << level);
        end_file(l, index, level, c->file, false);
        return;
    }
    end_file(l, index, level, c->file, true);
    /* Finer levels that the file holds don't count here: by this name only the file's start may be
     * had. */
    for (unsigned held = level; held <= h.coarsest; held++) {
        const bool is_known = (entry->levels >> held & 1) != 0;
        if ((l->level_mask >> held & 1) == 0 || (is_known && held > level))
            continue; /* what its own name says counts: that is the file that is read */
        entry->levels |= (uint8_t)(1u << held);
        entry->level_bytes[held] = h.level_bytes[held];
        entry->prefix_level[held] = h.prefix_level;
    }
}

static void take_folder(lookup *l, size_t index, unsigned level, const cg_io_completion *c)
{
    (void)level;
    l->there[index] = c->status == CG_ERR_INVALID_ARGUMENT && c->error == EISDIR;
    if (!l->there[index] && !was_lost(l, index, c))
        count_error(l, c);
}

/* Waits for at least one answer. CG_ERR_TIMED_OUT: no longer. */
static cg_status reap(lookup *l)
{
    cg_io_completion completions[REAP_AT_ONCE];
    size_t n = 0;
    while (n == 0) {
        const cg_store_patience *p = l->patience;
        const uint64_t until_ns = p != NULL ? p->until_ns(p->user, l->answered_ns) : UINT64_MAX,
                       now_ns = cg_now_ns();
        if (now_ns >= until_ns)
            return CG_ERR_TIMED_OUT;
        const cg_status status =
            cg_io_wait(l->io, until_ns == UINT64_MAX ? UINT64_MAX : until_ns - now_ns, completions,
                       REAP_AT_ONCE, &n);
        if (status != CG_OK)
            return status;
    }
    l->answered_ns = cg_now_ns();
    for (size_t i = 0; i < n; i++) {
        const uint64_t user = completions[i].user;
        l->take(l, user / CG_N_LEVELS, user % CG_N_LEVELS, &completions[i]);
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
    /* Ends, and without waiting: what was abandoned is ready at once. */
    while (cg_io_n_under_way(l->io) > 0 &&
           cg_io_wait(l->io, 0, completions, REAP_AT_ONCE, &n) == CG_OK)
        for (size_t i = 0; i < n; i++) {
            const uint64_t user = completions[i].user;
            if (completions[i].status != CG_ERR_TIMED_OUT)
                l->take(l, user / CG_N_LEVELS, user % CG_N_LEVELS, &completions[i]);
            cg_io_buffer_release(completions[i].buffer);
        }
}

/* user: of the completion, and which level of which key it is about. */
static cg_status ask(lookup *l, uint64_t user)
{
    for (;;) {
        cg_status status = l->submit(l, user / CG_N_LEVELS, user % CG_N_LEVELS, user);
        if (status != CG_ERR_AGAIN || (status = reap(l)) != CG_OK)
            return status;
    }
}

/* Asks for what there is to ask for, and waits for the answers. */
static cg_status run_batch(lookup *l, size_t n_keys)
{
    cg_status status = CG_OK;
    /* L0, which mostly is not there, comes last: to find that out takes the fewest round trips. */
    for (unsigned level = CG_N_LEVELS; level-- > 0;)
        for (size_t i = 0; i < n_keys && status == CG_OK; i++)
            if (names_to_ask(l, i) >> level & 1)
                status = ask(l, (uint64_t)i * CG_N_LEVELS + level);
    while (status == CG_OK && cg_io_n_under_way(l->io) > 0)
        status = reap(l);
    if (status != CG_OK) /* a hung mount must not hold up the next caller of this queue */
        give_up(l, (uint64_t)n_keys * CG_N_LEVELS);
    return status;
}

/* A batch, and again, by the whole path, what of it lies in folders that were gone. */
static cg_status run(lookup *l, size_t n_keys)
{
    memset(l->is_kept, 0, sizeof l->is_kept);
    memset(l->is_lost, 0, sizeof l->is_lost);
    l->has_lost = false;
    cg_status status = run_batch(l, n_keys);
    if (status != CG_OK || !l->has_lost)
        return status;
    l->is_again = true;
    status = run_batch(l, n_keys);
    l->is_again = false;
    return status;
}

static uint64_t until_deadline_ns(void *user, uint64_t answered_ns)
{
    const uint64_t *deadline_ns = user;
    (void)answered_ns;
    return *deadline_ns;
}

cg_status cg_store_lookup(const cg_store *store, cg_io *io, const cg_key *keys, size_t n_keys,
                          const cg_fingerprint *profile, uint8_t level_mask, uint64_t deadline_ns,
                          cg_store_entry *entries_out, uint32_t *n_errors_out)
{
    const cg_store_patience patience = {until_deadline_ns, &deadline_ns};
    return cg_store_lookup_open(store, io, keys, n_keys, profile, level_mask,
                                deadline_ns != 0 ? &patience : NULL, NULL, entries_out,
                                n_errors_out);
}

cg_status cg_store_lookup_open(const cg_store *store, cg_io *io, const cg_key *keys, size_t n_keys,
                               const cg_fingerprint *profile, uint8_t level_mask,
                               const cg_store_patience *patience, const cg_store_keeper *keeper,
                               cg_store_entry *entries_out, uint32_t *n_errors_out)
{
    lookup l = {.store = store,
                .io = io,
                .keys = keys,
                .profile = profile,
                .level_mask = profile == NULL ? level_mask & 1u << CG_L0 : level_mask,
                .keeper = keeper,
                .entries = entries_out,
                .patience = patience,
                .answered_ns = cg_now_ns(),
                .names = first_names,
                .submit = submit_header,
                .take = take_header};
    if (cg_io_n_under_way(io) > 0)
        return CG_ERR_INVALID_ARGUMENT;
    for (size_t i = 0; i < n_keys; i++)
        entries_out[i] = (cg_store_entry){0};
    cg_status status = run(&l, n_keys);
    l.names = other_names;
    if (status == CG_OK)
        status = run(&l, n_keys);
    if (n_errors_out != NULL)
        *n_errors_out = l.n_errors;
    return status;
}

cg_status cg_store_probe(const cg_store *store, cg_io *io, const cg_key *keys, size_t n_keys,
                         const cg_store_patience *patience, bool *there_out, uint32_t *n_errors_out)
{
    lookup l = {.store = store,
                .io = io,
                .keys = keys,
                .there = there_out,
                .patience = patience,
                .answered_ns = cg_now_ns(),
                .names = one_name,
                .submit = submit_folder,
                .take = take_folder};
    if (cg_io_n_under_way(io) > 0)
        return CG_ERR_INVALID_ARGUMENT;
    for (size_t i = 0; i < n_keys; i++)
        there_out[i] = false;
    const cg_status status = run(&l, n_keys);
    *n_errors_out = l.n_errors;
    return status;
}
