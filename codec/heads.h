/* codec/heads.h - heads of a chunk's K and V: loaded from the cache's dtype, stored to it, rotated.
 *
 * A head is head_dim neighbouring elements of one token, layer and plane. Inside the codec it is
 * f32. The rotation is the model's rotary embedding (NeoX pairing: element i with i + rotary_dim /
 * 2). The engine holds K rotated. Preset klt codes it as it was before the rotation: then its
 * channels have the same statistics at all positions. Arithmetic: codec/FORMAT.md, "What the lossy
 * levels mean", stages 4 and 5. Threads: read-only once made.
 */
#ifndef CG_CODEC_HEADS_H
#define CG_CODEC_HEADS_H
#include "codec/chunk.h"
#include "codec/profile_data.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What all heads of one chunk have in common. */
typedef struct cg_heads {
    const cg_profile *profile; /* NULL before cg_heads_init() */
    uint32_t first_position, n_tokens;
    unsigned dtype;
    float *cosine, *sine; /* [n_ropes][n_tokens][rotary_dim / 2], of the tokens' positions */
} cg_heads;

/* Computes the rotation of the chunk's tokens. profile must outlive *heads, which the caller
 * destroys. CG_ERR_NO_MEMORY. */
cg_status cg_heads_init(const cg_profile *profile, const cg_chunk_header *header, cg_heads *heads);
void cg_heads_destroy(cg_heads *heads); /* zeros are fine */

/* The first element of a head in the canonical layout (codec/codec.h) of a task; slice: which of
 * the task's layers and planes. */
static inline size_t cg_heads_element(const cg_heads *heads, size_t slice, size_t t, size_t head)
{
    const cg_geometry *g = &heads->profile->geometry;
    return ((slice * heads->n_tokens + t) * g->n_kv_heads + head) * g->head_dim;
}

/* Stores values[n_heads][head_dim] to out from index element on, rounded to the dtype. */
void cg_heads_store(const cg_heads *heads, const float *values, size_t n_heads, void *out,
                    size_t element);
/* Loads values[n_heads][head_dim] from there. False when one is not finite. */
bool cg_heads_load(const cg_heads *heads, const void *in, size_t element, size_t n_heads,
                   float *values);

/* Asks for what cg_heads_load() will load from there. Tokens of one head lie so far apart that a
 * CPU does not see them coming. */
static inline void cg_heads_prefetch(const cg_heads *heads, const void *in, size_t element)
{
    const size_t each = cg_dtype_bytes(heads->dtype),
                 n_bytes = heads->profile->geometry.head_dim * each;
    for (size_t i = 0; i < n_bytes; i += 64)
        __builtin_prefetch((const uint8_t *)in + element * each + i);
}

/* Where a token's cosines and sines begin in heads->cosine and heads->sine, for a layer of the
 * model. */
size_t cg_heads_rotation(const cg_heads *heads, uint32_t layer, size_t t);

/* Rotates values[head_dim] of the chunk's token t in place, as that layer of the model does; and
 * undoes it. */
void cg_heads_rotate(const cg_heads *heads, uint32_t layer, size_t t, float *values);
void cg_heads_unrotate(const cg_heads *heads, uint32_t layer, size_t t, float *values);

#ifdef __cplusplus
}
#endif
#endif
