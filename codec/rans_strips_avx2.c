/* Strips on AVX2: the 32 states of a stream are four registers, and what lanes look up is gathered
 * where index 0 is not the one. Compiled with CG_RANS_STRIPS the name of the table. */
#include "codec/rans_cells.h"

#include <immintrin.h>
#include <string.h>

enum { N_EIGHTS = CG_RANS_LANES / 8 };

/* By the mask of the lanes that take a word: which of the next eight words each takes. */
#define BELOW(m, lane) ((uint64_t)__builtin_popcount((m) & ((1 << (lane)) - 1)) << 8 * (lane))
#define OF_MASK(m)                                                                                 \
    (BELOW(m, 0) | BELOW(m, 1) | BELOW(m, 2) | BELOW(m, 3) | BELOW(m, 4) | BELOW(m, 5) |           \
     BELOW(m, 6) | BELOW(m, 7))
#define FOUR(m) OF_MASK(m), OF_MASK((m) + 1), OF_MASK((m) + 2), OF_MASK((m) + 3)
#define SIXTEEN(m) FOUR(m), FOUR((m) + 4), FOUR((m) + 8), FOUR((m) + 12)
#define SIXTY_FOUR(m) SIXTEEN(m), SIXTEEN((m) + 16), SIXTEEN((m) + 32), SIXTEEN((m) + 48)
static const uint64_t word_of_lane[256] = {SIXTY_FOUR(0), SIXTY_FOUR(64), SIXTY_FOUR(128),
                                           SIXTY_FOUR(192)};
#undef OF_MASK

/* By the mask of the lanes that give a word: the bytes of those lanes' words, of eight, in order at
 * the end of 16. A word's place is counted from its end; each half of the 16 has four. */
#define PLACE(m, lane) (7 - __builtin_popcount((m) >> ((lane) + 1)))
#define GIVEN(m, lane, half)                                                                       \
    (((m) >> (lane)&1) != 0 && PLACE(m, lane) / 4 == (half)                                        \
         ? (uint64_t)(2 * (lane) | (2 * (lane) + 1) << 8) << PLACE(m, lane) % 4 * 16               \
         : 0)
#define OF_HALF(m, half)                                                                           \
    (GIVEN(m, 0, half) | GIVEN(m, 1, half) | GIVEN(m, 2, half) | GIVEN(m, 3, half) |               \
     GIVEN(m, 4, half) | GIVEN(m, 5, half) | GIVEN(m, 6, half) | GIVEN(m, 7, half))
#define OF_MASK(m)                                                                                 \
    {                                                                                              \
        OF_HALF(m, 0), OF_HALF(m, 1)                                                               \
    }
static const uint64_t given_words[256][2] = {SIXTY_FOUR(0), SIXTY_FOUR(64), SIXTY_FOUR(128),
                                             SIXTY_FOUR(192)};

/* Eight lanes of a strip. Lanes without a column have one symbol that takes every slot: their
 * states stay as they are. */
typedef struct lanes8 {
    __m256i freq0;          /* of index 0, whose cum is 0 */
    __m256i escape;         /* the first slot of the escape */
    __m256i last;           /* the escape's index */
    __m256i packed, bucket; /* where the class's tables begin, from classes: in u32 */
    __m256i first, cost;    /* in bytes */
    __m256i columns;        /* lanes with one */
    __m256i halved, top, shift;
} lanes8;

static inline __m256i load8(const void *at)
{
    return _mm256_loadu_si256(at);
}

/* The u32s number `at` to at + 3 of the classes of a lane and of the one 4 behind it. */
static inline __m256i load_tables(const cg_rans_class *classes, const uint8_t lane_class[8],
                                  unsigned lane, size_t at)
{
    const uint32_t *low = (const void *)&classes[lane_class[lane]],
                   *high = (const void *)&classes[lane_class[lane + 4]];
    return _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_loadu_si128((const void *)(low + at))),
        _mm_loadu_si128((const void *)(high + at)), 1);
}

/* The class of each of 8 lanes; of those without a column any. some: memory for them. */
static inline const uint8_t *load_classes(const cg_rans_strip *strip, uint32_t first_lane,
                                          uint8_t some[8])
{
    const uint32_t n = strip->n_lanes > first_lane ? strip->n_lanes - first_lane : 0;
    if (n >= 8)
        return strip->lane_class + first_lane;
    memset(some, 0, 8);
    for (uint32_t i = 0; i < n; i++)
        some[i] = strip->lane_class[first_lane + i];
    return some;
}

/* Three neighbouring u32 of the classes of 8 lanes, each in a register. Runs of rows are short:
 * lane by lane this would take as long as a run's cells. */
