#include "connector/blocks.h"

#include <stdlib.h>
#include <string.h>

cg_status cg_kv_layout_new(const cachegen_kv_layout *given, const cg_geometry *model,
                           cg_kv_layout **layout_out)
{
    *layout_out = NULL;
    const bool on_gpu = given->memory == CACHEGEN_MEMORY_CUDA;
    if (given->memory > CACHEGEN_MEMORY_CUDA || given->layout > CACHEGEN_LAYOUT_VLLM_CPU_AMX ||
        (on_gpu && given->layout != CACHEGEN_LAYOUT_STRIDED))
        return CG_ERR_UNSUPPORTED;
    if (given->n_layers == 0 || given->n_layers > model->n_layers ||
        given->first_layer > model->n_layers - given->n_layers || given->n_kv_heads == 0 ||
        given->n_kv_heads > model->n_kv_heads ||
        given->first_head > model->n_kv_heads - given->n_kv_heads ||
        given->head_dim != model->head_dim || given->dtype != model->dtype ||
        given->block_tokens == 0 || given->n_blocks == 0 || given->base == NULL)
        return CG_ERR_INVALID_ARGUMENT;
    if (given->layout == CACHEGEN_LAYOUT_VLLM_CPU_AMX &&
        (!(given->dtype == CG_DTYPE_BF16 || cg_dtype_has_cache_scales(given->dtype)) ||
         given->block_tokens % 32 != 0 || given->head_dim % 32 != 0))
        return CG_ERR_UNSUPPORTED;
    const int64_t element_bytes = (int64_t)cg_dtype_bytes(given->dtype);
    /* The kernels write all layers at once, and rows of dense dims. */
    if (on_gpu && (given->n_layers != model->n_layers || given->dim_stride[CG_K] != element_bytes ||
                   given->dim_stride[CG_V] != element_bytes))
        return CG_ERR_UNSUPPORTED;
    for (uint32_t i = 0; i < given->n_layers; i++)
        if (given->base[i] == NULL)
            return CG_ERR_INVALID_ARGUMENT;

    cg_kv_layout *layout = malloc(sizeof *layout + given->n_layers * sizeof layout->base_copy[0]);
    if (layout == NULL)
        return CG_ERR_NO_MEMORY;
    layout->given = *given;
    layout->element_bytes = (size_t)element_bytes;
    layout->gpu_blocks_id = 0;
    layout->tile_heads = model->n_kv_heads;
    layout->tile_first_head = given->first_head;
    memcpy(layout->base_copy, given->base, given->n_layers * sizeof layout->base_copy[0]);
    layout->given.base = layout->base_copy; /* the caller's may go */
    *layout_out = layout;
    return CG_OK;
}

bool cg_kv_layout_is_whole(const cg_kv_layout *layout, uint32_t n_kv_heads)
{
    return layout->given.n_kv_heads == n_kv_heads;
}

cg_kv_layout cg_kv_layout_own_heads(const cg_kv_layout *layout)
{
    cg_kv_layout own = *layout; /* given.base still is the original's copy */
    own.tile_heads = layout->given.n_kv_heads;
    own.tile_first_head = 0;
    return own;
}

bool cg_kv_layout_covers(const cg_kv_layout *layout, const int64_t *table, uint32_t n_blocks,
                         uint32_t n_tokens)
{
    /* In 64 bits: both counts are the engine's, and their product need not fit 32. */
    if ((uint64_t)n_blocks * layout->given.block_tokens < n_tokens ||
        (n_blocks > 0 && table == NULL))
        return false;
    for (uint32_t i = 0; i < n_blocks && (uint64_t)i * layout->given.block_tokens < n_tokens; i++)
        if (table[i] < 0 || (uint64_t)table[i] >= layout->given.n_blocks)
            return false;
    return true;
}

