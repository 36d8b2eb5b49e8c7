#include "connector/asking.h"

#include "connector/clock.h"
#include "connector/prefix.h"
#include "connector/silence.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { STEP_UP = 8 };
static const uint64_t LEAST_SLOW_NS = UINT64_C(60000000000), MOST_SLOW_NS = 60 * LEAST_SLOW_NS;

static bool was_slow(const cg_asking_width *width, uint64_t now_ns)
{
    return now_ns < width->slow_until_ns;
}

static void believe_slow(cg_asking_width *width, uint64_t now_ns)
{
    if (width->slow_for_ns == 0)
        width->slow_for_ns = LEAST_SLOW_NS;
    else if (!was_slow(width, now_ns))
        width->slow_for_ns =
            2 * width->slow_for_ns < MOST_SLOW_NS ? 2 * width->slow_for_ns : MOST_SLOW_NS;
    width->slow_until_ns = now_ns + width->slow_for_ns;
}

void cg_asking_learn(cg_asking_width *width, uint32_t n_chunks, uint64_t took_ns,
                     uint64_t latency_ns, uint64_t now_ns)
{
    uint32_t next = width->n_chunks;
    if (took_ns > CG_FEW_ROUND_TRIPS * latency_ns) {
        next = n_chunks / 2 < next ? n_chunks / 2 : next;
        believe_slow(width, now_ns);
    } else if (n_chunks >= next / 2) {
        next = was_slow(width, now_ns) ? next + STEP_UP : next * 4;
        /* Few questions are answered soon by stores that are slow with many, too. */
        if (n_chunks > CG_ASKING_LEAST && !was_slow(width, now_ns))
            width->slow_for_ns = 0;
    }
    width->n_chunks = next < CG_ASKING_LEAST  ? CG_ASKING_LEAST
                      : next > CG_ASKING_MOST ? CG_ASKING_MOST
                                              : next;
}

/* What a look-up opens of a far store stays open for the load that follows. */
typedef struct keeping {
    cg_runtime *runtime;
    const cg_key *keys;
} keeping;

static void keep_file(void *user, size_t index, cg_level level, int file)
{
    const keeping *kept = user;
    const cachegen *c = kept->runtime->connector;
    const cg_reader_name name = {.store = c->root,
                                 .key = kept->keys[index],
                                 .profile = c->model.profile_fingerprint,
                                 .level = level};
    if (!cg_reader_files_put(cg_link_files(kept->runtime->link), &name, file,
                             /*is_read=*/false, cg_now_ns()))
        close(file);
}

/* How many files may stay open. */
static size_t keepable(const cg_runtime *rt)
{
    cg_reader_files *files = cg_link_files(rt->link);
    return files != NULL && cg_handle_is_far(rt->connector) ? cg_reader_files_room(files) : 0;
}

static void count_errors(cg_runtime *rt, uint32_t n_errors, cg_status status)
{
    pthread_mutex_lock(&rt->lock);
    rt->stats.lookup_errors += n_errors + (status != CG_OK);
    pthread_mutex_unlock(&rt->lock);
}

/* For how long a call to the store waits. */
typedef struct waiting {
    cg_silence silence;
    cg_prefix *const *prefixes; /* [n]; none: until it is known whether the store is silent */
    size_t n;
    uint64_t begun_ns, most_ns; /* begun_ns 0: not yet */
    bool is_silent;  /* that ends it; also where nothing could be asked: too much was left open */
    bool is_dropped; /* or else that nobody wants it any more */
} waiting;

/* With the lock held. */
static bool is_wanted(const waiting *w)
{
    bool any = w->n == 0;
    for (size_t i = 0; i < w->n && !any; i++)
        any = !w->prefixes[i]->is_cancelled;
    return any && !w->silence.runtime->stop;
}

static uint64_t until_ns(void *user, uint64_t answered_ns)
{
    waiting *w = user;
    cg_runtime *rt = w->silence.runtime;
    pthread_mutex_lock(&rt->lock);
    const uint64_t silent_ns = cg_silence_ns(&w->silence, answered_ns);
    w->is_dropped = !is_wanted(w);
    pthread_mutex_unlock(&rt->lock);
    if (w->begun_ns == 0)
        w->begun_ns = answered_ns;
    const uint64_t most_ns = w->begun_ns + w->most_ns,
                   end_ns = silent_ns <= most_ns ? silent_ns : most_ns;
    /* Half of it says so, too, where the prompt has no more time and nothing has come of the call:
     * of two questions the first may have been answered from memory. */
    const bool is_silence = silent_ns <= most_ns || (w->silence.alive_ns == w->begun_ns &&
                                                     w->most_ns >= w->silence.silence_ns / 2);
    w->is_silent = is_silence && (!w->is_dropped || cg_now_ns() >= end_ns);
    return w->is_dropped ? 0 : cg_silence_look_ns(&w->silence, end_ns);
}