static inline void load_three(const cg_rans_class *classes, const uint8_t lane_class[8], size_t at,
                              __m256i three_out[3])
{
    const __m256i t[4] = {
        load_tables(classes, lane_class, 0, at), load_tables(classes, lane_class, 1, at),
        load_tables(classes, lane_class, 2, at), load_tables(classes, lane_class, 3, at)};
    /* In each half of the registers, 4 by 4 numbers are transposed. */
    const __m256i low01 = _mm256_unpacklo_epi32(t[0], t[1]),
                  low23 = _mm256_unpacklo_epi32(t[2], t[3]);
    three_out[0] = _mm256_unpacklo_epi64(low01, low23);
    three_out[1] = _mm256_unpackhi_epi64(low01, low23);
    three_out[2] =
        _mm256_unpacklo_epi64(_mm256_unpackhi_epi32(t[0], t[1]), _mm256_unpackhi_epi32(t[2], t[3]));
}

/* All ones in lanes with a column. */
static inline __m256i columns_of(const cg_rans_strip *strip, uint32_t first_lane)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)strip->n_lanes - (int)first_lane),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* Once a strip and run: what kernels look up is then in registers. */
static inline lanes8 load_lanes(const cg_rans_class *classes, const cg_rans_strip *strip,
                                uint32_t first_lane)
{
    uint8_t some[8];
    __m256i first[3];
    const uint8_t *lane_class = load_classes(strip, first_lane, some);
    const __m256i low8 = _mm256_set1_epi32(0xff), one = _mm256_set1_epi32(1),
                  all_slots = _mm256_set1_epi32(CG_RANS_TOTAL),
                  columns = columns_of(strip, first_lane);
    const __m256i bases =
        _mm256_mullo_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)lane_class)),
                           _mm256_set1_epi32(sizeof(cg_rans_class) / 4));
    /* shift, n_symbols, escape_bits and top are a class's first four bytes; the escape's first slot
     * and index 0's frequency come next. A lane without a column has n_symbols 2, so it never looks
     * escaped. */
    load_three(classes, lane_class, 0, first);
    const __m256i head = _mm256_blendv_epi8(_mm256_set1_epi32(2 << 8), first[0], columns);
    const __m256i bits = _mm256_and_si256(_mm256_srli_epi32(head, 16), low8);
    return (lanes8){
        .freq0 = _mm256_blendv_epi8(all_slots, _mm256_srli_epi32(first[1], 16), columns),
        .escape = _mm256_blendv_epi8(
            all_slots, _mm256_and_si256(first[1], _mm256_set1_epi32(0xffff)), columns),
        .last = _mm256_sub_epi32(_mm256_and_si256(_mm256_srli_epi32(head, 8), low8), one),
        .packed = _mm256_add_epi32(bases, _mm256_set1_epi32(offsetof(cg_rans_class, packed) / 4)),
        .bucket = _mm256_add_epi32(bases, _mm256_set1_epi32(offsetof(cg_rans_class, bucket) / 4)),
        .first = _mm256_add_epi32(_mm256_slli_epi32(bases, 2),
                                  _mm256_set1_epi32(offsetof(cg_rans_class, first))),
        .cost = _mm256_add_epi32(_mm256_slli_epi32(bases, 2),
                                 _mm256_set1_epi32(offsetof(cg_rans_class, cost))),
        .columns = columns,
        .halved = _mm256_and_si256(_mm256_cmpeq_epi32(bits, _mm256_set1_epi32(5)), one),
        .top = _mm256_srli_epi32(head, 24),
        .shift = _mm256_and_si256(head, low8)};
}

static inline uint32_t mask_of(__m256i lanes)
{
    return (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(lanes));
}

/* a >= b in lanes whose numbers are below 2^31. */
static inline __m256i at_least(__m256i a, __m256i b)
{
    return _mm256_cmpgt_epi32(a, _mm256_sub_epi32(b, _mm256_set1_epi32(1)));
}

/* Phase A without its renormalization. Returns the values; *escaped_out the lanes whose value is
 * yet to come. */
