#include "connector/fetch_exit.h"

#include "connector/fetch_items.h"

enum {
    GRACE_MS = 500, /* of a load whose budget is spent */
    LEAST_CHECK_MS = 5,
    CHECKS = 32, /* of whether a load is hopeless, in the time that is left */
    SURE_SAMPLES = 3,
    UNKNOWN_DOUBT = 4, /* a link that has not answered may be so many times slower than that says */
};
static const double GRACE_NS = GRACE_MS * 1e6;
static const double MOST_LOAD_NS = 86400e9; /* a day: keeps sums within their type */
static const double EXIT_GAIN = 0.9;  /* recomputing must take less than this part of loading */
static const double EXIT_SLACK = 0.1; /* of what recomputing takes: it begins before it must */
static const double SOME_HOPE = 1.2,
                    GREAT_HOPE = 3.5; /* the same with min_delay: is the link known? */

static double later(double a, double b)
{
    return a > b ? a : b;
}

static uint64_t whole_ns(double ns)
{
    return ns < MOST_LOAD_NS ? (uint64_t)ns : (uint64_t)MOST_LOAD_NS;
}

void cg_fetch_engine_told(cg_fetch_plan *plan, double ns, uint64_t now_ns)
{
    plan->is_engine_told = true;
    plan->engine_until_ns =
        cg_fetch_add_ns(cg_fetch_add_ns(now_ns, whole_ns(ns)), plan->engine_untold_ns);
}

void cg_fetch_engine_add(cg_fetch_plan *plan, double ns, uint64_t now_ns)
{
    if (plan->engine_until_ns < now_ns)
        plan->engine_until_ns = now_ns;
    plan->engine_until_ns = cg_fetch_add_ns(plan->engine_until_ns, whole_ns(ns));
}

uint64_t cg_fetch_engine_lost(cg_fetch_plan *plan, const cg_fetch *fetch, const cg_speeds *speeds,
                              uint64_t now_ns)
{
    const double ns = fetch->is_cancelled ? 0 : cg_fetch_lost_ns(fetch, speeds);
    cg_fetch_engine_add(plan, ns, now_ns);
    plan->engine_untold_ns += whole_ns(ns);
    return whole_ns(ns);
}

void cg_fetch_engine_known(cg_fetch_plan *plan, uint64_t lost_ns)
{
    plan->engine_untold_ns -= lost_ns;
}

double cg_fetch_engine_ns(const cg_fetch_plan *plan, const cg_speeds *speeds, uint64_t now_ns)
{
    double ns = later(cg_fetch_left_ns(plan->engine_until_ns, now_ns), 0);
    for (const cg_fetch *fetch = plan->fetches; fetch != NULL; fetch = fetch->next)
        if (!fetch->is_cancelled)
            ns += cg_fetch_lost_ns(fetch, speeds);
    return ns;
}

void cg_fetch_set_end(cg_fetch *fetch, const cg_speeds *speeds, uint64_t now_ns)
{
    const double link_bps = cg_estimator_bps(&speeds->link);
    const double left = cg_fetch_left_ns(fetch->deadline_ns, now_ns);
    double bytes = 0;
    fetch->silent_from_ns = fetch->deadline_ns;
    fetch->ends_at_ns = UINT64_MAX;
    if (fetch->policy == CG_POLICY_MIN_DELAY)
        return;
    /* Not what others read before it. With that, loads that are late last longer: in the simulator,
     * of requests that come as a trace has them 1.9 instead of 1.4 % were over budget (SmolLM2 x10,
     * 13 traces; the mean TTFT was 2.70 instead of 2.81 s, p99 9.6 instead of 7.1; ff99934). */
    for (uint32_t i = fetch->first; i < fetch->end; i++)
        bytes += (double)fetch->sizes[i].bytes[cg_fetch_must_level(fetch, i)];
    double ns = link_bps > 0 ? 2 * 8e9 * bytes / link_bps : 0;
    ns = ns > left ? ns : left;
    if (left < 0) /* it had no time at all */
        fetch->silent_from_ns = now_ns + whole_ns(ns);
    fetch->ends_at_ns = now_ns + whole_ns(ns) + GRACE_MS * UINT64_C(1000000);
}

