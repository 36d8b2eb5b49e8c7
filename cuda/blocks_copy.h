/* cuda/blocks_copy.h - a kernel that moves elements from dense tiles in pinned host memory to paged
 * blocks, or back.
 *
 * Tiles are [n_planes][n_layers][n_tokens][n_kv_heads][head_dim]. A thread moves 16 bytes. Rows of
 * blocks and tiles begin at multiples of that: it was checked when the blocks were registered.
 * Threads of a warp move neighbours in the tile, so that whole lines cross the bus. Why not
 * cudaMemcpy2DAsync(): a chunk of 256 tokens of a model of 32 layers takes 1,024 of its calls where
 * a token's heads lie together, and 8,192 where they don't. cg_cuda_blocks_copy_unit() is all that
 * a thread does; kernel and tests share it. Threads: pure functions.
 */
#ifndef CG_CUDA_BLOCKS_COPY_H
#define CG_CUDA_BLOCKS_COPY_H
#include "cuda/decode.h"

#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { CG_CUDA_COPY_UNIT_BYTES = 16, CG_CUDA_COPY_THREADS = 256 };

typedef struct cg_cuda_blocks_copy {
    cg_cuda_blocks blocks; /* first_token: of the table's tokens, the tiles' first; dim_stride is
                              the element's size */
    char *tiles;           /* pinned */
    uint32_t first_layer, n_layers, first_plane, n_planes;
    uint32_t n_tokens;             /* of the tiles */
    uint32_t from_token, to_token; /* the tokens of these that are to be moved */
    uint32_t n_kv_heads;           /* of the tiles; those of the blocks are moved */
    uint32_t head_units;           /* units in head_dim elements */
    bool is_write;                 /* tiles to blocks */
} cg_cuda_blocks_copy;

#ifdef __CUDACC__
#define CG_CUDA_BOTH static __host__ __device__ inline
#else
#define CG_CUDA_BOTH static inline
#endif

/* Units that are to be moved, one for each thread. */
CG_CUDA_BOTH uint64_t cg_cuda_blocks_copy_n_units(const cg_cuda_blocks_copy *c)
{
    return (uint64_t)c->n_planes * c->n_layers * (c->to_token - c->from_token) * c->blocks.n_heads *
           c->head_units;
}

/* unit: below cg_cuda_blocks_copy_n_units(). A block id that the layout does not have is skipped.
 */
CG_CUDA_BOTH void cg_cuda_blocks_copy_unit(const cg_cuda_blocks_copy *c, uint64_t unit)
{
    const uint32_t in_head = (uint32_t)(unit % c->head_units);
    const uint32_t head = (uint32_t)(unit / c->head_units % c->blocks.n_heads);
    const uint64_t row = unit / c->head_units / c->blocks.n_heads;
    const uint32_t n_wanted = c->to_token - c->from_token;
    const uint32_t token = c->from_token + (uint32_t)(row % n_wanted);
    const uint32_t layer = (uint32_t)(row / n_wanted % c->n_layers);
    const uint32_t plane = (uint32_t)(row / n_wanted / c->n_layers);

    const cg_cuda_blocks *b = &c->blocks;
    const uint32_t in_table = b->first_token + token, of_plane = c->first_plane + plane;
    const uint32_t place = in_table / b->block_tokens;
    if (place >= b->n_table || b->table_dev[place] < 0 ||
        (uint64_t)b->table_dev[place] >= b->n_blocks)
        return;
    char *slot = (char *)b->base_dev[c->first_layer + layer] + b->offset_bytes[of_plane] +
                 b->table_dev[place] * b->block_stride + head * b->head_stride[of_plane] +
                 (int64_t)(in_table % b->block_tokens) * b->token_stride[of_plane] +
                 (int64_t)in_head * CG_CUDA_COPY_UNIT_BYTES;
    char *tile = c->tiles +
                 (((((uint64_t)plane * c->n_layers + layer) * c->n_tokens + token) * c->n_kv_heads +
                   b->head_from + head) *
                      c->head_units +
                  in_head) *
                     CG_CUDA_COPY_UNIT_BYTES;
#ifdef __CUDA_ARCH__
    if (c->is_write)
        *(uint4 *)slot = *(const uint4 *)tile;
    else
        *(uint4 *)tile = *(const uint4 *)slot;
#else
    memcpy(c->is_write ? slot : tile, c->is_write ? tile : slot, CG_CUDA_COPY_UNIT_BYTES);
#endif
}

/* Loads the kernel into the thread's current device. Returns a cudaError_t, 0 is success. */
int cg_cuda_blocks_copy_prepare(void);
/* Enqueues the kernel. Returns a cudaError_t, 0 is success. */
int cg_cuda_blocks_copy_launch(const cg_cuda_blocks_copy *copy, struct CUstream_st *stream);

#ifdef __cplusplus
}
#endif
#endif
