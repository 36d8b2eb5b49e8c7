/* cuda/project.cuh - the bodies of the kernels of cuda/project.h.
 *
 * In the first kernel a thread makes the spectra of a pair of channels of a row: two that are
 * rotated together, or would be if all were. In the kernels that make sums, a thread block makes
 * CG_CUDA_PROJECT_ROWS by CG_CUDA_PROJECT_COLUMNS of them, of one frequency, and a thread 4 by 4.
 * The terms pass through shared memory, CG_CUDA_PROJECT_DEPTH at a time. In the last kernel a
 * thread makes one column, of symbols or of coefficients that the encoder wants as they are.
 */
#ifndef CG_CUDA_PROJECT_CUH
#define CG_CUDA_PROJECT_CUH
#include "codec/dct8.h"
#include "codec/exact_lane.h"
#include "cuda/elements.cuh"
#include "cuda/project.h"
#include <math.h>

/* Who launches the kernels asks some of it, too. */
#if defined(__CUDACC__)
#define CG_CUDA_LANE_AND_HOST static inline __host__ __device__
#else
#define CG_CUDA_LANE_AND_HOST static inline
#endif

/* The kernels, in the order in which they run. */
enum {
    CG_CUDA_PROJECT_SPECTRA,
    CG_CUDA_PROJECT_EXACT,  /* coefficients of the first n_exact components */
    CG_CUDA_PROJECT_REMOVE, /* what these make of the rows is taken off */
    CG_CUDA_PROJECT_OTHERS, /* coefficients of the others */
    CG_CUDA_PROJECT_SYMBOLS,
    CG_CUDA_N_PROJECT_STEPS
};

/* Behind each line is a gap, so that neighbouring lanes write to different banks of shared memory.
 */
struct cg_cuda_project_shared {
    float rows[CG_CUDA_PROJECT_DEPTH][CG_CUDA_PROJECT_ROWS + 4];
    float columns[CG_CUDA_PROJECT_DEPTH][CG_CUDA_PROJECT_COLUMNS + 4];
};

/* Columns of a frequency that a step of sums makes: components, or channels, from first to end. */
struct cg_cuda_project_range {
    uint32_t first, end;
};

CG_CUDA_LANE_AND_HOST cg_cuda_project_range cg_cuda_project_columns(const cg_cuda_projection &p,
                                                                    uint32_t step, uint32_t f)
{
    const uint32_t n = p.n_components[f];
    if (step == CG_CUDA_PROJECT_EXACT)
        return {0, n < p.n_exact ? n : p.n_exact};
    if (n <= p.n_exact)
        return {0, 0};
    if (step == CG_CUDA_PROJECT_REMOVE)
        return {0, p.n_exact > 0 ? p.row_stride : 0};
    return {p.n_exact, n};
}

/* Columns of symbols of a frequency. The last step makes n_given columns of coefficients, then
 * these. */
CG_CUDA_LANE_AND_HOST uint32_t cg_cuda_project_cells(const cg_cuda_projection &p, uint32_t f)
{
    return p.n_components[f] > p.n_shared ? p.n_components[f] - p.n_shared : 0;
}

CG_CUDA_LANE_AND_HOST uint32_t cg_cuda_quantize_tiles(const cg_cuda_projection &p, uint32_t f)
{
    return (p.n_given[f] + cg_cuda_project_cells(p, f) + CG_CUDA_PROJECT_THREADS - 1) /
           CG_CUDA_PROJECT_THREADS;
}

CG_CUDA_LANE_AND_HOST uint32_t cg_cuda_project_tiles(const cg_cuda_projection &p, uint32_t step,
                                                     uint32_t f)
{
    const cg_cuda_project_range range = cg_cuda_project_columns(p, step, f);
    return (p.n_rows + CG_CUDA_PROJECT_ROWS - 1) / CG_CUDA_PROJECT_ROWS *
           ((range.end - range.first + CG_CUDA_PROJECT_COLUMNS - 1) / CG_CUDA_PROJECT_COLUMNS);
}

