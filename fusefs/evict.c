#include "fusefs/evict.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* At this position a chunk counts twice. Of an 8B model attention costs a token as much as all else
 * at half of it; but the tail of a prompt is used again less often than its head. */
static const double ATTENTION_TOKENS = 65536;

/* How likely something is to be used again falls as the time since its last use grows: half as
 * likely after twice the time, for minutes as for weeks. Below this age all is equally young. */
static const double YOUNG_S = 60;

/* What was used after it was written is likelier to be used again than what was only written: of
 * the blocks of two traces of requests 0.48 and 0.32 were, not 0.27 and 0.29, and more after each
 * further use. */
static const double USED_BEFORE = 2;
/* A file is read when it is closed, to check it; that is no use. */
enum { CHECK_SECONDS = 10 };

/* What the finest level that is left of a chunk is worth; the last is for none. The steps follow
 * the KL divergence of the levels: from L3 to L2 it falls five times as far as from L2 to L1. Even
 * L3 saves the prefill. */
static const double QUALITY[CG_N_LEVELS + 1] = {1, 0.98, 0.95, 0.8, 0};

/* The clocks of two hosts may differ by so much. */
enum { AHEAD_SECONDS = 3600 };

enum { NONE = CG_N_LEVELS };
/* Most file systems give files space in blocks of so many bytes. */
enum { BLOCK_BYTES = 4096 };
static const uint32_t NO_CHUNK = CG_EVICT_NO_CHUNK;
static const uint64_t STEP_IS_DONE = UINT64_MAX;

/* What is left of a file. Indices have 32 bits: with a million files each eight bytes here are
 * 8 MB of the daemon. */
typedef struct remains {
    uint64_t bytes; /* on disk */
    uint32_t chunk;
    uint8_t finest;   /* NONE: the file is gone */
    bool is_outdated; /* its chunk was used at another profile since */
} remains;

/* The files of one key, which are neighbours in the order by key. */
typedef struct chunk {
    uint32_t first, n_files; /* in by_key */
    uint32_t parent;         /* NO_CHUNK: none */
    uint32_t n_children;
    int64_t used_at_s; /* or a chunk that goes on from it */
    bool was_used;     /* after it was written; the same of one that goes on from it */
} chunk;

typedef struct entry {
    double cost; /* a byte */
    uint32_t file;
} entry;

typedef struct chooser {
    const cg_survey *survey;
    const cg_evict_policy *policy;
    uint32_t *by_key; /* [n_files]: files in the order of model and key */
    remains *left;    /* [n_files] */
    chunk *chunks;
    uint32_t n_chunks;
    entry *heap; /* [2 n_files] the cheapest first; a file may be in it twice, once out of date */
    size_t n_heap;
} chooser;

static int compare_key(const cg_object_file *file, uint32_t model, const cg_key *key)
{
    if (file->model != model)
        return file->model < model ? -1 : 1;
    return memcmp(&file->key, key, sizeof *key);
}

static int compare_keys(const cg_survey *survey, size_t a, size_t b)
{
    return compare_key(&survey->files[a], survey->files[b].model, &survey->files[b].key);
}

static int by_key(const void *a, const void *b, void *survey)
{
    return compare_keys(survey, *(const uint32_t *)a, *(const uint32_t *)b);
}

static uint8_t finest_of(uint8_t levels)
{
    return levels != 0 ? (uint8_t)__builtin_ctz(levels) : NONE;
}

static uint32_t find_chunk(const chooser *c, uint32_t model, const cg_key *key)
{
    uint32_t low = 0, high = c->n_chunks;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        const int order =
            compare_key(&c->survey->files[c->by_key[c->chunks[middle].first]], model, key);
        if (order == 0)
            return middle;
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return NO_CHUNK;
}

static const cg_object_file *file_of(const chooser *c, const chunk *of)
{
    return &c->survey->files[c->by_key[of->first]];
}

/* Times to come would keep a file until then. Nobody can set the time of its last change, so that
 * tells when they were set; if it is to come, too, the store's own clock was set back. */
