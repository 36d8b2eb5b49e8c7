/* cuda/klt.cuh - kernels' bodies: from symbols to elements, preset klt; FORMAT.md's "Decoding,
 * version 2", stages 1 to 5; of version 3, from stage 1b on.
 *
 * A warp sums half of the frequencies of 16 blocks of 8 tokens and two times 8 pairs of channels:
 * what it loads of shared memory is multiplied more often than if it summed all frequencies of one.
 * Then two warps exchange what the other lacks, and each makes one of the two. The sums of a
 * block's 8 frequencies lie in one lane, so that the inverse DCT needs no other lane. So do the two
 * channels that are rotated together, because the host deals the basis's columns out in pairs.
 *
 * A sum over components takes one tensor instruction for each band of 32 components and each
 * frequency: symbols of 8 bits by elements of 8 bits. Larger elements take two steps, one for each
 * digit. Where a tile has symbols of more than 8 bits (many of the joint matrix's have), all its
 * higher digits are taken from the cells. All sums are modulo 2^32, as FORMAT.md says.
 */
#ifndef CG_CUDA_KLT_CUH
#define CG_CUDA_KLT_CUH
#include "codec/dct8.h"
#include "codec/exact_lane.h"
#include "cuda/elements.cuh"

#include <string.h>

#define CG_CUDA_NOWHERE INT64_MIN /* no slot is there: addresses have 48 bits */

enum {
    CG_CUDA_TOKENS = CG_CUDA_KLT_ROWS * CG_CUDA_TILE_BLOCKS * CG_DCT,
    CG_CUDA_HALF = CG_DCT / 2, /* frequencies that a warp sums */
    CG_CUDA_ALL = (1 << CG_CUDA_HALF) - 1,
    CG_CUDA_NEXT_COLUMN = CG_CUDA_KLT_COLUMNS / 2, /* the warps of both have one scheduler */
};

/* Frequencies by place: the first and the last pair, then the others. So the halves have about as
 * many bands. */
CG_LANE constexpr uint32_t cg_cuda_frequency(uint32_t place)
{
    return 0x54327610u >> (4 * place) & 0xf;
}

/* A warp's part in a thread block. */
struct cg_cuda_warp {
    uint32_t row, column; /* tiles of both: what it makes in the end */
    /* It sums half of the frequencies, of the column `first` and of CG_CUDA_NEXT_COLUMN behind it.
     */
    uint32_t half, first;
};

CG_LANE cg_cuda_warp cg_cuda_find_warp(uint32_t thread)
{
    const uint32_t column = thread / CG_RANS_LANES % CG_CUDA_KLT_COLUMNS;
    return {thread / (CG_CUDA_KLT_COLUMNS * CG_RANS_LANES), column, column / CG_CUDA_NEXT_COLUMN,
            column % CG_CUDA_NEXT_COLUMN};
}

/* The first of a row of tiles, or CG_CUDA_NO_ROW. An index would put the job into memory. */
CG_LANE uint32_t cg_cuda_first_row(const cg_cuda_klt_job &job, uint32_t row)
{
    return row == 0 ? job.first_row[0] : job.first_row[CG_CUDA_KLT_ROWS - 1];
}

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

/* A step, and what its tiles of digits are: a bit for each frequency's place. Of steps behind the
 * last one: none. */
struct alignas(16) cg_cuda_window_step {
    cg_cuda_step step;
    uint8_t own; /* has the band: the others' digits are zeros */
    uint8_t reserved[7 - 2 * CG_CUDA_KLT_ROWS];
    /* Of each row of tiles, two bytes: those to be multiplied, whose frequency has the band, or the
     * other frequency of its pair has, and which are, where they are rests, not all zeros; and
     * those whose digits are not all of their cells. */
    uint8_t marks[2 * CG_CUDA_KLT_ROWS];
};

static_assert(sizeof(cg_cuda_window_step) == 16, "loaded at once");