const cg_fetch_read *cg_fetch_give_up(cg_fetch_plan *plan, uint64_t now_ns)
{
    for (uint32_t i = 0; i < plan->window.depth; i++) {
        cg_fetch_read *read = &plan->reads[i];
        if (read->id != 0 && now_ns >= read->give_up_ns) {
            read->give_up_ns = UINT64_MAX;
            return read;
        }
    }
    return NULL;
}

/* What is still to come of a chunk for it to be of any use, in bytes. */
static double missing_bytes(const cg_fetch *fetch, uint32_t index)
{
    const cg_fetch_chunk *chunk = &fetch->chunks[index];
    if (chunk->state > CG_FETCH_READING || cg_fetch_is_decodable(fetch, index))
        return 0;
    const uint64_t bytes = fetch->sizes[index].bytes[cg_fetch_must_level(fetch, index)];
    return bytes > chunk->arrived_bytes ? (double)(bytes - chunk->arrived_bytes) : 0;
}

/* The level at which a chunk that is not being decoded yet will be: that it has or must have. */
static uint8_t undecoded_level(const cg_fetch *fetch, uint32_t index)
{
    return cg_fetch_is_decodable(fetch, index)
               ? cg_fetch_level_in(fetch, index, fetch->chunks[index].arrived_bytes)
               : cg_fetch_must_level(fetch, index);
}

static double undecoded_ns(const cg_fetch *fetch, uint32_t index, const cg_speeds *speeds)
{
    if (fetch->chunks[index].state > CG_FETCH_READING)
        return 0;
    const uint8_t level = undecoded_level(fetch, index);
    return cg_speeds_decode_chunk(speeds, level, fetch->sizes[index].n_tokens,
                                  fetch->sizes[index].bytes[level]);
}

static void add_work(cg_fetch_work *work, const cg_fetch *fetch, uint32_t index, uint8_t level)
{
    work->n_tokens[level] += fetch->sizes[index].n_tokens;
    work->bytes[level] += fetch->sizes[index].bytes[level];
}

static double work_ns(const cg_fetch_work *work, const cg_speeds *speeds)
{
    double ns = 0;
    for (uint8_t level = 0; level < CG_N_LEVELS; level++)
        if (work->n_tokens[level] > 0)
            ns += cg_speeds_decode_chunk(speeds, level, work->n_tokens[level], work->bytes[level]);
    return ns;
}

/* It is asked of all fetches at each end of a read, and of most of them nothing has changed. */
static const cg_fetch_todo *todo_of(cg_fetch *fetch)
{
    cg_fetch_todo *todo = &fetch->todo;
    if (todo->is_counted)
        return todo;
    *todo = (cg_fetch_todo){.is_counted = true};
    for (uint32_t i = fetch->first + fetch->n_whole; i < fetch->end; i++) {
        const cg_fetch_chunk *chunk = &fetch->chunks[i];
        if (chunk->state == CG_FETCH_DECODING)
            add_work(&todo->decoding, fetch, i, chunk->level);
        if (chunk->state > CG_FETCH_READING || i >= fetch->wanted_end)
            continue;
        todo->missing_bytes += missing_bytes(fetch, i);
        add_work(&todo->undecoded, fetch, i, undecoded_level(fetch, i));
    }
    return todo;
}

cg_wanted cg_fetch_wanted(const cg_fetch_plan *plan)
{
    cg_wanted wanted = {0};
    for (cg_fetch *fetch = plan->fetches; fetch != NULL; fetch = fetch->next) {
        wanted.n_loads += !cg_fetch_is_settled(fetch);
        wanted.bytes += fetch->is_cancelled ? 0 : todo_of(fetch)->missing_bytes;
    }
    return wanted;
}

