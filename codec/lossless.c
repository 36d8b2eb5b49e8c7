#include "codec/lossless.h"

#include "codec/arena.h"
#include "codec/cursor.h"
#include "codec/lossless_lane.h"
#include "codec/rans.h"

#include <stdbool.h>
#include <string.h>

/* Of the bytes of fp8: their 3 or 4 bits of rest are words of a stream, whole bits of a state each.
 */
enum { LEAST_PART = 3 };
enum { MAX_CLASSES = 8, MIN_ROWS_FOR_CLASSES = 64, CLASS_HEAD_BYTES = 2 + 2 * CG_RANS_MAX_SYMBOLS };

/* The loops over elements are inlined for each dtype, where the split is a constant: then they
 * vectorize. */
#define INLINE static inline __attribute__((always_inline))

INLINE uint32_t load_element(cg_lossless_split s, const void *elements, size_t i)
{
    return s.element_bytes == 1   ? ((const uint8_t *)elements)[i]
           : s.element_bytes == 2 ? ((const uint16_t *)elements)[i]
                                  : ((const uint32_t *)elements)[i];
}

INLINE void cut_cells(cg_lossless_split s, const void *restrict elements, size_t n_elements,
                      int16_t *restrict cells)
{
    for (size_t i = 0; i < n_elements; i++)
        cells[i] = (int16_t)cg_lane_cut(s, load_element(s, elements, i));
}

INLINE void cut_low_bytes(cg_lossless_split s, const void *restrict elements, size_t n_elements,
                          uint8_t *restrict out)
{
    for (size_t i = 0; i < n_elements; i++)
        cg_put_le(out + i * s.low_bytes, s.low_bytes,
                  cg_lane_rest(s, load_element(s, elements, i)));
}

/* false: an exponent that the dtype does not have. */
INLINE bool join(cg_lossless_split s, const int16_t *restrict cells, const uint8_t *restrict low,
                 size_t n_elements, void *restrict elements_out)
{
    uint32_t exponents = 0;
    for (size_t i = 0; i < n_elements; i++) {
        const uint32_t cell = (uint16_t)cells[i];
        const uint32_t bits =
            cg_lane_join(s, cell, (uint32_t)cg_get_le(low + i * s.low_bytes, s.low_bytes));
        exponents |= cg_lane_exponent(s, cell);
        if (s.element_bytes == 1)
            ((uint8_t *)elements_out)[i] = (uint8_t)bits;
        else if (s.element_bytes == 2)
            ((uint16_t *)elements_out)[i] = (uint16_t)bits;
        else
            ((uint32_t *)elements_out)[i] = bits;
    }
    return exponents >> s.exponent_bits == 0;
}

static void cut_all_cells(unsigned dtype, const void *elements, size_t n_elements, int16_t *cells)
{
    switch (dtype) {
    case CG_DTYPE_BF16: cut_cells(cg_lane_split(CG_DTYPE_BF16), elements, n_elements, cells); break;
    case CG_DTYPE_FP16: cut_cells(cg_lane_split(CG_DTYPE_FP16), elements, n_elements, cells); break;
    case CG_DTYPE_FP8_E4M3:
        cut_cells(cg_lane_split(CG_DTYPE_FP8_E4M3), elements, n_elements, cells);
        break;
    case CG_DTYPE_FP8_E5M2:
        cut_cells(cg_lane_split(CG_DTYPE_FP8_E5M2), elements, n_elements, cells);
        break;
    default: cut_cells(cg_lane_split(CG_DTYPE_FP32), elements, n_elements, cells);
    }
}

static void cut_all_low_bytes(unsigned dtype, const void *elements, size_t n_elements, uint8_t *out)
{
    switch (dtype) {
    case CG_DTYPE_BF16:
        cut_low_bytes(cg_lane_split(CG_DTYPE_BF16), elements, n_elements, out);
        break;
    case CG_DTYPE_FP16:
        cut_low_bytes(cg_lane_split(CG_DTYPE_FP16), elements, n_elements, out);
        break;
    case CG_DTYPE_FP8_E4M3:
    case CG_DTYPE_FP8_E5M2: break; /* none */
    default: cut_low_bytes(cg_lane_split(CG_DTYPE_FP32), elements, n_elements, out);
    }
}

static bool join_all(unsigned dtype, const int16_t *cells, const uint8_t *low, size_t n_elements,
                     void *elements_out)
{
    switch (dtype) {
    case CG_DTYPE_BF16:
        return join(cg_lane_split(CG_DTYPE_BF16), cells, low, n_elements, elements_out);
    case CG_DTYPE_FP16:
        return join(cg_lane_split(CG_DTYPE_FP16), cells, low, n_elements, elements_out);
    case CG_DTYPE_FP8_E4M3:
        return join(cg_lane_split(CG_DTYPE_FP8_E4M3), cells, low, n_elements, elements_out);
    case CG_DTYPE_FP8_E5M2:
        return join(cg_lane_split(CG_DTYPE_FP8_E5M2), cells, low, n_elements, elements_out);
    default: return join(cg_lane_split(CG_DTYPE_FP32), cells, low, n_elements, elements_out);
    }
}

