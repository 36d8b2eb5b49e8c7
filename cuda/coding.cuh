/* cuda/coding.cuh - the bodies of the kernels of cuda/coding.h.
 *
 * A lane has a column, as in cuda/streams.cuh, and everything is done the other way round: strips,
 * runs and rows from the last to the first, phases from D to A, and words downwards. Which lanes
 * give one is asked of all with a ballot; of those that do, the last has the highest address. A
 * lane without a column takes part with a class that leaves its state as it is.
 */
#ifndef CG_CUDA_CODING_CUH
#define CG_CUDA_CODING_CUH
#include "codec/rans_lane.h"
#include "cuda/coding.h"

/* A thread block's part of all levels. */
struct cg_cuda_coding_part {
    const cg_cuda_coded_level *level;
    uint32_t first, own; /* strip or stream of the thread block's first warp, and of this */
};

template <class Cta>
CG_LANE cg_cuda_coding_part cg_cuda_find_part(Cta &cta, const cg_cuda_coding &c)
{
    uint32_t i = 0;
    while (i + 1 < c.n_levels && cta.block() >= c.levels[i + 1].first_block)
        i++;
    cg_cuda_coding_part part;
    part.level = &c.levels[i];
    part.first = (cta.block() - part.level->first_block) * CG_CUDA_CODING_WARPS;
    part.own = part.first + cta.thread() / CG_RANS_LANES;
    return part;
}

/* The sum of what the thread block's threads have. shared: room for a number of each. */
template <class Cta> CG_LANE uint64_t cg_cuda_add_up(Cta &cta, uint64_t *shared, uint64_t value)
{
    const uint32_t t = cta.thread();
    cta.barrier(); /* who reads an earlier sum has done so */
    shared[t] = value;
    for (uint32_t n = CG_CUDA_CODING_THREADS / 2; n > 0; n /= 2) {
        cta.barrier();
        if (t < n)
            shared[t] += shared[t + n];
    }
    cta.barrier();
    return shared[0];
}

/* ---- a lane's cells ---- */

/* A column of a strip. */
struct cg_cuda_column {
    const int16_t *cells; /* of the finest level */
    uint64_t class_of;    /* by step factor, a byte each */
    uint32_t stride, n_thirds, n_idle;
    bool is_there, is_refined;
};

CG_LANE cg_cuda_column cg_cuda_find_column(const cg_cuda_coding &c,
                                           const cg_cuda_coded_level &level, uint32_t number,
                                           uint32_t lane)
{
    const cg_cuda_strip strip = ((const cg_cuda_strip *)(c.blob_dev + level.strips_at))[number];
    cg_cuda_column column = {c.cells_dev,          0,           c.n_active[strip.frequency],
                             level.n_thirds,       c.n_classes, lane < strip.n_lanes,
                             strip.is_refined != 0};
    for (uint32_t f = 0; f < strip.frequency; f++)
        column.cells += (uint64_t)c.n_rows * c.n_active[f];
    column.cells += strip.column - c.first_column + lane;
    if (column.is_there) {
        const uint32_t own = (c.blob_dev + level.classes_at)[strip.class_at + lane];
        column.class_of = ((const uint64_t *)(c.blob_dev + c.class_of_at))[own];
    }
    return column;
}

CG_LANE uint32_t cg_cuda_class_of(const cg_cuda_column &column, uint32_t factor_shift)
{
    return column.is_there ? (uint32_t)(column.class_of >> factor_shift & 0xff) : column.n_idle;
}

/* The finest level's cell; lanes without a column have 0. */
CG_LANE int32_t cg_cuda_fetch_cell(const cg_cuda_column &column, uint32_t row)
{
    return column.is_there ? column.cells[(uint64_t)row * column.stride] : 0;
}

/* n: at most 2, as there are three levels. Without a loop: a row has no branches. */
CG_LANE int32_t cg_cuda_thirds(int32_t cell, uint32_t n)
{
    const int32_t third = cg_lane_coarsen(cell), ninth = cg_lane_coarsen(third);
    return n == 0 ? cell : n == 1 ? third : ninth;
}

/* ---- the first kernel ---- */

