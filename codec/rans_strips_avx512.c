/* Strips on AVX-512: the 32 states of a stream are two registers, and what lanes look up is
 * gathered. Compiled once per instruction set that has it, with CG_RANS_STRIPS the name of the
 * table. */
#include "codec/rans_cells.h"

#include <immintrin.h>

/* 16 lanes of a strip. Lanes without a column have one symbol that takes every slot: their states
 * stay as they are. */
typedef struct lanes16 {
    __mmask16 columns, is_signed;
    __m512i end[3];         /* where the slots of index 0, 1 and 2 end */
    __m512i escape;         /* the first slot of the escape */
    __m512i last;           /* the escape's index */
    __m512i packed, bucket; /* where the class's tables begin, from classes: in u32 */
    __m512i first, cost;    /* in bytes */
    __m512i halved, top, shift;
} lanes16;

/* The u32s number `at` to at + 3 of four lanes' classes, the lanes 4 apart from `first` on. */
static inline __m512i load_tables(const cg_rans_class *classes, const uint8_t lane_class[16],
                                  unsigned first, size_t at)
{
    __m128i tables[4];
    for (unsigned i = 0; i < 4; i++)
        tables[i] = _mm_loadu_si128(
            (const void *)((const uint32_t *)(const void *)&classes[lane_class[first + 4 * i]] +
                           at));
    return _mm512_inserti32x4(
        _mm512_inserti32x4(_mm512_inserti32x4(_mm512_castsi128_si512(tables[0]), tables[1], 1),
                           tables[2], 2),
        tables[3], 3);
}

/* Three neighbouring u32 of the classes of 16 lanes, each in a register; what other lanes have is
 * anything. Runs of rows are short: gathers would take as long as a run's cells. */
static inline void load_three(const cg_rans_class *classes, const cg_rans_strip *strip,
                              uint32_t first_lane, size_t at, __m512i three_out[3])
{
    const uint32_t n = strip->n_lanes > first_lane ? strip->n_lanes - first_lane : 0;
    const uint8_t *lane_class = strip->lane_class + first_lane;
    uint8_t some[16] = {0};
    if (n < 16) {
        for (uint32_t i = 0; i < n; i++)
            some[i] = lane_class[i];
        lane_class = some;
    }
    const __m512i t[4] = {
        load_tables(classes, lane_class, 0, at), load_tables(classes, lane_class, 1, at),
        load_tables(classes, lane_class, 2, at), load_tables(classes, lane_class, 3, at)};
    /* In each quarter of the registers, 4 by 4 numbers are transposed. */
    const __m512i low01 = _mm512_unpacklo_epi32(t[0], t[1]),
                  low23 = _mm512_unpacklo_epi32(t[2], t[3]);
    three_out[0] = _mm512_unpacklo_epi64(low01, low23);
    three_out[1] = _mm512_unpackhi_epi64(low01, low23);
    three_out[2] =
        _mm512_unpacklo_epi64(_mm512_unpackhi_epi32(t[0], t[1]), _mm512_unpackhi_epi32(t[2], t[3]));
}