typedef struct work {
    int16_t *cells;        /* [n_rows][n_columns] */
    uint8_t *column_class; /* [n_columns] */
    cg_rans_strip *strips;
    size_t n_strips;
    cg_rans_class *classes; /* [CG_LOSSLESS_MAX_CLASSES] */
    /* For encoding alone. */
    uint32_t *column_sum; /* [n_columns] */
    uint8_t *words;
} work;

static work take_work(cg_arena *arena, size_t n_columns, size_t n_rows, bool is_encoding)
{
    work w = {0};
    w.n_strips = (n_columns + CG_RANS_LANES - 1) / CG_RANS_LANES;
    w.cells = cg_arena_take(arena, n_rows * n_columns * sizeof *w.cells);
    w.column_class = cg_arena_take(arena, n_columns);
    w.strips = cg_arena_take(arena, w.n_strips * sizeof *w.strips);
    w.classes = cg_arena_take(arena, CG_LOSSLESS_MAX_CLASSES * sizeof *w.classes);
    if (!is_encoding)
        return w;
    w.column_sum = cg_arena_take(arena, n_columns * sizeof *w.column_sum);
    w.words = cg_arena_take(arena, 4 + w.n_strips * CG_RANS_STREAM_BYTES +
                                       n_rows * n_columns * CG_RANS_CELL_BYTES +
                                       (w.n_strips + 1) * CG_RANS_ALIGNED);
    return w;
}

static void lay_strips(work *w, size_t n_columns)
{
    for (size_t s = 0; s < w->n_strips; s++) {
        const size_t first = s * CG_RANS_LANES, left = n_columns - first;
        w->strips[s] =
            (cg_rans_strip){.cells = w->cells + first,
                            .row_stride = n_columns,
                            .lane_class = w->column_class + first,
                            .n_lanes = left < CG_RANS_LANES ? (uint32_t)left : CG_RANS_LANES};
    }
}

size_t cg_lossless_encode_scratch_bytes(size_t n_columns, size_t n_rows)
{
    cg_arena arena = {0};
    (void)take_work(&arena, n_columns, n_rows, true);
    return arena.used_bytes;
}

size_t cg_lossless_decode_scratch_bytes(size_t n_columns, size_t n_rows)
{
    cg_arena arena = {0};
    (void)take_work(&arena, n_columns, n_rows, false);
    return arena.used_bytes;
}

size_t cg_lossless_bound_bytes(unsigned dtype, size_t n_columns, size_t n_rows)
{
    const size_t n_strips = (n_columns + CG_RANS_LANES - 1) / CG_RANS_LANES;
    return 2 + MAX_CLASSES * CLASS_HEAD_BYTES + n_columns + 4 + n_strips * CG_RANS_STREAM_BYTES +
           (n_strips + 2) * CG_RANS_ALIGNED +
           n_rows * n_columns * (CG_RANS_CELL_BYTES + cg_lane_split(dtype).low_bytes);
}

/* Columns of alike exponents share a table: equal parts of the columns, ordered by their mean
 * exponent. Tables cost bytes, so few rows have one for all. */
static unsigned choose_classes(work *w, size_t n_columns, size_t n_rows, unsigned shift)
{
    memset(w->column_class, 0, n_columns);
    if (n_rows < MIN_ROWS_FOR_CLASSES || n_columns < 2 * MAX_CLASSES)
        return 1;
    uint32_t lowest = UINT32_MAX, highest = 0;
    for (size_t c = 0; c < n_columns; c++)
        w->column_sum[c] = 0;
    for (size_t r = 0; r < n_rows; r++) {
        for (size_t c = 0; c < n_columns; c++)
            w->column_sum[c] += (uint32_t)w->cells[r * n_columns + c] >> shift;
    }
    for (size_t c = 0; c < n_columns; c++) {
        w->column_sum[c] =
            (uint32_t)((uint64_t)w->column_sum[c] * 16 / n_rows); /* 1/16 exponents */
        lowest = w->column_sum[c] < lowest ? w->column_sum[c] : lowest;
        highest = w->column_sum[c] > highest ? w->column_sum[c] : highest;
    }
    /* Quantiles by counting: means lie in [0, 16 * 255]. */
    uint32_t counts[16 * 256] = {0};
    uint8_t class_of[16 * 256];
    for (size_t c = 0; c < n_columns; c++)
        counts[w->column_sum[c]]++;
    size_t before = 0;
    unsigned n_classes = 0, last = UINT32_MAX;
    for (uint32_t mean = lowest; mean <= highest; mean++) {
        const unsigned part = (unsigned)(before * MAX_CLASSES / n_columns);
        if (counts[mean] > 0 && part != last) {
            n_classes++;
            last = part;
        }
        class_of[mean] = (uint8_t)(n_classes - 1);
        before += counts[mean];
    }
    for (size_t c = 0; c < n_columns; c++)
        w->column_class[c] = class_of[w->column_sum[c]];
    return n_classes;
}

