/* codec/lossy.h - the table of presets.
 *
 * A decoder or encoder asks for its profile's preset once, and calls no preset by its name.
 * Threads: the table is constant.
 */
#ifndef CG_CODEC_LOSSY_H
#define CG_CODEC_LOSSY_H
#include "codec/preset.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The preset of a profile, of static storage; never NULL. */
const cg_preset *cg_lossy_preset(const cg_profile *profile);

#ifdef __cplusplus
}
#endif
#endif
