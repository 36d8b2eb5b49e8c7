/* cuda/klt.cuh - kernels' bodies: from symbols to elements, preset klt; FORMAT.md's "Decoding,
 * version 2", steps 1 to 5; of version 3, from step 1b on.
 *
 * A warp makes 16 blocks of 8 tokens by 8 pairs of channels. The sums of a block's 8 frequencies
 * lie in one lane, so that the inverse DCT needs no other lane. So do the two channels that are
 * rotated together, because the host deals the basis's columns out in pairs.
 *
 * A sum over components takes one tensor instruction for each band of 32 components and each
 * frequency: symbols of 8 bits by elements of 8 bits. Larger elements take two steps, one for each
 * digit. Symbols of more than 8 bits are rare; where a tile has one, their higher digits are taken
 * from the cells. All sums are modulo 2^32, as FORMAT.md says.
 */
#ifndef CG_CUDA_KLT_CUH
#define CG_CUDA_KLT_CUH
#include "codec/dct8.h"
#include "codec/exact_lane.h"
#include "cuda/elements.cuh"

#define CG_CUDA_NOWHERE INT64_MIN /* no slot is there: addresses have 48 bits */

enum {
    CG_CUDA_TOKENS = CG_CUDA_KLT_BLOCKS * CG_DCT,
};

/* A warp's channels. */
struct cg_cuda_columns {
    uint32_t layer, plane, head, tile; /* tile: in the matrix */
    uint32_t first_pair;               /* in the head */
};

CG_LANE cg_cuda_columns cg_cuda_find_columns(const cg_cuda_klt &m, uint32_t wanted_tile)
{
    const uint32_t n_heads = m.target.head_to - m.target.head_from,
                   slice = wanted_tile / (n_heads * m.head_tiles),
                   in_head = wanted_tile % m.head_tiles;
    cg_cuda_columns c;
    c.head = m.target.head_from + wanted_tile / m.head_tiles % n_heads;
    c.layer = m.target.first_layer + slice % m.n_layers;
    c.plane = m.target.plane + slice / m.n_layers;
    c.tile = (slice * m.target.n_kv_heads + c.head) * m.head_tiles + in_head;
    c.first_pair = in_head * CG_CUDA_TILE_PAIRS;
    return c;
}

/* Steps, and what their tiles of digits are, by row of tiles: a bit for each frequency. */
struct cg_cuda_window {
    cg_cuda_step steps[CG_CUDA_WINDOW_STEPS];
    /* To be multiplied: the frequency has the band, or the other frequency of its pair has; and,
     * for a tile of rests, it is not all zeros. Of steps behind the last one: none. */
    uint8_t there[CG_CUDA_WINDOW_STEPS][CG_CUDA_KLT_ROWS];
    uint8_t large[CG_CUDA_WINDOW_STEPS][CG_CUDA_KLT_ROWS]; /* digits are not all of their cells */
};

/* A thread block's shared memory. */
struct cg_cuda_klt_shared {
    /* Digits of a stage's steps, in tiles, and the elements of the basis that multiply them. */
    uint8_t digits[2][CG_CUDA_STAGE_STEPS][CG_DCT][CG_CUDA_KLT_ROWS][CG_CUDA_TILE_BYTES];
    uint8_t basis[2][CG_CUDA_STAGE_STEPS][CG_CUDA_KLT_COLUMNS][CG_CUDA_TILE_BYTES];
    cg_cuda_window windows[2];
    /* Of the rows' tokens: their slots, or CG_CUDA_NOWHERE. */
    int64_t offsets[CG_CUDA_TOKENS][CG_N_PLANES];
    cg_cuda_columns columns[CG_CUDA_KLT_COLUMNS]; /* here: registers are for the sums */
    cg_cuda_row rows[CG_CUDA_KLT_BLOCKS];
};

static_assert(sizeof(cg_cuda_klt_shared) <= CG_CUDA_KLT_SHARED_BYTES, "cuda/layout.h");

/* The sums of two tiles of columns (low and high channels of pairs), by frequency; FORMAT of the
 * tensor instruction's C fragments: [0..1] row 2 (lane / 4) of a tile, [2..3] the next, columns 2
 * (lane % 4) and the next. */
struct cg_cuda_sums {
    uint32_t of[CG_DCT][2][4];
};