static uint64_t left_ns(const cg_prefix *p)
{
    return p->patience_ns > p->asked_ns ? p->patience_ns - p->asked_ns : 0;
}

/* Times that are nearer than that to each other count as one, so that few calls are cut. */
static uint64_t least_ns(uint64_t silence_ns)
{
    return silence_ns / 4;
}

/* Until the patience with one of prefixes[n] is over. */
static waiting wait_for(cg_prefix *const *prefixes, size_t n, uint64_t silence_ns)
{
    uint64_t most_ns = UINT64_MAX;
    for (size_t i = 0; i < n; i++)
        most_ns = left_ns(prefixes[i]) < most_ns ? left_ns(prefixes[i]) : most_ns;
    return (waiting){.silence = {.runtime = prefixes[0]->runtime, .silence_ns = silence_ns},
                     .prefixes = prefixes,
                     .n = n,
                     .most_ns = most_ns > least_ns(silence_ns) ? most_ns : least_ns(silence_ns),
                     .is_silent = true};
}

/* What a call to the store has come to, with so many errors besides its status. */
static cg_asked conclude(const waiting *w, const cg_io *io, cg_status status, uint32_t n_errors,
                         uint64_t took_ns)
{
    const bool is_late = status == CG_ERR_TIMED_OUT,
               is_broken = cg_io_n_under_way(io) > 0 ||
                           (status != CG_OK && !is_late && status != CG_ERR_NO_MEMORY);
    for (size_t i = 0; i < w->n; i++)
        w->prefixes[i]->asked_ns += took_ns;
    const cg_asked asked = is_late && w->is_silent ? CG_ASKED_IN_VAIN
                           : is_broken             ? CG_ASKED_BROKEN
                           : is_late               ? CG_ASKED_LATE
                                                   : CG_ASKED;
    count_errors(w->silence.runtime, n_errors,
                 asked == CG_ASKED_LATE && w->is_dropped ? CG_OK : status);
    return asked;
}

/* Whether a prompt is asked for further after a call: one that was late leaves time to some. */
static bool goes_on(const cg_prefix *p, const waiting *w, cg_asked asked, cg_status status)
{
    return status == CG_OK || (asked == CG_ASKED_LATE && left_ns(p) > 0 &&
                               left_ns(p) >= least_ns(w->silence.silence_ns));
}

/* Whether a chunk that is not asked for is worth the risk: what a far store answers slowly. */
static bool answers_few(const cachegen *c, const cg_asking_width *width)
{
    return cg_handle_is_far(c) && (c->is_sshfs || was_slow(width, cg_now_ns()));
}

/* The coarse look, for prefixes[n] that want it. */
static cg_asked look_ahead(const cg_asking_width *width, cg_io *io, cg_prefix *const *prefixes,
                           size_t n, uint64_t silence_ns)
{
    cg_runtime *rt = prefixes[0]->runtime;
    const size_t room = n * CG_PREFIX_MAX_PROBES;
    uint32_t *indices = malloc(room * sizeof *indices), *counts = malloc(n * sizeof *counts);
    cg_key *keys = malloc(room * sizeof *keys);
    bool *there = calloc(room, sizeof *there);
    uint32_t n_keys = 0, n_errors = 0;
    const uint64_t began_ns = cg_now_ns();
    cg_status status = CG_ERR_NO_MEMORY;
    waiting w = wait_for(prefixes, n, silence_ns);
    if (indices != NULL && counts != NULL && keys != NULL && there != NULL) {
        size_t n_in = 0;
        for (; n_in < n && (n_in == 0 || n_keys < width->n_chunks); n_in++) {
            counts[n_in] = cg_prefix_probes(prefixes[n_in], indices + n_keys);
            for (uint32_t k = 0; k < counts[n_in]; k++, n_keys++)
                keys[n_keys] = prefixes[n_in]->keys[indices[n_keys]];
        }
        n = n_in;
        w = wait_for(prefixes, n, silence_ns);
        status = cg_store_probe(rt->connector->store, io, keys, n_keys,
                                &(cg_store_patience){until_ns, &w}, there, &n_errors);
    }
    const cg_asked asked = conclude(&w, io, status, n_errors, cg_now_ns() - began_ns);
    const cg_store_entry none = {0};
    const bool is_sparse = answers_few(rt->connector, width);
    for (size_t i = 0, at = 0; i < n && status == CG_OK; at += counts[i], i++) {
        cg_prefix *p = prefixes[i];
        uint32_t reach = p->reach, end = p->end;
        pthread_mutex_lock(&rt->lock);
        /* From the far end, so that the nearest that is missing is what stays. */
        for (size_t k = at + counts[i]; k-- > at;)
            if (!there[k]) {
                end = indices[k];
                if (n_errors == 0)
                    cg_chunk_memory_put(rt->chunk_memory, &keys[k], p->accepted, &none,
                                        cg_now_ns());
            }
        pthread_mutex_unlock(&rt->lock);
        for (size_t k = at; k < at + counts[i] && indices[k] < end; k++)
            reach = indices[k] + 1;
        const cg_status wanted = cg_prefix_reaches(p, reach, end, is_sparse);
        if (wanted != CG_OK)
            count_errors(rt, 0, wanted);
    }
    for (size_t i = 0; i < n; i++)
        if (!goes_on(prefixes[i], &w, asked, status))
            cg_prefix_give_up(prefixes[i]);
    free(indices);
    free(counts);
    free(keys);
    free(there);
    return asked;
}

