#include "connector/fetch_plan.h"

#include "connector/fetch_items.h"

#include <stdlib.h>

enum {
    MANY_ITEMS = 64, /* with more than so many chunks a plan stands for a while */
    STANDS_MS = 5,
    MOST_ITEMS = 2048,  /* with more it stands longer */
    STANDS_ITEMS = 128, /* by STANDS_MS for each so many */
};

static uint64_t smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

cg_status cg_fetch_plan_init(cg_fetch_plan *plan, uint32_t depth, uint64_t staging_bytes,
                             uint64_t read_timeout_ns)
{
    *plan = (cg_fetch_plan){.window.depth = depth,
                            .staging_bytes = staging_bytes,
                            .read_timeout_ns = read_timeout_ns,
                            .check_ns = UINT64_MAX,
                            .reads = calloc(depth, sizeof *plan->reads)};
    return plan->reads != NULL ? CG_OK : CG_ERR_NO_MEMORY;
}

void cg_fetch_plan_destroy(cg_fetch_plan *plan)
{
    cg_extents_plan_destroy(&plan->planned);
    cg_extents_plan_destroy(&plan->hoped);
    free(plan->items);
    free(plan->refs);
    free(plan->reads);
    *plan = (cg_fetch_plan){0};
}

/* Room for n chunks. */
static bool reserve(cg_fetch_plan *plan, size_t n)
{
    if (n > plan->capacity) {
        cg_extents_chunk *items = realloc(plan->items, n * sizeof *items);
        plan->items = items != NULL ? items : plan->items;
        cg_fetch_ref *refs = realloc(plan->refs, n * sizeof *refs);
        plan->refs = refs != NULL ? refs : plan->refs;
        if (items == NULL || refs == NULL)
            return false;
        plan->capacity = n;
    }
    return cg_extents_plan_reserve(&plan->planned, n) && cg_extents_plan_reserve(&plan->hoped, n);
}

static size_t chunks_of_all(const cg_fetch_plan *plan)
{
    size_t n = 0;
    for (const cg_fetch *fetch = plan->fetches; fetch != NULL; fetch = fetch->next)
        n += fetch->n_chunks;
    return n;
}

/* How much each chunk counts: a plan asks for all of them, and the logarithms take a while. */
static void weigh(cg_fetch *fetch)
{
    uint32_t n_behind = 0;
    for (uint32_t i = fetch->end; i-- > fetch->first;) {
        const uint32_t n_tokens = fetch->sizes[i].n_tokens;
        fetch->sensitivities[i] = cg_quality_sensitivity(fetch->quality, n_behind, n_tokens);
        n_behind += n_tokens;
    }
}

cg_status cg_fetch_plan_add(cg_fetch_plan *plan, cg_fetch *fetch)
{
    /* Room for all chunks, so that planning never lacks memory. While a plan is made the room stays
     * where it is: the next plan asks for it. */
    if (!plan->is_making && !reserve(plan, chunks_of_all(plan) + fetch->n_chunks + 1))
        return CG_ERR_NO_MEMORY;
    weigh(fetch);
    cg_fetch **at = &plan->fetches;
    while (*at != NULL && (*at)->deadline_ns <= fetch->deadline_ns)
        at = &(*at)->next;
    fetch->next = *at;
    *at = fetch;
    plan->n_added++;
    plan->is_stale = plan->members_changed = true;
    plan->check_ns = 0;
    return CG_OK;
}

/* Of what is being planned. */
static void forget_fetch(cg_fetch_plan *plan, const cg_fetch *fetch)
{
    for (size_t i = 0; i < plan->n_items; i++)
        if (plan->refs[i].fetch == fetch)
            plan->refs[i].fetch = NULL;
}

void cg_fetch_plan_remove(cg_fetch_plan *plan, cg_fetch *fetch)
{
    /* What was planned refers to it, and it may be gone before the next plan. */
    plan->is_stale = plan->members_changed = true;
    if (plan->is_making)
        forget_fetch(plan, fetch);
    else
        plan->n_items = plan->next_extent = plan->planned.n_extents = 0;
    for (cg_fetch **at = &plan->fetches; *at != NULL; at = &(*at)->next)
        if (*at == fetch) {
            *at = fetch->next;
            break;
        }
    /* Nobody ends it any more: what hangs of it is given up at its end all the same. */
    cg_fetch_end_reads(plan, fetch, fetch->ends_at_ns);
    for (uint32_t i = 0; i < fetch->n_chunks; i++)
        if (fetch->chunks[i].state != CG_FETCH_DECODING) {
            fetch->dropped_bytes += fetch->chunks[i].held_bytes;
            cg_fetch_let_go(plan, fetch, &fetch->chunks[i]);
            fetch->chunks[i].held_bytes = 0;
        }
}

