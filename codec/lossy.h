/* codec/lossy.h - the table of presets.
 *
 * Asked once, when a profile is read: profile->preset. Nobody calls a preset by its name.
 * Threads: the table is constant.
 */
#ifndef CG_CODEC_LOSSY_H
#define CG_CODEC_LOSSY_H
#include "codec/preset.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The preset of these transforms, of static storage. NULL: there is none. */
const cg_preset *cg_lossy_preset(uint32_t transforms);

#ifdef __cplusplus
}
#endif
#endif
