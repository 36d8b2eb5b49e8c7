#include "connector/estimator.h"

#include <string.h>

enum { DROP_SAMPLES = 2, RISE_SAMPLES = 3 };
static const double CHANGE_FACTOR = 2.0;
enum { MIN_SAMPLE_NS = 100 * 1000 }; /* shorter times measure system calls rather than the link */

void cg_estimator_init(cg_estimator *e, cg_estimator_kind kind, double prior_bps)
{
    memset(e, 0, sizeof *e);
    e->kind = kind;
    e->prior_bps = prior_bps;
}

static double harmonic_mean(const double *bps, uint32_t n)
{
    double inverse = 0;
    for (uint32_t i = 0; i < n; i++)
        inverse += 1.0 / bps[i];
    return n / inverse;
}

static void keep_last(cg_estimator *e, uint32_t n)
{
    memmove(e->sample_bps, e->sample_bps + e->n_samples - n, n * sizeof e->sample_bps[0]);
    e->n_samples = n;
}

/* Whether the last n samples all lie on one side of what was before them, a factor apart. */
static int changed(const cg_estimator *e, uint32_t n, int drop)
{
    if (e->n_samples <= n)
        return 0;
    const uint32_t n_before = e->n_samples - n;
    const double before = harmonic_mean(e->sample_bps, n_before);
    for (uint32_t i = n_before; i < e->n_samples; i++)
        if (drop ? e->sample_bps[i] * CHANGE_FACTOR > before
                 : e->sample_bps[i] < before * CHANGE_FACTOR)
            return 0;
    return 1;
}

void cg_estimator_add(cg_estimator *e, uint64_t bytes, uint64_t duration_ns)
{
    if (bytes == 0 || duration_ns == 0)
        return;
    if (e->n_samples == CG_ESTIMATOR_WINDOW)
        keep_last(e, CG_ESTIMATOR_WINDOW - 1);
    e->sample_bps[e->n_samples++] = (double)bytes * 8e9 / (double)duration_ns;
    e->generation++;
    if (changed(e, DROP_SAMPLES, 1))
        keep_last(e, DROP_SAMPLES);
    else if (changed(e, RISE_SAMPLES, 0))
        keep_last(e, RISE_SAMPLES);
}

double cg_estimator_bps(const cg_estimator *e)
{
    if (e->n_samples == 0)
        return e->prior_bps;
    if (e->kind == CG_ESTIMATOR_LAST)
        return e->sample_bps[e->n_samples - 1];
    return harmonic_mean(e->sample_bps, e->n_samples);
}

void cg_link_meter_add(cg_link_meter *meter, uint64_t bytes, uint64_t submitted_ns,
                       uint64_t completed_ns, int still_reading, cg_estimator *estimator)
{
    const uint64_t begin_ns =
        submitted_ns > meter->counted_until_ns ? submitted_ns : meter->counted_until_ns;
    if (completed_ns > begin_ns) {
        meter->busy_ns += completed_ns - begin_ns;
        meter->counted_until_ns = completed_ns;
    }
    meter->bytes += bytes;
    if (meter->busy_ns < MIN_SAMPLE_NS && still_reading)
        return;
    cg_estimator_add(estimator, meter->bytes, meter->busy_ns);
    meter->bytes = meter->busy_ns = 0;
}