void cg_fetch_plan_ask(cg_fetch_plan *plan, uint64_t asked_tokens)
{
    plan->is_stale = plan->is_stale || asked_tokens != plan->asked_tokens;
    plan->asked_tokens = asked_tokens;
}

/* Whether the last plan leaves time for what was expected then. */
static bool leaves_time(const cg_fetch_plan *plan)
{
    return plan->planned_at_ns < plan->expected_until_ns;
}

void cg_fetch_plan_expect(cg_fetch_plan *plan, uint64_t expected_tokens, uint64_t until_ns)
{
    const uint64_t planned_tokens = leaves_time(plan) ? plan->expected_tokens : 0;
    plan->is_stale = plan->is_stale || expected_tokens != planned_tokens;
    plan->expected_tokens = expected_tokens;
    plan->expected_until_ns = expected_tokens > 0 ? until_ns : 0;
}

/* Loads wait for each other's planning. How long one plan takes is bounded by
 * CG_EXTENTS_MOST_REFINED, but for a few passes over all chunks. */
uint64_t cg_fetch_stands_ns(const cg_fetch_plan *plan)
{
    const size_t n_more = plan->n_items > MOST_ITEMS ? plan->n_items - MOST_ITEMS : 0;
    if (plan->n_items <= MANY_ITEMS)
        return 0;
    return (1 + n_more / STANDS_ITEMS) * STANDS_MS * UINT64_C(1000000);
}

/* There may be something to read that the last plan does not have. */
static bool has_run_out(const cg_fetch_plan *plan)
{
    return plan->is_stale && plan->next_extent >= plan->planned.n_extents;
}

/* Whether the last plan leaves time for what is not expected any more. */
static bool has_lapsed(const cg_fetch_plan *plan, uint64_t now_ns)
{
    return leaves_time(plan) && now_ns >= plan->expected_until_ns;
}

static bool plan_stands(const cg_fetch_plan *plan, uint64_t now_ns)
{
    if (has_lapsed(plan, now_ns))
        return false;
    if (!plan->is_stale)
        return true;
    return !has_run_out(plan) && !plan->members_changed &&
           now_ns < plan->planned_at_ns + cg_fetch_stands_ns(plan);
}

static void begin_plan(cg_fetch_plan *plan, const cg_speeds *speeds, uint64_t now_ns)
{
    cg_fetch_window_note_idle(&plan->window, speeds, plan->alive_ns, now_ns);
    cg_fetch_set_input(plan, speeds, now_ns);
    plan->planned_at_ns = now_ns;
    plan->is_stale = plan->members_changed = false;
}

/* Of what cg_fetch_set_input() set alone. */
void cg_fetch_plan_make(cg_fetch_plan *plan)
{
    cg_extents_input input = plan->input;
    cg_extents_plan_make(&plan->planned, &input);
    /* The same for a faster link, and if nobody else comes: what even then would not be read is not
     * waited for. Where nothing may be refined it is the same plan. */
    plan->any_open = false;
    for (size_t i = 0; i < plan->n_items && !plan->any_open; i++)
        plan->any_open = !plan->items[i].is_closed;
    input.link_bps *= CG_FETCH_HOPE;
    input.expected_bytes = input.expected_decode_ns = 0;
    if (plan->any_open)
        cg_extents_plan_make(&plan->hoped, &input);
}

/* Whether an item of a plan is one of those that only a later plan may refine. */
static bool is_put_off(const cg_fetch_plan *plan, size_t i)
{
    const cg_extents_chunk *item = &plan->items[i];
    if (i < CG_EXTENTS_MOST_REFINED || item->is_closed || !item->is_nested || plan->hoped.late[i])
        return false;
    for (uint8_t level = CG_L1; level < plan->planned.levels[i]; level++)
        if (item->bytes[level] > 0)
            return true;
    return false;
}