static inline __m256i take_symbols(const cg_rans_class *classes, const lanes8 *l, __m256i *x,
                                   uint32_t *escaped_out)
{
    const __m256i low16 = _mm256_set1_epi32(0xffff), one = _mm256_set1_epi32(1);
    const __m256i slot = _mm256_and_si256(*x, _mm256_set1_epi32(CG_RANS_TOTAL - 1));
    const __m256i others = at_least(slot, l->freq0); /* index 0 is often the only one */
    const int *at = (const void *)classes;
    __m256i v = l->top, freq = l->freq0, past = slot; /* past = slot - cum */
    if (mask_of(others) != 0) {
        const __m256i bucket = _mm256_srli_epi32(slot, CG_RANS_BUCKET_SHIFT);
        /* One gather gives freq, cum and mostly the index. */
        const __m256i low14 = _mm256_set1_epi32(CG_RANS_TOTAL - 1);
        const __m256i entry = _mm256_mask_i32gather_epi32(
            _mm256_setzero_si256(), at, _mm256_add_epi32(l->bucket, bucket), others, 4);
        __m256i index = _mm256_srli_epi32(entry, 28);
        const __m256i late = _mm256_cmpeq_epi32(index, _mm256_set1_epi32(15));
        if (mask_of(late) != 0) {
            /* A gather reads four bytes. Behind first[] lie other fields of the class. */
            const __m256i found =
                _mm256_mask_i32gather_epi32(index, at, _mm256_add_epi32(l->first, bucket), late, 1);
            index = _mm256_and_si256(found, _mm256_set1_epi32(0xff));
        }
        freq = _mm256_blendv_epi8(freq, _mm256_and_si256(entry, low14), others);
        past = _mm256_sub_epi32(slot, _mm256_and_si256(_mm256_srli_epi32(entry, 14), low14));
        /* The slot may lie behind the bucket's first index: those lanes go on. missed is -1 there,
         * so taking it off adds 1. */
        for (;;) {
            const __m256i missed = at_least(past, freq);
            if (mask_of(missed) == 0)
                break;
            index = _mm256_sub_epi32(index, missed);
            const __m256i packed = _mm256_mask_i32gather_epi32(
                entry, at, _mm256_add_epi32(l->packed, index), missed, 4);
            past = _mm256_blendv_epi8(past, _mm256_sub_epi32(slot, _mm256_srli_epi32(packed, 16)),
                                      missed);
            freq = _mm256_blendv_epi8(freq, _mm256_and_si256(packed, low16), missed);
        }
        /* Signed: (index + 1) / 2, negated for even indices; exponents: top - index. Negated is -1
         * or 0: xor with -1 and minus -1 is two's complement. */
        const __m256i negated = _mm256_sub_epi32(_mm256_and_si256(index, l->halved), one);
        v = _mm256_srlv_epi32(_mm256_add_epi32(index, l->halved), l->halved);
        v = _mm256_add_epi32(_mm256_sub_epi32(_mm256_xor_si256(v, negated), negated), l->top);
    }
    *escaped_out = mask_of(at_least(slot, l->escape));
    *x =
        _mm256_add_epi32(_mm256_mullo_epi32(freq, _mm256_srli_epi32(*x, CG_RANS_TOTAL_BITS)), past);
    return v;
}

static inline void load_states(const uint32_t states[CG_RANS_LANES], __m256i x[N_EIGHTS])
{
    for (unsigned i = 0; i < N_EIGHTS; i++)
        x[i] = load8(states + 8 * i);
}

static inline void store_states(const __m256i x[N_EIGHTS], uint32_t states[CG_RANS_LANES])
{
    for (unsigned i = 0; i < N_EIGHTS; i++)
        _mm256_storeu_si256((void *)(states + 8 * i), x[i]);
}

/* Renormalizes 32 lanes. */
static inline void renormalize32(__m256i x[N_EIGHTS], cg_word_reader *words)
{
    /* Near the end, word by word: the loads below read eight words, whether or not lanes want them.
     */
    if (words->end - words->at < 2 * CG_RANS_LANES) {
        uint32_t states[CG_RANS_LANES];
        store_states(x, states);
        for (unsigned lane = 0; lane < CG_RANS_LANES; lane++)
            states[lane] = renormalize(states[lane], words);
        load_states(states, x);
        return;
    }
    for (unsigned i = 0; i < N_EIGHTS; i++) {
        const __m256i need =
            _mm256_cmpeq_epi32(_mm256_srli_epi32(x[i], 16), _mm256_setzero_si256());
        const uint32_t mask = mask_of(need);
        const __m256i next = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)words->at)),
                      order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)word_of_lane[mask]));
        const __m256i with_word =
            _mm256_or_si256(_mm256_slli_epi32(x[i], 16), _mm256_permutevar8x32_epi32(next, order));
        x[i] = _mm256_blendv_epi8(x[i], with_word, need);
        words->at += 2 * __builtin_popcount(mask);
    }
}

static inline __m256i past_int16(__m256i v)
{
    const __m256i kept = _mm256_srai_epi32(_mm256_slli_epi32(v, 16), 16);
    return _mm256_xor_si256(kept, v);
}

/* 32 values to the first n_lanes cells. */
static inline void store_cells(const __m256i v[N_EIGHTS], int16_t *cells, uint32_t n_lanes)
{
    int16_t some[CG_RANS_LANES];
    int16_t *out = n_lanes < CG_RANS_LANES ? some : cells;
    for (unsigned i = 0; i < N_EIGHTS; i += 2)
        _mm256_storeu_si256((void *)(out + 8 * i),
                            _mm256_permute4x64_epi64(_mm256_packs_epi32(v[i], v[i + 1]), 0xd8));
    if (n_lanes < CG_RANS_LANES)
        memcpy(cells, some, n_lanes * sizeof *cells);
}

