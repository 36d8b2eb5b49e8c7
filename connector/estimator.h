/* connector/estimator.h - how fast the link to the store is, from the reads that were made.
 *
 * The estimate is the bytes of the last 20 samples over the time that they took: their harmonic
 * mean, each weighted by its bytes. A short spike or a small read hardly moves it. Alone it would
 * hide a sudden change for 20 samples. So when the last two samples agree on a drop by a factor of
 * 2, or the last three on such a rise, what was before them is forgotten. A drop is believed sooner
 * because it costs the deadline; a rise only quality. What is ten seconds older than the newest
 * sample counts half.
 * `last` is the estimator of the CacheGen paper: the last chunk's throughput.
 * Threads: plain data; the owner locks.
 */
#ifndef CG_CONNECTOR_ESTIMATOR_H
#define CG_CONNECTOR_ESTIMATOR_H
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { CG_FAR_NS = 3000000 }; /* a store whose latency is that or more is a network away */

enum {
    CG_ESTIMATOR_WINDOW = 20,
    CG_ESTIMATOR_DROP_SAMPLES = 2, /* that make a drop believed */
    CG_ESTIMATOR_MOST_TRIP = 8,    /* cg_estimator_without_trip() says no more: the last sample is
                                      nothing but a round trip then, and says nothing of the link */
    CG_METER_READS = 32
};

typedef enum cg_estimator_kind {
    CG_ESTIMATOR_HARMONIC = 0,
    CG_ESTIMATOR_LAST = 1
} cg_estimator_kind;

typedef struct cg_link_sample {
    double bytes, ns; /* in so much time of the whole link */
    uint64_t at_ns;   /* when it ended */
} cg_link_sample;

typedef struct cg_estimator {
    cg_estimator_kind kind;
    double prior_bps;  /* what holds before the first sample; 0: nothing */
    double memory_bps; /* of reads that no link can have served */
    cg_link_sample samples[CG_ESTIMATOR_WINDOW]; /* oldest first */
    uint32_t n_samples;
    double mean_bps, deviation; /* of the samples; deviation: of their times, relative */
    uint32_t n_forgotten;       /* times in a row that few samples came after it */
    uint32_t n_added;           /* samples, ever */
    uint32_t n_doubted;         /* times that the prior was */
    uint64_t doubted_ns;        /* when it was last */
    uint32_t generation; /* counts what was learnt: a decision made by less may be made anew */
} cg_estimator;

void cg_estimator_init(cg_estimator *estimator, cg_estimator_kind kind, double prior_bps);
/* bytes were read in duration_ns of the whole link's time, until at_ns (of any one clock). Without
 * bytes or time nothing is learnt. */
void cg_estimator_add(cg_estimator *estimator, uint64_t bytes, uint64_t duration_ns,
                      uint64_t at_ns);
/* A whole load in another process, as that one has measured it: bytes in ns; and what of both was
 * memory. */
typedef struct cg_reported_load {
    uint64_t bytes, memory_bytes, ns, memory_ns;
} cg_reported_load;
/* Learns of it. A small one that was slower than the estimate is left out, as cg_link_meter_end()
 * does, with that latency. */
void cg_estimator_add_load(cg_estimator *estimator, const cg_reported_load *load, double latency_ns,
                           uint64_t at_ns);
/* Bits a second; 0: unknown. Where every read came from memory it is the memory's speed. */
double cg_estimator_bps(const cg_estimator *estimator);
/* Of the last sample alone, whatever the kind. */
double cg_estimator_last_bps(const cg_estimator *estimator);
/* What the link will very likely reach: the estimate less the samples' spread, and less still where
 * there are few or the last was long ago. 0: unknown. */
double cg_estimator_low_bps(const cg_estimator *estimator, uint64_t now_ns);

/* How many times faster than the estimate the link may well be. */
double cg_estimator_hope(const cg_estimator *estimator);
/* Where all samples are little but round trips to a far store, as at the start of a load over a
 * fast link that is not known: how many times the estimate the last one says without that,
 * CG_ESTIMATOR_MOST_TRIP at most. Else 1: over a link that is known, a sample that is as long as a
 * round trip need not be one. latency_ns: until the store answers a question. */