CG_LANE void cg_cuda_shift_sums(cg_cuda_sums *sums, uint32_t shift)
{
    CG_UNROLL
    for (int f = 0; f < CG_DCT; f++) {
        CG_UNROLL
        for (int i = 0; i < 4; i++) {
            sums->of[f][0][i] <<= shift;
            sums->of[f][1][i] <<= shift;
        }
    }
}

/* Whether something is left over 256 of the numbers given to a tile or to that of the other
 * frequency of its pair. */
CG_LANE bool cg_cuda_has_rest(const cg_cuda_product &m, const uint8_t *scratch, uint32_t f,
                              uint32_t band, uint32_t tile_row)
{
    uint32_t marks = 0;
    CG_UNROLL
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t g = f ^ i;
        if (tile_row < m.n_tile_rows && band < m.n_bands[g])
            marks |= scratch[m.rest_at + m.tile_at[g] + band * m.n_tile_rows + tile_row];
    }
    return marks != 0;
}

/* Fills a window with the steps from first_step on. Each warp takes some steps, and a lane a tile:
 * of frequency lane % 8, row lane / 8. */
template <class Cta>
CG_LANE void cg_cuda_fill_window(Cta &cta, const cg_cuda_product &m, const uint8_t *scratch,
                                 const cg_cuda_step *steps, uint32_t first_step, uint32_t first_row,
                                 cg_cuda_klt_shared *shared)
{
    cg_cuda_window *const window = &shared->windows[first_step / CG_CUDA_WINDOW_STEPS % 2];
    const uint32_t lane = cta.lane(), f = lane % CG_DCT, row = lane / CG_DCT,
                   tile_row = first_row / CG_CUDA_TILE_BLOCKS + row,
                   n_bands = row < CG_CUDA_KLT_ROWS && tile_row < m.n_tile_rows ? m.n_bands[f] : 0,
                   pair_bands = n_bands > m.n_bands[f ^ 1] ? n_bands : m.n_bands[f ^ 1];
    CG_UNROLL
    for (uint32_t s = cta.thread() / CG_RANS_LANES; s < CG_CUDA_WINDOW_STEPS;
         s += CG_CUDA_KLT_THREADS / CG_RANS_LANES) {
        bool is_there = false, is_large = false;
        cg_cuda_step step = {0, 0, 0, 0};
        if (first_step + s < m.n_steps && row < CG_CUDA_KLT_ROWS) {
            step = steps[first_step + s];
            is_there = step.band < pair_bands &&
                       (step.is_rest == 0 || cg_cuda_has_rest(m, scratch, f, step.band, tile_row));
            is_large =
                is_there && step.band < n_bands &&
                scratch[m.large_at + m.tile_at[f] + step.band * m.n_tile_rows + tile_row] != 0;
        }
        const uint32_t there = cta.ballot(is_there), large = cta.ballot(is_large);
        if (lane == 0)
            window->steps[s] = step;
        if (lane < CG_CUDA_KLT_ROWS) {
            window->there[s][lane] = (uint8_t)(there >> CG_DCT * lane);
            window->large[s][lane] = (uint8_t)(large >> CG_DCT * lane);
        }
    }
}

/* What a warp fetches of each step: the tile of digits of its row and of the frequency whose number
 * its column has; and of its column's basis, which the rows of tiles share, every
 * CG_CUDA_KLT_ROWS-th step. Addresses are the lane's. */
struct cg_cuda_sources {
    const uint8_t *digits; /* of band 0 */
    const uint8_t *basis;  /* of step 0; NULL: there is no such column */
    uint32_t n_bands, band_bytes;
};

