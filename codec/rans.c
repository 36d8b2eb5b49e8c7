#include "codec/rans.h"

#include "codec/cursor.h"
#include "codec/kernels.h"
#include "codec/rans_kernels.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

static const uint32_t STATE_LOW = 1u << 16;

/* ---- classes ---- */

static cg_status class_init(cg_rans_class *cls, unsigned shift, unsigned n_symbols, const uint16_t *freq)
{
    uint32_t sum = 0;
    if (shift > CG_RANS_MAX_SHIFT || n_symbols < 2 || n_symbols > CG_RANS_MAX_SYMBOLS)
        return CG_ERR_CORRUPT;
    memset(cls, 0, sizeof *cls);
    cls->shift = (uint8_t)shift;
    cls->n_symbols = (uint8_t)n_symbols;
    for (unsigned i = 0; i < n_symbols; i++) {
        if (freq[i] == 0)
            return CG_ERR_CORRUPT;
        cls->freq[i] = freq[i];
        cls->cum[i] = (uint16_t)sum;
        cls->packed[i] = freq[i] | sum << 16;
        cls->cost[i] = (uint16_t)lrintf(256.0f * (CG_RANS_SCALE_BITS - log2f(freq[i])));
        sum += freq[i];
        if (sum > CG_RANS_SCALE)
            return CG_ERR_CORRUPT;
    }
    if (sum != CG_RANS_SCALE)
        return CG_ERR_CORRUPT;
    cls->cum[n_symbols] = CG_RANS_SCALE;
    for (unsigned slot = 0, i = 0; slot < CG_RANS_SCALE; slot += 1u << CG_RANS_BUCKET_SHIFT) {
        while (slot >= cls->cum[i + 1])
            i++;
        cls->first[slot >> CG_RANS_BUCKET_SHIFT] = (uint8_t)i;
        cls->bucket[slot >> CG_RANS_BUCKET_SHIFT] = cls->packed[i];
    }
    return CG_OK;
}

cg_status cg_rans_class_init_signed(cg_rans_class *cls, unsigned shift, unsigned n_symbols, const uint16_t *freq)
{
    const cg_status status = n_symbols % 2 == 0 ? class_init(cls, shift, n_symbols, freq) : CG_ERR_CORRUPT;
    if (status != CG_OK)
        return status;
    cls->escape_bits = 5;
    for (int i = 0; i < (int)n_symbols - 1; i++)
        cls->value[i] = (int16_t)(i % 2 ? (i + 1) / 2 : -i / 2);
    return CG_OK;
}

cg_status cg_rans_class_init_exponents(cg_rans_class *cls, unsigned shift, unsigned top, unsigned n_symbols,
                                       const uint16_t *freq)
{
    if (n_symbols < 2 || top + 2 < n_symbols || top > 255) /* the last but one index is top - (n_symbols - 2) >= 0 */
        return CG_ERR_CORRUPT;
    const cg_status status = class_init(cls, shift, n_symbols, freq);
    if (status != CG_OK)
        return status;
    cls->escape_bits = 8;
    cls->top = (uint8_t)top;
    for (unsigned i = 0; i < n_symbols - 1; i++)
        cls->value[i] = (int16_t)(top - i);
    return CG_OK;
}

void cg_rans_normalize(const uint32_t *counts, unsigned n_symbols, uint16_t *freq_out)
{
    uint64_t total = 0;
    uint32_t sum = 0;
    unsigned largest = 0;
    for (unsigned i = 0; i < n_symbols; i++)
        total += counts[i];
    for (unsigned i = 0; i < n_symbols; i++) {
        const uint64_t share = total > 0 ? ((uint64_t)counts[i] * (CG_RANS_SCALE - n_symbols)) / total : 0;
        freq_out[i] = (uint16_t)(share + 1);
        sum += freq_out[i];
        if (freq_out[i] > freq_out[largest])
            largest = i;
    }
    freq_out[largest] = (uint16_t)(freq_out[largest] + CG_RANS_SCALE - sum); /* rounding down leaves sum <= CG_RANS_SCALE */
}

/* ---- what a cell is coded as ---- */

typedef struct coded_cell {
    uint32_t index;
    uint32_t escape_raw;  /* phase B */
    uint32_t extra_bits;  /* phase C: 0 = none */
    uint32_t extra_raw;
    uint32_t shift_raw;   /* phase D */
    bool is_escape;
} coded_cell;

