#include "codec/rans.h"

#include "codec/cursor.h"
#include "codec/kernels.h"
#include "codec/rans_kernels.h"
#include "codec/rans_lane.h"

#include <math.h>
#include <string.h>

/* ---- classes ---- */

/* What both kinds of classes share: sums, and tables to search in. */
static cg_status class_init(cg_rans_class *cls, unsigned shift, unsigned n_symbols,
                            const uint16_t *freq)
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
        cls->packed[i] = freq[i] | sum << 16; /* both fit: sums are at most 2^14 */
        cls->cost[i] = (uint16_t)lrintf(256.0f * (CG_RANS_TOTAL_BITS - log2f(freq[i])));
        sum += freq[i];
        if (sum > CG_RANS_TOTAL)
            return CG_ERR_CORRUPT;
    }
    if (sum != CG_RANS_TOTAL)
        return CG_ERR_CORRUPT;
    cls->cum[n_symbols] = CG_RANS_TOTAL;
    cls->escape = cls->cum[n_symbols - 1];
    /* The index of each bucket's first slot. A search goes upwards from there. */
    for (unsigned slot = 0, i = 0; slot < CG_RANS_TOTAL; slot += 1u << CG_RANS_BUCKET_SHIFT) {
        while (slot >= cls->cum[i + 1])
            i++;
        cls->first[slot >> CG_RANS_BUCKET_SHIFT] = (uint8_t)i;
        cls->bucket[slot >> CG_RANS_BUCKET_SHIFT] =
            cls->freq[i] | (uint32_t)cls->cum[i] << 14 | (i < 15 ? i : 15u) << 28;
    }
    return CG_OK;
}

cg_status cg_rans_class_init_signed(cg_rans_class *cls, unsigned shift, unsigned n_symbols,
                                    const uint16_t *freq)
{
    const cg_status status =
        n_symbols % 2 == 0 ? class_init(cls, shift, n_symbols, freq) : CG_ERR_CORRUPT;
    if (status != CG_OK)
        return status;
    cls->escape_bits = 5;
    for (int i = 0; i < (int)n_symbols - 1; i++)
        cls->value[i] = (int16_t)cg_lane_signed_value((uint32_t)i);
    return CG_OK;
}

