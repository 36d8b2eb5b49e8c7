/* codec/rans_lane.h - what one lane of rANS does: FORMAT.md's "Matrix of symbols".
 *
 * x is a lane's state. Its low 14 bits are a slot; the index whose frequencies cover that slot is
 * decoded next. Functions that decode a cell come first. Behind them come those that encode one,
 * which is the same backwards.
 *
 * Threads: pure functions. Shared with CUDA code.
 */
#ifndef CG_CODEC_RANS_LANE_H
#define CG_CODEC_RANS_LANE_H
#include "codec/lane.h"
#include "codec/rans.h"
#include <stdbool.h>

enum { CG_RANS_STATE_LOW = 1 << 16 }; /* states are in [2^16, 2^32) and start at 2^16 */

CG_LANE uint32_t cg_lane_slot(uint32_t x)
{
    return x & (CG_RANS_TOTAL - 1);
}

/* The index that a slot belongs to, searched upwards from index `from`, which must not be above it.
 * The search ends: the last cum is 2^14, above all slots. */
CG_LANE uint32_t cg_lane_find(const uint16_t *cum, uint32_t from, uint32_t slot)
{
    while (slot >= cum[from + 1])
        from++;
    return from;
}

/* The state after an index with this freq and cum was taken. It is to be renormalized next. */
CG_LANE uint32_t cg_lane_advance(uint32_t x, uint32_t freq, uint32_t cum)
{
    return freq * (x >> CG_RANS_TOTAL_BITS) + cg_lane_slot(x) - cum;
}

/* Renormalization: a lane whose state has become too small takes the stream's next word. */
CG_LANE bool cg_lane_wants_word(uint32_t x)
{
    return x < CG_RANS_STATE_LOW;
}

CG_LANE uint32_t cg_lane_take_word(uint32_t x, uint32_t word)
{
    return x << 16 | word;
}

/* FORMAT.md's raw(n): the value. The caller shifts the state by n_bits and renormalizes it. */
CG_LANE uint32_t cg_lane_raw(uint32_t x, uint32_t n_bits)
{
    return x & ((1u << n_bits) - 1);
}

/* Of a class of signed symbols: the value of an index other than the escape. */
CG_LANE int32_t cg_lane_signed_value(uint32_t index)
{
    const int32_t half = (int32_t)((index + 1) / 2);
    return index % 2 != 0 ? half : -half;
}

/* Of an escape's raw(5): how many bits phase C takes; and the value, with those. */
CG_LANE uint32_t cg_lane_escape_bits(uint32_t raw)
{
    return raw & 15;
}

CG_LANE int32_t cg_lane_escape_value(uint32_t raw, uint32_t extra, uint32_t n_symbols)
{
    const uint32_t m = (1u << cg_lane_escape_bits(raw)) + extra;
    const int32_t magnitude = (int32_t)(m + (n_symbols - 2) / 2);
    return (raw & 16) != 0 ? -magnitude : magnitude;
}

/* Phase D: a value and its low bits. */
CG_LANE int32_t cg_lane_shifted(int32_t v, uint32_t shift, uint32_t raw)
{
    return v * (int32_t)(1u << shift) + (int32_t)raw;
}

/* Whether a value fits in a cell. A decoded one that does not is corruption. */
CG_LANE bool cg_lane_is_cell(int32_t v)
{
    return v >= INT16_MIN && v <= INT16_MAX;
}

/* ---- a cell, given the one of the next coarser level ---- */

CG_LANE uint32_t cg_lane_context(int32_t coarse)
{
    return coarse == 0 ? 0 : coarse == 1 || coarse == -1 ? 1 : 2;
}

typedef struct cg_lane_refined {
    int32_t value;
    uint32_t freq, cum;
} cg_lane_refined;

/* refine: of the class and the context, cg_rans_class's. */
CG_LANE cg_lane_refined cg_lane_refine(uint32_t refine, int32_t coarse, uint32_t slot)
{
    const uint32_t end0 = refine & 0xffff, end1 = end0 + (refine >> 16);
    const int32_t away = coarse >= 0 ? 1 : -1, d = slot < end0 ? 0 : slot < end1 ? away : -away;
    cg_lane_refined r;
    r.cum = slot < end0 ? 0 : slot < end1 ? end0 : end1;
    r.freq = (slot < end0 ? end0 : slot < end1 ? end1 : (uint32_t)CG_RANS_TOTAL) - r.cum;
    r.value = CG_RANS_REFINE_STEP * coarse + d;
    return r;
}

/* ---- encoding: the same the other way round ---- */

/* What a cell is coded as. */
typedef struct cg_lane_coded {
    uint32_t index;
    uint32_t escape_raw; /* phase B */
    uint32_t extra_bits; /* phase C: 0 = none */
    uint32_t extra_raw;
    uint32_t shift_raw; /* phase D */
    bool is_escape;
} cg_lane_coded;

/* Number of the highest bit of m > 0. */
CG_LANE uint32_t cg_lane_top_bit(uint32_t m)
{
#if defined(__CUDA_ARCH__)
    return 31u - (uint32_t)__clz((int)m);
#else
    return 31u - (uint32_t)__builtin_clz(m);
#endif
}