static int64_t used_at(const cg_object_file *file, int64_t now_s)
{
    const int64_t changed_at_s = file->changed_ns / 1000000000;
    if (file->used_at_s <= now_s + AHEAD_SECONDS)
        return file->used_at_s;
    return changed_at_s < now_s ? changed_at_s : now_s;
}

/* After it was written. */
static bool was_used(const cg_object_file *file, int64_t used_at_s)
{
    return used_at_s - file->modified_ns / 1000000000 >= CHECK_SECONDS;
}

static bool is_same_profile(const cg_object_file *a, const cg_object_file *b)
{
    return memcmp(&a->profile, &b->profile, sizeof a->profile) == 0;
}

/* Nobody reads two profiles of a chunk: after a new one was made, what was saved at the old one is
 * as old as its own last use. L0 is of no profile. */
static void find_outdated(chooser *c, const chunk *of)
{
    const cg_object_file *files = c->survey->files, *last = NULL;
    const uint32_t *numbers = &c->by_key[of->first];
    int64_t last_use_s = 0;
    for (uint32_t i = 0; i < of->n_files; i++) {
        const cg_object_file *file = &files[numbers[i]];
        const int64_t used_at_s = used_at(file, c->policy->now_s);
        if (file->finest != CG_L0 && (last == NULL || last_use_s < used_at_s)) {
            last = file;
            last_use_s = used_at_s;
        }
    }
    for (uint32_t i = 0; i < of->n_files; i++) {
        const cg_object_file *file = &files[numbers[i]];
        c->left[numbers[i]].is_outdated = file->finest != CG_L0 && !is_same_profile(file, last) &&
                                          used_at(file, c->policy->now_s) < last_use_s;
    }
}

static void group_files(chooser *c)
{
    const uint32_t n = (uint32_t)c->survey->n_files;
    for (uint32_t i = 0; i < n; i++) {
        const cg_object_file *file = &c->survey->files[c->by_key[i]];
        if (i == 0 || compare_keys(c->survey, c->by_key[i - 1], c->by_key[i]) != 0)
            c->chunks[c->n_chunks++] = (chunk){.first = i, .parent = NO_CHUNK};
        chunk *last = &c->chunks[c->n_chunks - 1];
        last->n_files++;
        const int64_t used_at_s = used_at(file, c->policy->now_s);
        last->used_at_s = used_at_s > last->used_at_s ? used_at_s : last->used_at_s;
        last->was_used |= was_used(file, used_at_s);
        c->left[c->by_key[i]] = (remains){file->used_bytes, c->n_chunks - 1, file->finest, false};
    }
    for (uint32_t i = 0; i < c->n_chunks; i++)
        find_outdated(c, &c->chunks[i]);
}

static int last_first(const void *a, const void *b, void *user)
{
    const chooser *c = user;
    const uint32_t x = file_of(c, &c->chunks[*(const uint32_t *)a])->first_position,
                   y = file_of(c, &c->chunks[*(const uint32_t *)b])->first_position;
    return x > y ? -1 : x < y;
}

/* From the last positions to the first, so that each chunk knows its use before its parent asks.
 * order: room for n_chunks. Headers say what they like: a chunk that does not lie behind its parent
 * has none here, so there is no circle. */
static void find_parents(chooser *c, uint32_t *order)
{
    for (uint32_t i = 0; i < c->n_chunks; i++)
        order[i] = i;
    qsort_r(order, c->n_chunks, sizeof *order, last_first, c);
    for (uint32_t i = 0; i < c->n_chunks; i++) {
        chunk *child = &c->chunks[order[i]];
        const cg_object_file *file = file_of(c, child);
        const uint32_t at = find_chunk(c, file->model, &file->parent);
        if (at == NO_CHUNK || file_of(c, &c->chunks[at])->first_position >= file->first_position)
            continue;
        chunk *parent = &c->chunks[at];
        child->parent = at;
        parent->n_children++;
        if (parent->used_at_s < child->used_at_s)
            parent->used_at_s = child->used_at_s;
        parent->was_used |= child->was_used;
    }
}

/* The finest level that is left of a chunk, but for one of its files. */
static uint8_t finest_without(const chooser *c, const chunk *of, uint32_t without)
{
    uint8_t finest = NONE;
    for (uint32_t i = of->first; i < of->first + of->n_files; i++) {
        const uint32_t file = c->by_key[i];
        if (file != without && c->left[file].finest < finest)
            finest = c->left[file].finest;
    }
    return finest;
}

