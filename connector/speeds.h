/* connector/speeds.h - how fast reading, decoding and recomputing go here, as far as a connector
 * has seen them: what a controller decides by.
 *
 * Threads: plain data; the owner locks.
 */
#ifndef CG_CONNECTOR_SPEEDS_H
#define CG_CONNECTOR_SPEEDS_H
#include "codec/geometry.h"
#include "connector/estimator.h"
#include "connector/prefill.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What loads still must have of a link. */
typedef struct cg_wanted {
    double bytes;
    int64_t n_loads;
} cg_wanted;

typedef struct cg_speeds {
    cg_estimator link;
    cg_link_meter meter;                  /* makes samples for link of this process's reads */
    cg_wanted wanted, told;               /* by own loads; as the link knows it */
    cg_wanted others;                     /* by those of other connectors */
    double latency_ns;                    /* until the store answers a question; 0: at once */
    double way_ns;                        /* the least of that since: no byte comes sooner */
    uint32_t n_threads;                   /* that decode */
    double decode_thread_ns[CG_N_LEVELS]; /* a token of that level, running mean; 0: unknown */
    double configured_tokens_per_s;       /* of prefill; 0: measured */
    double configured_doubling_tokens;    /* the same */
    cg_prefills prefills;
} cg_speeds;

/* n_tokens of a level took thread_ns of thread time, until they were in their blocks. */
void cg_speeds_add_decode(cg_speeds *speeds, unsigned level, uint32_t n_tokens, uint64_t thread_ns);
/* The same of a load of which only the sums are known: n_tokens, of so many chunks of each level.
 * The levels share the time as they would by what is known of them. Without chunks nothing is
 * learnt. */
void cg_speeds_add_load(cg_speeds *speeds, const uint32_t chunks_at[CG_N_LEVELS], uint32_t n_tokens,
                        uint64_t thread_ns);

/* What decoding and writing to blocks costs a token in wall time with all threads at work; a level
 * that was not measured goes by one that was. 0: unknown. */
void cg_speeds_decode(const cg_speeds *speeds, double ns_per_token_out[CG_N_LEVELS]);
/* What decoding a chunk costs in wall time with all threads at work: as measured, also of another
 * level, or else guessed from its coded bytes. */
double cg_speeds_decode_chunk(const cg_speeds *speeds, uint8_t level, uint32_t n_tokens,
                              uint64_t bytes);
/* The link's speed for a look-up to decide by; 0: unknown. Where all that was seen of it are round
 * trips it is what they say without them: only a load can tell, and can be cut short. */
double cg_speeds_link_bps(const cg_speeds *speeds);
/* Of prefill, as configured or else as measured. */
cg_prefill_speed cg_speeds_recompute(const cg_speeds *speeds);

#ifdef __cplusplus
}
#endif
#endif