/* Starts to fetch what a stage's steps multiply. Their window is filled. */
template <class Cta>
CG_LANE void cg_cuda_fetch_stage(Cta &cta, const cg_cuda_sources &from, uint32_t first_step,
                                 uint32_t n_steps, cg_cuda_klt_shared *shared)
{
    static_assert((int)CG_CUDA_KLT_COLUMNS == (int)CG_DCT &&
                      (int)CG_CUDA_TILE_BYTES == 16 * (int)CG_RANS_LANES,
                  "a tile each");
    const cg_cuda_window &window = shared->windows[first_step / CG_CUDA_WINDOW_STEPS % 2];
    const uint32_t buffer = first_step / CG_CUDA_STAGE_STEPS % 2,
                   at = first_step % CG_CUDA_WINDOW_STEPS, warp = cta.thread() / CG_RANS_LANES,
                   row = warp / CG_CUDA_KLT_COLUMNS, f = warp % CG_CUDA_KLT_COLUMNS,
                   lane_at = 16 * cta.lane();
    CG_UNROLL
    for (uint32_t s = 0; s < CG_CUDA_STAGE_STEPS; s++) {
        const cg_cuda_step step = window.steps[at + s];
        if (s % CG_CUDA_KLT_ROWS == row && from.basis != nullptr && first_step + s < n_steps)
            cta.copy16(&shared->basis[buffer][s][f][lane_at],
                       from.basis + (uint64_t)step.number * CG_CUDA_TILE_BYTES);
        if ((window.there[at + s][row] >> f & 1) == 0)
            continue;
        uint8_t *const to = &shared->digits[buffer][s][f][row][lane_at];
        if (step.band < from.n_bands)
            cta.copy16(to, from.digits + (uint64_t)step.band * from.band_bytes);
        else
            cta.clear16(to);
    }
}

/* A higher digit of 4 neighbouring cells: of 8 bits at bit 8 * digit, signed, so that the digits
 * make up the cell modulo 2^24. */
CG_LANE uint32_t cg_cuda_high_digits(const int16_t *cells, uint32_t digit)
{
    uint32_t packed = 0;
    for (int i = 0; i < 4; i++) {
        const int32_t rest = (cells[i] - (int8_t)cells[i]) >> 8; /* -128 to 128 */
        const int32_t value = digit == 1 ? (int8_t)rest : (rest - (int8_t)rest) >> 8;
        packed |= (uint32_t)(uint8_t)value << (8 * i);
    }
    return packed;
}

/* What the higher digits of a tile's cells add to the sums of a frequency. Rare, and so not
 * unrolled for each. */
template <class Cta>
CG_LANE void cg_cuda_add_large(Cta &cta, const cg_cuda_product &m, const uint8_t *scratch,
                               uint32_t f, uint32_t band, uint32_t first_row,
                               const uint32_t basis[4], cg_cuda_sums *sums)
{
    const uint64_t tile = m.tile_at[f] + band * m.n_tile_rows + first_row / CG_CUDA_TILE_BLOCKS;
    const int16_t *cells =
        (const int16_t *)(scratch + m.cells_at) + tile * CG_CUDA_TILE_BYTES + cta.lane() * 16;
    for (uint32_t digit = 1; digit <= 2; digit++) {
        uint32_t a[4];
        CG_UNROLL
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t row = first_row + cta.lane() / 4 * 2 + i % 2;
            a[i] = row < m.n_rows ? cg_cuda_high_digits(cells + 4 * i, digit) : 0;
        }
        CG_UNROLL
        for (uint32_t is_high = 0; is_high < 2; is_high++) {
            uint32_t added[4] = {};
            cta.multiply(added, a, basis + 2 * is_high);
            CG_UNROLL
            for (uint32_t i = 0; i < 4 * CG_DCT; i++)
                sums->of[i / 4][is_high][i % 4] += i / 4 == f ? added[i % 4] << (8 * digit) : 0;
        }
    }
}

/* Step 1 of the format, of a warp's rows and columns. digits: the lane's in the tiles. there,
 * large: as a window has them. */
template <class Cta>
CG_LANE void cg_cuda_add_step(Cta &cta, const cg_cuda_product &m, const uint8_t *scratch,
                              const uint8_t (*digits)[CG_CUDA_KLT_ROWS][CG_CUDA_TILE_BYTES],
                              uint32_t there, uint32_t large, uint32_t band, uint32_t first_row,
                              const uint32_t basis[4], cg_cuda_sums *sums)
{
    /* Frequencies have fewer bands the higher they are. Tiles of zeros are multiplied: there are
     * few, and to look costs more. */
    CG_UNROLL
    for (uint32_t f = 0; f < CG_DCT; f += 2) {
        if ((there & 1u << f) == 0)
            continue;
        CG_UNROLL
        for (uint32_t g = f; g < f + 2; g++) {
            uint32_t a[4];
            cta.load_shared16(a, digits[g]);
            cta.multiply(sums->of[g][0], a, basis);
            cta.multiply(sums->of[g][1], a, basis + 2);
        }
    }
    if (large == 0)
        return;
    for (uint32_t f = 0; f < CG_DCT; f++) {
        if ((large >> f & 1) != 0)
            cg_cuda_add_large(cta, m, scratch, f, band, first_row, basis, sums);
    }
}