/* Of these levels the finest that is coarser than one. */
static uint8_t coarser_than(uint8_t level, uint8_t levels)
{
    return finest_of(levels & (uint8_t) ~((2u << level) - 1));
}

/* The levels that the file has names for, if it ends at this one. */
static uint8_t levels_from(const chooser *c, uint32_t file, uint8_t finest)
{
    return c->survey->files[file].levels & (uint8_t)(UINT8_MAX << finest);
}

/* What other files of the chunk have at the file's profile. L0 is as good as any profile's. */
static uint8_t levels_of_others(const chooser *c, uint32_t file)
{
    const cg_object_file *files = c->survey->files;
    const chunk *of = &c->chunks[c->left[file].chunk];
    uint8_t levels = 0;
    for (uint32_t i = of->first; i < of->first + of->n_files; i++) {
        const uint32_t other = c->by_key[i];
        if (other != file &&
            (files[file].finest == CG_L0 || is_same_profile(&files[other], &files[file])))
            levels |= levels_from(c, other, c->left[other].finest);
    }
    return levels;
}

/* By how much the chunk is worth less when the file ends at level `next`. Levels finer than those
 * that go do not count: they are larger, and go before them. */
static double lost_quality(const chooser *c, uint32_t file, uint8_t next)
{
    const uint8_t stay = levels_of_others(c, file) | levels_from(c, file, next);
    const uint8_t lost = levels_from(c, file, c->left[file].finest) & (uint8_t)~stay;
    if (lost == 0)
        return 0;
    const uint8_t before = finest_of(lost);
    return QUALITY[before] - QUALITY[coarser_than(before, stay)];
}

