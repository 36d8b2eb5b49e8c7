#include "connector/estimator.h"

#include <math.h>
#include <string.h>

enum { RISE_SAMPLES = 3, SURE_SAMPLES = 5, MOST_FORGOTTEN = 5 };
static const double CHANGE_FACTOR = 2.0;
static const uint64_t OLD_NS = UINT64_C(30000000000); /* it says nothing of the link now */
static const double HALF_LIFE_NS = 10e9; /* a sample this much older than the newest counts half */

/* A sample has so many bytes or took so long, and two round trips: less says more of those than of
 * the link. */
static const double SAMPLE_BYTES = 64 << 10, SAMPLE_NS = 50e6;
/* Faster than this, and sooner than a network and a server can answer: the page cache. Of a store
 * that is known to be far, a small range that comes in half of its latency did not come from there.
 * How far it is was measured once, so of what is large or took long that is not said. */
static const double MEMORY_BPS = 4e9, MEMORY_NS = 1e6, FAR_MEMORY_NS = 5e6;
/* A read hangs if it is so old, and its part of what came meanwhile so many times its bytes. */
static const double HANG_NS = 100e6, HANG_FACTOR = 2;
static const double PRIOR_DOUBT = 8; /* what was only told may be so many times off */
static const double HOPE = 2;        /* what was measured may become so many times more */
static const double TRIPS = 1.5;     /* what takes less than so many is little but one */
/* The first round trips to a store that is nearer are short. To ask for more at once there costs
 * small models some overlap of reading and decoding (min_delay 1 % over 10 ms, simulated). */
static const double FAR_TRIP_NS = 15e6;
static const double MEMORY_KEEP = 0.8; /* of the mean, beside a new measurement */

void cg_estimator_init(cg_estimator *e, cg_estimator_kind kind, double prior_bps)
{
    memset(e, 0, sizeof *e);
    e->kind = kind;
    e->prior_bps = prior_bps;
}

static double least_sample_ns(double latency_ns)
{
    return SAMPLE_NS + 2 * latency_ns;
}

/* Whether there is an estimate that a small read can be compared with. */
static bool has_estimate(const cg_estimator *e)
{
    return e->n_samples > 0 || e->prior_bps > 0;
}

static double sample_bps(const cg_link_sample *sample)
{
    return sample->bytes * 8e9 / sample->ns;
}

/* Of each sample, by its age. */
static void weigh(const cg_estimator *e, double *weights_out)
{
    const uint64_t newest_ns = e->samples[e->n_samples - 1].at_ns;
    for (uint32_t i = 0; i < e->n_samples; i++) {
        const uint64_t at_ns = e->samples[i].at_ns;
        weights_out[i] = newest_ns > at_ns ? exp2(-(double)(newest_ns - at_ns) / HALF_LIFE_NS) : 1;
    }
}

/* Of the first n samples. */
static double mean_bps(const cg_estimator *e, const double *weights, uint32_t n)
{
    double bytes = 0, ns = 0;
    for (uint32_t i = 0; i < n; i++) {
        bytes += weights[i] * e->samples[i].bytes;
        ns += weights[i] * e->samples[i].ns;
    }
    return bytes * 8e9 / ns;
}

static void keep_last(cg_estimator *e, uint32_t n)
{
    memmove(e->samples, e->samples + e->n_samples - n, n * sizeof e->samples[0]);
    e->n_samples = n;
}

/* Whether the last n samples all lie on one side of what was before them, a factor apart. */
static int changed(const cg_estimator *e, const double *weights, uint32_t n, int drop)
{
    if (e->n_samples <= n)
        return 0;
    const uint32_t n_before = e->n_samples - n;
    const double before = mean_bps(e, weights, n_before);
    for (uint32_t i = n_before; i < e->n_samples; i++)
        if (drop ? sample_bps(&e->samples[i]) * CHANGE_FACTOR > before
                 : sample_bps(&e->samples[i]) < before * CHANGE_FACTOR)
            return 0;
    return 1;
}