CG_CUDA_LANE_AND_HOST uint32_t cg_cuda_project_blocks(const cg_cuda_projection &p, uint32_t step)
{
    uint32_t n = 0;
    if (step == CG_CUDA_PROJECT_SPECTRA)
        return p.spectra.elements_dev != NULL
                   ? (p.n_rows * (p.row_stride / 2) + CG_CUDA_PROJECT_THREADS - 1) /
                         CG_CUDA_PROJECT_THREADS
                   : 0;
    for (uint32_t f = 0; f < CG_DCT; f++)
        n += step == CG_CUDA_PROJECT_SYMBOLS ? cg_cuda_quantize_tiles(p, f)
                                             : cg_cuda_project_tiles(p, step, f);
    return n;
}

/* Tokens that are not coded become the mean of those that are; without any, 0. */
CG_LANE void cg_cuda_fill_tokens(cg_lane_coded_tokens coded, float x[CG_DCT])
{
    const uint32_t n = coded.end - coded.first;
    float mean = 0;
    CG_UNROLL
    for (uint32_t t = 0; t < CG_DCT; t++)
        mean += t >= coded.first && t < coded.end ? x[t] : 0;
    mean = n > 0 ? mean / (float)n : 0;
    CG_UNROLL
    for (uint32_t t = 0; t < CG_DCT; t++)
        x[t] = t >= coded.first && t < coded.end ? x[t] : mean;
}

/* A channel's row of each frequency; x: its tokens. */
CG_LANE void cg_cuda_store_spectrum(const cg_cuda_projection &p, uint32_t row, uint32_t channel,
                                    const float x[CG_DCT])
{
    float y[CG_DCT];
    cg_lane_forward_dct(DCT8, x, y);
    CG_UNROLL
    for (uint32_t f = 0; f < CG_DCT; f++) {
        if (p.n_components[f] > 0) /* else nobody reads it */
            p.rows_dev[((uint64_t)f * p.n_rows + row) * p.row_stride + channel] = y[f];
    }
}

/* The place of pair `pair` of a head of head_dim channels, of which the first 2 half are rotated:
 * of its low channel, and how far behind that the high one is. */
CG_LANE void cg_cuda_find_pair(uint32_t pair, uint32_t head_dim, uint32_t half, uint32_t *low,
                               uint32_t *gap)
{
    *low = pair < half ? pair : pair + half;
    *gap = pair < half ? half : head_dim / 2 - half;
}

template <class Cta> CG_LANE void cg_cuda_spectra_block(Cta &cta, const cg_cuda_projection &p)
{
    const cg_cuda_spectra &s = p.spectra;
    const uint32_t i = cta.block() * CG_CUDA_PROJECT_THREADS + cta.thread(),
                   row_pairs = p.row_stride / 2, row = i / row_pairs, pair = i % row_pairs,
                   head_pairs = s.head_dim / 2, slice_pairs = s.n_kv_heads * head_pairs,
                   slice = pair / slice_pairs, head = pair % slice_pairs / head_pairs;
    if (row >= p.n_rows)
        return;
    float x[2][CG_DCT] = {};
    if (slice >= s.n_slices) { /* behind the channels rows have zeros */
        cg_cuda_store_spectrum(p, row, 2 * pair, x[0]);
        cg_cuda_store_spectrum(p, row, 2 * pair + 1, x[1]);
        return;
    }
    const uint32_t layer = s.first_layer + slice % s.n_layers,
                   plane = s.first_plane + slice / s.n_layers, channels = s.n_kv_heads * s.head_dim,
                   in_head = pair % head_pairs, half = plane == CG_K ? s.half : 0;
    uint32_t low, gap;
    cg_cuda_find_pair(in_head, s.head_dim, half, &low, &gap);
    low += head * s.head_dim;
    const float *mean = s.mean_dev + ((uint64_t)layer * CG_N_PLANES + plane) * channels + low,
                *weight = s.weight_dev + ((uint64_t)layer * CG_N_PLANES + plane) * channels + low;
    const cg_cuda_place place = s.places_dev[row];
    const cg_lane_coded_tokens coded =
        cg_lane_find_coded(place.block, s.first_position, s.n_tokens, s.n_sinks);
    const double inv_freq =
        in_head < half ? s.inv_freq_dev[s.layer_rope_dev[layer] * s.half + in_head] : 0;
    CG_UNROLL
    for (uint32_t t = 0; t < CG_DCT; t++) {
        if (t < coded.first || t >= coded.end)
            continue;
        const uint32_t token = CG_DCT * place.block + t;
        const uint64_t at = ((uint64_t)slice * s.n_tokens + token) * channels + low;
        x[0][t] = cg_cuda_load(s.dtype, s.elements_dev, at);
        x[1][t] = cg_cuda_load(s.dtype, s.elements_dev, at + gap);
        if (in_head < half) {
            float cosine, sine;
            cg_lane_rotation((double)(s.first_position + token), inv_freq, &cosine, &sine);
            cg_lane_unrotate(&x[0][t], &x[1][t], cosine, sine);
        }
        x[0][t] = (x[0][t] - mean[0]) * weight[0] * place.factor;
        x[1][t] = (x[1][t] - mean[gap]) * weight[gap] * place.factor;
    }
    CG_UNROLL
    for (uint32_t k = 0; k < 2; k++) {
        cg_cuda_fill_tokens(coded, x[k]);
        cg_cuda_store_spectrum(p, row, slice * channels + low + k * gap, x[k]);
    }
}