static inline lanes16 load_lanes(const cg_rans_class *classes, const cg_rans_strip *strip,
                                 uint32_t first_lane)
{
    const uint32_t n = strip->n_lanes > first_lane ? strip->n_lanes - first_lane : 0;
    const __m512i low8 = _mm512_set1_epi32(0xff);
    lanes16 l;
    l.columns = (__mmask16)(n < 16 ? (1u << n) - 1 : 0xffff);
    const __m512i k =
        _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(l.columns, strip->lane_class + first_lane));
    const __m512i base = _mm512_mullo_epi32(k, _mm512_set1_epi32(sizeof(cg_rans_class) / 4));
    const __m512i base_bytes = _mm512_slli_epi32(base, 2);
    l.packed = _mm512_add_epi32(base, _mm512_set1_epi32(offsetof(cg_rans_class, packed) / 4));
    l.bucket = _mm512_add_epi32(base, _mm512_set1_epi32(offsetof(cg_rans_class, bucket) / 4));
    l.first = _mm512_add_epi32(base_bytes, _mm512_set1_epi32(offsetof(cg_rans_class, first)));
    l.cost = _mm512_add_epi32(base_bytes, _mm512_set1_epi32(offsetof(cg_rans_class, cost)));
    /* shift, n_symbols, escape_bits and top are a class's first four bytes; the escape's first slot
     * and the frequencies of index 0, 1 and 2 come next. A class of two has 0 for the last. A lane
     * without a column has n_symbols 1, and zeros. */
    __m512i first[3];
    load_three(classes, strip, first_lane, 0, first);
    const __m512i head = _mm512_mask_mov_epi32(_mm512_set1_epi32(1 << 8), l.columns, first[0]);
    l.shift = _mm512_and_si512(head, low8);
    l.last =
        _mm512_sub_epi32(_mm512_and_si512(_mm512_srli_epi32(head, 8), low8), _mm512_set1_epi32(1));
    l.is_signed = _mm512_cmpeq_epi32_mask(_mm512_and_si512(_mm512_srli_epi32(head, 16), low8),
                                          _mm512_set1_epi32(5));
    l.halved = _mm512_maskz_set1_epi32(l.is_signed, 1);
    l.top = _mm512_srli_epi32(head, 24);
    const __m512i all_slots = _mm512_set1_epi32(CG_RANS_TOTAL);
    l.end[0] = _mm512_mask_srli_epi32(all_slots, l.columns, first[1], 16);
    l.end[1] = _mm512_mask_add_epi32(all_slots, l.columns, l.end[0],
                                     _mm512_and_si512(first[2], _mm512_set1_epi32(0xffff)));
    l.end[2] =
        _mm512_mask_add_epi32(all_slots, l.columns, l.end[1], _mm512_srli_epi32(first[2], 16));
    l.escape = _mm512_mask_and_epi32(all_slots, l.columns, first[1], _mm512_set1_epi32(0xffff));
    return l;
}

/* Of lanes at index 0, 1 (past0) and 2 (past1), which end there: where they begin, and how many
 * slots they have. */
static inline __m512i choose_slots(const __m512i end[3], __mmask16 past0, __mmask16 past1,
                                   __m512i *freq_out)
{
    const __m512i cum = _mm512_mask_mov_epi32(_mm512_maskz_mov_epi32(past0, end[0]), past1, end[1]);
    *freq_out = _mm512_sub_epi32(
        _mm512_mask_mov_epi32(_mm512_mask_mov_epi32(end[0], past0, end[1]), past1, end[2]), cum);
    return cum;
}

/* Phase A without its renormalization. Returns the values; *escaped_out the lanes whose value is
 * yet to come. */
