/* connector/estimator.h - how fast the link to the store is, from the reads that were made.
 *
 * The estimate is the harmonic mean of the last 20 samples, each the throughput of a chunk or so.
 * That mean is the throughput of all their bytes together if the samples are alike in size, and one
 * spike hardly moves it. Alone it would hide a sudden change for 20 samples. So when the last two
 * samples agree on a drop by a factor of 2, or the last three on such a rise, what was before them
 * is forgotten. A drop is believed sooner because it costs the deadline; a rise only quality.
 * `last` is the estimator of the CacheGen paper: the last chunk's throughput.
 * Threads: plain data; the owner locks.
 */
#ifndef CG_CONNECTOR_ESTIMATOR_H
#define CG_CONNECTOR_ESTIMATOR_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { CG_ESTIMATOR_WINDOW = 20 };

typedef enum cg_estimator_kind {
    CG_ESTIMATOR_HARMONIC = 0,
    CG_ESTIMATOR_LAST = 1
} cg_estimator_kind;

typedef struct cg_estimator {
    cg_estimator_kind kind;
    double prior_bps;                       /* what holds before the first sample; 0: nothing */
    double sample_bps[CG_ESTIMATOR_WINDOW]; /* oldest first */
    uint32_t n_samples;
    uint32_t generation; /* counts samples: who decided by fewer may decide anew */
} cg_estimator;

void cg_estimator_init(cg_estimator *estimator, cg_estimator_kind kind, double prior_bps);
/* bytes were read in duration_ns of wall time. Either may be 0: then nothing is learnt. */
void cg_estimator_add(cg_estimator *estimator, uint64_t bytes, uint64_t duration_ns);
/* Bits a second; 0: unknown. */
double cg_estimator_bps(const cg_estimator *estimator);

/* Turns reads that overlap into samples of the whole link: their bytes over the wall time in which
 * any of them was under way. Reads from a page cache end within microseconds of each other, which
 * says nothing alone; they are gathered until they make a sample of some length. */
typedef struct cg_link_meter {
    uint64_t counted_until_ns;
    uint64_t bytes, busy_ns; /* not yet a sample */
} cg_link_meter;

/* One read of bytes was under way from submitted_ns to completed_ns; still_reading: others still
 * are. */
void cg_link_meter_add(cg_link_meter *meter, uint64_t bytes, uint64_t submitted_ns,
                       uint64_t completed_ns, int still_reading, cg_estimator *estimator);

#ifdef __cplusplus
}
#endif
#endif
