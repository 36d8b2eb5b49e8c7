/* connector/prefill.h - what an engine takes to compute tokens of a prompt, from the prefills that
 * it made.
 *
 * Attention looks at all tokens before, so a token takes the longer the later it stands:
 * (1 + position / doubling_tokens) / tokens_per_s. The mean speed is that of all tokens that were
 * computed, older ones counting less. How it falls is the median slope between the last prefills
 * that stood well apart: one that something else held up does not move it. Where there are few
 * such, a token takes always as long.
 * Threads: plain data; the owner locks.
 */
#ifndef CG_CONNECTOR_PREFILL_H
#define CG_CONNECTOR_PREFILL_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { CG_PREFILL_SAMPLES = 16 };

typedef struct cg_prefill_speed {
    double tokens_per_s;    /* at the start of a prompt; 0: unknown */
    double doubling_tokens; /* behind so many one takes twice as long; 0: never */
} cg_prefill_speed;

typedef struct cg_prefill_sum {
    double tokens, pairs, ns;
} cg_prefill_sum;

typedef struct cg_prefills {
    cg_prefill_sum sum;       /* in which older prefills count less and less */
    cg_prefill_sum short_sum; /* of short ones, which hardly tell: a step has a cost of its own,
                                 whatever it computes */
    double positions[CG_PREFILL_SAMPLES], token_ns[CG_PREFILL_SAMPLES]; /* the last ones, a ring */
    uint32_t n_samples, next;
    double pair_ns; /* what a token takes for each one before it; 0: not known */
} cg_prefills;

/* The engine computed n_tokens in duration_ns; before them stood n_pairs tokens in all: the sum of
 * their positions. Short prefills count only until there was a longer one. */
void cg_prefills_add(cg_prefills *prefills, uint32_t n_tokens, uint64_t n_pairs,
                     uint64_t duration_ns);
/* configured: what is not 0 in it holds, whatever was measured; at a configured speed that is said
 * to double nowhere it doubles nowhere. */
cg_prefill_speed cg_prefills_speed(const cg_prefills *prefills, cg_prefill_speed configured);

/* What the last n_tokens before end_token take; 0 where the speed is unknown. An end_token of less
 * than n_tokens counts as n_tokens. */
double cg_prefill_ns(cg_prefill_speed speed, double n_tokens, double end_token);
/* What n_tokens take before which n_pairs stand in all; 0 where the speed is unknown. */
double cg_prefill_pairs_ns(cg_prefill_speed speed, double n_tokens, double n_pairs);

#ifdef __cplusplus
}
#endif
#endif