/* Writes the table of each class and readies it. *estimated_bits_out: roughly what the cells
 * take. */
static uint8_t *write_classes(work *w, unsigned n_classes, size_t n_columns, size_t n_rows,
                              unsigned shift, uint8_t *out, uint64_t *estimated_bits_out)
{
    static const size_t n_exponents = 256;
    /* Neighbouring columns often count the same exponent. Apart, one need not wait for the other.
     */
    uint32_t counts[MAX_CLASSES][256], odd_counts[MAX_CLASSES][256];
    uint64_t cost = (uint64_t)n_columns * n_rows * shift * 256;
    memset(counts, 0, sizeof counts);
    memset(odd_counts, 0, sizeof odd_counts);
    for (size_t r = 0; r < n_rows; r++) {
        const int16_t *cells = w->cells + r * n_columns;
        size_t c = 0;
        for (; c + 2 <= n_columns; c += 2) {
            counts[w->column_class[c]][cells[c] >> shift]++;
            odd_counts[w->column_class[c + 1]][cells[c + 1] >> shift]++;
        }
        if (c < n_columns)
            counts[w->column_class[c]][cells[c] >> shift]++;
    }
    for (unsigned k = 0; k < n_classes; k++) {
        uint16_t freq[CG_RANS_MAX_SYMBOLS];
        uint32_t index_counts[CG_RANS_MAX_SYMBOLS] = {0};
        unsigned top = 0, bottom = 255;
        for (unsigned e = 0; e < n_exponents; e++) {
            counts[k][e] += odd_counts[k][e];
            if (counts[k][e] > 0) {
                top = e;
                bottom = e < bottom ? e : bottom;
            }
        }
        bottom = bottom > top ? top : bottom;
        /* From the largest exponent down, and the escape for what is further down than a table
         * goes. */
        unsigned n_symbols = top - bottom + 2;
        n_symbols = n_symbols > CG_RANS_MAX_SYMBOLS ? CG_RANS_MAX_SYMBOLS : n_symbols;
        for (unsigned e = 0; e <= top; e++)
            index_counts[top - e < n_symbols - 1 ? top - e : n_symbols - 1] += counts[k][e];
        cg_rans_normalize(index_counts, n_symbols, freq);
        (void)cg_rans_class_init_exponents(&w->classes[k], shift, top, n_symbols,
                                           freq); /* right by construction */
        for (unsigned i = 0; i < n_symbols; i++)
            cost += (uint64_t)index_counts[i] * w->classes[k].cost[i];
        cost += (uint64_t)index_counts[n_symbols - 1] * 256 * w->classes[k].escape_bits;
        out[0] = (uint8_t)top;
        out[1] = (uint8_t)n_symbols;
        for (unsigned i = 0; i < n_symbols; i++)
            cg_put_le(out + 2 + 2 * i, 2, freq[i]);
        out += 2 + 2 * n_symbols;
    }
    *estimated_bits_out = cost / 256;
    return out;
}

size_t cg_lossless_encode(unsigned dtype, const void *elements, size_t n_columns, size_t n_rows,
                          size_t align, void *scratch, uint8_t *dst, size_t dst_bytes)
{
    const cg_lossless_split s = cg_lane_split(dtype);
    const size_t n_elements = n_columns * n_rows;
    if (dst_bytes < cg_lossless_bound_bytes(dtype, n_columns, n_rows))
        return 0;
    cg_arena arena = {scratch, 0};
    work w = take_work(&arena, n_columns, n_rows, true);
    cut_all_cells(dtype, elements, n_elements, w.cells);
    const unsigned n_classes = choose_classes(&w, n_columns, n_rows, s.shift);
    uint8_t *out = dst;
    *out++ = (uint8_t)n_classes;
    *out++ = 0;
    uint64_t estimated_bits;
    out = write_classes(&w, n_classes, n_columns, n_rows, s.shift, out, &estimated_bits);
    if (n_classes > 1) {
        memcpy(out, w.column_class, n_columns);
        out += n_columns;
    }
    lay_strips(&w, n_columns);
    out = cg_put_zeros(dst, out, align);
    /* By the estimate, not by the coded bytes: the streams' sizes stand in front of them. */
    const size_t n_streams =
        cg_rans_choose_streams(estimated_bits, w.n_strips, n_rows, CG_RANS_STREAM_PERCENT);
    const cg_rans_run all = {n_rows, 0};
    out += cg_rans_encode(w.classes, w.strips, w.n_strips, &all, 1, n_streams, align, out,
                          (size_t)(dst + dst_bytes - out), w.words);
    cut_all_low_bytes(dtype, elements, n_elements, out);
    return (size_t)(out - dst) + n_elements * s.low_bytes;
}

