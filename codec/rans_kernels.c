/* Compiled once per instruction set, with CG_RANS_KERNELS the name of the table: see
 * rans_kernels.h. The scalar code is FORMAT.md's "Matrix of symbols" as it stands there; the
 * AVX-512 code holds the 32 states in two registers. */
#include "codec/rans_kernels.h"

#include "codec/cursor.h"

#if defined(__AVX512BW__)
#include <immintrin.h>
#endif

static const uint32_t STATE_LOW = 1u << 16;

typedef struct word_reader {
    const uint8_t *at, *end;
    bool ended; /* a word was missing: the state is garbage from there on */
} word_reader;

static inline uint32_t renormalize(uint32_t state, word_reader *words)
{
    if (state >= STATE_LOW)
        return state;
    if (words->at == words->end) {
        words->ended = true;
        return STATE_LOW;
    }
    state = state << 16 | (uint32_t)words->at[0] | (uint32_t)words->at[1] << 8;
    words->at += 2;
    return state;
}

static inline uint32_t take_raw(uint32_t *state, word_reader *words, unsigned n_bits)
{
    const uint32_t value = *state & ((1u << n_bits) - 1);
    *state = renormalize(*state >> n_bits, words);
    return value;
}

/* Phases B and C of a row: v of the escaped lanes. */
static void take_escapes(const cg_rans_class *classes, const cg_rans_strip *strip, uint32_t escaped,
                         int32_t v[CG_RANS_LANES], uint32_t states[CG_RANS_LANES],
                         word_reader *words)
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

static coded_cell code_cell(const cg_rans_class *cls, int cell)
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
static void put_escapes(const cg_rans_class *classes, const cg_rans_strip *strip,
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

#if defined(__AVX512BW__)

/* 16 lanes of a strip. Lanes without a column have one symbol that takes every slot: their states
 * stay as they are. */
typedef struct lanes16 {
    __mmask16 columns, is_signed;
    __m512i freq0;          /* of index 0, whose cum is 0 */
    __m512i escape;         /* the first slot of the escape */
    __m512i last;           /* the escape's index */
    __m512i packed, bucket; /* where the class's tables begin, from classes: in u32 */
    __m512i first, cost;    /* in bytes */
    __m512i halved, top, shift;
} lanes16;

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
    /* shift, n_symbols, escape_bits and top are a class's first four bytes */
    const __m512i head =
        _mm512_mask_i32gather_epi32(_mm512_set1_epi32(1 << 8), l.columns, base, classes, 4);
    l.shift = _mm512_and_si512(head, low8);
    l.last =
        _mm512_sub_epi32(_mm512_and_si512(_mm512_srli_epi32(head, 8), low8), _mm512_set1_epi32(1));
    l.is_signed = _mm512_cmpeq_epi32_mask(_mm512_and_si512(_mm512_srli_epi32(head, 16), low8),
                                          _mm512_set1_epi32(5));
    l.halved = _mm512_maskz_set1_epi32(l.is_signed, 1);
    l.top = _mm512_srli_epi32(head, 24);
    const __m512i all_slots = _mm512_set1_epi32(CG_RANS_SCALE);
    l.freq0 = _mm512_mask_i32gather_epi32(all_slots, l.columns, l.packed, classes, 4);
    l.escape = _mm512_mask_i32gather_epi32(_mm512_slli_epi32(all_slots, 16), l.columns,
                                           _mm512_add_epi32(l.packed, l.last), classes, 4);
    l.escape = _mm512_srli_epi32(l.escape, 16);
    return l;
}

/* Phase A without its renormalization. Returns the values; *escaped_out the lanes whose value is
 * yet to come. */