/* Where two neighbouring pairs of channels lie in a token's head. */
struct cg_cuda_pairs {
    int64_t offset[2][2]; /* [pair][low, high], in bytes */
    bool is_there[2];     /* not behind the head's last */
    bool are_together[2]; /* [low, high]: both pairs' elements fill a word, or of fp8 half of one */
};

/* Of an element that is not fp32. */
CG_LANE uint32_t cg_cuda_small_bytes(uint32_t dtype)
{
    return dtype == CG_DTYPE_FP8_E4M3 || dtype == CG_DTYPE_FP8_E5M2 ? 1 : 2;
}

CG_LANE cg_cuda_pairs cg_cuda_find_pairs(const cg_cuda_klt &m, int64_t dim_stride, uint32_t pair)
{
    cg_cuda_pairs p;
    CG_UNROLL
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t at = pair + i;
        p.is_there[i] = at < m.target.head_dim / 2;
        CG_UNROLL
        for (uint32_t is_high = 0; is_high < 2; is_high++) { /* rotated together; then neighbours */
            const uint32_t dim = at < m.half ? at + is_high * m.half : 2 * at + is_high;
            p.offset[i][is_high] = (int64_t)dim * dim_stride;
        }
    }
    CG_UNROLL
    for (uint32_t is_high = 0; is_high < 2; is_high++)
        p.are_together[is_high] =
            p.is_there[1] && m.target.dtype != CG_DTYPE_FP32 &&
            p.offset[1][is_high] - p.offset[0][is_high] == cg_cuda_small_bytes(m.target.dtype);
    return p;
}

/* Stores their elements: bits[pair][low, high]. */
CG_LANE void cg_cuda_store_pairs(const cg_cuda_pairs &p, uint32_t dtype, uint8_t *at,
                                 const uint32_t bits[2][2])
{
    CG_UNROLL
    for (uint32_t is_high = 0; is_high < 2; is_high++) {
        uint8_t *const to = at + p.offset[0][is_high];
        if (p.are_together[is_high] && (uintptr_t)to % (2 * cg_cuda_small_bytes(dtype)) == 0) {
            if (cg_cuda_small_bytes(dtype) == 1)
                *(uint16_t *)to = (uint16_t)(bits[0][is_high] | bits[1][is_high] << 8);
            else
                *(uint32_t *)to = bits[0][is_high] | bits[1][is_high] << 16;
            continue;
        }
        if (p.is_there[0])
            cg_cuda_store(dtype, to, bits[0][is_high]);
        if (p.is_there[1])
            cg_cuda_store(dtype, at + p.offset[1][is_high], bits[1][is_high]);
    }
}

/* D' of a row: the constants of step 2 times unit, each rounded once. They are seven numbers, those
 * of token 0, and their negatives, so that a lane holds no more. */
CG_LANE void cg_cuda_scale_dct(float unit, float out[CG_DCT][CG_DCT])
{
    float scaled[CG_DCT];
    CG_UNROLL
    for (int f = 0; f < CG_DCT; f++)
        scaled[f] = DCT8[f][0] * unit;
    CG_UNROLL
    for (int f = 0; f < CG_DCT; f++) {
        CG_UNROLL
        for (int t = 0; t < CG_DCT; t++) {
            /* cos(pi / 16 * turns) is that of 32 - turns, and minus that of 16 - turns. */
            const int turns = (2 * t + 1) * f % 32, half = turns > 16 ? 32 - turns : turns,
                      quarter = half > 8 ? 16 - half : half;
            out[f][t] = half > 8 ? -scaled[quarter] : scaled[quarter];
        }
    }
}

/* Steps 2 to 5 of the lane's sums of one row, the first two of four: two neighbouring pairs of
 * channels. DTYPE: 0 for any. */