/* Phases B and C. */
static void take_escaped(const cg_rans_class *classes, const cg_rans_strip *strip, uint32_t escaped,
                         __m256i v[N_EIGHTS], __m256i x[N_EIGHTS], cg_word_reader *words)
{
    uint32_t states[CG_RANS_LANES];
    int32_t lane_v[CG_RANS_LANES];
    store_states(x, states);
    store_states(v, (uint32_t *)lane_v);
    take_escapes(classes, strip, escaped, lane_v, states, words);
    load_states(states, x);
    load_states((const uint32_t *)lane_v, v);
}

/* Phase D without its renormalization. */
static inline __m256i take_shift(const lanes8 *l, __m256i v, __m256i *x)
{
    const __m256i kept = _mm256_sllv_epi32(_mm256_set1_epi32(-1), l->shift);
    const __m256i raw = _mm256_andnot_si256(kept, *x);
    *x = _mm256_srlv_epi32(*x, l->shift);
    return _mm256_or_si256(_mm256_sllv_epi32(v, l->shift), raw);
}

static cg_status decode_strip(const cg_rans_class *classes, const cg_rans_strip *strip,
                              size_t n_rows, uint32_t states[CG_RANS_LANES], cg_word_reader *words)
{
    lanes8 lanes[N_EIGHTS];
    __m256i x[N_EIGHTS], any_shift = _mm256_setzero_si256();
    cg_word_reader in = *words; /* a copy, which the compiler may hold in registers */
    for (unsigned i = 0; i < N_EIGHTS; i++) {
        lanes[i] = load_lanes(classes, strip, 8 * i);
        any_shift = _mm256_or_si256(any_shift, lanes[i].shift);
    }
    const bool is_shifted = !_mm256_testz_si256(any_shift, any_shift);
    load_states(states, x);
    for (size_t row = 0; row < n_rows; row++) {
        __m256i v[N_EIGHTS];
        uint32_t escaped = 0;
        for (unsigned i = 0; i < N_EIGHTS; i++) {
            uint32_t of_eight;
            v[i] = take_symbols(classes, &lanes[i], &x[i], &of_eight);
            escaped |= of_eight << 8 * i;
        }
        renormalize32(x, &in);
        if (escaped != 0)
            take_escaped(classes, strip, escaped, v, x, &in);
        if (is_shifted) {
            for (unsigned i = 0; i < N_EIGHTS; i++)
                v[i] = take_shift(&lanes[i], v[i], &x[i]);
            renormalize32(x, &in);
        }
        if (is_shifted || escaped != 0) {
            const __m256i past =
                _mm256_or_si256(_mm256_or_si256(past_int16(v[0]), past_int16(v[1])),
                                _mm256_or_si256(past_int16(v[2]), past_int16(v[3])));
            if (!_mm256_testz_si256(past, past))
                return CG_ERR_CORRUPT;
        }
        store_cells(v, strip->cells + row * strip->row_stride, strip->n_lanes);
    }
    store_states(x, states);
    *words = in;
    return CG_OK;
}

/* The first n_lanes cells of a row as 32, zeros behind them. some: zeros, or what an earlier row
 * has left there. */
static inline void load_cells(const int16_t *cells, uint32_t n_lanes, int16_t some[CG_RANS_LANES],
                              __m256i out[N_EIGHTS])
{
    if (n_lanes < CG_RANS_LANES)
        cells = memcpy(some, cells, n_lanes * sizeof *cells);
    for (unsigned i = 0; i < N_EIGHTS; i++)
        out[i] = _mm256_cvtepi16_epi32(_mm_loadu_si128((const void *)(cells + 8 * i)));
}

/* Eight lanes of a strip with coarse cells: where index 0 and index 1 end, by context. */
typedef struct refining8 {
    __m256i end0[CG_RANS_REFINE_CONTEXTS], end1[CG_RANS_REFINE_CONTEXTS];
} refining8;

static inline refining8 load_refining(const cg_rans_class *classes, const cg_rans_strip *strip,
                                      uint32_t first_lane)
{
    uint8_t some[8];
    __m256i packed[CG_RANS_REFINE_CONTEXTS];
    refining8 l;
    load_three(classes, load_classes(strip, first_lane, some), offsetof(cg_rans_class, refine) / 4,
               packed);
    for (unsigned c = 0; c < CG_RANS_REFINE_CONTEXTS; c++) {
        const __m256i own = _mm256_blendv_epi8(_mm256_set1_epi32(CG_RANS_TOTAL), packed[c],
                                               columns_of(strip, first_lane));
        l.end0[c] = _mm256_and_si256(own, _mm256_set1_epi32(0xffff));
        l.end1[c] = _mm256_add_epi32(l.end0[c], _mm256_srli_epi32(own, 16));
    }
    return l;
}