/* What is being decoded. */
static double decoding_ns(const cg_fetch_plan *plan, const cg_speeds *speeds)
{
    double ns = 0;
    if (plan->bytes_decoding == 0)
        return 0;
    for (cg_fetch *fetch = plan->fetches; fetch != NULL; fetch = fetch->next)
        ns += work_ns(&todo_of(fetch)->decoding, speeds);
    return ns;
}

double cg_fetch_undecoded_ns(const cg_fetch_plan *plan, const cg_speeds *speeds)
{
    double ns = decoding_ns(plan, speeds);
    for (cg_fetch *fetch = plan->fetches; fetch != NULL; fetch = fetch->next)
        if (!fetch->is_cancelled)
            ns += work_ns(&todo_of(fetch)->undecoded, speeds);
    return ns;
}

/* What goes before: to be read, and to be decoded; decoding_ns of that is being decoded. Meanwhile
 * the first byte is on its way, for trip_ns. */
typedef struct queue {
    double bytes, decode_ns, decoding_ns, trip_ns;
} queue;

/* The first chunk that is not being decoded yet; fetch->end: all are. *waits_out: for some before
 * it, which recomputing must wait for, too. */
static uint32_t first_undecoded(const cg_fetch *fetch, bool *waits_out)
{
    uint32_t i = fetch->first;
    *waits_out = false;
    for (; i < fetch->end; i++) {
        if (fetch->chunks[i].state == CG_FETCH_DECODING)
            *waits_out = true;
        else if (fetch->chunks[i].state != CG_FETCH_DONE)
            break;
    }
    return i;
}

/* What is left of a fetch, cut at a chunk: reading up to there and recomputing the rest. */
typedef struct cut {
    uint32_t index;
    double ns;
} cut;

/* The cut that takes least, behind what goes before, with all that is recomputed; *all_ns_out:
 * without a cut. What has arrived waits for no bytes of others, and for no decoding of what they
 * are still to read. The engine computes others' tokens for engine_ns before. */
static cut best_cut(const cg_fetch *fetch, const cg_speeds *speeds, double link_bps, queue before,
                    double engine_ns, double *all_ns_out)
{
    const cg_prefill_speed recompute = cg_speeds_recompute(speeds);
    bool waits;
    const uint32_t first = first_undecoded(fetch, &waits);
    double tokens = 0, missing = 0, here_ns = before.decoding_ns;
    for (uint32_t i = first; i < fetch->end; i++)
        tokens += fetch->sizes[i].n_tokens;
    cut best = {first, later(waits ? before.decoding_ns : 0, engine_ns) +
                           cg_prefill_ns(recompute, tokens, fetch->end_token)};
    *all_ns_out = best.ns;
    for (uint32_t i = first; i < fetch->wanted_end; i++) {
        const double decode_ns = undecoded_ns(fetch, i, speeds);
        missing += missing_bytes(fetch, i);
        before.decode_ns += decode_ns;
        here_ns += decode_ns;
        tokens -= fetch->sizes[i].n_tokens;
        const double read_ns = later(before.bytes * 8e9 / link_bps, before.trip_ns) +
                               missing * 8e9 / link_bps + decode_ns;
        const double load_ns = !(missing > 0)               ? here_ns
                               : read_ns > before.decode_ns ? read_ns
                                                            : before.decode_ns;
        *all_ns_out = tokens > 0 ? later(load_ns, engine_ns) +
                                       cg_prefill_ns(recompute, tokens, fetch->end_token)
                                 : load_ns;
        if (*all_ns_out < best.ns)
            best = (cut){i + 1, *all_ns_out};
    }
    return best;
}

