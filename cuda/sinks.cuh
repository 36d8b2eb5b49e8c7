/* cuda/sinks.cuh - what becomes of a strip's cells (cuda/streams.cuh).
 *
 * Symbols of preset klt wait in scratch for the inverse KLT; those of preset paper and exponents
 * become elements at once.
 */
#ifndef CG_CUDA_SINKS_CUH
#define CG_CUDA_SINKS_CUH
#include "codec/exact_lane.h"
#include "codec/lossless_lane.h"
#include "codec/profile_data.h"
#include "cuda/elements.cuh"

/* A level's symbols refine those of the next coarser one in their place. */
struct cg_cuda_symbols_sink {
    static constexpr bool IS_EXACT = false, REFINES = true;
    const cg_cuda_klt &m;
    uint8_t *const scratch;
    bool is_outside = false;
    const bool is_finest;
    /* Of the lane's column, in the row at hand. */
    int16_t *cell = nullptr;
    int8_t *digit = nullptr;
    uint64_t tile = 0; /* of row 0 */
    uint32_t stride = 0, n_lanes = 0;
    bool has_column = false, has_zero = false;

    CG_LANE_METHOD cg_cuda_symbols_sink(const cg_cuda_decode_params &params, const cg_cuda_klt &klt)
        : m(klt), scratch((uint8_t *)params.scratch_dev), is_finest(klt.is_finest != 0)
    {
    }
    CG_LANE_METHOD void strip(const cg_cuda_strip &strip, uint32_t lane)
    {
        const uint32_t f = strip.frequency, column = strip.column + lane;
        has_column = lane < strip.n_lanes;
        has_zero = lane < strip.n_zeros;
        n_lanes = strip.n_lanes;
        stride = m.stride[f];
        cell = (int16_t *)(scratch + m.cells_at) + m.cell_at[f] + column;
        digit = (int8_t *)(scratch + m.digits_at) + m.cell_at[f] + column;
        tile = m.large_at + m.large_tile[f] + column / CG_CUDA_BAND;
    }
    CG_LANE_METHOD int32_t coarse() const
    {
        return *cell;
    }
    CG_LANE_METHOD int32_t next_coarse() const
    {
        return cell[stride];
    }
    CG_LANE_METHOD bool store(uint32_t row, int32_t v)
    {
        if (has_column) {
            *cell = (int16_t)v;
            if (is_finest) {
                *digit = (int8_t)v;
                if (v != (int8_t)v)
                    scratch[tile +
                            (uint64_t)(row / CG_CUDA_TILE_BLOCKS) * (stride / CG_CUDA_BAND)] = 1;
            }
        }
        if (has_zero) {
            cell[n_lanes] = 0;
            digit[n_lanes] = 0;
        }
        cell += stride;
        digit += stride;
        return true;
    }
};

/* A lane's channel: where its elements of all tokens go. */
struct cg_cuda_channel {
    uint8_t *at;
    uint32_t number; /* of the matrix */
    bool is_wanted;

    CG_LANE_METHOD void find(const cg_cuda_target &t, const cg_cuda_blocks &blocks,
                             const cg_cuda_strip &strip, uint32_t lane)
    {
        number = strip.column + lane;
        const uint32_t head = number / t.head_dim % t.n_kv_heads;
        is_wanted = lane < strip.n_lanes && head >= t.head_from && head < t.head_to;
        if (is_wanted)
            at = cg_cuda_head(blocks, t.first_layer + number / t.head_dim / t.n_kv_heads, t.plane,
                              head) +
                 (int64_t)(number % t.head_dim) * blocks.dim_stride[t.plane];
    }
};

/* Tokens in their order. */
struct cg_cuda_tokens {
    const cg_cuda_target &target;
    const cg_cuda_blocks &blocks;
    cg_cuda_slot slot;
    uint32_t last;
    bool is_outside = false;

    CG_LANE_METHOD cg_cuda_tokens(const cg_cuda_target &t, const cg_cuda_blocks &b)
        : target(t), blocks(b), slot(), last(UINT32_MAX - 1)
    {
    }
    /* Where a token's element of the channel goes; NULL: nowhere. */
    CG_LANE_METHOD uint8_t *find(const cg_cuda_channel &channel, uint32_t token)
    {
        if (!channel.is_wanted || token < target.token_from || token >= target.token_to)
            return nullptr;
        slot = token == last + 1 ? cg_cuda_next_slot(blocks, token, slot)
                                 : cg_cuda_find_slot(blocks, token);
        last = token;
        is_outside |= !slot.is_there;
        return slot.is_there ? channel.at + cg_cuda_slot_offset(blocks, target.plane, slot)
                             : nullptr;
    }
};