/* Digits of a step, in tiles by frequency's place, and the elements of the basis that multiply
 * them. */
struct cg_cuda_step_tiles {
    uint8_t digits[CG_CUDA_KLT_ROWS][CG_DCT][CG_CUDA_TILE_BYTES];
    uint8_t basis[CG_CUDA_KLT_COLUMNS][CG_CUDA_TILE_BYTES];
};

/* A thread block's shared memory. */
struct cg_cuda_klt_shared {
    union {
        cg_cuda_step_tiles stages[CG_CUDA_STAGES][CG_CUDA_STAGE_STEPS];
        /* After them: sums of a warp's other column, 16 bytes a lane. */
        uint32_t sums[CG_CUDA_KLT_ROWS][CG_CUDA_KLT_COLUMNS][CG_CUDA_HALF][2][CG_RANS_LANES][4];
    };
    cg_cuda_window_step steps[2 * CG_CUDA_WINDOW_STEPS]; /* by number: this window and the next */
    /* Of the rows' tokens: their slots, or CG_CUDA_NOWHERE. */
    int64_t offsets[CG_CUDA_TOKENS][CG_N_PLANES];
    cg_cuda_columns columns[CG_CUDA_KLT_COLUMNS]; /* here: registers are for the sums */
    cg_cuda_row rows[CG_CUDA_KLT_ROWS * CG_CUDA_TILE_BLOCKS];
};

static_assert(sizeof(cg_cuda_klt_shared) <= CG_CUDA_KLT_SHARED_BYTES, "cuda/layout.h");

/* The sums of two tiles of columns (low and high channels of pairs); FORMAT of the tensor
 * instruction's C fragments: [0..1] row 2 (lane / 4) of a tile, [2..3] the next, columns 2
 * (lane % 4) and the next. Of a warp: by place in its half of frequencies, of its two columns. */
struct cg_cuda_sums {
    uint32_t of[CG_CUDA_HALF][2][2][4];
};

/* Of the column that a warp makes, by frequency. */
struct cg_cuda_column_sums {
    uint32_t of[CG_DCT][2][4];
};

CG_LANE void cg_cuda_shift_sums(cg_cuda_sums *sums, uint32_t shift)
{
    CG_UNROLL
    for (int k = 0; k < CG_CUDA_HALF; k++) {
        CG_UNROLL
        for (int i = 0; i < 16; i++)
            sums->of[k][i / 8][i / 4 % 2][i % 4] <<= shift;
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
        if (band < m.n_bands[g])
            marks |= scratch[m.rest_at + m.tile_at[g] + band * m.n_tile_rows + tile_row];
    }
    return marks != 0;
}

/* Fills a window with the steps from first_step on. A lane looks at one tile, a warp at four steps
 * together of its row. tile_row: that one's, or none. */
template <class Cta>
CG_LANE void cg_cuda_fill_window(Cta &cta, const cg_cuda_product &m, const uint8_t *scratch,
                                 const cg_cuda_step *steps, uint32_t first_step, uint32_t tile_row,
                                 cg_cuda_klt_shared *shared)
{
    static_assert((int)CG_CUDA_KLT_ROWS * (int)CG_CUDA_WINDOW_STEPS * (int)CG_DCT ==
                      (int)CG_CUDA_KLT_THREADS,
                  "a tile each");
    const uint32_t thread = cta.thread(), lane = thread % CG_RANS_LANES,
                   row = thread / CG_DCT / CG_CUDA_WINDOW_STEPS,
                   s = first_step + thread / CG_DCT % CG_CUDA_WINDOW_STEPS,
                   f = cg_cuda_frequency(lane % CG_DCT), n_bands = m.n_bands[f],
                   pair_bands = n_bands > m.n_bands[f ^ 1] ? n_bands : m.n_bands[f ^ 1];
    bool is_there = false, is_own = false, is_large = false;
    cg_cuda_step step = {0, 0, 0, 0};
    if (s < m.n_steps) {
        step = steps[s];
        is_own = step.band < n_bands;
        is_there = tile_row < m.n_tile_rows && step.band < pair_bands &&
                   (step.is_rest == 0 || cg_cuda_has_rest(m, scratch, f, step.band, tile_row));
        is_large = is_there && is_own &&
                   scratch[m.large_at + m.tile_at[f] + step.band * m.n_tile_rows + tile_row] != 0;
    }
    const uint32_t there = cta.ballot(is_there), own = cta.ballot(is_own),
                   large = cta.ballot(is_large);
    if (lane % CG_DCT != 0)
        return;
    cg_cuda_window_step *const to = &shared->steps[s % (2 * CG_CUDA_WINDOW_STEPS)];
    to->marks[2 * row] = (uint8_t)(there >> lane);
    to->marks[2 * row + 1] = (uint8_t)(large >> lane);
    if (row == 0) {
        to->step = step;
        to->own = (uint8_t)(own >> lane);
    }
}

