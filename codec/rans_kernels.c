/* Compiled once per instruction set, with CG_RANS_KERNELS the name of the table: see rans_kernels.h. The scalar code is
 * FORMAT.md's "Matrix of symbols" as it stands there; the AVX-512 code holds the 32 states in two registers. */
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
                         int32_t v[CG_RANS_LANES], uint32_t states[CG_RANS_LANES], word_reader *words)
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
        const int32_t magnitude = (int32_t)(m + (classes[strip->lane_class[lane]].n_symbols - 2u) / 2);
        v[lane] = v[lane] & 16 ? -magnitude : magnitude;
    }
}

#if defined(__AVX512BW__)

/* 16 lanes of a strip. Lanes without a column have one symbol that takes every slot: their states stay as they are. */
typedef struct lanes16 {
    __mmask16 columns, is_signed;
    __m512i freq0;           /* of index 0, whose cum is 0 */
    __m512i escape;          /* the first slot of the escape */
    __m512i last;            /* the escape's index */
    __m512i packed, bucket;  /* where the class's tables begin, from classes: in u32 */
    __m512i first, cost;     /* in bytes */
    __m512i halved, top, shift;
} lanes16;

static inline lanes16 load_lanes(const cg_rans_class *classes, const cg_rans_strip *strip, uint32_t first_lane)
{
    const uint32_t n = strip->n_lanes > first_lane ? strip->n_lanes - first_lane : 0;
    const __m512i low8 = _mm512_set1_epi32(0xff);
    lanes16 l;
    l.columns = (__mmask16)(n < 16 ? (1u << n) - 1 : 0xffff);
    const __m512i k = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(l.columns, strip->lane_class + first_lane));
    const __m512i base = _mm512_mullo_epi32(k, _mm512_set1_epi32(sizeof(cg_rans_class) / 4));
    const __m512i base_bytes = _mm512_slli_epi32(base, 2);
    l.packed = _mm512_add_epi32(base, _mm512_set1_epi32(offsetof(cg_rans_class, packed) / 4));
    l.bucket = _mm512_add_epi32(base, _mm512_set1_epi32(offsetof(cg_rans_class, bucket) / 4));
    l.first = _mm512_add_epi32(base_bytes, _mm512_set1_epi32(offsetof(cg_rans_class, first)));
    l.cost = _mm512_add_epi32(base_bytes, _mm512_set1_epi32(offsetof(cg_rans_class, cost)));
    /* shift, n_symbols, escape_bits and top are a class's first four bytes */
    const __m512i head = _mm512_mask_i32gather_epi32(_mm512_set1_epi32(1 << 8), l.columns, base, classes, 4);
    l.shift = _mm512_and_si512(head, low8);
    l.last = _mm512_sub_epi32(_mm512_and_si512(_mm512_srli_epi32(head, 8), low8), _mm512_set1_epi32(1));
    l.is_signed = _mm512_cmpeq_epi32_mask(_mm512_and_si512(_mm512_srli_epi32(head, 16), low8), _mm512_set1_epi32(5));
    l.halved = _mm512_maskz_set1_epi32(l.is_signed, 1);
    l.top = _mm512_srli_epi32(head, 24);
    const __m512i all_slots = _mm512_set1_epi32(CG_RANS_SCALE);
    l.freq0 = _mm512_mask_i32gather_epi32(all_slots, l.columns, l.packed, classes, 4);
    l.escape = _mm512_mask_i32gather_epi32(_mm512_slli_epi32(all_slots, 16), l.columns,
                                           _mm512_add_epi32(l.packed, l.last), classes, 4);
    l.escape = _mm512_srli_epi32(l.escape, 16);
    return l;
}