/* Where index 0 and index 1 end, given the coarse cells. */
static inline void choose_ends(const refining8 *l, __m256i coarse, __m256i *end0_out,
                               __m256i *end1_out)
{
    const __m256i one = _mm256_set1_epi32(1), magnitude = _mm256_abs_epi32(coarse);
    const __m256i is_one = _mm256_cmpeq_epi32(magnitude, one),
                  is_more = _mm256_cmpgt_epi32(magnitude, one);
    *end0_out =
        _mm256_blendv_epi8(_mm256_blendv_epi8(l->end0[0], l->end0[1], is_one), l->end0[2], is_more);
    *end1_out =
        _mm256_blendv_epi8(_mm256_blendv_epi8(l->end1[0], l->end1[1], is_one), l->end1[2], is_more);
}

/* The slots of lanes past index 0, and past index 1: their cum, and *freq_out. */
static inline __m256i choose_slots(__m256i end0, __m256i end1, __m256i past0, __m256i past1,
                                   __m256i *freq_out)
{
    const __m256i cum = _mm256_blendv_epi8(_mm256_and_si256(past0, end0), end1, past1);
    const __m256i end = _mm256_blendv_epi8(_mm256_blendv_epi8(end0, end1, past0),
                                           _mm256_set1_epi32(CG_RANS_TOTAL), past1);
    *freq_out = _mm256_sub_epi32(end, cum);
    return cum;
}

/* The cells of eight lanes, without renormalization. */
static inline __m256i take_refined(const refining8 *l, __m256i coarse, __m256i *x)
{
    const __m256i one = _mm256_set1_epi32(1);
    __m256i end0, end1, freq;
    choose_ends(l, coarse, &end0, &end1);
    const __m256i slot = _mm256_and_si256(*x, _mm256_set1_epi32(CG_RANS_TOTAL - 1));
    const __m256i past0 = at_least(slot, end0), past1 = at_least(slot, end1);
    const __m256i cum = choose_slots(end0, end1, past0, past1, &freq);
    *x = _mm256_add_epi32(_mm256_mullo_epi32(freq, _mm256_srli_epi32(*x, CG_RANS_TOTAL_BITS)),
                          _mm256_sub_epi32(slot, cum));
    /* away from zero is up where the coarse cell is not negative */
    const __m256i down = _mm256_xor_si256(past1, _mm256_srai_epi32(coarse, 31));
    const __m256i d = _mm256_and_si256(past0, _mm256_or_si256(down, one));
    return _mm256_add_epi32(_mm256_add_epi32(coarse, _mm256_add_epi32(coarse, coarse)), d);
}

static cg_status decode_refined_strip(const cg_rans_class *classes, const cg_rans_strip *strip,
                                      size_t n_rows, uint32_t states[CG_RANS_LANES],
                                      cg_word_reader *words)
{
    refining8 lanes[N_EIGHTS];
    __m256i x[N_EIGHTS], past = _mm256_setzero_si256();
    cg_word_reader in = *words;
    int16_t some[CG_RANS_LANES] = {0};
    for (unsigned i = 0; i < N_EIGHTS; i++)
        lanes[i] = load_refining(classes, strip, 8 * i);
    load_states(states, x);
    for (size_t row = 0; row < n_rows; row++) {
        __m256i v[N_EIGHTS];
        load_cells(strip->coarse + row * strip->coarse_stride, strip->n_lanes, some, v);
        for (unsigned i = 0; i < N_EIGHTS; i++) {
            v[i] = take_refined(&lanes[i], v[i], &x[i]);
            past = _mm256_or_si256(past, past_int16(v[i]));
        }
        renormalize32(x, &in);
        store_cells(v, strip->cells + row * strip->row_stride, strip->n_lanes);
    }
    store_states(x, states);
    *words = in;
    return _mm256_testz_si256(past, past) ? CG_OK : CG_ERR_CORRUPT;
}

/* ---- encoding ---- */

/* Writes the low words of the lanes that are full before `at`, lanes in order, and takes them out
 * of the states. 16 bytes before `at` become garbage: the bound has room for lane states there. */
static inline void emit32(__m256i x[N_EIGHTS], const __m256i full[N_EIGHTS], uint8_t **at)
{
    const __m256i low16 = _mm256_set1_epi32(0xffff);
    uint8_t *out = *at;
    /* Downwards, the last lanes first: the decoder takes words upwards, the first lanes first. */
    for (unsigned i = N_EIGHTS; i > 0; i -= 2) {
        const __m256i words =
            _mm256_permute4x64_epi64(_mm256_packus_epi32(_mm256_and_si256(x[i - 2], low16),
                                                         _mm256_and_si256(x[i - 1], low16)),
                                     0xd8);
        const __m128i eights[2] = {_mm256_castsi256_si128(words),
                                   _mm256_extracti128_si256(words, 1)};
        for (unsigned k = 2; k-- > 0;) {
            const uint32_t mask = mask_of(full[i - 2 + k]);
            const __m128i order = _mm_loadu_si128((const void *)given_words[mask]);
            _mm_storeu_si128((void *)(out - 16), _mm_shuffle_epi8(eights[k], order));
            out -= 2 * __builtin_popcount(mask);
        }
    }
    for (unsigned i = 0; i < N_EIGHTS; i++)
        x[i] = _mm256_blendv_epi8(x[i], _mm256_srli_epi32(x[i], 16), full[i]);
    *at = out;
}