/* What is known when a fetch may have to be cut. */
typedef struct outlook {
    const cg_fetch_plan *plan;
    const cg_speeds *speeds;
    double link_bps, low_bps;
    bool is_silent;   /* link_bps is more than the link does: nothing ends */
    bool is_known;    /* so it is, or it was measured */
    double hope;      /* without a budget to meet, how many times faster the link may become; 0: not
                         measured */
    double trip_hope; /* cg_estimator_without_trip() */
    double engine_ns; /* until the engine has computed what it has, and what fetches have lost */
    uint64_t now_ns;
} outlook;

static queue first_in_queue(const cg_fetch_plan *plan, const cg_speeds *speeds)
{
    const double ns = decoding_ns(plan, speeds);
    return (queue){speeds->others.bytes, ns, ns, 0};
}

static void queue_add(queue *before, const cg_fetch *fetch, const cg_speeds *speeds)
{
    for (uint32_t i = fetch->first; i < fetch->wanted_end; i++) {
        before->bytes += missing_bytes(fetch, i);
        before->decode_ns += undecoded_ns(fetch, i, speeds);
    }
}

/* How long it still takes the store to answer, where it has answered nothing of a fetch yet. */
static double trip_ns(const cg_fetch *fetch, const outlook *o)
{
    uint64_t asked_ns = o->now_ns;
    if (fetch->link_ns > 0)
        return 0;
    for (uint32_t i = 0; i < o->plan->window.depth; i++) {
        const cg_fetch_read *read = &o->plan->reads[i];
        if (read->id != 0 && read->fetch == fetch && read->submitted_ns < asked_ns)
            asked_ns = read->submitted_ns;
    }
    return later(o->speeds->way_ns - (double)(o->now_ns - asked_ns), 0);
}

/* How long the engine computes other things before it can begin with this fetch. It is told of what
 * it computes of this prompt in any case, too. */
static double engine_before_ns(const cg_fetch *fetch, const outlook *o)
{
    double own_ns = cg_fetch_lost_ns(fetch, o->speeds);
    if (o->plan->is_engine_told && fetch->prompt_tokens > fetch->end_token)
        own_ns += cg_prefill_ns(cg_speeds_recompute(o->speeds),
                                fetch->prompt_tokens - fetch->end_token, fetch->prompt_tokens);
    return later(o->engine_ns - own_ns, 0);
}

/* All is recomputed that has not arrived. */
static cut cut_now(const cg_fetch *fetch, const outlook *o)
{
    const uint32_t index = cg_fetch_first_missing(fetch);
    return (cut){index, engine_before_ns(fetch, o) + cg_fetch_rest_ns(fetch, index, o->speeds)};
}

/* What a cut of one fetch costs the others: those that are loaded while the engine computes the
 * rest of it wait for their first tokens until that is done. */
typedef struct held_up {
    double ns;       /* added up */
    uint32_t n_late; /* so many would be in time without */
} held_up;

/* After predict(). */
static held_up held_up_by(const cg_fetch *given_up, const outlook *o, cut at)
{
    held_up others = {0};
    const double end_ns = at.ns, from_ns = end_ns - cg_fetch_rest_ns(given_up, at.index, o->speeds);
    for (const cg_fetch *fetch = o->plan->fetches; fetch != NULL; fetch = fetch->next) {
        const double ns = fetch->predicted_ns;
        if (fetch == given_up || fetch->is_cancelled || ns < from_ns || ns >= end_ns)
            continue;
        const double left = cg_fetch_left_ns(cg_fetch_due_ns(fetch, o->speeds), o->now_ns);
        others.ns += end_ns - ns;
        others.n_late += fetch->policy == CG_POLICY_TTFT_BUDGET && ns <= left && left < end_ns;
    }
    return others;
}

/* Predicts of all fetches when they have what they must have. What has arrived waits for decoding
 * alone. */