/* A chunk that a prompt wants, and its number among those that are asked for. */
typedef struct question {
    cg_prefix *prefix;
    uint32_t index; /* in wanted */
    uint32_t number;
} question;

/* What is asked for at once: of each chunk that several prompts want, one question. */
typedef struct batch {
    question *questions;
    cg_key *keys; /* [n_keys], each once */
    cg_store_entry *entries;
    uint32_t *table; /* [mask + 1]: by hash of the key its number plus one; 0: free */
    size_t n_questions, n_keys, mask;
} batch;

static void batch_destroy(batch *b)
{
    free(b->questions);
    free(b->keys);
    free(b->entries);
    free(b->table);
}

static bool batch_init(batch *b, size_t most)
{
    size_t n_places = 64;
    while (n_places < 2 * most)
        n_places *= 2;
    *b = (batch){.questions = malloc(most * sizeof *b->questions),
                 .keys = malloc(most * sizeof *b->keys),
                 .entries = calloc(most, sizeof *b->entries),
                 .table = calloc(n_places, sizeof *b->table),
                 .mask = n_places - 1};
    return b->questions != NULL && b->keys != NULL && b->entries != NULL && b->table != NULL;
}

/* A key's place, which is free or its own. Keys are hashes. */
static uint32_t *place_of(const batch *b, const cg_key *key)
{
    uint64_t hash;
    memcpy(&hash, key->bytes, sizeof hash);
    size_t at = hash & b->mask;
    while (b->table[at] != 0 &&
           memcmp(b->keys[b->table[at] - 1].bytes, key->bytes, sizeof key->bytes) != 0)
        at = (at + 1) & b->mask;
    return &b->table[at];
}

/* How many of the chunks that p lacks are not asked for yet. */
static size_t n_new(const batch *b, const cg_prefix *p)
{
    size_t n = 0;
    for (uint32_t i = 0; i < p->n_wanted; i++)
        n += p->known[i].probed == 0 && cg_prefix_asks(p, i) && *place_of(b, &p->wanted[i]) == 0;
    return n;
}

static void batch_add(batch *b, cg_prefix *p)
{
    for (uint32_t i = 0; i < p->n_wanted; i++) {
        if (p->known[i].probed != 0 || !cg_prefix_asks(p, i))
            continue;
        uint32_t *place = place_of(b, &p->wanted[i]);
        if (*place == 0) {
            b->keys[b->n_keys++] = p->wanted[i];
            *place = (uint32_t)b->n_keys;
        }
        b->questions[b->n_questions++] = (question){p, i, *place - 1};
    }
}

/* With what of the prompts fits. Returns how many of them that is; they come to the front. */
static size_t batch_fill(batch *b, cg_prefix **prefixes, size_t n, uint32_t width)
{
    size_t n_in = 0;
    for (size_t i = 0; i < n; i++) {
        cg_prefix *p = prefixes[i];
        /* One call asks for the same levels of all. */
        if (n_in > 0 && (p->accepted != prefixes[0]->accepted || b->n_keys + n_new(b, p) > width))
            continue;
        batch_add(b, p);
        prefixes[n_in++] = p;
    }
    return n_in;
}