/* x / freq, and the remainder. AVX2 makes floats of signed integers only, so both are halved. The
 * quotient is then off by one at most: x / freq < 2^18, and the bit that halving x loses is less
 * than freq. */
static inline __m256i divide(__m256i x, __m256i freq, __m256i *remainder_out)
{
    const __m256 halves = _mm256_cvtepi32_ps(_mm256_srli_epi32(x, 1)),
                 divisor = _mm256_mul_ps(_mm256_cvtepi32_ps(freq), _mm256_set1_ps(0.5f));
    __m256i q = _mm256_cvttps_epi32(_mm256_div_ps(halves, divisor));
    __m256i r = _mm256_sub_epi32(x, _mm256_mullo_epi32(q, freq));
    const __m256i above = _mm256_srai_epi32(r, 31); /* -1 where the quotient is too large */
    q = _mm256_add_epi32(q, above);
    r = _mm256_add_epi32(r, _mm256_and_si256(above, freq));
    const __m256i below = at_least(r, freq);
    *remainder_out = _mm256_sub_epi32(r, _mm256_and_si256(below, freq));
    return _mm256_sub_epi32(q, below);
}

/* Phase A of 32 lanes, the other way round. */
static inline void put_symbols(__m256i x[N_EIGHTS], const __m256i freq[N_EIGHTS],
                               const __m256i cum[N_EIGHTS], uint8_t **at)
{
    __m256i full[N_EIGHTS];
    for (unsigned i = 0; i < N_EIGHTS; i++)
        full[i] = at_least(_mm256_srli_epi32(x[i], 32 - CG_RANS_TOTAL_BITS), freq[i]);
    emit32(x, full, at);
    for (unsigned i = 0; i < N_EIGHTS; i++) {
        __m256i r;
        const __m256i q = divide(x[i], freq[i], &r);
        x[i] =
            _mm256_add_epi32(_mm256_slli_epi32(q, CG_RANS_TOTAL_BITS), _mm256_add_epi32(r, cum[i]));
    }
}

/* Phase D of 32 lanes, the other way round. */
static inline void put_shifts(const lanes8 lanes[N_EIGHTS], const __m256i cells[N_EIGHTS],
                              __m256i x[N_EIGHTS], uint8_t **at)
{
    __m256i full[N_EIGHTS];
    for (unsigned i = 0; i < N_EIGHTS; i++) {
        const __m256i room = _mm256_sub_epi32(_mm256_set1_epi32(32), lanes[i].shift);
        const __m256i has_room =
            _mm256_cmpeq_epi32(_mm256_srlv_epi32(x[i], room), _mm256_setzero_si256());
        full[i] = _mm256_xor_si256(has_room, _mm256_set1_epi32(-1));
    }
    emit32(x, full, at);
    for (unsigned i = 0; i < N_EIGHTS; i++) {
        const __m256i kept = _mm256_sllv_epi32(_mm256_set1_epi32(-1), lanes[i].shift);
        x[i] = _mm256_or_si256(_mm256_sllv_epi32(x[i], lanes[i].shift),
                               _mm256_andnot_si256(kept, cells[i]));
    }
}

/* What eight cells are coded as, shifts apart: the escape's index where they are escaped. */
static inline __m256i index_cells(const lanes8 *l, __m256i cells)
{
    const __m256i zero = _mm256_setzero_si256(), v = _mm256_srav_epi32(cells, l->shift),
                  magnitude = _mm256_abs_epi32(v);
    /* Signed: twice the magnitude, less one where positive; exponents: top - v. */
    const __m256i doubled =
        _mm256_add_epi32(_mm256_add_epi32(magnitude, magnitude), _mm256_cmpgt_epi32(v, zero));
    const __m256i index = _mm256_blendv_epi8(_mm256_sub_epi32(l->top, v), doubled,
                                             _mm256_cmpgt_epi32(l->halved, zero));
    /* Unsigned: an exponent above top is a negative index, and escaped, too. */
    return _mm256_min_epu32(index, l->last);
}

/* Of eight indices: freq | cum << 16. */
static inline __m256i packed_of(const cg_rans_class *classes, const lanes8 *l, __m256i index)
{
    const __m256i others = _mm256_cmpgt_epi32(index, _mm256_setzero_si256());
    if (mask_of(others) == 0)
        return l->freq0;
    return _mm256_mask_i32gather_epi32(l->freq0, (const void *)classes,
                                       _mm256_add_epi32(l->packed, index), others, 4);
}