/* How much longer or shorter than by the estimate each took, weighted by its time. */
static double deviation(const cg_estimator *e, const double *weights)
{
    const double bps = cg_estimator_bps(e);
    double squares = 0, ns = 0;
    for (uint32_t i = 0; i < e->n_samples; i++) {
        const double off = bps / sample_bps(&e->samples[i]) - 1;
        const double expected_ns = weights[i] * e->samples[i].bytes * 8e9 / bps;
        squares += expected_ns * off * off;
        ns += expected_ns;
    }
    return sqrt(squares / ns);
}

static void add_sample(cg_estimator *e, double bytes, double ns, uint64_t at_ns)
{
    if (e->n_samples == CG_ESTIMATOR_WINDOW)
        keep_last(e, CG_ESTIMATOR_WINDOW - 1);
    e->n_added++;
    e->samples[e->n_samples++] = (cg_link_sample){.bytes = bytes, .ns = ns, .at_ns = at_ns};
    e->generation++;
    if (e->n_samples >= SURE_SAMPLES)
        e->n_forgotten = 0;
    double all[CG_ESTIMATOR_WINDOW];
    weigh(e, all);
    const uint32_t n_before = e->n_samples;
    if (changed(e, all, CG_ESTIMATOR_DROP_SAMPLES, 1))
        keep_last(e, CG_ESTIMATOR_DROP_SAMPLES);
    else if (changed(e, all, RISE_SAMPLES, 0))
        keep_last(e, RISE_SAMPLES);
    const double *weights = all + n_before - e->n_samples;
    e->mean_bps = mean_bps(e, weights, e->n_samples);
    e->deviation = deviation(e, weights);
}

void cg_estimator_add(cg_estimator *e, uint64_t bytes, uint64_t duration_ns, uint64_t at_ns)
{
    if (bytes > 0 && duration_ns > 0)
        add_sample(e, (double)bytes, (double)duration_ns, at_ns);
}

static double mix(double mean, double bps)
{
    return mean > 0 ? MEMORY_KEEP * mean + (1 - MEMORY_KEEP) * bps : bps;
}

void cg_estimator_add_load(cg_estimator *e, const cg_reported_load *load, double latency_ns,
                           uint64_t at_ns)
{
    const double bytes = (double)load->bytes - (double)load->memory_bytes,
                 ns = (double)load->ns - (double)load->memory_ns;
    if (load->memory_bytes > 0 && load->memory_ns > 0 && !(bytes > 0)) {
        e->memory_bps =
            mix(e->memory_bps, (double)load->memory_bytes * 8e9 / (double)load->memory_ns);
        e->generation++;
    }
    /* So little is a round trip rather than the link, unless it was faster than the estimate. */
    const bool says_little = bytes < SAMPLE_BYTES && ns < least_sample_ns(latency_ns) &&
                             has_estimate(e) && bytes * 8e9 < cg_estimator_bps(e) * ns;
    if (bytes > 0 && ns > 0 && !says_little)
        add_sample(e, bytes, ns, at_ns);
}

double cg_estimator_last_bps(const cg_estimator *e)
{
    if (e->n_samples == 0)
        return e->prior_bps > 0 ? e->prior_bps : e->memory_bps;
    return sample_bps(&e->samples[e->n_samples - 1]);
}

double cg_estimator_bps(const cg_estimator *e)
{
    if (e->n_samples == 0 || e->kind == CG_ESTIMATOR_LAST)
        return cg_estimator_last_bps(e);
    return e->mean_bps;
}

double cg_estimator_low_bps(const cg_estimator *e, uint64_t now_ns)
{
    const double bps = cg_estimator_bps(e);
    if (e->n_samples == 0)
        return bps / PRIOR_DOUBT;
    const uint64_t newest_ns = e->samples[e->n_samples - 1].at_ns;
    const double idle_ns = now_ns > newest_ns ? (double)(now_ns - newest_ns) : 0;
    /* Three doubts: how far the samples lie apart, how few they are, and how long ago the last one
     * was. */
    return bps / ((1 + e->deviation) * (1 + 1.0 / (1 + e->n_samples)) *
                  (2 - exp2(-idle_ns / HALF_LIFE_NS)));
}

