/* connector/blocks.h - copies between the codec's tiles and an engine's paged KV blocks.
 *
 * A tile is one layer and one plane (K or V) of consecutive tokens,
 * [n_tokens][tile_heads][head_dim], of the model's dtype. It has all of the model's heads; a layout
 * may have only some (tensor parallel). Layouts of blocks: cachegen.h, cachegen_kv_layout. Two
 * kinds are fast: those whose dims are contiguous, and those whose tokens are, as in vLLM's CPU
 * "vec" layout, which keeps K transposed, as head_dim rows of block_tokens tokens. All others are
 * copied element by element.
 * Threads: a cg_kv_layout is read-only once made. The caller sees to it that no two threads write
 * the same elements.
 */
#ifndef CG_CONNECTOR_BLOCKS_H
#define CG_CONNECTOR_BLOCKS_H
#include "codec/geometry.h"
#include "connector/cachegen.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cg_kv_layout {
    cachegen_kv_layout given; /* whole: all fields of this version; base is base_copy */
    size_t element_bytes;
    uint32_t gpu_blocks_id;               /* in a GPU's memory: codec/device.h */
    uint32_t tile_heads, tile_first_head; /* of a tile; where in it the layout's heads lie */
    void *base_copy[];                    /* [n_layers] */
} cg_kv_layout;

/* Checks and copies a layout; free it with free(). CG_ERR_INVALID_ARGUMENT: it does not agree with
 * the model, or a base or count is missing. CG_ERR_UNSUPPORTED: an unknown layout or memory kind.
 * AMX packing of other dtypes than bf16 and fp8, or of shapes that it does not have. Blocks in a
 * GPU's memory that are not of all layers and heads, or whose dims are not dense. */
cg_status cg_kv_layout_new(const cachegen_kv_layout *given, const cg_geometry *model,
                           cg_kv_layout **layout_out);

/* Whether the layout has all heads of a model with n_kv_heads. */
bool cg_kv_layout_is_whole(const cg_kv_layout *layout, uint32_t n_kv_heads);
/* The same blocks, with tiles of the layout's own heads only. It is good as long as layout is. */
cg_kv_layout cg_kv_layout_own_heads(const cg_kv_layout *layout);

/* Whether table[n_blocks] names blocks that the layout has and covers tokens [0, n_tokens). */
bool cg_kv_layout_covers(const cg_kv_layout *layout, const int64_t *table, uint32_t n_blocks,
                         uint32_t n_tokens);

/* In host memory only. One layer (of the model; the layout must have it) and plane: the layout's
 * heads of tile[n_tokens][tile_heads][head_dim] into the slots of tokens [first_token, first_token
 * + n_tokens) of the sequence whose blocks table names. The table must cover them. */
void cg_blocks_write(const cg_kv_layout *layout, const int64_t *table, uint32_t layer,
                     uint32_t plane, uint32_t first_token, uint32_t n_tokens, const void *tile);
/* The other way. */
void cg_blocks_read(const cg_kv_layout *layout, const int64_t *table, uint32_t layer,
                    uint32_t plane, uint32_t first_token, uint32_t n_tokens, void *tile);

#ifdef __cplusplus
}
#endif
#endif