static void encode_strip(const cg_rans_class *classes, const cg_rans_strip *strip, size_t n_rows,
                         uint32_t states[CG_RANS_LANES], uint8_t **at)
{
    lanes8 lanes[N_EIGHTS];
    __m256i x[N_EIGHTS], any_shift = _mm256_setzero_si256();
    int16_t some[CG_RANS_LANES] = {0};
    uint8_t *out = *at;
    for (unsigned i = 0; i < N_EIGHTS; i++) {
        lanes[i] = load_lanes(classes, strip, 8 * i);
        any_shift = _mm256_or_si256(any_shift, lanes[i].shift);
    }
    const bool is_shifted = !_mm256_testz_si256(any_shift, any_shift);
    load_states(states, x);
    for (size_t row = n_rows; row-- > 0;) {
        const int16_t *cells = strip->cells + row * strip->row_stride;
        __m256i c[N_EIGHTS], freq[N_EIGHTS], cum[N_EIGHTS], escaped = _mm256_setzero_si256();
        load_cells(cells, strip->n_lanes, some, c);
        for (unsigned i = 0; i < N_EIGHTS; i++) {
            const __m256i index = index_cells(&lanes[i], c[i]),
                          packed = packed_of(classes, &lanes[i], index);
            escaped = _mm256_or_si256(escaped, _mm256_cmpeq_epi32(index, lanes[i].last));
            cum[i] = _mm256_srli_epi32(packed, 16);
            freq[i] = _mm256_and_si256(packed, _mm256_set1_epi32(0xffff));
        }
        /* D, then C and B, then A: the decoder's order the other way round, as in rans_strips.c. */
        if (is_shifted)
            put_shifts(lanes, c, x, &out);
        if (!_mm256_testz_si256(escaped, escaped)) {
            store_states(x, states);
            put_escapes(classes, strip, cells, states, &out);
            load_states(states, x);
        }
        put_symbols(x, freq, cum, &out);
    }
    store_states(x, states);
    *at = out;
}

/* Which of eight cells are past index 0, and which past index 1. */
static inline void index_refined(__m256i cells, __m256i coarse, __m256i *past0_out,
                                 __m256i *past1_out)
{
    const __m256i three = _mm256_add_epi32(coarse, _mm256_add_epi32(coarse, coarse)),
                  d = _mm256_sub_epi32(cells, three);
    const __m256i same = _mm256_cmpeq_epi32(d, _mm256_setzero_si256());
    *past0_out = _mm256_xor_si256(same, _mm256_set1_epi32(-1));
    /* back towards zero: the signs of d and of the coarse cell differ */
    *past1_out = _mm256_andnot_si256(same, _mm256_srai_epi32(_mm256_xor_si256(d, coarse), 31));
}

static void encode_refined_strip(const cg_rans_class *classes, const cg_rans_strip *strip,
                                 size_t n_rows, uint32_t states[CG_RANS_LANES], uint8_t **at)
{
    refining8 lanes[N_EIGHTS];
    __m256i x[N_EIGHTS];
    int16_t some[CG_RANS_LANES] = {0};
    uint8_t *out = *at;
    for (unsigned i = 0; i < N_EIGHTS; i++)
        lanes[i] = load_refining(classes, strip, 8 * i);
    load_states(states, x);
    for (size_t row = n_rows; row-- > 0;) {
        __m256i c[N_EIGHTS], coarse[N_EIGHTS], freq[N_EIGHTS], cum[N_EIGHTS];
        load_cells(strip->cells + row * strip->row_stride, strip->n_lanes, some, c);
        load_cells(strip->coarse + row * strip->coarse_stride, strip->n_lanes, some, coarse);
        for (unsigned i = 0; i < N_EIGHTS; i++) {
            __m256i past0, past1, end0, end1;
            index_refined(c[i], coarse[i], &past0, &past1);
            choose_ends(&lanes[i], coarse[i], &end0, &end1);
            cum[i] = choose_slots(end0, end1, past0, past1, &freq[i]);
        }
        put_symbols(x, freq, cum, &out);
    }
    store_states(x, states);
    *at = out;
}

/* ---- estimates ---- */

static inline uint64_t sum_of(__m256i lanes)
{
    uint32_t each[8];
    uint64_t sum = 0;
    _mm256_storeu_si256((void *)each, lanes);
    for (unsigned i = 0; i < 8; i++)
        sum += each[i];
    return sum;
}

/* Raw bits of the cells in the first n_lanes lanes that are escaped. */
static uint64_t escape_bits(const cg_rans_class *classes, const cg_rans_strip *strip,
                            const int16_t *cells)
{
    uint64_t n_bits = 0;
    for (uint32_t lane = 0; lane < strip->n_lanes; lane++) {
        const cg_rans_class *cls = &classes[strip->lane_class[lane]];
        const cg_lane_coded c = code_cell(cls, cells[lane]);
        n_bits += c.is_escape ? cls->escape_bits + c.extra_bits : 0;
    }
    return n_bits;
}