template <class Cta>
CG_LANE cg_cuda_window_step cg_cuda_load_step(Cta &cta, const cg_cuda_window_step *from)
{
    uint32_t words[4];
    cg_cuda_window_step step;
    cta.load_shared16(words, from);
    memcpy(&step, words, sizeof step);
    return step;
}

/* A stage's steps. */
CG_LANE const cg_cuda_window_step *cg_cuda_steps_from(const cg_cuda_klt_shared *shared,
                                                      uint32_t first_step)
{
    return &shared->steps[first_step % (2 * CG_CUDA_WINDOW_STEPS)];
}

/* A step's marks in one word: of a row of tiles, from bit 16 row on what is there, and from 8 bits
 * further on what is large. */
CG_LANE uint32_t cg_cuda_marks(const cg_cuda_window_step &of)
{
    uint32_t marks = 0;
    memcpy(&marks, of.marks, sizeof of.marks);
    return marks;
}

/* What a warp fetches: of each step the tile of digits of its row and of the place that its column
 * has the number of; and of every CG_CUDA_KLT_ROWS-th step its column's basis. Addresses are the
 * lane's. */
struct cg_cuda_sources {
    const uint8_t *digits; /* of band 0 */
    const uint8_t *basis;  /* of step 0 */
    uint32_t band_bytes;
};

/* A stage's place. */
CG_LANE cg_cuda_step_tiles *cg_cuda_stage(cg_cuda_klt_shared *shared, uint32_t first_step)
{
    return shared->stages[first_step / CG_CUDA_STAGE_STEPS % CG_CUDA_STAGES];
}

/* Starts to fetch what a stage's steps multiply, if there is such a stage. Its window is filled.
 * at: 16 times the thread's number. */
template <class Cta>
CG_LANE void cg_cuda_fetch_stage(Cta &cta, const cg_cuda_sources &from, uint32_t at,
                                 uint32_t first_step, uint32_t n_steps, cg_cuda_klt_shared *shared)
{
    static_assert((int)CG_CUDA_KLT_COLUMNS == (int)CG_DCT &&
                      (int)CG_CUDA_TILE_BYTES == 16 * (int)CG_RANS_LANES &&
                      CG_CUDA_STAGE_STEPS % CG_CUDA_KLT_ROWS == 0 && CG_CUDA_KLT_ROWS <= 2,
                  "a tile each");
    if (first_step < n_steps) {
        const uint32_t in_row = at % sizeof(cg_cuda_step_tiles::basis),
                       row = at / sizeof(cg_cuda_step_tiles::basis),
                       place = in_row / CG_CUDA_TILE_BYTES;
        const cg_cuda_window_step *const steps = cg_cuda_steps_from(shared, first_step);
        cg_cuda_step_tiles *const to = cg_cuda_stage(shared, first_step);
        CG_UNROLL
        for (uint32_t s = 0; s < CG_CUDA_STAGE_STEPS; s++) {
            const cg_cuda_window_step of = cg_cuda_load_step(cta, &steps[s]);
            const uint32_t marks = cg_cuda_marks(of);
            if (s % CG_CUDA_KLT_ROWS == row && (marks & 0x00ff00ffu) != 0)
                cta.copy16(to[s].basis[0] + in_row,
                           from.basis + (uint64_t)of.step.number * CG_CUDA_TILE_BYTES);
            if ((marks >> (16 * row + place) & 1) != 0)
                cta.copy16(to[s].digits[0][0] + at,
                           from.digits + (uint64_t)of.step.band * from.band_bytes,
                           (of.own >> place & 1) != 0);
        }
    }
    cta.end_copies(); /* else what is waited for would not be the same in all stages */
}