size_t cg_lossless_least_bytes(unsigned dtype, size_t n_columns, size_t n_rows)
{
    const cg_lossless_split s = cg_lane_split(dtype);
    const size_t n_elements = n_columns * n_rows;
    return s.low_bytes > 0 ? n_elements * s.low_bytes : n_elements / LEAST_PART;
}

static cg_status read_classes(cg_cursor *in, cg_lossless_split s, cg_rans_class *classes,
                              unsigned *n_classes_out)
{
    uint8_t n_classes, reserved;
    if (!cg_cursor_u8(in, &n_classes) || !cg_cursor_u8(in, &reserved))
        return CG_ERR_TRUNCATED;
    if (n_classes == 0 || n_classes > CG_LOSSLESS_MAX_CLASSES || reserved != 0)
        return CG_ERR_CORRUPT;
    *n_classes_out = n_classes;
    for (unsigned k = 0; k < n_classes; k++) {
        uint8_t top, n_symbols;
        uint16_t freq[CG_RANS_MAX_SYMBOLS];
        if (!cg_cursor_u8(in, &top) || !cg_cursor_u8(in, &n_symbols))
            return CG_ERR_TRUNCATED;
        if (n_symbols > CG_RANS_MAX_SYMBOLS || top >> s.exponent_bits != 0)
            return CG_ERR_CORRUPT;
        for (unsigned i = 0; i < n_symbols; i++) {
            if (!cg_cursor_u16(in, &freq[i]))
                return CG_ERR_TRUNCATED;
        }
        const cg_status status =
            cg_rans_class_init_exponents(&classes[k], s.shift, top, n_symbols, freq);
        if (status != CG_OK)
            return status;
    }
    return CG_OK;
}

cg_status cg_lossless_read_head(unsigned dtype, const uint8_t *src, size_t src_bytes,
                                size_t n_columns, size_t n_rows, size_t align,
                                cg_rans_class classes[CG_LOSSLESS_MAX_CLASSES],
                                cg_lossless_head *head)
{
    const cg_lossless_split s = cg_lane_split(dtype);
    cg_cursor in = {src, src_bytes};
    head->column_class = NULL;
    cg_status status = read_classes(&in, s, classes, &head->n_classes);
    if (status != CG_OK)
        return status;
    if (head->n_classes > 1) {
        if (!cg_cursor_bytes(&in, n_columns, &head->column_class))
            return CG_ERR_TRUNCATED;
        for (size_t c = 0; c < n_columns; c++) {
            if (head->column_class[c] >= head->n_classes)
                return CG_ERR_CORRUPT;
        }
    }
    if ((status = cg_cursor_align(&in, src, align)) != CG_OK)
        return status;
    if (in.left_bytes < cg_lossless_least_bytes(dtype, n_columns, n_rows))
        return CG_ERR_TRUNCATED; /* before exponents that cannot be */
    head->matrix = in;
    return CG_OK;
}

cg_status cg_lossless_decode(unsigned dtype, const uint8_t *src, size_t src_bytes, size_t n_columns,
                             size_t n_rows, size_t align, void *scratch, void *elements_out)
{
    const cg_lossless_split s = cg_lane_split(dtype);
    const size_t n_elements = n_columns * n_rows;
    cg_arena arena = {scratch, 0};
    work w = take_work(&arena, n_columns, n_rows, false);
    cg_lossless_head head;
    size_t used_bytes;
    cg_status status =
        cg_lossless_read_head(dtype, src, src_bytes, n_columns, n_rows, align, w.classes, &head);
    if (status != CG_OK)
        return status;
    cg_cursor in = head.matrix;
    if (head.column_class != NULL)
        memcpy(w.column_class, head.column_class, n_columns);
    else
        memset(w.column_class, 0, n_columns);
    lay_strips(&w, n_columns);
    const cg_rans_run all = {n_rows, 0};
    status = cg_rans_decode(w.classes, w.strips, w.n_strips, &all, 1, align, in.at, in.left_bytes,
                            &used_bytes);
    if (status != CG_OK)
        return status;
    (void)cg_cursor_skip(&in, used_bytes);
    if (in.left_bytes != n_elements * s.low_bytes)
        return in.left_bytes < n_elements * s.low_bytes ? CG_ERR_TRUNCATED : CG_ERR_CORRUPT;
    return join_all(dtype, w.cells, in.at, n_elements, elements_out) ? CG_OK : CG_ERR_CORRUPT;
}
