/* Strips in plain C: FORMAT.md's "Matrix of symbols" as it stands there, and what the other strips
 * are tested against. Compiled with CG_RANS_STRIPS the name of the table. */
#include "codec/rans_cells.h"

static cg_status decode_strip(const cg_rans_class *classes, const cg_rans_strip *strip,
                              size_t n_rows, uint32_t states[CG_RANS_LANES], cg_word_reader *words)
{
    const cg_rans_class *cls[CG_RANS_LANES];
    cg_word_reader in = *words; /* a copy, which the compiler may hold in registers */
    uint32_t shifted = 0;
    for (uint32_t lane = 0; lane < strip->n_lanes; lane++) {
        cls[lane] = &classes[strip->lane_class[lane]];
        shifted |= (uint32_t)(cls[lane]->shift > 0) << lane;
    }
    for (size_t row = 0; row < n_rows; row++) {
        int16_t *cells = strip->cells + row * strip->row_stride;
        uint32_t escaped = 0;
        for (uint32_t lane = 0; lane < strip->n_lanes; lane++) {
            const cg_rans_class *c = cls[lane];
            const uint32_t x = states[lane], slot = cg_lane_slot(x);
            /* A bucket holds few indices, and the first is mostly right. */
            const uint32_t i = cg_lane_find(c->cum, c->first[slot >> CG_RANS_BUCKET_SHIFT], slot);
            states[lane] = renormalize(cg_lane_advance(x, c->freq[i], c->cum[i]), &in);
            /* Of an escape not yet the value: the phases below make it. */
            cells[lane] = c->value[i];
            escaped |= (uint32_t)(i == c->n_symbols - 1u) << lane;
        }
        if ((escaped | shifted) != 0) {
            int32_t v[CG_RANS_LANES];
            for (uint32_t lane = 0; lane < strip->n_lanes; lane++)
                v[lane] = cells[lane];
            if (escaped != 0)
                take_escapes(classes, strip, escaped, v, states, &in);
            for (uint32_t left = shifted; left != 0; left &= left - 1) {
                const unsigned lane = (unsigned)__builtin_ctz(left);
                v[lane] = cg_lane_shifted(v[lane], cls[lane]->shift,
                                          take_raw(&states[lane], &in, cls[lane]->shift));
            }
            for (uint32_t left = escaped | shifted; left != 0; left &= left - 1) {
                const unsigned lane = (unsigned)__builtin_ctz(left);
                if (!cg_lane_is_cell(v[lane]))
                    return CG_ERR_CORRUPT;
                cells[lane] = (int16_t)v[lane];
            }
        }
    }
    *words = in;
    return CG_OK;
}

static cg_status decode_refined_strip(const cg_rans_class *classes, const cg_rans_strip *strip,
                                      size_t n_rows, uint32_t states[CG_RANS_LANES],
                                      cg_word_reader *words)
{
    cg_word_reader in = *words;
    bool bad = false; /* told at the end: a branch in each lane would cost more */
    for (size_t row = 0; row < n_rows; row++) {
        const int16_t *coarse = strip->coarse + row * strip->coarse_stride;
        int16_t *cells = strip->cells + row * strip->row_stride;
        for (uint32_t lane = 0; lane < strip->n_lanes; lane++) {
            const uint32_t x = states[lane];
            const cg_lane_refined r = cg_lane_refine(
                classes[strip->lane_class[lane]].refine[cg_lane_context(coarse[lane])],
                coarse[lane], cg_lane_slot(x));
            states[lane] = renormalize(cg_lane_advance(x, r.freq, r.cum), &in);
            bad |= !cg_lane_is_cell(r.value);
            cells[lane] = (int16_t)r.value;
        }
    }
    *words = in;
    return bad ? CG_ERR_CORRUPT : CG_OK;
}

/* The inverse of a decoder's step: it renormalizes behind a symbol, so here the word goes out
 * before. */