struct cg_cuda_exponents_sink {
    static constexpr bool IS_EXACT = true, REFINES = false;
    const cg_cuda_exact &m;
    const cg_cuda_blocks &blocks;
    const cg_lossless_split split;
    const uint8_t *low;
    cg_cuda_channel channel = {};
    cg_cuda_tokens tokens;
    bool is_outside = false, has_column = false;

    CG_LANE_METHOD cg_cuda_exponents_sink(const cg_cuda_decode_params &params,
                                          const cg_cuda_exact &exact)
        : m(exact), blocks(params.blocks), split(cg_lane_split(exact.target.dtype)),
          low((const uint8_t *)params.chunk_dev + exact.low_at), tokens(exact.target, params.blocks)
    {
    }
    CG_LANE_METHOD void strip(const cg_cuda_strip &strip, uint32_t lane)
    {
        has_column = lane < strip.n_lanes;
        channel.find(m.target, blocks, strip, lane);
    }
    CG_LANE_METHOD bool store(uint32_t row, int32_t v)
    {
        const uint32_t cell = (uint16_t)v;
        uint8_t *const at = tokens.find(channel, row);
        is_outside |= tokens.is_outside;
        if (at != nullptr) {
            const uint8_t *bytes =
                low + ((uint64_t)row * m.n_columns + channel.number) * split.low_bytes;
            uint32_t rest = bytes[0];
            if (split.low_bytes > 1)
                rest |= (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16;
            cg_cuda_store(m.target.dtype, at, cg_lane_join(split, cell, rest));
        }
        return !has_column || cg_lane_exponent(split, cell) >> split.exponent_bits == 0;
    }
};

/* Anchors are kept as symbols, too: deltas stand on them. */
struct cg_cuda_paper_sink {
    static constexpr bool IS_EXACT = false, REFINES = false;
    const cg_cuda_paper &m;
    const cg_cuda_blocks &blocks;
    const uint8_t *blob;
    int16_t *anchors;
    cg_cuda_channel channel = {};
    cg_cuda_tokens tokens;
    float mean = 0, anchor_step = 0, step = 0;
    bool is_outside = false, has_column = false;

    CG_LANE_METHOD cg_cuda_paper_sink(const cg_cuda_decode_params &params,
                                      const cg_cuda_paper &paper)
        : m(paper), blocks(params.blocks), blob((const uint8_t *)params.blob_dev),
          anchors((int16_t *)((uint8_t *)params.scratch_dev + paper.anchors_at)),
          tokens(paper.target, params.blocks)
    {
    }
    CG_LANE_METHOD float of_channel(uint64_t table_at) const
    {
        return ((const float *)(blob + table_at))[channel.number];
    }
    CG_LANE_METHOD void strip(const cg_cuda_strip &strip, uint32_t lane)
    {
        has_column = lane < strip.n_lanes;
        channel.find(m.target, blocks, strip, lane);
        if (!channel.is_wanted)
            return;
        mean = of_channel(m.mean_at);
        anchor_step = of_channel(m.anchor_step_at);
        step = m.step / of_channel(m.weight_at);
    }
    CG_LANE_METHOD int16_t *anchor(uint32_t group) const
    {
        return anchors + (uint64_t)group * m.n_columns + channel.number;
    }
    CG_LANE_METHOD void store_element(uint32_t token, float symbol, float of_step, float base)
    {
        uint8_t *const at = tokens.find(channel, token);
        is_outside |= tokens.is_outside;
        if (at != nullptr)
            cg_cuda_store(m.target.dtype, at,
                          cg_cuda_round(m.target.dtype, cg_lane_dequantize(symbol, of_step, base)));
    }
};

struct cg_cuda_anchors_sink : cg_cuda_paper_sink {
    using cg_cuda_paper_sink::cg_cuda_paper_sink;
    CG_LANE_METHOD bool store(uint32_t row, int32_t v)
    {
        if (has_column)
            *anchor(row) = (int16_t)v;
        store_element(row * CG_ANCHOR_TOKENS, (float)(int16_t)v, anchor_step, mean);
        return true;
    }
};

struct cg_cuda_deltas_sink : cg_cuda_paper_sink {
    using cg_cuda_paper_sink::cg_cuda_paper_sink;
    CG_LANE_METHOD bool store(uint32_t row, int32_t v)
    {
        const uint32_t group = row / (CG_ANCHOR_TOKENS - 1), i = row % (CG_ANCHOR_TOKENS - 1);
        if (channel.is_wanted) {
            const float base = cg_lane_dequantize((float)*anchor(group), anchor_step, mean);
            store_element(group * CG_ANCHOR_TOKENS + 1 + i, (float)(int16_t)v, step, base);
        }
        return true;
    }
};
#endif
