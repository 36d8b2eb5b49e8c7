/* connector/quality.h - what a chunk at a level costs: KL divergence of the tokens that follow.
 *
 * The cost of a chunk is its sensitivity times the error of its level. Sensitivities fall with the
 * distance to the end of the loaded prefix: 65 % of all lies in the last 256 tokens of 3,072, 76 %
 * in the last 512. Errors are those of whole contexts of 3,072 tokens, so the sensitivities of such
 * a context add up to 1. Both were measured on SmolLM2-135M with the codec klt
 * (tests/bench/results). They are used for all models while profiles hold no figures of their own:
 * what counts for a plan are ratios, of which that between levels hardly differs.
 * Threads: pure functions.
 */
#ifndef CG_CONNECTOR_QUALITY_H
#define CG_CONNECTOR_QUALITY_H
#include "codec/geometry.h"
#include "connector/controller.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The part of a context's sensitivity that lies in n_tokens of which the last is followed by
 * n_behind tokens of the loaded prefix. */
double cg_quality_sensitivity(uint32_t n_behind, uint32_t n_tokens);
/* KL divergence, in nats, that these tokens add at a level. */
double cg_quality_kl(uint32_t n_behind, uint32_t n_tokens, unsigned level);
/* Leaves each of chunks[n_chunks], which are all that is loaded, one level: those of the fewest
 * bytes that together cost max_kl at most, or nearly so. It refines from the coarsest on, where a
 * byte saves most. False: no levels do; the sizes are then as before. */
bool cg_quality_bound(cg_controller_chunk *chunks, size_t n_chunks, double max_kl);

#ifdef __cplusplus
}
#endif
#endif