static inline __m512i take_symbols(const cg_rans_class *classes, const lanes16 *l, __m512i *x,
                                   __mmask16 *escaped_out)
{
    const __m512i low16 = _mm512_set1_epi32(0xffff), one = _mm512_set1_epi32(1);
    const __m512i slot = _mm512_and_si512(*x, _mm512_set1_epi32(CG_RANS_TOTAL - 1));
    /* Most cells are 0, 1 or -1, index 0, 1 and 2: those need no look-up. */
    const __mmask16 past0 = _mm512_cmpge_epu32_mask(slot, l->end[0]),
                    past1 = _mm512_cmpge_epu32_mask(slot, l->end[1]),
                    others = _mm512_cmpge_epu32_mask(slot, l->end[2]);
    __m512i freq, past = _mm512_sub_epi32(slot, choose_slots(l->end, past0, past1, &freq));
    __m512i index = _mm512_mask_add_epi32(_mm512_maskz_mov_epi32(past0, one), past1, one, one);
    if (others != 0) {
        /* Gathers are what this waits for: one gives freq, cum and mostly the index. */
        const __m512i bucket = _mm512_srli_epi32(slot, CG_RANS_BUCKET_SHIFT),
                      low14 = _mm512_set1_epi32(CG_RANS_TOTAL - 1);
        const __m512i entry = _mm512_mask_i32gather_epi32(
            _mm512_setzero_si512(), others, _mm512_add_epi32(l->bucket, bucket), classes, 4);
        const __m512i cum = _mm512_and_si512(_mm512_srli_epi32(entry, 14), low14);
        index = _mm512_mask_srli_epi32(index, others, entry, 28);
        freq = _mm512_mask_and_epi32(freq, others, entry, low14);
        past = _mm512_mask_sub_epi32(past, others, slot, cum);
        const __mmask16 late = _mm512_cmpeq_epi32_mask(index, _mm512_set1_epi32(15));
        if (late != 0)
            index = _mm512_mask_and_epi32(
                index, late,
                _mm512_mask_i32gather_epi32(index, late, _mm512_add_epi32(l->first, bucket),
                                            classes, 1),
                _mm512_set1_epi32(0xff));
        /* The slot may lie behind the bucket's first index: those lanes go on. */
        for (;;) {
            const __mmask16 missed = _mm512_cmpge_epu32_mask(past, freq);
            if (missed == 0)
                break;
            index = _mm512_mask_add_epi32(index, missed, index, one);
            const __m512i packed = _mm512_mask_i32gather_epi32(
                entry, missed, _mm512_add_epi32(l->packed, index), classes, 4);
            past = _mm512_mask_sub_epi32(past, missed, slot, _mm512_srli_epi32(packed, 16));
            freq = _mm512_mask_and_epi32(freq, missed, packed, low16);
        }
    }
    /* Signed: (index + 1) / 2, negated for even indices; exponents: top - index. Negated is -1
     * or 0: xor with -1 and minus -1 is two's complement. */
    const __m512i negated = _mm512_sub_epi32(_mm512_and_si512(index, l->halved), one);
    __m512i v = _mm512_srlv_epi32(_mm512_add_epi32(index, l->halved), l->halved);
    v = _mm512_add_epi32(_mm512_sub_epi32(_mm512_xor_si512(v, negated), negated), l->top);
    *escaped_out = _mm512_cmpge_epu32_mask(slot, l->escape);
    *x =
        _mm512_add_epi32(_mm512_mullo_epi32(freq, _mm512_srli_epi32(*x, CG_RANS_TOTAL_BITS)), past);
    return v;
}

/* 16 words at `at`, of n_left that there are. */
static inline __m512i load_words(const uint8_t *at, size_t n_left)
{
    const __mmask16 there = (__mmask16)(n_left < 16 ? (1u << n_left) - 1 : 0xffff);
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, at));
}

/* Renormalizes 32 lanes. Where words are missing, they are zeros and words->ended is set. */
static inline void renormalize32(__m512i x[2], cg_word_reader *words)
{
    const __m512i low = _mm512_set1_epi32((int)CG_RANS_STATE_LOW);
    const __mmask16 need0 = _mm512_cmplt_epu32_mask(x[0], low),
                    need1 = _mm512_cmplt_epu32_mask(x[1], low);
    /* Words are taken in the order of lanes: those of the first register, then of the second. An
     * expand deals a register of words out to the lanes that want one. */
    const size_t n0 = (size_t)__builtin_popcount(need0), n = n0 + (size_t)__builtin_popcount(need1);
    const size_t n_left = (size_t)(words->end - words->at) / 2;
    __m512i words0, words1;
    if (n_left >= 32) {
        words0 =
            _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)words->at));
        words1 = _mm512_cvtepu16_epi32(
            _mm256_loadu_si256((const __m256i *)(const void *)(words->at + 2 * n0)));
        words->at += 2 * n;
    } else if (n <= n_left) {
        words0 = load_words(words->at, n_left);
        words1 = load_words(words->at + 2 * n0, n_left - n0);
        words->at += 2 * n;
    } else { /* some lanes miss a word: the stream will be refused */
        words0 = words1 = _mm512_setzero_si512();
        words->ended = true;
    }
    x[0] = _mm512_mask_or_epi32(x[0], need0, _mm512_slli_epi32(x[0], 16),
                                _mm512_maskz_expand_epi32(need0, words0));
    x[1] = _mm512_mask_or_epi32(x[1], need1, _mm512_slli_epi32(x[1], 16),
                                _mm512_maskz_expand_epi32(need1, words1));
}