double cg_estimator_hope(const cg_estimator *e)
{
    return e->n_samples == 0 ? PRIOR_DOUBT : HOPE;
}

/* Of less than a round trip the store is not as far as it was once. */
static bool is_trip(const cg_link_sample *sample, double latency_ns)
{
    return sample->ns >= latency_ns / TRIPS && sample->ns < TRIPS * latency_ns;
}

double cg_estimator_without_trip(const cg_estimator *e, double latency_ns)
{
    if (e->n_samples == 0 || latency_ns < CG_FAR_NS)
        return 1;
    for (uint32_t i = 0; i < e->n_samples; i++)
        if (!is_trip(&e->samples[i], latency_ns))
            return 1;
    const cg_link_sample *last = &e->samples[e->n_samples - 1];
    const double ns = fmax(last->ns - latency_ns, last->ns / CG_ESTIMATOR_MOST_TRIP);
    return fmin(fmax(last->bytes * 8e9 / ns / cg_estimator_bps(e), 1), CG_ESTIMATOR_MOST_TRIP);
}

double cg_estimator_trips_alone(const cg_estimator *e, double latency_ns)
{
    return latency_ns < FAR_TRIP_NS ? 1 : cg_estimator_without_trip(e, latency_ns);
}

bool cg_estimator_forget_old(cg_estimator *e, uint64_t now_ns)
{
    uint64_t old_ns = (OLD_NS / CG_ESTIMATOR_WINDOW * e->n_samples) << e->n_forgotten;
    if (old_ns > OLD_NS)
        old_ns = OLD_NS;
    if (e->n_samples == 0 || now_ns < e->samples[e->n_samples - 1].at_ns + old_ns)
        return false;
    e->n_forgotten += e->n_forgotten < MOST_FORGOTTEN;
    e->n_samples = 0;
    e->memory_bps = 0;
    e->generation++;
    return true;
}

bool cg_estimator_doubt_prior(cg_estimator *e, uint64_t now_ns)
{
    if (e->n_samples > 0 || !(e->prior_bps > 0))
        return false;
    const uint32_t shift = e->n_doubted < MOST_FORGOTTEN ? e->n_doubted : MOST_FORGOTTEN;
    if (e->n_doubted > 0 && now_ns < e->doubted_ns + (OLD_NS << shift) / 2)
        return false;
    e->n_doubted += e->n_doubted < UINT32_MAX;
    e->doubted_ns = now_ns;
    return true;
}

/* Every read under way gets its share of the time since the number of them last changed. */
static void advance(cg_link_meter *meter, uint64_t now_ns)
{
    if (now_ns <= meter->last_ns)
        return;
    if (meter->n_reading > 0)
        meter->share_ns += (double)(now_ns - meter->last_ns) / meter->n_reading;
    meter->last_ns = now_ns;
}

/* The read of that id; of 0 a free place. NULL: there is none. */
static cg_link_read *find_read(cg_link_meter *meter, uint64_t id)
{
    for (int i = 0; i < CG_METER_READS; i++)
        if (meter->reads[i].id == id)
            return &meter->reads[i];
    return NULL;
}

cg_link_mark cg_link_meter_begin(cg_link_meter *meter, uint64_t bytes, uint64_t now_ns)
{
    advance(meter, now_ns);
    if (++meter->n_reading > meter->n_least)
        meter->n_least = meter->n_reading;
    const cg_link_mark mark = {
        .id = ++meter->last_id, .bytes = (double)bytes, .share_ns = meter->share_ns};
    meter->under_way_bytes += mark.bytes;
    cg_link_read *read = find_read(meter, 0);
    if (read != NULL)
        *read = (cg_link_read){
            .id = mark.id, .begun_ns = now_ns, .bytes = (double)bytes, .share_ns = mark.share_ns};
    return mark;
}