/* Chunks and tails, for prefixes[n] that want some. */
static cg_asked ask_chunks(cg_asking_width *width, cg_io *io, cg_prefix **prefixes, size_t n,
                           uint64_t silence_ns)
{
    cg_runtime *rt = prefixes[0]->runtime;
    const cachegen *c = rt->connector;
    const uint8_t accepted = prefixes[0]->accepted;
    const uint64_t began_ns = cg_now_ns();
    cg_status status = CG_ERR_NO_MEMORY;
    uint32_t n_errors = 0;
    size_t most = 0, n_in = 1;
    waiting w = wait_for(prefixes, n, silence_ns);
    batch b;
    for (size_t i = 0; i < n; i++)
        most += prefixes[i]->n_wanted;
    const bool has_memory = batch_init(&b, most);
    bool may_keep = false;
    if (has_memory) {
        n_in = batch_fill(&b, prefixes, n, width->n_chunks);
        keeping kept = {rt, b.keys};
        const cg_store_keeper keeper = {keep_file, &kept, keepable(rt)};
        may_keep = keeper.n_most > 0;
        w = wait_for(prefixes, n_in, silence_ns);
        status = cg_store_lookup_open(c->store, io, b.keys, b.n_keys, cg_model_profile(&c->model),
                                      accepted, &(cg_store_patience){until_ns, &w},
                                      may_keep ? &keeper : NULL, b.entries, &n_errors);
    }
    const uint64_t took_ns = cg_now_ns() - began_ns;
    const cg_asked asked = conclude(&w, io, status, n_errors, took_ns);
    const bool is_late = status == CG_ERR_TIMED_OUT && (w.is_silent || !w.is_dropped);
    if (b.n_keys > 0 && (is_late || status == CG_OK))
        cg_asking_learn(width, (uint32_t)b.n_keys, is_late ? UINT64_MAX : took_ns, c->latency_ns,
                        began_ns + took_ns);
    for (size_t i = 0; i < b.n_questions; i++) {
        const question *q = &b.questions[i];
        cg_chunk_memory_entry *known = &q->prefix->known[q->index];
        known->entry = b.entries[q->number];
        /* What was not answered in time is asked again, if there is time for that. */
        const bool is_open = status != CG_OK && known->entry.levels == 0;
        known->probed = is_open && goes_on(q->prefix, &w, asked, status) ? 0 : accepted;
    }
    pthread_mutex_lock(&rt->lock);
    /* After errors "not there" may be wrong: only what was seen is remembered. */
    for (size_t i = 0; i < b.n_keys; i++)
        if ((status == CG_OK && n_errors == 0) || b.entries[i].levels != 0)
            cg_chunk_memory_put(rt->chunk_memory, &b.keys[i],
                                status == CG_OK ? accepted : b.entries[i].levels, &b.entries[i],
                                cg_now_ns());
    if (may_keep)
        cg_runtime_wake_reader(rt); /* which closes what nobody has used for a while */
    pthread_mutex_unlock(&rt->lock);
    for (size_t i = 0; i < n_in; i++)
        if (!goes_on(prefixes[i], &w, asked, status))
            cg_prefix_give_up(prefixes[i]); /* with the answers that came in time */
    batch_destroy(&b);
    return asked;
}

/* Those of prefixes[n] that want an answer, in the first stage or in another one. */
static size_t choose(cg_prefix *const *prefixes, size_t n, bool is_first_stage, cg_prefix **out)
{
    size_t n_out = 0;
    for (size_t i = 0; i < n; i++) {
        const cg_status status = cg_prefix_recall(prefixes[i]);
        if (status == CG_ERR_AGAIN && (prefixes[i]->stage == CG_PREFIX_END) == is_first_stage)
            out[n_out++] = prefixes[i];
        else if (status == CG_ERR_NO_MEMORY)
            count_errors(prefixes[i]->runtime, 0, status);
    }
    return n_out;
}

cg_asked cg_asking_ask(cg_asking_width *width, cg_io *io, cg_prefix *const *prefixes, size_t n,
                       uint64_t silence_ns)
{
    cg_prefix *chosen[CG_ASKING_PROMPTS];
    cg_asked asked = CG_ASKED;
    size_t n_chosen = choose(prefixes, n, true, chosen);
    if (n_chosen > 0)
        asked = look_ahead(width, io, chosen, n_chosen, silence_ns);
    if (asked == CG_ASKED && (n_chosen = choose(prefixes, n, false, chosen)) > 0)
        asked = ask_chunks(width, io, chosen, n_chosen, silence_ns);
    choose(prefixes, n, false, chosen); /* what is remembered may be all that is lacking */
    return asked;
}

bool cg_asking_is_silent(cg_runtime *rt, cg_io *io, uint64_t silence_ns)
{
    const cg_store *store = rt->connector->store;
    const uint64_t begun_ns = cg_now_ns();
    waiting w = {.silence = {.runtime = rt, .silence_ns = silence_ns}, .most_ns = UINT64_MAX / 2};
    cg_io_completion answer;
    size_t n = 0;
    cg_status status = cg_store_ask(store, io, 0);
    while (status == CG_OK && n == 0) {
        const uint64_t end_ns = until_ns(&w, begun_ns), now_ns = cg_now_ns();
        if (now_ns >= end_ns)
            return true;
        status = cg_io_wait(io, end_ns - now_ns, &answer, 1, &n);
    }
    if (n > 0)
        cg_store_note(store, &answer);
    return false;
}