template <uint32_t DTYPE, class Cta>
CG_LANE void cg_cuda_finish_block(Cta &cta, const cg_cuda_klt &m,
                                  const cg_cuda_decode_params &params, const cg_cuda_columns &c,
                                  const cg_cuda_klt_shared *shared, uint32_t row_in_job,
                                  const cg_cuda_sums *sums)
{
    const uint8_t *blob = (const uint8_t *)params.blob_dev;
    const uint32_t column = cta.lane() % 4 * 2, pair = c.first_pair + column,
                   first_token = shared->rows[row_in_job].block * CG_DCT;
    float dct[CG_DCT][CG_DCT];
    cg_cuda_scale_dct(m.unit * shared->rows[row_in_job].scale, dct);
    float z[2][2][CG_DCT]; /* [pair][low, high] */
    CG_UNROLL
    for (int i = 0; i < 2; i++) {
        CG_UNROLL
        for (int is_high = 0; is_high < 2; is_high++) {
            const uint32_t at = (c.tile * 2 + is_high) * CG_CUDA_TILE_PAIRS + column + i;
            const float mean = ((const float *)(blob + m.mean_at))[at],
                        scale = ((const float *)(blob + m.scale_at))[at];
            float y[CG_DCT];
            CG_UNROLL
            for (int f = 0; f < CG_DCT; f++)
                y[f] = (float)(int32_t)sums->of[f][is_high][i];
            cg_lane_inverse_dct(dct, y, z[i][is_high]);
            CG_UNROLL
            for (int t = 0; t < CG_DCT; t++)
                z[i][is_high][t] = cg_lane_dequantize(z[i][is_high][t], scale, mean);
        }
    }
    /* Copies: what is behind pointers may have changed after each store, for all a compiler knows.
     */
    const uint32_t dtype = DTYPE != 0 ? DTYPE : m.target.dtype, half = m.half, plane = c.plane,
                   rope = ((const uint8_t *)(blob + m.layer_rope_at))[c.layer];
    const float *rotation = (const float *)((const uint8_t *)params.scratch_dev + m.rotation_at) +
                            (((uint64_t)rope * m.n_tokens + first_token) * half + pair) * 2;
    const bool turns[2] = {plane == CG_K && pair < half, plane == CG_K && pair + 1 < half};
    const cg_cuda_pairs pairs = cg_cuda_find_pairs(m, params.blocks.dim_stride[plane], pair);
    uint8_t *const head = cg_cuda_head(params.blocks, c.layer, plane, c.head);
    CG_UNROLL
    for (int t = 0; t < CG_DCT; t++, rotation += 2 * half) {
        const int64_t offset = shared->offsets[row_in_job * CG_DCT + t][plane];
        if (offset == CG_CUDA_NOWHERE)
            continue;
        uint32_t bits[2][2];
        CG_UNROLL
        for (uint32_t i = 0; i < 2; i++) {
            if (turns[i])
                cg_lane_rotate(&z[i][0][t], &z[i][1][t], rotation[2 * i], rotation[2 * i + 1]);
        }
        CG_UNROLL
        for (uint32_t is_high = 0; is_high < 2; is_high++)
            cg_cuda_round_two(dtype, z[0][is_high][t], z[1][is_high][t], &bits[0][is_high],
                              &bits[1][is_high]);
        cg_cuda_store_pairs(pairs, dtype, head + offset, bits);
    }
}

#define CG_CUDA_NO_TILE UINT32_MAX /* of a column that is not there */

/* The sums of a warp's rows and columns. All threads come here, for the barriers; a warp without
 * rows or columns only helps to fetch. meanwhile(): what else a thread does before the first
 * barrier. */
