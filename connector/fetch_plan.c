#include "connector/fetch_plan.h"

#include "codec/chunk.h"
#include "connector/quality.h"

#include <stdlib.h>
#include <string.h>

enum {
    MANY_ITEMS = 64, /* with more than so many chunks a plan stands for a while */
    STANDS_MS = 5,
    MOST_ITEMS = 2048,  /* with more it stands longer */
    STANDS_ITEMS = 128, /* by STANDS_MS for each so many */
    DECODE_SLACK_MS = 3,
    SILENT_MS = 500, /* a load that is late may wait so long for the next bytes */
};
static const double MOST_QUEUED_NS = 3600e9; /* an hour: keeps the sum below within its type */
static const double DECODE_SLACK = 1.1;      /* on what decoding should take */
static const double UNTRIED_DOUBT = 10;      /* what a link that was idle may be slower */
static const double HOPE = 2;                /* the link may become so many times faster */
static const double QUIET_NS = 50e6;         /* an answer may take so long, and two round trips */
static const double STALL = 2; /* a link that is quiet for so many times what is under way */

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

/* For so many chunks. */
static size_t room(const cg_fetch_plan *plan)
{
    const size_t n = plan->planned.capacity < plan->hoped.capacity ? plan->planned.capacity
                                                                   : plan->hoped.capacity;
    return plan->capacity < n ? plan->capacity : n;
}

static size_t chunks_of_all(const cg_fetch_plan *plan)
{
    size_t n = 0;
    for (const cg_fetch *fetch = plan->fetches; fetch != NULL; fetch = fetch->next)
        n += fetch->n_chunks;
    return n;
}

cg_status cg_fetch_plan_add(cg_fetch_plan *plan, cg_fetch *fetch)
{
    /* Room for all chunks, so that planning never lacks memory. While a plan is made the room stays
     * where it is: the next plan asks for it. */
    if (!plan->is_making && !reserve(plan, chunks_of_all(plan) + fetch->n_chunks + 1))
        return CG_ERR_NO_MEMORY;
    cg_fetch **at = &plan->fetches;
    while (*at != NULL && (*at)->deadline_ns <= fetch->deadline_ns)
        at = &(*at)->next;
    fetch->next = *at;
    *at = fetch;
    plan->n_added++;
    plan->is_stale = plan->has_others = true;
    plan->check_ns = 0;
    return CG_OK;
}

/* The chunk's bytes are not held any more. */
static void let_go(cg_fetch_plan *plan, cg_fetch *fetch, const cg_fetch_chunk *chunk)
{
    plan->bytes_held -= chunk->held_bytes;
    fetch->bytes_held -= chunk->held_bytes;
}

/* Of what is being planned. */
static void forget_fetch(cg_fetch_plan *plan, const cg_fetch *fetch)
{
    for (size_t i = 0; i < plan->n_items; i++)
        if (plan->refs[i].fetch == fetch)
            plan->refs[i].fetch = NULL;
}

void cg_fetch_end_reads(cg_fetch_plan *plan, const cg_fetch *fetch, uint64_t until_ns)
{
    for (uint32_t i = 0; i < plan->window.depth; i++) {
        cg_fetch_read *read = &plan->reads[i];
        const bool waits = read->give_up_ns > until_ns && read->give_up_ns < UINT64_MAX;
        if (read->id != 0 && read->fetch == fetch && waits)
            read->give_up_ns = until_ns;
    }
}

