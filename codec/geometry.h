/* codec/geometry.h - the shape of a model's KV cache, and its element types.
 *
 * Threads: pure functions.
 */
#ifndef CG_CODEC_GEOMETRY_H
#define CG_CODEC_GEOMETRY_H
#include "codec/status.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    CG_MAX_LAYERS = 1024,
    CG_MAX_KV_HEADS = 1024,
    CG_MAX_HEAD_DIM = 1024,
    CG_MAX_CHUNK_TOKENS = 65536,
    CG_BLOCK_TOKENS = 8,   /* of the DCT, and of a step */
    CG_N_STEP_FACTORS = 7, /* that a block's step may have: codec/block_order.h */
    CG_FINGERPRINT_BYTES = 16,
    CG_KEY_BYTES = 16,
};

typedef enum cg_dtype {
    CG_DTYPE_BF16 = 1,
    CG_DTYPE_FP16 = 2,
    CG_DTYPE_FP32 = 3,
    CG_DTYPE_FP8_E4M3 = 4, /* of OCP: no infinities, at most 448 */
    CG_DTYPE_FP8_E5M2 = 5,
    CG_N_DTYPES = 6, /* with the 0 that is none */
} cg_dtype;

/* Quality levels. Lower is finer; L0 is lossless. */
typedef enum cg_level { CG_L0 = 0, CG_L1 = 1, CG_L2 = 2, CG_L3 = 3, CG_N_LEVELS = 4 } cg_level;

enum { CG_K = 0, CG_V = 1, CG_N_PLANES = 2 };

/* One chunk's K and V are [n_layers][2][n_tokens][n_kv_heads][head_dim] elements of dtype. */
typedef struct cg_geometry {
    uint16_t n_layers;
    uint16_t n_kv_heads;
    uint16_t head_dim; /* of K and of V */
    uint8_t dtype;     /* cg_dtype */
    uint8_t n_planes;  /* 2; 1 (an MLA latent) is in the format, and refused by this version */
} cg_geometry;

/* 1, 2 or 4; 0 for an unknown dtype. */
size_t cg_dtype_bytes(unsigned dtype);
/* "bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2", "unknown" */
const char *cg_dtype_name(unsigned dtype);

/* Elements of fp8 may stand for the element times a scale of their layer and plane. */
static inline bool cg_dtype_has_cache_scales(unsigned dtype)
{
    return dtype == CG_DTYPE_FP8_E4M3 || dtype == CG_DTYPE_FP8_E5M2;
}

/* Channels of one layer and plane: n_kv_heads * head_dim. */
static inline size_t cg_geometry_channels(const cg_geometry *g)
{
    return (size_t)g->n_kv_heads * g->head_dim;
}

/* Elements of a chunk, K and V of all layers. Cannot overflow for a geometry that
 * cg_geometry_check() took and n_tokens <= CG_MAX_CHUNK_TOKENS. */
static inline uint64_t cg_geometry_elements(const cg_geometry *g, uint32_t n_tokens)
{
    return (uint64_t)g->n_layers * g->n_planes * n_tokens * cg_geometry_channels(g);
}

/* Blocks that tokens take; the last may reach past their end. */
static inline uint32_t cg_count_blocks(uint32_t n_tokens)
{
    return (n_tokens + CG_BLOCK_TOKENS - 1) / CG_BLOCK_TOKENS;
}

/* CG_ERR_INVALID_ARGUMENT: a count is 0 or above its CG_MAX_. CG_ERR_UNSUPPORTED: unknown dtype,
 * n_planes != 2, or an odd head_dim. */
cg_status cg_geometry_check(const cg_geometry *geometry);
/* All fields, dtype too. */
bool cg_geometry_equal(const cg_geometry *a, const cg_geometry *b);

#ifdef __cplusplus
}
#endif
#endif