void cg_fetch_plan_end(cg_fetch_plan *plan)
{
    const uint8_t *hoped = plan->any_open ? plan->hoped.levels : plan->planned.levels;
    for (size_t i = 0; i < plan->n_items; i++) {
        const cg_fetch_ref *ref = &plan->refs[i];
        if (ref->fetch == NULL)
            continue; /* removed since */
        cg_fetch_chunk *chunk = &ref->fetch->chunks[ref->chunk_index];
        chunk->planned = plan->planned.levels[i];
        chunk->hoped = plan->is_link_known ? hoped[i] : CG_L0; /* unknown: anything */
        chunk->is_put_off = is_put_off(plan, i);
    }
    for (size_t i = 0; i < plan->planned.n_extents; i++) {
        const cg_fetch_ref *ref = &plan->refs[plan->planned.extents[i].chunk];
        if (ref->fetch != NULL && !ref->fetch->chunks[ref->chunk_index].is_cut)
            ref->fetch->has_no_reads_left = false;
    }
    plan->next_extent = 0;
    plan->is_making = false;
}

/* Whether the owner makes the plan, by cg_fetch_plan_begin() to _end(). */
static bool is_apart(const cg_fetch_plan *plan)
{
    return plan->may_be_apart && chunks_of_all(plan) > MANY_ITEMS;
}

/* Plans anew, unless nothing has changed, or the owner does. */
static void refresh(cg_fetch_plan *plan, const cg_speeds *speeds, uint64_t now_ns)
{
    if (is_apart(plan) || plan_stands(plan, now_ns))
        return;
    begin_plan(plan, speeds, now_ns);
    cg_fetch_plan_make(plan);
    cg_fetch_plan_end(plan);
}

bool cg_fetch_plan_begin(cg_fetch_plan *plan, const cg_speeds *speeds, uint64_t now_ns)
{
    plan->may_be_apart = true;
    if (!is_apart(plan) || plan_stands(plan, now_ns))
        return false;
    reserve(plan, chunks_of_all(plan) +
                      1); /* for what came while the last plan was made; else for as many as fit */
    begin_plan(plan, speeds, now_ns);
    plan->is_making = true;
    return true;
}

bool cg_fetch_plan_is_due(const cg_fetch_plan *plan)
{
    return is_apart(plan) && has_run_out(plan);
}

const cg_fetch_read *cg_fetch_next_read(cg_fetch_plan *plan, cg_speeds *speeds, uint64_t now_ns)
{
    plan->must_free_bytes = 0;
    cg_fetch_window_note_idle(&plan->window, speeds, plan->alive_ns, now_ns);
    plan->window.is_expecting = cg_fetch_expected_tokens(plan, now_ns) > 0;
    refresh(plan, speeds, now_ns);
    const double link_bps = cg_fetch_measured_bps(speeds);
    cg_fetch_extent extent = cg_fetch_next_extent(plan, speeds, link_bps);
    /* A plan that stood may have nothing more to read where one of now would. */
    if (extent.ref.fetch == NULL && plan->is_stale) {
        refresh(plan, speeds, now_ns);
        extent = cg_fetch_next_extent(plan, speeds, link_bps);
    }
    return extent.ref.fetch != NULL ? cg_fetch_begin_read(plan, &extent, speeds, link_bps, now_ns)
                                    : NULL;
}

static bool is_final(const cg_fetch_plan *plan, const cg_fetch *fetch, uint32_t index,
                     uint64_t now_ns)
{
    const cg_fetch_chunk *chunk = &fetch->chunks[index];
    const uint8_t level = cg_fetch_level_in(fetch, index, chunk->arrived_bytes);
    /* The time is up, or the memory: what has arrived must do, but for a file that is only good as
     * a whole. */
    if (plan->must_free_bytes > 0 || now_ns >= fetch->decode_at_ns || !cg_fetch_is_anytime(fetch))
        return chunk->n_reads == 0 || cg_fetch_is_anytime(fetch);
    if (chunk->is_cut)
        return chunk->n_reads == 0 || chunk->arrived_bytes >= chunk->good_bytes;
    if (chunk->is_put_off)
        return false;
    /* As fine as is planned and can be hoped for; or nothing more comes for all of the fetch, and
     * not only because others are expected, who may not come. */
    return (level <= chunk->planned && level <= chunk->hoped) ||
           (fetch->has_no_reads_left && !cg_fetch_is_reading(plan, fetch) &&
            (level <= chunk->hoped || !(plan->input.expected_bytes > 0)));
}

