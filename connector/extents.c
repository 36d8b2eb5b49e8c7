#include "connector/extents.h"

#include <stdlib.h>

static const double ROUNDING = 1e-9; /* of sums in another order */

bool cg_extents_plan_reserve(cg_extents_plan *plan, size_t n_chunks)
{
    if (n_chunks <= plan->capacity)
        return true;
    if (n_chunks > SIZE_MAX / 2 / (CG_N_LEVELS * sizeof *plan->steps))
        return false;
    cg_extents_plan larger = {
        .levels = malloc(n_chunks),
        .extents = malloc(n_chunks * CG_N_LEVELS * sizeof *larger.extents),
        .steps = malloc(n_chunks * CG_N_LEVELS * sizeof *larger.steps),
        .last = malloc(n_chunks * sizeof *larger.last),
        .late = malloc(n_chunks * sizeof *larger.late),
        .capacity = n_chunks,
    };
    const bool has_all = larger.levels != NULL && larger.extents != NULL && larger.steps != NULL &&
                         larger.last != NULL && larger.late != NULL;
    cg_extents_plan_destroy(has_all ? plan : &larger);
    if (has_all)
        *plan = larger;
    return has_all;
}

void cg_extents_plan_destroy(cg_extents_plan *plan)
{
    free(plan->levels);
    free(plan->extents);
    free(plan->steps);
    free(plan->last);
    free(plan->late);
    *plan = (cg_extents_plan){0};
}

/* Whether the step goes on in the file that has `from`; else it takes another file in its place. */
static bool refines(const cg_extents_chunk *chunk, uint8_t to)
{
    return chunk->is_nested && to != CG_L0;
}

/* What is to be read of a chunk for it to have a level. */
static double bytes_to(const cg_extents_chunk *chunk, uint8_t level)
{
    const uint64_t bytes = chunk->bytes[level];
    return bytes > chunk->asked_bytes ? (double)(bytes - chunk->asked_bytes) : 0;
}

static uint8_t start_level(const cg_extents_chunk *chunk)
{
    return chunk->asked < CG_N_LEVELS ? chunk->asked : chunk->floor;
}

static double step_ns(const cg_extents_input *in, const cg_extents_chunk *chunk, uint8_t from,
                      uint8_t to)
{
    const double bytes = bytes_to(chunk, to) - bytes_to(chunk, from);
    const double ns = bytes * 8e9 / in->link_bps + chunk->decode_ns[to] - chunk->decode_ns[from];
    /* Above 0, so that each step has a rate. */
    return ns > 1 ? ns : 1;
}

/* The chunk's steps to finer levels, each with the best rate there is from where the last one
 * ended: so their rates fall. */
static size_t add_steps(const cg_extents_input *in, uint32_t index, cg_extents_step *steps)
{
    const cg_extents_chunk *chunk = &in->chunks[index];
    uint8_t level = start_level(chunk);
    size_t n = 0;
    while (!chunk->is_closed && level > 0) {
        cg_extents_step best = {0};
        for (uint8_t to = 0; to < level; to++) {
            if (chunk->bytes[to] == 0 || (chunk->asked_bytes > 0 && !refines(chunk, to)))
                continue;
            const double rate = (chunk->kl[level] - chunk->kl[to]) / step_ns(in, chunk, level, to);
            if (rate > best.rate)
                best = (cg_extents_step){rate, index, level, to};
        }
        if (!(best.rate > 0))
            break;
        steps[n++] = best;
        level = best.to;
    }
    return n;
}

/* The best rate first; of equal ones the later chunk, then the first step. */
static int by_rate(const void *a, const void *b)
{
    const cg_extents_step *x = a, *y = b;
    if (x->rate != y->rate)
        return x->rate > y->rate ? -1 : 1;
    if (x->chunk != y->chunk)
        return x->chunk > y->chunk ? -1 : 1;
    return x->from > y->from ? -1 : 1;
}

/* Whether the chunk is read in its place among those that must arrive, and not refined. */
static bool is_whole(const cg_extents_chunk *chunk, const cg_extents_plan *plan, size_t i)
{
    return plan->levels[i] == start_level(chunk) || !refines(chunk, plan->levels[i]);
}

/* A decoder that works behind the reader. */
typedef struct pipeline {
    double read_ns, decoded_ns;
    bool in_time;
} pipeline;

/* Whether the chunk is done in time. */
static bool decode(pipeline *p, const cg_extents_chunk *chunk, uint8_t level)
{
    if (p->decoded_ns < p->read_ns)
        p->decoded_ns = p->read_ns;
    p->decoded_ns += chunk->decode_ns[level];
    return p->decoded_ns <= chunk->left_ns;
}

