/* cuda/streams.cuh - kernels' bodies: rANS streams, a warp each.
 *
 * Cta is the thread block: cuda/cta.cuh on a GPU, an emulator in tests. A Sink says what becomes of
 * a strip's cells (cuda/sinks.cuh): strip() before its rows; store() of each row in order, which
 * returns whether the cell can be; where it REFINES, coarse() is the coarser cell of the row at
 * hand, and next_coarse() that of the next.
 */
#ifndef CG_CUDA_STREAMS_CUH
#define CG_CUDA_STREAMS_CUH
#include "codec/rans_lane.h"
#include "cuda/layout.h"

/* The words of a stream. Each lane has two of the 64 before it and two of the next 64, which are
 * fetched long before they are wanted. */
struct cg_cuda_words {
    const uint32_t *pairs;
    uint32_t n_words, at; /* at: the next word's number */
    uint32_t first;       /* number of the first word in held */
    uint32_t held, next;
    bool ended; /* this lane missed a word: its state is garbage from there on */
};

CG_LANE uint32_t cg_cuda_fetch(const cg_cuda_words *words, uint32_t first, uint32_t lane)
{
    const uint32_t pair = first / 2 + lane;
    return 2 * pair < words->n_words ? words->pairs[pair] : 0;
}

template <class Cta>
CG_LANE cg_cuda_words cg_cuda_words_open(Cta &cta, const uint8_t *stream, uint32_t n_bytes)
{
    cg_cuda_words words;
    words.pairs = (const uint32_t *)(stream + 4 * CG_RANS_LANES);
    words.n_words = (n_bytes - 4 * CG_RANS_LANES) / 2;
    words.at = words.first = 0;
    words.ended = false;
    words.held = cg_cuda_fetch(&words, 0, cta.lane());
    words.next = cg_cuda_fetch(&words, 2 * CG_RANS_LANES, cta.lane());
    return words;
}

/* Renormalizes the lanes that take part, in their order. */
template <class Cta>
CG_LANE uint32_t cg_cuda_renormalize(Cta &cta, cg_cuda_words *words, bool takes_part, uint32_t x)
{
    const bool wants = takes_part && cg_lane_wants_word(x);
    const uint32_t wanting = cta.ballot(wants);
    const uint32_t number = words->at + cta.count(wanting & ((1u << cta.lane()) - 1));
    const uint32_t pair = (number - words->first) / 2;
    const uint32_t held = cta.shuffle(words->held, pair % CG_RANS_LANES),
                   next = cta.shuffle(words->next, pair % CG_RANS_LANES);
    const uint32_t both = pair < CG_RANS_LANES ? held : next;
    if (wants) {
        const bool is_there = number < words->n_words;
        words->ended |= !is_there;
        x = is_there ? cg_lane_take_word(x, number % 2 != 0 ? both >> 16 : both & 0xffff)
                     : (uint32_t)CG_RANS_STATE_LOW;
    }
    words->at += cta.count(wanting);
    if (words->at - words->first >= 2 * CG_RANS_LANES) {
        words->first += 2 * CG_RANS_LANES;
        words->held = words->next;
        words->next = cg_cuda_fetch(words, words->first + 2 * CG_RANS_LANES, cta.lane());
    }
    return x;
}

template <class Cta>
CG_LANE uint32_t cg_cuda_take_raw(Cta &cta, cg_cuda_words *words, bool takes_part, uint32_t n_bits,
                                  uint32_t *x)
{
    const uint32_t raw = takes_part ? cg_lane_raw(*x, n_bits) : 0;
    *x = cg_cuda_renormalize(cta, words, takes_part, takes_part ? *x >> n_bits : *x);
    return raw;
}

/* One row of a strip: phases A to D. */
template <class Cta>
CG_LANE int32_t cg_cuda_take_row(Cta &cta, const cg_cuda_class *cls, bool has_column,
                                 bool any_shift, cg_cuda_words *words, uint32_t *x)
{
    const uint32_t slot = cg_lane_slot(*x);
    const uint32_t i = cg_lane_find(cls->cum, cls->first[slot >> CG_CUDA_BUCKET_SHIFT], slot);
    const uint32_t cum = cls->cum[i], freq = cls->cum[i + 1] - cum;
    *x = cg_cuda_renormalize(cta, words, has_column,
                             has_column ? cg_lane_advance(*x, freq, cum) : *x);
    int32_t v = cls->escape_bits == 8 ? (int32_t)cls->top - (int32_t)i : cg_lane_signed_value(i);
    const bool is_escape = has_column && i == cls->n_symbols - 1u;
    if (cta.ballot(is_escape) != 0) {
        const uint32_t raw = cg_cuda_take_raw(cta, words, is_escape, cls->escape_bits, x);
        const bool is_signed = is_escape && cls->escape_bits == 5;
        const uint32_t n_bits = is_signed ? cg_lane_escape_bits(raw) : 0;
        const uint32_t extra = cg_cuda_take_raw(cta, words, n_bits > 0, n_bits, x);
        v = is_signed   ? cg_lane_escape_value(raw, extra, cls->n_symbols)
            : is_escape ? (int32_t)raw
                        : v;
    }
    if (any_shift) {
        const bool shifts = has_column && cls->shift > 0;
        const uint32_t raw = cg_cuda_take_raw(cta, words, shifts, cls->shift, x);
        v = shifts ? cg_lane_shifted(v, cls->shift, raw) : v;
    }
    return v;
}