/* The link has brought bytes of a read that began at begun_ns, and as many for each of n reads, if
 * it shares alike: sets aside what should have ended by that. */
static void set_aside(cg_link_meter *meter, uint64_t begun_ns, double bytes, uint32_t n,
                      uint64_t now_ns)
{
    for (int i = 0; i < CG_METER_READS; i++) {
        cg_link_read *read = &meter->reads[i];
        if (read->id == 0 || read->is_aside || read->begun_ns >= begun_ns)
            continue;
        read->overtaken_bytes += bytes / n;
        if (read->overtaken_bytes <= HANG_FACTOR * read->bytes ||
            (double)(now_ns - read->begun_ns) < HANG_NS)
            continue;
        read->is_aside = true;
        read->share_ns = meter->share_ns - read->share_ns;
        meter->n_reading--;
    }
}

bool cg_link_is_from_memory(uint64_t bytes, double duration_ns, double latency_ns)
{
    return (duration_ns < MEMORY_NS && (double)bytes * 8e9 > MEMORY_BPS * duration_ns) ||
           ((double)bytes < SAMPLE_BYTES && latency_ns >= CG_FAR_NS &&
            duration_ns < latency_ns / 2 && duration_ns < FAR_MEMORY_NS);
}

static void take_sample(cg_link_meter *meter, uint64_t now_ns, cg_estimator *e)
{
    if (meter->ns > 0)
        add_sample(e, meter->bytes, meter->ns, now_ns);
    meter->bytes = meter->ns = 0;
    meter->n_ended = 0;
    meter->n_least = meter->n_reading;
}

static int is_sample(const cg_link_meter *meter, double latency_ns)
{
    return meter->n_ended >= meter->n_least &&
           (meter->bytes >= SAMPLE_BYTES || meter->ns >= least_sample_ns(latency_ns));
}

/* The time that bytes take by the estimate, most_ns at most. */
static double usual_ns(const cg_estimator *e, uint64_t bytes, double most_ns)
{
    const double bps = cg_estimator_bps(e), ns = bps > 0 ? (double)bytes * 8e9 / bps : most_ns;
    return ns < most_ns ? ns : most_ns;
}

double cg_link_meter_end(cg_link_meter *meter, cg_link_mark mark, uint64_t bytes, uint64_t begun_ns,
                         uint64_t now_ns, double latency_ns, cg_estimator *e)
{
    advance(meter, now_ns);
    cg_link_read *read = find_read(meter, mark.id);
    const bool was_aside = read != NULL && read->is_aside;
    const double share_ns = was_aside ? read->share_ns : meter->share_ns - mark.share_ns;
    const uint32_t n_before = meter->n_reading;
    if (!was_aside)
        meter->n_reading--;
    if (read != NULL)
        *read = (cg_link_read){0};
    meter->under_way_bytes -= mark.bytes;
    const double duration_ns = now_ns > begun_ns ? (double)(now_ns - begun_ns) : 0;
    if (bytes > 0 && cg_link_is_from_memory(bytes, duration_ns, latency_ns)) {
        e->memory_bps =
            mix(e->memory_bps, (double)bytes * 8e9 / (duration_ns > 1 ? duration_ns : 1));
        e->generation++;
    } else if (bytes > 0) {
        meter->came_ns = now_ns;
        meter->came_bytes += (double)bytes;
        meter->bytes += (double)bytes;
        meter->ns += was_aside ? usual_ns(e, bytes, share_ns) : share_ns;
        if (!was_aside)
            set_aside(meter, begun_ns, (double)bytes, n_before, now_ns);
    }
    meter->n_ended++;
    if (is_sample(meter, latency_ns))
        take_sample(meter, now_ns, e);
    if (meter->n_reading > 0)
        return share_ns;
    /* The link falls idle with less than a sample: it is at least so fast. */
    if (meter->bytes * 8e9 < cg_estimator_bps(e) * meter->ns && has_estimate(e))
        meter->bytes = meter->ns = 0;
    take_sample(meter, now_ns, e);
    return share_ns;
}
