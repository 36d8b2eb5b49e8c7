/* codec/profile_finite.h - bounds within which no decoder leaves the range of f32.
 *
 * Bytes: codec/FORMAT.md, "Profile".
 *
 * Threads: pure functions.
 */
#ifndef CG_CODEC_PROFILE_FINITE_H
#define CG_CODEC_PROFILE_FINITE_H
#include "codec/profile_data.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Of what a decoder may come to, whatever the symbols are: below the largest bf16 and f32, with
 * room for a rotation. */
#define CG_MOST_ELEMENT 1e38
/* The magnitude of a symbol. */
#define CG_MOST_SYMBOL 32768.0

/* Whether all decoded elements are finite, if each lies at most most_sum steps of its channel away
 * from the channel's mean, or from its anchor. */
bool cg_profile_stays_finite(const cg_profile *p, const cg_group *group, unsigned matrix,
                             double most_sum);

#ifdef __cplusplus
}
#endif
#endif