/* A cell of a class with this shift, number of symbols, escape_bits and top (cg_rans_class). */
CG_LANE cg_lane_coded cg_lane_code(uint32_t shift, uint32_t n_symbols, uint32_t escape_bits,
                                   uint32_t top, int32_t cell)
{
    const int32_t v = cell >> shift; /* arithmetic: floor */
    const uint32_t escape = n_symbols - 1, largest = (n_symbols - 2) / 2;
    cg_lane_coded c = {0, 0, 0, 0, cg_lane_raw((uint32_t)cell, shift), false};
    if (escape_bits == 8) {
        const int32_t i = (int32_t)top - v;
        c.is_escape = i < 0 || i >= (int32_t)escape;
        c.index = c.is_escape ? escape : (uint32_t)i;
        c.escape_raw = (uint32_t)v;
        return c;
    }
    const uint32_t magnitude = (uint32_t)(v < 0 ? -v : v);
    if (magnitude <= largest) {
        c.index = v > 0 ? 2 * magnitude - 1 : 2 * magnitude;
        return c;
    }
    /* Exp-Golomb: m has a highest bit, whose number is phase B's, and the bits below it are phase
     * C's. */
    const uint32_t m = magnitude - largest; /* 1 ... 32768 */
    c.is_escape = true;
    c.index = escape;
    c.extra_bits = cg_lane_top_bit(m);
    c.extra_raw = m - (1u << c.extra_bits);
    c.escape_raw = c.extra_bits | (v < 0 ? 16u : 0u);
    return c;
}

/* What a cell is coded as, given its coarse one. 0: it is three times that. 1: one step further
 * from zero. 2: one step back. Where the coarse one is 0: 1 means 1, and 2 means -1. */
CG_LANE uint32_t cg_lane_refinement(int32_t cell, int32_t coarse)
{
    const int32_t d = cell - CG_RANS_REFINE_STEP * coarse;
    return d == 0 ? 0 : (d > 0) == (coarse >= 0) ? 1 : 2;
}

/* A part of the slots: freq of them, from cum on. */
typedef struct cg_lane_slots {
    uint32_t freq, cum;
} cg_lane_slots;

/* Those of what cg_lane_refinement() says. refine: of the class and the context. */
CG_LANE cg_lane_slots cg_lane_refinement_slots(uint32_t refine, uint32_t refinement)
{
    const uint32_t end0 = refine & 0xffff, end1 = end0 + (refine >> 16);
    cg_lane_slots slots;
    slots.cum = refinement == 0 ? 0 : refinement == 1 ? end0 : end1;
    slots.freq = (refinement == 0   ? end0
                  : refinement == 1 ? end1
                                    : (uint32_t)CG_RANS_TOTAL) -
                 slots.cum;
    return slots;
}

/* A cell of the next coarser level, whose step is three times as large: to nearest; thirds have no
 * ties. 43691 = (2^17 + 1) / 3, which is 2^17 / 3 plus a third. That adds at most 1/12 to a cell's
 * third, and only a sixth would change what it is rounded to. */
CG_LANE int32_t cg_lane_coarsen(int32_t cell)
{
    return (cell * 43691 + (1 << 16)) >> 17;
}

/* Whether a state must give its low 16 bits away, as a word, before it takes an index, or raw bits:
 * otherwise what cg_lane_put() makes of it would not fit in 32 bits. One word is enough: what is
 * left is below 2^16. */
CG_LANE bool cg_lane_gives_word(uint32_t x, uint32_t freq)
{
    return x >> (32 - CG_RANS_TOTAL_BITS) >= freq;
}

CG_LANE bool cg_lane_gives_word_raw(uint32_t x, uint32_t n_bits)
{
    return (uint64_t)x >= (uint64_t)1 << (32 - n_bits);
}

/* The inverse of cg_lane_advance(): x = q * freq + r becomes q * 2^14 + slot cum + r. */
CG_LANE uint32_t cg_lane_put(uint32_t x, uint32_t freq, uint32_t cum)
{
    return (x / freq << CG_RANS_TOTAL_BITS) + x % freq + cum;
}

CG_LANE uint32_t cg_lane_put_raw(uint32_t x, uint32_t value, uint32_t n_bits)
{
    return x << n_bits | value;
}

/* ---- estimates ---- */

/* Of a strip's rows those are looked at whose number is the strip's, modulo this. */
CG_LANE uint32_t cg_lane_estimate_every(uint32_t n_rows)
{
    return n_rows < 16 ? 1 : 8;
}

/* cg_rans_choose_streams(). */
CG_LANE uint32_t cg_lane_choose_streams(uint64_t estimated_bits, uint64_t n_strips, uint64_t n_rows,
                                        uint32_t percent)
{
    const uint64_t unit_bytes = 100 * CG_RANS_STREAM_BYTES, max_streams = CG_RANS_MAX_STREAMS,
                   affordable = estimated_bits / 8 * percent / unit_bytes,
                   twice = estimated_bits / 8 * percent * 2 / unit_bytes,
                   even = (n_strips * n_rows * percent + CG_RANS_STREAM_ROWS - 1) /
                          CG_RANS_STREAM_ROWS,
                   more = even < twice ? even : twice, n = more > affordable ? more : affordable,
                   most = n_strips < max_streams ? n_strips : max_streams;
    if (n_strips == 0)
        return 0;
    return (uint32_t)(n < 1 ? 1 : n > most ? most : n);
}
#endif
