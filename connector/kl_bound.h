/* connector/kl_bound.h - how much of a prompt is loaded where its request bounds the KL divergence
 * that this may cost.
 *
 * Each chunk gets one level: the one that keeps the bound (connector/quality.h). Which one that is
 * depends on where the loaded prefix ends: the chunks before its end weigh most. The controller may
 * shorten the prefix to be in time, and then other levels keep the bound. So it is asked again,
 * until it loads all that it is asked for. It may shorten by a chunk at a time, hundreds of times,
 * and a look-up asks under the lock that an engine's step waits for. So each cut is at least twice
 * the one before, and then the end is looked for between the last two prefixes.
 * Threads: pure functions.
 */
#ifndef CG_CONNECTOR_KL_BOUND_H
#define CG_CONNECTOR_KL_BOUND_H
#include "connector/controller.h"
#include "connector/quality.h"
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* As cg_controller_decide(), of a prefix whose levels cost at most max_kl together. sizes_out
 * [n_chunks]: of each chunk that is loaded its one level. *n_asked_out: how often the controller
 * was asked, at most 2 log2(n_chunks) + 4 times. n_load 0: no levels keep the bound, or none of
 * them is worth it; or there is no memory. */
cg_controller_decision cg_kl_bound_decide(const cg_controller_input *input,
                                          const cg_quality *quality, double max_kl,
                                          cg_controller_chunk *sizes_out, uint8_t *levels_out,
                                          uint32_t *n_asked_out);

#ifdef __cplusplus
}
#endif
#endif