/* Phase D of 16 lanes without its renormalization: what their values become. */
static inline __m512i take_shift(const lanes16 *l, __m512i v, __m512i *x)
{
    const __m512i ones = _mm512_set1_epi32(-1);
    const __m512i raw = _mm512_andnot_si512(_mm512_sllv_epi32(ones, l->shift), *x);
    *x = _mm512_srlv_epi32(*x, l->shift);
    return _mm512_or_si512(_mm512_sllv_epi32(v, l->shift), raw);
}

static inline __mmask16 past_int16(__m512i v)
{
    return _mm512_cmpneq_epi32_mask(_mm512_cvtepi16_epi32(_mm512_cvtepi32_epi16(v)), v);
}

static cg_status decode_strip(const cg_rans_class *classes, const cg_rans_strip *strip,
                              size_t n_rows, uint32_t states[CG_RANS_LANES], cg_word_reader *words)
{
    const lanes16 low = load_lanes(classes, strip, 0), high = load_lanes(classes, strip, 16);
    const __m512i shifts = _mm512_or_si512(low.shift, high.shift);
    const bool any_shift = _mm512_test_epi32_mask(shifts, shifts) != 0;
    cg_word_reader in = *words;
    __m512i x[2] = {_mm512_loadu_si512(states), _mm512_loadu_si512(states + 16)};
    for (size_t row = 0; row < n_rows; row++) {
        __mmask16 escaped_low, escaped_high;
        __m512i v[2];
        v[0] = take_symbols(classes, &low, &x[0], &escaped_low);
        v[1] = take_symbols(classes, &high, &x[1], &escaped_high);
        renormalize32(x, &in);
        const uint32_t escaped = escaped_low | (uint32_t)escaped_high << 16;
        /* Rare: lanes go through memory then, so that the loop keeps its states in registers. */
        if (escaped != 0) {
            int32_t lane_v[CG_RANS_LANES];
            for (unsigned i = 0; i < 2; i++) {
                _mm512_storeu_si512(states + 16 * i, x[i]);
                _mm512_storeu_si512(lane_v + 16 * i, v[i]);
            }
            take_escapes(classes, strip, escaped, lane_v, states, &in);
            for (unsigned i = 0; i < 2; i++) {
                x[i] = _mm512_loadu_si512(states + 16 * i);
                v[i] = _mm512_loadu_si512(lane_v + 16 * i);
            }
        }
        if (any_shift) {
            v[0] = take_shift(&low, v[0], &x[0]);
            v[1] = take_shift(&high, v[1], &x[1]);
            renormalize32(x, &in);
        }
        if ((any_shift || escaped != 0) && (past_int16(v[0]) | past_int16(v[1])) != 0)
            return CG_ERR_CORRUPT;
        int16_t *cells = strip->cells + row * strip->row_stride;
        _mm256_mask_storeu_epi16(cells, low.columns, _mm512_cvtepi32_epi16(v[0]));
        if (strip->n_lanes > 16)
            _mm256_mask_storeu_epi16(cells + 16, high.columns, _mm512_cvtepi32_epi16(v[1]));
    }
    _mm512_storeu_si512(states, x[0]);
    _mm512_storeu_si512(states + 16, x[1]);
    *words = in;
    return CG_OK;
}

/* Cells of 16 lanes. */
static inline __m512i load_cells(__mmask16 columns, const int16_t *cells)
{
    return _mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(columns, cells));
}

/* 16 lanes of a strip with coarse cells: where index 0 and index 1 end, by context. */
typedef struct refining16 {
    __mmask16 columns;
    __m512i end0[CG_RANS_REFINE_CONTEXTS], end1[CG_RANS_REFINE_CONTEXTS];
} refining16;

static inline refining16 load_refining(const cg_rans_class *classes, const cg_rans_strip *strip,
                                       uint32_t first_lane)
{
    const uint32_t n = strip->n_lanes > first_lane ? strip->n_lanes - first_lane : 0;
    __m512i packed[CG_RANS_REFINE_CONTEXTS];
    refining16 l;
    l.columns = (__mmask16)(n < 16 ? (1u << n) - 1 : 0xffff);
    load_three(classes, strip, first_lane, offsetof(cg_rans_class, refine) / 4, packed);
    for (unsigned c = 0; c < CG_RANS_REFINE_CONTEXTS; c++) {
        const __m512i own =
            _mm512_mask_mov_epi32(_mm512_set1_epi32(CG_RANS_TOTAL), l.columns, packed[c]);
        l.end0[c] = _mm512_and_si512(own, _mm512_set1_epi32(0xffff));
        l.end1[c] = _mm512_add_epi32(l.end0[c], _mm512_srli_epi32(own, 16));
    }
    return l;
}