static coded_cell code_cell(const cg_rans_class *cls, int cell)
{
    coded_cell c = {0};
    const int v = cell >> cls->shift; /* arithmetic: floor */
    c.shift_raw = (uint32_t)cell & ((1u << cls->shift) - 1);
    const unsigned escape = cls->n_symbols - 1u;
    if (cls->escape_bits == 8) {
        const int i = cls->top - v;
        c.is_escape = i < 0 || i >= (int)escape;
        c.index = c.is_escape ? escape : (uint32_t)i;
        c.escape_raw = (uint32_t)v;
        return c;
    }
    const uint32_t magnitude = (uint32_t)(v < 0 ? -v : v), largest = (cls->n_symbols - 2u) / 2;
    if (magnitude <= largest) {
        c.index = v > 0 ? 2 * magnitude - 1 : 2 * magnitude;
        return c;
    }
    const uint32_t m = magnitude - largest; /* 1 ... 32768 */
    c.is_escape = true;
    c.index = escape;
    c.extra_bits = 31u - (uint32_t)__builtin_clz(m);
    c.extra_raw = m - (1u << c.extra_bits);
    c.escape_raw = c.extra_bits | (v < 0 ? 16u : 0u);
    return c;
}

/* ---- encoding ---- */

size_t cg_rans_bound_bytes(const cg_rans_strip *strips, size_t n_strips, size_t n_rows, size_t n_streams)
{
    size_t n_lanes = 0;
    for (size_t i = 0; i < n_strips; i++)
        n_lanes += strips[i].n_lanes;
    return 4 + n_streams * CG_RANS_STREAM_BYTES + n_lanes * n_rows * CG_RANS_CELL_BYTES;
}

uint64_t cg_rans_estimate_bits(const cg_rans_class *classes, const cg_rans_strip *strips, size_t n_strips,
                               size_t n_rows)
{
    uint64_t cost = 0;
    for (size_t s = 0; s < n_strips; s++) {
        for (size_t row = 0; row < n_rows; row++) {
            const int16_t *cells = strips[s].cells + row * strips[s].row_stride;
            for (uint32_t lane = 0; lane < strips[s].n_lanes; lane++) {
                const cg_rans_class *cls = &classes[strips[s].lane_class[lane]];
                const coded_cell c = code_cell(cls, cells[lane]);
                cost += cls->cost[c.index] + 256u * cls->shift;
                if (c.is_escape)
                    cost += 256u * (cls->escape_bits + c.extra_bits);
            }
        }
    }
    return cost / 256;
}

size_t cg_rans_choose_streams(uint64_t estimated_bits, size_t n_strips)
{
    const uint64_t affordable = estimated_bits / 8 / (50 * CG_RANS_STREAM_BYTES);
    const uint64_t most = n_strips < CG_RANS_MAX_STREAMS ? n_strips : CG_RANS_MAX_STREAMS;
    if (n_strips == 0)
        return 0;
    return (size_t)(affordable < 1 ? 1 : affordable > most ? most : affordable);
}

static inline void put_raw(uint32_t *state, uint8_t **at, uint32_t value, unsigned n_bits)
{
    if ((uint64_t)*state >= (uint64_t)1 << (32 - n_bits)) {
        *at -= 2;
        cg_store_le(*at, 2, *state);
        *state >>= 16;
    }
    *state = *state << n_bits | value;
}

static inline void put_symbol(uint32_t *state, uint8_t **at, uint32_t freq, uint32_t cum)
{
    if ((uint64_t)*state >= (uint64_t)freq << (32 - CG_RANS_SCALE_BITS)) {
        *at -= 2;
        cg_store_le(*at, 2, *state);
        *state >>= 16;
    }
    *state = (*state / freq << CG_RANS_SCALE_BITS) + *state % freq + cum;
}

