/* connector/quality.h - what a chunk at a level costs: KL divergence of the tokens that follow.
 *
 * The cost of a chunk is its sensitivity times the error of its level. Sensitivities fall with the
 * distance to the end of the loaded prefix; those of a whole context add up to 1. Errors are of
 * whole contexts of some length. The profile tool measures both for a model and a profile
 * (connector/quality_read.h). The built-in curve is for models without one. It is that of
 * SmolLM2-135M with the codec klt (tests/bench/results, 51b0177): 65 % lies in the last 256 tokens
 * of 3,072, 76 % in the last 512. For a plan only ratios count, and those between levels hardly
 * differ from model to model.
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

enum { CG_QUALITY_MAX_POINTS = 16 };

/* A point of the curve: the last `tokens` of a context have the part `sum` of its sensitivity. */
typedef struct cg_quality_point {
    double tokens, sum;
} cg_quality_point;

typedef struct cg_quality {
    uint32_t n_points;
    /* Both rise; from (0, 0), which is not among them, to the whole context, whose sum is 1. */
    cg_quality_point points[CG_QUALITY_MAX_POINTS];
    double beyond;              /* sum rises by beyond * log(tokens / the last point's) after it */
    double errors[CG_N_LEVELS]; /* KL divergence, in nats, of the whole context at each level */
} cg_quality;

extern const cg_quality cg_quality_built_in;

/* The part of a context's sensitivity that lies in n_tokens of which the last is followed by
 * n_behind tokens of the loaded prefix. */
double cg_quality_sensitivity(const cg_quality *quality, uint32_t n_behind, uint32_t n_tokens);
/* KL divergence, in nats, that these tokens add at a level. */
double cg_quality_kl(const cg_quality *quality, uint32_t n_behind, uint32_t n_tokens,
                     unsigned level);
/* Bounds what a load may cost. Leaves each of chunks[n_chunks], which are all that is loaded, a
 * single level: those levels that together cost at most max_kl and take the fewest bytes, or nearly
 * so. It begins with the coarsest and refines where a byte saves most. False: no levels keep the
 * bound; the sizes are then as before. */
bool cg_quality_bound(const cg_quality *quality, cg_controller_chunk *chunks, size_t n_chunks,
                      double max_kl);

#ifdef __cplusplus
}
#endif
#endif