template <class Cta, class Meanwhile>
CG_LANE void cg_cuda_sum(Cta &cta, const cg_cuda_product &m, const cg_cuda_decode_params &params,
                         uint32_t first_row, uint32_t tile_row, uint32_t tile, bool has_work,
                         cg_cuda_klt_shared *shared, cg_cuda_sums *sums, Meanwhile meanwhile)
{
    const uint8_t *blob = (const uint8_t *)params.blob_dev,
                  *scratch = (const uint8_t *)params.scratch_dev;
    const cg_cuda_step *steps = (const cg_cuda_step *)(blob + m.steps_at);
    static_assert(CG_CUDA_WINDOW_STEPS % CG_CUDA_STAGE_STEPS == 0 &&
                      CG_CUDA_WINDOW_STEPS >= 2 * CG_CUDA_STAGE_STEPS,
                  "a window is filled a stage before it is needed");
    const uint32_t n_steps = m.n_steps, column = cta.thread() / CG_RANS_LANES % CG_CUDA_KLT_COLUMNS,
                   row = first_row / CG_CUDA_TILE_BLOCKS + tile_row;
    const cg_cuda_sources from = {
        scratch + m.digits_at + ((uint64_t)m.tile_at[column] + row) * CG_CUDA_TILE_BYTES +
            16 * cta.lane(),
        tile != CG_CUDA_NO_TILE
            ? blob + m.basis_at + ((uint64_t)tile * m.n_all_steps * CG_RANS_LANES + cta.lane()) * 16
            : nullptr,
        row < m.n_tile_rows ? m.n_bands[column] : 0, m.n_tile_rows * CG_CUDA_TILE_BYTES};
    uint32_t shift = n_steps > 0 ? steps[0].shift : 0;
    cg_cuda_fill_window(cta, m, scratch, steps, 0, first_row, shared);
    meanwhile();
    cta.barrier();
    if (n_steps > 0)
        cg_cuda_fetch_stage(cta, from, 0, n_steps, shared);
    for (uint32_t first = 0; first < n_steps; first += CG_CUDA_STAGE_STEPS) {
        const uint32_t next = first + CG_CUDA_STAGE_STEPS, behind = next + CG_CUDA_STAGE_STEPS,
                       buffer = first / CG_CUDA_STAGE_STEPS % 2;
        cta.wait_copies();
        cta.barrier(); /* this stage has come, and nobody reads the one before any more */
        if (next < n_steps)
            cg_cuda_fetch_stage(cta, from, next, n_steps, shared);
        if (behind % CG_CUDA_WINDOW_STEPS == 0 && behind < n_steps)
            cg_cuda_fill_window(cta, m, scratch, steps, behind, first_row, shared);
        if (!has_work)
            continue;
        const cg_cuda_window &window = shared->windows[first / CG_CUDA_WINDOW_STEPS % 2];
        const uint8_t(*digits)[CG_CUDA_KLT_ROWS][CG_CUDA_TILE_BYTES] =
            (const uint8_t(*)[CG_CUDA_KLT_ROWS][CG_CUDA_TILE_BYTES]) &
            shared->digits[buffer][0][0][tile_row][16 * cta.lane()];
        CG_UNROLL_NOT
        for (uint32_t s = 0; s < CG_CUDA_STAGE_STEPS; s++, digits += CG_DCT) {
            const uint32_t at = first % CG_CUDA_WINDOW_STEPS + s,
                           there = window.there[at][tile_row];
            if (there == 0)
                continue; /* of rests often, of others never */
            const cg_cuda_step step = window.steps[at];
            uint32_t fragment[4];
            cta.load_shared16(fragment, &shared->basis[buffer][s][column][16 * cta.lane()]);
            if (step.shift != shift)
                cg_cuda_shift_sums(sums, shift - step.shift);
            shift = step.shift;
            cg_cuda_add_step(cta, m, scratch, digits, there, window.large[at][tile_row], step.band,
                             first_row + tile_row * CG_CUDA_TILE_BLOCKS, fragment, sums);
        }
    }
    cg_cuda_shift_sums(sums, shift);
}

/* Both rows of the lane. */
template <uint32_t DTYPE, class Cta>
CG_LANE void cg_cuda_finish(Cta &cta, const cg_cuda_klt &m, const cg_cuda_decode_params &params,
                            const cg_cuda_klt_shared *shared, uint32_t tile_row,
                            uint32_t tile_column, cg_cuda_sums *sums)
{
    CG_UNROLL_NOT /* both at once take too many registers */
        for (uint32_t row_half = 0; row_half < 2; row_half++)
    {
        cg_cuda_finish_block<DTYPE>(cta, m, params, shared->columns[tile_column], shared,
                                    tile_row * CG_CUDA_TILE_BLOCKS + cta.lane() / 4 * 2 + row_half,
                                    sums);
        CG_UNROLL
        for (int i = 0; i < 4 * CG_DCT; i++)
            sums->of[i / 4][i / 2 % 2][i % 2] = sums->of[i / 4][i / 2 % 2][2 + i % 2];
    }
}