/* The ends that coarse cells choose. */
static inline void choose_ends(const refining16 *l, __m512i coarse, __m512i end[3])
{
    const __m512i magnitude = _mm512_abs_epi32(coarse), one = _mm512_set1_epi32(1);
    const __mmask16 is_one = _mm512_cmpeq_epi32_mask(magnitude, one),
                    is_more = _mm512_cmpgt_epi32_mask(magnitude, one);
    end[0] = _mm512_mask_mov_epi32(_mm512_mask_mov_epi32(l->end0[0], is_one, l->end0[1]), is_more,
                                   l->end0[2]);
    end[1] = _mm512_mask_mov_epi32(_mm512_mask_mov_epi32(l->end1[0], is_one, l->end1[1]), is_more,
                                   l->end1[2]);
    end[2] = _mm512_set1_epi32(CG_RANS_TOTAL);
}

/* The cells of 16 lanes, without renormalization. */
static inline __m512i take_refined(const refining16 *l, __m512i coarse, __m512i *x)
{
    __m512i end[3], freq;
    choose_ends(l, coarse, end);
    const __m512i slot = _mm512_and_si512(*x, _mm512_set1_epi32(CG_RANS_TOTAL - 1));
    const __mmask16 past0 = _mm512_cmpge_epu32_mask(slot, end[0]),
                    past1 = _mm512_cmpge_epu32_mask(slot, end[1]);
    const __m512i cum = choose_slots(end, past0, past1, &freq);
    *x = _mm512_add_epi32(_mm512_mullo_epi32(freq, _mm512_srli_epi32(*x, CG_RANS_TOTAL_BITS)),
                          _mm512_sub_epi32(slot, cum));
    /* away from zero is up where the coarse cell is not negative */
    const __mmask16 down = past1 ^ _mm512_movepi32_mask(coarse), back = past0 & down;
    const __m512i three = _mm512_add_epi32(coarse, _mm512_add_epi32(coarse, coarse)),
                  one = _mm512_set1_epi32(1);
    return _mm512_mask_sub_epi32(_mm512_mask_add_epi32(three, past0, three, one), back, three, one);
}

static cg_status decode_refined_strip(const cg_rans_class *classes, const cg_rans_strip *strip,
                                      size_t n_rows, uint32_t states[CG_RANS_LANES],
                                      cg_word_reader *words)
{
    const refining16 low = load_refining(classes, strip, 0),
                     high = load_refining(classes, strip, 16);
    cg_word_reader in = *words;
    __mmask16 bad = 0;
    __m512i x[2] = {_mm512_loadu_si512(states), _mm512_loadu_si512(states + 16)};
    for (size_t row = 0; row < n_rows; row++) {
        const int16_t *coarse = strip->coarse + row * strip->coarse_stride;
        int16_t *cells = strip->cells + row * strip->row_stride;
        const __m512i v0 = take_refined(&low, load_cells(low.columns, coarse), &x[0]);
        const __m512i v1 = take_refined(&high, load_cells(high.columns, coarse + 16), &x[1]);
        renormalize32(x, &in);
        bad |= past_int16(v0) | past_int16(v1);
        _mm256_mask_storeu_epi16(cells, low.columns, _mm512_cvtepi32_epi16(v0));
        _mm256_mask_storeu_epi16(cells + 16, high.columns, _mm512_cvtepi32_epi16(v1));
    }
    _mm512_storeu_si512(states, x[0]);
    _mm512_storeu_si512(states + 16, x[1]);
    *words = in;
    return bad == 0 ? CG_OK : CG_ERR_CORRUPT;
}