/* The part that a thread block makes. */
struct cg_cuda_project_tile {
    float *rows;  /* the frequency's */
    float *coefs; /* the frequency's */
    uint32_t n_components;
    uint32_t first_row, first_column, end_column;
};

CG_LANE cg_cuda_project_tile cg_cuda_find_tile(const cg_cuda_projection &p, uint32_t step,
                                               uint32_t block)
{
    const uint32_t n_down = (p.n_rows + CG_CUDA_PROJECT_ROWS - 1) / CG_CUDA_PROJECT_ROWS;
    cg_cuda_project_tile tile = {p.rows_dev, p.coefs_dev, 0, 0, 0, 0};
    for (uint32_t f = 0;; f++) {
        const uint32_t n_tiles = cg_cuda_project_tiles(p, step, f);
        if (block < n_tiles) {
            const cg_cuda_project_range range = cg_cuda_project_columns(p, step, f);
            tile.n_components = p.n_components[f];
            tile.first_row = block % n_down * CG_CUDA_PROJECT_ROWS;
            tile.first_column = range.first + block / n_down * CG_CUDA_PROJECT_COLUMNS;
            tile.end_column = range.end;
            return tile;
        }
        block -= n_tiles;
        tile.rows += (uint64_t)p.n_rows * p.row_stride;
        tile.coefs += (uint64_t)p.n_rows * p.n_components[f];
    }
}

CG_LANE void cg_cuda_unpack(const uint32_t words[4], float out[8])
{
    CG_UNROLL
    for (int i = 0; i < 4; i++) {
        out[2 * i] = (float)(int16_t)(words[i] & 0xffffu);
        out[2 * i + 1] = (float)(int16_t)(words[i] >> 16);
    }
}

/* Rows from channel at on, and the components' elements of them. */
template <class Cta>
CG_LANE void cg_cuda_fetch_channels(Cta &cta, const cg_cuda_projection &p,
                                    const cg_cuda_project_tile &tile, uint32_t at,
                                    cg_cuda_project_shared *shared)
{
    const uint32_t t = cta.thread(), r = t % CG_CUDA_PROJECT_ROWS,
                   depth = t / CG_CUDA_PROJECT_ROWS * 8, c = t % CG_CUDA_PROJECT_COLUMNS,
                   half = t / CG_CUDA_PROJECT_COLUMNS * 16;
    const bool has_row = tile.first_row + r < p.n_rows,
               has_column = tile.first_column + c < tile.end_column;
    const float *row = tile.rows + (uint64_t)(tile.first_row + r) * p.row_stride + at + depth;
    const int16_t *elements =
        p.elements_dev + (uint64_t)(tile.first_column + c) * p.row_stride + at + half;
    CG_UNROLL
    for (uint32_t i = 0; i < 8; i += 4) {
        uint32_t words[4] = {0, 0, 0, 0};
        if (has_row)
            cta.load16(words, row + i);
        CG_UNROLL
        for (uint32_t k = 0; k < 4; k++)
            shared->rows[depth + i + k][r] = cg_f32_from_bits(words[k]);
    }
    CG_UNROLL
    for (uint32_t i = 0; i < 16; i += 8) {
        uint32_t words[4] = {0, 0, 0, 0};
        float values[8];
        if (has_column)
            cta.load16(words, elements + i);
        cg_cuda_unpack(words, values);
        CG_UNROLL
        for (uint32_t k = 0; k < 8; k++)
            shared->columns[half + i + k][c] = values[k];
    }
}