template <class Cta>
CG_LANE int32_t cg_cuda_refine_row(Cta &cta, const cg_cuda_class *cls, bool has_column,
                                   int32_t coarse, cg_cuda_words *words, uint32_t *x)
{
    const cg_lane_refined r =
        cg_lane_refine(cls->refine[cg_lane_context(coarse)], coarse, cg_lane_slot(*x));
    *x = cg_cuda_renormalize(cta, words, has_column,
                             has_column ? cg_lane_advance(*x, r.freq, r.cum) : *x);
    return r.value;
}

/* tables: where strips are; lane_classes: what their class_at counts from. Returns whether a cell
 * could not be. */
template <class Cta, class Sink>
CG_LANE bool cg_cuda_decode_strip(Cta &cta, const cg_cuda_class *classes, const cg_cuda_streams *m,
                                  const cg_cuda_strip strip, const uint8_t *lane_classes,
                                  Sink &sink, cg_cuda_words *words, uint32_t *x)
{
    const uint32_t lane = cta.lane();
    const bool has_column = lane < strip.n_lanes;
    uint32_t number = m->n_classes > 1 && has_column ? lane_classes[strip.class_at + lane] : 0;
    number = number < m->n_classes ? number : 0;
    const cg_cuda_class *cls = &classes[number];
    bool is_bad = false;
    sink.strip(strip, lane);
    const uint32_t n_rows = m->n_rows;
    if constexpr (Sink::REFINES) {
        if (strip.is_refined != 0) {
            int32_t coarse = has_column && n_rows > 0 ? sink.coarse() : 0;
            for (uint32_t row = 0; row < n_rows; row++) {
                const int32_t ahead = has_column && row + 1 < n_rows ? sink.next_coarse() : 0;
                const int32_t v = cg_cuda_refine_row(cta, cls, has_column, coarse, words, x);
                is_bad |= has_column && !cg_lane_is_cell(v);
                is_bad |= !sink.store(row, v);
                coarse = ahead;
            }
            return is_bad;
        }
    }
    const bool any_shift = cta.ballot(has_column && cls->shift > 0) != 0;
    for (uint32_t row = 0; row < n_rows; row++) {
        const int32_t v = cg_cuda_take_row(cta, cls, has_column, any_shift, words, x);
        is_bad |= has_column && !cg_lane_is_cell(v);
        is_bad |= !sink.store(row, v);
    }
    return is_bad;
}

/* A thread block of a pass: CG_CUDA_STREAM_WARPS jobs, from number block * that on. tables, lane_
 * classes: blob, plan or chunk, as cg_cuda_streams says. Sink: made of the params, the matrix and a
 * lane. */
template <class Cta, class Sink, class Matrix>
CG_LANE void cg_cuda_decode_streams(Cta &cta, const cg_cuda_pass &pass,
                                    const cg_cuda_decode_params &params)
{
    const uint8_t *const plan = (const uint8_t *)params.plan_dev,
                         *const chunk = (const uint8_t *)params.chunk_dev,
                         *const tables = Sink::IS_EXACT ? plan : (const uint8_t *)params.blob_dev;
    const cg_cuda_stream_job *jobs =
        (const cg_cuda_stream_job *)(plan + pass.jobs_at) + cta.block() * CG_CUDA_STREAM_WARPS;

    /* All jobs of a thread block are coded with the same classes. */
    const uint64_t tables_at = Sink::IS_EXACT ? jobs[0].tables_at : pass.tables_at;
    const uint32_t tables_bytes = Sink::IS_EXACT ? jobs[0].tables_bytes : pass.tables_bytes;
    uint32_t *const shared = (uint32_t *)cta.shared();
    for (uint32_t i = cta.thread(); i < tables_bytes / 4; i += CG_CUDA_STREAM_THREADS)
        shared[i] = ((const uint32_t *)(tables + tables_at))[i];
    cta.barrier();

    const cg_cuda_stream_job job = jobs[cta.thread() / CG_RANS_LANES];
    if (job.matrix_at == 0)
        return;
    const Matrix *matrix = (const Matrix *)(plan + job.matrix_at);
    const cg_cuda_streams *m = &matrix->streams;
    const cg_cuda_strip *strips = (const cg_cuda_strip *)(tables + m->strips_at);
    const uint8_t *lane_classes =
        (Sink::IS_EXACT ? chunk : (const uint8_t *)params.blob_dev) + m->classes_at;
    const uint8_t *const stream = chunk + job.stream_at;
    uint32_t x = ((const uint32_t *)stream)[cta.lane()];
    bool is_bad = cg_lane_wants_word(x);
    cg_cuda_words words = cg_cuda_words_open(cta, stream, job.stream_bytes);
    Sink sink(params, *matrix);
    for (uint32_t s = job.stream; s < m->n_strips; s += m->n_streams)
        is_bad |= cg_cuda_decode_strip(cta, (const cg_cuda_class *)shared, m, strips[s],
                                       lane_classes, sink, &words, &x);
    /* rANS ends where the encoder began: a cheap check of the whole stream. */
    is_bad |= words.at != words.n_words || x != CG_RANS_STATE_LOW;
    if (words.ended || is_bad)
        cta.raise(params.status_dev, words.ended ? CG_ERR_TRUNCATED : CG_ERR_CORRUPT);
    if (sink.is_outside)
        cta.raise(params.status_dev, CG_ERR_INVALID_ARGUMENT);
}
#endif