/* What 16 cells are coded as, shifts apart; *escaped_out: those that are escaped. */
static inline __m512i index_cells(const lanes16 *l, __m512i cells, __mmask16 *escaped_out)
{
    const __m512i v = _mm512_srav_epi32(cells, l->shift), magnitude = _mm512_abs_epi32(v);
    const __mmask16 positive = _mm512_cmpgt_epi32_mask(v, _mm512_setzero_si512());
    __m512i index = _mm512_sub_epi32(l->top, v);
    index = _mm512_mask_add_epi32(index, l->is_signed, magnitude, magnitude);
    index = _mm512_mask_sub_epi32(index, l->is_signed & positive, index, _mm512_set1_epi32(1));
    /* Unsigned: an exponent above top is a negative index, and escaped, too. */
    *escaped_out = _mm512_mask_cmpge_epu32_mask(l->columns, index, l->last);
    return _mm512_min_epu32(index, l->last);
}

/* Writes the low words of the lanes that are full before `at`, lanes in order, and takes them out
 * of the states. */
static inline void emit32(__m512i x[2], __mmask16 full0, __mmask16 full1, uint8_t **at)
{
    const unsigned n0 = (unsigned)__builtin_popcount(full0),
                   n1 = (unsigned)__builtin_popcount(full1);
    *at -= 2 * (n0 + n1);
    _mm256_mask_storeu_epi16(*at, (__mmask16)((1u << n0) - 1),
                             _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(full0, x[0])));
    _mm256_mask_storeu_epi16(*at + 2 * n0, (__mmask16)((1u << n1) - 1),
                             _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(full1, x[1])));
    x[0] = _mm512_mask_srli_epi32(x[0], full0, x[0], 16);
    x[1] = _mm512_mask_srli_epi32(x[1], full1, x[1], 16);
}

/* x / freq, and the remainder: floats are off by one at most, since x / freq < 2^18. */
static inline __m512i divide(__m512i x, __m512i freq, __m512i *remainder_out)
{
    const __m512i one = _mm512_set1_epi32(1);
    __m512i q = _mm512_cvttps_epi32(_mm512_div_ps(_mm512_cvtepu32_ps(x), _mm512_cvtepi32_ps(freq)));
    __m512i r = _mm512_sub_epi32(x, _mm512_mullo_epi32(q, freq));
    const __mmask16 above = _mm512_cmplt_epi32_mask(r, _mm512_setzero_si512());
    q = _mm512_mask_sub_epi32(q, above, q, one);
    r = _mm512_mask_add_epi32(r, above, r, freq);
    const __mmask16 below = _mm512_cmpge_epi32_mask(r, freq);
    q = _mm512_mask_add_epi32(q, below, q, one);
    *remainder_out = _mm512_mask_sub_epi32(r, below, r, freq);
    return q;
}

/* Phase A of 32 lanes, the other way round. */
static inline void put_symbols(__m512i x[2], const __m512i freq[2], const __m512i cum[2],
                               uint8_t **at)
{
    __mmask16 full[2];
    for (unsigned i = 0; i < 2; i++)
        full[i] =
            _mm512_cmpge_epu32_mask(_mm512_srli_epi32(x[i], 32 - CG_RANS_TOTAL_BITS), freq[i]);
    emit32(x, full[0], full[1], at);
    for (unsigned i = 0; i < 2; i++) {
        __m512i r;
        const __m512i q = divide(x[i], freq[i], &r);
        x[i] =
            _mm512_add_epi32(_mm512_slli_epi32(q, CG_RANS_TOTAL_BITS), _mm512_add_epi32(r, cum[i]));
    }
}

/* Which of 16 cells are past index 0, and which past index 1. */
static inline void index_refined(__m512i cells, __m512i coarse, __mmask16 *past0_out,
                                 __mmask16 *past1_out)
{
    const __m512i d =
        _mm512_sub_epi32(cells, _mm512_add_epi32(coarse, _mm512_add_epi32(coarse, coarse)));
    *past0_out = _mm512_test_epi32_mask(d, d);
    /* back towards zero: the signs of d and of the coarse cell differ */
    *past1_out = *past0_out & (_mm512_movepi32_mask(d) ^ _mm512_movepi32_mask(coarse));
}