/* A cell in 1/256 bits: estimate_strip() and estimate_refined_strip() of codec/rans_strips.c. */
CG_LANE uint32_t cg_cuda_cost(const cg_cuda_class *cls, const cg_cuda_class_cost *cost,
                              bool is_refined, int32_t cell)
{
    if (is_refined) {
        const int32_t coarse = cg_lane_coarsen(cell);
        return cost->refine[cg_lane_context(coarse)][cg_lane_refinement(cell, coarse)];
    }
    const cg_lane_coded coded =
        cg_lane_code(cls->shift, cls->n_symbols, cls->escape_bits, cls->top, cell);
    return cost->index[coded.index] + 256u * cls->shift +
           (coded.is_escape ? 256u * (cls->escape_bits + coded.extra_bits) : 0);
}

/* Of some rows of a strip, a lane's cost; *n_seen: how many. */
CG_LANE uint32_t cg_cuda_estimate_column(const cg_cuda_coding &c, const cg_cuda_column &column,
                                         uint32_t strip, uint32_t *n_seen)
{
    const uint32_t every = cg_lane_estimate_every(c.n_rows);
    const cg_cuda_class *classes = (const cg_cuda_class *)(c.blob_dev + c.classes_at);
    const cg_cuda_class_cost *costs = (const cg_cuda_class_cost *)(c.blob_dev + c.costs_at);
    uint32_t cost = 0, row = strip % every;
    *n_seen = 0;
    for (uint32_t r = 0; r < c.n_runs; r++) {
        const uint32_t number = cg_cuda_class_of(column, c.runs[r].factor_shift);
        for (; row < c.runs[r].end; row += every) {
            const int32_t cell = cg_cuda_thirds(cg_cuda_fetch_cell(column, row), column.n_thirds);
            *n_seen += 1;
            cost += column.is_there
                        ? cg_cuda_cost(&classes[number], &costs[number], column.is_refined, cell)
                        : 0;
        }
    }
    return cost;
}

template <class Cta> CG_LANE void cg_cuda_estimate_block(Cta &cta, const cg_cuda_coding &c)
{
    uint32_t *shared = (uint32_t *)cta.shared();
    const cg_cuda_coding_part part = cg_cuda_find_part(cta, c);
    const bool has_strip = part.own < part.level->n_strips;
    uint32_t cost = 0, n_seen = 0;
    if (has_strip)
        cost = cg_cuda_estimate_column(c, cg_cuda_find_column(c, *part.level, part.own, cta.lane()),
                                       part.own, &n_seen);
    shared[cta.thread()] = cost;
    cta.barrier();
    if (has_strip && cta.lane() == 0) {
        uint64_t sum = 0;
        for (uint32_t lane = 0; lane < CG_RANS_LANES; lane++)
            sum += shared[cta.thread() + lane];
        part.level->costs_dev[part.own] = sum * c.n_rows / n_seen;
    }
}

/* ---- the second kernel ---- */

/* Words of a stream, from the last to the first. */
struct cg_cuda_given_words {
    uint16_t *begin;       /* of what the stream has */
    uint32_t left;         /* of it: words behind these are written */
    uint32_t lanes_before; /* a bit for each lane before this one */
};

/* Lanes that give away a word write it, in their order. */
template <class Cta>
CG_LANE uint32_t cg_cuda_give_word(Cta &cta, cg_cuda_given_words *words, bool gives, uint32_t x)
{
    const uint32_t giving = cta.ballot(gives);
    words->left -= cta.count(giving);
    if (gives)
        words->begin[words->left + cta.count(giving & words->lanes_before)] = (uint16_t)x;
    return gives ? x >> 16 : x;
}

template <class Cta>
CG_LANE void cg_cuda_put_slots(Cta &cta, cg_cuda_given_words *words, uint32_t freq, uint32_t cum,
                               uint32_t *x)
{
    *x = cg_cuda_give_word(cta, words, cg_lane_gives_word(*x, freq), *x);
    *x = cg_lane_put(*x, freq, cum);
}

/* Nothing of a lane with 0 bits. */
template <class Cta>
CG_LANE void cg_cuda_put_raw(Cta &cta, cg_cuda_given_words *words, uint32_t value, uint32_t n_bits,
                             uint32_t *x)
{
    *x = cg_cuda_give_word(cta, words, n_bits > 0 && cg_lane_gives_word_raw(*x, n_bits), *x);
    *x = n_bits > 0 ? cg_lane_put_raw(*x, value, n_bits) : *x;
}