/* A piece of a tile that lies in one block and one head: n_tokens rows of head_dim elements. */
typedef struct piece {
    char *slots;       /* token `first` of the block, dim 0 */
    char *rows;        /* in the tile */
    size_t row_stride; /* bytes from a token's row to the next: all heads */
    uint32_t first, n_tokens;
} piece;

enum { TRANSPOSE_TILE = 32 }; /* tokens x dims at a time: rows of both sides stay in L1 */

/* dst[j * dst_stride + i] = src[i * src_stride + j] for i < n, j < m, in elements. Three sizes,
 * spelt out so that the compiler sees the element type; memory is aligned to its dtype. */
#define DEFINE_TRANSPOSE(name, element)                                                            \
    static void name(element *dst, size_t dst_stride, const element *src, size_t src_stride,       \
                     size_t n, size_t m)                                                           \
    {                                                                                              \
        for (size_t i0 = 0; i0 < n; i0 += TRANSPOSE_TILE)                                          \
            for (size_t j0 = 0; j0 < m; j0 += TRANSPOSE_TILE) {                                    \
                const size_t i_end = i0 + TRANSPOSE_TILE < n ? i0 + TRANSPOSE_TILE : n;            \
                const size_t j_end = j0 + TRANSPOSE_TILE < m ? j0 + TRANSPOSE_TILE : m;            \
                for (size_t j = j0; j < j_end; j++)                                                \
                    for (size_t i = i0; i < i_end; i++)                                            \
                        dst[j * dst_stride + i] = src[i * src_stride + j];                         \
            }                                                                                      \
    }
DEFINE_TRANSPOSE(transpose_u8, uint8_t)
DEFINE_TRANSPOSE(transpose_u16, uint16_t)
DEFINE_TRANSPOSE(transpose_u32, uint32_t)

static bool is_aligned(const void *pointer, int64_t stride, size_t element_bytes)
{
    return ((uintptr_t)pointer | (uint64_t)stride) % element_bytes == 0;
}

static void copy_transposed(const cg_kv_layout *l, const piece *p, int64_t dim_stride, bool write)
{
    const size_t e = l->element_bytes, n = p->n_tokens, d = l->given.head_dim;
    const size_t slot_stride = (size_t)dim_stride / e, row_stride = p->row_stride / e;
    void *slots = p->slots, *rows = p->rows;
    if (e == 1 && write)
        transpose_u8(slots, slot_stride, rows, row_stride, n, d);
    else if (e == 1)
        transpose_u8(rows, row_stride, slots, slot_stride, d, n);
    else if (e == 2 && write)
        transpose_u16(slots, slot_stride, rows, row_stride, n, d);
    else if (e == 2)
        transpose_u16(rows, row_stride, slots, slot_stride, d, n);
    else if (write)
        transpose_u32(slots, slot_stride, rows, row_stride, n, d);
    else
        transpose_u32(rows, row_stride, slots, slot_stride, d, n);
}

static void copy_bytes(void *slot, void *row, size_t n_bytes, bool write)
{
    if (write)
        memcpy(slot, row, n_bytes);
    else
        memcpy(row, slot, n_bytes);
}

static void copy_strided(const cg_kv_layout *l, uint32_t plane, const piece *p, bool write)
{
    const size_t e = l->element_bytes, d = l->given.head_dim;
    const int64_t token_stride = l->given.token_stride[plane],
                  dim_stride = l->given.dim_stride[plane];
    /* Three ways, the fastest that the strides allow: rows, tiles that are turned, single
     * elements. */
    if (dim_stride == (int64_t)e) {
        for (uint32_t t = 0; t < p->n_tokens; t++)
            copy_bytes(p->slots + t * token_stride, p->rows + t * p->row_stride, d * e, write);
    } else if (token_stride == (int64_t)e && dim_stride > 0 &&
               is_aligned(p->slots, dim_stride, e) &&
               is_aligned(p->rows, (int64_t)p->row_stride, e)) {
        copy_transposed(l, p, dim_stride, write);
    } else {
        for (uint32_t t = 0; t < p->n_tokens; t++)
            for (size_t i = 0; i < d; i++)
                copy_bytes(p->slots + t * token_stride + (int64_t)i * dim_stride,
                           p->rows + t * p->row_stride + i * e, e, write);
    }
}