static void encode_refined_strip(const cg_rans_class *classes, const cg_rans_strip *strip,
                                 size_t n_rows, uint32_t states[CG_RANS_LANES], uint8_t **at)
{
    const refining16 lanes[2] = {load_refining(classes, strip, 0),
                                 load_refining(classes, strip, 16)};
    uint8_t *out = *at;
    __m512i x[2] = {_mm512_loadu_si512(states), _mm512_loadu_si512(states + 16)};
    for (size_t row = n_rows; row-- > 0;) {
        const int16_t *coarse_row = strip->coarse + row * strip->coarse_stride;
        const int16_t *cells = strip->cells + row * strip->row_stride;
        __m512i freq[2], cum[2];
        for (unsigned i = 0; i < 2; i++) {
            __m512i end[3];
            const __m512i coarse = load_cells(lanes[i].columns, coarse_row + 16 * i);
            __mmask16 past0, past1;
            index_refined(load_cells(lanes[i].columns, cells + 16 * i), coarse, &past0, &past1);
            choose_ends(&lanes[i], coarse, end);
            cum[i] = choose_slots(end, past0, past1, &freq[i]);
        }
        put_symbols(x, freq, cum, &out);
    }
    _mm512_storeu_si512(states, x[0]);
    _mm512_storeu_si512(states + 16, x[1]);
    *at = out;
}

/* Cells are counted by context and index, and a strip's counts are priced at its end: no look-up
 * for each cell. */
static uint64_t estimate_refined_strip(const cg_rans_class *classes, const cg_rans_strip *strip,
                                       size_t n_rows)
{
    uint64_t cost = 0;
    for (uint32_t first = 0; first < strip->n_lanes; first += 16) {
        const __m512i one = _mm512_set1_epi32(1);
        __m512i n[CG_RANS_REFINE_CONTEXTS][3] = {{_mm512_setzero_si512()}}; /* how often, by lane */
        const __mmask16 columns = load_refining(classes, strip, first).columns;
        for (size_t row = 0; row < n_rows; row++) {
            const __m512i coarse =
                load_cells(columns, strip->coarse + row * strip->coarse_stride + first);
            const __m512i magnitude = _mm512_abs_epi32(coarse);
            __mmask16 past0, past1;
            index_refined(load_cells(columns, strip->cells + row * strip->row_stride + first),
                          coarse, &past0, &past1);
            const __mmask16 index[3] = {columns & (__mmask16)~past0, past0 & (__mmask16)~past1,
                                        past1};
            const __mmask16 context[3] = {_mm512_testn_epi32_mask(coarse, coarse),
                                          _mm512_cmpeq_epi32_mask(magnitude, one),
                                          _mm512_cmpgt_epi32_mask(magnitude, one)};
            for (unsigned c = 0; c < CG_RANS_REFINE_CONTEXTS; c++) {
                for (unsigned i = 0; i < 3; i++)
                    n[c][i] = _mm512_mask_add_epi32(n[c][i], context[c] & index[i], n[c][i], one);
            }
        }
        for (unsigned c = 0; c < CG_RANS_REFINE_CONTEXTS; c++) {
            for (unsigned i = 0; i < 3; i++) {
                uint32_t lane_n[16];
                _mm512_storeu_si512(lane_n, n[c][i]);
                for (uint32_t lane = 0; lane < 16 && first + lane < strip->n_lanes; lane++)
                    cost += (uint64_t)lane_n[lane] *
                            classes[strip->lane_class[first + lane]].refine_cost[c][i];
            }
        }
    }
    return cost;
}