/* Marks the loads whose floors cannot all be in time; false: there is one. */
static bool find_late(const cg_extents_input *in, cg_extents_plan *plan)
{
    const double ns_per_byte = 8e9 / in->link_bps;
    pipeline p = {in->queued_bytes * ns_per_byte, in->decoding_ns, true};
    for (size_t i = 0, first = 0; i < in->n_chunks; i++) {
        const cg_extents_chunk *chunk = &in->chunks[i];
        if (chunk->load != in->chunks[first].load)
            first = i;
        p.read_ns += bytes_to(chunk, start_level(chunk)) * ns_per_byte;
        plan->late[i] = !decode(&p, chunk, start_level(chunk)) || (i > first && plan->late[i - 1]);
        if (plan->late[i] && (i == first || !plan->late[i - 1]))
            for (size_t j = first; j < i; j++)
                plan->late[j] = true;
        p.in_time = p.in_time && !plan->late[i];
    }
    return p.in_time;
}

/* Whether all that is not late in any case ends in time: the floors and whole files first, then the
 * refinements in the order of extents[]. plan->last[i]: 1 + the index of the chunk's last
 * refinement, or 0. */
static bool ends_in_time(const cg_extents_input *in, const cg_extents_plan *plan, double bps)
{
    const double ns_per_byte = 8e9 / bps;
    pipeline p = {in->queued_bytes * ns_per_byte, in->decoding_ns, true};
    double floors_ns = p.read_ns;
    for (size_t i = 0; i < in->n_chunks; i++) {
        const cg_extents_chunk *chunk = &in->chunks[i];
        const bool whole = is_whole(chunk, plan, i);
        floors_ns += bytes_to(chunk, whole ? plan->levels[i] : start_level(chunk)) * ns_per_byte;
        if (!whole)
            continue;
        p.read_ns = floors_ns;
        p.in_time = (decode(&p, chunk, plan->levels[i]) || plan->late[i]) && p.in_time;
    }
    p.read_ns = floors_ns;
    for (size_t i = 0; i < plan->n_extents; i++) {
        const cg_extent *extent = &plan->extents[i];
        const cg_extents_chunk *chunk = &in->chunks[extent->chunk];
        const uint8_t from = plan->steps[i].from;
        if (is_whole(chunk, plan, extent->chunk))
            continue; /* another file was chosen since */
        p.read_ns += (bytes_to(chunk, extent->level) - bytes_to(chunk, from)) * ns_per_byte;
        if (plan->last[extent->chunk] == i + 1)
            p.in_time = decode(&p, chunk, extent->level) && p.in_time; /* none that is late */
    }
    return p.in_time;
}

/* Takes a step into the plan; steps[0, n_extents) are the refinements that were taken. */
static void take(const cg_extents_input *in, cg_extents_plan *plan, cg_extents_step step)
{
    plan->levels[step.chunk] = step.to;
    if (!refines(&in->chunks[step.chunk], step.to))
        return; /* it is read instead; its refinements are not */
    plan->steps[plan->n_extents] = step;
    plan->extents[plan->n_extents++] = (cg_extent){step.chunk, step.to};
    plan->last[step.chunk] = (uint32_t)plan->n_extents;
}

static bool try_step(const cg_extents_input *in, cg_extents_plan *plan, cg_extents_step step)
{
    const bool refining = refines(&in->chunks[step.chunk], step.to);
    const uint32_t last = plan->last[step.chunk];
    const size_t n_extents = plan->n_extents;
    const cg_extents_step overwritten = plan->steps[n_extents];
    if (plan->levels[step.chunk] != step.from)
        return false; /* the step before it was not taken */
    take(in, plan, step);
    if (ends_in_time(in, plan, refining ? in->link_bps : in->low_bps))
        return true;
    plan->levels[step.chunk] = step.from;
    plan->last[step.chunk] = last;
    plan->n_extents = n_extents;
    plan->steps[n_extents] = overwritten;
    return false;
}

/* Takes the first n of the sorted steps, which all refine, and says whether that is in time. */
static bool take_first(const cg_extents_input *in, cg_extents_plan *plan, size_t n)
{
    plan->n_extents = 0;
    for (size_t i = 0; i < in->n_chunks; i++) {
        plan->levels[i] = start_level(&in->chunks[i]);
        plan->last[i] = 0;
    }
    for (size_t i = 0; i < n; i++)
        take(in, plan, plan->steps[i]);
    return ends_in_time(in, plan, in->link_bps);
}

/* As many of the first n steps as end in time. */
static size_t take_most(const cg_extents_input *in, cg_extents_plan *plan, size_t n)
{
    size_t good = 0, bad = n + 1;
    while (bad - good > 1) {
        const size_t middle = good + (bad - good) / 2;
        if (take_first(in, plan, middle))
            good = middle;
        else
            bad = middle;
    }
    take_first(in, plan, good);
    return good;
}

/* What is read and decoded at least, whichever order that has. */
typedef struct load_sum {
    double read_ns, decode_ns, most_left_ns;
} load_sum;