static void predict(const outlook *o)
{
    queue before = first_in_queue(o->plan, o->speeds);
    double here_ns = before.decoding_ns;
    for (cg_fetch *fetch = cg_fetch_after(o->plan, NULL); fetch != NULL;
         fetch = cg_fetch_after(o->plan, fetch)) {
        const double others_ns = before.decode_ns;
        if (!fetch->is_cancelled)
            queue_add(&before, fetch, o->speeds);
        if (cg_fetch_has_all(fetch))
            fetch->predicted_ns = here_ns += before.decode_ns - others_ns;
        else
            fetch->predicted_ns =
                later(later(before.bytes * 8e9 / o->link_bps, trip_ns(fetch, o)), before.decode_ns);
    }
}

/* Whether a fetch should be cut now. With a budget, recomputing waits as long as it can be in time
 * itself, for the link may yet prove faster; unless it is known by now that loading will be late
 * even at twice the speed. Where recomputing is late too, only knowing counts, and what others lose
 * that are loaded meanwhile: a step of the engine ends when all that it computes is computed. None
 * of them may be late by what is late itself, and of two none by what is in time. At the deadline a
 * link that has fallen silent has had its time, unless little is missing: what even a slow link
 * brings before the load must end in any case. With min_delay each moment of a load that is given
 * up is lost, so the first sample may decide, if by a wide margin: but not one that is nothing but
 * a round trip. */
static bool should_cut(const cg_fetch *fetch, const outlook *o, queue before, uint32_t *index_out)
{
    double all_ns, hoped_ns, feared_ns;
    const double lost = cg_fetch_lost_ns(fetch, o->speeds);
    const double engine_ns = engine_before_ns(fetch, o);
    const double left = cg_fetch_left_ns(fetch->deadline_ns, o->now_ns);
    const bool has_budget = fetch->policy == CG_POLICY_TTFT_BUDGET;
    before.trip_ns = trip_ns(fetch, o);
    const cut here = best_cut(fetch, o->speeds, o->link_bps, before, engine_ns, &all_ns);
    const cut safe = best_cut(fetch, o->speeds, o->low_bps, before, engine_ns, &feared_ns);
    const double hope = has_budget || !(o->hope > 0) ? CG_FETCH_HOPE : o->hope;
    best_cut(fetch, o->speeds, later(hope, o->trip_hope) * o->link_bps, before, engine_ns,
             &hoped_ns);
    *index_out = here.index;
    const double gain_ns = all_ns - here.ns;
    const bool pays = here.ns < EXIT_GAIN * hoped_ns;
    if (!has_budget)
        return o->hope > 0 && o->trip_hope < CG_ESTIMATOR_MOST_TRIP && pays &&
               gain_ns > held_up_by(fetch, o, here).ns;
    /* While the engine is busy, waiting costs nothing and giving up frees nothing. */
    const bool can_wait = o->is_silent && engine_ns > GRACE_NS;
    if (o->is_silent && !can_wait && cg_fetch_left_ns(fetch->silent_from_ns, o->now_ns) <= lost &&
        feared_ns > cg_fetch_left_ns(fetch->ends_at_ns, o->now_ns)) {
        const cut now = cut_now(fetch, o);
        const double held_up_ns = held_up_by(fetch, o, now).ns;
        if (all_ns - now.ns > held_up_ns || !(held_up_ns > 0 || fetch->computed_by_ns > 0)) {
            *index_out = now.index;
            return true;
        }
    }
    /* A link that is silent for a moment may go on. To wait for it as long as recomputing can be in
     * time cost deadlines (in the simulator, three traces, one request at a time: 2.4 % over budget
     * instead of none; f49b2a4): what is recomputed too much costs none. */
    if (o->is_known && pays && hoped_ns > left && !can_wait) {
        const held_up others = held_up_by(fetch, o, here);
        if (gain_ns > others.ns && others.n_late == 0)
            return true;
    }
    *index_out = safe.index;
    return feared_ns > left && safe.ns < EXIT_GAIN * feared_ns && safe.ns <= left &&
           safe.ns * (1 + EXIT_SLACK) > left && held_up_by(fetch, o, safe).n_late < 2;
}