/* Phase A without its renormalization. Returns the values; *escaped_out the lanes whose value is yet to come. */
static inline __m512i take_symbols(const cg_rans_class *classes, const lanes16 *l, __m512i *x, __mmask16 *escaped_out)
{
    const __m512i low16 = _mm512_set1_epi32(0xffff), one = _mm512_set1_epi32(1);
    const __m512i slot = _mm512_and_si512(*x, _mm512_set1_epi32(CG_RANS_SCALE - 1));
    const __mmask16 others = _mm512_cmpge_epu32_mask(slot, l->freq0); /* index 0 is often the only one */
    __m512i v = l->top, freq = l->freq0, past = slot;                 /* past = slot - cum */
    if (others != 0) {
        const __m512i bucket = _mm512_srli_epi32(slot, CG_RANS_BUCKET_SHIFT);
        __m512i packed =
            _mm512_mask_i32gather_epi32(l->freq0, others, _mm512_add_epi32(l->bucket, bucket), classes, 4);
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
            packed = _mm512_mask_i32gather_epi32(packed, missed, _mm512_add_epi32(l->packed, index), classes, 4);
        }
        /* Signed: (index + 1) / 2, negated for even indices; exponents: top - index. */
        const __m512i negated = _mm512_sub_epi32(_mm512_and_si512(index, l->halved), one);
        v = _mm512_srlv_epi32(_mm512_add_epi32(index, l->halved), l->halved);
        v = _mm512_add_epi32(_mm512_sub_epi32(_mm512_xor_si512(v, negated), negated), l->top);
    }
    *escaped_out = _mm512_cmpge_epu32_mask(slot, l->escape);
    *x = _mm512_add_epi32(_mm512_mullo_epi32(freq, _mm512_srli_epi32(*x, CG_RANS_SCALE_BITS)), past);
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
    const __mmask16 need0 = _mm512_cmplt_epu32_mask(x[0], low), need1 = _mm512_cmplt_epu32_mask(x[1], low);
    const size_t n0 = (size_t)__builtin_popcount(need0), n = n0 + (size_t)__builtin_popcount(need1);
    const size_t n_left = (size_t)(words->end - words->at) / 2;
    __m512i words0, words1;
    if (n_left >= 32) {
        words0 = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)words->at));
        words1 = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)(words->at + 2 * n0)));
        words->at += 2 * n;
    } else if (n <= n_left) {
        words0 = load_words(words->at, n_left);
        words1 = load_words(words->at + 2 * n0, n_left - n0);
        words->at += 2 * n;
    } else {
        words0 = words1 = _mm512_setzero_si512();
        words->ended = true;
    }
    x[0] = _mm512_mask_or_epi32(x[0], need0, _mm512_slli_epi32(x[0], 16), _mm512_maskz_expand_epi32(need0, words0));
    x[1] = _mm512_mask_or_epi32(x[1], need1, _mm512_slli_epi32(x[1], 16), _mm512_maskz_expand_epi32(need1, words1));
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

static cg_status decode_strip(const cg_rans_class *classes, const cg_rans_strip *strip, size_t n_rows,
                              uint32_t states[CG_RANS_LANES], word_reader *words)
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

#else

static cg_status decode_strip(const cg_rans_class *classes, const cg_rans_strip *strip, size_t n_rows,
                              uint32_t states[CG_RANS_LANES], word_reader *words)
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
            states[lane] = renormalize(c->freq[i] * (x >> CG_RANS_SCALE_BITS) + slot - c->cum[i], words);
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

#endif

static cg_status decode_stream(const cg_rans_matrix *m, size_t stream, const uint8_t *src, size_t src_bytes)
{
    uint32_t states[CG_RANS_LANES];
    if (src_bytes < 4 * CG_RANS_LANES || src_bytes % 2 != 0)
        return CG_ERR_CORRUPT;
    for (unsigned lane = 0; lane < CG_RANS_LANES; lane++) {
        states[lane] = (uint32_t)cg_load_le(src + 4 * lane, 4);
        if (states[lane] < STATE_LOW)
            return CG_ERR_CORRUPT;
    }
    word_reader words = {src + 4 * CG_RANS_LANES, src + src_bytes, false};
    for (size_t s = stream; s < m->n_strips; s += m->n_streams) {
        const cg_status status = decode_strip(m->classes, &m->strips[s], m->n_rows, states, &words);
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

const cg_rans_kernels CG_RANS_KERNELS = {decode_stream};
