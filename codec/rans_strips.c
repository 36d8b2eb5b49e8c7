/* Strips in plain C: FORMAT.md's "Matrix of symbols" as it stands there, and what the other strips
 * are tested against. Compiled once per instruction set without AVX-512, with CG_RANS_STRIPS the
 * name of the table. */
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
            const uint32_t x = states[lane], slot = x & (CG_RANS_SCALE - 1);
            /* A bucket holds few indices, and the first is mostly right. */
            unsigned i = c->first[slot >> CG_RANS_BUCKET_SHIFT];
            while (slot >= c->cum[i + 1])
                i++;
            states[lane] =
                renormalize(c->freq[i] * (x >> CG_RANS_SCALE_BITS) + slot - c->cum[i], &in);
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
                v[lane] = v[lane] * (1 << cls[lane]->shift) +
                          (int32_t)take_raw(&states[lane], &in, cls[lane]->shift);
            }
            for (uint32_t left = escaped | shifted; left != 0; left &= left - 1) {
                const unsigned lane = (unsigned)__builtin_ctz(left);
                if (v[lane] < INT16_MIN || v[lane] > INT16_MAX)
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
            const uint32_t packed =
                classes[strip->lane_class[lane]].refine[refinement_context(coarse[lane])];
            const uint32_t end0 = packed & 0xffff, end1 = end0 + (packed >> 16);
            const uint32_t x = states[lane], slot = x & (CG_RANS_SCALE - 1);
            const uint32_t cum = slot < end0 ? 0 : slot < end1 ? end0 : end1;
            const uint32_t freq = (slot < end0 ? end0 : slot < end1 ? end1 : CG_RANS_SCALE) - cum;
            const int away = coarse[lane] >= 0 ? 1 : -1;
            const int v = CG_RANS_REFINE_STEP * coarse[lane] + (slot < end0   ? 0
                                                                : slot < end1 ? away
                                                                              : -away);
            states[lane] = renormalize(freq * (x >> CG_RANS_SCALE_BITS) + slot - cum, &in);
            bad |= v < INT16_MIN || v > INT16_MAX;
            cells[lane] = (int16_t)v;
        }
    }
    *words = in;
    return bad ? CG_ERR_CORRUPT : CG_OK;
}

static inline void put_symbol(uint32_t *state, uint8_t **at, uint32_t freq, uint32_t cum)
{
    if (*state >> (32 - CG_RANS_SCALE_BITS) >= freq) {
        *at -= 2;
        cg_put_le(*at, 2, *state);
        *state >>= 16;
    }
    *state = (*state / freq << CG_RANS_SCALE_BITS) + *state % freq + cum;
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
            const coded_cell coded = code_cell(cls, cells[lane]);
            packed[lane] = cls->packed[coded.index];
            any_escape |= coded.is_escape;
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
            const refined_cell c = refine_cell(cells[lane], coarse[lane]);
            const uint32_t packed = classes[strip->lane_class[lane]].refine[c.context];
            const uint32_t ends[4] = {0, packed & 0xffff, (packed & 0xffff) + (packed >> 16),
                                      CG_RANS_SCALE};
            put_symbol(&states[lane], at, ends[c.index + 1] - ends[c.index], ends[c.index]);
        }
    }
}

static uint64_t estimate_refined_strip(const cg_rans_class *classes, const cg_rans_strip *strip,
                                       size_t n_rows)
{
    uint64_t cost = 0;
    for (size_t row = 0; row < n_rows; row++) {
        for (uint32_t lane = 0; lane < strip->n_lanes; lane++) {
            const refined_cell c = refine_cell(strip->cells[row * strip->row_stride + lane],
                                               strip->coarse[row * strip->coarse_stride + lane]);
            cost += classes[strip->lane_class[lane]].refine_cost[c.context][c.index];
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
            const coded_cell c = code_cell(cls, cells[lane]);
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