/* What has arrived of a chunk behind the level at which it is decoded, without the rest of the page
 * in which that ends. */
static uint64_t bytes_behind(const cg_fetch *fetch, uint32_t index)
{
    const cg_fetch_chunk *chunk = &fetch->chunks[index];
    const uint64_t bytes = fetch->sizes[index].bytes[chunk->level],
                   n_pages = (bytes + CG_FETCH_PAGE_BYTES - 1) / CG_FETCH_PAGE_BYTES;
    return chunk->held_bytes - smaller(chunk->held_bytes, n_pages * CG_FETCH_PAGE_BYTES);
}

cg_fetch *cg_fetch_next_decode(cg_fetch_plan *plan, const cg_speeds *speeds, uint64_t now_ns,
                               uint32_t *chunk_index_out)
{
    refresh(plan, speeds, now_ns);
    for (cg_fetch *fetch = plan->fetches; fetch != NULL; fetch = fetch->next)
        for (uint32_t i = cg_fetch_first_held(fetch); i < fetch->wanted_end; i++) {
            cg_fetch_chunk *chunk = &fetch->chunks[i];
            if (chunk->state != CG_FETCH_READING || !cg_fetch_is_decodable(fetch, i) ||
                !is_final(plan, fetch, i, now_ns))
                continue;
            chunk->level = cg_fetch_level_in(fetch, i, chunk->arrived_bytes);
            chunk->state = CG_FETCH_DECODING;
            fetch->dropped_bytes += bytes_behind(fetch, i);
            fetch->todo.is_counted = false;
            cg_fetch_let_go(plan, fetch, chunk);
            plan->bytes_decoding += chunk->held_bytes;
            plan->must_free_bytes -= smaller(plan->must_free_bytes, chunk->held_bytes);
            plan->is_stale = true;
            *chunk_index_out = i;
            return fetch;
        }
    return NULL;
}

bool cg_fetch_decode_ended(cg_fetch_plan *plan, cg_fetch *fetch, uint32_t chunk_index,
                           bool has_succeeded)
{
    cg_fetch_chunk *chunk = &fetch->chunks[chunk_index];
    plan->bytes_decoding -= chunk->held_bytes;
    plan->is_stale = true;
    fetch->todo.is_counted = false;
    chunk->held_bytes = 0;
    chunk->state = CG_FETCH_FAILED;
    if (!has_succeeded || !cg_fetch_wants(fetch, chunk_index))
        return false;
    chunk->state = CG_FETCH_DONE;
    while (fetch->first + fetch->n_whole < fetch->end &&
           fetch->chunks[fetch->first + fetch->n_whole].state == CG_FETCH_DONE)
        fetch->n_whole++;
    return true;
}

uint64_t cg_fetch_wake_ns(const cg_fetch_plan *plan)
{
    uint64_t wake_ns = plan->window.n_reading > 0 ? plan->check_ns : UINT64_MAX;
    if (plan->fetches != NULL && leaves_time(plan))
        wake_ns = smaller(wake_ns, plan->expected_until_ns);
    for (const cg_fetch *fetch = plan->fetches; fetch != NULL; fetch = fetch->next) {
        wake_ns = fetch->ends_at_ns < wake_ns ? fetch->ends_at_ns : wake_ns;
        const uint64_t silent_ns = cg_fetch_silent_ns(plan, fetch);
        wake_ns = silent_ns < wake_ns ? silent_ns : wake_ns;
        for (uint32_t i = cg_fetch_first_held(fetch);
             i < fetch->wanted_end && fetch->decode_at_ns < wake_ns; i++)
            if (fetch->chunks[i].state == CG_FETCH_READING && cg_fetch_is_decodable(fetch, i))
                wake_ns = fetch->decode_at_ns;
    }
    for (uint32_t i = 0; i < plan->window.depth; i++) {
        const cg_fetch_read *read = &plan->reads[i];
        if (read->id != 0 && read->give_up_ns < wake_ns)
            wake_ns = read->give_up_ns;
    }
    return wake_ns;
}