/* Coefficients from component at on, and these components' elements in the tile's channels. */
template <class Cta>
CG_LANE void cg_cuda_fetch_components(Cta &cta, const cg_cuda_projection &p,
                                      const cg_cuda_project_tile &tile, uint32_t at,
                                      cg_cuda_project_shared *shared)
{
    const uint32_t t = cta.thread(), r = t % CG_CUDA_PROJECT_ROWS,
                   depth = t / CG_CUDA_PROJECT_ROWS * 8, k = t / 4, part = t % 4 * 16;
    const bool has_row = tile.first_row + r < p.n_rows;
    const float *coefs = tile.coefs + (uint64_t)(tile.first_row + r) * tile.n_components + at;
    CG_UNROLL
    for (uint32_t i = depth; i < depth + 8; i++)
        shared->rows[i][r] = has_row && at + i < p.n_exact ? coefs[i] : 0;
    const float scale = at + k < p.n_exact ? p.scale_dev[at + k] : 0;
    const int16_t *elements =
        p.elements_dev + (uint64_t)(at + k) * p.row_stride + tile.first_column + part;
    CG_UNROLL
    for (uint32_t i = 0; i < 16; i += 8) {
        uint32_t words[4] = {0, 0, 0, 0};
        float values[8];
        if (at + k < p.n_exact && tile.first_column + part + i < tile.end_column)
            cta.load16(words, elements + i);
        cg_cuda_unpack(words, values);
        CG_UNROLL
        for (uint32_t j = 0; j < 8; j++)
            shared->columns[k][part + i + j] = scale * values[j];
    }
}

CG_LANE void cg_cuda_add_products(const float a[4], const float b[4], float sums[4][4])
{
    CG_UNROLL
    for (int i = 0; i < 4; i++) {
        CG_UNROLL
        for (int j = 0; j < 4; j++)
            sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
    }
}

/* What a thread's sums become. */
template <bool REMOVES>
CG_LANE void cg_cuda_store_sums(const cg_cuda_projection &p, const cg_cuda_project_tile &tile,
                                uint32_t row, uint32_t column, const float sums[4][4])
{
    CG_UNROLL
    for (uint32_t i = 0; i < 4; i++) {
        CG_UNROLL
        for (uint32_t j = 0; j < 4; j++) {
            const uint32_t r = tile.first_row + row + i, c = tile.first_column + column + j;
            if (r >= p.n_rows || c >= tile.end_column)
                continue;
            if (REMOVES)
                tile.rows[(uint64_t)r * p.row_stride + c] -= sums[i][j];
            else
                tile.coefs[(uint64_t)r * tile.n_components + c] = sums[i][j] * p.scale_dev[c];
        }
    }
}

