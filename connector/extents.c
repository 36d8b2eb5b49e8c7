#include "connector/extents.h"

#include <math.h>
#include <stdlib.h>

enum { MOST_REFINEMENTS = 2 }; /* of a chunk in its file: L3 to L2 to L1 */
_Static_assert(MOST_REFINEMENTS *CG_EXTENTS_MOST_REFINED < UINT16_MAX, "cg_extents_step.before");

/* How many leaves a tree of rows has: for chunks of their own, for the rest, for refinements. */
static size_t n_leaves_of(size_t n_own)
{
    const size_t n = n_own + 1 + MOST_REFINEMENTS * n_own;
    size_t n_leaves = 1;
    while (n_leaves < n)
        n_leaves *= 2;
    return n_leaves;
}

static size_t most_own(size_t n_chunks)
{
    return n_chunks < CG_EXTENTS_MOST_REFINED ? n_chunks : CG_EXTENTS_MOST_REFINED;
}

bool cg_extents_plan_reserve(cg_extents_plan *plan, size_t n_chunks)
{
    if (n_chunks <= plan->capacity)
        return true;
    if (n_chunks > SIZE_MAX / 2 / (CG_N_LEVELS * sizeof *plan->steps))
        return false;
    const size_t n_rows = 2 * n_leaves_of(most_own(n_chunks));
    cg_extents_plan larger = {
        .levels = malloc(n_chunks),
        .extents = malloc(n_chunks * CG_N_LEVELS * sizeof *larger.extents),
        .steps = malloc(n_chunks * CG_N_LEVELS * sizeof *larger.steps),
        .last = malloc(n_chunks * sizeof *larger.last),
        .late = malloc(n_chunks * sizeof *larger.late),
        .rows = {malloc(n_rows * sizeof *larger.rows[0]), malloc(n_rows * sizeof *larger.rows[0])},
        .capacity = n_chunks,
    };
    const bool has_all = larger.levels != NULL && larger.extents != NULL && larger.steps != NULL &&
                         larger.last != NULL && larger.late != NULL && larger.rows[0] != NULL &&
                         larger.rows[1] != NULL;
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
    free(plan->rows[0]);
    free(plan->rows[1]);
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
                best = (cg_extents_step){.rate = rate, .chunk = index, .from = level, .to = to};
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

/* ---- whether a plan ends in time ---- */

/* Nothing to read, nothing to decode. */
static const cg_extents_row NOTHING = {0, 0, -INFINITY, INFINITY, INFINITY};

static double smaller(double a, double b)
{
    return a < b ? a : b;
}

/* b is read and decoded behind a. */
static cg_extents_row join(const cg_extents_row *a, const cg_extents_row *b)
{
    const double behind_a = a->behind_ns + b->decode_ns, behind_b = a->read_ns + b->behind_ns;
    return (cg_extents_row){
        .read_ns = a->read_ns + b->read_ns,
        .decode_ns = a->decode_ns + b->decode_ns,
        .behind_ns = behind_a > behind_b ? behind_a : behind_b,
        .read_by_ns = smaller(a->read_by_ns,
                              smaller(b->read_by_ns - a->read_ns, b->decoded_by_ns - a->behind_ns)),
        .decoded_by_ns = smaller(a->decoded_by_ns, b->decoded_by_ns - a->decode_ns),
    };
}

static inline cg_extents_row row_of(double read_ns, double decode_ns, double left_ns)
{
    return (cg_extents_row){read_ns, decode_ns, read_ns + decode_ns, left_ns - decode_ns - read_ns,
                            left_ns - decode_ns};
}

static inline cg_extents_row row_of_reading(double read_ns)
{
    cg_extents_row row = NOTHING;
    row.read_ns = read_ns;
    return row;
}

/* What is read of a chunk in its place among those that must arrive. */
static inline cg_extents_row row_of_chunk(const cg_extents_input *in, const cg_extents_plan *plan,
                                          size_t i, double ns_per_byte)
{
    const cg_extents_chunk *chunk = &in->chunks[i];
    const uint8_t level = plan->levels[i];
    if (!is_whole(chunk, plan, i))
        return row_of_reading(bytes_to(chunk, start_level(chunk)) * ns_per_byte);
    return row_of(bytes_to(chunk, level) * ns_per_byte, chunk->decode_ns[level],
                  plan->late[i] ? INFINITY : chunk->left_ns);
}

/* A refinement. The chunk is decoded behind its last one. */
static inline cg_extents_row row_of_refinement(const cg_extents_input *in,
                                               const cg_extents_plan *plan, size_t i,
                                               double ns_per_byte)
{
    const cg_extents_step *step = &plan->steps[i];
    const cg_extents_chunk *chunk = &in->chunks[step->chunk];
    const double bytes = bytes_to(chunk, step->to) - bytes_to(chunk, step->from);
    if (is_whole(chunk, plan, step->chunk))
        return NOTHING; /* another file was chosen since */
    if (plan->last[step->chunk] != i + 1)
        return row_of_reading(bytes * ns_per_byte);
    return row_of(bytes * ns_per_byte, chunk->decode_ns[step->to], chunk->left_ns);
}

static double ns_per_byte_of(const cg_extents_input *in, int tree)
{
    return 8e9 / (tree == 0 ? in->link_bps : in->low_bps);
}

static void set_leaf(cg_extents_plan *plan, int tree, size_t leaf, cg_extents_row row)
{
    cg_extents_row *rows = plan->rows[tree];
    size_t i = plan->n_leaves + leaf;
    rows[i] = row;
    for (i /= 2; i > 0; i /= 2, plan->n_joins++)
        rows[i] = join(&rows[2 * i], &rows[2 * i + 1]);
}

/* Where the trees say what is read of a chunk, they say now what the plan says. */
static void update(const cg_extents_input *in, cg_extents_plan *plan, uint32_t chunk)
{
    for (int tree = 0; tree < plan->n_trees; tree++) {
        const double ns_per_byte = ns_per_byte_of(in, tree);
        set_leaf(plan, tree, chunk, row_of_chunk(in, plan, chunk, ns_per_byte));
        for (uint32_t i = plan->last[chunk]; i > 0; i = plan->steps[i - 1].before)
            set_leaf(plan, tree, plan->n_own + i, row_of_refinement(in, plan, i - 1, ns_per_byte));
    }
}

/* The trees of what the plan says. What comes behind all that can be refined stays as it is: one
 * leaf, which is made once. */
static void make_trees(const cg_extents_input *in, cg_extents_plan *plan)
{
    for (int tree = 0; tree < plan->n_trees; tree++) {
        const double ns_per_byte = ns_per_byte_of(in, tree);
        cg_extents_row *rows = plan->rows[tree], *leaves = rows + plan->n_leaves;
        for (size_t i = 0; i < plan->n_own; i++)
            leaves[i] = row_of_chunk(in, plan, i, ns_per_byte);
        leaves[plan->n_own] = plan->rest[tree];
        for (size_t i = plan->n_own + 1; i < plan->n_leaves; i++)
            leaves[i] = NOTHING;
        for (size_t i = 0; i < plan->n_extents; i++)
            leaves[plan->n_own + 1 + i] = row_of_refinement(in, plan, i, ns_per_byte);
        for (size_t i = plan->n_leaves - 1; i > 0; i--, plan->n_joins++)
            rows[i] = join(&rows[2 * i], &rows[2 * i + 1]);
    }
}

/* What is read between the chunks that can be refined and the refinements. */
static cg_extents_row rest_of(const cg_extents_input *in, const cg_extents_plan *plan, int tree)
{
    cg_extents_row rest = NOTHING;
    for (size_t i = plan->n_own; i < in->n_chunks; i++) {
        const cg_extents_row row = row_of_chunk(in, plan, i, ns_per_byte_of(in, tree));
        rest = join(&rest, &row);
    }
    if (in->expected_bytes > 0) {
        const cg_extents_row row =
            row_of(in->expected_bytes * ns_per_byte_of(in, tree), in->expected_decode_ns, INFINITY);
        rest = join(&rest, &row);
    }
    return rest;
}

static pipeline pipeline_of(const cg_extents_input *in, int tree)
{
    return (pipeline){in->queued_bytes * ns_per_byte_of(in, tree), in->decoding_ns, true};
}

static void pass(pipeline *p, const cg_extents_row *row)
{
    const double decoded_ns = p->decoded_ns + row->decode_ns,
                 behind_ns = p->read_ns + row->behind_ns;
    p->in_time = p->in_time && p->read_ns <= row->read_by_ns && p->decoded_ns <= row->decoded_by_ns;
    p->decoded_ns = decoded_ns > behind_ns ? decoded_ns : behind_ns;
    p->read_ns += row->read_ns;
}

/* Whether all that is not late in any case ends in time. */
static bool ends_in_time(const cg_extents_input *in, const cg_extents_plan *plan, int tree)
{
    pipeline p = pipeline_of(in, tree);
    pass(&p, &plan->rows[tree][1]);
    return p.in_time;
}

/* ---- which steps are taken ---- */

/* Takes a step into the plan; steps[0, n_extents) are the refinements that were taken. */
static void take(const cg_extents_input *in, cg_extents_plan *plan, cg_extents_step step)
{
    plan->levels[step.chunk] = step.to;
    if (!refines(&in->chunks[step.chunk], step.to))
        return; /* it is read instead; its refinements are not */
    step.before = (uint16_t)plan->last[step.chunk];
    plan->steps[plan->n_extents++] = step;
    plan->last[step.chunk] = (uint32_t)plan->n_extents;
}

/* Takes a step if all still ends in time: a file of its own, which cannot be cut short, over a slow
 * link, too. */
static bool try_step(const cg_extents_input *in, cg_extents_plan *plan, cg_extents_step step)
{
    const bool refining = refines(&in->chunks[step.chunk], step.to);
    const uint32_t last = plan->last[step.chunk];
    const size_t n_extents = plan->n_extents;
    const cg_extents_step overwritten = plan->steps[n_extents];
    if (plan->levels[step.chunk] != step.from)
        return false; /* the step before it was not taken */
    take(in, plan, step);
    update(in, plan, step.chunk);
    if (ends_in_time(in, plan, refining ? 0 : 1))
        return true;
    plan->levels[step.chunk] = step.from;
    plan->last[step.chunk] = last;
    plan->n_extents = n_extents;
    plan->steps[n_extents] = overwritten;
    for (int tree = 0; refining && tree < plan->n_trees; tree++)
        set_leaf(plan, tree, plan->n_own + 1 + n_extents, NOTHING);
    update(in, plan, step.chunk);
    return false;
}

/* Takes the first n of the sorted steps, which all refine, and says whether that is in time. */
static bool take_first(const cg_extents_input *in, cg_extents_plan *plan, size_t n)
{
    plan->n_extents = 0;
    for (size_t i = 0; i < plan->n_own; i++) {
        plan->levels[i] = start_level(&in->chunks[i]);
        plan->last[i] = 0;
    }
    for (size_t i = 0; i < n; i++)
        take(in, plan, plan->steps[i]);
    const double ns_per_byte = ns_per_byte_of(in, 0);
    pipeline p = pipeline_of(in, 0);
    for (size_t i = 0; i < plan->n_own && p.in_time; i++) {
        const cg_extents_row row = row_of_chunk(in, plan, i, ns_per_byte);
        pass(&p, &row);
    }
    pass(&p, &plan->rest[0]);
    for (size_t i = 0; i < plan->n_extents && p.in_time; i++) {
        const cg_extents_row row = row_of_refinement(in, plan, i, ns_per_byte);
        pass(&p, &row);
    }
    return p.in_time;
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

/* steps[0, n) sorted. What was taken moves to the front, so a step is read before its place can be
 * taken. */
static void take_steps(const cg_extents_input *in, cg_extents_plan *plan, size_t n)
{
    plan->n_own = 0;
    plan->n_trees = 1;
    for (size_t i = 0; i < n; i++) {
        const uint32_t chunk = plan->steps[i].chunk;
        if (chunk >= plan->n_own)
            plan->n_own = chunk + 1;
        if (!refines(&in->chunks[chunk], plan->steps[i].to))
            plan->n_trees = 2;
    }
    plan->n_leaves = n_leaves_of(plan->n_own);
    for (int tree = 0; tree < plan->n_trees; tree++)
        plan->rest[tree] = rest_of(in, plan, tree);
    const bool all_refine = plan->n_trees == 1;
    size_t i = all_refine ? take_most(in, plan, n) : 0;
    make_trees(in, plan);
    while (!all_refine && i < n && try_step(in, plan, plan->steps[i]))
        i++;
    for (i++; i < n; i++)
        if (try_step(in, plan, plan->steps[i]))
            return;
}

/* Whether these levels are in time, read behind what is queued and decoded chunk after chunk. */
static bool are_in_time(const cg_extents_input *in, const cg_extents_plan *plan, bool floors,
                        double queued_bytes, double link_bps)
{
    const double ns_per_byte = 8e9 / link_bps;
    pipeline p = {queued_bytes * ns_per_byte, in->decoding_ns, true};
    for (size_t i = 0; i < in->n_chunks; i++) {
        const uint8_t level = floors ? start_level(&in->chunks[i]) : plan->levels[i];
        p.read_ns += bytes_to(&in->chunks[i], level) * ns_per_byte;
        p.in_time = decode(&p, &in->chunks[i], level) && p.in_time;
    }
    return p.in_time;
}

/* What more may be under way of what is planned before it is seen that the link is slower. */
static double most_under_way(const cg_extents_input *in, const cg_extents_plan *plan)
{
    double bytes = 0;
    for (size_t i = 0; i < in->n_chunks; i++)
        bytes += bytes_to(&in->chunks[i], plan->levels[i]);
    return smaller(bytes, in->window_bytes);
}

/* Whether, of a link that was tried, even half of what it will very likely do is enough for what is
 * planned, and a tenth of what it does for what must arrive: the link may become so slow before
 * that has. */
static bool has_slack(const cg_extents_input *in, const cg_extents_plan *plan)
{
    const double queued_bytes = in->queued_bytes + in->expected_bytes;
    return !in->is_untried && are_in_time(in, plan, false, queued_bytes, in->low_bps / 2) &&
           are_in_time(in, plan, true, queued_bytes + most_under_way(in, plan), in->link_bps / 10);
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
    const size_t n_open = most_own(in->n_chunks);
    size_t n_steps = 0;
    plan->n_extents = plan->n_joins = 0;
    for (size_t i = 0; i < in->n_chunks; i++) {
        plan->levels[i] = start_level(&in->chunks[i]);
        plan->last[i] = 0;
    }
    plan->in_time = find_late(in, plan);
    for (size_t i = 0; i < n_open; i++)
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