/* Where a thread block's rows and columns lie, for all its warps. */
template <class Cta>
CG_LANE void cg_cuda_find_places(Cta &cta, const cg_cuda_klt &m,
                                 const cg_cuda_decode_params &params, const cg_cuda_klt_job &job,
                                 cg_cuda_klt_shared *shared)
{
    const cg_cuda_row *rows = (const cg_cuda_row *)((const uint8_t *)params.plan_dev + m.rows_at);
    bool is_outside = false;
    for (uint32_t i = cta.thread(); i < CG_CUDA_TOKENS; i += CG_CUDA_KLT_THREADS) {
        const uint32_t in_job = i / CG_DCT, row = job.first_row + in_job;
        const bool is_there = row < m.product.n_rows;
        const cg_cuda_row of_row = is_there ? rows[row] : cg_cuda_row{0, 0};
        const uint32_t token = of_row.block * CG_DCT + i % CG_DCT;
        const bool is_wanted =
            is_there && token >= m.target.token_from && token < m.target.token_to;
        if (i % CG_DCT == 0)
            shared->rows[in_job] = of_row;
        const cg_cuda_slot slot =
            is_wanted ? cg_cuda_find_slot(params.blocks, token) : cg_cuda_slot{0, 0, false};
        is_outside |= is_wanted && !slot.is_there;
        for (uint32_t plane = 0; plane < CG_N_PLANES; plane++)
            shared->offsets[i][plane] =
                slot.is_there ? cg_cuda_slot_offset(params.blocks, plane, slot) : CG_CUDA_NOWHERE;
    }
    if (is_outside)
        cta.raise(params.status_dev, CG_ERR_INVALID_ARGUMENT);
    if (cta.thread() < CG_CUDA_KLT_COLUMNS)
        shared->columns[cta.thread()] = cg_cuda_find_columns(m, job.first_tile + cta.thread());
}

template <class Cta>
CG_LANE void cg_cuda_invert_klt(Cta &cta, const cg_cuda_pass &pass,
                                const cg_cuda_decode_params &params)
{
    const uint8_t *const plan = (const uint8_t *)params.plan_dev;
    const cg_cuda_klt_job job = ((const cg_cuda_klt_job *)(plan + pass.jobs_at))[cta.block()];
    const cg_cuda_klt &m = *(const cg_cuda_klt *)(plan + job.matrix_at);
    cg_cuda_klt_shared *shared = (cg_cuda_klt_shared *)cta.shared();
    const uint32_t warp = cta.thread() / CG_RANS_LANES, tile_row = warp / CG_CUDA_KLT_COLUMNS,
                   tile_column = warp % CG_CUDA_KLT_COLUMNS;
    const bool has_column = job.first_tile + tile_column < job.n_tiles,
               has_work =
                   has_column && job.first_row + tile_row * CG_CUDA_TILE_BLOCKS < m.product.n_rows;
    const uint32_t tile =
        has_column ? cg_cuda_find_columns(m, job.first_tile + tile_column).tile : CG_CUDA_NO_TILE;
    cg_cuda_sums sums = {};
    cg_cuda_sum(cta, m.product, params, job.first_row, tile_row, tile, has_work, shared, &sums,
                [&] { cg_cuda_find_places(cta, m, params, job, shared); });
    if (!has_work)
        return;
    if (m.target.dtype == CG_DTYPE_BF16)
        cg_cuda_finish<CG_DTYPE_BF16>(cta, m, params, shared, tile_row, tile_column, &sums);
    else
        cg_cuda_finish<0>(cta, m, params, shared, tile_row, tile_column, &sums);
}

/* Zeros, and step 4's cosines and sines: a thread each, for all tables, tokens and pairs. */
template <class Cta>
CG_LANE void cg_cuda_begin(Cta &cta, const cg_cuda_pass &pass, const cg_cuda_decode_params &params)
{
    const cg_cuda_start &r =
        *(const cg_cuda_start *)((const uint8_t *)params.plan_dev + pass.jobs_at);
    const uint64_t i = (uint64_t)cta.block() * CG_CUDA_START_THREADS + cta.thread();
    if (i < r.n_zeros)
        cta.clear16((uint8_t *)params.scratch_dev + 16 * i);
    if (i >= (uint64_t)r.n_ropes * r.n_tokens * r.half)
        return;
    const uint32_t pair = (uint32_t)(i % r.half), token = (uint32_t)(i / r.half % r.n_tokens),
                   rope = (uint32_t)(i / r.half / r.n_tokens);
    const double *inv_freq =
        (const double *)((const uint8_t *)params.blob_dev + r.inv_freq_at) + rope * r.half;
    float *out = (float *)((uint8_t *)params.scratch_dev + r.rotation_at) + 2 * i;
    cg_lane_rotation((double)(r.first_position + token), inv_freq[pair], &out[0], &out[1]);
}
#endif