/* Bytes 1 and 3 of two words; bytes 0 and 2. */
CG_LANE uint32_t cg_cuda_odd_bytes(uint32_t first, uint32_t second)
{
#if defined(__CUDA_ARCH__)
    return __byte_perm(first, second, 0x7531);
#else
    return (first >> 8 & 0xff) | (first >> 16 & 0xff00) | (second << 8 & 0xff0000) |
           (second & 0xff000000);
#endif
}

CG_LANE uint32_t cg_cuda_even_bytes(uint32_t first, uint32_t second)
{
    return cg_cuda_odd_bytes(first << 8, second << 8);
}

/* Adds what digits of 8 bits, signed, at bit `shift` of the cells make of a frequency's sums. */
template <class Cta>
CG_LANE void cg_cuda_add_digits(Cta &cta, const uint32_t digits[4], uint32_t shift,
                                const uint32_t basis[2][4], uint32_t sums[2][2][4])
{
    CG_UNROLL
    for (uint32_t tile = 0; tile < 4; tile++) {
        uint32_t added[4] = {};
        cta.multiply(added, digits, basis[tile / 2] + 2 * (tile % 2));
        CG_UNROLL
        for (uint32_t i = 0; i < 4; i++)
            sums[tile / 2][tile % 2][i] += added[i] << shift;
    }
}

/* What the higher digits of a tile's cells add to the sums of its frequency. cells: the lane's, two
 * a word. A cell is its low digit and 256 times what rounding it to 256 leaves, which is -128 to
 * 128: a digit, and where it is 128 one more. */
template <class Cta>
CG_LANE void cg_cuda_add_large(Cta &cta, const uint8_t *cells, const uint32_t basis[2][4],
                               uint32_t sums[2][2][4])
{
    uint32_t words[8], digits[4], most[4], any = 0;
    cta.load16(words, cells);
    cta.load16(words + 4, cells + 16);
    CG_UNROLL
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t rounded[2], carry[2];
        CG_UNROLL
        for (uint32_t k = 0; k < 2; k++) { /* both halves plus 128, without a carry between them */
            const uint32_t w = words[2 * i + k];
            rounded[k] = ((w & 0x7fff7fffu) + 0x00800080u) ^ (w & 0x80008000u);
            carry[k] = (rounded[k] & ~w) >> 15 & 0x00010001u;
        }
        digits[i] = cg_cuda_odd_bytes(rounded[0], rounded[1]);
        most[i] = cg_cuda_even_bytes(carry[0], carry[1]);
        any |= most[i];
    }
    cg_cuda_add_digits(cta, digits, 8, basis, sums);
    if (cta.ballot(any != 0) != 0)
        cg_cuda_add_digits(cta, most, 16, basis, sums);
}

/* Stage 1 of the format, of a warp's frequencies and columns. digits: the lane's in the tiles. ALL:
 * all frequencies are there, as they nearly always are. */