/* The decoder's phases A, B, C, D of a row, lanes 0 to 31 in each: here everything the other way round. */
static void put_row(const cg_rans_class *classes, const cg_rans_strip *strip, const int16_t *cells,
                    uint32_t states[CG_RANS_LANES], uint8_t **at)
{
    coded_cell coded[CG_RANS_LANES];
    const cg_rans_class *cls[CG_RANS_LANES];
    bool any_escape = false, any_shift = false;
    for (uint32_t lane = 0; lane < strip->n_lanes; lane++) {
        cls[lane] = &classes[strip->lane_class[lane]];
        coded[lane] = code_cell(cls[lane], cells[lane]);
        any_escape |= coded[lane].is_escape;
        any_shift |= cls[lane]->shift > 0;
    }
    if (any_shift) {
        for (uint32_t lane = strip->n_lanes; lane-- > 0;) {
            if (cls[lane]->shift > 0)
                put_raw(&states[lane], at, coded[lane].shift_raw, cls[lane]->shift);
        }
    }
    if (any_escape) {
        for (uint32_t lane = strip->n_lanes; lane-- > 0;) {
            if (coded[lane].extra_bits > 0)
                put_raw(&states[lane], at, coded[lane].extra_raw, coded[lane].extra_bits);
        }
        for (uint32_t lane = strip->n_lanes; lane-- > 0;) {
            if (coded[lane].is_escape)
                put_raw(&states[lane], at, coded[lane].escape_raw, cls[lane]->escape_bits);
        }
    }
    for (uint32_t lane = strip->n_lanes; lane-- > 0;)
        put_symbol(&states[lane], at, cls[lane]->freq[coded[lane].index], cls[lane]->cum[coded[lane].index]);
}

size_t cg_rans_encode(const cg_rans_class *classes, const cg_rans_strip *strips, size_t n_strips, size_t n_rows,
                      size_t n_streams, uint8_t *dst, size_t dst_bytes, uint8_t *scratch_words)
{
    const size_t bound_bytes = cg_rans_bound_bytes(strips, n_strips, n_rows, n_streams);
    if (dst_bytes < bound_bytes || n_streams > n_strips || (n_streams == 0 && n_strips > 0))
        return 0;
    uint8_t *out = dst + 4 + 4 * n_streams;
    cg_store_le(dst, 2, n_streams);
    cg_store_le(dst + 2, 2, 0);
    for (size_t s = 0; s < n_streams; s++) {
        uint32_t states[CG_RANS_LANES];
        uint8_t *const end = scratch_words + bound_bytes, *at = end;
        for (unsigned lane = 0; lane < CG_RANS_LANES; lane++)
            states[lane] = STATE_LOW;
        for (size_t i = s + (n_strips - 1 - s) / n_streams * n_streams;; i -= n_streams) {
            for (size_t row = n_rows; row-- > 0;)
                put_row(classes, &strips[i], strips[i].cells + row * strips[i].row_stride, states, &at);
            if (i == s)
                break;
        }
        for (unsigned lane = 0; lane < CG_RANS_LANES; lane++, out += 4)
            cg_store_le(out, 4, states[lane]);
        memcpy(out, at, (size_t)(end - at));
        out += end - at;
        cg_store_le(dst + 4 + 4 * s, 4, 4 * CG_RANS_LANES + (size_t)(end - at));
    }
    return (size_t)(out - dst);
}

/* ---- decoding ---- */

cg_status cg_rans_decode(const cg_rans_class *classes, const cg_rans_strip *strips, size_t n_strips, size_t n_rows,
                         const uint8_t *src, size_t src_bytes, size_t *used_bytes_out)
{
    cg_cursor in = {src, src_bytes};
    const uint8_t *table;
    uint16_t n_streams, reserved;
    if (!cg_cursor_u16(&in, &n_streams) || !cg_cursor_u16(&in, &reserved) ||
        !cg_cursor_bytes(&in, 4 * (size_t)n_streams, &table))
        return CG_ERR_TRUNCATED;
    if (reserved != 0 || n_streams > n_strips || (n_streams == 0 && n_strips > 0))
        return CG_ERR_CORRUPT;
    const cg_rans_matrix matrix = {classes, strips, n_strips, n_rows, n_streams};
    const cg_rans_kernels *kernels = cg_kernels_best()->rans;
    for (size_t s = 0; s < n_streams; s++) {
        const uint8_t *stream;
        const size_t stream_bytes = (size_t)cg_load_le(table + 4 * s, 4);
        if (!cg_cursor_bytes(&in, stream_bytes, &stream))
            return CG_ERR_TRUNCATED;
        const cg_status status = kernels->decode_stream(&matrix, s, stream, stream_bytes);
        if (status != CG_OK)
            return status;
    }
    *used_bytes_out = src_bytes - in.left_bytes;
    return CG_OK;
}
