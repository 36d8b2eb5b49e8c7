/* codec/kernel_lists.h - lists words of 32 bits that are not zero: for the files that list quads
 * and pairs of symbols.
 *
 * Included by files that CMake compiles once per instruction set, from AVX2 on, and by no other.
 * Threads: pure functions.
 */
#ifndef CG_CODEC_KERNEL_LISTS_H
#define CG_CODEC_KERNEL_LISTS_H
#include "codec/kernel_vectors.h"
#include "codec/kernels.h"

#if defined(__AVX512BW__)
enum { LISTED_WORDS = 16 }; /* at once */

/* Lists the words of a register that are not zero, each with its index, which is first for the
 * first one, in order to list_out. Returns how many they are. LISTED_WORDS entries of list_out may
 * be overwritten. */
static inline uint32_t list_words(__m512i words, uint32_t first, cg_quad *list_out)
{
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high =
        _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    const __mmask16 found = _mm512_test_epi32_mask(words, words);
    const __m512i index =
        _mm512_maskz_compress_epi32(found, _mm512_add_epi32(lanes, _mm512_set1_epi32((int)first)));
    const __m512i symbols = _mm512_maskz_compress_epi32(found, words);
    _mm512_storeu_si512(list_out, _mm512_permutex2var_epi32(index, low, symbols));
    _mm512_storeu_si512(list_out + 8, _mm512_permutex2var_epi32(index, high, symbols));
    return (uint32_t)__builtin_popcount(found);
}
#elif defined(__AVX2__)
enum { LISTED_WORDS = 8 };

/* lanes_of_mask[mask]: the numbers of the lanes that a mask of eight has, in order, a byte each.
 * AVX2 has no compress. */
#define LANE_OF(m, lane)                                                                           \
    ((uint64_t)((m) >> (lane)&1) * (lane) << 8 * __builtin_popcount((m) & ((1 << (lane)) - 1)))
#define LANES_OF(m)                                                                                \
    (LANE_OF(m, 1) | LANE_OF(m, 2) | LANE_OF(m, 3) | LANE_OF(m, 4) | LANE_OF(m, 5) |               \
     LANE_OF(m, 6) | LANE_OF(m, 7))
#define LANES_OF_4(m) LANES_OF(m), LANES_OF((m) + 1), LANES_OF((m) + 2), LANES_OF((m) + 3)
#define LANES_OF_16(m) LANES_OF_4(m), LANES_OF_4((m) + 4), LANES_OF_4((m) + 8), LANES_OF_4((m) + 12)
#define LANES_OF_64(m)                                                                             \
    LANES_OF_16(m), LANES_OF_16((m) + 16), LANES_OF_16((m) + 32), LANES_OF_16((m) + 48)
static const uint64_t lanes_of_mask[256] = {LANES_OF_64(0), LANES_OF_64(64), LANES_OF_64(128),
                                            LANES_OF_64(192)};

static inline uint32_t list_words(__m256i words, uint32_t first, cg_quad *list_out)
{
    const __m256i zeros = _mm256_cmpeq_epi32(words, _mm256_setzero_si256());
    const unsigned found = ~(unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(zeros)) & 0xff;
    const __m256i lanes = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)lanes_of_mask[found]));
    const __m256i index = _mm256_add_epi32(lanes, _mm256_set1_epi32((int)first)),
                  symbols = _mm256_permutevar8x32_epi32(words, lanes);
    const __m256i low = _mm256_unpacklo_epi32(index, symbols),
                  high = _mm256_unpackhi_epi32(index, symbols);
    _mm256_storeu_si256((void *)list_out, _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_storeu_si256((void *)(list_out + 4), _mm256_permute2x128_si256(low, high, 0x31));
    return (uint32_t)__builtin_popcount(found);
}
#endif

#if defined(__AVX2__)
/* A register of cells from `cells` on, where n_left are left; zeros behind those. */
static inline vector_i load_cells(const int16_t *cells, size_t n_left)
{
#if defined(__AVX512BW__)
    return _mm512_maskz_loadu_epi16(n_left < 32 ? (1u << n_left) - 1 : ~0u, cells);
#else
    int16_t some[2 * LISTED_WORDS] = {0};
    if (n_left >= 2 * LISTED_WORDS)
        return V_SI(loadu)((const void *)cells);
    for (size_t i = 0; i < n_left; i++)
        some[i] = cells[i];
    return V_SI(loadu)((const void *)some);
#endif
}
#endif
#endif