void cg_fetch_plan_remove(cg_fetch_plan *plan, cg_fetch *fetch)
{
    /* What was planned refers to it, and it may be gone before the next plan. */
    plan->is_stale = plan->has_others = true;
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
            let_go(plan, fetch, &fetch->chunks[i]);
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

static double expected_tokens(const cg_fetch_plan *plan, uint64_t now_ns)
{
    const bool is_told = now_ns < plan->expected_until_ns;
    return (double)plan->asked_tokens + (is_told ? (double)plan->expected_tokens : 0);
}

/* For how long nothing has come although something should. What is asked for soon after the last
 * end is what a link that is busy is always asked for. What is asked for later may follow a read
 * that hangs, so it has its time. */
static double quiet_ns(const cg_fetch_plan *plan, uint64_t now_ns)
{
    const uint64_t soon_ns = cg_fetch_add_ns(plan->quiet_since_ns, (uint64_t)QUIET_NS);
    uint64_t since_ns = plan->quiet_since_ns;
    if (plan->window.n_reading == 0)
        return 0;
    for (uint32_t i = 0; i < plan->window.depth; i++) {
        const cg_fetch_read *read = &plan->reads[i];
        if (read->id != 0 && read->submitted_ns > soon_ns && read->submitted_ns > since_ns)
            since_ns = read->submitted_ns;
    }
    return now_ns > since_ns ? (double)(now_ns - since_ns) : 0;
}

double cg_fetch_link_bps(const cg_fetch_plan *plan, const cg_speeds *speeds, uint64_t now_ns,
                         bool *is_bound_out)
{
    const double bps = cg_estimator_bps(&speeds->link), quiet = quiet_ns(plan, now_ns);
    const double bits = 8 * (double)plan->window.bytes_reading;
    *is_bound_out = false;
    if (quiet <= QUIET_NS + 2 * speeds->latency_ns || (bps > 0 && quiet * bps < STALL * bits * 1e9))
        return bps;
    /* Had the link done more, what is under way would have come. */
    const double most_bps = bits * 1e9 / quiet;
    *is_bound_out = true;
    return bps > 0 && bps < most_bps ? bps : most_bps;
}

uint64_t cg_fetch_silent_ns(const cg_fetch_plan *plan, const cg_fetch *fetch)
{
    if (plan->window.n_reading == 0 || fetch->silent_from_ns == UINT64_MAX ||
        cg_fetch_has_all(fetch))
        return UINT64_MAX;
    return cg_fetch_add_ns(plan->alive_ns > fetch->silent_from_ns ? plan->alive_ns
                                                                  : fetch->silent_from_ns,
                           plan->patience_ns);
}

double cg_fetch_rest_ns(const cg_fetch *fetch, uint32_t chunk_index, const cg_speeds *speeds)
{
    double tokens = 0;
    for (uint32_t i = chunk_index; i < fetch->end; i++)
        tokens += fetch->sizes[i].n_tokens;
    return cg_prefill_ns(cg_speeds_recompute(speeds), tokens, fetch->end_token);
}

double cg_fetch_lost_ns(const cg_fetch *fetch, const cg_speeds *speeds)
{
    return cg_fetch_rest_ns(fetch, fetch->first_failed, speeds);
}

uint64_t cg_fetch_due_ns(const cg_fetch *fetch, const cg_speeds *speeds)
{
    const double ns = cg_fetch_lost_ns(fetch, speeds);
    return ns < (double)fetch->deadline_ns ? fetch->deadline_ns - (uint64_t)ns : 0;
}

/* ---- what the planner is asked ---- */

static cg_fetch *first_of(cg_fetch *fetch, bool is_late)
{
    while (fetch != NULL && fetch->is_late != is_late)
        fetch = fetch->next;
    return fetch;
}

cg_fetch *cg_fetch_after(const cg_fetch_plan *plan, const cg_fetch *fetch)
{
    const bool is_late = fetch != NULL && fetch->is_late;
    cg_fetch *after = first_of(fetch != NULL ? fetch->next : plan->fetches, is_late);
    return after != NULL || is_late ? after : first_of(plan->fetches, true);
}

/* A decoder that works behind the reader. */
typedef struct pipeline {
    double read_ns, decoded_ns;
} pipeline;

/* What must arrive of a fetch is read and decoded behind what the pipeline does before. */
static void add_fetch(pipeline *p, const cg_fetch *fetch, const cg_speeds *speeds,
                      double ns_per_byte)
{
    for (uint32_t i = fetch->first + fetch->n_whole; i < fetch->first_failed; i++) {
        const cg_fetch_chunk *chunk = &fetch->chunks[i];
        if (chunk->state > CG_FETCH_DECODING)
            continue;
        const uint8_t level =
            chunk->state == CG_FETCH_DECODING ? chunk->level : cg_fetch_must_level(fetch, i);
        const uint64_t bytes = fetch->sizes[i].bytes[level];
        if (bytes > chunk->asked_bytes)
            p->read_ns += (double)(bytes - chunk->asked_bytes) * ns_per_byte;
        if (p->decoded_ns < p->read_ns)
            p->decoded_ns = p->read_ns;
        p->decoded_ns += cg_speeds_decode_chunk(speeds, level, fetch->sizes[i].n_tokens, bytes);
    }
}

/* Whether it has a deadline to be late for: whatever its levels are, it must not delay others. */
static bool can_be_late(const cg_fetch *fetch)
{
    return fetch->policy == CG_POLICY_TTFT_BUDGET;
}

/* Marks the fetches that will be late even if the link is HOPE times as fast. They go last, so they
 * delay none of those that are looked at after them. Behind the last that can be, nothing is added
 * up. */
static void find_late(cg_fetch_plan *plan, const cg_speeds *speeds, double link_bps,
                      uint64_t now_ns)
{
    const double ns_per_byte = link_bps > 0 ? 8e9 / (HOPE * link_bps) : 0;
    pipeline p = {.read_ns =
                      ((double)plan->window.bytes_reading + speeds->others.bytes) * ns_per_byte};
    const cg_fetch *last = NULL;
    for (cg_fetch *fetch = plan->fetches; fetch != NULL; fetch = fetch->next) {
        last = can_be_late(fetch) ? fetch : last;
        fetch->is_late = false;
    }
    for (cg_fetch *fetch = last != NULL ? plan->fetches : NULL; fetch != NULL;
         fetch = fetch != last ? fetch->next : NULL) {
        pipeline with = p;
        add_fetch(&with, fetch, speeds, ns_per_byte);
        fetch->is_late = can_be_late(fetch) &&
                         with.decoded_ns > cg_fetch_left_ns(cg_fetch_due_ns(fetch, speeds), now_ns);
        if (!fetch->is_late && !fetch->is_cancelled)
            p = with;
    }
}

/* Levels of the chunks that a fetch has not begun, where they are the controller's. How much is
 * loaded was decided before, so the controller gets no speed of recomputing. */
static void decide_levels(cg_fetch *fetch, const cg_speeds *speeds, uint64_t now_ns)
{
    if (fetch->has_fixed_level ||
        (fetch->is_decided && fetch->decided_generation == speeds->link.generation))
        return;
    const double link_bps = fetch->policy == CG_POLICY_PAPER ? cg_estimator_last_bps(&speeds->link)
                                                             : cg_estimator_bps(&speeds->link);
    uint32_t i = fetch->first;
    while (i < fetch->end && fetch->chunks[i].state != CG_FETCH_WAITING)
        i++;
    if (!(link_bps > 0))
        return;
    cg_controller_input input = {.policy = fetch->policy,
                                 .chunks = fetch->sizes + i,
                                 .n_chunks = fetch->end - i,
                                 .budget_ns =
                                     fetch->deadline_ns > now_ns ? fetch->deadline_ns - now_ns : 0,
                                 .link_bps = link_bps};
    cg_speeds_decode(speeds, input.decode_ns_per_token);
    cg_controller_decide(&input, fetch->levels + i);
    fetch->is_decided = true;
    fetch->decided_generation = speeds->link.generation;
}

/* n_behind: tokens of the load behind the chunk. left: until it must be done, in ns. */
static void fill_item(cg_extents_chunk *item, const cg_fetch *fetch, uint32_t index,
                      uint32_t n_behind, const cg_speeds *speeds, double left, uint64_t now_ns)
{
    const cg_fetch_chunk *chunk = &fetch->chunks[index];
    const cg_controller_chunk *sizes = &fetch->sizes[index];
    const bool is_begun = chunk->state != CG_FETCH_WAITING;
    const bool is_anytime = cg_fetch_is_anytime(fetch);
    *item = (cg_extents_chunk){
        .left_ns = left, .asked_bytes = chunk->asked_bytes, .asked = CG_N_LEVELS};
    memcpy(item->bytes, sizes->bytes, sizeof item->bytes);
    const double sensitivity =
        is_anytime ? cg_quality_sensitivity(fetch->quality, n_behind, sizes->n_tokens) : 0;
    for (uint8_t level = 0; level < CG_N_LEVELS; level++) {
        if (sizes->bytes[level] == 0)
            continue;
        item->kl[level] = is_anytime ? sensitivity * fetch->quality->errors[level] : 0;
        item->decode_ns[level] =
            cg_speeds_decode_chunk(speeds, level, sizes->n_tokens, sizes->bytes[level]);
    }
    item->is_nested = is_anytime && chunk->is_nested;
    item->floor = cg_fetch_floor(fetch, index);
    /* A file that cannot be refined is chosen once: while the link is unknown, as the owner chose
     * it. */
    if (!is_anytime || (!chunk->is_nested && !(cg_estimator_bps(&speeds->link) > 0)))
        item->floor = fetch->levels[index];
    item->is_closed = !is_anytime || chunk->is_cut || now_ns >= fetch->decode_at_ns;
    if (!is_begun)
        return;
    /* The file that is being read is all that there will be of it. */
    if (!item->is_nested || chunk->file_level == CG_L0) {
        item->floor = chunk->planned;
        item->is_closed = true;
    }
    item->asked = cg_fetch_level_in(fetch, index, chunk->asked_bytes);
}

/* How many chunks with something to read the plan needs. Where no fetch's reads depend on what is
 * behind them, so many as may be under way at once do. */
static size_t items_needed(const cg_fetch_plan *plan)
{
    for (const cg_fetch *fetch = plan->fetches; fetch != NULL; fetch = fetch->next)
        if (!fetch->has_fixed_level && !cg_fetch_is_papers(fetch))
            return SIZE_MAX;
    return plan->window.depth;
}

/* Lists what is wanted and not yet decoded, as far as it is needed. Sets decode_at_ns of the
 * fetches: decoding takes all threads, so what has an earlier deadline takes its time, too. Returns
 * what is being decoded, in ns. */
static double fill_items(cg_fetch_plan *plan, const cg_speeds *speeds, uint64_t now_ns)
{
    double decoding_ns = 0, all_ns = 0;
    uint32_t load = 0;
    size_t needed = items_needed(plan);
    const size_t most = room(plan);
    plan->n_items = 0;
    for (cg_fetch *fetch = cg_fetch_after(plan, NULL); fetch != NULL && needed > 0;
         fetch = cg_fetch_after(plan, fetch)) {
        const uint64_t until_ns = cg_fetch_due_ns(fetch, speeds);
        const uint32_t begin = fetch->first + fetch->n_whole;
        uint32_t n_behind = 0;
        if (!cg_fetch_is_anytime(fetch))
            decide_levels(fetch, speeds, now_ns);
        fetch->is_read = true;
        for (uint32_t i = begin; i < fetch->end; i++)
            n_behind += fetch->sizes[i].n_tokens;
        for (uint32_t i = begin; i < fetch->first_failed && !fetch->is_cancelled && needed > 0;
             i++) {
            const cg_fetch_chunk *chunk = &fetch->chunks[i];
            cg_extents_chunk *item = &plan->items[plan->n_items];
            n_behind -= fetch->sizes[i].n_tokens;
            if (chunk->state == CG_FETCH_DECODING) {
                const double ns =
                    cg_speeds_decode_chunk(speeds, chunk->level, fetch->sizes[i].n_tokens,
                                           fetch->sizes[i].bytes[chunk->level]);
                decoding_ns += ns;
                all_ns += ns;
            }
            if (chunk->state > CG_FETCH_READING)
                continue;
            if (plan->n_items == most)
                return decoding_ns; /* others are planned when some of these are done */
            fill_item(item, fetch, i, n_behind, speeds, cg_fetch_left_ns(until_ns, now_ns), now_ns);
            item->load = load;
            plan->refs[plan->n_items++] = (cg_fetch_ref){fetch, i};
            needed -= !chunk->is_cut && item->bytes[item->floor] > chunk->asked_bytes;
            all_ns += item->decode_ns[item->asked < CG_N_LEVELS ? item->asked : item->floor];
        }
        const uint64_t need_ns = (uint64_t)(all_ns * DECODE_SLACK) + DECODE_SLACK_MS * 1000000u;
        fetch->decode_at_ns = until_ns > need_ns ? until_ns - need_ns : 0;
        load++;
    }
    return decoding_ns;
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
    return !has_run_out(plan) && !plan->has_others &&
           now_ns < plan->planned_at_ns + cg_fetch_stands_ns(plan);
}

/* What must arrive of expected fetches, as of those that are planned. */
static void add_expected(cg_fetch_plan *plan, uint64_t now_ns)
{
    const double n_expected = expected_tokens(plan, now_ns);
    double n_tokens = 0, bytes = 0, decode_ns = 0;
    for (size_t i = 0; n_expected > 0 && i < plan->n_items; i++) {
        const cg_extents_chunk *item = &plan->items[i];
        n_tokens += plan->refs[i].fetch->sizes[plan->refs[i].chunk_index].n_tokens;
        bytes += (double)item->bytes[item->floor];
        decode_ns += item->decode_ns[item->floor];
    }
    if (n_tokens > 0) {
        plan->input.expected_bytes = n_expected * bytes / n_tokens;
        plan->input.expected_decode_ns = n_expected * decode_ns / n_tokens;
    }
}

/* What is to be planned, as things are now. */
static void begin_plan(cg_fetch_plan *plan, const cg_speeds *speeds, uint64_t now_ns)
{
    bool is_bound;
    cg_fetch_window_note_idle(&plan->window, speeds, plan->alive_ns, now_ns);
    const double link_bps = cg_fetch_link_bps(plan, speeds, now_ns, &is_bound);
    const double low_bps = cg_estimator_low_bps(&speeds->link, now_ns);
    find_late(plan, speeds, link_bps, now_ns);
    plan->is_link_known = link_bps > 0;
    plan->input = (cg_extents_input){
        .chunks = plan->items,
        .link_bps = link_bps > 0 ? link_bps : 1, /* then only floors */
        .low_bps = low_bps > 0 && low_bps < link_bps ? low_bps : link_bps,
        .is_untried = cg_fetch_window_is_untried(&plan->window, speeds),
        .queued_bytes = (double)plan->window.bytes_reading + speeds->others.bytes,
        .decoding_ns = fill_items(plan, speeds, now_ns)};
    plan->input.n_chunks = plan->n_items;
    if (plan->n_items > 0)
        plan->input.window_bytes =
            cg_fetch_full_window(speeds, link_bps, plan->items[0].bytes[plan->items[0].floor]);
    if (plan->input.is_untried && plan->input.low_bps > plan->input.link_bps / UNTRIED_DOUBT)
        plan->input.low_bps = plan->input.link_bps / UNTRIED_DOUBT;
    if (!(plan->input.low_bps > 0))
        plan->input.low_bps = 1;
    add_expected(plan, now_ns);
    plan->planned_at_ns = now_ns;
    plan->is_stale = plan->has_others = false;
}

/* Of what begin_plan() set alone. */
void cg_fetch_plan_make(cg_fetch_plan *plan)
{
    cg_extents_input input = plan->input;
    cg_extents_plan_make(&plan->planned, &input);
    /* The same for a faster link, and if nobody else comes: what even then would not be read is not
     * waited for. Where nothing may be refined it is the same plan. */
    plan->any_open = false;
    for (size_t i = 0; i < plan->n_items && !plan->any_open; i++)
        plan->any_open = !plan->items[i].is_closed;
    input.link_bps *= HOPE;
    input.expected_bytes = input.expected_decode_ns = 0;
    if (plan->any_open)
        cg_extents_plan_make(&plan->hoped, &input);
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
    }
    for (size_t i = 0; i < plan->planned.n_extents; i++) {
        const cg_fetch_ref *ref = &plan->refs[plan->planned.extents[i].chunk];
        if (ref->fetch != NULL && !ref->fetch->chunks[ref->chunk_index].is_cut)
            ref->fetch->is_read = false;
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

/* ---- reads ---- */

static bool is_reading(const cg_fetch_plan *plan, const cg_fetch *fetch)
{
    for (uint32_t i = 0; i < plan->window.depth; i++)
        if (plan->reads[i].id != 0 && plan->reads[i].fetch == fetch)
            return true;
    return false;
}

/* The first chunk that may be decodable: what is whole is decoded, and what has arrived is held. */
static uint32_t first_held(const cg_fetch *fetch)
{
    return fetch->bytes_held > 0 ? fetch->first + fetch->n_whole : fetch->first_failed;
}

static bool any_decodable(const cg_fetch_plan *plan)
{
    for (const cg_fetch *fetch = plan->fetches; fetch != NULL; fetch = fetch->next)
        for (uint32_t i = first_held(fetch); i < fetch->first_failed; i++)
            if (cg_fetch_is_decodable(fetch, i))
                return true;
    return false;
}

/* Whether there is memory for n_bytes more. Where only decoding makes room, it is asked for. */
static bool has_memory(cg_fetch_plan *plan, uint64_t n_bytes)
{
    if (plan->window.bytes_reading + plan->bytes_held + plan->bytes_decoding + n_bytes <=
        plan->staging_bytes)
        return true;
    /* Something ends by itself and makes room. */
    if (plan->window.n_reading > 0 || plan->bytes_decoding > 0)
        return false;
    if (any_decodable(plan))
        plan->must_free_bytes = plan->bytes_held + n_bytes - plan->staging_bytes;
    /* Nothing that is held could be decoded: one read is begun all the same, or all would wait for
     * ever. */
    return plan->must_free_bytes == 0;
}

/* Whether one more read of n_bytes is wise now. */
static bool has_room(cg_fetch_plan *plan, const cg_fetch *fetch, uint32_t index,
                     const cg_speeds *speeds, double link_bps, uint64_t n_bytes)
{
    if (plan->window.n_reading >= plan->window.depth || !has_memory(plan, n_bytes))
        return false;
    /* What is behind it in the plan waits, too, so that loads by the paper's policy have one read
     * together. With one each more of them were late (tests/bench/results, "Streaming"). */
    if (cg_fetch_is_papers(fetch) && is_reading(plan, fetch))
        return false;
    return cg_fetch_window_has_room(&plan->window, fetch, index, speeds, link_bps, n_bytes);
}

/* Twice what the link takes for all that is under way. */
static uint64_t queued_ns(const cg_fetch_plan *plan, double link_bps)
{
    const double ns = link_bps > 0 ? 2 * (double)plan->window.bytes_reading * 8e9 / link_bps : 0;
    return (uint64_t)(ns < MOST_QUEUED_NS ? ns : MOST_QUEUED_NS);
}

/* Enters a read of a chunk's file up to end_bytes into a free place. */
static const cg_fetch_read *begin_read(cg_fetch_plan *plan, cg_fetch_ref ref, uint8_t file_level,
                                       uint64_t end_bytes, cg_speeds *speeds, uint64_t now_ns)
{
    cg_fetch_chunk *chunk = &ref.fetch->chunks[ref.chunk_index];
    cg_fetch_read *read = plan->reads;
    while (read->id != 0)
        read++;
    *read = (cg_fetch_read){
        .id = ++plan->last_id,
        .fetch = ref.fetch,
        .chunk_index = ref.chunk_index,
        .file_level = file_level,
        .from = chunk->asked_bytes,
        .bytes = end_bytes - chunk->asked_bytes,
        .submitted_ns = now_ns,
        .meter_mark = cg_link_meter_begin(&speeds->meter, end_bytes - chunk->asked_bytes, now_ns)};
    if (chunk->state == CG_FETCH_WAITING) {
        chunk->state = CG_FETCH_READING;
        chunk->file_level = file_level;
        chunk->good_bytes = UINT64_MAX;
    }
    chunk->asked_bytes = end_bytes;
    chunk->n_reads++;
    if (plan->window.n_reading++ == 0) {
        plan->quiet_since_ns = now_ns;
        if (!plan->has_failed)
            plan->alive_ns = now_ns;
    }
    plan->window.bytes_reading += read->bytes;
    const uint64_t least_ns = SILENT_MS * UINT64_C(1000000);
    plan->patience_ns = queued_ns(plan, cg_fetch_measured_bps(speeds));
    if (plan->patience_ns < least_ns)
        plan->patience_ns = least_ns;
    /* Or when its fetch ends (connector/fetch_exit.h). */
    read->give_up_ns = cg_fetch_add_ns(
        now_ns, plan->read_timeout_ns + queued_ns(plan, cg_estimator_bps(&speeds->link)));
    return read;
}

/* The name to read of a chunk, for it to have a level: of a nested file the finest. */
static uint8_t file_of(const cg_fetch *fetch, uint32_t index, uint8_t level)
{
    if (!cg_fetch_is_anytime(fetch) || !fetch->chunks[index].is_nested || level == CG_L0)
        return level;
    uint8_t finest = CG_L1;
    while (fetch->sizes[index].bytes[finest] == 0)
        finest++;
    return finest;
}

/* What a chunk whose sizes are guessed has in any case. */
static uint64_t sure_bytes(const cg_fetch *fetch, uint32_t index)
{
    const uint64_t half = fetch->sizes[index].bytes[cg_fetch_floor(fetch, index)] / 2;
    if (fetch->chunks[index].is_short)
        return CG_CHUNK_FIXED_BYTES;
    return half < CG_FETCH_PAGE_BYTES ? CG_FETCH_PAGE_BYTES
                                      : half / CG_FETCH_PAGE_BYTES * CG_FETCH_PAGE_BYTES;
}

/* Whether a range of a chunk's file waits until another one of it has ended: the first, which opens
 * the file and says how long it is, or while the link is unknown each. Opening it again would cost
 * what is under way. Over a fast link that is over soon, and of a far store the look-up has opened
 * the file. */
static bool waits_for_file(const cg_fetch_chunk *chunk, const cg_speeds *speeds, double link_bps)
{
    return chunk->n_reads > 0 &&
           (chunk->is_guessed || !(link_bps > 0) ||
            (chunk->arrived_bytes == 0 && cg_fetch_opens_alone(speeds, link_bps)));
}

/* The chunk that the plan reads next, and how far; NULL: there is nothing to read now. */
static const cg_fetch_ref *next_extent(cg_fetch_plan *plan, const cg_speeds *speeds,
                                       double link_bps, uint64_t *to_out, uint8_t *file_level_out)
{
    for (; plan->next_extent < plan->planned.n_extents; plan->next_extent++) {
        const cg_extent *extent = &plan->planned.extents[plan->next_extent];
        const cg_fetch_ref *ref = &plan->refs[extent->chunk];
        if (ref->fetch == NULL)
            continue;
        const cg_fetch_chunk *chunk = &ref->fetch->chunks[ref->chunk_index];
        *to_out = ref->fetch->sizes[ref->chunk_index].bytes[extent->level];
        *file_level_out = file_of(ref->fetch, ref->chunk_index, extent->level);
        /* A plan that stands may be of a chunk whose file was found not to be nested since. */
        const bool is_planned = *file_level_out != extent->level || extent->level == chunk->planned;
        if (cg_fetch_wants(ref->fetch, ref->chunk_index) && chunk->state <= CG_FETCH_READING &&
            !chunk->is_cut && chunk->asked_bytes < *to_out &&
            !waits_for_file(chunk, speeds, link_bps) &&
            (chunk->state == CG_FETCH_WAITING ? is_planned : chunk->file_level == *file_level_out))
            return ref;
    }
    return NULL;
}

const cg_fetch_read *cg_fetch_next_read(cg_fetch_plan *plan, cg_speeds *speeds, uint64_t now_ns)
{
    uint64_t to;
    uint8_t file_level;
    plan->must_free_bytes = 0;
    cg_fetch_window_note_idle(&plan->window, speeds, plan->alive_ns, now_ns);
    plan->window.is_expecting = expected_tokens(plan, now_ns) > 0;
    refresh(plan, speeds, now_ns);
    const double link_bps = cg_fetch_measured_bps(speeds);
    const cg_fetch_ref *ref = next_extent(plan, speeds, link_bps, &to, &file_level);
    /* A plan that stood may have nothing more to read where one of now would. */
    if (ref == NULL && plan->is_stale) {
        refresh(plan, speeds, now_ns);
        ref = next_extent(plan, speeds, link_bps, &to, &file_level);
    }
    if (ref == NULL)
        return NULL;
    const cg_fetch *fetch = ref->fetch;
    const uint64_t file_bytes = file_level == CG_L0 || !cg_fetch_is_anytime(fetch)
                                    ? to
                                    : cg_fetch_file_bytes(fetch, ref->chunk_index, file_level);
    const uint64_t range_bytes = cg_fetch_range_bytes(&plan->window, fetch, ref->chunk_index,
                                                      speeds, link_bps, plan->planned.has_slack);
    uint64_t end_bytes = cg_fetch_range_end(fetch, ref->chunk_index, to, file_bytes, range_bytes);
    if (fetch->chunks[ref->chunk_index].is_guessed)
        end_bytes = smaller(end_bytes, sure_bytes(fetch, ref->chunk_index));
    if (!has_room(plan, fetch, ref->chunk_index, speeds, link_bps,
                  end_bytes - fetch->chunks[ref->chunk_index].asked_bytes))
        return NULL;
    return begin_read(plan, *ref, file_level, end_bytes, speeds, now_ns);
}

static cg_fetch_read *find(const cg_fetch_plan *plan, uint64_t id)
{
    for (uint32_t i = 0; i < plan->window.depth; i++)
        if (plan->reads[i].id == id && id != 0)
            return &plan->reads[i];
    return NULL;
}

const cg_fetch_read *cg_fetch_find_read(const cg_fetch_plan *plan, uint64_t id)
{
    return find(plan, id);
}

/* What has arrived without a gap: up to the first range that is under way or could not be had. */
static void count_arrived(const cg_fetch_plan *plan, const cg_fetch *fetch, uint32_t index)
{
    cg_fetch_chunk *chunk = &fetch->chunks[index];
    chunk->arrived_bytes =
        chunk->asked_bytes < chunk->good_bytes ? chunk->asked_bytes : chunk->good_bytes;
    for (uint32_t i = 0; i < plan->window.depth; i++) {
        const cg_fetch_read *read = &plan->reads[i];
        if (read->id != 0 && read->fetch == fetch && read->chunk_index == index &&
            !read->is_stale && read->from < chunk->arrived_bytes)
            chunk->arrived_bytes = read->from;
    }
}

cg_fetch_verdict cg_fetch_read_ended(cg_fetch_plan *plan, cg_speeds *speeds, uint64_t id,
                                     uint64_t n_bytes, uint64_t ended_ns)
{
    cg_fetch_read *place = find(plan, id);
    if (place == NULL)
        return CG_FETCH_DROP;
    const cg_fetch_read read = *place;
    cg_fetch *fetch = read.fetch;
    cg_fetch_chunk *chunk = &fetch->chunks[read.chunk_index];
    place->id = 0;
    plan->window.n_reading--;
    plan->window.bytes_reading -= read.bytes;
    plan->quiet_since_ns = ended_ns;
    plan->has_failed = n_bytes == 0;
    if (n_bytes > 0)
        plan->alive_ns = ended_ns;
    plan->is_stale = true;
    if (cg_link_is_from_memory(n_bytes, cg_fetch_left_ns(ended_ns, read.submitted_ns),
                               speeds->latency_ns))
        fetch->memory_bytes += n_bytes;
    fetch->link_ns += cg_fetch_window_read_ended(&plan->window, speeds, read.meter_mark, n_bytes,
                                                 read.submitted_ns, ended_ns);
    if (!read.is_stale)
        chunk->n_reads--;
    if (read.is_stale || chunk->state != CG_FETCH_READING ||
        !cg_fetch_wants(fetch, read.chunk_index)) {
        fetch->dropped_bytes += n_bytes;
        return CG_FETCH_DROP;
    }
    /* A range that failed ends the chunk where it began. The levels before it are good, so the
     * fetch fails only if there is none. */
    if (n_bytes == 0) {
        chunk->is_cut = true;
        if (read.from < chunk->good_bytes)
            chunk->good_bytes = read.from;
    }
    chunk->held_bytes += n_bytes;
    fetch->bytes_held += n_bytes;
    plan->bytes_held += n_bytes;
    count_arrived(plan, fetch, read.chunk_index);
    if (n_bytes > 0)
        return CG_FETCH_KEEP;
    return cg_fetch_level_in(fetch, read.chunk_index, chunk->good_bytes) < CG_N_LEVELS
               ? CG_FETCH_DROP
               : CG_FETCH_FAIL;
}

void cg_fetch_not_nested(cg_fetch_plan *plan, cg_fetch *fetch, uint32_t chunk_index)
{
    for (uint32_t i = 0; i < plan->window.depth; i++) {
        cg_fetch_read *read = &plan->reads[i];
        if (read->id != 0 && read->fetch == fetch && read->chunk_index == chunk_index)
            read->is_stale = true;
    }
    fetch->dropped_bytes += fetch->chunks[chunk_index].held_bytes;
    let_go(plan, fetch, &fetch->chunks[chunk_index]);
    fetch->chunks[chunk_index] = (cg_fetch_chunk){0};
    plan->is_stale = true;
}

bool cg_fetch_shorter(cg_fetch_plan *plan, cg_fetch *fetch, uint32_t chunk_index)
{
    cg_fetch_chunk *chunk = &fetch->chunks[chunk_index];
    if (!chunk->is_guessed || chunk->is_short)
        return false;
    *chunk = (cg_fetch_chunk){.is_nested = chunk->is_nested, .is_guessed = true, .is_short = true};
    plan->is_stale = true;
    return true;
}

bool cg_fetch_sized(cg_fetch_plan *plan, cg_fetch *fetch, uint32_t chunk_index,
                    const uint64_t level_bytes[CG_N_LEVELS])
{
    cg_fetch_chunk *chunk = &fetch->chunks[chunk_index];
    cg_controller_chunk *sizes = &fetch->sizes[chunk_index];
    chunk->is_guessed = false;
    plan->is_stale = true;
    if (level_bytes[chunk->file_level] == 0)
        return false; /* with its sizes as they are: a chunk of no level cannot be planned */
    for (uint8_t level = CG_L1; level < CG_N_LEVELS; level++)
        if (sizes->bytes[level] > 0 && (chunk->is_nested || level == chunk->file_level))
            sizes->bytes[level] = level_bytes[level];
    fetch->levels[chunk_index] = cg_controller_nearest(sizes, fetch->levels[chunk_index]);
    if (chunk->is_short) { /* ranges begin on pages: from the start again */
        fetch->dropped_bytes += chunk->held_bytes;
        let_go(plan, fetch, chunk);
        *chunk = (cg_fetch_chunk){.is_nested = chunk->is_nested};
    }
    return true;
}

/* ---- decoding ---- */

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
    /* As fine as is planned and can be hoped for; or nothing more comes for all of the fetch, and
     * not only because others are expected, who may not come. */
    return (level <= chunk->planned && level <= chunk->hoped) ||
           (fetch->is_read && !is_reading(plan, fetch) &&
            (level <= chunk->hoped || !(plan->input.expected_bytes > 0)));
}

cg_fetch *cg_fetch_next_decode(cg_fetch_plan *plan, const cg_speeds *speeds, uint64_t now_ns,
                               uint32_t *chunk_index_out)
{
    refresh(plan, speeds, now_ns);
    for (cg_fetch *fetch = plan->fetches; fetch != NULL; fetch = fetch->next)
        for (uint32_t i = first_held(fetch); i < fetch->first_failed; i++) {
            cg_fetch_chunk *chunk = &fetch->chunks[i];
            if (chunk->state != CG_FETCH_READING || !cg_fetch_is_decodable(fetch, i) ||
                !is_final(plan, fetch, i, now_ns))
                continue;
            chunk->level = cg_fetch_level_in(fetch, i, chunk->arrived_bytes);
            chunk->state = CG_FETCH_DECODING;
            let_go(plan, fetch, chunk);
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
        for (uint32_t i = first_held(fetch);
             i < fetch->first_failed && fetch->decode_at_ns < wake_ns; i++)
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
