/* cuda/sinks.cuh - what becomes of a strip's cells (cuda/streams.cuh).
 *
 * Symbols of preset klt wait in scratch for the inverse KLT. Symbols of preset paper, and exponents
 * of exact elements, become elements at once.
 */
#ifndef CG_CUDA_SINKS_CUH
#define CG_CUDA_SINKS_CUH
#include "codec/exact_lane.h"
#include "codec/lossless_lane.h"
#include "codec/profile_data.h"
#include "cuda/elements.cuh"

/* Symbols of preset klt. Those of a level overwrite the next coarser level's, which they refine. */
struct cg_cuda_symbols_sink {
    static constexpr bool IS_EXACT = false, REFINES = true;
    const cg_cuda_product &m;
    uint8_t *const scratch;
    const uint32_t n_rows; /* here: what is behind m may have changed after each store */
    const bool is_finest;
    /* Of the lane's column, in the pair of rows at hand. */
    int16_t *cell = nullptr;
    int8_t *digit = nullptr;
    uint8_t *large = nullptr; /* of row 0's tile */
    bool has_column = false, has_digit = false;

    CG_LANE_METHOD cg_cuda_symbols_sink(const cg_cuda_decode_params &params,
                                        const cg_cuda_product &product)
        : m(product), scratch((uint8_t *)params.scratch_dev), n_rows(product.n_rows),
          is_finest(product.is_finest != 0)
    {
    }
    CG_LANE_METHOD bool is_outside() const
    {
        return false;
    }
    CG_LANE_METHOD void find(uint32_t f, uint32_t column)
    {
        const uint32_t first = m.tile_at[f] + column / CG_CUDA_BAND * m.n_tile_rows;
        const uint64_t at = (uint64_t)first * CG_CUDA_TILE_BYTES + cg_cuda_cell(0, column);
        cell = (int16_t *)(scratch + m.cells_at) + at;
        digit = (int8_t *)(scratch + m.digits_at) + at;
        large = scratch + m.large_at + first;
    }
    CG_LANE_METHOD void strip(const cg_cuda_strip &strip, uint32_t lane)
    {
        if (lane < strip.n_zeros) { /* what pads a band is multiplied, too */
            find(strip.frequency, strip.column + strip.n_lanes + lane);
            for (uint32_t row = 0; row < m.n_rows; row++) {
                cell[cg_cuda_cell(row, 0)] = 0;
                digit[cg_cuda_cell(row, 0)] = 0;
            }
        }
        has_column = lane < strip.n_lanes;
        has_digit = has_column && is_finest;
        find(strip.frequency, has_column ? strip.column + lane : 0);
    }
    /* Of the row `ahead` of this even one. Any cell where there is no such row: nothing may look at
     * what is loaded, or it would wait. */
    CG_LANE_METHOD int16_t coarse(uint32_t row, uint32_t ahead) const
    {
        return cell[cg_cuda_cell(row + ahead < n_rows ? ahead : 0, 0)];
    }
    template <uint32_t ROW>
    CG_LANE_METHOD void store(uint32_t row, int32_t v, bool may_be_large, bool *)
    {
        if (has_column)
            cell[cg_cuda_cell(ROW, 0)] = (int16_t)v;
        if (has_digit)
            digit[cg_cuda_cell(ROW, 0)] = (int8_t)v;
        if (may_be_large && has_digit && v != (int8_t)v)
            large[row / CG_CUDA_TILE_BLOCKS] = 1;
        if (ROW == 1) {
            cell += cg_cuda_cell(2, 0);
            digit += cg_cuda_cell(2, 0);
        }
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

/* Where a lane's elements go for a run of tokens that lie together, such as those in one of the
 * engine's blocks: found once for all of them. */
struct cg_cuda_run {
    const cg_cuda_target &target;
    const cg_cuda_blocks &blocks;
    const int64_t stride;
    const uint32_t dtype; /* here: what is behind target may have changed after each store */
    uint64_t at = 0;      /* an address */
    uint32_t left = 0;    /* tokens: the same for all lanes */
    bool is_there = false, is_outside = false;

    CG_LANE_METHOD cg_cuda_run(const cg_cuda_target &t, const cg_cuda_blocks &b)
        : target(t), blocks(b), stride(b.token_stride[t.plane]), dtype(t.dtype)
    {
    }
    CG_LANE_METHOD void find(const cg_cuda_channel &channel, uint32_t token, uint32_t most)
    {
        const uint32_t from = target.token_from, to = target.token_to;
        const bool is_wanted = token >= from && token < to;
        const cg_cuda_slot slot =
            is_wanted ? cg_cuda_find_slot(blocks, token) : cg_cuda_slot{0, 0, false};
        left = is_wanted      ? blocks.block_tokens - slot.in_block
               : token < from ? from - token
                              : UINT32_MAX;
        if (is_wanted && left > to - token)
            left = to - token;
        left = left < most ? left : most;
        is_there = channel.is_wanted && slot.is_there;
        is_outside |= channel.is_wanted && is_wanted && !slot.is_there;
        at =
            is_there ? (uint64_t)(channel.at + cg_cuda_slot_offset(blocks, target.plane, slot)) : 0;
    }
    CG_LANE_METHOD void store(uint32_t bits)
    {
        if (is_there)
            cg_cuda_store(dtype, (uint8_t *)at, bits);
        at += (uint64_t)stride;
        left--;
    }
};

struct cg_cuda_exponents_sink {
    static constexpr bool IS_EXACT = true, REFINES = false;
    const cg_cuda_exact &m;
    const cg_lossless_split split;
    const uint8_t *const all_low;
    const uint32_t pitch, n_rows; /* pitch: of rows of low bytes */
    /* The low bytes of this row and the next one, by row modulo 2, where elements have one: they
     * have come when they are needed, because nothing looks at them before, not even to widen them.
     */
    uint8_t low[2] = {0, 0};
    const uint8_t *next_low = nullptr, *column_low = nullptr;
    const uint8_t *const anything; /* that may be read */
    const uint32_t step;           /* of next_low */
    cg_cuda_channel channel = {};
    cg_cuda_run run;
    bool has_column = false;

    CG_LANE_METHOD cg_cuda_exponents_sink(const cg_cuda_decode_params &params,
                                          const cg_cuda_exact &exact)
        : m(exact), split(cg_lane_split(exact.target.dtype)),
          all_low((const uint8_t *)params.chunk_dev + exact.low_at),
          pitch(exact.n_columns * split.low_bytes), n_rows(exact.streams.n_rows),
          anything((const uint8_t *)params.chunk_dev), step(split.low_bytes == 1 ? pitch : 0),
          run(exact.target, params.blocks)
    {
    }
    CG_LANE_METHOD bool is_outside() const
    {
        return run.is_outside;
    }
    CG_LANE_METHOD void strip(const cg_cuda_strip &strip, uint32_t lane)
    {
        has_column = lane < strip.n_lanes;
        channel.find(m.target, run.blocks, strip, lane);
        column_low = all_low + (has_column ? (uint64_t)channel.number * split.low_bytes : 0);
        run.left = 0;
        next_low = step > 0 ? column_low : anything;
        low[0] = *next_low;
        next_low += n_rows > 1 ? step : 0;
        low[1] = *next_low;
        next_low += n_rows > 2 ? step : 0;
    }
    /* Of dtypes that have not one low byte. */
    CG_LANE_METHOD uint32_t other_rest(uint32_t row) const
    {
        if (split.low_bytes == 0)
            return 0;
        const uint8_t *const bytes = column_low + (uint64_t)row * pitch;
        return bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16;
    }
    template <uint32_t ROW>
    CG_LANE_METHOD void store(uint32_t row, int32_t v, bool may_be_large, bool *is_bad)
    {
        const uint32_t cell = (uint16_t)v;
        if (run.left == 0)
            run.find(channel, row, UINT32_MAX);
        run.store(cg_lane_join(split, cell, split.low_bytes == 1 ? low[ROW] : other_rest(row)));
        low[ROW] = *next_low;
        next_low += row + 3 < n_rows ? step : 0;
        if (may_be_large && has_column && cg_lane_exponent(split, cell) >> split.exponent_bits != 0)
            *is_bad = true;
    }
};

/* Anchors become elements, and are also kept as symbols: deltas are added to them. */
struct cg_cuda_paper_sink {
    static constexpr bool IS_EXACT = false, REFINES = false;
    const cg_cuda_paper &m;
    const uint8_t *blob;
    int16_t *anchors;
    cg_cuda_channel channel = {};
    cg_cuda_run run;
    float mean = 0, anchor_step = 0, step = 0;
    bool has_column = false;

    CG_LANE_METHOD cg_cuda_paper_sink(const cg_cuda_decode_params &params,
                                      const cg_cuda_paper &paper)
        : m(paper), blob((const uint8_t *)params.blob_dev),
          anchors((int16_t *)((uint8_t *)params.scratch_dev + paper.anchors_at)),
          run(paper.target, params.blocks)
    {
    }
    CG_LANE_METHOD bool is_outside() const
    {
        return run.is_outside;
    }
    CG_LANE_METHOD float of_channel(uint64_t table_at) const
    {
        return ((const float *)(blob + table_at))[channel.number];
    }
    CG_LANE_METHOD void strip(const cg_cuda_strip &strip, uint32_t lane)
    {
        has_column = lane < strip.n_lanes;
        channel.find(m.target, run.blocks, strip, lane);
        run.left = 0;
        if (!channel.is_wanted)
            return;
        mean = of_channel(m.mean_at);
        anchor_step = of_channel(m.anchor_step_at);
        step = m.step / of_channel(m.weight_at);
    }
    CG_LANE_METHOD int16_t *anchor(uint32_t anchor_run) const
    {
        return anchors + (uint64_t)anchor_run * m.n_columns + channel.number;
    }
    CG_LANE_METHOD void store_element(int32_t symbol, float of_step, float base)
    {
        run.store(cg_cuda_round(m.target.dtype,
                                cg_lane_dequantize((float)(int16_t)symbol, of_step, base)));
    }
};

struct cg_cuda_anchors_sink : cg_cuda_paper_sink {
    using cg_cuda_paper_sink::cg_cuda_paper_sink;
    template <uint32_t ROW> CG_LANE_METHOD void store(uint32_t row, int32_t v, bool, bool *)
    {
        if (has_column)
            *anchor(row) = (int16_t)v;
        run.find(channel, row * CG_ANCHOR_TOKENS, 1);
        store_element(v, anchor_step, mean);
    }
};

struct cg_cuda_deltas_sink : cg_cuda_paper_sink {
    using cg_cuda_paper_sink::cg_cuda_paper_sink;
    float base = 0;
    template <uint32_t ROW> CG_LANE_METHOD void store(uint32_t row, int32_t v, bool, bool *)
    {
        if (run.left == 0) { /* at most the deltas of an anchor */
            const uint32_t anchor_run = row / (CG_ANCHOR_TOKENS - 1),
                           i = row % (CG_ANCHOR_TOKENS - 1);
            run.find(channel, anchor_run * CG_ANCHOR_TOKENS + 1 + i, CG_ANCHOR_TOKENS - 1 - i);
            if (channel.is_wanted)
                base = cg_lane_dequantize((float)*anchor(anchor_run), anchor_step, mean);
        }
        store_element(v, step, base);
    }
};
#endif
