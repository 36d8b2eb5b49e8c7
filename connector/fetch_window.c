#include "connector/fetch_window.h"

#include <math.h>

enum {
    WINDOW_MS = 60,        /* of the link, and two round trips more, under way at most, */
    NEAR_WINDOW_MS = 30,   /* of a near store */
    WINDOW_CHUNKS = 3,     /* of a far store, unless that is more or the link needs more */
    STORE_MS = 2,          /* that a far store may take besides the round trip */
    MIN_READS = 2,         /* that may be more than that */
    FIRST_READS = 4,       /* while nothing was measured of the link */
    RANGE_MS = 30,         /* of the link, in one range */
    LEAST_RANGE = 8 << 10, /* a smaller one is nothing but opening the file */
    LEAST_FAR_RANGE = CG_FETCH_PAGE_BYTES, /* of a file that is open: the first chunk is there
                                               sooner */
    RANGE = 1 << 20,
    FIRST_RANGE = 16 << 10,   /* while nothing was measured of the link, */
    FIRST_FAR_PAGES = 32,     /* or of a far store a page for each millisecond of its latency */
    IDLE_MS = 500,            /* a link that was idle for so long may have become another one: */
    FIRST_WINDOW = 128 << 10, /* so much is under way then, and twice as much as came since */
    SURE_SAMPLES = 3,
    MEMORY_WINDOW = 512 << 10, /* while all came from memory: gigabytes a second of that */
};

static bool is_far(const cg_speeds *speeds)
{
    return speeds->latency_ns >= CG_FAR_NS;
}

/* What must be under way for the link to be busy. */
static double busy_bytes(const cg_speeds *speeds, double link_bps)
{
    return link_bps / 8 * (STORE_MS / 1e3 + 2 * speeds->latency_ns / 1e9);
}

static double most_window_bytes(const cg_speeds *speeds, double link_bps)
{
    const double s = (is_far(speeds) ? WINDOW_MS : NEAR_WINDOW_MS) / 1e3;
    return link_bps / 8 * (s + 2 * speeds->latency_ns / 1e9);
}

/* Reads that share the link end together. So of a far store, what is more than the link needs to be
 * busy only delays the first chunks, and decoding with them. And every question of another
 * request's look-up waits for what is under way before it. */
double cg_fetch_full_window(const cg_speeds *speeds, double link_bps, uint64_t chunk_bytes)
{
    const double most = most_window_bytes(speeds, link_bps);
    const double chunks = WINDOW_CHUNKS * (double)chunk_bytes, busy = busy_bytes(speeds, link_bps);
    const double bytes = chunks > busy ? chunks : busy;
    return !is_far(speeds) || bytes > most ? most : bytes;
}

/* While nothing was measured of the link: 16 KiB, or of a far store a page for each millisecond
 * until it answers, 128 KiB at most. Over a long link what little is under way is a sample of round
 * trips alone. But min_delay may give a load up by its first sample, so that comes soon. */
static uint64_t first_range(const cg_fetch *fetch, const cg_speeds *speeds)
{
    if (!cg_fetch_is_anytime(fetch))
        return FIRST_RANGE;
    const double pages = fmin(speeds->latency_ns / 1e6, FIRST_FAR_PAGES);
    const uint64_t bytes = (uint64_t)pages * CG_FETCH_PAGE_BYTES;
    return bytes > FIRST_RANGE ? bytes : FIRST_RANGE;
}

double cg_fetch_measured_bps(const cg_speeds *speeds)
{
    if (speeds->link.n_samples == 0)
        return speeds->link.memory_bps;
    return cg_estimator_bps(&speeds->link);
}

/* Whether what is known is of memory, or may be: few samples, and small reads from there are some.
 */
static bool is_all_memory(const cg_speeds *speeds)
{
    const cg_estimator *link = &speeds->link;
    return link->n_samples == 0 || (link->memory_bps > 0 && link->n_added < SURE_SAMPLES);
}