/* The same question again soon, for the time in which recomputing can still begin is short; and at
 * the deadline. */
static void check_again(cg_fetch_plan *plan, const cg_fetch *fetch, uint64_t now_ns)
{
    const double left = cg_fetch_left_ns(fetch->deadline_ns, now_ns);
    uint64_t in_ns = (uint64_t)((left < 0 ? -left : left) / CHECKS);
    if (in_ns < LEAST_CHECK_MS * UINT64_C(1000000))
        in_ns = LEAST_CHECK_MS * UINT64_C(1000000);
    if (left > 0 && left < (double)in_ns)
        in_ns = (uint64_t)left;
    if (cg_fetch_add_ns(now_ns, in_ns) < plan->check_ns)
        plan->check_ns = cg_fetch_add_ns(now_ns, in_ns);
}

/* A fetch that may be cut: one that chooses its levels, for the product's own policies; or one at
 * a fixed level that is late in any case, and so goes last: it might get nothing for long. */
static bool may_be_cut(const cg_fetch *fetch)
{
    return (!fetch->has_fixed_level || fetch->is_late) && !fetch->is_cancelled &&
           (fetch->policy == CG_POLICY_TTFT_BUDGET || fetch->policy == CG_POLICY_MIN_DELAY);
}

static outlook look_out(const cg_fetch_plan *plan, const cg_speeds *speeds, uint64_t now_ns)
{
    bool is_bound;
    outlook o = {.plan = plan,
                 .speeds = speeds,
                 .link_bps = cg_fetch_link_bps(plan, speeds, now_ns, &is_bound),
                 .low_bps = cg_estimator_low_bps(&speeds->link, now_ns),
                 .now_ns = now_ns};
    o.engine_ns = cg_fetch_engine_ns(plan, speeds, now_ns);
    o.is_silent = is_bound;
    o.is_known = is_bound || speeds->link.n_samples >= SURE_SAMPLES;
    o.hope = is_bound || (!o.is_known && speeds->link.n_samples > 0) ? GREAT_HOPE
             : o.is_known                                            ? SOME_HOPE
                                                                     : 0;
    o.trip_hope = is_bound ? 1 : cg_estimator_without_trip(&speeds->link, speeds->latency_ns);
    /* Samples that are little but round trips say no more than that nothing is known: the link may
     * be as fast as it is without them. */
    o.low_bps = later(o.low_bps, o.trip_hope > 1 ? o.trip_hope * o.link_bps / UNKNOWN_DOUBT : 0);
    if (is_bound && (!(o.low_bps > 0) || o.low_bps > o.link_bps / UNKNOWN_DOUBT))
        o.low_bps = o.link_bps / UNKNOWN_DOUBT;
    return o;
}

cg_fetch *cg_fetch_hopeless(cg_fetch_plan *plan, const cg_speeds *speeds, uint64_t now_ns,
                            uint32_t *chunk_index_out)
{
    bool any = false;
    /* Of many chunks it takes a while, with the owner's lock. */
    if (now_ns < plan->check_ns && now_ns < plan->checked_ns + cg_fetch_stands_ns(plan))
        return NULL;
    for (const cg_fetch *fetch = plan->fetches; fetch != NULL; fetch = fetch->next)
        any = any || may_be_cut(fetch);
    plan->check_ns = UINT64_MAX;
    if (!any || !(cg_speeds_recompute(speeds).tokens_per_s > 0))
        return NULL;
    plan->checked_ns = now_ns;
    const outlook o = look_out(plan, speeds, now_ns);
    queue before = first_in_queue(plan, speeds);
    if (o.link_bps > 0)
        predict(&o);
    for (cg_fetch *fetch = cg_fetch_after(plan, NULL); fetch != NULL;
         fetch = cg_fetch_after(plan, fetch)) {
        const queue here = before; /* what others read and decode first, its own work apart */
        bool waits;
        queue_add(&before, fetch, speeds);
        if (first_undecoded(fetch, &waits) >= fetch->wanted_end || !may_be_cut(fetch))
            continue;
        check_again(plan, fetch, now_ns);
        if (o.link_bps > 0 && should_cut(fetch, &o, here, chunk_index_out) &&
            *chunk_index_out < fetch->wanted_end) {
            plan->is_stale = true;
            plan->check_ns = 0; /* others may be next */
            return fetch;
        }
    }
    return NULL;
}

