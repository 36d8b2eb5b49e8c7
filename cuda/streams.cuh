/* cuda/streams.cuh - kernels' bodies: rANS streams, a warp each.
 *
 * Cta is the thread block: cuda/cta.cuh on a GPU, an emulator in tests. A Sink says what becomes of
 * a strip's cells (cuda/sinks.cuh). Its strip() is called before the rows, and store() for each row
 * in order. Where a value may be large store() is told so; elsewhere it need not look. Where the
 * Sink REFINES, coarse() gives the coarser cell of a row further on; and its rows come in runs, in
 * each of which a lane has another class. Rows come in pairs, so that the compiler knows what
 * differs between even and odd ones. A lane without a column takes part like the others, with
 * a class that leaves its state as it is. So a row has no branches but those for what is rare in a
 * whole warp.
 */
#ifndef CG_CUDA_STREAMS_CUH
#define CG_CUDA_STREAMS_CUH
#include "codec/bf16.h"
#include "codec/rans_lane.h"
#include "cuda/layout.h"

/* The words of a stream, which lanes take straight from the chunk's bytes: those of a row lie in
 * one or two lines of the cache. */
struct cg_cuda_words {
    const uint16_t *from;  /* the stream: its lanes' states come first */
    uint32_t at, last;     /* numbers of the next word and of the last one, counted from `from` */
    uint32_t lanes_before; /* a bit for each lane before this one */
};

template <class Cta>
CG_LANE cg_cuda_words cg_cuda_words_open(Cta &cta, const uint8_t *stream, uint32_t n_bytes)
{
    cg_cuda_words words;
    words.from = (const uint16_t *)stream;
    words.at = 2 * CG_RANS_LANES;
    words.last = n_bytes / 2 - 1;
    words.lanes_before = (1u << cta.lane()) - 1;
    return words;
}

/* Renormalizes the lanes that take part, in their order. Where no words are left, a lane gets the
 * last one again: what follows is garbage, and words->at, which is then past the end, tells. */