static void encode_strip(const cg_rans_class *classes, const cg_rans_strip *strip, size_t n_rows,
                         uint32_t states[CG_RANS_LANES], uint8_t **at)
{
    const lanes16 lanes[2] = {load_lanes(classes, strip, 0), load_lanes(classes, strip, 16)};
    const __m512i shifts = _mm512_or_si512(lanes[0].shift, lanes[1].shift),
                  low16 = _mm512_set1_epi32(0xffff);
    const bool any_shift = _mm512_test_epi32_mask(shifts, shifts) != 0;
    uint8_t *out = *at;
    __m512i x[2] = {_mm512_loadu_si512(states), _mm512_loadu_si512(states + 16)};
    for (size_t row = n_rows; row-- > 0;) {
        const int16_t *cells = strip->cells + row * strip->row_stride;
        __m512i c[2], freq[2], cum[2];
        __mmask16 escaped[2], full[2];
        for (unsigned i = 0; i < 2; i++) {
            const lanes16 *l = &lanes[i];
            c[i] = load_cells(l->columns, cells + 16 * i);
            const __m512i index = index_cells(l, c[i], &escaped[i]);
            const __m512i one = _mm512_set1_epi32(1), two = _mm512_set1_epi32(2);
            const __mmask16 others = _mm512_cmpgt_epi32_mask(index, two);
            cum[i] = choose_slots(l->end, _mm512_cmpge_epi32_mask(index, one),
                                  _mm512_cmpge_epi32_mask(index, two), &freq[i]);
            if (others != 0) {
                const __m512i packed = _mm512_mask_i32gather_epi32(
                    index, others, _mm512_add_epi32(l->packed, index), classes, 4);
                cum[i] = _mm512_mask_srli_epi32(cum[i], others, packed, 16);
                freq[i] = _mm512_mask_and_epi32(freq[i], others, packed, low16);
            }
        }
        /* D, then C and B, then A: the decoder's order the other way round, as in rans_strips.c. */
        if (any_shift) {
            for (unsigned i = 0; i < 2; i++) {
                const __m512i room = _mm512_sub_epi32(_mm512_set1_epi32(32), lanes[i].shift);
                const __m512i over = _mm512_srlv_epi32(x[i], room);
                full[i] = _mm512_test_epi32_mask(over, over);
            }
            emit32(x, full[0], full[1], &out);
            for (unsigned i = 0; i < 2; i++) {
                const __m512i kept = _mm512_sllv_epi32(_mm512_set1_epi32(-1), lanes[i].shift);
                x[i] = _mm512_or_si512(_mm512_sllv_epi32(x[i], lanes[i].shift),
                                       _mm512_andnot_si512(kept, c[i]));
            }
        }
        if ((escaped[0] | escaped[1]) != 0) {
            _mm512_storeu_si512(states, x[0]);
            _mm512_storeu_si512(states + 16, x[1]);
            put_escapes(classes, strip, cells, states, &out);
            x[0] = _mm512_loadu_si512(states);
            x[1] = _mm512_loadu_si512(states + 16);
        }
        put_symbols(x, freq, cum, &out);
    }
    _mm512_storeu_si512(states, x[0]);
    _mm512_storeu_si512(states + 16, x[1]);
    *at = out;
}

static uint64_t estimate_strip(const cg_rans_class *classes, const cg_rans_strip *strip,
                               size_t n_rows)
{
    uint64_t cost = 0;
    for (uint32_t first = 0; first < strip->n_lanes; first += 16) {
        const lanes16 l = load_lanes(classes, strip, first);
        cost += n_rows * 256 * (uint64_t)_mm512_reduce_add_epi32(l.shift);
        for (size_t row = 0; row < n_rows; row++) {
            const int16_t *cells = strip->cells + row * strip->row_stride + first;
            __mmask16 escaped;
            const __m512i index = index_cells(&l, load_cells(l.columns, cells), &escaped);
            const __m512i costs = _mm512_mask_i32gather_epi32(
                _mm512_setzero_si512(), l.columns,
                _mm512_add_epi32(l.cost, _mm512_slli_epi32(index, 1)), classes, 1);
            cost += (uint32_t)_mm512_reduce_add_epi32(
                _mm512_and_si512(costs, _mm512_set1_epi32(0xffff)));
            for (uint32_t left = escaped; left != 0; left &= left - 1) {
                const unsigned lane = (unsigned)__builtin_ctz(left);
                const cg_rans_class *cls = &classes[strip->lane_class[first + lane]];
                cost += 256u * (cls->escape_bits + code_cell(cls, cells[lane]).extra_bits);
            }
        }
    }
    return cost;
}

const cg_rans_strips CG_RANS_STRIPS = {decode_strip,   decode_refined_strip,
                                       encode_strip,   encode_refined_strip,
                                       estimate_strip, estimate_refined_strip};