/* What the engine would have to compute of those that go on beyond their time. */
static double put_off_ns(const outlook *o)
{
    double ns = 0;
    for (const cg_fetch *fetch = o->plan->fetches; fetch != NULL; fetch = fetch->next)
        if (fetch->computed_by_ns > 0 && o->now_ns >= fetch->deadline_ns &&
            fetch->policy == CG_POLICY_TTFT_BUDGET && !fetch->is_cancelled &&
            !cg_fetch_has_all(fetch))
            ns += cg_fetch_rest_ns(fetch, cg_fetch_first_missing(fetch), o->speeds) -
                  cg_fetch_lost_ns(fetch, o->speeds);
    return ns;
}

/* Whether what a fetch whose time is over has not got would be here sooner than the engine
 * computes it, or later by less than others would be held up, or whether giving it up would make
 * one late that is in time; of a link that has fallen silent, whether the engine cannot begin with
 * it soon anyway. At most until the engine would have computed it and all that were put off before
 * it: others may go on coming before it, over the link and on the engine. After predict(). */
static bool is_worth_waiting(cg_fetch *fetch, const outlook *o, bool is_silent)
{
    const double engine_ns = engine_before_ns(fetch, o);
    const cut now = cut_now(fetch, o);
    if (!may_be_cut(fetch) || !(cg_speeds_recompute(o->speeds).tokens_per_s > 0))
        return false;
    if (fetch->computed_by_ns == 0)
        fetch->computed_by_ns = cg_fetch_add_ns(o->now_ns, whole_ns(now.ns + put_off_ns(o)));
    if (o->now_ns >= fetch->computed_by_ns)
        return false;
    if (is_silent || !(o->link_bps > 0)) /* it may be dead: only what costs nothing */
        return engine_ns > GRACE_NS;
    const held_up others = held_up_by(fetch, o, now);
    return others.n_late > 0 || fetch->predicted_ns < now.ns + others.ns;
}

cg_fetch *cg_fetch_overdue(cg_fetch_plan *plan, const cg_speeds *speeds, uint64_t now_ns)
{
    outlook o = {.plan = NULL};
    for (cg_fetch *fetch = plan->fetches; fetch != NULL; fetch = fetch->next) {
        const bool is_silent = now_ns >= cg_fetch_silent_ns(plan, fetch);
        if (!is_silent && now_ns < fetch->ends_at_ns)
            continue;
        if (o.plan == NULL) {
            o = look_out(plan, speeds, now_ns);
            o.link_bps = cg_estimator_bps(&speeds->link); /* a moment's silence says nothing yet */
            if (o.link_bps > 0)
                predict(&o);
        }
        if (!cg_fetch_has_all(fetch) && is_worth_waiting(fetch, &o, is_silent)) {
            if (is_silent)
                fetch->silent_from_ns = now_ns;
            if (now_ns >= fetch->ends_at_ns)
                fetch->ends_at_ns = now_ns + GRACE_MS * UINT64_C(1000000);
            continue;
        }
        fetch->ends_at_ns = fetch->silent_from_ns = UINT64_MAX;
        cg_fetch_end_reads(plan, fetch, now_ns);
        plan->is_stale = true;
        return fetch;
    }
    return NULL;
}
