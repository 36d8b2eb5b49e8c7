/* connector/quality_read.h - reads the curve of quality that the profile tool has measured from a
 * model.json.
 *
 * It is under the key "quality" there, by profile (codec/FORMAT.md, "The tree of a store"). Numbers
 * from a file steer what is read and what is promised, so each is checked. Threads: pure functions.
 */
#ifndef CG_CONNECTOR_QUALITY_READ_H
#define CG_CONNECTOR_QUALITY_READ_H
#include "codec/key.h"
#include "connector/quality.h"
#include "connector/sentence.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Reads the curve of this profile from model_json, the text of a model.json (a string).
 * CG_ERR_NOT_FOUND: it has no curve, or another profile's. CG_ERR_CORRUPT: its curve is not valid,
 * and a sentence in error says why. CG_ERR_NO_MEMORY. After an error *quality_out is the built-in
 * curve. */
cg_status cg_quality_read(cg_quality *quality_out, const char *model_json,
                          const cg_fingerprint *profile, const cg_sentence *error);

#ifdef __cplusplus
}
#endif
#endif