static inline __m512i take_symbols(const cg_rans_class *classes, const lanes16 *l, __m512i *x,
                                   __mmask16 *escaped_out)
{
    const __m512i low16 = _mm512_set1_epi32(0xffff), one = _mm512_set1_epi32(1);
    const __m512i slot = _mm512_and_si512(*x, _mm512_set1_epi32(CG_RANS_SCALE - 1));
    const __mmask16 others =
        _mm512_cmpge_epu32_mask(slot, l->freq0);      /* index 0 is often the only one */
    __m512i v = l->top, freq = l->freq0, past = slot; /* past = slot - cum */
    if (others != 0) {
        const __m512i bucket = _mm512_srli_epi32(slot, CG_RANS_BUCKET_SHIFT);
        __m512i packed = _mm512_mask_i32gather_epi32(
            l->freq0, others, _mm512_add_epi32(l->bucket, bucket), classes, 4);
        __m512i index = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), others,
                                                    _mm512_add_epi32(l->first, bucket), classes, 1);
        index = _mm512_and_si512(index, _mm512_set1_epi32(0xff));
        for (;;) {
            past = _mm512_sub_epi32(slot, _mm512_srli_epi32(packed, 16));
            freq = _mm512_and_si512(packed, low16);
            const __mmask16 missed = _mm512_cmpge_epu32_mask(past, freq);
            if (missed == 0)
                break;
            index = _mm512_mask_add_epi32(index, missed, index, one);
            packed = _mm512_mask_i32gather_epi32(packed, missed, _mm512_add_epi32(l->packed, index),
                                                 classes, 4);
        }
        /* Signed: (index + 1) / 2, negated for even indices; exponents: top - index. */
        const __m512i negated = _mm512_sub_epi32(_mm512_and_si512(index, l->halved), one);
        v = _mm512_srlv_epi32(_mm512_add_epi32(index, l->halved), l->halved);
        v = _mm512_add_epi32(_mm512_sub_epi32(_mm512_xor_si512(v, negated), negated), l->top);
    }
    *escaped_out = _mm512_cmpge_epu32_mask(slot, l->escape);
    *x =
        _mm512_add_epi32(_mm512_mullo_epi32(freq, _mm512_srli_epi32(*x, CG_RANS_SCALE_BITS)), past);
    return v;
}

/* 16 words at `at`, of n_left that there are. */
static inline __m512i load_words(const uint8_t *at, size_t n_left)
{
    const __mmask16 there = (__mmask16)(n_left < 16 ? (1u << n_left) - 1 : 0xffff);
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, at));
}

/* Renormalizes 32 lanes. Where words are missing, they are zeros and words->ended is set. */
static inline void renormalize32(__m512i x[2], word_reader *words)
{
    const __m512i low = _mm512_set1_epi32((int)STATE_LOW);
    const __mmask16 need0 = _mm512_cmplt_epu32_mask(x[0], low),
                    need1 = _mm512_cmplt_epu32_mask(x[1], low);
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
    } else {
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
                              size_t n_rows, uint32_t states[CG_RANS_LANES], word_reader *words)
{
    const lanes16 low = load_lanes(classes, strip, 0), high = load_lanes(classes, strip, 16);
    const __m512i shifts = _mm512_or_si512(low.shift, high.shift);
    const bool any_shift = _mm512_test_epi32_mask(shifts, shifts) != 0;
    word_reader in = *words;
    __m512i x[2] = {_mm512_loadu_si512(states), _mm512_loadu_si512(states + 16)};
    for (size_t row = 0; row < n_rows; row++) {
        __mmask16 escaped_low, escaped_high;
        __m512i v[2];
        v[0] = take_symbols(classes, &low, &x[0], &escaped_low);
        v[1] = take_symbols(classes, &high, &x[1], &escaped_high);
        renormalize32(x, &in);
        const uint32_t escaped = escaped_low | (uint32_t)escaped_high << 16;
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
    const __m512i all_slots = _mm512_set1_epi32(CG_RANS_SCALE);
    const uint32_t n = strip->n_lanes > first_lane ? strip->n_lanes - first_lane : 0;
    refining16 l;
    l.columns = (__mmask16)(n < 16 ? (1u << n) - 1 : 0xffff);
    const __m512i k =
        _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(l.columns, strip->lane_class + first_lane));
    const __m512i base = _mm512_mullo_epi32(k, _mm512_set1_epi32(sizeof(cg_rans_class) / 4));
    for (unsigned c = 0; c < CG_RANS_REFINE_CONTEXTS; c++) {
        const __m512i at = _mm512_add_epi32(
            base, _mm512_set1_epi32((int)(offsetof(cg_rans_class, refine) / 4 + c)));
        const __m512i packed = _mm512_mask_i32gather_epi32(all_slots, l.columns, at, classes, 4);
        l.end0[c] = _mm512_and_si512(packed, _mm512_set1_epi32(0xffff));
        l.end1[c] = _mm512_add_epi32(l.end0[c], _mm512_srli_epi32(packed, 16));
    }
    return l;
}

/* The ends that coarse cells choose. */
static inline void choose_ends(const refining16 *l, __m512i coarse, __m512i *end0, __m512i *end1)
{
    const __m512i magnitude = _mm512_abs_epi32(coarse), one = _mm512_set1_epi32(1);
    const __mmask16 is_one = _mm512_cmpeq_epi32_mask(magnitude, one),
                    is_more = _mm512_cmpgt_epi32_mask(magnitude, one);
    *end0 = _mm512_mask_mov_epi32(_mm512_mask_mov_epi32(l->end0[0], is_one, l->end0[1]), is_more,
                                  l->end0[2]);
    *end1 = _mm512_mask_mov_epi32(_mm512_mask_mov_epi32(l->end1[0], is_one, l->end1[1]), is_more,
                                  l->end1[2]);
}

