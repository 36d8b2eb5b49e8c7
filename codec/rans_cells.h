/* codec/rans_cells.h - one cell of a matrix of symbols, as rANS codes it, inside of rans_strips*.c.
 *
 * FORMAT.md's "Matrix of symbols", lane by lane: raw bits, escapes, refinement. The AVX-512 code
 * takes rare lanes, the escapes, through here, too. Threads: pure functions on the caller's memory.
 */
#ifndef CG_CODEC_RANS_CELLS_H
#define CG_CODEC_RANS_CELLS_H
#include "codec/cursor.h"
#include "codec/rans_strips.h"

static inline uint32_t renormalize(uint32_t state, cg_word_reader *words)
{
    if (state >= CG_RANS_STATE_LOW)
        return state;
    if (words->at == words->end) {
        words->ended = true;
        return CG_RANS_STATE_LOW;
    }
    state = state << 16 | (uint32_t)words->at[0] | (uint32_t)words->at[1] << 8;
    words->at += 2;
    return state;
}

static inline uint32_t take_raw(uint32_t *state, cg_word_reader *words, unsigned n_bits)
{
    const uint32_t value = *state & ((1u << n_bits) - 1);
    *state = renormalize(*state >> n_bits, words);
    return value;
}

/* Phases B and C of a row: v of the escaped lanes. */
static inline void take_escapes(const cg_rans_class *classes, const cg_rans_strip *strip,
                                uint32_t escaped, int32_t v[CG_RANS_LANES],
                                uint32_t states[CG_RANS_LANES], cg_word_reader *words)
{
    uint32_t n_bits[CG_RANS_LANES], has_magnitude = 0;
    for (uint32_t left = escaped; left != 0; left &= left - 1) {
        const unsigned lane = (unsigned)__builtin_ctz(left);
        const cg_rans_class *cls = &classes[strip->lane_class[lane]];
        const uint32_t raw = take_raw(&states[lane], words, cls->escape_bits);
        v[lane] = (int32_t)raw;
        n_bits[lane] = raw & 15;
        has_magnitude |= (uint32_t)(cls->escape_bits == 5) << lane;
    }
    for (uint32_t left = has_magnitude; left != 0; left &= left - 1) {
        const unsigned lane = (unsigned)__builtin_ctz(left);
        uint32_t m = 1u << n_bits[lane];
        if (n_bits[lane] > 0)
            m += take_raw(&states[lane], words, n_bits[lane]);
        const int32_t magnitude =
            (int32_t)(m + (classes[strip->lane_class[lane]].n_symbols - 2u) / 2);
        v[lane] = v[lane] & 16 ? -magnitude : magnitude;
    }
}

/* What a cell is coded as. */
typedef struct coded_cell {
    uint32_t index;
    uint32_t escape_raw; /* phase B */
    uint32_t extra_bits; /* phase C: 0 = none */
    uint32_t extra_raw;
    uint32_t shift_raw; /* phase D */
    bool is_escape;
} coded_cell;

static inline coded_cell code_cell(const cg_rans_class *cls, int cell)
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

/* What a cell is, given its coarse one: index 0 three times the coarse one, 1 away from zero from
 * there, 2 back towards it (where the coarse one is 0: 1 and -1). */
typedef struct refined_cell {
    unsigned context, index;
} refined_cell;

static inline unsigned refinement_context(int coarse)
{
    return coarse == 0 ? 0 : coarse == 1 || coarse == -1 ? 1 : 2;
}

static inline refined_cell refine_cell(int cell, int coarse)
{
    const int d = cell - CG_RANS_REFINE_STEP * coarse;
    return (refined_cell){refinement_context(coarse), d == 0                     ? 0
                                                      : (d > 0) == (coarse >= 0) ? 1
                                                                                 : 2};
}

static inline void put_raw(uint32_t *state, uint8_t **at, uint32_t value, unsigned n_bits)
{
    if ((uint64_t)*state >= (uint64_t)1 << (32 - n_bits)) {
        *at -= 2;
        cg_put_le(*at, 2, *state);
        *state >>= 16;
    }
    *state = *state << n_bits | value;
}

/* Phases B and C of a row, the other way round. */
static inline void put_escapes(const cg_rans_class *classes, const cg_rans_strip *strip,
                               const int16_t *cells, uint32_t states[CG_RANS_LANES], uint8_t **at)
{
    coded_cell coded[CG_RANS_LANES];
    for (uint32_t lane = strip->n_lanes; lane-- > 0;) {
        coded[lane] = code_cell(&classes[strip->lane_class[lane]], cells[lane]);
        if (coded[lane].extra_bits > 0)
            put_raw(&states[lane], at, coded[lane].extra_raw, coded[lane].extra_bits);
    }
    for (uint32_t lane = strip->n_lanes; lane-- > 0;) {
        if (coded[lane].is_escape)
            put_raw(&states[lane], at, coded[lane].escape_raw,
                    classes[strip->lane_class[lane]].escape_bits);
    }
}
#endif