template <bool REMOVES, class Cta>
CG_LANE void cg_cuda_project_block(Cta &cta, const cg_cuda_projection &p, uint32_t step)
{
    cg_cuda_project_shared *shared = (cg_cuda_project_shared *)cta.shared();
    const cg_cuda_project_tile tile = cg_cuda_find_tile(p, step, cta.block());
    const uint32_t row = cta.thread() / 16 * 4, column = cta.thread() % 16 * 4,
                   depth = REMOVES ? p.n_exact : p.row_stride;
    const bool has_work =
        tile.first_row + row < p.n_rows && tile.first_column + column < tile.end_column;
    float sums[4][4] = {};
    for (uint32_t at = 0; at < depth; at += CG_CUDA_PROJECT_DEPTH) {
        if (REMOVES)
            cg_cuda_fetch_components(cta, p, tile, at, shared);
        else
            cg_cuda_fetch_channels(cta, p, tile, at, shared);
        cta.barrier();
        CG_UNROLL
        for (uint32_t k = 0; k < CG_CUDA_PROJECT_DEPTH && has_work; k++) {
            uint32_t bits[2][4];
            float a[4], b[4];
            cta.load_shared16(bits[0], &shared->rows[k][row]);
            cta.load_shared16(bits[1], &shared->columns[k][column]);
            CG_UNROLL
            for (int i = 0; i < 4; i++) {
                a[i] = cg_f32_from_bits(bits[0][i]);
                b[i] = cg_f32_from_bits(bits[1][i]);
            }
            cg_cuda_add_products(a, b, sums);
        }
        cta.barrier(); /* before the next piece comes in their place */
    }
    cg_cuda_store_sums<REMOVES>(p, tile, row, column, sums);
}

/* A column of coefficients as they are. */
CG_LANE void cg_cuda_give_column(const float *coefs, uint32_t n_rows, uint32_t coefs_stride,
                                 uint32_t given_stride, float *given)
{
    for (uint32_t r = 0; r < n_rows; r++)
        given[(uint64_t)r * given_stride] = coefs[(uint64_t)r * coefs_stride];
}

/* Symbols of a column of coefficients; returns its residue. */
CG_LANE float cg_cuda_quantize_column(const float *coefs, uint32_t n_rows, float step,
                                      uint32_t coefs_stride, uint32_t cells_stride, int16_t *cells)
{
    const float inv_step = 1.0f / step;
    float residue = 0;
    for (uint32_t first = 0; first < n_rows; first += CG_CUDA_QUANTIZE_ROWS) {
        float some[CG_CUDA_QUANTIZE_ROWS]; /* all are on their way before the first is used */
        const uint32_t left = n_rows - first;
        const float *from = coefs + (uint64_t)first * coefs_stride;
        int16_t *to = cells + (uint64_t)first * cells_stride;
        CG_UNROLL
        for (uint32_t i = 0; i < CG_CUDA_QUANTIZE_ROWS; i++)
            some[i] = i < left ? from[(uint64_t)i * coefs_stride] : 0;
        CG_UNROLL
        for (uint32_t i = 0; i < CG_CUDA_QUANTIZE_ROWS; i++) {
            const int32_t cell = cg_lane_quantize(some[i] * inv_step);
            residue += cg_lane_row_sign(first + i) * fmaf(-(float)cell, step, some[i]);
            if (i < left)
                to[(uint64_t)i * cells_stride] = (int16_t)cell;
        }
    }
    return residue;
}

/* A thread block's columns: given coefficients, then symbols and their residues. */
template <class Cta> CG_LANE void cg_cuda_quantize_block(Cta &cta, const cg_cuda_projection &p)
{
    uint32_t block = cta.block(), f = 0;
    const float *coefs = p.coefs_dev;
    float *given = p.given_dev, *residues = p.residues_dev;
    int16_t *cells = p.cells_dev;
    for (;; f++) {
        const uint32_t n_tiles = cg_cuda_quantize_tiles(p, f),
                       n_cells = cg_cuda_project_cells(p, f), n_given = p.n_given[f];
        if (block < n_tiles) {
            const uint32_t c = block * CG_CUDA_PROJECT_THREADS + cta.thread(),
                           n = p.n_components[f];
            if (c < n_given)
                cg_cuda_give_column(coefs + c, p.n_rows, n, n_given, given + c);
            else if (c < n_given + n_cells)
                residues[c - n_given] =
                    cg_cuda_quantize_column(coefs + p.n_shared + (c - n_given), p.n_rows, p.step, n,
                                            n_cells, cells + (c - n_given));
            return;
        }
        block -= n_tiles;
        coefs += (uint64_t)p.n_rows * p.n_components[f];
        given += (uint64_t)p.n_rows * p.n_given[f];
        cells += (uint64_t)p.n_rows * n_cells;
        residues += n_cells;
    }
}
#endif