cg_status cg_rans_class_init_exponents(cg_rans_class *cls, unsigned shift, unsigned top,
                                       unsigned n_symbols, const uint16_t *freq)
{
    if (n_symbols < 2 || top + 2 < n_symbols ||
        top > 255) /* the last but one index is top - (n_symbols - 2) >= 0 */
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

cg_status cg_rans_class_init_refinement(cg_rans_class *cls,
                                        const uint16_t freq[CG_RANS_REFINE_CONTEXTS][2])
{
    for (unsigned c = 0; c < CG_RANS_REFINE_CONTEXTS; c++) {
        if (freq[c][0] == 0 || freq[c][1] == 0 || freq[c][0] + freq[c][1] >= CG_RANS_TOTAL)
            return CG_ERR_CORRUPT;
        const int all[3] = {freq[c][0], freq[c][1], CG_RANS_TOTAL - freq[c][0] - freq[c][1]};
        cls->refine[c] = freq[c][0] | (uint32_t)freq[c][1] << 16;
        for (unsigned i = 0; i < 3; i++)
            cls->refine_cost[c][i] =
                (uint16_t)lrintf(256.0f * (CG_RANS_TOTAL_BITS - log2f((float)all[i])));
    }
    return CG_OK;
}

void cg_rans_normalize(const uint32_t *counts, unsigned n_symbols, uint16_t *freq_out)
{
    /* Each index has 1 for certain, since FORMAT.md lets none have 0, and its share of the rest. */
    uint64_t total = 0;
    uint32_t sum = 0;
    unsigned largest = 0;
    for (unsigned i = 0; i < n_symbols; i++)
        total += counts[i];
    for (unsigned i = 0; i < n_symbols; i++) {
        const uint64_t share =
            total > 0 ? ((uint64_t)counts[i] * (CG_RANS_TOTAL - n_symbols)) / total : 0;
        freq_out[i] = (uint16_t)(share + 1);
        sum += freq_out[i];
        if (freq_out[i] > freq_out[largest])
            largest = i;
    }
    freq_out[largest] =
        (uint16_t)(freq_out[largest] + CG_RANS_TOTAL - sum); /* sum is not above: rounded down */
}

/* ---- encoding ---- */

size_t cg_rans_bound_bytes(const cg_rans_strip *strips, size_t n_strips, size_t n_rows,
                           size_t n_streams)
{
    size_t n_lanes = 0;
    for (size_t i = 0; i < n_strips; i++)
        n_lanes += strips[i].n_lanes;
    /* Behind the table and each stream up to 15 zeros. */
    return 4 + n_streams * CG_RANS_STREAM_BYTES + n_lanes * n_rows * CG_RANS_CELL_BYTES +
           (n_streams + 1) * (CG_RANS_ALIGNED - 1);
}

uint64_t cg_rans_estimate_bits(const cg_rans_class *classes, const cg_rans_strip *strips,
                               size_t n_strips, const cg_rans_run *runs, size_t n_runs)
{
    /* Where this is off, there are more or fewer streams than are worth it; nothing else depends on
     * it. So of a strip every eighth row is looked at, of its neighbour the rows behind those. */
    const cg_rans_kernels *kernels = cg_kernels_best()->rans;
    const size_t n_rows = cg_rans_n_rows(runs, n_runs),
                 every = cg_lane_estimate_every((uint32_t)n_rows);
    uint64_t cost = 0;
    for (size_t s = 0; s < n_strips && n_rows > 0; s++) {
        uint64_t strip_cost = 0;
        size_t n_seen = 0, row = 0;
        for (size_t i = 0; i < n_runs; row += runs[i++].n_rows) {
            const size_t first = (s + every - row % every) % every; /* of those, in the run */
            if (first >= runs[i].n_rows)
                continue;
            const size_t n = (runs[i].n_rows - first + every - 1) / every;
            cg_rans_strip some = cg_rans_part(&strips[s], row + first, &runs[i]);
            some.row_stride *= every;
            some.coarse_stride *= every;
            strip_cost += kernels->estimate_strip(classes, &some, n);
            n_seen += n;
        }
        cost += strip_cost * n_rows / n_seen;
    }
    return cost / 256;
}

size_t cg_rans_choose_streams(uint64_t estimated_bits, size_t n_strips, size_t n_rows,
                              unsigned percent)
{
    return cg_lane_choose_streams(estimated_bits, n_strips, n_rows, percent);
}

size_t cg_rans_encode(const cg_rans_class *classes, const cg_rans_strip *strips, size_t n_strips,
                      const cg_rans_run *runs, size_t n_runs, size_t n_streams, size_t align,
                      uint8_t *dst, size_t dst_bytes, uint8_t *scratch_words)
{
    const size_t bound_bytes =
        cg_rans_bound_bytes(strips, n_strips, cg_rans_n_rows(runs, n_runs), n_streams);
    if (dst_bytes < bound_bytes || n_streams > n_strips || (n_streams == 0 && n_strips > 0))
        return 0;
    uint8_t *out = cg_put_zeros(dst, dst + 4 + 4 * n_streams, align);
    cg_put_le(dst, 2, n_streams);
    cg_put_le(dst + 2, 2, 0);
    const cg_rans_matrix matrix = {classes, strips, n_strips, runs, n_runs, n_streams};
    const cg_rans_kernels *kernels = cg_kernels_best()->rans;
    for (size_t s = 0; s < n_streams; s++) {
        uint32_t states[CG_RANS_LANES];
        /* rANS is a stack: words are written downwards, from the last to the first. Their number is
         * known behind that, so they are copied to their place. */
        uint8_t *const end = scratch_words + bound_bytes;
        const uint8_t *const at = kernels->encode_stream(&matrix, s, end, states);
        for (unsigned lane = 0; lane < CG_RANS_LANES; lane++, out += 4)
            cg_put_le(out, 4, states[lane]);
        memcpy(out, at, (size_t)(end - at));
        out = cg_put_zeros(dst, out + (end - at), align);
        cg_put_le(dst + 4 + 4 * s, 4, 4 * CG_RANS_LANES + (size_t)(end - at));
    }
    return (size_t)(out - dst);
}

/* ---- decoding ---- */

cg_status cg_rans_streams_open(cg_cursor in, size_t n_strips, size_t align,
                               cg_rans_streams *streams)
{
    uint16_t n_streams, reserved;
    *streams = (cg_rans_streams){.in = in, .start = in.at, .align = align};
    if (!cg_cursor_u16(&streams->in, &n_streams) || !cg_cursor_u16(&streams->in, &reserved) ||
        !cg_cursor_bytes(&streams->in, 4 * (size_t)n_streams, &streams->table))
        return CG_ERR_TRUNCATED;
    if (reserved != 0 || n_streams > n_strips || (n_streams == 0 && n_strips > 0))
        return CG_ERR_CORRUPT;
    streams->n_streams = n_streams;
    return cg_cursor_align(&streams->in, streams->start, align);
}

cg_status cg_rans_streams_next(cg_rans_streams *streams, const uint8_t **stream_out,
                               size_t *stream_bytes_out)
{
    /* The caller counts: there is a next one. */
    const size_t n_bytes = (size_t)cg_get_le(streams->table + 4 * (size_t)streams->n_read, 4);
    if (!cg_cursor_bytes(&streams->in, n_bytes, stream_out))
        return CG_ERR_TRUNCATED;
    *stream_bytes_out = n_bytes;
    streams->n_read++;
    return cg_cursor_align(&streams->in, streams->start, streams->align);
}

cg_status cg_rans_decode(const cg_rans_class *classes, const cg_rans_strip *strips, size_t n_strips,
                         const cg_rans_run *runs, size_t n_runs, size_t align, const uint8_t *src,
                         size_t src_bytes, size_t *used_bytes_out)
{
    cg_rans_streams streams;
    cg_status status = cg_rans_streams_open((cg_cursor){src, src_bytes}, n_strips, align, &streams);
    /* After an error n_streams is 0, and nothing is decoded. */
    const cg_rans_matrix matrix = {classes, strips, n_strips, runs, n_runs, streams.n_streams};
    const cg_rans_kernels *kernels = cg_kernels_best()->rans;
    for (size_t s = 0; status == CG_OK && s < streams.n_streams; s++) {
        const uint8_t *stream;
        size_t stream_bytes;
        status = cg_rans_streams_next(&streams, &stream, &stream_bytes);
        if (status == CG_OK)
            status = kernels->decode_stream(&matrix, s, stream, stream_bytes);
    }
    *used_bytes_out = src_bytes - streams.in.left_bytes;
    return status;
}