static uint64_t estimate_strip(const cg_rans_class *classes, const cg_rans_strip *strip,
                               size_t n_rows)
{
    lanes8 lanes[N_EIGHTS];
    __m256i sums[N_EIGHTS]; /* of 14 * 256 at most, in 65,536 rows at most */
    int16_t some[CG_RANS_LANES] = {0};
    uint64_t cost = 0;
    for (unsigned i = 0; i < N_EIGHTS; i++) {
        lanes[i] = load_lanes(classes, strip, 8 * i);
        sums[i] = _mm256_setzero_si256();
        cost += n_rows * 256 * sum_of(lanes[i].shift);
    }
    for (size_t row = 0; row < n_rows; row++) {
        const int16_t *cells = strip->cells + row * strip->row_stride;
        __m256i c[N_EIGHTS], escaped = _mm256_setzero_si256();
        load_cells(cells, strip->n_lanes, some, c);
        for (unsigned i = 0; i < N_EIGHTS; i++) {
            const __m256i index = index_cells(&lanes[i], c[i]);
            const __m256i at = _mm256_add_epi32(lanes[i].cost, _mm256_slli_epi32(index, 1));
            const __m256i costs = _mm256_mask_i32gather_epi32(
                _mm256_setzero_si256(), (const void *)classes, at, lanes[i].columns, 1);
            sums[i] = _mm256_add_epi32(sums[i], _mm256_and_si256(costs, _mm256_set1_epi32(0xffff)));
            escaped = _mm256_or_si256(escaped, _mm256_cmpeq_epi32(index, lanes[i].last));
        }
        if (!_mm256_testz_si256(escaped, escaped))
            cost += 256 * escape_bits(classes, strip, cells);
    }
    for (unsigned i = 0; i < N_EIGHTS; i++)
        cost += sum_of(sums[i]);
    return cost;
}

/* How often eight lanes' cells are in each context, past index 0 there, and past index 1. A strip's
 * counts are priced at its end: no look-up for each cell. */
typedef struct counts8 {
    __m256i all[CG_RANS_REFINE_CONTEXTS], past0[CG_RANS_REFINE_CONTEXTS],
        past1[CG_RANS_REFINE_CONTEXTS];
} counts8;

static inline void count_refined(__m256i cells, __m256i coarse, counts8 *n)
{
    const __m256i magnitude = _mm256_abs_epi32(coarse), zero = _mm256_setzero_si256(),
                  one = _mm256_set1_epi32(1);
    const __m256i context[CG_RANS_REFINE_CONTEXTS] = {_mm256_cmpeq_epi32(coarse, zero),
                                                      _mm256_cmpeq_epi32(magnitude, one),
                                                      _mm256_cmpgt_epi32(magnitude, one)};
    __m256i past0, past1;
    index_refined(cells, coarse, &past0, &past1);
    for (unsigned c = 0; c < CG_RANS_REFINE_CONTEXTS; c++) { /* minus 1 where all bits are set */
        n->all[c] = _mm256_sub_epi32(n->all[c], context[c]);
        n->past0[c] = _mm256_sub_epi32(n->past0[c], _mm256_and_si256(context[c], past0));
        n->past1[c] = _mm256_sub_epi32(n->past1[c], _mm256_and_si256(context[c], past1));
    }
}

static uint64_t estimate_refined_strip(const cg_rans_class *classes, const cg_rans_strip *strip,
                                       size_t n_rows)
{
    counts8 n[N_EIGHTS];
    int16_t some[2][CG_RANS_LANES] = {{0}};
    uint64_t cost = 0;
    memset(n, 0, sizeof n);
    for (size_t row = 0; row < n_rows; row++) {
        __m256i cells[N_EIGHTS], coarse[N_EIGHTS];
        load_cells(strip->cells + row * strip->row_stride, strip->n_lanes, some[0], cells);
        load_cells(strip->coarse + row * strip->coarse_stride, strip->n_lanes, some[1], coarse);
        for (unsigned i = 0; i < N_EIGHTS; i++)
            count_refined(cells[i], coarse[i], &n[i]);
    }
    for (uint32_t lane = 0; lane < strip->n_lanes; lane++) {
        const cg_rans_class *cls = &classes[strip->lane_class[lane]];
        for (unsigned c = 0; c < CG_RANS_REFINE_CONTEXTS; c++) {
            const counts8 *of = &n[lane / 8];
            uint32_t all[8], past0[8], past1[8];
            _mm256_storeu_si256((void *)all, of->all[c]);
            _mm256_storeu_si256((void *)past0, of->past0[c]);
            _mm256_storeu_si256((void *)past1, of->past1[c]);
            const uint32_t k = lane % 8;
            cost += (uint64_t)(all[k] - past0[k]) * cls->refine_cost[c][0] +
                    (uint64_t)(past0[k] - past1[k]) * cls->refine_cost[c][1] +
                    (uint64_t)past1[k] * cls->refine_cost[c][2];
        }
    }
    return cost;
}

const cg_rans_strips CG_RANS_STRIPS = {decode_strip,   decode_refined_strip,
                                       encode_strip,   encode_refined_strip,
                                       estimate_strip, estimate_refined_strip};