template <class Cta>
CG_LANE uint32_t cg_cuda_renormalize(Cta &cta, cg_cuda_words *words, bool takes_part, uint32_t x)
{
    const bool wants = takes_part && cg_lane_wants_word(x);
    const uint32_t wanting = cta.ballot(wants);
    const uint32_t number = words->at + cta.count(wanting & words->lanes_before);
    if (wants)
        x = cg_lane_take_word(x, words->from[number < words->last ? number : words->last]);
    words->at += cta.count(wanting);
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

/* The bucket of a state's slot: 2^23 + slot is a float whose mantissa is the slot, and the
 * difference is exact. */
CG_LANE uint32_t cg_cuda_bucket(uint32_t x)
{
    const float v =
        (0x1p23f + CG_RANS_TOTAL) - cg_f32_from_bits((x & (CG_RANS_TOTAL - 1)) | 0x4b000000u);
    return (cg_f32_bits(v) >> (23 - CG_CUDA_BUCKET_BITS)) - (127u << CG_CUDA_BUCKET_BITS);
}

/* Phases B and C, of lanes that are at their class's escape. */
template <class Cta>
CG_LANE int32_t cg_cuda_take_escape(Cta &cta, const cg_cuda_class *cls, bool is_escape,
                                    cg_cuda_words *words, uint32_t *x, int32_t v)
{
    const uint32_t raw = cg_cuda_take_raw(cta, words, is_escape, cls->escape_bits, x);
    const bool is_signed = is_escape && cls->escape_bits == 5;
    const uint32_t n_bits = is_signed ? cg_lane_escape_bits(raw) : 0;
    const uint32_t extra = cg_cuda_take_raw(cta, words, n_bits > 0, n_bits, x);
    return is_signed   ? cg_lane_escape_value(raw, extra, cls->n_symbols)
           : is_escape ? (int32_t)raw
                       : v;
}

/* A row's value, and whether it may be more than a class's indices say. */
struct cg_cuda_taken {
    int32_t value;
    bool is_rare; /* the same for all lanes */
};

/* One row of a strip: phases A to C. escape: the class's last index. */
template <bool IS_EXACT, class Cta>
CG_LANE cg_cuda_taken cg_cuda_take_row(Cta &cta, const cg_cuda_class *cls, uint32_t escape,
                                       cg_cuda_words *words, uint32_t *x)
{
    /* Above all entries that begin at the slot or before it; but below CG_CUDA_NO_ENTRY. */
    const uint32_t slot = *x << CG_CUDA_CUM_SHIFT | (CG_CUDA_CUM_ONE - 2);
    uint32_t i = cls->first[cg_cuda_bucket(*x)], entry = cls->entry[i];
    const uint32_t next = cls->entry[i + 1], is_next = slot >= next ? UINT32_MAX : 0;
    entry ^= (entry ^ next) & is_next; /* not by a condition: both are loaded at once */
    i -= is_next;
    const bool is_rare = cta.ballot(i >= escape) != 0;
    if (is_rare && i > escape) { /* more than two indices in the bucket */
        for (i = 0; slot >= cls->entry[i + 1];)
            i++;
        entry = cls->entry[i];
    }
    /* cg_lane_advance(), of x = x / 2^14 * 2^14 + slot. */
    const uint32_t high = *x >> CG_RANS_TOTAL_BITS;
    *x = cg_cuda_renormalize(cta, words, true,
                             (entry | (uint32_t)-CG_CUDA_CUM_ONE) * high +
                                 (*x + high - (entry >> CG_CUDA_CUM_SHIFT)));
    cg_cuda_taken taken = {IS_EXACT ? (int32_t)cls->top - (int32_t)i : cg_lane_signed_value(i),
                           is_rare};
    if (is_rare)
        taken.value = cg_cuda_take_escape(cta, cls, i == escape, words, x, taken.value);
    return taken;
}

/* A strip's row of a level alone. ROW: its number modulo 2, as it is in all that follow. */
template <uint32_t ROW, bool SHIFTS, class Cta, class Sink>
CG_LANE void cg_cuda_decode_row(Cta &cta, const cg_cuda_class *cls, uint32_t escape, uint32_t row,
                                Sink &sink, cg_cuda_words *words, uint32_t *x, bool *is_bad)
{
    cg_cuda_taken taken = cg_cuda_take_row<Sink::IS_EXACT>(cta, cls, escape, words, x);
    if (SHIFTS) {
        const uint32_t raw = cg_cuda_take_raw(cta, words, cls->shift > 0, cls->shift, x);
        taken.value = cg_lane_shifted(taken.value, cls->shift, raw);
        taken.is_rare = true;
    }
    if (!taken.is_rare) { /* apart, so that it looks at nothing */
        sink.template store<ROW>(row, taken.value, false, is_bad);
        return;
    }
    *is_bad |= !cg_lane_is_cell(taken.value);
    sink.template store<ROW>(row, taken.value, true, is_bad);
}

/* Rows from first to end, of which there are some. A run may begin with an odd one. */
template <bool SHIFTS, class Cta, class Sink>
CG_LANE void cg_cuda_decode_rows(Cta &cta, const cg_cuda_class *cls, uint32_t first, uint32_t end,
                                 Sink &sink, cg_cuda_words *words, uint32_t *x, bool *is_bad)
{
    const uint32_t escape = cls->n_symbols - 1u;
    uint32_t row = first + first % 2;
    if (first % 2 != 0)
        cg_cuda_decode_row<1, SHIFTS>(cta, cls, escape, first, sink, words, x, is_bad);
    for (; row + 1 < end; row += 2) {
        cg_cuda_decode_row<0, SHIFTS>(cta, cls, escape, row, sink, words, x, is_bad);
        cg_cuda_decode_row<1, SHIFTS>(cta, cls, escape, row + 1, sink, words, x, is_bad);
    }
    if (row < end)
        cg_cuda_decode_row<0, SHIFTS>(cta, cls, escape, row, sink, words, x, is_bad);
}

/* What a strip's class_at counts from, and which class a class is in which run. */
struct cg_cuda_lane_classes {
    const uint8_t *of_columns;
    const uint64_t *by_factor;
    const cg_cuda_row_run *runs;
};

/* A strip that is refined, at a row: the lane's class in the row's run. */
struct cg_cuda_refining {
    const cg_cuda_class *classes;
    const cg_cuda_row_run *behind; /* the next run */
    cg_cuda_row_run next;          /* loaded long before it is needed */
    uint64_t by_factor;
    uint32_t number; /* of the class */
    uint32_t run_end;
    uint32_t refine[CG_RANS_REFINE_CONTEXTS];
    uint32_t range; /* of the values so far: of cells at most 16 bits */
};

CG_LANE void cg_cuda_next_run(cg_cuda_refining *at, bool has_column)
{
    at->run_end = at->next.end;
    if (has_column)
        at->number = (uint32_t)(at->by_factor >> at->next.factor_shift & 0xff);
    at->next = *at->behind++;
    CG_UNROLL
    for (int i = 0; i < CG_RANS_REFINE_CONTEXTS; i++)
        at->refine[i] = at->classes[at->number].refine[i];
}

/* A strip's row, given the coarse cells of it. */
template <uint32_t ROW, class Cta, class Sink>
CG_LANE void cg_cuda_refine_row(Cta &cta, cg_cuda_refining *at, uint32_t row, Sink &sink,
                                cg_cuda_words *words, uint32_t *x, int32_t coarse, bool *is_bad)
{
    if (row == at->run_end)
        cg_cuda_next_run(at, sink.has_column);
    const int32_t of_row = sink.has_column ? coarse : 0;
    const uint32_t context = cg_lane_context(of_row),
                   refine = cta.choose(context == 0, at->refine[0],
                                       cta.choose(context == 1, at->refine[1], at->refine[2]));
    const cg_lane_refined r = cg_lane_refine(refine, of_row, cg_lane_slot(*x));
    *x = cg_cuda_renormalize(cta, words, true, cg_lane_advance(*x, r.freq, r.cum));
    at->range |= (uint32_t)(r.value - INT16_MIN);
    sink.template store<ROW>(row, r.value, true, is_bad);
}

/* The coarse cells of four rows are asked for before the four rows that come first. For what is
 * loaded is copied when the old is no longer needed, and the copy waits. */
template <class Cta, class Sink>
CG_LANE void cg_cuda_refine_strip(Cta &cta, cg_cuda_refining *at, uint32_t n_rows, Sink &sink,
                                  cg_cuda_words *words, uint32_t *x, bool *is_bad)
{
    /* As they lie in memory: to widen them, too, the lane would wait. */
    int16_t coarse[] = {sink.coarse(0, 0), sink.coarse(0, 1), sink.coarse(0, 2), sink.coarse(0, 3)};
    uint32_t row = 0;
    for (; row + 3 < n_rows; row += 4) {
        const int16_t next[] = {sink.coarse(row, 4), sink.coarse(row, 5), sink.coarse(row, 6),
                                sink.coarse(row, 7)};
        cg_cuda_refine_row<0>(cta, at, row, sink, words, x, coarse[0], is_bad);
        cg_cuda_refine_row<1>(cta, at, row + 1, sink, words, x, coarse[1], is_bad);
        cg_cuda_refine_row<0>(cta, at, row + 2, sink, words, x, coarse[2], is_bad);
        cg_cuda_refine_row<1>(cta, at, row + 3, sink, words, x, coarse[3], is_bad);
        CG_UNROLL
        for (int i = 0; i < 4; i++)
            coarse[i] = next[i];
    }
    if (row < n_rows)
        cg_cuda_refine_row<0>(cta, at, row, sink, words, x, coarse[0], is_bad);
    if (row + 1 < n_rows)
        cg_cuda_refine_row<1>(cta, at, row + 1, sink, words, x, coarse[1], is_bad);
    if (row + 2 < n_rows)
        cg_cuda_refine_row<0>(cta, at, row + 2, sink, words, x, coarse[2], is_bad);
    *is_bad |= at->range > UINT16_MAX;
}

/* A run of a strip's rows. */
template <class Cta, class Sink>
CG_LANE void cg_cuda_decode_run(Cta &cta, const cg_cuda_class *cls, uint32_t first, uint32_t end,
                                Sink &sink, cg_cuda_words *words, uint32_t *x, bool *is_bad)
{
    if (cta.ballot(cls->shift > 0) != 0)
        cg_cuda_decode_rows<true>(cta, cls, first, end, sink, words, x, is_bad);
    else
        cg_cuda_decode_rows<false>(cta, cls, first, end, sink, words, x, is_bad);
}

template <class Cta, class Sink>
CG_LANE void cg_cuda_decode_strip(Cta &cta, const cg_cuda_class *classes, const cg_cuda_streams *m,
                                  const cg_cuda_strip strip,
                                  const cg_cuda_lane_classes lane_classes, Sink &sink,
                                  cg_cuda_words *words, uint32_t *x, bool *is_bad)
{
    const uint32_t lane = cta.lane();
    const bool has_column = lane < strip.n_lanes;
    uint32_t number = m->n_classes; /* of lanes without a column */
    if (has_column) {
        number = m->n_classes > 1 ? lane_classes.of_columns[strip.class_at + lane] : 0;
        number = number < m->n_classes ? number : 0;
    }
    sink.strip(strip, lane);
    if constexpr (Sink::REFINES) {
        const uint64_t by_factor = has_column ? lane_classes.by_factor[number] : 0;
        if (strip.is_refined != 0) {
            const cg_cuda_row_run *const runs = lane_classes.runs;
            cg_cuda_refining at = {classes, runs + 1, runs[0], by_factor, number, 0, {}, 0};
            cg_cuda_refine_strip(cta, &at, m->n_rows, sink, words, x, is_bad);
            return;
        }
        for (uint32_t r = 0, first = 0; r < m->n_runs; r++) {
            const cg_cuda_row_run run = lane_classes.runs[r];
            if (has_column)
                number = (uint32_t)(by_factor >> run.factor_shift & 0xff);
            cg_cuda_decode_run(cta, &classes[number], first, run.end, sink, words, x, is_bad);
            first = run.end;
        }
    } else {
        cg_cuda_decode_run(cta, &classes[number], 0, m->n_rows, sink, words, x, is_bad);
    }
}

/* A thread block of a pass: CG_CUDA_STREAM_WARPS jobs, from number block() * that on. tables, lane_
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
    uint8_t *const shared = (uint8_t *)cta.shared();
    for (uint32_t i = 16 * cta.thread(); i < tables_bytes; i += 16 * CG_CUDA_STREAM_THREADS)
        cta.copy16(shared + i, tables + tables_at + i);
    cta.wait_copies();
    cta.barrier();

    const cg_cuda_stream_job job = jobs[cta.thread() / CG_RANS_LANES];
    if (job.matrix_at == 0)
        return;
    const Matrix *matrix = (const Matrix *)(plan + job.matrix_at);
    const cg_cuda_streams *m = &matrix->streams;
    const cg_cuda_strip *strips = (const cg_cuda_strip *)(tables + m->strips_at);
    const uint8_t *const blob = (const uint8_t *)params.blob_dev;
    const cg_cuda_lane_classes lane_classes = {(Sink::IS_EXACT ? chunk : blob) + m->classes_at,
                                               (const uint64_t *)(blob + m->class_of_at),
                                               (const cg_cuda_row_run *)(plan + m->runs_at)};
    const uint8_t *const stream = chunk + job.stream_at;
    uint32_t x = ((const uint32_t *)stream)[cta.lane()];
    bool is_bad = cg_lane_wants_word(x);
    cg_cuda_words words = cg_cuda_words_open(cta, stream, job.stream_bytes);
    Sink sink(params, *matrix);
    for (uint32_t s = job.stream; s < m->n_strips; s += m->n_streams)
        cg_cuda_decode_strip(cta, (const cg_cuda_class *)shared, m, strips[s], lane_classes, sink,
                             &words, &x, &is_bad);
    /* rANS ends where the encoder began: a cheap check of the whole stream. */
    is_bad |= words.at != words.last + 1 || x != CG_RANS_STATE_LOW;
    const bool is_short = words.at > words.last + 1;
    if (is_short || is_bad)
        cta.raise(params.status_dev, is_short ? CG_ERR_TRUNCATED : CG_ERR_CORRUPT);
    if (sink.is_outside())
        cta.raise(params.status_dev, CG_ERR_INVALID_ARGUMENT);
}
#endif
