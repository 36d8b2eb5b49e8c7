/* connector/model.h - which model a connector serves: its geometry, its fingerprint and its current
 * profile.
 *
 * There are two sources. One is <root>/<model>/model.json, as the profile tool writes it:
 *   {"version": 1, "n_layers": .., "n_kv_heads": .., "head_dim": .., "dtype": "bf16",
 *   "model_fingerprint": "<32 hex>", ..}
 * If its curve of quality is not valid, only the curve is ignored. The other source is the key
 * `geometry` of the configuration. It gives what is missing in the file; what both give must agree.
 * Only dtype may differ: it is that of the engine's cache, and the configuration's wins. Keys of
 * chunks are rooted in fingerprint and dtype together, so engines of one model with caches of
 * different dtypes never share a chunk. Scales of fp8 come from the model's weights, so the
 * fingerprint covers them. The configuration gives their values, and the profile is made for them.
 * Threads: read-only once opened.
 */
#ifndef CG_CONNECTOR_MODEL_H
#define CG_CONNECTOR_MODEL_H
#include "codec/profile.h"
#include "connector/config.h"
#include "connector/quality.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cg_model {
    cg_geometry geometry;
    cg_fingerprint fingerprint;
    uint64_t scales; /* cg_cache_scales_hash(): of the engine's fp8 cache; 0: all are 1 */
    cg_fingerprint key_fingerprint;     /* cg_key_model(): what cg_key_root() takes */
    bool has_json;                      /* false: the first save writes model.json */
    cg_profile *profile;                /* NULL: none, L0 only */
    cg_fingerprint profile_fingerprint; /* zeros without */
    cg_quality quality;                 /* the profile's in model.json, else the built-in one */
} cg_model;

/* Reads <model>/model.json and <model>/profiles/default below the store's root. The caller ends it
 * with cg_model_destroy(). Errors leave a sentence in error; so does, with CG_OK, a bad curve of
 * quality. Else the sentence is empty. */
cg_status cg_model_init(cg_model *model_out, const cg_config *config, const cg_sentence *error);
void cg_model_destroy(cg_model *model);

/* The profile's fingerprint, as the store's calls want it; NULL without a profile. The model's. */
const cg_fingerprint *cg_model_profile(const cg_model *model);

/* The text of a model.json for this model, malloc'ed, the caller's; NULL without memory. */
char *cg_model_json(const cg_model *model);

#ifdef __cplusplus
}
#endif
#endif
