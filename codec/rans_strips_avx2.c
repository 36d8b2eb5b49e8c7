/* Decoding of strips on AVX2: the 32 states of a stream are four registers, and what lanes look up
 * is gathered where index 0 is not the one. */
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

/* Eight lanes of a strip. Lanes without a column have one symbol that takes every slot: their
 * states stay as they are. */
typedef struct lanes8 {
    __m256i freq0;          /* of index 0, whose cum is 0 */
    __m256i escape;         /* the first slot of the escape */
    __m256i packed, bucket; /* where the class's tables begin, from classes: in u32 */
    __m256i first;          /* in bytes */
    __m256i halved, top, shift;
} lanes8;

static inline __m256i load8(const void *at)
{
    return _mm256_loadu_si256(at);
}

static lanes8 load_lanes(const cg_rans_class *classes, const cg_rans_strip *strip,
                         uint32_t first_lane)
{
    uint32_t freq0[8], escape[8], base[8], halved[8], top[8], shift[8];
    for (uint32_t i = 0; i < 8; i++) {
        const bool is_column = first_lane + i < strip->n_lanes;
        const uint32_t k = is_column ? strip->lane_class[first_lane + i] : 0;
        const cg_rans_class *cls = &classes[k];
        freq0[i] = is_column ? cls->freq[0] : CG_RANS_SCALE;
        escape[i] = is_column ? cls->cum[cls->n_symbols - 1] : CG_RANS_SCALE;
        base[i] = k * (uint32_t)(sizeof *cls / 4);
        halved[i] = is_column && cls->escape_bits == 5;
        top[i] = is_column ? cls->top : 0;
        shift[i] = is_column ? cls->shift : 0;
    }
    const __m256i bases = load8(base);
    return (lanes8){
        .freq0 = load8(freq0),
        .escape = load8(escape),
        .packed = _mm256_add_epi32(bases, _mm256_set1_epi32(offsetof(cg_rans_class, packed) / 4)),
        .bucket = _mm256_add_epi32(bases, _mm256_set1_epi32(offsetof(cg_rans_class, bucket) / 4)),
        .first = _mm256_add_epi32(_mm256_slli_epi32(bases, 2),
                                  _mm256_set1_epi32(offsetof(cg_rans_class, first))),
        .halved = load8(halved),
        .top = load8(top),
        .shift = load8(shift)};
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
    const __m256i slot = _mm256_and_si256(*x, _mm256_set1_epi32(CG_RANS_SCALE - 1));
    const __m256i others = at_least(slot, l->freq0); /* index 0 is often the only one */
    const int *at = (const void *)classes;
    __m256i v = l->top, freq = l->freq0, past = slot; /* past = slot - cum */
    if (mask_of(others) != 0) {
        const __m256i bucket = _mm256_srli_epi32(slot, CG_RANS_BUCKET_SHIFT);
        __m256i packed = _mm256_mask_i32gather_epi32(
            l->freq0, at, _mm256_add_epi32(l->bucket, bucket), others, 4);
        __m256i index = _mm256_mask_i32gather_epi32(_mm256_setzero_si256(), at,
                                                    _mm256_add_epi32(l->first, bucket), others, 1);
        index = _mm256_and_si256(index, _mm256_set1_epi32(0xff));
        for (;;) {
            past = _mm256_sub_epi32(slot, _mm256_srli_epi32(packed, 16));
            freq = _mm256_and_si256(packed, low16);
            const __m256i missed = at_least(past, freq);
            if (mask_of(missed) == 0)
                break;
            index = _mm256_sub_epi32(index, missed);
            packed = _mm256_mask_i32gather_epi32(packed, at, _mm256_add_epi32(l->packed, index),
                                                 missed, 4);
        }
        /* Signed: (index + 1) / 2, negated for even indices; exponents: top - index. */
        const __m256i negated = _mm256_sub_epi32(_mm256_and_si256(index, l->halved), one);
        v = _mm256_srlv_epi32(_mm256_add_epi32(index, l->halved), l->halved);
        v = _mm256_add_epi32(_mm256_sub_epi32(_mm256_xor_si256(v, negated), negated), l->top);
    }
    *escaped_out = mask_of(at_least(slot, l->escape));
    *x =
        _mm256_add_epi32(_mm256_mullo_epi32(freq, _mm256_srli_epi32(*x, CG_RANS_SCALE_BITS)), past);
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

cg_status cg_rans_decode_strip_avx2(const cg_rans_class *classes, const cg_rans_strip *strip,
                                    size_t n_rows, uint32_t states[CG_RANS_LANES],
                                    cg_word_reader *words)
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

/* Eight lanes of a strip with coarse cells: where index 0 and index 1 end, by context. */
typedef struct refining8 {
    __m256i end0[CG_RANS_REFINE_CONTEXTS], end1[CG_RANS_REFINE_CONTEXTS];
} refining8;

static refining8 load_refining(const cg_rans_class *classes, const cg_rans_strip *strip,
                               uint32_t first_lane)
{
    refining8 l;
    for (unsigned c = 0; c < CG_RANS_REFINE_CONTEXTS; c++) {
        uint32_t end0[8], end1[8];
        for (uint32_t i = 0; i < 8; i++) {
            const bool is_column = first_lane + i < strip->n_lanes;
            const uint32_t packed =
                is_column ? classes[strip->lane_class[first_lane + i]].refine[c] : CG_RANS_SCALE;
            end0[i] = packed & 0xffff;
            end1[i] = end0[i] + (packed >> 16);
        }
        l.end0[c] = load8(end0);
        l.end1[c] = load8(end1);
    }
    return l;
}

/* The cells of eight lanes, without renormalization. */
static inline __m256i take_refined(const refining8 *l, __m256i coarse, __m256i *x)
{
    const __m256i one = _mm256_set1_epi32(1), scale = _mm256_set1_epi32(CG_RANS_SCALE),
                  magnitude = _mm256_abs_epi32(coarse);
    const __m256i is_one = _mm256_cmpeq_epi32(magnitude, one),
                  is_more = _mm256_cmpgt_epi32(magnitude, one);
    const __m256i end0 =
        _mm256_blendv_epi8(_mm256_blendv_epi8(l->end0[0], l->end0[1], is_one), l->end0[2], is_more);
    const __m256i end1 =
        _mm256_blendv_epi8(_mm256_blendv_epi8(l->end1[0], l->end1[1], is_one), l->end1[2], is_more);
    const __m256i slot = _mm256_and_si256(*x, _mm256_set1_epi32(CG_RANS_SCALE - 1));
    const __m256i past0 = at_least(slot, end0), past1 = at_least(slot, end1);
    const __m256i cum = _mm256_blendv_epi8(_mm256_and_si256(past0, end0), end1, past1);
    const __m256i end = _mm256_blendv_epi8(_mm256_blendv_epi8(end0, end1, past0), scale, past1);
    *x = _mm256_add_epi32(
        _mm256_mullo_epi32(_mm256_sub_epi32(end, cum), _mm256_srli_epi32(*x, CG_RANS_SCALE_BITS)),
        _mm256_sub_epi32(slot, cum));
    /* away from zero is up where the coarse cell is not negative */
    const __m256i down = _mm256_xor_si256(past1, _mm256_srai_epi32(coarse, 31));
    const __m256i d = _mm256_and_si256(past0, _mm256_or_si256(down, one));
    return _mm256_add_epi32(_mm256_add_epi32(coarse, _mm256_add_epi32(coarse, coarse)), d);
}

cg_status cg_rans_decode_refined_strip_avx2(const cg_rans_class *classes,
                                            const cg_rans_strip *strip, size_t n_rows,
                                            uint32_t states[CG_RANS_LANES], cg_word_reader *words)
{
    refining8 lanes[N_EIGHTS];
    __m256i x[N_EIGHTS], past = _mm256_setzero_si256();
    cg_word_reader in = *words;
    int16_t some[CG_RANS_LANES] = {0};
    for (unsigned i = 0; i < N_EIGHTS; i++)
        lanes[i] = load_refining(classes, strip, 8 * i);
    load_states(states, x);
    for (size_t row = 0; row < n_rows; row++) {
        const int16_t *coarse = strip->coarse + row * strip->coarse_stride;
        __m256i v[N_EIGHTS];
        if (strip->n_lanes < CG_RANS_LANES) {
            memcpy(some, coarse, strip->n_lanes * sizeof *coarse);
            coarse = some;
        }
        for (unsigned i = 0; i < N_EIGHTS; i++) {
            const __m128i eight = _mm_loadu_si128((const void *)(coarse + 8 * i));
            v[i] = take_refined(&lanes[i], _mm256_cvtepi16_epi32(eight), &x[i]);
            past = _mm256_or_si256(past, past_int16(v[i]));
        }
        renormalize32(x, &in);
        store_cells(v, strip->cells + row * strip->row_stride, strip->n_lanes);
    }
    store_states(x, states);
    *words = in;
    return _mm256_testz_si256(past, past) ? CG_OK : CG_ERR_CORRUPT;
}