/* vLLM's packing for AMX tiles, of bf16 and, by elements the same, fp8, found by running its
 * cpu_attn_reshape_and_cache; N tokens a block, D dims:
 *   K(t, d) = (t / 16) * 16 D + (d / 2) * 32 + (t % 16) * 2 + d % 2
 *   V(t, d) = N D + (d / 16) * 16 N + (t / 2) * 32 + (d % 16) * 2 + t % 2
 * slots: the start of the (block, head) region. */
static void copy_amx(const cg_kv_layout *l, uint32_t plane, const piece *p, bool write)
{
    const size_t n = l->given.block_tokens, d_count = l->given.head_dim, e = l->element_bytes;
    for (uint32_t i = 0; i < p->n_tokens; i++) {
        const size_t t = p->first + i;
        char *row = p->rows + i * p->row_stride;
        for (size_t d = 0; d < d_count; d++) {
            const size_t at = plane == CG_K
                                  ? t / 16 * 16 * d_count + d / 2 * 32 + t % 16 * 2 + d % 2
                                  : n * d_count + d / 16 * 16 * n + t / 2 * 32 + d % 16 * 2 + t % 2;
            if (e == 2)
                copy_bytes(p->slots + 2 * at, row + 2 * d, 2, write);
            else
                copy_bytes(p->slots + at, row + d, 1, write);
        }
    }
}

static void copy(const cg_kv_layout *l, const int64_t *table, uint32_t layer, uint32_t plane,
                 uint32_t first_token, uint32_t n_tokens, char *tile, bool write)
{
    const cachegen_kv_layout *g = &l->given;
    const bool amx = g->layout == CACHEGEN_LAYOUT_VLLM_CPU_AMX;
    const int64_t head_stride = g->head_stride[amx ? 0 : plane];
    const size_t head_bytes = g->head_dim * l->element_bytes,
                 token_bytes = l->tile_heads * head_bytes;

    for (uint32_t done = 0; done < n_tokens;) {
        const uint32_t token = first_token + done, first = token % g->block_tokens;
        const uint32_t room = g->block_tokens - first,
                       n = n_tokens - done < room ? n_tokens - done : room;
        char *block = (char *)g->base[layer - g->first_layer] +
                      table[token / g->block_tokens] * g->block_stride;
        /* In AMX packing a token has no address of its own: piece.first says where it is. */
        if (!amx)
            block += g->offset_bytes[plane] + first * g->token_stride[plane];
        for (uint32_t h = 0; h < g->n_kv_heads; h++) {
            const piece p = {.slots = block + h * head_stride,
                             .rows =
                                 tile + done * token_bytes + (l->tile_first_head + h) * head_bytes,
                             .row_stride = token_bytes,
                             .first = first,
                             .n_tokens = n};
            if (amx)
                copy_amx(l, plane, &p, write);
            else
                copy_strided(l, plane, &p, write);
        }
        done += n;
    }
}

void cg_blocks_write(const cg_kv_layout *layout, const int64_t *table, uint32_t layer,
                     uint32_t plane, uint32_t first_token, uint32_t n_tokens, const void *tile)
{
    copy(layout, table, layer, plane, first_token, n_tokens, (char *)tile,
         true); /* write: the tile is only read */
}

void cg_blocks_read(const cg_kv_layout *layout, const int64_t *table, uint32_t layer,
                    uint32_t plane, uint32_t first_token, uint32_t n_tokens, void *tile)
{
    copy(layout, table, layer, plane, first_token, n_tokens, tile, false);
}
