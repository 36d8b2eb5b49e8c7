/* cuda/elements.cuh - where an element lies in the engine's paged blocks, and how it is stored. */
#ifndef CG_CUDA_ELEMENTS_CUH
#define CG_CUDA_ELEMENTS_CUH
#include "codec/bf16.h"
#include "cuda/layout.h"

/* A token's place. */
struct cg_cuda_slot {
    int64_t block;
    uint32_t in_block;
    bool is_there; /* the table names a block that there is */
};

CG_LANE cg_cuda_slot cg_cuda_find_slot(const cg_cuda_blocks &blocks, uint32_t token)
{
    const uint32_t number = (blocks.first_token + token) / blocks.block_tokens;
    cg_cuda_slot slot;
    slot.in_block = (blocks.first_token + token) % blocks.block_tokens;
    slot.block = number < blocks.n_table ? blocks.table_dev[number] : -1;
    slot.is_there = (uint64_t)slot.block < blocks.n_blocks; /* and not below 0 */
    return slot;
}

/* The next token's, where tokens come in their order. */
CG_LANE cg_cuda_slot cg_cuda_next_slot(const cg_cuda_blocks &blocks, uint32_t token,
                                       cg_cuda_slot slot)
{
    if (slot.in_block + 1 >= blocks.block_tokens)
        return cg_cuda_find_slot(blocks, token);
    slot.in_block++;
    return slot;
}

/* head: of the chunk. */
CG_LANE uint8_t *cg_cuda_head(const cg_cuda_blocks &blocks, uint32_t layer, uint32_t plane,
                              uint32_t head)
{
    return (uint8_t *)blocks.base_dev[layer] + blocks.offset_bytes[plane] +
           (int64_t)(head - blocks.head_from) * blocks.head_stride[plane];
}

CG_LANE int64_t cg_cuda_slot_offset(const cg_cuda_blocks &blocks, uint32_t plane,
                                    const cg_cuda_slot &slot)
{
    return slot.block * blocks.block_stride + (int64_t)slot.in_block * blocks.token_stride[plane];
}

/* FORMAT.md's step 5. */
CG_LANE uint32_t cg_cuda_round(uint32_t dtype, float value)
{
    return dtype == CG_DTYPE_BF16   ? cg_bf16_from_f32(value)
           : dtype == CG_DTYPE_FP16 ? cg_fp16_from_f32(value)
                                    : cg_f32_bits(value);
}

CG_LANE void cg_cuda_store(uint32_t dtype, uint8_t *at, uint32_t bits)
{
    if (dtype == CG_DTYPE_FP32)
        *(uint32_t *)at = bits;
    else
        *(uint16_t *)at = (uint16_t)bits;
}
#endif