void cg_fetch_window_note_idle(cg_fetch_window *w, const cg_speeds *speeds, uint64_t alive_ns,
                               uint64_t now_ns)
{
    const cg_estimator *link = &speeds->link;
    const uint64_t idle_ns = IDLE_MS * UINT64_C(1000000);
    /* Others may have measured it since. */
    uint64_t last_ns = link->n_samples > 0 ? link->samples[link->n_samples - 1].at_ns : 0;
    if (speeds->meter.came_ns > last_ns)
        last_ns = speeds->meter.came_ns;
    if (now_ns > speeds->meter.came_ns + idle_ns)
        w->bytes_since_idle = 0;
    if (w->n_reading == 0 && now_ns > last_ns + idle_ns)
        w->idle_added = link->n_added;
    if (w->n_reading == 0 && now_ns > alive_ns + idle_ns)
        w->n_from_memory = 0;
}

bool cg_fetch_window_is_untried(const cg_fetch_window *w, const cg_speeds *speeds)
{
    return cg_fetch_measured_bps(speeds) > 0 && w->n_from_memory < CG_ESTIMATOR_DROP_SAMPLES &&
           speeds->link.n_added - w->idle_added < CG_ESTIMATOR_DROP_SAMPLES;
}

/* A sample of a link that is tried. So little is under way then that a round trip may be most of
 * what it took. If the link may still be as fast as before, all is well; and if the sample would
 * say otherwise, it is left out. */
static void judge_trial(cg_fetch_window *w, cg_estimator *link, const cg_estimator *before,
                        double latency_ns)
{
    const cg_link_sample sample = link->samples[link->n_samples - 1];
    const double bits = 8e9 * sample.bytes, slow_bps = cg_estimator_bps(before) / 2;
    const uint32_t n_added = link->n_added, generation = link->generation;
    if (bits < slow_bps * (sample.ns - latency_ns))
        return;
    if (before->n_samples > 0 && bits < slow_bps * sample.ns) {
        *link = *before;
        link->n_added = n_added;
        link->generation = generation;
        link->samples[link->n_samples - 1].at_ns = sample.at_ns;
    }
    w->idle_added = n_added - CG_ESTIMATOR_DROP_SAMPLES;
}

double cg_fetch_window_read_ended(cg_fetch_window *w, cg_speeds *speeds, cg_link_mark mark,
                                  uint64_t n_bytes, uint64_t begun_ns, uint64_t ended_ns)
{
    const bool was_untried = cg_fetch_window_is_untried(w, speeds);
    const cg_estimator before = speeds->link;
    const double took_ns = cg_fetch_left_ns(ended_ns, begun_ns);
    if (n_bytes > 0 && !cg_link_is_from_memory(n_bytes, took_ns, speeds->latency_ns)) {
        w->bytes_since_idle += n_bytes;
        w->n_from_memory = 0;
        if (took_ns < speeds->way_ns)
            speeds->way_ns = took_ns;
    } else if (n_bytes > 0)
        w->n_from_memory++;
    const double link_ns = cg_link_meter_end(&speeds->meter, mark, n_bytes, begun_ns, ended_ns,
                                             speeds->latency_ns, &speeds->link);
    if (speeds->link.n_added != before.n_added && was_untried)
        judge_trial(w, &speeds->link, &before, speeds->latency_ns);
    return link_ns;
}

/* Whether its levels may yet be others when the link is known. */
static bool chooses_levels(const cg_fetch *fetch)
{
    return !fetch->has_fixed_level && !cg_fetch_is_papers(fetch);
}

/* The link's speed for how much is asked for. Over a far, fast link the first samples are little
 * but round trips, which hold the estimate back for long. Without the trip they say what the link
 * does, or less. Beside other samples they are those of a load's start, and what is known is
 * better. */
static double asked_bps(const cg_fetch *fetch, const cg_speeds *speeds, double link_bps)
{
    return chooses_levels(fetch)
               ? link_bps * cg_estimator_trips_alone(&speeds->link, speeds->latency_ns)
               : link_bps;
}