double cg_estimator_without_trip(const cg_estimator *estimator, double latency_ns);
/* The same for how much is asked for: where the store is 15 ms away or more. Else 1. */
double cg_estimator_trips_alone(const cg_estimator *estimator, double latency_ns);

/* Forgets all samples if the last one is old: then the link is unknown, as before the first. A
 * whole window of samples is old after half a minute. Fewer are old sooner, after a twentieth of
 * that for each: they may be of a moment in which the link stood still. Whenever a link that was
 * forgotten has shown no more than a few samples again, the time doubles. False: there are none, or
 * they are younger. Meant for a link whose estimate makes every load look useless: it would never
 * be measured again. */
bool cg_estimator_forget_old(cg_estimator *estimator, uint64_t now_ns);

/* Whether a prior that keeps all loads away should be doubted: nothing was ever measured since it
 * was told, or what was is forgotten. So it is at once, half a minute later, and then after twice
 * the time each, up to eight minutes. */
bool cg_estimator_doubt_prior(cg_estimator *estimator, uint64_t now_ns);

/* Turns reads that overlap into samples of the whole link. At each moment the link's time is
 * divided equally among the reads under way. A read's bytes over the sum of its shares is the
 * link's speed. Its bytes over its own duration would be n times too low with n reads at once. All
 * reads of a process from one store share a meter.
 * A link may serve reads in order instead. Then the first of a burst get less than what they took
 * and the last get more. That cancels out over as many reads as were under way at once, so a sample
 * has at least so many.
 * Left out: what came from the page cache, faster than a link could, or sooner than a far store
 * answers; and a small read that had the link to itself and was slower than the estimate, or than
 * what holds before the first sample, for that was a round trip rather than the link.
 * A read that hangs gets nothing of the link, so it gets no share either: it is set aside when it
 * is old and reads that began after it have brought more than twice what would have been its part
 * meanwhile. If it comes all the same, its bytes count, with the share that it had until then, but
 * not as slower than the others: what it waited for was not the link. A slow link makes nobody
 * hang: there, what began later does not end first. */
typedef struct cg_link_read {
    uint64_t id; /* 0: this place is free */
    uint64_t begun_ns;
    double bytes;           /* that it asks for */
    double overtaken_bytes; /* its part of what reads that began later have brought */
    double share_ns;        /* the meter's when it began; once it is set aside, what it has had */
    bool is_aside;
} cg_link_read;

typedef struct cg_link_meter {
    uint64_t last_ns;       /* when the number of reads last changed */
    uint64_t came_ns;       /* when bytes came over the link last; 0: never */
    double came_bytes;      /* that came over it, since the meter's start */
    double under_way_bytes; /* that reads ask for which have not ended */
    double share_ns;        /* what a read would have had since the meter's start */
    uint32_t n_reading;     /* that are not set aside */
    double bytes, ns;       /* of reads that are not yet a sample */
    uint32_t n_ended;       /* how many those are */
    uint32_t n_least;       /* the most that were under way at once since the last sample */
    uint64_t last_id;
    cg_link_read reads[CG_METER_READS]; /* under way; what finds no place is never set aside */
} cg_link_meter;

/* What a meter knows a read by. */
typedef struct cg_link_mark {
    uint64_t id;
    double bytes;    /* that it asks for */
    double share_ns; /* the meter's when it began */
} cg_link_mark;

/* Whether bytes came sooner than a network and a server could bring them: from the page cache.
 * latency_ns: until the store answers a question; 0: not known. */
bool cg_link_is_from_memory(uint64_t bytes, double duration_ns, double latency_ns);

/* A read of so many bytes begins. Returns what cg_link_meter_end() wants back. */
cg_link_mark cg_link_meter_begin(cg_link_meter *meter, uint64_t bytes, uint64_t now_ns);
/* The read that began at begun_ns, when cg_link_meter_begin() returned mark, ended with so many
 * bytes (0: it failed, which teaches nothing). latency_ns: cg_link_is_from_memory(). Returns its
 * share of the time that the link was busy, in ns. */
double cg_link_meter_end(cg_link_meter *meter, cg_link_mark mark, uint64_t bytes, uint64_t begun_ns,
                         uint64_t now_ns, double latency_ns, cg_estimator *estimator);

#ifdef __cplusplus
}
#endif
#endif