/* A class in a run of rows. What is in shared memory would be loaded again in each row, since words
 * are written between. */
struct cg_cuda_coding_class {
    const uint32_t *entry;
    uint32_t shift, n_symbols, escape_bits, top;
    uint32_t refine[CG_RANS_REFINE_CONTEXTS];
};

CG_LANE cg_cuda_coding_class cg_cuda_hold_class(const cg_cuda_class *cls)
{
    return {cls->entry,       cls->shift, cls->n_symbols,
            cls->escape_bits, cls->top,   {cls->refine[0], cls->refine[1], cls->refine[2]}};
}

/* A row of a level alone. */
template <bool SHIFTS, class Cta>
CG_LANE void cg_cuda_code_row(Cta &cta, const cg_cuda_coding_class &cls, int32_t cell,
                              cg_cuda_given_words *words, uint32_t *x)
{
    const cg_lane_coded coded =
        cg_lane_code(SHIFTS ? cls.shift : 0, cls.n_symbols, cls.escape_bits, cls.top, cell);
    const uint32_t entry = cls.entry[coded.index];
    if (SHIFTS)
        cg_cuda_put_raw(cta, words, coded.shift_raw, cls.shift, x);
    if (cta.ballot(coded.is_escape) != 0) {
        cg_cuda_put_raw(cta, words, coded.extra_raw, coded.extra_bits, x);
        cg_cuda_put_raw(cta, words, coded.escape_raw, coded.is_escape ? cls.escape_bits : 0, x);
    }
    /* cuda/layout.h: what an entry is. */
    cg_cuda_put_slots(cta, words,
                      (entry & (CG_CUDA_CUM_ONE - 1)) + 1 - (CG_CUDA_CUM_ONE - CG_RANS_TOTAL),
                      entry >> CG_CUDA_CUM_SHIFT, x);
}

/* A row given the coarser one. */
template <class Cta>
CG_LANE void cg_cuda_code_refined_row(Cta &cta, const cg_cuda_coding_class &cls, int32_t cell,
                                      cg_cuda_given_words *words, uint32_t *x)
{
    const int32_t coarse = cg_lane_coarsen(cell);
    const uint32_t context = cg_lane_context(coarse);
    const cg_lane_slots slots = cg_lane_refinement_slots(context == 0   ? cls.refine[0]
                                                         : context == 1 ? cls.refine[1]
                                                                        : cls.refine[2],
                                                         cg_lane_refinement(cell, coarse));
    cg_cuda_put_slots(cta, words, slots.freq, slots.cum, x);
}

enum { CG_CUDA_CODE_ALONE, CG_CUDA_CODE_SHIFTS, CG_CUDA_CODE_REFINED };

/* Rows from end down to first. The next one's cell is on its way while one is coded. False: a row
 * might not fit any more. */
template <int KIND, class Cta>
CG_LANE bool cg_cuda_code_rows(Cta &cta, const cg_cuda_class *of, const cg_cuda_column &column,
                               uint32_t first, uint32_t end, cg_cuda_given_words *words,
                               uint32_t *x)
{
    const cg_cuda_coding_class cls = cg_cuda_hold_class(of);
    int32_t next = cg_cuda_fetch_cell(column, end - 1);
    for (uint32_t row = end; row-- > first;) {
        const int32_t cell = cg_cuda_thirds(next, column.n_thirds);
        if (row > first)
            next = cg_cuda_fetch_cell(column, row - 1);
        if (words->left < CG_CUDA_ROW_WORDS)
            return false;
        if constexpr (KIND == CG_CUDA_CODE_REFINED)
            cg_cuda_code_refined_row(cta, cls, cell, words, x);
        else
            cg_cuda_code_row<KIND == CG_CUDA_CODE_SHIFTS>(cta, cls, cell, words, x);
    }
    return true;
}