/* Of lanes at index 1 (past0 and not past1) and 2 (past1): where they begin and how many slots they
 * have. */
static inline __m512i choose_slots(__m512i end0, __m512i end1, __mmask16 past0, __mmask16 past1,
                                   __m512i *freq_out)
{
    const __m512i cum = _mm512_mask_mov_epi32(_mm512_maskz_mov_epi32(past0, end0), past1, end1);
    const __m512i end = _mm512_mask_mov_epi32(_mm512_mask_mov_epi32(end0, past0, end1), past1,
                                              _mm512_set1_epi32(CG_RANS_SCALE));
    *freq_out = _mm512_sub_epi32(end, cum);
    return cum;
}

/* The cells of 16 lanes, without renormalization. */
static inline __m512i take_refined(const refining16 *l, __m512i coarse, __m512i *x)
{
    __m512i end0, end1, freq;
    choose_ends(l, coarse, &end0, &end1);
    const __m512i slot = _mm512_and_si512(*x, _mm512_set1_epi32(CG_RANS_SCALE - 1));
    const __mmask16 past0 = _mm512_cmpge_epu32_mask(slot, end0),
                    past1 = _mm512_cmpge_epu32_mask(slot, end1);
    const __m512i cum = choose_slots(end0, end1, past0, past1, &freq);
    *x = _mm512_add_epi32(_mm512_mullo_epi32(freq, _mm512_srli_epi32(*x, CG_RANS_SCALE_BITS)),
                          _mm512_sub_epi32(slot, cum));
    /* away from zero is up where the coarse cell is not negative */
    const __mmask16 down = past1 ^ _mm512_movepi32_mask(coarse), back = past0 & down;
    const __m512i three = _mm512_add_epi32(coarse, _mm512_add_epi32(coarse, coarse)),
                  one = _mm512_set1_epi32(1);
    return _mm512_mask_sub_epi32(_mm512_mask_add_epi32(three, past0, three, one), back, three, one);
}

static cg_status decode_refined_strip(const cg_rans_class *classes, const cg_rans_strip *strip,
                                      size_t n_rows, uint32_t states[CG_RANS_LANES],
                                      word_reader *words)
{
    const refining16 low = load_refining(classes, strip, 0),
                     high = load_refining(classes, strip, 16);
    word_reader in = *words;
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
            _mm512_cmpge_epu32_mask(_mm512_srli_epi32(x[i], 32 - CG_RANS_SCALE_BITS), freq[i]);
    emit32(x, full[0], full[1], at);
    for (unsigned i = 0; i < 2; i++) {
        __m512i r;
        const __m512i q = divide(x[i], freq[i], &r);
        x[i] =
            _mm512_add_epi32(_mm512_slli_epi32(q, CG_RANS_SCALE_BITS), _mm512_add_epi32(r, cum[i]));
    }
}

/* Which of 16 cells are past index 0, and which past index 1. */
static inline void index_refined(__m512i cells, __m512i coarse, __mmask16 *past0_out,
                                 __mmask16 *past1_out)
{
    const __m512i d =
        _mm512_sub_epi32(cells, _mm512_add_epi32(coarse, _mm512_add_epi32(coarse, coarse)));
    *past0_out = _mm512_test_epi32_mask(d, d);
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
            __m512i end0, end1;
            const __m512i coarse = load_cells(lanes[i].columns, coarse_row + 16 * i);
            __mmask16 past0, past1;
            index_refined(load_cells(lanes[i].columns, cells + 16 * i), coarse, &past0, &past1);
            choose_ends(&lanes[i], coarse, &end0, &end1);
            cum[i] = choose_slots(end0, end1, past0, past1, &freq[i]);
        }
        put_symbols(x, freq, cum, &out);
    }
    _mm512_storeu_si512(states, x[0]);
    _mm512_storeu_si512(states + 16, x[1]);
    *at = out;
}

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
            const __mmask16 others = _mm512_test_epi32_mask(index, index);
            freq[i] = l->freq0;
            if (others != 0)
                freq[i] = _mm512_mask_i32gather_epi32(
                    freq[i], others, _mm512_add_epi32(l->packed, index), classes, 4);
            cum[i] = _mm512_srli_epi32(freq[i], 16);
            freq[i] = _mm512_and_si512(freq[i], low16);
        }
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