static uint64_t in_blocks(uint64_t bytes)
{
    return (bytes + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES;
}

static uint64_t bytes_at(const chooser *c, uint32_t file, uint8_t level)
{
    const cg_object_file *f = &c->survey->files[file];
    const uint64_t whole = f->level_bytes[f->finest];
    if (level == NONE || whole == 0)
        return 0;
    if (f->used_bytes == in_blocks(whole))
        return in_blocks(f->level_bytes[level]);
    /* In proportion: on disk a file may take less than its size, or more. */
    return (uint64_t)((double)f->used_bytes * ((double)f->level_bytes[level] / (double)whole));
}

/* The next coarser level that the file has a name for and takes less space at, and then nothing. */
static uint8_t next_level(const chooser *c, uint32_t file)
{
    const remains *left = &c->left[file];
    uint8_t next = left->finest;
    if (c->policy->takes_no_cuts)
        return NONE;
    do
        next = coarser_than(next, c->survey->files[file].levels);
    while (next != NONE && bytes_at(c, file, next) >= left->bytes);
    return next;
}

/* When it was used for the last time, or a chunk that goes on from it. */
static int64_t last_use(const chooser *c, uint32_t file)
{
    const remains *left = &c->left[file];
    return left->is_outdated ? used_at(&c->survey->files[file], c->policy->now_s)
                             : c->chunks[left->chunk].used_at_s;
}

static double heat_of(const chooser *c, uint32_t file)
{
    const remains *left = &c->left[file];
    const int64_t used_at_s = last_use(c, file);
    const double age_s = (double)(c->policy->now_s - used_at_s);
    const bool is_used = left->is_outdated ? was_used(&c->survey->files[file], used_at_s)
                                           : c->chunks[left->chunk].was_used;
    return (is_used ? USED_BEFORE : 1) / (YOUNG_S + (age_s > 0 ? age_s : 0));
}

/* What the file's next step costs a byte that it frees; below 0: it frees nothing, or is not to be
 * done now. */
static double step_cost(const chooser *c, uint32_t file)
{
    const remains *left = &c->left[file];
    const cg_object_file *f = &c->survey->files[file];
    const chunk *of = &c->chunks[left->chunk];
    if (left->finest == NONE || f->n_names_elsewhere > 0)
        return -1;
    const uint8_t next = next_level(c, file);
    const uint64_t bytes_after = bytes_at(c, file, next);
    const bool is_last = next == NONE && finest_without(c, of, file) == NONE;
    if ((is_last && of->n_children > 0) || bytes_after >= left->bytes)
        return -1;
    const double recompute = f->n_tokens * (1 + f->first_position / ATTENTION_TOKENS);
    return heat_of(c, file) * recompute * lost_quality(c, file, next) /
           (double)(left->bytes - bytes_after);
}

/* A binary heap: no entry costs less than the one above it, at (at - 1) / 2. */
static void push(chooser *c, uint32_t file)
{
    const double cost = step_cost(c, file);
    if (cost < 0)
        return;
    size_t at = c->n_heap++;
    for (; at > 0 && c->heap[(at - 1) / 2].cost > cost; at = (at - 1) / 2)
        c->heap[at] = c->heap[(at - 1) / 2];
    c->heap[at] = (entry){cost, file};
}

static entry pop(chooser *c)
{
    const entry top = c->heap[0], last = c->heap[--c->n_heap];
    size_t at = 0;
    for (size_t child; (child = 2 * at + 1) < c->n_heap; at = child) {
        if (child + 1 < c->n_heap && c->heap[child + 1].cost < c->heap[child].cost)
            child++;
        if (c->heap[child].cost >= last.cost)
            break;
        c->heap[at] = c->heap[child];
    }
    c->heap[at] = last;
    return top;
}

/* The chunk has lost its last file: its parent may be the end of the chain now. */
static void lose_chunk(chooser *c, const chunk *lost)
{
    if (lost->parent == NO_CHUNK)
        return;
    const chunk *parent = &c->chunks[lost->parent];
    if (--c->chunks[lost->parent].n_children > 0)
        return;
    /* The one file whose step was put off: as long as there were two, neither was the last. */
    for (uint32_t i = parent->first; i < parent->first + parent->n_files; i++)
        if (finest_without(c, parent, c->by_key[i]) == NONE && next_level(c, c->by_key[i]) == NONE)
            push(c, c->by_key[i]);
}

/* The file now ends at level `next`. */
static void take_step(chooser *c, uint32_t file, uint8_t next, cg_eviction *step_out)
{
    remains *left = &c->left[file];
    const uint64_t bytes_after = bytes_at(c, file, next);
    *step_out = (cg_eviction){left->bytes - bytes_after, file, next, left->chunk,
                              c->chunks[left->chunk].parent};
    left->bytes = bytes_after;
    left->finest = next;
}

/* The finest level that a chunk of this age may have. */
static uint8_t finest_allowed(const cg_evict_policy *policy, int64_t age_s)
{
    uint8_t finest = 0;
    for (uint8_t level = 0; level < CG_N_LEVELS; level++)
        if (policy->keep_s[level] > 0 && age_s >= policy->keep_s[level])
            finest = level;
    return finest;
}

/* The freed bytes. */
static uint64_t cut_by_age(chooser *c, uint32_t file, cg_eviction *steps, size_t *n_steps)
{
    const cg_object_file *f = &c->survey->files[file];
    const uint8_t allowed = finest_allowed(c->policy, c->policy->now_s - last_use(c, file));
    const uint8_t coarsest = f->levels != 0 ? (uint8_t)(31 - __builtin_clz(f->levels)) : NONE;
    uint8_t next = c->left[file].finest;
    if (f->n_names_elsewhere > 0 || coarsest == NONE)
        return 0;
    while (next < allowed && next < coarsest)
        next = coarser_than(next, f->levels);
    /* L0 is a file of its own. */
    if (next < allowed && finest_without(c, &c->chunks[c->left[file].chunk], file) != NONE)
        next = NONE;
    if (next == c->left[file].finest)
        return 0;
    take_step(c, file, next, &steps[*n_steps]);
    return steps[(*n_steps)++].freed_bytes;
}

static void choose(chooser *c, cg_eviction *steps, size_t *n_steps)
{
    const uint64_t wanted_bytes = c->policy->wanted_bytes;
    const uint32_t model = c->policy->model;
    uint64_t freed_bytes = 0;
    for (uint32_t i = 0; i < c->survey->n_files && !c->policy->takes_no_cuts; i++) {
        const bool counts = model == CG_EVICT_ALL_MODELS || model == c->survey->files[i].model;
        const uint64_t cut_bytes = cut_by_age(c, i, steps, n_steps);
        freed_bytes += counts ? cut_bytes : 0;
    }
    for (uint32_t i = 0; i < c->survey->n_files; i++)
        if (model == CG_EVICT_ALL_MODELS || model == c->survey->files[i].model)
            push(c, i);
    while (freed_bytes < wanted_bytes && c->n_heap > 0) {
        const entry top = pop(c);
        const double cost = step_cost(c, top.file);
        if (cost > top.cost || cost < 0) { /* other files of the chunk have gone meanwhile */
            push(c, top.file);
            continue;
        }
        const uint8_t next = next_level(c, top.file);
        const chunk *of = &c->chunks[c->left[top.file].chunk];
        take_step(c, top.file, next, &steps[*n_steps]);
        freed_bytes += steps[(*n_steps)++].freed_bytes;
        if (next != NONE)
            push(c, top.file);
        else if (finest_without(c, of, top.file) == NONE)
            lose_chunk(c, of);
    }
}

/* Only the last step of each file is done. Its place in the order is right for all: chunks still go
 * before those that lead to them. */
static size_t join_steps(chooser *c, cg_eviction *steps, size_t n_steps)
{
    size_t first = n_steps;
    for (size_t i = n_steps; i-- > 0;) {
        remains *left = &c->left[steps[i].file];
        if (left->bytes != STEP_IS_DONE) {
            left->bytes = STEP_IS_DONE;
            left->chunk = (uint32_t)--first; /* where its last step is now */
            steps[first] = steps[i];
        } else {
            steps[left->chunk].freed_bytes += steps[i].freed_bytes;
        }
    }
    memmove(steps, steps + first, (n_steps - first) * sizeof *steps);
    return n_steps - first;
}

/* Whether the policy wants anything of any store. */
static bool wants_nothing(const cg_evict_policy *policy)
{
    bool has_rule = policy->wanted_bytes > 0;
    for (unsigned level = 0; level < CG_N_LEVELS; level++)
        has_rule |= policy->keep_s[level] > 0;
    return !has_rule;
}

cg_status cg_evict_choose(const cg_survey *survey, const cg_evict_policy *policy,
                          cg_eviction **steps_out, size_t *n_steps_out)
{
    *steps_out = NULL;
    *n_steps_out = 0;
    if (wants_nothing(policy)) /* most surveys find room: no memory for them */
        return CG_OK;
    if (survey->n_files >= UINT32_MAX / CG_N_LEVELS)
        return CG_ERR_NO_MEMORY;
    const size_t n = survey->n_files + 1; /* not 0 bytes */
    chooser c = {.survey = survey,
                 .policy = policy,
                 .by_key = calloc(n, sizeof *c.by_key),
                 .left = calloc(n, sizeof *c.left),
                 .chunks = calloc(n, sizeof *c.chunks),
                 .heap = calloc(n, 2 * sizeof *c.heap)};
    uint32_t *order = calloc(n, sizeof *order);
    cg_eviction *steps = calloc(n, CG_N_LEVELS * sizeof *steps);
    cg_status status = CG_ERR_NO_MEMORY;
    if (c.by_key != NULL && c.left != NULL && c.chunks != NULL && c.heap != NULL && order != NULL &&
        steps != NULL) {
        for (uint32_t i = 0; i < survey->n_files; i++)
            c.by_key[i] = i;
        qsort_r(c.by_key, survey->n_files, sizeof *c.by_key, by_key, (void *)survey);
        group_files(&c);
        find_parents(&c, order);
        free(order);
        order = NULL;
        choose(&c, steps, n_steps_out);
        *n_steps_out = join_steps(&c, steps, *n_steps_out);
        status = CG_OK;
    }
    free(c.by_key);
    free(c.left);
    free(c.chunks);
    free(c.heap);
    free(order);
    if (status != CG_OK)
        free(steps);
    *steps_out = status == CG_OK ? steps : NULL;
    return status;
}
