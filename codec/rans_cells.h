/* codec/rans_cells.h - one cell of a matrix of symbols, as rANS codes it, for rans_strips*.c.
 *
 * The rules of codec/rans_lane.h, lane by lane, in the order in which lanes take words. The AVX-512
 * and AVX2 code takes rare lanes, the escapes, through here, too. Threads: pure functions on the
 * caller's memory.
 */
#ifndef CG_CODEC_RANS_CELLS_H
#define CG_CODEC_RANS_CELLS_H
#include "codec/cursor.h"
#include "codec/rans_lane.h"
#include "codec/rans_strips.h"

static inline uint32_t renormalize(uint32_t state, cg_word_reader *words)
{
    if (!cg_lane_wants_word(state))
        return state;
    if (words->at == words->end) {
        /* Any state will do: the stream is refused. */
        words->ended = true;
        return CG_RANS_STATE_LOW;
    }
    state = cg_lane_take_word(state, (uint32_t)words->at[0] | (uint32_t)words->at[1] << 8);
    words->at += 2;
    return state;
}

static inline uint32_t take_raw(uint32_t *state, cg_word_reader *words, unsigned n_bits)
{
    const uint32_t value = cg_lane_raw(*state, n_bits);
    *state = renormalize(*state >> n_bits, words);
    return value;
}

/* Phases B and C of a row: v of the escaped lanes. */
static inline void take_escapes(const cg_rans_class *classes, const cg_rans_strip *strip,
                                uint32_t escaped, int32_t v[CG_RANS_LANES],
                                uint32_t states[CG_RANS_LANES], cg_word_reader *words)
{
    uint32_t has_magnitude = 0;
    for (uint32_t left = escaped; left != 0; left &= left - 1) {
        const unsigned lane = (unsigned)__builtin_ctz(left);
        const cg_rans_class *cls = &classes[strip->lane_class[lane]];
        v[lane] = (int32_t)take_raw(&states[lane], words, cls->escape_bits);
        /* Signed ones go on to phase C; of exponents this was all. */
        has_magnitude |= (uint32_t)(cls->escape_bits == 5) << lane;
    }
    /* Only now: all lanes take their words of phase B before any takes one of phase C. */
    for (uint32_t left = has_magnitude; left != 0; left &= left - 1) {
        const unsigned lane = (unsigned)__builtin_ctz(left);
        const uint32_t raw = (uint32_t)v[lane], n_bits = cg_lane_escape_bits(raw);
        const uint32_t extra = n_bits > 0 ? take_raw(&states[lane], words, n_bits) : 0;
        v[lane] = cg_lane_escape_value(raw, extra, classes[strip->lane_class[lane]].n_symbols);
    }
}

static inline cg_lane_coded code_cell(const cg_rans_class *cls, int cell)
{
    return cg_lane_code(cls->shift, cls->n_symbols, cls->escape_bits, cls->top, cell);
}

static inline void put_raw(uint32_t *state, uint8_t **at, uint32_t value, unsigned n_bits)
{
    if (cg_lane_gives_word_raw(*state, n_bits)) {
        *at -= 2;
        cg_put_le(*at, 2, *state);
        *state >>= 16;
    }
    *state = cg_lane_put_raw(*state, value, n_bits);
}

/* Phases B and C of a row, the other way round. */
static inline void put_escapes(const cg_rans_class *classes, const cg_rans_strip *strip,
                               const int16_t *cells, uint32_t states[CG_RANS_LANES], uint8_t **at)
{
    /* The last lane first, all of C before any of B. */
    cg_lane_coded coded[CG_RANS_LANES];
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