template <class Cta>
CG_LANE bool cg_cuda_code_strip(Cta &cta, const cg_cuda_coding &c, const cg_cuda_class *classes,
                                const cg_cuda_column &column, cg_cuda_given_words *words,
                                uint32_t *x)
{
    bool fits = true;
    for (uint32_t r = c.n_runs; r-- > 0 && fits;) {
        const uint32_t first = r > 0 ? c.runs[r - 1].end : 0, end = c.runs[r].end;
        const cg_cuda_class *cls = &classes[cg_cuda_class_of(column, c.runs[r].factor_shift)];
        if (column.is_refined)
            fits = cg_cuda_code_rows<CG_CUDA_CODE_REFINED>(cta, cls, column, first, end, words, x);
        else if (cta.ballot(cls->shift > 0) != 0)
            fits = cg_cuda_code_rows<CG_CUDA_CODE_SHIFTS>(cta, cls, column, first, end, words, x);
        else
            fits = cg_cuda_code_rows<CG_CUDA_CODE_ALONE>(cta, cls, column, first, end, words, x);
    }
    return fits;
}

/* A stream's part of the level's words: those of its strips; streams lie one behind the other. */
struct cg_cuda_stream_words {
    uint16_t *begin;
    uint32_t n_strips, n_words;
};

CG_LANE cg_cuda_stream_words cg_cuda_find_words(const cg_cuda_coding &c,
                                                const cg_cuda_coded_level &level,
                                                uint32_t n_streams, uint32_t stream)
{
    const uint32_t least = level.n_strips / n_streams, n_longer = level.n_strips % n_streams,
                   n_before = stream * least + (stream < n_longer ? stream : n_longer),
                   n_strips = least + (stream < n_longer);
    return {level.words_dev + (uint64_t)n_before * c.strip_words, n_strips,
            n_strips * c.strip_words};
}

/* A warp's stream: strips own, own + n_streams ... of the level. */
template <class Cta>
CG_LANE void cg_cuda_code_stream(Cta &cta, const cg_cuda_coding &c,
                                 const cg_cuda_coded_level &level, const cg_cuda_class *classes,
                                 uint32_t n_streams, uint32_t own)
{
    const cg_cuda_stream_words of = cg_cuda_find_words(c, level, n_streams, own);
    cg_cuda_given_words words = {of.begin, of.n_words, (1u << cta.lane()) - 1};
    uint32_t x = CG_RANS_STATE_LOW;
    bool fits = true;
    for (uint32_t i = of.n_strips; i-- > 0 && fits;)
        fits = cg_cuda_code_strip(cta, c, classes,
                                  cg_cuda_find_column(c, level, own + i * n_streams, cta.lane()),
                                  &words, &x);
    level.states_dev[(uint64_t)own * CG_RANS_LANES + cta.lane()] = x;
    if (cta.lane() == 0)
        level.sizes_dev[own] = fits ? 4 * CG_RANS_LANES + 2 * (of.n_words - words.left) : 0;
}

template <class Cta> CG_LANE void cg_cuda_code_block(Cta &cta, const cg_cuda_coding &c)
{
    const cg_cuda_coding_part part = cg_cuda_find_part(cta, c);
    const cg_cuda_coded_level &level = *part.level;
    uint64_t *sums = (uint64_t *)cta.shared();
    uint8_t *classes = (uint8_t *)(sums + CG_CUDA_CODING_THREADS);
    uint64_t cost = 0;
    for (uint32_t s = cta.thread(); s < level.n_strips; s += CG_CUDA_CODING_THREADS)
        cost += level.costs_dev[s];
    const uint32_t n_streams = cg_lane_choose_streams(cg_cuda_add_up(cta, sums, cost) / 256,
                                                      level.n_strips, c.n_rows, c.stream_percent);
    if (part.first == 0 && cta.thread() == 0)
        *level.n_streams_dev = n_streams;
    if (part.first >= n_streams) /* so the whole thread block has none */
        return;
    for (uint32_t i = 16 * cta.thread(); i < (c.n_classes + 1) * (uint32_t)sizeof(cg_cuda_class);
         i += 16 * CG_CUDA_CODING_THREADS)
        cta.copy16(classes + i, c.blob_dev + c.classes_at + i);
    cta.wait_copies();
    cta.barrier();
    if (part.own < n_streams)
        cg_cuda_code_stream(cta, c, level, (const cg_cuda_class *)classes, n_streams, part.own);
}

/* ---- the third kernel ---- */

/* Bytes of a stream with the zeros behind it. One that does not fit counts as more than there is
 * room for. */
CG_LANE uint64_t cg_cuda_padded_size(uint32_t size)
{
    return size > 0 ? (size + CG_RANS_ALIGNED - 1) / CG_RANS_ALIGNED * CG_RANS_ALIGNED
                    : (uint64_t)1 << 40;
}

