/* cuda/elements.cuh - where an element lies in the engine's paged blocks, and how it is stored. */
#ifndef CG_CUDA_ELEMENTS_CUH
#define CG_CUDA_ELEMENTS_CUH
#include "codec/bf16.h"
#include "cuda/layout.h"

/* A token's place in the engine's blocks. */
struct cg_cuda_slot {
    int64_t block;
    uint32_t in_block;
    bool is_there; /* the token is in the table, and its block id is one of the engine's */
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

/* Where a head's elements begin in block 0, of a layer and plane. head: of the chunk, and one that
 * the blocks have. */
CG_LANE uint8_t *cg_cuda_head(const cg_cuda_blocks &blocks, uint32_t layer, uint32_t plane,
                              uint32_t head)
{
    return (uint8_t *)blocks.base_dev[layer] + blocks.offset_bytes[plane] +
           (int64_t)(head - blocks.head_from) * blocks.head_stride[plane];
}

/* What a token's slot adds to that, in bytes. */
CG_LANE int64_t cg_cuda_slot_offset(const cg_cuda_blocks &blocks, uint32_t plane,
                                    const cg_cuda_slot &slot)
{
    return slot.block * blocks.block_stride + (int64_t)slot.in_block * blocks.token_stride[plane];
}

/* Where a cell stands in a tile of 16 rows and a band; of rows from 16 on, in the tiles below it,
 * each CG_CUDA_TILE_BYTES further on. This is the order of the A fragments of PTX's mma.m16n8k32,
 * so that a lane loads its own at once: two neighbouring rows are the instruction's rows g and g +
 * 8, and lane 4 g + k has 8 neighbouring columns of both. Components are summed in the order of
 * profile_blob.c's fragment_offset(). */
CG_LANE uint32_t cg_cuda_cell(uint32_t row, uint32_t column)
{
    return row / 2 * 64 + row % 2 * 4 + column % CG_CUDA_BAND / 4 * 8 + column % 4;
}

/* Element number i of the dtype. */
CG_LANE float cg_cuda_load(uint32_t dtype, const void *elements, uint64_t i)
{
    const uint16_t *halves = (const uint16_t *)elements;
    const uint8_t *bytes = (const uint8_t *)elements;
    return dtype == CG_DTYPE_BF16       ? cg_bf16_to_f32(halves[i])
           : dtype == CG_DTYPE_FP16     ? cg_fp16_to_f32(halves[i])
           : dtype == CG_DTYPE_FP8_E4M3 ? cg_e4m3_to_f32(bytes[i])
           : dtype == CG_DTYPE_FP8_E5M2 ? cg_e5m2_to_f32(bytes[i])
                                        : ((const float *)elements)[i];
}

/* FORMAT.md's stage 5: the bits of a value in the dtype. */
CG_LANE uint32_t cg_cuda_round(uint32_t dtype, float value)
{
    return dtype == CG_DTYPE_BF16       ? cg_bf16_from_f32(value)
           : dtype == CG_DTYPE_FP16     ? cg_fp16_from_f32(value)
           : dtype == CG_DTYPE_FP8_E4M3 ? cg_e4m3_from_f32(value)
           : dtype == CG_DTYPE_FP8_E5M2 ? cg_e5m2_from_f32(value)
                                        : cg_f32_bits(value);
}

/* The same for two values. GPUs have instructions for that, which saturate fp8 as stage 5 does. */
CG_LANE void cg_cuda_round_two(uint32_t dtype, float first, float second, uint32_t *first_out,
                               uint32_t *second_out)
{
#if defined(__CUDA_ARCH__)
    if (dtype == CG_DTYPE_BF16) {
        uint32_t both;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
        *first_out = both & 0xffff;
        *second_out = both >> 16;
        return;
    }
#if __CUDA_ARCH__ >= 890
    if (dtype == CG_DTYPE_FP8_E4M3 || dtype == CG_DTYPE_FP8_E5M2) {
        uint16_t both;
        if (dtype == CG_DTYPE_FP8_E4M3)
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
        else
            asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
        *first_out = both & 0xff;
        *second_out = both >> 8;
        return;
    }
#endif
#endif
    *first_out = cg_cuda_round(dtype, first);
    *second_out = cg_cuda_round(dtype, second);
}

CG_LANE void cg_cuda_store(uint32_t dtype, uint8_t *at, uint32_t bits)
{
    if (dtype == CG_DTYPE_FP32)
        *(uint32_t *)at = bits;
    else if (dtype == CG_DTYPE_FP8_E4M3 || dtype == CG_DTYPE_FP8_E5M2)
        *at = (uint8_t)bits;
    else
        *(uint16_t *)at = (uint16_t)bits;
}
#endif