/* The window of a fetch's reads: of the next of a chunk's. */
static double window_bytes(const cg_fetch_window *w, const cg_fetch *fetch, uint32_t index,
                           const cg_speeds *speeds, double link_bps)
{
    const uint8_t level = cg_fetch_must_level(fetch, index);
    const uint64_t must_bytes = fetch->sizes[index].bytes[level];
    const double bps = asked_bps(fetch, speeds, link_bps);
    double window = cg_fetch_is_papers(fetch) ? most_window_bytes(speeds, bps)
                                              : cg_fetch_full_window(speeds, bps, must_bytes);
    /* The next chunk may be the first that comes over the link. */
    if (chooses_levels(fetch) && is_all_memory(speeds) && window > MEMORY_WINDOW)
        window = MEMORY_WINDOW;
    if (!cg_fetch_is_anytime(fetch))
        return window;
    /* A link that is slower now brings what is under way before all that will be asked for. Where
     * nothing is read but what must arrive, that is no loss. Less than keeps the link busy would be
     * measured as a slow link. */
    const double busy = busy_bytes(speeds, link_bps);
    double sure = busy > FIRST_WINDOW ? busy : FIRST_WINDOW;
    if (!w->is_expecting)
        sure += 2 * (double)w->bytes_since_idle;
    if (cg_fetch_window_is_untried(w, speeds) && fetch->chunks[index].asked_bytes >= must_bytes)
        sure = FIRST_WINDOW; /* what is busy, and how long this takes, is not known */
    return window < sure ? window : sure;
}

/* A range of a far store, of most_bytes at most. Those that begin together are of different size:
 * alike they would end together, and the link would be idle for a round trip. They are whole pages.
 * So unless as many as there may be are two pages each, there are no more of them under way than
 * two of one page, two of two, and so on. */
static double far_range(const cg_fetch_window *w, double window, double most_bytes)
{
    double n = w->depth;
    if (window < 2 * CG_FETCH_PAGE_BYTES * n)
        n = floor(2 * sqrt(window / CG_FETCH_PAGE_BYTES));
    n = n < MIN_READS ? MIN_READS : n < w->depth ? n : w->depth;
    const double largest = 2 * window / (n + 1);
    if (w->n_reading >= n)
        return window / n < most_bytes ? window / n : most_bytes;
    return (largest < most_bytes ? largest : most_bytes) * (w->n_reading + 1) / n;
}

bool cg_fetch_window_has_room(const cg_fetch_window *w, const cg_fetch *fetch, uint32_t chunk_index,
                              const cg_speeds *speeds, double link_bps, uint64_t n_bytes)
{
    /* A few are under way also where they are more than the window: or a slow link would stand
     * still between two. */
    return w->n_reading < (link_bps > 0 ? MIN_READS : FIRST_READS) ||
           (double)(w->bytes_reading + n_bytes) <=
               window_bytes(w, fetch, chunk_index, speeds, link_bps);
}

uint64_t cg_fetch_range_bytes(const cg_fetch_window *w, const cg_fetch *fetch, uint32_t index,
                              const cg_speeds *speeds, double link_bps, bool has_slack)
{
    if (cg_fetch_is_papers(fetch))
        return UINT64_MAX / 2;
    if (!(link_bps > 0))
        return fetch->has_fixed_level ? RANGE : first_range(fetch, speeds);
    double bytes = RANGE;
    const double most = asked_bps(fetch, speeds, link_bps) / 8 * RANGE_MS / 1000;
    /* A chunk of one level is of use only whole. */
    if (cg_fetch_is_anytime(fetch) && !has_slack && bytes > most)
        bytes = most;
    const double window = window_bytes(w, fetch, index, speeds, link_bps);
    if (is_far(speeds))
        bytes = far_range(w, window, bytes);
    else if ((cg_fetch_is_anytime(fetch) || is_all_memory(speeds)) && bytes > window / MIN_READS)
        bytes = window / MIN_READS; /* or those few that there are in any case would be more */
    if (bytes >= RANGE)
        return RANGE;
    const uint64_t least = is_far(speeds) ? LEAST_FAR_RANGE : LEAST_RANGE;
    return bytes > (double)least ? (uint64_t)bytes / CG_FETCH_PAGE_BYTES * CG_FETCH_PAGE_BYTES
                                 : least;
}

uint64_t cg_fetch_range_end(const cg_fetch *fetch, uint32_t index, uint64_t to, uint64_t file_bytes,
                            uint64_t range)
{
    const uint64_t from = fetch->chunks[index].asked_bytes;
    const uint64_t n = (to - from + range - 1) / range; /* alike, so that none is tiny */
    to = from + (to - from + n - 1) / n;
    to = (to + CG_FETCH_PAGE_BYTES - 1) / CG_FETCH_PAGE_BYTES * CG_FETCH_PAGE_BYTES;
    return to < file_bytes ? to : file_bytes;
}

bool cg_fetch_opens_alone(const cg_speeds *speeds, double link_bps)
{
    const bool is_slow = link_bps / 8 * RANGE_MS / 1000 < RANGE;
    return is_slow && !is_far(speeds);
}