static load_sum sum_up(const cg_extents_input *in, const cg_extents_plan *plan)
{
    load_sum sum = {in->queued_bytes * 8e9 / in->link_bps, in->decoding_ns, -1e300};
    for (size_t i = 0; i < in->n_chunks; i++) {
        const cg_extents_chunk *chunk = &in->chunks[i];
        sum.read_ns += bytes_to(chunk, plan->levels[i]) * 8e9 / in->link_bps;
        sum.decode_ns += chunk->decode_ns[plan->levels[i]];
        if (!plan->late[i] && chunk->left_ns > sum.most_left_ns)
            sum.most_left_ns = chunk->left_ns;
    }
    return sum;
}

/* Whether a step is late for sure: a refinement is read last, and only then decoded. */
static bool is_late(const cg_extents_input *in, const load_sum *sum, const cg_extents_step *step)
{
    const cg_extents_chunk *chunk = &in->chunks[step->chunk];
    const double bytes = bytes_to(chunk, step->to) - bytes_to(chunk, step->from);
    const double read_ns = sum->read_ns + bytes * 8e9 / in->link_bps;
    const double more_ns = chunk->decode_ns[step->to] - chunk->decode_ns[step->from];
    return (1 - ROUNDING) * (read_ns + chunk->decode_ns[step->to]) > chunk->left_ns ||
           (1 - ROUNDING) * (sum->decode_ns + more_ns) > sum->most_left_ns;
}

/* steps[0, n) sorted. What was taken moves to the front, so a step is read before its place can be
 * taken. */
static void take_steps(const cg_extents_input *in, cg_extents_plan *plan, size_t n)
{
    size_t i = 0;
    while (i < n && refines(&in->chunks[plan->steps[i].chunk], plan->steps[i].to))
        i++;
    const bool all_refine = i == n;
    i = all_refine ? take_most(in, plan, n) : 0;
    while (!all_refine && i < n && try_step(in, plan, plan->steps[i]))
        i++;
    const load_sum sum = sum_up(in, plan);
    for (i++; i < n; i++)
        if (!(all_refine && is_late(in, &sum, &plan->steps[i])) &&
            try_step(in, plan, plan->steps[i]))
            return;
}

/* Whether even half of what the link will very likely do is enough for these levels, read and
 * decoded chunk after chunk. */
static bool has_slack(const cg_extents_input *in, const cg_extents_plan *plan)
{
    const double ns_per_byte = 2 * 8e9 / in->low_bps;
    pipeline p = {in->queued_bytes * ns_per_byte, in->decoding_ns, true};
    for (size_t i = 0; i < in->n_chunks; i++) {
        p.read_ns += bytes_to(&in->chunks[i], plan->levels[i]) * ns_per_byte;
        p.in_time = decode(&p, &in->chunks[i], plan->levels[i]) && p.in_time;
    }
    return p.in_time;
}

/* All that is read: what must arrive, then the refinements, which stand in steps[], too. */
static void list_extents(const cg_extents_input *in, cg_extents_plan *plan, bool one_by_one)
{
    const size_t n_refinements = one_by_one ? 0 : plan->n_extents;
    size_t n_first = 0;
    for (size_t i = 0; i < in->n_chunks; i++) {
        const cg_extents_chunk *chunk = &in->chunks[i];
        const uint8_t level =
            one_by_one || is_whole(chunk, plan, i) ? plan->levels[i] : start_level(chunk);
        if (bytes_to(chunk, level) > 0)
            plan->extents[n_first++] = (cg_extent){(uint32_t)i, level};
    }
    for (size_t i = 0; i < n_refinements; i++) {
        const cg_extents_step *step = &plan->steps[i];
        if (!is_whole(&in->chunks[step->chunk], plan, step->chunk))
            plan->extents[n_first++] = (cg_extent){step->chunk, step->to};
    }
    plan->n_extents = n_first;
}

void cg_extents_plan_make(cg_extents_plan *plan, const cg_extents_input *in)
{
    size_t n_steps = 0;
    plan->n_extents = 0;
    for (size_t i = 0; i < in->n_chunks; i++) {
        plan->levels[i] = start_level(&in->chunks[i]);
        plan->last[i] = 0;
    }
    plan->in_time = find_late(in, plan);
    for (size_t i = 0; i < in->n_chunks; i++)
        if (!plan->late[i])
            n_steps += add_steps(in, (uint32_t)i, plan->steps + n_steps);
    if (n_steps > 0) { /* else there may be no memory at all */
        qsort(plan->steps, n_steps, sizeof *plan->steps, by_rate);
        take_steps(in, plan, n_steps);
    }
    plan->has_slack = has_slack(in, plan);
    list_extents(in, plan, plan->has_slack);
    plan->kl = 0;
    for (size_t i = 0; i < in->n_chunks; i++)
        plan->kl += in->chunks[i].kl[plan->levels[i]];
}
