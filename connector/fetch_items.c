#include "connector/fetch_items.h"

#include "connector/fetch_link.h"

#include <string.h>

enum { DECODE_SLACK_MS = 3 };
static const double DECODE_SLACK = 1.1; /* on what decoding should take */
static const double UNTRIED_DOUBT = 10; /* what a link that was idle may be slower */

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
    for (uint32_t i = fetch->first + fetch->n_whole; i < fetch->wanted_end; i++) {
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

/* Marks the fetches with a budget that will be late even if the link is CG_FETCH_HOPE times as
 * fast, those at a fixed level, too. They would only delay others, so they go last, and delay none
 * of those that are looked at after them. Behind the last that can be, nothing is added up. */
static void find_late(cg_fetch_plan *plan, const cg_speeds *speeds, double link_bps,
                      uint64_t now_ns)
{
    const double ns_per_byte = link_bps > 0 ? 8e9 / (CG_FETCH_HOPE * link_bps) : 0;
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
    fetch->todo.is_counted = false;
    fetch->decided_generation = speeds->link.generation;
}

/* left: until it must be done, in ns. */
static void fill_item(cg_extents_chunk *item, const cg_fetch *fetch, uint32_t index,
                      const cg_speeds *speeds, double left, uint64_t now_ns)
{
    const cg_fetch_chunk *chunk = &fetch->chunks[index];
    const cg_controller_chunk *sizes = &fetch->sizes[index];
    const bool is_begun = chunk->state != CG_FETCH_WAITING;
    const bool is_anytime = cg_fetch_is_anytime(fetch);
    *item = (cg_extents_chunk){
        .left_ns = left, .asked_bytes = chunk->asked_bytes, .asked = CG_N_LEVELS};
    memcpy(item->bytes, sizes->bytes, sizeof item->bytes);
    for (uint8_t level = 0; level < CG_N_LEVELS; level++) {
        if (sizes->bytes[level] == 0)
            continue;
        item->kl[level] = is_anytime ? cg_fetch_kl(fetch, index, level) : 0;
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

/* For so many chunks. */
static size_t room(const cg_fetch_plan *plan)
{
    const size_t n = plan->planned.capacity < plan->hoped.capacity ? plan->planned.capacity
                                                                   : plan->hoped.capacity;
    return plan->capacity < n ? plan->capacity : n;
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

/* Of all fetches that have been listed. */
typedef struct listed {
    size_t needed; /* so many chunks with something to read are needed still */
    uint32_t n_fetches;
    double decoding_ns, decode_ns; /* of what is being decoded, and with what is still to be */
} listed;

/* Lists what is wanted of a fetch and not yet decoded, as far as it is needed. False: there is no
 * room for more. Others are planned when some of these are done. */
static bool fill_items(cg_fetch_plan *plan, cg_fetch *fetch, listed *l, const cg_speeds *speeds,
                       uint64_t now_ns)
{
    const double left = cg_fetch_left_ns(cg_fetch_due_ns(fetch, speeds), now_ns);
    const uint32_t begin = fetch->first + fetch->n_whole;
    const size_t most = room(plan);
    for (uint32_t i = begin; i < fetch->wanted_end && !fetch->is_cancelled && l->needed > 0; i++) {
        const cg_fetch_chunk *chunk = &fetch->chunks[i];
        cg_extents_chunk *item = &plan->items[plan->n_items];
        if (chunk->state == CG_FETCH_DECODING) {
            const double ns = cg_speeds_decode_chunk(speeds, chunk->level, fetch->sizes[i].n_tokens,
                                                     fetch->sizes[i].bytes[chunk->level]);
            l->decoding_ns += ns;
            l->decode_ns += ns;
        }
        if (chunk->state > CG_FETCH_READING)
            continue;
        if (plan->n_items == most)
            return false;
        fill_item(item, fetch, i, speeds, left, now_ns);
        item->load = l->n_fetches;
        plan->refs[plan->n_items++] = (cg_fetch_ref){fetch, i};
        l->needed -= !chunk->is_cut && item->bytes[item->floor] > chunk->asked_bytes;
        l->decode_ns += item->decode_ns[item->asked < CG_N_LEVELS ? item->asked : item->floor];
    }
    l->n_fetches++;
    return true;
}

/* Decoding takes all threads, so what has an earlier deadline takes its time, too: it is in
 * decode_ns. */
static void set_decode_at(cg_fetch *fetch, const cg_speeds *speeds, double decode_ns)
{
    const uint64_t due_ns = cg_fetch_due_ns(fetch, speeds);
    const uint64_t need_ns = (uint64_t)(decode_ns * DECODE_SLACK) + DECODE_SLACK_MS * 1000000u;
    fetch->decode_at_ns = due_ns > need_ns ? due_ns - need_ns : 0;
}

/* Lists the fetches, as far as they are needed. Returns what is being decoded, in ns. */
static double list_fetches(cg_fetch_plan *plan, const cg_speeds *speeds, uint64_t now_ns)
{
    listed l = {.needed = items_needed(plan)};
    plan->n_items = 0;
    for (cg_fetch *fetch = cg_fetch_after(plan, NULL); fetch != NULL && l.needed > 0;
         fetch = cg_fetch_after(plan, fetch)) {
        if (!cg_fetch_is_anytime(fetch))
            decide_levels(fetch, speeds, now_ns);
        fetch->has_no_reads_left = true;
        if (!fill_items(plan, fetch, &l, speeds, now_ns))
            break;
        set_decode_at(fetch, speeds, l.decode_ns);
    }
    return l.decoding_ns;
}

double cg_fetch_expected_tokens(const cg_fetch_plan *plan, uint64_t now_ns)
{
    const bool is_told = now_ns < plan->expected_until_ns;
    return (double)plan->asked_tokens + (is_told ? (double)plan->expected_tokens : 0);
}

/* What must arrive of expected fetches, as of those that are planned. */
static void add_expected(cg_fetch_plan *plan, uint64_t now_ns)
{
    const double n_expected = cg_fetch_expected_tokens(plan, now_ns);
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

/* All loads are seen at once. Where all would be in time at half the speed, and what must arrive at
 * a tenth, each chunk is read whole (has_slack), unless the link was idle: it may be any other now,
 * so every chunk is read coarse first, and levels in files of their own are chosen as for a link
 * that is UNTRIED_DOUBT times slower. */
void cg_fetch_set_input(cg_fetch_plan *plan, const cg_speeds *speeds, uint64_t now_ns)
{
    bool is_bound;
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
        .decoding_ns = list_fetches(plan, speeds, now_ns)};
    plan->input.n_chunks = plan->n_items;
    if (plan->n_items > 0)
        plan->input.window_bytes =
            cg_fetch_full_window(speeds, link_bps, plan->items[0].bytes[plan->items[0].floor]);
    if (plan->input.is_untried && plan->input.low_bps > plan->input.link_bps / UNTRIED_DOUBT)
        plan->input.low_bps = plan->input.link_bps / UNTRIED_DOUBT;
    if (!(plan->input.low_bps > 0))
        plan->input.low_bps = 1;
    add_expected(plan, now_ns);
}