static inline void put_symbol(uint32_t *state, uint8_t **at, uint32_t freq, uint32_t cum)
{
    if (cg_lane_gives_word(*state, freq)) {
        *at -= 2;
        cg_put_le(*at, 2, *state);
        *state >>= 16;
    }
    *state = cg_lane_put(*state, freq, cum);
}

/* The decoder's phases A, B, C, D of a row, lanes 0 to 31 in each: here everything the other way
 * round. */
static void encode_strip(const cg_rans_class *classes, const cg_rans_strip *strip, size_t n_rows,
                         uint32_t states[CG_RANS_LANES], uint8_t **at)
{
    for (size_t row = n_rows; row-- > 0;) {
        const int16_t *cells = strip->cells + row * strip->row_stride;
        uint32_t packed[CG_RANS_LANES];
        bool any_escape = false;
        for (uint32_t lane = strip->n_lanes; lane-- > 0;) {
            const cg_rans_class *cls = &classes[strip->lane_class[lane]];
            const cg_lane_coded coded = code_cell(cls, cells[lane]);
            packed[lane] = cls->packed[coded.index];
            any_escape |= coded.is_escape;
            /* Phase D; A waits until C and B are written. */
            if (cls->shift > 0)
                put_raw(&states[lane], at, coded.shift_raw, cls->shift);
        }
        if (any_escape)
            put_escapes(classes, strip, cells, states, at);
        for (uint32_t lane = strip->n_lanes; lane-- > 0;)
            put_symbol(&states[lane], at, packed[lane] & 0xffff, packed[lane] >> 16);
    }
}

static void encode_refined_strip(const cg_rans_class *classes, const cg_rans_strip *strip,
                                 size_t n_rows, uint32_t states[CG_RANS_LANES], uint8_t **at)
{
    for (size_t row = n_rows; row-- > 0;) {
        const int16_t *coarse = strip->coarse + row * strip->coarse_stride;
        const int16_t *cells = strip->cells + row * strip->row_stride;
        for (uint32_t lane = strip->n_lanes; lane-- > 0;) {
            const uint32_t i = cg_lane_refinement(cells[lane], coarse[lane]);
            const uint32_t packed =
                classes[strip->lane_class[lane]].refine[cg_lane_context(coarse[lane])];
            const cg_lane_slots slots = cg_lane_refinement_slots(packed, i);
            put_symbol(&states[lane], at, slots.freq, slots.cum);
        }
    }
}

static uint64_t estimate_refined_strip(const cg_rans_class *classes, const cg_rans_strip *strip,
                                       size_t n_rows)
{
    uint64_t cost = 0;
    for (size_t row = 0; row < n_rows; row++) {
        for (uint32_t lane = 0; lane < strip->n_lanes; lane++) {
            const int coarse = strip->coarse[row * strip->coarse_stride + lane];
            cost += classes[strip->lane_class[lane]].refine_cost[cg_lane_context(
                coarse)][cg_lane_refinement(strip->cells[row * strip->row_stride + lane], coarse)];
        }
    }
    return cost;
}

static uint64_t estimate_strip(const cg_rans_class *classes, const cg_rans_strip *strip,
                               size_t n_rows)
{
    uint64_t cost = 0;
    for (size_t row = 0; row < n_rows; row++) {
        const int16_t *cells = strip->cells + row * strip->row_stride;
        for (uint32_t lane = 0; lane < strip->n_lanes; lane++) {
            const cg_rans_class *cls = &classes[strip->lane_class[lane]];
            const cg_lane_coded c = code_cell(cls, cells[lane]);
            cost += cls->cost[c.index] + 256u * cls->shift;
            if (c.is_escape)
                cost += 256u * (cls->escape_bits + c.extra_bits);
        }
    }
    return cost;
}

const cg_rans_strips CG_RANS_STRIPS = {decode_strip,   decode_refined_strip,
                                       encode_strip,   encode_refined_strip,
                                       estimate_strip, estimate_refined_strip};