template <bool ALL, class Cta>
CG_LANE void cg_cuda_add_tiles(Cta &cta, const uint8_t *digits, uint32_t there,
                               const uint32_t basis[2][4], cg_cuda_sums *sums)
{
    /* Tiles of zeros are multiplied: there are few, and to look costs more. */
    CG_UNROLL
    for (uint32_t pair = 0; pair < CG_CUDA_HALF; pair += 2) {
        if (!ALL && (there & 1u << pair) == 0)
            continue;
        CG_UNROLL
        for (uint32_t k = pair; k < pair + 2; k++) {
            uint32_t a[4];
            cta.load_shared16(a, digits + k * CG_CUDA_TILE_BYTES);
            CG_UNROLL
            for (uint32_t tile = 0; tile < 4; tile++)
                cta.multiply(sums->of[k][tile / 2][tile % 2], a, basis[tile / 2] + 2 * (tile % 2));
        }
    }
}

/* there, large: a bit for each of the warp's frequencies. first_place: of these. */
template <class Cta>
CG_LANE void cg_cuda_add_step(Cta &cta, const cg_cuda_product &m, const uint8_t *scratch,
                              const uint8_t *digits, uint32_t there, uint32_t large, uint32_t band,
                              uint32_t tile_row, uint32_t first_place, const uint32_t basis[2][4],
                              cg_cuda_sums *sums)
{
    if (there == CG_CUDA_ALL)
        cg_cuda_add_tiles<true>(cta, digits, there, basis, sums);
    else
        cg_cuda_add_tiles<false>(cta, digits, there, basis, sums);
    if (large == 0)
        return;
    const uint8_t *const cells =
        scratch + m.cells_at +
        2 * ((uint64_t)(band * m.n_tile_rows + tile_row) * CG_CUDA_TILE_BYTES + 16 * cta.lane());
    CG_UNROLL
    for (uint32_t k = 0; k < CG_CUDA_HALF; k++) {
        if ((large >> k & 1) != 0)
            cg_cuda_add_large(cta,
                              cells + (uint64_t)m.tile_at[cg_cuda_frequency(first_place + k)] * 2 *
                                          CG_CUDA_TILE_BYTES,
                              basis, sums->of[k]);
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

/* D' of a row: the constants of stage 2 times unit, each rounded once. They are seven numbers,
 * those of token 0, and their negatives, so that a lane holds no more. */
CG_LANE void cg_cuda_multiply_dct(float unit, float out[CG_DCT][CG_DCT])
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
                                  const cg_cuda_column_sums *sums)
{
    const uint8_t *blob = (const uint8_t *)params.blob_dev;
    const uint32_t column = cta.lane() % 4 * 2, pair = c.first_pair + column,
                   first_token = shared->rows[row_in_job].block * CG_DCT;
    float dct[CG_DCT][CG_DCT];
    cg_cuda_multiply_dct(m.unit * shared->rows[row_in_job].factor, dct);
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

/* The sums of a warp. All threads come here, for the barriers; a warp whose row is not there, or
 * none of whose columns is, only helps to fetch. tile: of the matrix, its own column's.
 * meanwhile(): what else a thread does before the first barrier. */
template <class Cta, class Meanwhile>
CG_LANE void cg_cuda_sum(Cta &cta, const cg_cuda_product &m, const cg_cuda_decode_params &params,
                         const cg_cuda_klt_job &job, uint32_t tile, cg_cuda_klt_shared *shared,
                         cg_cuda_sums *sums, Meanwhile meanwhile)
{
    const uint8_t *blob = (const uint8_t *)params.blob_dev,
                  *scratch = (const uint8_t *)params.scratch_dev;
    const cg_cuda_step *steps = (const cg_cuda_step *)(blob + m.steps_at);
    static_assert(CG_CUDA_WINDOW_STEPS % CG_CUDA_STAGE_STEPS == 0 && CG_CUDA_STAGES == 3 &&
                      CG_CUDA_WINDOW_STEPS >= CG_CUDA_STAGES * CG_CUDA_STAGE_STEPS,
                  "a window is filled a stage before it is needed");
    /* Of the thread: kept, since to ask for its number again takes long. */
    const uint32_t at = 16 * cta.thread(), lane_at = at % CG_CUDA_TILE_BYTES;
    const cg_cuda_warp warp = cg_cuda_find_warp(at / 16);
    const uint32_t n_steps = m.n_steps, row = warp.row, first_place = warp.half * CG_CUDA_HALF,
                   first_row = cg_cuda_first_row(job, row),
                   tile_row = first_row / CG_CUDA_TILE_BLOCKS;
    const bool works = first_row != CG_CUDA_NO_ROW && job.first_tile + warp.first < job.n_tiles;
    const cg_cuda_sources from = {
        scratch + m.digits_at + /* where there is no row, nothing is fetched */
            ((uint64_t)m.tile_at[cg_cuda_frequency(warp.column)] + tile_row) * CG_CUDA_TILE_BYTES +
            lane_at,
        blob + m.basis_at + /* where there is no tile any will do */
            (uint64_t)(job.first_tile + warp.column < job.n_tiles ? tile : 0) * m.n_all_steps *
                CG_CUDA_TILE_BYTES +
            lane_at,
        m.n_tile_rows * CG_CUDA_TILE_BYTES};
    uint32_t shift = n_steps > 0 ? steps[0].shift : 0;
    cg_cuda_fill_window(cta, m, scratch, steps, 0, tile_row, shared);
    meanwhile();
    cta.barrier();
    cg_cuda_fetch_stage(cta, from, at, 0, n_steps, shared);
    cg_cuda_fetch_stage(cta, from, at, CG_CUDA_STAGE_STEPS, n_steps, shared);
    for (uint32_t first = 0; first < n_steps; first += CG_CUDA_STAGE_STEPS) {
        const uint32_t next = first + 2 * CG_CUDA_STAGE_STEPS, behind = next + CG_CUDA_STAGE_STEPS;
        cta.wait_older_copies();
        cta.barrier(); /* this stage has come, and nobody reads the one before any more */
        cg_cuda_fetch_stage(cta, from, at, next, n_steps, shared);
        if (behind % CG_CUDA_WINDOW_STEPS == 0 && behind < n_steps)
            cg_cuda_fill_window(cta, m, scratch, steps, behind, tile_row, shared);
        if (!works)
            continue;
        const cg_cuda_window_step *const window = cg_cuda_steps_from(shared, first);
        const cg_cuda_step_tiles *const stage = cg_cuda_stage(shared, first);
        const uint8_t *const digits = stage->digits[row][first_place] + lane_at,
                             *const of_columns = stage->basis[warp.first] + lane_at;
        CG_UNROLL_NOT
        for (uint32_t s = 0; s < CG_CUDA_STAGE_STEPS; s++) {
            const cg_cuda_window_step of = cg_cuda_load_step(cta, &window[s]);
            const uint32_t marks = cg_cuda_marks(of) >> (16 * row + first_place),
                           there = marks & CG_CUDA_ALL;
            if (there == 0)
                continue;
            uint32_t basis[2][4];
            CG_UNROLL
            for (uint32_t i = 0; i < 2; i++)
                cta.load_shared16(basis[i], of_columns + s * sizeof(cg_cuda_step_tiles) +
                                                i * CG_CUDA_NEXT_COLUMN * CG_CUDA_TILE_BYTES);
            if (of.step.shift != shift)
                cg_cuda_shift_sums(sums, shift - of.step.shift);
            shift = of.step.shift;
            cg_cuda_add_step(cta, m, scratch, digits + s * sizeof(cg_cuda_step_tiles), there,
                             marks >> 8 & CG_CUDA_ALL, of.step.band, tile_row, first_place, basis,
                             sums);
        }
    }
    cg_cuda_shift_sums(sums, shift);
}

/* The sums of a warp's column: gives the other column's away for those of the other half of
 * frequencies. All threads come here. */
template <class Cta>
CG_LANE void cg_cuda_exchange(Cta &cta, const cg_cuda_warp &warp, const cg_cuda_sums *sums,
                              cg_cuda_klt_shared *shared, cg_cuda_column_sums *out)
{
    const uint32_t lane = cta.lane();
    cta.barrier(); /* nobody reads a stage any more, which lies there */
    CG_UNROLL
    for (uint32_t i = 0; i < 2 * CG_CUDA_HALF; i++) {
        const uint32_t(*const both)[2][4] = sums->of[i / 2];
        uint32_t given[4];
        CG_UNROLL
        for (uint32_t n = 0; n < 4; n++)
            given[n] = warp.half == 0 ? both[1][i % 2][n] : both[0][i % 2][n];
        cta.store_shared16(shared->sums[warp.row][warp.column][i / 2][i % 2][lane], given);
    }
    cta.barrier();
    CG_UNROLL
    for (uint32_t i = 0; i < 2 * CG_CUDA_HALF; i++) {
        const uint32_t k = i / 2, is_high = i % 2, first = cg_cuda_frequency(k),
                       second = cg_cuda_frequency(CG_CUDA_HALF + k);
        uint32_t other[4];
        cta.load_shared16(
            other, shared->sums[warp.row][warp.column ^ CG_CUDA_NEXT_COLUMN][k][is_high][lane]);
        CG_UNROLL
        for (uint32_t n = 0; n < 4; n++) {
            out->of[first][is_high][n] = warp.half == 0 ? sums->of[k][0][is_high][n] : other[n];
            out->of[second][is_high][n] = warp.half == 0 ? other[n] : sums->of[k][1][is_high][n];
        }
    }
}

/* Both rows of the lane. */
template <uint32_t DTYPE, class Cta>
CG_LANE void cg_cuda_finish(Cta &cta, const cg_cuda_klt &m, const cg_cuda_decode_params &params,
                            const cg_cuda_klt_shared *shared, const cg_cuda_warp &warp,
                            cg_cuda_column_sums *sums)
{
    CG_UNROLL_NOT /* both at once take too many registers */
        for (uint32_t row_half = 0; row_half < 2; row_half++)
    {
        cg_cuda_finish_block<DTYPE>(cta, m, params, shared->columns[warp.column], shared,
                                    warp.row * CG_CUDA_TILE_BLOCKS + cta.lane() / 4 * 2 + row_half,
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
        const uint32_t in_job = i / CG_DCT,
                       first_row = cg_cuda_first_row(job, in_job / CG_CUDA_TILE_BLOCKS),
                       row = first_row + in_job % CG_CUDA_TILE_BLOCKS;
        const bool is_there = first_row != CG_CUDA_NO_ROW && row < m.product.n_rows;
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
    const cg_cuda_warp warp = cg_cuda_find_warp(cta.thread());
    cg_cuda_sums sums = {};
    cg_cuda_column_sums column_sums;
    cg_cuda_sum(cta, m.product, params, job,
                cg_cuda_find_columns(m, job.first_tile + warp.column).tile, shared, &sums,
                [&] { cg_cuda_find_places(cta, m, params, job, shared); });
    cg_cuda_exchange(cta, warp, &sums, shared, &column_sums);
    if (cg_cuda_first_row(job, warp.row) == CG_CUDA_NO_ROW ||
        job.first_tile + warp.column >= job.n_tiles)
        return;
    if (m.target.dtype == CG_DTYPE_BF16)
        cg_cuda_finish<CG_DTYPE_BF16>(cta, m, params, shared, warp, &column_sums);
    else
        cg_cuda_finish<0>(cta, m, params, shared, warp, &column_sums);
}

/* Zeros, and stage 4's cosines and sines: a thread each, for all tables, tokens and pairs. */
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