/* Bytes of a level's streams before the n-th. */
template <class Cta>
CG_LANE uint64_t cg_cuda_bytes_before(Cta &cta, const cg_cuda_coded_level &level, uint64_t *sums,
                                      uint32_t n)
{
    uint64_t n_bytes = 0;
    for (uint32_t s = cta.thread(); s < n; s += CG_CUDA_CODING_THREADS)
        n_bytes += cg_cuda_padded_size(level.sizes_dev[s]);
    return cg_cuda_add_up(cta, sums, n_bytes);
}

/* A warp's stream to its place: states, words, zeros. */
template <class Cta>
CG_LANE void cg_cuda_pack_stream(Cta &cta, const cg_cuda_coding &c,
                                 const cg_cuda_coded_level &level, uint32_t n_streams, uint32_t own,
                                 uint8_t *to)
{
    const uint32_t size = level.sizes_dev[own], n_words = (size - 4 * CG_RANS_LANES) / 2,
                   n_pairs = (uint32_t)(cg_cuda_padded_size(size) / 4) - CG_RANS_LANES;
    const cg_cuda_stream_words of = cg_cuda_find_words(c, level, n_streams, own);
    const uint16_t *words = of.begin + (of.n_words - n_words);
    uint32_t *out = (uint32_t *)to;
    out[cta.lane()] = level.states_dev[(uint64_t)own * CG_RANS_LANES + cta.lane()];
    for (uint32_t i = cta.lane(); i < n_pairs; i += CG_RANS_LANES) {
        const uint32_t low = 2 * i < n_words ? words[2 * i] : 0,
                       high = 2 * i + 1 < n_words ? words[2 * i + 1] : 0;
        out[CG_RANS_LANES + i] = low | high << 16;
    }
}

/* Streams' number and sizes, to the level's first bytes. */
template <class Cta>
CG_LANE void cg_cuda_pack_table(Cta &cta, const cg_cuda_coded_level &level, uint32_t n_streams,
                                uint32_t table_bytes)
{
    for (uint32_t i = cta.thread(); i < table_bytes / 4; i += CG_CUDA_CODING_THREADS)
        ((uint32_t *)level.out)[i] = i == 0           ? n_streams
                                     : i <= n_streams ? level.sizes_dev[i - 1]
                                                      : 0;
}

template <class Cta> CG_LANE void cg_cuda_pack_block(Cta &cta, const cg_cuda_coding &c)
{
    const cg_cuda_coding_part part = cg_cuda_find_part(cta, c);
    const cg_cuda_coded_level &level = *part.level;
    uint64_t *sums = (uint64_t *)cta.shared();
    const uint32_t n_streams = *level.n_streams_dev,
                   table_bytes = (uint32_t)cg_cuda_padded_size(4 + 4 * n_streams);
    if (part.first > 0 && part.first >= n_streams)
        return;
    if (part.first == 0) {
        const uint64_t all = table_bytes + cg_cuda_bytes_before(cta, level, sums, n_streams);
        if (cta.thread() == 0)
            *level.n_bytes = all <= level.out_bytes ? (uint32_t)all : 0;
        if (table_bytes <= level.out_bytes)
            cg_cuda_pack_table(cta, level, n_streams, table_bytes);
    }
    uint64_t at = table_bytes + cg_cuda_bytes_before(cta, level, sums, part.first);
    if (part.own >= n_streams)
        return;
    for (uint32_t s = part.first; s < part.own; s++)
        at += cg_cuda_padded_size(level.sizes_dev[s]);
    if (at + cg_cuda_padded_size(level.sizes_dev[part.own]) <= level.out_bytes)
        cg_cuda_pack_stream(cta, c, level, n_streams, part.own, level.out + at);
}

/* ---- all of them ---- */

template <uint32_t STEP, class Cta>
CG_LANE void cg_cuda_coding_block(Cta &cta, const cg_cuda_coding &coding)
{
    if constexpr (STEP == CG_CUDA_CODING_ESTIMATE)
        cg_cuda_estimate_block(cta, coding);
    else if constexpr (STEP == CG_CUDA_CODING_CODE)
        cg_cuda_code_block(cta, coding);
    else
        cg_cuda_pack_block(cta, coding);
}
#endif