#else

static cg_status decode_strip(const cg_rans_class *classes, const cg_rans_strip *strip,
                              size_t n_rows, uint32_t states[CG_RANS_LANES], word_reader *words)
{
    const cg_rans_class *cls[CG_RANS_LANES];
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
            unsigned i = c->first[slot >> CG_RANS_BUCKET_SHIFT];
            while (slot >= c->cum[i + 1])
                i++;
            states[lane] =
                renormalize(c->freq[i] * (x >> CG_RANS_SCALE_BITS) + slot - c->cum[i], words);
            cells[lane] = c->value[i];
            escaped |= (uint32_t)(i == c->n_symbols - 1u) << lane;
        }
        if ((escaped | shifted) != 0) {
            int32_t v[CG_RANS_LANES];
            for (uint32_t lane = 0; lane < strip->n_lanes; lane++)
                v[lane] = cells[lane];
            if (escaped != 0)
                take_escapes(classes, strip, escaped, v, states, words);
            for (uint32_t left = shifted; left != 0; left &= left - 1) {
                const unsigned lane = (unsigned)__builtin_ctz(left);
                v[lane] = v[lane] * (1 << cls[lane]->shift) +
                          (int32_t)take_raw(&states[lane], words, cls[lane]->shift);
            }
            for (uint32_t left = escaped | shifted; left != 0; left &= left - 1) {
                const unsigned lane = (unsigned)__builtin_ctz(left);
                if (v[lane] < INT16_MIN || v[lane] > INT16_MAX)
                    return CG_ERR_CORRUPT;
                cells[lane] = (int16_t)v[lane];
            }
        }
    }
    return CG_OK;
}

static cg_status decode_refined_strip(const cg_rans_class *classes, const cg_rans_strip *strip,
                                      size_t n_rows, uint32_t states[CG_RANS_LANES],
                                      word_reader *words)
{
    bool bad = false;
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
            states[lane] = renormalize(freq * (x >> CG_RANS_SCALE_BITS) + slot - cum, words);
            bad |= v < INT16_MIN || v > INT16_MAX;
            cells[lane] = (int16_t)v;
        }
    }
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

#endif

static cg_status decode_stream(const cg_rans_matrix *m, size_t stream, const uint8_t *src,
                               size_t src_bytes)
{
    uint32_t states[CG_RANS_LANES];
    if (src_bytes < 4 * CG_RANS_LANES || src_bytes % 2 != 0)
        return CG_ERR_CORRUPT;
    for (unsigned lane = 0; lane < CG_RANS_LANES; lane++) {
        states[lane] = (uint32_t)cg_get_le(src + 4 * lane, 4);
        if (states[lane] < STATE_LOW)
            return CG_ERR_CORRUPT;
    }
    word_reader words = {src + 4 * CG_RANS_LANES, src + src_bytes, false};
    for (size_t s = stream; s < m->n_strips; s += m->n_streams) {
        const cg_rans_strip *strip = &m->strips[s];
        const cg_status status = (strip->coarse != NULL ? decode_refined_strip : decode_strip)(
            m->classes, strip, m->n_rows, states, &words);
        if (status != CG_OK)
            return status;
        if (words.ended)
            return CG_ERR_TRUNCATED;
    }
    if (words.at != words.end)
        return CG_ERR_CORRUPT;
    for (unsigned lane = 0; lane < CG_RANS_LANES; lane++) {
        if (states[lane] != STATE_LOW)
            return CG_ERR_CORRUPT;
    }
    return CG_OK;
}

static uint8_t *encode_stream(const cg_rans_matrix *m, size_t stream, uint8_t *words_end,
                              uint32_t states_out[CG_RANS_LANES])
{
    uint8_t *at = words_end;
    for (unsigned lane = 0; lane < CG_RANS_LANES; lane++)
        states_out[lane] = STATE_LOW;
    for (size_t s = stream + (m->n_strips - 1 - stream) / m->n_streams * m->n_streams;;
         s -= m->n_streams) {
        const cg_rans_strip *strip = &m->strips[s];
        (strip->coarse != NULL ? encode_refined_strip : encode_strip)(m->classes, strip, m->n_rows,
                                                                      states_out, &at);
        if (s == stream)
            return at;
    }
}

static uint64_t estimate(const cg_rans_class *classes, const cg_rans_strip *strip, size_t n_rows)
{
    return (strip->coarse != NULL ? estimate_refined_strip : estimate_strip)(classes, strip,
                                                                             n_rows);
}

const cg_rans_kernels CG_RANS_KERNELS = {decode_stream, encode_stream, estimate};
